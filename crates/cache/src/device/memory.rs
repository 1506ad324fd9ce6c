//! A device in memory; chunks that were never written take no memory.

use super::{Device, DeviceError, check_range};
use parking_lot::RwLock;
use std::collections::HashMap;

const CHUNK_BYTES: u64 = 16 << 10;

/// A device in memory.
#[derive(Debug, Default)]
pub struct MemoryDevice {
    len_bytes: u64,
    chunks: RwLock<HashMap<u64, Box<[u8]>>>,
}

impl MemoryDevice {
    /// A device of zeros.
    pub fn new(len_bytes: u64) -> Self {
        Self {
            len_bytes,
            chunks: RwLock::default(),
        }
    }

    /// Another device with the same bytes.
    pub fn copy(&self) -> Self {
        Self {
            len_bytes: self.len_bytes,
            chunks: RwLock::new(self.chunks.read().clone()),
        }
    }

    /// Inverts one bit.
    pub fn flip(&self, byte: u64, bit: u8) {
        if let Some(chunk) = self.chunks.write().get_mut(&(byte / CHUNK_BYTES)) {
            chunk[(byte % CHUNK_BYTES) as usize] ^= 1 << bit;
        }
    }
}

/// The pieces of a range: chunk, offset within it, offset within the range, length.
fn pieces(off: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = off + done as u64;
        let within = (at % CHUNK_BYTES) as usize;
        let now = (len - done).min(CHUNK_BYTES as usize - within);
        let piece = (at / CHUNK_BYTES, within, done, now);
        done += now;
        Some(piece)
    })
}

impl Device for MemoryDevice {
    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, off: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        check_range(self, "read", off, out.len())?;
        let chunks = self.chunks.read();
        for (chunk, within, at, len) in pieces(off, out.len()) {
            match chunks.get(&chunk) {
                Some(bytes) => out[at..at + len].copy_from_slice(&bytes[within..within + len]),
                None => out[at..at + len].fill(0),
            }
        }
        Ok(())
    }

    fn write_at(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        check_range(self, "write", off, data.len())?;
        let mut chunks = self.chunks.write();
        for (chunk, within, at, len) in pieces(off, data.len()) {
            let empty = || vec![0; CHUNK_BYTES as usize].into_boxed_slice();
            let bytes = chunks.entry(chunk).or_insert_with(empty);
            bytes[within..within + len].copy_from_slice(&data[at..at + len]);
        }
        Ok(())
    }

    fn flush(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
