//! Pages of one file in the kernel above a mount: pages that may be up to date, pages that are locked by
//! calls that wait here, and pages that must be dropped before a lease goes. Owns these records; drops
//! nothing itself, and knows neither leases nor threads.
//!
//! It relies on this behaviour of Linux (`fs/fuse/file.c`). A page that a FUSE_READ fills is locked, and not
//! up to date, until the call is answered. A buffered write copies into the page cache *before* it calls:
//! whole pages count as up to date at once and are unlocked, as is a page that was up to date before; the
//! first page that is neither ends the call and stays locked until the answer, and is not up to date
//! afterwards. Buffered writes of one file come one at a time. Dropping (`invalidate_inode_pages2_range`)
//! takes pages that are up to date, even if they are referenced, and waits for each locked page in turn.
//!
//! So a locked page is not visible to any reader, and a lease need not wait for one whose call waits for that
//! lease: the drop skips it. Whether the last page of a write was up to date is not always known: then it is
//! dropped unless it turns out to be locked.
//!
//! The kernel writes stores into a shared mapping back by itself, under a lock that a drop waits for, while
//! the page can be read. If the writeback call waits, the lease goes before its pages: until the call is
//! served they show the stored bytes, and not other sessions' writes.

use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use varve_format::InodeKey;
use varve_ipc::{Clock, SystemClock};

use crate::options::CacheObserver;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Condvar, Mutex, spawn, wait_for};

/// The kernel's page: the smallest unit of its locks.
const PAGE_BYTES: u64 = 4096;
/// The kernel locks more than a page where it keeps several together (large folios), but never more than this
/// number of pages.
const TOGETHER_MAX: u64 = 512;
/// Most ranges that are kept apart; with more, the nearest two become one.
const RANGES_MAX: usize = 64;
/// Most reads that are remembered, for the writes that they may have overtaken.
const READS_MAX: usize = 64;
/// Longest time that a write's thread may have been stopped between its copy into the page cache and its
/// call.
const STOPPED_MAX: Duration = Duration::from_millis(200);
/// Longest time between the kernel's drop of pages for a write past the page cache and that write's call.
const COMES_WITHIN: Duration = Duration::from_secs(1);

/// Effect of a call of the kernel on its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageUse {
    /// Fills them: they are locked until the answer.
    Read,
    /// Has copied into them: the last one is locked until the answer, unless it was up to date.
    Write,
    /// Writes past them (`FOPEN_DIRECT_IO`).
    Direct {
        /// The kernel has dropped them before the call, as it does since Linux 6.6: only pages that were read
        /// meanwhile are there.
        dropped: bool,
    },
    /// Writes back stores into a shared mapping.
    WriteBack,
}

/// A call of the kernel about pages of a file.
#[derive(Debug, Clone)]
pub struct KernelCall {
    order: u64,
    usage: PageUse,
    /// Touched pages.
    pages: Range<u64>,
    /// The touched pages that it covers whole.
    whole: Range<u64>,
    came: Duration,
}

impl KernelCall {
    /// A call about `len` bytes at `offset`. `order` grows from call to call as the kernel makes them.
    #[must_use]
    pub fn new(usage: PageUse, order: u64, offset: u64, len: usize) -> Self {
        let end = offset.saturating_add(len as u64);
        let first = offset / PAGE_BYTES;
        Self {
            order,
            usage,
            pages: first..end.div_ceil(PAGE_BYTES).max(first),
            whole: offset.div_ceil(PAGE_BYTES)..end / PAGE_BYTES,
            came: SystemClock.moment(),
        }
    }

    /// Sets the time at which the call came by the mount's clock, instead of the system's.
    #[must_use]
    pub fn by_clock(self, clock: &dyn Clock) -> Self {
        Self {
            came: clock.moment(),
            ..self
        }
    }

    /// Whether its pages stay locked, or are waited for under a lock, until it is answered: they can be
    /// dropped only then.
    pub(crate) fn drops_late(&self) -> bool {
        self.usage == PageUse::WriteBack
    }

    /// Returns the page that the call may have locked until it is answered.
    fn tail(&self) -> Option<u64> {
        let last = self.pages.end.saturating_sub(1);
        let partly = !self.pages.is_empty() && !self.whole.contains(&last);
        (self.usage == PageUse::Write && partly).then_some(last)
    }
}

/// A range of bytes to drop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageDrop {
    pub offset: u64,
    /// 0: to the end of the file.
    pub len: u64,
    /// One page, which a waiting call may have locked: then it is not up to date, and need not be dropped.
    pub may_be_locked: bool,
}

/// Sorted ranges that do not touch.
#[derive(Debug, Default)]
struct Ranges(Vec<Range<u64>>);

