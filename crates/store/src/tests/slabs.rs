//! Slabs: what a session finds in its own and nobody in another's, space, each point of a crash, damage.
use super::crash::{assert_found, assert_whole};
use super::*;
use crate::check::Finding;
use crate::repair::RepairOptions;
use crate::seeded::Bug;
use crate::{SessionRow, SessionState, SlabRow, StoreError};
use varve_format::session::GRANT_ROW_SIZE;
use varve_format::{BLOCK_SIZE, LastForwarded, LeaseNo, LogSeq, SessionId};

const BLOCKS: u32 = 8;
const BYTES: usize = BLOCKS as usize * BLOCK_SIZE;
const ALL: u64 = u64::MAX / 2;

type Beside = Box<dyn FnOnce()>;

thread_local! {
    /// What another thread does next, between the end of a transaction and what its caller does then.
    static BESIDE: std::cell::RefCell<Option<Beside>> = const { std::cell::RefCell::new(None) };
}

/// Runs it, once.
pub(crate) fn beside() {
    let beside = BESIDE.take();
    if let Some(beside) = beside {
        beside();
    }
}

fn session(store: &Store, id: u64) -> Result<SessionId> {
    let row = SessionRow {
        id: SessionId(id),
        uid: 1000 + id as u32,
        pid: 7,
        pid_start: 8,
        token: u128::from(id),
        state: SessionState::Live,
        digested: LogSeq(0),
        last_forwarded: LastForwarded::default(),
        log_bytes: 0,
        created_ns: 0,
        flags: 0,
    };
    let mut tx = store.begin()?;
    tx.session_put(&row)?;
    super::crash::commit(tx, store)?;
    Ok(row.id)
}

fn end(store: &Store, id: SessionId) -> Result<()> {
    let mut tx = store.begin()?;
    tx.session_remove(id)?;
    super::crash::commit(tx, store)
}

fn grant(store: &Store, id: SessionId, tier: Tier) -> Result<LeaseNo> {
    let lease = store.grant_slab(id, tier, BLOCKS, ALL)?;
    super::crash::note(store);
    Ok(lease)
}

/// What a session writes: the third goes on with the work of the second.
fn byte_of(id: SessionId) -> u8 {
    if id.0 == 3 { 2 } else { id.0 as u8 }
}

/// Fills a slab with its session's bytes.
fn fill(store: &Store, id: SessionId, lease: LeaseNo) -> Result<()> {
    store.write_slab(id, lease, 0, &vec![byte_of(id); BYTES])
}

/// What a session finds in a slab that neither it wrote nor is zero, if anything.
pub(super) fn leak(store: &Store) -> Option<String> {
    store.slabs().into_iter().find_map(|row| {
        let mut bytes = vec![0; row.blocks as usize * BLOCK_SIZE];
        store.read_slab(row.session, row.lease, 0, &mut bytes).unwrap();
        let at = bytes
            .iter()
            .position(|byte| *byte != 0 && *byte != byte_of(row.session))?;
        Some(format!("{row:?}: byte {at} is {}", bytes[at]))
    })
}

fn with_slabs() -> (Rig, SessionId) {
    let rig = Rig::new();
    rig.store.use_slabs().unwrap();
    let id = session(&rig.store, 1).unwrap();
    (rig, id)
}

#[test]
fn slab_is_zeros_and_then_holds_what_its_session_writes() {
    for tier in Tier::ALL {
        let (mut rig, id) = with_slabs();
        let lease = grant(&rig.store, id, tier).unwrap();
        let mut bytes = vec![1; BYTES];
        rig.store.read_slab(id, lease, 0, &mut bytes).unwrap();
        assert_eq!(bytes, vec![0; BYTES]);
        let written = pattern(2 * BLOCK_SIZE, 5);
        rig.store.write_slab(id, lease, 4096, &written).unwrap();
        assert_clean(&rig.store);
        rig = rig.reopen();
        rig.store.read_slab(id, lease, 0, &mut bytes).unwrap();
        assert_eq!(bytes[4096..4096 + written.len()], written);
        assert_eq!(rig.store.slabs_of(id).len(), 1);
        assert_eq!(rig.store.grants().unwrap(), []);
        end(&rig.store, id).unwrap();
        assert_eq!(rig.store.slabs(), []);
        assert_clean(&rig.reopen().store);
    }
}

