//! Carries the mover's steps out on simulated devices.

use super::{Owner, Request1, World, view};
use crate::mover::{Job, JobState, Part, StepNo};
use crate::policy::{Act, Catalog, Cause, Step, View};
use crate::sim::device::Device;
use crate::{DeviceId, Op, UnitId};

/// Bytes of a repeated write at the new place, for a unit that was written while it was copied.
const AGAIN_BYTES: u32 = 16 << 10;

/// A step in flight.
#[derive(Debug, Clone, Copy)]
pub(super) struct Under {
    unit: UnitId,
    to: DeviceId,
    slot: u64,
    version: u64,
    again: bool,
}

impl World {
    /// Starts all steps that may start. `in_memory`: a unit whose data need not be read.
    pub(super) fn pump(&mut self, in_memory: Option<UnitId>) {
        loop {
            let now_ms = self.now_ns / 1_000_000;
            let cache = &self.cache;
            let known = |unit| in_memory == Some(unit) || cache.contains(&unit);
            let Some((no, step, part)) = self.mover.next(now_ms, known) else {
                return;
            };
            if let Err(reason) = self.begin(no, &step, part) {
                self.mover.fail(no);
                self.refused(&step, &reason);
            }
        }
    }

    /// Checks a step again when it starts, and begins it.
    ///
    /// # Errors
    /// The reason why it cannot start.
    fn begin(&mut self, no: StepNo, step: &Step, part: Part) -> Result<(), String> {
        let Some(entry) = self.map.get(step.unit) else {
            return Err("it is gone".into());
        };
        let (place, version) = (entry.place.clone(), entry.version);
        if let Some(hold) = place.held_against(step.cause) {
            return Err(hold.to_string());
        }
        let states = [step.from, step.to].map(|id| self.views[id.index()].state);
        if step.act == Act::Drop {
            let other = place.other_than(step.to);
            if let Some(other) = other.filter(|id| !self.views[id.index()].state.reads()) {
                return Err(format!("{other} does not answer"));
            }
            let dropped = self.map.drop_copy(step.unit, step.to, self.now_ns / 1_000_000);
            if !dropped {
                return Err("it is the only copy".into());
            }
            self.refresh_all();
            self.mover.advance(no);
            self.policy.done(step, &view!(self));
            return Ok(());
        }
        if !states[0].reads() {
            return Err(format!("{} does not answer", step.from));
        }
        if !states[1].takes_new() {
            return Err(format!("{} takes no new data", step.to));
        }
        if !place.is_on(step.from) || step.act == Act::Copy && place.second.is_some() {
            return Err("it has moved meanwhile".into());
        }
        if place.is_on(step.to) {
            if step.act == Act::Move && place.second.is_some() {
                // The copy is already there.
                self.map.keep_only(step.unit, step.to, self.now_ns / 1_000_000);
                self.refresh_all();
            }
            return Err("it is there already".into());
        }
        let Some(slot) = self.map.reserve(step.to) else {
            return Err(format!("{} is full", step.to));
        };
        self.refresh(step.to);
        let under = Under {
            unit: step.unit,
            to: step.to,
            slot,
            version,
            again: false,
        };
        self.steps.insert(no, under);
        self.send(no, step, part);
        Ok(())
    }

    /// Reports to the planner of a step, a job or the policy, that it cannot be carried out.
    fn refused(&mut self, step: &Step, reason: &str) {
        let bytes = self.options.unit.bytes();
        if let Some(job) = self.job_of(step) {
            job.refused(bytes, reason);
        }
        self.policy.failed(step, &view!(self));
    }

    /// The job of a step: the running one, since the simulator runs one job at a time.
    fn job_of(&mut self, step: &Step) -> Option<&mut Job> {
        let asked = matches!(step.cause, Cause::Asked | Cause::Rule);
        let mut jobs = self.jobs.jobs.iter_mut().filter(|_| asked);
        jobs.find(|job| job.state == JobState::Running)
    }

