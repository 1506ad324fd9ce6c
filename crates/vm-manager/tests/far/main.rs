//! Far memory on the kernel that runs this: a program that knows all its bytes at 10 % local, and what is
//! refused.
//!
//! Needs root, Linux 6.8 and `/dev/userfaultfd`; is skipped loudly elsewhere. Longer:
//! `VARVE_FAR_SECONDS=600`.

mod running;
mod torture;

use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

use clap::Parser;
use serde_json::Value;
use varve_vm_manager::cli::VmCommand;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: VmCommand,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["--vm", ..] => {
            let command = Cli::parse_from(std::env::args_os().skip(1)).command;
            varve_vm_manager::cli::run(command).unwrap_or_else(|error| {
                eprintln!("varve vm: {error:#}");
                ExitCode::FAILURE
            })
        }
        ["--torture", seconds, mib, threads] => {
            let number = |text: &str| text.parse::<f64>().expect("a number");
            torture::run(number(seconds), number(mib) as usize, number(threads) as usize);
            ExitCode::SUCCESS
        }
        ["--torture-with-pid", seconds, mib, threads] => {
            println!("{}", std::process::id());
            let number = |text: &str| text.parse::<f64>().expect("a number");
            torture::run(number(seconds), number(mib) as usize, number(threads) as usize);
            ExitCode::SUCCESS
        }
        ["--small"] => {
            torture::small();
            ExitCode::SUCCESS
        }
        ["--orphan"] => {
            torture::orphan(1.0, 48);
            ExitCode::SUCCESS
        }
        ["--racer", seconds] => {
            torture::racer(seconds.parse().expect("a number"));
            ExitCode::SUCCESS
        }
        ["--part-reader"] => {
            torture::part_reader();
            ExitCode::SUCCESS
        }
        ["--reader"] => {
            torture::reader(READER_MIB as usize);
            ExitCode::SUCCESS
        }
        _ => checks(),
    }
}

/// The command line under test, with this program in place of `PROGRAM`.
fn vm(arguments: &[&str]) -> Output {
    let me = std::env::current_exe().expect("the path of this program");
    let arguments = arguments.iter().map(|argument| {
        if *argument == "PROGRAM" {
            me.as_os_str().to_owned()
        } else {
            (*argument).into()
        }
    });
    let mut command = Command::new(&me);
    command.arg("--vm").args(arguments).stdin(Stdio::null());
    // Where the run puts its files, so that what it leaves is found.
    let temp = tempfile::tempdir().expect("a directory");
    let output = command.env("TMPDIR", temp.path()).output().expect("it starts");
    let left: Vec<_> = std::fs::read_dir(temp.path())
        .expect("it is there")
        .flatten()
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    output
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn checks() -> ExitCode {
    let only = std::env::var("VARVE_FAR_ONLY").ok();
    refusals();
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/userfaultfd").exists() {
        eprintln!("far: SKIPPED: needs root and /dev/userfaultfd (Linux 6.8)");
        return ExitCode::SUCCESS;
    }
    if only.as_deref() == Some("raced") {
        raced("6");
        return ExitCode::SUCCESS;
    }
    if only.as_deref() == Some("running") {
        running::changed();
        running::socket_of_a_killed_pager();
        running::found_from_stall();
        return ExitCode::SUCCESS;
    }
    let seconds = std::env::var("VARVE_FAR_SECONDS").unwrap_or_else(|_| "6".into());
    truth(
        &["--far", "/dev/shm=512M"],
        &seconds,
        "compressed memory and a file in memory",
    );
    let policy = uncompressed(512, "");
    truth(
        &["--policy", &policy.path().to_string_lossy()],
        &seconds,
        "a file alone",
    );
    let policy = uncompressed(512, "readers = 4\nread_apart_us = 0\n");
    let last = truth(
        &["--policy", &policy.path().to_string_lossy()],
        &seconds,
        "a file read by threads of its own",
    );
    assert!(
        last["reads_at_once"].as_u64() > Some(1),
        "several faults at a time: {last}"
    );
    on_disk(&seconds);
    raced(&seconds);
    full(&seconds);
    orphan();
    killed_pager();
    running::changed();
    running::drained_all_the_time(&seconds);
    running::socket_of_a_killed_pager();
    running::found_from_stall();
    println!("far: all is well");
    ExitCode::SUCCESS
}

