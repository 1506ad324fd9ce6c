//! Shared runs against the extents that name them: counts both ways. Does not know how either is found.

use super::Finding;
use std::collections::BTreeMap;
use varve_format::{Extent, FileBlock, Ino, SharedRun};

/// The runs of a pool, and the references that its files hold.
#[derive(Debug, Default)]
pub(crate) struct References {
    /// Ascending; they do not overlap.
    runs: Vec<SharedRun>,
    /// By number of the shared space: extents that begin there less those that end there.
    edges: BTreeMap<u64, i64>,
}

impl References {
    /// Of these runs, ascending.
    pub(crate) const fn of(runs: Vec<SharedRun>) -> Self {
        Self {
            runs,
            edges: BTreeMap::new(),
        }
    }

    /// Counts an extent in, if runs cover all of it; else answers the first number that no run has.
    pub(crate) fn count(&mut self, extent: &Extent) -> Result<(), u64> {
        let first = extent.block.0;
        let end = first + u64::from(extent.len);
        let mut next = first;
        let from = self.runs.partition_point(|run| run.end() <= first);
        for run in &self.runs[from..] {
            if next >= end || run.first > next {
                break;
            }
            next = run.end();
        }
        if next < end {
            return Err(next);
        }
        *self.edges.entry(first).or_default() += 1;
        *self.edges.entry(end).or_default() -= 1;
        Ok(())
    }

    /// The parts of an extent that runs cover, each with true, and those between with false.
    pub(crate) fn parts(&self, extent: &Extent) -> Vec<(Extent, bool)> {
        let (first, end) = (extent.block.0, extent.block.0 + u64::from(extent.len));
        let mut parts: Vec<(Extent, bool)> = Vec::new();
        let mut push = |from: u64, to: u64, has_run: bool| {
            let file = |number: u64| FileBlock(extent.file_block.0 + (number - first));
            let Some(part) = extent.clip(file(from), file(to)) else {
                return;
            };
            match parts.last_mut() {
                Some((last, known)) if *known == has_run && last.joins(&part) => last.len += part.len,
                _ => parts.push((part, has_run)),
            }
        };
        let mut next = first;
        let from = self.runs.partition_point(|run| run.end() <= first);
        for run in self.runs[from..].iter().map_while(|run| run.clip(first, end)) {
            push(next, run.first, false);
            push(run.first, run.end(), true);
            next = run.end();
        }
        push(next, end, false);
        parts
    }

    /// The runs as they are by what was counted: parts that no extent names are left out.
    pub(crate) fn counted(&self) -> Vec<SharedRun> {
        let mut out: Vec<SharedRun> = Vec::new();
        let mut edges = self.edges.iter().peekable();
        let mut depth = 0;
        for run in &self.runs {
            let mut at = run.first;
            while at < run.end() {
                while let Some((_, change)) = edges.next_if(|(edge, _)| **edge <= at) {
                    depth += change;
                }
                let end = edges.peek().map_or(run.end(), |(edge, _)| run.end().min(**edge));
                if let Some(part) = run.clip(at, end).filter(|_| depth > 0) {
                    let part = SharedRun {
                        refs: u32::try_from(depth).unwrap_or(u32::MAX),
                        ..part
                    };
                    match out.last_mut() {
                        Some(last) if last.joins(&part) => last.len += part.len,
                        _ => out.push(part),
                    }
                }
                at = end;
            }
        }
        out
    }

    /// Runs whose counts are not those of the extents.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let counted = self.counted();
        let mut findings = Vec::new();
        for run in &self.runs {
            let from = counted.partition_point(|part| part.end() <= run.first);
            let mut at = run.first;
            for part in counted[from..]
                .iter()
                .map_while(|part| part.clip(run.first, run.end()))
            {
                findings.extend(differs(run, at, part.first, 0));
                findings.extend(differs(run, part.first, part.end(), part.refs));
                at = part.end();
            }
            findings.extend(differs(run, at, run.end(), 0));
        }
        findings
    }
}

fn differs(run: &SharedRun, from: u64, to: u64, found: u32) -> Option<Finding> {
    (from < to && run.refs != found).then_some(Finding::References {
        first: from,
        len: to - from,
        stored: run.refs,
        found,
    })
}

/// The finding for an extent that names a number of no run.
pub(crate) const fn no_run(ino: Ino, number: u64) -> Finding {
    Finding::NoRun { ino, number }
}

#[cfg(test)]
mod tests {
    use super::References;
    use crate::check::Finding;
    use varve_format::{BlockNo, Extent, ExtentFlags, FileBlock, SharedRun, Tier};

    fn run(first: u64, len: u32, refs: u32) -> SharedRun {
        SharedRun {
            first,
            refs,
            len,
            tier: Tier::Hdd,
            block: BlockNo(first + 1000),
        }
    }

    fn extent(first: u64, len: u32) -> Extent {
        Extent {
            file_block: FileBlock(0),
            len,
            tier: Tier::Nvm,
            block: BlockNo(first),
            flags: ExtentFlags::SHARED,
        }
    }

    #[test]
    fn counts_that_fit_are_silent_and_others_are_named_by_part() {
        let mut fits = References::of(vec![run(0, 10, 2), run(10, 5, 3), run(20, 5, 1)]);
        for (first, len) in [(0, 15), (0, 15), (10, 5), (20, 5)] {
            assert_eq!(fits.count(&extent(first, len)), Ok(()));
        }
        assert_eq!(fits.findings(), []);
        assert_eq!(fits.counted(), [run(0, 10, 2), run(10, 5, 3), run(20, 5, 1)]);

        let mut wrong = References::of(vec![run(0, 10, 2), run(20, 5, 1)]);
        assert_eq!(wrong.count(&extent(0, 10)), Ok(()));
        assert_eq!(wrong.count(&extent(4, 2)), Ok(()));
        assert_eq!(wrong.count(&extent(8, 5)), Err(10));
        assert_eq!(wrong.count(&extent(15, 2)), Err(15));
        let part = |first, len, stored, found| Finding::References {
            first,
            len,
            stored,
            found,
        };
        assert_eq!(
            wrong.findings(),
            [part(0, 4, 2, 1), part(6, 4, 2, 1), part(20, 5, 1, 0)]
        );
        assert_eq!(wrong.counted(), [run(0, 4, 1), run(4, 2, 2), run(6, 4, 1)]);
        let lens = |first, len| -> Vec<(u32, bool)> {
            let parts = wrong.parts(&extent(first, len));
            parts.iter().map(|(part, has_run)| (part.len, *has_run)).collect()
        };
        assert_eq!(lens(5, 40), [(5, true), (10, false), (5, true), (20, false)]);
        assert_eq!((lens(0, 10), lens(12, 3)), (vec![(10, true)], vec![(3, false)]));
    }
}
