//! Single objects: allocated from pools, named by [`ObjectId`].

use super::access::Intent;
use super::{Core, FarHeap, ObjectId};
use crate::error::Error;
use crate::frames;
use crate::pools::{Class, Pools};
use crate::table::{self, Entry, Key, Table};

/// An allocated object: the stored object that it is in, and the range of its bytes there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) key: Key,
    index: u32,
    pub(crate) offset: usize,
    /// Whether it is all of the stored object.
    is_whole: bool,
}

impl Place {
    pub(crate) fn id(self) -> ObjectId {
        ObjectId::new(self.key, self.index)
    }

    /// How to write all of it.
    pub(crate) fn intent(self) -> Intent {
        if self.is_whole {
            Intent::Replace
        } else {
            Intent::Change
        }
    }
}

impl Core {
    /// Allocates an object. It reads as zeros if the whole stored object is its own, and as anything
    /// otherwise.
    pub(crate) fn alloc(&self, len_bytes: usize) -> Result<Place, Error> {
        table::check_len(len_bytes)?;
        let _together = self.together();
        let class = Class::of(len_bytes);
        let stored_bytes = class.stored_bytes(len_bytes);
        let mut pools = self.pools.lock();
        let spot = loop {
            match pools.take(class) {
                Some(spot) => break spot,
                None => self.add_pool_table(&mut pools, class, stored_bytes)?,
            }
        };
        if spot.is_alone
            && let Err(error) = self.log.promise(1, stored_bytes)
        {
            pools.give_back(spot.table, spot.slot, spot.index);
            return Err(error);
        }
        let key = Key {
            table: spot.table,
            slot: spot.slot,
        };
        self.set_len(key, stored_bytes);
        drop(pools);
        Ok(Place {
            key,
            index: spot.index,
            offset: spot.index as usize * class.element_bytes(stored_bytes),
            is_whole: class.per_batch() == 1,
        })
    }

    fn set_len(&self, key: Key, len_bytes: usize) {
        let (mut shard, at) = self.lock(key);
        self.before_change(&mut shard, key);
        if let Some(Some(table)) = shard.tables.get_mut(at)
            && table.set_len(key.slot, len_bytes)
        {
            self.budget.force(Table::lengths_bytes(table.slots()));
        }
    }

    fn add_pool_table(&self, pools: &mut Pools, class: Class, len_bytes: usize) -> Result<(), Error> {
        let slots = pools.next_slots(class);
        // A bit for each object.
        let bits = (slots * class.per_batch()).div_ceil(8) as u64;
        let taken = self.take_memory(bits)?;
        let number = self.add_table(pools, slots, len_bytes)?;
        taken.keep();
        pools.add_table(class, number, slots);
        Ok(())
    }

    /// Makes a table.
    pub(super) fn add_table(&self, pools: &mut Pools, slots: usize, len_bytes: usize) -> Result<u32, Error> {
        let taken = self.take_memory(self.table_bytes(slots))?;
        let number = pools.take_number().ok_or(Error::TooMany {
            count: slots,
            len_bytes,
        })?;
        taken.keep();
        let (shard, at) = self.shard_of(number);
        let mut shard = shard.lock();
        if shard.tables.len() <= at {
            shard.tables.resize_with(at + 1, || None);
        }
        let mut table = Table::new(slots, len_bytes, self.is_wide);
        if let Some(saver) = &self.saver {
            table = table.with_marks(shard.now.epoch);
            saver
                .tables
                .lock()
                .note(number, slots, len_bytes as u16, true, &self.budget);
        }
        shard.tables[at] = Some(Box::new(table));
        Ok(number)
    }

    /// Memory of a table.
    pub(super) fn table_bytes(&self, slots: usize) -> u64 {
        let marks = self.saver.as_ref().map_or(0, |_| Table::marks_bytes(slots));
        Table::memory_bytes(slots, self.is_wide) + marks
    }

    /// Ends a table whose objects are all dropped. Its number may be used again.
    pub(super) fn drop_table(&self, pools: &mut Pools, number: u32) {
        let (shard, at) = self.shard_of(number);
        let table = {
            let mut shard = shard.lock();
            self.save_table(&mut shard, number);
            shard.tables.get_mut(at).and_then(Option::take)
        };
        if let Some(table) = table {
            if let Some(saver) = &self.saver {
                saver.tables.lock().note(number, 0, 0, true, &self.budget);
            }
            let lengths = if table.has_lengths() {
                Table::lengths_bytes(table.slots())
            } else {
                0
            };
            self.budget.give_back(self.table_bytes(table.slots()) + lengths);
            pools.give_number(number);
        }
    }

