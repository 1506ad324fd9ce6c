//! Signals that arrive while a thread is inside the library are deferred until it leaves: the program's
//! handler may call the library again, and must not find a lock held by the thread that it interrupted.
//!
//! Every handler that the program installs is called by `wrapper`. If the thread is inside, `wrapper` blocks
//! the signal in the interrupted context and sends it to this thread again; the kernel keeps it, with all its
//! data, and delivers it when the thread leaves.
//!
//! SIGSEGV and SIGBUS are always handled by `wrapper`, and never blocked in the kernel, whatever the program
//! requests: bad pointers of the program raise them ([`user`]). The program is shown its own settings, and
//! its handler gets all of these signals that `user` does not cause; without a handler the process dies of
//! them.

use super::args::{Args, Plain};
use super::{kernel, thread, user};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const COUNT: usize = 65;
const SET: usize = 8;
const RESETHAND: u64 = libc::SA_RESETHAND as u32 as u64;
const SIGINFO: u64 = libc::SA_SIGINFO as u64;
const RESTORER: u64 = 0x0400_0000;
/// Signals of the faults that [`user`] recovers from.
const FAULTS: u64 = 1 << (libc::SIGSEGV - 1) | 1 << (libc::SIGBUS - 1);

/// `struct sigaction` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

// SAFETY: integers.
unsafe impl Plain for Action {}

/// The program's last setting for a signal.
struct Said {
    handler: AtomicUsize,
    flags: AtomicU64,
    restorer: AtomicUsize,
    mask: AtomicU64,
}

impl Said {
    const fn nothing() -> Self {
        Self {
            handler: AtomicUsize::new(libc::SIG_DFL),
            flags: AtomicU64::new(0),
            restorer: AtomicUsize::new(0),
            mask: AtomicU64::new(0),
        }
    }

    fn get(&self) -> Action {
        Action {
            handler: self.handler.load(Ordering::Acquire),
            flags: self.flags.load(Ordering::Acquire),
            restorer: self.restorer.load(Ordering::Acquire),
            mask: self.mask.load(Ordering::Acquire),
        }
    }

    fn set(&self, action: &Action) {
        self.flags.store(action.flags, Ordering::Release);
        self.restorer.store(action.restorer, Ordering::Release);
        self.mask.store(action.mask, Ordering::Release);
        self.handler.store(action.handler, Ordering::Release);
    }
}

static SAID: [Said; COUNT] = [const { Said::nothing() }; COUNT];

// Return address of a handler, with the C library's instructions: unwinders recognise these bytes.
std::arch::global_asm!(
    ".pushsection .text.varve_restore,\"ax\",@progbits",
    "nop",
    ".p2align 4",
    ".hidden varve_restore",
    ".globl varve_restore",
    "varve_restore:",
    "mov rax, {number}",
    "syscall",
    ".popsection",
    number = const libc::SYS_rt_sigreturn,
);

unsafe extern "C" {
    fn varve_restore();
}

const fn is_fault_signal(signal: usize) -> bool {
    signal < COUNT && signal > 0 && FAULTS >> (signal - 1) & 1 != 0
}

const fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

fn set(signal: usize, new: Option<&Action>, old: Option<&mut Action>) -> isize {
    let new = new.map_or(0, |action| std::ptr::from_ref(action) as usize);
    let old = old.map_or(0, |action| std::ptr::from_mut(action) as usize);
    // SAFETY: both are actions of the kernel's layout, or null.
    unsafe { kernel::call(libc::SYS_rt_sigaction as usize, [signal, new, old, SET, 0, 0]) }
}

/// Returns the action to install in the kernel where the program requests `action`; `None` if it is `action`
/// itself.
fn wrapped(signal: usize, action: &Action) -> Option<Action> {
    let handler = wrapper as *const () as usize;
    if is_handler(action.handler) {
        // A deferred signal must still find the handler.
        let flags = (action.flags | SIGINFO) & !RESETHAND;
        let mask = action.mask & !FAULTS;
        return Some(Action {
            handler,
            flags,
            mask,
            ..*action
        });
    }
    is_fault_signal(signal).then_some(Action {
        handler,
        flags: SIGINFO | RESTORER | libc::SA_ONSTACK as u64,
        restorer: varve_restore as *const () as usize,
        mask: 0,
    })
}

