//! Bugs on demand, to prove that the tests find them. Compiled in with the feature `test-support` and debug
//! assertions only; otherwise no bug can be armed and [`armed`] is the constant `false`. Owns the list and
//! the switch; each bug is at the place that its name suggests.

/// A bug that can be armed. The table in `docs/internals/seeded-bugs.md` describes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A call returns without the fence that makes its entries durable.
    NoFenceAtCommit,
    /// `fsync` returns without having synced the log.
    NoSyncAtFsync,
    /// A call does not check whether its session was sealed.
    AckWithoutPageCheck,
    /// A lease counts as given back only when its release message is built, not when the last use was seen to
    /// end.
    GivenBackLate,
    /// State cached under a lease is trusted under the next one.
    CacheKeptAfterRevocation,
    /// The scan of a log trusts an entry without its checksum.
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
    /// Freed blocks can be allocated before the journal's tail and the readers have moved past them.
    ReuseBeforeRelease,
    /// Journal space is reused without syncing the changes in place.
    NoSyncBeforeTail,
    /// The numbers of transactions since the journal's tail are reused after a restart.
    TxReusedAfterRestart,
    /// Replay trusts a record without its checksum.
    RecordChecksumIgnored,
    /// The journal has one header, overwritten in place.
    OneJournalHeader,
    /// SSD and HDD are not flushed before the commit.
    NoDeviceFlush,
    /// The journal is emptied before the replayed changes are durable.
    NoSyncAfterReplay,
    /// A unit is trimmed before the record that empties it.
    TrimBeforeCommit,
    /// Truncation keeps the old bytes behind the new end.
    StaleTail,
    /// A unit is sealed without its footer.
    FooterNotWritten,
    /// A unit has one place for its footer, overwritten before the commit.
    OneFooter,
    /// An inode that loses its last name is not listed as an orphan.
    OrphanNotListed,
    /// The checksum of a log's entry covers its header only, and one fence covers header and payload.
    EntryPayloadUnchecked,
    /// A record is valid by its header, which is written last and not fenced from its payload.
    RecordMark,
    /// A record and its changes in place share a fence.
    RecordInSameFence,
    /// Recovery's replayed ranges and the empty journal share a fence.
    ReplayInSameFence,
    /// A mount's write that the daemon carries out leaves the bytes that the kernel copied into its pages.
    KernelPagesForwarded,
    /// A mount gives a lease back without checking for reads by the kernel while its pages were dropped.
    KernelReadMissed,
    /// A grant that is recalled before it arrives is given back at once, though data read under the read
    /// lease that it replaces is still cached.
    SuccessorAhead,
    /// The no-op entry of an abandoned number claims that all lower numbers are committed.
    NoopClaimsStable,
    /// The page in which a waiting write of the kernel ends is kept, even if it is up to date.
    KernelTailKept,
    /// A read of the kernel that overtook a write leaves the old bytes in its page.
    KernelReadKept,
    /// Such a read counts as handled before its page is dropped: a concurrent write does not wait for that.
    KernelReadForgotten,
    /// A mount gives a lease back before the kernel's pages are dropped if a call of the kernel waits for
    /// more.
    KernelLetGo,
    /// A thread that waits for an upcall checks the queue, and begins to wait in a second step.
    UpcallUnseen,
    /// Upcalls still in the queue are lost when it is closed.
    UpcallsLostAtClose,
    /// A window of a user's segments is announced although its blocks were replaced while it was copied.
    SegmentStale,
    /// A place in a user's segments is reused before all sessions have forgotten its old contents.
    SegmentReusedEarly,
    /// A read without a lock counts although the inode was changed meanwhile.
    TriedReadOvertaken,
    /// A read without a lock counts although the session was sealed meanwhile.
    TriedReadSealed,
    /// A late call is judged by the seal of the session that ended last, not of its own session.
    LateCallOfAnother,
    /// A block of NVM is trusted although its first read did not compare it.
    NvmBelieved,
    /// The bytes that a partial write keeps of a block of NVM are not compared before the block gets a new
    /// checksum.
    MergeBelieved,

    // The second list.
    /// The checksum of a log's entry leaves out the last line of its payload where that is not full.
    EntryTailUnchecked,
    /// The scan of a sealed log ignores the stable-below numbers of its entries.
    GapBelowStable,
    /// `fsync` syncs the lane of its own thread only.
    SyncOwnLane,
    /// `fsync` goes on from the page after the one in which the last `fsync` ended.
    SyncFromNextPage,
    /// The unsynced part of a chunk is forgotten when its lane leaves the chunk.
    LeftChunkUnsynced,
    /// A number is marked in flight only after it was taken, not before.
    NumberBeforeFlight,
    /// Each entry of a transaction counts on its own.
    TransactionInParts,
    /// A full chunk is reused without checking whether it is digested.
    ChunkBackEarly,
    /// A lease passes on when its holder's log is digested up to the entry before the last one about the
    /// inode.
    HandOverShort,
    /// The row of a returned lease is removed in a transaction of its own, before the digest.
    RowGoneBeforeDigest,
    /// A client takes the number after the last one that a seal covers as covered.
    SealCoversNext,
    /// The digested number is committed after the operations.
    NumberAfterOps,
    /// Of several truncations in one batch the last one counts, not the shortest.
    CutForgotten,
    /// New metadata blocks are written after new data was made durable: they share the fence of the record.
    NodesUnfenced,
    /// The record is stored before the data that it refers to is durable, and made durable after it.
    RecordBeforePayload,
    /// Changes in place are not fenced by the thread that made them.
    InPlaceUnfenced,
    /// Of a transaction's writes to NVM, only the last range is synced.
    RangeNotMerged,
    /// The checksum of a record leaves out the last line of its payload where that is not full.
    RecordTailUnchecked,
    /// Both copies of the journal's header are written before one fence and sync.
    TwoHeadersOneFence,
    /// The checksum of the journal's header covers its name and sequence, not the tail.
    HeaderSumShort,
    /// The header with the new tail is stored before the changes of the released records are durable in
    /// place.
    TailWrittenEarly,
    /// A record that does not fit behind the last one starts at the beginning of the ring without checking
    /// the tail.
    RingOverTail,
    /// Replay does not go on at the start of the ring.
    ReplayNoWrap,
    /// Recovery does not free files without a name.
    OrphansLeftAtStart,
    /// A unit with holes is opened without the checksums of the blocks left in it.
    HolesWithoutSums,
    /// An emptied unit is trimmed without checking whether it was opened again.
    TrimOpened,
    /// A device to which data moved is not flushed before the commit.
    MoveNotFlushed,
    /// A file that is freed in several transactions leaves the list of orphans in the first one.
    OrphanLeavesEarly,
    /// A file that a rename replaces keeps its link count where it has other names.
    VictimKeepsLink,
    /// Repair frees unused blocks in its first pass, before everything is saved.
    RepairFreesFirst,

    // Overwrites in place.
    /// A block is overwritten in place although an operation of the same batch changed a part of it.
    PartialInPlace,
    /// The redone entry is one that the daemon saw, not one that is known to be durable.
    UnsettledInPlace,
    /// Blocks are overwritten when they are queued, before the record is ready.
    InPlaceEarly,
    /// Overwritten blocks and the record share a fence.
    InPlaceNotFenced,
    /// A reader in the daemon accepts a block that it read during an overwrite.
    ReadBesideInPlace,
    /// A client accepts a block that it read from the shared area, though its log has held the whole block
    /// since, with which the daemon may have overwritten it.
    ReadUnderOverwrite,
    /// Files whose blocks were overwritten in place are not reported as changed.
    InPlaceNotTold,
    /// An extent that shares a run does not count.
    ShareNotCounted,
    /// A run is freed when one extent is left that names it.
    SharedFreedEarly,
    /// An extent that names a run no more still counts.
    SharedNotReleased,
    /// Blocks of a shared extent are overwritten in place.
    SharedInPlace,
    /// Readers of other files that share a block are not told that it was moved.
    SharedMoveNotTold,
    /// Counts of shared runs are durable in a record before that of the extents.
    CountBeforeExtents,
    /// Counts of shared runs are durable in a record after that of the extents.
    ExtentsBeforeCount,
    /// Blocks that the last owner of a shared run takes back for itself are freed with the run.
    UnshareFreesLast,
    /// Of several shares in a record, a later one does not see what earlier ones have changed of its source.
    ShareSeesCommitted,
    /// An undo of shares that copies neighbouring pieces to one place frees blocks that other extents name.
    RejoinFreesShared,
    /// A defragmentation moves and frees blocks that other extents name.
    DefragMovesShared,
    /// The copies of a defragmentation are not flushed before the record that names them.
    DefragNotFlushed,

    // Names and attributes in the kernel above a mount.
    /// A lease is released though the kernel may still use cached replies that depend on it.
    RecallBeforeExpiry,
    /// A reply gets a timeout though a lease was recalled since its operation.
    ReplyAcrossRecall,
    /// Other sessions change what a mount's session held, as soon as that session was sealed.
    ChangeAfterSealedMount,
    /// Other sessions change what a mount's session gave back, while its kernel may still use cached replies.
    ChangeWhileCached,
    /// A mount gives a lease back and does not say that its kernel may still use cached replies.
    CachedNotTold,
    /// The request of one thread counts as a sign that another has taken its reply in.
    SignOfAnother,

    // Several devices a tier.
    /// The row of a device that is added is durable before its label.
    RowBeforeLabel,
    /// The label of a device that is added is not flushed before its row is durable.
    LabelNotFlushed,
    /// The superblock does not get the feature of the first device that is added.
    DevicesNotInSuperblock,
    /// A device is taken out while blocks that were freed on it may still be read.
    TakenOutWhileRead,
    /// Of several devices of a tier, only the first is flushed before the commit.
    OneDeviceFlushed,
    /// A session's own read of a device counts although the file's places are others afterwards.
    DeviceReadOvertaken,
    /// A session does not compare what it reads from a device with its checksums.
    DeviceReadUnverified,
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

    /// Sets how many operations a digest of this thread puts into one record at most, from here on.
    pub fn set_record_ops(most: usize) {
        RECORD_OPS.set(most);
    }

    /// Returns that limit.
    #[must_use]
    pub fn record_ops() -> usize {
        RECORD_OPS.get()
    }

    /// Returns the bug armed in this thread: a thread started on its behalf arms it too.
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

    /// Does nothing: no bug can be armed in this build.
    #[inline(always)]
    pub const fn arm(_bug: Option<Bug>) {}

    /// Does nothing in this build.
    #[inline(always)]
    pub const fn set_record_ops(_most: usize) {}

    /// Returns the largest number: as many operations as fit.
    #[inline(always)]
    #[must_use]
    pub const fn record_ops() -> usize {
        usize::MAX
    }

    /// Returns `None`.
    #[inline(always)]
    #[must_use]
    pub const fn current() -> Option<Bug> {
        None
    }

    /// Returns `false`.
    #[inline(always)]
    #[must_use]
    pub const fn armed(_bug: Bug) -> bool {
        false
    }
}

pub use switch::{arm, armed, current, record_ops, set_record_ops};

/// Whether a test scheduler finds `bug`, which makes one of `works` fail: the works run in turn under random
/// schedules and under schedules by priorities, until one fails. Prints the number of schedules. The bound is
/// far beyond the need of any bug; it lets the search for an undetected bug end too.
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
