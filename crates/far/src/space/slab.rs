//! The record of one slab.

use super::Pinned;
use super::ahead::Reads;
use crate::backend::{SLAB_BYTES, Slot};
use crate::codec::Class;
use crate::temperature::History;

/// What can be expected of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Sound,
    /// Its backend failed. It takes no objects; what can be read of it moves elsewhere.
    Failed,
    /// Its backend took it: it has no place and what was in it is lost.
    Lost,
}

/// A place that a slab left, while readers are still there.
pub(super) struct Left {
    pub tier: usize,
    pub slot: Slot,
    pub has_failed: bool,
}

pub(super) struct Slab {
    pub tier: usize,
    /// Nothing where the slab is lost.
    pub slot: Slot,
    pub class: Class,
    pub used: u16,
    /// Readers and writers at work.
    pub pins: u32,
    pub left: Vec<Left>,
    pub is_moving: bool,
    pub health: Health,
    /// Its backend wants its space back.
    pub is_wanted: bool,
    /// Number of the last try to move it that was in vain; 0: none was.
    pub tried: u64,
    /// When what can be read of it is moved, at the soonest.
    pub rescue_at_s: u64,
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
            left: Vec::new(),
            is_moving: false,
            health: Health::Sound,
            is_wanted: false,
            tried: 0,
            rescue_at_s: 0,
            is_listed: false,
            history,
            reads: Reads::default(),
            bits,
            hint: 0,
        }
    }

    /// Whether it may move as a whole.
    pub fn can_move(&self) -> bool {
        self.health == Health::Sound && !self.is_moving
    }

    /// Whether nobody reads or writes it, and there is something in it. With pins, a page may be on its way
    /// into it.
    pub fn is_idle(&self) -> bool {
        !self.is_moving && self.pins == 0 && self.left.is_empty() && self.used > 0
    }

    /// Whether it is still where it was when it was pinned.
    pub fn is_at(&self, pinned: &Pinned) -> bool {
        (self.tier, self.slot) == (pinned.tier, pinned.slot)
    }

    pub fn takes_objects(&self) -> bool {
        !self.is_moving && !self.is_wanted && self.health == Health::Sound
    }

    /// Pins it where it is.
    pub fn pin(&mut self) -> Pinned {
        self.pins += 1;
        Pinned {
            tier: self.tier,
            slot: self.slot,
            class: self.class,
        }
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
