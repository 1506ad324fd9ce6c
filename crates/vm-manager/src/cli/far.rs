//! `run --local` and `far`: far memory on the command line.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::manage::{Signals, exit_code};
use super::{FarArgs, RunArgs, out, policy};
use crate::far::control::{self, Answer, Request, Wish};
use crate::far::{self, FarStatus, Local, Pager};
use crate::metrics;
use crate::snapshot::{ProcessStatus, Snapshot, control_file, state_dir, state_file};
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
    let shared = match args.manage.metrics {
        None => None,
        Some(address) => {
            let shared = metrics::Shared::default();
            let bound = metrics::serve(address, shared.clone())
                .with_context(|| format!("cannot serve metrics on {address}"))?;
            note(&format!("varve vm: metrics on http://{bound}/metrics"));
            Some(shared)
        }
    };
    let look = |pid: Option<u32>, pager: &Pager| {
        if let Some(pid) = pid {
            signals.pass_on(Pid(pid as i32));
        }
        if reported.elapsed() >= REPORT_EVERY {
            reported = Instant::now();
            let snapshot = snapshot(begun, pager);
            state.write(&snapshot);
            if let Some(shared) = &shared {
                *shared.lock() = snapshot;
            }
        }
    };
    let control = control_file(&state_dir()?, std::process::id());
    let (status, last) = far::run(&args.program, &config, local, &control, &note, look)?;
    if args.manage.json {
        out::note(&serde_json::to_string(&last)?);
    } else if !quiet {
        out::note(&summary(&last, begun.elapsed()));
    }
    Ok(exit_code(status))
}

/// How often a drain is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// `varve vm far`.
pub(super) fn change(args: &FarArgs) -> anyhow::Result<ExitCode> {
    let wish = match (args.local, args.drain) {
        (Some(local), _) => Wish::Local(local.to_string()),
        (None, true) => Wish::Drain,
        (None, false) => Wish::Status,
    };
    let mut request = Request {
        pid: group_leader(args.pid),
        wish,
    };
    let (pager, mut status) = find(&request)?;
    // From now on the pager: processes of the run may end.
    request = Request {
        pid: pager,
        wish: Wish::Status,
    };
    while args.drain && status.drain.is_some_and(|drain| !drain.is_done) {
        std::thread::sleep(ASK_EVERY);
        match find(&request) {
            Ok((_, next)) => status = next,
            Err(_) => bail!("the run ended before everything had come back"),
        }
    }
    if args.json {
        out::line(&serde_json::to_string(&status)?);
    } else {
        out::line(&told(args, pager, &status));
    }
    if args.drain && status.drain.is_none() {
        bail!(
            "another limit was set meanwhile ({}): not everything has come back",
            status.local
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// What was done, in words.
fn told(args: &FarArgs, pager: i32, status: &FarStatus) -> String {
    let mib = |bytes: u64| bytes >> 20;
    match status.drain {
        Some(drain) if args.drain => {
            let stay = if drain.stay > 0 {
                format!("; {} stay, of which nothing is mapped any more", drain.stay)
            } else {
                String::new()
            };
            format!(
                "all is local: {} pages came back{stay}; nothing leaves until `varve vm far {pager} --local SIZE`",
                drain.came_back
            )
        }
        Some(_) => format!(
            "all is local, {} MiB in {} programs; nothing leaves until `varve vm far {pager} --local SIZE`",
            mib(status.local_bytes),
            status.programs
        ),
        None if status.limit_bytes == u64::MAX => format!(
            "local {} MiB ({}, no limit yet), in {} programs",
            mib(status.local_bytes),
            status.local,
            status.programs
        ),
        None => format!(
            "local {} of at most {} MiB ({}), far {} MiB, in {} programs",
            mib(status.local_bytes),
            mib(status.limit_bytes),
            status.local,
            mib(status.far_pages * varve_far::PAGE_BYTES as u64),
            status.programs
        ),
    }
}

/// The process of a thread; other numbers as they are.
fn group_leader(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let leader = status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    leader.unwrap_or(pid)
}

/// Asks all pagers of this user, until one has the process. Gives the pager's pid and its state.
fn find(request: &Request) -> anyhow::Result<(i32, FarStatus)> {
    let dir = state_dir().context("cannot read the pagers' state")?;
    for entry in std::fs::read_dir(&dir)?.flatten() {
        let path = entry.path();
        let pager = path
            .file_stem()
            .and_then(|stem| stem.to_str()?.parse::<i32>().ok());
        let (Some(pager), true) = (pager, path.extension().is_some_and(|end| end == "far")) else {
            continue;
        };
        match control::ask(&path, request) {
            Ok(Answer::Done(status)) => return Ok((pager, *status)),
            Ok(Answer::Refused(why)) => bail!(why),
            Ok(Answer::Elsewhere) => {}
            // Of a pager that was killed.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                let _ = std::fs::remove_file(&path);
            }
            Err(error) if pager == request.pid => bail!("pager {pager} does not answer: {error}"),
            Err(error) => tracing::debug!("pager {pager} does not answer: {error}"),
        }
    }
    bail!(nobody(request.pid))
}

/// Why no pager has a process.
fn nobody(pid: i32) -> String {
    let Ok(meta) = std::fs::metadata(Path::new("/proc").join(pid.to_string())) else {
        return format!("there is no process {pid}; `varve vm status` shows the runs that there are");
    };
    let me = rustix::process::geteuid();
    if meta.uid() != me.as_raw() {
        return format!(
            "process {pid} is in no run of yours, and belongs to another user ({}): only who started a run can change it",
            meta.uid()
        );
    }
    format!(
        "process {pid} is in no run with far memory, and a running process cannot be taken in: start it with `varve vm run \
        --local SIZE -- PROGRAM`"
    )
}

/// The file that `varve vm status` reads. Removed when this goes.
struct StateFile(std::path::PathBuf);

impl StateFile {
    fn new() -> anyhow::Result<Self> {
        Ok(Self(state_file(&state_dir()?, std::process::id())))
    }

    fn write(&self, snapshot: &Snapshot) {
        if let Err(error) = snapshot.write(&self.0) {
            tracing::warn!("cannot write {}: {error}", self.0.display());
        }
    }
}

/// The state that others read.
fn snapshot(begun: Instant, pager: &Pager) -> Snapshot {
    let processes = pager.processes().into_iter();
    let processes = processes.map(|(pid, name, used_bytes, far_pages)| ProcessStatus {
        pid: pid.0,
        name,
        used_bytes,
        far_pages,
        ..ProcessStatus::default()
    });
    Snapshot {
        version: 1,
        manager: std::process::id(),
        uptime_s: begun.elapsed().as_secs_f64(),
        processes: processes.collect(),
        heat: pager.take_heat(REPORT_EVERY.as_secs_f64()),
        far: Some(pager.status()),
        ..Snapshot::default()
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
