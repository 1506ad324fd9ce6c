//! `varve cache serve`, `top` and `warm`: the HTTP proxy, a program of its own, in place of this process.
//! Links nothing of it.

use anyhow::anyhow;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

const NAME: &str = "varve-cache-proxy";

/// The proxy's program: beside this one, or else in PATH.
fn program() -> PathBuf {
    let beside = std::env::current_exe()
        .ok()
        .map(|me| me.with_file_name(NAME))
        .filter(|path| path.is_file());
    beside.unwrap_or_else(|| PathBuf::from(NAME))
}

/// Becomes the proxy's program. Returns only if that fails.
pub fn run(command: &str, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let program = program();
    let error = Command::new(&program).arg(command).args(arguments).exec();
    Err(anyhow!(
        "{}: {error}; build it with `cargo build --release -p varve-cache-proxy` and put it beside varve or into PATH",
        program.display()
    ))
}
