//! The heap: object tables, the cache of objects in memory, the log, and the limit of memory over all of
//! them.
//!
//! Owns where each object is and moves it: `access` brings it into memory, `evict` writes it out, `clean`
//! moves
//! it inside the log, `arrays` and `alloc` make and free it. Knows no types: handles do.
//!
//! With a file, checkpoints of it are made by `save` and read by `restore`; `handles` knows the arrays and
//! maps that are in them, `owner` what somebody outside has.
//!
//! # Locks
//!
//! Who makes a checkpoint, then the cut (operations on several objects share it; a cut has it alone), then
//! pools, then the cleaner, then one shard, then the log. No two shards at once. No byte is read or written
//! on a
//! device with a shard or the log locked; a slab is allocated so. A shard holds whole tables: all that is
//! known of an object changes under one lock. A cut takes them all, in order. What is known of handles and of
//! tables' shapes for checkpoints has locks under which nothing else is locked.
//!
//! A read of the device is made without a lock. The object may be written, cleaned, freed meanwhile, and its
//! block may be used again. So the place is compared afterwards, and the block's sequence number, before
//! bytes
//! or errors count for anything; and since the sequence number is in the checksum, bytes of another time are
//! no object.

mod access;
mod alloc;
mod arrays;
mod background;
mod clean;
#[cfg(test)]
mod crash_tests;
mod evict;
mod gate;
mod handles;
mod owner;
mod refill;
mod restore;
mod save;
mod segments;

pub(crate) use access::{Intent, Pin};
pub(crate) use arrays::Array;
pub use clean::Cleaned;
pub(crate) use handles::MapState;
pub use owner::{SlotsHeap, SlotsOut, SlotsOwner};
pub use save::{Checkpointed, Together};

use crate::budget::Budget;
use crate::checkpoint::Row;
use crate::error::Error;
use crate::frames::{Frames, data_bytes as frames_data_bytes};
use crate::layout::BLOCK_BYTES;
use crate::log::{self, Log, LogStats};
use crate::pools::Pools;
use crate::table::{self, Entry, Key, Now, Table};
use background::Background;
use clean::Cleaner;
use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use varve_far::Backend;

/// Memory of a heap without any object.
const FIXED_BYTES: u64 = log::BUFFER_BYTES + BLOCK_BYTES as u64 + CLEANER_LIST_BYTES;
/// The cleaner's list of a block's objects.
const CLEANER_LIST_BYTES: u64 = 64 << 10;
/// The smallest limit of memory.
pub const MEMORY_MIN_BYTES: u64 = 2 * FIXED_BYTES;
const SHARDS_MAX: u64 = 64;
const SHARD_BYTES: u64 = 1 << 20;

/// How a heap is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Most memory for everything: objects, tables, records, the log's buffers. At least
    /// [`MEMORY_MIN_BYTES`].
    /// Lists that grow pass it for a moment, by an eighth of the frames (32 bytes an object in memory).
    pub memory_limit_bytes: u64,
    /// Most bytes of objects that guards hold (the seed's page buffer); a quarter of the limit at most.
    pub page_buffer_bytes: u64,
    /// Most of the store that is promised to objects, 0.1 to 0.95: the fuller, the more the cleaner writes.
    pub fill_max: f64,
    /// Whether a thread writes and cleans in the background. Without it the threads that allocate and write
    /// do.
    pub has_thread: bool,
}

impl Config {
    /// That much memory, and the seed's other values: a page buffer of 25 MiB, a store filled to 90 %.
    #[must_use]
    pub const fn new(memory_limit_bytes: u64) -> Self {
        Self {
            memory_limit_bytes,
            page_buffer_bytes: 25 << 20,
            fill_max: 0.9,
            has_thread: true,
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.memory_limit_bytes < MEMORY_MIN_BYTES {
            return Err(Error::Config(format!(
                "a memory limit of {} bytes is too small: {MEMORY_MIN_BYTES} is the least",
                self.memory_limit_bytes
            )));
        }
        if !(0.1..=0.95).contains(&self.fill_max) {
            return Err(Error::Config(format!(
                "fill_max is {}, not 0.1 to 0.95",
                self.fill_max
            )));
        }
        Ok(())
    }
}

/// Name of an object of [`FarHeap::alloc`]. Valid until it is freed; the number may then name another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId(pub(crate) u64);

impl ObjectId {
    /// The name as a number, for where it is stored. Not 0.
    #[must_use]
    pub const fn to_u64(self) -> u64 {
        self.0
    }

    /// The name of a number. One that no object has is [`Error::NotAllocated`] when it is used.
    #[must_use]
    pub const fn from_u64(number: u64) -> Self {
        Self(number)
    }

    const fn new(key: Key, index: u32) -> Self {
        Self(key.number() << 8 | index as u64)
    }

    /// The stored object, and the place in its batch.
    pub(crate) const fn parts(self) -> (Key, u32) {
        let mut key = Key::of_number(self.0 >> 8);
        // More bits than a table's number has: of no table.
        if self.0 >> 48 != 0 {
            key.table = 0;
        }
        (key, (self.0 & 0xff) as u32)
    }
}

/// What a heap has and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// The limit of memory.
    pub memory_limit_bytes: u64,
    /// Memory in use, of it.
    pub memory_used_bytes: u64,
    /// Accesses to objects in memory.
    pub hits: u64,
    /// Accesses to objects that were not.
    pub misses: u64,
    /// Objects in memory now.
    pub cached: u64,
    /// Objects that left memory.
    pub evicted: u64,
    /// Those of them that were written.
    pub evicted_dirty: u64,
    /// The object store.
    pub log: LogStats,
}

