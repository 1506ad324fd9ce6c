//! Each policy's sets against a plain model: a list in order of use and a map of the places on disk.

use super::{Index, Place, ResidentIndex, Set};
use crate::policy::{Policy, Shape};
use proptest::prelude::*;
use std::collections::HashMap;

#[derive(Debug, Clone)]
enum Op {
    Insert { tag: u8, place: Place },
    Touch { tag: u8 },
    Remove { tag: u8 },
    Kill { generation: u8 },
}

fn place() -> impl Strategy<Value = Place> {
    (any::<u32>(), 0u8..16, any::<u8>()).prop_map(|(position, generation, prefetch)| Place {
        position,
        generation,
        prefetch,
    })
}

fn op() -> impl Strategy<Value = Op> {
    // Few tags, so that they collide.
    let tag = || 1u8..40;
    prop_oneof![
        6 => (tag(), place()).prop_map(|(tag, place)| Op::Insert { tag, place }),
        4 => tag().prop_map(|tag| Op::Touch { tag }),
        1 => tag().prop_map(|tag| Op::Remove { tag }),
        1 => (0u8..16).prop_map(|generation| Op::Kill { generation }),
    ]
}

fn shape() -> impl Strategy<Value = Shape> {
    let indexed = Policy::ALL.into_iter().filter(|policy| policy.has_index());
    let shapes: Vec<_> = indexed
        .flat_map(|policy| [4u8, 8, 16].map(|ways| (policy, ways)))
        .flat_map(|(policy, ways)| (ways / 4..=ways).map(move |kept| (policy, ways, kept)))
        .filter_map(|(policy, ways, kept)| Shape::with(policy, ways, Some(kept)).ok())
        .collect();
    proptest::sample::select(shapes)
}

/// The expected set: objects in order of use, the most recently used first.
struct Model {
    shape: Shape,
    objects: Vec<(u8, Place)>,
    /// Places that are no longer in memory, by slot, as the position file keeps them.
    on_disk: HashMap<usize, Place>,
}

impl Model {
    fn agrees(&self, set: &Set) {
        let shape = self.shape;
        let mut ranks: Vec<_> = (0..shape.ways()).map(|slot| set.entry(slot).rank).collect();
        ranks.sort_unstable();
        assert_eq!(
            ranks,
            (0..shape.ways()).collect::<Vec<_>>(),
            "ranks are a permutation"
        );
        let mut entries: Vec<_> = set.entries().collect();
        assert!(entries.len() <= shape.ways());
        entries.sort_by_key(|entry| entry.rank);
        let tags: Vec<_> = entries.iter().map(|entry| entry.tag).collect();
        let want: Vec<_> = self.objects.iter().map(|object| object.0).collect();
        assert_eq!(tags, want, "the same objects in the same order, none twice");
        for (entry, (_, place)) in entries.iter().zip(&self.objects) {
            if !shape.has_generations() {
                assert_eq!(entry.place, None);
                continue;
            }
            assert_eq!(entry.generation, place.generation);
            let found = entry.place.unwrap_or_else(|| self.on_disk[&entry.slot]);
            assert_eq!(found.position, place.position);
            if shape.prefetches() > 0 {
                assert_eq!(found.prefetch, place.prefetch);
            }
        }
    }
}

