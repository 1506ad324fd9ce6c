//! The command line without a mount: help, messages, exit codes, JSON.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LiveDirs, alive, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Output};

const SMALL: [&str; 6] = ["--nvm", "16M", "--ssd", "16M", "--hdd", "0"];

/// A daemon that ends with the test.
struct Serve(Child);

impl Serve {
    fn start(pool: &Path) -> Self {
        let mut child = varve()
            .arg("serve")
            .arg(pool)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        wait_until("the daemon", || {
            assert!(child.try_wait().unwrap().is_none(), "the daemon ended");
            std::os::unix::net::UnixStream::connect(pool.join("sock")).is_ok()
        });
        Self(child)
    }

    fn stop(mut self) -> bool {
        let pid = rustix::process::Pid::from_raw(self.0.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.0.wait().unwrap().success()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mkfs(dir: &Path) {
    run_ok(varve().arg("mkfs").arg(dir).args(SMALL));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Exit code and message of a command that must fail.
fn refused(words: &[&str], pool: &Path) -> (i32, String) {
    let output = varve().args(words).arg(pool).output().unwrap();
    let text = said(&output);
    assert!(!output.status.success(), "{words:?} went well");
    assert!(!text.contains("panicked"), "{text}");
    (output.status.code().unwrap(), text)
}

#[test]
fn help_teaches_every_command() {
    let top = text_of(varve().arg("--help"));
    assert!(top.contains("Exit codes"), "{top}");
    for command in [
        "up", "down", "mkfs", "serve", "mount", "umount", "status", "top", "metrics", "digest", "sync",
        "fsck", "scrub", "debug", "bench", "run", "vm", "destroy", "cache",
    ] {
        assert!(top.contains(command), "{command} is listed");
        let help = text_of(varve().args([command, "--help"]));
        assert!(help.contains("Usage:") && help.lines().count() > 5, "{help}");
    }
    for what in ["model", "mkstore", "status", "put", "get", "purge", "check"] {
        let help = text_of(varve().args(["cache", what, "--help"]));
        assert!(help.contains("Usage:") && help.lines().count() > 10, "{help}");
    }
    for what in ["super", "log", "session", "inode", "dir", "tree"] {
        assert!(text_of(varve().args(["debug", what, "--help"])).contains("Usage:"));
    }
}

/// A pipe that nobody reads.
fn closed_pipe() -> std::process::Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn commands_end_quietly_when_their_reader_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    mkfs(&pool);
    let pool = pool.to_str().unwrap();
    for words in [
        &["vm", "policy"][..],
        &["vm", "probe"],
        &["vm", "probe", "--json"],
        &["vm", "status", "--json"],
        &["vm", "heat", "--json"],
        &["fsck", pool],
        &["fsck", "--json", pool],
        &["debug", "super", pool],
        &["down", pool],
        &["--help"],
    ] {
        ends_the_same_without_readers(words);
    }
}

/// The command ends with the same status whoever of its readers has gone.
fn ends_the_same_without_readers(words: &[&str]) {
    let right = varve().args(words).output().unwrap().status.code();
    let output = varve().args(words).stdout(closed_pipe()).output().unwrap();
    let text = said(&output);
    assert!(!text.contains("panicked"), "{words:?}: {text}");
    assert_eq!(output.status.code(), right, "{words:?}, no reader of its output");
    let status = varve().args(words).stderr(closed_pipe()).output().unwrap().status;
    assert_eq!(status.code(), right, "{words:?}, no reader of its messages");
    let both = varve()
        .args(words)
        .stdout(closed_pipe())
        .stderr(closed_pipe())
        .status();
    assert_eq!(both.unwrap().code(), right, "{words:?}, no reader at all");
}

#[test]
fn commands_that_fail_end_quietly_when_the_reader_of_their_messages_has_gone() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    mkfs(&pool);
    let pool = pool.to_str().unwrap();
    let nowhere = dir.path().join("nowhere");
    let nowhere = nowhere.to_str().unwrap();
    for words in [
        &["status", pool][..],
        &["status", "--json", pool],
        &["digest", pool],
        &["sync", pool],
        &["scrub", pool],
        &["metrics", pool],
        &["top", "--once", pool],
        &["bench", pool],
        &["mount", pool, nowhere],
        &["umount", nowhere],
        &["down", nowhere],
        &["fsck", nowhere],
        &["debug", "inode", pool, "99"],
        &["mkfs", pool],
        &["mkfs", nowhere, "--nvm", "lots"],
        &["up", nowhere, "--nvm", "lots"],
        &["run", "--pool", nowhere, "true"],
        &["vm", "heat"],
        &["vm", "policy", nowhere],
        &["--log", "x=nonsense", "status", pool],
        &["no-such-command"],
        &[],
    ] {
        ends_the_same_without_readers(words);
    }
}

#[test]
fn daemon_goes_on_when_the_reader_of_its_log_has_gone() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    mkfs(&dir);
    let mut serve = varve();
    let logged = serve.env("VARVE_LOG", "trace").arg("serve").arg(&dir);
    let child = logged
        .stdout(closed_pipe())
        .stderr(closed_pipe())
        .spawn()
        .unwrap();
    let serve = Serve(child);
    wait_until("the daemon", || {
        std::os::unix::net::UnixStream::connect(dir.join("sock")).is_ok()
    });
    assert!(text_of(varve().arg("fsck").arg(&dir)).contains("clean"));
    let _: Value = serde_json::from_str(&text_of(varve().args(["digest", "--json"]).arg(&dir))).unwrap();
    assert!(serve.stop());
}

#[test]
fn command_line_that_is_wrong_ends_with_2() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    for (option, value, said_part) in [
        ("--nvm", "lots", "not a size"),
        ("--nvm", "1K", "too small"),
        ("--nvm", "/dev/pmem0", "dax:/dev/dax"),
        ("--ssd", "-4G", "not a size"),
        ("--hdd", "3", "too small"),
    ] {
        let output = varve()
            .arg("mkfs")
            .arg(&dir)
            .arg(format!("{option}={value}"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        assert!(said(&output).contains(said_part), "{}", said(&output));
        assert!(!dir.exists());
    }
    assert_eq!(varve().arg("sing").output().unwrap().status.code(), Some(2));
    assert_eq!(varve().output().unwrap().status.code(), Some(2));
    let output = varve().args(["--log", "a=b=c", "status", "."]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn pool_that_is_not_there_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let gone = temp.path().join("gone");
    for words in [
        &["status"][..],
        &["digest"],
        &["fsck"],
        &["scrub"],
        &["serve"],
        &["down"],
        &["debug", "super"],
        &["bench"],
    ] {
        let (code, text) = refused(words, &gone);
        assert_eq!(code, if words == &["fsck"][..] { 8 } else { 1 }, "{words:?}");
        assert!(text.contains("gone") && text.contains("no such pool"), "{text}");
        let (_, text) = refused(words, temp.path());
        assert!(text.contains("varve mkfs"), "{text}");
    }
    let output = varve()
        .arg("mkfs")
        .arg(temp.path().join("no/parent"))
        .args(SMALL)
        .output()
        .unwrap();
    assert!(said(&output).contains("no/parent"), "{}", said(&output));
    let (_, text) = refused(&["umount"], temp.path());
    assert!(text.contains("not a mount"), "{text}");
}

#[test]
fn mkfs_makes_a_pool_once() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    let made = text_of(varve().args(["mkfs", "--json"]).arg(&dir).args(SMALL));
    let made: Value = serde_json::from_str(&made).unwrap();
    assert_eq!(made["nvm"]["bytes"], 16 << 20);
    assert_eq!(made["nvm"]["memory_only"], false);
    let (code, text) = refused(&["mkfs"], &dir);
    assert_eq!(code, 1);
    assert!(text.contains("holds a pool already"), "{text}");
    assert!(text_of(varve().arg("fsck").arg(&dir)).contains("clean"));
}

#[test]
fn stopped_pool_is_looked_at_without_a_change() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    mkfs(&dir);
    let before: Vec<_> = ["nvm.img", "journal.img"]
        .map(|name| std::fs::read(dir.join(name)).unwrap())
        .into();
    let json = |words: &[&str], rest: &[&str]| -> Value {
        let text = text_of(varve().args(words).arg("--json").arg(&dir).args(rest));
        serde_json::from_str(&text).unwrap()
    };
    assert_eq!(json(&["fsck"], &[])["clean"], true);
    assert_eq!(json(&["scrub"], &[])["count"], 0);
    assert_eq!(
        json(&["debug", "super"], &[])["copies"].as_array().unwrap().len(),
        2
    );
    assert_eq!(json(&["debug", "log"], &[])["logs"].as_array().unwrap().len(), 0);
    assert_eq!(json(&["debug", "inode"], &["1"])["attr"]["key"]["ino"], 1);
    assert_eq!(
        json(&["debug", "dir"], &["1"])["entries"]
            .as_array()
            .unwrap()
            .len(),
        0
    );
    for (what, rest) in [
        ("super", None),
        ("log", None),
        ("inode", Some("1")),
        ("dir", Some("1")),
    ] {
        assert!(!text_of(varve().args(["debug", what]).arg(&dir).args(rest)).is_empty() || what == "dir");
    }
    let output = varve()
        .args(["debug", "inode"])
        .arg(&dir)
        .arg("999999")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let output = varve()
        .args(["debug", "tree"])
        .arg(&dir)
        .arg("1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(said(&output).contains("is not a"), "{}", said(&output));
    let after: Vec<_> = ["nvm.img", "journal.img"]
        .map(|name| std::fs::read(dir.join(name)).unwrap())
        .into();
    assert!(before == after, "looking changed the pool");
}

#[test]
fn fsck_finds_and_mends_when_the_pool_is_damaged() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    mkfs(&dir);
    // The first block of the session table.
    let text = text_of(varve().args(["debug", "super", "--json"]).arg(&dir));
    let fields: Value = serde_json::from_str(&text).unwrap();
    let block = fields["copies"][0]["sessions"][0].as_u64().unwrap();
    let nvm = std::fs::File::options()
        .write(true)
        .open(dir.join("nvm.img"))
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&nvm, &[0xff; 64], block * 4096).unwrap();
    let output = varve().args(["fsck", "--json"]).arg(&dir).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["clean"], false);
    assert!(report["findings"][0]["text"].as_str().unwrap().contains("block"));
    let before = std::fs::read(dir.join("nvm.img")).unwrap();
    let output = varve().args(["fsck", "--dry-run"]).arg(&dir).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", said(&output));
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("would mend"),
        "{}",
        said(&output)
    );
    assert!(
        std::fs::read(dir.join("nvm.img")).unwrap() == before,
        "a dry run changed the pool"
    );
    let output = varve()
        .args(["fsck", "--repair", "--json"])
        .arg(&dir)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["left"], Value::Array(Vec::new()));
    assert!(
        report["mended"][0].as_str().unwrap().contains("SessionTable"),
        "{report}"
    );
    assert!(
        report["lost"][0]["what"]
            .as_str()
            .unwrap()
            .contains("session rows"),
        "{report}"
    );
    let output = varve().args(["fsck", "--repair"]).arg(&dir).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(Serve::start(&dir).stop());
    let output = varve().args(["fsck", "/nonexistent"]).output().unwrap();
    assert_eq!(output.status.code(), Some(8), "{}", said(&output));
}

