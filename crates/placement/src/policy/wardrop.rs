//! `wardrop`: new data is spread so that the devices' response times become equal (Chapter III, equation
//! 3.1); migration of hot units levels the rest.

use super::{Act, Budget, Cause, Place, Plan, Policy, Step, Target, View, best_target};
use crate::{Access, DeviceId, NewData, Op, UnitId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::VecDeque;

/// Parameters of [`Wardrop`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WardropConfig {
    /// Gain: how strongly a device's share reacts to its response time, per millisecond. Default 10.
    pub alpha_per_ms: f64,
    /// Tokens for a share of 1. Default 100.
    pub beta: f64,
    /// Smallest share of a device, so that it is measured. Default 0.02.
    pub least: f64,
    /// Largest change of a share in a round. Default 0.05: α times a difference of milliseconds is unbounded.
    pub most_change: f64,
    /// Length of a round, in milliseconds. Default 500.
    pub round_ms: u64,
    /// Length of the list of recently used units, from which hot ones move. Default 100.
    pub recent: usize,
}

impl Default for WardropConfig {
    fn default() -> Self {
        Self {
            alpha_per_ms: 10.0,
            beta: 100.0,
            least: 0.02,
            most_change: 0.05,
            round_ms: 500,
            recent: 100,
        }
    }
}

/// The `wardrop` policy. See the module.
#[derive(Debug, Default)]
pub struct Wardrop {
    config: WardropConfig,
    /// Requests at each device at the beginning of the round.
    begun: Vec<u64>,
    /// Target share of new data, by device.
    target: Vec<f64>,
    /// Units by which each device is ahead of its share.
    ahead: Vec<f64>,
    tokens: f64,
    from: Option<DeviceId>,
    to: Option<DeviceId>,
    round_ms: u64,
    recent: VecDeque<UnitId>,
}

