//! Space that is promised to a session is used up by what it logs, and by nothing else; what it does not use
//! is everybody's.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicU64, Ordering};
use varve_embed::{Embedded, SimPool};
use varve_format::InodeKey;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{AttrChange, Errno, Fs, OpenFlags, RenameFlags};
use varve_media::sim::{SimMedium, SimWorld};

const FILE: u32 = libc::S_IFREG | 0o644;

#[test]
fn operations_that_are_refused_use_up_no_space_that_was_promised() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    let fs = embedded.mount().unwrap();
    let me = Cred::root();
    let promised = || {
        embedded.kernel().digest_all().unwrap();
        embedded.kernel().status().sessions[0].credits
    };
    let (root, nobody) = (
        fs.root(),
        Cred {
            uid: 65_534,
            gid: 65_534,
            groups: Vec::new(),
        },
    );
    let key = fs.create(root, b"a", FILE, 0, &me).unwrap().key;
    fs.create(root, b"b", FILE, 0, &me).unwrap();
    fs.setxattr(key, b"user.x", b"1", false, false, &me).unwrap();
    let before = promised();
    // More than a bulk of credits, if each used some up.
    for _ in 0..8000 {
        fs.setxattr(key, b"system.posix_acl_access", b"1", false, false, &me)
            .unwrap_err();
        fs.setxattr(key, b"user.x", b"1", true, false, &me).unwrap_err();
        fs.create(root, b"c", FILE, 0, &nobody).unwrap_err();
        fs.link(key, root, b"c", &nobody).unwrap_err();
        fs.rename(root, b"a", root, b"c", RenameFlags::default(), &nobody)
            .unwrap_err();
        fs.link(root, root, b"c", &me).unwrap_err();
    }
    assert_eq!(promised(), before);
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}

const SMALL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 32 << 20,
    journal_bytes: 1 << 20,
    ssd_bytes: 32 << 20,
    hdd_bytes: 0,
};
const BLOCK: u64 = 4096;
/// Bytes of the pieces that the pool is filled with.
const PIECE: usize = 256 << 10;
/// Blocks that may be left when a piece finds no space: it and its trees' at most, with what others have
/// under way.
const LEFT: u64 = PIECE as u64 / BLOCK + 8;

fn open_small(world: &SimWorld) -> Embedded {
    let config = Config {
        grace_ms: 0,
        // Threads have lanes of their own only in a log of many chunks.
        log_max_bytes: 32 << 20,
        ..Config::default()
    };
    SMALL.open(world, config).unwrap()
}

fn piece(of: u8, number: u64) -> Vec<u8> {
    let word = (u64::from(of) << 56 | number).to_le_bytes();
    word.repeat(PIECE / word.len())
}

/// Appends pieces to a file of its own until there is no space; how many it has then.
fn fill(fs: &Fs, key: InodeKey, of: u8, done: u64, most: u64) -> u64 {
    let me = Cred::root();
    let file = fs.open(key, OpenFlags::READ_WRITE, &me).unwrap();
    for number in done..most {
        match file.write_at(number * PIECE as u64, &piece(of, number), &me) {
            Ok(len) => assert_eq!(len, PIECE),
            Err(Errno(libc::ENOSPC)) => return number,
            Err(error) => panic!("{error}"),
        }
    }
    most
}

fn assert_filled(fs: &Fs, name: &[u8], of: u8, pieces: u64) {
    let me = Cred::root();
    let key = fs.lookup(fs.root(), name, &me).unwrap().key;
    let file = fs.open(key, OpenFlags::READ, &me).unwrap();
    assert_eq!(fs.getattr(key).unwrap().size_bytes, pieces * PIECE as u64);
    let mut out = vec![0; PIECE];
    for number in 0..pieces {
        assert_eq!(file.read_at(number * PIECE as u64, &mut out).unwrap(), PIECE);
        assert!(out == piece(of, number), "piece {number} of {of}");
    }
}

fn make(fs: &Fs, name: &[u8]) -> InodeKey {
    fs.create(fs.root(), name, FILE, 0, &Cred::root()).unwrap().key
}

/// Blocks that could be written and are not, whoever has them.
fn left(embedded: &Embedded) -> u64 {
    embedded.kernel().digest_all().unwrap();
    let space = embedded.kernel().store().space();
    space.available + space.reserved
}

