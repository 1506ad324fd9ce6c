//! The process as the library sees it: the mount, descriptors, the working directory, whose rights count; and how a description is given to
//! the kernel.
//!
//! Locks, in this order: `gate`, a description's `position`, its `side`, `cwd`; `mounts` alone. The gate is held for reading by whatever makes or ends a
//! descriptor, for writing by whatever gives descriptions to the kernel.

use crate::config::{self, Alone, Config};
use crate::copies::Maps;
use crate::mounts::Mounts;
use crate::ofd::{KernelFd, Ofd};
use crate::sys::kernel::Ids;
use crate::sys::together::Left;
use crate::sys::{kernel, ranges, thread};
use crate::table::Table;
use crate::walk::{Here, Route, Start, Stop, Walked, fail, walk};
use crate::{Errno, internal, stats};
use parking_lot::{Mutex, RwLock};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::{Generation, Ino, InodeAttr, InodeKey};
use varve_libfs::{Cred, Fs, FsOptions, OpenFile, SocketConnector};

/// Calls on inherited files that the kernel makes before it is worth a session: many a child only starts a program.
const MISSES: u32 = 16;

/// The working directory.
#[derive(Debug, Clone, Default)]
struct Cwd {
    /// Below the mount, if it is there.
    route: Option<Route>,
    key: Option<InodeKey>,
    /// Its path, if it is elsewhere.
    outside: Option<Vec<u8>>,
}

/// One process.
pub struct Process {
    /// What `varve run` said.
    pub config: Config,
    fs: OnceLock<Option<Fs>>,
    /// Descriptors that are ours.
    pub table: Table,
    /// Held while descriptors are made or ended; see the module.
    pub gate: RwLock<()>,
    cwd: RwLock<Cwd>,
    umask: AtomicU32,
    cred: RwLock<Arc<Cred>>,
    /// Real ids are the effective ones.
    pub same_ids: AtomicBool,
    /// Effective user when the session was opened.
    session_uid: AtomicU32,
    /// Whom the session acts for, if it is an ordinary user's.
    session_cred: RwLock<Option<Cred>>,
    /// The program has started threads.
    pub threaded: AtomicBool,
    /// Nothing new is served.
    off: AtomicBool,
    /// Calls on inherited files while there was no session.
    missed: AtomicU32,
    /// `O_PATH` descriptor of the mount, from which placeholders are duplicated; -1 before the first.
    anchor: AtomicI32,
    /// Directories behind descriptors of the kernel that only stand for a place (`O_PATH`): paths from there are served.
    places: RwLock<HashMap<i32, (InodeKey, Route)>>,
    /// `places` holds, or held, something.
    any_places: AtomicBool,
    /// Inodes that are mapped for writing: opened through the mount only.
    pub mapped: RwLock<HashMap<InodeKey, ()>>,
    /// Inodes with POSIX locks of this process, and a descriptor to let them go by.
    pub locked: Mutex<HashMap<InodeKey, Arc<Ofd>>>,
    /// `locked` holds something.
    pub any_locked: AtomicBool,
    /// What is mounted where.
    mounts: Mutex<Mounts>,
    /// Maps that are served here.
    pub copies: Arc<Maps>,
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());

/// The process, once the library is set up.
#[must_use]
pub fn current() -> Option<&'static Process> {
    crate::sys::shared::leaked(&PROCESS)
}

/// Sets the library up. False if the mount is not the one that was meant.
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

/// Serves nothing from now on.
pub fn switch_off() {
    if let Some(process) = current() {
        process.off.store(true, Ordering::Release);
    }
}

