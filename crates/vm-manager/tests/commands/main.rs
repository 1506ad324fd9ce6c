//! `varve vm` as a person uses it, on the kernel that runs this: `run`, `attach`, `status`, `heat`, metrics,
//! traces, wrong arguments. What the kernel or our privileges do not allow is skipped loudly. Nothing depends
//! on speed: states are waited for, and what was started is ended and put back.

#[path = "../real_nodes/child.rs"]
mod child;
mod unprivileged;

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::Value;
use varve_vm_manager::cli::VmCommand;
use varve_vm_manager::coop::SOCKET_VARIABLE;
use varve_vm_manager::probe::Probe;

/// How long a state may take to come about on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Why a check was not made, or what is wrong.
enum Fault {
    Skip(String),
    Wrong(String),
}

type Check = Result<(), Fault>;

impl From<std::io::Error> for Fault {
    fn from(e: std::io::Error) -> Self {
        Self::Wrong(e.to_string())
    }
}

impl From<serde_json::Error> for Fault {
    fn from(e: serde_json::Error) -> Self {
        Self::Wrong(format!("not JSON: {e}"))
    }
}

fn ensure(condition: bool, what: impl FnOnce() -> String) -> Check {
    if condition {
        Ok(())
    } else {
        Err(Fault::Wrong(what()))
    }
}

#[derive(Parser)]
#[command(name = "varve vm")]
struct Cli {
    #[command(subcommand)]
    command: VmCommand,
}

/// The command line under test, in a process of its own: this program again.
fn vm(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_default());
    command.arg("--vm").args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Result<Output, Fault> {
    Ok(vm(arguments).output()?)
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn out(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A child that is ended when dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Ended {
    fn signal(&self, signal: rustix::process::Signal) -> Check {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).map_err(|e| Fault::Wrong(e.to_string()))
    }

    fn status(&mut self) -> Result<Option<i32>, Fault> {
        let status = wait_for("a process to end", || Ok(self.0.try_wait()?))?;
        Ok(status.code())
    }
}

/// Memory with known contents that does as it is told.
struct Program {
    process: Ended,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    pid: u32,
    /// First byte of its memory.
    base: u64,
    bytes: u64,
}

impl Program {
    /// Starts it alone, or as the program of a manager with these arguments in front.
    fn start(
        manager: &[&str],
        kind: &str,
        mib: u64,
    ) -> Result<(Self, Option<std::process::ChildStderr>), Fault> {
        let me = std::env::current_exe()?;
        let (me, mib_text) = (me.to_string_lossy().into_owned(), mib.to_string());
        let own = ["--child", kind, mib_text.as_str()];
        let mut command = if manager.is_empty() {
            let mut command = Command::new(&me);
            command.args(own).env_remove(SOCKET_VARIABLE);
            command
        } else {
            let mut command = vm(manager);
            command.arg("--").arg(&me).args(own).stderr(Stdio::piped());
            command
        };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let process = Ended(child);
        let (Some(input), Some(output)) = (input, output) else {
            return Err(Fault::Wrong("no pipes".to_owned()));
        };
        let pid = process.0.id();
        let mut program = Self {
            process,
            input,
            output: BufReader::new(output),
            pid,
            base: 0,
            bytes: mib << 20,
        };
        let line = program.line()?;
        let address = line
            .strip_prefix("ready ")
            .and_then(|a| u64::from_str_radix(a, 16).ok());
        program.base = address.ok_or_else(|| Fault::Wrong(format!("the program said {line:?}")))?;
        if !manager.is_empty() {
            let path = format!("/proc/{pid}/task/{pid}/children");
            let children = std::fs::read_to_string(path)?;
            let first = children
                .split_ascii_whitespace()
                .next()
                .and_then(|w| w.parse().ok());
            program.pid = first.ok_or_else(|| Fault::Wrong("the manager has no child".to_owned()))?;
        }
        Ok((program, errors))
    }

    fn line(&mut self) -> Result<String, Fault> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn check(&mut self) -> Check {
        writeln!(self.input, "check")?;
        let answer = self.line()?;
        ensure(answer == "ok", || format!("contents: {answer:?}"))
    }

    /// Bytes of its memory that are huge pages.
    fn huge(&self) -> Result<u64, Fault> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid))?;
        let (mut inside, mut bytes) = (false, 0);
        for line in text.lines() {
            let head = line
                .split_ascii_whitespace()
                .next()
                .and_then(|w| w.split_once('-'));
            let ends = head.and_then(|(s, e)| {
                Some((u64::from_str_radix(s, 16).ok()?, u64::from_str_radix(e, 16).ok()?))
            });
            if let Some((start, end)) = ends {
                inside = start < self.base + self.bytes && self.base < end;
            } else if let Some(value) = line.strip_prefix("AnonHugePages:").filter(|_| inside) {
                let kib = value.trim().trim_end_matches(" kB").trim().parse::<u64>();
                bytes += kib.unwrap_or(0) << 10;
            }
        }
        Ok(bytes)
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Result<Option<T>, Fault>) -> Result<T, Fault> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        ensure(Instant::now() < end, || format!("waited in vain for {what}"))?;
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Managers that run, from `status --json`: the one of this pid.
fn status_of(manager: u32) -> Result<Option<Value>, Fault> {
    let all: Value = serde_json::from_str(&out(&output(&["status", "--json"])?))?;
    let mine = |s: &&Value| s["manager"].as_u64() == Some(u64::from(manager));
    Ok(all.as_array().and_then(|a| a.iter().find(mine)).cloned())
}

