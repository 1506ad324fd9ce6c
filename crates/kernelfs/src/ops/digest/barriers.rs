//! Reuse of replaced blocks: not before every message about them was obeyed, in whatever order.
#![allow(clippy::unwrap_used)]

use super::{BARRIER_KEYS_MAX, TakeOver};
use crate::common::{Client, ROOT, World, want};
use crate::digest::Applied;
use varve_format::{FileBlock, FileKind, InodeAttr, InodeKey, TxId};
use varve_ipc::{ITEMS_MAX, LeaseMode, Link, Request, Response, Upcall};

/// Makes empty files that `client` has mapped.
fn mapped(world: &World, client: &Client, count: usize) -> Vec<InodeKey> {
    let store = &world.kernel.store;
    let mut keys = Vec::new();
    while keys.len() < count {
        let mut tx = store.begin_with_room().unwrap();
        for key in tx.alloc_inodes(ROOT.ino, 16).unwrap() {
            let attr = InodeAttr {
                nlink: 1,
                ..InodeAttr::new(key, 0o100_644, 0)
            };
            tx.create(&attr, b"").unwrap();
            tx.dir_insert(ROOT.ino, key.ino.0.to_string().as_bytes(), key, FileKind::Regular)
                .unwrap();
            keys.push(key);
        }
        tx.commit().unwrap();
    }
    keys.truncate(count);
    for some in keys.chunks(ITEMS_MAX) {
        let wants: Vec<_> = some.iter().map(|key| want(*key, LeaseMode::Read)).collect();
        client.acquire(&wants).unwrap();
    }
    for key in &keys {
        let map = Request::MapExtents {
            key: *key,
            from: FileBlock(0),
            max: 1,
        };
        assert!(matches!(client.link.call(map), Ok(Response::Extents(_, true))));
    }
    keys
}

/// Applies a transaction that replaced blocks of `keys`.
fn replaced(world: &World, tx: u64, keys: &[InodeKey]) {
    let applied = Applied {
        tx: TxId(tx),
        remapped: keys.to_vec(),
        ..Applied::default()
    };
    assert_eq!(TakeOver::of(&world.kernel).take_over(&applied), []);
}

/// Obeys the next barrier, which must be there; returns its transaction.
fn told(client: &Client) -> u64 {
    let Upcall::Barrier { tx, .. } = client.upcall() else {
        panic!("another upcall")
    };
    tx.0
}

fn obey(client: &Client, tx: u64) {
    let ack = Request::BarrierAck { tx: TxId(tx) };
    assert_eq!(client.link.call(ack), Ok(Response::Done));
}

/// Returns the newest transaction whose freed blocks may be used again.
fn horizon(world: &World) -> u64 {
    world.kernel.locked().reader_horizon().0
}

const NOBODY_READS: u64 = u64::MAX;

#[test]
fn barrier_that_was_obeyed_counts_for_no_other() {
    let world = World::new();
    let a = world.client();
    let keys = mapped(&world, &a, 1);
    // The later one is sent first.
    replaced(&world, 1009, &keys);
    replaced(&world, 1005, &keys);
    assert_eq!([told(&a), told(&a)], [1009, 1005]);
    assert_eq!(horizon(&world), 1004);
    obey(&a, 1009);
    assert_eq!(horizon(&world), 1004, "that of 1005 is not obeyed");
    obey(&a, 1005);
    assert_eq!(horizon(&world), NOBODY_READS);
}

#[test]
fn barrier_of_several_messages_counts_when_all_were_obeyed() {
    let world = World::new();
    let a = world.client();
    let keys = mapped(&world, &a, BARRIER_KEYS_MAX + 1);
    replaced(&world, 100_000, &keys);
    assert_eq!([told(&a), told(&a)], [100_000; 2]);
    obey(&a, 100_000);
    assert_eq!(horizon(&world), 99_999, "one message is left");
    obey(&a, 100_000);
    assert_eq!(horizon(&world), NOBODY_READS);
}
