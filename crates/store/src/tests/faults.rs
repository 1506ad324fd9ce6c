//! Devices that fail, and readers beside the writer.
use super::*;
use crate::StoreError;
use crate::check::Finding;
use crate::repair::RepairOptions;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_extent_tree::ExtentTree;
use varve_format::space::UnitRow;
use varve_format::state::{POOL_STATE_SIZE, PoolState};
use varve_format::{BLOCK_HEADER_SIZE, Block, BlockNo, Extent, ExtentFlags, FileBlock, seal_block};
use varve_media::Region;
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice, FaultyRegion};
use zerocopy::{FromBytes, IntoBytes};

const EIO: i32 = 5;

struct Faulty {
    rig: Rig,
    nvm: FaultScript,
    journal: FaultScript,
    ssd: FaultScript,
}

/// A pool with one file, opened over devices that fail on demand.
fn faulty() -> Faulty {
    let mut rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_bytes(file, &[(0, &pattern(50_000, 1))], SSD).unwrap();
    tx.commit().unwrap();
    let (nvm, journal, ssd) = (FaultScript::new(), FaultScript::new(), FaultScript::new());
    let devices = devices_of(&rig.world);
    let devices = Devices {
        nvm: Arc::new(FaultyRegion::new(devices.nvm, nvm.clone())),
        journal: Arc::new(FaultyRegion::new(devices.journal, journal.clone())),
        ssd: devices
            .ssd
            .map(|device| Arc::new(FaultyDevice::new(device, ssd.clone())) as _),
        hdd: devices.hdd,
        more: devices.more,
    };
    rig.store = Store::open(devices, OpenOptions::default()).unwrap().0;
    Faulty {
        rig,
        nvm,
        journal,
        ssd,
    }
}

#[test]
fn opening_reads_the_journal_in_large_pieces() {
    let rig = Rig::new();
    let mut devices = devices_of(&rig.world);
    let pieces = (devices.journal.len_bytes() >> 20) + 1;
    let script = FaultScript::new();
    // Counts them.
    script.push(FaultRule::always(FaultOp::Read, Fault::Slow(Duration::ZERO)));
    devices.journal = Arc::new(FaultyRegion::new(devices.journal, script.clone()));
    drop(rig);
    Store::open(devices, OpenOptions::default()).unwrap();
    let reads = script.fired();
    assert!(
        reads > 0 && reads < pieces + 16,
        "{reads} reads for {pieces} pieces"
    );
}

fn change(store: &Store) -> Result<()> {
    let file = store.dir_lookup(ROOT_INO, b"f")?.unwrap().key.ino;
    let mut tx = store.begin()?;
    tx.write_bytes(file, &[(100, &pattern(30_000, 2))], SSD)?;
    tx.write_bytes(file, &[(60_000, &pattern(30_000, 3))], NVM)?;
    make(&mut tx, ROOT_INO, "new", 0o100_644)?;
    tx.commit().map(drop)
}

#[test]
fn failed_persist_latches_the_pool_and_loses_nothing() {
    for (which, op) in [
        (0, FaultOp::Flush),
        (0, FaultOp::Fence),
        (0, FaultOp::Write),
        (1, FaultOp::Flush),
        (1, FaultOp::Write),
        (2, FaultOp::Flush),
        (2, FaultOp::Write),
    ] {
        let pool = faulty();
        let before = dump(&pool.rig.store);
        let script = [&pool.nvm, &pool.journal, &pool.ssd][which];
        script.push(FaultRule::once(op, Fault::Errno(EIO)));
        assert!(change(&pool.rig.store).is_err(), "{which} {op:?}");
        assert_eq!(script.fired(), 1);
        assert!(pool.rig.store.latched().is_some(), "{which} {op:?}");
        assert!(matches!(pool.rig.store.begin(), Err(StoreError::Latched(_))));
        assert_eq!(dump(&pool.rig.store), before, "{which} {op:?}");
        let world = pool.rig.world.clone();
        drop(pool);
        let store = open(&world).unwrap();
        assert_clean(&store);
        let now = dump(&store);
        // Only a record that was written but not acknowledged may count.
        if now != before {
            assert!(
                which == 1 && store.dir_lookup(ROOT_INO, b"new").unwrap().is_some(),
                "{which} {op:?}"
            );
        }
    }
}

