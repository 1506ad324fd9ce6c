//! Plans: the assignment of images to hosts or waves with the most sharing. Knows images as views, and no
//! host.
//!
//! Groups are filled greedily in several orders (clusters first), then improved by moves and swaps; the best
//! result is kept. Each plan is reported beside the savings of random plans under the same bounds.

use crate::hash::mix;
use crate::measure::{Held, View};
use crate::tree::{ImageId, Union};
use serde::Serialize;
use std::sync::Arc;

/// Random plans that a plan is compared with.
const RANDOM_PLANS: u64 = 64;
/// Orders in which groups are filled, besides that of the clusters.
const SHUFFLED_STARTS: u64 = 8;
/// Rounds of improvement, at most.
const MAX_ROUNDS: usize = 50;
/// Largest number of images for which swaps are tried besides moves.
const MAX_SWAPPED: usize = 256;

/// An image to be placed.
#[derive(Debug, Clone)]
pub struct Item {
    /// Its number.
    pub id: ImageId,
    /// Its content.
    pub view: Arc<View>,
    /// Its share of a group's capacity, in bytes.
    pub bytes: f64,
}

/// The bound of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// Bytes: the sum of its images' `bytes`.
    Bytes(f64),
    /// Number of images.
    Images(usize),
}

/// An error that prevents a plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// There are no images, or no groups.
    #[error("a plan needs at least one image and one group")]
    Nothing,
    /// An image is larger than a group.
    #[error(
        "an image takes {bytes:.0} bytes and a host has {capacity:.0}; give hosts more memory or leave it out"
    )]
    TooLarge {
        /// The image.
        image: ImageId,
        /// Bytes of the image.
        bytes: f64,
        /// Bytes of a group.
        capacity: f64,
    },
    /// The images do not fit together.
    #[error(
        "{groups} hosts of {capacity:.0} bytes have no room for {bytes:.0} of images; give more or larger \
        ones"
    )]
    NoRoom {
        /// Bytes of all images.
        bytes: f64,
        /// Number of groups.
        groups: usize,
        /// Bytes of a group.
        capacity: f64,
    },
}

/// An assignment of images to groups, with its savings.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The images of each group.
    pub groups: Vec<Vec<ImageId>>,
    /// Bytes that each group holds, apart and together.
    pub held: Vec<Held>,
    /// Bytes saved in all groups.
    pub saved: f64,
    /// Savings of random plans under the same bounds.
    pub random: Chance,
    /// Bytes saved by round-robin assignment, if that keeps the bound.
    pub round_robin: Option<f64>,
}

/// Bytes saved by random plans.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Chance {
    /// Their mean.
    pub mean: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
    /// Number of random plans that could be made.
    pub plans: u64,
}

/// Assigns `items`, given in the order of their clusters, to at most `groups` groups. Of more groups than
/// items, those that stay empty are not in the plan.
///
/// # Errors
/// If they do not fit.
pub fn plan(items: &[Item], groups: usize, bound: Bound) -> Result<Plan, PlanError> {
    if items.is_empty() || groups == 0 {
        return Err(PlanError::Nothing);
    }
    if let Bound::Bytes(capacity) = bound
        && let Some(item) = items.iter().find(|item| item.bytes > capacity)
    {
        return Err(PlanError::TooLarge {
            image: item.id,
            bytes: item.bytes,
            capacity,
        });
    }
    let mut orders: Vec<Vec<usize>> = vec![(0..items.len()).collect(), by_size(items)];
    orders.extend((0..SHUFFLED_STARTS).map(|seed| shuffled(items.len(), seed)));
    let filled = orders.iter().filter_map(|order| {
        let mut state = State::fill(items, groups, bound, order, Choice::Best)?;
        state.improve();
        Some(state)
    });
    let best = filled.max_by(|a, b| a.saved().total_cmp(&b.saved()));
    let Some(best) = best else {
        return Err(no_room(items, groups, bound));
    };
    let random = chance(items, groups, bound);
    let in_turn = State::in_turn(items, groups, bound);
    Ok(Plan {
        held: best.held(),
        groups: best.ids(),
        saved: best.saved(),
        random,
        round_robin: in_turn.map(|state| state.saved()),
    })
}

fn no_room(items: &[Item], groups: usize, bound: Bound) -> PlanError {
    let bytes = items.iter().map(|item| item.bytes).sum();
    match bound {
        Bound::Bytes(capacity) => PlanError::NoRoom {
            bytes,
            groups,
            capacity,
        },
        Bound::Images(_) => PlanError::Nothing,
    }
}

