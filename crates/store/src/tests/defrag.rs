//! Defragmentation: what moves, what stays, in which order it lies afterwards, at a lack of space, with several
//! devices, at damage, and at every point at which it may crash.
use super::crash::{assert_found, assert_whole, commit};
use super::shared::{content, new_file, used};
use super::unshare::two_that_share_parts;
use super::*;
use crate::seeded::Bug;
use crate::{MappedPart, StoreError};
use varve_format::{Extent, ExtentFlags};

/// Defragments a file on both slower tiers, in as many transactions as it takes; blocks that were moved.
fn defrag(store: &Store, ino: Ino) -> Result<u64> {
    let end = FileBlock(store.get(ino)?.attr.size_bytes.div_ceil(BLOCK_BYTES));
    let mut moved = 0;
    for tier in [Tier::Ssd, Tier::Hdd] {
        let mut at = FileBlock(0);
        while at < end {
            let mut tx = store.begin()?;
            let done = tx.defrag(ino, at..end, tier)?;
            commit(tx, store)?;
            assert!(done.next > at);
            (at, moved) = (done.next, moved + done.moved);
        }
    }
    Ok(moved)
}

/// Parts of a file on a tier that it has alone.
fn alone(store: &Store, ino: Ino, tier: Tier) -> Vec<MappedPart> {
    let mut parts = store.map_parts(ino, FileBlock(0), 4000).unwrap();
    parts.retain(|part| part.extent.tier == tier && part.owners == 1);
    parts
}

/// Places in which they lie.
fn places(parts: &[MappedPart]) -> usize {
    let end = |extent: &Extent| extent.block.0 + u64::from(extent.len);
    let joins = |pair: &[MappedPart]| end(&pair[0].extent) == pair[1].extent.block.0;
    parts.len() - parts.windows(2).filter(|pair| joins(pair)).count()
}

/// A file of so many pieces of a block or two, which lie one by one between those of another file, with holes
/// between them.
fn fragments(store: &Store, name: &str, pieces: u64, target: DataTarget) -> Result<Ino> {
    let [ino, other] = [
        new_file(store, name)?,
        new_file(store, &format!("{name} between"))?,
    ];
    let mut tx = store.begin()?;
    for at in 0..pieces {
        let bytes = pattern(4096 * (1 + at as usize % 2), at + 7);
        tx.write_data(ino, FileBlock(at * 4), &bytes, true, target)?;
        tx.write_data(other, FileBlock(at), &pattern(4096, at), true, target)?;
    }
    commit(tx, store)?;
    Ok(ino)
}

#[test]
fn pieces_that_a_file_has_alone_lie_together_and_in_its_order_afterwards() {
    for (medium, target) in [(SimMedium::Dax, SSD), (SimMedium::File, HDD)] {
        let rig = Rig::with(medium, 512 << 10);
        let store = &rig.store;
        let ino = fragments(store, "f", 30, target).unwrap();
        let (before, attr) = (content(store, ino), store.get(ino).unwrap().attr);
        let (space, old) = (used(store), alone(store, ino, target.tier));
        assert_eq!((places(&old), old.len()), (30, 30));
        assert_eq!(defrag(store, ino).unwrap(), 45);
        let new = alone(store, ino, target.tier);
        assert_eq!(places(&new), 1, "{new:?}");
        assert!(
            new.windows(2)
                .all(|two| two[0].extent.block < two[1].extent.block)
        );
        let shape = |parts: &[MappedPart]| -> Vec<_> {
            parts
                .iter()
                .map(|part| (part.extent.file_block, part.extent.len))
                .collect()
        };
        assert_eq!(shape(&new), shape(&old));
        assert_eq!(
            (content(store, ino), store.get(ino).unwrap().attr),
            (before, attr)
        );
        assert_eq!(used(store), space);
        assert_clean(store);
        // Again: nothing is left to do.
        assert_eq!(defrag(store, ino).unwrap(), 0);
        assert_eq!(alone(store, ino, target.tier), new);
        assert_clean(&rig.reopen().store);
    }
}

