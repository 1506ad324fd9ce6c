//! LevelDB as in table 2.5 of the Strata paper: keys of 16 bytes, values of 1 KiB, 300,000 objects,
//! microseconds an operation. Only *write sync* waits until each write is durable, as there.

use crate::clib::{Level, leveldb_there};
use crate::common::Dice;
use crate::report::{Row, Target, Unit};
use crate::running::install;
use crate::sides::Side;
use crate::workload::{Plan, argument, driven, number, ready};
use serde_json::{Value, json};
use std::ffi::CStr;
use std::path::Path;
use std::time::Instant;

const VALUE_BYTES: usize = 1024;
const PARTS: [&str; 8] = [
    "write sync",
    "write seq",
    "write rand",
    "overwrite",
    "delete rand",
    "read seq",
    "read rand",
    "read hot",
];
/// Of how many objects one is hot.
const HOT: u64 = 100;

/// Makes sure that the library is there.
pub fn prepare() -> anyhow::Result<()> {
    install(&["libleveldb1d"], leveldb_there)
}

/// A row for each operation of the table. On a disk, the one that waits for it.
pub fn rows(plan: &Plan) -> Vec<Row> {
    let parts = if plan.on_disk { &PARTS[..1] } else { &PARTS };
    parts
        .iter()
        .map(|part| {
            let targets = match (*part, plan.on_disk) {
                ("write sync", false) => vec![
                    Target::Faster("run", 3.0, "ext4+fsync"),
                    Target::Faster("run", 0.95, "tmpfs"),
                ],
                (_, false) => Vec::new(),
                (_, true) => vec![Target::Faster("run", 1.0, "ext4+fsync")],
            };
            Row::new("leveldb", part, Unit::Micros, targets)
        })
        .collect()
}

/// One round.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    let arguments = [plan.objects, plan.synced, u64::from(plan.on_disk)].map(|word| word.to_string());
    let result = driven(side, dir, "leveldb", &arguments)?;
    let parts = if plan.on_disk { &PARTS[..1] } else { &PARTS };
    parts.iter().map(|part| number(&result, part)).collect()
}

fn key(number: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    let mut rest = number;
    for digit in key.iter_mut().rev() {
        *digit += (rest % 10) as u8;
        rest /= 10;
    }
    key
}

/// A value that names its key and its version.
fn value(key: &[u8; 16], version: u8, value: &mut [u8; VALUE_BYTES]) {
    value[..16].copy_from_slice(key);
    value[16] = version;
}

fn fits(key: &[u8], value: &[u8]) -> bool {
    value.len() == VALUE_BYTES && value[..16] == *key
}

fn micros(count: u64, mut run: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    (0..count).try_for_each(&mut run)?;
    Ok(start.elapsed().as_secs_f64() * 1e6 / count.max(1) as f64)
}

/// The synchronous writes: at random, into a database of their own.
fn write_sync(objects: u64, synced: u64) -> anyhow::Result<f64> {
    let mut body = [b'v'; VALUE_BYTES];
    let mut dice = Dice::new(7);
    let level = Level::open(c"sync")?;
    let took = micros(synced, |_| {
        let key = key(dice.below(objects));
        value(&key, 0, &mut body);
        level.put(&key, &body, true)
    })?;
    drop(level);
    check(c"sync", objects, synced)?;
    Ok(took)
}

/// Every key that was written has to be there after another opening.
fn check(name: &CStr, objects: u64, written: u64) -> anyhow::Result<()> {
    let level = Level::open(name)?;
    let mut dice = Dice::new(7);
    for _ in 0..written {
        let key = key(dice.below(objects));
        anyhow::ensure!(
            level.get(&key, |value| fits(&key, value))? == Some(true),
            "a synced write is LOST"
        );
    }
    Ok(())
}

fn fill(name: &CStr, objects: u64, mut next: impl FnMut(u64) -> u64) -> anyhow::Result<(Level, f64)> {
    let level = Level::open(name)?;
    let mut body = [b'v'; VALUE_BYTES];
    let took = micros(objects, |step| {
        let key = key(next(step));
        value(&key, 1, &mut body);
        level.put(&key, &body, false)
    })?;
    Ok((level, took))
}

/// Reads `count` keys that `next` chooses; answers how many were there.
fn read(level: &Level, count: u64, mut next: impl FnMut() -> u64) -> anyhow::Result<(f64, u64)> {
    let mut found = 0;
    let took = micros(count, |_| {
        let key = key(next());
        if let Some(fits) = level.get(&key, |value| fits(&key, value))? {
            anyhow::ensure!(fits, "a value is WRONG");
            found += 1;
        }
        Ok(())
    })?;
    Ok((took, found))
}

/// The driver.
pub fn drive(arguments: &[String]) -> anyhow::Result<Value> {
    let (objects, synced): (u64, u64) = (argument(arguments, 0)?, argument(arguments, 1)?);
    let only_sync = argument::<u8>(arguments, 2)? == 1;
    std::fs::create_dir("warm")?;
    ready("")?;
    let sync = write_sync(objects, synced)?;
    if only_sync {
        return Ok(json!({ "write sync": sync }));
    }
    // In order, and read so.
    let (level, write_seq) = fill(c"seq", objects, |step| step)?;
    drop(level);
    // At random, as the tool of LevelDB does it: some keys come twice, others never.
    let mut dice = Dice::new(1);
    let (level, write_rand) = fill(c"rand", objects, |_| dice.below(objects))?;
    let mut body = [b'w'; VALUE_BYTES];
    let overwrite = micros(objects, |_| {
        let key = key(dice.below(objects));
        value(&key, 2, &mut body);
        level.put(&key, &body, false)
    })?;
    let mut written: Vec<bool> = vec![false; objects as usize];
    let mut again = Dice::new(1);
    (0..2 * objects).for_each(|_| written[again.below(objects) as usize] = true);
    let there = written.iter().filter(|written| **written).count() as u64;
    let (mut seen, mut wrong) = (0, 0);
    let start = Instant::now();
    level.each(|key, value| {
        seen += 1;
        wrong += u64::from(!fits(key, value));
    });
    let read_seq = start.elapsed().as_secs_f64() * 1e6 / seen.max(1) as f64;
    anyhow::ensure!(
        wrong == 0 && seen == there,
        "{seen} of {there} pairs are there, {wrong} WRONG"
    );
    let (read_rand, _) = read(&level, objects, || dice.below(objects))?;
    let hot = (objects / HOT).max(1);
    let (read_hot, _) = read(&level, objects, || dice.below(hot) * HOT)?;
    let mut deleting = Dice::new(2);
    let delete_rand = micros(objects, |_| level.delete(&key(deleting.below(objects))))?;
    let mut deleted = Dice::new(2);
    (0..objects).for_each(|_| written[deleted.below(objects) as usize] = false);
    drop(level);
    let left = written.iter().filter(|written| **written).count() as u64;
    let mut found = 0;
    Level::open(c"rand")?.each(|key, value| found += u64::from(fits(key, value)));
    anyhow::ensure!(
        found == left,
        "{found} of {left} pairs are there after the deletes"
    );
    Ok(json!({
        "write sync": sync, "write seq": write_seq, "write rand": write_rand, "overwrite": overwrite,
        "delete rand": delete_rand, "read seq": read_seq, "read rand": read_rand, "read hot": read_hot,
    }))
}
