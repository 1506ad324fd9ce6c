//! Many ranges that are compared and shared at once.

use super::forwarded::Caller;
use super::machine::{FILE, Machine, ROOT};
use super::shares::{leave_metadata, scatter, share};
use crate::digest::{Applied, Client, ForwardError, dedupe};
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, Tier};
use varve_ipc::{DEDUPE_RANGES_MAX, DedupeOp, DedupeRange, Deduped};
use varve_store::DataTarget;

const BLOCK: usize = BLOCK_BYTES as usize;

fn ask(
    caller: &Caller,
    ranges: &[DedupeRange],
    dry_run: bool,
) -> Result<(Applied, Vec<Deduped>), ForwardError> {
    let op = DedupeOp {
        ranges: ranges.to_vec(),
        dry_run,
        cred: caller.cred.clone(),
    };
    let client = Client {
        privileged: true,
        ..caller.machine.client()
    };
    dedupe(&caller.machine.store, client, &op, &caller.machine.environment())
}

/// A file of blocks that all differ, but are the same in every such file; `own` are this file's alone.
fn file(caller: &mut Caller, name: &[u8], blocks: u64, own: &[u64]) -> InodeKey {
    let key = caller.make(ROOT, name, FILE).unwrap();
    for first in (0..blocks).step_by(100) {
        let mut tx = caller.machine.store.begin().unwrap();
        for at in first..blocks.min(first + 100) {
            let mut block = vec![1; BLOCK];
            block[..8].copy_from_slice(&at.to_le_bytes());
            if own.contains(&at) {
                block[100..100 + name.len()].copy_from_slice(name);
            }
            let target = DataTarget::prefer(Tier::Nvm);
            tx.write_data(key.ino, FileBlock(at), &block, true, target)
                .unwrap();
        }
        tx.commit().unwrap();
    }
    caller.machine.store.share_extents().unwrap();
    let size = blocks * BLOCK_BYTES;
    caller.call(LogOp::Truncate { key, size }).unwrap();
    key
}

const fn range(source: InodeKey, target: InodeKey, block: u64, blocks: u64) -> DedupeRange {
    DedupeRange {
        source,
        source_offset: block * BLOCK_BYTES,
        target,
        target_offset: block * BLOCK_BYTES,
        len: blocks * BLOCK_BYTES,
    }
}

/// Owners of each block of a file.
fn owners(caller: &Caller, key: InodeKey) -> Vec<u32> {
    let all = FileBlock(0)..FileBlock(1 << 20);
    let parts = caller.machine.store.owned_parts(key.ino, all, 1 << 16).unwrap();
    let each = |part: &varve_store::OwnedPart| vec![part.owners; part.blocks as usize];
    parts.iter().flat_map(each).collect()
}

#[test]
fn ranges_of_one_call_are_shared_in_few_records_and_each_is_told() {
    let mut caller = Caller::on(Machine::with_journal(1 << 20));
    let files = [&b"a"[..], b"b", b"c"].map(|name| file(&mut caller, name, 64, &[]));
    let [a, b, c] = files;
    let different = file(&mut caller, b"d", 64, &[10]);
    let before = files.map(|key| (caller.machine.data(key), caller.machine.attr(key)));
    // What one range shares is the source of the next.
    let mut ranges: Vec<_> = (0..64).map(|at| range(a, b, at, 1)).collect();
    ranges.extend((0..64).map(|at| range(b, c, at, 1)));
    ranges.push(range(a, different, 0, 64));
    let newest = caller.machine.store.newest_tx();
    let (_, told) = ask(&caller, &ranges, true).unwrap();
    assert_eq!(caller.machine.store.newest_tx(), newest);
    assert!(
        told.iter()
            .all(|told| told.shared_bytes > 0 && told.freed_bytes == told.shared_bytes)
    );
    let (applied, told) = ask(&caller, &ranges, false).unwrap();
    let records = caller.machine.store.newest_tx().0 - newest.0;
    assert!(records <= 4, "{records} records");
    let mut remapped = [b, c];
    remapped.sort_unstable();
    assert_eq!(applied.remapped, remapped);
    let one = Deduped {
        shared_bytes: BLOCK_BYTES,
        freed_bytes: BLOCK_BYTES,
        ..Deduped::default()
    };
    assert!(told[..128].iter().all(|told| *told == one), "{told:?}");
    // A part that is not the same is not shared, and is told.
    let differs = Deduped {
        differing_bytes: 64 * BLOCK_BYTES,
        ..Deduped::default()
    };
    assert_eq!(told[128], differs);
    assert_eq!(owners(&caller, a), [3; 64]);
    assert_eq!(owners(&caller, different), [1; 64]);
    let after = files.map(|key| (caller.machine.data(key), caller.machine.attr(key)));
    assert!(after == before, "no byte and no attribute changes");
    // Again: nothing is left to do.
    let newest = caller.machine.store.newest_tx();
    let (_, told) = ask(&caller, &ranges[..128], false).unwrap();
    assert!(
        told.iter()
            .all(|told| told.already_bytes == BLOCK_BYTES && told.shared_bytes == 0)
    );
    assert_eq!(caller.machine.store.newest_tx(), newest);
    caller.machine.dump();
}

