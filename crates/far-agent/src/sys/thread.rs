//! The agent's threads: stacks, a start that the C library does not see, the loop over commands, and the guard
//! that ends the program when its pager is gone.

use super::calls::{call, close, receive, send, wake};
use std::sync::atomic::{AtomicU32, Ordering};
use varve_far::{userfault, wire};

const STACK_BYTES: usize = 64 << 10;
const PAGE: usize = 4096;
/// Whom the thread becomes when the program starts as root.
const NOBODY: usize = 65_534;

/// The arguments of a starting thread, in the last page of its stack.
#[repr(C)]
pub(super) struct Start {
    /// The target of `fs`: its own address, as thread-local storage on x86-64 begins. Nothing uses it.
    this: usize,
    socket: i32,
    uffd: i32,
    /// 0 until the thread has descriptors of its own.
    pub ready: AtomicU32,
    /// Not 0 once pages were moved, which are lost with the pager.
    has_moved: AtomicU32,
    /// The agent that this thread guards; `None`: it is the agent.
    guarded: Option<&'static Start>,
}

/// Starts the thread. Gives the word that says when it has taken over both descriptors; `None` if it could
/// not be started.
///
/// # Safety
/// The calling thread has all signals blocked, which the new one inherits for ever.
pub(super) unsafe fn start(socket: i32, uffd: i32) -> Option<&'static Start> {
    // SAFETY: the caller's.
    unsafe { start_thread(socket, uffd, None) }
}

