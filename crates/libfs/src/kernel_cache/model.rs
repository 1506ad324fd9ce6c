//! A model of a kernel's page cache above a session's leases, as [`super::pages`] describes it, in shared
//! mode: a reader that holds a lock common to all programs sees the last value written under that lock. With
//! the feature `shuttle` under a scheduler that tries interleavings (`cargo test -p varve-libfs --features
//! shuttle --lib interleavings`), without it in threads that pause at random.
#![allow(clippy::unwrap_used)]

use super::pages::{KernelCall, PageUse, drop_and_wait};
use crate::errno::{OpError, OpResult};
use crate::lease::{Event, Leases, Node, Recalls, Surroundings, Use};
use crate::options::CacheObserver;
use crate::seeded;
#[cfg(feature = "shuttle")]
use crate::seeded::Bug;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo, LogSeq, SessionId};
use varve_ipc::{Clock, Grant, IpcError, LeaseMode, Link, Page, Request, Response, SystemClock, Upcall};

#[cfg(feature = "shuttle")]
use shuttle::thread;
#[cfg(not(feature = "shuttle"))]
use std::thread;

const FILE: InodeKey = InodeKey::new(5, 1);
const PAGE_BYTES: u64 = 4096;
/// Number of words of a page that are written separately.
const WORDS: usize = 2;
/// Number of pages of the file.
const PAGES: u64 = 2;
/// Longer than any test.
const PATIENCE: Duration = Duration::from_secs(600);

/// A point where another thread may run.
fn pause() {
    #[cfg(feature = "shuttle")]
    thread::yield_now();
    #[cfg(not(feature = "shuttle"))]
    pauses::pause();
}

#[cfg(not(feature = "shuttle"))]
mod pauses {
    use std::cell::Cell;
    use std::time::Duration;

    thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn seed(seed: u64) {
        STATE.set(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    }

    pub(super) fn draw() -> u64 {
        let mut state = STATE.get() | 1;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        STATE.set(state);
        state >> 33
    }

    /// Mostly does nothing, now and then sleeps long enough for other threads to do anything.
    pub(super) fn pause() {
        match draw() % 16 {
            0 => std::thread::sleep(Duration::from_micros(draw() % 400)),
            1..4 => std::thread::yield_now(),
            _ => {}
        }
    }
}

type Words = [u64; WORDS];

/// The daemon's state: the file, and the holders of leases on it.
#[derive(Default)]
struct Book {
    file: [Words; PAGES as usize],
    /// The session's lease.
    held: Option<(LeaseNo, LeaseMode)>,
    /// Number of operations of other sessions, and of the session itself by the daemon, that wait for the
    /// file or use it.
    others: u32,
    /// One of them uses it.
    busy: bool,
    granted: u64,
    asked: u64,
}

struct Daemon {
    book: Mutex<Book>,
    changed: Condvar,
    /// One in this number of write requests is answered with contention. 0: none.
    forward: u64,
    events: crossbeam_channel::Sender<Event>,
}

impl Daemon {
    /// Runs an operation under exclusive rights: the session's lease is recalled first.
    fn alone<T>(&self, work: impl FnOnce(&mut [Words; PAGES as usize]) -> T) -> T {
        let mut book = self.book.lock();
        book.others += 1;
        loop {
            if let Some((number, _)) = book.held {
                let _ = self.events.send(Event::Revoke {
                    key: FILE,
                    number,
                    only_read: false,
                });
            } else if !book.busy {
                break;
            }
            self.changed.wait(&mut book);
        }
        book.busy = true;
        drop(book);
        pause();
        let mut book = self.book.lock();
        let value = work(&mut book.file);
        book.busy = false;
        book.others -= 1;
        drop(book);
        self.changed.notify_all();
        pause();
        value
    }
}

impl Link for Daemon {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let answer = match request {
            Request::Acquire { wants } | Request::AcquireNear { wants, .. } => {
                let mode = wants[0].mode;
                let mut book = self.book.lock();
                if mode == LeaseMode::Write && self.forward > 0 {
                    book.asked += 1;
                    if book.asked.is_multiple_of(self.forward) {
                        return Err(IpcError::Forward);
                    }
                }
                // Earlier requests go first.
                while book.others > 0 {
                    self.changed.wait(&mut book);
                }
                let replaces = book.held.map(|(number, _)| number);
                let lease = match book.held {
                    Some((number, held)) if held >= mode => number,
                    _ => {
                        book.granted += 1;
                        LeaseNo(book.granted)
                    }
                };
                let mode = book.held.map_or(mode, |(_, held)| held.max(mode));
                book.held = Some((lease, mode));
                Response::Granted(vec![Grant {
                    lease,
                    mode,
                    replaces: replaces.filter(|number| *number != lease),
                    attr: InodeAttr::new(FILE, 0o100_644, 0),
                    told: varve_ipc::Told::default(),
                }])
            }
            Request::Release { items } => {
                let mut book = self.book.lock();
                for item in items {
                    if book.held.is_some_and(|(number, _)| number == item.lease) {
                        book.held = None;
                    }
                }
                drop(book);
                self.changed.notify_all();
                Response::Done
            }
            other => panic!("{other:?}"),
        };
        pause();
        Ok(answer)
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

/// Kind of call that has locked a page.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Locked {
    #[default]
    No,
    Read,
    Write,
}

/// A page of the kernel.
#[derive(Clone, Copy, Default)]
struct Cached {
    locked: Locked,
    up_to_date: bool,
    words: Words,
}

/// The effect of Linux' buffered writes and reads on their pages.
struct Kernel {
    pages: Mutex<HashMap<u64, Cached>>,
    unlocked: Condvar,
    /// The inode's lock: buffered writes come one at a time.
    writes: Mutex<()>,
    orders: AtomicU64,
}

impl Kernel {
    fn order(&self) -> u64 {
        self.orders.fetch_add(1, Ordering::SeqCst)
    }

