//! `varve which-tier`: where the data of files is, and why.

use super::tree::{self, Entry, Paths};
use crate::out;
use crate::pin_args::WhichTierArgs;
use crate::pool::Pool;
use anyhow::Context;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use varve_format::{FileBlock, InodeKey, Pin, PinTo, PinnedBy};
use varve_ipc::{Admin, PINS_MAX};
use varve_kernelfs::pool::size::show;
use varve_kernelfs::{PlacedExtent, PlacedFile};

/// A file's data by extents.
#[derive(Debug, Serialize)]
pub struct Placed {
    #[serde(skip)]
    pub key: InodeKey,
    path: String,
    #[serde(skip)]
    is_dir: bool,
    size_bytes: u64,
    /// Bytes on each tier.
    tiers: BTreeMap<String, u64>,
    /// `policy`, `nvm`, `ssd`, `hdd`, or `stay`.
    pub pin: String,
    /// Who has set the pin.
    by: PinnedBy,
    /// What keeps pinned data from moving.
    pub waiting: Option<String>,
    extents: Vec<PlacedExtent>,
}

impl Placed {
    /// Bytes that a pin wants elsewhere.
    pub fn away_bytes(&self) -> u64 {
        self.elsewhere(false)
    }

    /// The pin, if it comes before the rules.
    pub fn before_rules(&self) -> Option<String> {
        match (self.by, &*self.pin) {
            (PinnedBy::Rule, _) | (PinnedBy::Directory, "policy") => None,
            _ => Some(self.why()),
        }
    }

    fn why(&self) -> String {
        let of = match self.by {
            PinnedBy::Command => "",
            PinnedBy::Directory => ", as its directory",
            PinnedBy::Rule => ", by a rule",
        };
        match &*self.pin {
            "policy" if self.by == PinnedBy::Command => {
                "where the policy puts it, unlike its directory".to_owned()
            }
            "policy" => "where the policy puts it".to_owned(),
            "stay" => format!("not moved{of}"),
            tier => format!("pinned to {tier}{of}"),
        }
    }

    fn sentence(&self) -> String {
        let why = self.why();
        let shared = self.elsewhere(true);
        let shared = match shared {
            0 => String::new(),
            bytes => format!("; {} shared with others and not moved", show(bytes)),
        };
        match (self.away_bytes(), &self.waiting) {
            (0, _) => why + &shared,
            (away, None) => format!("{why}; {} on the way{shared}", show(away)),
            (away, Some(waiting)) => format!("{why}; {} {waiting}{shared}", show(away)),
        }
    }

    /// Bytes on other tiers than that of the pin, those with other owners or those without.
    fn elsewhere(&self, shared: bool) -> u64 {
        if matches!(&*self.pin, "policy" | "stay") {
            return 0;
        }
        let parts = self.extents.iter();
        let away = parts.filter(|part| part.tier != self.pin && part.shared == shared);
        away.map(|part| part.len_bytes).sum()
    }
}

fn name(pin: Pin) -> String {
    match pin.to {
        PinTo::Policy => "policy".into(),
        PinTo::Stay => "stay".into(),
        PinTo::Tier(tier) => tier.name().into(),
    }
}

/// Asks where the data of files is, and for the pins of directories that commands have set. What does not
/// exist any more is left out.
pub fn placed(pool: &Pool, entries: &[Entry]) -> anyhow::Result<Vec<Placed>> {
    let asked: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.is_file || entry.is_dir)
        .collect();
    let mut found: Vec<Option<Placed>> = asked.iter().map(|_| None).collect();
    let mut next: Vec<(usize, FileBlock)> = (0..asked.len()).map(|at| (at, FileBlock(0))).collect();
    while !next.is_empty() {
        let inodes = next.iter().map(|(at, from)| (asked[*at].key, *from)).collect();
        let json = pool.ask(Admin::Placed { inodes });
        let json = json.map_err(|error| super::described(error, pool.dir(), None))?;
        let parts: Vec<Option<PlacedFile>> =
            serde_json::from_str(&json).context("the daemon's answer is not what was expected")?;
        let mut more = Vec::new();
        for ((at, _), part) in next.into_iter().zip(parts) {
            let Some(part) = part else { continue };
            let entry = asked[at];
            let placed = found[at].get_or_insert_with(|| Placed {
                key: entry.key,
                path: tree::text(&entry.path),
                is_dir: entry.is_dir,
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
            more.extend(part.next.map(|next| (at, FileBlock(next))));
        }
        next = more;
    }
    Ok(found.into_iter().flatten().collect())
}

/// `varve which-tier`.
pub fn which_tier(args: &WhichTierArgs) -> anyhow::Result<()> {
    let paths = Paths::find(&args.at.paths)?;
    let digested = paths.pool.ask(Admin::DigestAll);
    digested.map_err(|error| super::described(error, paths.pool.dir(), None))?;
    let (mut tiers, mut files, mut dirs) = (BTreeMap::<String, u64>::new(), Vec::new(), Vec::new());
    let mut count = 0_u64;
    let walked = paths.walk(PINS_MAX, &mut |entries| {
        for placed in placed(&paths.pool, entries)? {
            let own = placed.by == PinnedBy::Command;
            if placed.is_dir {
                if args.at.json && own {
                    dirs.push(serde_json::json!({"path": placed.path, "pin": placed.pin}));
                } else if own {
                    out::line(&format!("{}/: {}", placed.path, placed.sentence()));
                }
                continue;
            }
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
        Ok(BTreeSet::new())
    })?;
    if args.at.json {
        let errors = walked.errors();
        let value = serde_json::json!({
            "files": files, "pinned_directories": dirs, "tiers": tiers, "errors": errors,
        });
        out::line(&format!("{value:#}"));
    } else if count != 1 {
        out::line(&format!("{count} files: {}", by_tier(&tiers)));
    }
    walked.check()
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
            "  {}..{end} {}{shared}, {} reads and {} writes",
            extent.offset_bytes, extent.tier, extent.reads, extent.writes
        ));
    }
}