#[test]
fn slab_is_its_sessions_alone_and_only_while_it_has_it() {
    let (rig, id) = with_slabs();
    let store = &rig.store;
    let other = session(store, 2).unwrap();
    for tier in Tier::ALL {
        let lease = grant(store, id, tier).unwrap();
        let mut bytes = vec![0; BLOCK_SIZE];
        let strange =
            |result: Result<()>| assert!(matches!(result, Err(StoreError::NoGrant(_))), "{result:?}");
        strange(store.read_slab(other, lease, 0, &mut bytes));
        strange(store.write_slab(other, lease, 0, &bytes));
        strange(store.free_slabs(other, &[lease]));
        assert_eq!(store.pass_slabs(other, id).unwrap(), []);
        strange(store.read_slab(id, LeaseNo(lease.0 + 1), 0, &mut bytes));
        for (at, len) in [
            (1, BLOCK_SIZE),
            (0, 100),
            (BYTES as u64, BLOCK_SIZE),
            (u64::MAX - 4095, BLOCK_SIZE),
        ] {
            let result = store.read_slab(id, lease, at, &mut vec![0; len]);
            assert!(
                matches!(result, Err(StoreError::Invalid(_))),
                "{at} {len}: {result:?}"
            );
        }
        fill(store, id, lease).unwrap();
        assert_eq!(store.pass_slabs(id, other).unwrap(), [lease]);
        strange(store.read_slab(id, lease, 0, &mut bytes));
        strange(store.free_slabs(id, &[lease]));
        store.read_slab(other, lease, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [1; BLOCK_SIZE]);
        store.free_slabs(other, &[lease]).unwrap();
        strange(store.read_slab(other, lease, 0, &mut bytes));
        strange(store.free_slabs(other, &[lease]));
    }
    let lease = store.grant_slab(SessionId(9), Tier::Nvm, BLOCKS, ALL);
    assert!(matches!(lease, Err(StoreError::NoSession(_))), "{lease:?}");
    assert_clean(store);
}

#[test]
fn slab_of_others_blocks_is_zeros() {
    for tier in Tier::ALL {
        let (rig, id) = with_slabs();
        let other = session(&rig.store, 2).unwrap();
        for _ in 0..3 {
            let mut old = Vec::new();
            while let Ok(lease) = grant(&rig.store, id, tier) {
                fill(&rig.store, id, lease).unwrap();
                old.push(lease);
            }
            assert!(old.len() > 20, "{}", old.len());
            rig.store.free_slabs(id, &old).unwrap();
            rig.store.checkpoint().unwrap();
            let lease = grant(&rig.store, other, tier).unwrap();
            assert_eq!(leak(&rig.store), None);
            rig.store.free_slabs(other, &[lease]).unwrap();
        }
        assert_eq!(rig.store.slab_use(), [crate::SlabUse::default(); 3]);
        assert_clean(&rig.reopen().store);
    }
}

#[test]
fn units_of_slabs_are_no_room_for_files_and_come_back() {
    let (rig, id) = with_slabs();
    let store = &rig.store;
    let before = store.space();
    let first = grant(store, id, Tier::Ssd).unwrap();
    let second = grant(store, id, Tier::Ssd).unwrap();
    let taken = store.slab_use()[Tier::Ssd as usize];
    assert_eq!((taken.slabs, taken.blocks, taken.taken), (2, 16, 62));
    assert_eq!(store.space().available, before.available - 62);
    store.free_slabs(id, &[first]).unwrap();
    assert_eq!(store.slab_use()[Tier::Ssd as usize].taken, 62);
    // The place of the first one is taken again.
    let third = grant(store, id, Tier::Ssd).unwrap();
    assert_eq!(store.slab_use()[Tier::Ssd as usize].taken, 62);
    store.free_slabs(id, &[second, third]).unwrap();
    assert_eq!(store.space().available, before.available);
    let mut tx = store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_bytes(file, &[(0, &pattern(100_000, 1))], SSD).unwrap();
    tx.commit().unwrap();
    assert_clean(&rig.reopen().store);
}

