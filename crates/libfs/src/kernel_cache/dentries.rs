//! Dentry and attribute timeouts of the kernel above a mount: [`DENTRY_TTL`](varve_ipc::DENTRY_TTL) in
//! exclusive mode (the mount is alone in its pool), zero in shared mode
//! (`docs/adr/0003-kernel-dentry-caching-only-while-exclusive.md`). Owns the mode, and when the last answer
//! with a timeout expires; does not know the answers.
//!
//! An answer gets a timeout only if the mount was exclusive from before the operation until the answer. The
//! first change of a session that comes waits until the answers under way are out and the last of them has
//! expired; several sessions may come at once.

#[cfg(all(test, feature = "shuttle"))]
mod interleavings;

use crate::sync::atomic::{AtomicU64, Ordering};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use varve_ipc::{Clock, DENTRY_TTL, DENTRY_TTL_MAX};

/// Shortest and longest pause between two checks for answers that are still cached.
const LOOKS: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// The dentry and attribute timeouts of a mount.
pub(crate) struct DentryTimeouts {
    /// Even: exclusive mode; odd: shared mode. Grows with each change; above [`Era::SHIFT`], with each
    /// session.
    turn: AtomicU64,
    /// Cacheable answers that are not sent yet.
    under_way: AtomicU64,
    /// When the last sent answer expires, in milliseconds of the monotonic clock.
    until_ms: AtomicU64,
    clock: Arc<dyn Clock>,
}

/// The turn before an operation, for its [`Answer`].
#[derive(Debug, Clone, Copy)]
pub struct Asked(u64);

/// The turn of a change to shared mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sharing(u64);

/// An answer to the kernel: to be held until it is sent.
pub struct Answer<'b> {
    /// `None`: not cached.
    counted_by: Option<&'b DentryTimeouts>,
}

/// A session's time in the life of its mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Era(u64);

impl Era {
    const SHIFT: u32 = 32;

    const fn has(self, turn: u64) -> bool {
        turn >> Self::SHIFT == self.0
    }
}

const fn is_shared_turn(turn: u64) -> bool {
    turn % 2 == 1
}

impl DentryTimeouts {
    /// Exclusive mode; nothing was answered.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            turn: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
            until_ms: AtomicU64::new(0),
            clock,
        }
    }

    /// Begins a session, in shared mode or not. Operations that began before are not cached, and earlier
    /// sessions cannot change the mode any more.
    pub(crate) fn begin(&self, shared: bool) -> Era {
        let next = |turn: u64| Some((((turn >> Era::SHIFT) + 1) << Era::SHIFT) + u64::from(shared));
        let before = self.turn.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        Era((before.unwrap_or_else(|turn| turn) >> Era::SHIFT) + 1)
    }

    /// Begins shared mode: answers from here on are not cached. To be followed by [`run_out`](Self::run_out).
    /// `None`: the session is over.
    pub(crate) fn begin_sharing(&self, era: Era) -> Option<Sharing> {
        let next = |turn: u64| (era.has(turn) && !is_shared_turn(turn)).then_some(turn + 1);
        let changed = self.turn.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
        let turn = changed.map_or_else(|now| now, |before| before + 1);
        era.has(turn).then_some(Sharing(turn))
    }

    /// Returns to exclusive mode.
    pub(crate) fn exclusive(&self, era: Era) {
        let next = |turn: u64| (era.has(turn) && is_shared_turn(turn)).then_some(turn + 1);
        let _ = self.turn.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next);
    }

    pub(crate) fn is_shared(&self) -> bool {
        is_shared_turn(self.turn.load(Ordering::SeqCst))
    }

    /// Waits until no answer is cached any more. `false`: shared mode has ended, and nothing needs to be
    /// reported.
    pub(crate) fn run_out(&self, shared: Sharing) -> bool {
        loop {
            if self.turn.load(Ordering::SeqCst) != shared.0 {
                return false;
            }
            // `under_way` first: an answer that is not counted in it any more has set `until_ms` before.
            let under_way = self.under_way.load(Ordering::SeqCst);
            let until_ms = self.until_ms.load(Ordering::SeqCst);
            let left = Duration::from_millis(until_ms.saturating_sub(self.clock.monotonic_ms()));
            if under_way == 0 && left.is_zero() {
                return true;
            }
            self.clock.pause(left.clamp(LOOKS.0, LOOKS.1));
        }
    }

    pub(crate) fn asked(&self) -> Asked {
        Asked(self.turn.load(Ordering::SeqCst))
    }

    /// Returns the answer to an operation. `live` says whether its session still counts, as asked after the
    /// operation.
    pub(crate) fn answer(&self, asked: Asked, live: bool) -> Answer<'_> {
        if is_shared_turn(asked.0) || !live {
            return Answer { counted_by: None };
        }
        self.under_way.fetch_add(1, Ordering::SeqCst);
        // After the answer counts as under way: a change to shared mode that begins later waits for it.
        let alone = self.turn.load(Ordering::SeqCst) == asked.0;
        if !alone {
            self.under_way.fetch_sub(1, Ordering::SeqCst);
        }
        Answer {
            counted_by: alone.then_some(self),
        }
    }
}

