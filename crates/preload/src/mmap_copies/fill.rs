//! How copies come into the file: at once for small maps, and by threads that wait for loads. The order of
//! the steps is the module's above.

use super::book::Piece;
use super::{Finder, Host, Maps, State, leave};
use crate::Errno;
use crate::ofd::Ofd;
use crate::sys::kernel;
use crate::sys::pages::{Faults, PAGE};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use varve_libfs::ReadUnder;

/// Maps up to this long are filled when they are made. Of longer ones many a program looks at a part first
/// (LevelDB at the end of each table).
const AT_ONCE_MAX: usize = WINDOW;
/// What is read around a load, and most of what is read ahead of loads that follow each other.
const WINDOW: usize = 128 << 10;
const WINDOW_MAX: usize = 1 << 20;
/// Threads that serve loads: one may wait for a lease.
const THREADS: usize = 2;
/// How often a load is overtaken by changes before new ones wait.
const MISSES_MAX: u32 = 3;
/// When a page that could not be read is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// A load where no map is any more looks again after this.
const STRANGE: Duration = Duration::from_micros(50);

/// What is to be read.
struct Plan {
    ofd: Arc<Ofd>,
    at: Range<usize>,
    stored_at: u64,
    offset: u64,
    generation: u64,
    /// Nobody waits for it: its first page is not shown but becomes the mark.
    ahead: bool,
}

/// What a load needs.
enum Load {
    /// Nothing: it is shown, gets SIGBUS, or is not ours.
    Nothing,
    Read(Plan),
    /// It is shown; loads have come so far that what follows here is to be read.
    Marked(usize),
    /// Another thread reads it, and will have who waits look again.
    UnderWay,
}

/// What is being read, until this is dropped: whatever became of it, who waits for it looks again.
struct UnderWay<'m> {
    maps: &'m Maps,
    at: Range<usize>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.maps.state.lock();
        if let Some(place) = state.under_way.iter().position(|at| *at == self.at) {
            state.under_way.swap_remove(place);
        }
        let faults = state.arena.as_ref().map(|arena| Arc::clone(&arena.faults));
        drop(state);
        if let Some(faults) = faults {
            faults.wake(self.at.clone());
        }
    }
}

/// What became of a plan.
enum Outcome {
    Done,
    /// What was read does not count.
    Again,
    /// There is no room for copies.
    NoRoom,
    /// The daemon does not look at the place where they are.
    NoPlace,
}

/// What a load has got.
enum Filled {
    Done {
        /// Loads follow each other: what is here is to be read before they come.
        follows: Option<usize>,
    },
    UnderWay,
}

/// Starts the threads that serve loads. False if there is none.
pub(super) fn start(faults: &Arc<Faults>, find: Finder) -> bool {
    (0..THREADS)
        .filter(|_| {
            let faults = Arc::clone(faults);
            // By the beginning of its name it is known as one of the library's: no signal of the program runs
            // there.
            let thread = std::thread::Builder::new().name("varve-maps".into());
            thread.spawn(move || serve_loads(&faults, find)).is_ok()
        })
        .count()
        > 0
}

fn serve_loads(faults: &Faults, find: Finder) {
    let mut buffer = Vec::new();
    loop {
        let failed = find().is_some_and(|(_, maps)| maps.any_failed());
        match faults.next(failed.then_some(AGAIN)) {
            Some(at) => {
                let Some((host, maps)) = find() else {
                    continue;
                };
                let serve = || maps.serve_load(host, at, &mut buffer);
                // Whatever happens: who waits looks again, unless another thread sees to that.
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve)).unwrap_or(true) {
                    faults.wake(at..at + PAGE);
                }
            }
            None if failed => {
                if let Some((_, maps)) = find() {
                    maps.try_failed_again();
                }
            }
            None => {}
        }
    }
}

impl Maps {
    fn any_failed(&self) -> bool {
        !self.state.lock().failed.is_empty()
    }

    fn try_failed_again(&self) {
        let mut state = self.state.lock();
        for range in std::mem::take(&mut state.failed) {
            for piece in state.book.within(&range).iter().filter(|piece| piece.bars) {
                state.unbar(piece);
            }
        }
        leave(state);
    }

