//! Varve for C programs: `libvarve.so`, `varve.h`, `varve.pc`. Owns handles and the way across the language's border; what calls do is
//! LibFS'.
//!
//! Every function of `varve.h` is in [`ffi`], the one module with `unsafe` code. Handles are numbers in the shape of pointers: they are looked
//! up, never followed, so that a stale or made-up one is `EBADF` and nothing worse.
#![deny(unsafe_code)]

pub mod ffi;
mod registry;
