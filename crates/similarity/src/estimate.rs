//! Estimate of the savings of deduplication in bounded memory: distinct blocks of several sizes and whole
//! files, counted exactly as long as they fit, then on a sample chosen by hash. Knows bytes, not their
//! origin.

use crate::hash::{Domain, HashedMap, hash};
use crate::sketch::Rate;
use serde::Serialize;

/// Block sizes that are compared, in bytes.
pub const SIZES: [usize; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];
/// Largest of [`SIZES`]: files are read in multiples of it.
pub const LARGEST: usize = SIZES[SIZES.len() - 1];

/// Bytes of memory that an entry of a counter takes, with the table's slack.
const ENTRY_BYTES: usize = 40;

#[derive(Debug, Clone, Copy)]
struct Seen {
    times: u32,
    bytes: u64,
}

/// Counts repeated hashes with their sizes, in bounded memory.
#[derive(Debug)]
struct Counter {
    seen: HashedMap<Seen>,
    limit: usize,
    rate: Rate,
    bytes: u64,
}

impl Counter {
    fn new(limit: usize) -> Self {
        Self {
            seen: HashedMap::default(),
            limit: limit.max(16),
            rate: Rate::ALL,
            bytes: 0,
        }
    }

    fn add(&mut self, hash: u64, bytes: u64) {
        self.bytes += bytes;
        if !self.rate.holds(hash) {
            return;
        }
        let seen = self.seen.entry(hash).or_insert(Seen { times: 0, bytes });
        seen.times = seen.times.saturating_add(1);
        while self.seen.len() > self.limit {
            let Some(coarser) = Rate::new(self.rate.k() + 1) else {
                break;
            };
            self.rate = coarser;
            self.seen.retain(|hash, _| coarser.holds(*hash));
        }
    }

    fn result(&self, unit: Unit) -> Saving {
        let scale = self.rate.scale();
        let again = |seen: &Seen| f64::from(seen.times - 1) * seen.bytes as f64;
        let saved = self.seen.values().map(again).sum::<f64>() * scale;
        // Each hash is in the sample or not: the variance of the sum, estimated from the sampled hashes.
        let squares = self.seen.values().map(|seen| again(seen).powi(2)).sum::<f64>();
        let error = (scale * (scale - 1.0) * squares).sqrt();
        Saving {
            unit,
            bytes: self.bytes,
            saved_bytes: saved.min(self.bytes as f64),
            error_bytes: error,
            sampled: scale as u64,
        }
    }
}

/// The unit of comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Aligned blocks of this number of bytes.
    Blocks(usize),
    /// Whole files.
    Files,
}

/// An estimated saving.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Saving {
    /// The unit of comparison.
    pub unit: Unit,
    /// Bytes compared (without zeros and holes).
    pub bytes: u64,
    /// Bytes that duplicate others.
    pub saved_bytes: f64,
    /// Standard error of `saved_bytes`; 0 if all was counted.
    pub error_bytes: f64,
    /// The inverse of the sampling rate: one in `sampled` hashes was counted.
    pub sampled: u64,
}

/// Counts duplicates in a set of files.
#[derive(Debug)]
pub struct Estimator {
    sizes: Vec<Counter>,
    files: Counter,
    zero_bytes: u64,
}

impl Estimator {
    /// Creates an estimator that uses at most `memory_bytes`.
    pub fn new(memory_bytes: usize) -> Self {
        // Half for the smallest blocks, half of the rest for the next size, and so on: larger blocks are
        // fewer.
        let all = memory_bytes / ENTRY_BYTES;
        let limit = |n: usize| all >> (n + 1);
        Self {
            sizes: (0..SIZES.len()).map(|n| Counter::new(limit(n))).collect(),
            files: Counter::new(limit(SIZES.len())),
            zero_bytes: 0,
        }
    }

