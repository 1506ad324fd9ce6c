//! Opening a pool: superblock, replay of the journal, bitmaps and rows.

use super::in_place::InPlaceState;
use super::shared_blocks::SharedBlocks;
use super::superblock::{interrupted_superblocks, read_superblock, write_superblocks};
use super::writer::{Slots, Writer};
use super::{FOOTERS_CACHED, Store};
use crate::cache::MetaCache;
use crate::devices::{Rows, attach, read_rows};
use crate::free_inodes::FreeInodes;
use crate::journal::Journal;
use crate::layout::Layout;
use crate::seeded::{Bug, armed};
use crate::space::Space;
use crate::{Devices, OpenOptions, OpenReport, PoolMediaStats, Result, StoreError};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use varve_format::device::DeviceRow;
use varve_format::journal::Range;
use varve_format::superblock::Superblock;
use varve_format::{BLOCK_HEADER_SIZE, BlockKind, Ino, Tier};
use varve_media::span::Span;

impl Store {
    /// Opens a pool: replays the journal, reads tables and bitmaps.
    ///
    /// All sessions of an earlier daemon must be sealed before the first transaction: blocks that were freed
    /// earlier become free at once.
    ///
    /// # Errors
    /// No pool, a newer version, devices that do not fit or are another pool's, `JournalDamaged`, or damaged tables.
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
        let rows = read_rows(&*devices.nvm, &sb)?;
        let spans = attach(&devices, &layout, rows.as_ref())?;
        let given = devices.clone();
        let devices = with_spans(devices, &spans, &media_stats);
        let mut store = Self::assemble(devices, layout, journal, &options);
        store.media_stats = media_stats;
        store.spans = spans;
        store.check_first_devices(&given)?;
        store.load_space(rows.as_ref())?;
        store.load_rows()?;
        store.note_torn()?;
        let state = store.snapshot().reader().state()?;
        let interrupted = interrupted_superblocks(&store.devices, &sb)?;
        write_superblocks(&store.devices, sb, &interrupted)?;
        report.newest_tx = store.newest_tx();
        report.inodes = state.inodes_used.get();
        {
            let writer = store.writer.lock();
            report.sessions = writer.sessions.len();
            report.grants = writer.grants.len();
        }
        Ok((store, report))
    }

    /// Assembles the parts; reads nothing.
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
                in_place_room: Vec::new(),
            }),
            footers: Mutex::new(LruCache::new(FOOTERS_CACHED)),
            shared_blocks: SharedBlocks::new(options.shared_blocks),
            verify_nvm: options.verify_nvm,
            verified: None,
            trusting: false,
            io: Default::default(),
            media_stats: PoolMediaStats::default(),
            passes: Mutex::default(),
            latched: OnceLock::new(),
            checks_over: AtomicU64::new(0),
            demotion: Mutex::default(),
            in_place: InPlaceState::default(),
            sharing: Mutex::new(()),
            spans: [None, None],
            lost: Mutex::default(),
            devices,
            layout,
        }
    }

    /// Reads the bitmaps.
    fn load_space(&self, rows: Option<&Rows>) -> Result<()> {
        let snapshot = self.snapshot();
        let state = snapshot.reader().state()?;
        let mut space = self.space.lock();
        space.avoid(state.evacuations.map(|row| row.is_job()));
        for tier in Tier::ALL {
            for (at, first, count) in self.layout.bitmap_blocks(tier) {
                let bytes = self.cache.load(at, false)?;
                varve_format::BlockHeader::of(&bytes)
                    .expect(BlockKind::Bitmap, Ino(0), at)
                    .map_err(|fault| StoreError::Block { block: at, fault })?;
                for (byte, value) in (0_u64..)
                    .zip(&bytes[BLOCK_HEADER_SIZE..])
                    .filter(|(_, value)| **value != 0)
                {
                    for bit in (0..8).filter(|bit| value >> bit & 1 == 1) {
                        let index = byte * 8 + bit;
                        if index < count && self.layout.usable(tier, first + index) {
                            space.mark(tier, first + index);
                        }
                    }
                }
            }
            if tier == Tier::Nvm {
                continue;
            }
            for (run, _) in self.layout.live_runs(tier) {
                space.set_open(tier, run, snapshot.reader().open_unit(tier, run)?);
            }
        }
        let emptying = rows.into_iter().flatten();
        for (_, row) in emptying.filter(|(_, row)| row.state == DeviceRow::EMPTYING) {
            if let Some(tier) = row.tier() {
                let run = self.layout.run_of(tier, row.first.get()).0;
                space.set_emptying(tier, run, true);
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

/// Puts the one device of each slower tier in the place of those that were given.
pub(crate) fn with_spans(
    devices: Devices,
    spans: &[Option<Arc<Span>>; 2],
    stats: &PoolMediaStats,
) -> Devices {
    let one = |tier: Tier, span: &Option<Arc<Span>>| {
        let span = Arc::clone(span.as_ref()?);
        Some(stats.over_tier(tier, span))
    };
    let [ssd, hdd] = spans;
    Devices {
        ssd: one(Tier::Ssd, ssd),
        hdd: one(Tier::Hdd, hdd),
        more: Vec::new(),
        ..devices
    }
}

/// Returns the identifier in the journal's records: records cannot be forged without the pool's secret.
pub(crate) fn journal_id(sb: &Superblock) -> [u8; 16] {
    let mut id = sb.pool_uuid;
    id.iter_mut().zip(sb.dir_hash_key).for_each(|(a, b)| *a ^= b);
    id
}
