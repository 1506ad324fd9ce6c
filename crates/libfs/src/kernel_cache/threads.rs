//! The threads that called the kernel above a mount, each with its last reply: which of them have taken it
//! in, so that the timeouts of the reply have begun. Owns the one place of the rule that says until when the
//! kernel may use a reply. Knows neither the kernel nor processes: its callers bring the signs.
//!
//! # The rule
//!
//! The kernel counts a timeout from when the calling thread takes the reply in. A thread waits for one reply
//! at a time. So a reply has expired
//!
//! - [`DENTRY_TTL_MAX`] after it was sent, in any case: a thread is assumed to run within a quarter of a
//!   second;
//! - [`DENTRY_TTL_TAKEN`] after a *sign* that its thread has taken it in, if that is earlier. There are two:
//!   the thread's next request that it waits for itself ([`Threads::calls`]), or the thread has ended
//!   ([`Threads::look`]). A number that another thread has got meanwhile is a sign, too: the first has ended.
//!
//! Without a sign the first holds: if the thread's number is not known (0), if more threads call than there
//! are slots and another took its place, or if the thread just does nothing more.
//!
//! # Locks
//!
//! One lock a slot, held for a few stores, and by [`Threads::look`] and [`Threads::sweep`] while they ask
//! whether a thread has ended, so that no other reply takes the slot between question and answer. Taken
//! under an inode's lease word; nothing else is taken under it.

use super::dentries::CachedReplies;
use crate::seeded::{Bug, armed};
use crate::sync::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use varve_ipc::{Clock, DENTRY_TTL_MAX, DENTRY_TTL_TAKEN};

/// Most threads whose last replies are remembered: more than call within [`DENTRY_TTL_MAX`], but for storms.
const SLOTS: usize = if cfg!(feature = "shuttle") { 1 } else { 256 };

/// Leases that a reply depends on.
pub(crate) type Dependent = SmallVec<[Arc<CachedReplies>; 2]>;

/// When a reply that was sent has expired, without a sign that it was taken in.
const fn expiry(sent_ms: u64) -> u64 {
    sent_ms + DENTRY_TTL_MAX.as_millis() as u64 + 1
}

/// When a reply has expired, of which there is a sign at `now_ms` that it was taken in.
fn expiry_taken(sent_ms: u64, now_ms: u64) -> u64 {
    expiry(sent_ms).min(now_ms + DENTRY_TTL_TAKEN.as_millis() as u64 + 1)
}

/// The last reply that a thread was sent, with timeouts.
struct LastReply {
    thread: u32,
    sent_ms: u64,
    leases: Dependent,
}

impl LastReply {
    fn depends_on(&self, replies: &CachedReplies) -> bool {
        self.leases.iter().any(|lease| std::ptr::eq(&**lease, replies))
    }

    fn has_expired(&self, now_ms: u64) -> bool {
        expiry(self.sent_ms) <= now_ms
    }

    /// Ends the wait for a sign. Each lease notes the expiry before it loses the reply.
    fn settle(self, until_ms: u64) {
        self.leases.iter().for_each(|replies| replies.settle(until_ms));
    }
}

/// Threads by number. See the module.
pub(crate) struct Threads {
    /// None where no kernel is above.
    slots: Box<[Mutex<Option<LastReply>>]>,
    pub(super) clock: Arc<dyn Clock>,
}

impl Threads {
    /// For a session with a kernel above, or without one.
    pub(crate) fn new(kernel: bool, clock: Arc<dyn Clock>) -> Self {
        let slots = if kernel { SLOTS } else { 0 };
        Self {
            slots: (0..slots).map(|_| Mutex::new(None)).collect(),
            clock,
        }
    }

    /// The slot of a thread; none for a number that says nothing.
    fn slot(&self, thread: u32) -> Option<&Mutex<Option<LastReply>>> {
        let at = (thread as usize).checked_rem(self.slots.len())?;
        self.slots.get(at).filter(|_| thread != 0)
    }

    /// Notes a reply that was sent to a thread, which depends on `leases`.
    pub(crate) fn sent(&self, thread: u32, leases: Dependent) {
        let sent_ms = self.clock.monotonic_ms();
        let Some(slot) = self.slot(thread) else {
            leases.iter().for_each(|replies| replies.sent(expiry(sent_ms)));
            return;
        };
        let mut slot = slot.lock();
        leases.iter().for_each(|replies| replies.await_sign());
        let reply = LastReply {
            thread,
            sent_ms,
            leases: leases.clone(),
        };
        // Of another thread, or of this one, if its next request came before this reply was noted.
        if let Some(other) = slot.replace(reply) {
            let until_ms = expiry(other.sent_ms);
            other.settle(until_ms);
        }
        drop(slot);
        // Now that a look finds it.
        leases.iter().for_each(|replies| replies.end_sending());
    }

