//! The data path when space, reservations or the session end, and with slow tiers.

use super::{Rig, contents};
use crate::errno::{Errno, OpError};
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::{EntryFlags, FILE_SIZE_MAX, FallocateMode, LogOp, LogSeq, Tier, charge};

const NONE: EntryFlags = EntryFlags::empty();

#[test]
fn write_fails_with_enospc_before_it_is_logged_when_there_are_no_credits() {
    let rig = Rig::new(2, 2);
    let inode = Rig::inode(2);
    rig.fake.unreserved.store(10, Ordering::SeqCst);
    assert_eq!(rig.plane.write(&inode, 0, &[1; 8192], NONE), Ok(8192));
    assert_eq!(
        rig.plane.write(&inode, 0, &[1; 40960], NONE),
        Err(OpError::Failed(Errno(libc::ENOSPC)))
    );
    assert_eq!(rig.plane.log().unwrap().last_seq(), LogSeq(1));
    assert!(rig.fake.called("digest") > 0);
    // Operations that free space need none.
    assert_eq!(rig.plane.truncate(&inode, 0, NONE), Ok(()));
    assert_eq!(rig.plane.write(&inode, 0, &[2; 4096], NONE), Ok(4096));
}

/// Blocks that the daemon charges for the entries in the log.
fn counted(rig: &Rig) -> u64 {
    let entries = super::fake::scan(&*rig.fake.log);
    let charged = entries.values().map(|found| {
        let op = LogOp::parse(&found.header, &found.payload).unwrap();
        u64::from(charge(&op))
    });
    charged.sum()
}

/// Blocks that the session was granted and counts as used.
fn used(rig: &Rig) -> u64 {
    u64::MAX - rig.fake.unreserved.load(Ordering::SeqCst) - rig.plane.reserved_left()
}

#[test]
fn session_uses_up_what_the_daemon_counts_wherever_writes_begin_in_their_blocks() {
    // Direct, staged, and in several transactions; each of them at several places in a block.
    for len in [1, 100, 4095, 4096, 5000, 16 << 10, 40_960, 100_000, (9 << 20) + 5] {
        for shift in [0, 1, 7, 4000] {
            let rig = Rig::new(4, 16);
            // All entries stay in the log.
            rig.fake.obeys.store(false, Ordering::SeqCst);
            let inode = Rig::inode(2);
            rig.plane.append(&inode, &vec![3; shift as usize], NONE).unwrap();
            rig.plane.append(&inode, &vec![1; len], NONE).unwrap();
            assert_eq!(used(&rig), counted(&rig), "an append of {len} bytes at {shift}");
            rig.plane.write(&inode, shift, &vec![2; len], NONE).unwrap();
            assert_eq!(used(&rig), counted(&rig), "a write of {len} bytes at {shift}");
        }
    }
}

#[test]
fn session_uses_up_nothing_when_an_append_would_pass_the_largest_size() {
    let rig = Rig::new(2, 4);
    let inode = Rig::inode(2);
    rig.plane.truncate(&inode, FILE_SIZE_MAX - 1, NONE).unwrap();
    let before = used(&rig);
    for len in [2, 5000, 100_000] {
        let done = rig.plane.append(&inode, &vec![1; len], NONE);
        assert_eq!(done, Err(OpError::Failed(Errno(libc::EFBIG))));
        assert_eq!(used(&rig), before, "{len} bytes");
    }
}

#[test]
fn session_uses_up_nothing_when_it_runs_out_of_credits_amid_a_write() {
    let rig = Rig::new(2, 4);
    let inode = Rig::inode(2);
    rig.fake.unreserved.store(30, Ordering::SeqCst);
    let done = rig.plane.write(&inode, 0, &vec![1; 200_000], NONE);
    assert_eq!(done, Err(OpError::Failed(Errno(libc::ENOSPC))));
    assert_eq!(
        rig.fake.unreserved.load(Ordering::SeqCst) + rig.plane.reserved_left(),
        30
    );
    assert_eq!(rig.plane.write(&inode, 0, &[1; 60_000], NONE), Ok(60_000));
}

#[test]
fn session_gives_back_what_it_does_not_use_and_asks_again() {
    let rig = Rig::new(2, 4);
    let inode = Rig::inode(2);
    rig.fake.obeys.store(false, Ordering::SeqCst);
    let all = 20_000;
    rig.fake.unreserved.store(all, Ordering::SeqCst);
    rig.plane.write(&inode, 0, &[1; 4096], NONE).unwrap();
    assert_eq!(rig.plane.reserved_left(), 16_384 - counted(&rig));
    for asks in 1..4 {
        rig.plane.return_reservation();
        assert_eq!(rig.plane.reserved_left(), 0);
        let left = rig.fake.unreserved.load(Ordering::SeqCst);
        assert_eq!(left + counted(&rig), all, "what is in the log stays paid");
        // The answer covers all granted blocks, whether they were used or not.
        assert_eq!(rig.fake.vouched.load(Ordering::SeqCst), asks * 16_384);
        rig.plane.append(&inode, &[2; 100], NONE).unwrap();
        assert_eq!(rig.fake.called("reserve"), asks + 1);
    }
    // There is nothing left to give.
    rig.plane.return_reservation();
    rig.plane.return_reservation();
    assert_eq!(rig.fake.unreserved.load(Ordering::SeqCst) + counted(&rig), all);
}

