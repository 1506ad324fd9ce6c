//! `hierarchy`: tiers as Strata has them, by units. New data goes to the fastest tier with room; a full tier
//! demotes its least used units; frequently used units are promoted.
//!
//! It has hysteresis (a moved unit does not go back for a while) and a cost test: a unit is promoted only if
//! it has already lost more by its place than the move costs, and it displaces only units that are used less
//! than half as much.

use super::{Act, Budget, Cause, Found, Place, Plan, Policy, Step, Target, View, Waiting, best_target};
use crate::heat::Counts;
use crate::{DeviceId, DeviceView, NewData, Op, UnitId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Parameters of [`Hierarchy`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HierarchyConfig {
    /// Fill from which a device demotes its coldest units. Default 0.95.
    pub high: f64,
    /// Fill at which demotion stops. Default 0.90.
    pub low: f64,
    /// Time for which a moved unit does not go back, in milliseconds. Default 10,000.
    pub stay_ms: u64,
    /// Counted reads from which a unit may be promoted. Default 4.
    pub warm_reads: u16,
}

impl Default for HierarchyConfig {
    fn default() -> Self {
        Self {
            high: 0.95,
            low: 0.90,
            stay_ms: 10_000,
            warm_reads: 4,
        }
    }
}

/// Units of a device examined for one plan.
const LOOKS: usize = 2048;

/// The `hierarchy` policy. See the module.
#[derive(Debug, Default)]
pub struct Hierarchy {
    config: HierarchyConfig,
    draining: [bool; DeviceId::MAX],
    /// Where the search for cold units of each device continues.
    hands: [Option<UnitId>; DeviceId::MAX],
}

impl Hierarchy {
    /// Returns a policy with these parameters.
    #[must_use]
    pub fn new(config: HierarchyConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Whether a unit must not leave for faster (or slower) devices: it is held, or has come from there
    /// lately.
    fn stays(&self, place: &Place, up: bool, view: &View<'_>) -> bool {
        let lately = place.since_ms > 0 && place.since_ms + self.config.stay_ms > view.now_ms;
        let here = view.device(place.device).tier;
        let back = place.came_from.is_some_and(|from| {
            let there = view.device(from).tier;
            if up { there < here } else { there > here }
        });
        place.hold.is_some() || place.second.is_some() || lately && back
    }

    /// The coldest units that the hand finds on a device, coldest first.
    fn coldest(&mut self, device: DeviceId, view: &View<'_>) -> Vec<(u32, UnitId)> {
        let hand = &mut self.hands[device.index()];
        let Found { mut units, next } = view.catalog.units_on(device, *hand, LOOKS);
        *hand = next;
        let place = |unit| view.catalog.place(unit);
        units.retain(|unit| place(*unit).is_some_and(|place| !self.stays(&place, false, view)));
        let mut cold: Vec<_> = units
            .into_iter()
            .map(|unit| (view.heat.get(unit).total(), unit))
            .collect();
        cold.sort_unstable();
        cold
    }

    fn down(&mut self, from: &DeviceView, view: &View<'_>, left: &mut u64, plan: &mut Plan) {
        let draining = &mut self.draining[from.id.index()];
        if from.fill_with(view.unit_bytes()) > self.config.high {
            *draining = true;
        } else if from.fill() <= self.config.low {
            *draining = false;
        }
        if !*draining || !from.state.reads() {
            return;
        }
        let slower = view.devices.iter().filter(|device| device.tier > from.tier);
        let able = slower.clone().filter(|device| {
            device.state.takes_new() && device.has_room(view.unit_bytes(), self.config.high)
        });
        let want = ((from.fill() - self.config.low) * from.total_bytes as f64) as u64;
        let Some(to) = able.min_by_key(|device| device.tier).map(|device| device.id) else {
            if let Some(next) = slower.min_by_key(|device| device.tier) {
                plan.waiting.push(Waiting {
                    from: from.id,
                    to: next.id,
                    cause: Cause::Full,
                    bytes: want,
                    reason: format!("waiting: {} {} % full", next.name, next.percent()).into(),
                });
            }
            return;
        };
        let most = want.div_ceil(view.unit_bytes()).min(*left / view.unit_bytes());
        let reason = format!("{} is {} % full", from.name, from.percent());
        let cold = self.coldest(from.id, view);
        if cold.is_empty() && self.hands[from.id.index()].is_none() {
            plan.waiting.push(Waiting {
                from: from.id,
                to,
                cause: Cause::Full,
                bytes: want,
                reason: "waiting: nothing is left that may move".into(),
            });
        }
        for (_, unit) in cold.into_iter().take(most as usize) {
            *left -= view.unit_bytes();
            plan.steps.push(Step {
                unit,
                act: Act::Move,
                from: from.id,
                to,
                cause: Cause::Full,
                reason: reason.clone().into(),
            });
        }
    }

    /// The time that a unit has lost by being on `from` instead of `to`, less the cost of the move; in
    /// microseconds.
    fn gain_us(counts: Counts, from: &DeviceView, to: &DeviceView, unit_bytes: f64) -> f64 {
        let us = |device: &DeviceView, op, bytes| device.figures.service.us(op, bytes);
        let bytes = from.figures.read.request_bytes.get().unwrap_or(4096.0);
        let reads = f64::from(counts.reads) * (us(from, Op::Read, bytes) - us(to, Op::Read, bytes));
        let writes = f64::from(counts.writes) * (us(from, Op::Write, bytes) - us(to, Op::Write, bytes));
        reads + writes - us(from, Op::Read, unit_bytes) - us(to, Op::Write, unit_bytes)
    }

    /// Units of slower devices that have lost more by their place than a move to this one costs; what gains
    /// most first.
    fn warm(&self, to: &DeviceView, view: &View<'_>) -> Vec<(f64, Counts, UnitId, DeviceId)> {
        let mut warm = Vec::new();
        for (unit, counts) in view.heat.units() {
            if counts.reads < self.config.warm_reads {
                continue;
            }
            let Some(place) = view.catalog.place(unit) else {
                continue;
            };
            if self.stays(&place, true, view) {
                continue;
            }
            let from = view.device(place.device);
            if from.tier > to.tier {
                let gain = Self::gain_us(counts, from, to, view.unit_bytes() as f64);
                if gain > 0.0 {
                    warm.push((gain, counts, unit, place.device));
                }
            }
        }
        warm.sort_by(|a, b| b.0.total_cmp(&a.0));
        warm
    }

    fn up(&mut self, view: &View<'_>, left: &mut u64, plan: &mut Plan) {
        let mut fast: Vec<&DeviceView> = view
            .devices
            .iter()
            .filter(|device| device.state.takes_new())
            .collect();
        fast.sort_by_key(|device| device.tier);
        let Some(to) = fast.first().copied() else { return };
        let warm = self.warm(to, view);
        let mut room = view.room_bytes(to);
        let mut cold = if room < view.unit_bytes() && !warm.is_empty() {
            self.coldest(to.id, view)
        } else {
            Vec::new()
        };
        cold.reverse();
        for (_, counts, unit, from) in warm {
            if *left < view.unit_bytes() {
                return;
            }
            *left -= view.unit_bytes();
            if room >= view.unit_bytes() {
                room -= view.unit_bytes();
            } else {
                // Takes the place of a unit that is used less than half as much, and is promoted after that
                // unit has left.
                let Some((heat, out)) = cold.pop().filter(|(heat, _)| heat * 2 < counts.total()) else {
                    return;
                };
                plan.steps.push(Step {
                    unit: out,
                    act: Act::Move,
                    from: to.id,
                    to: from,
                    cause: Cause::Full,
                    reason: format!("{heat} uses, in the place of one with {}", counts.total()).into(),
                });
                continue;
            }
            plan.steps.push(Step {
                unit,
                act: Act::Move,
                from,
                to: to.id,
                cause: Cause::Hot,
                reason: format!(
                    "{} reads and {} writes on {}",
                    counts.reads,
                    counts.writes,
                    view.name(from)
                )
                .into(),
            });
        }
    }
}

impl Policy for Hierarchy {
    fn name(&self) -> Cow<'static, str> {
        "hierarchy".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        Target {
            device: best_target(new, view, |device| (device.tier, u64::MAX - device.free_bytes)),
            reason: "the fastest tier with room".into(),
        }
    }

    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let (mut plan, mut left) = (Plan::default(), budget.bytes);
        let mut order: Vec<&DeviceView> = view.devices.iter().collect();
        // The slowest device first: it makes room for the others.
        order.sort_by_key(|device| std::cmp::Reverse(device.tier));
        for from in order {
            self.down(from, view, &mut left, &mut plan);
        }
        self.up(view, &mut left, &mut plan);
        plan
    }
}
