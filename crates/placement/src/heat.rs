//! Read and write counters of units. Owns the counters, their ageing and their memory; does not know the
//! decisions based on them.
//!
//! Two bytes of reads and two of writes a unit (Chapter II.B), in groups of 16 neighbouring units, so that
//! the name of the file is stored once a group: about 100 bytes a group, 6¼ a unit. Memory is bounded
//! ([`Heat::for_pool`]: 32 KiB a GiB); beyond it the clock algorithm evicts the least recently used group.
//! All counters are halved after each half-life. Soft state: never written to media.

use crate::{Access, Op, UnitId, UnitSize};
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;
use varve_format::InodeKey;

/// Units in a group.
const GROUP: u32 = 16;
/// Memory of a group with its slot in the hash table, in bytes: 112, and 12 in a table at its lowest load
/// (7/16).
const GROUP_BYTES: u64 = 112 + 12;
/// Memory for each GiB of a pool, in bytes (Chapter II.B).
const BYTES_PER_GIB: u64 = 32 << 10;

/// Aged counters of a unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads.
    pub reads: u16,
    /// Writes.
    pub writes: u16,
    /// Whether its last access was part of a request larger than a unit.
    pub wide: bool,
}

impl Counts {
    /// Sum of reads and writes.
    #[must_use]
    pub const fn total(self) -> u32 {
        self.reads as u32 + self.writes as u32
    }
}

#[derive(Debug, Clone)]
struct Group {
    key: InodeKey,
    index: u32,
    /// Half-lives that are already applied to the counters.
    age: u32,
    /// Whether it was used since the clock hand passed.
    used: bool,
    wide: u16,
    counts: [[u16; 2]; GROUP as usize],
}

const _: () = assert!(size_of::<Group>() as u64 <= 112);

impl Group {
    fn age_to(&mut self, age: u32) {
        let halves = age.wrapping_sub(self.age).min(16);
        if halves > 0 {
            for count in self.counts.iter_mut().flatten() {
                *count = count.checked_shr(halves).unwrap_or(0);
            }
            self.age = age;
        }
    }
}

/// Counters of all remembered units.
#[derive(Debug)]
pub struct Heat {
    unit: UnitSize,
    groups: Vec<Group>,
    places: HashTable<u32>,
    hasher: DefaultHashBuilder,
    most: usize,
    hand: usize,
    half_life_ms: u64,
    age: u32,
    forgotten: u64,
}

impl Heat {
    /// Counters in at most `memory_bytes`, but at least one group.
    #[must_use]
    pub fn new(unit: UnitSize, memory_bytes: u64, half_life_ms: u64) -> Self {
        Self {
            unit,
            groups: Vec::new(),
            places: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
            most: (memory_bytes / GROUP_BYTES).clamp(1, u64::from(u32::MAX)) as usize,
            hand: 0,
            half_life_ms: half_life_ms.max(1),
            age: 0,
            forgotten: 0,
        }
    }

    /// Counters for a pool: 32 KiB a GiB, a half-life of 30 seconds.
    #[must_use]
    pub fn for_pool(unit: UnitSize, pool_bytes: u64) -> Self {
        Self::new(unit, pool_bytes.div_ceil(1 << 30) * BYTES_PER_GIB, 30_000)
    }

    /// Size of the units that are counted.
    #[must_use]
    pub const fn unit(&self) -> UnitSize {
        self.unit
    }

    /// Memory in use, in bytes.
    #[must_use]
    pub const fn memory_bytes(&self) -> u64 {
        self.groups.len() as u64 * GROUP_BYTES
    }

    /// Groups that were evicted for lack of memory.
    #[must_use]
    pub const fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Sets the time to `now_ms`. All counters are halved at the end of a half-life; a group's are halved
    /// when it is next accessed.
    pub const fn advance(&mut self, now_ms: u64) {
        self.age = (now_ms / self.half_life_ms) as u32;
    }

    /// Half-lives since the start.
    #[must_use]
    pub const fn age(&self) -> u32 {
        self.age
    }

