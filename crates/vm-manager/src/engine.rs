//! The main loop: surveys, steps the policies, keeps to its processor share, reports, and undoes changes on
//! leaving.
//!
//! Owns the order of these tasks. Refuses to know the policies' internals and the command line.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::actuator::{self, KernelActuator, Tier};
use crate::config::{Hollow, Leave, PolicyFile, TrackerChoice};
use crate::coop::{CoopLink, Request};
use crate::governor::Governor;
use crate::heat::HeatMap;
use crate::ingens::Ingens;
use crate::interfaces::{Action, Actuator, Policy, RegionSurvey, StepReport, SystemView, Tracker};
use crate::machine;
use crate::multiclock::MultiClock;
use crate::probe::Probe;
use crate::processes::{SharedProcesses, descendants};
use crate::survey::{self, Surveyor};
use crate::sys::thread_cpu_time;
use crate::tracker::{Blind, Damon, IdleBitmap, Recorder, Written};
use crate::types::{NodeId, PAGE_BYTES, Pid, ProcId};

/// Time between two rounds of housekeeping: children, ended processes, state of the machine.
const HOUSEKEEPING: Duration = Duration::from_millis(1_000);

/// Address space surveyed between two reads of the clock.
const SURVEY_CHUNK: u64 = 16 << 20;

/// Spreads out the cost of surveys: one round may use the share of the time since the start, where that time
/// counts as at least the first and at most the second of these, in seconds.
const LOOK_AHEAD_S: (f64, f64) = (1.0, 4.0);

/// Most processes whose control groups are read in one round.
const MOST_GROUPS: usize = 64;

/// Consecutive failed steps after which the source of access bits is given up.
const MOST_TRACKER_FAILURES: u32 = 16;

/// The running manager.
pub struct Engine {
    pub(crate) config: PolicyFile,
    pub(crate) probe: Probe,
    pub(crate) processes: SharedProcesses,
    pub(crate) tracker: Box<dyn Tracker>,
    pub(crate) actuator: KernelActuator,
    pub(crate) surveyor: Surveyor,
    pub(crate) ingens: Option<Ingens>,
    pub(crate) multi_clock: Option<MultiClock>,
    pub(crate) governor: Governor,
    pub(crate) totals: StepReport,
    pub(crate) view: SystemView,
    pub(crate) tiers: Vec<Tier>,
    pub(crate) notes: Vec<String>,
    pub(crate) heat: BTreeMap<ProcId, HeatMap>,
    pub(crate) started: Instant,
    pub(crate) kdamond: Option<(u64, u64)>,
    roots: Vec<Pid>,
    cgroup: Option<PathBuf>,
    coop: Option<UnixListener>,
    survey_due: BTreeMap<ProcId, (Instant, u32, u64)>,
    last_pass: BTreeMap<ProcId, u64>,
    tracker_failures: u32,
    surveyed: bool,
    next_housekeeping: Instant,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("config", &self.config)
            .field("notes", &self.notes)
            .finish_non_exhaustive()
    }
}

fn tiers(config: &PolicyFile) -> Vec<Tier> {
    let tier = |nodes: Vec<NodeId>| Tier { nodes };
    if !config.tier.is_empty() {
        return config
            .tier
            .iter()
            .map(|t| tier(t.nodes.iter().map(|n| NodeId(*n)).collect()))
            .collect();
    }
    let (with, without): (Vec<_>, Vec<_>) = machine::nodes().into_iter().partition(|(_, _, cpus)| *cpus);
    let numbers = |list: Vec<(NodeId, u64, bool)>| list.into_iter().map(|(n, ..)| n).collect::<Vec<_>>();
    [with, without]
        .into_iter()
        .map(numbers)
        .filter(|n| !n.is_empty())
        .map(tier)
        .collect()
}

