//! Maps that only read, of copies that this process keeps: where the copies are, how long they count, and
//! what becomes of a map that is to be more than that. Decisions and alternatives:
//! `docs/adr/0022-serve-read-only-mappings-from-private-copies.md`.
//!
//! The pages of all such maps lie in one file of memory (`sys::pages`), which the daemon can empty too. A
//! load of a page that is not shown waits (`userfaultfd`) until a thread of ours has read it through LibFS,
//! stored it, and shown it.
//!
//! # Invariants
//! 1. A page is *shown* by one system call that fails if it is not in the file; whoever takes a page out of
//!    the file takes it out of all maps. It is shown to nobody by being stored.
//! 2. With `state` unlocked, a page that is in the file holds what the file holds now, unless the session
//!    under which it was read has ended; then the daemon has emptied the file, or does before it gives
//!    anybody one of the session's leases. For:
//!    - it is read under a read lease that LibFS remembers: before the lease goes,
//!      [`drop_copies_of`](Maps::drop_copies_of) counts the file's `generation` on and takes its
//!      pages out, both under the lock;
//!    - it is stored under the lock, if the generation is the one of before the read;
//!    - *store, then look at the session, then show*: if the session lived when it was looked at, the daemon
//!      empties the file after the page was stored. If it did not, the page is taken out again. However long
//!      the thread stands between two of these steps (SIGSTOP), what it has read too early is not shown;
//!    - changes by this process hold the file's `changing` up while they last, and take its pages out before
//!      they begin: nothing is stored meanwhile, so no load can show what was there before once somebody has
//!      read what is there now.
//! 3. The daemon finds the file by its name: a page is shown only if the file has its name still, in the
//!    directory that the daemon of *this* session speaks of. Else its map is given to the mount.
//! 4. An offset of the file is never used twice: what is late for a map that is gone finds nothing.
//! 5. The threads that serve loads touch no memory of the program, hold no lock while LibFS works, and no
//!    code of the library touches such a map while it holds a lock of LibFS: buffers that lie in one are
//!    copied first (`sys::args`).
//! 6. Memory is given another map only if what is there is the file's still (`/proc/self/maps`): a raw system
//!    call may have put something else there.
//!
//! Locks: a description's `side` and all of LibFS before `state`. Under `state` only the kernel is asked,
//! never about a file of the mount.

mod book;
mod fill;

use self::book::{Book, Piece};
use crate::Errno;
use crate::config::PoolId;
use crate::ofd::Ofd;
use crate::sys::pages::{self, CopyFile, Faults, PAGE};
use crate::sys::{kernel, ranges};
use crate::walk::{FileId, Here};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLockReadGuard};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use varve_format::InodeKey;
use varve_ipc::{CopiesAt, heavy_barrier, light_barrier};
use varve_libfs::OpenFile;

/// Most bytes of copies of one process, and the share of the memory file system that they may be.
const BYTES_MAX: u64 = 1 << 30;
const SHARE: u64 = 16;
/// With less there would be more reading than looking.
const BYTES_LEAST: u64 = 16 << 20;
/// How often a map that others unmap at the same time is looked for again when it is given away.
const GIVES_MAX: u32 = 16;

/// What the maps need of the process that has them.
pub trait Host {
    /// Where the daemon of this session looks for the file of copies; `None` if there is no session, or no
    /// place.
    fn copies_at(&self) -> Option<CopiesAt>;
    /// The file of a description in this process' session.
    ///
    /// # Errors
    /// [`Stop::Kernel`](crate::walk::Stop::Kernel) when it cannot be opened there.
    fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile>;
    /// Held while a map is made, against a fork.
    fn gate(&self) -> RwLockReadGuard<'_, ()>;
    /// The same file, open in the kernel: `fd` itself, or a descriptor that is kept with the description.
    ///
    /// # Errors
    /// What opening it failed with.
    fn side(&self, fd: i32, ofd: &Ofd) -> Result<i32, Errno>;
    /// How threads that serve loads find the process and its maps.
    fn finder(&self) -> Finder;
}

