//! The fold against a model that does one operation after another.
#![allow(clippy::unwrap_used)]

mod model;
mod random;

use crate::{Actor, Fate, Fold, Grants, Need, Op, Plan, Refusal, WriteData};
use model::{Model, Session};
use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use random::Random;
use varve_format::{EntryFlags, InodeKey, LogOp, LogSeq, SessionId, SetAttr, SetAttrMask};

/// Grants everything.
struct All;

impl Grants for All {
    fn allows(&self, _: InodeKey, _: Need, _: LogSeq) -> bool {
        true
    }
}

/// Grants data and names of some inodes, up to a number.
struct Only(Vec<InodeKey>, LogSeq);

impl Grants for Only {
    fn allows(&self, key: InodeKey, need: Need, seq: LogSeq) -> bool {
        need != Need::Own && self.0.contains(&key) && seq <= self.1
    }
}

const fn actor(session: u64) -> Actor {
    Actor {
        session: SessionId(session),
        uid: 0,
        privileged: true,
        forwarded: false,
    }
}

const fn op(seq: u64, flags: EntryFlags, op: LogOp<'_>) -> Op<'_> {
    Op {
        seq: LogSeq(seq),
        time_ns: seq as i64 * 10,
        flags,
        op,
        left: None,
    }
}

const fn file(ino: u64) -> InodeKey {
    InodeKey::new(ino, 3)
}

const fn create(dir: InodeKey, name: &[u8], key: InodeKey, mode: u32) -> LogOp<'_> {
    LogOp::Create {
        dir,
        name,
        key,
        mode,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: b"",
    }
}

/// Folds operations of session 1, each a transaction, and returns the plan.
fn plan<'a>(model: &Model, ops: &[(EntryFlags, LogOp<'a>)]) -> Plan<'a> {
    let mut fold = Fold::new(model.clone(), i64::MAX);
    for (seq, (flags, what)) in ops.iter().enumerate() {
        let folded = fold.transaction(actor(1), &All, &[op(seq as u64 + 1, *flags, *what)]);
        assert_eq!(folded.unwrap(), Ok(()));
    }
    fold.finish()
}

const NONE: EntryFlags = EntryFlags::empty();
const FILE: u32 = 0o100_644;
const DIR: u32 = 0o040_755;
const ROOT: InodeKey = InodeKey::ROOT;

#[test]
fn file_made_and_deleted_in_a_batch_leaves_nothing_to_write() {
    let ops = [
        (NONE, create(ROOT, b"t", file(2), FILE)),
        (
            NONE,
            LogOp::Write {
                key: file(2),
                offset: 0,
                data: b"scratch",
            },
        ),
        (
            NONE,
            LogOp::SetXattr {
                key: file(2),
                name: b"user.a",
                value: b"1",
            },
        ),
        (
            EntryFlags::LAST_CLOSED,
            LogOp::Unlink {
                dir: ROOT,
                name: b"t",
                key: file(2),
            },
        ),
    ];
    let plan = plan(&Model::new(), &ops);
    assert!(plan.names.is_empty());
    assert_eq!(plan.inodes.len(), 1);
    assert_eq!(
        (plan.inodes[0].attr.key, plan.inodes[0].fate),
        (ROOT, Fate::Changed)
    );
    assert_eq!(plan.vanished, [file(2)]);
    assert_eq!(
        (plan.counts.bytes_in, plan.counts.bytes_out, plan.counts.vanished),
        (7, 0, 1)
    );
}

#[test]
fn files_that_come_and_go_take_little_of_a_record() {
    let body = [7; 8192];
    let model = Model::new();
    let mut fold = Fold::new(model, i64::MAX);
    let mut seq = 0;
    let mut at_work = 0;
    for ino in 2..10 {
        let key = file(ino);
        let ops = [
            (NONE, create(ROOT, b"mail", key, FILE)),
            (
                NONE,
                LogOp::Write {
                    key,
                    offset: 0,
                    data: &body,
                },
            ),
            (
                EntryFlags::LAST_CLOSED,
                LogOp::Unlink {
                    dir: ROOT,
                    name: b"mail",
                    key,
                },
            ),
        ];
        for (flags, what) in ops {
            seq += 1;
            assert_eq!(
                fold.transaction(actor(1), &All, &[op(seq, flags, what)]).unwrap(),
                Ok(())
            );
            at_work = at_work.max(fold.record_bytes());
        }
    }
    let left = fold.record_bytes();
    assert!(left < 512 + 8 * 512 && left < 2 * at_work, "{left} of {at_work}");
    assert!((1500..6000).contains(&at_work), "{at_work}");
}

