//! userfaultfd inside a cooperating process: asynchronous write protection of its own ranges.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use varve_far::userfault::{
    API, FEATURE_WP_ASYNC, FEATURE_WP_UNPOPULATED, MODE_WP, REGISTER, UNREGISTER, VERSION,
};

use super::check;

const USER_MODE_ONLY: libc::c_int = 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32);

/// Write tracking of the calling process. Dropping it ends the tracking of every range.
#[derive(Debug)]
pub struct WriteTracking {
    fd: OwnedFd,
}

impl WriteTracking {
    /// Opens a userfaultfd for faults of user code only, which needs no privileges.
    ///
    /// # Errors
    /// `ENOSYS`/`EPERM` without userfaultfd, `EINVAL` before Linux 6.7.
    pub fn open() -> io::Result<Self> {
        // SAFETY: the call takes flags and returns a new descriptor without another owner.
        let fd = check(unsafe {
            libc::syscall(
                libc::SYS_userfaultfd,
                libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY,
            )
        })?;
        // SAFETY: see above; it fits an int.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        let mut api = Api {
            api: VERSION,
            features: FEATURE_WP_ASYNC | FEATURE_WP_UNPOPULATED,
            ioctls: 0,
        };
        // SAFETY: `api` has the size that the ioctl number encodes and lives over the call.
        check(libc::c_long::from(unsafe {
            libc::ioctl(fd.as_raw_fd(), API, &raw mut api)
        }))?;
        Ok(Self { fd })
    }

    /// Registers a page-aligned range. Writes are let through and remembered by the kernel; nothing blocks.
    ///
    /// # Errors
    /// `EINVAL` for ranges that are not anonymous or shared memory, `EBUSY` when another userfaultfd has it.
    pub fn register(&self, start: u64, len_bytes: u64) -> io::Result<()> {
        let mut register = Register {
            start,
            len: len_bytes,
            mode: MODE_WP,
            ioctls: 0,
        };
        // SAFETY: `register` has the size that the ioctl number encodes and lives over the call. In
        // asynchronous mode the kernel resolves faults itself, so no access to the range can hang.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), REGISTER, &raw mut register) };
        check(libc::c_long::from(result)).map(drop)
    }

    /// Ends the tracking of a range.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn unregister(&self, start: u64, len_bytes: u64) -> io::Result<()> {
        let mut range = [start, len_bytes];
        // SAFETY: two u64 are the `uffdio_range` that the ioctl number encodes.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), UNREGISTER, range.as_mut_ptr()) };
        check(libc::c_long::from(result)).map(drop)
    }
}
