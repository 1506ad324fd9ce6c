//! The agent of far memory inside a program (see `varve vm run --local`): joins the pager and starts a
//! thread that moves pages out when the pager says so, and one that ends the program when the pager is gone.
//!
//! Knows nothing of slabs, limits or policies. The threads live beside a program that they must not disturb:
//! they use no library function, no heap, no thread-local variable and none of the program's descriptors; their
//! stacks are not private memory, so they are never evicted.

#![deny(unsafe_code)]

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[expect(
    unsafe_code,
    reason = "the module that makes raw system calls and starts a raw thread"
)]
mod sys;
