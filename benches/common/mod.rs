//! What both benches need: on what machine they run, numbers by chance, other programs run to their end.

use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::process::Command;

/// A xorshift generator, so that the choice of a place costs next to nothing.
pub struct Dice(u64);

impl Dice {
    /// Never the same sequence for two seeds.
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `below`.
    pub const fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// Runs a command to its end; what it said, or why it failed.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{command:?} does not start"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// What stands after the colon of the first line that begins with `key`.
fn after_colon(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text
        .lines()
        .find(|line| line.starts_with(key))
        .unwrap_or_default();
    line.split_once(':')
        .map_or("", |(_, value)| value)
        .trim()
        .to_owned()
}

fn commit() -> String {
    let mut git = Command::new("git");
    git.args([
        "-C",
        env!("CARGO_MANIFEST_DIR"),
        "describe",
        "--always",
        "--dirty",
    ]);
    output(&mut git).unwrap_or_else(|_| "unknown".into())
}

/// Load of the machine over the last minute.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}

/// The machine and the tree, by name, with what the bench adds.
pub fn machine(more: Value) -> Value {
    let mut machine = json!({
        "processor": after_colon("/proc/cpuinfo", "model name"),
        "processors": std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
        "memory": after_colon("/proc/meminfo", "MemTotal"),
        "load before": load(),
        "commit": commit(),
    });
    if let (Some(all), Value::Object(more)) = (machine.as_object_mut(), more) {
        all.extend(more);
    }
    machine
}
