//! What all workloads have in common: their list, their sizes, and how this binary is started again as their
//! driver.

use crate::report::Row;
use crate::running::Running;
use crate::sides::Side;
use crate::{filebench, isolation, leveldb, redis, rpc, sharing, sqlite};
use anyhow::{Context, bail};
use serde_json::{Map, Value};
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Duration;

/// The first argument of this binary as a driver.
pub const DRIVE: &str = "--drive";
/// Longest time that a driver may take in one round.
const LIMIT: Duration = Duration::from_secs(300);

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rounds; the median is shown.
    pub rounds: usize,
    /// Seconds of what runs for a time.
    pub seconds: f64,
    /// Objects of the LevelDB workload.
    pub objects: u64,
    /// Synchronous writes of it.
    pub synced: u64,
    /// Requests to Redis by one client, and by fifty.
    pub requests: [u64; 2],
    /// Files of Filebench's profiles.
    pub files: usize,
    /// Whether everything lies on the disk.
    pub on_disk: bool,
}

impl Plan {
    /// Strata's sizes; on the disk fewer, where every sync waits for it.
    pub const fn full(on_disk: bool) -> Self {
        Self {
            rounds: 3,
            seconds: 2.0,
            objects: if on_disk { 20_000 } else { 300_000 },
            synced: if on_disk { 10_000 } else { 50_000 },
            requests: if on_disk {
                [5_000, 20_000]
            } else {
                [10_000, 40_000]
            },
            files: if on_disk { 1_000 } else { 10_000 },
            on_disk,
        }
    }

    /// Few operations.
    pub const fn quick(on_disk: bool) -> Self {
        Self {
            rounds: 1,
            seconds: 1.0,
            objects: if on_disk { 5_000 } else { 50_000 },
            synced: if on_disk { 2_000 } else { 10_000 },
            requests: if on_disk { [2_000, 5_000] } else { [5_000, 20_000] },
            files: 1_000,
            on_disk,
        }
    }

    /// Just enough to count the calls of each kind.
    pub const fn tiny(of: &Self) -> Self {
        Self {
            rounds: 1,
            seconds: 0.2,
            objects: 3_000,
            synced: 300,
            requests: [300, 600],
            files: 200,
            on_disk: of.on_disk,
        }
    }
}

/// A workload.
pub struct Workload {
    /// Its name, as `--rows` takes it.
    pub name: &'static str,
    /// Whether it syncs, so that it is of interest on a disk.
    pub syncs: bool,
    /// Makes sure that the programs are there.
    pub prepare: fn() -> anyhow::Result<()>,
    /// Its rows.
    pub rows: fn(&Plan) -> Vec<Row>,
    /// One round on one side, in an empty directory of its own: a value for each row.
    pub measure: fn(&Side, &Path, &Plan) -> anyhow::Result<Vec<f64>>,
}

impl Workload {
    /// One round on one side.
    pub fn run(&self, side: &Side, plan: &Plan) -> anyhow::Result<Vec<f64>> {
        let dir = side.fresh_dir()?;
        let measured = (self.measure)(side, &dir, plan)?;
        std::fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        anyhow::ensure!(
            measured.len() == (self.rows)(plan).len() || side.counting(),
            "{} values came",
            measured.len()
        );
        Ok(measured)
    }
}

/// Nothing has to be there.
fn nothing() -> anyhow::Result<()> {
    Ok(())
}

