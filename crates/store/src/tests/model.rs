//! Random operations against a plain model of files and directories.
use super::*;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_oneof, proptest};
use std::collections::HashMap;
use varve_format::FileBlock;

#[derive(Debug, Clone)]
enum Op {
    Create(u8),
    Unlink(u8),
    Rename(u8, u8),
    Write(u8, u16, u16, u8),
    /// Pieces all over the file: blocks from the last, and of what kind.
    Scatter(u8, Vec<(u8, u8)>, u8),
    Truncate(u8, u16),
    Punch(u8, u16, u16),
    Zero(u8, u16, u16),
    Allocate(u8, u16, u16),
    Migrate(u8, u8),
    /// From, to; first block of each; blocks.
    Share(u8, u8, u8, u8, u8),
    /// First block, blocks.
    Unshare(u8, u8, u8),
    /// On SSD, or on HDD.
    Defrag(u8, bool),
    Commit,
    Abort,
    Reopen,
    /// Commits, and demotes this number of metadata blocks.
    Demote(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let name = 0_u8..6;
    prop_oneof![
        3 => name.clone().prop_map(Op::Create),
        2 => name.clone().prop_map(Op::Unlink),
        2 => (name.clone(), name.clone()).prop_map(|(a, b)| Op::Rename(a, b)),
        8 => (name.clone(), 0_u16..50_000, 1_u16..20_000, any::<u8>()).prop_map(|(n, o, l, s)| Op::Write(n, o, l, s)),
        6 => (name.clone(), prop::collection::vec((0_u8..5, any::<u8>()), 1..24), any::<u8>())
            .prop_map(|(n, places, s)| Op::Scatter(n, places, s)),
        2 => (name.clone(), 0_u16..60_000).prop_map(|(n, s)| Op::Truncate(n, s)),
        2 => (name.clone(), 0_u16..50_000, 1_u16..20_000).prop_map(|(n, o, l)| Op::Punch(n, o, l)),
        1 => (name.clone(), 0_u16..50_000, 1_u16..15_000).prop_map(|(n, o, l)| Op::Zero(n, o, l)),
        1 => (name.clone(), 0_u16..50_000, 1_u16..15_000).prop_map(|(n, o, l)| Op::Allocate(n, o, l)),
        3 => (name.clone(), 0_u8..3).prop_map(|(n, t)| Op::Migrate(n, t)),
        3 => (name.clone(), 0_u8..12, 1_u8..16).prop_map(|(n, at, len)| Op::Unshare(n, at, len)),
        5 => (name.clone(), any::<bool>()).prop_map(|(n, ssd)| Op::Defrag(n, ssd)),
        6 => (name.clone(), name, 0_u8..12, 0_u8..12, 1_u8..16)
            .prop_map(|(a, b, from, to, len)| Op::Share(a, b, from, to, len)),
        4 => Just(Op::Commit),
        1 => Just(Op::Abort),
        1 => Just(Op::Reopen),
        2 => any::<u8>().prop_map(Op::Demote),
    ]
}

type Model = HashMap<u8, Vec<u8>>;

fn name(n: u8) -> String {
    format!("file {n}")
}

fn ino(tx: &Tx<'_>, n: u8) -> Option<Ino> {
    tx.dir_lookup(ROOT_INO, name(n).as_bytes())
        .unwrap()
        .map(|item| item.key.ino)
}

/// Ascending pieces (offset, length): whole blocks, parts of one, some that reach into the next, some that go
/// on where the last one ends.
fn scattered(places: &[(u8, u8)]) -> Vec<(u64, usize)> {
    let (mut pieces, mut end) = (Vec::new(), 0_u64);
    for (gap, kind) in places {
        let block = end.next_multiple_of(4096) + u64::from(*gap) * 4096;
        let part = u64::from(kind / 8) * 60;
        let (offset, len) = match kind % 8 {
            0..4 => (block, 4096),
            4 => (block, 4096 * 3),
            5 => (block + part, 1 + part as usize),
            6 => (block + part, 4096),
            _ => (end, 1 + part as usize * 3),
        };
        pieces.push((offset, len));
        end = offset + len as u64;
    }
    pieces
}

fn apply(tx: &mut Tx<'_>, model: &mut Model, op: &Op) {
    let tier = |n: u8| [NVM, SSD, HDD][n as usize % 3];
    match *op {
        Op::Create(n) => {
            if let std::collections::hash_map::Entry::Vacant(slot) = model.entry(n) {
                make(tx, ROOT_INO, &name(n), 0o100_644).unwrap();
                slot.insert(Vec::new());
            }
        }
        Op::Unlink(n) => {
            let done = unlink(tx, ROOT_INO, &name(n));
            assert_eq!(model.remove(&n).is_some(), done.is_ok());
        }
        Op::Rename(a, b) => {
            if a == b || !model.contains_key(&a) {
                return;
            }
            if model.contains_key(&b) {
                unlink(tx, ROOT_INO, &name(b)).unwrap();
            }
            let item = tx.dir_remove(ROOT_INO, name(a).as_bytes()).unwrap();
            tx.dir_insert(ROOT_INO, name(b).as_bytes(), item.key, item.kind)
                .unwrap();
            let data = model.remove(&a).unwrap();
            model.insert(b, data);
        }
        Op::Share(a, b, from, to, len) => {
            let (Some(source), Some(target)) = (ino(tx, a), ino(tx, b)) else {
                return;
            };
            let block = |at: u8| usize::from(at) * 4096;
            let (first, end) = (block(from), model[&a].len().min(block(from) + block(len)));
            let range = ShareRange {
                from: source,
                from_block: FileBlock(from.into()),
                to: target,
                to_block: FileBlock(to.into()),
                blocks: (end.saturating_sub(first) as u64).div_ceil(4096),
                size_bytes: (block(to) + end.saturating_sub(first)) as u64,
            };
            // Not past the middle of the last block of a source, unless the target ends there, too.
            let overlaps = a == b && u64::from(from.abs_diff(to)) < range.blocks;
            let cuts = !end.is_multiple_of(4096) && model[&b].len() as u64 > range.size_bytes;
            if first >= end || overlaps || cuts {
                return;
            }
            let mut done = 0;
            while done < range.blocks {
                done = tx.share(&range, done).unwrap();
            }
            let bytes = model[&a][first..end].to_vec();
            let data = model.get_mut(&b).unwrap();
            let place = block(to)..block(to) + bytes.len();
            data.resize(data.len().max(place.end), 0);
            data[place].copy_from_slice(&bytes);
        }
        Op::Unshare(n, first, len) => {
            let Some(ino) = ino(tx, n) else { return };
            let end = FileBlock(u64::from(first) + u64::from(len));
            let before = tx.get(ino).unwrap().attr;
            let mut at = FileBlock(first.into());
            while at < end {
                at = tx.unshare(ino, at..end).unwrap().next;
            }
            assert_eq!(tx.shared_runs(ino, FileBlock(first.into())..end, 9).unwrap(), 0);
            // With more pieces the file may need a node of its tree.
            let sectors = before.sectors;
            let after = tx.get(ino).unwrap().attr;
            assert!((sectors..=sectors + 8 * u64::from(len)).contains(&after.sectors));
            assert_eq!(InodeAttr { sectors, ..after }, before);
        }
        Op::Defrag(n, ssd) => {
            let Some(ino) = ino(tx, n) else { return };
            let tier = if ssd { Tier::Ssd } else { Tier::Hdd };
            let shared = |tx: &Tx<'_>| {
                let mut extents = tx.map(ino, FileBlock(0), 99).unwrap();
                extents.retain(|extent| !extent.flags.is_empty());
                extents
            };
            let (before, kept) = (tx.get(ino).unwrap().attr, shared(tx));
            let (mut at, end) = (FileBlock(0), FileBlock(64));
            while at < end {
                at = tx.defrag(ino, at..end, tier).unwrap().next;
            }
            let sectors = before.sectors;
            let after = tx.get(ino).unwrap().attr;
            assert!(after.sectors <= sectors + 8 * 4);
            assert_eq!(InodeAttr { sectors, ..after }, before);
            // Unless a run has one owner left.
            let still = shared(tx);
            assert!(still.iter().all(|extent| {
                let covers = |old: &varve_format::Extent| {
                    old.file_block <= extent.file_block
                        && extent.end() <= old.end()
                        && old.block.0 + (extent.file_block.0 - old.file_block.0) == extent.block.0
                };
                kept.iter().any(covers)
            }));
        }
        _ => {
            let (n, offset, len) = match *op {
                Op::Write(n, offset, len, _) | Op::Punch(n, offset, len) => (n, offset, len),
                Op::Zero(n, offset, len) | Op::Allocate(n, offset, len) => (n, offset, len),
                Op::Truncate(n, size) => (n, size, 0),
                Op::Migrate(n, _) | Op::Scatter(n, ..) => (n, 0, 0),
                _ => return,
            };
            let Some(ino) = ino(tx, n) else {
                assert!(!model.contains_key(&n));
                return;
            };
            let data = model.get_mut(&n).unwrap();
            let (from, to) = (offset as usize, offset as usize + len as usize);
            let grow = |data: &mut Vec<u8>| data.resize(data.len().max(to), 0);
            match *op {
                Op::Write(_, _, _, seed) => {
                    let bytes = pattern(len as usize, u64::from(seed));
                    let cut = bytes.len() / 2;
                    let pieces = [(from as u64, &bytes[..cut]), ((from + cut) as u64, &bytes[cut..])];
                    let pieces = if cut == 0 { &pieces[1..] } else { &pieces[..] };
                    tx.write_bytes(ino, pieces, tier(seed)).unwrap();
                    grow(data);
                    data[from..to].copy_from_slice(&bytes);
                }
                Op::Scatter(_, ref places, seed) => {
                    let places = scattered(places);
                    let bytes = |at: usize| pattern(places[at].1, u64::from(seed) + at as u64);
                    let bytes: Vec<_> = (0..places.len()).map(bytes).collect();
                    let offsets = places.iter().map(|(offset, _)| *offset);
                    let pieces: Vec<_> = offsets.zip(bytes.iter().map(Vec::as_slice)).collect();
                    tx.write_bytes(ino, &pieces, tier(seed)).unwrap();
                    for (offset, bytes) in pieces {
                        let (from, to) = (offset as usize, offset as usize + bytes.len());
                        data.resize(data.len().max(to), 0);
                        data[from..to].copy_from_slice(bytes);
                    }
                }
                Op::Truncate(..) => {
                    assert_eq!(tx.truncate(ino, from as u64).unwrap(), Progress::Done);
                    data.resize(from, 0);
                }
                Op::Punch(..) => {
                    assert_eq!(
                        tx.punch(ino, from as u64, u64::from(len), NVM).unwrap(),
                        Progress::Done
                    );
                    let end = to.min(data.len());
                    if from < end {
                        data[from..end].fill(0);
                    }
                }
                Op::Zero(..) => {
                    assert_eq!(
                        tx.zero(ino, from as u64, u64::from(len), true, NVM).unwrap(),
                        Progress::Done
                    );
                    grow(data);
                    data[from..to].fill(0);
                }
                Op::Allocate(..) => {
                    assert_eq!(
                        tx.allocate(ino, from as u64, u64::from(len), true, SSD).unwrap(),
                        Progress::Done
                    );
                    grow(data);
                }
                Op::Migrate(_, to) => {
                    if let Some(extent) = tx.map(ino, FileBlock(0), 1).unwrap().first() {
                        let target = DataTarget::only(tier(to).tier);
                        let from = (extent.tier, extent.block);
                        assert!(
                            tx.migrate(ino, extent.file_block, extent.len, from, target)
                                .unwrap()
                        );
                    }
                }
                _ => {}
            }
        }
    }
}

