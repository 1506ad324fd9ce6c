//! Locations of the fixed areas of a pool: computed once at mkfs, then read from the superblock.

use crate::{Devices, MkfsOptions, Result, StoreError};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::device::{DEVICE_ROW_SIZE, DEVICE_ROWS_PER_BLOCK, DEVICES_MAX, DeviceRow};
use varve_format::features::Incompat;
use varve_format::inode::INODES_PER_BLOCK;
use varve_format::journal::JOURNAL_MIN_BYTES;
use varve_format::session::{GRANT_ROWS_PER_BLOCK, SESSION_ROWS_PER_BLOCK};
use varve_format::space::{BITS_PER_BLOCK, CHECKSUMS_PER_BLOCK, UNIT_ROWS_PER_BLOCK, UnitRow, footer_blocks};
use varve_format::state::PoolState;
use varve_format::superblock::{Area, FORMAT_VERSION, NVM_MIN_BYTES, Superblock, TierLayout};
use varve_format::{BLOCK_BYTES, BLOCK_HEADER_SIZE, BlockKind, BlockNo, Extent, Features, Tier};
use varve_media::DeviceState;
use zerocopy::FromZeros;
use zerocopy::little_endian::{I64, U32, U64};

/// A position in a metadata block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) block: BlockNo,
    pub(crate) offset: usize,
}

/// A device of a tier: its run of the tier's numbers, and its areas in NVM.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) first: u64,
    pub(crate) blocks: u64,
    pub(crate) bitmap: Area,
    pub(crate) checksums: Area,
    pub(crate) units: Area,
    /// Where its open unit is recorded; `None`: in the pool state, as that of a tier's first device.
    pub(crate) row: Option<Place>,
    /// It was removed: nothing lies on it, and it has no areas.
    gone: AtomicBool,
}

impl Run {
    pub(crate) const fn end(&self) -> u64 {
        self.first + self.blocks
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}

/// The run of a tier that the pool does not have.
static NO_RUN: Run = Run {
    first: 0,
    blocks: 0,
    bitmap: NO_AREA,
    checksums: NO_AREA,
    units: NO_AREA,
    row: None,
    gone: AtomicBool::new(true),
};
const NO_AREA: Area = Area {
    start: U64::ZERO,
    blocks: U64::ZERO,
};

/// The devices of a tier, in the order of their numbers. Devices are added, and never taken away.
#[derive(Debug)]
struct Runs {
    list: Box<[OnceLock<Run>]>,
    count: AtomicUsize,
}

impl Runs {
    fn of(layout: &TierLayout) -> Self {
        let runs = Self {
            list: (0..DEVICES_MAX).map(|_| OnceLock::new()).collect(),
            count: AtomicUsize::new(0),
        };
        if layout.blocks.get() > 0 {
            runs.push(Run {
                first: 0,
                blocks: layout.blocks.get(),
                bitmap: layout.bitmap,
                checksums: layout.checksums,
                units: layout.units,
                row: None,
                gone: AtomicBool::new(false),
            });
        }
        runs
    }

    fn push(&self, run: Run) {
        let count = self.count.load(Ordering::Acquire);
        // The rows were checked to be no more than there is room for.
        if self.list.get(count).is_some_and(|place| place.set(run).is_ok()) {
            self.count.store(count + 1, Ordering::Release);
        }
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &Run> {
        let count = self.count.load(Ordering::Acquire);
        self.list[..count].iter().filter_map(OnceLock::get)
    }
}

/// The superblock with the arithmetic that belongs to it.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) sb: Superblock,
    /// Features of `incompat` that were set while the pool is open.
    set_since: Arc<AtomicU64>,
    /// The devices of each tier.
    runs: Arc<[Runs; 3]>,
    /// The area of the device rows, if they are in use.
    device_table: Arc<OnceLock<Area>>,
}

const SSD_UNIT_BLOCKS: u64 = (64 << 20) / BLOCK_BYTES;
const HDD_UNIT_BLOCKS: u64 = (256 << 20) / BLOCK_BYTES;
const UNIT_MIN_BLOCKS: u64 = 16;
/// Bound on session and lease numbers; no pool ever hands out more.
const NUMBERS_MAX: u64 = 1 << 62;

impl Layout {
    fn of(sb: Superblock) -> Self {
        Self {
            sb,
            set_since: Arc::default(),
            runs: Arc::new(sb.tiers.each_ref().map(Runs::of)),
            device_table: Arc::default(),
        }
    }