    fn send(&mut self, no: StepNo, step: &Step, part: Part) {
        let under = self.steps[&no];
        let (device, op, slot) = if part == Part::Read {
            let place = self
                .map
                .get(step.unit)
                .map(|entry| (entry.place.device, entry.slots));
            let slot = place.map_or(0, |(device, slots)| slots[usize::from(device != step.from)]);
            (step.from, Op::Read, slot)
        } else {
            (step.to, Op::Write, under.slot)
        };
        self.send_io(no, device, op, slot, self.options.unit.bytes() as u32);
    }

    fn send_io(&mut self, no: StepNo, device: DeviceId, op: Op, slot: u64, bytes: u32) {
        let request = Request1 {
            owner: Owner::Mover(no, self.life),
            unit: self.steps[&no].unit,
            device,
            op,
            bytes,
            request_bytes: bytes,
            since_ns: self.now_ns,
            pieces: Device::pieces(bytes),
        };
        self.submit(request, slot * self.options.unit.bytes());
    }

    /// Handles the end of a read or a write of a step.
    pub(super) fn moved_part(&mut self, no: StepNo) {
        let Some(under) = self.steps.get(&no).copied() else {
            return;
        };
        let entry = self.map.get(under.unit).map(|entry| entry.version);
        let Some(version) = entry.filter(|_| self.views[under.to.index()].state.writes()) else {
            return self.give_up(no, under);
        };
        if let Some(Some(Part::Write)) = self.part_of(no) {
            if let Some((step, Some(part))) = self.mover.advance(no) {
                self.send(no, &step, part);
            }
            return;
        }
        if version != under.version && !under.again {
            // The unit was written meanwhile, so the new place is written again.
            self.steps.insert(no, Under { again: true, ..under });
            return self.send_io(no, under.to, Op::Write, under.slot, AGAIN_BYTES);
        }
        self.commit(no, under);
    }

    /// The part after the current one.
    fn part_of(&self, no: StepNo) -> Option<Option<Part>> {
        self.mover.part(no).map(|part| match part {
            Part::Read => Some(Part::Write),
            Part::Write => Some(Part::Commit),
            Part::Commit => None,
        })
    }

    fn commit(&mut self, no: StepNo, under: Under) {
        let place = self.map.place(under.unit);
        let cause = self.mover.cause(no);
        if cause
            .zip(place)
            .is_some_and(|(cause, place)| place.held_against(cause).is_some())
        {
            // Held since the step began.
            return self.give_up(no, under);
        }
        self.steps.remove(&no);
        self.mover.advance(no);
        let Some((step, _)) = self.mover.advance(no) else {
            return;
        };
        let now_ms = self.now_ns / 1_000_000;
        let gone = self
            .map
            .place(under.unit)
            .is_none_or(|place| !place.is_on(step.from));
        if gone {
            self.map.unreserve(under.to, under.slot);
        } else if step.act == Act::Copy {
            self.map.commit_copy(under.unit, under.to, under.slot);
        } else {
            self.map.commit_move(under.unit, under.to, under.slot, now_ms);
            if self.policy.resets() {
                self.heat.reset(under.unit);
            }
        }
        self.refresh_all();
        let bytes = self.options.unit.bytes();
        if let Some(job) = self.job_of(&step) {
            job.done(bytes);
        }
        self.policy.done(&step, &view!(self));
        self.pump(None);
    }

    /// Frees the slots of all steps in flight.
    pub(super) fn drop_steps(&mut self) {
        for (_, under) in std::mem::take(&mut self.steps) {
            self.map.unreserve(under.to, under.slot);
        }
        self.refresh_all();
    }

    fn give_up(&mut self, no: StepNo, under: Under) {
        self.steps.remove(&no);
        self.map.unreserve(under.to, under.slot);
        self.refresh(under.to);
        if let Some(step) = self.mover.fail(no) {
            self.refused(&step, &format!("{} failed", under.to));
        }
    }
}
