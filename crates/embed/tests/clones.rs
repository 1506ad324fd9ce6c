//! Clones of files: blocks that are shared until one of the files is written, whoever writes it and whenever
//! the pool is stopped.
#![allow(clippy::unwrap_used)]

mod files;

use files::{BLOCK, bytes, check, put, root, used};
use varve_embed::{Embedded, SimPool};
use varve_format::{BLOCK_SIZE, ROOT_INO};
use varve_kernelfs::Config;
use varve_libfs::posix::{Fd, Whence};
use varve_libfs::{Errno, Posix};
use varve_media::sim::{Crash, SimMedium, SimWorld};
use varve_store::{OpenOptions, Store};

const POOL: SimPool = SimPool {
    medium: SimMedium::Dax,
    nvm_bytes: 24 << 20,
    journal_bytes: 1 << 20,
    ssd_bytes: 24 << 20,
    hdd_bytes: 0,
};

fn config() -> Config {
    Config {
        grace_ms: 0,
        // Only the calls say when a log is digested.
        idle_digest_ms: 60_000,
        ..Config::default()
    }
}

fn start() -> (SimWorld, Embedded) {
    let world = SimWorld::new();
    POOL.mkfs(&world).unwrap();
    let embedded = POOL.open(&world, config()).unwrap();
    (world, embedded)
}

fn get(posix: &Posix, name: &[u8]) -> Vec<u8> {
    let fd = posix.open(name, libc::O_RDONLY, 0).unwrap();
    let mut data = vec![0; posix.fstat(fd).unwrap().size_bytes as usize];
    assert_eq!(posix.pread(fd, &mut data, 0).unwrap(), data.len());
    posix.close(fd).unwrap();
    data
}

/// Whole files of all kinds of ends and holes; then both sides are written, in turn.
#[test]
fn clone_has_what_was_written_before_it_and_goes_its_own_way_after() {
    let (world, embedded) = start();
    let posix = root(&embedded);
    let mut expected = Vec::new();
    for (index, len) in [0, 1, 4095, 4096, 4097, 70_000, 600_000].into_iter().enumerate() {
        let (name, clone) = (format!("/f{index}"), format!("/c{index}"));
        let data = bytes(len, index as u8);
        let from = put(&posix, name.as_bytes(), &data);
        // What is in the log counts, and what the target had goes.
        let to = put(
            &posix,
            clone.as_bytes(),
            &bytes(if index % 2 == 0 { 0 } else { len / 2 }, 99),
        );
        posix.clone_range(from, 0, to, 0, 0).unwrap();
        assert_eq!(get(&posix, clone.as_bytes()), data, "{clone}");
        let blocks = (len as u64).div_ceil(BLOCK) * 8;
        assert_eq!(posix.fstat(to).unwrap().sectors, blocks);
        let (mut one, mut other) = (data.clone(), data);
        for (fd, data, at) in [(from, &mut one, 3), (to, &mut other, len / 2)] {
            let new = bytes(100, 0x55 ^ at as u8);
            assert_eq!(posix.pwrite(fd, &new, at as u64).unwrap(), 100);
            data.resize(data.len().max(at + 100), 0);
            data[at..at + 100].copy_from_slice(&new);
        }
        assert_eq!(
            (get(&posix, name.as_bytes()), get(&posix, clone.as_bytes())),
            (one.clone(), other.clone())
        );
        expected.extend([(name, one), (clone, other)]);
    }
    check(&embedded);
    posix.fs().unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = POOL.open(&world, config()).unwrap();
    let posix = root(&embedded);
    for (name, data) in &expected {
        assert_eq!(&get(&posix, name.as_bytes()), data, "{name}");
    }
    // Each half is removed: the other stays.
    for (name, _) in expected.iter().step_by(2) {
        posix.unlink(name.as_bytes()).unwrap();
    }
    check(&embedded);
    for (name, data) in expected.iter().skip(1).step_by(2) {
        assert_eq!(&get(&posix, name.as_bytes()), data, "{name}");
        posix.unlink(name.as_bytes()).unwrap();
    }
    check(&embedded);
    assert!(
        embedded
            .kernel()
            .store()
            .dir_iter(ROOT_INO, 0, 9)
            .unwrap()
            .is_empty()
    );
}

