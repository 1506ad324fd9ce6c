//! The interface between transports and a daemon, and the queue of pending upcalls. Refuses to know the
//! daemon's work.

use crate::sync::{Condvar, Mutex, lock};
use crate::{Admin, DevicePart, Hello, IpcError, Request, Response, Upcall, Welcome};
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use varve_format::SessionId;
use varve_format::seeded::{Bug, armed};

/// Most upcalls that wait for one client; a client that lets more accumulate is sealed.
pub const UPCALLS_MAX: usize = 16_384;

/// Identity of the process at the other end, as reported by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process.
    pub pid: u32,
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
}

impl Peer {
    /// This process.
    #[must_use]
    pub fn this_process() -> Self {
        Self {
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
        }
    }
}

/// Descriptors that travel beside a [`Welcome`].
#[derive(Debug, Default)]
pub struct Descriptors {
    /// The session page, read-only.
    pub page: Option<OwnedFd>,
    /// The live log, read-write.
    pub log: Option<OwnedFd>,
    /// The live log's backing file (`O_DIRECT`), where there is one; privileged sessions only, see
    /// [`Request::SyncLog`].
    pub log_backing: Option<OwnedFd>,
    /// The NVM region, read-only; for a session that is not privileged its user's segments.
    pub nvm: Option<OwnedFd>,
    /// The bits of blocks of NVM that were compared with their checksums, read-write
    /// (`varve_media::Verified`); privileged sessions only, and only where each block is compared once.
    pub verified: Option<OwnedFd>,
    /// The SSD's devices, read-only, with the part of the tier that each is; privileged sessions only. What
    /// lies in no part is read by the daemon.
    pub ssd: Vec<(DevicePart, OwnedFd)>,
}

/// An opened session.
#[derive(Debug)]
pub struct Opened {
    /// The answer.
    pub welcome: Welcome,
    /// Descriptors for the client.
    pub descriptors: Descriptors,
    /// Queue of the daemon's upcalls to this client.
    pub upcalls: Arc<UpcallQueue>,
}

/// The daemon behind a transport. Calls of one session may come from several threads at once.
pub trait Service: Send + Sync {
    /// Opens a session for `peer`.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn hello(&self, peer: Peer, hello: Hello) -> Result<Opened, IpcError>;

    /// Carries out a request of a session. Waits only within the daemon's bounds.
    ///
    /// # Errors
    /// Errors of the daemon; `Sealed` when the session is over.
    fn call(&self, session: SessionId, request: Request) -> Result<Response, IpcError>;

    /// Answers an operator's request on a connection without a session.
    ///
    /// # Errors
    /// Errors of the daemon.
    fn admin(&self, peer: Peer, admin: Admin) -> Result<Response, IpcError>;

    /// Reports that a session's connection is gone: its client closed it, died, or broke the protocol.
    fn gone(&self, session: SessionId);
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<Upcall>,
    closed: bool,
}

