//! Signals that come while a thread is inside the library wait until it is out: the program's handler may call us again, and must not find a
//! lock held by the very thread that it interrupted.
//!
//! Every handler that the program installs is called by `wrapper`. Inside, it blocks the signal in the interrupted context and sends it
//! to this thread once more; it stays with the kernel, with all that came with it, and is let in when the thread leaves.

use super::args::{Args, Plain};
use super::{kernel, thread};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const COUNT: usize = 65;
const SET: usize = 8;
const RESETHAND: u64 = libc::SA_RESETHAND as u32 as u64;
const SIGINFO: u64 = libc::SA_SIGINFO as u64;

/// What the kernel keeps for a signal.
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

static HANDLERS: [AtomicUsize; COUNT] = [const { AtomicUsize::new(0) }; COUNT];
static FLAGS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

const fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

fn set(signal: usize, new: Option<&Action>, old: Option<&mut Action>) -> isize {
    let new = new.map_or(0, |action| std::ptr::from_ref(action) as usize);
    let old = old.map_or(0, |action| std::ptr::from_mut(action) as usize);
    // SAFETY: both are actions of the kernel's layout, or null.
    unsafe { kernel::call(libc::SYS_rt_sigaction as usize, [signal, new, old, SET, 0, 0]) }
}

/// `rt_sigaction` of the program. `None`: as it is.
pub fn sigaction(args: &Args) -> Option<isize> {
    let signal = args.word(0);
    if signal == 0 || signal >= COUNT || args.word(3) != SET {
        return None;
    }
    let new = match args.word(1) {
        0 => None,
        _ => Some(args.get::<Action>(1).ok()?),
    };
    let (known, flags) = (
        HANDLERS[signal].load(Ordering::Acquire),
        FLAGS[signal].load(Ordering::Acquire),
    );
    if let Some(new) = new.filter(|new| is_handler(new.handler)) {
        FLAGS[signal].store(new.flags, Ordering::Release);
        HANDLERS[signal].store(new.handler, Ordering::Release);
    }
    let changed = new.map(|new| {
        if is_handler(new.handler) {
            let handler = wrapper as *const () as usize;
            // A signal that is sent again must find the handler still.
            Action {
                handler,
                flags: (new.flags | SIGINFO) & !RESETHAND,
                ..new
            }
        } else {
            new
        }
    });
    let mut old = Action::zero();
    let result = set(signal, changed.as_ref(), Some(&mut old));
    if result < 0 {
        FLAGS[signal].store(flags, Ordering::Release);
        HANDLERS[signal].store(known, Ordering::Release);
        return Some(result);
    }
    if args.word(2) != 0 {
        if old.handler == wrapper as *const () as usize {
            old.handler = known;
            old.flags = old.flags & !SIGINFO | flags & (SIGINFO | RESETHAND);
        }
        if let Err(errno) = args.put(2, old) {
            return Some(-(errno.0 as isize));
        }
    }
    Some(result)
}

/// Whether the signal came from an instruction of this thread: the thread cannot go on before it is handled.
fn is_fault(signal: i32, code: i32) -> bool {
    code > 0
        && matches!(
            signal,
            libc::SIGSEGV | libc::SIGBUS | libc::SIGFPE | libc::SIGILL | libc::SIGTRAP | libc::SIGSYS
        )
}

/// Called by the kernel for every signal with a handler of the program.
///
/// # Safety
/// The kernel's arguments of a handler with `SA_SIGINFO`.
unsafe extern "C" fn wrapper(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let bit = 1_u64 << (signal - 1);
    // SAFETY: the kernel hands a valid record.
    let code = unsafe { (*info).si_code };
    let inside = thread::with(|thread| thread.inside.get() > 0);
    if inside && !is_fault(signal, code) {
        // SAFETY: takes nothing.
        let own_thread = unsafe { kernel::call(libc::SYS_gettid as usize, [0; 6]) } as usize;
        // SAFETY: the kernel's context of this frame; its signal mask is what will be set on return.
        unsafe {
            let mask = (&raw mut (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>();
            *mask |= bit;
        }
        // Also where the handler does not block its own signal (SA_NODEFER).
        kernel::sigmask(true, bit);
        let a = [
            kernel::getpid() as usize,
            own_thread,
            signal as usize,
            info as usize,
            0,
            0,
        ];
        // SAFETY: the record is the kernel's own; it is blocked here (the handler's mask) and after the return.
        let sent = unsafe { kernel::call(libc::SYS_rt_tgsigqueueinfo as usize, a) };
        thread::with(|thread| thread.deferred.set(thread.deferred.get() | bit));
        if sent == 0 {
            return;
        }
        // It cannot wait (no room for another): it is better handled here than lost.
    }
    let handler = HANDLERS[signal as usize].load(Ordering::Acquire);
    let flags = FLAGS[signal as usize].load(Ordering::Acquire);
    if !is_handler(handler) {
        return;
    }
    if flags & RESETHAND != 0 {
        let mut plain = Action::zero();
        plain.mask = 0;
        set(signal as usize, Some(&plain), None);
    }
    // SAFETY: the program gave this address for a handler; with or without SA_SIGINFO, more arguments than it takes do no harm in this
    // calling convention.
    unsafe {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            std::mem::transmute(handler);
        handler(signal, info, context);
    }
}
