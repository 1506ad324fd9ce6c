//! The session for slabs: calls, what the daemon asks for, what is given back, and a daemon that is away.
//!
//! One thread has the line to the daemon: it finds a session to go on with when the one before is over, hears
//! what the daemon asks for, and gives slabs back. No call waits for a daemon that is away; readers may
//! ([`Session::wait`]).
//!
//! A slab is known here from the answer to its grant until it is given back or taken. A grant whose answer
//! was lost leaves one that nobody knows: the thread gives it back soon. Grants are made one at a time for
//! that.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use varve_far::BackendError;
use varve_format::{LeaseNo, Tier};
use varve_ipc::socket::{self, SocketLink};
use varve_ipc::{
    ClientKind, Hello, IpcError, Link, PROTOCOL_VERSION, Request, Response, SLAB_FORMERS_MAX, SLABS_AT_ONCE,
    Upcall, Welcome,
};

/// Pause between two tries to reach the daemon.
const TRY_EVERY: Duration = Duration::from_millis(20);
/// The longest pause, with a daemon that is there and refuses.
const TRY_MAX: Duration = Duration::from_secs(2);
/// How long the messages of the daemon are waited for before slabs are given back.
const LISTEN: Duration = Duration::from_millis(50);
/// How long after the time for giving slabs back it is asked which of them are still there, and how often.
const RECKON_EVERY: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 5_000 });

/// Tiers with the most slabs of each, fastest first.
pub(super) type Tiers = Vec<(Tier, u64)>;
/// With the session's slabs.
type Listed = (Tiers, BTreeSet<LeaseNo>);

/// A session with a pool's daemon.
#[derive(Debug)]
pub(super) struct Session {
    socket: PathBuf,
    wait: Duration,
    limit_slabs: usize,
    line: Mutex<Line>,
    /// The daemon is there again.
    is_back: Condvar,
    is_away: AtomicBool,
    /// Slabs that are known here. Held for a grant, for giving back, and while it is asked what is there.
    known: Mutex<BTreeSet<LeaseNo>>,
    /// Slabs that are to be given back.
    left: Mutex<Vec<LeaseNo>>,
    marks: Mutex<Marks>,
    /// An answer to a grant may have been lost.
    is_unsure: AtomicBool,
}

/// What the daemon said of slabs.
#[derive(Debug, Default)]
struct Marks {
    /// Those that it asked for, and when.
    wanted: BTreeMap<LeaseNo, Instant>,
    /// Those that it has taken.
    taken: BTreeSet<LeaseNo>,
}

