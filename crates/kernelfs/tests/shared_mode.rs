//! Mounts and other sessions: a mount is told of others, and changes wait for the cached replies of a sealed
//! mount.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, hello, make, want};
use std::time::Duration;
use varve_format::InodeKey;
use varve_format::seeded::{Bug, arm};
use varve_ipc::{
    ClientKind, DENTRY_TTL_MAX, Hello, LeaseMode, Link, Near, Peer, Request, Response, Service, Tell, Upcall,
};

fn shim_hello() -> Hello {
    Hello {
        kind: ClientKind::Shim,
        ..hello()
    }
}

fn shim(world: &World) -> Client {
    world.client_as(Peer::this_process(), shim_hello())
}

/// Another session comes and is welcomed by a mount that was alone.
fn welcomed(world: &World, shim: &Client) -> Client {
    std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| world.client());
        assert_eq!(shim.upcall(), Upcall::Sharing);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!newcomer.is_finished(), "the mount has not heard of it");
        assert_eq!(shim.link.call(Request::SharingNoted), Ok(Response::Done));
        newcomer.join().unwrap()
    })
}

fn kernel_of(world: &World, shim: &Client) -> String {
    let sessions = world.kernel.status().sessions;
    let mount = sessions.into_iter().find(|session| session.id == shim.id().0);
    mount.unwrap().kernel
}

#[test]
fn newcomer_changes_at_once_what_the_mount_has_not_leased() {
    let world = World::new();
    let shim = shim(&world);
    assert!(!shim.welcome.shared);
    assert_eq!(kernel_of(&world, &shim), "exclusive");
    let newcomer = welcomed(&world, &shim);
    assert!(newcomer.welcome.shared);
    assert_eq!(kernel_of(&world, &shim), "shared");
    newcomer.write_lease(ROOT);
    drop(newcomer);
    world.kernel.tick();
    assert_eq!(shim.link.upcall(Duration::ZERO), Ok(None));
    world.clock.advance_ms(world.config.solo_ms);
    world.kernel.tick();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
    assert_eq!(kernel_of(&world, &shim), "exclusive");
}

#[test]
fn mount_is_told_of_others_once() {
    let world = World::new();
    let shim = shim(&world);
    let first = welcomed(&world, &shim);
    let second = world.client();
    assert_eq!(shim.link.upcall(Duration::ZERO), Ok(None));
    drop((first, second));
    world.kernel.tick();
    world.clock.advance_ms(world.config.solo_ms);
    world.kernel.tick();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
    drop(welcomed(&world, &shim));
}

#[test]
fn mount_that_does_not_take_note_of_others_is_sealed() {
    let world = World::new();
    let shim = shim(&world);
    std::thread::scope(|scope| {
        let second = scope.spawn(|| world.client());
        assert_eq!(shim.upcall(), Upcall::Sharing);
        world.clock.advance_ms(world.config.lease_ms + 1);
        second.join().unwrap();
    });
    assert!(!shim.is_live());
}

/// A file that a session has made, the session, and a mount that comes beside it.
fn beside_a_mount() -> (World, Client, InodeKey, Client) {
    let world = World::new();
    let mut other = world.client();
    let file = other.forward(&make(b"f")).unwrap().attr.unwrap().key;
    let shim = shim(&world);
    (world, other, file, shim)
}

/// `change` waits until a mount's kernel has no cached replies.
fn waits_for_a_kernel(change: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let changed = scope.spawn(change);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!changed.is_finished(), "the mount's kernel has a cached reply");
        changed.join().unwrap();
    });
}

/// A mount that had a lease on the root is sealed, as `ended` does; `change` of another session waits until
/// its kernel has no cached replies.
fn change_waits(ended: fn(World, &Client) -> World, change: fn(&mut Client, InodeKey)) {
    let world = World::new();
    let made = world.client().forward(&make(b"f")).unwrap();
    let file = made.attr.unwrap().key;
    let shim = shim(&world);
    shim.read_lease(ROOT);
    shim.read_lease(file);
    let world = ended(world, &shim);
    let mut other = world.client();
    waits_for_a_kernel(|| change(&mut other, file));
}

fn sealed(world: World, shim: &Client) -> World {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| drop(world.client()));
        assert_eq!(shim.upcall(), Upcall::Sharing);
        world.clock.advance_ms(world.config.lease_ms + 1);
        other.join().unwrap();
    });
    assert!(!shim.is_live());
    world
}

