//! The open pool: what is shared between readers and the one writer, and everything that only reads.

use crate::cache::{Committed, MetaCache};
use crate::cold::Cooling;
use crate::core::Core;
use crate::journal::Journal;
use crate::layout::Layout;
use crate::lens::Lens;
use crate::numbers::Numbers;
use crate::rows::{Slots, Writer};
use crate::seeded::{Bug, armed};
use crate::space::Space;
use crate::{
    Devices, DirItem, OpenOptions, OpenReport, Pass, Passes, PendingFrees, Result, SpaceStats, StoreError,
    TierIo, Tx, Watches,
};
use lru::LruCache;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use varve_extent_tree::TreeError;
use varve_format::inode::{INODES_PER_BLOCK, Inode, InodeSlot};
use varve_format::journal::Range;
use varve_format::session::{GrantRow, SessionRow};
use varve_format::space::BITS_PER_BLOCK;
use varve_format::superblock::{SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock, SuperblockError};
use varve_format::{
    BLOCK_HEADER_SIZE, BlockKind, BlockNo, Extent, FileBlock, HashKey, Ino, InodeKey, Tier, TxId,
};
use varve_media::BlockDevice;
use varve_media::watch::TroubleKind;

/// Footers of sealed units kept in DRAM.
const FOOTERS_CACHED: NonZeroUsize = NonZeroUsize::new(64).expect("not 0");

pub(crate) type FooterKey = (Tier, u64, u64, u32);

/// An open pool. Share it in an `Arc`: reads go on beside the one transaction.
pub struct Store {
    pub(crate) devices: Devices,
    pub(crate) layout: Layout,
    pub(crate) cache: MetaCache,
    /// Newest committed transaction. Read-locked: the committed metadata does not change meanwhile.
    pub(crate) newest: RwLock<TxId>,
    /// The same number, for those who want no more than that: the lock is held while metadata is read, from a disk perhaps.
    pub(crate) newest_number: AtomicU64,
    pub(crate) space: Mutex<Space>,
    pub(crate) writer: Mutex<Writer>,
    pub(crate) footers: Mutex<LruCache<FooterKey, Arc<Vec<u32>>>>,
    pub(crate) verify_nvm: bool,
    /// It is being repaired: see [`Committed`].
    pub(crate) trusting: bool,
    /// Bytes read and written, by tier.
    pub(crate) io: [[AtomicU64; 2]; 3],
    /// What went wrong with the media.
    watches: Watches,
    passes: Mutex<Passes>,
    /// Which metadata went to slower tiers, and which goes next.
    pub(crate) cooling: Mutex<Cooling>,
    latched: OnceLock<Arc<str>>,
    /// So often the checks that were under way had to end.
    checks_over: AtomicU64,
}

/// One consistent view of the committed metadata.
pub(crate) struct Snapshot<'s> {
    guard: RwLockReadGuard<'s, TxId>,
    view: Committed<'s>,
    layout: &'s Layout,
}

impl Snapshot<'_> {
    pub(crate) fn lens(&self) -> Lens<'_, Committed<'_>> {
        Lens {
            view: &self.view,
            layout: self.layout,
        }
    }

    pub(crate) fn tx(&self) -> TxId {
        *self.guard
    }
}

