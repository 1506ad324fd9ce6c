//! Merging the chunks in sequence order: batches to digest, and the place where a log is sealed.

use super::cursor::{Head, Walker, is_sound, is_sound_at, stable_below};
use super::{Cursors, LogBytes, ScanError};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use varve_format::log::{OpCode, TX_ENTRIES_MAX, entry_size};
use varve_format::seeded::{Bug, armed};
use varve_format::{
    EntryFlags, EntryHeader, LogOp, LogSeq, SEAL_MISSING_MAX, Seal, SeqRange, SessionId, TxId,
};

/// Bytes of one arena block that payloads are copied to.
const ARENA_BYTES: usize = 8 << 20;
/// Blocks that are kept for the next batches.
const SPARE_BLOCKS_MAX: usize = 12;

/// Limits of one [`gather`].
#[derive(Debug, Clone, Copy)]
pub struct GatherLimits {
    /// Payload bytes; a batch may exceed them by one transaction.
    pub bytes: usize,
    /// Entries; those that are not writes count twice, because they cost more. A batch may exceed the limit
    /// by one transaction.
    pub entries: usize,
    /// Payloads of writes with at least this number of bytes are left in the log: see [`Entry::left_at`].
    /// Applies only to logs in use.
    pub leave_bytes: usize,
}

impl GatherLimits {
    /// Returns these limits, but such that no payload is left in the log.
    #[must_use]
    pub const fn copying_all(self) -> Self {
        Self {
            leave_bytes: usize::MAX,
            ..self
        }
    }

    fn leaves(&self, header: &EntryHeader) -> bool {
        header.payload_len.get() as usize >= self.leave_bytes && LogOp::parse_write(header).is_ok()
    }
}

impl Default for GatherLimits {
    fn default() -> Self {
        Self {
            bytes: 32 << 20,
            entries: 8192,
            leave_bytes: usize::MAX,
        }
    }
}

/// The entries of a log that count.
#[derive(Debug, Clone, Copy)]
pub enum BatchLimit<'s> {
    /// The log is in use: entries up to the first missing number, and at most up to this one.
    Live(Option<LogSeq>),
    /// The log is sealed: the entries that the seal covers.
    Sealed(&'s Seal),
}

/// One entry, copied out of the log; its checksum is right, unless its payload was left there.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The header.
    pub header: EntryHeader,
    payload: Payload,
}

/// The location of an entry's payload.
#[derive(Debug, Clone, Copy)]
enum Payload {
    /// In this block of the batch's arena, from this byte on.
    Copied { block: u32, start: u32 },
    /// From this byte of the log on.
    LogResident { at: u64 },
}

impl Entry {
    /// Returns its number.
    #[must_use]
    pub const fn seq(&self) -> LogSeq {
        LogSeq(self.header.seq.get())
    }

    /// Returns its flags; unknown bits make [`LogOp::parse`] fail.
    #[must_use]
    pub const fn flags(&self) -> EntryFlags {
        EntryFlags::from_bits_truncate(self.header.flags)
    }

    /// Returns the number below which, as its writer knew, all entries were committed.
    #[must_use]
    pub const fn stable_below(&self) -> LogSeq {
        stable_below(&self.header)
    }

    /// Returns the offset of its payload in the log if the payload was left there, as is done for writes. The
    /// entry's checksum is not verified then. A caller that uses the entry must read the payload and verify
    /// the checksum before any result becomes durable. If the checksum is wrong, the results are void, and
    /// the log is to be gathered again, [copying all](GatherLimits::copying_all).
    #[must_use]
    pub const fn left_at(&self) -> Option<u64> {
        match self.payload {
            Payload::Copied { .. } => None,
            Payload::LogResident { at } => Some(at),
        }
    }

    /// Returns whether the header has the right checksum for a payload with the checksum `payload_crc`, which
    /// begins with [`crc_seed`](varve_format::log::crc_seed) of the session.
    #[must_use]
    pub fn is_sound(&self, payload_crc: u32) -> bool {
        is_sound(&self.header, payload_crc)
    }

