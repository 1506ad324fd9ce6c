//! Reading, writing, offsets, lengths, durability.

use super::Answer;
use crate::Errno;
use crate::ofd::{Held, Ofd};
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::walk::{Here, Stop, fail};
use std::ops::Range;
use std::sync::Arc;
use varve_format::{FILE_SIZE_MAX, FallocateMode};
use varve_libfs::OpenFile;

/// A call on the descriptor in argument 0.
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

/// At the description's offset, which moves by what `act` answers.
fn at_offset(
    p: &Process,
    a: &Args,
    ofd: &Ofd,
    act: impl FnOnce(&OpenFile, u64) -> Here<usize>,
) -> Here<isize> {
    let mut position = ofd.position();
    if position.moved {
        return Err(Stop::Kernel);
    }
    let Ok(file) = p.file(ofd) else {
        return by_kernel(a, &mut position);
    };
    let count = act(file, position.at)?;
    position.at += count as u64;
    Ok(count as isize)
}

/// The kernel makes the call on the descriptor in argument 0, at the offset that is kept here and held by the caller.
pub(super) fn by_kernel(a: &Args, position: &mut Held<'_>) -> Here<isize> {
    let fd = a.int(0);
    kernel::lseek(fd, position.at as i64, libc::SEEK_SET);
    let result = a.call();
    if let Ok(at) = u64::try_from(kernel::lseek(fd, 0, libc::SEEK_CUR)) {
        position.at = at;
    }
    Err(Stop::Made(result))
}

fn offset_of(a: &Args, i: usize) -> Result<u64, Errno> {
    u64::try_from(a.word(i) as i64).map_err(|_| Errno(libc::EINVAL))
}

pub(super) fn read(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        readable(ofd)?;
        at_offset(p, a, ofd, |file, at| {
            Ok(a.buffer(1, a.word(2), |out| file.read_at(at, out))?)
        })
    })
}

pub(super) fn readv(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        readable(ofd)?;
        at_offset(p, a, ofd, |file, at| {
            Ok(a.scatter(1, 2, |done, out| file.read_at(at + done, out))?)
        })
    })
}

pub(super) fn pread(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        readable(ofd)?;
        let file = p.file(ofd)?;
        Ok(a.buffer(1, a.word(2), |out| file.read_at(at, out))? as isize)
    })
}

/// Flags of `preadv2` and `pwritev2` that mean nothing here: no data waits for a device, and none is kept in a page cache.
const NO_MATTER: i32 = libc::RWF_HIPRI | libc::RWF_NOWAIT;

pub(super) fn preadv(p: &Process, a: &Args) -> Answer {
    let flags = if a.number() as libc::c_long == libc::SYS_preadv2 {
        a.int(5)
    } else {
        0
    };
    if flags & !NO_MATTER != 0 {
        return p.kernels(&[a.int(0)]);
    }
    if flags_use_offset(a) {
        return readv(p, a);
    }
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
        readable(ofd)?;
        let file = p.file(ofd)?;
        Ok(a.scatter(1, 2, |done, out| file.read_at(at + done, out))? as isize)
    })
}

/// Offset -1 of the newer calls is the description's own.
fn flags_use_offset(a: &Args) -> bool {
    let newer = matches!(a.number() as libc::c_long, libc::SYS_preadv2 | libc::SYS_pwritev2);
    newer && a.word(3) as i64 == -1
}

/// All of a file.
const ALL: Range<u64> = 0..u64::MAX;

fn write_at(p: &Process, ofd: &Ofd, file: &OpenFile, at: u64, data: &[u8]) -> Result<usize, Errno> {
    let part = at..at.saturating_add(data.len() as u64);
    p.copies
        .change(ofd.key(), part, || file.write_at(at, data, &p.cred()))
}

fn write_here(p: &Process, a: &Args, ofd: &Ofd, data: &[u8]) -> Here<isize> {
    writable(ofd)?;
    let mut position = ofd.position();
    // Where what is appended goes is not the offset's business.
    if position.moved && !ofd.appends() {
        return Err(Stop::Kernel);
    }
    if data.is_empty() {
        return Ok(0);
    }
    let file = match p.file(ofd) {
        Ok(file) => file,
        Err(_) if position.moved => return Err(Stop::Kernel),
        Err(_) => return by_kernel(a, &mut position),
    };
    let cred = p.cred();
    let (at, count) = if ofd.appends() {
        p.copies.change(ofd.key(), ALL, || file.append(data, &cred))?
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
    writable(ofd)?;
    if data.is_empty() {
        return Ok(0);
    }
    // As Linux does: also with an offset, a descriptor that appends appends.
    let file = p.file(ofd)?;
    let count = if ofd.appends() {
        let appended = p.copies.change(ofd.key(), ALL, || file.append(data, &p.cred()));
        appended?.1
    } else {
        write_at(p, ofd, file, at, data)?
    };
    Ok(count as isize)
}

pub(super) fn write(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| write_here(p, a, ofd, a.bytes(1, a.word(2))?))
}

pub(super) fn writev(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
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
        write_there(p, ofd, offset_of(a, 3)?, a.bytes(1, a.word(2))?)
    })
}

