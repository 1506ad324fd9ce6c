//! Has the daemon share runs of equal-looking blocks, and counts what comes of it. Finds no runs.

use super::apply::Report;
use super::interruption::Interruption;
use super::open_files::{FileId, FileRange, OpenFiles};
use super::search::{Owners, RunFile};
use anyhow::anyhow;
use varve_format::BLOCK_BYTES;
use varve_libfs::Errno;
use varve_similarity::candidates::Run;
use varve_similarity::files::{ReadRate, State};

/// Bytes that are compared and shared in one call: as many as the daemon takes at once.
const STEP_BYTES: u64 = 16 << 20;

/// Shares runs.
pub struct Deduper<'a> {
    pub files: OpenFiles<'a>,
    pub owners: &'a Owners,
    pub dry_run: bool,
    pub report: &'a mut Report,
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
            self.progress()?;
            let run = run.map_err(unreadable)?;
            self.report.runs += 1;
            self.share_run(state, &run)?;
        }
        Ok(())
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
        for file in [target, source] {
            if let Some(why) = self.files.check(file)? {
                self.report.skip(&file.path, &why, len);
                return Ok(());
            }
        }
        // Ranges of one file that overlap are shared in steps as long as the distance.
        let step = match target.id() == source.id() {
            true => at.offset_bytes.abs_diff(same.offset_bytes),
            false => len,
        };
        if step == 0 {
            return Ok(());
        }
        for start in (0..len).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
            self.share_range(
                (source.id(), same.offset_bytes + start),
                (target.id(), at.offset_bytes + start),
                step.min(len - start),
            )?;
        }
        Ok(())
    }

    /// Shares what is not shared yet in two ranges that do not overlap, each given by file and first byte.
    fn share_range(
        &mut self,
        (source_id, source_offset): (FileId, u64),
        (target_id, target_offset): (FileId, u64),
        len: u64,
    ) -> Result<(), Interruption> {
        let (Some(source), Some(target)) = (self.files.get(source_id), self.files.get(target_id)) else {
            return Ok(());
        };
        let source = FileRange::new(source, source_offset, len);
        let target = FileRange::new(target, target_offset, len);
        let path = &target.file.path;
        let unshared = match self.files.unshared(source, target) {
            Ok(unshared) => unshared,
            Err(errno) => {
                let why = skip_reason(&target, errno)?;
                self.report.skip(path, why, len);
                return Ok(());
            }
        };
        let unshared_bytes: u64 = unshared.iter().map(|part| part.len).sum();
        self.report.already_shared_bytes += len - unshared_bytes.min(len);
        let user = |id| self.owners.get(&id).map(|owner| owner.0);
        let same_user = user(source_id) == user(target_id);
        for part in unshared {
            if self.dry_run {
                self.report.shared_bytes += part.len;
                self.report.freed_bytes += part.alone;
                continue;
            }
            for done in (0..part.len).step_by(STEP_BYTES as usize) {
                self.progress()?;
                let (offset, bytes) = (part.start + done, STEP_BYTES.min(part.len - done));
                self.rate.take(bytes);
                let (source, target) = (source.part(offset, bytes), target.part(offset, bytes));
                match self.files.dedupe(source, target, same_user) {
                    Ok(true) => {
                        self.report.shared_bytes += bytes;
                        self.report.freed_bytes += part.alone.min(part.len) * bytes / part.len;
                        self.report.files.extend([target_id, source_id]);
                    }
                    Ok(false) => self.report.differing_bytes += bytes,
                    Err(Errno(libc::EOPNOTSUPP)) if same_user => {
                        return Err(Interruption::Error(anyhow!(
                            "the pool is of an older format, which has no shared blocks; stop it and run \
                             `varve upgrade {}`",
                            self.files.pool().dir().display()
                        )));
                    }
                    Err(errno) => {
                        let why = skip_reason(&target, errno)?;
                        self.report.skip(path, why, part.len - done);
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns why a range is left for which the daemon has refused a call; fails if the whole command must end.
fn skip_reason(target: &FileRange<'_>, errno: Errno) -> Result<&'static str, Interruption> {
    let path = &target.file.path;
    match errno.0 {
        libc::ENOSPC => Err(Interruption::NoSpace(path.clone())),
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
