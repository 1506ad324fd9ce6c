//! Plain values of the store's interface: options, reports, numbers.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use varve_format::state::EvacuationRow;
use varve_format::{BlockNo, Extent, FileBlock, FileKind, InodeKey, Tier, TimeNs, TxId};
use varve_media::stats::{CountingDevice, CountingRegion, MediaStats};
use varve_media::{BlockDevice, Region};

/// The media of a pool.
#[derive(Clone)]
pub struct Devices {
    /// NVM: all metadata, and data.
    pub nvm: Arc<dyn Region>,
    /// The metadata journal.
    pub journal: Arc<dyn Region>,
    /// Flash, if any.
    pub ssd: Option<Arc<dyn BlockDevice>>,
    /// Disk, if any.
    pub hdd: Option<Arc<dyn BlockDevice>>,
    /// Further devices of these tiers, in any order: their labels tell which they are.
    pub more: Vec<(Tier, Arc<dyn BlockDevice>)>,
}

impl Devices {
    /// Returns the block device of a tier.
    #[must_use]
    pub fn block_device(&self, tier: Tier) -> Option<&Arc<dyn BlockDevice>> {
        match tier {
            Tier::Nvm => None,
            Tier::Ssd => self.ssd.as_ref(),
            Tier::Hdd => self.hdd.as_ref(),
        }
    }
}

/// Faults of each medium of an open pool.
#[derive(Debug, Clone, Default)]
pub struct PoolMediaStats {
    tiers: [Arc<MediaStats>; 3],
    journal: Arc<MediaStats>,
}

impl PoolMediaStats {
    /// Returns the faults of a tier.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> &MediaStats {
        &self.tiers[tier as usize]
    }

    /// Returns the faults of the journal's device.
    #[must_use]
    pub fn journal(&self) -> &MediaStats {
        &self.journal
    }

    /// Wraps NVM and journal so that their faults are counted here.
    pub(crate) fn over(&self, devices: Devices) -> Devices {
        let region =
            |inner, stats: &Arc<MediaStats>| Arc::new(CountingRegion::new(inner, Arc::clone(stats))) as _;
        Devices {
            nvm: region(devices.nvm, &self.tiers[Tier::Nvm as usize]),
            journal: region(devices.journal, &self.journal),
            ..devices
        }
    }

    /// Wraps the device of a slower tier so that its faults are counted here.
    pub(crate) fn over_tier(&self, tier: Tier, device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
        Arc::new(CountingDevice::new(
            device,
            Arc::clone(&self.tiers[tier as usize]),
        ))
    }
}

/// A completed check of all structures, or of all data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// End of the check, in nanoseconds since 1970.
    pub ended_ns: TimeNs,
    /// Number of findings.
    pub findings: u64,
}

/// The last completed checks since the pool was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// Check of the structures.
    pub structures: Option<Pass>,
    /// Check of all data.
    pub data: Option<Pass>,
}

/// Parameters of a new pool.
#[derive(Debug, Clone)]
pub struct MkfsOptions {
    /// Name of the pool.
    pub pool_uuid: [u8; 16],
    /// Secret of the directories' name hash; random.
    pub dir_hash_key: [u8; 16],
    /// Times of the root directory, and birth of the pool.
    pub now_ns: TimeNs,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// Permission bits of the root directory.
    pub root_mode: u32,
    /// Blocks of one SSD unit; `None`: 64 MiB, or 1/16 of a small device.
    pub ssd_unit_blocks: Option<u64>,
    /// Blocks of one HDD unit; `None`: 256 MiB, or 1/16 of a small device.
    pub hdd_unit_blocks: Option<u64>,
    /// Overwrites an existing pool.
    pub force: bool,
}

impl Default for MkfsOptions {
    fn default() -> Self {
        Self {
            pool_uuid: [0; 16],
            dir_hash_key: [0; 16],
            now_ns: 0,
            root_uid: 0,
            root_gid: 0,
            root_mode: 0o755,
            ssd_unit_blocks: None,
            hdd_unit_blocks: None,
            force: false,
        }
    }
}

/// Options for opening a pool.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Metadata blocks kept in DRAM (4 KiB each).
    pub cache_blocks: usize,
    /// Shared data blocks of SSD and HDD kept in DRAM (4 KiB each).
    pub shared_blocks: usize,
    /// Verifies NVM data on reads, too.
    pub verify_nvm: bool,
    /// Opens the pool in spite of a damaged record, which is left out (for repair); else `JournalDamaged`.
    pub accept_journal_damage: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            cache_blocks: 16_384,
            shared_blocks: 32_768,
            verify_nvm: false,
            accept_journal_damage: false,
        }
    }
}

/// The results of `open`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenReport {
    /// Newest committed transaction.
    pub newest_tx: TxId,
    /// Replayed records.
    pub replayed: u64,
    /// Bytes of their ranges.
    pub replayed_bytes: u64,
    /// An unfinished record was found at the end (and ignored).
    pub torn_record: bool,
    /// Damage in the journal that was accepted.
    pub damage: Option<String>,
    /// Session rows.
    pub sessions: u64,
    /// Grant rows.
    pub grants: u64,
    /// Inodes in use.
    pub inodes: u64,
}

