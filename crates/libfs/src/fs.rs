//! The file system of one mount: the calls by inode. Thin: each is a line to the module that does it.

use std::sync::Arc;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::{Cred, DirEntry, StatFs};

use crate::attrs::{AttrChange, OpenFlags, RenameFlags};
use crate::errno::{Errno, Result};
use crate::open::OpenFile;
use crate::options::{Connector, FsOptions, MountError};

/// What a mount has done since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations logged by this process.
    pub logged: u64,
    /// Operations that the daemon did for us.
    pub mediated: u64,
    /// Lease requests sent.
    pub acquires: u64,
    /// Leases given back because the daemon asked.
    pub revoked: u64,
    /// Sessions that were lost and replaced.
    pub resumed: u64,
    /// Names looked up without the daemon.
    pub names_hit: u64,
    /// Names asked of the daemon.
    pub names_missed: u64,
}

/// A mounted pool. Cheap to clone; all clones are one mount.
#[derive(Clone)]
pub struct Fs(());

impl Fs {
    /// Opens a session.
    ///
    /// # Errors
    /// The daemon refused, or was away for longer than the time to wait.
    pub fn mount(connector: Arc<dyn Connector>, options: FsOptions) -> std::result::Result<Self, MountError> {
        let _ = (connector, options);
        Err(MountError::Protocol("not yet"))
    }
    /// The root directory.
    #[must_use]
    pub fn root(&self) -> InodeKey { InodeKey::ROOT }
    /// Whether other sessions use the pool.
    #[must_use]
    pub fn company(&self) -> bool { true }
    /// Counters since the mount.
    #[must_use]
    pub fn counters(&self) -> Counters { Counters::default() }

    /// Commits everything, gives back all leases and ends the session. Files that are still open fail with EIO from now on.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn unmount(&self) -> Result<()> {
        let _ = ();
        Err(Errno(libc::ENOSYS))
    }

    /// Attributes.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn getattr(&self, key: InodeKey) -> Result<InodeAttr> {
        let _ = (key,);
        Err(Errno(libc::ENOSYS))
    }

    /// What `name` in `dir` names; `.` and `..` too.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn lookup(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<InodeAttr> {
        let _ = (dir, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// chmod, chown, truncate and utimens; attributes afterwards.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn setattr(&self, key: InodeKey, change: &AttrChange, cred: &Cred) -> Result<InodeAttr> {
        let _ = (key, change, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Makes a regular file, directory, fifo, socket or device; `mode` holds the kind and the permissions after the umask.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn create(&self, dir: InodeKey, name: &[u8], mode: u32, rdev: u32, cred: &Cred) -> Result<InodeAttr> {
        let _ = (dir, name, mode, rdev, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn symlink(&self, dir: InodeKey, name: &[u8], target: &[u8], cred: &Cred) -> Result<InodeAttr> {
        let _ = (dir, name, target, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Makes a file without a name, open for reading and writing; `link` can name it.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn tmpfile(&self, dir: InodeKey, mode: u32, cred: &Cred) -> Result<OpenFile> {
        let _ = (dir, mode, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Makes one more name.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn link(&self, key: InodeKey, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<InodeAttr> {
        let _ = (key, dir, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Removes the name of anything but a directory.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn unlink(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        let _ = (dir, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn rmdir(&self, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        let _ = (dir, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Moves, replaces or exchanges names, at once for all who look.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn rename(&self, dir: InodeKey, name: &[u8], new_dir: InodeKey, new_name: &[u8], flags: RenameFlags, cred: &Cred) -> Result<()> {
        let _ = (dir, name, new_dir, new_name, flags, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn readlink(&self, key: InodeKey) -> Result<Vec<u8>> {
        let _ = (key,);
        Err(Errno(libc::ENOSYS))
    }

    /// Up to `max` entries after `cookie` (0 at first), without `.` and `..`; an empty list is the end. Attributes are filled in where they are known.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn readdir(&self, dir: InodeKey, cookie: u64, max: usize) -> Result<Vec<DirEntry>> {
        let _ = (dir, cookie, max);
        Err(Errno(libc::ENOSYS))
    }

    /// Opens an inode.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn open(&self, key: InodeKey, flags: OpenFlags, cred: &Cred) -> Result<OpenFile> {
        let _ = (key, flags, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn getxattr(&self, key: InodeKey, name: &[u8], cred: &Cred) -> Result<Vec<u8>> {
        let _ = (key, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Sets an extended attribute; `create`: it must be new; `replace`: it must be there.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn setxattr(&self, key: InodeKey, name: &[u8], value: &[u8], create: bool, replace: bool, cred: &Cred) -> Result<()> {
        let _ = (key, name, value, create, replace, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Names of the extended attributes that `cred` may see.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn listxattr(&self, key: InodeKey, cred: &Cred) -> Result<Vec<Vec<u8>>> {
        let _ = (key, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn removexattr(&self, key: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
        let _ = (key, name, cred);
        Err(Errno(libc::ENOSYS))
    }

    /// Free and total space.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn statfs(&self) -> Result<StatFs> {
        let _ = ();
        Err(Errno(libc::ENOSYS))
    }

    /// Makes the whole log up to now durable against a power cut, and with it this inode.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn fsync(&self, key: InodeKey, data_only: bool) -> Result<()> {
        let _ = (key, data_only);
        Err(Errno(libc::ENOSYS))
    }

    /// Makes everything that returned before durable against a power cut.
    ///
    /// # Errors
    /// As the system call of that name.
    pub fn sync(&self) -> Result<()> {
        let _ = ();
        Err(Errno(libc::ENOSYS))
    }
}
