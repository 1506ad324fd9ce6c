//! The open pool: the state shared between readers and the one writer. Knows no transaction.
//!
//! `open` recovers it, `snapshot` gives consistent views, `query` and `read` answer from them.

pub(crate) mod demotion_state;
pub(crate) mod fetch;
mod first_devices;
pub(crate) mod in_place;
mod open;
mod query;
pub(crate) mod read;
mod scattered;
mod shared_blocks;
mod snapshot;
mod sums;
mod superblock;
mod verified;
pub(crate) mod writer;

pub(crate) use open::{journal_id, with_spans};
pub(crate) use snapshot::{Committed, Snapshot};
pub(crate) use superblock::{
    bad_superblocks, read_superblock, refuse_unknown, write_devices_area, write_superblocks,
};

use crate::cache::MetaCache;
use crate::layout::Layout;
use crate::seeded::{Bug, armed};
use crate::space::{Service, Space};
use crate::{Devices, Pass, Passes, PendingFrees, PoolMediaStats, Result, SpaceStats, StoreError, TierIo};
use demotion_state::DemotionState;
use in_place::InPlaceState;
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use shared_blocks::SharedBlocks;
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use varve_extent_tree::TreeError;
use varve_format::{BlockNo, HashKey, Tier, TxId};
use varve_media::span::Span;
use varve_media::stats::MediaFaultKind;
use varve_media::{BlockDevice, Verified};
use writer::Writer;

/// Footers of sealed units kept in DRAM.
const FOOTERS_CACHED: NonZeroUsize = NonZeroUsize::new(64).expect("not 0");
/// Most units that are trimmed at once: a device may take milliseconds for each, and commits wait.
const TRIMS_MAX: usize = 8;

pub(crate) type FooterKey = (Tier, u64, u64, u32);

/// An open pool. Share it in an `Arc`: reads run beside the one transaction.
pub struct Store {
    pub(crate) devices: Devices,
    pub(crate) layout: Layout,
    pub(crate) cache: MetaCache,
    /// Newest committed transaction. While the lock is held for reading, the committed metadata does not
    /// change.
    pub(crate) newest: RwLock<TxId>,
    /// A copy of `newest` that is read without its lock, which is held while metadata is read, perhaps from a
    /// disk.
    pub(crate) newest_number: AtomicU64,
    pub(crate) space: Mutex<Space>,
    pub(crate) writer: Mutex<Writer>,
    pub(crate) footers: Mutex<LruCache<FooterKey, Arc<Vec<u32>>>>,
    shared_blocks: SharedBlocks,
    pub(crate) verify_nvm: bool,
    /// Blocks of NVM whose reads are not verified again; `None`: every read is verified.
    pub(crate) verified: Option<Arc<Verified>>,
    /// The pool is being repaired: see [`Committed`].
    pub(crate) trusting: bool,
    /// Bytes read and written, by tier.
    pub(crate) io: [[AtomicU64; 2]; 3],
    /// Faults of the media.
    media_stats: PoolMediaStats,
    passes: Mutex<Passes>,
    /// State of the demotion of metadata.
    pub(crate) demotion: Mutex<DemotionState>,
    in_place: InPlaceState,
    /// Held while the feature of shared extents is set.
    pub(crate) sharing: Mutex<()>,
    /// The devices of SSD and HDD.
    pub(crate) spans: [Option<Arc<Span>>; 2],
    /// Devices that failed while others of their tier go on, by tier and number, and why.
    lost: Mutex<BTreeMap<(Tier, usize), Arc<str>>>,
    latched: OnceLock<Arc<str>>,
    /// Number of calls that ended the running checks.
    checks_over: AtomicU64,
}

impl Store {
    /// Returns the uuid of the pool.
    #[must_use]
    pub fn pool_uuid(&self) -> [u8; 16] {
        self.layout.sb.pool_uuid
    }

    /// Returns the key of the directories' name hash.
    #[must_use]
    pub fn hash_key(&self) -> HashKey {
        HashKey(self.layout.sb.dir_hash_key)
    }

    /// Returns the media.
    #[must_use]
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Sets whether reads compare data on NVM with its checksums, from this call on.
    pub const fn set_verify_nvm(&mut self, verify: bool) {
        self.verify_nvm = verify;
    }

    /// Returns the offset in NVM of the checksums of its data blocks, in bytes.
    #[must_use]
    pub fn nvm_checksums_at(&self) -> u64 {
        self.layout.checksum(Tier::Nvm, 0, 0).block.offset_bytes()
    }

    pub(crate) fn device(&self, tier: Tier) -> Result<&Arc<dyn BlockDevice>> {
        self.devices
            .block_device(tier)
            .ok_or_else(|| StoreError::Damaged(format!("the pool has no {} tier", tier.name())))
    }

