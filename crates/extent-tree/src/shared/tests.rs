#![allow(clippy::unwrap_used)]

use super::SharedRuns;
use crate::testing::{MemError, MemIo, Numbers, Told};
use crate::{Fault, TreeError};
use std::collections::BTreeMap;
use varve_format::{BlockNo, SHARED_REFS_MAX, SharedRoot, SharedRun, Tier};

const RUNS: SharedRuns = SharedRuns::new();

fn run(first: u64, len: u32, refs: u32, block: u64) -> SharedRun {
    SharedRun {
        first,
        refs,
        len,
        tier: Tier::Ssd,
        block: BlockNo(block),
    }
}

fn all(io: &MemIo, root: &SharedRoot) -> Vec<SharedRun> {
    let mut told = Told::default();
    let mut runs = Vec::new();
    RUNS.check(io, root, &mut told, |run| runs.push(run));
    told.assert_clean(io);
    runs
}

#[test]
fn run_is_cut_where_references_begin_and_end_and_joined_when_they_are_alike() {
    let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
    RUNS.add(&mut io, &mut root, &run(100, 50, 2, 7)).unwrap();
    RUNS.reference(&mut io, &mut root, 110..120).unwrap();
    assert_eq!(
        all(&io, &root),
        [run(100, 10, 2, 7), run(110, 10, 3, 17), run(120, 30, 2, 27)]
    );
    assert_eq!(RUNS.release(&mut io, &mut root, 110..120), Ok(vec![]));
    assert_eq!(all(&io, &root), [run(100, 50, 2, 7)]);
    assert_eq!(RUNS.release(&mut io, &mut root, 100..150), Ok(vec![]));
    let gone = RUNS.release(&mut io, &mut root, 130..140).unwrap();
    assert_eq!(gone, [run(130, 10, 1, 37)]);
    assert_eq!(all(&io, &root), [run(100, 30, 1, 7), run(140, 10, 1, 47)]);
}

#[test]
fn runs_that_follow_one_another_only_in_the_shared_space_stay_apart() {
    let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
    RUNS.add(&mut io, &mut root, &run(0, 5, 2, 7)).unwrap();
    RUNS.add(&mut io, &mut root, &run(5, 5, 2, 13)).unwrap();
    assert_eq!(all(&io, &root).len(), 2);
    RUNS.add(&mut io, &mut root, &run(10, 5, 2, 18)).unwrap();
    assert_eq!(all(&io, &root), [run(0, 5, 2, 7), run(5, 10, 2, 13)]);
}

#[test]
fn number_in_no_run_is_damage_and_changes_nothing() {
    let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
    RUNS.add(&mut io, &mut root, &run(10, 5, 2, 7)).unwrap();
    RUNS.add(&mut io, &mut root, &run(20, 5, 2, 70)).unwrap();
    let before = all(&io, &root);
    for (range, missing) in [(8..12, 8), (10..17, 15), (12..22, 15), (30..31, 30)] {
        let expected = MemError::Tree(RUNS.tree.bad_root(Fault::NoRun(missing)));
        assert_eq!(RUNS.release(&mut io, &mut root, range.clone()), Err(expected));
        assert!(RUNS.reference(&mut io, &mut root, range.clone()).is_err());
        assert!(RUNS.runs(&io, &root, range, 9).is_err());
    }
    assert_eq!(all(&io, &root), before);
}

#[test]
fn references_end_at_the_most_that_a_run_can_have() {
    let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
    RUNS.add(&mut io, &mut root, &run(0, 5, 2, 7)).unwrap();
    RUNS.add(&mut io, &mut root, &run(5, 5, SHARED_REFS_MAX, 70))
        .unwrap();
    let full = MemError::Tree(TreeError::References(5));
    let before = all(&io, &root);
    assert_eq!(RUNS.reference(&mut io, &mut root, 2..8), Err(full));
    assert_eq!(all(&io, &root), before);
}

