//! Processes that the bench starts: each in a group of its own, bounded in time, and ended with all that it
//! started when the bench fails, is interrupted or dies.

use crate::common::output;
use crate::sides::Side;
use anyhow::{Context, bail};
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// How often a wait looks whether it is to end.
const PATIENCE: Duration = Duration::from_millis(20);

/// From now on signals end the run in order.
pub fn end_in_order() -> anyhow::Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// Whether a signal came.
pub fn interrupted() -> bool {
    INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed))
}

/// A group of its own, and the signal `on_death` when the bench dies.
pub fn group(command: &mut Command, on_death: Signal) {
    command.process_group(0);
    // SAFETY: the closure makes one system call, which is allowed between fork and exec, and touches no
    // memory.
    unsafe {
        command.pre_exec(move || Ok(rustix::process::set_parent_process_death_signal(Some(on_death))?));
    }
}

/// Ends a group that [`group`] made, and reaps its first process.
pub fn end_group(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = rustix::process::kill_process_group(group, Signal::KILL);
    }
    let _ = child.wait();
}

/// A process whose lines are read.
pub struct Running<'a> {
    child: Child,
    name: String,
    side: &'a Side,
    lines: Receiver<String>,
    errors: std::fs::File,
    over: bool,
}

impl<'a> Running<'a> {
    /// Starts it.
    pub fn start(mut command: Command, side: &'a Side, name: &str) -> anyhow::Result<Self> {
        let errors = tempfile::tempfile()?;
        group(&mut command, Signal::KILL);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone()?);
        let mut child = command
            .spawn()
            .with_context(|| format!("{command:?} does not start"))?;
        let (sender, lines) = std::sync::mpsc::channel();
        let output = child.stdout.take().context("no pipe")?;
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            name: name.to_owned(),
            side,
            lines,
            errors,
            over: false,
        })
    }

    /// Writes a line to it.
    pub fn say(&mut self, word: &str) -> anyhow::Result<()> {
        let input = self.child.stdin.as_mut().context("no pipe")?;
        Ok(writeln!(input, "{word}")?)
    }

    /// Its next line.
    pub fn line(&mut self, limit: Duration) -> anyhow::Result<String> {
        let began = Instant::now();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Timeout) => self.patience(began, limit)?,
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait()?;
                    self.over = true;
                    bail!("{} ended with {status}: {}", self.name, self.said());
                }
            }
        }
    }

    /// Waits for its end, which must be a good one.
    pub fn wait(&mut self, limit: Duration) -> anyhow::Result<()> {
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            self.patience(began, limit)?;
            std::thread::sleep(PATIENCE);
        };
        self.over = true;
        if !status.success() {
            bail!("{} ended with {status}: {}", self.name, self.said());
        }
        if self.side.counting() {
            self.side.count(self.said().lines().last().unwrap_or_default())?;
        }
        Ok(())
    }

    /// All its lines that nobody has read, until its end.
    pub fn rest(&mut self, limit: Duration) -> anyhow::Result<Vec<String>> {
        let began = Instant::now();
        let mut lines = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Timeout) => self.patience(began, limit)?,
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.wait(limit)?;
        Ok(lines)
    }

    /// Whether to wait on.
    fn patience(&mut self, began: Instant, limit: Duration) -> anyhow::Result<()> {
        anyhow::ensure!(!interrupted(), "interrupted");
        if began.elapsed() < limit {
            return Ok(());
        }
        let waits = waits_for(self.child.id());
        bail!(
            "{} HANGS after {limit:?}: {waits}; it said: {}",
            self.name,
            self.said()
        );
    }

    /// The end of its standard error.
    fn said(&self) -> String {
        let mut bytes = Vec::new();
        let mut errors = &self.errors;
        let _ = errors.seek(SeekFrom::Start(0));
        let _ = errors.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes);
        let from = text.len().saturating_sub(8000);
        text.get(from..).unwrap_or(&text).trim().to_owned()
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.over {
            end_group(&mut self.child);
        }
    }
}

/// In which system calls the threads of a process are: the number of each, and the place in the kernel.
fn waits_for(pid: u32) -> String {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let words: Vec<_> = tasks
        .map(|task| {
            let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let call = read("syscall");
            format!(
                "{} in {} ({})",
                read("comm").trim(),
                call.split(' ').next().unwrap_or_default().trim(),
                read("wchan").trim()
            )
        })
        .collect();
    words.join(", ")
}

/// Installs Debian's `packages` unless `there`.
pub fn install(packages: &[&str], there: impl Fn() -> bool) -> anyhow::Result<()> {
    if there() {
        return Ok(());
    }
    let what = packages.join(" ");
    let root = rustix::process::geteuid().is_root();
    anyhow::ensure!(root && has("apt-get"), "needs {what}, and cannot install it");
    let mut command = Command::new("apt-get");
    command
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive");
    output(&mut command).with_context(|| format!("needs {what}"))?;
    anyhow::ensure!(there(), "{what} was installed and is not there");
    Ok(())
}

/// Whether a program is on the path.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/sbin", "/sbin"].map(std::path::PathBuf::from);
    std::env::split_paths(&path)
        .chain(sbin)
        .any(|dir| dir.join(program).is_file())
}