/// Finds the process and its maps, if there is one.
pub type Finder = fn() -> Option<(&'static dyn Host, &'static Maps)>;

/// A map as the program asks for it.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Where it would like it.
    pub hint: usize,
    /// Bytes.
    pub len: usize,
    /// Offset in the file.
    pub offset: u64,
    /// `MAP_SHARED`.
    pub shared: bool,
}

/// What is known of one mapped file.
#[derive(Debug, Default)]
struct Mapped {
    /// Counted on by whatever makes copies out of date.
    generation: u64,
    /// Changes by this process that are under way.
    changing: u32,
    /// Loads that changes have overtaken too often: new changes wait.
    turns: u32,
    /// Where the next load is expected, and how much is read at once there.
    next: u64,
    window: usize,
    /// A page that was read ahead of loads and is stored, but not shown: a load of it says that they have
    /// come so far.
    mark: Option<u64>,
}

struct Arena {
    file: CopyFile,
    at: CopiesAt,
    faults: Arc<Faults>,
    /// Offsets from here on were never used.
    next: u64,
    bytes_max: u64,
}

#[derive(Default)]
struct State {
    arena: Option<Arena>,
    /// It was tried to make the arena.
    tried: bool,
    book: Book,
    mapped: HashMap<InodeKey, Mapped>,
    /// What was stored, the oldest first.
    stored: VecDeque<Range<u64>>,
    stored_bytes: u64,
    /// Pages whose loads get SIGBUS because LibFS could not read them.
    failed: Vec<Range<usize>>,
    /// What is being read: who loads from there waits for that, and nobody reads it once more.
    under_way: Vec<Range<usize>>,
    /// What is no map any more. To drop it may close files, which may wait for the mount: never under the
    /// lock, nor on a thread of LibFS.
    gone: Vec<Piece>,
}

/// Unlocks, and lets what is gone go.
fn leave(mut state: MutexGuard<'_, State>) {
    let gone = std::mem::take(&mut state.gone);
    drop(state);
    drop(gone);
}

impl State {
    /// Takes pages out of the file.
    fn take_out(&mut self, range: &Range<u64>) {
        if let Some(arena) = &self.arena {
            arena.file.take_out(range.clone());
        }
        let inside = |part: &Range<u64>| part.start >= range.start && part.end <= range.end;
        let bytes = &mut self.stored_bytes;
        self.stored.retain(|part| {
            let gone = inside(part);
            if gone {
                *bytes -= part.end - part.start;
            }
            !gone
        });
    }

    /// Makes room for so many bytes more: the oldest go, and are read again if they are wanted. For maps that
    /// could not be given to the mount.
    fn make_room(&mut self, bytes: u64, bytes_max: u64) {
        while self.stored_bytes + bytes > bytes_max
            && let Some(oldest) = self.stored.pop_front()
        {
            self.stored_bytes -= oldest.end - oldest.start;
            if let Some(arena) = &self.arena {
                arena.file.take_out(oldest);
            }
        }
    }

    /// Copies of `part` of a file are out of date.
    fn drop_part(&mut self, key: InodeKey, part: &Range<u64>) {
        let Some(mapped) = self.mapped.get_mut(&key) else {
            return;
        };
        mapped.generation += 1;
        let stored: Vec<_> = self.book.of(key).map(|piece| piece.stored_of(part)).collect();
        for range in stored.into_iter().filter(|range| !range.is_empty()) {
            self.take_out(&range);
        }
        let barred: Vec<_> = self.book.of(key).filter(|piece| piece.bars).cloned().collect();
        for piece in barred {
            self.unbar(&piece);
        }
    }

    /// Has loads of a piece that got SIGBUS tried again, and of those that got it before.
    fn unbar(&mut self, piece: &Piece) {
        let Some(arena) = &self.arena else { return };
        let reached = arena.file.reach(piece.stored().end);
        let now = |piece: &&Piece| piece.bars && piece.stored().end <= reached;
        let pieces: Vec<_> = self.book.all().filter(now).cloned().collect();
        for piece in pieces {
            self.book.amend(&piece.at, |piece| piece.bars = false);
        }
    }

