//! Deferred payloads: data of a batch that stayed in the logs, copied to its place in one pass and
//! checksummed on the way. Decides only whether entries match their headers.
//!
//! # Invariants
//! - *Checksum before effect*: [`DeferredPayloads::are_sound`] checks every entry of a record before the
//!   record commits, and before any other effect of the plan becomes durable (pre-steps, refusals). Data
//!   written until then lies in free space, and the transaction is dropped.
//! - *The checked bytes are the written bytes*: an entry that is written whole and in order is checksummed as
//!   it is fetched. Any other entry (superseded in part or wholly, refused) is read once more; a client that
//!   changes its log between the two reads could have logged those bytes in the first place.
//! - *The log keeps them*: an honest client reuses log space only when its session page reports the space as
//!   digested, which happens after the commit.

use super::log::RegionLog;
use super::types::Source;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use varve_digest::{Batch, Entry, LogBytes, LogResident, Transaction};
use varve_format::LogSeq;
use varve_format::log::crc_seed;
use varve_format::seeded::{Bug, armed};
use varve_store::{PayloadSource, PayloadUnavailable};

/// Entries of one record that recovery finds for certain: those that had been committed when a later entry of
/// the same record was written. Recovery repeats overwrites in place from them, so a crash leaves no torn
/// block. Stored per source as a bound on entry indices.
#[derive(Debug, Default)]
pub(super) struct Redone {
    /// Per source: index of the first entry that recovery may not find.
    below: Vec<u32>,
}

impl Redone {
    /// Finds these entries in the transactions of each source. The check that they are sound follows before
    /// the record commits.
    pub(super) fn of<'t>(records: impl Iterator<Item = (&'t Batch, &'t [Transaction])>) -> Self {
        let below = records.map(|(batch, transactions)| {
            let entries = |of: &Transaction| &batch.entries[of.first..of.first + of.len];
            let bound = transactions
                .iter()
                .flat_map(entries)
                .map(Entry::stable_below)
                .max();
            let bound = if armed(Bug::UnsettledInPlace) {
                Some(LogSeq(u64::MAX))
            } else {
                bound
            };
            // A transaction is redone as a whole.
            let settled = |of: &&Transaction| {
                let last = entries(of).last().map(Entry::seq);
                last < bound
            };
            let first_not = transactions.iter().find(|of| !settled(of));
            let end = transactions.last().map_or(0, |last| last.first + last.len);
            first_not.map_or(end, |of| of.first) as u32
        });
        Self {
            below: below.collect(),
        }
    }

    /// Whether recovery finds the entry that contains these bytes for certain.
    pub(super) fn has(&self, bytes: LogResident) -> bool {
        self.below
            .get(bytes.source as usize)
            .is_some_and(|below| bytes.entry < *below)
    }
}

/// The bytes of an entry that have been fetched in order, and their checksum.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    bytes: usize,
    sum: u32,
}

/// The logs of some sources, for one record.
pub(super) struct DeferredPayloads<'a> {
    sources: &'a [Source<'a>],
    logs: Vec<RegionLog<'a>>,
    /// By source and entry, as far as payloads were fetched.
    seen: RefCell<Vec<Vec<Seen>>>,
    failed: Cell<bool>,
}

impl<'a> DeferredPayloads<'a> {
    /// Starts with nothing fetched.
    pub(super) fn new(sources: &'a [Source<'a>]) -> Self {
        Self {
            sources,
            logs: sources.iter().map(|source| RegionLog::new(source.log)).collect(),
            seen: RefCell::new(vec![Vec::new(); sources.len()]),
            failed: Cell::new(false),
        }
    }

    /// Returns the name of an entry's payload in [`PayloadSource`] calls.
    pub(super) const fn name(source: u32, entry: u32) -> u64 {
        (source as u64) << 32 | entry as u64
    }

    /// Whether a log could not be read.
    pub(super) const fn has_failed(&self) -> bool {
        self.failed.get()
    }

    /// Whether the entries of a source's batch that were left in its log are sound. `false` also where the
    /// log cannot be read.
    pub(super) fn are_sound(&self, source: usize, entries: Range<usize>) -> bool {
        let (batch, session) = (self.sources[source].batch, self.sources[source].client.session);
        let sound = |index: usize| {
            let entry = &batch.entries[index];
            if entry.left_at().is_none() {
                return true;
            }
            let seen = self.seen.borrow()[source].get(index).copied();
            match seen.filter(|seen| seen.bytes == entry.header.payload_len.get() as usize) {
                Some(seen) => entry.is_sound(seen.sum),
                // The entry was written in part, or not at all.
                None => entry
                    .is_sound_in(&self.logs[source], session)
                    .unwrap_or_else(|_| self.not_read()),
            }
        };
        entries.into_iter().all(sound)
    }

    fn not_read(&self) -> bool {
        self.failed.set(true);
        false
    }
}

impl PayloadSource for DeferredPayloads<'_> {
    fn fetch(&self, what: u64, skip: usize, out: &mut [u8]) -> Result<(), PayloadUnavailable> {
        let (source, index) = ((what >> 32) as usize, what as u32 as usize);
        let batch = self.sources.get(source).ok_or(PayloadUnavailable)?.batch;
        let at = batch
            .entries
            .get(index)
            .and_then(Entry::left_at)
            .ok_or(PayloadUnavailable)?;
        if self.logs[source].read(at + skip as u64, out).is_err() {
            self.not_read();
            return Err(PayloadUnavailable);
        }
        let mut seen = self.seen.borrow_mut();
        let seen = &mut seen[source];
        if seen.len() <= index {
            seen.resize(batch.entries.len(), Seen::default());
        }
        let seen = &mut seen[index];
        if seen.bytes == skip {
            if skip == 0 {
                seen.sum = crc_seed(self.sources[source].client.session);
            }
            seen.sum = self.logs[source].payload_crc(seen.sum, out);
            seen.bytes += out.len();
        }
        Ok(())
    }
}

/// Payload source of plans without a log.
pub(super) struct NoPayloads;

impl PayloadSource for NoPayloads {
    fn fetch(&self, _what: u64, _skip: usize, _out: &mut [u8]) -> Result<(), PayloadUnavailable> {
        Err(PayloadUnavailable)
    }
}
