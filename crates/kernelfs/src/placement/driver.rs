//! Drives a policy of `varve_placement`: counts accesses, describes devices and files to it, and turns its
//! steps into jobs of the mover. The policy decides; this owns what it sees, and the rule that nothing goes
//! back soon to where it came from.

mod recent;

pub use recent::STAY_MS;

use super::fill::{Fill, Marks};
use super::meter::Meters;
use super::units::{UNIT, UNIT_BLOCKS, Units, unit_at};
use super::{At, Catalog, Cause, Job, Move, Placement, TierHeat, Use, Written};
use crate::config::{Config, PolicyName};
use parking_lot::Mutex;
use recent::{Accesses, Arrivals, Touched};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, Tier};
use varve_placement::heat::{Counts, Heat};
use varve_placement::mover::{Limits, Mover, StepNo};
use varve_placement::policy::{self, Act, Budget, Found, Hold, Place, Policy, Step, View, Waiting};
use varve_placement::{Access, DeviceId, DeviceState, DeviceView, NewData, Op, UnitId};
use varve_store::{DataTarget, SpaceStats};

/// Most runs remembered whose data cannot be read.
const BAD_MAX: usize = 4096;
/// Steps planned at once.
const PLAN_STEPS: u64 = 1024;
/// A plan that found nothing to do is made again after so many times the time it took.
const REST: u64 = 19;

/// The places of units, for the policy.
struct Places<'c> {
    units: Units<'c>,
    tiers: &'c [Tier],
    arrivals: &'c Arrivals,
    bad: &'c BTreeSet<At>,
}

impl Places<'_> {
    fn device(&self, tier: Tier) -> Option<DeviceId> {
        let at = self.tiers.iter().position(|there| *there == tier)?;
        Some(DeviceId(at as u8))
    }
}

impl policy::Catalog for Places<'_> {
    fn place(&self, unit: UnitId) -> Option<Place> {
        let pieces = self.units.pieces(unit);
        let mut blocks = [0; 3];
        for piece in &pieces {
            blocks[piece.tier as usize] += piece.len;
        }
        let most = most_of(blocks)?;
        let arrival = self.arrivals.units.get(&unit);
        let is_bad = pieces.iter().any(|piece| self.bad.contains(&piece.at));
        Some(Place {
            device: self.device(most)?,
            bytes: (blocks[most as usize] * BLOCK_BYTES) as u32,
            second: None,
            hold: is_bad.then_some(Hold::Damaged),
            since_ms: arrival.map_or(0, |(_, since_ms)| *since_ms),
            came_from: arrival.map(|(from, _)| *from),
        })
    }

    fn units_on(&self, device: DeviceId, after: Option<UnitId>, most: usize) -> Found {
        let tier = self.tiers.get(device.index());
        tier.map_or_else(Found::default, |tier| self.units.on(*tier, after, most))
    }
}

/// No file at all: where a policy needs none.
struct Nothing;

impl Catalog for Nothing {
    fn files(&self, _: varve_format::Ino, _: usize) -> (Vec<InodeKey>, Option<varve_format::Ino>) {
        (Vec::new(), None)
    }

    fn extents(&self, _: InodeKey, _: FileBlock, _: usize) -> Vec<varve_store::MappedPart> {
        Vec::new()
    }

    fn shared(&self, _: std::ops::Range<u64>, _: usize) -> Vec<varve_store::SharedPart> {
        Vec::new()
    }
}

#[derive(Debug)]
struct State {
    policy: Box<dyn Policy>,
    heat: Heat,
    /// Tiers of the pool, by the number of their device.
    tiers: Vec<Tier>,
    devices: Vec<DeviceView>,
    now_ms: u64,
    arrivals: Arrivals,
    bad: BTreeSet<At>,
    mover: Mover,
    /// Steps given to the daemon's mover, which has not said yet that they are done.
    given: BTreeMap<UnitId, (StepNo, Step)>,
    waiting: Vec<Waiting>,
    served: [TierHeat; 3],
    /// When a plan may be made again.
    rests_until_ns: u64,
}

