//! The session's update log: numbers, lanes, chunks, commit and sync. Owns where an entry goes and in which
//! order entries count; knows neither the meaning of operations nor the holders of leases.
//!
//! # Cost
//! A locked instruction between the non-temporal copy of a payload and the fence makes the processor drain
//! its write-combining buffers twice (measured: +45 % at 4 KiB, 2 × at 128 B). So there is none in between:
//! [`Slot::append`] takes its numbers *before* it copies, and a caller that must not hold a lock while it
//! copies user memory [`stage`](Slot::stage)s first and pays the second drain.
//!
//! # Order
//! A caller takes a [`Slot`] first (this may wait for space), then its inode locks, then commits. The
//! [`Committed`] it gets keeps the numbers *in flight* until it is dropped: publish pointers into the log
//! before that, and the chunk cannot be used again under them.

mod chunks;
mod grow;
#[cfg(all(test, feature = "shuttle"))]
pub(crate) mod interleavings;
mod lane;
mod large;
pub(crate) mod slots;
mod sync;
#[cfg(test)]
mod tests;

pub use lane::{Committed, Logged, Slot};
pub(crate) use lane::{Receipt, with_body};
pub use large::Room;
pub use slots::reset_after_fork;

use crate::errno::{Errno, OpError, OpResult};
use crate::seeded::{Bug, armed};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use chunks::Pool;
use crossbeam_utils::CachePadded;
use lane::Lane;
use large::Large;
use std::sync::Arc;
use sync::Syncs;
use varve_format::log::{CHUNK_BYTES, LANES_MAX, crc_seed};
use varve_format::{LogSeq, SessionId, TimeNs};
use varve_ipc::{ClientFault, Clock, IpcError, PageState, SessionPage, SystemClock};
use varve_media::Region;

/// Most payload bytes of one transaction.
pub const TX_BYTES_MAX: u64 = 16 << 20;

/// Services that the log needs from its surroundings. Called without inode locks held.
pub trait LogHost {
    /// Asks for a log of `len_bytes`; returns its new length.
    ///
    /// # Errors
    /// As the daemon's answer.
    fn grow(&self, len_bytes: u64) -> Result<u64, IpcError>;

    /// Asks for a digest of everything up to `upto`; returns when it is done if `wait`.
    ///
    /// # Errors
    /// As the daemon's answer.
    fn digest(&self, upto: LogSeq, wait: bool) -> Result<(), IpcError>;

    /// Drops all pointers into the log at or below `digested`.
    fn prune(&self, digested: LogSeq);

    /// Requests a call of [`Log::look_ahead`]. Returns at once; may do nothing.
    fn look_ahead(&self) {}

    /// Time, and how to wait.
    fn clock(&self) -> &dyn Clock {
        &SystemClock
    }
}

/// Sizes and bounds of a log.
#[derive(Debug, Clone, Copy)]
pub struct LogOptions {
    /// The log's session; seeds the checksums.
    pub session: SessionId,
    /// Current length in bytes.
    pub len_bytes: u64,
    /// Greatest length in bytes.
    pub max_bytes: u64,
    /// Share of `max_bytes` at which a digest is asked for, in percent.
    pub digest_percent: u8,
    /// Bound on a wait for space, in milliseconds.
    pub wait_ms: u64,
}

/// Time and view of an operation, as stamped on its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stamp {
    /// Time of the call.
    pub time_ns: TimeNs,
    /// Journal transaction of the session's view when the operation began ([`SessionPage::committed_tx`]).
    pub base: varve_format::TxId,
}

/// Faults of a log that the daemon was not told of yet.
#[derive(Default)]
struct Unsaid {
    /// Errno of the last failure; 0: none.
    errno: AtomicU64,
    /// Duration of the longest slow sync, in milliseconds; 0: none was slow.
    slow_ms: AtomicU64,
}

/// A session's log.
pub struct Log {
    next_seq: CachePadded<AtomicU64>,
    lanes: Box<[Lane]>,
    /// Threads with a slot below this own a lane; all others share the last one.
    own_lanes: usize,
    shared_used: AtomicBool,
    shared: Mutex<()>,
    region: Arc<dyn Region>,
    page: Arc<dyn SessionPage>,
    seed: u32,
    options: LogOptions,
    pool: Mutex<Pool>,
    /// Limit on the chunks that large operations fill before they are committed, besides the lanes' chunks.
    large: Large,
    syncs: Syncs,
    /// The program syncs, and little at a time.
    syncs_little: AtomicBool,
    faults: Unsaid,
}

impl Log {
    /// The log of a new session: empty, numbers start at 1.
    #[must_use]
    pub fn new(region: Arc<dyn Region>, page: Arc<dyn SessionPage>, options: LogOptions) -> Self {
        let most_chunks = options.max_bytes.max(options.len_bytes) / CHUNK_BYTES;
        let syncs = Syncs::new(&*region);
        Self {
            next_seq: CachePadded::new(AtomicU64::new(1)),
            lanes: (0..LANES_MAX).map(|_| Lane::new()).collect(),
            // At most half of the chunks can be bound to idle threads.
            own_lanes: (most_chunks as usize / 2).saturating_sub(1).min(slots::SHARED),
            shared_used: AtomicBool::new(false),
            shared: Mutex::new(()),
            seed: crc_seed(options.session),
            pool: Mutex::new(Pool::new(options.len_bytes / CHUNK_BYTES, !syncs.in_memory)),
            large: Large::new(most_chunks),
            syncs,
            syncs_little: AtomicBool::new(false),
            faults: Unsaid::default(),
            region,
            page,
            options,
        }
    }