impl Ranges {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let from = self.0.partition_point(|known| known.end < range.start);
        let to = self.0.partition_point(|known| known.start <= range.end);
        let mut whole = range;
        for known in &self.0[from..to] {
            whole = whole.start.min(known.start)..whole.end.max(known.end);
        }
        self.0.splice(from..to, [whole]);
        if self.0.len() > RANGES_MAX {
            let gap = |at: &usize| self.0[*at].start - self.0[at - 1].end;
            if let Some(at) = (1..self.0.len()).min_by_key(gap) {
                self.0[at - 1].end = self.0[at].end;
                self.0.remove(at);
            }
        }
    }

    fn remove(&mut self, range: &Range<u64>) {
        let mut kept = Vec::with_capacity(self.0.len() + 1);
        for known in self.0.drain(..) {
            let before = known.start..known.end.min(range.start);
            let after = known.start.max(range.end)..known.end;
            kept.extend([before, after].into_iter().filter(|part| !part.is_empty()));
        }
        self.0 = kept;
    }

    fn within(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let parts = self.0.iter();
        let parts = parts.map(move |known| known.start.max(range.start)..known.end.min(range.end));
        parts.filter(|part| !part.is_empty())
    }

    fn touches(&self, range: &Range<u64>) -> bool {
        self.within(range).next().is_some()
    }
}

/// A call that fills pages.
#[derive(Debug)]
struct ReadCall {
    number: u64,
    order: u64,
    pages: Range<u64>,
    came: Duration,
}

impl ReadCall {
    /// Whether the read may have filled pages of `write` after the write had dropped them, or copied into
    /// them, and before it was carried out. `dropped` is the time since pages were last dropped for a recall.
    fn overtakes(&self, write: &KernelCall, dropped: Option<Duration>) -> bool {
        let later = self.order > write.order;
        match (write.usage, dropped) {
            (PageUse::Direct { .. }, _) => later || self.came + COMES_WITHIN > write.came,
            // Without a drop the write's own copy is still there.
            (PageUse::Write | PageUse::WriteBack, Some(since)) => later || since < STOPPED_MAX,
            _ => false,
        }
    }
}

#[derive(Debug, Default)]
struct Book {
    /// Pages that may be up to date in the kernel and are not being dropped.
    filled: Ranges,
    /// Pages that may be up to date and are being dropped.
    going: Ranges,
    /// Waiting calls, by number.
    held: SmallVec<[(u64, KernelCall); 2]>,
    /// Number of calls that have waited so far.
    numbers: u64,
    /// Reads since the last drop began, the oldest first. If there are many, the oldest are merged.
    reads: VecDeque<ReadCall>,
    /// Reads before the drop that is under way, until it ends.
    reads_going: Vec<ReadCall>,
    /// Number of reads so far.
    read_numbers: u64,
    /// Latest time at which pages may have been dropped for a recall.
    dropped: Option<Duration>,
}

impl Book {
    /// Remembers a read, which may overtake later writes, until its pages are dropped.
    fn remember(&mut self, read: &KernelCall) {
        if self.reads.len() == READS_MAX
            && let Some(oldest) = self.reads.pop_front()
            && let Some(next) = self.reads.front_mut()
        {
            next.order = next.order.max(oldest.order);
            next.came = next.came.max(oldest.came);
            let pages = &mut next.pages;
            *pages = pages.start.min(oldest.pages.start)..pages.end.max(oldest.pages.end);
        }
        self.read_numbers += 1;
        self.reads.push_back(ReadCall {
            number: self.read_numbers,
            order: read.order,
            pages: read.pages.clone(),
            came: read.came,
        });
    }

    /// Whether a page may be up to date.
    fn may_show(&self, page: u64) -> bool {
        let page = page..page + 1;
        !armed(Bug::KernelTailKept) && (self.filled.touches(&page) || self.going.touches(&page))
    }

    /// Converts page ranges to drops.
    fn drops(&self, pages: &Ranges, tail: Option<u64>) -> Drops {
        let mut drops = Drops::new();
        let mut add = |range: Range<u64>, may_be_locked| {
            if !range.is_empty() {
                let to_end = range.end == u64::MAX;
                drops.push(PageDrop {
                    offset: range.start * PAGE_BYTES,
                    len: if to_end {
                        0
                    } else {
                        (range.end - range.start) * PAGE_BYTES
                    },
                    may_be_locked,
                });
            }
        };
        for range in &pages.0 {
            match tail.filter(|tail| range.contains(tail)) {
                Some(tail) => {
                    add(range.start..tail, false);
                    add(tail + 1..range.end, false);
                }
                None => add(range.clone(), false),
            }
        }
        if let Some(tail) = tail.filter(|tail| pages.touches(&(*tail..tail + 1)) && self.may_show(*tail)) {
            add(tail..tail + 1, true);
        }
        drops
    }
}

