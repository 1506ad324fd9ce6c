//! Sessions, leases and sealing, with a client that writes real log entries.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, chmod, hello, make, stranger, unlink, want, write_file};
use varve_format::log::CHUNK_BYTES;
use varve_format::{InodeAttr, InodeKey, LeaseNo, LogOp, LogSeq, Tier};
use varve_ipc::{
    Admin, Cred, HELD_MAX, Hello, IpcError, LeaseMode, Link, NUMBERS_MAX, Peer, ReleaseItem, Request,
    Response, Service, SessionPage, Upcall,
};
use varve_kernelfs::{Config, Status};
use varve_store::{DataTarget, Progress, StoreError};

#[test]
fn lease_passes_on_with_everything_that_was_logged_under_it() {
    let world = World::new();
    let mut a = world.client();
    let b = world.client();
    let key = write_file(&mut a, b"f", b"hello");
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            b.read_lease(ROOT);
            let attr = b.lookup(b"f").unwrap();
            b.read_lease(attr.key);
            let data = b.read(attr.key, 100);
            (attr, data)
        });
        world.clock.advance_ms(10);
        a.obey();
        // The file's own lease is asked for next.
        world.clock.advance_ms(10);
        a.obey();
        let (attr, data) = reader.join().unwrap();
        assert_eq!((attr.key, attr.size_bytes), (key, 5));
        assert_eq!(data, b"hello");
    });
    assert_eq!(a.page.digested(), LogSeq(2));
    world.check();
}

#[test]
fn session_is_on_media_from_its_first_change_on() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"hello");
    world.kernel.digest_all().unwrap();
    let rows = |world: &World| -> Vec<_> {
        let rows = world.kernel.store().sessions().unwrap();
        rows.iter().map(|row| row.id).collect()
    };
    assert_eq!(rows(&world), [a.id()]);
    drop(a);
    let left = rows(&world);
    // One that reads costs no transaction, and leaves nothing.
    let before = world.kernel.store().newest_tx();
    let b = world.client();
    b.read_lease(ROOT);
    b.read_lease(key);
    assert_eq!(b.read(key, 10), b"hello");
    let log = b.log.clone().unwrap();
    assert_eq!((rows(&world), log.len_bytes()), (left.clone(), 0));
    drop(b);
    assert_eq!(world.kernel.sessions(), 0);
    assert_eq!(world.kernel.store().newest_tx(), before);
    // Each way to change something makes the record, and its log is there.
    type Way = fn(&mut Client, InodeKey);
    let ways: [Way; 4] = [
        |client, key| {
            client.write_lease(key);
        },
        |client, _| {
            client.alloc(1);
        },
        |client, _| {
            client.forward(&make(b"g")).unwrap();
        },
        |client, _| {
            let grown = client.link.call(Request::GrowLog { len_bytes: 0 });
            assert_eq!(
                grown,
                Ok(Response::LogBytes(client.log.as_ref().unwrap().len_bytes()))
            );
        },
    ];
    for (number, way) in ways.iter().enumerate() {
        let mut c = world.client();
        assert!(!rows(&world).contains(&c.id()));
        way(&mut c, key);
        assert!(rows(&world).contains(&c.id()), "way {number}");
        assert!(c.log.as_ref().unwrap().len_bytes() > 0);
    }
    world.check();
}

#[test]
fn session_that_has_ended_gets_no_record() {
    let world = World::new();
    let a = world.client();
    let id = a.id();
    world.kernel.gone(id);
    let asked = a.link.call(Request::GrowLog { len_bytes: 0 });
    assert!(matches!(asked, Err(IpcError::Sealed)), "{asked:?}");
    assert_eq!(world.kernel.store().sessions().unwrap(), []);
    let mut a = a.resume(&world.kernel, vec![]);
    assert_eq!(a.welcome.seal.as_ref().map(|seal| seal.last), Some(LogSeq(0)));
    write_file(&mut a, b"f", b"after");
    world.check();
}

