//! Undos of shares by the daemon, and the files that a comparison may let share.

use super::forwarded::{Caller, errno, fill_up};
use super::machine::{FILE, Machine, ROOT};
use super::shares::{scatter, share, two_files};
use crate::config::DedupScope;
use crate::digest::count_shared;
use std::cell::Cell;
use std::rc::Rc;
use varve_format::{BLOCK_BYTES, FileBlock, InodeKey, LogOp, SetAttr, SetAttrMask, Tier};
use varve_store::DataTarget;

const fn undo(key: InodeKey, offset: u64, len: u64) -> LogOp<'static> {
    LogOp::Unshare { key, offset, len }
}

#[test]
fn undo_of_more_than_a_record_takes_changes_no_byte_and_no_attribute() {
    let (mut caller, from, to) = two_files();
    caller.call(share(from, to)).unwrap();
    let mode = SetAttr {
        mask: SetAttrMask::MODE,
        mode: 0o6755,
        ..SetAttr::default()
    };
    caller.call(LogOp::SetAttr { key: to, attr: mode }).unwrap();
    let before = (caller.machine.data(to), caller.machine.attr(to));
    let count = count_shared(&caller.machine.store, to, (0, 0)).unwrap();
    assert_eq!((count.shared, count.blocks, count.parts), (1500, 1500, 1500));
    let others = count.shared;
    let spent = Rc::new(Cell::new((0, 0)));
    let sum = Rc::clone(&spent);
    caller.spent = Box::new(move |_, blocks| sum.set((sum.get().0 + blocks, sum.get().1 + 1)));
    let newest = caller.machine.store.newest_tx();
    caller.be(5);
    let (applied, _) = caller.call(undo(to, 0, 0)).unwrap();
    let records = caller.machine.store.newest_tx().0 - newest.0;
    assert!(
        records > 2 && spent.get().1 == records - 1,
        "{records}, {:?}",
        spent.get()
    );
    assert!(spent.get().0 > 0 && spent.get().0 <= others);
    // Who has mapped the file hears of it.
    assert_eq!(applied.remapped, [to]);
    assert_eq!((caller.machine.data(to), caller.machine.attr(to)), before);
    for key in [from, to] {
        assert_eq!(
            count_shared(&caller.machine.store, key, (0, 0)).unwrap().shared,
            0
        );
    }
    // The other side is the last owner, and takes no space.
    let used = caller.machine.store.space().tiers[0].free;
    caller.call(undo(from, 0, 0)).unwrap();
    assert!(caller.machine.store.space().tiers[0].free >= used);
    assert!(!caller.machine.store.shares_blocks(from.ino).unwrap());
    caller.machine.dump();
}

#[test]
fn undo_that_finds_no_space_leaves_each_block_shared_or_copied() {
    let (mut caller, from, to) = two_files();
    caller.call(share(from, to)).unwrap();
    let before = caller.machine.data(to);
    let filler = caller.make(ROOT, b"filler", FILE).unwrap();
    fill_up(&caller.machine.store, filler.ino);
    assert_eq!(errno(caller.call(undo(to, 0, 0))), libc::ENOSPC);
    assert_eq!(caller.machine.data(to), before);
    assert_eq!(caller.machine.data(from), before);
    caller.machine.dump();
    caller.call(LogOp::Truncate { key: filler, size: 0 }).unwrap();
    caller.call(undo(to, 0, 0)).unwrap();
    assert_eq!(caller.machine.data(to), before);
    assert_eq!(count_shared(&caller.machine.store, to, (0, 0)).unwrap().shared, 0);
    caller.machine.dump();
}

#[test]
fn undo_is_refused_for_much_at_once_and_for_what_is_no_file() {
    let (mut caller, from, to) = two_files();
    let dir = caller.make(ROOT, b"d", 0o040_755).unwrap();
    caller
        .call(LogOp::Truncate {
            key: to,
            size: 1 << 30,
        })
        .unwrap();
    assert_eq!(errno(caller.call(undo(to, 0, 0))), libc::EINVAL);
    assert_eq!(errno(caller.call(undo(to, 0, (16 << 20) + 1))), libc::EINVAL);
    assert_eq!(errno(caller.call(undo(to, 0, 16 << 20))), 0);
    // Beyond the end, and where nothing is shared.
    assert_eq!(errno(caller.call(undo(to, 1 << 40, 4096))), 0);
    assert_eq!(errno(caller.call(undo(from, 4096, 4096))), 0);
    assert_eq!(errno(caller.call(undo(dir, 0, 0))), libc::EISDIR);
    let gone = InodeKey::new(77, 3);
    assert_eq!(errno(caller.call(undo(gone, 0, 0))), libc::ESTALE);
    // A log that has it is not believed.
    let newest = caller.machine.store.newest_tx();
    caller.machine.op(undo(to, 0, 4096));
    let applied = caller.machine.digest(1000);
    let refused = applied.map_or(true, |all| all.iter().any(|applied| !applied.refused.is_empty()));
    assert!(refused, "after {newest:?}");
}

