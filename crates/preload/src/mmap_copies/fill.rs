//! Fills the file of copies: at once for small maps, else by threads that serve loads. The parent module
//! states the order of the steps.

use super::book::Piece;
use super::{Finder, Host, Maps, State, leave};
use crate::Errno;
use crate::ofd::Ofd;
use crate::sys::kernel;
use crate::sys::pages::{Faults, PAGE};
use crate::walk::Stop;
use crate::why::Why;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use varve_libfs::ReadUnder;

/// Maps of up to this many bytes are filled when they are made. Of longer ones, many programs first look at a
/// part (LevelDB at the end of each table).
const AT_ONCE_MAX: usize = WINDOW;
/// Bytes read around a load, and upper bound on the bytes read ahead of sequential loads.
const WINDOW: usize = 128 << 10;
const WINDOW_MAX: usize = 1 << 20;
/// Threads that serve loads; several, since one may wait for a lease.
const THREADS: usize = 2;
/// How often changes may overtake a load before new changes wait for it.
const MISSES_MAX: u32 = 3;
/// Delay before a page that could not be read is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Delay before a load at an address that is no longer a served map is repeated.
const STRANGE: Duration = Duration::from_micros(50);

/// A range to read from the file into a map.
struct Plan {
    ofd: Arc<Ofd>,
    at: Range<usize>,
    stored_at: u64,
    offset: u64,
    generation: u64,
    /// No load waits for it: its first page is not shown but becomes the mark.
    ahead: bool,
}

/// The next step for a load.
enum Load {
    /// Nothing: the page is shown, barred (SIGBUS), or not in a served map.
    Nothing,
    Read(Plan),
    /// The page is shown, and it was the mark: the range at this address is to be read ahead.
    Marked(usize),
    /// Another thread reads the range, and wakes the waiting threads when it is done.
    UnderWay,
}

/// A range that is being read, until this is dropped. The drop wakes all waiting threads, whatever the
/// outcome.
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

/// The outcome of a plan.
enum Outcome {
    Done,
    /// The bytes read are out of date.
    Again,
    /// There is no room for copies.
    NoRoom,
    /// The file of copies is not where the daemon looks for it.
    NoPlace,
}

/// The result of serving a load.
enum Filled {
    Done {
        /// The loads are sequential: the range at this address is to be read before they reach it.
        follows: Option<usize>,
    },
    UnderWay,
}

/// Starts the threads that serve loads. False if none could be started.
pub(super) fn start(faults: &Arc<Faults>, find: Finder) -> bool {
    (0..THREADS)
        .filter(|_| {
            let faults = Arc::clone(faults);
            // The prefix of the name marks the thread as one of the library's: no signal of the program runs
            // on it.
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
                // Wakes the waiting threads in any case, even after a panic, unless another thread does.
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

    /// Serves a load at `at`. Returns whether the waiting threads are still to be woken.
    fn serve_load(&self, host: &dyn Host, at: usize, buffer: &mut Vec<u8>) -> bool {
        let strange = self.state.lock().book.at(at).is_none();
        if strange {
            kernel::nap(STRANGE);
            return true;
        }
        match self.fill(host, at, None, buffer) {
            Filled::UnderWay => false,
            Filled::Done { follows } => {
                // The page is shown, which has woken the waiting threads.
                if let Some(next) = follows {
                    self.read_ahead(next, buffer);
                }
                true
            }
        }
    }

    /// Marks the range of a plan as being read.
    fn begin(&self, state: &mut State, plan: &Plan) -> UnderWay<'_> {
        state.under_way.push(plan.at.clone());
        UnderWay {
            maps: self,
            at: plan.at.clone(),
        }
    }

    /// Reads the range at `at` before any load needs it. A failure is ignored: the load tries again.
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
            // If there is no room or no place, the next load finds out.
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

    /// Reads the page at `at` unless it is shown already, and with it `len` bytes from there on, or a window
    /// chosen by [`State::plan`].
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
                // Maps that cannot be given to the mount lose pages instead (`make_room`).
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
                // No load waits for it yet; the first one tries again.
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
                    // A map that could not be given to the mount is still in place.
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

/// Reads the range of a plan. Returns the number of bytes that the file has of it, and the session of the
/// read.
fn read(plan: &Plan, buffer: &mut Vec<u8>) -> Result<(usize, ReadUnder), Errno> {
    if buffer.len() < plan.at.len() {
        buffer.resize(plan.at.len(), 0);
    }
    let file = plan
        .ofd
        .file_or(|| Err(Stop::Kernel(Why::CannotOpen)))
        .map_err(|_| Errno(libc::EIO))?;
    file.read_copy(plan.offset, &mut buffer[..plan.at.len()])
}

impl super::Mapped {
    /// Makes a plan to read `range` of a map; the next load is expected behind it.
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
    /// Chooses what to read for a load at `at`.
    fn plan(&mut self, at: usize, len: Option<usize>) -> Load {
        let Some(piece) = self.book.at(at).filter(|piece| !piece.bars).cloned() else {
            return Load::Nothing;
        };
        let (Some(arena), Some(mapped)) = (&self.arena, self.mapped.get_mut(&piece.key())) else {
            return Load::Nothing;
        };
        let offset_at = piece.offset + (at - piece.at.start) as u64;
        // A stored page may be shown (invariant 2).
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

    /// Returns the address of the next load after that of a plan, if the loads are sequential.
    fn follows(&self, plan: &Plan) -> Option<usize> {
        let piece = self.book.at(plan.at.start)?;
        let mapped = self.mapped.get(&piece.key())?;
        // The first of sequential loads was read with the bytes around it.
        (mapped.window > WINDOW)
            .then(|| piece.address_of(mapped.next))
            .flatten()
    }

    /// Returns the plan to read ahead at `at`. `None` if there is no room, a read of that range is under way,
    /// or this process is changing the file.
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

    /// Returns the maps to give to the mount before `len` more bytes are stored. Random loads from more bytes
    /// than there is room for would otherwise have pages read again and again. The maps whose pages were
    /// stored first go first: the logs behind them are the likeliest to be digested.
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

    /// Whether the bytes read for a plan may be stored.
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

    /// Stores and shows the `count` bytes that were read; the file ends behind them.
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
            // The rest of this map lies behind the end, too.
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
        // The order matters: the file loses its name only after the sessions that looked for it have ended.
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
            // The daemon has emptied the file in the meantime.
            self.take_out(&stored);
            return Outcome::Again;
        }
        self.stored_bytes += pages.len() as u64;
        self.stored.push_back(stored);
        Outcome::Done
    }
}
