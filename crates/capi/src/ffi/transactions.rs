//! Groups of calls that persist as one transaction.

use super::{c_path, guard, input, length, session, varve_fs, zero};
use crate::registry::{GROUPS, Group};
use libc::{c_char, c_int, c_void, mode_t, off_t, size_t};
use parking_lot::Mutex;
use std::sync::Arc;
use varve_libfs::posix::PosixTransaction;
use varve_libfs::{Errno, Posix};

/// A group of calls that take effect together or not at all, whatever fails and whenever the process or the
/// machine dies. No call takes effect before `varve_tx_commit`, and nobody, the caller included, sees any of
/// them before. Calls are checked at the commit, in order; only errors that a call shows by itself (a bad
/// name, a file that is not open for writing, an exceeded limit) are returned at once, and leave the group as
/// it was. Limits: 64 entries (one per call, one per MiB of a write), 2 MiB of log (data, and 64 to 128 bytes
/// and the names for each call), 64 files and directories that existed before; E2BIG beyond. Paths are
/// resolved when the call is added; directories made by the same group count, under the path that they were
/// made with.
#[allow(non_camel_case_types)]
pub struct varve_tx {
    _private: (),
}

fn with<T>(
    tx: *mut varve_tx,
    call: impl FnOnce(&mut PosixTransaction, &Posix) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let group = GROUPS.get(tx.addr()).map_err(Errno)?;
    let mut calls = group.calls.lock();
    call(&mut calls, &group.session.posix)
}

/// Begins a group. NULL and errno on failure. End it with `varve_tx_commit` or `varve_tx_abort`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_begin(fs: *mut varve_fs) -> *mut varve_tx {
    guard(std::ptr::null_mut(), || {
        let session = session(fs)?;
        let calls = Mutex::new(session.posix.transaction());
        let group = Group {
            session: Arc::clone(&session),
            calls,
        };
        Ok(std::ptr::without_provenance_mut(GROUPS.add(group)))
    })
}

/// Adds the creation of a regular file, which must not exist. Returns a number that stands for the file in
/// this group's varve_tx_pwrite, _append, _ftruncate and _link (it is no descriptor: after the commit, open
/// the file).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_create(tx: *mut varve_tx, path: *const c_char, mode: mode_t) -> c_int {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        with(tx, |calls, posix| calls.create(posix, at, mode))
    })
}

/// Adds the creation of a directory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_mkdir(tx: *mut varve_tx, path: *const c_char, mode: mode_t) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        with(tx, |calls, posix| calls.mkdir(posix, at, mode))
    })
}

/// Adds the creation of a symbolic link.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_symlink(
    tx: *mut varve_tx,
    target: *const c_char,
    at: *const c_char,
) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise, for both.
        let (target, at) = unsafe { (c_path(target)?, c_path(at)?) };
        with(tx, |calls, posix| calls.symlink(posix, target, at))
    })
}

/// Adds a write of `len` bytes at `offset` (at the end, if the file was opened with O_APPEND). The bytes are
/// copied by this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_pwrite(
    tx: *mut varve_tx,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    offset: off_t,
) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let data = unsafe { input(buffer, len) }?;
        let offset = length(offset)?;
        with(tx, |calls, posix| calls.write(posix, fd, Some(offset), data))
    })
}

/// Adds a write of `len` bytes at the end that the file has at the commit. The bytes are copied by this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_append(
    tx: *mut varve_tx,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let data = unsafe { input(buffer, len) }?;
        with(tx, |calls, posix| calls.write(posix, fd, None, data))
    })
}

/// Adds a change of a file's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_ftruncate(tx: *mut varve_tx, fd: c_int, size: off_t) -> c_int {
    zero(|| {
        let size = length(size)?;
        with(tx, |calls, posix| calls.ftruncate(posix, fd, size))
    })
}

/// Adds one more name of a file (its first, if it was opened with O_TMPFILE).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_link(tx: *mut varve_tx, fd: c_int, path: *const c_char) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        with(tx, |calls, posix| calls.link(posix, fd, at))
    })
}

/// Adds the removal of a name that is not a directory's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_unlink(tx: *mut varve_tx, path: *const c_char) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        with(tx, |calls, posix| calls.unlink(posix, at))
    })
}

/// Adds a rename, which replaces an existing target. The commit fails with EOPNOTSUPP for a directory that
/// would get another parent or be replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_rename(tx: *mut varve_tx, from: *const c_char, to: *const c_char) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise, for both.
        let (from, to) = unsafe { (c_path(from)?, c_path(to)?) };
        with(tx, |calls, posix| calls.rename(posix, from, to))
    })
}

/// Commits all calls of the group at once. On failure (the errno of the first call that cannot be done;
/// E2BIG; EAGAIN if other programs held resources that it needs; ENOSPC; EROFS; EIO) nothing has happened.
/// The handle is invalid afterwards, whatever this returns. The group is as durable as any call: against
/// power loss call varve_fsync or varve_sync, or open one of its files with O_SYNC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_commit(tx: *mut varve_tx) -> c_int {
    zero(|| {
        let group = GROUPS.take(tx.addr()).map_err(Errno)?;
        // A call that another thread is adding at this moment goes before the commit; a later one finds no
        // group.
        let calls = std::mem::replace(&mut *group.calls.lock(), group.session.posix.transaction());
        calls.commit().map(drop)
    })
}

/// Discards the group. The handle is invalid afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_tx_abort(tx: *mut varve_tx) -> c_int {
    zero(|| GROUPS.take(tx.addr()).map(drop).map_err(Errno))
}
