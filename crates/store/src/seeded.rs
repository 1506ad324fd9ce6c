//! Bugs on demand, to prove that the crash tests find them. Without the feature `test-support` nothing of it is compiled in.

/// A bug that can be armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// New blocks are not synced before the commit.
    NoSyncBeforeCommit,
    /// The journal record is neither fenced nor synced.
    NoFenceAfterRecord,
    /// New blocks are written after the commit instead of before.
    CommitBeforePayload,
    /// Freed blocks can be allocated before the commit.
    FreeBeforeCommit,
    /// Freed blocks can be allocated before the journal's tail and the readers have passed.
    ReuseBeforeRelease,
    /// Journal space is reused without syncing what was changed in place.
    NoSyncBeforeTail,
    /// The numbers of transactions since the journal's tail are given again after a restart.
    TxReusedAfterRestart,
}

#[cfg(any(test, feature = "test-support"))]
mod switch {
    use super::Bug;
    use std::cell::Cell;

    thread_local! {
        static ARMED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Arms one bug in this thread (`None`: none).
    pub fn arm(bug: Option<Bug>) {
        ARMED.set(bug);
    }

    /// Whether `bug` is armed in this thread.
    #[must_use]
    pub fn armed(bug: Bug) -> bool {
        ARMED.get() == Some(bug)
    }
}

#[cfg(any(test, feature = "test-support"))]
pub use switch::{arm, armed};

/// Without the feature no bug is ever armed.
#[cfg(not(any(test, feature = "test-support")))]
pub(crate) const fn armed(_bug: Bug) -> bool {
    false
}
