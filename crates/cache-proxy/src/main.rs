//! `varve-cache-proxy`: the command line, signals and the order of start and end. The library does the
//! serving.
#![forbid(unsafe_code)]

mod cli;
mod run;
mod top;
mod warm;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments = cli::Arguments::parse();
    match run::run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("varve-cache-proxy: {error:#}");
            ExitCode::FAILURE
        }
    }
}
