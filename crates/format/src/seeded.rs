//! Bugs on demand, to prove that the tests find them. Compiled in with the feature `test-support` and debug
//! assertions only; else no bug can be armed and every question is answered `false` at compile time. Owns the
//! list and the switch; each bug is where its name says.

/// A bug that can be armed. The table in `docs/internals/seeded-bugs.md` says more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A call returns without the fence that makes its entries durable.
    NoFenceAtCommit,
    /// `fsync` returns without having synced the log.
    NoSyncAtFsync,
    /// A call does not look whether its session was sealed.
    AckWithoutPageCheck,
    /// A lease counts as given back only when its release is put together, not when nobody was seen to use
    /// it.
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
    KernelPagesForwarded,
    /// A lease of a mount goes without a look at what the kernel read while it dropped its pages.
    KernelReadMissed,
    /// A grant that is wanted back before it came goes at once, though what was read under the one that it
    /// took the place of is still there.
    SuccessorAhead,
    /// A number that is written off claims that all lower ones are committed.
    NoopClaimsStable,
    /// The page that a waiting write of the kernel ends in stays, also when it is up to date.
    KernelTailKept,
    /// A read of the kernel that overtook a write leaves what was there before.
    KernelReadKept,
    /// Such a read counts as mended before its page is dropped: a write beside it does not wait for that.
    KernelReadForgotten,
    /// A lease of a mount goes before the kernel's pages when a call of the kernel waits for more.
    KernelLetGo,
    /// Who waits for an upcall looks whether there is one, and begins to wait in a second step.
    UpcallUnseen,
    /// What a queue of upcalls still holds is lost when it is closed.
    UpcallsLostAtClose,
    /// A window of a user's segments is told although its blocks were replaced while it was copied.
    SegmentStale,
    /// A place in a user's segments is used again before all have forgotten what lay there.
    SegmentReusedEarly,
    /// A read without a lock counts although the inode was changed meanwhile.
    TriedReadOvertaken,
    /// A read without a lock counts although the session was sealed meanwhile.
    TriedReadSealed,
    /// A call that comes back late is judged by the seal of the session that ended last, not of its own.
    LateCallOfAnother,
    /// A block of NVM is believed although its first read did not compare it.
    NvmBelieved,
    /// What a partial write keeps of a block of NVM is not compared before it gets a new checksum.
    MergeBelieved,

    // The second list.
    /// The checksum of a log's entry leaves out the last line of its payload where that is not full.
    EntryTailUnchecked,
    /// The scan of a sealed log does not look at the number below which all was committed when an entry was.
    GapBelowStable,
    /// `fsync` syncs the lane of its own thread only.
    SyncOwnLane,
    /// `fsync` goes on from the page after the one in which the last `fsync` ended.
    SyncFromNextPage,
    /// What was not synced of a chunk is forgotten when its lane leaves it.
    LeftChunkUnsynced,
    /// A number is in flight only after it was taken, not from before.
    NumberBeforeFlight,
    /// Each entry of a transaction counts for itself.
    TransactionInParts,
    /// A full chunk is used again without a look at what is digested.
    ChunkBackEarly,
    /// A lease passes on when its holder's log is digested up to the entry before the last one about the
    /// inode.
    HandOverShort,
    /// The row of a lease that is given back goes in a transaction of its own, before the digest.
    RowGoneBeforeDigest,
    /// A client takes the number after the last one that a seal covers for covered.
    SealCoversNext,
    /// The digested number is committed after the operations.
    NumberAfterOps,
    /// Of several truncations in one batch the last one counts, not the shortest.
    CutForgotten,
    /// New metadata blocks are written after new data was made durable: they share the fence of the record.
    NodesUnfenced,
    /// The record is stored before what it refers to is durable, and made durable after it.
    RecordBeforePayload,
    /// What goes in place is not fenced by the thread that put it there.
    InPlaceUnfenced,
    /// Of what a transaction wrote to NVM, the range written last is synced.
    RangeNotMerged,
    /// The checksum of a record leaves out the last line of its payload where that is not full.
    RecordTailUnchecked,
    /// Both copies of the journal's header are written before one fence and sync.
    TwoHeadersOneFence,
    /// The checksum of the journal's header covers its name and sequence, not the tail.
    HeaderSumShort,
    /// The header with the new tail is stored before what it gives up is durable in place.
    TailWrittenEarly,
    /// A record that does not fit behind the last one begins anew without a look at the tail.
    RingOverTail,
    /// Replay does not go on at the start of the ring.
    ReplayNoWrap,
    /// Recovery does not free the files that have no name.
    OrphansLeftAtStart,
    /// A unit with holes is opened without the checksums of what is left in it.
    HolesWithoutSums,
    /// An emptied unit is trimmed without a look whether it was opened again.
    TrimOpened,
    /// A device to which data moved is not flushed before the commit.
    MoveNotFlushed,
    /// A file that is freed in several transactions leaves the list of orphans in the first one.
    OrphanLeavesEarly,
    /// A file that a rename replaces keeps its link count where it has other names.
    VictimKeepsLink,
    /// Repair frees what nobody uses in its first pass, before all is saved.
    RepairFreesFirst,

    // Overwrites in place.
    /// A block is overwritten in place although an operation of the same batch changed a part of it.
    PartialInPlace,
    /// The entry that is redone is one that the daemon saw, not one that is known to be durable.
    UnsettledInPlace,
    /// Blocks are overwritten when they are queued, before the record is ready.
    InPlaceEarly,
    /// Blocks that were overwritten and the record share a fence.
    InPlaceNotFenced,
    /// A reader of the daemon takes what it read beside an overwrite.
    ReadBesideInPlace,
    /// A client takes what it read of a block, though it was overwritten in its log meanwhile.
    ReadUnderOverwrite,
    /// Files whose blocks were overwritten in place are not named as changed.
    InPlaceNotTold,
    /// An extent that shares a run does not count.
    ShareNotCounted,
    /// A run is freed when one extent is left that names it.
    SharedFreedEarly,
    /// An extent that names a run no more still counts.
    SharedNotReleased,
    /// Blocks of a shared extent are overwritten in place.
    SharedInPlace,
    /// Counts of shared runs are durable in a record before that of the extents.
    CountBeforeExtents,
    /// Counts of shared runs are durable in a record after that of the extents.
    ExtentsBeforeCount,
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

    thread_local! {
        static RECORD_OPS: Cell<usize> = const { Cell::new(usize::MAX) };
    }

    /// How many operations a digest of this thread takes into one record, from here on.
    pub fn set_record_ops(most: usize) {
        RECORD_OPS.set(most);
    }

    /// So many at most.
    #[must_use]
    pub fn record_ops() -> usize {
        RECORD_OPS.get()
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

    /// Changes nothing here.
    #[inline(always)]
    pub const fn set_record_ops(_most: usize) {}

    /// As many as fit.
    #[inline(always)]
    #[must_use]
    pub const fn record_ops() -> usize {
        usize::MAX
    }

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

pub use switch::{arm, armed, current, record_ops, set_record_ops};

/// Whether a test scheduler finds `bug`, which makes one of `works` fail: the works take turns under random
/// schedules and such by priorities, until one fails. Prints how many it took. The bound is far beyond what
/// any of the bugs needs; it is there so that a bug nobody finds ends too.
#[cfg(feature = "shuttle")]
pub fn is_found<W: Fn() + Copy + Send + Sync + std::panic::UnwindSafe + 'static>(
    bug: Bug,
    works: &[W],
) -> bool {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    let schedules = Arc::new(AtomicU64::new(0));
    let search = |work: W| {
        let count = Arc::clone(&schedules);
        let armed = move || {
            count.fetch_add(1, Ordering::Relaxed);
            arm(Some(bug));
            work();
        };
        let found = std::panic::catch_unwind(move || {
            shuttle::check_random(armed.clone(), 1_000);
            shuttle::check_pct(armed, 2_000, 4);
        });
        arm(None);
        found.is_err()
    };
    let found = (0..1_000).any(|_| works.iter().any(|work| search(*work)));
    println!(
        "{bug:?}: found {found}, schedules {}",
        schedules.load(Ordering::Relaxed)
    );
    found
}
