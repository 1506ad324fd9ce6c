//! Open files and their bytes.

use super::{Outcome, Shim, answer, cred, gone, timeouts};
use crate::convert::{errno, fallocate_mode, file_attr};
use crate::handles::Handle;
use crate::transport::{
    DataRequests, ReplyCreate, ReplyData, ReplyEmpty, ReplyLseek, ReplyOpen, ReplyWrite, Request,
};
use fuser::{Errno, FileHandle, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, WriteFlags};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use tracing::warn;
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_libfs::{Atime, CachedReply, KernelCall, OpenFile, PageUse};

const BAD_HANDLE: varve_libfs::Errno = varve_libfs::Errno(libc::EBADF);

fn open_flags(flags: i32) -> varve_libfs::OpenFlags {
    let access = flags & libc::O_ACCMODE;
    varve_libfs::OpenFlags {
        read: access != libc::O_WRONLY,
        write: access != libc::O_RDONLY,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        no_atime: flags & libc::O_NOATIME != 0,
        ..varve_libfs::OpenFlags::default()
    }
}

/// Returns the credentials of a write: root's, or unprivileged ones if the kernel requests that set-id bits
/// be cleared.
fn write_cred(request: &Request, flags: WriteFlags) -> Cred {
    if flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
        let uid = if request.uid() == 0 {
            u32::MAX - 1
        } else {
            request.uid()
        };
        Cred {
            uid,
            gid: request.gid(),
            groups: Vec::new(),
        }
    } else {
        Cred::root()
    }
}

fn answer_written(outcome: Outcome<usize>, reply: ReplyWrite<'_>) {
    match outcome {
        Ok(count) => reply.written(count as u32),
        Err(error) => reply.error(errno(error)),
    }
}

impl Shim {
    fn handle(&self, fh: FileHandle) -> Outcome<Handle> {
        self.handles.get(fh.0).ok_or(BAD_HANDLE)
    }

