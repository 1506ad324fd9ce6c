//! Threads that take turns: exactly one thread of a run executes at a time. When it waits or steps aside, the
//! next is drawn from a seed. Time is simulated, and advances only when no thread can run. Owns turns and
//! time; refuses to know the work in them.
//!
//! A waiting thread is ready again when something has happened ([`Turns::tell`]) or its time is over. Threads
//! belong to a process or to none (the daemon's, the test's). A stopped process has no turns, except for work
//! that the daemon does for it at that moment.

use crate::workload::Rng;
use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use varve_format::seeded;
use varve_ipc::{Clock, ManualClock};

/// Turns after which a run counts as endless.
const TURNS_MAX: u64 = 20_000_000;
/// Real time without the end of a turn after which a thread must be waiting for one that has no turn.
const STUCK: Duration = Duration::from_secs(60);
/// Number of recent events kept for messages.
const LATELY_MAX: usize = 400;

/// Panic payload that ends the threads of a killed daemon.
struct Killed;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Ready,
    /// Ready again when something has happened since `seen`, or at `until_ms`.
    Waiting {
        until_ms: u64,
        seen: u64,
    },
    Done,
}

struct Party {
    name: String,
    process: Option<usize>,
    status: Status,
    /// Number of the turn before which it is not drawn.
    held_until: u64,
    /// Whether it has done something since it last waited.
    active: bool,
    /// Number of the daemon that it executes in.
    served_by: Option<u64>,
    turn: Arc<Condvar>,
}

struct State {
    parties: Vec<Party>,
    running: usize,
    rng: Rng,
    turns: u64,
    happened: u64,
    stopped: Vec<usize>,
    /// Threads in which a process was stopped: they continue before others of their process.
    amid: Vec<(usize, usize)>,
    /// Daemons up to this number were killed.
    killed: u64,
    trace: u64,
    lately: std::collections::VecDeque<String>,
    panicked: Option<String>,
    over: bool,
}

/// The scheduler of a run. See the module.
pub struct Turns {
    number: u64,
    clock: Arc<ManualClock>,
    state: Mutex<State>,
}

thread_local! {
    /// The runs that this thread takes part in, with its index in each.
    static PARTS: RefCell<Vec<(u64, usize)>> = const { RefCell::new(Vec::new()) };
}

