//! `balance`: places units so that the mean time of all accesses becomes minimal, by a model of the devices'
//! queues. Where it is asked for, hot units that are mostly read get a second copy, and each read goes to the
//! device that answers sooner.
//!
//! - The cost of an access on a device is its service time ([`crate::figures::Service`]), for reads and
//!   writes separately; [`model`] computes the mean time for a given placement.
//! - For data in use that is written anew, room is made ahead on the device that serves it best, by units that
//!   lose less elsewhere, as far as such data pays for it.
//! - A unit moves when it has *already lost* by its place as much as the move costs: bytes read and written,
//!   and wear. So all moves together cost at most as much as staying has cost, for any load (docs/adr/0029,
//!   "No oscillation").
//! - New data goes where it adds least; between nearly equal devices, to the one that is ready first. While
//!   its use is unknown, all devices that are best at reads or at writes share it.
//! - Second copies are the first to go when room is short.

mod model;
mod plan;

use super::{Budget, Place, Plan, Policy, Step, Target, View, best_target};
use crate::figures::Average;
use crate::heat::Counts;
use crate::{Access, DeviceId, DeviceView, NewData, Op, Tier, UnitId};
use hashbrown::HashMap;
use model::{Demand, Part};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Parameters of [`Balance`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BalanceConfig {
    /// The loss, as a multiple of the cost of its move, from which a unit moves. Default 1; more is slower
    /// and moves less.
    pub pay: f64,
    /// The least advantage of another place, as a share of its cost; smaller ones are measurement noise.
    /// Default 0.1.
    pub margin: f64,
    /// Wear of flash: an extra cost of writes, as a share of their time. Default 0.25.
    pub wear: f64,
    /// Whether hot units get second copies. Default false: where room is short they cost more than they give
    /// (docs/results/placement.md).
    pub copies: bool,
    /// Share of a device that must stay free of second copies. Default 0.2.
    pub copies_free: f64,
    /// Milliseconds between two plans. Default 500.
    pub period_ms: u64,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        Self {
            pay: 1.0,
            margin: 0.1,
            wear: 0.25,
            copies: false,
            copies_free: 0.2,
            period_ms: 500,
        }
    }
}

/// Most units whose last move is remembered; further units do not move.
const MOVED_MAX: usize = 1 << 16;
/// The largest added time, as a multiple of that on the best device, for which new data goes to a device that
/// is ready sooner: prices are as old as the last plan, queue lengths are current.
const AS_GOOD: f64 = 2.0;

/// The `balance` policy. See the module.
#[derive(Debug, Default)]
pub struct Balance {
    config: BalanceConfig,
    /// Mean bytes of a read and of a write, among requests no larger than a unit.
    bytes: [Average; 2],
    demand: Option<Demand>,
    /// Mean reads and writes of a unit with heat.
    usual: [f64; 2],
    /// Counters of units at their last move, and the half-life of that move.
    moved: HashMap<UnitId, (Counts, u32)>,
    planned_ms: u64,
    /// Where the search for cold units of each device continues.
    hands: [Option<UnitId>; DeviceId::MAX],
    inflow: [Inflow; DeviceId::MAX],
}

/// Data in use that is written anew and that a device would serve best, whether it has room or not.
#[derive(Debug, Clone, Copy, Default)]
struct Inflow {
    /// Units since the last plan.
    units: f64,
    /// Units between two plans, averaged.
    usual: f64,
    /// What its accesses gain there against the next best device with room, in microseconds, less what room
    /// for it has cost.
    paid_us: f64,
}

impl Inflow {
    fn add(&mut self, units: f64, paid_us: f64) {
        self.units += units;
        self.paid_us += paid_us.max(0.0);
    }
}

