//! Reuse, reservation, full tiers.
use super::*;
use crate::StoreError;
use varve_format::{FileBlock, TxId};

#[test]
fn freed_data_waits_for_the_horizon() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_data(file, FileBlock(0), &[1; 4096 * 8], true, SSD)
        .unwrap();
    tx.write_data(file, FileBlock(8), &[1; 4096 * 8], true, NVM)
        .unwrap();
    let made = tx.commit().unwrap();
    rig.store.set_reader_horizon(made);
    let free = rig.store.space();
    let mut tx = rig.store.begin().unwrap();
    tx.truncate(file, 0).unwrap();
    let freed = tx.commit().unwrap();
    assert_eq!(rig.store.pending_frees().blocks, 16);
    assert_eq!(rig.store.pending_frees().newest_tx, freed);
    rig.store.checkpoint().unwrap();
    assert_eq!(rig.store.space().tiers[1].free, free.tiers[1].free);
    assert_eq!(rig.store.space().tiers[1].pending, 8);
    assert_clean(&rig.store);
    rig.store.set_reader_horizon(freed);
    assert_eq!(rig.store.pending_frees().blocks, 0);
    assert_eq!(rig.store.space().tiers[1].free, free.tiers[1].free + 8);
    assert_eq!(rig.store.space().tiers[0].free, free.tiers[0].free + 8);
    assert_clean(&rig.store);
}

#[test]
fn freed_metadata_waits_for_the_tail() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.xattr_set(file, b"user.x", &[1; 20_000]).unwrap();
    tx.commit().unwrap();
    let free = rig.store.space().tiers[0].free;
    let mut tx = rig.store.begin().unwrap();
    tx.xattr_remove(file, b"user.x").unwrap();
    tx.commit().unwrap();
    let space = rig.store.space().tiers[0];
    assert!(space.free <= free && space.pending >= 5, "{space:?}");
    rig.store.set_reader_horizon(TxId(0));
    rig.store.checkpoint().unwrap();
    let after = rig.store.space().tiers[0];
    assert_eq!((after.free, after.pending), (space.free + space.pending, 0));
    assert_clean(&rig.store);
}

#[test]
fn full_tiers_fall_through_and_then_refuse_with_nothing_half_done() {
    let mut rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    let chunk = pattern(4096 * 128, 4);
    let mut at = 0;
    let last = loop {
        let before = rig.store.space();
        let mut tx = rig.store.begin().unwrap();
        match tx.write_data(file, FileBlock(at), &chunk, true, SSD) {
            Ok(()) => tx.commit().unwrap(),
            Err(StoreError::NoSpace { .. }) => {
                assert!(matches!(tx.commit(), Err(StoreError::Poisoned)));
                let after = rig.store.space();
                assert_eq!(
                    before.tiers.map(|tier| tier.free),
                    after.tiers.map(|tier| tier.free)
                );
                break at;
            }
            Err(error) => panic!("{error}"),
        };
        at += 128;
    };
    let used: std::collections::HashSet<_> = rig
        .store
        .map(file, FileBlock(0), 10_000)
        .unwrap()
        .iter()
        .map(|extent| extent.tier)
        .collect();
    assert_eq!(used.len(), 3);
    assert_clean(&rig.store);
    assert!(matches!(rig.store.reserve(128), Err(StoreError::NoSpace { .. })));
    // Names and truncation still work.
    for i in 0..20 {
        let mut tx = rig.store.begin().unwrap();
        make(&mut tx, ROOT_INO, &format!("n{i}"), 0o100_644).unwrap();
        tx.commit().unwrap();
    }
    rig = rig.reopen();
    loop {
        let mut tx = rig.store.begin().unwrap();
        let progress = tx.truncate(file, 4096 * 100 + 1).unwrap();
        tx.commit().unwrap();
        if progress == Progress::Done {
            break;
        }
    }
    rig.store.checkpoint().unwrap();
    assert!(rig.store.reserve(last / 2).is_ok());
    rig.store.unreserve(last / 2);
    let mut tx = rig.store.begin().unwrap();
    tx.write_data(file, FileBlock(200), &chunk, true, SSD).unwrap();
    tx.commit().unwrap();
    rig.reopen();
}

