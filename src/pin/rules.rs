//! `varve rules`: which placement rule each file matches, and why; has the daemon apply its rules.

use super::tree::{self, Entry, Paths};
use crate::out;
use crate::pin_args::RulesArgs;
use anyhow::Context;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use varve_ipc::{Admin, PINS_MAX};
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
    let (mut files, mut sums) = (Vec::new(), BTreeMap::<Option<usize>, (u64, u64)>::new());
    let walked = paths.walk(PINS_MAX, &mut |entries| {
        for entry in entries.iter().filter(|entry| entry.is_file) {
            let found = rules.explain(&File {
                path: &entry.in_pool,
                size_bytes: entry.size_bytes,
                age: entry.age,
            });
            let sum = sums.entry(found.rule).or_default();
            *sum = (sum.0 + 1, sum.1 + entry.size_bytes);
            if args.at.json {
                files.push(to_json(entry, &found));
            } else {
                tell(entry, &found, args.why);
            }
        }
        Ok(BTreeSet::new())
    })?;
    if args.at.json {
        let rows: Vec<Value> = sums
            .iter()
            .map(|(rule, (files, bytes))| json!({"rule": rule, "files": files, "bytes": bytes}))
            .collect();
        let value = json!({"files": files, "rules": rows, "errors": walked.errors()});
        out::line(&format!("{value:#}"));
    } else {
        for (rule, (files, bytes)) in &sums {
            let rule = rule.map_or("no rule".into(), |rule| format!("rule {rule}"));
            let bytes = varve_kernelfs::pool::size::show(*bytes);
            out::line(&format!("{rule}: {files} files, {bytes}"));
        }
    }
    walked.check()
}

fn to_json(entry: &Entry, found: &Explanation) -> Value {
    let passed: Vec<Value> = found
        .passed
        .iter()
        .map(|(rule, miss)| json!({"rule": rule, "why": miss.to_string()}))
        .collect();
    json!({"path": tree::text(&entry.path), "rule": found.rule, "to": found.to, "passed": passed})
}

fn tell(entry: &Entry, found: &Explanation, why: bool) {
    out::line(&format!("{}: {found}", entry.path.display()));
    if why {
        for (rule, miss) in &found.passed {
            out::line(&format!("  not rule {rule}: {miss}"));
        }
    }
}

/// Has the daemon apply its rules to all files of the pool.
fn apply(paths: &Paths, as_json: bool) -> anyhow::Result<()> {
    let progress = out::Progress::start("applying the rules");
    paths.pool.ask(Admin::DigestAll)?;
    let json = paths.pool.ask(Admin::ApplyRules)?;
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
