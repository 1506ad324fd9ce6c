//! Shared blocks: what sharing, overwriting, freeing and moving them leaves, also when it crashes or is
//! damaged.
use super::crash::{assert_found, assert_whole, commit, file, prepared};
use super::*;
use crate::check::Finding;
use crate::repair::RepairOptions;
use crate::seeded::Bug;
use varve_format::{ExtentFlags, SharedRun};
use zerocopy::IntoBytes;

/// Shares whole files or ranges, in as many transactions as it takes.
pub(super) fn share(store: &Store, range: ShareRange) -> Result<u64> {
    store.share_extents()?;
    let (mut done, mut transactions) = (0, 0);
    while done < range.blocks {
        let mut tx = store.begin()?;
        done = tx.share(&range, done)?;
        commit(tx, store)?;
        transactions += 1;
    }
    Ok(transactions)
}

pub(super) fn whole(store: &Store, from: Ino, to: Ino) -> ShareRange {
    let size = store.get(from).unwrap().attr.size_bytes;
    ShareRange {
        from,
        from_block: FileBlock(0),
        to,
        to_block: FileBlock(0),
        blocks: size.div_ceil(BLOCK_BYTES),
        size_bytes: size,
    }
}

pub(super) fn new_file(store: &Store, name: &str) -> Result<Ino> {
    let mut tx = store.begin()?;
    let key = make(&mut tx, ROOT_INO, name, 0o100_644)?;
    commit(tx, store)?;
    Ok(key.ino)
}

/// Makes a file of single blocks with holes between, `extents` in each of eight transactions.
pub(super) fn scattered_file(store: &Store, name: &str, extents: u64) -> Ino {
    let ino = new_file(store, name).unwrap();
    for part in 0..8 {
        let mut tx = store.begin().unwrap();
        for number in part * extents..(part + 1) * extents {
            tx.write_data(ino, FileBlock(number * 2), &pattern(4096, number), true, NVM)
                .unwrap();
        }
        tx.commit().unwrap();
    }
    ino
}

pub(super) fn content(store: &Store, ino: Ino) -> Vec<u8> {
    let mut bytes = vec![0; store.get(ino).unwrap().attr.size_bytes as usize];
    assert_eq!(store.read(ino, 0, &mut bytes).unwrap(), bytes.len());
    bytes
}

pub(super) fn used(store: &Store) -> [u64; 3] {
    Tier::ALL.map(|tier| {
        let space = store.space().tiers[tier as usize];
        space.total - space.free - space.pending
    })
}

#[test]
fn clone_takes_no_data_blocks_and_its_parts_are_freed_with_their_last_owner() {
    for medium in [SimMedium::Dax, SimMedium::File] {
        let rig = prepared(medium);
        let store = &rig.store;
        for name in ["f9", "f10", "f11"] {
            let source = file(store, name);
            let before = content(store, source);
            let clone = new_file(store, &format!("clone of {name}")).unwrap();
            let blocks = used(store);
            share(store, whole(store, source, clone)).unwrap();
            let nodes = used(store)[0] - blocks[0];
            assert!(nodes <= 3 && used(store)[1..] == blocks[1..], "{nodes}");
            assert_eq!(content(store, clone), before);
            let extents = store.map(clone, FileBlock(0), 9).unwrap();
            assert!(extents.iter().all(|extent| extent.flags == ExtentFlags::SHARED));
            assert_eq!(extents, store.map(source, FileBlock(0), 9).unwrap());
            let blocks: u64 = extents.iter().map(|extent| u64::from(extent.len)).sum();
            assert_eq!(store.get(clone).unwrap().attr.sectors, blocks * 8);
            assert_clean(store);
        }
        // A part of the clone is overwritten; then the source goes, then the clone.
        let (source, clone) = (
            file(store, "f10"),
            store.dir_lookup(ROOT_INO, b"clone of f10").unwrap(),
        );
        let clone = clone.unwrap().key.ino;
        let mut expected = content(store, clone);
        let mut tx = store.begin().unwrap();
        tx.write_bytes(clone, &[(5000, &[7; 9000])], NVM).unwrap();
        tx.commit().unwrap();
        assert_eq!(content(store, source), expected);
        expected[5000..14000].fill(7);
        assert_eq!(content(store, clone), expected);
        assert_clean(store);
        let rig = rig.reopen();
        let store = &rig.store;
        let dir = store.dir_lookup(ROOT_INO, b"d").unwrap().unwrap().key.ino;
        let mut tx = store.begin().unwrap();
        assert_eq!(unlink(&mut tx, dir, "f10").unwrap(), Progress::Done);
        tx.commit().unwrap();
        assert_eq!(content(store, clone), expected);
        assert_clean(store);
        for name in ["f9", "f11"] {
            let mut tx = store.begin().unwrap();
            assert_eq!(unlink(&mut tx, dir, name).unwrap(), Progress::Done);
            assert_eq!(
                unlink(&mut tx, ROOT_INO, &format!("clone of {name}")).unwrap(),
                Progress::Done
            );
            tx.commit().unwrap();
        }
        // Numbers of the others are free by now.
        let runs = store.shared_parts(0..1 << 20, 100).unwrap();
        assert!(!runs.is_empty() && runs[0].number > 0, "{runs:?}");
        let mut tx = store.begin().unwrap();
        assert_eq!(unlink(&mut tx, ROOT_INO, "clone of f10").unwrap(), Progress::Done);
        tx.commit().unwrap();
        assert_clean(store);
        let runs = store.snapshot().reader().shared_root().unwrap();
        assert_eq!((runs.runs(), runs.node_blocks()), (0, 0));
    }
}

