//! Blocks shared after a comparison and made a file's own again, by sessions: who is told of owners, which
//! files may share, and writers, truncations, unlinks and moves beside both, against a model.
//!
//! `VARVE_DEDUP_SECONDS=600` lets the last go on for ten minutes; `VARVE_SEED=n` chooses other operations.
#![allow(clippy::unwrap_used)]

mod files;

use files::{BLOCK, bytes, check, put, root, used};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_embed::{Embedded, SimPool};
use varve_format::{BLOCK_SIZE, FileBlock, Pin, PinTo, ROOT_INO, Tier};
use varve_ipc::{Cred, Peer};
use varve_kernelfs::{Config, DedupScope, Users};
use varve_libfs::posix::{Fd, FdRanges};
use varve_libfs::{Deduped, Errno, Fs, FsOptions, OwnedBlocks, Posix};
use varve_media::sim::{SimMedium, SimWorld};
use varve_store::DataTarget;

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 24 << 20,
    journal_bytes: 1 << 20,
    ssd_bytes: 24 << 20,
    hdd_bytes: 24 << 20,
};

fn start(config: Config) -> Embedded {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    POOL.open(&world, config).unwrap()
}

fn user(embedded: &Embedded, uid: u32) -> Posix {
    let peer = Peer {
        uid,
        gid: uid,
        ..Peer::this_process()
    };
    let cred = Cred {
        uid,
        gid: uid,
        groups: Vec::new(),
    };
    let fs = Fs::mount(embedded.connector_as(peer), FsOptions::default()).unwrap();
    Posix::new(fs, cred)
}

fn owned(posix: &Posix, fd: Fd) -> Result<Vec<OwnedBlocks>, Errno> {
    let mut parts = Vec::new();
    posix.for_each_owned(fd, 0, 0, |part| parts.push(*part))?;
    Ok(parts)
}

fn owners(posix: &Posix, fd: Fd) -> Vec<u32> {
    let parts = owned(posix, fd).unwrap();
    parts.iter().map(|part| part.owners).collect()
}

#[test]
fn what_is_in_logs_counts_for_owners_and_undo_and_times_stay() {
    let embedded = start(Config {
        idle_digest_ms: 60_000,
        ..Config::default()
    });
    let (posix, other) = (root(&embedded), root(&embedded));
    let data = bytes(40 * BLOCK_SIZE + 100, 1);
    let (one, two) = (put(&posix, "/a", &data), put(&posix, "/b", &data));
    assert_eq!(owners(&posix, one), [1]);
    let len = data.len() as u64;
    assert_eq!(posix.dedupe_range(one, 0, two, 0, len), Ok(true));
    let before = posix.fstat(two).unwrap();
    assert_eq!((owners(&posix, one), owners(&posix, two)), (vec![2], vec![2]));
    let [here, there] = [one, two].map(|fd| owned(&posix, fd).unwrap()[0].number);
    assert!(here.is_some() && here == there);
    // A part: what is asked for, in whole blocks.
    let mut part = Vec::new();
    posix
        .for_each_owned(one, 5 * BLOCK + 1, BLOCK, |found| part.push(*found))
        .unwrap();
    assert_eq!((part[0].file_block.0, part[0].blocks), (5, 2));
    // A write that is in the log only.
    posix.pwrite(two, b"x", 7 * BLOCK).unwrap();
    assert_eq!(owners(&posix, two), [2, 1, 2]);
    // Another session undoes what this one has open and has read.
    let fd = other.open(b"/b", libc::O_RDONLY, 0).unwrap();
    let mut expected = data.clone();
    expected[7 * BLOCK_SIZE] = b'x';
    let mut seen = vec![0; data.len()];
    posix.pread(two, &mut seen, 0).unwrap();
    assert!(seen == expected);
    let changed = posix.fstat(two).unwrap();
    other.unshare_range(fd, 0, 0).unwrap();
    assert!(owners(&other, fd).iter().all(|owners| *owners == 1));
    for posix in [&posix, &other] {
        let fd = posix.open(b"/b", libc::O_RDONLY, 0).unwrap();
        posix.pread(fd, &mut seen, 0).unwrap();
        assert!(seen == expected);
    }
    let after = posix.fstat(two).unwrap();
    assert_eq!(
        (after.mtime_ns, after.ctime_ns),
        (changed.mtime_ns, changed.ctime_ns)
    );
    assert!(before.mtime_ns <= changed.mtime_ns);
    assert_eq!(after.mode, before.mode);
    check(&embedded);
    // The last owner.
    posix.unshare_range(one, 0, 0).unwrap();
    assert!(
        owned(&posix, one)
            .unwrap()
            .iter()
            .all(|part| part.number.is_none())
    );
    posix.pread(one, &mut seen, 0).unwrap();
    assert!(seen == data);
    check(&embedded);
}