/// A policy that compresses nothing, with this much space in a file. It is removed when it goes.
fn uncompressed(limit_mib: u32, more: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = format!(
        "[far]\ncompressed_share = 0\n{more}[[far.tier]]\ndir = \"/dev/shm\"\nlimit_mib = {limit_mib}\n"
    );
    std::fs::write(file.path(), text).expect("a policy can be written");
    file
}

/// The program at 10 % of its memory. It must find every byte, and far memory must have been used.
fn truth(far: &[&str], seconds: &str, what: &str) -> Value {
    let mut arguments = vec!["run", "--json", "--quiet", "--local", "9M"];
    arguments.extend(far);
    arguments.extend(["--", "PROGRAM", "--torture", seconds, "96", "3"]);
    let output = vm(&arguments);
    let (said, told) = (String::from_utf8_lossy(&output.stdout).into_owned(), err(&output));
    assert!(output.status.success(), "{what}: {} {said}{told}", output.status);
    let last = told
        .lines()
        .rfind(|line| line.starts_with('{'))
        .unwrap_or_else(|| panic!("{what}: {told}"));
    let status: Value = serde_json::from_str(last).expect("JSON");
    println!("far: {what}: {}{last}", said);
    let of = |name: &str| status[name].as_u64().unwrap_or(0);
    assert!(of("evicted") > 2_000, "{what}: far memory was used");
    assert!(
        of("forks") > 0 && of("joined") > 1,
        "{what}: it forked, and children joined"
    );
    assert_eq!(of("poisoned"), 0, "{what}: nothing was lost");
    assert!(
        status["aside_faults"]["count"].as_u64() > Some(0),
        "{what}: pages came back without I/O"
    );
    let done: Value = serde_json::from_str(said.lines().last().unwrap_or_default()).expect("JSON");
    for name in ["drops", "moves", "unmaps", "guards", "locks", "pipes", "forks"] {
        assert!(done[name].as_u64() > Some(0), "{what}: {name} were made: {done}");
    }
    status
}

/// A directory on a disk, if there is one: read by threads of its own, and ahead.
fn on_disk(seconds: &str) {
    let far = ["--far", "/var/tmp=512M"];
    let last = truth(&far, seconds, "compressed memory and /var/tmp");
    let tier = last["tiers"]
        .as_array()
        .and_then(|tiers| tiers.last().cloned())
        .expect("a tier");
    if tier["read_ns"].as_u64() < Some(20_000) {
        eprintln!("far: SKIPPED: reads of a slow disk: /var/tmp takes less than 20 us");
        return;
    }
    assert!(
        last["reads_at_once"].as_u64() > Some(1),
        "several at a time: {last}"
    );
    assert!(
        last["ahead"][1].as_u64() > Some(0),
        "pages read ahead are used: {last}"
    );
}

/// Pages are given up while they are read from a slab for another thread.
fn raced(seconds: &str) {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text =
        "[far]\ncompressed_share = 0\nread_apart_us = 0\n[[far.tier]]\ndir = \"/var/tmp\"\nlimit_mib = 512\n";
    std::fs::write(file.path(), text).expect("a policy can be written");
    let policy = file.path().to_string_lossy();
    let run = ["run", "--json", "--quiet", "--policy", &policy, "--local", "9M"];
    let output = vm(&[&run[..], &["--", "PROGRAM", "--racer", seconds]].concat());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("nothing came back"),
        "raced: {said}{}",
        err(&output)
    );
    let status = status(&err(&output));
    assert!(status["reads_at_once"].as_u64() > Some(1), "{status}");
}

/// Far space for a few pages: the program stays above its limit, and finds every byte.
fn full(seconds: &str) {
    let file = uncompressed(4, "");
    let policy = file.path().to_string_lossy();
    let run = ["run", "--json", "--quiet", "--policy", &policy, "--local", "9M"];
    let output = vm(&[&run[..], &["--", "PROGRAM", "--torture", seconds, "48", "2"]].concat());
    assert!(
        output.status.success(),
        "full: {} {}",
        output.status,
        err(&output)
    );
    let status = status(&err(&output));
    assert!(status["turned_back"].as_u64() > Some(0), "it was full: {status}");
    assert!(status["evicted"].as_u64() > Some(0), "and was used: {status}");
}

