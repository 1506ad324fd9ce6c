//! The kernel's cached replies under a scheduler that tries interleavings: programs of the mount look at an
//! inode, and have it changed by the daemon; another session wants its lease, changes the inode and lets it
//! go. What was changed is never seen as it was before. A program may run on a quarter of a second after its
//! reply was sent: the kernel counts from then. It calls again, or ends. The daemon is a model that grants
//! one lease at a time. Run by `cargo test -p varve-libfs --features shuttle --lib interleavings`.
#![allow(clippy::unwrap_used)]

use crate::lease::{Event, Leases, Node, Recalls, Surroundings, Use};
use crate::options::CacheObserver;
use crate::seeded::{self, Bug};
use crate::sync::SteppedClock;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use shuttle::thread;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo, LogSeq, SessionId};
use varve_ipc::{
    Clock, DENTRY_TTL, DENTRY_TTL_MAX, Grant, IpcError, LeaseMode, Link, Page, Request, Response, Upcall,
};

const FILE: InodeKey = InodeKey::new(5, 1);

/// How much later than its reply a program may run on.
const LATE_MS: u64 = (DENTRY_TTL_MAX.as_millis() - DENTRY_TTL.as_millis() - 20) as u64;

/// The daemon's state of the one inode.
#[derive(Default)]
struct Book {
    /// The session's lease.
    held: Option<LeaseNo>,
    granted: u64,
    /// The other session wants the inode, or has it.
    other: bool,
    /// The daemon has it for an operation of its own.
    internal: bool,
    /// Until when the kernel may use replies, as the session has told.
    cached_until_ms: u64,
}

#[derive(Default)]
struct Daemon(Mutex<Book>, Arc<SteppedClock>);

impl Link for Daemon {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        let answer = match request {
            Request::Acquire { .. } | Request::AcquireNear { .. } => loop {
                let mut book = self.0.lock().unwrap();
                if !(book.other || book.internal) || book.held.is_some() {
                    let fresh = LeaseNo(book.granted + 1);
                    book.granted += u64::from(book.held.is_none());
                    let grant = Grant {
                        lease: *book.held.get_or_insert(fresh),
                        mode: LeaseMode::Read,
                        replaces: None,
                        attr: InodeAttr::new(FILE, 0o100_644, 0),
                        told: varve_ipc::Told::default(),
                    };
                    break Response::Granted(vec![grant]);
                }
                drop(book);
                thread::yield_now();
            },
            Request::Release { items } => {
                let mut book = self.0.lock().unwrap();
                if let Some(item) = items.iter().find(|item| Some(item.lease) == book.held) {
                    book.held = None;
                    let until_ms = self.1.monotonic_ms() + u64::from(item.cached_ms);
                    book.cached_until_ms = book.cached_until_ms.max(until_ms);
                }
                Response::Done
            }
            other => panic!("{other:?}"),
        };
        // The answer is on its way.
        thread::yield_now();
        Ok(answer)
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

/// Which programs are in a call.
#[derive(Default)]
struct Programs(Mutex<BTreeSet<u32>>);

impl CacheObserver for Programs {
    fn invalidate_data(&self, _: InodeKey, _: u64, _: u64) {}

    fn invalidate_unless_locked(&self, _: InodeKey, _: u64, _: u64) {}

    fn has_ended(&self, thread: u32) -> bool {
        !self.0.lock().unwrap().contains(&thread)
    }
}

struct Around(Arc<Programs>);

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
        Some(Arc::clone(&self.0) as _)
    }
}

struct World {
    clock: Arc<SteppedClock>,
    programs: Arc<Programs>,
    /// Programs take their replies in late, and give signs.
    late: bool,
    /// Numbers of programs so far.
    numbers: AtomicU32,
    leases: Arc<Leases>,
    daemon: Arc<Daemon>,
    /// What is changed.
    truth: AtomicU64,
    /// The last change whose call has returned.
    acknowledged: AtomicU64,
    /// The last change that a program of the mount made.
    own_change: AtomicU64,
    /// What the kernel caches, and until when.
    cached: Mutex<Option<(u64, u64)>>,
    over: AtomicU64,
}

