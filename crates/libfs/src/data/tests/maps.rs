//! Maps of several files that come in one request.

use super::{Rig, contents};
use crate::inode::Inode;
use crate::log::slots::{enter_overwrite, lane, leave_overwrite};
use std::sync::Arc;
use varve_format::{BLOCK_SIZE, EntryFlags};
use varve_ipc::{MAPPED_FILES_MAX, TOLD_MAX};

const NONE: EntryFlags = EntryFlags::empty();

fn file(rig: &Rig, ino: u64, blocks: usize) -> Arc<Inode> {
    let inode = Rig::inode(ino);
    let bytes = vec![ino as u8; blocks * BLOCK_SIZE];
    rig.plane.write(&inode, 0, &bytes, NONE).unwrap();
    inode
}

/// Has all data digested, and all extents forgotten.
fn digest(rig: &Rig) {
    rig.plane.digest_all::<()>().unwrap();
    rig.plane.reclaim();
}

/// Two files, both digested.
fn two(rig: &Rig) -> (Arc<Inode>, Arc<Inode>) {
    let files = (file(rig, 10, 1), file(rig, 11, 1));
    digest(rig);
    files
}

/// Reads a file, whose map comes with others; `amid` happens before the answer is here.
fn read_amid(rig: &Rig, asks: &Inode, amid: impl FnOnce() + Send + 'static) {
    *rig.fake.amid_maps.lock() = Some(Box::new(amid));
    assert_eq!(contents(&rig.plane, asks), vec![asks.key.ino.0 as u8; BLOCK_SIZE]);
    assert!(
        rig.fake.amid_maps.lock().is_none(),
        "they were asked for together"
    );
}

fn asked(rig: &Rig, what: &str) -> u64 {
    rig.fake.calls.lock().get(what).copied().unwrap_or(0)
}

#[test]
fn maps_of_small_files_that_were_digested_come_in_one_request() {
    let rig = Rig::new(8, 8);
    let count = MAPPED_FILES_MAX as u64;
    let small: Vec<_> = (0..count).map(|n| file(&rig, 10 + n, 2)).collect();
    let large = file(&rig, 200, TOLD_MAX + 1);
    digest(&rig);
    for inode in &small {
        assert_eq!(
            contents(&rig.plane, inode),
            vec![inode.key.ino.0 as u8; 2 * BLOCK_SIZE]
        );
    }
    assert_eq!((asked(&rig, "maps"), asked(&rig, "map")), (1, 0));
    // A large one is asked for by itself, and a last one that is left too.
    let left = file(&rig, 300, 1);
    digest(&rig);
    assert_eq!(
        contents(&rig.plane, &large),
        vec![200; (TOLD_MAX + 1) * BLOCK_SIZE]
    );
    assert_eq!(contents(&rig.plane, &left), vec![44; BLOCK_SIZE]);
    assert_eq!((asked(&rig, "maps"), asked(&rig, "map")), (1, 2));
}

#[test]
fn map_that_becomes_void_before_the_answer_is_here_is_asked_for_again() {
    let rig = Arc::new(Rig::new(8, 8));
    let (asks, other) = two(&rig);
    let (own, changed) = (Arc::clone(&rig), Arc::clone(&other));
    read_amid(&rig, &asks, move || {
        own.plane.write(&changed, 0, &[7; BLOCK_SIZE], NONE).unwrap();
        digest(&own);
        let freed = own.fake.freed();
        assert_eq!(freed.len(), 1);
        own.plane.forget_extents(&changed);
        own.fake.poison(freed);
    });
    assert_eq!(contents(&rig.plane, &other), vec![7; BLOCK_SIZE]);
}

#[test]
fn map_of_a_file_whose_lease_went_and_came_meanwhile_does_not_count() {
    let rig = Rig::new(8, 8);
    let (asks, other) = two(&rig);
    let again = Arc::clone(&other);
    // What the grant of a new lease does.
    read_amid(&rig, &asks, move || again.reset(again.attr()));
    assert!(other.unmapped().is_some());
}

#[test]
fn file_that_is_overwritten_when_the_answer_comes_is_left_alone() {
    let rig = Rig::new(8, 8);
    let (asks, other) = two(&rig);
    let (lane, id) = (lane(), other.id());
    read_amid(&rig, &asks, move || enter_overwrite(lane, id));
    leave_overwrite(lane);
    assert!(
        other.unmapped().is_some() && other.version().is_some(),
        "barred no more"
    );
    assert_eq!(contents(&rig.plane, &other), vec![11; BLOCK_SIZE]);
}

#[test]
fn file_with_data_in_the_log_is_asked_for_by_itself() {
    let rig = Rig::new(8, 8);
    let (asks, other) = (file(&rig, 10, 1), file(&rig, 11, 2));
    digest(&rig);
    rig.plane.write(&other, 0, &[5; BLOCK_SIZE], NONE).unwrap();
    contents(&rig.plane, &asks);
    assert_eq!((asked(&rig, "maps"), asked(&rig, "map")), (0, 1));
}

#[test]
fn file_whose_map_is_known_or_that_is_gone_is_not_asked_for() {
    let rig = Rig::new(8, 8);
    let (first, known) = (file(&rig, 10, 1), file(&rig, 11, 1));
    let gone = file(&rig, 12, 1);
    digest(&rig);
    contents(&rig.plane, &first);
    assert_eq!(asked(&rig, "maps"), 1);
    drop(gone);
    // Noted again, and only that one is void.
    rig.plane.forget_extents(&first);
    contents(&rig.plane, &first);
    contents(&rig.plane, &known);
    assert_eq!((asked(&rig, "maps"), asked(&rig, "map")), (1, 1));
}
