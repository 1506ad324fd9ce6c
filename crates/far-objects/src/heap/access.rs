//! Reads and writes of objects, wherever they are.

use super::{Core, Shard};
use crate::budget::Taken;
use crate::error::Error;
use crate::frames;
use crate::layout::OBJECT_MAX_BYTES;
use crate::table::{self, Entry, Key};
use parking_lot::MutexGuard;

static ZEROS: [u8; OBJECT_MAX_BYTES] = [0; OBJECT_MAX_BYTES];

/// What is to be done with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    Read,
    /// Part of it will be overwritten.
    Change,
    /// All of it will be overwritten, so nobody has to know what was there.
    Replace,
}

/// An object that was found.
enum Located<'a> {
    /// In memory; the shard is locked.
    Frame(MutexGuard<'a, Shard>, u32),
    /// Never written; so many zeros.
    Zeros(usize),
    /// Read from the log, and not kept since there is no memory for it.
    Passing(Box<[u8]>),
    /// A cut ended the epoch of the bytes that are to be written.
    Ended,
}

/// Memory for an object, with its bytes as they were where a table said that it is.
struct Prepared<'a> {
    data: Box<[u8]>,
    from: Entry,
    sequence: u32,
    read: Result<(), Error>,
    taken: Option<Taken<'a>>,
}

impl Core {
    /// Gives the bytes of an object to `look`, which must not use the heap.
    pub(crate) fn read_with<R>(&self, key: Key, look: impl FnOnce(&[u8]) -> R) -> Result<R, Error> {
        match self.locate(key, Intent::Read, u32::MAX)? {
            Located::Frame(mut shard, frame) => {
                let frame = shard.frames.get_mut(frame);
                frame.touch();
                Ok(look(frame.data()))
            }
            Located::Zeros(len) => Ok(look(&ZEROS[..len])),
            Located::Passing(data) => Ok(look(&data)),
            // Only for writes.
            Located::Ended => Err(self.no_memory(0)),
        }
    }

    /// As [`Self::read_with`] if that needs no device; `None` otherwise.
    pub(crate) fn read_in_memory<R>(&self, key: Key, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (mut shard, at) = self.lock(key);
        match shard.get(at, key.slot)? {
            (Entry::Frame(frame), _) => {
                shard.hits += 1;
                let frame = shard.frames.get_mut(frame);
                frame.touch();
                Some(look(frame.data()))
            }
            (Entry::Empty, len) => Some(look(&ZEROS[..len])),
            (Entry::At(_), _) => None,
        }
    }

    /// Gives the bytes of an object to `change`, which must not use the heap; with `Replace`, they are any
    /// bytes.
    pub(crate) fn write_with<R>(
        &self,
        key: Key,
        intent: Intent,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, Error> {
        self.write_in(key, intent, u32::MAX, change)?
            .ok_or_else(|| self.no_memory(0))
    }

    /// As [`Self::write_with`], in an epoch. `None` where a cut ended that and its checkpoint is being made.
    pub(super) fn write_in<R>(
        &self,
        key: Key,
        intent: Intent,
        epoch: u32,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<Option<R>, Error> {
        match self.locate(key, intent, epoch)? {
            Located::Frame(mut shard, frame) => {
                shard.frames.get_mut(frame).touch();
                Ok(Some(self.change(&mut shard, key, frame, change)))
            }
            Located::Ended => Ok(None),
            Located::Zeros(_) | Located::Passing(_) => Err(self.no_memory(0)),
        }
    }

    fn change<R>(&self, shard: &mut Shard, key: Key, frame: u32, change: impl FnOnce(&mut [u8]) -> R) -> R {
        self.before_change(shard, key);
        let frame = shard.frames.get_mut(frame);
        if !frame.is_dirty() {
            self.note_dirty(frame.data().len());
        }
        let (data, stored) = frame.dirty();
        let len = data.len();
        let result = change(data);
        if let Some(sector) = stored {
            self.log.kill(sector, len);
        }
        result
    }

    /// Finds an object, and brings it into memory. To read one, lack of memory is no error. To write one, the
    /// bytes that come are of an epoch.
    fn locate(&self, key: Key, intent: Intent, epoch: u32) -> Result<Located<'_>, Error> {
        let mut prepared: Option<Prepared<'_>> = None;
        loop {
            let (mut shard, at) = self.lock(key);
            let (entry, len) = shard.get(at, key.slot).ok_or(Error::NotAllocated(key.number()))?;
            if shard.has_ended(epoch) {
                return Ok(Located::Ended);
            }
            match entry {
                Entry::Frame(frame) => {
                    if intent != Intent::Read
                        && let Err(no_room) = self.save_first(&mut shard, key, frame)
                    {
                        drop(shard);
                        self.after(Some(no_room))?;
                        continue;
                    }
                    if intent != Intent::Read && !self.may_become_dirty(&shard, entry) {
                        return Err(self.held());
                    }
                    shard.hits += u64::from(prepared.is_none());
                    return Ok(Located::Frame(shard, frame));
                }
                Entry::Empty if intent == Intent::Read => return Ok(Located::Zeros(len)),
                _ if intent != Intent::Read && !self.may_become_dirty(&shard, entry) => {
                    return Err(self.held());
                }
                _ => {}
            }
            if let Some(ready) = prepared
                .take()
                .filter(|ready| self.is_valid(ready, entry, len, intent))
            {
                return self.install(shard, at, key, entry, ready);
            }
            shard.misses += 1;
            drop(shard);
            prepared = Some(self.prepare(key, entry, len, intent)?);
        }
    }

    /// Takes memory for an object and reads it. Nothing is locked.
    fn prepare(&self, key: Key, from: Entry, len: usize, intent: Intent) -> Result<Prepared<'_>, Error> {
        let taken = match self.take_memory(frames::data_bytes(len)) {
            Ok(taken) => Some(taken),
            Err(_) if intent == Intent::Read => None,
            Err(error) => return Err(error),
        };
        let mut data = vec![0; len].into_boxed_slice();
        let (sequence, read) = match from {
            Entry::At(sector) if intent != Intent::Replace => self.log.read(key.number(), sector, &mut data),
            _ => (0, Ok(())),
        };
        Ok(Prepared {
            data,
            from,
            sequence,
            read,
            taken,
        })
    }