/// A policy that acts at once, in a file of its own.
fn eager(dir: &Path, more: &str) -> Result<String, Fault> {
    let text = format!(
        "scan_cpu_share = 0.5\nwork_cpu_share = 1.0\nsurvey_period_ms = 50\n{more}\n[ingens]\nperiod_ms = \
        50\n\
         access_period_ms = 100\nscan_period_ms = 100\nscan_bytes = 1073741824\ncompaction = \
         false\nlow_memory = 0.0\n"
    );
    let path = dir.join("eager.toml");
    std::fs::write(&path, text)?;
    Ok(path.to_string_lossy().into_owned())
}

/// Huge pages can be made here, and nobody but the manager makes them.
fn needs_huge_pages() -> Check {
    let probe = Probe::run();
    for name in ["collapse", "process-madvise"] {
        if let Some(f) = probe.features.iter().find(|f| f.name == name && !f.usable) {
            return Err(Fault::Skip(format!("{name}: {}", f.note)));
        }
    }
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if setting.contains("[always]") {
        return Err(Fault::Skip(
            "the kernel makes huge pages everywhere by itself".to_owned(),
        ));
    }
    Ok(())
}

/// Waits until the manager made huge pages; skips when this machine's memory has none to give.
fn wait_for_huge_pages(manager: u32, program: &Program) -> Check {
    let state = wait_for("huge pages", || {
        let Some(status) = status_of(manager)? else {
            return Ok(None);
        };
        let total = |what: &str| status["totals"][what].as_u64().unwrap_or(0);
        if program.huge()? > 0 && total("collapsed") > 0 {
            return Ok(Some(true));
        }
        Ok((total("collapsed") == 0 && total("failed") >= 3).then_some(false))
    })?;
    if state {
        Ok(())
    } else {
        Err(Fault::Skip("the kernel has no huge pages to give".to_owned()))
    }
}

fn run_gives_the_programs_own_status() -> Check {
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)] {
        let got = output(&["run", "--", "sh", "-c", script])?;
        ensure(got.status.code() == Some(code), || {
            format!("{script}: {:?}", got.status)
        })?;
        let said = err(&got);
        for part in [
            "varve vm: Linux ",
            "huge pages: ",
            "access bits: ",
            "cost: looking",
        ] {
            ensure(said.contains(part), || format!("{part:?} is not in {said}"))?;
        }
    }
    let quiet = output(&["run", "--quiet", "--", "echo", "hello"])?;
    ensure(out(&quiet) == "hello\n" && err(&quiet).is_empty(), || {
        format!("{quiet:?}")
    })
}

fn run_passes_signals_on() -> Check {
    use rustix::process::Signal;
    for (signal, name, code) in [
        (Signal::TERM, "TERM", 3),
        (Signal::INT, "INT", 4),
        (Signal::HUP, "HUP", 5),
    ] {
        let script = format!("trap 'exit {code}' {name}; echo ready; while :; do sleep 0.05; done");
        let mut command = vm(&["run", "--quiet", "--", "sh", "-c", &script]);
        // No terminal anywhere: one would have given the signal to the program itself.
        let mut child = Ended(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?);
        let mut ready = [0u8; 6];
        if let Some(pipe) = child.0.stdout.as_mut() {
            pipe.read_exact(&mut ready)?;
        }
        child.signal(signal)?;
        let got = child.status()?;
        ensure(got == Some(code), || format!("SIG{name}: {got:?}"))?;
    }
    Ok(())
}

