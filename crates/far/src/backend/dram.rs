//! Slabs in the memory of this process.

use super::{Backend, BackendError, SLAB_BYTES, Slot, range};
use parking_lot::RwLock;

type SlabMemory = RwLock<Box<[u8]>>;

/// Slabs on the heap, each allocated with its slot and freed with it.
#[derive(Debug)]
pub struct Dram {
    capacity: u32,
    slabs: RwLock<Slabs>,
}

#[derive(Debug, Default)]
struct Slabs {
    all: Vec<Option<std::sync::Arc<SlabMemory>>>,
    free: Vec<u32>,
}

impl Dram {
    /// At most `capacity_slabs` slabs.
    #[must_use]
    pub fn new(capacity_slabs: u32) -> Self {
        Self {
            capacity: capacity_slabs,
            slabs: RwLock::default(),
        }
    }

    fn slab(&self, slot: Slot) -> Result<std::sync::Arc<SlabMemory>, BackendError> {
        let slabs = self.slabs.read();
        let slab = slabs.all.get(slot.0 as usize).and_then(Option::as_ref);
        slab.cloned().ok_or(BackendError::OutOfRange(slot.0))
    }
}

impl Backend for Dram {
    fn name(&self) -> &str {
        "compressed DRAM"
    }

    fn capacity_slabs(&self) -> u32 {
        self.capacity
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        let mut slabs = self.slabs.write();
        let number = match slabs.free.pop() {
            Some(number) => number,
            None if slabs.all.len() < self.capacity as usize => {
                slabs.all.push(None);
                (slabs.all.len() - 1) as u32
            }
            None => return Err(BackendError::Full),
        };
        let memory = vec![0u8; SLAB_BYTES].into_boxed_slice();
        slabs.all[number as usize] = Some(std::sync::Arc::new(RwLock::new(memory)));
        Ok(Slot(number))
    }

    fn dealloc(&self, slot: Slot) {
        let mut slabs = self.slabs.write();
        if slabs
            .all
            .get_mut(slot.0 as usize)
            .and_then(Option::take)
            .is_some()
        {
            slabs.free.push(slot.0);
        }
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        let range = range(slot, offset_bytes, bytes.len())?;
        bytes.copy_from_slice(&self.slab(slot)?.read()[range]);
        Ok(())
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        let range = range(slot, offset_bytes, bytes.len())?;
        self.slab(slot)?.write()[range].copy_from_slice(bytes);
        Ok(())
    }
}
