//! Has the daemon share runs of equal-looking blocks, many at a time, and counts what comes of it. Finds no
//! runs.

use super::apply::Report;
use super::interruption::Interruption;
use super::open_files::{FileId, OpenFiles};
use super::search::{Owners, RunFile};
use anyhow::anyhow;
use std::collections::HashSet;
use std::path::Path;
use varve_format::BLOCK_BYTES;
use varve_libfs::posix::FdRanges;
use varve_libfs::{DEDUPE_RANGES_MAX, Deduped, Errno};
use varve_similarity::candidates::Run;
use varve_similarity::files::{ReadRate, State};

/// Bytes that are compared and shared in one call: as many as the daemon takes at once.
const STEP_BYTES: u64 = 16 << 20;
/// Files of one call: fewer than are kept open, so that none is closed before it.
const FILES_MAX: usize = 32;

/// A range, by file and first byte, that is to be shared with another one.
#[derive(Debug, Clone, Copy)]
struct Pair {
    source: (FileId, u64),
    target: (FileId, u64),
    len: u64,
}

/// Ranges that wait for the next call.
#[derive(Debug, Default)]
pub struct Waiting {
    pairs: Vec<Pair>,
    files: HashSet<FileId>,
    bytes: u64,
}

/// Shares runs.
pub struct Deduper<'a> {
    pub files: OpenFiles<'a>,
    pub owners: &'a Owners,
    pub dry_run: bool,
    pub report: &'a mut Report,
    pub waiting: Waiting,
    /// Bound on the bytes that are compared.
    pub rate: ReadRate,
    /// Shows the bytes that are shared; fails when the command must stop.
    pub progress: &'a dyn Fn(u64) -> Result<(), Interruption>,
}

