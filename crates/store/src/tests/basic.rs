//! Operations of a pool without faults.
use super::*;
use crate::StoreError;
use varve_format::session::{GrantRow, SessionRow, SessionState};
use varve_format::{BlockNo, FileBlock, LeaseNo, LogSeq, Seal, SessionId};

#[test]
fn pool_comes_back_equal_when_reopened() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let dir = make(&mut tx, ROOT_INO, "d", 0o040_755).unwrap();
    for i in 0..50 {
        let file = make(&mut tx, dir.ino, &format!("f{i}"), 0o100_644).unwrap();
        let target = [NVM, SSD, HDD][i % 3];
        tx.write_bytes(
            file.ino,
            &[(i as u64 * 10, &pattern(3000 * i + 1, i as u64))],
            target,
        )
        .unwrap();
        tx.xattr_set(file.ino, b"user.x", &pattern(i * 50, 3)).unwrap();
    }
    make_link(&mut tx, ROOT_INO, "short", 0o120_777, b"d/f1").unwrap();
    make_link(&mut tx, ROOT_INO, "long", 0o120_777, &[b'x'; 3000]).unwrap();
    tx.commit().unwrap();
    assert_clean(&rig.store);
    let rig = rig.reopen();
    assert_eq!(
        rig.store
            .read_link(rig.store.dir_lookup(ROOT_INO, b"long").unwrap().unwrap().key.ino)
            .unwrap(),
        [b'x'; 3000]
    );
    assert!(matches!(rig.store.xattr_get(dir.ino, b"no"), Ok(None)));
}

#[test]
fn open_refuses_with_a_clear_error_when_there_is_no_pool_or_a_newer_one() {
    let rig = Rig::new();
    let devices = devices_of(&rig.world);
    assert!(matches!(
        Store::mkfs(&devices, &MkfsOptions::default()),
        Err(StoreError::Devices(_))
    ));
    let mut sb = crate::pool::read_superblock(&devices).unwrap();
    sb.version.set(varve_format::superblock::FORMAT_VERSION + 1);
    sb.sequence.set(sb.sequence.get() + 1);
    let sb = sb.sealed();
    devices.nvm.write(0, zerocopy::IntoBytes::as_bytes(&sb)).unwrap();
    // An upgrade by a newer program that was cut off: the copy that counts is the newer one.
    let text = open(&rig.world).err().unwrap().to_string();
    assert!(text.contains("newer"), "{text}");
    // The other one alone serves.
    devices.nvm.write(0, &[0; 4096]).unwrap();
    assert!(open(&rig.world).is_ok());
    devices.nvm.write(0, &[0; 8192]).unwrap();
    assert!(
        open(&rig.world)
            .err()
            .unwrap()
            .to_string()
            .contains("no Varve pool")
    );
}

#[test]
fn checks_that_began_before_the_end_of_checks_are_cut_off() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap();
    tx.write_bytes(file.ino, &[(0, &pattern(9000, 1))], SSD).unwrap();
    tx.commit().unwrap();
    let begun = rig.store.begin_check();
    rig.store.end_checks();
    for cut_off in [rig.store.check_since(begun), rig.store.check_data_since(begun)] {
        assert!(matches!(cut_off, Err(StoreError::CheckEnded)), "{cut_off:?}");
    }
    assert_clean(&rig.store);
}

#[test]
fn dropped_transaction_leaves_no_trace() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "a", 0o100_644).unwrap();
    tx.write_bytes(file.ino, &[(0, &pattern(100_000, 1))], SSD)
        .unwrap();
    tx.commit().unwrap();
    let (before, space) = (dump(&rig.store), rig.store.space());
    let newest = rig.store.newest_tx();
    let mut tx = rig.store.begin().unwrap();
    let other = make(&mut tx, ROOT_INO, "b", 0o100_644).unwrap();
    // Several units, NVM, HDD, frees, rows.
    tx.write_bytes(other.ino, &[(0, &pattern(600_000, 2))], SSD)
        .unwrap();
    tx.write_bytes(other.ino, &[(700_000, &pattern(600_000, 2))], HDD)
        .unwrap();
    tx.write_bytes(file.ino, &[(50, &pattern(60_000, 2))], NVM)
        .unwrap();
    tx.truncate(file.ino, 10).unwrap();
    let id = tx.next_session_ids(1).unwrap();
    tx.session_put(&session(id)).unwrap();
    unlink(&mut tx, ROOT_INO, "a").unwrap();
    drop(tx);
    assert_eq!(dump(&rig.store), before);
    assert_eq!(rig.store.space(), space);
    assert_eq!(rig.store.newest_tx(), newest);
    assert_clean(&rig.store);
    let mut tx = rig.store.begin().unwrap();
    assert_eq!(tx.next_session_ids(1).unwrap(), id);
    assert_eq!(tx.session(id).unwrap(), None);
    drop(tx);
    rig.reopen();
}

