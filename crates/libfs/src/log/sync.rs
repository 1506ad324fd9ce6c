//! Durability against power cuts: writes all committed entries to the medium; concurrent calls share one
//! round. Knows ranges only.
//!
//! A round has a range for each lane, and its leader hands them to the medium together: sixteen threads wait
//! for one flush of the device.

use super::{Log, slots};
use crate::errno::Errno;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};
use std::time::Instant;
use varve_format::LogSeq;
use varve_format::log::LANES_MAX;
use varve_media::stats::SLOW;
use varve_media::{MediumKind, Region};

/// Rounds of fewer bytes count as little.
const LITTLE_BYTES: u64 = 1 << 20;

/// Rounds of synchronisation, numbered.
#[derive(Default)]
pub(super) struct Syncs {
    state: Mutex<Rounds>,
    ended: Condvar,
    /// Number of bytes that the last round wrote.
    bytes: AtomicU64,
    /// Whether a commit's fence makes entries durable, as far as the medium can.
    pub(super) in_memory: bool,
}

#[derive(Default)]
struct Rounds {
    running: bool,
    started: u64,
    /// Highest round that succeeded.
    done: u64,
}

impl Syncs {
    /// For a log in `region`.
    pub(super) fn new(region: &dyn Region) -> Self {
        Self {
            in_memory: matches!(region.info().kind, MediumKind::Shm | MediumKind::Dax),
            ..Self::default()
        }
    }
}

impl Log {
    /// Makes every entry that was committed up to `upto` durable against a power cut, as far as the medium
    /// can. Durable when this returns.
    ///
    /// # Errors
    /// The region's.
    pub fn sync_upto(&self, upto: LogSeq) -> Result<(), Errno> {
        if upto.0 == 0 {
            return Ok(());
        }
        if self.syncs.in_memory {
            return self.sync_memory();
        }
        let mut rounds = self.syncs.state.lock();
        // A round that has started may have read the lanes before this caller's entries were there: wait for
        // the next one.
        let needed = rounds.started + 1;
        loop {
            if rounds.done >= needed {
                return Ok(());
            }
            if !rounds.running {
                rounds.running = true;
                rounds.started += 1;
                let round = rounds.started;
                drop(rounds);
                let result = self.sync_round();
                rounds = self.syncs.state.lock();
                rounds.running = false;
                if result.is_ok() {
                    rounds.done = round;
                }
                self.syncs.ended.notify_all();
                result?;
                continue;
            }
            self.syncs.ended.wait(&mut rounds);
        }
    }

    /// On a medium where a commit's fence makes entries durable, there is nothing to write: this runs no
    /// round and waits for no other thread.
    fn sync_memory(&self) -> Result<(), Errno> {
        self.region.sync(0, 0).map_err(|error| {
            tracing::error!(%error, "the log could not be made durable");
            self.note_failure(&error);
            Errno(libc::EIO)
        })
    }

    /// Notes that the program has synced. `true`: it syncs little at a time, and did not before, so
    /// [`look_ahead`](Self::look_ahead) has work.
    pub(crate) fn note_sync(&self) -> bool {
        let little = (1..LITTLE_BYTES).contains(&self.syncs.bytes.load(Ordering::Relaxed));
        let before = self.syncs_little.load(Ordering::Relaxed);
        if before != little {
            self.syncs_little.store(little, Ordering::Relaxed);
        }
        little && !before
    }

    /// Runs one round over all lanes: syncs all entries that are committed.
    fn sync_round(&self) -> Result<(), Errno> {
        // Chunks change hands under the pool's lock, so each lane's position belongs to the chunk that is
        // seen here.
        let mut parts: Vec<(u64, u64)> = Vec::new();
        let mut lanes: Vec<(usize, u64)> = Vec::new();
        {
            let mut pool = self.pool.lock();
            parts.append(&mut pool.unsynced);
            for index in (0..slots::used().min(slots::SHARED)).chain([LANES_MAX - 1]) {
                if armed(Bug::SyncOwnLane) && index != slots::lane() {
                    continue;
                }
                let (start, end) = self.lanes[index].committed();
                let mut from = pool.synced[index].max(start);
                if from < end {
                    lanes.push((index, end));
                }
                if armed(Bug::SyncFromNextPage) && from > start {
                    from = from.next_multiple_of(4096);
                }
                if from < end {
                    parts.push((from, end));
                }
            }
        }
        parts.sort_unstable();
        // A round that failed leaves its parts, and the lanes where they were.
        parts.dedup_by(|next, before| {
            let joined = next.0 <= before.1;
            if joined {
                before.1 = before.1.max(next.1);
            }
            joined
        });
        if armed(Bug::NoSyncAtFsync) {
            parts.clear();
        }
        let begun = Instant::now();
        let ranges: Vec<_> = parts.iter().map(|(from, end)| (*from, end - from)).collect();
        let synced = match ranges.as_slice() {
            [] => Ok(()),
            ranges => self.region.sync_all(ranges),
        };
        let bytes = ranges.iter().map(|(_, len)| len).sum();
        self.syncs.bytes.store(bytes, Ordering::Relaxed);
        let took = begun.elapsed();
        if took >= SLOW {
            self.faults
                .slow_ms
                .fetch_max(took.as_millis() as u64, Ordering::Relaxed);
        }
        let mut pool = self.pool.lock();
        match synced {
            Ok(()) => {
                for (index, end) in lanes {
                    // The lane may be in another chunk by now; then the rest of the old one was noted when it
                    // was retired.
                    let (start, pos) = self.lanes[index].committed();
                    if start <= end && end <= pos {
                        pool.synced[index] = pool.synced[index].max(end);
                    }
                }
                Ok(())
            }
            Err(error) => {
                pool.unsynced.extend(parts);
                tracing::error!(%error, "the log could not be made durable");
                self.note_failure(&error);
                Err(Errno(libc::EIO))
            }
        }
    }
}
