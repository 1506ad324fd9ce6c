//! Pages that come and go: the page buffer (section 3.2.2), and what happens at a fault.
//!
//! # States and locks
//!
//! A page that is not listed is not in memory. One that is listed is *loading* or *leaving* (its object is
//! read or written by one thread, without a lock), *saving* (it is read where it is), *clean*
//! (write-protected), *dirty*, or *poisoned* (touching it is SIGBUS). All pages of 2 MiB are under one lock,
//! a *stripe*, so that the last one that leaves takes the page table with it. Order: stripe, then the buffer,
//! or the heap's locks; no object is read or written with a stripe locked.
//!
//! No write is lost: a clean page is dropped while writes to it wait for this lock; a dirty one is moved
//! aside whole, which the kernel refuses while a device writes to it, and moved back where its object cannot
//! be stored. A page that a checkpoint needs is saved first (`cut`). Who waits for a page is woken by what
//! its state becomes; a page that was left with waiters wakes them, and they fault again.

mod cut;
mod hold;
mod leave;

use cut::Saved;
pub(crate) use leave::Left;

use crate::buffer::{Buffer, Slot};
use crate::error::Error;
use crate::ranges::{Range, Ranges};
use crate::sys::{CHUNK_PAGES, Fault, PAGE_BYTES, Region, Uffd, is_present};
use crate::turn::Holder;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use varve_far::Page as Bytes;
use varve_far_objects::Reserved;

const STRIPES: usize = 64;
/// Pages that each thread has aside until it empties them at once.
pub(crate) const ASIDE_PAGES: usize = 16;
/// How long a fault waits for room in the buffer before it is SIGBUS.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long touching a page that could not be read is SIGBUS, before it is tried again.
pub(crate) const POISONED: Duration = Duration::from_secs(1);
/// A wait for another thread's work on a page.
const SHORTLY: Duration = Duration::from_micros(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Loading,
    Clean,
    Dirty,
    Leaving,
    /// A checkpoint reads it where it is.
    Saving,
    Poisoned(Instant),
}

#[derive(Debug)]
struct Page {
    state: State,
    /// Of a page that leaves: somebody waits for it. Of one that is loading, or is needed by a checkpoint:
    /// somebody writes.
    is_wanted: bool,
    /// The running checkpoint needs what it has, or had when it was set aside.
    is_pending: bool,
    pins: u16,
    /// Poisoned pages have none.
    slot: Option<Slot>,
}

/// Hashes page numbers.
#[derive(Debug, Default)]
struct PageHasher(u64);

impl Hasher for PageHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u64(&mut self, number: u64) {
        // The golden ratio's bits: neighbours go far apart, in the high bits too.
        self.0 = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}

type ByNumber<T> = HashMap<u64, T, BuildHasherDefault<PageHasher>>;

/// 2 MiB of addresses with pages that are listed.
#[derive(Debug, Default)]
struct Chunk {
    pages: u16,
    /// Whether its page table has a unit of the buffer.
    is_counted: bool,
}

#[derive(Debug, Default)]
struct Stripe {
    pages: ByNumber<Page>,
    /// Those of each 2 MiB.
    chunks: ByNumber<Chunk>,
    /// Chunks that have a page table, where the kernel does not free those.
    touched: HashSet<u64>,
}

/// What was done with pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Faults that brought a page.
    pub faults: u64,
    /// First writes to pages that were read before.
    pub write_faults: u64,
    /// Pages that left unchanged.
    pub dropped: u64,
    /// Pages whose objects were stored when they left.
    pub stored: u64,
    /// Pages that could not leave: the kernel uses them, or their object could not be stored.
    pub kept: u64,
    /// Pages that were stored for a checkpoint, and stayed.
    pub saved: u64,
    /// Those of them that the kernel used, so that they were read where they are.
    pub saved_in_place: u64,
    /// Touches that were SIGBUS.
    pub poisoned: u64,
    /// Pages in memory now.
    pub pages: u64,
    /// Pages of memory that they and their page tables may take.
    pub buffer_pages: u64,
}

#[derive(Debug, Default)]
struct Counters {
    faults: AtomicU64,
    write_faults: AtomicU64,
    dropped: AtomicU64,
    stored: AtomicU64,
    kept: AtomicU64,
    saved: AtomicU64,
    saved_in_place: AtomicU64,
    poisoned: AtomicU64,
}

