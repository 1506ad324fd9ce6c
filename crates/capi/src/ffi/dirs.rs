//! Reading directories.

use super::{c_path, guard, session, store, varve_fs, zero};
use crate::registry::{DIRS, Dir, DirAt};
use libc::{c_char, c_int};
use parking_lot::Mutex;
use std::sync::Arc;
use varve_libfs::Errno;

/// Entries requested from LibFS at once.
const PAGE: usize = 256;
/// Longest name in bytes, with its NUL.
pub const VARVE_NAME_BYTES: usize = 256;

/// An open directory. If threads share it, each entry goes to one of them.
#[allow(non_camel_case_types)]
pub struct varve_dir {
    _private: (),
}

/// An entry of a directory.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct varve_dirent {
    /// Inode number.
    pub d_ino: u64,
    /// DT_REG, DT_DIR, DT_LNK and so on.
    pub d_type: u8,
    /// Name, NUL-terminated. "." and ".." are not listed.
    pub d_name: [c_char; VARVE_NAME_BYTES],
}

/// As opendir(3). NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_opendir(fs: *mut varve_fs, path: *const c_char) -> *mut varve_dir {
    guard(std::ptr::null_mut(), || {
        let session = session(fs)?;
        // SAFETY: the caller's promise.
        let at = unsafe { c_path(path) }?;
        // With the checks of an open for reading.
        let fd = session.posix.open(at, libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
        let attr = session.posix.fstat(fd);
        session.posix.close(fd)?;
        let dir = Dir {
            key: attr?.key,
            session: Arc::clone(&session),
            at: Mutex::new(DirAt::default()),
        };
        Ok(std::ptr::without_provenance_mut(DIRS.add(dir)))
    })
}

/// Reads the next entry: 1 and `*entry`, 0 at the end, -1 and errno on failure. An entry that exists
/// throughout is returned exactly once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_readdir(dir: *mut varve_dir, entry: *mut varve_dirent) -> c_int {
    guard(-1, || {
        let dir = DIRS.get(dir.addr()).map_err(Errno)?;
        if entry.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let mut at = dir.at.lock();
        if at.page.is_empty() && !at.end {
            let page = dir.session.posix.fs().readdir(dir.key, at.cookie, PAGE)?;
            match page.last() {
                Some(last) => at.cookie = last.next_cookie,
                None => at.end = true,
            }
            at.page.extend(page);
        }
        let Some(next) = at.page.pop_front() else {
            return Ok(0);
        };
        let mut name = [0; VARVE_NAME_BYTES];
        for (to, byte) in name[..VARVE_NAME_BYTES - 1].iter_mut().zip(&next.name) {
            *to = *byte as c_char;
        }
        let found = varve_dirent {
            d_ino: next.key.number(),
            d_type: (next.kind.mode_bits() >> 12) as u8,
            d_name: name,
        };
        // SAFETY: the caller's promise.
        unsafe { store(entry, found) }?;
        Ok(1)
    })
}

/// As rewinddir(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_rewinddir(dir: *mut varve_dir) -> c_int {
    zero(|| {
        *DIRS.get(dir.addr()).map_err(Errno)?.at.lock() = DirAt::default();
        Ok(())
    })
}

/// As closedir(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_closedir(dir: *mut varve_dir) -> c_int {
    zero(|| DIRS.take(dir.addr()).map(drop).map_err(Errno))
}
