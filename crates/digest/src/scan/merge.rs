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

/// How much one [`gather`] may take.
#[derive(Debug, Clone, Copy)]
pub struct GatherLimits {
    /// Payload bytes; a batch may pass it by one transaction.
    pub bytes: usize,
    /// Entries, those that are not writes twice: they cost more. A batch may pass it by one transaction.
    pub entries: usize,
    /// Payloads of writes that are at least so long are left in the log: see [`Entry::left_at`]. Only of logs
    /// in use.
    pub leave_bytes: usize,
}

impl GatherLimits {
    /// Leaves nothing in the log.
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

/// Which entries count.
#[derive(Debug, Clone, Copy)]
pub enum BatchLimit<'s> {
    /// The log is in use: everything up to the first missing number, or up to this one.
    Live(Option<LogSeq>),
    /// The log is sealed: what the seal covers.
    Sealed(&'s Seal),
}

/// One entry, copied out of the log; its checksum is right, unless its payload was left there.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The header.
    pub header: EntryHeader,
    payload: Payload,
}

/// Where the payload of an entry is.
#[derive(Debug, Clone, Copy)]
enum Payload {
    /// In this block of the batch's arena, from this byte on.
    Copied { block: u32, start: u32 },
    /// From this byte of the log on.
    LogResident { at: u64 },
}

impl Entry {
    /// Its number.
    #[must_use]
    pub const fn seq(&self) -> LogSeq {
        LogSeq(self.header.seq.get())
    }

    /// Its flags; unknown bits make [`LogOp::parse`] fail.
    #[must_use]
    pub const fn flags(&self) -> EntryFlags {
        EntryFlags::from_bits_truncate(self.header.flags)
    }

    /// Its writer knew that all entries below this number were committed.
    #[must_use]
    pub const fn stable_below(&self) -> LogSeq {
        stable_below(&self.header)
    }

    /// Where in the log its payload is, if it was left there: those of writes are. Whether the entry is one
    /// at all (its checksum) has not been seen then. Whoever acts on it reads the payload and looks, before
    /// anything that follows from it becomes durable; if it is none, that counts for nothing, and the log is
    /// to be gathered again, [copying all](GatherLimits::copying_all).
    #[must_use]
    pub const fn left_at(&self) -> Option<u64> {
        match self.payload {
            Payload::Copied { .. } => None,
            Payload::LogResident { at } => Some(at),
        }
    }

    /// Checksum of the entry whose payload has the checksum `payload_crc`, as it must be in the header.
    /// `payload_crc` begins with [`crc_seed`](varve_format::log::crc_seed) of the session.
    #[must_use]
    pub fn is_sound(&self, payload_crc: u32) -> bool {
        is_sound(&self.header, payload_crc)
    }

    /// Whether it is an entry, of which the payload is read for it if it was left in `log`, the log of
    /// `session`.
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

/// The newest journal transaction that an entry may rest on. Asked for after the entry was read: while a log
/// is read, transactions commit, and its session goes on with them as the base of what it appends.
pub type NewestTx<'n> = &'n dyn Fn() -> TxId;

/// Why a scan left something out; each is reported once by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// An entry says that everything below `stable_below` was committed, and some of it is not there.
    #[error("entry {seq} was written after {missing}, which is not in the log")]
    Gap {
        /// The entry.
        seq: LogSeq,
        /// First number that is missing.
        missing: LogSeq,
    },
    /// More missing runs than there are lanes, or one that no writer would have left.
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
    /// The seal covers this number, and it is not in the log any more: neither it nor what follows counts.
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
    /// Whose.
    pub session: SessionId,
    /// Entries.
    pub entries: Vec<Entry>,
    /// Their transactions.
    pub transactions: Vec<Transaction>,
    /// Everything up to here is used up when the batch is digested. Equal to the number given to [`gather`]
    /// if there is nothing.
    pub upto: LogSeq,
    /// Transactions left out.
    pub refused: Vec<Refused>,
    /// Entries that follow were left for the next batch.
    pub more: bool,
    /// Bytes of the entries in the log.
    pub log_bytes: u64,
    /// Where the next scan starts, once this batch has been digested.
    pub cursors: Cursors,
    arena: Arena,
}

impl Batch {
    /// Body and data of an entry of this batch; nothing, if they were left in the log.
    #[must_use]
    pub fn payload(&self, entry: &Entry) -> &[u8] {
        let Payload::Copied { block, start } = entry.payload else {
            return &[];
        };
        let start = start as usize;
        &self.arena.blocks[block as usize][start..start + entry.header.payload_len.get() as usize]
    }