impl Deduper<'_> {
    /// Shares all runs.
    pub fn share_all(&mut self, state: &State, runs: RunFile) -> Result<(), Interruption> {
        let unreadable =
            |error: std::io::Error| anyhow::Error::new(error).context("cannot read the runs that were found");
        for run in runs.into_runs().map_err(unreadable)? {
            let run = run.map_err(unreadable)?;
            self.report.runs += 1;
            self.share_run(state, &run)?;
        }
        self.share_waiting()
    }

    fn progress(&self) -> Result<(), Interruption> {
        (self.progress)(self.report.shared_bytes + self.report.already_shared_bytes)
    }

    fn share_run(&mut self, state: &State, run: &Run) -> Result<(), Interruption> {
        let (Some(at), Some(same)) = (state.place(run.at), state.place(run.same_as)) else {
            return Ok(());
        };
        let (Some(target), Some(source)) = (state.file_at(run.at), state.file_at(run.same_as)) else {
            return Ok(());
        };
        let mut len = (run.blocks * BLOCK_BYTES).min(at.left_bytes).min(same.left_bytes);
        // A part of a block is shared only where both files end.
        if !len.is_multiple_of(BLOCK_BYTES) && at.left_bytes != same.left_bytes {
            len = len / BLOCK_BYTES * BLOCK_BYTES;
        }
        // Those that wait stay open until they are shared.
        let ids = [target.id(), source.id()];
        if self.waiting.files.len() + 2 > FILES_MAX && !ids.iter().all(|id| self.waiting.files.contains(id)) {
            self.share_waiting()?;
        }
        for file in [target, source] {
            if let Some(why) = self.files.check(file)? {
                self.report.skip(&file.path, &why, len);
                return Ok(());
            }
        }
        // Ranges of one file that overlap are shared in steps as long as the distance.
        let step = match target.id() == source.id() {
            true => at.offset_bytes.abs_diff(same.offset_bytes).min(STEP_BYTES),
            false => STEP_BYTES,
        };
        if step == 0 {
            return Ok(());
        }
        for start in (0..len).step_by(step as usize) {
            self.add(Pair {
                source: (source.id(), same.offset_bytes + start),
                target: (target.id(), at.offset_bytes + start),
                len: step.min(len - start),
            })?;
        }
        Ok(())
    }

    /// Has a range wait for the next call, after those for which there is no room.
    fn add(&mut self, pair: Pair) -> Result<(), Interruption> {
        if self.waiting.bytes + pair.len > STEP_BYTES || self.waiting.pairs.len() == DEDUPE_RANGES_MAX {
            self.share_waiting()?;
        }
        self.waiting.bytes += pair.len;
        self.waiting.files.extend([pair.source.0, pair.target.0]);
        self.waiting.pairs.push(pair);
        Ok(())
    }

    /// Shares what waits, in one call; if that is refused as a whole, range by range.
    fn share_waiting(&mut self) -> Result<(), Interruption> {
        let Waiting { pairs, bytes, .. } = std::mem::take(&mut self.waiting);
        if pairs.is_empty() {
            return Ok(());
        }
        self.progress()?;
        self.rate.take(bytes).map_err(|_| Interruption::Signal)?;
        match self.call(&pairs) {
            Ok(told) => pairs
                .iter()
                .zip(told)
                .try_for_each(|(pair, told)| self.note(pair, told)),
            Err(Errno(libc::EOPNOTSUPP)) => Err(Interruption::Error(anyhow!(
                "the pool is of an older format, which has no shared blocks; stop it and run \
                 `varve upgrade {}`",
                self.files.pool().dir().display()
            ))),
            Err(_) => pairs.iter().try_for_each(|pair| {
                let alone = self.call(std::slice::from_ref(pair));
                let told = alone.map_or_else(
                    |Errno(errno)| Deduped {
                        errno,
                        ..Deduped::default()
                    },
                    |told| told.first().copied().unwrap_or_default(),
                );
                self.note(pair, told)
            }),
        }
    }

    fn call(&self, pairs: &[Pair]) -> Result<Vec<Deduped>, Errno> {
        let fd = |id| {
            self.files.get(id).map(|file| {
                file.changed.set(!self.dry_run);
                file.fd
            })
        };
        let ranges = pairs.iter().map(|pair| {
            Some(FdRanges {
                from: fd(pair.source.0)?,
                offset: pair.source.1,
                to: fd(pair.target.0)?,
                to_offset: pair.target.1,
                len: pair.len,
            })
        });
        let ranges: Option<Vec<_>> = ranges.collect();
        self.files
            .dedupe(&ranges.ok_or(Errno(libc::ESTALE))?, self.dry_run)
    }

    /// Counts what became of a range.
    fn note(&mut self, pair: &Pair, told: Deduped) -> Result<(), Interruption> {
        let mut told = told;
        let user = |id| self.owners.get(&id).map(|owner| owner.0);
        let same_user = user(pair.source.0) == user(pair.target.0);
        // Across users only blocks of a source that has none in NVM are shared: if the one range may not be
        // the source, the other is tried.
        if told.errno == libc::EOPNOTSUPP && !same_user {
            let turned = Pair {
                source: pair.target,
                target: pair.source,
                len: pair.len,
            };
            if let Ok(again) = self.call(&[turned]) {
                told = again.first().copied().unwrap_or(told);
            }
        }
        self.report.shared_bytes += told.shared_bytes;
        self.report.freed_bytes += told.freed_bytes;
        self.report.already_shared_bytes += told.already_bytes;
        self.report.differing_bytes += told.differing_bytes;
        if told.shared_bytes > 0 && !self.dry_run {
            self.report.files.extend([pair.target.0, pair.source.0]);
        }
        if told.errno == 0 {
            return Ok(());
        }
        let done = told.shared_bytes + told.already_bytes + told.differing_bytes;
        let Some(target) = self.files.get(pair.target.0) else {
            return Ok(());
        };
        let path = target.path.clone();
        let why = skip_reason(&path, Errno(told.errno))?;
        self.report.skip(&path, why, pair.len.saturating_sub(done));
        Ok(())
    }
}
/// Returns why a range is left for which the daemon has refused a call; fails if the whole command must end.
fn skip_reason(path: &Path, errno: Errno) -> Result<&'static str, Interruption> {
    match errno.0 {
        libc::ENOSPC => Err(Interruption::NoSpace(path.to_owned())),
        libc::EPERM => {
            Ok("it belongs to another user than the file with the same bytes (dedup_scope in varve.toml)")
        }
        libc::EACCES => Ok("it may not be read or written"),
        libc::EOPNOTSUPP => Ok("its bytes are in NVM, and belong to several users"),
        libc::EMLINK => Ok("a block has as many owners as a block can have"),
        libc::EINVAL => Ok("changed while it was shared"),
        libc::ENOENT | libc::ESTALE => Ok("it is gone"),
        _ => Err(Interruption::daemon(path, errno)),
    }
}
