//! The synchronisation primitives of the log, its lanes, inodes, the lease words and the mount: the real
//! ones, or, with the feature `shuttle`, primitives that a test drives through interleavings. Owns the
//! choice; knows no user of them.

#[cfg(not(feature = "shuttle"))]
pub(crate) use {
    std::hint::spin_loop,
    std::sync::atomic,
    std::thread::yield_now,
    std::thread_local,
    varve_media::lock::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

#[cfg(feature = "shuttle")]
pub(crate) use interleavings::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle::{hint::spin_loop, sync::atomic, thread::yield_now, thread_local};

use crossbeam_channel::{Receiver, Sender};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use varve_ipc::Clock;

/// Time for which an idle thread waits for work.
const IDLE: Duration = Duration::from_secs(1);
/// Most idle threads.
const IDLE_MOST: usize = 4;

/// A clock that a test moves, and that moves on while a thread pauses.
#[cfg(test)]
#[derive(Debug, Default)]
pub(crate) struct SteppedClock(atomic::AtomicU64);

#[cfg(test)]
impl Clock for SteppedClock {
    fn now_ns(&self) -> varve_format::TimeNs {
        0
    }

    fn monotonic_ms(&self) -> u64 {
        self.0.load(atomic::Ordering::SeqCst)
    }

    fn moment(&self) -> Duration {
        Duration::from_millis(self.monotonic_ms())
    }

    fn pause(&self, time: Duration) {
        self.0
            .fetch_add(time.as_millis() as u64, atomic::Ordering::SeqCst);
        yield_now();
    }
}

/// Starts a detached thread.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn spawn(
    clock: &dyn Clock,
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let bug = crate::seeded::current();
    clock.spawn(
        name,
        Box::new(move || {
            crate::seeded::arm(bug);
            work();
        }),
    )
}

/// Starts a detached thread.
#[cfg(feature = "shuttle")]
pub(crate) fn spawn(
    _clock: &dyn Clock,
    name: &str,
    work: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let started = shuttle::thread::Builder::new().name(name.into()).spawn(work);
    started.map(drop)
}

/// Work for a thread.
pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// Threads for work that may block for long: each piece has a thread of its own, which then waits for the next one
/// for a second. They end with this.
pub(crate) struct IdleThreads {
    name: &'static str,
    to_idle: Sender<Work>,
    idle: Receiver<Work>,
    waiting: Arc<AtomicUsize>,
}

impl IdleThreads {
    pub(crate) fn new(name: &'static str) -> Self {
        // A piece of work is taken by a thread that waits for it, or not at all.
        let (to_idle, idle) = crossbeam_channel::bounded(0);
        Self {
            name,
            to_idle,
            idle,
            waiting: Arc::default(),
        }
    }

    /// Has a thread do `work`.
    pub(crate) fn run(&self, clock: &dyn Clock, work: Work) -> std::io::Result<()> {
        if clock.takes_turns() || cfg!(feature = "shuttle") {
            return spawn(clock, self.name, work);
        }
        let Err(refused) = self.to_idle.try_send(work) else {
            return Ok(());
        };
        let (mut work, more) = (refused.into_inner(), self.idle.clone());
        let waiting = Arc::clone(&self.waiting);
        spawn(clock, self.name, move || {
            loop {
                work();
                let before = waiting.fetch_add(1, Ordering::Relaxed);
                let next = match before < IDLE_MOST {
                    true => more.recv_timeout(IDLE).ok(),
                    false => None,
                };
                waiting.fetch_sub(1, Ordering::Relaxed);
                match next {
                    Some(next) => work = next,
                    None => return,
                }
            }
        })
    }
}

/// Waits for a condition to change, for at most `timeout`.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn wait_for<T>(
    clock: &dyn Clock,
    changed: &Condvar,
    guard: &mut MutexGuard<'_, T>,
    timeout: Duration,
) {
    if clock.takes_turns() {
        MutexGuard::unlocked(guard, || clock.pause(timeout));
    } else {
        changed.wait_for(guard, timeout);
    }
}