#[test]
fn space_that_one_session_does_not_use_is_the_others_until_the_pool_is_full() {
    let world = SimWorld::new();
    SMALL.mkfs(&world).unwrap();
    let embedded = open_small(&world);
    let (a, b) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let me = Cred::root();
    let before = b.statfs().unwrap().blocks_available;
    let small = make(&a, b"small");
    let file = a.open(small, OpenFlags::READ_WRITE, &me).unwrap();
    assert_eq!(file.write_at(0, b"ab", &me).unwrap(), 2);
    let promised = embedded.kernel().status().reserved_blocks;
    assert!(promised > 1000, "{promised} blocks");
    // A write of two bytes takes a few blocks of what can be had, whoever asks.
    for fs in [&a, &b] {
        let now = fs.statfs().unwrap().blocks_available;
        assert!(now + 32 >= before, "{now} of {before} blocks");
    }
    let key = make(&b, b"large");
    let pieces = fill(&b, key, 1, 0, u64::MAX);
    let has = pieces * PIECE as u64 / BLOCK;
    // The trees of a file in pieces take some, too.
    assert!(has + LEFT + before / 100 >= before, "{has} of {before} blocks");
    assert!(left(&embedded) <= LEFT);
    assert!(a.statfs().unwrap().blocks_available <= LEFT);
    // Nobody has anything that another could not get: neither gets more, but for what the last digests have
    // freed since.
    let other = make(&a, b"other");
    let others = fill(&a, other, 2, 0, u64::MAX);
    let more = fill(&b, key, 1, pieces, u64::MAX);
    assert!(
        others <= 1 && more <= pieces + 1,
        "{others} and {more} of {pieces}"
    );
    // What is freed by one is had by the other.
    let cut = more - 8;
    let size = AttrChange {
        size: Some(cut * PIECE as u64),
        ..AttrChange::default()
    };
    b.setattr(key, &size, &me).unwrap();
    let before_it = others;
    let others = fill(&a, other, 2, before_it, u64::MAX);
    assert!(others >= before_it + 6, "{others} pieces");
    assert!(left(&embedded) <= LEFT);
    assert_eq!(embedded.kernel().status().digest.refused, 0);
    embedded.kernel().digest_all().unwrap();
    let findings = embedded.kernel().store().check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    drop((a, b));
    embedded.shutdown().unwrap();

    let embedded = open_small(&world);
    let fs = embedded.mount().unwrap();
    assert_filled(&fs, b"large", 1, cut);
    assert_filled(&fs, b"other", 2, others);
    fs.unlink(fs.root(), b"large", &me).unwrap();
    fs.unlink(fs.root(), b"other", &me).unwrap();
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
    let embedded = open_small(&world);
    let free = embedded.kernel().store().space().available;
    assert!(free + 64 >= before, "{free} of {before} blocks");
    assert_eq!(embedded.kernel().status().reserved_blocks, 0);
    let findings = embedded.kernel().store().check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    embedded.shutdown().unwrap();
}

#[test]
fn space_that_an_idle_thread_was_given_is_that_of_its_sessions_other_threads() {
    let world = SimWorld::new();
    SMALL.mkfs(&world).unwrap();
    let embedded = open_small(&world);
    let fs = embedded.mount().unwrap();
    let (key, idle) = (make(&fs, b"large"), make(&fs, b"idle"));
    let (wrote, written) = std::sync::mpsc::channel();
    let (over, end) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let fs = &fs;
        scope.spawn(move || {
            let me = Cred::root();
            let file = fs.open(idle, OpenFlags::READ_WRITE, &me).unwrap();
            file.write_at(0, b"ab", &me).unwrap();
            wrote.send(()).unwrap();
            // It lives on, and does nothing.
            let _ = end.recv();
        });
        written.recv().unwrap();
        fill(fs, key, 1, 0, u64::MAX);
        assert!(left(&embedded) <= LEFT);
        drop(over);
    });
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}

/// Four sessions of three threads: each has lanes with something left, and all ask at once when it is short.
#[test]
fn many_sessions_fill_the_pool_side_by_side_and_none_keeps_anything_from_another() {
    const SESSIONS: u8 = 4;
    const THREADS: u8 = 3;
    let world = SimWorld::new();
    SMALL.mkfs(&world).unwrap();
    let embedded = open_small(&world);
    let mounts: Vec<_> = (0..SESSIONS).map(|_| embedded.mount().unwrap()).collect();
    let name = |of: u8| format!("f{of}").into_bytes();
    let counts: Vec<_> = (0..SESSIONS * THREADS).map(|_| AtomicU64::new(0)).collect();
    let mount = |of: u8| &mounts[usize::from(of / THREADS)];
    // While there is space for their names.
    let keys: Vec<_> = (0..SESSIONS * THREADS)
        .map(|of| make(mount(of), &name(of)))
        .collect();
    std::thread::scope(|scope| {
        for of in 0..SESSIONS * THREADS {
            let (fs, key, counts) = (mount(of), keys[usize::from(of)], &counts);
            scope.spawn(move || {
                let pieces = fill(fs, key, of, 0, u64::MAX);
                counts[usize::from(of)].store(pieces, Ordering::SeqCst);
            });
        }
    });
    // What failed at the end was amid others' writes; now nobody writes but one.
    for of in 0..SESSIONS * THREADS {
        let count = &counts[usize::from(of)];
        let done = count.load(Ordering::SeqCst);
        let pieces = fill(mount(of), keys[usize::from(of)], of, done, u64::MAX);
        count.store(pieces, Ordering::SeqCst);
    }
    assert!(left(&embedded) <= LEFT);
    let status = embedded.kernel().status();
    assert_eq!(
        (status.digest.refused, status.sessions.len()),
        (0, SESSIONS.into())
    );
    let promised: u64 = status.sessions.iter().map(|session| session.credits).sum();
    assert_eq!(status.reserved_blocks, promised);
    drop(mounts);
    embedded.shutdown().unwrap();
    let embedded = open_small(&world);
    let fs = embedded.mount().unwrap();
    for of in 0..SESSIONS * THREADS {
        assert_filled(&fs, &name(of), of, counts[usize::from(of)].load(Ordering::SeqCst));
    }
    let findings = embedded.kernel().store().check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
    fs.unmount().unwrap();
    drop(fs);
    embedded.shutdown().unwrap();
}
