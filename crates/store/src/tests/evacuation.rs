//! Evacuation of a tier: its job, where new blocks go meanwhile, and metadata that comes away.
use super::demotion::{fill, inode_blocks};
use super::*;
use crate::{Recalled, StoreError};
use varve_media::sim::Crash;

/// Brings all metadata of a tier back.
fn recall(store: &Store, tier: Tier) -> u64 {
    let (mut at, mut moved) = (0, 0);
    for _ in 0..10_000 {
        let step = store.recall_metadata(tier, &mut at, 100).unwrap();
        assert_eq!((step.full, step.damaged), (false, 0));
        moved += step.moved;
        if step.over {
            return moved;
        }
    }
    panic!("it has no end");
}

fn used(store: &Store, tier: Tier) -> u64 {
    let stats = store.space().tiers[tier as usize];
    stats.total - stats.free - stats.pending
}

/// Moves all data of a tier to another one.
fn move_data(store: &Store, from: Tier, to: Tier) {
    for ino in 1..2000 {
        let Ok(inode) = store.get(Ino(ino)) else { continue };
        if !matches!(inode.content, Content::File(_)) {
            continue;
        }
        for extent in store.map(Ino(ino), FileBlock(0), 10_000).unwrap() {
            if extent.tier != from {
                continue;
            }
            let mut tx = store.begin_with_room().unwrap();
            let place = (from, extent.block);
            let target = DataTarget::only(to);
            let moved = tx.migrate(Ino(ino), extent.file_block, extent.len, place, target);
            assert!(moved.unwrap());
            tx.note_evacuated(crate::Emptied::Tier(from), u64::from(extent.len) * BLOCK_BYTES)
                .unwrap();
            tx.commit().unwrap();
        }
    }
}

#[test]
fn job_is_there_after_a_reopen_and_its_number_is_never_given_again() {
    let mut rig = Rig::new();
    assert!(rig.store.evacuations().unwrap().iter().all(|row| !row.is_job()));
    assert_eq!(rig.store.start_evacuation(Tier::Ssd, 77).unwrap(), 1);
    let again = rig.store.start_evacuation(Tier::Ssd, 78);
    assert!(matches!(again, Err(StoreError::Exists)), "{again:?}");
    let nvm = rig.store.start_evacuation(Tier::Nvm, 78);
    assert!(matches!(nvm, Err(StoreError::Invalid(_))), "{nvm:?}");
    rig.store
        .change_evacuation(1, &mut |row| {
            row.paused = 1;
            row.limit_bytes_per_s.set(5);
        })
        .unwrap();
    rig = rig.reopen();
    let row = rig.store.evacuations().unwrap()[Tier::Ssd as usize];
    let told = (row.job.get(), row.started_ns.get(), row.limit_bytes_per_s.get());
    assert_eq!((told, row.is_paused()), ((1, 77, 5), true));
    assert!(rig.store.space().tiers[Tier::Ssd as usize].avoided);
    let missing = rig.store.change_evacuation(2, &mut |_| panic!("there is none"));
    assert!(matches!(missing, Err(StoreError::NotFound)), "{missing:?}");
    rig.store
        .change_evacuation(1, &mut |row| *row = Default::default())
        .unwrap();
    assert!(!rig.store.space().tiers[Tier::Ssd as usize].avoided);
    assert_eq!(rig.store.start_evacuation(Tier::Hdd, 79).unwrap(), 2);
    rig = rig.reopen();
    assert!(rig.store.space().tiers[Tier::Hdd as usize].avoided);
}

#[test]
fn evacuated_tier_takes_new_data_only_when_nothing_else_has_room() {
    let rig = Rig::new();
    let store = &rig.store;
    store.start_evacuation(Tier::Ssd, 0).unwrap();
    let mut files = 0;
    let full = loop {
        let mut tx = store.begin_with_room().unwrap();
        let file = make(&mut tx, ROOT_INO, &format!("f{files}"), 0o100_644)
            .unwrap()
            .ino;
        let wrote = tx.write_bytes(file, &[(0, &pattern(1 << 20, files))], SSD);
        if let Err(error) = wrote {
            break error;
        }
        tx.commit().unwrap();
        files += 1;
        let [_, ssd, hdd] = store.space().tiers;
        let others_are_full = hdd.free <= hdd.kept + 256;
        assert!(others_are_full || ssd.free == ssd.total, "after {files} files");
        assert!(files < 60);
    };
    assert!(full.is_no_space(), "{full}");
    assert!(used(store, Tier::Ssd) > 1000, "no write fails because of the job");
    assert_clean(store);
}

