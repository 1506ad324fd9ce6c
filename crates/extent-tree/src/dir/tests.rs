#![allow(clippy::unwrap_used)]

use super::Directory;
use crate::testing::{MemError, MemIo, Numbers, Told};
use crate::{MetaRead, Progress, TreeError};
use proptest::prelude::{Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use varve_format::{
    COOKIE_MIN, DirRoot, Dirent, FileKind, HashKey, Ino, InodeKey, NodeMut, NodeRef, ORDINALS,
};

const KEY: HashKey = HashKey(*b"0123456789abcdef");
const DIR: Directory = Directory::of(Ino(7), KEY);

/// All names share one of three hashes.
fn colliding(key: &HashKey, name: &[u8]) -> u64 {
    [1, 0x1234, (1 << 48) - 1][(key.name_hash(name) % 3) as usize]
}

const COLLIDING: Directory = Directory::with_hash(Ino(7), KEY, colliding);

fn entry(name: &[u8], ino: u64) -> Dirent<'_> {
    Dirent {
        key: InodeKey::new(ino, 3),
        kind: FileKind::Regular,
        name,
    }
}

fn check(dir: &Directory, io: &MemIo, root: &DirRoot) -> BTreeMap<Vec<u8>, u64> {
    let (mut told, mut names) = (Told::default(), BTreeMap::new());
    // A root with one child would be a level too many.
    if root.top().unwrap().height > 1 {
        io.read(root.top().unwrap().block, |bytes| {
            assert!(NodeRef::open(bytes).unwrap().count() > 1)
        })
        .unwrap();
    }
    dir.check(io, root, &mut told, |_, entry| {
        assert!(names.insert(entry.name.to_vec(), entry.key.ino.0).is_none());
    });
    told.assert_clean(io);
    assert_eq!(root.entries(), names.len() as u64);
    names
}

fn list(dir: &Directory, io: &MemIo, root: &DirRoot, after: u64, max: usize) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    dir.for_each(io, root, after, |cookie, entry| {
        found.push((cookie, entry.name.to_vec()));
        if found.len() < max {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    })
    .unwrap();
    found
}

#[derive(Debug, Clone)]
enum Op {
    Insert(u16, u8, u64),
    Remove(u16, u8),
    Replace(u16, u8, u64),
    /// Reads on from where the last one ended.
    Read(usize),
    FreeSome(usize),
    /// Demotes this number of blocks.
    Demote(u16),
}

fn name_of(number: u16, len: u8) -> Vec<u8> {
    let mut name = number.to_string().into_bytes();
    name.resize(name.len().max(usize::from(len)), b'.');
    name
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len = prop_oneof![4 => 1_u8..20, 1 => any::<u8>()];
    let op = prop_oneof![
        8 => (0_u16..300, len.clone(), 1_u64..99).prop_map(|(n, len, ino)| Op::Insert(n, len / 64 * 64, ino)),
        5 => (0_u16..300, len.clone()).prop_map(|(n, len)| Op::Remove(n, len / 64 * 64)),
        1 => (0_u16..300, len, 1_u64..99).prop_map(|(n, len, ino)| Op::Replace(n, len / 64 * 64, ino)),
        2 => (1_usize..20).prop_map(Op::Read),
        1 => (0_usize..3).prop_map(Op::FreeSome),
        1 => (0_u16..20).prop_map(Op::Demote),
    ];
    prop::collection::vec(op, 1..500)
}

/// One iteration that goes on while names come and go.
#[derive(Default)]
struct Reading {
    cookie: u64,
    lasting: BTreeSet<Vec<u8>>,
    seen: BTreeSet<Vec<u8>>,
}

