//! Crashes at every point of a transaction: the state is the one before or the one after, and everything
//! checks clean.
use super::*;
use crate::seeded::{Bug, arm};
use std::cell::RefCell;
use varve_format::FileBlock;
use varve_media::sim::Crash;

pub(super) type Change = fn(&Store) -> Result<()>;
type State = BTreeMap<String, String>;

thread_local! {
    /// Content of the pool after each commit of the change under test.
    static STATES: RefCell<Vec<State>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn commit(tx: Tx<'_>, store: &Store) -> Result<()> {
    tx.commit()?;
    STATES.with_borrow_mut(|states| states.push(dump(store)));
    Ok(())
}

thread_local! {
    /// A device that the pool of `prepared` does not know yet.
    pub(super) static SECOND: RefCell<Option<Arc<dyn BlockDevice>>> = const { RefCell::new(None) };
}

/// A pool with something in it.
pub(super) fn prepared(medium: SimMedium) -> Rig {
    let rig = Rig::sized(medium, 256 << 10, 4 << 20);
    // Not a part of the pool before a test adds it.
    let second = rig.world.add_block("ssd-2", 4 << 20);
    SECOND.set(Some(second as _));
    let mut tx = rig.store.begin().unwrap();
    let dir = make(&mut tx, ROOT_INO, "d", 0o040_755).unwrap();
    for i in 0..12_u64 {
        let file = make(&mut tx, dir.ino, &format!("f{i}"), 0o100_644).unwrap();
        let target = [NVM, SSD, HDD][(i % 3) as usize];
        tx.write_bytes(file.ino, &[(0, &pattern(5000 + 3000 * i as usize, i))], target)
            .unwrap();
        tx.xattr_set(file.ino, b"user.x", &pattern(100, i)).unwrap();
    }
    tx.commit().unwrap();
    rig
}

pub(super) fn file(store: &Store, name: &str) -> Ino {
    let dir = store.dir_lookup(ROOT_INO, b"d").unwrap().unwrap().key.ino;
    store.dir_lookup(dir, name.as_bytes()).unwrap().unwrap().key.ino
}

fn create_and_write(store: &Store) -> Result<()> {
    let mut tx = store.begin()?;
    let key = make(&mut tx, ROOT_INO, "new", 0o100_644)?;
    tx.write_bytes(key.ino, &[(100, &pattern(9000, 77))], NVM)?;
    tx.xattr_set(key.ino, b"user.long", &pattern(9000, 5))?;
    commit(tx, store)
}

fn overwrite_across_units(store: &Store) -> Result<()> {
    let ino = file(store, "f1");
    let mut tx = store.begin()?;
    tx.write_bytes(ino, &[(1000, &pattern(4096 * 70, 3))], SSD)?;
    commit(tx, store)
}

fn rename_over(store: &Store) -> Result<()> {
    let dir = store.dir_lookup(ROOT_INO, b"d")?.unwrap().key.ino;
    let mut tx = store.begin()?;
    let moved = tx.dir_remove(dir, b"f2")?;
    let victim = tx.dir_replace(dir, b"f3", moved.key, moved.kind)?;
    tx.edit(victim.key.ino, |attr| attr.nlink = 0)?;
    tx.continue_free(victim.key.ino, 1000)?;
    commit(tx, store)
}

fn truncate_and_migrate(store: &Store) -> Result<()> {
    let (a, b) = (file(store, "f5"), file(store, "f6"));
    let old = store.map(b, FileBlock(0), 1)?[0];
    let mut tx = store.begin()?;
    tx.truncate(a, 4097)?;
    assert!(tx.migrate(
        b,
        old.file_block,
        old.len,
        (old.tier, old.block),
        DataTarget::only(Tier::Hdd)
    )?);
    commit(tx, store)
}

/// Several transactions that reuse what earlier ones freed, with tail moves between.
fn churn(store: &Store) -> Result<()> {
    for round in 0..3_u64 {
        let ino = file(store, "f4");
        let mut tx = store.begin()?;
        tx.write_bytes(ino, &[(0, &pattern(30_000, 50 + round))], NVM)?;
        commit(tx, store)?;
        let mut tx = store.begin()?;
        let name = format!("x{round}");
        let key = make(&mut tx, ROOT_INO, &name, 0o040_755)?;
        make(&mut tx, key.ino, "inner", 0o100_644)?;
        commit(tx, store)?;
        store.checkpoint()?;
        let mut tx = store.begin()?;
        unlink(&mut tx, key.ino, "inner")?;
        unlink(&mut tx, ROOT_INO, &name)?;
        commit(tx, store)?;
    }
    Ok(())
}

/// Metadata goes to slower tiers and comes back, again and again, with tail moves between.
fn cool_and_change(store: &Store) -> Result<()> {
    for round in 0..3_u64 {
        store.demote([u64::MAX, 5, u64::MAX][round as usize])?;
        let ino = file(store, &format!("f{}", 4 + round));
        let mut tx = store.begin()?;
        tx.write_bytes(ino, &[(0, &pattern(30_000, 50 + round))], NVM)?;
        tx.xattr_set(ino, b"user.long", &pattern(9000, round))?;
        commit(tx, store)?;
        let mut tx = store.begin()?;
        let dir = tx.dir_lookup(ROOT_INO, b"d")?.unwrap().key.ino;
        unlink(&mut tx, dir, &format!("f{round}"))?;
        make_link(
            &mut tx,
            dir,
            &format!("l{round}"),
            0o120_777,
            &pattern(2000, round),
        )?;
        commit(tx, store)?;
        if round == 1 {
            store.checkpoint()?;
        }
    }
    store.demote(u64::MAX).map(drop)
}

pub(super) struct Tally {
    pub(super) images: usize,
    pub(super) bad: Vec<String>,
    before: usize,
    after: usize,
}

/// Runs `change`, crashes it everywhere, opens what is left.
fn crash_everywhere(medium: SimMedium, seeds: u64, step: usize, bug: Option<Bug>, change: Change) -> Tally {
    let rig = prepared(medium);
    let before = dump(&rig.store);
    STATES.with_borrow_mut(Vec::clear);
    arm(bug);
    let (recording, result) = rig.world.record(|| change(&rig.store));
    arm(None);
    result.unwrap();
    let after = dump(&rig.store);
    let mut tally = Tally {
        images: 0,
        bad: Vec::new(),
        before: 0,
        after: 0,
    };
    let between = STATES.take();
    let mut seen = std::collections::HashSet::new();
    let points = recording.points();
    for point in points.iter().step_by(step).chain(points.last()) {
        if bug.is_some() && !tally.bad.is_empty() {
            break;
        }
        let mut crashes = vec![Crash::Kill, Crash::PowerNone, Crash::PowerAll];
        crashes.extend((0..seeds).map(|seed| Crash::PowerSeeded(seed * 7919 + point.index as u64)));
        for crash in crashes {
            let image = recording.image(point.index, crash);
            if !seen.insert(image.content_hash()) {
                continue;
            }
            tally.images += 1;
            let world = image.into_world();
            let fault = match judge(&world) {
                Ok(found) if found == before => {
                    tally.before += 1;
                    None
                }
                Ok(found) if found == after => {
                    tally.after += 1;
                    None
                }
                Ok(found) if between.contains(&found) => None,
                Ok(_) => Some("neither before nor after".to_owned()),
                Err(fault) => Some(fault),
            };
            if let Some(fault) = fault {
                tally
                    .bad
                    .push(format!("point {} {crash:?}: {fault}", point.index));
            }
        }
    }
    tally
}

/// Opens a crash image, checks it, and does one more transaction on it.
fn judge(world: &SimWorld) -> std::result::Result<State, String> {
    let store = open(world).map_err(|error| error.to_string())?;
    let findings = [
        store.check().map_err(|error| error.to_string())?,
        store.check_data().map_err(|error| error.to_string())?,
    ]
    .concat();
    if !findings.is_empty() {
        return Err(format!("{findings:?}"));
    }
    let found = dump(&store);
    let mut tx = store.begin().map_err(|error| error.to_string())?;
    make(&mut tx, ROOT_INO, "after the crash", 0o100_644).map_err(|error| error.to_string())?;
    tx.commit().map_err(|error| error.to_string())?;
    drop(store);
    let store = open(world).map_err(|error| error.to_string())?;
    match store.check() {
        Ok(findings) if findings.is_empty() => Ok(found),
        other => Err(format!("after one more transaction: {other:?}")),
    }
}

fn assert_atomic(change: Change) {
    for (medium, seeds) in [(SimMedium::Dax, 2), (SimMedium::File, 1)] {
        let tally = crash_everywhere(medium, seeds, 1, None, change);
        assert!(
            tally.bad.is_empty(),
            "{medium:?}: {:#?}",
            &tally.bad[..tally.bad.len().min(5)]
        );
        assert!(
            tally.images > 10 && tally.before > 0 && tally.after > 0,
            "{} images",
            tally.images
        );
    }
}

#[test]
fn create_is_all_or_nothing_when_it_crashes() {
    assert_atomic(create_and_write);
}

#[test]
fn overwrite_is_all_or_nothing_when_it_crashes() {
    assert_atomic(overwrite_across_units);
}

#[test]
fn rename_is_all_or_nothing_when_it_crashes() {
    assert_atomic(rename_over);
}

#[test]
fn truncate_and_migrate_are_all_or_nothing_when_they_crash() {
    assert_atomic(truncate_and_migrate);
}

#[test]
fn reuse_over_several_transactions_is_clean_when_it_crashes() {
    let tally = crash_everywhere(SimMedium::Dax, 1, 5, None, churn);
    assert!(
        tally.bad.is_empty(),
        "{:#?}",
        &tally.bad[..tally.bad.len().min(5)]
    );
    assert!(tally.images > 50);
}

#[test]
fn metadata_that_goes_and_comes_back_is_clean_when_it_crashes() {
    assert_whole([(SimMedium::Dax, 2, 2), (SimMedium::File, 1, 3)], cool_and_change);
}

#[test]
fn metadata_that_is_not_flushed_before_the_commit_is_found() {
    assert_found(Bug::NoDeviceFlush, SimMedium::Dax, cool_and_change, 8);
}

/// No crash of the change leaves damage; by medium, number of seeds and step between points.
pub(super) fn assert_whole(runs: [(SimMedium, u64, usize); 2], change: Change) {
    for (medium, seeds, step) in runs {
        let tally = crash_everywhere(medium, seeds, step, None, change);
        assert!(
            tally.bad.is_empty(),
            "{:#?}",
            &tally.bad[..tally.bad.len().min(5)]
        );
        assert!(tally.images > 100, "{} images", tally.images);
        println!("{medium:?}: {} images", tally.images);
    }
}

/// The bug is found, and without it nothing is.
pub(super) fn assert_found(bug: Bug, medium: SimMedium, change: Change, step: usize) {
    let good = crash_everywhere(medium, 1, step, None, change);
    assert!(
        good.bad.is_empty(),
        "{bug:?} not armed: {:#?}",
        &good.bad[..good.bad.len().min(3)]
    );
    let bad = crash_everywhere(medium, 1, step, Some(bug), change);
    assert!(
        !bad.bad.is_empty(),
        "{bug:?} is not found in {} images",
        bad.images
    );
}

#[test]
fn missing_sync_before_the_commit_is_found() {
    assert_found(Bug::NoSyncBeforeCommit, SimMedium::File, create_and_write, 1);
}

#[test]
fn missing_fence_after_the_record_is_found() {
    assert_found(Bug::NoFenceAfterRecord, SimMedium::File, churn, 4);
}

#[test]
fn commit_before_payload_is_found() {
    assert_found(Bug::CommitBeforePayload, SimMedium::Dax, create_and_write, 1);
}

#[test]
fn free_before_commit_is_found() {
    assert_found(Bug::FreeBeforeCommit, SimMedium::Dax, free_then_write, 4);
}

#[test]
fn reuse_before_release_is_found() {
    assert_found(Bug::ReuseBeforeRelease, SimMedium::Dax, reuse_metadata, 16);
}

#[test]
fn missing_sync_before_the_tail_moves_is_found() {
    assert_found(Bug::NoSyncBeforeTail, SimMedium::File, churn, 4);
}

#[test]
fn one_place_for_footers_is_found() {
    assert_found(Bug::OneFooter, SimMedium::Dax, fill_holes, 8);
}

/// No unit is empty: a transaction opens units with holes and seals them again.
fn fill_holes(store: &Store) -> Result<()> {
    let (keep, _) = leave_holes(store, commit)?;
    let mut tx = store.begin()?;
    tx.write_data(
        keep,
        FileBlock(50_000),
        &pattern(4096 * 200, 9),
        true,
        DataTarget::only(Tier::Ssd),
    )?;
    commit(tx, store)
}

/// Frees a file's blocks and writes others in the same transaction.
fn free_then_write(store: &Store) -> Result<()> {
    let ino = file(store, "f9");
    let mut tx = store.begin()?;
    tx.write_data(
        ino,
        FileBlock(0),
        &pattern(4096 * 300, 6),
        true,
        DataTarget::only(Tier::Nvm),
    )?;
    commit(tx, store)?;
    let mut tx = store.begin()?;
    tx.truncate(ino, 0)?;
    // All of the free NVM, so that freed blocks, if they can be had, are taken.
    let key = make(&mut tx, ROOT_INO, "filler", 0o100_644)?;
    let mut at = 0;
    while tx.room() > crate::OP_ROOM {
        let free = store.space().tiers[0].free;
        let keep = store.space().tiers[0].total / 16 + store.space().tiers[0].total / 64;
        if free <= keep + 1 {
            break;
        }
        let blocks = (free - keep).min(64);
        tx.write_data(
            key.ino,
            FileBlock(at),
            &pattern(4096 * blocks as usize, at),
            true,
            DataTarget::only(Tier::Nvm),
        )?;
        at += blocks;
    }
    commit(tx, store)
}

/// A directory block is freed and the next transactions write data all over the free space while its records
/// are in the journal.
fn reuse_metadata(store: &Store) -> Result<()> {
    let mut tx = store.begin()?;
    let dir = make(&mut tx, ROOT_INO, "gone", 0o040_755)?;
    make(&mut tx, dir.ino, "a", 0o100_644)?;
    commit(tx, store)?;
    let mut tx = store.begin()?;
    make(&mut tx, dir.ino, "b", 0o100_644)?;
    commit(tx, store)?;
    let mut tx = store.begin()?;
    unlink(&mut tx, dir.ino, "a")?;
    unlink(&mut tx, dir.ino, "b")?;
    unlink(&mut tx, ROOT_INO, "gone")?;
    commit(tx, store)?;
    free_then_write(store)?;
    // Data leaves a share to metadata: that takes the rest.
    let mut tx = store.begin()?;
    tx.use_reserve();
    for i in 0.. {
        match store.space().tiers[0].free {
            0..=3 => break,
            4..=20 => drop(make_link(
                &mut tx,
                ROOT_INO,
                &format!("l{i}"),
                0o120_777,
                &pattern(3000, i),
            )?),
            _ => {
                let key = make(&mut tx, ROOT_INO, &format!("l{i}"), 0o100_644)?;
                tx.xattr_set(key.ino, b"user.x", &pattern(60_000, i))?;
            }
        }
    }
    commit(tx, store)
}

#[test]
fn damage_in_the_middle_of_the_journal_is_reported() {
    let rig = prepared(SimMedium::Dax);
    for i in 0..3 {
        let mut tx = rig.store.begin().unwrap();
        make(&mut tx, ROOT_INO, &format!("n{i}"), 0o100_644).unwrap();
        tx.commit().unwrap();
    }
    let newest = rig.store.newest_tx();
    drop(rig.store);
    let devices = devices_of(&rig.world);
    // A byte of the payload of the first of the three records.
    let mut at = varve_format::journal::RING_START;
    let mut offsets = Vec::new();
    while at < devices.journal.len_bytes() {
        let mut bytes = [0; 64];
        devices.journal.read(at, &mut bytes).unwrap();
        if bytes[..8] == varve_format::journal::RecordHeader::MAGIC {
            offsets.push(at);
        }
        at += 512;
    }
    let hurt = offsets[offsets.len() - 3] + 80;
    let mut byte = [0];
    devices.journal.read(hurt, &mut byte).unwrap();
    devices.journal.write(hurt, &[byte[0] ^ 1]).unwrap();
    let error = open(&rig.world).err().unwrap();
    assert!(
        matches!(error, crate::StoreError::JournalDamaged { tx, .. } if tx.0 == newest.0 - 2),
        "{error}"
    );
    let options = OpenOptions {
        accept_journal_damage: true,
        ..OpenOptions::default()
    };
    let (store, report) = Store::open(devices, options).unwrap();
    assert!(report.damage.is_some());
    assert_eq!(store.newest_tx(), newest);
    // The changes of the damaged record were in place (nothing was lost but the record): with the later
    // records the pool is whole.
    assert!(store.dir_lookup(ROOT_INO, b"n0").unwrap().is_some());
    assert!(store.dir_lookup(ROOT_INO, b"n2").unwrap().is_some());
    assert_clean(&store);
    drop(store);
    assert!(open(&rig.world).is_ok());
}

/// Data in all of the NVM that may have data.
fn fill(store: &Store) -> Result<()> {
    let mut tx = store.begin()?;
    let full = make(&mut tx, ROOT_INO, "full", 0o100_644)?.ino;
    tx.commit()?;
    for at in 0.. {
        let mut tx = store.begin()?;
        match tx.write_data(
            full,
            FileBlock(at),
            &pattern(4096, at),
            true,
            DataTarget::only(Tier::Nvm),
        ) {
            Ok(()) => tx.commit()?,
            Err(crate::StoreError::NoSpace { .. }) => break,
            Err(error) => return Err(error),
        };
    }
    Ok(())
}

#[test]
fn either_copy_of_the_journals_header_is_enough_when_the_other_is_damaged() {
    for (hurt, offset) in varve_format::journal::HEADER_OFFSETS.into_iter().enumerate() {
        let rig = prepared(SimMedium::Dax);
        rig.store.checkpoint().unwrap();
        let store = &rig.store;
        // A directory's block is changed and freed, by records of which the tail is past when data comes
        // there.
        let mut tx = store.begin().unwrap();
        let dir = make(&mut tx, ROOT_INO, "gone", 0o040_755).unwrap();
        make(&mut tx, dir.ino, "a", 0o100_644).unwrap();
        tx.commit().unwrap();
        let mut tx = store.begin().unwrap();
        make(&mut tx, dir.ino, "b", 0o100_644).unwrap();
        tx.commit().unwrap();
        let mut tx = store.begin().unwrap();
        unlink(&mut tx, dir.ino, "a").unwrap();
        unlink(&mut tx, dir.ino, "b").unwrap();
        unlink(&mut tx, ROOT_INO, "gone").unwrap();
        tx.commit().unwrap();
        store.checkpoint().unwrap();
        fill(store).unwrap();
        let after = dump(&rig.store);
        drop(rig.store);
        let journal = devices_of(&rig.world).journal;
        let mut byte = [0];
        journal.read(offset + 32, &mut byte).unwrap();
        journal.write(offset + 32, &[byte[0] ^ 1]).unwrap();
        let store = open(&rig.world).unwrap();
        assert_eq!(dump(&store), after, "copy {hurt}");
        assert_clean(&store);
        drop(store);
        // The copy is renewed at the start.
        assert_eq!(
            crate::journal::Journal::bad_headers(&journal).unwrap(),
            [0_u64; 0]
        );
    }
}

#[test]
fn recovery_can_crash_too() {
    let rig = prepared(SimMedium::Dax);
    let (recording, result) = rig.world.record(|| create_and_write(&rig.store));
    result.unwrap();
    let after = dump(&rig.store);
    let crashed = recording
        .image(recording.events_len(), Crash::PowerNone)
        .into_world();
    let (recovery, opened) = crashed.record(|| open(&crashed).map(drop));
    opened.unwrap();
    let mut tried = 0;
    for point in recovery.points() {
        for crash in [
            Crash::Kill,
            Crash::PowerNone,
            Crash::PowerSeeded(point.index as u64),
        ] {
            assert_eq!(
                judge(&recovery.image(point.index, crash).into_world()).as_ref(),
                Ok(&after)
            );
            tried += 1;
        }
    }
    assert!(tried > 10);
}