#[test]
fn clone_of_a_large_file_takes_no_data_blocks() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    let data = bytes(8 << 20, 1);
    let from = put(&posix, b"/f", &data);
    let before = used(&embedded);
    for index in 0..20 {
        let name = format!("/c{index}");
        let to = put(&posix, name.as_bytes(), b"");
        posix.clone_range(from, 0, to, 0, 0).unwrap();
        assert_eq!(get(&posix, name.as_bytes()), data);
    }
    let more = used(&embedded) - before;
    assert!(more < 20, "{more} blocks for 20 clones of 2,048");
    check(&embedded);
}

#[test]
fn holes_of_a_clone_are_those_of_its_source_right_after_it() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    let from = put(&posix, b"/f", b"");
    for at in [2, 3, 7_u64] {
        posix
            .pwrite(from, &bytes(BLOCK_SIZE, at as u8), at * BLOCK)
            .unwrap();
    }
    posix.ftruncate(from, 10 * BLOCK).unwrap();
    let to = put(&posix, b"/c", &bytes(12 * BLOCK_SIZE, 9));
    posix.clone_range(from, 0, to, 0, 10 * BLOCK).unwrap();
    let seek = |fd, at: u64, whence| posix.lseek(fd, at as i64, whence).map_err(|errno| errno.0);
    let (data, hole) = (Whence::Data, Whence::Hole);
    for fd in [from, to] {
        assert_eq!(seek(fd, 0, data), Ok(2 * BLOCK));
        assert_eq!(seek(fd, 2 * BLOCK, hole), Ok(4 * BLOCK));
        assert_eq!(seek(fd, 4 * BLOCK, data), Ok(7 * BLOCK));
        assert_eq!(seek(fd, 7 * BLOCK, hole), Ok(8 * BLOCK));
    }
    assert_eq!(seek(from, 8 * BLOCK, data), Err(libc::ENXIO));
    assert_eq!(
        seek(to, 8 * BLOCK, data),
        Ok(10 * BLOCK),
        "what lies behind the range stays"
    );
    check(&embedded);
}

#[test]
fn ranges_are_refused_as_linux_refuses_them() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    let size = 10 * BLOCK + 100;
    let (from, to) = (
        put(&posix, b"/f", &bytes(size as usize, 1)),
        put(&posix, b"/c", &bytes(20 * BLOCK_SIZE, 2)),
    );
    posix.mkdir(b"/d", 0o755).unwrap();
    let dir = posix.open(b"/d", libc::O_RDONLY, 0).unwrap();
    let reader = posix.open(b"/c", libc::O_RDONLY, 0).unwrap();
    let writer = posix.open(b"/f", libc::O_WRONLY, 0).unwrap();
    let appender = posix.open(b"/c", libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
    let clone = |(from, at): (Fd, u64), (to, to_at): (Fd, u64), len| {
        posix
            .clone_range(from, at, to, to_at, len)
            .err()
            .map(|Errno(errno)| errno)
    };
    let cases = [
        ((from, 1), (to, 0), BLOCK, Some(libc::EINVAL)),
        ((from, 0), (to, 512), BLOCK, Some(libc::EINVAL)),
        ((from, 0), (to, 0), 100, Some(libc::EINVAL)),
        // Past the source's end; and a part of a block before the target's.
        ((from, 0), (to, 0), 11 * BLOCK, Some(libc::EINVAL)),
        ((from, 10 * BLOCK), (to, 0), 100, Some(libc::EINVAL)),
        ((from, 0), (to, 0), 0, Some(libc::EINVAL)),
        ((from, 12 * BLOCK), (to, 0), 0, Some(libc::EINVAL)),
        ((to, 0), (to, BLOCK), 2 * BLOCK, Some(libc::EINVAL)),
        ((to, 0), (to, 0), BLOCK, Some(libc::EINVAL)),
        ((from, 0), (dir, 0), BLOCK, Some(libc::EISDIR)),
        ((dir, 0), (to, 0), BLOCK, Some(libc::EISDIR)),
        ((from, 0), (reader, 0), BLOCK, Some(libc::EBADF)),
        ((writer, 0), (to, 0), BLOCK, Some(libc::EBADF)),
        ((from, 0), (appender, 0), BLOCK, Some(libc::EBADF)),
        ((to, 0), (to, 2 * BLOCK), 2 * BLOCK, None),
        ((from, 10 * BLOCK), (to, 20 * BLOCK), 100, None),
        ((from, 10 * BLOCK), (to, 30 * BLOCK), 0, None),
    ];
    for (index, (from, to, len, expected)) in cases.into_iter().enumerate() {
        assert_eq!(clone(from, to, len), expected, "case {index}");
    }
    let mut expected = bytes(20 * BLOCK_SIZE, 2);
    expected.copy_within(0..2 * BLOCK_SIZE, 2 * BLOCK_SIZE);
    let tail = bytes(size as usize, 1)[10 * BLOCK_SIZE..].to_vec();
    expected.extend(&tail);
    expected.resize(30 * BLOCK_SIZE, 0);
    expected.extend(&tail);
    assert_eq!(get(&posix, b"/c"), expected);
    check(&embedded);
}

