//! Prefetched leases.

use super::*;
use crate::inode::extents::Below;
use varve_format::{BlockNo, FileBlock, Tier};
use varve_ipc::{DirEntry, Grant, MappedExtent, Told};

/// Grants the wanted leases and the named neighbours, and keeps the requests.
fn grant_all(asked: &Arc<Mutex<Vec<Request>>>) -> Answer {
    let asked = Arc::clone(asked);
    let number = AtomicU64::new(1000);
    Box::new(move |request| {
        asked.lock().push(request.clone());
        let (wants, these) = match request {
            Request::Acquire { wants } => (wants, &[][..]),
            Request::AcquireNear { wants, near } => (wants, &near.these[..]),
            other => panic!("{other:?}"),
        };
        let keys = wants.iter().map(|want| want.key).chain(these.iter().copied());
        let mode = wants[0].mode;
        let grant = |key| Grant {
            lease: LeaseNo(number.fetch_add(1, Ordering::Relaxed)),
            mode,
            replaces: None,
            attr: InodeAttr::new(key, 0o100_644, 0),
            told: Told::default(),
        };
        Response::Granted(keys.map(grant).collect())
    })
}

/// Has every request granted, with all neighbours; returns the requests.
fn all_granted(rig: &Rig) -> Arc<Mutex<Vec<Request>>> {
    let asked = Arc::default();
    assert!(rig.script.answer.set(grant_all(&asked)).is_ok());
    asked
}

/// Has every request granted; `meanwhile` runs before the answer to it is read.
fn granted_while(rig: &Rig, meanwhile: impl Fn(&Leases, &[Grant]) + Send + Sync + 'static) {
    let grants = grant_all(&Arc::default());
    let leases = Arc::downgrade(&rig.leases);
    let answer: Answer = Box::new(move |request| {
        let response = grants(request);
        let Response::Granted(given) = &response else {
            panic!("{response:?}")
        };
        meanwhile(&leases.upgrade().unwrap(), given);
        response
    });
    assert!(rig.script.answer.set(answer).is_ok());
}

/// Listed files with these numbers.
fn files(numbers: impl Iterator<Item = u64>) -> impl Iterator<Item = (InodeKey, FileKind)> {
    numbers.map(|ino| (InodeKey::new(ino, 1), FileKind::Regular))
}

fn look(rig: &Rig, ino: u64) {
    let want = Want {
        key: InodeKey::new(ino, 1),
        mode: LeaseMode::Read,
    };
    drop(rig.leases.pin::<()>(&[want], Use::Own).unwrap());
}

#[test]
fn what_was_listed_comes_with_a_lease_and_is_not_asked_for_again() {
    let rig = rig();
    let asked = all_granted(&rig);
    // Every tenth number.
    rig.leases.listed(files((0..40).map(|n| 2000 - 10 * n)));
    for n in (0..40).rev() {
        look(&rig, 2000 - 10 * n);
    }
    let nears: Vec<Near> = asked
        .lock()
        .iter()
        .filter_map(|request| match request {
            Request::AcquireNear { near, .. } => Some(near.clone()),
            _ => None,
        })
        .collect();
    let sizes: Vec<_> = nears.iter().map(|near| near.these.len()).collect();
    assert_eq!(sizes, [4, 8, 16, 8], "{nears:?}");
    assert_eq!(asked.lock().len(), 4);
    assert_eq!(nears[0].these[0], InodeKey::new(1620, 1));
    assert_eq!(nears[2].count, 0, "the numbers between are not wanted");
    // Out of its turn: the lease on the next one is here.
    rig.leases.listed(files((0..40).map(|n| 5000 + 10 * n)));
    look(&rig, 5100);
    rig.leases.listed(files([5095].into_iter()));
    look(&rig, 5095);
    let last = asked.lock().last().cloned();
    assert!(matches!(last, Some(Request::Acquire { .. })), "{last:?}");
}

#[test]
fn what_was_listed_and_is_not_looked_at_comes_no_more() {
    let rig = rig();
    let asked = all_granted(&rig);
    rig.leases.listed(files(1000..21_000));
    for n in 0..100 {
        look(&rig, 1000 + 200 * n);
    }
    let named = |request: &Request| match request {
        Request::AcquireNear { near, .. } => near.these.len(),
        _ => 0,
    };
    let asked = asked.lock();
    let came: usize = asked.iter().map(named).sum();
    assert_eq!(asked.len(), 100);
    assert!((4..30).contains(&came), "{came} leases that nobody used");
}

#[test]
fn lease_that_came_ahead_is_not_given_back_before_its_turn() {
    let rig = rig();
    all_granted(&rig);
    rig.leases.listed(files(1000..1005));
    look(&rig, 1000);
    too_many(&rig);
    let ahead = |nodes: &[Arc<Node>]| nodes.iter().filter(|node| node.key().ino.0 > 1000).count();
    // All were used since the last search; four of these are still to be used.
    let idle = rig.leases.idle(0);
    assert_eq!((idle.len(), ahead(&idle)), (85 - 56, 0));
    // The others are used again; these are not.
    for node in rig.leases.all() {
        if node.ahead.load(Ordering::Relaxed) == 0 {
            node.note_recent();
        }
    }
    assert_eq!(ahead(&rig.leases.idle(0)), 4);
}