#[test]
fn newer_format_is_refused_with_what_to_do() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    mkfs(&dir);
    let toml = std::fs::read_to_string(dir.join("varve.toml")).unwrap();
    std::fs::write(dir.join("varve.toml"), toml.replace("version = 1", "version = 9")).unwrap();
    for words in [&["serve"][..], &["fsck"], &["status"]] {
        let (code, text) = refused(words, &dir);
        assert_eq!(code, if words == &["fsck"][..] { 8 } else { 1 });
        assert!(text.contains("use a newer varve"), "{text}");
    }
    std::fs::write(
        dir.join("varve.toml"),
        toml.replace("[daemon]", "[daemon]\ncolour = 3"),
    )
    .unwrap();
    let (_, text) = refused(&["serve"], &dir);
    assert!(text.contains("colour"), "{text}");
}

#[test]
fn commands_end_with_4_when_no_daemon_serves_the_pool() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    mkfs(&dir);
    for words in [&["status"][..], &["status", "--json"], &["digest"], &["bench"]] {
        let (code, text) = refused(words, &dir);
        assert_eq!(code, 4, "{text}");
        assert!(text.contains("varve up"), "{text}");
    }
}

#[test]
fn daemon_answers_and_ends_in_order() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let _live = LiveDirs::of(&dir);
    mkfs(&dir);
    let serve = Serve::start(&dir);
    let (code, text) = refused(&["serve"], &dir);
    assert_eq!(code, 1);
    assert!(text.contains(&format!("pid {}", serve.0.id())), "{text}");
    let (_, text) = refused(&["debug", "super"], &dir);
    assert!(text.contains("varve down"), "{text}");
    let (_, text) = refused(&["fsck", "--repair"], &dir);
    assert!(text.contains("stop it first"), "{text}");
    let by_file = text_of(varve().args(["status", "--json"]).arg(dir.join("varve.toml")));
    let status: Value = serde_json::from_str(&by_file).unwrap();
    assert_eq!(status["pid"], serve.0.id());
    assert_eq!(status["tiers"].as_array().unwrap().len(), 2);
    assert!(status["host"]["directory"].is_string());
    let table = text_of(varve().arg("status").arg(&dir));
    assert!(
        table.contains("nvm") && table.contains("ssd") && !table.contains('\u{1b}'),
        "{table}"
    );
    let _: Value = serde_json::from_str(&text_of(varve().args(["digest", "--json"]).arg(&dir))).unwrap();
    assert!(text_of(varve().arg("fsck").arg(&dir)).contains("clean"));
    assert!(text_of(varve().arg("scrub").arg(&dir)).contains("checksum"));
    let pid = serve.0.id();
    assert!(serve.stop());
    assert!(!alive(pid));
    assert_eq!(refused(&["status"], &dir).0, 4);
    assert!(text_of(varve().arg("fsck").arg(&dir)).contains("clean"));
}

