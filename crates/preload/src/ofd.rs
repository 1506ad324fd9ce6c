//! Open file descriptions: the state shared by descriptors that `dup` made.

use crate::config::PoolId;
use crate::sys::kernel;
use crate::sys::reentry::KernelFd;
use crate::sys::shared_offset::{Left, Record};
use crate::walk::{FileId, Here, Place, Route, Stop};
use crate::why::Why;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use varve_format::InodeKey;
use varve_libfs::{OpenFile, OpenFlags};
use varve_media::lock::{Mutex, MutexGuard};

/// Offset of a description's next read or write.
#[derive(Debug, Default)]
pub struct Position {
    /// Byte offset. For a directory, the position in the mount's directory streams: 1 and 2 stand behind the
    /// dots, the daemon's cookies follow.
    pub at: u64,
    /// The kernel keeps the offset, for other processes that have the description: calls that use it are left
    /// to the kernel.
    pub moved: bool,
}

/// A description's offset, locked against other threads and other processes that share it.
pub struct Held<'a> {
    position: MutexGuard<'a, Position>,
    record: Option<&'static Record>,
}

impl Deref for Held<'_> {
    type Target = Position;

    fn deref(&self) -> &Position {
        &self.position
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Position {
        &mut self.position
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(record) = self.record {
            record.unlock(self.position.at, self.position.moved);
        }
    }
}

/// Converts `open` flags to those of LibFS; `None` if they name no access mode.
#[must_use]
pub fn open_flags(flags: i32) -> Option<OpenFlags> {
    let (read, write) = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => (true, false),
        libc::O_WRONLY => (false, true),
        libc::O_RDWR => (true, true),
        _ => return None,
    };
    Some(OpenFlags {
        read,
        write,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        sync: flags & libc::O_SYNC == libc::O_SYNC,
        dsync: flags & libc::O_DSYNC != 0,
        direct: flags & libc::O_DIRECT != 0,
        no_atime: flags & libc::O_NOATIME != 0,
    })
}

/// An open file description that LibFS serves.
pub struct Ofd {
    /// The file in this process' session. Unset in a child that inherited the description, until the first
    /// use.
    file: OnceLock<OpenFile>,
    key: InodeKey,
    /// Pool of the file.
    pub pool: PoolId,
    /// It cannot be opened here: the kernel serves it.
    lost: AtomicBool,
    /// Whether it is a directory.
    pub is_dir: bool,
    /// Opened with `O_PATH`.
    pub path_only: bool,
    /// Flags as `F_GETFL` shows them.
    status: AtomicI32,
    position: Mutex<Position>,
    /// The shared record of offset and flags, while other processes have the description too.
    record: AtomicPtr<Record>,
    /// Its descriptors are real ones of the mount, not placeholders: any call that the kernel makes on them
    /// is right except for the offset.
    pub real: AtomicBool,
    /// Path below the mount when it was opened: the first place to look for it.
    pub route: Route,
    /// Its directory at that time.
    pub parent: InodeKey,
    /// Side descriptor: the file, open in the kernel too, for locks, maps, and files that lose their last
    /// name.
    pub side: Mutex<Option<KernelFd>>,
    /// Set for a file made without a name (`O_TMPFILE`). Then `route` and `parent` are the directory where it
    /// was made, in which it gets a temporary name when the kernel must open it.
    pub unnamed: Option<Unnamed>,
}

/// How a file was made without a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unnamed {
    /// A link may give it its first name.
    Linkable,
    /// Opened with `O_EXCL`: it never gets a name.
    ForGood,
}

/// Flags of `open` that `F_GETFL` does not show.
const NOT_STATUS: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_TRUNC | libc::O_CLOEXEC;
/// Flags of `open` that `F_GETFL` shows beside `O_PATH`.
const PATH_STATUS: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
/// Flags that `F_SETFL` changes.
const SETTABLE: i32 = libc::O_APPEND | libc::O_NONBLOCK | libc::O_ASYNC | libc::O_DIRECT | libc::O_NOATIME;
/// `O_LARGEFILE`, which the kernel adds for every 64-bit program.
const LARGEFILE: i32 = 0o100_000;

/// Returns the flags of an `open` as `F_GETFL` shows them.
#[must_use]
pub const fn status_of(flags: i32) -> i32 {
    flags & !NOT_STATUS | LARGEFILE
}

impl Ofd {
    /// Makes a description at offset 0.
    #[must_use]
    pub fn new(file: OpenFile, is_dir: bool, flags: i32, place: Place) -> Self {
        let key = file.key();
        let Place { pool, route, parent } = place;
        Self {
            file: OnceLock::from(file),
            key,
            pool,
            lost: AtomicBool::new(false),
            is_dir,
            path_only: false,
            status: AtomicI32::new(status_of(flags)),
            position: Mutex::default(),
            record: AtomicPtr::default(),
            real: AtomicBool::new(false),
            route,
            parent,
            side: Mutex::new(None),
            unnamed: None,
        }
    }

    /// Makes a description of a directory opened with `O_PATH`.
    #[must_use]
    pub fn path_only(file: OpenFile, flags: i32, place: Place) -> Self {
        let mut ofd = Self::new(file, true, flags, place);
        ofd.path_only = true;
        ofd.status = AtomicI32::new(flags & PATH_STATUS);
        ofd
    }

    /// Makes a description of a file without a name, created in the directory `parent`, whose path below the
    /// mount is `route`.
    #[must_use]
    pub fn without_name(file: OpenFile, flags: i32, place: Place) -> Self {
        let mut ofd = Self::new(file, false, flags, place);
        ofd.unnamed = Some(if flags & libc::O_EXCL == 0 {
            Unnamed::Linkable
        } else {
            Unnamed::ForGood
        });
        ofd
    }

