//! What a kernel believes under a scheduler that tries interleavings: answers go out while sessions come,
//! several at once, and leave. What a newcomer changes after it was let in is never seen as it was before.
//! Run by `cargo test -p varve-libfs --features shuttle --lib interleavings`.

use super::{DentryTimeouts, Era};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use shuttle::thread;
use std::sync::Arc;
use std::time::Duration;
use varve_format::TimeNs;
use varve_ipc::{Clock, SOLO_TTL};

const ITERATIONS: usize = 5_000;

/// Time passes when somebody waits, and when the kernel does.
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
    /// What a name stands for.
    truth: AtomicU64,
    /// What the kernel believes that it stands for, and until when.
    believed: Mutex<Option<(u64, u64)>>,
    /// Sessions beside the mount, as the daemon has it.
    others: Mutex<u64>,
}

impl World {
    /// A program of the mount looks at the name.
    fn look(&self) {
        let least = self.truth.load(Ordering::SeqCst);
        let known = *self.believed.lock();
        if let Some((seen, until_ms)) = known
            && self.clock.monotonic_ms() < until_ms
        {
            assert!(seen >= least, "{seen} is believed, it was {least} before");
            return;
        }
        let asked = self.timeouts.asked();
        let seen = self.truth.load(Ordering::SeqCst);
        thread::yield_now();
        let answer = self.timeouts.answer(asked, true);
        thread::yield_now();
        if !answer.ttl().is_zero() {
            let until_ms = self.clock.monotonic_ms() + SOLO_TTL.as_millis() as u64;
            *self.believed.lock() = Some((seen, until_ms));
        }
        drop(answer);
        self.clock.pause(Duration::from_millis(300));
    }

    /// A session comes, changes what the name stands for, and leaves.
    fn visit(&self) {
        *self.others.lock() += 1;
        // As the daemon tells the mount, and as the mount says that it is ready.
        let shared = self
            .timeouts
            .begin_sharing(self.era)
            .expect("its session is not over");
        assert!(self.timeouts.run_out(shared), "nobody said that it is alone");
        self.truth.fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        let mut others = self.others.lock();
        *others -= 1;
        if *others == 0 {
            self.timeouts.solo(self.era);
        }
    }
}

#[test]
fn what_newcomers_change_is_never_seen_as_it_was_before() {
    let run = || {
        let clock = Arc::new(Time::default());
        let timeouts = DentryTimeouts::new(Arc::clone(&clock) as Arc<dyn Clock>);
        let world = Arc::new(World {
            era: timeouts.begin(false),
            timeouts,
            clock,
            truth: AtomicU64::new(0),
            believed: Mutex::new(None),
            others: Mutex::new(0),
        });
        let start = |times: usize, work: fn(&World)| {
            let world = Arc::clone(&world);
            thread::spawn(move || (0..times).for_each(|_| work(&world)))
        };
        let threads = [
            start(3, World::look),
            start(3, World::look),
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