fn add(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A thread's part of the set-aside area, and a page's bytes.
#[derive(Debug)]
pub(crate) struct Tools {
    aside: u64,
    next: usize,
    bytes: Box<Bytes>,
    /// Bytes beyond this one are zeros.
    filled: usize,
    /// Of a thread that serves faults.
    pub(crate) turn: Holder,
}

impl Tools {
    /// Fills the page from an object, with zeros behind it.
    fn fill(&mut self, read: impl FnOnce(&mut [u8]) -> Result<usize, Error>) -> Result<(), Error> {
        let len = read(&mut self.bytes.0)?;
        self.filled_to(len);
        Ok(())
    }

    fn filled_to(&mut self, len: usize) {
        if len < self.filled {
            self.bytes.0[len..self.filled].fill(0);
        }
        self.filled = len;
    }

    /// Fills the page from an object, after others may wait for faults if that needs the device.
    fn fetch(&mut self, range: &Range, page: u64) -> Result<(), Error> {
        if let Some(len) = range.read_in_memory(page, &mut self.bytes.0) {
            self.filled_to(len);
            return Ok(());
        }
        self.turn.give();
        self.fill(|bytes| range.read(page, bytes))
    }
}

/// Whether a page was listed as loading.
enum Listed {
    Yes,
    NoObject,
    NoRoom,
}

/// All pages of a heap.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) ranges: Ranges,
    pub(crate) faults: Uffd,
    moves: Uffd,
    pub(crate) memory: Region,
    aside: Region,
    stripes: Box<[Mutex<Stripe>]>,
    buffer: Mutex<Buffer>,
    /// Where page tables stay, what they take.
    tables: Option<Mutex<Reserved>>,
    poisoned: Mutex<Vec<u64>>,
    last_error: Mutex<Option<String>>,
    counters: Counters,
    pub(crate) is_ending: AtomicBool,
    /// Cuts that were made. Changes with all stripes locked, as the last thing of a cut.
    pub(crate) epoch: AtomicU32,
    /// Pages that the running checkpoint needs, and those that it needed at its cut.
    pending: AtomicUsize,
    cut_pages: Mutex<Vec<u64>>,
    /// Why the running checkpoint fails.
    cut_error: Mutex<Option<Error>>,
    /// Free units below which room is made in the background.
    low_units: usize,
    is_asked: AtomicBool,
    asked: (Mutex<()>, Condvar),
}

fn address(page: u64) -> u64 {
    page * PAGE_BYTES as u64
}

fn chunk(page: u64) -> u64 {
    page / CHUNK_PAGES
}

impl Pages {
    /// `threads` may let pages out; `tables` is where page tables are counted if the kernel does not free
    /// them.
    pub(crate) fn new(
        memory: Region,
        buffer_pages: usize,
        threads: usize,
        tables: Option<Reserved>,
    ) -> Result<Self, Error> {
        let kernel = |what| move |error| Error::Userfault { what, error };
        let system = |what| move |error| Error::System { what, error };
        let faults = Uffd::for_faults().map_err(kernel("a userfaultfd"))?;
        let moves = Uffd::for_moves().map_err(kernel("a userfaultfd for moves"))?;
        let aside = Region::new(threads * ASIDE_PAGES * PAGE_BYTES).map_err(system("addresses"))?;
        faults
            .register(memory.start(), memory.len_bytes(), true)
            .map_err(kernel("to register addresses"))?;
        moves
            .register(aside.start(), aside.len_bytes(), false)
            .map_err(kernel("to register addresses"))?;
        Ok(Self {
            ranges: Ranges::default(),
            faults,
            moves,
            memory,
            aside,
            stripes: (0..STRIPES).map(|_| Mutex::default()).collect(),
            buffer: Mutex::new(Buffer::new(buffer_pages)),
            tables: tables.map(Mutex::new),
            poisoned: Mutex::default(),
            last_error: Mutex::default(),
            counters: Counters::default(),
            is_ending: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            pending: AtomicUsize::new(0),
            cut_pages: Mutex::default(),
            cut_error: Mutex::default(),
            low_units: (buffer_pages / 8).clamp(2, 256),
            is_asked: AtomicBool::new(false),
            asked: Default::default(),
        })
    }

    /// What one of the threads works with.
    pub(crate) fn tools(&self, thread: usize) -> Tools {
        Tools {
            aside: self.aside.start() + (thread * ASIDE_PAGES * PAGE_BYTES) as u64,
            next: 0,
            bytes: Box::default(),
            filled: 0,
            turn: Holder::default(),
        }
    }

