//! Messages between a session and the daemon about leases, in rare orders: each test plays one through by
//! hand.
#![allow(clippy::unwrap_used)]

mod prefetch;
mod replies;

use super::node::{Node, Phase, Use};
use super::recall::{Event, Recalls, Surroundings};
use super::table::{Leases, Revoked};
use crate::dir::Target;
use crate::errno::{Errno, OpError};
use crate::kernel_cache::pages::{Above, KernelCall, PageUse};
use crate::options::CacheObserver;
#[cfg(all(feature = "test-support", debug_assertions))]
use crate::seeded::{self, Bug};
use crossbeam_channel::Receiver;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;
use varve_format::{FileKind, InodeAttr, InodeKey, LeaseNo, LogSeq, SessionId};
use varve_ipc::{
    Clock, IpcError, LeaseMode, Link, NUMBERS_MAX, Near, Page, RELEASED_MAX, ReleaseItem, Request, Response,
    SessionPage, SystemClock, Told, Upcall, Want,
};
use varve_media::lock::Mutex;

const DIR: InodeKey = InodeKey::new(5, 1);

fn now() -> Duration {
    SystemClock.moment()
}

type Answer = Box<dyn Fn(&Request) -> Response + Send + Sync>;

/// The daemon's answers, and the releases that it received; `at_release` runs after each.
#[derive(Default)]
struct Script {
    answer: OnceLock<Answer>,
    at_release: OnceLock<Box<dyn Fn() + Send + Sync>>,
    released: Mutex<Vec<ReleaseItem>>,
}

impl Link for Script {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        if let Request::Release { items } = &request {
            self.released.lock().extend(items);
            if let Some(at_release) = self.at_release.get() {
                at_release();
            }
            return Ok(Response::Done);
        }
        Ok(self.answer.get().unwrap()(&request))
    }

    fn upcall(&self, _: Duration) -> Result<Option<Upcall>, IpcError> {
        Ok(None)
    }
}

/// A session whose log ends at 9; `at_end` runs when the end is asked for.
#[derive(Default)]
struct Around {
    at_end: OnceLock<Box<dyn Fn() + Send + Sync>>,
    caches: Option<Arc<Caches>>,
}

/// Ranges of a file that the kernel was told to drop.
#[derive(Default)]
struct Caches(Mutex<Vec<(u64, u64)>>, Mutex<Vec<u32>>);

impl CacheObserver for Caches {
    fn invalidate_data(&self, _: InodeKey, offset: u64, len: u64) {
        self.0.lock().push((offset, len));
    }

    fn invalidate_unless_locked(&self, _: InodeKey, _: u64, _: u64) {
        panic!("no page of these tests is both");
    }

    fn has_ended(&self, thread: u32) -> bool {
        self.1.lock().contains(&thread)
    }
}

impl Surroundings for Around {
    fn last_seq(&self, node: &Node) -> LogSeq {
        node.inode.last_seq(LogSeq(9))
    }

    fn log_last(&self) -> LogSeq {
        if let Some(at_end) = self.at_end.get() {
            at_end();
        }
        LogSeq(9)
    }

    fn is_open(&self, _: InodeKey) -> bool {
        false
    }

    fn observer(&self) -> Option<Arc<dyn CacheObserver>> {
        let caches = self.caches.clone()?;
        Some(caches as Arc<dyn CacheObserver>)
    }
}

struct Rig {
    page: Arc<Page>,
    script: Arc<Script>,
    leases: Arc<Leases>,
    recalls: Recalls,
    inbox: Receiver<Event>,
    asked: Receiver<Weak<Node>>,
    around: Around,
}

fn rig() -> Rig {
    rig_below(false)
}

/// Returns a write lease that is being given back.
fn releasing() -> (Rig, Arc<Node>) {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.revoke(1);
    assert_eq!(node.state().phase, Phase::Releasing);
    (rig, node)
}

