//! The store of one device: its state in memory, and its way to the medium.

use super::get::Usual;
use super::journal::Journal;
use super::layout::Superblock;
use super::log::{Segment, Spares};
use super::positions::{self, Waiting};
use super::purge::{Purges, ScopeHash};
use super::put::Recent;
use super::stats::Stats;
use super::{Options, StatsSnapshot, StoreError, away, beside, checkpoint};
use crate::device::{Device, DeviceError, OrderedDevice, SplitDevice};
use crate::hash::KeyHash;
use crate::index::{Index, Lap};
use crate::policy::Policy;
use crate::store::admission::Door;
use crate::store::hot::Hot;
use crate::store::journal::Change;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Number of counters that detect changes of a key during a read.
const MUTATIONS: usize = 256;
/// Failed reads after which a device is given up.
const READ_ERRORS_MAX: u64 = 64;
/// Waiting blocks of the Disk Table at which they are written.
pub(super) const PENDING_MAX: usize = 256;

/// State that every call accesses, under a lock that is held briefly.
pub(super) struct State {
    pub index: Index,
    pub lap: Lap,
    /// The segment that is being filled.
    pub segment: Option<Segment>,
    /// The segment that is being written.
    pub flushing: Option<Arc<Segment>>,
    /// Bins that are not yet written.
    pub pending: BTreeMap<u64, Arc<Vec<u8>>>,
    /// Positions that are neither in the index nor in the file.
    pub waiting: Waiting,
    /// How often the index was made anew: the file of sets is of one making.
    pub index_made: u8,
    /// The sets that `Basic` and `Set` read most recently.
    pub recent: Recent,
    pub hot: Hot,
    pub purges: Purges,
    /// Objects with lower versions are discarded.
    pub floor: u64,
    pub mutations: [u32; MUTATIONS],
    /// Set while a checkpoint is written: hits do not change the order of use then.
    pub frozen: bool,
}

impl State {
    pub fn mutation(&self, hash: KeyHash) -> u32 {
        self.mutations[hash.0 as usize % MUTATIONS]
    }

    pub fn mutate(&mut self, hash: KeyHash) {
        let counter = &mut self.mutations[hash.0 as usize % MUTATIONS];
        *counter = counter.wrapping_add(1);
        self.hot.remove(hash);
    }
}

/// State that only mutators access.
pub(super) struct Writer {
    pub version: u64,
    pub journal: Journal,
    pub checkpoint: u64,
    pub door: Door,
    pub last_flush: Instant,
    /// Units of the log below this are durably promised.
    pub promised: u64,
    /// Whether anything was written since the last flush.
    pub dirty: bool,
    pub closed: bool,
}

/// Sizes of what a store has in memory. All have bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemorySizes {
    /// The index, bytes.
    pub index_bytes: u64,
    /// Hot objects, bytes by their own account.
    pub hot_bytes: u64,
    /// Hot objects and pieces.
    pub hot_objects: u64,
    /// Positions that wait for the position file.
    pub waiting_positions: u64,
    /// Changes that wait for the journal; 0 while a change is under way.
    pub waiting_changes: u64,
    /// Bins that wait to be written.
    pub waiting_bins: u64,
}

impl MemorySizes {
    /// Adds those of another store.
    pub fn add(&mut self, other: &Self) {
        self.index_bytes += other.index_bytes;
        self.hot_bytes += other.hot_bytes;
        self.hot_objects += other.hot_objects;
        self.waiting_positions += other.waiting_positions;
        self.waiting_changes += other.waiting_changes;
        self.waiting_bins += other.waiting_bins;
    }
}

impl Writer {
    pub fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version - 1
    }
}

