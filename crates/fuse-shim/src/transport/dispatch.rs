//! Decodes a request and calls the method that answers it.

use super::reply::{
    Channel, PendingReply, Reply, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyLink, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use super::wire::{
    Args, BatchForgetIn, CopyIn, CreateIn, FSYNC_DATA, FallocateIn, ForgetIn, ForgetOne, FsyncIn, GetXattrIn,
    InHeader, LinkIn, LseekIn, MkdirIn, MknodIn, OpenIn, READ_LOCKOWNER, ReadIn, ReleaseIn, Rename2In,
    RenameIn, SetAttrIn, SetXattrIn, WriteIn, opcode, time, valid,
};
use super::{Changes, Filesystem, Request};
use crate::sys::Parts;
use fuser::{Errno, FileHandle, INodeNo, LockOwner, OpenFlags, RenameFlags, TimeOrNow, WriteFlags};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::Path;
use tracing::warn;

/// The next step of a thread that has taken a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Take another request.
    Go,
    /// Stop: the mount has ended.
    End,
}

/// Answers one request that was read from `device`.
pub(super) fn dispatch(fs: &impl Filesystem, device: &File, bytes: &[u8]) -> Next {
    let mut args = Args::new(bytes);
    let Some(header) = args.take::<InHeader>() else {
        warn!(len = bytes.len(), "the kernel sent less than a request");
        return Next::Go;
    };
    handle(fs, header, args, None, Channel::Device(device))
}

/// Answers the request in `parts` of an entry into `reply`, or into the payload.
pub(super) fn dispatch_entry(fs: &impl Filesystem, parts: Parts<'_>, reply: &RefCell<PendingReply>) -> u64 {
    let mut head = Args::new(parts.head);
    let header: InHeader = head.take().unwrap_or_default();
    // A read has no arguments but its structure: its data goes into the payload directly.
    let (rest, payload): (&[u8], _) = match header.opcode {
        opcode::READ => (&[], Some(parts.payload)),
        _ => (&parts.payload[..parts.len], None),
    };
    let args = Args {
        op_header: Some(parts.op),
        rest,
    };
    let _ = handle(fs, header, args, payload, Channel::Entry(reply));
    header.unique
}

fn handle(
    fs: &impl Filesystem,
    header: InHeader,
    mut args: Args<'_>,
    payload: Option<&mut [u8]>,
    channel: Channel<'_>,
) -> Next {
    let len = header.len;
    let call = Call {
        fs,
        request: Request { header },
        node: INodeNo(header.node),
        payload: Cell::new(payload),
        channel,
    };
    if header.opcode == opcode::DESTROY {
        ReplyEmpty(call.reply()).ok();
        return Next::End;
    }
    if is_callers_own(header.opcode) {
        fs.called(&call.request);
    }
    let answered = if is_name(header.opcode) {
        call.names(&mut args)
    } else {
        call.files(&mut args)
    };
    if answered.is_none() {
        warn!(opcode = header.opcode, len, "the kernel's request is malformed");
        call.reply().error(Errno::EIO);
    }
    Next::Go
}

struct Call<'c, F> {
    fs: &'c F,
    request: Request,
    node: INodeNo,
    /// Payload buffer of the entry, for the data of a read.
    payload: Cell<Option<&'c mut [u8]>>,
    channel: Channel<'c>,
}