/// A policy at work in the daemon. See the module.
pub struct Driver {
    name: PolicyName,
    marks: Marks,
    meters: Arc<Meters>,
    /// Locked while requests are answered: never held across a wait.
    accesses: Mutex<Accesses>,
    state: Mutex<State>,
}

/// The policy of this name.
fn policy_of(name: PolicyName, marks: Marks) -> Box<dyn Policy> {
    match name {
        PolicyName::Hierarchy => Box::new(policy::Hierarchy::new(policy::HierarchyConfig {
            high: marks.high as f64 / 100.0,
            low: marks.low as f64 / 100.0,
            stay_ms: STAY_MS,
            ..policy::HierarchyConfig::default()
        })),
        PolicyName::Measured => Box::new(policy::Measured::default()),
        PolicyName::Wardrop => Box::new(policy::Wardrop::default()),
        // The store keeps one copy of each block.
        PolicyName::Balance => Box::new(policy::Balance::new(policy::BalanceConfig {
            copies: false,
            ..policy::BalanceConfig::default()
        })),
    }
}

/// Bytes of all tiers.
const fn pool_bytes(space: &SpaceStats) -> u64 {
    let [nvm, ssd, hdd] = &space.tiers;
    (nvm.total + ssd.total + hdd.total) * BLOCK_BYTES
}

impl Driver {
    /// Makes the policy that the settings name.
    #[must_use]
    pub fn new(config: &Config, space: &SpaceStats, meters: Arc<Meters>) -> Self {
        let marks = Marks {
            high: config.placement_high_percent.into(),
            low: config.placement_low_percent.into(),
        };
        let limits = Limits {
            // The daemon's mover has bounds of its own: `placement_step_blocks`, and foreground I/O.
            bytes_per_s: u64::MAX,
            burst_bytes: u64::MAX,
            in_flight: usize::MAX,
            queued: PLAN_STEPS as usize,
        };
        Self {
            name: config.placement_policy,
            marks,
            meters,
            accesses: Mutex::default(),
            state: Mutex::new(State {
                policy: policy_of(config.placement_policy, marks),
                heat: Heat::for_pool(UNIT, pool_bytes(space)),
                tiers: Vec::new(),
                devices: Vec::new(),
                now_ms: 0,
                arrivals: Arrivals::default(),
                bad: BTreeSet::new(),
                mover: Mover::new(limits),
                given: BTreeMap::new(),
                waiting: Vec::new(),
                served: [TierHeat::default(); 3],
                rests_until_ns: 0,
            }),
        }
    }

    /// Where new data goes while a plan is made: to the fastest tier with room.
    fn fastest(&self, bytes: u64, space: &SpaceStats) -> Tier {
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        let fits = |tier: &Tier| {
            let stats = &space.tiers[*tier as usize];
            stats.total > 0 && !stats.avoided && Fill::of(*tier, stats).below(self.marks.high) > blocks
        };
        Tier::ALL.into_iter().find(fits).unwrap_or(Tier::Nvm)
    }
}

/// Bytes of a tier that data may occupy, free ones, and ones that become free.
fn room_of(tier: Tier, space: &SpaceStats) -> [u64; 3] {
    let stats = &space.tiers[tier as usize];
    let fill = Fill::of(tier, stats);
    let pending = stats.pending.min(fill.usable.saturating_sub(fill.left));
    [fill.usable, fill.left, pending].map(|blocks| blocks * BLOCK_BYTES)
}

/// Whether a tier takes new data.
const fn state_of(tier: Tier, space: &SpaceStats) -> DeviceState {
    if space.tiers[tier as usize].avoided {
        DeviceState::Draining
    } else {
        DeviceState::Online
    }
}

/// The tiers of the pool and their devices, as they are now.
pub(super) fn devices_of(space: &SpaceStats, meters: &Meters) -> (Vec<Tier>, Vec<DeviceView>) {
    let there = |tier: &Tier| space.tiers[*tier as usize].total > 0;
    let tiers: Vec<Tier> = Tier::ALL.into_iter().filter(there).collect();
    let view = |(at, tier): (usize, &Tier)| {
        let (figures, queue) = meters.tier(*tier).figures();
        let [total_bytes, free_bytes, pending_bytes] = room_of(*tier, space);
        DeviceView {
            id: DeviceId(at as u8),
            name: tier.name().into(),
            tier: *tier,
            total_bytes,
            free_bytes,
            pending_bytes,
            state: state_of(*tier, space),
            parallel: meters.tier(*tier).parallel(),
            queue,
            figures,
        }
    };
    let devices = tiers.iter().enumerate().map(view).collect();
    (tiers, devices)
}

