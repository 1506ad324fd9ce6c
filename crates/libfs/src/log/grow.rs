//! What is done for the log before it is needed, by a thread that nobody waits for: more chunks, and chunks
//! whose first sync is as fast as the next. Owns how far ahead; refuses to know which thread that is.

use super::{Log, LogHost, slots};
use crate::sync::atomic::Ordering;
use varve_format::log::{CHUNK_BYTES, LANES_MAX};

/// Chunks that the log becomes longer by, at least: a small one would ask again at once.
const STEP_CHUNKS: u64 = 4;
/// Free chunks that are readied at least.
const READY_CHUNKS: usize = 4;

impl Log {
    /// Whether less than a quarter of the chunks is free.
    const fn is_low(free: usize, total: u64) -> bool {
        (free as u64) < total.div_ceil(4)
    }

    /// A lane has taken a chunk: says so to whoever looks ahead, if there is reason to.
    pub(super) fn took_chunk(&self, host: &dyn LogHost) {
        let low = {
            let pool = self.pool.lock();
            Self::is_low(pool.free_chunks(), pool.total()) && self.may_grow(pool.total())
        };
        if low || self.syncs_little.load(Ordering::Relaxed) {
            host.look_ahead();
        }
    }

    const fn may_grow(&self, total: u64) -> bool {
        total < self.options.max_bytes / CHUNK_BYTES
    }

    /// Makes the log longer while few of its chunks are free, and readies those that come next if the program
    /// syncs little at a time.
    ///
    /// Errors are left to those who need the space, or sync: they meet them again.
    pub fn look_ahead(&self, host: &dyn LogHost) {
        self.reclaim(host);
        let (free, total, grown_out) = {
            let pool = self.pool.lock();
            (pool.free_chunks(), pool.total(), pool.is_grown_out())
        };
        if Self::is_low(free, total) && self.may_grow(total) && !grown_out {
            let wished = total + (total / 2).max(STEP_CHUNKS);
            let chunks = wished.min(self.options.max_bytes / CHUNK_BYTES);
            if let Err(error) = self.grow::<()>(host, chunks) {
                tracing::debug!(?error, "the log does not grow ahead");
            }
            // Whether there is less to be had is found out when it is needed.
            self.pool.lock().may_grow_again();
        }
        if self.syncs_little.load(Ordering::Relaxed) {
            self.ready_next();
        }
    }

    /// Readies what lanes have before them: the rest of their chunks, and the chunks that are given out next.
    fn ready_next(&self) {
        let used = slots::used().min(slots::SHARED);
        let lanes = (0..used).chain([LANES_MAX - 1]);
        let current = lanes.map(|index| self.lanes[index].committed().0 / CHUNK_BYTES);
        let mut chunks: Vec<u64> = current.collect();
        chunks.extend(self.pool.lock().next_chunks(READY_CHUNKS.max(used)));
        chunks.dedup();
        for chunk in chunks {
            if let Err(error) = self.region.prepare(chunk * CHUNK_BYTES, CHUNK_BYTES) {
                tracing::debug!(%error, "a chunk could not be readied");
                return;
            }
        }
    }
}
