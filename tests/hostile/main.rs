//! Clients that hold a session and keep no rule, beside one that does. What must not come of them is looked
//! at from outside: what the honest one sees at every step, what only it may read, whether the daemon lives,
//! and what it uses up.
//!
//! `VARVE_SEED=n cargo test --test hostile` repeats the choices; `VARVE_HOSTILE_SECS=n` goes on for so long
//! (an ordinary run counts acts); `VARVE_HOSTILE_SAMPLE_SECS=n` prints every so often what the daemon uses,
//! and what of.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod attacker;
mod client;
mod samples;

use attacker::{ACTS, Attacker, FORBIDDEN, Job, SO_FAR};
use common::{run_ok, varve, wait_until};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use varve_format::InodeKey;
use varve_libfs::{Fs, FsOptions, SocketConnector};
use varve_testkit::lockstep::both;
use varve_testkit::lookup;
use varve_testkit::model::Model;
use varve_testkit::ops::{Op, pattern};
use varve_testkit::target;
use varve_testkit::workload::{Rng, likely_op};

/// Tells a test process that it is an attacker: a word a line.
const ENV: &str = "VARVE_HOSTILE_JOB";
/// An ordinary user and group.
const NOBODY: u32 = 65_534;
/// Longest time of an attacker in an ordinary run: a slow machine does fewer acts.
const SHORT_SECS: u64 = 20;
/// Acts of an attacker in an ordinary run.
const SHORT_ACTS: u64 = 220;

/// How long a lease is kept from others, as the settings below say.
const LEASE_MS: u64 = 150;
/// Processor time of the daemon for an act, on average.
const COST_MOST: Duration = Duration::from_millis(20);

/// Impatient, so that clients that do not answer are done with soon; and bounds on what one of them may take.
const SETTINGS: &str = "
lease_ms = 150
wait_ms = 80000
grace_ms = 500
sessions_max = 64
credits_max_blocks = 256
idle_digest_ms = 50
users = 'all'
user_bytes = 1048576
";

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}"))
    })
}

fn root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A daemon in a process of its own.
struct Daemon {
    child: Child,
    said: PathBuf,
}

impl Daemon {
    fn start(pool: &Path, said: PathBuf) -> Self {
        let log = std::fs::File::options()
            .create(true)
            .append(true)
            .open(&said)
            .unwrap();
        let mut child = varve()
            .arg("serve")
            .arg(pool)
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert!(
            line.contains("serving"),
            "the daemon did not start: {}",
            text(&said)
        );
        Self { child, said }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Resident bytes, descriptors, threads.
    fn uses(&self) -> Uses {
        let proc = PathBuf::from(format!("/proc/{}", self.pid()));
        let status = std::fs::read_to_string(proc.join("status")).unwrap();
        let value = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        Uses {
            // Without what is mapped of files: the pool's memory and the logs.
            memory_kib: value("RssAnon:"),
            descriptors: std::fs::read_dir(proc.join("fd")).unwrap().count(),
            threads: value("Threads:"),
        }
    }

    /// Ticks of processor time.
    fn ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }

    fn stop(mut self) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(
            status.success(),
            "the daemon ended with {status}: {}",
            text(&self.said)
        );
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Debug, Clone, Copy)]
struct Uses {
    memory_kib: u64,
    descriptors: usize,
    threads: u64,
}

/// The end of what the daemon said.
fn last_lines(path: &Path) -> String {
    let text = text(path);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}