/// Waits for a condition to change. Never times out: tested code must not rely on the timeout.
#[cfg(feature = "shuttle")]
pub(crate) fn wait_for<T>(
    _clock: &dyn Clock,
    changed: &Condvar,
    guard: &mut MutexGuard<'_, T>,
    timeout: Duration,
) {
    changed.wait_for(guard, timeout);
}

/// Takes a lock that is held across calls to the daemon. Under a clock that takes turns, it polls, so that
/// the holder gets its turn.
pub(crate) fn lock_held_long<'m, T>(clock: &dyn Clock, mutex: &'m Mutex<T>) -> MutexGuard<'m, T> {
    while clock.takes_turns() {
        if let Some(guard) = mutex.try_lock() {
            return guard;
        }
        clock.pause(Duration::from_millis(1));
    }
    mutex.lock()
}

/// A lock that is held across calls to the daemon, and waited for with a limit.
#[derive(Default)]
pub(crate) struct TimedLock {
    held: Mutex<bool>,
    free: Condvar,
}

/// A lock that is held until this is dropped.
#[must_use]
pub(crate) struct TimedLockGuard<'t>(&'t TimedLock);

impl TimedLock {
    /// Takes the lock if it is free within `most`. Never times out where a test drives interleavings: tested
    /// code must not rely on the timeout.
    pub(crate) fn lock_within(&self, clock: &dyn Clock, most: Duration) -> Option<TimedLockGuard<'_>> {
        let began = clock.moment();
        let mut held = self.held.lock();
        while *held {
            let left = most.saturating_sub(clock.moment().saturating_sub(began));
            if left.is_zero() && !cfg!(feature = "shuttle") {
                return None;
            }
            let look = if clock.takes_turns() {
                left.min(Duration::from_millis(1))
            } else {
                left
            };
            wait_for(clock, &self.free, &mut held, look);
        }
        *held = true;
        Some(TimedLockGuard(self))
    }
}

impl Drop for TimedLockGuard<'_> {
    fn drop(&mut self) {
        *self.0.held.lock() = false;
        self.0.free.notify_one();
    }
}

#[cfg(feature = "shuttle")]
mod interleavings {
    use std::fmt;
    use std::ops::{Deref, DerefMut};
    use std::sync::{PoisonError, TryLockError};
    use std::time::Duration;

    /// As `varve_media::lock::Mutex`.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// As `varve_media::lock::MutexGuard`. The inner guard is away only while a condition is waited for.
    pub(crate) struct MutexGuard<'m, T>(Option<shuttle::sync::MutexGuard<'m, T>>);

    /// As `varve_media::lock::Condvar`.
    #[derive(Default)]
    pub(crate) struct Condvar(shuttle::sync::Condvar);

    /// As `varve_media::lock::RwLock`.
    #[derive(Default)]
    pub(crate) struct RwLock<T>(shuttle::sync::RwLock<T>);

    pub(crate) use shuttle::sync::{RwLockReadGuard, RwLockWriteGuard};

    /// The guard, if the lock was free.
    fn had<G>(tried: Result<G, TryLockError<G>>) -> Option<G> {
        match tried {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    impl<T> RwLock<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::RwLock::new(value))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, T> {
            self.0.read().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn write(&self) -> RwLockWriteGuard<'_, T> {
            self.0.write().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
            had(self.0.try_read())
        }

        pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
            had(self.0.try_write())
        }
    }

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            had(self.0.try_lock()).map(|guard| MutexGuard(Some(guard)))
        }
    }

    impl<T> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Mutex")
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0
                .as_ref()
                .unwrap_or_else(|| unreachable!("taken while waiting only"))
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0
                .as_mut()
                .unwrap_or_else(|| unreachable!("taken while waiting only"))
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(shuttle::sync::Condvar::new())
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            if let Some(inner) = guard.0.take() {
                guard.0 = Some(self.0.wait(inner).unwrap_or_else(PoisonError::into_inner));
            }
        }

        /// Never times out: tested code must not rely on the timeout.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _timeout: Duration) {
            self.wait(guard);
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
