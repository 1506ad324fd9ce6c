//! `varve dedup apply`: finds runs of blocks that look the same in files of a running pool, has its daemon
//! compare and share them, and reports.

use super::dedupe::{Deduper, Waiting};
use super::interruption::Interruption;
use super::open_files::{FileId, OpenFiles};
use super::search::{Owners, TempDir, search, sharing_sets};
use super::sums::PoolSums;
use crate::dedup::args::ApplyArgs;
use crate::dedup::scan::{Counts, Knows, look_at, open_state};
use crate::dedup::{Reading, require_roots, tell_errors};
use crate::out;
use crate::pool_session::PoolSession;
use crate::signals::Stop;
use anyhow::{Context, anyhow, bail};
use rustix::process::geteuid;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use varve_kernelfs::pool::size;
use varve_similarity::files::{Chosen, State};

/// Files whose reasons are kept; of more, only the number of bytes.
const SKIPPED_MAX: usize = 10_000;

/// What was done.
#[derive(Debug, Default)]
pub struct Report {
    pub passes: u32,
    pub runs: u64,
    pub shared_bytes: u64,
    /// Of the shared bytes: those of blocks that no other file had, and that are free now.
    pub freed_bytes: u64,
    pub already_shared_bytes: u64,
    /// Bytes with equal checksums that are different.
    pub differing_bytes: u64,
    /// Bytes that were not shared, and the reason by file.
    pub skipped_bytes: u64,
    pub skipped: BTreeMap<PathBuf, String>,
    /// Files that share blocks now.
    pub files: BTreeSet<FileId>,
}

impl Report {
    /// Notes that bytes of a file were not shared.
    pub fn skip(&mut self, path: &Path, why: &str, bytes: u64) {
        self.skipped_bytes += bytes;
        if self.skipped.len() < SKIPPED_MAX {
            self.skipped
                .entry(path.to_owned())
                .or_insert_with(|| why.to_owned());
        }
    }
}

/// Shares what is the same in the files below some paths.
pub fn apply(args: &ApplyArgs) -> anyhow::Result<()> {
    let stop = Stop::install_for_one().context("cannot catch signals")?;
    let pool = PoolSession::open(&args.pool.paths)?;
    if pool.mount.is_read_only {
        bail!("{} is mounted read-only", pool.mount.at.display());
    }
    // Outlives the state, which is in it.
    let temporary;
    let dir = match &args.state {
        Some(dir) => dir.as_path(),
        None => {
            temporary = TempDir::new()?;
            temporary.as_ref()
        }
    };
    let mut state = open_state(dir)?;
    let mut report = Report::default();
    let mut read_rate = args.files.rate().until(stop.flag());
    let user = geteuid().as_raw();
    let mut owners = Owners::new();
    let paths = &args.pool.paths;
    let mut admit = |chosen: &Chosen| {
        if !pool.privileged && chosen.owner.0 != user {
            report.skip(&chosen.path, "belongs to another user", 0);
            return ControlFlow::Break(());
        }
        owners.insert(chosen.id, chosen.owner);
        ControlFlow::Continue(stop.count() == 0)
    };
    let mut sums = PoolSums::new(&pool, args.full);
    let known: Option<&mut dyn Knows> = Some(&mut sums);
    let (found, counts) = look_at(paths, &args.files, &mut state, &mut read_rate, known, &mut admit)?;
    tell_errors(&found);
    for path in &counts.changing {
        report.skip(Path::new(path), "changed while it was read", 0);
    }
    let shared = share(args, &pool, dir, &mut state, &owners, &stop, &mut report);
    print(args, &counts, &report, read_rate.bytes(), shared.is_ok());
    match shared {
        Ok(()) => pool.end().and_then(|()| require_roots(&found)),
        Err(interruption) => Err(error(interruption, &pool)),
    }
}

