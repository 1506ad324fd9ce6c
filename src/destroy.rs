//! `varve destroy`, and the hint of `up`, `mkfs` and `status` about live directories of pools that no longer
//! exist.

use crate::cli::DestroyArgs;
use crate::exit::Usage;
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use varve_kernelfs::pool::size::show;
use varve_kernelfs::pool::{Orphan, orphans};
use varve_libfs::mounts::pool_mounts;

/// `varve destroy`.
pub fn destroy(args: &DestroyArgs) -> anyhow::Result<()> {
    match &args.pool {
        Some(pool) => destroy_pool(args, &Pool::open(pool)?),
        None => destroy_orphans(args),
    }
}

/// Asks the user, unless `--yes` is given.
fn is_wanted(args: &DestroyArgs, what: &str) -> anyhow::Result<bool> {
    if args.yes {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        bail!(Usage(format!(
            "{what}: say --yes; nobody can be asked, standard input is no terminal"
        )));
    }
    let mut err = std::io::stderr().lock();
    let _ = write!(err, "{what}. This cannot be undone. Go on? [y/N] ");
    let _ = err.flush();
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn destroy_pool(args: &DestroyArgs, pool: &Pool) -> anyhow::Result<()> {
    let host = pool.host();
    let dir = pool.dir().display();
    if let Some(at) = mounted_at(pool.dir())? {
        bail!(
            "{dir} is mounted at {}: `varve down {dir}` first, or `varve umount`",
            at.display()
        );
    }
    if pool.has_daemon() {
        bail!("a daemon serves {dir}: `varve down {dir}` first");
    }
    let what = format!(
        "{dir} and all that is in it ({} on this host) is destroyed",
        show(host.host_bytes())
    );
    if !is_wanted(args, &what)? {
        bail!("nothing was done");
    }
    let done = host
        .destroy()
        .with_context(|| format!("{dir} is not destroyed, or in part; run `varve destroy {dir}` again"))?;
    if args.json {
        let done = json!({
            "pool": out::path(pool.dir()),
            "freed_bytes": done.freed_bytes,
            "devices_left_as_they_are": done.devices,
            "files_left": done.left.iter().map(|path| out::path(path)).collect::<Vec<_>>(),
        });
        out::line(&format!("{done:#}"));
        return Ok(());
    }
    out::line(&format!(
        "destroyed {dir}: {} are free again",
        show(done.freed_bytes)
    ));
    for device in &done.devices {
        out::line(&format!(
            "{device} held a tier and is as it was. Before another pool can have it, its first MiB must be \
            zeros \
             (`dd if=/dev/zero of=DEVICE bs=1M count=1`); be sure that it still is that device"
        ));
    }
    for path in &done.left {
        out::line(&format!("left {}, which is not the pool's", path.display()));
    }
    Ok(())
}

fn mounted_at(pool: &Path) -> anyhow::Result<Option<PathBuf>> {
    let table = std::fs::read("/proc/self/mountinfo").context("cannot read the table of mounts")?;
    let mut mounts = pool_mounts(&table).into_iter();
    Ok(mounts.find(|mount| mount.pool == pool).map(|mount| mount.at))
}

fn destroy_orphans(args: &DestroyArgs) -> anyhow::Result<()> {
    let found = orphans(&args.live);
    let bytes: u64 = found.iter().map(|orphan| orphan.bytes).sum();
    if !found.is_empty() {
        for orphan in &found {
            out::note(&line(orphan));
        }
        let what = format!(
            "memory of {} of pools that are gone is freed ({})",
            show(bytes),
            args.live.display()
        );
        if !is_wanted(args, &what)? {
            bail!("nothing was done");
        }
    }
    for orphan in &found {
        orphan.remove()?;
    }
    if args.json {
        out::line(&format!(
            "{:#}",
            json!({ "removed": list(&found), "freed_bytes": bytes })
        ));
    } else {
        out::line(&format!(
            "removed {} of pools that are gone: {} are free again",
            count(found.len()),
            show(bytes)
        ));
    }
    Ok(())
}

fn count(directories: usize) -> String {
    match directories {
        1 => "1 live directory".into(),
        n => format!("{n} live directories"),
    }
}

fn line(orphan: &Orphan) -> String {
    format!(
        "{}: {}, of {}, which is gone",
        orphan.live.display(),
        show(orphan.bytes),
        orphan.pool.display()
    )
}

/// Converts orphans to JSON.
pub fn list(orphans: &[Orphan]) -> serde_json::Value {
    orphans
        .iter()
        .map(|orphan| json!({ "live": out::path(&orphan.live), "pool": out::path(&orphan.pool), "bytes": orphan.bytes }))
        .collect()
}

/// Finds live directories without a pool beside that of `pool`.
pub fn beside(pool: &Pool) -> Vec<Orphan> {
    pool.host().live().parent().map(orphans).unwrap_or_default()
}

/// Returns the hint about orphans, if there are any.
pub fn remark(found: &[Orphan]) -> Option<String> {
    let parent = found.first()?.live.parent()?;
    let bytes: u64 = found.iter().map(|orphan| orphan.bytes).sum();
    let of = if parent == Path::new("/dev/shm") {
        String::new()
    } else {
        format!(" --live {}", parent.display())
    };
    Some(format!(
        "{} under {} hold {} of pools that are gone; `varve destroy --orphans{of}` removes them",
        count(found.len()),
        parent.display(),
        show(bytes)
    ))
}

/// Prints the hint on standard error.
pub fn tell(pool: &Pool) {
    if let Some(remark) = remark(&beside(pool)) {
        out::note(&format!("varve: {remark}"));
    }
}