/// The store of one device.
pub struct Shard {
    pub(super) device: Arc<dyn Device>,
    pub(super) layout: Superblock,
    pub(super) options: Options,
    pub(super) state: Mutex<State>,
    pub(super) writer: Mutex<Writer>,
    pub(super) stats: Stats,
    pub(super) spares: Spares,
    pub(super) usual: Usual,
    failed: AtomicBool,
    fault: Mutex<Option<String>>,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard")
            .field("device", &self.device.name())
            .finish_non_exhaustive()
    }
}

impl Shard {
    pub(super) fn from_parts(
        (device, aside): (Arc<dyn Device>, Option<Arc<dyn Device>>),
        layout: Superblock,
        options: Options,
        state: State,
        writer: Writer,
    ) -> Self {
        let mut device = match options.order_transfers {
            true => Arc::new(OrderedDevice::new(device)) as Arc<dyn Device>,
            false => device,
        };
        if let Some(aside) = aside {
            let area = layout.positions_file;
            let range = area.off..area.off + area.len;
            device = Arc::new(SplitDevice::new(device, aside, range, beside::BEGIN));
        }
        Self {
            device,
            layout,
            options,
            state: Mutex::new(state),
            writer: Mutex::new(writer),
            stats: Stats::default(),
            spares: Spares::default(),
            usual: Usual::default(),
            failed: AtomicBool::new(false),
            fault: Mutex::default(),
        }
    }

    /// The superblock.
    pub const fn layout(&self) -> &Superblock {
        &self.layout
    }

    /// The device's name.
    pub fn device_name(&self) -> String {
        self.device.name()
    }

    /// Counters since the store was opened.
    pub fn stats(&self) -> StatsSnapshot {
        self.stats.snapshot()
    }

