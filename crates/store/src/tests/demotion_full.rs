//! Metadata on slower tiers when everything is full: operations that free space must succeed, whatever they
//! have to promote.
use super::*;
use crate::StoreError;
use varve_format::BLOCK_BYTES;

/// Writes to one tier until it has nothing left, then to the next one.
fn fill_with_data(store: &Store) {
    for tier in [Tier::Nvm, Tier::Ssd, Tier::Hdd] {
        let name = format!("fill {}", tier.name());
        let mut tx = store.begin_with_room().unwrap();
        let file = make(&mut tx, ROOT_INO, &name, 0o100_644).unwrap().ino;
        tx.commit().unwrap();
        let (mut at, mut blocks) = (0, 32);
        while blocks > 0 {
            let mut tx = store.begin_with_room().unwrap();
            let data = pattern((blocks * BLOCK_BYTES) as usize, at);
            match tx.write_data(file, FileBlock(at), &data, true, DataTarget::only(tier)) {
                Ok(()) => {
                    tx.commit().unwrap();
                    at += blocks;
                }
                Err(StoreError::NoSpace { .. }) => blocks /= 2,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Makes files in directories named after `part`, `most` or until there is no space for more; their names.
fn fill_with_files(store: &Store, part: &str, most: usize) -> Vec<(Ino, String)> {
    let mut names = Vec::new();
    for d in 0.. {
        let made = (|| {
            let mut tx = store.begin_with_room()?;
            let dir = make(&mut tx, ROOT_INO, &format!("{part}{d}"), 0o040_755)?.ino;
            tx.commit()?;
            for i in 0..100 {
                let mut tx = store.begin_with_room()?;
                let name = format!("a file with a name of some length, number {i}");
                let key = make(&mut tx, dir, &name, 0o100_644)?;
                tx.xattr_set(key.ino, b"user.long", &pattern(6000, i))?;
                tx.commit()?;
                names.push((dir, name));
            }
            Ok::<_, StoreError>(())
        })();
        match made {
            Ok(()) if names.len() < most => {}
            Ok(()) | Err(StoreError::NoSpace { .. }) => return names,
            Err(error) => panic!("{error}"),
        }
    }
    names
}

#[test]
fn files_are_removed_when_all_tiers_are_full_of_data_and_metadata() {
    let rig = Rig::sized(SimMedium::Dax, 512 << 10, 4 << 20);
    let mut names = fill_with_files(&rig.store, "away", 400);
    rig.store.demote(u64::MAX).unwrap();
    fill_with_data(&rig.store);
    names.extend(fill_with_files(&rig.store, "near", usize::MAX));
    assert!(names.len() > 400);
    let rig = rig.reopen();
    // Each is in another block of inodes than the one before, which has to come back.
    let scattered = (0..16).flat_map(|first| names.iter().skip(first).step_by(16));
    for (done, (dir, name)) in scattered.enumerate() {
        let ino = rig
            .store
            .dir_lookup(*dir, name.as_bytes())
            .unwrap()
            .unwrap()
            .key
            .ino;
        let mut tx = rig.store.begin_with_room().unwrap();
        let mut removed = unlink(&mut tx, *dir, name);
        while let Ok(progress) = &removed {
            tx.commit().unwrap();
            if *progress == Progress::Done {
                break;
            }
            tx = rig.store.begin_with_room().unwrap();
            removed = tx.continue_free(ino, 256);
        }
        assert!(
            removed.is_ok(),
            "{done} of {}: {removed:?}, {:?} {:?}",
            names.len(),
            rig.store.space(),
            rig.store.demotion_stats()
        );
    }
    assert_clean(&rig.store);
    rig.reopen();
}

/// A truncation goes through a tree leaf by leaf; each comes back before it goes.
#[test]
fn file_of_many_pieces_is_cut_off_when_all_tiers_are_full() {
    let rig = Rig::sized(SimMedium::Dax, 512 << 10, 4 << 20);
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "scattered", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    let block = pattern(4096, 1);
    for part in 0..20 {
        let pieces: Vec<_> = (part * 150..(part + 1) * 150)
            .map(|i| (i * 2 * BLOCK_BYTES, block.as_slice()))
            .collect();
        let mut tx = rig.store.begin_with_room().unwrap();
        tx.write_bytes(file, &pieces, HDD).unwrap();
        tx.commit().unwrap();
    }
    rig.store.demote(u64::MAX).unwrap();
    rig.store.checkpoint().unwrap();
    fill_with_data(&rig.store);
    let names = fill_with_files(&rig.store, "near", usize::MAX);
    let rig = rig.reopen();
    let mut steps = 0;
    loop {
        let mut tx = rig.store.begin_with_room().unwrap();
        let cut = match steps {
            0 => tx.truncate(file, 0),
            _ => tx.continue_free(file, 256),
        };
        let cut = cut.unwrap_or_else(|error| panic!("{error} in step {steps}: {:?}", rig.store.space()));
        tx.commit().unwrap();
        steps += 1;
        if cut == Progress::Done {
            break;
        }
    }
    assert!(!names.is_empty() && rig.store.map(file, FileBlock(0), 1).unwrap().is_empty());
    assert_clean(&rig.store);
    rig.reopen();
}