/// With or without a kernel above.
fn rig_below(kernel: bool) -> Rig {
    let (events, inbox) = crossbeam_channel::unbounded();
    let (asks, asked) = crossbeam_channel::unbounded();
    let script = Arc::new(Script::default());
    let page = Arc::new(Page::heap(SessionId(1)));
    let link = Arc::clone(&script) as Arc<dyn Link>;
    let shown = Arc::clone(&page) as Arc<dyn SessionPage>;
    let leases = Arc::new(Leases::new(link, shown, events.clone(), asks, 64, kernel));
    Rig {
        page,
        recalls: Recalls::new(Arc::clone(&leases), events, 1000),
        script,
        leases,
        inbox,
        asked,
        around: Around::default(),
    }
}

impl Rig {
    /// A directory that is held in `mode` under grant 1.
    fn held(&self, mode: LeaseMode) -> Arc<Node> {
        let node = Arc::new(Node::new(dir_attr()));
        drop(self.leases.adopt(Arc::clone(&node), LeaseNo(1)));
        let mut state = node.state();
        state.mode = Some(mode);
        node.publish(&state, false);
        drop(state);
        node
    }

    fn take(&mut self, event: Event) {
        self.recalls.take(event, &self.around);
    }

    /// The daemon recalls grant `number` of the directory.
    fn revoke(&mut self, number: u64) {
        self.take(Event::Revoke {
            key: DIR,
            number: LeaseNo(number),
            only_read: false,
        });
    }

    /// The directory gets [`numbers`].
    fn get_numbers(&self, node: &Arc<Node>) {
        let answer: Answer = Box::new(|_| Response::Inodes(numbers()));
        let _ = self.script.answer.set(answer);
        self.leases.alloc::<()>(node).unwrap();
    }

    fn flush(&mut self) {
        self.recalls.flush(&self.around).unwrap();
    }

    fn released(&self) -> Vec<(InodeKey, LeaseNo)> {
        let items = self.script.released.lock();
        items.iter().map(|item| (item.key, item.lease)).collect()
    }
}

fn dir_attr() -> InodeAttr {
    InodeAttr::new(DIR, 0o040_755, 0)
}

fn install(node: &Node, number: u64, mode: LeaseMode, replaces: Option<u64>) -> bool {
    node.install(
        LeaseNo(number),
        mode,
        replaces.map(LeaseNo),
        Some((dir_attr(), Told::default())),
        true,
    )
}

fn know(node: &Node, name: &[u8]) {
    let target = Target {
        key: InodeKey::new(9, 1),
        kind: FileKind::Regular,
    };
    node.names.lock().learn(name, Some(target), LogSeq(0));
}

fn knows(node: &Node, name: &[u8]) -> bool {
    node.names.lock().get(name).is_some()
}

/// The daemon answers that grant 1 is still held, and recalls it at once. The request that asked must not go
/// on under it: the last entry that the release names is already decided.
#[test]
fn grant_that_is_being_given_back_is_not_pinned_by_an_answer_that_names_it_again() {
    let (mut rig, node) = releasing();
    assert!(!install(&node, 1, LeaseMode::Write, None));
    assert_eq!(node.pins(), 0);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1))]);
    assert!(install(&node, 2, LeaseMode::Write, None));
}

#[test]
fn what_is_known_under_a_newer_grant_is_not_forgotten_with_the_older() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.revoke(1);
    let newer = Arc::clone(&node);
    let _ = rig.around.at_end.set(Box::new(move || {
        // Right after the older one is gone.
        if newer.mode().is_none() {
            assert!(install(&newer, 2, LeaseMode::Write, None));
            know(&newer, b"new");
        }
    }));
    rig.flush();
    assert_eq!(node.held_number(), Some(LeaseNo(2)));
    assert!(knows(&node, b"new"));
}