#[test]
fn file_that_is_held_elsewhere_becomes_an_orphan_with_its_data() {
    let mut model = Model::new();
    model.hold(Session(2), file(2));
    let ops = [
        (NONE, create(ROOT, b"t", file(2), FILE)),
        (
            NONE,
            LogOp::Write {
                key: file(2),
                offset: 0,
                data: b"kept",
            },
        ),
        (
            EntryFlags::LAST_CLOSED,
            LogOp::Unlink {
                dir: ROOT,
                name: b"t",
                key: file(2),
            },
        ),
    ];
    let plan = plan(&model, &ops);
    let orphan = &plan.inodes[1];
    assert_eq!((orphan.fate, orphan.attr.nlink), (Fate::Made, 0));
    assert_eq!(orphan.file.pieces, [(0, WriteData::Here(b"kept"))]);
    assert_eq!(orphan.left, [SessionId(1)]);
}

#[test]
fn superseded_bytes_are_dropped_and_neighbours_counted_as_merged() {
    let ops = [
        (NONE, create(ROOT, b"f", file(2), FILE)),
        (
            NONE,
            LogOp::Write {
                key: file(2),
                offset: 0,
                data: &[1; 100],
            },
        ),
        (
            NONE,
            LogOp::Write {
                key: file(2),
                offset: 50,
                data: &[2; 100],
            },
        ),
        (
            NONE,
            LogOp::Write {
                key: file(2),
                offset: 150,
                data: &[3; 10],
            },
        ),
    ];
    let plan = plan(&Model::new(), &ops);
    let pieces = &plan.inodes[1].file.pieces;
    assert_eq!(
        pieces,
        &[
            (0, WriteData::Here(&[1; 50])),
            (50, WriteData::Here(&[2; 100])),
            (150, WriteData::Here(&[3; 10]))
        ]
    );
    assert_eq!(
        (plan.counts.bytes_in, plan.counts.bytes_out, plan.counts.merged),
        (210, 160, 2)
    );
}

#[test]
fn name_that_was_added_and_removed_again_is_no_change() {
    let mut model = Model::new();
    model.make(ROOT, b"f", file(2), FILE);
    let rename = |name, new_name| LogOp::Rename {
        dir: ROOT,
        name,
        key: file(2),
        new_dir: ROOT,
        new_name,
        victim: None,
        exchange: false,
    };
    let plan = plan(
        &model,
        &[(NONE, rename(&b"f"[..], &b"g"[..])), (NONE, rename(b"g", b"f"))],
    );
    assert!(plan.names.is_empty());
}

#[test]
fn refused_transaction_leaves_no_trace_of_its_first_operations() {
    let model = Model::new();
    let mut fold = Fold::new(model, i64::MAX);
    let ops = [
        op(1, NONE, create(ROOT, b"d", file(2), DIR)),
        op(2, NONE, create(file(2), b"f", file(3), FILE)),
        op(
            3,
            NONE,
            LogOp::Unlink {
                dir: ROOT,
                name: b"d",
                key: file(2),
            },
        ),
    ];
    let refused = fold.transaction(actor(1), &All, &ops).unwrap().unwrap_err();
    assert_eq!((refused.seq, refused.why), (LogSeq(3), Refusal::NotEmpty));
    let plan = fold.finish();
    assert!(plan.names.is_empty() && plan.inodes.is_empty());
    assert_eq!((plan.counts.ops, plan.counts.refused), (0, 3));
}

#[test]
fn operation_without_a_grant_is_refused() {
    let mut model = Model::new();
    model.make(ROOT, b"f", file(2), FILE);
    let mut fold = Fold::new(model, i64::MAX);
    let grants = Only(vec![file(2)], LogSeq(3));
    let write = LogOp::Write {
        key: file(2),
        offset: 0,
        data: b"x",
    };
    let chmod = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o777,
        ..SetAttr::default()
    };
    let mut why = |seq, what| {
        let done = fold
            .transaction(actor(1), &grants, &[op(seq, NONE, what)])
            .unwrap();
        done.err().map(|refused| refused.why)
    };
    assert_eq!(why(1, write), None);
    assert_eq!(
        why(
            2,
            LogOp::SetAttr {
                key: file(2),
                attr: chmod
            }
        ),
        Some(Refusal::NoGrant)
    );
    assert_eq!(why(3, create(ROOT, b"x", file(3), FILE)), Some(Refusal::NoGrant));
    assert_eq!(why(4, write), Some(Refusal::NoGrant));
}

