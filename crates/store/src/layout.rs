//! Locations of the fixed areas of a pool: computed once at mkfs, then read from the superblock.

use crate::{Devices, MkfsOptions, Result, StoreError};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::inode::INODES_PER_BLOCK;
use varve_format::journal::JOURNAL_MIN_BYTES;
use varve_format::session::{GRANT_ROWS_PER_BLOCK, SESSION_ROWS_PER_BLOCK};
use varve_format::space::{BITS_PER_BLOCK, CHECKSUMS_PER_BLOCK, UNIT_ROWS_PER_BLOCK, UnitRow, footer_blocks};
use varve_format::state::PoolState;
use varve_format::superblock::{Area, FORMAT_VERSION, NVM_MIN_BYTES, Superblock, TierLayout};
use varve_format::{BLOCK_BYTES, BLOCK_HEADER_SIZE, BlockNo, Extent, Features, Tier};
use zerocopy::FromZeros;
use zerocopy::little_endian::{I64, U32, U64};

/// A position in a metadata block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) block: BlockNo,
    pub(crate) offset: usize,
}

/// The superblock with the arithmetic that belongs to it.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) sb: Superblock,
    /// Features of `incompat` that were set while the pool is open.
    set_since: Arc<AtomicU64>,
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
        }
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
            match devices.block_device(tier) {
                Some(device)
                    if blocks
                        .checked_mul(BLOCK_BYTES)
                        .is_some_and(|bytes| bytes <= device.len_bytes()) => {}
                Some(device) => {
                    return Err(StoreError::Devices(format!(
                        "the pool has {blocks} {} blocks, the device only {} bytes",
                        tier.name(),
                        device.len_bytes()
                    )));
                }
                None => {
                    return Err(StoreError::Devices(format!(
                        "the pool has a {} tier, but no such device was given",
                        tier.name()
                    )));
                }
            }
        }
        if first_free > nvm || areas.iter().any(|area| area.end() > first_free) {
            return Err(StoreError::Damaged(
                "superblock: an area passes its bounds".into(),
            ));
        }
        Ok(layout)
    }

    /// Returns the blocks of a tier; 0 if the pool has none.
    pub(crate) fn blocks(&self, tier: Tier) -> u64 {
        self.sb.tier(tier).blocks.get()
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
            let units = self.blocks(tier).checked_div(self.unit_blocks(tier)).unwrap_or(0);
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
            _ => block % self.unit_blocks(tier) < self.unit_data_blocks(tier),
        }
    }

    /// Returns the bitmap block that holds the bit of `block`, and the bit's number in it.
    pub(crate) fn bit(&self, tier: Tier, block: u64) -> (BlockNo, u64) {
        let start = self.sb.tier(tier).bitmap.start.get();
        (BlockNo(start + block / BITS_PER_BLOCK), block % BITS_PER_BLOCK)
    }

    /// Returns the place of checksum number `index` in a tier's NVM table (NVM: the block; else: its index in
    /// the open unit).
    pub(crate) fn checksum(&self, tier: Tier, index: u64) -> Place {
        let start = self.sb.tier(tier).checksums.start.get();
        Place {
            block: BlockNo(start + index / CHECKSUMS_PER_BLOCK),
            offset: BLOCK_HEADER_SIZE + (index % CHECKSUMS_PER_BLOCK) as usize * 4,
        }
    }

    /// Returns the place of a unit's row.
    pub(crate) fn unit_row(&self, tier: Tier, unit: u64) -> Place {
        row_place(
            self.sb.tier(tier).units,
            unit,
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

fn row_place(area: Area, slot: u64, per_block: u64, size: usize) -> Place {
    Place {
        block: BlockNo(area.start.get() + slot / per_block),
        offset: BLOCK_HEADER_SIZE + (slot % per_block) as usize * size,
    }
}
