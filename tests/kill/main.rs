//! Real processes killed with SIGKILL, and power cuts, under ten writers whose every call is recorded outside
//! of the pool.
//!
//! `VARVE_KILL_ROUNDS` and `VARVE_POWER_ROUNDS` say how many of each (8 and 3 if not given; longer runs are
//! in docs/results/kill.md); `VARVE_SEED` chooses calls and moments.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod in_place;
mod ledger;
mod verify;
mod worker;

use calls::State;
use common::{Pool, alive, cannot_mount, kill, run_ok, varve, wait_until};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use varve_testkit::workload::Rng;
use verify::{Promise, Story, Tally, judge};
use worker::{Way, Worker};

/// Small, so that data comes to every tier.
const TIERS: [&str; 6] = ["--nvm", "48M", "--ssd", "64M", "--hdd", "256M"];
/// Writers on the mount.
const MOUNTED: Range<u32> = 0..8;
/// Writers in a linked program.
const LINKED: Range<u32> = 8..10;
/// Calls that each writer must have made before a round's crash, and must make after it where it should go
/// on.
const CALLS_LEAST: u64 = 12;

/// Killed processes that live longer hang in the kernel.
const PATIENCE: Duration = Duration::from_secs(3);

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Crash {
    Daemon,
    /// Again while it recovers.
    DaemonTwice,
    Linked,
    Mount,
    Everything,
    Power,
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is no number: {text}"))
    })
}

/// The process that the others start; does nothing in an ordinary run of the tests.
#[test]
fn worker() {
    worker::main();
}

#[test]
fn nothing_acknowledged_is_lost_whatever_is_killed() {
    if cannot_mount() {
        return;
    }
    let rounds = number("VARVE_KILL_ROUNDS", 8);
    let seed = number("VARVE_SEED", 1);
    let mut rng = Rng::new(seed);
    let mut run = Run::new(seed);
    // The daemon, a client, everything, in turn; a client is the mount or a linked program.
    let mut crashes = Vec::new();
    while (crashes.len() as u64) < rounds {
        let daemon = if rng.below(3) == 0 {
            Crash::DaemonTwice
        } else {
            Crash::Daemon
        };
        let client = if crashes.len() % 2 == 0 {
            Crash::Linked
        } else {
            Crash::Mount
        };
        crashes.extend([daemon, client, Crash::Everything]);
    }
    crashes.truncate(rounds as usize);
    for crash in crashes {
        run.round(crash, &mut rng);
    }
    run.end();
}

#[test]
fn fsynced_calls_and_a_causal_prefix_survive_power_cuts() {
    if cannot_mount() {
        return;
    }
    let rounds = number("VARVE_POWER_ROUNDS", 3);
    let seed = number("VARVE_SEED", 1);
    let mut rng = Rng::new(seed ^ 0xff);
    let mut run = Run::new(seed);
    for _ in 0..rounds {
        run.round(Crash::Power, &mut rng);
    }
    run.end();
}

/// A pool and what its writers' directories hold.
struct Run {
    // Workers end before the pool does.
    mounted: Option<Worker>,
    linked: Option<Worker>,
    pool: Pool,
    seed: u64,
    round: u32,
    states: Vec<State>,
    tally: Tally,
    began: Instant,
}

impl Run {
    fn new(seed: u64) -> Self {
        let pool = Pool::up(&TIERS);
        for writer in 0..LINKED.end {
            std::fs::create_dir(pool.mnt().join(worker::dir_name(writer))).expect("a directory");
        }
        run_ok(std::process::Command::new("sync").arg("-f").arg(pool.mnt()));
        Self {
            mounted: None,
            linked: None,
            pool,
            seed,
            round: 0,
            states: vec![State::default(); LINKED.end as usize],
            tally: Tally::default(),
            began: Instant::now(),
        }
    }

    fn returned(&self, writer: u32) -> u64 {
        ledger::returned(&ledger::path(self.pool.outside(), writer, self.round))
    }

    /// Waits until each of the writers has made some more calls; they must be able to.
    fn progress(&self, writers: Range<u32>) {
        let goals: Vec<u64> = writers
            .clone()
            .map(|writer| self.returned(writer) + CALLS_LEAST)
            .collect();
        for (writer, goal) in writers.zip(goals) {
            let mut ended = None;
            wait_until(
                &format!(
                    "seed {}, round {}: progress of writer {writer}",
                    self.seed, self.round
                ),
                || {
                    ended = self.ended(writer);
                    ended.is_some() || self.returned(writer) >= goal
                },
            );
            assert!(
                ended.is_none() || self.returned(writer) >= goal,
                "seed {}, round {}: writer {writer} ended at call {}: its last one returned {ended:?}",
                self.seed,
                self.round,
                self.returned(writer)
            );
        }
    }

