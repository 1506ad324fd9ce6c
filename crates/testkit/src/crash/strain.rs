//! Random workloads that bring one part of the system to its bounds: several lanes, logs of several chunks, a
//! journal that wraps around, full tiers, files too big for one record. Owns the probabilities; refuses to
//! know the effects.

use super::{Act, Flavour, Script, shared};
use crate::model::Model;
use crate::ops::{Op, write};
use crate::rig::{Policy, Shape};
use crate::workload::{self, Rng, likely_op};
use std::sync::OnceLock;
use varve_format::Tier;
use varve_media::sim::SimMedium;

/// The part that is brought to its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strain {
    /// Two threads of each session, and of the daemon: calls of one entry and of several, `fsync` by either.
    Lanes,
    /// Logs that fill their chunks before they are digested, by two threads.
    LongLog,
    /// Records that wrap around the journal's ring and fill it.
    Ring,
    /// A full SSD and HDD, and units with holes that are filled again.
    FullTiers,
    /// Files of more extents than one record frees: cut, deleted, replaced, deleted while open.
    BigFiles,
    /// Many changes of the bytes of one file in one batch.
    OneFile,
    /// Whole blocks that are overwritten repeatedly, among changes of parts of them.
    Overwrites,
    /// Files that share blocks, written, cut, removed and moved by two sessions.
    Clones,
    /// Files with equal bytes whose blocks are shared after a comparison and become their own again, written,
    /// cut, removed and moved by two sessions.
    Dedup,
    /// Tiers that get a second device, are emptied of one, lose it and get it again, while two sessions work and
    /// data moves.
    Devices,
}

const KIB: u64 = 1 << 10;

fn many_names() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| (0..110).map(|i| format!("n{i}")).collect())
}

fn short_names() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| (0..16).map(|i| format!("t{i}")).collect())
}

impl Strain {
    /// All strains.
    pub const ALL: [Self; 10] = [
        Self::Lanes,
        Self::LongLog,
        Self::Ring,
        Self::FullTiers,
        Self::BigFiles,
        Self::OneFile,
        Self::Overwrites,
        Self::Clones,
        Self::Dedup,
        Self::Devices,
    ];

    /// A pool that is small enough for the strain.
    #[must_use]
    pub const fn shape(self, medium: SimMedium) -> Shape {
        match self {
            Self::Lanes | Self::Ring | Self::BigFiles | Self::OneFile => Shape::tiny(medium),
            // All data is in NVM.
            Self::Overwrites => Shape::tiny(medium).with(Policy::Product),
            Self::Clones | Self::Dedup | Self::Devices => Shape::tiny(medium).with(Policy::Rotate),
            Self::LongLog => Shape::small(medium),
            Self::FullTiers => Shape {
                blocks_bytes: 1024 * KIB,
                ..Shape::tiny(medium).with(Policy::Slow)
            },
        }
    }

    /// Generates a workload from a seed.
    #[must_use]
    pub fn script(self, seed: u64) -> Script {
        let mut work = Work::new(seed ^ (0x57a1_0000 + self as u64));
        match self {
            Self::Lanes => work.lanes(),
            Self::LongLog => work.long_log(),
            Self::Ring => work.ring(),
            Self::FullTiers => work.full_tiers(),
            Self::BigFiles => work.big_files(),
            Self::OneFile => work.one_file(),
            Self::Overwrites => work.overwrites(),
            Self::Clones => work.clones(),
            Self::Dedup => work.dedup(),
            Self::Devices => return devices(seed),
        }
        work.script
    }
}

/// Work of two sessions with devices that come and go in between. Each other workload begins with two devices.
fn devices(seed: u64) -> Script {
    let mut rng = Rng::new(seed ^ 0xde71_ce00);
    let mut script = shared(seed, 2, 20, Flavour::Moving);
    let (tier, own, second) = match rng.below(3) {
        0 => (Tier::Hdd, "hdd", "hdd-2"),
        _ => (Tier::Ssd, "ssd", "ssd-2"),
    };
    if seed.is_multiple_of(2) {
        script
            .before
            .extend([Act::AddDevice(tier), Act::Pin(tier), Act::Place]);
    }
    let gone = if rng.below(2) == 0 { own } else { second };
    let meanwhile = if rng.below(2) == 0 {
        Act::Restart
    } else {
        Act::Digest
    };
    let parts = [
        vec![Act::AddDevice(tier), Act::Pin(tier), Act::Digest, Act::Place],
        vec![Act::RemoveDevice(gone), Act::Place, Act::Digest],
        vec![meanwhile, Act::Place, Act::Checkpoint, Act::Place, Act::Place],
        vec![Act::AddDevice(tier), Act::Digest, Act::Place],
        // Ended again, each other time.
        vec![Act::RemoveDevice(second), Act::Place, Act::RemoveDevice(second)],
        vec![Act::Place, Act::Digest, Act::Place],
    ];
    let count = parts.len();
    let len = script.acts.len();
    for (number, part) in parts.into_iter().enumerate().rev() {
        let at = len * (number + 1) / (count + 1);
        script.acts.splice(at..at, part);
    }
    script
}

