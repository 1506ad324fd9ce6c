//! Memory of `malloc`: bytes in pages that are stored as a whole, coalesced by 16 bytes.

use super::{Allocated, Core, PageRange};
use crate::blocks::{Blocks, Freed};
use crate::error::Error;
use crate::ranges::{Range, Shape};
use crate::sys::{self, PAGE_BYTES};
use std::ops::Range as Span;
use std::sync::Arc;

/// Alignment, and what sizes are rounded to.
const UNIT_BYTES: usize = 16;
const PAGE_UNITS: u32 = (PAGE_BYTES / UNIT_BYTES) as u32;
/// Pages of a range: addresses only, until they are allocated.
const RANGE_PAGES: usize = 10_000;
/// Bytes that `realloc` moves with no cut in between.
const TOGETHER_BYTES: usize = 1 << 20;

/// An allocation that was made.
pub(super) struct Block {
    pub(super) start: u64,
    /// Parts on pages that others share: not zeros.
    shared: Vec<Span<u64>>,
}

/// Pages that units lie on.
fn pages(units: &Span<u32>) -> Span<u32> {
    units.start / PAGE_UNITS..units.end.div_ceil(PAGE_UNITS)
}

/// Pages of addresses that units of a range lie on.
fn on_pages(range: &Range, units: &Span<u32>) -> Span<u64> {
    let pages = pages(units);
    range.first_page() + u64::from(pages.start)..range.first_page() + u64::from(pages.end)
}

fn units_of(size_bytes: usize) -> Result<u32, Error> {
    if size_bytes == 0 {
        return Err(Error::ZeroSize);
    }
    u32::try_from(size_bytes.div_ceil(UNIT_BYTES)).map_err(|_| Error::TooMany { count: 1, size_bytes })
}

/// Units of so many pages.
pub(super) fn units_of_pages(pages: u64) -> u32 {
    u32::try_from(pages)
        .unwrap_or(u32::MAX)
        .saturating_mul(PAGE_UNITS)
}

impl PageRange {
    /// Memory pages of a checkpoint, with these blocks. `None` where they overlap or a page is not there.
    pub(super) fn restored(range: Arc<Range>, used: &[(u32, u32)]) -> Option<Self> {
        let units = units_of_pages(range.pages());
        let blocks = Blocks::restored(units, used.iter().copied())?;
        let is_there = |(start, len): &(u32, u32)| {
            let mut pages = on_pages(&range, &(*start..start + len));
            pages.all(|page| range.is_stored(page))
        };
        used.iter().all(is_there).then(|| Self {
            range: Arc::clone(&range),
            blocks,
        })
    }

    fn address(&self, unit: u32) -> u64 {
        self.range.first_page() * PAGE_BYTES as u64 + u64::from(unit) * UNIT_BYTES as u64
    }

    /// Unit of an address, if one begins there.
    fn unit(&self, address: u64) -> Option<u32> {
        let relative = address - self.range.first_page() * PAGE_BYTES as u64;
        let is_start = relative.is_multiple_of(UNIT_BYTES as u64);
        is_start.then_some((relative / UNIT_BYTES as u64) as u32)
    }
}

impl Core {
    pub(super) fn malloc(&self, size_bytes: usize) -> Result<Block, Error> {
        let units = units_of(size_bytes)?;
        let _together = self.heap.together();
        let mut allocated = self.allocated.lock();
        allocated.make_records()?;
        let (first, unit, before) = match self.take_block(&mut allocated, units) {
            Some(found) => found,
            None => self.add_pages(&mut allocated, units)?,
        };
        let Some(range) = allocated.bytes.get_mut(&first) else {
            return Err(Error::NotAllocated(0));
        };
        let block = unit..unit + units;
        let occupied = self.occupy(&range.range, &block, pages(&block));
        let start = range.address(unit);
        let after = range.blocks.memory_bytes();
        allocated.blocks_bytes = allocated.blocks_bytes + after - before;
        let shared = match occupied {
            Ok(shared) => shared,
            Err(error) => {
                if let Some(range) = self.pages.ranges.get(first) {
                    self.free_bytes(&mut allocated, &range, start)?;
                }
                return Err(error);
            }
        };
        let shared = shared
            .into_iter()
            .map(|units| {
                let at = |unit: u32| start + u64::from(unit - block.start) * UNIT_BYTES as u64;
                at(units.start)..at(units.end)
            })
            .collect();
        Ok(Block { start, shared })
    }