/// All, in the order in which they run.
pub const WORKLOADS: [Workload; 8] = [
    Workload {
        name: "leveldb",
        syncs: true,
        prepare: leveldb::prepare,
        rows: leveldb::rows,
        measure: leveldb::measure,
    },
    Workload {
        name: "redis",
        syncs: true,
        prepare: redis::prepare,
        rows: redis::rows,
        measure: redis::measure,
    },
    Workload {
        name: "sqlite",
        syncs: true,
        prepare: sqlite::prepare,
        rows: sqlite::rows,
        measure: sqlite::measure,
    },
    Workload {
        name: "varmail",
        syncs: true,
        prepare: nothing,
        rows: filebench::varmail_rows,
        measure: filebench::measure_varmail,
    },
    Workload {
        name: "fileserver",
        syncs: false,
        prepare: nothing,
        rows: filebench::fileserver_rows,
        measure: filebench::measure_fileserver,
    },
    Workload {
        name: "rpc",
        syncs: true,
        prepare: nothing,
        rows: rpc::rows,
        measure: rpc::measure,
    },
    Workload {
        name: "sharing",
        syncs: false,
        prepare: nothing,
        rows: sharing::rows,
        measure: sharing::measure,
    },
    Workload {
        name: "isolation",
        syncs: true,
        prepare: nothing,
        rows: isolation::rows,
        measure: isolation::measure,
    },
];

/// Starts this binary as the driver `name` in `dir` and waits until it is ready. Answers what it said with
/// that.
pub fn start<'a>(
    side: &'a Side,
    dir: &Path,
    name: &str,
    arguments: &[String],
) -> anyhow::Result<(Running<'a>, String)> {
    let mut command = side.command(&std::env::current_exe()?);
    command.arg(DRIVE).arg(name).args(arguments).current_dir(dir);
    let mut driver = Running::start(command, side, name)?;
    let said = driver.line(LIMIT)?;
    let Some(rest) = said.strip_prefix("ready") else {
        bail!("{name} said {said:?}");
    };
    Ok((driver, rest.trim().to_owned()))
}

/// The result of a driver that has been told to go.
pub fn result(mut driver: Running<'_>) -> anyhow::Result<Map<String, Value>> {
    let said = driver.line(LIMIT)?;
    driver.wait(LIMIT)?;
    serde_json::from_str(&said).with_context(|| format!("the driver said {said:?}"))
}

/// Runs a driver from its start to its end.
pub fn driven(
    side: &Side,
    dir: &Path,
    name: &str,
    arguments: &[String],
) -> anyhow::Result<Map<String, Value>> {
    let (mut driver, _) = start(side, dir, name, arguments)?;
    driver.say("go")?;
    result(driver)
}

/// A number of a driver's result.
pub fn number(result: &Map<String, Value>, key: &str) -> anyhow::Result<f64> {
    let value = result.get(key).and_then(Value::as_f64);
    value.with_context(|| format!("{key} is missing in {result:?}"))
}

/// Says that the driver is ready, with what the bench has to know, and waits for the word.
pub fn ready(what: &str) -> anyhow::Result<()> {
    println!("ready {what}");
    std::io::stdout().flush()?;
    let mut word = String::new();
    std::io::stdin().lock().read_line(&mut word)?;
    anyhow::ensure!(word.trim() == "go", "told {word:?}");
    Ok(())
}

/// The process as a driver.
pub fn drive(name: &str, arguments: &[String]) -> anyhow::Result<()> {
    let result = match name {
        "leveldb" => leveldb::drive(arguments),
        "sqlite" => sqlite::drive(arguments),
        "sqlite-check" => sqlite::drive_check(arguments),
        "varmail" => filebench::drive_varmail(arguments),
        "fileserver" => filebench::drive_fileserver(arguments),
        "rpc" => rpc::drive(arguments),
        "sharing" => sharing::drive(arguments),
        "isolation" => isolation::drive(arguments),
        other => bail!("there is no driver {other}"),
    }?;
    println!("{result}");
    Ok(())
}

/// Argument `at` of a driver.
pub fn argument<T: std::str::FromStr>(arguments: &[String], at: usize) -> anyhow::Result<T> {
    let word = arguments
        .get(at)
        .with_context(|| format!("argument {at} is missing"))?;
    word.parse()
        .ok()
        .with_context(|| format!("argument {word:?} is not right"))
}
