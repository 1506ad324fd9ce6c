//! The daemon's end: a listener and, for each connection, a few threads.
//!
//! The threads of a connection take turns at reading: the one that has received a request passes the turn on
//! (to an idle thread, or to a new one while there are fewer than [`WORKERS_MAX`]) before it carries the
//! request out. A waiting request thus never keeps another from being read, and a connection costs a bounded
//! number of threads whatever its client sends.

use super::{WAITING_MAX, WORKERS_MAX, mask, may_wait};
use crate::sync::{Mutex, lock};
use crate::wire::{self, CallFrame, ServerFrame};
use crate::{Descriptors, IpcError, Opened, Peer, Request, Response, Service, UpcallQueue};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg, sockopt};
use std::collections::HashMap;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use varve_format::SessionId;

/// Bounds of a [`Server`].
#[derive(Debug, Clone, Copy)]
pub struct ServerOptions {
    /// Most connections at once; a quarter is reserved for root and the daemon's own user. Each other user
    /// gets a quarter at most.
    pub connections_max: usize,
    /// Time limit for a new connection's whole first message, and for a client to receive data written to it.
    pub patience: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            patience: Duration::from_secs(10),
        }
    }
}

pub(super) struct Shared {
    service: Arc<dyn Service>,
    options: ServerOptions,
    stopping: AtomicBool,
    /// Streams of the connections, to shut them at the end, and their users.
    connections: Mutex<HashMap<u64, (Arc<UnixStream>, u32)>>,
    pub(super) threads: AtomicUsize,
}

/// Counts a thread while it runs.
struct ThreadCount(Arc<Shared>);

impl ThreadCount {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.threads.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(shared))
    }
}

impl Drop for ThreadCount {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A running server; [`stop`](Self::stop) or dropping it ends it.
pub struct Server {
    pub(super) shared: Arc<Shared>,
    listener: Arc<UnixListener>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl Server {
    /// Serves `service` on `listener`.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn start(
        listener: UnixListener,
        service: Arc<dyn Service>,
        options: ServerOptions,
    ) -> io::Result<Self> {
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared {
            service,
            options,
            stopping: AtomicBool::new(false),
            connections: Mutex::default(),
            threads: AtomicUsize::new(0),
        });
        let acceptor = std::thread::Builder::new().name("varve-accept".into()).spawn({
            let (shared, listener) = (Arc::clone(&shared), Arc::clone(&listener));
            move || accept_all(&shared, &listener)
        })?;
        Ok(Self {
            shared,
            listener,
            acceptor: Some(acceptor),
        })
    }

    /// Current number of connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        lock(&self.shared.connections).len()
    }

    /// Accepts no more connections, closes the existing ones, and waits up to `patience` for requests under
    /// way to end. Returns whether all threads ended.
    pub fn stop(mut self) -> bool {
        self.close();
        let until = Instant::now() + self.shared.options.patience;
        while self.shared.threads.load(Ordering::Acquire) > 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn close(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // A listening socket that is shut down makes `accept` return.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for (stream, _) in lock(&self.shared.connections).values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// Whether one more connection of `uid` is accepted beside those of `users`, with a limit of `most`.
pub(super) fn has_room(users: impl Iterator<Item = u32>, uid: u32, privileged: bool, most: usize) -> bool {
    let (mut all, mut own) = (0, 0);
    for user in users {
        all += 1;
        own += usize::from(user == uid);
    }
    if privileged {
        all < most
    } else {
        all < most - most / 4 && own < most.div_ceil(4)
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &UnixListener) {
    let own_uid = rustix::process::geteuid().as_raw();
    let mut next = 0_u64;
    loop {
        let accepted = listener.accept();
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                // Probably out of descriptors: let some close.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
        };
        let Ok(cred) = sockopt::socket_peercred(&stream) else {
            continue;
        };
        let peer = Peer {
            pid: cred.pid.as_raw_nonzero().get() as u32,
            uid: cred.uid.as_raw(),
            gid: cred.gid.as_raw(),
        };
        let privileged = peer.uid == 0 || peer.uid == own_uid;
        let patience = Some(shared.options.patience);
        let mut connections = lock(&shared.connections);
        let users = connections.values().map(|(_, uid)| *uid);
        if !has_room(users, peer.uid, privileged, shared.options.connections_max)
            || stream.set_write_timeout(patience).is_err()
            || stream.set_read_timeout(patience).is_err()
        {
            tracing::warn!(
                pid = peer.pid,
                uid = peer.uid,
                "connection refused: {} are open",
                connections.len()
            );
            continue;
        }
        let id = next;
        next += 1;
        let stream = Arc::new(stream);
        connections.insert(id, (Arc::clone(&stream), peer.uid));
        drop(connections);
        let count = ThreadCount::new(shared);
        let spawned = std::thread::Builder::new().name("varve-conn".into()).spawn({
            let shared = Arc::clone(shared);
            move || {
                greet(&shared, &stream, peer);
                lock(&shared.connections).remove(&id);
                drop(count);
            }
        });
        if spawned.is_err() {
            lock(&shared.connections).remove(&id);
        }
    }
}

/// A reader with a deadline, however slowly the bytes arrive.
struct Hurried<'s> {
    stream: &'s UnixStream,
    until: Instant,
}

impl Read for Hurried<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(out)
    }
}

