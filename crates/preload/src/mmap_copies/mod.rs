//! Read-only maps, served from copies that this process keeps: where the copies are, how long they are valid,
//! and how a map moves to the mount that is to become more than read-only. Decisions and alternatives:
//! `docs/adr/0022-serve-read-only-mappings-from-private-copies.md`.
//!
//! The pages of all such maps lie in one memory file (`sys::pages`), the file of copies, which the daemon can
//! empty too. A load of a page that is not shown waits (`userfaultfd`) until a thread of the library has read
//! it through LibFS, stored it, and shown it.
//!
//! # Invariants
//! 1. A page is *shown*, at one address, by a system call that fails if the page is not in the file of
//!    copies. Removing a page from the file removes it from all maps. Storing a page does not show it.
//! 2. While `state` is unlocked, every page in the file of copies holds the present content of its file,
//!    unless the session under which it was read has ended; in that case the daemon has emptied the file of
//!    copies, or does so before it grants any of the session's leases to another session. Reasons:
//!    - a page is read under a read lease that LibFS keeps track of: before the lease goes,
//!      [`drop_copies`](varve_libfs::Copies::drop_copies) increments the file's `generation` and removes its
//!      pages, both under the lock;
//!    - it is stored under the lock, if the generation is still that of before the read;
//!    - *store, then check the session, then show*: if the session was alive at the check, the daemon empties
//!      the file after the page was stored. If it was not, the page is removed again. However long the thread
//!      is stopped between two of these steps (SIGSTOP), a page read too early is never shown;
//!    - changes by this process hold the file's `changing` count up while they last, and remove its pages
//!      before they begin. Nothing is stored meanwhile, so no load returns the old content after anyone has
//!      read the new content.
//! 3. The daemon finds the file of copies by its name: a page is shown only if the file still has its name,
//!    in the directory that the daemon of *this* session announced. Otherwise its map is given to the mount.
//! 4. An offset of the file of copies is never used twice: a late store for a removed map reaches no other
//!    map.
//! 5. The threads that serve loads touch no memory of the program and hold no lock while LibFS works. No code
//!    of the library touches a served map while it holds a lock of LibFS: buffers in such a map are copied
//!    first (`sys::args`).
//! 6. A range is mapped over only if it still shows the file of copies (`/proc/self/maps`): a raw system call
//!    may have mapped something else there.
//!
//! Lock order: a description's `side` and all locks of LibFS come before `state`. Under `state` only system
//! calls are made, none on a file of the mount.

mod book;
mod fill;

use self::book::{Book, Piece};
use crate::Errno;
use crate::config::PoolId;
use crate::ofd::Ofd;
use crate::sys::pages::{self, CopyFile, Faults, PAGE};
use crate::sys::{kernel, ranges, signals};
use crate::walk::{FileId, Here};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use varve_format::InodeKey;
use varve_ipc::{CopiesAt, heavy_barrier, light_barrier};
use varve_libfs::OpenFile;
use varve_media::lock::{Condvar, Mutex, MutexGuard, RwLockReadGuard};

/// Upper bound on the bytes of copies of one process, and on their share of the memory file system (one
/// `SHARE`th).
const BYTES_MAX: u64 = 1 << 30;
const SHARE: u64 = 16;
/// With less room than this, maps are not served: pages would be read again too often.
const BYTES_LEAST: u64 = 16 << 20;
/// How often a map is looked up again, while it is being given to the mount and other threads unmap parts of
/// it.
const GIVES_MAX: u32 = 16;

/// The interface of the process that the maps depend on.
pub trait Host {
    /// Returns where the daemon of this session looks for the file of copies; `None` if there is no session
    /// or no such place.
    fn copies_at(&self) -> Option<CopiesAt>;
    /// Returns the file of a description in this process' session.
    ///
    /// # Errors
    /// [`Stop::Kernel`](crate::walk::Stop::Kernel) when it cannot be opened there.
    fn file<'a>(&self, ofd: &'a Ofd) -> Here<&'a OpenFile>;
    /// Takes the gate, held while a map is made, so that no fork happens meanwhile.
    fn gate(&self) -> RwLockReadGuard<'_, ()>;
    /// Returns a kernel descriptor of the description's file: `fd` itself if it is real, or a side descriptor
    /// that is kept with the description.
    ///
    /// # Errors
    /// The error of opening the file through the mount.
    fn side(&self, fd: i32, ofd: &Ofd) -> Result<i32, Errno>;
    /// Returns the function by which threads that serve loads find the process and its maps.
    fn finder(&self) -> Finder;
}

/// Finds the process and its maps, if there is one.
pub type Finder = fn() -> Option<(&'static dyn Host, &'static Maps)>;

/// A map as the program requests it.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Preferred address.
    pub hint: usize,
    /// Length in bytes.
    pub len: usize,
    /// Offset in the file.
    pub offset: u64,
    /// `MAP_SHARED`.
    pub shared: bool,
}

/// The state of one mapped file.
#[derive(Debug, Default)]
struct Mapped {
    /// Incremented by every event that makes copies out of date.
    generation: u64,
    /// Number of changes by this process that are under way.
    changing: u32,
    /// Number of loads that changes have overtaken too often: new changes wait for them.
    turns: u32,
    /// File offset at which the next load is expected, and bytes read at once there.
    next: u64,
    window: usize,
    /// File offset of a page that was read ahead and is stored, but not shown: a load of it tells that
    /// sequential loads have come this far.
    mark: Option<u64>,
}

