//! The examples in Rust, run as a reader would: twice, on a pool of their own and on one that a daemon
//! serves.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
#[allow(dead_code)]
#[path = "../examples/embedded.rs"]
mod embedded;
#[allow(dead_code)]
#[path = "../examples/session.rs"]
mod session;

use common::{run_ok, text_of, varve, wait_until};
use std::process::Child;

struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn embedded_pool_keeps_what_each_run_did() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    embedded::run(&pool).unwrap();
    embedded::run(&pool).unwrap();
    // What is left is a pool like any other.
    let report = text_of(varve().args(["fsck", "--json"]).arg(&pool));
    assert!(report.contains("\"clean\": true"), "{report}");
    let root = text_of(varve().args(["debug", "dir"]).arg(&pool).arg("1"));
    assert!(
        root.contains("run-1") && root.contains("run-2") && root.contains("count"),
        "{root}"
    );
}

#[test]
fn session_of_a_daemon_works_beside_it() {
    let dir = tempfile::tempdir().unwrap();
    let pool = dir.path().join("pool");
    run_ok(
        varve()
            .arg("mkfs")
            .arg(&pool)
            .args(["--nvm", "16M", "--ssd", "0", "--hdd", "0"]),
    );
    let child = varve()
        .arg("serve")
        .arg(&pool)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut serve = Serve(child);
    wait_until("the daemon", || {
        assert!(serve.0.try_wait().unwrap().is_none(), "the daemon ended");
        std::os::unix::net::UnixStream::connect(pool.join("sock")).is_ok()
    });
    session::run(&pool).unwrap();
    session::run(&pool).unwrap();
    run_ok(varve().arg("digest").arg(&pool));
    let status: serde_json::Value =
        serde_json::from_str(&text_of(varve().args(["status", "--json"]).arg(&pool))).unwrap();
    assert_eq!(status["digest"]["refused"], 0);
    let pid = rustix::process::Pid::from_raw(serve.0.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(serve.0.wait().unwrap().success());
}
