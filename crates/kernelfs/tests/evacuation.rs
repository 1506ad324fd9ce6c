//! Evacuation of a tier, step by step: what moves, where new data goes, what waits and says why, what a
//! restart and each point of a crash leave.
#![allow(clippy::unwrap_used)]

mod common;

use common::files::{
    FILE, FILE_BLOCKS, all_right, blocks_on, body, content_is_right, make, make_empty, make_many, make_on,
    settle, share, sound,
};
use common::{Client, ROOT, World};
use varve_format::log::CHUNK_BYTES;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, IpcError, JobAct, Link, Peer, Pinned, Request, Response, Upcall};
use varve_kernelfs::{Config, EvacuationAsked, JobState, JobStatus, KernelFs, PolicyName};
use varve_media::sim::Crash;

fn world_of(placement_policy: PolicyName, ssd: u64, hdd: u64) -> World {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        placement_policy,
        ..Config::default()
    };
    World::with_tiers(config, &[("ssd", ssd << 20), ("hdd", hdd << 20)])
}

fn world() -> World {
    world_of(PolicyName::Hierarchy, 24, 96)
}

fn ask<T: serde::de::DeserializeOwned>(kernel: &KernelFs, admin: Admin) -> Result<T, IpcError> {
    match kernel.admin_request(Peer::this_process(), admin)? {
        Response::Json(json) => Ok(serde_json::from_str(&json).unwrap()),
        other => panic!("{other:?}"),
    }
}

fn evacuate(kernel: &KernelFs, tier: Tier, partly: bool) -> Result<EvacuationAsked, IpcError> {
    ask(kernel, Admin::Evacuate { tier, partly })
}

fn start(kernel: &KernelFs, tier: Tier, partly: bool) -> u64 {
    match evacuate(kernel, tier, partly).unwrap() {
        EvacuationAsked::Started(job) => job.id,
        other @ EvacuationAsked::NoRoom { .. } => panic!("{other:?}"),
    }
}

fn act(kernel: &KernelFs, id: u64, act: JobAct) -> Result<JobStatus, IpcError> {
    ask(kernel, Admin::Job { id, act })
}

fn job(kernel: &KernelFs) -> JobStatus {
    let jobs: Vec<JobStatus> = ask(kernel, Admin::Jobs).unwrap();
    jobs.into_iter().next().unwrap()
}

fn used(kernel: &KernelFs, tier: Tier) -> u64 {
    let stats = kernel.store().space().tiers[tier as usize];
    stats.total - stats.free - stats.pending
}

/// Steps until the job has ended.
fn finish(world: &World) -> JobStatus {
    for _ in 0..500 {
        world.kernel.place();
        world.clock.advance_ms(100);
        if job(&world.kernel).state == JobState::Done {
            return job(&world.kernel);
        }
    }
    panic!("it does not end: {:?}", job(&world.kernel));
}

