//! Devices of a tier that come and go in service: what moves, what waits, sessions that read, writers beside,
//! a device that fails, and what each point of a crash leaves.
#![allow(clippy::unwrap_used)]

mod common;

use common::files::{
    FILE, FILE_BLOCKS, all_right, blocks_on, body, content_is_right, make_empty, make_many, make_on, settle,
    share, sound,
};
use common::{Client, World, devices};
use std::sync::Arc;
use varve_format::log::CHUNK_BYTES;
use varve_format::{BLOCK_BYTES, FallocateMode, FileBlock, InodeKey, LogOp, Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, IpcError, JobAct, Link, Peer, RemovalAct, Request, Response, Upcall};
use varve_kernelfs::{Config, DeviceAsked, JobState, JobStatus, KernelFs, Parts, PolicyName, TierDevice};
use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
use varve_media::sim::Crash;
use varve_store::{OpenOptions, Store};

/// A pool with two SSDs.
fn world_of(ssd: u64, second: u64) -> World {
    let config = Config {
        log_initial_bytes: CHUNK_BYTES,
        placement_policy: PolicyName::Hierarchy,
        ..Config::default()
    };
    let tiers = [("ssd", ssd << 20), ("hdd", 96 << 20), ("ssd-2", second << 20)];
    let world = World::with_tiers(config, &tiers);
    let device = world.sim.block("ssd-2").unwrap() as _;
    world
        .kernel
        .store()
        .add_device(Tier::Ssd, &device, [5; 16])
        .unwrap();
    world
}

fn ask(kernel: &KernelFs, device: &str, act: RemovalAct) -> Result<DeviceAsked, IpcError> {
    let device = device.to_owned();
    match kernel.admin_request(Peer::this_process(), Admin::RemoveDevice { device, act })? {
        Response::Json(json) => Ok(serde_json::from_str(&json).unwrap()),
        other => panic!("{other:?}"),
    }
}

fn act(kernel: &KernelFs, id: u64, act: JobAct) -> JobStatus {
    match kernel.admin_request(Peer::this_process(), Admin::Job { id, act }) {
        Ok(Response::Json(json)) => serde_json::from_str(&json).unwrap(),
        other => panic!("{other:?}"),
    }
}

fn jobs(kernel: &KernelFs) -> Vec<JobStatus> {
    kernel.status().operator_jobs
}

/// Steps that many times.
fn steps(world: &World, times: usize) {
    for _ in 0..times {
        world.kernel.place();
        world.clock.advance_ms(100);
    }
}

fn begin(kernel: &KernelFs, device: &str) -> DeviceAsked {
    ask(kernel, device, RemovalAct::Begin { partly: false }).unwrap()
}

fn listed(kernel: &KernelFs) -> Vec<TierDevice> {
    kernel.status().devices
}

fn ssds(kernel: &KernelFs) -> Vec<(String, String)> {
    let of_tier = listed(kernel).into_iter().filter(|device| device.tier == "ssd");
    of_tier.map(|device| (device.name, device.state)).collect()
}

/// Steps until a device is out of the pool.
fn finish(world: &World, name: &str) {
    for _ in 0..300 {
        if listed(&world.kernel).iter().all(|device| device.name != name) {
            return;
        }
        world.kernel.place();
        world.clock.advance_ms(100);
    }
    panic!("it does not end: {:?}", listed(&world.kernel));
}

