//! SQLite: transactions that insert one row of about 100 bytes each, `synchronous=full`, with a rollback
//! journal and with a write-ahead log; transactions a second.

use crate::clib::{Sqlite, sqlite_there};
use crate::report::{Row, Target, Unit};
use crate::running::install;
use crate::sides::Side;
use crate::workload::{Plan, argument, driven, number, ready};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

const MODES: [&str; 2] = ["delete", "wal"];
/// Rows inserted before the clock runs.
const WARM: i64 = 100;

/// Makes sure that the library is there.
pub fn prepare() -> anyhow::Result<()> {
    install(&["libsqlite3-0"], sqlite_there)
}

/// A row for each journal mode.
pub fn rows(plan: &Plan) -> Vec<Row> {
    ["insert, rollback journal", "insert, write-ahead log"]
        .into_iter()
        .map(|name| {
            let target = if plan.on_disk {
                Target::Faster("run", 1.0, "ext4+fsync")
            } else {
                Target::Faster("run", 0.9, "tmpfs")
            };
            Row::new("sqlite", name, Unit::Rate, vec![target])
        })
        .collect()
}

/// One round: both modes, each checked by another process.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    let mut values = Vec::new();
    for mode in MODES {
        let arguments = [mode.to_owned(), plan.seconds.to_string()];
        let result = driven(side, dir, "sqlite", &arguments)?;
        values.push(number(&result, "rate")?);
        let rows = number(&result, "rows")?.to_string();
        driven(&side.checker(), dir, "sqlite-check", &[mode.to_owned(), rows])?;
    }
    Ok(values)
}

/// The driver.
pub fn drive(arguments: &[String]) -> anyhow::Result<Value> {
    let mode: String = argument(arguments, 0)?;
    let limit = Duration::from_secs_f64(argument(arguments, 1)?);
    let text =
        "the quick brown fox jumps over the lazy dog and is not at all sorry about it; it does so once more";
    let sqlite = Sqlite::open(Path::new(&mode))?;
    let set = sqlite.run(&format!("pragma journal_mode={mode}"))?;
    anyhow::ensure!(set == mode, "journal_mode is {set}");
    sqlite.run("pragma synchronous=full")?;
    sqlite.run("create table t(a integer primary key, b integer, c text)")?;
    let insert = sqlite.insert("insert into t(b, c) values(?, ?)")?;
    (0..WARM).try_for_each(|row| insert.run(row, text))?;
    ready("")?;
    let start = Instant::now();
    let mut rows = WARM;
    while start.elapsed() < limit {
        for _ in 0..8 {
            insert.run(rows, text)?;
            rows += 1;
        }
    }
    let rate = (rows - WARM) as f64 / start.elapsed().as_secs_f64();
    Ok(json!({ "rate": rate, "rows": rows, "version": sqlite.version() }))
}

/// The driver that looks at what another one left.
pub fn drive_check(arguments: &[String]) -> anyhow::Result<Value> {
    let (mode, rows): (String, i64) = (argument(arguments, 0)?, argument(arguments, 1)?);
    ready("")?;
    let sqlite = Sqlite::open(Path::new(&mode))?;
    let sound = sqlite.run("pragma integrity_check")?;
    anyhow::ensure!(sound == "ok", "integrity_check: {sound}");
    let there = sqlite.run("select count(*) from t where b = a - 1")?;
    anyhow::ensure!(there == rows.to_string(), "{there} of {rows} rows are there");
    Ok(json!({}))
}
