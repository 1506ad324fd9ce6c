//! Lease prefetch: which further leases a request for a missing one asks for, and how many. As readahead does
//! for bytes, it replaces a message for each file by one for many: programs walk through inodes that they
//! have listed (`find`, `rm -r`), and through trees in the order in which they were made (`tar`, `cp -a`, a
//! build), and files made one after another have consecutive numbers. Listed inodes and consecutive numbers,
//! reading and writing, have a window each: it grows while prefetched leases are used, and shrinks while they
//! are not.

use std::sync::Arc;
use varve_format::{FileKind, InodeKey, LeaseNo};
use varve_ipc::{LeaseMode, NEAR_MAX, Near, Tell, Want};

use super::listed::Listed;
use super::node::Node;
use super::told::Appetite;
use crate::hash::KeyMap;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Initial window size, and the size after a pause.
const FIRST: u32 = 4;
/// Requests without neighbours after which a closed window is tried again.
const PAUSE: u32 = 64;

/// Number of listed inodes in a request from which on no consecutive numbers are asked for beside them.
const LISTED_ENOUGH: usize = 16;
/// Share of listed inodes that count as prefetched and not used if none of a request's comes.
const VAIN: usize = 4;
/// Number of listed inodes that are looked at for each that is asked for: leases on the others are held.
const LOOKED_AT: usize = 8;
/// Number of entries in [`UnderWay::late`] from which on it is pruned.
const LATE_MANY: usize = 256;

/// Window of one mode and one source.
#[derive(Debug)]
struct Window {
    size: AtomicU32,
    /// Leases prefetched since the window last changed.
    given: AtomicU32,
    /// Number of those that were used.
    used: AtomicU32,
    /// Requests since the window was closed.
    alone: AtomicU32,
}

impl Window {
    fn new() -> Self {
        Self {
            size: AtomicU32::new(FIRST),
            given: AtomicU32::new(0),
            used: AtomicU32::new(0),
            alone: AtomicU32::new(0),
        }
    }

    /// Returns how many leases to ask for. Not exact where threads meet, which does no harm.
    fn next(&self) -> u32 {
        let mut size = self.size.load(Ordering::Relaxed);
        if size == 0 {
            if self.alone.fetch_add(1, Ordering::Relaxed) < PAUSE {
                return 0;
            }
            self.alone.store(0, Ordering::Relaxed);
            size = FIRST;
        } else if self.given.load(Ordering::Relaxed) >= size {
            let given = self.given.swap(0, Ordering::Relaxed);
            let used = self.used.swap(0, Ordering::Relaxed);
            if 2 * used >= given {
                size = (2 * size).min(u32::from(NEAR_MAX));
            } else if 8 * used < given {
                size /= 2;
            }
        }
        self.size.store(size, Ordering::Relaxed);
        size
    }
}

/// Source of a prefetched lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Listed,
    Numbers,
}

/// The prefetch windows of a session.
#[derive(Debug)]
pub(crate) struct Ahead {
    /// Indexed by [`slot`].
    windows: [Window; 4],
    listed: Mutex<Kinds>,
    /// What programs ask for besides leases.
    pub(super) appetite: Arc<Appetite>,
    asking: Mutex<UnderWay>,
}

/// Listed directories, and other listed inodes: a walk that looks at directories alone (`find -type f`) wants no
/// others.
#[derive(Debug, Default)]
struct Kinds {
    dirs: Listed,
    others: Listed,
}

impl Kinds {
    fn asked(&mut self, key: InodeKey) {
        self.dirs.asked(key);
        self.others.asked(key);
    }

    /// Returns the listed inodes of the same kind around `key`.
    fn around(&self, key: InodeKey) -> impl Iterator<Item = InodeKey> {
        self.dirs.around(key).chain(self.others.around(key))
    }
}

/// Requests with neighbours whose answers were not processed yet. They may bring leases on inodes that no
/// request here has named.
#[derive(Debug, Default)]
struct UnderWay {
    /// For each request, the value of `count` when it began.
    began: Vec<u64>,
    count: u64,
    /// Leases that are already gone, perhaps with their node: the highest number of each inode, and `count`
    /// at that time.
    late: KeyMap<(LeaseNo, u64)>,
}

/// Index of a window; a node keeps it, plus one.
const fn slot(source: Source, mode: LeaseMode) -> usize {
    2 * (source as usize) + mode as usize
}

