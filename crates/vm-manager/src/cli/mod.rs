//! `varve vm`: the command line of the memory half.

mod far;
mod manage;
mod out;
mod show;
mod top;
mod trace;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::config::PolicyFile;

/// Memory tiers and huge pages for unmodified programs.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Start a program and manage its memory until it ends.
    Run(RunArgs),
    /// Manage the memory of a running process, or of a control group, until interrupted.
    Attach(AttachArgs),
    /// Change, empty or show the far memory of a running program (`run --local`).
    Far(FarArgs),
    /// Show what the running managers do.
    Status(ShowArgs),
    /// Watch the running managers.
    Top,
    /// Draw which memory is hot, by address and time.
    Heat(HeatArgs),
    /// Say what the running kernel offers, what it lacks and what would help.
    Probe(ShowArgs),
    /// Print the policy file in full, with every default.
    Policy(PolicyArgs),
    /// Generate, replay and compare traces of page accesses.
    #[command(subcommand)]
    Trace(trace::TraceCommand),
}

/// Arguments common to `run` and `attach`.
#[derive(Debug, Args)]
pub struct ManageArgs {
    /// Policy file (TOML); see `varve vm policy`.
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Serve Prometheus metrics on this address, such as 127.0.0.1:9464.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<SocketAddr>,
    /// Write every touch that the tracker sees to this file, for `trace replay`.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Say nothing unless something fails.
    #[arg(long, short)]
    pub quiet: bool,
    /// Print the final summary as JSON on standard error.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Common ones.
    #[command(flatten)]
    pub manage: ManageArgs,
    /// Keep at most this much of the program's memory local, such as 8G or 60% of all of it; the rest goes to
    /// far memory. `stall=1%` finds the size from the time that threads wait for far pages.
    #[arg(long, value_name = "SIZE|SHARE|stall=SHARE")]
    pub local: Option<crate::far::Local>,
    /// With --local: keep far pages in this directory too, such as /dev/shm=4G; again for further ones.
    #[arg(long, value_name = "DIR=SIZE", requires = "local", value_parser = crate::far::config::tier)]
    pub far: Vec<crate::far::config::FarTier>,
    /// The program and its arguments.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM"
    )]
    pub program: Vec<std::ffi::OsString>,
}

/// Arguments of `far`.
#[derive(Debug, Args)]
pub struct FarArgs {
    /// Any process of the run, or its pager (the `varve vm run` itself).
    #[arg(value_name = "PID")]
    pub pid: i32,
    /// Keep at most this much of the run's memory local from now on, such as 8G or 60% of all of it, or what
    /// stall=1% finds.
    #[arg(long, value_name = "SIZE|SHARE|stall=SHARE", conflicts_with = "drain")]
    pub local: Option<crate::far::Local>,
    /// Bring everything back, wait until it has come, and let nothing leave until a new --local is given.
    #[arg(long)]
    pub drain: bool,
    /// Print the state as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `attach`.
#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Common ones.
    #[command(flatten)]
    pub manage: ManageArgs,
    /// Leave again after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<u64>,
    /// Processes by pid, and control groups by directory.
    #[arg(required = true, value_name = "PID|CGROUP")]
    pub targets: Vec<String>,
}

/// Arguments of commands that show something.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// As JSON.
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `heat`.
#[derive(Debug, Args)]
pub struct HeatArgs {
    /// As SVG to this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// Only this process.
    #[arg(long)]
    pub pid: Option<i32>,
}

/// Arguments of `policy`.
#[derive(Debug, Args)]
pub struct PolicyArgs {
    /// Check this file and print what it means in full.
    pub file: Option<PathBuf>,
}

/// Runs one command.
///
/// # Errors
/// The message for the user if the command failed.
pub fn run(cmd: VmCommand) -> anyhow::Result<ExitCode> {
    match cmd {
        VmCommand::Run(args) => manage::run(&args),
        VmCommand::Attach(args) => manage::attach(&args),
        VmCommand::Far(args) => far::change(&args),
        VmCommand::Status(args) => show::status(args.json),
        VmCommand::Top => top::run(),
        VmCommand::Heat(args) => show::heat(&args),
        VmCommand::Probe(args) => show::probe(args.json),
        VmCommand::Policy(args) => {
            out::text(&policy(args.file.as_deref())?.to_toml());
            Ok(ExitCode::SUCCESS)
        }
        VmCommand::Trace(command) => trace::run(command),
    }
}

fn policy(file: Option<&std::path::Path>) -> anyhow::Result<PolicyFile> {
    Ok(file.map(PolicyFile::load).transpose()?.unwrap_or_default())
}