    /// Returns whether the entry is sound. Reads its payload if it was left in `log`, the log of `session`.
    ///
    /// # Errors
    /// Only the device's.
    pub fn is_sound_in<L: LogBytes>(&self, log: &L, session: SessionId) -> Result<bool, ScanError<L::Error>> {
        self.left_at()
            .map_or(Ok(true), |at| is_sound_at(log, session, &self.header, at))
    }
}

/// Entries that take effect together or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transaction {
    /// Index of the first entry in [`Batch::entries`].
    pub first: usize,
    /// Entries.
    pub len: usize,
}

/// Returns the newest journal transaction that an entry may rest on. Called after the entry was read:
/// transactions commit while a log is read, and the session appends entries that rest on them.
pub type NewestTx<'n> = &'n dyn Fn() -> TxId;

/// The reason why a scan left entries out; the caller reports each one once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// An entry says that all numbers below its `stable_below` were committed, and some of them are missing.
    #[error("entry {seq} was written after {missing}, which is not in the log")]
    Gap {
        /// The entry.
        seq: LogSeq,
        /// First number that is missing.
        missing: LogSeq,
    },
    /// More missing runs than there are lanes, or a run longer than any writer leaves.
    #[error("more than {SEAL_MISSING_MAX} gaps, or one of 2^32 numbers, before entry {0}")]
    TooManyGaps(LogSeq),
    /// An entry rests on a journal transaction that is not in the journal.
    #[error("entry {seq} rests on transaction {base}, which the journal does not have")]
    FutureBase {
        /// The entry.
        seq: LogSeq,
        /// The transaction.
        base: TxId,
    },
    /// The entries of a transaction do not count down to its end.
    #[error("the transaction around entry {0} contradicts itself")]
    BrokenTransaction(LogSeq),
    /// The seal covers this number, but its entry is no longer in the log: neither it nor later entries
    /// count.
    #[error("sealed entry {0} is not in the log: it and what follows is lost")]
    SealedEntryGone(LogSeq),
}

/// A transaction that is left out of a batch although its numbers are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Its first entry.
    pub seq: LogSeq,
    /// Why.
    pub why: Damage,
}

/// Entries to digest, in sequence order.
#[derive(Debug, Default)]
pub struct Batch {
    /// The session that wrote the entries.
    pub session: SessionId,
    /// Entries.
    pub entries: Vec<Entry>,
    /// Their transactions.
    pub transactions: Vec<Transaction>,
    /// Last number that is used up when the batch is digested. Equal to the number given to [`gather`] if
    /// there is nothing to digest.
    pub upto: LogSeq,
    /// Transactions left out.
    pub refused: Vec<Refused>,
    /// Further entries were left for the next batch.
    pub more: bool,
    /// Bytes of the entries in the log.
    pub log_bytes: u64,
    /// Start of the next scan, once this batch has been digested.
    pub cursors: Cursors,
    arena: Arena,
}

impl Batch {
    /// Returns body and data of an entry of this batch; empty if they were left in the log.
    #[must_use]
    pub fn payload(&self, entry: &Entry) -> &[u8] {
        let Payload::Copied { block, start } = entry.payload else {
            return &[];
        };
        let start = start as usize;
        &self.arena.blocks[block as usize][start..start + entry.header.payload_len.get() as usize]
    }

    /// Returns the operation of an entry, without its data if the payload was left in the log.
    ///
    /// # Errors
    /// The entry is malformed: no writer would have written it.
    pub fn op(&self, entry: &Entry) -> Result<LogOp<'_>, varve_format::log::LogFormatError> {
        match entry.payload {
            Payload::Copied { .. } => LogOp::parse(&entry.header, self.payload(entry)),
            Payload::LogResident { .. } => LogOp::parse_write(&entry.header),
        }
    }
}

/// The payloads of a batch, in blocks that later batches reuse, so that a block is zeroed and faulted in only
/// once. A batch may be dropped by another thread than the one that gathered it, so all threads share the
/// spare blocks.
#[derive(Debug, Default)]
struct Arena {
    blocks: Vec<Vec<u8>>,
    /// Bytes used of the last block.
    used: usize,
}

