//! Sketches: a sample of an image's elements, chosen by their hashes, so that equal elements are chosen in
//! every image.
//!
//! An element is a block, a file or a package with a weight in bytes. A sketch of rate 1/2^k holds the
//! elements whose hash begins with k zero bits, each once. The rate adapts to the size: small images are held
//! whole, larger ones at 1/64 and below. Sorted by hash, the sample of a coarser rate is a prefix, so
//! sketches of different rates are compared at the coarser one. This module knows no tree and no input.

use crate::hash::{HashedMap, mix};
use serde::{Deserialize, Serialize};

/// Default limit of the elements in a sketch. An image of 4 KiB blocks is sampled at 1/64 from 1 GiB of
/// distinct content on; a share is then off by 0.008 (one standard deviation, for the worst share of one
/// half).
pub const DEFAULT_ELEMENTS: usize = 8192;

/// Rate of a sample: 1/2^k of all hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Rate(u8);

impl Rate {
    /// Every element.
    pub const ALL: Self = Self(0);
    /// The coarsest: one hash in 2^40.
    pub const MAX: Self = Self(40);

    /// Rate 1/2^k; `None` beyond [`Rate::MAX`].
    pub const fn new(k: u8) -> Option<Self> {
        if k <= Self::MAX.0 { Some(Self(k)) } else { None }
    }

    /// The k of 1/2^k.
    pub const fn k(self) -> u8 {
        self.0
    }

    /// Whether an element with this hash is in the sample.
    pub const fn holds(self, hash: u64) -> bool {
        self.0 == 0 || hash >> (64 - self.0) == 0
    }

    /// Number of elements that one in the sample stands for.
    pub const fn scale(self) -> f64 {
        (1u64 << self.0) as f64
    }

    /// The next coarser rate; the coarsest stays.
    const fn coarser(self) -> Self {
        Self(if self.0 < Self::MAX.0 { self.0 + 1 } else { self.0 })
    }
}

/// An element in the sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    /// Hash of its content.
    pub hash: u64,
    /// Its weight, in bytes.
    pub weight: u64,
}

/// A sample of distinct elements, sorted by hash.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Sketch {
    rate: Rate,
    elements: Vec<Element>,
    fingerprint: u64,
}

impl Sketch {
    /// Makes the sketch of a small set of elements, all of them sampled; the first of equal hashes counts.
    pub fn of(elements: impl IntoIterator<Item = Element>) -> Self {
        let mut builder = SketchBuilder::new(usize::MAX);
        elements.into_iter().for_each(|element| builder.add(element));
        builder.finish()
    }

    /// Its rate.
    pub const fn rate(&self) -> Rate {
        self.rate
    }

    /// The elements in the sample, sorted by hash.
    pub fn elements(&self) -> &[Element] {
        &self.elements
    }

    /// The elements that a sample of `rate` also holds; all of them if `rate` is finer than this sketch's.
    pub fn at(&self, rate: Rate) -> &[Element] {
        if rate <= self.rate {
            return &self.elements;
        }
        let end = self.elements.partition_point(|element| rate.holds(element.hash));
        &self.elements[..end]
    }

    /// The longest prefix of the sample that some rate selects and that has at most `limit` elements.
    pub fn prefix(&self, limit: usize) -> &[Element] {
        let mut rate = self.rate;
        while self.at(rate).len() > limit && rate < Rate::MAX {
            rate = rate.coarser();
        }
        self.at(rate)
    }

    /// Estimated weight of all distinct elements, in bytes.
    pub fn weight(&self) -> f64 {
        self.elements.iter().map(|e| e.weight as f64).sum::<f64>() * self.rate.scale()
    }

    /// A number over all added elements, sampled or not, in any order: equal for equal images.
    pub const fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Whether nothing was added.
    pub const fn is_empty(&self) -> bool {
        self.elements.is_empty() && self.fingerprint == 0
    }

    /// Whether it satisfies a builder's invariants: sorted, distinct, within its rate. For sketches from
    /// elsewhere.
    pub fn is_sound(&self) -> bool {
        self.rate <= Rate::MAX
            && self.elements.is_sorted_by(|a, b| a.hash < b.hash)
            && self.elements.last().is_none_or(|last| self.rate.holds(last.hash))
    }
}

/// Makes a sketch of a stream of elements in bounded memory.
#[derive(Debug)]
pub struct SketchBuilder {
    limit: usize,
    rate: Rate,
    chosen: HashedMap<u64>,
    fingerprint: u64,
}