/// The request waited until the daemon repeated the recall, half a second later.
#[test]
fn lease_that_came_ahead_and_is_wanted_back_does_not_keep_a_request_waiting() {
    let mut rig = rig();
    let came = Arc::new(Mutex::new(None));
    let revoked = Arc::clone(&came);
    granted_while(&rig, move |leases, given| {
        // Another request asks for a neighbour in the answer, which another session wants too.
        let (key, number) = (given[1].attr.key, given[1].lease);
        let node = leases.node_of(key).unwrap();
        node.waiters.fetch_add(1, Ordering::SeqCst);
        assert!(matches!(leases.revoked(key, number), Revoked::Early));
        *revoked.lock() = Some((key, number));
    });
    rig.leases.listed(files(1000..1005));
    look(&rig, 1000);
    while let Ok(event) = rig.inbox.try_recv() {
        rig.take(event);
    }
    rig.flush();
    let came = came.lock().take();
    assert_eq!(rig.released(), Vec::from_iter(came));
}

/// The node remembered that the newer lease was given back before it came, and went with the older one. The
/// lease was installed, and entries logged under it were refused.
#[test]
fn lease_that_came_ahead_is_not_taken_in_when_its_node_went_meanwhile() {
    let rig = rig();
    let gone = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&gone);
    granted_while(&rig, move |leases, given| {
        let mut neighbours = given[1..].iter();
        let Some(grant) = neighbours.find(|grant| grant.mode == LeaseMode::Write) else {
            return;
        };
        // The worker's part when the daemon recalls the neighbour, until its release was answered.
        let key = grant.attr.key;
        let Revoked::Unknown {
            replaced: Some((node, _)),
        } = leases.revoked(key, grant.lease)
        else {
            panic!("the older lease goes too")
        };
        let mut state = node.state();
        state.given_back = state.given_back.max(state.number);
        state.mode = None;
        node.publish(&state, false);
        drop(state);
        leases.gone(key);
        drop(node);
        assert!(leases.get(key).is_none(), "nobody refers to it");
        *seen.lock() = Some(key);
    });
    rig.leases.listed(files(1000..1005));
    look(&rig, 1000);
    let write = rig
        .leases
        .pin_one::<()>(InodeKey::new(1000, 1), LeaseMode::Write, Use::Own);
    assert!(write.is_ok());
    drop(write);
    let key = gone.lock().take().unwrap();
    let held = rig.leases.get(key).and_then(|node| node.mode());
    assert_eq!(held, None, "{key} was given back");
}

/// The daemon has taken an older grant back, and its answer to that has not come. A request for the directory
/// waited half a second.
#[test]
fn lease_that_came_ahead_while_the_older_goes_is_given_back_when_it_is_wanted() {
    let (mut rig, node) = releasing();
    let answer: Answer = Box::new(|request| {
        let Request::AcquireNear { wants, .. } = request else {
            panic!("{request:?}")
        };
        let grant = |lease, key| Grant {
            lease: LeaseNo(lease),
            mode: LeaseMode::Read,
            replaces: None,
            attr: InodeAttr::new(key, 0o040_755, 0),
            told: Told::default(),
        };
        Response::Granted(vec![grant(2, wants[0].key), grant(3, DIR)])
    });
    assert!(rig.script.answer.set(answer).is_ok());
    look(&rig, 1000);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1))]);
    assert_eq!(node.held_number(), Some(LeaseNo(3)));
    // A request for it waits behind another one, which waits until it is given back.
    node.waiters.fetch_add(1, Ordering::SeqCst);
    rig.revoke(3);
    rig.flush();
    assert_eq!(rig.released(), [(DIR, LeaseNo(1)), (DIR, LeaseNo(3))]);
}

#[test]
fn only_directories_come_with_a_listed_directory() {
    let rig = rig();
    let asked = all_granted(&rig);
    let kind = |n| {
        if n % 2 == 0 {
            FileKind::Directory
        } else {
            FileKind::Regular
        }
    };
    rig.leases
        .listed((0..400).map(|n| (InodeKey::new(1000 + n, 1), kind(n))));
    for n in 0..200 {
        look(&rig, 1000 + 2 * n);
    }
    let asked = asked.lock();
    assert!(asked.len() < 12, "{} requests for 200 directories", asked.len());
    for request in asked.iter() {
        if let Request::AcquireNear { near, .. } = request {
            assert!(near.these.iter().all(|key| key.ino.0 % 2 == 0), "{near:?}");
        }
    }
}

