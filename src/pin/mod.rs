//! `varve pin`, `unpin`, `exclude`, `dedup place`: where an operator wants the data of files. The daemon keeps
//! the pins and moves the data; this walks the tree, since a pin holds for what is in a directory already.

mod rules;
mod shared;
mod tree;
mod which;

pub use rules::rules;
pub use shared::{place, unplace};
pub use which::which_tier;

use crate::out;
use crate::pin_args::{ExcludeArgs, PinArgs, UnpinArgs};
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tree::{Entry, Paths};
use varve_format::{Pin, PinTo, PinnedBy, Tier};
use varve_ipc::{Admin, IpcError, PINS_MAX, Pinned};
use varve_kernelfs::PinsSet;
use which::Placed;

/// How long `--wait` waits while the data cannot move.
const STUCK_LIMIT: Duration = Duration::from_secs(5);

/// `varve pin`.
pub fn pin(args: &PinArgs) -> anyhow::Result<()> {
    let said = format!("pinned to {}", args.tier.name());
    set(&args.at.paths, PinTo::Tier(args.tier), args.at.json, &said)?;
    if args.wait {
        let away = |placed: &Placed| match placed.pin == args.tier.name() {
            true => (placed.away_bytes(), placed.waiting.clone()),
            false => (0, None),
        };
        wait(&Paths::find(&args.at.paths)?, &away)?;
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
    let done = RefCell::new(Done::default());
    let progress = out::Progress::start("setting pins");
    let walked = paths.walk_all(
        PINS_MAX,
        &mut || *done.borrow_mut() = Done::default(),
        &mut |entries| {
            let mut kept = BTreeSet::new();
            for is_root in [true, false] {
                let some = entries.iter().filter(|entry| entry.is_root == is_root);
                let inodes: Vec<_> = some.map(Entry::pinned).collect();
                if inodes.is_empty() {
                    continue;
                }
                let by = match is_root {
                    true => PinnedBy::Command,
                    false => PinnedBy::Directory,
                };
                let set = ask(&paths.pool, inodes, Pin { to, by }, is_root)?;
                done.borrow_mut().set += set.set;
                kept.extend(set.kept);
            }
            let own = entries.iter().filter(|entry| kept.contains(&entry.key));
            done.borrow_mut()
                .left
                .extend(own.map(|entry| tree::text(&entry.path)));
            Ok(kept)
        },
    )?;
    drop(progress);
    let Done { set, left } = done.into_inner();
    if as_json {
        let value = json!({"inodes": set, "with_pins_of_their_own": left, "errors": walked.errors()});
        out::line(&format!("{value:#}"));
    } else {
        out::line(&format!("{said}: {set} files and directories"));
        for path in &left {
            out::line(&format!("{path} keeps its own"));
        }
    }
    walked.check()
}

/// What a walk has set.
#[derive(Debug, Default)]
struct Done {
    set: u64,
    /// Paths with pins of their own.
    left: Vec<String>,
}

/// Has the daemon set the pins of some inodes.
fn ask(pool: &Pool, inodes: Vec<Pinned>, pin: Pin, over_own: bool) -> anyhow::Result<PinsSet> {
    let asked = pool.ask(Admin::Pin {
        inodes,
        pin,
        over_own,
    });
    let json = asked.map_err(|error| described(error, pool.dir(), pin.tier()))?;
    serde_json::from_str(&json).context("the daemon's answer is not what was expected")
}

/// The message for a request that was refused.
fn described(error: anyhow::Error, pool: &Path, tier: Option<Tier>) -> anyhow::Error {
    let pool = pool.display();
    match error.downcast_ref::<IpcError>() {
        Some(IpcError::Errno(libc::ENXIO)) => anyhow::anyhow!(
            "the pool {pool} has no {}: `varve status {pool}` shows its tiers",
            tier.map_or("such tier", |tier| tier.name())
        ),
        Some(IpcError::Errno(libc::EPERM)) => {
            anyhow::anyhow!("only root and the owner of the pool {pool} may do that")
        }
        _ => error,
    }
}

/// Waits until no data is away any more: `away_of` says how many bytes of a file are, and why they wait.
fn wait(paths: &Paths, away_of: &dyn Fn(&Placed) -> (u64, Option<String>)) -> anyhow::Result<()> {
    let _progress = out::Progress::start("moving");
    let (mut before, mut moved) = (u64::MAX, Instant::now());
    loop {
        let (mut away, mut waiting) = (0, None);
        let walked = paths.walk(PINS_MAX, &mut |entries| {
            for placed in which::placed(&paths.pool, entries)? {
                let (bytes, why) = away_of(&placed);
                away += bytes;
                waiting = waiting.take().or(why);
            }
            Ok(BTreeSet::new())
        })?;
        if away == 0 && walked.gone == 0 {
            return walked.check();
        }
        if away != before {
            (before, moved) = (away, Instant::now());
        } else if moved.elapsed() >= STUCK_LIMIT {
            bail!(
                "{away} bytes are not there yet ({}); they move when they can, `varve which-tier` shows it",
                waiting.unwrap_or_else(|| "waiting for their turn, or damaged: see the daemon's log".into())
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