fn session(id: SessionId) -> SessionRow {
    SessionRow {
        id,
        uid: 1000,
        pid: 5,
        pid_start: 6,
        token: 7,
        state: SessionState::Live,
        digested: LogSeq(0),
        last_forwarded: varve_format::LastForwarded::default(),
        log_bytes: 1 << 21,
        created_ns: 8,
        flags: 0,
    }
}

#[test]
fn rows_are_kept_and_numbers_never_come_twice() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let id = tx.next_session_ids(1).unwrap();
    let lease = tx.next_lease_nos(10).unwrap();
    tx.session_put(&session(id)).unwrap();
    let grant = |lease: u64| GrantRow {
        session: id,
        lease: LeaseNo(lease),
        key: InodeKey::ROOT,
        rights: 1,
        first_seq: LogSeq(1),
        last_seq: None,
        batch: 0,
    };
    for i in 0..10 {
        tx.grant_put(&grant(lease.0 + i)).unwrap();
    }
    tx.commit().unwrap();
    let rig = rig.reopen();
    let mut tx = rig.store.begin().unwrap();
    assert_eq!(tx.next_session_ids(1).unwrap(), SessionId(id.0 + 1));
    assert_eq!(tx.next_lease_nos(1).unwrap(), LeaseNo(lease.0 + 10));
    tx.grant_remove(lease).unwrap();
    assert!(matches!(tx.grant_remove(lease), Err(StoreError::NoGrant(_))));
    let mut row = session(id);
    row.state = SessionState::Sealed(Seal {
        last: LogSeq(9),
        missing: vec![],
    });
    tx.session_put(&row).unwrap();
    tx.commit().unwrap();
    assert_eq!(rig.store.sessions().unwrap(), [row]);
    assert_eq!(rig.store.grants().unwrap().len(), 9);
    let mut tx = rig.store.begin().unwrap();
    let full = (0..100_000).find_map(|i| tx.session_put(&session(SessionId(1000 + i))).err());
    assert!(matches!(full, Some(StoreError::TableFull(_))));
    drop(tx);
    rig.reopen();
}

#[test]
fn generations_grow_when_numbers_are_used_again() {
    let rig = Rig::new();
    let mut seen = std::collections::HashSet::new();
    for round in 0..40 {
        let mut tx = rig.store.begin().unwrap();
        let keys = tx.alloc_inodes(ROOT_INO, 16).unwrap();
        assert!(
            keys.windows(2).all(|pair| pair[0].ino.0 + 1 == pair[1].ino.0),
            "round {round}"
        );
        assert!(
            keys.iter()
                .all(|key| key.ino.0 / 16 == keys[0].ino.0 / 16 && seen.insert(*key))
        );
        for key in keys {
            tx.release_inode(key).unwrap();
        }
        tx.commit().unwrap();
    }
    assert!(rig.store.newest_tx().0 >= 40);
    assert_eq!(rig.store.space().inodes_used, 1);
    // Numbers are used again, so the inode file stays small.
    let mut count = 0;
    rig.store
        .for_each_inode(&mut |_, _| {
            count += 1;
            true
        })
        .unwrap();
    assert_eq!(count, 1);
    assert!(seen.iter().all(|key| key.ino.0 < 128));
    rig.reopen();
}

