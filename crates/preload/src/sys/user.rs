//! The program's memory. A system call with a bad pointer fails with EFAULT; touching the memory here would
//! raise a signal. So memory of the program is first touched by the few instructions below, and only those
//! may fault: [`signals`](super::signals) first calls [`recover`], which resumes the thread behind the
//! instruction, as the kernel does for its own copies with its exception table.
//!
//! Invariants:
//! 1. Values that are read or written once (structures, offsets, results) are copied by [`copy_in`] and
//!    [`copy_out`], which report a fault at any byte.
//! 2. Slices for LibFS (paths, data) are touched page by page by [`readable`] or [`writable`] just before,
//!    and before any lock of LibFS is taken. LibFS itself never faults, unless another thread of the program
//!    unmaps the buffer of a call that is under way, which a program must not do.
//! 3. Touching a page for writing changes no byte of it, even if another thread writes there at that moment.

use super::pages::PAGE;
use std::mem::MaybeUninit;

/// End of the user half of the address space: the kernel refuses buffers beyond it without touching them.
pub const HIGHEST: usize = 0x7fff_ffff_f000;

// `varve_user_copy(to, from, len)` returns the number of bytes left. `varve_user_load(at, end)` and
// `varve_user_store(at, end)` touch the byte at `at` and the first byte of each page after it; they return
// the address of the first that faults, or else an address not below `end`. The labels that end with `_at`
// name the instructions that may fault.
std::arch::global_asm!(
    ".pushsection .text.varve_user,\"ax\",@progbits",
    ".p2align 4",
    ".hidden varve_user_copy",
    ".globl varve_user_copy",
    "varve_user_copy:",
    "mov rcx, rdx",
    ".hidden varve_user_copy_at",
    ".globl varve_user_copy_at",
    "varve_user_copy_at:",
    "rep movsb",
    ".hidden varve_user_copy_out",
    ".globl varve_user_copy_out",
    "varve_user_copy_out:",
    "mov rax, rcx",
    "ret",
    ".p2align 4",
    ".hidden varve_user_load",
    ".globl varve_user_load",
    "varve_user_load:",
    "mov rax, rdi",
    "2: cmp rax, rsi",
    "jae 3f",
    ".hidden varve_user_load_at",
    ".globl varve_user_load_at",
    "varve_user_load_at:",
    "movzx ecx, byte ptr [rax]",
    "and rax, -{page}",
    "add rax, {page}",
    "jmp 2b",
    ".p2align 4",
    ".hidden varve_user_store",
    ".globl varve_user_store",
    "varve_user_store:",
    "mov rax, rdi",
    "2: cmp rax, rsi",
    "jae 3f",
    ".hidden varve_user_store_at",
    ".globl varve_user_store_at",
    "varve_user_store_at:",
    "lock or byte ptr [rax], 0",
    "and rax, -{page}",
    "add rax, {page}",
    "jmp 2b",
    ".hidden varve_user_out",
    ".globl varve_user_out",
    "varve_user_out:",
    "3: ret",
    ".popsection",
    page = const PAGE,
);

unsafe extern "C" {
    fn varve_user_copy(to: usize, from: usize, len: usize) -> usize;
    fn varve_user_load(at: usize, end: usize) -> usize;
    fn varve_user_store(at: usize, end: usize) -> usize;
    fn varve_user_copy_at();
    fn varve_user_copy_out();
    fn varve_user_load_at();
    fn varve_user_store_at();
    fn varve_user_out();
}

/// Resumes a thread that faulted at an instruction of this module behind it. False for all other faults.
///
/// # Safety
/// `context` is the argument that the kernel passed to a signal handler, and the handler returns to it.
pub unsafe fn recover(context: *mut libc::c_void) -> bool {
    // SAFETY: the kernel's record of the interrupted registers, as promised.
    let at = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] };
    let place = |label: unsafe extern "C" fn()| label as *const () as i64;
    *at = match *at {
        now if now == place(varve_user_copy_at) => place(varve_user_copy_out),
        now if now == place(varve_user_load_at) || now == place(varve_user_store_at) => place(varve_user_out),
        _ => return false,
    };
    true
}

