//! `varve top`, `varve metrics` and `varve debug session` on a daemon at work: the same numbers as `status
//! --json`, over every way out.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{LiveDirs, run_ok, text_of, varve, wait_until};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use varve_ipc::{ClientKind, Cred, Hello, LeaseMode, Link, PROTOCOL_VERSION, Request, Want};
use varve_libfs::{Fs, FsOptions, OpenFile, OpenFlags, SocketConnector};
use varve_media::emulated::DiskModel;

/// A process that ends with the test.
struct Running(Child);

impl Running {
    fn start(words: &[&str], pool: &Path) -> Self {
        let child = varve()
            .args(words)
            .arg(pool)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What it has in memory goes with the answer, which is made before the daemon and so dropped after it.
fn mkfs(pool: &Path) -> LiveDirs {
    run_ok(
        varve()
            .arg("mkfs")
            .arg(pool)
            .args(["--nvm", "16M", "--ssd", "16M", "--hdd", "0"]),
    );
    LiveDirs::of(pool)
}

fn serve(pool: &Path, words: &[&str]) -> Running {
    let mut serve = Running::start(&[&["serve"], words].concat(), pool);
    wait_until("the daemon", || {
        assert!(serve.0.try_wait().unwrap().is_none(), "the daemon ended");
        std::os::unix::net::UnixStream::connect(pool.join("sock")).is_ok()
    });
    serve
}

fn mount(pool: &Path) -> Fs {
    let connector = SocketConnector {
        path: pool.join("sock"),
    };
    Fs::mount(Arc::new(connector), FsOptions::default()).unwrap()
}

/// A new file `f`, open for reading and writing.
fn new_file(fs: &Fs, me: &Cred) -> OpenFile {
    let made = fs.create(fs.root(), b"f", libc::S_IFREG | 0o644, 0, me).unwrap();
    let flags = OpenFlags {
        read: true,
        write: true,
        ..OpenFlags::default()
    };
    fs.open(made.key, flags, me).unwrap()
}

fn json(command: &mut std::process::Command) -> Value {
    serde_json::from_str(&text_of(command)).unwrap()
}

/// Where a process says that its metrics are.
fn announced(process: &mut Running) -> SocketAddr {
    let out = std::io::BufReader::new(process.0.stdout.take().unwrap());
    let mut said = std::io::BufRead::lines(out).map(|line| line.unwrap());
    let line = said.find(|line| line.contains("metrics on http://")).unwrap();
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap();
    address.parse().unwrap()
}

/// An answer: its first line, and the body.
fn get(address: SocketAddr, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// The value of a metric without labels, or with these.
fn metric(text: &str, name: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}"))
        .parse()
        .unwrap()
}

#[test]
fn top_metrics_and_debug_session_say_what_status_says() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = mkfs(&pool);
    let _serve = serve(&pool, &[]);
    let (fs, me) = (mount(&pool), Cred::root());
    let file = new_file(&fs, &me);
    file.write_at(0, &[7; 10_000], &me).unwrap();
    run_ok(varve().arg("digest").arg(&pool));
    let status = json(varve().args(["status", "--json"]).arg(&pool));
    let session = status["sessions"][0]["id"].as_u64().unwrap();
    assert!(status["uptime_ms"].as_u64().unwrap() > 0);
    assert_eq!(status["waiting"], serde_json::json!([]));

    let top = json(varve().args(["top", "--json", "--interval", "0.2"]).arg(&pool));
    assert_eq!(top["status"]["digest"], status["digest"]);
    let programs = top["programs"].as_object().unwrap();
    assert!(programs.contains_key(&std::process::id().to_string()), "{top}");
    assert!(top["rates"]["seconds"].as_f64().unwrap() > 0.1, "{top}");
    assert_eq!(top["rates"]["digest_operations"], 0.0);
    let screen = text_of(varve().args(["top", "--once", "--interval", "0.1"]).arg(&pool));
    assert!(
        screen.contains("0 operations/s") && screen.contains("linked"),
        "{screen}"
    );
    // Without a terminal `top` looks once, too.
    assert!(text_of(varve().args(["top", "--interval", "0.1"]).arg(&pool)).contains("digested/s"));

    let text = text_of(varve().arg("metrics").arg(&pool));
    assert_eq!(metric(&text, "varve_up"), 1);
    assert_eq!(
        metric(&text, "varve_digest_operations_total"),
        status["digest"]["operations"].as_u64().unwrap()
    );
    assert_eq!(metric(&text, "varve_digest_bytes_total{kind=\"logged\"}"), 10_000);
    assert_eq!(metric(&text, "varve_sessions"), 1);
    assert!(
        text.contains(&format!("varve_session_leases{{session=\"{session}\"")),
        "{text}"
    );

    let detail = json(
        varve()
            .args(["debug", "session", "--json"])
            .arg(&pool)
            .arg(session.to_string()),
    );
    assert_eq!(detail["session"]["pid"], std::process::id());
    let leases = detail["leases"].as_array().unwrap();
    assert!(
        leases.iter().any(|lease| lease["inode"] == file.key().ino.0
            && lease["mode"] == "write"
            && lease["state"] == "held"),
        "{detail}"
    );
    let words = text_of(
        varve()
            .args(["debug", "session"])
            .arg(&pool)
            .arg(session.to_string()),
    );
    assert!(words.contains(&format!("inode {}", file.key().ino.0)), "{words}");
    let refused = varve()
        .args(["debug", "session"])
        .arg(&pool)
        .arg("999")
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no session 999"));
    drop(file);
    fs.unmount().unwrap();
}

/// Of an emulated device the times are known: no request is faster.
#[test]
fn response_times_of_a_device_are_those_that_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = mkfs(&pool);
    set(
        &pool,
        "emulate = [\"ssd\"]\nplacement_high_percent = 20\nplacement_low_percent = 10",
    );
    let _serve = serve(&pool, &[]);
    let (fs, me) = (mount(&pool), Cred::root());
    let file = new_file(&fs, &me);
    // More than NVM takes below its mark.
    for at in 0..24 {
        file.write_at(at << 18, &[7; 256 << 10], &me).unwrap();
        run_ok(varve().arg("digest").arg(&pool));
    }
    let ssd = || json(varve().args(["status", "--json"]).arg(&pool))["tiers"][1].clone();
    wait_until("data on the SSD", || {
        ssd()["written_bytes"].as_u64().unwrap() > 1 << 20
    });
    for at in 0..24 {
        assert_eq!(file.read_at(at << 18, &mut [0; 4096]).unwrap(), 4096);
    }
    let (figures, model) = (ssd()["figures"].clone(), DiskModel::SSD);
    for (op, least_ns) in [("read", model.read_latency_ns), ("write", model.write_latency_ns)] {
        let response_ns = figures[op]["response_ns"].as_u64().unwrap();
        assert!(response_ns >= least_ns, "{op}: {figures}");
    }
    let text = text_of(varve().arg("metrics").arg(&pool));
    let read_ns = metric(&text, "varve_tier_response_nanoseconds{tier=\"ssd\",op=\"read\"}");
    assert!(read_ns >= model.read_latency_ns, "{text}");
    let screen = text_of(varve().args(["top", "--once", "--interval", "0.1"]).arg(&pool));
    assert!(screen.contains("read in") && screen.contains(" µs"), "{screen}");
    drop(file);
    fs.unmount().unwrap();
}