#[test]
fn metadata_comes_away_from_a_tier_and_goes_to_the_other_one() {
    let mut rig = Rig::new();
    fill(&rig.store);
    let before = dump(&rig.store);
    rig.store.demote(u64::MAX).unwrap();
    assert!(used(&rig.store, Tier::Ssd) > 500);
    rig.store.start_evacuation(Tier::Ssd, 0).unwrap();
    move_data(&rig.store, Tier::Ssd, Tier::Hdd);
    let left = used(&rig.store, Tier::Ssd);
    assert!(left > 100, "{left} blocks of metadata");
    let moved = recall(&rig.store, Tier::Ssd);
    assert!(moved >= left, "{moved} of {left}");
    assert_eq!(used(&rig.store, Tier::Ssd), 0);
    assert_eq!(dump(&rig.store), before);
    assert_eq!(recall(&rig.store, Tier::Ssd), 0, "nothing is left");
    rig = rig.reopen();
    assert_eq!(used(&rig.store, Tier::Ssd), 0);
    // Demoted again, it goes to the other tier.
    rig.store.demote(u64::MAX).unwrap();
    assert_eq!(inode_blocks(&rig.store)[..2], [0, 0]);
    assert_eq!(used(&rig.store, Tier::Ssd), 0);
    let row = rig.store.evacuations().unwrap()[Tier::Ssd as usize];
    assert_eq!(row.moved_bytes.get(), 400 * BLOCK_BYTES);
    assert_eq!(dump(&rig.reopen().store), before);
}

#[test]
fn metadata_stays_where_it_is_while_nvm_has_no_room() {
    let rig = Rig::new();
    fill(&rig.store);
    rig.store.demote(u64::MAX).unwrap();
    rig.store.start_evacuation(Tier::Ssd, 0).unwrap();
    let mut number = 0;
    loop {
        let (left, total) = rig.store.space.lock().nvm();
        if left < total / 16 {
            break;
        }
        let mut tx = rig.store.begin().unwrap();
        for _ in 0..50 {
            number += 1;
            let file = make(&mut tx, ROOT_INO, &format!("more {number}"), 0o100_644)
                .unwrap()
                .ino;
            tx.xattr_set(file, b"user.long", &pattern(20_000, number))
                .unwrap();
        }
        tx.commit().unwrap();
    }
    let before = used(&rig.store, Tier::Ssd);
    let step = rig.store.recall_metadata(Tier::Ssd, &mut 0, 100).unwrap();
    let full = Recalled {
        full: true,
        ..Recalled::default()
    };
    assert_eq!(step, full);
    // What must go somewhere goes to the other tier.
    rig.store.demote(500).unwrap();
    assert!(used(&rig.store, Tier::Ssd) <= before);
    assert!(used(&rig.store, Tier::Hdd) > 400);
    assert_clean(&rig.store);
}

#[test]
fn crash_while_metadata_comes_away_leaves_all_of_it() {
    let rig = Rig::new();
    fill(&rig.store);
    rig.store.demote(u64::MAX).unwrap();
    rig.store.start_evacuation(Tier::Ssd, 0).unwrap();
    rig.store.checkpoint().unwrap();
    let before = dump(&rig.store);
    let (recording, moved) = rig.world.record(|| recall(&rig.store, Tier::Ssd));
    assert!(moved > 100);
    let points = recording.durability_points();
    println!("{moved} blocks, {} points", points.len());
    assert!(points.len() > 5, "{}", points.len());
    for (at, point) in points.iter().enumerate() {
        for crash in [Crash::PowerNone, Crash::PowerSeeded(at as u64), Crash::Kill] {
            let image = recording.image(point.index, crash).into_world();
            let store = open(&image).unwrap();
            assert_eq!(dump(&store), before);
            assert_clean(&store);
            if at % 4 == 0 {
                recall(&store, Tier::Ssd);
                assert_eq!(inode_blocks(&store)[Tier::Ssd as usize], 0);
                assert_eq!(dump(&store), before);
                assert_clean(&store);
            }
        }
    }
}