impl<F: Filesystem> Call<'_, F> {
    const fn reply(&self) -> Reply<'_> {
        Reply::new(self.channel, self.request.header.unique)
    }

    const fn attributes(&self, birth: bool) -> ReplyAttr<'_> {
        ReplyAttr {
            reply: self.reply(),
            birth,
        }
    }

    /// Handles requests on names and attributes. `None` if the request is malformed.
    fn names(&self, args: &mut Args<'_>) -> Option<()> {
        let (fs, request, node) = (self.fs, &self.request, self.node);
        match request.header.opcode {
            opcode::LOOKUP => fs.lookup(request, node, args.name()?, ReplyEntry(self.reply())),
            opcode::FORGET => fs.forget(node, args.take::<ForgetIn>()?.lookups),
            opcode::BATCH_FORGET => {
                let count = args.take::<BatchForgetIn>()?.count;
                for _ in 0..count {
                    let one = args.take::<ForgetOne>()?;
                    fs.forget(INodeNo(one.node), one.lookups);
                }
            }
            opcode::GETATTR => fs.getattr(&self.request, node, self.attributes(false)),
            opcode::STATX => fs.getattr(&self.request, node, self.attributes(true)),
            opcode::SETATTR => {
                let wanted: SetAttrIn = args.take()?;
                if is_callers_change(&wanted) {
                    fs.called(request);
                }
                fs.setattr(request, node, &changes(&wanted), self.attributes(false));
            }
            opcode::READLINK => fs.readlink(node, ReplyLink(self.reply())),
            opcode::SYMLINK => {
                let (name, target) = (args.name()?, args.name()?);
                fs.symlink(request, node, name, Path::new(target), ReplyEntry(self.reply()));
            }
            opcode::MKNOD => {
                let new: MknodIn = args.take()?;
                let name = args.name()?;
                fs.mknod(request, node, name, new.mode, new.rdev, ReplyEntry(self.reply()));
            }
            opcode::MKDIR => {
                let new: MkdirIn = args.take()?;
                fs.mkdir(request, node, args.name()?, new.mode, ReplyEntry(self.reply()));
            }
            opcode::UNLINK => fs.unlink(request, node, args.name()?, ReplyEmpty(self.reply())),
            opcode::RMDIR => fs.rmdir(request, node, args.name()?, ReplyEmpty(self.reply())),
            opcode::RENAME => {
                let new_dir = args.take::<RenameIn>()?.new_dir;
                self.rename(args, new_dir, RenameFlags::empty())?;
            }
            opcode::RENAME2 => {
                let how: Rename2In = args.take()?;
                self.rename(args, how.new_dir, RenameFlags::from_bits_retain(how.flags))?;
            }
            opcode::LINK => {
                let file = INodeNo(args.take::<LinkIn>()?.node);
                fs.link(request, file, node, args.name()?, ReplyEntry(self.reply()));
            }
            opcode::SETXATTR => {
                let how: SetXattrIn = args.take()?;
                let (name, value) = (args.name()?, args.bytes(how.size as usize)?);
                fs.setxattr(request, node, name, value, how.flags, ReplyEmpty(self.reply()));
            }
            opcode::GETXATTR => {
                let size = args.take::<GetXattrIn>()?.size;
                fs.getxattr(request, node, args.name()?, size, ReplyXattr(self.reply()));
            }
            opcode::LISTXATTR => {
                let size = args.take::<GetXattrIn>()?.size;
                fs.listxattr(request, node, size, ReplyXattr(self.reply()));
            }
            opcode::REMOVEXATTR => fs.removexattr(request, node, args.name()?, ReplyEmpty(self.reply())),
            opcode::ACCESS => fs.access(node, ReplyEmpty(self.reply())),
            opcode::STATFS => fs.statfs(ReplyStatfs(self.reply())),
            _ => return None,
        }
        Some(())
    }

    fn rename(&self, args: &mut Args<'_>, new_dir: u64, flags: RenameFlags) -> Option<()> {
        let (name, new_name) = (args.name()?, args.name()?);
        let reply = ReplyEmpty(self.reply());
        let (request, new_dir) = (&self.request, INodeNo(new_dir));
        self.fs
            .rename(request, self.node, name, new_dir, new_name, flags, reply);
        Some(())
    }

    /// Handles requests on open files and directories, and refuses unknown ones. `None` if the request is
    /// malformed.
    fn files(&self, args: &mut Args<'_>) -> Option<()> {
        let (fs, request, node) = (self.fs, &self.request, self.node);
        match request.header.opcode {
            opcode::OPEN => {
                let flags = OpenFlags(args.take::<OpenIn>()?.flags);
                fs.open(request, node, flags, ReplyOpen(self.reply()));
            }
            opcode::CREATE => {
                let new: CreateIn = args.take()?;
                let name = args.name()?;
                fs.create(
                    request,
                    node,
                    name,
                    new.mode,
                    new.flags,
                    ReplyCreate(self.reply()),
                );
            }
            opcode::TMPFILE => {
                // The name that follows is the kernel's own for the file.
                let new: CreateIn = args.take()?;
                fs.tmpfile(request, node, new.mode, new.flags, ReplyCreate(self.reply()));
            }
            opcode::READ => {
                let read: ReadIn = args.take()?;
                let owner = (read.read_flags & READ_LOCKOWNER != 0).then_some(LockOwner(read.lock_owner));
                let fh = FileHandle(read.fh);
                let reply = ReplyData {
                    reply: self.reply(),
                    payload: self.payload.take(),
                };
                fs.read(request, node, fh, read.offset, read.size, owner, reply);
            }
            opcode::WRITE => {
                let write: WriteIn = args.take()?;
                let data = args.bytes(write.size as usize)?;
                let flags = WriteFlags::from_bits_retain(write.write_flags);
                let (fh, open) = (FileHandle(write.fh), OpenFlags(write.flags));
                fs.write(
                    request,
                    fh,
                    write.offset,
                    data,
                    flags,
                    open,
                    ReplyWrite(self.reply()),
                );
            }
            opcode::FLUSH => fs.flush(ReplyEmpty(self.reply())),
            opcode::RELEASE => {
                let fh = FileHandle(args.take::<ReleaseIn>()?.fh);
                fs.release(fh, ReplyEmpty(self.reply()));
            }
            opcode::FSYNC => {
                let sync: FsyncIn = args.take()?;
                let data = sync.flags & FSYNC_DATA != 0;
                fs.fsync(FileHandle(sync.fh), data, ReplyEmpty(self.reply()));
            }
            opcode::OPENDIR => ReplyOpen(self.reply()).opened(FileHandle(0), fuser::FopenFlags::empty()),
            opcode::RELEASEDIR => ReplyEmpty(self.reply()).ok(),
            opcode::READDIR => {
                let read: ReadIn = args.take()?;
                let reply = ReplyDirectory::new(self.reply(), read.size as usize);
                fs.readdir(node, read.offset, reply);
            }
            opcode::FSYNCDIR => {
                let data = args.take::<FsyncIn>()?.flags & FSYNC_DATA != 0;
                fs.fsyncdir(node, data, ReplyEmpty(self.reply()));
            }
            opcode::FALLOCATE => {
                let how: FallocateIn = args.take()?;
                let (fh, reply) = (FileHandle(how.fh), ReplyEmpty(self.reply()));
                fs.fallocate(request, fh, how.offset, how.len, how.mode, reply);
            }
            opcode::LSEEK => {
                let seek: LseekIn = args.take()?;
                let reply = ReplyLseek(self.reply());
                fs.lseek(FileHandle(seek.fh), seek.offset, seek.whence, reply);
            }
            opcode::COPY_FILE_RANGE => {
                let copy: CopyIn = args.take()?;
                let from = (FileHandle(copy.fh_in), copy.offset_in);
                let to = (FileHandle(copy.fh_out), copy.offset_out);
                fs.copy_file_range(request, from, to, copy.len, ReplyWrite(self.reply()));
            }
            opcode::IOCTL => self.reply().error(Errno::ENOTTY),
            // After ENOSYS the kernel does not send optional requests again.
            _ => self.reply().error(Errno::ENOSYS),
        }
        Some(())
    }
}

