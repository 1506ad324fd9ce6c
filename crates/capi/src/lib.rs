//! Varve for C programs: `libvarve.so`, `varve.h`, `varve_cache.h`, `varve.pc`. Owns handles and the C ABI;
//! LibFS and the cache implement the calls.
//!
//! The functions of `varve.h` are in [`ffi`], those of `varve_cache.h` in [`cache`]: the modules with
//! `unsafe` code. Handles are table indices in the shape of pointers, never dereferenced: a stale or made-up
//! one only gets `EBADF`.
#![deny(unsafe_code)]

pub mod cache;
pub mod ffi;
mod registry;