#[test]
fn memory_only_pool_says_what_to_do_when_its_memory_is_gone() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    let live = LiveDirs::of(&dir);
    run_ok(
        varve()
            .arg("mkfs")
            .arg(&dir)
            .args(["--nvm", "shm:16M", "--ssd", "0", "--hdd", "0"]),
    );
    assert!(Serve::start(&dir).stop());
    drop(live);
    let _live = LiveDirs::of(&dir);
    for words in [&["serve"][..], &["fsck"]] {
        let (code, text) = refused(words, &dir);
        assert_eq!(code, if words == &["fsck"][..] { 8 } else { 1 });
        assert!(text.contains("--recreate") && text.contains("memory"), "{text}");
    }
}

#[test]
fn run_says_what_is_missing_where_no_pool_is_mounted() {
    let dir = tempfile::tempdir().unwrap();
    let output = varve()
        .args(["run", "--session-after", "0", "--mount"])
        .arg(dir.path())
        .args(["ls", "-l"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("varve mount POOL"), "{}", said(&output));
}

#[test]
fn pool_is_destroyed_when_nobody_serves_it_and_it_is_meant() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("p");
    let _live = LiveDirs::of(&pool);
    mkfs(&pool);
    let daemon = Serve::start(&pool);
    let (code, text) = refused(&["destroy", "--yes"], &pool);
    assert!(code == 1 && text.contains("varve down"), "{code}: {text}");
    assert!(daemon.stop());
    let unasked = varve()
        .arg("destroy")
        .arg(&pool)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert_eq!(unasked.status.code(), Some(2), "{}", said(&unasked));
    assert!(said(&unasked).contains("--yes") && pool.join("nvm.img").exists());
    std::fs::write(pool.join("notes"), "mine").unwrap();
    let done = text_of(varve().args(["destroy", "--yes", "--json"]).arg(&pool));
    let done: Value = serde_json::from_str(&done).unwrap();
    assert!(done["freed_bytes"].as_u64() >= Some(16 << 20), "{done}");
    assert_eq!(done["files_left"][0], pool.join("notes").to_str().unwrap());
    assert_eq!(std::fs::read_dir(&pool).unwrap().count(), 1);
    let (_, text) = refused(&["destroy", "--yes"], &pool);
    assert!(text.contains("holds no pool"), "{text}");
}

