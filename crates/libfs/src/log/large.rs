//! Limits the chunks that large operations fill before they are committed. Knows numbers of chunks, not the
//! chunks.

use crate::sync::{Condvar, Mutex, wait_for};
use std::time::Duration;
use varve_format::log::CHUNK_BYTES;
use varve_ipc::Clock;

/// Longest sleep before a wait checks for room again.
const LOOK: Duration = Duration::from_millis(20);

/// Size above which an operation may need more than its lane's current chunk and one more.
const LARGE_BYTES: usize = CHUNK_BYTES as usize / 2;

/// Lanes have at most half of a log's chunks; large operations together have at most a quarter besides. So a
/// thread that waits for a chunk waits for a committed one, which the digest gives back.
pub(super) struct Large {
    left: Mutex<u64>,
    changed: Condvar,
    most: u64,
}

/// Chunks that one operation may fill; given back when this is dropped.
pub struct Room<'l> {
    large: &'l Large,
    chunks: u64,
}

impl Large {
    /// Creates the limit of a log of `chunks` chunks.
    pub(super) fn new(chunks: u64) -> Self {
        let most = (chunks / 4).max(1);
        Self {
            left: Mutex::new(most),
            changed: Condvar::new(),
            most,
        }
    }

    pub(super) fn take(&self, clock: &dyn Clock, bytes: usize) -> Room<'_> {
        let chunks = match bytes {
            0..=LARGE_BYTES => 0,
            _ => (bytes as u64).div_ceil(CHUNK_BYTES).min(self.most),
        };
        if chunks > 0 {
            let mut left = self.left.lock();
            while *left < chunks {
                wait_for(clock, &self.changed, &mut left, LOOK);
            }
            *left -= chunks;
        }
        Room { large: self, chunks }
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if self.chunks > 0 {
            *self.large.left.lock() += self.chunks;
            self.large.changed.notify_all();
        }
    }
}
