//! Finds runs of probable duplicate blocks from their checksums alone, within bounded memory and without
//! loss.
//!
//! The CRC-32C of two neighbouring blocks are a 64-bit key. Duplicate runs of two blocks and more have equal
//! keys, so candidates are found by reading 1/1024 of the data. The keys are taken in passes by ranges of
//! their hash; the number of passes depends on the memory. A range that turns out too full is halved; no key
//! is dropped, and the result does not depend on the memory.
//!
//! A checksum is no proof and is easily forged: callers must compare the bytes of blocks before they share
//! them. This module does not know the source of the checksums.

mod merge;
mod pass;

use pass::KeyOf;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// A source of checksums: a pool, or files that were read.
pub trait Checksums {
    /// Number of blocks, for the number of passes and the progress.
    fn blocks(&self) -> u64;

    /// Calls `each` with the checksums of neighbouring blocks: the position of the first, in blocks, and a
    /// CRC-32C each. Positions ascend from call to call. Blocks are neighbours if their positions are:
    /// between two files at least one position is left out. Holes and zero blocks are left out too. Every
    /// call of `scan` gives the same checksums.
    ///
    /// # Errors
    /// If they cannot be read.
    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()>;
}

/// Positions are 40 bits: 4 PiB of data.
pub const MAX_BLOCKS: u64 = 1 << 40;

/// Least memory, in bytes.
pub const MIN_MEMORY_BYTES: usize = 1 << 20;

/// Parameters of a search.
#[derive(Debug, Clone)]
pub struct SearchSettings {
    /// Bytes of memory, at most; at least [`MIN_MEMORY_BYTES`].
    pub memory_bytes: usize,
    /// Shortest run that is reported. For runs of one block there are passes of their own, and of blocks with
    /// equal checksums of 32 bits some are different: at 1 TiB one in 16 of all.
    pub min_run_blocks: u64,
    /// Directory for files between the passes: 10 bytes for each duplicate block. The files are removed at
    /// the end.
    pub spill_dir: PathBuf,
}

/// A run of blocks that are probably duplicates of earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// Position of the first block, in blocks.
    pub at: u64,
    /// Position of the first of the earlier blocks.
    pub same_as: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SearchOutcome {
    /// Runs reported.
    pub runs: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Blocks in runs that were too short to report.
    pub blocks_in_short_runs: u64,
    /// Number of times that all checksums were read.
    pub passes: u32,
}

/// An error that ended a search.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The checksums could not be read.
    #[error("cannot read the checksums: {0}")]
    Read(std::io::Error),
    /// The files between the passes could not be written or read.
    #[error("cannot keep the state of the search in {dir}: {error}", dir = .dir.display())]
    Spill {
        /// Directory of these files.
        dir: PathBuf,
        /// The cause.
        error: std::io::Error,
    },
    /// Too little memory.
    #[error("{0} bytes of memory are too few; give at least {MIN_MEMORY_BYTES}")]
    Memory(usize),
    /// Too many blocks.
    #[error("{0} blocks are too many for one search; the most are {MAX_BLOCKS}")]
    Blocks(u64),
    /// A source gave positions that do not ascend.
    #[error("the checksums are not in order: position {at} after {before}")]
    Order {
        /// The position given.
        at: u64,
        /// The position before.
        before: u64,
    },
    /// The caller asked to stop.
    #[error("stopped")]
    Stopped,
}

/// Progress of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The pass, from 1.
    pub pass: u32,
    /// Expected number of passes.
    pub passes: u32,
    /// Blocks read in this pass.
    pub blocks: u64,
}

/// Reports all runs of at least [`SearchSettings::min_run_blocks`], in order of their position. `progress` is
/// called at the start of each pass and now and then, and may end the search.
///
/// # Errors
/// See [`FindError`]. The runs reported until then are right.
pub fn find(
    source: &mut dyn Checksums,
    settings: &SearchSettings,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    tell: &mut dyn FnMut(Run),
) -> Result<SearchOutcome, FindError> {
    if settings.memory_bytes < MIN_MEMORY_BYTES {
        return Err(FindError::Memory(settings.memory_bytes));
    }
    let blocks = source.blocks();
    if blocks > MAX_BLOCKS {
        return Err(FindError::Blocks(blocks));
    }
    let mut found = SearchOutcome::default();
    let mut search = |key_of| {
        let spill = merge::Spill::new(&settings.spill_dir)?;
        let mut search = pass::Search::new(key_of, spill, settings.memory_bytes, blocks);
        while search.next_pass(source, progress)? {}
        let (spill, passes) = search.into_spill();
        found.passes += passes;
        Ok(spill)
    };
    let pairs = search(KeyOf::Two)?;
    let singles = match settings.min_run_blocks {
        0 | 1 => Some(search(KeyOf::One)?),
        _ => None,
    };
    let passes = found.passes;
    let mut go = || {
        progress(Progress {
            pass: passes,
            passes,
            blocks,
        })
    };
    merge::merge(pairs, singles, settings.memory_bytes, &mut go, &mut |run| {
        if run.blocks >= settings.min_run_blocks {
            found.runs += 1;
            found.blocks += run.blocks;
            tell(run);
        } else {
            found.blocks_in_short_runs += run.blocks;
        }
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests;
