//! Varve for C programs: `libvarve.so`, `varve.h`, `varve.pc`. Owns handles and the C ABI; what
//! calls do is LibFS'.
//!
//! Every function of `varve.h` is in [`ffi`], the one module with `unsafe` code. Handles are table
//! indices in the shape of pointers, never dereferenced: a stale or made-up one is `EBADF` and nothing worse.
#![deny(unsafe_code)]

pub mod ffi;
mod registry;
