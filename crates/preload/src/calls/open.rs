//! Opening.

use super::Answer;
use crate::Errno;
use crate::ofd::{Ofd, open_flags};
use crate::process::Process;
use crate::sys::args::Args;
use crate::walk::{Here, Start, Stop, Walked, bare, fail};
use std::sync::Arc;
use varve_format::{FileKind, InodeAttr};
use varve_libfs::{Cred, OpenFile, OpenFlags};

/// How often `open` looks again when the name comes and goes.
const LOOKS_MAX: usize = 100;

pub(super) fn open(p: &Process, a: &Args, dirfd: i32, i: usize, flags: i32, mode: u32) -> Answer {
    if flags & libc::O_PATH != 0 {
        return p.on_path(a, dirfd, i, |start| {
            let walked = p.walk(start, flags & libc::O_NOFOLLOW == 0)?;
            let route = walked.whole();
            match walked.target {
                Some(attr) if attr.is_dir() => {
                    Err(Stop::Made(p.open_place(attr.key, route, flags)? as isize))
                }
                _ => Err(Stop::Kernel),
            }
        });
    }
    p.on_path(a, dirfd, i, |start| {
        open_here(p, start, flags, mode).map(|fd| fd as isize)
    })
}

/// All flags that `openat2` knows; it refuses others, where `open` ignores them.
const KNOWN: i32 = libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_NOCTTY
    | libc::O_TRUNC
    | libc::O_APPEND
    | libc::O_NONBLOCK
    | libc::O_SYNC
    | libc::O_ASYNC
    | libc::O_DIRECT
    | libc::O_LARGEFILE
    | 0o100_000
    | libc::O_DIRECTORY
    | libc::O_NOFOLLOW
    | libc::O_NOATIME
    | libc::O_CLOEXEC
    | libc::O_TMPFILE;

/// Whether `openat2` takes these flags and this mode, and they do not open a place (`O_PATH`).
fn is_valid(how: &libc::open_how) -> bool {
    let makes = how.flags & (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)) as u64 != 0;
    how.flags & !(KNOWN as u64) == 0 && how.mode & !(if makes { 0o7777 } else { 0 }) == 0
}

pub(super) fn openat2(p: &Process, a: &Args) -> Answer {
    let known = a.word(3) == size_of::<libc::open_how>();
    match a.get::<libc::open_how>(2) {
        Ok(how) if known && how.resolve == 0 && is_valid(&how) => p.on_path(a, a.int(0), 1, |start| {
            open_here(p, start, how.flags as i32, how.mode as u32).map(|fd| fd as isize)
        }),
        _ => p.kernels(&[a.int(0)]),
    }
}

/// What is opened, and its open if this call made it.
struct Found {
    attr: InodeAttr,
    made: Option<OpenFile>,
    walked: Walked,
}

fn find(p: &Process, start: Start<'_>, flags: i32, mode: u32, wanted: OpenFlags) -> Here<Found> {
    let fs = p.fs()?;
    let create = flags & libc::O_CREAT != 0;
    let exclusive = create && flags & libc::O_EXCL != 0;
    let follow = flags & libc::O_NOFOLLOW == 0 && !exclusive;
    if create && start.rest.ends_with(b"/") {
        // Linux looks at the slash before it looks at the name.
        let rest = bare(start.rest);
        p.walk(Start { rest, ..start }, false)?;
        return fail(libc::EISDIR);
    }
    for _ in 0..LOOKS_MAX {
        let mut walked = p.walk(start.clone(), follow)?;
        let (attr, made) = match walked.target.take() {
            Some(_) if exclusive => return fail(libc::EEXIST),
            Some(attr) => (attr, None),
            None if !create => return fail(libc::ENOENT),
            None if walked.slash => return fail(libc::EISDIR),
            None => match fs.create_open(walked.dir, &walked.name, p.masked(mode), wanted, &p.cred()) {
                Ok((attr, file)) => (attr, Some(file)),
                Err(Errno(libc::EEXIST)) if !exclusive => continue,
                Err(errno) => return Err(errno.into()),
            },
        };
        return Ok(Found { attr, made, walked });
    }
    fail(libc::ENOENT)
}