#[test]
fn grant_that_does_not_go_on_from_what_is_held_forgets_what_is_known() {
    let rig = rig();
    let node = rig.held(LeaseMode::Read);
    know(&node, b"old");
    assert!(install(&node, 3, LeaseMode::Write, Some(1)));
    assert!(knows(&node, b"old"), "nobody else had it in between");
    node.unpin();
    let node = self::rig().held(LeaseMode::Read);
    know(&node, b"old");
    assert!(install(&node, 3, LeaseMode::Write, None));
    assert!(!knows(&node, b"old"));
}

/// A recall of a grant that never came, twice: that grant replaced the read lease, so the read lease is not
/// held either.
#[test]
fn read_lease_goes_with_the_grant_that_replaced_it_and_never_came() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Read);
    know(&node, b"old");
    node.waiters.store(1, Ordering::SeqCst);
    for _ in 0..2 {
        rig.revoke(2);
    }
    node.waiters.store(0, Ordering::SeqCst);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(2)), (DIR, LeaseNo(1))]);
    assert!(node.mode().is_none() && !knows(&node, b"old"));
    assert!(!install(&node, 2, LeaseMode::Write, Some(1)), "it comes too late");
}

#[test]
fn recall_that_a_newer_grant_overtakes_is_not_sent() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Read);
    rig.take(Event::GiveBack {
        key: DIR,
        number: LeaseNo(1),
    });
    assert!(install(&node, 2, LeaseMode::Write, Some(1)));
    rig.take(Event::Look(DIR));
    assert_eq!(node.state().phase, Phase::Settled);
    rig.flush();
    assert!(rig.released().is_empty());
    // The request that has it pinned ends, and it is given back when it is recalled.
    rig.revoke(2);
    rig.flush();
    assert!(rig.released().is_empty(), "it is pinned");
    assert!(node.unpin());
    rig.take(Event::Look(DIR));
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(2))]);
}

#[test]
fn request_to_give_back_an_older_grant_leaves_a_newer_one() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.take(Event::GiveBack {
        key: DIR,
        number: LeaseNo(0),
    });
    rig.flush();
    assert_eq!(node.held_number(), Some(LeaseNo(1)));
    assert!(rig.released().is_empty());
}

#[test]
fn who_waits_for_an_older_grant_is_not_woken_before_the_newer_one_is_given_back() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.take(Event::GiveBack {
        key: DIR,
        number: LeaseNo(1),
    });
    // On its way, not sent yet. A request waits for the previous grant, which this one replaced.
    let waits = {
        let node = Arc::clone(&node);
        thread::spawn(move || node.wait_given_back(&SystemClock, LeaseNo(0), Duration::from_secs(60)))
    };
    for _ in 0..10 {
        thread::sleep(Duration::from_millis(10));
        rig.take(Event::GiveBack {
            key: DIR,
            number: LeaseNo(0),
        });
    }
    assert!(!waits.is_finished(), "woken while the lease is still on its way");
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1))]);
    assert!(waits.join().unwrap(), "it is given back");
}

/// Grant 2, which never came, is recalled while grant 1, which it replaced, is in use.
fn successor_wanted_back() -> (Rig, Arc<Node>) {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Read);
    assert!(node.try_pin(LeaseMode::Read));
    rig.revoke(2);
    rig.flush();
    (rig, node)
}

/// A write lease replaced a read lease and was recalled before its answer was read. It went at once, and
/// other sessions wrote while the kernel still showed pages that were read under the read lease.
#[test]
fn grant_that_never_came_goes_after_what_was_read_under_the_one_before() {
    let (mut rig, node) = successor_wanted_back();
    assert_eq!(rig.released(), [], "grant 1 is in use");
    assert!(node.unpin(), "somebody waits for that");
    rig.take(Event::Look(DIR));
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(2)), (DIR, LeaseNo(1))]);
    let late = node.install(LeaseNo(2), LeaseMode::Write, Some(LeaseNo(1)), None, false);
    assert!(!late, "it is gone");
    // Nothing is left of it: it goes at once.
    rig.revoke(3);
    rig.flush();
    assert_eq!(rig.released().last(), Some(&(DIR, LeaseNo(3))));
}

