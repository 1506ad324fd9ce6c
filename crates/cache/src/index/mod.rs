//! The index in memory of the objects on disk: sets of tags, ranks, generations, positions, prefetch lengths.
//! Pure: no I/O, no clock, no keys; set numbers and tags come from [`crate::KeyHash`].

mod full;
mod lap;
mod resident;
mod set;

pub use full::FullIndex;
pub use lap::{Lap, LogPoint};
pub use resident::ResidentIndex;
pub use set::{Demoted, Entry, Inserted, Place, Set};

use crate::policy::{Policy, Shape};
use std::collections::BTreeMap;

/// The index of one device.
#[derive(Debug)]
pub enum Index {
    /// Nothing in memory: `Basic` and `Set`.
    Absent,
    /// Every set.
    Full(FullIndex),
    /// The most recently used sets.
    Resident(ResidentIndex),
}

impl Index {
    /// An empty index. `resident` is the number of sets that `SetMemLru` keeps; from half of `sets` on it
    /// keeps all.
    pub fn new(shape: Shape, sets: u64, resident: u64) -> Self {
        match shape.policy() {
            Policy::Basic | Policy::Set => Self::Absent,
            Policy::SetMemLru if resident < sets.div_ceil(2) => {
                Self::Resident(ResidentIndex::new(shape, resident))
            }
            Policy::SetMemLru => Self::Full(FullIndex::unloaded(shape, sets)),
            _ => Self::Full(FullIndex::new(shape, sets)),
        }
    }

    /// Returns set `number`, if it is in memory and was read since the start.
    pub fn get(&mut self, number: u64) -> Option<Set> {
        match self {
            Self::Absent => None,
            Self::Full(full) => full.get(number),
            Self::Resident(resident) => resident.get(number),
        }
    }

    /// Stores set `number`, replacing an older copy.
    pub fn put(&mut self, number: u64, set: &Set) {
        match self {
            Self::Absent => {}
            Self::Full(full) => full.put(number, set),
            Self::Resident(resident) => resident.put(number, set),
        }
    }

    /// Remembers sets that leave memory, until [`forget_left`](Self::forget_left). Of use to
    /// `SetMemLru` only.
    pub fn keep_left(&mut self) {
        if let Self::Resident(resident) = self {
            resident.keep_left();
        }
    }

    /// Number of sets that left memory and are remembered.
    pub fn left_len(&self) -> usize {
        match self {
            Self::Resident(resident) => resident.left().map_or(0, BTreeMap::len),
            _ => 0,
        }
    }

    /// The sets that left memory and are remembered, by number.
    pub fn copy_left(&self) -> Vec<(u32, Set)> {
        let Self::Resident(resident) = self else {
            return Vec::new();
        };
        let left = resident.left().into_iter().flatten();
        left.map(|(number, set)| (*number, set.clone())).collect()
    }

    /// Forgets sets that left memory, unless they were changed since they were copied.
    pub fn forget_left(&mut self, copied: &[(u32, Set)]) {
        if let Self::Resident(resident) = self {
            resident.forget_left(copied);
        }
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> u64 {
        match self {
            Self::Absent => 0,
            Self::Full(full) => full.bytes().len() as u64,
            Self::Resident(resident) => resident.memory_bytes(),
        }
    }

    /// Changes the number of sets in memory to `resident` of `sets`. From half of them on `SetMemLru` becomes
    /// `SetMem`, whose missing sets are read at their first use; below half the reverse. Does nothing for
    /// other policies.
    pub fn resize(&mut self, shape: Shape, sets: u64, resident: u64) {
        if shape.policy() != Policy::SetMemLru {
            return;
        }
        let mut next = Self::new(shape, sets, resident);
        match self {
            Self::Absent => {}
            Self::Full(full) => {
                if matches!(next, Self::Full(_)) {
                    return;
                }
                // The last sets inserted remain.
                for number in 0..sets {
                    if let Some(set) = full.get(number) {
                        next.put(number, &set);
                    }
                }
            }
            Self::Resident(old) => {
                if let Some(left) = old.left() {
                    next.keep_left();
                    left.iter()
                        .for_each(|(number, set)| next.put((*number).into(), set));
                }
                old.each_oldest_first(|number, set| next.put(number, set));
            }
        }
        *self = next;
    }
}

#[cfg(test)]
mod tests;
