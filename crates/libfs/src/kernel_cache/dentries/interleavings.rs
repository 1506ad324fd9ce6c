//! The kernel's cached answers under a scheduler that tries interleavings: answers go out while sessions
//! come, several at once, look, change something and leave, and the mount is alone again at once. After a
//! newcomer was admitted and has changed a name, the old target is never seen. The daemon's part is a model
//! of `kernelfs/src/ops/sharing.rs` (`admit_changes`, `shared_mode_ack`, `note_exclusive`). Run by `cargo
//! test -p varve-libfs --features shuttle --lib interleavings`.

use super::{DentryTimeouts, Era};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::sync::Arc;
use std::time::Duration;
use varve_format::TimeNs;
use varve_ipc::{Clock, DENTRY_TTL};

const ITERATIONS: usize = 5_000;

/// Time passes while a session waits, and while the kernel does.
#[derive(Default)]
struct Time(AtomicU64);

impl Clock for Time {
    fn now_ns(&self) -> TimeNs {
        0
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn pause(&self, time: Duration) {
        self.0.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
        thread::yield_now();
    }
}

struct World {
    clock: Arc<Time>,
    timeouts: DentryTimeouts,
    era: Era,
    /// Target of a name.
    truth: AtomicU64,
    /// The target that the kernel caches, and until when.
    cached: Mutex<Option<(u64, u64)>>,
    daemon: Mutex<Daemon>,
    bug: Bug,
}

/// The daemon's state for the mount.
#[derive(Default)]
struct Daemon {
    /// Number of sessions beside it.
    others: u64,
    /// Number of newcomers that were announced to it and that it has not acknowledged.
    announced: u64,
    /// Its kernel caches nothing.
    shared: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bug {
    None,
    /// A newcomer changes something as soon as it is welcomed.
    ChangesAtOnce,
    /// The mount is told that it is alone while its acknowledgements are still to come.
    AnswersOutstanding,
}

impl World {
    /// A program of the mount looks the name up.
    fn look(&self) {
        let least = self.truth.load(Ordering::SeqCst);
        let known = *self.cached.lock();
        if let Some((seen, until_ms)) = known
            && self.clock.monotonic_ms() < until_ms
        {
            assert!(seen >= least, "{seen} is cached, it was {least} before");
            return;
        }
        let asked = self.timeouts.asked();
        let seen = self.truth.load(Ordering::SeqCst);
        thread::yield_now();
        let answer = self.timeouts.answer(asked, true);
        thread::yield_now();
        if !answer.ttl().is_zero() {
            let until_ms = self.clock.monotonic_ms() + DENTRY_TTL.as_millis() as u64;
            *self.cached.lock() = Some((seen, until_ms));
        }
        drop(answer);
        self.clock.pause(Duration::from_millis(300));
    }

    /// A session comes, looks, changes the name's target, and leaves.
    fn visit(self: &Arc<Self>) {
        let shared = {
            let mut daemon = self.daemon.lock();
            daemon.others += 1;
            // Messages to the mount are handled in their order.
            let told = !daemon.shared;
            daemon.announced += u64::from(told);
            told.then(|| {
                let shared = self.timeouts.begin_sharing(self.era);
                shared.expect("its session is not over")
            })
        };
        // As the mount answers, on a thread of its own.
        let answer = shared.map(|shared| {
            let world = Arc::clone(self);
            thread::spawn(move || {
                let run_out = world.timeouts.run_out(shared);
                assert!(run_out || world.bug != Bug::None, "nobody said that it is alone");
                thread::yield_now();
                let mut daemon = world.daemon.lock();
                daemon.announced = daemon.announced.saturating_sub(1);
                // It does not report a shared mode that is over.
                daemon.shared |= run_out;
                world.note_exclusive(&mut daemon);
            })
        });
        let _looks = self.truth.load(Ordering::SeqCst);
        while self.bug != Bug::ChangesAtOnce && !self.daemon.lock().shared {
            self.clock.pause(Duration::from_millis(20));
        }
        self.truth.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        {
            let mut daemon = self.daemon.lock();
            daemon.others -= 1;
            self.note_exclusive(&mut daemon);
        }
        if let Some(answer) = answer {
            answer.join().expect("it did not panic");
        }
    }

    fn note_exclusive(&self, daemon: &mut Daemon) {
        let answered = daemon.announced == 0 || self.bug == Bug::AnswersOutstanding;
        if daemon.others == 0 && daemon.shared && answered {
            daemon.shared = false;
            self.timeouts.exclusive(self.era);
        }
    }
}

fn explore(bug: Bug) {
    let run = move || {
        let clock = Arc::new(Time::default());
        let timeouts = DentryTimeouts::new(Arc::clone(&clock) as Arc<dyn Clock>);
        let world = Arc::new(World {
            era: timeouts.begin(false),
            timeouts,
            clock,
            truth: AtomicU64::new(0),
            cached: Mutex::new(None),
            daemon: Mutex::new(Daemon::default()),
            bug,
        });
        let start = |times: usize, work: fn(&Arc<World>)| {
            let world = Arc::clone(&world);
            thread::spawn(move || (0..times).for_each(|_| work(&world)))
        };
        let threads = [
            start(3, |world| world.look()),
            start(3, |world| world.look()),
            start(2, World::visit),
            start(1, World::visit),
        ];
        for thread in threads {
            thread.join().expect("nobody panicked");
        }
    };
    shuttle::check_random(run, ITERATIONS);
    shuttle::check_pct(run, ITERATIONS, 3);
}

#[test]
fn what_newcomers_change_is_never_seen_as_it_was_before() {
    explore(Bug::None);
}

#[test]
#[should_panic(expected = "is cached")]
fn newcomer_that_changes_something_as_soon_as_it_is_welcomed_is_caught() {
    explore(Bug::ChangesAtOnce);
}

#[test]
#[should_panic(expected = "is cached")]
fn mount_that_is_alone_while_answers_are_outstanding_is_caught() {
    explore(Bug::AnswersOutstanding);
}
