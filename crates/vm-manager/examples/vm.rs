//! `varve vm` without the rest of Varve: for trying the manager alone.

use clap::Parser;

#[derive(Parser)]
#[command(name = "varve vm")]
struct Cli {
    #[command(subcommand)]
    command: varve_vm_manager::cli::VmCommand,
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    varve_vm_manager::cli::run(Cli::parse().command)
}