/// Adds lines to the daemon's settings.
fn set(pool: &Path, lines: &str) {
    let toml = pool.join("varve.toml");
    let text = std::fs::read_to_string(&toml).unwrap();
    let text = if text.contains("[daemon]") {
        text.replace("[daemon]", &format!("[daemon]\n{lines}"))
    } else {
        format!("{text}\n[daemon]\n{lines}\n")
    };
    std::fs::write(&toml, text).unwrap();
}

#[test]
fn waiting_session_and_who_keeps_it_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = mkfs(&pool);
    // A holder that does not answer keeps its lease for that long.
    set(&pool, "lease_ms = 30000");
    let _serve = serve(&pool, &[]);
    // A client that takes a lease and never answers.
    let hello = Hello {
        version: PROTOCOL_VERSION,
        kind: ClientKind::Linked,
        read_only: false,
        resume: None,
        held: Vec::new(),
    };
    let (holder, welcome, _descriptors) = varve_ipc::socket::connect(&pool.join("sock"), hello).unwrap();
    let holder_id = welcome.session.0;
    let want = Want {
        key: welcome.root.key,
        mode: LeaseMode::Write,
    };
    holder.call(Request::Acquire { wants: vec![want] }).unwrap();
    let status = || json(varve().args(["status", "--json"]).arg(&pool));
    let detail = json(
        varve()
            .args(["debug", "session", "--json"])
            .arg(&pool)
            .arg(holder_id.to_string()),
    );
    let leases = detail["leases"].as_array().unwrap();
    assert!(
        leases
            .iter()
            .any(|lease| lease["mode"] == "write" && lease["inode"] == want.key.ino.0),
        "{detail}"
    );
    let (fs, done) = (mount(&pool), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let waiter = {
        let (fs, done) = (fs.clone(), Arc::clone(&done));
        // The root's names are the holder's.
        std::thread::spawn(move || {
            let made = fs.create(fs.root(), b"late", libc::S_IFREG | 0o644, 0, &Cred::root());
            done.store(true, std::sync::atomic::Ordering::SeqCst);
            made
        })
    };
    let mut seen = Value::Null;
    wait_until("somebody waits for the silent client", || {
        assert!(
            !done.load(std::sync::atomic::Ordering::SeqCst),
            "nobody had to wait"
        );
        seen = status();
        seen["waiting"].as_array().unwrap().iter().any(|wait| {
            let holders = wait["holders"].as_array().unwrap();
            holders
                .iter()
                .any(|other| other["session"] == holder_id && other["state"] == "asked back")
        })
    });
    let waiter_id = seen["waiting"][0]["session"].as_u64().unwrap();
    let text = text_of(varve().arg("metrics").arg(&pool));
    let pair = format!("varve_lease_waits_for{{waiter=\"{waiter_id}\",holder=\"{holder_id}\"}}");
    assert!(metric(&text, &pair) >= 1);
    let screen = text_of(varve().args(["top", "--once", "--interval", "0.1"]).arg(&pool));
    assert!(
        screen.contains("waits    ") && screen.contains("asked back"),
        "{screen}"
    );
    let words = text_of(
        varve()
            .args(["debug", "session"])
            .arg(&pool)
            .arg(holder_id.to_string()),
    );
    assert!(
        words.contains("awaited  ") && words.contains("others wait for it"),
        "{words}"
    );
    // The daemon learns at once that it is gone, and the waiter goes on.
    drop(holder);
    waiter.join().unwrap().unwrap();
    fs.unmount().unwrap();
}

