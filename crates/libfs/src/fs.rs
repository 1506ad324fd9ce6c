//! The file system of one mount: the calls by inode. Thin: each is a line to the module that does it.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::{Cred, DirEntry, Request, Response, StatFs, Watched};

use crate::attrs::{AttrChange, OpenFlags, RenameFlags};
use crate::dir::{self, Making};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::file::open::OpenFile;
use crate::file::{attr, xattr};
use crate::kernel_cache::dentries::{CachedReply, ReplyVersion};
use crate::options::{Atime, Connector, FsOptions, MountError};
use crate::session::{Mount, Session};
use crate::txn::Transaction;

/// Counters of a mount since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations logged by this process.
    pub logged: u64,
    /// Operations that the daemon carried out for this mount.
    pub forwarded: u64,
    /// Lease requests sent.
    pub acquires: u64,
    /// Leases given back because the daemon asked.
    pub revoked: u64,
    /// Time for which the kernel above may have used what it was told under leases that others wanted, from
    /// when they wanted them, summed up, in milliseconds.
    pub expiring_ms: u64,
    /// Sessions that were lost and replaced.
    pub resumed: u64,
    /// Names looked up without the daemon.
    pub names_hit: u64,
    /// Names asked of the daemon.
    pub names_missed: u64,
    /// Blocks that the session may still use before it asks for more.
    pub credits: u64,
}

/// A mounted pool. Cheap to clone; all clones are one mount.
#[derive(Clone)]
pub struct Fs {
    mount: Arc<Mount>,
}

impl Fs {
    /// Opens a session.
    ///
    /// # Errors
    /// The daemon refused, or was away for longer than the time to wait.
    pub fn mount(connector: Arc<dyn Connector>, options: FsOptions) -> std::result::Result<Self, MountError> {
        Ok(Self {
            mount: Arc::new(Mount::new(connector, options)?),
        })
    }
    /// The root directory.
    #[must_use]
    pub fn root(&self) -> InodeKey {
        self.mount.of_session(|session| session.welcome.root.key)
    }

    /// The pool's directory, if it has one.
    pub(crate) fn pool_dir(&self) -> Option<PathBuf> {
        self.mount.pool_dir()
    }

    /// Credentials that the session acts for: `None` if it belongs to root or the pool's owner, and may act
    /// for any credentials. Otherwise calls must name these credentials, or fewer groups; any other change is
    /// acknowledged here, and the daemon refuses it later.
    #[must_use]
    pub fn acts_for(&self) -> Option<Cred> {
        self.mount.of_session(|session| session.welcome.acts_for.clone())
    }
    /// Directory in which the process may keep copies for [`Copies`](crate::Copies), if it may.
    #[must_use]
    pub fn copies_at(&self) -> Option<varve_ipc::CopiesAt> {
        self.mount.of_session(|session| session.welcome.copies_at.clone())
    }
    /// Gives back the session's leases on these inodes, many in a message, and waits until the daemon has
    /// them. For a caller that knows that another session is about to use all of the inodes. The session asks
    /// for the leases again when it needs them.
    pub fn give_back(&self, keys: &[InodeKey]) {
        // The daemon already has the leases of a lost session.
        let _: OpResult<(), ()> = self.mount.of_session(|session| session.leases.give_back(keys));
    }
    /// Whether other sessions use the pool.
    #[must_use]
    pub fn shared(&self) -> bool {
        self.mount.of_session(Session::is_shared)
    }
    /// Closes the session's devices: the daemon reads what lies on them from now on. For a process that may
    /// become another user's.
    pub fn let_go_of_devices(&self) {
        self.mount.of_session(|session| session.data.let_go_of_devices());
    }

    /// Notes a request above a shim that its thread makes itself and waits for, so that it has taken in the
    /// reply to the one before: leases on which that depends go earlier.
    pub fn thread_calls(&self, thread: u32) {
        self.mount
            .of_session(|session| session.leases.threads().calls(thread));
    }

