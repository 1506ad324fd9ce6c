//! Counting unions: the meta-image of a cluster. Removing an image costs as much as inserting it. Knows no
//! tree.

use crate::hash::HashedMap;
use crate::measure::{Overlap, View, ratio};
use crate::sketch::{Element, Rate, Sketch};

#[derive(Debug, Clone, Copy)]
struct Counted {
    /// Number of members that have it.
    owners: u32,
    weight: u64,
}

/// One part (blocks, files or packages) of a union.
#[derive(Debug, Clone, Default)]
struct Part {
    counted: HashedMap<Counted>,
    /// Number of members of each rate; the coarsest one present is the union's rate.
    rates: Vec<u32>,
    /// Sum of the weights in `counted` that are in the sample of `rate`.
    weight: u128,
    rate: Rate,
}

impl Part {
    /// Adopts the rate of the coarsest member, and recomputes the sum if it has changed.
    fn follow_rate(&mut self) {
        let k = self.rates.iter().rposition(|&members| members > 0).unwrap_or(0);
        let rate = u8::try_from(k).ok().and_then(Rate::new).unwrap_or(Rate::MAX);
        if rate != self.rate {
            self.rate = rate;
            let in_sample = self.counted.iter().filter(|(hash, _)| rate.holds(**hash));
            self.weight = in_sample.map(|(_, counted)| u128::from(counted.weight)).sum();
        }
    }

    fn insert(&mut self, sketch: &Sketch, mut first: impl FnMut(u64)) {
        let k = usize::from(sketch.rate().k());
        if self.rates.len() <= k {
            self.rates.resize(k + 1, 0);
        }
        self.rates[k] += 1;
        self.follow_rate();
        for element in sketch.elements() {
            let counted = self.counted.entry(element.hash).or_insert(Counted {
                owners: 0,
                weight: element.weight,
            });
            counted.owners += 1;
            if counted.owners == 1 {
                if self.rate.holds(element.hash) {
                    self.weight += u128::from(element.weight);
                }
                first(element.hash);
            }
        }
    }

    fn remove(&mut self, sketch: &Sketch, mut last: impl FnMut(u64)) {
        if let Some(members) = self.rates.get_mut(usize::from(sketch.rate().k())) {
            *members = members.saturating_sub(1);
        }
        for element in sketch.elements() {
            let Some(counted) = self.counted.get_mut(&element.hash) else {
                continue;
            };
            counted.owners -= 1;
            if counted.owners == 0 {
                if self.rate.holds(element.hash) {
                    self.weight -= u128::from(counted.weight);
                }
                self.counted.remove(&element.hash);
                last(element.hash);
            }
        }
        self.follow_rate();
    }
}

/// The elements that most members of a cluster have, by part, sorted by hash; refreshed as the cluster
/// changes.
#[derive(Debug, Clone, Default)]
struct Core {
    parts: Vec<Vec<(u64, u64)>>,
    members: u32,
    /// Its weight by rarity when it was last compared; `None` if it has changed since.
    weight: Option<f64>,
}

/// Weight of an element of a part, given its hash and bytes.
pub type Weight<'a> = &'a dyn Fn(usize, u64, u64) -> f64;

/// A view's elements by falling weight, to tell soon that a union lacks too much of it.
#[derive(Debug)]
pub struct Weighed {
    /// Weight, part and hash of each element.
    elements: Vec<(f64, usize, u64)>,
    /// Rate of each part's sketch.
    rates: Vec<Rate>,
}

impl Weighed {
    /// Weighs the elements of a view.
    pub fn of(view: &View, weight: Weight<'_>) -> Self {
        let mut elements = Vec::with_capacity(view.len());
        for (part, sketch) in view.parts.iter().enumerate() {
            let scale = sketch.rate().scale();
            let weighed = |element: &Element| {
                let wt = scale * weight(part, element.hash, element.weight);
                (wt, part, element.hash)
            };
            elements.extend(sketch.elements().iter().map(weighed));
        }
        elements.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
        let rates = view.parts.iter().map(Sketch::rate).collect();
        Self { elements, rates }
    }
}

/// The union of several images, each element counted by its owners.
#[derive(Debug, Clone, Default)]
pub struct Union {
    parts: Vec<Part>,
    members: u32,
    core: Core,
}

impl Union {
    /// Number of members.
    pub const fn members(&self) -> u32 {
        self.members
    }

    /// Adds an image; `first` is called with the elements (part, hash) that no member had.
    pub fn insert(&mut self, view: &View, mut first: impl FnMut(usize, u64)) {
        if self.parts.len() < view.parts.len() {
            self.parts.resize_with(view.parts.len(), Part::default);
        }
        self.members += 1;
        for (at, (part, sketch)) in self.parts.iter_mut().zip(&view.parts).enumerate() {
            part.insert(sketch, |hash| first(at, hash));
        }
    }

