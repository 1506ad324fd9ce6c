//! The entry point of the stubs: saves the registers, calls `handle`, and tells the stub whether to make the
//! system call itself.

use super::args::{Args, Frame};
use super::{handlers, kernel, reentry, thread};
use crate::syscalls::NUMBERS;
use std::sync::atomic::{AtomicU8, Ordering};

/// For each number, whether the stub calls `handle` at all. Written before any stub is reachable.
static WANTED: [AtomicU8; NUMBERS] = [const { AtomicU8::new(0) }; NUMBERS];

/// The result of `handle`, in rax and rdx.
#[repr(C)]
pub struct Verdict {
    result: isize,
    /// 1 if the stub is to make the call.
    raw: usize,
}

// `syscall` keeps every register but rax, rcx and r11, so this does too. The C library is built for the
// baseline, so of the vector registers only xmm0 to xmm15 can hold anything across a call. r11 = 1 on return
// tells the stub to make the call.
std::arch::global_asm!(
    ".pushsection .text.varve_entry,\"ax\",@progbits",
    ".p2align 4",
    ".hidden varve_entry",
    ".globl varve_entry",
    "varve_entry:",
    "cmp rax, {count}",
    "jae 4f",
    "lea r11, [rip + {wanted}]",
    "cmp byte ptr [r11 + rax], 0",
    "jne 2f",
    "4: mov r11d, 1",
    "ret",
    "2: push rbp",
    "mov rbp, rsp",
    "sub rsp, 336",
    "and rsp, -16",
    "mov [rsp], rax",
    "mov [rsp + 8], rdi",
    "mov [rsp + 16], rsi",
    "mov [rsp + 24], rdx",
    "mov [rsp + 32], r10",
    "mov [rsp + 40], r8",
    "mov [rsp + 48], r9",
    "movups [rsp + 64], xmm0",
    "movups [rsp + 80], xmm1",
    "movups [rsp + 96], xmm2",
    "movups [rsp + 112], xmm3",
    "movups [rsp + 128], xmm4",
    "movups [rsp + 144], xmm5",
    "movups [rsp + 160], xmm6",
    "movups [rsp + 176], xmm7",
    "movups [rsp + 192], xmm8",
    "movups [rsp + 208], xmm9",
    "movups [rsp + 224], xmm10",
    "movups [rsp + 240], xmm11",
    "movups [rsp + 256], xmm12",
    "movups [rsp + 272], xmm13",
    "movups [rsp + 288], xmm14",
    "movups [rsp + 304], xmm15",
    "mov rdi, rsp",
    "cld",
    "call {handle}",
    "mov r11, rdx",
    "movups xmm0, [rsp + 64]",
    "movups xmm1, [rsp + 80]",
    "movups xmm2, [rsp + 96]",
    "movups xmm3, [rsp + 112]",
    "movups xmm4, [rsp + 128]",
    "movups xmm5, [rsp + 144]",
    "movups xmm6, [rsp + 160]",
    "movups xmm7, [rsp + 176]",
    "movups xmm8, [rsp + 192]",
    "movups xmm9, [rsp + 208]",
    "movups xmm10, [rsp + 224]",
    "movups xmm11, [rsp + 240]",
    "movups xmm12, [rsp + 256]",
    "movups xmm13, [rsp + 272]",
    "movups xmm14, [rsp + 288]",
    "movups xmm15, [rsp + 304]",
    "mov rdi, [rsp + 8]",
    "mov rsi, [rsp + 16]",
    "mov rdx, [rsp + 24]",
    "mov r10, [rsp + 32]",
    "mov r8, [rsp + 40]",
    "mov r9, [rsp + 48]",
    "test r11, r11",
    "je 3f",
    "mov rax, [rsp]",
    "3: mov rsp, rbp",
    "pop rbp",
    "ret",
    ".popsection",
    count = const NUMBERS,
    wanted = sym WANTED,
    handle = sym handle,
);

unsafe extern "C" {
    fn varve_entry();
}

/// Returns the address that stubs call.
#[must_use]
pub fn address() -> usize {
    varve_entry as *const () as usize
}

/// Has stubs call `handle` for `number`. Called before any stub is reachable.
pub fn want(number: usize) {
    WANTED[number].store(1, Ordering::Relaxed);
}

/// Whether stubs call `handle` for `number`.
#[must_use]
pub fn is_wanted(number: usize) -> bool {
    WANTED
        .get(number)
        .is_some_and(|wanted| wanted.load(Ordering::Relaxed) != 0)
}

const RAW: Verdict = Verdict { result: 0, raw: 1 };

const fn done(result: isize) -> Verdict {
    Verdict { result, raw: 0 }
}

/// Handles one system call of the program, or of LibFS in it.
extern "C" fn handle(frame: *mut Frame) -> Verdict {
    // SAFETY: `varve_entry` passes its own frame, and the arguments are those of a real system call.
    let args = unsafe { Args::new(frame) };
    if is_inside() {
        return reentry::call(&args).map_or(RAW, done);
    }
    let Some(handlers) = handlers::get() else {
        return RAW;
    };
    if thread::with(|thread| thread.vfork_of.get()) != 0 && !back_from_vfork() {
        inside(|| {
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (handlers.lent)(&args)));
        });
        return RAW;
    }
    let guard = Inside::enter();
    // A panic here would unwind into code without unwind tables.
    let answer = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (handlers.program)(&args)))
        .unwrap_or(Some(-(libc::EIO as isize)));
    drop(guard);
    answer.map_or(RAW, done)
}

/// Whether this thread is the parent again after a `vfork`. The child runs in this thread's memory with a
/// process id of its own: its calls are the kernel's, whatever the tables say.
#[cold]
fn back_from_vfork() -> bool {
    thread::with(|thread| {
        if kernel::getpid() == thread.vfork_of.get() {
            thread.vfork_of.set(0);
            true
        } else {
            false
        }
    })
}

/// While it lives, this thread's system calls are the library's own, and signals are deferred.
#[derive(Debug)]
pub struct Inside;

impl Inside {
    fn enter() -> Self {
        thread::with(|thread| thread.inside.set(thread.inside.get() + 1));
        Self
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        thread::with(|thread| {
            thread.inside.set(thread.inside.get() - 1);
            if thread.inside.get() == 0 && thread.deferred.get() != 0 {
                kernel::sigmask(false, thread.deferred.replace(0));
            }
        });
    }
}

/// Whether this thread is in a call of the library, or is one of the library's threads.
#[must_use]
pub fn is_inside() -> bool {
    thread::with(|thread| thread.internal.get() || thread.inside.get() > 0)
}

/// Makes this thread's system calls the library's own until the returned guard is dropped, by this thread or
/// its copy in a child.
#[must_use]
pub fn stay_inside() -> Inside {
    Inside::enter()
}

/// Runs `work` with this thread's system calls being the library's own.
pub fn inside<T>(work: impl FnOnce() -> T) -> T {
    let _guard = Inside::enter();
    work()
}

/// Runs `wait` as if this thread were outside: signal handlers may run meanwhile. For calls that block, made
/// with nothing locked.
pub fn outside<T>(wait: impl FnOnce() -> T) -> T {
    thread::with(|thread| {
        let depth = thread.inside.replace(0);
        if thread.deferred.get() != 0 {
            kernel::sigmask(false, thread.deferred.replace(0));
        }
        let value = wait();
        thread.inside.set(depth);
        value
    })
}
