//! Restore: a heap from the last complete checkpoint of a file.
//!
//! Reads roots and tables, no objects. Believes nothing: what is named has to be there, once, and within
//! bounds. A thread reads ahead meanwhile.

use super::arrays::TABLE_SLOTS;
use super::handles::{Handles, Shapes};
use super::save;
use super::segments::{Part, Segment, SegmentReader, read_ahead};
use super::{Config, Core, FarHeap};
use crate::checkpoint::{
    self, ArrayRecord, BlockRow, Failure, HEAD_BYTES, Malformed, MapRecord, PAYLOAD_BYTES, PoolRow,
    ROOT_BYTES, ROOT_SLOTS, Root, Row, SegmentRef, Sink, SlotsRecord, TableRow,
};
use crate::error::{Error, Refusal};
use crate::file::{CheckpointFile, io_error};
use crate::layout::{self, BLOCK_BYTES, BLOCK_PAYLOAD_BYTES, OBJECT_MAX_BYTES};
use crate::log::{self, Restored};
use crate::pools;
use crate::table::{Entry, Now, SLOTS_TABLE_SLOTS, Table};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

/// Parts of tables that are read ahead at most, and the part of memory that they may have.
const AHEAD: u64 = 64;
const AHEAD_OF_MEMORY: u64 = 16;
/// Sequence numbers that are passed over, so that none of a block that was written after the checkpoint is
/// used again.
const SEQUENCE_STEP: u32 = 1 << 20;
/// Memory of a table's number: its place among the tables, and among free numbers.
const NUMBER_BYTES: u64 = 12;

impl FarHeap {
    /// The heap of the last complete checkpoint of a file, and that checkpoint's record. Objects stay where
    /// they are; handles are opened by name. The heap goes on in the file, and its checkpoints too.
    ///
    /// # Errors
    /// `Refused` says what the file is instead, or whose schema tag it has; `MemoryLimit` where its tables do
    /// not fit; `Config`, `Io`.
    pub fn restore(
        file: impl CheckpointFile + 'static,
        schema_tag: u64,
        config: &Config,
    ) -> Result<(Self, Vec<u8>), Error> {
        let (heap, loaded) = restore(Arc::new(file), schema_tag, false, config)?;
        Ok((heap, loaded.record))
    }
}

/// What a checkpoint has beside the heap.
pub(super) struct Loaded {
    pub(super) record: Vec<u8>,
    /// Slots that somebody outside has, and the lengths of their objects.
    pub(super) slots: Vec<super::owner::LoadedSlots>,
}

/// The heap of the last complete checkpoint of a file; `has_slots`: somebody outside has slots of it.
pub(super) fn restore(
    file: Arc<dyn CheckpointFile>,
    schema_tag: u64,
    has_slots: bool,
    config: &Config,
) -> Result<(FarHeap, Loaded), Error> {
    save::lock(&*file)?;
    let name = file.name();
    let refused = |reason| Error::Refused {
        file: name.clone(),
        reason,
    };
    let (slot, root) = read_root(&*file)?;
    if root.schema_tag != schema_tag {
        return Err(refused(Refusal::Schema {
            found: root.schema_tag,
            wanted: schema_tag,
        }));
    }
    // Numbers that only grow are far from their ends.
    let is_sound = root.given_slabs <= root.capacity_slabs
        && root.epoch <= u32::MAX / 2
        && root.generation <= u64::MAX / 2
        && (1..=u64::MAX / 2).contains(&root.next_handle);
    if !is_sound {
        return Err(refused(Refusal::Malformed("the root's numbers".into())));
    }
    if root.has_slots != has_slots {
        let found = match root.has_slots {
            true => "with objects at addresses",
            false => "of handles alone",
        };
        return Err(refused(Refusal::Kind { found }));
    }
    let core = FarHeap::open_core(Arc::clone(&file), &root, slot, config)?;
    let loaded = load(&core, &*file, &root).map_err(|failure| match failure {
        Failure::Malformed(Malformed(what)) => refused(Refusal::Malformed(what)),
        Failure::Other(error) => error,
    })?;
    make_durable(&*file, slot, &root)?;
    Ok((core.start(config)?, loaded))
}

