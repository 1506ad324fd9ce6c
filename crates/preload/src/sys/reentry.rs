//! Calls that LibFS itself makes in the process. The library's own descriptors are kept away from the
//! program: they have high numbers, and the program cannot close them.

use super::args::Args;
use super::{kernel, thread};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

const SLOTS: usize = 256;
/// Distance of the library's own descriptors below the limit on descriptors.
const ROOM: usize = 128;
/// Highest number regardless of the limit: the kernel's table grows with the highest number.
const CEILING: usize = 4096;
/// Signals that the C library needs in every thread (cancellation, `set*id`).
const LIBC_SIGNALS: u64 = 0b11 << 31;

/// The library's own descriptors; -1 marks a free slot.
static OWN: [AtomicI32; SLOTS] = [const { AtomicI32::new(-1) }; SLOTS];
/// Lower bound of the library's own descriptors.
static LOWEST: AtomicI32 = AtomicI32::new(i32::MAX);
/// Lock of the threads that change the limit on descriptors.
static LIMITS: AtomicBool = AtomicBool::new(false);
/// Number of threads that LibFS started and that have not set their name yet.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Whether `fd` is the library's own.
#[must_use]
pub fn is_own(fd: i32) -> bool {
    fd >= LOWEST.load(Ordering::Relaxed)
        && fd >= 0
        && OWN.iter().any(|slot| slot.load(Ordering::Relaxed) == fd)
}

/// Returns the library's own descriptors, sorted.
#[must_use]
pub fn own() -> Vec<i32> {
    let mut own: Vec<i32> = OWN
        .iter()
        .map(|slot| slot.load(Ordering::Relaxed))
        .filter(|fd| *fd >= 0)
        .collect();
    own.sort_unstable();
    own
}

/// Exclusive right to change the limit on descriptors. A child of `fork` releases its copy too, so the lock
/// is a flag, not a mutex with waiters.
pub struct Limits(());

impl Limits {
    /// Takes the lock, waiting for it if necessary.
    #[must_use]
    pub fn hold() -> Self {
        let take = || LIMITS.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed);
        while take().is_err() {
            std::thread::yield_now();
        }
        Self(())
    }
}

impl Drop for Limits {
    fn drop(&mut self) {
        LIMITS.store(false, Ordering::Release);
    }
}

/// Moves a new descriptor to a high number and records it as the library's own. Returns the new number. Where
/// the hard limit allows, it lies above the soft limit, so that the program can still use all numbers below
/// that.
pub fn adopt(fd: i32) -> i32 {
    let high = {
        let _limits = Limits::hold();
        let (soft, hard) = kernel::descriptors_max();
        let above = soft + SLOTS;
        if soft <= CEILING && above <= hard && kernel::set_descriptors_max(above, hard) {
            let high = kernel::fcntl(fd, libc::F_DUPFD_CLOEXEC, soft);
            let _ = kernel::set_descriptors_max(soft, hard);
            high
        } else {
            kernel::fcntl(fd, libc::F_DUPFD_CLOEXEC, soft.min(CEILING).saturating_sub(ROOM))
        }
    } as i32;
    let fd = if high >= 0 {
        kernel::close(fd);
        high
    } else {
        fd
    };
    note(fd)
}

/// `dup3` to a number that the program has open, though the limit on descriptors may have been set below it.
pub fn replace(fd: i32, to: i32, flags: i32) -> isize {
    let first = kernel::dup3(fd, to, flags);
    if first != -(libc::EBADF as isize) {
        return first;
    }
    let _limits = Limits::hold();
    let (soft, hard) = kernel::descriptors_max();
    if to < 0 || (to as usize) < soft || !kernel::set_descriptors_max(to as usize + 1, hard) {
        return first;
    }
    let second = kernel::dup3(fd, to, flags);
    let _ = kernel::set_descriptors_max(soft, hard);
    second
}

/// Records a descriptor as the library's own under its present number. Returns the number.
pub fn note(fd: i32) -> i32 {
    let free = OWN.iter().find(|slot| {
        slot.load(Ordering::Relaxed) == -1
            && slot
                .compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    });
    if free.is_some() {
        LOWEST.fetch_min(fd, Ordering::Relaxed);
    }
    fd
}

/// Forgets `fd`, which the library is about to close.
pub fn forget(fd: i32) {
    for slot in OWN.iter().filter(|slot| slot.load(Ordering::Relaxed) == fd) {
        let _ = slot.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A kernel descriptor that is closed when this is dropped.
#[derive(Debug)]
pub struct KernelFd(pub i32);

impl Drop for KernelFd {
    fn drop(&mut self) {
        forget(self.0);
        kernel::close(self.0);
    }
}

/// Closes the library's own descriptors in a child after `fork`. The child does not use the parent's session;
/// if it kept the descriptors, the daemon would not see the parent end.
pub fn drop_all() {
    for slot in &OWN {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            kernel::close(fd);
        }
    }
    STARTING.store(0, Ordering::Relaxed);
}

/// Makes a call of a thread that is in LibFS. `None` if the stub is to make it.
pub fn call(args: &Args) -> Option<isize> {
    let adopted = |result: isize| {
        if result >= 0 {
            adopt(result as i32) as isize
        } else {
            result
        }
    };
    match args.number() as libc::c_long {
        libc::SYS_socket
        | libc::SYS_open
        | libc::SYS_openat
        | libc::SYS_dup
        | libc::SYS_memfd_create
        | libc::SYS_eventfd2
        | libc::SYS_epoll_create1
        | libc::SYS_io_uring_setup
        | libc::SYS_pidfd_open => Some(adopted(args.call())),
        libc::SYS_fcntl if matches!(args.int(1), libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => {
            Some(adopted(args.call()))
        }
        libc::SYS_close => {
            forget(args.int(0));
            None
        }
        libc::SYS_recvmsg => {
            let result = args.call();
            if result >= 0 {
                args.replace_carried(1, adopt);
            }
            Some(result)
        }
        // Not the program's own `fork`, during which its thread counts as inside the library.
        libc::SYS_clone | libc::SYS_clone3 if !thread::with(|thread| thread.forking.get()) => {
            STARTING.fetch_add(1, Ordering::Relaxed);
            None
        }
        _ => None,
    }
}

/// Handles a thread that sets its name. If LibFS started it, its calls are the library's own from then on,
/// and the program's signals never run on it.
pub fn named(args: &Args) {
    let ours = STARTING.load(Ordering::Relaxed) > 0
        && args.int(0) == libc::PR_SET_NAME
        && args
            .text(1, 16)
            .is_ok_and(|name| name.is_some_and(|name| name.starts_with(b"varve-")));
    if ours {
        STARTING.fetch_sub(1, Ordering::Relaxed);
        thread::with(|thread| thread.internal.set(true));
        kernel::sigmask(true, !LIBC_SIGNALS);
    }
}
