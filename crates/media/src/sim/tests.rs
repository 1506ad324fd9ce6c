#![allow(clippy::unwrap_used)]
use std::collections::HashSet;

use super::{Crash, PointKind, SimMedium, SimWorld};
use crate::{BlockDevice, Region};

fn read<const N: usize>(world: &SimWorld, name: &str, off: u64) -> [u8; N] {
    let mut out = [0; N];
    match world.region(name) {
        Some(region) => region.read(off, &mut out).unwrap(),
        None => world.block(name).unwrap().read(off, &mut out).unwrap(),
    }
    out
}

#[test]
fn dax_line_is_lost_or_kept_when_the_fence_is_missing() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 1 << 16, 1 << 16);
    let (recording, ()) = world.record(|| {
        nvm.write(0, &[1; 64]).unwrap();
        nvm.fence().unwrap();
        nvm.write(64, &[2; 64]).unwrap();
    });
    let kinds: Vec<_> = recording.points().iter().map(|point| point.next).collect();
    assert_eq!(
        kinds,
        [
            PointKind::Store,
            PointKind::Fence,
            PointKind::Store,
            PointKind::End
        ]
    );
    let at = |index, crash| {
        let world = recording.image(index, crash).into_world();
        (read::<64>(&world, "nvm", 0), read::<64>(&world, "nvm", 64))
    };
    assert_eq!(at(1, Crash::PowerNone), ([0; 64], [0; 64]));
    assert_eq!(at(2, Crash::PowerNone), ([1; 64], [0; 64]));
    assert_eq!(at(3, Crash::PowerNone), ([1; 64], [0; 64]));
    assert_eq!(at(3, Crash::PowerAll), ([1; 64], [2; 64]));
    assert_eq!(at(3, Crash::Kill), ([1; 64], [2; 64]));
    assert_eq!(at(1, Crash::Kill), ([1; 64], [0; 64]));
    assert_eq!(recording.pending_units(3), 1);
}

#[test]
fn dax_seeds_reach_old_new_and_torn_lines_but_never_tear_a_word() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| nvm.write(0, &[0xFF; 128]).unwrap());
    let mut seen = HashSet::new();
    for seed in 0..400 {
        let after = read::<128>(
            &recording.image(1, Crash::PowerSeeded(seed)).into_world(),
            "nvm",
            0,
        );
        for word in after.chunks_exact(8) {
            assert!(word == [0; 8] || word == [0xFF; 8], "a word is torn: {word:?}");
        }
        let line = |at: usize| match &after[at..at + 64] {
            line if line == [0; 64] => 0,
            line if line == [0xFF; 64] => 1,
            _ => 2,
        };
        seen.insert((line(0), line(64)));
    }
    assert_eq!(seen.len(), 9, "every pair of old, new and torn: {seen:?}");
}

#[test]
fn dax_words_choose_for_themselves_in_all_lines_at_once() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| {
        nvm.write(0, &[0xFF; 64]).unwrap();
        nvm.write(1024, &[0xFF; 64]).unwrap();
    });
    let torn = (0..100).filter(|seed| {
        let world = recording.image(2, Crash::PowerWords(*seed)).into_world();
        [0, 1024].into_iter().all(|at| {
            let line = read::<64>(&world, "nvm", at);
            let whole = |word: &[u8]| word == [0; 8] || word == [0xFF; 8];
            assert!(line.chunks_exact(8).all(whole), "a word is torn: {line:?}");
            line != [0; 64] && line != [0xFF; 64]
        })
    });
    assert!(torn.count() > 80);
}

#[test]
fn dax_word_is_never_older_than_what_it_was_when_fenced_by_another_thread() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| nvm.write(0, &[1; 16]).unwrap());
        });
        nvm.write(0, &[2; 8]).unwrap();
        nvm.fence().unwrap();
    });
    let end = recording.events_len();
    for crash in [
        Crash::PowerNone,
        Crash::PowerAll,
        Crash::PowerSeeded(3),
        Crash::PowerUnits(u64::MAX),
    ] {
        let after = recording.image(end, crash).into_world();
        assert_eq!(read::<8>(&after, "nvm", 0), [2; 8], "{crash:?}");
    }
}

#[test]
fn dax_store_of_another_thread_stays_pending_when_this_thread_fences() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| nvm.write(128, &[1; 8]).unwrap());
        });
        nvm.fence().unwrap();
    });
    let after = recording
        .image(recording.events_len(), Crash::PowerNone)
        .into_world();
    assert_eq!(read::<8>(&after, "nvm", 128), [0; 8]);
}