impl Balance {
    /// Returns a policy with these parameters.
    #[must_use]
    pub fn new(config: BalanceConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Chooses a device for data whose use is unknown: the devices that are best at reads or at writes share
    /// it.
    fn spread(new: &NewData, view: &View<'_>) -> Target {
        let us = |device: &DeviceView, op| device.figures.service.us(op, f64::from(new.bytes));
        let is_best = |device: &DeviceView, op| {
            let mut able = view.devices.iter().filter(|other| view.takes_unit(other.id));
            able.all(|other| us(device, op) <= us(other, op))
        };
        let device = best_target(new, view, |device| {
            let best = is_best(device, Op::Read) || is_best(device, Op::Write);
            (!best, device.total_bytes - device.free_bytes)
        });
        Target {
            device,
            reason: "its use is not known yet; best at reads or at writes".into(),
        }
    }

    /// Counts data in use on the device that would serve it best if it had room. `after`: time of an access
    /// with it there, by device.
    fn note_inflow(&mut self, new: &NewData, after: &[f64], accesses: f64, view: &View<'_>) {
        let able = |device: &&DeviceView| {
            device.state.takes_new() && new.tier.is_none_or(|tier| device.tier == tier)
        };
        let devices = view.devices.iter().filter(able);
        let times = devices.map(|device| (after[device.id.index()], device.id));
        let Some((least, best)) = times.clone().min_by(|a, b| a.0.total_cmp(&b.0)) else {
            return;
        };
        let others = times.filter(|(_, id)| *id != best && view.takes_unit(*id));
        let next = others
            .map(|(time, _)| time)
            .min_by(f64::total_cmp)
            .unwrap_or(least);
        let units = f64::from(new.bytes) / view.unit_bytes() as f64;
        self.inflow[best.index()].add(units, (next - least) * accesses);
    }

    /// The demand of accesses on a device.
    fn part(&self, device: &DeviceView, reads: f64, writes: f64, wide: bool, view: &View<'_>) -> Part {
        let bytes = |op: usize| {
            let usual = self.bytes[op].get().unwrap_or(4096.0);
            if wide { view.unit_bytes() as f64 } else { usual }
        };
        let service = &device.figures.service;
        let us = reads * service.us(Op::Read, bytes(0)) + writes * service.us(Op::Write, bytes(1));
        let parallel = f64::from(device.parallel.max(1));
        Part {
            queue: us / parallel,
            delay: us * (parallel - 1.0) / parallel,
        }
    }

    fn part_of(&self, device: &DeviceView, counts: Counts, view: &View<'_>) -> Part {
        self.part(
            device,
            f64::from(counts.reads),
            f64::from(counts.writes),
            counts.wide,
            view,
        )
    }

    /// Requests in the system.
    fn requests(view: &View<'_>) -> f64 {
        view.devices
            .iter()
            .map(|device| device.figures.depth)
            .sum::<f64>()
            .max(1.0)
    }

    /// The demand of moving a unit on its two devices, in channel × microseconds.
    fn move_parts(&self, from: &DeviceView, to: &DeviceView, view: &View<'_>) -> [Part; 2] {
        let bytes = view.unit_bytes() as f64;
        let wear = if to.tier == Tier::Ssd {
            1.0 + self.config.wear
        } else {
            1.0
        };
        let part = |device: &DeviceView, us: f64| Part {
            queue: us / f64::from(device.parallel.max(1)),
            delay: 0.0,
        };
        [
            part(from, from.figures.service.us(Op::Read, bytes)),
            part(to, to.figures.service.us(Op::Write, bytes) * wear),
        ]
    }

    /// Counters since a unit came to its place.
    fn since_moved(&self, unit: UnitId, counts: Counts, age: u32) -> Counts {
        let Some((then, at)) = self.moved.get(&unit) else {
            return counts;
        };
        let halves = age.wrapping_sub(*at).min(16);
        Counts {
            reads: counts
                .reads
                .saturating_sub(then.reads.checked_shr(halves).unwrap_or(0)),
            writes: counts
                .writes
                .saturating_sub(then.writes.checked_shr(halves).unwrap_or(0)),
            wide: counts.wide,
        }
    }

    /// Number of units whose move can still be remembered. Others must not move, or their accesses would pay
    /// for another move.
    fn memory_left(&mut self, view: &View<'_>) -> u64 {
        if self.moved.len() >= MOVED_MAX / 2 {
            // Counts that paid for a move have decayed to zero, or the unit was forgotten.
            let age = view.heat.age();
            self.moved.retain(|unit, (then, at)| {
                let halves = age.wrapping_sub(*at).min(16);
                let paid = u32::from(then.reads) >> halves | u32::from(then.writes) >> halves;
                paid > 0 && view.heat.get(*unit).total() > 0
            });
        }
        MOVED_MAX.saturating_sub(self.moved.len()) as u64
    }

    /// The time until a device would have served an access that arrives immediately.
    fn ready_us(device: &DeviceView, op: Op, bytes: u32) -> f64 {
        let us = device.figures.service.us(op, f64::from(bytes));
        let parallel = f64::from(device.parallel.max(1));
        let before = (f64::from(device.queue) + 1.0 - parallel).max(0.0);
        us * (1.0 + before / parallel)
    }
}

impl Policy for Balance {
    fn name(&self) -> Cow<'static, str> {
        "balance".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        if self.usual == [0.0; 2] {
            return Self::spread(new, view);
        }
        let requests = Self::requests(view);
        let counts = view.heat.get(new.unit);
        let is_known = counts.total() > 0;
        let units = f64::from(new.bytes) / view.unit_bytes() as f64;
        let (reads, writes) = if is_known {
            // The write itself is one more.
            let now = (f64::from(new.bytes) / self.bytes[1].get().unwrap_or(4096.0)).max(1.0);
            (
                f64::from(counts.reads) * units,
                f64::from(counts.writes) * units + now,
            )
        } else {
            (self.usual[0], self.usual[1].max(1.0))
        };
        let wide = u64::from(new.request_bytes) > view.unit_bytes();
        let part = |device| self.part(device, reads, writes, wide, view);
        let parts: Vec<Part> = view.devices.iter().map(part).collect();
        let mut demand = self
            .demand
            .take()
            .unwrap_or_else(|| Demand::new(view.devices.len()));
        let after: Vec<f64> = view
            .devices
            .iter()
            .map(|device| demand.response_us(requests, &[(device.id, parts[device.id.index()])]))
            .collect();
        let best = best_target(new, view, |device| after[device.id.index()]);
        // Compares the added times, not the totals: a single unit adds next to nothing to a total.
        let before = demand.response_us(requests, &[]);
        let added = |at: usize| after[at] - before;
        let good = added(best.index()) * AS_GOOD;
        let device = best_target(new, view, |device| {
            let at = device.id.index();
            let other = added(at) > good;
            (
                other,
                if other {
                    after[at]
                } else {
                    Self::ready_us(device, Op::Write, new.bytes)
                },
            )
        });
        if is_known {
            // Its demand is part of the whole already.
            self.note_inflow(new, &after, demand.accesses, view);
        } else {
            demand.add(device, parts[device.index()]);
            demand.accesses += reads + writes;
        }
        self.demand = Some(demand);
        Target {
            device,
            reason: format!("{:.0} µs an access with it there", after[device.index()]).into(),
        }
    }

