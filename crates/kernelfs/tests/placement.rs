//! Placement over the tiers, step by step: what moves, that its content stays, what readers are told, what
//! happens when all is full.
#![allow(clippy::unwrap_used)]

mod common;

use common::files::{FILE, blocks_on, body, content_is_right, make, make_empty, make_on, settle, sound};
use common::{Client, ROOT, World};
use varve_format::log::CHUNK_BYTES;
use varve_format::seeded::{Bug, arm};
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, Tier};
use varve_ipc::{IpcError, Link, READS_MAX, ReadRun, Request, Response, Upcall};
use varve_kernelfs::placement::STAY_MS;
use varve_kernelfs::{Config, KernelFs, PolicyName};
use varve_media::sim::Crash;
use varve_store::ShareRange;

fn world() -> World {
    world_of(PolicyName::Hierarchy)
}

fn world_of(placement_policy: PolicyName) -> World {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        placement_policy,
        ..Config::default()
    };
    World::with_tiers(config, &[("ssd", 24 << 20), ("hdd", 96 << 20)])
}

fn read_all(client: &Client, key: InodeKey) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < FILE {
        out.extend(read_at(client, key, out.len() as u64, 256 << 10));
    }
    out
}

fn read_at(client: &Client, key: InodeKey, offset: u64, len: u32) -> Vec<u8> {
    match client.link.call(Request::ReadData { key, offset, len }).unwrap() {
        Response::Bytes(bytes) | Response::Numbered(bytes, _) => bytes,
        other => panic!("{other:?}"),
    }
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
    for reads in 0..6 {
        assert!(read_all(&client, cold) == body(1));
        assert_eq!(kernel.place(), 0, "read {reads} times just after it came");
    }
    world.clock.advance_ms(STAY_MS);
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
        (0..2).for_each(|_| drop(read_all(&client, *key)));
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
        (0..2).for_each(|_| drop(read_all(&client, *key)));
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

/// Bytes of a unit of placement.
const UNIT: u64 = 64 << 10;

/// The tier of each unit of files; none moves in parts here.
fn places(kernel: &KernelFs, keys: &[InodeKey]) -> Vec<Tier> {
    let mut places = Vec::new();
    for key in keys {
        let units = FILE as u64 / UNIT;
        let mut of_file = vec![Tier::Nvm; units as usize];
        for extent in kernel.store().map(key.ino, FileBlock(0), 1000).unwrap() {
            for block in extent.file_block.0..extent.end().0 {
                of_file[(block * BLOCK_BYTES / UNIT) as usize] = extent.tier;
            }
        }
        places.extend(of_file);
    }
    places
}

#[test]
fn crash_while_units_of_a_file_move_leaves_it_whole() {
    let world = world();
    let keys = fill_nvm(&world.kernel);
    let client = world.client();
    client.read_lease(keys[0]);
    // Only every other unit of the file is in use.
    for unit in (0..FILE as u64 / UNIT).step_by(2) {
        read_at(&client, keys[0], unit * UNIT, 4096);
    }
    let (recording, moved) = world.sim.record(|| settle(&world.kernel));
    assert!(moved > 0);
    let in_use = |at: usize| {
        if at.is_multiple_of(2) {
            Tier::Nvm
        } else {
            Tier::Ssd
        }
    };
    let expected: Vec<Tier> = (0..16).map(in_use).collect();
    assert_eq!(places(&world.kernel, &keys[..1]), expected);
    for (at, point) in recording.durability_points().iter().enumerate() {
        for crash in [Crash::PowerSeeded(at as u64), Crash::Kill] {
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            let now = places(&after.kernel, &keys[..1]);
            let is_old_or_new = |(now, new): (&Tier, &Tier)| *now == Tier::Nvm || now == new;
            assert!(now.iter().zip(&expected).all(is_old_or_new), "{now:?}");
            for (seed, key) in (0..3).zip(&keys) {
                content_is_right(&after.kernel, *key, seed);
            }
            sound(&after.kernel);
        }
    }
}

#[test]
fn crash_while_a_policy_moves_units_leaves_all_files_whole() {
    for policy in PolicyName::ALL {
        let world = world_of(policy).with_times(1, 10);
        let kernel = &world.kernel;
        let keys: Vec<InodeKey> = (0..24)
            .map(|number| make_on(kernel, number, Tier::ALL[number as usize % 3]).unwrap())
            .collect();
        let client = world.client();
        let before = places(kernel, &keys);
        let (recording, moved) = world.sim.record(|| {
            let mut moved = 0;
            for step in 0..40_u64 {
                // Some units of a file on the disk and of one on the SSD are used much.
                for key in [keys[2], keys[4]] {
                    client.read_lease(key);
                    for unit in [1, 2, 5, 11] {
                        (0..8).for_each(|_| drop(read_at(&client, key, unit * UNIT, 4096)));
                    }
                }
                world.clock.advance_ms(100 + step);
                moved += kernel.place();
            }
            moved
        });
        let after = places(kernel, &keys);
        assert!(moved > 0 && before != after, "{policy:?} moves nothing");
        let points = recording.durability_points();
        println!("{policy:?}: {moved} blocks moved, {} points", points.len());
        for (at, point) in points.iter().enumerate() {
            let image = recording
                .image(point.index, Crash::PowerSeeded(at as u64))
                .into_world();
            let rig = World::start_on(image, &world.config);
            let now = places(&rig.kernel, &keys);
            let is_old_or_new = |(at, now): (usize, &Tier)| *now == before[at] || *now == after[at];
            // A unit may have been on a third tier on its way.
            let odd = now.iter().enumerate().filter(|at| !is_old_or_new(*at)).count();
            assert!(odd * 8 < now.len(), "{policy:?}: {odd} units are elsewhere");
            for (seed, key) in (0..).zip(&keys[..6]) {
                content_is_right(&rig.kernel, *key, seed);
            }
            sound(&rig.kernel);
        }
    }
}

/// Reads what lies on slower tiers, and nothing else, so that what moves up has to go down again.
fn adversary(policy: PolicyName) -> (usize, u64) {
    const FILES: u64 = 60;
    let world = world_of(policy).with_times(1, 10);
    let kernel = &world.kernel;
    let made = |number| make_on(kernel, number, Tier::ALL[number as usize % 3]).unwrap();
    let keys: Vec<InodeKey> = (0..FILES).map(made).collect();
    let client = world.client();
    for key in &keys {
        client.read_lease(*key);
    }
    let mut before = places(kernel, &keys);
    // Where each unit came from last, and when, in milliseconds.
    let mut came = vec![(Tier::Nvm, 0); before.len()];
    let (mut moves, mut moved) = (0, 0);
    for second in 1..=90_u64 {
        for (key, now) in keys.iter().zip(before.chunks(FILE / UNIT as usize)) {
            for (unit, tier) in (0..).zip(now) {
                let is_turn = (u64::from(*tier != Tier::Nvm) + second / 7).is_multiple_of(2);
                if is_turn && (key.ino.0 + second / 3) % 5 == 0 {
                    (0..4).for_each(|_| drop(read_at(&client, *key, unit * UNIT, 4096)));
                }
            }
        }
        for _ in 0..4 {
            let begun_ms = varve_ipc::Clock::monotonic_ms(&*world.clock);
            moved += kernel.place();
            let now_ms = varve_ipc::Clock::monotonic_ms(&*world.clock);
            world.clock.advance_ms(250);
            let now = places(kernel, &keys);
            for (at, (was, is)) in before.iter().zip(&now).enumerate() {
                if was == is {
                    continue;
                }
                moves += 1;
                let (from, since_ms) = came[at];
                let back = *is == from && since_ms > 0 && now_ms - since_ms < STAY_MS;
                assert!(
                    !back,
                    "{policy:?}: unit {at} is back on {is:?} after {} ms",
                    now_ms - since_ms
                );
                came[at] = (*was, begun_ms);
            }
            before = now;
        }
    }
    for (seed, key) in (0..).zip(&keys) {
        content_is_right(kernel, *key, seed);
    }
    sound(kernel);
    (moves, moved)
}

#[test]
fn status_tells_the_times_that_devices_take() {
    let world = world().with_times(2, 10);
    let kernel = &world.kernel;
    for tier in [Tier::Ssd, Tier::Hdd] {
        let key = make_on(kernel, tier as u64, tier).unwrap();
        content_is_right(kernel, key, tier as u64);
    }
    let [_, ssd, hdd] = &kernel.status().tiers[..] else {
        panic!("three tiers")
    };
    for (tier, ns) in [(ssd, 2_000_000), (hdd, 10_000_000)] {
        assert_eq!(tier.figures.read.response_ns, Some(ns), "{tier:?}");
        assert_eq!(tier.figures.write.response_ns, Some(ns), "{tier:?}");
        assert!(tier.figures.read.samples > 0 && !tier.figures.read.by_size.is_empty());
    }
}

#[test]
fn no_policy_takes_a_unit_back_at_once_whatever_is_read() {
    for policy in PolicyName::ALL {
        let (moves, blocks) = adversary(policy);
        println!("{policy:?}: {moves} units moved, {blocks} blocks");
        assert!(moves > 0, "{policy:?} moves nothing");
    }
}

#[test]
fn pool_of_each_policy_works_until_it_is_full_and_says_which_it_is() {
    for policy in PolicyName::ALL {
        let world = world_of(policy);
        let kernel = &world.kernel;
        assert_eq!(kernel.status().placement_policy, policy.name());
        let mut client = world.client();
        client.write_lease(ROOT);
        let mut keys = Vec::new();
        for (key, _) in client.alloc(16) {
            let name = format!("of{}", keys.len());
            client.create(name.as_bytes(), key);
            let data = body(keys.len() as u64);
            for (at, part) in data.chunks(64 << 10).enumerate() {
                let offset = at as u64 * UNIT;
                client.log_op(&LogOp::Write {
                    key,
                    offset,
                    data: part,
                });
            }
            kernel.digest_all().unwrap();
            client.offset = varve_format::log::LIVE_HEADER_SIZE as u64;
            keys.push(key);
            world.clock.advance_ms(300);
            kernel.place();
        }
        let mut made = Vec::new();
        while made.len() < 200 {
            match make(kernel, 100 + made.len() as u64) {
                Ok(key) => made.push(key),
                Err(error) => {
                    assert!(
                        matches!(error, varve_store::StoreError::NoSpace { .. }),
                        "{error}"
                    );
                    break;
                }
            }
            kernel.place();
        }
        assert!(made.len() > 70, "{policy:?}: {} files", made.len());
        settle(kernel);
        for (seed, key) in (0..).zip(&keys) {
            content_is_right(kernel, *key, seed);
        }
        for (seed, key) in (100..).zip(&made) {
            content_is_right(kernel, *key, seed);
        }
        sound(kernel);
    }
}

/// Fills NVM, has one of two files read six times, and returns the blocks that come back up of both.
fn warmed(read: impl Fn(&Client, InodeKey)) -> [u64; 2] {
    let world = world();
    let kernel = &world.kernel;
    let keys = fill_nvm(kernel);
    let client = world.client();
    settle(kernel);
    assert_eq!(blocks_on(kernel, keys[1].ino, Tier::Nvm), 0);
    client.read_lease(keys[1]);
    for _ in 0..6 {
        read(&client, keys[1]);
        kernel.place();
    }
    world.clock.advance_ms(STAY_MS);
    settle(kernel);
    [1, 2].map(|at| blocks_on(kernel, keys[at].ino, Tier::Nvm))
}

#[test]
fn reads_by_the_session_itself_count_as_those_by_the_daemon() {
    let of_daemon = warmed(|client, key| drop(read_all(client, key)));
    let run = |key, at| ReadRun {
        key,
        from: FileBlock(at * 64),
        blocks: 64,
    };
    let told = warmed(|client, key| {
        let reads = (0..FILE as u64 / (256 << 10)).map(|at| run(key, at)).collect();
        assert_eq!(client.link.call(Request::NoteReads { reads }), Ok(Response::Done));
    });
    assert_eq!(told, of_daemon);
    assert_eq!(told[0], FILE as u64 / BLOCK_BYTES);
    assert_eq!(warmed(|_, _| ())[0], 0, "what was not read stays");
}

#[test]
fn report_of_reads_is_refused_of_others_and_bounded() {
    let world = World::new();
    let other = varve_ipc::Peer {
        uid: 4711,
        ..varve_ipc::Peer::this_process()
    };
    let (owner, other) = (world.client(), world.client_as(other, common::hello()));
    let run = ReadRun {
        key: InodeKey::new(77, 1),
        from: FileBlock(u64::MAX - 1),
        blocks: u32::MAX,
    };
    let told = |client: &Client, count| {
        let reads = vec![run; count];
        client.link.call(Request::NoteReads { reads })
    };
    // What it has no lease on is left out.
    assert_eq!(told(&owner, 1), Ok(Response::Done));
    assert_eq!(told(&owner, READS_MAX + 1), Err(IpcError::Errno(libc::E2BIG)));
    assert_eq!(told(&other, 1), Err(IpcError::Errno(libc::EPERM)));
}
