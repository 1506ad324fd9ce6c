//! `varve rules`: which placement rule each file matches, and why; has the daemon apply its rules.

use super::tree::{self, Entry, Paths};
use super::which;
use crate::out;
use crate::pin_args::RulesArgs;
use anyhow::Context;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use varve_format::InodeKey;
use varve_ipc::{Admin, IpcError, PINS_MAX};
use varve_kernelfs::RulesApplied;
use varve_placement::rules::{Explanation, File};

/// `varve rules`.
pub fn rules(args: &RulesArgs) -> anyhow::Result<()> {
    let paths = Paths::find(&args.at.paths)?;
    if args.apply {
        return apply(&paths, args.at.json);
    }
    let rules = paths.pool.host().rules()?;
    if rules.is_empty() && !args.at.json {
        out::line(&format!(
            "{} has no [[rule]]; `varve rules --help` shows how to write one",
            paths.pool.dir().join("varve.toml").display()
        ));
        return Ok(());
    }
    let (mut files, mut sums) = (Vec::new(), BTreeMap::<Row, (u64, u64)>::new());
    let mut sees_pins = true;
    let walked = paths.walk(PINS_MAX, &mut |entries| {
        let pins = if sees_pins { pins(&paths, entries)? } else { None };
        sees_pins = pins.is_some();
        for entry in entries.iter().filter(|entry| entry.is_file) {
            let found = rules.explain(&File {
                path: &entry.in_pool,
                size_bytes: entry.size_bytes,
                age: entry.age,
            });
            let pin = pins.as_ref().and_then(|pins| pins.get(&entry.key));
            let row = if pin.is_some() {
                Row::Pinned
            } else {
                Row::Rule(found.rule)
            };
            let sum = sums.entry(row).or_default();
            *sum = (sum.0 + 1, sum.1 + entry.size_bytes);
            if args.at.json {
                files.push(to_json(entry, &found, pin));
            } else {
                tell(entry, &found, pin, args.why);
            }
        }
        Ok(BTreeSet::new())
    })?;
    if args.at.json {
        let rows: Vec<Value> = sums.iter().map(|(row, sum)| row.to_json(*sum)).collect();
        let value = json!({"files": files, "rules": rows, "errors": walked.errors()});
        out::line(&format!("{value:#}"));
    } else {
        for (row, (files, bytes)) in &sums {
            let bytes = varve_kernelfs::pool::size::show(*bytes);
            out::line(&format!("{row}: {files} files, {bytes}"));
        }
        if !sees_pins {
            out::line(
                "what `varve pin` and `varve exclude` say was not asked for: that needs root or the pool's owner",
            );
        }
    }
    walked.check()
}

/// Who decides about a file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Row {
    Rule(Option<usize>),
    Pinned,
}

impl Row {
    fn to_json(&self, (files, bytes): (u64, u64)) -> Value {
        let (rule, pinned) = match self {
            Self::Rule(rule) => (*rule, false),
            Self::Pinned => (None, true),
        };
        json!({"rule": rule, "pinned": pinned, "files": files, "bytes": bytes})
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(None) => f.write_str("no rule"),
            Self::Rule(Some(rule)) => write!(f, "rule {rule}"),
            Self::Pinned => f.write_str("pinned, which comes before the rules"),
        }
    }
}

/// Returns what commands have said of files, which comes before the rules. `None`: this user may not ask.
fn pins(paths: &Paths, entries: &[Entry]) -> anyhow::Result<Option<BTreeMap<InodeKey, String>>> {
    let placed = match which::placed(&paths.pool, entries) {
        Ok(placed) => placed,
        Err(_) if !paths.pool.is_operator() => return Ok(None),
        Err(error) => return Err(error),
    };
    let pinned = placed
        .iter()
        .filter_map(|file| Some((file.key, file.before_rules()?)));
    Ok(Some(pinned.collect()))
}

fn to_json(entry: &Entry, found: &Explanation, pin: Option<&String>) -> Value {
    let passed: Vec<Value> = found
        .passed
        .iter()
        .map(|(rule, miss)| json!({"rule": rule, "why": miss.to_string()}))
        .collect();
    json!({"path": tree::text(&entry.path), "rule": found.rule, "to": found.to, "passed": passed, "pinned": pin})
}

fn tell(entry: &Entry, found: &Explanation, pin: Option<&String>, why: bool) {
    let path = entry.path.display();
    match pin {
        Some(pin) => out::line(&format!("{path}: {pin} (before the rules; else: {found})")),
        None => out::line(&format!("{path}: {found}")),
    }
    if why {
        for (rule, miss) in &found.passed {
            out::line(&format!("  not rule {rule}: {miss}"));
        }
    }
}

/// Has the daemon apply its rules to all files of the pool.
fn apply(paths: &Paths, as_json: bool) -> anyhow::Result<()> {
    let progress = out::Progress::start("applying the rules");
    let dir = paths.pool.dir();
    let asked = |error| super::described(error, dir, None);
    paths.pool.ask(Admin::DigestAll).map_err(asked)?;
    let applied = paths.pool.ask(Admin::ApplyRules);
    let json = applied.map_err(|error| match error.downcast_ref::<IpcError>() {
        Some(IpcError::Errno(libc::EINVAL)) => anyhow::anyhow!(
            "the daemon could not read the rules of {0} when it started (`varve status` says why): mend them, and \
            start it again",
            dir.join("varve.toml").display()
        ),
        _ => asked(error),
    })?;
    drop(progress);
    let done: RulesApplied =
        serde_json::from_str(&json).context("the daemon's answer is not what was expected")?;
    if as_json {
        out::line(&format!("{:#}", json!(done)));
    } else {
        out::line(&format!(
            "{} files looked at, {} placed anew; their data moves in the background",
            done.files, done.changed
        ));
    }
    Ok(())
}
