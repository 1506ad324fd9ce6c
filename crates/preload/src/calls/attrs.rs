//! Attributes, permissions, times, extended attributes.

use super::{Answer, limits};
use crate::Errno;
use crate::config::PoolId;
use crate::process::Process;
use crate::sys::args::{Args, Plain};
use crate::walk::{FileId, Here, Start, Stop, fail};
use crate::why::Why;
use varve_format::{FILE_SIZE_MAX, FileKind, InodeAttr};
use varve_libfs::{AttrChange, Cred, SetTime};

const BLOCK: i64 = varve_format::BLOCK_SIZE as i64;
const SECOND: i64 = 1_000_000_000;

/// Returns the attributes of the inode at the end of the path, and its pool.
fn find(p: &Process, start: Start<'_>, follow: bool) -> Here<(PoolId, InodeAttr)> {
    let walked = p.walk(start, follow)?;
    let attr = walked.target.ok_or(Errno(libc::ENOENT))?;
    Ok((walked.pool, attr))
}

/// As [`find`], without its attributes.
fn find_id(p: &Process, start: Start<'_>, follow: bool) -> Here<FileId> {
    let (pool, attr) = find(p, start, follow)?;
    Ok(FileId { pool, key: attr.key })
}

/// Seconds and nanoseconds.
const fn split(ns: i64) -> (i64, i64) {
    (ns.div_euclid(SECOND), ns.rem_euclid(SECOND))
}

fn to_stat(p: &Process, pool: PoolId, attr: &InodeAttr) -> libc::stat {
    let mut stat = libc::stat::zero();
    stat.st_dev = p.pool(pool).config.device;
    stat.st_ino = attr.key.number();
    stat.st_nlink = u64::from(attr.nlink);
    stat.st_mode = attr.mode;
    stat.st_uid = attr.uid;
    stat.st_gid = attr.gid;
    stat.st_rdev = u64::from(attr.rdev);
    stat.st_size = attr.size_bytes as i64;
    stat.st_blksize = BLOCK;
    stat.st_blocks = attr.sectors as i64;
    (stat.st_atime, stat.st_atime_nsec) = split(attr.atime_ns);
    (stat.st_mtime, stat.st_mtime_nsec) = split(attr.mtime_ns);
    (stat.st_ctime, stat.st_ctime_nsec) = split(attr.ctime_ns);
    stat
}

fn to_statx(p: &Process, pool: PoolId, attr: &InodeAttr) -> libc::statx {
    let device = p.pool(pool).config.device;
    let time = |ns| {
        let (tv_sec, nsec) = split(ns);
        let mut time = libc::statx::zero().stx_atime;
        (time.tv_sec, time.tv_nsec) = (tv_sec, nsec as u32);
        time
    };
    let mut statx = libc::statx::zero();
    statx.stx_mask = libc::STATX_BASIC_STATS | libc::STATX_BTIME;
    statx.stx_blksize = BLOCK as u32;
    statx.stx_nlink = attr.nlink;
    statx.stx_uid = attr.uid;
    statx.stx_gid = attr.gid;
    statx.stx_mode = attr.mode as u16;
    statx.stx_ino = attr.key.number();
    statx.stx_size = attr.size_bytes;
    statx.stx_blocks = attr.sectors;
    statx.stx_atime = time(attr.atime_ns);
    statx.stx_mtime = time(attr.mtime_ns);
    statx.stx_ctime = time(attr.ctime_ns);
    statx.stx_btime = time(attr.btime_ns);
    statx.stx_rdev_major = libc::major(u64::from(attr.rdev));
    statx.stx_rdev_minor = libc::minor(u64::from(attr.rdev));
    statx.stx_dev_major = libc::major(device);
    statx.stx_dev_minor = libc::minor(device);
    statx
}

/// Whether an empty or null path with `flags` stands for the descriptor itself.
fn means_fd(a: &Args, i: usize, flags: i32) -> bool {
    flags & libc::AT_EMPTY_PATH != 0 && (a.word(i) == 0 || a.path(i).is_ok_and(<[u8]>::is_empty))
}

pub(super) fn fstat(p: &Process, a: &Args) -> Answer {
    let Some(ofd) = p.table.get(a.int(0)) else {
        return Answer::NotOurs;
    };
    let stat = || -> Here<isize> {
        a.put(1, to_stat(p, ofd.pool, &p.file(&ofd)?.getattr()?))?;
        Ok(0)
    };
    Answer::of(stat())
}

