//! The ordered history of a simulated machine, and the contents that a crash at each point of it may leave.
//!
//! Contents that a power cut may leave (a process kill leaves everything stored):
//! - `Dax`: each 64-byte line written since the writing thread's last fence is as before, as after, or as
//!   after some of its stores; within a line each aligned 8-byte word varies independently.
//! - `DaxByStore`: the same for each line that was not fenced since it was streamed or written back; a store
//!   whose line is still in the cache is never made durable by a fence, but may become so at any time.
//! - `File`: each 4 KiB page stored to since its last sync is as before, as after, or as at some moment
//!   between; or its 512-byte sectors vary independently.
//! - `Block`: each 512-byte sector written since the last flush is as after any of its writes, or none.
//! - `Shm`: zeros.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::SimMedium;
use super::pages::{Pages, mix};

/// Index of a device in its world. Never reused.
pub(super) type DeviceIndex = usize;

#[derive(Clone)]
pub(super) enum Event {
    Store {
        device: DeviceIndex,
        thread: u64,
        off: u64,
        data: Arc<[u8]>,
        /// In the cache of the processor, until its line is written back.
        cached: bool,
    },
    /// A line is written back from the cache.
    WriteBack {
        device: DeviceIndex,
        thread: u64,
        line: u64,
    },
    Fence {
        thread: u64,
    },
    Sync {
        device: DeviceIndex,
        thread: u64,
        off: u64,
        len: u64,
    },
    Flush {
        device: DeviceIndex,
    },
    Trim {
        device: DeviceIndex,
        off: u64,
        len: u64,
    },
    Grow {
        device: DeviceIndex,
        len_bytes: u64,
    },
    Create {
        device: DeviceIndex,
        len_bytes: u64,
    },
    Remove {
        device: DeviceIndex,
    },
    Label(Arc<str>),
}

/// Kind of crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Crash {
    /// Every process dies: all stores survive.
    Kill,
    /// Every process dies in the middle of the next store, of which only the first words (their number
    /// depends on the seed) are stored.
    KillTorn(u64),
    /// The power fails; only fenced, synced or flushed bytes survive.
    PowerNone,
    /// The power fails; everything survives by luck.
    PowerAll,
    /// The power fails; the seed chooses which of the pending units survive.
    PowerSeeded(u64),
    /// The power fails; pending unit `k` (in order of device and offset, see `Recording::pending_units`)
    /// survives iff bit `k mod 64` is set. With at most 64 units, counting through the bits is exhaustive for
    /// whole units.
    PowerUnits(u64),
    /// The power fails; each pending atom (8 bytes of a line, a sector: never torn) survives or not
    /// independently, by the seed: all pending writes are torn.
    PowerWords(u64),
}

/// A store that a power cut may still undo: bytes, or `zeros` of a trim.
#[derive(Clone)]
struct Pending {
    device: DeviceIndex,
    thread: u64,
    off: u64,
    data: PendingData,
    /// No fence makes it durable before its line is written back.
    cached: bool,
}

#[derive(Clone)]
enum PendingData {
    Bytes(Arc<[u8]>, Range<usize>),
    Zeros(u64),
}

impl Pending {
    fn len(&self) -> u64 {
        match &self.data {
            PendingData::Bytes(_, range) => range.len() as u64,
            PendingData::Zeros(len) => *len,
        }
    }

    fn apply(&self, pages: &mut Pages) {
        match &self.data {
            PendingData::Bytes(bytes, range) => pages.write(self.off, &bytes[range.clone()]),
            PendingData::Zeros(len) => pages.zero(self.off, *len),
        }
    }

    /// Returns the part in `from..to` of the device, if any. A trim is never cut.
    fn part(&self, from: u64, to: u64) -> Option<Self> {
        let (begin, end) = (self.off.max(from), (self.off + self.len()).min(to));
        let PendingData::Bytes(bytes, range) = &self.data else {
            return None;
        };
        let skip = (begin.saturating_sub(self.off)) as usize;
        (begin < end).then(|| Self {
            off: begin,
            data: PendingData::Bytes(
                bytes.clone(),
                range.start + skip..range.start + skip + (end - begin) as usize,
            ),
            ..self.clone()
        })
    }
}

