//! The command line of `varve evacuate` and `varve jobs`: options and help. No behaviour.

use crate::pin_args::tier;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use varve_format::Tier;
use varve_kernelfs::pool::size;

/// Arguments of `evacuate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  varve evacuate ./pool --tier ssd            moves everything off the SSD, and returns at once
  varve evacuate ./pool --tier ssd --wait     returns when the SSD is empty, or says why it cannot be
  varve jobs ./pool                           how far it is, and what each byte left there waits for
  varve evacuate ./pool --tier ssd --cancel   lets new data go there again

While the job is there, done or not, new data and metadata go to the other tiers, whatever pins
and policies want; the SSD takes something only if no other tier has room, so that no write fails,
and it is moved away when there is room. Pinned and excluded data is moved too; pins stay, and
their data comes back after --cancel. All data can be read and written at any time. What was moved
stays where it is after --cancel; the policy brings hot data back. The job survives the end of the
daemon and power cuts, and goes on with the next start.

Without --partly it is refused if the other tiers do not take all that is on the tier below their
high mark (placement_high_percent). NVM cannot be evacuated: it holds the metadata that changes,
and the logs. Moves let reads and writes go first; `varve jobs limit` bounds them further. For
root and the pool's owner.")]
pub struct EvacuateArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// The tier that is to be empty
    #[arg(long, value_name = "ssd|hdd", value_parser = tier)]
    pub tier: Tier,
    /// Begin although the other tiers do not take everything: the rest waits for room
    #[arg(long, conflicts_with = "cancel")]
    pub partly: bool,
    /// Wait until the tier is empty; fails if nothing moves for a while, and says why
    #[arg(long, conflicts_with = "cancel")]
    pub wait: bool,
    /// End the job: the tier takes new data again
    #[arg(long)]
    pub cancel: bool,
    /// Print the job as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `jobs`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  varve jobs ./pool                     the jobs, the same as `varve jobs list ./pool`
  varve jobs pause ./pool 3             moves nothing more; new data still goes elsewhere
  varve jobs limit ./pool 3 20MiB       at most 20 MiB a second from now on
  varve jobs limit ./pool 3 none        as fast as other moves, which let reads and writes go first
  varve jobs list --json ./pool | jq '.jobs[].stays'

Jobs empty a tier (`varve evacuate`) or one device of it (`varve remove-device`, `varve replace`): the
latter ends when the device is out of the pool.
States: running; waiting (all that is left waits for something, and is tried again every 10 s or
when a full tier has room); paused; incomplete (what is left does not move by waiting: damaged
data; `resume` tries it again); done (the tier is empty and stays so until the job is cancelled).
The reasons of bytes that do not move:
  waiting: hdd 97 % full                   the other tiers are at placement_high_percent
  waiting: in use by session 12            it was moved, but the session may still read the old place
  waiting: the free space is promised to sessions
  waiting: the host's disk has no room for hdd
  waiting: nvm has no room for metadata    metadata goes through NVM
  its data cannot be read                  damaged: `varve scrub` names the files
Jobs, limits and pauses survive restarts of the daemon. Numbers are never used twice in a pool.
Below the jobs are the moves of pins and of the policy, which have no numbers. For root and the
pool's owner."
)]
pub struct JobsArgs {
    /// The command.
    #[command(subcommand)]
    pub command: Option<JobsCommand>,
    /// The jobs of this pool, as `list`.
    #[command(flatten)]
    pub list: ListArgs,
}

/// Arguments of `jobs list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// The pool: its directory or its TOML file
    #[arg(required = true)]
    pub pool: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of the commands on one job.
#[derive(Debug, Args)]
pub struct JobArgs {
    /// The pool: its directory or its TOML file
    pub pool: PathBuf,
    /// Number of the job, see `varve jobs list`
    pub job: u64,
    /// Print the job as JSON
    #[arg(long)]
    pub json: bool,
}

/// The commands of `jobs`.
#[derive(Debug, Subcommand)]
pub enum JobsCommand {
    /// Show the jobs: progress, rate, estimate, and why bytes do not move
    List(ListArgs),
    /// Move nothing more for a job until it is resumed
    Pause(JobArgs),
    /// Go on with a job, and try again what could not move
    Resume(JobArgs),
    /// End a job: what was moved stays where it is, and its tier takes new data again
    Cancel(JobArgs),
    /// Bound the bytes that a job moves a second
    Limit {
        /// The job.
        #[command(flatten)]
        job: JobArgs,
        /// Most bytes a second, as 20MiB; none: as fast as other moves
        #[arg(value_name = "SIZE|none", value_parser = limit)]
        limit: Limit,
    },
}

/// Most bytes a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit(pub Option<u64>);

/// Parses a limit.
fn limit(text: &str) -> Result<Limit, String> {
    if text == "none" {
        return Ok(Limit(None));
    }
    match size::parse(text)? {
        0 => Err("a job with this limit never ends; `varve jobs pause` stops it".into()),
        bytes => Ok(Limit(Some(bytes))),
    }
}

#[cfg(test)]
mod tests {
    use super::{Limit, limit};

    #[test]
    fn limit_is_a_size_above_nothing() {
        assert_eq!(limit("20MiB"), Ok(Limit(Some(20 << 20))));
        assert_eq!(limit("none"), Ok(Limit(None)));
        assert!(limit("0").is_err_and(|error| error.contains("pause")));
        assert!(limit("fast").is_err());
    }
}
