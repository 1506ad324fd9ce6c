//! Sessions and leases against a daemon in plain maps: two mounts, hand-over, mediation, seals.
#![allow(clippy::unwrap_used)]

mod fake;

use fake::Fake;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use varve_format::InodeKey;
use varve_ipc::{Cred, ManualClock};
use varve_libfs::{
    AttrChange, CacheObserver, Errno, Fs, FsOptions, KernelCall, OpenFlags, PageUse, Posix, RenameFlags,
};

const FILE: u32 = libc::S_IFREG | 0o644;
const DIR: u32 = libc::S_IFDIR | 0o755;
const RW: OpenFlags = OpenFlags::READ_WRITE;

fn mount(fake: &Arc<Fake>) -> Fs {
    Fs::mount(fake.connector(), FsOptions::default()).unwrap()
}

fn me() -> Cred {
    Cred::root()
}

fn contents(fs: &Fs, name: &[u8]) -> Vec<u8> {
    let key = fs.lookup(fs.root(), name, &me()).unwrap().key;
    let file = fs.open(key, OpenFlags::READ, &me()).unwrap();
    let mut out = vec![0; 1 << 16];
    let count = file.read_at(0, &mut out).unwrap();
    out.truncate(count);
    out
}

fn listing(fs: &Fs) -> Vec<String> {
    let entries = fs.readdir(fs.root(), 0, 1000).unwrap();
    let mut names: Vec<_> = entries
        .iter()
        .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn other_mount_sees_names_data_and_attributes_at_once() {
    let fake = Fake::new();
    let (a, b) = (mount(&fake), mount(&fake));
    let made = a.create(a.root(), b"f", FILE, 0, &me()).unwrap();
    let file = a.open(made.key, RW, &me()).unwrap();
    assert_eq!(file.write_at(0, b"hello", &me()).unwrap(), 5);
    assert_eq!(contents(&b, b"f"), b"hello");
    let theirs = b.open(made.key, RW, &me()).unwrap();
    assert_eq!(theirs.append(b" world", &me()).unwrap(), (5, 6));
    assert_eq!(contents(&a, b"f"), b"hello world");
    a.setattr(
        made.key,
        &AttrChange {
            mode: Some(0o600),
            ..AttrChange::default()
        },
        &me(),
    )
    .unwrap();
    assert_eq!(b.getattr(made.key).unwrap().mode, libc::S_IFREG | 0o600);
    b.rename(b.root(), b"f", b.root(), b"g", RenameFlags::default(), &me())
        .unwrap();
    assert_eq!(a.lookup(a.root(), b"f", &me()), Err(Errno(libc::ENOENT)));
    assert_eq!(a.lookup(a.root(), b"g", &me()).unwrap().key, made.key);
    a.unmount().unwrap();
    b.unmount().unwrap();
}

#[test]
fn new_directory_is_filled_without_asking_the_daemon_for_names() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let dir = fs.create(fs.root(), b"d", DIR, 0, &me()).unwrap().key;
    let before = fake.count("lookup");
    for i in 0..100_u32 {
        fs.create(dir, format!("f{i}").as_bytes(), FILE, 0, &me())
            .unwrap();
    }
    assert_eq!(fake.count("lookup"), before);
    assert_eq!(fs.create(dir, b"f7", FILE, 0, &me()), Err(Errno(libc::EEXIST)));
    assert_eq!(fs.rmdir(fs.root(), b"d", &me()), Err(Errno(libc::ENOTEMPTY)));
    for i in 0..100_u32 {
        fs.unlink(dir, format!("f{i}").as_bytes(), &me()).unwrap();
    }
    fs.rmdir(fs.root(), b"d", &me()).unwrap();
    assert_eq!(fs.getattr(fs.root()).unwrap().nlink, 2);
    fs.unmount().unwrap();
}

#[test]
fn open_file_lives_on_when_its_name_goes_and_the_session_is_sealed() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let made = fs.create(fs.root(), b"f", FILE, 0, &me()).unwrap();
    let file = fs.open(made.key, RW, &me()).unwrap();
    file.write_at(0, b"before", &me()).unwrap();
    fs.unlink(fs.root(), b"f", &me()).unwrap();
    fake.seal_all();
    let mut out = [0; 6];
    assert_eq!(file.read_at(0, &mut out).unwrap(), 6);
    assert_eq!(&out, b"before");
    file.write_at(0, b"after!", &me()).unwrap();
    fake.seal_all();
    assert_eq!(file.getattr().unwrap().nlink, 0);
    assert_eq!(file.read_at(0, &mut out).unwrap(), 6);
    assert_eq!(&out, b"after!");
    assert!(fs.counters().resumed >= 2);
    drop(file);
    fs.unmount().unwrap();
}