    /// Notes which of the threads above a shim that called lately have ended
    /// ([`CacheObserver::has_ended`](crate::CacheObserver::has_ended)). For a time when others are about to
    /// change what these have looked at.
    pub fn look_for_ended_threads(&self) {
        self.mount.of_session(Session::look_for_ended_threads);
    }

    /// Returns the version of this session's leases, to be taken before an operation for a thread (0: it is
    /// not known) whose reply the kernel above a shim may cache.
    #[must_use]
    pub fn reply_version(&self, thread: u32) -> ReplyVersion {
        self.mount.of_session(|session| session.reply_version(thread))
    }

    /// Returns the timeouts of the reply to an operation that has found `inode`, or nothing, under a name in
    /// `dir`. A shim holds them until the reply is sent: recalls of the leases that it depends on wait for
    /// it.
    #[must_use]
    pub fn name_reply(&self, version: ReplyVersion, dir: InodeKey, inode: Option<InodeKey>) -> CachedReply {
        self.mount
            .of_session(|session| session.begin_reply(version, Some(dir), inode))
    }

    /// As [`name_reply`](Self::name_reply), of an operation that has read attributes only.
    #[must_use]
    pub fn attr_reply(&self, version: ReplyVersion, inode: InodeKey) -> CachedReply {
        self.mount
            .of_session(|session| session.begin_reply(version, None, Some(inode)))
    }