/// More entries than two batches take, so that one is gathered while another is applied.
#[test]
fn log_of_many_batches_is_digested_exactly_once_live_and_sealed() {
    let world = World::with(Config {
        log_initial_bytes: 2 * CHUNK_BYTES,
        ..Config::default()
    });
    let mut a = world.client();
    let key = write_file(&mut a, b"f", &[0; 4096]);
    let value = |round: u64, at: u64| (round * 31 + at * 7) as u8;
    let fill = |a: &mut Client, round: u64, entries: u64| {
        for at in 0..entries {
            let offset = at * 3 % 4096;
            let data = &[value(round, at)];
            a.log_op(&LogOp::Write { key, offset, data });
        }
    };
    let expected = |entries: u64, round: u64, bytes: &mut [u8]| {
        for at in 0..entries {
            bytes[(at * 3 % 4096) as usize] = value(round, at);
        }
    };
    let mut bytes = vec![0; 4096];
    let entries = 15_000;
    fill(&mut a, 1, entries);
    expected(entries, 1, &mut bytes);
    let wait = Request::Digest {
        upto: LogSeq(a.seq),
        wait: true,
    };
    assert_eq!(
        a.link.call(wait),
        Ok(Response::Digested(LogSeq(a.seq))),
        "to the last entry"
    );
    assert_eq!(a.page.digested(), LogSeq(a.seq));
    assert_eq!(a.read(key, 4096), bytes);
    let status = world.kernel.status().digest;
    assert!(status.batches >= 2, "{status:?}");
    assert_eq!((status.operations, status.refused), (entries + 2, 0));
    // The second chunk, from its start, and the daemon dies.
    a.offset = CHUNK_BYTES;
    fill(&mut a, 2, 9000);
    expected(9000, 2, &mut bytes);
    let last = LogSeq(a.seq);
    let world = world.restart();
    let a = a.resume(&world.kernel, vec![key]);
    assert!(a.welcome.seal.as_ref().unwrap().covers(last));
    a.read_lease(key);
    assert_eq!(a.read(key, 4096), bytes);
    world.check();
}

#[test]
fn session_that_does_not_give_back_is_sealed_and_resumes_with_its_seal() {
    let world = World::new();
    let mut a = world.client();
    let b = world.client();
    let key = write_file(&mut a, b"f", b"kept");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| b.write_lease(ROOT));
        world.clock.advance_ms(10);
        assert!(matches!(a.upcall(), Upcall::Revoke { key: ROOT, .. }));
        world.clock.advance_ms(world.config.lease_ms + 1);
        waiter.join().unwrap();
    });
    assert!(!a.is_live());
    assert_eq!(a.acquire(&[want(ROOT, LeaseMode::Read)]), Err(IpcError::Sealed));
    assert_eq!(
        b.lookup(b"f").unwrap().key,
        key,
        "what was committed before the seal counts"
    );
    // Too late: beyond the seal.
    let late = a.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"lost",
    });
    let old = a.id();
    let a = a.resume(&world.kernel, vec![key]);
    let seal = a.welcome.seal.clone().unwrap();
    assert!(seal.covers(LogSeq(2)) && !seal.covers(late));
    assert_ne!(a.id(), old);
    a.read_lease(key);
    assert_eq!(a.read(key, 10), b"kept");
    let status = world.kernel.status();
    assert_eq!(
        (status.sessions.len(), status.ended_sessions, status.leases.seals),
        (2, 0, 1)
    );
    world.check();
}

#[test]
fn restart_digests_every_log_and_seals_every_session() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"before the crash");
    let world = world.restart();
    assert!(!a.is_live());
    let b = world.client();
    b.read_lease(ROOT);
    assert_eq!(b.lookup(b"f").unwrap().key, key);
    let a = a.resume(&world.kernel, Vec::new());
    assert!(a.welcome.seal.as_ref().unwrap().covers(LogSeq(2)));
    a.read_lease(key);
    assert_eq!(a.read(key, 100), b"before the crash");
    assert_eq!(world.kernel.store().grants().unwrap(), []);
    world.check();
    // Once more: nothing happens twice.
    let world = world.restart();
    world.check();
}

