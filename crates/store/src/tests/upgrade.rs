//! Versions and features: upgrades that are cut off, features that are not known, old copies of the
//! superblock.
use super::crash::prepared;
use super::faults::{pool_with_a_file, spoil_state};
use super::*;
use crate::StoreError;
use crate::repair::RepairOptions;
use varve_format::superblock::{FORMAT_VERSION, SUPERBLOCK_BLOCKS, Superblock, SuperblockError};
use varve_media::sim::Crash;
use zerocopy::IntoBytes;

/// Writes copies of the superblock, changed.
fn change_superblocks(devices: &Devices, copies: &[u64], change: fn(&mut Superblock)) {
    let mut sb = crate::pool::read_superblock(devices).unwrap();
    change(&mut sb);
    crate::pool::write_superblocks(devices, sb.sealed(), copies).unwrap();
}

/// Makes a version 2 superblock. Programs of version 2 did not look at the zeroed bytes.
fn into_version_2(sb: &mut Superblock) {
    sb.as_mut_bytes()[320..508].fill(0);
    sb.version.set(2);
    sb.sequence.set(41);
}

fn all_of(devices: &Devices) -> Vec<u8> {
    let mut bytes = vec![0; devices.nvm.len_bytes() as usize];
    devices.nvm.read(0, &mut bytes).unwrap();
    bytes
}

/// Upgrades a pool of version 2 with three tiers and records in its journal, cut off everywhere. `spoil`
/// damages a copy of the superblock first.
fn upgrade_everywhere(medium: SimMedium, spoil: Option<u64>) {
    let Rig { world, store } = prepared(medium);
    let before = dump(&store);
    drop(store);
    let devices = devices_of(&world);
    change_superblocks(&devices, &SUPERBLOCK_BLOCKS, into_version_2);
    if let Some(copy) = spoil {
        devices.nvm.write(copy * BLOCK_BYTES, &[0xee; 512]).unwrap();
        devices.nvm.fence().unwrap();
        devices.nvm.sync(0, devices.nvm.len_bytes()).unwrap();
    }
    let (recording, done) = world.record(|| Store::upgrade(&devices));
    assert_eq!(done.unwrap(), 2);
    let (mut images, mut versions) = (0, [0; 2]);
    let mut seen = std::collections::HashSet::new();
    for point in recording.points() {
        let mut crashes = vec![Crash::Kill, Crash::PowerNone, Crash::PowerAll];
        for seed in (0..20).map(|seed| seed * 7919 + point.index as u64) {
            crashes.extend([
                Crash::PowerSeeded(seed),
                Crash::PowerWords(seed),
                Crash::KillTorn(seed),
            ]);
        }
        for crash in crashes {
            let image = recording.image(point.index, crash);
            if !seen.insert(image.content_hash()) {
                continue;
            }
            images += 1;
            let world = image.into_world();
            let devices = devices_of(&world);
            let (version, _) = Store::format_of(&devices).unwrap();
            versions[usize::from(version == FORMAT_VERSION)] += 1;
            let served = open(&world).unwrap();
            assert!(dump(&served) == before, "point {} {crash:?}", point.index);
            drop(served);
            // The next one finishes it.
            assert_eq!(Store::upgrade(&devices).unwrap(), version);
            assert_eq!(Store::format_of(&devices).unwrap().0, FORMAT_VERSION);
            let store = open(&world).unwrap();
            assert_clean(&store);
            assert!(dump(&store) == before);
        }
    }
    println!("{medium:?}: {images} images, {versions:?}");
    // In a file a sector is written whole or not.
    let least = if medium == SimMedium::File { 3 } else { 20 };
    assert!(
        images >= least && versions.iter().all(|count| *count > 0),
        "{images} images, {versions:?}"
    );
}

#[test]
fn upgrade_that_is_cut_off_anywhere_leaves_a_pool_of_either_version() {
    for medium in [SimMedium::Dax, SimMedium::File] {
        upgrade_everywhere(medium, None);
    }
}

#[test]
fn upgrade_of_a_pool_with_one_copy_of_its_superblock_keeps_that_until_the_other_is_written() {
    for copy in SUPERBLOCK_BLOCKS {
        upgrade_everywhere(SimMedium::Dax, Some(copy));
    }
}

#[test]
fn upgrade_of_what_is_new_already_changes_nothing() {
    let rig = Rig::new();
    let devices = devices_of(&rig.world);
    drop(rig.store);
    let before = all_of(&devices);
    assert_eq!(Store::upgrade(&devices).unwrap(), FORMAT_VERSION);
    assert!(all_of(&devices) == before);
}

/// Opening, repairing, upgrading and making a pool there are refused, and change nothing.
fn assert_hands_off(world: &SimWorld, served: bool, word: &str) {
    let devices = devices_of(world);
    let before = all_of(&devices);
    let refused = |error: StoreError| {
        let is_refusal = matches!(&error, StoreError::Superblock { fault, .. } if fault.is_refusal());
        assert!(is_refusal && error.to_string().contains(word), "{error}");
    };
    match Store::open(devices.clone(), OpenOptions::default()) {
        Ok(_) => assert!(served),
        Err(error) => refused(error),
    }
    refused(Store::repair(&devices, RepairOptions::default()).err().unwrap());
    if !word.contains("old one") {
        refused(Store::upgrade(&devices).err().unwrap());
    }
    let mkfs = Store::mkfs(&devices, &MkfsOptions::default()).err().unwrap();
    assert!(mkfs.to_string().contains("use force"), "{mkfs}");
    assert!(all_of(&devices) == before, "{word}");
}

#[test]
fn features_that_are_not_known_are_left_alone() {
    type Case = (fn(&mut Superblock), bool, &'static str);
    let cases: [Case; 4] = [
        (|sb| sb.incompat.set(1 << 4), false, "compression"),
        (|sb| sb.ro_compat.set(1), false, "projects"),
        (|sb| sb.log_incompat.set(1 << 2), false, "dependent_logs"),
        // Served, but not repaired: what it left might be taken for damage.
        (|sb| sb.compat.set(1 << 5), true, "compat 0x20"),
    ];
    for (change, served, word) in cases {
        let (world, _, _) = pool_with_a_file();
        change_superblocks(&devices_of(&world), &SUPERBLOCK_BLOCKS, change);
        assert_hands_off(&world, served, word);
    }
}

/// A pool began to take snapshots; the write of one copy of the superblock was lost, and the other copy went
/// bad.
#[test]
fn old_copy_of_the_superblock_does_not_turn_a_feature_into_damage() {
    let (world, _, at) = pool_with_a_file();
    spoil_state(&world, at, |state| state.features.incompat.set(2));
    let devices = devices_of(&world);
    devices.nvm.write(0, &[0xee; 512]).unwrap();
    assert_hands_off(&world, false, "snapshots): this copy of it is an old one");
    // With the copy that knows, it is the feature that is refused.
    change_superblocks(&devices, &[0], |sb| {
        sb.sequence.set(sb.sequence.get() + 1);
        sb.incompat.set(2);
    });
    let error = open(&world).err().unwrap();
    let features = |fault: &SuperblockError| matches!(fault, SuperblockError::Features(_));
    assert!(
        matches!(&error, StoreError::Superblock { fault, .. } if features(fault)),
        "{error}"
    );
}