fn text(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// The client that keeps the rules: one operation after the other, on a model and on the pool.
struct Honest {
    fs: Fs,
    model: Model,
    rng: Rng,
    ops: u64,
    trees: u64,
    /// How long each of its operations took.
    took: Vec<Duration>,
}

const SECRET: u8 = 99;

impl Honest {
    fn new(socket: &Path, seed: u64) -> Self {
        let connector = SocketConnector {
            path: socket.to_owned(),
        };
        let fs = Fs::mount(Arc::new(connector), FsOptions::default()).expect("a session");
        let mut honest = Self {
            fs,
            model: Model::new(),
            rng: Rng::new(seed),
            ops: 0,
            trees: 0,
            took: Vec::new(),
        };
        // Readable for all who know its number, in a directory that nobody else may enter.
        let secret = vec!["vault", "secret"];
        for op in [
            Op::Mkdir(vec!["common"]),
            Op::Chmod(vec!["common"], 0o1777),
            Op::Mkdir(vec!["vault"]),
            Op::Chmod(vec!["vault"], 0o700),
            Op::Create(secret.clone()),
            Op::Chmod(secret.clone(), 0o666),
            Op::Write {
                path: secret,
                offset: 0,
                len: 5000,
                seed: SECRET,
            },
            Op::Fsync(vec![]),
        ] {
            assert!(honest.op(&op).expect("nobody disturbs yet"));
        }
        honest
    }

    fn op(&mut self, op: &Op) -> Result<bool, String> {
        let began = Instant::now();
        let done = both(&mut self.model, &self.fs, op);
        self.took.push(began.elapsed());
        self.ops += 1;
        done
    }

    fn slowest(&self) -> Duration {
        self.took.iter().copied().max().unwrap_or_default()
    }

    /// What so many hundredths of the operations took at most.
    fn took_at_most(&self, hundredths: usize) -> Duration {
        let mut took = self.took.clone();
        took.sort_unstable();
        took[(took.len() - 1) * hundredths / 100]
    }

    fn step(&mut self) -> Result<(), String> {
        let op = likely_op(&mut self.rng, &mut self.model.clone());
        self.op(&op)
            .map_err(|why| format!("{why} (operation {}, slowest {:?})", self.ops, self.slowest()))?;
        if self.ops.is_multiple_of(25) {
            self.compare()?;
        }
        Ok(())
    }

    fn compare(&mut self) -> Result<(), String> {
        let mut want = self.model.tree();
        want.retain(|path, _| path != "/common");
        let got =
            target::tree_without(&self.fs, &["common"]).map_err(|errno| format!("the tree: {errno:?}"))?;
        self.trees += 1;
        if want == got {
            return Ok(());
        }
        Err(target::difference(&want, &got).join("\n"))
    }

    fn key(&self, path: &[&str]) -> InodeKey {
        lookup::find(&self.fs, path).expect("it is there").key
    }
}

/// A process that attacks.
struct Hostile {
    child: Child,
    output: Option<std::thread::JoinHandle<String>>,
    /// Acts until now, about.
    acts: Arc<AtomicU64>,
}

impl Hostile {
    fn start(job: &Job) -> Self {
        let key = |key: &InodeKey| format!("{}/{}", key.ino.0, key.generation.0);
        let victims: Vec<_> = job.victims.iter().map(key).collect();
        let words = [
            job.seed.to_string(),
            job.owner.to_string(),
            job.acts.to_string(),
            job.secs.to_string(),
            job.socket.display().to_string(),
            key(&job.common),
            victims.join(","),
        ];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["attack", "--exact", "--nocapture", "--test-threads=1"])
            .env(ENV, words.join("\n"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let acts = Arc::new(AtomicU64::new(0));
        let output = std::thread::spawn({
            let acts = Arc::clone(&acts);
            move || {
                let mut text = String::new();
                for line in out.lines().map_while(Result::ok) {
                    let so_far = line.split_once(SO_FAR).and_then(|(_, n)| n.trim().parse().ok());
                    match so_far {
                        Some(count) => acts.store(count, Ordering::Relaxed),
                        None => text.push_str(&format!("{line}\n")),
                    }
                }
                text
            }
        });
        Self {
            child,
            output: Some(output),
            acts,
        }
    }

    /// What it said, when it has ended well.
    fn said(mut self) -> String {
        let output = self.output.take().expect("asked once").join().unwrap();
        assert!(
            self.child.wait().unwrap().success(),
            "an attacker failed: {output}"
        );
        output
    }

    fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn parse_key(text: &str) -> InodeKey {
    let (ino, generation) = text.split_once('/').unwrap();
    InodeKey::new(ino.parse().unwrap(), generation.parse().unwrap())
}

/// The secret's bytes, as much as is compared.
fn secret() -> Vec<u8> {
    pattern(SECRET, 100, 64)
}

/// The process that the others start; does nothing in an ordinary run of the tests.
#[test]
fn attack() {
    let Ok(job) = std::env::var(ENV) else { return };
    let words: Vec<_> = job.split('\n').collect();
    let [seed, owner, acts, secs, socket, common, victims] = words.as_slice() else {
        panic!("{job}");
    };
    let job = Job {
        seed: seed.parse().unwrap(),
        owner: owner.parse().unwrap(),
        acts: acts.parse().unwrap(),
        secs: secs.parse().unwrap(),
        socket: PathBuf::from(socket),
        common: parse_key(common),
        victims: victims.split(',').map(parse_key).collect(),
        secret: secret(),
    };
    if !job.owner {
        // SAFETY: plain calls on this process' own credentials; all its threads change with them (the C
        // library sees to that).
        let dropped = unsafe {
            libc::setgroups(0, std::ptr::null()) == 0
                && libc::setresgid(NOBODY, NOBODY, NOBODY) == 0
                && libc::setresuid(NOBODY, NOBODY, NOBODY) == 0
        };
        assert!(dropped, "cannot become an ordinary user");
    }
    Attacker::new(job).run();
}

/// What is attacked.
struct Place {
    // What a daemon that was killed left in memory goes before the directory does.
    _live: common::LiveDirs,
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = common::memory_dir();
        let place = Self {
            _live: common::LiveDirs::of(&dir.path().join("pool")),
            dir,
        };
        common::make_pool(&place.pool(), "96M", "96M", SETTINGS);
        for dir in [place.dir.path().to_owned(), place.pool()] {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o711)).unwrap();
        }
        place
    }

    fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    fn socket(&self) -> PathBuf {
        self.pool().join("sock")
    }

    fn said(&self) -> PathBuf {
        self.dir.path().join("said")
    }
}

