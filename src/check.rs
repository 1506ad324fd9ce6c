//! `varve fsck` and `varve scrub`: asks the daemon, or opens a stopped pool without changing it.

use crate::DAMAGED;
use crate::cli::{FsckArgs, PoolJsonArgs};
use crate::out::{self, Progress};
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::process::ExitCode;
use varve_format::superblock::SuperblockError;
use varve_ipc::Admin;
use varve_kernelfs::host::{CheckItem, CheckReport, explain};
use varve_store::{OpenOptions, Store, StoreError};

type Check = fn(&Store) -> Result<CheckReport, StoreError>;

/// Whether the pool is to blame, not its device or this program's version.
fn is_damage(error: &StoreError) -> bool {
    match error {
        StoreError::Superblock { fault, .. } => !matches!(fault, SuperblockError::Version(_)),
        StoreError::Tree(_)
        | StoreError::Block { .. }
        | StoreError::Inode { .. }
        | StoreError::Journal(_)
        | StoreError::JournalDamaged { .. }
        | StoreError::Damaged(_) => true,
        _ => false,
    }
}

/// A stopped pool's report, and how many logs its next start will digest.
fn check_stopped(pool: &Pool, check: Check) -> anyhow::Result<(CheckReport, usize)> {
    let _lock = pool.host().lock()?;
    let devices = pool.host().devices_for_looking()?;
    let options = OpenOptions {
        accept_journal_damage: true,
        verify_nvm: true,
        ..OpenOptions::default()
    };
    let (store, opened) = match Store::open(devices, options) {
        Ok(opened) => opened,
        Err(error) if is_damage(&error) => {
            let text = format!("the pool cannot be opened: {error}");
            let findings = vec![CheckItem {
                kind: "pool".into(),
                text,
            }];
            let report = CheckReport {
                clean: false,
                count: 1,
                findings,
            };
            return Ok((report, 0));
        }
        Err(error) => return Err(explain(pool.host(), error).into()),
    };
    let mut report = check(&store)?;
    if let Some(text) = opened.damage {
        report.findings.insert(
            0,
            CheckItem {
                kind: "journal".into(),
                text,
            },
        );
        report.count += 1;
        report.clean = false;
    }
    let logs = pool.host().logs()?.copies()?.len();
    Ok((report, logs))
}

fn check(
    pool: &Pool,
    admin: Admin,
    check: Check,
    what: &'static str,
) -> anyhow::Result<(CheckReport, usize, bool)> {
    let _progress = Progress::start(what);
    if pool.has_daemon() {
        let json = pool.ask(admin)?;
        let report = serde_json::from_str(&json).context("the daemon is of another version")?;
        return Ok((report, 0, true));
    }
    let (report, logs) = check_stopped(pool, check)?;
    Ok((report, logs, false))
}

fn tell(
    pool: &Pool,
    report: &CheckReport,
    logs: usize,
    served: bool,
    as_json: bool,
    clean: &str,
) -> ExitCode {
    if as_json {
        let value = json!({
            "clean": report.clean,
            "count": report.count,
            "findings": report.findings,
            "served": served,
            "logs_to_digest": logs,
        });
        out::line(&format!("{value:#}"));
    } else {
        for finding in &report.findings {
            out::line(&format!("{}: {}", finding.kind, finding.text));
        }
        let more = report.count.saturating_sub(report.findings.len() as u64);
        if more > 0 {
            out::line(&format!("… and {more} more"));
        }
        if report.clean {
            out::line(&format!("{}: {clean}", pool.dir().display()));
        } else {
            out::line(&format!("{}: {} findings", pool.dir().display(), report.count));
        }
        if logs > 0 {
            out::line(&format!(
                "{logs} logs wait for the next start to be digested (that is in order)"
            ));
        }
    }
    if report.clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(DAMAGED)
    }
}

/// `varve fsck`.
pub fn fsck(args: &FsckArgs) -> anyhow::Result<ExitCode> {
    let pool = Pool::open(&args.pool)?;
    if args.repair && pool.has_daemon() {
        bail!(
            "{0} is being served; stop it first (`varve down {0}`) to repair it",
            pool.dir().display()
        );
    }
    let (report, logs, served) = check(&pool, Admin::Fsck, CheckReport::of_structures, "checking")?;
    let code = tell(&pool, &report, logs, served, args.json, "clean");
    if args.repair && !report.clean {
        eprintln!(
            "varve: this version checks only and cannot repair yet; nothing was changed. Copy what you can from a read-only mount \
             (`varve mount --read-only`) into a new pool"
        );
    }
    Ok(code)
}

/// `varve scrub`.
pub fn scrub(args: &PoolJsonArgs) -> anyhow::Result<ExitCode> {
    let pool = Pool::open(&args.pool)?;
    let (report, logs, served) = check(&pool, Admin::Scrub, CheckReport::of_data, "verifying all data")?;
    Ok(tell(
        &pool,
        &report,
        logs,
        served,
        args.json,
        "all data has its checksum",
    ))
}
