//! Measures of similarity: SIM (equation 4.1), the asymmetric S (4.2), and the choice of a measure for each
//! use (table 4.1).
//!
//! An image has up to three sketches: of its blocks, its files and its packages. A *view* is the part of them
//! that is compared: one of them, or blocks and packages mixed. This module knows no tree.

use crate::sketch::{Element, Rate, Sketch};
use serde::{Deserialize, Serialize};

/// The content that is compared (section 4.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub enum Weigh {
    /// Content: bytes of 4 KiB blocks.
    #[default]
    Blocks,
    /// Content: bytes of whole files.
    Files,
    /// Semantic: installed size of packages.
    Packages,
    /// Blocks and packages, both in bytes, with equal weight.
    Mix,
}

/// The use of a similarity (section 4.2.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Choosing virtual machines for one host.
    Placement,
    /// Choosing servers for one administrator.
    Administration,
    /// Finding servers that reacted alike to an update.
    Troubleshooting,
    /// Choosing images to migrate in one wave.
    Migration,
}

impl Weigh {
    /// The measure of table 4.1.
    pub const fn for_use(what: Use) -> Self {
        match what {
            Use::Placement | Use::Migration => Self::Mix,
            Use::Administration | Use::Troubleshooting => Self::Packages,
        }
    }
}

/// The sketches of one image.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Sketches {
    /// Sketch of its blocks that are not zero.
    pub blocks: Sketch,
    /// Sketch of its files.
    pub files: Sketch,
    /// Sketch of its packages.
    pub packages: Sketch,
}

impl Sketches {
    /// Returns the part of them that is compared.
    pub fn view(&self, weigh: Weigh) -> View {
        let parts = match weigh {
            Weigh::Blocks => vec![self.blocks.clone()],
            Weigh::Files => vec![self.files.clone()],
            Weigh::Packages => vec![self.packages.clone()],
            Weigh::Mix => vec![self.blocks.clone(), self.packages.clone()],
        };
        View { parts }
    }
}

/// The compared part of an image: one sketch or several, whose weights are added.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct View {
    /// The sketches; two views that are compared have the same number of parts, of the same kinds.
    pub parts: Vec<Sketch>,
}

impl View {
    /// A view of one sketch.
    pub fn of(sketch: Sketch) -> Self {
        Self { parts: vec![sketch] }
    }

    /// A number that is equal for equal images.
    pub fn fingerprint(&self) -> u64 {
        self.parts
            .iter()
            .fold(0, |sum, part| crate::hash::combine(sum, part.fingerprint()))
    }

    /// Number of elements in the sample.
    pub fn len(&self) -> usize {
        self.parts.iter().map(|part| part.elements().len()).sum()
    }

    /// Whether there is nothing to compare.
    pub fn is_empty(&self) -> bool {
        self.parts.iter().all(Sketch::is_empty)
    }
}

/// Estimated weights of two images and of their common content, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overlap {
    /// Weight of the first.
    pub first: f64,
    /// Weight of the second.
    pub second: f64,
    /// Weight of the common content.
    pub shared: f64,
}

impl Overlap {
    /// Computes the overlap of two views.
    pub fn of(first: &View, second: &View) -> Self {
        let mut sum = Self::default();
        for (a, b) in first.parts.iter().zip(&second.parts) {
            sum.add_part(a, b);
        }
        sum
    }

    fn add_part(&mut self, a: &Sketch, b: &Sketch) {
        let rate = a.rate().max(b.rate());
        let (a, b) = (a.at(rate), b.at(rate));
        let scale = rate.scale();
        self.first += scale * weight_of(a);
        self.second += scale * weight_of(b);
        let (mut i, mut j) = (0, 0);
        while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
            match x.hash.cmp(&y.hash) {
                std::cmp::Ordering::Less => i += 1,
                std::cmp::Ordering::Greater => j += 1,
                std::cmp::Ordering::Equal => {
                    self.shared += scale * x.weight as f64;
                    (i, j) = (i + 1, j + 1);
                }
            }
        }
    }

    /// wt(A ∩ B) / wt(A ∪ B), equation 4.1. Two empty images are equal.
    pub fn sim(&self) -> f64 {
        ratio(self.shared, self.first + self.second - self.shared)
    }

    /// wt(A ∩ B) / min(wt(A), wt(B)), equation 4.2.
    pub fn s(&self) -> f64 {
        ratio(self.shared, self.first.min(self.second))
    }
}