#[test]
fn move_of_a_run_is_seen_by_all_its_owners() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let source = file(store, "f9");
    let before = content(store, source);
    let clones: Vec<_> = (0..20)
        .map(|at| new_file(store, &format!("c{at}")).unwrap())
        .collect();
    for clone in &clones {
        share(store, whole(store, source, *clone)).unwrap();
    }
    for (index, tier) in [Tier::Hdd, Tier::Ssd, Tier::Nvm].into_iter().enumerate() {
        let at = store.map(clones[index], FileBlock(0), 1).unwrap()[0];
        let mut tx = store.begin().unwrap();
        let to = DataTarget::only(tier);
        assert!(
            tx.migrate(clones[index], at.file_block, at.len, (at.tier, at.block), to)
                .unwrap()
        );
        let record = tx.room();
        tx.commit().unwrap();
        assert!(record > 0);
        for ino in clones.iter().chain([&source]) {
            assert_eq!(content(store, *ino), before);
            assert_eq!(store.map(*ino, FileBlock(0), 1).unwrap()[0].tier, tier);
        }
        // It lies there no more.
        let mut tx = store.begin().unwrap();
        assert!(
            !tx.migrate(source, at.file_block, at.len, (at.tier, at.block), to)
                .unwrap()
        );
        drop(tx);
        assert_clean(store);
    }
}

#[test]
fn move_of_numbers_that_were_freed_meanwhile_is_none() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let source = file(store, "f9");
    let clone = new_file(store, "clone").unwrap();
    share(store, whole(store, source, clone)).unwrap();
    let parts = store
        .owned_parts(source, FileBlock(0)..FileBlock(1 << 20), 1)
        .unwrap();
    let (part, number) = (&parts[0], parts[0].number.unwrap());
    let at = store.map(source, FileBlock(0), 1).unwrap()[0];
    for ino in [source, clone] {
        let mut tx = store.begin().unwrap();
        tx.truncate(ino, 0).unwrap();
        commit(tx, store).unwrap();
    }
    let mut tx = store.begin().unwrap();
    let moved = tx.migrate_shared(
        number,
        part.blocks,
        (at.tier, at.block),
        DataTarget::only(Tier::Hdd),
    );
    assert!(!moved.unwrap());
    drop(tx);
    assert_clean(store);
}

#[test]
fn ranges_that_cannot_be_shared_are_refused_and_change_nothing() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let (one, other) = (file(store, "f9"), file(store, "f8"));
    let range = whole(store, one, other);
    let mut tx = store.begin().unwrap();
    // Before the feature is set.
    assert!(matches!(tx.share(&range, 0), Err(crate::StoreError::Invalid(_))));
    drop(tx);
    store.share_extents().unwrap();
    store.share_extents().unwrap();
    let before = dump(store);
    let dir = store.dir_lookup(ROOT_INO, b"d").unwrap().unwrap().key.ino;
    let wrong = [
        ShareRange { blocks: 0, ..range },
        ShareRange {
            to: one,
            to_block: FileBlock(3),
            ..range
        },
        ShareRange {
            from_block: FileBlock(varve_format::FILE_BLOCKS_MAX),
            ..range
        },
        ShareRange {
            size_bytes: u64::MAX,
            ..range
        },
        ShareRange { to: dir, ..range },
        ShareRange {
            from: Ino(9999),
            ..range
        },
    ];
    for range in wrong {
        let mut tx = store.begin().unwrap();
        assert!(tx.share(&range, 0).is_err(), "{range:?}");
        drop(tx);
    }
    assert_eq!(dump(store), before);
    assert_clean(store);
}

