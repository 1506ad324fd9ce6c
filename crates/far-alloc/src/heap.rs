//! The allocator: objects from pools, arrays, and bytes in memory pages (sections 3.2.4 and 3.3).
//!
//! Owns which addresses are allocated. One lock guards that; no far memory is touched with it locked.

use crate::blocks::Blocks;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::pages::{ASIDE_PAGES, Pages, Stats, Tools};
use crate::ranges::{ADDRESS_MAX_BYTES, Range, Shape};
use crate::sys::{self, Marker, PAGE_BYTES, Region};
use crate::threads::Threads;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_far::Backend;
use varve_far::backend::SLAB_BYTES;
use varve_far_objects::{FarHeap, Reserved, SlotsHeap};

mod bytes;
mod checkpoint;
mod objects;

pub use checkpoint::RECORD_MAX_BYTES;

/// Memory of a thread beside its pages: the part of its stack that is used.
const THREAD_BYTES: u64 = 32 << 10;
/// A wait for another thread that still has a range.
const SHORTLY: Duration = Duration::from_micros(20);
/// The smallest page buffer.
const BUFFER_MIN_BYTES: u64 = 256 << 10;
/// Addresses for each byte of the store: objects of 128 bytes have a page each.
const ADDRESSES_PER_BYTE: u64 = (PAGE_BYTES / 128) as u64;

/// How a heap is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The object store and the limit of memory, for everything: pages, page tables and threads too.
    pub objects: varve_far_objects::Config,
    /// Most memory for pages that are in use, with their page tables; a quarter of the limit at most.
    pub page_buffer_bytes: u64,
    /// Threads that serve faults, 1 to 16: as many reads of the device are made at once.
    pub threads: usize,
    /// Addresses, in bytes; 0: 32 times the store, at most 8 TiB.
    pub address_bytes: u64,
    /// Where the addresses of a heap with checkpoints begin, a multiple of 2 MiB; 0: where there is room.
    pub start_address: u64,
}

impl Config {
    /// That much memory, and the seed's other values: a page buffer of 25 MiB.
    #[must_use]
    pub const fn new(memory_limit_bytes: u64) -> Self {
        Self {
            objects: varve_far_objects::Config::new(memory_limit_bytes),
            page_buffer_bytes: 25 << 20,
            threads: 2,
            address_bytes: 0,
            start_address: 0,
        }
    }

    fn buffer_pages(&self) -> Result<usize, Error> {
        let bytes = self.page_buffer_bytes.min(self.objects.memory_limit_bytes / 4);
        if bytes < BUFFER_MIN_BYTES {
            return Err(Error::Config(format!(
                "a page buffer of {bytes} bytes is too small: {BUFFER_MIN_BYTES} is the least, and the \
                 limit of memory four times that"
            )));
        }
        if !(1..=16).contains(&self.threads) {
            return Err(Error::Config(format!("{} threads, not 1 to 16", self.threads)));
        }
        Ok(bytes as usize / PAGE_BYTES)
    }

    fn address_bytes(&self, slabs: u32) -> u64 {
        let store = u64::from(slabs) * SLAB_BYTES as u64;
        let wanted = match self.address_bytes {
            0 => store * ADDRESSES_PER_BYTE,
            wanted => wanted,
        };
        wanted.clamp(1 << 30, ADDRESS_MAX_BYTES).next_multiple_of(1 << 21)
    }
}

/// Objects of one shape.
#[derive(Debug, Default)]
struct Pool {
    tables: Vec<PoolTable>,
    current: usize,
    objects: usize,
}

/// A range of a pool.
#[derive(Debug)]
struct PoolTable {
    range: Arc<Range>,
    free: usize,
    /// No object before this one is free.
    hint: usize,
}

/// A range of memory pages.
#[derive(Debug)]
struct PageRange {
    range: Arc<Range>,
    blocks: Blocks,
}

/// Which addresses are allocated.
#[derive(Debug)]
struct Allocated {
    /// Pages of addresses.
    addresses: Blocks,
    pools: HashMap<Shape, Pool>,
    /// By the first page.
    bytes: HashMap<u64, PageRange>,
    /// Arrays by `oalloc`, by the first page.
    arrays: HashMap<u64, Arc<Range>>,
    records: Reserved,
    /// Memory of ranges, and of the blocks of memory pages.
    ranges_bytes: u64,
    blocks_bytes: u64,
    /// Of a heap with checkpoints.
    saving: Option<checkpoint::Records>,
}