#[test]
fn what_is_shared_stays_where_it_is_and_is_shared_as_before() {
    for target in [SSD, HDD] {
        let rig = Rig::with(SimMedium::Dax, 512 << 10);
        let store = &rig.store;
        let files = two_that_share_parts(store, 90, target).unwrap();
        let shared_of = |ino| {
            let mut parts = store.map_parts(ino, FileBlock(0), 999).unwrap();
            parts.retain(|part| part.owners > 1);
            parts
        };
        let before = files.map(|ino| (content(store, ino), store.get(ino).unwrap().attr));
        let (shared, space) = (files.map(shared_of), used(store));
        for ino in files {
            // The first piece has two blocks.
            assert_eq!(places(&alone(store, ino, target.tier)), 30);
            assert_eq!(defrag(store, ino).unwrap(), 31);
            assert_eq!(places(&alone(store, ino, target.tier)), 1);
            assert_clean(store);
            assert_eq!(defrag(store, ino).unwrap(), 0);
        }
        assert_eq!(files.map(shared_of), shared);
        assert_eq!(
            files.map(|ino| (content(store, ino), store.get(ino).unwrap().attr)),
            before
        );
        assert_eq!(used(store), space);
        rig.reopen();
    }
}

#[test]
fn pieces_of_runs_with_one_owner_left_leave_the_tree_of_runs() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let [one, two] = two_that_share_parts(store, 30, SSD).unwrap();
    let before = content(store, one);
    let mut tx = store.begin().unwrap();
    assert_eq!(unlink(&mut tx, ROOT_INO, "two").unwrap(), Progress::Done);
    tx.commit().unwrap();
    let runs = |store: &Store| store.snapshot().reader().shared_root().unwrap().runs();
    assert!(store.get(two).is_err() && runs(store) > 5);
    // They lie together as they are; a file between its blocks pulls them apart.
    let other = new_file(store, "other").unwrap();
    for block in (0..30).step_by(5) {
        let mut tx = store.begin().unwrap();
        tx.write_data(one, FileBlock(block), &pattern(4096, block), true, SSD)
            .unwrap();
        tx.write_data(other, FileBlock(block), &pattern(4096, block), true, SSD)
            .unwrap();
        tx.commit().unwrap();
    }
    let mut expected = before;
    for block in (0..30).step_by(5) {
        expected[block * 4096..][..4096].copy_from_slice(&pattern(4096, block as u64));
    }
    while defrag(store, one).unwrap() > 0 {
        assert_clean(store);
    }
    assert!(content(store, one) == expected);
    assert!(places(&alone(store, one, Tier::Ssd)) <= 3);
    assert!(runs(store) <= 3, "{}", runs(store));
    rig.reopen();
}

#[test]
fn tiers_are_gathered_each_for_itself_and_nvm_and_unwritten_blocks_stay() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let [ino, other] = ["f", "other"].map(|name| new_file(store, name).unwrap());
    let mut tx = store.begin().unwrap();
    for at in 0..36 {
        let target = [SSD, NVM, HDD][at as usize % 3];
        tx.write_data(ino, FileBlock(at), &pattern(4096, at), true, target)
            .unwrap();
        tx.write_data(other, FileBlock(at), &pattern(4096, at), true, target)
            .unwrap();
    }
    // Allocated, and never written.
    for at in [40_u64, 44, 48] {
        tx.allocate(ino, at * 4096, 4096, true, SSD).unwrap();
        tx.write_data(other, FileBlock(at), &pattern(4096, at), true, SSD)
            .unwrap();
    }
    tx.commit().unwrap();
    let stays = |store: &Store| {
        let mut parts = store.map_parts(ino, FileBlock(0), 99).unwrap();
        parts.retain(|part| {
            part.extent.tier == Tier::Nvm || part.extent.flags.contains(ExtentFlags::UNWRITTEN)
        });
        parts
    };
    let (before, kept) = (content(store, ino), stays(store));
    assert_eq!(kept.len(), 15);
    assert_eq!(defrag(store, ino).unwrap(), 24);
    assert_eq!(stays(store), kept);
    for tier in [Tier::Ssd, Tier::Hdd] {
        let mut parts = alone(store, ino, tier);
        parts.retain(|part| part.extent.flags.is_empty());
        assert_eq!((parts.len(), places(&parts)), (12, 1));
    }
    assert!(content(store, ino) == before);
    assert_eq!(defrag(store, ino).unwrap(), 0);
    rig.reopen();
}