#[test]
fn device_is_emptied_in_service_and_taken_out() {
    for name in ["ssd-2", "ssd"] {
        let world = world_of(24, 24);
        let kernel = &world.kernel;
        let keys = make_many(kernel, 12, Tier::Ssd);
        // Shared, pinned to the tier, and excluded from moves: all of it has to go, and stays on the tier.
        let clone = make_empty(kernel, b"clone").unwrap();
        share(kernel, keys[0], clone);
        for (key, to) in [(keys[1], PinTo::Tier(Tier::Ssd)), (keys[2], PinTo::Stay)] {
            let mut tx = kernel.store().begin().unwrap();
            let by = PinnedBy::Command;
            tx.set_pin(key.ino, Pin { to, by }).unwrap();
            tx.commit().unwrap();
        }
        kernel.store().demote(u64::MAX).unwrap();
        let before = listed(kernel);
        assert!(
            before
                .iter()
                .filter(|device| device.tier == "ssd")
                .all(|device| device.used_bytes > 1 << 20)
        );
        let DeviceAsked::Done(begun) = begin(kernel, name) else {
            panic!("it fits")
        };
        assert_eq!((begun.state.as_str(), begun.name.as_str()), ("emptying", name));
        assert_eq!(begun.job, Some(1));
        let job = jobs(kernel).remove(0);
        let told = (
            job.id,
            job.kind.as_str(),
            job.tier.as_str(),
            job.device.as_deref(),
        );
        assert_eq!(told, (1, "remove", "ssd", Some(name)));
        assert_eq!((job.state, job.left_bytes), (JobState::Running, begun.used_bytes));
        finish(&world, name);
        assert_eq!(jobs(kernel), [], "it ends with the device");
        all_right(kernel, &keys);
        content_is_right(kernel, clone, 0);
        for key in &keys[..3] {
            assert_eq!(
                blocks_on(kernel, key.ino, Tier::Ssd),
                FILE_BLOCKS,
                "the tier keeps it"
            );
        }
        assert_eq!(ssds(kernel).len(), 1);
        let again = begin(kernel, name);
        assert!(
            matches!(&again, DeviceAsked::Refused(why) if why.contains("no device")),
            "{again:?}"
        );
        let last = begin(kernel, if name == "ssd" { "ssd-2" } else { "ssd" });
        assert!(
            matches!(&last, DeviceAsked::Refused(why) if why.contains("keeps one")),
            "{last:?}"
        );
        let world = world.restart();
        all_right(&world.kernel, &keys);
        assert_eq!(ssds(&world.kernel).len(), 1);
    }
}

#[test]
fn job_of_a_device_is_paused_bounded_and_cancelled_and_goes_on_after_restarts() {
    let mut world = world_of(24, 24);
    let keys = make_many(&world.kernel, 12, Tier::Ssd);
    begin(&world.kernel, "ssd-2");
    let limit = 2 << 20;
    act(&world.kernel, 1, JobAct::Limit(Some(limit)));
    let mut before = 0;
    for _ in 0..3 {
        steps(&world, 5);
        let told = jobs(&world.kernel).remove(0);
        assert!(told.moved_bytes > before, "{told:?}");
        assert!(told.moved_bytes - before <= limit / 2 + (1 << 20), "{told:?}");
        before = told.moved_bytes;
        world = world.restart();
        let again = jobs(&world.kernel).remove(0);
        assert_eq!(
            (again.id, again.moved_bytes, again.limit_bytes_per_s),
            (1, before, Some(limit))
        );
    }
    act(&world.kernel, 1, JobAct::Limit(None));
    assert_eq!(act(&world.kernel, 1, JobAct::Pause).state, JobState::Paused);
    world = world.restart();
    steps(&world, 20);
    let told = jobs(&world.kernel).remove(0);
    assert_eq!((told.state, told.moved_bytes), (JobState::Paused, before));
    let why = listed(&world.kernel).into_iter().find_map(|device| device.why);
    assert_eq!(why.as_deref(), Some("its job is paused"));
    let last = act(&world.kernel, 1, JobAct::Cancel);
    assert_eq!(last.moved_bytes, before);
    assert_eq!(ssds(&world.kernel)[1].1, "in use");
    assert_eq!(jobs(&world.kernel), []);
    // What was moved is not moved back. A device that is empty stays while its job is paused.
    begin(&world.kernel, "ssd-2");
    act(&world.kernel, 2, JobAct::Pause);
    act(&world.kernel, 2, JobAct::Resume);
    finish(&world, "ssd-2");
    all_right(&world.kernel, &keys);
    world = world.restart();
    assert_eq!((jobs(&world.kernel).len(), ssds(&world.kernel).len()), (0, 1));
}

