//! What the daemon tells with leases besides attributes: whether programs here use it, and until when it counts.

use varve_ipc::Tell;

use crate::sync::RwLock;
use crate::sync::atomic::{AtomicU32, Ordering};

/// Requests for leases with contents for each request for contents alone.
const EACH: u32 = 16;
/// Most that follow without any.
const MOST: u32 = 64;

/// Requests for contents: after one, contents come with the next leases, since a program that reads one
/// directory, or one file, reads the next one too (`find`, `tar`, `grep -r`). What comes in vain costs little and
/// ends soon: nobody tells that it was used, so the daemon is asked for contents alone now and then.
#[derive(Debug, Default)]
pub(crate) struct Appetite {
    names: AtomicU32,
    extents: AtomicU32,
}

impl Appetite {
    fn grow(left: &AtomicU32) {
        // Not exact where threads meet, which does no harm.
        left.store((left.load(Ordering::Relaxed) + EACH).min(MOST), Ordering::Relaxed);
    }

    fn take(left: &AtomicU32) -> bool {
        let had = left.load(Ordering::Relaxed);
        if had > 0 {
            left.store(had - 1, Ordering::Relaxed);
        }
        had > 0
    }

    /// Notes a request for the names in a directory.
    pub(crate) fn asked_names(&self) {
        Self::grow(&self.names);
    }

    /// Notes a request for the extents of a file.
    pub(crate) fn asked_extents(&self) {
        Self::grow(&self.extents);
    }

    /// Returns what to ask for with the next leases.
    pub(super) fn next(&self) -> Tell {
        Tell {
            names: Self::take(&self.names),
            extents: Self::take(&self.extents),
        }
    }
}

/// Counts the barriers of a session, by which the daemon takes back what it told of extents. Those that come with a
/// lease are of an inode that may have no node yet, where a barrier could make them void: they do not count if any
/// barrier came since they were asked for.
#[derive(Default)]
pub(super) struct Barriers(RwLock<u64>);

impl Barriers {
    /// The number so far, to be taken before a request is sent.
    pub(super) fn count(&self) -> u64 {
        *self.0.read()
    }

    /// Counts one, before anything is forgotten because of it. When this returns, no extents that were told before
    /// are being installed.
    pub(super) fn note(&self) {
        *self.0.write() += 1;
    }

    /// Calls `install` with whether extents count that were told to a request sent at `count`. No barrier is noted
    /// meanwhile.
    pub(super) fn during<T>(&self, count: u64, install: impl FnOnce(bool) -> T) -> T {
        let now = self.0.read();
        install(*now == count)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{Appetite, EACH, MOST};
    use varve_ipc::Tell;

    #[test]
    fn contents_are_told_for_a_while_after_they_were_asked_for() {
        let appetite = Appetite::default();
        assert_eq!(appetite.next(), Tell::default());
        appetite.asked_extents();
        for _ in 0..EACH {
            assert_eq!(
                appetite.next(),
                Tell {
                    names: false,
                    extents: true
                }
            );
        }
        assert_eq!(appetite.next(), Tell::default());
        for _ in 0..1000 {
            appetite.asked_names();
        }
        let told = (0..1000).filter(|_| appetite.next().names).count();
        assert_eq!(told, MOST as usize);
    }
}
