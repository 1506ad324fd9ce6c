//! Writes smaller than a block to cold data on one device: blocking, or kept as patches. The real
//! [`PatchPool`] decides; the device and the map of the file (a leaf for each 4 MiB, which must be read
//! before a block can be) are simulated.
//!
//! Blocks that are fetched, or written as a whole, stay in fast memory in all variants; nothing is written
//! back during a run.

use super::device::{Device, Io, Model};
use crate::Op;
use crate::patch::{Fetching, PatchPool, PatchRead, PatchedBlock, Wrote};
use hashbrown::{HashMap, HashSet};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

const BLOCK: u32 = 4096;
/// Blocks that a leaf of the map covers.
const LEAF: u64 = 1024;
/// Duration of a call that waits for nothing, in nanoseconds.
const CALL_NS: u64 = 8000;

/// Parameters of a run.
#[derive(Debug, Clone)]
pub struct Writes {
    /// When blocks are fetched. `None`: the writer waits for each fetch.
    pub how: Option<Fetching>,
    /// Bytes of a write (and of a read).
    pub bytes: u32,
    /// Whether writes are sequential or random.
    pub sequential: bool,
    /// Whether a second process reads at random.
    pub reader: bool,
    /// Percentage of the reader's reads that go to recently written blocks.
    pub reread_percent: u32,
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Limit of the bytes of patches.
    pub limit_bytes: u64,
    /// Duration of the run.
    pub seconds: u64,
}

impl Default for Writes {
    /// The paper's experiment: a file of 5 GB, patches of 64 MiB, a minute.
    fn default() -> Self {
        Self {
            how: None,
            bytes: 2048,
            sequential: false,
            reader: false,
            reread_percent: 0,
            file_bytes: 5 << 30,
            limit_bytes: 64 << 20,
            seconds: 60,
        }
    }
}

/// Results of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WritesReport {
    /// Writes that ended.
    pub writes: u64,
    /// Reads that ended.
    pub reads: u64,
    /// Reads that patches answered.
    pub covered: u64,
    /// Blocks fetched.
    pub fetches: u64,
    /// Writes that waited for memory.
    pub waits: u64,
    /// Largest number of bytes of patches.
    pub most_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Write,
    Read,
    Ended(usize),
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    block: u64,
    /// Whether the leaf has to be read first.
    leaf: bool,
    /// Whether the writer waits: for the leaf, or (blocking) for the block.
    writer: bool,
    reader: bool,
}

struct Run<'m> {
    plan: &'m Writes,
    device: Device,
    rng: fastrand::Rng,
    pool: Option<PatchPool<u64>>,
    patched: HashMap<u64, PatchedBlock<u64>>,
    present: HashSet<u64>,
    leaves: HashSet<u64>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    reading: Vec<Reading>,
    recent: VecDeque<u64>,
    now_ns: u64,
    sent: u64,
    at: u64,
    seq: u64,
    /// The waiting write (block and offset), and whether its retry is scheduled.
    stuck: Option<(u64, u32)>,
    waking: bool,
    report: WritesReport,
}

impl Writes {
    /// Runs the experiment on a device.
    #[must_use]
    pub fn run(&self, model: &Model) -> WritesReport {
        let mut run = Run {
            plan: self,
            device: Device::new(model.clone().sized(self.file_bytes * 2)),
            rng: fastrand::Rng::with_seed(7),
            pool: self.how.map(|how| PatchPool::new(how, self.limit_bytes)),
            patched: HashMap::new(),
            present: HashSet::new(),
            leaves: HashSet::new(),
            events: BinaryHeap::new(),
            reading: Vec::new(),
            recent: VecDeque::new(),
            now_ns: 0,
            sent: 0,
            at: 0,
            seq: 0,
            stuck: None,
            waking: false,
            report: WritesReport::default(),
        };
        run.after(0, Event::Write);
        if self.reader {
            run.after(0, Event::Read);
        }
        let end_ns = self.seconds * 1_000_000_000;
        while let Some(Reverse((ns, _, event))) = run.events.pop()
            && ns < end_ns
        {
            run.now_ns = ns;
            match event {
                Event::Write => run.write(),
                Event::Read => run.read(),
                Event::Ended(tag) => run.ended(tag),
            }
            run.fetch();
        }
        run.report
    }
}

