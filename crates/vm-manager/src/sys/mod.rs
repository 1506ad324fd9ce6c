//! The only unsafe code of the crate: system calls that no safe library offers.
//!
//! Owns argument layouts and errno; refuses to know policies. Every wrapper takes owned or borrowed Rust
//! values and gives back `std::io::Error`s that carry the kernel's errno.

mod advise;
mod arena;
mod faults;
mod numa;
mod pagemap;
mod process;
mod uffd;

pub use advise::{Advice, ProcessHandle};
pub use arena::Arenas;
pub use faults::{Event, Faults, read_memory, userfault_device};
pub use numa::{move_pages, page_nodes};
pub use pagemap::{FrameFlags, Frames, PageCategories, PageRun, Pagemap};
pub use process::{ThpDisable, disable_thp, restrict_child_thp, run_until, thread_cpu_time};
pub use uffd::WriteTracking;

/// Converts the result of a system call to `io::Result`.
fn check(value: libc::c_long) -> std::io::Result<usize> {
    usize::try_from(value).map_err(|_| std::io::Error::last_os_error())
}
