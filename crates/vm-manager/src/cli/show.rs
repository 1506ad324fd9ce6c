//! `status`, `heat` and `probe`: print the present state once.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;

use super::{HeatArgs, out};
use crate::far::{FarStatus, Latencies};
use crate::probe::Probe;
use crate::snapshot::Snapshot;

/// Message if no manager runs.
pub(super) const NOBODY: &str =
    "no manager of yours runs; start one with `varve vm run -- PROGRAM` or `varve vm attach PID`";

pub(super) fn probe(json: bool) -> anyhow::Result<ExitCode> {
    let probe = Probe::run();
    if json {
        out::line(&serde_json::to_string_pretty(&probe)?);
    } else {
        out::text(&probe.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn status(json: bool) -> anyhow::Result<ExitCode> {
    let all = Snapshot::all().context("cannot read the managers' state")?;
    if json {
        out::line(&serde_json::to_string_pretty(&all)?);
        return Ok(ExitCode::SUCCESS);
    }
    if all.is_empty() {
        out::line(NOBODY);
    }
    for snapshot in &all {
        out::text(&describe(snapshot));
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a snapshot as text, also for `top`.
pub(super) fn describe(s: &Snapshot) -> String {
    if let Some(far) = &s.far {
        return describe_far(s, far);
    }
    let mut out = String::new();
    let _ = writeln!(
        out,
        "manager {} up {:.0} s: {}",
        s.manager,
        s.uptime_s,
        s.policies.join(", ")
    );
    let _ = writeln!(out, "  tracker   {}", s.tracker);
    let _ = writeln!(
        out,
        "  cost      looking {:.2} %, working {:.2} %, kdamond {:.2} % of a core; {:.2} bytes a page over \
        {} pages",
        s.scan_cpu_share * 100.0,
        s.work_cpu_share * 100.0,
        s.kdamond_cpu_share * 100.0,
        s.metadata_bytes as f64 / s.metadata_pages.max(1) as f64,
        s.metadata_pages
    );
    let t = &s.totals;
    let _ = writeln!(
        out,
        "  so far    {} huge made, {} split, {} up, {} down, {} evicted, {} declined, {} looks, {} \
        compactions ({:.1} s, {} MiB moved, {} huge pages gained)",
        t.collapsed,
        t.split,
        t.promoted,
        t.demoted,
        t.evicted,
        t.failed,
        t.scanned,
        t.compactions,
        s.compaction_s,
        s.compaction_bytes >> 20,
        s.compaction_gained
    );
    let fmfi = s.fmfi.map_or_else(|| "unknown".to_owned(), |f| format!("{f:.2}"));
    let _ = writeln!(
        out,
        "  machine   {} MiB available, fragmentation {fmfi}, fairness O {:.3e}",
        s.available_bytes >> 20,
        s.fairness
    );
    for (i, tier) in s.tiers.iter().enumerate() {
        let [inactive, active, promote, locked] = tier.lists;
        let _ = writeln!(
            out,
            "  tier {i}    nodes {:?}, {} MiB free; {inactive} inactive, {active} active, {promote} \
            promote, {locked} locked",
            tier.nodes,
            tier.free_bytes >> 20
        );
    }
    for p in &s.processes {
        let _ = writeln!(
            out,
            "  {:>8} {:<16} {:>7} MiB used, {:>6} huge ({} idle), M {:.1}{}",
            p.pid,
            p.name,
            p.used_bytes >> 20,
            p.huge_pages,
            p.idle_huge_pages,
            p.metric,
            if p.cooperating { ", cooperates" } else { "" }
        );
    }
    for note in &s.notes {
        let _ = writeln!(out, "  not used  {note}");
    }
    out
}

/// Formats the snapshot of a pager.
fn describe_far(s: &Snapshot, far: &FarStatus) -> String {
    let mib = |pages: u64| (pages * varve_far::PAGE_BYTES as u64) >> 20;
    let mut out = format!(
        "pager {} up {:.0} s: far memory, local {}\n",
        s.manager, s.uptime_s, far.local
    );
    let most = match far.drain {
        Some(drain) if drain.is_done => "all has come back".to_owned(),
        Some(drain) => format!("coming back: {} pages so far", drain.came_back),
        None if far.limit_bytes == u64::MAX => "no limit yet".to_owned(),
        None => format!("at most {} MiB", far.limit_bytes >> 20),
    };
    let _ = writeln!(
        out,
        "  local     {} MiB, {most}; a thread waited {:.2} % of the last second",
        far.local_bytes >> 20,
        far.stall_share * 100.0
    );
    let _ = writeln!(
        out,
        "  far       {} MiB in {} pages, {} of them one word; {} pages wait aside; {} KiB of tables",
        mib(far.far_pages),
        far.far_pages,
        far.repeated_pages,
        far.aside_pages,
        far.table_bytes >> 10
    );
    if let Some(saved) = far.saved {
        let _ = writeln!(out, "  saved     {saved:.2} (by [far.price])");
    }
    for tier in &far.tiers {
        let [hot, warm, cold] = tier.by_temperature;
        let _ = writeln!(
            out,
            "  {:<9} {} of {} slabs ({hot} hot, {warm} warm, {cold} cold), {} pages{}",
            tier.name,
            tier.slabs,
            tier.capacity_slabs,
            tier.pages,
            faults(&tier.faults)
        );
    }
    let [read, used, wasted] = far.ahead;
    let [pages, compressed] = far.cold_s;
    let _ = writeln!(
        out,
        "  slabs     cold after {pages} s ({compressed} s compressed); {} up, {} down; {read} pages read ahead, {used} used, \
        {wasted} not",
        far.migrated[0], far.migrated[1]
    );
    for (name, latencies) in [
        ("aside", far.aside_faults),
        ("one word", far.repeated_faults),
        ("first", far.zero_faults),
    ] {
        if latencies.count > 0 {
            let _ = writeln!(out, "  {name:<9} {}", faults(&latencies).trim_start_matches("; "));
        }
    }
    for p in &s.processes {
        let (used, far) = (p.used_bytes >> 20, mib(p.far_pages));
        let _ = writeln!(
            out,
            "  {:>8} {:<16} {used:>7} MiB local, {far:>7} MiB far",
            p.pid, p.name
        );
    }
    if let Some(reason) = &far.reason {
        let _ = writeln!(
            out,
            "  lost      {} pages; the last failure: {reason}",
            far.poisoned
        );
    }
    out
}

fn faults(latencies: &Latencies) -> String {
    format!(
        "; {} faults, median {:.1} us, 99 % {:.1} us",
        latencies.count,
        latencies.median_ns as f64 / 1e3,
        latencies.p99_ns as f64 / 1e3
    )
}

pub(super) fn heat(args: &HeatArgs) -> anyhow::Result<ExitCode> {
    let all = Snapshot::all().context("cannot read the managers' state")?;
    let maps: Vec<_> = all
        .iter()
        .flat_map(|s| &s.heat)
        .filter(|m| args.pid.is_none_or(|p| p == m.pid) && !m.rows.is_empty())
        .collect();
    if args.json {
        out::line(&serde_json::to_string(&maps)?);
        return Ok(ExitCode::SUCCESS);
    }
    if maps.is_empty() {
        match (all.is_empty(), args.pid) {
            (true, _) => out::note(&format!("varve vm: {NOBODY}")),
            (_, Some(pid)) => out::note(&format!(
                "varve vm: no heat of process {pid}: nobody manages it, or only just since"
            )),
            _ => out::note("varve vm: no heat yet: the manager has only just started"),
        }
        return Ok(ExitCode::FAILURE);
    }
    if let Some(path) = &args.svg {
        // A file holds one drawing: the process with the most memory, unless `--pid` names one.
        let largest = maps
            .iter()
            .max_by_key(|m| m.rows.iter().map(|(s, e)| e - s).sum::<u64>());
        if let Some(map) = largest {
            std::fs::write(path, map.svg()).with_context(|| format!("cannot write {}", path.display()))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    for map in maps {
        out::text(&map.terminal(color));
    }
    Ok(ExitCode::SUCCESS)
}
