//! How a description is given to the kernel: opened through the mount, placed over its placeholders, its
//! offset handed over; and how a program takes files back that the previous program of the process left to
//! it. Knows no particular call.

use super::Process;
use crate::Errno;
use crate::config::{self, Alone, PoolId};
use crate::ofd::{Ofd, status_of};
use crate::stats;
use crate::sys::reentry::{self, KernelFd};
use crate::sys::shared_offset::Left;
use crate::sys::{kernel, signals, thread};
use crate::walk::{FileId, Route, Walked};
use crate::why::Why;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use varve_format::{Generation, Ino, InodeAttr, InodeKey};

/// Flags of a description that its kernel descriptor has too.
const KEPT: i32 =
    libc::O_ACCMODE | libc::O_APPEND | libc::O_NONBLOCK | libc::O_SYNC | libc::O_DIRECT | libc::O_NOATIME;

/// Files to be made real per additional thread that opens them, and upper bound on these threads.
const FILES_A_THREAD: usize = 64;
const OPENERS_MAX: usize = 15;

/// How files are opened on the mount.
#[derive(Default)]
struct Way {
    /// The descriptors are closed at once, after they were duplicated over placeholders. They need no high
    /// number then, which takes five system calls and a lock that all openers would wait for.
    is_brief: bool,
    /// They are opened from their directories, of which the last one is kept: for a path from the mount's
    /// root the kernel would ask the mount twice about each directory on the way.
    by_dirs: bool,
    dir: Option<Dir>,
}

impl Way {
    fn once() -> Self {
        Self {
            is_brief: true,
            ..Self::default()
        }
    }

    fn many() -> Self {
        Self {
            by_dirs: true,
            ..Self::once()
        }
    }
}

/// A directory as a path names it.
struct Dir {
    pool: PoolId,
    route: Route,
    fd: KernelFd,
}

impl Process {
    /// Gives the served description behind `fd` to the kernel, with its offset.
    ///
    /// # Errors
    /// The error of opening the file through the mount.
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

    /// Replaces the placeholders of the served description behind `fd` by real descriptors of the mount.
    /// LibFS goes on serving it.
    ///
    /// # Errors
    /// The error of opening the file through the mount.
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

    /// Makes all descriptors real. False if none is served here.
    pub fn make_all_real(&self) -> bool {
        let _gate = self.gate.write();
        let all = self.table.descriptions();
        self.realise_many(&all);
        !all.is_empty()
    }

    /// Gives all descriptions to the kernel, or, if `inherited`, those with a descriptor that survives
    /// `exec`. A description that the kernel cannot open stays served here.
    pub fn materialise_all(&self, inherited: bool) {
        let _gate = self.gate.write();
        for (ofd, fds) in self.table.descriptions() {
            let handed = |fd: &&i32| !(inherited && is_cloexec(**fd));
            if let Some(fd) = fds.iter().find(handed) {
                let _ = self.give_all_of(&ofd, &fds, *fd);
            }
        }
    }

    /// Gives the kernel the descriptions that may write an inode: nobody runs it then.
    pub fn show_writers(&self, id: FileId) {
        let _gate = self.gate.write();
        for (ofd, fds) in self.table.descriptions() {
            if ofd.id() == id && ofd.access().1 {
                let _ = self.realise_all_of(&ofd, &fds, &mut Way::once());
            }
        }
    }

    fn makes_child(&self) {
        self.pools().for_each(|(_, pool)| pool.makes_child());
    }

    /// Makes all descriptors real for a `vfork` child, which runs in this process' memory.
    pub fn lend(&self) {
        self.makes_child();
        let _gate = self.gate.write();
        self.realise_many(&self.table.descriptions());
        thread::with(|thread| thread.vfork_of.set(kernel::getpid()));
    }

    /// Returns the files that the next program of this process inherits, and that no other process has.
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

