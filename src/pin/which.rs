//! `varve which-tier`: where the data of files is, and why.

use super::tree::{Entry, Paths};
use crate::out;
use crate::pin_args::WhichTierArgs;
use crate::pool::Pool;
use anyhow::Context;
use serde::Serialize;
use std::collections::BTreeMap;
use varve_format::{FileBlock, Pin, PinTo, PinnedBy};
use varve_ipc::{Admin, IpcError, PINS_MAX};
use varve_kernelfs::pool::size::show;
use varve_kernelfs::{PlacedExtent, PlacedFile};

/// A file's data by extents.
#[derive(Debug, Serialize)]
pub struct Placed {
    path: String,
    size_bytes: u64,
    /// Bytes on each tier.
    tiers: BTreeMap<String, u64>,
    /// `policy`, `nvm`, `ssd`, `hdd`, or `stay`.
    pin: String,
    /// Who has set the pin.
    by: PinnedBy,
    /// What keeps pinned data from moving.
    pub waiting: Option<String>,
    extents: Vec<PlacedExtent>,
}

impl Placed {
    /// Bytes that a pin wants elsewhere.
    pub fn away_bytes(&self) -> u64 {
        if matches!(&*self.pin, "policy" | "stay") {
            return 0;
        }
        let away = self
            .extents
            .iter()
            .filter(|part| part.tier != self.pin && !part.shared);
        away.map(|part| part.len_bytes).sum()
    }

    fn sentence(&self) -> String {
        let of = match self.by {
            PinnedBy::Command => "",
            PinnedBy::Directory => ", as its directory",
            PinnedBy::Rule => ", by a rule",
        };
        let why = match &*self.pin {
            "policy" => "where the policy puts it".to_owned(),
            "stay" => format!("not moved{of}"),
            tier => format!("pinned to {tier}{of}"),
        };
        match (self.away_bytes(), &self.waiting) {
            (0, _) => why,
            (away, None) => format!("{why}; {} on the way", show(away)),
            (away, Some(waiting)) => format!("{why}; {} {waiting}", show(away)),
        }
    }
}

fn name(pin: Pin) -> String {
    match pin.to {
        PinTo::Policy => "policy".into(),
        PinTo::Stay => "stay".into(),
        PinTo::Tier(tier) => tier.name().into(),
    }
}

/// Asks where a file's data is. `None`: it does not exist any more.
pub fn placed(pool: &Pool, entry: &Entry) -> anyhow::Result<Option<Placed>> {
    let (mut from, mut whole) = (FileBlock(0), None::<Placed>);
    loop {
        let json = match pool.ask(Admin::Placed { key: entry.key, from }) {
            Ok(json) => json,
            Err(error) => match error.downcast_ref::<IpcError>() {
                Some(IpcError::Errno(libc::ENOENT)) => return Ok(None),
                Some(IpcError::Errno(libc::EPERM)) => anyhow::bail!(
                    "only root and the owner of the pool {} may do that",
                    pool.dir().display()
                ),
                _ => return Err(error),
            },
        };
        let part: PlacedFile =
            serde_json::from_str(&json).context("the daemon's answer is not what was expected")?;
        let placed = whole.get_or_insert_with(|| Placed {
            path: entry.path.display().to_string(),
            size_bytes: entry.size_bytes,
            tiers: BTreeMap::new(),
            pin: name(part.pin),
            by: part.pin.by,
            waiting: part.waiting,
            extents: Vec::new(),
        });
        for extent in &part.extents {
            *placed.tiers.entry(extent.tier.clone()).or_insert(0) += extent.len_bytes;
        }
        placed.extents.extend(part.extents);
        match part.next {
            Some(next) => from = FileBlock(next),
            None => return Ok(whole),
        }
    }
}

/// `varve which-tier`.
pub fn which_tier(args: &WhichTierArgs) -> anyhow::Result<()> {
    let paths = Paths::find(&args.at.paths)?;
    paths
        .pool
        .ask(Admin::DigestAll)
        .map_err(|error| match error.downcast_ref::<IpcError>() {
            Some(IpcError::Errno(libc::EPERM)) => anyhow::anyhow!(
                "only root and the owner of the pool {} may do that",
                paths.pool.dir().display()
            ),
            _ => error,
        })?;
    let (mut tiers, mut files) = (BTreeMap::<String, u64>::new(), Vec::new());
    let mut count = 0_u64;
    let errors = paths.walk(PINS_MAX, &mut |entries| {
        for entry in entries.iter().filter(|entry| entry.is_file) {
            let Some(placed) = placed(&paths.pool, entry)? else {
                continue;
            };
            for (tier, bytes) in &placed.tiers {
                *tiers.entry(tier.clone()).or_insert(0) += bytes;
            }
            count += 1;
            if args.at.json {
                files.push(placed);
            } else {
                tell(&placed, args.extents);
            }
        }
        Ok(Default::default())
    })?;
    if args.at.json {
        let value = serde_json::json!({"files": files, "tiers": tiers, "errors": errors});
        out::line(&format!("{value:#}"));
    } else if count != 1 {
        out::line(&format!("{count} files: {}", by_tier(&tiers)));
    }
    match errors.first() {
        None => Ok(()),
        Some(first) => anyhow::bail!("{} directories could not be read: {first}", errors.len()),
    }
}

fn by_tier(tiers: &BTreeMap<String, u64>) -> String {
    let parts = ["nvm", "ssd", "hdd"].into_iter().filter_map(|tier| {
        let bytes = tiers.get(tier)?;
        Some(format!("{} on {tier}", show(*bytes)))
    });
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() {
        "no data".into()
    } else {
        parts.join(", ")
    }
}

fn tell(placed: &Placed, extents: bool) {
    out::line(&format!(
        "{}: {} ({})",
        placed.path,
        by_tier(&placed.tiers),
        placed.sentence()
    ));
    if !extents {
        return;
    }
    for extent in &placed.extents {
        let end = extent.offset_bytes + extent.len_bytes;
        let shared = if extent.shared { ", shared" } else { "" };
        out::line(&format!(
            "  {}..{end} {}{shared}, {} blocks read in {} steps",
            extent.offset_bytes, extent.tier, extent.reads.blocks, extent.reads.steps
        ));
    }
}
