//! The driver of a policy over simulated devices; it takes the place of the daemon.

mod mover;
mod probe;

use super::device::{Device, Io, Model, Started};
use super::load::{Load, Maker, Request, file};
use super::map::Map;
use super::report::{Report, Second};
use crate::figures::{Figures, Interval};
use crate::heat::Heat;
use crate::mover::{Job, JobId, Limits, Mover, StepNo};
use crate::policy::{Catalog, Policy, View};
use crate::{Access, DeviceId, DeviceState, DeviceView, NewData, Op, UnitId, UnitSize};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// Milliseconds between two ticks.
const TICK_MS: u64 = 100;
/// Time to serve a request from memory, in nanoseconds.
const MEMORY_NS: u64 = 2000;
/// Time after which a process retries a request that no device could serve.
const RETRY_NS: u64 = 100_000_000;

/// A change of a device during a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fault {
    /// Its time, in seconds.
    pub at_s: u32,
    /// The device.
    pub device: DeviceId,
    /// Its state from then on.
    pub state: DeviceState,
    /// Its time per request from then on, as a multiple of its model's.
    pub slow: f64,
}

/// Parameters of a run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Size of units.
    pub unit: UnitSize,
    /// Bounds of the mover.
    pub limits: Limits,
    /// Faults, by time.
    pub faults: Vec<Fault>,
    /// Units kept in memory after they are read; reads then fetch whole units (Chapter III: 100).
    pub cached_units: usize,
    /// Whether a unit that is being accessed is in memory, so that moving it costs no read (an assumption of
    /// Chapter II).
    pub copy_in_memory: bool,
    /// First second of the measured part.
    pub from_s: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            unit: UnitSize::DEFAULT,
            limits: Limits::default(),
            faults: Vec::new(),
            cached_units: 0,
            copy_in_memory: false,
            from_s: 0,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A piece of a request has ended.
    Ended(usize),
    /// A process makes its next request.
    Next(u32),
    /// A request served from memory has ended.
    Memory(u32),
    Tick,
    Fault(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Process(u32),
    /// A step, and the number of daemon restarts before it.
    Mover(StepNo, u32),
}

#[derive(Debug, Clone, Copy)]
struct Request1 {
    owner: Owner,
    unit: UnitId,
    device: DeviceId,
    op: Op,
    bytes: u32,
    request_bytes: u32,
    since_ns: u64,
    pieces: u32,
}

#[derive(Debug, Clone, Default)]
struct Process {
    parts: u32,
    since_ns: u64,
    bytes: u32,
}

/// Jobs of operators, as a driver keeps them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jobs {
    /// Jobs, oldest first.
    pub jobs: Vec<Job>,
    /// The last number given out.
    last: u64,
}

/// Devices with a policy and a load.
#[derive(Debug)]
pub struct World {
    options: Options,
    load: Load,
    maker: Maker,
    rng: fastrand::Rng,
    devices: Vec<Device>,
    views: Vec<DeviceView>,
    map: Map,
    heat: Heat,
    policy: Box<dyn Policy>,
    mover: Mover,
    steps: HashMap<StepNo, mover::Under>,
    jobs: Jobs,
    life: u32,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sent: u64,
    now_ns: u64,
    ios: Vec<Request1>,
    spare: Vec<usize>,
    processes: Vec<Process>,
    cache: VecDeque<UnitId>,
    done: [Vec<[u64; 2]>; 2],
    report: Report,
    started: Vec<Started>,
}

macro_rules! view {
    ($world:expr) => {
        View {
            now_ms: $world.now_ns / 1_000_000,
            devices: &$world.views,
            heat: &$world.heat,
            catalog: &$world.map,
            full: crate::policy::FULL,
        }
    };
}
use view;

