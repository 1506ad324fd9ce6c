//! The whole system under a seed: daemon, sessions with their own threads, messages that are delayed or lost,
//! processes that stop, continue and die, daemons that are killed; in simulated time, one thread at a time.
//! Owns the steps and the comparison with the model; `turns` schedules the threads, `wire` decides the fate
//! of messages.

mod client;
mod history;

pub use history::{Answer, Call, History};

use crate::model::Model;
use crate::ops::{Op, Path};
use crate::rig::{Rig, Shape};
use crate::target;
use crate::wire::{Ambush, Weather};
use crate::workload::{self, Rng, likely_op, random_op};
use client::{Client, Shared, locked};
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// One step of a run. The next step does not wait for the work that a step begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A client begins a call, after its last one has ended.
    Call(usize, Call),
    /// Time passes.
    Idle(u64),
    /// Digests all logs.
    Digest,
    /// Stops a client's process: now, or before this number of stores to its log.
    Stop(usize, u64),
    /// All stopped clients continue.
    GoOn,
    /// A client dies: now, or before this number of stores to its log. Another one takes its place.
    Die(usize, u64),
    /// A client's connection breaks.
    Break(usize),
    /// Kills the daemon; another one starts after this number of milliseconds.
    Restart(u64),
    /// Waits for all calls, and requires that all clients see one tree that the history allows and that the
    /// pool is sound.
    Compare,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(client, call) => write!(f, "{client}: {call}"),
            other => write!(f, "{other:?}"),
        }
    }
}

/// Parameters of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Shape of the pool.
    pub shape: Shape,
    /// Number of clients.
    pub clients: usize,
    /// Seed of turns and losses.
    pub seed: u64,
    /// Fates of messages.
    pub weather: Weather,
}

/// Counts of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls made.
    pub calls: usize,
    /// Calls that began while others were in progress.
    pub together: usize,
    /// Calls in progress whose client died.
    pub orphaned: usize,
    /// Trees compared.
    pub trees: usize,
    /// Processes stopped.
    pub stopped: usize,
    /// Clients that died.
    pub died: usize,
    /// Daemons killed.
    pub restarts: usize,
    /// Messages lost.
    pub lost: u64,
    /// Sessions lost and resumed.
    pub resumed: u64,
    /// Operations that the daemon did.
    pub forwarded: u64,
    /// Turns.
    pub turns: u64,
    /// Simulated seconds.
    pub seconds: u64,
    /// Largest number of states that were possible at once.
    pub states: usize,
    /// Hash of all events, in order.
    pub trace: u64,
    /// Hash of the media's content at the end.
    pub media: u64,
}

impl Stats {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.together += other.together;
        self.orphaned += other.orphaned;
        self.trees += other.trees;
        self.stopped += other.stopped;
        self.died += other.died;
        self.restarts += other.restarts;
        self.lost += other.lost;
        self.resumed += other.resumed;
        self.forwarded += other.forwarded;
        self.turns += other.turns;
        self.seconds += other.seconds;
        self.states = self.states.max(other.states);
    }
}

/// The calls that may run concurrently. Operations on paths look names up one after the other, so only
/// operations whose names stay where they are take effect at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Overlap {
    /// An operation on data, concurrent with others on data.
    Data,
    /// An operation on names of files, concurrent with others on names.
    Names,
    /// An operation that runs alone.
    Alone,
}

fn overlap_of(call: &Call) -> Overlap {
    match call {
        Call::Look(_)
        | Call::Do(
            Op::Write { .. }
            | Op::Truncate { .. }
            | Op::Punch { .. }
            | Op::Zero { .. }
            | Op::Allocate { .. }
            | Op::SetXattr(..)
            | Op::Fsync(_),
        ) => Overlap::Data,
        Call::Do(Op::Create(_) | Op::Unlink(_) | Op::Symlink(_)) => Overlap::Names,
        Call::Do(Op::Rename(from, to) | Op::RenameNoReplace(from, to))
            if is_file_path(from) && is_file_path(to) =>
        {
            Overlap::Names
        }
        Call::Do(_) => Overlap::Alone,
    }
}

fn is_file_path(path: &Path) -> bool {
    workload::file_paths().contains(path)
}