impl World {
    /// Programs of the mount look, `times` times; after each, the program calls once more, or ends and
    /// another looks, or does neither.
    fn look(&self, times: usize) {
        let mut program = self.start();
        for _ in 0..times {
            self.look_once(program);
            match if self.late {
                thread_rng().gen_range(0..3)
            } else {
                2
            } {
                0 => self.leases.threads().calls(program),
                1 => {
                    self.programs.0.lock().unwrap().remove(&program);
                    thread::yield_now();
                    program = self.start();
                }
                _ => {}
            }
            self.clock.pause(Duration::from_millis(30));
        }
        self.programs.0.lock().unwrap().remove(&program);
    }

    fn start(&self) -> u32 {
        let number = self.numbers.fetch_add(1, Ordering::SeqCst) + 1;
        self.programs.0.lock().unwrap().insert(number);
        number
    }

    fn look_once(&self, program: u32) {
        let least = self.acknowledged.load(Ordering::SeqCst);
        let known = *self.cached.lock().unwrap();
        if let Some((seen, until_ms)) = known
            && self.clock.monotonic_ms() < until_ms
        {
            assert!(seen >= least, "{seen} is cached, it was {least} before");
            return;
        }
        self.leases.threads().calls(program);
        let recalls = self.leases.recalls();
        let pin = self
            .leases
            .pin_one::<()>(FILE, LeaseMode::Read, Use::Own)
            .unwrap();
        let seen = self.truth.load(Ordering::SeqCst);
        drop(pin);
        assert!(seen >= least);
        thread::yield_now();
        let reply = self.leases.begin_reply(recalls, program, None, Some(FILE));
        thread::yield_now();
        let ttl_ms = reply.attr_ttl().as_millis() as u64;
        let sent_ms = self.clock.monotonic_ms();
        drop(reply);
        // Time passes, also by what others do; the kernel has counted from the latest allowed moment at most.
        if self.late {
            let late_ms = thread_rng().gen_range(0..3) * LATE_MS / 2;
            self.clock.pause(Duration::from_millis(late_ms));
        }
        if ttl_ms > 0 {
            let begun_ms = self.clock.monotonic_ms().min(sent_ms + LATE_MS);
            let mut cached = self.cached.lock().unwrap();
            // As by FUSE's `attr_version`: a reply from before the kernel's own change does not undo that.
            if seen >= self.own_change.load(Ordering::SeqCst) {
                *cached = Some((seen, begun_ms + ttl_ms));
            }
        }
    }

    /// The other session changes the inode.
    fn visit(&self) {
        loop {
            let mut book = self.daemon.0.lock().unwrap();
            book.other = true;
            let held = book.held;
            if held.is_none() && !book.internal {
                break;
            }
            drop(book);
            if let Some(number) = held {
                self.leases.tell(Event::Revoke {
                    key: FILE,
                    number,
                    only_read: false,
                });
            }
            self.clock.pause(Duration::from_millis(20));
        }
        let until_ms = self.daemon.0.lock().unwrap().cached_until_ms;
        while self.clock.monotonic_ms() < until_ms {
            self.clock.pause(Duration::from_millis(20));
        }
        let change = self.truth.fetch_add(1, Ordering::SeqCst) + 1;
        self.acknowledged.fetch_max(change, Ordering::SeqCst);
        thread::yield_now();
        self.daemon.0.lock().unwrap().other = false;
        // Until replies get a timeout again.
        self.clock.pause(Duration::from_secs(61));
    }

