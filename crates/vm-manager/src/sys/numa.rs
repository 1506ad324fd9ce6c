//! `move_pages`: locates pages and moves them between NUMA nodes.

use std::io;

use super::check;
use crate::types::{NodeId, Pid, VirtPage};

/// The kernel's answer for one page: its node, or an errno (positive).
pub type PageStatus = Result<NodeId, i32>;

/// Initial value of every status. If one page of a batch did not move, the kernel leaves it for all of them,
/// although the others did move.
const UNTOLD: libc::c_int = libc::c_int::MIN;

fn call(pid: Pid, pages: &[VirtPage], nodes: Option<&[libc::c_int]>) -> io::Result<Vec<PageStatus>> {
    if pages.is_empty() {
        return Ok(Vec::new());
    }
    let addresses: Vec<u64> = pages.iter().map(|p| p.address()).collect();
    let mut status: Vec<libc::c_int> = vec![UNTOLD; pages.len()];
    let nodes = nodes.map_or(std::ptr::null(), <[libc::c_int]>::as_ptr);
    // SAFETY: `addresses`, `status` and, unless null, `nodes` have `pages.len()` entries each and live over
    // the call (`move_pages` below asserts it for nodes). The addresses belong to the other process and are
    // not followed here. MPOL_MF_MOVE (2) moves only pages that this process alone maps.
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
    let read = |s: libc::c_int| match s {
        UNTOLD => Err(libc::EBUSY),
        s if s >= 0 => Ok(NodeId(s as u32)),
        s => Err(-s),
    };
    Ok(status.into_iter().map(read).collect())
}

/// Returns the node of each page.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`.
pub fn page_nodes(pid: Pid, pages: &[VirtPage]) -> io::Result<Vec<PageStatus>> {
    call(pid, pages, None)
}

/// Moves pages to a node; a page mapped by several processes stays where it is. Returns the node of each page
/// afterwards.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`, `ENODEV` for a node without memory.
pub fn move_pages(pid: Pid, pages: &[VirtPage], to: NodeId) -> io::Result<Vec<PageStatus>> {
    let nodes = vec![to.0 as libc::c_int; pages.len()];
    let mut status = call(pid, pages, Some(&nodes))?;
    // Query the pages without a status: a page taken for unmoved would be counted in the wrong tier for ever.
    let untold: Vec<usize> = (0..pages.len())
        .filter(|i| status[*i] == Err(libc::EBUSY))
        .collect();
    let ask: Vec<VirtPage> = untold.iter().map(|i| pages[*i]).collect();
    for (i, now) in untold.into_iter().zip(page_nodes(pid, &ask)?) {
        status[i] = now;
    }
    Ok(status)
}