impl fmt::Debug for DentryTimeouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DentryTimeouts")
            .field("turn", &self.turn)
            .field("under_way", &self.under_way)
            .field("until_ms", &self.until_ms)
            .finish_non_exhaustive()
    }
}

impl Answer<'_> {
    /// The timeout to answer with: zero unless the answer may be cached.
    #[must_use]
    pub const fn ttl(&self) -> Duration {
        match self.counted_by {
            Some(_) => DENTRY_TTL,
            None => Duration::ZERO,
        }
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        if let Some(timeouts) = self.counted_by {
            let until_ms = timeouts.clock.monotonic_ms() + DENTRY_TTL_MAX.as_millis() as u64 + 1;
            timeouts.until_ms.fetch_max(until_ms, Ordering::SeqCst);
            timeouts.under_way.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl fmt::Debug for Answer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("ttl", &self.ttl()).finish()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::DentryTimeouts;
    use std::sync::Arc;
    use std::time::Duration;
    use varve_ipc::{Clock, DENTRY_TTL, ManualClock};

    #[test]
    fn answers_are_cached_only_if_the_mount_was_alone_all_the_time() {
        let timeouts = DentryTimeouts::new(Arc::new(ManualClock::new(0)));
        let era = timeouts.begin(false);
        let (alone, lost) = (timeouts.asked(), timeouts.asked());
        assert_eq!(timeouts.answer(alone, true).ttl(), DENTRY_TTL);
        assert_eq!(
            timeouts.answer(lost, false).ttl(),
            Duration::ZERO,
            "its session is over"
        );
        timeouts.begin_sharing(era);
        assert!(timeouts.is_shared());
        assert_eq!(
            timeouts.answer(alone, true).ttl(),
            Duration::ZERO,
            "another session came meanwhile"
        );
        let is_shared = timeouts.asked();
        timeouts.exclusive(era);
        for asked in [alone, is_shared] {
            assert_eq!(
                timeouts.answer(asked, true).ttl(),
                Duration::ZERO,
                "another session was there"
            );
        }
        assert_eq!(timeouts.answer(timeouts.asked(), true).ttl(), DENTRY_TTL);
        let before = timeouts.asked();
        let next = timeouts.begin(false);
        assert_eq!(
            timeouts.answer(before, true).ttl(),
            Duration::ZERO,
            "another session"
        );
        assert_eq!(timeouts.begin_sharing(era), None);
        assert!(!timeouts.is_shared(), "a session that is over has no say");
        timeouts.begin_sharing(next);
        timeouts.exclusive(era);
        assert!(timeouts.is_shared());
        timeouts.begin(true);
        assert!(timeouts.is_shared());
    }

    #[test]
    fn newcomers_wait_only_for_what_was_answered() {
        let clock = Arc::new(ManualClock::new(0));
        let timeouts = DentryTimeouts::new(Arc::clone(&clock) as Arc<dyn Clock>);
        let era = timeouts.begin(false);
        assert!(
            timeouts.run_out(timeouts.begin_sharing(era).unwrap()),
            "nothing was answered"
        );
        timeouts.exclusive(era);
        drop(timeouts.answer(timeouts.asked(), true));
        clock.advance_ms(2_000);
        let started = std::time::Instant::now();
        assert!(timeouts.run_out(timeouts.begin_sharing(era).unwrap()), "long ago");
        assert!(started.elapsed() < DENTRY_TTL);
    }

    #[test]
    fn every_newcomer_waits_and_one_that_is_alone_again_says_nothing() {
        let clock = Arc::new(ManualClock::new(0));
        let timeouts = Arc::new(DentryTimeouts::new(Arc::clone(&clock) as Arc<dyn Clock>));
        let era = timeouts.begin(false);
        let answer = timeouts.answer(timeouts.asked(), true);
        let newcomers = [(); 2].map(|()| {
            let (timeouts, shared) = (Arc::clone(&timeouts), timeouts.begin_sharing(era).unwrap());
            std::thread::spawn(move || timeouts.run_out(shared))
        });
        clock.advance_ms(60_000);
        std::thread::sleep(Duration::from_millis(30));
        assert!(
            newcomers.iter().all(|newcomer| !newcomer.is_finished()),
            "an answer is under way"
        );
        drop(answer);
        std::thread::sleep(Duration::from_millis(30));
        assert!(
            newcomers.iter().all(|newcomer| !newcomer.is_finished()),
            "it is cached"
        );
        clock.advance_ms(1_100);
        assert!(
            newcomers
                .into_iter()
                .all(|newcomer| newcomer.join().is_ok_and(|out| out))
        );
        let over = timeouts.begin_sharing(era).unwrap();
        timeouts.exclusive(era);
        timeouts.begin_sharing(era);
        assert!(!timeouts.run_out(over));
    }
}
