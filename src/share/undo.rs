//! `varve dedup undo`: gives files blocks of their own again, in place.

use super::interruption::Interruption;
use super::status::{SetUsage, for_each_part, usage_of};
use super::tally::Sums;
use crate::dedup::args::UndoArgs;
use crate::dedup::{Reading, require_roots, tell_errors};
use crate::out;
use crate::pool_session::PoolSession;
use crate::signals::Stop;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use varve_format::BLOCK_BYTES;
use varve_kernelfs::pool::size;
use varve_libfs::posix::Fd;
use varve_libfs::{Errno, Posix};
use varve_similarity::files::ReadRate;

/// Bytes that are undone in one call, so that signals are heeded and the rate is kept.
const STEP_BYTES: u64 = 16 << 20;
/// Bytes between shared parts that are undone in one call.
const GAP_BYTES: u64 = 1 << 20;

/// What was done.
#[derive(Debug, Default)]
pub struct Report {
    pub files: u64,
    pub bytes: u64,
    /// Files that were left, each with the reason.
    pub skipped: Vec<(PathBuf, String)>,
}

impl Report {
    pub fn skip(&mut self, path: &Path, why: String) {
        self.skipped.push((path.to_owned(), why));
    }

    /// Skips a file for which the daemon has refused a call; fails if the whole command must end.
    pub fn refuse(&mut self, path: &Path, errno: Errno) -> Result<(), Interruption> {
        let why = match errno.0 {
            libc::ENOSPC => return Err(Interruption::NoSpace(path.to_owned())),
            libc::ENOENT | libc::ESTALE => "it is gone",
            libc::EACCES | libc::EPERM => "it belongs to another user",
            libc::EISDIR | libc::EINVAL | libc::ELOOP => "something else has taken its place",
            libc::EUCLEAN | libc::EILSEQ | libc::ENODATA => "its bytes are damaged; see `varve scrub`",
            _ => return Err(Interruption::daemon(path, errno)),
        };
        self.skip(path, why.into());
        Ok(())
    }

    /// The files that were left, for JSON.
    pub fn left(&self) -> Vec<Value> {
        let reason = |(path, why): &(PathBuf, String)| json!({"path": path.to_string_lossy(), "why": why});
        self.skipped.iter().map(reason).collect()
    }

    /// Says which files were left.
    pub fn tell_left(&self) {
        for (path, why) in &self.skipped {
            out::line(&format!("left {}: {why}", path.display()));
        }
    }
}

/// Undoes all shares of the files below some paths.
pub fn undo(args: &UndoArgs) -> anyhow::Result<()> {
    let stop = Stop::install_for_one().context("cannot catch signals")?;
    let pool = PoolSession::open(&args.pool.paths)?;
    let filter = args.files.filter()?;
    let mut sharing = Vec::new();
    let set = usage_of(&pool, &args.pool.paths, &filter, &mut |path, sums| {
        if sums.shared > 0 {
            sharing.push(path.to_owned());
        }
        stop.count() == 0
    });
    if stop.count() > 0 {
        bail!("stopped by a signal while the files were counted; nothing was changed");
    }
    let sums = set.tally.sums(pool.privileged);
    let free = pool.free_bytes()?;
    tell_errors(&set.found);
    if sums.to_copy > free && !args.dry_run {
        bail!(
            "the undo copies up to {}, and {} are free; nothing was changed. Free some space, or undo fewer \
            files at a time (of files that share only with each other, the last one needs none)",
            size::show(sums.to_copy),
            size::show(free)
        );
    }
    let (mut report, mut undone) = (Report::default(), Ok(()));
    if !args.dry_run && sums.shared > 0 {
        let mut rate = args.files.rate().until(stop.flag());
        let reading = Reading::start(&args.files);
        // The last first: `apply` has let later files share the blocks of earlier ones, which lie together
        // there, and the last owner keeps them.
        for path in sharing.iter().rev() {
            undone = undo_file(&pool, path, &mut rate, &stop, &mut report);
            reading.at(report.bytes);
            if undone.is_err() {
                break;
            }
        }
    }
    tell(args, &set, sums, free, &report, undone.is_ok());
    end(pool, undone, "is shared")?;
    require_roots(&set.found)
}

/// Ends the session of a command; `rest` says what holds of the files that it did not get to.
pub fn end(pool: PoolSession, done: Result<(), Interruption>, rest: &str) -> anyhow::Result<()> {
    match done {
        Ok(()) => pool.end(),
        Err(Interruption::Signal) => {
            bail!("stopped by a signal; what was done stays done, the rest {rest}: run it again")
        }
        Err(Interruption::NoSpace(path)) => bail!(
            "no space was left at {}; what was done stays done, the rest {rest}, and nothing is lost: free \
            some space and run it again",
            path.display()
        ),
        Err(Interruption::Daemon(path, errno)) => bail!(
            "the pool's daemon went away or failed at {}: {}; what was done stays done, the rest {rest}: \
            see `varve status {}`, and run it again",
            path.display(),
            std::io::Error::from_raw_os_error(errno.0),
            pool.pool.dir().display()
        ),
        Err(Interruption::Error(error)) => Err(error),
    }
}