    /// Takes back the files that the previous program of this process left to it.
    pub(super) fn adopt(&self) {
        let Some(text) = crate::sys::start::take_variable(config::ALONE) else {
            return;
        };
        for file in config::alone_files(&text, kernel::getpid()) {
            let key = InodeKey {
                ino: Ino(file.key.0),
                generation: Generation(file.key.1),
            };
            let Some(first) = file.fds.first() else { continue };
            let Some((device, libc::S_IFREG)) = kernel::kind(*first) else {
                continue;
            };
            let same = |fd: &i32| kernel::identity(*fd) == Some((device, key.number()));
            if let Some(pool) = self.pool_on(device)
                && file.fds.iter().all(same)
            {
                let ofd = Arc::new(Ofd::adopted(*first, FileId { pool, key }, file.status));
                for fd in &file.fds {
                    let _ = self.table.put(*fd, Arc::clone(&ofd));
                }
            }
        }
    }

    /// Takes over a file that the kernel has just opened for this process as `fd`, with `flags`, at `route`:
    /// it is served once enough calls were made. Another file, or one that is given to the kernel, stays the
    /// kernel's.
    pub fn adopt_opened(&self, fd: i32, flags: i32, route: Route) {
        let Some((device, number)) = kernel::identity(fd) else {
            return;
        };
        let Some(pool) = self.pool_on(device) else { return };
        let key = InodeKey::of_number(number);
        let _gate = self.gate.read();
        if kernel::kind(fd) == Some((device, libc::S_IFREG))
            && !self.pool(pool).mapped.read().contains_key(&key)
        {
            let mut ofd = Ofd::adopted(fd, FileId { pool, key }, status_of(flags));
            ofd.route = route;
            let _ = self.table.put(fd, Arc::new(ofd));
        }
    }

    /// Hands the offsets to the kernel of the descriptions that a `vfork` child's new program inherits.
    pub fn hand_inherited(&self) {
        for (fd, ofd) in self.table.all() {
            if ofd.is_real() && !is_cloexec(fd) && kernel::fcntl(fd, libc::F_GETFD, 0) >= 0 {
                hand_offset(fd, &ofd);
            }
        }
    }

    /// Shares all descriptions, with their offsets, with a child that is about to be forked. The caller holds
    /// the gate for writing.
    pub fn share_all(&self) {
        self.makes_child();
        self.copies.give_all(self);
        let all = self.table.descriptions();
        self.realise_many(&all);
        for (ofd, fds) in all {
            if ofd.is_real() && !ofd.path_only && !ofd.share() {
                hand_offset(fds[0], &ofd);
            }
        }
    }

    /// Leaves the shared records of descriptions that end with this process (`ends`), or that its next
    /// program does not inherit. Returns the argument for [`stay`](Self::stay).
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

    /// Undoes [`leave`](Self::leave) after a failed `exec`.
    pub fn stay(&self, left: Vec<(Arc<Ofd>, Left)>) {
        for (ofd, left) in left {
            ofd.stay(left);
        }
    }

    /// Gives every description of a file to the kernel for good, and those that come later too.
    pub fn give_inode(&self, id: FileId) {
        self.copies.give_file(self, id);
        let _gate = self.gate.write();
        self.pool(id.pool).mapped.write().insert(id.key, ());
        for (fd, ofd) in self.table.all() {
            if ofd.id() == id {
                self.give_for_good(fd, &ofd, Why::Mapped);
            }
        }
    }

    pub(super) fn give_for_good(&self, fd: i32, ofd: &Arc<Ofd>, why: Why) {
        if self.give(fd, ofd).is_err() {
            return;
        }
        self.table.take(fd);
        self.table.set_given(fd, Some(why));
        if self.any_locked.load(Ordering::Acquire) {
            // Closing it would let the program's locks go; the program's own `close` does that now.
            self.locked.lock().remove(&ofd.id());
            std::mem::forget(ofd.side.lock().take());
        }
    }

    /// Has the kernel keep the offset of `ofd`, one of whose descriptors is `fd`. Calls that do not use the
    /// offset are still served.
    fn give(&self, fd: i32, ofd: &Ofd) -> Result<(), Errno> {
        self.realise(ofd)?;
        hand_offset(fd, ofd);
        Ok(())
    }

