//! `varve pin`, `unpin`, `exclude`: where an operator wants the data of files. The daemon keeps the pins and
//! moves the data; this walks the tree, since a pin holds for what is in a directory already.

mod rules;
mod tree;
mod which;

pub use rules::rules;
pub use which::which_tier;

use crate::out;
use crate::pin_args::{ExcludeArgs, PinArgs, UnpinArgs};
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tree::Paths;
use varve_format::{InodeKey, Pin, PinTo, PinnedBy};
use varve_ipc::{Admin, IpcError, PINS_MAX};
use varve_kernelfs::PinsSet;

/// How long `--wait` waits while the data cannot move.
const STUCK_LIMIT: Duration = Duration::from_secs(5);

/// `varve pin`.
pub fn pin(args: &PinArgs) -> anyhow::Result<()> {
    let to = PinTo::Tier(args.tier);
    let said = format!("pinned to {}", args.tier.name());
    set(&args.at.paths, to, args.at.json, &said)?;
    if args.wait {
        let paths = Paths::find(&args.at.paths)?;
        wait(&paths)?;
    }
    Ok(())
}

/// `varve unpin`.
pub fn unpin(args: &UnpinArgs) -> anyhow::Result<()> {
    set(&args.at.paths, PinTo::Policy, args.at.json, "not pinned any more")
}

/// `varve exclude`.
pub fn exclude(args: &ExcludeArgs) -> anyhow::Result<()> {
    set(&args.at.paths, PinTo::Stay, args.at.json, "not moved any more")
}

/// Sets the pin of paths and of all that is below them.
fn set(paths: &[PathBuf], to: PinTo, as_json: bool, said: &str) -> anyhow::Result<()> {
    let paths = Paths::find(paths)?;
    let (mut whole, mut left) = (PinsSet::default(), Vec::new());
    let progress = out::Progress::start("setting pins");
    let roots: BTreeSet<InodeKey> = paths.roots.iter().map(|root| root.key).collect();
    let errors = paths.walk(PINS_MAX, &mut |entries| {
        let mut kept = BTreeSet::new();
        for is_root in [true, false] {
            let some = entries
                .iter()
                .filter(|entry| roots.contains(&entry.key) == is_root);
            let keys: Vec<_> = some.map(|entry| entry.key).collect();
            if keys.is_empty() {
                continue;
            }
            let pin = Pin {
                to,
                by: if is_root && to != PinTo::Policy {
                    PinnedBy::Command
                } else {
                    PinnedBy::Directory
                },
            };
            let done = ask(&paths.pool, keys, pin, is_root)?;
            whole.set += done.set;
            kept.extend(done.kept);
        }
        let own = entries.iter().filter(|entry| kept.contains(&entry.key));
        left.extend(own.map(|entry| entry.path.clone()));
        Ok(kept)
    })?;
    drop(progress);
    if as_json {
        let value = json!({"inodes": whole.set, "with_pins_of_their_own": left, "errors": errors});
        out::line(&format!("{value:#}"));
    } else {
        out::line(&format!("{said}: {} files and directories", whole.set));
        for path in &left {
            out::line(&format!("{} keeps its own", path.display()));
        }
    }
    match errors.first() {
        None => Ok(()),
        Some(first) => bail!("{} directories could not be read: {first}", errors.len()),
    }
}

/// Has the daemon set the pins of some inodes.
fn ask(pool: &Pool, keys: Vec<InodeKey>, pin: Pin, over_own: bool) -> anyhow::Result<PinsSet> {
    let asked = pool.ask(Admin::Pin { keys, pin, over_own });
    let json = asked.map_err(|error| described(error, pool.dir(), pin))?;
    serde_json::from_str(&json).context("the daemon's answer is not what was expected")
}

/// The message for a request that was refused.
fn described(error: anyhow::Error, pool: &Path, pin: Pin) -> anyhow::Error {
    let pool = pool.display();
    match error.downcast_ref::<IpcError>() {
        Some(IpcError::Errno(libc::ENXIO)) => anyhow::anyhow!(
            "the pool {pool} has no {}: `varve status {pool}` shows its tiers",
            pin.tier().map_or("such tier", |tier| tier.name())
        ),
        Some(IpcError::Errno(libc::EPERM)) => {
            anyhow::anyhow!("only root and the owner of the pool {pool} may do that")
        }
        _ => error,
    }
}

/// Waits until all data is on the tiers of its pins.
fn wait(paths: &Paths) -> anyhow::Result<()> {
    let _progress = out::Progress::start("moving");
    let (mut before, mut moved) = (u64::MAX, Instant::now());
    loop {
        let (mut away, mut waiting) = (0, None);
        paths.walk(PINS_MAX, &mut |entries| {
            for entry in entries.iter().filter(|entry| entry.is_file) {
                let Some(placed) = which::placed(&paths.pool, entry)? else {
                    continue;
                };
                away += placed.away_bytes();
                waiting = waiting.take().or(placed.waiting);
            }
            Ok(BTreeSet::new())
        })?;
        if away == 0 {
            return Ok(());
        }
        if away != before {
            (before, moved) = (away, Instant::now());
        } else if moved.elapsed() >= STUCK_LIMIT {
            bail!(
                "{away} bytes are not there yet ({}); they move when they can, `varve which-tier` shows it",
                waiting.unwrap_or_else(|| "waiting for their turn".into())
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