#[test]
fn every_acknowledged_change_counts_when_sessions_are_sealed_all_the_time() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                fake.seal_all();
                std::thread::yield_now();
            }
        });
        let file = {
            let made = fs.create(fs.root(), b"log", FILE, 0, &me()).unwrap();
            fs.open(made.key, RW, &me()).unwrap()
        };
        for i in 0..40_u32 {
            file.append(&i.to_le_bytes(), &me()).unwrap();
            fs.create(fs.root(), format!("n{i}").as_bytes(), FILE, 0, &me())
                .unwrap();
            if i % 3 == 0 {
                fs.unlink(fs.root(), format!("n{i}").as_bytes(), &me()).unwrap();
            }
        }
        over.store(true, Ordering::SeqCst);
    });
    let all: Vec<u8> = (0..40_u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(contents(&fs, b"log"), all);
    assert_eq!(listing(&fs).len(), 1 + 40 - 14);
    fs.unmount().unwrap();
}

#[test]
fn contended_operations_are_done_by_the_daemon() {
    let fake = Fake::new();
    let fs = mount(&fake);
    fake.contended.store(true, Ordering::SeqCst);
    let made = fs.create(fs.root(), b"f", FILE, 0, &me()).unwrap();
    let file = fs.open(made.key, RW, &me()).unwrap();
    assert_eq!(file.write_at(0, b"abc", &me()).unwrap(), 3);
    assert_eq!(file.append(b"def", &me()).unwrap(), (3, 3));
    fs.setxattr(made.key, b"user.k", b"v", false, false, &me())
        .unwrap();
    fs.link(made.key, fs.root(), b"g", &me()).unwrap();
    fs.rename(fs.root(), b"g", fs.root(), b"h", RenameFlags::default(), &me())
        .unwrap();
    fs.unlink(fs.root(), b"f", &me()).unwrap();
    fs.setattr(
        made.key,
        &AttrChange {
            mode: Some(0o600),
            size: Some(4),
            ..AttrChange::default()
        },
        &me(),
    )
    .unwrap();
    // What changes the directory is forwarded; the new file itself is leased to its maker.
    assert!(fs.counters().forwarded >= 4, "{:?}", fs.counters());
    fake.contended.store(false, Ordering::SeqCst);
    assert_eq!(contents(&fs, b"h"), b"abcd");
    let attr = fs.getattr(made.key).unwrap();
    assert_eq!((attr.nlink, attr.mode), (1, libc::S_IFREG | 0o600));
    assert_eq!(fs.getxattr(made.key, b"user.k", &me()).unwrap(), b"v");
    assert_eq!(listing(&fs), ["h"]);
    drop(file);
    fs.unmount().unwrap();
}

/// It has no name that others could change, but it needs a number and a right of the directory.
#[test]
fn file_without_a_name_is_made_by_the_daemon_where_the_directory_is_contended() {
    let fake = Fake::new();
    let fs = mount(&fake);
    fake.contended.store(true, Ordering::SeqCst);
    let file = fs.tmpfile(fs.root(), 0o600, &me()).unwrap();
    assert_eq!(fs.counters().forwarded, 1, "it does not wait for a quiet moment");
    assert_eq!(file.write_at(0, b"abc", &me()).unwrap(), 3);
    assert_eq!(file.getattr().unwrap().nlink, 0);
    assert!(listing(&fs).is_empty());
    assert_eq!(fs.link(file.key(), fs.root(), b"f", &me()).unwrap().nlink, 1);
    fake.contended.store(false, Ordering::SeqCst);
    assert_eq!(contents(&fs, b"f"), b"abc");
    drop(file);
    fs.unmount().unwrap();
}

