//! Checkpoints of a heap in a file, and heaps that are restored from them.
//!
//! Owns which records of ranges a checkpoint has not yet. A record is saved before it changes, as pages are:
//! the cut itself copies none.

use super::{Allocated, Config, Core, FarAlloc, PageRange, Pool, PoolTable, bytes};
use crate::blocks::Blocks;
use crate::error::Error;
use crate::notes::{self, HEAD_BYTES, Kind, Note};
use crate::pages::Tools;
use crate::ranges::{Range, Shape};
use crate::sys::{CHUNK_PAGES, PAGE_BYTES, Region, mappings};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range as Span;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_far_objects::{
    CheckpointFile, Checkpointed, Error as StoreError, FarHeap, RestoredSlots, SlotsOut, SlotsOwner,
    SlotsRecord, Together,
};

/// Bytes that a program may put into a checkpoint.
pub const RECORD_MAX_BYTES: usize = varve_far_objects::RECORD_MAX_BYTES - HEAD_BYTES;
/// Where addresses of heaps in files are chosen: far from what programs, libraries and stacks have.
const ADDRESSES: Span<u64> = 0x2000_0000_0000..0x5000_0000_0000;
/// Addresses that are tried.
const TRIES: u64 = 64;
const CHUNK_BYTES: u64 = CHUNK_PAGES * PAGE_BYTES as u64;

/// What checkpoints need of the records.
#[derive(Debug)]
pub(super) struct Records {
    tools: Tools,
    /// First pages of ranges that changed since the last cut.
    touched: HashSet<u64>,
    /// Of those that the running checkpoint has to tell of, all and the rest.
    of_cut: HashSet<u64>,
    pending: HashSet<u64>,
    /// Records that changed before it came to them, as they were.
    saved: Vec<Result<SlotsRecord, Error>>,
}

/// What makes checkpoints of a heap.
#[derive(Debug)]
pub(super) struct Saver {
    tools: Mutex<Tools>,
}

impl Records {
    pub(super) fn new(tools: Tools) -> Self {
        Self {
            tools,
            touched: HashSet::new(),
            of_cut: HashSet::new(),
            pending: HashSet::new(),
            saved: Vec::new(),
        }
    }
}

impl Saver {
    pub(super) fn new(tools: Tools) -> Self {
        Self {
            tools: Mutex::new(tools),
        }
    }
}

impl Allocated {
    /// What a checkpoint is to have of a range; `None` if there is none.
    fn record(&self, core: &Core, first_page: u64) -> Option<Result<SlotsRecord, Error>> {
        let range = core.pages.ranges.get_first(first_page)?;
        let bytes = self.bytes.get(&first_page);
        let kind = match bytes {
            Some(_) => Kind::Bytes,
            None if self.arrays.contains_key(&first_page) => Kind::Array,
            None => Kind::Pool,
        };
        let note = Note {
            first_page: (first_page - core.pages.memory.start() / PAGE_BYTES as u64) as u32,
            kind,
            shape: range.shape(),
            objects: range.objects() as u64,
            used: range.used().filter(|_| kind == Kind::Pool),
            blocks: bytes.map_or_else(Vec::new, |bytes| bytes.blocks.used().collect()),
        };
        Some(range.record(note.to_bytes()))
    }

    /// Notes that a range is new.
    pub(super) fn note_new(&mut self, range: &Range) {
        if let Some(records) = &mut self.saving {
            records.touched.insert(range.first_page());
        }
    }

    /// Notes that a range is no more.
    pub(super) fn note_end(&mut self, range: &Range) {
        if let Some(records) = &mut self.saving {
            records.touched.remove(&range.first_page());
            // If the running checkpoint fails, the next one tells of what is there then.
            records.of_cut.remove(&range.first_page());
        }
    }