#[test]
fn memory_of_pools_that_are_gone_is_told_of_and_freed() {
    let dir = tempfile::tempdir().unwrap();
    let live = dir.path().join("live");
    std::fs::create_dir(&live).unwrap();
    let make = |name: &str| {
        let pool = dir.path().join(name);
        mkfs(&pool);
        let settings = pool.join("varve.toml");
        let text = std::fs::read_to_string(&settings).unwrap();
        let text = text.replacen("uuid = ", &format!("live = {live:?}\nuuid = "), 1);
        std::fs::write(&settings, text).unwrap();
        pool
    };
    let (gone, other) = (make("gone"), make("other"));
    let daemon = Serve::start(&gone);
    std::fs::rename(&gone, dir.path().join("moved")).unwrap();
    let orphans = |more: &[&str]| {
        let done = text_of(
            varve()
                .args(["destroy", "--orphans", "--json", "--live"])
                .arg(&live)
                .args(more),
        );
        let done: Value = serde_json::from_str(&done).unwrap();
        done["removed"].as_array().unwrap().len()
    };
    assert_eq!(orphans(&[]), 0, "a daemon works there");
    std::fs::rename(dir.path().join("moved"), &gone).unwrap();
    // Killed.
    drop(daemon);
    assert_eq!(orphans(&[]), 0, "its pool is there");
    std::fs::remove_dir_all(&gone).unwrap();
    let daemon = Serve::start(&other);
    let status = text_of(varve().args(["status", "--json"]).arg(&other));
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["orphans"][0]["pool"], gone.to_str().unwrap());
    let text = text_of(varve().arg("status").arg(&other));
    assert!(text.contains("varve destroy --orphans"), "{text}");
    assert_eq!(orphans(&["--yes"]), 1);
    assert_eq!(orphans(&["--yes"]), 0);
    assert!(daemon.stop());
    assert_eq!(std::fs::read_dir(&live).unwrap().count(), 0);
}

