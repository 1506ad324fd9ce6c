//! Placement over the tiers, step by step: what moves, that its content stays, what readers are told, what
//! happens when all is full.
#![allow(clippy::unwrap_used)]

mod common;

use common::files::{FILE, blocks_on, body, content_is_right, make, make_empty, settle, sound};
use common::{Client, ROOT, World};
use varve_format::log::CHUNK_BYTES;
use varve_format::seeded::{Bug, arm};
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, Tier};
use varve_ipc::{Link, Request, Response, Upcall};
use varve_kernelfs::{Config, KernelFs};
use varve_media::sim::Crash;
use varve_store::ShareRange;

fn world() -> World {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        ..Config::default()
    };
    World::with_tiers(config, &[("ssd", 24 << 20), ("hdd", 96 << 20)])
}

fn read_all(client: &Client, key: InodeKey) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < FILE {
        let request = Request::ReadData {
            key,
            offset: out.len() as u64,
            len: 256 << 10,
        };
        match client.link.call(request).unwrap() {
            Response::Bytes(bytes) | Response::Numbered(bytes, _) => out.extend(bytes),
            other => panic!("{other:?}"),
        }
    }
    out
}

/// Fills NVM until nothing more goes there.
fn fill_nvm(kernel: &KernelFs) -> Vec<InodeKey> {
    let mut keys = Vec::new();
    loop {
        let key = make(kernel, keys.len() as u64).unwrap();
        keys.push(key);
        if blocks_on(kernel, key.ino, Tier::Nvm) < FILE as u64 / BLOCK_BYTES {
            return keys;
        }
    }
}

#[test]
fn full_nvm_moves_what_was_not_used_down_and_what_was_read_again_up() {
    let world = world();
    let kernel = &world.kernel;
    let keys = fill_nvm(kernel);
    let client = world.client();
    // The first file, made longest ago, has been read meanwhile.
    client.read_lease(keys[0]);
    assert!(read_all(&client, keys[0]) == body(0));
    let moved = settle(kernel);
    let nvm = kernel.status().tiers[0].clone();
    assert!(moved > 0 && nvm.moved_out_bytes == moved * BLOCK_BYTES, "{nvm:?}");
    assert_eq!(kernel.status().tiers[1].moved_in_bytes, nvm.moved_out_bytes);
    assert_eq!(blocks_on(kernel, keys[0].ino, Tier::Ssd), 0, "used lately");
    let cold = keys[1];
    assert_eq!(blocks_on(kernel, cold.ino, Tier::Nvm), 0, "used never");
    for (seed, key) in (0..).zip(&keys) {
        content_is_right(kernel, *key, seed);
    }
    assert_eq!(kernel.place(), 0, "at rest");
    // Room below the mark for the file that is read again.
    client.read_lease(cold);
    assert!(read_all(&client, cold) == body(1));
    assert_eq!(kernel.place(), 0, "once is not again");
    assert!(read_all(&client, cold) == body(1));
    let up = settle(kernel);
    assert_eq!(up, FILE as u64 / BLOCK_BYTES);
    assert_eq!(blocks_on(kernel, cold.ino, Tier::Nvm), up);
    assert_eq!(kernel.status().tiers[0].moved_in_bytes, up * BLOCK_BYTES);
    content_is_right(kernel, cold, 1);
    sound(kernel);
}

#[test]
fn moved_blocks_are_not_reused_before_their_readers_know() {
    let world = world();
    let kernel = &world.kernel;
    let keys = fill_nvm(kernel);
    let client = world.client();
    client.read_lease(keys[0]);
    let map = Request::MapExtents {
        key: keys[0],
        from: varve_format::FileBlock(0),
        max: 100,
    };
    let Response::Extents(mapped, true) = client.link.call(map).unwrap() else {
        panic!("no extents")
    };
    // All others are used later.
    for key in &keys[1..] {
        client.read_lease(*key);
        client.read(*key, 1);
    }
    assert!(settle(kernel) > 0);
    assert_eq!(blocks_on(kernel, keys[0].ino, Tier::Nvm), 0);
    let Upcall::Barrier { tx, keys: told } = client.upcall() else {
        panic!("another upcall")
    };
    assert_eq!(told, [keys[0]]);
    let pending = kernel.store().pending_frees();
    assert!(pending.blocks >= mapped.iter().map(|extent| u64::from(extent.len)).sum());
    // Nothing was put over what the client may be reading.
    let nvm = kernel.store().devices().nvm.clone();
    let mut out = vec![0; FILE];
    for extent in &mapped {
        let at = (extent.file_block.0 * BLOCK_BYTES) as usize;
        let len = extent.len as usize * BLOCK_BYTES as usize;
        nvm.read(extent.block.0 * BLOCK_BYTES, &mut out[at..at + len])
            .unwrap();
    }
    assert!(out == body(0));
    let mut tx = Some(tx);
    while let Some(told) = tx.take() {
        assert_eq!(
            client.link.call(Request::BarrierAck { tx: told }),
            Ok(Response::Done)
        );
        if kernel.store().pending_frees().blocks > 0 {
            let Upcall::Barrier { tx: next, .. } = client.upcall() else {
                panic!("another upcall")
            };
            tx = Some(next);
        }
    }
    sound(kernel);
}