    /// Counters since the mount.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let [logged, forwarded, acquires, revoked, expiring_ms] = self.mount.totals();
        Counters {
            logged,
            forwarded,
            acquires,
            revoked,
            expiring_ms,
            resumed: self.mount.resumed.load(Ordering::Relaxed),
            names_hit: self.mount.names_hit.load(Ordering::Relaxed),
            names_missed: self.mount.names_missed.load(Ordering::Relaxed),
            credits: self.mount.of_session(|session| session.data.reserved_left()),
        }
    }

    /// Commits everything, gives back all leases and ends the session. Operations on files that are still
    /// open fail with EIO afterwards.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn unmount(&self) -> Result<()> {
        self.mount.unmount()
    }

    /// Attributes.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn getattr(&self, key: InodeKey) -> Result<InodeAttr> {
        self.mount.look(|session| dir::attr_of(session, key))
    }

    /// Looks `name` up in `dir`; `.` and `..` too.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn lookup(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<InodeAttr> {
        dir::lookup(&self.mount, dir, name, cred)
    }

    /// chmod, chown, truncate and utimens; attributes afterwards.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn setattr(&self, key: InodeKey, change: &AttrChange, cred: &Cred) -> Result<InodeAttr> {
        attr::setattr(&self.mount, key, change, cred)
    }

    /// Makes a regular file, directory, fifo, socket or device; `mode` holds the kind and the permissions
    /// after the umask.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn create(&self, dir: InodeKey, name: &[u8], mode: u32, rdev: u32, cred: &Cred) -> Result<InodeAttr> {
        if mode & libc::S_IFMT == libc::S_IFLNK {
            return Err(Errno(libc::EINVAL));
        }
        dir::create(
            &self.mount,
            dir,
            name,
            &Making {
                mode,
                rdev,
                target: b"",
            },
            cred,
        )
    }

    /// Makes a regular file and opens it, in one step: no other thread can remove it in between. Its mode
    /// does not restrict this open.
    ///
    /// # Errors
    /// As `open` with `O_CREAT | O_EXCL`.
    pub fn create_open(
        &self,
        dir: InodeKey,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
        cred: &Cred,
    ) -> Result<(InodeAttr, OpenFile)> {
        let making = Making {
            mode: libc::S_IFREG | (mode & 0o7777),
            rdev: 0,
            target: b"",
        };
        let attr = dir::create_open(&self.mount, dir, name, &making, cred)?;
        let file = OpenFile::made(&self.mount, attr.key, flags);
        Ok((attr, file))
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn symlink(&self, dir: InodeKey, name: &[u8], target: &[u8], cred: &Cred) -> Result<InodeAttr> {
        dir::create(
            &self.mount,
            dir,
            name,
            &Making {
                mode: libc::S_IFLNK | 0o777,
                rdev: 0,
                target,
            },
            cred,
        )
    }

    /// Makes a file without a name, open for reading and writing; `link` can name it.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn tmpfile(&self, dir: InodeKey, mode: u32, cred: &Cred) -> Result<OpenFile> {
        let attr = dir::tmpfile(&self.mount, dir, mode, cred)?;
        let flags = OpenFlags::READ_WRITE;
        Ok(OpenFile::over(&self.mount, attr.key, flags))
    }

    /// Makes one more name.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn link(&self, key: InodeKey, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<InodeAttr> {
        dir::link(&self.mount, key, dir, name, cred)
    }

    /// Gives a file that was made without a name ([`tmpfile`](Self::tmpfile)) the name `name` in `dir` while
    /// `act` runs. The file may still be given its first name afterwards.
    ///
    /// # Errors
    /// As [`link`](Self::link) and [`unlink`](Self::unlink); it is no error if the name was removed
    /// meanwhile.
    pub fn while_named<T>(
        &self,
        key: InodeKey,
        (dir, name): (InodeKey, &[u8]),
        cred: &Cred,
        act: impl FnOnce() -> T,
    ) -> Result<T> {
        let linkable = self.mount.opens.is_linkable(key);
        self.link(key, dir, name, cred)?;
        let seen = act();
        let removed = self.unlink(dir, name, cred);
        self.mount.opens.set_linkable(key, linkable);
        match removed {
            Ok(()) | Err(Errno(libc::ENOENT)) => Ok(seen),
            Err(errno) => Err(errno),
        }
    }

    /// Notes that the kernel above has forgotten `key`, and does not name it again before another lookup.
    pub fn forgotten(&self, key: InodeKey) {
        let session = self.mount.session();
        if session.is_live() {
            session.leases.forgotten(key);
        }
    }

    /// Removes the name of anything but a directory.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn unlink(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        dir::unlink(&self.mount, dir, name, cred)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn rmdir(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        dir::rmdir(&self.mount, dir, name, cred)
    }

    /// Moves, replaces or exchanges names, atomically for all sessions.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn rename(
        &self,
        dir: InodeKey,
        name: &[u8],
        new_dir: InodeKey,
        new_name: &[u8],
        flags: RenameFlags,
        cred: &Cred,
    ) -> Result<()> {
        dir::rename(&self.mount, dir, name, new_dir, new_name, flags, cred)
    }

    /// Renames between contended directories, by one message to the daemon and without looking the names up
    /// first. `None`: nothing was done, because neither directory is contended, or because `new_name` exists
    /// and may have to be replaced; then look the names up and call [`rename`](Self::rename). Costs nothing
    /// where nothing is contended.
    ///
    /// # Errors
    /// As `rename` without flags.
    pub fn rename_contended(
        &self,
        dir: InodeKey,
        name: &[u8],
        new_dir: InodeKey,
        new_name: &[u8],
        cred: &Cred,
    ) -> Result<Option<()>> {
        if !self.mount.is_any_contended() {
            return Ok(None);
        }
        dir::rename_contended(&self.mount, dir, name, new_dir, new_name, cred)
    }

    /// Whether any directory or file was contended a moment ago.
    #[must_use]
    pub fn is_any_contended(&self) -> bool {
        self.mount.is_any_contended()
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn readlink(&self, key: InodeKey) -> Result<Vec<u8>> {
        dir::readlink(&self.mount, key)
    }

    /// Up to `max` entries after `cookie` (0 at first), without `.` and `..` and without attributes; an empty
    /// list is the end.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn readdir(&self, dir: InodeKey, cookie: u64, max: usize) -> Result<Vec<DirEntry>> {
        dir::readdir(&self.mount, dir, cookie, max)
    }

    /// Opens an inode.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn open(&self, key: InodeKey, flags: OpenFlags, cred: &Cred) -> Result<OpenFile> {
        OpenFile::open(&self.mount, key, flags, cred)
    }

    /// Begins a group of calls that take effect together or not at all, with the rights of `cred`.
    #[must_use]
    pub fn transaction(&self, cred: &Cred) -> Transaction {
        Transaction::new(Arc::clone(&self.mount), cred.clone())
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn getxattr(&self, key: InodeKey, name: &[u8], cred: &Cred) -> Result<Vec<u8>> {
        xattr::get(&self.mount, key, name, cred)
    }

    /// Sets an extended attribute; `create`: it must be new; `replace`: it must be there.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn setxattr(
        &self,
        key: InodeKey,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
        cred: &Cred,
    ) -> Result<()> {
        xattr::change(&self.mount, key, name, Some(value), create, replace, cred)
    }

    /// Names of the extended attributes that `cred` may see.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn listxattr(&self, key: InodeKey, cred: &Cred) -> Result<Vec<Vec<u8>>> {
        xattr::list(&self.mount, key, cred)
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn removexattr(&self, key: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        xattr::change(&self.mount, key, name, None, false, false, cred)
    }

    /// Free and total space.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn statfs(&self) -> Result<StatFs> {
        self.mount.look(|session| match session.call(Request::StatFs)? {
            Response::StatFs(space) => {
                // The daemon does not count the blocks that this session has reserved and does not use.
                let available = space.blocks_available + session.data.reserved_left();
                Ok(StatFs {
                    blocks_available: available.min(space.blocks_free),
                    ..space
                })
            }
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        })
    }

    /// 0 while no inode of the pool is watched (`inotify`, `fanotify`) in a mount's kernel; else a number
    /// that changes with the set of watched inodes. One load.
    #[must_use]
    pub fn watch_generation(&self) -> u64 {
        self.mount.of_session(|session| session.page.watched())
    }

    /// Returns the inodes that are watched in mounts' kernels, and the [generation](Self::watch_generation)
    /// of the set.
    ///
    /// # Errors
    /// EIO when the daemon is away.
    pub fn watched(&self) -> Result<(u64, Watched)> {
        self.mount.look(|session| match session.call(Request::Watched)? {
            Response::Watched(generation, watched) => Ok((generation, watched)),
            _ => Err(OpError::Failed(Errno(libc::EIO))),
        })
    }

    /// Replaces the set of inodes that are watched in this mount's kernel. Every session knows the set when
    /// this returns. A mount sets it again in each of its sessions.
    ///
    /// # Errors
    /// EPERM for an ordinary user's session; E2BIG for more than [`WATCHED_MAX`](varve_ipc::WATCHED_MAX)
    /// inodes.
    pub fn set_watched(&self, watched: &Watched) -> Result<()> {
        self.mount.with_session(|session, _| {
            session.call(Request::SetWatched(watched.clone()))?;
            Ok(())
        })
    }

    /// Makes the whole log up to now durable against a power cut, and with it this inode.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fsync(&self, key: InodeKey, data_only: bool) -> Result<()> {
        // There is one log: the metadata that a reader of the data needs is made durable with it.
        let _ = (key, data_only);
        self.sync()
    }

    /// When reads move the time of the last read.
    #[must_use]
    pub fn atime(&self) -> Atime {
        self.mount.options.atime.get()
    }

    /// Makes every operation that has returned in any session of the pool durable against a power cut.
    /// Durable when this returns.
    ///
    /// # Errors
    /// As `syncfs`; EIO, ENOSPC or ETIMEDOUT if some operation is not durable.
    pub fn sync_all(&self) -> Result<()> {
        self.mount.with_session(|session, _| session.sync_all())
    }

    /// Makes every operation that has returned in this session durable against a power cut.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn sync(&self) -> Result<()> {
        self.mount.with_session(|session, _| session.sync_log())
    }
}