/// Plans migration in `waves` waves of nearly equal numbers of images.
///
/// # Errors
/// If there is nothing to plan.
pub fn waves(items: &[Item], waves: usize) -> Result<Plan, PlanError> {
    plan(items, waves, Bound::Images(items.len().div_ceil(waves.max(1))))
}

fn by_size(items: &[Item]) -> Vec<usize> {
    let mut order: Vec<_> = (0..items.len()).collect();
    order.sort_by(|a, b| items[*b].bytes.total_cmp(&items[*a].bytes));
    order
}

fn shuffled(count: usize, seed: u64) -> Vec<usize> {
    let mut order: Vec<_> = (0..count).collect();
    order.sort_by_key(|n| mix(mix(seed + 1) ^ *n as u64));
    order
}

/// Savings of random plans: images in a random order, each to a random group with room.
fn chance(items: &[Item], groups: usize, bound: Bound) -> Chance {
    let saved: Vec<f64> = (0..RANDOM_PLANS)
        .filter_map(|seed| {
            let order = shuffled(items.len(), seed ^ 0x5eed);
            Some(State::fill(items, groups, bound, &order, Choice::Any(seed))?.saved())
        })
        .collect();
    if saved.is_empty() {
        return Chance::default();
    }
    Chance {
        mean: saved.iter().sum::<f64>() / saved.len() as f64,
        least: saved.iter().copied().fold(f64::INFINITY, f64::min),
        most: saved.iter().copied().fold(0.0, f64::max),
        plans: saved.len() as u64,
    }
}

/// The choice of a group among those with room.
#[derive(Clone, Copy)]
enum Choice {
    /// The group with the largest common content.
    Best,
    /// A random group, by a seed.
    Any(u64),
}

#[derive(Default)]
struct Group {
    members: Vec<usize>,
    union: Union,
    bytes: f64,
}

struct State<'a> {
    items: &'a [Item],
    bound: Bound,
    /// At most as many as there are items: more are never filled.
    groups: Vec<Group>,
    /// Number of further groups, which stay empty.
    spare: usize,
}

impl<'a> State<'a> {
    fn empty(items: &'a [Item], groups: usize, bound: Bound) -> Self {
        let filled = groups.min(items.len());
        Self {
            items,
            bound,
            groups: (0..filled).map(|_| Group::default()).collect(),
            spare: groups - filled,
        }
    }

    /// Places the items in `order`; `None` if one of them finds no room.
    fn fill(items: &'a [Item], groups: usize, bound: Bound, order: &[usize], choice: Choice) -> Option<Self> {
        let mut state = Self::empty(items, groups, bound);
        for item in order {
            let open: Vec<usize> = (0..state.groups.len())
                .filter(|group| state.has_room(*group, *item, None))
                .collect();
            let group = match choice {
                Choice::Any(seed) => {
                    let any = mix(mix(seed) ^ *item as u64) as usize % (open.len() + state.spare).max(1);
                    let is_empty = |group: &usize| state.groups[*group].members.is_empty();
                    let empty = || open.iter().find(|group| is_empty(group));
                    // A spare group is like any that is empty; there is one as long as items are left.
                    *open.get(any).or_else(empty)?
                }
                Choice::Best => open.into_iter().max_by(|a, b| {
                    let gain = |group: usize| state.gain(group, *item);
                    // Among equals the emptier one.
                    let emptier = || state.groups[*b].bytes.total_cmp(&state.groups[*a].bytes);
                    gain(*a).total_cmp(&gain(*b)).then_with(emptier)
                })?,
            };
            state.put(group, *item);
        }
        Some(state)
    }

    fn in_turn(items: &'a [Item], groups: usize, bound: Bound) -> Option<Self> {
        let mut state = Self::empty(items, groups, bound);
        for item in 0..items.len() {
            let group = item % groups;
            if !state.has_room(group, item, None) {
                return None;
            }
            state.put(group, item);
        }
        Some(state)
    }

    /// Whether a group has room for an item after `leaves` has left it.
    fn has_room(&self, group: usize, item: usize, leaves: Option<usize>) -> bool {
        let group = &self.groups[group];
        match self.bound {
            Bound::Images(most) => group.members.len() + 1 - usize::from(leaves.is_some()) <= most,
            Bound::Bytes(most) => {
                let left = leaves.map_or(0.0, |other| self.items[other].bytes);
                group.bytes - left + self.items[item].bytes <= most
            }
        }
    }

    /// Bytes that an item would share with a group.
    fn gain(&self, group: usize, item: usize) -> f64 {
        self.groups[group].union.overlap(&self.items[item].view).shared
    }

    /// Bytes that a member shares with the rest of its group.
    fn loss(&self, group: usize, item: usize) -> f64 {
        self.groups[group].union.shared_by(&self.items[item].view, 2)
    }

