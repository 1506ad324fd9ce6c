//! `balance`: what it promises beside its speed, which `cargo bench -p varve-placement` shows.
#![allow(clippy::unwrap_used)]

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use varve_placement::figures::{Figures, Service};
use varve_placement::heat::Heat;
use varve_placement::policy::{
    Act, Balance, Budget, Catalog, FULL, Fixed, Found, Hierarchy, Measured, Place, Plan, Policy, Step,
    Target, View,
};
use varve_placement::sim::device::Model;
use varve_placement::sim::{Fault, Load, Options, Report, World, loads, models};
use varve_placement::{Access, DeviceId, DeviceState, DeviceView, NewData, Op, Tier, UnitId, UnitSize};

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
    let last = &moving.seconds[150..];
    let share_on_flash = |bytes: fn(&varve_placement::sim::Second) -> &Vec<u64>| {
        let on = |device: usize| last.iter().map(|second| bytes(second)[device]).sum::<u64>() as f64;
        on(0) / (on(0) + on(1))
    };
    let (read, written) = (
        share_on_flash(|second| &second.read),
        share_on_flash(|second| &second.written),
    );
    assert!(read > 1.5 * written, "{read:.2} of reads, {written:.2} of writes");
    let measured = run(
        &models,
        loads::sfs(8, 200),
        Box::new(Measured::default()),
        Vec::new(),
    );
    let ratio = moving.rate() / measured.rate();
    assert!(ratio > 1.0, "{ratio:.2} of measured");
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

/// NetApp-like, one process and then ten (Table V): the SSD alone is within a few percent of the best there
/// is.
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

/// What accesses lost by where their units were, and what moves cost, in microseconds of service.
#[derive(Debug, Default)]
struct Account {
    lost_us: f64,
    spent_us: f64,
    steps: u64,
}

/// `balance` with an auditor beside it, who sees what it sees and knows nothing of its reasons.
#[derive(Debug)]
struct Audited(Balance, Arc<Mutex<Account>>);

impl Policy for Audited {
    fn name(&self) -> Cow<'static, str> {
        self.0.name()
    }
    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        self.0.target(new, view)
    }
    fn route(&mut self, unit: UnitId, op: Op, bytes: u32, place: &Place, view: &View<'_>) -> DeviceId {
        self.0.route(unit, op, bytes, place, view)
    }
    fn accessed(&mut self, access: &Access, place: &Place, view: &View<'_>) -> Option<Step> {
        let us = |at: usize| {
            view.devices[at]
                .figures
                .service
                .us(access.op, f64::from(access.bytes))
        };
        let best = (0..view.devices.len()).map(us).fold(f64::INFINITY, f64::min);
        self.1.lock().unwrap().lost_us += us(access.device.index()) - best;
        self.0.accessed(access, place, view)
    }
    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        self.0.plan(view, budget)
    }
    fn resets(&self) -> bool {
        self.0.resets()
    }
    fn done(&mut self, step: &Step, view: &View<'_>) {
        if step.act != Act::Drop {
            let us = |id, op| view.device(id).figures.service.us(op, view.unit_bytes() as f64);
            let mut account = self.1.lock().unwrap();
            account.spent_us += us(step.from, Op::Read) + us(step.to, Op::Write);
            account.steps += 1;
        }
        self.0.done(step, view);
    }
    fn failed(&mut self, step: &Step, view: &View<'_>) {
        self.0.failed(step, view);
    }
}

fn audit(models: &[Model], load: Load) -> Account {
    let account = Arc::new(Mutex::new(Account::default()));
    let policy = Audited(Balance::default(), account.clone());
    let _ = run(models, load, Box::new(policy), Vec::new());
    Arc::into_inner(account).unwrap().into_inner().unwrap()
}

/// The bound of ADR 29 itself, with one process, where an access costs what its device needs for it. The fast
/// device is too small for what is used, so that for each unit that comes another must go.
#[test]
fn moves_of_all_causes_cost_no_more_than_accesses_have_lost() {
    let small = [models::good_ssd().sized(32 << 20), models::scsi_disk()];
    let mut loads: Vec<Load> = [1, 3, 10]
        .map(|period| loads::adversary(period, 120 / period))
        .into();
    loads.extend([
        loads::dbench(1, 120),
        loads::postmark(false, 120),
        loads::scan(120),
    ]);
    // New data takes the room that was made for what is used.
    let mut eaten = loads::postmark(false, 120);
    eaten.name = "room is eaten by new data".into();
    let streams = &mut eaten.phases[0].streams;
    (streams[0].percent, streams[1].percent, streams[2].percent) = (70, 30, 0);
    loads.push(eaten);
    for mut load in loads {
        load.phases.iter_mut().for_each(|phase| phase.processes = 1);
        let account = audit(&small, load.clone());
        let share = account.spent_us / account.lost_us;
        println!(
            "{}: {} steps, {share:.3} of what was lost",
            load.name, account.steps
        );
        assert!(share <= 1.0, "{}: {account:?}", load.name);
    }
}

