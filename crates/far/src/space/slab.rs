//! The record of one slab.

use super::ahead::Reads;
use crate::backend::{SLAB_BYTES, Slot};
use crate::codec::Class;
use crate::temperature::History;

pub(super) struct Slab {
    pub tier: usize,
    pub slot: Slot,
    pub class: Class,
    pub used: u16,
    /// Readers and writers at work.
    pub pins: u32,
    /// Where it was before it moved, while readers are still there.
    pub left: Option<(usize, Slot)>,
    pub is_moving: bool,
    /// Its backend failed: it takes no objects and does not move.
    pub is_retired: bool,
    /// Whether a list of open slabs names it.
    pub is_listed: bool,
    pub history: History,
    pub reads: Reads,
    /// One bit for each object.
    bits: Vec<u64>,
    /// Words of `bits` before this one are full.
    hint: usize,
}

const WORD: usize = 64;

impl Slab {
    pub fn new(tier: usize, slot: Slot, class: Class, history: History) -> Self {
        let objects = SLAB_BYTES / class.object_bytes();
        let mut bits = vec![0u64; objects.div_ceil(WORD)];
        if !objects.is_multiple_of(WORD)
            && let Some(last) = bits.last_mut()
        {
            // Objects past the end count as used for ever.
            *last = u64::MAX << (objects % WORD);
        }
        Self {
            tier,
            slot,
            class,
            used: 0,
            pins: 0,
            left: None,
            is_moving: false,
            is_retired: false,
            is_listed: false,
            history,
            reads: Reads::default(),
            bits,
            hint: 0,
        }
    }

    pub fn takes_objects(&self) -> bool {
        !self.is_moving && !self.is_retired
    }

    /// Takes the lowest free object.
    pub fn take_free(&mut self) -> Option<u16> {
        let ahead = self.bits[self.hint..].iter().position(|word| *word != u64::MAX);
        self.hint = ahead.map_or(self.bits.len(), |ahead| self.hint + ahead);
        let word = self.bits.get_mut(self.hint)?;
        let bit = word.trailing_ones() as usize;
        *word |= 1 << bit;
        self.used += 1;
        Some((self.hint * WORD + bit) as u16)
    }

    pub fn has(&self, object: u16) -> bool {
        let object = usize::from(object);
        object < SLAB_BYTES / self.class.object_bytes()
            && self.bits[object / WORD] >> (object % WORD) & 1 == 1
    }

    /// Frees an object; false if it was free.
    pub fn free(&mut self, object: u16) -> bool {
        if !self.has(object) {
            return false;
        }
        let object = usize::from(object);
        self.bits[object / WORD] &= !(1 << (object % WORD));
        self.hint = self.hint.min(object / WORD);
        self.used -= 1;
        true
    }
}
