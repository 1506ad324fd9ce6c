//! A plan of `balance`: moves, copies, and steps that make room.

use super::model::{Demand, Part};
use super::{Balance, Counts};
use crate::policy::{Act, Budget, Cause, Found, Place, Plan, Step, View, Waiting};
use crate::{DeviceId, DeviceView, UnitId};

/// Candidates that are evaluated with the whole model.
const CANDIDATES: usize = 512;
/// Units of a device examined for cold ones.
const LOOKS: usize = 2048;
/// Reads per write from which a second copy pays off.
const READ_MOSTLY: u32 = 20;
/// Largest cost of the second copy's device, relative to the first.
const NEAR: f64 = 4.0;

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
        let (known, mut demand) = self.look(view);
        let requests = Self::requests(view);
        let mut left = (budget.bytes / view.unit_bytes()).min(self.memory_left(view));
        let mut plan = Plan::default();
        let room = |device| view.room_bytes(device) / view.unit_bytes();
        let mut rooms: Vec<u64> = view.devices.iter().map(room).collect();
        let prices = Prices::of(&demand, requests);
        let candidates = self.candidates(&known, &prices, view);
        let mut gone = self.make_room(&candidates, &rooms, view, &mut plan.waiting);
        for candidate in candidates {
            let (known, to) = (&known[candidate.at], candidate.to);
            let room = if rooms[to.index()] > 0 {
                None
            } else if let Some(step) = gone[to.index()].last() {
                Some(step)
            } else {
                continue;
            };
            let units = 1 + u64::from(room.is_some_and(|step| step.act == Act::Move));
            if left < units {
                break;
            }
            let Some(step) = self.accept(known, to, room, &mut demand, requests, view) else {
                continue;
            };
            left -= units;
            if room.is_some() {
                plan.steps.extend(gone[to.index()].pop());
            } else {
                rooms[to.index()] -= 1;
            }
            plan.steps.push(step);
        }
        self.copies(&known, &prices, &mut left, view, &mut plan);
        self.demand = Some(demand);
        plan
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
        room: Option<&Step>,
        demand: &mut Demand,
        requests: f64,
        view: &View<'_>,
    ) -> Option<Step> {
        let (from, target) = (view.device(known.place.device), view.device(to));
        let (here, there) = (
            self.part_of(from, known.counts, view),
            self.part_of(target, known.counts, view),
        );
        let changes = [(from.id, here.scaled(-1.0)), (to, there)];
        let now = demand.response_us(requests, &[]);
        let then = demand.response_us(requests, &changes);
        let [read, write] = self.move_parts(from, target, view);
        let mut work = vec![(from.id, read), (to, write)];
        if let Some(step) = room.filter(|step| step.act == Act::Move) {
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
        candidates: &[Candidate],
        rooms: &[u64],
        view: &View<'_>,
        waiting: &mut Vec<Waiting>,
    ) -> Vec<Vec<Step>> {
        let able = |device: &&DeviceView| rooms[device.id.index()] == 0 && device.state.takes_new();
        let full = view.devices.iter().filter(able).map(|device| device.id);
        let mut gone = vec![Vec::new(); view.devices.len()];
        for on in full {
            let wanted = candidates.iter().filter(|candidate| candidate.to == on).count();
            if wanted == 0 {
                continue;
            }
            let steps = self.victims(on, wanted, rooms, view);
            if steps.is_empty() {
                waiting.push(Waiting {
                    from: on,
                    to: on,
                    cause: Cause::Hot,
                    bytes: wanted as u64 * view.unit_bytes(),
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

    /// Second copies that can be dropped from a device, and unused units on it; the copies come last.
    fn victims(&mut self, on: DeviceId, most: usize, rooms: &[u64], view: &View<'_>) -> Vec<Step> {
        let to = roomiest(on, rooms, view);
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
            let step = |act, to, reason: &'static str| Step {
                unit,
                act,
                from: on,
                to,
                cause: Cause::Full,
                reason: reason.into(),
            };
            if let Some(other) = place.other_than(on) {
                if view.device(other).state.reads() {
                    drops.push(step(Act::Drop, on, "room is wanted, and it has a copy elsewhere"));
                }
            } else if view.heat.get(unit).total() == 0
                && let Some(to) = to
                && moves.len() < most
            {
                moves.push(step(Act::Move, to, "not used, and room is wanted for what is"));
            }
        }
        moves.append(&mut drops);
        moves
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
