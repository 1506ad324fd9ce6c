//! A radix of 64-bit words, one for each 4 KiB block of a file: the log address of the block's newest whole
//! copy. Published by compare-and-swap, read without a lock; dropped only under the inode's exclusive lock.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use varve_format::LogSeq;
use varve_media::lock::RwLock;

const ADDR_BITS: u32 = 34;
const SEQ_BITS: u32 = 64 - ADDR_BITS;
const SEQ_MASK: u64 = (1 << SEQ_BITS) - 1;
const FAN: usize = 512;
/// Blocks whose words are in the inode itself.
const INLINE: usize = 8;
/// Largest log, in bytes, that a word can point into. It holds at most 2^28 entries at once, so that 30 bits
/// of the sequence number order any two words.
pub(crate) const LOG_BYTES_MAX: u64 = 1 << ADDR_BITS;

/// Address and low sequence bits; 0 is none (address 0 is the live header's).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl Word {
    pub(crate) const fn new(addr: u64, seq: LogSeq) -> Self {
        Self((addr << SEQ_BITS) | (seq.0 & SEQ_MASK))
    }

    pub(crate) const fn addr(self) -> u64 {
        self.0 >> SEQ_BITS
    }

    /// Whether the word's number is above `seq`, by the low bits.
    pub(crate) const fn is_newer_than(self, seq: LogSeq) -> bool {
        newer(self.0, seq.0)
    }
}

/// Whether low sequence bits `a` come after `b`. Both belong to entries that were in one log at once, or `b`
/// is digested.
const fn newer(a: u64, b: u64) -> bool {
    let ahead = a.wrapping_sub(b) & SEQ_MASK;
    ahead != 0 && ahead < 1 << (SEQ_BITS - 1)
}

struct Leaf {
    used: AtomicBool,
    words: [AtomicU64; FAN],
}

impl Leaf {
    fn new() -> Box<Self> {
        Box::new(Self {
            used: AtomicBool::new(false),
            words: [const { AtomicU64::new(0) }; FAN],
        })
    }
}

type Mid = [OnceLock<Box<Leaf>>; FAN];

/// Words of one file.
pub(crate) struct Radix {
    inline: [AtomicU64; INLINE],
    /// Blocks of the first gigabyte.
    low: OnceLock<Box<Mid>>,
    /// Blocks above it, by gigabyte.
    high: RwLock<BTreeMap<u64, Arc<Mid>>>,
    /// Whether any word was set since the last clearing.
    used: AtomicBool,
}

fn new_mid() -> Mid {
    [const { OnceLock::new() }; FAN]
}

fn load(word: &AtomicU64) -> Option<Word> {
    match word.load(Ordering::Acquire) {
        0 => None,
        raw => Some(Word(raw)),
    }
}

/// Sets the word unless it is newer already.
fn offer(word: &AtomicU64, new: Word) {
    let mut old = word.load(Ordering::Relaxed);
    while old == 0 || newer(new.0, old) {
        match word.compare_exchange_weak(old, new.0, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => return,
            Err(current) => old = current,
        }
    }
}

/// Clears words for which `dead` is true; returns whether any is left, and whether any was cleared.
fn sweep(words: &[AtomicU64], dead: &impl Fn(Word) -> bool) -> (bool, bool) {
    let (mut left, mut gone) = (false, false);
    for word in words {
        if let Some(value) = load(word) {
            if dead(value) {
                word.store(0, Ordering::Relaxed);
                gone = true;
            } else {
                left = true;
            }
        }
    }
    (left, gone)
}

impl Radix {
    pub(crate) const fn new() -> Self {
        Self {
            inline: [const { AtomicU64::new(0) }; INLINE],
            low: OnceLock::new(),
            high: RwLock::new(BTreeMap::new()),
            used: AtomicBool::new(false),
        }
    }

    /// Returns the newest whole copy of `block` in the log.
    #[inline]
    pub(crate) fn get(&self, block: u64) -> Option<Word> {
        if block < INLINE as u64 {
            return load(&self.inline[block as usize]);
        }
        let (top, mid, leaf) = split(block);
        if top == 0 {
            load(&self.low.get()?[mid].get()?.words[leaf])
        } else {
            load(&self.high.read().get(&top)?[mid].get()?.words[leaf])
        }
    }

