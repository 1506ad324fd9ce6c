//! Several mounts that fight over a few names of one directory tree: all calls end, and all see the same in
//! the end.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_embed::{Embedded, SimPool};
use varve_ipc::{Cred, SystemClock};
use varve_kernelfs::Config;
use varve_libfs::{Errno, Fs, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;
/// What one caller's race with another may end in.
const ALLOWED: &[i32] = &[
    libc::ENOENT,
    libc::EEXIST,
    libc::ENOTEMPTY,
    libc::ENOTDIR,
    libc::EISDIR,
    libc::EPERM,
    libc::EINVAL,
    libc::ESTALE,
];

fn random(seed: &mut u64, bound: u64) -> u64 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % bound
}

fn step(fs: &Fs, seed: &mut u64) -> Result<(), Errno> {
    let me = Cred::root();
    let dirs = [
        Ok(fs.root()),
        fs.lookup(fs.root(), b"d", &me).map(|attr| attr.key),
    ];
    let (from, to) = (dirs[random(seed, 2) as usize]?, dirs[random(seed, 2) as usize]?);
    let (x, y) = (format!("n{}", random(seed, 4)), format!("n{}", random(seed, 4)));
    let (x, y) = (x.as_bytes(), y.as_bytes());
    match random(seed, 8) {
        0 => fs.create(from, x, FILE, 0, &me).map(|_| ()),
        1 => fs.create(from, x, DIR, 0, &me).map(|_| ()),
        2 | 3 => fs.rename(from, x, to, y, RenameFlags::default(), &me),
        4 => fs
            .lookup(from, x, &me)
            .and_then(|attr| fs.link(attr.key, to, y, &me).map(|_| ())),
        5 => fs.unlink(from, x, &me),
        6 => fs.rmdir(from, x, &me),
        _ => {
            let attr = fs.lookup(from, x, &me)?;
            let flags = OpenFlags::READ_WRITE;
            fs.open(attr.key, flags, &me)?.append(b"line\n", &me).map(|_| ())
        }
    }
}

fn tree(fs: &Fs) -> BTreeMap<(u64, Vec<u8>), (u32, u32, u64)> {
    let d = fs.lookup(fs.root(), b"d", &Cred::root()).unwrap().key;
    let mut all = BTreeMap::new();
    for dir in [fs.root(), d] {
        for entry in fs.readdir(dir, 0, 1000).unwrap() {
            let attr = fs.lookup(dir, &entry.name, &Cred::root()).unwrap();
            assert_eq!(attr.key, entry.key);
            all.insert((dir.ino.0, entry.name), (attr.mode, attr.nlink, attr.size_bytes));
        }
    }
    all
}

#[test]
fn mounts_that_fight_over_names_agree_in_the_end() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let parts = |world| {
        SimPool::default()
            .parts(world, Config::default(), Arc::new(SystemClock))
            .unwrap()
            .0
    };
    let embedded = Embedded::open(parts(&world)).unwrap();
    embedded.start().unwrap();
    let mounts = [embedded.mount().unwrap(), embedded.mount().unwrap()];
    mounts[0]
        .create(mounts[0].root(), b"d", DIR, 0, &Cred::root())
        .unwrap();
    std::thread::scope(|scope| {
        for (who, fs) in mounts.iter().enumerate() {
            for thread in 0..2_u64 {
                scope.spawn(move || {
                    let mut seed = 1 + who as u64 * 7 + thread * 13;
                    for _ in 0..60 {
                        if let Err(errno) = step(fs, &mut seed) {
                            assert!(ALLOWED.contains(&errno.0), "{errno}");
                        }
                    }
                });
            }
        }
    });
    assert_eq!(tree(&mounts[0]), tree(&mounts[1]));
    for fs in &mounts {
        println!("{:?}", fs.counters());
        fs.unmount().unwrap();
    }
    embedded.shutdown().unwrap();
    let findings = parts(&world).store.check().unwrap();
    assert!(findings.is_empty(), "{findings:?}");
}

