//! Which objects are allocated (section 3.2.4): pools by steps of 0.5 KiB, tables in each, a bit for each
//! object.
//!
//! Pure records. Objects of less than 128 bytes have pools by size and lie several in one stored object, a
//! *batch* of at least 128 bytes, so that a table's 4 bytes are at most 1/32 of what they name.

use crate::checkpoint::PoolRow;
use crate::layout::OBJECT_MAX_BYTES;
use crate::table::{SLOTS_MAX, TABLES_MAX};
use std::collections::{HashMap, HashSet};

/// Bytes that a stored object has at least.
pub(crate) const BATCH_BYTES: usize = 128;
/// Objects of a pool's first table.
const FIRST_OBJECTS: usize = 128;
/// Objects of a pool up to which each table doubles it; from then on, each table has so many.
const DOUBLING_OBJECTS: usize = 10_000;
/// Width of the pools.
const STEP_BYTES: usize = 512;
/// Sizes of batched objects are rounded up to this.
const SMALL_STEP_BYTES: usize = 4;

/// Objects of `len_bytes` that one stored object holds.
pub(crate) const fn per_batch(len_bytes: usize) -> usize {
    if len_bytes == 0 {
        1
    } else {
        BATCH_BYTES.div_ceil(len_bytes)
    }
}

/// What is alike of the objects of one pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    /// Batches of objects of so many bytes.
    Small(u8),
    /// Single objects of up to so many steps.
    Step(u8),
}

impl Class {
    pub(crate) fn of(len_bytes: usize) -> Self {
        if len_bytes < BATCH_BYTES {
            Self::Small(len_bytes.next_multiple_of(SMALL_STEP_BYTES) as u8)
        } else {
            Self::Step(len_bytes.div_ceil(STEP_BYTES) as u8)
        }
    }

    /// What a checkpoint calls it.
    fn code(self) -> (u8, u8) {
        match self {
            Self::Small(len) => (0, len),
            Self::Step(steps) => (1, steps),
        }
    }

    /// The class that a checkpoint calls so, if there is one.
    fn of_code(kind: u8, size: u8) -> Option<Self> {
        let len = usize::from(size);
        let of_len = match kind {
            0 if (1..BATCH_BYTES).contains(&len) => Self::of(len),
            1 if (1..=OBJECT_MAX_BYTES.div_ceil(STEP_BYTES)).contains(&len) => Self::Step(size),
            _ => return None,
        };
        (of_len.code() == (kind, size)).then_some(of_len)
    }

    /// Objects of a batch.
    pub(crate) fn per_batch(self) -> usize {
        match self {
            Self::Small(len) => per_batch(usize::from(len)),
            Self::Step(_) => 1,
        }
    }

    /// Bytes of each object of a batch, or of the whole single object.
    pub(crate) fn element_bytes(self, stored_bytes: usize) -> usize {
        match self {
            Self::Small(len) => usize::from(len),
            Self::Step(_) => stored_bytes,
        }
    }

    /// Bytes of what is stored for an object of `len_bytes`.
    pub(crate) fn stored_bytes(self, len_bytes: usize) -> usize {
        match self {
            Self::Small(len) => usize::from(len) * self.per_batch(),
            Self::Step(_) => len_bytes,
        }
    }
}

/// One table of a pool: a bit for each object.
#[derive(Debug)]
struct PoolTable {
    used: Box<[u64]>,
    objects: usize,
    free: usize,
    /// No word before this one has a free object.
    hint: usize,
    /// Objects of a restored heap that no handle was opened for; empty where there are none.
    unclaimed: Box<[u64]>,
}

impl PoolTable {
    fn new(objects: usize) -> Self {
        Self {
            used: vec![0; objects.div_ceil(64)].into_boxed_slice(),
            objects,
            free: objects,
            hint: 0,
            unclaimed: Box::default(),
        }
    }

    fn is_used(&self, object: usize) -> bool {
        object < self.objects && self.used[object / 64] & 1 << (object % 64) != 0
    }

    fn take(&mut self) -> Option<usize> {
        for word in self.hint..self.used.len() {
            self.hint = word;
            let object = word * 64 + self.used[word].trailing_ones() as usize;
            if object < (word + 1) * 64 && object < self.objects {
                self.used[word] |= 1 << (object % 64);
                self.free -= 1;
                return Some(object);
            }
        }
        None
    }