/// What `--json` printed.
fn status(told: &str) -> Value {
    let last = told.lines().rfind(|line| line.starts_with('{'));
    serde_json::from_str(last.unwrap_or_else(|| panic!("no JSON: {told}"))).expect("JSON")
}

/// A child outlives its parent, and has all its memory, of which more leaves.
fn orphan() {
    let output = vm(&[
        "run",
        "--json",
        "--quiet",
        "--local",
        "9M",
        "--far",
        "/dev/shm=256M",
        "--",
        "PROGRAM",
        "--orphan",
    ]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("found all"),
        "orphan: {} {said}{}",
        output.status,
        err(&output)
    );
    let status = status(&err(&output));
    assert!(status["forks"] == 2 && status["joined"] == 3, "{status}");
    assert!(
        status["evicted"].as_u64() > Some(2_000),
        "the child's memory leaves too: {status}"
    );
}

/// Memory of the reader.
const READER_MIB: u64 = 48;

/// Resident memory of a process, in MiB.
fn resident_mib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

/// The pager is killed: the program ends, and never reads zeros.
fn killed_pager() {
    use std::io::{BufRead, Read};
    let me = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new(&me);
    command.args([
        "--vm",
        "run",
        "--quiet",
        "--local",
        "9M",
        "--far",
        "/dev/shm=256M",
        "--",
    ]);
    command
        .arg(&me)
        .arg("--reader")
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let temp = tempfile::tempdir().expect("a directory");
    command.env("TMPDIR", temp.path());
    let mut pager = command.spawn().expect("it starts");
    let mut line = String::new();
    let out = pager.stdout.take().expect("its output");
    let mut out = std::io::BufReader::new(out);
    out.read_line(&mut line).expect("a line");
    let pid: i32 = line.trim().parse().expect("a pid");
    let program = rustix::process::Pid::from_raw(pid).expect("a pid");
    let handle = rustix::process::pidfd_open(program, rustix::process::PidfdFlags::empty()).expect("it runs");
    // Until much of its memory has left: a program that was not joined yet goes on without its pager.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while resident_mib(pid) > READER_MIB / 2 {
        assert!(std::time::Instant::now() < until, "its memory never leaves");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    pager.kill().expect("the pager can be killed");
    pager.wait().expect("it ends");
    let mut fds = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
    let time = rustix::event::Timespec {
        tv_sec: 60,
        tv_nsec: 0,
    };
    let ended = rustix::event::poll(&mut fds, Some(&time)).expect("it can be waited for");
    if ended == 0 {
        let _ = rustix::process::kill_process(program, rustix::process::Signal::KILL);
    }
    assert_eq!(ended, 1, "the program ended with its pager");
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("its output");
    assert_eq!(rest, "", "and read nothing wrong before");
}

/// Each in a sentence, before the program starts.
fn refusals() {
    for (arguments, says) in [
        (["run", "--local", "0", "--", "true"], "too little"),
        (["run", "--local", "none", "--", "true"], "not a size"),
        (["run", "--local", "200%", "--", "true"], "between 1% and 100%"),
        (
            ["run", "--local", "9999T", "--", "true"],
            "memory: nothing would ever leave",
        ),
    ] {
        let output = vm(&arguments);
        assert!(
            !output.status.success() && err(&output).contains(says),
            "{arguments:?}: {}",
            err(&output)
        );
    }
    // A program header that is no interpreter's: a static program.
    let mut elf = vec![0u8; 64 + 56];
    elf[..4].copy_from_slice(b"\x7fELF");
    (elf[4], elf[18], elf[32], elf[54], elf[56], elf[64]) = (2, 62, 64, 56, 1, 1);
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), elf).expect("it can be written");
    let output = vm(&["run", "--local", "64M", "--", &file.path().to_string_lossy()]);
    let says = err(&output);
    assert!(
        !output.status.success() && says.contains("statically linked"),
        "{says}"
    );
}