static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Returns the spare blocks. A poisoned lock is harmless: blocks are only taken and put under it, so a panic
/// leaves the list whole.
fn spare() -> MutexGuard<'static, Vec<Vec<u8>>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Arena {
    /// Makes room for `need` bytes; returns the index of the block, and the offset in it.
    fn room(&mut self, need: usize) -> (usize, usize) {
        if self
            .blocks
            .last()
            .is_none_or(|block| block.len() - self.used < need)
        {
            let known = {
                let mut spare = spare();
                let at = spare.iter().rposition(|block| block.len() >= need);
                at.map(|at| spare.swap_remove(at))
            };
            // The first block is small, as most batches are.
            let len = if self.blocks.is_empty() {
                64 << 10
            } else {
                ARENA_BYTES
            };
            self.blocks.push(known.unwrap_or_else(|| vec![0; need.max(len)]));
            self.used = 0;
        }
        (self.blocks.len() - 1, self.used)
    }
}

impl Arena {
    /// Copies the payload of `head`, a possible entry, or leaves it in the log. Returns `None` if `head` is
    /// no entry.
    fn take_in<L: LogBytes>(
        &mut self,
        walker: &Walker<'_, L>,
        head: &Head,
        limits: &GatherLimits,
    ) -> Result<Option<Payload>, ScanError<L::Error>> {
        if limits.leaves(&head.header) {
            return Ok(Some(Payload::LogResident {
                at: walker.payload_at(head),
            }));
        }
        let len = head.payload_len();
        let (block, start) = self.room(len);
        if !walker.copy_payload(head, &mut self.blocks[block][start..start + len])? {
            return Ok(None);
        }
        self.used += len;
        Ok(Some(Payload::Copied {
            block: block as u32,
            start: start as u32,
        }))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        let dropped: Vec<_> = {
            let mut spare = spare();
            spare.append(&mut self.blocks);
            let keep = spare.len().min(SPARE_BLOCKS_MAX);
            spare.drain(keep..).collect()
        };
        // Outside the lock, because memory goes back to the system.
        drop(dropped);
    }
}

/// The result of [`seal_scan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealScan {
    /// Where the log ends.
    pub seal: Seal,
    /// The damage that ends the log; `None` if it ends without damage.
    pub damage: Option<Damage>,
    /// Number of entries above the digested number that count.
    pub entries: u64,
}

/// Heads of all chunks, lowest number first.
struct Heads {
    heap: BinaryHeap<Reverse<(u64, usize)>>,
    heads: Vec<Option<Head>>,
}

impl Heads {
    fn new<L: LogBytes>(walker: &Walker<'_, L>) -> Result<Self, ScanError<L::Error>> {
        let mut heads = Self {
            heap: BinaryHeap::new(),
            heads: vec![None; walker.chunks()],
        };
        for chunk in 0..walker.chunks() {
            heads.refill(walker, chunk)?;
        }
        Ok(heads)
    }

    fn refill<L: LogBytes>(
        &mut self,
        walker: &Walker<'_, L>,
        chunk: usize,
    ) -> Result<(), ScanError<L::Error>> {
        self.heads[chunk] = walker.peek(chunk)?;
        if let Some(head) = self.heads[chunk] {
            self.heap.push(Reverse((head.seq(), chunk)));
        }
        Ok(())
    }

    fn lowest(&self) -> Option<Head> {
        let Reverse((_, chunk)) = self.heap.peek()?;
        self.heads[*chunk]
    }

    fn pop(&mut self) {
        if let Some(Reverse((_, chunk))) = self.heap.pop() {
            self.heads[chunk] = None;
        }
    }
}

/// The effect of an entry on a [`Chain`].
enum Link {
    /// The transaction goes on.
    Open,
    /// The transaction is whole.
    Whole,
    /// The entry belongs to no transaction that can become whole.
    Broken,
}

/// Assembles entries into transactions: `tx_left` counts down over consecutive numbers.
#[derive(Default)]
struct Chain<T> {
    /// Number and `tx_left` of the last entry.
    last: Option<(u64, u32)>,
    entries: Vec<T>,
}