fn run_makes_huge_pages_and_shows_them_everywhere() -> Check {
    needs_huge_pages()?;
    let dir = tempfile::tempdir()?;
    let policy = eager(dir.path(), "leave = \"keep\"")?;
    let arguments = ["run", "--policy", &policy, "--metrics", "127.0.0.1:0", "--json"];
    let (mut program, errors) = Program::start(&arguments, "sleep", 32)?;
    let manager = program.process.0.id();
    let mut errors = BufReader::new(errors.ok_or_else(|| Fault::Wrong("no errors".to_owned()))?);
    let mut line = String::new();
    while !line.contains("metrics on http://") {
        line.clear();
        let got = errors.read_line(&mut line)?;
        ensure(got > 0, || {
            "the manager did not say where its metrics are".to_owned()
        })?;
    }
    wait_for_huge_pages(manager, &program)?;
    program.check()?;

    let address = line
        .trim()
        .trim_end_matches("/metrics")
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .to_owned();
    let scraped = wait_for("metrics to tell of huge pages", || {
        let mut stream = std::net::TcpStream::connect(&address)?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let made = |l: &str| {
            l.strip_prefix("varve_vm_events{kind=\"collapsed\"} ")
                .is_some_and(|v| v.trim() != "0.0")
        };
        Ok(text.lines().any(made).then_some(text))
    })?;
    ensure(scraped.contains("varve_vm_process_huge_pages{"), || scraped)?;

    let text = out(&output(&["status"])?);
    ensure(
        text.contains(&format!("manager {manager} ")) && text.contains(&format!("{} ", program.pid)),
        || text,
    )?;
    let top = out(&output(&["top"])?);
    ensure(top.contains(&format!("manager {manager} ")), || {
        format!("top without a terminal: {top}")
    })?;
    let pid = program.pid.to_string();
    let heat = wait_for("heat", || {
        let heat = output(&["heat", "--json", "--pid", &pid])?;
        let all: Value = serde_json::from_str(&out(&heat))?;
        Ok(all.as_array().filter(|a| !a.is_empty()).cloned())
    })?;
    ensure(heat[0]["pid"].as_u64() == Some(u64::from(program.pid)), || {
        format!("{heat:?}")
    })?;
    let svg = dir.path().join("heat.svg");
    let drawn = output(&["heat", "--pid", &pid, "--svg", &svg.to_string_lossy()])?;
    let picture = std::fs::read_to_string(&svg)?;
    ensure(
        drawn.status.success() && picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"),
        || picture,
    )?;
    let shown = out(&output(&["heat", "--pid", &pid])?);
    ensure(
        shown.contains(&format!("({pid})")) && shown.contains("? not seen"),
        || shown,
    )?;

    // The program ends; so does the manager, with its status, a summary as JSON and no files left.
    program.check()?;
    let Program {
        mut process, input, ..
    } = program;
    drop(input);
    let code = process.status()?;
    ensure(code == Some(0), || format!("ended with {code:?}"))?;
    let mut rest = String::new();
    errors.read_to_string(&mut rest)?;
    let summary = rest
        .lines()
        .rev()
        .find(|l| l.starts_with('{'))
        .unwrap_or_default();
    let summary: Value = serde_json::from_str(summary)?;
    ensure(summary["totals"]["collapsed"].as_u64() > Some(0), || {
        summary.to_string()
    })?;
    ensure(status_of(manager)?.is_none(), || {
        "it is still in the status".to_owned()
    })
}

fn attach_and_leave_puts_huge_pages_back() -> Check {
    needs_huge_pages()?;
    let dir = tempfile::tempdir()?;
    let policy = eager(dir.path(), "")?;
    let (mut program, _) = Program::start(&[], "sleep", 32)?;
    ensure(program.huge()? == 0, || "it had huge pages before".to_owned())?;
    let pid = program.pid.to_string();
    let mut command = vm(&["attach", "--quiet", "--policy", &policy, &pid]);
    let mut manager = Ended(command.stderr(Stdio::null()).spawn()?);
    wait_for_huge_pages(manager.0.id(), &program)?;
    program.check()?;
    manager.signal(rustix::process::Signal::TERM)?;
    let code = manager.status()?;
    ensure(code == Some(0), || format!("the manager ended with {code:?}"))?;
    let left = program.huge()?;
    ensure(left == 0, || format!("{left} bytes of huge pages are left"))?;
    program.check()
}

