//! The queue of steps and the progress of each. Owns the queue, its bounds, the rate and the tallies; does no
//! I/O.
//!
//! A step goes through `read`, `write`, `commit`; a copy needs all three, a drop only the last. The driver
//! calls [`Mover::next`] when it can start one, [`Mover::advance`] after each part, and [`Mover::fail`] when
//! a part fails. Only the commit changes the map: before it a crash loses a copy in free space, after it the
//! old place is free. So the state of steps in flight is not kept over a crash. The operators' [`Job`]s go
//! on; they find the remaining data again.

mod jobs;

pub use jobs::{Job, JobId, JobState};

use crate::policy::{Act, Budget, Cause, Step};
use crate::{DeviceId, UnitId};
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bounds of the mover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Bytes moved a second, over all devices. Default 32 MiB.
    pub bytes_per_s: u64,
    /// Bytes that may be moved at once after an idle time. Default 4 MiB.
    pub burst_bytes: u64,
    /// Most steps in flight. Default 4.
    pub in_flight: usize,
    /// Most waiting steps. Default 1,024.
    pub queued: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes_per_s: 32 << 20,
            burst_bytes: 4 << 20,
            in_flight: 4,
            queued: 1024,
        }
    }
}

/// The part of a step in flight that is being carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Its data is being read.
    Read,
    /// Its data is being written to free space at the target.
    Write,
    /// The map is being changed, in one transaction.
    Commit,
}

/// Number of a step in the mover; never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepNo(u64);

#[derive(Debug)]
struct Running {
    step: Step,
    part: Part,
    bytes: u64,
}

/// Bytes and steps, by devices and cause.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Steps committed.
    pub steps: u64,
    /// Their bytes; a drop has none.
    pub bytes: u64,
    /// Steps that failed or had become pointless.
    pub failed: u64,
}

/// Queue of steps. See the module.
#[derive(Debug)]
pub struct Mover {
    limits: Limits,
    waiting: BTreeMap<(Cause, StepNo), (Step, u64)>,
    running: HashMap<StepNo, Running>,
    units: HashMap<UnitId, (Cause, StepNo)>,
    last: u64,
    tokens: u64,
    filled_ms: u64,
    /// Thousandths of a token that `tokens` does not include.
    rest: u64,
    tallies: BTreeMap<(DeviceId, DeviceId, Cause), Tally>,
}