fn choose_tracker(
    config: &PolicyFile,
    probe: &Probe,
    processes: &SharedProcesses,
    notes: &mut Vec<String>,
) -> Box<dyn Tracker> {
    let wanted = |choice| config.tracker == TrackerChoice::Auto || config.tracker == choice;
    if wanted(TrackerChoice::Idle) && (probe.has("idle-bitmap") || config.tracker == TrackerChoice::Idle) {
        match IdleBitmap::open(processes.clone()) {
            Ok(tracker) => return Box::new(tracker),
            Err(e) => notes.push(format!("idle page tracking: {e}")),
        }
    }
    if wanted(TrackerChoice::Damon) && (probe.has("damon") || config.tracker == TrackerChoice::Damon) {
        match Damon::open(config.damon.clone(), processes.clone()) {
            Ok(tracker) => return Box::new(tracker),
            Err(e) => notes.push(format!("DAMON: {e}")),
        }
    }
    if config.tracker == TrackerChoice::Written {
        return Box::new(Written::new(processes.clone(), config.unwritten_is_idle));
    }
    if config.tracker != TrackerChoice::None {
        notes.push("no access bits: huge pages are given by utilisation alone".to_owned());
    }
    Box::new(Blind)
}

impl Engine {
    /// Makes a manager without processes.
    pub fn new(config: PolicyFile) -> Self {
        let probe = Probe::run();
        let processes = SharedProcesses::default();
        let mut notes: Vec<String> = probe
            .features
            .iter()
            .filter(|f| !f.usable)
            .map(|f| format!("{}: {}", f.name, f.note))
            .collect();
        let tracker = choose_tracker(&config, &probe, &processes, &mut notes);
        let tiers = tiers(&config);
        let there: Vec<NodeId> = machine::nodes().into_iter().map(|(n, ..)| n).collect();
        for node in tiers.iter().flat_map(|t| &t.nodes).filter(|n| !there.contains(n)) {
            notes.push(format!("tiers: this machine has no node {} with memory", node.0));
        }
        let mut actuator = KernelActuator::new(processes.clone(), tiers.clone());
        actuator.may_compact = probe.has("compaction");
        actuator.dry_run = config.dry_run;
        let node_pages = |n: &NodeId| {
            machine::nodes()
                .iter()
                .find(|(m, ..)| m == n)
                .map_or(0, |(_, b, _)| b / PAGE_BYTES)
        };
        let limit = |i: usize| {
            config
                .tier
                .get(i)
                .and_then(|t| t.limit_mib)
                .map_or(u64::MAX, |m| (m << 20) / PAGE_BYTES)
        };
        let whole = |t: &Tier| t.nodes.iter().map(node_pages).sum::<u64>();
        let capacity: Vec<u64> = tiers
            .iter()
            .enumerate()
            .map(|(i, t)| whole(t).min(limit(i)))
            .collect();
        let may_evict = config.multi_clock.evict && machine::swap_bytes() > 0;
        let multi_clock = (config.tiering && (tiers.len() > 1 || may_evict) && !capacity.is_empty())
            .then(|| MultiClock::new(config.multi_clock.clone(), &capacity));
        let ingens = (config.huge_pages && probe.has("collapse")).then(|| Ingens::new(config.ingens.clone()));
        let most = config
            .multi_clock
            .scan_batch_pages
            .max(config.ingens.scan_batch_pages);
        let now = Instant::now();
        Self {
            governor: Governor::new(config.scan_cpu_share, config.work_cpu_share, most),
            surveyor: Surveyor::new(processes.clone(), probe.has("pagemap-scan")),
            config,
            probe,
            processes,
            tracker,
            actuator,
            ingens,
            multi_clock,
            totals: StepReport::default(),
            view: SystemView::default(),
            tiers,
            notes,
            heat: BTreeMap::new(),
            started: now,
            kdamond: None,
            roots: Vec::new(),
            cgroup: None,
            coop: None,
            survey_due: BTreeMap::new(),
            last_pass: BTreeMap::new(),
            tracker_failures: 0,
            surveyed: false,
            next_housekeeping: now,
        }
    }

    /// Returns the available and missing features of the kernel.
    pub const fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Returns the tiering policy, if there is more than one tier.
    pub const fn multi_clock(&self) -> Option<&MultiClock> {
        self.multi_clock.as_ref()
    }

