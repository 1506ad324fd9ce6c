//! `varve evacuate` and `varve jobs`: jobs of operators. The daemon keeps them and moves the data. Those that
//! take a device out are started in `devices`.

use crate::job_args::{EvacuateArgs, JobArgs, JobsArgs, JobsCommand, Limit, ListArgs};
use crate::out;
use crate::pool::Pool;
use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};
use varve_format::Tier;
use varve_ipc::{Admin, IpcError, JobAct};
use varve_kernelfs::placement::Cause;
use varve_kernelfs::pool::size::show;
use varve_kernelfs::{EvacuationAsked, JobState, JobStatus, PlacementStatus, Status};

/// How long `--wait` waits while nothing moves.
const STUCK_LIMIT: Duration = Duration::from_secs(15);

/// `varve evacuate`.
pub fn evacuate(args: &EvacuateArgs) -> anyhow::Result<()> {
    let pool = Pool::open(&args.pool)?;
    if args.cancel {
        let job = job_of(&pool, args.tier)?;
        return change(&pool, job.id, JobAct::Cancel, args.json);
    }
    let asked = Admin::Evacuate {
        tier: args.tier,
        partly: args.partly,
    };
    let answer = ask(&pool, asked).map_err(|error| refused(error, pool.dir(), args.tier))?;
    let job = match answer {
        EvacuationAsked::Started(job) => job,
        EvacuationAsked::NoRoom {
            used_bytes,
            room_bytes,
            high_percent,
        } => {
            let tier = args.tier.name();
            bail!(
                "{tier} holds {}, and the other tiers take {} more until they are {high_percent} % full: delete \
                files, or begin all the same with --partly; nothing was changed",
                show(used_bytes),
                show(room_bytes)
            )
        }
    };
    let job = if args.wait { wait(&pool, job.id)? } else { job };
    if args.json {
        out::line(&format!("{:#}", json!(job)));
    } else if job.state == JobState::Done {
        out::line(&format!(
            "job {}: {} is empty and takes no new data",
            job.id, job.tier
        ));
    } else {
        let dir = pool.dir().display();
        out::line(&format!(
            "job {}: moving {} off {}; `varve jobs {dir}` shows it",
            job.id,
            show(job.left_bytes),
            job.tier
        ));
    }
    Ok(())
}

/// `varve jobs`.
pub fn jobs(args: &JobsArgs) -> anyhow::Result<()> {
    let act = |at: &JobArgs, act| change(&Pool::open(&at.pool)?, at.job, act, at.json);
    match &args.command {
        None => list(&args.list),
        Some(JobsCommand::List(args)) => list(args),
        Some(JobsCommand::Pause(at)) => act(at, JobAct::Pause),
        Some(JobsCommand::Resume(at)) => act(at, JobAct::Resume),
        Some(JobsCommand::Cancel(at)) => act(at, JobAct::Cancel),
        Some(JobsCommand::Limit {
            job,
            limit: Limit(bytes),
        }) => act(job, JobAct::Limit(*bytes)),
    }
}

/// `varve jobs list`.
fn list(args: &ListArgs) -> anyhow::Result<()> {
    let pool = Pool::open(args.pool.as_deref().unwrap_or_else(|| Path::new(".")))?;
    let status: Status = ask(&pool, Admin::Status).map_err(|error| not_mine(error, pool.dir()))?;
    let of_no_job = |moves: &&PlacementStatus| !matches!(moves.cause, Cause::Evacuated | Cause::Removed);
    let others: Vec<_> = status.placement.iter().filter(of_no_job).collect();
    if args.json {
        let value = json!({"jobs": status.operator_jobs, "moves": others});
        out::line(&format!("{value:#}"));
        return Ok(());
    }
    if status.operator_jobs.is_empty() {
        out::line("no jobs");
    }
    for job in &status.operator_jobs {
        out::line(text(job).trim_end());
    }
    for moves in others {
        out::line(&format!("      {moves}"));
    }
    Ok(())
}

/// A job in a few lines.
pub fn text(job: &JobStatus) -> String {
    let what = match &job.device {
        Some(device) => format!("takes {device} out of {}", job.tier),
        None => format!("evacuates {}", job.tier),
    };
    let mut text = format!(
        "job {} {what}: {}, {} moved, {} left",
        job.id,
        job.state.name(),
        show(job.moved_bytes),
        show(job.left_bytes)
    );
    if let Some(rate) = job.bytes_per_s {
        let _ = write!(text, ", {}/s", show(rate));
    }
    if let Some(seconds) = job.eta_s {
        let _ = write!(text, ", about {} to go", time(seconds));
    }
    if let Some(limit) = job.limit_bytes_per_s {
        let _ = write!(text, ", limit {}/s", show(limit));
    }
    text.push('\n');
    for (reason, bytes) in &job.stays {
        let _ = writeln!(text, "      {:>9}  {reason}", show(*bytes));
    }
    text
}

