//! Undoing shares: bytes, counts and space before and after, with clones inside of one file, at a lack of
//! space, and at every point at which it may crash.
use super::crash::{assert_found, assert_whole, commit, file, prepared};
use super::shared::{content, new_file, scattered_file, share, used, whole};
use super::*;
use crate::seeded::Bug;
use crate::{StoreError, Unshared};

/// Undoes all shares of a file, in as many transactions as it takes; the sums.
fn unshare(store: &Store, ino: Ino) -> Result<Unshared> {
    unshare_by(store, ino, |tx, ino, range| tx.unshare(ino, range))
}

/// As [`unshare`], with its pieces joined.
fn unshare_joined(store: &Store, ino: Ino) -> Result<Unshared> {
    unshare_by(store, ino, |tx, ino, range| tx.unshare_joined(ino, range))
}

fn unshare_by(
    store: &Store,
    ino: Ino,
    by: impl Fn(&mut Tx<'_>, Ino, std::ops::Range<FileBlock>) -> Result<Unshared>,
) -> Result<Unshared> {
    let end = FileBlock(store.get(ino)?.attr.size_bytes.div_ceil(BLOCK_BYTES));
    let mut sum = Unshared {
        next: FileBlock(0),
        copied: 0,
        kept: 0,
    };
    while sum.next < end {
        let mut tx = store.begin()?;
        let done = by(&mut tx, ino, sum.next..end)?;
        commit(tx, store)?;
        sum = Unshared {
            next: done.next,
            copied: sum.copied + done.copied,
            kept: sum.kept + done.kept,
        };
    }
    Ok(sum)
}

/// Parts of a file: first block, blocks, owners.
fn owners(store: &Store, ino: Ino) -> Vec<(u64, u32, u32)> {
    let all = FileBlock(0)..FileBlock(1 << 20);
    let parts = store.owned_parts(ino, all, 1000).unwrap();
    parts
        .iter()
        .map(|part| (part.file_block.0, part.blocks, part.owners))
        .collect()
}

fn blocks(store: &Store, ino: Ino) -> u64 {
    owners(store, ino).iter().map(|(_, len, _)| u64::from(*len)).sum()
}

#[test]
fn undo_copies_for_all_owners_but_the_last_which_keeps_the_blocks() {
    for medium in [SimMedium::Dax, SimMedium::File] {
        let rig = prepared(medium);
        let store = &rig.store;
        for name in ["f9", "f10", "f11"] {
            let source = file(store, name);
            let (before, attr) = (content(store, source), store.get(source).unwrap().attr);
            let space = used(store);
            let clones: Vec<_> = (0..3)
                .map(|at| new_file(store, &format!("{name} {at}")).unwrap())
                .collect();
            for clone in &clones {
                share(store, whole(store, source, *clone)).unwrap();
            }
            let len = blocks(store, source);
            assert!(owners(store, source).iter().all(|(_, _, owners)| *owners == 4));
            let tier = store.map(source, FileBlock(0), 1).unwrap()[0].tier;
            for (at, clone) in clones.iter().enumerate() {
                let attr = store.get(*clone).unwrap().attr;
                let done = unshare(store, *clone).unwrap();
                assert_eq!((done.copied, done.kept), (len, 0));
                assert_eq!(store.get(*clone).unwrap().attr, attr);
                assert_eq!(content(store, *clone), before);
                assert!(owners(store, *clone).iter().all(|(_, _, owners)| *owners == 1));
                assert_eq!(store.map(*clone, FileBlock(0), 1).unwrap()[0].tier, tier);
                let left = 3 - at as u32;
                assert!(owners(store, source).iter().all(|(_, _, owners)| *owners == left));
                assert_clean(store);
                // Again: nothing is left to do.
                let again = unshare(store, *clone).unwrap();
                assert_eq!((again.copied, again.kept), (0, 0));
            }
            // The last owner: no block is copied, and none moves.
            let place = store.map(source, FileBlock(0), 1).unwrap()[0].block;
            let done = unshare(store, source).unwrap();
            assert_eq!((done.copied, done.kept), (0, len));
            assert_eq!(store.map(source, FileBlock(0), 1).unwrap()[0].block, place);
            assert_eq!(
                (content(store, source), store.get(source).unwrap().attr),
                (before, attr)
            );
            assert_clean(store);
            let runs = store.snapshot().reader().shared_root().unwrap();
            assert_eq!((runs.runs(), runs.node_blocks()), (0, 0));
            let now = used(store);
            let grown: u64 = now.iter().zip(space).map(|(now, then)| now - then).sum();
            assert!(grown >= 3 * len && grown <= 3 * len + 6, "{grown} of {}", 3 * len);
        }
        assert_eq!(store.check_data().unwrap(), []);
        let rig = rig.reopen();
        assert_clean(&rig.store);
    }
}

#[test]
fn clones_inside_of_one_file_are_counted_and_undone_one_by_one() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let ino = new_file(store, "one").unwrap();
    let mut tx = store.begin().unwrap();
    tx.write_bytes(ino, &[(0, &pattern(4 * 4096, 5))], SSD).unwrap();
    tx.commit().unwrap();
    // Blocks 0..4 again at 10, and at 20 the last two of them.
    for (from, to, blocks) in [(0, 10, 4), (12, 20, 2)] {
        let range = ShareRange {
            from: ino,
            from_block: FileBlock(from),
            to: ino,
            to_block: FileBlock(to),
            blocks,
            size_bytes: (to + blocks) * BLOCK_BYTES,
        };
        share(store, range).unwrap();
    }
    let before = content(store, ino);
    assert_eq!(
        owners(store, ino),
        [(0, 2, 2), (2, 2, 3), (10, 2, 2), (12, 2, 3), (20, 2, 3)]
    );
    assert_clean(store);
    // A part in the middle, cut across two runs.
    let mut tx = store.begin().unwrap();
    let done = tx.unshare(ino, FileBlock(11)..FileBlock(13)).unwrap();
    tx.commit().unwrap();
    assert_eq!((done.copied, done.kept), (2, 0));
    assert_clean(store);
    assert_eq!(content(store, ino), before);
    let done = unshare(store, ino).unwrap();
    assert_eq!((done.copied, done.kept), (4, 4));
    assert_eq!(content(store, ino), before);
    assert!(owners(store, ino).iter().all(|(_, _, owners)| *owners == 1));
    assert_clean(store);
}

