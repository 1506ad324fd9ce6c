//! `run` and `attach`: manage a new or a running process.

use std::io::IsTerminal;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::{AttachArgs, ManageArgs, RunArgs, out, policy};
use crate::coop::SOCKET_VARIABLE;
use crate::engine::Engine;
use crate::metrics;
use crate::snapshot::{Snapshot, state_dir, state_file};
use crate::types::Pid;

const REPORT_EVERY: Duration = Duration::from_secs(1);

/// A manager with its files and its metrics; removes its files when dropped.
struct Session {
    engine: Engine,
    state: PathBuf,
    socket: PathBuf,
    shared: Option<metrics::Shared>,
    quiet: bool,
    json: bool,
    reported: Instant,
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.state);
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Session {
    fn open(args: &ManageArgs) -> anyhow::Result<Self> {
        let mut engine = Engine::new(policy(args.policy.as_deref())?);
        let dir = state_dir().context("cannot keep state")?;
        let (state, socket) = (
            state_file(&dir, std::process::id()),
            dir.join(format!("{}.sock", std::process::id())),
        );
        engine
            .listen(&socket)
            .with_context(|| format!("cannot listen on {}", socket.display()))?;
        if let Some(path) = &args.trace {
            let file =
                std::fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
            engine.record(std::io::BufWriter::new(file))?;
        }
        let mut shared = None;
        if let Some(address) = args.metrics {
            let cell: metrics::Shared = Arc::default();
            let bound = metrics::serve(address, cell.clone())
                .with_context(|| format!("cannot serve metrics on {address}"))?;
            shared = Some(cell);
            if !args.quiet {
                out::note(&format!("varve vm: metrics on http://{bound}/metrics"));
            }
        }
        let (quiet, json) = (args.quiet, args.json);
        let session = Self {
            engine,
            state,
            socket,
            shared,
            quiet,
            json,
            reported: Instant::now(),
        };
        if !quiet {
            out::note(session.introduction().trim_end());
        }
        Ok(session)
    }

    /// Returns the text shown at the start: the features in use, and the unused ones with the reason.
    fn introduction(&self) -> String {
        let e = &self.engine;
        let mut out = format!("varve vm: Linux {}\n", e.probe.kernel);
        match &e.ingens {
            Some(_) if !e.probe.has("process-madvise") => {
                out += "  huge pages: only looked at; making and splitting them needs root (CAP_SYS_NICE)\n";
            }
            Some(_) => {
                let when = e.config.ingens.utilisation * 100.0;
                out += &format!(
                    "  huge pages: given when {when:.0} % of 2 MiB are in use, fairly, outside of page \
                    faults\n"
                );
            }
            None => out += "  huge pages: not managed\n",
        }
        match &e.multi_clock {
            Some(_) => {
                out += &format!(
                    "  tiers: {} tiers, hot pages move up every {} ms\n",
                    e.tiers.len(),
                    e.config.multi_clock.period_ms
                )
            }
            None => out += "  tiers: one tier only, nothing to move\n",
        }
        let info = e.tracker.info();
        out += &format!("  access bits: {} ({})\n", info.name, info.note);
        for note in &e.notes {
            out += &format!("  not used: {note}\n");
        }
        out += "  watch with `varve vm top`, `varve vm heat`\n";
        out
    }

    /// Runs one round; returns how long to rest.
    fn tick(&mut self) -> Duration {
        let rest = self.engine.tick();
        if self.reported.elapsed() >= REPORT_EVERY {
            self.report();
        }
        rest
    }

    fn report(&mut self) -> Snapshot {
        self.reported = Instant::now();
        let snapshot = self.engine.snapshot();
        if let Err(e) = snapshot.write(&self.state) {
            tracing::warn!("cannot write {}: {e}", self.state.display());
        }
        if let Some(cell) = &self.shared {
            *cell.lock() = snapshot.clone();
        }
        snapshot
    }

    fn conclude(&mut self) {
        let before = self.report();
        let (moved, split) = self.engine.leave();
        if self.json {
            out::note(&serde_json::to_string(&before).unwrap_or_default());
        } else if !self.quiet {
            let t = &before.totals;
            out::note(&format!(
                "varve vm: {:.1} s; {} huge pages made, {} split; {} pages moved up, {} down; {} declined",
                before.uptime_s, t.collapsed, t.split, t.promoted, t.demoted, t.failed
            ));
            if t.collapsed + t.promoted + t.demoted + t.failed == 0 && self.engine.ingens.is_some() {
                let least = self.engine.config.ingens.utilisation * 100.0;
                out::note(&format!(
                    "  nothing to do: no 2 MiB of the program's memory were {least:.0} % in use for long \
                    enough"
                ));
            }
            out::note(&format!(
                "  cost: looking {:.2} %, working {:.2} %, kernel's DAMON thread {:.2} % of one core; {}",
                before.scan_cpu_share * 100.0,
                before.work_cpu_share * 100.0,
                before.kdamond_cpu_share * 100.0,
                bookkeeping(before.metadata_bytes, before.metadata_pages)
            ));
            if moved + split > 0 {
                out::note(&format!(
                    "  put back: {moved} pages moved home, {split} huge pages split"
                ));
            }
        }
    }
}

