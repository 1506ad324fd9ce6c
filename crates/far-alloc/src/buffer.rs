//! Which pages are in memory, in the order in which they came (section 3.2.2: a FIFO), and how many may be.
//! Pure.

use std::collections::VecDeque;

/// Place of a page in the ring.
pub(crate) type Slot = u32;

/// The page buffer's ring. A unit is a page of memory: of an object, or of a page table that is there for it.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Page numbers; 0: free.
    ring: Box<[u64]>,
    free: VecDeque<Slot>,
    hand: usize,
    used_units: usize,
    pinned: usize,
}

impl Buffer {
    pub(crate) fn new(units: usize) -> Self {
        Self {
            ring: vec![0; units].into_boxed_slice(),
            free: (0..units as Slot).collect(),
            hand: 0,
            used_units: 0,
            pinned: 0,
        }
    }

    /// Memory of a ring, and of what is known of its pages elsewhere.
    pub(crate) const fn memory_bytes(units: usize) -> u64 {
        const RECORD_BYTES: usize = 96;
        (units * RECORD_BYTES) as u64
    }

    pub(crate) fn units(&self) -> usize {
        self.ring.len()
    }

    pub(crate) fn free_units(&self) -> usize {
        self.ring.len() - self.used_units
    }

    /// Pages that are in.
    pub(crate) fn pages(&self) -> usize {
        self.ring.len() - self.free.len()
    }

    /// Takes a page in that needs so many units. `None` where there is no room.
    pub(crate) fn take(&mut self, page: u64, units: usize) -> Option<Slot> {
        if self.free_units() < units {
            return None;
        }
        let slot = self.free.pop_front()?;
        self.ring[slot as usize] = page;
        self.used_units += units;
        Some(slot)
    }

    /// Lets a page out, and its units.
    pub(crate) fn give_back(&mut self, slot: Slot, units: usize) {
        self.ring[slot as usize] = 0;
        self.free.push_back(slot);
        self.used_units -= units;
    }

    /// Gives back the unit of a page table whose pages are gone.
    pub(crate) fn give_units(&mut self, units: usize) {
        self.used_units -= units;
    }

    /// Moves the hand on to the next page.
    pub(crate) fn next(&mut self) -> Option<u64> {
        for _ in 0..self.ring.len() {
            let page = self.ring[self.hand];
            self.hand = (self.hand + 1) % self.ring.len();
            if page != 0 {
                return Some(page);
            }
        }
        None
    }

    /// Counts a page that stays; at most half of the units may.
    pub(crate) fn pin(&mut self) -> bool {
        let has_room = self.pinned < self.ring.len() / 4;
        self.pinned += usize::from(has_room);
        has_room
    }

    pub(crate) fn unpin(&mut self) {
        self.pinned = self.pinned.saturating_sub(1);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pages_leave_in_the_order_in_which_they_came() {
        let mut buffer = Buffer::new(4);
        let slots: Vec<_> = (1..=4).map(|page| buffer.take(page, 1).unwrap()).collect();
        assert_eq!(buffer.take(5, 1), None);
        for (page, slot) in (1..=4).zip(slots) {
            assert_eq!(buffer.next(), Some(page));
            buffer.give_back(slot, 1);
            buffer.take(page + 4, 1).unwrap();
        }
        assert_eq!(buffer.next(), Some(5));
        assert_eq!(buffer.pages(), 4);
    }

    #[test]
    fn page_tables_take_units_of_pages() {
        let mut buffer = Buffer::new(4);
        let first = buffer.take(1, 2).unwrap();
        assert!(buffer.take(2, 2).is_some());
        assert_eq!((buffer.take(3, 1), buffer.free_units()), (None, 0));
        buffer.give_back(first, 1);
        assert_eq!(buffer.free_units(), 1);
        buffer.give_units(1);
        assert_eq!((buffer.free_units(), buffer.pages()), (2, 1));
    }

    #[test]
    fn pins_leave_pages_for_others() {
        let mut buffer = Buffer::new(8);
        assert!(buffer.pin() && buffer.pin() && !buffer.pin());
        buffer.unpin();
        assert!(buffer.pin());
    }
}