fn run(dir: &Directory, ops: Vec<Op>) {
    let (mut io, mut root) = (MemIo::new(), DirRoot::default());
    let mut model: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    let mut reading = Reading::default();
    for (count, op) in ops.into_iter().enumerate() {
        match op {
            Op::Insert(number, len, ino) => {
                let name = name_of(number, len);
                let result = dir.insert(&mut io, &mut root, &entry(&name, ino));
                match model.entry(name) {
                    Entry::Occupied(_) => assert_eq!(result, Err(MemError::Tree(TreeError::Exists))),
                    Entry::Vacant(vacant) => {
                        assert!(result.unwrap() >= COOKIE_MIN);
                        vacant.insert(ino);
                    }
                }
            }
            Op::Remove(number, len) => {
                let name = name_of(number, len);
                let removed = dir.remove(&mut io, &mut root, &name);
                match model.remove(&name) {
                    Some(ino) => assert_eq!(removed.unwrap().key, InodeKey::new(ino, 3)),
                    None => assert_eq!(removed, Err(MemError::Tree(TreeError::NotFound))),
                }
                reading.lasting.remove(&name);
            }
            Op::Replace(number, len, ino) => {
                let name = name_of(number, len);
                let before = dir.lookup(&io, &root, &name).unwrap();
                let replaced = dir.replace(&mut io, &mut root, &entry(&name, ino));
                match model.get_mut(&name) {
                    Some(old) => {
                        assert_eq!(replaced.unwrap(), before.unwrap());
                        *old = ino;
                        let after = dir.lookup(&io, &root, &name).unwrap().unwrap();
                        assert_eq!((after.cookie, after.key.ino.0), (before.unwrap().cookie, ino));
                    }
                    None => assert_eq!(replaced, Err(MemError::Tree(TreeError::NotFound))),
                }
            }
            Op::Read(max) => {
                let batch = list(dir, &io, &root, reading.cookie, max);
                let ended = batch.len() < max;
                for (cookie, name) in batch {
                    assert!(cookie > reading.cookie && model.contains_key(&name));
                    reading.cookie = cookie;
                    let again = !reading.seen.insert(name.clone());
                    assert!(!(again && reading.lasting.contains(&name)), "returned twice");
                }
                if ended {
                    assert!(reading.lasting.is_subset(&reading.seen), "left out");
                    reading = Reading {
                        lasting: model.keys().cloned().collect(),
                        ..Reading::default()
                    };
                }
            }
            Op::FreeSome(max) => {
                let last = list(dir, &io, &root, 0, usize::MAX);
                let progress = dir.free_some(&mut io, &mut root, max).unwrap();
                for (_, name) in last.into_iter().rev().take(max) {
                    model.remove(&name).unwrap();
                    reading.lasting.remove(&name);
                }
                assert_eq!(progress == Progress::Done, model.is_empty());
            }
            Op::Demote(max) => {
                root = dir.demote(&mut io, &root, &mut MemIo::some(max)).unwrap();
                if dir.is_away(&root).unwrap() {
                    assert_eq!(
                        io.away(),
                        io.in_use().len(),
                        "something hangs in NVM below what is away"
                    );
                }
            }
        }
        if count % 32 == 0 {
            assert_eq!(check(dir, &io, &root), model);
        }
    }
    assert_eq!(check(dir, &io, &root), model);
    for name in model.keys() {
        dir.remove(&mut io, &mut root, name).unwrap();
    }
    assert_eq!((root, io.in_use().len()), (DirRoot::default(), 0));
}

proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(96))]

    #[test]
    fn directory_equals_a_map_after_any_changes(ops in ops()) {
        run(&DIR, ops);
    }

    #[test]
    fn directory_equals_a_map_when_all_hashes_collide(ops in ops()) {
        run(&COLLIDING, ops);
    }

    #[test]
    fn any_name_is_found_again(
        names in prop::collection::btree_set(prop::collection::vec(any::<u8>(), 1..256), 1..80)
    ) {
        let (mut io, mut root) = (MemIo::new(), DirRoot::default());
        for (ino, name) in (1..).zip(&names) {
            DIR.insert(&mut io, &mut root, &entry(name, ino)).unwrap();
        }
        for (ino, name) in (1..).zip(&names) {
            let found = DIR.lookup(&io, &root, name).unwrap();
            prop_assert_eq!(found.map(|found| found.key.ino.0), Some(ino));
        }
        prop_assert!(DIR.lookup(&io, &root, b"\xff\xfe not a name of the above \x00").unwrap().is_none());
    }
}

fn build(count: u64) -> (MemIo, DirRoot) {
    let (mut io, mut root) = (MemIo::new(), DirRoot::default());
    for i in 0..count {
        let name = format!("file-{i:07}");
        DIR.insert(&mut io, &mut root, &entry(name.as_bytes(), i + 1))
            .unwrap();
    }
    (io, root)
}

#[test]
fn lookup_reads_few_blocks_when_there_are_a_million_names() {
    let count = 1_000_000;
    let (mut io, mut root) = build(count);
    let mut numbers = Numbers::new(1);
    for _ in 0..5000 {
        let i = numbers.below(count);
        let name = format!("file-{i:07}");
        let (found, reads) = io.reads_of(|| DIR.lookup(&io, &root, name.as_bytes()).unwrap());
        assert_eq!(found.unwrap().key.ino.0, i + 1);
        assert!(reads <= 4, "{reads} reads");
        let (found, reads) = io.reads_of(|| DIR.lookup(&io, &root, format!("no-{i}").as_bytes()).unwrap());
        assert!(found.is_none() && reads <= 4, "{reads} reads");
    }
    assert_eq!(list(&DIR, &io, &root, 0, usize::MAX).len() as u64, count);
    let (mut told, mut checked) = (Told::default(), 0);
    DIR.check(&io, &root, &mut told, |_, _| checked += 1);
    told.assert_clean(&io);
    assert_eq!(checked, count);
    let mut calls = 0;
    while DIR.free_some(&mut io, &mut root, 1000).unwrap() == Progress::More {
        calls += 1;
        assert_eq!(root.entries(), count - calls * 1000);
    }
    assert_eq!(calls, count / 1000 - 1);
    assert_eq!((root, io.in_use().len()), (DirRoot::default(), 0));
}

