//! Overwrites in place as the daemon does them, and what becomes of blocks that a crash left torn.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, World, write_file};
use std::time::Duration;
use varve_format::seeded::{Bug, arm};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, InodeKey, LogOp};
use varve_ipc::{Link, Request, Upcall};
use varve_kernelfs::{Config, Status};
use varve_media::Region;
use varve_store::StoreError;

const BLOCK: usize = BLOCK_SIZE;

/// A pool with a file of four blocks of ones, digested; and its writer.
fn with_file(config: Config) -> (World, Client, InodeKey) {
    let world = World::with(config);
    let mut client = world.client();
    let key = write_file(&mut client, b"f", &vec![1; 4 * BLOCK]);
    world.kernel.digest_all().unwrap();
    (world, client, key)
}

fn overwrite(client: &mut Client, key: InodeKey, block: u64, what: u8) {
    client.log_op(&LogOp::Write {
        key,
        offset: block * BLOCK_BYTES,
        data: &[what; BLOCK],
    });
}

fn place(world: &World, key: InodeKey, block: u64) -> u64 {
    let extent = world.kernel.store().map(key.ino, FileBlock(block), 1).unwrap()[0];
    extent.block.0 + block - extent.file_block.0
}

fn content(world: &World, key: InodeKey, block: u64) -> Vec<u8> {
    let mut out = vec![0; BLOCK];
    world
        .kernel
        .store()
        .read(key.ino, block * BLOCK_BYTES, &mut out)
        .unwrap();
    out
}

/// Which of the first three blocks keep their places when all are overwritten and digested together.
fn stay(config: Config, bug: Option<Bug>) -> [bool; 3] {
    let (world, mut client, key) = with_file(config);
    let before = [0, 1, 2].map(|block| place(&world, key, block));
    // A part of the second one first.
    client.log_op(&LogOp::Write {
        key,
        offset: BLOCK_BYTES + 5,
        data: &[9; 10],
    });
    for block in 0..3 {
        overwrite(&mut client, key, block, 2);
    }
    arm(bug);
    world.kernel.digest_all().unwrap();
    arm(None);
    for block in 0..3 {
        assert_eq!(content(&world, key, block), [2; BLOCK]);
    }
    world.check();
    [0, 1, 2].map(|block| place(&world, key, block as u64) == before[block])
}

#[test]
fn blocks_whose_entries_are_surely_durable_and_whole_stay_where_they_are() {
    assert_eq!(stay(Config::default(), None), [true, false, false]);
    let off = Config {
        overwrite_in_place: false,
        ..Config::default()
    };
    assert_eq!(stay(off, None), [false; 3]);
    let verified = Config {
        verify_nvm_reads: true.into(),
        ..Config::default()
    };
    assert_eq!(
        stay(verified, None),
        [false; 3],
        "a reader would see a wrong checksum"
    );
    if cfg!(debug_assertions) {
        // The last entry: nothing says that its call has returned.
        assert_eq!(
            stay(Config::default(), Some(Bug::UnsettledInPlace)),
            [true, false, true]
        );
        assert_eq!(
            stay(Config::default(), Some(Bug::PartialInPlace)),
            [true, true, false]
        );
    }
}

#[test]
fn log_that_is_not_what_it_seemed_writes_nothing_over_old_blocks() {
    for bug in [None, Some(Bug::InPlaceEarly)] {
        let (world, mut client, key) = with_file(Config::default());
        overwrite(&mut client, key, 0, 2);
        let torn_at = client.offset;
        overwrite(&mut client, key, 1, 3);
        overwrite(&mut client, key, 2, 4);
        // The client spoils what it has logged; only this entry and those behind it go.
        client
            .log
            .as_ref()
            .unwrap()
            .write(torn_at + 200, &[0xff; 8])
            .unwrap();
        arm(bug);
        world.kernel.digest_all().unwrap();
        arm(None);
        let spoiled = content(&world, key, 1) != [1; BLOCK];
        assert_eq!(spoiled, bug.is_some() && cfg!(debug_assertions));
        assert_eq!(content(&world, key, 2), [1; BLOCK]);
    }
}

/// The daemon dies while the file's first block is overwritten with twos: half of it is there. The log is
/// spoiled as asked. The pool after the restart, and what is said of logs.
fn torn(spoil: impl FnOnce(&Client, u64)) -> (World, InodeKey, Status) {
    let (world, mut client, key) = with_file(Config::default());
    let nvm = world.sim.region("nvm").unwrap();
    let place = place(&world, key, 0);
    let entry = client.offset;
    overwrite(&mut client, key, 0, 2);
    overwrite(&mut client, key, 3, 3);
    overwrite(&mut client, key, 3, 4);
    nvm.write(place * BLOCK_BYTES, &[2; BLOCK / 2]).unwrap();
    spoil(&client, entry);
    let world = world.restart();
    let status = world.kernel.status();
    (world, key, status)
}

#[test]
fn torn_block_is_whole_again_when_its_log_was_digested() {
    let (world, key, status) = torn(|_, _| {});
    assert_eq!(content(&world, key, 0), [2; BLOCK]);
    assert_eq!(content(&world, key, 3), [4; BLOCK]);
    assert_eq!(status.logs.damaged, 0);
    assert_eq!(world.kernel.store().check_data().unwrap(), []);
    world.check();
}

#[test]
fn torn_block_whose_log_is_damaged_is_named() {
    let (world, key, status) = torn(|client, entry| {
        client
            .log
            .as_ref()
            .unwrap()
            .write(entry + 200, &[0xff; 8])
            .unwrap();
    });
    assert_eq!(status.logs.damaged, 2, "the log, and what it should have redone");
    let said = format!("{:?}", status.media);
    assert!(
        said.contains(&format!("inode {}: 1 blocks, the first at byte 0", key.ino)),
        "{said}"
    );
    assert_eq!(world.kernel.store().check_data().unwrap().len(), 1);
    let block = varve_format::BlockNo(place(&world, key, 0));
    let verified = world.kernel.store().verify_block(varve_format::Tier::Nvm, block);
    assert!(matches!(verified, Err(StoreError::DataChecksum { .. })));
}

/// Whether a session that has mapped the file hears that its blocks were overwritten.
fn is_told(bug: Option<Bug>) -> bool {
    let (world, mut client, key) = with_file(Config::default());
    let map = Request::MapExtents {
        key,
        from: FileBlock(0),
        max: 10,
    };
    client.link.call(map).unwrap();
    overwrite(&mut client, key, 0, 2);
    overwrite(&mut client, key, 1, 2);
    arm(bug);
    world.kernel.digest_all().unwrap();
    arm(None);
    let upcall = client.link.upcall(Duration::ZERO).unwrap();
    matches!(upcall, Some(Upcall::Barrier { keys, .. }) if keys == [key])
}

#[test]
fn who_has_mapped_a_file_hears_that_its_blocks_were_overwritten() {
    assert!(is_told(None));
    if cfg!(debug_assertions) {
        assert!(!is_told(Some(Bug::InPlaceNotTold)));
    }
}