    /// Takes a block of a range that there is. Gives the range's first page, the block, and what its records
    /// took before.
    fn take_block(&self, allocated: &mut Allocated, units: u32) -> Option<(u64, u32, u64)> {
        let mut all = allocated.bytes.iter();
        let (first, range) = all.find(|(_, range)| range.blocks.has_room(units))?;
        let (first, range) = (*first, Arc::clone(&range.range));
        allocated.before_change(self, &range, first..first);
        let range = allocated.bytes.get_mut(&first)?;
        let before = range.blocks.memory_bytes();
        Some((first, range.blocks.take(units)?, before))
    }

    /// Makes a range with a block of so many units. Gives its first page, the block, and what its records
    /// took before.
    fn add_pages(&self, allocated: &mut Allocated, units: u32) -> Result<(u64, u32, u64), Error> {
        let needed = units.div_ceil(PAGE_UNITS) as usize;
        // Where addresses or memory for tables are short, no more than is needed.
        let range = match self.add_range(allocated, needed.max(RANGE_PAGES), Shape::Pages, None) {
            Err(_) => self.add_range(allocated, needed, Shape::Pages, None)?,
            Ok(range) => range,
        };
        let mut blocks = Blocks::new((range.pages() as u32).saturating_mul(PAGE_UNITS));
        let unit = blocks.take(units).unwrap_or_default();
        self.publish(&range);
        let first = range.first_page();
        allocated.bytes.insert(first, PageRange { range, blocks });
        Ok((first, unit, 0))
    }

    /// Has the pages of a block promised. Gives the parts of it that lie on pages that others have already.
    fn occupy(&self, range: &Range, block: &Span<u32>, pages: Span<u32>) -> Result<Vec<Span<u32>>, Error> {
        let mut shared = Vec::new();
        let mut new = Vec::new();
        for page in pages.clone() {
            match range.occupy(page as usize, PAGE_BYTES) {
                Ok(true) if page == pages.start || page + 1 == pages.end => new.push(page),
                Ok(true) => {}
                Ok(false) => {
                    let start = (page * PAGE_UNITS).max(block.start);
                    shared.push(start..((page + 1) * PAGE_UNITS).min(block.end));
                }
                Err(error) => {
                    for before in pages.start..page {
                        let mut shared = shared.iter();
                        if !shared.any(|units: &Span<u32>| units.start / PAGE_UNITS == before) {
                            self.end_object(range, before as usize);
                        }
                    }
                    return Err(error);
                }
            }
        }
        let first = range.first_page();
        // Touches before this were SIGBUS, and may be so for a while.
        for page in new {
            self.pages
                .discard(first + u64::from(page)..first + u64::from(page) + 1);
        }
        if pages.len() > 2 {
            self.pages
                .discard(first + u64::from(pages.start) + 1..first + u64::from(pages.end) - 1);
        }
        Ok(shared)
    }

    pub(super) fn calloc(&self, size_bytes: usize) -> Result<u64, Error> {
        let _together = self.heap.together();
        let block = self.malloc(size_bytes)?;
        for part in &block.shared {
            let len = (part.end - part.start) as usize;
            // Kept, so that a page that cannot be read is an error here and no signal.
            if let Err(error) = self.pin(part.start, len) {
                self.free(block.start)?;
                return Err(error);
            }
            sys::zero_bytes(part.start, len);
            self.unpin(part.start, len)?;
        }
        Ok(block.start)
    }

    /// Frees a block of memory pages.
    pub(super) fn free_bytes(
        &self,
        allocated: &mut Allocated,
        range: &Arc<Range>,
        address: u64,
    ) -> Result<(), Error> {
        let wrong = Error::NotAllocated(address as usize);
        // One of the usual size is kept.
        let is_kept = allocated.bytes.len() == 1 && range.objects() <= RANGE_PAGES;
        let block = allocated.bytes.get(&range.first_page()).and_then(|all| {
            let unit = all.unit(address)?;
            Some(unit..unit + all.blocks.len_of(unit)?)
        });
        let block = block.ok_or(wrong)?;
        allocated.before_change(self, range, on_pages(range, &block));
        let Some(all) = allocated.bytes.get_mut(&range.first_page()) else {
            return Err(Error::NotAllocated(address as usize));
        };
        let unit = block.start;
        let before = all.blocks.memory_bytes();
        let freed = all.blocks.give_back(unit);
        let freed = freed.ok_or(Error::NotAllocated(address as usize))?;
        let (after, is_empty) = (all.blocks.memory_bytes(), all.blocks.is_empty());
        if is_empty && !is_kept {
            allocated.bytes.remove(&range.first_page());
            allocated.blocks_bytes -= before;
            self.end_range(allocated, range);
            return Ok(());
        }
        allocated.blocks_bytes = allocated.blocks_bytes + after - before;
        self.end_pages(range, &freed);
        Ok(())
    }