    /// Answers whether who waits is still to be woken.
    fn serve_load(&self, host: &dyn Host, at: usize, buffer: &mut Vec<u8>) -> bool {
        let strange = self.state.lock().book.at(at).is_none();
        if strange {
            kernel::nap(STRANGE);
            return true;
        }
        match self.fill(host, at, None, buffer) {
            Filled::UnderWay => false,
            Filled::Done { follows } => {
                // It is shown, which has woken who waits.
                if let Some(next) = follows {
                    self.read_ahead(next, buffer);
                }
                true
            }
        }
    }

    /// What a plan says is being read from now on.
    fn begin(&self, state: &mut State, plan: &Plan) -> UnderWay<'_> {
        state.under_way.push(plan.at.clone());
        UnderWay {
            maps: self,
            at: plan.at.clone(),
        }
    }

    /// Reads what is at `at` before anybody loads it. What fails here is tried again when somebody does.
    fn read_ahead(&self, at: usize, buffer: &mut Vec<u8>) {
        let mut state = self.state.lock();
        let Some(plan) = state.plan_ahead(at) else { return };
        let _under_way = self.begin(&mut state, &plan);
        drop(state);
        let Ok((count, under)) = read(&plan, buffer) else {
            return;
        };
        let mut state = self.state.lock();
        if state.counts(&plan) {
            // Where there is no room or no place, the next load finds that out.
            let _ = state.store(&plan, &mut buffer[..plan.at.len()], count, &under);
        }
        leave(state);
    }

    /// Fills a new map, if it is small.
    pub(super) fn fill_at_once(&self, host: &dyn Host, start: usize, len: usize) {
        if len <= AT_ONCE_MAX {
            let _ = self.fill(host, start, Some(len), &mut Vec::new());
        }
    }

    /// Reads what is at `at`, and `len` bytes from there on or as many as seem good, unless it is shown
    /// already.
    fn fill(&self, host: &dyn Host, at: usize, len: Option<usize>, buffer: &mut Vec<u8>) -> Filled {
        let (mut misses, mut turn, mut gave) = (0, None, false);
        let mut filled = Filled::Done { follows: None };
        loop {
            let mut state = self.state.lock();
            let plan = match state.plan(at, len) {
                Load::Read(plan) => plan,
                Load::Nothing => break,
                Load::Marked(next) => {
                    filled = Filled::Done { follows: Some(next) };
                    break;
                }
                Load::UnderWay => {
                    filled = Filled::UnderWay;
                    break;
                }
            };
            let most = state.oldest_of(plan.at.len());
            if !most.is_empty() && !gave {
                // What cannot be given loses pages (`make_room`).
                gave = true;
                drop(state);
                for piece in &most {
                    let _ = self.give_piece(host, piece);
                }
                continue;
            }
            let key = plan.ofd.key();
            if misses >= MISSES_MAX
                && turn.is_none()
                && let Some(mapped) = state.mapped.get_mut(&key)
            {
                mapped.turns += 1;
                turn = Some(key);
            }
            misses += 1;
            if state.mapped.get(&key).is_some_and(|mapped| mapped.changing > 0) {
                self.settled.wait(&mut state);
                continue;
            }
            let _under_way = self.begin(&mut state, &plan);
            drop(state);
            let read = read(&plan, buffer);
            let mut state = self.state.lock();
            if !state.counts(&plan) {
                continue;
            }
            let follows = state.follows(&plan);
            let outcome = match read {
                Ok((count, under)) => state.store(&plan, &mut buffer[..plan.at.len()], count, &under),
                // Nobody waits for it yet: the first load tries again.
                Err(_) if len.is_some() => Outcome::Done,
                Err(_) => {
                    let page = at..at + PAGE;
                    state.bar(&page);
                    state.failed.push(page);
                    Outcome::Done
                }
            };
            leave(state);
            match outcome {
                Outcome::Again => {}
                Outcome::Done => {
                    filled = Filled::Done { follows };
                    break;
                }
                Outcome::NoRoom | Outcome::NoPlace => {
                    if matches!(outcome, Outcome::NoPlace) {
                        self.give_all(host);
                    }
                    // What could not be given is there still.
                    if self.give(host, &plan.at).is_err() {
                        self.state.lock().bar(&plan.at);
                    }
                    break;
                }
            }
        }
        if let Some(key) = turn {
            let mut state = self.state.lock();
            if let Some(mapped) = state.mapped.get_mut(&key) {
                mapped.turns -= 1;
            }
            state.prune(key);
            drop(state);
            self.settled.notify_all();
        }
        filled
    }
}

