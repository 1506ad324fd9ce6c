//! Two present-day caches as policies, to compare with: dm-cache's `smq`, and write-back as bcachefs does it.
//! Their queues and rules, as far as this interface allows; not their code, and not their metadata.

use super::{Act, Budget, Cause, Found, Place, Plan, Policy, Step, Target, View, best_target};
use crate::{Access, DeviceId, DeviceView, NewData, Op, UnitId};
use std::borrow::Cow;

/// Units of a device examined for one plan.
const LOOKS: usize = 2048;

/// The device of the fastest tier (the cache) and that of the slowest (the origin).
fn ends(view: &View<'_>) -> (DeviceId, DeviceId) {
    let by = |device: &&DeviceView| (device.tier, device.id);
    let fast = view
        .devices
        .iter()
        .min_by_key(by)
        .map_or(DeviceId(0), |device| device.id);
    let slow = view
        .devices
        .iter()
        .max_by_key(by)
        .map_or(DeviceId(0), |device| device.id);
    (fast, slow)
}

fn step(unit: UnitId, act: Act, from: DeviceId, to: DeviceId, cause: Cause, reason: &'static str) -> Step {
    Step {
        unit,
        act,
        from,
        to,
        cause,
        reason: reason.into(),
    }
}

/// The device that serves a unit: the cache if it has a copy there.
fn cached(place: &Place, fast: DeviceId) -> DeviceId {
    if place.is_on(fast) { fast } else { place.device }
}

/// Makes room on the cache: drops the least used clean copies.
fn drop_cold(fast: DeviceId, hand: &mut Option<UnitId>, most: u64, view: &View<'_>, plan: &mut Plan) {
    let Found { units, next } = view.catalog.units_on(fast, *hand, LOOKS);
    *hand = next;
    let clean = units.into_iter().filter(|unit| {
        view.catalog
            .place(*unit)
            .is_some_and(|place| place.second.is_some())
    });
    let mut cold: Vec<_> = clean.map(|unit| (view.heat.get(unit).total(), unit)).collect();
    cold.sort_unstable();
    let drops = cold.into_iter().take(most as usize);
    plan.steps.extend(drops.map(|(_, unit)| {
        step(
            unit,
            Act::Drop,
            fast,
            fast,
            Cause::Full,
            "least used in the cache",
        )
    }));
}

/// dm-cache with `smq`: new data on the origin; hot units get a copy in the cache; writes to a cached unit
/// stay there and are written back in quiet times. At most a migration threshold of data in flight.
#[derive(Debug, Default)]
pub struct Smq {
    hand: Option<UnitId>,
    back: Option<UnitId>,
}

impl Policy for Smq {
    fn name(&self) -> Cow<'static, str> {
        "dm-cache smq-like".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        let (_, slow) = ends(view);
        Target {
            device: best_target(new, view, |device| device.id != slow),
            reason: "the origin".into(),
        }
    }

    fn route(&mut self, _: UnitId, _: Op, _: u32, place: &Place, view: &View<'_>) -> DeviceId {
        cached(place, ends(view).0)
    }

    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let (fast, slow) = ends(view);
        let mut plan = Plan::default();
        let most = budget.bytes / view.unit_bytes();
        // The hottest half of the remembered units is promoted, as the hotspot queue does.
        let mut hot: Vec<_> = view
            .heat
            .units()
            .filter(|(_, counts)| counts.total() >= 4 && !counts.wide)
            .collect();
        hot.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.total()));
        let outside = |unit: &UnitId| view.catalog.place(*unit).is_some_and(|place| !place.is_on(fast));
        let wanted = hot
            .into_iter()
            .map(|(unit, _)| unit)
            .filter(outside)
            .take(most as usize);
        let wanted: Vec<_> = wanted.collect();
        if !view.takes_unit(fast) {
            drop_cold(fast, &mut self.hand, wanted.len() as u64, view, &mut plan);
        } else {
            plan.steps.extend(
                wanted
                    .into_iter()
                    .map(|unit| step(unit, Act::Copy, slow, fast, Cause::Hot, "hot")),
            );
        }
        write_back(
            fast,
            slow,
            &mut self.back,
            budget.quiet || view.device(fast).fill() > 0.9,
            most,
            view,
            &mut plan,
        );
        plan
    }
}

/// Copies dirty units to the slow device.
fn write_back(
    fast: DeviceId,
    slow: DeviceId,
    hand: &mut Option<UnitId>,
    now: bool,
    most: u64,
    view: &View<'_>,
    plan: &mut Plan,
) {
    if !now {
        return;
    }
    let Found { units, next } = view.catalog.units_on(fast, *hand, LOOKS);
    *hand = next;
    let dirty = |unit: &UnitId| {
        view.catalog
            .place(*unit)
            .is_some_and(|place| place.second.is_none())
    };
    let left = most.saturating_sub(plan.steps.len() as u64);
    let back = units.into_iter().filter(dirty).take(left as usize);
    plan.steps
        .extend(back.map(|unit| step(unit, Act::Copy, fast, slow, Cause::Writeback, "written back")));
}

/// bcachefs with a foreground, a background and a promote target: writes go to the fast device and are copied
/// to the slow one by a rebalance thread that never rests; the fast copy stays as a cache; data read from the
/// slow device is promoted.
#[derive(Debug, Default)]
pub struct Writeback {
    hand: Option<UnitId>,
    back: Option<UnitId>,
}

impl Policy for Writeback {
    fn name(&self) -> Cow<'static, str> {
        "bcachefs-like".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        let (fast, _) = ends(view);
        Target {
            device: best_target(new, view, |device| device.id != fast),
            reason: "the foreground target".into(),
        }
    }

    fn route(&mut self, _: UnitId, _: Op, _: u32, place: &Place, view: &View<'_>) -> DeviceId {
        cached(place, ends(view).0)
    }

    /// Promotes a unit that was read from the slow device.
    fn accessed(&mut self, access: &Access, place: &Place, view: &View<'_>) -> Option<Step> {
        let (fast, slow) = ends(view);
        let promote = access.op == Op::Read && !place.is_on(fast) && view.takes_unit(fast);
        promote.then(|| {
            step(
                access.unit,
                Act::Copy,
                slow,
                fast,
                Cause::Hot,
                "promoted when read",
            )
        })
    }

    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let (fast, slow) = ends(view);
        let mut plan = Plan::default();
        let most = budget.bytes / view.unit_bytes();
        if view.device(fast).fill() > 0.9 {
            drop_cold(fast, &mut self.hand, most.max(16), view, &mut plan);
        }
        write_back(
            fast,
            slow,
            &mut self.back,
            true,
            most + plan.steps.len() as u64,
            view,
            &mut plan,
        );
        plan
    }
}