impl Turns {
    /// Creates a run in which the calling thread has the first turn.
    #[must_use]
    pub fn new(seed: u64, clock: Arc<ManualClock>) -> Arc<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        PARTS.with(|parts| parts.borrow_mut().push((number, 0)));
        Arc::new(Self {
            number,
            clock,
            state: Mutex::new(State {
                parties: vec![Party::new("test", None)],
                running: 0,
                rng: Rng::new(seed ^ 0x7_u64.rotate_right(9)),
                turns: 0,
                happened: 1,
                stopped: Vec::new(),
                amid: Vec::new(),
                killed: 0,
                trace: 0,
                lately: std::collections::VecDeque::new(),
                panicked: None,
                over: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn me(&self) -> Option<usize> {
        let mine = |parts: &RefCell<Vec<(u64, usize)>>| {
            let parts = parts.borrow();
            let part = parts.iter().find(|(number, _)| *number == self.number);
            part.map(|(_, me)| *me)
        };
        PARTS.try_with(mine).ok().flatten()
    }

    /// Ends the run: the remaining threads execute freely.
    pub fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.parties.iter().for_each(|party| party.turn.notify_all());
        drop(state);
        let _ = PARTS.try_with(|parts| parts.borrow_mut().retain(|(number, _)| *number != self.number));
    }

    /// Whether [`end`](Self::end) was called.
    pub fn is_over(&self) -> bool {
        self.lock().over
    }

    /// Draws a number below `bound` from the seed.
    pub fn draw(&self, bound: u64) -> u64 {
        self.lock().rng.below(bound)
    }

    /// Notes an event in the trace. Waiting threads become ready.
    pub fn tell(&self, what: impl FnOnce() -> String) {
        let Some(me) = self.me() else { return };
        let mut state = self.lock();
        if state.over {
            return;
        }
        state.happened += 1;
        state.parties[me].active = true;
        let line = format!(
            "{:>6} {} {}: {}",
            self.clock.monotonic_ms(),
            state.turns,
            state.parties[me].name,
            what()
        );
        state.mix(&line);
        if state.lately.len() == LATELY_MAX {
            state.lately.pop_front();
        }
        state.lately.push_back(line);
    }

    /// Hash of all events: equal for equal runs.
    pub fn trace(&self) -> u64 {
        self.lock().trace
    }

    /// The most recent events, in order.
    pub fn lately(&self) -> Vec<String> {
        self.lock().lately.iter().cloned().collect()
    }

    /// Number of turns so far.
    pub fn count(&self) -> u64 {
        self.lock().turns
    }

    /// The message of a thread of the run that panicked.
    pub fn panicked(&self) -> Option<String> {
        self.lock().panicked.clone()
    }

    /// Lets others run, and returns when the thread is drawn, after at least `turns` turns of others if they
    /// have as many.
    pub fn step_aside(&self, turns: u64) {
        let Some(me) = self.me() else { return };
        let mut state = self.lock();
        state.parties[me].held_until = state.turns + turns;
        state.parties[me].status = Status::Ready;
        self.hand_over(state, me);
    }

    /// Waits until something has happened, for at most `time`.
    pub fn pause(&self, time: Duration) {
        let Some(me) = self.me() else {
            // The thread is not of this run, or the run is over.
            std::thread::sleep(time.min(Duration::from_millis(1)));
            return;
        };
        let ms = time.as_nanos().div_ceil(1_000_000).clamp(1, 1 << 40) as u64;
        let mut state = self.lock();
        if std::mem::take(&mut state.parties[me].active) {
            state.happened += 1;
        }
        let seen = state.happened;
        let until_ms = self.clock.monotonic_ms() + ms;
        state.parties[me].status = Status::Waiting { until_ms, seen };
        self.hand_over(state, me);
    }

    /// Gives the turn to the drawn thread, and waits for the next one.
    fn hand_over<'s>(&'s self, mut state: MutexGuard<'s, State>, me: usize) {
        if !state.over {
            let next = self.next(&mut state);
            state.running = next;
            state.parties[next].turn.notify_all();
            state = self.await_turn(state, me);
        }
        if state.over {
            drop(state);
            // The remaining threads wait by the clock.
            self.clock.advance_ms(10);
            std::thread::sleep(Duration::from_micros(200));
            return;
        }
        state.parties[me].status = Status::Ready;
        let killed = state.parties[me]
            .served_by
            .is_some_and(|daemon| daemon <= state.killed);
        drop(state);
        if killed && !std::thread::panicking() {
            resume_unwind(Box::new(Killed));
        }
    }

    fn await_turn<'s>(&'s self, mut state: MutexGuard<'s, State>, me: usize) -> MutexGuard<'s, State> {
        let turn = Arc::clone(&state.parties[me].turn);
        let mut seen = state.turns;
        while state.running != me && !state.over {
            let (next, waited) = turn
                .wait_timeout(state, STUCK)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            // Only the test's own thread reports it, which ends the run.
            if me == 0 && waited.timed_out() && state.running != me {
                assert!(
                    seen != state.turns,
                    "{} waits for a thread that has no turn; {:?}",
                    state.parties[state.running].name,
                    state.describe()
                );
                seen = state.turns;
            }
        }
        state
    }

    /// Draws the next thread; advances time if none can run.
    fn next(&self, state: &mut State) -> usize {
        loop {
            state.turns += 1;
            assert!(
                state.turns < TURNS_MAX,
                "the run does not end: {:?}",
                state.describe()
            );
            let now_ms = self.clock.monotonic_ms();
            let (mut ready, mut held_until, mut later_ms) = (Vec::new(), u64::MAX, u64::MAX);
            for (index, party) in state.parties.iter().enumerate() {
                if !state.may_go_on(index, party) {
                    continue;
                }
                match party.status {
                    Status::Done => {}
                    Status::Waiting { until_ms, seen } if seen == state.happened && until_ms > now_ms => {
                        later_ms = later_ms.min(until_ms);
                    }
                    _ if party.held_until > state.turns => held_until = held_until.min(party.held_until),
                    _ => ready.push(index),
                }
            }
            if !ready.is_empty() {
                let next = ready[state.rng.below(ready.len() as u64) as usize];
                state.mix(&(next, now_ms));
                return next;
            }
            if held_until < u64::MAX {
                state.turns = held_until;
            } else if later_ms < u64::MAX {
                self.clock.advance_ms(later_ms - now_ms);
            } else {
                panic!("nobody can go on: {:?}", state.describe());
            }
        }
    }

    /// Starts a thread of `process`, which gets its first turn when it is drawn. A bug that the calling
    /// thread has armed is armed in it too.
    ///
    /// # Errors
    /// The system cannot start a thread.
    pub fn spawn(
        self: &Arc<Self>,
        name: &str,
        process: Option<usize>,
        work: Box<dyn FnOnce() + Send>,
    ) -> std::io::Result<()> {
        let me = {
            let mut state = self.lock();
            let index = state.parties.len();
            let name = match process {
                Some(process) => format!("{process}/{name}#{index}"),
                None => format!("{name}#{index}"),
            };
            state.parties.push(Party::new(&name, process));
            state.happened += 1;
            index
        };
        let turns = Arc::clone(self);
        let bug = seeded::current();
        let started = std::thread::Builder::new().name(name.into()).spawn(move || {
            seeded::arm(bug);
            PARTS.with(|parts| parts.borrow_mut().push((turns.number, me)));
            drop(turns.await_turn(turns.lock(), me));
            let ended = catch_unwind(AssertUnwindSafe(work));
            let mut state = turns.lock();
            state.parties[me].status = Status::Done;
            state.happened += 1;
            if let Err(panic) = ended
                && !panic.is::<Killed>()
            {
                let why = format!("{}: {}", state.parties[me].name, words(&*panic));
                state.panicked.get_or_insert(why);
            }
            if !state.over {
                let next = turns.next(&mut state);
                state.running = next;
                state.parties[next].turn.notify_all();
            }
        });
        if started.is_err() {
            self.lock().parties[me].status = Status::Done;
        }
        started.map(drop)
    }

    /// Runs `work` as the daemon of this number does for a client: it is not stopped with the client's
    /// process. Returns `None` if the daemon was killed meanwhile.
    pub fn in_daemon<T>(&self, daemon: u64, work: impl FnOnce() -> T) -> Option<T> {
        let Some(me) = self.me() else {
            return Some(work());
        };
        let before = self.lock().parties[me].served_by.replace(daemon);
        let done = catch_unwind(AssertUnwindSafe(work));
        self.lock().parties[me].served_by = before;
        match done {
            Ok(value) => Some(value),
            Err(panic) if panic.is::<Killed>() => None,
            Err(panic) => resume_unwind(panic),
        }
    }

    /// Kills the daemons up to this number: their threads end where they wait. Returns when they have ended.
    pub fn kill_daemons(&self, upto: u64) {
        self.lock().killed = upto;
        loop {
            self.tell(|| format!("daemons up to {upto} are killed"));
            let left = {
                let state = self.lock();
                let inside = |party: &&Party| {
                    party.status != Status::Done && party.served_by.is_some_and(|daemon| daemon <= upto)
                };
                state.over || state.parties.iter().filter(inside).count() == 0
            };
            if left {
                return;
            }
            self.pause(Duration::from_millis(1));
        }
    }

    /// Stops or continues a process.
    pub fn stop(&self, process: usize, stopped: bool) {
        let mut state = self.lock();
        state.stopped.retain(|other| *other != process);
        if stopped {
            state.stopped.push(process);
        }
    }

    /// Whether a process is stopped.
    pub fn is_stopped(&self, process: usize) -> bool {
        self.lock().stopped.contains(&process)
    }

    /// Stops the process of the calling thread here; returns when it is continued, and before any other
    /// thread of it continues.
    pub fn stop_here(&self, process: usize) {
        let Some(me) = self.me() else { return };
        let mut state = self.lock();
        if state.over {
            return;
        }
        state.stopped.push(process);
        state.amid.push((process, me));
        state.happened += 1;
        state.parties[me].status = Status::Ready;
        self.hand_over(state, me);
        self.lock().amid.retain(|(other, _)| *other != process);
    }
}

impl Party {
    fn new(name: &str, process: Option<usize>) -> Self {
        Self {
            name: name.into(),
            process,
            status: Status::Ready,
            held_until: 0,
            active: false,
            served_by: None,
            turn: Arc::new(Condvar::new()),
        }
    }
}

impl State {
    fn mix(&mut self, what: &impl Hash) {
        let mut hasher = DefaultHasher::new();
        (self.trace, what).hash(&mut hasher);
        self.trace = hasher.finish();
    }

    fn may_go_on(&self, index: usize, party: &Party) -> bool {
        let Some(process) = party.process else {
            return true;
        };
        if party.served_by.is_some() {
            return true;
        }
        let amid = self.amid.iter().find(|(other, _)| *other == process);
        !self.stopped.contains(&process) && amid.is_none_or(|(_, only)| *only == index)
    }

    fn describe(&self) -> Vec<String> {
        let living = self.parties.iter().filter(|party| party.status != Status::Done);
        let mut lines: Vec<_> = living
            .map(|party| {
                format!(
                    "{}: {:?}, served by {:?}",
                    party.name, party.status, party.served_by
                )
            })
            .collect();
        lines.extend(self.lately.iter().rev().take(30).rev().cloned());
        lines
    }
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns")
            .field("number", &self.number)
            .finish_non_exhaustive()
    }
}

fn words(panic: &(dyn Any + Send)) -> String {
    let word = panic.downcast_ref::<&str>().map(|word| (*word).to_owned());
    word.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic".into())
}
