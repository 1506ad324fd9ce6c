//! The attributes of an inode as programs see them; the on-media image is in `inode`.

use crate::{Ino, InodeKey};
use serde::{Deserialize, Serialize};

/// Nanoseconds since 1970-01-01 UTC.
pub type TimeNs = i64;

/// Kind of file, from the `S_IFMT` bits of a mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FileKind {
    /// Regular file.
    Regular,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Named pipe.
    Fifo,
    /// Unix socket.
    Socket,
    /// Character device.
    CharDevice,
    /// Block device.
    BlockDevice,
}

/// `S_IFMT`: the bits of a mode that hold the kind.
pub const MODE_KIND_MASK: u32 = 0o170_000;
/// Permission, set-id and sticky bits of a mode.
pub const MODE_PERM_MASK: u32 = 0o7777;

/// Whether an inode of this `mode` and device number is a whiteout: a character device 0:0, by which an
/// overlay's upper layer hides a name of the lower ones. No driver answers for that number, so a whiteout
/// needs no more rights than a regular file.
#[must_use]
pub const fn is_whiteout(mode: u32, rdev: u32) -> bool {
    mode & MODE_KIND_MASK == 0o020_000 && rdev == 0
}

impl FileKind {
    /// The kind that `mode` names, if it names one.
    #[must_use]
    pub const fn from_mode(mode: u32) -> Option<Self> {
        match mode & MODE_KIND_MASK {
            0o100_000 => Some(Self::Regular),
            0o040_000 => Some(Self::Directory),
            0o120_000 => Some(Self::Symlink),
            0o010_000 => Some(Self::Fifo),
            0o140_000 => Some(Self::Socket),
            0o020_000 => Some(Self::CharDevice),
            0o060_000 => Some(Self::BlockDevice),
            _ => None,
        }
    }

    /// The `S_IFMT` bits.
    #[must_use]
    pub const fn mode_bits(self) -> u32 {
        match self {
            Self::Regular => 0o100_000,
            Self::Directory => 0o040_000,
            Self::Symlink => 0o120_000,
            Self::Fifo => 0o010_000,
            Self::Socket => 0o140_000,
            Self::CharDevice => 0o020_000,
            Self::BlockDevice => 0o060_000,
        }
    }
}

/// Attributes of one inode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InodeAttr {
    /// Number and generation.
    pub key: InodeKey,
    /// Kind and permission bits, as `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Links. A directory counts itself, its entry and each subdirectory.
    pub nlink: u32,
    /// Length in bytes; for a symbolic link the length of its target.
    pub size_bytes: u64,
    /// 512-byte sectors in use, as `st_blocks`.
    pub sectors: u64,
    /// Device number of a special file.
    pub rdev: u32,
    /// Parent of a directory; 0 for anything else.
    pub parent: Ino,
    /// Last read.
    pub atime_ns: TimeNs,
    /// Last change of the data.
    pub mtime_ns: TimeNs,
    /// Last change of the inode.
    pub ctime_ns: TimeNs,
    /// Birth.
    pub btime_ns: TimeNs,
}

impl InodeAttr {
    /// A new, empty inode owned by root, made at `now_ns`; its first name is counted. The caller sets the
    /// parent of a directory.
    #[must_use]
    pub const fn new(key: InodeKey, mode: u32, now_ns: TimeNs) -> Self {
        let nlink = if matches!(FileKind::from_mode(mode), Some(FileKind::Directory)) {
            2
        } else {
            1
        };
        Self {
            key,
            mode,
            uid: 0,
            gid: 0,
            nlink,
            size_bytes: 0,
            sectors: 0,
            rdev: 0,
            parent: Ino(0),
            atime_ns: now_ns,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            btime_ns: now_ns,
        }
    }

    /// The kind of file. A mode without a kind counts as a regular file (the store refuses to write one).
    #[must_use]
    pub const fn kind(&self) -> FileKind {
        match FileKind::from_mode(self.mode) {
            Some(kind) => kind,
            None => FileKind::Regular,
        }
    }

    /// Whether this is a directory.
    #[must_use]
    pub const fn is_dir(&self) -> bool {
        matches!(self.kind(), FileKind::Directory)
    }
}