/// Makes the root that was chosen durable: it may be in memory of the kernel alone, after a failed sync or a
/// kill before one. From here on places are used again that only the root before it needs, so its copy takes
/// the place of that one.
fn make_durable(file: &dyn CheckpointFile, slot: usize, root: &Root) -> Result<(), Error> {
    let bytes = root.to_bytes();
    let write = |slot: usize| file.write_at((slot * ROOT_BYTES) as u64, &bytes);
    write(slot)
        .and_then(|()| file.sync())
        .and_then(|()| write((slot + 1) % ROOT_SLOTS))
        .map_err(|error| io_error(file, error))
}

/// The slot of the newest root, and the root.
fn read_root(file: &dyn CheckpointFile) -> Result<(usize, Root), Error> {
    let len = file.len_bytes().map_err(|error| io_error(file, error))?;
    let mut bytes = vec![0; ROOT_SLOTS * ROOT_BYTES];
    let there = len.min(bytes.len() as u64) as usize;
    file.read_at(0, &mut bytes[..there])
        .map_err(|error| io_error(file, error))?;
    let (first, second) = bytes.split_at(ROOT_BYTES);
    checkpoint::choose([first, second]).map_err(|reason| Error::Refused {
        file: file.name(),
        reason,
    })
}

fn load(core: &Core, file: &dyn CheckpointFile, root: &Root) -> Result<Loaded, Failure> {
    // No object is in memory yet.
    let ahead = core.budget.limit() / AHEAD_OF_MEMORY / BLOCK_BYTES as u64;
    let (sender, parts) = sync_channel(ahead.clamp(1, AHEAD) as usize);
    // Records of all places, before they are made: the root may lie about their number.
    let places = log::places(root.given_slabs);
    core.take_memory(places * log::PLACE_MEMORY_BYTES)?.keep();
    let mut loading = Loading::new(core, root);
    let segments = std::thread::scope(|scope| {
        let reader = std::thread::Builder::new()
            .spawn_scoped(scope, move || read_ahead(file, root, &sender))
            .map_err(|error| Failure::Other(io_error(file, error)))?;
        let read = loading.read(&root.segments, &parts);
        drop(parts);
        let segments = match reader.join() {
            Ok(segments) => segments,
            Err(_) => Err(Malformed::new("no thread for reading").into()),
        };
        // Where reading failed, that is why the records ended.
        let segments = segments?;
        read.map(|()| segments)
    })?;
    loading.finish(core, root, segments)
}

struct Loading<'a> {
    core: &'a Core,
    sectors: u64,
    tables: BTreeMap<u32, Box<Table>>,
    blocks: HashMap<u32, BlockRow>,
    pools: BTreeMap<u32, PoolRow>,
    arrays: BTreeMap<u64, ArrayRecord>,
    maps: BTreeMap<u64, MapRecord>,
    slots: BTreeMap<u64, SlotsRecord>,
    has_slots: bool,
    record: Vec<u8>,
    epoch: u32,
    /// Tables that began anew in the segment that is read.
    anew: HashSet<u32>,
}