    fn stripe(&self, page: u64) -> MutexGuard<'_, Stripe> {
        self.stripes[chunk(page) as usize % STRIPES].lock()
    }

    pub(crate) fn stats(&self) -> Stats {
        let buffer = self.buffer.lock();
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            faults: get(&self.counters.faults),
            write_faults: get(&self.counters.write_faults),
            dropped: get(&self.counters.dropped),
            stored: get(&self.counters.stored),
            kept: get(&self.counters.kept),
            saved: get(&self.counters.saved),
            saved_in_place: get(&self.counters.saved_in_place),
            poisoned: get(&self.counters.poisoned),
            pages: buffer.pages() as u64,
            buffer_pages: buffer.units() as u64,
        }
    }

    /// Serves a fault.
    pub(crate) fn serve(&self, fault: Fault, tools: &mut Tools) {
        let page = fault.address / PAGE_BYTES as u64;
        let mut since = None;
        loop {
            let mut stripe = self.stripe(page);
            if let Some(listed) = stripe.pages.get_mut(&page) {
                if listed.is_pending && listed.state == State::Dirty && fault.is_protected {
                    drop(stripe);
                    tools.turn.give();
                    if self.save(page, true, tools) == Saved::NotNeeded {
                        // Another thread saved it since, and does not know of this fault.
                        continue;
                    }
                    return;
                }
                if self.serve_listed(page, listed, fault) {
                    return;
                }
                // The program dropped the page by itself: it gets what was stored last.
                self.remove(&mut stripe, page, true);
            }
            match self.list(&mut stripe, page, fault.is_write) {
                Listed::Yes => {
                    drop(stripe);
                    if let Err(error) = self.load(page, tools) {
                        self.note(&error);
                    }
                    return;
                }
                Listed::NoObject => return self.insert_poisoned(&mut stripe, page),
                Listed::NoRoom => drop(stripe),
            }
            if let Err(error) = self.make_room(&mut since, tools) {
                self.note(&error);
                let mut stripe = self.stripe(page);
                if !stripe.pages.contains_key(&page) {
                    return self.insert_poisoned(&mut stripe, page);
                }
            }
        }
    }

    /// Gives who waits for a listed page what it needs. False if the page is not there in truth.
    fn serve_listed(&self, page: u64, listed: &mut Page, fault: Fault) -> bool {
        match listed.state {
            State::Loading => listed.is_wanted |= fault.is_write,
            State::Leaving => listed.is_wanted = true,
            State::Saving if fault.is_protected => listed.is_wanted = true,
            State::Poisoned(_) => self.wake(page),
            State::Clean | State::Dirty if fault.is_protected => {
                add(&self.counters.write_faults);
                listed.state = State::Dirty;
                ignore(self.faults.unprotect(address(page)));
            }
            // Mostly an old message, of a thread that was woken since.
            State::Clean | State::Dirty | State::Saving => {
                if !is_present(address(page)) {
                    return false;
                }
                self.wake(page);
            }
        }
        true
    }

    /// Lists a page as loading.
    fn list(&self, stripe: &mut Stripe, page: u64, is_write: bool) -> Listed {
        if self.is_ending.load(Ordering::Relaxed) || self.ranges.of_object(page).is_none() {
            return Listed::NoObject;
        }
        let is_counted = stripe
            .chunks
            .get(&chunk(page))
            .is_some_and(|chunk| chunk.is_counted);
        let needs_table = self.tables.is_none() && !is_counted;
        let (slot, free) = {
            let mut buffer = self.buffer.lock();
            (
                buffer.take(page, 1 + usize::from(needs_table)),
                buffer.free_units(),
            )
        };
        if free < self.low_units {
            self.ask();
        }
        let Some(slot) = slot else { return Listed::NoRoom };
        let listed = Page {
            state: State::Loading,
            is_wanted: is_write,
            is_pending: false,
            pins: 0,
            slot: Some(slot),
        };
        self.insert(stripe, page, listed).is_counted |= needs_table;
        Listed::Yes
    }

    fn insert<'a>(&self, stripe: &'a mut Stripe, page: u64, listed: Page) -> &'a mut Chunk {
        stripe.pages.insert(page, listed);
        if let Some(tables) = &self.tables
            && stripe.touched.insert(chunk(page))
        {
            let mut tables = tables.lock();
            let bytes = tables.bytes() + PAGE_BYTES as u64;
            tables.force(bytes);
        }
        let chunk = stripe.chunks.entry(chunk(page)).or_default();
        chunk.pages += 1;
        chunk
    }

    /// Takes a page off the list, and its memory with it; `is_empty`: it has none any more.
    fn remove(&self, stripe: &mut Stripe, page: u64, is_empty: bool) {
        let Some(mut listed) = stripe.pages.remove(&page) else {
            return;
        };
        self.is_saved(&mut listed);
        let mut units = usize::from(listed.slot.is_some());
        let number = chunk(page);
        let count = stripe.chunks.entry(number).or_default();
        count.pages = count.pages.saturating_sub(1);
        let (is_last, is_counted) = (count.pages == 0, count.is_counted);
        if is_last {
            stripe.chunks.remove(&number);
        }
        if is_last && self.tables.is_none() {
            // Their page table goes too.
            let end = self.memory.start() + self.memory.len_bytes();
            let start = address(number * CHUNK_PAGES).max(self.memory.start());
            let len = (address((number + 1) * CHUNK_PAGES).min(end) - start) as usize;
            ignore(self.memory.empty(start, len));
            units += usize::from(is_counted);
        } else if !is_empty {
            ignore(self.memory.empty(address(page), PAGE_BYTES));
        }
        let mut buffer = self.buffer.lock();
        match listed.slot {
            Some(slot) => buffer.give_back(slot, units),
            None => buffer.give_units(units),
        }
        if listed.pins > 0 {
            buffer.unpin();
        }
    }

    /// Brings the object of a page that is listed as loading.
    fn load(&self, page: u64, tools: &mut Tools) -> Result<(), Error> {
        let range = self.ranges.of_object(page);
        let read = range
            .ok_or(Error::NotAllocated(address(page) as usize))
            .and_then(|range| tools.fetch(&range, page));
        let mut stripe = self.stripe(page);
        let Some(listed) = stripe.pages.get_mut(&page) else {
            return Ok(());
        };
        let put = read.and_then(|()| {
            let copied = self.faults.copy(address(page), &tools.bytes, !listed.is_wanted);
            match copied.as_ref().map_err(io::Error::raw_os_error) {
                Ok(()) if !listed.is_wanted => Ok(State::Clean),
                Ok(()) => Ok(State::Dirty),
                // What is there is the program's own.
                Err(Some(libc::EEXIST)) => Ok(State::Dirty),
                Err(_) => copied.map(|()| State::Dirty).map_err(|error| Error::System {
                    what: "to put a page in",
                    error,
                }),
            }
        });
        match put {
            Ok(state) => {
                listed.state = state;
                add(&self.counters.faults);
                Ok(())
            }
            Err(error) => {
                if let Some(slot) = listed.slot.take() {
                    self.buffer.lock().give_back(slot, 1);
                }
                self.poison(page, listed);
                Err(error)
            }
        }
    }

    /// Makes touching a page SIGBUS for a while.
    fn poison(&self, page: u64, listed: &mut Page) {
        listed.state = State::Poisoned(Instant::now());
        add(&self.counters.poisoned);
        self.poisoned.lock().push(page);
        self.ask();
        ignore(self.faults.poison(address(page)));
        self.wake(page);
    }

    fn insert_poisoned(&self, stripe: &mut Stripe, page: u64) {
        let listed = Page {
            state: State::Poisoned(Instant::now()),
            is_wanted: false,
            is_pending: false,
            pins: 0,
            slot: None,
        };
        self.insert(stripe, page, listed);
        if let Some(listed) = stripe.pages.get_mut(&page) {
            self.poison(page, listed);
        }
    }

    /// Lets pages be tried again that were poisoned long enough ago.
    pub(crate) fn forgive(&self) {
        let pages = std::mem::take(&mut *self.poisoned.lock());
        for page in pages {
            let mut stripe = self.stripe(page);
            match stripe.pages.get(&page).map(|listed| listed.state) {
                Some(State::Poisoned(since)) if since.elapsed() < POISONED => self.poisoned.lock().push(page),
                Some(State::Poisoned(_)) => self.remove(&mut stripe, page, false),
                _ => {}
            }
        }
    }

    fn wake(&self, page: u64) {
        ignore(self.faults.wake(address(page)));
    }

    fn note(&self, error: &Error) {
        *self.last_error.lock() = Some(error.to_string());
    }

    /// Why a page became SIGBUS the last time.
    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    /// Asks the thread in the background for room.
    pub(crate) fn ask(&self) {
        if !self.is_asked.swap(true, Ordering::AcqRel) {
            let _held = self.asked.0.lock();
            self.asked.1.notify_one();
        }
    }

    /// Waits until room is asked for, or something may be forgiven.
    pub(crate) fn wait_until_asked(&self) {
        let mut held = self.asked.0.lock();
        let is_quiet = self.poisoned.lock().is_empty();
        if !self.is_asked.swap(false, Ordering::AcqRel) {
            if is_quiet {
                self.asked.1.wait(&mut held);
            } else {
                self.asked.1.wait_for(&mut held, POISONED / 8);
            }
            self.is_asked.store(false, Ordering::Release);
        }
    }

    /// Whether the thread in the background has more to do.
    pub(crate) fn needs_room(&self) -> bool {
        self.buffer.lock().free_units() < 2 * self.low_units
    }
}

/// For calls of the kernel that fail only where the program changed the mappings: its next touch tells it.
fn ignore(result: io::Result<()>) {
    drop(result);
}