    /// Loads in a range get SIGBUS from now on.
    fn bar(&mut self, range: &Range<usize>) {
        let pieces = self.book.within(range);
        for piece in pieces.iter().filter(|piece| !piece.bars) {
            let Some(arena) = &self.arena else { return };
            if !arena.file.is_at(&piece.at) {
                self.forget(&piece.at);
                continue;
            }
            let (at, len) = (piece.at.start, piece.len());
            let barred = arena.file.map_nothing(at, len, piece.protection, &arena.faults);
            arena.faults.wake(piece.at.clone());
            match barred {
                Ok(offset) => {
                    self.take_out(&piece.stored());
                    self.book.amend(&piece.at, |piece| {
                        piece.stored_at = offset;
                        piece.bars = true;
                    });
                }
                // It is not known what is there: nothing of ours.
                Err(_) => self.forget(&piece.at),
            }
        }
    }

    /// A range is no map of ours any more.
    fn forget(&mut self, range: &Range<usize>) {
        let gone = self.book.cut(range);
        for piece in &gone {
            self.take_out(&piece.stored());
            ranges::cut(piece.at.start, piece.at.end);
            self.prune(piece.key());
        }
        if let Some(arena) = &self.arena {
            arena.faults.wake(range.clone());
        }
        self.gone.extend(gone);
    }

    fn prune(&mut self, key: InodeKey) {
        let used = |mapped: &Mapped| mapped.changing > 0 || mapped.turns > 0;
        if self.book.of(key).next().is_none() && self.mapped.get(&key).is_some_and(|mapped| !used(mapped)) {
            self.mapped.remove(&key);
        }
    }
}

/// All maps of copies of a process. They are of files of one pool, the first of which a file is mapped: the
/// file of copies is that pool's daemon's to empty. Maps of other pools' files are the mounts'.
#[derive(Default)]
pub struct Maps {
    pool: OnceLock<PoolId>,
    state: Mutex<State>,
    /// A change ended, or a load has had its turn.
    settled: Condvar,
}

impl Maps {
    /// The pool whose files have such maps, once there was one.
    #[must_use]
    pub fn pool(&self) -> Option<PoolId> {
        self.pool.get().copied()
    }

    /// Copies of a file are out of date: what [`Copies`](varve_libfs::Copies) asks for.
    pub fn drop_copies_of(&self, id: FileId) {
        if self.pool() == Some(id.pool) {
            self.state.lock().drop_part(id.key, &(0..u64::MAX));
        }
    }

    /// Whether a range of the program's memory touches such a map.
    #[must_use]
    pub fn touches(at: usize, len: usize) -> bool {
        ranges::touches(at, len)
    }

