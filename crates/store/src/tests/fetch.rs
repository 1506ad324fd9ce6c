//! Blocks that are read before the transaction that merges them.
use super::scattered::counted;
use super::shared::{content, new_file};
use super::*;
use crate::{StoreError, Unfetched, Wanted};
use std::sync::Arc;
use varve_format::Tier;
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};

const BLOCKS: u64 = 64;
const EIO: i32 = 5;

/// A file of whole blocks on the HDD.
fn far_file(store: &Store) -> Ino {
    let ino = new_file(store, "far").unwrap();
    let mut tx = store.begin().unwrap();
    let body = pattern((BLOCKS * BLOCK_BYTES) as usize, 1);
    tx.write_data(ino, FileBlock(0), &body, true, HDD).unwrap();
    tx.commit().unwrap();
    ino
}

/// Some bytes in the middle of every second block.
fn pieces(new: &[u8]) -> Vec<(u64, &[u8])> {
    (0..BLOCKS)
        .step_by(2)
        .map(|at| (at * BLOCK_BYTES + 100, new))
        .collect()
}

fn wanted(ino: Ino) -> Wanted {
    Wanted {
        files: vec![(ino, (0..BLOCKS).step_by(2).map(FileBlock).collect())],
        ..Wanted::default()
    }
}

#[test]
fn fetched_blocks_are_merged_without_another_read() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let mut expected = content(&rig.store, ino);
    let (store, disk) = counted(rig, 0);
    content(&store, ino);
    let before = disk.counts();
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    let after = disk.counts();
    assert_eq!(after.reads - before.reads, 1, "they lie near each other");
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    let new = pattern(200, 9);
    tx.write_bytes(ino, &pieces(&new), NVM).unwrap();
    // One block that was not fetched.
    tx.write_bytes(ino, &[(BLOCK_BYTES + 7, &new[..5])], NVM).unwrap();
    tx.commit().unwrap();
    assert_eq!(disk.counts().reads - after.reads, 1, "the one");
    for (offset, bytes) in pieces(&new).into_iter().chain([(BLOCK_BYTES + 7, &new[..5])]) {
        expected[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    drop(fetched);
    assert!(content(&store, ino) == expected);
    assert_clean(&store);
}

#[test]
fn fetched_blocks_are_not_used_for_other_data() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let store = &rig.store;
    let pending = || store.space().tiers[Tier::Hdd as usize].pending;
    assert_eq!(pending(), 0);
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    tx.write_bytes(ino, &pieces(&[1; 10]), NVM).unwrap();
    tx.commit().unwrap();
    assert_eq!(pending(), BLOCKS / 2);
    drop(fetched);
    assert_eq!(pending(), 0);
}

#[test]
fn block_that_has_moved_since_is_read_where_it_is() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let store = &rig.store;
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    let mut tx = store.begin().unwrap();
    let body = pattern((BLOCKS * BLOCK_BYTES) as usize, 5);
    tx.write_data(ino, FileBlock(0), &body, true, NVM).unwrap();
    tx.commit().unwrap();
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    tx.write_bytes(ino, &[(100, &[3; 10])], NVM).unwrap();
    tx.commit().unwrap();
    let mut expected = body;
    expected[100..110].fill(3);
    assert!(content(store, ino) == expected);
}

#[test]
fn only_blocks_on_slower_tiers_are_fetched_and_no_more_than_asked_for() {
    let rig = Rig::new();
    assert!(!rig.store.uses_far_tiers());
    let ino = far_file(&rig.store);
    assert!(rig.store.uses_far_tiers());
    let near = new_file(&rig.store, "near").unwrap();
    let mut tx = rig.store.begin().unwrap();
    let body = pattern(3 * BLOCK_BYTES as usize, 1);
    tx.write_data(near, FileBlock(0), &body, true, NVM).unwrap();
    tx.commit().unwrap();
    let (store, disk) = counted(rig, 0);
    let before = disk.counts().reads;
    assert_eq!(
        store.fetch(&wanted(ino), 10, true).err(),
        Some(Unfetched::TooMany(BLOCKS as usize / 2))
    );
    // Holes, blocks behind the end, inodes that are not there, directories.
    let files = vec![
        (near, vec![FileBlock(0), FileBlock(2), FileBlock(9)]),
        (ino, vec![FileBlock(BLOCKS), FileBlock(u64::MAX)]),
        (varve_format::InodeKey::ROOT.ino, vec![FileBlock(0)]),
        (Ino(999_999), vec![FileBlock(0)]),
    ];
    let none = Wanted {
        files,
        ..Wanted::default()
    };
    assert!(store.fetch(&none, 10, true).unwrap().is_empty());
    assert_eq!(disk.counts().reads, before);
}