impl World {
    /// A pool of devices with the load's data, placed by the policy.
    #[must_use]
    pub fn new(models: &[Model], load: Load, policy: Box<dyn Policy>, options: Options) -> Self {
        let totals: Vec<u64> = models.iter().map(|model| model.total_bytes).collect();
        let mut rng = fastrand::Rng::with_seed(options.seed);
        let views = models.iter().enumerate().map(|(at, model)| DeviceView {
            id: DeviceId(at as u8),
            name: DeviceId(at as u8).to_string().into(),
            tier: model.tier,
            total_bytes: model.total_bytes,
            free_bytes: model.total_bytes,
            pending_bytes: 0,
            state: DeviceState::Online,
            parallel: model.parallel,
            queue: 0,
            figures: Figures {
                service: probe::service(model, &mut rng),
                ..Figures::default()
            },
        });
        let views: Vec<_> = views.collect();
        let report = Report {
            policy: policy.name().into_owned(),
            load: load.name.clone(),
            seconds: Vec::new(),
            latency_us: Vec::new(),
            from_s: options.from_s as usize,
            moved_bytes: 0,
            moves: Vec::new(),
            share: Vec::new(),
            refused: 0,
            hits: 0,
        };
        let mut world = Self {
            maker: Maker::new(&load),
            rng,
            devices: models.iter().cloned().map(Device::new).collect(),
            map: Map::new(options.unit.bytes(), &totals),
            heat: Heat::for_pool(options.unit, totals.iter().sum()),
            policy,
            mover: Mover::new(options.limits),
            steps: HashMap::new(),
            jobs: Jobs::default(),
            life: 0,
            events: BinaryHeap::new(),
            sent: 0,
            now_ns: 0,
            ios: Vec::new(),
            spare: Vec::new(),
            processes: vec![Process::default(); load.most_processes() as usize],
            cache: VecDeque::new(),
            done: [vec![[0; 2]; views.len()], vec![[0; 2]; views.len()]],
            views,
            report,
            started: Vec::new(),
            load,
            options,
        };
        world.preload();
        world
    }

    /// Runs the whole load.
    #[must_use]
    pub fn run(mut self) -> Report {
        let end = u64::from(self.load.seconds());
        self.run_until(end);
        self.finish()
    }

    /// Runs up to a second of the load. The map can be inspected afterwards, and another call continues the
    /// run.
    pub fn run_until(&mut self, seconds: u64) {
        if self.now_ns == 0 && self.events.is_empty() {
            for process in 0..self.processes.len() as u32 {
                self.at(1 + u64::from(process), Event::Next(process));
            }
            self.at(TICK_MS * 1_000_000, Event::Tick);
            for at in 0..self.options.faults.len() {
                let ns = u64::from(self.options.faults[at].at_s) * 1_000_000_000;
                self.at(ns, Event::Fault(at));
            }
        }
        let end_ns = seconds * 1_000_000_000;
        while let Some(Reverse((ns, ..))) = self.events.peek()
            && *ns < end_ns
            && let Some(Reverse((ns, _, event))) = self.events.pop()
        {
            self.now_ns = ns;
            match event {
                Event::Ended(tag) => self.piece_ended(tag),
                Event::Next(process) => self.next_request(process),
                Event::Memory(process) => self.part_ended(process),
                Event::Tick => self.tick(),
                Event::Fault(at) => self.fault(at),
            }
        }
    }

    /// Returns the results.
    #[must_use]
    pub fn finish(mut self) -> Report {
        self.report.latency_us.sort_unstable_by(f32::total_cmp);
        let counts = (0..self.views.len()).map(|at| self.map.count(DeviceId(at as u8)) as f64);
        let counts: Vec<f64> = counts.collect();
        let all: f64 = counts.iter().sum();
        self.report.share = counts.iter().map(|count| count / all.max(1.0)).collect();
        self.report.moves = self.mover.tallies().collect();
        self.report.moved_bytes = self.report.moves.iter().map(|(.., tally)| tally.bytes).sum();
        self.report
    }

    /// The places of units.
    #[must_use]
    pub const fn map(&self) -> &Map {
        &self.map
    }

    /// The places of units, to set holds.
    pub const fn map_mut(&mut self) -> &mut Map {
        &mut self.map
    }

    /// Devices as the policy sees them.
    #[must_use]
    pub fn devices(&self) -> &[DeviceView] {
        &self.views
    }