#[test]
fn undo_that_finds_no_space_loses_nothing_and_goes_on_when_there_is_some() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let source = file(store, "f9");
    let clone = new_file(store, "clone").unwrap();
    share(store, whole(store, source, clone)).unwrap();
    let before = content(store, clone);
    // All that is left goes to another file.
    let full = new_file(store, "full").unwrap();
    let mut at = 0;
    for tier in [HDD, SSD, NVM] {
        for step in [256, 16, 1] {
            loop {
                let mut tx = store.begin().unwrap();
                let bytes = vec![7; step * 4096];
                if tx.write_data(full, FileBlock(at), &bytes, true, tier).is_err() {
                    break;
                }
                at += step as u64;
                tx.commit().unwrap();
            }
        }
    }
    let refused = unshare(store, clone);
    assert!(matches!(refused, Err(StoreError::NoSpace { .. })), "{refused:?}");
    assert_eq!(
        (content(store, clone), content(store, source)),
        (before.clone(), before.clone())
    );
    assert_clean(store);
    let mut tx = store.begin().unwrap();
    assert_eq!(unlink(&mut tx, ROOT_INO, "full").unwrap(), Progress::Done);
    tx.commit().unwrap();
    unshare(store, clone).unwrap();
    assert_eq!(content(store, clone), before);
    assert!(owners(store, clone).iter().all(|(_, _, owners)| *owners == 1));
    assert_clean(store);
}

#[test]
fn undo_of_many_extents_takes_several_transactions_each_whole() {
    let rig = Rig::with(SimMedium::Dax, 256 << 10);
    let store = &rig.store;
    let source = scattered_file(store, "source", 100);
    let clone = new_file(store, "clone").unwrap();
    share(store, whole(store, source, clone)).unwrap();
    let before = content(store, clone);
    let end = FileBlock(1600);
    let (mut at, mut transactions) = (FileBlock(0), 0);
    while at < end {
        let mut tx = store.begin().unwrap();
        at = tx.unshare(clone, at..end).unwrap().next;
        tx.commit().unwrap();
        transactions += 1;
        assert_clean(store);
        assert_eq!(content(store, clone), before);
    }
    assert!(transactions > 1, "{transactions}");
    let rig = rig.reopen();
    assert_eq!(content(&rig.store, clone), before);
    assert_eq!(content(&rig.store, source), before);
    assert_clean(&rig.store);
}