#[test]
fn run_that_moves_is_cut_and_joined_again() {
    let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
    RUNS.add(&mut io, &mut root, &run(0, 30, 2, 100)).unwrap();
    RUNS.reference(&mut io, &mut root, 0..12).unwrap();
    let to = (Tier::Hdd, BlockNo(9));
    // It lies elsewhere, or not all of it lies there.
    for (range, at) in [(10..20, 111), (10..31, 110), (5..5, 105)] {
        let from = (Tier::Ssd, BlockNo(at));
        assert_eq!(RUNS.relocate(&mut io, &mut root, range, from, to), Ok(false));
    }
    let from = (Tier::Ssd, BlockNo(110));
    assert_eq!(RUNS.relocate(&mut io, &mut root, 10..20, from, to), Ok(true));
    let moved = |first, len, refs, block| SharedRun {
        tier: Tier::Hdd,
        ..run(first, len, refs, block)
    };
    let expected = [
        run(0, 10, 3, 100),
        moved(10, 2, 3, 9),
        moved(12, 8, 2, 11),
        run(20, 10, 2, 120),
    ];
    assert_eq!(all(&io, &root), expected);
    assert_eq!(RUNS.relocate(&mut io, &mut root, 10..20, to, from), Ok(true));
    assert_eq!(all(&io, &root), [run(0, 12, 3, 100), run(12, 18, 2, 112)]);
}

#[test]
fn counts_are_those_of_a_model_whatever_is_done() {
    for seed in 0..30 {
        let mut numbers = Numbers::new(seed);
        let (mut io, mut root) = (MemIo::new(), SharedRoot::default());
        let mut model: BTreeMap<u64, (u32, Tier, u64)> = BTreeMap::new();
        let mut next = numbers.below(3);
        for _ in 0..400 {
            let len = numbers.below(40) + 1;
            // A range of numbers that are all in runs.
            let start = model
                .keys()
                .nth(numbers.below(model.len().max(1) as u64) as usize)
                .copied();
            let covered = start.map(|start| {
                let end = (start..start + len).find(|number| !model.contains_key(number));
                start..end.unwrap_or(start + len)
            });
            match (numbers.below(5), covered) {
                (1..=2, Some(range)) => {
                    RUNS.reference(&mut io, &mut root, range.clone()).unwrap();
                    range.for_each(|number| model.get_mut(&number).unwrap().0 += 1);
                }
                (3, Some(range)) => {
                    let gone = RUNS.release(&mut io, &mut root, range.clone()).unwrap();
                    let mut freed: Vec<_> = gone
                        .iter()
                        .flat_map(|run| (0..u64::from(run.len)).map(|at| (run.tier, run.block.0 + at)))
                        .collect();
                    let mut expected = Vec::new();
                    for number in range {
                        let entry = model.get_mut(&number).unwrap();
                        entry.0 -= 1;
                        if entry.0 == 0 {
                            let (_, tier, block) = model.remove(&number).unwrap();
                            expected.push((tier, block));
                        }
                    }
                    freed.sort_unstable();
                    expected.sort_unstable();
                    assert_eq!(freed, expected, "seed {seed}");
                }
                (4, Some(range)) => {
                    let (_, tier, block) = model[&range.start];
                    let lies = |number: u64| {
                        let (_, found, at) = model[&number];
                        (found, at) == (tier, block + (number - range.start))
                    };
                    let whole = range.clone().all(lies);
                    let to = (Tier::Hdd, BlockNo(numbers.below(1 << 40)));
                    let moved = RUNS.relocate(&mut io, &mut root, range.clone(), (tier, BlockNo(block)), to);
                    assert_eq!(moved, Ok(whole), "seed {seed}");
                    for number in range.clone().filter(|_| whole) {
                        let entry = model.get_mut(&number).unwrap();
                        (entry.1, entry.2) = (to.0, to.1.0 + (number - range.start));
                    }
                }
                _ => {
                    let block = numbers.below(1 << 40);
                    let refs = numbers.below(3) as u32 + 1;
                    RUNS.add(&mut io, &mut root, &run(next, len as u32, refs, block))
                        .unwrap();
                    for at in 0..len {
                        model.insert(next + at, (refs, Tier::Ssd, block + at));
                    }
                    next += len + numbers.below(2) * numbers.below(9);
                }
            }
        }
        let mut found = BTreeMap::new();
        for run in all(&io, &root) {
            for at in 0..u64::from(run.len) {
                found.insert(run.first + at, (run.refs, run.tier, run.block.0 + at));
            }
        }
        assert_eq!(found, model, "seed {seed}");
        for number in model.keys().copied().collect::<Vec<_>>() {
            while let Some((refs, ..)) = model.get(&number) {
                RUNS.release(&mut io, &mut root, number..number + 1).unwrap();
                match refs {
                    1 => drop(model.remove(&number)),
                    _ => model.get_mut(&number).unwrap().0 -= 1,
                }
            }
        }
        assert_eq!((root, io.in_use().len()), (SharedRoot::default(), 0));
    }
}
