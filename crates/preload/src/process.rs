//! The process as the library sees it: the mount, descriptors, the working directory, credentials; and how a
//! description is given to the kernel.
//!
//! Lock order: `gate`, a description's `position`, its `side`, `cwd`; `mounts` is taken alone. Code that
//! makes or closes a descriptor holds the gate for reading; code that gives descriptions to the kernel holds
//! it for writing.

pub mod forking;
mod paths;
mod pool;
mod real;

use self::paths::Cwd;
use self::pool::By;
pub use self::pool::Pool;
pub use self::real::hand_offset;
use crate::Errno;
use crate::config::{Config, PoolId};
use crate::mmap_copies::{Finder, Host, Maps};
use crate::mounts::Mounts;
use crate::ofd::{Ofd, open_flags};
use crate::stats;
use crate::sys::kernel::Ids;
use crate::sys::{kernel, ranges, reentry, signals};
use crate::table::Table;
use crate::walk::{FileId, Here, Pools, Start, Stop, Walked, fail, walk};
use crate::watches;
use crate::why::Why;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use varve_format::InodeKey;
use varve_ipc::CopiesAt;
use varve_libfs::{Copies, Cred, Fs, OpenFile};
use varve_media::lock::{Mutex, RwLock, RwLockReadGuard};

/// The state of one process.
pub struct Process {
    /// The settings of `varve run`.
    pub config: Config,
    pools: Box<[Pool]>,
    /// Descriptors that are ours.
    pub table: Table,
    /// Held while descriptors are made or closed; see the module.
    pub gate: RwLock<()>,
    cwd: RwLock<Cwd>,
    umask: AtomicU32,
    cred: RwLock<Arc<Cred>>,
    /// Whether the real ids equal the effective ones.
    pub same_ids: AtomicBool,
    /// The program has started threads.
    pub threaded: AtomicBool,
    /// Whether serving is switched off.
    off: AtomicBool,
    /// A descriptor only stands for a place (`O_PATH`), or did.
    any_path_only: AtomicBool,
    /// Files with POSIX locks of this process, and a descriptor to let them go by.
    pub locked: Mutex<HashMap<FileId, Arc<Ofd>>>,
    /// `locked` holds something.
    pub any_locked: AtomicBool,
    /// The table of mounts.
    mounts: Mutex<Mounts>,
    /// Maps that are served here.
    pub copies: Arc<Maps>,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the process, once the library is set up.
#[must_use]
pub fn current() -> Option<&'static Process> {
    crate::sys::shared::leaked(&PROCESS)
}

/// Sets the library up.
pub fn begin(config: Config) {
    stats::begin(config.stats.as_deref());
    let umask = kernel::umask(0o077);
    kernel::umask(umask);
    let pools = config.mounts.iter().cloned().map(Pool::new).collect();
    let process = Process::new(config, pools, umask);
    process.look_around();
    if stats::wanted() {
        for fd in kernel::descriptors() {
            let is_given = kernel::kind(fd).is_some_and(|(device, _)| process.pool_on(device).is_some());
            process.table.set_given(fd, is_given.then_some(Why::Inherited));
        }
    }
    process.adopt();
    PROCESS.store(Box::into_raw(Box::new(process)), Ordering::Release);
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
    let pools = parent.pools.iter().map(Pool::inherited).collect();
    let child = Process::new(parent.config.clone(), pools, parent.umask.load(Ordering::Relaxed));
    child
        .off
        .store(parent.off.load(Ordering::Relaxed), Ordering::Relaxed);
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
        self.fs(self.copies.pool()?).ok()?.copies_at()
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

impl Pools for Process {
    fn session(&self, pool: PoolId) -> Here<&Fs> {
        self.fs(pool)
    }

    fn under_mount<'a>(&self, path: &'a [u8]) -> Option<(PoolId, &'a [u8])> {
        self.config.under_mount(path)
    }

    fn back_from_above<'a>(&self, pool: PoolId, path: &'a [u8]) -> Option<(PoolId, &'a [u8])> {
        self.config.back_from_above(pool, path)
    }
}

/// The copies of files of one pool.
struct CopiesOf(PoolId, Arc<Maps>);

