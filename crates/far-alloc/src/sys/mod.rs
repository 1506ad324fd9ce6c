//! The only unsafe code of the crate: userfaultfd, mappings, and bytes at addresses.
//!
//! Owns argument layouts and errno. Knows neither objects nor policies.

mod memory;
mod thread;
mod uffd;

pub(crate) use memory::{Marker, Region, frees_page_tables, is_present, mappings, move_bytes, zero_bytes};
pub(crate) use thread::spawn;
pub(crate) use uffd::{Fault, Uffd};

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;
/// Pages that one page of a page table names: 2 MiB.
pub(crate) const CHUNK_PAGES: u64 = 512;

fn check(value: libc::c_long) -> std::io::Result<usize> {
    usize::try_from(value).map_err(|_| std::io::Error::last_os_error())
}