impl Sink for Loading<'_> {
    fn table(&mut self, row: TableRow) -> Result<(), Failure> {
        if row.is_new {
            if !self.anew.insert(row.number) {
                return Err(Malformed::new(format!("table {} begins twice", row.number)).into());
            }
            self.pools.remove(&row.number);
            if let Some(table) = self.tables.remove(&row.number) {
                self.give_back(&table);
            }
        }
        let Some((slots, len_bytes)) = row.shape else {
            return if self.tables.contains_key(&row.number) {
                Err(Malformed::new(format!("table {} ends without an end", row.number)).into())
            } else {
                Ok(())
            };
        };
        let slots = slots as usize;
        match self.tables.get_mut(&row.number) {
            None => {
                self.core.take_memory(self.core.table_bytes(slots))?.keep();
                let table = Table::new(slots, usize::from(len_bytes), self.core.is_wide);
                self.tables
                    .insert(row.number, Box::new(table.with_marks(self.epoch)));
            }
            Some(table) => {
                if slots < table.slots() || table.has_lengths() || table.len_bytes() != len_bytes {
                    return Err(Malformed::new(format!("table {} gets shorter", row.number)).into());
                }
                let more = self.core.table_bytes(slots) - self.core.table_bytes(table.slots());
                self.core.take_memory(more)?.keep();
                let now = Now {
                    epoch: self.epoch,
                    ..Now::default()
                };
                table.grow(slots, &now);
            }
        }
        Ok(())
    }

    fn entries(&mut self, number: u32, has_lengths: bool, rows: &[Row]) -> Result<(), Failure> {
        let wrong = |row: &Row| Malformed::new(format!("slot {} of table {number}", row.slot));
        let Some(table) = self.tables.get_mut(&number) else {
            return Err(Malformed::new(format!("entries of table {number}, which is not there")).into());
        };
        let slots = table.slots();
        for row in rows {
            let len = usize::from(row.len);
            let is_sound = usize::from(row.slot) < slots
                && row.value <= self.sectors
                && (!has_lengths || (1..=OBJECT_MAX_BYTES).contains(&len));
            if !is_sound {
                return Err(wrong(row).into());
            }
            let entry = row.value.checked_sub(1).map_or(Entry::Empty, Entry::At);
            // Without a length of its own an object has the table's, whatever it had before.
            let len = if has_lengths {
                len
            } else {
                usize::from(table.len_bytes())
            };
            if table.restore(u32::from(row.slot), entry, Some(len)) {
                self.core.budget.force(Table::lengths_bytes(slots));
            }
        }
        Ok(())
    }

    fn values(&mut self, number: u32, first: usize, values: &[[u8; 4]]) -> Result<(), Failure> {
        let sectors = self.sectors;
        if let Some(table) = self.tables.get_mut(&number)
            && table.restore_values(first, values, sectors)
        {
            return Ok(());
        }
        // A table that keeps lengths, or what is wrong.
        let row = |(index, value): (usize, &[u8; 4])| {
            Some(Row {
                slot: u16::try_from(first + index).ok()?,
                len: 0,
                value: u64::from(u32::from_le_bytes(*value)),
            })
        };
        let rows: Option<Vec<Row>> = values.iter().enumerate().map(row).collect();
        let rows = rows.ok_or_else(|| Malformed::new(format!("slots of table {number}")))?;
        self.entries(number, false, &rows)
    }

    fn block(&mut self, row: BlockRow) -> Result<(), Failure> {
        self.blocks.insert(row.number, row);
        Ok(())
    }

    fn pool(&mut self, row: PoolRow) -> Result<(), Failure> {
        self.pools.insert(row.table, row);
        Ok(())
    }

    fn array(&mut self, record: ArrayRecord) -> Result<(), Failure> {
        self.arrays.insert(record.handle, record);
        Ok(())
    }

    fn map(&mut self, record: MapRecord) -> Result<(), Failure> {
        self.maps.insert(record.handle, record);
        Ok(())
    }

    fn slots(&mut self, record: SlotsRecord) -> Result<(), Failure> {
        if !self.has_slots {
            return Err(Malformed::new(format!("slots of handle {}", record.handle)).into());
        }
        self.core.take_memory(record.memory_bytes())?.keep();
        if let Some(before) = self.slots.insert(record.handle, record) {
            self.core.budget.give_back(before.memory_bytes());
        }
        Ok(())
    }

    fn check_room(&mut self, bytes: u64) -> Result<(), Failure> {
        self.core.take_memory(bytes)?;
        Ok(())
    }

    fn gone(&mut self, handle: u64) -> Result<(), Failure> {
        if let Some(slots) = self.slots.remove(&handle) {
            self.core.budget.give_back(slots.memory_bytes());
        }
        self.arrays.remove(&handle);
        self.maps.remove(&handle);
        Ok(())
    }

    fn record(&mut self, bytes: Vec<u8>) -> Result<(), Failure> {
        self.record = bytes;
        Ok(())
    }
}

