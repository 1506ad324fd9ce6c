//! Inodes that the daemon has reported as contended: operations that change them are forwarded to it, without
//! a lease request first. A hint: it expires by itself, and the daemon's answer to a forwarded operation says
//! whether the inode is still contended.

use std::sync::Arc;
use varve_format::InodeKey;
use varve_ipc::{Clock, SystemClock};

use crate::hash::KeyMap;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};

/// Time for which a report counts, in milliseconds.
const COUNTS_MS: u64 = 50;
/// Most inodes that are remembered.
const MOST: usize = 1024;

/// The contended inodes, with the time of the daemon's last report on each.
pub(crate) struct Contended {
    clock: Arc<dyn Clock>,
    /// Whether `said` may hold entries: without any, readers take no lock.
    any: AtomicBool,
    /// Time of the report, in milliseconds of the monotonic clock.
    said: Mutex<KeyMap<u64>>,
}

impl Default for Contended {
    fn default() -> Self {
        Self::new(Arc::new(SystemClock))
    }
}

impl Contended {
    /// Begins without any report.
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            any: AtomicBool::new(false),
            said: Mutex::new(KeyMap::default()),
        }
    }

    fn counts(&self, said_ms: u64) -> bool {
        self.clock.monotonic_ms() < said_ms + COUNTS_MS
    }

    /// Whether any inode may be contended.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether `key` was contended a moment ago.
    pub(crate) fn is(&self, key: InodeKey) -> bool {
        if !self.any() {
            return false;
        }
        let mut said = self.said.lock();
        let counts = said.get(&key).is_some_and(|said_ms| self.counts(*said_ms));
        if !counts && said.remove(&key).is_some() {
            self.any.store(!said.is_empty(), Ordering::Relaxed);
        }
        counts
    }

    /// Notes the daemon's answer to an operation on `keys`: `contended` of them still are.
    pub(crate) fn learn(&self, keys: &[InodeKey], contended: &[InodeKey]) {
        if contended.is_empty() && !self.any() {
            return;
        }
        let mut said = self.said.lock();
        for key in keys {
            said.remove(key);
        }
        if said.len() + contended.len() > MOST {
            said.retain(|_, said_ms| self.counts(*said_ms));
        }
        let now_ms = self.clock.monotonic_ms();
        for key in contended.iter().take(MOST.saturating_sub(said.len())) {
            said.insert(*key, now_ms);
        }
        self.any.store(!said.is_empty(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{COUNTS_MS, Contended, MOST};
    use std::sync::Arc;
    use varve_format::InodeKey;
    use varve_ipc::ManualClock;

    #[test]
    fn word_of_the_daemon_counts_until_it_says_otherwise_or_is_silent() {
        let clock = Arc::new(ManualClock::new(1));
        let contended = Contended::new(Arc::clone(&clock) as _);
        let (a, b) = (InodeKey::new(5, 1), InodeKey::new(6, 1));
        assert!(!contended.any() && !contended.is(a));
        contended.learn(&[a, b], &[a, b]);
        contended.learn(&[a], &[]);
        assert!(!contended.is(a), "the daemon said otherwise");
        clock.advance_ms(COUNTS_MS - 1);
        assert!(contended.is(b));
        clock.advance_ms(1);
        assert!(contended.any());
        assert!(!contended.is(b), "it has been silent for too long");
        assert!(!contended.any());
        let many: Vec<_> = (0..2 * MOST as u64).map(|n| InodeKey::new(n, 1)).collect();
        contended.learn(&many, &many);
        assert_eq!(contended.said.lock().len(), MOST);
    }
}
