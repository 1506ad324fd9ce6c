//! Two processes that share a file by a lock file (Strata, §2.2.4): who creates the lock file writes 4 KiB to
//! the data file and unlinks the lock file; nothing is synced. And the same by turns: a process renames the
//! other one's token to its own, writes, and renames it back. Updates a second of both.
//!
//! When the calls are counted, and at the end of each run, it is checked that no two processes ever held the
//! lock: the block has a counter.

use crate::report::{Row, Target, Unit};
use crate::sides::Side;
use crate::workload::{Plan, argument, number, ready, result, start};
use anyhow::bail;
use serde_json::{Value, json};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const WAYS: [&str; 2] = ["lock", "turns"];
/// Longest time that one try, of three or four calls, may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Updates a second of Strata.
const STRATA: f64 = 10_400.0;

/// Two rows; both have to be faster than Strata.
pub fn rows(_: &Plan) -> Vec<Row> {
    ["lock file created and unlinked", "lock file renamed by turns"]
        .into_iter()
        .map(|name| {
            Row::new(
                "sharing",
                name,
                Unit::Rate,
                vec![Target::Above("run", STRATA), Target::Beside("run", "ext4+fsync")],
            )
        })
        .collect()
}

/// One round of both ways.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    WAYS.iter()
        .map(|way| {
            two(side, dir, way, plan.seconds, true)?;
            two(side, dir, way, plan.seconds, false)
        })
        .collect()
}

/// Two processes; updates a second. With `checked` they read what they write over.
fn two(side: &Side, dir: &Path, way: &str, seconds: f64, checked: bool) -> anyhow::Result<f64> {
    let data = File::create(dir.join("data"))?;
    data.write_all_at(&[0; BLOCK], 0)?;
    drop(data);
    let _ = std::fs::remove_file(dir.join("token-1"));
    if way == "turns" {
        File::create(dir.join("token-0"))?;
    }
    let arguments = |who: u32| {
        let checked = u8::from(checked).to_string();
        [way.to_owned(), who.to_string(), seconds.to_string(), checked]
    };
    let (mut first, _) = start(side, dir, "sharing", &arguments(0))?;
    let (mut second, _) = start(side, dir, "sharing", &arguments(1))?;
    first.say("go")?;
    second.say("go")?;
    let (first, second) = (result(first)?, result(second)?);
    let updates = [number(&first, "updates")?, number(&second, "updates")?];
    anyhow::ensure!(
        updates[0] > 0.0 && updates[1] > 0.0,
        "one process STARVED: {updates:?}"
    );
    let total = updates[0] + updates[1];
    if checked {
        let mut block = [0; BLOCK];
        File::open(dir.join("data"))?.read_exact_at(&mut block, 0)?;
        let there = counter(&block);
        anyhow::ensure!(
            there as f64 == total,
            "the counter is {there} after {total} updates: LOST"
        );
    }
    let _ = std::fs::remove_file(dir.join("token-0"));
    Ok(total / number(&first, "seconds")?.max(number(&second, "seconds")?))
}

fn counter(block: &[u8; BLOCK]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&block[..8]);
    u64::from_le_bytes(word)
}

/// One process.
struct Writer {
    data: File,
    block: [u8; BLOCK],
    checked: bool,
    updates: u64,
}

impl Writer {
    fn update(&mut self) -> anyhow::Result<()> {
        if self.checked {
            self.data.read_exact_at(&mut self.block, 0)?;
            let next = counter(&self.block) + 1;
            self.block[..8].copy_from_slice(&next.to_le_bytes());
        }
        self.data.write_all_at(&self.block, 0)?;
        self.updates += 1;
        Ok(())
    }

    /// Tries to have the lock file; writes if it has.
    fn by_lock(&mut self) -> anyhow::Result<bool> {
        match File::options().write(true).create_new(true).open("lock") {
            Ok(lock) => drop(lock),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(false),
            Err(error) => bail!("cannot create the lock file: {error}"),
        }
        self.update()?;
        std::fs::remove_file("lock")?;
        Ok(true)
    }

    /// Writes if the token is there for it, and hands it on.
    fn by_turns(&mut self, own: &str, held: &str, other: &str) -> anyhow::Result<bool> {
        match std::fs::rename(own, held) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => bail!("cannot take the token: {error}"),
        }
        self.update()?;
        std::fs::rename(held, other)?;
        Ok(true)
    }
}

/// The driver: one of the two.
pub fn drive(arguments: &[String]) -> anyhow::Result<Value> {
    let (way, who): (String, u32) = (argument(arguments, 0)?, argument(arguments, 1)?);
    let limit = Duration::from_secs_f64(argument(arguments, 2)?);
    let mut writer = Writer {
        data: File::options().read(true).write(true).open("data")?,
        block: [who as u8; BLOCK],
        checked: argument::<u8>(arguments, 3)? == 1,
        updates: 0,
    };
    let (own, held, other) = (
        format!("token-{who}"),
        format!("held-{who}"),
        format!("token-{}", 1 - who),
    );
    ready("")?;
    let start = Instant::now();
    let (mut last, mut slowest) = (Duration::ZERO, Duration::ZERO);
    while last < limit {
        let done = if way == "lock" {
            writer.by_lock()?
        } else {
            writer.by_turns(&own, &held, &other)?
        };
        if !done {
            std::thread::yield_now();
        }
        let now = start.elapsed();
        slowest = slowest.max(now - last);
        last = now;
    }
    anyhow::ensure!(slowest < PATIENCE, "one try took {slowest:?}");
    Ok(json!({ "updates": writer.updates, "seconds": last.as_secs_f64(), "slowest": slowest.as_secs_f64() }))
}
