//! How a program joins the pager: when the library is loaded, and again in each child of a fork.

use super::calls::{call, close, receive, send, wait_while};
use super::thread;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use varve_far::wire;

/// `USERFAULTFD_IOC_NEW`.
const IOC_NEW: usize = 0xaa00;
/// Bytes of a path in a `sockaddr_un`, the zero at its end included.
const PATH_MAX: usize = 108;

/// First byte of the set-aside area; 0 while there is none.
static ASIDE: AtomicUsize = AtomicUsize::new(0);
/// Length of the socket's path.
static PATH_BYTES: AtomicU32 = AtomicU32::new(0);
/// The socket's path, for children: their environment may be another.
static PATH: [AtomicU8; PATH_MAX] = [const { AtomicU8::new(0) }; PATH_MAX];

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = begin;

/// Runs when the library is loaded, before the program's own code, in its only thread.
extern "C" fn begin() {
    let Some(path) = socket_path() else { return };
    for (to, from) in PATH.iter().zip(path) {
        to.store(*from, Ordering::Relaxed);
    }
    PATH_BYTES.store(path.len() as u32, Ordering::Relaxed);
    let Some(aside) = reserve() else { return };
    if with_signals_blocked(|| join(wire::NEW, aside)) {
        ASIDE.store(aside, Ordering::Release);
        // SAFETY: the function does what may be done in the child of a fork: system calls.
        unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    }
}

/// The value of the variable, as it lies in the environment.
fn socket_path() -> Option<&'static [u8]> {
    let name = std::ffi::CString::new(wire::SOCKET_VARIABLE).ok()?;
    // SAFETY: a text that ends with a zero byte; nobody changes the environment before the program starts.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: `getenv` gives a text that ends with a zero byte.
    let path = unsafe { std::ffi::CStr::from_ptr(value) }.to_bytes();
    (!path.is_empty() && path.len() < PATH_MAX).then_some(path)
}

/// Runs in a child that the C library's fork made, in its only thread.
extern "C" fn forked() {
    let aside = ASIDE.load(Ordering::Acquire);
    if aside != 0 {
        with_signals_blocked(|| join(wire::FORKED, aside));
    }
}

/// The set-aside area: address space without memory. 4 KiB pages, and not in core dumps.
fn reserve() -> Option<usize> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as usize;
    let len = wire::ASIDE_BYTES as usize;
    // SAFETY: a new mapping anywhere, and advice about it.
    unsafe {
        let area = usize::try_from(call(libc::SYS_mmap, [0, len, protection, kind, usize::MAX, 0])).ok()?;
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
            call(libc::SYS_madvise, [area, len, advice as usize, 0, 0, 0]);
        }
        Some(area)
    }
}

/// Calls `with` while no signal reaches this thread.
fn with_signals_blocked(with: impl FnOnce() -> bool) -> bool {
    let (all, mut before) = (u64::MAX, 0u64);
    let set = |how: i32, new: *const u64, old: *mut u64| {
        let args = [how as usize, new as usize, old as usize, size_of::<u64>(), 0, 0];
        // SAFETY: both masks are eight bytes and live over the call.
        unsafe { call(libc::SYS_rt_sigprocmask, args) };
    };
    set(libc::SIG_SETMASK, &raw const all, &raw mut before);
    let done = with();
    set(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    done
}

fn connect() -> Option<i32> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes no pointer.
    let socket = unsafe {
        call(
            libc::SYS_socket,
            [libc::AF_UNIX as usize, kind as usize, 0, 0, 0, 0],
        )
    };
    let socket = i32::try_from(socket).ok().filter(|fd| *fd >= 0)?;
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; PATH_MAX],
    };
    for (to, from) in address.sun_path.iter_mut().zip(&PATH) {
        *to = from.load(Ordering::Relaxed) as libc::c_char;
    }
    let len = 2 + PATH_BYTES.load(Ordering::Relaxed) as usize + 1;
    // SAFETY: `address` lives over the call, and `len` is within it.
    let result = unsafe {
        call(
            libc::SYS_connect,
            [socket as usize, &raw const address as usize, len, 0, 0, 0],
        )
    };
    if result < 0 {
        close(socket);
        return None;
    }
    Some(socket)
}

/// Greets the pager and starts the agent. False when there is none, or it does not want this program.
fn join(kind: u64, aside: usize) -> bool {
    let Some(socket) = connect() else { return false };
    let uffd = greet(socket, kind, aside);
    if uffd.is_some() && kind == wire::FORKED {
        // Copies of what the parent had there, and the number. Before this process can fork itself: its own
        // child gets another number.
        let args = [
            aside,
            wire::ASIDE_BYTES as usize,
            libc::MADV_DONTNEED as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the area holds nothing of the program.
        unsafe { call(libc::SYS_madvise, args) };
    }
    // SAFETY: the signals are blocked.
    let start = uffd.and_then(|uffd| unsafe { thread::start(socket, uffd) });
    if let Some(start) = start {
        wait_while(&start.ready, 0);
    }
    // The agent has both in a table of its own.
    close(socket);
    if let Some(uffd) = uffd {
        close(uffd);
    }
    start.is_some()
}

/// The exchange of `varve_far::wire`. Gives the userfaultfd.
fn greet(socket: i32, kind: u64, aside: usize) -> Option<i32> {
    let hello = [wire::MAGIC, wire::VERSION, kind, aside as u64, wire::ASIDE_BYTES];
    let mut words = [0u64; 8];
    if !send(socket, &hello, None) {
        return None;
    }
    let (count, fd) = receive(socket, &mut words);
    if count != 1 || words[0] != wire::GO || fd < 0 {
        if fd >= 0 {
            close(fd);
        }
        return None;
    }
    if kind == wire::FORKED {
        return Some(fd);
    }
    let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
    // SAFETY: the call takes flags and gives a descriptor that nobody else has.
    let uffd = unsafe { call(libc::SYS_ioctl, [fd as usize, IOC_NEW, flags, 0, 0, 0]) };
    close(fd);
    let uffd = i32::try_from(uffd).ok().filter(|fd| *fd >= 0)?;
    if send(socket, &[wire::GO], Some(uffd)) && receive(socket, &mut words) == (1, -1) && words[0] == wire::GO
    {
        return Some(uffd);
    }
    close(uffd);
    None
}