    /// Takes the device out of service on which a write or flush of a tier failed, if others of the tier go
    /// on: the error is one of the transaction only then.
    pub(crate) fn lose_device(&self, tier: Tier, error: StoreError) -> StoreError {
        let (StoreError::Media(fault), Some(span)) = (&error, &self.spans[tier as usize - 1]) else {
            return error;
        };
        if !error.stops_writing() {
            return error;
        }
        let devices = span.devices();
        let named = |device: &Arc<dyn BlockDevice>| device.name() == *fault.device();
        let failed = devices
            .iter()
            .position(|device| device.as_ref().is_some_and(named));
        let Some(lane) = failed else { return error };
        let mut space = self.space.lock();
        let takes_more = |other: usize| other != lane && space.service(tier, other) == Service::Open;
        if !(0..devices.len()).any(takes_more) {
            return error;
        }
        space.set_service(tier, lane, Service::Closed);
        drop(space);
        span.give_up(lane);
        let reason: Arc<str> = error.to_string().into();
        let device = fault.device().to_string();
        if self
            .lost
            .lock()
            .insert((tier, lane), Arc::clone(&reason))
            .is_none()
        {
            tracing::error!(device, %reason, "a device takes no writes any more; others of its tier go on");
        }
        StoreError::DeviceLost { device, reason }
    }

    /// Returns why a device is out of service, if it is.
    pub(crate) fn lost(&self, tier: Tier, lane: usize) -> Option<Arc<str>> {
        self.lost.lock().get(&(tier, lane)).cloned()
    }

    /// Returns the newest committed transaction. Takes no lock.
    #[must_use]
    pub fn newest_tx(&self) -> TxId {
        TxId(self.newest_number.load(Ordering::Acquire))
    }

    /// Returns the reason why the pool is read-only, if it is.
    #[must_use]
    pub fn latched(&self) -> Option<Arc<str>> {
        self.latched.get().cloned()
    }

    /// Makes the pool read-only until it is opened again. The first reason stays.
    pub fn latch(&self, reason: &str) {
        if self.latched.set(Arc::from(reason)).is_ok() {
            tracing::error!(reason, "the pool is read-only from now on");
        }
    }

