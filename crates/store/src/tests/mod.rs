//! Tests on simulated media.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod basic;
mod crash;
mod defrag;
mod demotion;
mod demotion_damage;
mod demotion_full;
mod devices;
mod evacuation;
mod faults;
mod fetch;
mod gather;
mod in_place;
mod model;
mod scattered;
mod shared;
mod space;
mod sums;
mod unshare;
mod upgrade;

use crate::{
    Content, DataTarget, Devices, MkfsOptions, OpenOptions, Progress, Result, ShareRange, Store, Tx,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, FileBlock, FileKind, Ino, InodeAttr, InodeKey, ROOT_INO, Tier};
use varve_media::BlockDevice;
use varve_media::sim::{SimMedium, SimWorld};

/// Media of a small pool.
pub(super) struct Rig {
    pub(super) world: SimWorld,
    pub(super) store: Store,
}

pub(super) const NVM_BYTES: u64 = 16 << 20;
pub(super) const SSD_UNIT: u64 = 64;

pub(super) fn devices_of(world: &SimWorld) -> Devices {
    Devices {
        nvm: world.region("nvm").unwrap(),
        journal: world.region("journal").unwrap(),
        ssd: world.block("ssd").map(|device| device as _),
        hdd: world.block("hdd").map(|device| device as _),
        more: more_of(world),
    }
}

/// Further devices of the tiers.
fn more_of(world: &SimWorld) -> Vec<(Tier, Arc<dyn BlockDevice>)> {
    let named = [(Tier::Ssd, "ssd-2"), (Tier::Ssd, "ssd-3"), (Tier::Hdd, "hdd-2")];
    let there = named
        .into_iter()
        .filter_map(|(tier, name)| Some((tier, world.block(name)? as _)));
    there.collect()
}

pub(super) fn open(world: &SimWorld) -> Result<Store> {
    Store::open(devices_of(world), OpenOptions::default()).map(|(store, _)| store)
}

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(SimMedium::Dax, 512 << 10)
    }

    pub(super) fn with(medium: SimMedium, journal: u64) -> Self {
        Self::sized(medium, journal, NVM_BYTES)
    }

    pub(super) fn sized(medium: SimMedium, journal: u64, nvm: u64) -> Self {
        let world = SimWorld::new();
        world.add_region("nvm", medium, nvm, nvm);
        world.add_region("journal", medium, journal, journal);
        world.add_block("ssd", 8 << 20);
        world.add_block("hdd", 16 << 20);
        let options = MkfsOptions {
            pool_uuid: [7; 16],
            dir_hash_key: [9; 16],
            ssd_unit_blocks: Some(SSD_UNIT),
            hdd_unit_blocks: Some(128),
            ..MkfsOptions::default()
        };
        Store::mkfs(&devices_of(&world), &options).unwrap();
        let store = open(&world).unwrap();
        Self { world, store }
    }

    pub(super) fn reopen(self) -> Self {
        let before = dump(&self.store);
        let Self { world, store } = self;
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(dump(&store), before);
        assert_clean(&store);
        Self { world, store }
    }
}

pub(super) fn assert_clean(store: &Store) {
    assert_eq!(store.check().unwrap(), []);
    assert_eq!(store.check_data().unwrap(), []);
}

pub(super) fn attr(key: InodeKey, mode: u32) -> InodeAttr {
    let dir = mode & 0o170_000 == 0o040_000;
    InodeAttr {
        key,
        mode,
        uid: 1,
        gid: 2,
        nlink: if dir { 2 } else { 1 },
        size_bytes: 0,
        sectors: 0,
        rdev: 0,
        parent: if dir { ROOT_INO } else { Ino(0) },
        atime_ns: 1,
        mtime_ns: 2,
        ctime_ns: 3,
        btime_ns: 4,
    }
}

/// Makes a file or directory as `name` in `dir`, link counts included.
pub(super) fn make(tx: &mut Tx<'_>, dir: Ino, name: &str, mode: u32) -> Result<InodeKey> {
    make_link(tx, dir, name, mode, b"")
}

pub(super) fn make_link(tx: &mut Tx<'_>, dir: Ino, name: &str, mode: u32, target: &[u8]) -> Result<InodeKey> {
    let key = tx.alloc_inodes(dir, 1)?[0];
    let mut attr = attr(key, mode);
    if attr.is_dir() {
        attr.parent = dir;
        tx.edit(dir, |attr| attr.nlink += 1)?;
    }
    tx.create(&attr, target)?;
    tx.dir_insert(dir, name.as_bytes(), key, FileKind::from_mode(mode).unwrap())?;
    Ok(key)
}