impl<'a> Loading<'a> {
    fn new(core: &'a Core, root: &Root) -> Self {
        Self {
            core,
            sectors: log::sectors(root.given_slabs),
            tables: BTreeMap::new(),
            blocks: HashMap::new(),
            pools: BTreeMap::new(),
            arrays: BTreeMap::new(),
            maps: BTreeMap::new(),
            slots: BTreeMap::new(),
            has_slots: root.has_slots,
            record: Vec::new(),
            epoch: root.epoch,
            anew: HashSet::new(),
        }
    }

    fn give_back(&self, table: &Table) {
        let lengths = if table.has_lengths() {
            Table::lengths_bytes(table.slots())
        } else {
            0
        };
        self.core
            .budget
            .give_back(self.core.table_bytes(table.slots()) + lengths);
    }

    fn read(&mut self, segments: &[SegmentRef], parts: &Receiver<Part>) -> Result<(), Failure> {
        for _ in segments {
            self.anew.clear();
            let mut stream = SegmentReader::new(parts);
            checkpoint::decode(&mut |out: &mut [u8]| stream.read(out), self)?;
            if !stream.is_at_end() {
                return Err(Malformed::new("bytes follow the records").into());
            }
        }
        Ok(())
    }

    /// Checks that all is there that is named, and makes the heap of it.
    fn finish(mut self, core: &Core, root: &Root, segments: Vec<Segment>) -> Result<Loaded, Failure> {
        let names = self
            .arrays
            .keys()
            .chain(self.maps.keys())
            .chain(self.slots.keys());
        if let Some(name) = names.copied().find(|name| !(1..root.next_handle).contains(name)) {
            return Err(Malformed::new(format!("handle {name}")).into());
        }
        let last = self.tables.keys().next_back().copied().unwrap_or(0);
        core.take_memory(u64::from(last) * NUMBER_BYTES)?.keep();
        self.check_arrays()?;
        self.check_maps()?;
        let mut promised = Promised::default();
        self.restore_pools(core, &mut promised)?;
        let lens = self.check_slots(core, &mut promised)?;
        promised.check(root)?;
        self.empty_unused(core);
        // A sum for each block, for as long as they are counted.
        let counting = core.take_memory(self.sectors / layout::BLOCK_SECTORS as u64 * 8)?;
        let live = self.live_bytes();
        drop(counting);
        let table_places: HashSet<u32> = segments
            .iter()
            .flat_map(|segment| segment.places.clone())
            .collect();
        let mut used = table_places.clone();
        let mut blocks = Vec::with_capacity(live.len());
        for (number, live_bytes) in live {
            let Some(row) = self.blocks.get(&number) else {
                return Err(Malformed::new(format!("block {number} is not there")).into());
            };
            let is_sound = u64::from(row.place) < log::places(root.given_slabs)
                && used.insert(row.place)
                && live_bytes <= BLOCK_PAYLOAD_BYTES as u64;
            if !is_sound {
                return Err(Malformed::new(format!("block {number} at place {}", row.place)).into());
            }
            blocks.push((*row, live_bytes as u32));
        }
        core.log.restore(Restored {
            blocks,
            given_slabs: root.given_slabs,
            table_places,
            epoch: root.epoch,
            sequence: root.sequence.wrapping_add(SEQUENCE_STEP),
            promised_bytes: promised.bytes,
            largest_bytes: promised.largest_bytes,
        });
        let saver = core.saver()?;
        let arrays = std::mem::take(&mut self.arrays);
        let maps = std::mem::take(&mut self.maps);
        *saver.handles.lock() = Handles::restore(
            arrays.into_values(),
            maps.into_values(),
            root.next_handle,
            &core.budget,
        );
        saver.progress.lock().segments = segments;
        self.restore_tables(core, &mut saver.tables.lock());
        let slots = std::mem::take(&mut self.slots).into_values();
        Ok(Loaded {
            record: self.record,
            slots: slots
                .zip(lens)
                .map(|(slots, lens)| {
                    // What remains is the slots'.
                    core.budget.give_back(slots.memory_bytes());
                    core.budget.force(slots.slots.div_ceil(64) * 8);
                    (slots, lens)
                })
                .collect(),
        })
    }