/// Reads what a plan says; how much the file has of it, and under which session.
fn read(plan: &Plan, buffer: &mut Vec<u8>) -> Result<(usize, ReadUnder), Errno> {
    if buffer.len() < plan.at.len() {
        buffer.resize(plan.at.len(), 0);
    }
    let file = plan.ofd.file_or(|| None).map_err(|_| Errno(libc::EIO))?;
    file.read_copy(plan.offset, &mut buffer[..plan.at.len()])
}

impl super::Mapped {
    /// A plan to read `range` of a map, after which the next load is expected behind it.
    fn plan(&mut self, piece: Piece, range: Range<usize>, ahead: bool) -> Plan {
        let skipped = (range.start - piece.at.start) as u64;
        self.next = piece.offset + (range.end - piece.at.start) as u64;
        Plan {
            stored_at: piece.stored_at + skipped,
            offset: piece.offset + skipped,
            generation: self.generation,
            ofd: piece.ofd,
            at: range,
            ahead,
        }
    }
}

impl State {
    /// What is to be read for a load at `at`.
    fn plan(&mut self, at: usize, len: Option<usize>) -> Load {
        let Some(piece) = self.book.at(at).filter(|piece| !piece.bars).cloned() else {
            return Load::Nothing;
        };
        let (Some(arena), Some(mapped)) = (&self.arena, self.mapped.get_mut(&piece.key())) else {
            return Load::Nothing;
        };
        let offset_at = piece.offset + (at - piece.at.start) as u64;
        // One that is stored counts (invariant 2).
        if arena.faults.show(at..at + PAGE) != Err(Errno(libc::EFAULT)) {
            if mapped.mark != Some(offset_at) {
                return Load::Nothing;
            }
            mapped.mark = None;
            let next = piece.address_of(mapped.next);
            return next.map_or(Load::Nothing, Load::Marked);
        }
        if self.under_way.iter().any(|range| range.contains(&at)) {
            return Load::UnderWay;
        }
        let range = match len {
            Some(len) => at..piece.at.end.min(at + len),
            None if mapped.next == offset_at && mapped.window > 0 => {
                mapped.window = (mapped.window * 2).min(WINDOW_MAX);
                at..piece.at.end.min(at + mapped.window)
            }
            None => {
                mapped.window = WINDOW;
                let before = offset_at as usize % WINDOW;
                let start = piece.at.start.max(at.saturating_sub(before));
                start..piece.at.end.min(at - before.min(at) + WINDOW)
            }
        };
        Load::Read(mapped.plan(piece, range, false))
    }

    /// Where the next load is expected after that of a plan, if loads follow each other.
    fn follows(&self, plan: &Plan) -> Option<usize> {
        let piece = self.book.at(plan.at.start)?;
        let mapped = self.mapped.get(&piece.key())?;
        // The first of them was read with what lies around it.
        (mapped.window > WINDOW)
            .then(|| piece.address_of(mapped.next))
            .flatten()
    }

    /// What is to be read at `at` before anybody loads it, if there is room for that, nothing is stored
    /// there, and no change is under way.
    fn plan_ahead(&mut self, at: usize) -> Option<Plan> {
        let piece = self.book.at(at).filter(|piece| !piece.bars)?.clone();
        let mapped = self.mapped.get(&piece.key())?;
        let range = at..piece.at.end.min(at + (mapped.window * 2).min(WINDOW_MAX));
        let wanted = self
            .under_way
            .iter()
            .any(|other| other.start < range.end && range.start < other.end);
        if wanted || mapped.changing > 0 || !self.oldest_of(range.len()).is_empty() {
            return None;
        }
        let mapped = self.mapped.get_mut(&piece.key())?;
        mapped.window = range.len().max(WINDOW);
        mapped.mark = Some(piece.offset + (at - piece.at.start) as u64);
        Some(mapped.plan(piece, range, true))
    }