#[test]
fn clone_that_takes_several_transactions_is_not_there_until_the_last() {
    let rig = Rig::with(SimMedium::Dax, 256 << 10);
    let store = &rig.store;
    let source = scattered_file(store, "source", 200);
    let clone = new_file(store, "clone").unwrap();
    let range = whole(store, source, clone);
    store.share_extents().unwrap();
    let mut tx = store.begin().unwrap();
    let done = tx.share(&range, 0).unwrap();
    tx.commit().unwrap();
    assert!(done > 0 && done < range.blocks, "{done}");
    assert_eq!(store.get(clone).unwrap().attr.size_bytes, 0);
    assert_clean(store);
    // A crash here: the file is in the orphan list, and loses the blocks beyond its size.
    assert_eq!(store.orphans().unwrap().len(), 1);
    let rig = rig.reopen();
    let store = &rig.store;
    loop {
        let mut tx = store.begin().unwrap();
        let progress = tx.continue_free(clone, 1000).unwrap();
        tx.commit().unwrap();
        assert_clean(store);
        if progress == Progress::Done {
            break;
        }
    }
    assert_eq!(
        (
            store.map(clone, FileBlock(0), 1).unwrap().len(),
            store.orphans().unwrap().len()
        ),
        (0, 0)
    );
    assert!(share(store, range).unwrap() > 1);
    assert_eq!(content(store, clone), content(store, source));
    assert_eq!(store.orphans().unwrap(), []);
    assert_clean(store);
}

/// Clones, overwrites and frees in turn, with tail moves between.
fn share_and_change(store: &Store) -> Result<()> {
    let dir = store.dir_lookup(ROOT_INO, b"d")?.unwrap().key.ino;
    for (round, name) in ["f4", "f5", "f6"].into_iter().enumerate() {
        let (seed, clone) = (round as u64, format!("clone {round}"));
        let ino = new_file(store, &clone)?;
        share(store, whole(store, file(store, name), ino))?;
        let mut tx = store.begin()?;
        tx.write_bytes(ino, &[(4096, &pattern(3000, seed))], NVM)?;
        tx.write_bytes(
            file(store, name),
            &[(9000, &pattern(5000, seed))],
            [NVM, SSD, HDD][round],
        )?;
        commit(tx, store)?;
        let at = store.map(ino, FileBlock(0), 1)?[0];
        let mut tx = store.begin()?;
        let to = DataTarget::only([Tier::Ssd, Tier::Hdd, Tier::Nvm][round]);
        assert!(tx.migrate(ino, at.file_block, at.len, (at.tier, at.block), to)?);
        commit(tx, store)?;
        let mut tx = store.begin()?;
        unlink(&mut tx, dir, name)?;
        commit(tx, store)?;
        store.checkpoint()?;
        // Freed space is used again.
        let mut tx = store.begin()?;
        tx.write_bytes(
            file(store, "f7"),
            &[(0, &pattern(20_000, 90 + seed))],
            [SSD, HDD, NVM][round],
        )?;
        commit(tx, store)?;
    }
    Ok(())
}

#[test]
fn shares_that_are_made_changed_and_freed_are_whole_when_they_crash() {
    assert_whole(
        [(SimMedium::Dax, 2, 1), (SimMedium::File, 1, 2)],
        share_and_change,
    );
}

#[test]
fn share_that_is_not_counted_is_found() {
    assert_found(Bug::ShareNotCounted, SimMedium::Dax, share_once, 8);
}

/// One share, and nothing that a wrong count would stop.
fn share_once(store: &Store) -> Result<()> {
    let ino = new_file(store, "clone")?;
    share(store, whole(store, file(store, "f4"), ino)).map(drop)
}

/// A share of which one owner goes.
fn share_and_release(store: &Store) -> Result<()> {
    share_once(store)?;
    let mut tx = store.begin()?;
    unlink(&mut tx, ROOT_INO, "clone")?;
    commit(tx, store)
}

#[test]
fn run_that_is_freed_while_a_file_names_it_is_found() {
    assert_found(Bug::SharedFreedEarly, SimMedium::Dax, share_and_release, 8);
}