#[cfg(all(feature = "test-support", debug_assertions))]
#[test]
fn grant_that_goes_before_the_one_whose_place_it_took_is_caught() {
    seeded::arm(Some(Bug::SuccessorAhead));
    let (rig, _) = successor_wanted_back();
    seeded::arm(None);
    assert_eq!(
        rig.released(),
        [(DIR, LeaseNo(2))],
        "grant 1 is in use all the same"
    );
}

fn numbers() -> Vec<(InodeKey, LeaseNo)> {
    (0..4_u64)
        .map(|n| (InodeKey::new(100 + n, 1), LeaseNo(50 + n)))
        .collect()
}

#[test]
fn number_that_is_called_back_before_its_answer_is_read_is_not_used() {
    let rig = rig();
    let node = rig.held(LeaseMode::Write);
    let leases = Arc::downgrade(&rig.leases);
    let _ = rig.script.answer.set(Box::new(move |_| {
        let (key, lease) = numbers()[2];
        let said = leases.upgrade().unwrap().revoked(key, lease);
        assert!(matches!(said, Revoked::Unknown { replaced: None }));
        Response::Inodes(numbers())
    }));
    rig.leases.alloc::<()>(&node).unwrap();
    let mut taken = Vec::new();
    while let Some(number) = rig.leases.take_number(&node) {
        taken.push(number.0.ino.0);
    }
    assert_eq!(taken, [100, 101, 103]);
}

#[test]
fn number_that_is_called_back_in_use_goes_when_it_is_put_back() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.get_numbers(&node);
    let number = rig.leases.take_number(&node).unwrap();
    let wanted = Event::Revoke {
        key: number.0,
        number: number.1,
        only_read: false,
    };
    rig.take(wanted);
    rig.flush();
    assert!(rig.released().is_empty(), "it is in use");
    rig.leases.put_number_back(&node, number);
    let again = rig.inbox.try_recv().unwrap();
    rig.take(again);
    rig.flush();
    assert_eq!(rig.released(), [number]);
    assert_eq!(rig.leases.take_number(&node).unwrap().0.ino.0, 101);
}

#[test]
fn spare_numbers_go_with_the_lease_of_their_directory() {
    let mut rig = rig();
    let node = rig.held(LeaseMode::Write);
    rig.get_numbers(&node);
    rig.revoke(1);
    rig.flush();
    let released = rig.released();
    assert_eq!(released[0], (DIR, LeaseNo(1)));
    assert_eq!(released.len(), 5);
    assert!(rig.leases.take_number(&node).is_none());
}

/// Pages that the kernel reads during a drop are dropped as well, and the drop does not wait for a write that
/// waits with its page locked.
#[test]
fn lease_goes_when_the_kernel_has_dropped_all_but_what_waits() {
    let mut rig = rig();
    let caches = Arc::new(Caches::default());
    rig.around.caches = Some(Arc::clone(&caches));
    let told = |rig: &Rig| {
        let event = rig.inbox.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(matches!(event, Event::Dropped(..)));
        (event, std::mem::take(&mut *caches.0.lock()))
    };
    let node = rig.held(LeaseMode::Read);
    let read = KernelCall::new(PageUse::Read, 1, 0, 4096);
    assert!(!rig.leases.may_look(&Node::new(dir_attr()), Use::Kernel(&read)));
    assert!(rig.leases.may_look(&node, Use::Kernel(&read)));
    rig.revoke(1);
    let (dropped, ranges) = told(&rig);
    assert_eq!(ranges, [(0, 0)]);
    // It reads meanwhile: once more.
    assert!(rig.leases.may_look(&node, Use::Kernel(&read)));
    rig.take(dropped);
    let (overtaken, ranges) = told(&rig);
    assert_eq!((ranges, rig.released()), (vec![(0, 0)], vec![]));
    // A write needs more than the held lease and waits, with its last page locked: the drop skips that page.
    let write = KernelCall::new(PageUse::Write, 2, 3 * 4096, 10);
    let held = rig.leases.hold(&node, &write);
    rig.take(rig.inbox.try_recv().unwrap());
    let (dropped, ranges) = told(&rig);
    assert_eq!(ranges, [(0, 3 * 4096), (4 * 4096, 0)]);
    rig.take(overtaken);
    rig.flush();
    assert_eq!(
        rig.released(),
        [],
        "a drop that may wait for the write says nothing"
    );
    rig.take(dropped);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1))]);
    drop(held);
    assert!(!node.above.any());
}

