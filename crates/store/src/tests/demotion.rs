//! Metadata on slower tiers: demoted blocks are read there, promoted to be changed, and reported as damaged
//! if their content is not the one written.
use super::*;
use crate::StoreError;
use crate::repair::RepairOptions;
use std::sync::Arc;
use varve_format::superblock::{SUPERBLOCK_BLOCKS, SUPERBLOCK_SIZE, Superblock};
use varve_format::{BLOCK_BYTES, BlockNo};
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_media::{BlockDevice, Region};
use zerocopy::IntoBytes;

const EIO: i32 = 5;

/// Files, names, attributes and links of all sizes.
pub(super) fn fill(store: &Store) {
    let mut tx = store.begin().unwrap();
    let dir = make(&mut tx, ROOT_INO, "dir", 0o040_755).unwrap().ino;
    for i in 0..300 {
        let file = make(&mut tx, dir, &format!("file number {i}"), 0o100_644)
            .unwrap()
            .ino;
        if i % 10 == 0 {
            tx.xattr_set(file, b"user.long", &pattern(9000, i)).unwrap();
            tx.xattr_set(file, b"user.short", &pattern(40, i)).unwrap();
            make_link(&mut tx, dir, &format!("link {i}"), 0o120_777, &[b'l'; 2000]).unwrap();
        }
    }
    tx.commit().unwrap();
    let mut tx = store.begin().unwrap();
    let scattered = make(&mut tx, ROOT_INO, "scattered", 0o100_644).unwrap().ino;
    let pieces: Vec<_> = (0..400_u64)
        .map(|i| (i * 2 * BLOCK_BYTES, pattern(4096, i)))
        .collect();
    let pieces: Vec<_> = pieces.iter().map(|(at, bytes)| (*at, bytes.as_slice())).collect();
    tx.write_bytes(scattered, &pieces, SSD).unwrap();
    tx.commit().unwrap();
}

/// Blocks of the inode file on each tier.
pub(super) fn inode_blocks(store: &Store) -> [usize; 3] {
    let snapshot = store.snapshot();
    let reader = snapshot.reader();
    let mut on = [0; 3];
    for index in 0..reader.state().unwrap().inode_blocks.get() {
        let (tier, _) = reader.inode_block(index).unwrap().unwrap().home().unwrap();
        on[tier as usize] += 1;
    }
    on
}

fn changed(store: &Store, round: u64) {
    let dir = store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    let scattered = store.dir_lookup(ROOT_INO, b"scattered").unwrap().unwrap().key.ino;
    let mut tx = store.begin_with_room().unwrap();
    let name = format!("file number {}", round * 7);
    let file = tx.dir_lookup(dir, name.as_bytes()).unwrap().unwrap().key.ino;
    tx.write_bytes(file, &[(0, &pattern(6000, round))], NVM).unwrap();
    tx.xattr_set(file, b"user.long", &pattern(9001, round)).unwrap();
    tx.xattr_remove(file, b"user.short").unwrap_or_default();
    unlink(&mut tx, dir, &format!("file number {}", round * 7 + 1)).unwrap();
    make(&mut tx, dir, &format!("new {round}"), 0o100_644).unwrap();
    tx.write_bytes(
        scattered,
        &[(round * 9 * BLOCK_BYTES, &pattern(3 * 4096, round))],
        SSD,
    )
    .unwrap();
    tx.commit().unwrap();
}

