//! The requests of the kernel, one method each: find the key, call LibFS, answer.

use crate::caches::KernelCaches;
use crate::convert::{errno, fallocate_mode, file_attr, file_type, time_ns};
use crate::handles::{Handle, Handles};
use crate::nodes::Nodes;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use tracing::{debug, warn};
use varve_format::{InodeAttr, InodeKey};
use varve_ipc::Cred;
use varve_libfs::{Asked, AttrChange, Fs, KernelCall, OpenFile, PageUse, SetTime};

/// Entries asked of LibFS at once while a directory is read.
const DIR_BATCH: usize = 256;
/// Offsets 1 and 2 of a directory stream are behind "." and ".."; the daemon's cookies follow.
const DOTS: u64 = 2;
/// Requests that the kernel may have under way in the background.
const MAX_BACKGROUND: u16 = 64;

thread_local! {
    /// What a thread reads into; the kernel asks for at most a megabyte at once.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

type Outcome<T> = Result<T, varve_libfs::Errno>;

/// The file system that the kernel talks to.
pub struct Shim {
    fs: Fs,
    caches: Arc<KernelCaches>,
    nodes: Nodes,
    handles: Handles,
    /// This kernel maps files that are opened past its page cache.
    maps_direct: bool,
}

const STALE: varve_libfs::Errno = varve_libfs::Errno(libc::ESTALE);

/// Of a request for an inode that the kernel came to by a name: that it is gone says nothing of the name, which may have been given to another
/// file since. At this errno the kernel looks the name up again.
fn gone(error: varve_libfs::Errno) -> varve_libfs::Errno {
    if error.0 == libc::ENOENT { STALE } else { error }
}
const BAD_HANDLE: varve_libfs::Errno = varve_libfs::Errno(libc::EBADF);

fn cred(request: &Request) -> Cred {
    // The kernel does not send supplementary groups; it has checked permissions itself (`default_permissions`).
    Cred {
        uid: request.uid(),
        gid: request.gid(),
        groups: Vec::new(),
    }
}

fn open_flags(flags: i32) -> varve_libfs::OpenFlags {
    let access = flags & libc::O_ACCMODE;
    varve_libfs::OpenFlags {
        read: access != libc::O_WRONLY,
        write: access != libc::O_RDONLY,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        ..varve_libfs::OpenFlags::default()
    }
}

/// Whose rights a write has: nobody's special ones when the kernel asks for set-id bits to be dropped.
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

impl Shim {
    /// A shim over `fs`; `caches` must be the observer that `fs` was mounted with.
    #[must_use]
    pub fn new(fs: Fs, caches: Arc<KernelCaches>) -> Self {
        Self {
            fs,
            caches,
            nodes: Nodes::default(),
            handles: Handles::default(),
            maps_direct: false,
        }
    }

    fn key(&self, ino: INodeNo) -> Outcome<InodeKey> {
        self.nodes.key(ino.0).ok_or(STALE)
    }

    fn handle(&self, fh: FileHandle) -> Outcome<Handle> {
        self.handles.get(fh.0).ok_or(BAD_HANDLE)
    }

    fn answer_entry(&self, reply: ReplyEntry, operation: impl FnOnce() -> Outcome<InodeAttr>) {
        let asked = self.fs.asked();
        self.entry(asked, operation(), reply);
    }

    fn entry(&self, asked: Asked, outcome: Outcome<InodeAttr>, reply: ReplyEntry) {
        match outcome {
            Ok(attr) => {
                self.nodes.learn(attr.key);
                let answer = self.fs.answer(asked);
                reply.entry(
                    &answer.ttl(),
                    &file_attr(&attr),
                    Generation(u64::from(attr.key.generation.0)),
                );
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    /// A name that is not there may be believed for a while too: an entry with number 0.
    fn answer_lookup(&self, reply: ReplyEntry, operation: impl FnOnce() -> Outcome<InodeAttr>) {
        let asked = self.fs.asked();
        let outcome = operation();
        if outcome.as_ref().is_err_and(|error| error.0 == libc::ENOENT) {
            let answer = self.fs.answer(asked);
            if !answer.ttl().is_zero() {
                let nothing = InodeAttr::new(InodeKey::new(0, 0), 0o100_000, 0);
                return reply.entry(&answer.ttl(), &file_attr(&nothing), Generation(0));
            }
        }
        self.entry(asked, outcome, reply);
    }

    fn answer_attr(&self, reply: ReplyAttr, operation: impl FnOnce() -> Outcome<InodeAttr>) {
        let asked = self.fs.asked();
        match operation() {
            Ok(attr) => {
                let answer = self.fs.answer(asked);
                reply.attr(&answer.ttl(), &file_attr(&attr));
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
        // Appends go to the server's end of file, so the kernel's idea of the size must not matter: no page cache.
        // What is copied into the page cache shows before LibFS has it. In company it could be seen, and then not, while the call waits.
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let in_company = self.maps_direct && self.fs.company();
        let direct = append || flags & libc::O_DIRECT != 0 || (writes && in_company);
        let open_flags = if direct {
            // LibFS lets writes of one file go side by side where they can.
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
        // Somebody else may have made the name since the kernel looked; open(2) without O_EXCL then opens what is there.
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
                        // Replaced or removed since: the name is looked up again.
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

    /// Walks a directory from stream offset `offset`; `emit` gets key, kind, attributes (when asked for), name and the offset after
    /// the entry, and says whether its buffer is full.
    fn walk(
        &self,
        key: InodeKey,
        offset: u64,
        with_attr: bool,
        mut emit: impl FnMut(InodeKey, FileType, Option<&InodeAttr>, &[u8], u64) -> bool,
    ) -> Outcome<()> {
        if offset < DOTS {
            let own = self.fs.getattr(key)?;
            if offset == 0 && emit(key, FileType::Directory, Some(&own), b".", 1) {
                return Ok(());
            }
            let parent = self.fs.lookup(key, b"..", &Cred::root()).unwrap_or(own);
            if emit(parent.key, FileType::Directory, Some(&parent), b"..", DOTS) {
                return Ok(());
            }
        }
        let mut cookie = offset.saturating_sub(DOTS);
        loop {
            let entries = if with_attr {
                self.fs.readdir_plus(key, cookie, DIR_BATCH)?
            } else {
                self.fs.readdir(key, cookie, DIR_BATCH)?
            };
            let Some(last) = entries.last() else { return Ok(()) };
            cookie = last.next_cookie;
            for entry in &entries {
                let fetched = match (&entry.attr, with_attr) {
                    (None, true) => match self.fs.getattr(entry.key) {
                        Ok(attr) => Some(attr),
                        // Removed since the page was read.
                        Err(_) => continue,
                    },
                    _ => None,
                };
                let attr = entry.attr.as_ref().or(fetched.as_ref());
                if emit(
                    entry.key,
                    file_type(entry.kind),
                    attr,
                    &entry.name,
                    entry.next_cookie + DOTS,
                ) {
                    return Ok(());
                }
            }
        }
    }
}

fn answer(outcome: Outcome<()>, reply: ReplyEmpty) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

fn answer_written(outcome: Outcome<usize>, reply: ReplyWrite) {
    match outcome {
        Ok(count) => reply.written(count as u32),
        Err(error) => reply.error(errno(error)),
    }
}

/// An attribute's value or a list of names, in the two-step protocol of getxattr(2).
fn answer_xattr(outcome: Outcome<Vec<u8>>, size: u32, reply: ReplyXattr) {
    match outcome {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(value) => reply.data(&value),
        Err(error) => reply.error(errno(error)),
    }
}

fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::SpecificTime(at) => SetTime::At(time_ns(at)),
        TimeOrNow::Now => SetTime::Now,
    }
}

impl Filesystem for Shim {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                debug!(?flag, "this kernel's FUSE does not have it");
            }
        }
        self.maps_direct = config
            .add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP)
            .is_ok();
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(MAX_BACKGROUND);
        Ok(())
    }

    fn destroy(&mut self) {
        self.caches.detach();
        self.handles.clear();
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.answer_lookup(reply, || {
            let dir = self.key(parent)?;
            self.fs.lookup(dir, name.as_bytes(), &cred(request))
        });
    }

    fn forget(&self, _request: &Request, ino: INodeNo, lookups: u64) {
        if let Some(key) = self.nodes.forget(ino.0, lookups) {
            self.fs.forgotten(key);
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        self.answer_attr(reply, || {
            let attr = self.key(ino).and_then(|key| self.fs.getattr(key));
            attr.map_err(gone)
        });
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let change = AttrChange {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            // fuser does not pass FATTR_KILL_SUIDGID; the kernel sets it for callers without CAP_FSETID.
            kill_set_id: size.is_some() && request.uid() != 0,
        };
        self.answer_attr(reply, || {
            let key = self.key(ino)?;
            self.fs.setattr(key, &change, &cred(request))
        });
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.key(ino).and_then(|key| self.fs.readlink(key)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let mode = if mode & libc::S_IFMT == 0 {
            mode | libc::S_IFREG
        } else {
            mode
        };
        self.answer_entry(reply, || {
            let dir = self.key(parent)?;
            self.fs.create(dir, name.as_bytes(), mode, rdev, &cred(request))
        });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let mode = libc::S_IFDIR | (mode & 0o7777);
        self.answer_entry(reply, || {
            let dir = self.key(parent)?;
            self.fs.create(dir, name.as_bytes(), mode, 0, &cred(request))
        });
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(
            self.key(parent)
                .and_then(|dir| self.fs.unlink(dir, name.as_bytes(), &cred(request))),
            reply,
        );
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(
            self.key(parent)
                .and_then(|dir| self.fs.rmdir(dir, name.as_bytes(), &cred(request))),
            reply,
        );
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        self.answer_entry(reply, || {
            let dir = self.key(parent)?;
            self.fs.symlink(
                dir,
                link_name.as_bytes(),
                target.as_os_str().as_bytes(),
                &cred(request),
            )
        });
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if flags.contains(RenameFlags::RENAME_WHITEOUT) {
            return reply.error(Errno::EINVAL);
        }
        let wanted = varve_libfs::RenameFlags {
            noreplace: flags.contains(RenameFlags::RENAME_NOREPLACE),
            exchange: flags.contains(RenameFlags::RENAME_EXCHANGE),
        };
        let outcome = self.key(parent).and_then(|dir| {
            let new_dir = self.key(newparent)?;
            self.fs.rename(
                dir,
                name.as_bytes(),
                new_dir,
                newname.as_bytes(),
                wanted,
                &cred(request),
            )
        });
        answer(outcome, reply);
    }

    fn link(&self, request: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        self.answer_entry(reply, || {
            let (key, dir) = (self.key(ino)?, self.key(newparent)?);
            self.fs.link(key, dir, newname.as_bytes(), &cred(request))
        });
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
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
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let asked = self.fs.asked();
        match self.create_open(request, parent, name, mode, flags) {
            Ok((attr, file)) => {
                self.nodes.learn(attr.key);
                let (handle, open_flags) = self.keep_open(file, flags);
                let generation = Generation(u64::from(attr.key.generation.0));
                let answer = self.fs.answer(asked);
                reply.created(&answer.ttl(), &file_attr(&attr), generation, handle, open_flags);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut buffer = BUFFER.take();
        let size = size as usize;
        if buffer.len() < size {
            buffer.resize(size, 0);
        }
        let out = &mut buffer[..size];
        let outcome = self.handle(fh).and_then(|handle| match lock_owner {
            // The kernel names an owner where it reads for a caller, past its pages.
            Some(_) => handle.file.read_at(offset, out),
            None => {
                let call = KernelCall::new(PageUse::Read, request.unique().0, offset, size);
                handle.file.read_pages(&call, offset, out)
            }
        });
        match outcome {
            Ok(count) => reply.data(&buffer[..count]),
            Err(error) => {
                if error.0 == libc::EIO {
                    warn!(%ino, offset, size, "a read fails with an input/output error");
                }
                reply.error(errno(error));
            }
        }
        BUFFER.set(buffer);
    }

    fn write(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let outcome = self.handle(fh).and_then(|handle| {
            let who = write_cred(request, write_flags);
            // fcntl(F_SETFL) may have changed O_APPEND since the open; a page written back keeps its place.
            let write_back = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
            let append = (handle.append || flags.0 & libc::O_APPEND != 0) && !write_back;
            let usage = match (write_back, handle.direct) {
                (true, _) => PageUse::WriteBack,
                (false, true) => PageUse::Direct {
                    dropped: self.maps_direct,
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

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Every write was committed when it was answered; locks are the kernel's. The kernel takes this answer for success, and
        // asks no more at each close.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        drop(self.handles.remove(fh.0));
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        answer(
            self.handle(fh).and_then(|handle| handle.file.fsync(datasync)),
            reply,
        );
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let outcome = self.key(ino).and_then(|key| {
            self.walk(key, offset, false, |key, kind, _, name, next| {
                reply.add(INodeNo(key.number()), next, kind, OsStr::from_bytes(name))
            })
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let asked = self.fs.asked();
        // The first that may be believed is held until all are out: others wait for it. Alone, no other session keeps this one waiting meanwhile.
        let mut held = None;
        let outcome = self.key(ino).and_then(|key| {
            self.walk(key, offset, true, |key, _, attr, name, next| {
                let Some(attr) = attr else { return false };
                let answer = self.fs.answer(asked);
                let generation = Generation(u64::from(key.generation.0));
                let number = INodeNo(key.number());
                let name = OsStr::from_bytes(name);
                let full = reply.add(number, next, name, &answer.ttl(), &file_attr(attr), generation);
                // The kernel counts a look-up for each entry that it gets, but not for the dots.
                if !full && name != "." && name != ".." {
                    self.nodes.learn(key);
                }
                held.get_or_insert(answer);
                full
            })
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
        drop(held);
    }

    fn fsyncdir(&self, _request: &Request, ino: INodeNo, _fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        answer(self.key(ino).and_then(|key| self.fs.fsync(key, datasync)), reply);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        match self.fs.statfs() {
            Ok(space) => reply.statfs(
                space.blocks,
                space.blocks_free,
                space.blocks_available,
                space.inodes_used + space.inodes_free,
                space.inodes_free,
                varve_format::BLOCK_SIZE as u32,
                varve_format::NAME_MAX as u32,
                varve_format::BLOCK_SIZE as u32,
            ),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.key(ino).and_then(|key| {
            let create = flags & libc::XATTR_CREATE != 0;
            let replace = flags & libc::XATTR_REPLACE != 0;
            self.fs
                .setxattr(key, name.as_bytes(), value, create, replace, &cred(request))
        });
        answer(outcome, reply);
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let outcome = self
            .key(ino)
            .and_then(|key| self.fs.getxattr(key, name.as_bytes(), &cred(request)));
        answer_xattr(outcome, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let outcome = self
            .key(ino)
            .and_then(|key| self.fs.listxattr(key, &cred(request)))
            .map(|names| {
                let mut list = Vec::new();
                for name in names {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                list
            });
        answer_xattr(outcome, size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(
            self.key(ino)
                .and_then(|key| self.fs.removexattr(key, name.as_bytes(), &cred(request))),
            reply,
        );
    }

    fn access(&self, _request: &Request, ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // `default_permissions`: the kernel has checked the bits; what is left is whether the inode exists.
        answer(
            self.key(ino).and_then(|key| self.fs.getattr(key)).map(|_| ()),
            reply,
        );
    }

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn fallocate(
        &self,
        request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let outcome = self.handle(fh).and_then(|handle| {
            let mode = fallocate_mode(mode).ok_or(varve_libfs::Errno(libc::EOPNOTSUPP))?;
            handle.file.fallocate(mode, offset, length, &cred(request))
        });
        answer(outcome, reply);
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let outcome = self.handle(fh).and_then(|handle| {
            let offset = u64::try_from(offset).map_err(|_| varve_libfs::Errno(libc::ENXIO))?;
            match whence {
                libc::SEEK_DATA => handle.file.seek_data(offset),
                libc::SEEK_HOLE => handle.file.seek_hole(offset),
                _ => Err(varve_libfs::Errno(libc::EINVAL)),
            }
        });
        match outcome {
            Ok(offset) => reply.offset(i64::try_from(offset).unwrap_or(i64::MAX)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let outcome = self.handle(fh_in).and_then(|from| {
            let to = self.handle(fh_out)?;
            // The answer holds 32 bits; a caller goes on after a short copy.
            let len = len.min(1 << 30);
            let copied = from
                .file
                .copy_range_to(offset_in, &to.file, offset_out, len, &cred(request))?;
            Ok(copied as usize)
        });
        answer_written(outcome, reply);
    }
}