/// Whether such a request shows that the thread in its header has taken in the reply to its last one, with
/// all its timeouts: the thread makes the request itself, and waits for it, and not amid the taking in.
///
/// Read in Linux' `fs/fuse`: these are sent by `fuse_simple_request` in the context of a call, which waits
/// through every signal once the request was read here. So a thread makes one after the other, and between a
/// reply and its timeouts (`fuse_iget`, `fuse_change_attributes`, `d_splice_alias`) it makes none of these.
/// Left out are
///
/// - those that may be sent in the background with the caller's number, and long after the call: `READ`,
///   `WRITE`;
/// - those without a caller, or by another thread for it: `FORGET`, `BATCH_FORGET`, `INTERRUPT`, `RELEASE`,
///   `RELEASEDIR`, `FLUSH`, `DESTROY`, `NOTIFY_REPLY`;
/// - those on extended attributes: a security module makes them for a new dentry, before its timeout is set;
/// - `SETATTR` of times that the kernel has kept, when an inode is written back: see [`is_callers_change`];
/// - all that is not answered here: a later kernel may send it in other ways.
const fn is_callers_own(number: u32) -> bool {
    matches!(
        number,
        opcode::LOOKUP
            | opcode::GETATTR
            | opcode::READLINK
            | opcode::SYMLINK
            | opcode::MKNOD
            | opcode::MKDIR
            | opcode::UNLINK
            | opcode::RMDIR
            | opcode::RENAME
            | opcode::LINK
            | opcode::OPEN
            | opcode::STATFS
            | opcode::OPENDIR
            | opcode::READDIR
            | opcode::ACCESS
            | opcode::CREATE
            | opcode::RENAME2
            | opcode::TMPFILE
            | opcode::STATX
    )
}