pub(super) fn stat(p: &Process, a: &Args, dirfd: i32, i: usize, out: usize, flags: i32) -> Answer {
    if means_fd(a, i, flags) {
        let Some(ofd) = p.table.get(dirfd) else {
            return Answer::NotOurs;
        };
        let stat = || -> Here<isize> {
            a.put(out, to_stat(p, ofd.pool, &p.file(&ofd)?.getattr()?))?;
            Ok(0)
        };
        return Answer::of(stat());
    }
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT) != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    p.on_path(a, dirfd, i, |start| {
        let (pool, attr) = find(p, start, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        a.put(out, to_stat(p, pool, &attr))?;
        Ok(0)
    })
}

pub(super) fn statx(p: &Process, a: &Args) -> Answer {
    const KNOWN: i32 =
        libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH | libc::AT_NO_AUTOMOUNT | libc::AT_STATX_SYNC_TYPE;
    let (dirfd, flags, mask) = (a.int(0), a.int(2), a.uint(3));
    if flags & !KNOWN != 0 || mask & !(libc::STATX_BASIC_STATS | libc::STATX_BTIME) != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    if means_fd(a, 1, flags) {
        let Some(ofd) = p.table.get(dirfd) else {
            return Answer::NotOurs;
        };
        let stat = || -> Here<isize> {
            a.put(4, to_statx(p, ofd.pool, &p.file(&ofd)?.getattr()?))?;
            Ok(0)
        };
        return Answer::of(stat());
    }
    p.on_path(a, dirfd, 1, |start| {
        let (pool, attr) = find(p, start, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        // The mount's root has attributes that the kernel alone knows.
        if attr.key == p.fs(pool)?.root() {
            return Err(Stop::Kernel(Why::NotServed));
        }
        a.put(4, to_statx(p, pool, &attr))?;
        Ok(0)
    })
}

/// Whether `cred` has all access rights of the mask `want` (as in `access`: 4 read, 2 write, 1 execute).
pub(super) fn may(attr: &InodeAttr, cred: &Cred, want: u32) -> bool {
    if cred.uid == 0 {
        return want & 1 == 0 || attr.is_dir() || attr.mode & 0o111 != 0;
    }
    let shift = if cred.uid == attr.uid {
        6
    } else if cred.gid == attr.gid || cred.groups.contains(&attr.gid) {
        3
    } else {
        0
    };
    (attr.mode >> shift) & want == want
}

pub(super) fn access(p: &Process, a: &Args, dirfd: i32, i: usize, mode: i32, flags: i32) -> Answer {
    let real = flags & libc::AT_EACCESS == 0;
    let ids_differ = real && !p.same_ids.load(std::sync::atomic::Ordering::Relaxed);
    if ids_differ || flags & !(libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW) != 0 || mode & !7 != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    p.on_path(a, dirfd, i, |start| {
        let (_, attr) = find(p, start, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        if may(&attr, &p.cred(), mode as u32) {
            Ok(0)
        } else {
            fail(libc::EACCES)
        }
    })
}

fn change(p: &Process, id: FileId, change: &AttrChange) -> Here<isize> {
    p.fs(id.pool)?.setattr(id.key, change, &p.cred())?;
    Ok(0)
}

pub(super) fn chmod(p: &Process, a: &Args, dirfd: i32, i: usize, mode: u32, flags: i32) -> Answer {
    if flags & !libc::AT_SYMLINK_NOFOLLOW != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    let change_mode = |id| {
        let mode = AttrChange {
            mode: Some(mode & 0o7777),
            ..AttrChange::default()
        };
        change(p, id, &mode)
    };
    let follow = flags & libc::AT_SYMLINK_NOFOLLOW == 0;
    // The C library changes the mode of a directory entry that must not be a symbolic link by an `O_PATH`
    // descriptor and its path below `/proc/self/fd`.
    if follow && let Some(ofd) = a.path(i).ok().and_then(|path| p.named_open(path)) {
        return Answer::of(p.open_id(&ofd).and_then(change_mode));
    }
    p.on_path(a, dirfd, i, |start| {
        let (pool, attr) = find(p, start, follow)?;
        if attr.kind() == FileKind::Symlink {
            return fail(libc::EOPNOTSUPP);
        }
        change_mode(FileId { pool, key: attr.key })
    })
}

pub(super) fn fchmod(p: &Process, a: &Args) -> Answer {
    let Some(ofd) = p.table.get(a.int(0)) else {
        return Answer::NotOurs;
    };
    let mode = AttrChange {
        mode: Some(a.uint(1) & 0o7777),
        ..AttrChange::default()
    };
    Answer::of(p.open_id(&ofd).and_then(|id| change(p, id, &mode)))
}

fn owners(a: &Args, i: usize) -> AttrChange {
    let id = |i: usize| Some(a.uint(i)).filter(|id| *id != u32::MAX);
    AttrChange {
        uid: id(i),
        gid: id(i + 1),
        ..AttrChange::default()
    }
}

pub(super) fn chown(p: &Process, a: &Args, dirfd: i32, i: usize, ids: usize, flags: i32) -> Answer {
    if means_fd(a, i, flags) && p.table.has(dirfd) {
        return p.table.get(dirfd).map_or(Answer::NotOurs, |ofd| {
            Answer::of(p.open_id(&ofd).and_then(|id| change(p, id, &owners(a, ids))))
        });
    }
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    p.on_path(a, dirfd, i, |start| {
        let id = find_id(p, start, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?;
        change(p, id, &owners(a, ids))
    })
}

pub(super) fn fchown(p: &Process, a: &Args) -> Answer {
    let Some(ofd) = p.table.get(a.int(0)) else {
        return Answer::NotOurs;
    };
    Answer::of(p.open_id(&ofd).and_then(|id| change(p, id, &owners(a, 1))))
}

pub(super) fn truncate(p: &Process, a: &Args) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        let size = u64::try_from(a.word(1) as i64).map_err(|_| Errno(libc::EINVAL))?;
        let walked = p.walk(start, true)?;
        let attr = walked.target.clone().ok_or(Errno(libc::ENOENT))?;
        let id = FileId {
            pool: walked.pool,
            key: attr.key,
        };
        match attr.kind() {
            FileKind::Directory => return fail(libc::EISDIR),
            FileKind::Regular => {}
            _ => return fail(libc::EINVAL),
        }
        if !may(&attr, &p.cred(), 2) {
            return fail(libc::EACCES);
        }
        if p.pool(id.pool).mapped.read().contains_key(&attr.key) {
            return Err(Stop::Kernel(Why::Mapped));
        }
        p.open_writer(&attr, &walked, libc::O_WRONLY)?;
        limits::grow(|| Ok::<_, Errno>(attr.size_bytes), size)?;
        if size > FILE_SIZE_MAX {
            return fail(libc::EFBIG);
        }
        let shorter = AttrChange {
            size: Some(size),
            ..AttrChange::default()
        };
        p.change(id, 0..u64::MAX, || change(p, id, &shorter))
    })
}