    fn route(&mut self, _unit: UnitId, op: Op, bytes: u32, place: &Place, view: &View<'_>) -> DeviceId {
        let Some(second) = place.second else {
            return place.device;
        };
        let [first, other] = [place.device, second].map(|id| view.device(id));
        let ready = |device: &DeviceView| {
            let able = if op == Op::Read {
                device.state.reads()
            } else {
                device.state.writes()
            };
            if able {
                Self::ready_us(device, op, bytes)
            } else {
                f64::INFINITY
            }
        };
        if ready(other) < ready(first) {
            other.id
        } else {
            first.id
        }
    }

    fn accessed(&mut self, access: &Access, _place: &Place, view: &View<'_>) -> Option<Step> {
        if !access.is_wide(view.heat.unit()) {
            self.bytes[usize::from(access.op == Op::Write)].add(f64::from(access.bytes));
        }
        None
    }

    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        if view.now_ms < self.planned_ms + self.config.period_ms {
            return Plan::default();
        }
        self.planned_ms = view.now_ms;
        self.make_plan(view, budget)
    }

    fn resets(&self) -> bool {
        false
    }

    fn done(&mut self, step: &Step, view: &View<'_>) {
        let counts = view.heat.get(step.unit);
        if counts.total() > 0 {
            self.moved.insert(step.unit, (counts, view.heat.age()));
        }
    }

    fn failed(&mut self, step: &Step, view: &View<'_>) {
        // It has to lose as much again before it is tried again.
        self.done(step, view);
    }
}
