//! Filebench's profiles *varmail* and *fileserver*, with the parameters of the Strata paper (§2.4.2): 10,000
//! files of 32 and 128 KiB on average (sizes of a gamma distribution, as Filebench draws them), appends of up
//! to 16 KiB, reads and writes of at most 1 MiB a call; 16 and 50 threads and the steps of the profiles.
//! Thousands of steps a second, as Filebench counts them.
//!
//! A file is written with one byte that its name determines, and whoever reads it looks at that.

use crate::common::Dice;
use crate::report::{Row, Target, Unit};
use crate::sides::Side;
use crate::workload::{Plan, argument, driven, number, ready};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CALL_BYTES: usize = 1 << 20;
const APPEND_BYTES: u64 = 16 << 10;
/// Filebench's shape of the distribution of sizes.
const GAMMA: f64 = 1.5;
/// Share of the files that are there at first.
const THERE_PERCENT: usize = 80;
/// States of a file.
const FREE: u8 = 0;
const THERE: u8 = 1;
const BUSY: u8 = 2;

/// varmail has to be three times as fast as ext4, and as fast as tmpfs.
pub fn varmail_rows(plan: &Plan) -> Vec<Row> {
    let targets = if plan.on_disk {
        vec![Target::Faster("run", 1.0, "ext4+fsync")]
    } else {
        vec![
            Target::Faster("run", 3.0, "ext4+fsync"),
            Target::Faster("run", 0.95, "tmpfs"),
        ]
    };
    vec![Row::new("varmail", "steps of 16 threads", Unit::Rate, targets)]
}

/// fileserver has no target.
pub fn fileserver_rows(_: &Plan) -> Vec<Row> {
    vec![Row::new(
        "fileserver",
        "steps of 50 threads, no syncs",
        Unit::Rate,
        Vec::new(),
    )]
}

fn measured(side: &Side, dir: &Path, plan: &Plan, name: &str) -> anyhow::Result<Vec<f64>> {
    let arguments = [plan.files.to_string(), (plan.seconds * 1.5).to_string()];
    Ok(vec![number(&driven(side, dir, name, &arguments)?, "rate")?])
}

/// One round.
pub fn measure_varmail(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    measured(side, dir, plan, "varmail")
}

/// One round.
pub fn measure_fileserver(side: &Side, dir: &Path, plan: &Plan) -> anyhow::Result<Vec<f64>> {
    measured(side, dir, plan, "fileserver")
}

/// A set of files, of which one thread at a time has each.
struct FileSet {
    states: Vec<AtomicU8>,
    /// Files in a directory, and directories in a directory; 0 for a flat set.
    width: usize,
    mean_bytes: f64,
}

/// A number above 0 and at most 1.
fn unit(dice: &mut Dice) -> f64 {
    (dice.below(1 << 52) + 1) as f64 / (1_u64 << 52) as f64
}

impl FileSet {
    fn path(&self, file: usize) -> PathBuf {
        match self.width {
            0 => format!("{file:08}").into(),
            width => format!(
                "{:04}/{:04}/{file:08}",
                file / (width * width),
                file / width % width
            )
            .into(),
        }
    }

    fn byte(file: usize) -> u8 {
        file as u8 ^ (file >> 8) as u8
    }

    /// A size of Filebench's gamma distribution: of shape 1.5, as the sum of an exponential one and of half
    /// the square of a normal one.
    fn size(&self, dice: &mut Dice) -> usize {
        let normal = (-2.0 * unit(dice).ln()).sqrt() * (std::f64::consts::TAU * unit(dice)).cos();
        let gamma = normal.mul_add(normal / 2.0, -unit(dice).ln());
        (gamma / GAMMA * self.mean_bytes) as usize
    }

