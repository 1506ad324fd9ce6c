//! Calls that take paths: names, attributes, permissions.

use varve_format::{FileKind, InodeAttr, InodeKey};
use varve_ipc::StatFs;

use super::path::StripSlashes;
use super::{AT_FDCWD, Fd, Posix};
use crate::attrs::{AttrChange, RenameFlags, SetTime, may};
use crate::errno::{Errno, Result};

impl Posix {
    /// Makes a directory.
    ///
    /// # Errors
    /// As `mkdirat`.
    pub fn mkdirat(&self, dirfd: Fd, path: &[u8], mode: u32) -> Result<()> {
        let (dir, name) = self.place(dirfd, path, true)?;
        let mode = libc::S_IFDIR | (self.masked(mode) & 0o1777);
        self.fs.create(dir, &name, mode, 0, &self.cred()).map(|_| ())
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// As `mkdir`.
    pub fn mkdir(&self, path: &[u8], mode: u32) -> Result<()> {
        self.mkdirat(AT_FDCWD, path, mode)
    }

    /// Makes a regular file, fifo, socket or device.
    ///
    /// # Errors
    /// As `mknodat`.
    pub fn mknodat(&self, dirfd: Fd, path: &[u8], mode: u32, rdev: u32) -> Result<()> {
        let kind = match mode & libc::S_IFMT {
            0 => libc::S_IFREG,
            kind @ (libc::S_IFREG | libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR | libc::S_IFBLK) => kind,
            libc::S_IFDIR => return Err(Errno(libc::EPERM)),
            _ => return Err(Errno(libc::EINVAL)),
        };
        let (dir, name) = self.place(dirfd, path, false)?;
        let device = matches!(kind, libc::S_IFCHR | libc::S_IFBLK) && !varve_format::is_whiteout(kind, rdev);
        if device && self.cred().uid != 0 {
            return Err(Errno(libc::EPERM));
        }
        self.fs
            .create(dir, &name, kind | self.masked(mode), rdev, &self.cred())
            .map(|_| ())
    }

    /// Makes a fifo.
    ///
    /// # Errors
    /// As `mkfifo`.
    pub fn mkfifo(&self, path: &[u8], mode: u32) -> Result<()> {
        self.mknodat(AT_FDCWD, path, libc::S_IFIFO | (mode & 0o7777), 0)
    }

    /// Makes a symbolic link to `target`.
    ///
    /// # Errors
    /// As `symlinkat`.
    pub fn symlinkat(&self, target: &[u8], dirfd: Fd, path: &[u8]) -> Result<()> {
        if target.is_empty() {
            return Err(Errno(libc::ENOENT));
        }
        let (dir, name) = self.place(dirfd, path, false)?;
        self.fs.symlink(dir, &name, target, &self.cred()).map(|_| ())
    }

    /// Makes a symbolic link to `target`.
    ///
    /// # Errors
    /// As `symlink`.
    pub fn symlink(&self, target: &[u8], path: &[u8]) -> Result<()> {
        self.symlinkat(target, AT_FDCWD, path)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As `readlinkat`.
    pub fn readlinkat(&self, dirfd: Fd, path: &[u8]) -> Result<Vec<u8>> {
        self.fs.readlink(self.find(dirfd, path, false)?.key)
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// As `readlink`.
    pub fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.readlinkat(AT_FDCWD, path)
    }

    /// Makes one more name; flags: `AT_SYMLINK_FOLLOW`, `AT_EMPTY_PATH`.
    ///
    /// # Errors
    /// As `linkat`.
    pub fn linkat(&self, from_fd: Fd, from: &[u8], to_fd: Fd, to: &[u8], flags: i32) -> Result<()> {
        let key = if from.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
            self.table.get(from_fd)?.file.key()
        } else {
            self.find(from_fd, from, flags & libc::AT_SYMLINK_FOLLOW != 0)?
                .key
        };
        let (dir, name) = self.place(to_fd, to, false)?;
        self.fs.link(key, dir, &name, &self.cred()).map(|_| ())
    }

    /// Makes one more name.
    ///
    /// # Errors
    /// As `link`.
    pub fn link(&self, from: &[u8], to: &[u8]) -> Result<()> {
        self.linkat(AT_FDCWD, from, AT_FDCWD, to, 0)
    }

    /// Removes a name; with `AT_REMOVEDIR` the name of an empty directory.
    ///
    /// # Errors
    /// As `unlinkat`.
    pub fn unlinkat(&self, dirfd: Fd, path: &[u8], flags: i32) -> Result<()> {
        let rmdir = flags & libc::AT_REMOVEDIR != 0;
        let walked = self.walk(dirfd, path.strip_suffix_slashes(true), false)?;
        if walked.name.is_empty() {
            return Err(Errno(if rmdir { libc::EBUSY } else { libc::EISDIR }));
        }
        if !rmdir && path.ends_with(b"/") {
            let attr = walked.target.ok_or(Errno(libc::ENOENT))?;
            return Err(Errno(if attr.is_dir() {
                libc::EISDIR
            } else {
                libc::ENOTDIR
            }));
        }
        if rmdir {
            self.fs.rmdir(walked.dir, &walked.name, &self.cred())
        } else {
            self.fs.unlink(walked.dir, &walked.name, &self.cred())
        }
    }

    /// Removes a name.
    ///
    /// # Errors
    /// As `unlink`.
    pub fn unlink(&self, path: &[u8]) -> Result<()> {
        self.unlinkat(AT_FDCWD, path, 0)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `rmdir`.
    pub fn rmdir(&self, path: &[u8]) -> Result<()> {
        self.unlinkat(AT_FDCWD, path, libc::AT_REMOVEDIR)
    }

    /// Moves, replaces or exchanges names.
    ///
    /// # Errors
    /// As `renameat2`.
    pub fn renameat2(
        &self,
        from_fd: Fd,
        from: &[u8],
        to_fd: Fd,
        to: &[u8],
        flags: RenameFlags,
    ) -> Result<()> {
        // In contended directories each lookup costs as much as the rename.
        if !flags.exchange
            && self.fs.is_any_contended()
            && let Some((dir, name)) = self.unseen(from_fd, from)
            && let Some((new_dir, new_name)) = self.unseen(to_fd, to)
            && self
                .fs
                .rename_contended(dir, name, new_dir, new_name, &self.cred())?
                .is_some()
        {
            return Ok(());
        }
        let source = self.walk(from_fd, from.strip_suffix_slashes(true), false)?;
        let target = self.walk(to_fd, to.strip_suffix_slashes(true), false)?;
        let nameless = |name: &[u8]| matches!(name, b"" | b"." | b"..");
        if nameless(&source.name) {
            return Err(Errno(libc::EBUSY));
        }
        if nameless(&target.name) {
            return Err(Errno(if flags.noreplace {
                libc::EEXIST
            } else {
                libc::EBUSY
            }));
        }
        let attr = source.target.ok_or(Errno(libc::ENOENT))?;
        match &target.target {
            Some(_) if flags.noreplace => return Err(Errno(libc::EEXIST)),
            None if flags.exchange => return Err(Errno(libc::ENOENT)),
            Some(other) if flags.exchange && to.ends_with(b"/") && !other.is_dir() => {
                return Err(Errno(libc::ENOTDIR));
            }
            _ => {}
        }
        if !attr.is_dir() && (from.ends_with(b"/") || (!flags.exchange && to.ends_with(b"/"))) {
            return Err(Errno(libc::ENOTDIR));
        }
        if attr.is_dir() && source.dir != target.dir && self.lies_below(target.dir, attr.key)? {
            return Err(Errno(libc::EINVAL));
        }
        if let Some(other) = target
            .target
            .filter(|other| other.is_dir() && source.dir != target.dir)
            && self.lies_below(source.dir, other.key)?
        {
            return Err(Errno(if flags.exchange {
                libc::EINVAL
            } else {
                libc::ENOTEMPTY
            }));
        }
        self.fs.rename(
            source.dir,
            &source.name,
            target.dir,
            &target.name,
            flags,
            &self.cred(),
        )
    }

    /// Moves or replaces a name.
    ///
    /// # Errors
    /// As `rename`.
    pub fn rename(&self, from: &[u8], to: &[u8]) -> Result<()> {
        self.renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::default())
    }

    /// Whether directory `dir` is `above` or lies below it. A hint for the right errno: the daemon decides.
    fn lies_below(&self, dir: InodeKey, above: InodeKey) -> Result<bool> {
        let root = varve_ipc::Cred::root();
        let mut at = dir;
        while at != self.fs.root() {
            if at == above {
                return Ok(true);
            }
            at = self.fs.lookup(at, b"..", &root)?.key;
        }
        Ok(false)
    }

    /// Attributes; flags: `AT_SYMLINK_NOFOLLOW`, `AT_EMPTY_PATH`.
    ///
    /// # Errors
    /// As `fstatat`.
    pub fn fstatat(&self, dirfd: Fd, path: &[u8], flags: i32) -> Result<InodeAttr> {
        if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
            return if dirfd == AT_FDCWD {
                self.fs.getattr(*self.cwd.read())
            } else {
                self.fstat(dirfd)
            };
        }
        self.find(dirfd, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)
    }