#[test]
fn file_range_is_durable_by_pages_when_synced() {
    let world = SimWorld::new();
    let file = world.add_region("log", SimMedium::File, 1 << 16, 1 << 16);
    let (recording, ()) = world.record(|| {
        file.write(4000, &[7; 5000]).unwrap();
        file.fence().unwrap();
        file.sync(4096, 10).unwrap();
    });
    let fenced = recording.image(2, Crash::PowerNone).into_world();
    assert_eq!(
        read::<5000>(&fenced, "log", 4000),
        [0; 5000],
        "a fence is nothing to a disk"
    );
    let synced = recording.image(3, Crash::PowerNone).into_world();
    assert_eq!(read::<96>(&synced, "log", 4000), [0; 96]);
    assert_eq!(read::<4096>(&synced, "log", 4096), [7; 4096]);
    assert_eq!(read::<808>(&synced, "log", 8192), [0; 808]);
    assert_eq!(
        read::<5000>(&recording.image(3, Crash::Kill).into_world(), "log", 4000),
        [7; 5000]
    );
    assert_eq!(recording.pending_units(2), 3);
    assert_eq!(recording.pending_units(3), 2);
}

#[test]
fn shm_is_zero_after_a_power_cut_and_whole_after_a_kill() {
    let world = SimWorld::new();
    let shm = world.add_region("live", SimMedium::Shm, 4096, 8192);
    let (recording, ()) = world.record(|| {
        shm.write(0, &[9; 8]).unwrap();
        shm.sync(0, 8).unwrap();
        shm.grow(8192).unwrap();
    });
    let end = recording.events_len();
    assert_eq!(
        read::<8>(&recording.image(end, Crash::PowerAll).into_world(), "live", 0),
        [0; 8]
    );
    let killed = recording.image(end, Crash::Kill).into_world();
    assert_eq!(read::<8>(&killed, "live", 0), [9; 8]);
    assert_eq!(killed.region("live").unwrap().len_bytes(), 8192);
    assert!(killed.region("live").unwrap().grow(8193).is_err());
}

#[test]
fn block_sectors_hold_any_of_their_writes_when_not_flushed() {
    let world = SimWorld::new();
    let ssd = world.add_block("ssd", 1 << 20);
    ssd.write(0, &[1; 4096]).unwrap();
    let (recording, ()) = world.record(|| {
        ssd.write(0, &[2; 4096]).unwrap();
        ssd.write(0, &[3; 4096]).unwrap();
        ssd.flush().unwrap();
        ssd.trim(0, 4096).unwrap();
    });
    let mut seen = HashSet::new();
    for seed in 0..200 {
        let after = read::<4096>(
            &recording.image(2, Crash::PowerSeeded(seed)).into_world(),
            "ssd",
            0,
        );
        for sector in after.chunks_exact(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is torn");
            seen.insert(sector[0]);
        }
    }
    assert_eq!(seen, HashSet::from([1, 2, 3]));
    assert_eq!(
        read::<1>(&recording.image(3, Crash::PowerNone).into_world(), "ssd", 0),
        [3]
    );
    assert_eq!(
        read::<1>(&recording.image(4, Crash::PowerNone).into_world(), "ssd", 0),
        [3]
    );
    assert_eq!(
        read::<1>(&recording.image(4, Crash::PowerAll).into_world(), "ssd", 0),
        [0]
    );
    assert!(ssd.write(1, &[0; 4096]).is_err());
}

#[test]
fn unit_bits_are_exhaustive_when_units_are_few() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| {
        nvm.write(0, &[1; 192]).unwrap();
    });
    assert_eq!(recording.pending_units(1), 3);
    let hashes: HashSet<u64> = (0..8)
        .map(|bits| recording.image(1, Crash::PowerUnits(bits)).content_hash())
        .collect();
    assert_eq!(hashes.len(), 8);
    assert!(hashes.contains(&recording.image(1, Crash::PowerNone).content_hash()));
    assert!(hashes.contains(&recording.image(1, Crash::PowerAll).content_hash()));
}

#[test]
fn torn_kill_leaves_a_prefix_of_the_next_store() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (recording, ()) = world.record(|| nvm.write(0, &[1; 64]).unwrap());
    let mut lengths = HashSet::new();
    for seed in 0..200 {
        let after = read::<64>(&recording.image(0, Crash::KillTorn(seed)).into_world(), "nvm", 0);
        let stored = after.iter().take_while(|byte| **byte == 1).count();
        assert!(stored % 8 == 0 && after[stored..].iter().all(|byte| *byte == 0));
        lengths.insert(stored);
    }
    assert_eq!(lengths.len(), 9);
}

#[test]
fn hash_is_the_same_when_contents_are_equal_by_other_ways() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 1 << 30, 1 << 30);
    let empty = world.content_hash();
    nvm.write(1 << 29, &[5; 100]).unwrap();
    assert_ne!(world.content_hash(), empty);
    nvm.write(1 << 29, &[0; 100]).unwrap();
    assert_eq!(world.content_hash(), empty);
    assert!(world.resident_bytes() <= 8192, "memory follows what was written");
}