    fn give_back(&mut self, object: usize) {
        self.used[object / 64] &= !(1 << (object % 64));
        if let Some(word) = self.unclaimed.get_mut(object / 64) {
            *word &= !(1 << (object % 64));
        }
        self.free += 1;
        self.hint = self.hint.min(object / 64);
    }

    fn used_in(&self, objects: std::ops::Range<usize>) -> usize {
        objects.filter(|object| self.is_used(*object)).count()
    }
}

#[derive(Debug, Default)]
struct Pool {
    tables: Vec<u32>,
    /// The table that objects are taken from.
    current: u32,
    objects: usize,
}

/// An object that was taken or given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) table: u32,
    pub(crate) slot: u32,
    /// Place in its batch.
    pub(crate) index: u32,
    /// Whether no other object of the batch is allocated.
    pub(crate) is_alone: bool,
}

/// All pools, and the numbers of all tables.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    pools: HashMap<Class, Pool>,
    /// Tables of pools, by number. Tables of arrays are not here.
    tables: HashMap<u32, (Class, PoolTable)>,
    free_numbers: Vec<u32>,
    numbers: u32,
    /// Tables of which objects were taken or given back since the last cut, for checkpoints.
    touched: Option<HashSet<u32>>,
}

impl Pools {
    /// Notes from now on which tables change.
    pub(crate) fn track(&mut self) {
        self.touched.get_or_insert_default();
    }

    fn touch(&mut self, number: u32) {
        if let Some(touched) = &mut self.touched {
            touched.insert(number);
        }
    }

    /// Notes that a checkpoint has to say anew what is allocated of these tables.
    pub(crate) fn touch_all(&mut self, numbers: impl Iterator<Item = u32>) {
        if let Some(touched) = &mut self.touched {
            touched.extend(numbers);
        }
    }

    /// What is allocated of all tables, or of those that changed since this was called last.
    pub(crate) fn snapshot(&mut self, is_whole: bool) -> Vec<PoolRow> {
        let touched = self.touched.as_mut().map(std::mem::take).unwrap_or_default();
        let row = |(number, (class, table)): (&u32, &(Class, PoolTable))| {
            let (kind, size) = class.code();
            PoolRow {
                table: *number,
                kind,
                size,
                objects: table.objects as u32,
                used: table.used.to_vec(),
            }
        };
        let wanted = |number: &u32| is_whole || touched.contains(number);
        self.tables
            .iter()
            .filter(|(number, _)| wanted(number))
            .map(row)
            .collect()
    }

    /// Puts a table in place, as a checkpoint says. False if that cannot be.
    pub(crate) fn restore(&mut self, row: &PoolRow, slots: usize) -> bool {
        let Some(class) = Class::of_code(row.kind, row.size) else {
            return false;
        };
        let objects = row.objects as usize;
        if objects != slots * class.per_batch() || row.used.len() != objects.div_ceil(64) {
            return false;
        }
        let mut table = PoolTable::new(objects);
        table.used.copy_from_slice(&row.used);
        if !objects.is_multiple_of(64)
            && let Some(last) = table.used.last()
            && last >> (objects % 64) != 0
        {
            return false;
        }
        table.unclaimed = table.used.clone();
        table.free = objects
            - row
                .used
                .iter()
                .map(|word| word.count_ones() as usize)
                .sum::<usize>();
        if self.tables.insert(row.table, (class, table)).is_some() {
            return false;
        }
        let pool = self.pools.entry(class).or_default();
        pool.tables.push(row.table);
        pool.current = row.table;
        pool.objects += objects;
        true
    }

    /// Whether all allocated objects of a table have lengths of its class.
    pub(crate) fn has_right_lengths(&self, number: u32, len_bytes: impl Fn(u32) -> usize) -> bool {
        let mut is_right = true;
        let class = self.class(number);
        self.for_each_used_slot(number, |slot| {
            let len = len_bytes(slot);
            is_right &= class.is_some_and(|class| match class {
                Class::Small(element) => len == usize::from(element) * class.per_batch(),
                Class::Step(_) => len >= BATCH_BYTES && Class::of(len) == class,
            });
        });
        is_right
    }

