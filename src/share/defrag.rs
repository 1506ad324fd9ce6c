//! `varve defrag`: moves together what files have alone on SSD or HDD.

use super::interruption::Interruption;
use super::status::for_each_part;
use super::undo::{Report, end};
use crate::dedup::args::DefragArgs;
use crate::dedup::{Reading, require_roots, tell_errors};
use crate::out;
use crate::pool_session::PoolSession;
use crate::signals::Stop;
use anyhow::Context;
use serde_json::json;
use std::path::{Path, PathBuf};
use varve_format::{BLOCK_BYTES, Tier};
use varve_kernelfs::pool::size;
use varve_libfs::OwnedBlocks;
use varve_similarity::files::{Found, ReadRate, walk};
use varve_store::{moved_blocks, staying_blocks};

/// Bytes that are looked at in one call, so that signals are heeded and the rate is kept.
const STEP_BYTES: u64 = 16 << 20;

/// In how many pieces files lie on SSD and HDD, of what they have alone.
#[derive(Debug, Default, Clone, Copy)]
struct Pieces {
    pieces: u64,
    /// Blocks of short pieces that have another short one beside them, if a step can take both.
    movable_blocks: u64,
}

/// Counts the pieces of one file.
#[derive(Debug, Default)]
struct Counter {
    sums: Pieces,
    /// On SSD and HDD: the block after the last one, blocks of the piece, and of a short one before it.
    open: [Option<(u64, u64, u64)>; 2],
}

impl Counter {
    fn add(&mut self, part: &OwnedBlocks) {
        let Some(tier) = (part.tier as usize).checked_sub(Tier::Ssd as usize) else {
            return;
        };
        if part.owners > 1 {
            return;
        }
        let (start, len) = (part.block.0, u64::from(part.blocks));
        match &mut self.open[tier] {
            Some((end, blocks, _)) if *end == start => {
                *end += len;
                *blocks += len;
            }
            _ => {
                let before = self.close(tier);
                self.sums.pieces += 1;
                self.open[tier] = Some((start + len, len, before));
            }
        }
    }

    /// Ends a piece; returns its blocks if it is a short one that was not counted as movable.
    fn close(&mut self, tier: usize) -> u64 {
        let Some((_, blocks, before)) = self.open[tier].take() else {
            return 0;
        };
        let on = if tier == 0 { Tier::Ssd } else { Tier::Hdd };
        match before {
            _ if blocks >= staying_blocks(on) => 0,
            // The one before is counted.
            u64::MAX => {
                self.sums.movable_blocks += blocks;
                u64::MAX
            }
            1.. if before + blocks <= moved_blocks(on) => {
                self.sums.movable_blocks += before + blocks;
                u64::MAX
            }
            _ => blocks,
        }
    }

    fn end(mut self) -> Pieces {
        for tier in 0..2 {
            self.close(tier);
        }
        self.sums
    }
}

/// Counts the pieces of a file.
fn pieces_of(pool: &PoolSession, path: &Path) -> anyhow::Result<Pieces> {
    let mut counter = Counter::default();
    for_each_part(pool, path, |part| counter.add(part))?;
    Ok(counter.end())
}

/// What was found and done.
#[derive(Debug, Default)]
struct Done {
    files: u64,
    before: Pieces,
    after: u64,
    report: Report,
    found: Found,
}

/// Moves together what the files below some paths have alone.
pub fn defrag(args: &DefragArgs) -> anyhow::Result<()> {
    let stop = Stop::install().context("cannot catch signals")?;
    let pool = PoolSession::open(&args.pool.paths)?;
    let mut files: Vec<(PathBuf, Pieces)> = Vec::new();
    let (mut done, mut errors) = (Done::default(), Vec::new());
    done.found = walk(&args.pool.paths, &args.files.filter()?, &mut |chosen| {
        match pieces_of(&pool, &chosen.path) {
            Ok(pieces) => files.push((chosen.path.clone(), pieces)),
            Err(error) => errors.push(format!("{}: {error}", chosen.path.display())),
        }
        stop.count() == 0
    });
    done.found.errors.append(&mut errors);
    tell_errors(&done.found);
    let mut result = match stop.count() {
        0 => Ok(()),
        _ => Err(Interruption::Signal),
    };
    let mut rate = args.files.rate().until(stop.flag());
    let reading = Reading::start(&args.files);
    for (path, before) in &files {
        done.files += 1;
        done.before.pieces += before.pieces;
        done.before.movable_blocks += before.movable_blocks;
        let mut after = before.pieces;
        if !args.dry_run && result.is_ok() && before.movable_blocks > 0 {
            result = defrag_file(&pool, path, &mut rate, &stop, &mut done.report);
            after = pieces_of(&pool, path).map_or(after, |pieces| pieces.pieces);
            reading.at(done.report.bytes);
        }
        done.after += after;
    }
    tell(args, &done, result.is_ok());
    end(pool, result, "lies as it lay")?;
    require_roots(&done.found)
}

