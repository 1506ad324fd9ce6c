//! Bugs on demand, to prove that the tests find them. Compiled in with the feature `test-support` and debug assertions only; else no bug can
//! be armed and every question is answered `false` at compile time. Owns the list and the switch; each bug is where its name says.

/// A bug that can be armed. The table in `docs/TESTING.md` says more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A call returns without the fence that makes its entries durable.
    NoFenceAtCommit,
    /// `fsync` returns without having synced the log.
    NoSyncAtFsync,
    /// A call does not look whether its session was sealed.
    AckWithoutPageCheck,
    /// A lease counts as given back only when its release is put together, not when nobody was seen to use it.
    GivenBackLate,
    /// What was cached under a lease is believed under the next one.
    CacheKeptAfterRevocation,
    /// The scan of a log believes an entry without its checksum.
    EntryChecksumIgnored,
    /// A lease passes on before its holder's log is digested.
    LeaseBeforeDigest,
    /// The digested number is committed before the operations.
    DigestedBeforeOps,
    /// A lease is granted without its durable row.
    GrantNotDurable,
    /// New blocks are not synced before the commit.
    NoSyncBeforeCommit,
    /// The journal record is neither fenced nor synced.
    NoFenceAfterRecord,
    /// New blocks are written after the commit instead of before.
    CommitBeforePayload,
    /// Blocks are changed in place before the record.
    InPlaceBeforeRecord,
    /// Freed blocks can be allocated before the commit.
    FreeBeforeCommit,
    /// Freed blocks can be allocated before the journal's tail and the readers have passed.
    ReuseBeforeRelease,
    /// Journal space is reused without syncing what was changed in place.
    NoSyncBeforeTail,
    /// The numbers of transactions since the journal's tail are given again after a restart.
    TxReusedAfterRestart,
    /// Replay believes a record without its checksum.
    RecordChecksumIgnored,
    /// The journal has one header, overwritten in place.
    OneJournalHeader,
    /// SSD and HDD are not flushed before the commit.
    NoDeviceFlush,
    /// The journal is emptied before what was replayed is durable.
    NoSyncAfterReplay,
    /// A unit is trimmed before the record that empties it.
    TrimBeforeCommit,
    /// Truncation leaves the bytes behind the new end.
    StaleTail,
    /// A unit is sealed without its footer.
    FooterNotWritten,
    /// A unit has one place for its footer, overwritten before the commit.
    OneFooter,
    /// An inode that loses its last name is not listed as an orphan.
    OrphanNotListed,
    /// The checksum of a log's entry covers its header only, and one fence its header and payload.
    EntryPayloadUnchecked,
    /// A record counts by its header, which is written last and not fenced from its payload.
    RecordMark,
    /// A record and its changes in place have one fence.
    RecordInSameFence,
    /// Recovery's replayed ranges and the empty journal have one fence.
    ReplayInSameFence,
    /// A write of a mount that the daemon carries out leaves what the kernel copied into its pages.
    KernelPagesMediated,
    /// A lease of a mount goes without a look at what the kernel read while it dropped its pages.
    KernelReadMissed,
    /// The page that a waiting write of the kernel ends in stays, also when it is up to date.
    KernelTailKept,
    /// A read of the kernel that overtook a write leaves what was there before.
    KernelReadKept,
    /// Such a read counts as mended before its page is dropped: a write beside it does not wait for that.
    KernelReadForgotten,
    /// A lease of a mount goes before the kernel's pages when a call of the kernel waits for more.
    KernelLetGo,
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

    /// The bug armed in this thread: a thread that is started on its behalf arms it too.
    #[must_use]
    pub fn current() -> Option<Bug> {
        ARMED.get()
    }

    /// Whether `bug` is armed in this thread.
    #[must_use]
    pub fn armed(bug: Bug) -> bool {
        ARMED.get() == Some(bug)
    }
}

#[cfg(not(all(feature = "test-support", debug_assertions)))]
mod switch {
    use super::Bug;

    /// No bug can be armed here.
    #[inline(always)]
    pub const fn arm(_bug: Option<Bug>) {}

    /// None.
    #[inline(always)]
    #[must_use]
    pub const fn current() -> Option<Bug> {
        None
    }

    /// Never.
    #[inline(always)]
    #[must_use]
    pub const fn armed(_bug: Bug) -> bool {
        false
    }
}

pub use switch::{arm, armed, current};