    fn unlock(&self, page: u64, change: impl FnOnce(&mut Cached)) {
        let mut pages = self.pages.lock();
        let cached = pages.get_mut(&page).unwrap();
        cached.locked = Locked::No;
        change(cached);
        drop(pages);
        self.unlocked.notify_all();
    }

    /// Reads a page through the cache; `fill` is the call.
    fn read(&self, page: u64, fill: impl FnOnce(u64) -> Words) -> Words {
        let mut pages = self.pages.lock();
        loop {
            let cached = pages.entry(page).or_default();
            if cached.up_to_date {
                return cached.words;
            }
            if cached.locked == Locked::No {
                cached.locked = Locked::Read;
                break;
            }
            self.unlocked.wait(&mut pages);
        }
        drop(pages);
        pause();
        let words = fill(self.order());
        pause();
        self.unlock(page, |cached| {
            cached.up_to_date = true;
            cached.words = words;
        });
        words
    }

    /// Writes a word, or a whole page, through the cache; `call` is the call.
    fn write(&self, page: u64, word: Option<usize>, value: u64, call: impl FnOnce(u64)) {
        let writes = self.writes.lock();
        let mut pages = self.pages.lock();
        while is_locked(&pages, page) {
            self.unlocked.wait(&mut pages);
        }
        let cached = pages.entry(page).or_default();
        match word {
            Some(word) => cached.words[word] = value,
            None => (cached.words, cached.up_to_date) = ([value; WORDS], true),
        }
        let stays_locked = !cached.up_to_date;
        if stays_locked {
            cached.locked = Locked::Write;
        }
        drop(pages);
        pause();
        call(self.order());
        if stays_locked {
            self.unlock(page, |_| {});
        }
        drop(writes);
    }
}

impl Kernel {
    /// Writes past the cache, as Linux 6.6 and later: the page is dropped before the call.
    fn write_past(&self, page: u64, call: impl FnOnce(u64)) {
        self.invalidate_data(FILE, page * PAGE_BYTES, PAGE_BYTES);
        let order = self.order();
        pause();
        call(order);
    }
}

fn is_locked(pages: &HashMap<u64, Cached>, page: u64) -> bool {
    pages.get(&page).is_some_and(|cached| cached.locked != Locked::No)
}

impl CacheObserver for Kernel {
    fn invalidate_data(&self, _: InodeKey, offset: u64, len: u64) {
        let end = if len == 0 {
            PAGES
        } else {
            (offset + len) / PAGE_BYTES
        };
        for page in offset / PAGE_BYTES..end.min(PAGES) {
            pause();
            let mut pages = self.pages.lock();
            while is_locked(&pages, page) {
                self.unlocked.wait(&mut pages);
            }
            pages.remove(&page);
        }
        pause();
    }