    /// As [`give`](Self::give), with all descriptors known.
    fn give_all_of(&self, ofd: &Ofd, fds: &[i32], fd: i32) -> Result<(), Errno> {
        self.realise_all_of(ofd, fds, &mut Way::once())?;
        hand_offset(fd, ofd);
        Ok(())
    }

    /// Replaces all placeholders of `ofd` by real descriptors of the mount. The caller holds the gate for
    /// writing.
    fn realise(&self, ofd: &Ofd) -> Result<(), Errno> {
        if ofd.is_real() {
            return Ok(());
        }
        let all = self.table.all().into_iter();
        let fds: Vec<i32> = all
            .filter(|(_, other)| std::ptr::eq(ofd, &**other))
            .map(|(fd, _)| fd)
            .collect();
        self.realise_all_of(ofd, &fds, &mut Way::once())
    }

    /// Makes many descriptions real. Each open waits for the mount, so several run at a time. A description
    /// that cannot be opened stays as it is.
    fn realise_many(&self, all: &[(Arc<Ofd>, Vec<i32>)]) {
        let mut unreal: Vec<_> = all.iter().filter(|(ofd, _)| !ofd.is_real()).collect();
        if unreal.len() <= FILES_A_THREAD {
            for (ofd, fds) in unreal {
                let _ = self.realise_all_of(ofd, fds, &mut Way::once());
            }
            return;
        }
        // Files of one directory after each other.
        unreal.sort_by_cached_key(|(ofd, _)| (ofd.pool.0, ofd.route.clone()));
        for (id, fs) in self.pools().filter_map(|(id, pool)| Some((id, pool.open()?))) {
            // Else the mount asks for each of them.
            let of_pool = unreal.iter().filter(|(ofd, _)| ofd.pool == id);
            let keys: Vec<InodeKey> = of_pool.map(|(ofd, _)| ofd.key()).collect();
            fs.give_back(&keys);
        }
        let next = AtomicUsize::new(0);
        let work = || {
            let mut way = Way::many();
            while let Some((ofd, fds)) = unreal.get(next.fetch_add(1, Ordering::Relaxed)) {
                let _ = self.realise_all_of(ofd, fds, &mut way);
            }
        };
        let openers = match signals::in_handler() {
            true => 0,
            false => (unreal.len() / FILES_A_THREAD).min(OPENERS_MAX),
        };
        std::thread::scope(|scope| {
            for _ in 0..openers {
                // The prefix of the name marks the thread as one of the library's.
                let opener = std::thread::Builder::new().name("varve-open".into());
                let _ = opener.spawn_scoped(scope, work);
            }
            work();
        });
        // With the last free descriptors, one at a time goes.
        for (ofd, fds) in unreal {
            let _ = self.realise_all_of(ofd, fds, &mut Way::once());
        }
    }

    /// As [`realise`](Self::realise), with all descriptors known: searching the table for each of many files
    /// would take quadratic time.
    fn realise_all_of(&self, ofd: &Ofd, fds: &[i32], way: &mut Way) -> Result<(), Errno> {
        if ofd.is_real() {
            return Ok(());
        }
        let mut side = ofd.side.lock();
        let opened = match side.take() {
            Some(there) => there,
            None => self.open_real(ofd, way)?,
        };
        for fd in fds {
            let cloexec = if is_cloexec(*fd) { libc::O_CLOEXEC } else { 0 };
            let placed = reentry::replace(opened.0, *fd, cloexec);
            if placed < 0 {
                return Err(Errno(-placed as i32));
            }
        }
        ofd.real.store(true, Ordering::Release);
        // Unless it holds locks, one less to keep.
        if self.has_locks(ofd.id()) {
            *side = Some(opened);
        }
        Ok(())
    }

