//! Sessions that end between the commit of a row and its insertion in memory, which threads rarely hit by
//! chance: step by step.
#![allow(clippy::unwrap_used)]

use super::Leasing;
use crate::common::{Client, ROOT, World, want};
use crate::digest::Applied;
use crate::kernel::Core;
use crate::leases::grants::RowChange;
use crate::ops::digest::TakeOver;
use crate::ops::numbers::InodeNumbers;
use crate::ops::record::Records;
use crate::ops::rows::write_rows;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use std::sync::Arc;
use varve_ipc::{LeaseMode, Service};
use varve_store::StoreError;

fn session_of(world: &World, client: &Client) -> Arc<Session> {
    let session = world.kernel.locked().live(client.id()).unwrap();
    Records::of(&world.kernel).make(&session).unwrap();
    session
}

/// Ends the session: its log is digested, its rows are gone.
fn end(world: &World, client: &Client) {
    world.kernel.gone(client.id());
    assert_eq!(world.kernel.sessions(), 0);
}

/// Asserts that no row of an ended session and no leaked number is left.
fn nothing_is_left(world: &World, inodes_before: u64) {
    assert_eq!(world.kernel.store.grants().unwrap(), []);
    assert_eq!(world.kernel.status().inodes_used, inodes_before);
    world.check();
}

#[test]
fn grant_leaves_no_row_when_its_session_ends_before_it_counts() {
    for ended in [true, false] {
        let world = World::new();
        let inodes = world.kernel.status().inodes_used;
        let a = world.client();
        let session = session_of(&world, &a);
        let wants = [want(ROOT, LeaseMode::Write)];
        let until_ms = world.kernel.now_ms() + 1000;
        let decision = Leasing::of(&world.kernel)
            .obtain(a.id(), &wants, until_ms)
            .unwrap();
        let written = Leasing::of(&world.kernel).write_grants(&session, &decision);
        assert_eq!(world.kernel.store.grants().unwrap().len(), 1);
        if ended {
            end(&world, &a);
        } else {
            // Sealed; its end is still to come, and removes the row.
            Teardown::of(&world.kernel).seal_session(a.id(), "a test");
        }
        let settled = Leasing::of(&world.kernel).settle_grants(&session, &decision, written);
        assert!(settled.is_ok() != ended, "{settled:?}");
        Teardown::of(&world.kernel).finish_sealed();
        nothing_is_left(&world, inodes);
    }
}

#[test]
fn grant_that_fails_leaves_no_hold_but_that_of_an_open_file() {
    for open in [false, true] {
        let world = World::new();
        let (a, b) = (world.client(), world.client());
        let (key, _) = a.alloc(1)[0];
        let session = session_of(&world, &b);
        if open {
            world.kernel.locked().holds.add(b.id(), key);
        }
        // The inode was there when the request came, and is gone when its lease is decided.
        let wants = [want(ROOT, LeaseMode::Read)];
        let until_ms = world.kernel.now_ms() + 1000;
        let mut decision = Leasing::of(&world.kernel)
            .obtain(b.id(), &wants, until_ms)
            .unwrap();
        decision.leases[0].key = key;
        let mut sessions = world.kernel.locked();
        sessions.hold_granted(b.id(), &mut decision.leases);
        drop(sessions);
        let written = Err(StoreError::NoInode(key));
        let settled = Leasing::of(&world.kernel).settle_grants(&session, &decision, written);
        assert!(settled.is_err());
        let sessions = world.kernel.locked();
        assert_eq!(sessions.holds.holders(key).any(|id| id == b.id()), open);
    }
}

#[test]
fn numbers_leave_nothing_when_their_session_ends_before_they_count() {
    for ended in [true, false] {
        let world = World::new();
        let inodes = world.kernel.status().inodes_used;
        let a = world.client();
        let session = session_of(&world, &a);
        let mut tx = world.kernel.store.begin_with_room().unwrap();
        let batch = InodeNumbers::of(&world.kernel)
            .reserve_batch(&mut tx, &session, ROOT, 4)
            .unwrap();
        tx.commit().unwrap();
        if ended {
            end(&world, &a);
        } else {
            Teardown::of(&world.kernel).seal_session(a.id(), "a test");
        }
        let settled = InodeNumbers::of(&world.kernel).settle_numbers(&session, vec![batch]);
        assert!(matches!(settled, Err(StoreError::NoSession(_))), "{settled:?}");
        Teardown::of(&world.kernel).finish_sealed();
        nothing_is_left(&world, inodes);
    }
}

#[test]
fn row_of_a_batch_does_not_come_again_when_its_session_ends_while_a_part_is_given_back() {
    let world = World::new();
    let inodes = world.kernel.status().inodes_used;
    let a = world.client();
    let (given_back, _) = a.alloc(4)[0];
    // Row changes that a release, or the end of an inode, is about to write.
    let changes = world.kernel.locked().rows.give_back_changes(a.id(), given_back);
    assert_eq!(changes.len(), 2);
    end(&world, &a);
    write_rows(Core::of(&world.kernel), &changes).unwrap();
    nothing_is_left(&world, inodes);
}

#[test]
fn part_that_a_digest_took_out_does_not_come_again_when_another_is_given_back() {
    let world = World::new();
    let a = world.client();
    let keys: Vec<_> = a.alloc(2).into_iter().map(|(key, _)| key).collect();
    let mut row = world.kernel.store.grants().unwrap()[0];
    let (given_back, other) = (row.batch & 1, row.batch & !1);
    // The release has read the row; the record with the end of the other inode commits before the release
    // writes.
    let change = world.kernel.locked().rows.end_change(a.id(), keys[0]).unwrap();
    assert_eq!(
        change,
        RowChange::Put(varve_format::session::GrantRow { batch: other, ..row })
    );
    row.batch = given_back;
    let mut tx = world.kernel.store.begin().unwrap();
    tx.grant_put(&row).unwrap();
    tx.commit().unwrap();
    write_rows(Core::of(&world.kernel), &[change]).unwrap();
    assert_eq!(world.kernel.store.grants().unwrap(), []);
}

#[test]
fn row_that_came_since_its_inode_was_digested_is_removed_and_one_of_the_record_is_not_written_again() {
    let world = World::new();
    let a = world.client();
    let (key, _) = a.alloc(1)[0];
    let row = world.kernel.store.grants().unwrap()[0];
    let freed = |rows| Applied {
        digested: vec![(a.id(), varve_format::LogSeq(0))],
        freed: vec![key],
        rows,
        ..Applied::default()
    };
    // The digest looked for rows before this one took effect.
    let changes = TakeOver::of(&world.kernel).take_over(&freed(Vec::new()));
    assert_eq!(changes, [RowChange::Remove(row.lease)]);
    world.kernel.locked().rows.insert_batch(row, &[key]);
    let changes = TakeOver::of(&world.kernel).take_over(&freed(vec![(row.lease, None)]));
    assert_eq!(changes, []);
    assert!(world.kernel.locked().rows.find(a.id(), key).is_none());
}
