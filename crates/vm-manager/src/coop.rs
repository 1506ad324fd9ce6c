//! Cooperation: operations that only a process can do on its own memory, requested by the manager over a Unix
//! socket.
//!
//! A cooperating program calls [`Cooperator::start`] with its arenas. The thread that this starts gives back
//! memory that the program reports as free, switches same-page merging, and registers for write tracking. It
//! never touches memory outside of the arenas, whatever the manager requests.

use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::sys::Arenas;
use crate::types::PAGE_BYTES;

/// Environment variable with the path of the manager's socket.
pub const SOCKET_VARIABLE: &str = "VARVE_VM_SOCKET";
/// Most arenas a process may announce.
pub const MAX_ARENAS: usize = 64;
const MAGIC: u64 = 0x4556_5241_564d_5631;

/// A request of the manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Request {
    /// Give back the memory in the range that the program reports as free.
    Release = 1,
    /// Allow same-page merging.
    Mergeable = 2,
    /// Deny same-page merging; merged pages become private again.
    Unmergeable = 3,
    /// Register the arenas for write tracking.
    TrackWrites = 4,
    /// End write tracking.
    UntrackWrites = 5,
}

impl Request {
    const fn from_code(code: u64) -> Option<Self> {
        Some(match code {
            1 => Self::Release,
            2 => Self::Mergeable,
            3 => Self::Unmergeable,
            4 => Self::TrackWrites,
            5 => Self::UntrackWrites,
            _ => return None,
        })
    }
}

fn read_words<const N: usize>(from: &mut impl Read) -> io::Result<[u64; N]> {
    let mut out = [0u64; N];
    for word in &mut out {
        let mut bytes = [0u8; 8];
        from.read_exact(&mut bytes)?;
        *word = u64::from_le_bytes(bytes);
    }
    Ok(out)
}

fn write_words(to: &mut impl Write, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    to.write_all(&bytes)
}

/// The manager's end of the connection to one cooperating process.
#[derive(Debug)]
pub struct CoopLink {
    stream: UnixStream,
    arenas: Vec<Range<u64>>,
}

impl CoopLink {
    /// Receives the greeting of a process that connected.
    ///
    /// # Errors
    /// `InvalidData` for a malformed greeting; a timeout after a second.
    pub fn accept(mut stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let [magic, count] = read_words(&mut stream)?;
        if magic != MAGIC || count as usize > MAX_ARENAS {
            return Err(bad("not a cooperating process"));
        }
        let mut arenas = Vec::new();
        for _ in 0..count {
            let [start, end] = read_words(&mut stream)?;
            if start >= end || start % PAGE_BYTES != 0 || end % PAGE_BYTES != 0 {
                return Err(bad("an arena is not a page-aligned range"));
            }
            arenas.push(start..end);
        }
        Ok(Self { stream, arenas })
    }

    /// Returns the parts of a range of page numbers that lie in the arenas.
    pub fn clip(&self, (from, to): (u64, u64)) -> Vec<(u64, u64)> {
        let cut = |a: &Range<u64>| (from.max(a.start / PAGE_BYTES), to.min(a.end / PAGE_BYTES));
        self.arenas.iter().map(cut).filter(|(f, t)| f < t).collect()
    }

    /// Sends a request about a range of bytes; returns the number of affected bytes.
    ///
    /// # Errors
    /// The errno that the process reports, or that of a broken connection.
    pub fn ask(&mut self, request: Request, range: Range<u64>) -> io::Result<u64> {
        write_words(&mut self.stream, &[request as u64, range.start, range.end])?;
        let [errno, bytes] = read_words(&mut self.stream)?;
        match i32::try_from(errno) {
            Ok(0) => Ok(bytes),
            Ok(code) => Err(io::Error::from_raw_os_error(code)),
            Err(_) => Err(io::Error::from_raw_os_error(libc::EPROTO)),
        }
    }
}

