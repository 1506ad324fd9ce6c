//! What a file has alone on a slower tier is moved together by the daemon: in several records, for whom, and
//! with what room.

use super::forwarded::{Caller, errno, fill_up};
use super::machine::{FILE, Machine, ROOT};
use crate::digest::count_shared;
use std::cell::Cell;
use std::rc::Rc;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, SetAttr, SetAttrMask, Tier};
use varve_store::DataTarget;

const BLOCK: usize = BLOCK_BYTES as usize;
/// Blocks of the file; every other one is mapped.
const BLOCKS: u64 = 800;

const fn defrag(key: InodeKey, offset: u64, len: u64) -> LogOp<'static> {
    LogOp::Defrag { key, offset, len }
}

/// A file with an extent on the SSD in every other block, the last first.
fn scattered() -> (Caller, InodeKey) {
    let mut caller = Caller::on(Machine::with_flash());
    let key = caller.make(ROOT, b"f", FILE).unwrap();
    let owner = SetAttr {
        mask: SetAttrMask::UID | SetAttrMask::GID | SetAttrMask::MODE,
        uid: 5,
        gid: 5,
        mode: 0o644,
        ..SetAttr::default()
    };
    caller.call(LogOp::SetAttr { key, attr: owner }).unwrap();
    for part in (0..BLOCKS).step_by(200) {
        let mut tx = caller.machine.store.begin().unwrap();
        for at in (part..part + 200).rev().step_by(2) {
            let target = DataTarget::only(Tier::Ssd);
            tx.write_data(key.ino, FileBlock(at), &[at as u8; BLOCK], true, target)
                .unwrap();
        }
        tx.commit().unwrap();
    }
    (caller, key)
}

#[test]
fn defragmentation_of_more_than_a_record_takes_changes_no_byte_and_no_attribute() {
    let (mut caller, key) = scattered();
    let mode = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o6755,
        ..SetAttr::default()
    };
    caller.call(LogOp::SetAttr { key, attr: mode }).unwrap();
    let before = (caller.machine.data(key), caller.machine.attr(key));
    let count = count_shared(&caller.machine.store, key, (0, 0)).unwrap();
    assert_eq!((count.alone, count.places), (400, 400));
    caller.be(5);
    let spent = Rc::new(Cell::new(0));
    let sum = Rc::clone(&spent);
    caller.spent = Box::new(move |_, blocks| sum.set(sum.get() + blocks));
    let newest = caller.machine.store.newest_tx();
    let (applied, result) = caller.call(defrag(key, 0, 0)).unwrap();
    assert!(caller.machine.store.newest_tx().0 - newest.0 > 2);
    assert_eq!((spent.get(), result.offset), (400, 400 * BLOCK_BYTES));
    // Who has mapped the file hears of it.
    assert_eq!(applied.remapped, [key]);
    assert_eq!((caller.machine.data(key), caller.machine.attr(key)), before);
    let count = count_shared(&caller.machine.store, key, (0, 0)).unwrap();
    assert!(count.alone == 400 && count.places <= 4, "{count:?}");
    // Again: nothing is left to do.
    let (_, result) = caller.call(defrag(key, 0, 0)).unwrap();
    assert_eq!(result.offset, 0);
    caller.machine.dump();
}

#[test]
fn defragmentation_in_a_full_pool_leaves_the_file_as_it_is() {
    let (mut caller, key) = scattered();
    let before = caller.machine.data(key);
    let filler = caller.make(ROOT, b"filler", FILE).unwrap();
    fill_up(&caller.machine.store, filler.ino);
    // Where there is no better place for them, the pieces stay.
    let told = caller.call(defrag(key, 0, 0));
    assert!(matches!(told, Ok(_) | Err(libc::ENOSPC)), "{told:?}");
    assert_eq!(caller.machine.data(key), before);
    caller.machine.dump();
    caller.call(LogOp::Truncate { key: filler, size: 0 }).unwrap();
    caller.call(defrag(key, 0, 0)).unwrap();
    assert_eq!(caller.machine.data(key), before);
    assert!(count_shared(&caller.machine.store, key, (0, 0)).unwrap().places <= 4);
    caller.machine.dump();
}

#[test]
fn defragmentation_is_refused_for_much_at_once_and_for_what_is_no_file() {
    let (mut caller, key) = scattered();
    let places = |caller: &Caller| count_shared(&caller.machine.store, key, (0, 0)).unwrap().places;
    let dir = caller.make(ROOT, b"d", 0o040_755).unwrap();
    caller.be(5);
    let size = 1 << 30;
    caller.call(LogOp::Truncate { key, size }).unwrap();
    assert_eq!(errno(caller.call(defrag(key, 0, 0))), libc::EINVAL);
    assert_eq!(errno(caller.call(defrag(key, 0, (16 << 20) + 1))), libc::EINVAL);
    assert_eq!(errno(caller.call(defrag(key, 1 << 40, 4096))), 0);
    assert_eq!(errno(caller.call(defrag(dir, 0, 0))), libc::EISDIR);
    let gone = InodeKey::new(77, 3);
    assert_eq!(errno(caller.call(defrag(gone, 0, 0))), libc::ESTALE);
    assert_eq!(places(&caller), 400);
    assert_eq!(errno(caller.call(defrag(key, 0, 16 << 20))), 0);
    assert!(places(&caller) <= 4);
    // A log that has it is not believed.
    caller.machine.op(defrag(key, 0, 4096));
    let applied = caller.machine.digest(1000);
    let refused = applied.map_or(true, |all| all.iter().any(|applied| !applied.refused.is_empty()));
    assert!(refused);
}
