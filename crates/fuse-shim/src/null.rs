//! A FUSE file system that does nothing, as fast as possible: the upper bound that benchmarks compare the
//! mount with.
//!
//! It has one file `data` of [`NULL_FILE_BYTES`] zeros; writes are discarded; creates and unlinks are
//! accepted.

use crate::mount::{MountError, MountRequest, Mounted, THREADS};
use crate::ops::DATA_MAX;
use crate::transport::{
    AttrRequests, DataRequests, DirRequests, Filesystem, LookupRequests, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, Session, Timeouts, XattrRequests,
};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, WriteFlags,
};
use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

/// Length in bytes of its one file.
pub const NULL_FILE_BYTES: u64 = 1 << 30;
const DATA_INO: u64 = 2;
const TTL: Duration = Duration::from_secs(1);
const TIMEOUTS: Timeouts = Timeouts { name: TTL, attr: TTL };

/// A file system that does nothing.
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
    fn init(&self, config: &mut KernelConfig) {
        for flag in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
        ] {
            let _ = config.add_capabilities(flag);
        }
        let _ = config.set_max_write(DATA_MAX as u32);
        let _ = config.set_max_background(64);
    }
}

impl LookupRequests for NullFs {
    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry<'_>) {
        if name == "data" {
            reply.entry(&TIMEOUTS, &attr_of(DATA_INO), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, _name: &OsStr, reply: ReplyEmpty<'_>) {
        reply.ok();
    }
}

impl AttrRequests for NullFs {
    fn getattr(&self, _request: &Request, ino: INodeNo, reply: ReplyAttr<'_>) {
        reply.attr(&TTL, &attr_of(ino.0));
    }
}

impl DataRequests for NullFs {
    fn open(&self, _request: &Request, _ino: INodeNo, flags: OpenFlags, reply: ReplyOpen<'_>) {
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
        _flags: i32,
        reply: ReplyCreate<'_>,
    ) {
        let ino = self.next.fetch_add(1, Ordering::Relaxed);
        reply.created(
            &TIMEOUTS,
            &attr_of(ino),
            Generation(0),
            FileHandle(1),
            FopenFlags::FOPEN_KEEP_CACHE,
        );
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        size: u32,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData<'_>,
    ) {
        let size = (size as usize).min(self.zeros.len());
        reply.read(size, |out| {
            out.copy_from_slice(&self.zeros[..out.len()]);
            Ok(out.len())
        });
    }

    fn write(
        &self,
        _request: &Request,
        _fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        reply: ReplyWrite<'_>,
    ) {
        reply.written(data.len() as u32);
    }

    fn flush(&self, reply: ReplyEmpty<'_>) {
        reply.ok();
    }

    fn fsync(&self, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty<'_>) {
        reply.ok();
    }
}

impl DirRequests for NullFs {
    fn readdir(&self, _ino: INodeNo, offset: u64, mut reply: ReplyDirectory<'_>) {
        if offset == 0 {
            let _ = reply.add(INodeNo(DATA_INO), 1, FileType::RegularFile, "data");
        }
        reply.ok();
    }
}

impl XattrRequests for NullFs {}

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
        crate::mount::rings(request),
        &crate::mount::config(request),
    )
    .map_err(failed)?;
    let served = session.spawn(THREADS).map_err(failed)?;
    Ok(Mounted::new(served, None, Arc::default(), request))
}
