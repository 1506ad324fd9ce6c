//! Mounting and unmounting, with errors that tell a person the reason and the remedy.

use crate::caches::KernelCaches;
use crate::ops::{DATA_MAX, Shim};
use crate::transport::{Rings, Served, Session, Transport};
use crate::watches::Looker;
use fuser::{Config, MountOption, SessionACL};
use rustix::mount::MountFlags;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use varve_libfs::Fs;

/// Number of threads that serve requests: a request may wait for a lease.
pub(crate) const THREADS: usize = 10;

/// A request to mount.
#[derive(Debug, Clone)]
pub struct MountRequest {
    /// Directory to mount on; must exist.
    pub mountpoint: PathBuf,
    /// Source shown in `/proc/mounts`.
    pub source: String,
    /// Whether other users may use the mount.
    pub allow_other: bool,
    /// Whether the mount is read-only.
    pub read_only: bool,
    /// Further flags, as in mount(2): `nosuid`, `nodev`, `noexec`, and the atime policy. A mount of an
    /// ordinary user always has `nosuid` and `nodev`, and of the others supports only `noexec` and `noatime`.
    pub flags: MountFlags,
    /// Whether requests may come by io_uring, where the kernel offers it.
    pub uring: bool,
}

impl MountRequest {
    /// To mount `source` on a directory, for its user alone and without further flags.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>, source: impl Into<String>) -> Self {
        Self {
            mountpoint: mountpoint.into(),
            source: source.into(),
            allow_other: false,
            read_only: false,
            flags: MountFlags::empty(),
            uring: true,
        }
    }
}

/// File system type that `/proc/mounts` shows; the kernel knows it as `fuse`.
const TYPE: &str = "fuse.varve";

/// The reason why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// `/dev/fuse` does not exist: the kernel or container has no FUSE.
    #[error(
        "/dev/fuse is not there: load the module (`modprobe fuse`), or, in a container, run it with `--device /dev/fuse --cap-add SYS_ADMIN`"
    )]
    NoDevice,
    /// `/dev/fuse` cannot be opened.
    #[error(
        "/dev/fuse cannot be opened ({0}): it needs read and write permission for this user (`chmod 666 /dev/fuse` as root, as distributions have it), or run as root"
    )]
    DeviceRefused(io::Error),
    /// An ordinary user needs the set-uid helper.
    #[error(
        "fusermount3 is not installed, and only root can mount without it: `apt-get install fuse3`, or run as root"
    )]
    NoFusermount,
    /// `allow_other` as an ordinary user needs a line in fuse.conf.
    #[error(
        "`--allow-other` needs the line `user_allow_other` in /etc/fuse.conf: add it (as root), or mount without the option"
    )]
    AllowOtherForbidden,
    /// The directory cannot be mounted on.
    #[error("cannot mount on {path}: {source}")]
    Mountpoint {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The directory is a dead mount of an earlier run.
    #[error("{0} is a mount whose server is gone: `varve umount --force {0}`, then try again")]
    DeadMount(PathBuf),
    /// Any other failure.
    #[error("mounting {path} failed: {source}")]
    Mount {
        /// The directory.
        path: PathBuf,
        /// The error of the kernel or fusermount3.
        source: io::Error,
    },
}

/// A mount that this process serves. Dropping it unmounts.
pub struct Mounted {
    session: Option<Served>,
    /// Searches for watches; `None` for a null file system.
    _looker: Option<Looker>,
    caches: Arc<KernelCaches>,
    mountpoint: PathBuf,
}

impl Mounted {
    pub(crate) fn new(
        session: Served,
        looker: Option<Looker>,
        caches: Arc<KernelCaches>,
        request: &MountRequest,
    ) -> Self {
        Self {
            session: Some(session),
            _looker: looker,
            caches,
            mountpoint: request.mountpoint.clone(),
        }
    }

    /// Returns the directory where it is mounted.
    #[must_use]
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    /// Returns how the kernel's requests come.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.session.as_ref().map_or(Transport::Device, Served::transport)
    }

    /// Whether the mount has ended by itself (`umount`, `fusermount3 -u`).
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.session.as_ref().is_none_or(Served::is_finished)
    }

    /// Unmounts and waits until the last request is answered.
    ///
    /// # Errors
    /// `EBUSY` while a process has a file open in it or has its working directory there; the mount is then
    /// served further.
    pub fn unmount(mut self) -> Result<(), (Self, io::Error)> {
        // Unmount before the session is touched, since fuser's own unmount detaches a busy mount lazily.
        if !self.is_finished() {
            let still = self.caches.still();
            let unmounted = unmount_path(&self.mountpoint, false);
            drop(still);
            if let Err(error) = unmounted {
                return Err((self, error));
            }
        }
        let joined = self.session.take().map_or(Ok(()), Served::join);
        joined.map_err(|error| (self, error))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self
            .session
            .as_ref()
            .is_some_and(|session| !session.is_finished())
        {
            let _still = self.caches.still();
            let _ = unmount_path(&self.mountpoint, true);
        }
    }
}

/// Unmounts `path`: by the system call if permitted, else through `fusermount3`. `lazy` detaches a busy
/// mount.
fn unmount_path(path: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy {
        rustix::mount::UnmountFlags::DETACH
    } else {
        rustix::mount::UnmountFlags::empty()
    };
    match rustix::mount::unmount(path, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let mut command = std::process::Command::new("fusermount3");
            command.arg("-u");
            if lazy {
                command.arg("-z");
            }
            let output = command.arg("--").arg(path).output()?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            let kind = if said.contains("busy") {
                io::ErrorKind::ResourceBusy
            } else {
                io::ErrorKind::Other
            };
            Err(io::Error::new(kind, said))
        }
        Err(error) => Err(error.into()),
    }
}

