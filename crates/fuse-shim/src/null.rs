//! A FUSE file system that does nothing as fast as it can: the limit that benches compare the mount with.
//!
//! One file `data` of [`NULL_FILE_BYTES`] zeros; writes vanish; creates and unlinks are accepted.

use crate::mount::{MountError, MountRequest, Mounted};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, WriteFlags,
};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// Length of the one file.
pub const NULL_FILE_BYTES: u64 = 1 << 30;
const DATA_INO: u64 = 2;
const TTL: Duration = Duration::from_secs(1);

/// The file system that does nothing.
#[derive(Debug)]
pub struct NullFs {
    zeros: Vec<u8>,
    next: AtomicU64,
}

impl Default for NullFs {
    fn default() -> Self {
        Self {
            zeros: vec![0; 1 << 20],
            next: AtomicU64::new(16),
        }
    }
}

fn attr(ino: u64, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o777,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn attr_of(ino: u64) -> FileAttr {
    match ino {
        1 => attr(1, FileType::Directory, 4096),
        DATA_INO => attr(DATA_INO, FileType::RegularFile, NULL_FILE_BYTES),
        other => attr(other, FileType::RegularFile, 0),
    }
}

impl Filesystem for NullFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        for flag in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "data" {
            reply.entry(&TTL, &attr_of(DATA_INO), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr_of(ino.0));
    }

    fn open(&self, _request: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let direct = flags.0 & libc::O_DIRECT != 0;
        let how = if direct {
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        } else {
            FopenFlags::FOPEN_KEEP_CACHE
        };
        reply.opened(FileHandle(1), how);
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let ino = self.next.fetch_add(1, Ordering::Relaxed);
        reply.created(
            &TTL,
            &attr_of(ino),
            Generation(0),
            FileHandle(1),
            FopenFlags::FOPEN_KEEP_CACHE,
        );
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty) {
        reply.ok();
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&self.zeros[..(size as usize).min(self.zeros.len())]);
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.written(data.len() as u32);
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if offset == 0 {
            let _ = reply.add(INodeNo(DATA_INO), 1, FileType::RegularFile, "data");
        }
        reply.ok();
    }
}

/// Mounts a [`NullFs`] with the options of a Varve mount.
///
/// # Errors
/// As [`mount`](crate::mount()).
pub fn mount_null(request: &MountRequest) -> Result<Mounted, MountError> {
    crate::check_host(request.allow_other)?;
    let failed = |source| MountError::Mount {
        path: request.mountpoint.clone(),
        source,
    };
    let session = Session::new(
        NullFs::default(),
        &request.mountpoint,
        &crate::mount::config(request),
    )
    .map_err(failed)?;
    let session = session.spawn().map_err(failed)?;
    Ok(Mounted::from_session(session, Arc::default(), request))
}
