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
    /// The tier that was asked for what it shares.
    shared_pin: Option<String>,
    /// What keeps shared data from moving there.
    pub shared_waiting: Option<String>,
    extents: Vec<PlacedExtent>,
}

impl Placed {
    /// Bytes that a pin wants elsewhere.
    pub fn away_bytes(&self) -> u64 {
        self.elsewhere(false)
    }

    /// Shared bytes that are placed elsewhere.
    pub fn shared_away_bytes(&self) -> u64 {
        let is_away = |part: &&PlacedExtent| part.placed.as_ref().is_some_and(|tier| *tier != part.tier);
        self.extents
            .iter()
            .filter(is_away)
            .map(|part| part.len_bytes)
            .sum()
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
        let shared = self.shared_sentence();
        let away = on_the_way(self.away_bytes(), self.waiting.as_deref());
        why + &away + &shared
    }

    /// What is said of the part with other owners: where it is placed, or that the pin does not move it.
    fn shared_sentence(&self) -> String {
        let mut said = String::new();
        let placed: BTreeSet<&str> = self
            .extents
            .iter()
            .filter_map(|part| part.placed.as_deref())
            .collect();
        // Others of its owners may wish it on a faster tier, or be the only ones that wish it somewhere.
        let asked = self.shared_pin.as_deref();
        let tiers: Vec<&str> = match placed.is_empty() {
            true => asked.into_iter().collect(),
            false => placed.into_iter().collect(),
        };
        if !tiers.is_empty() {
            let of = if asked.is_some() { "" } else { ", as another file" };
            let away = on_the_way(self.shared_away_bytes(), self.shared_waiting.as_deref());
            said = format!("; pinned to {}: shared part{of}{away}", tiers.join(" and "));
        }
        match self.elsewhere(true) {
            0 => said,
            bytes => format!("{said}; {} shared with others and not moved", show(bytes)),
        }
    }

    /// Bytes on other tiers than that of the pin, those with other owners, unless they are placed, or those
    /// without.
    fn elsewhere(&self, shared: bool) -> u64 {
        if matches!(&*self.pin, "policy" | "stay") {
            return 0;
        }
        let parts = self.extents.iter();
        let away =
            parts.filter(|part| part.tier != self.pin && part.shared == shared && part.placed.is_none());
        away.map(|part| part.len_bytes).sum()
    }
}

/// Says how many bytes are elsewhere, and why.
fn on_the_way(bytes: u64, waiting: Option<&str>) -> String {
    match (bytes, waiting) {
        (0, _) => String::new(),
        (bytes, None) => format!("; {} on the way", show(bytes)),
        (bytes, Some(waiting)) => format!("; {} {waiting}", show(bytes)),
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
                shared_pin: part.shared_pin.map(|tier| tier.name().into()),
                shared_waiting: part.shared_waiting,
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
