//! The bytes of FUSE's requests and replies, as in `linux/fuse.h` (protocol 7.31, and later additions without
//! a flag). Knows no file system.

use super::reply::Timeouts;
use fuser::{FileAttr, FileType};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Opcodes of the requests that are handled.
pub(super) mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
}

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident($len:literal) { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
            #[repr(C)]
            pub(super) struct $name { $(pub(super) $field: $kind,)* }
            const _: () = assert!(size_of::<$name>() == $len);
        )*
    };
}

wire! {
    /// Precedes every request.
    InHeader(40) {
        len: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32, extensions: u16, reserved: u16,
    }
    /// Precedes every reply.
    OutHeader(16) { len: u32, error: i32, unique: u64, }
    ForgetIn(8) { lookups: u64, }
    BatchForgetIn(8) { count: u32, reserved: u32, }
    ForgetOne(16) { node: u64, lookups: u64, }
    SetAttrIn(88) {
        valid: u32, reserved: u32, fh: u64, size: u64, lock_owner: u64, atime: u64, mtime: u64, ctime: u64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, reserved2: u32, uid: u32, gid: u32, reserved3: u32,
    }
    MknodIn(16) { mode: u32, rdev: u32, umask: u32, reserved: u32, }
    MkdirIn(8) { mode: u32, umask: u32, }
    RenameIn(8) { new_dir: u64, }
    Rename2In(16) { new_dir: u64, flags: u32, reserved: u32, }
    LinkIn(8) { node: u64, }
    OpenIn(8) { flags: i32, open_flags: u32, }
    CreateIn(16) { flags: i32, mode: u32, umask: u32, open_flags: u32, }
    /// Read of a file or of a directory.
    ReadIn(40) { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, reserved: u32, }
    WriteIn(40) { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: i32, reserved: u32, }
    ReleaseIn(24) { fh: u64, flags: u32, release_flags: u32, lock_owner: u64, }
    FsyncIn(16) { fh: u64, flags: u32, reserved: u32, }
    SetXattrIn(8) { size: u32, flags: i32, }
    GetXattrIn(8) { size: u32, reserved: u32, }
    FallocateIn(32) { fh: u64, offset: u64, len: u64, mode: i32, reserved: u32, }
    LseekIn(24) { fh: u64, offset: i64, whence: i32, reserved: u32, }
    CopyIn(56) { fh_in: u64, offset_in: u64, node_out: u64, fh_out: u64, offset_out: u64, len: u64, flags: u64, }
    Attr(88) {
        ino: u64, size: u64, blocks: u64, atime: i64, mtime: i64, ctime: i64, atime_ns: u32, mtime_ns: u32, ctime_ns: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    EntryOut(128) {
        node: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_ns: u32, attr_valid_ns: u32, attr: Attr,
    }
    Moment(16) { seconds: i64, ns: u32, reserved: i32, }
    Statx(256) {
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, reserved: u16, ino: u64, size: u64, blocks: u64,
        attributes_mask: u64, atime: Moment, btime: Moment, ctime: Moment, mtime: Moment,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, reserved2: [u64; 14],
    }
    StatxOut(288) { valid: u64, valid_ns: u32, flags: u32, reserved: [u64; 2], stat: Statx, }
    AttrOut(104) { valid: u64, valid_ns: u32, reserved: u32, attr: Attr, }
    OpenOut(16) { fh: u64, open_flags: u32, backing: u32, }
    CreateOut(144) { entry: EntryOut, open: OpenOut, }
    WriteOut(8) { size: u32, reserved: u32, }
    StatfsOut(80) {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64, block_size: u32, name_max: u32,
        fragment_size: u32, reserved: [u32; 7],
    }
    GetXattrOut(8) { size: u32, reserved: u32, }
    LseekOut(8) { offset: u64, }
    /// Precedes a name in a listing.
    Dirent(24) { ino: u64, offset: u64, name_len: u32, kind: u32, }
}

/// Bits of [`SetAttrIn::valid`].
pub(super) mod valid {
    pub const MODE: u32 = 1;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// Flag of [`ReadIn::read_flags`]: the kernel reads on behalf of a caller, and sends the owner of its locks.
pub(super) const READ_LOCKOWNER: u32 = 1 << 1;
/// Flag of [`FsyncIn::flags`]: sync only the data.
pub(super) const FSYNC_DATA: u32 = 1;

/// The arguments behind the header of a request, taken from front to back. `None`: the request is too short.
pub(super) struct Args<'a> {
    /// The structure of the opcode, where the kernel sends it as a buffer of its own.
    pub(super) op_header: Option<&'a [u8]>,
    pub(super) rest: &'a [u8],
}

impl<'a> Args<'a> {
    /// Arguments that follow each other in `bytes`.
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self {
            op_header: None,
            rest: bytes,
        }
    }

    pub(super) fn take<T: FromBytes>(&mut self) -> Option<T> {
        if let Some(op_header) = self.op_header.take() {
            return Some(T::read_from_prefix(op_header).ok()?.0);
        }
        let (taken, rest) = T::read_from_prefix(self.rest).ok()?;
        self.rest = rest;
        Some(taken)
    }

    /// Takes a name, up to its NUL.
    pub(super) fn name(&mut self) -> Option<&'a OsStr> {
        let end = self.rest.iter().position(|byte| *byte == 0)?;
        let name = OsStr::from_bytes(&self.rest[..end]);
        self.rest = &self.rest[end + 1..];
        Some(name)
    }

    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }
}