#[test]
fn commands_log_to_a_terminal_as_to_a_file() {
    let there = std::process::Command::new("script").arg("--version").output();
    if !there.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: needs `script` (Debian: bsdutils), which gives a command a terminal");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let command = format!("{} doctor", env!("CARGO_BIN_EXE_varve"));
    let output = std::process::Command::new("script")
        .args(["-q", "-c", &command])
        .arg(temp.path().join("typescript"))
        .env("VARVE_LOG", "trace")
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("io_uring"), "{text}");
    assert!(
        !text.contains("panicked") && !text.contains("crate feature"),
        "{text}"
    );
}

#[test]
fn doctor_says_the_same_as_text_and_as_json() {
    let text = varve().arg("doctor").output().unwrap();
    let json = varve().args(["doctor", "--json"]).output().unwrap();
    assert_eq!(text.status.code(), json.status.code());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    let findings = json["findings"].as_array().unwrap();
    assert!(!findings.is_empty());
    for finding in findings {
        let topic = finding["topic"].as_str().unwrap();
        assert!(text.contains(&format!("{topic}: ")), "{topic}: {text}");
        let verdict = finding["verdict"].as_str().unwrap();
        assert!(["ok", "note", "missing"].contains(&verdict));
    }
    assert_eq!(
        json["missing"].as_bool().unwrap(),
        findings.iter().any(|f| f["verdict"] == "missing")
    );
}

#[test]
fn device_that_is_none_is_refused_with_what_to_do_and_nothing_is_made() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("pool");
    for (ssd, code, expected) in [
        ("spdk:/dev/nvme0n1", 2, "spdk:0000:00:04.0"),
        ("nvme:/dev/nvme0n1", 2, "lspci -D"),
        ("ng:/dev/nvme0n1", 2, "write ng:/dev/ng0n1"),
        ("nvme:ffff:ff:1f.7", 1, "no such PCI function"),
        ("ng:/dev/ng999n1", 1, "ls /dev/ng*"),
        ("ng:/dev/null", 1, "uring:PATH"),
    ] {
        let output = varve()
            .arg("mkfs")
            .arg(&dir)
            .args(["--nvm", "16M", "--ssd", ssd])
            .output()
            .unwrap();
        let text = said(&output);
        assert!(
            text.contains(expected) && !text.contains("panicked"),
            "{ssd}: {text}"
        );
        assert_eq!(output.status.code(), Some(code), "{ssd}: {text}");
        assert!(!dir.exists(), "{ssd}");
    }
}