impl Run<'_> {
    fn after(&mut self, ns: u64, event: Event) {
        self.sent += 1;
        self.events.push(Reverse((self.now_ns + ns, self.sent, event)));
    }

    fn blocks(&self) -> u64 {
        self.plan.file_bytes / u64::from(BLOCK)
    }

    fn place(&mut self) -> (u64, u32) {
        if let Some(place) = self.stuck.take() {
            return place;
        }
        let bytes = u64::from(self.plan.bytes);
        let slots = self.plan.file_bytes / bytes;
        let slot = if self.plan.sequential {
            self.at % slots
        } else {
            self.rng.u64(0..slots)
        };
        self.at += 1;
        let byte = slot * bytes;
        (byte / u64::from(BLOCK), (byte % u64::from(BLOCK)) as u32)
    }

    fn wrote(&mut self) {
        self.report.writes += 1;
        self.after(CALL_NS, Event::Write);
    }

    fn write(&mut self) {
        self.waking = false;
        let (block, from) = self.place();
        self.recent.push_back(block);
        if self.recent.len() > 64 {
            self.recent.pop_front();
        }
        if self.plan.bytes == BLOCK || self.present.contains(&block) {
            self.present.insert(block);
            return self.wrote();
        }
        if self.pool.is_none() {
            // The writer waits for the block, and continues when it was fetched.
            self.stuck = Some((block, from));
            return self.start(block, true, false);
        }
        self.patch(block, from);
    }

    fn patch(&mut self, block: u64, from: u32) {
        let Some(pool) = &mut self.pool else { return };
        let state = self
            .patched
            .entry(block)
            .or_insert_with(|| PatchedBlock::new(block, BLOCK));
        self.seq += 1;
        let change = state.write(from, &vec![1; self.plan.bytes as usize], self.seq);
        let mut after = state.clone();
        after.commit_write(change, || block);
        if after.patches().is_empty() {
            // The block was overwritten as a whole.
            self.patched.remove(&block);
            self.present.insert(block);
            pool.gone(block);
            return self.wrote();
        }
        let answer = pool.wrote(block, after.patch_bytes());
        self.report.most_bytes = self.report.most_bytes.max(pool.stats().bytes);
        match answer {
            Wrote::Wait => {
                self.report.waits += 1;
                self.stuck = Some((block, from));
                if state.patches().is_empty() {
                    self.patched.remove(&block);
                }
            }
            Wrote::Kept => {
                *state = after;
                self.wrote();
            }
            Wrote::KeptAndFetch => {
                *state = after;
                // The map is looked up on the writer's path.
                let known = self.leaves.contains(&(block / LEAF));
                self.start(block, !known, false);
                if known {
                    self.wrote();
                }
            }
        }
    }

    fn read(&mut self) {
        let again = self.rng.u32(0..100) < self.plan.reread_percent && !self.recent.is_empty();
        let block = if again {
            self.recent[self.rng.usize(0..self.recent.len())]
        } else {
            self.rng.u64(0..self.blocks())
        };
        let from = if again && self.plan.bytes < BLOCK {
            // A written range, if it still is a patch.
            let patch = self.patched.get(&block).and_then(|state| state.patches().first());
            patch.map_or(0, |patch| patch.from)
        } else {
            0
        };
        let bytes = self.plan.bytes.min(BLOCK - from);
        let covered = self.patched.get(&block).map(|state| state.read(from, bytes));
        let answered = matches!(covered, Some(PatchRead::Covered(_)));
        if answered || self.present.contains(&block) {
            self.report.covered += u64::from(answered);
            self.report.reads += 1;
            return self.after(CALL_NS, Event::Read);
        }
        if let Some(pool) = &mut self.pool
            && pool.has(block)
            && !pool.read(block)
        {
            // A fetch is in progress: wait for it.
            if let Some(reading) = self.reading.iter_mut().find(|reading| reading.block == block) {
                reading.reader = true;
                return;
            }
        }
        self.start(block, false, true);
    }

    /// Starts the fetch of a block, its leaf first.
    fn start(&mut self, block: u64, writer: bool, reader: bool) {
        let leaf = self.leaves.insert(block / LEAF);
        let tag = self.reading.len();
        self.reading.push(Reading {
            block,
            leaf,
            writer,
            reader,
        });
        self.submit(tag);
    }

    fn submit(&mut self, tag: usize) {
        let reading = self.reading[tag];
        let at = if reading.leaf {
            self.plan.file_bytes + reading.block / LEAF * u64::from(BLOCK)
        } else {
            reading.block * u64::from(BLOCK)
        };
        let io = Io {
            tag,
            op: Op::Read,
            at,
            bytes: BLOCK,
            background: false,
            since_ns: self.now_ns,
        };
        self.device.submit(io, self.now_ns);
        self.begin();
    }

    fn begin(&mut self) {
        let mut started = Vec::new();
        self.device.start(self.now_ns, &mut self.rng, &mut started);
        for piece in started {
            self.sent += 1;
            self.events
                .push(Reverse((piece.ends_ns, self.sent, Event::Ended(piece.tag))));
        }
    }

    fn fetch(&mut self) {
        while let Some((block, _)) = self.pool.as_mut().and_then(PatchPool::next_fetch) {
            self.start(block, false, false);
        }
    }

    fn ended(&mut self, tag: usize) {
        self.device.ended(false, true, self.now_ns);
        let reading = self.reading[tag];
        if reading.leaf {
            self.reading[tag].leaf = false;
            if reading.writer && self.pool.is_some() {
                // The fetch is in progress: the writer continues.
                self.reading[tag].writer = false;
                self.wrote();
            }
            return self.submit(tag);
        }
        self.begin();
        self.reading[tag].block = u64::MAX;
        self.report.fetches += 1;
        self.present.insert(reading.block);
        self.patched.remove(&reading.block);
        if let Some(pool) = &mut self.pool {
            pool.fetched(reading.block, 0);
            if self.stuck.is_some() && !std::mem::replace(&mut self.waking, true) {
                self.after(0, Event::Write);
            }
        }
        if reading.writer {
            self.after(0, Event::Write);
        }
        if reading.reader {
            self.report.reads += 1;
            self.after(CALL_NS, Event::Read);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::models;

    fn run(how: Option<Fetching>, plan: Writes) -> WritesReport {
        Writes { how, ..plan }.run(&models::sata_disk())
    }

    fn short() -> Writes {
        Writes {
            bytes: 1024,
            seconds: 5,
            ..Writes::default()
        }
    }

    #[test]
    fn lazy_sequential_writes_fetch_nothing() {
        let plan = Writes {
            sequential: true,
            ..short()
        };
        let lazy = run(Some(Fetching::Lazy), plan.clone());
        assert_eq!(lazy.fetches, 0);
        let blocking = run(None, plan);
        assert!(blocking.fetches > 0 && lazy.writes > blocking.writes);
    }

    #[test]
    fn random_writes_do_not_wait_for_the_disk() {
        let blocking = run(None, short());
        let background = run(Some(Fetching::AsyncBackground), short());
        assert!(
            background.writes > 20 * blocking.writes,
            "{background:?} {blocking:?}"
        );
    }

    #[test]
    fn lazy_at_its_limit_is_no_slower_than_async() {
        let plan = Writes {
            limit_bytes: 1 << 20,
            ..short()
        };
        let lazy = run(Some(Fetching::Lazy), plan.clone());
        let background = run(Some(Fetching::AsyncBackground), plan.clone());
        assert!(lazy.most_bytes <= plan.limit_bytes && lazy.waits > 0, "{lazy:?}");
        assert!(
            lazy.writes as f64 >= 0.95 * background.writes as f64,
            "{lazy:?} {background:?}"
        );
    }

    #[test]
    fn reads_of_what_was_just_written_need_no_io() {
        let plan = Writes {
            reader: true,
            reread_percent: 100,
            ..short()
        };
        let lazy = run(Some(Fetching::Lazy), plan);
        assert!(lazy.covered * 10 > lazy.reads * 9, "{lazy:?}");
    }
}