/// The wait for a kernel that does not drop its pages is shorter than the daemon's; the kernel is told once
/// more when the lease is gone.
#[test]
fn lease_goes_when_the_kernel_takes_too_long() {
    let mut rig = rig();
    let caches = Arc::new(Caches::default());
    rig.around.caches = Some(Arc::clone(&caches));
    let node = rig.held(LeaseMode::Read);
    let read = KernelCall::new(PageUse::Read, 1, 0, 4096);
    assert!(rig.leases.may_look(&node, Use::Kernel(&read)));
    rig.revoke(1);
    assert!(rig.recalls.has_passes());
    rig.recalls.tick(&rig.around);
    rig.flush();
    assert_eq!(rig.released(), []);
    std::thread::sleep(Duration::from_millis(510));
    rig.recalls.tick(&rig.around);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1))]);
    for _ in 0..2 {
        rig.inbox.recv_timeout(Duration::from_secs(60)).unwrap();
    }
    assert_eq!(*caches.0.lock(), [(0, 0), (0, 0)]);
}

/// Eighty files, where there is room for 64 leases.
fn too_many(rig: &Rig) {
    for n in 0..80 {
        let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(100 + n, 1), 0o100_644, 0)));
        drop(rig.leases.adopt(node, LeaseNo(100 + n)));
    }
}

#[test]
fn directory_is_the_last_to_be_given_back_for_want_of_room() {
    let rig = rig();
    let dir = rig.held(LeaseMode::Write);
    too_many(&rig);
    for _ in 0..3 {
        let idle = rig.leases.idle(0);
        assert_eq!(idle.len(), 81 - 56);
        assert!(idle.iter().all(|node| node.key() != dir.key()));
    }
    assert!(matches!(rig.inbox.try_iter().last(), Some(Event::Trim)));
}

#[test]
fn leases_of_the_dead_are_not_given_back_for_want_of_room() {
    let rig = rig();
    let dir = rig.held(LeaseMode::Write);
    for n in 0..200 {
        let mut attr = InodeAttr::new(InodeKey::new(100 + n, 1), 0o100_644, 0);
        attr.nlink = 0;
        let node = Arc::new(Node::new(attr));
        drop(rig.leases.adopt(Arc::clone(&node), LeaseNo(100 + n)));
        rig.leases.bury(node.key(), LogSeq(1 + n));
    }
    assert!(!rig.inbox.try_iter().any(|event| matches!(event, Event::Trim)));
    assert!(rig.leases.idle(0).is_empty());
    // If too many leases on living inodes are held, those are given back.
    for n in 0..80 {
        let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(500 + n, 1), 0o100_644, 0)));
        drop(rig.leases.adopt(node, LeaseNo(500 + n)));
    }
    assert!(rig.inbox.try_iter().any(|event| matches!(event, Event::Trim)));
    let idle = rig.leases.idle(0);
    assert_eq!(idle.len(), 81 - 56);
    assert!(
        idle.iter()
            .all(|node| node.key().ino.0 >= 500 && node.key() != dir.key())
    );
    // Digested, they are not counted any more.
    rig.page.set_digested(LogSeq(1000));
    rig.leases.bury(idle[0].key(), LogSeq(1001));
    assert_eq!(rig.leases.idle(0).len(), 81 - 56 - 1);
}