/// A script under construction, with the model of its effects.
struct Work {
    rng: Rng,
    model: Model,
    script: Script,
    /// Whether added acts are recorded.
    recorded: bool,
}

impl Work {
    /// Creates the usual files, and digests.
    fn new(seed: u64) -> Self {
        let mut work = Self {
            rng: Rng::new(seed),
            model: Model::new(),
            script: Script {
                before: Vec::new(),
                acts: Vec::new(),
            },
            recorded: false,
        };
        workload::setup().into_iter().for_each(|op| work.op(op));
        work.act(Act::Digest);
        work
    }

    fn act(&mut self, act: Act) {
        let acts = if self.recorded {
            &mut self.script.acts
        } else {
            &mut self.script.before
        };
        acts.push(act);
    }

    fn op(&mut self, op: Op) {
        let _ = self.model.apply(&op);
        self.act(Act::Op(op));
    }

    /// Adds an operation by the first or the second thread of a session.
    fn by_some_thread(&mut self, session: usize, op: Op) {
        let act = if self.rng.below(2) == 0 {
            Act::By(session, op)
        } else {
            Act::Beside(session, op)
        };
        self.act(act);
    }

    fn digest(&mut self) {
        let act = if self.rng.below(2) == 0 {
            Act::Digest
        } else {
            Act::DigestBeside
        };
        self.act(act);
    }

    /// Tries a few random groups of calls in one transaction; returns the first that can be carried out.
    fn some_group(&mut self) -> Option<Op> {
        for _ in 0..6 {
            let files = workload::file_paths();
            let (a, b) = (self.rng.pick(&files).clone(), self.rng.pick(&files).clone());
            let (len, seed) = (1 + self.rng.below(9000) as u32, self.rng.below(250) as u8);
            let offset = self.rng.below(6000);
            let written = |path: &crate::ops::Path| Op::Write {
                path: path.clone(),
                offset,
                len,
                seed,
            };
            let group = match self.rng.below(4) {
                0 => vec![Op::Create(a.clone()), written(&a)],
                1 => vec![written(&a), written(&b)],
                2 => vec![written(&a), Op::Rename(a, b)],
                _ => vec![Op::Unlink(a.clone()), Op::Link(b, a)],
            };
            let group = Op::Together(group);
            if self.model.clone().apply(&group).is_ok() {
                let _ = self.model.apply(&group);
                return Some(group);
            }
        }
        None
    }

    fn lanes(&mut self) {
        self.recorded = true;
        let sessions = 1 + self.rng.below(2);
        while self.script.acts.len() < 20 {
            // Mostly in one session: its threads do not wait for its leases.
            let session = (self.rng.below(8) / 7 * (sessions - 1)) as usize;
            match self.rng.below(20) {
                0..=1 => self.digest(),
                2 => self.act(Act::Checkpoint),
                3 => self.act(Act::Rest),
                4..=6 => self.by_some_thread(session, Op::Fsync(Vec::new())),
                7..=10 => {
                    if let Some(group) = self.some_group() {
                        self.by_some_thread(session, group);
                    }
                }
                _ => {
                    let op = likely_op(&mut self.rng, &mut self.model);
                    self.by_some_thread(session, op);
                }
            }
        }
        self.digest();
        self.act(Act::Checkpoint);
    }

