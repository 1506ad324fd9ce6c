//! Logs digested without a crash.

use super::super::Freed;
use super::machine::{DIR, FILE, Machine, NONE, ROOT, S, create};
use varve_digest::Refusal;
use varve_format::{
    EntryFlags, FallocateMode, InodeKey, LeaseNo, LogOp, LogSeq, SetAttr, SetAttrMask, session::GrantRow,
};
use varve_store::{InodeSlot, StoreError};

#[test]
fn digest_makes_what_the_log_says() {
    let mut machine = Machine::new();
    let keys = machine.numbers(4);
    machine.create(ROOT, b"d", keys[0], DIR);
    machine.create(keys[0], b"f", keys[1], FILE);
    machine.op(LogOp::Write {
        key: keys[1],
        offset: 0,
        data: &[1; 5000],
    });
    machine.op(LogOp::Write {
        key: keys[1],
        offset: 4000,
        data: &[2; 10],
    });
    machine.op(LogOp::Link {
        dir: ROOT,
        name: b"g",
        key: keys[1],
    });
    machine.op(LogOp::SetXattr {
        key: keys[1],
        name: b"user.a",
        value: b"v",
    });
    machine.op(LogOp::Create {
        dir: keys[0],
        name: b"s",
        key: keys[2],
        mode: 0o120_777,
        uid: 7,
        gid: 8,
        rdev: 0,
        target: b"../g",
    });
    let attr = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o600,
        ..SetAttr::default()
    };
    machine.op(LogOp::SetAttr { key: keys[1], attr });
    let applied = machine.digest(1000).unwrap();
    assert_eq!(applied.len(), 1);
    assert_eq!(applied[0].digested, [(S, LogSeq(8))]);
    assert_eq!(applied[0].counts.ops, 8);
    assert_eq!(machine.lookup(ROOT, b"g"), Some(keys[1]));
    assert_eq!(machine.lookup(keys[0], b"f"), Some(keys[1]));
    let file = machine.attr(keys[1]);
    assert_eq!(
        (file.nlink, file.mode, file.size_bytes, file.mtime_ns),
        (2, 0o100_600, 5000, 1004)
    );
    let mut data = vec![1; 5000];
    data[4000..4010].fill(2);
    assert_eq!(machine.data(keys[1]), data);
    assert_eq!(machine.attr(ROOT).nlink, 3);
    assert_eq!(machine.store.read_link(keys[2].ino).unwrap(), b"../g");
    assert_eq!(
        machine.store.xattr_get(keys[1].ino, b"user.a").unwrap().unwrap(),
        b"v"
    );
    machine.dump();
}

#[test]
fn bad_transaction_is_refused_alone() {
    let mut machine = Machine::new();
    let keys = machine.numbers(3);
    machine.create(ROOT, b"a", keys[0], FILE);
    machine.write(&[
        (NONE, create(ROOT, b"b", keys[1], FILE)),
        (
            NONE,
            LogOp::Unlink {
                dir: ROOT,
                name: b"nothing",
                key: keys[0],
            },
        ),
    ]);
    machine.create(ROOT, b"c", keys[2], FILE);
    machine.create(ROOT, b"e", InodeKey::new(1 << 40, 1), FILE);
    machine.op(LogOp::Write {
        key: InodeKey::new(0, 0),
        offset: 0,
        data: b"x",
    });
    machine.leases.denied.borrow_mut().push(keys[2]);
    let applied = machine.digest(1000).unwrap();
    let why: Vec<_> = applied[0]
        .refused
        .iter()
        .map(|(_, refused)| (refused.seq.0, refused.why))
        .collect();
    let expected = [
        (3, Refusal::NoEntry),
        (4, Refusal::NoGrant),
        (5, Refusal::NoInode),
        (6, Refusal::NoInode),
    ];
    assert_eq!(why, expected);
    assert_eq!(machine.digested(), LogSeq(6));
    assert_eq!(machine.lookup(ROOT, b"a"), Some(keys[0]));
    assert_eq!(
        (machine.lookup(ROOT, b"b"), machine.lookup(ROOT, b"c")),
        (None, None)
    );
    machine.dump();
}

