//! Numbers of inodes that a session did not use, when their blocks of the inode file are on flash and NVM has
//! little room.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, ROOT, World, hello};
use varve_format::{BLOCK_BYTES, FileBlock, Tier};
use varve_ipc::Peer;
use varve_kernelfs::Config;
use varve_store::{DataTarget, Store, StoreError};

/// Fills NVM with data, then with values of attributes, until so many blocks are left.
fn fill(store: &Store, left: u64) {
    let mut tx = store.begin().unwrap();
    let key = tx.alloc_inodes(ROOT.ino, 1).unwrap()[0];
    let attr = varve_format::InodeAttr::new(key, 0o100_644, common::START_NS);
    tx.create(&attr, b"").unwrap();
    tx.dir_insert(ROOT.ino, b"fill", key, varve_format::FileKind::Regular)
        .unwrap();
    tx.commit().unwrap();
    let only = DataTarget::only(Tier::Nvm);
    let data = vec![7; 64 * BLOCK_BYTES as usize];
    for at in (0..).step_by(64) {
        let mut tx = store.begin().unwrap();
        match tx.write_data(key.ino, FileBlock(at), &data, true, only) {
            Ok(()) => tx.commit().map(drop).unwrap(),
            Err(StoreError::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    for number in 0.. {
        store.checkpoint().unwrap();
        if store.space().tiers[0].free <= left {
            return;
        }
        let mut tx = store.begin().unwrap();
        tx.xattr_set(key.ino, format!("user.{number}").as_bytes(), &[7; 30_000])
            .unwrap();
        tx.commit().unwrap();
    }
}

#[test]
fn start_gives_back_more_numbers_than_nvm_has_room_for() {
    let world = World::with_tiers(Config::default(), &[("ssd", 48 << 20)]);
    let client = Client::open(&world.kernel, Peer::this_process(), hello()).unwrap();
    client.read_lease(ROOT);
    let store = world.kernel.store();
    let before = store.space().inodes_used;
    let low = store.space().tiers[0].total / 32;
    let mut numbers = 0;
    while numbers < (low + 60) * 16 {
        numbers += client.alloc(512).len() as u64;
    }
    store.demote(u64::MAX).unwrap();
    fill(store, low + 20);
    let world = world.restart();
    assert_eq!(world.kernel.store().space().inodes_used, before + 1);
    world.check();
    drop(client);
}