#[test]
fn metrics_over_http_outlive_the_daemon_and_refuse_what_they_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = mkfs(&pool);
    let daemon = serve(&pool, &[]);
    let mut exporter = Running::start(&["metrics", "--listen", "127.0.0.1:0"], &pool);
    let address = announced(&mut exporter);
    let (first, body) = get(address, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(first.contains("200") && metric(&body, "varve_up") == 1, "{first}");
    assert!(body.ends_with("# EOF\n"));
    let (first, body) = get(address, "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(first.contains("200") && body.is_empty());
    assert!(get(address, "GET /secret HTTP/1.1\r\n\r\n").0.contains("404"));
    assert!(get(address, "POST /metrics HTTP/1.1\r\n\r\n").0.contains("405"));
    // Somebody who says nothing, and goes, harms nobody.
    drop(TcpStream::connect(address).unwrap());
    drop(daemon);
    let (first, body) = get(address, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(first.contains("200") && metric(&body, "varve_up") == 0, "{first}");
    drop(exporter);
    // From within the daemon.
    let mut daemon = serve(&pool, &["--metrics", "127.0.0.1:0"]);
    let address = announced(&mut daemon);
    let (first, body) = get(address, "GET /metrics HTTP/1.1\r\n\r\n");
    assert!(first.contains("200") && metric(&body, "varve_up") == 1, "{first}");
}

#[test]
fn commands_without_a_daemon_end_with_4() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    let _live = mkfs(&pool);
    for words in [&["top", "--once"][..], &["metrics"], &["debug", "session"]] {
        let mut command = varve();
        command.args(words).arg(&pool);
        if words.len() == 2 && words[0] == "debug" {
            command.arg("1");
        }
        let output = command.output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(4),
            "{words:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let output = varve()
        .args(["top", "--interval", "0"])
        .arg(&pool)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
}
