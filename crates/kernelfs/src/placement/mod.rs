//! Placement over the tiers: targets of new data, and later moves. A policy ([`Driver`] runs those of
//! `varve_placement`) decides and moves nothing; the mover carries its jobs out through store transactions and
//! decides nothing. Operators' pins ([`Pins`]) come before the policy.

mod driver;
mod evacuations;
mod fill;
pub(crate) mod jobs;
pub(crate) mod meter;
mod pins;
mod units;
pub(crate) mod walk;

pub use driver::{Driver, STAY_MS};
pub(crate) use evacuations::{Evacuations, Seen, emptied};
pub use evacuations::{JobState, JobStatus};
pub use jobs::{MovedStatus, PlacementStatus};
pub use meter::{DeviceFigures, DirectionFigures, Meters, SizeFigures};
pub use pins::{Held, PinnedFiles, Pins, Wish};

use serde::{Deserialize, Serialize};
use std::ops::Range;
use varve_format::{BlockNo, FileBlock, Ino, InodeKey, Tier};
use varve_placement::heat::Counts;
use varve_store::{DataTarget, Emptied, MappedPart, SharedPart, SpaceStats};

/// Kind of use of a file's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A client may read them directly; its reads are not seen.
    Mapped,
    /// Read through the daemon.
    Read,
    /// Written by a digest.
    Written,
}

/// Counted accesses to the data of a tier since the daemon started, each to a part of a file of 64 KiB: by
/// digests, through the daemon, and mapping NVM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TierHeat {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// The pool's files, for a policy.
pub trait Catalog {
    /// Returns regular files with numbers from `from` on, at most `most`, and where to continue; `None`:
    /// there are no more. Several calls together do not show one consistent state.
    fn files(&self, from: Ino, most: usize) -> (Vec<InodeKey>, Option<Ino>);

    /// Returns the extents of a file from a block on, without those that a pin holds; fewer than `most` if
    /// there are no more. None if the file is gone or must not be moved now.
    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart>;

    /// Returns the shared blocks with these numbers, at most `most` runs.
    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart>;
}

/// Data of one file that is written in one transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The file.
    pub key: InodeKey,
    /// Where the first of it is.
    pub offset_bytes: u64,
    /// Bytes, wherever in the file.
    pub bytes: u64,
}

/// First block of a run to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum At {
    /// A block that only this file has.
    File(InodeKey, FileBlock),
    /// A number of the shared space: the block moves for all files that share it.
    Shared(u64),
}

impl At {
    /// The first block of a part of a file.
    #[must_use]
    pub fn of(key: InodeKey, part: &MappedPart) -> Self {
        match part.number {
            Some(number) => Self::Shared(number),
            None => Self::File(key, part.extent.file_block),
        }
    }
}

/// A run of blocks to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// First block.
    pub at: At,
    /// Blocks.
    pub len: u32,
    /// First block on its tier.
    pub block: BlockNo,
}

/// Reason of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Their tier is full.
    Full,
    /// They are used so much that another tier serves them better.
    Hot,
    /// The devices are unequally loaded.
    Load,
    /// They are unused, and their room is wanted.
    Cold,
    /// They are unused metadata, and there is little room for more.
    Metadata,
    /// An operator wants them on another tier.
    Pinned,
    /// An operator wants their tier empty.
    Evacuated,
    /// An operator takes their device out.
    Removed,
}

impl Cause {
    /// What moves, for operators.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Full => "cold data",
            Self::Hot => "hot data",
            Self::Load => "data in use",
            Self::Cold => "unused data",
            Self::Metadata => "cold metadata",
            Self::Pinned => "pinned data",
            Self::Evacuated => "evacuated data",
            Self::Removed => "data of a device that is taken out",
        }
    }
}

/// Moves from one tier to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Source.
    pub from: Tier,
    /// Target.
    pub to: Tier,
    /// Reason.
    pub cause: Cause,
    /// What the operator's job empties that wants it, if one does.
    pub of: Option<Emptied>,
    /// Runs to move.
    pub moves: Vec<Move>,
    /// Obstacle, if there are no moves because of one.
    pub waiting: Option<String>,
}

impl Job {
    /// Blocks of its moves.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.moves.iter().map(|moved| u64::from(moved.len)).sum()
    }
}

/// Decides where data goes; moves nothing. Called from many threads.
pub trait Placement: Send + Sync {
    /// Returns the target of data that is written. Tiers with `space.tiers[t].total` of 0 do not exist. The
    /// store falls back to other tiers when the target is full, unless the target says `only`.
    fn target(&self, data: &Written, space: &SpaceStats) -> DataTarget;

    /// Notes a use of a file's blocks. Called while requests are answered: must be quick and read nothing.
    fn used(&self, _key: InodeKey, _from: FileBlock, _blocks: u64, _how: Use) {}

    /// Returns the jobs to do now, with at most `most` blocks in all, and jobs that wait.
    fn plan(&self, _space: &SpaceStats, _catalog: &dyn Catalog, _most: u64) -> Vec<Job> {
        Vec::new()
    }

    /// Returns the counted accesses to the data around a block.
    fn heat(&self, _at: At) -> Counts {
        Counts::default()
    }

    /// Notes that a move of the last plan was done.
    fn moved(&self, _job: &Job, _moved: &Move) {}

    /// Notes that a move of the last plan can never be done: its data cannot be read.
    fn failed(&self, _failed: &Move) {}

    /// Returns the counted accesses to the data of each tier.
    fn served(&self) -> [TierHeat; 3] {
        [TierHeat::default(); 3]
    }

    /// Its name, for operators.
    fn name(&self) -> &'static str {
        "custom"
    }
}