    /// Attributes of the target of a path.
    ///
    /// # Errors
    /// As `stat`.
    pub fn stat(&self, path: &[u8]) -> Result<InodeAttr> {
        self.fstatat(AT_FDCWD, path, 0)
    }

    /// Attributes, of a symbolic link itself.
    ///
    /// # Errors
    /// As `lstat`.
    pub fn lstat(&self, path: &[u8]) -> Result<InodeAttr> {
        self.fstatat(AT_FDCWD, path, libc::AT_SYMLINK_NOFOLLOW)
    }

    /// Checks whether the caller has the permissions `mode` (`R_OK` …; `F_OK`: the target exists).
    ///
    /// # Errors
    /// As `faccessat`.
    pub fn faccessat(&self, dirfd: Fd, path: &[u8], mode: i32) -> Result<()> {
        if mode & !(libc::R_OK | libc::W_OK | libc::X_OK) != 0 {
            return Err(Errno(libc::EINVAL));
        }
        may(&self.find(dirfd, path, true)?, &self.cred(), mode as u32)
    }

    /// As [`faccessat`](Self::faccessat) from the working directory.
    ///
    /// # Errors
    /// As `access`.
    pub fn access(&self, path: &[u8], mode: i32) -> Result<()> {
        self.faccessat(AT_FDCWD, path, mode)
    }