#[test]
fn each_byte_that_stays_on_a_device_has_a_reason() {
    let world = world_of(24, 48);
    let kernel = &world.kernel;
    let keys = make_many(kernel, 50, Tier::Ssd);
    // It cannot be read.
    let on_it = |key: &InodeKey| {
        let extents = kernel.store().map(key.ino, FileBlock(0), 1000).unwrap();
        let first = kernel.store().device_list().unwrap()[1].numbers.0;
        extents
            .into_iter()
            .find(|extent| extent.tier == Tier::Ssd && extent.block.0 >= first)
    };
    let (bad, extent) = keys.iter().find_map(|key| Some((*key, on_it(key)?))).unwrap();
    let ssd = kernel.store().devices().ssd.clone().unwrap();
    ssd.write(extent.block.0 * BLOCK_BYTES, &[0xee; 4096]).unwrap();
    // Nothing else has room but for a few MiB.
    let mut number = 100;
    while let Ok(key) = make_on(kernel, number, Tier::Hdd) {
        number += 1;
        let stats = kernel.store().space().tiers[Tier::Hdd as usize];
        if stats.free < stats.total / 18 || blocks_on(kernel, key.ino, Tier::Hdd) == 0 {
            break;
        }
    }
    let partly = RemovalAct::Begin { partly: true };
    assert!(matches!(ask(kernel, "ssd-2", partly), Ok(DeviceAsked::Done(_))));
    steps(&world, 200);
    let told = jobs(kernel).remove(0);
    assert_eq!(told.state, JobState::Waiting, "{told:?}");
    let lost = told.stays.get("its data cannot be read").copied();
    assert!(lost.is_some_and(|bytes| bytes <= 64 << 10), "{told:?}");
    let full = |reason: &&String| reason.starts_with("waiting: ") && reason.ends_with("% full");
    assert!(told.stays.keys().any(|reason| full(&reason)), "{told:?}");
    assert_eq!(told.stays.values().sum::<u64>(), told.left_bytes, "{told:?}");
    // Room and new content let it end.
    for other in 100..number {
        common::files::unlink(kernel, &format!("f{other}"));
    }
    kernel.store().checkpoint().unwrap();
    let seed = keys.iter().position(|key| *key == bad).unwrap() as u64;
    let mut tx = kernel.store().begin().unwrap();
    let target = varve_store::DataTarget::prefer(Tier::Nvm);
    tx.write_bytes(bad.ino, &[(0, &body(seed))], target).unwrap();
    tx.commit().unwrap();
    act(kernel, 1, JobAct::Resume);
    finish(&world, "ssd-2");
    all_right(kernel, &keys);
}

#[test]
fn removal_that_does_not_fit_is_refused_with_figures_and_can_be_cancelled() {
    let world = world_of(24, 96);
    let kernel = &world.kernel;
    let keys = make_many(kernel, 70, Tier::Ssd);
    let asked = begin(kernel, "ssd-2");
    // Promised space is no room.
    let DeviceAsked::Done(_) = asked else {
        panic!("{asked:?}")
    };
    let kept = ask(kernel, "05050505", RemovalAct::Cancel).unwrap();
    assert!(
        matches!(&kept, DeviceAsked::Done(device) if device.state == "in use"),
        "{kept:?}"
    );
    let nothing = ask(kernel, "ssd-2", RemovalAct::Cancel).unwrap();
    assert!(
        matches!(&nothing, DeviceAsked::Refused(why) if why.contains("nothing to cancel")),
        "{nothing:?}"
    );
    let available = kernel.store().space().available;
    let device = kernel.store().device_list().unwrap().remove(1);
    let promised = available - device.free - device.used() + 10;
    kernel.store().reserve(promised).unwrap();
    let asked = begin(kernel, "ssd-2");
    let DeviceAsked::NoRoom {
        used_bytes,
        room_bytes,
    } = asked
    else {
        panic!("{asked:?}")
    };
    assert_eq!(used_bytes, device.used() * BLOCK_BYTES);
    assert_eq!(room_bytes, used_bytes - 10 * BLOCK_BYTES);
    assert_eq!(ssds(kernel)[1].1, "in use");
    kernel.store().unreserve(promised);
    all_right(kernel, &keys);
}

#[test]
fn removal_of_an_empty_device_whose_room_was_promised_is_refused() {
    let world = world_of(24, 96);
    let kernel = &world.kernel;
    let space = kernel.store().space();
    let device = kernel.store().device_list().unwrap().remove(1);
    let promised = space.available - device.free + 1;
    kernel.store().reserve(promised).unwrap();
    let asked = begin(kernel, "ssd-2");
    assert!(
        matches!(asked, DeviceAsked::NoRoom { used_bytes: 0, .. }),
        "{asked:?}"
    );
    // One that is begun all the same waits until the promise is kept.
    let partly = RemovalAct::Begin { partly: true };
    assert!(matches!(ask(kernel, "ssd-2", partly), Ok(DeviceAsked::Done(_))));
    settle(kernel);
    assert_eq!(ssds(kernel)[1].1, "emptying");
    kernel.store().unreserve(promised);
    finish(&world, "ssd-2");
    sound(kernel);
}