#[test]
fn metadata_that_went_is_read_where_it_is_and_comes_back_when_it_changes() {
    let mut rig = Rig::new();
    fill(&rig.store);
    let (before, free) = (dump(&rig.store), rig.store.space().tiers[0].free);
    let away = rig.store.demote(u64::MAX).unwrap();
    assert!(away > 100, "{away}");
    assert_eq!(inode_blocks(&rig.store)[0], 0);
    assert_eq!(dump(&rig.store), before);
    assert_clean(&rig.store);
    rig.store.checkpoint().unwrap();
    assert!(rig.store.space().tiers[0].free > free + away - 10);
    assert_eq!(rig.store.demote(u64::MAX).unwrap(), 0, "there is nothing left");
    rig = rig.reopen();
    assert!(rig.store.demotion_stats().reads > 100);
    for round in 0..30 {
        changed(&rig.store, round);
        assert_eq!(rig.store.check().unwrap(), []);
        if round % 3 == 0 {
            let before = dump(&rig.store);
            rig.store.demote(20 * round).unwrap();
            assert_eq!(dump(&rig.store), before);
            rig = rig.reopen();
        }
    }
    assert!(rig.store.demotion_stats().back > 0);
    // All that is left goes from where it is.
    rig.store.demote(u64::MAX).unwrap();
    let dir = rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    for item in rig.store.dir_iter(dir, 0, usize::MAX).unwrap() {
        let mut tx = rig.store.begin().unwrap();
        let name = String::from_utf8(item.name).unwrap();
        assert_eq!(unlink(&mut tx, dir, &name).unwrap(), Progress::Done);
        tx.commit().unwrap();
    }
    let mut tx = rig.store.begin().unwrap();
    assert_eq!(unlink(&mut tx, ROOT_INO, "scattered").unwrap(), Progress::Done);
    assert_eq!(unlink(&mut tx, ROOT_INO, "dir").unwrap(), Progress::Done);
    tx.commit().unwrap();
    rig = rig.reopen();
    rig.store.demote(u64::MAX).unwrap();
    let used = |tier: Tier| {
        let stats = rig.store.space().tiers[tier as usize];
        stats.total - stats.free - stats.pending
    };
    // Numbers that are free now lie there yet.
    let blocks = inode_blocks(&rig.store).iter().sum::<usize>() as u64;
    assert_eq!(used(Tier::Ssd) + used(Tier::Hdd), blocks);
}

#[test]
fn what_is_used_stays_before_what_is_not() {
    let rig = Rig::new();
    fill(&rig.store);
    let dir = rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    // Once round: whatever was used by making it.
    let all = rig.store.snapshot().reader().state().unwrap().inode_blocks.get();
    assert!(all > 10);
    rig.store.demote(all / 2).unwrap();
    rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap();
    rig.store.get(dir).unwrap();
    let block = || {
        let snapshot = rig.store.snapshot();
        snapshot.reader().inode_block(ROOT_INO.0 / 16).unwrap().unwrap()
    };
    if !block().is_cold() {
        rig.store.demote(1).unwrap();
        assert!(!block().is_cold(), "the root was used a moment ago");
    }
}

/// More files than the NVM alone could hold.
#[test]
fn pool_holds_more_metadata_than_its_nvm() {
    let rig = Rig::sized(SimMedium::Dax, 512 << 10, 4 << 20);
    const DIRS: u64 = 40;
    const FILES: u64 = 600;
    let nvm = rig.store.space().tiers[0].total;
    let mut keys = Vec::new();
    for d in 0..DIRS {
        let mut tx = rig.store.begin_with_room().unwrap();
        let dir = make(&mut tx, ROOT_INO, &format!("d{d}"), 0o040_755).unwrap().ino;
        tx.commit().unwrap();
        for part in 0..FILES / 30 {
            let mut tx = rig.store.begin_with_room().unwrap();
            for i in part * 30..(part + 1) * 30 {
                let name = format!("a file with a name of some length, number {i}");
                keys.push((dir, name.clone(), make(&mut tx, dir, &name, 0o100_644).unwrap()));
            }
            tx.commit().unwrap();
        }
    }
    let stats = rig.store.demotion_stats();
    assert!(stats.away > nvm, "{stats:?} of {nvm}");
    assert!(rig.store.space().tiers[0].free > 0);
    let rig = rig.reopen();
    for (dir, name, key) in &keys {
        let found = rig.store.dir_lookup(*dir, name.as_bytes()).unwrap().unwrap();
        assert_eq!(found.key, *key);
        assert_eq!(rig.store.get_key(*key).unwrap().attr.nlink, 1);
    }
    for some in keys.chunks(30) {
        let mut tx = rig.store.begin_with_room().unwrap();
        for (dir, name, _) in some {
            assert_eq!(unlink(&mut tx, *dir, name).unwrap(), Progress::Done);
        }
        tx.commit().unwrap();
    }
    assert_clean(&rig.store);
    rig.reopen();
}

