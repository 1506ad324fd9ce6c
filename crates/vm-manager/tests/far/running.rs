//! `varve vm far`: a running program gets another limit, gives everything back, and finds every byte.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{READER_MIB, err, resident_mib, status, vm};

/// How long a state may take to come about on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run of this program, ended when dropped.
pub struct Run {
    pub pager: Child,
    out: BufReader<std::process::ChildStdout>,
    pub pid: i32,
    _temp: tempfile::TempDir,
}

impl Run {
    /// Starts `program` with these arguments before it. Its first line is its pid.
    pub fn start(arguments: &[&str], program: &[&str]) -> Self {
        let me = std::env::current_exe().expect("the path of this program");
        let temp = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(&me);
        command
            .args(["--vm", "run", "--quiet", "--json"])
            .args(arguments)
            .arg("--")
            .arg(&me)
            .args(program)
            .env("TMPDIR", temp.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut pager = command.spawn().expect("it starts");
        let mut out = BufReader::new(pager.stdout.take().expect("its output"));
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        let Ok(pid) = line.trim().parse() else {
            let mut told = String::new();
            let _ = pager.stderr.take().expect("it").read_to_string(&mut told);
            panic!("no pid: {line}{told}");
        };
        Self {
            pager,
            out,
            pid,
            _temp: temp,
        }
    }

    pub fn kill_program(&self) {
        let pid = rustix::process::Pid::from_raw(self.pid).expect("a pid");
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }

    /// Ends the program. Gives what it said and what the pager told.
    pub fn finish(mut self) -> (String, Value) {
        self.kill_program();
        let (mut said, mut told) = (String::new(), String::new());
        self.out.read_to_string(&mut said).expect("its output");
        let mut pipe = self.pager.stderr.take().expect("its messages");
        pipe.read_to_string(&mut told).expect("its messages");
        self.pager.wait().expect("it ends");
        (said, status(&told))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Its program ends with it.
        let _ = self.pager.kill();
        let _ = self.pager.wait();
    }
}

/// Waits until `is_so`.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// `varve vm far` with these arguments, which succeeds. Gives its state.
pub fn far(arguments: &[&str]) -> Value {
    let output = vm(&[&["far", "--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", err(&output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn control_file(pager: &Child) -> PathBuf {
    PathBuf::from(format!("/run/varve-vm/{}.far", pager.id()))
}

/// The limit of a running program is changed by the pid of the program and of the pager.
pub fn changed() {
    let address = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let address = address.expect("a free port").to_string();
    let policy = tempfile::NamedTempFile::new().expect("a file");
    let prices = "[far.price]\ndram = 4096.0\n[far.price.tier]\n\"/dev/shm\" = 1024.0\n";
    std::fs::write(policy.path(), prices).expect("it can be written");
    let policy = policy.path().to_string_lossy();
    let run = Run::start(
        &[
            "--policy",
            &policy,
            "--metrics",
            &address,
            "--local",
            "9M",
            "--far",
            "/dev/shm=256M",
        ],
        &["--reader"],
    );
    let (pid, pager) = (run.pid.to_string(), run.pager.id().to_string());
    let low = READER_MIB / 2;
    until("its memory leaves", || resident_mib(run.pid) < low);

    shown(&run, &address);

    let now = far(&[&pid, "--local", "40M"]);
    assert_eq!(now["local"], "40M", "{now}");
    until("a larger limit is used", || resident_mib(run.pid) > 32);

    let now = far(&[&pager, "--drain"]);
    assert_eq!(
        (&now["far_pages"], &now["local"]),
        (&0.into(), &"all".into()),
        "{now}"
    );
    assert!(
        now["drain"]["is_done"] == true && now["drain"]["stay"] == 0,
        "{now}"
    );
    let all = resident_mib(run.pid);
    assert!(all >= READER_MIB, "all is local: {all} MiB");
    let evicted = far(&[&pid])["evicted"].clone();
    std::thread::sleep(Duration::from_millis(800));
    let later = far(&[&pid]);
    assert_eq!(later["evicted"], evicted, "nothing leaves after a drain");
    assert!(resident_mib(run.pid) >= READER_MIB);
    let slabs = later["tiers"].as_array().expect("tiers");
    let slabs: u64 = slabs.iter().filter_map(|tier| tier["slabs"].as_u64()).sum();
    assert_eq!(slabs, 0, "no slab is kept: {later}");

    far(&[&pager, "--local", "20%"]);
    until("its memory leaves again", || resident_mib(run.pid) < low);
    refused(&run);
    let control = control_file(&run.pager);
    assert!(control.exists());
    let (said, last) = run.finish();
    assert_eq!(said, "", "it found every byte");
    assert_eq!(last["poisoned"], 0, "{last}");
    assert!(!control.exists(), "the socket goes with the run");
    println!("far: limits of a running program: {last}");
}

/// What `status`, `heat` and the metrics say of a run.
fn shown(run: &Run, address: &str) {
    let all = |arguments: &[&str]| String::from_utf8_lossy(&vm(arguments).stdout).into_owned();
    let pid = run.pid.to_string();
    let mut said = String::new();
    until("the state is written", || {
        said = all(&["status"]);
        said.contains(&format!("pager {} ", run.pager.id())) && said.contains("of the last second")
    });
    for part in [
        "far memory, local 9M",
        "at most 9 MiB",
        "/dev/shm",
        "aside",
        "saved",
        "median",
        &pid,
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    let mut maps = Value::Null;
    until("heat is seen", || {
        maps = serde_json::from_str(&all(&["heat", "--json", "--pid", &pid])).unwrap_or_default();
        let cells = maps[0]["columns"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|column| column.as_array());
        cells.flatten().any(|heat| heat.as_u64() > Some(0))
    });
    assert_eq!(maps[0]["pid"], run.pid, "{maps}");
    assert!(all(&["heat", "--pid", &pid]).contains("hot"), "it is drawn");

    let mut stream = TcpStream::connect(address).expect("metrics are served");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\n\r\n")
        .expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let value = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let number = line.and_then(|number| number.trim().parse::<f64>().ok());
        number.unwrap_or_else(|| panic!("no {name} in {text}"))
    };
    let shm = value("varve_vm_far_pages{place=\"/dev/shm\"}")
        + value("varve_vm_far_pages{place=\"compressed DRAM\"}");
    assert!(shm > 2_000.0, "{text}");
    assert!(value("varve_vm_far_faults{source=\"/dev/shm\"}") > 0.0, "{text}");
    assert!(
        value("varve_vm_far_fault_seconds{source=\"/dev/shm\",quantile=\"0.5\"}") > 0.0,
        "{text}"
    );
    assert!(
        value("varve_vm_far_stall_share{}") > 0.0,
        "a reader of all waits: {text}"
    );
    // All of it at 4 a MiB; less than nothing where slabs keep copies of pages that have come back.
    let saved = value("varve_vm_far_saved{}");
    assert!(
        saved.is_finite() && saved < 4.0 * READER_MIB as f64,
        "{saved}: {text}"
    );
}

/// Each in a sentence that says what to do.
fn refused(run: &Run) {
    let pid = run.pid.to_string();
    let other = std::os::unix::process::CommandExt::uid(&mut Command::new("sleep"), 65534)
        .arg("100")
        .spawn();
    let mut other = other.expect("another user's process");
    let (mine, theirs) = (std::process::id().to_string(), other.id().to_string());
    for (arguments, says) in [
        (vec!["far", "999999999", "--drain"], "there is no process"),
        (vec!["far", &mine, "--drain"], "start it with `varve vm run"),
        (vec!["far", &theirs, "--drain"], "belongs to another user (65534)"),
        (vec!["far", &pid, "--local", "9999T"], "MiB of memory"),
        (vec!["far", &pid, "--local", "1K"], "too little"),
        (
            vec!["far", &pid, "--local", "9M", "--drain"],
            "cannot be used with",
        ),
    ] {
        let output = vm(&arguments);
        let told = err(&output);
        assert!(
            !output.status.success() && told.contains(says),
            "{arguments:?}: {told}"
        );
    }
    other.kill().and_then(|()| other.wait()).expect("it ends");
}

/// Limits and drains change all the time while a program that knows all its bytes forks, moves and drops.
pub fn drained_all_the_time(seconds: &str) {
    let run = Run::start(
        &["--local", "9M", "--far", "/dev/shm=512M"],
        &["--torture-with-pid", seconds, "64", "2"],
    );
    let pager = run.pager.id().to_string();
    let (mut drains, mut came_back) = (0, 0);
    for round in 0.. {
        let limit = ["8M", "9M", "40%", "16M"][round % 4];
        let output = vm(&["far", &pager, "--local", limit]);
        if !output.status.success() {
            assert!(
                err(&output).contains("no process") || err(&output).contains("in no run"),
                "{}",
                err(&output)
            );
            break;
        }
        std::thread::sleep(Duration::from_millis(300));
        let output = vm(&["far", &pager, "--drain", "--json"]);
        if !output.status.success() {
            let told = err(&output);
            assert!(
                told.contains("no process") || told.contains("ended") || told.contains("in no run"),
                "{told}"
            );
            break;
        }
        let now: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(now["drain"]["is_done"], true, "{now}");
        drains += 1;
        came_back += now["drain"]["came_back"].as_u64().unwrap_or(0);
    }
    assert!(
        drains > 1 && came_back > 1_000,
        "{drains} drains brought {came_back} pages back"
    );
    let mut run = run;
    let end = run.pager.wait().expect("it ends");
    assert!(end.success(), "the program found every byte: {end}");
    println!("far: drained all the time: {drains} drains, {came_back} pages came back");
}

/// The socket of a pager that was killed is not in the way.
pub fn socket_of_a_killed_pager() {
    let mut run = Run::start(&["--local", "9M", "--far", "/dev/shm=256M"], &["--reader"]);
    let control = control_file(&run.pager);
    until("it listens", || control.exists());
    run.pager
        .kill()
        .and_then(|()| run.pager.wait().map(drop))
        .expect("it is killed");
    run.kill_program();
    assert!(control.exists(), "nobody removed it");
    let output = vm(&["far", &std::process::id().to_string(), "--drain"]);
    assert!(
        !output.status.success() && err(&output).contains("in no run"),
        "{}",
        err(&output)
    );
    assert!(!control.exists(), "the next command does");
}

/// With `stall=5%` memory that nobody uses leaves, memory in use stays, and the program waits little. When it
/// begins to use all, it gets all.
pub fn found_from_stall() {
    let run = Run::start(
        &["--local", "stall=5%", "--far", "/dev/shm=256M"],
        &["--part-reader"],
    );
    let pid = run.pid.to_string();
    until("what nobody uses leaves", || resident_mib(run.pid) < 40);
    let mut stalls = Vec::new();
    let mut least = u64::MAX;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(500));
        let now = far(&[&pid]);
        assert_eq!(now["local"], "stall=5%", "{now}");
        stalls.push(now["stall_share"].as_f64().expect("a share"));
        least = least.min(resident_mib(run.pid));
    }
    let mean = stalls.iter().sum::<f64>() / stalls.len() as f64;
    println!(
        "far: stall=5%: at least {least} MiB of 64 local, mean stall {:.2} %",
        mean * 100.0
    );
    assert!(least >= 8, "the 8 MiB in use stay: {least} MiB");
    assert!(mean < 0.25, "it waits a little: {stalls:?}");
    // The signal has it read all.
    let program = rustix::process::Pid::from_raw(run.pid).expect("a pid");
    rustix::process::kill_process(program, rustix::process::Signal::USR1).expect("it runs");
    until("what is in use now comes back", || resident_mib(run.pid) > 56);
    let (said, _) = run.finish();
    assert_eq!(said, "", "it found every byte");
}
