//! Finds runs of blocks that are probably the same, from their checksums alone, within bounded memory and
//! without loss.
//!
//! The CRC-32C of two neighbouring blocks are a 64-bit key. Blocks that are the same in runs of two and more
//! have equal keys, so candidates are found by reading 1/1024 of the data. The keys are taken in passes by
//! ranges of their hash, as many as the memory asks for. A range that turns out too full is halved; no key is
//! dropped, and the result does not depend on the memory.
//!
//! A checksum is no proof and is easily forged: whoever shares blocks compares their bytes first. This module
//! does not know where checksums come from.

mod merge;
mod pass;

use std::ops::ControlFlow;
use std::path::PathBuf;

/// Where checksums come from: a pool, or files that were read.
pub trait Checksums {
    /// Number of blocks, for the number of passes and the progress.
    fn blocks(&self) -> u64;

    /// Calls `each` with the checksums of neighbouring blocks: the position of the first, in blocks, and a
    /// CRC-32C each. Positions ascend from call to call. Blocks are neighbours if their positions are:
    /// between two files at least one position is left out. Holes and zero blocks are left out too. Every
    /// call of `scan` gives the same.
    ///
    /// # Errors
    /// If they cannot be read.
    fn scan(&mut self, each: &mut dyn FnMut(u64, &[u32]) -> ControlFlow<()>) -> std::io::Result<()>;
}

/// Positions are 40 bits: 4 PiB of data.
pub const MAX_BLOCKS: u64 = 1 << 40;

/// Least memory, in bytes.
pub const MIN_MEMORY_BYTES: usize = 1 << 20;

/// What to find, and with what.
#[derive(Debug, Clone)]
pub struct SearchSettings {
    /// Bytes of memory, at most; at least [`MIN_MEMORY_BYTES`].
    pub memory_bytes: usize,
    /// Blocks of a run that is told, at least. Runs of one block are not found.
    pub min_run_blocks: u64,
    /// Directory for what is between the passes: 10 bytes for each block that is a duplicate. The files are
    /// removed at the end.
    pub spill_dir: PathBuf,
}

/// Blocks that are probably the same as earlier ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    /// Position of the first block, in blocks.
    pub at: u64,
    /// Position of the first of the earlier ones.
    pub same_as: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// What a search came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SearchOutcome {
    /// Runs told.
    pub runs: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Blocks in runs that were too short to be told.
    pub blocks_in_short_runs: u64,
    /// How often all checksums were read.
    pub passes: u32,
}

/// A search that came to no end.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The checksums could not be read.
    #[error("cannot read the checksums: {0}")]
    Read(std::io::Error),
    /// What is between the passes could not be written or read.
    #[error("cannot keep the state of the search in {dir}: {error}", dir = .dir.display())]
    Spill {
        /// Directory of the state.
        dir: PathBuf,
        /// Why.
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
        /// Position given.
        at: u64,
        /// Position before.
        before: u64,
    },
    /// The caller asked to stop.
    #[error("stopped")]
    Stopped,
}

/// How far a search is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The pass, from 1.
    pub pass: u32,
    /// Passes that are expected.
    pub passes: u32,
    /// Blocks read in this pass.
    pub blocks: u64,
}

/// Tells all runs of at least [`SearchSettings::min_run_blocks`], in order of their position. `progress` is
/// called now and then, and ends the search if it says so.
///
/// # Errors
/// See [`FindError`]. What was told until then is right.
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
    let spill = merge::Spill::new(&settings.spill_dir)?;
    let mut search = pass::Search::new(spill, settings.memory_bytes, blocks);
    while search.next_pass(source, progress)? {}
    let (spill, passes) = search.into_spill();
    let mut found = SearchOutcome {
        passes,
        ..SearchOutcome::default()
    };
    spill.merge(settings.memory_bytes, &mut |run| {
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