#[test]
fn undo_is_refused_for_what_is_no_file_and_beyond_the_largest() {
    let rig = prepared(SimMedium::Dax);
    let store = &rig.store;
    let before = dump(store);
    let dir = store.dir_lookup(ROOT_INO, b"d").unwrap().unwrap().key.ino;
    let mut tx = store.begin().unwrap();
    let all = FileBlock(0)..FileBlock(9);
    assert!(matches!(
        tx.unshare(dir, all.clone()),
        Err(StoreError::WrongKind { .. })
    ));
    assert!(matches!(tx.unshare(Ino(9999), all), Err(StoreError::NoInode(_))));
    let beyond = FileBlock(0)..FileBlock(varve_format::FILE_BLOCKS_MAX + 1);
    let refused = tx.unshare(file(store, "f9"), beyond);
    assert!(matches!(refused, Err(StoreError::Invalid(_))));
    drop(tx);
    assert_eq!(dump(store), before);
}

/// Shares, and undoes by either side, in turn with writes, moves and frees of what is shared.
fn share_and_undo(store: &Store) -> Result<()> {
    let dir = store.dir_lookup(ROOT_INO, b"d")?.unwrap().key.ino;
    for (round, name) in ["f4", "f5", "f6"].into_iter().enumerate() {
        let clone = new_file(store, &format!("clone {round}"))?;
        let other = new_file(store, &format!("other {round}"))?;
        let source = file(store, name);
        share(store, whole(store, source, clone))?;
        share(store, whole(store, source, other))?;
        unshare(store, clone)?;
        if round == 1 {
            let at = store.map(other, FileBlock(0), 1)?[0];
            let mut tx = store.begin()?;
            let to = DataTarget::only(Tier::Hdd);
            assert!(tx.migrate(other, at.file_block, at.len, (at.tier, at.block), to)?);
            commit(tx, store)?;
        }
        if round == 2 {
            let mut tx = store.begin()?;
            unlink(&mut tx, dir, name)?;
            commit(tx, store)?;
        } else {
            unshare(store, source)?;
        }
        // The last owner.
        unshare(store, other)?;
        store.checkpoint()?;
        let mut tx = store.begin()?;
        tx.write_bytes(
            other,
            &[(1000, &pattern(6000, round as u64))],
            [SSD, HDD, NVM][round],
        )?;
        commit(tx, store)?;
    }
    Ok(())
}

#[test]
fn undos_are_whole_when_they_crash() {
    assert_whole([(SimMedium::Dax, 2, 1), (SimMedium::File, 2, 1)], share_and_undo);
}

/// A share of which one side is undone, then the other.
fn share_and_undo_both(store: &Store) -> Result<()> {
    let (source, clone) = (file(store, "f4"), new_file(store, "clone")?);
    share(store, whole(store, source, clone))?;
    unshare(store, clone)?;
    unshare(store, source).map(drop)
}

#[test]
fn undo_that_frees_the_blocks_of_the_last_owner_is_found() {
    assert_found(Bug::UnshareFreesLast, SimMedium::Dax, share_and_undo_both, 8);
}

#[test]
fn counts_before_or_after_the_extents_of_an_undo_are_found() {
    for bug in [Bug::CountBeforeExtents, Bug::ExtentsBeforeCount] {
        assert_found(bug, SimMedium::Dax, share_and_undo_both, 1);
    }
}

/// Two files of which every third block is another one; the others are shared.
pub(super) fn two_that_share_parts(store: &Store, blocks: u64, target: DataTarget) -> Result<[Ino; 2]> {
    store.share_extents()?;
    let files = [new_file(store, "one")?, new_file(store, "two")?];
    for (at, ino) in files.iter().enumerate() {
        let mut bytes = pattern(blocks as usize * 4096, 50 + at as u64);
        for block in (0..blocks).filter(|block| block % 3 != 1) {
            let start = block as usize * 4096;
            bytes[start..start + 4096].copy_from_slice(&pattern(4096, block));
        }
        let mut tx = store.begin()?;
        tx.write_bytes(*ino, &[(0, &bytes)], target)?;
        commit(tx, store)?;
    }
    for first in (0..blocks).filter(|block| block % 3 == 2) {
        let range = ShareRange {
            from_block: FileBlock(first),
            to_block: FileBlock(first),
            blocks: 2.min(blocks - first),
            ..whole(store, files[0], files[1])
        };
        share(store, range)?;
    }
    Ok(files)
}