#[test]
fn file_without_a_name_stands_under_one_for_a_moment_and_gets_its_first_afterwards() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let (root, me) = (fs.root(), me());
    let file = fs.tmpfile(root, 0o600, &me).unwrap();
    file.write_at(0, b"abc", &me).unwrap();
    let seen = fs.while_named(file.key(), (root, b"lent"), &me, || {
        (listing(&fs), contents(&fs, b"lent"))
    });
    assert_eq!(seen.unwrap(), (vec!["lent".to_owned()], b"abc".to_vec()));
    assert_eq!((listing(&fs).len(), file.getattr().unwrap().nlink), (0, 0));
    // Somebody else may take the name away.
    fs.while_named(file.key(), (root, b"lent"), &me, || fs.unlink(root, b"lent", &me))
        .unwrap()
        .unwrap();
    fs.create(root, b"taken", FILE, 0, &me).unwrap();
    let refused = fs.while_named(file.key(), (root, b"taken"), &me, || ());
    assert_eq!(refused, Err(Errno(libc::EEXIST)));
    assert_eq!(fs.link(file.key(), root, b"f", &me).unwrap().nlink, 1);
    assert_eq!(contents(&fs, b"f"), b"abc");
    // One that had a name and lost it gets none again.
    fs.unlink(root, b"f", &me).unwrap();
    let late = fs.while_named(file.key(), (root, b"lent"), &me, || ());
    assert_eq!(late, Err(Errno(libc::ENOENT)));
    drop(file);
    fs.unmount().unwrap();
}

/// The next session gets the leases, and would find its own work in the way or do it twice.
#[test]
fn contended_operation_whose_answer_is_lost_is_done_once() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let lost = || fake.lose_next();
    lost();
    let made = fs.create(fs.root(), b"f", FILE, 0, &me()).unwrap();
    let file = fs.open(made.key, RW, &me()).unwrap();
    lost();
    assert_eq!(file.append(b"abc", &me()).unwrap(), (0, 3));
    lost();
    fs.setxattr(made.key, b"user.k", b"v", true, false, &me())
        .unwrap();
    lost();
    fs.removexattr(made.key, b"user.k", &me()).unwrap();
    lost();
    fs.link(made.key, fs.root(), b"g", &me()).unwrap();
    lost();
    fs.rename(fs.root(), b"g", fs.root(), b"h", RenameFlags::default(), &me())
        .unwrap();
    lost();
    fs.unlink(fs.root(), b"f", &me()).unwrap();
    lost();
    let (other, _) = fs.create_open(fs.root(), b"o", 0o600, RW, &me()).unwrap();
    assert!(
        !fake.lose_forwarded.load(Ordering::SeqCst),
        "all of them were forwarded"
    );
    assert_eq!(contents(&fs, b"h"), b"abc");
    assert_eq!(fs.getattr(made.key).unwrap().nlink, 1);
    assert_eq!(fs.getattr(other.key).unwrap().nlink, 1);
    assert_eq!(listing(&fs), ["h", "o"]);
    drop(file);
    fs.unmount().unwrap();
}

/// Another process removes it before it could be looked up.
#[test]
fn contended_creation_whose_answer_is_lost_is_found_when_its_name_is_gone() {
    let fake = Fake::new();
    let fs = mount(&fake);
    fake.unlink_lost.store(true, Ordering::SeqCst);
    let lost = || fake.lose_next();
    lost();
    fs.create(fs.root(), b"f", FILE, 0, &me()).unwrap();
    lost();
    fs.create(fs.root(), b"d", DIR, 0, &me()).unwrap();
    lost();
    let (made, file) = fs.create_open(fs.root(), b"o", 0o600, RW, &me()).unwrap();
    assert!(
        !fake.lose_forwarded.load(Ordering::SeqCst),
        "all of them were forwarded"
    );
    assert_eq!(listing(&fs), [] as [&str; 0]);
    assert_eq!(file.append(b"abc", &me()).unwrap(), (0, 3));
    assert_eq!(fs.getattr(made.key).unwrap().nlink, 0);
    drop(file);
    fs.unmount().unwrap();
}