#[test]
fn units_with_holes_are_filled_when_no_empty_one_is_left() {
    let mut rig = Rig::new();
    let only = DataTarget::only(Tier::Ssd);
    let mut tx = rig.store.begin().unwrap();
    let keep = make(&mut tx, ROOT_INO, "keep", 0o100_644).unwrap().ino;
    let drop_ = make(&mut tx, ROOT_INO, "drop", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    let mut at = 0;
    loop {
        let mut tx = rig.store.begin().unwrap();
        let a = tx.write_data(keep, FileBlock(at), &pattern(4096 * 4, at), true, only);
        let b = a.and_then(|()| tx.write_data(drop_, FileBlock(at), &pattern(4096 * 4, at + 1), true, only));
        if b.is_err() {
            break;
        }
        tx.commit().unwrap();
        at += 4;
    }
    let mut tx = rig.store.begin().unwrap();
    assert_eq!(unlink(&mut tx, ROOT_INO, "drop").unwrap(), Progress::Done);
    tx.commit().unwrap();
    rig = rig.reopen();
    let mut tx = rig.store.begin().unwrap();
    tx.write_data(keep, FileBlock(5000), &pattern(4096 * 200, 9), true, only)
        .unwrap();
    tx.commit().unwrap();
    assert_clean(&rig.store);
    rig.reopen();
}

#[test]
fn data_stays_readable_when_a_transaction_that_sealed_its_units_again_is_given_up() {
    let mut rig = Rig::new();
    let (keep, blocks) = leave_holes(&rig.store, |tx, _| tx.commit().map(drop)).unwrap();
    let mut want = vec![0; blocks as usize * 4096];
    rig.store.read(keep, 0, &mut want).unwrap();
    rig = rig.reopen();
    let mut tx = rig.store.begin().unwrap();
    let fill = pattern(4096 * 200, 9);
    tx.write_data(keep, FileBlock(50_000), &fill, true, DataTarget::only(Tier::Ssd))
        .unwrap();
    // Others read the old content meanwhile, after the transaction is given up, and after the next start.
    let mut got = vec![0; want.len()];
    rig.store.read(keep, 0, &mut got).unwrap();
    assert!(got == want);
    drop(tx);
    rig.store.read(keep, 0, &mut got).unwrap();
    assert!(got == want);
    rig = rig.reopen();
    rig.store.read(keep, 0, &mut got).unwrap();
    assert!(got == want);
    // The next one takes the same holes.
    for round in 0..2 {
        let mut tx = rig.store.begin().unwrap();
        tx.write_data(keep, FileBlock(50_000), &fill, true, DataTarget::only(Tier::Ssd))
            .unwrap();
        tx.commit().unwrap();
        assert_clean(&rig.store);
        let mut tx = rig.store.begin().unwrap();
        assert_eq!(
            tx.truncate(keep, blocks * 4096).unwrap(),
            Progress::Done,
            "{round}"
        );
        tx.commit().unwrap();
        rig.store.checkpoint().unwrap();
    }
    rig.reopen();
}

#[test]
fn record_that_is_too_long_is_refused_and_undone() {
    let rig = Rig::with(SimMedium::Dax, 256 << 10);
    let mut files = Vec::new();
    for batch in 0..8 {
        let mut tx = rig.store.begin().unwrap();
        for i in 0..250 {
            files.push(
                make(&mut tx, ROOT_INO, &format!("file {batch} {i}"), 0o100_644)
                    .unwrap()
                    .ino,
            );
        }
        tx.commit().unwrap();
    }
    let before = dump(&rig.store);
    let mut tx = rig.store.begin().unwrap();
    let whole = tx.room();
    let mut changed = 0;
    for ino in &files {
        tx.edit(*ino, |attr| (attr.uid, attr.mtime_ns) = (77, -1))
            .unwrap();
        changed += 1;
        assert!(tx.room() < whole);
        if tx.room() == 0 {
            break;
        }
    }
    assert!(changed > 100 && changed < files.len(), "{changed} files");
    for ino in &files {
        tx.edit(*ino, |attr| attr.gid = 1 << 30).unwrap();
    }
    assert!(matches!(tx.commit(), Err(StoreError::RecordFull { .. })));
    assert_eq!(dump(&rig.store), before);
    assert_clean(&rig.store);
    // Changes within the record's room are committed.
    let mut tx = rig.store.begin().unwrap();
    for ino in &files {
        if tx.room() < crate::OP_ROOM {
            break;
        }
        tx.edit(*ino, |attr| (attr.uid, attr.mtime_ns) = (77, -1))
            .unwrap();
    }
    tx.commit().unwrap();
    assert_eq!(rig.store.get(files[0]).unwrap().attr.uid, 77);
    rig.reopen();
}

#[test]
fn failed_sync_latches_the_pool() {
    let rig = Rig::new();
    rig.store.latch("a test");
    assert!(matches!(rig.store.begin(), Err(StoreError::Latched(reason)) if &*reason == "a test"));
    assert!(rig.store.get(ROOT_INO).is_ok());
    rig.reopen();
}

#[test]
fn freed_blocks_are_taken_again_before_those_that_were_never_touched() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "file", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    let (blocks, mut highest) = (64_u64, 0);
    for round in 0..100 {
        let mut tx = rig.store.begin().unwrap();
        let data = pattern(4096 * blocks as usize, round);
        tx.write_data(file, FileBlock(0), &data, true, NVM).unwrap();
        tx.commit().unwrap();
        rig.store.checkpoint().unwrap();
        let map = rig.store.map(file, FileBlock(0), 100).unwrap();
        assert_eq!(map.len(), 1, "in one run");
        highest = highest.max(map[0].block.0 + blocks);
    }
    let first = rig.store.space().tiers[0].total;
    let fixed = (NVM_BYTES / 4096) - first;
    assert!(
        highest < fixed + 8 * blocks,
        "up to block {highest} of {fixed} and more"
    );
    let mut bytes = vec![0; 4096 * blocks as usize];
    rig.store.read(file, 0, &mut bytes).unwrap();
    assert!(bytes == pattern(bytes.len(), 99));
}