/// Fills the SSD with two files, removes one: every unit has holes. The other and its length in blocks.
pub(super) fn leave_holes(store: &Store, commit: fn(Tx<'_>, &Store) -> Result<()>) -> Result<(Ino, u64)> {
    let only = DataTarget::only(Tier::Ssd);
    let mut tx = store.begin()?;
    let keep = make(&mut tx, ROOT_INO, "keep", 0o100_644)?.ino;
    let gone = make(&mut tx, ROOT_INO, "gone", 0o100_644)?.ino;
    commit(tx, store)?;
    let mut at = 0;
    loop {
        let mut tx = store.begin()?;
        let mut put = |ino, seed| tx.write_data(ino, FileBlock(at), &pattern(4096 * 24, seed), true, only);
        match put(keep, at).and_then(|()| put(gone, at + 1)) {
            Ok(()) => commit(tx, store)?,
            Err(crate::StoreError::NoSpace { .. }) => break,
            Err(error) => return Err(error),
        };
        at += 24;
    }
    let mut tx = store.begin()?;
    assert_eq!(unlink(&mut tx, ROOT_INO, "gone")?, Progress::Done);
    commit(tx, store)?;
    store.checkpoint()?;
    Ok((keep, at))
}

/// Removes a name; frees the inode when it was the last.
pub(super) fn unlink(tx: &mut Tx<'_>, dir: Ino, name: &str) -> Result<Progress> {
    let item = tx.dir_remove(dir, name.as_bytes())?;
    if item.kind == FileKind::Directory {
        tx.edit(dir, |attr| attr.nlink -= 1)?;
        tx.edit(item.key.ino, |attr| attr.nlink = 0)?;
    } else {
        tx.edit(item.key.ino, |attr| attr.nlink -= 1)?;
    }
    if tx.get(item.key.ino)?.attr.nlink > 0 {
        return Ok(Progress::Done);
    }
    tx.continue_free(item.key.ino, 100_000)
}

pub(super) const NVM: DataTarget = DataTarget::prefer(Tier::Nvm);
pub(super) const SSD: DataTarget = DataTarget::prefer(Tier::Ssd);
pub(super) const HDD: DataTarget = DataTarget::prefer(Tier::Hdd);

/// Everything a program could see, as text by path; and the counters.
pub(super) fn dump(store: &Store) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    walk(store, ROOT_INO, "", &mut out);
    out.insert("orphans".into(), format!("{:?}", store.orphans().unwrap()));
    out.insert("sessions".into(), format!("{:?}", store.sessions().unwrap()));
    let mut grants = store.grants().unwrap();
    grants.sort_by_key(|row| row.lease);
    out.insert("grants".into(), format!("{grants:?}"));
    out
}

fn walk(store: &Store, ino: Ino, path: &str, out: &mut BTreeMap<String, String>) {
    let inode = store.get(ino).unwrap();
    let mut text = format!("{:?}", inode.attr);
    for (name, _) in store.xattr_list(ino).unwrap() {
        let value = store.xattr_get(ino, &name).unwrap().unwrap();
        text += &format!(" {name:?}={:08x}", crc32c::crc32c(&value));
    }
    match inode.content {
        Content::File(_) => {
            let mut bytes = vec![0; inode.attr.size_bytes as usize];
            assert_eq!(store.read(ino, 0, &mut bytes).unwrap(), bytes.len());
            text += &format!(" data {:08x}", crc32c::crc32c(&bytes));
        }
        Content::Symlink(_) | Content::SymlinkBlock(_) => {
            text += &format!(" -> {:?}", store.read_link(ino).unwrap())
        }
        Content::Dir(_) => {
            for item in store.dir_iter(ino, 0, usize::MAX).unwrap() {
                let path = format!("{path}/{}", String::from_utf8_lossy(&item.name));
                walk(store, item.key.ino, &path, out);
            }
        }
    }
    out.insert(format!("{path}/"), text);
}

/// Bytes that differ from place to place.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Changes a block of metadata on a device in bytes that nothing looks at, with a right checksum of its own:
/// as one of an older life would be.
pub(super) fn make_older(device: &dyn BlockDevice, number: u64) {
    let mut node = vec![0; 4096];
    device.read(number * BLOCK_BYTES, &mut node).unwrap();
    node[28] ^= 1;
    let crc = crc32c::crc32c(&node[4..]);
    node[..4].copy_from_slice(&crc.to_le_bytes());
    device.write(number * BLOCK_BYTES, &node).unwrap();
}