#[test]
fn goodbye_leaves_no_rows() {
    let world = World::new();
    let mut a = world.client();
    write_file(&mut a, b"f", b"x");
    assert_eq!(a.link.call(Request::Bye), Ok(Response::Done));
    assert_eq!(world.kernel.store().sessions().unwrap(), []);
    assert_eq!(world.kernel.store().grants().unwrap(), []);
    assert_eq!(world.kernel.status().reserved_blocks, 0);
    assert_eq!(a.link.call(Request::StatFs), Err(IpcError::Sealed));
    world.check();
}

/// A mount of an ordinary user may live for months: it would have used up what it may name.
#[test]
fn unprivileged_session_forgets_what_is_gone() {
    let world = World::new();
    let mut a = world.client();
    a.write_lease(ROOT);
    chmod(&mut a, ROOT, 0o777);
    a.link.call(Request::Bye).unwrap();
    let mut b = world.client_as(stranger(), hello());
    let known = |b: &Client| world.kernel.session_detail(b.id()).unwrap().known;
    let before = known(&b);
    for round in 0..4 {
        let lease = b.write_lease(ROOT).lease;
        let made = b.alloc(16);
        for (key, _) in &made[..12] {
            let name = key.ino.0.to_le_bytes().map(|byte| byte % 10 + b'0');
            b.log_op(&LogOp::Create {
                dir: ROOT,
                name: &name,
                key: *key,
                mode: 0o100_644,
                uid: 4711,
                gid: 4711,
                rdev: 0,
                target: b"",
            });
            // In odd rounds they are gone before they are digested.
            if round % 2 == 0 {
                world.kernel.digest_all().unwrap();
            }
            b.log_op(&LogOp::Unlink {
                dir: ROOT,
                name: &name,
                key: *key,
            });
        }
        assert_eq!(known(&b), before + 16);
        for (key, lease) in made {
            b.release(key, lease, false);
        }
        b.release(ROOT, lease, false);
        world.kernel.digest_all().unwrap();
        world.kernel.tick();
        assert_eq!(known(&b), before, "round {round}");
    }
    assert_eq!(world.kernel.status().digest.refused, 0);
    world.check();
}

#[test]
fn entries_without_a_grant_are_refused_and_stop_nobody() {
    let world = World::new();
    let mut a = world.client();
    let mut b = world.client();
    let key = write_file(&mut a, b"f", b"mine");
    // B writes to A's file, makes an inode that nobody gave it, and then something right.
    b.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"evil",
    });
    b.create(b"evil", InodeKey::new(999, 1));
    let (own, lease) = b.alloc(1)[0];
    b.log_op(&LogOp::Write {
        key: own,
        offset: 0,
        data: b"never made",
    });
    b.release(own, lease, false);
    assert_eq!(b.page.digested(), LogSeq(3));
    assert!(world.kernel.status().digest.refused >= 3);
    assert_eq!(
        a.link.call(Request::Digest {
            upto: LogSeq(2),
            wait: true
        }),
        Ok(Response::Digested(LogSeq(2)))
    );
    assert_eq!(a.read(key, 10), b"mine");
    assert_eq!(a.lookup(b"evil"), None);
    world.check();
}

