//! Jobs of operators under load: they go on after crashes, and they say why something does not move.
#![allow(clippy::unwrap_used)]

use varve_placement::mover::JobState;
use varve_placement::policy::{Fixed, Hold};
use varve_placement::sim::{Jobs, Options, World, loads, models};
use varve_placement::{DeviceId, DeviceState};

const SSD: DeviceId = DeviceId(0);
const DISK: DeviceId = DeviceId(1);

fn world(seconds: u32) -> World {
    let models = [models::good_ssd(), models::scsi_disk()];
    let mut load = loads::iozone(2, seconds);
    load.phases[0].processes = 8;
    World::new(&models, load, Box::new(Fixed::new(&[50, 50])), Options::default())
}

#[test]
fn evacuation_goes_on_after_crashes_and_empties_the_device() {
    let mut world = world(1000);
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    let mut saved = toml::to_string(world.jobs()).unwrap();
    let mut rng = fastrand::Rng::with_seed(3);
    let (mut now, mut crashes) = (0, 0);
    while world.jobs().jobs[0].state != JobState::Done {
        assert!(now < 900, "it never ends: {:?}", world.jobs());
        now += 1;
        world.run_until(now);
        assert!(world.map().is_sound(), "after {now} s and {crashes} crashes");
        // Sometimes an older state was saved last.
        if rng.bool() {
            saved = toml::to_string(world.jobs()).unwrap();
        }
        if crashes < 50 {
            let jobs: Jobs = toml::from_str(&saved).unwrap();
            world.crash(jobs);
            crashes += 1;
        }
    }
    assert_eq!(world.map().count(SSD), 0);
    assert!(crashes > 10, "{crashes}");
}

#[test]
fn job_says_what_each_unit_waits_for() {
    let mut world = world(60);
    let units = world.view().catalog.units_on(SSD, None, 8).units;
    units[..5]
        .iter()
        .for_each(|unit| world.map_mut().hold(*unit, Some(Hold::InUse { session: 12 })));
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    world.run_until(59);
    let job = &world.jobs().jobs[0];
    assert_eq!(job.state, JobState::Running, "it waits");
    let stuck: Vec<_> = job.stuck.iter().collect();
    assert_eq!(
        stuck,
        [(&"waiting: in use by session 12".to_string(), &(5 * 65536))]
    );
}

#[test]
fn job_waits_for_a_full_target_and_says_how_full_it_is() {
    let models = [models::good_ssd(), models::scsi_disk().sized(128 << 20)];
    let options = Options::default();
    let mut world = World::new(
        &models,
        loads::iozone(2, 60),
        Box::new(Fixed::new(&[60, 40])),
        options,
    );
    world.start_job(SSD);
    world.run_until(50);
    let job = &world.jobs().jobs[0];
    let reason = job.stuck.keys().next().unwrap();
    assert!(
        reason.starts_with("waiting: device 1 9") && reason.ends_with("% full"),
        "{reason}"
    );
    assert!(world.map().count(SSD) > 0);
}

#[test]
fn job_that_is_paused_or_cancelled_moves_nothing_more() {
    let mut world = world(60);
    world.start_job(SSD);
    world.run_until(2);
    let mut jobs = world.jobs().clone();
    jobs.jobs[0].pause();
    world.crash(jobs);
    let count = world.map().count(SSD);
    world.run_until(4);
    assert_eq!(world.map().count(SSD), count);
    let mut jobs = world.jobs().clone();
    jobs.jobs[0].resume();
    world.crash(jobs.clone());
    world.run_until(6);
    assert!(world.map().count(SSD) < count);
    jobs.jobs[0].cancel();
    jobs.jobs[0].resume();
    assert_eq!(jobs.jobs[0].state, JobState::Cancelled);
}

/// Runs a world's first job for at most 55 s.
fn state_at_the_end(world: &mut World) -> JobState {
    (1..56)
        .find_map(|now| {
            world.run_until(now);
            let state = world.jobs().jobs[0].state;
            (state != JobState::Running).then_some(state)
        })
        .unwrap_or(JobState::Running)
}

fn held(world: &mut World, hold: Hold) -> Vec<varve_placement::UnitId> {
    let units = world.view().catalog.units_on(SSD, None, 5).units;
    units
        .iter()
        .for_each(|unit| world.map_mut().hold(*unit, Some(hold)));
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    units
}