impl Allocated {
    /// Has memory counted for the records that come next.
    fn make_records(&mut self) -> Result<(), Error> {
        const STEP_BYTES: u64 = 4096;
        /// What one allocation adds at most.
        const NEXT_BYTES: u64 = 512;
        let used = self.ranges_bytes + self.blocks_bytes + self.addresses.memory_bytes();
        let has = self.records.bytes();
        if used + NEXT_BYTES > has || has > used + 4 * STEP_BYTES {
            self.records.resize(used + STEP_BYTES)?;
        }
        Ok(())
    }
}

/// What the heap's parts share.
#[derive(Debug)]
struct Core {
    heap: SlotsHeap,
    pages: Arc<Pages>,
    allocated: Mutex<Allocated>,
    tools: Mutex<Tools>,
    saver: Option<checkpoint::Saver>,
    _fixed: Reserved,
}

/// A heap of far memory with addresses. Everything allocated ends when it is dropped: touching it then is
/// SIGSEGV, or SIGBUS for who does it meanwhile.
///
/// ```
/// use varve_far::Dram;
/// use varve_far_alloc::{Config, FarAlloc};
///
/// let heap = match FarAlloc::new(Dram::new(16), &Config::new(8 << 20)) {
///     Ok(heap) => heap,
///     // Without root, `/dev/userfaultfd` may be closed.
///     Err(error) => {
///         println!("{error}");
///         return Ok(());
///     }
/// };
/// let counters = heap.oalloc(1000, 128)?;
/// // Objects of an array are a page apart.
/// let seventh = unsafe { counters.as_ptr().add(7 * 4096).cast::<u64>() };
/// unsafe { *seventh += 1 };
/// assert_eq!(unsafe { *seventh }, 1);
/// heap.free(counters)?;
/// # Ok::<(), varve_far_alloc::Error>(())
/// ```
#[derive(Debug)]
pub struct FarAlloc {
    core: Option<Core>,
    threads: Option<Threads>,
    marker: Marker,
}

impl FarAlloc {
    /// A heap over an empty backend.
    ///
    /// # Errors
    /// `Userfault` where the kernel or this process's rights do not suffice; `System`, `Config`, `Objects`.
    pub fn new(backend: impl Backend + 'static, config: &Config) -> Result<Self, Error> {
        config.buffer_pages()?;
        let system = |what| move |error| Error::System { what, error };
        let address_bytes = config.address_bytes(backend.capacity_slabs());
        let memory = Region::new(address_bytes as usize).map_err(system("addresses"))?;
        let heap = SlotsHeap::new(FarHeap::new(backend, &config.objects)?)?;
        Self::build(heap, memory, false, config)
    }

    /// A heap over the objects, at these addresses.
    fn build(heap: SlotsHeap, memory: Region, has_checkpoints: bool, config: &Config) -> Result<Self, Error> {
        let buffer_pages = config.buffer_pages()?;
        let system = |what| move |error| Error::System { what, error };
        let marker = Marker::new().map_err(system("memory"))?;
        let address_bytes = memory.len_bytes();
        // Handlers, who makes room, and callers that pin; who allocates and who makes checkpoints.
        let callers = config.threads + 1;
        let threads = callers + if has_checkpoints { 3 } else { 1 };
        let per_thread = THREAD_BYTES + ((ASIDE_PAGES + 1) * PAGE_BYTES) as u64;
        let fixed = (buffer_pages * PAGE_BYTES) as u64
            + Buffer::memory_bytes(buffer_pages)
            + threads as u64 * per_thread;
        let fixed = heap.reserve(fixed)?;
        let tables = match sys::frees_page_tables() {
            true => None,
            false => Some(heap.reserve(0)?),
        };
        let pages = Arc::new(Pages::new(memory, buffer_pages, threads, tables)?);
        pages.epoch.store(heap.epoch(), Ordering::Relaxed);
        let allocated = Allocated {
            addresses: Blocks::new((address_bytes / PAGE_BYTES as u64) as u32),
            pools: HashMap::new(),
            bytes: HashMap::new(),
            arrays: HashMap::new(),
            records: heap.reserve(0)?,
            ranges_bytes: 0,
            blocks_bytes: 0,
            saving: has_checkpoints.then(|| checkpoint::Records::new(pages.tools(callers + 1))),
        };
        let tools = Mutex::new(pages.tools(callers));
        let saver = has_checkpoints.then(|| checkpoint::Saver::new(pages.tools(callers + 2)));
        let threads = Threads::start(&pages, config.threads)?;
        Ok(Self {
            core: Some(Core {
                heap,
                pages,
                allocated: Mutex::new(allocated),
                tools,
                saver,
                _fixed: fixed,
            }),
            threads: Some(threads),
            marker,
        })
    }

