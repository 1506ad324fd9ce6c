//! `trace`: traces of page accesses, and runs of the policy over them.

use std::io::{BufReader, BufWriter};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;

use super::out;
use crate::multiclock::MultiClockConfig;
use crate::sim::baseline::{lru, offline_best, static_tiering};
use crate::sim::trace::{self, Access, Kind};
use crate::sim::{Score, multi_clock};

/// Traces.
#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Write a generated trace to a file.
    Generate {
        /// zipfian, scan, phase-change, two-processes, memcached or page-rank.
        kind: String,
        /// Where to.
        file: PathBuf,
        /// Pages of memory.
        #[arg(long, default_value_t = 10_000)]
        pages: u64,
        /// Accesses after the load phase.
        #[arg(long, default_value_t = 1_000_000)]
        accesses: u64,
        /// Seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Run MULTI-CLOCK, static tiering, LRU and the offline best over a recorded trace.
    Replay {
        /// The trace, as written by `--trace` or `trace generate`.
        file: PathBuf,
        /// Fast memory as a share of the pages in the trace.
        #[arg(long, default_value_t = 0.3)]
        fast: f64,
        /// Accesses in 100 simulated ms.
        #[arg(long, default_value_t = 10_000)]
        tick: usize,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run them over every generated kind.
    Compare {
        /// Pages of memory.
        #[arg(long, default_value_t = 10_000)]
        pages: u64,
        /// Accesses after the load phase.
        #[arg(long, default_value_t = 2_000_000)]
        accesses: u64,
        /// Fast memory as a share of the pages.
        #[arg(long, default_value_t = 0.3)]
        fast: f64,
        /// Seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(serde::Serialize)]
struct Row {
    trace: String,
    policy: &'static str,
    hit_ratio: f64,
    migrations: u64,
    convergence_ms: Option<u64>,
    bytes_per_page: Option<f64>,
}

fn kind(name: &str) -> anyhow::Result<Kind> {
    serde_json::to_value(Kind::ALL)?;
    let named = |k: &Kind| serde_json::to_value(k).is_ok_and(|v| v == name);
    Kind::ALL
        .into_iter()
        .find(named)
        .with_context(|| format!("no kind of trace is called {name}; see --help"))
}

fn rows(name: &str, trace: &[Access], tick: usize, fast: u64, pages: u64, change: Option<usize>) -> Vec<Row> {
    let capacity = [fast, pages * 2];
    let mc = multi_clock(trace, tick, &capacity, MultiClockConfig::default());
    let bytes = mc.metadata_bytes_per_page;
    let row = |policy, score: &Score, bytes_per_page| Row {
        trace: name.to_owned(),
        policy,
        hit_ratio: score.hit_ratio(),
        migrations: score.migrations,
        convergence_ms: change
            .and_then(|c| score.convergence_ticks(c))
            .map(|t| t as u64 * crate::sim::TICK_MS),
        bytes_per_page,
    };
    vec![
        row("static", &static_tiering(trace, tick, fast), None),
        row("multi-clock", &mc, Some(bytes)),
        row("lru", &lru(trace, tick, fast), None),
        row("offline best", &offline_best(trace, tick, fast), None),
    ]
}

fn print(rows: &[Row], json: bool) -> anyhow::Result<()> {
    if json {
        out::line(&serde_json::to_string_pretty(rows)?);
        return Ok(());
    }
    out::line(&format!(
        "{:<14} {:<13} {:>9} {:>11} {:>13} {:>12}",
        "trace", "policy", "fast hits", "migrations", "converges", "bytes/page"
    ));
    for r in rows {
        let converges = r
            .convergence_ms
            .map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms"));
        let bytes = r
            .bytes_per_page
            .map_or_else(|| "-".to_owned(), |b| format!("{b:.1}"));
        let (trace, policy, hits) = (&r.trace, r.policy, r.hit_ratio * 100.0);
        out::line(&format!(
            "{trace:<14} {policy:<13} {hits:>8.2}% {:>11} {converges:>13} {bytes:>12}",
            r.migrations
        ));
    }
    Ok(())
}

fn fast_pages(pages: u64, share: f64) -> anyhow::Result<u64> {
    anyhow::ensure!(
        (0.001..=1.0).contains(&share),
        "--fast is {share}, allowed is 0.001 to 1"
    );
    Ok(((pages as f64 * share) as u64).max(1))
}

fn bounded(pages: u64, accesses: u64) -> anyhow::Result<()> {
    anyhow::ensure!(
        (10..=16_000_000).contains(&pages),
        "--pages is {pages}, allowed is 10 to 16 million"
    );
    anyhow::ensure!(
        accesses <= trace::MAX_ACCESSES,
        "--accesses is {accesses}, allowed is up to 200 million"
    );
    Ok(())
}

pub(super) fn run(command: TraceCommand) -> anyhow::Result<ExitCode> {
    match command {
        TraceCommand::Generate {
            kind: name,
            file,
            pages,
            accesses,
            seed,
        } => {
            bounded(pages, accesses)?;
            let out =
                std::fs::File::create(&file).with_context(|| format!("cannot write {}", file.display()))?;
            trace::write(&kind(&name)?.generate(pages, accesses, seed), BufWriter::new(out))?;
        }
        TraceCommand::Replay {
            file,
            fast,
            tick,
            json,
        } => {
            anyhow::ensure!(tick > 0, "--tick is 0, allowed is 1 and more");
            let input =
                std::fs::File::open(&file).with_context(|| format!("cannot read {}", file.display()))?;
            let trace = trace::read(BufReader::new(input)).with_context(|| file.display().to_string())?;
            anyhow::ensure!(
                !trace.is_empty(),
                "{}: no accesses in it: the tracker saw none (`varve vm status` names it)",
                file.display()
            );
            let pages = trace
                .iter()
                .map(|a| a.page)
                .collect::<std::collections::HashSet<_>>()
                .len() as u64;
            let fast = fast_pages(pages.max(1), fast)?;
            print(&rows("replayed", &trace, tick, fast, pages, None), json)?;
        }
        TraceCommand::Compare {
            pages,
            accesses,
            fast,
            seed,
            json,
        } => {
            bounded(pages, accesses)?;
            let fast = fast_pages(pages, fast)?;
            let tick = (accesses / 500).max(1) as usize;
            let mut all = Vec::new();
            for kind in Kind::ALL {
                let trace = kind.generate(pages, accesses, seed);
                let change = kind.change_at(pages, accesses).map(|c| c as usize / tick);
                let name = serde_json::to_value(kind)?
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                all.extend(rows(&name, &trace, tick, fast, pages, change));
            }
            print(&all, json)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn kinds_are_found_by_their_names_only() {
        assert_eq!(kind("page-rank").unwrap(), Kind::PageRank);
        assert!(kind("pagerank").unwrap_err().to_string().contains("pagerank"));
    }

    #[test]
    fn shares_out_of_bounds_are_refused() {
        assert!(
            fast_pages(100, 0.0).is_err()
                && fast_pages(100, 2.0).is_err()
                && fast_pages(100, f64::NAN).is_err()
        );
        assert_eq!(fast_pages(100, 0.3).unwrap(), 30);
    }
}
