//! The thread that moves pages of one program out: aside first, then to slabs.

use std::io;
use std::sync::Arc;

use varve_far::aside::AsideSlot;
use varve_far::table::{Entry, PageNo};
use varve_far::{PAGE_BYTES, wire};

use super::agent::Run;
use super::counters::add;
use super::hand::{Hand, Mapping, Present};
use super::pager::Pager;
use super::program::{Area, Pages, Program, release};
use super::write_out;

const PAGE: u64 = PAGE_BYTES as u64;
/// Pages that are moved under one hold of the lock.
const BATCH: u64 = 64;
/// Least pages in the set-aside area before any is written.
const ASIDE_MIN: u64 = 256;
/// Chunks whose kept objects are given up when far space is full.
const KEPT_CHUNKS: usize = 64;
/// Chunks that the hand looks at before it gives up for now.
const CHUNKS_MAX: usize = 4096;

/// Moves pages of a program out, as the pager wants, until it ends.
pub(super) fn run(pager: &Arc<Pager>, program: &Arc<Program>) {
    let Some(pid) = program.pid() else { return };
    let Ok(hand) = Hand::new(pid) else { return };
    let mut evictor = Evictor {
        pager,
        program,
        hand,
        present: Vec::new(),
        active_above: f64::INFINITY,
    };
    loop {
        let wanted = program.take_wanted(BATCH);
        if program.is_gone() {
            return;
        }
        if pager.goal.is_draining() {
            if write_out::empty_front(program).is_err() {
                return;
            }
            continue;
        }
        if wanted == 0 {
            continue;
        }
        match evictor.step(wanted) {
            Ok(true) => {}
            // Nothing can leave now.
            Ok(false) => {
                program.want(0);
                if pager.was_full() {
                    program.pages().release_kept(KEPT_CHUNKS, &pager.space);
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            Err(error) => {
                if !program.is_gone() {
                    tracing::debug!("no more evictions from {pid}: {error}");
                }
                return;
            }
        }
    }
}

/// The state that the thread works with.
struct Evictor<'a> {
    pager: &'a Pager,
    program: &'a Program,
    hand: Hand,
    /// Pages that the hand found and that were not looked at yet; the next one last.
    present: Vec<Present>,
    /// Chunks with more faults are active.
    active_above: f64,
}

impl Evictor<'_> {
    /// Fills the set-aside area and writes `wanted` of its oldest pages. False when none moved and none was
    /// written.
    fn step(&mut self, wanted: u64) -> io::Result<bool> {
        let aside = self.pager.aside_pages(self.program);
        let goal = aside.clamp(ASIDE_MIN, Area::SLOTS / 2) + wanted;
        let mut moved = 0;
        while self.program.pages().ring.len() < goal {
            let count = self.move_aside()?;
            if count == 0 {
                break;
            }
            moved += count;
        }
        let left = write_out::oldest(self.pager, self.program, wanted)?;
        Ok(moved + left > 0)
    }

    /// Moves one batch aside. 0 when the hand went over much and found nothing.
    fn move_aside(&mut self) -> io::Result<u64> {
        let mut turns = 0;
        for _ in 0..CHUNKS_MAX {
            if self.present.is_empty() {
                turns += u32::from(self.look()?);
            }
            let (mut moved, shared) = move_batch(self.pager, self.program, &mut self.present, false)?;
            if own(self.program, &shared)? {
                let mut again = shared;
                moved += move_batch(self.pager, self.program, &mut again, true)?.0;
            }
            if moved > 0 {
                add(&self.pager.counters.moved_aside, moved);
                return Ok(moved);
            }
            // A page has at most three lives.
            if self.program.is_gone() || turns > 4 {
                break;
            }
        }
        Ok(0)
    }

    /// Has the hand find the present pages of the next chunk. Whether it began from the start again.
    fn look(&mut self) -> io::Result<bool> {
        let threshold = self.active_above;
        let program = self.program;
        let skip = |chunk| program.pages().table.pass_over(chunk, threshold);
        let (found, wrapped) = self.hand.next(program.area, skip)?;
        if wrapped {
            let mut pages = program.pages();
            let z = self.pager.config.z_active;
            let activity: Vec<_> = pages.table.activity().collect();
            self.active_above = varve_far::regions::active_above(activity.into_iter(), z);
            pages.table.age();
        }
        self.present.extend(found);
        self.present.reverse();
        Ok(wrapped)
    }
}

/// Pages in one run of addresses that are to move.
struct Candidate {
    start: u64,
    pages: u64,
    around: Mapping,
}

/// Takes pages from the end of `present`, at most a batch: those that the hand does not pass over.
fn candidates(pages: &mut Pages, present: &mut Vec<Present>) -> Vec<Candidate> {
    let mut found: Vec<Candidate> = Vec::new();
    let (mut taken, mut seen) = (0, 0);
    while let Some(run) = present.last_mut() {
        if taken >= BATCH || seen >= 8 * BATCH || found.len() >= wire::RUNS_MAX {
            break;
        }
        let (address, around) = (run.start, run.around);
        run.start += PAGE;
        if run.start >= run.end {
            present.pop();
        }
        seen += 1;
        if !may_move(pages, PageNo::of(address)) {
            continue;
        }
        taken += 1;
        match found.last_mut() {
            Some(last) if last.start + last.pages * PAGE == address && last.around == around => {
                last.pages += 1
            }
            _ => found.push(Candidate {
                start: address,
                pages: 1,
                around,
            }),
        }
    }
    found
}

