//! What is told with leases, and to whom.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, create, hello, stranger, want, write_file};
use std::time::Duration;
use varve_format::{InodeKey, LogOp};
use varve_ipc::{
    Grant, ITEMS_MAX, LeaseMode, Link, MAPPED_FILES_MAX, Near, Request, Response, TOLD_MAX, Tell, Upcall,
};

const ALL: Tell = Tell {
    names: true,
    extents: true,
};

fn ask(client: &Client, wanted: InodeKey, mode: LeaseMode, these: &[InodeKey], tell: Tell) -> Vec<Grant> {
    let request = Request::AcquireNear {
        wants: vec![want(wanted, mode)],
        near: Near {
            these: these.to_vec(),
            after: wanted.ino,
            count: 0,
            mode,
            tell,
        },
    };
    match client.link.call(request) {
        Ok(Response::Granted(grants)) => grants,
        other => panic!("{other:?}"),
    }
}

/// Makes files `a`, `b` and so on, which the client holds.
fn write_files(client: &mut Client, count: u8) -> Vec<InodeKey> {
    let names = (0..count).map(|n| [b'a' + n]);
    names.map(|name| write_file(client, &name, b"x")).collect()
}

/// A world with these files, which nobody has.
fn world_of(names: &[&[u8]]) -> (World, Vec<InodeKey>) {
    let world = World::new();
    let mut maker = world.client();
    let keys = names
        .iter()
        .map(|name| write_file(&mut maker, name, b"some data"))
        .collect();
    maker.link.call(Request::Bye).unwrap();
    drop(maker);
    world.kernel.digest_all().unwrap();
    (world, keys)
}

#[test]
fn contents_come_with_leases_as_they_come_by_requests() {
    let (world, keys) = world_of(&[b"a", b"b", b"c"]);
    let client = world.client();
    let grants = ask(&client, ROOT, LeaseMode::Read, &keys, ALL);
    assert_eq!(grants.len(), 4);
    let (root, files) = grants.split_first().unwrap();
    assert!(grants.iter().all(|grant| grant.told.bare));
    let listed = Request::ReadDir {
        dir: ROOT,
        cookie: 0,
        max: 100,
    };
    let Ok(Response::Entries(entries, true)) = client.link.call(listed) else {
        panic!("not all names")
    };
    assert_eq!(entries.len(), 3);
    assert_eq!(root.told.names.as_ref(), Some(&entries));
    assert_eq!(root.told.extents, None);
    for grant in files {
        let request = Request::MapExtents {
            key: grant.attr.key,
            from: varve_format::FileBlock(0),
            max: 100,
        };
        let Ok(Response::Extents(extents, true)) = client.link.call(request) else {
            panic!("not all extents")
        };
        assert_eq!((extents.len(), grant.told.extents.as_ref()), (1, Some(&extents)));
        assert_eq!(grant.told.names, None);
    }
}

#[test]
fn maps_of_several_files_are_those_of_each() {
    let (world, keys) = world_of(&[b"a", b"b", b"c"]);
    let client = world.client();
    client
        .acquire(&[want(keys[0], LeaseMode::Read), want(keys[2], LeaseMode::Read)])
        .unwrap();
    let maps = |keys: &[InodeKey]| client.link.call(Request::MapFiles { keys: keys.to_vec() });
    let nobody = InodeKey::new(999, 1);
    let Ok(Response::Mapped(mapped)) = maps(&[keys[0], keys[1], keys[2], nobody]) else {
        panic!("no maps")
    };
    for (key, mapped) in [keys[0], keys[2]].into_iter().zip([&mapped[0], &mapped[2]]) {
        let request = Request::MapExtents {
            key,
            from: varve_format::FileBlock(0),
            max: 100,
        };
        let Ok(Response::Extents(extents, true)) = client.link.call(request) else {
            panic!("not all extents")
        };
        assert_eq!(mapped.as_ref(), Some(&extents));
    }
    assert_eq!((&mapped[1], &mapped[3]), (&None, &None), "no lease");
    let too_many = vec![keys[0]; MAPPED_FILES_MAX + 1];
    assert!(matches!(
        maps(&too_many),
        Err(varve_ipc::IpcError::Errno(libc::EINVAL))
    ));
    // A user maps segments only.
    let other = world.client_as(stranger(), hello());
    let theirs = other.link.call(Request::MapFiles { keys: keys.clone() });
    assert!(matches!(theirs, Ok(Response::Mapped(maps)) if maps == [None, None, None]));
}

#[test]
fn only_what_was_asked_for_is_told() {
    let (world, keys) = world_of(&[b"a"]);
    let client = world.client();
    for (tell, names, extents) in [
        (Tell::default(), false, false),
        (
            Tell {
                names: true,
                extents: false,
            },
            true,
            false,
        ),
        (
            Tell {
                names: false,
                extents: true,
            },
            false,
            true,
        ),
    ] {
        let other = world.client();
        let grants = ask(&other, ROOT, LeaseMode::Read, &keys, tell);
        assert_eq!(grants[0].told.names.is_some(), names);
        assert_eq!(grants[1].told.extents.is_some(), extents);
    }
    // Who writes would be told by a barrier of each digest.
    let grants = ask(&client, keys[0], LeaseMode::Write, &[], ALL);
    assert_eq!(grants[0].told.extents, None);
}