#[test]
fn long_pieces_stay_and_short_ones_are_joined_to_longer_ones_beside_them() {
    let world = SimWorld::new();
    world.add_region("nvm", SimMedium::Dax, NVM_BYTES, NVM_BYTES);
    world.add_region("journal", SimMedium::Dax, 2 << 20, 2 << 20);
    world.add_block("hdd", 96 << 20);
    let options = MkfsOptions {
        hdd_unit_blocks: Some(8192),
        ..MkfsOptions::default()
    };
    Store::mkfs(&devices_of(&world), &options).unwrap();
    let store = &open(&world).unwrap();
    let [ino, other] = ["f", "other"].map(|name| new_file(store, name).unwrap());
    let (mut at, mut lengths) = (0, vec![2048, 1, 1023, 1022, 3, 1200, 2100]);
    lengths.extend([80; 20]);
    for (number, len) in lengths.iter().enumerate() {
        let mut tx = store.begin().unwrap();
        let bytes = pattern(len * 4096, number as u64);
        tx.write_data(ino, FileBlock(at), &bytes, true, HDD).unwrap();
        tx.write_data(other, FileBlock(number as u64), &bytes[..4096], true, HDD)
            .unwrap();
        tx.commit().unwrap();
        at += *len as u64 + 1;
    }
    let before = content(store, ino);
    let old = alone(store, ino, Tier::Hdd);
    assert_eq!(defrag(store, ino).unwrap(), 1 + 1023 + 1022 + 3 + 1200 + 1600);
    let new = alone(store, ino, Tier::Hdd);
    assert_eq!((new[0], new[6]), (old[0], old[6]));
    // 2,048 blocks at once at most; what the steps have moved lies behind each other.
    assert_eq!(places(&new), 4, "{new:?}");
    assert!(content(store, ino) == before);
    assert_eq!(defrag(store, ino).unwrap(), 0);
    assert_clean(store);
}

#[test]
fn step_that_is_given_what_was_fetched_reads_no_piece_again() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let ino = fragments(store, "f", 20, SSD).unwrap();
    let before = content(store, ino);
    let range = FileBlock(0)..FileBlock(80);
    let fetched = store.fetch_fragments(ino, range.clone(), Tier::Ssd);
    assert!(!fetched.is_empty());
    let reads = || store.io()[Tier::Ssd as usize].read_bytes;
    let so_far = reads();
    let mut tx = store.begin().unwrap();
    tx.use_fetched(&fetched);
    assert_eq!(tx.defrag(ino, range, Tier::Ssd).unwrap().moved, 30);
    tx.commit().unwrap();
    // But for a footer.
    assert!(reads() <= so_far + BLOCK_BYTES, "{}", reads() - so_far);
    assert!(content(store, ino) == before);
    assert_clean(store);
}

#[test]
fn damaged_block_is_an_error_and_nothing_moves() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let ino = fragments(store, "f", 20, HDD).unwrap();
    let old = alone(store, ino, Tier::Hdd);
    let device = rig.world.block("hdd").unwrap();
    let mut block = [0; 4096];
    let at = old[9].extent.block.0 * BLOCK_BYTES;
    device.read(at, &mut block).unwrap();
    block[100] ^= 4;
    device.write(at, &block).unwrap();
    let mut tx = store.begin().unwrap();
    let refused = tx.defrag(ino, FileBlock(0)..FileBlock(80), Tier::Hdd);
    assert!(
        matches!(refused, Err(StoreError::DataChecksum { .. })),
        "{refused:?}"
    );
    assert!(matches!(tx.commit(), Err(StoreError::Poisoned)));
    assert_eq!(alone(store, ino, Tier::Hdd), old);
    assert_eq!(store.check().unwrap(), []);
    block[100] ^= 4;
    device.write(at, &block).unwrap();
    assert_eq!(defrag(store, ino).unwrap(), 30);
    assert_clean(store);
}

#[test]
fn free_space_that_lies_apart_is_no_better_and_nothing_moves() {
    let rig = Rig::with(SimMedium::Dax, 512 << 10);
    let store = &rig.store;
    let ino = fragments(store, "f", 30, SSD).unwrap();
    let before = content(store, ino);
    let full = new_file(store, "full").unwrap();
    let mut at = 0;
    loop {
        let mut tx = store.begin().unwrap();
        let only = DataTarget::only(Tier::Ssd).with_reserve();
        match tx.write_data(full, FileBlock(at), &pattern(4096, at), true, only) {
            Ok(()) => tx.commit().unwrap(),
            Err(StoreError::NoSpace { .. }) => break,
            Err(error) => panic!("{error}"),
        };
        at += 1;
    }
    let old = alone(store, ino, Tier::Ssd);
    assert_eq!(defrag(store, ino).unwrap(), 0);
    // Every fourth block is free.
    for block in (0..at).step_by(4) {
        let mut tx = store.begin().unwrap();
        tx.punch(full, block * 4096, 4096, NVM).unwrap();
        tx.commit().unwrap();
    }
    store.checkpoint().unwrap();
    assert_eq!(defrag(store, ino).unwrap(), 0);
    assert_eq!(alone(store, ino, Tier::Ssd), old);
    assert!(content(store, ino) == before);
    assert_clean(store);
}

