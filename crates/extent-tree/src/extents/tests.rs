#![allow(clippy::unwrap_used)]

use super::{ExtentTree, Mapping, Run};
use crate::testing::{MemError, MemIo, Numbers, Told};
use crate::{MetaIo, Progress, TreeError};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use std::collections::BTreeMap;
use std::ops::Range;
use varve_format::{BlockNo, Extent, ExtentFlags, FileBlock, Ino, Tier, TreeRoot};

const TREE: ExtentTree = ExtentTree::of(Ino(42));

/// Where a file block lies.
type At = (Tier, u64, bool);

fn extent(file_block: u64, len: u32, tier: Tier, block: u64) -> Extent {
    Extent {
        file_block: FileBlock(file_block),
        len,
        tier,
        block: BlockNo(block),
        flags: ExtentFlags::empty(),
    }
}

fn range(start: u64, len: u64) -> Range<FileBlock> {
    FileBlock(start)..FileBlock(start + len)
}

fn check(io: &MemIo, root: &TreeRoot) -> Vec<Extent> {
    let (mut told, mut extents) = (Told::default(), Vec::new());
    TREE.check(io, root, &mut told, |extent| extents.push(extent));
    told.assert_clean(io);
    assert_eq!(TREE.node_blocks(root).unwrap() as usize, io.in_use().len());
    extents
}

fn blocks_of(extents: &[Extent]) -> BTreeMap<u64, At> {
    let each = |extent: &Extent| {
        let (tier, block) = (extent.tier, extent.block.0);
        let unwritten = extent.flags.contains(ExtentFlags::UNWRITTEN);
        let first = extent.file_block.0;
        (0..u64::from(extent.len)).map(move |i| (first + i, (tier, block + i, unwritten)))
    };
    extents.iter().flat_map(each).collect()
}

#[derive(Debug, Clone)]
enum Op {
    Replace(u64, Vec<(u8, u8, bool, u8)>),
    /// Extents at places all over the file: where after the last, blocks, tier, unwritten.
    ReplaceEach(Vec<(u16, u8, u8, bool)>),
    Remove(u64, u64),
    /// One extent over all of a range.
    Cover(u64, u64),
    /// Maps the block after (or before) an extent so that both join.
    Adjoin(u64, bool),
    RemoveSome(u64, usize),
    Truncate(u64),
    MarkWritten(u64, u64),
    Remap(u64, u64, bool),
    FreeSome(usize),
    /// Demotes this number of blocks.
    Demote(u16),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let piece = (1_u8..5, 0_u8..3, any::<bool>(), 0_u8..4);
    // Mostly single blocks at even places, where the file has single blocks.
    let gap = prop_oneof![4 => (0_u16..8).prop_map(|n| n * 2), 2 => 0_u16..4, 1 => 0_u16..300];
    let len = prop_oneof![8 => Just(1_u8), 2 => 1_u8..6, 1 => 1_u8..80];
    let place = (gap, len, 0_u8..12, any::<bool>());
    let op = prop_oneof![
        12 => (0_u64..1500, prop::collection::vec(piece, 1..6)).prop_map(|(at, new)| Op::Replace(at, new)),
        6 => prop::collection::vec(place, 1..80).prop_map(Op::ReplaceEach),
        3 => (0_u64..1500, 1_u64..30).prop_map(|(at, len)| Op::Remove(at, len)),
        1 => (0_u64..1500, 30_u64..600).prop_map(|(at, len)| Op::Remove(at, len)),
        3 => (0_u64..1500, any::<bool>()).prop_map(|(at, before)| Op::Adjoin(at, before)),
        2 => (0_u64..1500, 1_u64..400).prop_map(|(at, len)| Op::Cover(at, len)),
        1 => (0_u64..1500, 0_usize..60).prop_map(|(at, max)| Op::RemoveSome(at, max)),
        1 => (900_u64..3000).prop_map(Op::Truncate),
        1 => (0_u64..1500, 0_u64..40).prop_map(|(at, len)| Op::MarkWritten(at, len)),
        2 => (0_u64..1500, 0_u64..6, any::<bool>()).prop_map(|(at, len, stale)| Op::Remap(at, len, stale)),
        1 => (0_usize..5).prop_map(Op::FreeSome),
        2 => (0_u16..20).prop_map(Op::Demote),
    ];
    prop::collection::vec(op, 1..250)
}