/// Starts the agent, or the guard of one.
///
/// # Safety
/// As [`start`].
unsafe fn start_thread(socket: i32, uffd: i32, guarded: Option<&'static Start>) -> Option<&'static Start> {
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let kind = (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping anywhere.
    let stack = unsafe { call(libc::SYS_mmap, [0, STACK_BYTES, protection, kind, usize::MAX, 0]) };
    let base = usize::try_from(stack).ok()?;
    // SAFETY: the first page of the mapping that was just made; below it nothing is to grow into.
    unsafe {
        call(
            libc::SYS_mprotect,
            [base, PAGE, libc::PROT_NONE as usize, 0, 0, 0],
        )
    };
    let top = base + STACK_BYTES - PAGE;
    // The middle of the page: thread-local storage would lie below it.
    let at = (top + PAGE / 2) as *mut Start;
    let start = Start {
        this: at as usize,
        socket,
        uffd,
        ready: AtomicU32::new(0),
        has_moved: AtomicU32::new(0),
        guarded,
    };
    // SAFETY: the page was just mapped, is not used by anybody, and `at` is aligned to half a page. It is
    // never unmapped.
    let start = unsafe {
        at.write(start);
        &*at
    };
    // SAFETY: `top` is the end of a fresh stack and aligned to a page; `at` is for the new thread alone.
    let thread = unsafe { spawn(top, at as usize) };
    (thread > 0).then_some(start)
}

/// Makes a thread that runs [`main`] on the stack that ends at `top`, with `fs` at `tls`.
///
/// # Safety
/// `top` ends a stack that nobody uses, aligned to 16; `tls` holds a `Start` for ever.
unsafe fn spawn(top: usize, tls: usize) -> isize {
    let flags = libc::CLONE_VM
        | libc::CLONE_FS
        | libc::CLONE_FILES
        | libc::CLONE_SIGHAND
        | libc::CLONE_THREAD
        | libc::CLONE_SYSVSEM
        | libc::CLONE_SETTLS;
    let result: isize;
    // SAFETY: the parent goes on behind the block with its own stack. The child starts with `rax` 0 on the
    // new stack, aligned as a call needs it, and never returns from `main`.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r8",
            "call {main}",
            "ud2",
            "2:",
            main = sym main,
            inlateout("rax") libc::SYS_clone as isize => result,
            in("rdi") flags as usize,
            in("rsi") top,
            in("rdx") 0usize,
            in("r10") 0usize,
            in("r8") tls,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// The thread. `start` stays for ever.
extern "C" fn main(start: *const Start) -> ! {
    // SAFETY: `spawn`'s caller vouches for it.
    let start: &'static Start = unsafe { &*start };
    match start.guarded {
        None => agent(start),
        Some(agent) => guard(start.socket, agent),
    }
    loop {
        // SAFETY: ends this thread alone; its stack stays mapped.
        unsafe { call(libc::SYS_exit, [0; 6]) };
    }
}

/// Takes over the descriptors and does what the pager says.
fn agent(start: &'static Start) {
    let (socket, uffd) = own_descriptors(start.socket, start.uffd);
    give_up_root();
    // Shares this thread's descriptors and rights.
    // SAFETY: this thread has all signals blocked, too.
    let is_guarded = unsafe { start_thread(socket, uffd, Some(start)) }.is_some();
    // From now on commands are answered, whatever the thread that started this one waits for.
    let is_heard = is_guarded && send(socket, &[wire::GO], None);
    start.ready.store(1, Ordering::Release);
    wake(&start.ready);
    if is_heard {
        serve(socket, uffd, &start.has_moved);
    }
}

/// Waits until the pager is gone, and ends the program then if pages were moved: they are lost, and better to end
/// than to wait for ever. Not the agent's task: it may be waiting in the kernel for the pager to read an event,
/// which nobody ends while the agent itself has the descriptor of the faults open.
fn guard(socket: i32, agent: &Start) {
    /// A `pollfd` without events: a hang-up is told all the same.
    #[repr(C)]
    struct Poll {
        fd: i32,
        events: i16,
        found: i16,
    }
    let mut poll = Poll {
        fd: socket,
        events: 0,
        found: 0,
    };
    while poll.found == 0 {
        // SAFETY: one `pollfd`, which lives on this stack.
        unsafe { call(libc::SYS_poll, [&raw mut poll as usize, 1, usize::MAX, 0, 0, 0]) };
    }
    if agent.has_moved.load(Ordering::Acquire) == 0 {
        return;
    }
    // SAFETY: neither takes a pointer.
    unsafe {
        let process = call(libc::SYS_getpid, [0; 6]);
        call(
            libc::SYS_kill,
            [process as usize, libc::SIGKILL as usize, 0, 0, 0, 0],
        );
    }
}

/// Takes a descriptor table of its own with nothing but these two, as numbers 0 and 1: the program may close
/// all of its descriptors, and its pipes end when it closes them.
fn own_descriptors(socket: i32, uffd: i32) -> (i32, i32) {
    // SAFETY: none of these takes a pointer. The table is this thread's alone after the first.
    unsafe {
        if call(libc::SYS_unshare, [libc::CLONE_FILES as usize, 0, 0, 0, 0, 0]) < 0 {
            return (socket, uffd);
        }
        // Away from the numbers 0 and 1 first, where either may be.
        let high = |fd: i32| {
            call(
                libc::SYS_fcntl,
                [fd as usize, libc::F_DUPFD as usize, 64, 0, 0, 0],
            )
        };
        let (socket, uffd) = (high(socket), high(uffd));
        call(libc::SYS_dup2, [socket as usize, 0, 0, 0, 0, 0]);
        call(libc::SYS_dup2, [uffd as usize, 1, 0, 0, 0, 0]);
        if call(libc::SYS_close_range, [2, u32::MAX as usize, 0, 0, 0, 0]) < 0 {
            (2..1024).for_each(close);
        }
    }
    (0, 1)
}

/// A program that was started by root and gives that up must have no thread left that did not.
fn give_up_root() {
    // SAFETY: none of these takes a pointer that is used. They concern this thread alone.
    unsafe {
        if call(libc::SYS_geteuid, [0; 6]) != 0 {
            return;
        }
        call(libc::SYS_setgroups, [0; 6]);
        call(libc::SYS_setresgid, [NOBODY, NOBODY, NOBODY, 0, 0, 0]);
        call(libc::SYS_setresuid, [NOBODY, NOBODY, NOBODY, 0, 0, 0]);
        // A change of user takes core dumps and `/proc` from the whole process; it had both.
        call(libc::SYS_prctl, [libc::PR_SET_DUMPABLE as usize, 1, 0, 0, 0, 0]);
    }
}

/// Does what the pager says until it is gone.
fn serve(socket: i32, uffd: i32, has_moved: &AtomicU32) {
    let mut words = [0u64; wire::WORDS_MAX];
    let mut answers = [0u64; wire::RUNS_MAX];
    loop {
        let (count, fd) = receive(socket, &mut words);
        if fd >= 0 {
            close(fd);
        }
        if count < 2 {
            break;
        }
        let runs = (words[1] as usize).min(wire::RUNS_MAX).min((count - 2) / 3);
        if words[0] == wire::MOVE {
            has_moved.store(1, Ordering::Release);
        }
        for run in 0..runs {
            let [first, second, len] = [words[2 + run * 3], words[3 + run * 3], words[4 + run * 3]];
            answers[run] = command(words[0], uffd, first, second, len) as u64;
        }
        if !send(socket, &answers[..runs], None) {
            break;
        }
    }
}

/// One run of one command: bytes done, or a negative errno.
fn command(what: u64, uffd: i32, first: u64, second: u64, len: u64) -> isize {
    let advise = |advice: i32| {
        // SAFETY: the pager names memory of the set-aside area or pages that only change owner; contents that
        // the program can see stay.
        let result = unsafe {
            call(
                libc::SYS_madvise,
                [first as usize, len as usize, advice as usize, 0, 0, 0],
            )
        };
        if result == 0 { len as isize } else { result }
    };
    match what {
        wire::MOVE => {
            let mut argument = [first, second, len, 0, 0];
            // SAFETY: `argument` is a `uffdio_move`. Pages leave a registered range, so the next touch waits
            // for the pager.
            let result = unsafe {
                call(
                    libc::SYS_ioctl,
                    [
                        uffd as usize,
                        userfault::MOVE as usize,
                        argument.as_mut_ptr() as usize,
                        0,
                        0,
                        0,
                    ],
                )
            };
            let moved = argument[4] as isize;
            if result == 0 || moved > 0 { moved } else { result }
        }
        wire::DROP => advise(libc::MADV_DONTNEED),
        wire::OWN => advise(libc::MADV_POPULATE_WRITE),
        _ => -(libc::EINVAL as isize),
    }
}
