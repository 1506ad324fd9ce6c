//! Policies on simulated devices: what holds of every run, and what each policy is for.
#![allow(clippy::unwrap_used)]

use varve_placement::policy::{Fixed, Hierarchy, Measured, Policy, Striped, Wardrop};
use varve_placement::sim::{Fault, Load, Options, Report, World, loads, models};
use varve_placement::{DeviceId, DeviceState};

fn pair() -> Vec<varve_placement::sim::device::Model> {
    vec![models::good_ssd(), models::scsi_disk()]
}

fn policies() -> Vec<Box<dyn Policy>> {
    vec![
        Box::new(Fixed::new(&[80, 20])),
        Box::new(Striped),
        Box::new(Hierarchy::default()),
        Box::new(Measured::default()),
        Box::new(Wardrop::default()),
    ]
}

fn run(models: &[varve_placement::sim::device::Model], load: Load, policy: Box<dyn Policy>) -> Report {
    let options = Options {
        from_s: load.seconds() / 2,
        ..Options::default()
    };
    World::new(models, load, policy, options).run()
}

#[test]
fn run_is_the_same_with_the_same_seed() {
    for (first, second) in policies().into_iter().zip(policies()) {
        let a = run(&pair(), loads::dbench(4, 6), first);
        let b = run(&pair(), loads::dbench(4, 6), second);
        assert_eq!(a, b);
        assert!(a.rate() > 0.0);
    }
}

#[test]
fn map_stays_sound_whatever_moves_and_fails() {
    let faults = |at_s, state, slow| Fault {
        at_s,
        device: DeviceId(0),
        state,
        slow,
    };
    for policy in policies() {
        let name = policy.name();
        let options = Options {
            faults: vec![
                faults(3, DeviceState::Online, 20.0),
                faults(5, DeviceState::Absent, 1.0),
                faults(7, DeviceState::ReadOnly, 1.0),
                faults(9, DeviceState::Online, 1.0),
            ],
            ..Options::default()
        };
        let mut load = loads::adversary(2, 6);
        load.phases
            .iter_mut()
            .for_each(|phase| phase.streams[1].percent = 60);
        let mut world = World::new(&pair(), load, policy, options);
        for second in 1..=12 {
            world.run_until(second);
            assert!(world.map().is_sound(), "{name} after {second} s");
        }
        let count: usize = (0..2).map(|at| world.map().count(DeviceId(at))).sum();
        assert!(count >= 4096, "{name}: {count} units");
        let report = world.finish();
        assert!(report.rate_in(10, 12) > 0.0, "{name} goes on");
    }
}

#[test]
fn new_data_goes_elsewhere_when_a_device_is_absent() {
    let options = Options {
        faults: vec![Fault {
            at_s: 1,
            device: DeviceId(0),
            state: DeviceState::Absent,
            slow: 1.0,
        }],
        ..Options::default()
    };
    let mut load = loads::fileserver(4);
    load.phases[0].streams.truncate(1);
    let mut world = World::new(&pair(), load, Box::new(Hierarchy::default()), options);
    world.run_until(1);
    assert_eq!(world.map().count(DeviceId(1)), 0);
    world.run_until(4);
    assert!(world.map().count(DeviceId(1)) > 100);
    assert_eq!(world.finish().refused, 0);
}

/// Fig. 5: where writes dominate and the flash is poor, measured migration beats striping by 600 to 426.
#[test]
fn measured_migration_beats_striping_on_poor_flash() {
    let models = [models::poor_ssd(), models::sata_disk()];
    let striped = run(&models, loads::sfs(8, 120), Box::new(Striped));
    let measured = run(&models, loads::sfs(8, 120), Box::new(Measured::default()));
    let ratio = measured.rate() / striped.rate();
    assert!(ratio > 1.1, "{ratio:.2}");
}

#[test]
fn hierarchy_brings_a_hot_set_up_and_leaves_a_scan_below() {
    // The fast device holds the hot set, not the scanned one.
    let models = [models::good_ssd().sized(128 << 20), models::scsi_disk()];
    let fixed = run(&models, loads::scan(40), Box::new(Fixed::new(&[20, 80])));
    let hierarchy = run(&models, loads::scan(40), Box::new(Hierarchy::default()));
    let ratio = hierarchy.rate() / fixed.rate();
    assert!(ratio > 1.5, "{ratio:.2}");
}

#[test]
fn wardrop_uses_both_devices_and_gives_none_a_share_of_zero() {
    let report = run(&pair(), loads::netapp(10, 60), Box::new(Wardrop::default()));
    assert!(
        report.share.iter().all(|share| *share > 0.01),
        "{:?}",
        report.share
    );
}