#[test]
fn range_that_is_refused_stops_no_other() {
    let mut caller = Caller::on(Machine::with_journal(1 << 20));
    let (a, b) = (
        file(&mut caller, b"a", 16, &[]),
        file(&mut caller, b"b", 16, &[3]),
    );
    let dir = caller.make(ROOT, b"d", 0o040_755).unwrap();
    let unaligned = DedupeRange {
        source_offset: 100,
        ..range(a, b, 8, 1)
    };
    let ranges = [
        range(a, b, 0, 2),
        unaligned,
        range(a, InodeKey::new(77, 3), 0, 1),
        range(a, dir, 0, 1),
        range(a, b, 10, 20),
        range(a, a, 0, 3),
        DedupeRange {
            len: 0,
            ..range(a, b, 0, 1)
        },
        range(a, b, 3, 1),
        range(a, b, 12, 4),
    ];
    let (_, told) = ask(&caller, &ranges, false).unwrap();
    let errnos: Vec<_> = told.iter().map(|told| told.errno).collect();
    let (invalid, gone) = (libc::EINVAL, libc::ESTALE);
    assert_eq!(
        errnos,
        [0, invalid, gone, libc::EISDIR, invalid, invalid, invalid, 0, 0]
    );
    let shared: Vec<_> = told.iter().map(|told| told.shared_bytes / BLOCK_BYTES).collect();
    assert_eq!(shared, [2, 0, 0, 0, 0, 0, 0, 0, 4]);
    assert_eq!(told[7].differing_bytes, BLOCK_BYTES);
    // Too much at once.
    let many = vec![range(a, b, 0, 1); DEDUPE_RANGES_MAX + 1];
    assert!(matches!(
        ask(&caller, &many, false),
        Err(ForwardError::Errno(libc::EINVAL))
    ));
    let long = [range(a, b, 0, 4000), range(a, b, 0, 97)];
    assert!(matches!(
        ask(&caller, &long, false),
        Err(ForwardError::Errno(libc::EINVAL))
    ));
    caller.machine.dump();
}

#[test]
fn what_is_told_is_done_where_space_runs_out() {
    let mut caller = Caller::on(Machine::with_journal(256 << 10));
    let files = [&b"from"[..], b"to", b"third"].map(|name| caller.make(ROOT, name, FILE).unwrap());
    let [from, to, third] = files;
    for key in [from, to] {
        scatter(&caller.machine.store, key, 7, 3000);
    }
    caller.machine.store.share_extents().unwrap();
    // What is shared with one more file is not freed, and makes no room for trees.
    caller.call(share(to, third)).unwrap();
    leave_metadata(&mut caller, 6);
    let before = files.map(|key| caller.machine.data(key));
    let ranges: Vec<_> = (0..300).map(|at| range(from, to, at * 10, 10)).collect();
    let (_, told) = ask(&caller, &ranges, false).unwrap();
    let errnos: Vec<_> = told
        .iter()
        .map(|told| told.errno)
        .filter(|errno| *errno != 0)
        .collect();
    assert!(
        !errnos.is_empty() && errnos.iter().all(|errno| *errno == libc::ENOSPC),
        "{errnos:?}"
    );
    let shared = owners(&caller, from).iter().filter(|owners| **owners > 1).count() as u64;
    let sum: u64 = told.iter().map(|told| told.shared_bytes).sum();
    assert!(sum > 0 && sum <= shared * BLOCK_BYTES, "{sum} of {shared} blocks");
    assert!(files.map(|key| caller.machine.data(key)) == before);
    caller.machine.dump();
}