/// CRC-32C of the blocks of a file that are no holes.
fn told(posix: &Posix, fd: Fd) -> Result<BTreeMap<u64, u32>, Errno> {
    let mut sums = BTreeMap::new();
    let blocks = posix.for_each_checksum(fd, |part| {
        sums.extend((part.file_block.0..).zip(part.sums.clone()));
        std::ops::ControlFlow::Continue(())
    })?;
    assert_eq!(blocks, sums.len() as u64);
    Ok(sums)
}

fn sums_of(data: &[u8]) -> BTreeMap<u64, u32> {
    let padded = |block: &[u8]| [block, &vec![0; BLOCK_SIZE - block.len()]].concat();
    let sum = |block| crc32c::crc32c(&padded(block));
    (0..).zip(data.chunks(BLOCK_SIZE).map(sum)).collect()
}

#[test]
fn checksums_tell_what_was_written_also_if_it_is_in_logs() {
    let embedded = start(Config {
        idle_digest_ms: 60_000,
        ..Config::default()
    });
    let (posix, other) = (root(&embedded), root(&embedded));
    let mut data = bytes(700 * BLOCK_SIZE + 100, 1);
    let one = put(&posix, "/a", &data);
    let fd = other.open(b"/a", libc::O_RDONLY, 0).unwrap();
    for posix_fd in [(&posix, one), (&other, fd)] {
        assert!(told(posix_fd.0, posix_fd.1).unwrap() == sums_of(&data));
    }
    // Part of a block, then a shorter file, then a longer one.
    posix.pwrite(one, b"x", 7 * BLOCK + 5).unwrap();
    data[7 * BLOCK_SIZE + 5] = b'x';
    assert!(told(&other, fd).unwrap() == sums_of(&data));
    data.truncate(600 * BLOCK_SIZE + 10);
    posix.ftruncate(one, data.len() as u64).unwrap();
    assert!(told(&other, fd).unwrap() == sums_of(&data));
    posix.pwrite(one, b"end", 650 * BLOCK).unwrap();
    let sums = told(&other, fd).unwrap();
    assert!(
        sums.iter()
            .filter(|(block, _)| **block < 601)
            .map(|(at, sum)| (*at, *sum))
            .collect::<BTreeMap<_, _>>()
            == sums_of(&data)
    );
    assert_eq!(sums.keys().next_back(), Some(&650));
    check(&embedded);
}

#[test]
fn ranges_are_shared_at_once_with_what_is_in_logs_and_other_sessions_see_it() {
    let embedded = start(Config {
        idle_digest_ms: 60_000,
        ..Config::default()
    });
    let (posix, other) = (root(&embedded), root(&embedded));
    let data = bytes(40 * BLOCK_SIZE + 100, 1);
    let (one, two) = (put(&posix, "/a", &data), put(&other, "/b", &data));
    let there = posix.open(b"/b", libc::O_RDONLY, 0).unwrap();
    // The other session has changed a block that is in its log only, and reads what it has mapped.
    other.pwrite(two, b"x", 7 * BLOCK).unwrap();
    let mut expected = data.clone();
    expected[7 * BLOCK_SIZE] = b'x';
    let mut ranges = Vec::new();
    for at in (0..data.len() as u64).step_by(4 * BLOCK_SIZE) {
        ranges.push(FdRanges {
            from: one,
            offset: at,
            to: there,
            to_offset: at,
            len: (4 * BLOCK).min(data.len() as u64 - at),
        });
    }
    let told = posix.dedupe_ranges(&ranges, false).unwrap();
    for (at, (range, told)) in ranges.iter().zip(told).enumerate() {
        let bytes = [told.shared_bytes, told.freed_bytes, told.differing_bytes];
        let expected = if at == 1 {
            [0, 0, range.len]
        } else {
            [range.len, range.len, 0]
        };
        assert_eq!((bytes, told.errno), (expected, 0), "range {at}");
    }
    // Blocks 4 to 7 are not.
    assert_eq!(owners(&other, two), [2, 1, 1, 2]);
    let mut seen = vec![0; data.len()];
    for (posix, fd) in [(&other, two), (&posix, there)] {
        posix.pread(fd, &mut seen, 0).unwrap();
        assert!(seen == expected);
    }
    assert_eq!(posix.dedupe_ranges(&[], false), Err(Errno(libc::EINVAL)));
    check(&embedded);
}