    /// Notes a request that the thread itself makes and waits for: it has taken its last reply in.
    pub(crate) fn calls(&self, thread: u32) {
        let Some(slot) = self.slot(thread) else { return };
        let mut slot = slot.lock();
        let is_of = |last: &LastReply| last.thread == thread || armed(Bug::SignOfAnother);
        if slot.as_ref().is_some_and(is_of)
            && let Some(last) = slot.take()
        {
            let until_ms = expiry_taken(last.sent_ms, self.clock.monotonic_ms());
            last.settle(until_ms);
        }
    }

    /// Looks which threads have ended that were sent a reply of this lease.
    pub(crate) fn look(&self, replies: &CachedReplies, has_ended: impl Fn(u32) -> bool) {
        if replies.awaits_sign() {
            self.settle_ended(|last| last.depends_on(replies), has_ended);
        }
    }

    /// Looks which threads have ended, of all that were sent a reply lately.
    pub(crate) fn sweep(&self, has_ended: impl Fn(u32) -> bool) {
        self.settle_ended(|_| true, has_ended);
    }

    fn settle_ended(&self, which: impl Fn(&LastReply) -> bool, has_ended: impl Fn(u32) -> bool) {
        for slot in &self.slots {
            let mut slot = slot.lock();
            // Under the slot's lock: all who had the number when a reply was noted here have ended if nobody
            // has it now.
            let is_over = |last: &mut LastReply| {
                which(last) && (last.has_expired(self.clock.monotonic_ms()) || has_ended(last.thread))
            };
            if let Some(last) = slot.take_if(is_over) {
                let until_ms = expiry_taken(last.sent_ms, self.clock.monotonic_ms());
                last.settle(until_ms);
            }
        }
    }