    fn core(&self) -> Result<&Core, Error> {
        let core = self.core.as_ref().filter(|_| self.marker.is_here());
        core.ok_or(Error::Forked)
    }

    /// Memory for `count` objects of `size_bytes` zeros, each at the beginning of pages of its own: the next
    /// one is [`Self::stride_bytes`] further. One object comes from a pool.
    ///
    /// # Errors
    /// `ZeroSize`, `TooMany`, `Addresses`, `Forked`; `Objects` where the store is full, or memory.
    pub fn oalloc(&self, count: usize, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        pointer(self.core()?.oalloc(count, size_bytes)?)
    }

    /// Distance of the objects of an array by [`Self::oalloc`].
    #[must_use]
    pub fn stride_bytes(size_bytes: usize) -> usize {
        size_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Memory of `size_bytes`, aligned to 16, in pages that are stored as a whole (the seed's memory pages).
    /// Holds any bytes.
    ///
    /// # Errors
    /// As [`Self::oalloc`].
    pub fn malloc(&self, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        pointer(self.core()?.malloc(size_bytes)?.start)
    }

    /// As [`Self::malloc`], of zeros.
    ///
    /// # Errors
    /// As [`Self::oalloc`]; `TooMany` where the product overflows; what keeps a page from being read that
    /// others share.
    pub fn calloc(&self, count: usize, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        let bytes = count.checked_mul(size_bytes);
        let bytes = bytes.ok_or(Error::TooMany { count, size_bytes })?;
        pointer(self.core()?.calloc(bytes)?)
    }

    /// Makes memory of [`Self::malloc`] larger or smaller, where it is if it can be. What is new holds any
    /// bytes.
    ///
    /// # Errors
    /// As [`Self::malloc`]; `NotAllocated`, `FixedSize`; what keeps its pages from being read. It is as
    /// before then.
    pub fn realloc(&self, pointer_to: NonNull<u8>, size_bytes: usize) -> Result<NonNull<u8>, Error> {
        pointer(self.core()?.realloc(address_of(pointer_to), size_bytes)?)
    }

    /// Frees what begins there. Who still touches it gets SIGBUS, or bytes of what comes there next.
    ///
    /// # Errors
    /// `NotAllocated`, also where it was freed already; `Forked`.
    pub fn free(&self, pointer_to: NonNull<u8>) -> Result<(), Error> {
        self.core()?.free(address_of(pointer_to))
    }

    /// Brings the pages of a range and keeps them in memory, until [`Self::unpin`]. Pins count.
    ///
    /// # Errors
    /// `NotAllocated` where a page of it is not; `PageBuffer` beyond a quarter of the buffer's pages; what
    /// keeps a page from being read. Nothing is pinned then.
    pub fn pin(&self, pointer_to: NonNull<u8>, len_bytes: usize) -> Result<(), Error> {
        self.core()?.pin(address_of(pointer_to), len_bytes)
    }

    /// Ends [`Self::pin`] of the same range.
    ///
    /// # Errors
    /// `NotAllocated` where a page of it has no pin; the others lose theirs.
    pub fn unpin(&self, pointer_to: NonNull<u8>, len_bytes: usize) -> Result<(), Error> {
        self.core()?.unpin(address_of(pointer_to), len_bytes)
    }

    /// Lets all pages out that no pin holds.
    ///
    /// # Errors
    /// What keeps an object from being stored; it stays.
    pub fn flush(&self) -> Result<(), Error> {
        let core = self.core()?;
        core.pages.flush(&mut core.tools.lock())
    }

    /// What was done with pages.
    ///
    /// # Errors
    /// `Forked`.
    pub fn stats(&self) -> Result<Stats, Error> {
        Ok(self.core()?.pages.stats())
    }

    /// The objects below: memory, store, cache.
    ///
    /// # Errors
    /// `Forked`.
    pub fn objects(&self) -> Result<&FarHeap, Error> {
        Ok(&self.core()?.heap)
    }

    /// Why touching a page became SIGBUS the last time, if that was not for a wrong address.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        self.core().ok()?.pages.last_error()
    }
}

impl Drop for FarAlloc {
    fn drop(&mut self) {
        let (core, threads) = (self.core.take(), self.threads.take());
        if !self.marker.is_here() {
            // A child of fork has neither the threads nor the memory, and locks may be held by nobody.
            std::mem::forget((core, threads));
            return;
        }
        if let (Some(core), Some(mut threads)) = (core, threads) {
            threads.stop(&core.pages);
            // Touching it is SIGSEGV from here on. Who waits is woken when the userfaultfd is closed. If
            // there is no memory for that, it is SIGSEGV when the addresses are unmapped.
            let _ = core.pages.memory.close();
        }
    }
}

impl Core {
    /// Makes a range of addresses.
    fn add_range(
        &self,
        allocated: &mut Allocated,
        objects: usize,
        shape: Shape,
        len_bytes: Option<usize>,
    ) -> Result<Arc<Range>, Error> {
        let of_pages = self.pages.memory.len_bytes() / PAGE_BYTES as u64;
        let pages = objects as u64 * shape.stride_pages();
        let taken = u32::try_from(pages)
            .ok()
            .and_then(|pages| allocated.addresses.take(pages));
        let at = taken.ok_or(Error::Addresses { pages, of_pages })?;
        let first_page = self.pages.memory.start() / PAGE_BYTES as u64 + u64::from(at);
        match Range::new(&self.heap, first_page, objects, shape, len_bytes) {
            Ok(range) => {
                let range = Arc::new(range);
                allocated.ranges_bytes += range.memory_bytes();
                allocated.note_new(&range);
                Ok(range)
            }
            Err(error) => {
                allocated.addresses.give_back(at);
                Err(error)
            }
        }
    }