#[test]
fn clones_inside_of_one_file_count_as_owners() {
    let embedded = start(Config::default());
    let posix = root(&embedded);
    let fd = put(&posix, "/a", &bytes(8 * BLOCK_SIZE, 1));
    posix.clone_range(fd, 0, fd, 10 * BLOCK, 4 * BLOCK).unwrap();
    posix.clone_range(fd, 0, fd, 20 * BLOCK, 2 * BLOCK).unwrap();
    let parts = owned(&posix, fd).unwrap();
    let told: Vec<_> = parts
        .iter()
        .map(|part| (part.file_block.0, part.blocks, part.owners))
        .collect();
    let expected = [
        (0, 2, 3),
        (2, 2, 2),
        (4, 4, 1),
        (10, 2, 3),
        (12, 2, 2),
        (20, 2, 3),
    ];
    assert_eq!(told, expected);
    posix.unshare_range(fd, 20 * BLOCK, 0).unwrap();
    assert_eq!(
        owned(&posix, fd).unwrap().iter().map(|part| part.owners).max(),
        Some(2)
    );
    check(&embedded);
}

#[test]
fn owners_are_told_to_the_files_owner_and_undo_takes_the_right_to_write() {
    let embedded = start(Config {
        users: Users::All,
        dedup_scope: DedupScope::Pool,
        ..Config::default()
    });
    let (all, a, b) = (root(&embedded), user(&embedded, 1000), user(&embedded, 2000));
    all.chmod(b"/", 0o777).unwrap();
    let data = bytes(16 * BLOCK_SIZE, 3);
    let mine = put(&a, "/a", &data);
    a.chmod(b"/a", 0o444).unwrap();
    for at in 0..3 {
        let copy = put(&a, format!("/copy {at}"), b"");
        a.clone_range(mine, 0, copy, 0, 0).unwrap();
    }
    // The number itself is for the privileged.
    assert_eq!(owners(&a, mine), [2]);
    let fd = all.open(b"/a", libc::O_RDONLY, 0).unwrap();
    assert_eq!(owners(&all, fd), [4]);
    // B may read it, and no more.
    let theirs = b.open(b"/a", libc::O_RDONLY, 0).unwrap();
    assert_eq!(owned(&b, theirs), Err(Errno(libc::EPERM)));
    assert_eq!(b.users_of(theirs), Err(Errno(libc::EPERM)));
    // A checksum would tell whether bytes are what one thinks they are, also of a file that may not be read.
    assert_eq!(told(&b, theirs), Err(Errno(libc::EPERM)));
    assert_eq!(told(&a, mine), Ok(sums_of(&data)));
    assert_eq!(told(&all, fd), Ok(sums_of(&data)));
    assert_eq!(b.unshare_range(theirs, 0, 0), Err(Errno(libc::EACCES)));
    let dir = b.open(b"/", libc::O_RDONLY, 0).unwrap();
    assert_eq!(b.defrag_range(theirs, 0, 0), Err(Errno(libc::EACCES)));
    assert_eq!(b.unshare_range(dir, 0, 0), Err(Errno(libc::EISDIR)));
    assert_eq!(b.defrag_range(dir, 0, 0), Err(Errno(libc::EISDIR)));
    assert_eq!(a.defrag_range(mine, 0, 0), Ok(0));
    let top = all.open(b"/", libc::O_RDONLY, 0).unwrap();
    assert_eq!(told(&all, top), Err(Errno(libc::EINVAL)));
    // A owns it, and need not be allowed to write it.
    a.unshare_range(mine, 0, 0).unwrap();
    assert_eq!(owners(&a, mine), [1]);
    check(&embedded);
}

