//! A medium in memory over bytes that stay as they are. Owns what was written since; refuses to know what a
//! crash would leave.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use varve_format::{BLOCK_SIZE, Block};
use varve_media::{BlockDevice, DeviceInfo, MediaError, MediumKind, Region};

/// Changed blocks, by number.
type Changed = HashMap<u64, Box<Block>>;

pub(crate) struct Ram {
    /// What it began with; zeros behind.
    base: &'static [u8],
    len_bytes: u64,
    changed: Mutex<Changed>,
}

impl Ram {
    pub(crate) fn new(base: &'static [u8], len_bytes: u64) -> Self {
        Self {
            base,
            len_bytes,
            changed: Mutex::default(),
        }
    }

    fn changed(&self) -> MutexGuard<'_, Changed> {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fresh(&self, number: u64) -> Box<Block> {
        let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
        let from = (number as usize * BLOCK_SIZE).min(self.base.len());
        let bytes = &self.base[from..(from + BLOCK_SIZE).min(self.base.len())];
        block[..bytes.len()].copy_from_slice(bytes);
        block
    }

    /// Calls for each part of a range that lies in one block: its number, where in it, where in the range,
    /// how long.
    fn parts(off: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
        let size = BLOCK_SIZE as u64;
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = off + done as u64;
            let within = (at % size) as usize;
            let part = (BLOCK_SIZE - within).min(len - done);
            (part > 0).then(|| {
                let here = done;
                done += part;
                (at / size, within, here, part)
            })
        })
    }

    pub(crate) fn load(&self, off: u64, out: &mut [u8]) {
        let changed = self.changed();
        for (number, within, at, len) in Self::parts(off, out.len()) {
            let out = &mut out[at..at + len];
            match changed.get(&number) {
                Some(block) => out.copy_from_slice(&block[within..within + len]),
                None => out.copy_from_slice(&self.fresh(number)[within..within + len]),
            }
        }
    }

    pub(crate) fn store(&self, off: u64, src: &[u8]) {
        let mut changed = self.changed();
        for (number, within, at, len) in Self::parts(off, src.len()) {
            let block = changed.entry(number).or_insert_with(|| self.fresh(number));
            block[within..within + len].copy_from_slice(&src[at..at + len]);
        }
    }

    /// All of it.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.len_bytes as usize];
        self.load(0, &mut out);
        out
    }

    fn within(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if off.checked_add(len).is_some_and(|end| end <= self.len_bytes) {
            return Ok(());
        }
        Err(MediaError::OutOfRange {
            device: "memory".into(),
            off,
            len,
            size_bytes: self.len_bytes,
        })
    }

    fn described() -> DeviceInfo {
        DeviceInfo {
            name: "memory".into(),
            kind: MediumKind::Sim,
            backend: "memory".into(),
        }
    }
}

impl Region for Ram {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.within(off, out.len() as u64)?;
        self.load(off, out);
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.within(off, src.len() as u64)?;
        self.store(off, src);
        Ok(())
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        Region::write(self, off, src)?;
        Ok(varve_format::log::payload_crc(seed, src))
    }

    fn fence(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.within(off, len)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.within(0, new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.within(off, len)
    }

    fn info(&self) -> DeviceInfo {
        Self::described()
    }
}

impl BlockDevice for Ram {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        Region::read(self, off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        Region::write(self, off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.within(off, len)
    }

    fn info(&self) -> DeviceInfo {
        Self::described()
    }
}