#[test]
fn leases_on_their_way_back_are_not_trimmed_for_again() {
    let mut rig = rig();
    let dir = rig.held(LeaseMode::Write);
    too_many(&rig);
    // New files ask for it again before the first answer.
    for _ in 0..4 {
        rig.take(Event::Trim);
    }
    // Nor are the others searched for each lease that comes meanwhile: one that was used since would soon
    // seem idle.
    let one = Arc::new(Node::new(InodeAttr::new(InodeKey::new(500, 1), 0o100_644, 0)));
    drop(rig.leases.adopt(one, LeaseNo(500)));
    assert!(rig.leases.idle(81 - 56).is_empty());
    rig.flush();
    assert_eq!(rig.released().len(), 81 - 56);
    assert!(dir.mode().is_some());
}

#[test]
fn directory_that_uses_up_its_numbers_is_given_more_ahead() {
    let mut rig = rig();
    let dir = rig.held(LeaseMode::Write);
    let next = AtomicU64::new(100);
    let counts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&counts);
    let _ = rig.script.answer.set(Box::new(move |request| {
        let Request::AllocInodes { count, .. } = request else {
            return Response::Done;
        };
        seen.lock().push(*count);
        let first = next.fetch_add(u64::from(*count), Ordering::Relaxed);
        let range = first..first + u64::from(*count);
        Response::Inodes(range.map(|n| (InodeKey::new(n, 1), LeaseNo(n))).collect())
    }));
    let mut used = 0;
    for _ in 0..32_000 {
        let number = match rig.leases.take_number(&dir) {
            Some(number) => number,
            None => {
                rig.leases.alloc::<()>(&dir).unwrap();
                rig.leases.take_number(&dir).unwrap()
            }
        };
        assert_eq!(number.0.ino.0, 100 + used, "in order, and each once");
        used += 1;
        rig.leases.unreserve(number.0);
        // As the thread for it does.
        for dir in rig.asked.try_iter() {
            rig.leases.ask_ahead(&dir.upgrade().unwrap());
        }
    }
    let counts = std::mem::take(&mut *counts.lock());
    assert_eq!(counts[..5], [16, 32, 64, 128, 256]);
    assert_eq!(counts.iter().max(), Some(&NUMBERS_MAX));
    assert!(counts.len() < 20, "{counts:?}");
    // A directory that goes takes them with it, and begins anew. Some are given back at a time: a thread that
    // waits for a lease meanwhile must not wait for them.
    rig.revoke(1);
    rig.flush();
    let spare = counts.iter().map(|count| u64::from(*count)).sum::<u64>() - used;
    assert!(spare > RELEASED_MAX as u64 && rig.recalls.has_left());
    assert!(rig.released().len() <= RELEASED_MAX);
    let _held_again = rig.held(LeaseMode::Write);
    rig.revoke(1);
    let before = rig.released().len();
    rig.flush();
    assert_eq!(rig.released()[before], (DIR, LeaseNo(1)));
    while rig.recalls.has_left() {
        rig.flush();
    }
    assert_eq!(rig.released().len() as u64, 2 + spare);
    rig.leases.ask_ahead(&dir);
    assert!(rig.leases.take_number(&dir).is_none(), "it is not held");
    assert_eq!(dir.numbers.lock().asked, 0);
}