impl<T> Chain<T> {
    const fn new() -> Self {
        Self {
            last: None,
            entries: Vec::new(),
        }
    }

    /// Returns whether an entry with this header continues the open transaction, or none is open.
    fn leads_to(&self, header: &EntryHeader) -> bool {
        self.last.is_none_or(|(seq, left)| {
            seq + 1 == header.seq.get() && left.checked_sub(1) == Some(header.tx_left.get())
        })
    }

    /// Adds an entry that the chain [leads to](Self::leads_to).
    fn push(&mut self, header: &EntryHeader, entry: T) -> Link {
        if armed(Bug::TransactionInParts) {
            self.entries.push(entry);
            return Link::Whole;
        }
        let left = header.tx_left.get();
        let orphaned = self.last.is_none() && header.flags & EntryFlags::CONTINUES.bits() != 0;
        if left >= TX_ENTRIES_MAX || orphaned {
            return Link::Broken;
        }
        self.entries.push(entry);
        if left == 0 {
            self.last = None;
            Link::Whole
        } else {
            self.last = Some((header.seq.get(), left));
            Link::Open
        }
    }

    /// Gives up the open transaction and returns its entries.
    fn take(&mut self) -> Vec<T> {
        self.last = None;
        std::mem::take(&mut self.entries)
    }
}

/// The number of the next entry.
struct Expect<'s> {
    next: u64,
    cut: BatchLimit<'s>,
}

impl Expect<'_> {
    /// Returns the number wanted, or `None` behind the last number that counts.
    fn wanted(&mut self) -> Option<u64> {
        match self.cut {
            BatchLimit::Live(limit) => limit
                .is_none_or(|limit| self.next <= limit.0)
                .then_some(self.next),
            BatchLimit::Sealed(seal) => {
                for run in &seal.missing {
                    if run.contains(LogSeq(self.next)) {
                        self.next = run.last.0.saturating_add(1);
                    }
                }
                (self.next <= seal.last.0).then_some(self.next)
            }
        }
    }
}

/// Copies entries above `digested` out of the log, as far as `cut` and `limits` allow. Ends with whole
/// transactions only.
///
/// A transaction that rests on a journal transaction above `newest_tx` (called after the entry was read) is
/// left out and listed in [`Batch::refused`]; so is one that contradicts itself. An entry that has vanished
/// from a sealed log is listed there, too, and ends the log.
///
/// In a log in use, payloads may be left where they are ([`GatherLimits::leave_bytes`]). An entry with such a
/// payload is verified here unless a later entry says that it was committed: its thread may still be writing
/// it. An unverified entry never causes a refusal: the log is gathered again with all payloads copied first.
///
/// # Errors
/// Only the device's.
pub fn gather<L: LogBytes>(
    log: &L,
    session: SessionId,
    digested: LogSeq,
    newest_tx: NewestTx<'_>,
    cut: BatchLimit<'_>,
    limits: &GatherLimits,
    cursors: &Cursors,
) -> Result<Batch, ScanError<L::Error>> {
    let walker = || Walker::new(log, session, cursors);
    if limits.leave_bytes != usize::MAX && matches!(cut, BatchLimit::Live(_)) {
        let batch = gather_from(walker()?, session, digested, newest_tx, cut, limits)?;
        if batch.refused.is_empty() && batch.is_confirmed(log, session)? {
            return Ok(batch);
        }
    }
    gather_from(
        walker()?,
        session,
        digested,
        newest_tx,
        cut,
        &limits.copying_all(),
    )
}

