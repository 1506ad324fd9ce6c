//! Directory streams, the working directory, roots, the umask.

use super::{Answer, error};
use crate::process::Process;
use crate::sys::args::Args;
use crate::walk::{Here, Stop, fail};
use crate::why::Why;
use varve_format::FileKind;
use varve_libfs::Cred;

/// Offsets 1 and 2 of a directory stream are behind "." and "..", as in the mount; the daemon's cookies
/// follow, shifted by this number.
const DOTS: u64 = 2;
/// Bytes of an entry before its name.
const HEAD: usize = 19;
/// Size in bytes of a usual entry, to guess how many fit.
const USUAL: usize = 40;

const fn d_type(kind: FileKind) -> u8 {
    match kind {
        FileKind::Regular => libc::DT_REG,
        FileKind::Directory => libc::DT_DIR,
        FileKind::Symlink => libc::DT_LNK,
        FileKind::Fifo => libc::DT_FIFO,
        FileKind::Socket => libc::DT_SOCK,
        FileKind::CharDevice => libc::DT_CHR,
        FileKind::BlockDevice => libc::DT_BLK,
    }
}

/// Writes one entry at the start of `out`. Returns its length, or 0 if it does not fit.
fn put(out: &mut [u8], ino: u64, next: u64, kind: FileKind, name: &[u8]) -> usize {
    let len = (HEAD + name.len() + 1).next_multiple_of(8);
    let Some(entry) = out.get_mut(..len) else { return 0 };
    entry.fill(0);
    entry[..8].copy_from_slice(&ino.to_ne_bytes());
    entry[8..16].copy_from_slice(&next.to_ne_bytes());
    entry[16..18].copy_from_slice(&(len as u16).to_ne_bytes());
    entry[18] = d_type(kind);
    entry[HEAD..HEAD + name.len()].copy_from_slice(name);
    len
}

pub(super) fn getdents(p: &Process, a: &Args) -> Answer {
    let Some(ofd) = p.table.get(a.int(0)) else {
        return Answer::NotOurs;
    };
    // The kernel takes the size as an `int`; no entry fits a negative one.
    let size = usize::try_from(a.word(2) as i32).unwrap_or(0);
    let list = || -> Here<isize> {
        if !ofd.is_dir {
            return fail(libc::ENOTDIR);
        }
        let mut position = ofd.position();
        if position.moved {
            return Err(Stop::Kernel(Why::KernelsOffset));
        }
        let fs = match p.fs(ofd.pool) {
            Ok(fs) => fs,
            Err(stop) => return super::io::by_kernel(a, &mut position, stop),
        };
        let (mut full, mut cut) = (false, false);
        let used = a.buffer(1, size, |out| {
            let mut used = 0;
            cut = out.len() < size;
            while position.at < DOTS {
                let (name, key): (&[u8], _) = if position.at == 0 {
                    (b".", ofd.key())
                } else {
                    (b"..", fs.lookup(ofd.key(), b"..", &Cred::root())?.key)
                };
                let len = put(
                    &mut out[used..],
                    key.number(),
                    position.at + 1,
                    FileKind::Directory,
                    name,
                );
                if len == 0 {
                    full = true;
                    return Ok(used);
                }
                used += len;
                position.at += 1;
            }
            let most = ((out.len() - used) / USUAL).max(1);
            for entry in fs.readdir(ofd.key(), position.at - DOTS, most)? {
                let next = entry.next_cookie + DOTS;
                let len = put(
                    &mut out[used..],
                    entry.key.number(),
                    next,
                    entry.kind,
                    &entry.name,
                );
                if len == 0 {
                    full = true;
                    break;
                }
                used += len;
                position.at = next;
            }
            Ok(used)
        })?;
        if used == 0 && full {
            return fail(if cut { libc::EFAULT } else { libc::EINVAL });
        }
        Ok(used as isize)
    };
    Answer::of(list())
}

pub(super) fn chdir(p: &Process, a: &Args) -> Answer {
    let result = a.call();
    if result == 0 {
        p.moved();
    }
    // The kernel's working directory is the same, so that paths that it resolves itself start there.
    Answer::Made(result)
}

pub(super) fn getcwd(p: &Process, a: &Args) -> Answer {
    let tell = || -> Here<isize> {
        let mut path = p.working_path()?;
        path.push(0);
        if a.word(1) < path.len() {
            return fail(libc::ERANGE);
        }
        a.put_bytes(0, &path)?;
        Ok(path.len() as isize)
    };
    match tell() {
        Err(Stop::Kernel(_)) => Answer::NotOurs,
        other => Answer::of(other),
    }
}

pub(super) fn fchdir(p: &Process, a: &Args) -> Answer {
    let fd = a.int(0);
    let ours = p.table.has(fd);
    if let Err(errno) = p.make_real(fd) {
        return Answer::FellBackMade(error(errno), Why::CannotOpen);
    }
    let result = a.call();
    if result == 0 {
        p.moved();
    }
    if ours {
        Answer::FellBackMade(result, Why::NotServed)
    } else {
        Answer::Made(result)
    }
}

/// Gives up serving: paths may resolve differently, or this thread has its own working directory or
/// descriptor table, and only the kernel knows.
pub(super) fn other_root(p: &Process, a: &Args) -> Answer {
    let number = a.number() as libc::c_long;
    let harmless = number == libc::SYS_unshare
        && a.int(0) & (libc::CLONE_NEWNS | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_NEWPID) == 0;
    if harmless { Answer::NotOurs } else { p.gives_up() }
}

/// Gives up serving if a file system is being mounted inside the mount, where LibFS would not see it.
pub(super) fn mount(p: &Process, a: &Args, dirfd: i32, i: usize) -> Answer {
    let inside = a
        .path(i)
        .is_ok_and(|path| p.start(dirfd, path).is_ok_and(|start| start.is_some()));
    if inside {
        return p.gives_up();
    }
    match a.number() as libc::c_long {
        // The kernel would take a path that starts at a placeholder, or is empty, for the mount's root.
        libc::SYS_move_mount => p.on_real(Why::NotServed, &[a.int(0), dirfd]),
        _ => Answer::NotOurs,
    }
}

pub(super) fn umask(p: &Process, a: &Args) -> Answer {
    p.set_umask(a.uint(0));
    Answer::NotOurs
}

#[cfg(test)]
mod tests {
    use super::put;
    use varve_format::FileKind;

    #[test]
    fn an_entry_is_laid_out_as_the_kernel_does() {
        let mut out = [0xff_u8; 40];
        assert_eq!(put(&mut out, 7, 9, FileKind::Regular, b"name"), 24);
        assert_eq!(out[..8], 7_u64.to_ne_bytes());
        assert_eq!(out[8..16], 9_u64.to_ne_bytes());
        assert_eq!(out[16..18], 24_u16.to_ne_bytes());
        assert_eq!(out[18], libc::DT_REG);
        assert_eq!(&out[19..24], b"name\0");
        assert_eq!(put(&mut out[..23], 7, 9, FileKind::Regular, b"name"), 0);
    }
}
