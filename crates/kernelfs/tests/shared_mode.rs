//! Shared mode: what a newcomer may do before the kernel above a mount caches nothing any more, and when the
//! mount is alone again.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, hello, make, want};
use varve_ipc::{
    ClientKind, Hello, IpcError, LeaseMode, Link, Near, Peer, Request, Response, Service, Upcall,
};

fn shim(world: &World) -> Client {
    world.client_as(
        Peer::this_process(),
        Hello {
            kind: ClientKind::Shim,
            ..hello()
        },
    )
}

/// Another session comes and is welcomed by a mount that was alone.
fn welcomed(world: &World, shim: &Client) -> Client {
    std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| world.client());
        assert_eq!(shim.upcall(), Upcall::Sharing);
        std::thread::sleep(std::time::Duration::from_millis(50));
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
fn newcomer_reads_at_once_and_changes_nothing_before_the_mounts_kernel_caches_nothing() {
    let world = World::new();
    let shim = shim(&world);
    assert!(!shim.welcome.shared);
    assert_eq!(kernel_of(&world, &shim), "keeps");
    let newcomer = welcomed(&world, &shim);
    assert!(newcomer.welcome.shared);
    assert_eq!(kernel_of(&world, &shim), "runs out");
    newcomer.read_lease(ROOT);
    let near = Near {
        these: Vec::new(),
        after: ROOT.ino,
        count: 4,
        mode: LeaseMode::Write,
    };
    let near = Request::AcquireNear {
        wants: vec![want(ROOT, LeaseMode::Read)],
        near,
    };
    std::thread::scope(|scope| {
        let changes = [
            scope.spawn(|| newcomer.link.call(near).map(drop)),
            scope.spawn(|| newcomer.acquire(&[want(ROOT, LeaseMode::Write)]).map(drop)),
        ];
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(changes.iter().all(|change| !change.is_finished()));
        assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
        for change in changes {
            assert_eq!(change.join().unwrap(), Ok(()));
        }
    });
    assert_eq!(kernel_of(&world, &shim), "asks");
    drop(newcomer);
    world.kernel.tick();
    assert_eq!(shim.link.upcall(std::time::Duration::ZERO), Ok(None));
    world.clock.advance_ms(world.config.solo_ms);
    world.kernel.tick();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
    assert_eq!(kernel_of(&world, &shim), "keeps");
}

#[test]
fn forwarded_operation_of_a_newcomer_waits_for_the_mounts_kernel() {
    let world = World::new();
    let shim = shim(&world);
    let mut newcomer = welcomed(&world, &shim);
    std::thread::scope(|scope| {
        let made = scope.spawn(|| newcomer.forward(&make(b"g")).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!made.is_finished());
        assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
        assert_eq!(made.join().unwrap(), Ok(()));
    });
}

#[test]
fn newcomer_waits_for_what_the_kernel_of_a_mount_caches_that_was_sealed_meanwhile() {
    let world = World::new();
    let shim = shim(&world);
    let newcomer = welcomed(&world, &shim);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| newcomer.write_lease(ROOT));
        world.clock.advance_ms(world.config.lease_ms + 1_501);
        while shim.is_live() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!change.is_finished(), "it was alone until now");
        change.join().unwrap();
    });
}

/// A newcomer that was not let change anything yet goes on in another session, after the mount's has `ended`.
fn newcomer_goes_on(ended: fn(World, &Client) -> World) {
    let world = World::new();
    let shim = shim(&world);
    let newcomer = welcomed(&world, &shim);
    let world = ended(world, &shim);
    let newcomer = newcomer.resume(&world.kernel, Vec::new());
    std::thread::scope(|scope| {
        let change = scope.spawn(|| newcomer.write_lease(ROOT));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(
            !change.is_finished(),
            "the mount's kernel still caches what was so before it came"
        );
        world.clock.advance_ms(2_000);
        change.join().unwrap();
    });
}

#[test]
fn newcomer_that_was_sealed_after_the_mount_still_waits_for_the_mounts_kernel() {
    newcomer_goes_on(|world, shim| {
        let hello = Hello {
            kind: ClientKind::Shim,
            resume: Some(shim.welcome.token),
            ..hello()
        };
        drop(world.client_as(Peer::this_process(), hello));
        assert!(!shim.is_live());
        world
    });
}