#[test]
fn lease_for_writing_waits_for_the_kernel_of_a_sealed_mount() {
    change_waits(sealed, |other, _| _ = other.write_lease(ROOT));
}

/// Asks for a read lease on the root and, ahead, for one on `file` for writing; returns that.
fn ahead(client: &Client, file: InodeKey) -> Option<varve_ipc::Grant> {
    let near = Near {
        these: vec![file],
        after: ROOT.ino,
        count: 0,
        mode: LeaseMode::Write,
        tell: Tell::default(),
    };
    let wants = vec![want(ROOT, LeaseMode::Read)];
    match client.link.call(Request::AcquireNear { wants, near }).unwrap() {
        Response::Granted(grants) => grants.into_iter().find(|grant| grant.attr.key == file),
        other => panic!("{other:?}"),
    }
}

#[test]
fn lease_ahead_is_not_granted_while_the_kernel_of_a_sealed_mount_may_cache_replies() {
    let world = World::new();
    let file = world.client().forward(&make(b"f")).unwrap().attr.unwrap().key;
    let shim = shim(&world);
    shim.read_lease(file);
    let world = sealed(world, &shim);
    let other = world.client();
    assert!(ahead(&other, file).is_none());
    std::thread::sleep(DENTRY_TTL_MAX);
    assert!(ahead(&other, file).is_some());
}

#[test]
fn forwarded_operation_waits_for_the_kernel_of_a_sealed_mount() {
    change_waits(sealed, |other, _| _ = other.forward(&make(b"g")).unwrap());
}

#[test]
fn change_waits_for_the_kernel_of_an_earlier_daemons_mount() {
    change_waits(|world, _| world.restart(), |other, _| _ = other.write_lease(ROOT));
}

#[test]
fn mount_that_goes_on_does_not_wait_for_its_own_kernel() {
    let world = World::new();
    let shim = shim(&world);
    let world = sealed(world, &shim);
    let again = Hello {
        resume: Some(shim.welcome.token),
        ..shim_hello()
    };
    let shim = world.client_as(Peer::this_process(), again);
    shim.write_lease(ROOT);
}

#[test]
fn change_beside_a_sealed_mount_that_does_not_wait_is_caught() {
    if !cfg!(debug_assertions) {
        return;
    }
    let early = std::panic::catch_unwind(|| {
        change_waits(sealed, |other, _| {
            arm(Some(Bug::ChangeAfterSealedMount));
            other.write_lease(ROOT);
            arm(None);
        });
    });
    assert!(early.is_err(), "the seeded bug is not found");
}

/// A mount that goes on has given leases back, under which its kernel may use replies for 200 ms; `change` of
/// another session waits for that.
fn change_waits_for_a_live_mount(change: fn(&mut Client, InodeKey)) {
    let (_world, mut other, file, mut shim) = beside_a_mount();
    for key in [ROOT, file] {
        let lease = shim.read_lease(key).lease;
        shim.release_cached(key, lease, false, 200);
    }
    // Its own changes do not wait, nor do looks of others.
    let lease = shim.write_lease(ROOT).lease;
    shim.release(ROOT, lease, false);
    shim.forward(&make(b"own")).unwrap();
    other.read_lease(ROOT);
    other.read_lease(file);
    waits_for_a_kernel(|| change(&mut other, file));
}

#[test]
fn lease_for_writing_waits_for_the_kernel_of_the_mount_that_gave_it_back() {
    change_waits_for_a_live_mount(|other, file| _ = other.write_lease(file));
}

#[test]
fn lease_ahead_is_not_granted_while_the_kernel_of_the_mount_that_gave_it_back_may_cache_replies() {
    let (_world, other, file, shim) = beside_a_mount();
    let lease = shim.read_lease(file).lease;
    shim.release_cached(file, lease, false, 200);
    assert!(ahead(&other, file).is_none());
    let own = ahead(&shim, file).expect("the mount's own");
    shim.release(file, own.lease, false);
    std::thread::sleep(Duration::from_millis(200));
    assert!(ahead(&other, file).is_some());
}

/// A mount gives a lease back while the answer with a newer one, which took its place, is on its way. That
/// comes to an inode of which the mount knows nothing any more.
#[test]
fn replies_under_a_lease_that_was_replaced_count() {
    let (_world, other, file, shim) = beside_a_mount();
    let first = shim.read_lease(file).lease;
    let second = ahead(&shim, file).unwrap().lease;
    shim.release_cached(file, first, false, 200);
    shim.release(file, second, false);
    waits_for_a_kernel(|| _ = other.write_lease(file));
}

