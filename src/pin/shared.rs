//! `varve dedup place` and `unplace`: on which tier an operator wants what files share. The daemon keeps the
//! wishes and moves the data.

use super::tree::{self, Entry, Paths};
use super::{described, wait};
use crate::dedup::args::{PlaceArgs, UnplaceArgs};
use crate::out;
use crate::pool::Pool;
use crate::share::sums_of;
use anyhow::{Context, bail};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::PathBuf;
use varve_format::Tier;
use varve_ipc::{Admin, PINS_MAX};
use varve_kernelfs::PinsSet;
use varve_kernelfs::pool::size;

/// `varve dedup place`.
pub fn place(args: &PlaceArgs) -> anyhow::Result<()> {
    set(&args.pool.paths, Some(args.tier), args.pool.json)?;
    if args.wait {
        let away = |placed: &super::which::Placed| {
            let waiting = placed.shared_waiting.clone();
            (placed.shared_away_bytes(), waiting)
        };
        wait(&Paths::find(&args.pool.paths)?, &away)?;
    }
    Ok(())
}

/// `varve dedup unplace`.
pub fn unplace(args: &UnplaceArgs) -> anyhow::Result<()> {
    set(&args.pool.paths, None, args.pool.json)
}

/// What a walk has set.
#[derive(Debug, Default)]
struct Done {
    files: u64,
    gone: Vec<String>,
}

/// Sets the wish of all files below some paths.
fn set(names: &[PathBuf], to: Option<Tier>, as_json: bool) -> anyhow::Result<()> {
    let paths = Paths::find(names)?;
    let mut done = Done::default();
    let progress = out::Progress::start("setting wishes");
    let walked = paths.walk(PINS_MAX, &mut |entries| {
        let files: Vec<&Entry> = entries.iter().filter(|entry| entry.is_file).collect();
        let others = entries
            .iter()
            .find(|entry| entry.is_root && !entry.is_file && !entry.is_dir);
        if let Some(other) = others {
            bail!("{} is neither a file nor a directory", other.path.display());
        }
        if files.is_empty() {
            return Ok(BTreeSet::new());
        }
        let set = ask(&paths.pool, &files, to)?;
        done.files += set.set;
        if set.gone > 0 {
            done.gone.push(tree::text(&files[0].path));
        }
        Ok(BTreeSet::new())
    })?;
    drop(progress);
    let (sharing, sums) = sums_of(names)?;
    if as_json {
        let value = json!({
            "tier": to.map(Tier::name),
            "files": done.files,
            "files_sharing": sharing,
            "shared_bytes": sums.shared,
            "set_shared_bytes": sums.set_shared,
            "errors": walked.errors(),
        });
        out::line(&format!("{value:#}"));
    } else {
        let said = match to {
            Some(tier) => format!("placed on {}", tier.name()),
            None => "not placed any more".into(),
        };
        out::line(&format!(
            "{said}: what {} files share, {}, kept in {}",
            done.files,
            size::show(sums.shared),
            size::show(sums.set_shared)
        ));
        if to.is_some() && sharing < done.files {
            let alone = done.files - sharing;
            out::line(&format!(
                "{alone} of them share nothing yet: it holds for what they share later"
            ));
        }
    }
    if let Some(near) = done.gone.first() {
        bail!("files went away or were renamed meanwhile, near {near}: run it again");
    }
    walked.check()
}

/// Has the daemon set the wish of some files.
fn ask(pool: &Pool, files: &[&Entry], to: Option<Tier>) -> anyhow::Result<PinsSet> {
    let files = files.iter().map(|entry| entry.pinned()).collect();
    let asked = pool.ask(Admin::PlaceShared { files, to });
    let json = asked.map_err(|error| described(error, pool.dir(), to))?;
    serde_json::from_str(&json).context("the daemon's answer is not what was expected")
}