impl State {
    /// Sees the devices as they are now.
    fn look(&mut self, space: &SpaceStats, meters: &Meters) {
        self.now_ms = meters.now_ns() / 1_000_000;
        (self.tiers, self.devices) = devices_of(space, meters);
    }

    /// Updates the space of devices that are known.
    fn look_at_space(&mut self, space: &SpaceStats) {
        for device in &mut self.devices {
            [device.total_bytes, device.free_bytes, device.pending_bytes] = room_of(device.tier, space);
            device.state = state_of(device.tier, space);
        }
    }

    /// The accesses to units, of files and of shared blocks, with the device of each.
    fn located(&self, accesses: Accesses, catalog: &dyn Catalog) -> Vec<(Access, Touched)> {
        let units = Units::of(catalog);
        let mut located = BTreeMap::<UnitId, (Touched, [u64; 3])>::new();
        let (mut of_file, mut file) = (BTreeMap::new(), None);
        let mut add = |of_file: &mut BTreeMap<UnitId, (Touched, [u64; 3])>| {
            for (unit, (touched, blocks)) in std::mem::take(of_file) {
                let (all, on) = located.entry(unit).or_default();
                all.add(touched);
                (0..3).for_each(|tier| on[tier] += blocks[tier]);
            }
        };
        for (unit, touched) in accesses.0 {
            if file.replace(unit.key) != Some(unit.key) {
                add(&mut of_file);
            }
            for piece in units.all_pieces(unit) {
                for (unit, blocks) in piece.units() {
                    let (most, on) = of_file.entry(unit).or_default();
                    most.raise(touched);
                    on[piece.tier as usize] += blocks;
                }
            }
        }
        add(&mut of_file);
        let access = |(unit, (mut touched, on)): (UnitId, (Touched, [u64; 3]))| {
            let tier = most_of(on)?;
            let device = self.tiers.iter().position(|there| *there == tier)?;
            // Reads of NVM by clients themselves are seen by their maps only; of those from the SSD they
            // tell.
            touched.reads = touched
                .reads
                .saturating_add((touched.mapped && tier == Tier::Nvm).into());
            let access = Access {
                unit,
                op: Op::Read,
                bytes: touched.bytes,
                request_bytes: touched.request_bytes,
                device: DeviceId(device as u8),
            };
            Some((access, touched))
        };
        located.into_iter().filter_map(access).collect()
    }

    /// Counts accesses, and queues the steps that the policy takes because of them.
    fn count(&mut self, accesses: Accesses, marks: Marks, catalog: &dyn Catalog) {
        let located = self.located(accesses, catalog);
        let ops = |touched: &Touched| [(Op::Read, touched.reads), (Op::Write, touched.writes)];
        for (access, touched) in &located {
            let served = &mut self.served[self.tiers[access.device.index()] as usize];
            served.reads += u64::from(touched.reads);
            served.writes += u64::from(touched.writes);
            for (op, times) in ops(touched).into_iter().filter(|(_, times)| *times > 0) {
                self.heat.count_times(&Access { op, ..*access }, times);
            }
        }
        // In one call: what is read of a file's extents for a unit is known for its neighbours.
        let steps = self.with_policy(marks, catalog, |policy, view| {
            let mut steps = Vec::new();
            for (access, touched) in &located {
                for (op, _) in ops(touched).into_iter().filter(|(_, times)| *times > 0) {
                    let place = view.catalog.place(access.unit);
                    let access = Access { op, ..*access };
                    steps.extend(place.and_then(|place| policy.accessed(&access, &place, view)));
                }
            }
            steps
        });
        self.queue(steps, marks, catalog);
    }