    fn change(&self, key: InodeKey, change: &AttrChange) -> Result<()> {
        self.fs.setattr(key, change, &self.cred()).map(|_| ())
    }

    /// Changes the permissions.
    ///
    /// # Errors
    /// As `fchmodat`; EOPNOTSUPP for a symbolic link itself.
    pub fn fchmodat(&self, dirfd: Fd, path: &[u8], mode: u32, flags: i32) -> Result<()> {
        let attr = self.find(dirfd, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        if attr.kind() == FileKind::Symlink {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        self.change(
            attr.key,
            &AttrChange {
                mode: Some(mode & 0o7777),
                ..AttrChange::default()
            },
        )
    }

    /// Changes the permissions.
    ///
    /// # Errors
    /// As `chmod`.
    pub fn chmod(&self, path: &[u8], mode: u32) -> Result<()> {
        self.fchmodat(AT_FDCWD, path, mode, 0)
    }

    /// Changes the permissions.
    ///
    /// # Errors
    /// As `fchmod`.
    pub fn fchmod(&self, fd: Fd, mode: u32) -> Result<()> {
        let key = self.table.get(fd)?.file.key();
        self.change(
            key,
            &AttrChange {
                mode: Some(mode & 0o7777),
                ..AttrChange::default()
            },
        )
    }

    /// Changes owner and group; `None` leaves one as it is.
    ///
    /// # Errors
    /// As `fchownat`.
    pub fn fchownat(
        &self,
        dirfd: Fd,
        path: &[u8],
        uid: Option<u32>,
        gid: Option<u32>,
        flags: i32,
    ) -> Result<()> {
        let attr = self.find(dirfd, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        self.change(
            attr.key,
            &AttrChange {
                uid,
                gid,
                ..AttrChange::default()
            },
        )
    }

    /// Changes owner and group.
    ///
    /// # Errors
    /// As `chown`.
    pub fn chown(&self, path: &[u8], uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.fchownat(AT_FDCWD, path, uid, gid, 0)
    }

    /// Changes owner and group, of a symbolic link itself.
    ///
    /// # Errors
    /// As `lchown`.
    pub fn lchown(&self, path: &[u8], uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.fchownat(AT_FDCWD, path, uid, gid, libc::AT_SYMLINK_NOFOLLOW)
    }

    /// Changes owner and group.
    ///
    /// # Errors
    /// As `fchown`.
    pub fn fchown(&self, fd: Fd, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let key = self.table.get(fd)?.file.key();
        self.change(
            key,
            &AttrChange {
                uid,
                gid,
                ..AttrChange::default()
            },
        )
    }

    /// Sets the times; `None` leaves one as it is (`UTIME_OMIT`).
    ///
    /// # Errors
    /// As `utimensat`.
    pub fn utimensat(
        &self,
        dirfd: Fd,
        path: &[u8],
        atime: Option<SetTime>,
        mtime: Option<SetTime>,
        flags: i32,
    ) -> Result<()> {
        let attr = self.find(dirfd, path, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        self.change(
            attr.key,
            &AttrChange {
                atime,
                mtime,
                ..AttrChange::default()
            },
        )
    }

    /// Sets the times of an open file.
    ///
    /// # Errors
    /// As `futimens`.
    pub fn futimens(&self, fd: Fd, atime: Option<SetTime>, mtime: Option<SetTime>) -> Result<()> {
        let key = self.table.get(fd)?.file.key();
        self.change(
            key,
            &AttrChange {
                atime,
                mtime,
                ..AttrChange::default()
            },
        )
    }

    /// Sets the length.
    ///
    /// # Errors
    /// As `truncate`.
    pub fn truncate(&self, path: &[u8], size: u64) -> Result<()> {
        let attr = self.find(AT_FDCWD, path, true)?;
        self.change(
            attr.key,
            &AttrChange {
                size: Some(size),
                ..AttrChange::default()
            },
        )
    }

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// As `getxattr`.
    pub fn getxattr(&self, path: &[u8], name: &[u8]) -> Result<Vec<u8>> {
        self.fs
            .getxattr(self.find(AT_FDCWD, path, true)?.key, name, &self.cred())
    }

    /// Sets an extended attribute; flags: `XATTR_CREATE`, `XATTR_REPLACE`.
    ///
    /// # Errors
    /// As `setxattr`.
    pub fn setxattr(&self, path: &[u8], name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
        if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 || (create && replace) {
            return Err(Errno(libc::EINVAL));
        }
        let key = self.find(AT_FDCWD, path, true)?.key;
        self.fs.setxattr(key, name, value, create, replace, &self.cred())
    }

    /// Names of the extended attributes.
    ///
    /// # Errors
    /// As `listxattr`.
    pub fn listxattr(&self, path: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.fs
            .listxattr(self.find(AT_FDCWD, path, true)?.key, &self.cred())
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// As `removexattr`.
    pub fn removexattr(&self, path: &[u8], name: &[u8]) -> Result<()> {
        self.fs
            .removexattr(self.find(AT_FDCWD, path, true)?.key, name, &self.cred())
    }

    /// Free and total space.
    ///
    /// # Errors
    /// As `statvfs`.
    pub fn statvfs(&self) -> Result<StatFs> {
        self.fs.statfs()
    }

    /// Makes every operation of any program on the pool durable against a power cut.
    ///
    /// # Errors
    /// As `syncfs`: `EIO`, `ENOSPC` or `ETIMEDOUT` if some operation is not durable.
    pub fn syncfs(&self) -> Result<()> {
        self.fs.sync_all()
    }

    /// Makes every operation of this connection durable against a power cut.
    ///
    /// # Errors
    /// `EIO`.
    pub fn sync(&self) -> Result<()> {
        self.fs.sync()
    }
}
