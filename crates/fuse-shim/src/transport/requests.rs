//! The requests that a file system answers: one trait per subject. A request without an implementation is
//! answered with `ENOSYS`: the kernel then does without it, and does not send it again.

use super::{
    Changes, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLink,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
};
use fuser::{Errno, FileHandle, INodeNo, KernelConfig, LockOwner, OpenFlags, RenameFlags, WriteFlags};
use std::ffi::OsStr;
use std::path::Path;

/// Requests on names: lookups, creation, renames and removal.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait LookupRequests {
    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn forget(&self, ino: INodeNo, lookups: u64) {}
    fn readlink(&self, ino: INodeNo, reply: ReplyLink<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        rdev: u32,
        reply: ReplyEntry<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, reply: ReplyEntry<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
    #[expect(clippy::too_many_arguments, reason = "renameat2 has them")]
    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

/// Attributes of inodes and of the file system.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait AttrRequests {
    fn getattr(&self, request: &Request, ino: INodeNo, reply: ReplyAttr<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn setattr(&self, request: &Request, ino: INodeNo, changes: &Changes, reply: ReplyAttr<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn access(&self, ino: INodeNo, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn statfs(&self, reply: ReplyStatfs<'_>) {
        reply.error(Errno::ENOSYS);
    }
}

/// Open files and their bytes.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait DataRequests {
    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
        reply: ReplyCreate<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn tmpfile(&self, request: &Request, parent: INodeNo, mode: u32, flags: i32, reply: ReplyCreate<'_>) {
        reply.error(Errno::ENOSYS);
    }
    #[expect(clippy::too_many_arguments, reason = "the request has them")]
    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        lock_owner: Option<LockOwner>,
        reply: ReplyData<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    #[expect(clippy::too_many_arguments, reason = "the request has them")]
    fn write(
        &self,
        request: &Request,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        reply: ReplyWrite<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn flush(&self, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn release(&self, fh: FileHandle, reply: ReplyEmpty<'_>) {
        reply.ok();
    }
    fn fsync(&self, fh: FileHandle, datasync: bool, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn fallocate(
        &self,
        request: &Request,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn lseek(&self, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek<'_>) {
        reply.error(Errno::ENOSYS);
    }
    /// Copies from an open file's offset to another's.
    fn copy_file_range(
        &self,
        request: &Request,
        from: (FileHandle, u64),
        to: (FileHandle, u64),
        len: u64,
        reply: ReplyWrite<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

/// Listings of directories.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait DirRequests {
    fn readdir(&self, ino: INodeNo, offset: u64, reply: ReplyDirectory<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn fsyncdir(&self, ino: INodeNo, datasync: bool, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
}

/// Extended attributes.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait XattrRequests {
    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: ReplyEmpty<'_>,
    ) {
        reply.error(Errno::ENOSYS);
    }
    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr<'_>) {
        reply.error(Errno::ENOSYS);
    }
    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty<'_>) {
        reply.error(Errno::ENOSYS);
    }
}

/// A file system that answers the kernel's requests, with a method per request, named as in `linux/fuse.h`.
#[expect(unused_variables, reason = "what is not answered looks at nothing")]
pub trait Filesystem:
    LookupRequests + AttrRequests + DataRequests + DirRequests + XattrRequests + Send + Sync + 'static
{
    /// Called before a request is answered that the calling thread makes itself and waits for: it has taken
    /// in the reply to the one before.
    fn called(&self, request: &Request) {}
    /// Requests capabilities from the kernel.
    fn init(&self, config: &mut KernelConfig) {}
    /// Called after the mount has ended; no requests follow.
    fn destroy(&self) {}
}