/// What the caller is told beside is asked for in the next session.
#[test]
fn contended_operation_is_done_once_though_its_session_ends_with_the_answer() {
    let fake = Fake::new();
    let maker = mount(&fake);
    let made = maker.create(maker.root(), b"f", FILE, 0, &me()).unwrap();
    maker.unmount().unwrap();
    let fs = mount(&fake);
    fake.contended.store(true, Ordering::SeqCst);
    let file = fs.open(made.key, RW, &me()).unwrap();
    let forwarded = || fake.forwarded.load(Ordering::SeqCst);
    let once = |what: &str, operations: u64, call: &dyn Fn()| {
        let before = forwarded();
        fake.seal_after_forwarded.store(true, Ordering::SeqCst);
        call();
        assert!(!fake.seal_after_forwarded.load(Ordering::SeqCst), "{what}");
        assert_eq!(forwarded() - before, operations, "{what}");
    };
    let xattr = b"user.k";
    once("setxattr", 1, &|| {
        fs.setxattr(made.key, xattr, b"v", true, false, &me()).unwrap();
    });
    once("removexattr", 1, &|| {
        fs.removexattr(made.key, xattr, &me()).unwrap();
    });
    once("link", 1, &|| {
        let attr = fs.link(made.key, fs.root(), b"g", &me()).unwrap();
        assert_eq!(attr.nlink, 2);
    });
    let size = |size| AttrChange {
        size: Some(size),
        ..AttrChange::default()
    };
    once("truncate", 1, &|| {
        let attr = fs.setattr(made.key, &size(2), &me()).unwrap();
        assert_eq!(attr.size_bytes, 2);
    });
    once("truncate and chmod", 2, &|| {
        let change = AttrChange {
            mode: Some(0o640),
            ..size(1)
        };
        let attr = fs.setattr(made.key, &change, &me()).unwrap();
        assert_eq!((attr.size_bytes, attr.mode & 0o777), (1, 0o640));
    });
    once("append", 1, &|| {
        assert_eq!(file.append(b"d", &me()).unwrap(), (1, 1));
    });
    once("unlink", 1, &|| fs.unlink(fs.root(), b"g", &me()).unwrap());
    assert_eq!(contents(&fs, b"f"), b"\0d");
    drop(file);
    fs.unmount().unwrap();
}

#[test]
fn turn_in_a_contended_directory_is_one_message_and_none_when_it_is_quiet_again() {
    let fake = Fake::new();
    let clock = Arc::new(ManualClock::new(1));
    let options = FsOptions {
        clock: Arc::clone(&clock) as _,
        ..FsOptions::default()
    };
    let maker = mount(&fake);
    maker.create(maker.root(), b"d", DIR, 0, &me()).unwrap();
    let data = maker.create(maker.root(), b"data", FILE, 0, &me()).unwrap();
    maker.create(maker.root(), b"token-0", FILE, 0, &me()).unwrap();
    maker.unmount().unwrap();
    let fs = Fs::mount(fake.connector(), options).unwrap();
    let posix = Posix::new(fs.clone(), me());
    let file = fs.open(data.key, RW, &me()).unwrap();
    fake.contended.store(true, Ordering::SeqCst);
    let turn = |from: &[u8], to: &[u8]| {
        posix.rename(from, b"held")?;
        assert_eq!(file.write_at(0, b"mine", &me()).unwrap(), 4);
        posix.rename(b"held", to)
    };
    // What is held at first goes back; then it is known that all is contended.
    turn(b"token-0", b"token-1").unwrap();
    turn(b"token-1", b"token-0").unwrap();
    let messages = || {
        let calls = fake.calls.lock().unwrap();
        calls.values().sum::<u64>()
    };
    let forwarded = || fake.calls.lock().unwrap().get("mediate").copied().unwrap_or(0);
    for round in 0..20 {
        let before = (messages(), forwarded());
        turn(b"/token-0", b"/token-1").unwrap();
        turn(b"token-1", b"token-0").unwrap();
        // Looking at the other's token, too: it is not there.
        assert_eq!(turn(b"token-1", b"token-0"), Err(Errno(libc::ENOENT)));
        let after = (messages(), forwarded());
        if round > 0 {
            assert_eq!((after.0 - before.0, after.1 - before.1), (7, 7));
        }
        clock.advance_ms(10);
    }
    // A name that is there is replaced as always.
    posix.rename(b"token-0", b"data-2").unwrap();
    fs.create(fs.root(), b"token-0", FILE, 0, &me()).unwrap();
    posix.rename(b"token-0", b"data-2").unwrap();
    assert_eq!(fs.lookup(fs.root(), b"token-0", &me()), Err(Errno(libc::ENOENT)));
    // Silence for a while: a lease is asked for, and used from then on.
    fake.contended.store(false, Ordering::SeqCst);
    clock.advance_ms(60);
    posix.rename(b"data-2", b"token-0").unwrap();
    let before = forwarded();
    turn(b"token-0", b"token-1").unwrap();
    let quiet = messages();
    turn(b"token-1", b"token-0").unwrap();
    assert_eq!((messages(), forwarded()), (quiet, before));
    drop(file);
    fs.unmount().unwrap();
}