#[test]
fn file_on_several_devices_lies_together_on_each() {
    let world = SimWorld::new();
    world.add_region("nvm", SimMedium::Dax, NVM_BYTES, NVM_BYTES);
    world.add_region("journal", SimMedium::Dax, 1 << 20, 1 << 20);
    world.add_block("ssd", 16 << 20);
    let options = MkfsOptions {
        ssd_unit_blocks: Some(1024),
        ..MkfsOptions::default()
    };
    Store::mkfs(&devices_of(&world), &options).unwrap();
    let store = &open(&world).unwrap();
    world.add_block("ssd-2", 16 << 20);
    let second: Arc<dyn BlockDevice> = world.block("ssd-2").unwrap();
    store.add_device(Tier::Ssd, &second, [3; 16]).unwrap();
    let ino = fragments(store, "f", 100, SSD).unwrap();
    let before = content(store, ino);
    assert_eq!(defrag(store, ino).unwrap(), 150);
    assert!(content(store, ino) == before);
    let parts = alone(store, ino, Tier::Ssd);
    let on = |device: usize| -> Vec<MappedPart> {
        let lies_there = |part: &&MappedPart| store.layout.run_of(Tier::Ssd, part.extent.block.0).0 == device;
        parts.iter().filter(lies_there).copied().collect()
    };
    for device in [0, 1] {
        assert!(on(device).len() > 20 && places(&on(device)) <= 2, "{parts:?}");
    }
    assert_eq!(defrag(store, ino).unwrap(), 0);
    assert_clean(store);
}

#[test]
fn defragmentation_is_refused_for_nvm_what_is_no_file_and_beyond_the_largest() {
    let rig = Rig::new();
    let store = &rig.store;
    let ino = fragments(store, "f", 9, SSD).unwrap();
    let before = dump(store);
    let mut tx = store.begin().unwrap();
    let all = FileBlock(0)..FileBlock(99);
    let dir = tx.defrag(ROOT_INO, all.clone(), Tier::Ssd);
    assert!(matches!(dir, Err(StoreError::WrongKind { .. })), "{dir:?}");
    let gone = tx.defrag(Ino(9999), all.clone(), Tier::Ssd);
    assert!(matches!(gone, Err(StoreError::NoInode(_))), "{gone:?}");
    let nvm = tx.defrag(ino, all, Tier::Nvm);
    assert!(matches!(nvm, Err(StoreError::Invalid(_))), "{nvm:?}");
    let beyond = FileBlock(0)..FileBlock(varve_format::FILE_BLOCKS_MAX + 1);
    let refused = tx.defrag(ino, beyond, Tier::Ssd);
    assert!(matches!(refused, Err(StoreError::Invalid(_))), "{refused:?}");
    drop(tx);
    assert_eq!(dump(store), before);
}

/// What two files have alone is gathered, in turn with writes, undos, moves and frees.
fn defrag_and_change(store: &Store) -> Result<()> {
    for (round, target) in [SSD, HDD].into_iter().enumerate() {
        let [one, two] = two_that_share_parts(store, 13, target)?;
        defrag(store, [two, one][round])?;
        store.checkpoint()?;
        let mut tx = store.begin()?;
        tx.write_bytes(one, &[(3000, &pattern(9000, 7))], target)?;
        tx.punch(two, 4096, 4096, target)?;
        commit(tx, store)?;
        defrag(store, one)?;
        let mut tx = store.begin()?;
        tx.unshare(two, FileBlock(0)..FileBlock(6))?;
        commit(tx, store)?;
        store.checkpoint()?;
        defrag(store, two)?;
        for name in ["one", "two"] {
            let mut tx = store.begin()?;
            unlink(&mut tx, ROOT_INO, name)?;
            commit(tx, store)?;
        }
    }
    Ok(())
}

#[test]
fn defragmentations_are_whole_when_they_crash() {
    assert_whole(
        [(SimMedium::Dax, 2, 1), (SimMedium::File, 2, 1)],
        defrag_and_change,
    );
}

fn defrag_one(store: &Store) -> Result<()> {
    let [_, two] = two_that_share_parts(store, 13, SSD)?;
    defrag(store, two).map(drop)
}

#[test]
fn defragmentation_that_moves_and_frees_what_others_name_is_found() {
    assert_found(Bug::DefragMovesShared, SimMedium::Dax, defrag_one, 8);
}

#[test]
fn defragmentation_whose_copies_are_not_flushed_is_found() {
    assert_found(Bug::DefragNotFlushed, SimMedium::Dax, defrag_one, 1);
}