/// A request with neighbours, until its answer was processed.
pub(super) struct Asking<'a> {
    ahead: &'a Ahead,
    began: u64,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut asking = self.ahead.asking.lock();
        asking.began.retain(|began| *began != self.began);
        // Requests that began after a lease was gone cannot bring it.
        match asking.began.iter().min().copied() {
            None => asking.late = KeyMap::default(),
            Some(oldest) if asking.late.len() >= LATE_MANY => {
                asking.late.retain(|_, (_, count)| *count >= oldest)
            }
            Some(_) => {}
        }
    }
}

impl Ahead {
    pub(crate) fn new() -> Self {
        Self {
            windows: std::array::from_fn(|_| Window::new()),
            listed: Mutex::new(Kinds::default()),
            appetite: Arc::default(),
            asking: Mutex::new(UnderWay::default()),
        }
    }

    const fn window(&self, source: Source, mode: LeaseMode) -> &Window {
        &self.windows[slot(source, mode)]
    }

    /// Adds a page of a listed directory.
    pub(super) fn listed(&self, items: impl Iterator<Item = (InodeKey, FileKind)>) {
        let (dirs, others): (Vec<_>, Vec<_>) = items.partition(|(_, kind)| *kind == FileKind::Directory);
        let mut listed = self.listed.lock();
        listed.dirs.add(dirs.into_iter().map(|(key, _)| key));
        listed.others.add(others.into_iter().map(|(key, _)| key));
    }