    /// Returns when the last reply has expired that depends on the lease and waits for a sign; 0 without one.
    pub(super) fn until_ms(&self, replies: &CachedReplies) -> u64 {
        let slots = self.slots.iter();
        let of_slot = |slot: &Mutex<Option<LastReply>>| {
            let slot = slot.lock();
            let last = slot.as_ref().filter(|last| last.depends_on(replies));
            last.map_or(0, |last| expiry(last.sent_ms))
        };
        slots.map(of_slot).max().unwrap_or(0)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{Dependent, SLOTS, Threads};
    use crate::kernel_cache::dentries::CachedReplies;
    use crate::sync::SteppedClock;
    use smallvec::smallvec;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;
    use varve_ipc::{Clock, DENTRY_TTL_MAX, DENTRY_TTL_TAKEN};

    const ONE: u32 = 7;
    const TWO: u32 = 8;
    const LONGEST: u64 = DENTRY_TTL_MAX.as_millis() as u64 + 1;
    const TAKEN: u64 = DENTRY_TTL_TAKEN.as_millis() as u64 + 1;

    struct Rig {
        clock: Arc<SteppedClock>,
        threads: Threads,
        lease: Arc<CachedReplies>,
    }

    fn rig() -> Rig {
        let clock = Arc::new(SteppedClock::default());
        Rig {
            threads: Threads::new(true, Arc::clone(&clock) as _),
            clock,
            lease: Arc::default(),
        }
    }

    impl Rig {
        fn sends(&self, thread: u32) {
            let leases: Dependent = smallvec![Arc::clone(&self.lease)];
            self.lease.begin();
            self.threads.sent(thread, leases);
        }

        fn later(&self, ms: u64) {
            self.clock.pause(Duration::from_millis(ms));
        }

        fn remaining_ms(&self) -> u64 {
            self.lease.remaining(&self.threads).as_millis() as u64
        }
    }

    #[test]
    fn reply_expires_early_from_the_next_request_of_its_thread_on() {
        let rig = rig();
        rig.sends(ONE);
        assert_eq!(rig.remaining_ms(), LONGEST);
        rig.later(10);
        rig.threads.calls(ONE);
        assert_eq!(rig.remaining_ms(), TAKEN);
        // A later one says nothing of when the reply was taken in.
        rig.later(50);
        rig.threads.calls(ONE);
        assert_eq!(rig.remaining_ms(), TAKEN - 50);
        rig.later(TAKEN);
        assert_eq!(rig.remaining_ms(), 0);
    }

    /// A clock, and how far the kernel's ticks lag behind it.
    #[derive(Default)]
    struct LaggingClock(SteppedClock, AtomicU64);

    impl Clock for LaggingClock {
        fn now_ns(&self) -> varve_format::TimeNs {
            self.0.now_ns()
        }

        fn monotonic_ms(&self) -> u64 {
            self.0.monotonic_ms()
        }

        fn tick_lag(&self) -> Duration {
            Duration::from_millis(self.1.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn reply_lives_for_as_long_as_the_ticks_of_the_kernel_lag() {
        let clock = Arc::new(LaggingClock::default());
        let threads = Threads::new(true, Arc::clone(&clock) as _);
        let lease = Arc::new(CachedReplies::default());
        for (sign, whole) in [(true, TAKEN), (false, LONGEST)] {
            lease.begin();
            threads.sent(ONE, smallvec![Arc::clone(&lease)]);
            if sign {
                threads.calls(ONE);
            }
            clock.1.store(90, Ordering::Relaxed);
            clock.0.pause(Duration::from_millis(whole + 89));
            assert_eq!(lease.remaining(&threads), Duration::from_millis(1));
            clock.1.store(3, Ordering::Relaxed);
            assert_eq!(lease.remaining(&threads), Duration::ZERO);
        }
    }

    #[test]
    fn request_of_another_thread_says_nothing() {
        let rig = rig();
        rig.sends(ONE);
        rig.later(10);
        // The second one's slot is the first one's.
        for other in [TWO, ONE + SLOTS as u32, 0] {
            rig.threads.calls(other);
            assert_eq!(rig.remaining_ms(), LONGEST - 10, "{other}");
        }
    }

    #[test]
    fn late_sign_delays_nothing() {
        let rig = rig();
        rig.sends(ONE);
        rig.later(300);
        rig.threads.calls(ONE);
        assert_eq!(rig.remaining_ms(), LONGEST - 300);
    }

    #[test]
    fn all_threads_with_a_reply_count_and_each_has_its_own_sign() {
        let rig = rig();
        rig.sends(ONE);
        rig.later(100);
        rig.sends(TWO);
        rig.threads.calls(TWO);
        assert_eq!(rig.remaining_ms(), LONGEST - 100, "the first one's");
        rig.later(10);
        rig.threads.look(&rig.lease, |thread| thread == ONE);
        assert_eq!(rig.remaining_ms(), TAKEN, "the first one has ended by now");
    }

    #[test]
    fn ended_threads_are_found_by_a_look_at_the_lease_and_by_a_sweep() {
        let rig = rig();
        let other = Arc::new(CachedReplies::default());
        rig.threads.look(&rig.lease, |_| panic!("there is no reply"));
        rig.sends(ONE);
        rig.threads.look(&other, |_| panic!("it has no reply"));
        rig.threads.look(&rig.lease, |_| false);
        assert_eq!(rig.remaining_ms(), LONGEST);
        rig.later(20);
        rig.threads.sweep(|thread| thread == ONE);
        assert_eq!(rig.remaining_ms(), TAKEN);
        rig.threads.look(&rig.lease, |_| panic!("it is known"));
    }

    #[test]
    fn reply_without_a_number_or_without_a_slot_expires_as_if_there_were_no_signs() {
        let rig = rig();
        rig.sends(0);
        rig.later(10);
        rig.threads.calls(0);
        rig.threads.sweep(|_| panic!("there is nothing to ask"));
        assert_eq!(rig.remaining_ms(), LONGEST - 10);
        rig.later(LONGEST);
        // More threads than slots.
        rig.sends(ONE);
        rig.later(10);
        rig.sends(ONE + SLOTS as u32);
        rig.threads.calls(ONE + SLOTS as u32);
        rig.threads.calls(ONE);
        rig.threads.sweep(|_| true);
        assert_eq!(rig.remaining_ms(), LONGEST - 10, "the first one's");
    }

    #[test]
    fn second_reply_of_a_thread_before_its_sign_is_no_sign() {
        let rig = rig();
        rig.sends(ONE);
        rig.later(50);
        rig.sends(ONE);
        rig.later(1);
        rig.threads.calls(ONE);
        assert_eq!(rig.remaining_ms(), LONGEST - 51);
    }

    #[test]
    fn session_without_a_kernel_has_no_slots() {
        let rig = Rig {
            threads: Threads::new(false, Arc::new(SteppedClock::default())),
            ..rig()
        };
        rig.sends(ONE);
        rig.threads.calls(ONE);
        assert_eq!(rig.remaining_ms(), LONGEST);
    }
}