    /// Drops what is stored of an object: memory and place in the log. It reads as zeros then. No I/O.
    pub(crate) fn drop_object(&self, key: Key) {
        let (mut shard, at) = self.lock(key);
        let Some((entry, len)) = shard.get(at, key.slot) else {
            return;
        };
        let stored = match entry {
            Entry::Empty => return,
            Entry::At(sector) => {
                self.before_change(&mut shard, key);
                Some(sector)
            }
            Entry::Frame(frame) => {
                self.before_change(&mut shard, key);
                let stored = shard.frames.get(frame).stored();
                if shard.frames.get(frame).is_dirty() {
                    self.note_clean(len);
                }
                let freed = shard.frames.remove(frame);
                debug_assert_eq!(freed, frames::data_bytes(len));
                shard.cached -= 1;
                self.budget.give_back(freed);
                stored
            }
        };
        shard.set(at, key.slot, Entry::Empty);
        if let Some(sector) = stored {
            self.log.kill(sector, len);
        }
    }

    /// Frees an object. No I/O.
    pub(crate) fn free(&self, id: ObjectId) -> Result<(), Error> {
        let (key, index) = id.parts();
        let _together = self.together();
        let mut pools = self.pools.lock();
        let spot = pools
            .give_back(key.table, key.slot, index)
            .ok_or(Error::NotAllocated(id.0))?;
        if !spot.is_alone {
            return Ok(());
        }
        let (_, stored_bytes) = self.entry(key).ok_or(Error::NotAllocated(id.0))?;
        self.drop_object(key);
        self.log.release(1, stored_bytes);
        let class = pools.class(key.table);
        if let (Some(class), Some(slots)) = (class, pools.drop_empty(key.table)) {
            self.budget
                .give_back((slots * class.per_batch()).div_ceil(8) as u64);
            self.drop_table(&mut pools, key.table);
        }
        Ok(())
    }

    /// A table for whom it is made for; ended by [`Self::end_table`].
    pub(crate) fn new_table(&self, slots: usize, len_bytes: usize) -> Result<u32, Error> {
        self.add_table(&mut self.pools.lock(), slots, len_bytes)
    }

    /// Ends a table whose objects are all dropped.
    pub(crate) fn end_table(&self, number: u32) {
        self.drop_table(&mut self.pools.lock(), number);
    }

    /// Promises a stored object its room in the log, and notes its length.
    pub(crate) fn promise(&self, key: Key, len_bytes: usize) -> Result<(), Error> {
        self.log.promise(1, len_bytes)?;
        // What a write left that was under way when the slot was vacated.
        self.drop_object(key);
        self.set_len(key, len_bytes);
        Ok(())
    }

    /// Drops a stored object and takes its promise back.
    pub(crate) fn unpromise(&self, key: Key) {
        if let Some((_, len_bytes)) = self.entry(key) {
            self.drop_object(key);
            self.log.release(1, len_bytes);
        }
    }

    /// Bytes of a stored object.
    pub(crate) fn stored_bytes(&self, key: Key) -> Result<usize, Error> {
        let (_, len) = self.entry(key).ok_or(Error::NotAllocated(key.number()))?;
        Ok(len)
    }

    /// Gives an object of a restored heap to a handle of values of `len_bytes`.
    pub(crate) fn claim(&self, id: ObjectId, len_bytes: usize) -> Result<(), Error> {
        self.saver()?;
        let (place, len) = self
            .place(id)
            .map_err(|_| self.refused_handle(id.0, "not known"))?;
        if Class::of(len_bytes).element_bytes(len_bytes) != len {
            return Err(self.refused_handle(id.0, "an object of another size"));
        }
        if !self
            .pools
            .lock()
            .claim(place.key.table, place.key.slot, place.index)
        {
            return Err(self.refused_handle(id.0, "open already"));
        }
        Ok(())
    }

