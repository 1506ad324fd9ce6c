//! A plan of `balance`: moves, copies, and steps that make room.

use super::model::{Demand, Part};
use super::{Balance, Counts, Inflow};
use crate::policy::{Act, Budget, Cause, Found, Place, Plan, Step, View, Waiting};
use crate::{DeviceId, DeviceView, UnitId};
use hashbrown::HashSet;

/// Candidates that are evaluated with the whole model.
const CANDIDATES: usize = 512;
/// Units of a device examined for cold ones.
const LOOKS: usize = 2048;
/// Reads per write from which a second copy pays off.
const READ_MOSTLY: u32 = 20;
/// Largest cost of the second copy's device, relative to the first.
const NEAR: f64 = 4.0;
/// Largest share of a device that is kept free ahead.
const SLACK: f64 = 0.05;
/// Share of a device's time between two plans that moves of one plan may take.
const BUSY: f64 = 0.5;
/// Room is made for so many times the data in use that is written between two plans.
const AHEAD: f64 = 2.0;
/// Weight of one plan in the average of that data.
const LATEST: f64 = 0.2;
/// Share of what that data pays that is kept from plan to plan.
const KEPT: f64 = 0.9;
/// A unit in use leaves only for one that gains so many times what it loses: counters are noisy.
const GAINS: f64 = 2.0;

struct Known {
    unit: UnitId,
    counts: Counts,
    place: Place,
}

struct Candidate {
    at: usize,
    to: DeviceId,
    gain: f64,
}

/// A step that makes room.
struct Leaving {
    step: Step,
    /// The use of its unit, which is served elsewhere then.
    counts: Counts,
    /// What its accesses lose.
    loss: f64,
}

/// What a plan knows when it looks for room.
struct Wanted<'p> {
    candidates: &'p [Candidate],
    known: &'p [Known],
    prices: &'p Prices,
    /// Units that each device takes.
    rooms: &'p [u64],
    /// Units of data in use that are written until the next plan, for which each device should have room.
    inflow: &'p [u64],
}

/// A plan that is being made.
struct Draft {
    plan: Plan,
    /// Units that may still move.
    left: u64,
    /// Units that each device takes.
    rooms: Vec<u64>,
    /// Time of each device that moves may take, in microseconds: a plan that took much longer than until the
    /// next one would be carried out on what is not known any more.
    time_us: Vec<f64>,
    /// Units with a step.
    moving: HashSet<UnitId>,
    /// With the moves that were accepted.
    demand: Demand,
}

/// Marginal price of demand on each device, and of delay: the increase of the mean access time.
struct Prices {
    queue: Vec<f64>,
    delay: f64,
}

impl Prices {
    fn of(demand: &Demand, requests: f64) -> Self {
        let now = demand.response_us(requests, &[]);
        let little = (now * demand.accesses.max(1.0) / 1000.0).max(1e-6);
        let price = |at: usize| {
            let more = Part {
                queue: little,
                delay: 0.0,
            };
            let then = demand.response_us(requests, &[(DeviceId(at as u8), more)]);
            (then - now) * demand.accesses.max(1.0) / little
        };
        Self {
            queue: (0..demand.queue.len()).map(price).collect(),
            delay: 1.0,
        }
    }

    fn cost(&self, device: DeviceId, part: Part) -> f64 {
        self.queue[device.index()] * part.queue + self.delay * part.delay
    }
}