    /// The device rows are in use, and lie there.
    pub(crate) fn set_device_table(&self, area: Area) {
        let _ = self.device_table.set(area);
    }

    /// Returns the area of the device rows, if they are in use.
    pub(crate) fn device_table(&self) -> Option<Area> {
        self.device_table.get().copied()
    }

    /// Returns the place of a device row.
    pub(crate) fn device_row(&self, slot: usize) -> Option<Place> {
        Some(device_row(self.device_table()?, slot))
    }

    /// Takes over a device row: of another device than a tier's first, or of a first one that is gone.
    pub(crate) fn add_device(&self, slot: usize, row: &DeviceRow) {
        let Some(tier) = row.tier() else { return };
        let runs = &self.runs[tier as usize];
        let gone = row.state == DeviceRow::GONE;
        if row.first.get() == 0 {
            if gone && let Some(first) = runs.iter().next() {
                first.gone.store(true, Ordering::Release);
            }
            return;
        }
        runs.push(Run {
            first: row.first.get(),
            blocks: row.blocks.get(),
            bitmap: row.bitmap,
            checksums: row.checksums,
            units: row.units,
            row: self.device_row(slot),
            gone: AtomicBool::new(gone),
        });
    }

    /// Notes that a device is gone.
    pub(crate) fn device_gone(&self, tier: Tier, run: usize) {
        if let Some(run) = self.runs(tier).nth(run) {
            run.gone.store(true, Ordering::Release);
        }
    }

    /// Returns the devices of a tier, those that are gone included.
    pub(crate) fn runs(&self, tier: Tier) -> impl DoubleEndedIterator<Item = &Run> {
        self.runs[tier as usize].iter()
    }

    /// Returns the devices of a tier that are not gone, with their numbers.
    pub(crate) fn live_runs(&self, tier: Tier) -> impl DoubleEndedIterator<Item = (usize, &Run)> {
        let runs = &self.runs[tier as usize];
        let runs = runs.list[..runs.count.load(Ordering::Acquire)].iter().enumerate();
        runs.filter_map(|(index, run)| Some((index, run.get()?)))
            .filter(|(_, run)| !run.is_gone())
    }

    /// Returns the device that a block of a tier lies on, and its number. The pool has the tier.
    pub(crate) fn run_of(&self, tier: Tier, block: u64) -> (usize, &Run) {
        let mut found = (0, &NO_RUN);
        for (index, run) in self.runs(tier).enumerate() {
            if index > 0 && run.first > block {
                break;
            }
            found = (index, run);
        }
        found
    }

    /// Returns the bitmap blocks of a tier, each with the first block whose bit it holds, and how many it
    /// holds.
    pub(crate) fn bitmap_blocks(&self, tier: Tier) -> impl Iterator<Item = (BlockNo, u64, u64)> {
        self.live_runs(tier).flat_map(|(_, run)| {
            (0..run.blocks.div_ceil(BITS_PER_BLOCK)).map(|index| {
                let first = index * BITS_PER_BLOCK;
                let count = BITS_PER_BLOCK.min(run.blocks - first);
                (BlockNo(run.bitmap.start.get() + index), run.first + first, count)
            })
        })
    }

    /// Returns the units of a tier's devices that are not gone.
    pub(crate) fn live_units(&self, tier: Tier) -> impl Iterator<Item = u64> {
        let unit = self.unit_blocks(tier).max(1);
        self.live_runs(tier)
            .flat_map(move |(_, run)| run.first / unit..run.end() / unit)
    }