#[test]
fn numbers_given_back_together_are_all_given_back_or_none() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let mut keys = Vec::new();
    for _ in 0..3 {
        keys.extend(tx.alloc_inodes(ROOT_INO, 16).unwrap());
    }
    tx.commit().unwrap();
    let mut tx = rig.store.begin().unwrap();
    let mut wrong = keys.clone();
    wrong[40].generation.0 += 1;
    assert!(matches!(tx.release_inodes(&wrong), Err(StoreError::NoInode(key)) if key == wrong[40]));
    // The refused call changed nothing, and the transaction continues.
    tx.release_inodes(&keys[..40]).unwrap();
    assert!(tx.release_inodes(&keys[39..]).is_err(), "one of them is free");
    tx.release_inodes(&[]).unwrap();
    tx.commit().unwrap();
    assert_eq!(rig.store.space().inodes_used, 1 + keys.len() as u64 - 40);
    let mut tx = rig.store.begin().unwrap();
    tx.release_inodes(&keys[40..]).unwrap();
    tx.commit().unwrap();
    assert_eq!(rig.store.space().inodes_used, 1);
    rig.reopen();
}

#[test]
fn inode_file_stays_small_when_numbers_are_reserved_by_many_and_given_back() {
    let mut rig = Rig::new();
    let mut kept = 0;
    for round in 0..60 {
        // Nothing is known of free numbers after a start.
        rig = rig.reopen();
        let mut tx = rig.store.begin().unwrap();
        let mut keys = Vec::new();
        while keys.len() < 256 {
            keys.extend(tx.alloc_inodes(ROOT_INO, 16).unwrap());
        }
        assert_eq!(
            keys.iter().collect::<std::collections::HashSet<_>>().len(),
            keys.len()
        );
        tx.commit().unwrap();
        let mut tx = rig.store.begin().unwrap();
        for (at, key) in keys.into_iter().enumerate() {
            // Every round leaves some files, each in a block of its own.
            if at % 64 == round % 64 {
                kept += 1;
                tx.create(&attr(key, 0o100_644), b"").unwrap();
                tx.dir_insert(
                    ROOT_INO,
                    format!("{round}-{at}").as_bytes(),
                    key,
                    FileKind::Regular,
                )
                .unwrap();
            } else {
                tx.release_inode(key).unwrap();
            }
        }
        tx.commit().unwrap();
    }
    let blocks = |rig: &Rig| rig.store.snapshot().reader().state().unwrap().inode_blocks.get();
    assert_eq!(rig.store.space().inodes_used, 1 + kept);
    // 256 numbers at a time, 245 used, and as many free ones rather than more blocks.
    let before = blocks(&rig);
    assert!(before < 64, "{before} blocks");
    // A transaction that takes numbers and is given up costs none.
    for _ in 0..200 {
        let mut tx = rig.store.begin().unwrap();
        for _ in 0..16 {
            tx.alloc_inodes(ROOT_INO, 16).unwrap();
        }
    }
    let mut tx = rig.store.begin().unwrap();
    for _ in 0..16 {
        tx.alloc_inodes(ROOT_INO, 16).unwrap();
    }
    tx.commit().unwrap();
    assert!(
        blocks(&rig) <= before + 16,
        "{before} blocks, then {}",
        blocks(&rig)
    );
    rig.reopen();
}

#[test]
fn holes_and_unwritten_blocks_read_as_zeros_and_are_found() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.write_bytes(file, &[(4096 * 2 + 10, b"data"), (4096 * 10, &[1; 4096])], NVM)
        .unwrap();
    assert_eq!(
        tx.allocate(file, 4096 * 4, 4096 * 2, false, NVM).unwrap(),
        Progress::Done
    );
    tx.commit().unwrap();
    let store = &rig.store;
    assert_eq!(store.get(file).unwrap().attr.size_bytes, 4096 * 11);
    assert_eq!(store.get(file).unwrap().attr.sectors, 4 * 8);
    assert_eq!(store.seek_data(file, 0).unwrap(), Some(8192));
    assert_eq!(store.seek_hole(file, 0).unwrap(), Some(0));
    assert_eq!(store.seek_hole(file, 8200).unwrap(), Some(4096 * 3));
    assert_eq!(store.seek_data(file, 4096 * 3).unwrap(), Some(4096 * 10));
    assert_eq!(store.seek_hole(file, 4096 * 10 + 7).unwrap(), Some(4096 * 11));
    assert_eq!(store.seek_data(file, 4096 * 11).unwrap(), None);
    let mut bytes = vec![9; 4096 * 12];
    assert_eq!(store.read(file, 0, &mut bytes).unwrap(), 4096 * 11);
    assert!(bytes[..8202].iter().all(|byte| *byte == 0) && bytes[8202..8206] == *b"data");
    assert!(bytes[8206..40960].iter().all(|byte| *byte == 0));
    let mut tx = store.begin().unwrap();
    assert_eq!(tx.zero(file, 8203, 40960, true, SSD).unwrap(), Progress::Done);
    assert_eq!(tx.punch(file, 0, 4096, SSD).unwrap(), Progress::Done);
    tx.commit().unwrap();
    assert_eq!(store.get(file).unwrap().attr.size_bytes, 8203 + 40960);
    let mut bytes = vec![9; 4096 * 13];
    let len = store.read(file, 0, &mut bytes).unwrap();
    assert_eq!(len, 8203 + 40960);
    assert_eq!(bytes[8202], b'd');
    assert!(bytes[8203..len].iter().all(|byte| *byte == 0));
    rig.reopen();
}

