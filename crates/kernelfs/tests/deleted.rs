//! How long files without a name are there, and inodes that somebody has open: until nobody can ask for them
//! any more.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, chmod, hello, make, stranger, unlink, write_file};
use std::sync::Arc;
use varve_format::log::CHUNK_BYTES;
use varve_format::{EntryFlags, InodeKey, LogOp};
use varve_ipc::{Hello, IpcError, Link, Peer, Request, Response, Service};
use varve_kernelfs::{Config, LogStore};

/// A process that ends with its input, and a client in it.
fn process() -> (std::process::Child, Peer) {
    let process = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let peer = Peer {
        pid: process.id(),
        ..Peer::this_process()
    };
    (process, peer)
}

/// A client holds a deleted file when everything stops; what is there after the next start.
fn restarted_with_an_orphan(world: World) -> (World, common::Client, InodeKey) {
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"open");
    a.log_op(&unlink(b"f", key));
    let world = world.restart();
    world.kernel.tick();
    (world, a, key)
}

#[test]
fn orphan_lives_through_a_restart_while_its_client_may_come_back() {
    let world = World::new();
    let (world, a, key) = restarted_with_an_orphan(world);
    let a = a.resume(&world.kernel, vec![key]);
    world.clock.advance_ms(world.config.grace_ms + 1);
    world.kernel.tick();
    a.read_lease(key);
    assert_eq!(a.read(key, 10), b"open");
    let (lease, _) = (a.read_lease(key).lease, ());
    a.release(key, lease, false);
    assert!(matches!(
        a.link.call(Request::GetAttr { key }),
        Err(IpcError::Errno(libc::ESTALE))
    ));
    world.check();
}

/// Its session has no row on media: the next daemon, and the one after it, know of it by its page.
#[test]
fn orphan_that_a_client_without_a_record_holds_lives_through_restarts() {
    type Restart = fn(World) -> World;
    let ways: [Restart; 3] = [
        World::restart,
        |world| {
            world.kernel.shutdown().unwrap();
            world.restart()
        },
        |world| world.restart().restart(),
    ];
    for (number, restart) in ways.into_iter().enumerate() {
        let world = World::new();
        let (mut process, peer) = process();
        let mut a = world.client_as(peer, hello());
        let key = write_file(&mut a, b"f", b"open");
        world.kernel.digest_all().unwrap();
        a.release(ROOT, a.write_lease(ROOT).lease, false);
        a.release(key, a.write_lease(key).lease, false);
        let b = world.client();
        b.release(key, b.read_lease(key).lease, true);
        a.forward(&unlink(b"f", key)).unwrap();
        // The one that has a record ends with its process.
        process.kill().unwrap();
        process.wait().unwrap();
        world.kernel.tick();
        assert_eq!(world.kernel.store().sessions().unwrap(), []);
        let world = restart(world);
        world.kernel.tick();
        let b = b.resume(&world.kernel, vec![key]);
        world.clock.advance_ms(world.config.grace_ms + 1);
        world.kernel.tick();
        let inodes = world.kernel.status().inodes_used;
        let lease = b.read_lease(key).lease;
        assert_eq!(b.read(key, 10), b"open", "way {number}");
        b.release(key, lease, false);
        world.kernel.tick();
        assert_eq!(world.kernel.status().inodes_used, inodes - 1);
        world.check();
        // No page is left of the session that ended.
        drop(b);
        let world = world.restart();
        world.clock.advance_ms(world.config.grace_ms + 1);
        world.kernel.tick();
        world.kernel.shutdown().unwrap();
        assert_eq!(world.logs.pages().unwrap().len(), 0);
    }
}

#[test]
fn deleted_file_is_freed_at_once_when_no_client_of_an_earlier_daemon_can_come_back() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"gone");
    a.log_flagged(&unlink(b"f", key), EntryFlags::LAST_CLOSED);
    world.kernel.digest_all().unwrap();
    assert!(matches!(
        a.link.call(Request::GetAttr { key }),
        Err(IpcError::Errno(libc::ESTALE))
    ));
    drop(a);
    assert_eq!(world.kernel.status().inodes_used, inodes);
    // After a crash one may: it is kept for a while.
    let (world, _client, _) = restarted_with_an_orphan(world);
    assert_eq!(world.kernel.status().inodes_used, inodes + 1);
}

#[test]
fn deleted_file_is_kept_after_a_restart_only_while_a_client_of_before_runs() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let (mut process, peer) = process();
    let mut a = world.client_as(peer, hello());
    let key = write_file(&mut a, b"f", b"open");
    a.log_op(&unlink(b"f", key));
    let world = world.restart();
    world.kernel.tick();
    assert_eq!(
        world.kernel.status().inodes_used,
        inodes + 1,
        "its client may come back"
    );
    process.kill().unwrap();
    process.wait().unwrap();
    world.kernel.tick();
    assert_eq!(world.kernel.status().inodes_used, inodes, "nobody can");
    // What is deleted from now on goes at once.
    let mut b = world.client();
    let key = write_file(&mut b, b"g", b"gone");
    b.log_flagged(&unlink(b"g", key), EntryFlags::LAST_CLOSED);
    world.kernel.digest_all().unwrap();
    assert_eq!(world.kernel.status().inodes_used, inodes);
    world.check();
}

