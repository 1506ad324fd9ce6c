//! A lease that came ahead: one directory's lease reaches a session in the answer to a request for another
//! inode, while a request of the session asks for it too, and somebody else wants it. What the daemon asks
//! back is asked once here: that it asks again half a second later is help that nobody may need.

use super::{fails, holds};
use stateright::{Model, Property};

type Number = u8;

/// The worker, about this lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    Settled,
    /// Asked back; a request may have it pinned.
    Draining,
    /// Nobody has it pinned, and its number counts as given back.
    Releasing,
}

/// A request of this session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Request {
    Idle,
    /// The daemon has it.
    Asked,
    /// Its answer is on the way, with this lease or without.
    Answered(Option<Number>),
    Pinned,
}

/// The other session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Other {
    Idle,
    Waits,
    Has,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    // The client.
    held: Option<Number>,
    phase: Phase,
    given_back: Number,
    /// A revocation that was taken for one of what a request waits for.
    early: Option<Number>,
    /// Asks for another inode, and for this one with it.
    near: Request,
    /// Asks for this one.
    own: Request,
    /// The worker waits for the answer to its release: of what it held, or of a number that never came.
    sent: Option<Number>,
    // The daemon.
    granted: Option<Number>,
    newest: Number,
    asked_back: bool,
    other: Other,
    // On the way.
    revoke: Option<Number>,
    release: Option<Number>,
    released: bool,
    // How often each of these may still begin.
    nears: u8,
    owns: u8,
    others: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    AskNear,
    AnswerNear,
    TakeNear,
    Ask,
    Answer,
    TakeAnswer,
    Unpin,
    SomebodyWants,
    SomebodyIsDone,
    TakeRevocation,
    Look,
    SendRelease,
    TakeRelease,
    TakeReleased,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// A revocation that was put aside for a request is not looked at again when the lease comes with another
    /// one's answer.
    EarlyNotRecalled,
    /// A lease that comes while an older one of the inode goes is left.
    LeftWhileOlderGoes,
    /// What was said to be free before it came is not remembered.
    LateTakenIn,
}

struct Ahead(Wrong);

impl State {
    const fn waits(&self) -> bool {
        matches!(self.own, Request::Asked | Request::Answered(_))
    }

    /// Whether a request may use it.
    fn is_usable(&self) -> bool {
        self.held.is_some() && self.phase == Phase::Settled
    }

    fn grant(&mut self) -> Number {
        self.newest += 1;
        self.granted = Some(self.newest);
        self.newest
    }

    /// Takes a grant in; `false`: it was given back already.
    fn install(&mut self, number: Number) -> bool {
        if number <= self.given_back || self.held.is_some_and(|held| number < held) {
            return false;
        }
        if self.held != Some(number) {
            // A newer grant took the place of one that goes: nothing bars it.
            self.held = Some(number);
            self.phase = Phase::Settled;
        }
        true
    }

    /// The worker is told again of a revocation that came early.
    fn recall(&mut self, of: Option<Number>) {
        if self.early.is_some() && (of.is_none() || of == self.early) {
            self.revoke = self.early.take();
        }
    }
}

const STUCK: &str = "nobody waits for a lease that nobody will give back";
const ONE: &str = "what is used here is held here by the daemon's book";