    /// Lets faults find a range.
    fn publish(&self, range: &Arc<Range>) {
        self.pages.ranges.add(Arc::clone(range));
        // Touches before this were SIGBUS, and may be so for a while.
        self.pages
            .discard(range.first_page()..range.first_page() + range.pages());
    }

    /// Ends a range: its objects, pages and addresses. The caller has its last handle but for threads that
    /// still read or store.
    fn end_range(&self, allocated: &mut Allocated, range: &Arc<Range>) {
        self.pages.ranges.remove(range);
        allocated.note_end(range);
        self.pages
            .discard(range.first_page()..range.first_page() + range.pages());
        allocated.ranges_bytes -= range.memory_bytes();
        let at = range.first_page() - self.pages.memory.start() / PAGE_BYTES as u64;
        allocated.addresses.give_back(at as u32);
        // Its tables end with it, in this call and so on one side of a cut.
        while Arc::strong_count(range) > 1 {
            std::thread::sleep(SHORTLY);
        }
    }

    /// Ends an object of a range.
    fn end_object(&self, range: &Range, object: usize) {
        // Nothing stores it any more after this.
        self.pages.discard(range.pages_of(object));
        range.vacate(object);
        // A thread that still used it may have brought it again.
        self.pages.discard(range.pages_of(object));
    }

    fn free(&self, address: u64) -> Result<(), Error> {
        let _together = self.heap.together();
        let wrong = Error::NotAllocated(address as usize);
        let mut allocated = self.allocated.lock();
        let Some(range) = self.pages.ranges.get(address / PAGE_BYTES as u64) else {
            return Err(wrong);
        };
        if range.shape() == Shape::Pages {
            return self.free_bytes(&mut allocated, &range, address);
        }
        let object = range.object_at(address).ok_or(wrong)?;
        self.free_objects(&mut allocated, &range, object, address)
    }

    fn pin(&self, address: u64, len_bytes: usize) -> Result<(), Error> {
        let pages = pages_of(address, len_bytes)?;
        let mut tools = self.tools.lock();
        for page in pages.clone() {
            if let Err(error) = self.pages.pin(page, &mut tools) {
                for pinned in pages.start..page {
                    self.pages.unpin(pinned);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn unpin(&self, address: u64, len_bytes: usize) -> Result<(), Error> {
        let mut wrong = None;
        for page in pages_of(address, len_bytes)? {
            if !self.pages.unpin(page) {
                wrong.get_or_insert(page);
            }
        }
        wrong.map_or(Ok(()), |page| {
            Err(Error::NotAllocated(page as usize * PAGE_BYTES))
        })
    }
}

fn pages_of(address: u64, len_bytes: usize) -> Result<std::ops::Range<u64>, Error> {
    let end = address.checked_add(len_bytes as u64);
    let end = end.ok_or(Error::NotAllocated(address as usize))?;
    Ok(address / PAGE_BYTES as u64..end.div_ceil(PAGE_BYTES as u64))
}

fn address_of(pointer: NonNull<u8>) -> u64 {
    pointer.addr().get() as u64
}

fn pointer(address: u64) -> Result<NonNull<u8>, Error> {
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    NonNull::new(pointer).ok_or(Error::NotAllocated(0))
}
