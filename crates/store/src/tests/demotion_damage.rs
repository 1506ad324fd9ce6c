//! Metadata on slower tiers that is unreadable or not as written: errors are reported, and other work
//! continues.
use super::*;
use crate::StoreError;
use crate::check::Finding;
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_format::{BLOCK_BYTES, BlockNo};
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};

const EIO: i32 = 5;

/// Directories `d0` to `d9` of sixteen files with a little data each, all of their metadata on flash.
fn cooled() -> Rig {
    let rig = Rig::new();
    for d in 0..10 {
        let mut tx = rig.store.begin().unwrap();
        let dir = make(&mut tx, ROOT_INO, &format!("d{d}"), 0o040_755).unwrap().ino;
        for i in 0..16 {
            let file = make(&mut tx, dir, &format!("f{i}"), 0o100_644).unwrap().ino;
            tx.write_bytes(file, &[(0, &pattern(5000, i))], NVM).unwrap();
        }
        tx.commit().unwrap();
    }
    rig.store.demote(u64::MAX).unwrap();
    rig.store.checkpoint().unwrap();
    rig
}

/// The pool of `world` on flash that fails as the script says.
fn with_faulty_flash(world: &SimWorld) -> (Store, FaultScript) {
    let script = FaultScript::new();
    let devices = devices_of(world);
    let ssd = devices
        .ssd
        .clone()
        .map(|device| Arc::new(FaultyDevice::new(device, script.clone())) as _);
    let devices = Devices { ssd, ..devices };
    let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
    (store, script)
}

fn look(store: &Store, dir: &str, name: &str) -> Ino {
    let dir = store
        .dir_lookup(ROOT_INO, dir.as_bytes())
        .unwrap()
        .unwrap()
        .key
        .ino;
    store.dir_lookup(dir, name.as_bytes()).unwrap().unwrap().key.ino
}

/// Where the block of the inode file that holds `ino` lies.
fn block_of(store: &Store, ino: Ino) -> BlockNo {
    store
        .snapshot()
        .reader()
        .inode_block(ino.0 / 16)
        .unwrap()
        .unwrap()
}

fn range_of(block: BlockNo) -> std::ops::Range<u64> {
    let (tier, number) = block.home().unwrap();
    assert_eq!(tier, Tier::Ssd);
    number * BLOCK_BYTES..(number + 1) * BLOCK_BYTES
}

#[test]
fn change_that_cannot_read_metadata_fails_alone() {
    let rig = cooled();
    let (ino, other) = (look(&rig.store, "d9", "f9"), look(&rig.store, "d0", "f0"));
    let bad = block_of(&rig.store, ino);
    assert_ne!(bad, block_of(&rig.store, other));
    let Rig { world, store } = rig;
    drop(store);
    let (store, script) = with_faulty_flash(&world);
    script.push(FaultRule::always(FaultOp::Read, Fault::Errno(EIO)).within(range_of(bad)));
    let mut tx = store.begin().unwrap();
    let error = tx.edit(ino, |attr| attr.uid = 7).unwrap_err();
    assert!(error.is_failed_read(), "{error}");
    assert!(matches!(tx.commit(), Err(StoreError::Poisoned)));
    assert_eq!(store.latched(), None);
    let mut tx = store.begin().unwrap();
    tx.edit(other, |attr| attr.uid = 7).unwrap();
    tx.commit().unwrap();
    assert_eq!(store.get(other).unwrap().attr.uid, 7);
}

#[test]
fn looks_at_everything_go_on_after_inodes_that_cannot_be_read() {
    let rig = cooled();
    let (ino, other) = (look(&rig.store, "d4", "f9"), look(&rig.store, "d9", "f0"));
    let bad = block_of(&rig.store, ino);
    let mut tx = rig.store.begin().unwrap();
    tx.write_bytes(other, &[(0, &pattern(4096, 1))], SSD).unwrap();
    tx.commit().unwrap();
    let data = rig.store.map(other, FileBlock(0), 1).unwrap()[0];
    assert_eq!(data.tier, Tier::Ssd);
    rig.store.checkpoint().unwrap();
    let device = Arc::clone(rig.store.device(Tier::Ssd).unwrap());
    device.write(data.block.0 * BLOCK_BYTES, &[7; 4096]).unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let (store, script) = with_faulty_flash(&world);
    script.push(FaultRule::always(FaultOp::Read, Fault::Errno(EIO)).within(range_of(bad)));
    let found = store.check_data().unwrap();
    let named = |wanted: Ino| {
        found.iter().any(|finding| match finding {
            Finding::Image { ino, .. } | Finding::Data { ino, .. } => *ino == wanted,
            _ => false,
        })
    };
    assert!(named(ino) && named(other), "{found:?}");
    let mut seen = Vec::new();
    let walked = store.for_each_inode(&mut |ino, _| {
        seen.push(ino);
        true
    });
    assert!(walked.is_err());
    assert!(seen.contains(&other), "inodes behind the bad block are not shown");
    assert_eq!(store.latched(), None);
}

/// After a lost write, the block in a node's place is whole, and older.
#[test]
fn node_of_an_older_life_is_not_taken_for_the_present_one() {
    let rig = cooled();
    let dir = rig.store.dir_lookup(ROOT_INO, b"d3").unwrap().unwrap().key.ino;
    let top = crate::reader::dir_root(&rig.store.get(dir).unwrap()).unwrap();
    let (tier, number) = top.top().unwrap().block.home().unwrap();
    let device = Arc::clone(rig.store.device(tier).unwrap());
    make_older(&*device, number);
    let Rig { world, store } = rig;
    drop(store);
    let store = open(&world).unwrap();
    assert!(matches!(
        store.dir_lookup(dir, b"f1"),
        Err(StoreError::DataChecksum { tier: Tier::Ssd, .. })
    ));
    // Nor does it come back as if nothing were wrong with it.
    let mut tx = store.begin().unwrap();
    assert!(tx.dir_remove(dir, b"f1").is_err());
    drop(tx);
    assert!(store.dir_lookup(dir, b"f1").is_err());
    assert_eq!(store.latched(), None);
}

#[test]
fn number_of_the_newest_transaction_waits_for_no_slow_medium() {
    let rig = cooled();
    let (ino, other) = (look(&rig.store, "d9", "f9"), look(&rig.store, "d0", "f0"));
    let slow = block_of(&rig.store, ino);
    let Rig { world, store } = rig;
    drop(store);
    let (store, script) = with_faulty_flash(&world);
    store.get(other).unwrap();
    script.push(FaultRule::once(FaultOp::Read, Fault::Slow(Duration::from_secs(3))).within(range_of(slow)));
    std::thread::scope(|scope| {
        let pause = || std::thread::sleep(Duration::from_millis(300));
        scope.spawn(|| store.get(ino).unwrap());
        pause();
        scope.spawn(|| {
            let mut tx = store.begin().unwrap();
            tx.edit(other, |attr| attr.uid = 7).unwrap();
            tx.commit().unwrap();
        });
        pause();
        let begun = Instant::now();
        let newest = store.newest_tx();
        assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
        assert!(newest.0 > 0);
    });
    assert_eq!(store.get(other).unwrap().attr.uid, 7);
}