impl Model for Ahead {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            held: None,
            phase: Phase::Settled,
            given_back: 0,
            early: None,
            near: Request::Idle,
            own: Request::Idle,
            sent: None,
            granted: None,
            newest: 0,
            asked_back: false,
            other: Other::Idle,
            revoke: None,
            release: None,
            released: false,
            nears: 2,
            owns: 2,
            others: 2,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.near == Request::Idle && state.nears > 0 {
            actions.push(Action::AskNear);
        }
        match state.near {
            Request::Asked => actions.push(Action::AnswerNear),
            Request::Answered(_) => actions.push(Action::TakeNear),
            Request::Idle | Request::Pinned => {}
        }
        // While it goes, a request waits at the gate; what is held it uses without asking.
        if state.own == Request::Idle && state.owns > 0 && state.phase == Phase::Settled {
            actions.push(Action::Ask);
        }
        match state.own {
            // What is asked back is not granted again before it is here; who came before goes before.
            Request::Asked if !state.asked_back && state.other == Other::Idle => actions.push(Action::Answer),
            Request::Answered(_) => actions.push(Action::TakeAnswer),
            Request::Pinned => actions.push(Action::Unpin),
            Request::Idle | Request::Asked => {}
        }
        if state.other == Other::Idle && state.others > 0 {
            actions.push(Action::SomebodyWants);
        }
        if state.other == Other::Has {
            actions.push(Action::SomebodyIsDone);
        }
        // The worker does one thing after the other.
        if state.sent.is_none() {
            if state.revoke.is_some() {
                actions.push(Action::TakeRevocation);
            }
            if state.phase == Phase::Draining && state.own != Request::Pinned {
                actions.push(Action::Look);
            }
            if state.phase == Phase::Releasing {
                actions.push(Action::SendRelease);
            }
        }
        if state.release.is_some() {
            actions.push(Action::TakeRelease);
        }
        if state.released {
            actions.push(Action::TakeReleased);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::AskNear => {
                state.nears -= 1;
                state.near = Request::Asked;
            }
            Action::AnswerNear => {
                // Ahead comes only what nobody has and nobody waits for.
                let free =
                    state.granted.is_none() && state.other == Other::Idle && state.own != Request::Asked;
                state.near = Request::Answered(free.then(|| state.grant()));
            }
            Action::TakeNear => {
                let Request::Answered(came) = state.near else {
                    return None;
                };
                state.near = Request::Idle;
                if let Some(number) = came {
                    let left = self.0 == Wrong::LeftWhileOlderGoes && state.phase != Phase::Settled;
                    if !left {
                        state.install(number);
                    }
                    if self.0 != Wrong::EarlyNotRecalled {
                        state.recall(Some(number));
                    }
                }
            }
            Action::Ask if state.is_usable() => {
                state.owns -= 1;
                state.own = Request::Pinned;
            }
            Action::Ask => state.own = Request::Asked,
            Action::Answer => {
                let number = state.granted.unwrap_or_else(|| state.grant());
                state.own = Request::Answered(Some(number));
            }
            Action::TakeAnswer => {
                let Request::Answered(Some(number)) = state.own else {
                    return None;
                };
                // It pins what was granted even if that is wanted back already; if it was given back
                // meanwhile it asks anew.
                state.own = Request::Idle;
                if state.install(number) {
                    state.owns -= 1;
                    state.own = Request::Pinned;
                }
                state.recall(None);
            }
            Action::Unpin => state.own = Request::Idle,
            Action::SomebodyWants => {
                state.others -= 1;
                state.other = if state.granted.is_some() {
                    state.asked_back = true;
                    state.revoke = state.granted;
                    Other::Waits
                } else {
                    Other::Has
                };
            }
            Action::SomebodyIsDone => state.other = Other::Idle,
            Action::TakeRevocation => {
                let number = state.revoke.take()?;
                if state.held == Some(number) {
                    if state.phase == Phase::Settled {
                        state.phase = Phase::Draining;
                    }
                } else if number > state.given_back && state.waits() && state.early != Some(number) {
                    state.early = Some(number);
                } else {
                    // It never came here: it is free.
                    if self.0 != Wrong::LateTakenIn {
                        state.given_back = state.given_back.max(number);
                    }
                    state.early = None;
                    (state.sent, state.release) = (Some(number), Some(number));
                }
            }
            Action::Look => {
                state.phase = Phase::Releasing;
                state.given_back = state.given_back.max(state.held?);
            }
            Action::SendRelease => (state.sent, state.release) = (state.held, state.held),
            Action::TakeRelease => {
                let number = state.release.take()?;
                state.released = true;
                if state.granted == Some(number) {
                    (state.granted, state.asked_back) = (None, false);
                    if state.other == Other::Waits {
                        state.other = Other::Has;
                    }
                }
            }
            Action::TakeReleased => {
                state.released = false;
                let number = state.sent.take()?;
                if state.held == Some(number) {
                    (state.held, state.phase) = (None, Phase::Settled);
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(STUCK, |model, state: &State| {
                let mut actions = Vec::new();
                model.actions(state, &mut actions);
                let waits = state.own == Request::Asked || state.other == Other::Waits;
                !(actions.is_empty() && waits)
            }),
            Property::always(ONE, |_, state: &State| {
                !(state.is_usable() || state.own == Request::Pinned) || state.held == state.granted
            }),
            Property::sometimes("it came ahead and was used", |_, state: &State| {
                state.newest == 1 && state.own == Request::Pinned && state.nears < 2 && !state.waits()
            }),
            Property::sometimes("everything is done", |_, state: &State| {
                state.owns == 0 && state.others == 0 && state.nears == 0 && state.other == Other::Idle
            }),
        ]
    }
}

#[test]
fn lease_that_comes_ahead_keeps_nobody_waiting_in_all_states() {
    holds(Ahead(Wrong::Nothing));
}

#[test]
fn lease_ahead_whose_revocation_came_early_keeps_both_waiting_when_it_is_not_told_again() {
    let steps = fails(Ahead(Wrong::EarlyNotRecalled), STUCK);
    let at = |what: &str| steps.iter().position(|step| step == what);
    assert!(at("TakeRevocation") < at("TakeNear"), "{steps:?}");
}

#[test]
fn lease_ahead_that_is_left_while_an_older_goes_keeps_both_waiting_when_it_is_wanted() {
    let steps = fails(Ahead(Wrong::LeftWhileOlderGoes), STUCK);
    let last = |what: &str| steps.iter().rposition(|step| step == what);
    assert!(last("TakeNear") < last("TakeRevocation"), "{steps:?}");
}

#[test]
fn lease_ahead_that_was_said_to_be_free_is_used_by_two_when_it_is_taken_in_late() {
    let steps = fails(Ahead(Wrong::LateTakenIn), ONE);
    let at = |what: &str| steps.iter().position(|step| step == what);
    assert!(at("TakeRevocation") < at("TakeNear"), "{steps:?}");
}
