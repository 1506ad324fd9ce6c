//! Chunks of the log: free, in use, or waiting for the digest; growth, and the wait when the log is full.
//! Knows nothing of entries but the highest number in a chunk.

use super::{Log, LogHost, ipc};
use crate::errno::{Errno, OpError, OpResult};
use crate::seeded::{Bug, armed};
use std::ops::Range;
use std::time::Duration;
use varve_format::LogSeq;
use varve_format::log::{CHUNK_BYTES, LANES_MAX, LIVE_HEADER_SIZE};
use varve_ipc::IpcError;

/// Longest wait for a digest's next record, before the end of the digest is waited for, and its errors are seen.
const PATIENCE: Duration = Duration::from_millis(100);
/// Pause between two requests for a digest meanwhile: one may have ended before it had all.
const ASK_AGAIN: Duration = Duration::from_millis(50);
/// Most chunks by which the log grows at once: the kernel clears them, and who needs the first one waits for all.
pub(super) const STEP_MOST: u64 = 32;
const PROGRESS_NAP: Duration = Duration::from_micros(50);
const PROGRESS_NAP_MOST: Duration = Duration::from_millis(1);
/// While there are never-used chunks, pointers are dropped only when that frees at least one in this number
/// of the used ones: a prune looks at all inodes with pointers into the log, which is too much for each
/// chunk.
const PRUNED_SHARE: u64 = 4;

/// A full chunk.
#[derive(Debug, Clone, Copy)]
struct Retired {
    chunk: u64,
    /// Highest number in it.
    last_seq: u64,
}

/// All chunks of a log but the lanes' current ones.
pub(super) struct Pool {
    total: u64,
    /// Used free chunks, the next one to be taken last.
    free: Vec<u64>,
    /// Never-used chunks: the kernel clears memory for each.
    fresh: Range<u64>,
    retired: Vec<Retired>,
    /// Pointers up to this number have been dropped.
    pruned: u64,
    /// Highest number up to which a digest was requested.
    asked: u64,
    /// When a thread that waits for a chunk has asked last.
    asked_at: Duration,
    /// Growth was refused for good.
    grown_out: bool,
    /// Whether a commit alone is not durable on the log's medium.
    syncs: bool,
    /// Parts of retired chunks that are not yet synced: start and end.
    pub(super) unsynced: Vec<(u64, u64)>,
    /// How far each lane's current chunk is synced.
    pub(super) synced: [u64; LANES_MAX],
}

/// First byte for entries in a chunk.
pub(super) const fn chunk_start(chunk: u64) -> u64 {
    if chunk == 0 {
        LIVE_HEADER_SIZE as u64
    } else {
        chunk * CHUNK_BYTES
    }
}

/// Outcome of an attempt to take a chunk.
enum Try {
    Got(u64),
    Prune(u64),
    Grow(u64),
    Wait,
}

impl Pool {
    pub(super) fn new(total: u64, syncs: bool) -> Self {
        Self {
            total,
            free: Vec::new(),
            fresh: 0..total,
            retired: Vec::new(),
            pruned: 0,
            asked: 0,
            asked_at: Duration::ZERO,
            grown_out: false,
            syncs,
            unsynced: Vec::new(),
            synced: [0; LANES_MAX],
        }
    }

    pub(super) const fn total_bytes(&self) -> u64 {
        self.total * CHUNK_BYTES
    }

    /// Retires the chunk that begins its entries at `start` and is full up to `end`; its highest number is
    /// `last_seq`.
    pub(super) fn retire(&mut self, lane: usize, start: u64, end: u64, last_seq: u64) {
        let synced = self.synced[lane].max(start);
        if self.syncs && synced < end && !armed(Bug::LeftChunkUnsynced) {
            self.unsynced.push((synced, end));
        }
        self.retired.push(Retired {
            chunk: start / CHUNK_BYTES,
            last_seq,
        });
    }

    /// Takes back a chunk that was not used.
    pub(super) fn give_back(&mut self, start: u64) {
        self.free.push(start / CHUNK_BYTES);
    }

    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    pub(super) const fn free_chunks(&self) -> usize {
        self.free.len() + (self.fresh.end - self.fresh.start) as usize
    }