/// The tiers for new data blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataTarget {
    /// First choice; when it is full, the next slower ones, then the faster ones. A tier that is evacuated
    /// comes last.
    pub tier: Tier,
    /// Refuses any other tier.
    pub only: bool,
    /// May use the reserve (the digest's own work, migration away from a full tier).
    pub reserve: bool,
}

impl DataTarget {
    /// Returns a target that prefers `tier`.
    #[must_use]
    pub const fn prefer(tier: Tier) -> Self {
        Self {
            tier,
            only: false,
            reserve: false,
        }
    }

    /// Returns a target that allows only `tier`.
    #[must_use]
    pub const fn only(tier: Tier) -> Self {
        Self {
            tier,
            only: true,
            reserve: false,
        }
    }

    /// Returns this target, with use of the reserve.
    #[must_use]
    pub const fn with_reserve(self) -> Self {
        Self {
            reserve: true,
            ..self
        }
    }
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirItem {
    /// Name.
    pub name: Vec<u8>,
    /// Inode.
    pub key: InodeKey,
    /// Its kind.
    pub kind: FileKind,
    /// Position from which an iteration continues after this entry.
    pub cookie: u64,
}

/// Space counters of one tier, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStats {
    /// Blocks that can hold data or metadata (fixed areas and footers excluded).
    pub total: u64,
    /// Blocks that can be allocated now.
    pub free: u64,
    /// Blocks that were freed and wait for the journal or for readers.
    pub pending: u64,
    /// Blocks of a unit (0 on NVM).
    pub unit_blocks: u64,
    /// Empty units.
    pub empty_units: u64,
    /// Free blocks that new data may not take: metadata's share and the reserve of the NVM, the last empty
    /// unit of a slower tier.
    pub kept: u64,
    /// It is evacuated: it takes new data only when no other tier has room.
    #[serde(default)]
    pub avoided: bool,
}

/// Space counters of the pool, in blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceStats {
    /// NVM, SSD, HDD.
    pub tiers: [TierStats; 3],
    /// Reserved by [`Store::reserve`](crate::Store::reserve).
    pub reserved: u64,
    /// Blocks that can still be reserved.
    pub available: u64,
    /// Inodes in use.
    pub inodes_used: u64,
    /// Inodes that can still be made.
    pub inodes_free: u64,
}

/// Bytes read from and written to one tier since the pool was opened. Direct reads of NVM by privileged
/// clients are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierIo {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
}

/// Freed data blocks that wait for readers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PendingFrees {
    /// Blocks.
    pub blocks: u64,
    /// Newest transaction that freed some of them: a horizon of this releases all.
    pub newest_tx: TxId,
}

/// An extent of a file where its blocks lie, with the numbers of its shared blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedPart {
    /// The extent; of shared blocks, tier and block of their run.
    pub extent: Extent,
    /// First number in the shared space; `None`: the blocks are in no shared run. A number stands for equal
    /// bytes as long as the pool exists.
    pub number: Option<u64>,
    /// Extents that name the blocks, also others of this file.
    pub owners: u32,
}

/// A run of shared blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPart {
    /// First number in the shared space.
    pub number: u64,
    /// Blocks.
    pub len: u32,
    /// Medium.
    pub tier: Tier,
    /// First block on it.
    pub block: BlockNo,
    /// Extents that name the blocks.
    pub owners: u32,
}

/// Blocks of a file that are in a shared run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberedBlocks {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub blocks: u32,
    /// First number in the shared space.
    pub number: u64,
}

/// A part of a file whose blocks have equally many owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnedPart {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks.
    pub blocks: u32,
    /// First number in the shared space, which the blocks of other extents with these numbers are, too;
    /// `None`: the blocks are in no shared run.
    pub number: Option<u64>,
    /// Extents that name the blocks, also others of this file.
    pub owners: u32,
    /// Medium of the blocks.
    pub tier: Tier,
    /// The first of them there.
    pub block: BlockNo,
}

/// Checksums of successive blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SummedPart {
    /// First block in the file.
    pub file_block: FileBlock,
    /// First number in the shared space, as [`OwnedPart::number`].
    pub number: Option<u64>,
    /// CRC-32C of each block.
    pub sums: Vec<u32>,
}

impl SummedPart {
    /// Whether blocks from there on, with these numbers, continue this part.
    pub(crate) fn goes_on(&self, file_block: FileBlock, number: Option<u64>) -> bool {
        let len = self.sums.len() as u64;
        self.file_block.0 + len == file_block.0 && self.number.map(|first| first + len) == number
    }
}

/// What a job empties.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Emptied {
    /// A tier.
    Tier(Tier),
    /// One device of a tier, which is then taken out.
    Device {
        /// The tier.
        tier: Tier,
        /// The device's first number there.
        first: u64,
    },
}

impl Emptied {
    /// The tier that data leaves, or whose device it leaves.
    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Tier(tier) | Self::Device { tier, .. } => tier,
        }
    }
}

/// A job that is not cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobRow {
    /// What it empties.
    pub of: Emptied,
    /// The rest.
    pub row: EvacuationRow,
}