    /// Ends the use of an object by a handle, and leaves the object.
    pub(crate) fn unclaim(&self, id: ObjectId) {
        let (key, index) = id.parts();
        self.pools.lock().unclaim(key.table, key.slot, index);
    }

    fn entry(&self, key: Key) -> Option<(Entry, usize)> {
        let (shard, at) = self.lock(key);
        shard.get(at, key.slot)
    }

    /// Where an allocated object is, and how long.
    fn place(&self, id: ObjectId) -> Result<(Place, usize), Error> {
        let (key, index) = id.parts();
        let class = {
            let pools = self.pools.lock();
            if !pools.is_used(key.table, key.slot, index) {
                return Err(Error::NotAllocated(id.0));
            }
            pools.class(key.table).ok_or(Error::NotAllocated(id.0))?
        };
        let (_, stored) = self.entry(key).ok_or(Error::NotAllocated(id.0))?;
        let len = class.element_bytes(stored);
        let place = Place {
            key,
            index,
            offset: index as usize * len,
            is_whole: class.per_batch() == 1,
        };
        Ok((place, len))
    }
}

/// Objects without a type. What an allocator for other languages would be built on.
impl FarHeap {
    /// Allocates an object of `len_bytes` zeros; less than 128 bytes are rounded up to a multiple of 4.
    ///
    /// # Errors
    /// `ZeroSize`, `TooLarge`, `TooMany`, `Full`, `MemoryLimit`; `Io` where the object that it shares a batch
    /// with
    /// cannot be read, or memory cannot be had because the device does not take what would leave it.
    pub fn alloc(&self, len_bytes: usize) -> Result<ObjectId, Error> {
        let _together = self.core().together();
        let place = self.core().alloc(len_bytes)?;
        if !place.is_whole {
            let rounded = Class::of(len_bytes).element_bytes(len_bytes);
            let zeroed = self.core().write_with(place.key, Intent::Change, |bytes| {
                bytes[place.offset..place.offset + rounded].fill(0);
            });
            if let Err(error) = zeroed {
                self.core().free(place.id())?;
                return Err(error);
            }
        }
        Ok(place.id())
    }

    /// Frees an object. No I/O.
    ///
    /// # Errors
    /// `NotAllocated`, also where it was freed already and not allocated since.
    pub fn free(&self, id: ObjectId) -> Result<(), Error> {
        self.core().free(id)
    }

    /// Bytes of an object, as they were rounded.
    ///
    /// # Errors
    /// `NotAllocated`.
    pub fn len_bytes(&self, id: ObjectId) -> Result<usize, Error> {
        self.core().place(id).map(|(_, len)| len)
    }

    /// Fills `bytes` from an object, from `offset_bytes` on.
    ///
    /// # Errors
    /// `NotAllocated`, `OutOfRange`; `Io`, `Damaged`, with `bytes` as they were.
    pub fn read(&self, id: ObjectId, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), Error> {
        let (place, len) = self.core().place(id)?;
        check_range(offset_bytes, bytes.len(), len)?;
        let at = place.offset + offset_bytes;
        self.core().read_with(place.key, |data| {
            if let Some(data) = data.get(at..at + bytes.len()) {
                bytes.copy_from_slice(data);
            }
        })
    }

    /// Stores `bytes` into an object, from `offset_bytes` on.
    ///
    /// # Errors
    /// `NotAllocated`, `OutOfRange`, `MemoryLimit`, `Io`, `Damaged`, `Full`: nothing is stored.
    pub fn write(&self, id: ObjectId, offset_bytes: usize, bytes: &[u8]) -> Result<(), Error> {
        let (place, len) = self.core().place(id)?;
        check_range(offset_bytes, bytes.len(), len)?;
        let intent = if bytes.len() == len {
            place.intent()
        } else {
            Intent::Change
        };
        let at = place.offset + offset_bytes;
        self.core().write_with(place.key, intent, |data| {
            if let Some(data) = data.get_mut(at..at + bytes.len()) {
                data.copy_from_slice(bytes);
            }
        })
    }
}

fn check_range(offset_bytes: usize, len_bytes: usize, of_bytes: usize) -> Result<(), Error> {
    match offset_bytes.checked_add(len_bytes) {
        Some(end) if end <= of_bytes => Ok(()),
        end => Err(Error::OutOfRange {
            index: end.unwrap_or(usize::MAX),
            len: of_bytes,
        }),
    }
}
