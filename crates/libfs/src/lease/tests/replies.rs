//! Replies to the kernel that must not get a timeout, and recalls that must not wait again and again.

use super::{Answer, Around, Caches, Rig, Script};
use crate::kernel_cache::dentries::CachedReply;
use crate::kernel_cache::pages::{KernelCall, PageUse};
use crate::lease::node::{Node, Phase, Use};
use crate::lease::recall::{Event, Recalls};
use crate::lease::table::Leases;
use crate::options::CacheObserver;
use crate::sync::SteppedClock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use varve_format::{InodeAttr, InodeKey, LeaseNo, SessionId};
use varve_ipc::{
    Clock, DENTRY_TTL_MAX, DENTRY_TTL_TAKEN, Grant, LeaseMode, Link, Page, Request, Response, SessionPage,
};

const DIR: InodeKey = InodeKey::new(5, 1);
const FILE: InodeKey = InodeKey::new(9, 1);

struct World {
    rig: Rig,
    clock: Arc<SteppedClock>,
}

fn attr(key: InodeKey) -> InodeAttr {
    let mode = if key == FILE { 0o100_644 } else { 0o040_755 };
    InodeAttr {
        nlink: if key == FILE { 1 } else { 2 },
        ..InodeAttr::new(key, mode, 0)
    }
}

/// A session above which is a kernel, beside others; the daemon grants all it is asked for.
fn world() -> World {
    let (events, inbox) = crossbeam_channel::unbounded();
    let (asks, asked) = crossbeam_channel::unbounded();
    let script = Arc::new(Script::default());
    let granted = AtomicU64::new(0);
    let answer: Answer = Box::new(move |request| match request {
        Request::Acquire { wants } | Request::AcquireNear { wants, .. } => {
            let grant = |want: &varve_ipc::Want| Grant {
                lease: LeaseNo(granted.fetch_add(1, Ordering::SeqCst) + 1),
                mode: want.mode,
                replaces: None,
                attr: attr(want.key),
                told: varve_ipc::Told::default(),
            };
            Response::Granted(wants.iter().map(grant).collect())
        }
        other => panic!("{other:?}"),
    });
    let _ = script.answer.set(answer);
    let page = Arc::new(Page::heap(SessionId(1)));
    let clock = Arc::new(SteppedClock::default());
    let leases = Leases::new(
        Arc::clone(&script) as Arc<dyn Link>,
        Arc::clone(&page) as Arc<dyn SessionPage>,
        events.clone(),
        asks,
        64,
        true,
    );
    let leases = Arc::new(leases.with_clock(Arc::clone(&clock) as _));
    let rig = Rig {
        page,
        recalls: Recalls::new(Arc::clone(&leases), events, 5000),
        script,
        leases,
        inbox,
        asked,
        around: Around {
            caches: Some(Arc::new(Caches::default())),
            ..Around::default()
        },
    };
    World { rig, clock }
}

impl World {
    /// An operation sees the inode; returns its node.
    fn sees(&self, key: InodeKey) -> Arc<Node> {
        drop(
            self.rig
                .leases
                .pin_one::<()>(key, LeaseMode::Read, Use::Own)
                .unwrap(),
        );
        self.rig.leases.get(key).unwrap()
    }

    /// A reply about the inode that is not sent yet.
    fn replies(&self, key: InodeKey) -> CachedReply {
        self.replies_to(0, key)
    }

    /// As `replies`, to a thread.
    fn replies_to(&self, thread: u32, key: InodeKey) -> CachedReply {
        let reply = self
            .rig
            .leases
            .begin_reply(self.rig.leases.recalls(), thread, None, Some(key));
        assert!(!reply.attr_ttl().is_zero());
        reply
    }

    /// For how long the kernel may use replies that depend on the lease, as the daemon was told with it.
    fn told_ms(&self, key: InodeKey) -> u32 {
        let released = self.rig.script.released.lock();
        let last = released.iter().rfind(|item| item.key == key);
        last.unwrap().cached_ms
    }

    fn is_cached(&self, recalls: u64, dir: Option<InodeKey>, inode: Option<InodeKey>) -> bool {
        let reply = self.rig.leases.begin_reply(recalls, 0, dir, inode);
        !(reply.attr_ttl() + reply.name_ttl()).is_zero()
    }

    fn recalled(&mut self, key: InodeKey) {
        let number = self.rig.leases.get(key).unwrap().held_number().unwrap();
        self.rig.take(Event::Revoke {
            key,
            number,
            only_read: false,
        });
    }

    /// This session gives a lease back for want of room, as on `Event::Trim`.
    fn trimmed(&mut self, key: InodeKey) -> Arc<Node> {
        let node = self.rig.leases.get(key).unwrap();
        let number = node.held_number().unwrap();
        let around = &self.rig.around;
        self.rig.recalls.begin_unwanted(Arc::clone(&node), number, around);
        node
    }

