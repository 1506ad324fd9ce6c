//! The file calls of unmodified programs, served in their process by LibFS.
//!
//! Loaded by `LD_PRELOAD` (see `varve run`), the library replaces the system-call sites of the C library in
//! memory; it exports no symbol. A call that concerns a path under the mount, or a descriptor that was opened
//! there, goes to LibFS; difficult calls fall back to the mount, which serves the same files. [`calls`]
//! describes how each call is made; `docs/guide/run.md` lists them.

pub mod calls;
pub mod config;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod mmap_copies;
pub mod mounts;
pub mod ofd;
pub mod process;
mod start;
pub mod stats;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub mod sys;
pub mod syscalls;
pub mod table;
pub mod walk;
pub mod watches;
pub mod why;

pub use varve_libfs::{Errno, Result};
