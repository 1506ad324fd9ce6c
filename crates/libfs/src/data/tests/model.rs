//! Random calls on one file, compared with plain bytes after each.

use super::{Rig, contents};
use crate::errno::{Errno, OpError};
use proptest::prelude::{Just, ProptestConfig, Strategy, prop, prop_oneof, proptest};
use std::collections::BTreeSet;
use varve_format::{BLOCK_BYTES, EntryFlags, FallocateMode, Tier};

#[derive(Debug, Clone)]
enum Call {
    Write(u64, usize),
    Append(usize),
    Truncate(u64),
    Fallocate(FallocateMode, u64, u64),
    Read(u64, usize),
    Digest(u64),
    Reclaim,
    Barrier,
    Tier(Tier),
}

const SPAN: u64 = 120_000;

fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![0..SPAN, (0..SPAN / 4096).prop_map(|block| block * 4096)]
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        1..300_usize,
        1..50_000_usize,
        Just(4096),
        Just(8192),
        Just(20 * 4096)
    ]
}

fn call() -> impl Strategy<Value = Call> {
    let mode = prop_oneof![
        Just(FallocateMode::Allocate),
        Just(FallocateMode::AllocateKeepSize),
        Just(FallocateMode::PunchHole),
        Just(FallocateMode::ZeroRange),
        Just(FallocateMode::ZeroRangeKeepSize),
    ];
    prop_oneof![
        6 => (offset(), length()).prop_map(|(at, len)| Call::Write(at, len)),
        3 => length().prop_map(Call::Append),
        2 => offset().prop_map(Call::Truncate),
        2 => (mode, offset(), 1..40_000_u64).prop_map(|(mode, at, len)| Call::Fallocate(mode, at, len)),
        4 => (offset(), length()).prop_map(|(at, len)| Call::Read(at, len)),
        3 => (0..20_u64).prop_map(Call::Digest),
        2 => Just(Call::Reclaim),
        1 => Just(Call::Barrier),
        1 => prop_oneof![Just(Tier::Nvm), Just(Tier::Ssd), Just(Tier::Hdd)].prop_map(Call::Tier),
    ]
}

/// Notes blocks that hold data: blocks that were written to, until one call makes a hole of all of them or
/// truncates the file before them.
fn note_blocks(blocks: &mut BTreeSet<u64>, call: &Call, size: u64) {
    let mut clear = |from: u64, to: u64| {
        let whole = from.div_ceil(BLOCK_BYTES)..to / BLOCK_BYTES;
        blocks.retain(|block| !whole.contains(block));
    };
    match *call {
        Call::Write(at, len) => blocks.extend(at / BLOCK_BYTES..(at + len as u64).div_ceil(BLOCK_BYTES)),
        Call::Append(len) => blocks.extend(size / BLOCK_BYTES..(size + len as u64).div_ceil(BLOCK_BYTES)),
        Call::Truncate(size) => clear(size, u64::MAX),
        Call::Fallocate(FallocateMode::Allocate | FallocateMode::AllocateKeepSize, ..) => {}
        Call::Fallocate(_, at, len) => clear(at, at + len),
        Call::Read(..) | Call::Digest(_) | Call::Reclaim | Call::Barrier | Call::Tier(_) => {}
    }
}