/// Handles the first message of a connection, then its calls; returns when the connection is over.
fn greet(shared: &Arc<Shared>, stream: &Arc<UnixStream>, peer: Peer) {
    let mut stream_ref = &**stream;
    loop {
        let hurried = Hurried {
            stream,
            until: Instant::now() + shared.options.patience,
        };
        let Ok(CallFrame { id, request }) = wire::read(hurried) else {
            return;
        };
        match request {
            Request::Hello(hello) => {
                let answer = shared.service.hello(peer, hello);
                match answer {
                    Err(error) => {
                        let frame = ServerFrame::Opened {
                            result: Err(error),
                            descriptors: 0,
                            ssd: Vec::new(),
                        };
                        let _ = wire::write(stream_ref, &frame);
                    }
                    Ok(opened) => serve(shared, stream, opened),
                }
                return;
            }
            Request::Admin(admin) => {
                let result = shared.service.admin(peer, admin);
                if wire::write(stream_ref, &ServerFrame::Answer { id, result }).is_err() {
                    return;
                }
            }
            _ => {
                let result = Err(IpcError::Protocol("Hello comes first".into()));
                let _ = wire::write(stream_ref, &ServerFrame::Answer { id, result });
                let _ = stream_ref.flush();
                return;
            }
        }
    }
}

struct Connection {
    shared: Arc<Shared>,
    stream: Arc<UnixStream>,
    line: UnixStream,
    session: SessionId,
    upcalls: Arc<UpcallQueue>,
    /// The turn to read.
    reading: Mutex<()>,
    writing: Mutex<()>,
    workers: AtomicUsize,
    idle: AtomicUsize,
    waiting: AtomicUsize,
    over: AtomicBool,
}

fn serve(shared: &Arc<Shared>, stream: &Arc<UnixStream>, opened: Opened) {
    let session = opened.welcome.session;
    let upcalls = Arc::clone(&opened.upcalls);
    let line = UnixStream::pair().and_then(|(line, theirs)| {
        line.set_write_timeout(Some(shared.options.patience))?;
        send_opened(stream, opened, &theirs)?;
        stream.set_read_timeout(None)?;
        Ok(line)
    });
    let line = match line {
        Ok(line) => line,
        Err(error) => {
            tracing::debug!(%session, "the answer to Hello was not taken: {error}");
            shared.service.gone(session);
            return;
        }
    };
    let connection = Arc::new(Connection {
        shared: Arc::clone(shared),
        stream: Arc::clone(stream),
        line,
        session,
        upcalls,
        reading: Mutex::new(()),
        writing: Mutex::new(()),
        workers: AtomicUsize::new(1),
        idle: AtomicUsize::new(0),
        waiting: AtomicUsize::new(0),
        over: AtomicBool::new(false),
    });
    let count = ThreadCount::new(shared);
    let upcaller = std::thread::Builder::new().name("varve-upcall".into()).spawn({
        let connection = Arc::clone(&connection);
        move || {
            connection.send_upcalls();
            drop(count);
        }
    });
    let count = ThreadCount::new(shared);
    let line = std::thread::Builder::new().name("varve-line".into()).spawn({
        let connection = Arc::clone(&connection);
        move || {
            connection.work_alone();
            drop(count);
        }
    });
    if upcaller.is_err() || line.is_err() {
        connection.end();
        return;
    }
    connection.work(true);
}