    /// To be called before the records of a range change, or objects on these pages end: the running
    /// checkpoint gets them first.
    pub(super) fn before_change(&mut self, core: &Core, range: &Range, pages: Span<u64>) {
        let first = range.first_page();
        let Some(records) = &mut self.saving else { return };
        core.pages.save_span(range.batches_of(pages), &mut records.tools);
        records.touched.insert(first);
        if records.pending.remove(&first)
            && let Some(record) = self.record(core, first)
            && let Some(records) = &mut self.saving
        {
            records.saved.push(record);
        }
    }
}

fn of_store(error: Error) -> StoreError {
    match error {
        Error::Objects(error) => error,
        error => StoreError::Io {
            device: "far memory".into(),
            error: varve_far::BackendError::Io(std::io::Error::other(error.to_string())),
        },
    }
}

impl SlotsOwner for Core {
    fn cut(&self, is_whole: bool, cut: &mut dyn FnMut() -> u32) -> Result<(), StoreError> {
        let mut allocated = self.allocated.lock();
        self.pages.cut(cut).map_err(of_store)?;
        let all = is_whole.then(|| allocated.first_pages());
        if let Some(records) = &mut allocated.saving {
            let touched = std::mem::take(&mut records.touched);
            records.of_cut = all.unwrap_or(touched);
            records.pending.clone_from(&records.of_cut);
            records.saved.clear();
        }
        Ok(())
    }

    fn save(&self, out: &mut SlotsOut<'_, '_>) -> Result<(), StoreError> {
        if let Some(saver) = &self.saver {
            self.pages.save_all(&mut saver.tools.lock()).map_err(of_store)?;
        }
        loop {
            let record = {
                let mut allocated = self.allocated.lock();
                let Some(records) = &mut allocated.saving else {
                    return Ok(());
                };
                if let Some(record) = records.saved.pop() {
                    Some(record)
                } else if let Some(first) = records.pending.iter().next().copied() {
                    records.pending.remove(&first);
                    allocated.record(self, first)
                } else {
                    return Ok(());
                }
            };
            if let Some(record) = record {
                out.put(&record.map_err(of_store)?)?;
            }
        }
    }

    fn end(&self, is_complete: bool) {
        self.pages.end_cut();
        let mut allocated = self.allocated.lock();
        if let Some(records) = &mut allocated.saving {
            let of_cut = std::mem::take(&mut records.of_cut);
            if !is_complete {
                let ranges = &self.pages.ranges;
                let is_there = |first: &u64| ranges.get_first(*first).is_some();
                records.touched.extend(of_cut.into_iter().filter(is_there));
            }
            records.pending.clear();
            records.saved.clear();
        }
    }
}

/// Addresses for a heap in a file, where nothing is in this process and hardly anything in the next.
fn choose_addresses(len_bytes: u64) -> Result<Region, Error> {
    let (seed, mut last) = (RandomState::new(), None);
    let places = (ADDRESSES.end - ADDRESSES.start - len_bytes) / CHUNK_BYTES;
    for attempt in 0..TRIES {
        let start = ADDRESSES.start + seed.hash_one(attempt) % places * CHUNK_BYTES;
        match Region::at(start, len_bytes as usize) {
            Ok(region) => return Ok(region),
            Err(error) => last = Some(error),
        }
    }
    Err(Error::System {
        what: "addresses",
        error: last.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into()),
    })
}

/// The addresses that a heap had.
fn same_addresses(start: u64, len_bytes: u64) -> Result<Region, Error> {
    let end = start
        .checked_add(len_bytes)
        .ok_or_else(|| Error::Malformed(format!("{len_bytes} bytes of addresses at {start:#x}")))?;
    Region::at(start, len_bytes as usize).map_err(|error| match error.raw_os_error() {
        Some(libc::EEXIST) => Error::AddressesTaken {
            start,
            end,
            by: mappings(start..end).join("; "),
        },
        _ => Error::System {
            what: "the addresses of the checkpoint",
            error,
        },
    })
}