    /// Waits until an operation of `bytes` may be staged: call it before [`reserve`](Self::reserve) if the
    /// bytes may not fit into a chunk. Without it, operations that each hold some chunks and wait for one
    /// more could wait for each other.
    pub fn room_for(&self, host: &dyn LogHost, bytes: usize) -> Room<'_> {
        self.large.take(host.clock(), bytes)
    }

    /// Takes the calling thread's lane with room for `bytes` (sums of
    /// [`entry_size`](varve_format::log::entry_size)). Waits for space for at most `wait_ms`. Call it before
    /// locking inodes.
    ///
    /// # Errors
    /// `ENOSPC` when no space came in time, or the daemon's error; `EDEADLK` when this thread has a slot
    /// already; `SessionLost`.
    #[inline]
    pub fn reserve<T>(&self, host: &dyn LogHost, bytes: usize) -> OpResult<Slot<'_>, T> {
        Slot::take(self, host, bytes)
    }

    /// Number that the next entry will have.
    #[must_use]
    pub fn next_seq(&self) -> LogSeq {
        LogSeq(self.next_seq.load(Ordering::SeqCst))
    }

    /// Highest number given out (0: none).
    #[must_use]
    pub fn last_seq(&self) -> LogSeq {
        LogSeq(self.next_seq().0 - 1)
    }

    /// All numbers below this are committed and published.
    #[must_use]
    pub fn stable_below(&self) -> LogSeq {
        LogSeq(self.stable(usize::MAX, self.next_seq.load(Ordering::SeqCst)))
    }

    /// Waits until every number up to `upto` is committed and published, or `wait_ms` are over.
    ///
    /// # Errors
    /// `ETIMEDOUT`.
    pub fn wait_stable(&self, upto: LogSeq) -> Result<(), Errno> {
        let start = std::time::Instant::now();
        while self.stable_below() <= upto {
            if start.elapsed().as_millis() as u64 > self.options.wait_ms {
                return Err(Errno(libc::ETIMEDOUT));
            }
            crate::sync::yield_now();
        }
        Ok(())
    }

    /// Bytes in the chunks.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.pool.lock().total_bytes()
    }

    /// Converts the region's refusal to an errno.
    #[cold]
    fn refused(&self, error: &varve_media::MediaError) -> Errno {
        tracing::error!(%error, "the log does not take an entry");
        self.note_failure(error);
        Errno::from(error)
    }

    /// Notes that the region failed, for a report to the daemon, which cannot see it.
    #[cold]
    fn note_failure(&self, error: &varve_media::MediaError) {
        let errno = match error {
            varve_media::MediaError::Io { errno, .. } | varve_media::MediaError::Setup { errno, .. } => {
                *errno
            }
            other => Errno::from(other).0,
        };
        self.faults
            .errno
            .store(u64::from(errno.unsigned_abs()), Ordering::Relaxed);
    }

    /// Returns the faults since the last call.
    pub(crate) fn take_faults(&self) -> [Option<ClientFault>; 2] {
        let taken = |cell: &AtomicU64| match cell.load(Ordering::Relaxed) {
            0 => None,
            _ => Some(cell.swap(0, Ordering::Relaxed)).filter(|value| *value > 0),
        };
        [
            taken(&self.faults.errno).map(|errno| ClientFault::LogFailed { errno: errno as i32 }),
            taken(&self.faults.slow_ms).map(|ms| ClientFault::LogSlow {
                ms: u32::try_from(ms).unwrap_or(u32::MAX),
            }),
        ]
    }

    /// The bytes of the log, for reading at addresses from [`Committed`].
    #[must_use]
    pub fn region(&self) -> &dyn Region {
        &*self.region
    }

    /// Blocks reserved in all lanes.
    pub(crate) fn reserved(&self) -> u64 {
        self.lanes.iter().map(Lane::reserved).sum()
    }

    /// Takes the reserved blocks of all lanes away. A concurrent writer has spent its blocks before, or finds
    /// none.
    pub(crate) fn take_reserved(&self) -> u64 {
        self.lanes.iter().map(Lane::take_reserved).sum()
    }

    /// Smallest number in flight in other lanes than `own`, at most `bound`. The caller has loaded `bound`
    /// from `next_seq` before.
    #[inline]
    fn stable(&self, own: usize, bound: u64) -> u64 {
        let used = slots::used().min(self.own_lanes);
        let mut least = bound;
        for (index, lane) in self.lanes[..used].iter().enumerate() {
            if index != own {
                least = least.min(lane.in_flight());
            }
        }
        if self.shared_used.load(Ordering::SeqCst) && own != slots::SHARED {
            least = least.min(self.lanes[slots::SHARED].in_flight());
        }
        least
    }

    /// Fences this thread's stores, which commits them.
    #[inline]
    fn commit_fence(&self) -> Result<(), varve_media::MediaError> {
        if armed(Bug::NoFenceAtCommit) {
            return Ok(());
        }
        self.region.fence()
    }

    /// Whether the session still counts: call after the fence.
    #[inline]
    fn is_live(&self) -> bool {
        armed(Bug::AckWithoutPageCheck) || self.page.state() == PageState::Live
    }
}

/// Converts a failed wait for space or a failed message to an error without a result.
fn ipc<T>(error: IpcError) -> OpError<T> {
    OpError::from(error)
}
