//! What the pager works towards: a limit of local memory, or that everything is local.

use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use varve_far::stall::{Control, Look, Waits};

use super::config::{LOCAL_MIN_BYTES, Local};

/// The stall of a run, and the limit that was found from it.
#[derive(Debug)]
pub(super) struct Stall {
    begun: Instant,
    state: Mutex<StallState>,
}

#[derive(Debug, Default)]
struct StallState {
    waits: Waits,
    share: f64,
    control: Option<(f64, Control)>,
    limit: u64,
}

impl Stall {
    pub(super) fn new() -> Self {
        Self {
            begun: Instant::now(),
            state: Mutex::default(),
        }
    }

    fn ns(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.begun).as_nanos() as u64
    }

    /// Notes that `count` threads wait since `at`.
    pub(super) fn begin(&self, at: Instant, count: u64) {
        if count > 0 {
            self.state.lock().waits.begin(self.ns(at), count);
        }
    }

    /// Notes that `count` threads wait no more.
    pub(super) fn end(&self, count: u64) {
        if count > 0 {
            let now = self.ns(Instant::now());
            self.state.lock().waits.end(now, count);
        }
    }

    /// Once a second: with `local` and `total` bytes of the programs, finds the limit for a target of
    /// `target`, if there is one.
    pub(super) fn step(&self, target: Option<f64>, local: u64, total: u64) {
        let now = self.ns(Instant::now());
        let mut state = self.state.lock();
        state.share = state.waits.take(now);
        let Some(target) = target else {
            state.control = None;
            return;
        };
        let look = Look {
            stall: state.share,
            local,
            total,
        };
        if state.control.as_ref().is_none_or(|(before, _)| *before != target) {
            // From where it is.
            state.control = Some((target, Control::new(target, local, LOCAL_MIN_BYTES)));
        }
        if let Some((_, control)) = &mut state.control {
            let limit = control.step(&look);
            state.limit = limit;
        }
    }

    /// The share of the last second in which a thread waited for a far page.
    pub(super) fn share(&self) -> f64 {
        self.state.lock().share
    }

    /// The limit that was found; none before the first second.
    pub(super) fn limit(&self) -> Option<u64> {
        let state = self.state.lock();
        state.control.as_ref().map(|_| state.limit)
    }
}

/// How far a drain has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drain {
    /// Pages that came back.
    pub came_back: u64,
    /// Pages that cannot come back: nothing of theirs is mapped any more, or their program does not answer.
    pub stay: u64,
    /// Whether all has come back that can.
    pub is_done: bool,
}

#[derive(Debug, Clone, Copy)]
struct State {
    local: Local,
    drain: Option<Drain>,
    /// Counts the changes, so that a drain of before notices that it was replaced.
    changes: u64,
}

/// The goal. A new limit ends a drain, and a drain suspends the limit.
#[derive(Debug)]
pub(super) struct Goal(Mutex<State>);

impl Goal {
    pub(super) fn new(local: Local) -> Self {
        Self(Mutex::new(State {
            local,
            drain: None,
            changes: 0,
        }))
    }

    /// The limit, unless all memory is to be local.
    pub(super) fn local(&self) -> Option<Local> {
        let state = self.0.lock();
        state.drain.is_none().then_some(state.local)
    }

    /// Sets a limit.
    pub(super) fn set(&self, local: Local) {
        let mut state = self.0.lock();
        *state = State {
            local,
            drain: None,
            changes: state.changes + 1,
        };
    }

    /// Wants all memory local. Gives the number of the drain, or `None` when one is under way.
    pub(super) fn drain(&self) -> Option<u64> {
        let mut state = self.0.lock();
        if state.drain.is_some_and(|drain| !drain.is_done) {
            return None;
        }
        state.drain = Some(Drain::default());
        state.changes += 1;
        Some(state.changes)
    }

    /// Whether nothing may leave.
    pub(super) fn is_draining(&self) -> bool {
        self.0.lock().drain.is_some()
    }

    /// How far the drain has come, if all memory is to be local.
    pub(super) fn progress(&self) -> Option<Drain> {
        self.0.lock().drain
    }

    /// Notes how far drain `number` has come. False when it was replaced.
    pub(super) fn note(&self, number: u64, came_back: u64, stay: u64, is_done: bool) -> bool {
        let mut state = self.0.lock();
        if state.changes != number {
            return false;
        }
        if let Some(drain) = &mut state.drain {
            drain.came_back += came_back;
            drain.stay = stay;
            drain.is_done = is_done;
        }
        true
    }

    /// The goal in the words of `--local`; `all` for a drain.
    pub(super) fn words(&self) -> String {
        self.local()
            .map_or_else(|| "all".to_owned(), |local| local.to_string())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn new_limit_ends_a_drain_and_the_drain_of_before_notices() {
        let goal = Goal::new(Local::Bytes(8 << 20));
        assert_eq!(goal.words(), "8M");
        let first = goal.drain().unwrap();
        assert!(goal.is_draining() && goal.local().is_none() && goal.words() == "all");
        assert_eq!(goal.drain(), None, "one is under way");
        assert!(goal.note(first, 5, 1, false));
        goal.set(Local::Share(0.5));
        assert_eq!((goal.local(), goal.progress()), (Some(Local::Share(0.5)), None));
        assert!(!goal.note(first, 5, 0, true), "replaced");
        let second = goal.drain().unwrap();
        assert!(goal.note(second, 7, 0, true));
        assert!(goal.is_draining(), "nothing leaves after a drain either");
        assert!(goal.drain().is_some(), "again, for what could not come back");
    }
}
