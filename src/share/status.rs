//! `varve dedup status` and `varve usage`: bytes of files in a pool that are alone, and that are shared.

use super::tally::{Sums, Tally};
use crate::dedup::args::{DedupStatusArgs, UsageArgs};
use crate::dedup::tell_errors;
use crate::in_pool::InPool;
use crate::out;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use varve_kernelfs::pool::size;
use varve_libfs::{Errno, OwnedBlocks};
use varve_similarity::files::{Filter, Found, walk};

/// Asks for the owners of a file's blocks.
pub fn parts_of(pool: &InPool, path: &Path, mut each: impl FnMut(&OwnedBlocks)) -> anyhow::Result<()> {
    let inner = pool.inner(path)?;
    let fd = pool.posix.open(&inner, libc::O_RDONLY, 0).map_err(why)?;
    let told = pool.posix.for_each_owned(fd, 0, 0, &mut each);
    let _ = pool.posix.close(fd);
    told.map_err(why)
}

/// Says why a file's owners were not told.
fn why(errno: Errno) -> anyhow::Error {
    match errno.0 {
        libc::EPERM => anyhow::anyhow!("it belongs to another user, who alone is told of its blocks"),
        errno => anyhow::Error::new(std::io::Error::from_raw_os_error(errno)),
    }
}

/// A set of files.
pub struct Set {
    pub tally: Tally,
    /// Files that were asked about.
    pub files: u64,
    /// Files with shared blocks.
    pub sharing: u64,
    pub found: Found,
}

/// Asks about all files below some paths; `each` is told of every one.
pub fn set_of(
    pool: &InPool,
    paths: &[PathBuf],
    filter: &Filter,
    each: &mut dyn FnMut(&Path, Sums),
) -> anyhow::Result<Set> {
    let mut set = Set {
        tally: Tally::default(),
        files: 0,
        sharing: 0,
        found: Found::default(),
    };
    let mut errors = Vec::new();
    set.found = walk(paths, filter, &mut |chosen| {
        let mut own = Tally::default();
        let told = parts_of(pool, &chosen.path, |part| {
            set.tally.add(part);
            own.add(part);
        });
        match told {
            Ok(()) => {
                let sums = own.sums(pool.privileged);
                set.files += 1;
                set.sharing += u64::from(sums.shared > 0);
                each(&chosen.path, sums);
            }
            Err(error) if errors.len() < 100 => errors.push(format!("{}: {error}", chosen.path.display())),
            Err(_) => {}
        }
        true
    });
    set.found.errors.append(&mut errors);
    Ok(set)
}

fn numbers(sums: Sums) -> Value {
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
    let pool = InPool::of(&args.paths)?;
    let set = set_of(&pool, &args.paths, &Filter::default(), &mut |_, _| ())?;
    let sums = set.tally.sums(pool.privileged);
    tell_errors(&set.found);
    if args.json {
        let mut told = numbers(sums);
        told["files"] = json!(set.files);
        told["files_sharing"] = json!(set.sharing);
        told["set_only_bytes"] = json!(pool.privileged.then_some(sums.set_only));
        told["undo_copies_bytes"] = json!(sums.to_copy);
        told["errors"] = json!(set.found.errors);
        out::line(&format!("{told:#}"));
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
    pool.end()
}

/// `varve usage`.
pub fn usage(args: &UsageArgs) -> anyhow::Result<()> {
    let pool = InPool::of(&args.paths)?;
    let mut lists = Vec::new();
    if !args.json {
        out::line("     total      alone     shared set shared  path");
    }
    for path in &args.paths {
        let mut files = Vec::new();
        let set = set_of(
            &pool,
            std::slice::from_ref(path),
            &Filter::default(),
            &mut |path, sums| match (args.summarize, args.json) {
                (true, _) => {}
                (false, true) => {
                    let mut file = numbers(sums);
                    file["path"] = json!(path.to_string_lossy());
                    files.push(file);
                }
                (false, false) => out::line(&row(sums, None, path)),
            },
        )?;
        tell_errors(&set.found);
        let sums = set.tally.sums(pool.privileged);
        if args.json {
            let mut told = numbers(sums);
            told["path"] = json!(path.to_string_lossy());
            told["file_count"] = json!(set.files);
            told["files"] = json!((!args.summarize).then_some(files));
            told["errors"] = json!(set.found.errors);
            lists.push(told);
        } else if args.summarize || path.is_dir() {
            out::line(&row(sums, Some(sums.set_shared), path));
        }
    }
    if args.json {
        out::line(&format!("{:#}", Value::Array(lists)));
    }
    pool.end()
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
