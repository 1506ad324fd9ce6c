//! A disk that takes the time of `media::emulated`'s model, as a file of a FUSE mount: a loop device over it
//! meets programs that know nothing of Varve with the seeks of a disk, counted in one place.
//!
//! `slow_disk BACKING LENGTH_BYTES MOUNTPOINT` mounts three files: `disk` is the disk, over the sparse file
//! BACKING; `model` says `none` (a disk that takes no time) or `hdd`, and takes either as a write; `counts`
//! says what was transferred under the model in force, a `name value` a line. Runs in the foreground until it
//! is unmounted. Owns the mount, not the backing file, which it makes if it is missing.
//!
//! Requests are served in the order in which they come: the disk has no queue of its own to sort.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use varve_media::emulated::{DiskModel, EmulatedDisk};
use varve_media::{BlockDevice, BlockOptions, DeviceInfo, FileDevice, MediaError};

/// Requests under way at once.
const THREADS: usize = 16;
const TTL: Duration = Duration::from_secs(60);
/// The files, in the order of their inode numbers from 2 on.
const NAMES: [&str; 3] = ["disk", "model", "counts"];
const DISK: INodeNo = INodeNo(2);
const MODEL: INodeNo = INodeNo(3);

/// The backing file. It lives as long as the bench, so a flush of it would cost the host's time for nothing.
struct Backing(FileDevice);

impl BlockDevice for Backing {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.0.read(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.0.write(off, src)
    }

    fn flush(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.0.trim(off, len)
    }

    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
}

struct SlowDisk {
    slow: EmulatedDisk,
    fast: EmulatedDisk,
    is_slow: AtomicBool,
}

impl SlowDisk {
    fn device(&self) -> &EmulatedDisk {
        match self.is_slow.load(Ordering::Relaxed) {
            true => &self.slow,
            false => &self.fast,
        }
    }

    /// Content of a file that is text.
    fn text(&self, ino: INodeNo) -> String {
        if ino == MODEL {
            let name = if self.is_slow.load(Ordering::Relaxed) {
                "hdd"
            } else {
                "none"
            };
            return format!("{name}\n");
        }
        let counts = self.device().counts();
        format!(
            "reads {}\nread_seeks {}\nread_bytes {}\nwrites {}\nwrite_seeks {}\nwritten_bytes {}\nflushes {}\nbusy_ns {}\n",
            counts.reads,
            counts.read_seeks,
            counts.read_bytes,
            counts.writes,
            counts.write_seeks,
            counts.written_bytes,
            counts.flushes,
            counts.busy_ns
        )
    }

    fn attr(&self, ino: INodeNo) -> FileAttr {
        let is_root = ino == INodeNo::ROOT;
        FileAttr {
            ino,
            size: if ino == DISK { self.fast.len_bytes() } else { 0 },
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_root {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            perm: if is_root { 0o755 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// Writes to the disk or chooses the model.
    fn put(&self, ino: INodeNo, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if ino == DISK {
            return self.device().write(offset, data).map_err(errno);
        }
        let is_slow = match data.trim_ascii() {
            b"hdd" => true,
            b"none" => false,
            _ => return Err(Errno::EINVAL),
        };
        self.is_slow.store(is_slow, Ordering::Relaxed);
        Ok(())
    }
}

fn errno(error: MediaError) -> Errno {
    eprintln!("slow_disk: {error}");
    Errno::EIO
}

impl Filesystem for SlowDisk {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Without these, direct requests of the loop device would be served one after the other.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(THREADS as u16 * 4);
        let _ = config.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match NAMES.iter().position(|known| name == *known) {
            Some(at) => reply.entry(&TTL, &self.attr(INodeNo(at as u64 + 2)), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino));
    }

    // A shell's `>` truncates, which is nothing here.
    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        for (at, name) in NAMES.iter().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(at as u64 + 2), at as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if ino != DISK {
            let text = self.text(ino);
            let from = (offset as usize).min(text.len());
            let to = (from + size as usize).min(text.len());
            return reply.data(&text.as_bytes()[from..to]);
        }
        let left = self.fast.len_bytes().saturating_sub(offset);
        let mut out = vec![0; u64::from(size).min(left) as usize];
        match self.device().read(offset, &mut out) {
            Ok(()) => reply.data(&out),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.put(ino, offset, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        match self.device().flush() {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [backing, len_bytes, mountpoint] = &args[..] else {
        return Err("slow_disk BACKING LENGTH_BYTES MOUNTPOINT".into());
    };
    let backing = PathBuf::from(backing);
    let options = BlockOptions {
        // The host's page cache answers: only the model takes time.
        direct: false,
        uring: false,
    };
    let device = match backing.exists() {
        true => FileDevice::open(&backing, options)?,
        false => FileDevice::create(&backing, len_bytes.parse()?, options)?,
    };
    let plain: Arc<dyn BlockDevice> = Arc::new(Backing(device));
    let disk = SlowDisk {
        slow: EmulatedDisk::new(Arc::clone(&plain), DiskModel::HDD),
        fast: EmulatedDisk::new(plain, DiskModel::NONE),
        is_slow: AtomicBool::new(false),
    };
    println!("{}", disk.slow.info().backend);
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("slow_disk".into())];
    config.n_threads = Some(THREADS);
    fuser::mount(disk, mountpoint, &config)?;
    Ok(())
}