    /// Counts an access.
    pub fn count(&mut self, access: &Access) {
        self.count_times(access, 1);
    }

    /// Counts equal accesses.
    pub fn count_times(&mut self, access: &Access, times: u16) {
        let (at, slot) = (self.place_or_make(access.unit), access.unit.index % GROUP);
        let wide = access.is_wide(self.unit);
        let group = &mut self.groups[at];
        group.used = true;
        let bit = 1 << slot;
        group.wide = if wide { group.wide | bit } else { group.wide & !bit };
        let counts = &mut group.counts[slot as usize];
        let op = match access.op {
            Op::Read => 0,
            Op::Write => 1,
        };
        if counts[op].checked_add(times).is_none() {
            // Only the ratio matters: both are halved.
            *counts = counts.map(|count| count / 2);
        }
        counts[op] = counts[op].saturating_add(times);
    }

    /// Counters of a unit; zeros if it is not remembered.
    #[must_use]
    pub fn get(&self, unit: UnitId) -> Counts {
        self.find(unit).map_or_else(Counts::default, |at| {
            let mut group = self.groups[at].clone();
            group.age_to(self.age);
            Self::counts(&group, unit.index % GROUP)
        })
    }

    /// Resets the counters of a unit: after a move its earlier use does not describe its new place.
    pub fn reset(&mut self, unit: UnitId) {
        if let Some(at) = self.find(unit) {
            self.groups[at].counts[(unit.index % GROUP) as usize] = [0; 2];
        }
    }

    /// Drops all units of a removed file. Looks at all groups: for removals of large files, in the
    /// background.
    pub fn forget(&mut self, key: InodeKey) {
        for group in self.groups.iter_mut().filter(|group| group.key == key) {
            group.counts = [[0; 2]; GROUP as usize];
            group.used = false;
        }
    }

