//! Locations of the digested blocks of one file: the window of the file's map that the daemon was asked for.
//! Guarded by the inode's lock.

use std::ops::Range;
use varve_format::{FileBlock, Tier};
use varve_ipc::{MappedExtent, NumberedBlocks};

/// Most runs kept for one file; more start the window anew.
const RUNS_MAX: usize = 1 << 16;
/// Extents asked for at once.
pub(crate) const ASK_EXTENTS: u32 = 1024;

/// Location of a block below the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Below {
    /// On a medium: tier, block on it, and the number of consecutive blocks from there.
    Mapped(Tier, u64, u64),
    /// A hole or unwritten: zeros for this number of blocks.
    Zeros(u64),
    /// Not known: ask for the map from this block on.
    Unknown,
}

/// The known part of a file's map.
pub(crate) struct ExtentCache {
    /// Grows with every invalidation; an answer to a request sent before an invalidation is not kept.
    version: u64,
    /// Blocks `from..to` are known.
    from: u64,
    to: u64,
    runs: Vec<MappedExtent>,
}

impl ExtentCache {
    pub(crate) const fn new() -> Self {
        Self {
            version: 1,
            from: 0,
            to: 0,
            runs: Vec::new(),
        }
    }

    /// Forgets everything.
    pub(crate) fn invalidate(&mut self) {
        self.version += 1;
        (self.from, self.to) = (0, 0);
        self.runs.clear();
    }

    /// Notes that the file was just made: it has no digested blocks, and the daemon does not know it yet.
    pub(crate) fn set_empty(&mut self) {
        self.runs.clear();
        (self.from, self.to) = (0, u64::MAX);
    }

    /// Returns the block to ask for the map from, when `block` is not known: the end of the known part while
    /// that may grow, so that a file read at random is mapped once.
    pub(crate) const fn ask_from(&self, block: u64) -> u64 {
        if block >= self.to && self.from == 0 && self.runs.len() + ASK_EXTENTS as usize <= RUNS_MAX {
            self.to
        } else {
            block
        }
    }

    pub(crate) const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the location of `block`.
    #[inline]
    pub(crate) fn find(&self, block: u64) -> Below {
        if block < self.from || block >= self.to {
            return Below::Unknown;
        }
        let at = self
            .runs
            .partition_point(|run| run.file_block.0 + u64::from(run.len) <= block);
        match self.runs.get(at) {
            Some(run) if run.file_block.0 <= block => {
                let skip = block - run.file_block.0;
                let rest = u64::from(run.len) - skip;
                if run.unwritten {
                    Below::Zeros(rest)
                } else {
                    Below::Mapped(run.tier, run.block.0 + skip, rest)
                }
            }
            Some(run) => Below::Zeros(run.file_block.0.min(self.to) - block),
            None => Below::Zeros(self.to - block),
        }
    }

    /// Returns where `block` lies on a tier, and how many of the `most` blocks from it on lie there one after
    /// the other.
    pub(crate) fn run_on(&self, tier: Tier, block: u64, most: u64) -> Option<(u64, u64)> {
        let mut run: Option<(u64, u64)> = None;
        loop {
            let count = run.map_or(0, |(_, count)| count);
            match self.find(block + count) {
                Below::Mapped(on, place, more)
                    if on == tier && run.is_none_or(|(first, count)| first + count == place) =>
                {
                    let first = run.map_or(place, |(first, _)| first);
                    run = Some((first, (count + more).min(most)));
                }
                _ => return run,
            }
            if run.is_some_and(|(_, count)| count >= most) {
                return run;
            }
        }
    }

    /// Adds the shared blocks of a range to `numbered`.
    pub(crate) fn numbers(&self, blocks: Range<u64>, numbered: &mut Vec<NumberedBlocks>) {
        let at = self
            .runs
            .partition_point(|run| run.file_block.0 + u64::from(run.len) <= blocks.start);
        let within = self.runs[at..]
            .iter()
            .take_while(|run| run.file_block.0 < blocks.end);
        numbered.extend(within.filter_map(|run| {
            Some(NumberedBlocks {
                file_block: run.file_block,
                blocks: run.len,
                number: run.number?,
            })
        }));
    }