/// Installs `wrapper` for faults.
pub fn begin() {
    for signal in [libc::SIGSEGV, libc::SIGBUS].map(|signal| signal as usize) {
        let mut old = Action::zero();
        if set(signal, None, Some(&mut old)) == 0 && old.handler != wrapper as *const () as usize {
            SAID[signal].set(&old);
            let _ = set(signal, wrapped(signal, &old).as_ref(), None);
        }
    }
    kernel::sigmask(false, FAULTS);
}

/// Handles `rt_sigaction` of the program. `None` if the kernel is to make it unchanged.
pub fn sigaction(args: &Args) -> Option<isize> {
    let signal = args.word(0);
    if signal == 0 || signal >= COUNT || args.word(3) != SET {
        return None;
    }
    let new = match args.word(1) {
        0 => None,
        _ => Some(args.get::<Action>(1).ok()?),
    };
    let before = SAID[signal].get();
    if let Some(new) = &new {
        SAID[signal].set(new);
    }
    let changed = new.map(|new| wrapped(signal, &new).unwrap_or(new));
    let mut old = Action::zero();
    let result = set(signal, changed.as_ref(), Some(&mut old));
    if result < 0 {
        SAID[signal].set(&before);
        return Some(result);
    }
    if args.word(2) != 0 {
        if old.handler == wrapper as *const () as usize {
            old = before;
        }
        if let Err(errno) = args.put(2, old) {
            return Some(-(errno.0 as isize));
        }
    }
    Some(result)
}

/// Handles `rt_sigprocmask` of the program: fault signals are shown as blocked, but never are. `None` if the
/// kernel is to make it unchanged.
pub fn sigprocmask(args: &Args) -> Option<isize> {
    let hidden = thread::with(|thread| thread.hidden.get());
    let set = match args.word(1) {
        0 => None,
        _ if args.word(3) != SET => return None,
        _ => Some(args.get::<u64>(1).ok()?),
    };
    if hidden == 0 && set.is_none_or(|set| set & FAULTS == 0) {
        return None;
    }
    let shown = set.map(|set| set & !FAULTS);
    let pointer = shown.as_ref().map_or(0, |set| std::ptr::from_ref(set) as usize);
    let result = args.call_with_set(1, pointer);
    if result < 0 {
        return Some(result);
    }
    if let Some(wanted) = set.map(|set| set & FAULTS) {
        let now = match args.int(0) {
            libc::SIG_BLOCK => hidden | wanted,
            libc::SIG_UNBLOCK => hidden & !wanted,
            _ => wanted,
        };
        thread::with(|thread| thread.hidden.set(now));
    }
    if args.word(2) != 0
        && hidden != 0
        && let Ok(old) = args.get::<u64>(2)
    {
        let _ = args.put(2, old | hidden);
    }
    Some(result)
}

/// Whether an instruction of this thread raised the signal: the thread cannot continue before it is handled.
fn is_fault(signal: i32, code: i32) -> bool {
    code > 0
        && matches!(
            signal,
            libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS
        )
}