    /// With which errno a writer's last call returned, when its process has gone by itself: it stops at an
    /// answer that is wrong.
    fn ended(&self, writer: u32) -> Option<u16> {
        let worker = if MOUNTED.contains(&writer) {
            &self.mounted
        } else {
            &self.linked
        };
        if worker.as_ref().is_some_and(|worker| alive(worker.pid())) {
            return None;
        }
        ledger::read(&ledger::path(self.pool.outside(), writer, self.round))
            .last()?
            .ended
            .map(|(_, errno)| errno)
    }

    fn start_workers(&mut self) {
        let start = |way, writers| {
            Worker::start(
                way,
                &self.pool.dir(),
                self.pool.outside(),
                self.seed,
                self.round,
                writers,
            )
        };
        let (mounted, linked) = (start(Way::Mount, MOUNTED), start(Way::Linked, LINKED));
        (self.mounted, self.linked) = (Some(mounted), Some(linked));
    }

    /// Writers, a crash at a random moment, a restart, and a verdict.
    fn round(&mut self, crash: Crash, rng: &mut Rng) {
        self.round += 1;
        self.start_workers();
        self.progress(0..LINKED.end);
        std::thread::sleep(Duration::from_millis(rng.below(600)));
        match crash {
            Crash::Daemon => self.kill_daemon(),
            Crash::DaemonTwice => {
                self.kill_daemon();
                // Amid its recovery, or soon after it.
                let longest = if rng.below(2) == 0 { 30 } else { 250 };
                std::thread::sleep(Duration::from_millis(rng.below(longest)));
                // It listens when it has recovered; until then nobody does.
                self.tally.recovering +=
                    u64::from(UnixStream::connect(self.pool.dir().join("sock")).is_err());
                self.kill_daemon();
            }
            Crash::Linked => {
                kill(self.linked.as_ref().expect("it runs").pid());
                self.linked.take().expect("it runs").reap();
                self.progress(MOUNTED);
            }
            Crash::Mount => self.kill_mount(),
            Crash::Everything | Crash::Power => self.kill_everything(crash == Crash::Power, rng),
        }
        if matches!(crash, Crash::Daemon | Crash::DaemonTwice) {
            self.progress(0..LINKED.end);
        }
        if let Some(worker) = self.mounted.take() {
            worker.stop();
        }
        if let Some(worker) = self.linked.take() {
            worker.stop();
        }
        self.verdict(crash);
    }

    fn child(&self, what: &str) -> u32 {
        let mut pid = None;
        wait_until("a child of up", || {
            pid = self.pool.child_pid(what);
            pid.is_some()
        });
        pid.expect("a pid")
    }

    fn kill_daemon(&self) {
        let daemon = self.child("serve");
        kill(daemon);
        wait_until("the end of the daemon", || !alive(daemon));
        wait_until("a new daemon", || {
            self.pool.child_pid("serve").is_some_and(|pid| pid != daemon)
        });
    }

    fn kill_mount(&mut self) {
        let shim = self.child("mount");
        kill(shim);
        wait_until("the end of the mount", || !alive(shim));
        self.progress(LINKED);
        // Its writers get an error and end by themselves; they are waited for when they are stopped.
        wait_until("a new mount", || {
            self.pool.child_pid("mount").is_some_and(|pid| pid != shim) && self.answers()
        });
    }

    /// Whether the mount is there and answers.
    fn answers(&self) -> bool {
        self.pool.mnt().join(worker::dir_name(0)).is_dir()
    }