    /// Makes a child's copy, after `fork`, of a description that the parent made [`shared`](Self::share).
    /// Takes none of the parent's locks, which other threads may have held.
    #[must_use]
    pub fn inherited(parent: &Self) -> Self {
        Self {
            file: OnceLock::new(),
            key: parent.key,
            pool: parent.pool,
            lost: AtomicBool::new(false),
            is_dir: parent.is_dir,
            path_only: parent.path_only,
            status: AtomicI32::new(parent.status.load(Ordering::Relaxed)),
            position: Mutex::default(),
            record: AtomicPtr::new(parent.record.load(Ordering::Acquire)),
            real: AtomicBool::new(true),
            route: parent.route.clone(),
            parent: parent.parent,
            side: Mutex::new(None),
            unnamed: parent.unnamed,
        }
    }

    /// Makes a description that the previous program of this process (before `exec`) had exclusively: a
    /// regular file behind real descriptors, one of which is `fd`.
    #[must_use]
    pub fn adopted(fd: i32, FileId { pool, key }: FileId, status: i32) -> Self {
        let at = u64::try_from(kernel::lseek(fd, 0, libc::SEEK_CUR)).unwrap_or(0);
        Self {
            file: OnceLock::new(),
            key,
            pool,
            lost: AtomicBool::new(false),
            is_dir: false,
            path_only: false,
            status: AtomicI32::new(status),
            position: Mutex::new(Position { at, moved: false }),
            record: AtomicPtr::default(),
            real: AtomicBool::new(true),
            route: Route::new(),
            parent: key,
            side: Mutex::new(None),
            unnamed: None,
        }
    }

    /// Whether no other process has the description or ever had it.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let position = self.position();
        !position.moved && position.record.is_none()
    }

    /// Returns the file in this process' session, opened by `open` on first use.
    ///
    /// # Errors
    /// [`Stop::Kernel`] if it cannot be opened.
    pub fn file_or(&self, open: impl FnOnce() -> Here<OpenFile>) -> Here<&OpenFile> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        if self.lost.load(Ordering::Relaxed) {
            return Err(Stop::Kernel(Why::CannotOpen));
        }
        let file = open()?;
        Ok(self.file.get_or_init(|| file))
    }

    /// Marks the file as impossible to open in this process' session.
    pub fn set_lost(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    fn record(&self) -> Option<&'static Record> {
        crate::sys::shared::leaked_in(&self.record)
    }

    /// Locks the offset for this thread.
    #[must_use]
    pub fn position(&self) -> Held<'_> {
        let mut position = self.position.lock();
        let mut record = self.record();
        if let Some(shared) = record {
            let (at, kernels) = shared.lock();
            position.at = at;
            position.moved |= kernels;
            self.status
                .store(shared.status.load(Ordering::Relaxed), Ordering::Relaxed);
            if shared.is_alone() {
                // The other processes are gone, and new ones come only by a fork of this process.
                self.record.store(std::ptr::null_mut(), Ordering::Release);
                shared.unlock(at, kernels);
                shared.leave();
                record = None;
            }
        }
        Held { position, record }
    }

    /// Prepares the description for a child that is about to share it. False if there is no free record for
    /// the offset: the kernel must keep it then.
    #[must_use]
    pub fn share(&self) -> bool {
        let position = self.position();
        if let Some(record) = position.record {
            record.join();
            return true;
        }
        let Some(record) = crate::sys::shared_offset::take(position.at, self.status()) else {
            return false;
        };
        if position.moved {
            record.lock();
            record.unlock(position.at, true);
        }
        record.join();
        self.record
            .store(std::ptr::from_ref(record).cast_mut(), Ordering::Release);
        true
    }

    /// Leaves the shared record when this process ends, or `exec`s a program that does not inherit the
    /// description, so that the other processes need not wait for it. Returns the argument for
    /// [`stay`](Self::stay).
    pub fn leave(&self) -> Option<Left> {
        self.record().map(Record::leave)
    }

    /// Undoes [`leave`](Self::leave) after a failed `exec`.
    pub fn stay(&self, left: Left) {
        let Some(record) = self.record() else { return };
        if !record.rejoin(left) {
            // The others took this process for gone.
            self.record.store(std::ptr::null_mut(), Ordering::Release);
            self.position.lock().moved = true;
        }
    }

    /// Returns the flags as `F_GETFL` shows them. A change by another process is seen after the next call
    /// that uses the offset.
    #[must_use]
    pub fn status(&self) -> i32 {
        self.status.load(Ordering::Relaxed)
    }

    /// Sets the flags, as `F_SETFL` does.
    pub fn set_status(&self, flags: i32) {
        let position = self.position();
        let new = self.status() & !SETTABLE | flags & SETTABLE;
        self.status.store(new, Ordering::Relaxed);
        if let Some(record) = position.record {
            record.status.store(new, Ordering::Relaxed);
        }
        drop(position);
        if let Some(side) = &*self.side.lock() {
            kernel::fcntl(side.0, libc::F_SETFL, flags as usize);
        }
    }

    /// Whether its descriptors are real ones of the mount.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.real.load(Ordering::Acquire)
    }

    /// Whether writes append.
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

    /// The file.
    #[must_use]
    pub fn id(&self) -> FileId {
        FileId {
            pool: self.pool,
            key: self.key,
        }
    }

    /// The inode.
    #[must_use]
    pub fn key(&self) -> InodeKey {
        self.key
    }
}

impl Drop for Ofd {
    fn drop(&mut self) {
        if let Some(record) = self.record() {
            record.leave();
        }
    }
}