/// Generates random steps.
#[must_use]
pub fn steps(seed: u64, clients: usize, count: usize) -> Vec<Step> {
    let mut rng = Rng::new(seed ^ 0x0d37_ee41);
    let mut model = Model::new();
    let mut steps = Vec::with_capacity(count + count / 8);
    for op in workload::setup() {
        let _ = model.apply(&op);
        steps.push(Step::Call(0, Call::Do(op)));
    }
    steps.push(Step::Compare);
    // The probabilities assume this order, which need not be the real one; it only affects probabilities.
    let mut mood = 0;
    for at in 1..=count {
        if rng.below(8) == 0 {
            mood = rng.below(4);
        }
        let client = rng.below(clients as u64) as usize;
        steps.push(match rng.below(100) {
            0..=2 => Step::Digest,
            3..=5 => Step::Idle(rng.below(400)),
            6 => Step::Idle(rng.below(20_000)),
            7..=8 => Step::Stop(client, rng.below(6)),
            9..=11 => Step::GoOn,
            12 => Step::Die(client, rng.below(6)),
            13 => Step::Break(client),
            14 => Step::Restart(rng.below(300)),
            _ => Step::Call(client, some_call(&mut rng, &mut model, mood)),
        });
        if at % 24 == 0 {
            steps.push(Step::Compare);
        }
    }
    steps.push(Step::Compare);
    steps
}

/// Mostly generates a call that may run concurrently with others.
fn some_call(rng: &mut Rng, model: &mut Model, mood: u64) -> Call {
    let wanted = match mood {
        0 => Overlap::Names,
        1..3 => Overlap::Data,
        _ => return Call::Do(likely_op(rng, model)),
    };
    if wanted == Overlap::Data && rng.below(3) == 0 {
        return Call::Look(rng.pick(&workload::file_paths()).clone());
    }
    for _ in 0..40 {
        let call = Call::Do(random_op(rng));
        if overlap_of(&call) == wanted && history::carry_out(&mut model.clone(), &call) == Answer::Done {
            history::carry_out(model, &call);
            return call;
        }
    }
    Call::Do(likely_op(rng, model))
}

/// State of a run.
struct Stage {
    rig: Arc<Rig>,
    clients: Vec<Client>,
    buried: Vec<Client>,
    stopped: Vec<bool>,
    /// Kind of the calls in progress.
    overlap: Overlap,
    shared: Arc<Mutex<Shared>>,
    stats: Stats,
}

type Outcome<T> = Result<T, String>;

fn say(error: impl fmt::Display) -> String {
    error.to_string()
}

/// The daemon's own thread: its periodic work.
fn work(rig: &Weak<Rig>) {
    loop {
        let Some(rig) = rig.upgrade() else { return };
        let turns = Arc::clone(&rig.turns);
        if turns.is_over() {
            return;
        }
        let daemon = rig.daemon();
        let kernel = rig.kernel_if_any();
        drop(rig);
        let digests = turns.draw(8) == 0;
        turns.in_daemon(daemon, move || {
            if let Some(kernel) = kernel {
                kernel.tick();
                if digests {
                    // The error is noted where it occurs.
                    let _ = kernel.digest_all();
                    kernel.place();
                    let _ = kernel.store().demote(16);
                }
            }
        });
        turns.pause(Duration::from_millis(50));
    }
}

impl Stage {
    fn new(plan: &Plan) -> Outcome<Self> {
        let rig = Arc::new(Rig::scheduled(plan.shape, plan.seed).map_err(say)?);
        rig.set_weather(plan.weather);
        let weak = Arc::downgrade(&rig);
        rig.turns
            .spawn("work", None, Box::new(move || work(&weak)))
            .map_err(say)?;
        let mut stage = Self {
            rig,
            clients: Vec::new(),
            buried: Vec::new(),
            stopped: vec![false; plan.clients],
            overlap: Overlap::Alone,
            shared: Arc::new(Mutex::new(Shared {
                history: History::new(Model::new()),
                wrong: None,
            })),
            stats: Stats::default(),
        };
        for _ in 0..plan.clients {
            let client = stage.join()?;
            stage.clients.push(client);
        }
        Ok(stage)
    }

    fn join(&self) -> Outcome<Client> {
        let (fs, no) = self.rig.mount_no().map_err(say)?;
        Client::start(fs, no, &self.rig, &self.shared)
    }

