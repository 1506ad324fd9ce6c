//! Rounds, medians and a cheap generator. Knows nothing of what is timed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Columns to measure; all if there is nothing.
static SIDES: OnceLock<Vec<String>> = OnceLock::new();
static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// From now on Ctrl-C and SIGTERM end the run at the next round, so that mounts and daemons are taken down.
pub fn end_in_order() -> anyhow::Result<()> {
    let flag = INTERRUPTED.get_or_init(Arc::default);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(flag))?;
    }
    Ok(())
}

/// Only these columns are measured from now on.
pub fn only_sides(names: Vec<String>) {
    let _ = SIDES.set(names);
}

/// Fails after a signal.
pub fn go_on() -> anyhow::Result<()> {
    let over = INTERRUPTED.get().is_some_and(|flag| flag.load(Ordering::Relaxed));
    anyhow::ensure!(!over, "interrupted");
    Ok(())
}

/// One side of a row: its name, and what runs one round and gives nanoseconds an operation.
pub struct Side<'a> {
    /// Column.
    pub name: &'static str,
    round: Box<dyn FnMut() -> anyhow::Result<f64> + 'a>,
}

impl<'a> Side<'a> {
    /// A side.
    pub fn new(name: &'static str, round: impl FnMut() -> anyhow::Result<f64> + 'a) -> Self {
        Self {
            name,
            round: Box::new(round),
        }
    }
}

/// Medians of all sides, in their order, after a first round that does not count; no number where a side is
/// not wanted.
pub fn rounds(count: usize, sides: &mut [Side<'_>]) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let mut values: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
    for round in 0..=count {
        for (side, values) in sides.iter_mut().zip(&mut values) {
            go_on()?;
            if SIDES
                .get()
                .is_some_and(|wanted| !wanted.iter().any(|name| name == side.name))
            {
                continue;
            }
            let value = (side.round)()?;
            if round > 0 {
                values.push(value);
            }
        }
    }
    Ok(sides
        .iter()
        .zip(&mut values)
        .map(|(side, values)| (side.name, median(values)))
        .collect())
}

/// The value in the middle.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Nanoseconds an operation.
pub fn per_op(count: u64, mut run: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<f64> {
    go_on()?;
    let start = Instant::now();
    for step in 0..count {
        run(step)?;
    }
    Ok(start.elapsed().as_nanos() as f64 / count.max(1) as f64)
}

/// `threads` at once, each with its number; nanoseconds an operation over all of them (half as long at twice
/// the speed). `run` does `count` operations.
pub fn per_op_threads(
    threads: u64,
    count: u64,
    run: impl Fn(u64) -> anyhow::Result<()> + Sync,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let run = &run;
                scope.spawn(move || run(thread))
            })
            .collect();
        handles
            .into_iter()
            .try_for_each(|handle| handle.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })?;
    Ok(start.elapsed().as_nanos() as f64 / (threads * count) as f64)
}