proptest! {
    #[test]
    fn set_agrees_with_a_list_in_order_of_use(
        shape in shape(),
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let mut set = Set::empty(shape);
        let mut model = Model { shape, objects: Vec::new(), on_disk: HashMap::new() };
        let mut dead = None;
        let mut packed = vec![0; shape.set_bytes()];
        prop_assert_eq!(Set::unpack(shape, &packed), Some(Set::empty(shape)), "zeros are the empty set");
        for op in ops {
            match op {
                Op::Insert { tag, place } => {
                    let is_dead = |generation: u8| shape.has_generations() && dead == Some(generation);
                    let victim = if let Some(at) = model.objects.iter().position(|object| object.0 == tag) {
                        Some(at)
                    } else if model.objects.len() < shape.ways() {
                        None
                    } else {
                        let dead = model.objects.iter().rposition(|object| is_dead(object.1.generation));
                        Some(dead.unwrap_or(model.objects.len() - 1))
                    };
                    let evicted = victim.map(|at| model.objects.remove(at).0);
                    model.objects.insert(0, (tag, place));
                    let done = set.insert(tag, place, |entry| is_dead(entry.generation));
                    prop_assert_eq!(done.evicted.map(|entry| entry.tag), evicted);
                    model.on_disk.extend(done.demoted.map(|demoted| (demoted.slot, demoted.place)));
                }
                Op::Touch { tag } => if let Some(entry) = set.find(tag) {
                    let at = model.objects.iter().position(|object| object.0 == tag).expect("it is there");
                    let object = model.objects.remove(at);
                    model.objects.insert(0, object);
                    let place = entry.place.or_else(|| model.on_disk.get(&entry.slot).copied());
                    let demoted = set.touch(entry.slot, place.unwrap_or_default());
                    model.on_disk.extend(demoted.map(|demoted| (demoted.slot, demoted.place)));
                }
                Op::Remove { tag } => if let Some(entry) = set.find(tag) {
                    set.remove(entry.slot);
                    model.objects.retain(|object| object.0 != tag);
                }
                Op::Kill { generation } => dead = Some(generation),
            }
            model.agrees(&set);
            set.pack(&mut packed);
            let again = Set::unpack(shape, &packed).expect("it was packed here");
            model.agrees(&again);
            set = again;
        }
    }

    #[test]
    fn unpack_never_panics_and_gives_only_sound_sets(
        shape in shape(),
        bytes in proptest::collection::vec(any::<u8>(), 128),
    ) {
        if let Some(set) = Set::unpack(shape, &bytes[..shape.set_bytes()]) {
            let mut ranks: Vec<_> = (0..shape.ways()).map(|slot| set.entry(slot).rank).collect();
            ranks.sort_unstable();
            prop_assert_eq!(ranks, (0..shape.ways()).collect::<Vec<_>>());
            let mut tags: Vec<_> = set.entries().map(|entry| entry.tag).collect();
            let all = tags.len();
            tags.sort_unstable();
            tags.dedup();
            prop_assert_eq!(tags.len(), all);
        }
    }

    #[test]
    fn resident_sets_are_whole_or_absent_and_within_capacity(
        numbers in proptest::collection::vec(0u64..400, 1..600)
    ) {
        let shape = Shape::new(Policy::SetMemLru);
        let mut index = ResidentIndex::new(shape, 64);
        let mut last: HashMap<u64, u8> = HashMap::new();
        for (n, number) in numbers.into_iter().enumerate() {
            let tag = 1 + (n % 255) as u8;
            let mut set = Set::empty(shape);
            set.insert(tag, Place::default(), |_| false);
            index.put(number, &set);
            last.insert(number, tag);
            let found = index.get(number).expect("it was put just now");
            prop_assert!(found.find(tag).is_some());
        }
        let mut present = 0;
        for (number, tag) in last {
            if let Some(set) = index.get(number) {
                present += 1;
                prop_assert!(set.find(tag).is_some(), "a set as it was put last");
            }
        }
        prop_assert!(present <= index.capacity());
    }
}

#[test]
fn resident_keeps_the_sets_used_last_of_a_group() {
    let shape = Shape::new(Policy::SetMemLru);
    let mut index = ResidentIndex::new(shape, 16);
    let empty = Set::empty(shape);
    for number in 0..16 {
        index.put(number, &empty);
    }
    assert!(index.get(0).is_some());
    index.put(99, &empty);
    assert!(index.get(0).is_some(), "it was used after 1");
    assert!(index.get(1).is_none(), "it was the one not used for longest");
}

#[test]
fn unloaded_sets_are_told_from_empty_ones() {
    let shape = Shape::new(Policy::SetMemLru);
    let mut index = Index::new(shape, 100, 50);
    assert!(matches!(index, Index::Full(_)), "half of the sets: all are kept");
    assert_eq!(index.get(7), None);
    index.put(7, &Set::empty(shape));
    assert_eq!(index.get(7), Some(Set::empty(shape)));
}

#[test]
fn set_mem_lru_keeps_its_sets_when_it_becomes_set_mem_and_back() {
    let shape = Shape::new(Policy::SetMemLru);
    let mut index = Index::new(shape, 1000, 100);
    let mut set = Set::empty(shape);
    set.insert(5, Place::default(), |_| false);
    index.put(3, &set);
    index.resize(shape, 1000, 500);
    assert!(matches!(index, Index::Full(_)));
    assert_eq!(index.get(3), Some(set.clone()));
    assert_eq!(index.get(4), None, "nobody knows what set 4 has");
    index.resize(shape, 1000, 100);
    assert!(matches!(index, Index::Resident(_)));
    assert_eq!(index.get(3), Some(set));
}

#[test]
fn resident_index_takes_less_memory_below_half_of_the_sets() {
    let (lru, mem) = (Shape::new(Policy::SetMemLru), Shape::new(Policy::SetMem));
    let sets = 100_000;
    let full = Index::new(mem, sets, 0).memory_bytes();
    assert_eq!(full, sets * 11);
    let part = Index::new(lru, sets, sets / 2 - 1).memory_bytes();
    assert!(part < full * 3 / 4, "{part} of {full}");
}