fn sorted(runs: &[Run]) -> Vec<(Tier, u64)> {
    let each = |run: &Run| {
        let (tier, block) = (run.tier, run.block.0);
        (0..u64::from(run.len)).map(move |i| (tier, block + i))
    };
    let mut blocks: Vec<_> = runs.iter().flat_map(each).collect();
    blocks.sort_unstable();
    blocks
}

fn drain(model: &mut BTreeMap<u64, At>, range: Range<u64>) -> Vec<(Tier, u64)> {
    let keys: Vec<u64> = model.range(range).map(|(key, _)| *key).collect();
    let mut lost: Vec<_> = keys
        .iter()
        .map(|key| model.remove(key).unwrap())
        .map(|at| (at.0, at.1))
        .collect();
    lost.sort_unstable();
    lost
}

struct World {
    io: MemIo,
    root: TreeRoot,
    model: BTreeMap<u64, At>,
    next_block: u64,
}

impl World {
    fn step(&mut self, op: Op) {
        let (io, root, model) = (&mut self.io, &mut self.root, &mut self.model);
        match op {
            Op::Replace(at, pieces) => {
                let (mut new, mut next) = (Vec::new(), at);
                for (len, tier, unwritten, gap) in pieces {
                    // Now and then a piece goes on where the last ended, so that neighbours join.
                    self.next_block += u64::from(gap / 3) * 7;
                    let tier = Tier::ALL[usize::from(tier) / 2];
                    let mut piece = extent(next, u32::from(len), tier, self.next_block);
                    piece.flags.set(ExtentFlags::UNWRITTEN, unwritten && gap == 1);
                    next += u64::from(len) + u64::from(gap / 2);
                    self.next_block += u64::from(len);
                    new.push(piece);
                }
                let freed = TREE
                    .replace(io, root, FileBlock(at)..FileBlock(next), &new)
                    .unwrap();
                assert_eq!(sorted(&freed), drain(model, at..next));
                model.extend(blocks_of(&new));
            }
            Op::ReplaceEach(places) => {
                let (mut new, mut next) = (Vec::new(), 0);
                for (gap, len, kind, unwritten) in places {
                    let at = next + u64::from(gap);
                    // Now and then a block that goes on where the one before it in the file lies, so that
                    // neighbours join.
                    let before = at.checked_sub(1).and_then(|before| model.get(&before));
                    let (tier, block) = match before {
                        Some((tier, block, _)) if kind == 11 => (*tier, block + 1),
                        _ => (Tier::ALL[usize::from(kind) / 4], self.next_block),
                    };
                    let mut piece = extent(at, u32::from(len), tier, block);
                    piece
                        .flags
                        .set(ExtentFlags::UNWRITTEN, unwritten && kind % 4 == 1);
                    self.next_block += u64::from(len) + u64::from(kind % 2);
                    next = at + u64::from(len);
                    new.push(piece);
                }
                let freed = TREE.replace_each(io, root, &new).unwrap();
                let lost = |piece: &Extent| drain(model, piece.file_block.0..piece.end().0);
                let mut lost: Vec<_> = new.iter().flat_map(lost).collect();
                lost.sort_unstable();
                assert_eq!(sorted(&freed), lost);
                model.extend(blocks_of(&new));
            }
            Op::Remove(at, len) => {
                let freed = TREE.remove(io, root, range(at, len)).unwrap();
                assert_eq!(sorted(&freed), drain(model, at..at + len));
            }
            Op::Cover(at, len) => {
                let new = [extent(at, len as u32, Tier::Nvm, self.next_block)];
                self.next_block += len + 1;
                let freed = TREE.replace(io, root, range(at, len), &new).unwrap();
                assert_eq!(sorted(&freed), drain(model, at..at + len));
                model.extend(blocks_of(&new));
            }
            Op::Adjoin(at, before) => {
                let Some((&at, &(tier, block, unwritten))) = model.range(at..).next() else {
                    return;
                };
                let (at, block) = if before {
                    (at.wrapping_sub(1), block.wrapping_sub(1))
                } else {
                    (at + 1, block + 1)
                };
                if at > 5000 || block > u64::MAX / 2 {
                    return;
                }
                let mut new = [extent(at, 1, tier, block)];
                new[0].flags.set(ExtentFlags::UNWRITTEN, unwritten);
                let freed = TREE.replace(io, root, range(at, 1), &new).unwrap();
                assert_eq!(sorted(&freed), drain(model, at..at + 1));
                model.extend(blocks_of(&new));
            }
            Op::RemoveSome(at, max) => {
                let held: Vec<Extent> = TREE.extents(io, root, range(at, 700), usize::MAX).unwrap();
                let (freed, progress) = TREE.remove_some(io, root, range(at, 700), max).unwrap();
                let end = if held.len() <= max {
                    at + 700
                } else {
                    held[max].file_block.0
                };
                assert_eq!(progress == Progress::Done, held.len() <= max);
                assert_eq!(sorted(&freed), drain(model, at..end));
            }
            Op::Truncate(from) => {
                let freed = TREE.truncate(io, root, FileBlock(from)).unwrap();
                assert_eq!(sorted(&freed), drain(model, from..u64::MAX));
            }
            Op::MarkWritten(at, len) => {
                TREE.mark_written(io, root, range(at, len)).unwrap();
                model
                    .range_mut(at..at + len)
                    .for_each(|(_, block)| block.2 = false);
            }
            Op::Remap(at, len, stale) => {
                let Some(first) = model.get(&at).copied() else {
                    return;
                };
                let from = (first.0, BlockNo(first.1 + u64::from(stale)));
                let to = (Tier::Hdd, BlockNo(self.next_block));
                let stands = len > 0
                    && (0..len).all(|i| {
                        model
                            .get(&(at + i))
                            .is_some_and(|b| (b.0, b.1) == (from.0, from.1.0 + i))
                    });
                assert_eq!(TREE.remap(io, root, range(at, len), from, to).unwrap(), stands);
                if stands {
                    for i in 0..len {
                        let block = model.get_mut(&(at + i)).unwrap();
                        (block.0, block.1) = (Tier::Hdd, self.next_block + i);
                    }
                    self.next_block += len;
                }
            }
            Op::FreeSome(max) => {
                let (freed, progress) = TREE.free_some(io, root, max).unwrap();
                let count: u64 = freed.iter().map(|run| u64::from(run.len)).sum();
                let from = model.keys().rev().nth(count as usize).map_or(0, |key| key + 1);
                assert_eq!(sorted(&freed), drain(model, from..u64::MAX));
                assert_eq!(progress == Progress::Done, model.is_empty());
            }
            Op::Demote(max) => {
                *root = TREE.demote(io, root, &mut MemIo::some(max)).unwrap();
                if TREE.is_away(root).unwrap() {
                    assert_eq!(
                        io.away(),
                        io.in_use().len(),
                        "something hangs in NVM below what is away"
                    );
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(128))]

    #[test]
    fn tree_equals_a_map_after_any_changes(ops in ops(), at in 0_u64..1600, fill in 0_u64..900) {
        let mut world = World {
            io: MemIo::new(),
            root: TreeRoot::EMPTY,
            model: BTreeMap::new(),
            next_block: 1,
        };
        for i in 0..fill {
            world.step(Op::Replace(i * 2, vec![(1, 0, false, 3)]));
        }
        for (count, op) in ops.into_iter().enumerate() {
            world.step(op);
            if count % 16 == 0 {
                prop_assert_eq!(&blocks_of(&check(&world.io, &world.root)), &world.model);
            }
        }
        let (io, root, model) = (&world.io, &world.root, &world.model);
        let extents = check(io, root);
        prop_assert_eq!(&blocks_of(&extents), model);
        prop_assert!(extents.windows(2).all(|pair| !pair[0].joins(&pair[1])), "neighbours were not joined");
        let counts = TREE.counts(root).unwrap();
        prop_assert_eq!(counts.total(), model.len() as u64);
        for tier in Tier::ALL {
            let mapped = model.values().filter(|at| at.0 == tier).count() as u64;
            prop_assert_eq!(counts.mapped[tier as usize], mapped);
        }
        let expected = match extents.iter().find(|extent| extent.end().0 > at) {
            Some(extent) if extent.file_block.0 <= at => Mapping::Mapped(*extent),
            other => Mapping::Hole { until: other.map(|extent| extent.file_block) },
        };
        prop_assert_eq!(TREE.lookup(io, root, FileBlock(at)).unwrap(), expected);
        let clipped: Vec<Extent> = extents.iter().filter_map(|e| e.clip(FileBlock(at), FileBlock(at + 50))).collect();
        prop_assert_eq!(TREE.extents(io, root, range(at, 50), usize::MAX).unwrap(), clipped);
    }
}

/// A file of `count` extents that cannot join, in random order if `seed` says so.
fn build(count: u64, seed: Option<u64>) -> (MemIo, TreeRoot) {
    let (mut io, mut root) = (MemIo::new(), TreeRoot::EMPTY);
    let mut order: Vec<u64> = (0..count).collect();
    if let Some(seed) = seed {
        let mut numbers = Numbers::new(seed);
        for i in (1..order.len()).rev() {
            order.swap(i, numbers.below(i as u64 + 1) as usize);
        }
    }
    for i in order {
        let new = extent(i * 3, 2, Tier::Ssd, i * 2 + 7);
        TREE.replace(&mut io, &mut root, range(i * 3, 2), &[new]).unwrap();
    }
    (io, root)
}

#[test]
fn tree_of_a_million_extents_stays_low_and_full_when_appended() {
    let count = 1_000_000;
    let (mut io, mut root) = build(count, None);
    assert_eq!(TREE.counts(&root).unwrap().extents, count);
    let nodes = u64::from(TREE.node_blocks(&root).unwrap());
    assert!(nodes < count / 140, "{nodes} nodes");
    let mut numbers = Numbers::new(5);
    for _ in 0..2000 {
        let i = numbers.below(count);
        let (found, reads) = io.reads_of(|| TREE.lookup(&io, &root, FileBlock(i * 3 + 1)).unwrap());
        assert_eq!(found, Mapping::Mapped(extent(i * 3, 2, Tier::Ssd, i * 2 + 7)));
        assert!(reads <= 3, "{reads} reads");
        let hole = TREE.lookup(&io, &root, FileBlock(i * 3 + 2)).unwrap();
        let until = (i + 1 < count).then_some(FileBlock(i * 3 + 3));
        assert_eq!(hole, Mapping::Hole { until });
    }
    assert_eq!(check(&io, &root).len() as u64, count);
    let mut freed = 0;
    loop {
        let (runs, progress) = TREE.free_some(&mut io, &mut root, 1000).unwrap();
        assert!(runs.len() <= 1000);
        freed += runs.len() as u64;
        if progress == Progress::Done {
            break;
        }
        assert!(!runs.is_empty());
        if freed % 250_000 == 0 {
            assert_eq!(check(&io, &root).len() as u64, count - freed);
        }
    }
    assert_eq!((freed, root, io.in_use().len()), (count, TreeRoot::EMPTY, 0));
}

#[test]
fn tree_does_not_degenerate_when_random_extents_go() {
    let count = 30_000;
    let (mut io, mut root) = build(count, Some(3));
    let nodes = u64::from(TREE.node_blocks(&root).unwrap());
    assert!(nodes < count / 80, "{nodes} nodes");
    let mut numbers = Numbers::new(9);
    let mut left: Vec<u64> = (0..count).collect();
    while left.len() > 300 {
        let i = left.swap_remove(numbers.below(left.len() as u64) as usize);
        TREE.remove(&mut io, &mut root, range(i * 3, 3)).unwrap();
    }
    assert_eq!(check(&io, &root).len(), 300);
    let nodes = TREE.node_blocks(&root).unwrap();
    assert!(nodes <= 13, "{nodes} nodes for 300 extents");
    for i in left {
        TREE.remove(&mut io, &mut root, range(i * 3, 1)).unwrap();
        TREE.remove(&mut io, &mut root, range(i * 3 + 1, 1)).unwrap();
    }
    assert_eq!((root, io.in_use().len()), (TreeRoot::EMPTY, 0));
}

#[test]
fn tree_empties_when_extents_go_from_the_front() {
    let count = 40_000;
    let (mut io, mut root) = build(count, Some(21));
    for i in 0..count {
        assert_eq!(TREE.remove(&mut io, &mut root, range(i * 3, 3)).unwrap().len(), 1);
        if i % 8000 == 0 {
            assert_eq!(check(&io, &root).len() as u64, count - i - 1);
        }
    }
    assert_eq!((root, io.in_use().len()), (TreeRoot::EMPTY, 0));
}

#[test]
fn extent_is_found_from_the_next_leaf_when_it_covers_that_leafs_first_blocks() {
    let (mut io, mut root) = build(1000, None);
    // Leaves hold 144 extents: each of these covers the first extents of a leaf, but begins in the leaf
    // before.
    for leaf in 1..6 {
        let at = leaf * 144 * 3 - 3;
        let long = extent(at, 60, Tier::Hdd, 1_000_000 + at);
        TREE.replace(&mut io, &mut root, range(at, 60), &[long]).unwrap();
        for inside in [at, at + 3, at + 30, at + 59] {
            assert_eq!(
                TREE.lookup(&io, &root, FileBlock(inside)).unwrap(),
                Mapping::Mapped(long)
            );
        }
        let freed = TREE.remove(&mut io, &mut root, range(at + 40, 1)).unwrap();
        assert_eq!(sorted(&freed), [(Tier::Hdd, 1_000_000 + at + 40)]);
    }
    check(&io, &root);
}

#[test]
fn neighbours_join_when_a_gap_between_them_is_filled() {
    for count in [0, 1000] {
        let (mut io, mut root) = build(count, None);
        let far = 100_000;
        let before = TREE.counts(&root).unwrap().extents;
        for at in [far, far + 2, far + 1] {
            let new = extent(at, 1, Tier::Nvm, 5_000_000 + at);
            TREE.replace(&mut io, &mut root, range(at, 1), &[new]).unwrap();
        }
        let whole = extent(far, 3, Tier::Nvm, 5_000_000 + far);
        assert_eq!(
            TREE.lookup(&io, &root, FileBlock(far + 2)).unwrap(),
            Mapping::Mapped(whole)
        );
        assert_eq!(TREE.counts(&root).unwrap().extents, before + 1);
        check(&io, &root);
    }
}

#[test]
fn small_tree_lies_in_the_inode_when_it_fits() {
    let (mut io, mut root) = build(4, None);
    assert_eq!(io.in_use().len(), 0);
    TREE.replace(&mut io, &mut root, range(100, 1), &[extent(100, 1, Tier::Nvm, 9)])
        .unwrap();
    assert_eq!(io.in_use().len(), 1);
    TREE.remove(&mut io, &mut root, range(0, 6)).unwrap();
    assert_eq!(io.in_use().len(), 1);
    TREE.truncate(&mut io, &mut root, FileBlock(50)).unwrap();
    assert_eq!(io.in_use().len(), 0);
    assert_eq!(check(&io, &root).len(), 2);
}

#[test]
fn extents_out_of_bounds_are_refused_with_nothing_changed() {
    let (mut io, mut root) = build(10, None);
    let before = root;
    let far = varve_format::FILE_BLOCKS_MAX;
    let cases = [
        (range(0, 5), vec![extent(4, 2, Tier::Nvm, 1)]),
        (range(5, 5), vec![extent(4, 2, Tier::Nvm, 1)]),
        (
            range(0, 9),
            vec![extent(4, 2, Tier::Nvm, 1), extent(5, 2, Tier::Nvm, 1)],
        ),
        (range(0, 9), vec![extent(4, 0, Tier::Nvm, 1)]),
        (range(0, far * 2), vec![extent(far - 1, 2, Tier::Nvm, 1)]),
        (
            range(0, 9),
            vec![extent(1, 2, Tier::Nvm, varve_format::TIER_BLOCKS_MAX - 1)],
        ),
    ];
    for (range, new) in cases {
        let error = TREE.replace(&mut io, &mut root, range, &new).unwrap_err();
        let bad = matches!(
            error,
            MemError::Tree(TreeError::BadExtent(_) | TreeError::BadOrder(_))
        );
        assert!(bad, "{error:?}");
    }
    assert_eq!(root, before);
    assert_eq!(check(&io, &root).len(), 10);
    let last = extent(far - 1, 1, Tier::Nvm, 1);
    TREE.replace(&mut io, &mut root, range(far - 1, 1), &[last])
        .unwrap();
    assert_eq!(
        TREE.lookup(&io, &root, FileBlock(far - 1)).unwrap(),
        Mapping::Mapped(last)
    );
}

#[test]
fn leaf_is_read_and_changed_once_for_all_that_is_replaced_in_it() {
    let (count, mut numbers) = (30_000, Numbers::new(17));
    let (mut io, mut root) = build(count, None);
    let nodes = TREE.node_blocks(&root).unwrap();
    let mut model = blocks_of(&check(&io, &root));
    let mut block = 1_000_000;
    for many in [1_u64, 40, 4000] {
        let mut new: Vec<_> = (0..many)
            .map(|_| {
                block += 3;
                extent(numbers.below(count) * 3, 2, Tier::Nvm, block)
            })
            .collect();
        new.sort_unstable_by_key(|piece| piece.file_block);
        new.dedup_by_key(|piece| piece.file_block);
        let before = io.reads.get();
        let freed = TREE.replace_each(&mut io, &mut root, &new).unwrap();
        let reads = io.reads.get() - before;
        assert!(
            reads <= 20 + 6 * many.min(count / 144),
            "{reads} reads for {many}"
        );
        let lost = |piece: &Extent| drain(&mut model, piece.file_block.0..piece.end().0);
        let mut lost: Vec<_> = new.iter().flat_map(lost).collect();
        lost.sort_unstable();
        assert_eq!(sorted(&freed), lost);
        model.extend(blocks_of(&new));
        assert_eq!(blocks_of(&check(&io, &root)), model);
    }
    assert_eq!(TREE.node_blocks(&root).unwrap(), nodes);
}

#[test]
fn extents_given_out_of_order_are_refused_with_nothing_changed() {
    let (mut io, mut root) = build(10, None);
    let before = root;
    for second in [
        extent(3, 1, Tier::Nvm, 9),
        extent(4, 1, Tier::Nvm, 9),
        extent(7, 0, Tier::Nvm, 9),
    ] {
        let new = [extent(4, 2, Tier::Nvm, 5), second];
        let error = TREE.replace_each(&mut io, &mut root, &new).unwrap_err();
        assert!(matches!(
            error,
            MemError::Tree(TreeError::BadExtent(_) | TreeError::BadOrder(_))
        ));
    }
    assert_eq!(TREE.replace_each(&mut io, &mut root, &[]).unwrap(), []);
    assert_eq!(root, before);
    assert_eq!(check(&io, &root).len(), 10);
}

#[test]
fn change_fails_when_there_is_no_space() {
    let (mut io, mut root) = build(4, None);
    io.space = 0;
    let error = TREE.replace(&mut io, &mut root, range(100, 1), &[extent(100, 1, Tier::Nvm, 9)]);
    assert_eq!(error, Err(MemError::NoSpace));
    assert_eq!(check(&io, &root).len(), 4);
}

#[test]
fn corrupt_blocks_give_errors_and_never_panics_or_loops() {
    let (clean, root) = build(40_000, Some(7));
    let blocks: Vec<BlockNo> = clean.in_use().into_iter().collect();
    let mut numbers = Numbers::new(11);
    let (mut found, rounds) = (0, 400);
    let top = match root.form().unwrap() {
        varve_format::TreeForm::Nodes(top, _) => top.block,
        varve_format::TreeForm::Inline(_) => unreachable!("40,000 extents are not inline"),
    };
    let mut io = clean.clone();
    for round in 0..rounds {
        let block = if round % 4 == 0 {
            top
        } else {
            blocks[numbers.below(blocks.len() as u64) as usize]
        };
        let saved = *io.block_mut(block);
        for _ in 0..=numbers.below(3) {
            let area = if numbers.below(2) == 0 { 60 } else { 4096 };
            let (byte, bit) = (numbers.below(area) as usize, numbers.below(8));
            io.block_mut(block)[byte] ^= 1 << bit;
        }
        io.reads_max = io.reads.get() + 5000;
        let mut told = Told::default();
        TREE.check(&io, &root, &mut told, |_| ());
        found += u64::from(!told.faults.is_empty() || !told.unreadable.is_empty());
        let mut changed = io.clone();
        let mut root = root;
        for _ in 0..4 {
            let at = numbers.below(120_000);
            let _ = TREE.lookup(&changed, &root, FileBlock(at));
            let _ = TREE.extents(&changed, &root, range(at, 3000), 500);
            let _ = TREE.remove(&mut changed, &mut root, range(at, 600));
            let new = extent(at, 1, Tier::Hdd, 1);
            let _ = TREE.replace(&mut changed, &mut root, range(at, 1), &[new]);
            let each: Vec<_> = (0..50)
                .map(|n| extent(at + n * 30, 1, Tier::Ssd, 2 * n))
                .collect();
            let _ = TREE.replace_each(&mut changed, &mut root, &each);
            let _ = TREE.free_some(&mut changed, &mut root, 100);
        }
        *io.block_mut(block) = saved;
    }
    assert!(found > rounds / 3, "only {found} of {rounds} were noticed");
}

#[test]
fn any_bit_of_kind_owner_place_or_level_is_noticed() {
    let (mut io, root) = build(2000, None);
    for block in io.in_use() {
        for byte in (4..24).chain([32]) {
            io.block_mut(block)[byte] ^= 1;
            let mut told = Told::default();
            TREE.check(&io, &root, &mut told, |_| ());
            assert!(!told.faults.is_empty(), "byte {byte} of block {block}");
            io.block_mut(block)[byte] ^= 1;
        }
    }
    check(&io, &root);
}

#[test]
fn walk_goes_on_when_a_block_is_gone_or_reached_twice() {
    let (mut io, root) = build(2000, None);
    let leaf = *io.in_use().first().unwrap();
    io.free(leaf).unwrap();
    let (mut told, mut count) = (Told::default(), 0);
    TREE.check(&io, &root, &mut told, |_| count += 1);
    assert_eq!(told.unreadable, [leaf]);
    assert!((1500..2000).contains(&count), "{count}");
}