    /// Whether what was prepared without a lock is the object as it is now.
    fn is_valid(&self, ready: &Prepared<'_>, entry: Entry, len: usize, intent: Intent) -> bool {
        if ready.data.len() != len {
            return false;
        }
        if intent == Intent::Replace {
            return true;
        }
        match entry {
            Entry::At(sector) => ready.from == entry && self.log.is_current(sector, ready.sequence),
            _ => ready.from == entry,
        }
    }

    fn install<'a>(
        &'a self,
        mut shard: MutexGuard<'a, Shard>,
        at: usize,
        key: Key,
        entry: Entry,
        ready: Prepared<'_>,
    ) -> Result<Located<'a>, Error> {
        if let Err(error) = ready.read {
            drop(shard);
            self.log.count(&error);
            return Err(error);
        }
        let has_frames = (shard.frames.len() as u64) < table::frames_max(self.is_wide);
        let (Some(taken), true) = (ready.taken, has_frames) else {
            return Ok(Located::Passing(ready.data));
        };
        let stored = match entry {
            Entry::At(sector) => Some(sector),
            _ => None,
        };
        let (frame, grown) = shard.frames.insert(key, ready.data, stored);
        self.budget.force(grown);
        taken.keep();
        shard.cached += 1;
        shard.set(at, key.slot, Entry::Frame(frame));
        Ok(Located::Frame(shard, frame))
    }

    /// Brings an object into memory and keeps it there.
    ///
    /// # Errors
    /// `PageBuffer`, and as for a write.
    pub(crate) fn pin(&self, key: Key) -> Result<Pin<'_>, Error> {
        let full = || Error::PageBuffer {
            limit_bytes: self.page_buffer.limit(),
        };
        let Located::Frame(mut shard, frame) = self.locate(key, Intent::Change, u32::MAX)? else {
            return Err(self.no_memory(0));
        };
        let frame = shard.frames.get_mut(frame);
        let len = frame.data().len() as u64;
        if !self.page_buffer.try_take(len) {
            return Err(full());
        }
        if !frame.pin() {
            self.page_buffer.give_back(len);
            return Err(full());
        }
        frame.touch();
        Ok(Pin { core: self, key, len })
    }
}

/// An object that stays in memory while this lives, so that a write of it cannot fail.
pub(crate) struct Pin<'a> {
    core: &'a Core,
    key: Key,
    len: u64,
}

impl Pin<'_> {
    /// Looks at the object.
    pub(crate) fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> Option<R> {
        let (shard, at) = self.core.lock(self.key);
        match shard.get(at, self.key.slot) {
            Some((Entry::Frame(frame), _)) => Some(look(shard.frames.get(frame).data())),
            _ => None,
        }
    }

    /// Changes the object. No I/O.
    pub(crate) fn write(&self, change: impl FnOnce(&mut [u8])) {
        let (mut shard, at) = self.core.lock(self.key);
        if let Some((Entry::Frame(frame), _)) = shard.get(at, self.key.slot) {
            self.core.change(&mut shard, self.key, frame, change);
        }
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.core.page_buffer.give_back(self.len);
        let (mut shard, at) = self.core.lock(self.key);
        if let Some((Entry::Frame(frame), _)) = shard.get(at, self.key.slot) {
            shard.frames.get_mut(frame).unpin();
        }
    }
}
