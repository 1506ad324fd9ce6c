//! Open files.

use super::{c_path, guard, input, length, on, output, session, stat_of, store, varve_fs};
use libc::{c_char, c_int, c_void, mode_t, off_t, size_t, ssize_t, stat};
use varve_format::FallocateMode;
use varve_libfs::Errno;
use varve_libfs::posix::{AT_FDCWD, Whence};

/// As open(2), with a path in the pool. The descriptor is a number of this connection, not of the kernel.
/// ENXIO for fifos, sockets, devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_open(
    fs: *mut varve_fs,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the caller makes the same promise.
    unsafe { varve_openat(fs, AT_FDCWD, path, flags, mode) }
}

/// As openat(2); `dirfd` may be AT_FDCWD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_openat(
    fs: *mut varve_fs,
    dirfd: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        session.posix.openat(dirfd, unsafe { c_path(path) }?, flags, mode)
    })
}

/// As close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_close(fs: *mut varve_fs, fd: c_int) -> c_int {
    on(fs, |posix| posix.close(fd))
}

/// As dup(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_dup(fs: *mut varve_fs, fd: c_int) -> c_int {
    guard(-1, || session(fs)?.posix.dup(fd))
}

/// As read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_read(
    fs: *mut varve_fs,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
) -> ssize_t {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let out = unsafe { output(buffer, len) }?;
        Ok(session.posix.read(fd, out)? as ssize_t)
    })
}

/// As pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_pread(
    fs: *mut varve_fs,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    offset: off_t,
) -> ssize_t {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let out = unsafe { output(buffer, len) }?;
        Ok(session.posix.pread(fd, out, length(offset)?)? as ssize_t)
    })
}

/// As write(2). Up to 16 MiB, or a quarter of the longest log if that is less, are written atomically; a
/// longer write is split into several, in order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_write(
    fs: *mut varve_fs,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
) -> ssize_t {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let data = unsafe { input(buffer, len) }?;
        Ok(session.posix.write(fd, data)? as ssize_t)
    })
}

/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_pwrite(
    fs: *mut varve_fs,
    fd: c_int,
    buffer: *const c_void,
    len: size_t,
    offset: off_t,
) -> ssize_t {
    guard(-1, || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let data = unsafe { input(buffer, len) }?;
        Ok(session.posix.pwrite(fd, data, length(offset)?)? as ssize_t)
    })
}

/// As lseek(2); `whence` may be SEEK_DATA or SEEK_HOLE too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_lseek(fs: *mut varve_fs, fd: c_int, offset: off_t, whence: c_int) -> off_t {
    guard(-1, || {
        let whence = match whence {
            libc::SEEK_SET => Whence::Set,
            libc::SEEK_CUR => Whence::Current,
            libc::SEEK_END => Whence::End,
            libc::SEEK_DATA => Whence::Data,
            libc::SEEK_HOLE => Whence::Hole,
            _ => return Err(Errno(libc::EINVAL)),
        };
        Ok(session(fs)?.posix.lseek(fd, offset, whence)? as off_t)
    })
}

/// As fsync(2). Makes everything durable that this connection has logged so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_fsync(fs: *mut varve_fs, fd: c_int) -> c_int {
    on(fs, |posix| posix.fsync(fd))
}

/// As fdatasync(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_fdatasync(fs: *mut varve_fs, fd: c_int) -> c_int {
    on(fs, |posix| posix.fdatasync(fd))
}

/// As ftruncate(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_ftruncate(fs: *mut varve_fs, fd: c_int, size: off_t) -> c_int {
    on(fs, |posix| posix.ftruncate(fd, length(size)?))
}

/// As fallocate(2): 0, FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE with it, FALLOC_FL_ZERO_RANGE with it or
/// alone; EOPNOTSUPP for others.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_fallocate(
    fs: *mut varve_fs,
    fd: c_int,
    mode: c_int,
    offset: off_t,
    len: off_t,
) -> c_int {
    const KEEP: c_int = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH: c_int = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
    const ZERO: c_int = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_KEEP: c_int = ZERO | KEEP;
    on(fs, |posix| {
        let mode = match mode {
            0 => FallocateMode::Allocate,
            KEEP => FallocateMode::AllocateKeepSize,
            PUNCH => FallocateMode::PunchHole,
            ZERO => FallocateMode::ZeroRange,
            ZERO_KEEP => FallocateMode::ZeroRangeKeepSize,
            _ => return Err(Errno(libc::EOPNOTSUPP)),
        };
        posix.fallocate(fd, mode, length(offset)?, length(len)?)
    })
}

/// As fstat(2); `st_dev` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_fstat(fs: *mut varve_fs, fd: c_int, out: *mut stat) -> c_int {
    on(fs, |posix| {
        let attr = posix.fstat(fd)?;
        // SAFETY: the caller's promise.
        unsafe { store(out, stat_of(&attr)) }
    })
}
