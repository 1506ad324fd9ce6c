//! `varve vm run --local`: starts the pager, then the program, and stays until all of its programs have
//! ended.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use varve_far::wire;

use super::config::{FarConfig, Local};
use super::library::RunDir;
use super::pager::Pager;
use super::status::FarStatus;
use super::{check, control, join};

/// How often the program is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs `program` with at most `local` of its memory local. Requests come to the socket `control`. `look` is
/// called many times a second, with the pid until the program has ended, and the pager.
///
/// # Errors
/// Why it was not started.
pub fn run(
    program: &[OsString],
    config: &FarConfig,
    local: Local,
    control: &Path,
    note: &dyn Fn(&str),
    mut look: impl FnMut(Option<u32>, &Pager),
) -> anyhow::Result<(ExitStatus, FarStatus)> {
    let (name, rest) = program.split_first().context("which program?")?;
    check::limit(local)?;
    check::program(name)?;
    let device = check::machine()?;
    let (pager, refused) = Pager::start(config, local).context("no far memory")?;
    for tier in refused {
        note(&format!("varve vm: a tier is not used: {tier}"));
    }
    let dir = RunDir::make().context("cannot make the library of far memory")?;
    join::listen(&pager, &dir.socket(), device).context("cannot listen for programs")?;
    let _control = control::listen(&pager, control)
        .with_context(|| format!("cannot listen for `varve vm far` at {}", control.display()))?;
    let mut command = Command::new(name);
    let mut preload = dir.library().into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command
        .args(rest)
        .env("LD_PRELOAD", preload)
        .env(wire::SOCKET_VARIABLE, dir.socket());
    let child = command
        .spawn()
        .with_context(|| format!("cannot start {}", name.to_string_lossy()))?;
    let status = wait(child, &pager, &mut look)?;
    if !pager.has_joined() {
        note("varve vm: the program ran without far memory: it did not load the library");
    }
    if pager.served() > 0 {
        note("varve vm: programs that it left behind are still served");
    }
    while pager.served() > 0 {
        look(None, &pager);
        std::thread::sleep(LOOK_EVERY);
    }
    let last = pager.status();
    pager.end();
    Ok((status, last))
}

/// Waits for the program itself.
fn wait(
    mut child: Child,
    pager: &Arc<Pager>,
    look: &mut impl FnMut(Option<u32>, &Pager),
) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        look(Some(child.id()), pager);
        std::thread::sleep(LOOK_EVERY);
    }
}