/// The page records of one file.
#[derive(Debug, Default)]
pub(crate) struct Above {
    /// Nothing is kept for files that no kernel asks for.
    book: Mutex<Option<Box<Book>>>,
    any: AtomicBool,
}

/// Ranges to drop.
pub(crate) type Drops = Vec<PageDrop>;

/// Drops that a write needs after it was carried out.
#[derive(Debug, Default)]
pub(crate) struct Overtaken {
    pub drops: Drops,
    /// Reads whose pages are all gone after the drops. Until then concurrent writes drop them too.
    pub reads: SmallVec<[u64; 4]>,
}

/// All of a file.
pub(crate) const ALL: PageDrop = PageDrop {
    offset: 0,
    len: 0,
    may_be_locked: false,
};

impl Above {
    /// Whether any page may be up to date in the kernel.
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Notes pages that become up to date, or have become so, by a call that is carried out next.
    pub(crate) fn note(&self, call: &KernelCall) {
        let mut book = self.book.lock();
        let book = book.get_or_insert_default();
        match call.usage {
            PageUse::Read => {
                book.filled.add(call.pages.clone());
                let same = book.reads.back().is_some_and(|last| last.order == call.order);
                if !same {
                    book.remember(call);
                }
            }
            PageUse::Write | PageUse::WriteBack => book.filled.add(call.whole.clone()),
            PageUse::Direct { .. } => return,
        }
        if !book.filled.is_empty() {
            self.any.store(true, Ordering::Release);
        }
    }

    /// Notes that a call begins to wait, with its pages locked.
    pub(crate) fn hold(&self, call: &KernelCall) -> u64 {
        let mut book = self.book.lock();
        let book = book.get_or_insert_default();
        book.numbers += 1;
        book.held.push((book.numbers, call.clone()));
        // The data of a buffered write is in the page cache before the write is carried out.
        if call.usage == PageUse::Write && !call.whole.is_empty() {
            book.filled.add(call.whole.clone());
            self.any.store(true, Ordering::Release);
        }
        book.numbers
    }

    /// Notes that the call waits no more.
    pub(crate) fn unhold(&self, number: u64) {
        if let Some(book) = &mut *self.book.lock() {
            book.held.retain(|(other, _)| *other != number);
        }
    }

    /// Number of calls that have begun to wait so far: a drop that began before the last one may wait for its
    /// pages.
    pub(crate) fn held(&self) -> u64 {
        self.book.lock().as_ref().map_or(0, |book| book.numbers)
    }

    /// Begins a drop: returns the ranges to drop `now`, without the pages of waiting calls;
    /// [`held`](Self::held) at this moment; and whether pages stay that may be up to date.
    pub(crate) fn begin_drop(&self, now: Duration) -> (Drops, u64, bool) {
        let mut book = self.book.lock();
        let book = book.get_or_insert_default();
        book.dropped = Some(now);
        let mut pages = Ranges::default();
        pages.add(0..u64::MAX);
        let mut stay = Ranges::default();
        // Buffered writes of a file come one at a time.
        let mut tail = None;
        for (_, call) in &book.held {
            match call.usage {
                PageUse::Read => pages.remove(&call.pages),
                // The page that the kernel waits for with a lock, and the pages that it keeps together with
                // it.
                PageUse::WriteBack => {
                    let first = call.pages.start / TOGETHER_MAX * TOGETHER_MAX;
                    let around = first..call.pages.end.next_multiple_of(TOGETHER_MAX);
                    pages.remove(&around);
                    stay.add(around);
                }
                PageUse::Write => tail = tail.or(call.tail()),
                PageUse::Direct { .. } => {}
            }
        }
        let drops = book.drops(&pages, tail);
        for range in std::mem::take(&mut book.filled).0 {
            book.going.add(range);
        }
        book.reads_going.extend(book.reads.drain(..));
        let stays = !stay.is_empty();
        for range in stay.0 {
            book.filled.add(range);
        }
        (drops, book.numbers, stays)
    }

    /// Notes that pages were dropped at `now`.
    pub(crate) fn note_dropped(&self, now: Duration) {
        if let Some(book) = &mut *self.book.lock() {
            book.dropped = Some(now);
        }
    }

    /// Ends the drop: all of its pages are dropped.
    pub(crate) fn end_drop(&self) {
        if let Some(book) = &mut *self.book.lock() {
            book.going = Ranges::default();
            book.reads_going.clear();
            self.any.store(!book.filled.is_empty(), Ordering::Release);
        }
    }

