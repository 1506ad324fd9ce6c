//! Reads the parts of a file that lie in several places of one device in as few transfers as pay, in the
//! order of the device: what files share lies among other files' blocks. What they share is kept in memory for
//! the next of them ([`super::shared_blocks`]). Knows no file.

use super::Store;
use super::read::Part;
use crate::Result;
use std::ops::Range;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Tier};
use varve_media::AlignedBuf;

/// Most parts that are read together.
const PARTS_MAX: usize = 1024;
/// Most blocks of parts that are read together: 4 MiB.
const BLOCKS_MAX: u64 = 1024;
/// Most blocks of gaps that are read for parts that are read together: 8 MiB.
const GAPS_MAX: u64 = 2048;

/// Most blocks that nobody wants between two parts of one transfer. A disk passes over 64 blocks in 1.3 ms at
/// 200 MB/s, and a seek takes 5 ms and more ([`varve_media::emulated::DiskModel::HDD`]); flash does not seek.
pub(super) const fn gap_max(tier: Tier) -> u64 {
    match tier {
        Tier::Nvm | Tier::Ssd => 0,
        Tier::Hdd => 64,
    }
}

/// Blocks of the device that a part of a read needs.
fn blocks_of(part: &Part) -> Range<u64> {
    part.block..part.block + ((part.skip + part.len) as u64).div_ceil(BLOCK_BYTES)
}

/// The transfers for some runs of blocks: in order, apart from each other, each with all of the runs in it.
/// They contain gaps of at most `gap_max` blocks, `gaps_most` in all.
pub(super) fn transfers(mut runs: Vec<Range<u64>>, gap_max: u64, gaps_most: u64) -> Vec<Range<u64>> {
    runs.sort_unstable_by_key(|run| run.start);
    let mut transfers: Vec<Range<u64>> = Vec::new();
    let mut gaps_left = gaps_most;
    for run in runs {
        if let Some(last) = transfers.last_mut() {
            let gap = run.start.saturating_sub(last.end);
            if gap <= gap_max.min(gaps_left) {
                gaps_left -= gap;
                last.end = last.end.max(run.end);
                continue;
            }
        }
        transfers.push(run);
    }
    transfers
}

/// How many of the parts are read together next.
fn together(parts: &[&Part]) -> usize {
    let mut blocks = 0;
    let fits = parts.iter().take(PARTS_MAX).take_while(|part| {
        let run = blocks_of(part);
        blocks += run.end - run.start;
        blocks <= BLOCKS_MAX
    });
    fits.count().max(1)
}

/// Reads the parts of a plan that lie on a block device. Returns false if they are to be
/// read one by one, as the device has failed in what nobody may want.
///
/// # Errors
/// Checksums that do not match.
pub(super) fn fill_scattered(store: &Store, parts: &[Part], tier: Tier, out: &mut [u8]) -> Result<bool> {
    let mut absent: Vec<&Part> = Vec::new();
    for part in parts.iter().filter(|part| part.tier == tier) {
        if !take_kept(store, part, out) {
            absent.push(part);
        }
    }
    let mut rest = &absent[..];
    while !rest.is_empty() {
        let (now, later) = rest.split_at(together(rest));
        if !fill_together(store, now, tier, out)? {
            return Ok(false);
        }
        rest = later;
    }
    Ok(true)
}

/// Takes a part from what is kept of shared blocks, if all of it is there.
fn take_kept(store: &Store, part: &Part, out: &mut [u8]) -> bool {
    let Some(number) = part.number else { return false };
    let target = &mut out[part.at..part.at + part.len];
    if part.skip == 0 {
        return store.shared_blocks.get(number, target);
    }
    let mut bytes = vec![0; part.skip + part.len];
    let is_kept = store.shared_blocks.get(number, &mut bytes);
    if is_kept {
        target.copy_from_slice(&bytes[part.skip..]);
    }
    is_kept
}

fn fill_together(store: &Store, parts: &[&Part], tier: Tier, out: &mut [u8]) -> Result<bool> {
    let runs = parts.iter().map(|part| blocks_of(part)).collect();
    let transfers = transfers(runs, gap_max(tier), GAPS_MAX);
    let bytes_of = |run: &Range<u64>| ((run.end - run.start) * BLOCK_BYTES) as usize;
    // A device takes a batch at once only into aligned memory.
    let mut buffers: Vec<AlignedBuf> = transfers
        .iter()
        .map(|run| AlignedBuf::new(bytes_of(run)))
        .collect();
    let mut batch: Vec<(u64, &mut [u8])> = transfers
        .iter()
        .zip(&mut buffers)
        .map(|(run, buffer)| (run.start * BLOCK_BYTES, buffer.bytes_mut()))
        .collect();
    if store.device(tier)?.read_batch(&mut batch).is_err() {
        return Ok(false);
    }
    store.count_read(tier, transfers.iter().map(bytes_of).sum());
    for part in parts {
        let blocks = blocks_of(part);
        let at = transfers.partition_point(|run| run.end <= blocks.start);
        let from = ((blocks.start - transfers[at].start) as usize) * BLOCK_SIZE;
        let bytes = &buffers[at].bytes()[from..from + bytes_of(&blocks)];
        let sums = part
            .sums
            .resolve(|tier, unit, row| store.footer(tier, unit, row))?;
        store.compare(tier, blocks.start, bytes, &sums[..bytes.len() / BLOCK_SIZE])?;
        if let Some(number) = part.number {
            store.shared_blocks.put(number, bytes);
        }
        out[part.at..part.at + part.len].copy_from_slice(&bytes[part.skip..part.skip + part.len]);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::{GAPS_MAX, transfers};

    #[test]
    fn runs_that_lie_near_each_other_are_one_transfer() {
        let runs = vec![500..510, 10..20, 20..24, 28..30, 90..91, 25..26, 3..4];
        assert_eq!(
            transfers(runs.clone(), 0, GAPS_MAX),
            [3..4, 10..24, 25..26, 28..30, 90..91, 500..510]
        );
        assert_eq!(transfers(runs.clone(), 6, GAPS_MAX), [3..30, 90..91, 500..510]);
        assert_eq!(transfers(runs, 64, GAPS_MAX), [3..91, 500..510]);
        // The same blocks twice, and a run within another.
        assert_eq!(transfers(vec![4..9, 4..9, 5..6, 40..41], 0, 9), [4..9, 40..41]);
        assert_eq!(transfers(Vec::new(), 64, 9), []);
    }

    #[test]
    fn gaps_are_read_up_to_a_bound() {
        let runs: Vec<_> = (0..1000).map(|at| at * 65..at * 65 + 1).collect();
        let found = transfers(runs, 64, GAPS_MAX);
        assert_eq!(found[0].end - found[0].start, GAPS_MAX + GAPS_MAX / 64 + 1);
        assert_eq!(found.len(), 1000 - (GAPS_MAX / 64) as usize);
    }
}