#[test]
fn hostile_requests_get_an_errno() {
    let world = World::new();
    let a = world.client();
    let errno = |request: Request| match a.link.call(request) {
        Err(IpcError::Errno(errno)) => errno,
        other => panic!("{other:?}"),
    };
    let nobody = InodeKey::new(u64::MAX, 7);
    assert_eq!(errno(Request::Acquire { wants: vec![] }), libc::EINVAL);
    assert_eq!(
        errno(Request::Acquire {
            wants: vec![want(ROOT, LeaseMode::Read); 2]
        }),
        libc::EINVAL
    );
    assert_eq!(
        errno(Request::Acquire {
            wants: vec![want(ROOT, LeaseMode::Read); 65]
        }),
        libc::E2BIG
    );
    assert_eq!(
        errno(Request::Acquire {
            wants: vec![want(nobody, LeaseMode::Write)]
        }),
        libc::ESTALE
    );
    assert_eq!(errno(Request::AllocInodes { near: ROOT, count: 0 }), libc::EINVAL);
    assert_eq!(
        errno(Request::AllocInodes {
            near: ROOT,
            count: NUMBERS_MAX + 1
        }),
        libc::EINVAL
    );
    assert_eq!(
        errno(Request::Lookup {
            dir: ROOT,
            name: b"x".to_vec()
        }),
        libc::EAGAIN,
        "no lease"
    );
    assert_eq!(
        errno(Request::Hold {
            keys: vec![ROOT; HELD_MAX + 1]
        }),
        libc::E2BIG
    );
    assert_eq!(errno(Request::GrowLog { len_bytes: 1 << 60 }), libc::EINVAL);
    assert_eq!(errno(Request::Reserve { blocks: 1, least: 2 }), libc::EINVAL);
    a.read_lease(ROOT);
    assert_eq!(
        errno(Request::Lookup {
            dir: ROOT,
            name: b"a/b".to_vec()
        }),
        libc::EINVAL
    );
    assert_eq!(
        errno(Request::ReadData {
            key: ROOT,
            offset: 0,
            len: 1
        }),
        libc::EISDIR
    );
    assert_eq!(
        errno(Request::ReadData {
            key: ROOT,
            offset: 0,
            len: u32::MAX
        }),
        libc::EINVAL
    );
    // A lease of nobody, given back up to a number that was never logged.
    let item = |lease| ReleaseItem {
        key: ROOT,
        lease,
        downgrade: true,
        last_seq: LogSeq(u64::MAX),
        open: true,
        changes: 0,
        cached_ms: 0,
    };
    let stale = a.link.call(Request::Release {
        items: vec![item(LeaseNo(12345))],
    });
    assert_eq!(stale, Ok(Response::Done));
    assert!(a.is_live());
}

#[test]
fn absurd_release_fails_and_the_lease_stays_until_it_expires() {
    let config = Config {
        lease_ms: 100,
        log_initial_bytes: 2 << 20,
        ..Config::default()
    };
    let world = World::with(config);
    let a = world.client();
    let lease = a.write_lease(ROOT).lease;
    let item = ReleaseItem {
        key: ROOT,
        lease,
        downgrade: false,
        last_seq: LogSeq(1 << 60),
        open: true,
        changes: 0,
        cached_ms: 0,
    };
    let answer = a.link.call(Request::Release { items: vec![item] });
    assert_eq!(answer, Err(IpcError::Errno(libc::EAGAIN)));
    world.clock.advance_ms(101);
    world.kernel.tick();
    assert!(!a.is_live());
}

#[test]
fn credits_are_bounded_and_come_back() {
    let world = World::new();
    let a = world.client();
    let before = world.kernel.store().space().available;
    let Response::Reserved(granted) = a
        .link
        .call(Request::Reserve {
            blocks: 100,
            least: 1,
        })
        .unwrap()
    else {
        panic!("other answer")
    };
    assert_eq!(granted, 100);
    let huge = u32::MAX;
    assert_eq!(
        a.link.call(Request::Reserve {
            blocks: huge,
            least: huge
        }),
        Err(IpcError::Errno(libc::ENOSPC))
    );
    a.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.store().space().available, before);
}