#[test]
fn slabs_take_no_more_than_their_share_and_nothing_that_is_promised() {
    let (rig, id) = with_slabs();
    let store = &rig.store;
    let none = |tier, most| {
        let result = store.grant_slab(id, tier, BLOCKS, most);
        assert!(result.as_ref().is_err_and(StoreError::is_no_space), "{result:?}");
    };
    for tier in Tier::ALL {
        none(tier, 7);
    }
    none(Tier::Ssd, 61);
    store.grant_slab(id, Tier::Nvm, BLOCKS, 8).unwrap();
    none(Tier::Nvm, 15);
    store.reserve(store.space().available).unwrap();
    for tier in Tier::ALL {
        none(tier, ALL);
    }
    store.unreserve(u64::MAX);
    store.start_evacuation(Tier::Ssd, 0).unwrap();
    none(Tier::Ssd, ALL);
    store.grant_slab(id, Tier::Hdd, BLOCKS, ALL).unwrap();
    // A unit does not hold so many.
    let long = store.grant_slab(id, Tier::Hdd, 200, ALL);
    assert!(long.as_ref().is_err_and(StoreError::is_no_space), "{long:?}");
    assert_clean(store);
}

#[test]
fn transaction_that_is_given_up_leaves_slabs_as_they_were() {
    let (rig, id) = with_slabs();
    let store = &rig.store;
    let lease = grant(store, id, Tier::Ssd).unwrap();
    fill(store, id, lease).unwrap();
    let before = (store.slabs(), store.space(), store.slab_use());
    let mut tx = store.begin().unwrap();
    tx.slab_free(id, lease).unwrap();
    tx.slab_grant(id, Tier::Nvm, BLOCKS, ALL).unwrap();
    tx.slab_grant(id, Tier::Hdd, BLOCKS, ALL).unwrap();
    drop(tx);
    assert_eq!((store.slabs(), store.space(), store.slab_use()), before);
    let mut bytes = vec![0; BYTES];
    store.read_slab(id, lease, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [1; BYTES]);
    assert_clean(store);
}

/// What is served is what has a row, for its session.
fn assert_served_as_rows(store: &Store) {
    let rows = store.slabs();
    let served = store.slab_owners();
    let count = |tiers: &[crate::SlabUse; 3]| tiers.iter().map(|tier| tier.slabs).sum::<u64>();
    assert_eq!(served.values().map(count).sum::<u64>(), rows.len() as u64);
    for row in rows {
        store
            .read_slab(row.session, row.lease, 0, &mut [0; BLOCK_SIZE])
            .unwrap();
    }
}

/// Lets `beside` run after the transaction of `change`, before the store does anything else. It gives the number
/// of the slab away, and its blocks to the fourth session; the session that had it must not reach them.
fn in_the_gap(
    before: impl Fn(&Store, Tier) -> Vec<LeaseNo>,
    change: impl Fn(&Store, Tier, &[LeaseNo]) -> LeaseNo,
    beside: fn(&Store),
    owner: SessionId,
) {
    for tier in Tier::ALL {
        let (rig, _) = with_slabs();
        let world = rig.world.clone();
        let store = Arc::new(rig.store);
        for id in 2..=4 {
            session(&store, id).unwrap();
        }
        let had = before(&store, tier);
        let other = Arc::clone(&store);
        BESIDE.set(Some(Box::new(move || {
            beside(&other);
            let lease = other.grant_slab(SessionId(4), tier, BLOCKS, ALL).unwrap();
            fill(&other, SessionId(4), lease).unwrap();
        })));
        let lease = change(&store, tier, &had);
        let mut bytes = vec![0; BYTES];
        let read = store.read_slab(owner, lease, 0, &mut bytes);
        assert!(
            matches!(read, Err(StoreError::NoGrant(_))),
            "{tier:?}: {read:?}, {}",
            bytes[0]
        );
        let written = store.write_slab(owner, lease, 0, &[9; BLOCK_SIZE]);
        assert!(
            matches!(written, Err(StoreError::NoGrant(_))),
            "{tier:?}: {written:?}"
        );
        assert_served_as_rows(&store);
        assert_eq!(leak(&store), None, "{tier:?}");
        assert_clean(&store);
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(leak(&store), None, "{tier:?}");
        assert_clean(&store);
    }
}