/// Whether the hand takes a page. Costs it one of its lives otherwise.
fn may_move(pages: &mut Pages, page: PageNo) -> bool {
    if pages.is_quarantined(page) {
        return false;
    }
    match pages.table.get(page) {
        Entry::Local { lives: 0, .. } => true,
        Entry::Local { lives, kept } => {
            pages.set(
                page,
                Entry::Local {
                    lives: lives - 1,
                    kept,
                },
            );
            false
        }
        Entry::Aside(_) | Entry::Poisoned => false,
        // Present all the same: what is known is of an earlier mapping. If the move succeeds, it is replaced.
        Entry::Far(_) | Entry::Repeated(_) => true,
    }
}

/// Moves a batch under the lock. Gives the number of pages, and those that a fork shares. Where they were
/// made the process' own already (`is_again`), the hand passes over those that the kernel still does not
/// move.
fn move_batch(
    pager: &Pager,
    program: &Program,
    present: &mut Vec<Present>,
    is_again: bool,
) -> io::Result<(u64, Vec<Present>)> {
    let mut guard = program.pages();
    if pager.goal.is_draining() {
        return Ok((0, Vec::new()));
    }
    let pages = &mut *guard;
    let mut runs = Vec::new();
    let mut room = pages.ring.room(BATCH);
    let mut around = None;
    let mut arounds = Vec::new();
    for candidate in candidates(pages, present) {
        let count = candidate.pages.min(room.1);
        if count == 0 {
            break;
        }
        // Invariant 1: registered before moved. The 2 MiB as far as the mapping goes, so that few mappings
        // are split.
        if around != Some(candidate.around) {
            let Mapping { start, end } = candidate.around;
            if program.faults.register(start, end - start).is_err()
                && program.faults.register(candidate.start, count * PAGE).is_err()
            {
                continue;
            }
            around = Some(candidate.around);
        }
        runs.push(Run {
            first: program.slot_address(room.0),
            second: candidate.start,
            len: count * PAGE,
        });
        arounds.push(candidate.around);
        room = (room.0 + count, room.1 - count);
    }
    if runs.is_empty() {
        return Ok((0, Vec::new()));
    }
    let answers = match &*program.agent() {
        Some(agent) => agent.command(wire::MOVE, &runs)?,
        None => return Ok((0, Vec::new())),
    };
    let (moved, refused) = note_moves(pager, pages, &runs, &answers);
    if is_again {
        for run in refused.iter().flatten() {
            add(&pager.counters.refused, run.len / PAGE);
            pass_over(pages, *run, 1);
        }
        return Ok((moved, Vec::new()));
    }
    let shared = refused.into_iter().zip(arounds).filter_map(|(run, around)| {
        let run = run?;
        Some(Present {
            start: run.first,
            end: run.first + run.len,
            around,
        })
    });
    Ok((moved, shared.collect()))
}

/// Notes which pages are aside now. Gives their number, and for each run the part that the kernel did not
/// move since it is shared or pinned.
fn note_moves(pager: &Pager, pages: &mut Pages, runs: &[Run], answers: &[i64]) -> (u64, Vec<Option<Run>>) {
    let (mut moved, mut refused) = (0, Vec::new());
    for (run, answer) in runs.iter().zip(answers) {
        let done = u64::try_from(*answer).unwrap_or(0) / PAGE;
        for index in 0..run.len / PAGE {
            let page = PageNo(PageNo::of(run.second).0 + index);
            if index >= done {
                pages.ring.push(None);
                continue;
            }
            let old = pages.table.get(page);
            let kept = match old {
                Entry::Local { kept, .. } => kept,
                other => {
                    release(&pager.space, other.stored());
                    None
                }
            };
            let slot = pages.ring.push(Some(AsideSlot { page, kept }));
            pages.set(page, Entry::Aside(slot));
        }
        moved += done;
        let mut shared = None;
        if done * PAGE < run.len {
            let rest = Run {
                first: run.second + done * PAGE,
                second: 0,
                len: run.len - done * PAGE,
            };
            match -i32::try_from(*answer).unwrap_or(0) {
                libc::EAGAIN | libc::ENOENT => {}
                libc::EINVAL => pass_over(pages, rest, 3),
                // A run that stopped half-way: the reason is told the next time.
                _ if *answer >= 0 => {}
                _ => shared = Some(rest),
            }
        }
        refused.push(shared);
    }
    (moved, refused)
}

/// Has the hand pass over a run for some turns.
fn pass_over(pages: &mut Pages, run: Run, lives: u8) {
    for address in (run.first..run.first + run.len).step_by(PAGE_BYTES) {
        let page = PageNo::of(address);
        if let Entry::Local { kept, .. } = pages.table.get(page) {
            pages.set(page, Entry::Local { lives, kept });
        }
    }
}

/// Makes pages the program's own that a fork shared, without the lock: it may wait for a fault. Whether there
/// were any.
fn own(program: &Program, shared: &[Present]) -> io::Result<bool> {
    if shared.is_empty() {
        return Ok(false);
    }
    let runs: Vec<Run> = shared
        .iter()
        .map(|run| Run {
            first: run.start,
            second: 0,
            len: run.end - run.start,
        })
        .collect();
    if let Some(agent) = &*program.agent() {
        agent.command(wire::OWN, &runs)?;
    }
    Ok(true)
}
