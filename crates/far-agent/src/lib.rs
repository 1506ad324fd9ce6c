//! The agent of far memory inside a program (see `varve vm run --local`): joins the pager and starts one
//! thread that moves pages out when the pager says so.
//!
//! Knows nothing of slabs, limits or policies. The thread lives beside a program that it must not disturb: it
//! uses no library function, no heap, no thread-local variable and none of the program's descriptors; its
//! stack is not private memory, so it is never evicted.

#![deny(unsafe_code)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[expect(
    unsafe_code,
    reason = "the module that makes raw system calls and starts a raw thread"
)]
mod sys;