/// As [`gather`], from the position of the walker; does not verify entries whose payloads `limits` leave in
/// the log.
fn gather_from<L: LogBytes>(
    mut walker: Walker<'_, L>,
    session: SessionId,
    digested: LogSeq,
    newest_tx: NewestTx<'_>,
    cut: BatchLimit<'_>,
    limits: &GatherLimits,
) -> Result<Batch, ScanError<L::Error>> {
    let mut heads = Heads::new(&walker)?;
    let mut batch = Batch {
        session,
        upto: digested,
        cursors: walker.cursors.clone(),
        ..Batch::default()
    };
    let mut chain = Chain::new();
    let mut expect = Expect {
        next: digested.0.saturating_add(1),
        cut,
    };
    let (mut taken_bytes, mut taken_entries) = (0, 0);
    let mut skipped = Vec::new();
    let mut newest = TxId::default();
    // Chunks whose cursors have moved since they were copied to the batch.
    let mut moved = Vec::new();
    while let Some(wanted) = expect.wanted() {
        let head = heads.lowest();
        if head.is_none_or(|head| head.seq() > wanted) {
            let BatchLimit::Sealed(seal) = cut else { break };
            // A power cut took the entry, and may have left later entries in other chunks: they must not
            // count without it.
            batch.refuse(&mut chain, wanted, Damage::SealedEntryGone(LogSeq(wanted)));
            batch.upto = seal.last;
            break;
        }
        let Some(head) = head else { break };
        heads.pop();
        if head.seq() < wanted {
            // Digested before, not covered by the seal, or a second entry with the same number: skipped.
            skipped.resize(skipped.len().max(head.payload_len()), 0);
            if walker.copy_payload(&head, &mut skipped[..head.payload_len()])? {
                walker.step(&head);
                moved.push(head.chunk);
                heads.refill(&walker, head.chunk)?;
            }
            continue;
        }
        let Some(payload) = batch.arena.take_in(&walker, &head, limits)? else {
            continue;
        };
        walker.step(&head);
        moved.push(head.chunk);
        heads.refill(&walker, head.chunk)?;
        expect.next = wanted + 1;
        taken_bytes += head.payload_len();
        taken_entries += if head.header.op == OpCode::Write as u8 {
            1
        } else {
            2
        };
        let entry = Entry {
            header: head.header,
            payload,
        };
        if !chain.leads_to(&head.header) {
            batch.refuse(&mut chain, wanted, Damage::BrokenTransaction(LogSeq(wanted)));
        }
        match chain.push(&head.header, entry) {
            Link::Open => continue,
            Link::Whole => {
                batch.accept(&chain.entries, &mut newest, newest_tx);
                chain.entries.clear();
            }
            Link::Broken => batch.refuse(&mut chain, wanted, Damage::BrokenTransaction(LogSeq(wanted))),
        }
        batch.upto = LogSeq(wanted);
        for chunk in moved.drain(..) {
            batch.cursors.chunks[chunk] = walker.cursors.chunks[chunk];
        }
        if taken_bytes >= limits.bytes || taken_entries >= limits.entries {
            batch.more = expect.wanted().is_some();
            break;
        }
    }
    Ok(batch)
}

impl Batch {
    /// Adds a transaction to the batch, or refuses it if it rests on a missing journal transaction. `newest`
    /// is the last answer of `newest_tx`, which only grows: entries that rest on it or below need no new
    /// call.
    fn accept(&mut self, transaction: &[Entry], newest: &mut TxId, newest_tx: NewestTx<'_>) {
        let Some(first) = transaction.first() else { return };
        let later = |newest: TxId| {
            transaction
                .iter()
                .find(|entry| entry.header.base.get() > newest.0)
        };
        if later(*newest).is_some() {
            *newest = newest_tx();
        }
        if let Some(entry) = later(*newest) {
            self.refused.push(Refused {
                seq: first.seq(),
                why: Damage::FutureBase {
                    seq: entry.seq(),
                    base: TxId(entry.header.base.get()),
                },
            });
            return;
        }
        self.transactions.push(Transaction {
            first: self.entries.len(),
            len: transaction.len(),
        });
        self.log_bytes += transaction
            .iter()
            .map(|entry| entry_size(entry.header.payload_len.get() as usize) as u64)
            .sum::<u64>();
        self.entries.extend_from_slice(transaction);
    }

