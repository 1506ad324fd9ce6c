//! `malloc` as the library's own code finds it: the standard library asks for it by name in a few places, such
//! as the first use of a thread's handle. It is the library's [heap](super::heap), since the program's may be
//! what a signal handler has interrupted. Hidden from the program and from the C library; so blocks that the C
//! library allocates must not be freed by code in this library. `realpath`, the one function that gives the
//! standard library such a block, gives one of these.
//!
//! A block begins with what its memory is, and is aligned to 16 bytes or more.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null_mut;

use super::heap::HEAP;

/// In front of each block.
#[derive(Clone, Copy)]
#[repr(C)]
struct Head {
    /// The memory.
    start: *mut u8,
    /// Its bytes.
    len: usize,
}

const HEAD: usize = size_of::<Head>();

std::arch::global_asm!(
    ".macro varve_hide name, target",
    ".hidden \\name",
    ".globl \\name",
    ".type \\name,@function",
    "\\name: jmp \\target",
    ".endm",
    ".pushsection .text.varve_malloc,\"ax\",@progbits",
    "varve_hide malloc, {malloc}",
    "varve_hide calloc, {calloc}",
    "varve_hide realloc, {realloc}",
    "varve_hide posix_memalign, {posix_memalign}",
    "varve_hide aligned_alloc, {aligned_alloc}",
    "varve_hide free, {free}",
    "varve_hide realpath, {realpath}",
    ".popsection",
    malloc = sym malloc,
    calloc = sym calloc,
    realloc = sym realloc,
    posix_memalign = sym posix_memalign,
    aligned_alloc = sym aligned_alloc,
    free = sym free,
    realpath = sym realpath,
);

unsafe extern "C" {
    /// `realpath` that checks the length of `place`.
    fn __realpath_chk(path: *const libc::c_char, place: *mut libc::c_char, len: usize) -> *mut libc::c_char;
}

/// Returns a block of `len` zeros, aligned to `align`, a power of two; null if there is no memory.
fn take(len: usize, align: usize) -> *mut u8 {
    let align = align.max(HEAD);
    let layout = len
        .checked_add(align)
        .and_then(|len| Layout::from_size_align(len, HEAD).ok());
    let start = layout.map_or(null_mut(), |layout| {
        // SAFETY: the size is not zero.
        unsafe { HEAP.alloc_zeroed(layout) }
    });
    let (false, Some(layout)) = (start.is_null(), layout) else {
        // SAFETY: this thread's error number.
        unsafe { *libc::__errno_location() = libc::ENOMEM };
        return null_mut();
    };
    let start_address = start as usize;
    let at = start.wrapping_add((start_address + HEAD).next_multiple_of(align) - start_address);
    let head = Head {
        start,
        len: layout.size(),
    };
    // SAFETY: memory that was just allocated is aligned to HEAD, so the next multiple of `align` behind a head
    // is at most `align` further, and `len` bytes fit behind it.
    unsafe { at.cast::<Head>().sub(1).write(head) };
    at
}

/// What is in front of a block.
///
/// # Safety
/// `take` has returned `block`, and it is not freed.
unsafe fn head(block: *mut u8) -> Head {
    // SAFETY: the caller's.
    unsafe { block.cast::<Head>().sub(1).read() }
}

unsafe extern "C" fn malloc(len: usize) -> *mut u8 {
    take(len, HEAD)
}

unsafe extern "C" fn calloc(count: usize, len: usize) -> *mut u8 {
    count.checked_mul(len).map_or(null_mut(), |len| take(len, HEAD))
}

unsafe extern "C" fn aligned_alloc(align: usize, len: usize) -> *mut u8 {
    if align.is_power_of_two() {
        take(len, align)
    } else {
        null_mut()
    }
}

unsafe extern "C" fn posix_memalign(place: *mut *mut u8, align: usize, len: usize) -> i32 {
    if !align.is_power_of_two() {
        return libc::EINVAL;
    }
    let block = take(len, align);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's place for the result.
    unsafe { *place = block };
    0
}

unsafe extern "C" fn realloc(block: *mut u8, len: usize) -> *mut u8 {
    let new = take(len, HEAD);
    if !block.is_null() && !new.is_null() {
        // SAFETY: the caller has `block` from here. Both blocks have the bytes that are copied.
        unsafe {
            let Head { start, len: whole } = head(block);
            let old = whole - (block as usize - start as usize);
            new.copy_from_nonoverlapping(block, old.min(len));
            free(block);
        }
    }
    new
}

unsafe extern "C" fn free(block: *mut u8) {
    if block.is_null() {
        return;
    }
    // SAFETY: the caller has it from here, so its head says what was allocated.
    unsafe {
        let Head { start, len } = head(block);
        HEAP.dealloc(start, Layout::from_size_align_unchecked(len, HEAD));
    }
}

unsafe extern "C" fn realpath(path: *const libc::c_char, place: *mut libc::c_char) -> *mut libc::c_char {
    const MAX: usize = libc::PATH_MAX as usize;
    if !place.is_null() {
        // SAFETY: the caller's place has this many bytes.
        return unsafe { __realpath_chk(path, place, MAX) };
    }
    let block = take(MAX, HEAD);
    if block.is_null() {
        return null_mut();
    }
    // SAFETY: the caller's path, and a place of this many bytes, which nobody else has.
    unsafe {
        let found = __realpath_chk(path, block.cast(), MAX);
        if found.is_null() {
            free(block);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::{calloc, free, malloc, posix_memalign, realloc};
    use std::ptr::null_mut;

    #[test]
    fn paths_are_found() {
        for _ in 0..100 {
            let here = std::fs::canonicalize("/proc/self/../1/./../self/fd").expect("it is there");
            assert_eq!(
                here,
                std::path::PathBuf::from(format!("/proc/{}/fd", std::process::id()))
            );
            assert!(std::fs::canonicalize("/proc/none").is_err());
        }
    }

    #[test]
    fn blocks_are_aligned_zeroed_and_keep_what_is_in_them_when_they_grow() {
        // SAFETY: blocks are used as long as they are.
        unsafe {
            assert!(malloc(usize::MAX).is_null() && calloc(usize::MAX, 2).is_null());
            for len in [0, 1, 15, 16, 1000, 1025, 100_000] {
                let first = malloc(len);
                first.write_bytes(7, len);
                let zeros = calloc(len, 1);
                assert!((0..len).all(|at| *zeros.add(at) == 0));
                let more = realloc(first, 2 * len + 1);
                assert!((0..len).all(|at| *more.add(at) == 7));
                for align in [8, 16, 64, 4096] {
                    let mut place = null_mut();
                    assert_eq!(posix_memalign(&raw mut place, align, len), 0);
                    assert!((place as usize).is_multiple_of(align));
                    place.write_bytes(9, len);
                    free(realloc(place, len / 2));
                }
                assert!((0..len).all(|at| *more.add(at) == 7));
                assert!(
                    [first, more, zeros]
                        .iter()
                        .all(|block| (*block as usize).is_multiple_of(16))
                );
                free(more);
                free(zeros);
            }
            let mut place = null_mut();
            assert_eq!(posix_memalign(&raw mut place, 24, 1), libc::EINVAL);
            free(null_mut());
        }
    }
}
