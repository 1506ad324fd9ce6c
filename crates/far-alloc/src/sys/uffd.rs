//! userfaultfd of this process (linux/userfaultfd.h).

use super::{PAGE_BYTES, check};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use varve_far::Page;
use varve_far::userfault::{
    API, COPY, COPY_MODE_WP, EVENT_PAGEFAULT, FEATURE_MOVE, FEATURE_PAGEFAULT_FLAG_WP, FEATURE_POISON,
    FEATURE_SIGBUS, FLAG_WP, FLAG_WRITE, MODE_MISSING, MODE_WP, MOVE, NEW, POISON, REGISTER, VERSION, WAKE,
    WRITEPROTECT, WRITEPROTECT_MODE_WP, ZEROPAGE,
};

/// Tries of a call that another change of the mappings disturbed.
const TRIES: usize = 1000;

/// A fault of a thread, which waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) address: u64,
    pub(crate) is_write: bool,
    /// The page is there and write-protected.
    pub(crate) is_protected: bool,
}

/// A userfaultfd. Closing it wakes all that wait.
#[derive(Debug)]
pub(crate) struct Uffd {
    fd: OwnedFd,
}

impl Uffd {
    /// One that serves missing pages and write protection, in system calls too.
    pub(crate) fn for_faults() -> io::Result<Self> {
        Self::open(FEATURE_PAGEFAULT_FLAG_WP | FEATURE_POISON | FEATURE_MOVE)
    }

    /// One for memory that pages are moved to and nobody waits for: touching what is not there is SIGBUS.
    pub(crate) fn for_moves() -> io::Result<Self> {
        Self::open(FEATURE_MOVE | FEATURE_SIGBUS)
    }

    fn open(features: u64) -> io::Result<Self> {
        let device = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd");
        let fd = match device {
            // SAFETY: the call takes flags and gives a new descriptor.
            Ok(device) => unsafe {
                libc::c_long::from(libc::ioctl(device.as_raw_fd(), NEW, libc::O_CLOEXEC))
            },
            // SAFETY: as above.
            Err(_) => unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) },
        };
        // SAFETY: the descriptor is new and nobody else's; it fits an int.
        let fd = unsafe { OwnedFd::from_raw_fd(check(fd)? as libc::c_int) };
        let all = Self { fd };
        all.call(API, &mut [VERSION, features, 0])?;
        Ok(all)
    }

    fn call(&self, number: libc::c_ulong, words: &mut [u64]) -> io::Result<()> {
        // SAFETY: all callers are in this file: `words` has the length that `number` encodes, and addresses
        // in it are either a page that lives over the call or of memory registered here, which the kernel
        // checks.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), number, words.as_mut_ptr()) };
        check(libc::c_long::from(result)).map(drop)
    }

    /// Tries again what a change of the mappings disturbed.
    fn call_again<const N: usize>(&self, number: libc::c_ulong, words: [u64; N]) -> io::Result<()> {
        for _ in 0..TRIES {
            match self.call(number, &mut words.clone()) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
                other => return other,
            }
        }
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }

    /// Has faults of a range come here; writes to write-protected pages too, if wanted.
    pub(crate) fn register(&self, address: u64, len_bytes: u64, protects: bool) -> io::Result<()> {
        let mode = if protects {
            MODE_MISSING | MODE_WP
        } else {
            MODE_MISSING
        };
        self.call(REGISTER, &mut [address, len_bytes, mode, 0])
    }

    /// Waits for a fault.
    pub(crate) fn wait(&self) -> io::Result<Option<Fault>> {
        let mut message = [0u64; 4];
        // SAFETY: the buffer is as long as is said and may hold any bytes.
        let got = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                message.as_mut_ptr().cast(),
                size_of_val(&message),
            )
        };
        check(got as libc::c_long)?;
        let [event, flags, address, _] = message;
        Ok((event as u8 == EVENT_PAGEFAULT).then_some(Fault {
            address: address & !(PAGE_BYTES as u64 - 1),
            is_write: flags & (FLAG_WRITE | FLAG_WP) != 0,
            is_protected: flags & FLAG_WP != 0,
        }))
    }

    /// Puts a page in and wakes who waits for it.
    pub(crate) fn copy(&self, address: u64, page: &Page, is_protected: bool) -> io::Result<()> {
        let mode = if is_protected { COPY_MODE_WP } else { 0 };
        self.call_again(
            COPY,
            [address, page.0.as_ptr() as u64, PAGE_BYTES as u64, mode, 0],
        )
    }

    /// Puts a page of zeros in.
    pub(crate) fn zero(&self, address: u64) -> io::Result<()> {
        self.call_again(ZEROPAGE, [address, PAGE_BYTES as u64, 0, 0])
    }

    /// Moves a page to `to`, which is registered here. `EBUSY` where the kernel uses it, `ENOENT` where
    /// there is none.
    pub(crate) fn move_page(&self, from: u64, to: u64) -> io::Result<()> {
        self.call_again(MOVE, [to, from, PAGE_BYTES as u64, 0, 0])
    }

    /// Write-protects all pages of a range that are there. When this returns no write to them is under way.
    pub(crate) fn protect(&self, address: u64, len_bytes: u64) -> io::Result<()> {
        self.call_again(WRITEPROTECT, [address, len_bytes, WRITEPROTECT_MODE_WP])
    }

    /// Lets a page be written, and wakes who waits for that.
    pub(crate) fn unprotect(&self, address: u64) -> io::Result<()> {
        self.call_again(WRITEPROTECT, [address, PAGE_BYTES as u64, 0])
    }

    /// Makes touching a page SIGBUS.
    pub(crate) fn poison(&self, address: u64) -> io::Result<()> {
        self.call_again(POISON, [address, PAGE_BYTES as u64, 0, 0])
    }

    /// Has who waits for a page look again.
    pub(crate) fn wake(&self, address: u64) -> io::Result<()> {
        self.call(WAKE, &mut [address, PAGE_BYTES as u64])
    }
}
