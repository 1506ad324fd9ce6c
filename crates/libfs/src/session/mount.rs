//! The mount: holds the live session, and is the one place where an operation that loses its session is
//! repeated in the next.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use varve_format::{LastForwarded, LogSeq, Seal, SessionId};
use varve_ipc::{Clock, HELD_MAX, Hello, IpcError, PROTOCOL_VERSION, Request};

use super::{Opens, Session};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::options::{Connection, Connector, FsOptions, MountError};
use crate::seeded::{Bug, armed};
use crate::sync::{Mutex, RwLock, lock_held_long};

/// Most ended sessions that are remembered: operations that began in one may be slow to learn of its end.
const ENDS_MAX: usize = 64;
const BACK_OFF_FIRST: Duration = Duration::from_millis(5);
const BACK_OFF_MOST: Duration = Duration::from_millis(500);
/// Bound on the wait for a daemon before the first session has told its own, in milliseconds.
const FIRST_WAIT_MS: u64 = 30_000;

/// How a session ended.
#[derive(Debug, Clone)]
struct End {
    session: SessionId,
    /// `None`: the daemon no longer knew it.
    seal: Option<Seal>,
    last_forwarded: LastForwarded,
}

/// State of an operation across its attempts.
#[derive(Debug, Default)]
pub(crate) struct Try {
    /// The forwarded operation that was under way when the session was lost.
    pub asked: Option<(SessionId, u64)>,
    done: Option<LastForwarded>,
}

impl Try {
    /// Whether the daemon has carried the forwarded operation out: it must not be done again, however the
    /// next session would do it, and however often sessions are lost.
    pub(crate) const fn is_done(&self) -> bool {
        self.done.is_some()
    }

    /// Returns the operation that the daemon has carried out.
    pub(crate) const fn done(&self) -> Option<LastForwarded> {
        self.done
    }

    /// Notes that the daemon has carried the operation out. Further requests for the caller's answer may go
    /// over another session.
    pub(crate) const fn note_done(&mut self, done: LastForwarded) {
        self.done = Some(done);
    }

    /// Prepares to do the operation again from the beginning.
    pub(crate) const fn forget_done(&mut self) {
        self.done = None;
    }
}

/// A mounted pool.
pub(crate) struct Mount {
    connector: Arc<dyn Connector>,
    pub options: FsOptions,
    pub opens: Arc<Opens>,
    session: RwLock<Arc<Session>>,
    /// The mount's first session: while it lives no operation needs the lock above. Its memory and its
    /// connection are given back when it ends.
    first: Arc<Session>,
    ends: Mutex<VecDeque<End>>,
    unmounted: AtomicBool,
    pub resumed: AtomicU64,
    pub names_hit: AtomicU64,
    pub names_missed: AtomicU64,
    /// Counters of sessions that are over: logged, forwarded, acquires, revoked, milliseconds until cached
    /// replies have expired.
    past: [AtomicU64; 5],
}

fn hello(options: &FsOptions, resume: Option<u128>, held: Vec<varve_format::InodeKey>) -> Hello {
    Hello {
        version: PROTOCOL_VERSION,
        kind: options.kind,
        read_only: options.read_only,
        resume,
        held,
    }
}

/// Tries until the daemon answers, for at most `wait_ms`.
fn connect(
    connector: &dyn Connector,
    clock: &dyn Clock,
    wait_ms: u64,
    hello: &Hello,
) -> std::result::Result<Connection, IpcError> {
    let start = clock.moment();
    let mut pause = BACK_OFF_FIRST;
    loop {
        match connector.connect(hello.clone()) {
            Err(IpcError::Gone(why)) => {
                if clock.moment() - start + pause > Duration::from_millis(wait_ms) {
                    return Err(IpcError::Gone(why));
                }
            }
            other => return other,
        }
        clock.pause(pause);
        pause = (pause * 2).min(BACK_OFF_MOST);
    }
}

impl Mount {
    pub(crate) fn pool_dir(&self) -> Option<PathBuf> {
        self.connector.pool_dir()
    }