    /// Queues steps that may be done; the policy hears of the others.
    fn queue(&mut self, steps: Vec<Step>, marks: Marks, catalog: &dyn Catalog) {
        for step in steps {
            // The store keeps one copy of each block.
            let may = step.act == Act::Move && !self.arrivals.is_back(&step, self.now_ms);
            if !may || self.given.contains_key(&step.unit) {
                self.with_policy(marks, catalog, |policy, view| policy.failed(&step, view));
                continue;
            }
            self.mover.offer(step, UNIT.bytes());
        }
    }

    /// Makes a plan, unless the last one is still carried out or found nothing.
    fn make_plan(&mut self, marks: Marks, meters: &Meters, catalog: &dyn Catalog) {
        let begun_ns = meters.now_ns();
        if self.mover.len().1 > 0 || begun_ns < self.rests_until_ns {
            return;
        }
        let budget = Budget {
            bytes: PLAN_STEPS * UNIT.bytes(),
            quiet: self.devices.iter().all(|device| device.queue == 0),
        };
        let plan = self.with_policy(marks, catalog, |policy, view| policy.plan(view, budget));
        self.waiting = plan.waiting;
        self.queue(plan.steps, marks, catalog);
        if self.mover.len().1 == 0 {
            let now_ns = meters.now_ns();
            self.rests_until_ns = now_ns + REST * now_ns.saturating_sub(begun_ns);
        }
    }

    /// Takes the queued steps for a step of the daemon's mover, as jobs with at most `most` blocks or one
    /// unit.
    fn take(&mut self, most: u64, marks: Marks, catalog: &dyn Catalog) -> Vec<Job> {
        let units = Units::of(catalog);
        let (mut left, mut jobs) = (most, Vec::<Job>::new());
        while left >= UNIT_BLOCKS.min(most) && left > 0 {
            let Some((number, step, _)) = self.mover.next(self.now_ms, |_| true) else {
                break;
            };
            let [from, to] = [step.from, step.to].map(|id| self.tiers[id.index()]);
            let pieces = units.pieces(step.unit);
            let moves: Vec<Move> = pieces
                .iter()
                .filter(|piece| piece.tier == from && !self.bad.contains(&piece.at))
                .map(|piece| piece.to_move())
                .collect();
            if moves.is_empty() {
                self.mover.fail(number);
                self.with_policy(marks, catalog, |policy, view| policy.failed(&step, view));
                continue;
            }
            tracing::debug!(unit = %step.unit, from = from.name(), to = to.name(), "{}", step.reason);
            left = left.saturating_sub(moves.iter().map(|moved| u64::from(moved.len)).sum());
            let cause = cause_of(step.cause);
            let same = |job: &&mut Job| (job.from, job.to, job.cause) == (from, to, cause);
            match jobs.iter_mut().find(same) {
                Some(job) => job.moves.extend(moves),
                None => jobs.push(Job {
                    from,
                    to,
                    cause,
                    of: None,
                    moves,
                    waiting: None,
                }),
            }
            self.given.insert(step.unit, (number, step));
        }
        jobs
    }

    /// Adds what waits, one line for each pair of tiers and cause.
    fn add_waiting(&self, jobs: &mut Vec<Job>) {
        for waiting in &self.waiting {
            let [from, to] = [waiting.from, waiting.to].map(|id| self.tiers[id.index()]);
            let cause = cause_of(waiting.cause);
            if !jobs
                .iter()
                .any(|job| (job.from, job.to, job.cause) == (from, to, cause))
            {
                jobs.push(Job {
                    from,
                    to,
                    cause,
                    of: None,
                    moves: Vec::new(),
                    waiting: Some(waiting.reason.clone().into_owned()),
                });
            }
        }
    }

    /// Steps that the mover was given and has not done cannot be done now.
    fn give_up(&mut self, marks: Marks, catalog: &dyn Catalog) {
        for (number, step) in std::mem::take(&mut self.given).into_values() {
            self.mover.fail(number);
            self.with_policy(marks, catalog, |policy, view| policy.failed(&step, view));
        }
    }

