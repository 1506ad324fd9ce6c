//! Opening files.

use super::counted::descriptors;
use super::{Answer, early};
use crate::Errno;
use crate::ofd::{Ofd, open_flags};
use crate::process::Process;
use crate::sys::args::Args;
use crate::walk::{FileId, Here, Place, Resolve, Scope, Start, Stop, Walked, bare, fail};
use crate::why::Why;
use std::sync::Arc;
use varve_format::{FileKind, InodeAttr};
use varve_libfs::{Cred, OpenFile, OpenFlags};

/// How often `open` repeats the lookup while the name appears and disappears.
const LOOKS_MAX: usize = 100;

pub(super) fn open(p: &Process, a: &Args, dirfd: i32, i: usize, flags: i32, mode: u32) -> Answer {
    if flags & libc::O_PATH != 0 {
        return p.on_path(a, dirfd, i, |start| open_path_only(p, start, flags));
    }
    if let Some(answer) = early::open(p, a, dirfd, i, flags) {
        return answer;
    }
    p.on_path(a, dirfd, i, |start| {
        open_here(p, start, flags, mode).map(|fd| fd as isize)
    })
}

/// Opens a directory with `O_PATH`. Other files are left to the kernel.
fn open_path_only(p: &Process, start: Start<'_>, flags: i32) -> Here<isize> {
    let walked = p.walk(start, flags & libc::O_NOFOLLOW == 0)?;
    let dir = walked.target.as_ref().ok_or(Errno(libc::ENOENT))?;
    if !dir.is_dir() {
        // By that rsync finds out what is a directory.
        return if flags & libc::O_DIRECTORY != 0 {
            fail(libc::ENOTDIR)
        } else {
            Err(Stop::Kernel(Why::SpecialFile))
        };
    }
    let wanted = open_flags(libc::O_RDONLY).ok_or(Stop::Kernel(Why::NotServed))?;
    // To stand there takes no right to it.
    let file = p.fs(walked.pool)?.open(dir.key, wanted, &Cred::root())?;
    let ofd = Arc::new(Ofd::path_only(file, flags, walked.place()));
    let _gate = p.gate.read();
    p.place(ofd, flags & libc::O_CLOEXEC != 0).map(|fd| fd as isize)
}

/// Makes the descriptors of a call on an `O_PATH` descriptor real, since the kernel has its own answer to
/// most calls on it. `None` for the calls that are served, which also take descriptors open for reading.
pub(super) fn on_path_only(p: &Process, a: &Args) -> Option<Answer> {
    if !p.has_path_only() {
        return None;
    }
    let is_served = match a.number() as libc::c_long {
        libc::SYS_close
        | libc::SYS_dup
        | libc::SYS_dup2
        | libc::SYS_dup3
        | libc::SYS_fstat
        | libc::SYS_fstatfs
        | libc::SYS_fchdir => true,
        libc::SYS_fcntl => matches!(
            a.int(1),
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_GETFD | libc::F_SETFD | libc::F_GETFL
        ),
        _ => false,
    };
    let fds = || {
        let null = a.number() as libc::c_long == libc::SYS_utimensat && a.word(1) == 0;
        let about = descriptors(a).into_iter().chain([null.then(|| a.int(0))]);
        about.flatten()
    };
    (!is_served && p.is_path_only(fds())).then(|| p.on_real(Why::NotServed, &fds().collect::<Vec<_>>()))
}

/// All flags that `openat2` accepts; it refuses others, where `open` ignores them.
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

/// Flags that `openat2` accepts beside `O_PATH`.
const WITH_PATH: i32 = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;

/// Whether `openat2` accepts these flags and this mode.
fn is_valid(how: &libc::open_how) -> bool {
    if how.flags & libc::O_PATH as u64 != 0 {
        return how.flags & !(WITH_PATH as u64) == 0 && how.mode == 0;
    }
    let makes = how.flags & (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)) as u64 != 0;
    how.flags & !(KNOWN as u64) == 0 && how.mode & !(if makes { 0o7777 } else { 0 }) == 0
}

/// The rules that `resolve` of `openat2` makes; `None` if it is not valid. On a mount no symbolic link is a
/// magic one, and names are held in the process, where they wait for no medium.
fn rules(resolve: u64) -> Option<Resolve> {
    const KNOWN: u64 = libc::RESOLVE_NO_XDEV
        | libc::RESOLVE_NO_MAGICLINKS
        | libc::RESOLVE_NO_SYMLINKS
        | libc::RESOLVE_BENEATH
        | libc::RESOLVE_IN_ROOT
        | libc::RESOLVE_CACHED;
    let has = |flag: u64| resolve & flag != 0;
    let scope = match (has(libc::RESOLVE_BENEATH), has(libc::RESOLVE_IN_ROOT)) {
        (true, true) => return None,
        (true, false) => Some(Scope::Beneath),
        (false, true) => Some(Scope::InRoot),
        (false, false) => None,
    };
    (resolve & !KNOWN == 0).then_some(Resolve {
        scope,
        no_symlinks: has(libc::RESOLVE_NO_SYMLINKS),
        no_xdev: has(libc::RESOLVE_NO_XDEV),
    })
}