#[test]
fn full_host_is_no_reason_to_latch() {
    let pool = faulty();
    let before = (dump(&pool.rig.store), pool.rig.store.space());
    pool.ssd.push(FaultRule::once(FaultOp::Write, Fault::Full));
    assert!(matches!(change(&pool.rig.store), Err(StoreError::Media(error)) if error.is_no_space()));
    assert_eq!(pool.rig.store.latched(), None);
    assert_eq!((dump(&pool.rig.store), pool.rig.store.space()), before);
    change(&pool.rig.store).unwrap();
    assert_clean(&pool.rig.store);
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn readers_see_one_state_while_blocks_are_reused() {
    let rig = Rig::new();
    const LEN: usize = 4096 * 40;
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_data(file, FileBlock(0), &[1; LEN], true, SSD).unwrap();
    tx.commit().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = || {
            let mut reads = 0;
            let mut bytes = vec![0; LEN];
            while reads < 20 || !stop.load(Ordering::Relaxed) {
                assert_eq!(rig.store.read(file, 0, &mut bytes).unwrap(), LEN);
                assert!(bytes.iter().all(|byte| *byte == bytes[0] && *byte != 0));
                reads += 1;
            }
        };
        let readers = [scope.spawn(reader), scope.spawn(reader)];
        // Also when an assertion below fails, or the readers would run for ever.
        let stopper = StopOnDrop(&stop);
        // Enough to go round all units several times.
        for round in 0..200_u32 {
            let mut tx = rig.store.begin().unwrap();
            let target = if round % 8 == 7 { NVM } else { SSD };
            let data = vec![(round % 250) as u8 + 1; LEN];
            tx.write_data(file, FileBlock(0), &data, true, target).unwrap();
            tx.commit().unwrap();
        }
        drop(stopper);
        for reader in readers {
            reader.join().unwrap();
        }
    });
    assert_clean(&rig.store);
    rig.reopen();
}

/// Changes the pool state of a pool that nobody has open, with a right checksum.
pub(super) fn spoil_state(world: &SimWorld, at: u64, spoil: fn(&mut PoolState)) {
    let nvm = world.region("nvm").unwrap();
    let mut block: Box<Block> = Box::new([0; 4096]);
    nvm.read(at, &mut block[..]).unwrap();
    let body = BLOCK_HEADER_SIZE..BLOCK_HEADER_SIZE + POOL_STATE_SIZE;
    let mut state = PoolState::read_from_bytes(&block[body.clone()]).unwrap();
    spoil(&mut state);
    block[body].copy_from_slice(state.as_bytes());
    seal_block(&mut block);
    nvm.write(at, &block[..]).unwrap();
}

/// A pool with a file; what it holds, and where its state is.
pub(super) fn pool_with_a_file() -> (SimWorld, BTreeMap<String, String>, u64) {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_bytes(file, &[(0, &pattern(50_000, 1))], SSD).unwrap();
    tx.commit().unwrap();
    rig.store.checkpoint().unwrap();
    let before = dump(&rig.store);
    let at = rig.store.snapshot().reader().state_block().offset_bytes();
    let Rig { world, store } = rig;
    drop(store);
    (world, before, at)
}

/// Numbers that all counting rests on: with a right checksum around them, looks at everything would never
/// end, or find nothing.
#[test]
fn pool_state_that_cannot_be_is_refused_and_made_anew() {
    type Spoil = fn(&mut PoolState);
    let spoils: [(&str, Spoil); 4] = [
        ("inode file", |state| state.inode_blocks = (1 << 60).into()),
        ("in use", |state| state.inodes_used = u64::MAX.into()),
        ("open unit", |state| state.open_unit[1] = 1000.into()),
        ("used up", |state| state.next_session = u64::MAX.into()),
    ];
    for (what, spoil) in spoils {
        let (world, before, at) = pool_with_a_file();
        spoil_state(&world, at, spoil);
        let error = open(&world).err().expect("it is opened").to_string();
        assert!(error.contains(what), "{error}");
        let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
        assert_eq!(report.left, [], "{what}: {report:?}");
        let store = open(&world).unwrap();
        assert_eq!(dump(&store), before, "{what}");
        assert_clean(&store);
    }
}