/// A pool of a quick and a slow device as one plan sees it; nothing moves but by the test.
#[derive(Debug)]
struct Still {
    devices: Vec<DeviceView>,
    heat: Heat,
    places: Places,
    now_ms: u64,
}

#[derive(Debug, Default)]
struct Places(BTreeMap<UnitId, DeviceId>);

impl Catalog for Places {
    fn place(&self, unit: UnitId) -> Option<Place> {
        let place = |device: &DeviceId| Place {
            device: *device,
            bytes: 65536,
            second: None,
            hold: None,
            since_ms: 0,
            came_from: None,
        };
        self.0.get(&unit).map(place)
    }
    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Found {
        let on = self
            .0
            .iter()
            .filter(|(_, on)| **on == device)
            .map(|(unit, _)| *unit);
        let rest = on.filter(|unit| after.is_none_or(|after| *unit > after));
        let units: Vec<_> = rest.take(most).collect();
        let next = units.last().copied().filter(|_| units.len() == most);
        Found { units, next }
    }
}

const QUICK: DeviceId = DeviceId(0);
const SLOW: DeviceId = DeviceId(1);

fn unit(index: u32) -> UnitId {
    let key = varve_format::InodeKey {
        ino: varve_format::Ino(7),
        generation: varve_format::Generation(1),
    };
    UnitId { key, index }
}

impl Still {
    fn new(quick_free_bytes: u64) -> Self {
        let device = |id, free_bytes, us| DeviceView {
            id,
            name: id.to_string().into(),
            tier: Tier::Ssd,
            total_bytes: 16 << 30,
            free_bytes,
            pending_bytes: 0,
            state: DeviceState::Online,
            parallel: 1,
            queue: 0,
            figures: Figures {
                service: Service::probed([us, us / 100.0], [us, us / 100.0]),
                ..Figures::default()
            },
        };
        Self {
            devices: vec![
                device(QUICK, quick_free_bytes, 100.0),
                device(SLOW, 8 << 30, 5000.0),
            ],
            heat: Heat::for_pool(UnitSize::DEFAULT, 32 << 30),
            places: Places::default(),
            now_ms: 0,
        }
    }

    fn read(&mut self, index: u32, times: u32) {
        let access = Access {
            unit: unit(index),
            op: Op::Read,
            bytes: 4096,
            request_bytes: 4096,
            device: SLOW,
        };
        (0..times).for_each(|_| self.heat.count(&access));
    }

    fn view(&self) -> View<'_> {
        View {
            now_ms: self.now_ms,
            devices: &self.devices,
            heat: &self.heat,
            catalog: &self.places,
            full: FULL,
        }
    }

    fn plan(&mut self, policy: &mut Balance) -> Vec<Step> {
        self.now_ms += 1000;
        let budget = Budget {
            bytes: 1 << 40,
            quiet: true,
        };
        policy.plan(&self.view(), budget).steps
    }

    fn carry_out(&mut self, steps: &[Step], policy: &mut Balance) {
        for step in steps {
            self.places.0.insert(step.unit, step.to);
            policy.done(step, &self.view());
        }
    }
}

#[test]
fn room_that_is_taken_by_others_is_not_made_again_and_again() {
    let mut still = Still::new(0);
    still.places.0.insert(unit(0), SLOW);
    // As much as a move costs and twice that again.
    still.read(0, 6);
    still.places.0.extend((1..2000).map(|index| (unit(index), QUICK)));
    let mut policy = Balance::default();
    let mut gone = BTreeSet::new();
    for _ in 0..100 {
        let steps = still.plan(&mut policy);
        let room = |step: &&Step| step.from == QUICK;
        gone.extend(steps.iter().filter(room).map(|step| step.unit));
        // The unit that wants in fails: others were sooner.
        for step in steps {
            if step.from == QUICK {
                still.carry_out(&[step], &mut policy);
            } else {
                policy.failed(&step, &still.view());
            }
        }
    }
    assert!(gone.len() <= 1, "{} units made room", gone.len());
}