    /// Ends pages that nobody has any more.
    fn end_pages(&self, range: &Range, freed: &Freed) {
        let touched = pages(&freed.block);
        let whole = freed.around.start.div_ceil(PAGE_UNITS)..freed.around.end / PAGE_UNITS;
        for page in touched.start.max(whole.start)..touched.end.min(whole.end) {
            self.end_object(range, page as usize);
        }
    }

    pub(super) fn realloc(&self, address: u64, size_bytes: usize) -> Result<u64, Error> {
        let units = units_of(size_bytes)?;
        // A larger copy would keep checkpoints away for long: a checkpoint of its middle has both blocks.
        let _together = (size_bytes <= TOGETHER_BYTES).then(|| self.heap.together());
        let before = match self.resize(address, units)? {
            None => return Ok(address),
            Some(before) => before as usize * UNIT_BYTES,
        };
        let block = self.malloc(size_bytes)?;
        if let Err(error) = self.copy(address, block.start, before.min(size_bytes)) {
            self.free(block.start)?;
            return Err(error);
        }
        self.free(address)?;
        Ok(block.start)
    }

    /// Makes a block larger or smaller where it is. Gives its units if it must go elsewhere.
    fn resize(&self, address: u64, units: u32) -> Result<Option<u32>, Error> {
        let _together = self.heap.together();
        let mut allocated = self.allocated.lock();
        allocated.make_records()?;
        let wrong = || Error::NotAllocated(address as usize);
        let range = self
            .pages
            .ranges
            .get(address / PAGE_BYTES as u64)
            .ok_or_else(wrong)?;
        if range.shape() != Shape::Pages {
            let object = range.object_at(address).filter(|object| range.is_used(*object));
            return Err(object.map_or_else(wrong, |_| Error::FixedSize(address as usize)));
        }
        let all = allocated.bytes.get(&range.first_page()).ok_or_else(wrong)?;
        let unit = all.unit(address).ok_or_else(wrong)?;
        let len = all.blocks.len_of(unit).ok_or_else(wrong)?;
        let ends = unit + units.min(len)..unit + len;
        allocated.before_change(self, &range, on_pages(&range, &ends));
        let all = allocated.bytes.get_mut(&range.first_page()).ok_or_else(wrong)?;
        let records = all.blocks.memory_bytes();
        let mut outcome = Ok(None);
        if units < len {
            if let Some(freed) = all.blocks.shrink(unit, units) {
                self.end_pages(&range, &freed);
            }
        } else if units > len {
            if all.blocks.grow(unit, units) {
                let more = unit + len..unit + units;
                if let Err(error) = self.occupy(&range, &more, pages(&more)) {
                    all.blocks.shrink(unit, len);
                    outcome = Err(error);
                }
            } else {
                outcome = Ok(Some(len));
            }
        }
        let after = all.blocks.memory_bytes();
        allocated.blocks_bytes = allocated.blocks_bytes + after - records;
        outcome
    }

    /// Copies bytes from one block to another, by pieces that lie on one page each.
    fn copy(&self, from: u64, to: u64, len_bytes: usize) -> Result<(), Error> {
        let left = |address: u64| PAGE_BYTES - address as usize % PAGE_BYTES;
        let mut done = 0;
        while done < len_bytes {
            let (from, to) = (from + done as u64, to + done as u64);
            let len = left(from).min(left(to)).min(len_bytes - done);
            self.pin(from, len)?;
            if let Err(error) = self.pin(to, len) {
                self.unpin(from, len)?;
                return Err(error);
            }
            sys::move_bytes(from, to, len);
            self.unpin(to, len)?;
            self.unpin(from, len)?;
            done += len;
        }
        Ok(())
    }
}
