#![allow(clippy::unwrap_used)]

use super::Xattrs;
use crate::Progress;
use crate::TreeError;
use crate::testing::{MemError, MemIo, Numbers, Told};
use proptest::prelude::{Strategy, any, prop, prop_assert_eq, prop_oneof, proptest};
use std::collections::BTreeMap;
use varve_format::{HashKey, Ino, XattrRoot};

const ATTRS: Xattrs = Xattrs::of(Ino(7), HashKey([9; 16]));

fn check(io: &MemIo, root: &XattrRoot) -> BTreeMap<Vec<u8>, usize> {
    let (mut told, mut names) = (Told::default(), BTreeMap::new());
    ATTRS.check(io, root, &mut told, |name, len| {
        names.insert(name.to_vec(), len);
    });
    told.assert_clean(io);
    assert_eq!(
        root.node_blocks() as usize + root.value_blocks() as usize,
        io.in_use().len()
    );
    names
}

fn value(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(seed) ^ (i >> 8) as u8)
        .collect()
}

fn name_of(number: u8, long: bool) -> Vec<u8> {
    let mut name = format!("user.{number}").into_bytes();
    if long {
        name.resize(255, b'x');
    }
    name
}

#[derive(Debug, Clone)]
enum Op {
    Set(u8, bool, usize, u8),
    Remove(u8, bool),
    FreeSome(usize),
    /// Demotes this number of blocks.
    Demote(u16),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let len =
        prop_oneof![3 => 0_usize..40, 2 => 900_usize..1100, 1 => 4000_usize..4100, 1 => 0_usize..=65_536];
    let op = prop_oneof![
        6 => (0_u8..40, any::<bool>(), len, any::<u8>()).prop_map(|(n, long, len, seed)| Op::Set(n, long, len, seed)),
        3 => (0_u8..40, any::<bool>()).prop_map(|(n, long)| Op::Remove(n, long)),
        1 => (0_usize..3).prop_map(Op::FreeSome),
        2 => (0_u16..40).prop_map(Op::Demote),
    ];
    prop::collection::vec(op, 1..150)
}

proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(32))]

    #[test]
    fn attributes_equal_a_map_after_any_changes(ops in ops()) {
        let (mut io, mut root) = (MemIo::new(), XattrRoot::default());
        let mut model: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Set(number, long, len, seed) => {
                    let (name, value) = (name_of(number, long), value(len, seed));
                    let existed = ATTRS.set(&mut io, &mut root, &name, &value).unwrap();
                    prop_assert_eq!(existed, model.insert(name, value).is_some());
                }
                Op::Remove(number, long) => {
                    let name = name_of(number, long);
                    let existed = ATTRS.remove(&mut io, &mut root, &name).unwrap();
                    prop_assert_eq!(existed, model.remove(&name).is_some());
                }
                Op::FreeSome(max) => {
                    let before = root.entries();
                    let progress = ATTRS.free_some(&mut io, &mut root, max).unwrap();
                    prop_assert_eq!(u64::from(before - root.entries()), (max as u64).min(u64::from(before)));
                    prop_assert_eq!(progress == Progress::Done, root.entries() == 0);
                    let left = check(&io, &root);
                    model.retain(|name, _| left.contains_key(name));
                }
                Op::Demote(max) => {
                    root = ATTRS.demote(&mut io, &root, &mut MemIo::some(max)).unwrap();
                    if ATTRS.is_away(&root).unwrap() {
                        prop_assert_eq!(io.away(), io.in_use().len(), "something hangs in NVM below what is \
                            away");
                    }
                }
            }
            let lens: BTreeMap<Vec<u8>, usize> = model.iter().map(|(name, value)| (name.clone(), value.len())).collect();
            prop_assert_eq!(&check(&io, &root), &lens);
        }
        for (name, value) in &model {
            let found = ATTRS.get(&io, &root, name).unwrap();
            prop_assert_eq!(found.as_ref(), Some(value));
        }
        let listed: BTreeMap<Vec<u8>, usize> = ATTRS.list(&io, &root).unwrap().into_iter().collect();
        prop_assert_eq!(listed, check(&io, &root));
        prop_assert_eq!(ATTRS.get(&io, &root, b"user.none").unwrap(), None);
        while ATTRS.free_some(&mut io, &mut root, 2).unwrap() == Progress::More {}
        prop_assert_eq!((root, io.in_use().len()), (XattrRoot::default(), 0));
    }
}

#[test]
fn names_and_values_out_of_bounds_are_refused() {
    let (mut io, mut root) = (MemIo::new(), XattrRoot::default());
    for (name, len) in [(&b""[..], 1), (&[b'x'; 256], 1), (b"user.a", 65_537)] {
        let refused = ATTRS.set(&mut io, &mut root, name, &value(len, 1));
        assert!(matches!(refused, Err(MemError::Tree(TreeError::BadName(_)))));
    }
    assert_eq!((root, io.in_use().len()), (XattrRoot::default(), 0));
    ATTRS
        .set(&mut io, &mut root, &[b'x'; 255], &value(65_536, 3))
        .unwrap();
    assert_eq!(
        ATTRS.get(&io, &root, &[b'x'; 255]).unwrap(),
        Some(value(65_536, 3))
    );
}

#[test]
fn corrupt_blocks_give_errors_and_never_panics_or_loops() {
    let (mut io, mut root) = (MemIo::new(), XattrRoot::default());
    for number in 0..60 {
        let len = usize::from(number) * 50;
        ATTRS
            .set(&mut io, &mut root, &name_of(number, false), &value(len, 5))
            .unwrap();
    }
    let blocks: Vec<_> = io.in_use().into_iter().collect();
    let mut numbers = Numbers::new(17);
    let (mut found, rounds) = (0, 400);
    for _ in 0..rounds {
        let block = blocks[numbers.below(blocks.len() as u64) as usize];
        let saved = *io.block_mut(block);
        let area = if numbers.below(2) == 0 { 60 } else { 4096 };
        let (byte, bit) = (numbers.below(area) as usize, numbers.below(8));
        io.block_mut(block)[byte] ^= 1 << bit;
        io.reads_max = io.reads.get() + 5000;
        let mut told = Told::default();
        ATTRS.check(&io, &root, &mut told, |_, _| ());
        found += u64::from(!told.faults.is_empty() || !told.unreadable.is_empty());
        let _ = ATTRS.list(&io, &root);
        let (mut changed, mut root) = (io.clone(), root);
        for _ in 0..4 {
            let name = name_of(numbers.below(60) as u8, false);
            let _ = ATTRS.get(&changed, &root, &name);
            let _ = ATTRS.set(
                &mut changed,
                &mut root,
                &name,
                &value(numbers.below(3000) as usize, 2),
            );
            let _ = ATTRS.remove(&mut changed, &mut root, &name);
        }
        while matches!(ATTRS.free_some(&mut changed, &mut root, 5), Ok(Progress::More)) {}
        *io.block_mut(block) = saved;
    }
    assert!(found > rounds / 6, "only {found} of {rounds} were noticed");
}