#[test]
fn unprivileged_session_sees_only_what_its_user_may() {
    let world = World::new();
    let mut a = world.client();
    let secret = write_file(&mut a, b"secret", b"x");
    chmod(&mut a, secret, 0o600);
    a.link.call(Request::Bye).unwrap();
    let b = world.client_as(stranger(), hello());
    assert!(!b.welcome.privileged);
    let guess = b.acquire(&[want(secret, LeaseMode::Read)]);
    assert_eq!(
        guess,
        Err(IpcError::Errno(libc::ESTALE)),
        "a key that was not looked up"
    );
    b.read_lease(ROOT);
    assert_eq!(b.lookup(b"secret").unwrap().key, secret);
    b.read_lease(secret);
    let read = b.link.call(Request::ReadData {
        key: secret,
        offset: 0,
        len: 1,
    });
    assert_eq!(read, Err(IpcError::Errno(libc::EACCES)));
    assert_eq!(
        b.link.call(Request::Admin(Admin::Shutdown)),
        Err(IpcError::Errno(libc::EPERM))
    );
    // A write lease brings no right to write.
    let mut b = b;
    b.write_lease(secret);
    b.log_op(&LogOp::Write {
        key: secret,
        offset: 0,
        data: b"evil",
    });
    b.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.status().digest.refused, 1);
    world.check();
}

#[test]
fn rights_of_an_open_file_last_until_it_is_closed() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"x");
    let mode = |mode| LogOp::SetAttr {
        key,
        attr: varve_format::SetAttr {
            mask: varve_format::SetAttrMask::MODE,
            mode,
            ..varve_format::SetAttr::default()
        },
    };
    a.log_op(&mode(0o666));
    a.link.call(Request::Bye).unwrap();
    let mut b = world.client_as(stranger(), hello());
    let read = Request::ReadData {
        key,
        offset: 0,
        len: 1,
    };
    b.read_lease(ROOT);
    b.lookup(b"f").unwrap();
    let lease = b.read_lease(key).lease;
    assert_eq!(b.link.call(read.clone()), Ok(Response::Bytes(b"x".to_vec())));
    // It gives the lease back, and has the file open.
    b.release(key, lease, true);
    let mut c = world.client();
    c.write_lease(key);
    c.log_op(&mode(0o600));
    c.link.call(Request::Bye).unwrap();
    let lease = b.write_lease(key).lease;
    assert_eq!(b.link.call(read.clone()), Ok(Response::Bytes(b"x".to_vec())));
    b.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"y",
    });
    b.link
        .call(Request::Digest {
            upto: LogSeq(1),
            wait: true,
        })
        .unwrap();
    assert_eq!(b.link.call(read.clone()), Ok(Response::Bytes(b"y".to_vec())));
    b.release(key, lease, false);
    b.write_lease(key);
    assert_eq!(b.link.call(read), Err(IpcError::Errno(libc::EACCES)));
    b.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"z",
    });
    b.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.status().digest.refused, 1);
    world.check();
}

#[test]
fn owner_who_takes_the_right_to_write_back_writes_under_the_same_lease() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"x");
    a.log_op(&LogOp::SetAttr {
        key,
        attr: varve_format::SetAttr {
            mask: varve_format::SetAttrMask::MODE | varve_format::SetAttrMask::UID,
            mode: 0o400,
            uid: 4711,
            ..varve_format::SetAttr::default()
        },
    });
    a.link.call(Request::Bye).unwrap();
    let mut b = world.client_as(stranger(), hello());
    b.read_lease(ROOT);
    b.lookup(b"f").unwrap();
    b.write_lease(key);
    b.log_op(&LogOp::SetAttr {
        key,
        attr: varve_format::SetAttr {
            mask: varve_format::SetAttrMask::MODE,
            mode: 0o600,
            ..varve_format::SetAttr::default()
        },
    });
    b.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"written",
    });
    b.link.call(Request::Bye).unwrap();
    assert_eq!(world.kernel.status().digest.refused, 0);
    world.check();
}

#[test]
fn user_that_is_not_named_has_no_session() {
    let world = World::with(Config {
        users: varve_kernelfs::Users::Only(vec![4712]),
        ..Config::default()
    });
    let open = |uid| {
        let peer = Peer {
            pid: std::process::id(),
            uid,
            gid: uid,
        };
        world
            .kernel
            .open_session(peer, hello())
            .map(|opened| opened.welcome.privileged)
    };
    assert_eq!(open(4711), Err(IpcError::Errno(libc::EACCES)));
    assert_eq!(open(4712), Ok(false));
    assert_eq!(open(0), Ok(true));
}