    fn check_arrays(&mut self) -> Result<(), Failure> {
        let mut owned: HashSet<u32> = HashSet::new();
        for record in self.arrays.values() {
            let wrong = || Malformed::new(format!("array {}", record.handle));
            let element = record.element_bytes as usize;
            let per_batch = pools::per_batch(element);
            let stored = per_batch
                .checked_mul(element)
                .filter(|len| (1..=OBJECT_MAX_BYTES).contains(len));
            let stored = stored.ok_or_else(wrong)?;
            let mut slots = 0;
            for (index, number) in record.tables.iter().enumerate() {
                let table = self.tables.get(number).ok_or_else(wrong)?;
                let is_last = index + 1 == record.tables.len();
                let is_sound = usize::from(table.len_bytes()) == stored
                    && !table.has_lengths()
                    && table.slots() <= TABLE_SLOTS
                    && (is_last || table.slots() == TABLE_SLOTS)
                    && !self.pools.contains_key(number)
                    && owned.insert(*number);
                if !is_sound {
                    return Err(wrong().into());
                }
                slots += table.slots() as u64;
            }
            let batches = record.len.div_ceil(per_batch as u64);
            if batches > slots || batches.div_ceil(TABLE_SLOTS as u64) != record.tables.len() as u64 {
                return Err(wrong().into());
            }
        }
        for record in self.slots.values() {
            let wrong = || Malformed::new(format!("slots of handle {}", record.handle));
            let mut left = record.slots as usize;
            for number in &record.tables {
                let table = self.tables.get(number).ok_or_else(wrong)?;
                let is_sound = table.slots() == left.min(SLOTS_TABLE_SLOTS)
                    && !self.pools.contains_key(number)
                    && owned.insert(*number);
                if !is_sound {
                    return Err(wrong().into());
                }
                left -= table.slots();
            }
        }
        let is_owned = |number: &u32| self.pools.contains_key(number) || owned.contains(number);
        match self.tables.keys().find(|number| !is_owned(number)) {
            Some(number) => Err(Malformed::new(format!("table {number} is nobody's")).into()),
            None => Ok(()),
        }
    }

    fn check_maps(&self) -> Result<(), Failure> {
        let mut owned = HashSet::new();
        for record in self.maps.values() {
            let array = |handle: u64| self.arrays.get(&handle);
            let is_sound = match (array(record.buckets), array(record.chains)) {
                (Some(buckets), Some(chains)) => {
                    let mut free = HashSet::new();
                    buckets.len >= 1
                        && buckets.len <= u64::from(u32::MAX)
                        && chains.len < u64::from(u32::MAX)
                        && owned.insert(record.buckets)
                        && owned.insert(record.chains)
                        && record.len <= (buckets.len + chains.len) * OBJECT_MAX_BYTES as u64
                        && record
                            .free
                            .iter()
                            .all(|number| u64::from(*number) < chains.len && free.insert(*number))
                }
                _ => false,
            };
            if !is_sound {
                return Err(Malformed::new(format!("map {}", record.handle)).into());
            }
        }
        Ok(())
    }

