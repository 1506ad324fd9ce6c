//! Operations of a workload, on names; one list runs on the model and on a file system.

use std::fmt;
use std::ops::Range;

/// A path below the root, as a list of names. Empty: the root itself.
pub type Path = Vec<&'static str>;

/// One operation of a workload.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Op {
    /// Makes a regular file; EEXIST if the name is taken.
    Create(Path),
    /// Makes a directory.
    Mkdir(Path),
    /// Makes a symbolic link to a fixed target.
    Symlink(Path),
    /// Makes a fifo.
    Mkfifo(Path),
    /// Makes a character device, number [`RDEV`].
    Mknod(Path),
    /// Makes an unnamed file, writes `len` bytes of the pattern `seed` to it, and links it in: no other
    /// caller sees it empty.
    Tmpfile {
        /// Its first name.
        path: Path,
        /// Bytes.
        len: u32,
        /// Number of the pattern.
        seed: u8,
    },
    /// Writes `len` bytes of the pattern `seed` at `offset` of an existing file.
    Write {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Number of the pattern.
        seed: u8,
    },
    /// Appends `len` bytes of the pattern `seed`.
    Append {
        /// File.
        path: Path,
        /// Bytes.
        len: u32,
        /// Number of the pattern.
        seed: u8,
    },
    /// Sets the length.
    Truncate {
        /// File.
        path: Path,
        /// New length.
        size: u64,
    },
    /// Punches a hole, keeps the size.
    Punch {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Zeros a range, may grow the file.
    Zero {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Zeros a range, keeps the size.
    ZeroKeep {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Allocates a range, may grow the file.
    Allocate {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Allocates a range, keeps the size.
    AllocateKeep {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Lets a range of a file share the blocks of a range of another; `len` 0: up to the end of that.
    Clone {
        /// File that has the blocks.
        from: Path,
        /// Its first byte.
        offset: u64,
        /// File that shares them.
        to: Path,
        /// Its first byte.
        to_offset: u64,
        /// Bytes.
        len: u64,
    },
    /// As `Clone`, but only if both ranges hold the same bytes, which both have.
    Dedupe {
        /// File that has the blocks.
        from: Path,
        /// Its first byte.
        offset: u64,
        /// File that shares them.
        to: Path,
        /// Its first byte.
        to_offset: u64,
        /// Bytes.
        len: u64,
    },
    /// As `Dedupe` of each block of the range, all at once: those that are the same are shared.
    DedupeBlocks {
        /// File that has the blocks.
        from: Path,
        /// File that shares them, at the same offsets.
        to: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Gives a file blocks of its own in a range; `len` 0: up to its end.
    Unshare {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Moves together what a file has alone in a range; `len` 0: up to its end.
    Defrag {
        /// File.
        path: Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Another name for a file.
    Link(Path, Path),
    /// Removes a name that is not a directory.
    Unlink(Path),
    /// Removes an empty directory.
    Rmdir(Path),
    /// Renames, replacing an existing target.
    Rename(Path, Path),
    /// Renames unless the new name is taken.
    RenameNoReplace(Path, Path),
    /// Exchanges two names.
    Exchange(Path, Path),
    /// Changes the permission bits.
    Chmod(Path, u32),
    /// Changes owner and group.
    Chown(Path, u32, u32),
    /// Sets the times of the last change and the last read by [`set_times`] of these seconds since 1970,
    /// which are outside [`CLOCK_SECS`].
    Utimens {
        /// A node of any kind; a symbolic link is not followed.
        path: Path,
        /// Seconds.
        secs: i64,
    },
    /// Sets `user.k` to a value of `len` bytes of the pattern `seed`.
    SetXattr(Path, u16, u8),
    /// Removes `user.k`.
    RemoveXattr(Path),
    /// Makes all earlier operations durable.
    Fsync(Path),
    /// All of these operations in one transaction, or none.
    Together(Vec<Op>),
}

/// Device that [`Op::Mknod`] makes: `/dev/full`, in the kernel's own encoding.
pub const RDEV: u32 = 0x107;

/// Seconds since 1970 that a clock may show. All others were set explicitly: a time shows by itself whether
/// [`Op::Utimens`] set it.
pub const CLOCK_SECS: Range<i64> = 1_000_000_000..4_000_000_000;

const SECOND_NS: i64 = 1_000_000_000;

/// Times of the last change and of the last read, in nanoseconds, that [`Op::Utimens`] sets.
#[must_use]
pub const fn set_times(secs: i64) -> (i64, i64) {
    let mtime_ns = secs * SECOND_NS + 123_456_789;
    (mtime_ns, mtime_ns + SECOND_NS)
}

/// Returns the time, unless a clock may show it.
#[must_use]
pub fn set_by_hand(time_ns: i64) -> Option<i64> {
    (!CLOCK_SECS.contains(&time_ns.div_euclid(SECOND_NS))).then_some(time_ns)
}

/// The bytes of pattern `seed` from `offset` on: they differ by position, so that misplaced data is detected.
#[must_use]
pub fn pattern(seed: u8, offset: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| {
            let at = offset + i;
            (at as u8) ^ ((at >> 8) as u8).wrapping_mul(31) ^ seed.wrapping_mul(167) | 1
        })
        .collect()
}

/// [`Op::Write`] of a name in the root.
#[must_use]
pub fn write(path: &'static str, offset: u64, len: u32, seed: u8) -> Op {
    Op::Write {
        path: vec![path],
        offset,
        len,
        seed,
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |path: &Path| format!("/{}", path.join("/"));
        match self {
            Self::Create(path) => write!(f, "create {}", show(path)),
            Self::Mkdir(path) => write!(f, "mkdir {}", show(path)),
            Self::Symlink(path) => write!(f, "symlink {}", show(path)),
            Self::Mkfifo(path) => write!(f, "mkfifo {}", show(path)),
            Self::Mknod(path) => write!(f, "mknod {}", show(path)),
            Self::Tmpfile { path, len, seed } => write!(f, "tmpfile {} len={len} seed={seed}", show(path)),
            Self::Write {
                path,
                offset,
                len,
                seed,
            } => {
                write!(f, "write {} offset={offset} len={len} seed={seed}", show(path))
            }
            Self::Clone {
                from,
                offset,
                to,
                to_offset,
                len,
            } => write!(
                f,
                "clone {} {} offset={offset} to-offset={to_offset} len={len}",
                show(from),
                show(to)
            ),
            Self::Dedupe {
                from,
                offset,
                to,
                to_offset,
                len,
            } => write!(
                f,
                "dedupe {} {} offset={offset} to-offset={to_offset} len={len}",
                show(from),
                show(to)
            ),
            Self::DedupeBlocks {
                from,
                to,
                offset,
                len,
            } => write!(
                f,
                "dedupe-blocks {} {} offset={offset} len={len}",
                show(from),
                show(to)
            ),
            Self::Unshare { path, offset, len } => {
                write!(f, "unshare {} offset={offset} len={len}", show(path))
            }
            Self::Defrag { path, offset, len } => {
                write!(f, "defrag {} offset={offset} len={len}", show(path))
            }
            Self::Append { path, len, seed } => write!(f, "append {} len={len} seed={seed}", show(path)),
            Self::Truncate { path, size } => write!(f, "truncate {} size={size}", show(path)),
            Self::Punch { path, offset, len } => write!(f, "punch {} offset={offset} len={len}", show(path)),
            Self::Zero { path, offset, len } => write!(f, "zero {} offset={offset} len={len}", show(path)),
            Self::ZeroKeep { path, offset, len } => {
                write!(f, "zero-keep {} offset={offset} len={len}", show(path))
            }
            Self::Allocate { path, offset, len } => {
                write!(f, "allocate {} offset={offset} len={len}", show(path))
            }
            Self::AllocateKeep { path, offset, len } => {
                write!(f, "allocate-keep {} offset={offset} len={len}", show(path))
            }
            Self::Link(from, to) => write!(f, "link {} {}", show(from), show(to)),
            Self::Unlink(path) => write!(f, "unlink {}", show(path)),
            Self::Rmdir(path) => write!(f, "rmdir {}", show(path)),
            Self::Rename(from, to) => write!(f, "rename {} {}", show(from), show(to)),
            Self::RenameNoReplace(from, to) => write!(f, "rename-noreplace {} {}", show(from), show(to)),
            Self::Exchange(from, to) => write!(f, "exchange {} {}", show(from), show(to)),
            Self::Chmod(path, mode) => write!(f, "chmod {} {mode:o}", show(path)),
            Self::Chown(path, uid, gid) => write!(f, "chown {} {uid}:{gid}", show(path)),
            Self::Utimens { path, secs } => write!(f, "utimens {} {secs}", show(path)),
            Self::SetXattr(path, len, seed) => write!(f, "setxattr {} len={len} seed={seed}", show(path)),
            Self::RemoveXattr(path) => write!(f, "removexattr {}", show(path)),
            Self::Fsync(path) => write!(f, "fsync {}", show(path)),
            Self::Together(ops) => {
                let all: Vec<_> = ops.iter().map(ToString::to_string).collect();
                write!(f, "together [{}]", all.join("; "))
            }
        }
    }
}
