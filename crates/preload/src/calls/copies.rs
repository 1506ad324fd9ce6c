//! Copies from one descriptor to another: `copy_file_range` and `sendfile`.

use super::io::{ALL, ends, within};
use super::{Answer, limits};
use crate::Errno;
use crate::ofd::Ofd;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::entry::outside;
use crate::sys::kernel;
use crate::walk::{Here, Stop, fail};
use crate::why::Why;
use std::sync::Arc;
use varve_libfs::OpenFile;

/// Bytes per read and write.
const PIECE: usize = 256 << 10;

/// Returns the offset that argument `i` points to; `None` for a null pointer.
fn given_offset(a: &Args, i: usize) -> Result<Option<u64>, Errno> {
    if a.word(i) == 0 {
        return Ok(None);
    }
    u64::try_from(a.get::<i64>(i)?)
        .map(Some)
        .map_err(|_| Errno(libc::EINVAL))
}

/// Returns the offset at which a served description is read or written: the one that was given, or its own.
fn offset_in(ofd: &Ofd, given: Option<u64>) -> Here<u64> {
    let position = ofd.position();
    match given {
        Some(given) => Ok(given),
        None if position.moved => Err(Stop::Kernel(Why::KernelsOffset)),
        None => Ok(position.at),
    }
}

