//! Reading, writing, offsets, lengths, durability.

use super::{Answer, limits};
use crate::Errno;
use crate::ofd::{Held, Ofd};
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::kernel;
use crate::walk::{Here, Stop, fail};
use crate::why::Why;
use std::ops::Range;
use std::sync::Arc;
use varve_format::{FILE_SIZE_MAX, FallocateMode};
use varve_libfs::OpenFile;

/// Runs a call on the descriptor in argument 0.
fn on_file(p: &Process, a: &Args, act: impl FnOnce(&Arc<Ofd>) -> Here<isize>) -> Answer {
    match p.table.get(a.int(0)) {
        Some(ofd) => Answer::of(act(&ofd)),
        None => Answer::NotOurs,
    }
}

fn readable(ofd: &Ofd) -> Result<(), Errno> {
    if !ofd.access().0 {
        return Err(Errno(libc::EBADF));
    }
    if ofd.is_dir {
        Err(Errno(libc::EISDIR))
    } else {
        Ok(())
    }
}

fn writable(ofd: &Ofd) -> Result<(), Errno> {
    if ofd.access().1 {
        Ok(())
    } else {
        Err(Errno(libc::EBADF))
    }
}

/// Runs `act` at the description's offset and advances the offset by the number of bytes that it returns.
fn at_offset(
    p: &Process,
    a: &Args,
    ofd: &Ofd,
    act: impl FnOnce(&OpenFile, u64) -> Here<usize>,
) -> Here<isize> {
    let mut position = ofd.position();
    if position.moved {
        return Err(Stop::Kernel(Why::KernelsOffset));
    }
    let file = match p.file(ofd) {
        Ok(file) => file,
        Err(stop) => return by_kernel(a, &mut position, stop),
    };
    let count = act(file, position.at)?;
    position.at += count as u64;
    Ok(count as isize)
}

/// Has the kernel make the call on the descriptor in argument 0, at the offset that this process keeps and
/// the caller has locked, since `stop` keeps this process from it.
pub(super) fn by_kernel(a: &Args, position: &mut Held<'_>, stop: Stop) -> Here<isize> {
    let Stop::Kernel(why) = stop else {
        return Err(stop);
    };
    let fd = a.int(0);
    kernel::lseek(fd, position.at as i64, libc::SEEK_SET);
    let result = a.call();
    if let Ok(at) = u64::try_from(kernel::lseek(fd, 0, libc::SEEK_CUR)) {
        position.at = at;
    }
    Err(Stop::Made(result, why))
}

fn offset_of(a: &Args, i: usize) -> Result<u64, Errno> {
    u64::try_from(a.word(i) as i64).map_err(|_| Errno(libc::EINVAL))
}

/// Longest read in bytes that is passed on whole; longer ones are first cut to the file's size.
const SHORT: usize = 16 << 10;

/// Checks that `at + len` is a valid file offset.
pub(super) fn ends(at: u64, len: usize) -> Result<(), Errno> {
    match at.checked_add(len as u64) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(Errno(libc::EINVAL)),
    }
}

/// Returns the number of bytes that the file has within `len` bytes at `at`.
pub(super) fn within(file: &OpenFile, at: u64, len: usize) -> Result<usize, Errno> {
    let left = file.getattr()?.size_bytes.saturating_sub(at);
    Ok(len.min(usize::try_from(left).unwrap_or(usize::MAX)))
}

/// Reads at `at` into the buffer of argument 1. The part of the buffer behind the end of the file is not
/// touched and may be invalid memory.
fn read_at(a: &Args, file: &OpenFile, at: u64) -> Result<usize, Errno> {
    let len = a.word(2);
    a.is_range(1, len)?;
    ends(at, len)?;
    let read = |len| a.buffer(1, len, |out| file.read_at(at, out));
    if len > SHORT {
        return read(within(file, at, len)?);
    }
    match read(len) {
        Err(Errno(libc::EFAULT)) => read(within(file, at, len)?),
        other => other,
    }
}

pub(super) fn read(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        readable(ofd)?;
        at_offset(p, a, ofd, |file, at| Ok(read_at(a, file, at)?))
    })
}

pub(super) fn readv(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        readable(ofd)?;
        at_offset(p, a, ofd, |file, at| {
            let most = |len| within(file, at, len);
            Ok(a.scatter(1, 2, most, |done, out| file.read_at(at + done, out))?)
        })
    })
}

pub(super) fn pread(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        readable(ofd)?;
        let file = p.file(ofd)?;
        Ok(read_at(a, file, at)? as isize)
    })
}

/// Flags of `preadv2` and `pwritev2` without an effect here: no data waits for a device, and none is kept in
/// a page cache.
const NO_MATTER: i32 = libc::RWF_HIPRI | libc::RWF_NOWAIT;

