//! The process as the library sees it: the mount, descriptors, the working directory, credentials; and how a
//! description is given to the kernel.
//!
//! Lock order: `gate`, a description's `position`, its `side`, `cwd`; `mounts` is taken alone. Code that
//! makes or closes a descriptor holds the gate for reading; code that gives descriptions to the kernel holds
//! it for writing.

pub mod forking;
mod paths;
mod real;

use self::paths::Cwd;
pub use self::real::hand_offset;
use crate::Errno;
use crate::config::Config;
use crate::mmap_copies::{Finder, Host, Maps};
use crate::mounts::Mounts;
use crate::ofd::{Ofd, open_flags};
use crate::stats;
use crate::sys::kernel::Ids;
use crate::sys::{kernel, ranges, reentry};
use crate::table::Table;
use crate::walk::{Here, Start, Stop, Walked, fail, walk};
use crate::watches::{self, Watches};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::InodeKey;
use varve_ipc::CopiesAt;
use varve_libfs::{AtimePolicy, Cred, Fs, FsOptions, OpenFile, SocketConnector};

/// The state of one process.
pub struct Process {
    /// The settings of `varve run`.
    pub config: Config,
    fs: OnceLock<Option<Fs>>,
    /// Descriptors that are served here.
    pub table: Table,
    /// Held while descriptors are made or closed; see the module.
    pub gate: RwLock<()>,
    cwd: RwLock<Cwd>,
    umask: AtomicU32,
    cred: RwLock<Arc<Cred>>,
    /// Whether the real ids equal the effective ones.
    pub same_ids: AtomicBool,
    /// Effective user when the session was opened.
    session_uid: AtomicU32,
    /// The credentials that the session acts for, if it is an ordinary user's.
    session_cred: RwLock<Option<Cred>>,
    /// Whether the program has started threads.
    pub threaded: AtomicBool,
    /// Whether serving is switched off.
    off: AtomicBool,
    /// Number of calls on inherited files, and of read-only calls, made without a session.
    missed: AtomicU32,
    /// `O_PATH` descriptor of the mount, from which placeholders are duplicated; -1 before the first.
    anchor: AtomicI32,
    /// Whether any descriptor is, or was, opened with `O_PATH`.
    any_path_only: AtomicBool,
    /// Inodes that are mapped for writing: opened through the mount only.
    pub mapped: RwLock<HashMap<InodeKey, ()>>,
    /// Inodes with POSIX locks of this process, each with the description whose side descriptor holds them.
    pub locked: Mutex<HashMap<InodeKey, Arc<Ofd>>>,
    /// Whether `locked` is not empty.
    pub any_locked: AtomicBool,
    /// The table of mounts.
    mounts: Mutex<Mounts>,
    /// Maps that are served here.
    pub copies: Arc<Maps>,
    /// The files watched in mounts' kernels.
    watches: Watches,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the process, once the library is set up.
#[must_use]
pub fn current() -> Option<&'static Process> {
    crate::sys::shared::leaked(&PROCESS)
}

/// Sets the library up. Always returns true.
#[must_use]
pub fn begin(config: Config) -> bool {
    stats::begin(config.stats.as_deref());
    let umask = kernel::umask(0o077);
    kernel::umask(umask);
    let process = Process::new(config, umask);
    process.look_around();
    if stats::wanted() {
        for fd in kernel::descriptors() {
            let mounts = kernel::kind(fd).is_some_and(|(device, _)| device == process.config.device);
            process.table.set_given(fd, mounts);
        }
    }
    process.adopt();
    PROCESS.store(Box::into_raw(Box::new(process)), Ordering::Release);
    true
}

/// Switches serving off.
pub fn switch_off() {
    if let Some(process) = current() {
        process.off.store(true, Ordering::Release);
    }
}

