//! Sorted pairs of positions, kept in files between the passes and merged into runs at the end.

use super::pass::{ENTRY_BYTES, Entry, POSITION_BYTES, position};
use super::{FindError, Run};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const PAIR_BYTES: usize = 2 * POSITION_BYTES;
/// Pairs that are merged between two calls of `go`.
const PAIRS_BETWEEN_LOOKS: u32 = 1 << 16;

/// Unnamed files of sorted pairs; the kernel removes them when they are closed.
pub(super) struct Spill {
    dir: PathBuf,
    segments: Vec<File>,
}

impl Spill {
    pub(super) fn new(dir: &Path) -> Result<Self, FindError> {
        let spill = Self {
            dir: dir.to_owned(),
            segments: Vec::new(),
        };
        std::fs::create_dir_all(dir).map_err(|error| spill.failed(error))?;
        Ok(spill)
    }

    fn failed(&self, error: std::io::Error) -> FindError {
        FindError::Spill {
            dir: self.dir.clone(),
            error,
        }
    }

    /// Writes sorted pairs to a new file.
    pub(super) fn write(&mut self, pairs: &[Entry]) -> Result<(), FindError> {
        if pairs.is_empty() {
            return Ok(());
        }
        let file = tempfile::tempfile_in(&self.dir).map_err(|error| self.failed(error))?;
        let mut out = BufWriter::with_capacity(1 << 16, file);
        for pair in pairs {
            out.write_all(&pair[..PAIR_BYTES])
                .map_err(|error| self.failed(error))?;
        }
        let file = out
            .into_inner()
            .map_err(|error| self.failed(error.into_error()))?;
        self.segments.push(file);
        Ok(())
    }

    /// Reads all pairs again, by position, with at most `memory_bytes` of buffers.
    fn into_pairs(self, memory_bytes: usize) -> Result<Pairs, FindError> {
        let Self { dir, segments } = self;
        let buffer = (memory_bytes / segments.len().max(1)).clamp(PAIR_BYTES, 1 << 16);
        let mut pairs = Pairs {
            dir,
            readers: Vec::with_capacity(segments.len()),
            heap: BinaryHeap::new(),
            last: None,
        };
        for (n, mut file) in segments.into_iter().enumerate() {
            std::io::Seek::rewind(&mut file).map_err(|error| pairs.failed(error))?;
            pairs.readers.push(BufReader::with_capacity(buffer, file));
            pairs.refill(n)?;
        }
        Ok(pairs)
    }
}

/// Reports the runs of all pairs, by position; with `singles`, pairs of single blocks, also those outside of
/// these runs. `go` is called now and then, and may end it.
pub(super) fn merge(
    pairs: Spill,
    singles: Option<Spill>,
    memory_bytes: usize,
    go: &mut dyn FnMut() -> ControlFlow<()>,
    tell: &mut dyn FnMut(Run),
) -> Result<(), FindError> {
    let mut until_asked = 0;
    let mut pairs = pairs.into_pairs(memory_bytes / 4)?;
    let mut singles = match singles {
        Some(spill) => Some(Singles {
            pairs: spill.into_pairs(memory_bytes / 4)?,
            next: None,
            run: None,
        }),
        None => None,
    };
    let mut runs = Runs::default();
    loop {
        if until_asked == 0 {
            until_asked = PAIRS_BETWEEN_LOOKS;
            if go().is_break() {
                return Err(FindError::Stopped);
            }
        }
        until_asked -= 1;
        let pair = pairs.next()?;
        let ended = match pair {
            Some((at, same_as)) => runs.add(at, same_as),
            None => runs.end(),
        };
        if let Some(run) = ended {
            if let Some(singles) = &mut singles {
                singles.before(run.at, tell)?;
                singles.skip(run.at + run.blocks)?;
            }
            tell(run);
        }
        if pair.is_none() {
            return match &mut singles {
                Some(singles) => singles.before(u64::MAX, tell),
                None => Ok(()),
            };
        }
    }
}