/// Says what was done, or would be.
fn tell(args: &UndoArgs, set: &SetUsage, sums: Sums, free: u64, report: &Report, is_done: bool) {
    if args.pool.json {
        let value = json!({
            "dry_run": args.dry_run,
            "files": set.files,
            "files_sharing": set.sharing,
            "shared_bytes": sums.shared,
            "copies_bytes": sums.to_copy,
            "free_bytes": free,
            "files_undone": report.files,
            "bytes_undone": report.bytes,
            "left": report.left(),
            "errors": set.found.errors,
            "complete": is_done && report.skipped.is_empty() && !args.dry_run,
        });
        out::line(&format!("{value:#}"));
    } else {
        report.tell_left();
        if args.dry_run {
            out::line(&format!(
                "{} of {} files have shared blocks, {}; an undo copies up to {}, and {} are free",
                set.sharing,
                set.files,
                size::show(sums.shared),
                size::show(sums.to_copy),
                size::show(free)
            ));
        } else {
            out::line(&format!(
                "{} files have blocks of their own again: {}",
                report.files,
                size::show(report.bytes)
            ));
        }
    }
}

/// Undoes the shares of one file.
fn undo_file(
    pool: &PoolSession,
    path: &Path,
    rate: &mut ReadRate,
    stop: &Stop,
    report: &mut Report,
) -> Result<(), Interruption> {
    let ranges = match shared_ranges(pool, path) {
        Ok(ranges) if ranges.is_empty() => return Ok(()),
        Ok(ranges) => ranges,
        Err(error) => {
            report.skip(path, error.to_string());
            return Ok(());
        }
    };
    let pool_path = match pool.pool_path(path) {
        Ok(pool_path) => pool_path,
        Err(error) => {
            report.skip(path, error.to_string());
            return Ok(());
        }
    };
    let posix = &pool.posix;
    let fd = match posix.open(&pool_path, libc::O_RDONLY, 0) {
        Ok(fd) => fd,
        Err(errno) => return report.refuse(path, errno),
    };
    let undone = undo_ranges(posix, fd, &ranges, rate, stop, report);
    let synced = posix.fsync(fd);
    let _ = posix.close(fd);
    match undone.and_then(|()| synced.map_err(Failure::Refused)) {
        Ok(()) => {
            report.files += 1;
            Ok(())
        }
        Err(Failure::Refused(errno)) => report.refuse(path, errno),
        Err(Failure::Stopped) => Err(Interruption::Signal),
    }
}

/// A range of a file with shared parts, in bytes.
struct Shared {
    start: u64,
    len: u64,
    /// What is shared of it.
    shared: u64,
}

/// Returns the shared ranges of a file. Those with little between them are one, so that the daemon can join
/// their pieces.
fn shared_ranges(pool: &PoolSession, path: &Path) -> anyhow::Result<Vec<Shared>> {
    let mut ranges: Vec<Shared> = Vec::new();
    for_each_part(pool, path, |part| {
        if part.number.is_none() {
            return;
        }
        let (start, len) = (
            part.file_block.0 * BLOCK_BYTES,
            u64::from(part.blocks) * BLOCK_BYTES,
        );
        match ranges.last_mut() {
            Some(last)
                if start - (last.start + last.len) <= GAP_BYTES && start + len - last.start <= STEP_BYTES =>
            {
                last.len = start + len - last.start;
                last.shared += len;
            }
            _ => ranges.push(Shared {
                start,
                len,
                shared: len,
            }),
        }
    })?;
    Ok(ranges)
}

/// Why an undo of a file's ranges ended.
enum Failure {
    Stopped,
    Refused(Errno),
}

fn undo_ranges(
    posix: &Posix,
    fd: Fd,
    ranges: &[Shared],
    rate: &mut ReadRate,
    stop: &Stop,
    report: &mut Report,
) -> Result<(), Failure> {
    for range in ranges {
        for done in (0..range.len).step_by(STEP_BYTES as usize) {
            if stop.count() > 0 {
                return Err(Failure::Stopped);
            }
            let bytes = STEP_BYTES.min(range.len - done);
            posix
                .unshare_range(fd, range.start + done, bytes)
                .map_err(Failure::Refused)?;
            // A range of several parts takes one call.
            report.bytes += bytes.min(range.shared);
            rate.take(bytes).map_err(|_| Failure::Stopped)?;
        }
    }
    Ok(())
}