/// In a child after `fork`: everything anew, but what the kernel hands on too. What the parent had is not touched: its locks may be held by
/// threads that are not here.
pub fn after_fork(parent: &Process) {
    internal::drop_all();
    ranges::forget_all();
    let child = Process::new(parent.config.clone(), parent.umask.load(Ordering::Relaxed));
    child
        .off
        .store(parent.off.load(Ordering::Relaxed), Ordering::Relaxed);
    // Maps are inherited. Who changes this holds the gate, which the thread that forked held too.
    child.mapped.write().clone_from(&parent.mapped.read());
    child.table.inherit_given(&parent.table);
    child.places.write().clone_from(&parent.places.read());
    child
        .any_places
        .store(parent.any_places.load(Ordering::Relaxed), Ordering::Relaxed);
    let mut inherited: HashMap<*const Ofd, Arc<Ofd>> = HashMap::new();
    for (fd, ofd) in parent.table.all() {
        // One that is not real could not be given to the kernel, and nobody can read it here.
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
            places: RwLock::default(),
            any_places: AtomicBool::new(false),
            mapped: RwLock::default(),
            locked: Mutex::default(),
            any_locked: AtomicBool::new(false),
            mounts: Mutex::default(),
            copies: Arc::default(),
        }
    }

    /// Takes over what the kernel knows: ids and the working directory.
    fn look_around(&self) {
        self.refresh_ids(&kernel::ids());
        self.moved();
    }

    /// Whose rights count.
    #[must_use]
    pub fn cred(&self) -> Arc<Cred> {
        Arc::clone(&self.cred.read())
    }

    /// Whose rights count from now on; whether they are others than before.
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

    /// This thread changed its ids. The session stays while the process could become its user again at will; the rights that are looked at
    /// are the new ones. With several threads each could have others: the kernel knows. Answers whether serving was switched off for it.
    pub fn ids_changed(&self) -> bool {
        let ids = kernel::ids();
        let changed = self.refresh_ids(&ids);
        let lost = matches!(self.fs.get(), Some(Some(_)))
            && (!ids.users.contains(&self.session_uid.load(Ordering::Relaxed))
                || !self.session_acts_for(&ids));
        (lost || (changed && self.threaded.load(Ordering::Relaxed))) && self.give_up()
    }

    /// Whether what the program may do with these ids is what its session may do: an ordinary user's session acts for that user and the groups
    /// that it had then, whoever the program is now. What the daemon would refuse later must not be acknowledged here.
    fn session_acts_for(&self, ids: &Ids) -> bool {
        let guard = self.session_cred.read();
        let Some(cred) = guard.as_ref() else { return true };
        cred.uid == ids.uid && cred.in_group(ids.gid) && ids.groups.iter().all(|group| cred.in_group(*group))
    }

    /// The umask changed.
    pub fn set_umask(&self, mask: u32) {
        self.umask.store(mask & 0o777, Ordering::Relaxed);
    }

    /// Permissions of something new.
    #[must_use]
    pub fn masked(&self, mode: u32) -> u32 {
        mode & 0o7777 & !self.umask.load(Ordering::Relaxed)
    }

    /// The session; opened by the first call that needs it.
    ///
    /// # Errors
    /// [`Stop::Kernel`] when there is none to be had.
    pub fn fs(&self) -> Here<&Fs> {
        let opened = self.fs.get_or_init(|| {
            let anchor = self.open_anchor()?;
            let ids = kernel::ids();
            self.session_uid.store(ids.users[1], Ordering::Relaxed);
            let connector = Arc::new(SocketConnector {
                path: self.config.socket.clone(),
            });
            let options = FsOptions {
                read_only: self.config.read_only,
                copies: Some(Arc::clone(&self.copies) as _),
                ..FsOptions::default()
            };
            let fs = Fs::mount(connector, options).ok()?;
            *self.session_cred.write() = fs.acts_for();
            // Ids for files can be others than those that the daemon sees, and it may not see all groups.
            if !self.session_acts_for(&ids) {
                return None;
            }
            self.anchor.store(anchor, Ordering::Release);
            Some(fs)
        });
        if opened.is_none() {
            self.off.store(true, Ordering::Release);
        }
        opened.as_ref().ok_or(Stop::Kernel)
    }

    fn open_anchor(&self) -> Option<i32> {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let fd = i32::try_from(kernel::open(&ended(self.config.mount.clone()), flags, 0))
            .ok()
            .filter(|fd| *fd >= 0)?;
        // The mount may have gone, or another one may lie over it.
        if kernel::identity(fd) == Some((self.config.device, varve_format::ROOT_INO.0)) {
            Some(internal::adopt(fd))
        } else {
            kernel::close(fd);
            None
        }
    }

    /// A descriptor that holds a number for `ofd`.
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
        if self.table.put(fd as i32, ofd) {
            Ok(fd as i32)
        } else {
            kernel::close(fd as i32);
            Err(Stop::Kernel)
        }
    }

    /// Opens a directory as a place (`O_PATH`), which is the kernel's, and remembers it.
    ///
    /// # Errors
    /// [`Stop::Kernel`] when the kernel is to open it as the program says.
    pub fn open_place(&self, key: InodeKey, route: Route, flags: i32) -> Here<i32> {
        let mut path = self.config.mount.clone();
        path.extend_from_slice(&route);
        let _gate = self.gate.read();
        let fd = kernel::open(&ended(path), flags | libc::O_NOFOLLOW, 0) as i32;
        if fd < 0 {
            return Err(Stop::Kernel);
        }
        if kernel::identity(fd) != Some((self.config.device, key.number())) {
            kernel::close(fd);
            return Err(Stop::Kernel);
        }
        self.places.write().insert(fd, (key, route));
        self.any_places.store(true, Ordering::Release);
        Ok(fd)
    }

    fn place_of(&self, fd: i32) -> Option<(InodeKey, Route)> {
        if !self.any_places.load(Ordering::Acquire) {
            return None;
        }
        self.places.read().get(&fd).cloned()
    }

    /// The descriptors of `fds` are closed, or become something else.
    pub fn forget_places(&self, fds: std::ops::RangeInclusive<i32>) {
        if self.any_places.load(Ordering::Acquire) {
            let _gate = self.gate.read();
            self.places.write().retain(|fd, _| !fds.contains(fd));
        }
    }

    /// Where a path starts, if that is in the mount; `None`: it is the kernel's.
    ///
    /// # Errors
    /// ENOTDIR, when `dirfd` is a file of ours.
    pub fn start<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        if self.off.load(Ordering::Acquire) {
            return Ok(None);
        }
        if path.is_empty() && !self.table.has(dirfd) {
            return Ok(None);
        }
        if path.starts_with(b"/") {
            let Some(rest) = self.config.under_mount(path) else {
                return Ok(None);
            };
            return Ok(Some(Start {
                dir: self.fs()?.root(),
                route: Route::new(),
                rest,
            }));
        }
        if dirfd == libc::AT_FDCWD {
            if let Some((dir, route)) = self.cwd_key()? {
                return Ok(Some(Start {
                    dir,
                    route,
                    rest: path,
                }));
            }
            return self.start_outside(dirfd, path);
        }
        let Some(ofd) = self.table.get(dirfd) else {
            if let Some((dir, route)) = self.place_of(dirfd) {
                return Ok(Some(Start {
                    dir,
                    route,
                    rest: path,
                }));
            }
            return self.start_outside(dirfd, path);
        };
        if path.is_empty() {
            return fail(libc::ENOENT);
        }
        if !ofd.is_dir {
            return fail(libc::ENOTDIR);
        }
        Ok(Some(Start {
            dir: ofd.key(),
            route: ofd.route.clone(),
            rest: path,
        }))
    }

    /// A relative path from a directory that is not in the mount. Names alone lead in; symbolic links on the way are the kernel's.
    fn start_outside<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        if !self.config.could_enter(path) {
            return Ok(None);
        }
        let found = if dirfd == libc::AT_FDCWD {
            let cwd = self.cwd.read();
            let Some(from) = cwd.outside.as_deref() else {
                return Ok(None);
            };
            match self.config.entered(from, path) {
                // Above the directory is something else when it was moved since.
                Some((_, true)) if kernel::getcwd().as_deref() != Some(from) => None,
                Some((rest, _)) => Some(rest),
                None => None,
            }
        } else {
            kernel::directory_path(dirfd).and_then(|from| Some(self.config.entered(&from, path)?.0))
        };
        found
            .map(|rest| {
                Ok(Start {
                    dir: self.fs()?.root(),
                    route: Route::new(),
                    rest,
                })
            })
            .transpose()
    }

    fn cwd_key(&self) -> Here<Option<(InodeKey, Route)>> {
        let (route, key) = {
            let cwd = self.cwd.read();
            (cwd.route.clone(), cwd.key)
        };
        let Some(route) = route else { return Ok(None) };
        if let Some(key) = key {
            return Ok(Some((key, route)));
        }
        let fs = self.fs()?;
        let start = Start {
            dir: fs.root(),
            route: Route::new(),
            rest: &route,
        };
        let found = walk(fs, &self.config, start, false, &Cred::root())
            .ok()
            .and_then(|walked| walked.target);
        let key = found
            .filter(|attr| kernel::identity(-1) == Some((self.config.device, attr.key.number())))
            .map(|attr| attr.key);
        let Some(key) = key else {
            // It was moved or removed: the kernel knows where it stands.
            *self.cwd.write() = Cwd::default();
            return Ok(None);
        };
        *self.cwd.write() = Cwd {
            route: Some(route.clone()),
            key: Some(key),
            outside: None,
        };
        Ok(Some((key, route)))
    }

    /// The working directory changed.
    pub fn moved(&self) {
        let path = kernel::getcwd();
        let route = path
            .as_deref()
            .and_then(|path| self.config.under_mount(path))
            .map(Route::from_slice);
        let outside = path.filter(|_| route.is_none());
        *self.cwd.write() = Cwd {
            route,
            key: None,
            outside,
        };
        // Now, while the path is the right one; a process that never touched the mount may do so later.
        if self.fs.get().is_some() {
            let _ = self.cwd_key();
        }
    }

    /// Walks a path of the mount.
    ///
    /// # Errors
    /// As [`walk`].
    pub fn walk(&self, start: Start<'_>, follow: bool) -> Here<Walked> {
        walk(self.fs()?, &self.config, start, follow, &self.cred())
    }

    /// The file of a description in this process' session.
    ///
    /// # Errors
    /// [`Stop::Kernel`] when it was inherited, and there is no session that it could be opened in, or none yet and hardly a use for one.
    pub fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile> {
        ofd.file_or(|| {
            let worth = self.fs.get().is_some() || self.missed.fetch_add(1, Ordering::Relaxed) >= MISSES;
            if self.off.load(Ordering::Acquire) || !worth {
                return None;
            }
            let flags = crate::calls::open_flags(ofd.status())?;
            let file = self.fs().ok()?.open(ofd.key(), flags, &Cred::root()).ok();
            if file.is_none() {
                ofd.set_lost();
            }
            file
        })
    }

    /// Gives the description behind `fd` to the kernel, its offset too, if it is ours.
    ///
    /// # Errors
    /// What opening the file through the mount failed with.
    pub fn materialise(&self, fd: i32) -> Result<(), Errno> {
        if !self.table.has(fd) {
            return Ok(());
        }
        let _gate = self.gate.write();
        match self.table.get(fd) {
            Some(ofd) => self.give(fd, &ofd),
            None => Ok(()),
        }
    }

    /// Makes the descriptors of the description behind `fd` real ones of the mount, if it is ours. It is served still.
    ///
    /// # Errors
    /// What opening the file through the mount failed with.
    pub fn make_real(&self, fd: i32) -> Result<(), Errno> {
        if self.table.get(fd).is_none_or(|ofd| ofd.is_real()) {
            return Ok(());
        }
        let _gate = self.gate.write();
        match self.table.get(fd) {
            Some(ofd) => self.realise(&ofd),
            None => Ok(()),
        }
    }

    /// Gives all descriptions to the kernel (those with a descriptor that `exec` hands on, if `inherited`). One that the kernel does not take
    /// stays ours.
    pub fn materialise_all(&self, inherited: bool) {
        let _gate = self.gate.write();
        for (fd, ofd) in self.table.all() {
            if inherited && is_cloexec(fd) {
                continue;
            }
            let _ = self.give(fd, &ofd);
        }
    }

    /// Makes all descriptors real, for a child that has this process' memory for a while.
    pub fn lend(&self) {
        let _gate = self.gate.write();
        for (_, ofd) in self.table.all() {
            let _ = self.realise(&ofd);
        }
        thread::with(|thread| thread.vfork_of.set(kernel::getpid()));
    }

    /// Files that the next program of this process inherits, and that nobody else has.
    #[must_use]
    pub fn alone(&self) -> Vec<Alone> {
        let mut files: HashMap<*const Ofd, Alone> = HashMap::new();
        for (fd, ofd) in self.table.all() {
            if ofd.is_dir || is_cloexec(fd) || !ofd.is_alone() {
                continue;
            }
            let file = files.entry(Arc::as_ptr(&ofd)).or_insert_with(|| Alone {
                fds: Vec::new(),
                key: (ofd.key().ino.0, ofd.key().generation.0),
                status: ofd.status(),
            });
            file.fds.push(fd);
        }
        files.into_values().collect()
    }

    /// Takes the files back that the program before this one left to it.
    fn adopt(&self) {
        let Some(text) = crate::sys::start::take_variable(config::ALONE) else {
            return;
        };
        for file in config::alone_files(&text, kernel::getpid()) {
            let key = InodeKey {
                ino: Ino(file.key.0),
                generation: Generation(file.key.1),
            };
            let same = |fd: &i32| kernel::identity(*fd) == Some((self.config.device, key.number()));
            if let Some(first) = file.fds.first()
                && file.fds.iter().all(same)
                && kernel::kind(*first).is_some_and(|(_, kind)| kind == libc::S_IFREG)
            {
                let ofd = Arc::new(Ofd::adopted(*first, key, file.status));
                for fd in &file.fds {
                    let _ = self.table.put(*fd, Arc::clone(&ofd));
                }
            }
        }
    }

    /// The program that a child with this process' memory becomes inherits descriptions.
    pub fn hand_inherited(&self) {
        for (fd, ofd) in self.table.all() {
            if ofd.is_real() && !is_cloexec(fd) && kernel::fcntl(fd, libc::F_GETFD, 0) >= 0 {
                hand_offset(fd, &ofd);
            }
        }
    }

    /// A child is about to have all descriptions too, with their offsets. For who holds the gate for writing.
    pub fn share_all(&self) {
        self.copies.give_all(self);
        let mut seen = HashSet::new();
        for (fd, ofd) in self.table.all() {
            if seen.insert(Arc::as_ptr(&ofd)) && self.realise(&ofd).is_ok() && !ofd.share() {
                let _ = self.give(fd, &ofd);
            }
        }
    }

    /// This process is about to end, or to become another program: of what that does not inherit (of all, if `ends`) others may think that it is
    /// gone. Answers what [`stay`](Self::stay) takes back.
    pub fn leave(&self, ends: bool) -> Vec<(Arc<Ofd>, Left)> {
        let mut left = HashMap::new();
        let mut kept = HashSet::new();
        for (fd, ofd) in self.table.all() {
            if ends || is_cloexec(fd) {
                left.insert(Arc::as_ptr(&ofd), ofd);
            } else {
                kept.insert(Arc::as_ptr(&ofd));
            }
        }
        left.into_iter()
            .filter(|(at, _)| !kept.contains(at))
            .filter_map(|(_, ofd)| ofd.leave().map(|left| (ofd, left)))
            .collect()
    }

    /// It did not.
    pub fn stay(&self, left: Vec<(Arc<Ofd>, Left)>) {
        for (ofd, left) in left {
            ofd.stay(left);
        }
    }

    /// Gives every description of `key` to the kernel for good, and those that come later too.
    pub fn give_inode(&self, key: InodeKey) {
        self.copies.give_file(self, key);
        let _gate = self.gate.write();
        self.mapped.write().insert(key, ());
        for (fd, ofd) in self.table.all() {
            if ofd.key() == key {
                self.give_for_good(fd, &ofd);
            }
        }
    }

    fn give_for_good(&self, fd: i32, ofd: &Arc<Ofd>) {
        if self.give(fd, ofd).is_err() {
            return;
        }
        self.table.take(fd);
        self.table.set_given(fd, true);
        if self.any_locked.load(Ordering::Acquire) {
            // Closing it would let the program's locks go; the program's own `close` does that now.
            self.locked.lock().remove(&ofd.key());
            std::mem::forget(ofd.side.lock().take());
        }
    }

    /// Has the kernel keep the offset of `ofd`, one of whose descriptors is `fd`. Calls that do not use it are served still.
    fn give(&self, fd: i32, ofd: &Ofd) -> Result<(), Errno> {
        self.realise(ofd)?;
        hand_offset(fd, ofd);
        Ok(())
    }

    /// Puts a real descriptor of the mount in the place of all placeholders of `ofd`. For who holds the gate for writing.
    fn realise(&self, ofd: &Ofd) -> Result<(), Errno> {
        if ofd.is_real() {
            return Ok(());
        }
        let real = self.side(-1, ofd)?;
        for (fd, other) in self.table.all() {
            if std::ptr::eq(ofd, &*other) {
                let cloexec = if is_cloexec(fd) { libc::O_CLOEXEC } else { 0 };
                kernel::dup3(real, fd, cloexec);
            }
        }
        ofd.real.store(true, Ordering::Release);
        // Unless it holds locks, one less to keep.
        if !self.has_locks(ofd.key()) {
            *ofd.side.lock() = None;
        }
        Ok(())
    }

    /// The same file, open in the kernel: `fd` itself, if that is a real descriptor, or one that is kept with the description.
    ///
    /// # Errors
    /// What opening it failed with.
    pub fn side(&self, fd: i32, ofd: &Ofd) -> Result<i32, Errno> {
        if fd >= 0 && ofd.is_real() {
            return Ok(fd);
        }
        let mut side = ofd.side.lock();
        if side.is_none() {
            *side = Some(self.open_real(ofd)?);
        }
        side.as_ref().map(|side| side.0).ok_or(Errno(libc::EBADF))
    }

    /// The file is about to lose its last name: descriptions of it keep a descriptor of the kernel, by which it can be given away later.
    pub fn keep(&self, key: InodeKey) {
        for (fd, ofd) in self.table.all() {
            if ofd.key() == key && !ofd.is_real() {
                let _ = self.side(fd, &ofd);
            }
        }
        for ofd in self.copies.descriptions(key) {
            let _ = self.side(-1, &ofd);
        }
    }

    fn open_real(&self, ofd: &Ofd) -> Result<KernelFd, Errno> {
        const KEPT: i32 = libc::O_ACCMODE
            | libc::O_APPEND
            | libc::O_NONBLOCK
            | libc::O_SYNC
            | libc::O_DIRECT
            | libc::O_NOATIME;
        let kind = if ofd.is_dir { libc::O_DIRECTORY } else { 0 };
        let flags = ofd.status() & KEPT | kind | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        if ofd.unnamed.is_some() {
            return self.open_unnamed(ofd, flags);
        }
        let first = self.try_real(ofd, &ofd.route, flags);
        if first.is_ok() {
            return first;
        }
        // It was moved since it was opened.
        let found = self.fs().ok().and_then(|fs| {
            if ofd.is_dir {
                fs.path_of(ofd.key())
            } else {
                fs.path_in(ofd.parent, ofd.key())
            }
        });
        match found {
            Some(route) => self.try_real(ofd, &route, flags),
            None => first,
        }
    }

    /// A file that was made without a name stands under one for a moment, in the directory where it was made, for the mount to find it.
    fn open_unnamed(&self, ofd: &Ofd, flags: i32) -> Result<KernelFd, Errno> {
        let fs = self.fs().map_err(|_| Errno(libc::EBADF))?;
        fs.while_lent_a_name(ofd.key(), ofd.parent, &self.cred(), |name| {
            let at = |route: &[u8]| [route, b"/", name].concat();
            let first = self.try_real(ofd, &at(&ofd.route), flags);
            if first.is_ok() {
                return first;
            }
            // The directory was moved since.
            match fs.path_of(ofd.parent) {
                Some(route) => self.try_real(ofd, &at(&route), flags),
                None => first,
            }
        })?
    }

    /// Whether the program holds POSIX locks on an inode.
    fn has_locks(&self, key: InodeKey) -> bool {
        self.any_locked.load(Ordering::Acquire) && self.locked.lock().contains_key(&key)
    }

    fn try_real(&self, ofd: &Ofd, route: &[u8], flags: i32) -> Result<KernelFd, Errno> {
        let mut path = self.config.mount.clone();
        path.extend_from_slice(route);
        let path = ended(path);
        let mut fd = kernel::open(&path, flags, 0);
        if fd == -(libc::EACCES as isize) {
            // It was opened before this thread took on the rights that it has now.
            let user = self.session_uid.load(Ordering::Relaxed);
            fd = kernel::with_files_of(user, || kernel::open(&path, flags, 0));
        }
        if fd < 0 {
            return Err(Errno(-fd as i32));
        }
        // With any descriptor of a file that is closed go the locks on it: it is not moved to a high number then.
        let fd = if self.has_locks(ofd.key()) {
            KernelFd(internal::note(fd as i32))
        } else {
            KernelFd(internal::adopt(fd as i32))
        };
        if kernel::identity(fd.0) == Some((self.config.device, ofd.key().number())) {
            Ok(fd)
        } else {
            Err(Errno(libc::ESTALE))
        }
    }

    /// Whether the file is a program that runs somewhere: the kernel knows.
    #[must_use]
    pub fn runs(&self, attr: &InodeAttr, route: &[u8]) -> bool {
        if attr.is_dir() || attr.mode & 0o111 == 0 {
            return false;
        }
        // To open and close it would let the program's POSIX locks on it go.
        if self.has_locks(attr.key) {
            return false;
        }
        let mut path = self.config.mount.clone();
        path.extend_from_slice(route);
        let flags = libc::O_WRONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let fd = kernel::open(&ended(path), flags, 0);
        if fd >= 0 {
            kernel::close(fd as i32);
        }
        fd == -(libc::ETXTBSY as isize)
    }

    /// Whether a file system is mounted at a path below the mount. The mount is asked only where there is no table of mounts to read.
    #[must_use]
    pub fn is_mount_point(&self, route: &[u8]) -> bool {
        let path = [self.config.mount.as_slice(), route].concat();
        match self.mounts.lock().has(&path) {
            Some(known) => known,
            None => std::ffi::CString::new(path).is_ok_and(|path| kernel::is_mount_point(&path)),
        }
    }

    /// Makes what this process logged durable.
    pub fn sync_session(&self) {
        if let Some(Some(fs)) = self.fs.get() {
            let _ = fs.sync();
        }
    }

    /// Everything goes to the kernel from now on. False if it did already.
    pub fn give_up(&self) -> bool {
        let was_on = !self.off.swap(true, Ordering::AcqRel);
        let _gate = self.gate.write();
        self.copies.give_all(self);
        for (fd, ofd) in self.table.all() {
            self.give_for_good(fd, &ofd);
        }
        was_on
    }

    /// Whether the kernel makes all calls, on paths too.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.off.load(Ordering::Acquire)
    }
}

/// Has the kernel go on at the offset of `ofd`, one of whose descriptors is `fd`; all are real.
pub fn hand_offset(fd: i32, ofd: &Ofd) {
    let mut position = ofd.position();
    if !position.moved {
        kernel::lseek(fd, position.at as i64, libc::SEEK_SET);
        position.moved = true;
    }
}

fn is_cloexec(fd: i32) -> bool {
    kernel::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC as isize != 0
}