fn find_in_path(program: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// Checks whether this machine and user can mount at all.
///
/// # Errors
/// The [`MountError`] that a mount would fail with.
pub fn check_host(allow_other: bool) -> Result<(), MountError> {
    if !Path::new("/dev/fuse").exists() {
        return Err(MountError::NoDevice);
    }
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse");
    if rustix::process::geteuid().is_root() {
        return opened.map(drop).map_err(MountError::DeviceRefused);
    }
    if !find_in_path("fusermount3") {
        return Err(MountError::NoFusermount);
    }
    if allow_other {
        let conf = std::fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
        if !conf.lines().any(|line| line.trim() == "user_allow_other") {
            return Err(MountError::AllowOtherForbidden);
        }
    }
    opened.map(drop).map_err(MountError::DeviceRefused)
}

fn check_mountpoint(path: &Path) -> Result<(), MountError> {
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(MountError::Mountpoint {
            path: path.to_owned(),
            source: io::Error::from_raw_os_error(libc::ENOTDIR),
        }),
        Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {
            Err(MountError::DeadMount(path.to_owned()))
        }
        Err(source) => Err(MountError::Mountpoint {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Mounts by the system call, with the type and all flags. `None` if only the set-uid helper may mount.
fn mount_direct(request: &MountRequest) -> io::Result<Option<OwnedFd>> {
    let device = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")?;
    let at = request.mountpoint.canonicalize()?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        std::fs::metadata(&at)?.mode(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw()
    );
    if request.allow_other {
        data.push_str(",allow_other");
    }
    let data = CString::new(data)?;
    let mut flags = request.flags;
    flags.set(MountFlags::RDONLY, request.read_only);
    if !rustix::process::geteuid().is_root() {
        flags |= MountFlags::NOSUID | MountFlags::NODEV;
    }
    match rustix::mount::mount(&*request.source, &at, TYPE, flags, &*data) {
        Ok(()) => Ok(Some(device.into())),
        Err(rustix::io::Errno::PERM) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Mounts, and negotiates with the kernel (`FUSE_INIT`).
fn session(shim: Shim, request: &MountRequest) -> io::Result<Session<Shim>> {
    let rings = rings(request);
    let config = config(request);
    let Some(device) = mount_direct(request)? else {
        return Session::new(shim, &request.mountpoint, rings, &config);
    };
    Session::over(shim, device, rings, config).inspect_err(|_| {
        let _ = unmount_path(&request.mountpoint, true);
    })
}

/// Makes the rings of a mount.
pub(crate) fn rings(request: &MountRequest) -> Rings {
    if request.uring {
        Rings::prepare(DATA_MAX)
    } else {
        Rings::none(DATA_MAX)
    }
}

pub(crate) fn config(request: &MountRequest) -> Config {
    let mut options = vec![
        MountOption::FSName(request.source.clone()),
        MountOption::Subtype("varve".to_owned()),
        MountOption::DefaultPermissions,
        if request.read_only {
            MountOption::RO
        } else {
            MountOption::RW
        },
    ];
    // Options that `fusermount3` supports.
    let known = [
        (MountFlags::NOEXEC, MountOption::NoExec),
        (MountFlags::NOATIME, MountOption::NoAtime),
    ];
    options.extend(
        known
            .into_iter()
            .filter(|(flag, _)| request.flags.contains(*flag))
            .map(|(_, option)| option),
    );
    let mut config = Config::default();
    config.mount_options = options;
    config.acl = if request.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    config
}

/// Returns major and minor number of the mount at `path` without a request to the mount, which is not served
/// yet.
fn device_of(path: &Path) -> io::Result<(u32, u32)> {
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(rustix::fs::CWD, path, flags, rustix::fs::StatxFlags::TYPE)?;
    Ok((found.stx_dev_major, found.stx_dev_minor))
}

/// Mounts `fs`, whose observer must be `caches`, and serves it from threads of this process.
///
/// # Errors
/// A [`MountError`] that tells the remedy.
pub fn mount(fs: Fs, caches: Arc<KernelCaches>, request: &MountRequest) -> Result<Mounted, MountError> {
    check_host(request.allow_other)?;
    check_mountpoint(&request.mountpoint)?;
    let failed = |source| MountError::Mount {
        path: request.mountpoint.clone(),
        source,
    };
    let shim = Shim::new(fs, Arc::clone(&caches));
    let watches = shim.watches();
    let session = session(shim, request).map_err(failed)?;
    caches.attach(session.notifier());
    let undone = |source| {
        let _ = unmount_path(&request.mountpoint, true);
        failed(source)
    };
    let device = device_of(&request.mountpoint).map_err(undone)?;
    let served = session.spawn(THREADS).map_err(undone)?;
    let looker = watches.start(device).map_err(undone)?;
    Ok(Mounted::new(served, Some(looker), caches, request))
}

#[cfg(test)]
mod tests {
    use super::{MountError, check_mountpoint};

    #[test]
    fn mountpoint_is_refused_when_it_is_missing_or_a_file() {
        let missing = std::path::Path::new("/nonexistent/varve");
        assert!(matches!(
            check_mountpoint(missing),
            Err(MountError::Mountpoint { .. })
        ));
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let Err(MountError::Mountpoint { source, .. }) = check_mountpoint(file.path()) else {
            panic!("a file is no place to mount on");
        };
        assert_eq!(source.raw_os_error(), Some(libc::ENOTDIR));
    }
}