fn free_first_of(store: &Store, id: u64) {
    let lease = store.slabs_of(SessionId(id))[0].lease;
    store.free_slabs(SessionId(id), &[lease]).unwrap();
}

#[test]
fn slab_that_is_freed_beside_its_grant_is_nobodys() {
    let change =
        |store: &Store, tier: Tier, _: &[LeaseNo]| store.grant_slab(SessionId(1), tier, BLOCKS, ALL).unwrap();
    in_the_gap(
        |_, _| Vec::new(),
        change,
        |store| free_first_of(store, 1),
        SessionId(1),
    );
}

#[test]
fn slab_whose_session_ends_beside_its_grant_is_nobodys() {
    let change =
        |store: &Store, tier: Tier, _: &[LeaseNo]| store.grant_slab(SessionId(1), tier, BLOCKS, ALL).unwrap();
    let beside = |store: &Store| end(store, SessionId(1)).unwrap();
    in_the_gap(|_, _| Vec::new(), change, beside, SessionId(1));
}

#[test]
fn slab_that_is_freed_beside_its_passing_on_is_nobodys() {
    let before = |store: &Store, tier: Tier| vec![grant(store, SessionId(1), tier).unwrap()];
    let change = |store: &Store, _: Tier, had: &[LeaseNo]| {
        store.pass_slabs(SessionId(1), SessionId(2)).unwrap();
        had[0]
    };
    in_the_gap(before, change, |store| free_first_of(store, 2), SessionId(2));
    let beside = |store: &Store| end(store, SessionId(2)).unwrap();
    in_the_gap(before, change, beside, SessionId(2));
    // On to a third.
    let beside = |store: &Store| {
        store.pass_slabs(SessionId(2), SessionId(3)).unwrap();
    };
    in_the_gap(before, change, beside, SessionId(2));
}

/// Slabs come, are written, pass on, go and come again for another session, on all media; files take freed places.
fn life(store: &Store) -> Result<()> {
    store.use_slabs()?;
    super::crash::note(store);
    let one = session(store, 1)?;
    let two = session(store, 2)?;
    for tier in Tier::ALL {
        let lease = grant(store, one, tier)?;
        let other = grant(store, one, tier)?;
        fill(store, one, lease)?;
        fill(store, one, other)?;
        store.free_slabs(one, &[lease])?;
        super::crash::note(store);
        let next = grant(store, two, tier)?;
        fill(store, two, next)?;
    }
    let kept = store.slabs_of(one);
    end(store, one)?;
    let three = session(store, 3)?;
    assert_eq!(store.pass_slabs(two, three)?.len(), 3);
    super::crash::note(store);
    assert_eq!(kept.len(), 3);
    end(store, three)?;
    let mut tx = store.begin()?;
    let file = make(&mut tx, ROOT_INO, "after", 0o100_644)?.ino;
    tx.write_bytes(file, &[(0, &pattern(200_000, 4))], SSD)?;
    super::crash::commit(tx, store)?;
    let last = session(store, 4)?;
    for tier in Tier::ALL {
        grant(store, last, tier)?;
    }
    Ok(())
}

#[test]
fn every_crash_in_the_life_of_slabs_is_whole_and_shows_nobody_anothers_bytes() {
    assert_whole([(SimMedium::Dax, 2, 1), (SimMedium::File, 1, 2)], life);
}