impl Copies for CopiesOf {
    fn drop_copies(&self, key: InodeKey) {
        self.1.drop_copies_of(FileId { pool: self.0, key });
    }
}

impl Process {
    fn new(config: Config, pools: Box<[Pool]>, umask: u32) -> Self {
        Self {
            config,
            pools,
            table: Table::default(),
            gate: RwLock::new(()),
            cwd: RwLock::default(),
            umask: AtomicU32::new(umask),
            cred: RwLock::new(Arc::new(Cred::root())),
            same_ids: AtomicBool::new(true),
            threaded: AtomicBool::new(false),
            off: AtomicBool::new(false),
            any_path_only: AtomicBool::new(false),
            locked: Mutex::default(),
            any_locked: AtomicBool::new(false),
            mounts: Mutex::default(),
            copies: Arc::default(),
        }
    }

    /// A pool.
    #[must_use]
    pub fn pool(&self, id: PoolId) -> &Pool {
        &self.pools[id.0]
    }

    /// All pools.
    pub fn pools(&self) -> impl Iterator<Item = (PoolId, &Pool)> {
        let pools = self.pools.iter().enumerate();
        pools.map(|(number, pool)| (PoolId(number), pool))
    }

    /// The pool whose files have `st_dev` `device`.
    #[must_use]
    pub fn pool_on(&self, device: u64) -> Option<PoolId> {
        self.pools()
            .find(|(_, pool)| pool.config.device == device)
            .map(|(id, _)| id)
    }

