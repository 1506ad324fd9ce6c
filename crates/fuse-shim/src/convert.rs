//! Attributes, times, modes and errors between LibFS and `fuser`.

use fuser::{Errno, FileAttr, FileType, INodeNo};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use varve_format::{FallocateMode, FileKind, InodeAttr, MODE_PERM_MASK, TimeNs};

/// Converts an errno of LibFS.
pub(crate) fn errno(error: varve_libfs::Errno) -> Errno {
    Errno::from_i32(error.0)
}

/// Converts a file kind.
pub(crate) const fn file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::Regular => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::BlockDevice => FileType::BlockDevice,
    }
}

/// Converts a time in nanoseconds since 1970 (possibly negative).
pub(crate) fn system_time(ns: TimeNs) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 {
        UNIX_EPOCH + distance
    } else {
        UNIX_EPOCH - distance
    }
}

/// Converts to nanoseconds since 1970, clamped to the format's range.
pub(crate) fn time_ns(time: SystemTime) -> TimeNs {
    match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    }
}

/// Converts attributes.
pub(crate) fn file_attr(attr: &InodeAttr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.key.number()),
        size: attr.size_bytes,
        blocks: attr.sectors,
        atime: system_time(attr.atime_ns),
        mtime: system_time(attr.mtime_ns),
        ctime: system_time(attr.ctime_ns),
        crtime: system_time(attr.btime_ns),
        kind: file_type(attr.kind()),
        perm: (attr.mode & MODE_PERM_MASK) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: varve_format::BLOCK_SIZE as u32,
        flags: 0,
    }
}

/// Converts a `fallocate(2)` mode; `None` for an unsupported one (collapse, insert, unshare).
pub(crate) const fn fallocate_mode(mode: i32) -> Option<FallocateMode> {
    const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH_KEEP: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    match mode {
        0 => Some(FallocateMode::Allocate),
        KEEP => Some(FallocateMode::AllocateKeepSize),
        PUNCH_KEEP => Some(FallocateMode::PunchHole),
        ZERO => Some(FallocateMode::ZeroRange),
        ZERO_KEEP => Some(FallocateMode::ZeroRangeKeepSize),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{fallocate_mode, system_time, time_ns};
    use varve_format::FallocateMode;

    #[test]
    fn times_come_back_equal_when_converted_both_ways() {
        for ns in [
            0,
            1,
            -1,
            1_999_999_999,
            -1_500_000_000,
            i64::from(u32::MAX) * 1_000_000_000,
        ] {
            assert_eq!(time_ns(system_time(ns)), ns);
        }
    }

    #[test]
    fn fallocate_refuses_modes_that_move_data() {
        assert_eq!(fallocate_mode(0), Some(FallocateMode::Allocate));
        assert_eq!(fallocate_mode(libc::FALLOC_FL_COLLAPSE_RANGE), None);
        assert_eq!(fallocate_mode(libc::FALLOC_FL_INSERT_RANGE), None);
    }
}