#[test]
fn long_run_is_taken_from_blocks_never_touched_when_the_free_ones_are_scattered() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "file", 0o100_644).unwrap().ino;
    tx.write_data(file, FileBlock(0), &vec![1; 4096 * 1024], true, NVM)
        .unwrap();
    tx.commit().unwrap();
    // One of eight stays: free enough to be looked at first, but nowhere eight side by side.
    for block in (0..1024).filter(|block| block % 8 > 0) {
        let mut tx = rig.store.begin().unwrap();
        tx.punch(file, block * 4096, 4096, NVM).unwrap();
        tx.commit().unwrap();
    }
    rig.store.checkpoint().unwrap();
    let mut tx = rig.store.begin().unwrap();
    let data = pattern(4096 * 128, 7);
    tx.write_data(file, FileBlock(5000), &data, true, NVM).unwrap();
    tx.write_data(file, FileBlock(9000), &data[..4096 * 2], true, NVM)
        .unwrap();
    tx.commit().unwrap();
    let long = rig.store.map(file, FileBlock(5000), 1).unwrap()[0];
    let short = rig.store.map(file, FileBlock(9000), 1).unwrap()[0];
    assert_eq!((long.len, short.len), (128, 2));
    assert!(short.block < long.block, "{short:?} {long:?}");
    assert_eq!(rig.store.check().unwrap(), []);
}
