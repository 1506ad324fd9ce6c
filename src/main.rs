//! The `varve` command line: reads it, sets logging up, calls one command, and turns errors into messages and exit codes.

mod bench;
mod check;
mod cli;
mod debug;
mod metrics;
mod mkfs;
mod mount;
mod observe;
mod out;
mod pool;
mod run;
mod serve;
mod signals;
mod status;
mod supervise;
mod top;
mod trouble;
mod up;

use clap::Parser;
use cli::{Cli, Command};
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// It failed.
const FAILED: u8 = 1;
/// The command line was wrong.
const USAGE: u8 = 2;
/// Damage was found.
pub const DAMAGED: u8 = 3;
/// Nobody serves the pool.
const NO_DAEMON: u8 = 4;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let wish = cli.log.or_else(|| std::env::var("VARVE_LOG").ok());
    let wish = wish.as_deref().unwrap_or("warn");
    let filter = match EnvFilter::try_new(wish) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("varve: the log filter `{wish}` is wrong: {error}");
            return ExitCode::from(USAGE);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .init();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("varve: {}", message(&error));
            let no_daemon = error.chain().any(|cause| cause.is::<pool::NoDaemon>());
            let usage = error.chain().any(|cause| cause.is::<pool::Usage>());
            ExitCode::from(match (no_daemon, usage) {
                (true, _) => NO_DAEMON,
                (_, true) => USAGE,
                _ => FAILED,
            })
        }
    }
}

/// An error with its causes, each told once.
fn message(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match command {
        Command::Up(args) => up::up(&args).map(done),
        Command::Down(args) => up::down(&args).map(done),
        Command::Mkfs(args) => mkfs::mkfs(&args).map(done),
        Command::Serve(args) => serve::serve(&args).map(done),
        Command::Mount(args) => mount::mount(&args).map(done),
        Command::Umount(args) => mount::umount(&args).map(done),
        Command::Status(args) => status::status(&args).map(done),
        Command::Top(args) => top::top(&args).map(done),
        Command::Metrics(args) => metrics::metrics(&args).map(done),
        Command::Digest(args) => status::digest(&args).map(done),
        Command::Fsck(args) => Ok(check::fsck(&args)),
        Command::Scrub(args) => check::scrub(&args),
        Command::Debug(args) => debug::debug(&args.what).map(done),
        Command::Bench(args) => bench::bench(&args).map(done),
        Command::Run(args) => run::run(&args),
        Command::Vm(args) => varve_vm_manager::cli::run(args.command),
    }
}
