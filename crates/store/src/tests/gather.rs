//! Data that goes to a device in one transaction: small runs side by side are one write, and are read back
//! before it is made.

use super::{NVM, Rig, devices_of, make, pattern};
use crate::{DataTarget, OpenOptions, Store};
use std::sync::Arc;
use varve_format::{FileBlock, ROOT_INO, Tier};
use varve_media::emulated::{DiskModel, EmulatedDisk};

/// A pool whose HDD counts what it does.
fn on_counted_disk() -> (Store, Arc<EmulatedDisk>) {
    let Rig { world, store } = Rig::new();
    drop(store);
    let mut devices = devices_of(&world);
    let disk = Arc::new(EmulatedDisk::new(devices.hdd.unwrap(), DiskModel::NONE));
    devices.hdd = Some(Arc::clone(&disk) as _);
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    (store, disk)
}

#[test]
fn scattered_blocks_that_move_in_one_transaction_are_one_write() {
    let (store, disk) = on_counted_disk();
    let mut tx = store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    // Two blocks of each eight, so that they are no run of the file.
    let data = |n: u64| pattern(8192, n);
    for n in 0..20 {
        let mut tx = store.begin().unwrap();
        tx.write_data(file, FileBlock(n * 8), &data(n), true, NVM)
            .unwrap();
        tx.commit().unwrap();
    }
    let before = disk.counts();
    let mut tx = store.begin().unwrap();
    for n in 0..20 {
        let old = store.map(file, FileBlock(n * 8), 1).unwrap()[0];
        let moved = tx.migrate(
            file,
            FileBlock(n * 8),
            2,
            (Tier::Nvm, old.block),
            DataTarget::only(Tier::Hdd),
        );
        assert!(moved.unwrap());
        let mut back = vec![0; 8192];
        tx.read(file, n * 8 * 4096, &mut back).unwrap();
        assert!(back == data(n), "as this transaction sees it");
    }
    assert_eq!(disk.counts().writes, before.writes);
    tx.commit().unwrap();
    let now = disk.counts();
    assert_eq!(now.writes - before.writes, 1);
    assert_eq!(now.written_bytes - before.written_bytes, 20 * 8192);
    for n in 0..20 {
        let mut back = vec![0; 8192];
        store.read(file, n * 8 * 4096, &mut back).unwrap();
        assert!(back == data(n));
    }
}

#[test]
fn disk_is_written_in_its_own_order_unit_after_unit() {
    const UNITS: u64 = 3;
    let (store, disk) = on_counted_disk();
    let mut tx = store.begin().unwrap();
    // Two files by turns, so that neither decides the order.
    let files = ["f", "g"].map(|name| make(&mut tx, ROOT_INO, name, 0o100_644).unwrap().ino);
    tx.commit().unwrap();
    let before = disk.counts();
    let blocks = UNITS * store.layout.unit_data_blocks(Tier::Hdd);
    let (mut written, mut turn) = (0, 0);
    while written < blocks {
        let count = (turn * 5 % 13 + 1).min(blocks - written);
        let mut tx = store.begin().unwrap();
        let data = pattern(count as usize * 4096, turn);
        let at = FileBlock(turn * 13);
        tx.write_data(
            files[turn as usize % 2],
            at,
            &data,
            true,
            DataTarget::only(Tier::Hdd),
        )
        .unwrap();
        tx.commit().unwrap();
        written += count;
        turn += 1;
    }
    let now = disk.counts();
    let seeks = now.write_seeks - before.write_seeks;
    assert!(now.written_bytes - before.written_bytes >= blocks * 4096);
    // To the first unit, and of each to its footer at its end and to the next one.
    assert!(
        seeks <= 1 + 2 * UNITS,
        "{seeks} seeks for {turn} writes to {UNITS} units"
    );
}
