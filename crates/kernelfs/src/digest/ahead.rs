//! Which old blocks a digest fetches before it begins a transaction: those on slower tiers that writes cover
//! in part. Decides nothing: a block that is named too many or too few costs time only.

use super::types::Source;
use std::collections::HashMap;
use varve_digest::{Batch, Transaction};
use varve_format::{BLOCK_BYTES, FileBlock, Ino, LogOp};
use varve_store::{Fetched, Store, Wanted};

/// Most blocks fetched at once: 32 MiB. The more, the shorter a disk's seeks between them; the fewer, the
/// sooner the first of the log's operations are digested.
pub(super) const BLOCKS_MAX: usize = if cfg!(test) { 1000 } else { 8192 };

/// Blocks fetched for the next transactions.
pub(super) struct Ahead<'s> {
    pub(super) blocks: Fetched<'s>,
    /// Number of transactions whose blocks they are.
    pub(super) transactions: usize,
}

impl<'s> Ahead<'s> {
    /// Fetches for the transactions of all sources from `next` on, or for the first of them.
    pub(super) fn fetch(store: &'s Store, sources: &[Source<'_>], next: &[usize]) -> Self {
        let mut most = usize::MAX;
        if !store.has_far_tiers() {
            return Self {
                blocks: Fetched::default(),
                transactions: most,
            };
        }
        loop {
            let all = sources.iter().zip(next).flat_map(|(source, next)| {
                let transactions = source.batch.transactions.get(*next..).unwrap_or_default();
                transactions.iter().map(|of| (source.batch, of))
            });
            let mut taken = 0;
            let wanted = partial_blocks(all.take(most).inspect(|_| taken += 1));
            match store.fetch(&wanted, BLOCKS_MAX) {
                Ok(blocks) if blocks.is_empty() => {
                    return Self {
                        blocks,
                        transactions: most,
                    };
                }
                Ok(blocks) => {
                    return Self {
                        blocks,
                        transactions: taken,
                    };
                }
                // One transaction alone may need more.
                Err(_) if taken <= 1 => {
                    return Self {
                        blocks: Fetched::default(),
                        transactions: taken,
                    };
                }
                Err(needed) => most = (taken * BLOCKS_MAX / needed).clamp(1, taken - 1),
            }
        }
    }

    /// Notes that transactions were committed.
    pub(super) const fn committed(&mut self, transactions: usize) {
        if self.transactions < usize::MAX {
            self.transactions = self.transactions.saturating_sub(transactions);
        }
    }
}

/// Returns the blocks of files that the writes of some transactions, taken together, cover in part.
fn partial_blocks<'b>(transactions: impl Iterator<Item = (&'b Batch, &'b Transaction)>) -> Wanted {
    let mut written: HashMap<Ino, Vec<(u64, u64)>> = HashMap::new();
    for (batch, of) in transactions {
        for entry in &batch.entries[of.first..of.first + of.len] {
            let Ok(LogOp::Write { key, offset, data }) = batch.op(entry) else {
                continue;
            };
            let len = match entry.left_at() {
                Some(_) => u64::from(entry.header.payload_len.get()),
                None => data.len() as u64,
            };
            let Some(end) = offset.checked_add(len).filter(|end| *end > offset) else {
                continue;
            };
            let ranges = written.entry(key.ino).or_default();
            match ranges.last_mut() {
                Some(last) if last.1 == offset => last.1 = end,
                _ => ranges.push((offset, end)),
            }
        }
    }
    let partial = |(ino, mut ranges): (Ino, Vec<(u64, u64)>)| {
        ranges.sort_unstable();
        let mut blocks = Vec::new();
        let mut edge = |at: u64| {
            let block = FileBlock(at / BLOCK_BYTES);
            if !at.is_multiple_of(BLOCK_BYTES) && blocks.last() != Some(&block) {
                blocks.push(block);
            }
        };
        let mut ranges = ranges.into_iter();
        let (mut start, mut end) = ranges.next()?;
        for (from, to) in ranges {
            if from > end {
                edge(start);
                edge(end);
                (start, end) = (from, to);
            }
            end = end.max(to);
        }
        edge(start);
        edge(end);
        (!blocks.is_empty()).then_some((ino, blocks))
    };
    let mut files: Vec<_> = written.into_iter().filter_map(partial).collect();
    files.sort_unstable_by_key(|(ino, _)| *ino);
    Wanted {
        files,
        ..Wanted::default()
    }
}
