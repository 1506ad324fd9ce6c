//! Placement over the tiers: where data goes, and what moves later. A policy ([`Hierarchy`]) decides and
//! moves nothing; the mover carries its jobs out through store transactions and decides nothing.

mod heat;
mod hierarchy;
pub(crate) mod jobs;

pub use hierarchy::{Hierarchy, Marks};
pub use jobs::PlacementStatus;

use serde::{Deserialize, Serialize};
use varve_format::{BlockNo, Extent, FileBlock, Ino, InodeKey, Tier};
use varve_store::{DataTarget, SpaceStats};

/// How blocks of a file were used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A client may read them directly now; whether it does is not seen.
    Mapped,
    /// Read through the daemon.
    Read,
    /// Written by a digest.
    Written,
}

/// What a policy may look at.
pub trait Catalog {
    /// Regular files with numbers from `from` on, at most `most`, and where to go on; `None`: there are no
    /// more. Several calls see no one state.
    fn files(&self, from: Ino, most: usize) -> (Vec<InodeKey>, Option<Ino>);

    /// Extents of a file from a block on, at most `most`; none if it is gone or must not be moved now.
    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<Extent>;
}

/// One run of blocks that is to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// File.
    pub key: InodeKey,
    /// First block in the file.
    pub at: FileBlock,
    /// Blocks.
    pub len: u32,
    /// Where they are.
    pub block: BlockNo,
}

/// Why blocks move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// Their tier is full.
    Full,
    /// They are read again and again.
    Warm,
    /// They are metadata that is not used, and there is little room for more.
    Metadata,
}

/// Moves from one tier to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Where the blocks are.
    pub from: Tier,
    /// Where they go.
    pub to: Tier,
    /// Why.
    pub cause: Cause,
    /// Which.
    pub moves: Vec<Move>,
    /// Why there are none, if that is for want of something.
    pub waiting: Option<String>,
}

/// Decides where data goes; moves nothing. Called from many threads.
pub trait Placement: Send + Sync {
    /// Where `bytes` of new data of an inode shall go. Tiers of which `space.tiers[t].total` is 0 are not
    /// there. The store goes on to other tiers when the one chosen is full, unless the target says `only`.
    fn target(&self, key: InodeKey, bytes: u64, space: &SpaceStats) -> DataTarget;

    /// Blocks of a file are used. Called while requests are answered: must be quick and read nothing.
    fn used(&self, _key: InodeKey, _from: FileBlock, _blocks: u64, _how: Use) {}

    /// What shall move now: jobs with at most `most` blocks in all, and jobs that wait.
    fn plan(&self, _space: &SpaceStats, _catalog: &dyn Catalog, _most: u64) -> Vec<Job> {
        Vec::new()
    }

    /// A move of the last plan was carried out.
    fn moved(&self, _job: &Job, _moved: &Move) {}

    /// A move of the last plan cannot be carried out, now or later: its data cannot be read.
    fn failed(&self, _failed: &Move) {}
}