/// A time in its largest unit.
fn time(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Has the daemon change a job, and says what it is now.
fn change(pool: &Pool, id: u64, act: JobAct, as_json: bool) -> anyhow::Result<()> {
    let answer = ask(pool, Admin::Job { id, act });
    let job: JobStatus = answer.map_err(|error| match errno_of(&error) {
        Some(libc::ENOENT) => anyhow::anyhow!(
            "no job has number {id}; `varve jobs {}` lists them",
            pool.dir().display()
        ),
        Some(libc::EROFS) => read_only(pool.dir()),
        _ => not_mine(error, pool.dir()),
    })?;
    if as_json {
        out::line(&format!("{:#}", json!(job)));
    } else if act == JobAct::Cancel {
        out::line(&format!(
            "job {id} is cancelled: {} takes new data again; {} were moved and stay where they are, {} are left \
            there",
            job.device.as_ref().unwrap_or(&job.tier),
            show(job.moved_bytes),
            show(job.left_bytes)
        ));
    } else {
        out::line(text(&job).trim_end());
    }
    Ok(())
}

/// The job that evacuates a tier.
fn job_of(pool: &Pool, tier: Tier) -> anyhow::Result<JobStatus> {
    let jobs: Vec<JobStatus> = ask(pool, Admin::Jobs).map_err(|error| not_mine(error, pool.dir()))?;
    let found = jobs
        .into_iter()
        .find(|job| job.device.is_none() && job.tier == tier.name());
    found.with_context(|| {
        format!(
            "{} is not being evacuated: there is nothing to cancel",
            tier.name()
        )
    })
}

/// Waits until a job is done.
fn wait(pool: &Pool, id: u64) -> anyhow::Result<JobStatus> {
    let _progress = out::Progress::start("moving");
    let (mut before, mut moved) = (None, Instant::now());
    loop {
        let jobs: Vec<JobStatus> = ask(pool, Admin::Jobs)?;
        let job = jobs.into_iter().find(|job| job.id == id);
        let job = job.with_context(|| format!("job {id} was cancelled meanwhile"))?;
        let now = (job.moved_bytes, job.moved_metadata_bytes, job.left_bytes);
        if job.state == JobState::Done {
            return Ok(job);
        }
        if before.replace(now) != Some(now) {
            moved = Instant::now();
        } else if moved.elapsed() >= STUCK_LIMIT || job.state == JobState::Incomplete {
            bail!("{}it goes on when it can", text(&job));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub fn ask<T: DeserializeOwned>(pool: &Pool, request: Admin) -> anyhow::Result<T> {
    let json = pool.ask(request)?;
    serde_json::from_str(&json).context("the daemon's answer is not what was expected")
}

fn errno_of(error: &anyhow::Error) -> Option<i32> {
    match error.downcast_ref::<IpcError>() {
        Some(IpcError::Errno(errno)) => Some(*errno),
        _ => None,
    }
}

fn read_only(pool: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "the pool {0} is read-only since an error: `varve status {0}` says which",
        pool.display()
    )
}

/// The message for a request by somebody else.
pub fn not_mine(error: anyhow::Error, pool: &Path) -> anyhow::Error {
    match errno_of(&error) {
        Some(libc::EPERM) => {
            anyhow::anyhow!(
                "only root and the owner of the pool {} may do that",
                pool.display()
            )
        }
        _ => error,
    }
}

/// The message for an evacuation that was refused.
fn refused(error: anyhow::Error, pool: &Path, tier: Tier) -> anyhow::Error {
    let (name, dir) = (tier.name(), pool.display());
    match errno_of(&error) {
        Some(libc::EINVAL) => anyhow::anyhow!(
            "{name} cannot be evacuated: it holds the metadata that changes, and the logs of sessions"
        ),
        Some(libc::ENXIO) => {
            anyhow::anyhow!("the pool {dir} has no {name}: `varve status {dir}` shows its tiers")
        }
        Some(libc::EEXIST) => {
            anyhow::anyhow!("{name} is being evacuated already: `varve jobs {dir}` shows the job")
        }
        Some(libc::EROFS) => read_only(pool),
        _ => not_mine(error, pool),
    }
}

#[cfg(test)]
mod tests {
    use super::{JobState, JobStatus, text, time};

    #[test]
    fn job_is_told_with_what_stays_and_why() {
        let mut job = JobStatus {
            id: 3,
            kind: "evacuate".into(),
            tier: "ssd".into(),
            device: None,
            state: JobState::Waiting,
            moved_bytes: 3 << 30,
            moved_metadata_bytes: 0,
            left_bytes: 5 << 20,
            limit_bytes_per_s: Some(20 << 20),
            bytes_per_s: Some(0),
            eta_s: None,
            started_ns: 0,
            stays: [("waiting: hdd 97 % full".into(), 5 << 20)].into(),
        };
        assert_eq!(
            text(&job),
            "job 3 evacuates ssd: waiting, 3.0 GiB moved, 5.0 MiB left, 0 B/s, limit 20.0 MiB/s\n        5.0 \
            MiB  waiting: hdd 97 % full\n"
        );
        job.device = Some("/dev/sdb".into());
        assert!(text(&job).starts_with("job 3 takes /dev/sdb out of ssd: waiting, 3.0 GiB moved"));
    }

    #[test]
    fn time_has_one_unit() {
        let told: Vec<_> = [5, 119, 120, 7200, 200_000].map(time).into();
        assert_eq!(told, ["5 s", "119 s", "2 min", "2 h", "2 days"]);
    }
}