#[test]
fn extended_attributes_are_told_to_be_there() {
    let (world, keys) = world_of(&[b"a"]);
    let mut client = world.client();
    assert!(client.read_lease(keys[0]).told.bare);
    client.write_lease(keys[0]);
    client.log_op(&LogOp::SetXattr {
        key: keys[0],
        name: b"user.x",
        value: b"y",
    });
    client.link.call(Request::Bye).unwrap();
    drop(client);
    world.kernel.digest_all().unwrap();
    assert!(!world.client().read_lease(keys[0]).told.bare);
}

#[test]
fn ordinary_user_is_told_no_names_and_no_places() {
    let (world, keys) = world_of(&[b"a"]);
    let user = world.client_as(stranger(), hello());
    let grants = ask(&user, ROOT, LeaseMode::Read, &keys, ALL);
    assert_eq!(
        (grants.len(), grants[0].told.names.as_ref()),
        (1, None),
        "{grants:?}"
    );
    user.lookup(b"a").unwrap();
    let grants = ask(&user, keys[0], LeaseMode::Read, &[], ALL);
    assert_eq!(grants[0].told.extents, None);
    assert!(grants[0].told.bare);
}

#[test]
fn large_directory_is_not_told() {
    let names: Vec<_> = (0..TOLD_MAX + 1).map(|n| format!("f{n}").into_bytes()).collect();
    let names: Vec<_> = names.iter().map(|name| &name[..]).collect();
    let (world, _) = world_of(&names[..TOLD_MAX]);
    let told = ask(&world.client(), ROOT, LeaseMode::Read, &[], ALL);
    assert_eq!(told[0].told.names.as_ref().map(Vec::len), Some(TOLD_MAX));
    let (world, _) = world_of(&names);
    assert_eq!(
        ask(&world.client(), ROOT, LeaseMode::Read, &[], ALL)[0]
            .told
            .names,
        None
    );
}

#[test]
fn whoever_was_told_of_places_is_told_when_they_are_replaced() {
    let (world, keys) = world_of(&[b"a"]);
    let mut reader = world.client();
    let grants = ask(&reader, keys[0], LeaseMode::Read, &[], ALL);
    assert!(grants[0].told.extents.is_some());
    reader.write_lease(keys[0]);
    let upto = reader.log_op(&LogOp::Truncate {
        key: keys[0],
        size: 0,
    });
    let reader = &reader;
    std::thread::scope(|scope| {
        let digest = scope.spawn(move || reader.link.call(Request::Digest { upto, wait: true }));
        let Upcall::Barrier { tx, keys: told } = reader.upcall() else {
            panic!("another upcall")
        };
        assert_eq!(told, keys);
        reader.link.call(Request::BarrierAck { tx }).unwrap();
        digest.join().unwrap().unwrap();
    });
}

#[test]
fn what_another_session_holds_is_asked_back_ahead_of_its_turn() {
    let world = World::new();
    let mut holder = world.client();
    let keys = write_files(&mut holder, 5);
    world.kernel.digest_all().unwrap();
    let walker = world.client();
    let took = std::thread::scope(|scope| {
        let young = scope.spawn(|| ask(&walker, keys[0], LeaseMode::Read, &keys[1..], Tell::default()));
        world.clock.advance_ms(10);
        // A lease that was granted a moment ago stays, but for the one that is waited for.
        holder.obey();
        young.join().unwrap()
    });
    assert_eq!(took.len(), 1);
    world.clock.advance_ms(200);
    let took = std::thread::scope(|scope| {
        let next = scope.spawn(|| ask(&walker, keys[1], LeaseMode::Read, &keys[2..], Tell::default()));
        for _ in 1..5 {
            holder.obey();
        }
        next.join().unwrap()
    });
    assert!(!took.is_empty());
    // The others are free now, without any wait.
    let took = ask(&walker, keys[2], LeaseMode::Read, &keys[3..], Tell::default());
    assert_eq!(took.len(), 3);
    assert!(keys.len() < ITEMS_MAX);
    world.check();
}

#[test]
fn tree_is_asked_back_ahead_of_a_session_that_walks_through_it() {
    let world = World::new();
    let mut holder = world.client();
    let files = write_files(&mut holder, 8);
    let dirs = [0, 1].map(|n| {
        let dir = holder.alloc(1)[0].0;
        holder.log_op(&create(ROOT, &[b'0' + n], dir, 0o040_755));
        let below = holder.alloc(3).into_iter().map(|(key, _)| key);
        let below: Vec<_> = below
            .enumerate()
            .map(|(n, key)| {
                holder.log_op(&create(dir, &[b'a' + n as u8], key, 0o100_644));
                key
            })
            .collect();
        (dir, below)
    });
    world.kernel.digest_all().unwrap();
    world.clock.advance_ms(200);
    let walker = world.client();
    let take = |key, asked_back: usize| {
        std::thread::scope(|scope| {
            let took = scope.spawn(|| ask(&walker, key, LeaseMode::Read, &[], Tell::default()));
            (0..asked_back).for_each(|_| holder.obey());
            assert_eq!(took.join().unwrap().len(), 1);
        });
    };
    files.iter().for_each(|file| take(*file, 1));
    let seen = |dir: &(InodeKey, Vec<InodeKey>)| [vec![dir.0], dir.1.clone()].concat();
    // The directory that it goes into, what is below, and what is beside it.
    let [first, second] = &dirs;
    take(first.0, 1 + first.1.len() + seen(second).len());
    for key in first.1.iter().chain(&seen(second)) {
        take(*key, 0);
    }
    assert_eq!(holder.link.upcall(Duration::ZERO).unwrap(), None);
    world.check();
}