fn killed_manager_leaves_the_program_alone_and_can_be_followed_by_another() -> Check {
    let (mut program, _) = Program::start(&[], "sleep", 8)?;
    let pid = program.pid.to_string();
    let mut first_had_damon = false;
    for round in 0..2 {
        let mut manager = Ended(vm(&["attach", "--quiet", &pid]).stderr(Stdio::null()).spawn()?);
        let id = manager.0.id();
        let status = wait_for("the manager's status", || {
            ensure(manager.0.try_wait()?.is_none(), || {
                "the manager ended by itself".to_owned()
            })?;
            status_of(id)
        })?;
        let tracker = status["tracker"].as_str().unwrap_or_default().to_owned();
        // The first one's claim on DAMON must not be in the second one's way.
        let damon = tracker.starts_with("damon");
        ensure(round == 0 || damon == first_had_damon, || {
            format!("round {round}: tracker {tracker}")
        })?;
        first_had_damon = damon;
        manager.0.kill()?;
        manager.0.wait()?;
        ensure(status_of(id)?.is_none(), || {
            "a dead manager is still in the status".to_owned()
        })?;
        program.check()?;
    }
    // A last one leaves in good order, so that nothing is left of the killed ones either.
    let last = output(&["attach", "--quiet", "--seconds", "1", &pid])?;
    ensure(last.status.success(), || err(&last))?;
    program.check()
}

fn attach_follows_a_control_group() -> Check {
    let name = format!("varve-test-{}", std::process::id());
    let bases = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"];
    let made = bases
        .iter()
        .map(|b| PathBuf::from(b).join(&name))
        .find(|d| std::fs::create_dir(d).is_ok());
    let Some(group) = made else {
        return Err(Fault::Skip("no control group can be made here".to_owned()));
    };
    let result = in_group(&group);
    // Gone members leave the group with a delay; what stays is empty and harmless.
    for _ in 0..50 {
        if std::fs::remove_dir(&group).is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    result
}

fn in_group(group: &Path) -> Check {
    let (mut program, _) = Program::start(&[], "sleep", 8)?;
    if let Err(e) = std::fs::write(group.join("cgroup.procs"), program.pid.to_string()) {
        return Err(Fault::Skip(format!(
            "no process can be put into a control group: {e}"
        )));
    }
    let path = group.to_string_lossy().into_owned();
    let mut manager = Ended(vm(&["attach", "--quiet", &path]).stderr(Stdio::null()).spawn()?);
    let id = manager.0.id();
    wait_for("the group's member in the status", || {
        ensure(manager.0.try_wait()?.is_none(), || {
            "the manager ended by itself".to_owned()
        })?;
        let found = status_of(id)?.is_some_and(|s| {
            let pids = s["processes"].as_array().cloned().unwrap_or_default();
            pids.iter()
                .any(|p| p["pid"].as_u64() == Some(u64::from(program.pid)))
        });
        Ok(found.then_some(()))
    })?;
    manager.signal(rustix::process::Signal::INT)?;
    let code = manager.status()?;
    ensure(code == Some(0), || format!("the manager ended with {code:?}"))?;
    program.check()
}

fn trace_of_a_run_can_be_replayed() -> Check {
    if !Probe::run().has("write-tracking") || !Probe::run().has("collapse") {
        return Err(Fault::Skip("this kernel does not track writes".to_owned()));
    }
    let dir = tempfile::tempdir()?;
    let policy = eager(dir.path(), "tracker = \"written\"\nhuge_pages = true")?;
    let trace = dir.path().join("trace").to_string_lossy().into_owned();
    let (mut program, _) = Program::start(
        &["run", "--quiet", "--policy", &policy, "--trace", &trace],
        "hot",
        8,
    )?;
    let manager = program.process.0.id();
    writeln!(program.input, "hot 0 8")?;
    let answer = program.line()?;
    ensure(answer == "ok", || answer)?;
    // Warm anywhere in the heat map: then a touch was seen, and what is seen is recorded.
    wait_for("a page seen touched", || {
        let Some(status) = status_of(manager)? else {
            return Ok(None);
        };
        let maps = status["heat"].as_array().into_iter().flatten();
        let columns = maps.flat_map(|map| map["columns"].as_array().into_iter().flatten());
        let mut cells = columns.flat_map(|column| column.as_array().into_iter().flatten());
        Ok(cells.any(|c| c.as_u64() > Some(0)).then_some(()))
    })?;
    let Program {
        mut process, input, ..
    } = program;
    drop(input);
    process.status()?;
    let lines = std::fs::read_to_string(&trace)?.lines().count();
    ensure(lines > 1, || "nothing was recorded".to_owned())?;
    let replayed = output(&["trace", "replay", &trace, "--json"])?;
    let rows: Value = serde_json::from_str(&out(&replayed))?;
    let policies: Vec<&str> = rows
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|r| r["policy"].as_str())
        .collect();
    ensure(
        policies == ["static", "multi-clock", "lru", "offline best"],
        || rows.to_string(),
    )
}

