//! The session for slabs: calls that outlast the daemon, what it asks for, and what is given back.
//!
//! A slab is known here from the answer to its grant until it is given back. A grant whose answer was lost leaves
//! one that nobody knows: it is given back before the next grant. Grants are made one at a time for that.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use varve_far::BackendError;
use varve_format::{LeaseNo, Tier};
use varve_ipc::socket::{self, SocketLink};
use varve_ipc::{
    ClientKind, Hello, IpcError, Link, PROTOCOL_VERSION, Request, Response, SLABS_AT_ONCE, Upcall, Welcome,
};

/// Pause between two tries to reach the daemon.
const TRY_EVERY: Duration = Duration::from_millis(20);
/// How long the messages of the daemon are waited for before slabs are given back.
const LISTEN: Duration = Duration::from_millis(100);

/// Tiers with the most slabs of each, fastest first.
pub(super) type Tiers = Vec<(Tier, u64)>;
/// With the session's slabs.
type Listed = (Tiers, Vec<(LeaseNo, Tier)>);

/// A session with a pool's daemon.
#[derive(Debug)]
pub(super) struct Session {
    socket: PathBuf,
    wait: Duration,
    limit_slabs: usize,
    line: Mutex<Line>,
    /// Held for a grant.
    slabs: Mutex<Slabs>,
    /// Slabs that are to be given back.
    left: Mutex<Vec<LeaseNo>>,
    wanted: Mutex<BTreeSet<LeaseNo>>,
    /// An answer to a grant may have been lost.
    is_unsure: AtomicBool,
}

#[derive(Debug, Default)]
struct Slabs {
    known: BTreeSet<LeaseNo>,
}

/// The connection, and what continues it.
struct Line {
    link: Arc<SocketLink>,
    /// Of the last session that answered.
    token: u128,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a session with the daemon of the pool in this directory.
    pub(super) fn open(pool: &Path, limit_slabs: u32) -> io::Result<(Arc<Self>, Tiers)> {
        let socket = pool.join("sock");
        let (link, welcome) = connect(&socket, None).map_err(|error| refused(&error))?;
        if welcome.read_only {
            let why = welcome.latched.unwrap_or_else(|| "it is read-only".into());
            return Err(io::Error::other(format!("the pool grants no slabs: {why}")));
        }
        let (tiers, _) = list(&link, None).map_err(|error| refused(&error))?;
        if tiers.iter().all(|(_, most)| *most == 0) {
            return Err(io::Error::other(
                "the pool grants no slabs: far_percent of its varve.toml is 0, or its tiers are too small",
            ));
        }
        let session = Arc::new(Self {
            socket,
            wait: Duration::from_millis(welcome.wait_ms),
            limit_slabs: limit_slabs as usize,
            line: Mutex::new(Line {
                link: Arc::new(link),
                token: welcome.token,
            }),
            slabs: Mutex::default(),
            left: Mutex::default(),
            wanted: Mutex::default(),
            is_unsure: AtomicBool::new(false),
        });
        let listening = Arc::downgrade(&session);
        std::thread::Builder::new()
            .name("far pool".into())
            .spawn(move || listen(&listening))?;
        Ok((session, tiers))
    }

    /// Makes a call that may be made twice. Waits for a daemon that is away as long as the pool says.
    pub(super) fn call(&self, request: &dyn Fn() -> Request) -> Result<Response, BackendError> {
        let begun = Instant::now();
        loop {
            let link = Arc::clone(&self.line.lock().link);
            match link.call(request()) {
                Ok(response) => return Ok(response),
                Err(IpcError::Errno(libc::ENOSPC)) => return Err(BackendError::Full),
                Err(IpcError::Errno(libc::ENXIO)) => {
                    let why = io::Error::other("the daemon has taken the slab: files needed its space");
                    return Err(BackendError::Io(why));
                }
                Err(IpcError::Errno(errno)) => {
                    return Err(BackendError::Io(io::Error::from_raw_os_error(errno)));
                }
                Err(error @ (IpcError::Protocol(_) | IpcError::Forward)) => {
                    return Err(BackendError::Io(refused(&error)));
                }
                Err(IpcError::Gone(_) | IpcError::Sealed) => self.resume(&link, begun)?,
            }
        }
    }