    /// A program of the mount changes the inode, and the daemon does it: the kernel knows of its own call.
    fn change_by_daemon(&self) {
        loop {
            self.leases.give_back::<()>(&[FILE]).unwrap();
            let mut book = self.daemon.0.lock().unwrap();
            if book.held.is_none() && !book.other {
                book.internal = true;
                break;
            }
            drop(book);
            thread::yield_now();
        }
        let change = self.truth.fetch_add(1, Ordering::SeqCst) + 1;
        thread::yield_now();
        self.daemon.0.lock().unwrap().internal = false;
        let mut cached = self.cached.lock().unwrap();
        *cached = cached.filter(|(seen, _)| *seen >= change);
        self.own_change.fetch_max(change, Ordering::SeqCst);
        drop(cached);
        self.acknowledged.fetch_max(change, Ordering::SeqCst);
        self.clock.pause(Duration::from_millis(30));
    }
}

fn changes_are_seen() {
    try_changes(false, true);
}

fn changes_are_seen_by_late_programs() {
    try_changes(true, true);
}

/// Without changes of the mount's own, which hide most of what may go wrong.
fn others_changes_are_seen_by_late_programs() {
    try_changes(true, false);
}

fn try_changes(late: bool, own_changes: bool) {
    let clock = Arc::new(SteppedClock::default());
    let daemon = Arc::new(Daemon(Mutex::default(), Arc::clone(&clock)));
    let (events, inbox) = crossbeam_channel::unbounded();
    let leases = Leases::new(
        Arc::clone(&daemon) as Arc<dyn Link>,
        Arc::new(Page::heap(SessionId(1))),
        events.clone(),
        crossbeam_channel::unbounded().0,
        64,
        true,
    );
    let leases = Arc::new(leases.with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let world = Arc::new(World {
        clock,
        programs: Arc::default(),
        late,
        numbers: AtomicU32::new(0),
        leases: Arc::clone(&leases),
        daemon,
        truth: AtomicU64::new(0),
        acknowledged: AtomicU64::new(0),
        own_change: AtomicU64::new(0),
        cached: Mutex::new(None),
        over: AtomicU64::new(0),
    });
    let worker = {
        let world = Arc::clone(&world);
        let mut recalls = Recalls::new(leases, events, 100_000);
        let around = Around(Arc::clone(&world.programs));
        thread::spawn(move || {
            while world.over.load(Ordering::SeqCst) == 0 {
                // Others may come faster than they are taken.
                for event in inbox.try_iter().take(4) {
                    recalls.take(event, &around);
                }
                recalls.tick(&around);
                recalls.flush(&around).unwrap();
                world.clock.pause(Duration::from_millis(10));
            }
        })
    };
    let start = |work: fn(&World)| {
        let world = Arc::clone(&world);
        thread::spawn(move || work(&world))
    };
    let mut threads = vec![
        start(|world| world.look(4)),
        start(|world| world.look(4)),
        start(|world| (0..2).for_each(|_| world.visit())),
    ];
    if own_changes {
        threads.push(start(|world| (0..2).for_each(|_| world.change_by_daemon())));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    world.over.store(1, Ordering::SeqCst);
    worker.join().unwrap();
}

#[test]
fn what_another_session_has_changed_is_never_seen_as_it_was_before() {
    shuttle::check_random(changes_are_seen, 5_000);
    shuttle::check_pct(changes_are_seen, 5_000, 3);
}

#[test]
fn what_another_session_has_changed_is_never_seen_as_it_was_before_by_late_programs() {
    shuttle::check_random(changes_are_seen_by_late_programs, 3_000);
    shuttle::check_pct(changes_are_seen_by_late_programs, 3_000, 3);
}

#[test]
fn lease_that_is_released_before_replies_have_expired_is_caught() {
    assert!(seeded::is_found(Bug::RecallBeforeExpiry, &[changes_are_seen]));
}

#[test]
fn lease_that_is_released_without_a_word_on_what_is_cached_is_caught() {
    assert!(seeded::is_found(Bug::CachedNotTold, &[changes_are_seen]));
}

#[test]
fn reply_after_a_recall_since_its_operation_is_caught() {
    assert!(seeded::is_found(Bug::ReplyAcrossRecall, &[changes_are_seen]));
}

#[test]
fn sign_of_another_thread_is_caught() {
    assert!(seeded::is_found(
        Bug::SignOfAnother,
        &[others_changes_are_seen_by_late_programs]
    ));
}
