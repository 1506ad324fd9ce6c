//! Workloads: every sequence of one and two operation kinds over a few shared names (as ACE does), sampled
//! longer ones, random runs.

use crate::model::Model;
use crate::ops::{CLOCK_SECS, Op, Path};

/// A small generator of numbers (splitmix64): equal seeds give equal workloads, on every machine and version.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound` (which is at least 1).
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// One of `items` (not empty).
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

/// Names of files that workloads share.
#[must_use]
pub fn file_paths() -> Vec<Path> {
    vec![
        vec!["f"],
        vec!["g"],
        vec!["d", "f"],
        vec!["d", "h"],
        vec!["e", "f"],
    ]
}

/// Names of directories that workloads share.
#[must_use]
pub fn dir_paths() -> Vec<Path> {
    vec![vec!["d"], vec!["e"], vec!["d", "s"]]
}

/// The operations before the sequences of [`singles`] and [`pairs`].
#[must_use]
pub fn setup() -> Vec<Op> {
    vec![
        Op::Mkdir(vec!["d"]),
        Op::Create(vec!["f"]),
        Op::Write {
            path: vec!["f"],
            offset: 0,
            len: 5000,
            seed: 1,
        },
        Op::Create(vec!["d", "f"]),
        Op::Append {
            path: vec!["d", "f"],
            len: 100,
            seed: 2,
        },
        Op::Mkdir(vec!["e"]),
    ]
}

/// One representative of every operation kind and its interesting variants.
#[must_use]
pub fn singles() -> Vec<Op> {
    vec![
        Op::Create(vec!["g"]),
        Op::Mkdir(vec!["d", "s"]),
        Op::Symlink(vec!["g"]),
        Op::Mkfifo(vec!["g"]),
        Op::Write {
            path: vec!["f"],
            offset: 0,
            len: 4096,
            seed: 3,
        },
        Op::Write {
            path: vec!["f"],
            offset: 4000,
            len: 3000,
            seed: 4,
        },
        Op::Write {
            path: vec!["d", "f"],
            offset: 20_000,
            len: 100,
            seed: 5,
        },
        Op::Append {
            path: vec!["f"],
            len: 700,
            seed: 6,
        },
        Op::Truncate {
            path: vec!["f"],
            size: 1000,
        },
        Op::Truncate {
            path: vec!["f"],
            size: 9000,
        },
        Op::Punch {
            path: vec!["f"],
            offset: 100,
            len: 4500,
        },
        Op::Zero {
            path: vec!["f"],
            offset: 4000,
            len: 6000,
        },
        Op::Allocate {
            path: vec!["f"],
            offset: 4096,
            len: 8192,
        },
        Op::Link(vec!["f"], vec!["g"]),
        Op::Link(vec!["f"], vec!["d", "h"]),
        Op::Unlink(vec!["f"]),
        Op::Unlink(vec!["d", "f"]),
        Op::Rmdir(vec!["e"]),
        Op::Rename(vec!["f"], vec!["g"]),
        Op::Rename(vec!["f"], vec!["d", "f"]),
        Op::Rename(vec!["d"], vec!["e"]),
        Op::Rename(vec!["e"], vec!["d", "s"]),
        Op::RenameNoReplace(vec!["f"], vec!["e", "f"]),
        Op::Exchange(vec!["f"], vec!["d", "f"]),
        Op::Exchange(vec!["d"], vec!["f"]),
        Op::Chmod(vec!["f"], 0o600),
        Op::Chown(vec!["d"], 7, 8),
        Op::SetXattr(vec!["f"], 40, 9),
        Op::SetXattr(vec!["d"], 3000, 10),
        Op::RemoveXattr(vec!["f"]),
        Op::Fsync(vec!["f"]),
        // Later additions stand at the end: the seeds of the others depend on their place.
        Op::Mknod(vec!["g"]),
        Op::Tmpfile {
            path: vec!["g"],
            len: 5000,
            seed: 11,
        },
        Op::ZeroKeep {
            path: vec!["f"],
            offset: 4000,
            len: 6000,
        },
        Op::AllocateKeep {
            path: vec!["f"],
            offset: 4096,
            len: 8192,
        },
        Op::Utimens {
            path: vec!["f"],
            secs: CLOCK_SECS.end,
        },
        Op::Utimens {
            path: vec!["d"],
            secs: -1,
        },
    ]
}

/// All ordered pairs of [`singles`].
#[must_use]
pub fn pairs() -> Vec<[Op; 2]> {
    let singles = singles();
    singles
        .iter()
        .flat_map(|a| singles.iter().map(move |b| [a.clone(), b.clone()]))
        .collect()
}