    fn long_log(&mut self) {
        self.op(Op::Create(vec!["a"]));
        let mut logged = 0;
        while logged < 4900 * KIB {
            // Recording begins when the first thread's second chunk is nearly full.
            self.recorded = logged > 3900 * KIB;
            match self.rng.below(8) {
                0..=3 => {
                    // Writes overlap, so that the file stays small and is quickly compared.
                    let offset = self.rng.below(50 * KIB);
                    let len = 50 * KIB + self.rng.below(90 * KIB);
                    let op = write("a", offset, len as u32, self.rng.below(250) as u8);
                    let _ = self.model.apply(&op);
                    if self.rng.below(6) == 0 {
                        self.act(Act::Beside(0, op));
                    } else {
                        logged += len;
                        self.act(Act::Op(op));
                    }
                }
                4 => self.by_some_thread(0, Op::Fsync(Vec::new())),
                _ => {
                    let op = likely_op(&mut self.rng, &mut self.model);
                    self.by_some_thread(0, op);
                }
            }
        }
        self.by_some_thread(0, Op::Fsync(Vec::new()));
        self.digest();
    }

    /// Changes many files at once and digests: a record of some ten KiB.
    fn big_record(&mut self) {
        let names = many_names();
        for half in names.chunks(names.len() / 2) {
            let count = half.len() - self.rng.below(20) as usize;
            let (offset, seed) = (self.rng.below(9000), self.rng.below(250) as u8);
            let written = half[..count].iter().map(|name| Op::Write {
                path: vec!["n", name.as_str()],
                offset,
                len: 200,
                seed,
            });
            self.op(Op::Together(written.collect()));
        }
        self.digest();
        // Afterwards nobody reads the freed blocks.
        self.act(Act::Rest);
    }

    fn ring(&mut self) {
        self.op(Op::Mkdir(vec!["n"]));
        for name in many_names() {
            self.op(Op::Create(vec!["n", name.as_str()]));
        }
        // About one lap of the ring; its tail follows, or stays until the ring is full.
        let (records, often) = (22 + self.rng.below(14), self.rng.below(2) == 0);
        for _ in 0..records {
            self.big_record();
            if often && self.rng.below(6) == 0 {
                self.act(Act::Checkpoint);
            }
        }
        self.recorded = true;
        for _ in 0..6 {
            if self.rng.below(4) == 0 {
                let op = likely_op(&mut self.rng, &mut self.model);
                self.act(Act::Op(op));
                self.digest();
            } else {
                self.big_record();
            }
        }
        self.act(Act::Checkpoint);
    }

    /// Rewrites one of the files, or creates it.
    fn refill(&mut self) {
        let name = self.rng.pick(short_names()).as_str();
        if self.model.clone().apply(&Op::Create(vec![name])).is_ok() {
            self.op(Op::Create(vec![name]));
        }
        let (len, seed) = (40 * KIB + self.rng.below(120 * KIB), self.rng.below(250) as u8);
        let offset = self.rng.below(2) * 8192;
        self.op(write(name, offset, len as u32, seed));
    }

    fn full_tiers(&mut self) {
        for (index, name) in short_names().iter().enumerate() {
            self.op(Op::Create(vec![name.as_str()]));
            let (len, seed) = (90 * KIB + self.rng.below(90 * KIB), self.rng.below(250) as u8);
            self.op(write(name, 0, len as u32, seed));
            if index % 4 == 3 {
                self.act(Act::Digest);
            }
        }
        for round in 0..4 {
            self.recorded = round >= 2;
            // Neighbouring files, so that whole units become empty, or scattered ones.
            let (first, neighbours) = (self.rng.below(16), self.rng.below(2) == 0);
            let kind = self.rng.below(4);
            for i in 0..5 + self.rng.below(5) {
                let (at, kind) = if neighbours {
                    (first + i, kind)
                } else {
                    (self.rng.next_u64() % 16, self.rng.below(4))
                };
                let path = vec![short_names()[at as usize % 16].as_str()];
                let op = match kind {
                    0 => Op::Truncate {
                        path,
                        size: self.rng.below(2) * self.rng.below(40_000),
                    },
                    1 => Op::Punch {
                        path,
                        offset: 4096 * self.rng.below(8),
                        len: 4096 * (2 + self.rng.below(16)),
                    },
                    _ => Op::Unlink(path),
                };
                if self.model.clone().apply(&op).is_ok() {
                    self.op(op);
                }
            }
            self.act(Act::Digest);
            // Afterwards nobody reads the freed blocks.
            self.act(Act::Rest);
            for _ in 0..3 + self.rng.below(3) {
                self.refill();
            }
            self.act(Act::Digest);
        }
    }

