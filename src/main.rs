//! The `varve` program: parses the command line, sets up logging, calls one command, and turns errors into
//! messages and exit codes.

// `println!` and `eprintln!` panic when their reader has gone; `out` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod bench;
mod cache;
mod check;
mod cli;
mod clone;
mod debug;
mod dedup;
mod destroy;
mod device_args;
mod devices;
mod doctor;
mod exit;
mod health;
mod helper;
mod job_args;
mod jobs;
mod metrics;
mod mkfs;
mod mount;
mod mount_options;
mod mounted;
mod observe;
mod out;
mod pin;
mod pin_args;
mod pool;
mod pool_session;
mod run;
mod serve;
mod share;
mod signals;
mod status;
mod supervise;
mod sync;
mod top;
mod up;
mod upgrade;

use clap::Parser;
use cli::{Cli, Command, DedupSub};
use dedup::args::PlaceCommand;
use exit::{FAILED, NO_DAEMON, USAGE, message};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    if helper::is_meant() {
        return helper::run();
    }
    let cli = Cli::parse();
    let wish = cli.log.or_else(|| std::env::var("VARVE_LOG").ok());
    let wish = wish.as_deref().unwrap_or("warn");
    let filter = match EnvFilter::try_new(wish) {
        Ok(filter) => filter,
        Err(error) => {
            out::note(&format!("varve: the log filter `{wish}` is wrong: {error}"));
            return ExitCode::from(USAGE);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // The subscriber would report a closed pipe by `eprintln!`, which panics.
        .log_internal_errors(false)
        // The library is built without colours; requesting them is an error.
        .with_ansi(false)
        .init();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            out::note(&format!("varve: {}", message(&error)));
            let no_daemon = error.chain().any(|cause| {
                let missing = cause.downcast_ref::<pool::NoDaemon>();
                missing.is_some_and(pool::NoDaemon::is_absent)
            });
            let usage = error.chain().any(|cause| cause.is::<exit::Usage>());
            ExitCode::from(match (no_daemon, usage) {
                (true, _) => NO_DAEMON,
                (_, true) => USAGE,
                _ => FAILED,
            })
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Up(args) => up::up(&args).map(done),
        Command::Down(args) => up::down(&args).map(done),
        Command::Mkfs(args) => mkfs::mkfs(&args).map(done),
        Command::Destroy(args) => destroy::destroy(&args).map(done),
        Command::Upgrade(args) => upgrade::upgrade(&args).map(done),
        Command::Serve(args) => serve::serve(&args).map(done),
        Command::Mount(args) => mount::mount(&args).map(done),
        Command::Umount(args) => mount::umount(&args).map(done),
        Command::Status(args) => status::status(&args).map(done),
        Command::Top(args) => top::top(&args).map(done),
        Command::Metrics(args) => metrics::metrics(&args).map(done),
        Command::Digest(args) => status::digest(&args).map(done),
        Command::Sync(args) => sync::sync(&args).map(done),
        Command::Clone(args) => clone::clone(&args).map(done),
        Command::Pin(args) => pin::pin(&args).map(done),
        Command::Unpin(args) => pin::unpin(&args).map(done),
        Command::Exclude(args) => pin::exclude(&args).map(done),
        Command::Rules(args) => pin::rules(&args).map(done),
        Command::WhichTier(args) => pin::which_tier(&args).map(done),
        Command::Evacuate(args) => jobs::evacuate(&args).map(done),
        Command::AddDevice(args) => devices::add(&args).map(done),
        Command::RemoveDevice(args) => devices::remove(&args).map(done),
        Command::Replace(args) => devices::replace(&args).map(done),
        Command::Jobs(args) => jobs::jobs(&args).map(done),
        Command::Usage(args) => share::usage(&args).map(done),
        Command::Defrag(args) => share::defrag(&args).map(done),
        Command::Fsck(args) => Ok(check::fsck(&args)),
        Command::Scrub(args) => check::scrub(&args),
        Command::Debug(args) => debug::debug(&args.what).map(done),
        Command::Doctor(args) => Ok(doctor::doctor(&args)),
        Command::Bench(args) => bench::bench(&args).map(done),
        Command::Run(args) => run::run(&args),
        Command::Dedup(args) => match args.command {
            DedupSub::Anywhere(command) => share::anywhere(&command),
            DedupSub::InPool(command) => share::run(&command).map(done),
            DedupSub::Placed(PlaceCommand::Place(args)) => pin::place(&args).map(done),
            DedupSub::Placed(PlaceCommand::Unplace(args)) => pin::unplace(&args).map(done),
        },
        Command::Vm(args) => varve_vm_manager::cli::run(args.command),
        Command::Cache(args) => cache::run(args.command),
    }
}