    /// Removes a member; `last` is called with the elements (part, hash) that no other member has.
    pub fn remove(&mut self, view: &View, mut last: impl FnMut(usize, u64)) {
        self.members = self.members.saturating_sub(1);
        for (at, (part, sketch)) in self.parts.iter_mut().zip(&view.parts).enumerate() {
            part.remove(sketch, |hash| last(at, hash));
        }
    }

    /// Number of members that have an element.
    pub fn owners(&self, part: usize, hash: u64) -> u32 {
        self.parts
            .get(part)
            .and_then(|part| part.counted.get(&hash))
            .map_or(0, |counted| counted.owners)
    }

    /// Number of members whose sample would hold `hash` if they had it.
    pub fn asked(&self, part: usize, hash: u64) -> u32 {
        self.parts.get(part).map_or(0, |part| {
            (0u8..)
                .zip(&part.rates)
                .filter(|(k, _)| Rate::new(*k).is_some_and(|rate| rate.holds(hash)))
                .map(|(_, members)| members)
                .sum()
        })
    }

    /// Estimated bytes of the distinct elements.
    pub fn weight(&self) -> f64 {
        self.parts
            .iter()
            .map(|part| part.weight as f64 * part.rate.scale())
            .sum()
    }

    /// Weights of a view, of this union and of their common content, in bytes (for equations 4.1 and 4.2).
    /// Takes time proportional to the view.
    pub fn overlap(&self, view: &View) -> Overlap {
        let mut overlap = Overlap {
            second: self.weight(),
            ..Overlap::default()
        };
        for (part, sketch) in self.parts.iter().zip(&view.parts) {
            let rate = part.rate.max(sketch.rate());
            for element in sketch.at(rate) {
                overlap.first += rate.scale() * element.weight as f64;
                if part.counted.contains_key(&element.hash) {
                    overlap.shared += rate.scale() * element.weight as f64;
                }
            }
        }
        overlap
    }

    /// Weight of the view's elements that at least `owners` members have, in bytes.
    pub fn shared_by(&self, view: &View, owners: u32) -> f64 {
        let parts = self.parts.iter().zip(&view.parts);
        parts
            .map(|(part, sketch)| {
                let rate = part.rate.max(sketch.rate());
                let elements = sketch.at(rate).iter();
                let shared = elements.filter(|element| {
                    let counted = part.counted.get(&element.hash);
                    counted.is_some_and(|counted| counted.owners >= owners)
                });
                rate.scale() * shared.map(|element| element.weight as f64).sum::<f64>()
            })
            .sum()
    }

    /// Share of the view that this union has, and the number of elements that were looked up; no share as
    /// soon as it is known to be below `least`.
    pub fn share(&self, view: &Weighed, least: f64) -> (Option<f64>, u64) {
        let weight_here = |&(wt, part, hash): &(f64, usize, u64)| {
            let Some(rate) = self.parts.get(part).map(|part| part.rate) else {
                return wt;
            };
            match rate.scale() / view.rates[part].scale() {
                more if more <= 1.0 => wt,
                more if rate.holds(hash) => wt * more,
                _ => 0.0,
            }
        };
        let all: f64 = view.elements.iter().map(weight_here).sum();
        // What is summed in another order may differ in the last places.
        let allowed = all * (1.0 - least + 1e-9);
        let (mut lacks, mut read) = (0.0, 0);
        for element in &view.elements {
            let wt = weight_here(element);
            if wt == 0.0 {
                continue;
            }
            read += 1;
            let held = |part: &Part| part.counted.contains_key(&element.2);
            if !self.parts.get(element.1).is_some_and(held) {
                lacks += wt;
                if lacks > allowed {
                    return (None, read);
                }
            }
        }
        (Some(ratio(all - lacks, all)), read)
    }

    /// Share of the core (what most members have) that the view has, weighed by rarity.
    pub fn share_of_core(&mut self, view: &View, weight: Weight<'_>) -> f64 {
        self.refresh_core();
        let (mut core, mut held) = (0.0, 0.0);
        for (at, (part, sketch)) in self.parts.iter().zip(&view.parts).enumerate() {
            let rate = part.rate.max(sketch.rate());
            let (part_core, part_held) = self.core_of(at, sketch, rate, weight);
            core += part_core;
            held += part_held;
        }
        self.core.weight = Some(core);
        ratio(held, core)
    }

    /// Weight of the core when it was last compared, as long as it is the same core.
    pub const fn core_weight(&self) -> Option<f64> {
        if self.core_is_due() {
            None
        } else {
            self.core.weight
        }
    }

    /// Weight of the core's part, and of the elements of it that `sketch` has.
    fn core_of(&self, at: usize, sketch: &Sketch, rate: Rate, weight: Weight<'_>) -> (f64, f64) {
        let Some(elements) = self.core.parts.get(at) else {
            return (0.0, 0.0);
        };
        let mut theirs = sketch.at(rate).iter().peekable();
        let (mut core, mut held) = (0.0, 0.0);
        for &(hash, bytes) in elements.iter().take_while(|(hash, _)| rate.holds(*hash)) {
            let wt = rate.scale() * weight(at, hash, bytes);
            core += wt;
            while theirs.next_if(|element| element.hash < hash).is_some() {}
            if theirs.peek().is_some_and(|element| element.hash == hash) {
                held += wt;
            }
        }
        (core, held)
    }

