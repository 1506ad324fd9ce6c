//! `varve fsck` and `varve scrub`: asks the daemon, or opens a stopped pool, which only `fsck --repair`
//! changes.

use crate::cli::{FsckArgs, PoolJsonArgs};
use crate::exit::{DAMAGED, message};
use crate::out::{self, Progress};
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde_json::json;
use std::process::ExitCode;
use varve_ipc::Admin;
use varve_kernelfs::pool::{CheckItem, CheckReport, describe, describe_loss, explain};
use varve_store::repair::{RepairOptions, RepairReport};
use varve_store::{OpenOptions, Store, StoreError};

/// Exit codes of fsck(8): damage repaired; damage left; operational error.
const FSCK_MENDED: u8 = 1;
const FSCK_LEFT: u8 = 4;
const FSCK_FAILED: u8 = 8;

type Check = fn(&Store) -> Result<CheckReport, StoreError>;

/// Whether the error is damage of the pool, and not a fault of its device or of this program's version.
fn is_damage(error: &StoreError) -> bool {
    match error {
        StoreError::Superblock { fault, .. } => !fault.is_refusal(),
        StoreError::Tree(_)
        | StoreError::Block { .. }
        | StoreError::Inode { .. }
        | StoreError::Journal(_)
        | StoreError::JournalDamaged { .. }
        | StoreError::Damaged(_) => true,
        _ => false,
    }
}

/// Checks a stopped pool; returns the report and the number of logs that the next start will digest.
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

/// `varve fsck`: exit codes as fsck(8).
pub fn fsck(args: &FsckArgs) -> ExitCode {
    match try_fsck(args) {
        Ok(code) => code,
        Err(error) => {
            out::note(&format!("varve: {}", message(&error)));
            ExitCode::from(FSCK_FAILED)
        }
    }
}

fn try_fsck(args: &FsckArgs) -> anyhow::Result<ExitCode> {
    let pool = Pool::open(&args.pool)?;
    if args.repair || args.dry_run {
        if pool.has_daemon() {
            bail!(
                "{0} is being served; stop it first (`varve down {0}`) to repair it",
                pool.dir().display()
            );
        }
        return repair(&pool, args);
    }
    let (report, logs, served) = check(&pool, Admin::Fsck, CheckReport::of_stopped, "checking")?;
    tell(&pool, &report, logs, served, args.json, "clean");
    if report.clean {
        return Ok(ExitCode::SUCCESS);
    }
    if !args.json {
        out::line(&format!(
            "`varve fsck --dry-run {0}` shows what a repair would do, `varve fsck --repair {0}` does it \
            (stop the pool first)",
            pool.dir().display()
        ));
    }
    Ok(ExitCode::from(FSCK_LEFT))
}

/// Repairs a stopped pool, or with `--dry-run` reports the repairs without making them.
fn repair(pool: &Pool, args: &FsckArgs) -> anyhow::Result<ExitCode> {
    let progress = Progress::start(if args.dry_run {
        "looking what to mend"
    } else {
        "mending"
    });
    let _lock = pool.host().lock()?;
    let devices = if args.dry_run {
        pool.host().devices_for_trying()?
    } else {
        pool.host().devices()?
    };
    let options = RepairOptions {
        now_ns: varve_ipc::Clock::now_ns(&varve_ipc::SystemClock),
        any_device: args.any_device,
    };
    let report = Store::repair(&devices, options).map_err(|error| explain(pool.host(), error))?;
    let logs = pool.host().logs()?.copies()?.len();
    drop(progress);
    tell_repair(pool, args, &report, logs);
    Ok(match (report.mended.is_empty(), report.left.is_empty()) {
        (true, true) => ExitCode::SUCCESS,
        (false, true) if !args.dry_run => ExitCode::from(FSCK_MENDED),
        _ => ExitCode::from(FSCK_LEFT),
    })
}

/// Prints the repairs, the losses and the remaining damage.
fn tell_repair(pool: &Pool, args: &FsckArgs, report: &RepairReport, logs: usize) {
    let losses: Vec<String> = report.losses.iter().map(describe_loss).collect();
    let left: Vec<_> = report.left.iter().map(describe).collect();
    if args.json {
        let lost: Vec<_> = report
            .losses
            .iter()
            .map(|loss| {
                json!({
                    "ino": loss.ino.0,
                    "path": loss.path.as_deref().map(String::from_utf8_lossy),
                    "from_byte": loss.bytes.map(|(from, _)| from),
                    "to_byte": loss.bytes.map(|(_, to)| to),
                    "what": loss.what,
                })
            })
            .collect();
        let value = json!({
            "dry_run": args.dry_run,
            "clean": report.mended.is_empty() && left.is_empty(),
            "mended": report.mended,
            "lost": lost,
            "left": left,
            "logs_to_digest": logs,
        });
        out::line(&format!("{value:#}"));
    } else {
        let (mended, lost) = if args.dry_run {
            ("would mend", "would be lost or doubtful")
        } else {
            ("mended", "lost or doubtful")
        };
        report
            .mended
            .iter()
            .for_each(|what| out::line(&format!("{mended}: {what}")));
        losses
            .iter()
            .for_each(|what| out::line(&format!("{lost}: {what}")));
        left.iter()
            .for_each(|item| out::line(&format!("left: {}: {}", item.kind, item.text)));
        out::line(&format!(
            "{}: {}",
            pool.dir().display(),
            match (report.mended.is_empty(), left.is_empty(), args.dry_run) {
                (true, true, _) => "clean".to_owned(),
                (false, true, false) => format!("mended; {} losses named", losses.len()),
                (false, true, true) => "damaged; nothing was changed".to_owned(),
                (_, false, _) => format!("{} findings left", left.len()),
            }
        ));
        if logs > 0 {
            out::line(&format!(
                "{logs} logs wait for the next start to be digested (that is in order)"
            ));
        }
    }
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