/// Called by the kernel for every signal with a handler of the program, and for faults.
///
/// # Safety
/// The arguments are those that the kernel passes to a handler with `SA_SIGINFO`.
unsafe extern "C" fn wrapper(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let bit = 1_u64 << (signal - 1);
    // SAFETY: the kernel passes a valid record.
    let code = unsafe { (*info).si_code };
    // SAFETY: the kernel's context of this frame.
    if code > 0 && is_fault_signal(signal as usize) && unsafe { user::recover(context) } {
        return;
    }
    let inside = thread::with(|thread| thread.inside.get() > 0);
    if inside && !is_fault(signal, code) {
        // SAFETY: takes no arguments.
        let own_thread = unsafe { kernel::call(libc::SYS_gettid as usize, [0; 6]) } as usize;
        // SAFETY: the kernel's context of this frame; its signal mask is set on return.
        unsafe {
            let mask = (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
            *mask |= bit;
        }
        // Also for a handler that does not block its own signal (SA_NODEFER).
        kernel::sigmask(true, bit);
        let a = [
            kernel::getpid() as usize,
            own_thread,
            signal as usize,
            info as usize,
            0,
            0,
        ];
        // SAFETY: the record is the kernel's own; the signal is blocked here (by the handler's mask) and
        // after the return.
        let sent = unsafe { kernel::call(libc::SYS_rt_tgsigqueueinfo as usize, a) };
        thread::with(|thread| thread.deferred.set(thread.deferred.get() | bit));
        if sent == 0 {
            return;
        }
        // The kernel could not queue it (no room); it is better handled here than lost.
    }
    let said = SAID[signal as usize].get();
    if !is_handler(said.handler) {
        if is_fault_signal(signal as usize) && (said.handler == libc::SIG_DFL || code > 0) {
            die(signal, info);
        }
        return;
    }
    if said.flags & RESETHAND != 0 {
        let plain = Action::zero();
        SAID[signal as usize].set(&plain);
        if !is_fault_signal(signal as usize) {
            set(signal as usize, Some(&plain), None);
        }
    }
    let here = 0_u8;
    let outer = thread::with(|thread| {
        let outer = thread.handlers.get();
        if let Some(frame) = thread.frames.get(outer) {
            frame.set(&raw const here as usize);
        }
        thread.handlers.set(outer + 1);
        outer
    });
    // SAFETY: the program set this address as its handler; with or without SA_SIGINFO, additional arguments
    // do no harm in this calling convention.
    unsafe {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            std::mem::transmute(said.handler);
        handler(signal, info, context);
    }
    thread::with(|thread| thread.handlers.set(outer));
}

/// Whether this thread is in a signal handler of the program, which may have interrupted `malloc`: what calls
/// into the C library's allocator, such as starting threads, must wait. Handlers that were left by a jump are
/// found by their frames, which are below this one, or on the alternate stack while that is not in use; after a
/// jump to a deeper frame it may say "yes" until there is a call from above.
#[must_use]
pub fn in_handler() -> bool {
    let byte = 0_u8;
    let here = &raw const byte as usize;
    thread::with(|thread| {
        let mut running = thread.handlers.get();
        while running > 0 {
            let frame = thread.frames[(running - 1).min(thread::FRAMES - 1)].get();
            // Stacks grow downwards.
            if here < frame && !is_of_unused_stack(frame) {
                break;
            }
            running = (running - 1).min(thread::FRAMES - 1);
        }
        thread.handlers.set(running);
        running > 0
    })
}

/// Whether an address is on this thread's alternate stack, which it is not using.
fn is_of_unused_stack(address: usize) -> bool {
    let mut stack = libc::stack_t {
        ss_sp: std::ptr::null_mut(),
        ss_flags: 0,
        ss_size: 0,
    };
    let a = [0, &raw mut stack as usize, 0, 0, 0, 0];
    // SAFETY: only asks; `stack` takes the answer.
    let asked = unsafe { kernel::call(libc::SYS_sigaltstack as usize, a) };
    let offset = address.wrapping_sub(stack.ss_sp as usize);
    asked == 0 && stack.ss_flags & (libc::SS_ONSTACK | libc::SS_DISABLE) == 0 && offset < stack.ss_size
}

/// Ends the process by a fault that the program has no handler for, when `wrapper` returns, with all the data
/// of the signal.
#[cold]
fn die(signal: i32, info: *mut libc::siginfo_t) {
    set(signal as usize, Some(&Action::zero()), None);
    let (process, thread) = (kernel::getpid() as usize, kernel::gettid() as usize);
    let a = [process, thread, signal as usize, info as usize, 0, 0];
    // SAFETY: the record is the kernel's own. The signal is blocked while its handler runs, and the same
    // instruction faults again if this fails.
    unsafe { kernel::call(libc::SYS_rt_tgsigqueueinfo as usize, a) };
}
