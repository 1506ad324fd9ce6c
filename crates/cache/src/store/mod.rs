//! One device of a cache: objects on it, found by the index, and safe against power cuts and damage.
//!
//! # Invariants
//! - What is served is one whole version of one object: heads and frames say whose they are, and are checked,
//!   before a byte is given out.
//! - No point of the log and no version is ever used for two writes, over restarts too.
//! - A version older than one that a [`flush`](Shard::flush) made durable is never served again, nor is what
//!   was removed before it. A purge is durable when it returns.
//! - Mutators hold the writer's lock for their whole time; the state's lock is held for moments and never
//!   over I/O. Order: writer, state.

mod admission;
mod checkpoint;
mod get;
mod hot;
mod journal;
mod layout;
mod log;
pub mod object;
mod open;
mod positions;
mod purge;
mod put;
mod scan;
mod shard;
mod stats;
mod stream;

pub use admission::Admission;
pub use get::Hit;
pub use layout::{Area, DEVICES_MAX, FORMAT_VERSION, StorePlan, Superblock};
pub use open::{Identity, Inspection, Opened, inspect};
pub use purge::ScopeHash;
pub use put::{Item, PutOptions, PutOutcome};
pub use scan::{Damage, ObjectInfo};
pub use shard::Shard;
pub use stats::StatsSnapshot;
pub use stream::PutStream;

use crate::device::DeviceError;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// What went wrong with a store.
#[derive(Debug, Clone, Error)]
pub enum StoreError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device holds no store, or its superblocks are damaged.
    #[error("{device} holds no cache store; make one with `varve cache mkstore`")]
    NoStore {
        /// Its name.
        device: String,
    },
    /// There is a store already.
    #[error("{device} holds a cache store already; --force makes a new one and loses what it holds")]
    StoreExists {
        /// Its name.
        device: String,
    },
    /// The device is too small for the plan.
    #[error(
        "{len_bytes} bytes are too few for a cache store of this policy: give it more, at least some MiB"
    )]
    TooSmall {
        /// Its length.
        len_bytes: u64,
    },
    /// The plan is out of bounds.
    #[error("{0}")]
    Plan(String),
    /// The devices are not those of one cache.
    #[error("{0}")]
    Devices(String),
    /// A key, its tags or its metadata are too long.
    #[error("{what} of {len} are more than the {most} that an object may have")]
    TooLong {
        /// "a key", …
        what: &'static str,
        /// How long.
        len: usize,
        /// The bound.
        most: usize,
    },
    /// A range does not lie within the body.
    #[error("bytes {start} to {end} are not within a body of {len} bytes")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// End.
        end: u64,
        /// Length of the body.
        len: u64,
    },
    /// The rest of an object is damaged or was overwritten while it was read.
    #[error("the object is gone: its bytes were overwritten or damaged")]
    Gone,
    /// A stream got more or fewer bytes than it was opened for.
    #[error("the stream was opened for {expected} bytes and got {got}")]
    Length {
        /// What was declared.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// The journal has no room: a checkpoint failed before.
    #[error("the journal is full")]
    JournalFull,
}

/// A clock that tells seconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// How a store is run; nothing of it is on the medium.
#[derive(Clone)]
pub struct Options {
    /// Which objects are written.
    pub admission: Admission,
    /// Memory for hot objects, bytes.
    pub hot_bytes: usize,
    /// What was put is durable after at most this, as long as puts or [`tick`](crate::Cache::tick)s come.
    pub flush_interval: Duration,
    /// How much of a segment objects that were hit may take again when the log comes to where they lie; 0:
    /// none.
    pub second_chance: f64,
    /// Sets that `SetMemLru` keeps in memory instead of those the store was made for, as a share of all.
    pub resident_share: Option<f64>,
    /// The time.
    pub clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            admission: Admission::All,
            hot_bytes: 16 << 20,
            flush_interval: Duration::from_secs(2),
            second_chance: 0.25,
            resident_share: None,
            clock: Arc::new(|| {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                now.map_or(0, |now| now.as_secs())
            }),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("admission", &self.admission)
            .field("hot_bytes", &self.hot_bytes)
            .field("second_chance", &self.second_chance)
            .finish_non_exhaustive()
    }
}