    /// Returns whether every entry is sound whose payload was left in the log and which no entry confirms as
    /// committed.
    fn is_confirmed<L: LogBytes>(&self, log: &L, session: SessionId) -> Result<bool, ScanError<L::Error>> {
        let below = self.entries.iter().map(Entry::stable_below).max();
        let behind = self.entries.iter().rev();
        let unsure = behind.take_while(|entry| below.is_none_or(|below| entry.seq() >= below));
        for entry in unsure {
            if !entry.is_sound_in(log, session)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Refuses the open transaction of `chain`, and drops it.
    fn refuse(&mut self, chain: &mut Chain<Entry>, seq: u64, why: Damage) {
        let dropped = chain.take();
        let seq = dropped.first().map_or(LogSeq(seq), Entry::seq);
        self.refused.push(Refused { seq, why });
    }
}

/// Finds the end of a log whose session can no longer write. All committed entries count. Reads the log from
/// `cursors` on, and keeps no payload.
///
/// # Errors
/// Only the device's.
pub fn seal_scan<L: LogBytes>(
    log: &L,
    session: SessionId,
    digested: LogSeq,
    newest_tx: NewestTx<'_>,
    cursors: &Cursors,
) -> Result<SealScan, ScanError<L::Error>> {
    let mut walker = Walker::new(log, session, cursors)?;
    let mut heads = Heads::new(&walker)?;
    let mut found = SealScan {
        seal: Seal {
            last: digested,
            missing: Vec::new(),
        },
        damage: None,
        entries: 0,
    };
    let mut chain = Chain::new();
    // Highest number seen: a second entry with the same number does not count.
    let mut seen = digested.0;
    let mut payload = Vec::new();
    while let Some(head) = heads.lowest() {
        heads.pop();
        payload.resize(payload.len().max(head.payload_len()), 0);
        if !walker.copy_payload(&head, &mut payload[..head.payload_len()])? {
            continue;
        }
        walker.step(&head);
        heads.refill(&walker, head.chunk)?;
        if head.seq() <= seen {
            continue;
        }
        seen = head.seq();
        if !chain.leads_to(&head.header) {
            chain.take();
        }
        match chain.push(&head.header, head.header) {
            Link::Open => {}
            Link::Broken => {
                chain.take();
            }
            Link::Whole => {
                if let Err(damage) = found.accept(&chain.take(), newest_tx()) {
                    found.damage = Some(damage);
                    break;
                }
            }
        }
    }
    if found.damage.is_none() {
        // A chunk ends at the first bytes that are no entry. An entry behind them that was acknowledged after
        // entries that are missing is a sign of damage.
        for chunk in 0..walker.chunks() {
            if let Some(header) = walker.hidden(chunk, found.seal.last)? {
                found.damage = Some(Damage::Gap {
                    seq: LogSeq(header.seq.get()),
                    missing: found.seal.last.next(),
                });
                break;
            }
        }
    }
    Ok(found)
}

impl SealScan {
    fn accept(&mut self, transaction: &[EntryHeader], newest_tx: TxId) -> Result<(), Damage> {
        let (Some(first), Some(last)) = (transaction.first(), transaction.last()) else {
            return Ok(());
        };
        let seq = LogSeq(first.seq.get());
        let gap = (self.seal.last.next() < seq).then(|| SeqRange {
            first: self.seal.last.next(),
            last: LogSeq(seq.0 - 1),
        });
        let lowest_gap = self.seal.missing.first().or(gap.as_ref());
        for header in transaction {
            let base = TxId(header.base.get());
            if base > newest_tx {
                return Err(Damage::FutureBase { seq, base });
            }
            if let Some(missing) = lowest_gap
                && missing.first < stable_below(header)
                && !armed(Bug::GapBelowStable)
            {
                return Err(Damage::Gap {
                    seq,
                    missing: missing.first,
                });
            }
        }
        if let Some(gap) = gap {
            let too_long = gap.last.0 - gap.first.0 >= u64::from(u32::MAX);
            if self.seal.missing.len() >= SEAL_MISSING_MAX || too_long {
                return Err(Damage::TooManyGaps(seq));
            }
            self.seal.missing.push(gap);
        }
        self.seal.last = LogSeq(last.seq.get());
        self.entries += transaction.len() as u64;
        Ok(())
    }
}
