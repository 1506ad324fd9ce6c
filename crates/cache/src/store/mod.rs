//! One device of a cache: objects on it, found by the index, safe against power cuts and damage.
//!
//! # Invariants
//! - A hit returns one complete version of one object: heads and frames identify their object, and are
//!   checked before a byte is returned.
//! - No point of the log and no version is used for two writes, across restarts too.
//! - A version older than one that a [`flush`](Shard::flush) made durable is never served again, nor is an
//!   object that was removed before the flush. A purge is durable when it returns.
//! - Mutators hold the writer lock throughout; the state lock is held briefly and never over I/O. Lock order:
//!   writer, state.

mod admission;
mod away;
mod beside;
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
pub use get::{Hit, MemoryLookup};
pub use hot::{PIECE_BYTES, piece_end};
pub use layout::{Area, DEVICES_MAX, FORMAT_VERSION, StorePlan, Superblock};
pub use object::TAGS_MAX;
pub use open::{Identity, Inspection, Opened, inspect};
pub use purge::ScopeHash;
pub use put::{Item, PutOptions, PutOutcome};
pub use scan::{Damage, ObjectInfo};
pub use shard::{MemorySizes, Shard};
pub use stats::StatsSnapshot;
pub use stream::PutStream;

use crate::device::DeviceError;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Errors of a store.
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
    /// The store was made by a later version of this program.
    #[error(
        "{device} holds a cache store of version {version}, which this program does not know: use a newer \
         one, or make a new store with --force"
    )]
    Version {
        /// Its name.
        device: String,
        /// Version of its format.
        version: u32,
    },
    /// The device already holds a store.
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
    /// The devices do not form one cache.
    #[error("{0}")]
    Devices(String),
    /// A key, its tags or its metadata are too long.
    #[error("{what} of {len} are more than the {most} that an object may have")]
    TooLong {
        /// The part that is too long: "a key", …
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The largest valid length.
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
        /// The declared length.
        expected: u64,
        /// The bytes received.
        got: u64,
    },
    /// The journal has no room: an earlier checkpoint failed.
    #[error("the journal is full")]
    JournalFull,
}

/// A clock that returns seconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Run-time options of a store; they are not stored on the medium.
#[derive(Clone)]
pub struct Options {
    /// The choice of objects that are written.
    pub admission: Admission,
    /// Memory for hot objects, bytes.
    pub hot_bytes: usize,
    /// The longest time until a put object is durable, as long as puts or [`tick`](crate::Cache::tick)s come.
    pub flush_interval: Duration,
    /// Share of a segment that objects with hits may occupy again when the log overwrites them; 0: none.
    pub second_chance: f64,
    /// Share of the sets that `SetMemLru` keeps in memory, instead of the share that the store was made for.
    pub resident_share: Option<f64>,
    /// Whether a device whose random reads take milliseconds gets one transfer at a time, in the order in
    /// which an arm passes them ([`OrderedDevice`](crate::device::OrderedDevice)). Of use for one disk, not
    /// for an array of several.
    pub order_transfers: bool,
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
            order_transfers: true,
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