#[test]
fn shrinking_and_growing_again_shows_zeros() {
    let rig = Rig::new();
    for target in [NVM, SSD] {
        let mut tx = rig.store.begin().unwrap();
        let name = format!("{target:?}");
        let file = make(&mut tx, ROOT_INO, &name, 0o100_644).unwrap().ino;
        tx.write_bytes(file, &[(0, &[7; 20_000])], target).unwrap();
        tx.truncate(file, 5000).unwrap();
        tx.truncate(file, 30_000).unwrap();
        tx.commit().unwrap();
        let mut bytes = vec![1; 30_000];
        rig.store.read(file, 0, &mut bytes).unwrap();
        assert!(bytes[..5000].iter().all(|byte| *byte == 7));
        assert!(bytes[5000..].iter().all(|byte| *byte == 0));
        assert_eq!(
            rig.store
                .map(file, FileBlock(0), 10)
                .unwrap()
                .iter()
                .map(|e| e.len)
                .sum::<u32>(),
            2
        );
    }
    rig.reopen();
}

#[test]
fn damaged_data_is_reported_when_read_from_ssd() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    // More than a unit: the first is sealed.
    tx.write_bytes(file, &[(0, &pattern(4096 * 100, 5))], SSD)
        .unwrap();
    tx.commit().unwrap();
    let extents = rig.store.map(file, FileBlock(0), 10).unwrap();
    assert!(extents.len() == 2 && extents.iter().all(|extent| extent.tier == Tier::Ssd));
    for (extent, at) in [(extents[0], 0), (extents[1], u64::from(extents[0].len))] {
        let devices = devices_of(&rig.world);
        let ssd = devices.ssd.unwrap();
        let offset = extent.block.0 * 4096;
        let mut block = vec![0; 4096];
        ssd.read(offset, &mut block).unwrap();
        block[77] ^= 1;
        ssd.write(offset, &block).unwrap();
        let result = rig.store.read(file, at * 4096, &mut [0; 10]);
        assert!(matches!(
            result,
            Err(StoreError::DataChecksum { tier: Tier::Ssd, block }) if block == extent.block,
        ));
        assert_eq!(rig.store.check_data().unwrap().len(), 1);
        let mut tx = rig.store.begin().unwrap();
        assert!(tx.write_bytes(file, &[(at * 4096 + 5, b"x")], SSD).is_err());
        assert!(matches!(
            tx.write_bytes(file, &[(0, b"x")], SSD),
            Err(StoreError::Poisoned)
        ));
        assert!(matches!(tx.commit(), Err(StoreError::Poisoned)));
        block[77] ^= 1;
        ssd.write(offset, &block).unwrap();
        assert!(rig.store.read(file, at * 4096, &mut [0; 10]).is_ok());
    }
}

#[test]
fn migration_moves_blocks_only_if_they_are_still_there() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    let data = pattern(4096 * 20, 8);
    tx.write_data(file, FileBlock(0), &data, true, NVM).unwrap();
    tx.commit().unwrap();
    let old = rig.store.map(file, FileBlock(0), 2).unwrap()[0];
    assert_eq!(old.tier, Tier::Nvm);
    let mut tx = rig.store.begin().unwrap();
    assert!(
        !tx.migrate(
            file,
            FileBlock(0),
            20,
            (Tier::Nvm, BlockNo(old.block.0 + 1)),
            DataTarget::only(Tier::Ssd)
        )
        .unwrap()
    );
    assert!(
        tx.migrate(
            file,
            FileBlock(0),
            20,
            (Tier::Nvm, old.block),
            DataTarget::only(Tier::Ssd)
        )
        .unwrap()
    );
    tx.commit().unwrap();
    assert!(
        rig.store
            .map(file, FileBlock(0), 9)
            .unwrap()
            .iter()
            .all(|extent| extent.tier == Tier::Ssd)
    );
    let mut back = vec![0; data.len()];
    rig.store.read(file, 0, &mut back).unwrap();
    assert_eq!(back, data);
    let rig = rig.reopen();
    assert_eq!(
        rig.store.space().tiers[1].free + 20,
        rig.store.space().tiers[1].total
    );
}