    /// Whether the number of members has changed by a quarter since the core was computed.
    const fn core_is_due(&self) -> bool {
        let then = self.core.members;
        let near = self.members.abs_diff(then) * 4 <= then;
        !(near && then > 0 && (then > 8 || self.members == then))
    }

    /// Recomputes the core when it is due. Amortised over the changes, that costs no more than they do.
    fn refresh_core(&mut self) {
        if !self.core_is_due() {
            return;
        }
        let enough = self.members.div_ceil(2);
        self.core.members = self.members;
        self.core.weight = None;
        self.core.parts = self
            .parts
            .iter()
            .map(|part| {
                let most = part
                    .counted
                    .iter()
                    .filter(|(_, counted)| counted.owners >= enough);
                let mut most: Vec<_> = most.map(|(hash, counted)| (*hash, counted.weight)).collect();
                most.sort_unstable();
                most
            })
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::mix;
    use crate::sketch::SketchBuilder;

    fn view(range: std::ops::Range<u64>, limit: usize) -> View {
        let mut builder = SketchBuilder::new(limit);
        for number in range {
            builder.add(Element {
                hash: mix(number + 1),
                weight: 10,
            });
        }
        View::of(builder.finish())
    }

    const BYTES: Weight<'_> = &|_, _, bytes| bytes as f64;

    #[test]
    fn union_gives_back_what_was_taken_out() {
        let mut union = Union::default();
        let (one, other) = (view(0..50, 999), view(30..90, 999));
        let mut new = 0;
        union.insert(&one, |_, _| new += 1);
        union.insert(&other, |_, _| new += 1);
        assert_eq!((new, union.members(), union.weight()), (90, 2, 900.0));
        let mut gone = 0;
        union.remove(&one, |_, _| gone += 1);
        assert_eq!((gone, union.members(), union.weight()), (30, 1, 600.0));
        assert_eq!(union.overlap(&other).sim(), 1.0);
        union.remove(&other, |_, _| gone += 1);
        assert_eq!((gone, union.weight()), (90, 0.0));
    }

    #[test]
    fn union_takes_the_coarsest_members_rate_only_while_it_is_a_member() {
        let mut union = Union::default();
        let (small, large) = (view(0..100, 999), view(0..50_000, 999));
        union.insert(&small, |_, _| ());
        union.insert(&large, |_, _| ());
        let off = union.weight() / 500_000.0 - 1.0;
        assert!(off.abs() < 0.1, "off by {off}");
        union.remove(&large, |_, _| ());
        assert_eq!(union.weight(), 1000.0);
    }

    #[test]
    fn cover_tells_a_small_image_from_a_member() {
        let mut union = Union::default();
        for own in 0..4 {
            let mut builder = SketchBuilder::new(9999);
            for number in (0..600).chain(1000 + own * 100..1050 + own * 100) {
                builder.add(Element {
                    hash: mix(number + 1),
                    weight: 10,
                });
            }
            union.insert(&View::of(builder.finish()), |_, _| ());
        }
        let mut cover = |view: &View| {
            let (share, _) = union.share(&Weighed::of(view, BYTES), 0.9);
            (share, union.share_of_core(view, BYTES))
        };
        assert_eq!(cover(&view(0..60, 9999)), (Some(1.0), 0.1));
        assert_eq!(cover(&view(0..600, 9999)), (Some(1.0), 1.0));
    }

    #[test]
    fn share_is_told_as_it_is_or_that_it_is_below_the_bound() {
        for (limit, members) in [(9999, 100..600), (200, 100..600), (9999, 100..60_000)] {
            let mut union = Union::default();
            union.insert(&view(members, limit), |_, _| ());
            for end in [50, 90, 101, 130, 250, 700, 5000] {
                // What is rare weighs more.
                let weight: Weight<'_> = &|_, hash, bytes| bytes as f64 * (1 + hash % 50) as f64;
                let view = view(0..end, 9999);
                let weighed = Weighed::of(&view, weight);
                let (share, all) = union.share(&weighed, 0.0);
                let share = share.expect("nothing is below zero");
                let overlap = union.overlap(&view);
                let by_bytes = union.share(&Weighed::of(&view, BYTES), 0.0).0.expect("told");
                assert!((by_bytes - ratio(overlap.shared, overlap.first)).abs() < 1e-9);
                for least in [0.01, 0.2, 0.5, 0.9, 1.0] {
                    let (told, read) = union.share(&weighed, least);
                    assert!(read <= all);
                    if let Some(told) = told {
                        assert_eq!(told, share);
                    }
                    assert_eq!(told.is_some(), share >= least - 1e-9, "{least} of {share}");
                }
            }
        }
    }
}