#[test]
fn space_of_deleted_files_is_waited_for_when_it_is_kept_for_clients_that_may_come_back() {
    let world = World::with(Config {
        log_initial_bytes: CHUNK_BYTES,
        users: varve_kernelfs::Users::All,
        grace_ms: 300,
        ..Config::default()
    });
    let (world, _client, _) = restarted_with_an_orphan(world);
    let b = world.client();
    let all = world.kernel.store().space().available as u32;
    let ask = |blocks| {
        b.link.call(Request::Reserve {
            blocks,
            least: blocks,
        })
    };
    let inodes = world.kernel.status().inodes_used;
    std::thread::scope(|scope| {
        // More than there is before the deleted file's block is free.
        let asking = scope.spawn(|| ask(all + 1));
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!asking.is_finished(), "it is not refused while something is kept");
        world.clock.advance_ms(world.config.grace_ms + 1);
        assert_eq!(asking.join().unwrap(), Ok(Response::Reserved(all + 1)));
    });
    assert_eq!(world.kernel.status().inodes_used, inodes - 1);
}

#[test]
fn dead_client_is_digested_and_its_open_files_are_freed() {
    let world = World::new();
    let mut a = world.client();
    let gone = write_file(&mut a, b"gone", b"x");
    let kept = write_file(&mut a, b"kept", b"y");
    a.log_op(&unlink(b"gone", gone));
    let inodes = world.kernel.status().inodes_used;
    drop(a);
    assert_eq!(world.kernel.sessions(), 0);
    world.clock.advance_ms(world.config.grace_ms + 1);
    world.kernel.tick();
    let b = world.client();
    b.read_lease(ROOT);
    assert_eq!(b.lookup(b"kept").unwrap().key, kept);
    assert_eq!(b.lookup(b"gone"), None);
    assert!(matches!(
        b.link.call(Request::GetAttr { key: gone }),
        Err(IpcError::Errno(libc::ESTALE))
    ));
    assert_eq!(
        world.kernel.status().inodes_used,
        inodes - 1,
        "the numbers were taken before"
    );
    world.check();
}

/// Each in a transaction of its own kept the thread that ends sessions busy for minutes after a crash, on a
/// slow disk.
#[test]
fn open_files_of_a_dead_client_are_freed_many_at_once() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let mut a = world.client();
    for n in 0..200_u32 {
        let name = n.to_le_bytes();
        let key = write_file(&mut a, &name, b"x");
        a.log_op(&LogOp::Unlink {
            dir: ROOT,
            name: &name,
            key,
        });
    }
    world.kernel.digest_all().unwrap();
    assert_eq!(world.kernel.status().inodes_used, inodes + 200);
    drop(a);
    let before = world.kernel.store().newest_tx();
    world.clock.advance_ms(world.config.grace_ms + 1);
    world.kernel.tick();
    assert_eq!(world.kernel.status().inodes_used, inodes);
    let spent = world.kernel.store().newest_tx().0 - before.0;
    assert!(spent < 40, "{spent} transactions");
    world.check();
}