    fn put(&mut self, group: usize, item: usize) {
        let group = &mut self.groups[group];
        group.members.push(item);
        group.union.insert(&self.items[item].view, |_, _| ());
        group.bytes += self.items[item].bytes;
    }

    fn take(&mut self, group: usize, item: usize) {
        let group = &mut self.groups[group];
        group.members.retain(|member| *member != item);
        group.union.remove(&self.items[item].view, |_, _| ());
        group.bytes -= self.items[item].bytes;
    }

    /// Moves and swaps images until no change helps.
    fn improve(&mut self) {
        for _ in 0..MAX_ROUNDS {
            let mut better = self.move_some();
            if self.items.len() <= MAX_SWAPPED {
                better |= self.swap_some();
            }
            if !better {
                break;
            }
        }
    }

    /// Whether a gain exceeds rounding errors.
    fn worth(&self, gain: f64) -> bool {
        gain > 1.0
    }

    fn move_some(&mut self) -> bool {
        let mut better = false;
        for from in 0..self.groups.len() {
            for item in self.groups[from].members.clone() {
                let loss = self.loss(from, item);
                let others =
                    (0..self.groups.len()).filter(|to| *to != from && self.has_room(*to, item, None));
                let gains = others.map(|to| (self.gain(to, item), to));
                let best = gains.max_by(|a, b| a.0.total_cmp(&b.0));
                if let Some((gain, to)) = best.filter(|(gain, _)| self.worth(gain - loss)) {
                    debug_assert!(gain > loss);
                    self.take(from, item);
                    self.put(to, item);
                    better = true;
                }
            }
        }
        better
    }

    fn swap_some(&mut self) -> bool {
        let mut better = false;
        for one in 0..self.groups.len() {
            for other in one + 1..self.groups.len() {
                for item in self.groups[one].members.clone() {
                    better |= self.swap_best(one, other, item);
                }
            }
        }
        better
    }

    /// Swaps a member of a group with the member of another that gains most, if any gains.
    fn swap_best(&mut self, one: usize, other: usize, item: usize) -> bool {
        let loss = self.loss(one, item);
        self.take(one, item);
        let mut best: Option<(f64, usize)> = None;
        for partner in self.groups[other].members.clone() {
            let fits = self.has_room(one, partner, None) && self.has_room(other, item, Some(partner));
            if !fits {
                continue;
            }
            let before = loss + self.loss(other, partner);
            self.take(other, partner);
            let after = self.gain(one, partner) + self.gain(other, item);
            self.put(other, partner);
            if self.worth(after - before) && best.is_none_or(|(most, _)| after - before > most) {
                best = Some((after - before, partner));
            }
        }
        match best {
            Some((_, partner)) => {
                self.take(other, partner);
                self.put(one, partner);
                self.put(other, item);
                true
            }
            None => {
                self.put(one, item);
                false
            }
        }
    }

    fn held(&self) -> Vec<Held> {
        let views = |group: &Group| {
            group
                .members
                .iter()
                .map(|item| &*self.items[*item].view)
                .collect()
        };
        self.groups
            .iter()
            .map(|group| {
                let views: Vec<&View> = views(group);
                Held::of(views.iter().copied())
            })
            .collect()
    }

    fn saved(&self) -> f64 {
        self.held().iter().map(Held::saved).sum()
    }

