//! Checksums that are told without a read of the data, and those of data that is read.
use super::crash::{file, prepared};
use super::shared::{content, new_file, scattered_file, share, used, whole};
use super::*;
use crate::SummedPart;
use varve_format::BLOCK_SIZE;

/// All checksums of a file, asked for in answers of `most` blocks; each block's, `None` in holes.
fn told(store: &Store, ino: Ino, most: u64) -> (Vec<Option<u32>>, Vec<SummedPart>, usize) {
    let end = FileBlock(1 << 20);
    let (mut at, mut parts, mut answers) = (FileBlock(0), Vec::new(), 0);
    while at < end {
        let (some, next) = store.checksums(ino, at..end, most).unwrap();
        assert!(next > at, "{next:?} after {at:?}");
        assert!(some.iter().map(|part| part.sums.len() as u64).sum::<u64>() <= most);
        parts.extend(some);
        at = next;
        answers += 1;
    }
    let blocks = store.get(ino).unwrap().attr.size_bytes.div_ceil(BLOCK_BYTES);
    let mut sums = vec![None; blocks as usize];
    for part in &parts {
        for (block, sum) in (part.file_block.0..).zip(&part.sums) {
            assert_eq!(sums[block as usize].replace(*sum), None, "block {block} twice");
        }
    }
    (sums, parts, answers)
}

fn assert_told(store: &Store, ino: Ino) {
    let mut bytes = content(store, ino);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_SIZE), 0);
    let zero = crc32c::crc32c(&[0; BLOCK_SIZE]);
    let (mut at, mut read) = (FileBlock(0), Vec::new());
    while at < FileBlock(1 << 20) {
        let (some, next) = store.read_checksums(ino, at..FileBlock(1 << 20), 300).unwrap();
        read.extend(some);
        at = next;
    }
    let blocks = |parts: &[SummedPart]| -> Vec<(u64, u32)> {
        let block = |part: &SummedPart| (part.file_block.0..).zip(part.sums.clone()).collect::<Vec<_>>();
        parts.iter().flat_map(block).collect()
    };
    assert_eq!(blocks(&read), blocks(&told(store, ino, 1 << 16).1));
    for most in [1, 7, 1 << 16] {
        let (sums, ..) = told(store, ino, most);
        for (block, (sum, bytes)) in sums.iter().zip(bytes.chunks(BLOCK_SIZE)).enumerate() {
            assert_eq!(sum.unwrap_or(zero), crc32c::crc32c(bytes), "block {block}");
        }
    }
}

#[test]
fn checksums_are_those_of_the_bytes_on_every_tier_without_reading_them() {
    for medium in [SimMedium::Dax, SimMedium::File] {
        let rig = prepared(medium);
        let store = &rig.store;
        for name in ["f9", "f10", "f11"] {
            let source = file(store, name);
            assert_told(store, source);
            let clone = new_file(store, &format!("clone of {name}")).unwrap();
            share(store, whole(store, source, clone)).unwrap();
            // The same blocks: known as such without a look at their bytes.
            let [one, other] = [source, clone].map(|ino| told(store, ino, 5).1);
            assert!(one == other && one.iter().all(|part| part.number.is_some()));
            let mut tx = store.begin().unwrap();
            tx.write_bytes(clone, &[(5000, &[7; 9000])], NVM).unwrap();
            tx.commit().unwrap();
            assert_told(store, clone);
            assert_told(store, source);
        }
        // Units are sealed, and their checksums are in footers on the device.
        let big = new_file(store, "big").unwrap();
        let mut at = 0;
        while used(store)[2] * 3 < store.space().tiers[2].total {
            let mut tx = store.begin().unwrap();
            tx.write_data(big, FileBlock(at), &pattern(20 * 4096, at), true, HDD)
                .unwrap();
            tx.commit().unwrap();
            at += 25;
        }
        let rig = rig.reopen();
        assert_told(&rig.store, file_in_root(&rig.store, "big"));
    }
}

fn file_in_root(store: &Store, name: &str) -> Ino {
    store
        .dir_lookup(ROOT_INO, name.as_bytes())
        .unwrap()
        .unwrap()
        .key
        .ino
}

#[test]
fn holes_unwritten_blocks_and_what_lies_behind_the_end_are_left_out() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let ino = new_file(store, "holes").unwrap();
    let mut tx = store.begin().unwrap();
    tx.write_bytes(ino, &[(4096, &pattern(4096 + 10, 5))], NVM)
        .unwrap();
    assert_eq!(
        tx.allocate(ino, 5 * 4096, 8 * 4096, true, NVM).unwrap(),
        Progress::Done
    );
    tx.commit().unwrap();
    let (sums, parts, answers) = told(store, ino, 100);
    assert_eq!((parts.len(), answers), (1, 1));
    let known: Vec<_> = sums.iter().map(Option::is_some).collect();
    assert_eq!(known[..4], [false, true, true, false]);
    assert!(known[4..].iter().all(|known| !known));
    assert_told(store, ino);
    // A file in single blocks: neighbours in an answer are joined only if they are neighbours in the file.
    let scattered = scattered_file(store, "scattered", 20);
    assert_eq!(told(store, scattered, 1 << 16).1.len(), 160);
    assert_told(store, scattered);
    assert!(store.checksums(ROOT_INO, FileBlock(0)..FileBlock(9), 9).is_err());
}

#[test]
fn checksums_of_bytes_that_are_read_are_not_those_that_the_pool_expects() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let ino = new_file(store, "flipped").unwrap();
    let mut tx = store.begin().unwrap();
    tx.write_bytes(ino, &[(0, &pattern(3 * 4096, 8))], NVM).unwrap();
    tx.commit().unwrap();
    let all = || FileBlock(0)..FileBlock(3);
    let read = || store.read_checksums(ino, all(), 3).unwrap().0[0].sums.clone();
    let before = read();
    let snapshot = store.snapshot();
    let root = crate::reader::file_root(&snapshot.reader().get(ino).unwrap()).unwrap();
    let parts = snapshot.reader().parts(ino, &root, 0, 3, 8).unwrap();
    let at = parts[0].extent.block.0 * BLOCK_BYTES + 4096 + 77;
    store.devices.nvm.write(at, &[99]).unwrap();
    // The pool believes its NVM, and tells what it expects; a read of all tells what is there.
    assert_eq!(store.checksums(ino, all(), 3).unwrap().0[0].sums, before);
    let after = read();
    assert_eq!((after[0], after[2]), (before[0], before[2]));
    assert_ne!(after[1], before[1]);
}