    fn one_file(&mut self) {
        self.fragments("a");
        self.recorded = true;
        for round in 0..4 {
            // A small file, and one of many extents.
            let (name, most) = [("f", 20_000), ("a", 2_400_000)][round % 2];
            for _ in 0..10 {
                let path = vec![name];
                let (offset, len) = (self.rng.below(most), 1 + self.rng.below(9000));
                let seed = self.rng.below(250) as u8;
                let op = match self.rng.below(7) {
                    0..=2 => Op::Truncate { path, size: offset },
                    3 => Op::Punch { path, offset, len },
                    4 => Op::Zero { path, offset, len },
                    5 => Op::Append {
                        path,
                        len: len as u32,
                        seed,
                    },
                    _ => write(name, offset, len as u32, seed),
                };
                self.op(op);
            }
            self.digest();
        }
    }

    fn overwrites(&mut self) {
        let names = ["a", "b"];
        for name in names {
            let seed = self.rng.below(250) as u8;
            self.op(Op::Create(vec![name]));
            self.op(write(name, 0, 12 * 4096, seed));
        }
        self.act(Act::Digest);
        self.recorded = true;
        let sessions = 1 + self.rng.below(3) / 2;
        for _ in 0..4 {
            for _ in 0..3 + self.rng.below(4) {
                let session = (self.rng.below(8) / 7 * (sessions - 1)) as usize;
                let name = self.rng.pick(&names);
                let path = vec![*name];
                let (block, seed) = (self.rng.below(10), self.rng.below(250) as u8);
                let whole = |blocks: u64| write(name, block * 4096, (blocks * 4096) as u32, seed);
                let (offset, len) = (self.rng.below(48_000), 1 + self.rng.below(6000));
                let op = match self.rng.below(16) {
                    0..=6 => whole(1),
                    7..=9 => whole(1 + self.rng.below(3)),
                    10 => write(name, offset, len as u32, seed),
                    11 => Op::Truncate { path, size: offset },
                    12 => Op::Punch { path, offset, len },
                    13 => Op::Zero { path, offset, len },
                    14 => {
                        let other = if *name == "a" { "b" } else { "a" };
                        Op::Together(vec![whole(1), write(other, block * 4096, 4096, seed)])
                    }
                    _ => Op::Fsync(Vec::new()),
                };
                let _ = self.model.apply(&op);
                self.by_some_thread(session, op);
            }
            self.digest();
            if self.rng.below(3) == 0 {
                self.act(Act::Rest);
            }
        }
    }

    /// Records rounds of operations of one or two sessions, nearly all possible ones; each round ends with
    /// one of `ends` or a digest.
    fn rounds(&mut self, ends: &[Act], mut some: impl FnMut(&mut Self) -> Op) {
        self.act(Act::Digest);
        self.recorded = true;
        let sessions = 1 + self.rng.below(2);
        for _ in 0..4 {
            for _ in 0..3 + self.rng.below(3) {
                let session = self.rng.below(sessions) as usize;
                let op = self.possible(&mut some);
                let _ = self.model.apply(&op);
                self.by_some_thread(session, op);
            }
            match ends.get(self.rng.below(ends.len() as u64 + 2) as usize) {
                Some(end) => self.act(end.clone()),
                None => self.digest(),
            }
        }
    }

    /// Returns an operation that can be carried out, and now and then one that cannot.
    fn possible(&mut self, some: &mut impl FnMut(&mut Self) -> Op) -> Op {
        let mut op = Op::Fsync(Vec::new());
        for _ in 0..6 {
            op = some(self);
            if self.model.clone().apply(&op).is_ok() || self.rng.below(12) == 0 {
                break;
            }
        }
        op
    }

    fn clones(&mut self) {
        let names = ["a", "b", "c"];
        for name in names {
            let (blocks, seed) = (4 + self.rng.below(8), self.rng.below(250) as u8);
            let len = blocks * 4096 + self.rng.below(2) * 77;
            self.op(Op::Create(vec![name]));
            self.op(write(name, 0, len as u32, seed));
        }
        self.rounds(&[Act::Place, Act::Rest, Act::Checkpoint], |work| {
            work.clone_or_change(names)
        });
    }

