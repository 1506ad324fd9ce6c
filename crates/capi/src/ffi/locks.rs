//! File locks.

use super::{guard, note, session, varve_fs};
use crate::registry::Session;
use libc::{c_int, flock};
use varve_libfs::Errno;

/// Prints on standard error why locks are not available, if VARVE_DEBUG is set.
fn told(session: &Session, errno: Errno) -> Errno {
    if errno.0 == libc::ENOLCK
        && std::env::var_os("VARVE_DEBUG").is_some()
        && let Err(why) = session.posix.lock_mount()
    {
        note(&why);
    }
    errno
}

/// As flock(2). Locks are those of the pool's mount, shared by programs on it, programs under `varve run` and
/// linked programs. ENOLCK without a mount (set VARVE_DEBUG in the environment for the cause in words); the
/// first lock call on a descriptor opens the file on the mount, and fails if that does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_flock(fs: *mut varve_fs, fd: c_int, operation: c_int) -> c_int {
    guard(-1, || {
        let session = session(fs)?;
        let done = session.posix.flock(fd, operation);
        done.map(|()| 0).map_err(|errno| told(&session, errno))
    })
}

/// As fcntl(2) with F_SETLK, F_SETLKW, F_GETLK, F_OFD_SETLK, F_OFD_SETLKW or F_OFD_GETLK; EINVAL for other
/// commands. ENOLCK as for varve_flock. Locks of the process (those without OFD) on a file are released when
/// any descriptor of it is closed, by varve_close or close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_fcntl_lock(
    fs: *mut varve_fs,
    fd: c_int,
    command: c_int,
    lock: *mut flock,
) -> c_int {
    guard(-1, || {
        let session = session(fs)?;
        if lock.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        // A copy, since the call may wait, and the caller's memory is not reserved for it that long.
        // SAFETY: not NULL, and the caller promises a structure there; any bytes are one.
        let mut range = unsafe { lock.read() };
        let done = session.posix.fcntl_lock(fd, command, &mut range);
        done.map_err(|errno| told(&session, errno))?;
        if matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
            // SAFETY: as above; the call is over with this.
            unsafe { lock.write(range) };
        }
        Ok(0)
    })
}