/// The connection, and what continues it.
struct Line {
    link: Arc<SocketLink>,
    /// Of this session, and of those before until a later one has answered that it has their slabs: whatever
    /// answer was lost, the slabs are in a session of one of these. The newest is last.
    tokens: Vec<u128>,
    /// Since when the daemon has been away, and why.
    away: Option<(Instant, String)>,
}

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line")
            .field("away", &self.away)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Opens a session with the daemon of the pool in this directory.
    pub(super) fn open(pool: &Path, limit_slabs: u32) -> io::Result<(Arc<Self>, Tiers)> {
        let socket = pool.join("sock");
        let (link, welcome) = connect(&socket, None).map_err(|error| refused(&error))?;
        if welcome.read_only {
            let why = welcome
                .latched
                .map_or_else(String::new, |why| format!(" ({why})"));
            return Err(io::Error::other(format!(
                "it is read-only{why}; see `varve status` and give the run a directory instead"
            )));
        }
        let (tiers, _) = list(&link, &[]).map_err(|error| refused(&error))?;
        if tiers.iter().all(|(_, most)| *most == 0) {
            return Err(io::Error::other(
                "far_percent in its varve.toml is 0, or its tiers are too small for a slab: raise far_percent and \
                 start its daemon again",
            ));
        }
        let session = Arc::new(Self {
            socket,
            wait: Duration::from_millis(welcome.wait_ms),
            limit_slabs: limit_slabs as usize,
            line: Mutex::new(Line {
                link: Arc::new(link),
                tokens: vec![welcome.token],
                away: None,
            }),
            is_back: Condvar::new(),
            is_away: AtomicBool::new(false),
            known: Mutex::default(),
            left: Mutex::default(),
            marks: Mutex::default(),
            is_unsure: AtomicBool::new(false),
        });
        let listening = Arc::downgrade(&session);
        std::thread::Builder::new()
            .name("far pool".into())
            .spawn(move || listen(&listening))?;
        Ok((session, tiers))
    }

    /// Makes a call. Where the daemon is away, or goes away before it has answered, the call may have been
    /// carried out.
    pub(super) fn call(&self, request: Request) -> Result<Response, BackendError> {
        let link = {
            let line = self.line.lock();
            if let Some((_, why)) = &line.away {
                return Err(BackendError::Away(why.clone()));
            }
            Arc::clone(&line.link)
        };
        match link.call(request) {
            Ok(response) => Ok(response),
            Err(IpcError::Errno(libc::ENOSPC)) => Err(BackendError::Full),
            Err(IpcError::Errno(libc::ENXIO)) => Err(BackendError::Taken),
            Err(error @ (IpcError::Gone(_) | IpcError::Sealed)) => Err(self.note_away(&link, &error)),
            Err(error) => Err(BackendError::Io(refused(&error))),
        }
    }

    /// Notes that a link leads nowhere, unless another is there already.
    fn note_away(&self, dead: &Arc<SocketLink>, error: &IpcError) -> BackendError {
        let why = refused(error).to_string();
        let mut line = self.line.lock();
        if Arc::ptr_eq(&line.link, dead) && line.away.is_none() {
            line.away = Some((Instant::now(), why.clone()));
            self.is_away.store(true, Ordering::Release);
            self.is_unsure.store(true, Ordering::Release);
            // Its thread hears of the end of a session only by the end of the connection.
            dead.close();
        }
        BackendError::Away(why)
    }

    pub(super) fn is_away(&self) -> bool {
        self.is_away.load(Ordering::Acquire)
    }

    /// Waits for a daemon that is away, as long as the pool says, from the moment it went away on. Whether it
    /// is there.
    pub(super) fn wait(&self) -> bool {
        let mut line = self.line.lock();
        while let Some((since, _)) = line.away {
            let until = since + self.wait;
            if Instant::now() >= until {
                return false;
            }
            self.is_back.wait_until(&mut line, until);
        }
        true
    }

    /// Takes the session up again. Only its thread does; nobody waits for the lock meanwhile.
    fn resume(&self) -> Result<(), IpcError> {
        let mut tokens = self.line.lock().tokens.clone();
        let (link, welcome) = connect(&self.socket, tokens.last().copied())?;
        // From here on its slabs may be in this session, whether or not the next answer arrives.
        let former = tokens.clone();
        tokens.push(welcome.token);
        self.line.lock().tokens.clone_from(&tokens);
        if welcome.read_only {
            return Err(IpcError::Errno(libc::EROFS));
        }
        for part in former.chunks(SLAB_FORMERS_MAX) {
            list(&link, part)?;
        }
        let mut line = self.line.lock();
        line.link = Arc::new(link);
        line.tokens = vec![welcome.token];
        line.away = None;
        // What was taken meanwhile is found out, and what was granted without an answer.
        self.is_unsure.store(true, Ordering::Release);
        self.is_away.store(false, Ordering::Release);
        self.is_back.notify_all();
        Ok(())
    }

    /// Asks for a slab and notes it with `note`.
    pub(super) fn grant<T>(&self, tier: Tier, note: impl FnOnce(LeaseNo) -> T) -> Result<T, BackendError> {
        let mut known = self.known.lock();
        self.flush(&mut known)?;
        if self.is_unsure.load(Ordering::Acquire) {
            self.reckon(&mut known)?;
        }
        if known.len() >= self.limit_slabs {
            return Err(BackendError::Full);
        }
        match self.call(Request::GrantSlab { tier }) {
            Ok(Response::Slab(slab)) => {
                known.insert(slab);
                Ok(note(slab))
            }
            Ok(_) => Err(BackendError::Io(io::Error::other("another answer to a grant"))),
            Err(error) => Err(error),
        }
    }

    /// Asks which slabs are there. Gives back those of which the answer was lost, and notes those that were
    /// taken.
    fn reckon(&self, known: &mut BTreeSet<LeaseNo>) -> Result<(), BackendError> {
        self.is_unsure.store(false, Ordering::Release);
        let reckoned = self.reckon_with(known);
        if reckoned.is_err() {
            self.is_unsure.store(true, Ordering::Release);
        }
        reckoned
    }

    fn reckon_with(&self, known: &mut BTreeSet<LeaseNo>) -> Result<(), BackendError> {
        let Response::Slabs(_, there) = self.call(Request::Slabs { former: Vec::new() })? else {
            return Err(BackendError::Io(io::Error::other(
                "another answer to a list of slabs",
            )));
        };
        let there: BTreeSet<LeaseNo> = there.into_iter().map(|(slab, _)| slab).collect();
        {
            let mut marks = self.marks.lock();
            for slab in known.difference(&there) {
                marks.wanted.remove(slab);
                marks.taken.insert(*slab);
            }
        }
        known.retain(|slab| there.contains(slab));
        let unknown: Vec<LeaseNo> = there.difference(known).copied().collect();
        for slabs in unknown.chunks(SLABS_AT_ONCE) {
            self.free(slabs)?;
        }
        Ok(())
    }

    /// Gives a slab back, soon.
    pub(super) fn give_back(&self, slab: LeaseNo) {
        self.left.lock().push(slab);
    }

    /// Gives slabs back, each by itself if one of them is gone.
    fn free(&self, slabs: &[LeaseNo]) -> Result<(), BackendError> {
        let free = |slabs: &[LeaseNo]| {
            self.call(Request::FreeSlabs {
                slabs: slabs.to_vec(),
            })
        };
        match free(slabs) {
            Ok(_) => Ok(()),
            Err(error @ BackendError::Away(_)) => Err(error),
            Err(_) => {
                for slab in slabs {
                    // One that the daemon has taken is gone.
                    if let Err(error @ BackendError::Away(_)) = free(&[*slab]) {
                        return Err(error);
                    }
                }
                Ok(())
            }
        }
    }

    /// Gives back what was left. What could not be, since the daemon went away, is left again.
    fn flush(&self, known: &mut BTreeSet<LeaseNo>) -> Result<(), BackendError> {
        loop {
            let some: Vec<_> = {
                let mut left = self.left.lock();
                let from = left.len().saturating_sub(SLABS_AT_ONCE);
                left.split_off(from)
            };
            if some.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.free(&some) {
                self.left.lock().extend(some);
                return Err(error);
            }
            let mut marks = self.marks.lock();
            for slab in some {
                known.remove(&slab);
                marks.wanted.remove(&slab);
                marks.taken.remove(&slab);
            }
        }
    }

    /// Slabs that the daemon wants back.
    pub(super) fn wanted(&self) -> Vec<LeaseNo> {
        self.marks.lock().wanted.keys().copied().collect()
    }

    /// Slabs that the daemon has taken and that were not given back since.
    pub(super) fn taken(&self) -> Vec<LeaseNo> {
        self.marks.lock().taken.iter().copied().collect()
    }

    /// Does what the daemon asks for.
    fn obey(&self, link: &SocketLink, upcall: Upcall) {
        // What fails is made good when the session is taken up again.
        let _ = match upcall {
            Upcall::YieldSlabs { slabs } => {
                let now = Instant::now();
                let mut marks = self.marks.lock();
                for slab in slabs {
                    marks.wanted.entry(slab).or_insert(now);
                }
                return;
            }
            Upcall::Barrier { tx, .. } => link.call(Request::BarrierAck { tx }),
            // It never reserves any.
            Upcall::ReclaimReservations => link.call(Request::ReturnReservation { blocks: 0, of: 0 }),
            Upcall::Revoke { .. } | Upcall::Sharing | Upcall::Exclusive | Upcall::Sealed => return,
        };
    }

    /// Gives back what was left, and finds out what was taken or granted without an answer.
    fn tidy(&self, reckoned: &mut Instant) {
        let has_left = !self.left.lock().is_empty();
        let late = self.wait / 2 + RECKON_EVERY;
        let is_late = {
            let marks = self.marks.lock();
            marks.wanted.values().any(|asked| asked.elapsed() >= late)
        };
        let is_due =
            self.is_unsure.load(Ordering::Acquire) || (is_late && reckoned.elapsed() >= RECKON_EVERY);
        if !has_left && !is_due {
            return;
        }
        // Who is granted a slab does it.
        let Some(mut known) = self.known.try_lock() else {
            return;
        };
        if self.flush(&mut known).is_ok() && is_due {
            *reckoned = Instant::now();
            let _ = self.reckon(&mut known);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.line.get_mut().link.call(Request::Bye);
    }
}