impl Store {
    /// Opens a pool: replays the journal, reads tables and bitmaps.
    ///
    /// All sessions of an earlier daemon must be sealed before the first transaction: blocks freed before are free at once.
    ///
    /// # Errors
    /// No pool, a newer version, devices that do not fit, `JournalDamaged`, or damaged tables.
    pub fn open(devices: Devices, options: OpenOptions) -> Result<(Self, OpenReport)> {
        let watches = Watches::default();
        let devices = watches.over(devices);
        let sb = read_superblock(&devices)?;
        let layout = Layout::validate(sb, &devices)?;
        let nvm = Arc::clone(&devices.nvm);
        let nvm_blocks = layout.blocks(Tier::Nvm);
        let mut report = OpenReport::default();
        let mut apply = |ranges: &[Range<'_>]| {
            for (block, offset, bytes) in ranges {
                nvm.write(block.offset_bytes() + u64::from(*offset), bytes)?;
            }
            Ok(())
        };
        let (mut journal, scan) = Journal::open(
            Arc::clone(&devices.journal),
            journal_id(&sb),
            sb.journal_bytes.get(),
            nvm_blocks,
            &mut apply,
        )?;
        if let Some(damage) = scan.damage {
            if !options.accept_journal_damage {
                return Err(damage);
            }
            report.damage = Some(damage.to_string());
            journal.skip_damage(nvm_blocks, &mut apply)?;
        }
        report.replayed = scan.records;
        report.replayed_bytes = scan.bytes;
        report.torn_record = scan.torn;
        let changed = scan.records > 0 || report.damage.is_some();
        if changed && !armed(Bug::NoSyncAfterReplay) && !armed(Bug::ReplayInSameFence) {
            nvm.fence()?;
            nvm.sync(0, nvm.len_bytes())?;
        }
        if changed || scan.uneven {
            journal.advance_tail()?;
        }
        let mut store = Self::assemble(devices, layout, journal, &options);
        store.watches = watches;
        store.load_space()?;
        store.load_rows()?;
        let state = store.snapshot().lens().state()?;
        report.newest_tx = store.newest_tx();
        report.inodes = state.inodes_used.get();
        {
            let writer = store.writer.lock();
            report.sessions = writer.sessions.len();
            report.grants = writer.grants.len();
        }
        Ok((store, report))
    }

    /// The parts put together; nothing is read.
    pub(crate) fn assemble(
        devices: Devices,
        layout: Layout,
        journal: Journal,
        options: &OpenOptions,
    ) -> Self {
        let cache = MetaCache::new(&devices, &layout, options.cache_blocks);
        let newest = journal.newest();
        let mut space = Space::new(&layout);
        space.set_tail(journal.tail_tx());
        Self {
            cache,
            newest: RwLock::new(newest),
            newest_number: AtomicU64::new(newest.0),
            space: Mutex::new(space),
            writer: Mutex::new(Writer {
                journal,
                sessions: Slots::new(layout.session_slots()),
                grants: Slots::new(layout.grant_slots()),
                numbers: Numbers::default(),
            }),
            footers: Mutex::new(LruCache::new(FOOTERS_CACHED)),
            verify_nvm: options.verify_nvm,
            trusting: false,
            io: Default::default(),
            watches: Watches::default(),
            passes: Mutex::default(),
            latched: OnceLock::new(),
            checks_over: AtomicU64::new(0),
            cooling: Mutex::default(),
            devices,
            layout,
        }
    }

    /// Reads the bitmaps.
    fn load_space(&self) -> Result<()> {
        let snapshot = self.snapshot();
        let state = snapshot.lens().state()?;
        let mut space = self.space.lock();
        for tier in Tier::ALL {
            let blocks = self.layout.blocks(tier);
            let mut first = 0;
            while first < blocks {
                let (at, _) = self.layout.bit(tier, first);
                let bytes = self.cache.load(at, false)?;
                varve_format::BlockHeader::of(&bytes)
                    .expect(BlockKind::Bitmap, Ino(0), at)
                    .map_err(|fault| StoreError::Block { block: at, fault })?;
                for (byte, value) in (0_u64..)
                    .zip(&bytes[BLOCK_HEADER_SIZE..])
                    .filter(|(_, value)| **value != 0)
                {
                    for bit in (0..8).filter(|bit| value >> bit & 1 == 1) {
                        let block = first + byte * 8 + bit;
                        if block < blocks && self.layout.usable(tier, block) {
                            space.mark(tier, block);
                        }
                    }
                }
                first += BITS_PER_BLOCK;
            }
            if tier != Tier::Nvm && blocks > 0 {
                space.set_open(tier, state.open_unit[tier as usize].get().checked_sub(1));
            }
        }
        Ok(())
    }

    /// Finds the session and grant rows.
    fn load_rows(&self) -> Result<()> {
        let mut twice = false;
        self.for_rows(|slot, row| twice |= !self.writer.lock().sessions.note(row.id, slot))?;
        self.for_grants(|slot, row| twice |= !self.writer.lock().grants.note(row.lease, slot))?;
        if twice {
            return Err(StoreError::Damaged("a session or a lease has two rows".into()));
        }
        Ok(())
    }

    fn for_rows(&self, mut f: impl FnMut(u64, SessionRow)) -> Result<()> {
        let snapshot = self.snapshot();
        for slot in 0..self.layout.session_slots() {
            let place = self.layout.session_row(slot);
            let row = snapshot
                .lens()
                .row(place, BlockKind::SessionTable, SessionRow::decode)?
                .map_err(|_| StoreError::Damaged(format!("session row {slot}")))?;
            if let Some(row) = row {
                f(slot, row);
            }
        }
        Ok(())
    }

