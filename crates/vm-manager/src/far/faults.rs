//! The thread that serves the faults of one program, and follows what it does to its address space.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use varve_far::table::{Entry, PageNo, Stored};
use varve_far::{Page, SpaceError};

use super::counters::{FaultKind, add};
use super::pager::Pager;
use super::program::{Pages, Program, release};
use super::write_out;
use crate::sys::{Event, Faults};

/// How often a program without faults is looked at whether it has ended.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The outcome of a fault.
pub(super) enum Outcome {
    /// The thread goes on.
    Served(FaultKind),
    /// An event must be read first.
    Later,
    /// The address space has ended.
    Gone,
}

/// Serves a program until it ends.
pub(super) fn serve(pager: &Arc<Pager>, program: &Arc<Program>) {
    let mut waiting = Vec::new();
    loop {
        if waiting.is_empty() {
            wait(&program.faults);
        } else {
            // A call that changes mappings is about to queue its event.
            std::thread::yield_now();
        }
        // Threads wait from here on, whoever has the lock.
        let begun = Instant::now();
        let mut pages = program.pages();
        let before = waiting.len();
        if read_events(pager, program, &mut pages, &mut waiting, begun).is_err() {
            break;
        }
        if waiting.is_empty() && before == 0 && program.has_ended() {
            break;
        }
        waiting.sort_unstable_by_key(|(address, _)| *address);
        waiting.dedup_by_key(|(address, _)| *address);
        let mut is_gone = false;
        let out = |(address, _): &&(u64, Instant)| pages.table.get(PageNo::of(*address)).is_out();
        let stalled = waiting.iter().filter(out).count() as u64;
        pager.stall.begin(
            waiting.iter().map(|(_, since)| *since).min().unwrap_or(begun),
            stalled,
        );
        waiting.retain(|(address, since): &(u64, Instant)| {
            let page = PageNo::of(*address);
            if pager.readers.take_over(pager, program, &mut pages, page, *since) {
                return false;
            }
            match resolve(pager, program, &mut pages, page) {
                Outcome::Served(kind) => {
                    let was_out = kind != FaultKind::Zero;
                    pages.table.note_fault(page, was_out);
                    pager.counters.fault(kind, since.elapsed());
                }
                Outcome::Later => return true,
                Outcome::Gone => is_gone = true,
            }
            false
        });
        pager.stall.end(stalled);
        if is_gone {
            break;
        }
    }
    program.end();
    let mut pages = program.pages();
    pages.forget(0, 1 << 47, false, &pager.space);
    drop(pages);
    pager.forget(program);
}

fn wait(faults: &Faults) {
    let mut fds = [PollFd::new(faults, PollFlags::IN)];
    let time = Timespec {
        tv_sec: LOOK_EVERY.as_secs() as i64,
        tv_nsec: 0,
    };
    let _ = poll(&mut fds, Some(&time));
}

/// Reads all that waits. Events are applied in their order; faults are kept for later, since they see what
/// the events did.
fn read_events(
    pager: &Arc<Pager>,
    program: &Arc<Program>,
    pages: &mut Pages,
    waiting: &mut Vec<(u64, Instant)>,
    begun: Instant,
) -> io::Result<()> {
    let mut events = Vec::new();
    while program.faults.read(&mut events)? > 0 {
        for event in events.drain(..) {
            match event {
                Event::Fault(address) => waiting.push((address & !0xfff, begun)),
                Event::Fork(faults) => fork(pager, program, pages, faults),
                // The agent's own changes of the set-aside area.
                Event::Remove { start, .. } if program.area.contains(start) => {}
                Event::Remove { start, end } => pages.forget(start, end, true, &pager.space),
                Event::Unmap { start, end } => pages.forget(start, end, false, &pager.space),
                Event::Remap { from, to, len } => pages.follow(from, to, len, &pager.space),
            }
        }
    }
    Ok(())
}

/// Makes the child's table. Pages that are aside are written first; those that cannot be read any more, since
/// the parent ended meanwhile, stay aside in the child, until it joins.
fn fork(pager: &Arc<Pager>, parent: &Arc<Program>, pages: &mut Pages, faults: Faults) {
    add(&pager.counters.forks, 1);
    write_out::flush(pager, parent, pages, Some(&faults));
    pager.add_child(parent, faults, pages.fork(&pager.space));
}