    /// Bytes moved or copied so far.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.mover.tallies().map(|(.., tally)| tally.bytes).sum()
    }

    /// Starts a job that evacuates a device.
    pub fn start_job(&mut self, device: DeviceId) -> JobId {
        self.jobs.last += 1;
        let id = JobId(self.jobs.last);
        self.jobs.jobs.push(Job::new(id, device, 0));
        id
    }

    /// Jobs, in the form in which they are saved.
    #[must_use]
    pub const fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    /// Sets the state of a device.
    pub fn set_state(&mut self, device: DeviceId, state: DeviceState) {
        self.views[device.index()].state = state;
    }

    /// Simulates a crash and restart of the daemon with saved jobs: steps in flight, heat and queues are
    /// lost, the map is kept.
    pub fn crash(&mut self, jobs: Jobs) {
        self.life += 1;
        self.drop_steps();
        self.mover = Mover::new(self.options.limits);
        self.jobs = jobs;
        self.heat = Heat::for_pool(
            self.options.unit,
            self.views.iter().map(|view| view.total_bytes).sum(),
        );
        self.cache.clear();
    }

    /// The state that a policy sees.
    #[must_use]
    pub fn view(&self) -> View<'_> {
        view!(self)
    }

    fn at(&mut self, ns: u64, event: Event) {
        self.sent += 1;
        self.events.push(Reverse((ns, self.sent, event)));
    }

    fn preload(&mut self) {
        for set in 0..self.load.sets.len() {
            let (units, created) = (self.load.sets[set], self.load.is_created(set));
            for at in 0..units {
                let unit = if created {
                    UnitId {
                        key: file(set, u64::from(at)),
                        index: 0,
                    }
                } else {
                    UnitId {
                        key: file(set, 0),
                        index: at,
                    }
                };
                let bytes = self.options.unit.bytes() as u32;
                self.add(unit, bytes, bytes);
            }
        }
    }

    /// Gives a new unit a place. Returns `false` if there is no room.
    fn add(&mut self, unit: UnitId, bytes: u32, request_bytes: u32) -> bool {
        let new = NewData {
            unit,
            bytes,
            request_bytes,
            tier: None,
        };
        let target = self.policy.target(&new, &view!(self)).device;
        let able = |view: &&DeviceView| view.state.takes_new() && view.free_bytes > 0;
        let others = self.views.iter().filter(able).map(|view| view.id);
        let order: Vec<_> = std::iter::once(target)
            .filter(|id| self.views[id.index()].state.takes_new())
            .chain(others)
            .collect();
        for device in order {
            if self.map.add(unit, device, self.now_ns / 1_000_000) {
                self.refresh(device);
                return true;
            }
        }
        false
    }

    fn refresh(&mut self, device: DeviceId) {
        self.views[device.index()].free_bytes = self.map.free_bytes(device);
    }

    fn refresh_all(&mut self) {
        (0..self.views.len()).for_each(|at| self.refresh(DeviceId(at as u8)));
    }

    fn next_request(&mut self, process: u32) {
        let seconds = self.now_ns as f64 / 1e9;
        let unit_bytes = self.options.unit.bytes();
        let made = self
            .maker
            .next(&self.load, process, seconds, unit_bytes, &mut self.rng);
        let Some(request) = made else {
            self.at(self.now_ns + RETRY_NS, Event::Next(process));
            return;
        };
        if let Some(gone) = request.gone {
            let unit = UnitId { key: gone, index: 0 };
            self.map.remove(unit);
            self.heat.reset(unit);
            self.refresh_all();
        }
        self.processes[process as usize] = Process {
            parts: 1,
            since_ns: self.now_ns,
            bytes: request.bytes,
        };
        self.split(process, &request);
        // Removes the extra part that kept the request open during the split.
        self.processes[process as usize].parts -= 1;
        if self.processes[process as usize].parts == 0 {
            self.report.refused += 1;
            self.at(self.now_ns + RETRY_NS, Event::Next(process));
        }
    }

    fn split(&mut self, process: u32, request: &Request) {
        let unit_bytes = self.options.unit.bytes();
        let op = if request.read { Op::Read } else { Op::Write };
        let (mut at, end) = (
            request.offset_bytes,
            request.offset_bytes + u64::from(request.bytes),
        );
        while at < end {
            let unit = self.options.unit.unit(request.key, at);
            let stop = (at / unit_bytes + 1) * unit_bytes;
            let bytes = (stop.min(end) - at) as u32;
            self.serve(process, unit, op, at % unit_bytes, bytes, request.bytes);
            at += u64::from(bytes);
        }
    }

    fn serve(&mut self, process: u32, unit: UnitId, op: Op, offset: u64, bytes: u32, request_bytes: u32) {
        if op == Op::Read && (self.cached(unit) || self.map.get(unit).is_none()) {
            self.report.hits += 1;
            self.processes[process as usize].parts += 1;
            self.at(self.now_ns + MEMORY_NS, Event::Memory(process));
            return;
        }
        if self.map.get(unit).is_none() && !self.add(unit, bytes, request_bytes) {
            return;
        }
        let Some(place) = self.map.place(unit) else { return };
        let able = |id: DeviceId| {
            let state = self.views[id.index()].state;
            if op == Op::Read {
                state.reads()
            } else {
                state.writes()
            }
        };
        let mut device = self.policy.route(unit, op, bytes, &place, &view!(self));
        if !able(device) {
            let other = if device == place.device {
                place.second
            } else {
                Some(place.device)
            };
            match other {
                Some(other) if able(other) => device = other,
                _ => return,
            }
        }
        if op == Op::Write {
            self.map.written(unit);
            self.map.keep_only(unit, device, self.now_ns / 1_000_000);
            self.refresh_all();
        }
        let Some(entry) = self.map.get(unit) else { return };
        let slot = entry.slots[usize::from(entry.place.device != device)];
        let (mut from, mut length) = (offset, bytes);
        if op == Op::Read
            && self.options.cached_units > 0
            && request_bytes <= self.options.unit.bytes() as u32
        {
            (from, length) = (0, self.options.unit.bytes() as u32);
        }
        self.processes[process as usize].parts += 1;
        let request = Request1 {
            owner: Owner::Process(process),
            unit,
            device,
            op,
            bytes: length,
            request_bytes,
            since_ns: self.now_ns,
            pieces: Device::pieces(length),
        };
        self.submit(request, slot * self.options.unit.bytes() + from);
    }

    fn cached(&mut self, unit: UnitId) -> bool {
        let Some(at) = self.cache.iter().position(|cached| *cached == unit) else {
            return false;
        };
        if let Some(unit) = self.cache.remove(at) {
            self.cache.push_back(unit);
        }
        true
    }

    fn submit(&mut self, request: Request1, at: u64) {
        let tag = self.spare.pop().unwrap_or_else(|| {
            self.ios.push(request);
            self.ios.len() - 1
        });
        self.ios[tag] = request;
        let io = Io {
            tag,
            op: request.op,
            at,
            bytes: request.bytes.max(1),
            background: matches!(request.owner, Owner::Mover(..)),
            since_ns: self.now_ns,
        };
        self.devices[request.device.index()].submit(io, self.now_ns);
        self.views[request.device.index()].queue += 1;
        self.start(request.device);
    }

    fn start(&mut self, device: DeviceId) {
        let mut started = std::mem::take(&mut self.started);
        self.devices[device.index()].start(self.now_ns, &mut self.rng, &mut started);
        for piece in started.drain(..) {
            self.at(piece.ends_ns, Event::Ended(piece.tag));
        }
        self.started = started;
    }

    fn piece_ended(&mut self, tag: usize) {
        self.ios[tag].pieces -= 1;
        let request = self.ios[tag];
        let last = request.pieces == 0;
        let background = matches!(request.owner, Owner::Mover(..));
        self.devices[request.device.index()].ended(background, last, self.now_ns);
        self.start(request.device);
        if !last {
            return;
        }
        self.spare.push(tag);
        let at = request.device.index();
        self.views[at].queue -= 1;
        let op = usize::from(request.op == Op::Write);
        self.done[0][at][op] += 1;
        self.done[1][at][op] += u64::from(request.bytes);
        match request.owner {
            Owner::Process(process) => {
                self.access_ended(&request);
                self.part_ended(process);
            }
            Owner::Mover(no, life) if life == self.life => self.moved_part(no),
            Owner::Mover(..) => {}
        }
    }

    fn access_ended(&mut self, request: &Request1) {
        let second = self.second();
        let bytes = if request.op == Op::Write {
            &mut second.written
        } else {
            &mut second.read
        };
        bytes[request.device.index()] += u64::from(request.bytes);
        let us = (self.now_ns - request.since_ns) as f64 / 1000.0;
        let access = Access {
            unit: request.unit,
            op: request.op,
            bytes: request.bytes,
            request_bytes: request.request_bytes,
            device: request.device,
        };
        self.views[request.device.index()]
            .figures
            .sample(request.op, request.bytes, us);
        self.heat.count(&access);
        if request.op == Op::Read && self.options.cached_units > 0 && !self.cached(request.unit) {
            self.cache.push_back(request.unit);
            if self.cache.len() > self.options.cached_units {
                self.cache.pop_front();
            }
        }
        let Some(place) = self.map.place(request.unit) else {
            return;
        };
        if let Some(step) = self.policy.accessed(&access, &place, &view!(self)) {
            let (unit, bytes) = (step.unit, self.options.unit.bytes());
            let whole = u64::from(request.bytes) >= bytes || self.options.copy_in_memory || self.cached(unit);
            if self.mover.offer(step, bytes) {
                self.pump(whole.then_some(unit));
            }
        }
    }

    fn second(&mut self) -> &mut Second {
        let at = (self.now_ns / 1_000_000_000) as usize;
        while self.report.seconds.len() <= at {
            self.report.seconds.push(Second {
                written: vec![0; self.views.len()],
                read: vec![0; self.views.len()],
                ..Second::default()
            });
        }
        &mut self.report.seconds[at]
    }

    fn part_ended(&mut self, process: u32) {
        let state = &mut self.processes[process as usize];
        state.parts -= 1;
        if state.parts > 0 {
            return;
        }
        let (bytes, since_ns) = (state.bytes, state.since_ns);
        let second = self.second();
        second.requests += 1;
        second.bytes += u64::from(bytes);
        if self.now_ns / 1_000_000_000 >= u64::from(self.options.from_s) {
            self.report
                .latency_us
                .push((self.now_ns - since_ns) as f32 / 1000.0);
        }
        let think_ns = u64::from(self.load.think_us) * 1000;
        self.at(self.now_ns + think_ns, Event::Next(process));
    }

    fn tick(&mut self) {
        self.at(self.now_ns + TICK_MS * 1_000_000, Event::Tick);
        self.second();
        let mut quiet = true;
        for (at, device) in self.devices.iter_mut().enumerate() {
            let (busy_ns, depth_ns) = device.take_load(self.now_ns);
            let interval = Interval {
                us: TICK_MS as f64 * 1000.0,
                busy_us: busy_ns as f64 / 1000.0,
                depth_us: depth_ns as f64 / 1000.0,
                requests: std::mem::take(&mut self.done[0][at]),
                bytes: std::mem::take(&mut self.done[1][at]),
            };
            let view = &mut self.views[at];
            view.figures.tick(&interval, view.parallel);
            quiet &= device.is_quiet() && view.figures.busy < 0.3;
        }
        (0..self.devices.len()).for_each(|at| self.start(DeviceId(at as u8)));
        self.heat.advance(self.now_ns / 1_000_000);
        let budget = self.mover.budget(self.now_ns / 1_000_000, quiet);
        let bytes = self.options.unit.bytes();
        for job in &mut self.jobs.jobs {
            let plan = job.plan(&view!(self), budget);
            plan.steps.into_iter().for_each(|step| {
                self.mover.offer(step, bytes);
            });
        }
        let budget = self.mover.budget(self.now_ns / 1_000_000, quiet);
        let plan = self.policy.plan(&view!(self), budget);
        for step in plan.steps {
            self.mover.offer(step, bytes);
        }
        self.pump(None);
    }

    fn fault(&mut self, at: usize) {
        let fault = self.options.faults[at];
        self.views[fault.device.index()].state = fault.state;
        self.devices[fault.device.index()].slow = fault.slow;
        if fault.state == DeviceState::Absent {
            self.mover.device_lost(fault.device);
        }
    }
}
