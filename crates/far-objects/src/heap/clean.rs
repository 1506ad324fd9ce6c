//! The cleaner (section 3.2.5): moves the live objects out of the block with the fewest, in steps.
//!
//! A step moves some objects of one block, without stopping anybody but the shard of the object that it
//! moves. What
//! is damaged is never moved: the block stays as it is, is not used again, and a read of the object is an
//! error.

use super::{Core, FarHeap};
use crate::error::Error;
use crate::layout::{self, BLOCK_BYTES, BLOCK_SECTORS, Found};
use crate::log::{Buffer, NoRoom, Stream};
use crate::table::{Entry, Key};
use varve_far::{PAGE_BYTES, Page};
use zerocopy::IntoBytes;

/// Blocks that one thread cleans for a block of its own at most.
const BLOCKS_FOR_ROOM: usize = 256;
/// Free blocks below which objects of users are not appended; the cleaner's own.
const KEPT_BLOCKS: usize = 2;

/// The block that is being cleaned.
#[derive(Debug, Default)]
pub(super) struct Cleaner {
    buffer: Buffer,
    scratch: Vec<u8>,
    job: Option<Job>,
}

#[derive(Debug)]
struct Job {
    block: u32,
    sequence: u32,
    objects: Vec<Found>,
    next: usize,
}

/// What a step of the cleaner did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleaned {
    /// Nothing: no block has garbage enough.
    Nothing,
    /// Some objects of a block; there are more.
    Part,
    /// The last objects of a block, which is free now.
    Block,
}

impl Core {
    /// Moves at most `objects_max` objects.
    pub(super) fn clean_step(&self, objects_max: usize) -> Result<Cleaned, Error> {
        let mut cleaner = self.cleaner.lock();
        let cleaner = &mut *cleaner;
        if cleaner.job.is_none() {
            cleaner
                .buffer
                .resize_with(BLOCK_BYTES / PAGE_BYTES, Page::default);
            let Some(victim) = self.log.take_victim(&mut cleaner.buffer) else {
                return Ok(Cleaned::Nothing);
            };
            let (block, sequence) = victim?;
            cleaner.job = Some(Job {
                block,
                sequence,
                objects: layout::objects(cleaner.buffer.as_bytes()),
                next: 0,
            });
        }
        let Some(job) = &mut cleaner.job else {
            return Ok(Cleaned::Nothing);
        };
        let end = job.next.saturating_add(objects_max).min(job.objects.len());
        while job.next < end {
            let found = job.objects[job.next];
            let block = cleaner.buffer.as_bytes();
            self.relocate(job.block, job.sequence, block, found, &mut cleaner.scratch)?;
            job.next += 1;
        }
        if job.next < job.objects.len() {
            return Ok(Cleaned::Part);
        }
        self.log.end_cleaning(job.block);
        cleaner.job = None;
        Ok(Cleaned::Block)
    }

    /// Appends one object of a block anew, if its table says that it is that one.
    fn relocate(
        &self,
        block: u32,
        sequence: u32,
        bytes: &[u8],
        found: Found,
        scratch: &mut Vec<u8>,
    ) -> Result<(), Error> {
        let key = Key::of_number(found.number);
        let sector = u64::from(block) * BLOCK_SECTORS as u64 + found.sector as u64;
        loop {
            let no_room = {
                let (mut shard, at) = self.lock(key);
                let Some((entry, len)) = shard.get(at, key.slot) else {
                    return Ok(());
                };
                let (stored, frame) = match entry {
                    Entry::At(stored) => (Some(stored), None),
                    Entry::Frame(frame) => (shard.frames.get(frame).stored(), Some(frame)),
                    Entry::Empty => (None, None),
                };
                if stored != Some(sector) {
                    return Ok(());
                }
                scratch.resize(len, 0);
                if let Some(frame) = frame {
                    // The same bytes, and they cannot be damaged.
                    scratch.copy_from_slice(shard.frames.get(frame).data());
                } else if !layout::extract(bytes, sequence, &found, scratch) {
                    let error = self.log.damaged(found.number, sector);
                    self.log.count(&error);
                    return Ok(());
                }
                match self
                    .log
                    .append(Stream::Cleaner, found.number, scratch, Some(sector))
                {
                    Ok(new) => {
                        self.before_change(&mut shard, key);
                        match frame {
                            Some(frame) => shard.frames.get_mut(frame).set_stored(new),
                            None => shard.set(at, key.slot, Entry::At(new)),
                        }
                        return Ok(());
                    }
                    Err(no_room) => no_room,
                }
            };
            match no_room {
                NoRoom::Pending => self.log.write_pending()?,
                NoRoom::Space => return Err(self.no_space()),
            };
        }
    }

    /// No block is free.
    fn no_space(&self) -> Error {
        match self.log.held_blocks() {
            0 if !self.may_refill() => Error::Full {
                device: self.log.device(),
            },
            _ => self.held(),
        }
    }

    /// Cleans until a block is free for objects of users.
    pub(super) fn clean_for_room(&self) -> Result<(), Error> {
        let full = || self.no_space();
        for _ in 0..BLOCKS_FOR_ROOM {
            if self.log.available_blocks() > KEPT_BLOCKS {
                return Ok(());
            }
            // Blocks that wait may have garbage too, once they are written.
            if self.clean_step(usize::MAX)? == Cleaned::Nothing && !self.log.write_pending()? {
                return Err(full());
            }
        }
        Err(full())
    }
}

impl FarHeap {
    /// Moves at most `objects_max` objects out of the block with the fewest live ones. The heap does so by
    /// itself when blocks become few; a program may use idle time for it.
    ///
    /// # Errors
    /// `Io`: the next step goes on with the same block, or takes another where it could not be read.
    pub fn clean_step(&self, objects_max: usize) -> Result<Cleaned, Error> {
        self.core().clean_step(objects_max)
    }
}
