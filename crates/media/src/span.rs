//! Several block devices as one: each has a run of the whole's bytes. The one place that knows which device a
//! byte of a tier lies on. Decides nothing about content, and keeps no redundancy.
//!
//! What is asked of several devices at once is done on all of them at the same time. A device that fails
//! fails alone: errors name it, and the others go on.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::lock::RwLock;

use crate::block::FileDevice;
use crate::emulated::{DiskModel, EmulatedDisk};
use crate::error::{DeviceName, MediaError};
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind, ReaderPart};

/// Most devices of one span.
pub const SPAN_DEVICES_MAX: usize = 64;

/// One device and its run.
pub struct SpanPart {
    /// Its first byte in the whole.
    pub first_byte: u64,
    /// Bytes of the whole that lie on it.
    pub len_bytes: u64,
    /// Byte of the device at which its run begins.
    pub data_offset: u64,
    /// The device; `None`: it is gone, and nothing lies in its run.
    pub device: Option<Arc<dyn BlockDevice>>,
}

/// A part, and which of its writes are durable.
struct Part {
    /// Of a part of another process' whole, its number there.
    index: u8,
    first_byte: u64,
    len_bytes: u64,
    data_offset: u64,
    device: RwLock<Option<Arc<dyn BlockDevice>>>,
    /// Writes that returned, and how many of them the last flush covers.
    written: AtomicU64,
    flushed: AtomicU64,
    /// Its history must be the same in each run of a test.
    simulated: bool,
    /// Nothing more is written to it.
    given_up: AtomicBool,
}

impl Part {
    fn end(&self) -> u64 {
        self.first_byte.saturating_add(self.len_bytes)
    }

    fn device(&self) -> Result<Arc<dyn BlockDevice>, MediaError> {
        self.device.read().clone().ok_or_else(|| MediaError::Refused {
            device: DeviceName::from("a device that was removed"),
            why: "nothing can be on it any more".into(),
        })
    }

    /// The device, and where a byte of the whole lies on it.
    fn at(&self, off: u64) -> Result<(Arc<dyn BlockDevice>, u64), MediaError> {
        let on_device = off - self.first_byte + self.data_offset;
        Ok((self.device()?, on_device))
    }

    /// The device for a write.
    fn at_for_write(&self, off: u64) -> Result<(Arc<dyn BlockDevice>, u64), MediaError> {
        let found = self.at(off)?;
        match self.given_up.load(Ordering::Acquire) {
            false => Ok(found),
            true => Err(MediaError::Failed {
                device: found.0.name(),
                reason: "an earlier write to it failed".into(),
            }),
        }
    }

    fn note_write(&self) {
        self.written.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether something was written that no flush covers.
    fn waits(&self) -> bool {
        let given_up = self.given_up.load(Ordering::Acquire);
        !given_up && self.flushed.load(Ordering::Acquire) < self.written.load(Ordering::Acquire)
    }

    fn flush(&self) -> Result<(), MediaError> {
        let written = self.written.load(Ordering::Acquire);
        // One that was let go meanwhile holds nothing that anybody needs.
        let device = self.device.read().clone();
        device.map_or(Ok(()), |device| device.flush())?;
        self.flushed.fetch_max(written, Ordering::AcqRel);
        Ok(())
    }
}

/// The whole. Parts are added at its end and never taken away.
pub struct Span {
    parts: Box<[OnceLock<Part>]>,
    count: AtomicUsize,
}

impl Span {
    /// Makes a whole of these parts, which lie one after the other from byte 0 on.
    ///
    /// # Errors
    /// As [`add`](Self::add).
    pub fn new(parts: impl IntoIterator<Item = SpanPart>) -> Result<Self, MediaError> {
        let span = Self {
            parts: (0..SPAN_DEVICES_MAX).map(|_| OnceLock::new()).collect(),
            count: AtomicUsize::new(0),
        };
        parts.into_iter().try_for_each(|part| span.add(part))?;
        Ok(span)
    }