/// The machine at one point of its history.
#[derive(Clone)]
pub(super) struct Replay {
    /// Events applied.
    pub(super) at: usize,
    media: Arc<[SimMedium]>,
    /// Contents that survive a power cut.
    durable: Vec<Pages>,
    /// Contents that the processes see.
    current: Vec<Pages>,
    /// Length of each device; `None`: it does not exist (yet, or any more).
    lens: Vec<Option<u64>>,
    pending: Vec<Pending>,
}

impl Replay {
    pub(super) fn new(media: Arc<[SimMedium]>, base: &[Pages], lens: &[Option<u64>]) -> Self {
        let mut durable = base.to_vec();
        durable.resize(media.len(), Pages::default());
        let mut lens = lens.to_vec();
        lens.resize(media.len(), None);
        Self {
            at: 0,
            media,
            current: durable.clone(),
            durable,
            lens,
            pending: Vec::new(),
        }
    }

    pub(super) fn step(&mut self, event: &Event) {
        self.at += 1;
        match event {
            Event::Store {
                device,
                thread,
                off,
                data,
                cached,
            } => {
                self.current[*device].write(*off, data);
                if self.media[*device] != SimMedium::Shm {
                    let data = PendingData::Bytes(data.clone(), 0..data.len());
                    self.pending.push(Pending {
                        device: *device,
                        thread: *thread,
                        off: *off,
                        data,
                        cached: *cached,
                    });
                }
            }
            Event::WriteBack { device, thread, line } => self.write_back(*device, *thread, *line),
            Event::Fence { thread } => self.fence(*thread),
            Event::Sync {
                device,
                thread,
                off,
                len,
            } => match self.media[*device] {
                // The fence of a sync by stores is recorded by itself.
                SimMedium::DaxByStore(_) => {}
                SimMedium::Dax => self.fence(*thread),
                SimMedium::File => self.sync_file(*device, *off, *len),
                SimMedium::Shm | SimMedium::Block => {}
            },
            Event::Flush { device } => self.commit(|pending| pending.device == *device),
            Event::Trim { device, off, len } => {
                self.current[*device].zero(*off, *len);
                self.pending.push(Pending {
                    device: *device,
                    thread: 0,
                    off: *off,
                    data: PendingData::Zeros(*len),
                    cached: false,
                });
            }
            Event::Grow { device, len_bytes } | Event::Create { device, len_bytes } => {
                self.lens[*device] = Some(*len_bytes);
            }
            Event::Remove { device } => {
                self.lens[*device] = None;
                self.durable[*device] = Pages::default();
                self.current[*device] = Pages::default();
                self.pending.retain(|pending| pending.device != *device);
            }
            Event::Label(_) => {}
        }
    }