/// Whether a buffer lies in the user half of the address space, and not in the page at null.
const fn is_users(at: usize, len: usize) -> bool {
    // No page is mapped at null; this spares a signal.
    at >= PAGE && len <= HIGHEST && at <= HIGHEST - len
}

/// Returns the number of readable bytes among `len` bytes at `at`, from the first on.
#[must_use]
pub fn readable(at: usize, len: usize) -> usize {
    if !is_users(at, len) {
        return 0;
    }
    // SAFETY: loads that come back when they fault.
    let end = unsafe { varve_user_load(at, at + len) };
    end.min(at + len) - at
}

/// Returns the number of writable bytes among `len` bytes at `at`, from the first on. Changes none.
#[must_use]
pub fn writable(at: usize, len: usize) -> usize {
    if !is_users(at, len) {
        return 0;
    }
    // SAFETY: each byte is rewritten with its own value, in one atomic instruction, which returns when it
    // faults.
    let end = unsafe { varve_user_store(at, at + len) };
    end.min(at + len) - at
}

/// Copies from the program's memory. False if not all of it can be read; part of it may have been copied.
#[must_use]
pub fn copy_in(to: &mut [MaybeUninit<u8>], from: usize) -> bool {
    if to.is_empty() {
        return true;
    }
    // SAFETY: `to` is ours; loads that fault come back.
    is_users(from, to.len()) && unsafe { varve_user_copy(to.as_mut_ptr() as usize, from, to.len()) } == 0
}

/// Copies to the program's memory. False if not all of it can be written; part of it may have been copied.
///
/// # Safety
/// The program has requested `from.len()` bytes at `to`, and keeps nothing else there.
#[must_use]
pub unsafe fn copy_out(to: usize, from: &[u8]) -> bool {
    if from.is_empty() {
        return true;
    }
    // SAFETY: the program's own buffer; stores that fault come back.
    is_users(to, from.len()) && unsafe { varve_user_copy(to, from.as_ptr() as usize, from.len()) } == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{copy_in, copy_out, readable, writable};
    use crate::sys::pages::PAGE;
    use crate::sys::signals;
    use std::mem::MaybeUninit;

    /// Two pages, of which the second allows `second`.
    fn two_pages(second: i32) -> usize {
        signals::begin();
        // SAFETY: a new mapping of two pages, of which one is protected.
        unsafe {
            let all = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 2 * PAGE, all, flags, -1, 0) as usize;
            assert_eq!(libc::mprotect((at + PAGE) as *mut libc::c_void, PAGE, second), 0);
            at
        }
    }

    #[test]
    fn memory_is_good_up_to_the_first_page_that_may_not_be_touched() {
        let at = two_pages(libc::PROT_NONE);
        for (skip, len, good) in [
            (0, 10, 10),
            (0, 2 * PAGE, PAGE),
            (PAGE - 1, 2, 1),
            (PAGE, 1, 0),
            (5, 0, 0),
        ] {
            assert_eq!(readable(at + skip, len), good, "{skip} {len}");
            assert_eq!(writable(at + skip, len), good, "{skip} {len}");
        }
        let at = two_pages(libc::PROT_READ);
        assert_eq!((readable(at, 2 * PAGE), writable(at, 2 * PAGE)), (2 * PAGE, PAGE));
        for bad in [
            0,
            8,
            usize::MAX,
            super::HIGHEST - 1,
            1 << 63,
            0x8000_0000_0000_0000 - 9,
        ] {
            assert_eq!((readable(bad, 4), writable(bad, 4)), (0, 0), "{bad:x}");
        }
    }

    #[test]
    fn copies_end_at_a_page_that_may_not_be_touched() {
        let at = two_pages(libc::PROT_NONE);
        let mut some = [MaybeUninit::uninit(); 8];
        // SAFETY: the pages are this test's own.
        unsafe {
            assert!(copy_out(at + PAGE - 8, b"whatever"));
            assert!(!copy_out(at + PAGE - 7, b"whatever"));
        }
        assert!(copy_in(&mut some, at + PAGE - 8));
        assert!(!copy_in(&mut some, at + PAGE - 7));
        assert!(!copy_in(&mut some, 0));
        assert!(!copy_in(&mut some, 1 << 62));
    }
}