    /// Takes the pages of a write that may be up to date without a lease that covers them when the write is
    /// answered, or that may show data older than the write.
    pub(crate) fn take_own(&self, call: &KernelCall) -> Drops {
        let mut book = self.book.lock();
        let Some(book) = &mut *book else {
            return Drops::new();
        };
        let mut own = Ranges::default();
        for range in book
            .filled
            .within(&call.pages)
            .chain(book.going.within(&call.pages))
        {
            own.add(range);
        }
        let drops = book.drops(&own, call.tail());
        book.filled.remove(&call.pages);
        drops
    }

    /// Returns the drops that must end before a completed write is answered, so that no reader sees older
    /// data in the kernel.
    pub(crate) fn written(&self, call: &KernelCall, now: Duration) -> Overtaken {
        match call.usage {
            PageUse::Direct { dropped: false } => Overtaken {
                drops: self.take_own(call),
                reads: SmallVec::new(),
            },
            _ => self.overtaken(call, now),
        }
    }

    /// Forgets reads whose pages are dropped: they cannot overtake writes any more.
    pub(crate) fn forget(&self, reads: &[u64]) {
        if let Some(book) = &mut *self.book.lock() {
            book.reads.retain(|read| !reads.contains(&read.number));
            book.reads_going.retain(|read| !reads.contains(&read.number));
        }
    }

    /// Returns pages of a completed write that a read may have filled with older data: the kernel had dropped
    /// them before the write was carried out. They are not locked: the read could lock them.
    fn overtaken(&self, call: &KernelCall, now: Duration) -> Overtaken {
        let mut book = self.book.lock();
        let Some(book) = &mut *book else {
            return Overtaken::default();
        };
        if armed(Bug::KernelReadKept) {
            return Overtaken::default();
        }
        let mut pages = Ranges::default();
        let mut reads = SmallVec::new();
        let dropped = book.dropped.map(|at| now.saturating_sub(at));
        for read in book.reads.iter().chain(&book.reads_going) {
            if read.overtakes(call, dropped) {
                let from = read.pages.start.max(call.pages.start);
                let to = read.pages.end.min(call.pages.end);
                pages.add(from..to);
                if (from..to) == read.pages {
                    reads.push(read.number);
                }
            }
        }
        let drops = book.drops(&pages, call.tail());
        if armed(Bug::KernelReadForgotten) {
            book.reads.retain(|read| !reads.contains(&read.number));
        }
        Overtaken { drops, reads }
    }
}

/// Has the kernel drop pages of a file; returns when it has.
pub(crate) fn drop_all(observer: &dyn CacheObserver, key: InodeKey, drops: &[PageDrop]) {
    for drop in drops {
        if drop.may_be_locked {
            observer.invalidate_unless_locked(key, drop.offset, drop.len);
        } else {
            observer.invalidate_data(key, drop.offset, drop.len);
        }
    }
}

/// [`drop_all`] on a thread of its own, without waiting for it.
pub(crate) fn drop_later(clock: &dyn Clock, observer: &Arc<dyn CacheObserver>, key: InodeKey, drops: Drops) {
    if drops.is_empty() {
        return;
    }
    let work = {
        let observer = Arc::clone(observer);
        move || drop_all(&*observer, key, &drops)
    };
    if let Err(error) = spawn(clock, "varve-drop", work) {
        tracing::error!(%error, "no thread to drop the kernel's pages");
    }
}

/// Has the kernel drop pages of a file and waits until it has. None of them may be locked by a call that
/// waits for the caller; other threads of the kernel may be filling them, which ends without the caller
/// unless they find no free thread of the mount: so the wait ends after `patience`. Returns whether the pages
/// are dropped.
pub(crate) fn drop_and_wait(
    clock: &dyn Clock,
    observer: &Arc<dyn CacheObserver>,
    key: InodeKey,
    drops: Drops,
    patience: Duration,
) -> bool {
    if drops.is_empty() {
        return true;
    }
    let done = Arc::new((Mutex::new(false), Condvar::new()));
    let work = {
        let (observer, done) = (Arc::clone(observer), Arc::clone(&done));
        move || {
            drop_all(&*observer, key, &drops);
            *done.0.lock() = true;
            done.1.notify_all();
        }
    };
    if let Err(error) = spawn(clock, "varve-drop", work) {
        tracing::error!(%error, "no thread to drop the kernel's pages");
        return false;
    }
    let started = clock.moment();
    let mut is_done = done.0.lock();
    while !*is_done {
        wait_for(clock, &done.1, &mut is_done, patience);
        if clock.moment() - started >= patience && !*is_done {
            tracing::warn!(%key, "the kernel has not dropped pages in time");
            return false;
        }
    }
    true
}