    fn for_grants(&self, mut f: impl FnMut(u64, GrantRow)) -> Result<()> {
        let snapshot = self.snapshot();
        for slot in 0..self.layout.grant_slots() {
            let place = self.layout.grant_row(slot);
            let row = snapshot
                .lens()
                .row(place, BlockKind::GrantTable, GrantRow::decode)?
                .map_err(|_| StoreError::Damaged(format!("grant row {slot}")))?;
            if let Some(row) = row {
                f(slot, row);
            }
        }
        Ok(())
    }

    pub(crate) fn snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            guard: self.newest.read(),
            view: Committed {
                store: self,
                trusting: self.trusting,
            },
            layout: &self.layout,
        }
    }

    /// As [`snapshot`](Self::snapshot), for those who compare nodes on slower tiers with their checksums themselves.
    pub(crate) fn trusting_snapshot(&self) -> Snapshot<'_> {
        let mut snapshot = self.snapshot();
        snapshot.view.trusting = true;
        snapshot
    }

    /// Name of the pool.
    #[must_use]
    pub fn pool_uuid(&self) -> [u8; 16] {
        self.layout.sb.pool_uuid
    }

    /// Key of the directories' name hash.
    #[must_use]
    pub fn hash_key(&self) -> HashKey {
        HashKey(self.layout.sb.dir_hash_key)
    }

    /// The media.
    #[must_use]
    pub const fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Whether reads compare data on NVM with its checksums, from here on.
    pub const fn set_verify_nvm(&mut self, verify: bool) {
        self.verify_nvm = verify;
    }

    /// Where in NVM the checksums of its data blocks begin, in bytes.
    #[must_use]
    pub fn nvm_checksums_at(&self) -> u64 {
        self.layout.checksum(Tier::Nvm, 0).block.offset_bytes()
    }

    pub(crate) fn device(&self, tier: Tier) -> Result<&Arc<dyn BlockDevice>> {
        self.devices
            .block_device(tier)
            .ok_or_else(|| StoreError::Damaged(format!("the pool has no {} tier", tier.name())))
    }

    /// Newest committed transaction. Waits for nobody.
    #[must_use]
    pub fn newest_tx(&self) -> TxId {
        TxId(self.newest_number.load(Ordering::Acquire))
    }

    /// Why the pool is read-only, if it is.
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

    /// Checks under way end with an error soon: whoever asked for them must not hold up the end.
    pub fn end_checks(&self) {
        self.checks_over.fetch_add(1, Ordering::Relaxed);
    }

    /// What a check that begins now asks with whether it [goes on](Self::goes_on).
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

    /// Ends writing for good: a transaction under way is waited for, each later one fails, and so does its commit. Reads go on. The reason is
    /// what they fail with; a pool that was read-only before keeps its own.
    pub fn close(&self, reason: &str) {
        let _writer = self.writer.lock();
        let _ = self.latched.set(Arc::from(reason));
    }

    pub(crate) fn latch_on(&self, error: &StoreError) {
        if error.stops_writing() {
            self.latch(&error.to_string());
        }
    }

    /// Whether a block of NVM is one of those that every pool has at fixed places: tables and bitmaps, that no file owns.
    #[must_use]
    pub fn is_fixed(&self, block: BlockNo) -> bool {
        !block.is_cold() && !self.layout.usable(Tier::Nvm, block.0)
    }

    /// What went wrong with the media since the pool was opened.
    #[must_use]
    pub const fn watches(&self) -> &Watches {
        &self.watches
    }

    /// Counts an error if it says that something on a medium is not what was written. Errors of the devices count themselves.
    pub fn note_damage(&self, error: &StoreError) {
        let watch = match error {
            StoreError::DataChecksum { tier, .. } | StoreError::Footer { tier, .. } => {
                self.watches.tier(*tier)
            }
            StoreError::Block { block, .. } | StoreError::Tree(TreeError::Corrupt { block, .. }) => self
                .watches
                .tier(block.home().map_or(Tier::Nvm, |(tier, _)| tier)),
            // Where it lies is not said, and mostly it is there.
            StoreError::Inode { .. } | StoreError::Damaged(_) => self.watches.tier(Tier::Nvm),
            StoreError::Tree(error) if error.is_damage() => self.watches.tier(Tier::Nvm),
            StoreError::Journal(_) | StoreError::JournalDamaged { .. } => self.watches.journal(),
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
        watch.note(TroubleKind::Checksum, place, error.to_string());
    }

    /// What the last looks at everything found, since the pool was opened.
    #[must_use]
    pub fn passes(&self) -> Passes {
        *self.passes.lock()
    }

    pub(crate) fn note_pass(&self, note: impl FnOnce(&mut Passes, Pass), findings: usize) {
        let pass = Pass {
            ended_ns: varve_media::watch::now_ns(),
            findings: findings as u64,
        };
        note(&mut self.passes.lock(), pass);
    }

    /// Starts a transaction; waits for the one under way.
    ///
    /// # Errors
    /// `Latched`.
    pub fn begin(&self) -> Result<Tx<'_>> {
        let writer = self.writer.lock();
        if let Some(reason) = self.latched() {
            return Err(StoreError::Latched(reason));
        }
        Ok(Tx {
            core: Core::new(self, writer),
        })
    }

    /// Syncs what is in place and empties the journal, so that freed metadata blocks are released and the next open replays nothing.
    /// Durable when this returns.
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

    /// Trims units that became empty; called under the writer's lock. A failed trim costs nothing but its effect.
    pub(crate) fn trim_empty(&self) {
        let trims = self.space.lock().take_trims();
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

    /// What has gone to and from each tier since the pool was opened.
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

    /// Sets `blocks` aside for somebody. DRAM only; allocations do not touch it.
    ///
    /// # Errors
    /// `NoSpace` if they are not there.
    pub fn reserve(&self, blocks: u64) -> Result<()> {
        self.space.lock().reserve(blocks)
    }

    /// Gives reserved blocks back, used or not.
    pub fn unreserve(&self, blocks: u64) {
        self.space.lock().unreserve(blocks);
    }

    /// Free and used space.
    #[must_use]
    pub fn space(&self) -> SpaceStats {
        let used = self
            .snapshot()
            .lens()
            .state()
            .map_or(0, |state| state.inodes_used.get());
        self.space.lock().stats(used)
    }

    /// Data blocks freed by transactions up to here may be reused: no session can still read them. `TxId(u64::MAX)` at first.
    pub fn set_reader_horizon(&self, tx: TxId) {
        self.space.lock().set_horizon(tx);
    }

    /// Freed data blocks that wait for the horizon.
    #[must_use]
    pub fn pending_frees(&self) -> PendingFrees {
        self.space.lock().pending_data()
    }

    // ---- reads: each one sees one consistent state

    /// The inode with this number.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn get(&self, ino: Ino) -> Result<Inode> {
        self.snapshot().lens().get(ino)
    }

    /// The inode with this number and generation.
    ///
    /// # Errors
    /// `NoInode` (also for another generation), or damage.
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> {
        self.snapshot().lens().get_key(key)
    }

    /// What is at an inode number.
    ///
    /// # Errors
    /// `NoInode` beyond the inode file; damage.
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> {
        self.snapshot().lens().slot(ino)
    }

    /// What `name` in `dir` is.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> {
        self.snapshot().lens().dir_lookup(dir, name)
    }

    /// At most `max` entries after `cookie` (0: from the start), without "." and "..".
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> {
        self.snapshot().lens().dir_iter(dir, cookie, max)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        self.snapshot().lens().read_link(ino)
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> {
        self.snapshot().lens().xattr_get(ino, name)
    }

    /// Names of all extended attributes, with the lengths of their values.
    ///
    /// # Errors
    /// `NoInode`, or damage.
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> {
        self.snapshot().lens().xattr_list(ino)
    }

    /// At most `max` extents from `from` on, clipped, holes left out.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> {
        self.snapshot().lens().map(ino, from, max)
    }

    /// First byte of data at or after `offset`, below the size.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn seek_data(&self, ino: Ino, offset: u64) -> Result<Option<u64>> {
        self.snapshot().lens().seek(ino, offset, true)
    }

    /// First byte of a hole at or after `offset` (the end counts as one); `None` if `offset` is not below the size.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, or damage.
    pub fn seek_hole(&self, ino: Ino, offset: u64) -> Result<Option<u64>> {
        self.snapshot().lens().seek(ino, offset, false)
    }

    /// Inodes in the orphan list: without a name (nlink 0), or with an unfinished truncation.
    ///
    /// # Errors
    /// The list is damaged.
    pub fn orphans(&self) -> Result<Vec<InodeKey>> {
        let snapshot = self.snapshot();
        let lens = snapshot.lens();
        let state = lens.state()?;
        let mut out = Vec::new();
        let mut next = Ino(state.orphan_head.get());
        while next.0 != 0 {
            let inode = lens.get(next)?;
            let links = inode
                .orphan
                .filter(|_| (out.len() as u64) < state.orphans.get())
                .ok_or_else(|| StoreError::Damaged(format!("orphan list at inode {next}")))?;
            out.push(inode.attr.key);
            next = links.next;
        }
        Ok(out)
    }

    /// Calls `f` for every inode number in use or reserved, ascending, until it says false. Not one consistent state.
    ///
    /// # Errors
    /// Something could not be read, or is damaged; the first error. All others were shown.
    pub fn for_each_inode(&self, f: &mut dyn FnMut(Ino, InodeSlot) -> bool) -> Result<()> {
        self.for_each_inode_from(Ino(0), f)
    }

    /// As [`for_each_inode`](Self::for_each_inode), for numbers from `from` on.
    ///
    /// # Errors
    /// As `for_each_inode`.
    pub fn for_each_inode_from(&self, from: Ino, f: &mut dyn FnMut(Ino, InodeSlot) -> bool) -> Result<()> {
        let blocks = self.snapshot().lens().state()?.inode_blocks.get();
        let mut result = Ok(());
        for index in from.0 / INODES_PER_BLOCK..blocks {
            let (slots, read) = self.slots_at(index);
            result = result.and(read);
            for (ino, slot) in slots {
                if ino >= from && !matches!(slot, InodeSlot::Free(_)) && !f(ino, slot) {
                    return result;
                }
            }
        }
        result
    }

    /// What can be read of a block of the inode file, and the first error.
    fn slots_at(&self, index: u64) -> (Vec<(Ino, InodeSlot)>, Result<()>) {
        let snapshot = self.snapshot();
        let lens = snapshot.lens();
        let (mut slots, mut result) = (Vec::new(), Ok(()));
        for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
            match lens.slot(Ino(ino)) {
                Ok(slot) => slots.push((Ino(ino), slot)),
                Err(error) => {
                    let alone = matches!(error, StoreError::Inode { .. });
                    result = result.and(Err(error));
                    if !alone {
                        break;
                    }
                }
            }
        }
        (slots, result)
    }

    /// All session rows.
    ///
    /// # Errors
    /// A row is damaged.
    pub fn sessions(&self) -> Result<Vec<SessionRow>> {
        let mut out = Vec::new();
        self.for_rows(|_, row| out.push(row))?;
        Ok(out)
    }

    /// All grant rows.
    ///
    /// # Errors
    /// A row is damaged.
    pub fn grants(&self) -> Result<Vec<GrantRow>> {
        let mut out = Vec::new();
        self.for_grants(|_, row| out.push(row))?;
        Ok(out)
    }
}

/// Name of the journal's records: a record can be made up by nobody who does not know the pool's secret.
pub(crate) fn journal_id(sb: &Superblock) -> [u8; 16] {
    let mut id = sb.pool_uuid;
    id.iter_mut().zip(sb.dir_hash_key).for_each(|(a, b)| *a ^= b);
    id
}

/// The newer valid copy.
pub(crate) fn read_superblock(devices: &Devices) -> Result<Superblock> {
    let mut best: Option<Superblock> = None;
    let mut fault = SuperblockError::Magic;
    for block in SUPERBLOCK_BLOCKS {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        devices.nvm.read(BlockNo(block).offset_bytes(), &mut bytes)?;
        match Superblock::parse(&bytes) {
            Ok(sb) if best.is_none_or(|best| sb.sequence.get() > best.sequence.get()) => best = Some(sb),
            Ok(_) => {}
            // The most telling one: a newer version, then damage, then nothing at all.
            Err(found) if fault == SuperblockError::Magic || matches!(found, SuperblockError::Version(_)) => {
                fault = found;
            }
            Err(_) => {}
        }
    }
    best.ok_or_else(|| StoreError::Superblock {
        device: devices.nvm.info().name.to_string(),
        fault,
    })
}