    /// Features of the pool as they are now.
    pub(crate) fn features(&self) -> Features {
        let mut features = self.sb.features();
        let since = self.set_since.load(Ordering::Acquire);
        features.incompat.set(features.incompat.get() | since);
        features
    }

    /// A feature was set in the superblock.
    pub(crate) fn note_feature(&self, incompat: u64) {
        self.set_since.fetch_or(incompat, Ordering::Release);
    }

    /// Plans a new pool.
    pub(crate) fn plan(devices: &Devices, options: &MkfsOptions) -> Result<Self> {
        let nvm_bytes = devices.nvm.len_bytes();
        if nvm_bytes < NVM_MIN_BYTES {
            return Err(StoreError::Devices(format!(
                "the NVM device has {nvm_bytes} bytes; a pool needs {NVM_MIN_BYTES}"
            )));
        }
        let journal_bytes = devices.journal.len_bytes();
        if journal_bytes < JOURNAL_MIN_BYTES {
            return Err(StoreError::Devices(format!(
                "the journal has {journal_bytes} bytes; a pool needs {JOURNAL_MIN_BYTES}"
            )));
        }
        let nvm_blocks = nvm_bytes / BLOCK_BYTES;
        let mut sb = Superblock::new_zeroed();
        sb.magic = Superblock::MAGIC;
        sb.version = U32::new(FORMAT_VERSION);
        sb.checksum_kind = Superblock::CRC32C;
        sb.sequence = U64::new(1);
        sb.pool_uuid = options.pool_uuid;
        sb.dir_hash_key = options.dir_hash_key;
        sb.created_ns = I64::new(options.now_ns);
        sb.journal_bytes = U64::new(journal_bytes);
        let mut next = 2;
        let mut area = |blocks: u64| {
            let area = Area::new(next, blocks);
            next += blocks;
            area
        };
        sb.state = area(1);
        sb.sessions = area((nvm_blocks / 1024).clamp(8, 256));
        sb.grants = area((nvm_blocks / 128).clamp(16, 16_384));
        sb.tiers[0] = TierLayout {
            blocks: U64::new(nvm_blocks),
            unit_blocks: U64::new(0),
            bitmap: area(nvm_blocks.div_ceil(BITS_PER_BLOCK)),
            checksums: area(nvm_blocks.div_ceil(CHECKSUMS_PER_BLOCK)),
            units: Area::new(0, 0),
        };
        let wishes = [
            (Tier::Ssd, options.ssd_unit_blocks, SSD_UNIT_BLOCKS),
            (Tier::Hdd, options.hdd_unit_blocks, HDD_UNIT_BLOCKS),
        ];
        for (tier, wish, default) in wishes {
            let Some(device) = devices.block_device(tier) else {
                continue;
            };
            let blocks = device.len_bytes() / BLOCK_BYTES;
            let unit = wish.unwrap_or_else(|| (blocks / 16).clamp(UNIT_MIN_BLOCKS, default));
            let units = blocks / unit.max(1);
            if unit < UNIT_MIN_BLOCKS || units < 3 {
                return Err(StoreError::Devices(format!(
                    "the {} tier of {blocks} blocks does not hold 3 units of {unit} blocks (at least \
                    {UNIT_MIN_BLOCKS})",
                    tier.name()
                )));
            }
            sb.tiers[tier as usize] = TierLayout {
                blocks: U64::new(units * unit),
                unit_blocks: U64::new(unit),
                bitmap: area((units * unit).div_ceil(BITS_PER_BLOCK)),
                checksums: area(unit.div_ceil(CHECKSUMS_PER_BLOCK)),
                units: area(units.div_ceil(UNIT_ROWS_PER_BLOCK)),
            };
        }
        sb.first_free = U64::new(next);
        if next > nvm_blocks / 2 {
            return Err(StoreError::Devices(format!(
                "the tables need {next} of {nvm_blocks} NVM blocks; use a larger NVM device or smaller tiers"
            )));
        }
        Ok(Self::of(sb.sealed()))
    }

