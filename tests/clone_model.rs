//! Random operations on two files that share blocks (`tests/preload/shared_ops.c`), against their copies in memory:
//! with the clone and dedupe calls under `varve run`, and through the mount. A run that fails is made again
//! without what it can do without, and the operations that are left are printed.
//!
//! - `VARVE_SHARED_SEED` (1) is the first seed, `VARVE_SHARED_SEEDS` (2) their number, `VARVE_SHARED_OPS` (600) the
//!   operations of each;
//! - `VARVE_SHARED_BESIDE`: a directory of another file system with these calls (XFS), where the same is done: what each
//!   call answers must be the same.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Pool, cannot_mount, run_ok, varve};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Most runs that look for what a failure can do without.
const SHRINKS: usize = 60;

fn number(name: &str, default: u64) -> u64 {
    let told = std::env::var(name).ok();
    told.map_or(default, |told| told.parse().expect("a number"))
}

/// The program that does the operations; `None`: there is no compiler.
fn program(pool: &Pool) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no C compiler (cc)");
        return None;
    }
    let program = pool.outside().join("shared_ops");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload/shared_ops.c");
    run_ok(
        Command::new("cc")
            .args(["-O1", "-w", "-o"])
            .arg(&program)
            .arg(source),
    );
    Some(program)
}

/// One way to do the operations.
struct Way<'a> {
    pool: &'a Pool,
    program: &'a Path,
    name: &'a str,
    under_run: bool,
    seed: u64,
    count: usize,
}

impl Way<'_> {
    /// Does all operations but those left out, in `dir`.
    fn run(&self, dir: &Path, under_run: bool, left_out: &[usize]) -> Output {
        let list = self.pool.outside().join("left-out");
        let lines: String = left_out.iter().map(|at| format!("{at}\n")).collect();
        std::fs::write(&list, lines).unwrap();
        let mut command = match under_run {
            true => {
                let mut run = varve();
                run.args(["run", "--session-after", "0", "--mount"])
                    .arg(self.pool.mnt())
                    .arg("--")
                    .arg(self.program);
                run
            }
            false => Command::new(self.program),
        };
        command
            .env("VARVE", env!("CARGO_BIN_EXE_varve"))
            .arg(dir)
            .args([
                self.seed.to_string(),
                self.count.to_string(),
                self.name.to_owned(),
            ])
            .arg(&list)
            .output()
            .expect("the program starts")
    }

    fn fails(&self, left_out: &[usize]) -> bool {
        !self
            .run(&self.pool.mnt(), self.under_run, left_out)
            .status
            .success()
    }

    /// Leaves out what a failure does not need, in ever smaller parts; returns what is left.
    fn shrink(&self, upto: usize) -> Vec<usize> {
        let mut left: Vec<usize> = (0..=upto.min(self.count - 1)).collect();
        let (mut part, mut runs) = (left.len().div_ceil(2), 0);
        while part >= 1 && runs < SHRINKS {
            let mut at = 0;
            while at < left.len() && runs < SHRINKS {
                let without: Vec<_> = [&left[..at], &left[(at + part).min(left.len())..]].concat();
                let left_out: Vec<_> = (0..self.count).filter(|op| !without.contains(op)).collect();
                runs += 1;
                match self.fails(&left_out) {
                    true => left = without,
                    false => at += part,
                }
            }
            part /= 2;
        }
        left
    }

    /// Does all operations, and panics with the fewest that fail.
    fn check(&self) -> String {
        let output = self.run(&self.pool.mnt(), self.under_run, &[]);
        let done = String::from_utf8_lossy(&output.stdout).into_owned();
        if output.status.success() {
            return done;
        }
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = done.lines().last().and_then(|line| line.split(' ').next());
        let left = self.shrink(last.and_then(|at| at.parse().ok()).unwrap_or(self.count));
        let left_out: Vec<_> = (0..self.count).filter(|op| !left.contains(op)).collect();
        let again = self.run(&self.pool.mnt(), self.under_run, &left_out);
        panic!(
            "{} with seed {}: {}: {why}\nthe operations {left:?} are enough:\n{}{}",
            self.name,
            self.seed,
            output.status,
            String::from_utf8_lossy(&again.stdout),
            String::from_utf8_lossy(&again.stderr)
        );
    }
}

/// Runs the seeds one way; a clean pool at the end.
fn agree(name: &str, under_run: bool) {
    if cannot_mount() {
        return;
    }
    let pool = Pool::up(&["--nvm", "shm:96M", "--ssd", "256M", "--hdd", "0"]);
    let Some(program) = program(&pool) else { return };
    let first = number("VARVE_SHARED_SEED", 1);
    for seed in first..first + number("VARVE_SHARED_SEEDS", 2) {
        let way = Way {
            pool: &pool,
            program: &program,
            name,
            under_run,
            seed,
            count: number("VARVE_SHARED_OPS", 600) as usize,
        };
        let began = std::time::Instant::now();
        let done = way.check();
        println!(
            "{name}, seed {seed}: {} operations, {:.1?}",
            way.count,
            began.elapsed()
        );
        if let Some(beside) = std::env::var_os("VARVE_SHARED_BESIDE").filter(|_| under_run) {
            let other = way.run(Path::new(&beside), false, &[]);
            let other = String::from_utf8_lossy(&other.stdout).into_owned();
            let differs = done.lines().zip(other.lines()).find(|(a, b)| a != b);
            assert!(
                differs.is_none() && done.len() == other.len(),
                "seed {seed}: {differs:?}"
            );
        }
    }
    pool.fsck_clean();
}

#[test]
fn files_that_share_blocks_agree_with_a_model_under_run() {
    agree("clones", true);
}

#[test]
fn files_that_share_blocks_agree_with_a_model_through_the_mount() {
    agree("mount", false);
}