/// What one makes and opens the other removes at once: each call that makes it makes it once, and has it
/// open.
#[test]
fn file_is_made_and_opened_in_one_step() {
    let fake = Fake::new();
    fake.tolerate();
    let (a, b) = (mount(&fake), mount(&fake));
    let made = std::sync::atomic::AtomicBool::new(true);
    let (created, removed) = std::thread::scope(|scope| {
        let remover = scope.spawn(|| {
            let mut removed = 0;
            while made.load(Ordering::SeqCst) {
                removed += u64::from(b.unlink(b.root(), b"f", &me()).is_ok());
            }
            removed + u64::from(b.unlink(b.root(), b"f", &me()).is_ok())
        });
        let posix = Posix::new(a.clone(), me());
        let mut created = 0;
        for _ in 0..400 {
            match posix.open(b"f", libc::O_CREAT | libc::O_EXCL | libc::O_RDWR, 0o600) {
                Ok(file) => {
                    assert_eq!(posix.write(file, b"mine").unwrap(), 4);
                    posix.close(file).unwrap();
                    created += 1;
                }
                Err(errno) => assert_eq!(errno, Errno(libc::EEXIST)),
            }
        }
        made.store(false, Ordering::SeqCst);
        (created, remover.join().unwrap())
    });
    assert_eq!(created, removed);
    a.unmount().unwrap();
    b.unmount().unwrap();
}

/// The new name is made by somebody else between the look and the daemon's turn: it is replaced, unless that
/// was not to be.
#[test]
fn forwarded_rename_replaces_what_came_meanwhile() {
    let fake = Fake::new();
    let (a, b) = (mount(&fake), mount(&fake));
    let root = a.root();
    for noreplace in [false, true] {
        fake.contended.store(true, Ordering::SeqCst);
        a.create(root, b"from", FILE, 0, &me()).unwrap();
        let asked = fake.hold(1, "mediate", root, false);
        let flags = RenameFlags {
            noreplace,
            ..RenameFlags::default()
        };
        let outcome = std::thread::scope(|scope| {
            let renamed = scope.spawn(|| a.rename(root, b"from", root, b"to", flags, &me()));
            assert!(asked.reached(std::time::Duration::from_secs(20)));
            b.create(root, b"to", FILE, 0, &me()).unwrap();
            asked.open();
            renamed.join().unwrap()
        });
        let (expected, names) = match noreplace {
            false => (Ok(()), vec!["to"]),
            true => (Err(Errno(libc::EEXIST)), vec!["from", "to"]),
        };
        assert_eq!(outcome, expected);
        assert_eq!(listing(&b), names);
        fake.contended.store(false, Ordering::SeqCst);
        b.unlink(root, b"to", &me()).unwrap();
    }
    a.unmount().unwrap();
    b.unmount().unwrap();
}

/// The two names were looked at one after the other: the file seemed to have both, as if they were links to
/// it.
#[test]
fn file_that_is_moved_between_the_looks_of_another_rename_had_one_name() {
    for noreplace in [false, true] {
        let fake = Fake::new();
        let (a, b) = (mount(&fake), mount(&fake));
        let root = b.root();
        let d = b.create(root, b"d", DIR, 0, &me()).unwrap().key;
        b.create(d, b"f", FILE, 0, &me()).unwrap();
        let looked = fake.hold(1, "acquire", root, false);
        let flags = RenameFlags {
            noreplace,
            ..RenameFlags::default()
        };
        let outcome = std::thread::scope(|scope| {
            let late = scope.spawn(|| a.rename(d, b"f", root, b"f", flags, &me()));
            assert!(looked.reached(std::time::Duration::from_secs(20)));
            b.rename(d, b"f", root, b"f", flags, &me()).unwrap();
            looked.open();
            late.join().unwrap()
        });
        assert_eq!(outcome, Err(Errno(libc::ENOENT)), "{noreplace}");
        assert_eq!(listing(&b), ["d", "f"]);
        // Links to one file are left as they are.
        let f = b.lookup(root, b"f", &me()).unwrap().key;
        b.link(f, d, b"f", &me()).unwrap();
        let flags = RenameFlags::default();
        assert_eq!(a.rename(d, b"f", root, b"f", flags, &me()), Ok(()));
        assert_eq!(b.getattr(f).unwrap().nlink, 2);
        a.unmount().unwrap();
        b.unmount().unwrap();
    }
}

