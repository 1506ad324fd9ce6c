//! Contended regions: directories in which other sessions wanted leases that cached replies depended on. Owns
//! where replies get no timeout, and for how long, so that not each recall waits for one to expire. Knows
//! neither leases nor replies.

use crate::hash::KeyMap;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use varve_format::InodeKey;

/// Time for which a directory is contended after the last recall there, in milliseconds.
const DIR_MS: u64 = 10_000;
/// Number of recalls that waited within [`DIR_MS`] from which on the whole pool is contended.
const WAITS_MAX: u32 = 6;
/// Time for which the whole pool is contended after the last recall, in milliseconds.
const POOL_MS: u64 = 60_000;
/// Most directories that are remembered; with more, the whole pool is contended.
const DIRS_MAX: usize = 4_096;

/// The contended regions of a mount.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    /// When the last region ends; 0: there is none. Read without the lock.
    until_ms: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When a directory's contention ends.
    dirs: KeyMap<u64>,
    /// When the whole pool's contention ends.
    pool_until_ms: u64,
    /// Recalls that waited since `window_ms`.
    waits: u32,
    window_ms: u64,
}

impl Regions {
    /// Notes a recall of a lease on a directory, or on an inode in it. `waits`: a cached reply depends on the
    /// lease.
    pub(crate) fn note(&self, dir: InodeKey, waits: bool, now_ms: u64) {
        let mut state = self.state.lock();
        if now_ms >= state.window_ms + DIR_MS {
            (state.waits, state.window_ms) = (0, now_ms);
        }
        state.waits += u32::from(waits);
        if state.dirs.len() >= DIRS_MAX && !state.dirs.contains_key(&dir) {
            state.dirs.retain(|_, until_ms| *until_ms > now_ms);
        }
        let is_full = state.dirs.len() >= DIRS_MAX && !state.dirs.contains_key(&dir);
        if is_full || state.waits >= WAITS_MAX || state.pool_until_ms > now_ms {
            state.pool_until_ms = now_ms + POOL_MS;
        }
        if !is_full {
            state.dirs.insert(dir, now_ms + DIR_MS);
        }
        let until_ms = state.pool_until_ms.max(now_ms + DIR_MS);
        self.until_ms.fetch_max(until_ms, Ordering::SeqCst);
    }

    /// Whether a reply that names or describes one of `keys` gets no timeout.
    pub(crate) fn contain(&self, keys: impl IntoIterator<Item = InodeKey>, now_ms: u64) -> bool {
        if self.until_ms.load(Ordering::SeqCst) <= now_ms {
            return false;
        }
        let state = self.state.lock();
        let is_contended = |key| state.dirs.get(&key).is_some_and(|until_ms| *until_ms > now_ms);
        state.pool_until_ms > now_ms || keys.into_iter().any(is_contended)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{DIR_MS, DIRS_MAX, POOL_MS, Regions, WAITS_MAX};
    use varve_format::InodeKey;

    fn key(ino: u64) -> InodeKey {
        InodeKey::new(ino, 1)
    }

    #[test]
    fn directory_is_contended_until_some_time_after_the_last_recall_there() {
        let regions = Regions::default();
        assert!(!regions.contain([key(2)], 0));
        regions.note(key(2), true, 0);
        assert!(regions.contain([key(9), key(2)], 0), "a name in it");
        assert!(!regions.contain([key(9), key(3)], 0), "beside it");
        regions.note(key(2), false, 5);
        assert!(regions.contain([key(2)], DIR_MS));
        assert!(!regions.contain([key(2)], DIR_MS + 5));
    }

    #[test]
    fn many_waits_in_a_short_time_make_the_whole_pool_contended() {
        let regions = Regions::default();
        for at in 1..u64::from(WAITS_MAX) {
            regions.note(key(10 + at), true, at);
        }
        assert!(!regions.contain([key(99)], 20));
        regions.note(key(50), true, 20);
        assert!(
            regions.contain([key(99)], 19 + POOL_MS),
            "for longer than a directory"
        );
        regions.note(key(51), false, POOL_MS);
        assert!(
            regions.contain([key(99)], 2 * POOL_MS - 1),
            "as long as there are recalls"
        );
        let later = 2 * POOL_MS;
        assert!(!regions.contain([key(99)], later));
        // A wait now and then does not.
        for at in 0..40 {
            let now_ms = later + at * DIR_MS / 4;
            regions.note(key(60), true, now_ms);
            assert!(!regions.contain([key(99)], now_ms));
        }
    }

    #[test]
    fn memory_is_bounded_and_too_many_directories_are_the_whole_pool() {
        let regions = Regions::default();
        for ino in 0..2 * DIRS_MAX as u64 {
            regions.note(key(10 + ino), false, 0);
        }
        assert_eq!(regions.state.lock().dirs.len(), DIRS_MAX);
        assert!(regions.contain([key(5)], 0));
        regions.note(key(5), false, POOL_MS);
        assert_eq!(regions.state.lock().dirs.len(), 1);
        assert!(!regions.contain([key(6)], POOL_MS));
    }
}
