//! Reads of files whose blocks lie in several places: their bytes, and how often the device is asked.
use super::shared::{content, new_file, share};
use super::*;
use crate::StoreError;
use std::sync::Arc;
use varve_media::emulated::{DiskModel, EmulatedDisk};

/// Blocks of each file.
const BLOCKS: u64 = 64;

/// Three files on the HDD: of the second and third, every second run of four blocks is shared with the first.
fn alike(store: &Store) -> [Ino; 3] {
    let files = ["a", "b", "c"].map(|name| new_file(store, name).unwrap());
    for (seed, ino) in (1..).zip(files) {
        let mut tx = store.begin().unwrap();
        let body = pattern((BLOCKS * BLOCK_BYTES) as usize, seed);
        tx.write_data(ino, FileBlock(0), &body, true, HDD).unwrap();
        tx.commit().unwrap();
    }
    for ino in &files[1..] {
        for at in (0..BLOCKS).step_by(8) {
            let range = ShareRange {
                from: files[0],
                from_block: FileBlock(at),
                to: *ino,
                to_block: FileBlock(at),
                blocks: 4,
                size_bytes: BLOCKS * BLOCK_BYTES,
            };
            share(store, range).unwrap();
        }
    }
    files
}

/// The store again, with a disk that counts, and memory for so many shared blocks.
pub(super) fn counted(rig: Rig, shared_blocks: usize) -> (Store, Arc<EmulatedDisk>) {
    drop(rig.store);
    let devices = devices_of(&rig.world);
    let disk = Arc::new(EmulatedDisk::new(devices.hdd.clone().unwrap(), DiskModel::NONE));
    let devices = Devices {
        hdd: Some(Arc::clone(&disk) as _),
        ..devices
    };
    let options = OpenOptions {
        shared_blocks,
        ..OpenOptions::default()
    };
    (Store::open(devices, options).unwrap().0, disk)
}

#[test]
fn file_in_many_places_is_read_in_few_transfers_and_what_is_shared_once() {
    let rig = Rig::new();
    let files = alike(&rig.store);
    let bodies = files.map(|ino| content(&rig.store, ino));
    let (store, disk) = counted(rig, 1024);
    // Footers of units are read once.
    content(&store, files[1]);
    assert_eq!(store.map_parts(files[2], FileBlock(0), 100).unwrap().len(), 16);
    let before = disk.counts();
    assert_eq!(content(&store, files[2]), bodies[2]);
    let now = disk.counts();
    assert_eq!(now.reads - before.reads, 1, "its own parts lie near each other");
    // Eight runs of its own, and the seven gaps between them; what it shares was read with the second.
    assert_eq!((now.read_bytes - before.read_bytes) / BLOCK_BYTES, 8 * 4 + 7 * 4);
    assert_eq!(content(&store, files[0]), bodies[0]);
    let of_first = disk.counts().read_bytes - now.read_bytes;
    assert!(of_first / BLOCK_BYTES <= 8 * 4 + 7 * 4, "{of_first}");
}

#[test]
fn ranges_of_files_that_share_are_read_as_they_are() {
    for shared_blocks in [0, 10, 1024] {
        let rig = Rig::new();
        let files = alike(&rig.store);
        let bodies = files.map(|ino| content(&rig.store, ino));
        let (store, disk) = counted(rig, shared_blocks);
        let mut state = 7_u64;
        let mut dice = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..500 {
            let file = dice(3) as usize;
            let offset = dice(BLOCKS * BLOCK_BYTES);
            let mut out = vec![9; 1 + dice(100_000) as usize];
            let len = store.read(files[file], offset, &mut out).unwrap();
            let end = (offset as usize + out.len()).min(bodies[file].len());
            assert!(
                out[..len] == bodies[file][offset as usize..end],
                "{offset}+{len} of {file}"
            );
        }
        assert!(disk.counts().reads > 0);
        assert_clean(&store);
    }
}

#[test]
fn damage_of_a_block_that_is_read_with_others_is_found_and_of_one_that_nobody_wants_is_not() {
    let rig = Rig::new();
    let files = alike(&rig.store);
    let bodies = files.map(|ino| content(&rig.store, ino));
    let own = rig.store.map_parts(files[1], FileBlock(4), 1).unwrap()[0].extent;
    let gap = own.block.0 + 4;
    let (store, disk) = counted(rig, 0);
    let flip = |block: u64| {
        let mut bytes = vec![0; BLOCK_BYTES as usize];
        disk.read(block * BLOCK_BYTES, &mut bytes).unwrap();
        bytes[77] ^= 1;
        disk.write(block * BLOCK_BYTES, &bytes).unwrap();
    };
    flip(gap);
    assert_eq!(content(&store, files[1]), bodies[1]);
    flip(own.block.0);
    let mut out = vec![0; (BLOCKS * BLOCK_BYTES) as usize];
    let refused = store.read(files[1], 0, &mut out);
    assert!(
        matches!(refused, Err(StoreError::DataChecksum { .. })),
        "{refused:?}"
    );
    assert_eq!(content(&store, files[2]), bodies[2]);
}