#[test]
fn directory_moves_to_another_parent_by_mediation() {
    let fake = Fake::new();
    let fs = mount(&fake);
    let (a, b) = (
        fs.create(fs.root(), b"a", DIR, 0, &me()).unwrap(),
        fs.create(fs.root(), b"b", DIR, 0, &me()).unwrap(),
    );
    let c = fs.create(a.key, b"c", DIR, 0, &me()).unwrap();
    assert_eq!(fs.lookup(c.key, b"..", &me()).unwrap().key, a.key);
    fs.rename(a.key, b"c", b.key, b"c2", RenameFlags::default(), &me())
        .unwrap();
    assert_eq!(fs.counters().forwarded, 1);
    assert_eq!(fs.lookup(c.key, b"..", &me()).unwrap().key, b.key);
    assert_eq!(fs.getattr(a.key).unwrap().nlink, 2);
    assert_eq!(fs.getattr(b.key).unwrap().nlink, 3);
    assert_eq!(fs.lookup(a.key, b"c", &me()), Err(Errno(libc::ENOENT)));
    fs.unmount().unwrap();
}

#[test]
fn two_mounts_with_shared_names_get_on_without_a_late_lease() {
    let fake = Fake::new();
    let mounts = [mount(&fake), mount(&fake)];
    let allowed = [
        libc::ENOENT,
        libc::EEXIST,
        libc::ENOTEMPTY,
        libc::ENOTDIR,
        libc::EISDIR,
        libc::EPERM,
        libc::ESTALE,
    ];
    std::thread::scope(|scope| {
        for (who, fs) in mounts.iter().enumerate() {
            for thread in 0..2_u64 {
                scope.spawn(move || {
                    let mut seed = 1 + who as u64 * 7 + thread * 13;
                    let mut next = |bound: u64| {
                        seed = seed
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(1_442_695_040_888_963_407);
                        (seed >> 33) % bound
                    };
                    for _ in 0..60 {
                        let (x, y) = (format!("n{}", next(4)), format!("n{}", next(4)));
                        let (x, y) = (x.as_bytes(), y.as_bytes());
                        let root = fs.root();
                        let outcome = match next(7) {
                            0 => fs.create(root, x, FILE, 0, &me()).map(|_| ()),
                            1 => fs.create(root, x, DIR, 0, &me()).map(|_| ()),
                            2 => fs.rename(root, x, root, y, RenameFlags::default(), &me()),
                            3 => fs
                                .lookup(root, x, &me())
                                .and_then(|attr| fs.link(attr.key, root, y, &me()).map(|_| ())),
                            4 => fs.unlink(root, x, &me()),
                            5 => fs.rmdir(root, x, &me()),
                            _ => fs.readdir(root, 0, 10).map(|_| ()),
                        };
                        if let Err(errno) = outcome {
                            assert!(allowed.contains(&errno.0), "{errno}");
                        }
                    }
                });
            }
        }
    });
    assert_eq!(listing(&mounts[0]), listing(&mounts[1]));
    assert_eq!(fake.late.load(Ordering::SeqCst), 0);
    for fs in &mounts {
        assert_eq!(fs.counters().resumed, 0);
        fs.unmount().unwrap();
    }
}

#[test]
fn idle_leases_go_back_when_there_are_too_many() {
    let fake = Fake::new();
    fake.leases_max.store(64, Ordering::SeqCst);
    let fs = mount(&fake);
    for i in 0..300_u32 {
        fs.create(fs.root(), format!("f{i}").as_bytes(), FILE, 0, &me())
            .unwrap();
    }
    for i in 0..300_u32 {
        assert_eq!(
            fs.lookup(fs.root(), format!("f{i}").as_bytes(), &me())
                .unwrap()
                .nlink,
            1
        );
    }
    // The worker gives back in its own time.
    let start = std::time::Instant::now();
    while fake.count("release") == 0 {
        assert!(start.elapsed().as_secs() < 60, "no lease was given back");
        std::thread::yield_now();
    }
    fs.unmount().unwrap();
}

#[test]
fn read_only_session_reads_and_refuses_changes() {
    let fake = Fake::new();
    let (writer, reader) = (
        mount(&fake),
        Fs::mount(
            fake.connector(),
            FsOptions {
                read_only: true,
                ..FsOptions::default()
            },
        )
        .unwrap(),
    );
    writer.create(writer.root(), b"f", FILE, 0, &me()).unwrap();
    assert_eq!(listing(&reader), ["f"]);
    assert_eq!(
        reader.create(reader.root(), b"g", FILE, 0, &me()),
        Err(Errno(libc::EROFS))
    );
    assert_eq!(reader.unlink(reader.root(), b"f", &me()), Err(Errno(libc::EROFS)));
    writer.unmount().unwrap();
    reader.unmount().unwrap();
}