#[test]
fn slab_that_is_not_zeroed_is_found() {
    assert_found(Bug::SlabNotZeroed, SimMedium::Dax, life, 4);
}

#[test]
fn row_after_the_blocks_is_found() {
    assert_found(Bug::SlabRowLate, SimMedium::Dax, life, 1);
}

/// Writes a row of the grant table as damage would, with all checksums right.
fn put_raw(store: &Store, slot: u64, bytes: &[u8; GRANT_ROW_SIZE]) {
    let mut tx = store.begin().unwrap();
    tx.core.patch(store.layout.grant_row(slot), bytes).unwrap();
    tx.commit().unwrap();
}

/// Damages a pool with a slab of each tier and a file; what is found, then repaired.
fn damage(make_it: impl Fn(&Store, SlabRow, u64) -> Option<SlabRow>, said: &str) {
    for tier in Tier::ALL {
        let (rig, id) = with_slabs();
        let mut tx = rig.store.begin().unwrap();
        let file = make(&mut tx, ROOT_INO, "file", 0o100_644).unwrap().ino;
        tx.write_bytes(file, &[(0, &pattern(50_000, 3))], DataTarget::prefer(tier))
            .unwrap();
        tx.commit().unwrap();
        let kept = grant(&rig.store, id, Tier::Nvm).unwrap();
        fill(&rig.store, id, kept).unwrap();
        let lease = grant(&rig.store, id, tier).unwrap();
        let row = rig
            .store
            .slabs()
            .into_iter()
            .find(|row| row.lease == lease)
            .unwrap();
        let place = rig.store.map(file, FileBlock(0), 1).unwrap()[0].block.0;
        let Some(bad) = make_it(&rig.store, row, place) else {
            continue;
        };
        let before = dump(&rig.store)["/file/"].clone();
        put_raw(&rig.store, 40, &bad.encode().unwrap());
        let Rig { world, store } = rig;
        drop(store);
        let store = open(&world).unwrap();
        let found = store.check().unwrap();
        let is_said = |finding: &Finding| matches!(finding, Finding::Slab { what, lease, .. } if what.contains(said) && *lease == bad.lease);
        assert!(found.iter().any(is_said), "{tier:?}: {found:?}");
        let result = store.read_slab(bad.session, bad.lease, 0, &mut [0; BLOCK_SIZE]);
        assert!(
            matches!(result, Err(StoreError::NoGrant(_))),
            "served: {result:?}"
        );
        drop(store);
        let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
        assert_eq!(report.left, [], "{tier:?}: {report:?}");
        assert!(
            report.mended.iter().any(|what| what.contains("slab")),
            "{report:?}"
        );
        let store = open(&world).unwrap();
        assert_eq!(dump(&store)["/file/"], before);
        let mut bytes = vec![0; BYTES];
        store.read_slab(id, kept, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [1; BYTES], "the sound one stays");
        assert_eq!(
            store.slabs().iter().filter(|row| row.lease == bad.lease).count(),
            0
        );
        assert_clean(&store);
        // Its session ends as any other.
        end(&store, id).unwrap();
        assert_clean(&store);
    }
}

#[test]
fn row_over_free_blocks_is_found_and_mended() {
    let free = |store: &Store, row: SlabRow, _: u64| {
        let (block, lease) = match row.tier {
            Tier::Nvm => (store.layout.blocks(Tier::Nvm) - 20, LeaseNo(900)),
            // An empty unit.
            tier => (2 * store.layout.unit_blocks(tier), LeaseNo(900)),
        };
        Some(SlabRow { block, lease, ..row })
    };
    damage(
        |store, row, place| (row.tier == Tier::Nvm).then(|| free(store, row, place)).flatten(),
        "is free",
    );
    damage(
        |store, row, place| (row.tier != Tier::Nvm).then(|| free(store, row, place)).flatten(),
        "which has files",
    );
}