/// The thread that has the line to the daemon, until the session is gone.
fn listen(session: &Weak<Session>) {
    let mut reckoned = Instant::now();
    let mut pause = TRY_EVERY;
    loop {
        let Some(held) = session.upgrade() else { return };
        let (link, is_away) = {
            let line = held.line.lock();
            (Arc::clone(&line.link), line.away.is_some())
        };
        drop(held);
        if is_away {
            // Soon, so that the daemon does not take the program for one that has ended.
            let Some(session) = session.upgrade() else { return };
            let resumed = session.resume();
            let Err(error) = resumed else {
                pause = TRY_EVERY;
                continue;
            };
            // A daemon that refuses has made a session each time.
            pause = match &error {
                IpcError::Gone(_) => TRY_EVERY,
                _ => (2 * pause).min(TRY_MAX),
            };
            if let Some((_, why)) = &mut session.line.lock().away {
                *why = refused(&error).to_string();
            }
            drop(session);
            std::thread::sleep(pause);
            continue;
        }
        let heard = link.upcall(LISTEN);
        let Some(session) = session.upgrade() else { return };
        match heard {
            Ok(upcall) => {
                if let Some(upcall) = upcall {
                    session.obey(&link, upcall);
                }
                session.tidy(&mut reckoned);
            }
            Err(error) => {
                session.note_away(&link, &error);
            }
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

/// Takes the slabs of the sessions with these tokens, and lists all.
fn list(link: &SocketLink, former: &[u128]) -> Result<Listed, IpcError> {
    let former = former.to_vec();
    match link.call(Request::Slabs { former })? {
        Response::Slabs(tiers, slabs) => Ok((tiers, slabs.into_iter().map(|(slab, _)| slab).collect())),
        _ => Err(IpcError::Protocol("another answer to a list of slabs".into())),
    }
}

/// What an error of the daemon means, and what to do.
fn refused(error: &IpcError) -> io::Error {
    let sentence = match error {
        IpcError::Errno(libc::EOPNOTSUPP) => {
            "the pool's format is from before slabs: stop its daemon, run `varve upgrade` on it, and start it again"
                .to_owned()
        }
        IpcError::Errno(libc::EROFS) => {
            "the pool is read-only: `varve status` says why; give the run a directory instead".to_owned()
        }
        IpcError::Errno(libc::EDQUOT) => {
            "this user's slabs have a quarter of far_percent already, which is the most: give the run a directory as \
             well, or raise far_percent in the pool's varve.toml"
                .to_owned()
        }
        IpcError::Errno(libc::EACCES) => {
            "the pool's daemon does not admit this user: `users` in its varve.toml says whom it admits".to_owned()
        }
        IpcError::Errno(errno) => return io::Error::from_raw_os_error(*errno),
        IpcError::Gone(why) => format!("no daemon serves the pool: start it with `varve up` ({why})"),
        IpcError::Sealed => "the pool's daemon has ended the session".to_owned(),
        other => format!("{other}; run the same version of varve as the pool's daemon"),
    };
    io::Error::other(sentence)
}