    /// All units with a count, with their counts; in no particular order.
    pub fn units(&self) -> impl Iterator<Item = (UnitId, Counts)> + '_ {
        self.groups.iter().flat_map(move |group| {
            let mut group = group.clone();
            group.age_to(self.age);
            let (key, first) = (group.key, group.index * GROUP);
            (0..GROUP).filter_map(move |slot| {
                let counts = Self::counts(&group, slot);
                let index = first + slot;
                (counts.total() > 0).then_some((UnitId { key, index }, counts))
            })
        })
    }

    fn counts(group: &Group, slot: u32) -> Counts {
        let [reads, writes] = group.counts[slot as usize];
        Counts {
            reads,
            writes,
            wide: group.wide & (1 << slot) != 0,
        }
    }

    fn find(&self, unit: UnitId) -> Option<usize> {
        let index = unit.index / GROUP;
        let hash = self.hasher.hash_one((unit.key, index));
        let same = |at: &u32| {
            let group = &self.groups[*at as usize];
            group.key == unit.key && group.index == index
        };
        self.places.find(hash, same).map(|at| *at as usize)
    }

    fn place_or_make(&mut self, unit: UnitId) -> usize {
        if let Some(at) = self.find(unit) {
            self.groups[at].age_to(self.age);
            return at;
        }
        let group = Group {
            key: unit.key,
            index: unit.index / GROUP,
            age: self.age,
            used: false,
            wide: 0,
            counts: [[0; 2]; GROUP as usize],
        };
        let at = if self.groups.len() < self.most {
            self.groups.push(group);
            self.groups.len() - 1
        } else {
            let at = self.evict();
            self.groups[at] = group;
            at
        };
        let (groups, hasher) = (&self.groups, &self.hasher);
        let hash = |at: &u32| hasher.hash_one((groups[*at as usize].key, groups[*at as usize].index));
        let own = hash(&(at as u32));
        self.places.insert_unique(own, at as u32, hash);
        at
    }

    /// Removes the next group not used since the clock hand last passed it from the table; returns its index.
    fn evict(&mut self) -> usize {
        loop {
            let at = self.hand;
            self.hand = (self.hand + 1) % self.groups.len();
            if std::mem::take(&mut self.groups[at].used) {
                continue;
            }
            let group = &self.groups[at];
            let hash = self.hasher.hash_one((group.key, group.index));
            if let Ok(entry) = self.places.find_entry(hash, |other| *other as usize == at) {
                entry.remove();
            }
            self.forgotten += 1;
            return at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceId;
    use varve_format::{Generation, Ino};

    fn unit(ino: u64, index: u32) -> UnitId {
        let key = InodeKey {
            ino: Ino(ino),
            generation: Generation(1),
        };
        UnitId { key, index }
    }

    fn access(unit: UnitId, op: Op, request_bytes: u32) -> Access {
        Access {
            unit,
            op,
            bytes: 4096,
            request_bytes,
            device: DeviceId(0),
        }
    }

    #[test]
    fn heat_counts_reads_and_writes_of_each_unit_apart() {
        let mut heat = Heat::for_pool(UnitSize::DEFAULT, 1 << 30);
        (0..3).for_each(|_| heat.count(&access(unit(1, 17), Op::Read, 4096)));
        heat.count(&access(unit(1, 17), Op::Write, 4096));
        heat.count(&access(unit(1, 18), Op::Write, 1 << 20));
        let counts = heat.get(unit(1, 17));
        assert_eq!((counts.reads, counts.writes, counts.wide), (3, 1, false));
        assert!(heat.get(unit(1, 18)).wide);
        assert_eq!(heat.get(unit(2, 17)), Counts::default());
        assert_eq!(heat.units().count(), 2);
    }

    #[test]
    fn heat_halves_with_each_half_life_and_is_gone_after_many() {
        let mut heat = Heat::new(UnitSize::DEFAULT, 1 << 20, 1000);
        (0..64).for_each(|_| heat.count(&access(unit(1, 0), Op::Read, 1)));
        for (now_ms, reads) in [(999, 64), (1000, 32), (3000, 8), (1_000_000, 0)] {
            heat.advance(now_ms);
            assert_eq!(heat.get(unit(1, 0)).reads, reads, "at {now_ms} ms");
        }
    }

    #[test]
    fn full_counter_halves_both_so_that_the_ratio_stays() {
        let mut heat = Heat::new(UnitSize::DEFAULT, 1 << 20, u64::MAX);
        (0..1000).for_each(|_| heat.count(&access(unit(1, 0), Op::Write, 1)));
        (0..65_536).for_each(|_| heat.count(&access(unit(1, 0), Op::Read, 1)));
        let counts = heat.get(unit(1, 0));
        assert_eq!((counts.reads, counts.writes), (u16::MAX / 2 + 1, 500));
    }

    #[test]
    fn heat_stays_within_its_memory_and_keeps_what_is_used() {
        let pool_bytes = 4 << 30;
        let mut heat = Heat::for_pool(UnitSize::DEFAULT, pool_bytes);
        for index in 0..1_000_000 {
            heat.count(&access(unit(2, index), Op::Read, 4096));
            heat.count(&access(unit(1, 5), Op::Read, 4096));
        }
        assert!(heat.memory_bytes() <= 4 * (32 << 10), "{}", heat.memory_bytes());
        assert!(heat.forgotten() > 0);
        assert!(heat.get(unit(1, 5)).reads > 1000, "the hot one is remembered");
        assert_eq!(
            heat.get(unit(2, 0)),
            Counts::default(),
            "the old one is forgotten"
        );
    }

    #[test]
    fn forgotten_file_and_reset_unit_have_no_heat() {
        let mut heat = Heat::for_pool(UnitSize::DEFAULT, 1 << 30);
        for at in [unit(1, 0), unit(1, 100), unit(2, 0)] {
            heat.count(&access(at, Op::Read, 1));
        }
        heat.reset(unit(2, 0));
        assert_eq!(heat.get(unit(2, 0)).total(), 0);
        heat.forget(unit(1, 0).key);
        assert_eq!(heat.units().count(), 0);
    }
}
