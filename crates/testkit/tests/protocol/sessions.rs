//! Lease hand-over, log ordering, seals and digest commit: two clients that write one inode, the first with
//! two threads, a daemon that may die once, and one seal by force. In every state the pool is recovered in
//! thought: after a kill, and after a power cut with and without what was not fenced.

use super::{fails, holds};
use stateright::{Model, Property};

type Op = u8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Entry {
    Taken,
    Stored,
    Fenced,
}

/// A number of a log.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Number {
    op: Op,
    entry: Entry,
    /// All below were published when this was taken.
    stable_below: usize,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Log {
    /// Number `n` is at `n - 1`.
    numbers: Vec<Number>,
    sealed: bool,
    /// What the scan said of each number: in the daemon's memory, and in the session's row.
    seal: Option<Vec<bool>>,
    durable_seal: Option<Vec<bool>>,
    digested: usize,
    ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Idle,
    Took(usize),
    Stored(usize),
    Fenced(usize),
    Lost(usize),
    /// Looked at the page before it stored (bug).
    Cleared(usize),
    Done,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Thread {
    op: Op,
    step: Step,
    /// Operations that had been acknowledged when this one began.
    after: Vec<Op>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Client {
    log: Log,
    threads: Vec<Thread>,
    lease: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    clients: Vec<Client>,
    holder: Option<usize>,
    releasing: Option<usize>,
    /// Operations in the shared area, in order.
    shared: Vec<Op>,
    acked: Vec<Op>,
    /// Operations whose number is in the row, and which are not in the shared area yet (bug).
    half: Vec<Op>,
    /// Daemons that may still die, and sessions that may still be sealed by force.
    crashes: u8,
    seals: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Action {
    Take(usize, usize),
    Look(usize, usize),
    Store(usize, usize),
    Fence(usize, usize),
    Resume(usize),
    Release(usize),
    EndRelease,
    Grant(usize),
    Digest(usize),
    FinishDigest,
    SealPage(usize),
    Scan(usize),
    PersistSeal(usize),
    DigestSealed(usize),
    End(usize),
    DaemonDies,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    HandOverBeforeDigest,
    AckWithoutPageCheck,
    LookBeforeStore,
    ScanBeforePage,
    SealNotDurable,
    NumberBeforeOps,
    NoFence,
    ServeBeforeRecovery,
}

struct Protocol(Wrong);

impl Log {
    fn visible(&self, number: usize, least: Entry) -> bool {
        self.numbers[number - 1].entry >= least
    }

    /// What a scan finds, for each number.
    fn scan(&self, least: Entry) -> Vec<bool> {
        let mut covered = vec![false; self.numbers.len()];
        covered[..self.digested].fill(true);
        let mut missing = None;
        for number in self.digested + 1..=self.numbers.len() {
            if !self.visible(number, least) {
                missing.get_or_insert(number);
            } else if missing.is_some_and(|missing| self.numbers[number - 1].stable_below > missing) {
                break;
            } else {
                covered[number - 1] = true;
            }
        }
        covered
    }

    fn dense(&self) -> usize {
        let rest = self.digested + 1..=self.numbers.len();
        self.digested
            + rest
                .take_while(|number| self.visible(*number, Entry::Stored))
                .count()
    }

    fn ops(&self, numbers: std::ops::RangeInclusive<usize>) -> Vec<Op> {
        numbers.map(|number| self.numbers[number - 1].op).collect()
    }
}

impl State {
    /// The shared area after a recovery from here.
    fn recovered(&self, least: Entry, backwards: bool) -> Vec<Op> {
        let mut shared = self.shared.clone();
        let mut clients: Vec<_> = self.clients.iter().collect();
        if backwards {
            clients.reverse();
        }
        for log in clients.iter().map(|client| &client.log).filter(|log| !log.ended) {
            let covered = log.durable_seal.clone().unwrap_or_else(|| log.scan(least));
            for number in log.digested + 1..=log.numbers.len() {
                // A seal that was made durable while an entry was there finds it again: it is durable by
                // then.
                if covered.get(number - 1) == Some(&true) {
                    shared.push(log.numbers[number - 1].op);
                }
            }
        }
        shared
    }

    fn all_recovered(&self) -> impl Iterator<Item = Vec<Op>> {
        let kinds = [Entry::Stored, Entry::Fenced].into_iter();
        kinds.flat_map(|least| [false, true].map(|backwards| self.recovered(least, backwards)))
    }

    fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.clients.iter().flat_map(|client| &client.threads)
    }

    fn ack(&mut self, client: usize, thread: usize) {
        let thread = &mut self.clients[client].threads[thread];
        thread.step = Step::Done;
        self.acked.push(thread.op);
        self.acked.sort_unstable();
    }
}

const LOST: &str = "every acknowledged operation is there after recovery";
const TWICE: &str = "no operation is there twice";
const ORDER: &str = "an operation comes after those acknowledged before it began";

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let thread = |op| Thread {
            op,
            step: Step::Idle,
            after: Vec::new(),
        };
        let client = |ops: &[Op]| Client {
            log: Log::default(),
            threads: ops.iter().map(|op| thread(*op)).collect(),
            lease: false,
        };
        vec![State {
            clients: vec![client(&[1, 2]), client(&[3])],
            holder: None,
            releasing: None,
            shared: Vec::new(),
            acked: Vec::new(),
            half: Vec::new(),
            crashes: 1,
            seals: 1,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (c, client) in state.clients.iter().enumerate() {
            let log = &client.log;
            for (t, thread) in client.threads.iter().enumerate() {
                match thread.step {
                    Step::Idle if client.lease => actions.push(Action::Take(c, t)),
                    Step::Took(_) if self.0 == Wrong::LookBeforeStore => actions.push(Action::Look(c, t)),
                    Step::Took(_) | Step::Cleared(_) => actions.push(Action::Store(c, t)),
                    Step::Stored(_) => actions.push(Action::Fence(c, t)),
                    Step::Fenced(_) => actions.push(Action::Look(c, t)),
                    _ => {}
                }
            }
            let at_rest = |thread: &Thread| matches!(thread.step, Step::Idle | Step::Done);
            let quiet = client.threads.iter().all(at_rest);
            let over = |thread: &Thread| at_rest(thread) || matches!(thread.step, Step::Lost(_));
            if log.ended && client.threads.iter().all(over) {
                actions.push(Action::Resume(c));
            }
            if client.lease && quiet && !log.sealed {
                actions.push(Action::Release(c));
            }
            // A daemon that starts serves when the logs of the one before are digested.
            let recovered = state
                .clients
                .iter()
                .all(|other| !other.log.sealed || other.log.ended);
            let serving = recovered || self.0 == Wrong::ServeBeforeRecovery;
            if state.holder.is_none() && !client.lease && !log.sealed && serving {
                actions.push(Action::Grant(c));
            }
            if !log.sealed && state.half.is_empty() && log.dense() > log.digested {
                actions.push(Action::Digest(c));
            }
            if !log.sealed && state.holder == Some(c) && log.seal.is_none() && state.seals > 0 {
                actions.push(if self.0 == Wrong::ScanBeforePage {
                    Action::Scan(c)
                } else {
                    Action::SealPage(c)
                });
            }
            if log.sealed && !log.ended {
                match (&log.seal, &log.durable_seal) {
                    (None, _) => actions.push(Action::Scan(c)),
                    (Some(_), None) if self.0 != Wrong::SealNotDurable => {
                        actions.push(Action::PersistSeal(c))
                    }
                    (Some(seal), _) if (log.digested + 1..=seal.len()).any(|number| seal[number - 1]) => {
                        actions.push(Action::DigestSealed(c));
                    }
                    _ => actions.push(Action::End(c)),
                }
            } else if log.seal.is_some() && !log.sealed {
                actions.push(Action::SealPage(c));
            }
        }
        if state.releasing.is_some() {
            actions.push(Action::EndRelease);
        }
        if !state.half.is_empty() {
            actions.push(Action::FinishDigest);
        }
        if state.crashes > 0 {
            actions.push(Action::DaemonDies);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Take(c, t) => {
                let acked = state.acked.clone();
                let client = &mut state.clients[c];
                let number = client.log.numbers.len() + 1;
                let in_flight = client.threads.iter().filter_map(|thread| match thread.step {
                    Step::Took(n) | Step::Stored(n) | Step::Fenced(n) | Step::Cleared(n) | Step::Lost(n) => {
                        Some(n)
                    }
                    _ => None,
                });
                let stable_below = in_flight.min().unwrap_or(number);
                let thread = &mut client.threads[t];
                (thread.step, thread.after) = (Step::Took(number), acked);
                client.log.numbers.push(Number {
                    op: thread.op,
                    entry: Entry::Taken,
                    stable_below,
                });
            }
            Action::Store(c, t) | Action::Fence(c, t) => {
                let client = &mut state.clients[c];
                let (number, entry) = match client.threads[t].step {
                    Step::Took(number) | Step::Cleared(number) => (number, Entry::Stored),
                    Step::Stored(number) => (number, Entry::Fenced),
                    _ => return None,
                };
                let cleared = matches!(client.threads[t].step, Step::Cleared(_));
                if !(entry == Entry::Fenced && self.0 == Wrong::NoFence) {
                    client.log.numbers[number - 1].entry = entry;
                }
                client.threads[t].step = match entry {
                    Entry::Stored => Step::Stored(number),
                    _ => Step::Fenced(number),
                };
                if cleared {
                    // It looked before: now it only fences and returns.
                    client.log.numbers[number - 1].entry = Entry::Fenced;
                    state.ack(c, t);
                }
            }
            Action::Look(c, t) => {
                let sealed = state.clients[c].log.sealed;
                match state.clients[c].threads[t].step {
                    Step::Took(number) => {
                        let step = if sealed {
                            Step::Lost(number)
                        } else {
                            Step::Cleared(number)
                        };
                        state.clients[c].threads[t].step = step;
                    }
                    Step::Fenced(number) if sealed && self.0 != Wrong::AckWithoutPageCheck => {
                        state.clients[c].threads[t].step = Step::Lost(number);
                    }
                    _ => state.ack(c, t),
                }
            }
            Action::Resume(c) => {
                let log = std::mem::take(&mut state.clients[c].log);
                let told = log.durable_seal.or(log.seal).unwrap_or_default();
                state.clients[c].lease = false;
                for t in 0..state.clients[c].threads.len() {
                    if let Step::Lost(number) = state.clients[c].threads[t].step {
                        if told.get(number - 1) == Some(&true) {
                            state.ack(c, t);
                        } else {
                            state.clients[c].threads[t].step = Step::Idle;
                        }
                    }
                }
            }
            Action::Release(c) => {
                state.clients[c].lease = false;
                state.releasing = Some(c);
            }
            Action::EndRelease => {
                let c = state.releasing.take()?;
                let log = &mut state.clients[c].log;
                if self.0 != Wrong::HandOverBeforeDigest && log.numbers.len() > log.digested {
                    let upto = log.numbers.len();
                    let ops = log.ops(log.digested + 1..=upto);
                    log.digested = upto;
                    state.shared.extend(ops);
                }
                state.holder = None;
            }
            Action::Grant(c) => {
                state.holder = Some(c);
                state.clients[c].lease = true;
            }
            Action::Digest(c) => {
                let log = &mut state.clients[c].log;
                let upto = log.dense();
                let ops = log.ops(log.digested + 1..=upto);
                log.digested = upto;
                match self.0 {
                    Wrong::NumberBeforeOps => state.half = ops,
                    _ => state.shared.extend(ops),
                }
            }
            Action::FinishDigest => {
                let half = std::mem::take(&mut state.half);
                state.shared.extend(half);
            }
            Action::SealPage(c) => {
                state.clients[c].log.sealed = true;
                state.seals = 0;
            }
            Action::Scan(c) => {
                state.seals = 0;
                let log = &mut state.clients[c].log;
                log.seal = Some(log.scan(Entry::Stored));
            }
            Action::PersistSeal(c) => {
                // A barrier before the scan, a fence before the row: what it names is durable.
                let log = &mut state.clients[c].log;
                log.durable_seal.clone_from(&log.seal);
            }
            Action::DigestSealed(c) => {
                let log = &mut state.clients[c].log;
                let seal = log.seal.clone()?;
                let number = (log.digested + 1..=seal.len()).find(|number| seal[number - 1])?;
                log.digested = number;
                let op = log.numbers[number - 1].op;
                state.shared.push(op);
            }
            Action::End(c) => {
                state.clients[c].log.ended = true;
                if state.holder == Some(c) {
                    state.holder = None;
                }
                if state.releasing == Some(c) {
                    state.releasing = None;
                }
            }
            Action::DaemonDies => {
                state.crashes -= 1;
                (state.holder, state.releasing) = (None, None);
                state.half.clear();
                for client in &mut state.clients {
                    client.log.sealed = true;
                    client.log.seal.clone_from(&client.log.durable_seal);
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(LOST, |_, state: &State| {
                state
                    .all_recovered()
                    .all(|shared| state.acked.iter().all(|op| shared.contains(op)))
            }),
            Property::always(TWICE, |_, state: &State| {
                state.all_recovered().all(|mut shared| {
                    shared.sort_unstable();
                    shared.windows(2).all(|pair| pair[0] != pair[1])
                })
            }),
            Property::always(ORDER, |_, state: &State| {
                state.all_recovered().all(|shared| {
                    state.threads().all(|thread| {
                        let at = |op: &Op| shared.iter().position(|other| other == op);
                        let own = at(&thread.op);
                        own.is_none() || thread.after.iter().all(|op| at(op) < own)
                    })
                })
            }),
            Property::sometimes("everything is done", |_, state: &State| state.acked.len() == 3),
        ]
    }
}

#[test]
fn sessions_lose_nothing_and_keep_order_in_all_states() {
    holds(Protocol(Wrong::Nothing));
}

#[test]
fn hand_over_before_digest_breaks_the_order() {
    let steps = fails(Protocol(Wrong::HandOverBeforeDigest), ORDER);
    assert!(steps.contains(&"EndRelease".into()), "{steps:?}");
}

#[test]
fn acknowledging_without_a_look_at_the_page_loses_what_the_seal_does_not_cover() {
    let steps = fails(Protocol(Wrong::AckWithoutPageCheck), LOST);
    assert!(steps.iter().any(|step| step.starts_with("Scan")), "{steps:?}");
}

#[test]
fn looking_at_the_page_before_the_store_loses_too() {
    fails(Protocol(Wrong::LookBeforeStore), LOST);
}

#[test]
fn scanning_before_the_page_says_sealed_loses_what_comes_in_between() {
    fails(Protocol(Wrong::ScanBeforePage), LOST);
}

#[test]
fn seal_that_is_not_durable_before_the_digest_covers_what_was_left_out() {
    // Number 2 is digested without number 1, the daemon dies, and the next scan takes the late entry 1 for
    // digested.
    let steps = fails(Protocol(Wrong::SealNotDurable), LOST);
    assert!(steps.contains(&"DaemonDies".into()), "{steps:?}");
}

#[test]
fn digested_number_before_its_operations_loses_them_when_the_daemon_dies() {
    fails(Protocol(Wrong::NumberBeforeOps), LOST);
}

#[test]
fn serving_before_the_logs_are_digested_breaks_the_order() {
    let steps = fails(Protocol(Wrong::ServeBeforeRecovery), ORDER);
    assert!(steps.contains(&"DaemonDies".into()), "{steps:?}");
}

#[test]
fn missing_fence_loses_what_returned() {
    let steps = fails(Protocol(Wrong::NoFence), LOST);
    assert_eq!(steps.len(), 5, "{steps:?}");
}