#[test]
fn users_learn_nothing_of_each_other_by_deduplication() {
    for scope in [DedupScope::User, DedupScope::Group, DedupScope::Pool] {
        let embedded = start(Config {
            users: Users::All,
            dedup_scope: scope,
            ..Config::default()
        });
        let (all, a, b) = (root(&embedded), user(&embedded, 1000), user(&embedded, 2000));
        all.chmod(b"/", 0o777).unwrap();
        let data = bytes(16 * BLOCK_SIZE, 3);
        let (secret, open) = (put(&a, "/secret", &data), put(&a, "/open", &data));
        a.chmod(b"/secret", 0o600).unwrap();
        assert_eq!(a.dedupe_range(secret, 0, open, 0, 16 * BLOCK), Ok(true));
        let mine = put(&b, "/mine", &data);
        assert_eq!(
            b.open(b"/secret", libc::O_RDONLY, 0).err(),
            Some(Errno(libc::EACCES))
        );
        // What may be read is not shared across users but where that is configured, and there not in NVM;
        // and it is not said whether the bytes are the same.
        let readable = b.open(b"/open", libc::O_RDONLY, 0).unwrap();
        let refused = if scope == DedupScope::Pool {
            libc::EOPNOTSUPP
        } else {
            libc::EPERM
        };
        for seed in [3, 4] {
            b.pwrite(mine, &bytes(16 * BLOCK_SIZE, seed), 0).unwrap();
            assert_eq!(
                b.dedupe_range(readable, 0, mine, 0, 16 * BLOCK),
                Err(Errno(refused)),
                "{scope:?}"
            );
            let range = FdRanges {
                from: readable,
                offset: 0,
                to: mine,
                to_offset: 0,
                len: 16 * BLOCK,
            };
            // Nor is it where many ranges are asked for.
            let told = b.dedupe_ranges(&[range], seed == 3).unwrap();
            let nothing = Deduped {
                errno: refused,
                ..Deduped::default()
            };
            assert_eq!(told, [nothing], "{scope:?}");
            assert_eq!(owners(&b, mine), [1]);
        }
        // B's session cannot name A's blocks, and A's numbers do not change by what B does.
        assert_eq!(owned(&b, readable), Err(Errno(libc::EPERM)));
        assert_eq!(owners(&a, secret), [2]);
        check(&embedded);
    }
}

fn seed() -> u64 {
    std::env::var("VARVE_SEED").map_or(1, |text| text.parse().unwrap())
}

/// A plain generator of numbers (xorshift).
struct Rng(u64);

impl Rng {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

const WRITERS: u64 = 3;
const FILES: u64 = 3;
const FILE_BLOCKS: u64 = 48;

fn name(writer: u64, file: u64) -> String {
    format!("/f{writer}.{file}")
}

/// A file of any writer.
fn any_name(rng: &mut Rng) -> String {
    name(rng.below(WRITERS), rng.below(FILES))
}

/// What the threads of the test have done.
#[derive(Default)]
struct Counts {
    steps: AtomicU64,
    shared: AtomicU64,
    different: AtomicU64,
    undone: AtomicU64,
    /// Blocks that were moved together.
    gathered: AtomicU64,
    moved: AtomicU64,
    /// Files that could not be made for lack of space.
    full: AtomicU64,
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Changes the files of one writer and compares each with what it must hold.
fn write_files(posix: &Posix, writer: u64, stop: &AtomicBool, counts: &Counts) -> BTreeMap<String, Vec<u8>> {
    let mut rng = Rng(seed() << 8 | (writer + 1));
    let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        let file = name(writer, rng.below(FILES));
        let opened = posix.open(file.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o644);
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno(errno)) => {
                // All that is free is reserved for a moment, or waits for readers.
                assert_eq!(errno, libc::ENOSPC, "{file}");
                count(&counts.full);
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
        };
        let data = model.entry(file.clone()).or_default();
        let write = |data: &mut Vec<u8>, at: usize, new: &[u8]| {
            let done = posix.pwrite(fd, new, at as u64);
            match done {
                Ok(len) => {
                    assert_eq!(len, new.len());
                    data.resize(data.len().max(at + new.len()), 0);
                    data[at..at + new.len()].copy_from_slice(new);
                }
                Err(Errno(errno)) => assert_eq!(errno, libc::ENOSPC),
            }
        };
        match rng.below(12) {
            // Few seeds at the same places: files have much in common.
            0..=4 => {
                let (at, blocks) = (rng.below(FILE_BLOCKS), 1 + rng.below(20));
                let all = bytes(((FILE_BLOCKS + 20) * BLOCK) as usize, rng.below(2) as u8);
                let (from, to) = ((at * BLOCK) as usize, ((at + blocks) * BLOCK) as usize);
                write(data, from, &all[from..to]);
            }
            5 => {
                let at = rng.below(FILE_BLOCKS * BLOCK) as usize;
                write(data, at, &bytes(1 + rng.below(9000) as usize, 0xa5));
            }
            6 => {
                let size = rng.below(FILE_BLOCKS * BLOCK);
                if posix.ftruncate(fd, size).is_ok() {
                    data.resize(size as usize, 0);
                }
            }
            7 => {
                posix.unlink(file.as_bytes()).unwrap();
                model.remove(&file);
                posix.close(fd).unwrap();
                continue;
            }
            _ => {
                let mut seen = vec![0; data.len() + 1];
                let got = posix.pread(fd, &mut seen, 0).unwrap();
                assert_eq!(got, data.len(), "{file}");
                assert!(seen[..got] == data[..], "{file} is not what was written");
            }
        }
        posix.close(fd).unwrap();
        count(&counts.steps);
    }
    model
}