/// A change of the root whose answer says "the root you have still", while the root is on its way back. How
/// many acknowledged operations the daemon left out.
fn change_while_its_directory_goes_back() -> u64 {
    let fake = Fake::new();
    let (a, b) = (mount(&fake), mount(&fake));
    let root = a.root();
    let x = a.create(root, b"x", FILE, 0, &me()).unwrap();
    let held = a.open(x.key, RW, &me()).unwrap();
    held.write_at(0, b"x", &me()).unwrap();
    let d = a.create(root, b"d", DIR, 0, &me()).unwrap();
    let sub = a.create(d.key, b"sub", FILE, 0, &me()).unwrap();
    a.unlink(d.key, b"sub", &me()).unwrap();
    assert_eq!(sub.nlink, 1);
    // The directory's lease goes to the other mount; the root's stays.
    assert_eq!(b.readdir(d.key, 0, 10).unwrap().len(), 0);
    a.create(root, b"y", FILE, 0, &me()).unwrap();
    fake.tolerate();
    let release = fake.hold(1, "release", x.key, false);
    let answer = fake.hold(1, "acquire", d.key, true);
    let drop_x = fake.hold(1, "drop", x.key, false);
    let listing_d = fake.hold(1, "readdir", d.key, true);
    let release_root = fake.hold(1, "release", root, true);
    let long = std::time::Duration::from_secs(20);
    std::thread::scope(|scope| {
        let (a, b) = (&a, &b);
        scope.spawn(move || b.getattr(x.key).unwrap());
        assert!(release.reached(long), "x is asked back");
        drop(held);
        let removed = scope.spawn(move || a.rmdir(root, b"d", &me()));
        assert!(answer.reached(long), "the directory is asked for, with the root");
        let seen = scope.spawn(move || b.readdir(root, 0, 10).unwrap());
        // The worker of the first mount is busy with x; the root's turn comes with the close.
        while fake.revoked(1, root) == 0 {
            std::thread::yield_now();
        }
        // Time for the first mount to hear of it: without, nothing is shown.
        std::thread::sleep(std::time::Duration::from_millis(50));
        release.open();
        assert!(drop_x.reached(long), "the close is told before the root goes");
        answer.open();
        // A request that goes on under the root's lease would look into the directory now. One that does not
        // has nothing to wait for.
        listing_d.reached(std::time::Duration::from_millis(300));
        drop_x.open();
        assert!(release_root.reached(long), "the root goes back");
        // The daemon has it, its client does not know yet: what is logged now is too late.
        listing_d.open();
        seen.join().unwrap();
        let start = std::time::Instant::now();
        while !removed.is_finished() && start.elapsed().as_millis() < 300 {
            std::thread::yield_now();
        }
        release_root.open();
        removed.join().unwrap().unwrap();
    });
    let gone = a.lookup(root, b"d", &me());
    a.unmount().unwrap();
    let refused = fake.refused();
    if refused == 0 {
        assert_eq!(gone, Err(Errno(libc::ENOENT)));
        assert_eq!(b.lookup(root, b"d", &me()), Err(Errno(libc::ENOENT)));
    }
    b.unmount().unwrap();
    refused
}

#[test]
fn acknowledged_change_counts_when_its_directory_is_wanted_back_meanwhile() {
    assert_eq!(change_while_its_directory_goes_back(), 0);
    // The same with the fault that it was found for, where faults can be had.
    varve_libfs::seeded::arm(Some(varve_libfs::seeded::Bug::GivenBackLate));
    if varve_libfs::seeded::current().is_some() {
        let seen = (0..20).any(|_| change_while_its_directory_goes_back() > 0);
        varve_libfs::seeded::arm(None);
        assert!(seen, "the fault is not seen");
    }
}

#[test]
fn lease_that_came_ahead_too_late_is_not_believed() {
    let fake = Fake::new();
    let (a, b) = (mount(&fake), mount(&fake));
    let root = a.root();
    // Two neighbours, known to the daemon, of which nobody has a lease but who made them.
    let x = a.create(root, b"x", FILE, 0, &me()).unwrap();
    let y = a.create(root, b"y", FILE, 0, &me()).unwrap();
    assert_eq!(y.key.ino.0, x.key.ino.0 + 1);
    a.unmount().unwrap();
    let c = mount(&fake);
    let private = |fs: &Fs, mode| {
        let change = AttrChange {
            mode: Some(mode),
            ..AttrChange::default()
        };
        fs.setattr(y.key, &change, &me()).unwrap();
    };
    // The second session asks for x, and y comes with it; the answer is late.
    let answer = fake.hold(2, "acquire", x.key, true);
    std::thread::scope(|scope| {
        let seen = scope.spawn(|| b.getattr(x.key).unwrap());
        assert!(
            answer.reached(std::time::Duration::from_secs(20)),
            "x is asked for"
        );
        assert!(fake.has(2, y.key), "its neighbour came with it");
        // Another one wants y: it is asked back before it is known, and given back.
        private(&c, 0o600);
        assert!(!fake.has(2, y.key));
        answer.open();
        assert_eq!(seen.join().unwrap().key, x.key);
    });
    assert_eq!(b.getattr(y.key).unwrap().mode & 0o777, 0o600);
    private(&c, 0o400);
    assert_eq!(b.getattr(y.key).unwrap().mode & 0o777, 0o400);
}