fn send_opened(stream: &UnixStream, opened: Opened, line: &UnixStream) -> io::Result<()> {
    let Descriptors {
        page,
        log,
        log_backing,
        nvm,
        verified,
        ssd,
    } = &opened.descriptors;
    let kinds = [
        (mask::PAGE, page),
        (mask::LOG, log),
        (mask::LOG_BACKING, log_backing),
        (mask::NVM, nvm),
        (mask::VERIFIED, verified),
    ];
    let mut present = 0;
    let mut fds: Vec<BorrowedFd<'_>> = Vec::with_capacity(mask::KINDS);
    for (kind, fd) in kinds {
        if let Some(fd) = fd {
            present |= kind;
            fds.push(fd.as_fd());
        }
    }
    present |= mask::LINE;
    fds.push(line.as_fd());
    let ssd = &ssd[..ssd.len().min(mask::DEVICES_MAX)];
    fds.extend(ssd.iter().map(|(_, fd)| fd.as_fd()));
    let frame = ServerFrame::Opened {
        result: Ok(Box::new(opened.welcome)),
        descriptors: present,
        ssd: ssd.iter().map(|(part, _)| *part).collect(),
    };
    let bytes = wire::encode(&frame)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(mask::KINDS + mask::DEVICES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let sent = sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    (&*stream).write_all(&bytes[sent..])
}

/// Sends an answer. Returns whether the connection goes on.
fn answer(
    id: u64,
    result: Result<Response, IpcError>,
    write: impl Fn(&ServerFrame) -> io::Result<()>,
) -> bool {
    write(&ServerFrame::Answer { id, result })
        .or_else(|error| {
            if error.kind() == io::ErrorKind::InvalidData {
                let result = Err(IpcError::Errno(libc::EMSGSIZE));
                return write(&ServerFrame::Answer { id, result });
            }
            Err(error)
        })
        .is_ok()
}

impl Connection {
    /// Takes turns at reading and carries requests out, until the connection is over or enough threads are
    /// idle. The first worker stays to the end.
    fn work(self: &Arc<Self>, first: bool) {
        // An added worker counts as idle from its start: else the next request would add another while it
        // comes up.
        let mut counted = !first;
        loop {
            if !std::mem::take(&mut counted) {
                self.idle.fetch_add(1, Ordering::AcqRel);
            }
            let turn = lock(&self.reading);
            let frame = if self.over.load(Ordering::Acquire) {
                Err(io::ErrorKind::UnexpectedEof.into())
            } else {
                wire::read::<CallFrame>(&*self.stream)
            };
            let others_idle = self.idle.fetch_sub(1, Ordering::AcqRel) - 1;
            let frame = match frame {
                Ok(frame) => frame,
                Err(error) => {
                    self.end_because(&error);
                    break;
                }
            };
            drop(turn);
            if others_idle == 0 {
                self.add_worker();
            }
            if !self.carry_out(frame) {
                self.end();
            }
            if !first && self.idle.load(Ordering::Acquire) >= 2 {
                break;
            }
        }
        self.workers.fetch_sub(1, Ordering::AcqRel);
    }

    /// Carries out the requests that arrive on the line, one after another. If the client closes its end, the
    /// session goes on over the connection.
    fn work_alone(&self) {
        let mut buffer = Vec::new();
        let write = |frame: &ServerFrame| wire::write(&self.line, frame);
        while !self.over.load(Ordering::Acquire) {
            match wire::read_alone(&self.line, &mut buffer) {
                Ok(CallFrame {
                    request: Request::Hello(_),
                    ..
                }) => return self.end(),
                Ok(CallFrame { id, request }) => {
                    let result = self.shared.service.call(self.session, request);
                    if !answer(id, result, write) {
                        return self.end();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::InvalidData => return self.end_because(&error),
                Err(_) => return,
            }
        }
    }

    fn add_worker(self: &Arc<Self>) {
        if self.workers.fetch_add(1, Ordering::AcqRel) >= WORKERS_MAX {
            self.workers.fetch_sub(1, Ordering::AcqRel);
            return;
        }
        self.idle.fetch_add(1, Ordering::AcqRel);
        let count = ThreadCount::new(&self.shared);
        let spawned = std::thread::Builder::new().name("varve-conn".into()).spawn({
            let connection = Arc::clone(self);
            move || {
                connection.work(false);
                drop(count);
            }
        });
        if spawned.is_err() {
            self.workers.fetch_sub(1, Ordering::AcqRel);
            self.idle.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Carries out a request from the connection, of which at most [`WAITING_MAX`] may wait. Returns whether
    /// the connection goes on.
    fn carry_out(&self, frame: CallFrame) -> bool {
        let CallFrame { id, request } = frame;
        let result = match request {
            Request::Hello(_) => return false,
            request if may_wait(&request) => {
                let result = if self.waiting.fetch_add(1, Ordering::AcqRel) < WAITING_MAX {
                    self.shared.service.call(self.session, request)
                } else {
                    Err(IpcError::Errno(libc::EAGAIN))
                };
                self.waiting.fetch_sub(1, Ordering::AcqRel);
                result
            }
            request => self.shared.service.call(self.session, request),
        };
        answer(id, result, |frame| self.write(frame))
    }

    fn write(&self, frame: &ServerFrame) -> io::Result<()> {
        let bytes = wire::encode(frame)?;
        let _writing = lock(&self.writing);
        (&*self.stream).write_all(&bytes)
    }

    fn send_upcalls(&self) {
        while !self.over.load(Ordering::Acquire) {
            match self.upcalls.pop(Duration::from_secs(3600)) {
                Ok(None) => {}
                Ok(Some(upcall)) => {
                    if self.write(&ServerFrame::Upcall(upcall)).is_err() {
                        self.end();
                    }
                }
                // The session is over; answers under way are still sent, and the client closes.
                Err(_) => return,
            }
        }
    }

    fn end_because(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::InvalidData {
            tracing::warn!(session = %self.session, "connection closed: {error}");
        }
        self.end();
    }

    /// Closes the connection and tells the daemon, once.
    fn end(&self) {
        if !self.over.swap(true, Ordering::AcqRel) {
            let _ = self.stream.shutdown(Shutdown::Both);
            let _ = self.line.shutdown(Shutdown::Both);
            self.upcalls.close();
            self.shared.service.gone(self.session);
        }
    }
}
