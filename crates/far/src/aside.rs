//! The set-aside area of a program: a ring of slots, filled at its head in runs, emptied at its tail.

use crate::table::{PageNo, Stored};
use std::collections::VecDeque;

/// One slot that was filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsideSlot {
    /// The page that was moved here.
    pub page: PageNo,
    /// The object that held it before, if that is still there.
    pub kept: Option<Stored>,
}

/// The ring. Slots have numbers that never come twice; the slot's address is its number modulo the size.
#[derive(Debug, Clone)]
pub struct Ring {
    slots: u64,
    tail: u64,
    filled: VecDeque<Option<AsideSlot>>,
}

impl Ring {
    /// A ring of `slots` slots, all free.
    #[must_use]
    pub fn new(slots: u64) -> Self {
        Self {
            slots,
            tail: 0,
            filled: VecDeque::new(),
        }
    }

    /// Slots in use or waiting to be emptied.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.filled.len() as u64
    }

    /// Whether nothing is aside.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filled.is_empty()
    }

    /// The contents of the filled slots.
    pub fn filled(&self) -> impl Iterator<Item = AsideSlot> + '_ {
        self.filled.iter().flatten().copied()
    }

    /// Free slots in one run from the head, at most `most`: the first number and how many.
    #[must_use]
    pub fn room(&self, most: u64) -> (u64, u64) {
        let head = self.tail + self.len();
        let to_wrap = self.slots - head % self.slots;
        (head, most.min(self.slots - self.len()).min(to_wrap))
    }

    /// Fills the slot at the head; `None` for one that stays empty.
    pub fn push(&mut self, slot: Option<AsideSlot>) -> u64 {
        self.filled.push_back(slot);
        self.tail + self.len() - 1
    }

    /// The content of a slot.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<AsideSlot> {
        let index = number.checked_sub(self.tail)?;
        self.filled.get(usize::try_from(index).ok()?).copied().flatten()
    }

    /// Says that the page of a slot has another number: the program moved its mapping.
    pub fn rename(&mut self, number: u64, page: PageNo) {
        let index = number.checked_sub(self.tail).map(|index| index as usize);
        if let Some(Some(slot)) = index.and_then(|index| self.filled.get_mut(index)) {
            slot.page = page;
        }
    }

    /// Gives up what is in a slot: the page came back or was dropped.
    pub fn take(&mut self, number: u64) -> Option<AsideSlot> {
        let index = number.checked_sub(self.tail)?;
        self.filled.get_mut(usize::try_from(index).ok()?)?.take()
    }

    /// Number of the oldest slot, and how many follow in one run of addresses, at most `most`.
    #[must_use]
    pub fn oldest(&self, most: u64) -> (u64, u64) {
        let to_wrap = self.slots - self.tail % self.slots;
        (self.tail, most.min(self.len()).min(to_wrap))
    }

    /// Frees the `count` oldest slots, after their memory was emptied. Gives what was still in them.
    #[must_use = "what is still in them is lost otherwise"]
    pub fn retire(&mut self, count: u64) -> Vec<AsideSlot> {
        let count = count.min(self.len());
        self.tail += count;
        self.filled.drain(..count as usize).flatten().collect()
    }

    /// The index of a slot in the area.
    #[must_use]
    pub fn index(&self, number: u64) -> u64 {
        number % self.slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_wraps_in_runs_and_keeps_numbers() {
        let mut ring = Ring::new(8);
        assert_eq!(ring.room(64), (0, 8));
        for page in 0..6 {
            let slot = AsideSlot {
                page: PageNo(page),
                kept: None,
            };
            assert_eq!(ring.push(Some(slot)), page);
        }
        assert_eq!(ring.room(64), (6, 2));
        assert_eq!(ring.oldest(4), (0, 4));
        assert_eq!(ring.take(1).map(|slot| slot.page), Some(PageNo(1)));
        assert_eq!(ring.retire(4).len(), 3);
        assert_eq!(ring.room(64), (6, 2), "up to the end of the area");
        ring.push(None);
        ring.push(None);
        assert_eq!(ring.room(64), (8, 4));
        assert_eq!(ring.index(8), 0);
        assert_eq!(ring.get(2), None, "retired");
        assert_eq!(ring.get(5).map(|slot| slot.page), Some(PageNo(5)));
    }
}