/// Calls its second argument, `drop_range`, for the parts of the range that hold nothing and may be dropped.
/// Must lock them against reuse until `drop_range` returns.
pub type ReleaseHook = Box<dyn Fn(Range<u64>, &mut dyn FnMut(Range<u64>)) + Send>;

/// The process' end: the thread that carries out the manager's requests. It ends when the manager leaves.
#[derive(Debug)]
pub struct Cooperator {
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Cooperator {
    /// Connects to the manager named by [`SOCKET_VARIABLE`]; `None` when there is none. Pages of the arenas
    /// are dropped only where `release` says that they hold nothing.
    ///
    /// # Errors
    /// The manager cannot be reached, or there are more than [`MAX_ARENAS`] arenas.
    pub fn start(arenas: Arenas, release: ReleaseHook) -> io::Result<Option<Self>> {
        let Some(path) = std::env::var_os(SOCKET_VARIABLE) else {
            return Ok(None);
        };
        if arenas.ranges().len() > MAX_ARENAS {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut stream = UnixStream::connect(path)?;
        let mut hello = vec![MAGIC, arenas.ranges().len() as u64];
        hello.extend(arenas.ranges().iter().flat_map(|a| [a.start, a.end]));
        write_words(&mut stream, &hello)?;
        let mut server = Server {
            stream,
            arenas,
            release,
            tracking: None,
        };
        let thread = std::thread::Builder::new()
            .name("varve-coop".to_owned())
            .spawn(move || server.serve())?;
        Ok(Some(Self { thread: Some(thread) }))
    }

    /// Waits until the manager has left.
    pub fn join(mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Server {
    stream: UnixStream,
    arenas: Arenas,
    release: ReleaseHook,
    tracking: Option<crate::sys::WriteTracking>,
}

impl Server {
    fn serve(&mut self) {
        while let Ok([code, start, end]) = read_words(&mut self.stream) {
            let result = self.handle(code, start..end);
            let reply = match result {
                Ok(bytes) => [0, bytes],
                Err(e) => [e.raw_os_error().unwrap_or(libc::EIO).unsigned_abs().into(), 0],
            };
            if write_words(&mut self.stream, &reply).is_err() {
                return;
            }
        }
    }

    fn handle(&mut self, code: u64, range: Range<u64>) -> io::Result<u64> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let request = Request::from_code(code).ok_or_else(invalid)?;
        match request {
            Request::TrackWrites => return self.track(),
            Request::UntrackWrites => {
                self.tracking = None;
                return Ok(0);
            }
            Request::Release | Request::Mergeable | Request::Unmergeable => {}
        }
        let mine = |a: &Range<u64>| a.start <= range.start && range.end <= a.end;
        let aligned = range.start.is_multiple_of(PAGE_BYTES)
            && range.end.is_multiple_of(PAGE_BYTES)
            && range.start < range.end;
        if !aligned || !self.arenas.ranges().iter().any(mine) {
            return Err(invalid());
        }
        let len = range.end - range.start;
        match request {
            Request::Mergeable => self.arenas.set_mergeable(&range, true).map(|()| len),
            Request::Unmergeable => self.arenas.set_mergeable(&range, false).map(|()| len),
            _ => {
                let mut freed = 0;
                (self.release)(range.clone(), &mut |part| {
                    let inside = range.start <= part.start && part.end <= range.end;
                    if inside && self.arenas.drop_pages(&part).is_ok() {
                        freed += part.end - part.start;
                    }
                });
                Ok(freed)
            }
        }
    }

    fn track(&mut self) -> io::Result<u64> {
        let tracking = crate::sys::WriteTracking::open()?;
        let mut bytes = 0;
        for arena in self.arenas.ranges() {
            tracking.register(arena.start, arena.end - arena.start)?;
            bytes += arena.end - arena.start;
        }
        self.tracking = Some(tracking);
        Ok(bytes)
    }
}