fn times(atime: Option<SetTime>, mtime: Option<SetTime>) -> AttrChange {
    AttrChange {
        atime,
        mtime,
        ..AttrChange::default()
    }
}

fn at(seconds: i64, ns: i64) -> Option<SetTime> {
    Some(SetTime::At(seconds.saturating_mul(SECOND).saturating_add(ns)))
}

pub(super) fn utime(p: &Process, a: &Args) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        let set = if a.word(1) == 0 {
            times(Some(SetTime::Now), Some(SetTime::Now))
        } else {
            let given = a.get::<libc::utimbuf>(1)?;
            times(at(given.actime, 0), at(given.modtime, 0))
        };
        change(p, find_id(p, start, true)?, &set)
    })
}

pub(super) fn utimes(p: &Process, a: &Args, dirfd: i32, i: usize) -> Answer {
    p.on_path(a, dirfd, i, |start| {
        let set = if a.word(i + 1) == 0 {
            times(Some(SetTime::Now), Some(SetTime::Now))
        } else {
            let [atime, mtime] = a.get::<[libc::timeval; 2]>(i + 1)?;
            let one = |time: libc::timeval| -> Result<Option<SetTime>, Errno> {
                let inside = (0..1_000_000).contains(&time.tv_usec);
                if inside {
                    Ok(at(time.tv_sec, time.tv_usec * 1000))
                } else {
                    Err(Errno(libc::EINVAL))
                }
            };
            times(one(atime)?, one(mtime)?)
        };
        change(p, find_id(p, start, true)?, &set)
    })
}

fn given_times(a: &Args) -> Result<Option<AttrChange>, Errno> {
    if a.word(2) == 0 {
        return Ok(Some(times(Some(SetTime::Now), Some(SetTime::Now))));
    }
    let [atime, mtime] = a.get::<[libc::timespec; 2]>(2)?;
    let one = |time: libc::timespec| match time {
        libc::timespec {
            tv_nsec: libc::UTIME_NOW,
            ..
        } => Ok(Some(SetTime::Now)),
        libc::timespec {
            tv_nsec: libc::UTIME_OMIT,
            ..
        } => Ok(None),
        time if (0..SECOND).contains(&time.tv_nsec) => Ok(at(time.tv_sec, time.tv_nsec)),
        _ => Err(Errno(libc::EINVAL)),
    };
    let (atime, mtime) = (one(atime)?, one(mtime)?);
    // Linux does not resolve the path if both times are omitted.
    Ok((atime.is_some() || mtime.is_some()).then(|| times(atime, mtime)))
}