#[test]
fn metadata_goes_to_disk_when_flash_is_full_and_nowhere_when_both_are() {
    let rig = Rig::new();
    fill(&rig.store);
    let put = |name: &str, tier| {
        let mut at = 0;
        loop {
            let mut tx = rig.store.begin().unwrap();
            let file = match tx.dir_lookup(ROOT_INO, name.as_bytes()).unwrap() {
                Some(item) => item.key.ino,
                None => make(&mut tx, ROOT_INO, name, 0o100_644).unwrap().ino,
            };
            let data = pattern(4096 * 16, at);
            match tx.write_data(file, FileBlock(at), &data, true, DataTarget::only(tier)) {
                Ok(()) => tx.commit().map(drop).unwrap(),
                Err(StoreError::NoSpace { .. }) => return,
                Err(error) => panic!("{error}"),
            }
            at += 16;
        }
    };
    put("on flash", Tier::Ssd);
    let before = dump(&rig.store);
    assert!(rig.store.demote(u64::MAX).unwrap() > 100);
    let on = inode_blocks(&rig.store);
    assert!(on[Tier::Hdd as usize] > on[Tier::Ssd as usize], "{on:?}");
    assert_eq!(dump(&rig.store), before);
    assert_clean(&rig.store);
    put("on disk", Tier::Hdd);
    let before = dump(&rig.store);
    let away = rig.store.demotion_stats().away;
    changed(&rig.store, 1);
    rig.store.demote(u64::MAX).unwrap();
    rig.store.make_room_for_metadata().unwrap();
    assert!(
        rig.store.demotion_stats().away - away < 64,
        "it went where there is no space"
    );
    assert_ne!(dump(&rig.store), before);
    assert_clean(&rig.store);
    rig.reopen();
}

#[test]
fn metadata_that_cannot_be_read_is_an_error_hides_nothing_and_latches_nothing() {
    let rig = Rig::new();
    fill(&rig.store);
    rig.store.demote(u64::MAX).unwrap();
    rig.store.checkpoint().unwrap();
    let before = dump(&rig.store);
    let Rig { world, store } = rig;
    drop(store);
    let script = FaultScript::new();
    let devices = devices_of(&world);
    let faulty = devices
        .ssd
        .clone()
        .map(|device| Arc::new(FaultyDevice::new(device, script.clone())) as _);
    let devices = Devices {
        ssd: faulty,
        ..devices
    };
    let store = Store::open(devices, OpenOptions::default()).unwrap().0;
    script.push(FaultRule::once(FaultOp::Read, Fault::Errno(EIO)));
    assert!(matches!(store.get(ROOT_INO), Err(error) if error.is_failed_read()));
    script.push(FaultRule::once(FaultOp::Read, Fault::Errno(EIO)));
    assert!(store.dir_lookup(ROOT_INO, b"dir").is_err());
    assert_eq!(store.latched(), None);
    assert_eq!(dump(&store), before);
    // A failed write of a block to be demoted stops the pool, as for all writes.
    changed(&store, 0);
    let before = dump(&store);
    script.push(FaultRule::once(FaultOp::Write, Fault::Errno(EIO)));
    assert!(store.demote(u64::MAX).is_err());
    assert!(store.latched().is_some());
    assert_eq!(dump(&store), before);
    drop(store);
    let store = open(&world).unwrap();
    assert_eq!(dump(&store), before);
    assert_clean(&store);
}

fn nvm(world: &SimWorld) -> Arc<dyn Region> {
    world.region("nvm").unwrap()
}

#[test]
fn pool_of_the_first_format_is_served_and_never_cooled() {
    let rig = Rig::new();
    let Rig { world, store } = rig;
    drop(store);
    for block in SUPERBLOCK_BLOCKS {
        let mut bytes = [0; SUPERBLOCK_SIZE];
        nvm(&world).read(block * BLOCK_BYTES, &mut bytes).unwrap();
        let mut sb = Superblock::parse(&bytes).unwrap();
        sb.version.set(1);
        nvm(&world)
            .write(block * BLOCK_BYTES, sb.sealed().as_bytes())
            .unwrap();
    }
    let store = open(&world).unwrap();
    fill(&store);
    assert_eq!(store.demote(u64::MAX).unwrap(), 0);
    assert_eq!(store.demote_ahead().unwrap(), 0);
    assert_eq!(store.room_for_ops(), usize::MAX);
    changed(&store, 3);
    assert_eq!(store.demotion_stats(), crate::DemotionStats::default());
    assert_clean(&store);
}