    /// As `trimmed`, when a reply is in flight; a request that is slow to answer sees the inode before that is
    /// sent. Returns the node, and the number of recalls when the request began.
    fn sees_while_trimmed(&mut self, key: InodeKey) -> (Arc<Node>, u64) {
        let reply = self.replies(key);
        let node = self.trimmed(key);
        assert_eq!(node.state().phase, Phase::Expiring, "a reply is in flight");
        let slow = self.rig.leases.recalls();
        self.sees(key);
        drop(reply);
        (node, slow)
    }

    fn later(&mut self, ms: u64) {
        self.clock.pause(Duration::from_millis(ms));
        self.rig.recalls.tick(&self.rig.around);
        self.rig.flush();
    }
}

/// The recall has begun, and its lease may still be used. What is seen under it is no longer so when another
/// session had the inode meanwhile, and this session has it anew.
#[test]
fn attributes_read_under_an_expiring_lease_get_no_timeout_under_the_next_one() {
    let mut world = world();
    let recalls = world.rig.leases.recalls();
    let node = world.sees(FILE);
    assert!(world.is_cached(recalls, None, Some(FILE)), "fstat");
    world.recalled(FILE);
    assert_eq!(node.state().phase, Phase::Expiring);
    // A request that begins now, and is slow to answer.
    let slow = world.rig.leases.recalls();
    world.sees(FILE);
    world.later(400);
    assert!(node.mode().is_none());
    // The other session changes the file here, and returns. Another request takes the lease again.
    world.sees(FILE);
    // Until the inode is no longer contended.
    world.later(11_000);
    assert!(
        !world.is_cached(slow, None, Some(FILE)),
        "attributes from before the change are cached"
    );
    let recalls = world.rig.leases.recalls();
    assert!(world.is_cached(recalls, None, Some(FILE)), "a new one is");
}

/// As above; a request that waited at the daemon gets the next lease before the release has returned.
#[test]
fn attributes_read_before_a_release_get_no_timeout_under_a_lease_that_came_first() {
    let mut world = world();
    world.sees(FILE);
    let (node, slow) = world.sees_while_trimmed(FILE);
    let next = Arc::clone(&node);
    let _ = world.rig.script.at_release.set(Box::new(move || {
        let known = Some((attr(FILE), varve_ipc::Told::default()));
        assert!(next.install(LeaseNo(9), LeaseMode::Read, None, known, false));
    }));
    world.later(400);
    assert_eq!(node.held_number(), Some(LeaseNo(9)));
    assert_eq!(node.state().phase, Phase::Settled);
    assert!(
        !world.is_cached(slow, None, Some(FILE)),
        "attributes from before the change are cached"
    );
    let recalls = world.rig.leases.recalls();
    assert!(world.is_cached(recalls, None, Some(FILE)), "a new one is");
}

/// As above, in a lookup: for want of room (no other session wants it yet, so that there is no region).
#[test]
fn name_found_under_an_expiring_lease_that_was_trimmed_gets_no_timeout_under_the_next_one() {
    let mut world = world();
    world.sees(DIR);
    world.sees(FILE);
    let (node, slow) = world.sees_while_trimmed(DIR);
    // It waits for the inode's lease, say; meanwhile the directory's goes, the name too, and it comes back.
    world.later(400);
    assert!(node.mode().is_none());
    world.sees(DIR);
    assert!(
        !world.is_cached(slow, Some(DIR), Some(FILE)),
        "a name that is gone is cached"
    );
}

/// Files are removed all the time, say: what was read of others still holds.
#[test]
fn recall_of_one_inode_leaves_replies_about_others_alone() {
    let mut world = world();
    world.sees(DIR);
    world.sees(FILE);
    let recalls = world.rig.leases.recalls();
    let other = InodeKey::new(77, 1);
    world.sees(other);
    world.trimmed(other);
    world.rig.flush();
    assert!(world.is_cached(recalls, Some(DIR), Some(FILE)));
    let recalls = world.rig.leases.recalls();
    world.trimmed(FILE);
    world.rig.flush();
    world.sees(FILE);
    assert!(
        !world.is_cached(recalls, Some(DIR), Some(FILE)),
        "one of the two was recalled"
    );
    assert!(world.is_cached(recalls, Some(DIR), None));
}