#[test]
fn ranges_are_deduplicated_only_if_they_hold_the_same_bytes() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    let data = bytes(40 * BLOCK_SIZE, 1);
    let (one, other) = (put(&posix, b"/a", &data), put(&posix, b"/b", &data));
    posix.pwrite(other, b"x", 30 * BLOCK + 5).unwrap();
    let before = (used(&embedded), posix.fstat(other).unwrap());
    assert_eq!(posix.dedupe_range(one, 0, other, 0, 31 * BLOCK), Ok(false));
    assert_eq!(used(&embedded), before.0);
    assert_eq!(posix.dedupe_range(one, 0, other, 0, 30 * BLOCK), Ok(true));
    assert_eq!(
        posix.dedupe_range(one, 31 * BLOCK, other, 31 * BLOCK, 9 * BLOCK),
        Ok(true)
    );
    assert!(
        used(&embedded) <= before.0 - 39 + 3,
        "{} {}",
        used(&embedded),
        before.0
    );
    assert_eq!(posix.fstat(other).unwrap().mtime_ns, before.1.mtime_ns);
    let mut expected = data.clone();
    expected[30 * BLOCK_SIZE + 5] = b'x';
    assert_eq!((get(&posix, b"/a"), get(&posix, b"/b")), (data, expected));
    check(&embedded);
}

#[test]
fn clone_has_what_other_sessions_have_written_and_they_see_it() {
    let (_, embedded) = start();
    let (one, other) = (root(&embedded), root(&embedded));
    let data = bytes(300_000, 7);
    let from = put(&one, b"/f", &data);
    let fd = other.open(b"/f", libc::O_RDONLY, 0).unwrap();
    let clone = other.open(b"/c", libc::O_CREAT | libc::O_RDWR, 0o644).unwrap();
    for round in 0..20_u64 {
        let at = round * 9000;
        one.pwrite(from, &[round as u8; 5000], at).unwrap();
        other.clone_range(fd, 0, clone, 0, 0).unwrap();
        let expected = get(&one, b"/f");
        assert_eq!(expected[at as usize], round as u8);
        assert!(
            get(&one, b"/c") == expected && get(&other, b"/c") == expected,
            "round {round}"
        );
        // A reader that has the old places of the clone's blocks, and one of the source's.
        other.pwrite(clone, &[0xee; 6000], at + 1000).unwrap();
        let mut changed = expected.clone();
        changed[at as usize + 1000..][..6000].fill(0xee);
        assert!(
            get(&one, b"/c") == changed && get(&one, b"/f") == expected,
            "round {round}"
        );
    }
    check(&embedded);
}

