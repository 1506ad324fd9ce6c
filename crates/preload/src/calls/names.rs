//! Creating, removing and moving names.

use super::{Answer, early, error, named_descriptor};
use crate::Errno;
use crate::ofd::{Ofd, Unnamed};
use crate::process::Process;
use crate::sys::args::Args;
use crate::walk::{FileId, Here, Route, Start, Stop, bare, fail};
use crate::why::Why;
use std::sync::Arc;
use varve_format::{InodeAttr, InodeKey};
use varve_libfs::{Cred, Fs, RenameFlags};

/// The place of a name that is to be made; it must be free.
fn place(p: &Process, start: Start<'_>, directory: bool) -> Here<(FileId, Route)> {
    // As Linux: a symbolic link here is never followed, and what is there counts before the slash does.
    let slash = start.rest.ends_with(b"/");
    let rest = bare(start.rest);
    let walked = p.walk(Start { rest, ..start }, false)?;
    if walked.target.is_some() {
        return fail(libc::EEXIST);
    }
    if slash && !directory {
        return fail(libc::ENOENT);
    }
    let dir = FileId {
        pool: walked.pool,
        key: walked.dir,
    };
    Ok((dir, walked.name))
}

pub(super) fn mkdir(p: &Process, a: &Args, dirfd: i32, i: usize, mode: u32) -> Answer {
    p.on_path(a, dirfd, i, |start| {
        let (dir, name) = place(p, start, true)?;
        let mode = libc::S_IFDIR | (p.masked(mode) & 0o1777);
        p.fs(dir.pool)?.create(dir.key, &name, mode, 0, &p.cred())?;
        Ok(0)
    })
}

pub(super) fn mknod(p: &Process, a: &Args, dirfd: i32, i: usize, mode: usize) -> Answer {
    let (mode, device) = (a.uint(mode), a.uint(mode + 1));
    p.on_path(a, dirfd, i, |start| {
        let kind = match mode & libc::S_IFMT {
            0 => libc::S_IFREG,
            kind @ (libc::S_IFREG | libc::S_IFIFO | libc::S_IFSOCK) => kind,
            // The kernel decides whether this user may create a device.
            _ => return Err(Stop::Kernel(Why::NotServed)),
        };
        let (dir, name) = place(p, start, false)?;
        p.fs(dir.pool)?
            .create(dir.key, &name, kind | p.masked(mode), device, &p.cred())?;
        Ok(0)
    })
}

pub(super) fn symlink(p: &Process, a: &Args, dirfd: i32, i: usize) -> Answer {
    p.on_path(a, dirfd, i, |start| {
        let target = a.path(0)?;
        if target.is_empty() {
            return fail(libc::ENOENT);
        }
        let (dir, name) = place(p, start, false)?;
        p.fs(dir.pool)?.symlink(dir.key, &name, target, &p.cred())?;
        Ok(0)
    })
}

pub(super) fn readlink(p: &Process, a: &Args, dirfd: i32, i: usize) -> Answer {
    p.on_path(a, dirfd, i, |start| {
        let size = usize::try_from(a.int(i + 2)).unwrap_or(0);
        if size == 0 {
            return fail(libc::EINVAL);
        }
        let walked = p.walk(start, false)?;
        let attr = walked.target.ok_or(Errno(libc::ENOENT))?;
        if attr.kind() != varve_format::FileKind::Symlink {
            return fail(libc::EINVAL);
        }
        let target = p.fs(walked.pool)?.readlink(attr.key)?;
        let len = target.len().min(size);
        a.put_bytes(i + 1, &target[..len])?;
        Ok(len as isize)
    })
}

pub(super) fn unlink(p: &Process, a: &Args, dirfd: i32, i: usize, flags: i32) -> Answer {
    if flags & !libc::AT_REMOVEDIR != 0 {
        return p.kernels(Why::NotServed, &[dirfd]);
    }
    let rmdir = flags & libc::AT_REMOVEDIR != 0;
    p.on_path(a, dirfd, i, |start| {
        let slash = start.rest.ends_with(b"/");
        let rest = bare(start.rest);
        let walked = p.walk(Start { rest, ..start }, false)?;
        match walked.name.as_slice() {
            // The kernel has its own error for each of the mount's root and the dots.
            b"" | b"." | b".." => return Err(Stop::Kernel(Why::NotServed)),
            _ => {}
        }
        let attr = walked.target.as_ref().ok_or(Errno(libc::ENOENT))?;
        if !rmdir && slash {
            return fail(if attr.is_dir() {
                libc::EISDIR
            } else {
                libc::ENOTDIR
            });
        }
        let fs = p.fs(walked.pool)?;
        let id = FileId {
            pool: walked.pool,
            key: attr.key,
        };
        if rmdir {
            if attr.is_dir() {
                p.keep(id);
                if p.is_mount_point(walked.pool, &walked.whole()) {
                    return fail(libc::EBUSY);
                }
            }
            fs.rmdir(walked.dir, &walked.name, &p.cred())?;
        } else {
            if attr.nlink == 1 && !attr.is_dir() {
                p.keep(id);
            }
            fs.unlink(walked.dir, &walked.name, &p.cred())?;
        }
        Ok(0)
    })
}