/// As above, while the kernel drops pages: nothing was cached, so its directory is not contended.
#[test]
fn attributes_read_while_pages_are_dropped_get_no_timeout_under_the_next_lease() {
    let mut world = world();
    world.sees(DIR);
    world.sees(FILE);
    let node = world.rig.leases.get(FILE).unwrap();
    let call = KernelCall::new(PageUse::Read, 1, 0, 4096);
    drop(
        world
            .rig
            .leases
            .pin_one::<()>(FILE, LeaseMode::Read, Use::Kernel(&call))
            .unwrap(),
    );
    world.recalled(FILE);
    assert_eq!(node.state().phase, Phase::Dropping);
    let slow = world.rig.leases.recalls();
    world.sees(FILE);
    for _ in 0..100 {
        if node.mode().is_none() {
            break;
        }
        if let Ok(event) = world.rig.inbox.recv_timeout(Duration::from_millis(100)) {
            world.rig.take(event);
        }
        world.rig.flush();
    }
    assert!(node.mode().is_none());
    world.sees(FILE);
    assert!(
        !world.is_cached(slow, Some(DIR), Some(FILE)),
        "attributes from before the change are cached"
    );
}

/// A program of the mount has the file open since the session before (or by a handle, or `O_PATH`), so its
/// directory is not known here; it looks at it with `fstat`. Another session wants it again and again.
#[test]
fn inode_whose_directory_is_not_known_is_waited_for_once() {
    let mut world = world();
    let mut waits = 0;
    for _ in 0..5 {
        let recalls = world.rig.leases.recalls();
        let node = world.sees(FILE);
        let _ = world.is_cached(recalls, None, Some(FILE));
        world.recalled(FILE);
        waits += u32::from(node.state().phase == Phase::Expiring);
        world.later(400);
        assert!(node.mode().is_none());
    }
    assert_eq!(waits, 1);
}

/// The session gives a lease back for want of room, and another wants it while a reply is in flight. It is asked
/// for it again and again.
#[test]
fn recall_that_joins_a_trim_makes_its_directory_contended_once() {
    let mut world = world();
    let recalls = world.rig.leases.recalls();
    world.sees(DIR);
    world.sees(FILE);
    assert!(world.is_cached(recalls, Some(DIR), Some(FILE)));
    let reply = world.replies(FILE);
    world.trimmed(FILE);
    for _ in 0..10 {
        world.recalled(FILE);
    }
    drop(reply);
    world.later(1);
    let recalls = world.rig.leases.recalls();
    world.sees(DIR);
    world.sees(FILE);
    assert!(
        !world.is_cached(recalls, Some(DIR), Some(FILE)),
        "its directory is"
    );
    let other = InodeKey::new(77, 1);
    world.sees(other);
    assert!(
        world.is_cached(recalls, None, Some(other)),
        "one wait is not many"
    );
}

/// Nobody waits for the lease: it goes at once, with the time for which the kernel may use what it was told.
#[test]
fn lease_that_nobody_waits_for_is_given_back_at_once_and_the_daemon_is_told_what_is_cached() {
    let mut world = world();
    let recalls = world.rig.leases.recalls();
    let node = world.sees(FILE);
    assert!(world.is_cached(recalls, None, Some(FILE)), "fstat");
    world.later(20);
    world.trimmed(FILE);
    world.rig.flush();
    assert!(node.mode().is_none());
    let most = DENTRY_TTL_MAX.as_millis() as u32 + 1;
    assert_eq!(world.told_ms(FILE), most - 20);
    // Without a timeout, or long after, there is nothing to tell.
    world.sees(DIR);
    world.trimmed(DIR);
    world.sees(FILE);
    world.later(1000);
    world.trimmed(FILE);
    world.rig.flush();
    assert_eq!((world.told_ms(DIR), world.told_ms(FILE)), (0, 0));
}

/// Another session only reads: what the kernel caches stays true. It may change the inode next, so that nothing
/// new is cached there.
#[test]
fn reader_of_another_session_does_not_wait_for_the_kernel_and_the_pool_is_not_contended() {
    let mut world = world();
    for round in 0..10 {
        let key = InodeKey::new(1000 + round, 1);
        let recalls = world.rig.leases.recalls();
        let node = world.sees(key);
        assert!(
            world.is_cached(recalls, None, Some(key)),
            "the pool is not contended"
        );
        let number = node.held_number().unwrap();
        world.rig.take(Event::Revoke {
            key,
            number,
            only_read: true,
        });
        world.rig.flush();
        assert!(node.mode().is_none());
        assert!(world.told_ms(key) > 300, "nobody may change it yet");
        let recalls = world.rig.leases.recalls();
        world.sees(key);
        assert!(!world.is_cached(recalls, None, Some(key)), "the inode is");
    }
}