/// Sets the library up in a child after `fork`. Everything is new except for what the kernel hands on as
/// well. The parent's locks are not taken: threads that do not exist here may hold them.
pub fn after_fork(parent: &Process) {
    reentry::drop_all();
    ranges::forget_all();
    let child = Process::new(parent.config.clone(), parent.umask.load(Ordering::Relaxed));
    child
        .off
        .store(parent.off.load(Ordering::Relaxed), Ordering::Relaxed);
    // Maps are inherited. This map changes only under the gate, which the forking thread held.
    child.mapped.write().clone_from(&parent.mapped.read());
    child.table.inherit_given(&parent.table);
    child
        .any_path_only
        .store(parent.any_path_only.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut inherited: HashMap<*const Ofd, Arc<Ofd>> = HashMap::new();
    for (fd, ofd) in parent.table.all() {
        // A description that is not real could not be opened in the kernel, so it cannot be read here.
        if ofd.is_real() {
            let mine = inherited
                .entry(Arc::as_ptr(&ofd))
                .or_insert_with(|| Arc::new(Ofd::inherited(&ofd)));
            let _ = child.table.put(fd, Arc::clone(mine));
        }
    }
    drop(inherited);
    child.look_around();
    PROCESS.store(Box::into_raw(Box::new(child)), Ordering::Release);
}

impl Host for Process {
    fn copies_at(&self) -> Option<CopiesAt> {
        self.fs().ok()?.copies_at()
    }

    fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile> {
        self.file(ofd)
    }

    fn gate(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read()
    }

    fn side(&self, fd: i32, ofd: &Ofd) -> Result<i32, Errno> {
        self.side(fd, ofd)
    }

    fn finder(&self) -> Finder {
        || current().map(|process| (process as &dyn Host, &*process.copies))
    }
}

fn ended(mut path: Vec<u8>) -> Vec<u8> {
    path.push(0);
    path
}

impl Process {
    fn new(config: Config, umask: u32) -> Self {
        Self {
            config,
            fs: OnceLock::new(),
            table: Table::default(),
            gate: RwLock::new(()),
            cwd: RwLock::default(),
            umask: AtomicU32::new(umask),
            cred: RwLock::new(Arc::new(Cred::root())),
            same_ids: AtomicBool::new(true),
            session_uid: AtomicU32::new(0),
            session_cred: RwLock::default(),
            threaded: AtomicBool::new(false),
            off: AtomicBool::new(false),
            missed: AtomicU32::new(0),
            anchor: AtomicI32::new(-1),
            any_path_only: AtomicBool::new(false),
            mapped: RwLock::default(),
            locked: Mutex::default(),
            any_locked: AtomicBool::new(false),
            mounts: Mutex::default(),
            copies: Arc::default(),
            watches: Watches::default(),
        }
    }

    /// Reads the ids and the working directory from the kernel.
    fn look_around(&self) {
        self.refresh_ids(&kernel::ids());
        self.moved();
    }

    /// Returns the credentials that access checks use.
    #[must_use]
    pub fn cred(&self) -> Arc<Cred> {
        Arc::clone(&self.cred.read())
    }

    /// Sets the credentials that access checks use. Returns whether they changed.
    fn refresh_ids(&self, ids: &Ids) -> bool {
        self.same_ids.store(ids.same, Ordering::Relaxed);
        let mut cred = self.cred.write();
        let changed = (cred.uid, cred.gid) != (ids.uid, ids.gid) || cred.groups != ids.groups;
        *cred = Arc::new(Cred {
            uid: ids.uid,
            gid: ids.gid,
            groups: ids.groups.clone(),
        });
        changed
    }

    /// Handles a change of this thread's ids. The session stays while the process could become the session's
    /// user again at will; access checks use the new ids. With several threads each could have other ids,
    /// which only the kernel knows, so serving is switched off. Returns whether this call switched it off.
    pub fn ids_changed(&self) -> bool {
        let ids = kernel::ids();
        let changed = self.refresh_ids(&ids);
        let lost = matches!(self.fs.get(), Some(Some(_)))
            && (!ids.users.contains(&self.session_uid.load(Ordering::Relaxed))
                || !self.session_acts_for(&ids));
        (lost || (changed && self.threaded.load(Ordering::Relaxed))) && self.give_up()
    }

    /// Whether the session may do everything that the program may do with these ids: an ordinary user's
    /// session acts for that user and the groups that it had at the time, whatever the program's present ids.
    /// An operation that the daemon would refuse later must not be acknowledged here.
    fn session_acts_for(&self, ids: &Ids) -> bool {
        let guard = self.session_cred.read();
        let Some(cred) = guard.as_ref() else { return true };
        cred.uid == ids.uid && cred.in_group(ids.gid) && ids.groups.iter().all(|group| cred.in_group(*group))
    }

    /// Records the new umask.
    pub fn set_umask(&self, mask: u32) {
        self.umask.store(mask & 0o777, Ordering::Relaxed);
    }

    /// Returns the permissions of a new file: `mode` under the umask.
    #[must_use]
    pub fn masked(&self, mode: u32) -> u32 {
        mode & 0o7777 & !self.umask.load(Ordering::Relaxed)
    }

    /// Returns the session; the first call that needs one opens it.
    ///
    /// # Errors
    /// [`Stop::Kernel`] if none can be opened.
    pub fn fs(&self) -> Here<&Fs> {
        let mut first = false;
        let opened = self.fs.get_or_init(|| {
            first = true;
            let fs = self.open_session();
            stats::session(fs.is_some());
            fs
        });
        if opened.is_none() {
            self.off.store(true, Ordering::Release);
        }
        let fs = opened.as_ref().ok_or(Stop::Kernel)?;
        // The call that opened the session was not checked against the watches: the mount makes it.
        if first && fs.watch_generation() != 0 {
            return Err(Stop::Kernel);
        }
        Ok(fs)
    }

    /// Asks the mount's root for an attribute that does not exist: the attribute's name is a message to the
    /// mount's process.
    pub fn ask_mount(&self, attribute: &str) {
        let name = [attribute.as_bytes(), b"\0"].concat();
        kernel::ask_attribute(&ended(self.config.mount.clone()), &name);
    }

    /// Returns the set of watched files, if there are any. When the set changes, the watched files that are
    /// open here are opened in the kernel too, so that it raises an event when they are closed.
    #[must_use]
    pub fn watched(&self) -> Option<watches::Set> {
        let fs = self.fs.get()?.as_ref()?;
        let (set, news) = self.watches.now(fs)?;
        if self.is_off() {
            return None;
        }
        if news {
            for (fd, ofd) in self.table.all() {
                if set.has_open(&ofd) {
                    let _ = self.make_real(fd);
                }
            }
        }
        Some(set)
    }

    /// Opens the session. `None` at once if the daemon does not serve this user; waits for a daemon that is
    /// away.
    fn open_session(&self) -> Option<Fs> {
        let anchor = self.open_anchor()?;
        let ids = kernel::ids();
        self.session_uid.store(ids.users[1], Ordering::Relaxed);
        let connector = Arc::new(SocketConnector {
            path: self.config.socket.clone(),
        });
        let options = FsOptions {
            read_only: self.config.read_only,
            atime: AtimePolicy::new(self.config.atime),
            copies: Some(Arc::clone(&self.copies) as _),
            ..FsOptions::default()
        };
        let fs = Fs::mount(connector, options).ok()?;
        *self.session_cred.write() = fs.acts_for();
        // The ids for file access may differ from those that the daemon sees, and it may not see all groups.
        if !self.session_acts_for(&ids) {
            return None;
        }
        self.anchor.store(anchor, Ordering::Release);
        // A watch may have been set before there was a session to be told of it.
        self.ask_mount(watches::ATTRIBUTE);
        Some(fs)
    }

    fn open_anchor(&self) -> Option<i32> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = i32::try_from(kernel::open(&ended(self.config.mount.clone()), flags, 0))
            .ok()
            .filter(|fd| *fd >= 0)?;
        // The mount may be gone, or another one may cover it.
        if kernel::identity(fd) == Some((self.config.device, varve_format::ROOT_INO.0)) {
            Some(reentry::adopt(fd))
        } else {
            kernel::close(fd);
            None
        }
    }

    /// Reserves a descriptor number for `ofd` with a placeholder.
    ///
    /// # Errors
    /// EMFILE; [`Stop::Kernel`] for numbers beyond the table.
    pub fn place(&self, ofd: Arc<Ofd>, cloexec: bool) -> Here<i32> {
        let command = if cloexec {
            libc::F_DUPFD_CLOEXEC
        } else {
            libc::F_DUPFD
        };
        let fd = kernel::fcntl(self.anchor.load(Ordering::Acquire), command, 0);
        if fd < 0 {
            return fail(-fd as i32);
        }
        if ofd.path_only {
            self.any_path_only.store(true, Ordering::Release);
        }
        if self.table.put(fd as i32, ofd) {
            Ok(fd as i32)
        } else {
            kernel::close(fd as i32);
            Err(Stop::Kernel)
        }
    }

    /// Whether any descriptor is, or was, opened with `O_PATH`.
    pub fn has_path_only(&self) -> bool {
        self.any_path_only.load(Ordering::Acquire)
    }

    /// Whether one of `fds` is opened with `O_PATH`.
    pub fn is_path_only(&self, mut fds: impl Iterator<Item = i32>) -> bool {
        fds.any(|fd| self.table.get(fd).is_some_and(|ofd| ofd.path_only))
    }

    /// Walks a path of the mount.
    ///
    /// # Errors
    /// As [`walk`].
    pub fn walk(&self, start: Start<'_>, follow: bool) -> Here<Walked> {
        walk(self.fs()?, &self.config, start, follow, &self.cred())
    }

    /// Returns the file of a description in this process' session.
    ///
    /// # Errors
    /// [`Stop::Kernel`] for an inherited description if there is no session to open it in, or too few calls
    /// were made yet to open one.
    pub fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile> {
        ofd.file_or(|| {
            if self.off.load(Ordering::Acquire) || !self.is_worth_a_session() {
                return None;
            }
            let flags = open_flags(ofd.status())?;
            let file = self.fs().ok()?.open(ofd.key(), flags, &Cred::root()).ok();
            if file.is_none() {
                ofd.set_lost();
            }
            file
        })
    }

    /// Whether there is a session, or enough calls were made without one. Many programs read a file or two,
    /// and many children only start a program.
    fn is_worth_a_session(&self) -> bool {
        self.has_session() || self.missed.fetch_add(1, Ordering::Relaxed) >= self.config.session_after
    }

    /// Whether a session was opened, or opening one failed.
    #[must_use]
    pub fn has_session(&self) -> bool {
        self.fs.get().is_some()
    }

    /// Whether a file system is mounted at a path below the mount. Asks the mount only if the table of mounts
    /// cannot be read.
    #[must_use]
    pub fn is_mount_point(&self, route: &[u8]) -> bool {
        let path = [self.config.mount.as_slice(), route].concat();
        match self.mounts.lock().has(&path) {
            Some(known) => known,
            None => std::ffi::CString::new(path).is_ok_and(|path| kernel::is_mount_point(&path)),
        }
    }

    /// Makes everything that this process logged durable.
    pub fn sync_session(&self) {
        if let Some(Some(fs)) = self.fs.get() {
            let _ = fs.sync_all();
        }
    }

    /// Switches serving off and gives everything to the kernel. False if serving was off already.
    pub fn give_up(&self) -> bool {
        let was_on = !self.off.swap(true, Ordering::AcqRel);
        let _gate = self.gate.write();
        self.copies.give_all(self);
        for (fd, ofd) in self.table.all() {
            self.give_for_good(fd, &ofd);
        }
        was_on
    }

    /// Whether all calls are left to the kernel, including those on paths.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }
}