impl Balance {
    pub(super) fn make_plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let (known, demand) = self.look(view);
        let prices = Prices::of(&demand, Self::requests(view));
        let candidates = self.candidates(&known, &prices, view);
        let room = |device| view.room_bytes(device) / view.unit_bytes();
        let rooms: Vec<u64> = view.devices.iter().map(room).collect();
        let inflow = self.take_inflow(view);
        let wanted = Wanted {
            candidates: &candidates,
            known: &known,
            prices: &prices,
            rooms: &rooms,
            inflow: &inflow,
        };
        let mut draft = Draft {
            plan: Plan::default(),
            left: (budget.bytes / view.unit_bytes()).min(self.memory_left(view)),
            // What is kept free is for what is written.
            rooms: rooms
                .iter()
                .zip(&inflow)
                .map(|(room, kept)| room.saturating_sub(*kept))
                .collect(),
            time_us: vec![self.config.period_ms as f64 * 1000.0 * BUSY; rooms.len()],
            moving: HashSet::new(),
            demand,
        };
        let mut gone = self.make_room(&wanted, view, &mut draft.plan.waiting);
        for (at, victims) in gone.iter_mut().enumerate() {
            let room = inflow[at].saturating_sub(rooms[at]).min(draft.left / 2);
            self.drain(DeviceId(at as u8), room, victims, &prices, view, &mut draft);
        }
        for candidate in &candidates {
            self.bring(
                candidate,
                &mut gone[candidate.to.index()],
                &wanted,
                view,
                &mut draft,
            );
        }
        self.copies(&known, &prices, &mut draft.left, view, &mut draft.plan);
        self.demand = Some(draft.demand);
        draft.plan
    }

    /// Adds the move of a candidate, and what makes room for it, if that is worth it.
    fn bring(
        &mut self,
        candidate: &Candidate,
        victims: &mut Vec<Leaving>,
        wanted: &Wanted<'_>,
        view: &View<'_>,
        draft: &mut Draft,
    ) {
        let (known, to) = (&wanted.known[candidate.at], candidate.to);
        let from = known.place.device;
        while victims
            .pop_if(|leaving| draft.moving.contains(&leaving.step.unit))
            .is_some()
        {}
        let room = victims.last().filter(|_| draft.rooms[to.index()] == 0);
        let units = 1 + u64::from(room.is_some_and(|leaving| leaving.step.act == Act::Move));
        let fits = draft.rooms[to.index()] > 0 || room.is_some();
        let has_time = |device: DeviceId| draft.time_us[device.index()] > 0.0;
        let is_worth = room.is_none_or(|leaving| leaving.loss * GAINS <= candidate.gain);
        if !fits || !is_worth || draft.left < units || draft.moving.contains(&known.unit) {
            return;
        }
        if !has_time(from) || !has_time(to) {
            return;
        }
        let Some(step) = self.accept(known, to, room, &mut draft.demand, view) else {
            return;
        };
        match victims.pop_if(|_| draft.rooms[to.index()] == 0) {
            Some(leaving) => {
                self.note_leaving(&leaving, wanted.prices, view);
                self.add(leaving.step, view, draft);
            }
            None => draft.rooms[to.index()] -= 1,
        }
        self.add(step, view, draft);
    }

    /// Adds a step to a plan.
    fn add(&self, step: Step, view: &View<'_>, draft: &mut Draft) {
        if step.act == Act::Move {
            let [read, write] = self.move_parts(view.device(step.from), view.device(step.to), view);
            draft.time_us[step.from.index()] -= read.queue;
            draft.time_us[step.to.index()] -= write.queue;
            draft.left -= 1;
        }
        draft.moving.insert(step.unit);
        draft.plan.steps.push(step);
    }

    /// Returns units with heat and their places, and the demand on the devices.
    fn look(&mut self, view: &View<'_>) -> (Vec<Known>, Demand) {
        let mut known = Vec::new();
        let mut demand = Demand::new(view.devices.len());
        let (mut reads, mut writes) = (0.0, 0.0);
        for (unit, counts) in view.heat.units() {
            let Some(place) = view.catalog.place(unit) else {
                continue;
            };
            reads += f64::from(counts.reads);
            writes += f64::from(counts.writes);
            let first = self.part_of(view.device(place.device), counts, view);
            match place.second {
                None => demand.add(place.device, first),
                // Reads go to the device that answers sooner: in proportion to their speed.
                Some(second) => {
                    let other = self.part_of(view.device(second), counts, view);
                    let share = other.queue / (first.queue + other.queue).max(1e-9);
                    demand.add(place.device, first.scaled(share));
                    demand.add(second, other.scaled(1.0 - share));
                }
            }
            known.push(Known { unit, counts, place });
        }
        demand.accesses = reads + writes;
        let units = known.len().max(1) as f64;
        self.usual = [reads / units, writes / units];
        (known, demand)
    }

    /// Units that another device would serve better and that have lost the cost of their move; largest gain
    /// first.
    fn candidates(&self, known: &[Known], prices: &Prices, view: &View<'_>) -> Vec<Candidate> {
        let mut all = Vec::new();
        for (at, known) in known.iter().enumerate() {
            if known.place.hold.is_some() || known.place.second.is_some() {
                continue;
            }
            let from = view.device(known.place.device);
            if !from.state.reads() {
                continue;
            }
            let since = self.since_moved(known.unit, known.counts, view.heat.age());
            if since.total() == 0 {
                continue;
            }
            let here = prices.cost(from.id, self.part_of(from, since, view));
            let others = view
                .devices
                .iter()
                .filter(|device| device.id != from.id && device.state.takes_new());
            let mut best: Option<(f64, DeviceId)> = None;
            for to in others {
                let there = prices.cost(to.id, self.part_of(to, since, view));
                let [read, write] = self.move_parts(from, to, view);
                let moving = prices.cost(from.id, read) + prices.cost(to.id, write);
                let gain = here - there - self.config.pay * moving;
                if gain > 0.0
                    && here > there * (1.0 + self.config.margin)
                    && best.is_none_or(|best| gain > best.0)
                {
                    best = Some((gain, to.id));
                }
            }
            if let Some((gain, to)) = best {
                all.push(Candidate { at, to, gain });
            }
        }
        all.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        all.truncate(CANDIDATES);
        all
    }

    /// Returns the move, if the whole model still favours it after the moves accepted before. `room` is a
    /// step that makes room for it; its cost is included.
    fn accept(
        &self,
        known: &Known,
        to: DeviceId,
        room: Option<&Leaving>,
        demand: &mut Demand,
        view: &View<'_>,
    ) -> Option<Step> {
        let requests = Self::requests(view);
        let (from, target) = (view.device(known.place.device), view.device(to));
        let (here, there) = (
            self.part_of(from, known.counts, view),
            self.part_of(target, known.counts, view),
        );
        let mut changes = vec![(from.id, here.scaled(-1.0)), (to, there)];
        let room = room.filter(|leaving| leaving.step.act == Act::Move);
        if let Some(Leaving { step, counts, .. }) = room {
            let part = |device| self.part_of(view.device(device), *counts, view);
            changes.extend([(to, part(to).scaled(-1.0)), (step.to, part(step.to))]);
        }
        let now = demand.response_us(requests, &[]);
        let then = demand.response_us(requests, &changes);
        let [read, write] = self.move_parts(from, target, view);
        let mut work = vec![(from.id, read), (to, write)];
        if let Some(Leaving { step, .. }) = room {
            let [read, write] = self.move_parts(target, view.device(step.to), view);
            work.extend([(to, read), (step.to, write)]);
        }
        let moving = demand.response_us(requests, &work) - now;
        let since = self.since_moved(known.unit, known.counts, view.heat.age());
        let share = f64::from(since.total()) / f64::from(known.counts.total().max(1));
        if (now - then) * share <= moving * self.config.pay {
            return None;
        }
        for (device, part) in changes {
            demand.add(device, part);
        }
        Some(Step {
            unit: known.unit,
            act: Act::Move,
            from: from.id,
            to,
            cause: Cause::Hot,
            reason: format!(
                "{} reads and {} writes: an access takes {now:.1} µs, {then:.1} µs with it on {}",
                known.counts.reads,
                known.counts.writes,
                view.name(to)
            )
            .into(),
        })
    }

    /// Steps that can make room on each full device that candidates want.
    fn make_room(
        &mut self,
        wanted: &Wanted<'_>,
        view: &View<'_>,
        waiting: &mut Vec<Waiting>,
    ) -> Vec<Vec<Leaving>> {
        let able = |device: &&DeviceView| {
            let at = device.id.index();
            (wanted.rooms[at] == 0 || wanted.rooms[at] < wanted.inflow[at]) && device.state.takes_new()
        };
        let full = view.devices.iter().filter(able).map(|device| device.id);
        let mut gone: Vec<Vec<Leaving>> = view.devices.iter().map(|_| Vec::new()).collect();
        for on in full {
            let most = wanted
                .candidates
                .iter()
                .filter(|candidate| candidate.to == on)
                .count();
            let inflow = wanted.inflow[on.index()] as usize;
            if most + inflow == 0 {
                continue;
            }
            let steps = self.victims(on, most + inflow, wanted, view);
            if steps.is_empty() && most > 0 {
                waiting.push(Waiting {
                    from: on,
                    to: on,
                    cause: Cause::Hot,
                    bytes: most as u64 * view.unit_bytes(),
                    reason: format!(
                        "waiting: {} {} % full of data in use",
                        view.name(on),
                        view.device(on).percent()
                    )
                    .into(),
                });
            }
            gone[on.index()] = steps;
        }
        gone
    }

    /// Units of data in use that each device should have room for until the next plan.
    fn take_inflow(&mut self, view: &View<'_>) -> Vec<u64> {
        let take = |(inflow, device): (&mut Inflow, &DeviceView)| {
            inflow.usual += LATEST * (inflow.units - inflow.usual);
            inflow.units = 0.0;
            inflow.paid_us *= KEPT;
            let most = device.total_bytes as f64 * SLACK / view.unit_bytes() as f64;
            (inflow.usual * AHEAD).min(most) as u64
        };
        self.inflow.iter_mut().zip(view.devices).map(take).collect()
    }

    /// Makes room on a device for data in use that is written, as far as such data pays for it: by what it
    /// gains there, or has lost elsewhere.
    fn drain(
        &mut self,
        on: DeviceId,
        room: u64,
        victims: &mut Vec<Leaving>,
        prices: &Prices,
        view: &View<'_>,
        draft: &mut Draft,
    ) {
        let Inflow {
            mut paid_us, usual, ..
        } = self.inflow[on.index()];
        let each_us = paid_us / usual.max(1.0);
        for _ in 0..room {
            let pays = |leaving: &mut Leaving| {
                self.cost_of(&leaving.step, prices, view) <= paid_us && leaving.loss * GAINS <= each_us
            };
            let Some(mut leaving) = victims.pop_if(pays) else {
                break;
            };
            paid_us -= self.cost_of(&leaving.step, prices, view);
            self.note_leaving(&leaving, prices, view);
            leaving.step.reason = "room is wanted for data in use".into();
            self.add(leaving.step, view, draft);
        }
        self.inflow[on.index()].paid_us = paid_us;
    }

    /// What a step costs that makes room.
    fn cost_of(&self, step: &Step, prices: &Prices, view: &View<'_>) -> f64 {
        if step.act != Act::Move {
            return 0.0;
        }
        let [read, write] = self.move_parts(view.device(step.from), view.device(step.to), view);
        (prices.cost(step.from, read) + prices.cost(step.to, write)) * self.config.pay
    }

    /// Counts a unit in use that leaves a device for one where it loses more than on another, which is full.
    fn note_leaving(&mut self, leaving: &Leaving, prices: &Prices, view: &View<'_>) {
        let Leaving { step, counts, .. } = leaving;
        if step.act != Act::Move || counts.total() == 0 {
            return;
        }
        let cost = |device: &DeviceView| prices.cost(device.id, self.part_of(device, *counts, view));
        let others = view.devices.iter().filter(|device| device.id != step.from);
        let costs = others
            .filter(|device| device.state.takes_new())
            .map(|device| (cost(device), device.id));
        let best = costs.min_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((least, best)) = best.filter(|(_, best)| *best != step.to) {
            let lost = cost(view.device(step.to)) - least;
            self.inflow[best.index()].add(1.0, lost);
        }
    }

    /// What can leave a device, the best of it last: second copies, units that nobody uses, and those in use
    /// that lose least elsewhere.
    fn victims(&mut self, on: DeviceId, most: usize, wanted: &Wanted<'_>, view: &View<'_>) -> Vec<Leaving> {
        let to = roomiest(on, wanted.rooms, view);
        let hand = &mut self.hands[on.index()];
        let Found { units, next } = view.catalog.units_on(on, *hand, LOOKS);
        *hand = next;
        let (mut drops, mut moves) = (Vec::new(), Vec::new());
        for unit in units {
            let Some(place) = view.catalog.place(unit) else {
                continue;
            };
            if drops.len() >= most || place.held_against(Cause::Full).is_some() {
                continue;
            }
            let leaving = |act, to, reason| leaves(unit, act, on, to, reason);
            if let Some(other) = place.other_than(on) {
                if view.device(other).state.reads() {
                    drops.push(leaving(
                        Act::Drop,
                        on,
                        "room is wanted, and it has a copy elsewhere",
                    ));
                }
            } else if view.heat.get(unit).total() == 0
                && let Some(to) = to
                && moves.len() < most
            {
                moves.push(leaving(Act::Move, to, "not used, and room is wanted for what is"));
            }
        }
        let missing = most.saturating_sub(moves.len() + drops.len());
        let mut victims = self.least_used(on, missing, wanted, view);
        victims.append(&mut moves);
        victims.append(&mut drops);
        victims
    }

    /// Units in use on a device that lose least on another one with room; the last one loses least.
    fn least_used(&self, on: DeviceId, most: usize, wanted: &Wanted<'_>, view: &View<'_>) -> Vec<Leaving> {
        let able = |to: &&DeviceView| to.id != on && wanted.rooms[to.id.index()] > 0;
        let cost =
            |device: &DeviceView, counts| wanted.prices.cost(device.id, self.part_of(device, counts, view));
        let may = |known: &&Known| {
            known.place.device == on && known.place.second.is_none() && known.place.hold.is_none()
        };
        let mut all: Vec<Leaving> = Vec::new();
        for Known { unit, counts, .. } in wanted.known.iter().filter(may) {
            let costs = view
                .devices
                .iter()
                .filter(able)
                .map(|to| (cost(to, *counts), to.id));
            if let Some((there, to)) = costs.min_by(|a, b| a.0.total_cmp(&b.0)) {
                let step = leaves(*unit, Act::Move, on, to, "used less than what comes in its place");
                let loss = there - cost(view.device(on), *counts);
                all.push(Leaving {
                    counts: *counts,
                    loss,
                    ..step
                });
            }
        }
        all.sort_by(|a, b| b.loss.total_cmp(&a.loss));
        all.split_off(all.len().saturating_sub(most))
    }

    /// Plans second copies of the hottest units that are mostly read.
    fn copies(&self, known: &[Known], prices: &Prices, left: &mut u64, view: &View<'_>, plan: &mut Plan) {
        if !self.config.copies || Self::requests(view) < 2.0 {
            return;
        }
        let mut hot: Vec<&Known> = known.iter().filter(|known| self.is_worth_a_copy(known)).collect();
        hot.sort_by_key(|known| std::cmp::Reverse(known.counts.total()));
        let mut rooms: Vec<f64> = view
            .devices
            .iter()
            .map(|device| device.free_bytes as f64 - device.total_bytes as f64 * self.config.copies_free)
            .collect();
        let bytes = view.unit_bytes() as f64;
        let planned: Vec<UnitId> = plan.steps.iter().map(|step| step.unit).collect();
        for known in hot.into_iter().take(CANDIDATES) {
            if *left == 0 {
                return;
            }
            if planned.contains(&known.unit) {
                continue;
            }
            let from = view.device(known.place.device);
            let since = self.since_moved(known.unit, known.counts, view.heat.age());
            let here = prices.cost(from.id, self.part_of(from, since, view));
            let cost = |to: &DeviceView| prices.cost(to.id, self.part_of(to, since, view));
            let others = view
                .devices
                .iter()
                .filter(|to| to.id != from.id && to.state.takes_new());
            let able = others.filter(|to| rooms[to.id.index()] >= bytes && cost(to) < here * NEAR);
            let Some(to) = able.min_by(|a, b| cost(a).total_cmp(&cost(b))) else {
                continue;
            };
            let [read, write] = self.move_parts(from, to, view);
            let moving = prices.cost(from.id, read) + prices.cost(to.id, write);
            // At best half of its accesses are served sooner.
            if here / 2.0 <= moving * self.config.pay {
                continue;
            }
            rooms[to.id.index()] -= bytes;
            *left -= 1;
            plan.steps.push(Step {
                unit: known.unit,
                act: Act::Copy,
                from: from.id,
                to: to.id,
                cause: Cause::Load,
                reason: format!("{} reads: two devices serve it", known.counts.reads).into(),
            });
        }
    }

    fn is_worth_a_copy(&self, known: &Known) -> bool {
        let Counts { reads, writes, wide } = known.counts;
        let mostly = u32::from(reads) >= READ_MOSTLY * u32::from(writes);
        reads >= 4 && mostly && !wide && known.place.second.is_none() && known.place.hold.is_none()
    }
}

/// A unit leaves a device, whose use nobody has counted.
fn leaves(unit: UnitId, act: Act, from: DeviceId, to: DeviceId, reason: &'static str) -> Leaving {
    Leaving {
        step: Step {
            unit,
            act,
            from,
            to,
            cause: Cause::Full,
            reason: reason.into(),
        },
        counts: Counts::default(),
        loss: 0.0,
    }
}

/// The device with most room, except `than`.
fn roomiest(than: DeviceId, rooms: &[u64], view: &View<'_>) -> Option<DeviceId> {
    let others = view
        .devices
        .iter()
        .map(|device| device.id)
        .filter(|id| *id != than);
    let most = others.max_by_key(|id| rooms[id.index()])?;
    (rooms[most.index()] > 0).then_some(most)
}