    fn kill_everything(&mut self, power: bool, rng: &mut Rng) {
        let mut victims = vec![
            self.child("serve"),
            self.child("mount"),
            self.mounted.as_ref().expect("it runs").pid(),
            self.linked.as_ref().expect("it runs").pid(),
        ];
        // `up` is among them, at any place: the others are its children and would be started again.
        victims.push(self.pool.up_pid());
        while !victims.is_empty() {
            let victim = victims.swap_remove(rng.below(victims.len() as u64) as usize);
            kill(victim);
            if rng.below(3) == 0 {
                std::thread::sleep(Duration::from_micros(rng.below(20_000)));
            }
        }
        // One that `up` started again in the meantime, too. A mount that was to drop a page which nobody
        // fills any more ends when what is left of it is taken away, as the next `up` does.
        let started = Instant::now();
        wait_until("the end of everything", || {
            let left = self.pool.processes();
            left.iter().for_each(|&pid| kill(pid));
            if started.elapsed() > PATIENCE {
                let force = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
                let _ = rustix::mount::unmount(self.pool.mnt(), force);
            }
            left.is_empty()
        });
        self.pool.kill_all();
        if power {
            let live = self.pool.live_dirs();
            assert!(!live.is_empty(), "the live copies are where they are looked for");
            for dir in live {
                std::fs::remove_dir_all(dir).expect("the live copies go away");
            }
        }
        self.pool.fsck_clean();
        self.pool.start();
        // Not before: one that waits in the kernel for the killed mount ends when the next start takes that
        // away.
        self.mounted.take().expect("it ran").reap();
        self.linked.take().expect("it ran").reap();
    }

    fn verdict(&mut self, crash: Crash) {
        let stories: Vec<Story> = (0..LINKED.end)
            .map(|writer| Story {
                writer,
                mounted: MOUNTED.contains(&writer),
                before: self.states[writer as usize].clone(),
                calls: (self.seed, self.round),
                entries: ledger::read(&ledger::path(self.pool.outside(), writer, self.round)),
                found: worker::files_of(&self.pool.mnt().join(worker::dir_name(writer))),
            })
            .collect();
        let (mounted, linked) = stories.split_at(MOUNTED.end as usize);
        let (of_mounted, of_linked) = match crash {
            Crash::Daemon | Crash::DaemonTwice => (Promise::Undisturbed, Promise::Undisturbed),
            Crash::Linked => (Promise::Undisturbed, Promise::Returned),
            Crash::Mount => (Promise::Returned, Promise::Undisturbed),
            Crash::Everything => (Promise::Returned, Promise::Returned),
            Crash::Power => (Promise::Synced, Promise::Synced),
        };
        let mut tally = Tally::default();
        for (group, promise) in [(mounted, of_mounted), (linked, of_linked)] {
            match judge(group, promise) {
                Ok(some) => tally += some,
                Err(what) => self.fail(crash, &what, group),
            }
        }
        self.pool.fsck_clean();
        println!(
            "round {} ({crash:?}): {} calls returned, {} promised, {} lost as a power cut may; fsck clean; \
            {:.0} s",
            self.round,
            tally.returned,
            tally.promised,
            tally.lost,
            self.began.elapsed().as_secs_f64()
        );
        self.tally += tally;
        self.states = stories.into_iter().map(|story| State::of(story.found)).collect();
        for writer in 0..LINKED.end {
            let _ = std::fs::remove_file(ledger::path(self.pool.outside(), writer, self.round));
        }
    }

    /// Tells what is wrong, and which of the files look otherwise without the kernel between.
    fn fail(&self, crash: Crash, what: &str, stories: &[Story]) -> ! {
        eprintln!(
            "VARVE_SEED={}, round {} ({crash:?}): {what}",
            self.seed, self.round
        );
        for story in stories {
            let Some(files) = worker::files_through_library(&self.pool.dir(), story.writer) else {
                continue;
            };
            for (name, body) in &story.found {
                if files.get(name) != Some(body) {
                    eprintln!(
                        "writer {}: {name} is another one through the library",
                        story.writer
                    );
                }
            }
        }
        panic!(
            "VARVE_SEED={}, round {} ({crash:?}): see above",
            self.seed, self.round
        );
    }

    /// Stops in order: still the same, and every byte's checksum right.
    fn end(mut self) {
        run_ok(varve().arg("scrub").arg(self.pool.dir()));
        self.pool.down();
        self.pool.fsck_clean();
        self.pool.start();
        for (writer, state) in (0..LINKED.end).zip(&self.states) {
            let found = worker::files_of(&self.pool.mnt().join(worker::dir_name(writer)));
            assert!(
                found == state.files,
                "writer {writer}: another directory after a stop in order"
            );
        }
        println!(
            "VARVE_SEED={}: {} rounds, {} calls returned, {} promised, {} lost as power cuts may; {} \
            daemons killed amid their recovery",
            self.seed,
            self.round,
            self.tally.returned,
            self.tally.promised,
            self.tally.lost,
            self.tally.recovering
        );
        self.pool.down();
    }
}