/// Where the block of the inode file that holds `ino` lies.
fn place_of(store: &Store, ino: Ino) -> (Arc<dyn BlockDevice>, u64) {
    let block = store
        .snapshot()
        .reader()
        .inode_block(ino.0 / 16)
        .unwrap()
        .unwrap();
    let (tier, number) = block.home().unwrap();
    (Arc::clone(store.device(tier).unwrap()), number * BLOCK_BYTES)
}

/// A filled pool with its metadata on flash, and one of its files.
fn cooled() -> (Rig, Ino) {
    let rig = Rig::new();
    fill(&rig.store);
    let look = |dir, name: &[u8]| rig.store.dir_lookup(dir, name).unwrap().unwrap().key.ino;
    let ino = look(look(ROOT_INO, b"dir"), b"file number 200");
    rig.store.demote(u64::MAX).unwrap();
    rig.store.checkpoint().unwrap();
    (rig, ino)
}

#[test]
fn inodes_whose_block_was_lost_on_flash_are_damaged_and_not_gone() {
    let (rig, ino) = cooled();
    let (device, at) = place_of(&rig.store, ino);
    device.write(at, &[0; 4096]).unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let store = open(&world).unwrap();
    assert!(matches!(store.get(ino), Err(StoreError::DataChecksum { .. })));
    assert_ne!(store.check().unwrap(), []);
    drop(store);
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, []);
    let lost = |ino: u64| report.losses.iter().any(|loss| loss.ino == Ino(ino));
    assert!(
        (ino.0 / 16 * 16..ino.0 / 16 * 16 + 16).all(lost),
        "{:?}",
        report.losses
    );
    let store = open(&world).unwrap();
    assert!(matches!(store.get(ino), Err(StoreError::NoInode(_))));
    let dir = store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    assert!(store.dir_lookup(dir, b"file number 200").unwrap().is_none());
    assert_clean(&store);
}

#[test]
fn images_that_are_whole_are_saved_when_their_block_on_flash_is_damaged() {
    let rig = Rig::new();
    fill(&rig.store);
    let dir = rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    let item = rig.store.dir_lookup(dir, b"file number 200").unwrap().unwrap();
    let ino = item.key.ino;
    rig.store.demote(u64::MAX).unwrap();
    rig.store.checkpoint().unwrap();
    let (device, at) = place_of(&rig.store, ino);
    let mut bytes = vec![0; 4096];
    device.read(at, &mut bytes).unwrap();
    bytes[(ino.0 % 16) as usize * 256 + 50] ^= 1;
    device.write(at, &bytes).unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, []);
    let store = open(&world).unwrap();
    assert!(store.dir_lookup(dir, b"file number 200").unwrap().is_none());
    let others = (ino.0 / 16 * 16..ino.0 / 16 * 16 + 16).filter(|other| *other != ino.0);
    for other in others {
        assert!(store.get(Ino(other)).is_ok(), "{other}: {:?}", report.losses);
    }
    assert_clean(&store);
}

#[test]
fn repair_finds_inodes_on_flash_again_and_takes_no_files_data_for_them() {
    let (rig, ino) = cooled();
    let (device, at) = place_of(&rig.store, ino);
    // A program writes what looks like the block, with other rights, into its file.
    let mut forged = vec![0; 4096];
    device.read(at, &mut forged).unwrap();
    for image in 0..16_u64 {
        let number = Ino(ino.0 / 16 * 16 + image);
        let bytes = &mut forged[image as usize * 256..][..256];
        if let Ok(crate::InodeSlot::Used(mut inode)) = crate::InodeSlot::decode(bytes, number) {
            inode.attr.uid = 666;
            bytes.copy_from_slice(&crate::InodeSlot::Used(inode).encode(number).unwrap());
        }
    }
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "forged", 0o100_644).unwrap().ino;
    for at in 0..8 {
        let target = if at % 2 == 0 { SSD } else { NVM };
        tx.write_data(file, FileBlock(at), &forged, true, target).unwrap();
    }
    tx.commit().unwrap();
    rig.store.checkpoint().unwrap();
    let before = dump(&rig.store);
    let state = rig.store.snapshot().reader().state_block();
    let Rig { world, store } = rig;
    drop(store);
    nvm(&world).write(state.0 * BLOCK_BYTES + 40, &[0xff; 3]).unwrap();
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, [], "{:?}", report.mended);
    let store = open(&world).unwrap();
    assert_clean(&store);
    assert_eq!(dump(&store), before);
    assert!(inode_blocks(&store)[1] > 0);
}