#[test]
fn damage_of_a_fetched_block_is_found_by_the_transaction() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let first = rig.store.map(ino, FileBlock(0), 1).unwrap()[0];
    let (store, disk) = counted(rig, 0);
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    disk.read(first.block.0 * BLOCK_BYTES, &mut bytes).unwrap();
    bytes[4000] ^= 1;
    disk.write(first.block.0 * BLOCK_BYTES, &bytes).unwrap();
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    let refused = tx.write_bytes(ino, &[(100, &[3; 10])], NVM);
    assert!(
        matches!(refused, Err(StoreError::DataChecksum { .. })),
        "{refused:?}"
    );
}

/// The pool again, on a disk that fails as the script says.
fn on_faulty_disk(rig: Rig) -> (Store, FaultScript) {
    drop(rig.store);
    let script = FaultScript::new();
    let devices = devices_of(&rig.world);
    let hdd = devices
        .hdd
        .clone()
        .map(|device| Arc::new(FaultyDevice::new(device, script.clone())) as _);
    let (store, _) = Store::open(Devices { hdd, ..devices }, OpenOptions::default()).unwrap();
    (store, script)
}

fn bytes_of(extent: &varve_format::Extent, index: u64) -> std::ops::Range<u64> {
    let at = (extent.block.0 + index) * BLOCK_BYTES;
    at..at + BLOCK_BYTES
}

#[test]
fn bad_block_that_nobody_wants_keeps_no_other_from_being_fetched() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let extent = rig.store.map(ino, FileBlock(0), 1).unwrap()[0];
    let (store, script) = on_faulty_disk(rig);
    script.push(FaultRule::always(FaultOp::Read, Fault::Errno(EIO)).within(bytes_of(&extent, 5)));
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    assert!(script.fired() > 0);
    let mut block = vec![0; BLOCK_BYTES as usize];
    for at in (0..BLOCKS).step_by(2) {
        assert!(
            fetched.copy_to(Tier::Hdd, extent.block.0 + at, &mut block),
            "{at}"
        );
    }
    assert!(!fetched.copy_to(Tier::Hdd, extent.block.0 + 5, &mut block));
}

#[test]
fn wrong_bytes_in_memory_are_read_once_more() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let mut expected = content(&rig.store, ino);
    let extent = rig.store.map(ino, FileBlock(0), 1).unwrap()[0];
    let (store, script) = on_faulty_disk(rig);
    content(&store, ino);
    let flip = Fault::FlippedBit { bit: 77 };
    script.push(FaultRule::once(FaultOp::Read, flip).within(bytes_of(&extent, 0)));
    let fetched = store.fetch(&wanted(ino), 100, true).unwrap();
    assert_eq!(script.fired(), 1);
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    tx.write_bytes(ino, &[(100, &[3; 10])], NVM).unwrap();
    tx.commit().unwrap();
    drop(fetched);
    expected[100..110].fill(3);
    assert!(content(&store, ino) == expected);
    assert_clean(&store);
}

#[test]
fn fetch_yields_to_others_who_wait_for_what_they_have_freed() {
    let rig = Rig::new();
    let ino = far_file(&rig.store);
    let store = &rig.store;
    let held = store.fetch(&wanted(ino), 100, true).unwrap();
    let mut tx = store.begin().unwrap();
    tx.write_data(
        ino,
        FileBlock(0),
        &pattern(20 * BLOCK_BYTES as usize, 3),
        true,
        NVM,
    )
    .unwrap();
    tx.commit().unwrap();
    assert_eq!(
        store.fetch(&wanted(ino), 100, true).err(),
        Some(Unfetched::OthersWait)
    );
    assert!(!store.fetch(&wanted(ino), 100, false).unwrap().is_empty());
    drop(held);
    assert!(store.fetch(&wanted(ino), 100, true).is_ok());
}
