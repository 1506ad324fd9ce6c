//! One run: a fresh pool, the processes that share it, and the history that they leave. Owns how they are
//! started, told and ended; what they do is the worker's business, and whether it was right the checker's.

use crate::check::{self, Fault};
use crate::common::{Pool, cannot_mount, run_ok, text_of, varve, wait_until};
use crate::record::{self, Record};
use crate::ways::{Calls, Way};
use crate::{report, worker};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use varve_kernelfs::Status;

/// Digests and moves go on meanwhile; the log alone grows by some 100 MB in ten minutes.
pub const TIERS: [&str; 6] = ["--nvm", "shm:128M", "--ssd", "512M", "--hdd", "0"];
/// Longest time of one operation, however busy the machine is.
const SLOWEST: Duration = Duration::from_secs(30);
/// How long after the time is over the processes may still write their histories.
const LATE: Duration = Duration::from_secs(90);
/// How much earlier a time of change may be than one that was seen before: the clock is coarse, and read
/// before the change is done.
const MTIME_SLACK_NS: u64 = 20_000_000;
/// Faults that are printed whole.
const FAULTS_SHOWN: usize = 12;

/// A worker; killed when dropped.
struct Process(Child);

impl Process {
    fn start(pool: &Pool, way: Way, seed: u64, process: usize, processes: usize, locks: bool) -> Self {
        let program = std::env::current_exe().expect("the test program");
        let mut command = if way == Way::Run {
            let mut run = varve();
            run.args(["run", "--session-after", "0", "--mount"])
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
            locks.to_string(),
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

/// Processes that share a pool. What is dropped goes in this order: the processes are killed before the pool
/// is taken down.
pub struct Run {
    processes: Vec<Process>,
    shared: Calls,
    pool: Pool,
    ways: Vec<Way>,
    lockless: Vec<usize>,
    seed: u64,
    until: Instant,
}

impl Run {
    /// Starts processes of these ways, which wait; `None`, with the reason on standard error, where that
    /// cannot be.
    pub fn start(ways: &[Way], seed: u64) -> Option<Self> {
        Self::start_sparing(ways, seed, &[])
    }

    /// The same, but these processes take none of the kernel's locks: whoever waits for a lock waits for its
    /// holder.
    pub fn start_sparing(ways: &[Way], seed: u64, lockless: &[usize]) -> Option<Self> {
        if !cfg!(all(
            target_arch = "x86_64",
            target_os = "linux",
            target_env = "gnu"
        )) {
            eprintln!("SKIPPED: calls are served in-process on x86-64 with glibc only");
            return None;
        }
        if cannot_mount() {
            return None;
        }
        let pool = Pool::up(&TIERS);
        worker::plant(&pool.mnt(), ways.len() as u8);
        // The mount is in shared mode before a file is opened: what it opened alone shows its own writes
        // while they are under way.
        let shared = Calls::new(Way::Linked, &pool.dir());
        std::thread::sleep(Duration::from_millis(200));
        let mut run = Self {
            processes: Vec::new(),
            shared,
            pool,
            ways: ways.to_vec(),
            lockless: lockless.to_vec(),
            seed,
            until: Instant::now(),
        };
        for (n, way) in ways.iter().enumerate() {
            let locks = !lockless.contains(&n);
            let process = Process::start(&run.pool, *way, seed, n, ways.len(), locks);
            run.processes.push(process);
        }
        for (n, process) in run.processes.iter_mut().enumerate() {
            wait_until("a worker that is ready", || {
                assert!(process.runs(), "VARVE_SEED={seed}: worker {n} ended");
                worker::ready(run.pool.outside(), n as u8).exists()
            });
        }
        Some(run)
    }

    /// Lets them work for so long.
    pub fn go(&mut self, seconds: u64) {
        let outside = self.pool.outside();
        let go = outside.join("going");
        std::fs::write(&go, seconds.to_string()).expect("written");
        std::fs::rename(&go, worker::go(outside)).expect("renamed");
        self.until = Instant::now() + Duration::from_secs(seconds) + LATE;
    }

    /// The pool that they share.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Process id of a worker: `varve run` becomes the program that it starts.
    pub fn pid(&self, process: usize) -> u32 {
        self.processes[process].0.id()
    }

    /// What the daemon says of itself.
    pub fn status(&self) -> Status {
        let text = text_of(varve().args(["status", "--json"]).arg(self.pool.dir()));
        serde_json::from_str(&text).expect("a status")
    }

    /// Waits for the processes' histories, takes the pool down and has `fsck` look at it.
    pub fn finish(mut self) -> History {
        let seed = self.seed;
        for (n, process) in self.processes.iter_mut().enumerate() {
            let way = self.ways[n].name();
            while process.runs() {
                assert!(
                    Instant::now() < self.until,
                    "VARVE_SEED={seed}: worker {n} ({way}) does not end: some call of it hangs"
                );
                std::thread::sleep(Duration::from_millis(20));
            }
            let status = process.0.wait().expect("it has ended");
            assert!(
                status.success(),
                "VARVE_SEED={seed}: worker {n} ({way}) ended with {status}"
            );
        }
        let mut records = Vec::new();
        for n in 0..self.ways.len() as u8 {
            records.extend(record::load(&worker::history(self.pool.outside(), n)).expect("a history"));
        }
        let log = std::fs::read(self.pool.mnt().join("log")).expect("the log");
        self.shared.end();
        self.pool.down();
        run_ok(varve().arg("fsck").arg(self.pool.dir()));
        History {
            records,
            log,
            ways: self.ways,
            lockless: self.lockless,
            seed,
        }
    }
}

/// What processes did, and what the log held in the end.
pub struct History {
    pub records: Vec<Record>,
    log: Vec<u8>,
    pub ways: Vec<Way>,
    /// Those that took no locks.
    lockless: Vec<usize>,
    pub seed: u64,
}

impl History {
    /// What cannot have been.
    pub fn faults(&self) -> Vec<Fault> {
        let (entries, rest) = self.log.as_chunks::<{ worker::ENTRY }>();
        let values: Vec<Option<u64>> = entries.iter().map(|entry| worker::entry_value(entry)).collect();
        let whole: Vec<u64> = values.iter().copied().flatten().collect();
        let mut faults = check::all(
            &self.records,
            &whole,
            worker::ENTRY as u64,
            worker::LOCK_FILE,
            MTIME_SLACK_NS,
        );
        let torn = values.iter().enumerate().filter(|(_, value)| value.is_none());
        let torn = torn.map(|(n, _)| format!("record {n} of the log is torn: {:?}", entries[n]));
        let part = (!rest.is_empty()).then(|| "the log ends in a part of a record".to_owned());
        faults.extend(torn.chain(part).map(|what| Fault {
            what,
            proof: Vec::new(),
        }));
        faults
    }

    /// Prints what was done and how long it took; panics if that cannot have been, or somebody starved.
    pub fn judge(&self) {
        print!("{}", report::table(&self.records, &self.ways, self.seed));
        let (faults, seed) = (self.faults(), self.seed);
        if !faults.is_empty() {
            let shown: String = faults
                .iter()
                .take(FAULTS_SHOWN)
                .map(|fault| report::fault(fault, &self.ways))
                .collect();
            panic!(
                "VARVE_SEED={seed}: {} things that cannot have been; the first:\n{shown}",
                faults.len()
            );
        }
        report::nobody_starved(&self.records, &self.ways, &self.lockless, SLOWEST, seed);
    }
}
