//! Arrays of equal objects: tables of their own, by index.

use super::Core;
use super::access::Intent;
use crate::checkpoint::ArrayRecord;
use crate::error::Error;
use crate::pools;
use crate::table::{self, Key};

/// Slots of a full table of an array: few enough that arrays are spread over the shards.
pub(super) const TABLE_SLOTS: usize = 512;

/// The tables of an array. Elements of less than 128 bytes lie several in one stored object.
#[derive(Debug)]
pub(crate) struct Array {
    /// Its name in checkpoints; 0 where there are none.
    handle: u64,
    tables: Vec<u32>,
    /// Slots that the last table has.
    last_slots: usize,
    element_bytes: usize,
    per_batch: usize,
    len: usize,
}

impl Array {
    pub(crate) fn new(core: &Core, element_bytes: usize) -> Result<Self, Error> {
        let mut array = Self::nameless(element_bytes)?;
        array.note(core);
        Ok(array)
    }

    fn nameless(element_bytes: usize) -> Result<Self, Error> {
        table::check_len(element_bytes)?;
        let per_batch = pools::per_batch(element_bytes);
        table::check_len(per_batch * element_bytes)?;
        Ok(Self {
            handle: 0,
            tables: Vec::new(),
            last_slots: 0,
            element_bytes,
            per_batch,
            len: 0,
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn stored_bytes(&self) -> usize {
        self.per_batch * self.element_bytes
    }

    fn batches(&self, len: usize) -> usize {
        len.div_ceil(self.per_batch)
    }

    /// Slots that there are.
    fn slots(&self) -> usize {
        self.tables.len().saturating_sub(1) * TABLE_SLOTS + self.last_slots
    }

    /// The stored object of an element, and where in it the element begins.
    pub(crate) fn place(&self, index: usize) -> Result<(Key, usize), Error> {
        if index >= self.len {
            return Err(Error::OutOfRange { index, len: self.len });
        }
        let batch = index / self.per_batch;
        let key = Key {
            table: self.tables[batch / TABLE_SLOTS],
            slot: (batch % TABLE_SLOTS) as u32,
        };
        Ok((key, index % self.per_batch * self.element_bytes))
    }

    /// How to write all of an element.
    pub(crate) fn intent(&self) -> Intent {
        if self.per_batch == 1 {
            Intent::Replace
        } else {
            Intent::Change
        }
    }

    /// Makes the array longer by elements of zeros.
    ///
    /// # Errors
    /// `TooMany`, `Full`, `MemoryLimit`, and what keeps memory from being had. The array is as before.
    pub(crate) fn grow(&mut self, core: &Core, len: usize) -> Result<(), Error> {
        let _together = core.together();
        let too_many = Error::TooMany {
            count: len,
            len_bytes: self.element_bytes,
        };
        if len.checked_mul(self.element_bytes).is_none() {
            return Err(too_many);
        }
        let batches = self.batches(len);
        let more = batches - self.batches(self.len);
        core.log.promise(more, self.stored_bytes())?;
        if let Err(error) = self.grow_tables(core, batches) {
            core.log.release(more, self.stored_bytes());
            self.shrink_tables(core);
            return Err(error);
        }
        self.len = len;
        self.note(core);
        Ok(())
    }

    /// Tells who makes checkpoints what the array is now.
    fn note(&mut self, core: &Core) {
        if let Some(saver) = &core.saver {
            let record = ArrayRecord {
                handle: self.handle,
                element_bytes: self.element_bytes as u32,
                len: self.len as u64,
                tables: Vec::new(),
            };
            self.handle = saver
                .handles
                .lock()
                .note_array(record, &self.tables, &core.budget);
        }
    }

    /// Its name in checkpoints.
    pub(crate) fn handle(&self, core: &Core) -> Result<u64, Error> {
        core.saver()?;
        Ok(self.handle)
    }

    /// The array of a name: a map's, or none of a map.
    pub(crate) fn open(
        core: &Core,
        handle: u64,
        element_bytes: usize,
        is_of_map: bool,
    ) -> Result<Self, Error> {
        let mut array = Self::nameless(element_bytes)?;
        let record = core.saver()?.handles.lock().open_array(handle, is_of_map);
        let record = record.map_err(|what| core.refused_handle(handle, what))?;
        if record.element_bytes as usize != element_bytes {
            core.saver()?.handles.lock().close(handle);
            return Err(core.refused_handle(handle, "an array of elements of another size"));
        }
        array.handle = handle;
        array.len = record.len as usize;
        array.last_slots = record.tables.last().map_or(0, |number| core.table_slots(*number));
        array.tables = record.tables;
        Ok(array)
    }

    /// Ends the use of the array, which stays.
    pub(crate) fn close(&mut self, core: &Core) {
        if let Some(saver) = &core.saver {
            saver.handles.lock().close(self.handle);
        }
        self.tables.clear();
        (self.handle, self.len, self.last_slots) = (0, 0, 0);
    }

    /// Drops all elements and the array's name.
    pub(crate) fn end(&mut self, core: &Core) {
        let _together = core.together();
        self.truncate(core, 0);
        if let Some(saver) = &core.saver
            && self.handle != 0
        {
            saver.handles.lock().end(self.handle, &core.budget);
        }
    }

    fn grow_tables(&mut self, core: &Core, batches: usize) -> Result<(), Error> {
        while self.slots() < batches {
            let missing = batches - self.slots();
            let last = self
                .tables
                .last()
                .copied()
                .filter(|_| self.last_slots < TABLE_SLOTS);
            match last {
                Some(number) => {
                    let slots = (self.last_slots * 2)
                        .max(self.last_slots + missing)
                        .min(TABLE_SLOTS);
                    core.grow_table(number, slots)?;
                    self.last_slots = slots;
                }
                None => {
                    let slots = missing.min(TABLE_SLOTS);
                    let mut pools = core.pools.lock();
                    let number = core.add_table(&mut pools, slots, self.stored_bytes())?;
                    self.tables.push(number);
                    self.last_slots = slots;
                }
            }
        }
        Ok(())
    }

    /// Makes the array shorter. No I/O.
    pub(crate) fn truncate(&mut self, core: &Core, len: usize) {
        if len >= self.len {
            return;
        }
        let _together = core.together();
        let (before, after) = (self.batches(self.len), self.batches(len));
        for batch in after..before {
            if let Ok((key, _)) = self.place(batch * self.per_batch) {
                core.drop_object(key);
            }
        }
        core.log.release(before - after, self.stored_bytes());
        self.len = len;
        self.shrink_tables(core);
        self.note(core);
    }

    /// Ends tables of which no slot is needed.
    fn shrink_tables(&mut self, core: &Core) {
        let needed = self.batches(self.len).div_ceil(TABLE_SLOTS);
        while self.tables.len() > needed {
            if let Some(number) = self.tables.pop() {
                core.drop_table(&mut core.pools.lock(), number);
            }
            self.last_slots = if self.tables.is_empty() { 0 } else { TABLE_SLOTS };
        }
    }
}

impl Core {
    pub(super) fn table_slots(&self, number: u32) -> usize {
        let (shard, at) = self.shard_of(number);
        let shard = shard.lock();
        let table = shard.tables.get(at).and_then(Option::as_ref);
        table.map_or(0, |table| table.slots())
    }

    fn grow_table(&self, number: u32, slots: usize) -> Result<(), Error> {
        let before = self.table_slots(number);
        let taken = self.take_memory(self.table_bytes(slots) - self.table_bytes(before))?;
        let (shard, at) = self.shard_of(number);
        let mut shard = shard.lock();
        let now = shard.now;
        if let Some(Some(table)) = shard.tables.get_mut(at) {
            table.grow(slots, &now);
            taken.keep();
            if let Some(saver) = &self.saver {
                saver
                    .tables
                    .lock()
                    .note(number, slots, table.len_bytes(), false, &self.budget);
            }
        }
        Ok(())
    }
}
