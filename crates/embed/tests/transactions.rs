//! Groups of calls that persist as one, on pools in this process: what is seen when, what fails and leaves
//! nothing, bounds, threads, sessions.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_embed::{Embedded, SimPool};
use varve_format::InodeKey;
use varve_ipc::Cred;
use varve_kernelfs::Config;
use varve_libfs::{Errno, Fs, GROUP_BYTES_MAX, OpenFile, OpenFlags, RenameFlags};
use varve_media::sim::SimWorld;

const FILE: u32 = libc::S_IFREG | 0o644;
const BOTH: OpenFlags = OpenFlags::READ_WRITE;

fn pool() -> (SimWorld, Embedded) {
    let world = SimWorld::new();
    SimPool::default().mkfs(&world).unwrap();
    let embedded = SimPool::default().open(&world, Config::default()).unwrap();
    embedded.start().unwrap();
    (world, embedded)
}

fn file(fs: &Fs, name: &[u8], data: &[u8]) -> OpenFile {
    let key = fs.create(fs.root(), name, FILE, 0, &Cred::root()).unwrap().key;
    let file = fs.open(key, BOTH, &Cred::root()).unwrap();
    file.write_at(0, data, &Cred::root()).unwrap();
    file
}

fn content(fs: &Fs, key: InodeKey) -> Vec<u8> {
    let file = fs.open(key, BOTH, &Cred::root()).unwrap();
    let mut bytes = vec![0; fs.getattr(key).unwrap().size_bytes as usize];
    file.read_at(0, &mut bytes).unwrap();
    bytes
}

fn named(fs: &Fs, name: &[u8]) -> Option<InodeKey> {
    match fs.lookup(fs.root(), name, &Cred::root()) {
        Ok(attr) => Some(attr.key),
        Err(Errno(libc::ENOENT)) => None,
        Err(errno) => panic!("{errno}"),
    }
}

/// Nothing is refused by the digest, and the structures are sound.
fn end(embedded: Embedded, sessions: Vec<Fs>) {
    embedded.kernel().digest_all().unwrap();
    assert_eq!(embedded.kernel().status().digest.refused, 0);
    assert!(embedded.kernel().store().check().unwrap().is_empty());
    for fs in &sessions {
        fs.unmount().unwrap();
    }
    drop(sessions);
    embedded.shutdown().unwrap();
}

#[test]
fn group_is_seen_by_nobody_before_its_commit_and_by_all_after_it() {
    let (_world, embedded) = pool();
    let (fs, other) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let me = Cred::root();
    let (a, b) = (file(&fs, b"a", b"aaaa"), file(&fs, b"b", b"bbbb"));
    let mut group = fs.transaction(&me);
    let dir = group.mkdir(fs.root(), b"d", 0o750).unwrap();
    let made = group.create(dir, b"x", 0o600).unwrap();
    group.append(made, b"12").unwrap();
    group.append(made, b"345").unwrap();
    group.write_at(&a, 2, b"AA").unwrap();
    group.truncate(&b, 1).unwrap();
    group.append(&b, b"!").unwrap();
    let link = group.symlink(dir, b"s", b"x").unwrap();
    group.link(made, fs.root(), b"x2").unwrap();
    group.rename(fs.root(), b"a", dir, b"moved").unwrap();
    assert_eq!(group.len(), 10);
    for fs in [&fs, &other] {
        assert_eq!((named(fs, b"d"), named(fs, b"x2")), (None, None));
        assert_eq!(content(fs, a.key()), b"aaaa");
    }
    let attrs = group.commit().unwrap();
    assert_eq!(attrs.len(), 3);
    for fs in [&fs, &other, &fs] {
        let d = named(fs, b"d").unwrap();
        assert_eq!(d, attrs[dir.index()].key);
        let x = fs.lookup(d, b"x", &me).unwrap();
        assert_eq!(
            (x.key, x.nlink, x.mode & 0o7777),
            (attrs[made.index()].key, 2, 0o600)
        );
        assert_eq!(content(fs, x.key), b"12345");
        assert_eq!(fs.readlink(attrs[link.index()].key).unwrap(), b"x");
        assert_eq!(named(fs, b"x2"), Some(x.key));
        assert_eq!(named(fs, b"a"), None);
        assert_eq!(fs.lookup(d, b"moved", &me).unwrap().key, a.key());
        assert_eq!(content(fs, a.key()), b"aaAA");
        assert_eq!(content(fs, b.key()), b"b!");
        assert_eq!(fs.getattr(fs.root()).unwrap().nlink, 3);
    }
    drop((a, b));
    end(embedded, vec![fs, other]);
}