    /// Checks that the superblock's numbers make sense and the devices are large enough.
    pub(crate) fn validate(sb: Superblock, devices: &Devices) -> Result<Self> {
        let layout = Self::of(sb);
        let nvm = layout.blocks(Tier::Nvm);
        if nvm == 0
            || nvm
                .checked_mul(BLOCK_BYTES)
                .is_none_or(|bytes| bytes > devices.nvm.len_bytes())
        {
            return Err(StoreError::Devices(format!(
                "the pool has {nvm} NVM blocks, the device only {} bytes",
                devices.nvm.len_bytes()
            )));
        }
        if layout.sb.journal_bytes.get() > devices.journal.len_bytes()
            || layout.sb.journal_bytes.get() < JOURNAL_MIN_BYTES
        {
            return Err(StoreError::Journal(
                "the region is shorter than the pool's journal",
            ));
        }
        let first_free = layout.sb.first_free.get();
        let mut areas = vec![layout.sb.state, layout.sb.sessions, layout.sb.grants];
        for tier in Tier::ALL {
            let row = layout.sb.tier(tier);
            let blocks = row.blocks.get();
            if blocks == 0 {
                continue;
            }
            areas.extend([row.bitmap, row.checksums, row.units]);
            if row.bitmap.blocks.get() < blocks.div_ceil(BITS_PER_BLOCK) {
                return Err(StoreError::Damaged("superblock: a bitmap is too short".into()));
            }
            if tier == Tier::Nvm {
                continue;
            }
            let unit = row.unit_blocks.get();
            if unit < UNIT_MIN_BLOCKS || !blocks.is_multiple_of(unit) {
                return Err(StoreError::Damaged(
                    "superblock: units do not divide their tier".into(),
                ));
            }
        }
        if first_free > nvm || areas.iter().any(|area| area.end() > first_free) {
            return Err(StoreError::Damaged(
                "superblock: an area passes its bounds".into(),
            ));
        }
        // With several devices a tier, their rows say which ones are needed.
        if layout.sb.features().incompat.get() & Incompat::DEVICES.bits() == 0 {
            for tier in [Tier::Ssd, Tier::Hdd] {
                layout.fits_first(tier, devices)?;
            }
        }
        Ok(layout)
    }

    /// Checks that the first device of a tier is there and large enough.
    pub(crate) fn fits_first(&self, tier: Tier, devices: &Devices) -> Result<()> {
        let blocks = self.sb.tier(tier).blocks.get();
        if blocks == 0 {
            return Ok(());
        }
        match devices.block_device(tier) {
            Some(device)
                if blocks
                    .checked_mul(BLOCK_BYTES)
                    .is_some_and(|bytes| bytes <= device.len_bytes()) =>
            {
                Ok(())
            }
            Some(device) => Err(StoreError::Devices(match device.state() {
                DeviceState::Failed { reason } => {
                    format!(
                        "the first device of the {} tier is missing: {reason}",
                        tier.name()
                    )
                }
                DeviceState::Ok => format!(
                    "the pool has {blocks} {} blocks, the device only {} bytes",
                    tier.name(),
                    device.len_bytes()
                ),
            })),
            None => Err(StoreError::Devices(format!(
                "the pool has a {} tier, but no such device was given",
                tier.name()
            ))),
        }
    }

    /// Returns all areas that are tables, with the kind of their blocks.
    pub(crate) fn tables(&self) -> Vec<(Area, BlockKind)> {
        let mut areas = vec![
            (self.sb.state, BlockKind::PoolState),
            (self.sb.sessions, BlockKind::SessionTable),
            (self.sb.grants, BlockKind::GrantTable),
        ];
        areas.extend(self.device_table().map(|area| (area, BlockKind::DeviceTable)));
        for tier in Tier::ALL {
            // A first device that is gone keeps its areas.
            for (index, run) in self.runs(tier).enumerate() {
                if index == 0 || !run.is_gone() {
                    areas.push((run.bitmap, BlockKind::Bitmap));
                    areas.push((run.checksums, BlockKind::ChecksumTable));
                    areas.push((run.units, BlockKind::UnitTable));
                }
            }
        }
        areas
    }