/// Acts of all of them until now, about.
fn acts_of(hostile: &[Hostile]) -> u64 {
    hostile.iter().map(|one| one.acts.load(Ordering::Relaxed)).sum()
}

/// Attackers beside an honest client; kills of the daemon amid it.
fn attack_with(owners: &[bool], kills: u64) {
    let seed = number("VARVE_SEED", 1);
    let long = number("VARVE_HOSTILE_SECS", 0);
    let place = Place::new();
    let mut daemon = Daemon::start(&place.pool(), place.said());
    let mut honest = Honest::new(&place.socket(), seed);
    for path in [vec!["d"], vec!["e"]] {
        assert!(honest.op(&Op::Mkdir(path)).unwrap());
    }
    assert!(honest.op(&Op::Create(vec!["f"])).unwrap());
    honest.compare().unwrap();
    let before = daemon.uses();
    let victims = [
        vec!["vault", "secret"],
        vec!["vault"],
        vec!["d"],
        vec!["e"],
        vec!["f"],
    ];
    let job = |index: usize, owner: bool| Job {
        seed: seed * 1000 + index as u64,
        owner,
        acts: if long > 0 { u64::MAX } else { SHORT_ACTS },
        secs: if long > 0 { long } else { SHORT_SECS },
        socket: place.socket(),
        common: honest.key(&["common"]),
        victims: victims.iter().map(|path| honest.key(path)).collect(),
        secret: secret(),
    };
    let jobs: Vec<_> = owners
        .iter()
        .enumerate()
        .map(|(index, owner)| job(index, *owner))
        .collect();
    let mut hostile: Vec<_> = jobs.iter().map(Hostile::start).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let worker = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                honest.step()?;
            }
            Ok::<_, String>(honest)
        })
    };
    let began = Instant::now();
    let secs = if long > 0 { long } else { SHORT_SECS };
    let mut most = before;
    let mut killed = 0;
    // Of the daemons that were killed, and of this one before the attack.
    let (mut ticks, mut ticks_before) = (0, daemon.ticks());
    let mut samples = samples::Samples::every(number("VARVE_HOSTILE_SAMPLE_SECS", 0));
    while hostile.iter_mut().any(Hostile::runs) {
        assert!(
            daemon.lives(),
            "seed {seed}: the daemon died: {}",
            text(&place.said())
        );
        if worker.is_finished() {
            let why = worker.join().map(|done| done.err());
            panic!("seed {seed}: {why:?}\n{}", last_lines(&place.said()));
        }
        samples.take(daemon.pid(), ticks + daemon.ticks() - ticks_before, || {
            acts_of(&hostile)
        });
        let uses = daemon.uses();
        most.memory_kib = most.memory_kib.max(uses.memory_kib);
        most.descriptors = most.descriptors.max(uses.descriptors);
        most.threads = most.threads.max(uses.threads);
        let due =
            began.elapsed().as_secs_f64() > (killed + 1) as f64 * secs as f64 / (2 * (kills + 1)) as f64;
        if killed < kills && due {
            killed += 1;
            ticks += daemon.ticks() - ticks_before;
            daemon.kill();
            daemon = Daemon::start(&place.pool(), place.said());
            ticks_before = 0;
        }
        assert!(
            began.elapsed() < Duration::from_secs(secs + 120),
            "an attacker hangs: seed {seed}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    ticks += daemon.ticks() - ticks_before;
    let attacked = began.elapsed();
    let acts_done = acts_of(&hostile);
    let mut acts = String::new();
    for (attacker, job) in hostile.into_iter().zip(&jobs) {
        let output = attacker.said();
        assert!(!output.contains(FORBIDDEN), "{output}");
        let line = output.lines().find(|line| line.contains(ACTS)).unwrap_or("");
        let _ = writeln!(
            acts,
            "  {}: {line}",
            if job.owner { "owner" } else { "ordinary user" }
        );
        assert!(line.contains("log operations"), "{output}");
    }
    // Nobody disturbs any more: what they took is given back, and nobody is busy.
    let ended = |uses: Uses| uses.descriptors <= before.descriptors + 4 && uses.threads <= before.threads + 8;
    let since = Instant::now();
    while !ended(daemon.uses()) {
        assert!(
            since.elapsed() < Duration::from_secs(90),
            "the attackers' sessions do not end: {before:?}, now {:?}\n{}\n{}",
            daemon.uses(),
            String::from_utf8_lossy(&varve().arg("status").arg(place.pool()).output().unwrap().stdout),
            last_lines(&place.said())
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    stop.store(true, Ordering::Relaxed);
    let mut honest: Honest = worker
        .join()
        .expect("no panic")
        .unwrap_or_else(|why| panic!("seed {seed}: {why}\n{}", last_lines(&place.said())));
    honest.compare().unwrap();
    let made = honest.fs.readdir(honest.key(&["common"]), 0, 64).unwrap().len();
    assert!(made > 0, "nothing that the attackers logged has counted");
    wait_until("an idle daemon", || {
        let ticks = daemon.ticks();
        std::thread::sleep(Duration::from_millis(500));
        // Less than a third of a processor.
        daemon.ticks() - ticks < 17
    });
    let after = daemon.uses();
    samples.last(daemon.pid(), ticks, acts_done);
    assert!(
        most.memory_kib < before.memory_kib + 256 * 1024 && after.memory_kib < before.memory_kib + 128 * 1024,
        "memory: {before:?}, at most {most:?}, {after:?}"
    );
    // 64 sessions of a few descriptors, and connections that never became one.
    assert!(
        most.descriptors < before.descriptors + 640 && most.threads < before.threads + 640,
        "descriptors, threads: {before:?}, at most {most:?}"
    );
    // Each of its operations was right; that there were any is looked at too.
    assert!(
        honest.ops > 20,
        "the honest client got nowhere: {} operations",
        honest.ops
    );
    // Who keeps the rules waits for a lease that is not given back now and then, not all the time, and none
    // of the attackers' acts costs much.
    let lease = Duration::from_millis(LEASE_MS);
    assert!(
        honest.took_at_most(50) < lease && honest.took_at_most(99) < 20 * lease,
        "half of the honest client's operations took {:?}, 99 % {:?}",
        honest.took_at_most(50),
        honest.took_at_most(99)
    );
    let spent = Duration::from_secs(ticks) / rustix::param::clock_ticks_per_second() as u32;
    assert!(
        spent < Duration::from_secs(2) + COST_MOST * acts_done as u32,
        "{acts_done} acts cost the daemon {spent:?}"
    );
    println!(
        "seed {seed}, {killed} kills, honest: {} operations, {} trees, half within {:?}, 90 % {:?}, 99 % \
        {:?}, slowest {:?}; attackers have made {made} names; daemon before {before:?}, at most {most:?}, \
        after {after:?}; {:.1} s of processor in {:.1} s",
        honest.ops,
        honest.trees,
        honest.took_at_most(50),
        honest.took_at_most(90),
        honest.took_at_most(99),
        honest.slowest(),
        spent.as_secs_f64(),
        attacked.as_secs_f64()
    );
    print!("{acts}");
    honest.fs.unmount().expect("an orderly end");
    drop(honest);
    daemon.stop();
    let said = text(&place.said());
    summary(&said);
    assert!(!said.contains("panicked"), "{said}");
    run_ok(varve().arg("fsck").arg(place.pool()));
}

/// What the daemon logged, by what it said.
fn summary(said: &str) {
    let mut kinds = BTreeMap::<String, u64>::new();
    for line in said.lines() {
        let plain: String = line
            .split_whitespace()
            .skip(1)
            .map(|word| {
                if word.chars().any(|c| c.is_ascii_digit()) {
                    "#"
                } else {
                    word
                }
            })
            .collect::<Vec<_>>()
            .join(" ");
        *kinds.entry(plain).or_default() += 1;
    }
    println!("the daemon logged {} lines:", said.lines().count());
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    for (kind, count) in kinds.iter().take(25) {
        println!("  {count:>6} {}", kind.chars().take(140).collect::<String>());
    }
}

#[test]
fn ordinary_users_do_no_harm_whatever_they_do_with_their_sessions() {
    if !root() {
        eprintln!("SKIPPED: needs root, to be an ordinary user beside the owner of the pool");
        return;
    }
    attack_with(&[false, false, false], 0);
}

#[test]
fn owners_do_no_harm_beyond_their_rights_and_a_killed_daemon_starts_on_what_they_left() {
    attack_with(&[true, false][..if root() { 2 } else { 1 }], 2);
}