    /// Returns a kernel descriptor of the description's file: `fd` itself if it is real, or a side descriptor
    /// that is kept with the description.
    ///
    /// # Errors
    /// The error of opening the file.
    pub fn side(&self, fd: i32, ofd: &Ofd) -> Result<i32, Errno> {
        if fd >= 0 && ofd.is_real() {
            return Ok(fd);
        }
        let mut side = ofd.side.lock();
        if side.is_none() {
            *side = Some(self.open_real(ofd, &mut Way::default())?);
        }
        side.as_ref().map(|side| side.0).ok_or(Errno(libc::EBADF))
    }

    /// The file is about to lose its last name: descriptions of it keep a descriptor of the kernel, by which
    /// it can be given away later.
    pub fn keep(&self, id: FileId) {
        for (fd, ofd) in self.table.all() {
            if ofd.id() == id && !ofd.is_real() {
                let _ = self.side(fd, &ofd);
            }
        }
        for ofd in self.copies.descriptions(id) {
            let _ = self.side(-1, &ofd);
        }
    }

    fn open_real(&self, ofd: &Ofd, way: &mut Way) -> Result<KernelFd, Errno> {
        let kind = match (ofd.path_only, ofd.is_dir) {
            (true, _) => libc::O_PATH | libc::O_DIRECTORY,
            (false, true) => libc::O_DIRECTORY,
            (false, false) => 0,
        };
        let flags = ofd.status() & KEPT | kind | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        if ofd.unnamed.is_some() {
            return self.open_unnamed(ofd, flags, way);
        }
        let first = self.try_real(ofd, &ofd.route, flags, way);
        if first.is_ok() {
            return first;
        }
        // It was moved since it was opened.
        let found = self.fs(ofd.pool).ok().and_then(|fs| {
            if ofd.is_dir {
                fs.path_of(ofd.key())
            } else {
                fs.path_in(ofd.parent, ofd.key())
            }
        });
        let is_lost = matches!(first, Err(Errno(libc::ENOENT | libc::ENOTDIR | libc::ESTALE)));
        match found {
            Some(route) => self.try_real(ofd, &route, flags, way),
            // Moved to another directory, or removed, by whom this process does not know.
            None if is_lost && !ofd.is_dir => self.open_unnamed(ofd, flags, way).or(first),
            None => first,
        }
    }

    /// Opens a file without a name (`O_TMPFILE`), or without a known one, in the kernel. It gets a temporary
    /// name in the directory where it was made or opened, by which the mount finds it.
    fn open_unnamed(&self, ofd: &Ofd, flags: i32, way: &mut Way) -> Result<KernelFd, Errno> {
        let fs = self.fs(ofd.pool).map_err(|_| Errno(libc::EBADF))?;
        fs.while_lent_a_name(ofd.key(), ofd.parent, &self.cred(), |name| {
            let at = |route: &[u8]| [route, b"/", name].concat();
            let slash = ofd.route.iter().rposition(|byte| *byte == b'/');
            let dir = match ofd.unnamed {
                Some(_) => &ofd.route[..],
                None => &ofd.route[..slash.unwrap_or(0)],
            };
            let first = self.try_real(ofd, &at(dir), flags, way);
            if first.is_ok() {
                return first;
            }
            // The directory was moved.
            match fs.path_of(ofd.parent) {
                Some(route) => self.try_real(ofd, &at(&route), flags, way),
                None => first,
            }
        })?
    }

    /// Whether the program holds POSIX locks on a file.
    fn has_locks(&self, id: FileId) -> bool {
        self.any_locked.load(Ordering::Acquire) && self.locked.lock().contains_key(&id)
    }