#[test]
fn device_is_not_taken_out_while_a_session_may_read_what_was_on_it() {
    let world = world_of(24, 24);
    let kernel = &world.kernel;
    let keys = make_many(kernel, 4, Tier::Ssd);
    let client = world.client();
    for key in &keys {
        client.read_lease(*key);
        let map = Request::MapExtents {
            key: *key,
            from: FileBlock(0),
            max: 100,
        };
        assert!(matches!(client.link.call(map), Ok(Response::Extents(..))));
    }
    begin(kernel, "ssd-2");
    for _ in 0..20 {
        kernel.place();
        world.clock.advance_ms(10);
    }
    let mut there = listed(kernel).into_iter();
    let left = there.find(|device| device.name == "ssd-2").unwrap();
    assert!(left.used_bytes == 0 && left.pending_bytes > 0, "{left:?}");
    while let Ok(Some(Upcall::Barrier { tx, .. })) = client.link.upcall(std::time::Duration::ZERO) {
        assert_eq!(client.link.call(Request::BarrierAck { tx }), Ok(Response::Done));
    }
    finish(&world, "ssd-2");
    all_right(kernel, &keys);
}

/// Overwrites parts of files through a session with what is there already.
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

    fn step(&mut self, kernel: &KernelFs) {
        for (seed, key) in (0..).zip(&self.keys) {
            let at = (self.written as usize * 37 % 250) * 4096;
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
fn crash_at_each_point_of_a_removal_beside_writers_loses_nothing() {
    let world = world_of(24, 24);
    let kernel = &world.kernel;
    let keys = make_many(kernel, 6, Tier::Ssd);
    let clone = make_empty(kernel, b"clone").unwrap();
    share(kernel, keys[5], clone);
    kernel.store().demote(u64::MAX).unwrap();
    let mut writer = Writer::new(&world, &keys[..3]);
    kernel.store().checkpoint().unwrap();
    let (recording, ()) = world.sim.record(|| {
        begin(kernel, "ssd-2");
        act(kernel, 1, JobAct::Limit(Some(64 << 20)));
        for _ in 0..40 {
            kernel.place();
            writer.step(kernel);
            world.clock.advance_ms(100);
            if ssds(kernel).len() == 1 {
                break;
            }
        }
    });
    assert_eq!(ssds(kernel).len(), 1, "{:?}", listed(kernel));
    let points = recording.durability_points();
    println!("{} points, {} writes", points.len(), writer.written);
    assert!(points.len() > 40, "{}", points.len());
    let (mut images, mut emptying, mut gone, mut most_moved) = (0, 0, 0, 0);
    for (at, point) in points.iter().enumerate() {
        for crash in [Crash::PowerSeeded(at as u64), Crash::Kill, Crash::PowerNone] {
            let image = recording.image(point.index, crash).into_world();
            let after = World::start_on(image, &world.config);
            images += 1;
            all_right(&after.kernel, &keys);
            content_is_right(&after.kernel, clone, 5);
            match &ssds(&after.kernel)[..] {
                [_] => gone += 1,
                [_, (_, state)] if state == "emptying" => {
                    emptying += 1;
                    let job = jobs(&after.kernel).remove(0);
                    assert_eq!((job.id, job.device.as_deref()), (1, Some("ssd-2")));
                    let moved = job.moved_bytes;
                    assert!(moved <= 7 << 20, "{moved}");
                    most_moved = most_moved.max(moved);
                }
                _ => {
                    assert_eq!(jobs(&after.kernel), []);
                    continue;
                }
            }
            if images % 8 == 0 {
                finish(&after, "ssd-2");
                all_right(&after.kernel, &keys);
                let after = after.restart();
                all_right(&after.kernel, &keys);
            } else if images % 8 == 4 && ssds(&after.kernel).len() == 2 {
                ask(&after.kernel, "ssd-2", RemovalAct::Cancel).unwrap();
                settle(&after.kernel);
                all_right(&after.kernel, &keys);
            }
        }
    }
    println!("{images} images, {emptying} while it is emptied, {gone} after it was taken out");
    assert!(emptying > images / 2 && gone > 0, "{images}, {emptying}, {gone}");
    assert!(most_moved > 1 << 20, "{most_moved}");
}

/// The daemon starts anew, and from here on the second SSD takes no writes.
fn with_faulty_device(world: World) -> World {
    let World {
        sim,
        logs,
        clock,
        config,
        kernel,
    } = world;
    drop(kernel);
    let script = FaultScript::new();
    let faulty = FaultyDevice::new(sim.block("ssd-2").unwrap(), script.clone());
    let mut media = devices(&sim);
    media.more = vec![(Tier::Ssd, Arc::new(faulty) as _)];
    let (store, _) = Store::open(media, OpenOptions::default()).unwrap();
    let parts = Parts::new(
        store,
        Arc::clone(&logs) as _,
        config.clone(),
        Arc::clone(&clock) as _,
    );
    let kernel = KernelFs::open(parts).unwrap();
    script.push(FaultRule::always(FaultOp::Write, Fault::Errno(libc::EIO)));
    World {
        sim,
        logs,
        clock,
        config,
        kernel,
    }
}

/// The second SSD has failed, and nothing else has.
fn one_has_failed(kernel: &KernelFs) {
    let states: Vec<String> = ssds(kernel).into_iter().map(|(_, state)| state).collect();
    assert_eq!(states, ["in use", "failed"]);
    assert_eq!(kernel.status().latched, None);
}

#[test]
fn forwarded_writes_go_on_when_one_of_two_devices_fails() {
    let world = world_of(24, 24);
    let keys = make_many(&world.kernel, 2, Tier::Ssd);
    let mut tx = world.kernel.store().begin().unwrap();
    let (to, by) = (PinTo::Tier(Tier::Ssd), PinnedBy::Command);
    tx.set_pin(keys[0].ino, Pin { to, by }).unwrap();
    tx.commit().unwrap();
    let world = with_faulty_device(world);
    let mut client = world.client();
    let data = body(0);
    for offset in (0..data.len()).step_by(64 << 10) {
        let done = client.forward(&LogOp::Write {
            key: keys[0],
            offset: offset as u64,
            data: &data[offset..offset + (64 << 10)],
        });
        assert!(done.is_ok(), "at {offset}: {done:?}");
    }
    one_has_failed(&world.kernel);
    // Zeros at the ends of a range, and blocks between them.
    let allocated = client.forward(&LogOp::Fallocate {
        key: keys[0],
        mode: FallocateMode::Allocate,
        offset: FILE as u64,
        len: 4 << 20,
    });
    assert!(allocated.is_ok(), "{allocated:?}");
    content_is_right(&world.kernel, keys[0], 0);
    content_is_right(&world.kernel, keys[1], 1);
    let world = world.restart();
    content_is_right(&world.kernel, keys[0], 0);
    sound(&world.kernel);
}

#[test]
fn undo_of_shares_goes_on_when_one_of_two_devices_fails() {
    let world = world_of(24, 24);
    let keys = make_many(&world.kernel, 2, Tier::Ssd);
    let clone = make_empty(&world.kernel, b"clone").unwrap();
    share(&world.kernel, keys[0], clone);
    let world = with_faulty_device(world);
    let mut client = world.client();
    let undone = client.forward(&LogOp::Unshare {
        key: clone,
        offset: 0,
        len: FILE as u64,
    });
    assert!(undone.is_ok(), "{undone:?}");
    one_has_failed(&world.kernel);
    let numbers = |ino| {
        let parts = world.kernel.store().map_parts(ino, FileBlock(0), 1000).unwrap();
        parts.into_iter().filter_map(|part| part.number).count()
    };
    assert_eq!(numbers(clone.ino), 0, "it shares nothing any more");
    content_is_right(&world.kernel, clone, 0);
    let world = world.restart();
    content_is_right(&world.kernel, clone, 0);
    all_right(&world.kernel, &keys);
}

#[test]
fn digests_go_on_when_one_of_two_devices_fails() {
    let world = world_of(24, 24);
    let keys = make_many(&world.kernel, 6, Tier::Ssd);
    let world = with_faulty_device(world);
    let mut writer = Writer::new(&world, &keys[..3]);
    // NVM has no room, so that digests write to the SSDs.
    let mut number = 100;
    while world.kernel.store().space().tiers[0].free > world.kernel.store().space().tiers[0].kept + 300 {
        make_on(&world.kernel, number, Tier::Nvm).unwrap();
        number += 1;
    }
    for _ in 0..30 {
        writer.step(&world.kernel);
    }
    assert_eq!(ssds(&world.kernel)[1].1, "failed", "a digest has met it");
    let made = make_on(&world.kernel, 51, Tier::Ssd).unwrap();
    content_is_right(&world.kernel, made, 51);
    assert_eq!(world.kernel.status().latched, None);
    assert_eq!(ssds(&world.kernel)[1].1, "failed");
    for (seed, key) in (0..).zip(&keys) {
        content_is_right(&world.kernel, *key, seed);
    }
    // It is read, and taken out.
    assert!(matches!(begin(&world.kernel, "ssd-2"), DeviceAsked::Done(_)));
    assert_eq!(ssds(&world.kernel)[1].1, "failed");
    finish(&world, "ssd-2");
    all_right(&world.kernel, &keys);
    let world = world.restart();
    all_right(&world.kernel, &keys);
}