#[test]
fn directory_moves_only_by_the_daemon_and_never_into_itself() {
    let mut model = Model::new();
    model.make(ROOT, b"a", file(2), DIR);
    model.make(file(2), b"b", file(3), DIR);
    let into = |dir, name, key, new_dir| LogOp::Rename {
        dir,
        name,
        key,
        new_dir,
        new_name: b"x",
        victim: None,
        exchange: false,
    };
    let out = into(file(2), &b"b"[..], file(3), ROOT);
    let mut fold = Fold::new(model, i64::MAX);
    let mut why = |forwarded, what| {
        let who = Actor {
            forwarded,
            ..actor(1)
        };
        let done = fold.transaction(who, &All, &[op(1, NONE, what)]).unwrap();
        done.err().map(|refused| refused.why)
    };
    assert_eq!(why(false, out), Some(Refusal::DirectoryMove));
    assert_eq!(why(true, into(ROOT, b"a", file(2), file(3))), Some(Refusal::Loop));
    assert_eq!(why(true, out), None);
    let plan = fold.finish();
    let links: Vec<_> = plan
        .inodes
        .iter()
        .map(|inode| (inode.attr.key, inode.attr.nlink))
        .collect();
    assert_eq!(links, [(ROOT, 4), (file(2), 2), (file(3), 2)]);
    assert_eq!(plan.inodes[2].attr.parent, ROOT.ino);
}

#[test]
fn stranger_owns_nothing_that_he_makes_for_others() {
    let mut fold = Fold::new(Model::new(), i64::MAX);
    let who = Actor {
        uid: 5,
        privileged: false,
        ..actor(1)
    };
    let made = op(1, NONE, create(ROOT, b"f", file(2), FILE));
    let refused = fold.transaction(who, &All, &[made]).unwrap().unwrap_err();
    assert_eq!(refused.why, Refusal::NotPermitted);
}

/// Everything, to a user of group 20.
struct InGroup;

impl Grants for InGroup {
    fn allows(&self, _: InodeKey, _: Need, _: LogSeq) -> bool {
        true
    }

    fn in_group(&self, gid: u32) -> bool {
        gid == 20
    }
}

const fn made(key: InodeKey, name: &[u8], mode: u32, gid: u32) -> LogOp<'_> {
    LogOp::Create {
        dir: ROOT,
        name,
        key,
        mode,
        uid: 5,
        gid,
        rdev: 0x801,
        target: b"",
    }
}

#[test]
fn stranger_makes_no_device_and_nothing_for_groups_of_others() {
    let stranger = Actor {
        uid: 5,
        privileged: false,
        ..actor(1)
    };
    for (mode, gid, want) in [
        (0o100_644, 20, None),
        (0o010_644, 20, None),
        (0o100_644, 21, Some(Refusal::NotPermitted)),
        (0o060_666, 20, Some(Refusal::NotPermitted)),
        (0o020_666, 20, Some(Refusal::NotPermitted)),
    ] {
        // As done by the daemon on its request, too.
        for forwarded in [false, true] {
            let who = Actor {
                forwarded,
                ..stranger
            };
            let mut fold = Fold::new(Model::new(), i64::MAX);
            let folded = fold.transaction(who, &InGroup, &[op(1, NONE, made(file(2), b"f", mode, gid))]);
            assert_eq!(
                folded.unwrap().err().map(|refused| refused.why),
                want,
                "{mode:o} {gid}"
            );
        }
    }
    // A directory that hands its group on does that for strangers too.
    let mut fold = Fold::new(Model::new(), i64::MAX);
    let dir = LogOp::SetAttr {
        key: ROOT,
        attr: SetAttr {
            mask: SetAttrMask::MODE | SetAttrMask::GID,
            mode: 0o2777,
            gid: 21,
            ..SetAttr::default()
        },
    };
    fold.transaction(actor(2), &All, &[op(1, NONE, dir)])
        .unwrap()
        .unwrap();
    let handed_on = op(1, NONE, made(file(2), b"f", 0o102_755, 21));
    fold.transaction(stranger, &InGroup, &[handed_on])
        .unwrap()
        .unwrap();
    let attr = fold.attr(file(2).ino).unwrap().unwrap();
    assert_eq!((attr.gid, attr.mode), (21, 0o100_755));
}

#[test]
fn set_id_bits_go_when_a_stranger_changes_data_whatever_he_says() {
    let change = |offset| LogOp::Write {
        key: file(2),
        offset,
        data: b"x",
    };
    let stranger = Actor {
        uid: 5,
        privileged: false,
        ..actor(1)
    };
    for (who, gid, before, after) in [
        (stranger, 20, 0o106_775, 0o100_775),
        // No program of a group: the bit means nothing, as on Linux.
        (stranger, 20, 0o106_664, 0o102_664),
        (stranger, 21, 0o106_664, 0o100_664),
        (
            Actor {
                forwarded: true,
                ..stranger
            },
            20,
            0o104_755,
            0o100_755,
        ),
        (actor(1), 20, 0o106_775, 0o106_775),
    ] {
        for entries in [1, 2] {
            let mut fold = Fold::new(Model::new(), i64::MAX);
            let root = LogOp::Create {
                dir: ROOT,
                name: b"f",
                key: file(2),
                mode: before,
                uid: 0,
                gid,
                rdev: 0,
                target: b"",
            };
            fold.transaction(actor(2), &All, &[op(1, NONE, root)])
                .unwrap()
                .unwrap();
            let ops: Vec<_> = (0..entries).map(|at| op(at + 1, NONE, change(at))).collect();
            fold.transaction(who, &InGroup, &ops).unwrap().unwrap();
            let mode = fold.attr(file(2).ino).unwrap().unwrap().mode;
            assert_eq!(mode, after, "{who:?} {gid} {before:o}: {mode:o}");
        }
    }
}