    /// Whether growth was refused for good.
    pub(super) const fn is_grown_out(&self) -> bool {
        self.grown_out
    }

    pub(super) const fn may_grow_again(&mut self) {
        self.grown_out = false;
    }

    /// Returns up to `count` chunks that will be taken next.
    pub(super) fn next_chunks(&self, count: usize) -> Vec<u64> {
        let used = self.free.iter().rev().copied();
        used.chain(self.fresh.clone()).take(count).collect()
    }

    /// Moves chunks that are digested and pruned to the free list.
    fn recycle(&mut self) {
        let pruned = self.pruned;
        let free = &mut self.free;
        self.retired.retain(|chunk| {
            let done = chunk.last_seq <= pruned;
            if done {
                free.push(chunk.chunk);
            }
            !done
        });
    }

    /// Number of retired chunks that may be used again when they are pruned.
    fn droppable(&self, digested: u64) -> usize {
        let may = |chunk: &&Retired| chunk.last_seq <= digested;
        self.retired.iter().filter(may).count()
    }

    /// Takes the chunk that was used last, if there is one: its memory is there, and in the CPU caches, while
    /// the kernel clears a never-used one page by page. So the log uses as much memory as is written during a
    /// digest, not as much as it may have.
    fn try_take(&mut self, digested: u64, max_chunks: u64) -> Try {
        self.recycle();
        if let Some(chunk) = self.free.pop() {
            return Try::Got(chunk);
        }
        let used = self.total - (self.fresh.end - self.fresh.start);
        if !self.fresh.is_empty() && self.droppable(digested) as u64 >= (used / PRUNED_SHARE).max(1) {
            return Try::Prune(digested);
        }
        if let Some(chunk) = self.fresh.next() {
            return Try::Got(chunk);
        }
        if armed(Bug::ChunkBackEarly) && !self.retired.is_empty() {
            return Try::Got(self.retired.remove(0).chunk);
        }
        if self.droppable(digested) > 0 {
            return Try::Prune(digested);
        }
        if self.total < max_chunks && !self.grown_out {
            return Try::Grow((self.total + (self.total / 2).clamp(1, STEP_MOST)).min(max_chunks));
        }
        Try::Wait
    }
}

impl Log {
    /// Takes a chunk and returns its first byte for entries. Waits for at most `wait_ms`.
    pub(super) fn take_chunk<T>(&self, host: &dyn LogHost) -> OpResult<u64, T> {
        let start = host.clock().moment();
        let bound = Duration::from_millis(self.options.wait_ms);
        let max_chunks = self.options.max_bytes / CHUNK_BYTES;
        let mut nap = Duration::from_micros(50);
        loop {
            let digested = self.droppable();
            let tried = self.pool.lock().try_take(digested, max_chunks);
            match tried {
                Try::Got(chunk) => {
                    self.ask_when_due(host);
                    self.took_chunk(host);
                    return Ok(chunk_start(chunk));
                }
                Try::Prune(upto) => self.prune_to(host, upto),
                Try::Grow(chunks) => self.grow(host, chunks)?,
                Try::Wait => {
                    if !self.is_live() {
                        return Err(OpError::lost());
                    }
                    if host.clock().moment() - start >= bound {
                        return Err(OpError::Failed(Errno(libc::ENOSPC)));
                    }
                    if self.sees_progress(host, digested).map_err(ipc)? {
                        continue;
                    }
                    host.digest(self.last_seq(), true).map_err(ipc)?;
                    if self.droppable() <= digested {
                        // The digest has ended without progress: numbers of other threads are in flight.
                        host.clock().pause(nap);
                        nap = (nap * 2).min(Duration::from_millis(5));
                    }
                }
            }
        }
    }