#[test]
fn forwarded_operation_waits_for_the_kernel_of_the_mount_that_gave_its_lease_back() {
    change_waits_for_a_live_mount(|other, _| {
        let lease = other.read_lease(ROOT).lease;
        other.release(ROOT, lease, false);
        other.forward(&make(b"g")).unwrap();
    });
}

#[test]
fn reader_of_what_a_mount_has_written_is_named_and_does_not_wait_for_its_kernel() {
    let (world, other, file, shim) = beside_a_mount();
    let lease = shim.write_lease(file).lease;
    world.clock.advance_ms(1_000);
    let revoked = |keep| Upcall::Revoke {
        key: file,
        lease,
        keep,
    };
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| other.read_lease(file));
        assert_eq!(shim.upcall(), revoked(Some(LeaseMode::Read)));
        shim.release_cached(file, lease, false, 300);
        looks.join().unwrap();
    });
}

#[test]
fn lease_asked_back_ahead_of_a_reader_names_it() {
    let (world, other, file, shim) = beside_a_mount();
    for mode in [LeaseMode::Read, LeaseMode::Write] {
        let lease = shim.write_lease(file).lease;
        world.clock.advance_ms(1_000);
        let near = Near {
            these: vec![file],
            after: ROOT.ino,
            count: 0,
            mode,
            tell: Tell::default(),
        };
        let wants = vec![want(ROOT, LeaseMode::Read)];
        other.link.call(Request::AcquireNear { wants, near }).unwrap();
        let keep = Some(mode).filter(|mode| *mode == LeaseMode::Read);
        assert_eq!(
            shim.upcall(),
            Upcall::Revoke {
                key: file,
                lease,
                keep
            }
        );
        shim.release(file, lease, false);
    }
}

#[test]
fn change_that_does_not_wait_for_the_kernel_of_a_live_mount_is_caught() {
    if !cfg!(debug_assertions) {
        return;
    }
    let early = std::panic::catch_unwind(|| {
        change_waits_for_a_live_mount(|other, file| {
            arm(Some(Bug::ChangeWhileCached));
            other.write_lease(file);
            arm(None);
        });
    });
    assert!(early.is_err(), "the seeded bug is not found");
}

fn ordinary() -> Peer {
    Peer {
        uid: 1000,
        gid: 1000,
        ..Peer::this_process()
    }
}

/// An ordinary user's session says that it is a mount's, and ends without a word, again and again. Others
/// that want to change something wait for a bounded time.
#[test]
fn mounts_that_are_sealed_again_and_again_do_not_keep_others_from_changes() {
    let world = World::new();
    let other = world.client();
    let mount = || world.client_as(ordinary(), shim_hello());
    let mut one = mount();
    Service::gone(&*world.kernel, one.id());
    std::thread::scope(|scope| {
        let changed = scope.spawn(|| other.write_lease(ROOT));
        let mut rounds = 0;
        while !changed.is_finished() && rounds < 200 {
            one = mount();
            world.clock.advance_ms(300);
            Service::gone(&*world.kernel, one.id());
            std::thread::sleep(Duration::from_millis(25));
            rounds += 1;
        }
        let waited_ms = 300 * rounds;
        world.clock.advance_ms(10_000);
        changed.join().unwrap();
        assert!(
            rounds < 200,
            "nothing was changed for {waited_ms} ms, wait_ms is {}",
            world.config.wait_ms
        );
    });
}

/// The daemon is told to stop while a change waits for the kernel of a sealed mount.
#[test]
fn change_that_waits_for_a_kernel_is_not_made_when_the_daemon_stops() {
    let world = World::new();
    let shim = shim(&world);
    shim.read_lease(ROOT);
    let world = sealed(world, &shim);
    let mut other = world.client();
    std::thread::scope(|scope| {
        let changed = scope.spawn(|| other.forward(&make(b"g")));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!changed.is_finished());
        let kernel = &world.kernel;
        scope.spawn(move || kernel.shutdown());
        std::thread::sleep(Duration::from_millis(300));
        assert!(
            !changed.is_finished() || changed.join().unwrap().is_err(),
            "the kernel caches that there is no g"
        );
        world.clock.advance_ms(10_000);
    });
}