#[test]
fn copies_of_much_share_blocks_and_copies_of_little_do_not() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    for (index, (len, shares)) in [(4 << 20, true), ((2 << 20) + 77, true), (100_000, false)]
        .into_iter()
        .enumerate()
    {
        let (name, copy) = (format!("/f{index}"), format!("/c{index}"));
        let data = bytes(len, index as u8);
        let from = put(&posix, name.as_bytes(), &data);
        let to = put(&posix, copy.as_bytes(), b"");
        let before = used(&embedded);
        assert_eq!(posix.copy_file_range(from, to, 1 << 40).unwrap(), len as u64);
        assert_eq!(posix.copy_file_range(from, to, 1 << 40).unwrap(), 0);
        assert_eq!(get(&posix, copy.as_bytes()), data);
        let more = used(&embedded) - before;
        assert_eq!(
            more < (len / BLOCK_SIZE / 2) as u64,
            shares,
            "{more} blocks for {len} bytes"
        );
    }
    check(&embedded);
}

#[test]
fn clone_without_space_fails_and_leaves_a_whole_pool() {
    let (_, embedded) = start();
    let posix = root(&embedded);
    // A file with an extent in every other block.
    let from = put(&posix, b"/f", b"");
    for at in 0..2000_u64 {
        posix
            .pwrite(from, &bytes(BLOCK_SIZE, at as u8), 2 * at * BLOCK)
            .unwrap();
    }
    let filler = put(&posix, b"/filler", b"");
    let mut at = 0;
    while posix.pwrite(filler, &bytes(64 << 10, 1), at).is_ok() {
        at += 64 << 10;
    }
    let before = get(&posix, b"/f");
    let mut failed = 0;
    for index in 0..200 {
        let name = format!("/c{index}");
        let Ok(to) = posix.open(name.as_bytes(), libc::O_CREAT | libc::O_RDWR, 0o644) else {
            failed += 1;
            break;
        };
        match posix.clone_range(from, 0, to, 0, 0) {
            Ok(()) => assert!(get(&posix, name.as_bytes()) == before),
            Err(Errno(errno)) => {
                assert_eq!(errno, libc::ENOSPC);
                assert_eq!(get(&posix, name.as_bytes()), b"");
                failed += 1;
                break;
            }
        }
    }
    assert!(failed > 0);
    assert!(get(&posix, b"/f") == before);
    check(&embedded);
}

/// A block that is shared is not freed by a truncation that ends in it, and the rest of it takes a new one.
#[test]
fn truncations_of_clones_in_a_full_pool_fail_or_are_digested() {
    let pool = SimPool { ssd_bytes: 0, ..POOL };
    let world = SimWorld::new();
    pool.mkfs(&world).unwrap();
    let embedded = pool.open(&world, config()).unwrap();
    let posix = root(&embedded);
    let data = bytes(BLOCK_SIZE, 3);
    let from = put(&posix, b"/f", &data);
    let clones: Vec<_> = (0..300)
        .map(|index| {
            let to = put(&posix, format!("/c{index}").as_bytes(), b"");
            posix.clone_range(from, 0, to, 0, 0).unwrap();
            to
        })
        .collect();
    let filler = put(&posix, b"/filler", b"");
    let mut at = 0;
    for piece in [64 << 10, BLOCK_SIZE] {
        while posix.pwrite(filler, &bytes(piece, 1), at).is_ok() {
            at += piece as u64;
        }
    }
    posix.fsync(filler).unwrap();
    // Until the clones count as one session's again, and are changed by its log.
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut failed = 0;
    for (index, clone) in clones.iter().enumerate() {
        let len = match posix.ftruncate(*clone, 100) {
            Ok(()) => 100,
            Err(Errno(errno)) => {
                assert_eq!(errno, libc::ENOSPC);
                failed += 1;
                BLOCK_SIZE
            }
        };
        assert!(get(&posix, format!("/c{index}").as_bytes()) == data[..len]);
    }
    embedded.kernel().digest_all().unwrap();
    assert!(failed > 0, "the pool was not full");
    // What needs no space goes on, and makes some.
    posix.ftruncate(filler, 0).unwrap();
    check(&embedded);
    for (index, clone) in clones.iter().enumerate() {
        posix.ftruncate(*clone, 50).unwrap();
        assert!(get(&posix, format!("/c{index}").as_bytes()) == data[..50]);
    }
    check(&embedded);
}

