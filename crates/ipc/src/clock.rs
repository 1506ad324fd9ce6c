//! Clocks: the system's, and one that tests set. Owns no policy about time.

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;
use varve_format::TimeNs;

/// Time since the machine started.
pub(crate) fn since_start() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The *clock* seam: the time, and how threads wait.
pub trait Clock: Send + Sync {
    /// Wall-clock time, nanoseconds since 1970 (coarse is enough).
    fn now_ns(&self) -> TimeNs;
    /// Monotonic time in milliseconds.
    fn monotonic_ms(&self) -> u64;

    /// Time since an arbitrary origin, to measure a wait by. Advances even where a test's clock stands still,
    /// unless threads take turns.
    fn moment(&self) -> Duration {
        since_start()
    }

    /// Monotonic time in nanoseconds, to measure a transfer by. Stands still where a test's clock does.
    fn monotonic_ns(&self) -> u64 {
        self.monotonic_ms().saturating_mul(1_000_000)
    }

    /// How far the system's count of ticks, by which a kernel ends timeouts, lags behind the clock. More than a
    /// tick where the processor that counts does not run, as in a virtual machine.
    fn tick_lag(&self) -> Duration {
        Duration::ZERO
    }

    /// Lets other threads run for `time` or less. A thread that waits for another thread's progress checks
    /// for it, pauses, and checks again.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Whether exactly one thread runs at a time, and another one only when that pauses, as in a
    /// deterministic test. Threads may then wait for each other only by [`pause`](Self::pause).
    fn takes_turns(&self) -> bool {
        false
    }

    /// Starts a detached thread.
    ///
    /// # Errors
    /// If the system cannot start another thread.
    fn spawn(&self, name: &str, work: Box<dyn FnOnce() + Send>) -> std::io::Result<()> {
        std::thread::Builder::new()
            .name(name.into())
            .spawn(work)
            .map(drop)
    }
}

/// The system's clocks; the wall clock is the coarse one (6 ns to read, a few milliseconds fine).
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ns(&self) -> TimeNs {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        now.tv_sec
            .saturating_mul(1_000_000_000)
            .saturating_add(now.tv_nsec)
    }

    fn monotonic_ms(&self) -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        (now.tv_sec as u64).saturating_mul(1000) + now.tv_nsec as u64 / 1_000_000
    }

    fn monotonic_ns(&self) -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        (now.tv_sec as u64).saturating_mul(1_000_000_000) + now.tv_nsec as u64
    }

    fn tick_lag(&self) -> Duration {
        // Linux moves the coarse clock where it counts ticks (`update_wall_time`), and nowhere else as a rule.
        let coarse = clock_gettime(ClockId::MonotonicCoarse);
        let coarse_ns = (coarse.tv_sec as u64).saturating_mul(1_000_000_000) + coarse.tv_nsec as u64;
        Duration::from_nanos(self.monotonic_ns().saturating_sub(coarse_ns))
    }
}

/// A clock that stands still until a test advances it. Each reading of the wall clock is one nanosecond later
/// than the one before.
#[derive(Debug)]
pub struct ManualClock {
    wall_ns: AtomicI64,
    monotonic_ms: AtomicU64,
}

impl ManualClock {
    /// Starts at `wall_ns`, with 1 ms of monotonic time.
    #[must_use]
    pub const fn new(wall_ns: TimeNs) -> Self {
        Self {
            wall_ns: AtomicI64::new(wall_ns),
            monotonic_ms: AtomicU64::new(1),
        }
    }

    /// Advances both clocks.
    pub fn advance_ms(&self, ms: u64) {
        self.wall_ns
            .fetch_add((ms as i64).saturating_mul(1_000_000), Ordering::Relaxed);
        self.monotonic_ms.fetch_add(ms, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> TimeNs {
        self.wall_ns.fetch_add(1, Ordering::Relaxed)
    }

    fn monotonic_ms(&self) -> u64 {
        self.monotonic_ms.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Clock, ManualClock, SystemClock};

    #[test]
    fn manual_clock_moves_only_when_told() {
        let clock = ManualClock::new(1_000);
        assert_eq!(clock.monotonic_ms(), clock.monotonic_ms());
        clock.advance_ms(5);
        assert_eq!(clock.monotonic_ms(), 6);
        assert_eq!(clock.now_ns(), 5_001_000);
    }

    #[test]
    fn ticks_go_on_behind_the_clock() {
        let clock = SystemClock;
        let until = clock.monotonic_ms() + 20_000;
        // A tick is 10 ms at most; a busy machine may count late, not for ever.
        while clock.tick_lag() > std::time::Duration::from_millis(10) {
            assert!(clock.monotonic_ms() < until, "{:?}", clock.tick_lag());
            std::thread::yield_now();
        }
        assert_eq!(ManualClock::new(0).tick_lag(), std::time::Duration::ZERO);
    }

    #[test]
    fn system_clock_does_not_run_backwards() {
        let clock = SystemClock;
        let (wall, mono) = (clock.now_ns(), clock.monotonic_ms());
        assert!(clock.now_ns() >= wall - 3_600_000_000_000 && clock.monotonic_ms() >= mono);
        assert!(wall > 1_500_000_000_000_000_000);
    }
}