    /// Makes the files that are there at first.
    fn make(files: usize, width: usize, mean_bytes: f64) -> anyhow::Result<Self> {
        let set = Self {
            states: (0..files).map(|_| AtomicU8::new(FREE)).collect(),
            width,
            mean_bytes,
        };
        let mut dice = Dice::new(files as u64);
        let block = vec![0; CALL_BYTES];
        let mut buffer = block;
        for file in 0..files {
            let path = set.path(file);
            if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
                std::fs::create_dir_all(dir)?;
            }
            if dice.below(100) < THERE_PERCENT as u64 {
                set.write(file, &mut dice, &mut buffer)?;
                set.states[file].store(THERE, Ordering::Relaxed);
            }
        }
        Ok(set)
    }

    /// Writes a whole new file, and closes it.
    fn write(&self, file: usize, dice: &mut Dice, buffer: &mut [u8]) -> anyhow::Result<()> {
        let mut left = self.size(dice);
        buffer[..left.min(CALL_BYTES)].fill(Self::byte(file));
        let mut open = File::create(self.path(file))?;
        while left > 0 {
            let part = left.min(CALL_BYTES);
            open.write_all(&buffer[..part])?;
            left -= part;
        }
        Ok(())
    }

    /// Appends to an open file.
    fn append(file: usize, open: &mut File, dice: &mut Dice, buffer: &mut [u8]) -> anyhow::Result<()> {
        let part = dice.below(APPEND_BYTES) as usize + 1;
        buffer[..part].fill(Self::byte(file));
        Ok(open.write_all(&buffer[..part])?)
    }

    /// Reads an open file from its beginning to its end.
    fn read(file: usize, open: &mut File, buffer: &mut [u8]) -> anyhow::Result<()> {
        let mut bytes = 0;
        loop {
            let part = open.read(buffer)?;
            if part == 0 {
                break;
            }
            bytes += part as u64;
            let byte = Self::byte(file);
            let right = buffer[0] == byte && buffer[part / 2] == byte && buffer[part - 1] == byte;
            anyhow::ensure!(right, "file {file} has WRONG bytes before {bytes}");
        }
        let size = open.metadata()?.len();
        anyhow::ensure!(
            bytes == size,
            "{bytes} bytes were read of file {file}, which has {size}"
        );
        Ok(())
    }

    /// Takes a random file in `state` for oneself.
    fn take(&self, state: u8, dice: &mut Dice) -> Option<usize> {
        let from = dice.below(self.states.len() as u64) as usize;
        let order = (from..self.states.len()).chain(0..from);
        let mut free = order.filter(|file| {
            let how = Ordering::Relaxed;
            self.states[*file].load(how) == state
                && self.states[*file]
                    .compare_exchange(state, BUSY, Ordering::Acquire, how)
                    .is_ok()
        });
        free.next()
    }

    fn give(&self, file: usize, state: u8) {
        self.states[file].store(state, Ordering::Release);
    }

    /// Takes a file that is there, and opens it to read and append.
    fn with(
        &self,
        dice: &mut Dice,
        run: impl FnOnce(usize, &mut File, &mut Dice) -> anyhow::Result<()>,
    ) -> anyhow::Result<bool> {
        let Some(file) = self.take(THERE, dice) else {
            return Ok(false);
        };
        let mut open = File::options().read(true).append(true).open(self.path(file))?;
        run(file, &mut open, dice)?;
        drop(open);
        self.give(file, THERE);
        Ok(true)
    }

    fn delete(&self, dice: &mut Dice) -> anyhow::Result<u64> {
        let Some(file) = self.take(THERE, dice) else {
            return Ok(0);
        };
        std::fs::remove_file(self.path(file))?;
        self.give(file, FREE);
        Ok(1)
    }

    /// The steps of varmail, once: a mail is deleted, one comes in, one is read and answered, one is read.
    fn varmail(&self, dice: &mut Dice, buffer: &mut [u8]) -> anyhow::Result<u64> {
        let mut steps = self.delete(dice)?;
        if let Some(file) = self.take(FREE, dice) {
            let mut open = File::options()
                .create_new(true)
                .append(true)
                .open(self.path(file))?;
            Self::append(file, &mut open, dice, buffer)?;
            open.sync_all()?;
            drop(open);
            self.give(file, THERE);
            steps += 4;
        }
        let answered = self.with(dice, |file, open, dice| {
            Self::read(file, open, buffer)?;
            Self::append(file, open, dice, buffer)?;
            Ok(open.sync_all()?)
        })?;
        let read = self.with(dice, |file, open, _| Self::read(file, open, buffer))?;
        Ok(steps + 5 * u64::from(answered) + 3 * u64::from(read))
    }

    /// The steps of fileserver, once: a file is written, one is appended to, one is read, one is deleted, one
    /// is looked at.
    fn fileserver(&self, dice: &mut Dice, buffer: &mut [u8]) -> anyhow::Result<u64> {
        let mut steps = 0;
        if let Some(file) = self.take(FREE, dice) {
            self.write(file, dice, buffer)?;
            self.give(file, THERE);
            steps += 3;
        }
        let appended = self.with(dice, |file, open, dice| Self::append(file, open, dice, buffer))?;
        let read = self.with(dice, |file, open, _| Self::read(file, open, buffer))?;
        steps += 3 * (u64::from(appended) + u64::from(read)) + self.delete(dice)?;
        if let Some(file) = self.take(THERE, dice) {
            std::fs::metadata(self.path(file))?;
            self.give(file, THERE);
            steps += 1;
        }
        Ok(steps)
    }
}

