//! `ioctl` requests that let files share blocks: `FICLONE`, `FICLONERANGE`, `FIDEDUPERANGE`.

use super::Answer;
use super::attrs::may;
use crate::Errno;
use crate::ofd::Ofd;
use crate::process::Process;
use crate::sys::args::Args;
use crate::sys::kernel;
use crate::walk::{Here, Stop, fail};
use crate::why::Why;
use std::sync::Arc;
use varve_format::BLOCK_BYTES;

/// Words of 8 bytes of `file_dedupe_range` before its targets, and of each target.
const HEAD: usize = 3;
const EACH: usize = 4;
/// Most targets: the structure fits a page, as Linux demands.
const TARGETS_MAX: usize = (4096 / 8 - HEAD) / EACH;
/// Most bytes of one comparison, as in Linux.
const DEDUPE_MAX: u64 = 1 << 30;
const ALL: std::ops::Range<u64> = 0..u64::MAX;
/// Status of a target whose bytes differ.
const DIFFERS: i32 = 1;

/// Handles `FICLONE`, whose argument is the source.
pub(super) fn file(p: &Process, a: &Args, to: &Arc<Ofd>) -> Answer {
    clone(p, a, a.int(2), to, (0, 0, 0))
}

/// Handles `FICLONERANGE`.
pub(super) fn range(p: &Process, a: &Args, to: &Arc<Ofd>) -> Answer {
    let word = |nth| a.get_nth::<u64>(2, nth);
    let args = || Ok::<_, Errno>((word(0)? as i32, (word(1)?, word(2)?, word(3)?)));
    match args() {
        Ok((from, (from_at, len, to_at))) => clone(p, a, from, to, (from_at, len, to_at)),
        Err(errno) => Answer::of(fail(errno.0)),
    }
}

/// Shares `len` bytes of `from` at an offset (0: all from there on) with `to`.
fn clone(p: &Process, a: &Args, from: i32, to: &Arc<Ofd>, (from_at, len, to_at): (u64, u64, u64)) -> Answer {
    let Some(from) = p.table.get(from) else {
        return not_served(p, a, from, -(libc::EXDEV as isize));
    };
    let share = || -> Here<isize> {
        if from.is_dir || to.is_dir {
            return fail(libc::EISDIR);
        }
        if !from.access().0 || !to.access().1 || to.appends() {
            return fail(libc::EBADF);
        }
        let (file, target) = (p.file(&from)?, p.file(to)?);
        p.change(to.id(), ALL, || {
            file.clone_or_copy_range_to(from_at, target, to_at, len, &p.cred())
        })?;
        Ok(0)
    };
    match share() {
        Err(Stop::Kernel(why)) => p.to_kernel(why, &[a.int(0), a.int(2)]),
        other => Answer::of(other),
    }
}

/// Answers for a descriptor that is not served here: `elsewhere` for an open file.
fn not_served(p: &Process, a: &Args, fd: i32, elsewhere: isize) -> Answer {
    match kernel::kind(fd) {
        None => Answer::Served(-(libc::EBADF as isize)),
        Some((device, _)) if p.pool_on(device).is_some() => p.to_kernel(Why::NotServed, &[a.int(0), fd]),
        Some(_) => Answer::Served(elsewhere),
    }
}

/// Handles `FIDEDUPERANGE`: shares a range of `from` with each target that holds the same bytes. Each target
/// has a status of its own.
pub(super) fn dedupe(p: &Process, a: &Args, from: &Arc<Ofd>) -> Answer {
    let all = || -> Here<isize> {
        let word = |nth| a.get_nth::<u64>(2, nth);
        let (from_at, len, count) = (word(0)?, word(1)?, word(2)?);
        let targets = usize::from(count as u16);
        if targets > TARGETS_MAX {
            return fail(libc::ENOMEM);
        }
        if count >> 16 != 0 || !from.access().0 {
            return fail(libc::EINVAL);
        }
        if from.is_dir {
            return fail(libc::EISDIR);
        }
        let size = p.file(from)?.getattr()?.size_bytes;
        if from_at.checked_add(len).is_none_or(|end| end > size) {
            return fail(libc::EINVAL);
        }
        let mut words = vec![from_at, len, count];
        for target in 0..targets {
            let at = HEAD + target * EACH;
            let (fd, offset, reserved) = (word(at)? as i32, word(at + 1)?, word(at + 3)? >> 32);
            let status = if reserved == 0 {
                one(p, from, fd, (from_at, len.min(DEDUPE_MAX), offset))?
            } else {
                -libc::EINVAL
            };
            let bytes = if status == 0 { len.min(DEDUPE_MAX) } else { 0 };
            words.extend([word(at)?, offset, bytes, u64::from(status as u32)]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        a.put_bytes(2, &bytes)?;
        Ok(0)
    };
    match all() {
        Err(Stop::Kernel(why)) => p.to_kernel(why, &[a.int(0)]),
        other => Answer::of(other),
    }
}

/// Returns the status of one target.
fn one(p: &Process, from: &Arc<Ofd>, fd: i32, (from_at, len, to_at): (u64, u64, u64)) -> Here<i32> {
    let Some(to) = p.table.get(fd) else {
        let flags = kernel::fcntl(fd, libc::F_GETFL, 0);
        return Ok(match kernel::kind(fd) {
            Some(_) if flags >= 0 && flags & libc::O_PATH as isize != 0 => -libc::EBADF,
            // No regular file, or one that the kernel has.
            Some((device, _)) if p.pool_on(device).is_some() => -libc::EINVAL,
            Some(_) => -libc::EXDEV,
            None => -libc::EBADF,
        });
    };
    if to.is_dir {
        return Ok(-libc::EISDIR);
    }
    let (file, target) = (p.file(from)?, p.file(&to)?);
    let (cred, attr) = (p.cred(), target.getattr()?);
    // The owner, and a user who may open it for writing, need not have done so.
    if !to.access().1 && attr.uid != cred.uid && !may(&attr, &cred, 2) {
        return Ok(-libc::EPERM);
    }
    // As Linux, before the length is cut to whole blocks: nothing may be left of it.
    let to_end = to_at.checked_add(len).filter(|end| *end <= attr.size_bytes);
    let (Some(to_end), true) = (to_end, (from_at | to_at).is_multiple_of(BLOCK_BYTES)) else {
        return Ok(if len == 0 { 0 } else { -libc::EINVAL });
    };
    let ends_both = from_at.saturating_add(len) == file.getattr()?.size_bytes && to_end == attr.size_bytes;
    let len = if ends_both {
        len
    } else {
        len / BLOCK_BYTES * BLOCK_BYTES
    };
    Ok(match file.dedupe_range_with(from_at, target, to_at, len, &cred) {
        Ok(true) => 0,
        Ok(false) => DIFFERS,
        Err(errno) => -errno.0,
    })
}