#[test]
fn deleted_inode_takes_its_rows_along() {
    let mut machine = Machine::new();
    let keys = machine.numbers(2);
    let row = GrantRow {
        session: S,
        lease: LeaseNo(9),
        key: InodeKey::new(keys[0].ino.0, 0),
        rights: 0,
        first_seq: LogSeq(1),
        last_seq: None,
        batch: 0b11,
    };
    let mut tx = machine.store.begin().unwrap();
    tx.grant_put(&row).unwrap();
    tx.commit().unwrap();
    machine.leases.rows.borrow_mut().push(row);
    machine.create(ROOT, b"short", keys[0], FILE);
    machine.create(ROOT, b"long", keys[1], FILE);
    machine.op(LogOp::Write {
        key: keys[1],
        offset: 0,
        data: &[7; 9000],
    });
    let closed = EntryFlags::LAST_CLOSED;
    machine.write(&[(
        closed,
        LogOp::Unlink {
            dir: ROOT,
            name: b"short",
            key: keys[0],
        },
    )]);
    let applied = machine.digest(1000).unwrap();
    assert_eq!(applied[0].freed, [keys[0]]);
    assert_eq!(machine.store.grants().unwrap()[0].batch, 0b10);
    assert!(matches!(
        machine.store.slot(keys[0].ino).unwrap(),
        InodeSlot::Free(_)
    ));
    machine.write(&[(
        closed,
        LogOp::Unlink {
            dir: ROOT,
            name: b"long",
            key: keys[1],
        },
    )]);
    let applied = machine.digest(1000).unwrap();
    assert_eq!(
        (&applied[0].freed[..], &applied[0].rows[..]),
        (&[keys[1]][..], &[(LeaseNo(9), None)][..])
    );
    assert!(matches!(
        machine.store.slot(keys[1].ino).unwrap(),
        InodeSlot::Free(_)
    ));
    assert!(machine.store.grants().unwrap().is_empty());
    machine.dump();
}

#[test]
fn unlinked_file_lives_until_nobody_holds_it() {
    let mut machine = Machine::new();
    let key = machine.numbers(1)[0];
    machine.leases.held.borrow_mut().push((S, key));
    machine.create(ROOT, b"f", key, FILE);
    machine.op(LogOp::Write {
        key,
        offset: 0,
        data: b"still here",
    });
    machine.op(LogOp::Unlink {
        dir: ROOT,
        name: b"f",
        key,
    });
    machine.digest(1000).unwrap();
    assert_eq!(machine.data(key), b"still here");
    assert_eq!(machine.store.orphans().unwrap(), [key]);
    let free =
        |machine: &Machine| super::super::free_orphans(&machine.store, &[key], &machine.leases).unwrap();
    assert_eq!(free(&machine), Freed::default());
    machine.op(LogOp::Forget { key });
    let applied = machine.digest(1000).unwrap();
    assert_eq!(applied[0].unheld, [(S, key)]);
    assert!(matches!(machine.store.get_key(key), Err(StoreError::NoInode(_))));
    assert_eq!(free(&machine).gone, [key]);
    machine.dump();
}

#[test]
fn batch_too_big_for_one_record_becomes_several() {
    let mut machine = Machine::with_journal(1 << 20);
    let mut all = Vec::new();
    for _ in 0..25 {
        let keys = machine.numbers(16);
        for key in keys {
            let name = format!("a file with quite a long name, number {}", key.ino);
            machine.create(ROOT, name.as_bytes(), key, FILE);
            machine.op(LogOp::Write {
                key,
                offset: 0,
                data: &key.ino.0.to_le_bytes(),
            });
            all.push((name, key));
        }
    }
    let applied = machine.digest(100_000).unwrap();
    assert!(applied.len() > 1);
    assert!(applied.iter().all(|applied| applied.refused.is_empty()));
    assert_eq!(machine.digested(), LogSeq(800));
    for (name, key) in all {
        assert_eq!(machine.lookup(ROOT, name.as_bytes()), Some(key));
        assert_eq!(machine.data(key), key.ino.0.to_le_bytes());
    }
    machine.dump();
}

