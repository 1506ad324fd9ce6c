//! Who is at work in the daemon's object for others: it has ended when all of them have left. Knows nothing of what they do.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Nobody enters any more.
const CLOSED: usize = 1 << (usize::BITS - 1);

/// Requests that are being carried out.
#[derive(Debug, Default)]
pub(crate) struct Entries(AtomicUsize);

/// A request that is being carried out, until this is dropped.
pub(crate) struct Entered<'e>(&'e Entries);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

impl Entries {
    /// `None`: closed.
    #[inline]
    pub(crate) fn enter(&self) -> Option<Entered<'_>> {
        let entered = Entered(self);
        // Counted before it is looked: who closes sees it, or it sees that.
        (self.0.fetch_add(1, Ordering::AcqRel) & CLOSED == 0).then_some(entered)
    }

    /// Nobody enters from now on.
    pub(crate) fn close(&self) {
        self.0.fetch_or(CLOSED, Ordering::AcqRel);
    }

    /// Whether all have left.
    pub(crate) fn are_over(&self) -> bool {
        self.0.load(Ordering::Acquire) & !CLOSED == 0
    }
}

#[cfg(test)]
mod tests {
    use super::Entries;

    #[test]
    fn nobody_enters_what_is_closed_and_all_leave() {
        let entries = Entries::default();
        let first = entries.enter();
        assert!(first.is_some() && !entries.are_over());
        let second = entries.enter();
        entries.close();
        assert!(entries.enter().is_none());
        drop(first);
        assert!(!entries.are_over());
        drop(second);
        assert!(entries.are_over());
    }
}