/// Returns the file type as modes and listings encode it (`S_IFMT` without its trailing zeros: `DT_REG` and
/// so on).
pub(super) const fn kind_bits(kind: FileType) -> u32 {
    let mode = match kind {
        FileType::NamedPipe => libc::S_IFIFO,
        FileType::CharDevice => libc::S_IFCHR,
        FileType::Directory => libc::S_IFDIR,
        FileType::BlockDevice => libc::S_IFBLK,
        FileType::RegularFile => libc::S_IFREG,
        FileType::Symlink => libc::S_IFLNK,
        FileType::Socket => libc::S_IFSOCK,
    };
    mode >> 12
}

/// Splits a time into seconds, rounded down, and the nanoseconds after them.
fn split(time: SystemTime) -> (i64, u32) {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (after.as_secs() as i64, after.subsec_nanos()),
        Err(before) => {
            let before = before.duration();
            let up = i64::from(before.subsec_nanos() > 0);
            let ns = (1_000_000_000 - before.subsec_nanos()) % 1_000_000_000;
            (-(before.as_secs() as i64) - up, ns)
        }
    }
}

/// Converts the time of a request: seconds since 1970 (possibly negative), and the nanoseconds after them.
pub(super) fn time(seconds: u64, ns: u32) -> SystemTime {
    let seconds = seconds as i64;
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let start = if seconds >= 0 {
        UNIX_EPOCH.checked_add(whole)
    } else {
        UNIX_EPOCH.checked_sub(whole)
    };
    start.unwrap_or(UNIX_EPOCH) + Duration::from_nanos(u64::from(ns))
}

impl From<&FileAttr> for Attr {
    fn from(attr: &FileAttr) -> Self {
        let [(atime, atime_ns), (mtime, mtime_ns), (ctime, ctime_ns)] =
            [attr.atime, attr.mtime, attr.ctime].map(split);
        Self {
            ino: attr.ino.0,
            size: attr.size,
            blocks: attr.blocks,
            atime,
            mtime,
            ctime,
            atime_ns,
            mtime_ns,
            ctime_ns,
            mode: kind_bits(attr.kind) << 12 | u32::from(attr.perm),
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            blksize: attr.blksize,
            flags: 0,
        }
    }
}

impl From<SystemTime> for Moment {
    fn from(time: SystemTime) -> Self {
        let (seconds, ns) = split(time);
        Self {
            seconds,
            ns,
            reserved: 0,
        }
    }
}

impl From<&FileAttr> for Statx {
    fn from(attr: &FileAttr) -> Self {
        Self {
            mask: libc::STATX_BASIC_STATS | libc::STATX_BTIME,
            blksize: attr.blksize,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            mode: (kind_bits(attr.kind) << 12) as u16 | attr.perm,
            ino: attr.ino.0,
            size: attr.size,
            blocks: attr.blocks,
            atime: attr.atime.into(),
            btime: attr.crtime.into(),
            ctime: attr.ctime.into(),
            mtime: attr.mtime.into(),
            // The kernel packs device numbers into 32 bits in this way.
            rdev_major: attr.rdev >> 8 & 0xfff,
            rdev_minor: attr.rdev & 0xff | attr.rdev >> 12 & 0xf_ff00,
            ..Self::default()
        }
    }
}

impl EntryOut {
    pub(super) fn new(ttl: &Timeouts, attr: &FileAttr, generation: u64) -> Self {
        Self {
            node: attr.ino.0,
            generation,
            entry_valid: ttl.name.as_secs(),
            attr_valid: ttl.attr.as_secs(),
            entry_valid_ns: ttl.name.subsec_nanos(),
            attr_valid_ns: ttl.attr.subsec_nanos(),
            attr: attr.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Args, ForgetIn, LinkIn, split, time};

    #[test]
    fn times_before_1970_come_back() {
        for (seconds, ns) in [(0, 0), (7, 9), (-1, 0), (-1, 999_999_999), (-8, 1)] {
            assert_eq!(split(time(seconds as u64, ns)), (seconds, ns));
        }
    }

    #[test]
    fn request_that_is_too_short_is_none() {
        let mut bytes = 7_u64.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"name\0");
        let mut args = Args::new(&bytes);
        assert_eq!(args.take::<LinkIn>().map(|link| link.node), Some(7));
        assert_eq!(
            args.name().map(|name| name.as_encoded_bytes()),
            Some(&b"name"[..])
        );
        assert!(args.take::<ForgetIn>().is_none() && args.name().is_none());
        assert!(Args::new(b"no end").name().is_none() && args.bytes(1).is_none());
    }

    #[test]
    fn structure_that_comes_apart_is_taken_before_the_rest() {
        let op_header = 7_u64.to_le_bytes();
        let mut args = Args {
            op_header: Some(&op_header),
            rest: b"name\0",
        };
        assert_eq!(args.take::<LinkIn>().map(|link| link.node), Some(7));
        assert_eq!(args.name().map(|name| name.len()), Some(4));
        assert!(args.take::<LinkIn>().is_none());
    }
}