#[test]
fn threads_that_find_no_number_ask_once_together() {
    let rig = rig();
    let dir = rig.held(LeaseMode::Write);
    let asked = Arc::new(AtomicU64::new(0));
    let (leases, seen) = (Arc::clone(&rig.leases), Arc::clone(&asked));
    let _ = rig.script.answer.set(Box::new(move |request| {
        let Request::AllocInodes { count, .. } = request else {
            return Response::Done;
        };
        let asks = seen.fetch_add(1, Ordering::Relaxed);
        // So that the others come upon a directory without numbers.
        std::thread::sleep(Duration::from_millis(20));
        let first = 100 + 1000 * asks;
        let range = first..first + u64::from(*count);
        Response::Inodes(range.map(|n| (InodeKey::new(n, 1), LeaseNo(n))).collect())
    }));
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let (leases, dir) = (Arc::clone(&leases), Arc::clone(&dir));
            std::thread::spawn(move || {
                loop {
                    if let Some(number) = leases.take_number(&dir) {
                        return number.0;
                    }
                    leases.provide::<()>(&dir).unwrap();
                }
            })
        })
        .collect();
    let mut taken: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    taken.sort_unstable();
    taken.dedup();
    assert_eq!(taken.len(), 8, "each its own");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
}

#[test]
fn inode_without_names_is_forgotten_when_its_last_entry_is_digested() {
    let mut rig = rig();
    let files: Vec<_> = (0..3_u64)
        .map(|n| {
            let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(100 + n, 1), 0o100_644, 0)));
            let pins = rig.leases.adopt(Arc::clone(&node), LeaseNo(100 + n));
            (node, pins)
        })
        .map(|(node, pins)| {
            drop(pins);
            node.key()
        })
        .collect();
    rig.leases.bury(files[0], LogSeq(5));
    rig.leases.bury(files[1], LogSeq(7));
    let known = |rig: &Rig| files.iter().filter(|key| rig.leases.get(**key).is_some()).count();
    assert_eq!(known(&rig), 3, "nothing is digested");
    rig.page.set_digested(LogSeq(6));
    rig.leases.bury(files[2], LogSeq(9));
    assert_eq!(known(&rig), 2);
    // The daemon recalls one all the same: another session has the file open.
    rig.take(Event::Revoke {
        key: files[0],
        number: LeaseNo(100),
        only_read: false,
    });
    rig.flush();
    assert_eq!(rig.released(), [(files[0], LeaseNo(100))]);
}

#[test]
fn dead_inode_goes_at_once_and_is_stale_until_the_daemon_knows() {
    let mut rig = rig();
    let make = |n: u64| {
        let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(n, 1), 0o100_644, 0)));
        drop(rig.leases.adopt(Arc::clone(&node), LeaseNo(n)));
        node
    };
    let (gone, kept) = (make(100).key(), make(101));
    assert!(rig.leases.take_down(gone).is_none(), "it is not dead");
    rig.leases.bury(gone, LogSeq(5));
    rig.leases.bury(kept.key(), LogSeq(6));
    assert!(rig.leases.take_down(gone).is_some());
    assert!(
        rig.leases.take_down(kept.key()).is_none(),
        "somebody refers to it"
    );
    assert!(rig.leases.get(gone).is_none() && rig.leases.get(kept.key()).is_some());
    // The daemon, which does not know of the removal, would report it as existing. (It is not asked: it has
    // no answer.)
    let pinned = rig.leases.pin_one::<()>(gone, LeaseMode::Read, Use::Own);
    assert!(matches!(pinned, Err(OpError::Failed(Errno(libc::ESTALE)))));
    drop(pinned);
    // It recalls the lease: entries logged under it count.
    rig.take(Event::Revoke {
        key: gone,
        number: LeaseNo(100),
        only_read: false,
    });
    rig.flush();
    let released = rig.script.released.lock().clone();
    assert_eq!((released[0].key, released[0].last_seq), (gone, LogSeq(9)));
    // When the removal is digested the daemon answers with its own state.
    rig.page.set_digested(LogSeq(6));
    rig.leases.bury(InodeKey::new(102, 1), LogSeq(9));
    let _ = rig.script.answer.set(Box::new(|_| Response::Done));
    let pinned = rig.leases.pin_one::<()>(gone, LeaseMode::Read, Use::Own);
    assert!(matches!(pinned, Err(OpError::Failed(Errno(libc::EIO)))));
}