/// Upcalls for one client, in order, bounded.
#[derive(Debug, Default)]
pub struct UpcallQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl UpcallQueue {
    /// An open, empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an upcall; `false` if the queue is full or closed (then the client has stopped taking upcalls).
    #[must_use]
    pub fn push(&self, upcall: Upcall) -> bool {
        let mut state = lock(&self.state);
        if state.closed || state.waiting.len() >= UPCALLS_MAX {
            return false;
        }
        state.waiting.push_back(upcall);
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Returns the next upcall, or `None` after `timeout`.
    ///
    /// # Errors
    /// `Gone` when the queue is closed and empty.
    pub fn pop(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        let until = Instant::now().checked_add(timeout);
        let mut state = lock(&self.state);
        loop {
            let lost = state.closed && armed(Bug::UpcallsLostAtClose);
            if let Some(upcall) = state.waiting.pop_front().filter(|_| !lost) {
                return Ok(Some(upcall));
            }
            if state.closed {
                return Err(IpcError::Gone("the session is closed".into()));
            }
            let left = until.map_or(Duration::from_secs(3600), |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Ok(None);
            }
            if armed(Bug::UpcallUnseen) {
                drop(state);
                state = lock(&self.state);
            }
            state = match self.changed.wait_timeout(state, left) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Number of upcalls not taken yet.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.state).waiting.len()
    }

    /// Whether all upcalls were taken.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the queue was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Refuses further upcalls; those in the queue can still be taken.
    pub fn close(&self) {
        lock(&self.state).closed = true;
        self.changed.notify_all();
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod interleavings {
    //! The queue under a scheduler that tries interleavings; a wait never times out there, so a wait that is
    //! never ended is a deadlock.
    #![allow(clippy::unwrap_used)]

    use super::UpcallQueue;
    use crate::Upcall;
    use crate::sync::Arc;
    use shuttle::thread;
    use std::time::Duration;
    use varve_format::seeded::{Bug, is_found};
    use varve_format::{InodeKey, LeaseNo};

    /// Upcalls of each thread that adds some.
    const EACH: u64 = 3;

    /// The `count`th upcall of a thread.
    fn numbered(thread: u64, count: u64) -> Upcall {
        Upcall::Revoke {
            key: InodeKey::new(thread, 1),
            lease: LeaseNo(count),
            keep: None,
        }
    }

    /// Returns the thread of an upcall, and its count.
    fn number(upcall: &Upcall) -> (u64, u64) {
        match upcall {
            Upcall::Revoke { key, lease, .. } => (key.ino.0, lease.0),
            other => panic!("{other:?}"),
        }
    }

    /// Two threads add upcalls, one closes the queue meanwhile, and one takes them: it gets exactly the
    /// accepted ones, in order, and then the end.
    fn accepted_is_taken_once_and_in_order() {
        let queue = Arc::new(UpcallQueue::new());
        let taker = {
            let queue = Arc::clone(&queue);
            thread::spawn(move || {
                let mut taken = Vec::new();
                while let Ok(upcall) = queue.pop(Duration::from_secs(3600)) {
                    taken.push(number(&upcall.unwrap()));
                }
                taken
            })
        };
        let adders: Vec<_> = (0..2)
            .map(|adder| {
                let queue = Arc::clone(&queue);
                thread::spawn(move || -> Vec<bool> {
                    (0..EACH)
                        .map(|count| {
                            thread::yield_now();
                            queue.push(numbered(adder, count))
                        })
                        .collect()
                })
            })
            .collect();
        for _ in 0..EACH {
            thread::yield_now();
        }
        queue.close();
        let accepted: Vec<_> = adders.into_iter().map(|adder| adder.join().unwrap()).collect();
        let taken = taker.join().unwrap();
        for (adder, accepted) in (0..).zip(accepted) {
            let refused_from = accepted.iter().take_while(|accepted| **accepted).count();
            assert!(accepted[refused_from..].iter().all(|accepted| !accepted));
            let of: Vec<_> = taken.iter().filter(|(of, _)| *of == adder).collect();
            let wanted: Vec<_> = (0..refused_from as u64).map(|count| (adder, count)).collect();
            assert!(of.into_iter().eq(&wanted), "{taken:?}, {wanted:?} were accepted");
        }
    }

    #[test]
    fn upcalls_that_were_accepted_are_taken_when_the_queue_is_closed_meanwhile() {
        shuttle::check_random(accepted_is_taken_once_and_in_order, 4_000);
        shuttle::check_pct(accepted_is_taken_once_and_in_order, 2_000, 3);
    }

    #[test]
    fn wait_that_begins_after_the_look_is_caught() {
        assert!(is_found(
            Bug::UpcallUnseen,
            &[accepted_is_taken_once_and_in_order]
        ));
    }

    #[test]
    fn upcalls_that_are_lost_at_the_close_are_caught() {
        assert!(is_found(
            Bug::UpcallsLostAtClose,
            &[accepted_is_taken_once_and_in_order]
        ));
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{UPCALLS_MAX, UpcallQueue};
    use crate::Upcall;
    use std::time::Duration;

    #[test]
    fn queue_keeps_order_and_refuses_more_than_its_bound() {
        let queue = UpcallQueue::new();
        assert!(queue.push(Upcall::Sharing));
        for _ in 1..UPCALLS_MAX {
            assert!(queue.push(Upcall::Exclusive));
        }
        assert!(!queue.push(Upcall::Exclusive));
        assert_eq!(queue.pop(Duration::ZERO).unwrap(), Some(Upcall::Sharing));
        assert_eq!(queue.pop(Duration::ZERO).unwrap(), Some(Upcall::Exclusive));
    }

    #[test]
    fn queue_ends_after_the_last_upcall_when_closed() {
        let queue = UpcallQueue::new();
        assert_eq!(queue.pop(Duration::ZERO).unwrap(), None);
        assert!(queue.push(Upcall::Sealed));
        queue.close();
        assert!(!queue.push(Upcall::Exclusive));
        assert_eq!(queue.pop(Duration::ZERO).unwrap(), Some(Upcall::Sealed));
        assert!(queue.pop(Duration::from_secs(60)).is_err());
    }
}
