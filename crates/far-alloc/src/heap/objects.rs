//! Objects of `oalloc`: single ones from pools, arrays in ranges of their own.

use super::{Allocated, Core, Pool, PoolTable};
use crate::error::Error;
use crate::ranges::{Range, Shape};
use crate::sys::PAGE_BYTES;
use std::sync::Arc;

/// Objects of a pool's first table.
const FIRST_OBJECTS: usize = 128;
/// Objects of a pool up to which each table doubles it; from then on, each table has so many.
const DOUBLING_OBJECTS: usize = 10_000;
/// Larger objects have a range of their own.
const POOL_MAX_BYTES: usize = 16 << 10;

impl Pool {
    /// The table with a free object that is used next, if there is one.
    fn table(&mut self) -> Option<&mut PoolTable> {
        if self.tables.get(self.current).is_none_or(|table| table.free == 0) {
            let tables = self.tables.iter().enumerate();
            self.current = tables.max_by_key(|(_, table)| table.free)?.0;
        }
        self.tables.get_mut(self.current).filter(|table| table.free > 0)
    }
}

impl PoolTable {
    fn find(&mut self) -> Option<usize> {
        self.hint = (self.hint..self.range.objects()).find(|object| !self.range.is_used(*object))?;
        Some(self.hint)
    }
}

impl Core {
    pub(super) fn oalloc(&self, count: usize, size_bytes: usize) -> Result<u64, Error> {
        if count == 0 || size_bytes == 0 {
            return Err(Error::ZeroSize);
        }
        let rounded = size_bytes.checked_next_multiple_of(PAGE_BYTES);
        if rounded.and_then(|bytes| bytes.checked_mul(count)).is_none() {
            return Err(Error::TooMany { count, size_bytes });
        }
        if count == 1 && size_bytes <= POOL_MAX_BYTES {
            self.oalloc_one(size_bytes)
        } else {
            self.oalloc_array(count, size_bytes)
        }
    }

    fn oalloc_one(&self, size_bytes: usize) -> Result<u64, Error> {
        let shape = Shape::of(size_bytes);
        let _together = self.heap.together();
        let mut allocated = self.allocated.lock();
        allocated.make_records()?;
        let (range, object) = self.take_object(&mut allocated, shape)?;
        allocated.before_change(self, &range, range.pages_of(object));
        let is_zero = range.occupy(object, size_bytes)?;
        if let Some(table) = allocated.pools.get_mut(&shape).and_then(Pool::table) {
            table.free -= 1;
        }
        drop(allocated);
        let pages = range.pages_of(object);
        // Touches before this were SIGBUS, and may be so for a while.
        self.pages.discard(pages.clone());
        let address = pages.start * PAGE_BYTES as u64;
        let mut all = pages.clone();
        if !is_zero && let Err(error) = all.try_for_each(|page| range.write(page, &[0; PAGE_BYTES])) {
            // Freeing the last one of a range waits until nobody else has that.
            drop(range);
            self.free(address)?;
            return Err(error);
        }
        Ok(address)
    }

    /// A free object of a pool.
    fn take_object(&self, allocated: &mut Allocated, shape: Shape) -> Result<(Arc<Range>, usize), Error> {
        loop {
            let pool = allocated.pools.entry(shape).or_default();
            let objects = pool.objects.clamp(FIRST_OBJECTS, DOUBLING_OBJECTS);
            if let Some(table) = pool.table() {
                if let Some(object) = table.find() {
                    return Ok((Arc::clone(&table.range), object));
                }
                table.hint = 0;
                continue;
            }
            let range = self.add_range(allocated, objects, shape, None)?;
            self.publish(&range);
            let pool = allocated.pools.entry(shape).or_default();
            pool.objects += objects;
            pool.current = pool.tables.len();
            pool.tables.push(PoolTable {
                range,
                free: objects,
                hint: 0,
            });
        }
    }

    fn oalloc_array(&self, count: usize, size_bytes: usize) -> Result<u64, Error> {
        let shape = Shape::of(size_bytes);
        if size_bytes.div_ceil(PAGE_BYTES) as u64 > u64::from(u32::MAX) {
            return Err(Error::TooMany { count, size_bytes });
        }
        let _together = self.heap.together();
        let mut allocated = self.allocated.lock();
        allocated.make_records()?;
        let len_bytes = shape.stored_bytes(size_bytes).next();
        let range = self.add_range(&mut allocated, count, shape, len_bytes)?;
        for object in 0..count {
            if let Err(error) = range.occupy(object, size_bytes) {
                self.end_range(&mut allocated, &range);
                return Err(error);
            }
        }
        self.publish(&range);
        let first_page = range.first_page();
        allocated.arrays.insert(first_page, range);
        Ok(first_page * PAGE_BYTES as u64)
    }

    pub(super) fn free_objects(
        &self,
        allocated: &mut Allocated,
        range: &Arc<Range>,
        object: usize,
        address: u64,
    ) -> Result<(), Error> {
        let wrong = Error::NotAllocated(address as usize);
        if allocated.arrays.contains_key(&range.first_page()) {
            if object != 0 {
                return Err(wrong);
            }
            let pages = range.first_page()..range.first_page() + range.pages();
            allocated.before_change(self, range, pages);
            allocated.arrays.remove(&range.first_page());
            self.end_range(allocated, range);
            return Ok(());
        }
        if !range.is_used(object) {
            return Err(wrong);
        }
        allocated.before_change(self, range, range.pages_of(object));
        self.end_object(range, object);
        let Some(pool) = allocated.pools.get_mut(&range.shape()) else {
            return Err(wrong);
        };
        let same = |table: &PoolTable| Arc::ptr_eq(&table.range, range);
        let Some(at) = pool.tables.iter().position(same) else {
            return Err(wrong);
        };
        let table = &mut pool.tables[at];
        table.free += 1;
        table.hint = table.hint.min(object);
        if table.free == range.objects() && pool.tables.len() > 1 {
            pool.objects -= range.objects();
            pool.tables.swap_remove(at);
            pool.current = 0;
            self.end_range(allocated, range);
        }
        Ok(())
    }
}
