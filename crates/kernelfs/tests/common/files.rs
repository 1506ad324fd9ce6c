//! Files in a simulated pool, and on which tiers they are: for tests of placement.

use super::ROOT;
use varve_format::{BLOCK_BYTES, FileBlock, Ino, InodeKey, Tier};
use varve_kernelfs::KernelFs;
use varve_store::ShareRange;

/// Bytes of one file of the tests.
pub const FILE: usize = 1 << 20;
/// The same in blocks.
pub const FILE_BLOCKS: u64 = FILE as u64 / BLOCK_BYTES;

pub fn body(seed: u64) -> Vec<u8> {
    (0..FILE as u64 / 8)
        .flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed << 7).to_le_bytes())
        .collect()
}

/// A file of [`FILE`] bytes made by the digest of nobody's log.
pub fn make(kernel: &KernelFs, number: u64) -> Result<InodeKey, varve_store::StoreError> {
    make_named(kernel, format!("f{number}").as_bytes(), &body(number))
}

pub fn make_empty(kernel: &KernelFs, name: &[u8]) -> Result<InodeKey, varve_store::StoreError> {
    make_named(kernel, name, b"")
}

/// A file whose data is on a tier.
pub fn make_on(kernel: &KernelFs, number: u64, tier: Tier) -> Result<InodeKey, varve_store::StoreError> {
    make_at(kernel, format!("f{number}").as_bytes(), &body(number), tier)
}

pub fn make_named(kernel: &KernelFs, name: &[u8], data: &[u8]) -> Result<InodeKey, varve_store::StoreError> {
    make_at(kernel, name, data, Tier::Nvm)
}

fn make_at(
    kernel: &KernelFs,
    name: &[u8],
    data: &[u8],
    tier: Tier,
) -> Result<InodeKey, varve_store::StoreError> {
    let store = kernel.store();
    let mut tx = store.begin()?;
    let key = tx.alloc_inodes(ROOT.ino, 1)?[0];
    let attr = varve_format::InodeAttr {
        key,
        mode: 0o100_644,
        nlink: 1,
        parent: ROOT.ino,
        ..store.get(ROOT.ino)?.attr
    };
    tx.create(&attr, b"")?;
    tx.dir_insert(ROOT.ino, name, key, varve_format::FileKind::Regular)?;
    if !data.is_empty() {
        tx.write_bytes(key.ino, &[(0, data)], varve_store::DataTarget::prefer(tier))?;
    }
    tx.commit()?;
    Ok(key)
}

pub fn make_dir(kernel: &KernelFs, name: &[u8]) -> InodeKey {
    let store = kernel.store();
    let mut tx = store.begin().unwrap();
    let key = tx.alloc_inodes(ROOT.ino, 1).unwrap()[0];
    let attr = varve_format::InodeAttr {
        key,
        nlink: 2,
        parent: ROOT.ino,
        ..store.get(ROOT.ino).unwrap().attr
    };
    tx.create(&attr, b"").unwrap();
    tx.dir_insert(ROOT.ino, name, key, varve_format::FileKind::Directory)
        .unwrap();
    tx.edit(ROOT.ino, |attr| attr.nlink += 1).unwrap();
    tx.commit().unwrap();
    key
}

pub fn content_is_right(kernel: &KernelFs, key: InodeKey, seed: u64) {
    let mut out = vec![0; FILE];
    assert_eq!(kernel.store().read(key.ino, 0, &mut out).unwrap(), FILE);
    assert!(out == body(seed), "content of file {seed}");
}

pub fn blocks_on(kernel: &KernelFs, ino: Ino, tier: Tier) -> u64 {
    let extents = kernel
        .store()
        .map(ino, varve_format::FileBlock(0), 10_000)
        .unwrap();
    let there = extents.iter().filter(|extent| extent.tier == tier);
    there.map(|extent| u64::from(extent.len)).sum()
}

/// Steps until nothing moves any more; there is an end to it.
pub fn settle(kernel: &KernelFs) -> u64 {
    let mut moved = 0;
    for _ in 0..500 {
        match kernel.place() {
            0 => return moved,
            blocks => moved += blocks,
        }
    }
    panic!("placement does not come to rest: {:?}", kernel.status().jobs);
}

pub fn sound(kernel: &KernelFs) {
    assert_eq!(kernel.store().check().unwrap(), []);
    assert_eq!(kernel.store().check_data().unwrap(), []);
}

/// Removes a file of the root directory with all of its data.
pub fn unlink(kernel: &KernelFs, name: &str) {
    let mut tx = kernel.store().begin().unwrap();
    let ino = tx.dir_remove(ROOT.ino, name.as_bytes()).unwrap().key.ino;
    tx.edit(ino, |attr| attr.nlink -= 1).unwrap();
    assert_eq!(
        tx.continue_free(ino, 100_000).unwrap(),
        varve_store::Progress::Done
    );
    tx.commit().unwrap();
}

/// Files with the contents 0, 1, … on a tier.
pub fn make_many(kernel: &KernelFs, files: u64, tier: Tier) -> Vec<InodeKey> {
    (0..files)
        .map(|number| make_on(kernel, number, tier).unwrap())
        .collect()
}

/// Whether such files are as they were made.
pub fn all_right(kernel: &KernelFs, keys: &[InodeKey]) {
    for (seed, key) in (0..).zip(keys) {
        content_is_right(kernel, *key, seed);
    }
    sound(kernel);
}

/// Has all of a file share the blocks of another.
pub fn share(kernel: &KernelFs, from: InodeKey, to: InodeKey) {
    kernel.store().share_extents().unwrap();
    let mut tx = kernel.store().begin().unwrap();
    let range = ShareRange {
        from: from.ino,
        from_block: FileBlock(0),
        to: to.ino,
        to_block: FileBlock(0),
        blocks: FILE_BLOCKS,
        size_bytes: FILE as u64,
    };
    assert_eq!(tx.share(&range, 0).unwrap(), FILE_BLOCKS);
    tx.commit().unwrap();
}