pub(super) fn preadv(p: &Process, a: &Args) -> Answer {
    let flags = if a.number() as libc::c_long == libc::SYS_preadv2 {
        a.int(5)
    } else {
        0
    };
    if flags & !NO_MATTER != 0 {
        return p.kernels(Why::NotServed, &[a.int(0)]);
    }
    if flags_use_offset(a) {
        return readv(p, a);
    }
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        readable(ofd)?;
        let file = p.file(ofd)?;
        let most = |len| {
            ends(at, len)?;
            within(file, at, len)
        };
        Ok(a.scatter(1, 2, most, |done, out| file.read_at(at + done, out))? as isize)
    })
}

/// Whether offset -1 of `preadv2` or `pwritev2` selects the description's own offset.
fn flags_use_offset(a: &Args) -> bool {
    let newer = matches!(a.number() as libc::c_long, libc::SYS_preadv2 | libc::SYS_pwritev2);
    newer && a.word(3) as i64 == -1
}

/// The byte range of a whole file.
pub(super) const ALL: Range<u64> = 0..u64::MAX;

fn write_at(p: &Process, ofd: &Ofd, file: &OpenFile, at: u64, data: &[u8]) -> Result<usize, Errno> {
    let part = at..at.saturating_add(data.len() as u64);
    p.change(ofd.id(), part, || file.write_at(at, data, &p.cred()))
}

/// Returns the part of `len` bytes at `at`, or at the end for an appending descriptor, that RLIMIT_FSIZE
/// permits.
fn room(ofd: &Ofd, file: &OpenFile, at: u64, len: usize) -> Result<usize, Errno> {
    let place = || {
        if ofd.appends() {
            Ok(file.getattr()?.size_bytes)
        } else {
            Ok(at)
        }
    };
    limits::room(place, len)
}

fn write_here(p: &Process, a: &Args, ofd: &Ofd, data: &[u8]) -> Here<isize> {
    let mut position = ofd.position();
    // Appending does not depend on the offset.
    if position.moved && !ofd.appends() {
        return Err(Stop::Kernel(Why::KernelsOffset));
    }
    if data.is_empty() {
        return Ok(0);
    }
    let file = match p.file(ofd) {
        Ok(file) => file,
        Err(_) if position.moved => return Err(Stop::Kernel(Why::KernelsOffset)),
        Err(stop) => {
            if ofd.appends() {
                // The kernel takes the offset behind an append from its own idea of the file's length.
                kernel::refresh(a.int(0));
            }
            return by_kernel(a, &mut position, stop);
        }
    };
    let cred = p.cred();
    let data = &data[..room(ofd, file, position.at, data.len())?];
    let (at, count) = if ofd.appends() {
        p.change(ofd.id(), ALL, || file.append(data, &cred))?
    } else {
        (position.at, write_at(p, ofd, file, position.at, data)?)
    };
    position.at = at + count as u64;
    if position.moved {
        kernel::lseek(a.int(0), position.at as i64, libc::SEEK_SET);
    }
    Ok(count as isize)
}

fn write_there(p: &Process, ofd: &Ofd, at: u64, data: &[u8]) -> Here<isize> {
    if data.is_empty() {
        return Ok(0);
    }
    ends(at, data.len())?;
    // As on Linux, an appending descriptor appends even if an offset is given.
    let file = p.file(ofd)?;
    let data = &data[..room(ofd, file, at, data.len())?];
    let count = if ofd.appends() {
        let appended = p.change(ofd.id(), ALL, || file.append(data, &p.cred()));
        appended?.1
    } else {
        write_at(p, ofd, file, at, data)?
    };
    Ok(count as isize)
}

pub(super) fn write(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        writable(ofd)?;
        write_here(p, a, ofd, a.data(1, a.word(2))?)
    })
}

pub(super) fn writev(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        writable(ofd)?;
        let mut result = Ok(0);
        a.gather(1, 2, |data| {
            result = write_here(p, a, ofd, data);
            Ok(())
        })?;
        result
    })
}

pub(super) fn pwrite(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        writable(ofd)?;
        write_there(p, ofd, at, a.data(1, a.word(2))?)
    })
}

pub(super) fn pwritev(p: &Process, a: &Args) -> Answer {
    let flags = if a.number() as libc::c_long == libc::SYS_pwritev2 {
        a.int(5)
    } else {
        0
    };
    if flags & !NO_MATTER != 0 {
        return p.kernels(Why::NotServed, &[a.int(0)]);
    }
    if flags_use_offset(a) {
        return writev(p, a);
    }
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        writable(ofd)?;
        let mut result = Ok(0);
        a.gather(1, 2, |data| {
            result = write_there(p, ofd, at, data);
            Ok(())
        })?;
        result
    })
}

