//! Jobs of operators that evacuate a device: their progress, and the reason for each byte that does not move.
//!
//! A job is a cursor over the units of its device. It plans the steps of the next units; a unit that was
//! planned and is still there on a later pass is planned again. So a job that begins anew after a crash does
//! all the remaining work: units whose moves were committed are no longer there and are not moved twice.

use crate::policy::{Act, Budget, Cause, Found, Place, Plan, Step, View, Waiting};
use crate::{DeviceId, DeviceView, UnitId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most units examined for one plan.
const LOOKS: usize = 1024;
/// The same where few may move.
const LOOKS_MIN: usize = 64;

/// Number of a job; never reused in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct JobId(pub u64);

/// The state of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It runs.
    Running,
    /// An operator paused it.
    Paused,
    /// An operator ended it: moved data stays at its new place.
    Cancelled,
    /// No data is left to move.
    Done,
    /// Only the data in `stuck` is left, and waiting does not help. An operator may let it try again
    /// ([`Job::resume`]).
    Incomplete,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// The device that all data leaves.
    pub device: DeviceId,
    /// Its state.
    pub state: JobState,
    /// Bytes moved for it.
    pub moved_bytes: u64,
    /// Bytes that could not move in the last complete pass, by reason.
    pub stuck: BTreeMap<String, u64>,
    /// Complete passes.
    pub passes: u64,
    cursor: Option<UnitId>,
    /// Units found in this pass, and of these the units that waiting does not help.
    found: u64,
    lasting: u64,
    passing: BTreeMap<String, u64>,
}

impl Job {
    /// A job that begins, or goes on after `moved_bytes`.
    #[must_use]
    pub const fn new(id: JobId, device: DeviceId, moved_bytes: u64) -> Self {
        Self {
            id,
            device,
            state: JobState::Running,
            moved_bytes,
            stuck: BTreeMap::new(),
            passes: 0,
            cursor: None,
            found: 0,
            lasting: 0,
            passing: BTreeMap::new(),
        }
    }

    /// Pauses it. Does nothing to a job that has ended.
    pub fn pause(&mut self) {
        if self.state == JobState::Running {
            self.state = JobState::Paused;
        }
    }

    /// Resumes it, or lets one that has ended look again: for data that could not move, or that came since.
    pub fn resume(&mut self) {
        if self.state != JobState::Cancelled {
            self.state = JobState::Running;
        }
    }

    /// Ends it. Moved data stays where it is.
    pub fn cancel(&mut self) {
        if !matches!(self.state, JobState::Done | JobState::Cancelled) {
            self.state = JobState::Cancelled;
        }
    }

    /// Records that one of its steps was committed.
    pub const fn done(&mut self, bytes: u64) {
        self.moved_bytes += bytes;
    }

    /// Records that one of its steps was refused: its bytes are reported with the reason, and planned again
    /// on the next pass.
    pub fn refused(&mut self, bytes: u64, reason: &str) {
        *self.passing.entry(format!("waiting: {reason}")).or_default() += bytes;
    }

    /// Returns the next steps. After the last unit it begins again. It ends when a whole pass found no units
    /// ([`JobState::Done`]) or only units that waiting does not help ([`JobState::Incomplete`]).
    pub fn plan(&mut self, view: &View<'_>, budget: Budget) -> Plan {
        let mut plan = Plan::default();
        if self.state != JobState::Running {
            return plan;
        }
        let (mut left, mut room) = (budget.bytes, Rooms::of(view));
        let most = usize::try_from(budget.bytes / view.unit_bytes()).unwrap_or(LOOKS);
        let most = most.clamp(LOOKS_MIN, LOOKS);
        let Found { units, next } = view.catalog.units_on(self.device, self.cursor, most);
        for unit in units {
            if left < view.unit_bytes() {
                return plan;
            }
            self.cursor = Some(unit);
            if let Some(step) = self.look(unit, view, &mut room, &mut plan.waiting) {
                left -= view.unit_bytes();
                plan.steps.push(step);
            }
        }
        self.cursor = next;
        if next.is_none() {
            self.stuck = std::mem::take(&mut self.passing);
            self.passes += 1;
            let (found, lasting) = (std::mem::take(&mut self.found), std::mem::take(&mut self.lasting));
            if found == lasting {
                self.state = if found == 0 {
                    JobState::Done
                } else {
                    JobState::Incomplete
                };
            }
        }
        plan
    }