/// Whether a `SETATTR` is of a call, as [`is_callers_own`]: the kernel by itself sets no more than the times
/// of the last change.
const fn is_callers_change(wanted: &SetAttrIn) -> bool {
    const BY_CALL: u32 = valid::MODE
        | valid::UID
        | valid::GID
        | valid::SIZE
        | valid::ATIME
        | valid::ATIME_NOW
        | valid::MTIME_NOW
        | valid::KILL_SUIDGID;
    wanted.valid & BY_CALL != 0
}

/// Whether [`Call::names`] handles this opcode.
const fn is_name(number: u32) -> bool {
    matches!(
        number,
        opcode::LOOKUP..=opcode::LINK
            | opcode::STATFS
            | opcode::SETXATTR..=opcode::REMOVEXATTR
            | opcode::ACCESS
            | opcode::BATCH_FORGET
            | opcode::RENAME2
            | opcode::STATX
    )
}

fn changes(wanted: &SetAttrIn) -> Changes {
    let has = |bit| wanted.valid & bit != 0;
    let moment = |at: bool, now: bool, seconds, ns| match (at, now) {
        (_, true) => Some(TimeOrNow::Now),
        (true, false) => Some(TimeOrNow::SpecificTime(time(seconds, ns))),
        (false, false) => None,
    };
    let (atime, mtime) = (has(valid::ATIME), has(valid::MTIME));
    Changes {
        mode: has(valid::MODE).then_some(wanted.mode),
        uid: has(valid::UID).then_some(wanted.uid),
        gid: has(valid::GID).then_some(wanted.gid),
        size: has(valid::SIZE).then_some(wanted.size),
        atime: moment(atime, has(valid::ATIME_NOW), wanted.atime, wanted.atime_ns),
        mtime: moment(mtime, has(valid::MTIME_NOW), wanted.mtime, wanted.mtime_ns),
        kill_set_id: has(valid::KILL_SUIDGID),
    }
}

#[cfg(test)]
mod tests {
    use super::{SetAttrIn, is_callers_change, is_callers_own, opcode, valid};

    #[test]
    fn requests_that_may_come_late_or_from_others_or_amid_a_reply_are_no_sign() {
        let others = [
            opcode::READ,
            opcode::WRITE,
            opcode::FORGET,
            opcode::BATCH_FORGET,
            opcode::RELEASE,
            opcode::RELEASEDIR,
            opcode::FLUSH,
            opcode::FSYNC,
            opcode::SETATTR,
            opcode::SETXATTR,
            opcode::GETXATTR,
            opcode::LISTXATTR,
            opcode::REMOVEXATTR,
            opcode::DESTROY,
        ];
        assert!(!others.into_iter().any(is_callers_own));
        // INTERRUPT, NOTIFY_REPLY, and what is unknown.
        assert!(![36, 41, 7, 19, 60, u32::MAX].into_iter().any(is_callers_own));
        let own = [
            opcode::LOOKUP,
            opcode::GETATTR,
            opcode::CREATE,
            opcode::READDIR,
            opcode::STATX,
        ];
        assert!(own.into_iter().all(is_callers_own));
    }

    #[test]
    fn times_that_the_kernel_writes_back_are_no_sign() {
        const CTIME: u32 = 1 << 10;
        const FH: u32 = 1 << 6;
        let is_own = |valid| {
            is_callers_change(&SetAttrIn {
                valid,
                ..SetAttrIn::default()
            })
        };
        assert!(!is_own(valid::MTIME | CTIME | FH));
        assert!(is_own(valid::MTIME | valid::ATIME | FH));
        assert!(is_own(valid::MODE | CTIME));
    }
}