pub(super) fn lseek(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let offset = a.word(1) as i64;
        let mut position = ofd.position();
        if position.moved {
            return Err(Stop::Kernel(Why::KernelsOffset));
        }
        let file = || p.file(ofd);
        let from = || u64::try_from(offset).map_err(|_| Errno(libc::ENXIO));
        let whence = a.int(2);
        if !matches!(whence, libc::SEEK_SET | libc::SEEK_CUR)
            && let Err(stop) = file()
        {
            return by_kernel(a, &mut position, stop);
        }
        let base = match whence {
            libc::SEEK_SET => 0,
            libc::SEEK_CUR => position.at,
            libc::SEEK_END => file()?.getattr()?.size_bytes,
            libc::SEEK_DATA | libc::SEEK_HOLE if ofd.is_dir => return Err(Stop::Errno(Errno(libc::EINVAL))),
            libc::SEEK_DATA => {
                position.at = file()?.seek_data(from()?)?;
                return Ok(position.at as isize);
            }
            libc::SEEK_HOLE => {
                position.at = file()?.seek_hole(from()?)?;
                return Ok(position.at as isize);
            }
            _ => return fail(libc::EINVAL),
        };
        let to = base.checked_add_signed(offset).ok_or(Errno(libc::EINVAL))?;
        if to > i64::MAX as u64 || (to > FILE_SIZE_MAX && !ofd.is_dir) {
            return fail(libc::EINVAL);
        }
        position.at = to;
        Ok(to as isize)
    })
}

pub(super) fn ftruncate(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let size = offset_of(a, 1)?;
        if ofd.is_dir {
            return fail(libc::EINVAL);
        }
        let file = p.file(ofd)?;
        limits::grow(|| file.getattr().map(|attr| attr.size_bytes), size)?;
        if size > FILE_SIZE_MAX {
            return fail(libc::EFBIG);
        }
        p.change(ofd.id(), ALL, || file.truncate(size, &p.cred()))?;
        Ok(0)
    })
}

pub(super) fn fallocate(p: &Process, a: &Args) -> Answer {
    const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    on_file(p, a, |ofd| {
        let (offset, len) = (a.word(2) as i64, a.word(3) as i64);
        if offset < 0 || len <= 0 {
            return fail(libc::EINVAL);
        }
        let mode = match a.int(1) {
            0 => FallocateMode::Allocate,
            libc::FALLOC_FL_KEEP_SIZE => FallocateMode::AllocateKeepSize,
            PUNCH => FallocateMode::PunchHole,
            libc::FALLOC_FL_ZERO_RANGE => FallocateMode::ZeroRange,
            ZERO_KEEP => FallocateMode::ZeroRangeKeepSize,
            _ => return fail(libc::EOPNOTSUPP),
        };
        writable(ofd)?;
        if (offset as u64).saturating_add(len as u64) > FILE_SIZE_MAX {
            return fail(libc::EFBIG);
        }
        let file = p.file(ofd)?;
        if matches!(mode, FallocateMode::Allocate | FallocateMode::ZeroRange) {
            limits::grow(
                || file.getattr().map(|attr| attr.size_bytes),
                (offset + len) as u64,
            )?;
        }
        p.change(ofd.id(), ALL, || {
            file.fallocate(mode, offset as u64, len as u64, &p.cred())
        })?;
        Ok(0)
    })
}

pub(super) fn fsync(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        p.file(ofd)?
            .fsync(a.number() as libc::c_long == libc::SYS_fdatasync)?;
        Ok(0)
    })
}

/// Persists all changes of all sessions of the pool, or fails. The kernel cannot do it: `syncfs` does not
/// reach a FUSE server.
pub(super) fn syncfs(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        p.fs(ofd.pool)?.sync_all()?;
        Ok(0)
    })
}

const SYNC_FLAGS: u32 =
    libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;

pub(super) fn sync_file_range(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let (offset, len) = (a.word(1) as i64, a.word(2) as i64);
        if a.uint(3) & !SYNC_FLAGS != 0 || offset < 0 || len < 0 {
            return fail(libc::EINVAL);
        }
        ends(offset as u64, len as usize)?;
        p.file(ofd)?.fsync(true)?;
        Ok(0)
    })
}

pub(super) fn sync(p: &Process) -> Answer {
    // The kernel syncs other file systems and does not tell the mount. The daemon persists the other
    // sessions' logs.
    p.sync_session();
    Answer::NotOurs
}

/// The highest kind of advice; they are numbered from 0.
const ADVICE_MAX: i32 = libc::POSIX_FADV_NOREUSE;

pub(super) fn fadvise(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |_| {
        let known = (0..=ADVICE_MAX).contains(&a.int(3));
        if known && a.word(2) as i64 >= 0 {
            Ok(0)
        } else {
            fail(libc::EINVAL)
        }
    })
}

pub(super) fn readahead(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| match ofd.access() {
        (false, _) => fail(libc::EBADF),
        _ if ofd.is_dir || (a.word(2) as i64) < 0 => fail(libc::EINVAL),
        _ => Ok(0),
    })
}