/// A directory from before, in which names are made: it is read once, then the daemon is asked no more.
#[test]
fn creations_in_a_directory_from_before_soon_ask_nothing() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    embedded.start().unwrap();
    let me = Cred::root();
    let name = |n: u32| format!("name-{n:05}").into_bytes();
    let maker = embedded.mount().unwrap();
    let dir = maker
        .create(maker.root(), b"dir", libc::S_IFDIR | 0o755, 0, &me)
        .unwrap()
        .key;
    for n in 0..3000 {
        maker
            .create(dir, &name(n), libc::S_IFREG | 0o644, 0, &me)
            .unwrap();
    }
    maker.unmount().unwrap();

    let fs = embedded.mount().unwrap();
    assert_eq!(fs.lookup(fs.root(), b"dir", &me).unwrap().key, dir);
    for n in 3000..5000 {
        fs.create(dir, &name(n), libc::S_IFREG | 0o644, 0, &me).unwrap();
        // Between the pages, too: digested ones, and ones that go.
        if n % 7 == 0 {
            embedded.kernel().digest_all().unwrap();
            fs.unlink(dir, &name(n - 3), &me).unwrap();
        }
    }
    let missed = fs.counters().names_missed;
    assert!(missed < 100, "{missed} names were asked for");
    for n in 0..5000 {
        let there = n < 3000 || (n + 3) % 7 != 0 || n + 3 >= 5000;
        let found = fs.lookup(dir, &name(n), &me).map(|attr| attr.nlink);
        assert_eq!(found, if there { Ok(1) } else { Err(Errno(libc::ENOENT)) }, "{n}");
        let again = fs.create(dir, &name(n), libc::S_IFREG | 0o644, 0, &me);
        assert_eq!(again.err(), there.then_some(Errno(libc::EEXIST)), "{n}");
    }
    // Another session's names are not missed.
    let other = embedded.mount().unwrap();
    other
        .create(dir, b"theirs", libc::S_IFREG | 0o644, 0, &me)
        .unwrap();
    assert!(fs.lookup(dir, b"theirs", &me).is_ok());
    assert_eq!(fs.lookup(dir, b"nobody's", &me).err(), Some(Errno(libc::ENOENT)));
    for fs in [fs, other] {
        fs.unmount().unwrap();
    }
    assert_eq!(embedded.kernel().status().digest.refused, 0);
    assert!(embedded.kernel().store().check().unwrap().is_empty());
    embedded.shutdown().unwrap();
}

/// The daemon forgets a directory as soon as its removal is digested, perhaps while another thread is about
/// to remove it too.
#[test]
fn threads_of_one_mount_that_remove_the_same_directory_see_it_or_not() {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let parts = SimPool::default()
        .parts(&world, Config::default(), Arc::new(SystemClock))
        .unwrap()
        .0;
    let embedded = Embedded::open(parts).unwrap();
    embedded.start().unwrap();
    // One makes it, so that the other must ask whether it is empty.
    let (maker, fs) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let (root, me) = (fs.root(), Cred::root());
    let stop = AtomicBool::new(false);
    let removed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                match maker.create(root, b"d", DIR, 0, &me) {
                    Ok(_) => embedded.kernel().digest_all().unwrap(),
                    Err(Errno(libc::EEXIST)) => {}
                    Err(errno) => panic!("mkdir: {errno}"),
                }
            }
        });
        let remove = || {
            while removed.load(Ordering::Relaxed) < 400 {
                match fs.rmdir(root, b"d", &me) {
                    Ok(()) => drop(removed.fetch_add(1, Ordering::Relaxed)),
                    Err(Errno(libc::ENOENT)) => {}
                    Err(errno) => panic!("rmdir: {errno}"),
                }
                embedded.kernel().digest_all().unwrap();
            }
        };
        // As `remove` does first, more often.
        let look = || {
            while removed.load(Ordering::Relaxed) < 400 {
                match fs.lookup(root, b"d", &me) {
                    Ok(_) | Err(Errno(libc::ENOENT)) => {}
                    Err(errno) => panic!("lookup: {errno}"),
                }
            }
        };
        let threads = [
            scope.spawn(remove),
            scope.spawn(remove),
            scope.spawn(remove),
            scope.spawn(look),
        ];
        let ended = threads.map(|thread| thread.join());
        stop.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
    for fs in [maker, fs] {
        fs.unmount().unwrap();
    }
    embedded.shutdown().unwrap();
}
