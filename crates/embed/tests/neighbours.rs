//! Leases come for many files at once to who goes through them, and to others the files stay as they are.
#![allow(clippy::unwrap_used)]

use varve_embed::{Embedded, SimPool};
use varve_format::InodeKey;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{AttrChange, Errno, Fs, OpenFlags};
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;
const COUNT: u64 = 2000;

fn name(n: u64) -> String {
    format!("file-{n:05}")
}

/// A directory of files that nobody has leases on.
fn pool() -> Embedded {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let config = Config {
        leases_max: 512,
        ..Config::default()
    };
    let embedded = SimPool::default().open(&world, config).unwrap();
    embedded.start().unwrap();
    let fs = embedded.mount().unwrap();
    let me = Cred::root();
    let dir = fs.create(fs.root(), b"many", DIR, 0, &me).unwrap().key;
    for n in 0..COUNT {
        fs.create(dir, name(n).as_bytes(), FILE, 0, &me).unwrap();
    }
    fs.unmount().unwrap();
    embedded
}

/// The directory, found by its name: what the first session made is digested then.
fn many(fs: &Fs) -> InodeKey {
    fs.lookup(fs.root(), b"many", &Cred::root()).unwrap().key
}

fn requests(fs: &Fs) -> u64 {
    fs.counters().acquires
}

#[test]
fn going_through_files_asks_for_many_leases_at_once() {
    let embedded = pool();
    let me = Cred::root();
    let fs = embedded.mount().unwrap();
    let dir = many(&fs);
    for n in 0..COUNT {
        let attr = fs.lookup(dir, name(n).as_bytes(), &me).unwrap();
        assert_eq!((attr.mode, attr.nlink), (FILE, 1));
    }
    let read = requests(&fs);
    assert!(read < COUNT / 8, "{read} requests to look at {COUNT} files");
    for n in 0..COUNT {
        fs.unlink(dir, name(n).as_bytes(), &me).unwrap();
    }
    let removed = requests(&fs) - read;
    assert!(removed < COUNT / 8, "{removed} requests to remove {COUNT} files");
    assert!(fs.readdir(dir, 0, 10).unwrap().is_empty());
    fs.unmount().unwrap();
    let free = embedded.kernel().status();
    assert!(free.latched.is_none());
    embedded.shutdown().unwrap();
}

/// Takes what was listed in the order in which it is gone through by who lists much before he looks: that of
/// the numbers.
fn by_number(listed: &[varve_ipc::DirEntry]) -> Vec<varve_ipc::DirEntry> {
    let mut sorted = listed.to_vec();
    sorted.sort_by_key(|entry| entry.key.ino);
    sorted
}

#[test]
fn going_through_a_part_of_a_directory_asks_for_what_was_listed() {
    let embedded = pool();
    let me = Cred::root();
    let fs = embedded.mount().unwrap();
    let dir = many(&fs);
    // As `find` does in a directory with more files than it lists at once: the order of names is that of
    // their hashes, so each part is scattered over all numbers, and of the next numbers few are wanted.
    let (mut cookie, mut seen, mut asked) = (0, 0, 0);
    loop {
        let part = fs.readdir(dir, cookie, 200).unwrap();
        let Some(last) = part.last() else { break };
        cookie = last.next_cookie;
        let before = requests(&fs);
        for entry in by_number(&part) {
            assert_eq!(fs.lookup(dir, &entry.name, &me).unwrap().key, entry.key);
        }
        asked += requests(&fs) - before;
        seen += part.len() as u64;
    }
    assert_eq!(seen, COUNT);
    assert!(asked < COUNT / 20, "{asked} requests to look at {COUNT} files");
    let (mut removed, mut asked) = (0, 0);
    loop {
        let part = fs.readdir(dir, 0, 200).unwrap();
        if part.is_empty() {
            break;
        }
        let before = requests(&fs);
        for entry in by_number(&part) {
            fs.lookup(dir, &entry.name, &me).unwrap();
            fs.unlink(dir, &entry.name, &me).unwrap();
        }
        asked += requests(&fs) - before;
        removed += part.len() as u64;
    }
    assert_eq!(removed, COUNT);
    assert!(asked < COUNT / 20, "{asked} requests to remove {COUNT} files");
    fs.unmount().unwrap();
    embedded.shutdown().unwrap();
}

#[test]
fn leases_that_came_ahead_hide_nothing_that_others_change() {
    let embedded = pool();
    let me = Cred::root();
    let (a, b) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let dir = many(&a);
    let look = |fs: &Fs, n: u64| fs.lookup(dir, name(n).as_bytes(), &me);
    for round in 0..6_u64 {
        // One goes through all of them, so that leases come ahead; the other changes, here and there, what
        // the first may have leases on.
        std::thread::scope(|scope| {
            let walk = scope.spawn(|| {
                // Every other time they come as they were listed, else by the next numbers.
                let mut next = (round % 2 == 1).then_some(0);
                while let Some(cookie) = next {
                    let page = a.readdir(dir, cookie, 1000).unwrap();
                    next = page.last().map(|last| last.next_cookie);
                }
                for n in 0..COUNT {
                    match look(&a, n) {
                        Ok(attr) => assert!(attr.size_bytes <= round + 1, "{n}: {}", attr.size_bytes),
                        Err(errno) => assert_eq!(errno, Errno(libc::ENOENT), "{n}"),
                    }
                }
            });
            for n in (round..COUNT).step_by(97) {
                let key = match look(&b, n) {
                    Ok(attr) => attr.key,
                    Err(_) => continue,
                };
                if n % 3 == 0 {
                    b.unlink(dir, name(n).as_bytes(), &me).unwrap();
                } else {
                    let file = b.open(key, OpenFlags::READ_WRITE, &me).unwrap();
                    file.write_at(round, b"x", &me).unwrap();
                    drop(file);
                    let private = AttrChange {
                        mode: Some(0o600),
                        ..AttrChange::default()
                    };
                    b.setattr(key, &private, &me).unwrap();
                }
                // Seen at once by the first, whatever it had.
                match look(&a, n) {
                    Ok(attr) => {
                        assert_eq!(attr.size_bytes, round + 1);
                        assert_eq!(attr.mode & 0o777, 0o600);
                    }
                    Err(errno) => assert_eq!((errno, n % 3), (Errno(libc::ENOENT), 0)),
                }
            }
            walk.join().unwrap();
        });
    }
    for fs in [a, b] {
        fs.unmount().unwrap();
    }
    embedded.shutdown().unwrap();
}