#[test]
fn unit_in_use_leaves_for_one_that_is_used_much_more_only() {
    for (reads_there, moves) in [(2, true), (50, false)] {
        let mut still = Still::new(0);
        still.places.0.insert(unit(0), SLOW);
        still.read(0, 60);
        for index in 1..100 {
            still.places.0.insert(unit(index), QUICK);
            still.read(index, reads_there);
        }
        let steps = still.plan(&mut Balance::default());
        let of = |from: DeviceId| steps.iter().filter(|step| step.from == from).count();
        let expected = usize::from(moves);
        assert_eq!(
            (of(QUICK), of(SLOW)),
            (expected, expected),
            "{reads_there} reads: {steps:?}"
        );
    }
}

/// A write of 16 KiB to a unit.
fn write(index: u32) -> NewData {
    NewData {
        unit: unit(index),
        bytes: 16 << 10,
        request_bytes: 16 << 10,
        tier: None,
    }
}

#[test]
fn room_is_made_ahead_for_data_in_use_that_is_written_and_for_no_other() {
    for in_use in [true, false] {
        let (mut still, mut policy) = (Still::new(0), Balance::default());
        for index in 0..40 {
            still.places.0.insert(unit(index), SLOW);
            // Too little for a move of its own.
            still.read(index, 1);
        }
        still
            .places
            .0
            .extend((1000..2000).map(|index| (unit(index), QUICK)));
        let mut made = 0;
        for _ in 0..4 {
            for index in 0..40 {
                let index = if in_use { index } else { 5000 + index };
                let _ = policy.target(&write(index), &still.view());
            }
            let steps = still.plan(&mut policy);
            let room = |step: &&Step| step.from == QUICK && step.reason.contains("data in use");
            made += steps.iter().filter(room).count();
        }
        assert_eq!(made > 0, in_use, "{made} units");
        // Ten units are written between two plans; room is kept for twice as much.
        assert!(made <= 4 * 20, "{made} units");
    }
}

#[test]
fn accesses_pay_for_one_move_however_many_units_move() {
    let mut still = Still::new(8 << 30);
    let units = 40_000;
    for index in 0..units {
        still.places.0.insert(unit(index), SLOW);
        still.read(index, 12);
    }
    let mut policy = Balance::default();
    let mut moved = BTreeSet::new();
    for round in 0..400 {
        if round % 100 == 99 {
            // Now the other one is quick.
            let (first, second) = still.devices.split_at_mut(1);
            std::mem::swap(&mut first[0].figures, &mut second[0].figures);
        }
        let steps = still.plan(&mut policy);
        for step in &steps {
            assert!(
                moved.insert(step.unit),
                "{} has moved before, round {round}",
                step.unit
            );
        }
        still.carry_out(&steps, &mut policy);
    }
    assert!(moved.len() > 1000, "{} of {units}", moved.len());
}

/// Poor flash reads well and writes as badly as a disk: which of them suits new data depends on its use. Good
/// flash is better at both.
#[test]
fn data_of_unknown_use_goes_where_some_use_of_it_is_served_best() {
    let share = |models: &[Model]| {
        let world = World::new(models, loads::database(1), balance(), Options::default());
        world.map().count(DeviceId(0)) * 100 / 6400
    };
    assert_eq!(share(&[models::poor_ssd(), models::sata_disk()]), 50);
    assert_eq!(share(&[models::good_ssd(), models::scsi_disk()]), 100);
}

/// Data that is only read, half of it on the wrong device at first.
#[test]
fn balance_comes_near_the_best_static_layout_where_only_reads_are_fast() {
    let models = [models::poor_ssd(), models::sata_disk()];
    for readers in [0, 2, 4] {
        let load = || loads::iozone(readers, 180);
        let moving = run(&models, load(), balance(), Vec::new());
        let rate = |percent| {
            let fixed = Box::new(Fixed::new(&[percent, 100 - percent]));
            run(&models, load(), fixed, Vec::new()).rate()
        };
        let best = [0, 20, 40, 50, 60, 80, 100]
            .map(rate)
            .into_iter()
            .fold(0.0, f64::max);
        let ratio = moving.rate() / best;
        assert!(ratio > 0.9, "{readers} readers: {ratio:.2}");
    }
}

/// Requests of half a megabyte keep many parts in the queue, and each new unit changes the mean time of all
/// accesses by next to nothing, wherever it goes.
#[test]
fn new_data_does_not_go_to_a_disk_because_it_adds_little_to_the_whole() {
    let models = [models::good_ssd(), models::scsi_disk()];
    let load = || loads::postmark(true, 60);
    let moving = run(&models, load(), balance(), Vec::new());
    let fixed = run(&models, load(), Box::new(Fixed::new(&[100, 0])), Vec::new());
    let ratio = moving.rate() / fixed.rate();
    assert!(ratio > 0.95, "{ratio:.2}");
}