    fn commit(&mut self, which: impl Fn(&Pending) -> bool) {
        let (done, rest) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|pending| which(pending));
        self.pending = rest;
        let done: Vec<Pending> = done;
        done.iter()
            .for_each(|pending| pending.apply(&mut self.durable[pending.device]));
    }

    /// Takes the stores to a line out of the cache, whichever thread made them: the next fence of `thread`
    /// makes them durable.
    fn write_back(&mut self, device: DeviceIndex, thread: u64, line: u64) {
        let inside = line..line + self.media[device].unit_bytes();
        for pending in &mut self.pending {
            if pending.cached && pending.device == device && inside.contains(&pending.off) {
                pending.cached = false;
                pending.thread = thread;
            }
        }
    }

    /// Commits a thread's stores to persistent memory, and older stores of other threads to the same words:
    /// memory is coherent, so an older store can never overwrite a newer one.
    fn fence(&mut self, thread: u64) {
        let media = self.media.clone();
        let dax = |pending: &Pending| media[pending.device].is_dax();
        let is_done = |pending: &Pending| pending.thread == thread && !pending.cached;
        let mut newer: Vec<(DeviceIndex, Range<u64>)> = Vec::new();
        let mut keep = vec![true; self.pending.len()];
        let mixed = self
            .pending
            .iter()
            .any(|pending| !is_done(pending) && dax(pending));
        for (index, pending) in self
            .pending
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, pending)| dax(pending))
        {
            let words = pending.off / 8 * 8..(pending.off + pending.len()).next_multiple_of(8);
            let covered = || {
                let meets = |range: &Range<u64>| range.start < words.end && words.start < range.end;
                newer
                    .iter()
                    .any(|(device, range)| *device == pending.device && meets(range))
            };
            if is_done(pending) || covered() {
                keep[index] = false;
                if mixed {
                    newer.push((pending.device, words));
                }
            }
        }
        let mut keep = keep.into_iter();
        let pending = std::mem::take(&mut self.pending);
        for pending in pending {
            if keep.next() == Some(true) {
                self.pending.push(pending);
            } else {
                pending.apply(&mut self.durable[pending.device]);
            }
        }
    }

    fn sync_file(&mut self, device: DeviceIndex, off: u64, len: u64) {
        let page = super::pages::PAGE_BYTES as u64;
        let (from, to) = (off / page * page, (off + len).next_multiple_of(page));
        for pending in std::mem::take(&mut self.pending) {
            if pending.device != device {
                self.pending.push(pending);
                continue;
            }
            if let Some(inside) = pending.part(from, to) {
                inside.apply(&mut self.durable[device]);
            }
            self.pending.extend(pending.part(0, from));
            self.pending.extend(pending.part(to, u64::MAX));
        }
    }

    /// The pending units in order, each with its index.
    pub(super) fn units(&self) -> BTreeMap<(DeviceIndex, u64), usize> {
        let mut units = BTreeMap::new();
        for pending in &self.pending {
            let unit = self.media[pending.device].unit_bytes();
            match pending.data {
                PendingData::Bytes(..) => {
                    let last = (pending.off + pending.len()).div_ceil(unit);
                    units.extend((pending.off / unit..last).map(|unit| ((pending.device, unit), 0)));
                }
                PendingData::Zeros(_) => {
                    units.insert((pending.device, pending.off / unit), 0);
                }
            }
        }
        units
            .values_mut()
            .enumerate()
            .for_each(|(index, unit)| *unit = index);
        units
    }

    /// Returns the contents after a crash here; `next` is the event that the crash interrupts.
    pub(super) fn crash(&self, crash: Crash, next: Option<&Event>) -> (Vec<Pages>, Vec<Option<u64>>) {
        let mut pages = match crash {
            Crash::Kill | Crash::KillTorn(_) => self.current.clone(),
            _ => self.durable.clone(),
        };
        match crash {
            Crash::Kill => {}
            Crash::KillTorn(seed) => {
                if let Some(Event::Store {
                    device, off, data, ..
                }) = next
                {
                    let words = (data.len() / 8) as u64;
                    let whole = (mix(seed ^ self.at as u64) % (words + 1)) as usize * 8;
                    pages[*device].write(*off, &data[..whole]);
                }
            }
            Crash::PowerNone => self.lose_shm(&mut pages),
            Crash::PowerAll => {
                self.pending
                    .iter()
                    .for_each(|pending| pending.apply(&mut pages[pending.device]));
                self.lose_shm(&mut pages);
            }
            Crash::PowerSeeded(seed) => {
                self.apply_seeded(&mut pages, seed);
                self.lose_shm(&mut pages);
            }
            Crash::PowerUnits(bits) => {
                self.apply_units(&mut pages, bits);
                self.lose_shm(&mut pages);
            }
            Crash::PowerWords(seed) => {
                self.apply_words(&mut pages, seed);
                self.lose_shm(&mut pages);
            }
        }
        (pages, self.lens.clone())
    }

    fn lose_shm(&self, pages: &mut [Pages]) {
        let media = self.media.iter().zip(pages);
        media
            .filter(|(medium, _)| **medium == SimMedium::Shm)
            .for_each(|(_, pages)| *pages = Pages::default());
    }

    fn apply_units(&self, pages: &mut [Pages], bits: u64) {
        let units = self.units();
        for pending in &self.pending {
            let unit = self.media[pending.device].unit_bytes();
            let chosen = |at: u64| {
                units
                    .get(&(pending.device, at / unit))
                    .is_some_and(|k| bits >> (k % 64) & 1 == 1)
            };
            pending.apply_where(&mut pages[pending.device], unit, chosen);
        }
    }

    /// Applies to each atom all stores before a cut of its own.
    fn apply_words(&self, pages: &mut [Pages], seed: u64) {
        let stores = self.pending.len() as u64;
        for (index, pending) in self.pending.iter().enumerate() {
            let atom = self.media[pending.device].atom_bytes();
            let device_seed = mix(seed ^ mix(pending.device as u64));
            let chosen = |at: u64| {
                let dice = mix(device_seed ^ mix(at / atom));
                let cut = match dice % 3 {
                    0 => 0,
                    1 => stores,
                    _ => mix(dice) % (stores + 1),
                };
                (index as u64) < cut
            };
            pending.apply_where(&mut pages[pending.device], atom, chosen);
        }
    }

    /// Applies to each unit all stores before a cut of its own, so that it holds its contents of some moment.
    /// The seed also decides how the cuts of units are correlated: where thousands of units are pending,
    /// independent cuts would never leave one structure whole and another not.
    fn apply_seeded(&self, pages: &mut [Pages], seed: u64) {
        let stores = self.pending.len() as u64;
        let manner = mix(seed ^ 0x006d_616e) % 8;
        // One unit that differs from all others, in the middle of some store.
        let odd = (stores > 0).then(|| {
            let pending = &self.pending[(mix(seed) % stores) as usize];
            let unit = self.media[pending.device].unit_bytes();
            (
                pending.device,
                (pending.off + mix(seed ^ 1) % pending.len().max(1)) / unit,
            )
        });
        for (index, pending) in self.pending.iter().enumerate() {
            let medium = self.media[pending.device];
            let (unit, atom) = (medium.unit_bytes(), medium.atom_bytes());
            let device_seed = mix(seed ^ mix(pending.device as u64));
            let chosen = |at: u64| {
                let dice = mix(device_seed ^ mix(at / unit));
                let all_or_none = |all: bool| if all { stores } else { 0 };
                let cut = match manner {
                    // Nearly all, or nearly nothing.
                    3 => all_or_none(!dice.is_multiple_of(16)),
                    4 => all_or_none(dice.is_multiple_of(16)),
                    // Devices that are fast and slow: all stores of one and none of another, or each as of
                    // some moment.
                    5 => all_or_none(device_seed.is_multiple_of(2)),
                    6 => mix(device_seed ^ 2) % (stores + 1),
                    7 => all_or_none((odd == Some((pending.device, at / unit))) == seed.is_multiple_of(2)),
                    _ => match dice % 8 {
                        0..=2 => 0,
                        3..=5 => stores,
                        6 => mix(dice) % (stores + 1),
                        _ => mix(dice ^ mix(at / atom)) % (stores + 1),
                    },
                };
                (index as u64) < cut
            };
            pending.apply_where(&mut pages[pending.device], atom, chosen);
        }
    }
}

impl Pending {
    /// Applies the pieces, cut at multiples of `step`, whose offset is chosen.
    fn apply_where(&self, pages: &mut Pages, step: u64, chosen: impl Fn(u64) -> bool) {
        let PendingData::Bytes(bytes, range) = &self.data else {
            if chosen(self.off) {
                self.apply(pages);
            }
            return;
        };
        let (mut at, end) = (self.off, self.off + range.len() as u64);
        while at < end {
            // Neighbours with the same choice are written at once.
            let first = chosen(at);
            let mut stop = (at / step + 1) * step;
            while stop < end && chosen(stop) == first {
                stop += step;
            }
            let stop = stop.min(end);
            if first {
                let from = range.start + (at - self.off) as usize;
                pages.write(at, &bytes[from..from + (stop - at) as usize]);
            }
            at = stop;
        }
    }
}