    /// Returns the run of consecutive NVM blocks around `block`, within `least..limit`: first block, its
    /// location, number of blocks.
    pub(crate) fn around(&self, block: u64, least: u64, limit: u64) -> Option<(u64, u64, u64)> {
        let at = self
            .runs
            .partition_point(|run| run.file_block.0 + u64::from(run.len) <= block);
        let run = self.runs.get(at)?;
        if run.file_block.0 > block || run.unwritten || run.tier != Tier::Nvm {
            return None;
        }
        let first = run.file_block.0.max(least);
        let end = (run.file_block.0 + u64::from(run.len)).min(limit);
        Some((first, run.block.0 + (first - run.file_block.0), end - first))
    }

    /// Adds the answer to a request for the map from `from` on, sent when the version was `version`. `end`:
    /// there are no extents beyond the answer. Ignores runs that are not in order.
    pub(crate) fn learn(&mut self, version: u64, from: u64, mut runs: Vec<MappedExtent>, end: bool) {
        if version != self.version {
            return;
        }
        // A run may begin before the block that was asked for.
        if let Some(first) = runs.first_mut()
            && first.file_block.0 < from
        {
            let skip = from - first.file_block.0;
            if skip >= u64::from(first.len) {
                return;
            }
            first.file_block = FileBlock(from);
            first.len -= skip as u32;
            first.block.0 += skip;
            first.number = first.number.map(|number| number + skip);
        }
        let mut to = from;
        for run in &runs {
            if run.file_block.0 < to || run.len == 0 {
                return;
            }
            to = run.file_block.0 + u64::from(run.len);
        }
        if end {
            to = u64::MAX;
        }
        if from != self.to || self.runs.len() + runs.len() > RUNS_MAX {
            self.runs.clear();
            self.from = from;
        }
        self.runs.append(&mut runs);
        self.to = to;
    }
}

#[cfg(test)]
mod tests {
    use super::{Below, ExtentCache};
    use varve_format::{BlockNo, FileBlock, Tier};
    use varve_ipc::MappedExtent;

    fn run(file_block: u64, len: u32, block: u64) -> MappedExtent {
        MappedExtent {
            file_block: FileBlock(file_block),
            len,
            tier: Tier::Nvm,
            block: BlockNo(block),
            unwritten: false,
            number: None,
        }
    }

    #[test]
    fn extents_are_found_in_windows_that_grow() {
        let mut cache = ExtentCache::new();
        assert_eq!(cache.find(0), Below::Unknown);
        cache.learn(1, 0, vec![run(0, 2, 100), run(5, 5, 200)], false);
        assert_eq!(cache.find(1), Below::Mapped(Tier::Nvm, 101, 1));
        assert_eq!(cache.find(3), Below::Zeros(2));
        assert_eq!(cache.find(10), Below::Unknown);
        cache.learn(1, 10, vec![run(8, 4, 300)], true);
        assert_eq!(cache.find(9), Below::Mapped(Tier::Nvm, 204, 1));
        assert_eq!(cache.find(10), Below::Mapped(Tier::Nvm, 302, 2));
        assert!(matches!(cache.find(12), Below::Zeros(n) if n > 1 << 40));
    }

    #[test]
    fn extents_are_not_kept_when_asked_before_an_invalidation() {
        let mut cache = ExtentCache::new();
        let asked = cache.version();
        cache.invalidate();
        cache.learn(asked, 0, vec![run(0, 2, 100)], true);
        assert_eq!(cache.find(0), Below::Unknown);
    }

    #[test]
    fn numbers_of_shared_blocks_are_those_of_the_window() {
        let mut cache = ExtentCache::new();
        let numbered = |run: MappedExtent, number| MappedExtent {
            number: Some(number),
            ..run
        };
        let runs = vec![
            numbered(run(8, 4, 300), 70),
            run(12, 2, 9),
            numbered(run(14, 3, 5), 90),
        ];
        cache.learn(1, 10, runs, true);
        let of = |blocks| {
            let mut found = Vec::new();
            cache.numbers(blocks, &mut found);
            let told = found
                .iter()
                .map(|part| (part.file_block.0, part.blocks, part.number));
            told.collect::<Vec<_>>()
        };
        assert_eq!(of(0..100), [(10, 2, 72), (14, 3, 90)]);
        assert_eq!(of(12..14), []);
        assert_eq!(of(11..15), [(10, 2, 72), (14, 3, 90)]);
    }

    #[test]
    fn extents_out_of_order_are_refused() {
        let mut cache = ExtentCache::new();
        cache.learn(1, 0, vec![run(4, 2, 100), run(5, 5, 200)], true);
        assert_eq!(cache.find(4), Below::Unknown);
    }
}
