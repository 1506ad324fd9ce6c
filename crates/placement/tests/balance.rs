//! `balance`: what it promises beside its speed, which `cargo bench -p varve-placement` shows.
#![allow(clippy::unwrap_used)]

use varve_placement::policy::{Balance, Fixed, Hierarchy, Measured, Policy};
use varve_placement::sim::device::Model;
use varve_placement::sim::{Fault, Load, Options, Report, World, loads, models};
use varve_placement::{DeviceId, DeviceState};

fn run(models: &[Model], load: Load, policy: Box<dyn Policy>, faults: Vec<Fault>) -> Report {
    let options = Options {
        from_s: load.seconds() / 2,
        faults,
        ..Options::default()
    };
    World::new(models, load, policy, options).run()
}

fn balance() -> Box<dyn Policy> {
    Box::new(Balance::default())
}

/// The bound of ADR 29: a byte moves only after as much time was lost by not moving it. In a load whose hot
/// set changes to and fro, moves may cost no more than the accesses themselves, so its rate is at least half
/// of what never moving gives, whatever the period.
#[test]
fn adversary_that_changes_the_hot_set_cannot_make_it_move_in_vain() {
    let models = [models::good_ssd(), models::scsi_disk()];
    for period in [1, 3, 10] {
        let load = || loads::adversary(period, 60 / period);
        let moving = run(&models, load(), balance(), Vec::new());
        let still = run(&models, load(), Box::new(Fixed::new(&[50, 50])), Vec::new());
        let ratio = moving.rate() / still.rate();
        assert!(ratio > 0.9, "period {period} s: {ratio:.2}");
    }
}

#[test]
fn steady_load_is_left_alone_once_it_is_settled() {
    let models = [models::good_ssd(), models::scsi_disk()];
    let mut world = World::new(&models, loads::iozone(2, 300), balance(), Options::default());
    world.run_until(150);
    let half = world.moved_bytes();
    world.run_until(300);
    let second = world.moved_bytes() - half;
    assert!(
        second < (256 << 20) / 4,
        "{} MiB of 256 in the second half",
        second >> 20
    );
}

#[test]
fn read_and_write_hot_units_part_on_poor_flash() {
    let models = [models::poor_ssd(), models::sata_disk()];
    let moving = run(&models, loads::sfs(8, 200), balance(), Vec::new());
    let last: Vec<_> = moving.seconds.iter().skip(150).collect();
    let sum = |device: usize| {
        last.iter()
            .filter_map(|second| second.written.get(device))
            .sum::<u64>()
    };
    assert!(
        sum(1) > 2 * sum(0),
        "written: {} to the SSD, {} to the disk",
        sum(0),
        sum(1)
    );
}

#[test]
fn device_that_becomes_slow_is_left_and_comes_back() {
    let models = [models::good_ssd(), models::good_ssd(), models::scsi_disk()];
    let fault = |at_s, slow| Fault {
        at_s,
        device: DeviceId(0),
        state: DeviceState::Online,
        slow,
    };
    let faults = vec![fault(20, 30.0), fault(70, 1.0)];
    let load = || loads::fileserver(120);
    let moving = run(&models, load(), balance(), faults.clone());
    let fixed = run(&models, load(), Box::new(Fixed::new(&[50, 50, 0])), faults);
    let slow = moving.rate_in(40, 70) / fixed.rate_in(40, 70);
    assert!(slow > 1.5, "while it is slow: {slow:.2}");
    let back = moving.rate_in(110, 120) / moving.rate_in(10, 20);
    assert!(back > 0.8, "when it is well again: {back:.2}");
}

#[test]
fn balance_is_no_slower_than_hierarchy_and_measured() {
    let models = [models::poor_ssd(), models::sata_disk()];
    for load in [loads::iozone(2, 120), loads::database(120)] {
        let rate = |policy| run(&models, load.clone(), policy, Vec::new()).rate();
        let own = rate(balance());
        for other in [
            Box::new(Hierarchy::default()) as Box<dyn Policy>,
            Box::new(Measured::default()),
        ] {
            let name = other.name();
            let ratio = own / rate(other);
            assert!(ratio > 0.9, "{}: {ratio:.2} of {name}", load.name);
        }
    }
}

/// NetApp-like, one process and then ten (Table V): the SSD alone is within a few percent of the best there is.
#[test]
fn balance_keeps_up_with_the_best_static_layout_when_one_process_becomes_ten() {
    let models = [models::good_ssd(), models::scsi_disk()];
    for seconds in [60, 240] {
        let load = || loads::changing(seconds);
        let moving = run(&models, load(), balance(), Vec::new());
        let fixed = run(&models, load(), Box::new(Fixed::new(&[100, 0])), Vec::new());
        let half = seconds as usize / 2;
        for (from, to) in [(0, half), (half, 2 * half)] {
            let ratio = moving.rate_in(from, to) / fixed.rate_in(from, to);
            assert!(ratio > 0.95, "{seconds} s, second {from} to {to}: {ratio:.2}");
        }
    }
}
