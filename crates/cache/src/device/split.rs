//! A device of which one range lies on another device. Knows no meaning of either.

use super::{Device, DeviceError};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A device whose bytes of one range are on another one. A transfer lies within the range or outside of it.
pub struct SplitDevice {
    main: Arc<dyn Device>,
    aside: Arc<dyn Device>,
    range: Range<u64>,
    /// Where the range begins on the other device.
    begin: u64,
    /// Whether the other device was written since its last flush.
    is_aside_dirty: AtomicBool,
}

impl SplitDevice {
    /// Puts `range` of `main` on `aside`, from `begin` on.
    pub fn new(main: Arc<dyn Device>, aside: Arc<dyn Device>, range: Range<u64>, begin: u64) -> Self {
        Self {
            main,
            aside,
            range,
            begin,
            is_aside_dirty: AtomicBool::new(false),
        }
    }

    /// The device of an offset, and the offset there.
    fn place(&self, off: u64) -> (&dyn Device, u64) {
        match self.range.contains(&off) {
            true => (&*self.aside, off - self.range.start + self.begin),
            false => (&*self.main, off),
        }
    }
}

impl Device for SplitDevice {
    fn name(&self) -> String {
        self.main.name()
    }

    fn len_bytes(&self) -> u64 {
        self.main.len_bytes()
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let (device, off) = self.place(off);
        device.read_at(off, out)
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        if self.range.contains(&off) {
            self.is_aside_dirty.store(true, Ordering::Release);
        }
        let (device, off) = self.place(off);
        device.write_at(off, data)
    }

    fn write_scattered(&self, pieces: &[(u64, &[u8])]) -> Result<(), DeviceError> {
        if pieces.iter().any(|(off, _)| self.range.contains(off)) {
            return pieces
                .iter()
                .try_for_each(|(off, data)| self.write_at(*off, data));
        }
        self.main.write_scattered(pieces)
    }

    fn flush(&self) -> Result<(), DeviceError> {
        if self.is_aside_dirty.swap(false, Ordering::AcqRel) {
            self.aside.flush()?;
        }
        self.main.flush()
    }

    fn moves_writes(&self) -> bool {
        self.main.moves_writes()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::SplitDevice;
    use crate::device::{CountingDevice, Device, MemoryDevice};
    use std::sync::Arc;

    #[test]
    fn range_is_on_the_other_device_and_is_flushed_when_it_was_written() {
        let counting = || Arc::new(CountingDevice::new(Arc::new(MemoryDevice::new(64 << 10))));
        let (main, aside) = (counting(), counting());
        let split = SplitDevice::new(main.clone(), aside.clone(), 8192..16384, 20480);
        split.write_at(4096, &[1; 4096]).unwrap();
        split.write_at(12288, &[2; 4096]).unwrap();
        split.flush().unwrap();
        split.flush().unwrap();
        let mut out = [0; 4096];
        aside.read_at(24576, &mut out).unwrap();
        assert_eq!(out, [2; 4096]);
        main.read_at(12288, &mut out).unwrap();
        assert_eq!(out, [0; 4096], "the range of the main device stays empty");
        split.read_at(12288, &mut out).unwrap();
        assert_eq!(out, [2; 4096]);
        assert_eq!((main.take().flushes, aside.take().flushes), (2, 1));
        split
            .write_scattered(&[(0, &[3; 4096]), (8192, &[4; 4096])])
            .unwrap();
        aside.read_at(20480, &mut out).unwrap();
        assert_eq!(out, [4; 4096]);
    }
}