fn extent() -> MappedExtent {
    MappedExtent {
        file_block: FileBlock(0),
        len: 3,
        tier: Tier::Nvm,
        block: BlockNo(70),
        unwritten: false,
        number: None,
    }
}

/// Has every request granted with contents; `meanwhile` runs before the answer to it is read.
fn told_while(rig: &Rig, meanwhile: impl Fn(&Leases) + Send + Sync + 'static) {
    let grants = grant_all(&Arc::default());
    let leases = Arc::downgrade(&rig.leases);
    let answer: Answer = Box::new(move |request| {
        let Response::Granted(mut given) = grants(request) else {
            panic!("{request:?}")
        };
        for grant in &mut given {
            grant.told = Told {
                bare: true,
                names: Some(vec![DirEntry {
                    name: b"there".to_vec(),
                    key: InodeKey::new(7, 1),
                    kind: FileKind::Regular,
                    next_cookie: 9,
                }]),
                extents: Some(vec![extent()]),
            };
        }
        meanwhile(&leases.upgrade().unwrap());
        Response::Granted(given)
    });
    assert!(rig.script.answer.set(answer).is_ok());
}

#[test]
fn what_is_told_with_a_lease_is_known_until_the_lease_goes() {
    let rig = rig();
    told_while(&rig, |_| {});
    look(&rig, 2000);
    let node = rig.leases.get(InodeKey::new(2000, 1)).unwrap();
    assert_eq!(node.xattrs.lock().as_ref().map(|known| known.len()), Some(0));
    {
        let names = node.names.lock();
        assert!(names.is_complete());
        assert_eq!(
            names.get(b"there").unwrap().map(|target| target.key.ino.0),
            Some(7)
        );
        assert_eq!(names.get(b"absent"), Some(None));
    }
    let place = || node.inode.read().extents.find(1);
    assert_eq!(place(), Below::Mapped(Tier::Nvm, 71, 2));
    // What it is told with a lease that goes on is older than what it knows.
    let mine = Target {
        key: InodeKey::new(8, 1),
        kind: FileKind::Regular,
    };
    node.names.lock().set(b"mine", Some(mine), LogSeq(1), LogSeq(0));
    let number = node.held_number().unwrap();
    let told = Told {
        bare: true,
        names: Some(Vec::new()),
        extents: Some(Vec::new()),
    };
    let attr = InodeAttr::new(node.key(), 0o100_644, 0);
    let next = LeaseNo(number.0 + 1);
    assert!(node.install(
        next,
        LeaseMode::Write,
        Some(number),
        Some((attr.clone(), told)),
        false
    ));
    assert!(node.names.lock().get(b"mine").unwrap().is_some());
    assert_eq!(place(), Below::Mapped(Tier::Nvm, 71, 2));
    // With a gap nothing of it counts.
    let known = Some((attr, Told::default()));
    assert!(node.install(LeaseNo(number.0 + 9), LeaseMode::Read, None, known, false));
    assert!(node.xattrs.lock().is_none() && !node.names.lock().is_complete());
    assert_eq!(place(), Below::Unknown);
}

#[test]
fn extents_that_a_barrier_overtook_do_not_count() {
    let rig = rig();
    // Nobody could forget them for this inode: it has no node yet.
    told_while(&rig, |leases| leases.note_barrier());
    rig.leases.listed(files(1000..1005));
    look(&rig, 1000);
    for ino in 1000..1005 {
        let node = rig.leases.get(InodeKey::new(ino, 1)).unwrap();
        assert_eq!(node.inode.read().extents.find(1), Below::Unknown, "{ino}");
        assert!(node.xattrs.lock().is_some(), "the rest counts");
    }
}

#[test]
fn contents_are_asked_for_after_a_program_has_wanted_some() {
    let rig = rig();
    let asked = all_granted(&rig);
    look(&rig, 2000);
    rig.leases.note_asked_names();
    look(&rig, 3000);
    let asked = asked.lock();
    let told = |request: &Request| matches!(request, Request::AcquireNear { near, .. } if near.tell.names);
    assert!(!told(&asked[0]) && told(&asked[1]), "{asked:?}");
}

#[test]
fn what_never_comes_is_asked_for_no_more() {
    let rig = rig();
    let asked: Arc<Mutex<Vec<Request>>> = Arc::default();
    let grants = grant_all(&asked);
    // All others are gone, or stay with another session.
    let answer: Answer = Box::new(move |request| {
        let Response::Granted(mut given) = grants(request) else {
            panic!("{request:?}")
        };
        given.truncate(1);
        Response::Granted(given)
    });
    assert!(rig.script.answer.set(answer).is_ok());
    rig.leases.listed(files(1000..21_000));
    for n in 0..200 {
        look(&rig, 1000 + 100 * n);
    }
    let named = |request: &Request| match request {
        Request::AcquireNear { near, .. } => near.these.len(),
        _ => 0,
    };
    let named: usize = asked.lock().iter().map(named).sum();
    assert!((4..100).contains(&named), "{named} inodes named in vain");
}