/// Brings a page back.
pub(super) fn resolve(pager: &Pager, program: &Program, pages: &mut Pages, page: PageNo) -> Outcome {
    let entry = pages.table.get(page);
    let mut bytes = Page::default();
    let (kind, put) = match entry {
        Entry::Local { .. } => (FaultKind::Zero, program.faults.zero(page.address())),
        Entry::Repeated(word) => {
            bytes.fill(word);
            (FaultKind::Repeated, program.faults.copy(page.address(), &bytes))
        }
        Entry::Aside(slot) => match program.read_slots(&[(slot, 1)], std::slice::from_mut(&mut bytes)) {
            Ok(()) => (FaultKind::Aside, program.faults.copy(page.address(), &bytes)),
            Err(error) => return failed_read(program, &error),
        },
        Entry::Far(stored) => {
            let tier = pager.space.load(&stored, &mut bytes);
            return install(pager, program, pages, (page, stored), &bytes, tier);
        }
        Entry::Poisoned => (FaultKind::Poisoned, program.faults.poison(page.address())),
    };
    put_back(pager, program, pages, page, kind, put)
}

/// Brings a page back whose entry names `stored`, with what was read from there.
pub(super) fn install(
    pager: &Pager,
    program: &Program,
    pages: &mut Pages,
    (page, stored): (PageNo, Stored),
    bytes: &Page,
    tier: Result<usize, SpaceError>,
) -> Outcome {
    let (kind, put) = match tier {
        Ok(tier) => (FaultKind::Tier(tier), program.faults.copy(page.address(), bytes)),
        Err(error) => {
            tracing::error!(
                "far page {:#x} is lost: {error}; touching it is SIGBUS",
                page.address()
            );
            pages.set(page, Entry::Poisoned);
            release(&pager.space, Some(stored));
            (FaultKind::Poisoned, program.faults.poison(page.address()))
        }
    };
    put_back(pager, program, pages, page, kind, put)
}

/// Notes what the kernel said to a page that was put in.
fn put_back(
    pager: &Pager,
    program: &Program,
    pages: &mut Pages,
    page: PageNo,
    kind: FaultKind,
    put: io::Result<()>,
) -> Outcome {
    match put {
        Ok(()) => {
            let entry = pages.table.get(page);
            came_back(pager, pages, page, entry, kind);
            Outcome::Served(kind)
        }
        Err(error) => match error.raw_os_error() {
            Some(libc::EAGAIN) => Outcome::Later,
            Some(libc::ESRCH) => Outcome::Gone,
            // There already, or not mapped any more: the thread finds out itself.
            _ => {
                let _ = program.faults.wake(page.address());
                Outcome::Served(kind)
            }
        },
    }
}

/// The set-aside area cannot be read: the process has ended, or forbids it.
fn failed_read(program: &Program, error: &io::Error) -> Outcome {
    if program.has_ended() || error.raw_os_error() == Some(libc::ESRCH) {
        return Outcome::Gone;
    }
    // A child that is about to join.
    if program.pid().is_some() {
        tracing::error!("cannot read the memory of {:?}: {error}", program.pid());
    }
    std::thread::sleep(Duration::from_millis(1));
    Outcome::Later
}

/// Notes that a page is local again.
fn came_back(pager: &Pager, pages: &mut Pages, page: PageNo, entry: Entry, kind: FaultKind) {
    const MOST: u8 = 3;
    let local = match entry {
        Entry::Aside(slot) => {
            let kept = pages.ring.take(slot).and_then(|slot| slot.kept);
            // It was in use while it was aside: the hand passes over it twice.
            Entry::Local { lives: 2, kept }
        }
        Entry::Far(stored) => {
            // Pages in DRAM are not kept twice.
            let keeps = matches!(kind, FaultKind::Tier(tier) if !pager.space.is_dram(tier));
            release(&pager.space, (!keeps).then_some(stored));
            Entry::Local {
                lives: 1,
                kept: keeps.then_some(stored),
            }
        }
        Entry::Local { lives, kept } => Entry::Local {
            lives: (lives + 1).min(MOST),
            kept,
        },
        Entry::Repeated(_) => Entry::Local { lives: 1, kept: None },
        Entry::Poisoned => return,
    };
    if !matches!(entry, Entry::Local { .. }) {
        pages.set(page, local);
    }
}
