//! The client's end of a connection.

use super::{WAITING_MAX, mask, may_wait};
use crate::sync::{Condvar, Mutex, lock};
use crate::wire::{self, CallFrame, ServerFrame};
use crate::{Admin, Descriptors, Hello, IpcError, Link, Request, Response, Upcall, UpcallQueue, Welcome};
use rustix::fd::OwnedFd;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::HashMap;
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

type Answer = Result<Response, IpcError>;

#[derive(Default)]
struct Slot {
    answer: Mutex<Option<Answer>>,
    filled: Condvar,
}

impl Slot {
    fn fill(&self, answer: Answer) {
        *lock(&self.answer) = Some(answer);
        self.filled.notify_one();
    }

    fn wait(&self) -> Answer {
        let mut answer = lock(&self.answer);
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            answer = match self.filled.wait(answer) {
                Ok(guard) => guard,
                Err(poisoned) => poisoned.into_inner(),
            };
        }
    }
}

#[derive(Default)]
struct Pending {
    slots: HashMap<u64, Arc<Slot>>,
    next_id: u64,
    waiting: usize,
    gone: Option<String>,
}

/// A connection to the daemon for one call at a time.
struct Line {
    stream: UnixStream,
    /// Buffer for answers, locked by the call that uses the line.
    buffer: Mutex<Vec<u8>>,
}

struct Shared {
    stream: UnixStream,
    line: Option<Line>,
    /// Held for one frame's write.
    writer: Mutex<()>,
    pending: Mutex<Pending>,
    /// A waiting call ended.
    fewer_waiting: Condvar,
    upcalls: UpcallQueue,
}

impl Shared {
    /// Fails every call, now and later.
    fn end(&self, why: &str) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(line) = &self.line {
            let _ = line.stream.shutdown(Shutdown::Both);
        }
        let slots = {
            let mut pending = lock(&self.pending);
            pending.gone.get_or_insert_with(|| why.to_owned());
            std::mem::take(&mut pending.slots)
        };
        self.fewer_waiting.notify_all();
        self.upcalls.close();
        for slot in slots.into_values() {
            slot.fill(Err(IpcError::Gone(why.to_owned())));
        }
    }

    /// Makes a call over the line, which the caller holds.
    fn call_alone(&self, line: &Line, buffer: &mut Vec<u8>, request: Request) -> Answer {
        let bytes = match wire::encode(&CallFrame { id: 0, request }) {
            Ok(bytes) => bytes,
            Err(error) => return Err(IpcError::Protocol(error.to_string())),
        };
        let answer = io::Write::write_all(&mut &line.stream, &bytes)
            .and_then(|()| wire::read_alone(&line.stream, buffer));
        let why = match answer {
            Ok(ServerFrame::Answer { id: 0, result }) => return result,
            Ok(_) => "the daemon answered a call that was not made".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                "the daemon closed the connection".to_owned()
            }
            Err(error) => error.to_string(),
        };
        self.end(&why);
        let first = lock(&self.pending).gone.clone();
        Err(IpcError::Gone(first.unwrap_or(why)))
    }

    fn read_all(&self) {
        let why = loop {
            match wire::read(&self.stream) {
                Ok(ServerFrame::Answer { id, result }) => {
                    let slot = lock(&self.pending).slots.remove(&id);
                    match slot {
                        Some(slot) => slot.fill(result),
                        None => break "the daemon answered a call that was not made".to_owned(),
                    }
                }
                Ok(ServerFrame::Upcall(upcall)) => {
                    if !self.upcalls.push(upcall) {
                        break "upcalls were not taken".to_owned();
                    }
                }
                Ok(ServerFrame::Opened { .. }) => break "a second answer to Hello".to_owned(),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    break "the daemon closed the connection".to_owned();
                }
                Err(error) => break error.to_string(),
            }
        };
        self.end(&why);
    }
}

/// A session's link over a Unix socket. Dropping it closes the connection, which ends the session.
pub struct SocketLink {
    shared: Arc<Shared>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl SocketLink {
    fn start(stream: UnixStream, line: Option<UnixStream>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            stream,
            line: line.map(|stream| Line {
                stream,
                buffer: Mutex::default(),
            }),
            writer: Mutex::new(()),
            pending: Mutex::default(),
            fewer_waiting: Condvar::new(),
            upcalls: UpcallQueue::new(),
        });
        let reader = std::thread::Builder::new().name("varve-link".into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.read_all()
        })?;
        Ok(Self {
            shared,
            reader: Some(reader),
        })
    }
}