struct Arena {
    file: CopyFile,
    at: CopiesAt,
    faults: Arc<Faults>,
    /// Lowest offset of the file of copies that was never used.
    next: u64,
    bytes_max: u64,
}

#[derive(Default)]
struct State {
    arena: Option<Arena>,
    /// Whether making the arena was tried.
    tried: bool,
    book: Book,
    mapped: HashMap<InodeKey, Mapped>,
    /// Stored ranges of the file of copies, the oldest first.
    stored: VecDeque<Range<u64>>,
    stored_bytes: u64,
    /// Pages whose loads raise SIGBUS because LibFS could not read them.
    failed: Vec<Range<usize>>,
    /// Ranges being read. A load in one of them waits for that read instead of starting another.
    under_way: Vec<Range<usize>>,
    /// Former pieces, to be dropped. Dropping them may close files, which may wait for the mount: never under
    /// the lock, nor on a thread of LibFS.
    gone: Vec<Piece>,
}

/// Unlocks `state`, then drops the former pieces.
fn leave(mut state: MutexGuard<'_, State>) {
    let gone = std::mem::take(&mut state.gone);
    drop(state);
    drop(gone);
}

impl State {
    /// Removes pages from the file of copies.
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

    /// Makes room for `bytes` more: removes the oldest pages, which loads read again if they need them. For
    /// maps that could not be given to the mount.
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

    /// Drops the copies of `part` of a file, which are out of date.
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

    /// Lifts the bar (SIGBUS) of a piece, and of those that were barred before it, so that loads there are
    /// tried again.
    fn unbar(&mut self, piece: &Piece) {
        let Some(arena) = &self.arena else { return };
        let reached = arena.file.reach(piece.stored().end);
        let now = |piece: &&Piece| piece.bars && piece.stored().end <= reached;
        let pieces: Vec<_> = self.book.all().filter(now).cloned().collect();
        for piece in pieces {
            self.book.amend(&piece.at, |piece| piece.bars = false);
        }
    }

    /// Bars a range: loads in it raise SIGBUS.
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
                // The kernel may have left anything there; it is no served map any more.
                Err(_) => self.forget(&piece.at),
            }
        }
    }

    /// Removes a range from the served maps.
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

/// All served maps of a process.
#[derive(Default)]
pub struct Maps {
    pool: OnceLock<PoolId>,
    state: Mutex<State>,
    /// Signalled when a change has ended, or a load that made changes wait is done.
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

    /// Returns the file of copies, making it on first use; `None` if there can be none.
    fn arena<'s>(&self, host: &dyn Host, state: &'s mut State) -> Option<&'s mut Arena> {
        if !state.tried {
            // It starts threads.
            if signals::in_handler() {
                return None;
            }
            state.tried = true;
            state.arena = Self::make_arena(host);
        }
        let at = host.copies_at()?;
        let nothing = state.book.all().next().is_none();
        let arena = state.arena.as_mut()?;
        if arena.at != at || !arena.file.is_named() {
            // While maps of the old file exist, new maps go to the mount.
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

    /// Maps a file for reading. `None` if the mount is to map it.
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
        // A fork first gives all maps to the mount.
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
            // Pairs with the barrier in `change`: a thread that did not see the map has either made its
            // change before this map's first read, or sees the map afterwards and drops the copies.
            heavy_barrier();
        }
        self.fill_at_once(host, start, len);
        Some(start)
    }

    /// Makes a change of `part` of a file. Copies of it are dropped before, or after if the first map is made
    /// meanwhile.
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

    /// Has the kernel unmap a range by `call`. `None` if the range touches no served map.
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

    /// Has the kernel map something else, possibly a file of the mount, over a range by `call`.
    pub fn replace(&self, range: &Range<usize>, call: impl FnOnce() -> isize) -> isize {
        let aside = self.state.lock().book.cut(range);
        let result = call();
        let mut state = self.state.lock();
        let replaced = result >= 0;
        for piece in &aside {
            // The copies may have gone out of date while the pieces were out of the book.
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

    /// Has the kernel change the protection of a range by `call`, to one without writing or execution.
    pub fn protect(&self, range: &Range<usize>, protection: i32, call: impl FnOnce() -> isize) -> isize {
        let mut state = self.state.lock();
        let result = call();
        if result >= 0 {
            state.book.amend(range, |piece| piece.protection = protection);
        }
        result
    }

    /// Gives the maps in a range to the mount: from then on the kernel serves them.
    ///
    /// # Errors
    /// The error of opening the file through the mount, or of mapping it. A map that could not be given stays
    /// as it is.
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

    /// Returns the descriptions that maps of a file keep open.
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
        // The mount may need a lease for these calls, which LibFS gives back only without the lock.
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
            // It was unmapped in the meantime, in part or whole.
            ([], _) => Ok(false),
            ([now], _) if !same(now) => Err(Errno(libc::EAGAIN)),
            ([_], true) => pages::put_over(from, len, piece.at.start).map(|()| true),
            // A raw system call, which the library did not see, has mapped something else there.
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

/// A change of a file by this process, under way.
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
        // A map may have been made meanwhile, with bytes read from before the change.
        light_barrier();
        if ranges::any() {
            self.maps.state.lock().drop_part(self.key, &self.part);
        }
    }
}
