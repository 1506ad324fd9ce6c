//! Memory for what comes, from objects that were not used lately.

use super::{Core, FarHeap, Shard};
use crate::budget::Taken;
use crate::error::Error;
use crate::log::{NoRoom, Stream};
use crate::table::Entry;
use std::sync::atomic::Ordering;

/// Frames that are looked at in one visit of a shard at least.
const SWEEP_MIN: usize = 32;
/// Visits of each shard that may free nothing before memory counts as used up: three rounds of the clock, in
/// eighths, and one more.
const IDLE_VISITS: usize = 32;

/// What a visit of one shard brought.
#[derive(Debug, Default)]
struct Visit {
    freed_bytes: u64,
    stopped: Option<NoRoom>,
}

impl Core {
    pub(super) fn no_memory(&self, needed_bytes: u64) -> Error {
        Error::MemoryLimit {
            needed_bytes,
            limit_bytes: self.budget.limit(),
        }
    }

    /// Counts memory of a handle, which is in use already.
    pub(crate) fn count_memory(&self, bytes: u64) {
        self.budget.force(bytes);
    }

    /// Ends that.
    pub(crate) fn uncount_memory(&self, bytes: u64) {
        self.budget.give_back(bytes);
    }

    /// Takes memory, after others gave theirs where needed. No lock of a shard or of the log may be held.
    ///
    /// # Errors
    /// `MemoryLimit` where nothing more can leave; `Io` or `Full` where it cannot because the device does not
    /// take it.
    pub(crate) fn take_memory(&self, bytes: u64) -> Result<Taken<'_>, Error> {
        let mut idle = 0;
        let mut failed = None;
        while !self.budget.try_take(bytes) {
            let number = self.hand.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            let visit = {
                let mut shard = self.shards[number].lock();
                let sweep = (shard.frames.len() / 8).max(SWEEP_MIN);
                self.evict(&mut shard, sweep, bytes, failed.is_some())
            };
            self.budget.give_back(visit.freed_bytes);
            if let Err(error) = self.after(visit.stopped) {
                failed = Some(error);
            }
            idle = if visit.freed_bytes == 0 { idle + 1 } else { 0 };
            if idle > IDLE_VISITS * self.shards.len() {
                return Err(failed.unwrap_or_else(|| self.no_memory(bytes)));
            }
        }
        Ok(Taken::new(&self.budget, bytes))
    }

    /// Lets objects leave that the clock finds unused, until so many bytes are free.
    fn evict(&self, shard: &mut Shard, sweep: usize, bytes: u64, is_clean_only: bool) -> Visit {
        let mut visit = Visit::default();
        for _ in 0..sweep {
            let Some(index) = shard.frames.next_candidate() else {
                continue;
            };
            let frame = shard.frames.get(index);
            let key = frame.key();
            let is_dirty = frame.is_dirty();
            if is_dirty && !is_clean_only {
                // One that a checkpoint needs goes to the checkpoint's blocks, and is clean then.
                if let Err(no_room) = self.save_first(shard, key, index) {
                    visit.stopped = Some(no_room);
                    break;
                }
            }
            let frame = shard.frames.get(index);
            let entry = if !frame.is_dirty() {
                frame.stored().map_or(Entry::Empty, Entry::At)
            } else if is_clean_only {
                continue;
            } else {
                match self.log.append(Stream::User, key.number(), frame.data(), None) {
                    Ok(sector) => {
                        self.note_clean(frame.data().len());
                        self.before_change(shard, key);
                        Entry::At(sector)
                    }
                    Err(no_room) => {
                        visit.stopped = Some(no_room);
                        break;
                    }
                }
            };
            visit.freed_bytes += shard.frames.remove(index);
            shard.set(key.table as usize >> self.shard_bits, key.slot, entry);
            shard.cached -= 1;
            shard.evicted += 1;
            shard.evicted_dirty += u64::from(is_dirty);
            if visit.freed_bytes >= bytes {
                break;
            }
        }
        visit
    }

    /// Does what the log needs before it takes more, or lets the thread do it.
    pub(super) fn after(&self, stopped: Option<NoRoom>) -> Result<(), Error> {
        match stopped {
            Some(NoRoom::Pending) => self.log.write_pending().map(|_| ()),
            Some(NoRoom::Space) => self.clean_for_room(),
            None if !self.log.has_pending() => Ok(()),
            None if self.signal.has_thread() => {
                self.signal.wake();
                Ok(())
            }
            None => self.log.write_pending().map(|_| ()),
        }
    }
}

impl FarHeap {
    /// Writes all objects that are in memory and newer than the store, and lets all leave that no guard
    /// holds.
    ///
    /// # Errors
    /// `Io`, `Full`: the rest stays in memory.
    pub fn evict_all(&self) -> Result<(), Error> {
        let core = self.core();
        for shard in &core.shards {
            // A frame leaves after three looks of the clock at most, unless it is used meanwhile.
            let mut looks = 0;
            loop {
                let (visit, frames) = {
                    let mut shard = shard.lock();
                    let frames = shard.frames.len();
                    (core.evict(&mut shard, frames, u64::MAX, false), frames)
                };
                core.budget.give_back(visit.freed_bytes);
                core.after(visit.stopped)?;
                looks += usize::from(visit.stopped.is_none());
                if frames == 0 || looks > 3 {
                    break;
                }
            }
        }
        while core.log.write_pending()? {}
        Ok(())
    }
}