#[test]
fn tier_becomes_empty_and_stays_so_until_the_job_is_cancelled() {
    for policy in PolicyName::ALL {
        let world = world_of(policy, 24, 96);
        let kernel = &world.kernel;
        let keys = make_many(kernel, 12, Tier::Ssd);
        // Shared, pinned there, and excluded from moves: all of it has to go.
        let clone = make_empty(kernel, b"clone").unwrap();
        share(kernel, keys[0], clone);
        for (key, to) in [(keys[1], PinTo::Tier(Tier::Ssd)), (keys[2], PinTo::Stay)] {
            let mut tx = kernel.store().begin().unwrap();
            let by = PinnedBy::Command;
            tx.set_pin(key.ino, Pin { to, by }).unwrap();
            tx.commit().unwrap();
        }
        kernel.store().demote(u64::MAX).unwrap();
        assert!(used(kernel, Tier::Ssd) > 12 * FILE_BLOCKS);
        let id = start(kernel, Tier::Ssd, false);
        assert_eq!(job(kernel).state, JobState::Running);
        let told = finish(&world);
        assert_eq!((told.id, told.tier.as_str(), told.left_bytes), (id, "ssd", 0));
        assert_eq!(told.moved_bytes, 12 * FILE as u64);
        // Much of it came back when the data of its files moved.
        assert!(told.moved_metadata_bytes > 0, "{told:?}");
        assert!(told.stays.is_empty(), "{told:?}");
        all_right(kernel, &keys);
        content_is_right(kernel, clone, 0);
        assert_eq!(blocks_on(kernel, clone.ino, Tier::Ssd), 0);

        // New data goes elsewhere, whatever wants it there.
        let more = make_on(kernel, 100, Tier::Ssd).unwrap();
        kernel.place();
        assert_eq!(used(kernel, Tier::Ssd), 0);
        content_is_right(kernel, more, 100);
        let status = kernel.status();
        assert!(status.tiers[1].evacuated && !status.tiers[2].evacuated);
        assert_eq!(status.operator_jobs.len(), 1);
        let waits = |line: &String| line.contains("waiting: ssd is evacuated");
        // Pins look again after a rest of 600 steps.
        let told = (0..700).any(|_| {
            kernel.place();
            kernel.status().jobs.iter().any(waits)
        });
        assert!(told, "{:?}", kernel.status().jobs);

        let last = act(kernel, id, JobAct::Cancel).unwrap();
        assert_eq!(last.state, JobState::Done);
        assert_eq!(ask::<Vec<JobStatus>>(kernel, Admin::Jobs).unwrap(), []);
        world.clock.advance_ms(60_000);
        settle(kernel);
        assert_eq!(
            blocks_on(kernel, keys[1].ino, Tier::Ssd),
            FILE_BLOCKS,
            "it is pinned there"
        );
        assert_eq!(blocks_on(kernel, keys[2].ino, Tier::Ssd), 0, "it is not moved");
        make_on(kernel, 101, Tier::Ssd).unwrap();
        assert!(used(kernel, Tier::Ssd) >= 2 * FILE_BLOCKS);
        all_right(kernel, &keys);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let world = World::with_tiers(Config::default(), &[("ssd", 24 << 20)]);
    let kernel = &world.kernel;
    let refused = |asked: Result<EvacuationAsked, IpcError>| match asked {
        Err(IpcError::Errno(errno)) => errno,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(evacuate(kernel, Tier::Nvm, false)), libc::EINVAL);
    assert_eq!(refused(evacuate(kernel, Tier::Hdd, false)), libc::ENXIO);
    let id = start(kernel, Tier::Ssd, false);
    assert_eq!(refused(evacuate(kernel, Tier::Ssd, true)), libc::EEXIST);
    assert_eq!(
        act(kernel, id + 1, JobAct::Pause),
        Err(IpcError::Errno(libc::ENOENT))
    );
    let none = act(kernel, id, JobAct::Limit(Some(0)));
    assert_eq!(none, Err(IpcError::Errno(libc::EINVAL)));
    act(kernel, id, JobAct::Cancel).unwrap();
    assert_eq!(
        act(kernel, id, JobAct::Cancel),
        Err(IpcError::Errno(libc::ENOENT))
    );
    assert!(start(kernel, Tier::Ssd, false) > id, "numbers are not used twice");
    // Neither root nor the pool's owner.
    let stranger = Peer {
        uid: 12_345,
        ..Peer::this_process()
    };
    for admin in [
        Admin::Jobs,
        Admin::Evacuate {
            tier: Tier::Ssd,
            partly: true,
        },
        Admin::Job {
            id,
            act: JobAct::Cancel,
        },
    ] {
        let answer = kernel.admin_request(stranger, admin);
        assert_eq!(answer, Err(IpcError::Errno(libc::EPERM)));
    }
}

#[test]
fn what_does_not_fit_is_refused_with_figures_and_waits_for_room_if_asked_to() {
    let world = world_of(PolicyName::Hierarchy, 48, 24);
    let kernel = &world.kernel;
    let hdd = make_many(kernel, 18, Tier::Hdd);
    let nvm: Vec<_> = (100..108).map(|number| make(kernel, number).unwrap()).collect();
    let ssd: Vec<_> = (200..230)
        .map(|number| make_on(kernel, number, Tier::Ssd).unwrap())
        .collect();
    let before = used(kernel, Tier::Ssd);
    let EvacuationAsked::NoRoom {
        used_bytes,
        room_bytes,
        high_percent,
    } = evacuate(kernel, Tier::Ssd, false).unwrap()
    else {
        panic!("it fits")
    };
    assert_eq!((used_bytes, high_percent), (before * BLOCK_BYTES, 95));
    assert!(room_bytes < used_bytes && room_bytes > 0, "{room_bytes}");
    kernel.place();
    assert_eq!(used(kernel, Tier::Ssd), before, "nothing has begun");

    start(kernel, Tier::Ssd, true);
    for _ in 0..200 {
        kernel.place();
        world.clock.advance_ms(100);
    }
    let told = job(kernel);
    assert_eq!(told.state, JobState::Waiting, "{told:?}");
    assert!(told.moved_bytes > 0 && told.left_bytes > 0);
    let reasons: Vec<_> = told.stays.keys().collect();
    let full = |reason: &&&String| reason.starts_with("waiting: ") && reason.ends_with("% full");
    assert!(reasons.iter().any(|reason| full(&reason)), "{reasons:?}");
    assert!(told.stays.values().sum::<u64>() >= told.left_bytes, "{told:?}");
    // As soon as there is room it goes on, long before the end of its rest.
    for (number, _) in hdd.iter().enumerate() {
        common::files::unlink(kernel, &format!("f{number}"));
    }
    kernel.store().checkpoint().unwrap();
    for _ in 0..50 {
        kernel.place();
        world.clock.advance_ms(20);
    }
    assert!(job(kernel).moved_bytes > told.moved_bytes, "{:?}", job(kernel));
    finish(&world);
    for (seed, key) in (100..).zip(&nvm).chain((200..).zip(&ssd)) {
        content_is_right(kernel, *key, seed);
    }
    sound(kernel);
}

#[test]
fn job_goes_on_after_restarts_and_keeps_its_limit_and_its_pause() {
    let mut world = world();
    let keys = make_many(&world.kernel, 12, Tier::Ssd);
    let id = start(&world.kernel, Tier::Ssd, false);
    let limit = 4 << 20;
    act(&world.kernel, id, JobAct::Limit(Some(limit))).unwrap();
    let mut before = 0;
    for _ in 0..3 {
        for _ in 0..5 {
            world.kernel.place();
            world.clock.advance_ms(100);
        }
        let told = job(&world.kernel);
        assert!(told.moved_bytes > before, "{told:?}");
        assert!(told.moved_bytes - before <= limit / 2 + (1 << 20), "{told:?}");
        before = told.moved_bytes;
        world = world.restart();
        let again = job(&world.kernel);
        assert_eq!(
            (again.id, again.moved_bytes, again.limit_bytes_per_s),
            (id, before, Some(limit))
        );
    }
    act(&world.kernel, id, JobAct::Pause).unwrap();
    world = world.restart();
    assert_eq!(settle(&world.kernel), 0);
    let told = job(&world.kernel);
    assert_eq!((told.state, told.moved_bytes), (JobState::Paused, before));
    make_on(&world.kernel, 100, Tier::Ssd).unwrap();
    assert_eq!(
        job(&world.kernel).left_bytes,
        told.left_bytes,
        "new data goes elsewhere"
    );
    act(&world.kernel, id, JobAct::Resume).unwrap();
    act(&world.kernel, id, JobAct::Limit(None)).unwrap();
    let told = finish(&world);
    assert_eq!((told.id, told.moved_bytes), (id, 12 * FILE as u64));
    all_right(&world.kernel, &keys);
    world = world.restart();
    assert_eq!(job(&world.kernel).state, JobState::Done);
}

#[test]
fn job_is_not_done_while_a_session_may_read_what_was_moved() {
    let world = world();
    let kernel = &world.kernel;
    let keys = make_many(kernel, 2, Tier::Ssd);
    let client = world.client();
    client.read_lease(keys[0]);
    let map = Request::MapExtents {
        key: keys[0],
        from: FileBlock(0),
        max: 100,
    };
    assert!(matches!(client.link.call(map), Ok(Response::Extents(..))));
    start(kernel, Tier::Ssd, false);
    for _ in 0..20 {
        kernel.place();
        world.clock.advance_ms(10);
    }
    let told = job(kernel);
    assert_eq!((told.state, told.left_bytes), (JobState::Waiting, 0), "{told:?}");
    let reason = format!("waiting: in use by session {}", client.welcome.session.0);
    assert!(told.stays.contains_key(&reason), "{told:?}");
    while let Ok(Some(Upcall::Barrier { tx, .. })) = client.link.upcall(std::time::Duration::ZERO) {
        assert_eq!(client.link.call(Request::BarrierAck { tx }), Ok(Response::Done));
    }
    finish(&world);
    all_right(kernel, &keys);
}

#[test]
fn data_that_had_no_other_place_goes_to_the_tier_and_leaves_it_again() {
    let world = world_of(PolicyName::Hierarchy, 24, 24);
    let kernel = &world.kernel;
    let id = start(kernel, Tier::Ssd, false);
    finish(&world);
    let mut made = Vec::new();
    while used(kernel, Tier::Ssd) < 4 * FILE_BLOCKS {
        made.push(make_on(kernel, made.len() as u64, Tier::Ssd).unwrap());
        kernel.place();
        world.clock.advance_ms(100);
    }
    assert!(made.len() > 30, "{} files", made.len());
    assert_ne!(job(kernel).state, JobState::Done);
    for number in 0..12 {
        common::files::unlink(kernel, &format!("f{number}"));
    }
    kernel.store().checkpoint().unwrap();
    world.clock.advance_ms(10_000);
    assert_eq!(finish(&world).id, id);
    for (seed, key) in (12..).zip(&made[12..]) {
        content_is_right(kernel, *key, seed);
    }
    sound(kernel);
}

/// Writes parts of files through a session, and has them digested.
struct Writer {
    client: Client,
    keys: Vec<InodeKey>,
    written: u64,
}

impl Writer {
    fn new(world: &World, keys: &[InodeKey]) -> Self {
        let client = world.client();
        for key in keys {
            client.write_lease(*key);
        }
        Self {
            client,
            keys: keys.to_vec(),
            written: 0,
        }
    }

    /// The part of a file that write `number` overwrites, with what is there already.
    fn at(number: u64) -> usize {
        (number as usize * 37 % 250) * 4096
    }

    fn step(&mut self, kernel: &KernelFs) {
        for (seed, key) in (0..).zip(&self.keys) {
            let at = Self::at(self.written);
            self.client.log_op(&LogOp::Write {
                key: *key,
                offset: at as u64,
                data: &body(seed)[at..at + 4096],
            });
            self.written += 1;
        }
        kernel.digest_all().unwrap();
        self.client.offset = varve_format::log::LIVE_HEADER_SIZE as u64;
    }
}

#[test]
fn crash_at_each_point_of_an_evacuation_beside_writers_loses_nothing() {
    let world = world();
    let kernel = &world.kernel;
    let keys = make_many(kernel, 6, Tier::Ssd);
    let clone = make_empty(kernel, b"clone").unwrap();
    share(kernel, keys[5], clone);
    kernel.store().demote(u64::MAX).unwrap();
    let mut writer = Writer::new(&world, &keys[..3]);
    kernel.store().checkpoint().unwrap();
    let (recording, id) = world.sim.record(|| {
        let id = start(kernel, Tier::Ssd, false);
        act(kernel, id, JobAct::Limit(Some(8 << 20))).unwrap();
        for _ in 0..40 {
            kernel.place();
            writer.step(kernel);
            world.clock.advance_ms(100);
            if job(kernel).state == JobState::Done {
                break;
            }
        }
        id
    });
    assert_eq!(job(kernel).state, JobState::Done, "{:?}", job(kernel));
    let all = job(kernel).moved_bytes;
    let points = recording.durability_points();
    println!(
        "{} points, {} writes, {all} bytes moved",
        points.len(),
        writer.written
    );
    assert!(points.len() > 60, "{}", points.len());
    let (mut found, mut before) = (0, 0);
    let mut images = 0;
    for (at, point) in points.iter().enumerate() {
        for crash in [Crash::PowerSeeded(at as u64), Crash::Kill, Crash::PowerNone] {
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            images += 1;
            all_right(&after.kernel, &keys);
            content_is_right(&after.kernel, clone, 5);
            let rows = after.kernel.store().evacuations().unwrap();
            let row = rows[Tier::Ssd as usize];
            if !row.is_job() {
                continue;
            }
            found += 1;
            assert_eq!(row.job.get(), id);
            let moved = row.moved_bytes.get();
            assert!(moved <= all, "{moved} of {all}");
            before = moved.max(before);
            if images % 8 == 0 {
                act(&after.kernel, id, JobAct::Limit(None)).unwrap();
                finish(&after);
                assert_eq!(used(&after.kernel, Tier::Ssd), 0);
                all_right(&after.kernel, &keys);
            } else if images % 8 == 4 {
                act(&after.kernel, id, JobAct::Cancel).unwrap();
                settle(&after.kernel);
                all_right(&after.kernel, &keys);
            }
        }
    }
    println!("{images} images, {found} with the job");
    assert!(found > images / 2 && before > all / 2, "{found}, {before}");
}

#[test]
fn data_that_cannot_be_read_stays_and_is_told() {
    let world = world();
    let kernel = &world.kernel;
    let keys = make_many(kernel, 3, Tier::Ssd);
    let extent = kernel.store().map(keys[1].ino, FileBlock(0), 1).unwrap()[0];
    let ssd = kernel.store().devices().ssd.clone().unwrap();
    ssd.write((extent.block.0 + 40) * BLOCK_BYTES, &[0xee; 4096])
        .unwrap();
    let id = start(kernel, Tier::Ssd, false);
    for _ in 0..100 {
        kernel.place();
        world.clock.advance_ms(100);
    }
    let told = job(kernel);
    assert_eq!(told.state, JobState::Incomplete, "{told:?}");
    let unit = 64 << 10;
    assert_eq!(told.left_bytes, unit);
    assert_eq!(told.stays.get("its data cannot be read"), Some(&unit), "{told:?}");
    content_is_right(kernel, keys[0], 0);
    content_is_right(kernel, keys[2], 2);
    // It is written anew.
    let mut tx = kernel.store().begin().unwrap();
    let target = varve_store::DataTarget::prefer(Tier::Nvm);
    tx.write_bytes(keys[1].ino, &[(0, &body(1))], target).unwrap();
    tx.commit().unwrap();
    act(kernel, id, JobAct::Resume).unwrap();
    finish(&world);
    all_right(kernel, &keys);
}

#[test]
fn pinned_inodes_named_by_a_request_stay_pinned() {
    let world = world();
    let kernel = &world.kernel;
    let key = make(kernel, 0).unwrap();
    start(kernel, Tier::Hdd, false);
    let pin = Pin {
        to: PinTo::Tier(Tier::Hdd),
        by: PinnedBy::Command,
    };
    let inode = Pinned {
        key,
        name: Some((ROOT, b"f0".to_vec())),
    };
    let set: varve_kernelfs::PinsSet = ask(
        kernel,
        Admin::Pin {
            inodes: vec![inode],
            pin,
            over_own: true,
        },
    )
    .unwrap();
    assert_eq!(set.set, 1);
    assert_eq!(settle(kernel), 0);
    assert_eq!(blocks_on(kernel, key.ino, Tier::Hdd), 0);
    act(kernel, 1, JobAct::Cancel).unwrap();
    assert_eq!(settle(kernel), FILE_BLOCKS);
    assert_eq!(blocks_on(kernel, key.ino, Tier::Hdd), FILE_BLOCKS);
    all_right(kernel, &[key]);
}