    /// Takes over what the kernel knows: ids and the working directory.
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
        let lost = self.pools.iter().any(|pool| pool.is_lost_with(&ids));
        (lost || (changed && self.threaded.load(Ordering::Relaxed))) && self.give_up()
    }

    /// The umask changed.
    pub fn set_umask(&self, mask: u32) {
        self.umask.store(mask & 0o777, Ordering::Relaxed);
    }

    /// Returns the permissions of a new file: `mode` under the umask.
    #[must_use]
    pub fn masked(&self, mode: u32) -> u32 {
        mode & 0o7777 & !self.umask.load(Ordering::Relaxed)
    }

    /// The session of a pool; opened by the first call that needs it.
    ///
    /// # Errors
    /// [`Stop::Kernel`] when there is none to be had.
    pub fn fs(&self, id: PoolId) -> Here<&Fs> {
        let pool = self.pool(id);
        if !pool.has_session() && signals::in_handler() {
            return Err(Stop::Kernel(Why::FirstCalls));
        }
        let mut first = false;
        let opened = pool.fs.get_or_init(|| {
            first = true;
            let fs = pool.open_session(Arc::new(CopiesOf(id, Arc::clone(&self.copies))));
            stats::session(fs.is_some());
            fs
        });
        if opened.is_none() {
            pool.off.store(true, Ordering::Release);
        }
        let fs = opened.as_ref().ok_or(Stop::Kernel(Why::NoSession))?;
        // The call that opened the session was not checked against the watches: the mount makes it.
        if first && fs.watch_generation() != 0 {
            return Err(Stop::Kernel(Why::Watched));
        }
        Ok(fs)
    }

    /// Makes a change of `part` of a file, of which maps may show copies.
    pub fn change<T>(&self, id: FileId, part: Range<u64>, make: impl FnOnce() -> T) -> T {
        if self.copies.pool().is_some_and(|pool| pool != id.pool) {
            return make();
        }
        self.copies.change(id.key, part, make)
    }

    /// Returns the set of watched files, if there are any. When the set changes, the watched files that are
    /// open here are opened in the kernel too, so that it raises an event when they are closed.
    #[must_use]
    pub fn watched(&self) -> Option<watches::Sets> {
        let mut sets = watches::Sets::default();
        for (id, pool) in self.pools() {
            let Some((set, news)) = pool.open().and_then(|fs| pool.watches.now(fs)) else {
                continue;
            };
            if news && !self.is_off() {
                for (fd, ofd) in self.table.all() {
                    if ofd.pool == id && set.has_open(&ofd) {
                        let _ = self.make_real(fd);
                    }
                }
            }
            sets.add(id, set);
        }
        (!sets.is_empty() && !self.is_off()).then_some(sets)
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
        let fd = kernel::fcntl(self.pool(ofd.pool).anchor(), command, 0);
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
            Err(Stop::Kernel(Why::HighNumber))
        }
    }

    /// Whether any descriptor is, or was, opened with `O_PATH`.
    pub fn has_path_only(&self) -> bool {
        self.any_path_only.load(Ordering::Acquire)
    }

    /// Whether a descriptor is served here.
    pub fn serves(&self, fd: i32) -> bool {
        fd >= 0 && self.table.has(fd)
    }

    /// Whether one of `fds` is opened with `O_PATH`.
    pub fn is_path_only(&self, mut fds: impl Iterator<Item = i32>) -> bool {
        fds.any(|fd| self.table.get(fd).is_some_and(|ofd| ofd.path_only))
    }

    /// Walks a path of a mount.
    ///
    /// # Errors
    /// As [`walk`].
    pub fn walk(&self, start: Start<'_>, follow: bool) -> Here<Walked> {
        walk(self, start, follow, &self.cred())
    }

    /// Returns the file of a description in this process' session.
    ///
    /// # Errors
    /// [`Stop::Kernel`] for an inherited description if there is no session to open it in, or too few calls
    /// were made yet to open one.
    pub fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile> {
        ofd.file_or(|| {
            let pool = self.pool(ofd.pool);
            let left = if self.is_off() {
                Some(Why::SwitchedOff)
            } else if pool.is_off() {
                Some(Why::NoSession)
            } else {
                (!pool.is_worth_a_session(self.config.session_after, By::Descriptor))
                    .then_some(Why::FirstCalls)
            };
            if let Some(why) = left {
                return Err(Stop::Kernel(why));
            }
            let lost = Stop::Kernel(Why::CannotOpen);
            let flags = open_flags(ofd.status()).ok_or(lost)?;
            let fs = self.fs(ofd.pool)?;
            let open = || fs.open(ofd.key(), flags, &Cred::root()).ok();
            // The daemon may not know a file yet that the mount has just made. Looking its name up takes its
            // directory from the mount, whose log is digested first.
            let file = open().or_else(|| {
                let start = self.start_at_root(ofd.pool, &ofd.route).ok()??;
                self.walk(start, true).ok()?;
                open()
            });
            if file.is_none() {
                ofd.set_lost();
            }
            file.ok_or(lost)
        })
    }

    /// Returns the file of a description, to be changed in this process' session.
    ///
    /// # Errors
    /// As [`file`](Self::file).
    pub fn open_id(&self, ofd: &Ofd) -> Here<FileId> {
        self.file(ofd)?;
        Ok(ofd.id())
    }

    /// Whether a file system is mounted at a path below the mount of a pool. The mount is asked only where
    /// there is no table of mounts to read.
    #[must_use]
    pub fn is_mount_point(&self, pool: PoolId, route: &[u8]) -> bool {
        let path = [self.pool(pool).config.mount.as_slice(), route].concat();
        match self.mounts.lock().has(&path) {
            Some(known) => known,
            None => std::ffi::CString::new(path).is_ok_and(|path| kernel::is_mount_point(&path)),
        }
    }

    /// Makes everything that this process logged durable.
    pub fn sync_session(&self) {
        for fs in self.pools.iter().filter_map(Pool::open) {
            let _ = fs.sync_all();
        }
    }

    /// Switches serving off and gives everything to the kernel. False if serving was off already.
    pub fn give_up(&self) -> bool {
        let was_on = !self.off.swap(true, Ordering::AcqRel);
        let _gate = self.gate.write();
        self.copies.give_all(self);
        for (fd, ofd) in self.table.all() {
            self.give_for_good(fd, &ofd, Why::SwitchedOff);
        }
        // It may be another user from now on.
        for fs in self.pools.iter().filter_map(Pool::open) {
            fs.let_go_of_devices();
        }
        was_on
    }

    /// Whether the kernel makes all calls on paths of a mount, or of all.
    #[must_use]
    pub fn is_off_anywhere(&self) -> bool {
        self.is_off() || self.pools.iter().any(Pool::is_off)
    }

    /// Whether the kernel makes all calls, on paths too.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }
}