pub(super) fn utimensat(p: &Process, a: &Args) -> Answer {
    let (dirfd, flags) = (a.int(0), a.int(3));
    if a.word(1) == 0 || means_fd(a, 1, flags) {
        let Some(ofd) = p.table.get(dirfd) else {
            return Answer::NotOurs;
        };
        let set = || match given_times(a)? {
            Some(set) => change(p, p.open_id(&ofd)?, &set),
            None => Ok(0),
        };
        return Answer::of(set());
    }
    if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    p.on_path(a, dirfd, 1, |start| match given_times(a)? {
        Some(set) => change(
            p,
            find_id(p, start, flags & libc::AT_SYMLINK_NOFOLLOW == 0)?,
            &set,
        ),
        None => Ok(0),
    })
}

/// Longest name of an extended attribute in bytes, with its terminating zero.
const XATTR_NAME_MAX: usize = 256;

fn xattr_name(a: &Args) -> Result<&[u8], Errno> {
    match a.text(1, XATTR_NAME_MAX)? {
        Some(name) if !name.is_empty() => Ok(name),
        _ => Err(Errno(libc::ERANGE)),
    }
}

/// Copies `value` to the buffer in argument `i`, whose size is argument `i + 1`, as `getxattr` does.
fn hand_out(a: &Args, i: usize, value: &[u8]) -> Here<isize> {
    let size = a.word(i + 1);
    if size == 0 {
        return Ok(value.len() as isize);
    }
    if size < value.len() {
        return fail(libc::ERANGE);
    }
    a.put_bytes(i, value)?;
    Ok(value.len() as isize)
}

fn get(p: &Process, a: &Args, id: FileId) -> Here<isize> {
    let value = p.fs(id.pool)?.getxattr(id.key, xattr_name(a)?, &p.cred())?;
    hand_out(a, 2, &value)
}

pub(super) fn getxattr(p: &Process, a: &Args, follow: bool) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        get(p, a, find_id(p, start, follow)?)
    })
}

pub(super) fn fgetxattr(p: &Process, a: &Args) -> Answer {
    p.table.get(a.int(0)).map_or(Answer::NotOurs, |ofd| {
        Answer::of(p.open_id(&ofd).and_then(|id| get(p, a, id)))
    })
}

fn set(p: &Process, a: &Args, id: FileId) -> Here<isize> {
    let flags = a.int(4);
    let (create, replace) = (flags & libc::XATTR_CREATE != 0, flags & libc::XATTR_REPLACE != 0);
    if flags & !(libc::XATTR_CREATE | libc::XATTR_REPLACE) != 0 || (create && replace) {
        return fail(libc::EINVAL);
    }
    if a.word(3) > varve_format::XATTR_VALUE_MAX {
        return fail(libc::E2BIG);
    }
    p.fs(id.pool)?.setxattr(
        id.key,
        xattr_name(a)?,
        a.bytes(2, a.word(3))?,
        create,
        replace,
        &p.cred(),
    )?;
    Ok(0)
}

pub(super) fn setxattr(p: &Process, a: &Args, follow: bool) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        set(p, a, find_id(p, start, follow)?)
    })
}

pub(super) fn fsetxattr(p: &Process, a: &Args) -> Answer {
    p.table.get(a.int(0)).map_or(Answer::NotOurs, |ofd| {
        Answer::of(p.open_id(&ofd).and_then(|id| set(p, a, id)))
    })
}

fn list(p: &Process, a: &Args, id: FileId) -> Here<isize> {
    let mut all = Vec::new();
    for name in p.fs(id.pool)?.listxattr(id.key, &p.cred())? {
        all.extend_from_slice(&name);
        all.push(0);
    }
    hand_out(a, 1, &all)
}

pub(super) fn listxattr(p: &Process, a: &Args, follow: bool) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        list(p, a, find_id(p, start, follow)?)
    })
}

pub(super) fn flistxattr(p: &Process, a: &Args) -> Answer {
    p.table.get(a.int(0)).map_or(Answer::NotOurs, |ofd| {
        Answer::of(p.open_id(&ofd).and_then(|id| list(p, a, id)))
    })
}

fn remove(p: &Process, a: &Args, id: FileId) -> Here<isize> {
    p.fs(id.pool)?.removexattr(id.key, xattr_name(a)?, &p.cred())?;
    Ok(0)
}

pub(super) fn removexattr(p: &Process, a: &Args, follow: bool) -> Answer {
    p.on_path(a, libc::AT_FDCWD, 0, |start| {
        remove(p, a, find_id(p, start, follow)?)
    })
}

pub(super) fn fremovexattr(p: &Process, a: &Args) -> Answer {
    p.table.get(a.int(0)).map_or(Answer::NotOurs, |ofd| {
        Answer::of(p.open_id(&ofd).and_then(|id| remove(p, a, id)))
    })
}