/// As a pool is for a moment while it is made, and never again.
#[test]
fn pool_state_without_inodes_is_made_anew_from_what_is_there() {
    let (world, before, at) = pool_with_a_file();
    spoil_state(&world, at, |state| {
        (state.inode_blocks, state.inodes_used, state.orphans) = (0.into(), 0.into(), 0.into());
    });
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, [], "{report:?}");
    let store = open(&world).unwrap();
    assert_eq!(dump(&store), before);
    assert_clean(&store);
}

/// It may say that it has billions of blocks: one finding for each filled the memory.
#[test]
fn extent_beyond_its_tier_is_named_once_and_dropped_by_a_repair() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_bytes(file, &[(0, &pattern(50_000, 1))], NVM).unwrap();
    let mut inode = tx.get(file).unwrap();
    let Content::File(root) = &mut inode.content else {
        panic!("not a file")
    };
    let extent = Extent {
        file_block: FileBlock(100),
        len: 1 << 29,
        tier: Tier::Ssd,
        block: BlockNo(SSD_UNIT),
        flags: ExtentFlags::empty(),
    };
    let range = extent.file_block..extent.end();
    ExtentTree::of(file)
        .replace(&mut tx.core, root, range, &[extent])
        .unwrap();
    tx.core.put(&inode).unwrap();
    tx.commit().unwrap();
    let beyond = |finding: &&Finding| matches!(finding, Finding::OutOfBounds { owner, .. } if *owner == file);
    let found = rig.store.check().unwrap();
    // In each unit of the tier its footers, and what is behind the last.
    let most = (8 << 20) / 4096 / SSD_UNIT * 2 + 1;
    let count = found.iter().filter(beyond).count() as u64;
    assert!((1..=most).contains(&count), "{count}");
    assert!(rig.store.check_data().unwrap().len() <= (8 << 20) / 4096 + 1);
    let Rig { world, store } = rig;
    drop(store);
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, [], "{report:?}");
    let store = open(&world).unwrap();
    let mut bytes = vec![0; 50_000];
    assert_eq!(store.read(file, 0, &mut bytes).unwrap(), bytes.len());
    assert!(bytes == pattern(50_000, 1));
    assert_clean(&store);
}

/// As one that a damaged pool, or a repair that was cut off, may have: new data beside what lies there would
/// leave that without its checksums, which the footer still has.
#[test]
fn unit_in_use_whose_row_says_that_it_is_empty_is_not_opened_until_it_is_repaired() {
    let Rig { world, store } = Rig::new();
    leave_holes(&store, |tx, _| tx.commit().map(drop)).unwrap();
    let before = dump(&store);
    let units = store.layout.blocks(Tier::Ssd) / SSD_UNIT;
    let open_unit = store.snapshot().reader().open_unit(Tier::Ssd, 0).unwrap();
    for unit in (0..units).filter(|unit| Some(*unit) != open_unit) {
        let mut tx = store.begin().unwrap();
        tx.core
            .patch(
                store.layout.unit_row(Tier::Ssd, unit),
                UnitRow::default().as_bytes(),
            )
            .unwrap();
        tx.commit().unwrap();
    }
    let mut tx = store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "new", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    let only = DataTarget::only(Tier::Ssd).with_reserve();
    let error = (0..units * SSD_UNIT).find_map(|at| {
        let mut tx = store.begin().unwrap();
        match tx.write_data(file, FileBlock(at), &[7; 4096], true, only) {
            Ok(()) => tx.commit().map(drop).err(),
            error => error.err(),
        }
    });
    assert!(
        matches!(error, Some(StoreError::Footer { tier: Tier::Ssd, .. })),
        "{error:?}"
    );
    let mut tx = store.begin().unwrap();
    unlink(&mut tx, ROOT_INO, "new").unwrap();
    tx.commit().unwrap();
    store.checkpoint().unwrap();
    drop(store);
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(
        (report.losses, report.left),
        (vec![], vec![]),
        "{:?}",
        report.mended
    );
    let store = open(&world).unwrap();
    let after = dump(&store);
    let file = |dump: &BTreeMap<String, String>| dump.get("/keep/").cloned();
    assert!(
        file(&before).is_some() && file(&before) == file(&after),
        "{after:?}"
    );
    assert_clean(&store);
}