#[test]
fn scattered_file_is_cut_punched_and_freed_by_records_of_their_own() {
    let mut machine = Machine::with_journal(1 << 20);
    let key = machine.numbers(1)[0];
    machine.create(ROOT, b"f", key, FILE);
    // Every other block, so that each block is an extent.
    for block in 0..1500_u64 {
        machine.op(LogOp::Write {
            key,
            offset: block * 8192,
            data: &[1; 16],
        });
    }
    machine.digest(100_000).unwrap();
    machine.op(LogOp::Fallocate {
        key,
        mode: FallocateMode::PunchHole,
        offset: 8192 * 1000,
        len: 8192 * 500,
    });
    machine.op(LogOp::Truncate {
        key,
        size: 8192 * 400 + 4,
    });
    machine.op(LogOp::Write {
        key,
        offset: 8192 * 402,
        data: &[3; 3],
    });
    machine.digest(100_000).unwrap();
    let data = machine.data(key);
    assert_eq!(data.len(), 8192 * 402 + 3);
    assert_eq!(
        data[8192 * 400..8192 * 400 + 16],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(data.iter().filter(|byte| **byte == 1).count(), 400 * 16 + 4);
    assert_eq!(data[8192 * 402..], [3; 3]);
    machine.write(&[(
        EntryFlags::LAST_CLOSED,
        LogOp::Unlink {
            dir: ROOT,
            name: b"f",
            key,
        },
    )]);
    let applied = machine.digest(100_000).unwrap();
    assert_eq!(applied[0].freed, [key]);
    assert!(matches!(machine.store.get_key(key), Err(StoreError::NoInode(_))));
    assert!(machine.store.orphans().unwrap().is_empty());
    machine.dump();
}

#[test]
fn full_pool_keeps_the_log_and_what_was_digested() {
    let mut machine = Machine::new();
    let keys = machine.numbers(2);
    let blocks = machine.store.space().available;
    machine.leases.reserved.set(Some(2 * blocks));
    let fill = |key, len| LogOp::Fallocate {
        key,
        mode: FallocateMode::Allocate,
        offset: 0,
        len,
    };
    machine.create(ROOT, b"small", keys[0], FILE);
    machine.op(LogOp::Write {
        key: keys[0],
        offset: 0,
        data: b"fits",
    });
    machine.create(ROOT, b"big", keys[1], FILE);
    machine.op(fill(keys[1], (blocks + 1000) * 4096));
    let error = machine.digest(1000).unwrap_err();
    assert!(matches!(error, StoreError::NoSpace { .. }), "{error}");
    assert_eq!(machine.digested(), LogSeq(3));
    assert_eq!(machine.data(keys[0]), b"fits");
    // A session that logs more than its reservation is refused at once.
    machine.leases.reserved.set(Some(100));
    let applied = machine.digest(1000).unwrap();
    assert_eq!(applied[0].refused[0].1.why, Refusal::NotReserved);
    assert_eq!(machine.digested(), LogSeq(4));
    machine.dump();
}

#[test]
fn stranger_makes_nothing_for_a_foreign_group() {
    let mut machine = Machine::new();
    let keys = machine.numbers(2);
    let bit = LogOp::Create {
        dir: ROOT,
        name: b"f",
        key: keys[0],
        mode: 0o102_755,
        uid: 5,
        gid: 0,
        rdev: 0,
        target: b"",
    };
    machine.op(bit);
    machine.create(ROOT, b"g", keys[1], FILE);
    machine.unprivileged = Some(5);
    let applied = machine.digest(1000).unwrap();
    let refused: Vec<_> = applied[0]
        .refused
        .iter()
        .map(|(_, refused)| refused.why)
        .collect();
    assert_eq!(refused, [Refusal::NotPermitted; 2]);
    assert_eq!(
        (machine.lookup(ROOT, b"f"), machine.lookup(ROOT, b"g")),
        (None, None)
    );
}

#[test]
fn noise_in_a_log_is_digested_to_nothing() {
    let mut machine = Machine::new();
    let key = machine.numbers(1)[0];
    machine.create(ROOT, b"f", key, FILE);
    let log = machine.log();
    let mut noise = vec![0; 4096];
    for (at, byte) in noise.iter_mut().enumerate() {
        *byte = (at as u8).wrapping_mul(77) ^ 0x33;
    }
    log.write(64 + 128, &noise).unwrap();
    machine.digest(1000).unwrap();
    assert_eq!(machine.lookup(ROOT, b"f"), Some(key));
    assert_eq!(machine.digested(), LogSeq(1));
}

/// Makes a file with a digested block of ones, and a block of twos over it in the log.
fn overwritten(machine: &mut Machine) -> InodeKey {
    let key = file_with(machine, &[1; 4096]);
    machine.op(LogOp::Write {
        key,
        offset: 0,
        data: &[2; 4096],
    });
    key
}

/// Makes a file with `first` as its content, digested.
fn file_with(machine: &mut Machine, first: &[u8]) -> InodeKey {
    let key = machine.numbers(1)[0];
    machine.create(ROOT, b"f", key, FILE);
    machine.op(LogOp::Write {
        key,
        offset: 0,
        data: first,
    });
    machine.digest(1000).unwrap();
    key
}

#[test]
fn blocks_left_in_the_log_come_to_their_place_whatever_covers_them() {
    let mut machine = Machine::new();
    let key = file_with(&mut machine, &[1; 3 * 4096]);
    let mut want = vec![1; 3 * 4096];
    // Whole, then covered in part from both sides, from within, and wholly.
    let writes: [(u64, usize); 6] = [
        (0, 12 * 4096),
        (4096 - 100, 200),
        (2 * 4096, 2 * 4096),
        (3 * 4096, 4096),
        (8 * 4096 + 7, 1),
        (10 * 4096, 4096),
    ];
    for (at, (offset, len)) in writes.into_iter().enumerate() {
        let data = vec![10 + at as u8; len];
        machine.op(LogOp::Write {
            key,
            offset,
            data: &data,
        });
        let end = offset as usize + len;
        want.resize(want.len().max(end), 0);
        want[offset as usize..end].copy_from_slice(&data);
    }
    let applied = machine.digest(1000).unwrap();
    assert_eq!((applied.len(), applied[0].counts.ops, machine.unsure), (1, 6, 0));
    assert!(machine.data(key) == want);
}

#[test]
fn torn_blocks_have_no_effect_and_nothing_behind_them_either() {
    let mut machine = Machine::new();
    let key = overwritten(&mut machine);
    machine.op(LogOp::Write {
        key,
        offset: 4096,
        data: &[3; 8192],
    });
    let torn = machine.end() - 1;
    machine.op(LogOp::Truncate { key, size: 100 });
    machine.log().write(torn, &[4]).unwrap();
    machine.digest(1000).unwrap();
    assert_eq!(machine.unsure, 1);
    assert_eq!(machine.digested(), LogSeq(3));
    assert!(machine.data(key) == [2; 4096]);
    machine.log().write(torn, &[3]).unwrap();
    machine.digest(1000).unwrap();
    assert_eq!(machine.digested(), LogSeq(5));
    assert!(machine.data(key) == [2; 100]);
}

#[test]
fn torn_blocks_that_nobody_needs_are_looked_at_all_the_same() {
    let mut machine = Machine::new();
    let key = overwritten(&mut machine);
    let torn = machine.end() - 1;
    // This entry covers it wholly.
    machine.op(LogOp::Write {
        key,
        offset: 0,
        data: &[3; 4096],
    });
    // This entry is refused.
    machine.op(LogOp::Write {
        key: InodeKey::new(77, 1),
        offset: 0,
        data: &[4; 4096],
    });
    let refused = machine.end() - 1;
    machine.op(LogOp::Noop);
    machine.log().write(torn, &[9]).unwrap();
    machine.digest(1000).unwrap();
    assert_eq!((machine.unsure, machine.digested()), (1, LogSeq(2)));
    machine.log().write(torn, &[2]).unwrap();
    machine.log().write(refused, &[9]).unwrap();
    let applied = machine.digest(1000).unwrap();
    assert_eq!((machine.unsure, machine.digested()), (2, LogSeq(4)));
    assert!(applied.iter().all(|applied| applied.refused.is_empty()));
    machine.log().write(refused, &[4]).unwrap();
    let applied = machine.digest(1000).unwrap();
    assert_eq!(applied[0].refused.len(), 1);
    assert_eq!((machine.unsure, machine.digested()), (2, LogSeq(6)));
    assert!(machine.data(key) == [3; 4096]);
}