    /// Returns the huge page policy, if the kernel supports it.
    pub const fn ingens(&self) -> Option<&Ingens> {
        self.ingens.as_ref()
    }

    /// Manages a process (and its children, if configured).
    ///
    /// # Errors
    /// The kernel's errno, see [`Processes::add`](crate::processes::Processes::add).
    pub fn attach(&mut self, pid: Pid) -> io::Result<ProcId> {
        let id = self.processes.borrow_mut().add(pid)?;
        self.roots.push(pid);
        Ok(id)
    }

    /// Manages all processes of a control group, also those that join it later.
    ///
    /// # Errors
    /// `path` is not a control group.
    pub fn attach_cgroup(&mut self, path: &Path) -> io::Result<()> {
        crate::processes::cgroup_pids(path)?;
        self.cgroup = Some(path.to_owned());
        Ok(())
    }

    /// Listens for cooperating processes on a socket at `path`.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(&mut self, path: &Path) -> io::Result<()> {
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        self.coop = Some(listener);
        Ok(())
    }

    /// Writes every observed touch to `out`.
    ///
    /// # Errors
    /// The start of the trace cannot be written.
    pub fn record(&mut self, out: impl io::Write + 'static) -> io::Result<()> {
        let inner = std::mem::replace(&mut self.tracker, Box::new(Blind));
        self.tracker = Box::new(Recorder::new(inner, out)?);
        Ok(())
    }

    /// Whether a process has connected to cooperate.
    pub fn cooperates(&self, id: ProcId) -> bool {
        self.processes.borrow().get(id).is_some_and(|p| p.coop.is_some())
    }

    /// Carries out actions at once, outside of any policy; returns the outcome of each.
    pub fn carry_out(&mut self, actions: &[Action]) -> Vec<crate::interfaces::Outcome> {
        let mut outcomes = Vec::new();
        self.actuator.apply(actions, &mut outcomes);
        outcomes
    }

    /// Whether no process is left to manage.
    pub fn idle(&self) -> bool {
        self.processes.borrow().is_empty() && self.cgroup.is_none()
    }

    /// Runs one round; returns how long to rest before the next.
    pub fn tick(&mut self) -> Duration {
        let began = Instant::now();
        let (cpu, work) = (thread_cpu_time(), actuator::busy(self.actuator.cost()));
        if began >= self.next_housekeeping {
            self.housekeeping();
            self.next_housekeeping = began + HOUSEKEEPING;
        }
        self.survey();
        if self.config.hollow == Hollow::Always
            || (self.config.hollow == Hollow::Short
                && self.ingens.as_ref().is_some_and(Ingens::short_of_memory))
        {
            self.look_for_hollow();
        }
        // The first round only surveys: the set-up of DAMON costs as much again and can wait for the second.
        if std::mem::replace(&mut self.surveyed, true) {
            self.step();
        }
        let worked = actuator::busy(self.actuator.cost()) - work;
        let scanned = (thread_cpu_time() - cpu).saturating_sub(worked);
        let period = Duration::from_millis(self.config.multi_clock.period_ms);
        let rest = self.governor.account(scanned, worked, period);
        rest.max(self.until_due()).max(Duration::from_millis(10))
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn until_due(&self) -> Duration {
        let policies = [
            self.ingens.as_ref().map(Policy::next_due_ms),
            self.multi_clock.as_ref().map(Policy::next_due_ms),
        ];
        let next = policies.into_iter().flatten().min().unwrap_or(u64::MAX);
        Duration::from_millis(next.saturating_sub(self.now_ms())).min(Duration::from_millis(500))
    }

    fn policies(&mut self) -> impl Iterator<Item = &mut dyn Policy> {
        let ingens = self.ingens.as_mut().map(|p| p as &mut dyn Policy);
        ingens
            .into_iter()
            .chain(self.multi_clock.as_mut().map(|p| p as &mut dyn Policy))
    }

    fn step(&mut self) {
        let (now, budget) = (self.now_ms(), self.governor.budget_pages());
        let mut sum = StepReport::default();
        let mut failed = None;
        let ingens = self.ingens.as_mut().map(|p| p as &mut dyn Policy);
        let multi = self.multi_clock.as_mut().map(|p| p as &mut dyn Policy);
        for policy in ingens.into_iter().chain(multi) {
            policy.set_scan_budget(budget);
            match policy.step(now, self.tracker.as_mut(), &mut self.actuator) {
                Ok(report) => sum.add(&report),
                Err(e) => failed = Some(e.to_string()),
            }
        }
        self.totals.add(&sum);
        self.judge_tracker(failed);
    }

    /// Counts failures of the tracker: a single one is reported; after [`MOST_TRACKER_FAILURES`] in a row the
    /// tracker is given up.
    fn judge_tracker(&mut self, failed: Option<String>) {
        let Some(e) = failed else {
            self.tracker_failures = 0;
            return;
        };
        self.tracker_failures += 1;
        let mut notes = vec![e];
        if self.tracker_failures == MOST_TRACKER_FAILURES {
            notes.push(format!(
                "access bits failed {MOST_TRACKER_FAILURES} times in a row: going on without"
            ));
            self.tracker = Box::new(Blind);
        }
        for note in notes {
            if !self.notes.contains(&note) {
                tracing::warn!("{note}");
                self.notes.push(note);
            }
        }
    }

    /// Surveys the processes that are due. An unchanged process is surveyed less and less often, down to an
    /// eighth of the rate.
    fn survey(&mut self) {
        let now = Instant::now();
        let due = |id: &ProcId| self.survey_due.get(id).is_none_or(|(at, ..)| *at <= now);
        let ids: Vec<ProcId> = self
            .processes
            .borrow()
            .iter()
            .map(|(id, _)| id)
            .filter(due)
            .collect();
        let share =
            look_allowance(self.config.scan_cpu_share, self.started.elapsed()) / ids.len().max(1) as u32;
        for id in ids {
            let (_, slow, print) = self.survey_due.get(&id).copied().unwrap_or((now, 1, 0));
            let mut found: Vec<RegionSurvey> = Vec::new();
            let walked = walk_for(share, self.config.survey_bytes, thread_cpu_time, |bytes| {
                self.surveyor.walk(id, bytes, |s| found.push(*s))
            });
            let Ok(done) = walked else {
                self.survey_due.insert(id, (now + HOUSEKEEPING, 1, 0));
                continue;
            };
            let mut sum = print;
            for survey in &found {
                sum = sum.rotate_left(5).wrapping_add(fingerprint(survey));
                if let Some(p) = self.ingens.as_mut() {
                    p.survey(survey, &mut self.actuator);
                }
                if let Some(p) = self.multi_clock.as_mut() {
                    p.survey(survey, &mut self.actuator);
                }
            }
            let next = if done {
                let same = self.last_pass.insert(id, sum) == Some(sum);
                let slow = if same { (slow * 2).min(8) } else { 1 };
                (
                    now + Duration::from_millis(self.config.survey_period_ms) * slow,
                    slow,
                    0,
                )
            } else {
                (now, slow, sum)
            };
            self.survey_due.insert(id, next);
        }
    }

    fn look_for_hollow(&mut self) {
        // Frequently used huge pages are skipped unless memory is short. After a full pass the walk starts
        // again.
        let Some(ingens) = self.ingens.as_mut() else {
            return;
        };
        let short = ingens.short_of_memory();
        let processes = self.processes.borrow();
        for (id, process) in processes.iter() {
            let frequent_at = self.config.ingens.frequent_at;
            let candidates: Vec<_> = ingens
                .regions(id)
                .filter(|(_, r)| r.huge && (short || !r.frequently_accessed(frequent_at)) && !r.inspected)
                .map(|(i, _)| i)
                .take(self.config.hollow_batch as usize)
                .collect();
            if candidates.is_empty() {
                ingens.restart_inspection(id);
            }
            for region in candidates {
                if let Ok(used) = survey::contents(process.pid, region) {
                    ingens.inspected(id, region, &used);
                }
            }
        }
    }

    fn housekeeping(&mut self) {
        for gone in self.processes.borrow_mut().reap() {
            self.surveyor.forget(gone);
            self.survey_due.remove(&gone);
            self.last_pass.remove(&gone);
            self.heat.remove(&gone);
            if let Some(p) = self.ingens.as_mut() {
                p.forget(gone);
            }
            if let Some(p) = self.multi_clock.as_mut() {
                p.forget(gone);
            }
        }
        self.find_members();
        self.accept_cooperation();
        let pids: Vec<Pid> = self
            .processes
            .borrow()
            .iter()
            .map(|(_, p)| p.pid)
            .take(MOST_GROUPS)
            .collect();
        self.view = machine::view(&pids);
        let view = self.view;
        self.policies().for_each(|p| p.system(&view));
        self.take_heat();
    }

    fn find_members(&mut self) {
        let mut members = Vec::new();
        if self.config.follow_children {
            members.extend(self.roots.iter().flat_map(|pid| descendants(*pid)));
        }
        if let Some(path) = &self.cgroup {
            members.extend(crate::processes::cgroup_pids(path).unwrap_or_default());
        }
        let me = std::process::id() as i32;
        for pid in members.into_iter().filter(|p| p.0 != me) {
            if let Err(e) = self.processes.borrow_mut().add(pid) {
                // The process has ended, or belongs to another user; each reason is reported once.
                let note = format!("cannot manage some processes: {e}");
                if e.raw_os_error() != Some(libc::ESRCH)
                    && e.kind() != io::ErrorKind::NotFound
                    && !self.notes.contains(&note)
                {
                    self.notes.push(note);
                }
            }
        }
    }

    fn accept_cooperation(&mut self) {
        let Some(listener) = &self.coop else { return };
        while let Ok((stream, _)) = listener.accept() {
            let peer =
                rustix::net::sockopt::socket_peercred(&stream).map(|c| Pid(c.pid.as_raw_nonzero().get()));
            let _ = stream.set_nonblocking(false);
            let (Ok(pid), Ok(mut link)) = (peer, CoopLink::accept(stream)) else {
                continue;
            };
            // Only managed processes may cooperate.
            let mut processes = self.processes.borrow_mut();
            let Some(process) = processes.find(pid).and_then(|id| processes.get_mut(id)) else {
                continue;
            };
            if self.config.tracker == TrackerChoice::Written
                && let Err(e) = link.ask(Request::TrackWrites, 0..0)
            {
                self.notes.push(format!("write tracking in {pid}: {e}"));
            }
            process.coop = Some(link);
        }
    }

    /// Restores memory as configured and releases all processes. Settings of the kernel (DAMON, write
    /// tracking) are always restored. Returns the numbers of pages moved back and of huge pages split.
    pub fn leave(&mut self) -> (u64, u64) {
        let ids: Vec<ProcId> = self.processes.borrow().iter().map(|(id, _)| id).collect();
        let (mut moved, mut split) = (0, 0);
        for id in ids {
            let actions: Vec<Action> = match self.config.leave {
                Leave::Keep => Vec::new(),
                Leave::Restore => self.policies().flat_map(|p| p.undo(id)).collect(),
            };
            let mut left = actions;
            // Pages in use are busy for a moment: retry, a bounded number of times.
            for _ in 0..20 {
                let mut outcomes = Vec::new();
                self.actuator.apply(&left, &mut outcomes);
                let mut busy = Vec::new();
                for (action, outcome) in left.iter().zip(outcomes) {
                    let done = u64::from(outcome == crate::interfaces::Outcome::Done);
                    match action {
                        Action::Move { .. } => moved += done,
                        _ => split += done,
                    }
                    if outcome == crate::interfaces::Outcome::Busy {
                        busy.push(*action);
                    }
                }
                left = busy;
                if left.is_empty() || self.config.dry_run {
                    break;
                }
            }
            let mut processes = self.processes.borrow_mut();
            if let Some(link) = processes.get_mut(id).and_then(|p| p.coop.as_mut()) {
                let _ = link.ask(Request::UntrackWrites, 0..0);
            }
            processes.remove(id);
        }
        self.tracker = Box::new(Blind);
        (moved, split)
    }
}