/// Whether a reader of a clone hears that blocks were moved which it shares with a file that nobody reads.
fn reader_of_a_clone_is_told(bug: Option<Bug>) -> bool {
    let world = world();
    let kernel = &world.kernel;
    let keys = fill_nvm(kernel);
    let store = kernel.store();
    store.share_extents().unwrap();
    let clone = make_empty(kernel, b"clone").unwrap();
    let mut tx = store.begin().unwrap();
    let range = ShareRange {
        from: keys[0].ino,
        from_block: FileBlock(0),
        to: clone.ino,
        to_block: FileBlock(0),
        blocks: FILE as u64 / BLOCK_BYTES,
        size_bytes: FILE as u64,
    };
    assert_eq!(tx.share(&range, 0).unwrap(), range.blocks);
    tx.commit().unwrap();
    let client = world.client();
    client.read_lease(clone);
    let map = Request::MapExtents {
        key: clone,
        from: FileBlock(0),
        max: 100,
    };
    assert!(matches!(client.link.call(map), Ok(Response::Extents(..))));
    // All others are used later.
    for key in &keys[1..] {
        client.read_lease(*key);
        client.read(*key, 1);
    }
    arm(bug);
    assert!(settle(kernel) > 0);
    arm(None);
    for key in [keys[0], clone] {
        assert_eq!(blocks_on(kernel, key.ino, Tier::Nvm), 0);
        content_is_right(kernel, key, 0);
    }
    sound(kernel);
    let upcall = client.link.upcall(std::time::Duration::ZERO).unwrap();
    matches!(upcall, Some(Upcall::Barrier { keys, .. }) if keys.contains(&clone))
}

#[test]
fn readers_of_all_files_that_share_a_block_hear_that_it_was_moved() {
    assert!(reader_of_a_clone_is_told(None));
    if cfg!(debug_assertions) {
        assert!(!reader_of_a_clone_is_told(Some(Bug::SharedMoveNotTold)));
    }
}

#[test]
fn pool_with_many_times_its_nvm_works_until_all_tiers_are_full() {
    let world = world();
    let kernel = &world.kernel;
    let mut files = Vec::new();
    let full = loop {
        match make(kernel, files.len() as u64) {
            Ok(key) => files.push(Some(key)),
            Err(error) => break error,
        }
        kernel.place();
        assert!(files.len() < 200, "it never becomes full");
    };
    assert!(matches!(full, varve_store::StoreError::NoSpace { .. }), "{full}");
    assert!(files.len() > 90, "{} files", files.len());
    settle(kernel);
    let status = kernel.status();
    let waits = |job: &varve_kernelfs::PlacementStatus| job.waiting.is_some();
    assert!(status.placement.iter().any(waits), "{:?}", status.jobs);
    assert!(
        status.jobs.iter().any(|job| job.contains("waiting: hdd 9")),
        "{:?}",
        status.jobs
    );
    // No space for what is not logged yet; deleting works.
    let mut client = world.client();
    let credits = client.link.call(Request::Reserve {
        blocks: 4096,
        least: 4096,
    });
    assert_eq!(credits, Err(varve_ipc::IpcError::Errno(libc::ENOSPC)));
    for number in (0..files.len()).step_by(3) {
        let key = files[number].take().unwrap();
        let name = format!("f{number}");
        client.write_lease(ROOT);
        client.write_lease(key);
        let unlink = LogOp::Unlink {
            dir: ROOT,
            name: name.as_bytes(),
            key,
        };
        client.log_op(&unlink);
        kernel.digest_all().unwrap();
        let drop = Request::Drop { keys: vec![key] };
        let _ = client.link.call(drop);
    }
    assert!(client.link.call(Request::Bye).is_ok());
    kernel.tick();
    kernel.store().checkpoint().unwrap();
    settle(kernel);
    let mut again = Vec::new();
    for number in 500..510 {
        again.push((number, make(kernel, number).unwrap()));
    }
    for (seed, key) in files.iter().enumerate() {
        if let Some(key) = key {
            content_is_right(kernel, *key, seed as u64);
        }
    }
    for (seed, key) in again {
        content_is_right(kernel, key, seed);
    }
    sound(kernel);
}

#[test]
fn crash_in_a_migration_leaves_every_file_whole() {
    let world = world();
    let keys = fill_nvm(&world.kernel);
    let (recording, moved) = world.sim.record(|| settle(&world.kernel));
    assert!(moved > 0);
    let points = recording.durability_points();
    assert!(points.len() >= 8, "{}", points.len());
    let step = points.len() / 6;
    for (at, point) in points.iter().enumerate().step_by(step.max(1)) {
        for crash in [Crash::PowerNone, Crash::PowerSeeded(at as u64), Crash::Kill] {
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            for (seed, key) in (0..).zip(&keys) {
                content_is_right(&after.kernel, *key, seed);
            }
            sound(&after.kernel);
            settle(&after.kernel);
            assert_eq!(blocks_on(&after.kernel, keys[0].ino, Tier::Nvm), 0);
            sound(&after.kernel);
        }
    }
}
