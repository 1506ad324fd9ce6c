//! Opening a pool: superblock, replay of the journal, bitmaps and rows.

use super::writer::{Slots, Writer};
use super::{FOOTERS_CACHED, Store};
use crate::cache::MetaCache;
use crate::free_inodes::FreeInodes;
use crate::journal::Journal;
use crate::layout::Layout;
use crate::mkfs::write_superblocks;
use crate::seeded::{Bug, armed};
use crate::space::Space;
use crate::{Devices, OpenOptions, OpenReport, PoolMediaStats, Result, StoreError};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use varve_format::journal::Range;
use varve_format::space::BITS_PER_BLOCK;
use varve_format::superblock::{
    FORMAT_VERSION, SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock, SuperblockError,
};
use varve_format::{BLOCK_HEADER_SIZE, BlockKind, BlockNo, Features, Ino, Tier};

impl Store {
    /// Opens a pool: replays the journal, reads tables and bitmaps.
    ///
    /// All sessions of an earlier daemon must be sealed before the first transaction: blocks freed before are
    /// free at once.
    ///
    /// # Errors
    /// No pool, a newer version, devices that do not fit, `JournalDamaged`, or damaged tables.
    pub fn open(devices: Devices, options: OpenOptions) -> Result<(Self, OpenReport)> {
        let media_stats = PoolMediaStats::default();
        let devices = media_stats.over(devices);
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
        store.media_stats = media_stats;
        store.load_space()?;
        store.load_rows()?;
        let state = store.snapshot().reader().state()?;
        report.newest_tx = store.newest_tx();
        report.inodes = state.inodes_used.get();
        {
            let writer = store.writer.lock();
            report.sessions = writer.sessions.len();
            report.grants = writer.grants.len();
        }
        Ok((store, report))
    }

    /// Brings a pool up to the version of the format that this program writes. Answers the version that it had.
    /// Durable when this returns; a crash before leaves a pool of either version, and the next call finishes it.
    /// Nobody may have the pool open. What waits in its journal and logs stays there.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; devices that do not fit it; a device failed.
    pub fn upgrade(devices: &Devices) -> Result<u32> {
        let sb = read_superblock(devices)?;
        Layout::validate(sb, devices)?;
        refuse_unknown(devices, &sb)?;
        upgrade_superblocks(devices, &sb)
    }

    /// The version of the format that a pool has, and the features that it uses.
    ///
    /// # Errors
    /// No pool, or one that this program cannot serve; a device failed.
    pub fn format_of(devices: &Devices) -> Result<(u32, Features)> {
        let sb = read_superblock(devices)?;
        Ok((sb.version.get(), sb.features()))
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
                free_inodes: FreeInodes::default(),
            }),
            footers: Mutex::new(LruCache::new(FOOTERS_CACHED)),
            verify_nvm: options.verify_nvm,
            trusting: false,
            io: Default::default(),
            media_stats: PoolMediaStats::default(),
            passes: Mutex::default(),
            latched: OnceLock::new(),
            checks_over: AtomicU64::new(0),
            demotion: Mutex::default(),
            devices,
            layout,
        }
    }

    /// Reads the bitmaps.
    fn load_space(&self) -> Result<()> {
        let snapshot = self.snapshot();
        let state = snapshot.reader().state()?;
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
}

/// Name of the journal's records: a record can be made up by nobody who does not know the pool's secret.
pub(crate) fn journal_id(sb: &Superblock) -> [u8; 16] {
    let mut id = sb.pool_uuid;
    id.iter_mut().zip(sb.dir_hash_key).for_each(|(a, b)| *a ^= b);
    id
}

/// The copy that counts: of those that are whole the newer one. If this program does not know its version, the
/// older one does not count either.
pub(crate) fn read_superblock(devices: &Devices) -> Result<Superblock> {
    let mut best: std::result::Result<Superblock, _> = Err(SuperblockError::Magic);
    for number in SUPERBLOCK_BLOCKS {
        match (superblock_copy(devices, number)?, &best) {
            (Ok(copy), Ok(sb)) if copy.sequence.get() <= sb.sequence.get() => {}
            (Ok(copy), _) => best = Ok(copy),
            // Damage tells more than nothing at all.
            (Err(fault), Err(SuperblockError::Magic)) => best = Err(fault),
            (Err(_), _) => {}
        }
    }
    let served = best.and_then(|sb: Superblock| sb.check().map(|()| sb));
    served.map_err(|fault| superblock_fault(devices, fault))
}

/// One copy, if it is whole.
fn superblock_copy(
    devices: &Devices,
    number: u64,
) -> Result<std::result::Result<Superblock, SuperblockError>> {
    let mut bytes = [0; SUPERBLOCK_SIZE];
    devices.nvm.read(BlockNo(number).offset_bytes(), &mut bytes)?;
    Ok(Superblock::read(&bytes))
}

fn superblock_fault(devices: &Devices, fault: SuperblockError) -> StoreError {
    StoreError::Superblock {
        device: devices.nvm.info().name.to_string(),
        fault,
    }
}

/// Refuses to repair or upgrade a pool with features that need not be known to use it: what they left would be
/// taken for damage.
///
/// # Errors
/// There are such.
pub(crate) fn refuse_unknown(devices: &Devices, sb: &Superblock) -> Result<()> {
    let unknown = sb.features().without(&Features::BUILT);
    if unknown.is_empty() {
        return Ok(());
    }
    Err(superblock_fault(devices, SuperblockError::Features(unknown)))
}

/// Copies of the superblock that are not as the good one.
pub(crate) fn bad_superblocks(devices: &Devices, good: &Superblock) -> Result<Vec<u64>> {
    let mut bad = Vec::new();
    for number in SUPERBLOCK_BLOCKS {
        if superblock_copy(devices, number)? != Ok(*good) {
            bad.push(number);
        }
    }
    Ok(bad)
}

/// As [`Store::upgrade`].
fn upgrade_superblocks(devices: &Devices, old: &Superblock) -> Result<u32> {
    let mut new = *old;
    if old.version.get() != FORMAT_VERSION {
        new.sequence.set(old.sequence.get().saturating_add(1));
        new = new.upgraded();
    }
    let stale = bad_superblocks(devices, &new)?;
    let not_counting = bad_superblocks(devices, old)?;
    // A copy that counts is written last.
    let (first, last): (Vec<u64>, Vec<u64>) = stale.iter().partition(|number| not_counting.contains(number));
    write_superblocks(devices, new, &first)?;
    write_superblocks(devices, new, &last)?;
    Ok(old.version.get())
}