/// Quotient of a part and a whole; 1 if the whole is zero.
pub(crate) fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { (part / whole).min(1.0) } else { 1.0 }
}

fn weight_of(elements: &[Element]) -> f64 {
    elements.iter().map(|element| element.weight as f64).sum()
}

/// Bytes that a group of images takes with and without sharing of common content.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Held {
    /// Without sharing: the distinct content of each image.
    pub apart: f64,
    /// With sharing: the union.
    pub together: f64,
}

impl Held {
    /// Computes it for a group of views, at the coarsest member's sampling rate.
    pub fn of<'a>(views: impl Iterator<Item = &'a View> + Clone) -> Self {
        let mut held = Self::default();
        let parts = views.clone().map(|view| view.parts.len()).max().unwrap_or(0);
        for part in 0..parts {
            let sketches = views.clone().filter_map(|view| view.parts.get(part));
            let rate = sketches.clone().map(Sketch::rate).max().unwrap_or(Rate::ALL);
            let mut seen = crate::hash::HashedMap::default();
            for element in sketches.flat_map(|sketch| sketch.at(rate)) {
                held.apart += rate.scale() * element.weight as f64;
                if seen.insert(element.hash, ()).is_none() {
                    held.together += rate.scale() * element.weight as f64;
                }
            }
        }
        held
    }

    /// Bytes saved by sharing.
    pub fn saved(&self) -> f64 {
        self.apart - self.together
    }
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "an image is a list of ranges")]
mod tests {
    use super::*;
    use crate::hash::mix;
    use crate::sketch::SketchBuilder;

    fn view(ranges: &[std::ops::Range<u64>], limit: usize) -> View {
        let mut builder = SketchBuilder::new(limit);
        for hash in ranges.iter().cloned().flatten() {
            builder.add(Element {
                hash: mix(hash + 1),
                weight: 10,
            });
        }
        View::of(builder.finish())
    }

    #[test]
    fn sim_and_s_are_as_in_the_equations() {
        let overlap = Overlap::of(&view(&[0..30], 99), &view(&[10..80], 99));
        assert_eq!(
            (overlap.first, overlap.second, overlap.shared),
            (300.0, 700.0, 200.0)
        );
        assert_eq!(overlap.sim(), 200.0 / 800.0);
        assert_eq!(overlap.s(), 200.0 / 300.0);
    }

    #[test]
    fn s_of_a_part_and_its_whole_is_one() {
        let overlap = Overlap::of(&view(&[0..30], 99), &view(&[0..90], 99));
        assert_eq!(overlap.s(), 1.0);
        assert!(overlap.sim() < 0.34);
    }

    #[test]
    fn two_empty_images_are_equal() {
        let overlap = Overlap::of(&View::default(), &View::default());
        assert_eq!((overlap.sim(), overlap.s()), (1.0, 1.0));
    }

    #[test]
    fn sketches_of_different_rates_are_compared_at_the_coarser() {
        let exact = Overlap::of(
            &view(&[0..40_000], usize::MAX),
            &view(&[20_000..60_000], usize::MAX),
        );
        let off = |one, two| {
            let overlap = Overlap::of(&view(&[0..40_000], one), &view(&[20_000..60_000], two));
            (overlap.sim() - exact.sim()).abs()
        };
        assert!(off(4096, 512) < 0.06, "{}", off(4096, 512));
        assert!(off(4096, 4096) < 0.026, "{}", off(4096, 4096));
    }

    #[test]
    fn mix_adds_blocks_and_packages() {
        let of = |hash, weight| Sketch::of([Element { hash, weight }]);
        let one = Sketches {
            blocks: of(1, 100),
            files: Sketch::default(),
            packages: of(7, 300),
        };
        let other = Sketches {
            blocks: of(2, 100),
            ..one.clone()
        };
        let overlap = Overlap::of(&one.view(Weigh::Mix), &other.view(Weigh::Mix));
        assert_eq!(overlap.s(), 0.75);
        assert_eq!(Weigh::for_use(Use::Migration), Weigh::Mix);
        assert_eq!(Weigh::for_use(Use::Troubleshooting), Weigh::Packages);
    }

    #[test]
    fn held_counts_what_is_shared_once() {
        let group = [view(&[0..30], 99), view(&[10..40], 99), view(&[0..40], 99)];
        let held = Held::of(group.iter());
        assert_eq!((held.apart, held.together, held.saved()), (1000.0, 400.0, 600.0));
    }
}