    /// Ends running checks with an error soon, so that they do not delay the daemon's end.
    pub fn end_checks(&self) {
        self.checks_over.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a number that identifies a check, for [`goes_on`](Self::goes_on).
    pub fn begin_check(&self) -> u64 {
        self.checks_over.load(Ordering::Relaxed)
    }

    /// # Errors
    /// After [`end_checks`](Self::end_checks).
    pub fn goes_on(&self, begun: u64) -> Result<()> {
        match self.begin_check() == begun {
            true => Ok(()),
            false => Err(StoreError::CheckEnded),
        }
    }

    /// Ends writing for good: waits for a running transaction, and fails every later one and its commit with
    /// `reason`. Reads continue. A pool that was read-only before keeps its own reason.
    pub fn close(&self, reason: &str) {
        let _writer = self.writer.lock();
        let _ = self.latched.set(Arc::from(reason));
    }

    pub(crate) fn latch_on(&self, error: &StoreError) {
        if error.stops_writing() {
            self.latch(&error.to_string());
        }
    }

    /// Returns whether a block of NVM is one of the fixed blocks of every pool: tables and bitmaps, which no
    /// file owns.
    #[must_use]
    pub fn is_fixed(&self, block: BlockNo) -> bool {
        let among_data = || self.layout.tables_among_data().any(|table| table == block.0);
        !block.is_cold() && (!self.layout.usable(Tier::Nvm, block.0) || among_data())
    }

    /// Returns the faults of the media since the pool was opened.
    #[must_use]
    pub const fn media_stats(&self) -> &PoolMediaStats {
        &self.media_stats
    }

    /// Counts an error if it shows that the content of a medium is not the content written. Errors of the
    /// devices count themselves.
    pub fn note_damage(&self, error: &StoreError) {
        let stats = match error {
            StoreError::DataChecksum { tier, .. } | StoreError::Footer { tier, .. } => {
                self.media_stats.tier(*tier)
            }
            StoreError::Block { block, .. } | StoreError::Tree(TreeError::Corrupt { block, .. }) => self
                .media_stats
                .tier(block.home().map_or(Tier::Nvm, |(tier, _)| tier)),
            // The error does not name the tier, which is mostly NVM.
            StoreError::Inode { .. } | StoreError::Damaged(_) => self.media_stats.tier(Tier::Nvm),
            StoreError::Tree(error) if error.is_damage() => self.media_stats.tier(Tier::Nvm),
            StoreError::Journal(_) | StoreError::JournalDamaged { .. } => self.media_stats.journal(),
            _ => return,
        };
        let place = match error {
            StoreError::DataChecksum { block, .. } | StoreError::Block { block, .. } => {
                format!("block {block}")
            }
            StoreError::Footer { unit, .. } => format!("unit {unit}"),
            StoreError::Inode { ino, .. } => format!("inode {ino}"),
            _ => String::new(),
        };
        stats.note(MediaFaultKind::Checksum, place, error.to_string());
    }

    /// Returns the results of the last complete checks since the pool was opened.
    #[must_use]
    pub fn passes(&self) -> Passes {
        *self.passes.lock()
    }

    pub(crate) fn note_pass(&self, note: impl FnOnce(&mut Passes, Pass), findings: usize) {
        let pass = Pass {
            ended_ns: varve_media::stats::now_ns(),
            findings: findings as u64,
        };
        note(&mut self.passes.lock(), pass);
    }

    /// Syncs the metadata in place and empties the journal, so that freed metadata blocks are released and
    /// the next open replays nothing. Durable when this returns.
    ///
    /// # Errors
    /// `Latched`, or a device failed (then the pool is latched).
    pub fn checkpoint(&self) -> Result<()> {
        let mut writer = self.writer.lock();
        self.checkpoint_with(&mut writer)
    }

    pub(crate) fn checkpoint_with(&self, writer: &mut Writer) -> Result<()> {
        if let Some(reason) = self.latched() {
            return Err(StoreError::Latched(reason));
        }
        if writer.journal.tail_tx() < writer.journal.newest() {
            self.move_tail(writer).inspect_err(|error| {
                self.latch(&format!("syncing metadata failed: {error}"));
            })?;
        }
        self.space.lock().set_tail(writer.journal.tail_tx());
        Ok(())
    }

    fn move_tail(&self, writer: &mut Writer) -> Result<()> {
        if armed(Bug::TailWrittenEarly) {
            writer.journal.store_tail()?;
        }
        if !armed(Bug::NoSyncBeforeTail) {
            self.devices.nvm.fence()?;
            self.devices.nvm.sync(0, self.devices.nvm.len_bytes())?;
        }
        writer.journal.advance_tail()
    }

    /// Trims some of the units that became empty; called under the writer's lock, so that the others wait for
    /// the next call. A failed trim has no effect but a warning.
    pub(crate) fn trim_empty(&self) {
        let trims = self.space.lock().take_trims(TRIMS_MAX);
        for span in trims {
            if !self.space.lock().is_empty_unit(span.tier, span.start) && !armed(Bug::TrimOpened) {
                continue;
            }
            let (at, len) = (
                span.start * varve_format::BLOCK_BYTES,
                span.len * varve_format::BLOCK_BYTES,
            );
            if let Ok(device) = self.device(span.tier)
                && let Err(error) = device.trim(at, len)
            {
                tracing::warn!(%error, "trim failed");
            }
        }
    }

    /// Returns the bytes read from and written to each tier since the pool was opened.
    #[must_use]
    pub fn io(&self) -> [TierIo; 3] {
        Tier::ALL.map(|tier| {
            let [read, written] = &self.io[tier as usize];
            let metadata = self.cache.cold_reads(tier) * varve_format::BLOCK_BYTES;
            TierIo {
                read_bytes: read.load(Ordering::Relaxed) + metadata,
                written_bytes: written.load(Ordering::Relaxed),
            }
        })
    }

    pub(crate) fn count_read(&self, tier: Tier, bytes: usize) {
        self.io[tier as usize][0].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_write(&self, tier: Tier, bytes: usize) {
        self.io[tier as usize][1].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    // ---- space

    /// Reserves `blocks` for a caller. DRAM only; allocations do not touch the reservation.
    ///
    /// # Errors
    /// `NoSpace` if this number of blocks is not free.
    pub fn reserve(&self, blocks: u64) -> Result<()> {
        self.space.lock().reserve(blocks)
    }

    /// Gives reserved blocks back, used or not.
    pub fn unreserve(&self, blocks: u64) {
        self.space.lock().unreserve(blocks);
    }

    /// Returns free and used space.
    #[must_use]
    pub fn space(&self) -> SpaceStats {
        let used = self
            .snapshot()
            .reader()
            .state()
            .map_or(0, |state| state.inodes_used.get());
        self.space.lock().stats(used)
    }

    /// Allows the reuse of data blocks freed by transactions up to `tx`: no session can still read them.
    /// Initially `TxId(u64::MAX)`.
    pub fn set_reader_horizon(&self, tx: TxId) {
        self.space.lock().set_horizon(tx);
    }

    /// Returns the freed data blocks that wait for the horizon.
    #[must_use]
    pub fn pending_frees(&self) -> PendingFrees {
        self.space.lock().pending_data()
    }
}