/// Moves together what one file has alone.
fn defrag_file(
    pool: &PoolSession,
    path: &Path,
    rate: &mut ReadRate,
    stop: &Stop,
    report: &mut Report,
) -> Result<(), Interruption> {
    let pool_path = match pool.pool_path(path) {
        Ok(pool_path) => pool_path,
        Err(error) => {
            report.skip(path, error.to_string());
            return Ok(());
        }
    };
    let posix = &pool.posix;
    let opened = posix.open(&pool_path, libc::O_RDONLY | libc::O_NOFOLLOW, 0);
    let fd = match opened {
        Ok(fd) => fd,
        Err(errno) => return report.refuse(path, errno),
    };
    let mut moved = 0;
    let steps = posix.fstat(fd).and_then(|attr| {
        for at in (0..attr.size_bytes).step_by(STEP_BYTES as usize) {
            if stop.count() > 0 {
                break;
            }
            let bytes = posix.defrag_range(fd, at, STEP_BYTES)?;
            moved += bytes;
            if rate.take(bytes).is_err() {
                break;
            }
        }
        Ok(())
    });
    let synced = posix.fsync(fd);
    let _ = posix.close(fd);
    report.bytes += moved;
    report.files += u64::from(moved > 0);
    match steps.and(synced) {
        Ok(()) if stop.count() > 0 => Err(Interruption::Signal),
        Ok(()) => Ok(()),
        Err(errno) => report.refuse(path, errno),
    }
}

/// Says what was done, or would be.
fn tell(args: &DefragArgs, done: &Done, is_done: bool) {
    let Done {
        files,
        before,
        after,
        report,
        found,
    } = done;
    let movable = before.movable_blocks * BLOCK_BYTES;
    if args.pool.json {
        let value = json!({
            "dry_run": args.dry_run,
            "files": files,
            "pieces_before": before.pieces,
            "pieces_after": after,
            "movable_bytes": movable,
            "files_moved": report.files,
            "bytes_moved": report.bytes,
            "left": report.left(),
            "errors": found.errors,
            "complete": is_done && report.skipped.is_empty() && !args.dry_run,
        });
        return out::line(&format!("{value:#}"));
    }
    report.tell_left();
    let pieces = before.pieces;
    out::line(&match args.dry_run {
        true => format!(
            "{files} files lie in {pieces} pieces on the devices; up to {} would be moved",
            size::show(movable)
        ),
        false => format!(
            "{files} files; pieces on the devices: {pieces} before, {after} now; {} moved, of {} files",
            size::show(report.bytes),
            report.files
        ),
    });
}

#[cfg(test)]
mod tests {
    use super::Counter;
    use varve_format::{BlockNo, FileBlock, Tier};
    use varve_libfs::OwnedBlocks;

    fn count(parts: &[(u64, u32, Tier, u32)]) -> (u64, u64) {
        let mut counter = Counter::default();
        for (block, blocks, tier, owners) in parts {
            counter.add(&OwnedBlocks {
                file_block: FileBlock(0),
                blocks: *blocks,
                number: None,
                owners: *owners,
                tier: *tier,
                block: BlockNo(*block),
            });
        }
        let pieces = counter.end();
        (pieces.pieces, pieces.movable_blocks)
    }

    #[test]
    fn pieces_are_counted_by_tier_and_shared_parts_and_nvm_are_none() {
        let (ssd, hdd) = (Tier::Ssd, Tier::Hdd);
        let parts = [
            (10, 2, hdd, 1),
            (500, 9, hdd, 2),
            (12, 3, hdd, 1),
            (7, 1, ssd, 1),
            (40, 1, Tier::Nvm, 1),
        ];
        assert_eq!(count(&parts), (2, 0));
        // Three short ones, a long one, and one that is alone.
        let parts = [
            (10, 2, hdd, 1),
            (20, 3, hdd, 1),
            (30, 4, hdd, 1),
            (1000, 2048, hdd, 1),
            (50, 5, hdd, 1),
        ];
        assert_eq!(count(&parts), (5, 9));
        // Two that do not fit into one step, and a third that fits to the second.
        let parts = [(10, 1500, hdd, 1), (2000, 600, hdd, 1), (3000, 7, hdd, 1)];
        assert_eq!(count(&parts), (3, 607));
        assert_eq!(count(&[]), (0, 0));
    }
}
