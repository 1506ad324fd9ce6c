//! Open file descriptions: what descriptors made by `dup` share.

use crate::sys::kernel;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use varve_format::InodeKey;
use varve_libfs::OpenFile;

/// Where a description reads and writes next.
#[derive(Debug, Default)]
pub struct Position {
    /// Offset; for a directory that of the mount's directory streams: 1 and 2 stand behind the dots, then come the daemon's cookies.
    pub at: u64,
    /// The kernel has it now: its descriptors are the mount's own, and calls that still hold this must be made again there.
    pub moved: bool,
}

/// A descriptor of the kernel that is closed with its owner.
#[derive(Debug)]
pub struct KernelFd(pub i32);

impl Drop for KernelFd {
    fn drop(&mut self) {
        crate::internal::forget(self.0);
        kernel::close(self.0);
    }
}

/// An open file description that LibFS serves.
pub struct Ofd {
    /// The file.
    pub file: OpenFile,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Flags as `F_GETFL` shows them.
    status: AtomicI32,
    /// Offset.
    pub position: Mutex<Position>,
    /// Path below the mount when it was opened: where to look for it first.
    pub route: Vec<u8>,
    /// Its directory then.
    pub parent: InodeKey,
    /// The same file, open in the kernel: for locks, maps, and because it may lose its name.
    pub side: Mutex<Option<KernelFd>>,
}

/// Flags of `open` that are not remembered.
const NOT_STATUS: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC | libc::O_CLOEXEC;
/// Flags that `F_SETFL` changes.
const SETTABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_ASYNC | libc::O_DIRECT | libc::O_NOATIME;
/// What the kernel adds for every program of 64 bits.
const LARGEFILE: i32 = 0o100_000;

impl Ofd {
    /// A description at offset 0.
    #[must_use]
    pub fn new(file: OpenFile, is_dir: bool, flags: i32, route: Vec<u8>, parent: InodeKey) -> Self {
        Self {
            file,
            is_dir,
            status: AtomicI32::new(flags & !NOT_STATUS | LARGEFILE),
            position: Mutex::default(),
            route,
            parent,
            side: Mutex::new(None),
        }
    }

    /// Flags as `F_GETFL` shows them.
    #[must_use]
    pub fn status(&self) -> i32 {
        self.status.load(Ordering::Relaxed)
    }

    /// `F_SETFL`.
    pub fn set_status(&self, flags: i32) {
        self.status
            .store(self.status() & !SETTABLE | flags & SETTABLE, Ordering::Relaxed);
        if let Some(side) = &*self.side.lock() {
            kernel::fcntl(side.0, libc::F_SETFL, flags as usize);
        }
    }

    /// Whether writes go to the end.
    #[must_use]
    pub fn appends(&self) -> bool {
        self.status() & libc::O_APPEND != 0
    }

    /// Whether it was opened for reading, and for writing.
    #[must_use]
    pub fn access(&self) -> (bool, bool) {
        match self.status() & libc::O_ACCMODE {
            libc::O_RDONLY => (true, false),
            libc::O_WRONLY => (false, true),
            _ => (true, true),
        }
    }

    /// The inode.
    #[must_use]
    pub fn key(&self) -> InodeKey {
        self.file.key()
    }
}
