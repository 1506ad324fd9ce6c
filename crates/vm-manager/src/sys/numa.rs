//! `move_pages`: where pages are, and moving them between NUMA nodes.

use std::io;

use super::check;
use crate::types::{NodeId, Pid, VirtPage};

/// What the kernel said of one page: its node, or an errno (positive).
pub type PageStatus = Result<NodeId, i32>;

fn call(pid: Pid, pages: &[VirtPage], nodes: Option<&[libc::c_int]>) -> io::Result<Vec<PageStatus>> {
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    let addresses: Vec<u64> = pages.iter().map(|p| p.address()).collect();
    let mut status: Vec<libc::c_int> = vec![-libc::EBUSY; pages.len()];
    let nodes = nodes.map_or(std::ptr::null(), <[libc::c_int]>::as_ptr);
    // SAFETY: `addresses`, `status` and, unless null, `nodes` have `pages.len()` entries each and live over the call
    // (`move_pages` below asserts it for nodes). The addresses belong to the other process and are not followed here.
    // MPOL_MF_MOVE (2) moves only pages that this process alone maps.
    check(unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            pid.0,
            pages.len() as libc::c_ulong,
            addresses.as_ptr(),
            nodes,
            status.as_mut_ptr(),
            2,
        )
    })?;
    let read = |s: libc::c_int| if s >= 0 { Ok(NodeId(s as u32)) } else { Err(-s) };
    Ok(status.into_iter().map(read).collect())
}

/// Asks on which node each page is.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`.
pub fn page_nodes(pid: Pid, pages: &[VirtPage]) -> io::Result<Vec<PageStatus>> {
    call(pid, pages, None)
}

/// Moves pages to a node; a page mapped by several processes stays where it is.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`, `ENODEV` for a node without memory.
pub fn move_pages(pid: Pid, pages: &[VirtPage], to: NodeId) -> io::Result<Vec<PageStatus>> {
    let nodes = vec![to.0 as libc::c_int; pages.len()];
    call(pid, pages, Some(&nodes))
}
