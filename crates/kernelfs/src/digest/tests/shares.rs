//! Shares that take several records: what they leave when they fail or are cut off.

use super::forwarded::{Caller, blocks, errno, fill_up};
use super::machine::{FILE, Machine, NOW, ROOT};
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, SessionId, SetAttr, SetAttrMask, Tier};
use varve_store::{DataTarget, OP_ROOM, ShareRange, Store, StoreError};

/// Blocks of the files; every other one is mapped.
const BLOCKS: u64 = 3000;
const BLOCK: usize = BLOCK_BYTES as usize;

/// A file with an extent in every other block, and an empty one, in a pool whose journal is small.
pub(super) fn two_files() -> (Caller, InodeKey, InodeKey) {
    let mut caller = Caller::on(Machine::with_journal(256 << 10));
    let from = caller.make(ROOT, b"from", FILE).unwrap();
    let to = caller.make(ROOT, b"to", FILE).unwrap();
    caller.machine.store.share_extents().unwrap();
    scatter(&caller.machine.store, from, 7, BLOCKS);
    (caller, from, to)
}

/// Writes every other block of a file, the last first: no two of them lie in one run.
pub(super) fn scatter(store: &Store, key: InodeKey, byte: u8, blocks: u64) {
    for part in (0..blocks).step_by(200) {
        let mut tx = store.begin().unwrap();
        for at in (part..part + 200).rev().step_by(2) {
            let target = DataTarget::prefer(Tier::Nvm);
            tx.write_data(key.ino, FileBlock(at), &[byte; BLOCK], true, target)
                .unwrap();
        }
        tx.commit().unwrap();
    }
}

pub(super) fn share(from: InodeKey, to: InodeKey) -> LogOp<'static> {
    LogOp::Share {
        key: to,
        offset: 0,
        source: from,
        source_offset: 0,
        len: 0,
        compare: false,
    }
}

