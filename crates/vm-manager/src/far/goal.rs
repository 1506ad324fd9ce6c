//! What the pager works towards: a limit of local memory, or that everything is local.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::config::Local;

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