    fn invalidate_unless_locked(&self, _: InodeKey, offset: u64, _: u64) {
        let page = offset / PAGE_BYTES;
        let mut pages = self.pages.lock();
        let locked =
            |pages: &HashMap<u64, Cached>| pages.get(&page).map_or(Locked::No, |cached| cached.locked);
        while locked(&pages) == Locked::Read {
            self.unlocked.wait(&mut pages);
        }
        if locked(&pages) == Locked::No {
            pages.remove(&page);
        }
        drop(pages);
        pause();
    }
}

struct Around(Arc<Kernel>);

impl Surroundings for Around {
    fn last_seq(&self, _: &Node) -> LogSeq {
        LogSeq(0)
    }

    fn log_last(&self) -> LogSeq {
        LogSeq(0)
    }

    fn is_open(&self, _: InodeKey) -> bool {
        true
    }

    fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        Some(Arc::clone(&self.0) as Arc<dyn CacheObserver>)
    }
}

/// The mount: does for the kernel's calls the work of [`crate::OpenFile`].
#[derive(Clone)]
struct Mount {
    leases: Arc<Leases>,
    daemon: Arc<Daemon>,
    kernel: Arc<Kernel>,
    /// An open file keeps it.
    node: Arc<Node>,
}

impl Mount {
    fn read(&self, page: u64, word: usize) -> u64 {
        let words = self.kernel.read(page, |order| {
            let call = KernelCall::new(PageUse::Read, order, page * PAGE_BYTES, PAGE_BYTES as usize);
            // Without a pin where that can be.
            if self.leases.may_look(&self.node, Use::Kernel(&call)) {
                let words = self.daemon.book.lock().file[page as usize];
                pause();
                if self.leases.may_look(&self.node, Use::Kernel(&call)) {
                    return words;
                }
            }
            let pin = self
                .leases
                .pin_one::<()>(FILE, LeaseMode::Read, Use::Kernel(&call))
                .unwrap();
            let words = self.daemon.book.lock().file[page as usize];
            drop(pin);
            words
        });
        words[word]
    }

    fn write(&self, page: u64, word: Option<usize>, value: u64) {
        self.kernel.write(page, word, value, |order| {
            self.carry_out(PageUse::Write, order, page, word, value);
        });
    }

    /// As [`write`](Self::write), past the kernel's pages.
    fn write_past(&self, page: u64, word: Option<usize>, value: u64) {
        self.kernel.write_past(page, |order| {
            let usage = PageUse::Direct { dropped: true };
            self.carry_out(usage, order, page, word, value);
        });
    }

