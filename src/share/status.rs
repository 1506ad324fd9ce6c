//! `varve dedup status` and `varve usage`: bytes of files in a pool that are alone, and that are shared.

use super::tally::{Sums, Tally};
use crate::dedup::args::{DedupStatusArgs, UsageArgs};
use crate::dedup::{require_roots, tell_errors};
use crate::out;
use crate::pool_session::PoolSession;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use varve_kernelfs::pool::size;
use varve_libfs::{Errno, OwnedBlocks};
use varve_similarity::files::{Filter, Found, walk};

/// Most errors that are reported.
const ERRORS_MAX: usize = 100;

/// Calls `each` with the parts of a file and their numbers of owners.
pub fn for_each_part(
    pool: &PoolSession,
    path: &Path,
    mut each: impl FnMut(&OwnedBlocks),
) -> anyhow::Result<()> {
    let pool_path = pool.pool_path(path)?;
    let fd = pool.posix.open(&pool_path, libc::O_RDONLY, 0).map_err(describe)?;
    let queried = pool.posix.for_each_owned(fd, 0, 0, &mut each);
    let _ = pool.posix.close(fd);
    queried.map_err(describe)
}

/// The message for a query of a file's owners that failed.
fn describe(errno: Errno) -> anyhow::Error {
    match errno.0 {
        libc::EPERM => anyhow::anyhow!("it belongs to another user, who alone is told of its blocks"),
        errno => anyhow::Error::new(std::io::Error::from_raw_os_error(errno)),
    }
}

/// What the files of a set take.
pub struct SetUsage {
    pub tally: Tally,
    /// Files that are counted.
    pub files: u64,
    /// Files with shared blocks.
    pub sharing: u64,
    pub found: Found,
}

/// Counts the blocks of all files below some paths; calls `each` with the sums of every one, and ends when it
/// returns false.
pub fn usage_of(
    pool: &PoolSession,
    paths: &[PathBuf],
    filter: &Filter,
    each: &mut dyn FnMut(&Path, Sums) -> bool,
) -> SetUsage {
    let mut set = SetUsage {
        tally: Tally::default(),
        files: 0,
        sharing: 0,
        found: Found::default(),
    };
    let mut errors = Vec::new();
    set.found = walk(paths, filter, &mut |chosen| {
        let mut own = Tally::default();
        let counted = for_each_part(pool, &chosen.path, |part| {
            set.tally.add(part);
            own.add(part);
        });
        match counted {
            Ok(()) => {
                let sums = own.sums(pool.privileged);
                set.files += 1;
                set.sharing += u64::from(sums.shared > 0);
                return each(&chosen.path, sums);
            }
            Err(error) if errors.len() < ERRORS_MAX => {
                errors.push(format!("{}: {error}", chosen.path.display()))
            }
            Err(_) => {}
        }
        true
    });
    set.found.errors.append(&mut errors);
    set
}

/// Counts the blocks of all files below some paths. Returns the number of files with shared blocks, and the
/// sums.
pub fn sums_of(paths: &[PathBuf]) -> anyhow::Result<(u64, Sums)> {
    let pool = PoolSession::open(paths)?;
    let set = usage_of(&pool, paths, &Filter::default(), &mut |_, _| true);
    tell_errors(&set.found);
    let sums = set.tally.sums(pool.privileged);
    pool.end().and_then(|()| require_roots(&set.found))?;
    Ok((set.sharing, sums))
}

fn to_json(sums: Sums) -> Value {
    json!({
        "total_bytes": sums.total(),
        "alone_bytes": sums.alone,
        "shared_bytes": sums.shared,
        "set_shared_bytes": sums.set_shared,
        "saved_bytes": sums.saved,
    })
}

/// `varve dedup status`.
pub fn status(args: &DedupStatusArgs) -> anyhow::Result<()> {
    let pool = PoolSession::open(&args.pool.paths)?;
    let set = usage_of(&pool, &args.pool.paths, &Filter::default(), &mut |_, _| true);
    let sums = set.tally.sums(pool.privileged);
    tell_errors(&set.found);
    if args.pool.json {
        let mut value = to_json(sums);
        value["files"] = json!(set.files);
        value["files_sharing"] = json!(set.sharing);
        value["set_only_bytes"] = json!(pool.privileged.then_some(sums.set_only));
        value["undo_copies_bytes"] = json!(sums.to_copy);
        value["errors"] = json!(set.found.errors);
        out::line(&format!("{value:#}"));
    } else {
        out::line(&format!(
            "{} files, {} of them with shared blocks",
            set.files, set.sharing
        ));
        out::line(&format!("alone    {}", size::show(sums.alone)));
        let beyond = match pool.privileged {
            true => format!(
                ", {} of them also with files elsewhere",
                size::show(sums.set_shared - sums.set_only)
            ),
            false => String::new(),
        };
        out::line(&format!(
            "shared   {}, kept in {}{beyond}",
            size::show(sums.shared),
            size::show(sums.set_shared),
        ));
        out::line(&format!("saved    {}", size::show(sums.saved)));
        out::line(&format!(
            "`varve dedup undo` would copy {}",
            size::show(sums.to_copy)
        ));
    }
    pool.end().and_then(|()| require_roots(&set.found))
}

/// `varve usage`.
pub fn usage(args: &UsageArgs) -> anyhow::Result<()> {
    let pool = PoolSession::open(&args.pool.paths)?;
    let (mut lists, mut missed) = (Vec::new(), Found::default());
    if !args.pool.json {
        out::line("     total      alone     shared set shared  path");
    }
    for path in &args.pool.paths {
        let mut files = Vec::new();
        let set = usage_of(
            &pool,
            std::slice::from_ref(path),
            &Filter::default(),
            &mut |path, sums| {
                match (args.summarize, args.pool.json) {
                    (true, _) => {}
                    (false, true) => {
                        let mut file = to_json(sums);
                        file["path"] = json!(path.to_string_lossy());
                        files.push(file);
                    }
                    (false, false) => out::line(&row(sums, None, path)),
                }
                true
            },
        );
        tell_errors(&set.found);
        missed.roots_missed += set.found.roots_missed;
        let sums = set.tally.sums(pool.privileged);
        if args.pool.json {
            let mut value = to_json(sums);
            value["path"] = json!(path.to_string_lossy());
            value["file_count"] = json!(set.files);
            value["files"] = json!((!args.summarize).then_some(files));
            value["errors"] = json!(set.found.errors);
            lists.push(value);
        } else if args.summarize || path.is_dir() {
            out::line(&row(sums, Some(sums.set_shared), path));
        }
    }
    if args.pool.json {
        out::line(&format!("{:#}", Value::Array(lists)));
    }
    pool.end().and_then(|()| require_roots(&missed))
}

/// Columns of one file, or of one path's files together.
fn row(sums: Sums, set_shared: Option<u64>, path: &Path) -> String {
    format!(
        "{:>10} {:>10} {:>10} {:>10}  {}",
        size::show(sums.total()),
        size::show(sums.alone),
        size::show(sums.shared),
        set_shared.map_or_else(|| "-".into(), size::show),
        path.display()
    )
}