/// Blocks that a session may still use: as it counts, and as the daemon does when all is digested.
fn credits(embedded: &Embedded, fs: &Fs) -> (u64, u64) {
    embedded.kernel().digest_all().unwrap();
    let sessions = embedded.kernel().status().sessions;
    (
        fs.counters().credits,
        sessions.iter().map(|session| session.credits).sum(),
    )
}

#[test]
fn group_uses_up_what_the_daemon_counts_when_its_writes_begin_anywhere() {
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    let me = Cred::root();
    let (a, b) = (file(&fs, b"a", b"aaaa"), file(&fs, b"b", b"bbbb"));
    for round in 0..20_u8 {
        let mut group = fs.transaction(&me);
        let made = group.create(fs.root(), &[b'x', b'a' + round], 0o600).unwrap();
        group.append(made, &vec![1; 4096 + usize::from(round)]).unwrap();
        group.append(made, &[2; 100_000]).unwrap();
        group.append(&a, &[3; 5000]).unwrap();
        group.write_at(&b, 4095, &[4; 70_000]).unwrap();
        group.link(made, fs.root(), &[b'y', b'a' + round]).unwrap();
        group
            .rename(fs.root(), &[b'x', b'a' + round], fs.root(), b"last")
            .unwrap();
        group.commit().unwrap();
        let (own, daemons) = credits(&embedded, &fs);
        assert!(own > 0);
        assert_eq!(own, daemons, "group {round}");
    }
    drop((a, b));
    end(embedded, vec![fs]);
}

