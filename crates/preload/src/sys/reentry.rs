//! Calls that LibFS itself makes in the process. Its descriptors are kept away from the program: at high
//! numbers, and not to be closed.

use super::args::Args;
use super::{kernel, thread};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

const SLOTS: usize = 256;
/// How far below the limit of descriptors ours begin.
const ROOM: usize = 128;
/// However high the limit: the kernel's table grows with the highest number.
const CEILING: usize = 4096;
/// Signals that the C library needs in every thread (cancellation, `set*id`).
const LIBC_SIGNALS: u64 = 0b11 << 31;

/// Descriptors of ours; -1 is free.
static OWN: [AtomicI32; SLOTS] = [const { AtomicI32::new(-1) }; SLOTS];
/// No descriptor of ours is lower.
static LOWEST: AtomicI32 = AtomicI32::new(i32::MAX);
/// Held by who changes the limit on descriptors.
static LIMITS: AtomicBool = AtomicBool::new(false);
/// Threads that LibFS started and that have not told their name yet.
static STARTING: AtomicUsize = AtomicUsize::new(0);

/// Whether `fd` is the library's own.
#[must_use]
pub fn is_own(fd: i32) -> bool {
    fd >= LOWEST.load(Ordering::Relaxed)
        && fd >= 0
        && OWN.iter().any(|slot| slot.load(Ordering::Relaxed) == fd)
}

/// The library's own descriptors.
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

/// The limit on descriptors, held: nobody else changes it. A lock that a child of `fork` lets go too, whoever
/// waited for it in the parent.
pub struct Limits(());

impl Limits {
    /// Waits for it.
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

/// Moves a new descriptor to a high number and remembers it; answers the number. Where the hard limit allows,
/// that lies above the soft one: so the program has as many as that says.
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

/// Remembers a descriptor where it is; answers the number.
pub fn note(fd: i32) -> i32 {
    let free = OWN.iter().find(|slot| {
        slot.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    });
    if free.is_some() {
        LOWEST.fetch_min(fd, Ordering::Relaxed);
    }
    fd
}

/// `fd` is about to be closed by the library.
pub fn forget(fd: i32) {
    for slot in &OWN {
        let _ = slot.compare_exchange(fd, -1, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A descriptor of the kernel that is closed with its owner.
#[derive(Debug)]
pub struct KernelFd(pub i32);

impl Drop for KernelFd {
    fn drop(&mut self) {
        forget(self.0);
        kernel::close(self.0);
    }
}

/// In a child after `fork`: the parent's session is not ours. Its descriptors are closed, so that the daemon
/// sees when the parent ends.
pub fn drop_all() {
    for slot in &OWN {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            kernel::close(fd);
        }
    }
    STARTING.store(0, Ordering::Relaxed);
}

/// A call of a thread that is in LibFS. `None`: as it is.
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
        // Not the program's `fork`, during which its thread is ours.
        libc::SYS_clone | libc::SYS_clone3 if !thread::with(|thread| thread.forking.get()) => {
            STARTING.fetch_add(1, Ordering::Relaxed);
            None
        }
        _ => None,
    }
}

/// A thread tells its name. If it is one that LibFS started, its calls are the library's own from now on, and
/// signals of the program never run there.
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
