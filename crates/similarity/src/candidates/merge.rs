//! Sorted pairs of positions, kept in files between the passes and merged into runs at the end.

use super::pass::{ENTRY_BYTES, Entry, POSITION_BYTES, position};
use super::{FindError, Run};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

const PAIR_BYTES: usize = 2 * POSITION_BYTES;

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

    /// Reports the runs of all pairs, by position.
    pub(super) fn merge(self, memory_bytes: usize, tell: &mut dyn FnMut(Run)) -> Result<(), FindError> {
        let Self { dir, segments } = self;
        let failed = |error| FindError::Spill {
            dir: dir.clone(),
            error,
        };
        let buffer = (memory_bytes / 2 / segments.len().max(1)).clamp(PAIR_BYTES, 1 << 16);
        let mut readers = Vec::with_capacity(segments.len());
        let mut heap = BinaryHeap::new();
        for (n, mut file) in segments.into_iter().enumerate() {
            std::io::Seek::rewind(&mut file).map_err(failed)?;
            let mut reader = BufReader::with_capacity(buffer, file);
            if let Some(pair) = next(&mut reader).map_err(failed)? {
                heap.push(Reverse((pair, n)));
            }
            readers.push(reader);
        }
        let mut runs = Runs::default();
        let mut last = None;
        while let Some(Reverse(((at, same_as), n))) = heap.pop() {
            // A range that was halved after some of its pairs were written yields them again.
            if last != Some(at) {
                runs.add(at, same_as, tell);
            }
            last = Some(at);
            if let Some(pair) = next(&mut readers[n]).map_err(failed)? {
                heap.push(Reverse((pair, n)));
            }
        }
        runs.end(tell);
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
    fn add(&mut self, at: u64, same_as: u64, tell: &mut dyn FnMut(Run)) {
        if let Some(run) = &mut self.run
            && at + 1 == run.at + run.blocks
            && same_as + 1 == run.same_as + run.blocks
        {
            run.blocks += 1;
            return;
        }
        self.end(tell);
        self.run = Some(Run {
            at,
            same_as,
            blocks: 2,
        });
    }

    /// Reports the run that has ended, without the blocks that earlier runs cover.
    fn end(&mut self, tell: &mut dyn FnMut(Run)) {
        let Some(run) = self.run.take() else { return };
        let twice = self.covered.saturating_sub(run.at).min(run.blocks);
        self.covered = self.covered.max(run.at + run.blocks);
        if run.blocks > twice {
            tell(Run {
                at: run.at + twice,
                same_as: run.same_as + twice,
                blocks: run.blocks - twice,
            });
        }
    }
}

const _: () = assert!(PAIR_BYTES <= ENTRY_BYTES);