#[test]
fn evacuation_takes_pinned_units_along_and_they_stay_pinned() {
    let mut world = world(60);
    let units = held(&mut world, Hold::Pinned);
    let state = state_at_the_end(&mut world);
    assert_eq!(state, JobState::Done, "{:?}", world.jobs());
    assert_eq!(world.map().count(SSD), 0);
    for unit in units {
        let place = world.view().catalog.place(unit).unwrap();
        assert_eq!((place.device, place.hold), (DISK, Some(Hold::Pinned)));
    }
}

#[test]
fn pinned_units_stay_on_their_tier_when_another_device_of_it_has_room() {
    let models = [models::good_ssd(), models::good_ssd(), models::scsi_disk()];
    let policy = Box::new(Fixed::new(&[20, 40, 40]));
    let mut world = World::new(&models, loads::iozone(2, 60), policy, Options::default());
    let units = held(&mut world, Hold::Pinned);
    assert_eq!(state_at_the_end(&mut world), JobState::Done);
    let on = |unit| world.view().catalog.place(unit).unwrap().device;
    assert!(units.into_iter().all(|unit| on(unit) == DeviceId(1)));
    assert!(world.map().count(DISK) > 0);
}

#[test]
fn job_ends_when_nothing_more_can_move_and_says_what_is_left() {
    let mut world = world(60);
    let units = held(&mut world, Hold::Damaged);
    assert_eq!(state_at_the_end(&mut world), JobState::Incomplete);
    assert_eq!(world.map().count(SSD), 5);
    let stuck: Vec<_> = world.jobs().jobs[0].stuck.clone().into_iter().collect();
    assert_eq!(stuck, [("its data cannot be read".to_string(), 5 * 65536)]);
    // It can be read again, and an operator tries once more.
    units.iter().for_each(|unit| world.map_mut().hold(*unit, None));
    let mut jobs = world.jobs().clone();
    jobs.jobs[0].resume();
    world.crash(jobs);
    world.run_until(59);
    assert_eq!(world.jobs().jobs[0].state, JobState::Done);
    assert_eq!(world.map().count(SSD), 0);
}

#[test]
fn unit_with_a_copy_elsewhere_only_loses_the_one() {
    let mut world = world(60);
    let unit = world.view().catalog.units_on(SSD, None, 1).units[0];
    assert!(world.map_mut().add_copy(unit, DISK));
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    assert_eq!(state_at_the_end(&mut world), JobState::Done, "{:?}", world.jobs());
    let place = world.view().catalog.place(unit).unwrap();
    assert_eq!((place.device, place.second), (DISK, None));
}

#[test]
fn copy_in_use_is_not_dropped() {
    let mut world = world(60);
    let unit = world.view().catalog.units_on(SSD, None, 1).units[0];
    assert!(world.map_mut().add_copy(unit, DISK));
    world.map_mut().hold(unit, Some(Hold::InUse { session: 12 }));
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    // No write of the load may drop the copy either.
    world.set_state(DISK, DeviceState::ReadOnly);
    world.run_until(20);
    assert!(world.view().catalog.place(unit).unwrap().is_on(SSD));
    let stuck = &world.jobs().jobs[0].stuck;
    assert_eq!(stuck["waiting: in use by session 12"], 65536);
}

#[test]
fn last_copy_that_can_be_read_is_not_dropped() {
    let mut world = world(60);
    let unit = world.view().catalog.units_on(SSD, None, 1).units[0];
    assert!(world.map_mut().add_copy(unit, DISK));
    world.set_state(SSD, DeviceState::Draining);
    world.set_state(DISK, DeviceState::Absent);
    world.start_job(SSD);
    world.run_until(1);
    assert!(world.view().catalog.place(unit).unwrap().is_on(SSD));
}

#[test]
fn unit_that_comes_into_use_while_it_is_copied_stays() {
    let mut world = world(60);
    world.set_state(SSD, DeviceState::Draining);
    world.start_job(SSD);
    for second in 1..=30 {
        world.run_until(second);
        let units = world.view().catalog.units_on(SSD, None, usize::MAX).units;
        for unit in &units {
            world.map_mut().hold(*unit, Some(Hold::InUse { session: 12 }));
        }
        let before = world.map().count(SSD);
        world.run_until(second + 1);
        assert_eq!(world.map().count(SSD), before, "after {second} s");
        for unit in units {
            world.map_mut().hold(unit, None);
        }
    }
}