    /// Adds the next bytes of a file: aligned pieces of [`LARGEST`] bytes; only the last one may be shorter.
    pub fn add(&mut self, piece: &[u8]) {
        debug_assert!(piece.len() <= LARGEST);
        for (size, counter) in SIZES.iter().zip(&mut self.sizes) {
            for block in piece.chunks(*size) {
                if is_zero(block) {
                    if *size == SIZES[0] {
                        self.zero_bytes += block.len() as u64;
                    }
                    continue;
                }
                counter.add(hash(Domain::Block, block), block.len() as u64);
            }
        }
    }

    /// Adds a whole file by the hash of its content.
    pub fn add_file(&mut self, content: u64, bytes: u64) {
        if bytes > 0 {
            self.files.add(content, bytes);
        }
    }

    /// Bytes of zero blocks, which need no deduplication.
    pub const fn zero_bytes(&self) -> u64 {
        self.zero_bytes
    }

    /// The estimated savings, smallest blocks first, whole files last.
    pub fn savings(&self) -> Vec<Saving> {
        let sizes = SIZES.iter().zip(&self.sizes);
        let blocks = sizes.map(|(size, counter)| counter.result(Unit::Blocks(*size)));
        blocks.chain([self.files.result(Unit::Files)]).collect()
    }
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compares the bytes with themselves, shifted by one: as fast as memory, and stops early.
    bytes.first().is_none_or(|first| *first == 0)
        && bytes.get(1..).is_none_or(|rest| *rest == bytes[..rest.len()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::mix;

    fn block(seed: u64) -> Vec<u8> {
        (0..512).flat_map(|n| mix(mix(seed) ^ n).to_le_bytes()).collect()
    }

    fn add(estimator: &mut Estimator, blocks: &[u64]) {
        let bytes: Vec<u8> = blocks.iter().flat_map(|seed| block(*seed)).collect();
        bytes.chunks(LARGEST).for_each(|piece| estimator.add(piece));
        estimator.add_file(hash(Domain::File, &bytes), bytes.len() as u64);
    }

    #[test]
    fn estimate_is_exact_while_all_fits() {
        let mut estimator = Estimator::new(1 << 20);
        add(&mut estimator, &(0..64).collect::<Vec<_>>());
        // A copy shifted by a block: equal in blocks of 4 KiB, in no larger ones.
        add(&mut estimator, &(1..65).collect::<Vec<_>>());
        add(&mut estimator, &(0..64).collect::<Vec<_>>());
        estimator.add(&[0; 8192]);
        let savings = estimator.savings();
        let of = |unit| {
            savings
                .iter()
                .find(|saving| saving.unit == unit)
                .expect("it is there")
        };
        assert_eq!(of(Unit::Blocks(4096)).saved_bytes, 127.0 * 4096.0);
        assert_eq!(of(Unit::Blocks(8192)).saved_bytes, 64.0 * 4096.0);
        assert_eq!(of(Unit::Files).saved_bytes, 64.0 * 4096.0);
        assert!(
            savings
                .iter()
                .all(|saving| saving.error_bytes == 0.0 && saving.sampled == 1)
        );
        assert_eq!(estimator.zero_bytes(), 8192);
    }

    #[test]
    fn estimate_in_little_memory_is_within_its_stated_error() {
        let mut estimator = Estimator::new(ENTRY_BYTES * 512);
        let first: Vec<u64> = (0..3000).collect();
        let second: Vec<u64> = (1000..3000).collect();
        add(&mut estimator, &first);
        add(&mut estimator, &second);
        let saving = estimator.savings()[0];
        let off = (saving.saved_bytes - 2000.0 * 4096.0).abs();
        assert!(saving.sampled > 1 && saving.error_bytes > 0.0, "{saving:?}");
        assert!(off < 4.0 * saving.error_bytes, "{saving:?}");
        assert!(estimator.sizes[0].seen.len() <= 256);
    }

    #[test]
    fn zeros_are_told_from_other_blocks() {
        assert!(is_zero(&[]) && is_zero(&[0]) && is_zero(&[0; 4096]));
        let mut block = [0; 4096];
        for at in [0, 1, 2048, 4095] {
            block[at] = 1;
            assert!(!is_zero(&block), "{at}");
            block[at] = 0;
        }
        assert!(!is_zero(&[7; 100]));
    }
}
