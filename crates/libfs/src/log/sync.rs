//! Durability against power cuts: all that is committed goes to the medium, and calls that meet share one round. Knows ranges only.
//!
//! A round has a range for each lane. Where the medium makes each of them wait, those who wait for the round write them with its leader, side by
//! side: one after the other, sixteen threads would wait for sixteen writes.

use super::{Log, slots};
use crate::errno::Errno;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::Ordering;
use crate::sync::{Condvar, Mutex, MutexGuard};
use std::time::Instant;
use varve_format::LogSeq;
use varve_format::log::LANES_MAX;
use varve_media::watch::SLOW;
use varve_media::{MediaError, MediumKind, Region};

/// Rounds of synchronisation, numbered.
#[derive(Default)]
pub(super) struct Syncs {
    state: Mutex<Rounds>,
    /// A round ended, or has parts that nobody writes yet.
    ended: Condvar,
    /// The last part of a round is written.
    written: Condvar,
    /// Whether a write waits for a device.
    slow: bool,
}

#[derive(Default)]
struct Rounds {
    running: bool,
    started: u64,
    /// Highest round that succeeded.
    done: u64,
    /// Parts of the running round that nobody writes yet.
    parts: Vec<(u64, u64)>,
    /// Parts of it that are not written.
    left: usize,
    failed: Option<MediaError>,
}

impl Syncs {
    /// For a log in `region`.
    pub(super) fn new(region: &dyn Region) -> Self {
        Self {
            slow: !matches!(region.info().kind, MediumKind::Shm | MediumKind::Dax),
            ..Self::default()
        }
    }
}

impl Log {
    /// Makes everything that was committed up to `upto` durable against a power cut, as far as the medium can. Durable when this
    /// returns.
    ///
    /// # Errors
    /// The region's.
    pub fn sync_upto(&self, upto: LogSeq) -> Result<(), Errno> {
        if upto.0 == 0 {
            return Ok(());
        }
        let mut rounds = self.syncs.state.lock();
        // A round that has started may have read the lanes before our entries were there: wait for the next one.
        let needed = rounds.started + 1;
        loop {
            if rounds.done >= needed {
                return Ok(());
            }
            if let Some(part) = rounds.parts.pop() {
                rounds = self.write_part(rounds, part);
                continue;
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

    /// One round over all lanes: whatever is committed now.
    fn sync_round(&self) -> Result<(), Errno> {
        // Chunks change hands under the pool's lock, so each lane's position belongs to the chunk that we see.
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut lanes: Vec<(usize, u64)> = Vec::new();
        {
            let mut pool = self.pool.lock();
            ranges.append(&mut pool.unsynced);
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
                    ranges.push((from, end));
                }
            }
        }
        ranges.sort_unstable();
        if armed(Bug::NoSyncAtFsync) {
            ranges.clear();
        }
        let begun = Instant::now();
        let synced = if self.syncs.slow && ranges.len() > 1 {
            self.write_together(&ranges)
        } else {
            ranges
                .iter()
                .try_for_each(|(from, end)| self.region.sync(*from, end - from))
        };
        let took = begun.elapsed();
        if took >= SLOW {
            self.trouble
                .slow_ms
                .fetch_max(took.as_millis() as u64, Ordering::Relaxed);
        }
        let mut pool = self.pool.lock();
        match synced {
            Ok(()) => {
                for (index, end) in lanes {
                    // The lane may be in another chunk by now; then the rest of the old one was noted when it was left.
                    let (start, pos) = self.lanes[index].committed();
                    if start <= end && end <= pos {
                        pool.synced[index] = pool.synced[index].max(end);
                    }
                }
                Ok(())
            }
            Err(error) => {
                pool.unsynced.extend(ranges);
                tracing::error!(%error, "the log could not be made durable");
                self.note_failure(&error);
                Err(Errno(libc::EIO))
            }
        }
    }

    /// Writes the parts of the running round with those who wait for it or for the next one.
    fn write_together(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        let mut rounds = self.syncs.state.lock();
        rounds.parts.extend_from_slice(ranges);
        rounds.left = ranges.len();
        for _ in 1..ranges.len() {
            self.syncs.ended.notify_one();
        }
        while rounds.left > 0 {
            if let Some(part) = rounds.parts.pop() {
                rounds = self.write_part(rounds, part);
            } else {
                self.syncs.written.wait(&mut rounds);
            }
        }
        rounds.failed.take().map_or(Ok(()), Err)
    }

    /// Writes one part of the running round.
    fn write_part<'s>(
        &'s self,
        rounds: MutexGuard<'s, Rounds>,
        (from, end): (u64, u64),
    ) -> MutexGuard<'s, Rounds> {
        drop(rounds);
        let written = self.region.sync(from, end - from);
        let mut rounds = self.syncs.state.lock();
        rounds.left -= 1;
        if let Err(error) = written {
            rounds.failed.get_or_insert(error);
        }
        if rounds.left == 0 {
            self.syncs.written.notify_all();
        }
        rounds
    }
}