    /// Lets the others run until `done` returns true, or something is wrong.
    fn until(&mut self, done: impl Fn(&Self) -> bool) -> Outcome<()> {
        loop {
            self.check()?;
            self.bury_the_dead()?;
            if done(self) {
                return Ok(());
            }
            self.rig.turns.pause(Duration::from_millis(500));
        }
    }

    fn check(&self) -> Outcome<()> {
        if let Some(why) = self.rig.turns.panicked() {
            return Err(format!("a thread panicked: {why}"));
        }
        locked(&self.shared).wrong.clone().map_or(Ok(()), Err)
    }

    fn bury_the_dead(&mut self) -> Outcome<()> {
        for index in 0..self.clients.len() {
            if self.rig.is_dead(self.clients[index].no) {
                self.bury(index)?;
            }
        }
        Ok(())
    }

    /// Replaces a client that died.
    fn bury(&mut self, index: usize) -> Outcome<()> {
        let new = {
            let client = &self.clients[index];
            self.stats.orphaned += usize::from(client.is_busy());
            self.stats.died += 1;
            client.close();
            self.rig.die(client.no);
            self.stopped[index] = false;
            self.join()?
        };
        let old = std::mem::replace(&mut self.clients[index], new);
        self.buried.push(old);
        Ok(())
    }

    /// Continues all stopped clients, since waiting for them would not end.
    fn go_on(&mut self) {
        for (index, stopped) in self.stopped.iter_mut().enumerate() {
            *stopped = false;
            self.rig.freeze(self.clients[index].no, false);
        }
    }

    /// Waits until no call is in progress.
    fn rest(&mut self) -> Outcome<()> {
        self.go_on();
        self.rig.spring_no_ambush();
        self.until(|stage| stage.clients.iter().all(|client| !client.is_busy()))
    }

    fn call(&mut self, index: usize, call: &Call) -> Outcome<()> {
        let overlap = overlap_of(call);
        if overlap == Overlap::Alone || overlap != self.overlap {
            self.rest()?;
        }
        if self.stopped[index] || self.rig.is_stopped(self.clients[index].no) {
            if self.clients[index].is_busy() {
                return Ok(());
            }
        } else {
            self.until(|stage| {
                !stage.clients[index].is_busy() || stage.rig.is_stopped(stage.clients[index].no)
            })?;
            if self.clients[index].is_busy() {
                return Ok(());
            }
        }
        self.overlap = overlap;
        self.stats.calls += 1;
        self.stats.together += usize::from(self.clients.iter().any(Client::is_busy));
        let number = locked(&self.shared).history.begin(call.clone());
        self.clients[index].call(number, call.clone());
        self.rig.turns.tell(|| format!("{index} is to {call}"));
        // Turns for which the step proceeds before the next step is drawn.
        let turns = self.rig.turns.draw(40);
        self.rig.turns.step_aside(turns);
        if overlap == Overlap::Alone {
            self.until(|stage| {
                !stage.clients[index].is_busy() || stage.rig.is_stopped(stage.clients[index].no)
            })?;
        }
        Ok(())
    }

    fn perform(&mut self, step: &Step) -> Outcome<()> {
        match step {
            Step::Call(client, call) => self.call(*client, call)?,
            Step::Idle(ms) => {
                let until_ms = self.now_ms() + ms;
                self.until(|stage| stage.now_ms() >= until_ms)?;
            }
            Step::Digest => self.rig.kernel().digest_all().map_err(say)?,
            Step::Stop(client, stores) => {
                let no = self.clients[*client].no;
                self.stats.stopped += 1;
                if *stores == 0 {
                    self.stopped[*client] = true;
                    self.rig.freeze(no, true);
                } else {
                    self.rig.lie_in_wait(no, *stores, Ambush::Stop);
                }
            }
            Step::GoOn => self.go_on(),
            Step::Die(client, stores) => {
                if *stores == 0 {
                    self.bury(*client)?;
                } else {
                    let no = self.clients[*client].no;
                    self.rig.lie_in_wait(no, *stores, Ambush::Die);
                }
            }
            Step::Break(client) => self.rig.seal(self.clients[*client].no),
            Step::Restart(ms) => {
                self.stats.restarts += 1;
                self.rig.kill();
                self.rig.turns.pause(Duration::from_millis(*ms));
                self.rig.restart().map_err(say)?;
            }
            Step::Compare => self.compare()?,
        }
        self.check()
    }