    /// The reason why the device was given up, if it was.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().clone()
    }

    /// Whether the device was given up, so that nothing is read or written any more.
    pub fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Bytes of memory that the index takes, and the positions that wait for the file.
    pub fn index_memory_bytes(&self) -> (u64, u64) {
        let state = self.state.lock();
        // A B-tree node has eight bytes of key and eight of value, and is at worst half full.
        (state.index.memory_bytes(), state.waiting.len() as u64 * 32)
    }

    /// Bytes of objects in memory.
    pub fn hot_bytes(&self) -> u64 {
        self.state.lock().hot.bytes() as u64
    }

    /// Sizes of what is in memory. Waits for no device.
    pub fn memory_sizes(&self) -> MemorySizes {
        // Whoever holds this lock may wait for the device.
        let writer = self.writer.try_lock();
        let waiting_changes = writer.map_or(0, |writer| writer.journal.waiting.len() as u64);
        let state = self.state.lock();
        MemorySizes {
            index_bytes: state.index.memory_bytes(),
            hot_bytes: state.hot.bytes() as u64,
            hot_objects: state.hot.len() as u64,
            waiting_positions: state.waiting.len() as u64,
            waiting_bins: state.pending.len() as u64,
            waiting_changes,
        }
    }

    /// Number of objects in the index, and its capacity. Looks at every set.
    pub fn fill(&self) -> (u64, u64) {
        let room = self.layout.sets * self.layout.shape().ways() as u64;
        let mut known = 0;
        for number in 0..self.layout.sets {
            let mut state = self.state.lock();
            let lap = state.lap;
            if matches!(state.index, Index::Absent) {
                return (0, room);
            }
            let set = state.index.get(number);
            let live = |entry: &crate::index::Entry| super::put::lives(&lap, self.layout.shape(), entry);
            known += set.map_or(0, |set| set.entries().filter(live).count() as u64);
        }
        (known, room)
    }

    /// Seconds since 1970.
    pub(super) fn now(&self) -> u64 {
        (self.options.clock)()
    }

    /// Gives the device up: every later lookup is a miss. Tries to mark the superblock, so that nothing
    /// outdated is found after a restart.
    pub(super) fn fail(&self, error: &StoreError) {
        if self.failed.swap(true, Ordering::AcqRel) {
            return;
        }
        *self.fault.lock() = Some(error.to_string());
        let mut mark = self.layout;
        mark.floor = u64::MAX;
        let _ = mark.write(&*self.device).and_then(|()| Ok(self.device.flush()?));
    }

    pub(super) fn count_read_error(&self, error: &StoreError) {
        Stats::count(&self.stats.read_errors, 1);
        if self.stats.read_errors.load(Ordering::Relaxed) >= READ_ERRORS_MAX {
            self.fail(error);
        }
    }

    /// Writes to the log.
    pub(super) fn write_log(&self, off: u64, data: &[u8]) -> Result<(), DeviceError> {
        Stats::count(&self.stats.written_bytes, data.len() as u64);
        Stats::count(&self.stats.log_writes, 1);
        self.device.write_at(off, data)
    }

    /// Makes all earlier puts, removals and purges durable. Durable when this returns.
    ///
    /// # Errors
    /// The device failed; it is given up.
    pub fn flush(&self) -> Result<(), StoreError> {
        let mut writer = self.writer.lock();
        if self.is_failed() {
            return Ok(());
        }
        self.guarded(&mut writer, |shard, writer| shard.flush_locked(writer))
    }

    /// Runs mutating work; an error of the device gives the device up.
    pub(super) fn guarded<T>(
        &self,
        writer: &mut MutexGuard<'_, Writer>,
        work: impl FnOnce(&Self, &mut Writer) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let result = work(self, writer);
        if let Err(error @ (StoreError::Device(_) | StoreError::JournalFull)) = &result {
            self.fail(error);
        }
        result
    }

    pub(super) fn flush_locked(&self, writer: &mut Writer) -> Result<(), StoreError> {
        if !writer.dirty {
            return Ok(());
        }
        self.write_open_segment()?;
        self.write_pending()?;
        self.write_journal(writer)?;
        self.sync(writer)?;
        (writer.dirty, writer.last_flush) = (false, Instant::now());
        let due = self.state.lock().waiting.len() >= self.waiting_max();
        if due {
            self.sweep()?;
        }
        self.checkpoint_if_due(writer)
    }

    /// Positions that wait in memory before the file is swept: one for 512 objects.
    pub(super) fn waiting_max(&self) -> usize {
        (self.layout.sets as usize * self.layout.shape().ways() / 512).max(1024)
    }

    /// Whether sets that leave memory are kept in the file of sets.
    pub(super) fn has_file_of_sets(&self) -> bool {
        self.layout.aside != 0 && self.layout.shape().policy() == Policy::SetMemLru
    }

    /// Sets that left memory at which they are written to the file of sets.
    fn left_max(&self) -> usize {
        (self.layout.sets as usize / 2048).clamp(16, 8192)
    }

    /// Whether so many sets left memory that no more are to be brought in.
    pub(super) fn has_too_many_left(&self, state: &State) -> bool {
        state.index.left_len() >= 4 * self.left_max()
    }

    /// Writes the sets that left memory to the file of sets, if they are many. Called under the writer's
    /// lock: what left memory stays there meanwhile.
    pub(super) fn spill(&self) -> Result<(), StoreError> {
        let (left, made) = {
            let state = self.state.lock();
            if state.index.left_len() < self.left_max() {
                return Ok(());
            }
            (state.index.copy_left(), state.index_made)
        };
        let written = away::write(&*self.device, &self.layout, made, &left)?;
        Stats::count(&self.stats.written_bytes, written);
        Stats::count(&self.stats.sweeps, 1);
        self.state.lock().index.forget_left(&left);
        Ok(())
    }

    /// As [`spill`](Self::spill), after a lookup; whoever has the writer's lock does it otherwise.
    pub(super) fn spill_if_idle(&self) {
        if self.state.lock().index.left_len() < self.left_max() {
            return;
        }
        let Some(mut writer) = self.writer.try_lock() else {
            return;
        };
        if !self.is_failed() && !writer.closed {
            let _ = self.guarded(&mut writer, |shard, _| shard.spill());
        }
    }

    fn flush_device(&self) -> Result<(), DeviceError> {
        Stats::count(&self.stats.flushes, 1);
        self.device.flush()
    }

    /// Flushes the device.
    pub(super) fn sync(&self, writer: &mut Writer) -> Result<(), StoreError> {
        let promised = self.promise();
        self.flush_device()?;
        writer.journal.durable = writer.journal.sequence;
        // Each written journal page promises at least this; see `write_journal`.
        writer.promised = writer.promised.max(promised);
        Ok(())
    }

    /// The point up to which a page promises the log: some segments ahead, so that few segments have to wait
    /// for a flush.
    fn promise(&self) -> u64 {
        let segments = self.layout.log.len / u64::from(self.layout.segment_bytes);
        let ahead = (segments / 256).clamp(1, 64) * self.layout.segment_units();
        self.state.lock().lap.head.0 + ahead
    }

    pub(super) fn write_journal(&self, writer: &mut Writer) -> Result<(), StoreError> {
        if self.layout.shape().policy().has_table() && !writer.journal.waiting.is_empty() {
            // An entry must not become durable before its block: after a crash the bin might hold an older
            // version of the same key.
            self.write_pending()?;
            self.flush_device()?;
        }
        let head = crate::index::LogPoint(self.promise().max(writer.promised));
        let before = writer.journal.sequence;
        writer
            .journal
            .write(&*self.device, &self.layout, head, writer.version)?;
        let pages = writer.journal.sequence - before;
        Stats::count(&self.stats.written_bytes, 2 * pages * super::layout::PAGE);
        Stats::count(&self.stats.journal_writes, 2);
        Ok(())
    }

    /// Promises the log durably up to `end`, before anything is written there.
    pub(super) fn ensure_promised(&self, writer: &mut Writer, end: u64) -> Result<(), StoreError> {
        if end > writer.promised {
            self.write_journal(writer)?;
            self.sync(writer)?;
        }
        debug_assert!(end <= writer.promised);
        Ok(())
    }

    /// Writes the waiting positions to the position file.
    pub(super) fn sweep(&self) -> Result<(), StoreError> {
        let waiting = self.state.lock().waiting.copy();
        if waiting.is_empty() {
            return Ok(());
        }
        let written = positions::sweep(&*self.device, &self.layout, &waiting)?;
        Stats::count(&self.stats.written_bytes, written);
        Stats::count(&self.stats.sweeps, 1);
        self.state.lock().waiting.done(&waiting);
        Ok(())
    }

    pub(super) fn checkpoint_if_due(&self, writer: &mut Writer) -> Result<(), StoreError> {
        if writer.journal.is_nearly_full(&self.layout) {
            self.checkpoint_locked(writer, false)?;
        }
        Ok(())
    }

    /// Writes the index to the medium. All earlier changes are durable then.
    pub(super) fn checkpoint_locked(&self, writer: &mut Writer, clean: bool) -> Result<(), StoreError> {
        self.write_open_segment()?;
        self.write_pending()?;
        self.write_journal(writer)?;
        self.sync(writer)?;
        writer.last_flush = Instant::now();
        self.state.lock().frozen = true;
        let result = self.sweep().and_then(|()| self.checkpoint_frozen(writer, clean));
        self.state.lock().frozen = false;
        result
    }

    fn checkpoint_frozen(&self, writer: &mut Writer, clean: bool) -> Result<(), StoreError> {
        let (purges, floor, log_head) = {
            let mut state = self.state.lock();
            let floor = state.floor;
            state.purges.forget_below(floor);
            (state.purges.clone(), floor, state.lap.head)
        };
        let head = if clean {
            log_head
        } else {
            crate::index::LogPoint(writer.promised.max(log_head.0))
        };
        let sequence = writer.checkpoint + 1;
        let journal = writer.journal.sequence;
        let mut first =
            checkpoint::head_of(sequence, self.layout.epoch, journal, head, writer.version, floor);
        first.clean = u64::from(clean);
        if self.is_indexed() {
            first.index_bytes = self.layout.sets * self.layout.shape().set_bytes() as u64;
        }
        checkpoint::write(&*self.device, &self.layout, first, &purges, |from, out| {
            if let Index::Full(full) = &self.state.lock().index {
                out.copy_from_slice(&full.bytes()[from as usize..from as usize + out.len()]);
            }
        })?;
        Stats::count(&self.stats.written_bytes, first.index_bytes);
        Stats::count(&self.stats.checkpoints, 1);
        writer.checkpoint = sequence;
        writer.journal.since = journal;
        writer.journal.durable = journal;
        Ok(())
    }

    /// Whether the index is kept on the medium. `SetMemLru` reads it from the Disk Table.
    pub(super) fn is_indexed(&self) -> bool {
        let policy = self.layout.shape().policy();
        policy.has_index() && policy != Policy::SetMemLru
    }

    /// Flushes, if the flush interval has passed since the last flush.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn tick(&self) -> Result<(), StoreError> {
        let due = self.writer.lock().last_flush.elapsed() >= self.options.flush_interval;
        if due { self.flush() } else { Ok(()) }
    }

    /// Flushes and writes a checkpoint, so that the next start is quick. Later puts are refused.
    ///
    /// # Errors
    /// The device failed.
    pub fn close(&self) -> Result<(), StoreError> {
        let mut writer = self.writer.lock();
        if self.is_failed() || writer.closed {
            return Ok(());
        }
        writer.closed = true;
        self.guarded(&mut writer, |shard, writer| shard.checkpoint_locked(writer, true))
    }

    /// Purges a scope: objects put into it earlier are discarded. Durable when this returns; the cost does
    /// not depend on the number of objects.
    ///
    /// # Errors
    /// The device failed.
    pub fn purge(&self, scope: ScopeHash) -> Result<(), StoreError> {
        let mut writer = self.writer.lock();
        if self.is_failed() {
            return Ok(());
        }
        self.guarded(&mut writer, |shard, writer| {
            let version = writer.next_version();
            let folded = {
                let mut state = shard.state.lock();
                let folded = state.purges.is_full_for(scope);
                if folded {
                    let floor = state.purges.drop_older_half();
                    state.floor = state.floor.max(floor);
                }
                state.purges.add(scope, version);
                folded
            };
            let ScopeHash { hash, prefix_len } = scope;
            writer.journal.waiting.push(Change::Purge {
                scope: hash,
                prefix_len,
                version,
            });
            writer.dirty = true;
            shard.flush_locked(writer)?;
            // Only checkpoints hold the floor.
            if folded {
                shard.checkpoint_locked(writer, false)
            } else {
                Ok(())
            }
        })
    }

    /// Purges everything. Durable when this returns.
    ///
    /// # Errors
    /// The device failed.
    pub fn purge_all(&self) -> Result<(), StoreError> {
        let mut writer = self.writer.lock();
        if self.is_failed() {
            return Ok(());
        }
        self.guarded(&mut writer, |shard, writer| {
            let version = writer.next_version();
            shard.state.lock().floor = version;
            shard.checkpoint_locked(writer, false)
        })
    }

    /// Keeps this share of the sets of `SetMemLru` in memory while the store runs; at a half the policy
    /// becomes `SetMem`.
    pub fn set_resident_share(&self, share: f64) {
        let _writer = self.writer.lock();
        let (shape, sets) = (self.layout.shape(), self.layout.sets);
        let resident = (sets as f64 * share.clamp(0.0, 1.0)) as u64;
        let mut state = self.state.lock();
        state.index.resize(shape, sets, resident);
        if self.has_file_of_sets() {
            state.index.keep_left();
            state.index_made = state.index_made.wrapping_add(1);
        }
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        // Callers that need the error call `close` themselves.
        let _ = self.close();
    }
}