    /// Returns the missing lease whose neighbours may be wanted: the only one, or the only one on an inode that was
    /// listed lately and is no directory (`rm -r` wants a directory's, too, for the first file in it).
    fn only_one<'w>(&self, missing: impl Iterator<Item = &'w Want> + Clone) -> Option<&'w Want> {
        let one = |wants: &mut dyn Iterator<Item = &'w Want>| {
            let first = wants.next()?;
            wants.next().is_none().then_some(first)
        };
        one(&mut missing.clone()).or_else(|| {
            let listed = self.listed.lock();
            one(&mut missing.filter(|want| listed.others.is_recent(want.key)))
        })
    }

    /// Chooses the neighbours to ask for together with these leases: neighbours of the one missing lease.
    /// `nodes` are the known nodes.
    pub(super) fn wish(
        &self,
        asked: &[(&Arc<Node>, Want)],
        nodes: &KeyMap<Arc<Node>>,
    ) -> Option<(Near, Asking<'_>)> {
        let missing = asked
            .iter()
            .filter(|(node, want)| node.mode() < Some(want.mode))
            .map(|(_, want)| want);
        let want = self.only_one(missing)?;
        let mode = want.mode;
        let tell = match mode {
            LeaseMode::Read => self.appetite.next(),
            LeaseMode::Write => Tell::default(),
        };
        let (these, count) = match self.next_listed(want, nodes) {
            Some(these) => {
                let count = self.numbers_beside(&these, mode);
                (these, count)
            }
            None => (Vec::new(), 0),
        };
        if count == 0 && these.is_empty() && tell == Tell::default() {
            return None;
        }
        let near = Near {
            these,
            after: want.key.ino,
            count,
            mode,
            tell,
        };
        Some((near, self.asking()))
    }

    /// Returns how many consecutive numbers to ask for beside these listed inodes.
    fn numbers_beside(&self, these: &[InodeKey], mode: LeaseMode) -> u16 {
        if these.len() >= LISTED_ENOUGH {
            return 0;
        }
        u16::try_from(self.window(Source::Numbers, mode).next()).unwrap_or(0)
    }

    /// Begins a request with neighbours.
    fn asking(&self) -> Asking<'_> {
        let mut asking = self.asking.lock();
        asking.count += 1;
        let began = asking.count;
        asking.began.push(began);
        Asking { ahead: self, began }
    }

    /// Returns the listed inodes that come next. `None`: a prefetched lease on the next one is held already,
    /// and only this one was missed.
    fn next_listed(&self, want: &Want, nodes: &KeyMap<Arc<Node>>) -> Option<Vec<InodeKey>> {
        let mut listed = self.listed.lock();
        listed.asked(want.key);
        let held = |key: &InodeKey| nodes.get(key).filter(|node| node.mode() >= Some(want.mode));
        let mut around = listed.around(want.key).peekable();
        let Some(first) = around.peek() else {
            return Some(Vec::new());
        };
        if held(first).is_some_and(|node| node.ahead.load(Ordering::Relaxed) != 0) {
            return None;
        }
        let count = self.window(Source::Listed, want.mode).next() as usize;
        let missing = around.take(LOOKED_AT * count).filter(|key| held(key).is_none());
        let mut these: Vec<_> = missing.take(count).collect();
        these.sort_unstable();
        Some(these)
    }

    /// Notes that lease `number` is gone, or will be. If its grant is on its way here it comes too late; the
    /// node may be gone by then, too.
    pub(super) fn note_gone(&self, key: InodeKey, number: LeaseNo) {
        let mut asking = self.asking.lock();
        if asking.began.is_empty() {
            return;
        }
        let count = asking.count;
        let (known, then) = asking.late.entry(key).or_insert((number, count));
        *known = (*known).max(number);
        *then = count;
    }

    /// Whether a lease that an answer brings is already gone.
    pub(super) fn comes_too_late(&self, key: InodeKey, number: LeaseNo) -> bool {
        let asking = self.asking.lock();
        asking.late.get(&key).is_some_and(|(late, _)| number <= *late)
    }

    /// Notes a prefetched lease that was asked for with `near`.
    pub(super) fn came(&self, node: &Node, mode: LeaseMode, near: &Near) {
        let source = match near.these.binary_search(&node.key()) {
            Ok(_) => Source::Listed,
            Err(_) => Source::Numbers,
        };
        // Only what came: not all numbers exist, and what others have comes with a later request.
        self.window(source, mode).given.fetch_add(1, Ordering::Relaxed);
        let before = node.ahead.swap(1 + slot(source, mode) as u32, Ordering::Relaxed);
        // One for writing takes the place of one for reading, which nobody can use any more.
        if let Some(window) = before
            .checked_sub(1)
            .and_then(|slot| self.windows.get(slot as usize))
        {
            let given = window.given.load(Ordering::Relaxed);
            window.given.store(given.saturating_sub(1), Ordering::Relaxed);
        }
    }

    /// Notes the answer to a request with `near`, that brought `came` leases: where none of the listed inodes comes again
    /// and again, because they are gone or others keep them, no more are asked for.
    pub(super) fn answered(&self, near: &Near, came: usize) {
        if came == 0 {
            let vain = near.these.len().div_ceil(VAIN) as u32;
            self.window(Source::Listed, near.mode)
                .given
                .fetch_add(vain, Ordering::Relaxed);
        }
    }

    /// Notes the first use of a prefetched lease.
    #[cold]
    pub(super) fn used(&self, node: &Node) {
        let slot = match node.ahead.swap(0, Ordering::Relaxed) {
            0 => return,
            plus_one => plus_one as usize - 1,
        };
        if let Some(window) = self.windows.get(slot) {
            window.used.fetch_add(1, Ordering::Relaxed);
        }
        self.listed.lock().asked(node.key());
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{FIRST, PAUSE, Window};
    use crate::sync::atomic::Ordering;
    use varve_ipc::NEAR_MAX;

    /// Asks `times` times, with `percent` of the leases used; returns the last window.
    fn after(window: &Window, times: u32, percent: u32) -> u32 {
        let mut size = 0;
        for _ in 0..times {
            size = window.next();
            window.given.fetch_add(size, Ordering::Relaxed);
            window.used.fetch_add(size * percent / 100, Ordering::Relaxed);
        }
        size
    }

    #[test]
    fn window_grows_while_it_is_used_and_closes_while_it_is_not() {
        let window = Window::new();
        assert_eq!(after(&window, 1, 100), FIRST);
        assert_eq!(after(&window, 20, 100), u32::from(NEAR_MAX));
        assert_eq!(after(&window, 20, 30), u32::from(NEAR_MAX));
        assert_eq!(after(&window, 20, 0), 0);
        // Tried again after a while, and not for long.
        let tries = (0..10 * PAUSE).filter(|_| after(&window, 1, 0) > 0).count();
        assert!((1..60).contains(&tries), "{tries}");
        assert_eq!(after(&window, PAUSE + 20, 100), u32::from(NEAR_MAX));
    }
}
