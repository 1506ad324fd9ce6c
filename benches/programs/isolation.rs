//! Two processes that write and sync 4 KiB at a time, each to its own file, and what each call takes (Strata,
//! table 2.4): mean and tail, in microseconds, of the one that fares worse.

use crate::report::{Row, Target, Unit};
use crate::sides::Side;
use crate::workload::{Plan, argument, number, ready, result, start};
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
/// Blocks of a file.
const BLOCKS: u64 = 16_384;
/// Calls of a burst, and the pause after it.
const BURST: u64 = 256;
const PAUSE: Duration = Duration::from_millis(2);
const KEYS: [&str; 4] = ["mean", "99th", "99.9th", "99.99th"];

/// A row for the mean and for each percentile.
pub fn rows(plan: &Plan) -> Vec<Row> {
    KEYS.into_iter()
        .map(|key| {
            let mut targets = Vec::new();
            if plan.on_disk {
                targets.push(Target::Faster("run", 1.0, "ext4+fsync"));
            }
            Row::new(
                "isolation",
                &format!("two clients, 4 KiB, {key}"),
                Unit::Micros,
                targets,
            )
        })
        .collect()
}

/// One round.
pub fn measure(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    let arguments = |who: u32| [who.to_string(), plan.seconds.to_string()];
    let (mut first, _) = start(side, dir, "isolation", &arguments(0))?;
    let (mut second, _) = start(side, dir, "isolation", &arguments(1))?;
    first.say("go")?;
    second.say("go")?;
    let (first, second) = (result(first)?, result(second)?);
    KEYS.iter()
        .map(|key| Ok(number(&first, key)?.max(number(&second, key)?)))
        .collect()
}

/// The driver: one of the two.
pub fn drive(arguments: &[String]) -> anyhow::Result<Value> {
    let who: u8 = argument(arguments, 0)?;
    let limit = Duration::from_secs_f64(argument(arguments, 1)?);
    let file = std::fs::File::create(format!("file-{who}"))?;
    let block = [who; BLOCK];
    file.write_all_at(&block, 0)?;
    let mut took = Vec::with_capacity(1 << 20);
    ready("")?;
    let start = Instant::now();
    let mut step = 0;
    while start.elapsed() < limit {
        for _ in 0..BURST {
            let begin = Instant::now();
            file.write_all_at(&block, step % BLOCKS * BLOCK as u64)?;
            file.sync_data()?;
            took.push(begin.elapsed().as_nanos() as u64);
            step += 1;
        }
        std::thread::sleep(PAUSE);
    }
    took.sort_unstable();
    let at = |share: f64| took[((took.len() as f64 * share) as usize).min(took.len() - 1)] as f64 / 1e3;
    let mean = took.iter().sum::<u64>() as f64 / took.len() as f64 / 1e3;
    Ok(json!({ KEYS[0]: mean, KEYS[1]: at(0.99), KEYS[2]: at(0.999), KEYS[3]: at(0.9999) }))
}
