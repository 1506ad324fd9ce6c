//! Writes only: `PAGEMAP_SCAN` over ranges that a cooperating process registered with userfaultfd.

use std::collections::{HashMap, HashSet};

use crate::interfaces::{Touch, Tracker, TrackerError, TrackerInfo};
use crate::processes::SharedProcesses;
use crate::types::{PAGE_BYTES, PageKey, ProcId, VirtPage};

/// The tracker. Reads are not seen: a page that was not written is `Unknown`, not idle.
#[derive(Debug)]
pub struct Written {
    processes: SharedProcesses,
    unwritten_is_idle: bool,
}

impl Written {
    /// Makes a tracker over the cooperating ones among `processes`. `unwritten_is_idle` is the user's
    /// assurance that important pages are written: an unwritten page of an arena then counts as idle.
    pub const fn new(processes: SharedProcesses, unwritten_is_idle: bool) -> Self {
        Self {
            processes,
            unwritten_is_idle,
        }
    }
}

/// Sorts pages and joins them to ranges, across gaps of up to 16 pages.
fn ranges(mut pages: Vec<u64>) -> Vec<(u64, u64)> {
    pages.sort_unstable();
    let mut out: Vec<(u64, u64)> = Vec::new();
    for page in pages {
        match out.last_mut() {
            Some((_, end)) if page < *end + 16 => *end = page + 1,
            _ => out.push((page, page + 1)),
        }
    }
    out
}

impl Tracker for Written {
    fn info(&self) -> TrackerInfo {
        TrackerInfo {
            name: "written",
            resolution_bytes: PAGE_BYTES,
            sees_reads: false,
            tells_writes: true,
            note: "asynchronous write protection in cooperating processes: exact for writes, blind to reads"
                .to_owned(),
        }
    }

    fn observe(&mut self, pages: &[PageKey], out: &mut Vec<Touch>) -> Result<(), TrackerError> {
        let mut asked: HashMap<ProcId, Vec<u64>> = HashMap::new();
        for page in pages {
            asked.entry(page.proc).or_default().push(page.page.0);
        }
        let mut written: HashSet<PageKey> = HashSet::new();
        let mut scanned: HashMap<ProcId, Vec<(u64, u64)>> = HashMap::new();
        let processes = self.processes.borrow();
        for (proc, pages) in asked {
            let Some(process) = processes.get(proc) else {
                continue;
            };
            let Some(link) = &process.coop else { continue };
            for (from, to) in ranges(pages).into_iter().flat_map(|r| link.clip(r)) {
                // A range that vanished meanwhile is unknown, like any page outside of the arenas.
                let seen = process
                    .pagemap
                    .take_written(from * PAGE_BYTES, to * PAGE_BYTES, |run| {
                        let pages = run.start / PAGE_BYTES..run.end / PAGE_BYTES;
                        written.extend(pages.map(|p| PageKey::new(proc, VirtPage(p))));
                    });
                if seen.is_ok() {
                    scanned.entry(proc).or_default().push((from, to));
                }
            }
        }
        let inside = |p: &PageKey| {
            scanned
                .get(&p.proc)
                .is_some_and(|ranges| ranges.iter().any(|(from, to)| (*from..*to).contains(&p.page.0)))
        };
        out.extend(pages.iter().map(|p| match () {
            () if written.contains(p) => Touch::Written,
            () if self.unwritten_is_idle && inside(p) => Touch::Idle,
            () => Touch::Unknown,
        }));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_join_near_pages_and_keep_far_ones_apart() {
        assert_eq!(ranges(vec![5, 3, 4, 40, 12]), [(3, 13), (40, 41)]);
        assert!(ranges(Vec::new()).is_empty());
    }
}