    /// Returns the NVM blocks of tables that lie among data: those of the feature `devices`.
    pub(crate) fn tables_among_data(&self) -> impl Iterator<Item = u64> {
        let first_free = self.first_free();
        let among = self
            .tables()
            .into_iter()
            .filter(move |(area, _)| area.start.get() >= first_free && area.blocks.get() > 0);
        among.flat_map(|(area, _)| area.start.get()..area.end())
    }

    /// Returns the blocks of a tier, those of devices that are gone included; 0 if the pool has none.
    pub(crate) fn blocks(&self, tier: Tier) -> u64 {
        self.runs(tier).next_back().map_or(0, Run::end)
    }

    /// Returns the blocks of a unit (0 on NVM).
    pub(crate) fn unit_blocks(&self, tier: Tier) -> u64 {
        self.sb.tier(tier).unit_blocks.get()
    }

    /// Returns the blocks of a unit before its footers.
    pub(crate) fn unit_data_blocks(&self, tier: Tier) -> u64 {
        let unit = self.unit_blocks(tier);
        unit - UnitRow::FOOTERS * footer_blocks(unit)
    }

    /// Returns the record bytes that a transaction needs to reopen a sealed unit of the tier: mainly its
    /// checksums.
    pub(crate) fn reopening_bytes(&self, tier: Tier) -> u64 {
        self.unit_blocks(tier) * 5
    }

    /// Returns whether metadata may lie on slower tiers, and the pool has one.
    pub(crate) fn demotes(&self) -> bool {
        self.sb.has_cold_metadata() && self.blocks(Tier::Ssd) + self.blocks(Tier::Hdd) > 0
    }

    /// Returns the first block of one of a unit's footers.
    pub(crate) fn footer_start(&self, tier: Tier, unit: u64, footer: u8) -> u64 {
        let blocks = self.unit_blocks(tier);
        unit * blocks + self.unit_data_blocks(tier) + u64::from(footer) * footer_blocks(blocks)
    }

    /// Returns the range of an extent's blocks that lie on its tier, plus the first beyond it: a corrupt
    /// extent may have billions of those.
    pub(crate) fn to_look_at(&self, extent: &Extent) -> std::ops::Range<u64> {
        let there = self.blocks(extent.tier).saturating_sub(extent.block.0);
        0..u64::from(extent.len).min(there + 1)
    }

    /// Returns a description of an impossible value in a pool state, judged by the layout alone. Loops up to
    /// one of the state's numbers rely on this check.
    pub(crate) fn doubt(&self, state: &PoolState) -> Option<String> {
        let all: u64 = Tier::ALL.map(|tier| self.blocks(tier)).iter().sum();
        let inode_blocks = state.inode_blocks.get();
        if inode_blocks > all {
            return Some(format!(
                "{inode_blocks} blocks of the inode file in a pool of {all}"
            ));
        }
        let inodes = inode_blocks * INODES_PER_BLOCK;
        for (count, what) in [(state.inodes_used, "in use"), (state.orphans, "without a name")] {
            if count.get() > inodes {
                return Some(format!("{count} of {inodes} inodes {what}"));
            }
        }
        if state.next_session.get().max(state.next_lease.get()) > NUMBERS_MAX {
            return Some("numbers of sessions or leases are used up".into());
        }
        if state.has_stray_fields() {
            return Some("roots of features that the pool has not".into());
        }
        Tier::ALL.into_iter().find_map(|tier| {
            // Those of further devices are in their rows.
            let blocks = self.sb.tier(tier).blocks.get();
            let units = blocks.checked_div(self.unit_blocks(tier)).unwrap_or(0);
            let open = state.open_unit[tier as usize].get();
            (open > units).then(|| format!("{}: open unit beyond the tier", tier.name()))
        })
    }