    /// The call of a write.
    fn carry_out(&self, usage: PageUse, order: u64, page: u64, word: Option<usize>, value: u64) {
        let put = |file: &mut [Words; PAGES as usize]| match word {
            Some(word) => file[page as usize][word] = value,
            None => file[page as usize] = [value; WORDS],
        };
        let size = PAGE_BYTES / WORDS as u64;
        let (at, len) = word.map_or((0, PAGE_BYTES), |word| (word as u64 * size, size));
        let call = KernelCall::new(usage, order, page * PAGE_BYTES + at, len as usize);
        let outcome: OpResult<(), ()> = self
            .leases
            .pin_one(FILE, LeaseMode::Write, Use::Kernel(&call))
            .map(|pin| {
                pause();
                put(&mut self.daemon.book.lock().file);
                drop(pin);
            });
        match outcome {
            Ok(()) => {}
            Err(OpError::Forward) => {
                let observer = Arc::clone(&self.kernel) as Arc<dyn CacheObserver>;
                let held = self
                    .leases
                    .before_forwarded::<()>(&self.node, &call, |drops| {
                        drop_and_wait(&SystemClock, &observer, FILE, drops, PATIENCE);
                    })
                    .unwrap();
                self.daemon.alone(put);
                drop(held);
            }
            Err(error) => panic!("{error:?}"),
        }
        let observer = Arc::clone(&self.kernel) as Arc<dyn CacheObserver>;
        let overtaken = self.node.above.written(&call, SystemClock.moment());
        if drop_and_wait(&SystemClock, &observer, FILE, overtaken.drops, PATIENCE) {
            self.node.above.forget(&overtaken.reads);
        }
    }
}

/// A lock shared by all programs, and the value last written under it.
type Agreed = Arc<Mutex<u64>>;

/// Duration of the parts.
#[derive(Clone, Copy)]
struct Plan {
    rounds: u64,
    forward: u64,
    /// Another page is written whole.
    whole: bool,
    /// The mount's writes go past the kernel's pages.
    past_pages: bool,
}

/// The mount and another session increment words of one page, each word under its lock; other threads read
/// through the mount meanwhile.
fn counted(plan: Plan) {
    let (events, inbox) = crossbeam_channel::unbounded();
    let daemon = Arc::new(Daemon {
        book: Mutex::new(Book::default()),
        changed: Condvar::new(),
        forward: plan.forward,
        events: events.clone(),
    });
    let kernel = Arc::new(Kernel {
        pages: Mutex::new(HashMap::new()),
        unlocked: Condvar::new(),
        writes: Mutex::new(()),
        orders: AtomicU64::new(1),
    });
    let leases = Arc::new(Leases::new(
        Arc::clone(&daemon) as Arc<dyn Link>,
        Arc::new(Page::heap(SessionId(1))),
        events.clone(),
        crossbeam_channel::unbounded().0,
        64,
        true,
    ));
    let stop = Arc::new(AtomicBool::new(false));
    let bug = seeded::current();
    let worker = {
        let (leases, stop) = (Arc::clone(&leases), Arc::clone(&stop));
        let around = Around(Arc::clone(&kernel));
        let mut recalls = Recalls::new(leases, events, 2 * PATIENCE.as_millis() as u64);
        thread::spawn(move || {
            seeded::arm(bug);
            while !stop.load(Ordering::SeqCst) {
                while let Ok(event) = inbox.try_recv() {
                    recalls.take(event, &around);
                }
                recalls.flush(&around).unwrap();
                thread::yield_now();
            }
        })
    };
    let mount = Mount {
        node: leases.node_of(FILE).unwrap(),
        leases,
        daemon: Arc::clone(&daemon),
        kernel,
    };
    let agreed: [Agreed; WORDS] = Default::default();
    let whole = Arc::new(Mutex::new(0));
    let mut threads = Vec::new();
    let (rounds, with_whole) = (plan.rounds, plan.whole);
    for word in 0..WORDS {
        // Through the mount, and past it.
        for past in [false, true] {
            if word > 0 && past {
                continue;
            }
            let (mount, lock) = (mount.clone(), Arc::clone(&agreed[word]));
            threads.push(thread::spawn(move || {
                seeded::arm(bug);
                #[cfg(not(feature = "shuttle"))]
                pauses::seed(rounds + word as u64 * 2 + u64::from(past));
                for _ in 0..rounds {
                    let mut last = lock.lock();
                    let next = *last + 1;
                    if past {
                        let seen = mount.daemon.alone(|file| {
                            let seen = file[0][word];
                            file[0][word] = next;
                            seen
                        });
                        assert_eq!(seen, *last, "past the mount, of word {word}");
                    } else {
                        let seen = mount.read(0, word);
                        assert_eq!(seen, *last, "through the mount, of word {word}");
                        match plan.past_pages {
                            true => mount.write_past(0, Some(word), next),
                            false => mount.write(0, Some(word), next),
                        }
                    }
                    *last = next;
                    drop(last);
                    pause();
                }
            }));
        }
    }
    if with_whole {
        for past in [false, true] {
            let (mount, lock) = (mount.clone(), Arc::clone(&whole));
            threads.push(thread::spawn(move || {
                seeded::arm(bug);
                for round in 0..rounds {
                    let mut last = lock.lock();
                    let next = *last + 1;
                    if past {
                        let seen = mount.daemon.alone(|file| {
                            let seen = file[1][0];
                            file[1] = [next; WORDS];
                            seen
                        });
                        assert_eq!(seen, *last, "past the mount, of the page");
                    } else {
                        // Now and then without a lease from a read before.
                        if round % 2 == 0 {
                            let seen = mount.read(1, 1);
                            assert_eq!(seen, *last, "through the mount, of the page");
                        }
                        match plan.past_pages {
                            true => mount.write_past(1, None, next),
                            false => mount.write(1, None, next),
                        }
                    }
                    *last = next;
                    drop(last);
                    pause();
                }
            }));
        }
    }
    let reader = {
        let mount = mount.clone();
        thread::spawn(move || {
            seeded::arm(bug);
            for round in 0..rounds {
                let _ = mount.read(round % PAGES, 0);
                pause();
            }
        })
    };
    threads.push(reader);
    let ends: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
    stop.store(true, Ordering::SeqCst);
    worker.join().unwrap();
    for end in ends {
        end.unwrap();
    }
}

