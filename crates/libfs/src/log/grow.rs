//! Prepares log space before it is needed, on a background thread: more chunks, and chunks whose first sync
//! is as fast as later ones. Owns how far ahead; does not know the thread.

use super::chunks::STEP_MOST;
use super::{Log, LogHost, slots};
use crate::sync::atomic::Ordering;
use varve_format::log::{CHUNK_BYTES, LANES_MAX};

/// Least number of chunks by which the log grows: a smaller step would need the next one at once.
const STEP_CHUNKS: u64 = 4;
/// Least number of free chunks that are readied.
const READY_CHUNKS: usize = 4;

impl Log {
    /// Whether less than a quarter of the chunks is free. Of the first chunk most programs leave some.
    const fn is_low(free: usize, total: u64) -> bool {
        total > 1 && (free as u64) < total.div_ceil(4)
    }

    /// Requests [`look_ahead`](Self::look_ahead) after a lane has taken a chunk, if there is work for it.
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

    /// Grows the log while few of its chunks are free, and readies the next chunks if the program syncs
    /// little at a time.
    ///
    /// Errors are not reported: callers that need the space, or sync, meet them again.
    pub fn look_ahead(&self, host: &dyn LogHost) {
        self.reclaim(host);
        let (free, total, grown_out) = {
            let pool = self.pool.lock();
            (pool.free_chunks(), pool.total(), pool.is_grown_out())
        };
        if Self::is_low(free, total) && self.may_grow(total) && !grown_out {
            let wished = total + (total / 2).clamp(STEP_CHUNKS, STEP_MOST);
            let chunks = wished.min(self.options.max_bytes / CHUNK_BYTES);
            if let Err(error) = self.grow::<()>(host, chunks) {
                tracing::debug!(?error, "the log does not grow ahead");
            }
            // A later request for space finds out whether the limit is lower than it was.
            self.pool.lock().may_grow_again();
        }
        if self.syncs_little.load(Ordering::Relaxed) {
            self.ready_next();
        }
    }

    /// Readies the chunks that lanes use next: the rest of their current ones, and the next free ones.
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