pub(super) fn pwritev(p: &Process, a: &Args) -> Answer {
    let flags = if a.number() as libc::c_long == libc::SYS_pwritev2 {
        a.int(5)
    } else {
        0
    };
    if flags & !NO_MATTER != 0 {
        return p.kernels(&[a.int(0)]);
    }
    if flags_use_offset(a) {
        return writev(p, a);
    }
    on_file(p, a, |ofd| {
        let at = offset_of(a, 3)?;
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
            return Err(Stop::Kernel);
        }
        let file = || p.file(ofd);
        let from = || u64::try_from(offset).map_err(|_| Errno(libc::ENXIO));
        let whence = a.int(2);
        if !matches!(whence, libc::SEEK_SET | libc::SEEK_CUR) && file().is_err() {
            return by_kernel(a, &mut position);
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
        if size > FILE_SIZE_MAX {
            return fail(libc::EFBIG);
        }
        let file = p.file(ofd)?;
        p.copies
            .change(ofd.key(), ALL, || file.truncate(size, &p.cred()))?;
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
        p.copies.change(ofd.key(), ALL, || {
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

pub(super) fn sync_file_range(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |ofd| {
        if (a.word(1) as i64) < 0 || (a.word(2) as i64) < 0 {
            return fail(libc::EINVAL);
        }
        p.file(ofd)?.fsync(true)?;
        Ok(0)
    })
}

pub(super) fn sync(p: &Process) -> Answer {
    // The kernel syncs the rest. It does not tell the mount, whose log is another one.
    p.sync_session();
    Answer::NotOurs
}

pub(super) fn advise(p: &Process, a: &Args) -> Answer {
    on_file(p, a, |_| Ok(0))
}

/// The offset that argument `i` points to, if it points anywhere.
fn given_offset(a: &Args, i: usize) -> Result<Option<u64>, Errno> {
    if a.word(i) == 0 {
        return Ok(None);
    }
    u64::try_from(a.get::<i64>(i)?)
        .map(Some)
        .map_err(|_| Errno(libc::EINVAL))
}

/// One of the two files is ours, and `other` is not. It may be the mount's too, given to the kernel before; if it is elsewhere, the answer is
/// the kernel's, by which programs know that they are to copy by reading and writing.
fn half_ours(p: &Process, a: &Args, other: i32) -> Answer {
    match kernel::kind(other) {
        None => Answer::Served(-(libc::EBADF as isize)),
        Some((device, _)) if device == p.config.device => p.to_kernel(&[a.int(0), a.int(2)]),
        Some((_, libc::S_IFREG)) => Answer::Served(-(libc::EXDEV as isize)),
        Some((_, libc::S_IFDIR)) => Answer::Served(-(libc::EISDIR as isize)),
        Some(_) => Answer::Served(-(libc::EINVAL as isize)),
    }
}

pub(super) fn copy_file_range(p: &Process, a: &Args) -> Answer {
    let (from, to) = match (p.table.get(a.int(0)), p.table.get(a.int(2))) {
        (Some(from), Some(to)) => (from, to),
        (None, None) => return Answer::NotOurs,
        (ours, _) => return half_ours(p, a, a.int(if ours.is_some() { 2 } else { 0 })),
    };
    let copy = || -> Here<isize> {
        if a.word(5) != 0 {
            return fail(libc::EINVAL);
        }
        readable(&from)?;
        writable(&to)?;
        if to.is_dir {
            return fail(libc::EISDIR);
        }
        let (given_from, given_to) = (given_offset(a, 1)?, given_offset(a, 3)?);
        let at = |ofd: &Ofd, given: Option<u64>| {
            let position = ofd.position();
            if given.is_none() && position.moved {
                Err(Stop::Kernel)
            } else {
                Ok(given.unwrap_or(position.at))
            }
        };
        let (file, other) = (p.file(&from)?, p.file(&to)?);
        let (read_at, write_at) = (at(&from, given_from)?, at(&to, given_to)?);
        let count = p.copies.change(to.key(), ALL, || {
            file.copy_range_to(read_at, other, write_at, a.word(4) as u64, &p.cred())
        })?;
        match given_from {
            Some(_) => a.put(1, (read_at + count) as i64)?,
            None => from.position().at = read_at + count,
        }
        match given_to {
            Some(_) => a.put(3, (write_at + count) as i64)?,
            None => to.position().at = write_at + count,
        }
        Ok(count as isize)
    };
    match copy() {
        Err(Stop::Kernel) => p.to_kernel(&[a.int(0), a.int(2)]),
        other => Answer::of(other),
    }
}

/// Bytes that are moved at once.
const PIECE: usize = 256 << 10;

pub(super) fn sendfile(p: &Process, a: &Args) -> Answer {
    let Some(from) = p.table.get(a.int(1)) else {
        return p.kernels(&[a.int(0)]);
    };
    if p.table.has(a.int(0)) {
        return p.to_kernel(&[a.int(0), a.int(1)]);
    }
    let send = || -> Here<isize> {
        readable(&from)?;
        let given = given_offset(a, 2)?;
        let start = match given {
            Some(start) => start,
            None => {
                let position = from.position();
                if position.moved {
                    return Err(Stop::Kernel);
                }
                position.at
            }
        };
        let file = p.file(&from)?;
        let mut buffer = vec![0; PIECE.min(a.word(3))];
        let (mut done, mut failed) = (0, 0);
        while done < a.word(3) {
            let want = buffer.len().min(a.word(3) - done);
            let got = file.read_at(start + done as u64, &mut buffer[..want])?;
            if got == 0 {
                break;
            }
            // It may wait for who reads there; signals are handled meanwhile.
            let sent = outside(|| kernel::write(a.int(0), &buffer[..got]));
            if sent < 0 {
                failed = sent;
                break;
            }
            done += sent as usize;
            if (sent as usize) < got {
                break;
            }
        }
        if done == 0 && failed < 0 {
            return Ok(failed);
        }
        match given {
            Some(start) => a.put(2, (start + done as u64) as i64)?,
            None => from.position().at = start + done as u64,
        }
        Ok(done as isize)
    };
    match send() {
        Err(Stop::Kernel) => p.to_kernel(&[a.int(1)]),
        other => Answer::of(other),
    }
}
