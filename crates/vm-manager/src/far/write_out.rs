//! Writing pages of the set-aside area to slabs.

use std::io;

use varve_far::table::{Entry, Stored};
use varve_far::{Page, SpaceError, wire};

use super::agent::Run;
use super::counters::add;
use super::pager::Pager;
use super::program::{Pages, Program, release};
use crate::sys::Faults;

/// Pages that are written at once.
pub(super) const BATCH: u64 = 64;

/// Slots that are emptied at once.
const EMPTY_MAX: u64 = 4096;

/// Where a page goes.
enum Target {
    Repeated(u64),
    /// The object that it came from still holds it.
    Unwritten(Stored),
    Stored(Stored),
    Failed(SpaceError),
}

/// Writes the oldest pages of the set-aside area, at most `most`, and empties their slots. Gives the number
/// of pages that left.
///
/// # Errors
/// When the program has ended.
pub(super) fn oldest(pager: &Pager, program: &Program, most: u64) -> io::Result<u64> {
    let (first, count, filled) = {
        let pages = program.pages();
        let (first, count) = pages.ring.oldest(most.min(BATCH));
        let filled = filled(&pages, first, count);
        (first, count, filled)
    };
    if count == 0 {
        return Ok(0);
    }
    let bytes = read(program, &filled)?;
    let targets = choose(pager, &filled, &bytes);
    let mut left = 0;
    {
        let mut pages = program.pages();
        for (((slot, _), bytes), target) in filled.iter().zip(&bytes).zip(targets) {
            left += u64::from(settle(
                pager,
                &mut pages,
                *slot,
                bytes,
                target,
                &[&program.faults],
            ));
        }
        add(&pager.counters.evicted, left);
        // A page that could not be put back because an event waits is still in its slot.
        let stays = (first..first + count).any(|slot| pages.ring.get(slot).is_some());
        if stays {
            return Ok(left);
        }
    }
    empty(program, first, count)?;
    Ok(left)
}

/// Frees the oldest slots of the set-aside area, as many as hold nothing any more.
///
/// # Errors
/// When the program has ended.
pub(super) fn empty_front(program: &Program) -> io::Result<()> {
    loop {
        let (first, count) = {
            let pages = program.pages();
            let (first, count) = pages.ring.oldest(EMPTY_MAX);
            let empty = (first..first + count).take_while(|slot| pages.ring.get(*slot).is_none());
            (first, empty.count() as u64)
        };
        if count == 0 {
            return Ok(());
        }
        empty(program, first, count)?;
    }
}

/// Drops the memory of slots that no entry names, and frees them.
fn empty(program: &Program, first: u64, count: u64) -> io::Result<()> {
    let run = Run {
        first: program.slot_address(first),
        second: 0,
        len: count * varve_far::PAGE_BYTES as u64,
    };
    if let Some(agent) = &*program.agent() {
        agent.command(wire::DROP, &[run])?;
    }
    let left = program.pages().ring.retire(count);
    debug_assert!(left.is_empty(), "no entry names the slots");
    Ok(())
}

/// Writes all that is aside, under the lock: the program forks. Where far space is full, the pages go back,
/// into the child too.
pub(super) fn flush(pager: &Pager, program: &Program, pages: &mut Pages, child: Option<&Faults>) {
    let mut places: Vec<&Faults> = vec![&program.faults];
    places.extend(child);
    let (mut first, mut rest) = (pages.ring.oldest(u64::MAX).0, pages.ring.len());
    while rest > 0 {
        let count = rest.min(BATCH);
        let filled = filled(pages, first, count);
        if let Ok(bytes) = read(program, &filled) {
            let targets = choose(pager, &filled, &bytes);
            for (((slot, _), bytes), target) in filled.iter().zip(&bytes).zip(targets) {
                settle(pager, pages, *slot, bytes, target, &places);
            }
        }
        first += count;
        rest -= count;
    }
}

/// Slots of a range that are filled, with the object that is kept for them.
fn filled(pages: &Pages, first: u64, count: u64) -> Vec<(u64, Option<Stored>)> {
    (first..first + count)
        .filter_map(|slot| Some((slot, pages.ring.get(slot)?.kept)))
        .collect()
}

/// Reads slots, neighbours in one piece.
fn read(program: &Program, filled: &[(u64, Option<Stored>)]) -> io::Result<Vec<Page>> {
    let mut runs: Vec<(u64, usize)> = Vec::new();
    for (slot, _) in filled {
        match runs.last_mut() {
            Some((first, count))
                if *first + *count as u64 == *slot
                    && program.slot_address(*first) + (*count * varve_far::PAGE_BYTES) as u64
                        == program.slot_address(*slot) =>
            {
                *count += 1;
            }
            _ => runs.push((*slot, 1)),
        }
    }
    let mut pages = Page::zeroed(filled.len());
    if !filled.is_empty() {
        program.read_slots(&runs, &mut pages)?;
    }
    Ok(pages)
}

/// Finds a place for each page and writes those that have none.
fn choose(pager: &Pager, filled: &[(u64, Option<Stored>)], bytes: &[Page]) -> Vec<Target> {
    let mut targets: Vec<Option<Target>> = filled
        .iter()
        .zip(bytes)
        .map(|((_, kept), page)| match (page.repeated_word(), kept) {
            (Some(word), _) => Some(Target::Repeated(word)),
            (None, Some(kept)) if kept.hash == page.hash() => Some(Target::Unwritten(*kept)),
            _ => None,
        })
        .collect();
    let fresh: Vec<Page> = targets
        .iter()
        .zip(bytes)
        .filter(|(target, _)| target.is_none())
        .map(|(_, page)| page.clone())
        .collect();
    let mut stored = pager.space.store(&fresh).into_iter();
    for target in targets.iter_mut().filter(|target| target.is_none()) {
        *target = stored.next().map(|stored| match stored {
            Ok(stored) => Target::Stored(stored),
            Err(error) => Target::Failed(error),
        });
    }
    targets.into_iter().flatten().collect()
}

/// Gives one page its new place, if it is still aside. False if it is not, or went back to the program.
fn settle(
    pager: &Pager,
    pages: &mut Pages,
    slot: u64,
    bytes: &Page,
    target: Target,
    places: &[&Faults],
) -> bool {
    let Some(aside) = pages.ring.get(slot) else {
        // It came back or was given up meanwhile.
        if let Target::Stored(stored) = target {
            release(&pager.space, Some(stored));
        }
        return false;
    };
    let (entry, unused) = match target {
        Target::Repeated(word) => (Entry::Repeated(word), aside.kept),
        Target::Unwritten(stored) => {
            add(&pager.counters.unwritten, 1);
            (Entry::Far(stored), None)
        }
        Target::Stored(stored) => (Entry::Far(stored), aside.kept),
        Target::Failed(error) => {
            if !matches!(error, SpaceError::Full) {
                tracing::warn!("{error}; the page stays local");
            }
            let results: Vec<io::Result<()>> = places
                .iter()
                .map(|faults| faults.copy(aside.page.address(), bytes))
                .collect();
            let waits = |result: &io::Result<()>| matches!(result, Err(error) if error.raw_os_error() == Some(libc::EAGAIN));
            if results.iter().any(waits) {
                return false;
            }
            add(&pager.counters.turned_back, 1);
            pager.note_full();
            let back = Entry::Local {
                lives: 3,
                kept: aside.kept,
            };
            pages.set(aside.page, back);
            pages.ring.take(slot);
            return false;
        }
    };
    pages.set(aside.page, entry);
    pages.ring.take(slot);
    release(&pager.space, unused);
    true
}