    /// The numbers of tables that a checkpoint has are taken, and no others.
    pub(crate) fn restore_numbers(&mut self, is_taken: impl Fn(u32) -> bool, last: u32) {
        self.numbers = last;
        self.free_numbers = (1..=last).filter(|number| !is_taken(*number)).collect();
    }

    /// Calls `each` with the slots of a table that have an allocated object.
    pub(crate) fn for_each_used_slot(&self, number: u32, mut each: impl FnMut(u32)) {
        if let Some((class, table)) = self.tables.get(&number) {
            let per = class.per_batch();
            for slot in 0..table.objects / per {
                if table.used_in(slot * per..(slot + 1) * per) != 0 {
                    each(slot as u32);
                }
            }
        }
    }

    /// Gives an object of a restored heap to a handle. False if one has it, or it is not allocated.
    pub(crate) fn claim(&mut self, number: u32, slot: u32, index: u32) -> bool {
        self.set_unclaimed(number, slot, index, false)
    }

    /// Ends what [`Self::claim`] did, without freeing the object. False if no handle had it.
    pub(crate) fn unclaim(&mut self, number: u32, slot: u32, index: u32) -> bool {
        self.set_unclaimed(number, slot, index, true)
    }

    fn set_unclaimed(&mut self, number: u32, slot: u32, index: u32, to: bool) -> bool {
        if !self.is_used(number, slot, index) {
            return false;
        }
        let Some((class, table)) = self.tables.get_mut(&number) else {
            return false;
        };
        if table.unclaimed.is_empty() {
            table.unclaimed = vec![0; table.used.len()].into_boxed_slice();
        }
        let object = object(*class, slot, index);
        let (word, bit) = (&mut table.unclaimed[object / 64], 1 << (object % 64));
        let was = *word & bit != 0;
        *word = if to { *word | bit } else { *word & !bit };
        was != to
    }

    /// A number for a new table.
    pub(crate) fn take_number(&mut self) -> Option<u32> {
        if let Some(number) = self.free_numbers.pop() {
            return Some(number);
        }
        if self.numbers == TABLES_MAX {
            return None;
        }
        self.numbers += 1;
        Some(self.numbers)
    }

    pub(crate) fn give_number(&mut self, number: u32) {
        self.free_numbers.push(number);
    }

    /// The class of a pool's table.
    pub(crate) fn class(&self, table: u32) -> Option<Class> {
        self.tables.get(&table).map(|(class, _)| *class)
    }

    /// Takes a free object of the class: from the table in use, or else from the one with most free objects.
    pub(crate) fn take(&mut self, class: Class) -> Option<Spot> {
        let pool = self.pools.get_mut(&class)?;
        let free = |number: &u32| self.tables.get(number).map_or(0, |(_, table)| table.free);
        if free(&pool.current) == 0 {
            pool.current = *pool.tables.iter().max_by_key(|number| free(number))?;
        }
        let (_, table) = self.tables.get_mut(&pool.current)?;
        let object = table.take()?;
        let spot = spot(class, table, pool.current, object);
        self.touch(spot.table);
        Some(spot)
    }

    /// Slots of the table that the pool needs next: as many objects as it has, within bounds.
    pub(crate) fn next_slots(&self, class: Class) -> usize {
        let objects = self.pools.get(&class).map_or(0, |pool| pool.objects);
        let wanted = objects.clamp(FIRST_OBJECTS, DOUBLING_OBJECTS);
        wanted.div_ceil(class.per_batch()).min(SLOTS_MAX)
    }

    /// Adds a table to a pool.
    pub(crate) fn add_table(&mut self, class: Class, number: u32, slots: usize) {
        let pool = self.pools.entry(class).or_default();
        let objects = slots * class.per_batch();
        pool.tables.push(number);
        pool.current = number;
        pool.objects += objects;
        self.tables.insert(number, (class, PoolTable::new(objects)));
        self.touch(number);
    }

    /// Whether an object is allocated.
    pub(crate) fn is_used(&self, table: u32, slot: u32, index: u32) -> bool {
        self.tables.get(&table).is_some_and(|(class, table)| {
            (index as usize) < class.per_batch() && table.is_used(object(*class, slot, index))
        })
    }

