//! Types that a mount is made from: the connector, the options, and the caches above. No behaviour.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use varve_format::InodeKey;
use varve_ipc::{ClientKind, Clock, Hello, IpcError, Link, SessionPage, SystemClock, Welcome};
use varve_media::{BlockDevice, Region, Verified};

/// Makes sessions, and makes them again after one was sealed.
pub trait Connector: Send + Sync {
    /// Opens a session.
    ///
    /// # Errors
    /// `Gone` if the daemon is away (LibFS tries again, up to `wait_ms`); anything else is final.
    fn connect(&self, hello: Hello) -> Result<Connection, IpcError>;

    /// The pool's directory, by which its mounts are found in the table of mounts. `None` for a pool without
    /// a directory, which has no mounts.
    fn pool_dir(&self) -> Option<PathBuf> {
        None
    }
}

/// An open session: its link and its mapped regions.
pub struct Connection {
    /// Link that requests go over.
    pub link: Arc<dyn Link>,
    /// The daemon's answer to [`Hello`].
    pub welcome: Welcome,
    /// Words that the daemon writes and the client reads without a call.
    pub page: Arc<dyn SessionPage>,
    /// The update log; none for a read-only session.
    pub log: Option<Arc<dyn Region>>,
    /// The NVM region for direct reads; privileged sessions only.
    pub nvm: Option<Arc<dyn Region>>,
    /// The SSD for direct reads; privileged sessions only. What it cannot read the daemon is asked for.
    pub ssd: Option<Arc<dyn BlockDevice>>,
    /// Marks of the NVM blocks that were compared with their checksums; `None`: the session keeps its own.
    pub verified: Option<Arc<Verified>>,
}

/// Policy for moving the time of the last read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Atime {
    /// A read moves it if it is not newer than the last change, or is a day old.
    #[default]
    Relative,
    /// Reads never move it.
    Never,
    /// Every read moves it.
    Strict,
}

/// The [`Atime`] of a mount, which may change while it is mounted. Clones share one value.
#[derive(Debug, Clone, Default)]
pub struct AtimePolicy(Arc<AtomicU8>);

impl AtimePolicy {
    /// Begins with `atime`.
    #[must_use]
    pub fn new(atime: Atime) -> Self {
        let policy = Self::default();
        policy.set(atime);
        policy
    }

    /// Returns the policy for the next read.
    #[inline]
    #[must_use]
    pub fn get(&self) -> Atime {
        match self.0.load(Ordering::Relaxed) {
            0 => Atime::Relative,
            1 => Atime::Never,
            _ => Atime::Strict,
        }
    }

    /// Sets the policy, from the next read on.
    pub fn set(&self, atime: Atime) {
        let number = match atime {
            Atime::Relative => 0,
            Atime::Never => 1,
            Atime::Strict => 2,
        };
        self.0.store(number, Ordering::Relaxed);
    }
}

/// Behaviour of a mount.
#[derive(Clone)]
pub struct FsOptions {
    /// Kind of client that the session serves.
    pub kind: ClientKind,
    /// No log and no changes.
    pub read_only: bool,
    /// Checks POSIX permissions here. `false` in a shim, where the kernel does (`default_permissions`).
    pub check_permissions: bool,
    /// Every change is durable against a power cut when its call returns.
    pub sync_always: bool,
    /// When reads move the time of the last read.
    pub atime: AtimePolicy,
    /// The kernel caches above, if any.
    pub observer: Option<Arc<dyn CacheObserver>>,
    /// Keeper of copies of file data in the process, if any.
    pub copies: Option<Arc<dyn Copies>>,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

impl Default for FsOptions {
    /// A linked program with permission checks and the system's clock.
    fn default() -> Self {
        Self {
            kind: ClientKind::Linked,
            read_only: false,
            check_permissions: true,
            sync_always: false,
            atime: AtimePolicy::default(),
            observer: None,
            copies: None,
            clock: Arc::new(SystemClock),
        }
    }
}

impl fmt::Debug for FsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FsOptions")
            .field("kind", &self.kind)
            .field("read_only", &self.read_only)
            .field("check_permissions", &self.check_permissions)
            .field("sync_always", &self.sync_always)
            .field("atime", &self.atime)
            .finish_non_exhaustive()
    }
}

/// The kernel caches above a shim. Called by LibFS' own threads, never by a thread that serves a request.
pub trait CacheObserver: Send + Sync {
    /// Drops cached data of a file; `len` 0 is to the end. May wait for requests that are under way in the
    /// kernel.
    fn invalidate_data(&self, key: InodeKey, offset: u64, len: u64);
    /// As [`invalidate_data`](Self::invalidate_data) for one page, but skips it if it stays locked for longer
    /// than the kernel fills a page.
    fn invalidate_unless_locked(&self, key: InodeKey, offset: u64, len: u64);
    /// Whether a thread of that number called above and is no more, not even in the kernel. Does not wait,
    /// and may be called by any thread. `false` where that is not known.
    fn has_ended(&self, thread: u32) -> bool {
        let _ = thread;
        false
    }
}

/// Copies of files' bytes that are kept beyond the calls that read them
/// ([`OpenFile::read_copy`](crate::OpenFile::read_copy)). Called by LibFS' own threads.
pub trait Copies: Send + Sync {
    /// Drops all copies of a file: no reader sees one when this returns. The lease under which they were read
    /// is given back next. Must not wait for anything that may wait for LibFS.
    fn drop_copies(&self, key: InodeKey);
}

/// Reason why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The daemon refused, or did not answer within the time to wait.
    #[error("no session: {0}")]
    Session(#[from] IpcError),
    /// This version does not understand the daemon's answer.
    #[error("the daemon's answer makes no sense: {0}")]
    Protocol(&'static str),
    /// A thread could not be started.
    #[error("no thread for the session: {0}")]
    Thread(#[from] std::io::Error),
}
