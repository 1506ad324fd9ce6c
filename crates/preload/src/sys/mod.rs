//! Modules that touch the machine: system calls, the program's memory, the code of its C library. The only
//! unsafe code of the crate.

pub mod args;
pub mod atfork;
pub mod entry;
pub mod handlers;
pub mod heap;
pub mod image;
pub mod kernel;
pub mod malloc;
pub mod noted;
pub mod pages;
pub mod patch;
pub mod ranges;
pub mod reentry;
pub mod shared;
pub mod shared_offset;
pub mod signals;
pub mod sites;
pub mod start;
pub mod thread;
pub mod thread_exit;
pub mod user;