    /// Puts the pools in place.
    fn restore_pools(&self, core: &Core, promised: &mut Promised) -> Result<(), Failure> {
        for record in self.arrays.values() {
            let per_batch = pools::per_batch(record.element_bytes as usize);
            let stored = per_batch * record.element_bytes as usize;
            promised.add(core, record.len.div_ceil(per_batch as u64), stored);
        }
        let mut pools = core.pools.lock();
        for row in self.pools.values() {
            let wrong = || Malformed::new(format!("pool of table {}", row.table));
            let table = self.tables.get(&row.table).ok_or_else(wrong)?;
            if !pools.restore(row, table.slots()) {
                return Err(wrong().into());
            }
            core.budget.force(2 * row.used.len() as u64 * 8);
            pools.for_each_used_slot(row.table, |slot| {
                let len = table.get(slot).map_or(0, |(_, len)| len);
                promised.add(core, 1, len);
            });
            if !pools.has_right_lengths(row.table, |slot| table.get(slot).map_or(0, |(_, len)| len)) {
                return Err(wrong().into());
            }
        }
        let last = self.tables.keys().next_back().copied().unwrap_or(0);
        pools.restore_numbers(|number| self.tables.contains_key(&number), last);
        Ok(())
    }

    /// Counts the objects of slots. Gives the shortest and the longest of each.
    fn check_slots(
        &self,
        core: &Core,
        promised: &mut Promised,
    ) -> Result<Vec<RangeInclusive<usize>>, Failure> {
        let mut all = Vec::new();
        for record in self.slots.values() {
            let (mut shortest, mut longest) = (usize::MAX, 0);
            for (number, words) in words_of(record) {
                let wrong = || Malformed::new(format!("slots of handle {}", record.handle));
                let table = self.tables.get(&number).ok_or_else(wrong)?;
                let mut add = |count: u64, len: usize| {
                    promised.add(core, count, len);
                    (shortest, longest) = (shortest.min(len), longest.max(len));
                };
                let count: u64 = words.iter().map(|word| u64::from(word.count_ones())).sum();
                if !table.has_lengths() && count != 0 {
                    add(count, usize::from(table.len_bytes()));
                    continue;
                }
                for slot in (0..table.slots()).filter(|slot| is_set(&words, *slot)) {
                    add(1, table.get(slot as u32).map_or(0, |(_, len)| len));
                }
            }
            all.push(shortest..=longest);
        }
        Ok(all)
    }

    /// Empties slots that nobody has. A write that met the end of its object may have left something in one;
    /// who gets the slot is to find zeros.
    fn empty_unused(&mut self, core: &Core) {
        let mut used: HashMap<u32, u64> = HashMap::new();
        for record in self.arrays.values() {
            let mut left = record
                .len
                .div_ceil(pools::per_batch(record.element_bytes as usize) as u64);
            for number in &record.tables {
                used.insert(*number, left);
                left = left.saturating_sub(TABLE_SLOTS as u64);
            }
        }
        for record in self.slots.values().filter(|record| record.occupied.is_some()) {
            for (number, words) in words_of(record) {
                if let Some(table) = self.tables.get_mut(&number) {
                    for slot in (0..table.slots()).filter(|slot| !is_set(&words, *slot)) {
                        table.empty(slot..slot + 1);
                    }
                }
            }
        }
        let of_slots: HashSet<u32> = self
            .slots
            .values()
            .flat_map(|record| record.tables.clone())
            .collect();
        let pools = core.pools.lock();
        for (number, table) in &mut self.tables {
            if of_slots.contains(number) {
                continue;
            }
            if let Some(used) = used.get(number) {
                table.empty_from(usize::try_from(*used).unwrap_or(usize::MAX));
                continue;
            }
            let mut next = 0;
            pools.for_each_used_slot(*number, |slot| {
                table.empty(next..slot as usize);
                next = slot as usize + 1;
            });
            table.empty_from(next);
        }
    }

    /// Live bytes of each block that has some.
    fn live_bytes(&self) -> Vec<(u32, u64)> {
        let blocks = (self.sectors / layout::BLOCK_SECTORS as u64) as usize;
        let mut live = vec![0u64; blocks];
        for table in self.tables.values() {
            table.for_each_stored(|sector, len| {
                if let Some(live) = live.get_mut(log::block_of(sector) as usize) {
                    *live += layout::footprint_bytes(len) as u64;
                }
            });
        }
        let live = live.into_iter().enumerate().filter(|(_, bytes)| *bytes != 0);
        live.map(|(number, bytes)| (number as u32, bytes)).collect()
    }