    /// Has the daemon digest the log, and waits for the next record, or for a chunk that is free otherwise: records
    /// give chunks back one after another, long before everything is digested. `false`: none within [`PATIENCE`].
    fn sees_progress(&self, host: &dyn LogHost, digested: u64) -> Result<bool, IpcError> {
        let start = host.clock().moment();
        let mut nap = PROGRESS_NAP;
        while self.droppable() <= digested {
            let now = host.clock().moment();
            if now - start >= PATIENCE || !self.is_live() {
                return Ok(false);
            }
            let ask = {
                let mut pool = self.pool.lock();
                if pool.free_chunks() > 0 {
                    return Ok(true);
                }
                let due = pool.asked <= digested || now >= pool.asked_at + ASK_AGAIN;
                if due {
                    pool.asked = pool.asked.max(self.last_seq().0);
                    pool.asked_at = now;
                }
                due.then_some(pool.asked)
            };
            if let Some(upto) = ask {
                host.digest(LogSeq(upto), false)?;
            }
            host.clock().pause(nap);
            nap = (2 * nap).min(PROGRESS_NAP_MOST);
        }
        Ok(true)
    }

    /// Highest number at or below which pointers may be dropped and chunks used again: entries up to it are
    /// digested and published.
    #[must_use]
    pub fn droppable(&self) -> u64 {
        let digested = self.page.digested().0;
        digested.min(self.stable_below().0 - 1)
    }

    /// Drops digested pointers and frees their chunks. For the background worker; waits only for readers.
    pub fn reclaim(&self, host: &dyn LogHost) {
        let upto = self.droppable();
        if self.pool.lock().pruned < upto {
            self.prune_to(host, upto);
        }
    }

    fn prune_to(&self, host: &dyn LogHost, upto: u64) {
        host.prune(LogSeq(upto));
        let mut pool = self.pool.lock();
        pool.pruned = pool.pruned.max(upto);
        pool.recycle();
    }

    pub(super) fn grow<T>(&self, host: &dyn LogHost, chunks: u64) -> OpResult<(), T> {
        let answer = host.grow(chunks * CHUNK_BYTES);
        // The daemon has made the file longer; the mapping follows. If it cannot, the log stays as it is.
        if let Ok(len_bytes) = answer
            && self.region.len_bytes() < len_bytes
            && let Err(error) = self.region.grow(len_bytes)
        {
            tracing::warn!(%error, "the log's mapping does not grow");
            self.note_failure(&error);
        }
        let mut pool = self.pool.lock();
        match answer {
            Ok(len_bytes) => {
                let total = (len_bytes / CHUNK_BYTES).min(self.region.len_bytes() / CHUNK_BYTES);
                if total == 0 {
                    return Err(OpError::Failed(Errno(libc::EIO)));
                }
                if total <= pool.total {
                    // Another thread grew it, or the daemon granted nothing: the next round sees which.
                    pool.grown_out = total < chunks && pool.free.is_empty() && pool.fresh.is_empty();
                    return Ok(());
                }
                if pool.fresh.is_empty() {
                    pool.fresh = pool.total..total;
                } else {
                    pool.fresh.end = total;
                }
                pool.total = total;
                Ok(())
            }
            Err(IpcError::Errno(_)) => {
                pool.grown_out = true;
                Ok(())
            }
            Err(error) => Err(ipc(error)),
        }
    }

    /// Requests a digest when the undigested share of the log has passed the mark. Failures show when space
    /// is needed.
    fn ask_when_due(&self, host: &dyn LogHost) {
        let upto = {
            let mut pool = self.pool.lock();
            let digested = self.page.digested().0;
            let waiting = pool
                .retired
                .iter()
                .filter(|chunk| chunk.last_seq > digested)
                .count() as u64;
            let mark = self.options.max_bytes / 100 * u64::from(self.options.digest_percent);
            let last = self.next_seq.load(crate::sync::atomic::Ordering::Relaxed) - 1;
            if waiting * CHUNK_BYTES < mark || pool.asked > digested {
                return;
            }
            pool.asked = last;
            last
        };
        if let Err(error) = host.digest(LogSeq(upto), false) {
            tracing::debug!(%error, "digest could not be asked for");
        }
    }
}
