//! Scheduling of fetches of patched blocks, and the memory limit of their patches. Owns the order and the
//! count; moves no bytes.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::hash::Hash;

/// The time at which a partly overwritten block is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fetching {
    /// At once, sent by the writer; the write does not wait for it (NBW-Async-FG).
    AsyncForeground,
    /// At once, by background threads (NBW-Async-BG).
    AsyncBackground,
    /// When it is read beyond its patches, is moved, or memory is short; else never (NBW-Lazy).
    Lazy,
}

/// The reason for a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// A reader waits for it.
    Read,
    /// The policy fetches every written block.
    Written,
    /// Memory for patches is short, and the block is the oldest.
    Short,
}

/// Answer to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    /// The write is kept as a patch.
    Kept,
    /// The write is kept, and the writer itself starts the fetch.
    KeptAndFetch,
    /// Memory is exhausted: the write stays in the log until a fetch has ended.
    Wait,
}

/// Figures for operators.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PatchStats {
    /// Bytes of patches.
    pub bytes: u64,
    /// Limit of `bytes`.
    pub limit_bytes: u64,
    /// Blocks with patches.
    pub blocks: u64,
    /// Fetches begun, by [`Why`].
    pub fetches: [u64; 3],
    /// Blocks that needed no fetch: overwritten as a whole, or gone.
    pub saved: u64,
    /// Writes that had to wait.
    pub waits: u64,
}

#[derive(Debug)]
struct Entry {
    age: u64,
    bytes: u64,
    fetching: bool,
}

/// Share of the limit from which `lazy` fetches the oldest blocks in the background. The paper's version
/// waits for the full limit, and is slower than `async` then.
const SHORT: f64 = 0.75;
/// Most fetches in flight, whatever their reason: the number that a disk or an SSD can order and serve at
/// once.
const FETCHES: usize = 32;
/// Memory of an entry beside its bytes.
const ENTRY_BYTES: u64 = 64;

/// All blocks with patches.
#[derive(Debug)]
pub struct PatchPool<K> {
    how: Fetching,
    limit_bytes: u64,
    blocks: BTreeMap<K, Entry>,
    order: BTreeMap<u64, K>,
    wanted: VecDeque<(K, Why)>,
    under_way: usize,
    age: u64,
    stats: PatchStats,
}

impl<K: Ord + Copy + Hash> PatchPool<K> {
    /// An empty pool. The default limit is 64 MiB.
    #[must_use]
    pub fn new(how: Fetching, limit_bytes: u64) -> Self {
        Self {
            how,
            limit_bytes,
            blocks: BTreeMap::new(),
            order: BTreeMap::new(),
            wanted: VecDeque::new(),
            under_way: 0,
            age: 0,
            stats: PatchStats {
                limit_bytes,
                ..PatchStats::default()
            },
        }
    }

    /// Decides on a write that would leave the block with `bytes` of patches in total. Unless the answer is
    /// [`Wrote::Wait`] the write is counted.
    pub fn wrote(&mut self, block: K, bytes: u64) -> Wrote {
        let (old, new) = self
            .blocks
            .get(&block)
            .map_or((0, true), |entry| (entry.bytes, false));
        let more = bytes.saturating_sub(old) + if new { ENTRY_BYTES } else { 0 };
        if self.stats.bytes + more > self.limit_bytes {
            self.stats.waits += 1;
            return Wrote::Wait;
        }
        self.stats.bytes = self.stats.bytes + more - old.saturating_sub(bytes);
        if new {
            self.age += 1;
            self.order.insert(self.age, block);
            let entry = Entry {
                age: self.age,
                bytes,
                fetching: false,
            };
            self.blocks.insert(block, entry);
            self.stats.blocks += 1;
        } else if let Some(entry) = self.blocks.get_mut(&block) {
            entry.bytes = bytes;
        }
        match self.how {
            Fetching::AsyncForeground if new => {
                self.begin(block, Why::Written);
                Wrote::KeptAndFetch
            }
            Fetching::AsyncBackground if new => {
                self.wanted.push_back((block, Why::Written));
                Wrote::Kept
            }
            _ => Wrote::Kept,
        }
    }

    /// Begins a fetch for a read beyond the patches; it comes before all others. Returns `false` if the block
    /// is already being fetched, or has no patches.
    pub fn read(&mut self, block: K) -> bool {
        let begin = self.blocks.get(&block).is_some_and(|entry| !entry.fetching);
        if begin {
            self.begin(block, Why::Read);
        }
        begin
    }

    fn begin(&mut self, block: K, why: Why) {
        if let Some(entry) = self.blocks.get_mut(&block) {
            entry.fetching = true;
            self.under_way += 1;
            self.stats.fetches[why as usize] += 1;
        }
    }