impl Wardrop {
    /// Returns a policy with these parameters.
    #[must_use]
    pub fn new(config: WardropConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// Target share of new data, by device.
    #[must_use]
    pub fn shares(&self) -> &[f64] {
        &self.target
    }

    fn requests(view: &View<'_>) -> Vec<u64> {
        let sum = view.devices.iter().map(|device| {
            let figures = &device.figures;
            figures.read.requests + figures.write.requests
        });
        sum.collect()
    }

    /// Sets the shares before the first measurement: in proportion to speed.
    fn start(&mut self, view: &View<'_>) {
        if self.target.len() == view.devices.len() {
            return;
        }
        let speed = |at: &crate::DeviceView| 1.0 / at.figures.mean_response_us().max(0.001);
        self.target = view.devices.iter().map(speed).collect();
        self.ahead = vec![0.0; view.devices.len()];
        self.begun = Self::requests(view);
        self.normalise();
    }

    fn normalise(&mut self) {
        let least = self.config.least;
        self.target.iter_mut().for_each(|share| *share = share.max(least));
        let sum: f64 = self.target.iter().sum();
        self.target.iter_mut().for_each(|share| *share /= sum);
    }

    /// Applies equation 3.1, for any number of devices.
    fn round(&mut self, view: &View<'_>) {
        let now = Self::requests(view);
        let ended: Vec<f64> = now
            .iter()
            .zip(&self.begun)
            .map(|(now, then)| (now - then) as f64)
            .collect();
        let all: f64 = ended.iter().sum();
        if all == 0.0 {
            return;
        }
        self.begun = now;
        let measured = ended.iter().map(|count| count / all);
        let response_ms = |device: &crate::DeviceView| device.figures.mean_response_us() / 1000.0;
        let times: Vec<f64> = view.devices.iter().map(response_ms).collect();
        let shares: Vec<f64> = measured.collect();
        let mean: f64 = shares.iter().zip(&times).map(|(share, time)| share * time).sum();
        let (mut change, mut most, mut least) = (0.0, (0.0, None), (0.0, None));
        for (at, share) in shares.iter().enumerate() {
            let wish = self.config.alpha_per_ms * (mean - times[at]) * share.max(self.config.least);
            let step = wish.clamp(-self.config.most_change, self.config.most_change);
            self.target[at] = share + step;
            change += step.abs() / 2.0;
            if step > most.0 && view.devices[at].state.takes_new() {
                most = (step, Some(DeviceId(at as u8)));
            }
            if step < least.0 {
                least = (step, Some(DeviceId(at as u8)));
            }
        }
        self.normalise();
        (self.from, self.to) = (least.1, most.1);
        self.tokens = if self.from.is_some() && self.to.is_some() {
            change * self.config.beta
        } else {
            0.0
        };
    }

    fn hot_step(&mut self, unit: UnitId, place: &Place, view: &View<'_>) -> Option<Step> {
        let (from, to) = (self.from?, self.to?);
        let fits = place.device == from && place.hold.is_none() && place.second.is_none();
        if !fits || self.tokens < 1.0 || !view.takes_unit(to) {
            return None;
        }
        self.tokens -= 1.0;
        let ms = |id| view.device(id).figures.mean_response_us() / 1000.0;
        Some(Step {
            unit,
            act: Act::Move,
            from,
            to,
            cause: Cause::Load,
            reason: format!(
                "{} answers in {:.2} ms, {} in {:.2} ms",
                view.name(from),
                ms(from),
                view.name(to),
                ms(to)
            )
            .into(),
        })
    }

    /// Moves of cold units from a device that is full to the one with most room.
    fn cold(&self, view: &View<'_>, most: u64) -> Vec<Step> {
        let full = view.devices.iter().find(|device| device.fill() > view.full);
        let Some(from) = full.map(|device| device.id) else {
            return Vec::new();
        };
        let others = view
            .devices
            .iter()
            .filter(|device| device.id != from && view.takes_unit(device.id));
        let Some(to) = others
            .max_by_key(|device| device.free_bytes)
            .map(|device| device.id)
        else {
            return Vec::new();
        };
        let units = view.catalog.units_on(from, None, 4096).units.into_iter();
        let cold = units.filter(|unit| view.heat.get(*unit).total() == 0);
        let free = cold.filter(|unit| {
            view.catalog
                .place(*unit)
                .is_some_and(|place| place.hold.is_none())
        });
        let step = |unit| Step {
            unit,
            act: Act::Move,
            from,
            to,
            cause: Cause::Cold,
            reason: format!(
                "not used, and {} is {} % full",
                view.name(from),
                view.device(from).percent()
            )
            .into(),
        };
        free.take(most as usize).map(step).collect()
    }
}

impl Policy for Wardrop {
    fn name(&self) -> Cow<'static, str> {
        "wardrop".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        self.start(view);
        if let Some(to) = self.to
            && self.tokens >= 1.0
            && view.takes_unit(to)
        {
            self.tokens -= 1.0;
            return Target {
                device: to,
                reason: "the lighter-loaded device (a token)".into(),
            };
        }
        let ahead = &self.ahead;
        let device = best_target(new, view, |device| ahead[device.id.index()]);
        for (at, share) in self.target.iter().enumerate() {
            self.ahead[at] -= share;
        }
        self.ahead[device.index()] += 1.0;
        Target {
            device,
            reason: format!("its share is {:.0} %", self.target[device.index()] * 100.0).into(),
        }
    }

    /// Moves a unit off the heavier-loaded device when it was written as a whole, so that all of it is in
    /// memory.
    fn accessed(&mut self, access: &Access, place: &Place, view: &View<'_>) -> Option<Step> {
        self.recent.push_back(access.unit);
        if self.recent.len() > self.config.recent {
            self.recent.pop_front();
        }
        let whole = u64::from(access.bytes) >= view.unit_bytes();
        (access.op == Op::Write && whole)
            .then(|| self.hot_step(access.unit, place, view))
            .flatten()
    }

    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        self.start(view);
        let mut plan = Plan::default();
        let most = budget.bytes / view.unit_bytes();
        if view.now_ms >= self.round_ms + self.config.round_ms {
            self.round_ms = view.now_ms;
            // Migration uses the tokens that allocation has left in the last round.
            while (plan.steps.len() as u64) < most && self.tokens >= 1.0 {
                let Some(unit) = self.recent.pop_back() else { break };
                if let Some(place) = view.catalog.place(unit) {
                    let step = self.hot_step(unit, &place, view);
                    plan.steps.extend(step);
                }
            }
            self.round(view);
        }
        if budget.quiet {
            plan.steps.extend(self.cold(view, most - plan.steps.len() as u64));
        }
        plan
    }
}