/// Heaps in files.
impl FarAlloc {
    /// A heap in an empty file, of which it takes at most `capacity_slabs` MiB and one. Its addresses are
    /// chosen now, and are the same after [`Self::restore`]. `schema_tag` is a number of the program for the
    /// layout of what it stores: `restore` wants the same. An empty checkpoint is durable when this returns.
    ///
    /// # Errors
    /// As [`Self::new`]; `Objects` with `Refused` where the file is not empty or in use, with `Io`.
    pub fn create(
        file: impl CheckpointFile + 'static,
        capacity_slabs: u32,
        schema_tag: u64,
        config: &Config,
    ) -> Result<Self, Error> {
        let pages = config.buffer_pages()?;
        if !config.start_address.is_multiple_of(CHUNK_BYTES) {
            return Err(Error::Config(format!(
                "addresses begin at a multiple of 2 MiB, not at {:#x}",
                config.start_address
            )));
        }
        let len_bytes = config.address_bytes(capacity_slabs);
        let region = match config.start_address {
            0 => choose_addresses(len_bytes)?,
            // None that `restore` refuses.
            start if notes::parse_head(&notes::head(start, len_bytes)).is_err() => {
                return Err(Error::Config(format!(
                    "{len_bytes} bytes of addresses do not begin at {start:#x}: they lie above 2 MiB and \
                     below 2^47"
                )));
            }
            start => same_addresses(start, len_bytes)?,
        };
        let heap = FarHeap::create_for_slots(file, capacity_slabs, schema_tag, pages, &config.objects)?;
        let all = Self::build(heap, region, true, config)?;
        // It says where the addresses are.
        all.checkpoint(&[])?;
        Ok(all)
    }

    /// Makes a checkpoint: all memory of the heap as it is at one moment of this call, while other threads go
    /// on. Durable when this returns; until then a crash leaves the one before. `record` is for the program,
    /// [`RECORD_MAX_BYTES`] at most: the pointers that it begins with.
    ///
    /// The moment is one of all threads: each is between two instructions, as if the machine lost its power
    /// then. What a device or `io_uring` writes to a page by itself at that moment (direct I/O, registered
    /// buffers) is in the checkpoint in part. Pages that the kernel copies to, as `read` does, are as others.
    ///
    /// # Errors
    /// `Objects` with `NoCheckpoints`, `TooLarge` for a long record, `Full`, `Io`: the one before is the
    /// last. After a failed sync all others fail. `Forked`.
    pub fn checkpoint(&self, record: &[u8]) -> Result<Checkpointed, Error> {
        let core = self.core()?;
        let (start, len) = (core.pages.memory.start(), core.pages.memory.len_bytes());
        let record = [&notes::head(start, len)[..], record].concat();
        if core.saver.is_none() {
            return Ok(core.heap.checkpoint(&record)?);
        }
        Ok(core.heap.checkpoint_slots(&record, core)?)
    }

    /// Keeps changes of this thread together, as long as the result lives: a checkpoint has all or none.
    /// Checkpoints wait meanwhile, and so do allocations of others while one waits.
    ///
    /// # Errors
    /// `Forked`.
    pub fn together(&self) -> Result<Together<'_>, Error> {
        Ok(self.core()?.heap.together())
    }

    /// The heap of the last complete checkpoint of a file, at the same addresses, and that checkpoint's
    /// record. Pointers into it are as they were. The heap goes on in the file, and its checkpoints too.
    ///
    /// # Errors
    /// `AddressesTaken` where this process has something at its addresses; `Objects` with `Refused`, which
    /// says what the file is instead, or whose schema tag it has; `MemoryLimit` where its tables do not fit;
    /// `Malformed`; as [`Self::new`].
    pub fn restore(
        file: impl CheckpointFile + 'static,
        schema_tag: u64,
        config: &Config,
    ) -> Result<(Self, Vec<u8>), Error> {
        let (pages, name) = (config.buffer_pages()?, file.name());
        let (heap, record, slots) = FarHeap::restore_for_slots(file, schema_tag, pages, &config.objects)?;
        if record.is_empty() && slots.is_empty() {
            // The program ended before `create` did.
            return Err(Error::Objects(StoreError::Refused {
                file: name,
                reason: varve_far_objects::Refusal::Incomplete,
            }));
        }
        let (start, len_bytes, rest) = notes::parse_head(&record)?;
        let region = same_addresses(start, len_bytes)?;
        let all = Self::build(heap, region, true, config)?;
        all.core()?.restore_ranges(slots)?;
        Ok((all, rest.to_vec()))
    }
}