    fn ids(&self) -> Vec<Vec<ImageId>> {
        let id = |item: &usize| self.items[*item].id;
        self.groups
            .iter()
            .map(|group| {
                let mut ids: Vec<_> = group.members.iter().map(id).collect();
                ids.sort();
                ids
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sketch::{Element, Sketch};

    /// Images of families: a common base, content of the family, and content of their own.
    fn items(count: u32, families: u32) -> Vec<Item> {
        (0..count)
            .map(|n| {
                let family = u64::from(mix(u64::from(n) + 5) as u32 % families);
                let own = 20 + mix(u64::from(n)) % 60;
                let start = 100_000 + u64::from(n) * 1000;
                let numbers = (0..60)
                    .chain(1000 * (family + 1)..1000 * (family + 1) + 40 + 10 * family)
                    .chain(start..start + own);
                let view = View::of(Sketch::of(numbers.map(|number| Element {
                    hash: mix(number + 1),
                    weight: 4096,
                })));
                Item {
                    id: ImageId(n),
                    bytes: view.parts[0].weight(),
                    view: Arc::new(view),
                }
            })
            .collect()
    }

    /// The largest saving of any assignment.
    fn best_of_all(items: &[Item], groups: usize, bound: Bound) -> f64 {
        let of_mask = |mask: usize| -> Option<f64> {
            let members = || items.iter().enumerate().filter(|(n, _)| mask >> n & 1 == 1);
            let fits = match bound {
                Bound::Bytes(most) => members().map(|(_, item)| item.bytes).sum::<f64>() <= most,
                Bound::Images(most) => members().count() <= most,
            };
            let views: Vec<&View> = members().map(|(_, item)| &*item.view).collect();
            fits.then(|| Held::of(views.iter().copied()).saved())
        };
        let saved: Vec<Option<f64>> = (0..1 << items.len()).map(of_mask).collect();
        let mut best = saved.clone();
        for _ in 1..groups {
            best = (0..saved.len())
                .map(|mask| {
                    let mut most: Option<f64> = None;
                    let mut part = mask;
                    loop {
                        if let Some(sum) = saved[part].zip(best[mask & !part]).map(|(a, b)| a + b) {
                            most = Some(most.map_or(sum, |most| most.max(sum)));
                        }
                        if part == 0 {
                            break most;
                        }
                        part = (part - 1) & mask;
                    }
                })
                .collect();
        }
        best[saved.len() - 1].expect("all fit")
    }

    #[test]
    fn plan_saves_nearly_what_the_best_of_all_assignments_saves() {
        for count in [6, 8, 9, 10] {
            let items = items(count, 4);
            let all: f64 = items.iter().map(|item| item.bytes).sum();
            for bound in [
                Bound::Bytes(all / 3.0 * 1.25),
                Bound::Images(count.div_ceil(3) as usize),
            ] {
                let plan = plan(&items, 3, bound).expect("they fit");
                let best = best_of_all(&items, 3, bound);
                assert!(plan.saved >= 0.95 * best, "{count}: {} of {best}", plan.saved);
                assert!(plan.saved > plan.random.mean, "{count}: {plan:?}");
                assert!(plan.random.plans > 0);
                assert!(best >= plan.random.most - 1.0, "{best} {plan:?}");
            }
        }
    }

    #[test]
    fn plan_keeps_its_bound_and_places_every_image_once() {
        let items = items(40, 5);
        let all: f64 = items.iter().map(|item| item.bytes).sum();
        let capacity = all / 5.0 * 1.1;
        let plan = plan(&items, 5, Bound::Bytes(capacity)).expect("they fit");
        let mut placed: Vec<_> = plan.groups.iter().flatten().copied().collect();
        placed.sort();
        assert_eq!(placed, (0..40).map(ImageId).collect::<Vec<_>>());
        for group in &plan.groups {
            let bytes: f64 = group.iter().map(|id| items[id.0 as usize].bytes).sum();
            assert!(bytes <= capacity, "{bytes} of {capacity}");
        }
        let saved: f64 = plan.held.iter().map(Held::saved).sum();
        assert_eq!(saved, plan.saved);
        assert!(plan.saved > plan.random.most, "{:?}", plan.random);
    }

    #[test]
    fn waves_are_of_equal_size_and_better_than_chance() {
        let items = items(30, 6);
        let plan = waves(&items, 4).expect("a plan");
        assert_eq!(plan.groups.len(), 4);
        assert!(plan.groups.iter().all(|wave| wave.len() <= 8));
        assert!(plan.saved > plan.random.mean * 1.05, "{plan:?}");
        assert!(plan.round_robin.is_some());
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let items = items(10, 2);
        assert_eq!(plan(&[], 2, Bound::Images(3)), Err(PlanError::Nothing));
        assert_eq!(plan(&items, 0, Bound::Images(3)), Err(PlanError::Nothing));
        assert!(matches!(
            plan(&items, 2, Bound::Bytes(1000.0)),
            Err(PlanError::TooLarge { .. })
        ));
        let one = items.iter().map(|item| item.bytes).fold(0.0, f64::max);
        assert!(matches!(
            plan(&items, 2, Bound::Bytes(one)),
            Err(PlanError::NoRoom { .. })
        ));
    }

    #[test]
    fn groups_beyond_the_number_of_items_cost_nothing_and_change_nothing() {
        let items = items(8, 3);
        let all: f64 = items.iter().map(|item| item.bytes).sum();
        let bound = Bound::Bytes(all / 2.0);
        let as_many = plan(&items, 8, bound).expect("they fit");
        let far_more = plan(&items, usize::MAX, bound).expect("they fit");
        assert_eq!(
            (&far_more.groups, far_more.saved),
            (&as_many.groups, as_many.saved)
        );
        assert_eq!(far_more.round_robin, as_many.round_robin);
        // Of so many hosts, chance takes another one for each image.
        assert_eq!((far_more.random.plans, far_more.random.most), (RANDOM_PLANS, 0.0));
        assert!(as_many.random.most > 0.0);
        assert_eq!(waves(&items, 1 << 40).expect("a plan").groups.len(), 8);
    }
}