/// Runs a call on two paths. It is served if both are in the mount, else left to the kernel.
fn on_two(
    p: &Process,
    a: &Args,
    from: (i32, usize),
    to: (i32, usize),
    act: impl FnOnce(Start<'_>, Start<'_>) -> Here<isize>,
) -> Answer {
    let fds = [from.0, to.0];
    let (Ok(from_path), Ok(to_path)) = (a.path(from.1), a.path(to.1)) else {
        return p.kernels(Why::NotServed, &fds);
    };
    if early::is_left_to_mount(p, a, from.0, from_path) {
        return early::on_names(p, a);
    }
    let of_both = |why| match p.on_real(why, &fds) {
        Answer::NotOurs => Answer::FellBack(why),
        other => other,
    };
    let starts = p
        .start(from.0, from_path)
        .and_then(|first| Ok((first, p.start(to.0, to_path)?)));
    match starts {
        Ok((None, None)) => Answer::NotOurs,
        Ok((Some(first), Some(second))) => match act(first, second) {
            Err(Stop::Kernel(why)) => of_both(why),
            other => Answer::of_path(other),
        },
        Ok(_) => of_both(Why::PathOutside),
        Err(Stop::Kernel(why)) => of_both(why),
        Err(Stop::Errno(errno)) => Answer::Served(error(errno)),
        Err(Stop::Made(result, why)) => Answer::FellBackMade(result, why),
    }
}

/// Returns the open file that is to get one more name, with its descriptor: named by `/proc/self/fd/N`
/// (followed) or by an empty path.
fn linked_file(p: &Process, a: &Args, from: (i32, usize), flags: i32) -> Option<(i32, Arc<Ofd>)> {
    let fd = match a.path(from.1).ok()? {
        b"" if flags & libc::AT_EMPTY_PATH != 0 => from.0,
        path if flags & libc::AT_SYMLINK_FOLLOW != 0 => named_descriptor(path)?,
        _ => return None,
    };
    Some((fd, p.table.get(fd)?))
}

/// Links an open file to one more name, which may be its first (`O_TMPFILE`).
fn link_open_file(p: &Process, a: &Args, (fd, ofd): (i32, &Ofd), to: (i32, usize)) -> Answer {
    let Ok(path) = a.path(to.1) else {
        return p.kernels(Why::NotServed, &[fd, to.0]);
    };
    let serve = || {
        // The kernel reports why a name outside the mount is refused.
        let start = p.start(to.0, path)?.ok_or(Stop::Kernel(Why::PathOutside))?;
        let (dir, name) = place(p, start, false)?;
        if ofd.unnamed == Some(Unnamed::ForGood) {
            return fail(libc::ENOENT);
        }
        link_here(p, p.open_id(ofd)?, dir, &name)
    };
    match serve() {
        Err(Stop::Kernel(why)) => p.on_real(why, &[fd, to.0]),
        other => Answer::of(other),
    }
}

pub(super) fn link(p: &Process, a: &Args, from: (i32, usize), to: (i32, usize), flags: i32) -> Answer {
    if let Some((fd, ofd)) = linked_file(p, a, from, flags) {
        return link_open_file(p, a, (fd, &ofd), to);
    }
    if flags & !libc::AT_SYMLINK_FOLLOW != 0 {
        return p.kernels(Why::NotServed, &[from.0, to.0]);
    }
    on_two(p, a, from, to, |first, second| {
        let walked = p.walk(first, flags & libc::AT_SYMLINK_FOLLOW != 0)?;
        let (pool, attr) = (walked.pool, walked.target.ok_or(Errno(libc::ENOENT))?);
        let (dir, name) = place(p, second, false)?;
        link_here(p, FileId { pool, key: attr.key }, dir, &name)
    })
}

fn link_here(p: &Process, file: FileId, dir: FileId, name: &[u8]) -> Here<isize> {
    if file.pool != dir.pool {
        return fail(libc::EXDEV);
    }
    p.fs(dir.pool)?.link(file.key, dir.key, name, &p.cred())?;
    Ok(0)
}

/// Whether directory `dir` is `above` or lies below it. A hint for the right errno: the daemon decides for
/// good.
fn lies_below(fs: &Fs, dir: InodeKey, above: InodeKey) -> Here<bool> {
    let mut at = dir;
    while at != fs.root() {
        if at == above {
            return Ok(true);
        }
        at = fs.lookup(at, b"..", &Cred::root())?.key;
    }
    Ok(false)
}