    fn answer_create(
        &self,
        request: &Request,
        parent: INodeNo,
        reply: ReplyCreate<'_>,
        flags: i32,
        operation: impl FnOnce() -> Outcome<(InodeAttr, OpenFile)>,
    ) {
        let version = self.reply_version(request);
        match operation() {
            Ok((attr, file)) => {
                self.nodes.learn(attr.key);
                let (handle, open_flags) = self.keep_open(file, flags);
                let generation = Generation(u64::from(attr.key.generation.0));
                let cached = match self.nodes.key(parent.0) {
                    Some(dir) => self.fs.name_reply(version, dir, Some(attr.key)),
                    None => CachedReply::default(),
                };
                let ttl = timeouts(&attr, &cached);
                reply.created(&ttl, &file_attr(&attr), generation, handle, open_flags);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn keep_open(&self, file: OpenFile, flags: i32) -> (FileHandle, FopenFlags) {
        let append = flags & libc::O_APPEND != 0;
        let sync = if flags & libc::O_SYNC == libc::O_SYNC {
            Some(true)
        } else if flags & libc::O_DSYNC != 0 {
            Some(false)
        } else {
            None
        };
        // Appends go to the server's end of file, so the kernel's idea of the size must not matter: no page
        // cache. Data copied into the page cache is visible before LibFS has it; in shared mode a reader
        // could see it and then, while the call waits, lose it again.
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let is_shared = self.maps_direct() && self.fs.shared();
        // The server does not learn of reads that the kernel serves from its page cache.
        let reads_count =
            self.maps_direct() && self.fs.atime() == Atime::Strict && flags & libc::O_NOATIME == 0;
        let direct = append || flags & libc::O_DIRECT != 0 || (writes && is_shared) || reads_count;
        let open_flags = if direct {
            // LibFS runs writes to one file in parallel where possible.
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        };
        let number = self.handles.insert(Handle {
            file,
            append,
            direct,
            sync,
        });
        (FileHandle(number), open_flags)
    }

    fn open_key(&self, key: InodeKey, flags: i32, who: &Cred) -> Outcome<OpenFile> {
        self.fs.open(key, open_flags(flags), who)
    }

    fn create_open(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Outcome<(InodeAttr, OpenFile)> {
        let dir = self.key(parent)?;
        let who = cred(request);
        let wanted = open_flags(flags & !libc::O_TRUNC);
        // Another session may have created the name since the kernel's lookup; open(2) without O_EXCL then
        // opens that file.
        for _ in 0..8 {
            match self.fs.create_open(dir, name.as_bytes(), mode, wanted, &who) {
                Ok(made) => return Ok(made),
                Err(error) if error.0 == libc::EEXIST && flags & libc::O_EXCL == 0 => {}
                Err(error) => return Err(error),
            }
            match self.fs.lookup(dir, name.as_bytes(), &who) {
                Ok(attr) if attr.kind() == varve_format::FileKind::Regular => {
                    match self.open_key(attr.key, flags, &who) {
                        Ok(file) => return Ok((file.getattr()?, file)),
                        // It was replaced or removed in the meantime: look the name up again.
                        Err(error) if gone(error).0 == libc::ESTALE => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok(attr) if attr.is_dir() => return Err(varve_libfs::Errno(libc::EISDIR)),
                Ok(_) => return Err(varve_libfs::Errno(libc::EEXIST)),
                Err(error) if error.0 == libc::ENOENT => {}
                Err(error) => return Err(error),
            }
        }
        Err(varve_libfs::Errno(libc::EAGAIN))
    }
}

impl DataRequests for Shim {
    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen<'_>) {
        match self
            .key(ino)
            .and_then(|key| self.open_key(key, flags.0, &cred(request)))
            .map_err(gone)
        {
            Ok(file) => {
                let (handle, open_flags) = self.keep_open(file, flags.0);
                reply.opened(handle, open_flags);
            }
            Err(error) => reply.error(errno(error)),
        }
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
        self.answer_create(request, parent, reply, flags, || {
            self.create_open(request, parent, name, mode, flags)
        });
    }

    fn tmpfile(&self, request: &Request, parent: INodeNo, mode: u32, flags: i32, reply: ReplyCreate<'_>) {
        self.answer_create(request, parent, reply, flags, || {
            let file = self.fs.tmpfile(self.key(parent)?, mode, &cred(request))?;
            Ok((file.getattr()?, file))
        });
    }

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
        reply.read(size as usize, |out| {
            let handle = self.handle(fh).map_err(errno)?;
            let outcome = match lock_owner {
                // The kernel sends a lock owner if it reads on behalf of a caller, bypassing its page cache.
                Some(_) => handle.file.read_at(offset, out),
                None => {
                    let call = KernelCall::new(PageUse::Read, request.unique().0, offset, out.len());
                    handle.file.read_pages(&call, offset, out)
                }
            };
            if outcome.as_ref().is_err_and(|error| error.0 == libc::EIO) {
                warn!(%ino, offset, size, "a read fails with an input/output error");
            }
            outcome.map_err(errno)
        });
    }

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
        let outcome = self.handle(fh).and_then(|handle| {
            let who = write_cred(request, write_flags);
            // fcntl(F_SETFL) may have changed O_APPEND after the open; pages written back keep their offset.
            let write_back = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            let append = (handle.append || flags.0 & libc::O_APPEND != 0) && !write_back;
            let usage = match (write_back, handle.direct) {
                (true, _) => PageUse::WriteBack,
                (false, true) => PageUse::Direct {
                    dropped: self.maps_direct(),
                },
                (false, false) => PageUse::Write,
            };
            let call = KernelCall::new(usage, request.unique().0, offset, data.len());
            let place = (!append).then_some(offset);
            let count = handle.file.write_pages(&call, place, data, &who)?;
            if let Some(all) = handle.sync {
                handle.file.fsync(!all)?;
            }
            Ok(count)
        });
        answer_written(outcome, reply);
    }

    fn flush(&self, reply: ReplyEmpty<'_>) {
        // Every write was committed when it was answered, and the kernel keeps the locks. The kernel takes
        // ENOSYS for success, and sends no more flushes.
        reply.error(Errno::ENOSYS);
    }

    fn release(&self, fh: FileHandle, reply: ReplyEmpty<'_>) {
        drop(self.handles.remove(fh.0));
        reply.ok();
    }

    fn fsync(&self, fh: FileHandle, datasync: bool, reply: ReplyEmpty<'_>) {
        answer(
            self.handle(fh).and_then(|handle| handle.file.fsync(datasync)),
            reply,
        );
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
        let outcome = self.handle(fh).and_then(|handle| {
            let mode = fallocate_mode(mode).ok_or(varve_libfs::Errno(libc::EOPNOTSUPP))?;
            handle.file.fallocate(mode, offset, length, &cred(request))
        });
        answer(outcome, reply);
    }

    fn lseek(&self, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek<'_>) {
        let outcome = self.handle(fh).and_then(|handle| {
            let offset = u64::try_from(offset).map_err(|_| varve_libfs::Errno(libc::ENXIO))?;
            match whence {
                libc::SEEK_DATA => handle.file.seek_data(offset),
                libc::SEEK_HOLE => handle.file.seek_hole(offset),
                _ => Err(varve_libfs::Errno(libc::EINVAL)),
            }
        });
        match outcome {
            Ok(offset) => reply.offset(offset),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        (fh_in, offset_in): (FileHandle, u64),
        (fh_out, offset_out): (FileHandle, u64),
        len: u64,
        reply: ReplyWrite<'_>,
    ) {
        let outcome = self.handle(fh_in).and_then(|from| {
            let to = self.handle(fh_out)?;
            // The reply holds 32 bits; a caller continues after a short copy.
            let len = len.min(1 << 30);
            let copied = from
                .file
                .copy_range_to(offset_in, &to.file, offset_out, len, &cred(request))?;
            Ok(copied as usize)
        });
        answer_written(outcome, reply);
    }
}
