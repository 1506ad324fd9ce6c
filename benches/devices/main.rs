//! `cargo bench --bench devices`: ways to a block device beside fio, and whole pools on a device beside ext4
//! and xfs on the same kind of device, in one run.
//!
//! ```console
//! cargo bench --bench devices                               # all parts
//! cargo bench --bench devices -- --parts reads,writes --rounds 5
//! cargo bench --bench devices -- --dir /mnt/nvme --seconds 5
//! ```
//!
//! Files and loop devices lie in a temporary directory of `--dir` (the target directory), which must be on
//! the disk to measure. *backends*: operations a second and microseconds of one, of this library and of fio
//! (io_uring, fixed buffers) on the same file; at depth N the library has N transfers under way, and a call
//! ends when all of its transfers have ended. *reads*: 4 KiB that no cache holds, each place once.
//! *writes*: 4 KiB at random places of a file, each followed by `fdatasync`. *idle*: start, stop, memory,
//! processor. In each round all sides take their turn; the median of the rounds is shown. Sides that need
//! root or a program that is missing are named and left out.

mod backends;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "shared with other benches")]
mod common;
mod idle;
mod paths;
mod places;

use std::path::PathBuf;

/// Bytes.
pub const MIB: u64 = 1 << 20;
/// Bytes of one operation on a whole pool.
pub const BLOCK: usize = 4096;

/// What is measured, and for how long.
pub struct Options {
    parts: Vec<String>,
    /// Turns of each side.
    pub rounds: usize,
    /// Time of one side in one round.
    pub seconds: f64,
    /// Where files lie.
    pub dir: PathBuf,
}

fn parse() -> anyhow::Result<Options> {
    let mut options = Options {
        parts: Vec::new(),
        rounds: 3,
        seconds: 2.0,
        dir: env!("CARGO_TARGET_TMPDIR").into(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || {
            words
                .next()
                .ok_or_else(|| anyhow::anyhow!("{word} needs a value"))
        };
        match word.as_str() {
            "--bench" => {}
            "--parts" => options.parts = value()?.split(',').map(str::to_owned).collect(),
            "--rounds" => options.rounds = value()?.parse()?,
            "--seconds" => options.seconds = value()?.parse()?,
            "--dir" => options.dir = value()?.into(),
            other => anyhow::bail!("{other}: not known. --parts --rounds --seconds --dir"),
        }
    }
    Ok(options)
}

/// The middle of some values; 0 of none.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Time that this process has used on processors, in microseconds.
pub fn processor_us() -> f64 {
    let read = |id| {
        let time = rustix::time::clock_gettime(id);
        time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
    };
    read(rustix::time::ClockId::ProcessCPUTime)
}

fn main() -> anyhow::Result<()> {
    let options = parse()?;
    std::fs::create_dir_all(&options.dir)?;
    let top = tempfile::Builder::new()
        .prefix("devices-")
        .tempdir_in(&options.dir)?;
    let machine = common::machine(serde_json::json!({
        "rounds": options.rounds,
        "seconds": options.seconds,
        "disk": places::disk_of(top.path()),
    }));
    println!("{}", serde_json::to_string_pretty(&machine)?);
    let wanted = |part: &str| options.parts.is_empty() || options.parts.iter().any(|name| name == part);
    if wanted("backends") {
        backends::run(&options, top.path())?;
    }
    if wanted("reads") {
        paths::reads(&options, top.path())?;
    }
    if wanted("writes") {
        paths::writes(&options, top.path())?;
    }
    if wanted("idle") {
        idle::run(top.path())?;
    }
    println!("load after: {}", common::load());
    Ok(())
}