/// Checks `lseek` at and around all blocks' ends.
fn check_seeks(rig: &Rig, inode: &crate::inode::Inode, model: &[u8], blocks: &BTreeSet<u64>) {
    let size = model.len() as u64;
    let is_data = |pos: u64| blocks.contains(&(pos / BLOCK_BYTES));
    for block in 0..size.div_ceil(BLOCK_BYTES) {
        for pos in [0, 1, 1000, 4095].map(|within| block * BLOCK_BYTES + within) {
            if pos >= size {
                break;
            }
            // The next block of another kind, or the end.
            let ends = (block + 1..).map(|block| block * BLOCK_BYTES);
            let mut ends = ends.take_while(|at| *at < size);
            let other = ends.find(|at| is_data(*at) != is_data(pos));
            let (data, hole) = match is_data(pos) {
                true => (Ok(pos), Ok(other.unwrap_or(size))),
                false => (other.ok_or(OpError::Failed(Errno(libc::ENXIO))), Ok(pos)),
            };
            assert_eq!(rig.plane.seek_data(inode, pos), data, "data at {pos} of {size}");
            assert_eq!(rig.plane.seek_hole(inode, pos), hole, "hole at {pos} of {size}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn file_reads_as_written_when_calls_are_random(calls in prop::collection::vec(call(), 1..60)) {
        let (rig, _disk) = Rig::direct(4, 8);
        let inode = Rig::inode(9);
        let mut model: Vec<u8> = Vec::new();
        let mut blocks = BTreeSet::new();
        let none = EntryFlags::empty();
        for (step, call) in calls.into_iter().enumerate() {
            note_blocks(&mut blocks, &call, model.len() as u64);
            let fill = |len: usize| -> Vec<u8> {
                (0..len).map(|at| (at as u8 ^ step as u8).wrapping_mul(7) | 1).collect()
            };
            match call {
                Call::Write(at, len) => {
                    assert_eq!(rig.plane.write(&inode, at, &fill(len), none), Ok(len));
                    let end = at as usize + len;
                    if model.len() < end {
                        model.resize(end, 0);
                    }
                    model[at as usize..end].copy_from_slice(&fill(len));
                }
                Call::Append(len) => {
                    assert_eq!(rig.plane.append(&inode, &fill(len), none), Ok((model.len() as u64, len)));
                    model.extend(fill(len));
                }
                Call::Truncate(size) => {
                    rig.plane.truncate(&inode, size, none).unwrap();
                    model.resize(size as usize, 0);
                }
                Call::Fallocate(mode, at, len) => {
                    rig.plane.fallocate(&inode, mode, at, len, none).unwrap();
                    let end = (at + len) as usize;
                    if mode.grows() && model.len() < end {
                        model.resize(end, 0);
                    }
                    if !matches!(mode, FallocateMode::Allocate | FallocateMode::AllocateKeepSize) {
                        let size = model.len();
                        model[(at as usize).min(size)..end.min(size)].fill(0);
                    }
                }
                Call::Read(at, len) => {
                    let mut out = vec![0xAA; len];
                    let got = rig.plane.read(&inode, at, &mut out).unwrap();
                    let start = (at as usize).min(model.len());
                    assert_eq!(&out[..got], &model[start..(start + len).min(model.len())]);
                    assert!(out[got..].iter().all(|byte| *byte == 0xAA), "bytes behind the end were touched");
                    let mut again = vec![0xAA; len];
                    if let Some(got) = rig.plane.try_read(&inode, at, &mut again, || true) {
                        assert_eq!(&again[..got], &model[start..(start + len).min(model.len())]);
                    }
                }
                Call::Digest(back) => rig.fake.digest(
                    rig.plane.log().unwrap().last_seq().0.saturating_sub(back)
                ),
                Call::Reclaim => rig.plane.reclaim(),
                Call::Barrier => {
                    let freed = rig.fake.freed();
                    rig.plane.forget_extents(&inode);
                    rig.fake.poison(freed);
                }
                Call::Tier(tier) => {
                    *rig.fake.tier.lock() = tier;
                    rig.plane.forget_extents(&inode);
                }
            }
            assert_eq!(inode.attr().size_bytes, model.len() as u64);
            assert!(contents(&rig.plane, &inode) == model, "after step {step}");
            check_seeks(&rig, &inode, &model, &blocks);
        }
        rig.plane.digest_all::<()>().unwrap();
        assert!(rig.fake.bytes(inode.key) == model, "digested bytes differ");
        rig.plane.forget_extents(&inode);
        rig.fake.poison(rig.fake.freed());
        assert!(contents(&rig.plane, &inode) == model);
        check_seeks(&rig, &inode, &model, &blocks);
    }
}

#[test]
fn writes_recycle_the_log_when_far_more_than_its_size_is_written() {
    let rig = Rig::new(1, 4);
    let inode = Rig::inode(2);
    let mut model = vec![0; 1 << 20];
    for step in 0..400_u64 {
        let at = (step * 7919 % 200) * 4096;
        let data: Vec<u8> = (0..100_000).map(|i| (i as u64 + step) as u8).collect();
        assert_eq!(
            rig.plane.write(&inode, at, &data, EntryFlags::empty()),
            Ok(data.len())
        );
        model[at as usize..at as usize + data.len()].copy_from_slice(&data);
    }
    model.truncate(inode.attr().size_bytes as usize);
    assert!(contents(&rig.plane, &inode) == model);
    assert!(rig.plane.log().unwrap().len_bytes() <= 8 << 20);
    assert!(rig.fake.called("grow") > 0 && rig.fake.called("digest") > 0);
}

#[test]
fn large_write_is_one_transaction_of_whole_blocks() {
    let rig = Rig::new(16, 64);
    let inode = Rig::inode(2);
    let data: Vec<u8> = (0..(9 << 20) + 777).map(|i: u32| (i / 5) as u8).collect();
    assert_eq!(
        rig.plane.write(&inode, 100, &data, EntryFlags::empty()),
        Ok(data.len())
    );
    let entries = super::fake::scan(&*rig.fake.log);
    let last = *entries.keys().last().unwrap();
    for (seq, entry) in &entries {
        assert_eq!(u64::from(entry.header.tx_left.get()), last - seq);
    }
    assert_eq!(contents(&rig.plane, &inode)[100..], data[..]);
    rig.plane.digest_all::<()>().unwrap();
    assert!(rig.fake.bytes(inode.key)[100..] == data);
}