    /// Frees an object. `None` if it is not allocated.
    pub(crate) fn give_back(&mut self, number: u32, slot: u32, index: u32) -> Option<Spot> {
        if !self.is_used(number, slot, index) {
            return None;
        }
        let (class, table) = self.tables.get_mut(&number)?;
        let object = object(*class, slot, index);
        table.give_back(object);
        let spot = spot(*class, table, number, object);
        self.touch(number);
        Some(spot)
    }

    /// Takes a table out of its pool if no object of it is allocated and the pool has others. Gives its
    /// slots.
    pub(crate) fn drop_empty(&mut self, number: u32) -> Option<usize> {
        let (class, table) = self.tables.get(&number)?;
        let (class, objects) = (*class, table.objects);
        let pool = self.pools.get_mut(&class)?;
        if table.free != objects || pool.tables.len() == 1 {
            return None;
        }
        pool.tables.retain(|other| *other != number);
        pool.objects -= objects;
        pool.current = *pool.tables.first()?;
        self.tables.remove(&number);
        Some(objects / class.per_batch())
    }
}

fn object(class: Class, slot: u32, index: u32) -> usize {
    slot as usize * class.per_batch() + index as usize
}

fn spot(class: Class, table: &PoolTable, number: u32, object: usize) -> Spot {
    let per = class.per_batch();
    let slot = object / per;
    let others = table.used_in(slot * per..object) + table.used_in(object + 1..(slot + 1) * per);
    Spot {
        table: number,
        slot: slot as u32,
        index: (object % per) as u32,
        is_alone: others == 0,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pool_doubles_to_ten_thousand_and_goes_on_in_steps() {
        let mut pools = Pools::default();
        let class = Class::of(700);
        let mut tables = Vec::new();
        for _ in 0..11 {
            let slots = pools.next_slots(class);
            let number = pools.take_number().unwrap();
            pools.add_table(class, number, slots);
            tables.push(slots);
        }
        assert_eq!(
            tables,
            [128, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000, 10_000, 10_000]
        );
    }

    #[test]
    fn objects_are_taken_once_and_given_back_once() {
        let mut pools = Pools::default();
        for len in [1, 40, 127, 128, 600] {
            let class = Class::of(len);
            let slots = pools.next_slots(class);
            let number = pools.take_number().unwrap();
            pools.add_table(class, number, slots);
            let mut taken = BTreeSet::new();
            while let Some(spot) = pools.take(class) {
                assert_eq!(spot.table, number);
                assert!(taken.insert((spot.slot, spot.index)));
            }
            assert_eq!(taken.len(), slots * class.per_batch());
            for (slot, index) in &taken {
                let spot = pools.give_back(number, *slot, *index).unwrap();
                assert_eq!(spot.is_alone, *index as usize == class.per_batch() - 1);
                assert_eq!(pools.give_back(number, *slot, *index), None);
            }
            assert_eq!(pools.give_back(number, slots as u32, 0), None);
            assert_eq!(pools.drop_empty(number), None, "the last table stays");
        }
    }

    #[test]
    fn batch_has_at_least_128_bytes() {
        for len in 1..=300 {
            let class = Class::of(len);
            assert!(class.element_bytes(len) >= len);
            assert!(class.stored_bytes(len) >= BATCH_BYTES);
            assert!(class.stored_bytes(len) < 2 * BATCH_BYTES.max(len));
        }
    }

    #[test]
    fn empty_table_leaves_a_pool_that_has_others() {
        let mut pools = Pools::default();
        let class = Class::of(200);
        for _ in 0..2 {
            let number = pools.take_number().unwrap();
            let slots = pools.next_slots(class);
            pools.add_table(class, number, slots);
        }
        let spot = pools.take(class).unwrap();
        assert_eq!(pools.drop_empty(spot.table), None);
        pools.give_back(spot.table, spot.slot, spot.index).unwrap();
        assert_eq!(pools.drop_empty(spot.table), Some(128));
        assert_eq!(pools.class(spot.table), None);
        assert!(pools.take(class).is_some());
    }
}
