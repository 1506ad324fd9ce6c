//! One mounted pool as the process sees it: its session, whom that acts for, and what is to be known of its
//! files. Knows no descriptor and no call.

use crate::config::MountConfig;
use crate::sys::kernel::Ids;
use crate::sys::{kernel, reentry, signals};
use crate::watches::{self, Watches};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::InodeKey;
use varve_libfs::{AtimePolicy, Copies, Cred, Fs, FsOptions, SocketConnector};
use varve_media::lock::RwLock;

/// Calls by descriptor that count as one by path. On the mount these are one request at most, where a path is
/// several; an assembler makes some forty for one small file, and has ended then.
const CALLS_BY_DESCRIPTOR: u32 = 4;

/// How a call says which file it means.
#[derive(Debug, Clone, Copy)]
pub(super) enum By {
    Path,
    Descriptor,
}

/// A mounted pool.
pub struct Pool {
    /// Where it is mounted.
    pub config: MountConfig,
    pub(super) fs: OnceLock<Option<Fs>>,
    /// No session is to be had: paths of the mount are the kernel's.
    pub(super) off: AtomicBool,
    /// Effective user when the session was opened.
    session_uid: AtomicU32,
    /// Whom the session acts for, if it is an ordinary user's.
    session_cred: RwLock<Option<Cred>>,
    /// Calls that the mount made since the process began, or last made a child, while there was no session;
    /// those by path count [`CALLS_BY_DESCRIPTOR`].
    missed: AtomicU32,
    /// `O_PATH` descriptor of the mount, from which placeholders are duplicated; -1 before the first.
    anchor: AtomicI32,
    /// Inodes that are mapped for writing: opened through the mount only.
    pub mapped: RwLock<HashMap<InodeKey, ()>>,
    /// The files watched in mounts' kernels.
    pub(super) watches: Watches,
}

impl Pool {
    pub(super) fn new(config: MountConfig) -> Self {
        Self {
            config,
            fs: OnceLock::new(),
            off: AtomicBool::new(false),
            session_uid: AtomicU32::new(0),
            session_cred: RwLock::default(),
            missed: AtomicU32::new(0),
            anchor: AtomicI32::new(-1),
            mapped: RwLock::default(),
            watches: Watches::default(),
        }
    }

    /// As `parent` knows it, for a child that was forked: without a session. Who changes `mapped` holds the
    /// gate, which the thread that forked held too.
    pub(super) fn inherited(parent: &Self) -> Self {
        let child = Self::new(parent.config.clone());
        child.off.store(parent.is_off(), Ordering::Relaxed);
        child.mapped.write().clone_from(&parent.mapped.read());
        child
    }

    /// The session, if one is open.
    #[must_use]
    pub fn open(&self) -> Option<&Fs> {
        self.fs.get()?.as_ref()
    }

    /// Whether a session was opened, or refused.
    #[must_use]
    pub fn has_session(&self) -> bool {
        self.fs.get().is_some()
    }

    /// Whether no session is to be had.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }

    /// Whether there is a session, or enough was done without, `after` calls by path: many a program reads a
    /// file or two, many a child only starts a program. A signal handler opens none, since that starts
    /// threads.
    pub(super) fn is_worth_a_session(&self, after: u32, by: By) -> bool {
        let weight = match by {
            By::Path => CALLS_BY_DESCRIPTOR,
            By::Descriptor => 1,
        };
        self.has_session()
            || (self.missed.fetch_add(weight, Ordering::Relaxed) >= after.saturating_mul(CALLS_BY_DESCRIPTOR)
                && !signals::in_handler())
    }

    /// Counts the calls anew: a process that makes a child after a few calls, as a shell does for each
    /// command, would hand the files that it has opened from its session to the mount each time.
    pub(super) fn makes_child(&self) {
        self.missed.store(0, Ordering::Relaxed);
    }

    /// A path below the mount as an absolute one, ended for the kernel.
    #[must_use]
    pub fn path(&self, route: &[u8]) -> Vec<u8> {
        [self.config.mount.as_slice(), route, b"\0"].concat()
    }

    /// The user whose session it is.
    pub(super) fn session_uid(&self) -> u32 {
        self.session_uid.load(Ordering::Relaxed)
    }

    /// The descriptor that placeholders are duplicates of.
    pub(super) fn anchor(&self) -> i32 {
        self.anchor.load(Ordering::Acquire)
    }

    /// Asks the mount's root for an attribute that is not there: so its process is told something.
    pub fn ask_mount(&self, attribute: &str) {
        let name = [attribute.as_bytes(), b"\0"].concat();
        kernel::ask_attribute(&self.path(b""), &name);
    }

    /// Whether what the program may do with these ids is what its session may do: an ordinary user's session
    /// acts for that user and the groups that it had then, whoever the program is now. What the daemon would
    /// refuse later must not be acknowledged here.
    fn acts_for(&self, ids: &Ids) -> bool {
        let guard = self.session_cred.read();
        let Some(cred) = guard.as_ref() else { return true };
        cred.uid == ids.uid && cred.in_group(ids.gid) && ids.groups.iter().all(|group| cred.in_group(*group))
    }

    /// Whether there is a session that a program with these ids must not use.
    pub(super) fn is_lost_with(&self, ids: &Ids) -> bool {
        self.open().is_some() && (!ids.users.contains(&self.session_uid()) || !self.acts_for(ids))
    }

    /// Opens the session. `None` at once if the daemon is not for this user; one that is away is waited for.
    pub(super) fn open_session(&self, copies: Arc<dyn Copies>) -> Option<Fs> {
        let anchor = self.open_anchor()?;
        let ids = kernel::ids();
        self.session_uid.store(ids.users[1], Ordering::Relaxed);
        let connector = Arc::new(SocketConnector {
            path: self.config.socket.clone(),
        });
        let options = FsOptions {
            read_only: self.config.read_only,
            atime: AtimePolicy::new(self.config.atime),
            copies: Some(copies),
            ..FsOptions::default()
        };
        let fs = Fs::mount(connector, options).ok()?;
        *self.session_cred.write() = fs.acts_for();
        // Ids for files can be others than those that the daemon sees, and it may not see all groups.
        if !self.acts_for(&ids) {
            return None;
        }
        self.anchor.store(anchor, Ordering::Release);
        // Somebody may have been watching since before there was anybody to tell.
        self.ask_mount(watches::ATTRIBUTE);
        Some(fs)
    }

    fn open_anchor(&self) -> Option<i32> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = i32::try_from(kernel::open(&self.path(b""), flags, 0))
            .ok()
            .filter(|fd| *fd >= 0)?;
        // The mount may have gone, or another one may lie over it.
        if kernel::identity(fd) == Some((self.config.device, varve_format::ROOT_INO.0)) {
            Some(reentry::adopt(fd))
        } else {
            kernel::close(fd);
            None
        }
    }
}