impl Link for SocketLink {
    fn call(&self, request: Request) -> Answer {
        let shared = &self.shared;
        if let Some(line) = &shared.line
            && let Ok(mut buffer) = line.buffer.try_lock()
        {
            return shared.call_alone(line, &mut buffer, request);
        }
        let waits = may_wait(&request);
        let slot = Arc::new(Slot::default());
        let id = {
            let mut pending = lock(&shared.pending);
            while waits && pending.waiting >= WAITING_MAX && pending.gone.is_none() {
                pending = match shared.fewer_waiting.wait(pending) {
                    Ok(guard) => guard,
                    Err(poisoned) => poisoned.into_inner(),
                };
            }
            if let Some(why) = &pending.gone {
                return Err(IpcError::Gone(why.clone()));
            }
            pending.next_id += 1;
            pending.waiting += usize::from(waits);
            let id = pending.next_id;
            pending.slots.insert(id, Arc::clone(&slot));
            id
        };
        let answer = match wire::encode(&CallFrame { id, request }) {
            Err(error) => {
                lock(&shared.pending).slots.remove(&id);
                Err(IpcError::Protocol(error.to_string()))
            }
            Ok(bytes) => {
                let written = {
                    let _writing = lock(&shared.writer);
                    io::Write::write_all(&mut &shared.stream, &bytes)
                };
                if let Err(error) = written {
                    shared.end(&error.to_string());
                }
                slot.wait()
            }
        };
        if waits {
            lock(&shared.pending).waiting -= 1;
            shared.fewer_waiting.notify_one();
        }
        answer
    }

    fn upcall(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        self.shared.upcalls.pop(timeout)
    }

    fn close(&self) {
        self.shared.end("the session is over");
    }
}

impl Drop for SocketLink {
    fn drop(&mut self) {
        self.shared.end("the link was closed");
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Connects to the daemon at `path` and opens a session.
///
/// # Errors
/// `Gone` when no process listens there; EACCES when the socket does not admit this user, which waiting
/// cannot change; else the daemon's error.
pub fn connect(path: &Path, hello: Hello) -> Result<(SocketLink, Welcome, Descriptors), IpcError> {
    let gone = |error: io::Error| match error.kind() {
        io::ErrorKind::InvalidData => IpcError::Protocol(error.to_string()),
        _ => IpcError::Gone(format!("{}: {error}", path.display())),
    };
    let stream = UnixStream::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => IpcError::Errno(libc::EACCES),
        _ => gone(error),
    })?;
    wire::write(
        &stream,
        &CallFrame {
            id: 0,
            request: Request::Hello(hello),
        },
    )
    .map_err(gone)?;
    let (len, fds) = receive_with_descriptors(&stream).map_err(gone)?;
    let frame = wire::read_body(&stream, len).map_err(gone)?;
    let ServerFrame::Opened {
        result,
        descriptors,
        ssd,
    } = frame
    else {
        return Err(IpcError::Protocol("no answer to Hello".into()));
    };
    let welcome = *result?;
    let mut fds = fds.into_iter();
    let mut take = |kind: u8| (descriptors & kind != 0).then(|| fds.next()).flatten();
    let mut descriptors = Descriptors {
        page: take(mask::PAGE),
        log: take(mask::LOG),
        log_backing: take(mask::LOG_BACKING),
        nvm: take(mask::NVM),
        verified: take(mask::VERIFIED),
        ssd: Vec::new(),
    };
    let line = take(mask::LINE).map(UnixStream::from);
    descriptors.ssd = ssd.into_iter().zip(fds).collect();
    let link = SocketLink::start(stream, line).map_err(gone)?;
    Ok((link, welcome, descriptors))
}

/// Sends an operator's request to the daemon at `path`; returns its JSON answer.
///
/// # Errors
/// `Gone` when no process listens there; else the daemon's error.
pub fn admin(path: &Path, request: Admin) -> Result<String, IpcError> {
    let gone = |error: io::Error| IpcError::Gone(format!("{}: {error}", path.display()));
    let stream = UnixStream::connect(path).map_err(gone)?;
    wire::write(
        &stream,
        &CallFrame {
            id: 1,
            request: Request::Admin(request),
        },
    )
    .map_err(gone)?;
    match wire::read(&stream).map_err(gone)? {
        ServerFrame::Answer {
            result: Ok(Response::Json(json)),
            ..
        } => Ok(json),
        ServerFrame::Answer {
            result: Err(error), ..
        } => Err(error),
        other => Err(IpcError::Protocol(format!("unexpected answer {other:?}"))),
    }
}

/// Reads a frame's length and the descriptors that came with it.
fn receive_with_descriptors(mut stream: &UnixStream) -> io::Result<([u8; 4], Vec<OwnedFd>)> {
    let mut len = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(mask::KINDS + mask::DEVICES_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut len)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?
    .bytes;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    if got == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut len[got..])?;
    Ok((len, fds))
}