/// A write over a part of a shared run cuts it, so the tree of the runs grows by more than was reserved for
/// it.
#[test]
fn writes_over_clones_in_a_full_pool_are_refused_or_digested() {
    let pool = SimPool { ssd_bytes: 0, ..POOL };
    let world = SimWorld::new();
    pool.mkfs(&world).unwrap();
    let embedded = pool.open(&world, config()).unwrap();
    let posix = root(&embedded);
    let mut data = bytes(1500 * BLOCK_SIZE, 3);
    let from = put(&posix, b"/f", &data);
    let to = put(&posix, b"/c", b"");
    posix.clone_range(from, 0, to, 0, 0).unwrap();
    let original = data.clone();
    let filler = put(&posix, b"/filler", b"");
    let mut at = 0;
    while posix.pwrite(filler, &bytes(64 << 10, 1), at).is_ok() {
        at += 64 << 10;
    }
    // Back to some room, for writes of one block, of which each charges several.
    posix.ftruncate(filler, at - (4 << 20)).unwrap();
    posix.fsync(filler).unwrap();
    let mut failed = false;
    for round in 0..1500_u64 {
        let block = (round * 751 % 1500) as usize;
        match posix.pwrite(to, &[round as u8; BLOCK_SIZE], block as u64 * BLOCK) {
            Ok(_) => data[block * BLOCK_SIZE..][..BLOCK_SIZE].fill(round as u8),
            Err(Errno(errno)) => {
                assert_eq!(errno, libc::ENOSPC);
                failed = true;
                break;
            }
        }
        if round % 64 == 0 {
            posix.fsync(to).unwrap();
        }
    }
    assert!(failed, "the pool was not full");
    check(&embedded);
    posix.fs().unmount().unwrap();
    embedded.shutdown().unwrap();
    let embedded = pool.open(&world, config()).unwrap();
    let posix = root(&embedded);
    assert!(get(&posix, b"/c") == data);
    assert!(get(&posix, b"/f") == original);
    check(&embedded);
}

/// A clone of many extents takes several records; what a crash between them leaves is freed at the next
/// start.
#[test]
fn clone_that_is_cut_off_leaves_nothing_after_the_next_start() {
    let pool = SimPool {
        journal_bytes: 256 << 10,
        ..POOL
    };
    let world = SimWorld::new();
    pool.mkfs(&world).unwrap();
    let embedded = pool.open(&world, config()).unwrap();
    let posix = root(&embedded);
    let from = put(&posix, b"/f", b"");
    for at in (0..1500_u64).rev() {
        posix
            .pwrite(from, &bytes(BLOCK_SIZE, at as u8), 2 * at * BLOCK)
            .unwrap();
    }
    let to = put(&posix, b"/c", b"");
    posix.fsync(to).unwrap();
    let (before, data) = (used(&embedded), get(&posix, b"/f"));
    let (recording, ()) = world
        .clone()
        .record(|| posix.clone_range(from, 0, to, 0, 0).unwrap());
    let points = recording.durability_points();
    let (mut undone, mut cut_off) = (0, 0);
    for point in points.iter().step_by((points.len() / 40).max(1)) {
        let world = recording.image(point.index, Crash::PowerNone).into_world();
        let (store, _) = Store::open(SimPool::devices(&world).unwrap(), OpenOptions::default()).unwrap();
        cut_off += usize::from(!store.orphans().unwrap().is_empty());
        drop(store);
        let embedded = pool.open(&world, config()).unwrap();
        let posix = root(&embedded);
        assert_eq!(embedded.kernel().store().orphans().unwrap(), [], "{point:?}");
        let clone = get(&posix, b"/c");
        if clone.is_empty() {
            undone += 1;
            // The tree of the runs, and the source's, may be longer by now.
            assert!(used(&embedded) < before + 40, "{point:?}");
        } else {
            assert!(clone == data);
        }
        check(&embedded);
    }
    assert!(undone > 5 && cut_off > 3, "{undone} undone, {cut_off} cut off");
}