#[test]
fn devices_come_and_go_in_the_history_when_added_and_removed() {
    let world = SimWorld::new();
    let (recording, ()) = world.record(|| {
        world.label("make a log");
        let log = world.add_region("log-1", SimMedium::File, 4096, 4096);
        log.write(0, b"x").unwrap();
        world.label("drop it");
        assert!(world.remove("log-1"));
        assert!(log.write(0, b"y").is_err());
    });
    let points = recording.points();
    assert_eq!(points[0].label.as_deref(), Some("make a log"));
    assert_eq!(points.last().unwrap().label.as_deref(), Some("drop it"));
    let names: Vec<_> = points
        .iter()
        .map(|point| {
            recording
                .image(point.index, Crash::Kill)
                .into_world()
                .names()
                .len()
        })
        .collect();
    assert_eq!(names, [0, 1, 1, 0]);
}

#[test]
fn images_of_a_recovery_come_from_a_world_made_of_an_image() {
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::Dax, 4096, 4096);
    let (first, ()) = world.record(|| nvm.write(0, &[1; 8]).unwrap());
    let crashed = first.image(1, Crash::PowerAll).into_world();
    let nvm = crashed.region("nvm").unwrap();
    let (second, ()) = crashed.record(|| {
        nvm.write(8, &[2; 8]).unwrap();
        nvm.fence().unwrap();
    });
    let again = second.image(1, Crash::PowerNone).into_world();
    assert_eq!(
        read::<16>(&again, "nvm", 0),
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    );
    // Going back in the history gives the image that going forward gave.
    let late = second.image(2, Crash::PowerNone).content_hash();
    let early = second.image(0, Crash::PowerNone).content_hash();
    assert_ne!(late, early);
    assert_eq!(second.image(2, Crash::PowerNone).content_hash(), late);
}

#[test]
fn file_ranges_synced_together_are_there_in_any_combination_before_and_all_after() {
    let world = SimWorld::new();
    let log = world.add_region("log", SimMedium::File, 1 << 16, 1 << 16);
    let (recording, ()) = world.record(|| {
        log.write(0, &[1; 64]).unwrap();
        log.write(8192, &[2; 64]).unwrap();
        log.fence().unwrap();
        log.sync_all(&[(0, 64), (8192, 64)]).unwrap();
    });
    let at = |index, crash| {
        let after = recording.image(index, crash).into_world();
        (read::<1>(&after, "log", 0)[0], read::<1>(&after, "log", 8192)[0])
    };
    let points = recording.points();
    let sync = points.iter().find(|point| point.next == PointKind::Sync).unwrap();
    let seen: HashSet<_> = (0..200)
        .map(|seed| at(sync.index, Crash::PowerSeeded(seed)))
        .collect();
    assert_eq!(seen, HashSet::from([(0, 0), (1, 0), (0, 2), (1, 2)]));
    assert_eq!(at(recording.events_len(), Crash::PowerNone), (1, 2));
}

#[test]
fn stores_of_dax_are_durable_when_their_lines_were_written_back_and_fenced() {
    use super::Flaw;
    for (flaw, is_kept) in [
        (Flaw::None, true),
        (Flaw::NoWriteBack, false),
        (Flaw::NoFence, false),
    ] {
        let world = SimWorld::new();
        let nvm = world.add_region("nvm", SimMedium::DaxByStore(flaw), 4096, 4096);
        let (recording, ()) = world.record(|| {
            // Part of a line, whole lines, part of a line.
            nvm.write(40, &[7; 200]).unwrap();
            let crc = nvm.write_crc(1000, b"checksum", 3).unwrap();
            assert_eq!(crc, crate::crc32c_append(3, b"checksum"));
            nvm.fence().unwrap();
        });
        let mut seen = [0; 200];
        nvm.read(40, &mut seen).unwrap();
        assert_eq!(seen, [7; 200], "visible at once");
        let image = recording
            .image(recording.events_len(), Crash::PowerNone)
            .into_world();
        let nvm = image.region("nvm").unwrap();
        nvm.read(40, &mut seen).unwrap();
        assert_eq!(seen == [7; 200], is_kept, "{flaw:?}");
        // Lines that were streamed need the fence alone.
        assert_eq!(seen[24..152] == [7; 128], flaw != Flaw::NoFence, "{flaw:?}");
        let mut word = [0; 8];
        nvm.read(1000, &mut word).unwrap();
        assert_eq!(word == *b"checksum", is_kept, "{flaw:?}");
    }
}

#[test]
fn line_written_back_takes_the_stores_of_other_threads_with_it() {
    use super::Flaw;
    let world = SimWorld::new();
    let nvm = world.add_region("nvm", SimMedium::DaxByStore(Flaw::None), 4096, 4096);
    let (recording, ()) = world.record(|| {
        std::thread::scope(|scope| {
            scope.spawn(|| nvm.write(0, &[1; 8]).unwrap());
        });
        // Stores to the same line, and fences: the other thread never did.
        nvm.write(8, &[2; 8]).unwrap();
        nvm.fence().unwrap();
    });
    let end = recording
        .image(recording.events_len(), Crash::PowerNone)
        .into_world();
    let mut seen = [0; 16];
    end.region("nvm").unwrap().read(0, &mut seen).unwrap();
    // The first thread wrote its line back itself, without a fence: nothing is promised of it.
    assert_eq!(seen[8..], [2; 8]);
}