impl SketchBuilder {
    /// A builder of a sketch with at most `limit` elements (at least one).
    pub fn new(limit: usize) -> Self {
        Self {
            limit: limit.max(1),
            rate: Rate::ALL,
            chosen: HashedMap::default(),
            fingerprint: 0,
        }
    }

    /// Adds an element; the first weight of equal hashes counts.
    pub fn add(&mut self, element: Element) {
        // A sum does not depend on the order; hashes are mixed, so that related ones do not cancel out.
        self.fingerprint = self.fingerprint.wrapping_add(mix(element.hash) | 1);
        if !self.rate.holds(element.hash) {
            return;
        }
        self.chosen.entry(element.hash).or_insert(element.weight);
        self.keep_limit();
    }

    /// Adds the elements of another sketch. The rate becomes the coarser of the two.
    pub fn merge(&mut self, other: &Sketch) {
        self.fingerprint = self.fingerprint.wrapping_add(other.fingerprint);
        if other.rate > self.rate {
            self.rate = other.rate;
            let rate = self.rate;
            self.chosen.retain(|&hash, _| rate.holds(hash));
        }
        for element in other.at(self.rate) {
            self.chosen.entry(element.hash).or_insert(element.weight);
        }
        self.keep_limit();
    }

    fn keep_limit(&mut self) {
        while self.chosen.len() > self.limit && self.rate < Rate::MAX {
            self.rate = self.rate.coarser();
            let rate = self.rate;
            self.chosen.retain(|&hash, _| rate.holds(hash));
        }
    }

    /// Returns the sketch of the added elements.
    pub fn finish(self) -> Sketch {
        let mut elements: Vec<_> = self
            .chosen
            .into_iter()
            .map(|(hash, weight)| Element { hash, weight })
            .collect();
        elements.sort_unstable_by_key(|element| element.hash);
        Sketch {
            rate: self.rate,
            elements,
            fingerprint: self.fingerprint,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(range: std::ops::Range<u64>, limit: usize) -> Sketch {
        let mut builder = SketchBuilder::new(limit);
        for number in range {
            builder.add(Element {
                hash: mix(number + 1),
                weight: 4096,
            });
        }
        builder.finish()
    }

    #[test]
    fn sketch_holds_a_small_image_whole() {
        let sketch = numbered(0..1000, 4096);
        assert_eq!(sketch.rate(), Rate::ALL);
        assert_eq!(sketch.elements().len(), 1000);
        assert_eq!(sketch.weight(), 4096.0 * 1000.0);
    }

    #[test]
    fn sketch_estimates_a_large_image_within_its_bound() {
        let sketch = numbered(0..1 << 18, 4096);
        assert!(sketch.elements().len() <= 4096);
        assert!(sketch.rate() >= Rate(6), "{:?}", sketch.rate());
        let off = sketch.weight() / (4096.0 * f64::from(1 << 18)) - 1.0;
        assert!(off.abs() < 0.06, "off by {off}");
        assert!(sketch.is_sound());
    }

    #[test]
    fn sketch_does_not_depend_on_order_or_repetition_of_elements() {
        let forwards = numbered(0..10_000, 512);
        let mut builder = SketchBuilder::new(512);
        for number in (0..10_000).rev() {
            builder.add(Element {
                hash: mix(number + 1),
                weight: 4096,
            });
        }
        assert_eq!(forwards, builder.finish());
    }

    #[test]
    fn merged_sketches_are_as_one_of_all_elements() {
        for limit in [64, 1000, 100_000] {
            let mut merged = SketchBuilder::new(limit);
            merged.merge(&numbered(0..3000, limit));
            merged.merge(&numbered(3000..9000, limit));
            assert_eq!(merged.finish(), numbered(0..9000, limit), "{limit}");
        }
    }

    #[test]
    fn coarser_sample_is_a_prefix_of_the_finer() {
        let fine = numbered(0..10_000, 8192);
        let coarse = numbered(0..10_000, 300);
        assert!(coarse.rate() > fine.rate());
        assert_eq!(fine.at(coarse.rate()), coarse.elements());
        assert!(fine.prefix(300).len() <= 300);
        assert_eq!(fine.at(Rate::ALL), fine.elements());
    }

    #[test]
    fn fingerprint_tells_one_element_among_many() {
        assert_ne!(
            numbered(0..5000, 64).fingerprint(),
            numbered(0..5001, 64).fingerprint()
        );
        assert!(Sketch::default().is_empty());
    }

    #[test]
    fn unsound_sketch_is_told() {
        let mut sketch = numbered(0..100, 64);
        sketch.elements.swap(0, 1);
        assert!(!sketch.is_sound());
    }
}