#[test]
fn forwarded_operation_waits_for_the_holders_log_and_counts_once() {
    let world = World::new();
    let mut a = world.client();
    let mut b = world.client();
    let key = write_file(&mut a, b"f", b"x");
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let op = make(b"g");
            assert!(b.forward(&op).unwrap().attr.is_some());
        });
        world.clock.advance_ms(10);
        a.obey();
        other.join().unwrap();
    });
    let again = unlink(b"g", key);
    assert_eq!(
        b.forward_as(&again, 1, Cred::root()),
        Err(IpcError::Errno(libc::EALREADY))
    );
    a.read_lease(ROOT);
    assert!(a.lookup(b"g").is_some());
    assert_eq!(a.lookup(b"f").unwrap().key, key);
    world.check();
}

/// Its client is told that it was not done, and does it again: then nobody else may still do it.
#[test]
fn forwarded_operation_of_a_session_that_ended_meanwhile_is_not_done() {
    let world = World::new();
    let (a, mut b) = (world.client(), world.client());
    a.write_lease(ROOT);
    let (id, token) = (b.id(), b.welcome.token);
    let create = make(b"g");
    let again = Hello {
        resume: Some(token),
        ..hello()
    };
    let resumed = std::thread::scope(|scope| {
        let asked = scope.spawn(|| b.forward(&create));
        world.clock.advance_ms(10);
        let Upcall::Revoke { key, lease, .. } = a.upcall() else {
            panic!("another upcall")
        };
        world.kernel.gone(id);
        let resumed = Client::open(&world.kernel, Peer::this_process(), again).unwrap();
        a.release(key, lease, true);
        assert_eq!(asked.join().unwrap(), Err(IpcError::Sealed));
        resumed
    });
    assert_eq!(resumed.welcome.last_forwarded.number, 0);
    resumed.read_lease(ROOT);
    assert!(resumed.lookup(b"g").is_none());
    world.check();
}

#[test]
fn client_that_did_not_hear_the_welcome_hears_how_its_session_ended_the_next_time() {
    let world = World::new();
    let mut a = world.client();
    write_file(&mut a, b"f", b"x");
    let again = Hello {
        resume: Some(a.welcome.token),
        ..hello()
    };
    let seals: Vec<_> = (0..3)
        .map(|_| {
            // Each is gone before its client has said a word.
            let unheard = Client::open(&world.kernel, Peer::this_process(), again.clone()).unwrap();
            unheard.welcome.seal.clone()
        })
        .collect();
    assert!(seals[0].is_some() && seals.iter().all(|seal| *seal == seals[0]));
    let heard = Client::open(&world.kernel, Peer::this_process(), again.clone()).unwrap();
    assert_eq!(heard.welcome.seal, seals[0]);
    heard.read_lease(ROOT);
    let late = Client::open(&world.kernel, Peer::this_process(), again).unwrap();
    assert!(late.welcome.seal.is_none(), "it was heard of");
    world.check();
}