    /// Takes the session up again, unless another thread has.
    fn resume(&self, dead: &Arc<SocketLink>, begun: Instant) -> Result<(), BackendError> {
        loop {
            let mut line = self.line.lock();
            if !Arc::ptr_eq(&line.link, dead) {
                return Ok(());
            }
            self.is_unsure.store(true, Ordering::Release);
            let resumed = connect(&self.socket, Some(line.token)).and_then(|(link, welcome)| {
                // Until it has answered once, the session before is the one to show.
                list(&link, Some(line.token)).map(|_| (link, welcome.token))
            });
            match resumed {
                Ok((link, token)) => {
                    (line.link, line.token) = (Arc::new(link), token);
                    return Ok(());
                }
                Err(error) if begun.elapsed() >= self.wait => {
                    return Err(BackendError::Io(io::Error::new(
                        io::ErrorKind::TimedOut,
                        refused(&error),
                    )));
                }
                Err(_) => {}
            }
            drop(line);
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// Asks for a slab and notes it with `note`.
    pub(super) fn grant<T>(&self, tier: Tier, note: impl FnOnce(LeaseNo) -> T) -> Result<T, BackendError> {
        let mut slabs = self.slabs.lock();
        self.flush(&mut slabs)?;
        if self.is_unsure.swap(false, Ordering::AcqRel) {
            let given = self.give_unknown(&slabs);
            given.inspect_err(|_| self.is_unsure.store(true, Ordering::Release))?;
        }
        if slabs.known.len() >= self.limit_slabs {
            return Err(BackendError::Full);
        }
        match self.call(&|| Request::GrantSlab { tier })? {
            Response::Slab(slab) => {
                slabs.known.insert(slab);
                Ok(note(slab))
            }
            _ => Err(BackendError::Io(io::Error::other("another answer to a grant"))),
        }
    }

    /// Gives back slabs of which the answer was lost.
    fn give_unknown(&self, slabs: &Slabs) -> Result<(), BackendError> {
        let Response::Slabs(_, there) = self.call(&|| Request::Slabs { former: Vec::new() })? else {
            return Ok(());
        };
        let unknown = there.into_iter().map(|(slab, _)| slab);
        for slab in unknown.filter(|slab| !slabs.known.contains(slab)) {
            match self.call(&|| Request::FreeSlabs { slabs: vec![slab] }) {
                Ok(_) | Err(BackendError::Io(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Gives a slab back, soon.
    pub(super) fn give_back(&self, slab: LeaseNo) {
        self.left.lock().push(slab);
    }

    /// Gives back what was left. Each by itself if one of them is gone.
    fn flush(&self, slabs: &mut Slabs) -> Result<(), BackendError> {
        loop {
            let some: Vec<_> = {
                let mut left = self.left.lock();
                let from = left.len().saturating_sub(SLABS_AT_ONCE);
                left.split_off(from)
            };
            if some.is_empty() {
                return Ok(());
            }
            let together = self.call(&|| Request::FreeSlabs { slabs: some.clone() });
            if together.is_err() {
                for slab in &some {
                    // One that the daemon has taken is gone.
                    let _ = self.call(&|| Request::FreeSlabs { slabs: vec![*slab] });
                }
            }
            let mut wanted = self.wanted.lock();
            for slab in some {
                slabs.known.remove(&slab);
                wanted.remove(&slab);
            }
        }
    }

    /// Slabs that the daemon wants back.
    pub(super) fn wanted(&self) -> BTreeSet<LeaseNo> {
        self.wanted.lock().clone()
    }

    /// Does what the daemon asks for.
    fn obey(&self, link: &SocketLink, upcall: Upcall) {
        // What fails is made good when the session is taken up again.
        let _ = match upcall {
            Upcall::YieldSlabs { slabs } => {
                self.wanted.lock().extend(slabs);
                return;
            }
            Upcall::Barrier { tx, .. } => link.call(Request::BarrierAck { tx }),
            // It never reserves any.
            Upcall::ReclaimReservations => link.call(Request::ReturnReservation { blocks: 0, of: 0 }),
            Upcall::Revoke { .. } | Upcall::Sharing | Upcall::Exclusive | Upcall::Sealed => return,
        };
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.line.get_mut().link.call(Request::Bye);
    }
}

/// The thread that hears the daemon and gives slabs back, until the session is gone.
fn listen(session: &Weak<Session>) {
    loop {
        let Some(held) = session.upgrade() else { return };
        let link = Arc::clone(&held.line.lock().link);
        drop(held);
        let heard = link.upcall(LISTEN);
        let Some(session) = session.upgrade() else { return };
        match heard {
            Ok(Some(upcall)) => session.obey(&link, upcall),
            Ok(None) => {
                if !session.left.lock().is_empty()
                    && let Some(mut slabs) = session.slabs.try_lock()
                {
                    let _ = session.flush(&mut slabs);
                }
            }
            // Soon, so that the daemon does not take the program for one that has ended.
            Err(_) if session.resume(&link, Instant::now()).is_err() => std::thread::sleep(TRY_EVERY),
            Err(_) => {}
        }
    }
}

fn connect(socket: &Path, resume: Option<u128>) -> Result<(SocketLink, Welcome), IpcError> {
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume,
        held: Vec::new(),
    };
    let (link, welcome, _) = socket::connect(socket, hello)?;
    Ok((link, welcome))
}

fn list(link: &SocketLink, former: Option<u128>) -> Result<Listed, IpcError> {
    let former = former.into_iter().collect();
    match link.call(Request::Slabs { former })? {
        Response::Slabs(tiers, slabs) => Ok((tiers, slabs)),
        _ => Err(IpcError::Protocol("another answer to a list of slabs".into())),
    }
}

fn refused(error: &IpcError) -> io::Error {
    match error {
        IpcError::Errno(errno) => io::Error::from_raw_os_error(*errno),
        IpcError::Gone(why) => io::Error::other(format!("no daemon serves the pool ({why})")),
        other => io::Error::other(other.to_string()),
    }
}