    pub(crate) fn new(
        connector: Arc<dyn Connector>,
        options: FsOptions,
    ) -> std::result::Result<Self, MountError> {
        let first = hello(&options, None, Vec::new());
        let connection = connect(&*connector, &*options.clock, FIRST_WAIT_MS, &first)?;
        let opens = Arc::new(Opens::default());
        let session = Session::start(connection, &options, &opens)?;
        Ok(Self {
            connector,
            options,
            opens,
            session: RwLock::new(Arc::clone(&session)),
            first: session,
            ends: Mutex::new(VecDeque::new()),
            unmounted: AtomicBool::new(false),
            resumed: AtomicU64::new(0),
            names_hit: AtomicU64::new(0),
            names_missed: AtomicU64::new(0),
            past: [const { AtomicU64::new(0) }; 5],
        })
    }

    /// Returns the live session (or the last one).
    pub(crate) fn session(&self) -> Arc<Session> {
        Arc::clone(&self.session.read())
    }

    /// Whether the daemon may have reported any inode as contended a moment ago.
    pub(crate) fn is_any_contended(&self) -> bool {
        self.of_session(|session| session.leases.contended().any())
    }

    /// Calls `say` with the current session: without a locked instruction as long as it is the first one.
    #[inline]
    pub(crate) fn of_session<T>(&self, say: impl FnOnce(&Session) -> T) -> T {
        if self.first.is_live() {
            say(&self.first)
        } else {
            say(&self.session())
        }
    }

    pub(crate) fn is_unmounted(&self) -> bool {
        self.unmounted.load(Ordering::Acquire)
    }

    /// Runs an operation, and repeats it while sessions are lost under it. A commit that the loss overtook
    /// counts iff the seal covers it.
    #[inline]
    pub(crate) fn with_session<T>(
        &self,
        op: impl FnMut(&Arc<Session>, &mut Try) -> OpResult<T, T>,
    ) -> Result<T> {
        self.with_session_from(&self.first, op)
    }

    /// As [`with_session`](Self::with_session), in `known` while that session lives: it saves the lookup of
    /// the live session.
    #[inline]
    pub(crate) fn with_session_from<T>(
        &self,
        known: &Arc<Session>,
        mut op: impl FnMut(&Arc<Session>, &mut Try) -> OpResult<T, T>,
    ) -> Result<T> {
        let mut attempt = Try::default();
        let mut newest;
        loop {
            if self.is_unmounted() {
                return Err(Errno(libc::EIO));
            }
            let session = if known.is_live() {
                known
            } else {
                newest = self.session();
                &newest
            };
            let (committed, otherwise) = match op(session, &mut attempt) {
                Ok(value) => return Ok(value),
                // An operation that failed under leases that were lost meanwhile may succeed in the next
                // session: repeat it.
                Err(OpError::Failed(errno)) if session.is_live() || self.is_unmounted() => {
                    session.data.report();
                    return Err(errno);
                }
                Err(OpError::Failed(_)) => (None, None),
                // Operations deal with contention themselves.
                Err(OpError::Forward) => return Err(Errno(libc::EIO)),
                Err(OpError::SessionLost { committed, otherwise }) => (committed, otherwise),
            };
            let end = self.resume(session)?;
            if let Some((seqs, value)) = committed {
                let Some(seal) = &end.seal else {
                    return Err(Errno(libc::EIO));
                };
                let one_more = u64::from(armed(Bug::SealCoversNext) && seqs.first > seal.last);
                if (seqs.first.0..=seqs.last.0).all(|seq| seal.covers(LogSeq(seq - one_more))) {
                    return Ok(value);
                }
            }
            if let Some(value) = otherwise {
                return Ok(value);
            }
            if let Some((of, number)) = attempt.asked.take()
                && of == end.session
            {
                if end.seal.is_none() {
                    return Err(Errno(libc::EIO));
                }
                // One is under way at a time: no later number is done.
                if end.last_forwarded.number >= number {
                    attempt.done = Some(end.last_forwarded);
                }
            }
        }
    }

    /// As [`with_session`](Self::with_session), for an operation that only reads: its result counts if the
    /// session still lives afterwards.
    pub(crate) fn look<T>(&self, mut op: impl FnMut(&Arc<Session>) -> OpResult<T, T>) -> Result<T> {
        self.with_session(|session, _| {
            let value = op(session)?;
            if session.is_live() {
                Ok(value)
            } else {
                Err(OpError::lost())
            }
        })
    }