#[test]
fn rename_by_name_is_one_message_in_contended_directories_and_refused_elsewhere() {
    let world = World::new();
    let mut clients = [world.client(), world.client()];
    let key = write_file(&mut clients[0], b"f", b"x");
    let by_name = |name: &'static [u8], new_name: &'static [u8]| LogOp::Rename {
        dir: ROOT,
        name,
        key: InodeKey::new(0, 0),
        new_dir: ROOT,
        new_name,
        victim: None,
        exchange: false,
    };
    let errno = |errno| Err(IpcError::Errno(errno));
    assert_eq!(clients[1].forward(&by_name(b"f", b"g")), errno(libc::EAGAIN));
    // The creation is in the first one's log, under its lease: the name is not yet there for the daemon.
    for held in [ROOT, key] {
        let lease = clients[0].read_lease(held).lease;
        clients[0].release(held, lease, false);
    }
    let mut turns = 0;
    while clients[turns % 2].acquire(&[want(ROOT, LeaseMode::Write)]) != Err(IpcError::Forward) {
        let lease = clients[turns % 2].read_lease(ROOT).lease;
        clients[turns % 2].release(ROOT, lease, false);
        turns += 1;
        assert!(turns < 10, "it goes over for nothing");
    }
    let (grants, forwarded) = counts(&world);
    let moved = clients[1].forward(&by_name(b"f", b"g")).unwrap();
    assert_eq!(moved.attr.map(|attr| attr.key), Some(key));
    assert_eq!(moved.contended, [ROOT]);
    assert_eq!(clients[1].forward(&by_name(b"f", b"g")), errno(libc::ENOENT));
    assert_eq!(clients[0].forward(&by_name(b"g", b"h")).map(|_| ()), Ok(()));
    // Two internal requests for leases: what was not there needed none.
    assert_eq!(counts(&world), (grants + 2, forwarded + 2));
    // What is to be replaced is looked at by who asks.
    clients[1].read_lease(ROOT);
    assert_eq!(clients[1].lookup(b"h").unwrap().key, key);
    let lease = clients[1].read_lease(ROOT).lease;
    clients[1].release(ROOT, lease, false);
    let link = LogOp::Link {
        dir: ROOT,
        name: b"there",
        key,
    };
    clients[1].forward(&link).unwrap();
    assert_eq!(clients[1].forward(&by_name(b"h", b"there")), errno(libc::EAGAIN));
    // Whoever may not search the directory learns nothing, nor may who may not write to it rename.
    let stranger = Cred {
        uid: 7,
        gid: 7,
        groups: Vec::new(),
    };
    let number = clients[1].forwarded + 1;
    clients[1].forwarded = number;
    let refused = clients[1].forward_as(&by_name(b"h", b"i"), number, stranger);
    assert_eq!(refused, errno(libc::EACCES));
    // Quiet for a while: by leases again.
    world.clock.advance_ms(1000);
    assert_eq!(clients[1].forward(&by_name(b"h", b"i")), errno(libc::EAGAIN));
    let lease = clients[1].write_lease(ROOT).lease;
    clients[1].release(ROOT, lease, false);
    world.check();
}

/// Requests for leases that were granted, and operations that were forwarded.
fn counts(world: &World) -> (u64, u64) {
    let leases = world.kernel.status().leases;
    (leases.grants, leases.mediated)
}

#[test]
fn latched_pool_still_welcomes_readers_and_ends() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"x");
    a.link
        .call(Request::Digest {
            upto: LogSeq(2),
            wait: true,
        })
        .unwrap();
    world.kernel.store().latch("a device failed, says the test");
    assert_eq!(
        a.acquire(&[want(key, LeaseMode::Write)]),
        Err(IpcError::Errno(libc::EROFS))
    );
    let b = world.client();
    assert!(b.welcome.read_only && b.welcome.latched.is_some() && b.log.is_none());
    assert!(matches!(
        b.link.call(Request::GetAttr { key }),
        Ok(Response::Attr(_))
    ));
    let Response::Json(json) = b.link.call(Request::Admin(Admin::Status)).unwrap() else {
        panic!("no status")
    };
    assert!(json.contains("a device failed"));
    assert!(world.kernel.shutdown().is_err());
}

#[test]
fn status_names_every_session() {
    let world = World::new();
    let a = world.client();
    a.write_lease(ROOT);
    let Response::Json(json) = a.link.call(Request::Admin(Admin::Status)).unwrap() else {
        panic!("no status")
    };
    assert!(json.contains("\"leases\":1") && json.contains("linked"), "{json}");
    let status: Status = world.kernel.status();
    assert_eq!((status.sessions[0].id, status.leases.rows), (a.id().0, 1));
    assert_eq!(status.tiers.len(), 1);
}