impl Mover {
    /// An empty queue, with a full token bucket.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: BTreeMap::new(),
            running: HashMap::new(),
            units: HashMap::new(),
            last: 0,
            tokens: limits.burst_bytes,
            filled_ms: 0,
            rest: 0,
            tallies: BTreeMap::new(),
        }
    }

    /// Replaces the bounds (`varve jobs limit`).
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.tokens = self.tokens.min(limits.burst_bytes);
    }

    /// Returns the budget for a plan at `now_ms`: the bytes that may be moved by then, less the waiting ones.
    pub fn budget(&mut self, now_ms: u64, quiet: bool) -> Budget {
        self.fill(now_ms);
        let queued: u64 = self.waiting.values().map(|(_, bytes)| bytes).sum();
        Budget {
            bytes: self.tokens.saturating_sub(queued),
            quiet,
        }
    }

    fn fill(&mut self, now_ms: u64) {
        let ms = now_ms.saturating_sub(self.filled_ms);
        self.filled_ms = now_ms;
        let thousandths = ms
            .saturating_mul(self.limits.bytes_per_s)
            .saturating_add(self.rest);
        self.rest = thousandths % 1000;
        self.tokens = self
            .tokens
            .saturating_add(thousandths / 1000)
            .min(self.limits.burst_bytes);
    }

    /// Queues a step of `bytes`. Returns `false` if the unit has a step in flight or one of an equal or
    /// better cause, or the queue is full. A step of a better cause replaces one of a worse cause.
    pub fn offer(&mut self, step: Step, bytes: u64) -> bool {
        if let Some((cause, no)) = self.units.get(&step.unit).copied() {
            if step.cause >= cause || self.running.contains_key(&no) {
                return false;
            }
            self.waiting.remove(&(cause, no));
            self.units.remove(&step.unit);
        }
        if self.waiting.len() >= self.limits.queued {
            // Drops the waiting step of the worst cause, if it is worse.
            match self.waiting.last_key_value() {
                Some((&(cause, no), (worst, _))) if cause > step.cause => {
                    self.units.remove(&worst.unit);
                    self.waiting.remove(&(cause, no));
                }
                _ => return false,
            }
        }
        self.last += 1;
        let (cause, no) = (step.cause, StepNo(self.last));
        self.units.insert(step.unit, (cause, no));
        let bytes = if step.act == Act::Drop { 0 } else { bytes };
        self.waiting.insert((cause, no), (step, bytes));
        true
    }

    /// Returns the next step to start, by cause, then by age; `None` if no step may be started. `in_memory`
    /// tells whether a unit's data need not be read.
    pub fn next(&mut self, now_ms: u64, in_memory: impl Fn(UnitId) -> bool) -> Option<(StepNo, Step, Part)> {
        self.fill(now_ms);
        if self.running.len() >= self.limits.in_flight {
            return None;
        }
        let (&key, (_, bytes)) = self.waiting.first_key_value()?;
        let bytes = *bytes;
        // A step larger than the whole bucket starts when the bucket is full.
        if self.tokens < bytes.min(self.limits.burst_bytes) {
            return None;
        }
        let (step, _) = self.waiting.remove(&key)?;
        self.tokens = self.tokens.saturating_sub(bytes);
        let part = match step.act {
            Act::Drop => Part::Commit,
            Act::Move | Act::Copy if in_memory(step.unit) => Part::Write,
            Act::Move | Act::Copy => Part::Read,
        };
        let running = Running {
            step: step.clone(),
            part,
            bytes,
        };
        self.running.insert(key.1, running);
        Some((key.1, step, part))
    }

    /// Records that the current part of a step is done. Returns the step and its next part, or `None` as the
    /// part if the step is committed and removed. Returns `None` if there is no such step.
    pub fn advance(&mut self, no: StepNo) -> Option<(Step, Option<Part>)> {
        let running = self.running.get_mut(&no)?;
        let next = match running.part {
            Part::Read => Part::Write,
            Part::Write => Part::Commit,
            Part::Commit => {
                let running = self.running.remove(&no)?;
                self.units.remove(&running.step.unit);
                let tally = self.tally(&running.step);
                tally.steps += 1;
                tally.bytes += running.bytes;
                return Some((running.step, None));
            }
        };
        running.part = next;
        Some((running.step.clone(), Some(next)))
    }

    /// The current part of a step in flight.
    #[must_use]
    pub fn part(&self, no: StepNo) -> Option<Part> {
        self.running.get(&no).map(|running| running.part)
    }

    /// The cause of a step in flight.
    #[must_use]
    pub fn cause(&self, no: StepNo) -> Option<Cause> {
        self.running.get(&no).map(|running| running.step.cause)
    }

    /// Drops a step that cannot proceed and returns it. The driver frees the space at its target.
    pub fn fail(&mut self, no: StepNo) -> Option<Step> {
        let running = self.running.remove(&no)?;
        self.units.remove(&running.step.unit);
        self.tally(&running.step).failed += 1;
        Some(running.step)
    }

    /// Drops all waiting steps that involve a lost device.
    pub fn device_lost(&mut self, device: DeviceId) {
        let units = &mut self.units;
        self.waiting.retain(|_, (step, _)| {
            let keep = step.from != device && step.to != device;
            if !keep {
                units.remove(&step.unit);
            }
            keep
        });
    }

    /// Whether a step of the unit waits or is in flight.
    #[must_use]
    pub fn has(&self, unit: UnitId) -> bool {
        self.units.contains_key(&unit)
    }

    /// Number of steps in flight and waiting.
    #[must_use]
    pub fn len(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// The tallies so far, by devices and cause.
    pub fn tallies(&self) -> impl Iterator<Item = (DeviceId, DeviceId, Cause, Tally)> + '_ {
        self.tallies
            .iter()
            .map(|(&(from, to, cause), tally)| (from, to, cause, *tally))
    }

    fn tally(&mut self, step: &Step) -> &mut Tally {
        self.tallies.entry((step.from, step.to, step.cause)).or_default()
    }
}

#[cfg(test)]
mod tests;