    /// Returns the first NVM block that can be allocated.
    pub(crate) fn first_free(&self) -> u64 {
        self.sb.first_free.get()
    }

    /// Returns whether a block can ever hold data or nodes.
    pub(crate) fn usable(&self, tier: Tier, block: u64) -> bool {
        if block >= self.blocks(tier) {
            return false;
        }
        match tier {
            Tier::Nvm => block >= self.first_free(),
            _ => {
                block % self.unit_blocks(tier) < self.unit_data_blocks(tier)
                    && !self.run_of(tier, block).1.is_gone()
            }
        }
    }

    /// Returns the bitmap block that holds the bit of `block`, and the bit's number in it.
    pub(crate) fn bit(&self, tier: Tier, block: u64) -> (BlockNo, u64) {
        let run = self.run_of(tier, block).1;
        let index = block - run.first;
        let start = run.bitmap.start.get();
        (BlockNo(start + index / BITS_PER_BLOCK), index % BITS_PER_BLOCK)
    }

    /// Returns the place of checksum number `index` in the NVM table of a device (NVM: the block; else: its
    /// index in the open unit).
    pub(crate) fn checksum(&self, tier: Tier, run: usize, index: u64) -> Place {
        let run = self.runs(tier).nth(run);
        let start = run.map_or(0, |run| run.checksums.start.get());
        Place {
            block: BlockNo(start + index / CHECKSUMS_PER_BLOCK),
            offset: BLOCK_HEADER_SIZE + (index % CHECKSUMS_PER_BLOCK) as usize * 4,
        }
    }

    /// Returns the place of a unit's row.
    pub(crate) fn unit_row(&self, tier: Tier, unit: u64) -> Place {
        let unit_blocks = self.unit_blocks(tier);
        let run = self.run_of(tier, unit.saturating_mul(unit_blocks)).1;
        row_place(
            run.units,
            unit - run.first.checked_div(unit_blocks).unwrap_or(0),
            UNIT_ROWS_PER_BLOCK,
            varve_format::space::UNIT_ROW_SIZE,
        )
    }

    /// Returns the place of a session row.
    pub(crate) fn session_row(&self, slot: u64) -> Place {
        row_place(
            self.sb.sessions,
            slot,
            SESSION_ROWS_PER_BLOCK,
            varve_format::session::SESSION_ROW_SIZE,
        )
    }

    /// Returns the place of a grant row.
    pub(crate) fn grant_row(&self, slot: u64) -> Place {
        row_place(
            self.sb.grants,
            slot,
            GRANT_ROWS_PER_BLOCK,
            varve_format::session::GRANT_ROW_SIZE,
        )
    }

    /// Returns the number of session rows.
    pub(crate) fn session_slots(&self) -> u64 {
        self.sb.sessions.blocks.get() * SESSION_ROWS_PER_BLOCK
    }

    /// Returns the number of grant rows.
    pub(crate) fn grant_slots(&self) -> u64 {
        self.sb.grants.blocks.get() * GRANT_ROWS_PER_BLOCK
    }

    /// Returns the number of blocks by which the inode file grows.
    pub(crate) fn inode_chunk(&self) -> u64 {
        (self.blocks(Tier::Nvm) / 4096).clamp(1, INODES_PER_BLOCK)
    }
}

/// Returns the place of a device row in the area of these rows.
pub(crate) fn device_row(table: Area, slot: usize) -> Place {
    row_place(table, slot as u64, DEVICE_ROWS_PER_BLOCK as u64, DEVICE_ROW_SIZE)
}

fn row_place(area: Area, slot: u64, per_block: u64, size: usize) -> Place {
    Place {
        block: BlockNo(area.start.get() + slot / per_block),
        offset: BLOCK_HEADER_SIZE + (slot % per_block) as usize * size,
    }
}
