//! `measured`: devices are peers, and a unit goes where its own mix of reads and writes is served fastest, by
//! measured response times (Chapter II). New data is striped.

use super::{Act, Budget, Cause, Place, Plan, Policy, Step, Striped, Target, View};
use crate::heat::Counts;
use crate::{Access, DeviceId, NewData, Op, UnitId};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Parameters of [`Measured`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeasuredConfig {
    /// The least cost difference for a move: `C_here > (1 + delta) · C_there`. Default 1 (Fig. 6a).
    pub delta: f64,
    /// Counted accesses from which a unit may move. Default 4.
    pub min_accesses: u32,
    /// Moves a second. Default 50.
    pub tokens_per_s: u32,
    /// Units accessed as parts of larger requests stay striped ("Migration-2"). Default true.
    pub wide_stays: bool,
}

impl Default for MeasuredConfig {
    fn default() -> Self {
        Self {
            delta: 1.0,
            min_accesses: 4,
            tokens_per_s: 50,
            wide_stays: true,
        }
    }
}

/// Most candidates that wait for a quiet time.
const LATER_MAX: usize = 4096;

/// The `measured` policy. See the module.
#[derive(Debug, Default)]
pub struct Measured {
    config: MeasuredConfig,
    new: Striped,
    tokens: f64,
    filled_ms: u64,
    later: BTreeMap<UnitId, DeviceId>,
}

/// Mean cost of an access: `C = (R·r + W·w) / (R + W)` in microseconds (Chapter II.B).
pub(super) fn cost_us(counts: Counts, read_us: f64, write_us: f64) -> f64 {
    let (reads, writes) = (f64::from(counts.reads), f64::from(counts.writes));
    (reads * read_us + writes * write_us) / (reads + writes).max(1.0)
}

impl Measured {
    /// Returns a policy with these parameters.
    #[must_use]
    pub fn new(config: MeasuredConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    fn candidate(&self, unit: UnitId, place: &Place, view: &View<'_>) -> Option<Step> {
        let counts = view.heat.get(unit);
        if counts.total() < self.config.min_accesses || counts.wide && self.config.wide_stays {
            return None;
        }
        let cost = |id: DeviceId| {
            let figures = &view.device(id).figures;
            cost_us(
                counts,
                figures.response_us(Op::Read),
                figures.response_us(Op::Write),
            )
        };
        let here = cost(place.device);
        let others = view.devices.iter().filter(|device| device.id != place.device);
        let able = others.filter(|device| view.takes_unit(device.id));
        let (there, to) = able
            .map(|device| (cost(device.id), device.id))
            .min_by(|a, b| a.0.total_cmp(&b.0))?;
        (here > (1.0 + self.config.delta) * there).then(|| Step {
            unit,
            act: Act::Move,
            from: place.device,
            to,
            cause: Cause::Hot,
            reason: format!(
                "{} reads and {} writes cost {here:.0} µs here, {there:.0} µs on {}",
                counts.reads,
                counts.writes,
                view.name(to)
            )
            .into(),
        })
    }

    fn token(&mut self, now_ms: u64) -> bool {
        let ms = now_ms.saturating_sub(self.filled_ms) as f64;
        self.filled_ms = now_ms;
        let per_s = f64::from(self.config.tokens_per_s);
        self.tokens = (self.tokens + ms * per_s / 1000.0).min(per_s.max(1.0));
        self.tokens >= 1.0
    }
}

impl Policy for Measured {
    fn name(&self) -> Cow<'static, str> {
        "measured".into()
    }

    fn target(&mut self, new: &NewData, view: &View<'_>) -> Target {
        self.new.target(new, view)
    }

    fn accessed(&mut self, access: &Access, place: &Place, view: &View<'_>) -> Option<Step> {
        if place.hold.is_some() || place.second.is_some() {
            return None;
        }
        let step = self.candidate(access.unit, place, view)?;
        if self.token(view.now_ms) {
            self.tokens -= 1.0;
            self.later.remove(&access.unit);
            return Some(step);
        }
        if self.later.len() < LATER_MAX {
            self.later.insert(access.unit, step.to);
        }
        None
    }

    /// Plans candidates that had to wait for a token, in quiet times.
    fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let mut plan = Plan::default();
        let mut left = budget.bytes / view.unit_bytes();
        while budget.quiet && left > 0 && self.token(view.now_ms) {
            let Some((unit, _)) = self.later.pop_first() else {
                break;
            };
            let place = view.catalog.place(unit).filter(|place| place.hold.is_none());
            if let Some(step) = place.and_then(|place| self.candidate(unit, &place, view)) {
                plan.steps.push(step);
                self.tokens -= 1.0;
                left -= 1;
            }
        }
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_weighs_reads_and_writes_by_their_counts() {
        let counts = Counts {
            reads: 30,
            writes: 10,
            wide: false,
        };
        assert_eq!(cost_us(counts, 100.0, 500.0), 200.0);
        assert_eq!(cost_us(Counts::default(), 100.0, 500.0), 0.0);
    }
}