type Steps = fn(&FileSet, &mut Dice, &mut [u8]) -> anyhow::Result<u64>;

/// Runs `steps` with many threads for a time; steps a second.
fn run(set: &FileSet, threads: u64, seconds: f64, steps: Steps) -> anyhow::Result<f64> {
    let (count, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Instant::now();
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (count, over) = (&count, &over);
                scope.spawn(move || {
                    let (mut dice, mut buffer) = (Dice::new(thread + 1), vec![0; CALL_BYTES]);
                    let mut result = Ok(());
                    while result.is_ok() && !over.load(Ordering::Relaxed) {
                        result = steps(set, &mut dice, &mut buffer).map(|steps| {
                            count.fetch_add(steps, Ordering::Relaxed);
                        });
                    }
                    if result.is_err() {
                        over.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let until = start + Duration::from_secs_f64(seconds);
        while Instant::now() < until && !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        over.store(true, Ordering::Relaxed);
        let mut results = handles
            .into_iter()
            .map(|handle| handle.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?);
        results.try_for_each(|result| result)
    })?;
    Ok(count.load(Ordering::Relaxed) as f64 / start.elapsed().as_secs_f64())
}

fn drive(
    arguments: &[String],
    width: usize,
    mean_bytes: f64,
    threads: u64,
    steps: Steps,
) -> anyhow::Result<Value> {
    let set = FileSet::make(argument(arguments, 0)?, width, mean_bytes)?;
    ready("")?;
    let rate = run(&set, threads, argument(arguments, 1)?, steps)?;
    // Every file that must be there is, with its bytes, and no other.
    let mut buffer = vec![0; CALL_BYTES];
    for (file, state) in set.states.iter().enumerate() {
        let path = set.path(file);
        if state.load(Ordering::Relaxed) == THERE {
            FileSet::read(file, &mut File::open(&path)?, &mut buffer)?;
        } else {
            anyhow::ensure!(!path.exists(), "{} was deleted and is there", path.display());
        }
    }
    Ok(json!({ "rate": rate }))
}

/// The driver.
pub fn drive_varmail(arguments: &[String]) -> anyhow::Result<Value> {
    drive(arguments, 0, 32_768.0, 16, FileSet::varmail)
}

/// The driver. Filebench's directories are 20 wide.
pub fn drive_fileserver(arguments: &[String]) -> anyhow::Result<Value> {
    drive(arguments, 20, 131_072.0, 50, FileSet::fileserver)
}
