//! Metadata on slower tiers that cannot be read: which log waits for it, and who does not.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, START_NS, World, hello};
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, FileBlock, FileKind, InodeAttr, InodeKey, LogOp, LogSeq, Tier};
use varve_ipc::{ManualClock, Peer, SessionPage};
use varve_kernelfs::{Config, KernelFs, Parts};
use varve_media::BlockDevice;
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_store::repair::RepairOptions;
use varve_store::{DataTarget, Devices, InodeSlot, OpenOptions, Store, StoreError};

const EIO: i32 = 5;
/// Inodes of one block of the inode file, and their bytes.
const INODES: u64 = 16;

/// A pool with 600 files, all of their metadata on flash.
fn world() -> (World, Vec<InodeKey>) {
    let world = World::with_tiers(Config::default(), &[("ssd", 24 << 20)]);
    let store = world.kernel.store();
    let mut tx = store.begin().unwrap();
    let keys: Vec<_> = (0..600)
        .map(|i| {
            let key = tx.alloc_inodes(ROOT.ino, 1).unwrap()[0];
            let attr = InodeAttr {
                nlink: 1,
                parent: ROOT.ino,
                ..InodeAttr::new(key, 0o100_644, START_NS)
            };
            tx.create(&attr, b"").unwrap();
            let name = name(i);
            tx.dir_insert(ROOT.ino, name.as_bytes(), key, FileKind::Regular)
                .unwrap();
            key
        })
        .collect();
    tx.commit().unwrap();
    assert!(store.demote(u64::MAX).unwrap() > 10);
    store.checkpoint().unwrap();
    (world, keys)
}

fn name(number: usize) -> String {
    format!("file {number}")
}

/// A daemon on flash that fails as the script says, with next to no cache.
fn serve(world: &World, script: &FaultScript) -> (Arc<KernelFs>, Arc<ManualClock>) {
    let devices = common::devices(&world.sim);
    let ssd = devices
        .ssd
        .clone()
        .map(|device| Arc::new(FaultyDevice::new(device, script.clone())) as _);
    let devices = Devices { ssd, ..devices };
    let options = OpenOptions {
        cache_blocks: 0,
        ..OpenOptions::default()
    };
    let (store, _) = Store::open(devices, options).unwrap();
    let clock = Arc::new(ManualClock::new(START_NS + 2_000_000_000));
    let parts = Parts::new(
        store,
        Arc::clone(&world.logs) as _,
        Config::default(),
        Arc::clone(&clock) as _,
    );
    (KernelFs::open(parts).unwrap(), clock)
}

/// Where on flash the image of an inode lies.
fn range_of(world: &World, key: InodeKey) -> std::ops::Range<u64> {
    let flash = world.sim.block("ssd").unwrap();
    let image = (key.ino.0 % INODES * 256) as usize;
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for at in (0..24 << 20).step_by(BLOCK_BYTES as usize) {
        BlockDevice::read(&*flash, at, &mut bytes).unwrap();
        let decoded = InodeSlot::decode(&bytes[image..image + 256], key.ino);
        if matches!(decoded, Ok(InodeSlot::Used(inode)) if inode.attr.key == key) {
            return at..at + BLOCK_BYTES;
        }
    }
    panic!("inode {key} is not on flash");
}

fn write(client: &mut Client, key: InodeKey) -> LogSeq {
    client.log_op(&LogOp::Write {
        key,
        offset: 0,
        data: b"something",
    })
}

