//! The most recently used sets, for `SetMemLru`. Instead of list pointers and hash chains (the thesis: 64
//! bits and more for each set) sets lie in groups of 16, and each group keeps the order of use in four bits a
//! set: 36 bits a set beside its content.

use super::Set;
use crate::policy::Shape;
use std::collections::BTreeMap;

/// Sets in a group.
const GROUP: usize = 16;
/// The initial order of a group: place n has rank n.
const IDENTITY: u64 = 0xFEDC_BA98_7654_3210;

/// Some of the sets; a new one replaces the least recently used set of its group.
#[derive(Debug)]
pub struct ResidentIndex {
    shape: Shape,
    /// The number of the set at each place, plus one; 0 if the place is empty.
    numbers: Vec<u32>,
    /// For each group the rank of each place, four bits each.
    orders: Vec<u64>,
    bytes: Vec<u8>,
    /// Sets that others replaced, until they are kept elsewhere. `None`: nobody keeps them.
    left: Option<BTreeMap<u32, Set>>,
}

impl ResidentIndex {
    /// Room for `capacity` sets, at least one group.
    pub fn new(shape: Shape, capacity: u64) -> Self {
        let groups = (capacity as usize / GROUP).max(1);
        Self {
            shape,
            numbers: vec![0; groups * GROUP],
            orders: vec![IDENTITY; groups],
            bytes: vec![0; groups * GROUP * shape.set_bytes()],
            left: None,
        }
    }

    /// Remembers sets that others replace from now on, until [`forget_left`](Self::forget_left).
    pub fn keep_left(&mut self) {
        self.left.get_or_insert_default();
    }

    /// Sets that others replaced, by number.
    pub const fn left(&self) -> Option<&BTreeMap<u32, Set>> {
        self.left.as_ref()
    }

    /// Forgets sets that others replaced, unless they were changed since they were copied.
    pub fn forget_left(&mut self, copied: &[(u32, Set)]) {
        let Some(left) = &mut self.left else { return };
        for (number, set) in copied {
            if left.get(number) == Some(set) {
                left.remove(number);
            }
        }
    }

    /// Number of sets that fit.
    pub fn capacity(&self) -> u64 {
        self.numbers.len() as u64
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> u64 {
        let left = self.left.as_ref().map_or(0, BTreeMap::len) * (size_of::<Set>() + 8);
        (self.numbers.len() * 4 + self.orders.len() * 8 + self.bytes.len() + left) as u64
    }

    fn group_of(&self, number: u64) -> usize {
        // Spreads neighbouring numbers over groups; the numbers themselves come from a keyed hash.
        (number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % self.orders.len()
    }

    fn find(&self, number: u64) -> (usize, Option<usize>) {
        let group = self.group_of(number);
        let places = &self.numbers[group * GROUP..][..GROUP];
        let found = places.iter().position(|&n| u64::from(n) == number + 1);
        (group, found)
    }

    fn rank(&self, group: usize, place: usize) -> u64 {
        self.orders[group] >> (4 * place) & 15
    }

    fn touch(&mut self, group: usize, place: usize) {
        let from = self.rank(group, place);
        let mut order = 0;
        for other in 0..GROUP {
            let rank = match self.rank(group, other) {
                _ if other == place => 0,
                rank if rank < from => rank + 1,
                rank => rank,
            };
            order |= rank << (4 * other);
        }
        self.orders[group] = order;
    }

    fn range(&self, group: usize, place: usize) -> std::ops::Range<usize> {
        let len = self.shape.set_bytes();
        let start = (group * GROUP + place) * len;
        start..start + len
    }

    /// Returns a set that is in memory and counts a use of it.
    pub fn get(&mut self, number: u64) -> Option<Set> {
        let (group, place) = self.find(number);
        let Some(place) = place else {
            let set = self.left.as_mut()?.remove(&u32::try_from(number).ok()?)?;
            self.put(number, &set);
            return Some(set);
        };
        self.touch(group, place);
        Set::unpack(self.shape, &self.bytes[self.range(group, place)])
    }

    /// Stores a set, replacing an older copy or the least recently used set of its group.
    ///
    /// # Panics
    /// If `number` does not fit 32 bits.
    pub fn put(&mut self, number: u64, set: &Set) {
        let stored = u32::try_from(number + 1).expect("at most 2^32 - 2 sets");
        let (group, found) = self.find(number);
        let last = || (0..GROUP).find(|&place| self.rank(group, place) == GROUP as u64 - 1);
        let place = found.or_else(last).expect("ranks are a permutation");
        self.touch(group, place);
        let range = self.range(group, place);
        let before = std::mem::replace(&mut self.numbers[group * GROUP + place], stored);
        if let (None, Some(left)) = (found, &mut self.left) {
            left.remove(&(stored - 1));
            let replaced = Set::unpack(self.shape, &self.bytes[range.clone()]);
            if let (Some(before), Some(replaced)) = (before.checked_sub(1), replaced) {
                left.insert(before, replaced);
            }
        }
        set.pack(&mut self.bytes[range]);
    }

    /// Calls `work` for each set, in each group the least recently used first.
    pub fn each_oldest_first(&self, mut work: impl FnMut(u64, &Set)) {
        for group in 0..self.orders.len() {
            for rank in (0..GROUP as u64).rev() {
                let Some(place) = (0..GROUP).find(|&place| self.rank(group, place) == rank) else {
                    continue;
                };
                let number = self.numbers[group * GROUP + place];
                let set = Set::unpack(self.shape, &self.bytes[self.range(group, place)]);
                if let (Some(number), Some(set)) = (number.checked_sub(1), set) {
                    work(u64::from(number), &set);
                }
            }
        }
    }
}