/// Plans: no write is forwarded; every second write; every second, and whole pages too; past the kernel's
/// pages without and with forwarded writes.
const fn plans(rounds: u64) -> [Plan; 5] {
    const fn plan(rounds: u64, forward: u64, whole: bool, past_pages: bool) -> Plan {
        Plan {
            rounds,
            forward,
            whole,
            past_pages,
        }
    }
    [
        plan(rounds, 0, false, false),
        plan(rounds, 2, false, false),
        plan(rounds, 2, true, false),
        plan(rounds, 0, true, true),
        plan(rounds, 2, true, true),
    ]
}

/// Bugs whose stale pages must be seen.
#[cfg(feature = "shuttle")]
const BUGS: [Bug; 5] = [
    Bug::KernelPagesForwarded,
    Bug::KernelReadMissed,
    Bug::KernelTailKept,
    Bug::KernelReadKept,
    Bug::KernelLetGo,
];

#[cfg(feature = "shuttle")]
mod interleavings {
    use super::{BUGS, counted, plans};
    use crate::seeded::{self, Bug};

    #[test]
    fn kernel_shows_what_was_written_last() {
        for plan in plans(3) {
            shuttle::check_random(move || counted(plan), 2_000);
            shuttle::check_pct(move || counted(plan), 1_000, 3);
        }
    }

    #[test]
    fn stale_pages_of_the_kernel_are_caught() {
        for bug in BUGS {
            let works = plans(4).map(|plan| move || counted(plan));
            assert!(seeded::is_found(bug, &works), "{bug:?} is not found");
        }
    }

    #[test]
    fn page_read_while_a_write_goes_past_it_is_caught() {
        let [.., by_itself, by_the_daemon] = plans(4);
        for plan in [by_itself, by_the_daemon] {
            let works = [move || counted(plan)];
            for bug in [Bug::KernelReadKept, Bug::KernelReadForgotten] {
                assert!(seeded::is_found(bug, &works), "{bug:?} is not found");
            }
        }
    }
}

#[cfg(not(feature = "shuttle"))]
#[test]
fn kernel_shows_what_was_written_last() {
    for plan in plans(600) {
        counted(plan);
    }
}
