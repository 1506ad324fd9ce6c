//! Memory that the simulated device sees: pages that lie apart on its bus, found by address, gone when the
//! driver gives them back.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use varve_media::block::nvme::{DmaMemory, PAGE_BYTES};

/// Distance of a page from the next one on the bus: whoever takes pages for contiguous is found out.
const STRIDE: u64 = 2 * PAGE_BYTES as u64;

pub struct SimMemory {
    base: u64,
    bytes: Mutex<Vec<u8>>,
}

impl DmaMemory for SimMemory {
    fn len_bytes(&self) -> usize {
        self.bytes.lock().len()
    }

    fn bus_address(&self, off: usize) -> u64 {
        self.base + (off / PAGE_BYTES) as u64 * STRIDE + (off % PAGE_BYTES) as u64
    }

    fn read(&self, off: usize, out: &mut [u8]) {
        out.copy_from_slice(&self.bytes.lock()[off..off + out.len()]);
    }

    fn write(&self, off: usize, src: &[u8]) {
        self.bytes.lock()[off..off + src.len()].copy_from_slice(src);
    }

    fn load_u32(&self, off: usize) -> u32 {
        let mut word = [0; 4];
        self.read(off, &mut word);
        u32::from_le_bytes(word)
    }
}

#[derive(Default)]
pub struct Memories {
    all: Vec<(u64, u64, Weak<SimMemory>)>,
    next: u64,
}

impl Memories {
    pub fn allocate(&mut self, len_bytes: usize) -> Arc<SimMemory> {
        let pages = len_bytes.div_ceil(PAGE_BYTES);
        let base = self.next.max(0x10_0000);
        let end = base + pages as u64 * STRIDE;
        self.next = end + 0x10_0000;
        let memory = Arc::new(SimMemory {
            base,
            bytes: Mutex::new(vec![0; pages * PAGE_BYTES]),
        });
        self.all.push((base, end, Arc::downgrade(&memory)));
        memory
    }

    /// Copies within one page, as the device does.
    pub fn copy(&self, address: u64, bytes: &mut [u8], to_memory: bool) -> Result<(), String> {
        let len = bytes.len();
        let found = self
            .all
            .iter()
            .find(|(base, end, _)| (*base..*end).contains(&address));
        let Some((base, _, memory)) = found else {
            return Err(format!("of {len} bytes at {address:#x}, which is nobody's"));
        };
        let Some(memory) = memory.upgrade() else {
            return Err(format!("of {len} bytes at {address:#x}, which was given back"));
        };
        let (page, within) = ((address - base) / STRIDE, (address - base) % STRIDE);
        if within + len as u64 > PAGE_BYTES as u64 {
            return Err(format!("of {len} bytes at {address:#x}, past the end of a page"));
        }
        let at = page as usize * PAGE_BYTES + within as usize;
        let mut held = memory.bytes.lock();
        match to_memory {
            true => held[at..at + len].copy_from_slice(bytes),
            false => bytes.copy_from_slice(&held[at..at + len]),
        }
        Ok(())
    }
}