fn open_here(p: &Process, start: Start<'_>, flags: i32, mode: u32) -> Here<i32> {
    // Descriptors that stand for a place, and what is no mode of access: the kernel knows them.
    if flags & libc::O_PATH != 0 {
        return Err(Stop::Kernel);
    }
    let Some(wanted) = open_flags(flags) else {
        return Err(Stop::Kernel);
    };
    if flags & libc::O_TMPFILE & !libc::O_DIRECTORY != 0 {
        return open_unnamed(p, start, flags, mode, wanted);
    }
    let create = flags & libc::O_CREAT != 0;
    if create && flags & libc::O_DIRECTORY != 0 {
        return fail(libc::EINVAL);
    }
    let fs = p.fs()?;
    for _ in 0..LOOKS_MAX {
        let Found { attr, made, walked } = find(p, start.clone(), flags, mode, wanted)?;
        match attr.kind() {
            FileKind::Symlink if flags & libc::O_DIRECTORY != 0 => return fail(libc::ENOTDIR),
            FileKind::Symlink => return fail(libc::ELOOP),
            FileKind::Directory if create || wanted.write || wanted.truncate => return fail(libc::EISDIR),
            FileKind::Directory | FileKind::Regular => {}
            // Fifos, sockets and devices live in the kernel.
            _ => return Err(Stop::Kernel),
        }
        if flags & libc::O_DIRECTORY != 0 && !attr.is_dir() {
            return fail(libc::ENOTDIR);
        }
        if p.mapped.read().contains_key(&attr.key) {
            return Err(Stop::Kernel);
        }
        let writer = match (made.is_none(), wanted.write, wanted.truncate) {
            (true, true, _) => p.open_writer(&attr, &walked.whole(), flags)?,
            (true, false, true) => {
                p.open_writer(&attr, &walked.whole(), libc::O_WRONLY)?;
                None
            }
            _ => None,
        };
        let mine = p.cred();
        if made.is_none() && flags & libc::O_NOATIME != 0 && mine.uid != 0 && mine.uid != attr.uid {
            return fail(libc::EPERM);
        }
        let opened = match made {
            Some(file) => Ok(file),
            None if wanted.truncate => p
                .copies
                .change(attr.key, 0..u64::MAX, || fs.open(attr.key, wanted, &mine)),
            None => fs.open(attr.key, wanted, &mine),
        };
        match opened {
            // Removed since it was found.
            Err(Errno(libc::ENOENT | libc::ESTALE)) => {}
            Err(errno) => return Err(errno.into()),
            Ok(file) => {
                let ofd = Ofd::new(file, attr.is_dir(), flags, walked.whole(), walked.dir);
                *ofd.side.lock() = writer;
                let ofd = Arc::new(ofd);
                let _gate = p.gate.read();
                return p.place(ofd, flags & libc::O_CLOEXEC != 0);
            }
        }
    }
    fail(libc::ENOENT)
}

/// Makes a file without a name (`O_TMPFILE`).
fn open_unnamed(p: &Process, start: Start<'_>, flags: i32, mode: u32, wanted: OpenFlags) -> Here<i32> {
    let is_whole = flags & libc::O_TMPFILE == libc::O_TMPFILE;
    if !is_whole || !wanted.write || flags & libc::O_CREAT != 0 {
        return fail(libc::EINVAL);
    }
    let walked = p.walk(start, flags & libc::O_NOFOLLOW == 0)?;
    let dir = walked.target.as_ref().ok_or(Errno(libc::ENOENT))?;
    if !dir.is_dir() {
        return fail(libc::ENOTDIR);
    }
    let fs = p.fs()?;
    let made = fs.tmpfile(dir.key, p.masked(mode), &p.cred())?;
    // With the flags that were asked for; who makes a file may open it as it likes.
    let wanted = OpenFlags {
        truncate: false,
        ..wanted
    };
    let file = fs.open(made.key(), wanted, &Cred::root())?;
    let ofd = Arc::new(Ofd::without_name(file, flags, walked.whole(), dir.key));
    let _gate = p.gate.read();
    p.place(ofd, flags & libc::O_CLOEXEC != 0)
}