    /// Makes sure that `lost` was replaced, and returns how it ended.
    fn resume(&self, lost: &Arc<Session>) -> Result<End> {
        lost.lose();
        let mut ends = lock_held_long(&*self.options.clock, &self.ends);
        let end = match ends.back() {
            Some(last) if armed(Bug::LateCallOfAnother) && self.session().id() != lost.id() => Some(last),
            _ => ends.iter().find(|end| end.session == lost.id()),
        };
        if let Some(end) = end {
            return Ok(end.clone());
        }
        if self.is_unmounted() || self.session().id() != lost.id() {
            return Err(Errno(libc::EIO));
        }
        let mut held = self.opens.keys();
        let rest = held.split_off(held.len().min(HELD_MAX));
        let token = Some(lost.welcome.token);
        let mut known = true;
        let mut outcome = connect(
            &*self.connector,
            &*self.options.clock,
            lost.welcome.wait_ms,
            &hello(&self.options, token, held.clone()),
        );
        if matches!(outcome, Err(IpcError::Errno(_) | IpcError::Sealed)) {
            // The daemon does not know the session any more: whether its last commits count stays unknown.
            known = false;
            outcome = connect(
                &*self.connector,
                &*self.options.clock,
                lost.welcome.wait_ms,
                &hello(&self.options, None, held),
            );
        }
        let connection = outcome.map_err(|error| {
            tracing::error!(%error, session = %lost.id(), "the session could not be continued");
            Errno(libc::EIO)
        })?;
        if connection.welcome.pool_uuid != lost.welcome.pool_uuid {
            tracing::error!("another pool answers in this one's place");
            return Err(Errno(libc::EIO));
        }
        let end = End {
            session: lost.id(),
            seal: connection.welcome.seal.clone().filter(|_| known),
            last_forwarded: connection.welcome.last_forwarded,
        };
        let session = Session::start(connection, &self.options, &self.opens).map_err(|_| Errno(libc::EIO))?;
        for keys in rest.chunks(HELD_MAX) {
            if session.link.call(Request::Hold { keys: keys.to_vec() }).is_err() {
                break;
            }
        }
        if let Some(made) = end.last_forwarded.made.filter(|_| end.last_forwarded.open)
            && lost.answered.load(Ordering::Acquire) >= end.last_forwarded.number
            && !self.opens.is_open(made)
        {
            // The daemon holds it open for a call that got no answer. This mount has closed it since.
            let _ = session.link.call(Request::Drop { keys: vec![made] });
        }
        tracing::info!(old = %lost.id(), new = %session.id(), seal = ?end.seal, "session continued");
        for (sum, value) in self.past.iter().zip(counts(lost)) {
            sum.fetch_add(value, Ordering::Relaxed);
        }
        *self.session.write() = session;
        lost.data.retire();
        lost.link.close();
        self.resumed.fetch_add(1, Ordering::Relaxed);
        ends.push_back(end.clone());
        if ends.len() > ENDS_MAX {
            ends.pop_front();
        }
        Ok(end)
    }

    /// Operations logged, operations forwarded, lease requests, leases given back.
    pub(crate) fn totals(&self) -> [u64; 5] {
        let now = counts(&self.session());
        std::array::from_fn(|i| self.past[i].load(Ordering::Relaxed) + now[i])
    }

    /// Ends the mount: everything durable, leases and session given back.
    pub(crate) fn unmount(&self) -> Result<()> {
        if self.is_unmounted() {
            return Ok(());
        }
        let synced = self.with_session(|session, _| session.sync_log());
        if !self.unmounted.swap(true, Ordering::AcqRel) {
            end(&self.session());
        }
        synced
    }
}

fn counts(session: &Session) -> [u64; 5] {
    [
        session.data.log().map_or(0, |log| log.last_seq().0),
        session.forwarded.load(Ordering::Relaxed),
        session.leases.acquires(),
        session.revoked.load(Ordering::Relaxed),
        session.expiring_ms.load(Ordering::Relaxed),
    ]
}

impl Drop for Mount {
    fn drop(&mut self) {
        let session = self.session();
        match self.unmounted.load(Ordering::Acquire) {
            true => session.end(),
            false => end(&session),
        }
    }
}

/// Tells the daemon what it does not know yet, and that the session ends.
fn end(session: &Session) {
    if session.is_live() {
        session.data.report();
        // The daemon frees the session's resources; a daemon that is away seals the session itself.
        let _ = session.link.call(Request::Bye);
    }
    session.end();
}
