//! Processes that are stopped (SIGSTOP) amid a run for longer than a lease may be kept, and continued. Owns
//! who is stopped and when, and what the others must not notice; the history is the checker's business, and
//! nothing is excused in it.

use crate::record::{Kind, Record};
use crate::run::{History, Run};
use crate::ways::Way;
use crate::worker::now;
use crate::{seconds, seed};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;
use varve_kernelfs::{Config, Status};

/// Two of each way.
const WAYS: [Way; 6] = [
    Way::Mount,
    Way::Run,
    Way::Linked,
    Way::Mount,
    Way::Run,
    Way::Linked,
];
/// How long they work until somebody is stopped.
const BEFORE: Duration = Duration::from_secs(2);
/// A round for each so many seconds that the tests are to take.
const ROUND_SECONDS: u64 = 12;
/// How long programs are stopped: long enough for two that are found out one after the other.
const PROGRAMS_STOPPED: Duration = Duration::from_secs(5);
/// How long the mount's process is stopped.
const MOUNT_STOPPED: Duration = Duration::from_secs(3);
/// How long those who were continued may take until they are seen at work again.
const BACK: Duration = Duration::from_secs(3);
/// Least operations that others together begin and end while somebody is stopped and sealed; hundreds are
/// usual.
const LEAST_MEANWHILE: usize = 20;
/// Least operations of each one that was stopped, after it.
const LEAST_AFTER: usize = 20;

/// Stopped processes; they go on when this is dropped. Each must be a child that nobody has waited for, or
/// the mount of a pool that is up, so that its number stays its own.
pub struct Stopped(Vec<Pid>);