/// With threads of the daemon's own, its log is digested after the connection's thread has left.
#[test]
fn open_files_of_a_client_that_left_are_freed_while_its_process_lives() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let daemon = varve_kernelfs::Daemon::start(Arc::clone(&world.kernel)).unwrap();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"x");
    a.log_op(&unlink(b"f", key));
    drop(a);
    let within = |what: &str, done: &dyn Fn() -> bool| {
        let began = std::time::Instant::now();
        while !done() {
            assert!(began.elapsed().as_secs() < 20, "{what}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    within("its end", &|| world.kernel.status().ended_sessions == 1);
    world.clock.advance_ms(world.config.grace_ms + 1);
    within("the end of its file", &|| {
        world.kernel.status().inodes_used == inodes
    });
    daemon.stop().unwrap();
    world.check();
}

/// Between its making and its opening another session could remove it.
#[test]
fn file_made_by_the_daemon_to_be_opened_outlives_its_name() {
    let world = World::new();
    let mut clients = [world.client(), world.client()];
    let create = make(b"f");
    let inodes = world.kernel.status().inodes_used;
    let made = clients[0].forward_open(&create).unwrap().attr.unwrap().key;
    let removal = unlink(b"f", made);
    assert_eq!(
        clients[1].forward_open(&removal),
        Err(IpcError::Errno(libc::EINVAL)),
        "only what is made can be opened with it"
    );
    clients[1].read_lease(ROOT);
    assert_eq!(clients[1].lookup(b"f").unwrap().key, made);
    let lease = clients[1].read_lease(ROOT).lease;
    clients[1].release(ROOT, lease, false);
    clients[1].forward(&removal).unwrap();
    let attr = |client: &Client| client.link.call(Request::GetAttr { key: made });
    let Ok(Response::Attr(left)) = attr(&clients[0]) else {
        panic!("{:?}", attr(&clients[0]))
    };
    assert_eq!(left.nlink, 0);
    assert_eq!(world.kernel.status().inodes_used, inodes + 1);
    world.check();
    // It counts as open once, however it came to be so.
    let keys = vec![made];
    assert_eq!(clients[0].link.call(Request::Drop { keys }), Ok(Response::Done));
    assert_eq!(world.kernel.status().inodes_used, inodes);
    assert_eq!(attr(&clients[0]), Err(IpcError::Errno(libc::ESTALE)));
    // Made without being opened, it goes with its name.
    let key = clients[0].forward(&create).unwrap().attr.unwrap().key;
    clients[1].forward(&unlink(b"f", key)).unwrap();
    assert_eq!(world.kernel.status().inodes_used, inodes);
    world.check();
}

/// The answer may not have come: its client cannot say that it has it open.
#[test]
fn what_was_made_and_opened_for_a_lost_session_is_kept_for_the_next() {
    for restarts in [false, true] {
        let mut world = World::new();
        let (mut a, mut b) = (world.client(), world.client());
        let inodes = world.kernel.status().inodes_used;
        let create = make(b"f");
        let key = a.forward_open(&create).unwrap().attr.unwrap().key;
        if restarts {
            world = world.restart();
            b = b.resume(&world.kernel, Vec::new());
        } else {
            world.kernel.gone(a.id());
        }
        b.forward(&unlink(b"f", key)).unwrap();
        let a = a.resume(&world.kernel, Vec::new());
        let last = a.welcome.last_forwarded;
        assert_eq!((last.number, last.made, last.open), (1, Some(key), true));
        world.clock.advance_ms(world.config.grace_ms + 1);
        world.kernel.tick();
        let attr = || a.link.call(Request::GetAttr { key });
        assert!(matches!(attr(), Ok(Response::Attr(attr)) if attr.nlink == 0));
        let keys = vec![key];
        assert_eq!(a.link.call(Request::Drop { keys }), Ok(Response::Done));
        assert_eq!(attr(), Err(IpcError::Errno(libc::ESTALE)));
        assert_eq!(world.kernel.status().inodes_used, inodes);
        world.check();
    }
}

#[test]
fn file_made_by_the_daemon_without_a_name_is_there_until_it_is_closed() {
    let world = World::new();
    let mut clients = [world.client(), world.client()];
    let create = make(b"");
    let inodes = world.kernel.status().inodes_used;
    let made = clients[0].forward_open(&create).unwrap().attr.unwrap();
    assert_eq!(made.nlink, 0);
    // Another one's operation frees what nobody holds.
    clients[1].forward(&create).unwrap();
    assert_eq!(world.kernel.status().inodes_used, inodes + 1);
    world.check();
    let link = LogOp::Link {
        dir: ROOT,
        name: b"f",
        key: made.key,
    };
    assert_eq!(clients[0].forward(&link).unwrap().attr.unwrap().nlink, 1);
    let keys = vec![made.key];
    assert_eq!(clients[0].link.call(Request::Drop { keys }), Ok(Response::Done));
    assert_eq!(world.kernel.status().inodes_used, inodes + 1, "it has a name now");
    let key = clients[0].forward_open(&create).unwrap().attr.unwrap().key;
    assert_eq!(world.kernel.status().inodes_used, inodes + 2);
    let keys = vec![key];
    assert_eq!(clients[0].link.call(Request::Drop { keys }), Ok(Response::Done));
    assert_eq!(world.kernel.status().inodes_used, inodes + 1);
    world.check();
}

/// While clients of before may come back, every file counts as held.
#[test]
fn file_that_nobody_holds_is_freed_after_the_grace_time_in_which_it_was_deleted() {
    let world = World::new();
    let mut a = world.client();
    write_file(&mut a, b"f", b"x");
    let inodes = world.kernel.status().inodes_used;
    // A client of before may come back: this one.
    let world = world.restart();
    let mut b = world.client();
    let lease = b.read_lease(ROOT).lease;
    let key = b.lookup(b"f").unwrap().key;
    b.release(ROOT, lease, false);
    b.forward(&unlink(b"f", key)).unwrap();
    world.kernel.tick();
    assert_eq!(
        world.kernel.status().inodes_used,
        inodes,
        "its client may come back"
    );
    world.clock.advance_ms(world.config.grace_ms + 1);
    world.kernel.tick();
    assert_eq!(world.kernel.status().inodes_used, inodes - 1);
    world.check();
}

#[test]
fn stranger_keeps_nothing_alive_by_saying_that_it_has_it_open() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"secret");
    chmod(&mut a, key, 0o600);
    world.kernel.digest_all().unwrap();
    let claims = Hello {
        held: vec![key],
        ..hello()
    };
    let b = world.client_as(stranger(), claims);
    let _ = b.link.call(Request::Hold { keys: vec![key] });
    a.log_flagged(&unlink(b"f", key), EntryFlags::LAST_CLOSED);
    world.kernel.digest_all().unwrap();
    assert_eq!(world.kernel.status().inodes_used, inodes, "the file is gone");
    world.check();
}