#[test]
fn huge_file_is_freed_in_several_transactions() {
    let rig = Rig::with(SimMedium::Dax, 256 << 10);
    let free = rig.store.space();
    let mut tx = rig.store.begin().unwrap();
    let file = make(&mut tx, ROOT_INO, "f", 0o100_644).unwrap().ino;
    tx.commit().unwrap();
    // Every second block: as many extents as blocks.
    for round in 0..10_u64 {
        let mut tx = rig.store.begin().unwrap();
        for i in 0..60 {
            tx.write_data(file, FileBlock((round * 60 + i) * 2), &[3; 4096], true, NVM)
                .unwrap();
        }
        tx.commit().unwrap();
    }
    let mut tx = rig.store.begin().unwrap();
    tx.dir_remove(ROOT_INO, b"f").unwrap();
    tx.edit(file, |attr| attr.nlink = 0).unwrap();
    tx.commit().unwrap();
    assert_eq!(rig.store.orphans().unwrap().len(), 1);
    let mut steps = 0;
    loop {
        let mut tx = rig.store.begin().unwrap();
        let progress = tx.continue_free(file, 100).unwrap();
        tx.commit().unwrap();
        steps += 1;
        assert_clean(&rig.store);
        if progress == Progress::Done {
            break;
        }
    }
    assert!(steps >= 6, "{steps} steps");
    assert!(rig.store.orphans().unwrap().is_empty());
    rig.store.checkpoint().unwrap();
    let now = rig.store.space();
    // Only the root directory's block and the inode file stay.
    assert!(free.tiers[0].free - now.tiers[0].free <= 2, "{free:?} {now:?}");
    rig.reopen();
}

#[test]
fn journal_wraps_many_times() {
    let mut rig = Rig::with(SimMedium::File, 256 << 10);
    for round in 0..6 {
        for i in 0..60_u64 {
            let mut tx = rig.store.begin().unwrap();
            let name = format!("f{}", i % 7);
            if rig.store.dir_lookup(ROOT_INO, name.as_bytes()).unwrap().is_some() {
                unlink(&mut tx, ROOT_INO, &name).unwrap();
            }
            let file = make(&mut tx, ROOT_INO, &name, 0o100_644).unwrap().ino;
            let len = (i * 977 % 30_000) as usize + 1;
            tx.write_bytes(file, &[(i, &pattern(len, i))], [NVM, SSD, HDD][(i % 3) as usize])
                .unwrap();
            for x in 0..i % 5 {
                tx.xattr_set(file, format!("user.{x}").as_bytes(), &pattern(900, x))
                    .unwrap();
            }
            tx.commit().unwrap();
        }
        rig = rig.reopen();
        assert!(rig.store.newest_tx().0 > 60 * round);
    }
}

#[test]
fn writer_waits_for_the_other_and_readers_do_not() {
    let rig = Rig::new();
    let mut tx = rig.store.begin().unwrap();
    make(&mut tx, ROOT_INO, "a", 0o100_644).unwrap();
    std::thread::scope(|scope| {
        // Runs to its end while the transaction is open.
        scope
            .spawn(|| assert!(rig.store.dir_lookup(ROOT_INO, b"a").unwrap().is_none()))
            .join()
            .unwrap();
        let second = scope.spawn(|| {
            let mut tx = rig.store.begin().unwrap();
            assert!(tx.dir_lookup(ROOT_INO, b"a").unwrap().is_some());
            make(&mut tx, ROOT_INO, "b", 0o100_644).unwrap();
            tx.commit().unwrap();
        });
        tx.commit().unwrap();
        second.join().unwrap();
    });
    assert!(rig.store.dir_lookup(ROOT_INO, b"b").unwrap().is_some());
    assert_clean(&rig.store);
}