#[test]
fn newcomer_still_waits_for_the_mounts_kernel_after_a_restart() {
    newcomer_goes_on(|world, _| world.restart());
}

#[test]
fn mount_is_told_of_others_once_and_answers_once_for_all_newcomers() {
    let world = World::new();
    let shim = shim(&world);
    let first = welcomed(&world, &shim);
    // It has been told, and all it has to do is to let its kernel's beliefs run out.
    let second = world.client();
    let nothing = || assert_eq!(shim.link.upcall(std::time::Duration::ZERO), Ok(None));
    nothing();
    drop((first, second));
    let long = || {
        world.kernel.tick();
        world.clock.advance_ms(60_000);
        world.kernel.tick();
    };
    world.kernel.tick();
    world.clock.advance_ms(world.config.solo_ms);
    world.kernel.tick();
    nothing();
    assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
    long();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
    // One answer too many says nothing.
    assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
    assert_eq!(kernel_of(&world, &shim), "keeps");
    let third = welcomed(&world, &shim);
    assert_eq!(kernel_of(&world, &shim), "runs out");
    drop(third);
}

/// Else threads of the daemon would stay with clients that come, ask and go.
#[test]
fn newcomer_that_goes_while_it_waits_for_a_mount_takes_its_requests_with_it() {
    let world = World::new();
    let shim = shim(&world);
    let newcomer = welcomed(&world, &shim);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| newcomer.acquire(&[want(ROOT, LeaseMode::Write)]).map(drop));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!change.is_finished());
        assert_eq!(newcomer.link.call(Request::Bye), Ok(Response::Done));
        assert_eq!(change.join().unwrap(), Err(IpcError::Sealed));
    });
    assert!(shim.is_live());
}

/// It was beside this mount once, which has been in exclusive mode since.
#[test]
fn session_that_comes_back_after_the_mount_was_told_that_it_is_alone_is_a_newcomer() {
    let world = World::new();
    let shim = shim(&world);
    let old = welcomed(&world, &shim);
    assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
    old.write_lease(ROOT);
    world.kernel.gone(old.id());
    world.clock.advance_ms(world.config.grace_ms);
    world.kernel.tick();
    world.clock.advance_ms(world.config.solo_ms);
    world.kernel.tick();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| old.resume(&world.kernel, Vec::new()));
        assert_eq!(shim.upcall(), Upcall::Sharing);
        assert_eq!(shim.link.call(Request::SharingNoted), Ok(Response::Done));
        let back = back.join().unwrap();
        let change = scope.spawn(move || back.write_lease(ROOT));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!change.is_finished(), "the mount's kernel keeps names again");
        assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
        change.join().unwrap();
    });
}

#[test]
fn mount_is_kept_in_shared_mode_for_ten_times_as_long_as_others_waited_for_it() {
    let world = World::new();
    let shim = shim(&world);
    let newcomer = welcomed(&world, &shim);
    std::thread::scope(|scope| {
        let change = scope.spawn(|| newcomer.write_lease(ROOT));
        std::thread::sleep(std::time::Duration::from_millis(50));
        world.clock.advance_ms(400);
        assert_eq!(shim.link.call(Request::SharingAck), Ok(Response::Done));
        change.join().unwrap();
    });
    drop(newcomer);
    world.kernel.tick();
    world.clock.advance_ms(3_900);
    world.kernel.tick();
    assert_eq!(shim.link.upcall(std::time::Duration::ZERO), Ok(None));
    world.clock.advance_ms(200);
    world.kernel.tick();
    assert_eq!(shim.upcall(), Upcall::Exclusive);
}

#[test]
fn mount_that_does_not_give_its_caches_up_is_sealed() {
    let world = World::new();
    let shim = world.client_as(
        Peer::this_process(),
        Hello {
            kind: ClientKind::Shim,
            ..hello()
        },
    );
    std::thread::scope(|scope| {
        let second = scope.spawn(|| world.client());
        assert_eq!(shim.upcall(), Upcall::Sharing);
        world.clock.advance_ms(world.config.lease_ms + 1_501);
        second.join().unwrap();
    });
    assert!(!shim.is_live());
}