/// Copies up to `most` bytes by way of memory, of which the source is believed to have `left`. `read` and
/// `write` take the number of bytes copied so far; `read` returns 0 at the end. A short copy is reported
/// before its error.
fn pump(
    most: usize,
    left: usize,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<usize, Errno>,
    mut write: impl FnMut(u64, &[u8]) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    // What is believed may be wrong: some files say that they are empty.
    let mut buffer = vec![0; most.min(left.clamp(4096, PIECE))];
    let mut done = 0;
    while done < most {
        let want = buffer.len().min(most - done);
        let got = match read(done as u64, &mut buffer[..want]) {
            Ok(0) => break,
            Ok(got) => got,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        };
        match write(done as u64, &buffer[..got]) {
            Ok(count) => {
                done += count;
                if count < got {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Copies between files by way of memory: how many bytes.
fn copy_between(
    p: &Process,
    (file, from): (&OpenFile, u64),
    (other, to): (&OpenFile, u64),
    most: usize,
) -> Result<usize, Errno> {
    pump(
        most,
        within(file, from, most)?,
        |done, out| file.read_at(from + done, out),
        |done, data| other.write_at(to + done, data, &p.cred()),
    )
}

/// Handles `copy_file_range` between one served file and `other`, which is not served. If `other` is in the
/// mount too, handed to the kernel earlier, the kernel copies. If it is elsewhere, the call fails as the
/// kernel's would, and programs fall back to reading and writing.
fn half_ours(p: &Process, a: &Args, other: i32) -> Answer {
    match kernel::kind(other) {
        None => Answer::Served(-(libc::EBADF as isize)),
        Some((device, _)) if p.pool_on(device).is_some() => {
            p.to_kernel(Why::NotServed, &[a.int(0), a.int(2)])
        }
        Some((_, libc::S_IFREG)) => Answer::Served(-(libc::EXDEV as isize)),
        Some((_, libc::S_IFDIR)) => Answer::Served(-(libc::EISDIR as isize)),
        Some(_) => Answer::Served(-(libc::EINVAL as isize)),
    }
}

/// Handles `copy_file_range`.
pub(super) fn copy_file_range(p: &Process, a: &Args) -> Answer {
    let (from, to) = match (p.table.get(a.int(0)), p.table.get(a.int(2))) {
        (Some(from), Some(to)) => (from, to),
        (None, None) => return Answer::NotOurs,
        (ours, _) => return half_ours(p, a, a.int(if ours.is_some() { 2 } else { 0 })),
    };
    let copy = || -> Here<isize> {
        if a.uint(5) != 0 {
            return fail(libc::EINVAL);
        }
        if from.is_dir || to.is_dir {
            return fail(libc::EISDIR);
        }
        if !from.access().0 || !to.access().1 || to.appends() {
            return fail(libc::EBADF);
        }
        let wraps = |i| {
            let offset = if a.word(i) == 0 { Ok(0) } else { a.get::<u64>(i) };
            offset.map(|offset| offset.checked_add(a.word(4) as u64).is_none())
        };
        if wraps(1)? || wraps(3)? {
            return fail(libc::EOVERFLOW);
        }
        let (given_from, given_to) = (given_offset(a, 1)?, given_offset(a, 3)?);
        let (file, other) = (p.file(&from)?, p.file(&to)?);
        let (read_at, write_at) = (offset_in(&from, given_from)?, offset_in(&to, given_to)?);
        let most = limits::room(|| Ok::<_, Errno>(write_at), a.word(4))?;
        let count = p.change(to.id(), ALL, || {
            if from.pool == to.pool {
                return file.copy_range_to(read_at, other, write_at, most as u64, &p.cred());
            }
            copy_between(p, (file, read_at), (other, write_at), most).map(|count| count as u64)
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
        Err(Stop::Kernel(why)) => p.to_kernel(why, &[a.int(0), a.int(2)]),
        other => Answer::of(other),
    }
}

/// Handles `sendfile`.
pub(super) fn sendfile(p: &Process, a: &Args) -> Answer {
    let sent = match (p.table.get(a.int(1)), p.table.get(a.int(0))) {
        (None, None) => return Answer::NotOurs,
        (Some(from), None) => send_away(p, a, &from),
        (from, Some(to)) => send_here(p, a, from.as_ref(), &to),
    };
    match sent {
        Err(Stop::Kernel(why)) => p.kernels(why, &[a.int(0), a.int(1)]),
        other => Answer::of(other),
    }
}

/// The result of a system call on a descriptor of the kernel's.
fn counted(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno(-result as i32))
}

/// Checks that a descriptor that is not served here is open for one of two kinds of access. Returns its
/// flags.
fn open_for(fd: i32, access: [i32; 2]) -> Here<i32> {
    let flags = kernel::fcntl(fd, libc::F_GETFL, 0) as i32;
    if flags < 0 || flags & libc::O_PATH != 0 || !access.contains(&(flags & libc::O_ACCMODE)) {
        return fail(libc::EBADF);
    }
    Ok(flags)
}

/// Sends from a served file to a descriptor that is not served here.
fn send_away(p: &Process, a: &Args, from: &Arc<Ofd>) -> Here<isize> {
    let (out, most) = (a.int(0), a.word(3));
    let given = given_offset(a, 2)?;
    if !from.access().0 {
        return fail(libc::EBADF);
    }
    ends(given.unwrap_or(0), most)?;
    // As the kernel does before it looks at the source.
    if open_for(out, [libc::O_WRONLY, libc::O_RDWR])? & libc::O_APPEND != 0 || from.is_dir {
        return fail(libc::EINVAL);
    }
    let start = offset_in(from, given)?;
    let file = p.file(from)?;
    let done = pump(
        most,
        within(file, start, most)?,
        |done, out| file.read_at(start + done, out),
        // The write may block until a reader takes the data; signals are handled meanwhile.
        |_, data| counted(outside(|| kernel::write(out, data))),
    )?;
    match given {
        Some(_) => a.put(2, (start + done as u64) as i64)?,
        None => from.position().at = start + done as u64,
    }
    Ok(done as isize)
}

/// Sends to a served file, from a served one or from a regular file elsewhere; the kernel is left with
/// devices and whatever else may be read so.
fn send_here(p: &Process, a: &Args, from: Option<&Arc<Ofd>>, to: &Arc<Ofd>) -> Here<isize> {
    let (fd, most) = (a.int(1), a.word(3));
    let given = given_offset(a, 2)?;
    let elsewhere = match from {
        Some(from) if !from.access().0 => return fail(libc::EBADF),
        Some(_) => None,
        None => {
            open_for(fd, [libc::O_RDONLY, libc::O_RDWR])?;
            let known = kernel::type_and_size(fd).ok_or(Errno(libc::EBADF))?;
            if known.0 != libc::S_IFREG {
                return Err(Stop::Kernel(Why::NotServed));
            }
            Some(known.1)
        }
    };
    ends(given.unwrap_or(0), most)?;
    if !to.access().1 {
        return fail(libc::EBADF);
    }
    if to.appends() || from.is_some_and(|from| from.is_dir) {
        return fail(libc::EINVAL);
    }
    let start = match (from, given) {
        (Some(from), given) => offset_in(from, given)?,
        (None, Some(given)) => given,
        (None, None) => counted(kernel::lseek(fd, 0, libc::SEEK_CUR))? as u64,
    };
    let source = from.map(|from| p.file(from)).transpose()?;
    let (other, write_at) = (p.file(to)?, offset_in(to, None)?);
    let write = |done, data: &[u8]| {
        let at = write_at + done;
        // Only where there is something to write: at the end of the source no limit matters.
        let data = &data[..limits::room(|| Ok::<_, Errno>(at), data.len())?];
        let part = at..at.saturating_add(data.len() as u64);
        p.change(to.id(), part, || other.write_at(at, data, &p.cred()))
    };
    let done = match source {
        Some(file) => pump(
            most,
            within(file, start, most)?,
            |done, out| file.read_at(start + done, out),
            write,
        )?,
        None => pump(
            most,
            usize::try_from(elsewhere.unwrap_or(0).saturating_sub(start)).unwrap_or(usize::MAX),
            // May wait for a device or a server; signals are handled meanwhile.
            |done, out| counted(outside(|| kernel::pread(fd, out, start + done))),
            write,
        )?,
    } as u64;
    to.position().at = write_at + done;
    match (from, given) {
        (_, Some(_)) => a.put(2, (start + done) as i64)?,
        (Some(from), None) => from.position().at = start + done,
        (None, None) => {
            kernel::lseek(fd, (start + done) as i64, libc::SEEK_SET);
        }
    }
    Ok(done as isize)
}