/// A random operation that can mostly be carried out (about one in six fails, which is part of the test); it
/// is also applied to `model`.
pub fn likely_op(rng: &mut Rng, model: &mut Model) -> Op {
    for _ in 0..8 {
        let op = random_op(rng);
        let refused = model.clone().apply(&op).is_err();
        if !refused || rng.below(14) == 0 {
            let _ = model.apply(&op);
            return op;
        }
    }
    let op = Op::Fsync(Vec::new());
    let _ = model.apply(&op);
    op
}

/// A random operation, whether it can be carried out or not.
pub fn random_op(rng: &mut Rng) -> Op {
    let files = file_paths();
    let dirs = dir_paths();
    let file = rng.pick(&files).clone();
    let other = rng.pick(&files).clone();
    let dir = rng.pick(&dirs).clone();
    let offset = rng.below(30_000);
    let len = 1 + rng.below(9_000);
    let seed = rng.below(250) as u8;
    match rng.below(47) {
        0..=4 => Op::Create(file),
        5..=6 => Op::Mkdir(dir),
        7 => Op::Symlink(file),
        8..=12 => Op::Write {
            path: file,
            offset,
            len: len as u32,
            seed,
        },
        // Whole blocks, which may be overwritten in place.
        13 => Op::Write {
            path: file,
            offset: offset / 4096 * 4096,
            len: (1 + len / 4096) as u32 * 4096,
            seed,
        },
        14..=17 => Op::Append {
            path: file,
            len: (1 + len / 4) as u32,
            seed,
        },
        18..=19 => Op::Truncate {
            path: file,
            size: offset,
        },
        20 => Op::Punch {
            path: file,
            offset,
            len,
        },
        21 => Op::Zero {
            path: file,
            offset,
            len,
        },
        22 => Op::Allocate {
            path: file,
            offset,
            len,
        },
        23..=24 => Op::Link(file, other),
        25..=27 => Op::Unlink(file),
        28..=29 => Op::Rmdir(dir),
        30..=32 => Op::Rename(file, other),
        33 => Op::Rename(dir, rng.pick(&dirs).clone()),
        34 => Op::RenameNoReplace(file, other),
        35 => Op::Exchange(file, other),
        36 => Op::Chmod(file, rng.below(0o1000) as u32),
        37 => Op::SetXattr(file, rng.below(200) as u16, seed),
        38 => Op::RemoveXattr(file),
        39 => Op::Mkfifo(file),
        40 => Op::Mknod(file),
        41..=42 => Op::Tmpfile {
            path: file,
            len: len as u32,
            seed,
        },
        43 => Op::ZeroKeep {
            path: file,
            offset,
            len,
        },
        44 => Op::AllocateKeep {
            path: file,
            offset,
            len,
        },
        45 => Op::Utimens {
            path: if rng.below(2) == 0 { file } else { dir },
            secs: some_secs(rng),
        },
        _ => Op::Fsync(file),
    }
}

/// Seconds that no clock shows: before 1970, long ago, or far ahead.
fn some_secs(rng: &mut Rng) -> i64 {
    let by = rng.below(1_000_000) as i64;
    match rng.below(3) {
        0 => -1 - by,
        1 => by,
        _ => CLOCK_SECS.end + by,
    }
}

/// `count` random operations on an empty file system.
#[must_use]
pub fn random(seed: u64, count: usize) -> Vec<Op> {
    let (mut rng, mut model) = (Rng::new(seed), Model::new());
    (0..count).map(|_| likely_op(&mut rng, &mut model)).collect()
}

#[cfg(test)]
mod tests {
    use super::{pairs, random, setup, singles};
    use crate::model::Model;

    #[test]
    fn every_single_operation_can_run_after_the_setup_or_fails_as_meant() {
        let mut base = Model::new();
        for op in setup() {
            base.apply(&op).expect("the setup runs");
        }
        let failing = singles()
            .iter()
            .filter(|op| base.clone().apply(op).is_err())
            .count();
        assert_eq!(failing, 1, "only removexattr may fail");
        assert_eq!(pairs().len(), singles().len() * singles().len());
    }

    #[test]
    fn random_workload_is_the_same_for_the_same_seed() {
        assert_eq!(random(7, 50), random(7, 50));
        assert_ne!(random(7, 50), random(8, 50));
    }

    #[test]
    fn random_workload_mostly_works_and_sometimes_fails() {
        let mut model = Model::new();
        let failed = random(3, 600)
            .iter()
            .filter(|op| model.apply(op).is_err())
            .count();
        assert!((40..240).contains(&failed), "{failed} of 600");
    }
}