/// Two files of two users with the same four blocks on this tier.
fn of_two_users(caller: &mut Caller, tier: Tier, [first, second]: [(u32, u32); 2]) -> [InodeKey; 2] {
    let owners = [(first, &b"one"[..]), (second, b"two")];
    let keys = owners.map(|((uid, gid), name)| {
        let key = caller.make(ROOT, name, FILE & !0o777 | 0o644).unwrap();
        let attr = SetAttr {
            mask: SetAttrMask::UID | SetAttrMask::GID,
            uid,
            gid,
            ..SetAttr::default()
        };
        caller.call(LogOp::SetAttr { key, attr }).unwrap();
        key
    });
    for key in keys {
        let mut tx = caller.machine.store.begin().unwrap();
        let target = DataTarget::only(tier);
        tx.write_data(
            key.ino,
            FileBlock(0),
            &[7; 4 * BLOCK_BYTES as usize],
            true,
            target,
        )
        .unwrap();
        tx.commit().unwrap();
        caller
            .call(LogOp::Truncate {
                key,
                size: 4 * BLOCK_BYTES,
            })
            .unwrap();
    }
    caller.machine.store.share_extents().unwrap();
    keys
}

const fn compare(from: InodeKey, to: InodeKey) -> LogOp<'static> {
    LogOp::Share {
        key: to,
        offset: 0,
        source: from,
        source_offset: 0,
        len: 4 * BLOCK_BYTES,
        compare: true,
    }
}

#[test]
fn files_share_after_a_comparison_only_within_the_scope() {
    use DedupScope::{Group, Pool, User};
    // Owner and group of each; the scope; whether they may share.
    let cases = [
        ((1, 1), (1, 2), User, true),
        ((1, 9), (2, 9), User, false),
        ((1, 9), (2, 9), Group, true),
        ((1, 8), (1, 9), Group, true),
        ((1, 8), (2, 9), Group, false),
        ((1, 8), (2, 9), Pool, true),
    ];
    for (one, other, scope, may) in cases {
        let mut caller = Caller::on(Machine::with_flash());
        let [from, to] = of_two_users(&mut caller, Tier::Ssd, [one, other]);
        caller.machine.dedup_scope = scope;
        let expected = if may { 0 } else { libc::EPERM };
        assert_eq!(
            errno(caller.call(compare(from, to))),
            expected,
            "{one:?} {other:?} {scope:?}"
        );
        assert_eq!(caller.machine.store.shares_blocks(from.ino).unwrap(), may);
        // A refusal is the same whether the bytes are.
        scatter(&caller.machine.store, to, 9, 200);
        let different = if may { libc::EILSEQ } else { libc::EPERM };
        assert_eq!(errno(caller.call(compare(from, to))), different);
        // A clone is its maker's wish.
        let clone = LogOp::Share {
            key: to,
            offset: 0,
            source: from,
            source_offset: 0,
            len: 4 * BLOCK_BYTES,
            compare: false,
        };
        assert_eq!(errno(caller.call(clone)), 0);
        caller.machine.dump();
    }
}

#[test]
fn blocks_in_nvm_are_not_shared_across_users() {
    let mut caller = Caller::on(Machine::with_flash());
    caller.machine.dedup_scope = DedupScope::Pool;
    let [from, to] = of_two_users(&mut caller, Tier::Nvm, [(1, 1), (2, 2)]);
    assert_eq!(errno(caller.call(compare(from, to))), libc::EOPNOTSUPP);
    assert!(!caller.machine.store.shares_blocks(from.ino).unwrap());
    // Of one user they are.
    let attr = SetAttr {
        mask: SetAttrMask::UID,
        uid: 1,
        ..SetAttr::default()
    };
    caller.call(LogOp::SetAttr { key: to, attr }).unwrap();
    assert_eq!(errno(caller.call(compare(from, to))), 0);
    assert!(caller.machine.store.shares_blocks(from.ino).unwrap());
    caller.machine.dump();
}