#[test]
fn directory_empties_when_names_go_in_the_order_of_cookies_or_against_it() {
    for backward in [false, true] {
        let (mut io, mut root) = build(20_000);
        let mut names = list(&DIR, &io, &root, 0, usize::MAX);
        if backward {
            names.reverse();
        }
        for (count, (cookie, name)) in names.iter().enumerate() {
            assert_eq!(DIR.remove(&mut io, &mut root, name).unwrap().cookie, *cookie);
            if count % 4000 == 0 {
                assert_eq!(check(&DIR, &io, &root).len(), names.len() - count - 1);
            }
        }
        assert_eq!((root, io.in_use().len()), (DirRoot::default(), 0));
    }
}

#[test]
fn names_beyond_the_ordinals_of_one_hash_are_refused() {
    fn one(_: &HashKey, _: &[u8]) -> u64 {
        5
    }
    let dir = Directory::with_hash(Ino(7), KEY, one);
    let (mut io, mut root) = (MemIo::new(), DirRoot::default());
    // Insertion looks at every name of the hash; so fill the tree below the index.
    let mut top = root.top().unwrap();
    for i in 0..ORDINALS {
        let mut record = Vec::new();
        entry(format!("n{i}").as_bytes(), 1).encode(&mut record).unwrap();
        dir.tree
            .insert(&mut io, &mut top, (5 << 15) + i, &record)
            .unwrap();
    }
    root = DirRoot::new(&top, ORDINALS);
    let full = dir.insert(&mut io, &mut root, &entry(b"one more", 1));
    assert_eq!(full, Err(MemError::Tree(TreeError::HashFull)));
    let gone = dir.remove(&mut io, &mut root, b"n777").unwrap();
    assert_eq!(
        dir.insert(&mut io, &mut root, &entry(b"one more", 1)),
        Ok(gone.cookie)
    );
    assert_eq!(check(&dir, &io, &root).len() as u64, ORDINALS);
}

#[test]
fn bad_names_are_refused_with_nothing_changed() {
    let (mut io, mut root) = build(3);
    for name in [&b""[..], &[b'x'; 256]] {
        assert!(matches!(
            DIR.lookup(&io, &root, name),
            Err(MemError::Tree(TreeError::BadName(_)))
        ));
        assert!(matches!(
            DIR.insert(&mut io, &mut root, &entry(name, 1)),
            Err(MemError::Tree(TreeError::BadName(_)))
        ));
    }
    assert!(DIR.insert(&mut io, &mut root, &entry(b"a", 0)).is_err());
    assert_eq!(check(&DIR, &io, &root).len(), 3);
}

#[test]
fn corrupt_blocks_give_errors_and_never_panics_or_loops() {
    let (mut io, root) = build(10_000);
    let blocks: Vec<_> = io.in_use().into_iter().collect();
    let top = root.top().unwrap().block;
    let mut numbers = Numbers::new(13);
    let (mut found, rounds) = (0, 400);
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
        DIR.check(&io, &root, &mut told, |_, _| ());
        found += u64::from(!told.faults.is_empty() || !told.unreadable.is_empty());
        let _ = DIR.for_each(&io, &root, numbers.below(1 << 62), |_, _| {
            ControlFlow::Continue(())
        });
        let (mut changed, mut root) = (io.clone(), root);
        for _ in 0..6 {
            let name = format!("file-{:07}", numbers.below(10_000));
            let _ = DIR.lookup(&changed, &root, name.as_bytes());
            let _ = DIR.remove(&mut changed, &mut root, name.as_bytes());
            let _ = DIR.insert(&mut changed, &mut root, &entry(name.as_bytes(), 9));
            let _ = DIR.free_some(&mut changed, &mut root, 50);
        }
        *io.block_mut(block) = saved;
    }
    assert!(found > rounds / 3, "only {found} of {rounds} were noticed");
}

#[test]
fn entry_under_the_wrong_hash_is_noticed() {
    let (io, root) = build(100);
    let other = Directory::of(Ino(7), HashKey([1; 16]));
    let mut told = Told::default();
    other.check(&io, &root, &mut told, |_, _| ());
    assert!(!told.faults.is_empty());
}

#[test]
fn walk_notices_when_separators_or_pointers_do_not_fit_what_hangs_below() {
    let (mut io, root) = build(2000);
    let top = root.top().unwrap();
    assert_eq!(top.height, 2);
    let saved = *io.block_mut(top.block);
    let view = NodeRef::open(&saved).unwrap();
    let (second, third) = (view.record(1).unwrap(), view.record(2).unwrap());
    let changes: [&dyn Fn(&mut NodeMut<'_>); 5] = [
        &|node| node.set_key(1, second.0 + 1).unwrap(),
        &|node| node.set_key(1, second.0 - (1 << 56)).unwrap(),
        &|node| node.set_key(0, 1).unwrap(),
        &|node| node.set_value(1, third.1).unwrap(),
        &|node| {
            node.set_value(1, third.1).unwrap();
            node.set_value(2, second.1).unwrap();
        },
    ];
    for (number, change) in changes.into_iter().enumerate() {
        change(&mut NodeMut::open(io.block_mut(top.block)).unwrap());
        let mut told = Told::default();
        DIR.check(&io, &root, &mut told, |_, _| ());
        assert!(!told.faults.is_empty(), "change {number}");
        *io.block_mut(top.block) = saved;
    }
    assert_eq!(check(&DIR, &io, &root).len(), 2000);
}