    /// Returns the next block to fetch in the background, if any.
    pub fn next_fetch(&mut self) -> Option<(K, Why)> {
        if self.under_way >= FETCHES {
            return None;
        }
        while let Some((block, why)) = self.wanted.pop_front() {
            if self.blocks.get(&block).is_some_and(|entry| !entry.fetching) {
                self.begin(block, why);
                return Some((block, why));
            }
        }
        if (self.stats.bytes as f64) < self.limit_bytes as f64 * SHORT {
            return None;
        }
        let oldest = self
            .order
            .values()
            .copied()
            .find(|block| !self.blocks[block].fetching)?;
        self.begin(oldest, Why::Short);
        Some((oldest, Why::Short))
    }

    /// Records that a fetch has ended and left the block with `bytes` of patches, written meanwhile.
    pub fn fetched(&mut self, block: K, bytes: u64) {
        let Some(entry) = self.blocks.get_mut(&block) else {
            return;
        };
        if std::mem::take(&mut entry.fetching) {
            self.under_way -= 1;
        }
        if bytes == 0 {
            self.forget(block);
            return;
        }
        self.stats.bytes -= entry.bytes.saturating_sub(bytes);
        entry.bytes = bytes;
        if self.how != Fetching::Lazy {
            self.wanted.push_back((block, Why::Written));
        }
    }

    /// Records that the block was overwritten as a whole, or is gone: a fetch that has not begun is not
    /// needed.
    pub fn gone(&mut self, block: K) {
        match self.blocks.get(&block) {
            Some(entry) if entry.fetching => self.under_way -= 1,
            Some(_) => self.stats.saved += 1,
            None => {}
        }
        self.forget(block);
    }

    fn forget(&mut self, block: K) {
        if let Some(entry) = self.blocks.remove(&block) {
            self.order.remove(&entry.age);
            self.stats.bytes -= entry.bytes + ENTRY_BYTES;
            self.stats.blocks -= 1;
        }
    }

    /// Whether a block has patches.
    #[must_use]
    pub fn has(&self, block: K) -> bool {
        self.blocks.contains_key(&block)
    }

    /// Figures for operators.
    #[must_use]
    pub const fn stats(&self) -> PatchStats {
        self.stats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lazy_fetches_nothing_that_is_overwritten() {
        let mut pool = PatchPool::new(Fetching::Lazy, 1 << 20);
        for block in 0..1000u64 {
            assert_eq!(pool.wrote(block, 2048), Wrote::Kept);
            assert_eq!(pool.next_fetch(), None);
            pool.gone(block);
        }
        let stats = pool.stats();
        assert_eq!((stats.fetches, stats.saved, stats.bytes), ([0; 3], 1000, 0));
    }

    #[test]
    fn lazy_fetches_the_oldest_before_its_memory_is_full() {
        let mut pool = PatchPool::new(Fetching::Lazy, 10_000);
        let mut block = 0u64;
        while pool.next_fetch().is_none() {
            assert_eq!(
                pool.wrote(block, 100),
                Wrote::Kept,
                "it does not wait for its limit"
            );
            block += 1;
        }
        assert_eq!(pool.stats().fetches, [0, 0, 1]);
        pool.fetched(0, 0);
        assert!(!pool.has(0) && pool.has(1));
    }

    #[test]
    fn async_fetches_once_what_is_written_often() {
        let mut pool = PatchPool::new(Fetching::AsyncBackground, 1 << 20);
        (1..=5).for_each(|times| assert_eq!(pool.wrote(7u64, times * 10), Wrote::Kept));
        assert_eq!(pool.next_fetch(), Some((7, Why::Written)));
        assert_eq!(pool.next_fetch(), None);
        assert!(!pool.read(7), "it is being fetched");
        pool.fetched(7, 10);
        assert_eq!(pool.next_fetch(), Some((7, Why::Written)), "written meanwhile");
        pool.fetched(7, 0);
        assert_eq!(pool.stats().bytes, 0);
    }

    #[test]
    fn write_waits_only_when_all_memory_is_taken() {
        let mut pool = PatchPool::new(Fetching::Lazy, 1000);
        assert_eq!(pool.wrote(1u64, 900), Wrote::Kept);
        assert_eq!(pool.wrote(2, 500), Wrote::Wait);
        assert!(!pool.has(2));
        assert_eq!(pool.next_fetch(), Some((1, Why::Short)));
        pool.fetched(1, 0);
        assert_eq!(pool.wrote(2, 500), Wrote::Kept);
    }
}