    /// Calls the policy with what it may see.
    fn with_policy<T>(
        &mut self,
        marks: Marks,
        catalog: &dyn Catalog,
        call: impl FnOnce(&mut dyn Policy, &View<'_>) -> T,
    ) -> T {
        let places = Places {
            units: Units::of(catalog),
            tiers: &self.tiers,
            arrivals: &self.arrivals,
            bad: &self.bad,
        };
        let view = View {
            now_ms: self.now_ms,
            devices: &self.devices,
            heat: &self.heat,
            catalog: &places,
            full: marks.high as f64 / 100.0,
        };
        call(&mut *self.policy, &view)
    }
}

/// The tier with most blocks; of equal ones the slowest.
fn most_of(blocks: [u64; 3]) -> Option<Tier> {
    let most = Tier::ALL
        .into_iter()
        .rev()
        .max_by_key(|tier| blocks[*tier as usize])?;
    (blocks[most as usize] > 0).then_some(most)
}

/// A policy's cause as the daemon names it. Operators' steps are no policy's.
const fn cause_of(cause: policy::Cause) -> Cause {
    match cause {
        policy::Cause::Full | policy::Cause::Writeback => Cause::Full,
        policy::Cause::Hot => Cause::Hot,
        policy::Cause::Load => Cause::Load,
        policy::Cause::Cold => Cause::Cold,
        policy::Cause::Asked | policy::Cause::Rule => Cause::Pinned,
    }
}

impl Placement for Driver {
    fn target(&self, data: &Written, space: &SpaceStats) -> DataTarget {
        let planning = || self.fastest(data.bytes, space);
        let tier = self.state.try_lock().map_or_else(planning, |mut state| {
            if state.devices.is_empty() {
                state.look(space, &self.meters);
            }
            state.look_at_space(space);
            let bytes = u32::try_from(data.bytes).unwrap_or(u32::MAX);
            let new = NewData {
                unit: UNIT.unit(data.key, data.offset_bytes),
                bytes,
                request_bytes: bytes,
                tier: None,
            };
            let target = state.with_policy(self.marks, &Nothing, |policy, view| policy.target(&new, view));
            state
                .tiers
                .get(target.device.index())
                .copied()
                .unwrap_or(Tier::Nvm)
        });
        DataTarget::prefer(tier).with_reserve()
    }

    fn used(&self, key: InodeKey, from: FileBlock, blocks: u64, how: Use) {
        self.accesses.lock().add(key, from.0, blocks, how);
    }

    fn plan(&self, space: &SpaceStats, catalog: &dyn Catalog, most: u64) -> Vec<Job> {
        let accesses = std::mem::take(&mut *self.accesses.lock());
        let mut state = self.state.lock();
        state.look(space, &self.meters);
        if state.tiers.len() < 2 {
            // Nothing can move, so uses need not be remembered.
            return Vec::new();
        }
        let now_ms = state.now_ms;
        state.heat.advance(now_ms);
        state.give_up(self.marks, catalog);
        state.count(accesses, self.marks, catalog);
        state.make_plan(self.marks, &self.meters, catalog);
        let mut jobs = state.take(most, self.marks, catalog);
        state.add_waiting(&mut jobs);
        jobs
    }

    fn heat(&self, at: At) -> Counts {
        self.state.lock().heat.get(unit_at(at))
    }

    fn moved(&self, _job: &Job, moved: &Move) {
        let mut state = self.state.lock();
        let unit = unit_at(moved.at);
        // The first run of a unit stands for all.
        let Some((number, step)) = state.given.remove(&unit) else {
            return;
        };
        while let Some((_, Some(_))) = state.mover.advance(number) {}
        state.now_ms = self.meters.now_ns() / 1_000_000;
        let now_ms = state.now_ms;
        state.arrivals.note(unit, step.from, now_ms);
        if state.policy.resets() {
            state.heat.reset(unit);
        }
        state.with_policy(self.marks, &Nothing, |policy, view| policy.done(&step, view));
    }

    fn failed(&self, failed: &Move) {
        let mut state = self.state.lock();
        if state.bad.len() < BAD_MAX {
            state.bad.insert(failed.at);
        }
    }

    fn served(&self) -> [TierHeat; 3] {
        self.state.lock().served
    }

    fn name(&self) -> &'static str {
        self.name.name()
    }
}

#[cfg(test)]
mod tests;