/// The daemon is to do an operation for this session. Its own kernel learns of it.
#[test]
fn request_of_the_session_does_not_wait_for_its_own_kernel_and_nothing_is_contended() {
    let mut world = world();
    for _ in 0..10 {
        let recalls = world.rig.leases.recalls();
        let node = world.sees(FILE);
        assert!(world.is_cached(recalls, None, Some(FILE)), "nothing is contended");
        let number = node.held_number().unwrap();
        for _ in 0..10 {
            world.rig.take(Event::GiveBack { key: FILE, number });
        }
        world.rig.flush();
        assert!(node.mode().is_none());
        assert!(world.told_ms(FILE) > 300);
    }
    // Others wait for it already, then a request of this session needs it, too.
    let recalls = world.rig.leases.recalls();
    let node = world.sees(FILE);
    assert!(world.is_cached(recalls, None, Some(FILE)));
    world.recalled(FILE);
    world.rig.flush();
    assert!(node.mode().is_some(), "it serves this session until then");
    let number = node.held_number().unwrap();
    world.rig.take(Event::GiveBack { key: FILE, number });
    world.rig.flush();
    assert!(node.mode().is_none());
    assert!(world.told_ms(FILE) > 300);
}

/// A file without a name is looked at through `O_PATH`, which is no open; another session has it open.
#[test]
fn lease_of_a_file_without_a_name_stays_while_its_attributes_are_cached() {
    let mut world = world();
    let node = world.sees(FILE);
    node.inode.write().attr.nlink = 0;
    let recalls = world.rig.leases.recalls();
    world.sees(FILE);
    assert!(world.is_cached(recalls, None, Some(FILE)), "fstat");
    world.recalled(FILE);
    world.rig.flush();
    assert!(
        node.mode().is_some(),
        "the other session changes what the kernel caches"
    );
}

/// A thread calls again, and another ends: that they have their replies is known, and counts from then.
#[test]
fn recall_waits_less_when_threads_call_again_or_end() {
    const CALLS: u32 = 70;
    const ENDS: u32 = 71;
    let mut world = world();
    let caches = Arc::new(Caches::default());
    world.rig.around.caches = Some(Arc::clone(&caches));
    let node = world.sees(FILE);
    for thread in [CALLS, ENDS] {
        drop(world.replies_to(thread, FILE));
    }
    world.recalled(FILE);
    world.later(20);
    world.rig.leases.threads().calls(CALLS);
    world.later(20);
    assert_eq!(node.state().phase, Phase::Expiring, "one has given no sign");
    caches.1.lock().push(ENDS);
    world.later(15);
    let taken = DENTRY_TTL_TAKEN.as_millis() as u64 + 1;
    for _ in 0..taken {
        assert!(node.mode().is_some(), "the kernel uses what the second was told");
        world.later(1);
    }
    assert!(node.mode().is_none(), "long before it would have without signs");
}

#[test]
fn recall_does_not_wait_when_all_threads_have_had_their_replies_for_long() {
    let mut world = world();
    let caches = Arc::new(Caches::default());
    world.rig.around.caches = Some(Arc::clone(&caches));
    let node = world.sees(FILE);
    drop(world.replies_to(70, FILE));
    drop(world.replies_to(71, FILE));
    world.later(10);
    world.rig.leases.threads().calls(70);
    caches.1.lock().push(71);
    // As when a program under `varve run` announces itself.
    world
        .rig
        .leases
        .threads()
        .sweep(|thread| caches.has_ended(thread));
    world.later(DENTRY_TTL_TAKEN.as_millis() as u64 + 1);
    world.recalled(FILE);
    world.rig.flush();
    assert!(node.mode().is_none());
    assert_eq!(world.rig.recalls.expiring_ms(), 0);
}

#[test]
fn recall_waits_for_a_thread_that_gives_no_sign_and_ends_then() {
    let mut world = world();
    let node = world.sees(FILE);
    drop(world.replies_to(70, FILE));
    world.recalled(FILE);
    for _ in 0..=DENTRY_TTL_MAX.as_millis() {
        assert!(node.mode().is_some());
        world.rig.leases.threads().calls(71);
        world.later(1);
    }
    assert!(node.mode().is_none());
    let most = DENTRY_TTL_MAX.as_millis() as u64 + 1;
    assert_eq!(world.rig.recalls.expiring_ms(), most);
}

/// The daemon is told how long the kernel may use replies: less after a sign.
#[test]
fn daemon_is_told_less_when_a_thread_has_its_reply() {
    let mut world = world();
    world.sees(FILE);
    drop(world.replies_to(70, FILE));
    world.later(10);
    world.rig.leases.threads().calls(70);
    world.later(10);
    world.trimmed(FILE);
    world.rig.flush();
    assert_eq!(world.told_ms(FILE), DENTRY_TTL_TAKEN.as_millis() as u32 + 1 - 10);
}