#[test]
fn what_a_session_gives_back_is_in_no_lane_and_in_no_log() {
    const THREADS: u64 = 3;
    let rig = Rig::new(4, 16);
    rig.fake.obeys.store(false, Ordering::SeqCst);
    let all = 1 << 20;
    rig.fake.unreserved.store(all, Ordering::SeqCst);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (rig, over) = (&rig, &over);
        scope.spawn(move || {
            while !over.load(Ordering::SeqCst) {
                rig.plane.return_reservation();
                std::thread::yield_now();
            }
        });
        let writers: Vec<_> = (0..THREADS)
            .map(|number| {
                let inode = Rig::inode(2 + number);
                scope.spawn(move || {
                    for round in 0..300 {
                        rig.plane.write(&inode, round * 100, &[1; 200], NONE).unwrap();
                        rig.plane.append(&inode, &[2; 5000], NONE).unwrap();
                        if round % 50 == 0 {
                            rig.plane.append(&inode, &[3; 40_000], NONE).unwrap();
                        }
                    }
                })
            })
            .collect();
        for writer in writers {
            writer.join().unwrap();
        }
        over.store(true, Ordering::SeqCst);
    });
    let given = all - rig.fake.unreserved.load(Ordering::SeqCst);
    assert_eq!(given, counted(&rig) + rig.plane.reserved_left());
    rig.plane.return_reservation();
    assert_eq!(all - rig.fake.unreserved.load(Ordering::SeqCst), counted(&rig));
}

#[test]
fn write_fails_with_enospc_when_the_log_stays_full() {
    let rig = Rig::that_waits(1, 2, 200);
    let inode = Rig::inode(2);
    rig.fake.obeys.store(false, Ordering::SeqCst);
    let mut written = 0;
    let error = loop {
        match rig.plane.append(&inode, &[3; 60_000], NONE) {
            Ok((at, len)) => {
                assert_eq!(at, written);
                written += len as u64;
            }
            Err(error) => break error,
        }
    };
    assert_eq!(error, OpError::Failed(Errno(libc::ENOSPC)));
    assert!(written > 3 << 20);
    assert_eq!(inode.attr().size_bytes, written);
    // Nothing was lost, and the log goes on when there is space again.
    rig.fake.obeys.store(true, Ordering::SeqCst);
    assert_eq!(rig.plane.append(&inode, &[4; 10], NONE), Ok((written, 10)));
    let all = contents(&rig.plane, &inode);
    assert!(all[..written as usize].iter().all(|byte| *byte == 3) && all[written as usize..] == [4; 10]);
}

