//! `varve dedup undo`: gives files blocks of their own again, in place.

use super::status::{parts_of, set_of};
use super::tally::BLOCK;
use crate::dedup::args::UndoArgs;
use crate::dedup::{Reading, tell_errors};
use crate::in_pool::InPool;
use crate::out;
use crate::signals::Stop;
use anyhow::{Context, bail};
use serde_json::json;
use std::path::{Path, PathBuf};
use varve_kernelfs::pool::size;
use varve_libfs::Errno;
use varve_similarity::files::{ReadRate, walk};

/// Bytes that are undone in one call, so that signals are heeded and the rate is kept.
const STEP: u64 = 16 << 20;

/// What was done.
#[derive(Debug, Default)]
struct Done {
    files: u64,
    bytes: u64,
    left: Vec<(PathBuf, String)>,
}

/// Why the undo ended before it was through.
enum Ended {
    NoSpace(PathBuf),
    Signal,
    Lost(PathBuf, Errno),
}

/// Undoes all shares of the files below some paths.
pub fn undo(args: &UndoArgs) -> anyhow::Result<()> {
    let stop = Stop::install().context("cannot catch signals")?;
    let pool = InPool::of(&args.paths)?;
    let filter = args.files.filter()?;
    let set = set_of(&pool, &args.paths, &filter, &mut |_, _| ())?;
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
    let (mut done, mut ended) = (Done::default(), None);
    if !args.dry_run && sums.shared > 0 {
        let mut rate = args.files.rate();
        let reading = Reading::start();
        walk(&args.paths, &filter, &mut |chosen| {
            ended = undo_file(&pool, &chosen.path, &mut rate, &stop, &mut done);
            let why = args.files.rate.map_or("", |_| "(held to --rate)");
            reading.at(done.bytes, why);
            ended.is_none()
        });
    }
    if args.json {
        let left = |(path, why): &(PathBuf, String)| json!({"path": path.to_string_lossy(), "why": why});
        let told = json!({
            "dry_run": args.dry_run,
            "files": set.files,
            "files_sharing": set.sharing,
            "shared_bytes": sums.shared,
            "copies_bytes": sums.to_copy,
            "free_bytes": free,
            "files_undone": done.files,
            "bytes_undone": done.bytes,
            "left": done.left.iter().map(left).collect::<Vec<_>>(),
            "errors": set.found.errors,
            "complete": ended.is_none() && done.left.is_empty() && !args.dry_run,
        });
        out::line(&format!("{told:#}"));
    } else {
        for (path, why) in &done.left {
            out::line(&format!("left {}: {why}", path.display()));
        }
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
                done.files,
                size::show(done.bytes)
            ));
        }
    }
    match ended {
        None => pool.end(),
        Some(Ended::Signal) => {
            bail!("stopped by a signal; what was done stays done, the rest is shared: run it again")
        }
        Some(Ended::NoSpace(path)) => bail!(
            "no space was left at {}; what was done stays done, the rest is shared, and nothing is lost: free \
            some space and run it again",
            path.display()
        ),
        Some(Ended::Lost(path, errno)) => bail!(
            "the pool's daemon went away or failed at {}: {}; what was done stays done, the rest is shared: \
            see `varve status {}`, and run it again",
            path.display(),
            std::io::Error::from_raw_os_error(errno.0),
            pool.pool.dir().display()
        ),
    }
}

/// Undoes the shares of one file; why the whole must end, if it must.
fn undo_file(pool: &InPool, path: &Path, rate: &mut ReadRate, stop: &Stop, done: &mut Done) -> Option<Ended> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let told = parts_of(pool, path, |part| {
        if part.number.is_none() {
            return;
        }
        let (at, len) = (part.file_block.0 * BLOCK, u64::from(part.blocks) * BLOCK);
        match ranges.last_mut() {
            Some((first, bytes)) if *first + *bytes == at && *bytes + len <= STEP => *bytes += len,
            _ => ranges.push((at, len)),
        }
    });
    if let Err(error) = told {
        done.left.push((path.to_owned(), error.to_string()));
        return None;
    }
    if ranges.is_empty() {
        return None;
    }
    let inner = match pool.inner(path) {
        Ok(inner) => inner,
        Err(error) => {
            done.left.push((path.to_owned(), error.to_string()));
            return None;
        }
    };
    let posix = &pool.posix;
    let fd = match posix.open(&inner, libc::O_RDONLY, 0) {
        Ok(fd) => fd,
        Err(errno) => return refused(path, errno, done),
    };
    let mut ended = None;
    let steps = ranges.iter().flat_map(|(at, len)| {
        let end = at + len;
        (*at..end)
            .step_by(STEP as usize)
            .map(move |at| (at, STEP.min(end - at)))
    });
    let left = done.left.len();
    for (at, len) in steps {
        if stop.count() > 0 {
            ended = Some(Ended::Signal);
            break;
        }
        match posix.unshare_range(fd, at, len) {
            Ok(()) => {
                done.bytes += len;
                rate.take(len);
            }
            Err(errno) => {
                ended = refused(path, errno, done);
                break;
            }
        }
    }
    let synced = posix.fsync(fd);
    let _ = posix.close(fd);
    if ended.is_none() && done.left.len() == left {
        if let Err(errno) = synced {
            return refused(path, errno, done);
        }
        done.files += 1;
    }
    ended
}

/// What a refusal means for the file, and for the whole.
fn refused(path: &Path, errno: Errno, done: &mut Done) -> Option<Ended> {
    let why = match errno.0 {
        libc::ENOSPC => return Some(Ended::NoSpace(path.to_owned())),
        libc::ENOENT | libc::ESTALE => "it is gone".into(),
        libc::EACCES | libc::EPERM => "it belongs to another user".into(),
        libc::EISDIR | libc::EINVAL | libc::ELOOP => "something else has taken its place".into(),
        libc::EUCLEAN | libc::EILSEQ | libc::ENODATA => "its bytes are damaged; see `varve scrub`".into(),
        _ => return Some(Ended::Lost(path.to_owned(), errno)),
    };
    done.left.push((path.to_owned(), why));
    None
}