#[test]
fn row_over_a_files_blocks_is_found_and_mended() {
    let over = |row: SlabRow, place| SlabRow {
        block: place,
        lease: LeaseNo(900),
        ..row
    };
    damage(
        |_, row, place| (row.tier == Tier::Nvm).then(|| over(row, place)),
        "not a slab's",
    );
    damage(
        |_, row, place| (row.tier != Tier::Nvm).then(|| over(row, place)),
        "which has files",
    );
}

#[test]
fn row_over_another_slab_is_found_and_mended() {
    damage(
        |_, row, _| {
            Some(SlabRow {
                block: row.block + 2,
                blocks: 4,
                lease: LeaseNo(900),
                ..row
            })
        },
        "another slab",
    );
}

#[test]
fn rows_that_overlap_are_served_neither_now_nor_after_the_next_start() {
    for tier in Tier::ALL {
        let (rig, one) = with_slabs();
        let store = &rig.store;
        let (two, three) = (session(store, 2).unwrap(), session(store, 3).unwrap());
        // Keeps the unit.
        let kept = grant(store, three, tier).unwrap();
        fill(store, three, kept).unwrap();
        let lease = grant(store, one, tier).unwrap();
        fill(store, one, lease).unwrap();
        let row = store.slabs_of(one)[0];
        let gone = grant(store, three, tier).unwrap();
        store.free_slabs(three, &[gone]).unwrap();
        // A number before those that are granted next.
        let over = SlabRow {
            session: two,
            lease: gone,
            block: row.block + 2,
            blocks: 4,
            ..row
        };
        put_raw(store, 40, &over.encode().unwrap());
        let Rig { world, store } = rig;
        drop(store);
        let store = open(&world).unwrap();
        let found = store.check().unwrap();
        let said = |bad: LeaseNo| {
            let is = |finding: &&Finding| matches!(finding, Finding::Slab { lease, .. } if *lease == bad);
            found.iter().filter(is).count()
        };
        assert_eq!((said(lease), said(gone), said(kept)), (1, 1, 0), "{found:?}");
        assert_eq!(store.slabs_of(three).len(), 1);
        assert_eq!(store.slabs().len(), 1);
        for (id, lease) in [(one, lease), (two, gone)] {
            let read = store.read_slab(id, lease, 0, &mut [0; BLOCK_SIZE]);
            assert!(matches!(read, Err(StoreError::NoGrant(_))), "{read:?}");
        }
        // Its session goes, others come, as many as there is room for.
        end(&store, one).unwrap();
        let mut more = Vec::new();
        while more.len() < 12 {
            let Ok(lease) = store.grant_slab(three, tier, BLOCKS, ALL) else {
                break;
            };
            fill(&store, three, lease).unwrap();
            more.push(lease);
        }
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(store.slabs_of(three).len(), 1 + more.len(), "{tier:?}");
        assert_eq!(store.slabs().len(), 1 + more.len());
        assert_eq!(leak(&store), None);
        drop(store);
        let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
        assert_eq!(report.left, [], "{report:?}");
        let store = open(&world).unwrap();
        assert_eq!(store.slabs_of(three).len(), 1 + more.len(), "{tier:?}");
        assert_clean(&store);
    }
}

#[test]
fn rows_that_contradict_the_pool_go_and_free_nothing() {
    for tier in Tier::ALL {
        let (rig, id) = with_slabs();
        let kept = grant(&rig.store, id, tier).unwrap();
        fill(&rig.store, id, kept).unwrap();
        let row = rig.store.slabs()[0];
        for slot in 40..60 {
            // Free, or a unit's of files.
            let block = match tier {
                Tier::Nvm => rig.store.layout.blocks(tier) - slot,
                _ => 2 * rig.store.layout.unit_blocks(tier) + slot - 40,
            };
            let (lease, blocks) = (LeaseNo(900 + slot), 1);
            let bad = SlabRow {
                block,
                blocks,
                lease,
                ..row
            };
            put_raw(&rig.store, slot, &bad.encode().unwrap());
        }
        let before = rig.store.space();
        let Rig { world, store } = rig;
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(store.check().unwrap().len(), 20);
        store.drop_unsound_slabs().unwrap();
        assert_eq!(store.space(), before);
        assert_clean(&store);
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(
            store.slabs().iter().map(|row| row.lease).collect::<Vec<_>>(),
            [kept]
        );
        assert_eq!(leak(&store), None);
        assert_clean(&store);
    }
}