/// Errors of a file that is gone, shorter than the range, or of a full pool.
fn is_expected(errno: i32) -> bool {
    [
        libc::ENOENT,
        libc::ESTALE,
        libc::EINVAL,
        libc::ENOSPC,
        libc::EAGAIN,
    ]
    .contains(&errno)
}

/// Calls `act` until the end, with a new session now and then, as each command has one of its own.
fn with_sessions(embedded: &Embedded, stop: &AtomicBool, seed: u64, mut act: impl FnMut(&Posix, &mut Rng)) {
    let (mut posix, mut rng) = (root(embedded), Rng(seed));
    while !stop.load(Ordering::Relaxed) {
        if rng.below(256) == 0 {
            posix.fs().unmount().unwrap();
            posix = root(embedded);
        }
        act(&posix, &mut rng);
    }
}

/// Compares and shares a range of two files.
fn dedupe_some(posix: &Posix, rng: &mut Rng, counts: &Counts) {
    let [one, other] = [any_name(rng), any_name(rng)];
    let opened = [&one, &other].map(|name| posix.open(name.as_bytes(), libc::O_RDONLY, 0));
    if let [Ok(from), Ok(to)] = opened {
        let (at, len) = (rng.below(FILE_BLOCKS) * BLOCK, (1 + rng.below(24)) * BLOCK);
        if rng.below(2) == 0 {
            match posix.dedupe_range(from, at, to, at, len) {
                Ok(true) => count(&counts.shared),
                Ok(false) => count(&counts.different),
                Err(Errno(errno)) => assert!(is_expected(errno), "{one} {other}: {errno}"),
            }
        } else {
            dedupe_parts(posix, (from, to), (at, len), counts);
        }
    }
    opened.iter().flatten().for_each(|fd| posix.close(*fd).unwrap());
}

/// As many ranges of one block, at once.
fn dedupe_parts(posix: &Posix, (from, to): (Fd, Fd), (at, len): (u64, u64), counts: &Counts) {
    let range = |offset| FdRanges {
        from,
        offset,
        to,
        to_offset: offset,
        len: BLOCK,
    };
    let ranges: Vec<_> = (at..at + len).step_by(BLOCK_SIZE).map(range).collect();
    match posix.dedupe_ranges(&ranges, false) {
        Ok(told) => {
            for told in told {
                assert!(told.errno == 0 || is_expected(told.errno), "{told:?}");
                if told.shared_bytes > 0 {
                    count(&counts.shared);
                }
                if told.differing_bytes > 0 {
                    count(&counts.different);
                }
            }
        }
        Err(Errno(errno)) => assert!(is_expected(errno), "{errno}"),
    }
}

/// Undoes the shares of a range of a file.
fn undo_some(posix: &Posix, rng: &mut Rng, counts: &Counts) {
    let file = any_name(rng);
    if let Ok(fd) = posix.open(file.as_bytes(), libc::O_RDONLY, 0) {
        let (at, len) = (rng.below(FILE_BLOCKS) * BLOCK, rng.below(30) * BLOCK);
        match posix.unshare_range(fd, at, len) {
            Ok(()) => count(&counts.undone),
            Err(Errno(errno)) => assert!(is_expected(errno), "{file}: {errno}"),
        }
        posix.close(fd).unwrap();
    }
    std::thread::sleep(Duration::from_millis(1));
}