    /// Maps that are to be given to the mount for `len` bytes more: whoever loads at random from more than
    /// there is room for would have pages read again and again. Those whose pages came first are the mount's
    /// soonest: their logs are likeliest to be digested.
    fn oldest_of(&self, len: usize) -> Vec<Piece> {
        let mut most: Vec<Piece> = Vec::new();
        let Some(arena) = &self.arena else { return most };
        let mut bytes = self.stored_bytes + len as u64;
        for part in &self.stored {
            if bytes <= arena.bytes_max {
                break;
            }
            bytes -= part.end - part.start;
            if most.iter().any(|piece| piece.stored().contains(&part.start)) {
                continue;
            }
            most.extend(
                self.book
                    .all()
                    .find(|piece| piece.stored().contains(&part.start))
                    .cloned(),
            );
        }
        most
    }

    /// Whether what was read for a plan may be stored.
    fn counts(&self, plan: &Plan) -> bool {
        let fresh = self
            .mapped
            .get(&plan.ofd.key())
            .is_some_and(|mapped| mapped.generation == plan.generation && mapped.changing == 0);
        let pieces = self.book.within(&plan.at);
        let same =
            |first: &super::Piece| first.at == plan.at && first.stored_at == plan.stored_at && !first.bars;
        fresh && matches!(pieces.as_slice(), [first] if same(first))
    }

    /// Stores and shows the `count` bytes that were read; behind them the file has no more.
    fn store(&mut self, plan: &Plan, pages: &mut [u8], count: usize, under: &ReadUnder) -> Outcome {
        let whole = count.next_multiple_of(PAGE).min(pages.len());
        if whole > 0 {
            pages[count..whole].fill(0);
            let outcome = self.store_pages(plan, &pages[..whole], under);
            if !matches!(outcome, Outcome::Done) {
                return outcome;
            }
        }
        if whole < plan.at.len() {
            // What follows in this map lies behind the end, too.
            let end = self
                .book
                .at(plan.at.start)
                .map_or(plan.at.end, |piece| piece.at.end);
            self.bar(&(plan.at.start + whole..end));
        }
        Outcome::Done
    }

    fn store_pages(&mut self, plan: &Plan, pages: &[u8], under: &ReadUnder) -> Outcome {
        let Some(bytes_max) = self.arena.as_ref().map(|arena| arena.bytes_max) else {
            return Outcome::NoRoom;
        };
        let stored = plan.stored_at..plan.stored_at + pages.len() as u64;
        self.make_room(pages.len() as u64, bytes_max);
        let put = |state: &Self| match &state.arena {
            Some(arena) => arena.file.store(plan.stored_at, pages, &arena.faults),
            None => Err(Errno(libc::ENOSPC)),
        };
        let mut done = put(self);
        if done == Err(Errno(libc::ENOSPC)) && self.stored_bytes > 0 {
            self.make_room(bytes_max, bytes_max);
            done = put(self);
        }
        if done.is_err() {
            self.take_out(&stored);
            return Outcome::NoRoom;
        }
        let Some(arena) = &self.arena else {
            return Outcome::NoRoom;
        };
        let found = under.copies_at() == Some(&arena.at);
        // In this order: it loses its name after the sessions of those who looked for it have ended.
        let lives = under.holds();
        let named = arena.file.is_named();
        if !(found && lives && named) {
            self.take_out(&stored);
            return if lives { Outcome::NoPlace } else { Outcome::Again };
        }
        let hidden = if plan.ahead { PAGE } else { 0 };
        let shown = arena
            .faults
            .show(plan.at.start + hidden..plan.at.start + pages.len());
        if shown == Err(Errno(libc::EFAULT)) {
            // The daemon has emptied the file meanwhile.
            self.take_out(&stored);
            return Outcome::Again;
        }
        self.stored_bytes += pages.len() as u64;
        self.stored.push_back(stored);
        Outcome::Done
    }
}