pub(super) fn rename(p: &Process, a: &Args, from: (i32, usize), to: (i32, usize), flags: u32) -> Answer {
    let has = |flag| flags & flag != 0;
    let wanted = RenameFlags {
        noreplace: has(libc::RENAME_NOREPLACE),
        exchange: has(libc::RENAME_EXCHANGE),
        whiteout: has(libc::RENAME_WHITEOUT),
    };
    let known = libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE | libc::RENAME_WHITEOUT;
    if flags & !known != 0 || (wanted.exchange && (wanted.noreplace || wanted.whiteout)) {
        return p.kernels(Why::NotServed, &[from.0, to.0]);
    }
    on_two(p, a, from, to, |first, second| {
        rename_here(p, first, second, wanted)
    })
}

/// Directory and last name of a path, without a look at what has that name. `None`: it must be looked at.
fn unseen<'a>(p: &Process, start: &Start<'a>) -> Option<(FileId, &'a [u8])> {
    let first = FileId {
        pool: start.pool,
        key: start.dir,
    };
    let Some(slash) = start.rest.iter().rposition(|byte| *byte == b'/') else {
        return Some((first, start.rest));
    };
    let (above, name) = (&start.rest[..slash], &start.rest[slash + 1..]);
    if name.is_empty() {
        return None;
    }
    if bare(above).is_empty() {
        return Some((first, name));
    }
    let above = Start {
        rest: above,
        ..start.clone()
    };
    let walked = p.walk(above, true).ok()?;
    let (pool, found) = (walked.pool, walked.target?);
    found.is_dir().then_some((FileId { pool, key: found.key }, name))
}

fn rename_here(p: &Process, first: Start<'_>, second: Start<'_>, flags: RenameFlags) -> Here<isize> {
    // In a directory for whose lease sessions compete, each lookup costs as much as the rename itself.
    if !flags.exchange
        && p.fs(first.pool)?.is_any_contended()
        && let Some((dir, name)) = unseen(p, &first)
        && let Some((new_dir, new_name)) = unseen(p, &second)
        && dir.pool == new_dir.pool
        && p.fs(dir.pool)?
            .rename_contended(dir.key, name, new_dir.key, new_name, &p.cred())?
            .is_some()
    {
        return Ok(0);
    }
    let (from_slash, to_slash) = (first.rest.ends_with(b"/"), second.rest.ends_with(b"/"));
    let (from, to) = (bare(first.rest), bare(second.rest));
    let source = p.walk(Start { rest: from, ..first }, false)?;
    let target = p.walk(Start { rest: to, ..second }, false)?;
    if source.pool != target.pool {
        return fail(libc::EXDEV);
    }
    let fs = p.fs(source.pool)?;
    let nameless = |name: &[u8]| matches!(name, b"" | b"." | b"..");
    if nameless(&source.name) || nameless(&target.name) {
        return Err(Stop::Kernel(Why::NotServed));
    }
    let attr = source.target.as_ref().ok_or(Errno(libc::ENOENT))?;
    match &target.target {
        Some(_) if flags.noreplace => return fail(libc::EEXIST),
        None if flags.exchange => return fail(libc::ENOENT),
        Some(other) if flags.exchange && to_slash && !other.is_dir() => return fail(libc::ENOTDIR),
        _ => {}
    }
    if !attr.is_dir() && (from_slash || (!flags.exchange && to_slash)) {
        return fail(libc::ENOTDIR);
    }
    if attr.is_dir() && source.dir != target.dir && lies_below(fs, target.dir, attr.key)? {
        return fail(libc::EINVAL);
    }
    let replaced = target.target.as_ref();
    for (walked, found) in [(&source, Some(attr)), (&target, replaced)] {
        if found.is_some_and(InodeAttr::is_dir) && p.is_mount_point(walked.pool, &walked.whole()) {
            return fail(libc::EBUSY);
        }
    }
    if let Some(other) = replaced.filter(|other| other.is_dir() && source.dir != target.dir)
        && lies_below(fs, source.dir, other.key)?
    {
        return fail(if flags.exchange {
            libc::EINVAL
        } else {
            libc::ENOTEMPTY
        });
    }
    if let Some(other) = replaced
        .filter(|other| !flags.exchange && other.key != attr.key && (other.nlink == 1 || other.is_dir()))
    {
        p.keep(FileId {
            pool: target.pool,
            key: other.key,
        });
    }
    fs.rename(
        source.dir,
        &source.name,
        target.dir,
        &target.name,
        flags,
        &p.cred(),
    )?;
    Ok(0)
}