/// Moves together what a file has alone in a range.
fn defrag_some(posix: &Posix, rng: &mut Rng, counts: &Counts) {
    let file = any_name(rng);
    if let Ok(fd) = posix.open(file.as_bytes(), libc::O_RDONLY, 0) {
        let (at, len) = (rng.below(FILE_BLOCKS / 2) * BLOCK, rng.below(60) * BLOCK);
        match posix.defrag_range(fd, at, len) {
            Ok(moved) => drop(counts.gathered.fetch_add(moved / BLOCK, Ordering::Relaxed)),
            Err(Errno(errno)) => assert!(is_expected(errno), "{file}: {errno}"),
        }
        posix.close(fd).unwrap();
    }
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn defragmentation_by_another_session_changes_nothing_that_readers_and_writers_see() {
    let embedded = start(Config {
        idle_digest_ms: 60_000,
        ..Config::default()
    });
    let maker = root(&embedded);
    let mut data = bytes(200 * BLOCK_SIZE, 1);
    let inos = ["/a", "/between"].map(|name| {
        let fd = put(&maker, name, &data);
        maker.fstat(fd).unwrap().key.ino
    });
    maker.fs().unmount().unwrap();
    // Blocks of the two lie on the SSD by turns; no session knows them.
    let mut tx = embedded.kernel().store().begin().unwrap();
    for at in 0..200 {
        let block = &data[at * BLOCK_SIZE..][..BLOCK_SIZE];
        for ino in inos {
            let target = DataTarget::only(Tier::Ssd);
            tx.write_data(ino, FileBlock(at as u64), block, true, target)
                .unwrap();
        }
    }
    tx.commit().unwrap();
    let (posix, other) = (root(&embedded), root(&embedded));
    let fd = posix.open(b"/a", libc::O_RDWR, 0).unwrap();
    let mut seen = vec![0; data.len()];
    posix.pread(fd, &mut seen, 0).unwrap();
    assert!(seen == data);
    let before = posix.fstat(fd).unwrap();
    let places = |posix: &Posix, fd| {
        let mut parts = owned(posix, fd).unwrap();
        parts.retain(|part| part.tier != Tier::Nvm);
        let end = |part: &OwnedBlocks| part.block.0 + u64::from(part.blocks);
        let joins = |two: &[OwnedBlocks]| end(&two[0]) == two[1].block.0 && two[0].tier == two[1].tier;
        parts.len() - parts.windows(2).filter(|two| joins(two)).count()
    };
    // A write that is in the log only.
    posix.pwrite(fd, b"x", 7 * BLOCK).unwrap();
    data[7 * BLOCK_SIZE] = b'x';
    let theirs = other.open(b"/a", libc::O_RDONLY, 0).unwrap();
    let scattered = places(&other, theirs);
    assert!(scattered > 20, "{scattered}");
    assert!(other.defrag_range(theirs, 0, 0).unwrap() > 0);
    assert!(
        places(&other, theirs) <= scattered / 4,
        "{}",
        places(&other, theirs)
    );
    for posix in [&posix, &other] {
        let fd = posix.open(b"/a", libc::O_RDONLY, 0).unwrap();
        posix.pread(fd, &mut seen, 0).unwrap();
        assert!(seen == data);
    }
    posix.pread(fd, &mut seen, 0).unwrap();
    assert!(seen == data);
    let after = posix.fstat(fd).unwrap();
    assert_eq!((after.mode, after.size_bytes), (before.mode, before.size_bytes));
    check(&embedded);
}

#[test]
fn writers_truncates_unlinks_and_moves_beside_apply_and_undo_lose_nothing() {
    let (moved, gathered) = beside_apply_and_undo(&[Tier::Ssd, Tier::Hdd, Tier::Nvm]);
    assert!(moved > 0 && gathered > 0, "{moved} moved, {gathered} gathered");
}

#[test]
fn writers_beside_apply_undo_and_defragmentations_on_flash_lose_nothing() {
    let (_, gathered) = beside_apply_and_undo(&[Tier::Ssd]);
    assert!(gathered > 0);
}

/// Pins all files to one tier.
fn pin_all(embedded: &Embedded, tier: Tier) {
    let mut tx = embedded.kernel().store().begin().unwrap();
    let to = PinTo::Tier(tier);
    tx.set_pin(ROOT_INO, Pin { to, ..Pin::default() }).unwrap();
    tx.commit().unwrap();
}

/// All files go to each of the tiers in turn, for half a second. Returns the blocks that went, and those that were
/// moved together.
fn beside_apply_and_undo(tiers: &[Tier]) -> (u64, u64) {
    let seconds = std::env::var("VARVE_DEDUP_SECONDS").map_or(4, |text| text.parse().unwrap());
    let embedded = start(Config {
        idle_digest_ms: 50,
        placement_high_percent: 20,
        placement_low_percent: 10,
        ..Config::default()
    });
    pin_all(&embedded, tiers[0]);
    let stop = AtomicBool::new(false);
    let counts = Counts::default();
    let used_before = used(&embedded);
    let models: Vec<_> = std::thread::scope(|scope| {
        let (embedded, stop, counts) = (&embedded, &stop, &counts);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| scope.spawn(move || write_files(&root(embedded), writer, stop, counts)))
            .collect();
        scope.spawn(move || {
            with_sessions(embedded, stop, seed() << 8 | 0x81, |posix, rng| {
                dedupe_some(posix, rng, counts);
            });
        });
        scope.spawn(move || {
            with_sessions(embedded, stop, seed() << 8 | 0x82, |posix, rng| {
                undo_some(posix, rng, counts);
            });
        });
        scope.spawn(move || {
            with_sessions(embedded, stop, seed() << 8 | 0x83, |posix, rng| {
                defrag_some(posix, rng, counts);
            });
        });
        let (begun, mut turn) = (Instant::now(), 0);
        let until = begun + Duration::from_secs(seconds);
        // What is asked of the test at least, however busy the machine is.
        let has_moved = || tiers.len() == 1 || counts.moved.load(Ordering::Relaxed) > 0;
        let at_last = until + Duration::from_secs(60);
        while (Instant::now() < until || (!has_moved() && Instant::now() < at_last))
            && !writers.iter().any(|writer| writer.is_finished())
        {
            if begun.elapsed() > Duration::from_millis(500) * (turn + 1) {
                turn += 1;
                pin_all(embedded, tiers[turn as usize % tiers.len()]);
            }
            counts
                .moved
                .fetch_add(embedded.kernel().place(), Ordering::Relaxed);
            embedded.tick();
            std::thread::sleep(Duration::from_millis(20));
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    let Counts {
        steps,
        shared,
        different,
        undone,
        gathered,
        moved,
        full,
    } = counts;
    let counts = [steps, shared, different, undone, moved, full, gathered].map(AtomicU64::into_inner);
    println!("seconds {seconds}; steps, shared, different, undone, moved, full, gathered: {counts:?}");
    assert!(counts[0] > 50 && counts[1] > 5 && counts[3] > 5, "{counts:?}");
    check(&embedded);
    // All again, before and after everything is undone.
    let posix = root(&embedded);
    for undo in [false, true] {
        for (file, data) in models.iter().flatten() {
            let fd = posix.open(file.as_bytes(), libc::O_RDONLY, 0).unwrap();
            if undo {
                posix.unshare_range(fd, 0, 0).unwrap();
            }
            let mut seen = vec![0; data.len() + 1];
            assert_eq!(posix.pread(fd, &mut seen, 0).unwrap(), data.len());
            assert!(seen[..data.len()] == data[..], "{file}");
            posix.close(fd).unwrap();
        }
        check(&embedded);
    }
    for (file, _) in models.iter().flatten() {
        let fd = posix.open(file.as_bytes(), libc::O_RDONLY, 0).unwrap();
        assert!(
            owned(&posix, fd)
                .unwrap()
                .iter()
                .all(|part| part.number.is_none()),
            "{file}"
        );
        posix.close(fd).unwrap();
    }
    // Nothing that was shared, copied or moved stays behind.
    for (file, _) in models.iter().flatten() {
        posix.unlink(file.as_bytes()).unwrap();
    }
    check(&embedded);
    let after = used(&embedded);
    assert!(
        after <= used_before + 64,
        "{after} blocks are used, {used_before} before"
    );
    (counts[4], counts[6])
}
