//! Several threads on one file: no thread ever sees bytes that were not written there.

use super::{Rig, contents};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use varve_format::EntryFlags;

const BLOCKS: u64 = 64;

/// A block whose bytes name it and its version.
fn image(block: u64, version: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(4096);
    while bytes.len() < 4096 {
        bytes.extend_from_slice(&block.to_le_bytes());
        bytes.extend_from_slice(&version.to_le_bytes());
    }
    bytes
}

/// The version of a block, which must be whole and its own.
fn version(block: u64, bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
    assert!(
        bytes == image(block, version),
        "block {block} holds foreign or torn bytes"
    );
    version
}

#[test]
fn readers_see_whole_blocks_while_writers_overwrite_and_the_log_is_recycled() {
    let rig = Rig::new(2, 6);
    let inode = Rig::inode(7);
    for block in 0..BLOCKS {
        rig.plane
            .write(&inode, block * 4096, &image(block, 0), EntryFlags::empty())
            .unwrap();
    }
    let done = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let (rig, inode, done, reads) = (&rig, &inode, &done, &reads);
        let writers: Vec<_> = (0..2_u64)
            .map(|writer| {
                scope.spawn(move || {
                    for step in 1..=2500_u64 {
                        // Each writer has its own blocks, so that versions only grow.
                        let block = (step * 31 % (BLOCKS / 2)) * 2 + writer;
                        let bytes = image(block, step);
                        rig.plane
                            .write(inode, block * 4096, &bytes, EntryFlags::empty())
                            .unwrap();
                        let mut back = vec![0; 4096];
                        rig.read(inode, block * 4096, &mut back);
                        assert_eq!(version(block, &back), step, "a writer reads what it wrote");
                    }
                })
            })
            .collect();
        for reader in 0..2_u64 {
            scope.spawn(move || {
                let mut newest = vec![0; BLOCKS as usize];
                let mut out = vec![0; 4 * 4096];
                let mut step = reader;
                while !done.load(Ordering::SeqCst) {
                    let first = step * 17 % (BLOCKS - 3);
                    rig.read(inode, first * 4096, &mut out);
                    for (index, bytes) in out.chunks(4096).enumerate() {
                        let block = first + index as u64;
                        let seen = version(block, bytes);
                        assert!(seen >= newest[block as usize], "block {block} went back in time");
                        newest[block as usize] = seen;
                    }
                    step += 1;
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        scope.spawn(move || {
            while !done.load(Ordering::SeqCst) {
                rig.fake.digest(u64::MAX);
                rig.plane.reclaim();
                let freed = rig.fake.freed();
                rig.plane.forget_extents(inode);
                rig.fake.poison(freed);
                std::thread::yield_now();
            }
        });
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        done.store(true, Ordering::SeqCst);
        assert!(ended.iter().all(Result::is_ok));
    });
    assert!(reads.load(Ordering::Relaxed) > 0);
    let all = contents(&rig.plane, &inode);
    rig.plane.digest_all::<()>().unwrap();
    assert!(
        rig.fake.bytes(inode.key) == all,
        "what is digested is what was read"
    );
    // The first read learns where the blocks are now, the second needs no lock.
    let mut out = vec![0; all.len()];
    assert_eq!(rig.plane.read(&inode, 0, &mut out), Ok(all.len()));
    out.fill(0);
    assert_eq!(rig.read(&inode, 0, &mut out), (all.len(), true));
    assert!(out == all);
}

#[test]
fn read_without_a_lock_is_refused_when_the_lease_or_the_session_went_meanwhile() {
    let rig = Rig::new(2, 6);
    let inode = Rig::inode(7);
    rig.plane
        .write(&inode, 0, &image(0, 1), EntryFlags::empty())
        .unwrap();
    let mut out = [0; 4096];
    let try_read = |out: &mut [u8], may: &dyn Fn() -> bool| rig.plane.try_read(&inode, 0, out, may);
    assert_eq!(try_read(&mut out, &|| true), Some(4096));
    let asked = std::cell::Cell::new(0);
    let once = || asked.replace(asked.get() + 1) == 0;
    assert_eq!(try_read(&mut out, &once), None);
    // Another thread changes the inode between the two looks.
    let change = || {
        drop(inode.write());
        true
    };
    assert_eq!(try_read(&mut out, &change), None);
    let body = inode.write();
    assert_eq!(try_read(&mut out, &|| true), None);
    drop(body);
    rig.fake.page.seal();
    assert_eq!(try_read(&mut out, &|| true), None);
}

#[test]
fn appends_of_threads_never_interleave() {
    let rig = Rig::new(2, 16);
    let inode = Rig::inode(7);
    std::thread::scope(|scope| {
        for thread in 0..3_u8 {
            let (rig, inode) = (&rig, &inode);
            scope.spawn(move || {
                for step in 0..200_u8 {
                    let len = if step % 20 == 0 {
                        40_000
                    } else {
                        100 + usize::from(step)
                    };
                    let mut record = vec![thread * 10 + step % 10; len];
                    record[..8].copy_from_slice(&(len as u64).to_le_bytes());
                    let (at, written) = rig.plane.append(inode, &record, EntryFlags::empty()).unwrap();
                    assert_eq!(written, len);
                    let mut back = vec![0; len];
                    rig.read(inode, at, &mut back);
                    assert!(back == record);
                }
            });
        }
    });
    let all = contents(&rig.plane, &inode);
    let (mut pos, mut records) = (0, 0);
    while pos < all.len() {
        let len = u64::from_le_bytes(all[pos..pos + 8].try_into().unwrap()) as usize;
        assert!(
            all[pos + 8..pos + len].iter().all(|byte| *byte == all[pos + 8]),
            "record at {pos} is not one record"
        );
        pos += len;
        records += 1;
    }
    assert_eq!(records, 600);
    rig.plane.digest_all::<()>().unwrap();
    assert!(rig.fake.bytes(inode.key) == all);
}

#[test]
fn truncates_and_overwrites_agree_with_the_log_when_they_race() {
    for round in 0..20_u64 {
        let rig = Rig::new(2, 8);
        let inode = Rig::inode(7);
        rig.plane
            .write(&inode, 0, &[1; 16 * 4096], EntryFlags::empty())
            .unwrap();
        std::thread::scope(|scope| {
            let (rig, inode) = (&rig, &inode);
            for writer in 0..2_u64 {
                scope.spawn(move || {
                    for step in 0..60_u64 {
                        let block = (step * 5 + writer + round) % 16;
                        let fill = (2 + writer * 100 + step) as u8;
                        rig.plane
                            .write(inode, block * 4096, &[fill; 4096], EntryFlags::empty())
                            .unwrap();
                    }
                });
            }
            scope.spawn(move || {
                for step in 0..30_u64 {
                    rig.plane
                        .truncate(inode, (step * 7919) % (16 * 4096), EntryFlags::empty())
                        .unwrap();
                }
            });
        });
        let all = contents(&rig.plane, &inode);
        rig.plane.digest_all::<()>().unwrap();
        // Applying the log in its order gives the process' view.
        assert!(rig.fake.bytes(inode.key) == all, "round {round}");
        assert!(contents(&rig.plane, &inode) == all);
    }
}

#[test]
fn append_in_parts_is_not_written_over_by_others() {
    let rig = Rig::new(2, 6);
    let inode = Rig::inode(7);
    // Four parts.
    let large = vec![b'l'; 12 << 20];
    let (small, middle) = ([b's'; 100], [b'm'; 100_000]);
    let done = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let (rig, inode, done) = (&rig, &inode, &done);
        let others = [&small[..], &middle[..]].map(|data| {
            scope.spawn(move || {
                let mut count = 0;
                while !done.load(Ordering::SeqCst) {
                    rig.plane.append(inode, data, EntryFlags::empty()).unwrap();
                    count += 1;
                    std::thread::sleep(std::time::Duration::from_micros(300));
                }
                count
            })
        });
        let digests = scope.spawn(move || {
            while !done.load(Ordering::SeqCst) {
                rig.fake.digest(u64::MAX);
                std::thread::yield_now();
            }
        });
        for _ in 0..2 {
            let (_, len) = rig.plane.append(inode, &large, EntryFlags::empty()).unwrap();
            assert_eq!(len, large.len());
        }
        done.store(true, Ordering::SeqCst);
        digests.join().unwrap();
        others.map(|other| other.join().unwrap())
    });
    let size = inode.read().attr.size_bytes;
    let mut all = vec![0; size as usize];
    rig.read(&inode, 0, &mut all);
    let runs = all.chunk_by(|a, b| a == b);
    let mut found = [0, 0, 0];
    for run in runs {
        let (kind, len) = match run[0] {
            b'l' => (0, large.len()),
            b's' => (1, small.len()),
            b'm' => (2, middle.len()),
            other => panic!("{other} was never written"),
        };
        assert!(
            run.len().is_multiple_of(len),
            "{} bytes of {}",
            run.len(),
            run[0] as char
        );
        found[kind] += run.len() / len;
    }
    assert_eq!(found, [2, counts[0], counts[1]]);
}

#[test]
fn large_writes_of_many_threads_do_not_wait_for_each_others_space() {
    // Together they would take twice the log.
    let rig = Rig::that_waits(2, 6, 10_000);
    let large = vec![7; 6 << 20];
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (rig, large, done) = (&rig, &large, &done);
        let writers: Vec<_> = (0..8)
            .map(|writer| {
                scope.spawn(move || {
                    let inode = Rig::inode(7 + writer);
                    for _ in 0..8 {
                        let count = rig.plane.write(&inode, 0, large, EntryFlags::empty()).unwrap();
                        assert_eq!(count, large.len());
                    }
                })
            })
            .collect();
        let digests = scope.spawn(move || {
            while !done.load(Ordering::SeqCst) {
                rig.fake.digest(u64::MAX);
                std::thread::yield_now();
            }
        });
        let ends: Vec<_> = writers
            .into_iter()
            .map(std::thread::ScopedJoinHandle::join)
            .collect();
        done.store(true, Ordering::SeqCst);
        digests.join().unwrap();
        assert!(ends.iter().all(Result::is_ok));
    });
}