/// A kernel's page cache above a mount: which files it was told to drop.
#[derive(Default)]
struct PageCache(Mutex<BTreeSet<InodeKey>>);

impl CacheObserver for PageCache {
    fn invalidate_data(&self, key: InodeKey, offset: u64, len: u64) {
        assert_eq!((offset, len), (0, 0), "all of it");
        self.0.lock().unwrap().insert(key);
    }

    fn invalidate_unless_locked(&self, _: InodeKey, _: u64, _: u64) {}
}

/// After the seal others write to them: the kernel would show what was there before for ever.
#[test]
fn kernel_drops_what_it_read_under_leases_of_a_session_that_was_sealed() {
    let fake = Fake::new();
    let kernel = Arc::new(PageCache::default());
    let options = FsOptions {
        observer: Some(Arc::clone(&kernel) as _),
        ..FsOptions::default()
    };
    let fs = Fs::mount(fake.connector(), options).unwrap();
    let mut keys = Vec::new();
    for name in [b"read", b"made"] {
        let key = fs.create(fs.root(), name, FILE, 0, &me()).unwrap().key;
        let file = fs.open(key, RW, &me()).unwrap();
        file.write_at(0, b"before", &me()).unwrap();
        keys.push(key);
    }
    let file = fs.open(keys[0], OpenFlags::READ, &me()).unwrap();
    let mut out = [0; 6];
    let call = KernelCall::new(PageUse::Read, 1, 0, out.len());
    assert_eq!(file.read_pages(&call, 0, &mut out).unwrap(), 6);
    assert_eq!(*kernel.0.lock().unwrap(), BTreeSet::new());
    fake.seal_all();
    let began = std::time::Instant::now();
    while kernel.0.lock().unwrap().is_empty() {
        assert!(began.elapsed().as_secs() < 20, "its pages stay");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert_eq!(*kernel.0.lock().unwrap(), BTreeSet::from([keys[0]]));
    drop(file);
    fs.unmount().unwrap();
}

#[test]
fn idle_mount_and_one_that_waits_for_space_give_back_what_they_do_not_use() {
    let fake = Fake::new();
    let (idle, busy) = (mount(&fake), mount(&fake));
    let make = |fs: &Fs, name: &[u8]| fs.create(fs.root(), name, FILE, 0, &me()).unwrap().key;
    let key = make(&idle, b"idle");
    let file = idle.open(key, RW, &me()).unwrap();
    file.write_at(0, b"ab", &me()).unwrap();
    let left = idle.counters().credits;
    assert!(left > 16_000, "{left}");
    // Its worker answers; the other one never had any.
    assert_eq!(fake.recall_space(), [(left, 16_384), (0, 0)]);
    assert_eq!(idle.counters().credits, 0);
    let key = make(&busy, b"busy");
    let theirs = busy.open(key, RW, &me()).unwrap();
    let left = busy.counters().credits;
    assert_eq!(fake.recall_space(), [(0, 16_384), (left, 16_384)]);
    fake.hold_space(true);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| theirs.write_at(0, b"cd", &me()));
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(!writing.is_finished());
        assert_eq!(fake.recall_space(), [(0, 16_384), (0, 16_384)]);
        fake.hold_space(false);
        assert_eq!(writing.join().unwrap(), Ok(2));
    });
    // It asks again when it needs some.
    assert_eq!(file.write_at(0, b"efg", &me()), Ok(3));
    let left = [idle.counters().credits, busy.counters().credits];
    assert_eq!(fake.recall_space(), [(left[0], 32_768), (left[1], 32_768)]);
    drop((file, theirs));
    idle.unmount().unwrap();
    busy.unmount().unwrap();
    assert_eq!(contents(&mount(&fake), b"idle"), b"efg");
}
