//! How one lease goes back while a request of the same client asks for it again: a program's thread that logs
//! two operations under it, the worker that gives it back, the daemon that grants, asks back and digests. An
//! entry counts only if the daemon has a row for it then.

use super::{fails, holds};
use stateright::{Model, Property};

type Number = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Settled,
    /// Asked back; a request has it pinned.
    Draining,
    /// Nobody has it pinned: the release is to be put together.
    Releasing,
    /// The release was sent; answered when this is over.
    Sent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Request {
    Idle,
    /// Waits for an answer of the daemon.
    Asked,
    Pinned,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    // The client.
    held: Option<Number>,
    phase: Phase,
    given_back: Number,
    request: Request,
    /// Operations that are still to be done, and entries in the log.
    todo: u8,
    logged: u8,
    // The daemon.
    granted: Option<Number>,
    newest: Number,
    asked_back: bool,
    row: bool,
    digested: u8,
    refused: bool,
    /// Times that somebody else may still want it.
    others: u8,
    // On the way.
    answer: Option<Number>,
    revoke: Option<Number>,
    release: Option<(Number, u8)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Ask,
    Answer,
    TakeAnswer,
    Log,
    SomebodyWants,
    TakeRevocation,
    Look,
    SendRelease,
    TakeRelease,
    Digest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The number counts as given back when the release is put together, not when the pins were looked at.
    GivenBackLate,
}

struct HandOver(Wrong);

const REFUSED: &str = "no entry is left out";

impl Model for HandOver {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            held: Some(1),
            phase: Phase::Settled,
            given_back: 0,
            request: Request::Idle,
            todo: 2,
            logged: 0,
            granted: Some(1),
            newest: 1,
            asked_back: false,
            row: true,
            digested: 0,
            refused: false,
            others: 2,
            answer: None,
            revoke: None,
            release: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.request == Request::Idle && state.todo > 0 {
            actions.push(Action::Ask);
        }
        // What is asked back is not granted again before it is here.
        if state.request == Request::Asked && state.answer.is_none() && !state.asked_back {
            actions.push(Action::Answer);
        }
        if state.answer.is_some() {
            actions.push(Action::TakeAnswer);
        }
        if state.request == Request::Pinned {
            actions.push(Action::Log);
        }
        if state.granted.is_some() && !state.asked_back && state.others > 0 {
            actions.push(Action::SomebodyWants);
        }
        // A grant that is on its way is waited for.
        if state.revoke.is_some() && (state.revoke == state.held || state.answer.is_none()) {
            actions.push(Action::TakeRevocation);
        }
        if state.phase == Phase::Draining && state.request != Request::Pinned {
            actions.push(Action::Look);
        }
        if state.phase == Phase::Releasing {
            actions.push(Action::SendRelease);
        }
        if state.release.is_some() {
            actions.push(Action::TakeRelease);
        }
        if state.digested < state.logged {
            actions.push(Action::Digest);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Ask => state.request = Request::Asked,
            Action::Answer => {
                if state.granted.is_none() {
                    state.newest += 1;
                    (state.granted, state.row) = (Some(state.newest), true);
                }
                state.answer = state.granted;
            }
            Action::TakeAnswer => {
                let number = state.answer.take()?;
                if number <= state.given_back {
                    // Asks anew.
                    state.request = Request::Idle;
                } else {
                    if state.held != Some(number) {
                        (state.held, state.phase) = (Some(number), Phase::Settled);
                    }
                    state.request = Request::Pinned;
                }
            }
            Action::Log => {
                state.logged += 1;
                state.todo -= 1;
                state.request = Request::Idle;
            }
            Action::SomebodyWants => {
                state.others -= 1;
                state.asked_back = true;
                state.revoke = state.granted;
            }
            Action::TakeRevocation => {
                let number = state.revoke.take()?;
                if state.held == Some(number) {
                    state.phase = Phase::Draining;
                } else {
                    // It never came here.
                    state.given_back = state.given_back.max(number);
                    state.release = Some((number, state.logged));
                }
            }
            Action::Look => {
                state.phase = Phase::Releasing;
                if self.0 == Wrong::Nothing {
                    state.given_back = state.given_back.max(state.held?);
                }
            }
            Action::SendRelease => {
                let number = state.held?;
                state.given_back = state.given_back.max(number);
                state.release = Some((number, state.logged));
                state.phase = Phase::Sent;
            }
            Action::TakeRelease => {
                let (number, upto) = state.release.take()?;
                state.digested = state.digested.max(upto);
                if state.granted == Some(number) {
                    (state.granted, state.row, state.asked_back) = (None, false, false);
                }
                if state.held == Some(number) {
                    (state.held, state.phase) = (None, Phase::Settled);
                }
            }
            Action::Digest => {
                state.refused |= !state.row;
                state.digested = state.logged;
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(REFUSED, |_, state: &State| !state.refused),
            Property::sometimes("everything is done", |_, state: &State| {
                state.todo == 0 && state.digested == 2
            }),
            Property::sometimes("it goes to others and comes back", |_, state: &State| {
                state.newest == 2 && state.logged == 2
            }),
        ]
    }
}

#[test]
fn lease_that_goes_back_while_it_is_asked_for_takes_no_entry_with_it() {
    holds(HandOver(Wrong::Nothing));
}

#[test]
fn lease_that_counts_as_given_back_too_late_loses_what_is_logged_in_between() {
    let steps = fails(HandOver(Wrong::GivenBackLate), REFUSED);
    let at = |what: &str| steps.iter().position(|step| step == what);
    assert!(
        at("Look") < at("TakeAnswer") && at("SendRelease") < at("Log"),
        "{steps:?}"
    );
}
