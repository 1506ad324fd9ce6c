//! A client that keeps no rule: frames by hand, answers read when it likes. Owns the bytes on the socket;
//! refuses to know what is asked.

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Deserialize;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use varve_ipc::{DevicePart, Hello, IpcError, Request, Response, Upcall, Welcome};

/// The daemon's frames, as `varve_ipc` has them.
#[derive(Debug, Deserialize)]
pub enum ServerFrame {
    /// To the first frame.
    Opened {
        result: Result<Box<Welcome>, IpcError>,
        descriptors: u8,
        ssd: Vec<DevicePart>,
    },
    /// To a call.
    Answer {
        id: u64,
        result: Result<Response, IpcError>,
    },
    /// Asked by the daemon.
    Upcall(Upcall),
}

/// Longest that anything is written: a daemon that takes no more is left.
const PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors that come with a welcome at most.
const KINDS: usize = 6 + 32;

/// A frame with its length.
pub fn frame(id: u64, request: &Request) -> Vec<u8> {
    let body = postcard::to_allocvec(&(id, request)).unwrap();
    let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
    bytes.extend(body);
    bytes
}

/// A connection.
pub struct Wire {
    stream: UnixStream,
    pending: Vec<u8>,
    fds: Vec<OwnedFd>,
    next_id: u64,
    /// What the daemon asked and nobody looked at.
    pub upcalls: Vec<Upcall>,
}

impl Wire {
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self {
            stream,
            pending: Vec::new(),
            fds: Vec::new(),
            next_id: 1,
            upcalls: Vec::new(),
        })
    }

    pub fn send_bytes(&self, bytes: &[u8]) -> io::Result<()> {
        (&self.stream).write_all(bytes)
    }

    /// Bytes with descriptors that nobody wants.
    pub fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(fds));
        Ok(sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )?)
    }

    /// Sends and does not wait.
    pub fn send(&mut self, request: &Request) -> io::Result<u64> {
        let id = self.next_id;
        self.next_id += 1;
        self.send_bytes(&frame(id, request))?;
        Ok(id)
    }

    /// The next frame, if one comes in time.
    fn receive(&mut self, until: Instant) -> io::Result<Option<ServerFrame>> {
        loop {
            if let Some(head) = self.pending.first_chunk::<4>() {
                let len = u32::from_le_bytes(*head) as usize;
                if self.pending.len() >= 4 + len {
                    let frame = postcard::from_bytes(&self.pending[4..4 + len])
                        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
                    self.pending.drain(..4 + len);
                    return Ok(Some(frame));
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut bytes = [0; 65_536];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KINDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(
                &self.stream,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            );
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(received) = message {
                    self.fds.extend(received);
                }
            }
            match got {
                Ok(got) if got.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.pending.extend(&bytes[..got.bytes]),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Opens a session; what came with the welcome.
    pub fn hello(&mut self, hello: Hello, patience: Duration) -> io::Result<Option<(Welcome, Given)>> {
        self.send(&Request::Hello(hello))?;
        let frame = self.receive(Instant::now() + patience)?;
        let Some(ServerFrame::Opened {
            result: Ok(welcome),
            descriptors,
            ssd,
        }) = frame
        else {
            return Ok(None);
        };
        let mut fds = std::mem::take(&mut self.fds).into_iter();
        let mut take = |kind: u8| (descriptors & kind != 0).then(|| fds.next()).flatten();
        let mut given = Given {
            page: take(1),
            log: take(2),
            backing: take(4),
            nvm: take(8),
            verified: take(32),
            ..Given::default()
        };
        take(16);
        given.ssd = ssd.into_iter().zip(fds).collect();
        Ok(Some((*welcome, given)))
    }

    /// Asks, and waits a while for the answer.
    pub fn ask(
        &mut self,
        request: &Request,
        patience: Duration,
    ) -> io::Result<Option<Result<Response, IpcError>>> {
        let id = self.send(request)?;
        let until = Instant::now() + patience;
        while let Some(frame) = self.receive(until)? {
            match frame {
                ServerFrame::Answer { id: of, result } if of == id => return Ok(Some(result)),
                ServerFrame::Upcall(upcall) => self.upcalls.push(upcall),
                _ => {}
            }
        }
        Ok(None)
    }

    /// Reads what is there and forgets it.
    pub fn drain(&mut self) {
        let _ = self.stream.set_read_timeout(Some(Duration::from_millis(5)));
        let mut bytes = [0; 65_536];
        while (&self.stream).read(&mut bytes).is_ok_and(|got| got > 0) {}
        self.pending.clear();
    }
}

/// Descriptors of a session.
#[derive(Default)]
pub struct Given {
    pub page: Option<OwnedFd>,
    pub log: Option<OwnedFd>,
    pub backing: Option<OwnedFd>,
    pub nvm: Option<OwnedFd>,
    pub verified: Option<OwnedFd>,
    pub ssd: Vec<(DevicePart, OwnedFd)>,
}