#[test]
fn shutdown_ends_all_sessions_and_the_pool_opens_clean() {
    let world = World::new();
    let mut a = world.client();
    write_file(&mut a, b"f", b"x");
    world.kernel.shutdown().unwrap();
    assert!(matches!(
        a.acquire(&[want(ROOT, LeaseMode::Read)]),
        Err(IpcError::Sealed | IpcError::Gone(_))
    ));
    let world = world.restart();
    let b = world.client();
    b.read_lease(ROOT);
    assert!(b.lookup(b"f").is_some());
    world.check();
}

#[test]
fn ended_sessions_make_room_when_one_process_opens_more_and_more() {
    use varve_ipc::Service;
    let world = World::with(Config {
        sessions_max: 4,
        ..Config::default()
    });
    let kept = world.client();
    let mut last = None;
    for _ in 0..20 {
        let client = world.client();
        last = Some(client.welcome.token);
        world.kernel.gone(client.id());
    }
    // The newest one is there for its client.
    let resumed = world.client_as(
        Peer::this_process(),
        Hello {
            resume: last,
            ..hello()
        },
    );
    assert!(resumed.welcome.seal.is_some());
    kept.read_lease(ROOT);
}

/// Takes all space, and the reserve, behind the sessions' backs.
fn take_all(world: &World) -> InodeKey {
    let store = world.kernel.store();
    let mut tx = store.begin().unwrap();
    let hog = tx.alloc_inodes(ROOT.ino, 1).unwrap()[0];
    tx.create(&InodeAttr::new(hog, 0o100_600, 0), &[]).unwrap();
    tx.commit().unwrap();
    let mut at = 0;
    for len in [1 << 20, 4096] {
        loop {
            let mut tx = store.begin().unwrap();
            tx.use_reserve();
            let target = DataTarget::only(Tier::Nvm).with_reserve();
            match tx.allocate(hog.ino, at, len, true, target) {
                Ok(Progress::Done) => at += len,
                Ok(Progress::More) => {}
                Err(StoreError::NoSpace { .. }) => break,
                Err(error) => panic!("{error}"),
            }
            tx.commit().unwrap();
        }
    }
    hog
}

fn give_back(world: &World, hog: InodeKey) {
    let store = world.kernel.store();
    let mut progress = Progress::More;
    while progress == Progress::More {
        let mut tx = store.begin().unwrap();
        tx.edit(hog.ino, |attr| attr.nlink = 0).unwrap();
        progress = tx.continue_free(hog.ino, 10_000).unwrap();
        tx.commit().unwrap();
    }
    store.checkpoint().unwrap();
}

/// What a client appends after its seal it does again in its next session: from the old log it must not
/// count, too.
#[test]
fn sealed_log_that_waits_for_space_is_digested_up_to_its_seal_only() {
    let world = World::new();
    let mut a = world.client();
    let key = write_file(&mut a, b"f", b"old");
    world.kernel.digest_all().unwrap();
    // It pays for what it logs; what nobody has paid for would be refused.
    let (blocks, least) = (1000, 1000);
    a.link.call(Request::Reserve { blocks, least }).unwrap();
    let hog = take_all(&world);
    let data = vec![1; 512 << 10];
    let covered = a.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: &data,
    });
    world.kernel.gone(a.id());
    assert!(!a.is_live());
    assert_eq!(world.kernel.status().ended_sessions, 0, "its log waits for space");
    let late = a.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"late",
    });
    give_back(&world, hog);
    // Somebody asks for a digest of all before the log's end is taken up again.
    world.kernel.digest_all().unwrap();
    assert!(a.page.digested() <= covered);
    world.clock.advance_ms(1000);
    world.kernel.tick();
    let a = a.resume(&world.kernel, vec![key]);
    let seal = a.welcome.seal.clone().unwrap();
    assert!(seal.covers(covered) && !seal.covers(late), "{seal:?}");
    a.read_lease(key);
    assert_eq!(a.read(key, 4), [1; 4]);
    world.check();
}