impl Allocated {
    /// First pages of all ranges.
    fn first_pages(&self) -> HashSet<u64> {
        let tables = self.pools.values().flat_map(|pool| &pool.tables);
        let of_pools = tables.map(|table| table.range.first_page());
        of_pools
            .chain(self.bytes.keys().copied())
            .chain(self.arrays.keys().copied())
            .collect()
    }
}

impl Core {
    fn restore_ranges(&self, slots: Vec<RestoredSlots>) -> Result<(), Error> {
        let pages = self.pages.memory.len_bytes() / PAGE_BYTES as u64;
        let base = self.pages.memory.start() / PAGE_BYTES as u64;
        let mut allocated = self.allocated.lock();
        let allocated = &mut *allocated;
        let mut taken = Vec::new();
        for restored in slots {
            let mut note = Note::parse(&restored.note, pages)?;
            drop(restored.note);
            let used = note.used.take();
            let wrong = || Error::Malformed(format!("the range at page {}", note.first_page));
            let lens = match note.shape {
                Shape::Small(len) => {
                    let stored = len as usize * note.shape.per_batch();
                    stored..=stored
                }
                Shape::Large(_) => 1..=PAGE_BYTES,
                Shape::Pages => PAGE_BYTES..=PAGE_BYTES,
            };
            let found = restored.lens_bytes;
            let is_sound = found.is_empty() || (lens.contains(found.start()) && lens.contains(found.end()));
            if !is_sound {
                return Err(wrong());
            }
            allocated.make_room_for(&note)?;
            let first = base + u64::from(note.first_page);
            let range = Range::restored(
                first,
                note.objects as usize,
                note.shape,
                restored.slots,
                used,
                note.kind == Kind::Array,
            );
            let range = Arc::new(range.ok_or_else(wrong)?);
            taken.push((note.first_page, range.pages() as u32));
            allocated.ranges_bytes += range.memory_bytes();
            match note.kind {
                Kind::Pool => allocated.restore_pool(&range),
                Kind::Array => drop(allocated.arrays.insert(first, Arc::clone(&range))),
                Kind::Bytes => {
                    let bytes = PageRange::restored(Arc::clone(&range), &note.blocks).ok_or_else(wrong)?;
                    allocated.blocks_bytes += bytes.blocks.memory_bytes();
                    allocated.bytes.insert(first, bytes);
                }
            }
            self.pages.ranges.add(range);
        }
        taken.sort_unstable();
        let bytes = Blocks::restored_bytes(pages as u32, taken.iter().copied());
        allocated.make_room_of(bytes)?;
        allocated.addresses = Blocks::restored(pages as u32, taken.into_iter())
            .ok_or_else(|| Error::Malformed("ranges that overlap".into()))?;
        self.pages.epoch.store(self.heap.epoch(), Ordering::Relaxed);
        allocated.make_records()
    }
}

impl Allocated {
    /// Has memory counted for a range that is to be restored.
    fn make_room_for(&mut self, note: &Note) -> Result<(), Error> {
        let units = bytes::units_of_pages(note.objects);
        let blocks = match note.kind {
            Kind::Bytes => Blocks::restored_bytes(units, note.blocks.iter().copied()),
            Kind::Pool | Kind::Array => 0,
        };
        self.make_room_of(blocks + Range::memory_bytes_of(note.objects as usize, note.shape))
    }

