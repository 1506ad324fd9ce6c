//! The kernel's requests: find the key, call LibFS, reply. One module per subject; shared parts are here.

mod attr;
mod data;
mod dir;
mod lookup;
mod xattr;

use crate::caches::KernelCaches;
use crate::callers::Callers;
use crate::convert::errno;
use crate::handles::Handles;
use crate::nodes::Nodes;
use crate::transport::{Filesystem, ReplyEmpty, Request, Timeouts};
use crate::watches::Watches;
use fuser::{INodeNo, InitFlags, KernelConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::debug;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_libfs::{CachedReply, Fs, ReplyVersion};

/// Upper bound on the bytes of data in one request.
pub(crate) const DATA_MAX: usize = 1 << 20;
/// Upper bound on the kernel's background requests under way.
const MAX_BACKGROUND: u16 = 64;

type Outcome<T> = Result<T, varve_libfs::Errno>;

/// The file system behind the mount.
pub struct Shim {
    fs: Fs,
    caches: Arc<KernelCaches>,
    nodes: Nodes,
    handles: Handles,
    /// Whether this kernel can map files that are opened with direct I/O.
    maps_direct: AtomicBool,
    watches: Arc<Watches>,
    callers: Callers,
}

const STALE: varve_libfs::Errno = varve_libfs::Errno(libc::ESTALE);

/// Maps ENOENT to ESTALE for requests by inode: the inode is gone but the name may exist again, and ESTALE
/// makes the kernel repeat the lookup.
fn gone(error: varve_libfs::Errno) -> varve_libfs::Errno {
    if error.0 == libc::ENOENT { STALE } else { error }
}

/// Returns how long the kernel may cache a name and `attr`: not at all while a regular file has set-id bits,
/// else for the reply's timeouts.
///
/// A write clears those bits here, and the kernel learns of it only by the write's reply. With cached
/// attributes, it would go on granting the owner's rights to a program that another user has just changed.
fn timeouts(attr: &InodeAttr, reply: &CachedReply) -> Timeouts {
    const SET_ID: u32 = libc::S_ISUID | libc::S_ISGID;
    if attr.kind() == varve_format::FileKind::Regular && attr.mode & SET_ID != 0 {
        Timeouts {
            name: Duration::ZERO,
            attr: Duration::ZERO,
        }
    } else {
        Timeouts {
            name: reply.name_ttl(),
            attr: reply.attr_ttl(),
        }
    }
}

fn cred(request: &Request) -> Cred {
    // The kernel does not send supplementary groups; it has checked permissions itself
    // (`default_permissions`).
    Cred {
        uid: request.uid(),
        gid: request.gid(),
        groups: Vec::new(),
    }
}

impl Shim {
    /// Makes a shim over `fs`; `caches` must be the observer that `fs` was mounted with.
    #[must_use]
    pub fn new(fs: Fs, caches: Arc<KernelCaches>) -> Self {
        Self {
            watches: Watches::new(fs.clone()),
            fs,
            caches,
            nodes: Nodes::default(),
            handles: Handles::default(),
            maps_direct: AtomicBool::new(false),
            callers: Callers::new(),
        }
    }

    /// Returns the record of watched inodes.
    pub(crate) fn watches(&self) -> Arc<Watches> {
        Arc::clone(&self.watches)
    }

    fn maps_direct(&self) -> bool {
        self.maps_direct.load(Ordering::Relaxed)
    }

    /// Returns the version for the reply to a request, before its operation. Once a program under `varve run`
    /// was here, such programs get replies without a timeout: before they open a session, too.
    fn reply_version(&self, request: &Request) -> ReplyVersion {
        if self.fs.shared() {
            self.callers.expect_run();
        }
        if self.callers.is_run(request.thread()) {
            ReplyVersion::default()
        } else {
            self.fs.reply_version(request.thread())
        }
    }

    fn key(&self, ino: INodeNo) -> Outcome<InodeKey> {
        self.nodes.key(ino.0).ok_or(STALE)
    }
}

fn answer(outcome: Outcome<()>, reply: ReplyEmpty<'_>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

impl Filesystem for Shim {
    fn called(&self, request: &Request) {
        self.caches.note_calling(request.thread());
        self.fs.thread_calls(request.thread());
    }

    fn init(&self, config: &mut KernelConfig) {
        let wanted = [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_EXPORT_SUPPORT,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                debug!(?flag, "this kernel's FUSE does not have it");
            }
        }
        let maps_direct = config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        self.maps_direct.store(maps_direct.is_ok(), Ordering::Relaxed);
        let _ = config.set_max_write(DATA_MAX as u32);
        let _ = config.set_max_background(MAX_BACKGROUND);
    }

    fn destroy(&self) {
        self.caches.detach();
        self.handles.clear();
    }
}