#[test]
fn row_beyond_its_tier_is_found_and_mended() {
    damage(
        |store, row, _| {
            Some(SlabRow {
                block: store.layout.blocks(row.tier) - 2,
                lease: LeaseNo(900),
                ..row
            })
        },
        "beyond",
    );
    damage(
        |_, row, _| {
            Some(SlabRow {
                blocks: u32::MAX,
                lease: LeaseNo(900),
                ..row
            })
        },
        "beyond",
    );
}

#[test]
fn row_of_no_session_is_found_and_mended() {
    for tier in Tier::ALL {
        let (rig, id) = with_slabs();
        let lease = grant(&rig.store, id, tier).unwrap();
        let row = rig.store.slabs()[0];
        let slot = rig.store.writer.lock().grants.slot(&lease).unwrap();
        put_raw(
            &rig.store,
            slot,
            &SlabRow {
                session: SessionId(77),
                ..row
            }
            .encode()
            .unwrap(),
        );
        let Rig { world, store } = rig;
        drop(store);
        let found = open(&world).unwrap().check().unwrap();
        assert!(
            matches!(&found[..], [Finding::Slab { what, .. }] if what.contains("no row")),
            "{found:?}"
        );
        let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
        assert_eq!(report.left, [], "{report:?}");
        let store = open(&world).unwrap();
        assert_eq!(store.slabs(), []);
        assert_clean(&store);
    }
}

#[test]
fn lost_rows_leave_no_block_behind_and_no_program_feeds_the_repair() {
    for tier in Tier::ALL {
        let (rig, id) = with_slabs();
        let mut tx = rig.store.begin().unwrap();
        let dir = make(&mut tx, ROOT_INO, "dir", 0o040_755).unwrap();
        for i in 0..200 {
            make(&mut tx, dir.ino, &format!("name {i}"), 0o100_644).unwrap();
        }
        tx.commit().unwrap();
        let lease = grant(&rig.store, id, tier).unwrap();
        // A copy of a block of metadata: images of the inode file, as a program that saw them could write them.
        let state = rig.store.snapshot().reader().state().unwrap();
        assert!(state.inode_blocks.get() > 2);
        let mut image = vec![0; BLOCK_SIZE];
        let extents = {
            let snapshot = rig.store.snapshot();
            let reader = snapshot.reader();
            let root = reader.inode_root().unwrap();
            reader.extents(Ino(0), &root, 0, 100, 64).unwrap()
        };
        let at = extents[0].block.0;
        rig.store.devices.nvm.read(at * BLOCK_BYTES, &mut image).unwrap();
        for index in 0..u64::from(BLOCKS) {
            rig.store
                .write_slab(id, lease, index * BLOCK_BYTES, &image)
                .unwrap();
        }
        let before = dump(&rig.store);
        let place = rig.store.layout.grant_row(0).block;
        let root = rig.store.snapshot().reader().state_block();
        let Rig { world, store } = rig;
        drop(store);
        let nvm = devices_of(&world).nvm;
        for block in [place, root] {
            let mut byte = [0];
            nvm.read(block.0 * BLOCK_BYTES + 100, &mut byte).unwrap();
            nvm.write(block.0 * BLOCK_BYTES + 100, &[byte[0] ^ 1]).unwrap();
        }
        let report = Store::repair(&devices_of(&world), RepairOptions::default()).unwrap();
        assert_eq!(report.left, [], "{tier:?}: {report:?}");
        let store = open(&world).unwrap();
        let after = dump(&store);
        for (path, what) in before.iter().filter(|(path, _)| path.starts_with('/')) {
            assert_eq!(after.get(path), Some(what), "{path}");
        }
        assert_eq!(store.slabs(), []);
        assert_clean(&store);
    }
}