/// Finds and shares the runs of all sets of files.
fn share(
    args: &ApplyArgs,
    pool: &PoolSession,
    dir: &Path,
    state: &mut State,
    owners: &Owners,
    stop: &Stop,
    report: &mut Report,
) -> Result<(), Interruption> {
    if stop.count() > 0 {
        return Err(Interruption::Signal);
    }
    let reading = Reading::start(&args.files);
    let mut deduper = Deduper {
        files: OpenFiles::new(pool),
        owners,
        dry_run: args.dry_run,
        report,
        waiting: Waiting::default(),
        rate: args.files.rate().until(stop.flag()),
        progress: &|shared_bytes| {
            reading.at(shared_bytes);
            match stop.count() {
                0 => Ok(()),
                _ => Err(Interruption::Signal),
            }
        },
    };
    let scope = pool.pool.host().config().dedup_scope;
    let shared = sharing_sets(scope, owners).into_iter().try_for_each(|set| {
        let (runs, passes) = search(args, dir, state, owners, set, stop)?;
        deduper.report.passes += passes;
        deduper.share_all(state, runs)
    });
    let closed = deduper.files.close_all();
    shared.and(closed)
}

/// The message for a command that ended early.
fn error(interruption: Interruption, pool: &PoolSession) -> anyhow::Error {
    let again = "what is shared stays shared, nothing is lost, and another run goes on from here";
    match interruption {
        Interruption::Signal => anyhow!("stopped by a signal; {again}"),
        Interruption::NoSpace(path) => anyhow!(
            "no space was left for the records of shared blocks at {}; {again}",
            path.display()
        ),
        Interruption::Daemon(path, errno) => anyhow!(
            "the pool's daemon went away or failed at {}: {}; {again} (see `varve status {}`)",
            path.display(),
            std::io::Error::from_raw_os_error(errno.0),
            pool.pool.dir().display()
        ),
        Interruption::Error(error) => error,
    }
}

fn print(args: &ApplyArgs, counts: &Counts, report: &Report, read_bytes: u64, complete: bool) {
    let files = counts.unchanged + counts.read + counts.told;
    if args.pool.json {
        let reason = |(path, why): (&PathBuf, &String)| json!({"path": path.to_string_lossy(), "why": why});
        let value = json!({
            "dry_run": args.dry_run,
            "files": files,
            "files_read": counts.read,
            "bytes_read": read_bytes,
            "files_told": counts.told,
            "checksum_bytes_told": counts.told_bytes,
            "passes": report.passes,
            "runs": report.runs,
            "shared_bytes": report.shared_bytes,
            "freed_bytes": report.freed_bytes,
            "files_sharing": report.files.len(),
            "already_shared_bytes": report.already_shared_bytes,
            "differing_bytes": report.differing_bytes,
            "left_bytes": report.skipped_bytes,
            "left": report.skipped.iter().map(reason).collect::<Vec<_>>(),
            "complete": complete,
        });
        return out::line(&format!("{value:#}"));
    }
    for (path, why) in &report.skipped {
        out::line(&format!("left {}: {why}", path.display()));
    }
    out::line(&format!(
        "{files} files: {}; passes: {}",
        counts.text(read_bytes),
        report.passes
    ));
    let what = if args.dry_run {
        "look the same and could be shared"
    } else {
        "shared"
    };
    out::line(&format!(
        "{} {what}, which {} {}; {} were shared already",
        size::show(report.shared_bytes),
        if args.dry_run { "would free" } else { "freed" },
        size::show(report.freed_bytes),
        size::show(report.already_shared_bytes),
    ));
    if report.differing_bytes > 0 {
        out::line(&format!(
            "{} had equal checksums and different bytes",
            size::show(report.differing_bytes)
        ));
    }
    if !report.skipped.is_empty() {
        out::line(&format!(
            "left: {} in {} files",
            size::show(report.skipped_bytes),
            report.skipped.len()
        ));
    }
}