#[test]
fn pieces_of_an_undo_are_joined_where_there_is_room() {
    for target in [NVM, SSD, HDD] {
        let rig = Rig::with(SimMedium::Dax, 512 << 10);
        let store = &rig.store;
        let files = two_that_share_parts(store, 60, target).unwrap();
        let before = files.map(|ino| (content(store, ino), store.get(ino).unwrap().attr));
        let space = used(store);
        for ino in files {
            assert!(store.extents_of(ino).unwrap() > 30);
            let done = unshare_joined(store, ino).unwrap();
            assert_eq!(done.next, FileBlock(60));
            assert!(
                store.extents_of(ino).unwrap() <= 3,
                "{:?}",
                store.map(ino, FileBlock(0), 99)
            );
            assert!(!store.shares_blocks(ino).unwrap());
            assert_clean(store);
            // Again: nothing is left to do.
            let again = unshare_joined(store, ino).unwrap();
            assert_eq!((again.copied, again.kept), (0, 0));
        }
        let after = files.map(|ino| (content(store, ino), store.get(ino).unwrap().attr));
        for ((bytes, attr), (old_bytes, old_attr)) in after.iter().zip(&before) {
            assert!(bytes == old_bytes);
            // The nodes of the tree are gone.
            assert!(attr.sectors < old_attr.sectors);
            let sectors = old_attr.sectors;
            assert_eq!(InodeAttr { sectors, ..*attr }, *old_attr);
        }
        // Of 40 blocks that two had, each has a copy; and the nodes of the trees are gone.
        let grown = used(store).iter().sum::<u64>() as i64 - space.iter().sum::<u64>() as i64;
        assert!((30..=41).contains(&grown), "{grown}");
        rig.reopen();
    }
}

#[test]
fn pieces_that_lie_together_and_long_ones_are_not_copied() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let [one, two] = two_that_share_parts(store, 60, SSD).unwrap();
    let places = |ino| {
        store
            .map(ino, FileBlock(0), 999)
            .unwrap()
            .iter()
            .map(|at| (at.block, at.len))
            .collect::<Vec<_>>()
    };
    // The one whose blocks the other has got is undone last, and is as it was.
    let before = places(one);
    unshare_joined(store, two).unwrap();
    let done = unshare_joined(store, one).unwrap();
    assert_eq!((done.copied, done.kept), (0, 39));
    assert_eq!(places(one)[0].0, before[0].0);
    assert_eq!(store.extents_of(one).unwrap(), 1);
    assert_clean(store);
}

#[test]
fn pieces_stay_apart_where_there_is_no_room_to_join_them() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let files = two_that_share_parts(store, 60, NVM).unwrap();
    let before = files.map(|ino| content(store, ino));
    // Free blocks lie one by one.
    let full = new_file(store, "full").unwrap();
    let mut at = 0;
    for tier in [HDD, SSD, NVM] {
        loop {
            let mut tx = store.begin().unwrap();
            match tx.write_data(
                full,
                FileBlock(at),
                &pattern(64 * 4096, at),
                true,
                DataTarget { only: true, ..tier },
            ) {
                Ok(()) => tx.commit().unwrap(),
                Err(StoreError::NoSpace { .. }) => break,
                Err(error) => panic!("{error}"),
            };
            at += 64;
        }
    }
    for block in 0..100 {
        let mut tx = store.begin().unwrap();
        tx.punch(full, (at - 400 + block * 4) * 4096, 4096, NVM).unwrap();
        tx.commit().unwrap();
    }
    store.checkpoint().unwrap();
    for ino in files {
        unshare_joined(store, ino).unwrap();
        assert!(!store.shares_blocks(ino).unwrap());
        assert_clean(store);
    }
    assert!(files.map(|ino| content(store, ino)) == before);
}

/// Shares of parts that are undone, with the pieces joined, by either side, and written again.
fn share_parts_and_rejoin(store: &Store) -> Result<()> {
    for (round, target) in [SSD, NVM].into_iter().enumerate() {
        let [one, two] = two_that_share_parts(store, 14, target)?;
        unshare_joined(store, [two, one][round])?;
        store.checkpoint()?;
        let mut tx = store.begin()?;
        tx.write_bytes(one, &[(3000, &pattern(9000, 7))], NVM)?;
        commit(tx, store)?;
        unshare_joined(store, [one, two][round])?;
        for name in ["one", "two"] {
            let mut tx = store.begin()?;
            unlink(&mut tx, ROOT_INO, name)?;
            commit(tx, store)?;
        }
    }
    Ok(())
}

#[test]
fn undos_that_join_pieces_are_whole_when_they_crash() {
    assert_whole(
        [(SimMedium::Dax, 2, 1), (SimMedium::File, 2, 1)],
        share_parts_and_rejoin,
    );
}

/// An undo of one side, with its pieces joined.
fn rejoin_one(store: &Store) -> Result<()> {
    let [_, two] = two_that_share_parts(store, 14, SSD)?;
    unshare_joined(store, two).map(drop)
}

#[test]
fn undo_that_frees_blocks_of_others_as_it_joins_is_found() {
    assert_found(Bug::RejoinFreesShared, SimMedium::Dax, rejoin_one, 8);
}
