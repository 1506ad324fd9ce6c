//! Bugs on demand, to prove that the crash tests find them. Compiled in with the feature `test-support` and debug assertions only.

/// A bug that can be armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bug {
    /// A call returns without the fence that makes its entries durable.
    NoFenceAtCommit,
    /// `fsync` returns without having synced the log.
    NoSyncAtFsync,
}

#[cfg(all(feature = "test-support", debug_assertions))]
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

#[cfg(all(feature = "test-support", debug_assertions))]
pub use switch::{arm, armed};

/// Without the feature no bug is ever armed.
#[cfg(not(all(feature = "test-support", debug_assertions)))]
#[inline(always)]
pub(crate) const fn armed(_bug: Bug) -> bool {
    false
}