/// Returns the processor time of one round of surveys. A manager that has just started gets little, so that
/// its first survey of a large program is not a load peak.
fn look_allowance(share: f64, uptime: Duration) -> Duration {
    let (least, most) = LOOK_AHEAD_S;
    Duration::from_secs_f64(share * uptime.as_secs_f64().clamp(least, most))
}

/// Walks one process chunk by chunk until a pass is complete, `bytes` are walked or `allowance` of processor
/// time is used up. At least one chunk is walked, so that every process makes progress. Returns whether a
/// pass was completed.
fn walk_for(
    allowance: Duration,
    bytes: u64,
    clock: impl Fn() -> Duration,
    mut walk: impl FnMut(u64) -> io::Result<(u64, bool)>,
) -> io::Result<bool> {
    let (began, mut left) = (clock(), bytes);
    loop {
        let (walked, done) = walk(left.min(SURVEY_CHUNK))?;
        left = left.saturating_sub(walked.max(1));
        if done || left == 0 || clock().saturating_sub(began) >= allowance {
            return Ok(done);
        }
    }
}

fn fingerprint(s: &RegionSurvey) -> u64 {
    let bits = s.used.0.iter().fold(s.region.0, |h, w| {
        (h ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
    });
    bits ^ u64::from(s.huge) << 1 ^ u64::from(s.unevictable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn look_takes_its_share_of_a_second_at_first_and_of_a_few_later() {
        let ms = |uptime: f64| look_allowance(0.005, Duration::from_secs_f64(uptime)).as_secs_f64() * 1e3;
        for (uptime, least, most) in [(0.0, 4.99, 5.01), (2.0, 9.99, 10.01), (1e5, 19.99, 20.01)] {
            let got = ms(uptime);
            assert!(got > least && got < most, "{uptime}: {got}");
        }
    }

    #[test]
    fn walk_stops_at_its_allowance_and_never_before_one_bit() {
        let clock = std::cell::Cell::new(Duration::ZERO);
        let walk = |allowance_ms: u64, bytes: u64, whole: u64| {
            let walked = std::cell::Cell::new(0);
            let bit = |bytes: u64| {
                clock.set(clock.get() + Duration::from_millis(2));
                walked.set(walked.get() + bytes);
                Ok((bytes, walked.get() >= whole))
            };
            let done = walk_for(Duration::from_millis(allowance_ms), bytes, || clock.get(), bit);
            (walked.get() / SURVEY_CHUNK, done.is_ok_and(|d| d))
        };
        let all = 100 * SURVEY_CHUNK;
        assert_eq!(walk(0, all, all), (1, false), "one bit in any case");
        assert_eq!(walk(5, all, all), (3, false), "until the allowance is used up");
        assert_eq!(
            walk(1_000, 4 * SURVEY_CHUNK, all),
            (4, false),
            "no more than asked"
        );
        assert_eq!(
            walk(1_000, all, 2 * SURVEY_CHUNK),
            (2, true),
            "until the pass is complete"
        );
        let failed = walk_for(
            Duration::ZERO,
            1,
            || clock.get(),
            |_| Err(io::Error::from_raw_os_error(3)),
        );
        assert!(failed.is_err());
    }

    #[test]
    fn tracker_is_given_up_only_after_failing_time_after_time() {
        let config = PolicyFile {
            tracker: TrackerChoice::None,
            ..PolicyFile::default()
        };
        let mut engine = Engine::new(config);
        engine.tracker = Box::new(Written::new(SharedProcesses::default(), false));
        let name = |e: &Engine| e.tracker.info().name;
        let broken = || Some("broken".to_owned());
        for _ in 0..3 {
            (1..MOST_TRACKER_FAILURES).for_each(|_| engine.judge_tracker(broken()));
            engine.judge_tracker(None);
            assert_eq!(name(&engine), "written");
        }
        (0..MOST_TRACKER_FAILURES).for_each(|_| engine.judge_tracker(broken()));
        assert_eq!(name(&engine), "none");
        assert_eq!(
            engine.notes.iter().filter(|n| *n == "broken").count(),
            1,
            "said once"
        );
    }
}