fn wrong_arguments_are_named_in_words() -> Check {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    std::fs::write(path("bounds.toml"), "[ingens]\nutilisation = 7\n")?;
    std::fs::write(path("field.toml"), "speed = 3\n")?;
    std::fs::write(
        path("broken.trace"),
        "# varve page trace v1: process page r|w\n0 zz r\n",
    )?;
    std::fs::write(path("empty.trace"), "# varve page trace v1: process page r|w\n")?;
    let (bounds, field, broken, empty) = (
        path("bounds.toml"),
        path("field.toml"),
        path("broken.trace"),
        path("empty.trace"),
    );
    let cases: [(&[&str], &str); 9] = [
        (&["run", "--", "/no/such/program"], "/no/such/program"),
        (&["run", "--policy", &bounds, "--", "true"], "ingens.utilisation"),
        (&["policy", &field], "speed"),
        (&["policy", "/no/such/file"], "/no/such/file"),
        (&["attach", "4194304"], "no process 4194304"),
        (&["attach", "/no/such/group"], "/no/such/group"),
        (&["attach", "/tmp"], "control group"),
        (&["trace", "replay", &broken], "line 2"),
        (&["trace", "replay", &empty], "no accesses"),
    ];
    for (arguments, part) in cases {
        let got = output(arguments)?;
        let said = err(&got);
        let clean = !got.status.success() && !said.contains("panicked");
        ensure(clean && said.contains(part), || {
            format!("{arguments:?}: {:?}: {said}", got.status)
        })?;
    }
    let all = output(&["policy"])?;
    std::fs::write(path("all.toml"), &all.stdout)?;
    let again = output(&["policy", &path("all.toml")])?;
    ensure(again.status.success() && again.stdout == all.stdout, || {
        err(&again)
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("--child") => {
            child::run(&arguments[2], arguments[3].parse().unwrap_or(1));
            return ExitCode::SUCCESS;
        }
        Some("--vm") => {
            let cli = Cli::parse_from(
                std::env::args()
                    .enumerate()
                    .filter(|(i, _)| *i != 1)
                    .map(|(_, a)| a),
            );
            return varve_vm_manager::cli::run(cli.command).unwrap_or_else(|e| {
                eprintln!("varve: {e:#}");
                ExitCode::FAILURE
            });
        }
        Some("--list") => return ExitCode::SUCCESS,
        _ => {}
    }
    type Entry = (&'static str, fn() -> Check);
    let checks: &[Entry] = &[
        (
            "run_gives_the_programs_own_status",
            run_gives_the_programs_own_status,
        ),
        ("run_passes_signals_on", run_passes_signals_on),
        (
            "run_makes_huge_pages_and_shows_them_everywhere",
            run_makes_huge_pages_and_shows_them_everywhere,
        ),
        (
            "attach_and_leave_puts_huge_pages_back",
            attach_and_leave_puts_huge_pages_back,
        ),
        (
            "killed_manager_leaves_the_program_alone_and_can_be_followed_by_another",
            killed_manager_leaves_the_program_alone_and_can_be_followed_by_another,
        ),
        ("attach_follows_a_control_group", attach_follows_a_control_group),
        ("trace_of_a_run_can_be_replayed", trace_of_a_run_can_be_replayed),
        (
            "wrong_arguments_are_named_in_words",
            wrong_arguments_are_named_in_words,
        ),
        (
            "without_root_own_processes_are_watched_and_the_rest_is_said",
            unprivileged::without_root_own_processes_are_watched_and_the_rest_is_said,
        ),
    ];
    let filter = arguments.get(1).filter(|a| !a.starts_with('-'));
    let (mut failed, mut ran) = (0, 0);
    for (name, check) in checks {
        if filter.is_some_and(|f| !name.contains(f.as_str())) {
            continue;
        }
        let began = Instant::now();
        let result = check();
        ran += 1;
        let took = began.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("test {name} ... ok ({took:.1} s)"),
            Err(Fault::Skip(why)) => println!("test {name} ... SKIPPED: {why}"),
            Err(Fault::Wrong(what)) => {
                failed += 1;
                println!("test {name} ... FAILED ({took:.1} s): {what}");
            }
        }
    }
    println!(
        "test result: {}. {ran} ran, {failed} failed",
        if failed == 0 { "ok" } else { "FAILED" }
    );
    ExitCode::from(u8::from(failed > 0))
}
