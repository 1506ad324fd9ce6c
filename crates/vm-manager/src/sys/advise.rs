//! `process_madvise` on other processes through a pidfd.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::check;
use crate::types::Pid;

/// Advice that may be given to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Make huge pages now (`MADV_COLLAPSE`, Linux 6.1).
    Collapse,
    /// Age pages; on part of a huge page it splits it (`MADV_COLD`).
    Cold,
    /// Write pages back to storage (`MADV_PAGEOUT`).
    PageOut,
}

impl Advice {
    const fn code(self) -> libc::c_int {
        match self {
            Self::Collapse => 25,
            Self::Cold => 20,
            Self::PageOut => 21,
        }
    }
}

/// A handle that stays bound to its process when the pid is reused.
#[derive(Debug)]
pub struct ProcessHandle {
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Opens a handle.
    ///
    /// # Errors
    /// `ESRCH` when there is no such process, `ENOSYS` before Linux 5.3.
    pub fn open(pid: Pid) -> io::Result<Self> {
        // SAFETY: pidfd_open takes two integers and returns a new descriptor without another owner.
        let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0, 0) })?;
        // SAFETY: the descriptor was just made by the kernel for us; it fits an int.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) };
        Ok(Self { fd })
    }

    /// Gives advice on a range; returns the number of bytes that the kernel processed.
    ///
    /// # Errors
    /// The kernel's errno: `EPERM` without CAP_SYS_NICE, `EINVAL` when the kernel does not know the advice or
    /// the range cannot take it, `EAGAIN`/`EBUSY` when busy, `ENOMEM` without contiguous memory or mapping,
    /// `ESRCH` when gone.
    pub fn advise(&self, address: u64, len_bytes: u64, advice: Advice) -> io::Result<usize> {
        let range = libc::iovec {
            iov_base: address as *mut libc::c_void,
            iov_len: len_bytes as usize,
        };
        // SAFETY: `range` lives over the call and one entry is announced; the addresses in it are those of
        // the other process and are never followed here. None of the advices in `Advice` changes contents.
        check(unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                self.fd.as_raw_fd(),
                &raw const range,
                1,
                advice.code(),
                0,
            )
        })
    }

    /// Whether the process still runs.
    pub fn alive(&self) -> bool {
        // SAFETY: signal 0 sends nothing; the descriptor is open as long as `self` lives; a null siginfo is
        // allowed.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.fd.as_raw_fd(),
                0,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
        sent == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM)
    }
}