/// A block whose old content is whole lies where a newer one was written and lost.
#[test]
fn node_of_an_older_life_is_found_by_its_checksum() {
    let rig = Rig::new();
    fill(&rig.store);
    let dir = rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    rig.store.demote(u64::MAX).unwrap();
    let top = |store: &Store| {
        let root = crate::reader::dir_root(&store.get(dir).unwrap()).unwrap();
        root.top().unwrap().block
    };
    let (tier, number) = top(&rig.store).home().unwrap();
    let device = Arc::clone(rig.store.device(tier).unwrap());
    let before = dump(&rig.store);
    make_older(&*device, number);
    rig.store.checkpoint().unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let store = open(&world).unwrap();
    let found = store.check().unwrap();
    assert!(
        matches!(
            &found[..],
            [crate::check::Finding::Tree { block: Some(block), .. }] if *block == BlockNo::on(tier, number),
        ),
        "{found:?}"
    );
    drop(store);
    let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, []);
    let store = open(&world).unwrap();
    assert_eq!(dump(&store), before);
    assert_clean(&store);
}

/// An image that comes back while it is put into the list of orphans, or taken out, moves the inode file's
/// root: which is not to be lost.
#[test]
fn list_of_orphans_is_changed_while_its_inodes_come_back() {
    let mut rig = Rig::new();
    fill(&rig.store);
    let dir = rig.store.dir_lookup(ROOT_INO, b"dir").unwrap().unwrap().key.ino;
    for i in [7, 100, 200, 290] {
        rig.store.demote(u64::MAX).unwrap();
        let mut tx = rig.store.begin().unwrap();
        let item = tx.dir_remove(dir, format!("file number {i}").as_bytes()).unwrap();
        tx.edit(item.key.ino, |attr| attr.nlink = 0).unwrap();
        tx.commit().unwrap();
        assert_eq!(rig.store.check().unwrap(), []);
    }
    for key in rig.store.orphans().unwrap().into_iter().skip(1).take(2) {
        rig.store.demote(u64::MAX).unwrap();
        let mut tx = rig.store.begin().unwrap();
        assert_eq!(tx.continue_free(key.ino, 100).unwrap(), Progress::Done);
        tx.commit().unwrap();
        assert_eq!(rig.store.check().unwrap(), []);
    }
    assert_eq!(rig.store.orphans().unwrap().len(), 2);
    rig = rig.reopen();
    assert_clean(&rig.store);
}

/// A daemon that was started anew does not know where free numbers are. It must not read half of the inode
/// file from a disk for one of them.
#[test]
fn few_blocks_are_read_from_slower_tiers_for_free_numbers() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let dir = make(&mut tx, ROOT_INO, "dir", 0o040_755).unwrap().ino;
    for i in 0..3000 {
        make(&mut tx, dir, &format!("{i}"), 0o100_644).unwrap();
        if i % 100 == 99 {
            tx.commit().unwrap();
            tx = rig.store.begin().unwrap();
        }
    }
    // Most numbers of each block are free, of none all.
    for i in (0..3000).filter(|i| i % 3 > 0) {
        unlink(&mut tx, dir, &format!("{i}")).unwrap();
        if i % 100 == 98 {
            tx.commit().unwrap();
            tx = rig.store.begin().unwrap();
        }
    }
    tx.commit().unwrap();
    rig.store.demote(u64::MAX).unwrap();
    let rig = rig.reopen();
    let Rig { world, store } = rig;
    drop(store);
    let store = open(&world).unwrap();
    let blocks = store.snapshot().reader().state().unwrap().inode_blocks.get();
    assert!(blocks > 150, "{blocks}");
    let mut tx = store.begin().unwrap();
    assert!(!tx.alloc_inodes(dir, 16).unwrap().is_empty());
    tx.commit().unwrap();
    let reads = store.demotion_stats().reads;
    assert!(reads < 20, "{reads} blocks were read for one row of numbers");
    let after = store.snapshot().reader().state().unwrap().inode_blocks.get();
    assert_eq!(after, blocks, "the file grew although most of it is free");
}
