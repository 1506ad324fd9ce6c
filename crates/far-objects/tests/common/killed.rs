//! A process of a test's own that is killed while it makes checkpoints.

#![allow(clippy::unwrap_used)]

use fastrand::Rng;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs the test `name` of this program in a process of its own, with `path` in the variable `variable`, and
/// kills it after up to `most_ms`. Gives the number of the last checkpoint that it said it had made.
pub fn kill(random: &mut Rng, name: &str, variable: &str, path: &Path, most_ms: u64) -> Option<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(variable, path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let (sender, made) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || {
        let lines = out.lines().map_while(Result::ok);
        let number = |line: String| {
            line.strip_prefix("checkpoint ")
                .and_then(|number| number.parse().ok())
        };
        lines
            .filter_map(number)
            .inspect(|_| sender.send(()).unwrap_or_default())
            .last()
    });
    if random.bool() {
        // Some live until a checkpoint is made, however slow the machine is.
        let _ = made.recv_timeout(Duration::from_secs(60));
    }
    std::thread::sleep(Duration::from_millis(random.u64(5..most_ms)));
    let has_ended = child.try_wait().unwrap();
    assert!(has_ended.is_none(), "the process ended by itself");
    child.kill().unwrap();
    child.wait().unwrap();
    reader.join().unwrap()
}
