//! `varve vm far --drain`: brings every page back.
//!
//! While the goal is that all is local, the evicting threads move nothing (they look at the goal under the
//! lock), so a pass over the tables that finds nothing has found everything.

use std::sync::Arc;
use std::time::Duration;

use varve_far::table::{Entry, PageNo, Stored};
use varve_far::{Page, SpaceError};

use super::faults::{self, Outcome};
use super::pager::Pager;
use super::program::{Program, release};

/// Pages that are brought back under one hold of the lock.
const BATCH: usize = 64;
/// Rest between two passes.
const REST: Duration = Duration::from_millis(20);
/// Passes that bring nothing back before what is left stays.
const VAIN_MAX: u32 = 50;

/// Brings all pages back, unless a new limit is set meanwhile. `number` is that of the drain.
pub(super) fn run(pager: &Arc<Pager>, number: u64) {
    let mut vain = 0;
    loop {
        let programs = pager.programs();
        let (mut came_back, mut stay, mut later) = (0, 0, 0);
        for program in programs.iter().filter(|program| !program.is_gone()) {
            let Some(pass) = pass(pager, program, number) else {
                return;
            };
            came_back += pass.came_back;
            stay += pass.stay;
            later += pass.later;
        }
        vain = if came_back > 0 { 0 } else { vain + 1 };
        let is_done = came_back == 0 && (later == 0 || vain > VAIN_MAX);
        if is_done {
            for program in &programs {
                program.pages().release_kept(usize::MAX, &pager.space);
            }
        }
        if !pager.goal.note(number, 0, stay + later, is_done) || is_done {
            return;
        }
        std::thread::sleep(REST);
    }
}

/// What a pass over one program did.
#[derive(Debug, Default)]
struct Pass {
    came_back: u64,
    /// Pages that nothing of is mapped at their address.
    stay: u64,
    /// Pages that wait for an event to be read, or for the program to join.
    later: u64,
}

/// Goes over the table once. `None` when another goal was set.
fn pass(pager: &Pager, program: &Program, number: u64) -> Option<Pass> {
    let mut done = Pass::default();
    let mut at = PageNo(0);
    loop {
        let (reads, next) = at_once(pager, program, at, &mut done);
        let Some(next) = next else { return Some(done) };
        at = next;
        from_slabs(pager, program, reads, &mut done);
        let came_back = std::mem::take(&mut done.came_back);
        if !pager.goal.note(number, came_back, done.stay, false) {
            return None;
        }
        // Told already, but the pass was not in vain.
        done.came_back = u64::from(came_back > 0);
        if program.is_gone() {
            return Some(Pass::default());
        }
    }
}

/// Brings back what needs no slab, and gives the others, each with one user more, and where to go on.
fn at_once(
    pager: &Pager,
    program: &Program,
    at: PageNo,
    done: &mut Pass,
) -> (Vec<(PageNo, Stored)>, Option<PageNo>) {
    let mut reads = Vec::new();
    let mut pages = program.pages();
    let batch = pages.table.out_from(at, BATCH);
    let next = batch.last().map(|(page, _)| PageNo(page.0 + 1));
    for (page, entry) in batch {
        if let Entry::Far(stored) = entry {
            pager.space.retain(stored.place);
            reads.push((page, stored));
            continue;
        }
        let outcome = faults::resolve(pager, program, &mut pages, page);
        count(done, &outcome, pages.table.get(page) != entry);
    }
    (reads, next)
}

/// Reads pages without the lock, and installs each if its entry still names the place (invariant 5).
fn from_slabs(pager: &Pager, program: &Program, reads: Vec<(PageNo, Stored)>, done: &mut Pass) {
    let read = |(_, stored): &(PageNo, Stored)| {
        let mut bytes = Page::default();
        let tier = pager.space.load(stored, &mut bytes);
        (bytes, tier)
    };
    let loaded: Vec<(Page, Result<usize, SpaceError>)> = reads.iter().map(read).collect();
    let mut pages = program.pages();
    for ((page, stored), (bytes, tier)) in reads.iter().zip(loaded) {
        let entry = Entry::Far(*stored);
        if pages.table.get(*page) == entry {
            let outcome = faults::install(pager, program, &mut pages, (*page, *stored), &bytes, tier);
            count(done, &outcome, pages.table.get(*page) != entry);
        }
    }
    drop(pages);
    for (_, stored) in reads {
        release(&pager.space, Some(stored));
    }
}

fn count(done: &mut Pass, outcome: &Outcome, has_changed: bool) {
    match outcome {
        Outcome::Served(_) if has_changed => done.came_back += 1,
        Outcome::Served(_) => done.stay += 1,
        Outcome::Later => done.later += 1,
        Outcome::Gone => {}
    }
}