fn content(kernel: &KernelFs, key: InodeKey) -> Vec<u8> {
    let mut bytes = vec![0; 9];
    let len = kernel.store().read(key.ino, 0, &mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn log_that_needs_what_cannot_be_read_waits_and_no_other_does() {
    let (world, keys) = world();
    let script = FaultScript::new();
    let (kernel, _) = serve(&world, &script);
    let (bad, good, other) = (100, 350, 599);
    let open = || Client::open(&kernel, Peer::this_process(), hello()).unwrap();
    let (mut one, mut two) = (open(), open());
    for client in [&one, &two] {
        client.read_lease(ROOT);
    }
    for number in [bad, good] {
        one.lookup(name(number).as_bytes()).unwrap();
        one.write_lease(keys[number]);
    }
    two.lookup(name(other).as_bytes()).unwrap();
    two.write_lease(keys[other]);
    let before = write(&mut one, keys[good]);
    write(&mut one, keys[bad]);
    write(&mut one, keys[good]);
    let others = write(&mut two, keys[other]);
    // What the daemon has read of it leaves its cache.
    kernel.store().for_each_inode(&mut |_, _| true).unwrap();
    let rule = FaultRule::always(FaultOp::Read, Fault::Errno(EIO));
    script.push(rule.within(range_of(&world, keys[bad])));
    for _ in 0..3 {
        let error = kernel.digest_all().unwrap_err();
        assert!(error.is_failed_read(), "{error}");
        assert_eq!(kernel.store().latched(), None);
        assert_eq!(one.page.digested(), before);
        assert_eq!(two.page.digested(), others);
        kernel.tick();
    }
    let others = write(&mut two, keys[other]);
    kernel.digest_all().unwrap_err();
    assert_eq!(two.page.digested(), others);
    // The next daemon serves the pool, too, and digests the log when it can.
    drop((one, two, kernel));
    let (kernel, clock) = serve(&world, &script);
    assert_eq!(kernel.store().latched(), None);
    assert_eq!(content(&kernel, keys[other]), b"something");
    let jobs = format!("{:?}", kernel.status().jobs);
    assert!(jobs.contains("digesting 1 logs of ended sessions"), "{jobs}");
    script.clear();
    for _ in 0..20 {
        clock.advance_ms(200);
        kernel.tick();
    }
    assert_eq!(content(&kernel, keys[bad]), b"something");
    assert_eq!(kernel.store().check().unwrap(), []);
}

/// The checksums of a unit are what all of its metadata rests on. A repair makes them again, and nothing that
/// was acknowledged is missing.
#[test]
fn log_waits_for_the_repair_of_a_footer_that_its_metadata_rests_on() {
    let (world, keys) = world();
    let flash = world.sim.block("ssd").unwrap();
    let unit_blocks = world.kernel.store().space().tiers[1].unit_blocks;
    let mut tx = world.kernel.store().begin().unwrap();
    let data = vec![1; ((unit_blocks + 8) * BLOCK_BYTES) as usize];
    tx.write_data(
        keys[0].ino,
        FileBlock(0),
        &data,
        true,
        DataTarget::only(Tier::Ssd),
    )
    .unwrap();
    tx.commit().unwrap();
    world.kernel.store().checkpoint().unwrap();
    let script = FaultScript::new();
    let (kernel, _) = serve(&world, &script);
    let mut client = Client::open(&kernel, Peer::this_process(), hello()).unwrap();
    client.read_lease(ROOT);
    client.lookup(name(350).as_bytes()).unwrap();
    client.write_lease(keys[350]);
    write(&mut client, keys[350]);
    drop(kernel);
    let footers = (unit_blocks - 2) * BLOCK_BYTES..unit_blocks * BLOCK_BYTES;
    assert!(range_of(&world, keys[350]).end <= footers.start);
    BlockDevice::write(&*flash, footers.start, &vec![7; 2 * BLOCK_BYTES as usize]).unwrap();
    let (kernel, _) = serve(&world, &script);
    let got = kernel.store().get(keys[350].ino);
    assert!(matches!(got, Err(StoreError::Footer { .. })), "{got:?}");
    let jobs = format!("{:?}", kernel.status().jobs);
    assert!(jobs.contains("digesting 1 logs of ended sessions"), "{jobs}");
    drop(kernel);
    let report = Store::repair(&common::devices(&world.sim), RepairOptions::default()).unwrap();
    assert_eq!(report.left, [], "{:?}", report.mended);
    let (kernel, _) = serve(&world, &script);
    assert_eq!(content(&kernel, keys[350]), b"something");
    assert_eq!(kernel.store().check().unwrap(), []);
}
