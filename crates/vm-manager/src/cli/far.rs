//! `run --local`: far memory on the command line.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::manage::{Signals, exit_code};
use super::{RunArgs, out, policy};
use crate::far::{self, FarStatus, Local, Pager};
use crate::snapshot::{Snapshot, state_dir, state_file};
use crate::types::Pid;

const REPORT_EVERY: Duration = Duration::from_secs(1);

pub(super) fn run(args: &RunArgs, local: Local) -> anyhow::Result<ExitCode> {
    let mut config = policy(args.manage.policy.as_deref())?.far;
    config.tier.extend(args.far.iter().cloned());
    let signals = Signals::watch()?;
    let state = StateFile::new()?;
    let quiet = args.manage.quiet;
    let note = |text: &str| {
        if !quiet {
            out::note(text);
        }
    };
    let begun = Instant::now();
    let mut reported = Instant::now();
    let look = |pid: Option<u32>, pager: &Pager| {
        if let Some(pid) = pid {
            signals.pass_on(Pid(pid as i32));
        }
        if reported.elapsed() >= REPORT_EVERY {
            reported = Instant::now();
            state.write(begun, pager.status());
        }
    };
    let (status, last) = far::run(&args.program, &config, local, &note, look)?;
    if args.manage.json {
        out::note(&serde_json::to_string(&last)?);
    } else if !quiet {
        out::note(&summary(&last, begun.elapsed()));
    }
    Ok(exit_code(status))
}

/// The file that `varve vm status` reads. Removed when this goes.
struct StateFile(std::path::PathBuf);

impl StateFile {
    fn new() -> anyhow::Result<Self> {
        Ok(Self(state_file(&state_dir()?, std::process::id())))
    }

    fn write(&self, begun: Instant, status: FarStatus) {
        let snapshot = Snapshot {
            version: 1,
            manager: std::process::id(),
            uptime_s: begun.elapsed().as_secs_f64(),
            far: Some(status),
            ..Snapshot::default()
        };
        if let Err(error) = snapshot.write(&self.0) {
            tracing::warn!("cannot write {}: {error}", self.0.display());
        }
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The report at the end.
fn summary(last: &FarStatus, time: Duration) -> String {
    let mut text = format!(
        "varve vm: {:.1} s; {} pages left ({} of them unwritten), {} came back from where they waited",
        time.as_secs_f64(),
        last.evicted,
        last.unwritten,
        last.aside_faults.count,
    );
    for tier in &last.tiers {
        let faults = &tier.faults;
        text += &format!(
            "\n  {}: {} pages came back, median {:.1} us, 99 % {:.1} us",
            tier.name,
            faults.count,
            faults.median_ns as f64 / 1e3,
            faults.p99_ns as f64 / 1e3
        );
    }
    if last.turned_back > 0 {
        text += &format!("\n  far space was full: {} pages went back", last.turned_back);
    }
    if let Some(reason) = &last.reason {
        text += &format!("\n  {} pages are lost; the last failure: {reason}", last.poisoned);
    }
    text
}
