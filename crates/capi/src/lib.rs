//! Varve for C programs: `libvarve.so`, `varve.h`, `varve_cache.h`, `varve_alloc.h`, `varve.pc`. Owns handles and
//! the C ABI; LibFS, the cache and the far heap implement the calls.
//!
//! The functions of `varve.h` are in [`ffi`], those of `varve_cache.h` in [`cache`], those of
//! `varve_alloc.h` in [`alloc`]: the modules with `unsafe` code. Handles are table indices in the shape of pointers, never dereferenced: a stale or made-up
//! one only gets `EBADF`.
#![deny(unsafe_code)]

pub mod alloc;
pub mod cache;
pub mod ffi;
mod heap_file;
mod registry;
