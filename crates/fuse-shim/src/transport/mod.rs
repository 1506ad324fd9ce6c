//! The mount's requests: threads that take them from the kernel, and the traits that answer them. Knows the
//! kernel's protocol and no file system.
//!
//! Requests come by io_uring where the kernel offers that ([`rings`]), and from `/dev/fuse`: there all of
//! them else, and always those that have no reply.
//!
//! `fuser` does the mounting, the handshake with the kernel, and notifications. Its own request loop replies
//! `ENOSYS` to requests that it does not know, and the kernel never sends these again; so the requests are
//! read here. docs/adr/0025 gives the reasons.

mod dispatch;
mod reply;
mod requests;
mod rings;
mod wire;

pub use reply::{
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLink, ReplyLseek,
    ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Space, Timeouts,
};
pub use requests::{AttrRequests, DataRequests, DirRequests, Filesystem, LookupRequests, XattrRequests};
pub(crate) use rings::Rings;
pub use rings::{Transport, UringSupport, uring_support};

use crate::sys;
use dispatch::{Next, dispatch};
use fuser::{Config, KernelConfig, Notifier, RequestId, TimeOrNow};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Upper bound on the bytes of a request without its data.
const HEAD_MAX: usize = 64 << 10;

/// A request's header: its caller and number.
#[derive(Debug)]
pub struct Request {
    header: wire::InHeader,
}

impl Request {
    /// Returns the caller's file-system user id.
    #[must_use]
    pub const fn uid(&self) -> u32 {
        self.header.uid
    }

    /// Returns the caller's file-system group id.
    #[must_use]
    pub const fn gid(&self) -> u32 {
        self.header.gid
    }

    /// Returns the thread that called; 0 if it is in no PID namespace of this process.
    #[must_use]
    pub const fn thread(&self) -> u32 {
        self.header.pid
    }

    /// Returns the request's number.
    #[must_use]
    pub const fn unique(&self) -> RequestId {
        RequestId(self.header.unique)
    }
}

/// The changes requested by a `setattr`.
#[derive(Debug, Clone, Copy)]
pub struct Changes {
    /// Mode, with the kind of file.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Time of the last read.
    pub atime: Option<TimeOrNow>,
    /// Time of the last change of the data.
    pub mtime: Option<TimeOrNow>,
    /// Whether set-id bits are to be cleared, since the caller has no right to keep them.
    pub kill_set_id: bool,
}

/// Passes `fuser`'s call of `init`, the only one while it mounts, to a file system.
struct Handshake<F> {
    fs: Arc<F>,
    rings: Arc<Rings>,
}

impl<F: Filesystem> fuser::Filesystem for Handshake<F> {
    fn init(&mut self, _request: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        self.fs.init(config);
        self.rings.negotiate(config);
        Ok(())
    }
}

/// A mount whose requests are not read yet.
pub(crate) struct Session<F: Filesystem> {
    mounted: fuser::Session<Handshake<F>>,
    fs: Arc<F>,
    rings: Arc<Rings>,
}

/// A mount whose requests threads of this process answer. Dropping it unmounts.
pub(crate) struct Served {
    /// Thread that waits for the threads that serve; it ends with the mount.
    all: JoinHandle<io::Result<()>>,
    transport: Transport,
    /// Unmounts when dropped.
    _mounted: Box<dyn Send>,
}

impl<F: Filesystem> Session<F> {
    /// Mounts `fs` at `mountpoint`.
    pub(crate) fn new(fs: F, mountpoint: &Path, rings: Rings, config: &Config) -> io::Result<Self> {
        Self::with(fs, rings, |handshake| {
            fuser::Session::new(handshake, mountpoint, config)
        })
    }

    /// Serves an existing mount over its device. The caller has to unmount it.
    pub(crate) fn over(fs: F, device: OwnedFd, rings: Rings, config: Config) -> io::Result<Self> {
        Self::with(fs, rings, |handshake| {
            fuser::Session::from_fd(handshake, device, config.acl, config)
        })
    }

    fn with(
        fs: F,
        rings: Rings,
        mount: impl FnOnce(Handshake<F>) -> io::Result<fuser::Session<Handshake<F>>>,
    ) -> io::Result<Self> {
        let (fs, rings) = (Arc::new(fs), Arc::new(rings));
        let mounted = mount(Handshake {
            fs: Arc::clone(&fs),
            rings: Arc::clone(&rings),
        })?;
        Ok(Self { mounted, fs, rings })
    }

    pub(crate) fn notifier(&self) -> Notifier {
        self.mounted.notifier()
    }

    /// Answers requests from `threads` threads that read the device, and from those of the rings.
    pub(crate) fn spawn(self, threads: usize) -> io::Result<Served> {
        let first = File::from(self.mounted.as_fd().try_clone_to_owned()?);
        let mut devices = Vec::with_capacity(threads);
        for _ in 1..threads {
            devices.push(sys::one_more(&first)?);
        }
        devices.push(first);
        let (fs, rings) = (self.fs, self.rings);
        let on_rings = rings.start(&fs, &devices[0])?;
        let (transport, data_max) = (rings.transport(), rings.data_max());
        let all = std::thread::Builder::new()
            .name("varve-fuse".into())
            .spawn(move || serve_all(fs, devices, data_max, on_rings))?;
        Ok(Served {
            all,
            transport,
            _mounted: Box::new(self.mounted),
        })
    }
}

impl Served {
    pub(crate) const fn transport(&self) -> Transport {
        self.transport
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.all.is_finished()
    }

    /// Waits until the mount has ended and the last request is answered.
    pub(crate) fn join(self) -> io::Result<()> {
        let ended = self.all.join();
        ended.map_err(|_| io::Error::other("a thread that answers the mount's requests panicked"))?
    }
}

fn serve_all<F: Filesystem>(
    fs: Arc<F>,
    devices: Vec<File>,
    data_max: usize,
    mut threads: Vec<JoinHandle<io::Result<()>>>,
) -> io::Result<()> {
    for (number, device) in devices.into_iter().enumerate() {
        let fs = Arc::clone(&fs);
        let thread = std::thread::Builder::new()
            .name(format!("varve-fuse-{number}"))
            .spawn(move || serve(&*fs, &device, data_max))?;
        threads.push(thread);
    }
    let mut outcome = Ok(());
    for thread in threads {
        let ended = thread.join();
        let ended =
            ended.unwrap_or_else(|_| Err(io::Error::other("a thread that answers requests panicked")));
        outcome = outcome.and(ended);
    }
    fs.destroy();
    outcome
}

/// Reads requests and answers them, until the mount ends.
fn serve(fs: &impl Filesystem, mut device: &File, data_max: usize) -> io::Result<()> {
    let mut buffer = vec![0; data_max + HEAD_MAX];
    loop {
        match device.read(&mut buffer) {
            Ok(len) => {
                if dispatch(fs, device, &buffer[..len]) == Next::End {
                    return Ok(());
                }
            }
            Err(error) => match error.raw_os_error() {
                // Interrupted before it was read; a signal; no request pending.
                Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                Some(libc::ENODEV) => return Ok(()),
                _ => return Err(error),
            },
        }
    }
}