#[test]
fn group_of_which_one_call_fails_changes_nothing_and_costs_nothing() {
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    let (me, root) = (Cred::root(), fs.root());
    let (a, _b) = (file(&fs, b"a", b"aaaa"), file(&fs, b"b", b"bbbb"));
    let d = fs.create(root, b"d", libc::S_IFDIR | 0o755, 0, &me).unwrap().key;
    fs.create(d, b"in", FILE, 0, &me).unwrap();
    let nobody = Cred {
        uid: 65_534,
        gid: 65_534,
        groups: Vec::new(),
    };
    embedded.kernel().digest_all().unwrap();
    let promised = embedded.kernel().status().sessions[0].credits;
    type Call<'c> = &'c dyn Fn(&mut varve_libfs::Transaction);
    let calls: [(Call<'_>, i32); 9] = [
        (&|t| _ = t.create(root, b"b", 0o644).unwrap(), libc::EEXIST),
        (&|t| t.unlink(root, b"none").unwrap(), libc::ENOENT),
        (&|t| t.unlink(root, b"d").unwrap(), libc::EISDIR),
        (&|t| t.rename(root, b"none", root, b"z").unwrap(), libc::ENOENT),
        (&|t| t.rename(root, b"a", root, b"d").unwrap(), libc::EISDIR),
        (&|t| t.rename(root, b"d", root, b"a").unwrap(), libc::ENOTDIR),
        (&|t| _ = t.create(a.key(), b"z", 0o644).unwrap(), libc::ENOTDIR),
        (&|t| t.link(&a, root, b"b").unwrap(), libc::EEXIST),
        (
            &|t| {
                let made = t.mkdir(root, b"e", 0o755).unwrap();
                t.rename(root, b"d", made, b"d").unwrap();
            },
            libc::EOPNOTSUPP,
        ),
    ];
    for (index, (call, errno)) in calls.into_iter().enumerate() {
        let mut group = fs.transaction(&me);
        let made = group.create(root, b"new", 0o644).unwrap();
        group.write_at(made, 0, b"new").unwrap();
        group.write_at(&a, 0, b"XXXX").unwrap();
        call(&mut group);
        assert_eq!(group.commit().unwrap_err(), Errno(errno), "call {index}");
        assert_eq!(named(&fs, b"new"), None);
        assert_eq!(content(&fs, a.key()), b"aaaa");
    }
    let mut group = fs.transaction(&nobody);
    group.create(root, b"new", 0o644).unwrap();
    assert_eq!(group.commit().unwrap_err(), Errno(libc::EACCES));
    embedded.kernel().digest_all().unwrap();
    assert_eq!(embedded.kernel().status().sessions[0].credits, promised);
    drop((a, _b));
    end(embedded, vec![fs]);
}

#[test]
fn calls_that_cannot_be_added_leave_the_group_as_it_was() {
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    let (me, root) = (Cred::root(), fs.root());
    let a = file(&fs, b"a", b"");
    let reader = fs.open(a.key(), OpenFlags { write: false, ..BOTH }, &me).unwrap();
    let mut other = fs.transaction(&me);
    let foreign = other.create(root, b"foreign", 0o644).unwrap();
    let mut group = fs.transaction(&me);
    assert_eq!(
        group.create(root, b"x/y", 0o644).unwrap_err(),
        Errno(libc::EINVAL)
    );
    assert_eq!(group.create(root, b"", 0o644).unwrap_err(), Errno(libc::ENOENT));
    assert_eq!(group.create(root, b"..", 0o644).unwrap_err(), Errno(libc::EINVAL));
    assert_eq!(
        group.unlink(root, &[b'n'; 256]).unwrap_err(),
        Errno(libc::ENAMETOOLONG)
    );
    assert_eq!(group.append(foreign, b"x").unwrap_err(), Errno(libc::EBADF));
    assert_eq!(group.append(&reader, b"x").unwrap_err(), Errno(libc::EBADF));
    assert_eq!(group.truncate(&reader, 0).unwrap_err(), Errno(libc::EINVAL));
    assert_eq!(
        group.write_at(&a, u64::MAX, b"x").unwrap_err(),
        Errno(libc::EFBIG)
    );
    assert_eq!(
        group.append(&a, &vec![0; GROUP_BYTES_MAX]).unwrap_err(),
        Errno(libc::E2BIG)
    );
    assert!(group.is_empty() && group.log_bytes() == 0);
    // The most that fits: one entry of a MiB and one of the rest.
    let most = vec![7; GROUP_BYTES_MAX - 128];
    group.append(&a, &most).unwrap();
    assert_eq!(group.log_bytes(), GROUP_BYTES_MAX);
    assert_eq!(group.append(&a, b"x").unwrap_err(), Errno(libc::E2BIG));
    group.commit().unwrap();
    assert_eq!(content(&fs, a.key()), most);
    let mut group = fs.transaction(&me);
    for i in 0..64_u8 {
        group.write_at(&a, u64::from(i) * 4096, &[i; 100]).unwrap();
    }
    assert_eq!(group.append(&a, b"x").unwrap_err(), Errno(libc::E2BIG));
    group.commit().unwrap();
    assert_eq!(
        content(&fs, a.key())[63 * 4096..][..101].to_vec(),
        [vec![63; 100], vec![7]].concat()
    );
    drop((a, reader, other));
    end(embedded, vec![fs]);
}

#[test]
fn temporary_name_and_unnamed_file_take_the_place_of_another() {
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    let (me, root) = (Cred::root(), fs.root());
    let old = file(&fs, b"f", b"old");
    let unnamed = fs.tmpfile(root, 0o640, &me).unwrap();
    unnamed.write_at(0, b"unnamed", &me).unwrap();
    let mut group = fs.transaction(&me);
    let new = group.create(root, b"f.tmp", 0o644).unwrap();
    group.write_at(new, 0, b"new").unwrap();
    group.rename(root, b"f.tmp", root, b"f").unwrap();
    group.link(&unnamed, root, b"u").unwrap();
    let gone = group.create(root, b"gone", 0o644).unwrap();
    group.append(gone, b"never seen").unwrap();
    group.unlink(root, b"gone").unwrap();
    let attrs = group.commit().unwrap();
    assert_eq!(named(&fs, b"f"), Some(attrs[new.index()].key));
    assert_eq!(content(&fs, attrs[new.index()].key), b"new");
    assert_eq!((named(&fs, b"f.tmp"), named(&fs, b"gone")), (None, None));
    assert_eq!(named(&fs, b"u"), Some(unnamed.key()));
    // The file that was replaced lives on while it is open.
    let mut bytes = [0; 3];
    old.read_at(0, &mut bytes).unwrap();
    assert_eq!((&bytes, old.getattr().unwrap().nlink), (b"old", 0));
    old.append(b"!", &me).unwrap();
    // What is made and removed in a group takes nothing afterwards, instead of the whole being refused by the
    // digest.
    let mut group = fs.transaction(&me);
    let gone = group.create(root, b"gone", 0o644).unwrap();
    group.unlink(root, b"gone").unwrap();
    group.append(gone, b"x").unwrap();
    assert_eq!(group.commit().unwrap_err(), Errno(libc::ENOENT));
    drop((old, unnamed));
    end(embedded, vec![fs]);
}

#[test]
fn threads_see_all_of_a_group_or_nothing() {
    const ROUNDS: u64 = 400;
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    let root = fs.root();
    let files: Vec<_> = [b"a", b"b"]
        .iter()
        .map(|name| file(&fs, *name, &[0; 8]))
        .collect();
    let (done, looks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let (fs, files, done, looks) = (&fs, &files, &done, &looks);
            scope.spawn(move || {
                let number = |file: &OpenFile| {
                    let mut bytes = [0; 8];
                    file.read_at(0, &mut bytes).unwrap();
                    u64::from_le_bytes(bytes)
                };
                while !done.load(Ordering::Relaxed) {
                    // In the order in which a half-visible group would show itself.
                    let first = number(&files[0]);
                    let second = number(&files[1]);
                    assert!(second >= first, "{first} of the one, still {second} of the other");
                    let name = first.to_string();
                    if first > 0 {
                        assert!(fs.lookup(root, name.as_bytes(), &Cred::root()).is_ok(), "{name}");
                    }
                    looks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 1..=ROUNDS {
            let mut group = fs.transaction(&Cred::root());
            group.write_at(&files[0], 0, &round.to_le_bytes()).unwrap();
            group.create(root, round.to_string().as_bytes(), 0o644).unwrap();
            group.write_at(&files[1], 0, &round.to_le_bytes()).unwrap();
            group.commit().unwrap();
        }
        while looks.load(Ordering::Relaxed) < 100 {
            std::thread::yield_now();
        }
        done.store(true, Ordering::Relaxed);
    });
    drop(files);
    end(embedded, vec![fs]);
}

#[test]
fn two_sessions_move_sums_that_stay_the_same() {
    const ROUNDS: usize = 60;
    let (_world, embedded) = pool();
    let sessions = [embedded.mount().unwrap(), embedded.mount().unwrap()];
    let me = Cred::root();
    let keys: Vec<_> = [b"a", b"b", b"c"]
        .iter()
        .map(|name| file(&sessions[0], *name, b"").key())
        .collect();
    // From here on the other session knows them by number.
    embedded.kernel().digest_all().unwrap();
    std::thread::scope(|scope| {
        for (index, fs) in sessions.iter().enumerate() {
            let (keys, me) = (&keys, &me);
            scope.spawn(move || {
                let files: Vec<_> = keys.iter().map(|key| fs.open(*key, BOTH, me).unwrap()).collect();
                for round in 0..ROUNDS {
                    // Each takes a byte to two of the three: whoever comes between would leave an odd sum.
                    let (x, y) = ((round + index) % 3, (round + index + 1) % 3);
                    loop {
                        let mut group = fs.transaction(me);
                        group.append(&files[x], &[1 + index as u8]).unwrap();
                        group.append(&files[y], &[1 + index as u8]).unwrap();
                        match group.commit() {
                            Ok(_) => break,
                            // The other session kept them: nothing has happened.
                            Err(Errno(libc::EAGAIN)) => {}
                            Err(errno) => panic!("{errno}"),
                        }
                    }
                }
            });
        }
    });
    let total: usize = keys.iter().map(|key| content(&sessions[0], *key).len()).sum();
    assert_eq!(total, 2 * 2 * ROUNDS);
    end(embedded, sessions.into());
}

#[test]
fn names_that_another_session_changes_before_the_commit_are_looked_up_again() {
    let (_world, embedded) = pool();
    let (fs, other) = (embedded.mount().unwrap(), embedded.mount().unwrap());
    let (me, root) = (Cred::root(), fs.root());
    let a = file(&fs, b"a", b"1");
    let mut group = fs.transaction(&me);
    group.unlink(root, b"victim").unwrap();
    group.rename(root, b"a", root, b"b").unwrap();
    // Made, and made anew, by the other one meanwhile.
    file(&other, b"victim", b"x");
    other.unlink(root, b"victim", &me).unwrap();
    file(&other, b"victim", b"y");
    other
        .rename(root, b"a", root, b"a2", RenameFlags::default(), &me)
        .unwrap();
    assert_eq!(group.commit().unwrap_err(), Errno(libc::ENOENT));
    assert!(named(&fs, b"victim").is_some(), "nothing of it happened");
    let mut group = fs.transaction(&me);
    group.unlink(root, b"victim").unwrap();
    group.rename(root, b"a2", root, b"b").unwrap();
    group.commit().unwrap();
    assert_eq!(
        (named(&other, b"victim"), named(&other, b"b")),
        (None, Some(a.key()))
    );
    drop(a);
    end(embedded, vec![fs, other]);
}

#[test]
fn read_only_session_and_empty_group() {
    let (_world, embedded) = pool();
    let fs = embedded.mount().unwrap();
    assert!(fs.transaction(&Cred::root()).commit().unwrap().is_empty());
    let reader = Fs::mount(
        embedded.connector(),
        varve_libfs::FsOptions {
            read_only: true,
            ..varve_libfs::FsOptions::default()
        },
    )
    .unwrap();
    let mut group = reader.transaction(&Cred::root());
    group.create(reader.root(), b"x", 0o644).unwrap();
    assert_eq!(group.commit().unwrap_err(), Errno(libc::EROFS));
    end(embedded, vec![fs, reader]);
}