    /// Adds a part at the end. Call by one thread at a time.
    ///
    /// # Errors
    /// `Refused`: it does not follow the last, its device is too short, or there are too many.
    pub fn add(&self, part: SpanPart) -> Result<(), MediaError> {
        self.add_as(u8::MAX, part)
    }

    fn add_as(&self, index: u8, part: SpanPart) -> Result<(), MediaError> {
        let name = part
            .device
            .as_ref()
            .map_or_else(|| DeviceName::from("a device"), |device| device.name());
        let refuse = |why: String| {
            Err(MediaError::Refused {
                device: name.clone(),
                why: why.into(),
            })
        };
        if part.first_byte != self.len_bytes() {
            return refuse(format!("it does not follow at byte {}", self.len_bytes()));
        }
        let needed = part.data_offset.saturating_add(part.len_bytes);
        if let Some(device) = &part.device
            && device.len_bytes() < needed
        {
            return refuse(format!(
                "it has {} bytes, and {needed} are needed",
                device.len_bytes()
            ));
        }
        let count = self.count.load(Ordering::Acquire);
        let added = self.parts.get(count).is_some_and(|place| {
            let device = part.device.as_ref();
            let part = Part {
                index,
                simulated: device.is_some_and(|device| device.info().kind == MediumKind::Sim),
                first_byte: part.first_byte,
                len_bytes: part.len_bytes,
                data_offset: part.data_offset,
                device: RwLock::new(part.device),
                written: AtomicU64::new(0),
                flushed: AtomicU64::new(0),
                given_up: AtomicBool::new(false),
            };
            place.set(part).is_ok()
        });
        if !added {
            return refuse(format!("a tier has at most {SPAN_DEVICES_MAX} devices"));
        }
        self.count.store(count + 1, Ordering::Release);
        Ok(())
    }

    /// Makes the whole that another process reads by these parts ([`BlockDevice::reader_parts`]). What lies
    /// in none of them cannot be read.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_reader_parts(parts: impl IntoIterator<Item = ReaderPart>) -> Result<Self, MediaError> {
        let span = Self::new([])?;
        for part in parts {
            let gap = part.first_byte.saturating_sub(span.len_bytes());
            if gap > 0 {
                span.add(SpanPart {
                    first_byte: span.len_bytes(),
                    len_bytes: gap,
                    data_offset: 0,
                    device: None,
                })?;
            }
            let file: Arc<dyn BlockDevice> = Arc::new(FileDevice::of_reader(part.file)?);
            let found = SpanPart {
                first_byte: part.first_byte,
                len_bytes: part.len_bytes,
                data_offset: part.data_offset,
                device: Some(match part.emulated {
                    true => Arc::new(EmulatedDisk::new(file, DiskModel::SSD)),
                    false => file,
                }),
            };
            span.add_as(part.index, found)?;
        }
        Ok(span)
    }

    /// Returns the device of each part, `None` where it is gone.
    pub fn devices(&self) -> Vec<Option<Arc<dyn BlockDevice>>> {
        self.parts().map(|part| part.device.read().clone()).collect()
    }

    /// Refuses all writes to a part from here on, and leaves it out when all is flushed: what was written to
    /// it and is not durable is given up. It is read as before.
    pub fn give_up(&self, index: usize) {
        if let Some(part) = self.parts().nth(index) {
            part.given_up.store(true, Ordering::Release);
        }
    }

    /// Lets go of the device of a part on which nothing is any more, and returns it: it is neither written
    /// nor flushed from here on, and is closed when the caller drops it.
    pub fn remove(&self, index: usize) -> Option<Arc<dyn BlockDevice>> {
        self.give_up(index);
        self.parts().nth(index)?.device.write().take()
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let count = self.count.load(Ordering::Acquire);
        self.parts[..count].iter().filter_map(OnceLock::get)
    }

    fn part(&self, off: u64, len: u64) -> Result<&Part, MediaError> {
        let end = off.saturating_add(len);
        let found = self
            .parts()
            .find(|part| part.first_byte <= off && off < part.end().max(part.first_byte + 1));
        match found {
            Some(part) if end <= part.end() => Ok(part),
            _ => Err(MediaError::OutOfRange {
                device: self.name(),
                off,
                len,
                size_bytes: found.map_or(self.len_bytes(), Part::end),
            }),
        }
    }

