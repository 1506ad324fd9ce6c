//! Dentry and attribute timeouts of the kernel above a mount: what a cached reply depends on, and until when
//! the kernel may use it. Does not know the replies.
//!
//! A reply depends on leases: a name on its directory's, attributes on their inode's. It gets a timeout
//! ([`DENTRY_TTL`](varve_ipc::DENTRY_TTL)) only if these are held and none of them was recalled since before
//! the operation ([`ReplyVersion`]). A recalled lease is released when no reply that depends on
//! it is in flight and the last one has expired. Requests that need no more than the lease go on meanwhile,
//! and their replies get no timeout (`docs/adr/0038-dentry-timeouts-rest-on-leases.md`). One that no other
//! session waits for is released when none is in flight, and the daemon is told until when the kernel may use
//! the last: it keeps other sessions from changes until then.
//!
//! That takes at most [`DENTRY_TTL_MAX`](varve_ipc::DENTRY_TTL_MAX), and less where the thread that called
//! has given a [sign](super::threads) that it has the reply. So that it is not paid for each inode, replies
//! in [contended regions](super::regions) get no timeout.

#[cfg(all(test, feature = "shuttle"))]
mod interleavings;

use super::threads::{Dependent, Threads};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{InodeKey, SessionId};
use varve_ipc::DENTRY_TTL;

/// Pause before another check of a reply that is in flight.
const IN_FLIGHT: Duration = Duration::from_millis(1);

/// Replies with a timeout that depend on one lease.
#[derive(Debug, Default)]
pub(crate) struct CachedReplies {
    /// Replies that are not sent yet.
    in_flight: AtomicU32,
    /// Sent replies whose threads may still give a sign that they have them: [`Threads`] knows these.
    awaiting: AtomicU32,
    /// When the last of the others has expired, in milliseconds of the monotonic clock.
    until_ms: AtomicU64,
    /// The directory of the last reply that named the inode.
    dir: Mutex<Option<InodeKey>>,
}

impl CachedReplies {
    pub(super) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends a reply that is sent, and has expired then.
    pub(super) fn sent(&self, until_ms: u64) {
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
        self.end_sending();
    }

