//! Slabs whose space is wanted back and for which no other tier has room: their pages come back to memory,
//! above the limit, rather than be lost.

use std::collections::HashSet;

use varve_far::Page;
use varve_far::backend::SLAB_BYTES;
use varve_far::table::{Entry, PageNo, Stored};

use super::faults;
use super::pager::Pager;
use super::program::{Program, release};

/// Entries that are looked at under one hold of the lock.
const BATCH: usize = 512;

/// Brings the pages of such slabs back, where there is memory for them. What cannot come now is tried at the
/// next look.
pub(super) fn bring(pager: &Pager) {
    let stuck = pager.space.stuck();
    if stuck.is_empty() {
        return;
    }
    let programs = pager.programs();
    let pids: Vec<_> = programs.iter().filter_map(|program| program.pid()).collect();
    let available = crate::machine::view(&pids).available_bytes;
    if (stuck.len() * SLAB_BYTES) as u64 > available {
        tracing::warn!(
            "a pool asks {} slabs back, and there is no room for their pages in other tiers or in memory: they may be \
             lost",
            stuck.len()
        );
        return;
    }
    for program in programs.iter().filter(|program| !program.is_gone()) {
        program.pages().release_all_kept(&pager.space);
        let mut at = PageNo(0);
        while let Some(next) = batch(pager, program, at, &stuck) {
            at = next;
        }
    }
}

/// Brings back what lies in such slabs of the next entries. Gives where to go on.
fn batch(pager: &Pager, program: &Program, at: PageNo, stuck: &HashSet<u32>) -> Option<PageNo> {
    let (next, there): (_, Vec<(PageNo, Stored)>) = {
        let pages = program.pages();
        let out = pages.table.out_from(at, BATCH);
        let next = PageNo(out.last()?.0.0 + 1);
        let there = out.into_iter().filter_map(|(page, entry)| match entry {
            Entry::Far(stored) if stuck.contains(&stored.place.slab) => Some((page, stored)),
            _ => None,
        });
        let there: Vec<_> = there.collect();
        for (_, stored) in &there {
            pager.space.retain(stored.place);
        }
        (next, there)
    };
    for (page, stored) in there {
        let mut bytes = Page::default();
        let loaded = pager.space.load_at_once(&stored, &mut bytes);
        let is_away = loaded.as_ref().is_err_and(varve_far::SpaceError::is_away);
        let mut pages = program.pages();
        if !is_away && pages.table.get(page) == Entry::Far(stored) {
            // A page that cannot be put back while an event waits is taken at the next look.
            let _ = faults::install(pager, program, &mut pages, (page, stored), &bytes, loaded);
        }
        drop(pages);
        release(&pager.space, Some(stored));
    }
    Some(next)
}