    /// Runs `each` for these parts: at the same time, unless they are simulated. The first error counts.
    fn on_all(
        &self,
        parts: &[&Part],
        each: &(dyn Fn(usize) -> Result<(), MediaError> + Sync),
    ) -> Result<(), MediaError> {
        if parts.len() < 2 || parts.iter().any(|part| part.simulated) {
            return (0..parts.len()).try_for_each(each);
        }
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..parts.len())
                .map(|index| scope.spawn(move || each(index)))
                .collect();
            let mut result = each(0);
            for other in others {
                let ended = other.join();
                result = result.and(ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            }
            result
        })
    }

    /// Returns which parts the ranges lie on, and the numbers of the ranges on each.
    fn split(
        &self,
        ranges: impl Iterator<Item = (u64, usize)>,
    ) -> Result<Vec<(&Part, Vec<usize>)>, MediaError> {
        let mut out: Vec<(&Part, Vec<usize>)> = Vec::new();
        for (index, (off, len)) in ranges.enumerate() {
            let part = self.part(off, len as u64)?;
            match out.iter_mut().find(|(other, _)| std::ptr::eq(*other, part)) {
                Some((_, indices)) => indices.push(index),
                None => out.push((part, vec![index])),
            }
        }
        Ok(out)
    }
}

impl BlockDevice for Span {
    fn len_bytes(&self) -> u64 {
        self.parts().last().map_or(0, Part::end)
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let (device, at) = self.part(off, out.len() as u64)?.at(off)?;
        device.read(at, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let part = self.part(off, src.len() as u64)?;
        let (device, at) = part.at_for_write(off)?;
        let written = device.write(at, src);
        // Also what a failed write has left must not be taken for durable.
        part.note_write();
        written
    }

    fn write_durable(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        let (device, at) = self.part(off, src.len() as u64)?.at_for_write(off)?;
        device.write_durable(at, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        let waiting: Vec<&Part> = self.parts().filter(|part| part.waits()).collect();
        self.on_all(&waiting, &|index| waiting[index].flush())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        let (device, at) = self.part(off, len)?.at(off)?;
        device.trim(at, len)
    }

    fn read_batch(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let split = self.split(ranges.iter().map(|(off, out)| (*off, out.len())))?;
        if let [(part, _)] = split[..] {
            let device = part.device()?;
            let shift = |off: u64| part.at(off).map(|(_, at)| at);
            let moved = ranges.iter_mut().map(|(off, out)| Ok((shift(*off)?, &mut **out)));
            let mut moved: Vec<(u64, &mut [u8])> = moved.collect::<Result<_, MediaError>>()?;
            return device.read_batch(&mut moved);
        }
        let mut slots: Vec<Option<&mut [u8]>> = Vec::new();
        let mut offs = Vec::new();
        for (off, out) in ranges.iter_mut() {
            slots.push(Some(&mut **out));
            offs.push(*off);
        }
        let mut work = Vec::new();
        for (part, indices) in &split {
            let mut moved = Vec::new();
            for index in indices {
                if let Some(out) = slots[*index].take() {
                    moved.push((part.at(offs[*index])?.1, out));
                }
            }
            work.push(crate::lock::Mutex::new(moved));
        }
        let parts: Vec<&Part> = split.iter().map(|(part, _)| *part).collect();
        self.on_all(&parts, &|index| {
            parts[index].device()?.read_batch(&mut work[index].lock())
        })
    }

    fn write_batch(&self, ranges: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let split = self.split(ranges.iter().map(|(off, src)| (*off, src.len())))?;
        let parts: Vec<&Part> = split.iter().map(|(part, _)| *part).collect();
        self.on_all(&parts, &|index| {
            let (part, indices) = &split[index];
            let moved = indices
                .iter()
                .map(|range| Ok((part.at_for_write(ranges[*range].0)?.1, ranges[*range].1)));
            let moved: Vec<(u64, &[u8])> = moved.collect::<Result<_, MediaError>>()?;
            let written = part.device()?.write_batch(&moved);
            part.note_write();
            written
        })
    }

    fn let_go(&self, gone: u64) {
        for part in self
            .parts()
            .filter(|part| part.index < 64 && gone >> part.index & 1 != 0)
        {
            part.device.write().take();
        }
    }

    fn gone_parts(&self) -> u64 {
        let parts = (0..64).zip(self.parts());
        let gone = parts.filter(|(_, part)| part.device.read().is_none());
        gone.fold(0, |bits, (index, _)| bits | 1_u64 << index)
    }

    fn reader_parts(&self) -> Vec<ReaderPart> {
        let of = |(index, part): (u8, &Part)| {
            let device = part.device.read().clone()?;
            let whole = device
                .reader_parts()
                .pop()
                .filter(|whole| whole.first_byte == 0)?;
            let fits = part.data_offset.checked_add(part.len_bytes)? <= whole.len_bytes;
            fits.then_some(ReaderPart {
                index,
                first_byte: part.first_byte,
                len_bytes: part.len_bytes,
                data_offset: whole.data_offset + part.data_offset,
                ..whole
            })
        };
        (0..).zip(self.parts()).filter_map(of).collect()
    }

    fn state(&self) -> DeviceState {
        let devices = self.devices().into_iter().flatten();
        devices
            .map(|device| device.state())
            .find(|state| *state != DeviceState::Ok)
            .unwrap_or(DeviceState::Ok)
    }

    fn info(&self) -> DeviceInfo {
        let devices = self.devices().into_iter().flatten();
        let infos: Vec<DeviceInfo> = devices.map(|device| device.info()).collect();
        let join = |texts: Vec<&str>| texts.join(" + ");
        match &infos[..] {
            [one] => one.clone(),
            _ => DeviceInfo {
                name: join(infos.iter().map(|info| info.name.as_str()).collect()).into(),
                kind: infos.first().map_or(MediumKind::Block, |info| info.kind),
                backend: join(infos.iter().map(|info| info.backend.as_str()).collect()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::sim::SimWorld;

    fn of(world: &SimWorld) -> Span {
        let part = |first_byte, len_bytes, data_offset, name: &str| SpanPart {
            first_byte,
            len_bytes,
            data_offset,
            device: world.block(name).map(|device| device as _),
        };
        Span::new([
            part(0, 8192, 0, "a"),
            part(8192, 16384, 4096, "b"),
            part(24576, 4096, 4096, "gone"),
        ])
        .unwrap()
    }

    fn world() -> SimWorld {
        let world = SimWorld::new();
        world.add_block("a", 8192);
        world.add_block("b", 20480);
        world
    }

    #[test]
    fn each_byte_lies_on_its_device_and_no_range_crosses() {
        let world = world();
        let span = of(&world);
        assert_eq!(span.len_bytes(), 28672);
        span.write(4096, &[1; 4096]).unwrap();
        span.write_batch(&[(0, &[2; 4096]), (8192, &[3; 8192])]).unwrap();
        let mut out = [[0; 4096]; 2];
        let [one, other] = &mut out;
        span.read_batch(&mut [(12288, &mut one[..]), (4096, &mut other[..])])
            .unwrap();
        assert_eq!((out[0], out[1]), ([3; 4096], [1; 4096]));
        let mut raw = [0; 4096];
        world.block("b").unwrap().read(4096, &mut raw).unwrap();
        assert_eq!(raw, [3; 4096]);
        for (off, len) in [(4096, 8192), (20480, 8192), (28672, 4096)] {
            let error = span.write(off, &vec![0; len]).unwrap_err();
            assert!(matches!(error, MediaError::OutOfRange { .. }), "{error}");
        }
        let gone = span.read(24576, &mut raw).unwrap_err();
        assert!(gone.to_string().contains("was removed"), "{gone}");
    }

    #[test]
    fn flush_reaches_what_was_written_and_nothing_else() {
        let world = world();
        let disks = ["a", "b"].map(|name| {
            Arc::new(EmulatedDisk::new(
                world.block(name).unwrap() as _,
                DiskModel::NONE,
            ))
        });
        let part = |first_byte, data_offset, index: usize| SpanPart {
            first_byte,
            len_bytes: 8192,
            data_offset,
            device: Some(Arc::clone(&disks[index]) as _),
        };
        let span = Span::new([part(0, 0, 0), part(8192, 4096, 1)]).unwrap();
        let flushes = || [disks[0].counts().flushes, disks[1].counts().flushes];
        span.flush().unwrap();
        assert_eq!(flushes(), [0, 0]);
        span.write(8192, &[1; 4096]).unwrap();
        span.flush().unwrap();
        span.flush().unwrap();
        assert_eq!(flushes(), [0, 1]);
        span.write_batch(&[(0, &[2; 4096]), (12288, &[3; 4096])]).unwrap();
        span.flush().unwrap();
        assert_eq!(flushes(), [1, 2]);
    }

    #[test]
    fn device_that_is_removed_is_let_go_and_its_run_stays() {
        let world = world();
        let span = of(&world);
        span.write(8192, &[1; 4096]).unwrap();
        let removed = span.remove(1).unwrap();
        let held = Arc::downgrade(&removed);
        drop(removed);
        assert!(held.upgrade().is_none(), "nothing keeps it open");
        // What was written to it and is not durable waits for no flush.
        span.flush().unwrap();
        for gone in [span.write(8192, &[1; 4096]), span.read(8192, &mut [0; 4096])] {
            assert!(gone.unwrap_err().to_string().contains("was removed"));
        }
        span.write(0, &[1; 4096]).unwrap();
        assert_eq!((span.len_bytes(), span.devices().len()), (28672, 3));
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let world = world();
        let span = of(&world);
        let part = |first_byte, len_bytes| SpanPart {
            first_byte,
            len_bytes,
            data_offset: 0,
            device: world.block("a").map(|device| device as _),
        };
        for (first, len) in [(0, 4096), (28672, 12288)] {
            assert!(span.add(part(first, len)).is_err());
        }
        span.add(part(28672, 8192)).unwrap();
        assert_eq!((span.len_bytes(), span.devices().len()), (36864, 4));
    }

    #[test]
    fn reader_has_the_same_bytes_until_it_lets_a_device_go() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, len| {
            let made = FileDevice::create(&dir.path().join(name), len, crate::BlockOptions::default());
            Some(Arc::new(made.unwrap()) as Arc<dyn BlockDevice>)
        };
        let part = |first_byte, len_bytes, data_offset, device| SpanPart {
            first_byte,
            len_bytes,
            data_offset,
            device,
        };
        let world = world();
        let own = Span::new([
            part(0, 8192, 0, file("a", 8192)),
            // Memory of this process, which no other one can read.
            part(8192, 8192, 0, world.block("a").map(|device| device as _)),
            part(16384, 16384, 4096, file("c", 20480)),
        ])
        .unwrap();
        for (at, byte) in [(0, 1), (4096, 2), (8192, 3), (16384, 4), (28672, 5)] {
            own.write(at, &[byte; 4096]).unwrap();
        }
        let others = Span::of_reader_parts(own.reader_parts()).unwrap();
        let read = |at| {
            let mut out = [0; 4096];
            others.read(at, &mut out).map(|()| out[4095]).ok()
        };
        let all = || [0, 4096, 8192, 16384, 28672].map(read);
        assert_eq!(all(), [Some(1), Some(2), None, Some(4), Some(5)]);
        let refused = others.write(0, &[9; 4096]).unwrap_err();
        assert!(refused.to_string().contains("Bad file descriptor"), "{refused}");
        own.write(4096, &[7; 4096]).unwrap();
        assert_eq!(read(4096), Some(7));
        others.let_go(1 << 2 | 1 << 63);
        assert_eq!(all(), [Some(1), Some(7), None, None, None]);
    }
}