    fn look(
        &mut self,
        unit: UnitId,
        view: &View<'_>,
        room: &mut Rooms,
        waiting: &mut Vec<Waiting>,
    ) -> Option<Step> {
        let place = view.catalog.place(unit)?;
        let (id, cause) = (self.id.0, Cause::Asked);
        let wrong = |device: &DeviceId| *device == self.device;
        let copies = [place.second, Some(place.device)];
        let from = copies.into_iter().flatten().find(wrong)?;
        self.found += 1;
        if let Some(hold) = place.held_against(cause) {
            let waits = if hold.ends() { "waiting: " } else { "" };
            self.lasting += u64::from(!hold.ends());
            return self.stuck(&place, from, format!("{waits}{hold}"), waiting);
        }
        let step = |act, to, reason: String| Step {
            unit,
            act,
            from,
            to,
            cause,
            reason: reason.into(),
        };
        let silent = |id| format!("waiting: {} does not answer", view.name(id));
        if let Some(other) = place.other_than(from) {
            // There is another copy, so this one is only dropped.
            if !view.device(other).state.reads() {
                return self.stuck(&place, from, silent(other), waiting);
            }
            return Some(step(
                Act::Drop,
                from,
                format!("job {id}: it has a copy elsewhere"),
            ));
        }
        if !view.device(from).state.reads() {
            return self.stuck(&place, from, silent(from), waiting);
        }
        let able = |to: DeviceId| to != self.device;
        let same_tier = |to: DeviceId| able(to) && view.device(to).tier == view.device(from).tier;
        let fits = |&(_, free): &(DeviceId, u64)| free >= view.unit_bytes();
        // A pin is to a tier: another device of this tier is preferred.
        let pinned = place.hold.is_some();
        let first = room.most(same_tier).filter(|most| pinned && fits(most));
        match first.or_else(|| room.most(able)) {
            Some(most) if fits(&most) => {
                room.take(most.0, view.unit_bytes());
                Some(step(Act::Move, most.0, format!("job {id}")))
            }
            Some((to, _)) => {
                let percent = view.device(to).percent();
                self.stuck(
                    &place,
                    to,
                    format!("waiting: {} {percent} % full", view.name(to)),
                    waiting,
                )
            }
            None => {
                let reason = "waiting: no device that takes new data".into();
                self.stuck(&place, from, reason, waiting)
            }
        }
    }

    /// Counts a unit that does not move in this pass.
    fn stuck(
        &mut self,
        place: &Place,
        to: DeviceId,
        reason: String,
        waiting: &mut Vec<Waiting>,
    ) -> Option<Step> {
        let bytes = u64::from(place.bytes);
        match waiting.iter_mut().find(|one| one.reason == reason) {
            Some(one) => one.bytes += bytes,
            None => waiting.push(Waiting {
                from: place.device,
                to,
                cause: Cause::Asked,
                bytes,
                reason: reason.clone().into(),
            }),
        }
        *self.passing.entry(reason).or_default() += bytes;
        None
    }
}

/// Room on each device for moved units.
struct Rooms(Vec<Option<u64>>);

impl Rooms {
    fn of(view: &View<'_>) -> Self {
        let room = |device| view.room_bytes(device);
        let takes = |device: &&DeviceView| device.state.takes_new();
        let room = view
            .devices
            .iter()
            .map(|device| Some(device).filter(takes).map(room));
        Self(room.collect())
    }

    fn most(&self, able: impl Fn(DeviceId) -> bool) -> Option<(DeviceId, u64)> {
        let all = self.0.iter().enumerate();
        all.filter_map(|(at, free)| free.map(|free| (DeviceId(at as u8), free)))
            .filter(|(id, _)| able(*id))
            .max_by_key(|(_, free)| *free)
    }

    fn take(&mut self, id: DeviceId, bytes: u64) {
        if let Some(Some(free)) = self.0.get_mut(id.index()) {
            *free = free.saturating_sub(bytes);
        }
    }
}