    /// Returns an operation on one or two of the files.
    fn clone_or_change(&mut self, names: [&'static str; 3]) -> Op {
        let (name, other) = (*self.rng.pick(&names), *self.rng.pick(&names));
        let path = vec![name];
        let (block, blocks) = (self.rng.below(10) * 4096, self.rng.below(5) * 4096);
        let (offset, len) = (self.rng.below(40_000), 1 + self.rng.below(9000));
        let seed = self.rng.below(250) as u8;
        match self.rng.below(16) {
            0..=6 => Op::Clone {
                from: path,
                offset: self.rng.below(3) * 4096,
                to: vec![other],
                to_offset: block,
                len: blocks,
            },
            7..=8 => write(name, block, 4096, seed),
            9 => write(name, offset, len as u32, seed),
            10 => Op::Truncate { path, size: offset },
            11 => Op::Punch { path, offset, len },
            12 => Op::Zero { path, offset, len },
            13 => Op::Unlink(path),
            14 => Op::Create(path),
            _ => Op::Fsync(Vec::new()),
        }
    }

    fn dedup(&mut self) {
        let names = ["a", "b", "c"];
        let seed = self.rng.below(250) as u8;
        for name in names {
            let len = (6 + self.rng.below(8)) * 4096 + self.rng.below(2) * 77;
            self.op(Op::Create(vec![name]));
            self.op(write(name, 0, len as u32, seed));
        }
        self.rounds(&[Act::Place, Act::Rest, Act::Checkpoint, Act::Tick], |work| {
            work.dedupe_or_change(names, seed)
        });
    }

    /// Returns an operation on one or two of the files, whose bytes are mostly those of `seed`.
    fn dedupe_or_change(&mut self, names: [&'static str; 3], seed: u8) -> Op {
        let (name, other) = (*self.rng.pick(&names), *self.rng.pick(&names));
        let path = vec![name];
        let (block, blocks) = (self.rng.below(10) * 4096, 1 + self.rng.below(6));
        let (offset, len) = (self.rng.below(40_000), 1 + self.rng.below(9000));
        let different = self.rng.below(250) as u8;
        match self.rng.below(21) {
            18..=20 => Op::Defrag {
                path,
                offset: block * self.rng.below(2),
                len: blocks * 4096 * self.rng.below(2),
            },
            0 | 1 => Op::DedupeBlocks {
                from: path,
                to: vec![other],
                offset: block,
                len: blocks * 4096,
            },
            2..=5 => Op::Dedupe {
                from: path,
                offset: block,
                to: vec![other],
                to_offset: block,
                len: blocks * 4096,
            },
            6..=9 => Op::Unshare {
                path,
                offset: block * self.rng.below(2),
                len: blocks * 4096 * self.rng.below(2),
            },
            10 => Op::Clone {
                from: path,
                offset: block,
                to: vec![other],
                to_offset: self.rng.below(10) * 4096,
                len: blocks * 4096,
            },
            11 => write(name, block, (blocks * 4096) as u32, seed),
            12 => write(name, offset, len as u32, different),
            13 => Op::Truncate { path, size: offset },
            14 => Op::Punch { path, offset, len },
            15 => Op::Unlink(path),
            16 => Op::Create(path),
            _ => Op::Fsync(Vec::new()),
        }
    }

    /// Makes a file with as many extents as writes.
    fn fragments(&mut self, path: &'static str) {
        self.op(Op::Create(vec![path]));
        for i in 0..260 + self.rng.below(60) {
            self.op(write(path, i * 8192, 4096, i as u8));
        }
        self.act(Act::Digest);
    }

    fn big_files(&mut self) {
        self.fragments("a");
        self.fragments("b");
        self.recorded = true;
        let mut left = vec!["a", "b"];
        while let Some(path) = left.pop() {
            match self.rng.below(5) {
                0 => {
                    let size = self.rng.below(9000);
                    self.op(Op::Truncate {
                        path: vec![path],
                        size,
                    });
                }
                1 => self.op(Op::Unlink(vec![path])),
                2 => {
                    self.op(Op::Create(vec!["c"]));
                    self.op(Op::Rename(vec!["c"], vec![path]));
                }
                _ => {
                    self.act(Act::Hold(vec![path]));
                    self.op(Op::Unlink(vec![path]));
                    self.digest();
                    let op = likely_op(&mut self.rng, &mut self.model);
                    self.act(Act::Op(op));
                    self.act(Act::LetGo);
                    self.act(Act::Tick);
                }
            }
            self.digest();
        }
        self.act(Act::Rest);
        self.act(Act::Checkpoint);
    }
}

#[cfg(test)]
mod tests {
    use super::Strain;

    #[test]
    fn strain_is_the_same_for_the_same_seed_and_another_for_another() {
        for strain in Strain::ALL {
            assert_eq!(strain.script(3), strain.script(3));
            assert_ne!(strain.script(3), strain.script(4));
        }
    }
}