    /// A reply is not in flight any more.
    pub(super) fn end_sending(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// A reply whose thread may give a sign is about to be noted there.
    pub(super) fn await_sign(&self) {
        self.awaiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the thread of a sent reply may still give a sign that it has it.
    pub(crate) fn awaits_sign(&self) -> bool {
        self.awaiting.load(Ordering::SeqCst) > 0
    }

    /// A reply has expired then, whatever its thread does.
    pub(super) fn settle(&self, until_ms: u64) {
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
        self.awaiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// Ends a reply that is sent without a timeout after all.
    fn cancel(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns when the last sent reply has expired, in milliseconds of the monotonic clock.
    pub(crate) fn until_ms(&self, threads: &Threads) -> u64 {
        // In the order in which a reply goes on: it counts in the next place before it leaves one.
        let of_threads = match self.awaits_sign() {
            true => threads.until_ms(self),
            false => 0,
        };
        self.until_ms.load(Ordering::SeqCst).max(of_threads)
    }

    /// Returns how long the kernel may still use a reply; zero if it has none.
    pub(crate) fn remaining(&self, threads: &Threads) -> Duration {
        // First, in that order, too.
        let in_flight = self.in_flight.load(Ordering::SeqCst);
        let until_ms = self.until_ms(threads);
        // By the time that the kernel's ticks have come to.
        let lag_ms = threads.clock.tick_lag().as_millis() as u64;
        let now_ms = threads.clock.monotonic_ms().saturating_sub(lag_ms);
        let remaining = Duration::from_millis(until_ms.saturating_sub(now_ms));
        if in_flight > 0 {
            remaining.max(IN_FLIGHT)
        } else {
            remaining
        }
    }

    /// Returns how long to wait before another look if a reply is in flight; zero if none is.
    pub(crate) fn sending(&self) -> Duration {
        match self.in_flight.load(Ordering::SeqCst) {
            0 => Duration::ZERO,
            _ => IN_FLIGHT,
        }
    }

    /// Notes the directory in which the inode was named.
    pub(crate) fn set_dir(&self, dir: InodeKey) {
        *self.dir.lock() = Some(dir);
    }

    pub(crate) fn dir(&self) -> Option<InodeKey> {
        *self.dir.lock()
    }
}

/// Version of the session's leases before an operation, as FUSE's `attr_version`: the reply is cached only if
/// none of its leases was recalled since.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplyVersion {
    /// `None`: the reply gets no timeout.
    pub(crate) session: Option<SessionId>,
    pub(crate) recalls: u64,
    pub(crate) forwarded: u64,
    /// The thread that called, 0 if it is not known.
    pub(crate) thread: u32,
}

/// The timeouts of a reply, to be held until it is sent. A recall of a lease that it depends on waits for
/// that, so the holder must not block.
#[derive(Default)]
pub struct CachedReply {
    leases: Dependent,
    name: bool,
    attributes: bool,
    /// The thread that called, 0 if it is not known.
    thread: u32,
    threads: Option<Arc<Threads>>,
}

impl CachedReply {
    /// Begins a reply to a thread that depends on these leases, with timeouts for name and attributes or one
    /// of them.
    pub(crate) fn begin(
        leases: Dependent,
        (name, attributes): (bool, bool),
        thread: u32,
        threads: &Arc<Threads>,
    ) -> Self {
        leases.iter().for_each(|replies| replies.begin());
        Self {
            leases,
            name,
            attributes,
            thread,
            threads: Some(Arc::clone(threads)),
        }
    }

    /// Withdraws the timeouts.
    pub(crate) fn cancel(mut self) -> Self {
        self.leases.drain(..).for_each(|replies| replies.cancel());
        Self::default()
    }

    /// The timeout of the name, or of its absence.
    #[must_use]
    pub const fn name_ttl(&self) -> Duration {
        if self.name { DENTRY_TTL } else { Duration::ZERO }
    }

    /// The timeout of the attributes.
    #[must_use]
    pub const fn attr_ttl(&self) -> Duration {
        if self.attributes {
            DENTRY_TTL
        } else {
            Duration::ZERO
        }
    }
}

impl Drop for CachedReply {
    fn drop(&mut self) {
        if let Some(threads) = &self.threads
            && !self.leases.is_empty()
        {
            threads.sent(self.thread, std::mem::take(&mut self.leases));
        }
    }
}

impl fmt::Debug for CachedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedReply")
            .field("name_ttl", &self.name_ttl())
            .field("attr_ttl", &self.attr_ttl())
            .finish()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::CachedReplies;
    use crate::kernel_cache::threads::Threads;
    use crate::sync::SteppedClock;
    use std::sync::Arc;
    use std::time::Duration;
    use varve_ipc::{Clock, DENTRY_TTL_MAX};

    #[test]
    fn lease_stays_while_a_reply_is_in_flight_and_until_it_has_expired() {
        let clock = Arc::new(SteppedClock::default());
        let threads = Threads::new(true, Arc::clone(&clock) as _);
        let replies = CachedReplies::default();
        assert_eq!(replies.remaining(&threads), Duration::ZERO);
        replies.begin();
        assert!(replies.remaining(&threads) > Duration::ZERO, "it is not sent");
        replies.sent(DENTRY_TTL_MAX.as_millis() as u64 + 1);
        clock.pause(DENTRY_TTL_MAX);
        assert!(replies.remaining(&threads) > Duration::ZERO);
        clock.pause(Duration::from_millis(1));
        assert_eq!(replies.remaining(&threads), Duration::ZERO);
        replies.begin();
        replies.cancel();
        assert_eq!(replies.remaining(&threads), Duration::ZERO);
    }
}