#[test]
fn operations_report_a_lost_session_after_the_fact() {
    let rig = Rig::new(2, 2);
    let inode = Rig::inode(2);
    assert_eq!(rig.plane.write(&inode, 0, &[1; 4096], NONE), Ok(4096));
    rig.fake.page.seal();
    let lost = |seq: u64| {
        Some(varve_format::SeqRange {
            first: LogSeq(seq),
            last: LogSeq(seq),
        })
    };
    for (seq, len) in [(2, 4096), (3, 100), (4, 60_000)] {
        match rig.plane.write(&inode, 0, &vec![2; len], NONE) {
            Err(OpError::SessionLost {
                committed: Some((seqs, got)),
                otherwise: None,
            }) => {
                assert_eq!((Some(seqs), got), (lost(seq), len));
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(rig.plane.read(&inode, 0, &mut [0; 10]), Err(OpError::lost()));
    // The entries are in the log all the same: the seal decides.
    assert_eq!(super::fake::scan(&*rig.fake.log).len(), 4);
}

#[test]
fn slow_tier_is_read_ahead_when_read_in_order() {
    let rig = Rig::new(2, 4);
    let inode = Rig::inode(2);
    *rig.fake.tier.lock() = Tier::Ssd;
    let data: Vec<u8> = (0..1 << 20).map(|i: u32| (i / 3) as u8 | 1).collect();
    rig.plane.write(&inode, 0, &data, NONE).unwrap();
    rig.plane.digest_all::<()>().unwrap();
    let mut out = vec![0; 4096];
    for at in (0..data.len()).step_by(4096) {
        assert_eq!(rig.plane.read(&inode, at as u64, &mut out), Ok(4096));
        assert!(out == data[at..at + 4096]);
    }
    let asked = rig.fake.called("read");
    assert!((3..=6).contains(&asked), "{asked} messages for 1 MiB");
    let mut all = vec![0; data.len()];
    rig.plane.read(&inode, 0, &mut all).unwrap();
    assert!(all == data);
}

#[test]
fn set_id_bits_go_when_asked() {
    let rig = Rig::new(2, 2);
    let inode = Rig::inode(2);
    inode.write().attr.mode = 0o106_755;
    rig.plane.write(&inode, 0, &[1; 4096], NONE).unwrap();
    rig.plane
        .write(&inode, 0, &[1; 4096], EntryFlags::CLEAR_SUID)
        .unwrap();
    assert_eq!(inode.attr().mode, 0o102_755);
    rig.plane
        .fallocate(&inode, FallocateMode::Allocate, 0, 5, EntryFlags::CLEAR_SGID)
        .unwrap();
    assert_eq!(inode.attr().mode, 0o100_755);
    let flags: Vec<u8> = super::fake::scan(&*rig.fake.log)
        .values()
        .map(|entry| entry.header.flags)
        .collect();
    assert_eq!(flags, [0, 1, 2]);
}

#[test]
fn overwrite_in_place_moves_mtime_and_the_last_number() {
    let rig = Rig::new(2, 2);
    let inode = Rig::inode(2);
    rig.plane.write(&inode, 0, &[1; 8192], NONE).unwrap();
    let before = inode.attr();
    rig.plane.write(&inode, 4096, &[2; 4096], NONE).unwrap();
    let after = inode.attr();
    assert!(after.mtime_ns > before.mtime_ns && after.ctime_ns == after.mtime_ns);
    let last = rig.plane.log().unwrap().last_seq();
    assert_eq!((last, inode.last_seq(last)), (LogSeq(2), LogSeq(2)));
    inode.write().attr.mtime_ns = 5;
    assert_eq!(
        inode.attr().mtime_ns,
        5,
        "a time that is set wins over an earlier overwrite"
    );
    inode.write().attr.mtime_ns = i64::MAX;
    rig.plane.write(&inode, 4096, &[3; 4096], NONE).unwrap();
    let mtime_ns = inode.attr().mtime_ns;
    assert!(
        (after.mtime_ns..i64::MAX).contains(&mtime_ns),
        "an overwrite wins over a time that was set ahead: {mtime_ns}"
    );
}

/// A thread has a lane of its own, which overwrites in place need, only if there are enough chunks.
#[test]
fn overwrite_in_place_ends_a_time_that_was_set_ahead() {
    let rig = Rig::new(64, 64);
    let inode = Rig::inode(2);
    rig.plane.write(&inode, 0, &[1; 8192], NONE).unwrap();
    let before = inode.attr();
    inode.write().attr.mtime_ns = i64::MAX;
    rig.plane.write(&inode, 4096, &[2; 4096], NONE).unwrap();
    let mtime_ns = inode.attr().mtime_ns;
    assert!(
        (before.mtime_ns..i64::MAX).contains(&mtime_ns),
        "an overwrite wins over a time that was set ahead: {mtime_ns}"
    );
}

#[test]
fn copy_range_copies_between_files_and_refuses_overlap() {
    let rig = Rig::new(4, 8);
    let (from, to) = (Rig::inode(2), Rig::inode(3));
    let data: Vec<u8> = (0..(2 << 20) + 5).map(|i: u32| (i / 7) as u8).collect();
    rig.plane.write(&from, 0, &data, NONE).unwrap();
    assert_eq!(
        rig.plane.copy_range(&from, 10, &to, 3, u64::MAX >> 8, NONE),
        Ok(data.len() as u64 - 10)
    );
    assert!(contents(&rig.plane, &to)[3..] == data[10..]);
    let refused = rig.plane.copy_range(&from, 0, &from, 100, 101, NONE);
    assert_eq!(refused, Err(OpError::Failed(Errno(libc::EINVAL))));
    assert_eq!(rig.plane.copy_range(&from, 0, &from, 4 << 20, 100, NONE), Ok(100));
    // A length beyond the end does not make the ranges overlap, and the bytes that the copy adds are not
    // copied again.
    let (short, len) = (Rig::inode(4), 1 << 40);
    rig.plane.write(&short, 0, b"hello", NONE).unwrap();
    assert_eq!(rig.plane.copy_range(&short, 0, &short, 5, len, NONE), Ok(5));
    assert!(contents(&rig.plane, &short) == b"hellohello");
    let refused = rig.plane.copy_range(&short, 0, &short, 9, len, NONE);
    assert_eq!(refused, Err(OpError::Failed(Errno(libc::EINVAL))));
}

#[test]
fn sync_shares_rounds_and_covers_every_chunk() {
    let rig = Rig::new(4, 8);
    let inode = Rig::inode(2);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    rig.plane.append(&inode, &[1; 70_000], NONE).unwrap();
                    rig.plane.sync().unwrap();
                }
            });
        }
    });
    assert_eq!(inode.attr().size_bytes, 80 * 70_000);
}