    /// The file of copies, made if this is the first that needs it; `None` if there is none to be had.
    fn arena<'s>(&self, host: &dyn Host, state: &'s mut State) -> Option<&'s mut Arena> {
        if !state.tried {
            state.tried = true;
            state.arena = Self::make_arena(host);
        }
        let at = host.copies_at()?;
        let nothing = state.book.all().next().is_none();
        let arena = state.arena.as_mut()?;
        if arena.at != at || !arena.file.is_named() {
            // As long as there are maps of this one, others are the mount's.
            if !nothing {
                return None;
            }
            arena.file = CopyFile::make(&at.dir, at.dir_is, &at.name, &arena.faults).ok()?;
            arena.at = at;
            state.stored.clear();
            state.stored_bytes = 0;
        }
        state.arena.as_mut()
    }

    fn make_arena(host: &dyn Host) -> Option<Arena> {
        let at = host.copies_at()?;
        let faults = Arc::new(Faults::open().ok()?);
        let file = CopyFile::make(&at.dir, at.dir_is, &at.name, &faults).ok()?;
        let bytes_max = BYTES_MAX.min(file.room() / SHARE);
        if bytes_max < BYTES_LEAST || !fill::start(&faults, host.finder()) {
            return None;
        }
        Some(Arena {
            file,
            at,
            faults,
            next: 0,
            bytes_max,
        })
    }

    /// Maps a file for reading; `None`: the mount is to do it.
    pub fn serve(&self, host: &dyn Host, ofd: &Arc<Ofd>, asked: Asked) -> Option<usize> {
        if *self.pool.get_or_init(|| ofd.pool) != ofd.pool {
            return None;
        }
        let file = host.file(ofd).ok()?;
        let size = file.getattr().ok()?.size_bytes;
        let len = asked.len.checked_next_multiple_of(PAGE)?;
        let end = asked.offset.checked_add(len as u64)?;
        let whole = size.checked_next_multiple_of(PAGE as u64)?;
        if len == 0 || end > whole || !asked.offset.is_multiple_of(PAGE as u64) {
            return None;
        }
        // A fork gives all maps to the mount first.
        let gate = host.gate();
        let mut state = self.state.lock();
        let arena = self.arena(host, &mut state)?;
        let stored_at = arena.next;
        arena.next = stored_at
            .checked_add(len as u64)?
            .checked_next_multiple_of(pages::HUGE)?;
        let protection = libc::PROT_READ;
        let start = arena
            .file
            .map(asked.hint, len, protection, stored_at, &arena.faults)
            .ok()?;
        let first = !ranges::any();
        if !ranges::add(start, start + len) {
            pages::unmap(start, len);
            return None;
        }
        state.mapped.entry(ofd.key()).or_default();
        state.book.insert(Piece {
            at: start..start + len,
            stored_at,
            ofd: Arc::clone(ofd),
            offset: asked.offset,
            shared: asked.shared,
            protection,
            bars: false,
        });
        drop(state);
        drop(gate);
        if first {
            // Against `change`: who did not see the map has written before anything is read for it, or looks
            // again.
            heavy_barrier();
        }
        self.fill_at_once(host, start, len);
        Some(start)
    }

    /// Makes a change of `part` of a file, as far as it is known.
    pub fn change<T>(&self, key: InodeKey, part: Range<u64>, make: impl FnOnce() -> T) -> T {
        let mut change = Change {
            maps: self,
            key,
            part,
            begun: false,
        };
        if ranges::any() {
            change.begin();
        }
        make()
    }

    /// The kernel is to unmap a range (`call`); `None` if no map of ours is there.
    pub fn unmap(&self, range: &Range<usize>, call: impl FnOnce() -> isize) -> Option<isize> {
        let mut state = self.state.lock();
        if state.book.within(range).is_empty() {
            return None;
        }
        let result = call();
        if result >= 0 {
            state.forget(range);
        }
        leave(state);
        Some(result)
    }

    /// The kernel is to map something else over a range (`call`), which may be a file of the mount.
    pub fn replace(&self, range: &Range<usize>, call: impl FnOnce() -> isize) -> isize {
        let aside = self.state.lock().book.cut(range);
        let result = call();
        let mut state = self.state.lock();
        let replaced = result >= 0;
        for piece in &aside {
            // What they show may have gone out of date, and nobody was told.
            state.take_out(&piece.stored());
            if replaced {
                ranges::cut(piece.at.start, piece.at.end);
            } else {
                state.book.insert(piece.clone());
            }
        }
        for piece in &aside {
            state.prune(piece.key());
        }
        if let Some(arena) = &state.arena {
            arena.faults.wake(range.clone());
        }
        drop(state);
        drop(aside);
        result
    }

    /// The kernel is to protect a range otherwise (`call`), but not let it be written or run.
    pub fn protect(&self, range: &Range<usize>, protection: i32, call: impl FnOnce() -> isize) -> isize {
        let mut state = self.state.lock();
        let result = call();
        if result >= 0 {
            state.book.amend(range, |piece| piece.protection = protection);
        }
        result
    }

    /// Gives what is mapped in a range to the mount: from now on the kernel serves it.
    ///
    /// # Errors
    /// The mount's, or of the kernel; what could not be given stays as it was.
    pub fn give(&self, host: &dyn Host, range: &Range<usize>) -> Result<(), Errno> {
        let mut result = Ok(());
        for _ in 0..GIVES_MAX {
            result = Ok(());
            let pieces = self.state.lock().book.within(range);
            for piece in &pieces {
                result = result.and(self.give_piece(host, piece));
            }
            if result != Err(Errno(libc::EAGAIN)) {
                break;
            }
        }
        result
    }

    /// Gives all maps to the mount.
    pub fn give_all(&self, host: &dyn Host) {
        if ranges::any() {
            let _ = self.give(host, &(0..usize::MAX));
        }
    }

    /// Gives all maps of a file to the mount.
    pub fn give_file(&self, host: &dyn Host, id: FileId) {
        if ranges::any() && self.pool() == Some(id.pool) {
            let pieces: Vec<_> = self.state.lock().book.of(id.key).cloned().collect();
            for piece in &pieces {
                let _ = self.give_piece(host, piece);
            }
        }
    }

    /// The descriptions that maps of a file keep.
    #[must_use]
    pub fn descriptions(&self, id: FileId) -> Vec<Arc<Ofd>> {
        if !ranges::any() || self.pool() != Some(id.pool) {
            return Vec::new();
        }
        let state = self.state.lock();
        state
            .book
            .of(id.key)
            .map(|piece| Arc::clone(&piece.ofd))
            .collect()
    }

    fn give_piece(&self, host: &dyn Host, piece: &Piece) -> Result<(), Errno> {
        // The mount may want a lease for each of these, and we give it back only without the lock.
        let side = host.side(-1, &piece.ofd)?;
        kernel::refresh(side);
        let len = piece.len();
        let from = pages::map_other(side, len, piece.protection, piece.shared, piece.offset)?;
        let mut state = self.state.lock();
        let still = state.book.within(&piece.at);
        let same = |now: &Piece| now.at == piece.at && now.stored_at == piece.stored_at;
        let there = state
            .arena
            .as_ref()
            .is_some_and(|arena| arena.file.is_at(&piece.at));
        let put = match (still.as_slice(), there) {
            // It was unmapped meanwhile, in part or whole.
            ([], _) => Ok(false),
            ([now], _) if !same(now) => Err(Errno(libc::EAGAIN)),
            ([_], true) => pages::put_over(from, len, piece.at.start).map(|()| true),
            // By a call that was not seen.
            ([_], false) => Ok(false),
            _ => Err(Errno(libc::EAGAIN)),
        };
        if put.is_ok() {
            state.forget(&piece.at);
        }
        if put != Ok(true) {
            pages::unmap(from, len);
        }
        leave(state);
        put.map(drop)
    }
}

/// A change of a file by this process.
struct Change<'m> {
    maps: &'m Maps,
    key: InodeKey,
    part: Range<u64>,
    begun: bool,
}

impl Change<'_> {
    fn begin(&mut self) {
        let mut state: MutexGuard<'_, State> = self.maps.state.lock();
        while state.mapped.get(&self.key).is_some_and(|mapped| mapped.turns > 0) {
            self.maps.settled.wait(&mut state);
        }
        let Some(mapped) = state.mapped.get_mut(&self.key) else {
            return;
        };
        mapped.changing += 1;
        self.begun = true;
        state.drop_part(self.key, &self.part);
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if self.begun {
            let mut state = self.maps.state.lock();
            if let Some(mapped) = state.mapped.get_mut(&self.key) {
                mapped.changing -= 1;
            }
            state.prune(self.key);
            leave(state);
            self.maps.settled.notify_all();
            return;
        }
        // A map may have been made meanwhile, and what was read for it be older.
        light_barrier();
        if ranges::any() {
            self.maps.state.lock().drop_part(self.key, &self.part);
        }
    }
}
