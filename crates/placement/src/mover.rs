//! Which step is carried out next, and how far each has come. Owns the queue, its bounds, the rate and the
//! tallies; does no I/O.
//!
//! A step goes through `read`, `write`, `commit`; a copy needs all three, a drop only the last. The driver
//! calls [`Mover::next`] when it can start one, [`Mover::advance`] after each part, and [`Mover::fail`] when
//! a part fails. Only the commit changes what is true: before it a crash loses a copy in free space, after it
//! the old place is free. So nothing of a step in flight needs to be kept over a crash. What is kept are the
//! operators' [`Job`]s, which find again what is left to move.

mod jobs;

pub use jobs::{Job, JobId, JobKind, JobState, Saved, SavedError};

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
    /// Bytes that may be moved at once after a rest. Default 4 MiB.
    pub burst_bytes: u64,
    /// Steps under way at once. Default 4.
    pub in_flight: usize,
    /// Steps that wait. Default 1,024.
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

/// What a step under way does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Part {
    /// Its data is read.
    Read,
    /// Its data is written to free space at the target.
    Write,
    /// The map is changed, in one transaction.
    Commit,
}

/// Number of a step in the mover; never used again.
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
    /// Thousandths of a byte beside `tokens`.
    rest: u64,
    tallies: BTreeMap<(DeviceId, DeviceId, Cause), Tally>,
}

impl Mover {
    /// An empty one, with a full bucket.
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

    /// Other bounds from now on (`varve jobs limit`).
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.tokens = self.tokens.min(limits.burst_bytes);
    }

    /// What a policy may plan at `now_ms`: what may be moved by then and does not wait already.
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

    /// Takes a step of `bytes` in. `false`: the unit has one under way or of as good a cause, or the queue is
    /// full. A better cause takes the place of a worse one.
    pub fn offer(&mut self, step: Step, bytes: u64) -> bool {
        if let Some((cause, no)) = self.units.get(&step.unit).copied() {
            if step.cause >= cause || self.running.contains_key(&no) {
                return false;
            }
            self.waiting.remove(&(cause, no));
            self.units.remove(&step.unit);
        }
        if self.waiting.len() >= self.limits.queued {
            // The worst goes, if it is worse.
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

    /// The next step to start, by cause, then by age; `None`: nothing may be started now. `in_memory`: its
    /// data need not be read.
    pub fn next(&mut self, now_ms: u64, in_memory: impl Fn(UnitId) -> bool) -> Option<(StepNo, Step, Part)> {
        self.fill(now_ms);
        if self.running.len() >= self.limits.in_flight {
            return None;
        }
        let (&key, (_, bytes)) = self.waiting.first_key_value()?;
        let bytes = *bytes;
        // A step larger than the whole bucket goes when the bucket is full.
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

    /// The part of a step that was under way is done. Answers the step and the next part; `None` as part: it
    /// is committed and gone from here. `None` at all: there is no such step.
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

    /// What a step under way does now.
    #[must_use]
    pub fn part(&self, no: StepNo) -> Option<Part> {
        self.running.get(&no).map(|running| running.part)
    }

    /// Why a step under way moves.
    #[must_use]
    pub fn cause(&self, no: StepNo) -> Option<Cause> {
        self.running.get(&no).map(|running| running.step.cause)
    }

    /// A step under way cannot go on: it is dropped, its target's space is the driver's to free. Answers the
    /// step.
    pub fn fail(&mut self, no: StepNo) -> Option<Step> {
        let running = self.running.remove(&no)?;
        self.units.remove(&running.step.unit);
        self.tally(&running.step).failed += 1;
        Some(running.step)
    }

    /// Drops all that waits and touches a device: it is gone.
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

    /// Whether a step of the unit waits or is under way.
    #[must_use]
    pub fn has(&self, unit: UnitId) -> bool {
        self.units.contains_key(&unit)
    }

    /// Steps under way and waiting.
    #[must_use]
    pub fn len(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// What was done so far, by devices and cause.
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