/// Takes all blocks that metadata may have but `left`, by attributes of a file; returns the number of
/// attributes.
pub(super) fn leave_metadata(caller: &mut Caller, left: u32) -> u32 {
    let other = caller.make(ROOT, b"other", FILE).unwrap();
    let holder = caller.make(ROOT, b"holder", FILE).unwrap();
    let store = &caller.machine.store;
    fill_up(store, other.ino);
    let name = |at: u32| format!("user.{at:06}").into_bytes();
    let mut count = 0;
    loop {
        let mut tx = store.begin().unwrap();
        match tx.xattr_set(holder.ino, &name(count), &[1; 3000]) {
            Ok(()) => drop(tx.commit().unwrap()),
            Err(StoreError::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
        count += 1;
    }
    let mut tx = store.begin().unwrap();
    for at in count - left..count {
        tx.xattr_remove(holder.ino, &name(at)).unwrap();
    }
    tx.commit().unwrap();
    store.checkpoint().unwrap();
    count
}

#[test]
fn share_that_finds_no_space_midway_gives_back_what_it_took() {
    let (mut caller, from, to) = two_files();
    assert!(leave_metadata(&mut caller, 25) > 100);
    let before = caller.machine.dump();
    assert_eq!(errno(caller.call(share(from, to))), libc::ENOSPC);
    let store = &caller.machine.store;
    assert_eq!(blocks(store, to), 0);
    assert_eq!(store.orphans().unwrap(), []);
    assert_eq!(caller.machine.dump(), before);
}

#[test]
fn share_that_changes_a_part_of_a_file_and_fails_takes_its_set_id_bits_away() {
    let (mut caller, from, to) = two_files();
    scatter(&caller.machine.store, to, 9, BLOCKS);
    let mode = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o6777,
        ..SetAttr::default()
    };
    caller.call(LogOp::SetAttr { key: to, attr: mode }).unwrap();
    let capability = LogOp::SetXattr {
        key: to,
        name: varve_format::XATTR_CAPABILITY,
        value: &[1; 20],
    };
    caller.call(capability).unwrap();
    leave_metadata(&mut caller, 12);
    // As in the daemon: a reader may still have the target's blocks.
    let store = &caller.machine.store;
    store.set_reader_horizon(store.newest_tx());
    caller.be(5);
    assert_eq!(errno(caller.call(share(from, to))), libc::ENOSPC);
    let data = caller.machine.data(to);
    assert!(data[BLOCK] == 7 && data[data.len() - 1] == 9, "it failed midway");
    let attr = caller.machine.attr(to);
    assert_eq!(attr.mode & 0o7777, 0o777);
    assert_eq!(attr.mtime_ns, NOW);
    let capability = caller
        .machine
        .store
        .xattr_get(to.ino, varve_format::XATTR_CAPABILITY)
        .unwrap();
    assert_eq!(capability, None);
}

/// A file whose blocks lie in runs which lie far apart in the tree.
fn scattered(store: &Store, keys: [InodeKey; 4], blocks: u64, apart: u64) {
    let [base, copy, odd, some] = keys.map(|key| key.ino);
    let target = DataTarget::prefer(Tier::Nvm);
    let mut tx = store.begin().unwrap();
    for part in 0..apart {
        let first = FileBlock(part * blocks);
        let bytes = vec![part as u8; BLOCK * blocks as usize];
        tx.write_data(base, first, &bytes, true, target).unwrap();
    }
    tx.commit().unwrap();
    let whole = (0, copy, 0, blocks * apart);
    let odd = (1..blocks * apart).step_by(2).map(|at| (at, odd, at, 1));
    let some = (0..blocks).map(|at| (at * apart, some, at, 1));
    let mut tx = store.begin().unwrap();
    for (from, to, at, count) in std::iter::once(whole).chain(odd).chain(some) {
        if tx.room() < 3 * OP_ROOM / 2 {
            tx.commit().unwrap();
            tx = store.begin().unwrap();
        }
        let range = ShareRange {
            from: base,
            from_block: FileBlock(from),
            to,
            to_block: FileBlock(at),
            blocks: count,
            size_bytes: (at + count) * BLOCK_BYTES,
        };
        assert_eq!(tx.share(&range, 0).unwrap(), count);
    }
    tx.commit().unwrap();
}

#[test]
fn write_over_more_runs_than_a_record_takes_is_digested() {
    const BLOCKS: u64 = 200;
    let mut caller = Caller::on(Machine::with_journal(256 << 10));
    let keys = [b"base", b"copy", b"odd ", b"some"].map(|name| caller.make(ROOT, name, FILE).unwrap());
    caller.machine.store.share_extents().unwrap();
    scattered(&caller.machine.store, keys, BLOCKS, 35);
    let others = keys[..3]
        .iter()
        .map(|key| caller.machine.data(*key))
        .collect::<Vec<_>>();
    let mut expected = caller.machine.data(keys[3]);
    // By a log: parts of the first and the last block stay.
    let data = vec![0xab; BLOCK * BLOCKS as usize / 2];
    let write = |offset, data| LogOp::Write {
        key: keys[3],
        offset,
        data,
    };
    caller.machine.op(write(100, &data));
    caller.machine.digest(1000).unwrap();
    expected[100..100 + data.len()].copy_from_slice(&data);
    assert!(caller.machine.data(keys[3]) == expected);
    // And by a forwarded operation.
    let offset = (BLOCKS / 2 + 2) * BLOCK_BYTES;
    let data = vec![0xcd; BLOCK * (BLOCKS as usize / 2 - 3)];
    caller.call(write(offset, &data)).unwrap();
    expected[offset as usize..offset as usize + data.len()].copy_from_slice(&data);
    assert!(caller.machine.data(keys[3]) == expected);
    for (key, data) in keys.iter().zip(others) {
        assert!(caller.machine.data(*key) == data);
    }
    caller.machine.dump();
}

#[test]
fn no_operation_compares_more_than_linux_does() {
    let (mut caller, from, to) = two_files();
    for key in [from, to] {
        caller.call(LogOp::Truncate { key, size: 1 << 40 }).unwrap();
    }
    let compare = |offset, len| LogOp::Share {
        key: to,
        offset,
        source: from,
        source_offset: offset,
        len,
        compare: true,
    };
    assert_eq!(errno(caller.call(compare(0, 1 << 40))), libc::EINVAL);
    assert_eq!(errno(caller.call(compare(1 << 30, 16 << 20))), 0);
}

#[test]
fn share_without_bytes_does_nothing_wherever_it_would_begin() {
    let mut caller = Caller::new();
    let from = caller.make(ROOT, b"from", FILE).unwrap();
    let to = caller.make(ROOT, b"to", FILE).unwrap();
    caller
        .call(LogOp::Write {
            key: from,
            offset: 0,
            data: b"some",
        })
        .unwrap();
    caller.machine.store.share_extents().unwrap();
    let before = caller.machine.dump();
    let nothing = |source_offset| LogOp::Share {
        key: to,
        offset: 7,
        source: from,
        source_offset,
        len: 0,
        compare: false,
    };
    caller.call(nothing(4)).unwrap();
    assert_eq!(errno(caller.call(nothing(5))), libc::EINVAL);
    assert_eq!(caller.machine.dump(), before);
}

/// Takes the file's name away while a session has it open.
fn unlink_open(caller: &mut Caller, name: &[u8], key: InodeKey) {
    caller.machine.leases.held.borrow_mut().push((SessionId(9), key));
    let dir = ROOT;
    caller.call(LogOp::Unlink { dir, name, key }).unwrap();
    assert_eq!(caller.machine.attr(key).nlink, 0);
}

#[test]
fn open_file_without_a_name_outlives_a_share_that_fails() {
    let (mut caller, from, to) = two_files();
    let short = LogOp::Write {
        key: to,
        offset: 0,
        data: b"mine",
    };
    caller.call(short).unwrap();
    unlink_open(&mut caller, b"to", to);
    leave_metadata(&mut caller, 25);
    let beyond = LogOp::Share {
        key: to,
        offset: BLOCK_BYTES,
        source: from,
        source_offset: 0,
        len: 0,
        compare: false,
    };
    assert_eq!(errno(caller.call(beyond)), libc::ENOSPC);
    assert_eq!(caller.machine.data(to), b"mine");
    assert_eq!(blocks(&caller.machine.store, to), 1);
    caller.machine.dump();
}

#[test]
fn open_file_without_a_name_outlives_a_truncation_of_many_records() {
    for by_log in [true, false] {
        let (mut caller, key, _) = two_files();
        // More extents than one step frees.
        scatter(&caller.machine.store, key, 7, 8800);
        unlink_open(&mut caller, b"from", key);
        let truncate = LogOp::Truncate {
            key,
            size: 2 * BLOCK_BYTES,
        };
        if by_log {
            caller.machine.op(truncate);
            caller.machine.digest(1000).unwrap();
        } else {
            caller.call(truncate).unwrap();
        }
        let mut expected = vec![0; BLOCK];
        expected.resize(2 * BLOCK, 7);
        assert!(caller.machine.data(key) == expected);
        caller.machine.dump();
    }
}