/// Pairs in the order of their positions, each position once.
struct Pairs {
    dir: PathBuf,
    readers: Vec<BufReader<File>>,
    heap: BinaryHeap<Reverse<((u64, u64), usize)>>,
    last: Option<u64>,
}

impl Pairs {
    fn failed(&self, error: std::io::Error) -> FindError {
        FindError::Spill {
            dir: self.dir.clone(),
            error,
        }
    }

    /// Reads the next pair of a segment.
    fn refill(&mut self, n: usize) -> Result<(), FindError> {
        let read = next(&mut self.readers[n]);
        if let Some(pair) = read.map_err(|error| self.failed(error))? {
            self.heap.push(Reverse((pair, n)));
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<(u64, u64)>, FindError> {
        while let Some(Reverse((pair, n))) = self.heap.pop() {
            self.refill(n)?;
            // A range that was halved after some of its pairs were written yields them again.
            if self.last.replace(pair.0) != Some(pair.0) {
                return Ok(Some(pair));
            }
        }
        Ok(None)
    }
}

/// Single blocks that are the same as earlier ones. Consecutive ones are told as one run.
struct Singles {
    pairs: Pairs,
    next: Option<(u64, u64)>,
    run: Option<Run>,
}

impl Singles {
    fn peek(&mut self) -> Result<Option<(u64, u64)>, FindError> {
        if self.next.is_none() {
            self.next = self.pairs.next()?;
        }
        Ok(self.next)
    }

    /// Reports those before a position.
    fn before(&mut self, end: u64, tell: &mut dyn FnMut(Run)) -> Result<(), FindError> {
        while let Some((at, same_as)) = self.peek()?.filter(|(at, _)| *at < end) {
            self.next = None;
            match &mut self.run {
                Some(run) if at == run.at + run.blocks && same_as == run.same_as + run.blocks => {
                    run.blocks += 1;
                }
                run => {
                    let new = Run {
                        at,
                        same_as,
                        blocks: 1,
                    };
                    if let Some(ended) = run.replace(new) {
                        tell(ended);
                    }
                }
            }
        }
        if let Some(run) = self.run.take() {
            tell(run);
        }
        Ok(())
    }

    /// Leaves those before a position out.
    fn skip(&mut self, end: u64) -> Result<(), FindError> {
        while self.peek()?.is_some_and(|(at, _)| at < end) {
            self.next = None;
        }
        Ok(())
    }
}

fn next(reader: &mut impl Read) -> std::io::Result<Option<(u64, u64)>> {
    let mut bytes = [0; PAIR_BYTES];
    match reader.read_exact(&mut bytes) {
        Ok(()) => Ok(Some((position(&bytes), position(&bytes[POSITION_BYTES..])))),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Joins consecutive pairs into runs. A pair stands for two blocks, so n pairs are a run of n + 1.
#[derive(Default)]
struct Runs {
    run: Option<Run>,
    /// End of the blocks that earlier runs cover.
    covered: u64,
}

impl Runs {
    /// Adds a pair; returns the run that ends before it.
    fn add(&mut self, at: u64, same_as: u64) -> Option<Run> {
        if let Some(run) = &mut self.run
            && at + 1 == run.at + run.blocks
            && same_as + 1 == run.same_as + run.blocks
        {
            run.blocks += 1;
            return None;
        }
        let ended = self.end();
        self.run = Some(Run {
            at,
            same_as,
            blocks: 2,
        });
        ended
    }

    /// Returns the run that has ended, without the blocks that earlier runs cover.
    fn end(&mut self) -> Option<Run> {
        let run = self.run.take()?;
        let twice = self.covered.saturating_sub(run.at).min(run.blocks);
        self.covered = self.covered.max(run.at + run.blocks);
        (run.blocks > twice).then_some(Run {
            at: run.at + twice,
            same_as: run.same_as + twice,
            blocks: run.blocks - twice,
        })
    }
}

const _: () = assert!(PAIR_BYTES <= ENTRY_BYTES);