fn compare(store: &Store, model: &Model) {
    let mut names: Vec<_> = store
        .dir_iter(ROOT_INO, 0, 100)
        .unwrap()
        .into_iter()
        .map(|item| (String::from_utf8(item.name).unwrap(), item.key.ino))
        .collect();
    names.sort();
    let mut expected: Vec<_> = model.keys().map(|n| name(*n)).collect();
    expected.sort();
    assert_eq!(
        names.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(),
        expected
    );
    for (n, data) in model {
        let ino = names.iter().find(|(found, _)| *found == name(*n)).unwrap().1;
        assert_eq!(store.get(ino).unwrap().attr.size_bytes, data.len() as u64);
        let mut bytes = vec![1; data.len()];
        store.read(ino, 0, &mut bytes).unwrap();
        assert!(bytes == *data, "content of {n}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn store_agrees_with_a_plain_model(ops in prop::collection::vec(op(), 1..80)) {
        let mut rig = Rig::new();
        rig.store.share_extents().unwrap();
        let mut model = Model::new();
        let mut committed = Model::new();
        let mut batch: Vec<Op> = Vec::new();
        for op in ops.into_iter().chain([Op::Commit, Op::Reopen]) {
            match op {
                Op::Commit | Op::Abort | Op::Reopen | Op::Demote(_) => {
                    let mut tx = rig.store.begin().unwrap();
                    for op in batch.drain(..) {
                        apply(&mut tx, &mut model, &op);
                    }
                    if matches!(op, Op::Abort) {
                        drop(tx);
                        model = committed.clone();
                    } else {
                        tx.commit().unwrap();
                        committed = model.clone();
                    }
                    if let Op::Demote(blocks) = op {
                        rig.store.demote(blocks.into()).unwrap();
                    }
                    compare(&rig.store, &model);
                    assert_eq!(rig.store.check().unwrap(), []);
                    if matches!(op, Op::Reopen) {
                        rig = rig.reopen();
                    }
                }
                op => batch.push(op),
            }
        }
    }
}