#[test]
fn reference_that_is_not_released_is_found() {
    assert_found(Bug::SharedNotReleased, SimMedium::Dax, share_and_release, 8);
}

#[test]
fn counts_before_or_after_their_extents_are_found() {
    assert_found(Bug::CountBeforeExtents, SimMedium::Dax, share_and_release, 1);
    assert_found(Bug::ExtentsBeforeCount, SimMedium::Dax, share_and_release, 1);
}

/// A pool in which two files share a part with a third one each.
fn damaged(damage: impl FnOnce(&mut Tx<'_>)) -> (SimWorld, BTreeMap<String, String>) {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    for (source, clone) in [("f9", "one"), ("f10", "two")] {
        let ino = new_file(store, clone).unwrap();
        share(store, whole(store, file(store, source), ino)).unwrap();
    }
    let before = dump(store);
    let mut tx = store.begin().unwrap();
    damage(&mut tx);
    tx.commit().unwrap();
    store.checkpoint().unwrap();
    assert_ne!(store.check().unwrap(), []);
    (rig.world, before)
}

fn repaired(world: &SimWorld) -> (Store, crate::repair::RepairReport) {
    let report = Store::repair(&devices_of(world), RepairOptions::default()).unwrap();
    assert_eq!(report.left, []);
    let store = open(world).unwrap();
    assert_clean(&store);
    (store, report)
}

