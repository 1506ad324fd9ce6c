//! `varve dedup`: duplicate content in files and images. Parses the arguments, calls `varve-similarity`,
//! prints. Knows no pool: `share` shares what is found in one.

pub mod args;
mod cluster;
mod estimate;
mod images;
mod plan;
pub mod scan;
mod similar;

use crate::exit::Usage;
use anyhow::Context;
use args::{DedupCommand, FileArgs, WeighArg};
use indicatif::ProgressBar;
use scan::Knows;
use std::process::ExitCode;
use std::time::Duration;
use varve_kernelfs::pool::size;
use varve_similarity::files::{Filter, Found, ReadRate};
use varve_similarity::measure::Weigh;

/// Runs a command of `varve dedup`. `known` has checksums of files that a scan need not read.
pub fn dedup(command: &DedupCommand, known: Option<&mut dyn Knows>) -> anyhow::Result<ExitCode> {
    match command {
        DedupCommand::Estimate(args) => estimate::estimate(args)?,
        DedupCommand::Scan(args) => scan::scan(args, known)?,
        DedupCommand::Cluster(args) => cluster::cluster(args)?,
        DedupCommand::Plan(args) => plan::plan(args)?,
        DedupCommand::Similar(args) => similar::similar(args)?,
        DedupCommand::Parse { limits } => return Ok(varve_similarity::sandbox::work(limits)),
    }
    Ok(ExitCode::SUCCESS)
}

impl FileArgs {
    /// Builds the filter.
    pub fn filter(&self) -> anyhow::Result<Filter> {
        Filter::new(&self.include, &self.exclude, Duration::from_secs(self.min_age))
            .map_err(|error| Usage(format!("--include or --exclude: {error}")).into())
    }

    /// Builds the bound on reading.
    pub fn rate(&self) -> ReadRate {
        ReadRate::new(self.rate)
    }
}

impl WeighArg {
    const fn weigh(self) -> Weigh {
        match self {
            Self::Blocks => Weigh::Blocks,
            Self::Files => Weigh::Files,
            Self::Packages => Weigh::Packages,
            Self::Mix => Weigh::Mix,
        }
    }
}

const fn weigh_text(weigh: Weigh) -> &'static str {
    match weigh {
        Weigh::Blocks => "blocks",
        Weigh::Files => "files",
        Weigh::Packages => "packages",
        Weigh::Mix => "blocks and packages",
    }
}

/// Converts a size that must fit in memory to `usize`.
pub fn memory(bytes: u64) -> anyhow::Result<usize> {
    usize::try_from(bytes).context("so much memory cannot be used")
}

/// Progress of reading on a terminal: bytes, rate, and whether it is bounded.
pub struct Reading {
    bar: ProgressBar,
    /// Shown beside the rate.
    message: &'static str,
}

impl Reading {
    /// Begins to show it.
    pub fn start(files: &FileArgs) -> Self {
        let bar = ProgressBar::new_spinner();
        let template = "{spinner} read {bytes} ({bytes_per_sec}) {msg} {elapsed}";
        if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        let message = files.rate.map_or("", |_| "(held to --rate)");
        Self { bar, message }
    }

    /// Shows the bytes so far.
    pub fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
        self.bar.set_message(self.message);
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Prints read errors on standard error.
pub fn tell_errors(found: &Found) {
    for error in &found.errors {
        crate::out::note(&format!("varve: {error}"));
    }
}

/// Fails if a path of the command line could not be looked at; `tell_errors` has said why.
pub fn require_roots(found: &Found) -> anyhow::Result<()> {
    match found.roots_missed {
        0 => Ok(()),
        1 => anyhow::bail!("one of the paths could not be looked at"),
        missed => anyhow::bail!("{missed} of the paths could not be looked at"),
    }
}

fn show(bytes: f64) -> String {
    size::show(bytes.max(0.0) as u64)
}

fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}
