//! Every set of a device, packed one after the other.

use super::Set;
use crate::policy::Shape;

/// All sets. Memory is touched when a set is first used, so an empty index takes none.
#[derive(Debug)]
pub struct FullIndex {
    shape: Shape,
    bytes: Vec<u8>,
}

impl FullIndex {
    /// `sets` empty sets.
    ///
    /// # Panics
    /// If the policy keeps nothing in memory.
    pub fn new(shape: Shape, sets: u64) -> Self {
        assert!(
            shape.set_bytes() > 0,
            "the policy {} has no index",
            shape.policy()
        );
        let len = sets as usize * shape.set_bytes();
        Self {
            shape,
            bytes: vec![0; len],
        }
    }

    /// `sets` sets whose content is on disk only.
    pub fn unloaded(shape: Shape, sets: u64) -> Self {
        let mut index = Self::new(shape, sets);
        for bytes in index.bytes.chunks_exact_mut(shape.set_bytes()) {
            Set::unloaded(shape, bytes);
        }
        index
    }

    fn range(&self, number: u64) -> std::ops::Range<usize> {
        let len = self.shape.set_bytes();
        let start = number as usize * len;
        start..start + len
    }

    /// A set; `None` if it is on disk only.
    pub fn get(&self, number: u64) -> Option<Set> {
        Set::unpack(self.shape, &self.bytes[self.range(number)])
    }

    /// Replaces a set.
    pub fn put(&mut self, number: u64, set: &Set) {
        let range = self.range(number);
        set.pack(&mut self.bytes[range]);
    }

    /// The sets in their packed form.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The packed sets, to be filled from a checkpoint.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Empties every set whose bytes do not unpack. Returns the number of these sets.
    pub fn mend(&mut self) -> u64 {
        let shape = self.shape;
        let mut mended = 0;
        for bytes in self.bytes.chunks_exact_mut(shape.set_bytes()) {
            if Set::unpack(shape, bytes).is_none() {
                bytes.fill(0);
                mended += 1;
            }
        }
        mended
    }
}
