//! Varve for C programs: `libvarve.so`, `varve.h`, `varve_cache.h`, `varve.pc`. Owns handles and the C ABI;
//! what calls do is LibFS' and the cache's.
//!
//! Every function of `varve.h` is in [`ffi`], every one of `varve_cache.h` in [`cache`]: the modules with
//! `unsafe` code. Handles are table indices in the shape of pointers, never dereferenced: a stale or made-up
//! one is `EBADF` and nothing worse.
#![deny(unsafe_code)]

pub mod cache;
pub mod ffi;
mod registry;