impl Stopped {
    /// Stops them.
    pub fn new(pids: &[u32]) -> Self {
        let mut stopped = Self(Vec::new());
        for pid in pids {
            let pid = Pid::from_raw(*pid as i32).expect("a pid");
            kill_process(pid, Signal::STOP).expect("it stops");
            stopped.0.push(pid);
        }
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

/// Longest time that somebody who is not stopped may be kept waiting: a lease time until the one who is
/// stopped is sealed, and the grace time on top of it for a second one, the digests and a busy machine.
pub fn bound() -> Duration {
    let config = Config::default();
    Duration::from_millis(config.lease_ms + config.grace_ms)
}

/// Sessions of processes.
fn sessions(status: &Status, pids: &[u32]) -> BTreeSet<(u32, u64)> {
    let of = status
        .sessions
        .iter()
        .filter(|session| pids.contains(&session.pid));
    of.map(|session| (session.pid, session.id)).collect()
}

/// Stops processes amid a run, and looks at the sessions: those that they had must be sealed meanwhile, and
/// each has a new one afterwards. Answers from when until when they were stopped.
fn interrupt(run: &Run, pids: &[u32], pause: Duration) -> Range<u64> {
    std::thread::sleep(BEFORE);
    let before = run.status();
    let from = now();
    let stopped = Stopped::new(pids);
    std::thread::sleep(pause);
    let had = sessions(&before, pids);
    let kept = |status: &Status| had.intersection(&sessions(status, pids)).count();
    let mut amid = run.status();
    // On time, unless the machine is busy.
    while kept(&amid) > 0 && now() - from < (pause + bound()).as_nanos() as u64 {
        std::thread::sleep(Duration::from_millis(100));
        amid = run.status();
    }
    let until = now();
    drop(stopped);
    std::thread::sleep(BACK);
    let after = run.status();
    let has = sessions(&after, pids);
    println!(
        "sessions of those who were stopped (pid, number): {had:?}, then {has:?}; seals {} to {} to {}",
        before.leases.seals, amid.leases.seals, after.leases.seals
    );
    assert_eq!(had.len(), pids.len(), "each has one session");
    assert_eq!(kept(&amid), 0, "not sealed while stopped: {had:?}");
    assert!(amid.leases.seals >= before.leases.seals + pids.len() as u64);
    for pid in pids {
        assert!(has.iter().any(|(of, _)| of == pid), "{pid} is not back: {has:?}");
    }
    assert_eq!(after.latched, None);
    assert_eq!(after.digest.refused, 0, "operations were refused");
    from..until
}

/// A run, and when processes were stopped in it.
struct Interrupted {
    history: History,
    pauses: Vec<Range<u64>>,
}

/// Runs, and stops `victims` again and again for `pause`. Processes that must go on meanwhile are `lockless`:
/// a lock's holder may be stopped, or wait for who is.
fn interrupted(
    victims: impl Fn(&Run) -> Vec<u32>,
    pause: Duration,
    lockless: &[usize],
) -> Option<Interrupted> {
    let mut run = Run::start_sparing(&WAYS, seed(), lockless)?;
    let pids = victims(&run);
    let rounds = (seconds() / ROUND_SECONDS).max(1);
    let round = BEFORE + pause + BACK;
    // With a second for the questions to the daemon.
    run.go(rounds * (round.as_secs() + 1));
    let pauses = (0..rounds).map(|_| interrupt(&run, &pids, pause)).collect();
    let history = run.finish();
    Some(Interrupted { history, pauses })
}

impl Interrupted {
    /// The history must hold as if nobody had been stopped; prints who did how much meanwhile.
    fn judge(&self) {
        self.history.judge();
        for n in 0..self.history.ways.len() {
            let meanwhile = |pause: &Range<u64>| self.within(&[n], pause).count();
            let meanwhile: Vec<usize> = self.pauses.iter().map(meanwhile).collect();
            println!("process {n}: {meanwhile:?} operations while others (or it) were stopped");
        }
    }

    /// Operations of some processes that began and ended in a time.
    fn within<'h>(&'h self, of: &'h [usize], time: &Range<u64>) -> impl Iterator<Item = &'h Record> {
        let Range { start, end } = *time;
        let own = move |record: &&Record| of.contains(&usize::from(record.process));
        let records = self.history.records.iter().filter(own);
        records.filter(move |record| record.start >= start && record.end <= end)
    }

    /// Nobody of `others` was kept waiting for longer than `bound` by an operation that `counts`.
    fn nobody_waited(&self, others: &[usize], bound: Duration, counts: impl Fn(&Record) -> bool) {
        let all = self
            .within(others, &(0..u64::MAX))
            .filter(|record| counts(record));
        let slowest = all.max_by_key(|record| record.end - record.start).expect("some");
        let took = Duration::from_nanos(slowest.end - slowest.start);
        println!("the longest operation of {others:?}: {took:?}, {slowest:?}");
        assert!(took < bound, "{slowest:?} took {took:?}, bound {bound:?}");
    }

    /// When the stopped were sealed, `others` together got on.
    fn others_went_on(&self, others: &[usize]) {
        for pause in &self.pauses {
            let sealed = pause.start + Config::default().lease_ms * 1_000_000..pause.end;
            let did = self.within(others, &sealed).count();
            assert!(
                did >= LEAST_MEANWHILE,
                "processes {others:?} did {did} operations while others were stopped"
            );
        }
    }

    /// Who was stopped did something after each time.
    fn went_on(&self, stopped: &[usize]) {
        let ends = self.pauses.iter().skip(1).map(|pause| pause.start);
        for (pause, end) in self.pauses.iter().zip(ends.chain([u64::MAX])) {
            for n in stopped {
                let after = self.within(&[*n], &(pause.end..end)).count();
                assert!(
                    after >= LEAST_AFTER,
                    "process {n} did {after} operations after a stop"
                );
            }
        }
    }
}

/// Whether an operation of a served process needs the mount: locks and maps are the kernel's, and a file that
/// is open keeps a descriptor of the mount when its last name goes.
fn needs_the_mount(record: &Record) -> bool {
    let needs = matches!(
        record.kind,
        Kind::MapAdd | Kind::MapRead | Kind::MapSync | Kind::Plant
    );
    needs || !waits_for_no_lock(record)
}

/// Whether an operation waits for nobody but the file system: a lock's holder may be stopped.
fn waits_for_no_lock(record: &Record) -> bool {
    !matches!(record.kind, Kind::Flock | Kind::Posix | Kind::Ofd)
}

#[test]
fn stopped_clients_block_nobody_beyond_their_leases_and_go_on_when_continued() {
    let victims = [1, 2];
    let pids = |run: &Run| victims.map(|n| run.pid(n)).to_vec();
    let Some(run) = interrupted(pids, PROGRAMS_STOPPED, &[5]) else {
        return;
    };
    run.judge();
    run.nobody_waited(&[0, 3, 4, 5], bound(), waits_for_no_lock);
    run.others_went_on(&[0, 3, 4, 5]);
    run.went_on(&victims);
}

#[test]
fn stopped_mount_blocks_no_client_beyond_its_leases_and_goes_on_when_continued() {
    let pids = |run: &Run| vec![run.pool().child_pid("mount").expect("a mount")];
    let (mounted, served, linked) = ([0, 3], [1, 4], [2, 5]);
    let Some(run) = interrupted(pids, MOUNT_STOPPED, &linked) else {
        return;
    };
    run.judge();
    run.nobody_waited(&linked, bound(), |_| true);
    run.others_went_on(&linked);
    // What needs the mount may wait until it goes on; nothing else may.
    run.nobody_waited(&served, bound(), |record| !needs_the_mount(record));
    run.nobody_waited(&served, bound() + MOUNT_STOPPED, waits_for_no_lock);
    run.went_on(&mounted);
    run.went_on(&served);
}