pub(super) fn openat2(p: &Process, a: &Args) -> Answer {
    let known = a.word(3) == size_of::<libc::open_how>();
    let how = a
        .get::<libc::open_how>(2)
        .ok()
        .filter(|how| known && is_valid(how));
    let Some((how, rules)) = how.and_then(|how| Some((how, rules(how.resolve)?))) else {
        return p.kernels(Why::NotServed, &[a.int(0)]);
    };
    let flags = how.flags as i32;
    let changes = libc::O_CREAT | libc::O_TRUNC | (libc::O_TMPFILE & !libc::O_DIRECTORY);
    if how.resolve & libc::RESOLVE_CACHED != 0 && flags & changes != 0 {
        // Wherever the path leads.
        return p.kernels(Why::NotServed, &[]);
    }
    p.on_path_by(a, a.int(0), 1, rules, |start| {
        if flags & libc::O_PATH != 0 {
            return open_path_only(p, start, flags);
        }
        open_here(p, start, flags, how.mode as u32).map(|fd| fd as isize)
    })
}

/// The file to open, and its open handle if this call created it.
struct Found {
    attr: InodeAttr,
    made: Option<OpenFile>,
    walked: Walked,
}

fn find(p: &Process, start: Start<'_>, flags: i32, mode: u32, wanted: OpenFlags) -> Here<Found> {
    let create = flags & libc::O_CREAT != 0;
    let exclusive = create && flags & libc::O_EXCL != 0;
    let follow = flags & libc::O_NOFOLLOW == 0 && !exclusive;
    if create && start.rest.ends_with(b"/") {
        // Linux checks the slash before the name.
        let rest = bare(start.rest);
        let walked = p.walk(
            Start {
                rest,
                ..start.clone()
            },
            false,
        )?;
        // Linux looks at the slash before it looks at the name, if that is one.
        if !matches!(walked.name.as_slice(), b"" | b"." | b"..") {
            return fail(libc::EISDIR);
        }
    }
    for _ in 0..LOOKS_MAX {
        let mut walked = p.walk(start.clone(), follow)?;
        let (attr, made) = match walked.target.take() {
            Some(_) if exclusive => return fail(libc::EEXIST),
            Some(attr) => (attr, None),
            None if !create => return fail(libc::ENOENT),
            None if walked.slash => return fail(libc::EISDIR),
            None => {
                let (fs, mode) = (p.fs(walked.pool)?, p.masked(mode));
                match fs.create_open(walked.dir, &walked.name, mode, wanted, &p.cred()) {
                    Ok((attr, file)) => (attr, Some(file)),
                    Err(Errno(libc::EEXIST)) if !exclusive => continue,
                    Err(errno) => return Err(errno.into()),
                }
            }
        };
        return Ok(Found { attr, made, walked });
    }
    fail(libc::ENOENT)
}

fn open_here(p: &Process, start: Start<'_>, flags: i32, mode: u32) -> Here<i32> {
    // The kernel handles access modes that `open_flags` does not know.
    let Some(wanted) = open_flags(flags) else {
        return Err(Stop::Kernel(Why::NotServed));
    };
    if flags & libc::O_TMPFILE & !libc::O_DIRECTORY != 0 {
        return open_unnamed(p, start, flags, mode, wanted);
    }
    let create = flags & libc::O_CREAT != 0;
    if create && flags & libc::O_DIRECTORY != 0 {
        return fail(libc::EINVAL);
    }
    for _ in 0..LOOKS_MAX {
        let Found { attr, made, walked } = find(p, start.clone(), flags, mode, wanted)?;
        let fs = p.fs(walked.pool)?;
        match attr.kind() {
            FileKind::Symlink if flags & libc::O_DIRECTORY != 0 => return fail(libc::ENOTDIR),
            FileKind::Symlink => return fail(libc::ELOOP),
            FileKind::Directory if create || wanted.write || wanted.truncate => return fail(libc::EISDIR),
            FileKind::Directory | FileKind::Regular => {}
            // Fifos, sockets and devices live in the kernel.
            _ => return Err(Stop::Kernel(Why::SpecialFile)),
        }
        if flags & libc::O_DIRECTORY != 0 && !attr.is_dir() {
            return fail(libc::ENOTDIR);
        }
        if p.pool(walked.pool).mapped.read().contains_key(&attr.key) {
            return Err(Stop::Kernel(Why::Mapped));
        }
        let writer = match (made.is_none(), wanted.write, wanted.truncate) {
            (true, true, _) => p.open_writer(&attr, &walked, flags)?,
            (true, false, true) => {
                p.open_writer(&attr, &walked, libc::O_WRONLY)?;
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
            None if wanted.truncate => {
                let id = FileId {
                    pool: walked.pool,
                    key: attr.key,
                };
                p.change(id, 0..u64::MAX, || fs.open(attr.key, wanted, &mine))
            }
            None => fs.open(attr.key, wanted, &mine),
        };
        match opened {
            // The file was removed after the lookup.
            Err(Errno(libc::ENOENT | libc::ESTALE)) => {}
            Err(errno) => return Err(errno.into()),
            Ok(file) => {
                let ofd = Ofd::new(file, attr.is_dir(), flags, walked.place());
                *ofd.side.lock() = writer;
                let ofd = Arc::new(ofd);
                let _gate = p.gate.read();
                return p.place(ofd, flags & libc::O_CLOEXEC != 0);
            }
        }
    }
    fail(libc::ENOENT)
}

/// Creates a file without a name (`O_TMPFILE`).
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
    let fs = p.fs(walked.pool)?;
    let made = fs.tmpfile(dir.key, p.masked(mode), &p.cred())?;
    // Opened with the requested flags and root's rights: the creator may open a new file whatever its mode.
    let wanted = OpenFlags {
        truncate: false,
        ..wanted
    };
    let file = fs.open(made.key(), wanted, &Cred::root())?;
    let place = Place {
        parent: dir.key,
        ..walked.place()
    };
    let ofd = Arc::new(Ofd::without_name(file, flags, place));
    let _gate = p.gate.read();
    p.place(ofd, flags & libc::O_CLOEXEC != 0)
}
