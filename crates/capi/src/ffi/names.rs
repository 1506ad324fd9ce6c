//! Names and attributes by path.

use super::{c_path, guard, length, on, output, session, stat_of, store, varve_fs};
use libc::{c_char, c_int, mode_t, off_t, size_t, ssize_t, stat};
use varve_libfs::posix::AT_FDCWD;

/// As stat(2); `st_dev` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_stat(fs: *mut varve_fs, path: *const c_char, out: *mut stat) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise, here and below.
        let attr = posix.stat(unsafe { c_path(path) }?)?;
        // SAFETY: as above.
        unsafe { store(out, stat_of(&attr)) }
    })
}

/// As lstat(2); `st_dev` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_lstat(fs: *mut varve_fs, path: *const c_char, out: *mut stat) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise, here and below.
        let attr = posix.lstat(unsafe { c_path(path) }?)?;
        // SAFETY: as above.
        unsafe { store(out, stat_of(&attr)) }
    })
}

/// As access(2), with the effective ids.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_access(fs: *mut varve_fs, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's promise.
    on(fs, |posix| posix.access(unsafe { c_path(path) }?, mode))
}

/// As mkdir(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_mkdir(fs: *mut varve_fs, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the caller's promise.
    on(fs, |posix| posix.mkdir(unsafe { c_path(path) }?, mode))
}

/// As rmdir(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_rmdir(fs: *mut varve_fs, path: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    on(fs, |posix| posix.rmdir(unsafe { c_path(path) }?))
}

/// As unlink(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_unlink(fs: *mut varve_fs, path: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    on(fs, |posix| posix.unlink(unsafe { c_path(path) }?))
}

/// As rename(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_rename(fs: *mut varve_fs, from: *const c_char, to: *const c_char) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise, for both.
        posix.rename(unsafe { c_path(from) }?, unsafe { c_path(to) }?)
    })
}

/// As link(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_link(fs: *mut varve_fs, from: *const c_char, to: *const c_char) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise, for both.
        posix.link(unsafe { c_path(from) }?, unsafe { c_path(to) }?)
    })
}

/// As symlink(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_symlink(fs: *mut varve_fs, target: *const c_char, at: *const c_char) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise, for both.
        posix.symlink(unsafe { c_path(target) }?, unsafe { c_path(at) }?)
    })
}

/// As readlink(2): no NUL at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_readlink(
    fs: *mut varve_fs,
    path: *const c_char,
    buffer: *mut c_char,
    len: size_t,
) -> ssize_t {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        if len == 0 {
            return Err(varve_libfs::Errno(libc::EINVAL));
        }
        let target = session.posix.readlink(at)?;
        // SAFETY: the caller's promise.
        let out = unsafe { output(buffer.cast(), len) }?;
        let count = target.len().min(out.len());
        out[..count].copy_from_slice(&target[..count]);
        Ok(count as ssize_t)
    })
}

/// As truncate(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_truncate(fs: *mut varve_fs, path: *const c_char, size: off_t) -> c_int {
    on(fs, |posix| {
        // SAFETY: the caller's promise.
        posix.truncate(unsafe { c_path(path) }?, length(size)?)
    })
}

/// As chmod(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_chmod(fs: *mut varve_fs, path: *const c_char, mode: mode_t) -> c_int {
    // SAFETY: the caller's promise.
    on(fs, |posix| posix.chmod(unsafe { c_path(path) }?, mode))
}

/// As chown(2); an id of -1 stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_chown(
    fs: *mut varve_fs,
    path: *const c_char,
    uid: libc::uid_t,
    gid: libc::gid_t,
) -> c_int {
    let id = |id: u32| (id != u32::MAX).then_some(id);
    on(fs, |posix| {
        // SAFETY: the caller's promise.
        posix.fchownat(AT_FDCWD, unsafe { c_path(path) }?, id(uid), id(gid), 0)
    })
}