    /// The same for so many bytes.
    fn make_room_of(&mut self, bytes: u64) -> Result<(), Error> {
        let needed = self.ranges_bytes + self.blocks_bytes + bytes;
        if needed > self.records.bytes() {
            self.records.resize(needed)?;
        }
        Ok(())
    }
}

impl Allocated {
    fn restore_pool(&mut self, range: &Arc<Range>) {
        let used = (0..range.objects())
            .filter(|object| range.is_used(*object))
            .count();
        let pool: &mut Pool = self.pools.entry(range.shape()).or_default();
        pool.objects += range.objects();
        pool.tables.push(PoolTable {
            range: Arc::clone(range),
            free: range.objects() - used,
            hint: 0,
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::sys::move_bytes;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn epoch_of_a_cut_is_seen_after_the_pages_that_it_needs() {
        let config = Config::new(8 << 20);
        let heap = match FarAlloc::new(varve_far::Dram::new(16), &config) {
            Ok(heap) => heap,
            Err(error @ Error::Userfault { .. }) => return eprintln!("SKIPPED: {error}"),
            Err(error) => panic!("{error}"),
        };
        let object = heap.oalloc(1, 60).unwrap().addr().get() as u64;
        move_bytes([7u8; 60].as_ptr() as u64, object, 60);
        let pages = &heap.core().unwrap().pages;
        let (epoch, is_cut) = (pages.epoch.load(Ordering::Acquire), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let held = pages.hold_cut();
            let cut = scope.spawn(|| {
                pages.cut(&mut || {
                    is_cut.store(true, Ordering::Release);
                    epoch + 1
                })
            });
            while !is_cut.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            // Who makes room may look at any time, with no stripe locked.
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(
                pages.epoch.load(Ordering::Acquire),
                epoch,
                "the cut still goes on"
            );
            drop(held);
            cut.join().unwrap().unwrap();
        });
        assert_eq!(pages.epoch.load(Ordering::Acquire), epoch + 1);
        assert_eq!(pages.pending(), 1);
        pages.end_cut();
        assert_eq!(pages.pending(), 0);
    }

    #[test]
    fn page_that_leaves_at_the_cut_is_waited_for_and_saved() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("heap");
        let config = Config::new(8 << 20);
        let made = FarAlloc::create(std::fs::File::create_new(&path).unwrap(), 64, 1, &config);
        let heap = match made {
            Ok(heap) => heap,
            Err(error @ Error::Userfault { .. }) => return eprintln!("SKIPPED: {error}"),
            Err(error) => panic!("{error}"),
        };
        let object = heap.oalloc(1, 300).unwrap().addr().get() as u64;
        let bytes = [7u8; 300];
        move_bytes(bytes.as_ptr() as u64, object, 300);
        let (core, page) = (heap.core().unwrap(), object / PAGE_BYTES as u64);
        let epoch = core.pages.epoch.load(Ordering::Relaxed);
        let mut tools = core.tools.lock();
        let aside = core.pages.begin_to_leave(page, &mut tools);
        std::thread::scope(|scope| {
            let checkpoint = scope.spawn(|| heap.checkpoint(b"program"));
            while core.pages.epoch.load(Ordering::Relaxed) == epoch {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(50));
            assert!(!checkpoint.is_finished(), "it has no bytes of the page yet");
            core.pages.end_to_leave(page, aside, epoch, &mut tools);
            checkpoint.join().unwrap().unwrap();
        });
        drop(tools);
        drop(heap);
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let (heap, record) = FarAlloc::restore(file, 1, &config).unwrap();
        assert_eq!(record, b"program");
        let mut is = [0u8; 300];
        move_bytes(object, is.as_mut_ptr() as u64, 300);
        assert_eq!(is, bytes);
        drop(heap);
    }
}