    fn now_ms(&self) -> u64 {
        varve_ipc::Clock::monotonic_ms(&*self.rig.clock)
    }

    fn compare(&mut self) -> Outcome<()> {
        self.rest()?;
        let mut first = None;
        for index in 0..self.clients.len() {
            // The calls of dead clients have ended with them.
            let seen = target::tree(&self.clients[index].fs)
                .map_err(|errno| format!("client {index} cannot read the tree: {errno:?}"))?;
            match &first {
                None => first = Some(seen),
                Some(other) if *other != seen => {
                    let lines = target::difference(other, &seen).join("\n    ");
                    return Err(format!(
                        "client {index} sees another tree than client 0:\n    {lines}"
                    ));
                }
                Some(_) => {}
            }
            self.stats.trees += 1;
        }
        let seen = first.unwrap_or_default();
        let settled = locked(&self.shared).history.settle(|model| model.tree() == seen);
        settled.map_err(|nearest| {
            let lines = target::difference(&nearest.tree(), &seen).join("\n    ");
            format!(
                "the tree is not one that the calls can have led to; from the nearest it differs \
                by:\n    {lines}"
            )
        })?;
        self.rig.check().map_err(say)
    }

    fn finish(mut self) -> Outcome<Stats> {
        for client in self.clients.iter().chain(&self.buried) {
            let counters = client.fs.counters();
            self.stats.resumed += counters.resumed;
            self.stats.forwarded += counters.forwarded;
        }
        self.clients.iter().for_each(Client::close);
        self.stats.lost = self.rig.lost();
        self.stats.turns = self.rig.turns.count();
        self.stats.seconds = self.now_ms() / 1000;
        self.stats.states = locked(&self.shared).history.most;
        self.stats.trace = self.rig.turns.trace();
        self.stats.media = self.rig.world.content_hash();
        self.check()?;
        Ok(self.stats)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.rig.turns.end();
    }
}

/// Runs steps on a new pool.
///
/// # Errors
/// The number of the failed step (from 0), the failure, and the most recent events.
pub fn run(plan: &Plan, steps: &[Step]) -> Result<Stats, (usize, String)> {
    let mut stage = Stage::new(plan).map_err(|why| (0, why))?;
    for (at, step) in steps.iter().enumerate() {
        stage.rig.turns.tell(|| format!("step {at}: {step}"));
        if let Err(why) = stage.perform(step) {
            let lately = stage.rig.turns.lately();
            let shown = std::env::var("VARVE_TRACE").map_or(0, |count| count.parse().unwrap_or(400));
            let lines = lately[lately.len().saturating_sub(shown)..].join("\n    ");
            let lately = if shown > 0 {
                format!("\n  lately:\n    {lines}")
            } else {
                String::new()
            };
            return Err((at, format!("{why}{lately}")));
        }
    }
    stage.finish().map_err(|why| (steps.len(), why))
}

/// Returns the fewest steps found that still fail, within `runs` attempts.
#[must_use]
pub fn shrink(plan: &Plan, steps: &[Step], runs: usize) -> Vec<Step> {
    crate::lockstep::shrink_with(steps, runs, |steps| run(plan, steps).err().map(|(at, _)| at))
}

/// Runs a seed; on failure the message has the seed and the shrunk steps.
///
/// # Errors
/// The message.
pub fn run_seed(plan: &Plan, count: usize) -> Result<Stats, String> {
    let all = steps(plan.seed, plan.clients, count);
    run(plan, &all).map_err(|(at, why)| {
        let few = shrink(plan, &all, 300);
        let now = match run(plan, &few) {
            Err((_, why)) => why,
            Ok(_) => "does not fail each time".into(),
        };
        let list: Vec<_> = few.iter().map(|step| format!("    {step}")).collect();
        format!(
            "VARVE_SEED={} ({plan:?}) failed at step {at}: {why}\n  shrunk to {} steps:\n{}\n  which fail \
            with: {now}",
            plan.seed,
            few.len(),
            list.join("\n"),
        )
    })
}