#[test]
fn dead_inode_whose_lease_is_given_back_is_not_counted_twice() {
    let rig = rig();
    let before = rig.leases.living();
    let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(100, 1), 0o100_644, 0)));
    drop(rig.leases.adopt(Arc::clone(&node), LeaseNo(100)));
    rig.leases.bury(node.key(), LogSeq(5));
    // Given back while there is another reference to it: it stays here.
    let other = Arc::clone(&node);
    {
        let mut state = node.state();
        state.mode = None;
        node.publish(&state, false);
    }
    rig.leases.gone(node.key());
    let key = node.key();
    drop((node, other));
    assert!(rig.leases.get(key).is_some());
    assert!(rig.leases.take_down(key).is_none());
    assert_eq!(rig.leases.living(), before);
}

#[test]
fn inode_that_the_kernel_may_name_is_kept_until_it_forgets_it() {
    let rig = rig_below(true);
    for n in 0..3 {
        let node = Arc::new(Node::new(InodeAttr::new(InodeKey::new(100 + n, 1), 0o100_644, 0)));
        drop(rig.leases.adopt(Arc::clone(&node), LeaseNo(100 + n)));
        if n < 2 {
            let mut inode = node.inode.write();
            (inode.dead, inode.last_seq) = (true, LogSeq(5 + n));
        }
        rig.leases.bury(node.key(), LogSeq(5 + n));
    }
    let known = || {
        (0..3)
            .filter(|n| rig.leases.get(InodeKey::new(100 + n, 1)).is_some())
            .collect::<Vec<_>>()
    };
    rig.page.set_digested(LogSeq(9));
    rig.leases.bury(InodeKey::new(100, 1), LogSeq(5));
    assert_eq!(known(), [0, 1, 2], "the kernel may name them all");
    rig.leases.forgotten(InodeKey::new(102, 1));
    assert_eq!(known(), [0, 1, 2], "that one lives");
    rig.leases.forgotten(InodeKey::new(101, 1));
    assert_eq!(known(), [0, 2]);
    assert!(rig.released().is_empty(), "nothing is to be given back");
}

#[test]
fn write_past_the_pages_drops_only_what_was_read_meanwhile() {
    let above = Above::default();
    let past = |order, offset, dropped| KernelCall::new(PageUse::Direct { dropped }, order, offset, 4096);
    above.note(&KernelCall::new(PageUse::Read, 1, 0, 4096));
    // The kernel had dropped its pages, and nothing was read of this one.
    assert!(above.written(&past(2, 8 * 4096, true), now()).drops.is_empty());
    // A page read just before may have come after the drop.
    let overtaken = above.written(&past(2, 0, true), now());
    assert_eq!(overtaken.drops.len(), 1);
    // Also for a write beside it, until it is done.
    assert_eq!(above.written(&past(3, 0, true), now()).drops.len(), 1);
    above.forget(&overtaken.reads);
    assert!(above.written(&past(4, 0, true), now()).drops.is_empty());
    // An older kernel keeps pages that were read at any time.
    above.note(&KernelCall::new(PageUse::Read, 5, 0, 4096));
    assert_eq!(above.written(&past(6, 0, false), now()).drops.len(), 1);
}

#[test]
fn many_reads_are_not_forgotten_before_the_write_that_they_overtake() {
    let above = Above::default();
    let write = KernelCall::new(PageUse::Direct { dropped: true }, 1, 0, 4096);
    for read in 0..1_000 {
        above.note(&KernelCall::new(PageUse::Read, 2 + read, read * 4096, 4096));
    }
    assert_eq!(above.written(&write, now()).drops.len(), 1);
}