    /// The operation of an entry; of one whose payload was left in the log, without its bytes.
    ///
    /// # Errors
    /// What no writer would have written.
    pub fn op(&self, entry: &Entry) -> Result<LogOp<'_>, varve_format::log::LogFormatError> {
        match entry.payload {
            Payload::Copied { .. } => LogOp::parse(&entry.header, self.payload(entry)),
            Payload::LogResident { .. } => LogOp::parse_write(&entry.header),
        }
    }
}

/// Where a batch keeps its payloads: blocks that are used again by the next batches, so that they are zeroed
/// and faulted in once. A batch may be dropped by another thread than the one that gathered it, so the
/// threads share them.
#[derive(Debug, Default)]
struct Arena {
    blocks: Vec<Vec<u8>>,
    /// Bytes used of the last block.
    used: usize,
}

static SPARE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// The spare blocks. Whoever panicked with them left them whole: they are only taken and put.
fn spare() -> MutexGuard<'static, Vec<Vec<u8>>> {
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Arena {
    /// Room for `need` bytes: the block, and where in it.
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
            // The first one is small, for the many batches that are.
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
    /// Copies the payload of what may be an entry, or leaves it in the log. `None`: it is no entry.
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
        // Not under the lock: memory goes back to the system.
        drop(dropped);
    }
}

/// What [`seal_scan`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealScan {
    /// Where the log ends.
    pub seal: Seal,
    /// Why what follows does not count, if it is not simply the end.
    pub damage: Option<Damage>,
    /// Entries that count, above what was digested.
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

/// What an entry did to a [`Chain`].
enum Link {
    /// The transaction goes on.
    Open,
    /// The transaction is whole.
    Whole,
    /// The entry belongs to no transaction that can become whole.
    Broken,
}

/// Puts entries together to transactions: `tx_left` counts down over consecutive numbers.
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

    /// Whether an entry with this header would go on where the chain is (or there is no chain).
    fn leads_to(&self, header: &EntryHeader) -> bool {
        self.last.is_none_or(|(seq, left)| {
            seq + 1 == header.seq.get() && left.checked_sub(1) == Some(header.tx_left.get())
        })
    }

    /// Takes an entry that the chain [leads to](Self::leads_to).
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

    /// Gives up what is open; its entries.
    fn take(&mut self) -> Vec<T> {
        self.last = None;
        std::mem::take(&mut self.entries)
    }
}

/// Which number comes next.
struct Expect<'s> {
    next: u64,
    cut: BatchLimit<'s>,
}

impl Expect<'_> {
    /// The number wanted, or `None` past the end of what counts.
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

/// Copies entries above `digested` out of the log, as far as `cut` says and `limits` allow. Ends with whole
/// transactions only.
///
/// A transaction that rests on a journal transaction above `newest_tx` (asked for after it was read) is left
/// out and named in [`Batch::refused`]; so is one that contradicts itself. In a sealed log an entry that has
/// gone since is named there too, and ends the log.
///
/// Of a log in use, payloads may be left where they are ([`GatherLimits::leave_bytes`]). Those whose entry no
/// later one says to have been committed before it are looked at here: their thread may be about to write
/// them. And nothing is refused by what was not looked at.
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

/// [`gather`] from where the walker stands; leaves unseen what `limits` say.
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
    // Chunks whose cursors have moved since the batch took them over.
    let mut moved = Vec::new();
    while let Some(wanted) = expect.wanted() {
        let head = heads.lowest();
        if head.is_none_or(|head| head.seq() > wanted) {
            let BatchLimit::Sealed(seal) = cut else { break };
            // A power cut took it, and may have left what came after it in other chunks: that must not count
            // without it.
            batch.refuse(&mut chain, wanted, Damage::SealedEntryGone(LogSeq(wanted)));
            batch.upto = seal.last;
            break;
        }
        let Some(head) = head else { break };
        heads.pop();
        if head.seq() < wanted {
            // Digested before, not covered by the seal, or a second entry with the same number: stepped over.
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
    /// `newest` is what was answered before: it only grows, so what rests on that rests on the newest one,
    /// too.
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

    /// Whether what was left in the log and no entry says to have been committed before it is whole.
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

    /// Drops what is open in `chain`.
    fn refuse(&mut self, chain: &mut Chain<Entry>, seq: u64, why: Damage) {
        let dropped = chain.take();
        let seq = dropped.first().map_or(LogSeq(seq), Entry::seq);
        self.refused.push(Refused { seq, why });
    }
}

/// Finds where a log ends, once its session may not write any more. Everything that was committed counts;
/// reads the log from where `cursors` stand, keeps nothing of it.
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
        // A chunk ends at the first entry that is none. If one behind it was acknowledged after others that
        // are not there, that is damage.
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