#[test]
fn file_capabilities_go_with_the_data_or_the_owner_whatever_the_log_says() {
    const CAPS: &[u8] = varve_format::XATTR_CAPABILITY;
    let caps = LogOp::SetXattr {
        key: file(2),
        name: CAPS,
        value: b"caps",
    };
    let other = LogOp::SetXattr {
        key: file(2),
        name: b"user.note",
        value: b"kept",
    };
    let owned_by = |uid| SetAttr {
        mask: SetAttrMask::UID,
        uid,
        ..SetAttr::default()
    };
    let mode = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o755,
        ..SetAttr::default()
    };
    let key = file(2);
    let write = LogOp::Write {
        key,
        offset: 0,
        data: b"another program",
    };
    let changes = [
        (write, false),
        (LogOp::Truncate { key, size: 0 }, false),
        (
            LogOp::Fallocate {
                key,
                mode: varve_format::FallocateMode::Allocate,
                offset: 0,
                len: 10,
            },
            false,
        ),
        (
            LogOp::SetAttr {
                key,
                attr: owned_by(7),
            },
            false,
        ),
        (LogOp::SetAttr { key, attr: mode }, true),
        (other, true),
    ];
    for (change, keeps) in changes {
        // In one batch with the capabilities, and in a later one; set anew afterwards they stay.
        let made = [
            (NONE, create(ROOT, b"prog", key, FILE)),
            (NONE, caps),
            (NONE, other),
        ];
        let mut together = Model::new();
        let batch = [&made[..], &[(NONE, change)]].concat();
        together.carry_out(&plan(&Model::new(), &batch));
        let mut apart = Model::new();
        apart.carry_out(&plan(&Model::new(), &made));
        let before = apart.clone();
        apart.carry_out(&plan(&before, &[(NONE, change)]));
        for model in [&together, &apart] {
            let xattrs = &model.files[&key.ino].xattrs;
            assert_eq!(xattrs.contains_key(CAPS), keeps, "{change:?}");
            assert!(xattrs.contains_key(&b"user.note"[..]));
        }
        let mut anew = before.clone();
        anew.carry_out(&plan(&before, &[(NONE, change), (NONE, caps)]));
        assert!(anew.files[&key.ino].xattrs.contains_key(CAPS));
    }
}

#[test]
fn time_in_a_log_is_never_later_than_now() {
    let mut fold = Fold::new(Model::new(), 15);
    fold.transaction(actor(1), &All, &[op(2, NONE, create(ROOT, b"f", file(2), FILE))])
        .unwrap()
        .unwrap();
    assert_eq!(fold.finish().inodes[1].attr.ctime_ns, 15);
}

proptest! {
    #![proptest_config(proptest::test_runner::Config { cases: 300, failure_persistence: None, ..Default::default() })]

    /// Any sequence of transactions: executing the plan gives the result of one operation after another, and
    /// refuses the same transactions.
    #[test]
    fn plan_equals_one_operation_after_another(
        seed in any::<u64>(),
        batches in 1_usize..5,
        len in 1_usize..60,
    ) {
        let mut random = Random::new(seed);
        let mut slow = Model::new();
        slow.hold(Session(2), file(4));
        slow.hold(Session(2), file(5));
        let mut fast = slow.clone();
        let mut seq = 0;
        let mut accepted = 0;
        for _ in 0..batches {
            let bytes = random::batch(&mut random, &slow, len);
            let mut fold = Fold::new(fast.clone(), i64::MAX);
            for transaction in &bytes {
                let ops: Vec<Op<'_>> = transaction
                    .ops
                    .iter()
                    .map(|(flags, owned)| { seq += 1; op(seq, *flags, owned.borrow()) })
                    .collect();
                let who = actor(transaction.session);
                let folded = fold.transaction(who, &All, &ops).unwrap();
                let done = slow.transaction(Session(transaction.session), &ops);
                prop_assert_eq!(folded.is_ok(), done, "{:?} {:?}", folded, ops);
                prop_assert_eq!(fold.record_bytes(), fold.record_bytes_counted(), "{:?}", ops);
                accepted += u64::from(done);
            }
            let plan = fold.finish();
            fast.carry_out(&plan);
            prop_assert_eq!(fast.differences(&slow), Vec::<String>::new());
        }
        prop_assert!(accepted > 0 || len * batches < 100);
    }
}