    fn try_real(&self, ofd: &Ofd, route: &[u8], flags: i32, way: &mut Way) -> Result<KernelFd, Errno> {
        let pool = self.pool(ofd.pool);
        let mut fd = self.open_route(ofd.pool, route, flags, way);
        if fd == -(libc::EACCES as isize) {
            // It was opened before this thread took on the rights that it has now.
            fd = kernel::with_files_of(pool.session_uid(), || {
                self.open_route(ofd.pool, route, flags, way)
            });
        }
        if fd < 0 {
            return Err(Errno(-fd as i32));
        }
        let fd = fd as i32;
        // With any descriptor of a file that is closed go the locks on it: it is not moved to a high number
        // then.
        let fd = if self.has_locks(ofd.id()) {
            reentry::note(fd)
        } else {
            self.own(fd, way)
        };
        let fd = KernelFd(fd);
        if kernel::identity(fd.0) == Some((pool.config.device, ofd.key().number())) {
            stats::opened_on_mount();
            return Ok(fd);
        }
        // Another directory may have taken the place of the one that was open.
        match way.dir.take() {
            Some(_) => self.try_real(ofd, route, flags, &mut Way::once()),
            None => Err(Errno(libc::ESTALE)),
        }
    }

    /// Opens a path below the mount of a pool.
    fn open_route(&self, pool: PoolId, route: &[u8], flags: i32, way: &mut Way) -> isize {
        if let Some((dir, name)) = self.dir_of(pool, route, way) {
            let fd = kernel::open_at(dir, &[name, b"\0"].concat(), flags, 0);
            if fd >= 0 {
                return fd;
            }
        }
        kernel::open(&self.pool(pool).path(route), flags, 0)
    }

    /// Returns the directory and the name of a path below the mount, if many files are opened.
    fn dir_of<'r>(&self, pool: PoolId, route: &'r [u8], way: &mut Way) -> Option<(i32, &'r [u8])> {
        if !way.by_dirs {
            return None;
        }
        let slash = route.iter().rposition(|byte| *byte == b'/')?;
        let (above, name) = (&route[..slash], &route[slash + 1..]);
        let is_it = |dir: &Dir| dir.pool == pool && *dir.route == *above;
        if !way.dir.as_ref().is_some_and(is_it) {
            let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
            let fd = i32::try_from(kernel::open(&self.pool(pool).path(above), flags, 0)).ok();
            let fd = KernelFd(self.own(fd.filter(|fd| *fd >= 0)?, way));
            let route = Route::from_slice(above);
            way.dir = Some(Dir { pool, route, fd });
        }
        Some((way.dir.as_ref()?.fd.0, name))
    }

    /// Takes a new descriptor for the library's own. Returns its number, which may be another one.
    fn own(&self, fd: i32, way: &Way) -> i32 {
        match way.is_brief {
            false => reentry::adopt(fd),
            // The program's other threads must not put anything else in its place.
            true if self.threaded.load(Ordering::Relaxed) => reentry::note(fd),
            true => fd,
        }
    }

    /// Opens an executable file in the kernel too, with `flags`, if possible: while that descriptor is open,
    /// the kernel refuses to execute the file.
    ///
    /// # Errors
    /// ETXTBSY if it runs somewhere.
    pub fn open_writer(
        &self,
        attr: &InodeAttr,
        walked: &Walked,
        flags: i32,
    ) -> Result<Option<KernelFd>, Errno> {
        let pool = self.pool(walked.pool);
        let id = FileId {
            pool: walked.pool,
            key: attr.key,
        };
        // To open and close it would let the program's POSIX locks on it go.
        if attr.is_dir() || attr.mode & 0o111 == 0 || self.has_locks(id) {
            return Ok(None);
        }
        let path = pool.path(&walked.whole());
        let how = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let fd = kernel::open(&path, flags & KEPT | how, 0);
        if fd == -(libc::ETXTBSY as isize) {
            return Err(Errno(libc::ETXTBSY));
        }
        if fd < 0 {
            return Ok(None);
        }
        let fd = KernelFd(reentry::adopt(fd as i32));
        kernel::fcntl(fd.0, libc::F_SETFL, (flags & KEPT) as usize);
        let is_it = kernel::identity(fd.0) == Some((pool.config.device, attr.key.number()));
        Ok(is_it.then_some(fd))
    }
}

/// Hands the offset of `ofd` to the kernel by `fd`, one of its descriptors, all of which are real.
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