    /// Publishes whole blocks from `first` on, which are consecutive in the log from `addr` on.
    #[inline]
    pub(crate) fn publish(&self, first: u64, blocks: u64, addr: u64, seq: LogSeq) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        let mut block = first;
        let end = first + blocks;
        while block < end {
            let at = |block: u64| Word::new(addr + (block - first) * varve_format::BLOCK_BYTES, seq);
            if block < INLINE as u64 {
                offer(&self.inline[block as usize], at(block));
                block += 1;
                continue;
            }
            let stop = end.min((block / FAN as u64 + 1) * FAN as u64);
            self.with_leaf(block, |leaf| {
                if !leaf.used.load(Ordering::Relaxed) {
                    leaf.used.store(true, Ordering::Relaxed);
                }
                for block in block..stop {
                    offer(&leaf.words[split(block).2], at(block));
                }
            });
            block = stop;
        }
    }

    fn with_leaf(&self, block: u64, run: impl FnOnce(&Leaf)) {
        let (top, mid, _) = split(block);
        if top == 0 {
            let mids = self.low.get_or_init(|| Box::new(new_mid()));
            run(mids[mid].get_or_init(Leaf::new));
        } else {
            let found = self.high.read().get(&top).cloned();
            let mids = found.unwrap_or_else(|| {
                self.high
                    .write()
                    .entry(top)
                    .or_insert_with(|| Arc::new(new_mid()))
                    .clone()
            });
            run(mids[mid].get_or_init(Leaf::new));
        }
    }

    /// First block at or after `block` and below `limit` that has a word.
    pub(crate) fn next_used(&self, mut block: u64, limit: u64) -> Option<u64> {
        if !self.used.load(Ordering::Relaxed) {
            return None;
        }
        while block < limit {
            if block < INLINE as u64 {
                if self.get(block).is_some() {
                    return Some(block);
                }
                block += 1;
                continue;
            }
            let (top, mid, leaf) = split(block);
            let gigabyte = (FAN * FAN) as u64;
            let high;
            let mids: &Mid = if top == 0 {
                match self.low.get() {
                    Some(mids) => mids,
                    None => {
                        block = gigabyte;
                        continue;
                    }
                }
            } else {
                match self.high.read().range(top..).next() {
                    Some((&found, _)) if found > top => {
                        block = found * gigabyte;
                        continue;
                    }
                    Some((_, mids)) => high = mids.clone(),
                    None => return None,
                }
                &high
            };
            if let Some(words) = mids[mid].get().filter(|leaf| leaf.used.load(Ordering::Relaxed)) {
                for (index, word) in words.words.iter().enumerate().skip(leaf) {
                    if load(word).is_some() {
                        let found = block - leaf as u64 + index as u64;
                        return (found < limit).then_some(found);
                    }
                }
            }
            block = (block / FAN as u64 + 1) * FAN as u64;
        }
        None
    }

    /// Drops the words at or below `digested`; returns whether any was dropped. Under the inode's exclusive
    /// lock.
    pub(crate) fn prune(&self, digested: LogSeq) -> bool {
        self.sweep_all(&|word: Word| !word.is_newer_than(digested))
    }

    /// Drops all words. Under the inode's exclusive lock.
    pub(crate) fn clear(&self) {
        self.sweep_all(&|_| true);
    }

    fn sweep_all(&self, dead: &impl Fn(Word) -> bool) -> bool {
        if !self.used.load(Ordering::Relaxed) {
            return false;
        }
        let (mut left, mut gone) = sweep(&self.inline, dead);
        let mut sweep_mid = |mids: &Mid| {
            for leaf in mids.iter().filter_map(OnceLock::get) {
                if leaf.used.load(Ordering::Relaxed) {
                    let (some_left, some_gone) = sweep(&leaf.words, dead);
                    leaf.used.store(some_left, Ordering::Relaxed);
                    left |= some_left;
                    gone |= some_gone;
                }
            }
        };
        if let Some(mids) = self.low.get() {
            sweep_mid(mids);
        }
        for mids in self.high.read().values() {
            sweep_mid(mids);
        }
        self.used.store(left, Ordering::Relaxed);
        gone
    }

    /// Whether no word is set (as far as the last sweep and later publications tell).
    pub(crate) fn is_empty(&self) -> bool {
        !self.used.load(Ordering::Relaxed)
    }
}

/// Gigabyte, leaf in it, word in the leaf.
const fn split(block: u64) -> (u64, usize, usize) {
    let fan = FAN as u64;
    (
        block / (fan * fan),
        ((block / fan) % fan) as usize,
        (block % fan) as usize,
    )
}
