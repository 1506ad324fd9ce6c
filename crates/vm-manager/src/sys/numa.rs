//! `move_pages`: where pages are, and moving them between NUMA nodes.

use std::io;

use super::check;
use crate::types::{NodeId, Pid, VirtPage};

/// What the kernel said of one page: its node, or an errno (positive).
pub type PageStatus = Result<NodeId, i32>;

/// Put into every status before the call: the kernel leaves it there for all pages of a batch in which one
/// did not move, although the others did.
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

/// Asks on which node each page is.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`.
pub fn page_nodes(pid: Pid, pages: &[VirtPage]) -> io::Result<Vec<PageStatus>> {
    call(pid, pages, None)
}

/// Moves pages to a node; a page mapped by several processes stays where it is. Gives where each page is
/// afterwards.
///
/// # Errors
/// The kernel's errno for the process as a whole: `ESRCH`, `EPERM`, `ENODEV` for a node without memory.
pub fn move_pages(pid: Pid, pages: &[VirtPage], to: NodeId) -> io::Result<Vec<PageStatus>> {
    let nodes = vec![to.0 as libc::c_int; pages.len()];
    let mut status = call(pid, pages, Some(&nodes))?;
    // What the kernel did not tell is asked: a page taken for unmoved would be counted in the wrong tier for
    // ever.
    let untold: Vec<usize> = (0..pages.len())
        .filter(|i| status[*i] == Err(libc::EBUSY))
        .collect();
    let ask: Vec<VirtPage> = untold.iter().map(|i| pages[*i]).collect();
    for (i, now) in untold.into_iter().zip(page_nodes(pid, &ask)?) {
        status[i] = now;
    }
    Ok(status)
}
