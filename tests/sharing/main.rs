//! Processes that share names and files by all ways in at once: the plain mount, `varve run`, and linked programs. Every operation is recorded
//! with its times outside of the pool; the history is then checked: no stale read, no lost update, no two holders, nobody starves.
//!
//! `VARVE_SEED` chooses the operations, `VARVE_SHARING_SECS` how long.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod check;
mod record;
mod report;
mod sys;
mod ways;
mod worker;

use common::{Pool, cannot_mount, run_ok, varve, wait_until};
use record::Record;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use ways::{Calls, WAYS, Way};

/// Digests and moves go on meanwhile; the log alone grows by some 100 MB in ten minutes.
const TIERS: [&str; 6] = ["--nvm", "shm:128M", "--ssd", "512M", "--hdd", "0"];
/// Longest time of one operation, however busy the machine is.
const SLOWEST: Duration = Duration::from_secs(30);
/// How long after the time is over the processes may still write their histories.
const LATE: Duration = Duration::from_secs(90);
/// How much earlier a time of change may be than one that was seen before: the clock is coarse, and read before the change is done.
const MTIME_SLACK_NS: u64 = 20_000_000;
/// Faults that are printed whole.
const FAULTS_SHOWN: usize = 12;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}"))
    })
}

/// How long each test runs.
fn seconds() -> u64 {
    number("VARVE_SHARING_SECS", 12)
}

/// The process that the others start; does nothing in an ordinary run of the tests.
#[test]
fn worker() {
    worker::main();
}

#[test]
fn two_processes_of_each_pair_of_ways_see_each_other_at_once() {
    let seconds = seconds();
    for pair in [
        [Way::Mount, Way::Run],
        [Way::Run, Way::Linked],
        [Way::Linked, Way::Mount],
    ] {
        share(&pair, seconds.div_ceil(3));
    }
}

#[test]
fn eight_processes_of_all_ways_see_each_other_at_once() {
    let seconds = seconds();
    let ways: Vec<Way> = WAYS.into_iter().cycle().take(8).collect();
    share(&ways, seconds);
}

/// A worker; killed when dropped.
struct Process(Child);

impl Process {
    fn start(pool: &Pool, way: Way, seed: u64, process: usize, processes: usize) -> Self {
        let program = std::env::current_exe().expect("the test program");
        let mut command = if way == Way::Run {
            let mut run = varve();
            run.args(["run", "--mount"])
                .arg(pool.mnt())
                .arg("--")
                .arg(program);
            run
        } else {
            Command::new(program)
        };
        let words = [
            way.name().to_owned(),
            pool.dir().display().to_string(),
            pool.outside().display().to_string(),
            seed.to_string(),
            process.to_string(),
            processes.to_string(),
        ];
        let child = command
            .args(["worker", "--exact", "--nocapture", "--test-threads=1"])
            .env(worker::ENV, words.join("\n"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("a worker starts");
        Self(child)
    }

    fn runs(&mut self) -> bool {
        self.0.try_wait().is_ok_and(|status| status.is_none())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Lets processes of these ways share a fresh pool, and checks what they recorded.
fn share(ways: &[Way], seconds: u64) {
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
        return;
    }
    if cannot_mount() {
        return;
    }
    let seed = number("VARVE_SEED", 1);
    let mut pool = Pool::up(&TIERS);
    worker::plant(&pool.mnt(), ways.len() as u8);
    // The mount is in company before a file is opened: what it opened alone shows its own writes while they are under way.
    let company = Calls::new(Way::Linked, &pool.dir());
    std::thread::sleep(Duration::from_millis(200));
    let mut processes: Vec<Process> = Vec::new();
    for (n, way) in ways.iter().enumerate() {
        processes.push(Process::start(&pool, *way, seed, n, ways.len()));
    }
    for (n, process) in processes.iter_mut().enumerate() {
        wait_until("a worker that is ready", || {
            assert!(process.runs(), "VARVE_SEED={seed}: worker {n} ended");
            worker::ready(pool.outside(), n as u8).exists()
        });
    }
    let go = pool.outside().join("going");
    std::fs::write(&go, seconds.to_string()).unwrap();
    std::fs::rename(&go, worker::go(pool.outside())).unwrap();
    let until = Instant::now() + Duration::from_secs(seconds) + LATE;
    for (n, process) in processes.iter_mut().enumerate() {
        while process.runs() {
            assert!(
                Instant::now() < until,
                "VARVE_SEED={seed}: worker {n} ({}) does not end: some call of it hangs",
                ways[n].name()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let status = process.0.wait().expect("it has ended");
        assert!(
            status.success(),
            "VARVE_SEED={seed}: worker {n} ({}) ended with {status}",
            ways[n].name()
        );
    }
    drop(processes);
    let mut records = Vec::new();
    for n in 0..ways.len() as u8 {
        records.extend(record::load(&worker::history(pool.outside(), n)).expect("a history"));
    }
    let log = std::fs::read(pool.mnt().join("log")).expect("the log");
    company.end();
    judge(&records, &log, ways, seed);
    pool.down();
    run_ok(varve().arg("fsck").arg(pool.dir()));
}

fn judge(records: &[Record], log: &[u8], ways: &[Way], seed: u64) {
    print!("{}", report::table(records, ways, seed));
    assert_eq!(
        log.len() % worker::ENTRY,
        0,
        "VARVE_SEED={seed}: a part of a record"
    );
    let values: Vec<u64> = log
        .chunks_exact(worker::ENTRY)
        .enumerate()
        .map(|(n, bytes)| {
            worker::entry_value(bytes)
                .unwrap_or_else(|| panic!("VARVE_SEED={seed}: record {n} of the log is torn: {bytes:?}"))
        })
        .collect();
    let faults = check::all(
        records,
        &values,
        worker::ENTRY as u64,
        worker::LOCK_FILE,
        MTIME_SLACK_NS,
    );
    if !faults.is_empty() {
        let shown: String = faults
            .iter()
            .take(FAULTS_SHOWN)
            .map(|fault| report::fault(fault, ways))
            .collect();
        panic!(
            "VARVE_SEED={seed}: {} things that cannot have been; the first:\n{shown}",
            faults.len()
        );
    }
    report::nobody_starved(records, ways, SLOWEST, seed);
}