/// Objects of some tables, and their places.
#[derive(Debug, Default)]
struct Shard {
    tables: Vec<Option<Box<Table>>>,
    frames: Frames,
    hits: u64,
    misses: u64,
    cached: u64,
    evicted: u64,
    evicted_dirty: u64,
    now: Now,
    /// Entries as they were at the last cut, of objects that changed before its checkpoint came to them.
    saved: Vec<(Key, Row)>,
    /// Objects as they were then.
    copies: Vec<(Key, Box<[u8]>)>,
}

impl Shard {
    fn get(&self, at: usize, slot: u32) -> Option<(Entry, usize)> {
        self.tables.get(at)?.as_ref()?.get(slot)
    }

    /// Whether a cut ended an epoch, whose checkpoint is being made.
    fn has_ended(&self, epoch: u32) -> bool {
        self.now.is_saving && epoch < self.now.epoch
    }

    fn set(&mut self, at: usize, slot: u32, entry: Entry) {
        if let Some(Some(table)) = self.tables.get_mut(at) {
            table.set(slot, entry);
        }
    }
}

/// What the handles and the thread share.
pub(crate) struct Core {
    log: Log,
    shards: Box<[CachePadded<Mutex<Shard>>]>,
    shard_bits: u32,
    is_wide: bool,
    budget: Arc<Budget>,
    page_buffer: Budget,
    pools: Mutex<Pools>,
    cleaner: Mutex<Cleaner>,
    /// The shard that gives memory next.
    hand: AtomicUsize,
    signal: background::Signal,
    room: refill::Room,
    /// What makes checkpoints, where the heap has a file for them.
    saver: Option<save::Saver>,
    owned: owner::Owned,
}

impl Core {
    fn shard_of(&self, table: u32) -> (&Mutex<Shard>, usize) {
        let number = table as usize & (self.shards.len() - 1);
        (&self.shards[number], table as usize >> self.shard_bits)
    }

    fn lock(&self, key: Key) -> (MutexGuard<'_, Shard>, usize) {
        let (shard, at) = self.shard_of(key.table);
        (shard.lock(), at)
    }
}

impl Core {
    /// A heap without a thread.
    fn build(backend: Box<dyn Backend>, config: &Config, saver: Option<save::Saver>) -> Result<Self, Error> {
        config.check()?;
        let slabs = backend.capacity_slabs();
        if log::sectors(slabs) > table::SECTORS_MAX {
            return Err(Error::Config(format!(
                "{slabs} slabs are more than can be addressed"
            )));
        }
        let limit = config.memory_limit_bytes;
        let budget = Arc::new(Budget::new(limit));
        let reserve = saver.as_ref().map_or(0, |_| save::reserve_blocks(limit));
        budget.force(FIXED_BYTES + saver.as_ref().map_or(0, |_| save::FIXED_BYTES));
        let shards = (limit / SHARD_BYTES).clamp(1, SHARDS_MAX);
        let shard_bits = shards.ilog2();
        let core = Self {
            is_wide: table::needs_wide(log::sectors(slabs)),
            log: Log::new(backend, config.fill_max, reserve, Arc::clone(&budget))?,
            shards: (0..1 << shard_bits).map(|_| CachePadded::default()).collect(),
            shard_bits,
            page_buffer: Budget::new(config.page_buffer_bytes.min(limit / 4)),
            budget,
            pools: Mutex::default(),
            cleaner: Mutex::default(),
            hand: AtomicUsize::new(0),
            signal: background::Signal::default(),
            room: refill::Room::default(),
            saver,
            owned: owner::Owned::default(),
        };
        if core.saver.is_some() {
            core.pools.lock().track();
        }
        Ok(core)
    }

    fn start(self, config: &Config) -> Result<FarHeap, Error> {
        let core = Arc::new(self);
        let background = Background::start(config.has_thread.then_some(&core))
            .map_err(|error| Error::Config(format!("no thread for the object store: {error}")))?;
        Ok(FarHeap {
            core,
            _background: Arc::new(background),
        })
    }
}

/// A heap of far objects. Clones are the same heap; it ends, and its store with it, when the last clone and
/// the
/// last handle are dropped.
#[derive(Clone)]
pub struct FarHeap {
    core: Arc<Core>,
    _background: Arc<Background>,
}

impl std::fmt::Debug for FarHeap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FarHeap").field("stats", &self.stats()).finish()
    }
}

impl FarHeap {
    /// A heap over an empty backend.
    ///
    /// # Errors
    /// `Config`; `Io` where no thread can be started.
    pub fn new(backend: impl Backend + 'static, config: &Config) -> Result<Self, Error> {
        Core::build(Box::new(backend), config, None)?.start(config)
    }

    /// What the handles work on.
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Whether two handles are of the same heap.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// What the heap has and did. Sums over parts that change meanwhile.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = Stats {
            memory_limit_bytes: self.core.budget.limit(),
            memory_used_bytes: self.core.budget.used(),
            log: self.core.log.stats(),
            ..Stats::default()
        };
        for shard in &self.core.shards {
            let shard = shard.lock();
            stats.hits += shard.hits;
            stats.misses += shard.misses;
            stats.cached += shard.cached;
            stats.evicted += shard.evicted;
            stats.evicted_dirty += shard.evicted_dirty;
        }
        stats
    }
}
