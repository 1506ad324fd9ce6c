//! Media that look writable and change nothing: writes stay in memory. For inspecting a stopped pool, whose
//! journal must be replayed to be read. Owns the overlay; knows nothing of its content.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use varve_media::{BlockDevice, DeviceInfo, DeviceState, MediaError, Region};

const BLOCK: u64 = 4096;

/// Written blocks, over the medium below.
#[derive(Default)]
struct Overlay {
    blocks: Mutex<HashMap<u64, Box<[u8; BLOCK as usize]>>>,
}

impl Overlay {
    /// Copies written blocks over `out`, which was read from below at `off`.
    fn show(&self, off: u64, out: &mut [u8]) {
        let blocks = self.blocks.lock();
        if blocks.is_empty() {
            return;
        }
        for (block, within, at, n) in parts(off, out.len()) {
            if let Some(bytes) = blocks.get(&block) {
                out[at..at + n].copy_from_slice(&bytes[within..within + n]);
            }
        }
    }

    /// Takes a write; `read` fetches partly written blocks from below, where `size_bytes` is the length.
    fn take(
        &self,
        off: u64,
        src: &[u8],
        size_bytes: u64,
        read: impl Fn(u64, &mut [u8]) -> Result<(), MediaError>,
    ) -> Result<(), MediaError> {
        let mut blocks = self.blocks.lock();
        for (block, within, at, n) in parts(off, src.len()) {
            let bytes = match blocks.entry(block) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let mut bytes = Box::new([0; BLOCK as usize]);
                    if n < bytes.len() {
                        let start = block * BLOCK;
                        let have = size_bytes.saturating_sub(start).min(BLOCK) as usize;
                        read(start, &mut bytes[..have])?;
                    }
                    place.insert(bytes)
                }
            };
            bytes[within..within + n].copy_from_slice(&src[at..at + n]);
        }
        Ok(())
    }
}

/// A region over another one that takes every write into memory.
pub struct ScratchRegion {
    below: Arc<dyn Region>,
    changed: Overlay,
}

impl ScratchRegion {
    /// Starts without changes.
    #[must_use]
    pub fn new(below: Arc<dyn Region>) -> Self {
        Self {
            below,
            changed: Overlay::default(),
        }
    }

    fn check(&self, off: u64, len: u64) -> Result<(), MediaError> {
        let size_bytes = self.below.len_bytes();
        if off.checked_add(len).is_some_and(|end| end <= size_bytes) {
            return Ok(());
        }
        Err(MediaError::OutOfRange {
            device: self.below.info().name,
            off,
            len,
            size_bytes,
        })
    }
}

/// Splits `off..off + len` by block: number, offset in the block, offset in the buffer, length.
fn parts(off: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = off + done as u64;
        let within = (at % BLOCK) as usize;
        let n = (BLOCK as usize - within).min(len - done);
        let part = (at / BLOCK, within, done, n);
        done += n;
        Some(part)
    })
}

impl Region for ScratchRegion {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.below.read(off, out)?;
        self.changed.show(off, out);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.check(off, src.len() as u64)?;
        self.changed.take(off, src, self.below.len_bytes(), |at, out| {
            self.below.read(at, out)
        })
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.write(off, src)?;
        Ok(varve_media::crc32c_append(seed, src))
    }

    fn fence(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check(off, len)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        if new_len <= self.len_bytes() {
            return Ok(());
        }
        Err(MediaError::ReadOnly {
            device: self.below.info().name,
        })
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check(off, len)
    }

    fn state(&self) -> DeviceState {
        self.below.state()
    }

    fn info(&self) -> DeviceInfo {
        let mut info = self.below.info();
        info.backend = format!("for looking only; {}", info.backend);
        info
    }
}

/// A block device over another one that takes every write into memory.
pub struct ScratchDevice {
    below: Arc<dyn BlockDevice>,
    changed: Overlay,
}

impl ScratchDevice {
    /// Starts without changes.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>) -> Self {
        Self {
            below,
            changed: Overlay::default(),
        }
    }
}

impl BlockDevice for ScratchDevice {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.below.read(off, out)?;
        self.changed.show(off, out);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.changed.take(off, src, self.below.len_bytes(), |at, out| {
            self.below.read(at, out)
        })
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn trim(&self, _off: u64, _len: u64) -> Result<(), MediaError> {
        Ok(())
    }

    fn state(&self) -> DeviceState {
        self.below.state()
    }

    fn info(&self) -> DeviceInfo {
        self.below.info()
    }
}

/// A block device that refuses to be written.
pub struct ReadOnlyDevice {
    below: Arc<dyn BlockDevice>,
}

impl ReadOnlyDevice {
    /// Wraps a device: reads go through.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>) -> Self {
        Self { below }
    }

    fn refused(&self) -> MediaError {
        MediaError::ReadOnly {
            device: self.below.name(),
        }
    }
}

impl BlockDevice for ReadOnlyDevice {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.below.read(off, out)
    }

    fn write(&self, _off: u64, _src: &[u8]) -> Result<(), MediaError> {
        Err(self.refused())
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn trim(&self, _off: u64, _len: u64) -> Result<(), MediaError> {
        Err(self.refused())
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        self.below.read_batch(parts)
    }

    fn state(&self) -> DeviceState {
        self.below.state()
    }

    fn info(&self) -> DeviceInfo {
        self.below.info()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::ScratchRegion;
    use std::sync::Arc;
    use varve_media::{Backing, MappedOptions, MappedRegion, Region};

    #[test]
    fn scratch_region_shows_writes_and_leaves_what_is_below() {
        let dir = tempfile::tempdir().unwrap();
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: 10_000,
            max_bytes: 10_000,
            sparse: false,
        };
        let below = Arc::new(MappedRegion::create(&dir.path().join("r"), options).unwrap());
        below.write(4000, &[1; 300]).unwrap();
        let scratch = ScratchRegion::new(Arc::clone(&below) as _);
        scratch.write(4090, &[2; 5000]).unwrap();
        scratch.write(9_990, &[3; 10]).unwrap();
        let mut out = [0; 10_000];
        scratch.read(0, &mut out).unwrap();
        assert!(out[4000..4090] == [1; 90] && out[4090..9090] == [2; 5000] && out[9990..] == [3; 10]);
        assert!(scratch.write(9_995, &[0; 6]).is_err() && scratch.grow(20_000).is_err());
        scratch.sync(0, 10_000).unwrap();
        below.read(0, &mut out).unwrap();
        assert!(out[4000..4300] == [1; 300] && out[4300..] == [0; 5700]);
    }
}