fn first_runs(tx: &Tx<'_>) -> Vec<SharedRun> {
    let root = tx.core.reader().shared_root().unwrap();
    let mut runs = Vec::new();
    crate::tx::shared::SHARED
        .for_each(&tx.core, &root, 0..u64::MAX >> 1, |run| {
            runs.push(run);
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    runs
}

#[test]
fn counts_that_are_wrong_are_found_and_mended() {
    for more in [true, false] {
        let (world, before) = damaged(|tx| {
            let run = first_runs(tx)[0];
            let mut root = tx.core.reader().shared_root().unwrap();
            let numbers = run.first..run.end();
            if more {
                crate::tx::shared::SHARED
                    .reference(&mut tx.core, &mut root, numbers)
                    .unwrap();
            } else {
                crate::tx::shared::SHARED
                    .release(&mut tx.core, &mut root, numbers)
                    .unwrap();
            }
            tx.core
                .change_state(|state| state.shared.copy_from_slice(root.as_bytes()))
                .unwrap();
        });
        let found = open(&world).unwrap().check().unwrap();
        let stored = if more { 3 } else { 1 };
        assert!(
            found.iter().all(|finding| matches!(finding,
                Finding::References { stored: count, found: 2, .. } if *count == stored)),
            "{found:?}"
        );
        let (store, report) = repaired(&world);
        assert_eq!(dump(&store), before);
        assert_eq!(report.losses, [], "{report:?}");
        assert!(
            report.mended.iter().any(|what| what.contains("shared blocks")),
            "{report:?}"
        );
    }
}

#[test]
fn numbers_in_no_run_are_found_and_read_as_zeros_after_the_repair() {
    let (world, before) = damaged(|tx| {
        let run = first_runs(tx)[0];
        let mut root = tx.core.reader().shared_root().unwrap();
        for _ in 0..2 {
            crate::tx::shared::SHARED
                .release(&mut tx.core, &mut root, run.first..run.end())
                .unwrap();
        }
        tx.core
            .change_state(|state| state.shared.copy_from_slice(root.as_bytes()))
            .unwrap();
    });
    let found = open(&world).unwrap().check().unwrap();
    let no_run = |finding: &&Finding| matches!(finding, Finding::NoRun { .. });
    assert_eq!(found.iter().filter(no_run).count(), 2, "{found:?}");
    let (store, report) = repaired(&world);
    let after = dump(&store);
    let changed: Vec<_> = before
        .iter()
        .filter(|(path, text)| after.get(*path) != Some(*text))
        .collect();
    assert_eq!(changed.len(), 2, "{changed:?}");
    assert_eq!(report.losses.len(), 2, "{report:?}");
}

#[test]
fn leaf_of_the_runs_that_no_root_leads_to_is_found_again() {
    let (world, before) = damaged(|tx| {
        tx.core.change_state(|state| state.shared.fill(0)).unwrap();
    });
    let (store, report) = repaired(&world);
    assert_eq!(dump(&store), before);
    assert_eq!(report.losses, [], "{report:?}");
}

#[test]
fn runs_whose_leaf_is_lost_are_lost_for_all_their_owners_and_named() {
    let (world, before) = damaged(|tx| {
        let root = tx.core.reader().shared_root().unwrap();
        let top = root.top().unwrap().block;
        tx.core.force(top, Box::new([7; 4096]), true);
    });
    let (store, report) = repaired(&world);
    let after = dump(&store);
    let changed = before
        .iter()
        .filter(|(path, text)| after.get(*path) != Some(*text))
        .count();
    assert_eq!(changed, 4, "two sources and two clones");
    let files: std::collections::BTreeSet<_> = report.losses.iter().map(|loss| loss.ino).collect();
    assert_eq!(files.len(), 4, "{report:?}");
}

/// A copy that a crash left while the feature was set is no damage, and is written anew; a flipped bit is,
/// also in the words that the feature changes.
#[test]
fn copy_of_the_superblock_is_written_anew_only_where_a_crash_may_have_left_it() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let ino = new_file(store, "clone").unwrap();
    let devices = devices_of(&rig.world);
    let at = varve_format::superblock::SUPERBLOCK_BLOCKS[1] * BLOCK_BYTES;
    let read = || {
        let mut bytes = [0; varve_format::superblock::SUPERBLOCK_SIZE];
        devices.nvm.read(at, &mut bytes).unwrap();
        bytes
    };
    let old = read();
    share(store, whole(store, file(store, "f9"), ino)).unwrap();
    let new = read();
    let Rig { world, store } = rig;
    drop(store);
    let words: Vec<_> = (0..new.len())
        .step_by(8)
        .filter(|at| old[*at..*at + 8] != new[*at..*at + 8])
        .collect();
    assert!(words.len() >= 3, "{words:?}");
    let findings = |bytes: &[u8]| {
        devices.nvm.write(at, bytes).unwrap();
        devices.nvm.fence().unwrap();
        let found = open(&world).unwrap().check().unwrap();
        let now = read();
        devices.nvm.write(at, &new).unwrap();
        (found.len(), now == new)
    };
    for torn in 0..1_u32 << words.len() {
        let mut bytes = new;
        for (index, word) in words
            .iter()
            .enumerate()
            .filter(|(index, _)| torn >> index & 1 == 1)
        {
            assert!(index < 8);
            bytes[*word..*word + 8].copy_from_slice(&old[*word..*word + 8]);
        }
        assert_eq!(findings(&bytes), (0, true), "words {torn:b} are old");
    }
    // The lowest bit of a sequence number may be that of the write before.
    for bit in (0..new.len() * 8)
        .step_by(7)
        .filter(|bit| !words.iter().any(|word| bit / 64 == word / 8 && bit % 64 < 2))
    {
        let mut bytes = new;
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(findings(&bytes), (1, false), "bit {bit}");
    }
}

/// Several shares in one record, where the target of one is the source of the next, with a write and the end
/// of an owner behind them.
fn share_several_at_once(store: &Store) -> Result<()> {
    store.share_extents()?;
    let names = ["one", "other", "third"];
    let files = names
        .map(|name| new_file(store, name))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for (ino, target) in files.iter().zip([SSD, NVM, HDD]) {
        let mut tx = store.begin()?;
        tx.write_bytes(*ino, &[(0, &pattern(30_000, 5))], target)?;
        commit(tx, store)?;
    }
    let mut tx = store.begin()?;
    for pair in files.windows(2) {
        // In two parts, as equal runs with something different between them.
        for (first, blocks) in [(0, 3), (4, 4)] {
            let range = ShareRange {
                from_block: FileBlock(first),
                to_block: FileBlock(first),
                blocks,
                ..whole(store, pair[0], pair[1])
            };
            assert_eq!(tx.share(&range, 0)?, blocks);
        }
    }
    commit(tx, store)?;
    let mut tx = store.begin()?;
    tx.write_bytes(files[1], &[(5000, &[7; 9000])], NVM)?;
    commit(tx, store)?;
    let mut tx = store.begin()?;
    unlink(&mut tx, ROOT_INO, "one")?;
    commit(tx, store)
}

#[test]
fn several_shares_in_a_record_are_whole_when_they_crash() {
    assert_whole(
        [(SimMedium::Dax, 2, 1), (SimMedium::File, 2, 1)],
        share_several_at_once,
    );
}

#[test]
fn share_that_does_not_see_the_one_before_it_is_found() {
    assert_found(Bug::ShareSeesCommitted, SimMedium::Dax, share_several_at_once, 8);
}
