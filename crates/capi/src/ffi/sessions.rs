//! Connecting and disconnecting.

use super::{c_path, guard, note, on, zero};
use crate::registry::{SESSIONS, Session};
use libc::{c_char, c_int, mode_t};
use parking_lot::Mutex;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use varve_embed::PoolHere;
use varve_ipc::{ClientKind, Cred, IpcError};
use varve_kernelfs::KernelError;
use varve_kernelfs::pool::{HostPool, PoolSpec, create_pool};
use varve_libfs::{Connector, Errno, Fs, FsOptions, MountError, Posix, SocketConnector};

/// A connected pool: one session. All threads of the process may use it at once.
#[allow(non_camel_case_types)]
pub struct varve_fs {
    _private: (),
}

/// Make each change durable against power loss before its call returns.
pub const VARVE_SYNC_ALWAYS: u32 = 1;
/// Open a session that changes nothing; it needs no log.
pub const VARVE_READ_ONLY: u32 = 2;

fn pool_error(error: &KernelError) -> Errno {
    // If VARVE_DEBUG is set, the cause is printed to standard error in words: an errno cannot tell which file
    // is missing.
    if std::env::var_os("VARVE_DEBUG").is_some() {
        note(&error);
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(errno) = error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::raw_os_error)
        {
            return Errno(errno);
        }
        cause = error.source();
    }
    Errno(libc::EINVAL)
}

fn mount_error(error: &MountError) -> Errno {
    match error {
        MountError::Session(IpcError::Errno(errno)) => Errno(*errno),
        MountError::Session(_) => Errno(libc::ECONNREFUSED),
        MountError::Protocol(_) => Errno(libc::EPROTO),
        MountError::Thread(error) => Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)),
    }
}

fn this_user() -> Cred {
    // SAFETY: these two cannot fail and touch no memory of ours.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let mut groups = vec![0; 65_536];
    // SAFETY: the buffer has room for the number of groups passed, which is the most that Linux permits.
    let count = unsafe { libc::getgroups(groups.len() as c_int, groups.as_mut_ptr()) };
    groups.truncate(usize::try_from(count).unwrap_or(0));
    Cred { uid, gid, groups }
}

fn connected(
    connector: Arc<dyn Connector>,
    flags: u32,
    here: Option<PoolHere>,
) -> Result<*mut varve_fs, Errno> {
    let options = FsOptions {
        kind: ClientKind::Linked,
        read_only: flags & VARVE_READ_ONLY != 0,
        sync_always: flags & VARVE_SYNC_ALWAYS != 0,
        ..FsOptions::default()
    };
    let fs = Fs::mount(connector, options).map_err(|error| mount_error(&error))?;
    let number = SESSIONS.add(Session {
        posix: Posix::new(fs, this_user()),
        here: Mutex::new(here),
    });
    Ok(std::ptr::without_provenance_mut(number))
}

const fn check_flags(flags: u32) -> Result<(), Errno> {
    if flags & !(VARVE_SYNC_ALWAYS | VARVE_READ_ONLY) == 0 {
        Ok(())
    } else {
        Err(Errno(libc::EINVAL))
    }
}

pub(crate) fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// Connects to the daemon that serves `pool` (its directory or its TOML file), with the rights of the calling
/// process. NULL and errno on failure: ENOENT if there is no pool, ECONNREFUSED if no daemon serves it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_connect(pool: *const c_char, flags: u32) -> *mut varve_fs {
    guard(std::ptr::null_mut(), || {
        check_flags(flags)?;
        // SAFETY: the caller's promise.
        let at = as_path(unsafe { c_path(pool) }?);
        at.metadata()
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let host = HostPool::find(at).map_err(|error| pool_error(&error))?;
        // Checked first: a session would wait for a daemon that restarts, and there may never be one.
        std::os::unix::net::UnixStream::connect(host.socket())
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Errno(libc::ECONNREFUSED),
                _ => Errno(error.raw_os_error().unwrap_or(libc::EIO)),
            })
            .map(drop)?;
        connected(Arc::new(SocketConnector { path: host.socket() }), flags, None)
    })
}

/// Serves the pool in directory `pool` from within this process, until `varve_disconnect`, and connects to
/// it. Other processes (a mount, `varve status`) may connect meanwhile. EWOULDBLOCK or EINVAL if another
/// process serves it; set VARVE_DEBUG in the environment for the cause in words.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_embed(pool: *const c_char, flags: u32) -> *mut varve_fs {
    guard(std::ptr::null_mut(), || {
        check_flags(flags)?;
        // SAFETY: the caller's promise.
        let at = as_path(unsafe { c_path(pool) }?);
        at.metadata()
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        let here = PoolHere::open(at).map_err(|error| pool_error(&error))?;
        let connector = here.connector();
        connected(connector, flags, Some(here))
    })
}

/// Makes a pool of plain files in directory `dir`, as `varve mkfs` does: sizes as "64M", "shm:64M" (NVM in
/// memory only) or "0" (no such tier); NULL for the defaults. EEXIST if the directory holds a pool already,
/// EINVAL for invalid sizes or if the directory is not empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_mkpool(
    dir: *const c_char,
    nvm: *const c_char,
    ssd: *const c_char,
    hdd: *const c_char,
) -> c_int {
    zero(|| {
        // SAFETY: the caller's promise.
        let dir = as_path(unsafe { c_path(dir) }?);
        let size = |text: *const c_char| {
            if text.is_null() {
                return Ok(None);
            }
            // SAFETY: the caller's promise.
            let text = unsafe { c_path(text) }?;
            std::str::from_utf8(text)
                .map(Some)
                .map_err(|_| Errno(libc::EINVAL))
        };
        let spec = PoolSpec::parse(size(nvm)?, size(ssd)?, size(hdd)?).map_err(|_| Errno(libc::EINVAL))?;
        if dir.join(varve_kernelfs::pool::TOML).exists() {
            return Err(Errno(libc::EEXIST));
        }
        create_pool(dir, &spec)
            .map(drop)
            .map_err(|error| pool_error(&error))
    })
}

/// Makes all changes durable, ends the session, and stops serving the pool if this process serves it. The
/// session's descriptors are closed and their locks released; its directories and transactions fail from then
/// on. The handle is invalid afterwards, whatever this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_disconnect(fs: *mut varve_fs) -> c_int {
    zero(|| {
        let session = SESSIONS.take(fs.addr()).map_err(Errno)?;
        let unmounted = session.posix.fs().unmount();
        // Open directories and transactions may keep the session in memory, but not its locks.
        session.posix.close_all();
        let here = session.here.lock().take();
        let stopped = here.map_or(Ok(()), |here| here.stop().map_err(|_| Errno(libc::EIO)));
        unmounted.and(stopped)
    })
}

/// Makes the effects of all calls that have returned durable against power loss.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_sync(fs: *mut varve_fs) -> c_int {
    on(fs, |posix| posix.sync())
}

/// Sets the file mode creation mask of this connection (initially 022); returns the old one, or -1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn varve_umask(fs: *mut varve_fs, mask: mode_t) -> c_int {
    guard(-1, || Ok(super::session(fs)?.posix.umask(mask) as c_int))
}

/// Returns the version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn varve_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
