//! Which old blocks a digest fetches before it begins a transaction: those on slower tiers that writes cover
//! in part. Decides nothing: a block that is named too many or too few costs time only.

use super::types::Source;
use std::collections::HashMap;
use varve_digest::{Batch, Transaction};
use varve_format::{BLOCK_BYTES, FileBlock, Ino, LogOp};
use varve_store::{Fetched, Store, Unfetched, Wanted};

/// Most blocks fetched at once: 32 MiB. The more, the shorter a disk's seeks between them; the fewer, the
/// sooner the first of the log's operations are digested.
pub(crate) const FETCH_BLOCKS: usize = 8192;
/// As many are fetched even if others free much meanwhile.
const FETCH_BLOCKS_LEAST: usize = 256;

/// Blocks fetched for the next transactions.
pub(super) struct Ahead<'s> {
    pub(super) blocks: Fetched<'s>,
    /// Sum of the sources' positions behind these transactions.
    end: usize,
}

impl<'s> Ahead<'s> {
    /// Fetches at most `most_blocks` for the transactions of all sources from `next` on, or for the first of
    /// them.
    pub(super) fn fetch(
        store: &'s Store,
        sources: &[Source<'_>],
        next: &[usize],
        most_blocks: usize,
    ) -> Self {
        let none = || Self {
            blocks: Fetched::default(),
            end: usize::MAX,
        };
        if most_blocks == 0 || !store.uses_far_tiers() {
            return none();
        }
        let begin: usize = next.iter().sum();
        let (mut most, mut most_blocks) = (usize::MAX, most_blocks);
        loop {
            let all = sources.iter().zip(next).flat_map(|(source, next)| {
                let transactions = source.batch.transactions.get(*next..).unwrap_or_default();
                transactions.iter().map(|of| (source.batch, of))
            });
            let mut taken = 0;
            let wanted = partial_blocks(all.take(most).inspect(|_| taken += 1));
            match store.fetch(&wanted, most_blocks, most_blocks > FETCH_BLOCKS_LEAST) {
                Ok(blocks) if blocks.is_empty() && most == usize::MAX => return none(),
                Ok(blocks) => {
                    let end = begin.saturating_add(taken);
                    return Self { blocks, end };
                }
                // One transaction alone may need more.
                Err(Unfetched::TooMany(_)) if taken <= 1 => {
                    let end = begin.saturating_add(taken);
                    return Self { end, ..none() };
                }
                Err(Unfetched::TooMany(needed)) => most = shrunk(taken, needed, most_blocks),
                Err(Unfetched::OthersWait) => most_blocks = (most_blocks / 4).max(FETCH_BLOCKS_LEAST),
            }
        }
    }

    /// Returns how many transactions from `next` on are left of those whose blocks were fetched.
    pub(super) fn left(&self, next: &[usize]) -> usize {
        match self.end {
            usize::MAX => usize::MAX,
            end => end.saturating_sub(next.iter().sum()),
        }
    }
}

/// Returns how many of `taken` transactions, two or more, to try next, as they need `needed` blocks of
/// `most_blocks`: each round a quarter less, wherever the blocks are.
fn shrunk(taken: usize, needed: usize, most_blocks: usize) -> usize {
    (taken.saturating_mul(most_blocks) / needed.max(1)).clamp(1, taken - taken.div_ceil(4))
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

#[cfg(test)]
mod tests {
    use super::shrunk;

    #[test]
    fn fewer_transactions_are_taken_in_few_rounds_wherever_the_blocks_are() {
        // All blocks in the first half.
        let needed = |taken: usize| 2 * taken.min(4097);
        let (mut taken, mut rounds) = (8192, 0);
        while needed(taken) > 8192 {
            taken = shrunk(taken, needed(taken), 8192);
            rounds += 1;
        }
        assert!(taken > 2048 && rounds <= 4, "{taken} after {rounds}");
        for taken in 2..100 {
            let less = shrunk(taken, 10 * taken, 1);
            assert!(0 < less && less < taken);
        }
    }
}
