//! Prefetched leases.

use super::*;
use varve_ipc::Grant;

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
    rig.leases
        .listed((0..40).map(|n| InodeKey::new(2000 - 10 * n, 1)));
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
    rig.leases
        .listed((0..40).map(|n| InodeKey::new(5000 + 10 * n, 1)));
    look(&rig, 5100);
    rig.leases.listed([InodeKey::new(5095, 1)].into_iter());
    look(&rig, 5095);
    let last = asked.lock().last().cloned();
    assert!(matches!(last, Some(Request::Acquire { .. })), "{last:?}");
}

#[test]
fn what_was_listed_and_is_not_looked_at_comes_no_more() {
    let rig = rig();
    let asked = all_granted(&rig);
    rig.leases.listed((0..20_000).map(|n| InodeKey::new(1000 + n, 1)));
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
    rig.leases.listed((0..5).map(|n| InodeKey::new(1000 + n, 1)));
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
    rig.leases.listed((0..5).map(|n| InodeKey::new(1000 + n, 1)));
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
    rig.leases.listed((0..5).map(|n| InodeKey::new(1000 + n, 1)));
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