/// Formats the memory for bookkeeping: per page, or for few pages the sum, as the mean would mislead.
fn bookkeeping(bytes: u64, pages: u64) -> String {
    const FEW: u64 = 4_096;
    if pages < FEW {
        return format!("{} KiB of bookkeeping", bytes.div_ceil(1024));
    }
    format!("{:.2} bytes a page", bytes as f64 / pages as f64)
}

/// Flags of received signals.
pub(super) struct Signals([(libc::c_int, Arc<AtomicBool>); 3]);

impl Signals {
    pub(super) fn watch() -> anyhow::Result<Self> {
        let signals =
            [libc::SIGINT, libc::SIGTERM, libc::SIGHUP].map(|s| (s, Arc::new(AtomicBool::new(false))));
        for (signal, flag) in &signals {
            signal_hook::flag::register(*signal, flag.clone())?;
        }
        Ok(Self(signals))
    }

    /// Whether a signal was received.
    fn any(&self) -> bool {
        self.0.iter().any(|(_, f)| f.load(Ordering::Relaxed))
    }

    /// Forwards the received signals to the program. A terminal sends its interrupt and hangup to the program
    /// itself.
    pub(super) fn pass_on(&self, pid: Pid) {
        let terminal = std::io::stdin().is_terminal() || std::io::stderr().is_terminal();
        for (signal, flag) in &self.0 {
            let came = flag.swap(false, Ordering::Relaxed);
            if !came || (terminal && *signal != libc::SIGTERM) {
                continue;
            }
            let signal = match *signal {
                libc::SIGINT => rustix::process::Signal::INT,
                libc::SIGHUP => rustix::process::Signal::HUP,
                _ => rustix::process::Signal::TERM,
            };
            let _ = rustix::process::Pid::from_raw(pid.0).map(|p| rustix::process::kill_process(p, signal));
        }
    }
}

pub(super) fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

pub(super) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    if let Some(local) = args.local {
        return super::far::run(args, local);
    }
    let mut session = Session::open(&args.manage)?;
    let signals = Signals::watch()?;
    let mut command = Command::new(&args.program[0]);
    command
        .args(&args.program[1..])
        .env(SOCKET_VARIABLE, &session.socket);
    if session.engine.config.thp_by_request
        && session.engine.ingens.is_some()
        && session.engine.probe.has("thp-by-request")
    {
        crate::sys::restrict_child_thp(&mut command);
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", Path::new(&args.program[0]).display()))?;
    let pid = Pid(child.id() as i32);
    if let Err(e) = session.engine.attach(pid) {
        // The program runs on unmanaged. If it has ended already, there is nothing to report.
        if e.raw_os_error() != Some(libc::ESRCH) {
            out::note(&format!(
                "varve vm: cannot manage {pid}: {e}; the program runs on unmanaged"
            ));
        }
    }
    let (sender, ended) = channel();
    std::thread::spawn(move || {
        let _ = sender.send(child.wait());
    });
    let status = loop {
        let rest = session.tick();
        if let Some(status) = wait(&ended, rest)? {
            break status;
        }
        signals.pass_on(pid);
    };
    session.conclude();
    Ok(exit_code(status))
}

fn wait(ended: &Receiver<std::io::Result<ExitStatus>>, rest: Duration) -> anyhow::Result<Option<ExitStatus>> {
    use std::sync::mpsc::RecvTimeoutError;
    match ended.recv_timeout(rest) {
        Ok(status) => Ok(Some(status?)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => bail!("lost track of the program"),
    }
}

pub(super) fn attach(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    let mut session = Session::open(&args.manage)?;
    for target in &args.targets {
        match target.parse::<i32>() {
            Ok(pid) => {
                if let Err(e) = session.engine.attach(Pid(pid)) {
                    let why = match e.raw_os_error() {
                        Some(libc::ESRCH | libc::ENOENT | libc::EINVAL) => {
                            format!("there is no process {pid}")
                        }
                        Some(libc::EACCES | libc::EPERM) => {
                            format!("process {pid} belongs to somebody else; root can manage any")
                        }
                        _ => format!("cannot manage process {pid}: {e}"),
                    };
                    bail!(why);
                }
            }
            Err(_) => {
                let attached = session.engine.attach_cgroup(Path::new(target));
                attached
                    .with_context(|| format!("{target} is neither a pid nor a control group's directory"))?;
            }
        }
    }
    let signals = Signals::watch()?;
    let end = args.seconds.map(|s| Instant::now() + Duration::from_secs(s));
    let leave = || signals.any() || end.is_some_and(|e| Instant::now() >= e);
    while !leave() {
        let rest = session.tick();
        if session.engine.idle() {
            break;
        }
        std::thread::sleep(
            rest.min(Duration::from_millis(200))
                .max(Duration::from_millis(10)),
        );
        // A long rest is divided, so that a signal or the end of the time is noticed.
        let until = Instant::now() + rest.saturating_sub(Duration::from_millis(200));
        while Instant::now() < until && !leave() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    session.conclude();
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::bookkeeping;

    #[test]
    fn bookkeeping_of_a_few_pages_is_told_as_a_sum() {
        assert_eq!(bookkeeping(2_000, 25), "2 KiB of bookkeeping");
        assert_eq!(bookkeeping(655_360, 1_000_000), "0.66 bytes a page");
    }
}