    fn restore_tables(&mut self, core: &Core, shapes: &mut Shapes) {
        for shard in &core.shards {
            shard.lock().now = Now {
                epoch: self.epoch,
                committed: self.epoch,
                ..Now::default()
            };
        }
        for (number, table) in std::mem::take(&mut self.tables) {
            shapes.note(number, table.slots(), table.len_bytes(), false, &core.budget);
            let (shard, at) = core.shard_of(number);
            let mut shard = shard.lock();
            if shard.tables.len() <= at {
                shard.tables.resize_with(at + 1, || None);
            }
            shard.tables[at] = Some(table);
        }
        shapes.touched.clear();
    }
}

/// What is promised to objects.
#[derive(Debug, Default)]
struct Promised {
    bytes: u64,
    largest_bytes: usize,
}

impl Promised {
    fn add(&mut self, core: &Core, count: u64, len_bytes: usize) {
        let each = core.log.promised_each(len_bytes) as u64;
        self.bytes = self.bytes.saturating_add(count.saturating_mul(each));
        if count != 0 {
            self.largest_bytes = self.largest_bytes.max(layout::footprint_bytes(len_bytes));
        }
    }

    fn check(&self, root: &Root) -> Result<(), Malformed> {
        if self.bytes > log::sectors(root.given_slabs.max(root.capacity_slabs)) * 512 {
            return Err(Malformed::new("more objects than the store has room for"));
        }
        Ok(())
    }
}

/// The tables of slots, each with the bits of its slots.
fn words_of(record: &SlotsRecord) -> impl Iterator<Item = (u32, [u64; SLOTS_TABLE_SLOTS / 64])> {
    record.tables.iter().enumerate().map(|(index, number)| {
        let words = std::array::from_fn(|word| {
            let first = index * SLOTS_TABLE_SLOTS + word * 64;
            match &record.occupied {
                Some(words) => words.get(first / 64).copied().unwrap_or_default(),
                None => match (record.slots as usize).saturating_sub(first) {
                    64.. => u64::MAX,
                    left => (1 << left) - 1,
                },
            }
        });
        (*number, words)
    })
}

fn is_set(words: &[u64], slot: usize) -> bool {
    words[slot / 64] & 1 << (slot % 64) != 0
}

const _: () = assert!(BLOCK_BYTES == HEAD_BYTES + PAYLOAD_BYTES);

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use varve_far::Dram;

    #[test]
    fn table_begins_once_in_a_segment_and_unused_slots_are_empty() {
        let heap = FarHeap::new(Dram::new(8), &Config::new(4 << 20)).unwrap();
        let root = Root {
            schema_tag: 0,
            generation: 2,
            file_id: 0,
            capacity_slabs: 8,
            given_slabs: 1,
            sequence: 1,
            epoch: 1,
            next_handle: 2,
            has_slots: false,
            segments: Vec::new(),
        };
        let mut loading = Loading::new(heap.core(), &root);
        let row = TableRow {
            number: 1,
            shape: Some((10, 200)),
            is_new: true,
        };
        loading.table(row).unwrap();
        assert!(matches!(loading.table(row), Err(Failure::Malformed(_))));
        let at = |slot, value| Row { slot, len: 0, value };
        loading
            .entries(1, false, &[at(1, 6), at(2, 7), at(9, 8)])
            .unwrap();
        let array = ArrayRecord {
            handle: 1,
            element_bytes: 200,
            len: 2,
            tables: vec![1],
        };
        loading.array(array).unwrap();
        loading.empty_unused(heap.core());
        let table = &loading.tables[&1];
        assert_eq!(table.get(1), Some((Entry::At(5), 200)));
        assert_eq!(table.get(2), Some((Entry::Empty, 200)));
        assert_eq!(table.get(9), Some((Entry::Empty, 200)));
    }
}
