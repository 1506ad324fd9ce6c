//! Several devices of a tier: added, used, taken out; missing and foreign ones; each point of a crash.
use super::crash::{SECOND, assert_found, assert_whole, commit, prepared};
use super::*;
use crate::seeded::{Bug, arm};
use crate::{DeviceUse, StoreError};
use varve_format::BLOCK_SIZE;
use varve_format::device::DeviceLabel;
use varve_media::sim::Crash;

const MORE: [u8; 16] = [5; 16];
const FIRST: [u8; 16] = [6; 16];
/// First number of the device that is added: the first has 8 MiB.
const NUMBER: u64 = 2048;

fn rig() -> Rig {
    let rig = Rig::new();
    rig.world.add_block("ssd-2", 8 << 20);
    rig
}

fn device(world: &SimWorld, name: &str) -> Arc<dyn BlockDevice> {
    world.block(name).unwrap()
}

fn added() -> Rig {
    let rig = rig();
    rig.store
        .add_device(Tier::Ssd, &device(&rig.world, "ssd-2"), MORE)
        .unwrap();
    rig
}

fn write(store: &Store, name: &str, bytes: &[u8], target: DataTarget) -> Result<Ino> {
    let mut tx = store.begin_with_room()?;
    let ino = make(&mut tx, ROOT_INO, name, 0o100_644)?.ino;
    tx.write_bytes(ino, &[(0, bytes)], target)?;
    tx.commit()?;
    Ok(ino)
}

/// Blocks in use on each device of the SSD tier.
fn used(store: &Store) -> Vec<u64> {
    let listed = store.device_list().unwrap();
    let ssds = listed.iter().filter(|device| device.tier == Tier::Ssd);
    ssds.map(|device| device.used()).collect()
}

/// Moves everything off the device with these numbers; other devices of the tier take it.
fn empty(store: &Store, number: u64, blocks: u64) {
    for ino in 1..200 {
        let Ok(inode) = store.get(Ino(ino)) else { continue };
        if !matches!(inode.content, Content::File(_)) {
            continue;
        }
        for extent in store.map(Ino(ino), FileBlock(0), 10_000).unwrap() {
            if extent.tier != Tier::Ssd || !(number..number + blocks).contains(&extent.block.0) {
                continue;
            }
            let mut tx = store.begin_with_room().unwrap();
            let place = (Tier::Ssd, extent.block);
            let to = DataTarget::only(Tier::Ssd);
            assert!(
                tx.migrate(Ino(ino), extent.file_block, extent.len, place, to)
                    .unwrap()
            );
            tx.commit().unwrap();
        }
    }
}

#[test]
fn added_device_takes_its_part_and_all_is_there_after_a_reopen() {
    let mut rig = added();
    let before = rig.store.space().tiers[Tier::Ssd as usize];
    for number in 0..12 {
        write(&rig.store, &format!("f{number}"), &pattern(500_000, number), SSD).unwrap();
    }
    let [one, other] = used(&rig.store)[..] else {
        panic!("two devices")
    };
    // 2048 and 1984 blocks: nearly equal parts.
    assert!(
        one + other > 12 * 122 && one.abs_diff(other) < 120,
        "{one} and {other} blocks"
    );
    assert_clean(&rig.store);
    rig = rig.reopen();
    assert_eq!(used(&rig.store), [one, other]);
    let after = rig.store.space().tiers[Tier::Ssd as usize];
    assert_eq!(before.total, after.total);
    for number in 0..12 {
        let mut tx = rig.store.begin().unwrap();
        assert_eq!(
            unlink(&mut tx, ROOT_INO, &format!("f{number}")).unwrap(),
            Progress::Done
        );
        tx.commit().unwrap();
    }
    rig.store.checkpoint().unwrap();
    assert_eq!(used(&rig.store), [0, 0]);
    rig.reopen();
}

#[test]
fn larger_device_takes_a_larger_part() {
    let rig = Rig::new();
    rig.world.add_block("ssd-2", 25 << 20);
    rig.store
        .add_device(Tier::Ssd, &device(&rig.world, "ssd-2"), MORE)
        .unwrap();
    for number in 0..16 {
        write(&rig.store, &format!("f{number}"), &pattern(1 << 20, number), SSD).unwrap();
    }
    let used = used(&rig.store);
    let ratio = used[1] as f64 / used[0] as f64;
    assert!((2.5..3.7).contains(&ratio), "{used:?}");
    assert_clean(&rig.store);
    rig.reopen();
}

#[test]
fn full_tier_of_two_devices_is_used_to_its_end() {
    let rig = added();
    let only = DataTarget::only(Tier::Ssd).with_reserve();
    let mut number = 0;
    let full = loop {
        match write(&rig.store, &format!("f{number}"), &pattern(100_000, number), only) {
            Ok(_) => number += 1,
            Err(error) => break error,
        }
    };
    assert!(full.is_no_space(), "{full}");
    let stats = rig.store.space().tiers[Tier::Ssd as usize];
    assert!(stats.free < 60, "{stats:?}");
    assert_clean(&rig.store);
    rig.reopen();
}

#[test]
fn emptied_device_takes_nothing_and_is_taken_out_when_nothing_is_read() {
    let rig = added();
    let mut before = BTreeMap::new();
    for number in 0..8 {
        let bytes = pattern(300_000, number);
        let ino = write(&rig.store, &format!("f{number}"), &bytes, SSD).unwrap();
        before.insert(ino, bytes);
    }
    let taken = rig.store.take_out(Tier::Ssd, NUMBER);
    assert!(matches!(taken, Err(StoreError::NotFound)), "{taken:?}");
    rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
    let again = rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0);
    assert!(matches!(again, Err(StoreError::Exists)), "{again:?}");
    let last = rig.store.start_emptying(Tier::Ssd, 0, FIRST, 0);
    assert!(matches!(last, Err(StoreError::Invalid(_))), "{last:?}");
    let [_, on_it] = used(&rig.store)[..] else {
        panic!()
    };
    write(&rig.store, "g", &pattern(300_000, 99), SSD).unwrap();
    assert_eq!(used(&rig.store)[1], on_it, "it takes nothing new");
    assert!(!rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    let rig = rig.reopen();
    // A session may still read what moves.
    rig.store.set_reader_horizon(rig.store.newest_tx());
    empty(&rig.store, NUMBER, 1984);
    assert_eq!(used(&rig.store)[1], 0);
    assert!(!rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    rig.store.set_reader_horizon(varve_format::TxId(u64::MAX));
    assert!(rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    assert_clean(&rig.store);
    let listed = rig.store.device_list().unwrap();
    assert_eq!(listed[1].state, DeviceUse::Gone);
    let again = rig.store.cancel_emptying(Tier::Ssd, NUMBER);
    assert!(matches!(again, Err(StoreError::NotFound)), "{again:?}");
    write(&rig.store, "h", &pattern(300_000, 98), SSD).unwrap();
    let rig = rig.reopen();
    for (ino, bytes) in &before {
        let mut read = vec![0; bytes.len()];
        rig.store.read(*ino, 0, &mut read).unwrap();
        assert_eq!(read, *bytes);
    }
    // Its label is away, and another one gets the numbers after it.
    let ssd = device(&rig.world, "ssd-2");
    let mut first = vec![0; 4096];
    ssd.read(0, &mut first).unwrap();
    assert_eq!(DeviceLabel::read(&first), None);
    rig.store.add_device(Tier::Ssd, &ssd, [8; 16]).unwrap();
    assert_eq!(rig.store.device_list().unwrap()[2].numbers.0, NUMBER + 1984);
    write(&rig.store, "i", &pattern(900_000, 97), SSD).unwrap();
    assert!(used(&rig.store)[2] > 50);
    rig.reopen();
}

/// What the jobs are: their numbers, objects, limits, bytes moved, and whether they are paused.
fn jobs(store: &Store) -> Vec<(u64, crate::Emptied, u64, u64, bool)> {
    let told = |job: crate::JobRow| {
        let row = job.row;
        let (limit, moved) = (row.limit_bytes_per_s.get(), row.moved_bytes.get());
        (row.job.get(), job.of, limit, moved, row.is_paused())
    };
    store.jobs().unwrap().into_iter().map(told).collect()
}

#[test]
fn job_of_a_device_lasts_until_it_is_cancelled_or_the_device_is_out() {
    let mut rig = added();
    let of = crate::Emptied::Device {
        tier: Tier::Ssd,
        first: NUMBER,
    };
    assert_eq!(rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 7).unwrap(), 1);
    assert_eq!(rig.store.start_evacuation(Tier::Hdd, 8).unwrap(), 2);
    rig.store
        .change_evacuation(1, &mut |row| {
            row.paused = 1;
            row.limit_bytes_per_s.set(5);
        })
        .unwrap();
    let mut tx = rig.store.begin().unwrap();
    tx.note_evacuated(of, 4096).unwrap();
    tx.commit().unwrap();
    rig = rig.reopen();
    let of_hdd = (2, crate::Emptied::Tier(Tier::Hdd), 0, 0, false);
    assert_eq!(jobs(&rig.store), [of_hdd, (1, of, 5, 4096, true)]);
    rig.store.cancel_emptying(Tier::Ssd, NUMBER).unwrap();
    assert_eq!(jobs(&rig.store), [of_hdd]);
    let missing = rig.store.change_evacuation(1, &mut |_| panic!("there is none"));
    assert!(matches!(missing, Err(StoreError::NotFound)), "{missing:?}");
    assert_eq!(rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 9).unwrap(), 3);
    assert_eq!(jobs(&rig.store)[1], (3, of, 0, 0, false));
    assert!(rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    assert_eq!(jobs(&rig.store), [of_hdd]);
    rig = rig.reopen();
    assert_eq!(jobs(&rig.store), [of_hdd]);
}

#[test]
fn device_that_is_emptied_without_a_job_gets_one() {
    let mut rig = added();
    rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
    // As a repaired pool state has it.
    rig.store
        .change_evacuation(1, &mut |row| *row = Default::default())
        .unwrap();
    rig = rig.reopen();
    assert_eq!(jobs(&rig.store), []);
    rig.store.adopt_removals(5).unwrap();
    rig.store.adopt_removals(6).unwrap();
    let found = jobs(&rig.store);
    assert_eq!((found.len(), found[0].0), (1, 2));
    rig = rig.reopen();
    assert_eq!(jobs(&rig.store), found);
}

#[test]
fn first_device_of_a_tier_is_taken_out_too() {
    let rig = added();
    for number in 0..6 {
        write(&rig.store, &format!("f{number}"), &pattern(300_000, number), SSD).unwrap();
    }
    rig.store.start_emptying(Tier::Ssd, 0, FIRST, 0).unwrap();
    empty(&rig.store, 0, NUMBER);
    assert!(rig.store.take_out(Tier::Ssd, 0).unwrap());
    let before = dump(&rig.store);
    let Rig { world, store } = rig;
    drop(store);
    let devices = Devices {
        ssd: None,
        ..devices_of(&world)
    };
    let (store, _) = Store::open(devices.clone(), OpenOptions::default()).unwrap();
    assert_eq!(dump(&store), before);
    assert_clean(&store);
    write(&store, "g", &pattern(300_000, 50), SSD).unwrap();
    assert_clean(&store);
    drop(store);
    let report = Store::repair(&devices, Default::default()).unwrap();
    assert!(report.losses.is_empty() && report.left.is_empty(), "{report:?}");
}

#[test]
fn emptied_device_takes_what_fits_nowhere_else() {
    let rig = added();
    rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
    let mut number = 0;
    loop {
        let wrote = write(&rig.store, &format!("f{number}"), &pattern(1 << 20, number), SSD);
        if wrote.is_err() {
            break;
        }
        number += 1;
        assert!(number < 80);
    }
    assert!(used(&rig.store)[1] > 1000, "{:?}", used(&rig.store));
    assert_clean(&rig.store);
    rig.store.cancel_emptying(Tier::Ssd, NUMBER).unwrap();
    assert_eq!(rig.store.device_list().unwrap()[1].state, DeviceUse::InUse);
    rig.reopen();
}

fn refusal(devices: &Devices) -> String {
    let error = Store::open(devices.clone(), OpenOptions::default())
        .map(drop)
        .unwrap_err();
    // Nor is it repaired.
    let repair = Store::repair(devices, Default::default()).map(drop).unwrap_err();
    assert_eq!(error.to_string(), repair.to_string());
    error.to_string()
}

#[test]
fn missing_wrong_foreign_and_small_devices_are_named() {
    let rig = added();
    write(&rig.store, "f", &pattern(2 << 20, 1), SSD).unwrap();
    let Rig { world, store } = rig;
    drop(store);
    let whole = devices_of(&world);
    let ssd2 = device(&world, "ssd-2");
    let given = |more: Vec<(Tier, Arc<dyn BlockDevice>)>| Devices {
        more,
        ..whole.clone()
    };
    let uuid = "05050505-0505-0505-0505-050505050505";
    let before: Vec<u8> = all_bytes(&world);

    let missing = refusal(&given(Vec::new()));
    assert!(missing.contains("missing") && missing.contains(uuid), "{missing}");
    world.add_block("blank", 8 << 20);
    let blank = refusal(&given(vec![(Tier::Ssd, device(&world, "blank"))]));
    assert!(blank.contains("blank has no label"), "{blank}");
    let tier = refusal(&given(vec![(Tier::Hdd, Arc::clone(&ssd2))]));
    assert!(
        tier.contains("its label says that it is of the ssd tier"),
        "{tier}"
    );

    let mut label = vec![0; 4096];
    ssd2.read(0, &mut label).unwrap();
    let copy = device(&world, "blank");
    copy.write(0, &label).unwrap();
    let twice = refusal(&given(vec![
        (Tier::Ssd, Arc::clone(&ssd2)),
        (Tier::Ssd, Arc::clone(&copy)),
    ]));
    assert!(twice.contains("one is a copy of the other"), "{twice}");
    world.add_block("small", 4 << 20);
    device(&world, "small").write(0, &label).unwrap();
    let small = refusal(&given(vec![(Tier::Ssd, device(&world, "small"))]));
    assert!(small.contains("has become smaller"), "{small}");
    let swapped = Devices {
        ssd: Some(Arc::clone(&ssd2)),
        more: vec![(Tier::Ssd, device(&world, "ssd"))],
        ..whole.clone()
    };
    let swapped = refusal(&swapped);
    assert!(swapped.contains("put it after the first"), "{swapped}");

    let foreign = {
        let mut other = DeviceLabel::read(&label).unwrap();
        other.pool_uuid = [1; 16];
        let bytes = zerocopy::IntoBytes::as_bytes(&other).to_vec();
        let crc = crc32c::crc32c(&bytes[..84]);
        let mut block = vec![0; 4096];
        block[..84].copy_from_slice(&bytes[..84]);
        block[84..88].copy_from_slice(&crc.to_le_bytes());
        block
    };
    copy.write(0, &foreign).unwrap();
    let foreign = refusal(&given(vec![(Tier::Ssd, Arc::clone(&copy))]));
    assert!(foreign.contains("the label of another pool"), "{foreign}");

    assert_eq!(all_bytes(&world), before, "a refusal changes nothing");
    let store = open(&world).unwrap();
    assert_clean(&store);
}

#[test]
fn first_device_of_another_pool_is_refused_and_a_new_one_is_not() {
    let filled = |seed: u64| {
        let rig = Rig::new();
        for number in 0..4_u64 {
            write(
                &rig.store,
                &format!("f{number}"),
                &pattern(500_000, seed + number),
                SSD,
            )
            .unwrap();
        }
        assert_clean(&rig.store);
        rig.world
    };
    let (ours, other) = (filled(1), filled(100));
    let (whole, before, others) = (devices_of(&ours), all_bytes(&ours), all_bytes(&other));
    let given = |ssd: Arc<dyn BlockDevice>| Devices {
        ssd: Some(ssd),
        ..whole.clone()
    };
    let foreign = refusal(&given(device(&other, "ssd")));
    assert!(
        foreign.contains("is not the ssd of this pool") && foreign.contains("/dev/disk/by-id"),
        "{foreign}"
    );
    assert_eq!(
        (all_bytes(&ours), all_bytes(&other)),
        (before, others),
        "a refusal changes nothing"
    );
    // What was on a device that was lost cannot be read, and the rest can.
    ours.add_block("new", 8 << 20);
    let (store, _) = Store::open(given(device(&ours, "new")), OpenOptions::default()).unwrap();
    assert!(!store.check_data().unwrap().is_empty());
    drop(store);
    assert_clean(&open(&ours).unwrap());
    // A repair that is told to goes on, and the pool can be used with that device.
    let options = crate::repair::RepairOptions {
        any_device: true,
        ..crate::repair::RepairOptions::default()
    };
    let report = Store::repair(&given(device(&other, "ssd")), options).unwrap();
    assert_eq!(report.left, []);
    for number in 0..4_u64 {
        let path = format!("/f{number}");
        let named = |loss: &crate::repair::Loss| loss.path.as_deref() == Some(path.as_bytes());
        assert!(report.losses.iter().any(named), "{path}: {:?}", report.losses);
    }
    let (store, _) = Store::open(given(device(&other, "ssd")), OpenOptions::default()).unwrap();
    assert_eq!(store.check().unwrap(), []);
    // What is the other pool's is never shown.
    for number in 0..4_u64 {
        let name = format!("f{number}");
        let ino = store
            .dir_lookup(ROOT_INO, name.as_bytes())
            .unwrap()
            .unwrap()
            .key
            .ino;
        let (own, foreign) = (pattern(500_000, 1 + number), pattern(500_000, 100 + number));
        for block in 0..500_000 / BLOCK_SIZE {
            let at = block * BLOCK_SIZE;
            let mut bytes = vec![0; BLOCK_SIZE];
            let read = store.read(ino, at as u64, &mut bytes);
            let range = at..at + BLOCK_SIZE;
            assert!(read.is_err() || bytes != foreign[range.clone()] || own[range.clone()] == foreign[range]);
        }
    }
}

#[test]
fn unit_of_another_time_is_not_taken_for_verified_by_its_own_footer() {
    let filled = |seed: u64| {
        let rig = Rig::new();
        for number in 0..4_u64 {
            let bytes = pattern(500_000, seed + number);
            write(&rig.store, &format!("f{number}"), &bytes, SSD).unwrap();
        }
        (rig.store.layout.unit_blocks(Tier::Ssd) * BLOCK_BYTES, rig.world)
    };
    let ((unit_bytes, ours), (_, other)) = (filled(1), filled(100));
    let mut unit = vec![0; unit_bytes as usize];
    device(&other, "ssd").read(0, &mut unit).unwrap();
    let ssd = device(&ours, "ssd");
    ssd.write(0, &unit).unwrap();
    ssd.flush().unwrap();
    // One alone is no sign of another pool's device.
    let report = Store::repair(&devices_of(&ours), crate::repair::RepairOptions::default()).unwrap();
    assert_eq!(report.left, []);
    let doubted = report
        .losses
        .iter()
        .filter_map(|loss| loss.bytes.filter(|_| loss.what.contains("of another time")));
    let blocks: u64 = doubted.map(|(from, to)| (to - from).div_ceil(BLOCK_BYTES)).sum();
    assert!(blocks > 50, "{:?}", report.losses);
    assert_clean(&open(&ours).unwrap());
}

/// The bytes of the pool's media, but for the journal.
fn all_bytes(world: &SimWorld) -> Vec<u8> {
    let nvm = world.region("nvm").unwrap();
    let mut bytes = vec![0; NVM_BYTES as usize];
    varve_media::Region::read(&*nvm, 0, &mut bytes).unwrap();
    for device in ["ssd", "ssd-2"].into_iter().filter_map(|name| world.block(name)) {
        let mut device_bytes = vec![0; 8 << 20];
        device.read(0, &mut device_bytes).unwrap();
        bytes.extend(device_bytes);
    }
    bytes
}

#[test]
fn devices_that_do_not_fit_are_not_added() {
    let rig = rig();
    let ssd2 = device(&rig.world, "ssd-2");
    rig.world.add_block("tiny", (2 * SSD_UNIT - 1) * BLOCK_BYTES);
    let small = rig
        .store
        .add_device(Tier::Ssd, &device(&rig.world, "tiny"), MORE)
        .unwrap_err();
    assert!(small.to_string().contains("one unit for its label"), "{small}");
    let nvm = rig.store.add_device(Tier::Nvm, &ssd2, MORE).unwrap_err();
    assert!(nvm.to_string().contains("no nvm tier"), "{nvm}");
    rig.store.add_device(Tier::Ssd, &ssd2, MORE).unwrap();
    let again = rig.store.add_device(Tier::Ssd, &ssd2, MORE);
    assert!(matches!(again, Err(StoreError::Exists)), "{again:?}");
    assert_clean(&rig.store);
}

/// The second SSD of the pool under test, which does not know it yet.
fn second() -> Arc<dyn BlockDevice> {
    SECOND
        .with_borrow(|second| second.clone())
        .expect("`prepared` has set it")
}

fn put(store: &Store, name: &str, seed: u64) -> Result<()> {
    let mut tx = store.begin_with_room()?;
    let ino = make(&mut tx, ROOT_INO, name, 0o100_644)?.ino;
    tx.write_bytes(ino, &[(0, &pattern(30_000, seed))], SSD)?;
    commit(tx, store)
}

/// A device is added, both are written, one is emptied, and taken out.
fn life(store: &Store) -> Result<()> {
    store.add_device(Tier::Ssd, &second(), MORE)?;
    put(store, "one", 1)?;
    put(store, "two", 2)?;
    store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0)?;
    empty(store, NUMBER, 10_000);
    store.checkpoint()?;
    assert!(store.take_out(Tier::Ssd, NUMBER)?);
    put(store, "three", 3)
}

/// The first device of the tier goes.
fn first_goes(store: &Store) -> Result<()> {
    store.add_device(Tier::Ssd, &second(), MORE)?;
    put(store, "one", 1)?;
    store.start_emptying(Tier::Ssd, 0, FIRST, 0)?;
    empty(store, 0, NUMBER);
    store.checkpoint()?;
    assert!(store.take_out(Tier::Ssd, 0)?);
    put(store, "two", 2)
}

fn only_add(store: &Store) -> Result<()> {
    store.add_device(Tier::Ssd, &second(), MORE)?;
    put(store, "one", 1)
}

#[test]
fn every_crash_of_a_device_that_comes_and_goes_is_whole() {
    assert_whole([(SimMedium::Dax, 2, 1), (SimMedium::File, 1, 2)], life);
}

#[test]
fn every_crash_while_the_first_device_goes_is_whole() {
    assert_whole([(SimMedium::Dax, 1, 2), (SimMedium::File, 1, 3)], first_goes);
}

#[test]
fn row_before_the_label_is_found() {
    assert_found(Bug::RowBeforeLabel, SimMedium::Dax, only_add, 1);
}

#[test]
fn label_that_is_not_flushed_is_found() {
    assert_found(Bug::LabelNotFlushed, SimMedium::Dax, only_add, 1);
}

#[test]
fn feature_that_is_not_in_the_superblock_is_found() {
    assert_found(Bug::DevicesNotInSuperblock, SimMedium::Dax, only_add, 1);
}

#[test]
fn flush_of_one_device_only_is_found() {
    assert_found(Bug::OneDeviceFlushed, SimMedium::Dax, life, 1);
}

#[test]
fn device_that_is_taken_out_while_it_is_read_is_found() {
    for (bug, taken) in [(None, false), (Some(Bug::TakenOutWhileRead), true)] {
        let rig = added();
        write(&rig.store, "f", &pattern(3 << 20, 1), SSD).unwrap();
        rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
        rig.store.set_reader_horizon(rig.store.newest_tx());
        empty(&rig.store, NUMBER, 1984);
        arm(bug);
        let took = rig.store.take_out(Tier::Ssd, NUMBER);
        arm(None);
        assert_eq!(took.unwrap(), taken, "{bug:?}");
    }
}

#[test]
fn device_is_added_again_after_any_crash() {
    let rig = prepared(SimMedium::Dax);
    let (recording, result) = rig.world.record(|| only_add(&rig.store));
    result.unwrap();
    let (mut with, mut without) = (0, 0);
    for point in recording.points() {
        for crash in [
            Crash::Kill,
            Crash::PowerNone,
            Crash::PowerSeeded(point.index as u64),
        ] {
            let world = recording.image(point.index, crash).into_world();
            let store = open(&world).unwrap();
            if store.device_list().unwrap().len() == 2 {
                without += 1;
                let second = device(&world, "ssd-2");
                // As the first free block was, so may the tables' be another file's by now.
                write(&store, "meanwhile", &pattern(200_000, 3), NVM).unwrap();
                store.add_device(Tier::Ssd, &second, [9; 16]).unwrap();
            } else {
                with += 1;
            }
            write(&store, "after", &pattern(100_000, 4), SSD).unwrap();
            assert_clean(&store);
            let before = dump(&store);
            drop(store);
            let store = open(&world).unwrap();
            assert_eq!(dump(&store), before);
            assert_clean(&store);
        }
    }
    assert!(with > 5 && without > 5, "{with} with it, {without} without");
}

#[test]
fn device_that_fails_fails_alone() {
    use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
    for op in [FaultOp::Write, FaultOp::Flush] {
        let rig = added();
        let old = write(&rig.store, "old", &pattern(600_000, 1), SSD).unwrap();
        let Rig { world, store } = rig;
        drop(store);
        let script = FaultScript::new();
        let faulty = FaultyDevice::new(device(&world, "ssd-2"), script.clone());
        let devices = Devices {
            more: vec![(Tier::Ssd, Arc::new(faulty) as _)],
            ..devices_of(&world)
        };
        let (store, _) = Store::open(devices, OpenOptions::default()).unwrap();
        script.push(FaultRule::always(op, Fault::Errno(5)));
        let lost = write(&store, "lost", &pattern(900_000, 2), SSD).unwrap_err();
        assert!(lost.is_device_lost() && !lost.stops_writing(), "{lost}");
        assert_eq!(store.latched(), None);
        let on_it = used(&store)[1];
        let again = write(&store, "again", &pattern(900_000, 3), SSD).unwrap();
        assert_eq!(used(&store)[1], on_it, "{op:?}");
        let failed: Vec<bool> = store
            .device_list()
            .unwrap()
            .iter()
            .map(|device| device.failed.is_some())
            .collect();
        assert_eq!(failed, [false, true, false]);
        let last = store.start_emptying(Tier::Ssd, 0, FIRST, 0);
        assert!(matches!(last, Err(StoreError::Invalid(_))), "{last:?}");
        // What lies there is read as well as it can be, and freed.
        script.clear();
        script.push(FaultRule::always(FaultOp::Read, Fault::Errno(5)));
        let mut bytes = vec![0; 600_000];
        let unread = store.read(old, 0, &mut bytes).unwrap_err();
        assert!(unread.is_failed_read(), "{unread}");
        script.clear();
        store.read(old, 0, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(600_000, 1));
        let mut bytes = vec![0; 900_000];
        store.read(again, 0, &mut bytes).unwrap();
        assert_eq!(bytes, pattern(900_000, 3));
        assert_clean(&store);
        // The last device of a tier that takes writes latches the pool, as the only one does.
        let mut tx = store.begin().unwrap();
        assert_eq!(unlink(&mut tx, ROOT_INO, "old").unwrap(), Progress::Done);
        tx.commit().unwrap();
        assert_clean(&store);
        drop(store);
        let store = open(&world).unwrap();
        assert_eq!(store.device_list().unwrap()[1].failed, None);
        assert_clean(&store);
    }
}

#[test]
fn damaged_tables_of_an_added_device_are_mended() {
    let rig = added();
    for number in 0..4 {
        write(&rig.store, &format!("f{number}"), &pattern(900_000, number), SSD).unwrap();
    }
    rig.store.checkpoint().unwrap();
    let before = dump(&rig.store);
    let tables: Vec<u64> = rig.store.layout.tables_among_data().collect();
    let rows = rig.store.layout.device_table().unwrap();
    let state = rig.store.layout.sb.state.start.get();
    let Rig { world, store } = rig;
    drop(store);
    let nvm = world.region("nvm").unwrap();
    for block in tables.into_iter().chain([state]) {
        let mut kept = vec![0; NVM_BYTES as usize];
        varve_media::Region::read(&*nvm, 0, &mut kept).unwrap();
        let at = block * BLOCK_BYTES + 100;
        varve_media::Region::write(&*nvm, at, &[kept[at as usize] ^ 0xff]).unwrap();
        let repaired = Store::repair(&devices_of(&world), Default::default());
        if (rows.start.get()..rows.end()).contains(&block) {
            let refused = repaired.map(drop).unwrap_err().to_string();
            assert!(refused.contains("the table of the pool's devices"), "{refused}");
        } else {
            let report = repaired.unwrap();
            assert!(report.left.is_empty() && !report.mended.is_empty(), "{report:?}");
            let store = open(&world).unwrap();
            let mut after = dump(&store);
            after.insert("sessions".into(), before["sessions"].clone());
            assert_eq!(after, before, "block {block}");
            assert_clean(&store);
        }
        varve_media::Region::write(&*nvm, 0, &kept).unwrap();
    }
}

/// Returns `to` with some of the words of it that differ from `from` as they are there.
fn mixtures(from: &[u8], to: &[u8]) -> Vec<Vec<u8>> {
    let differ = (0..from.len())
        .step_by(8)
        .filter(|at| from[*at..*at + 8] != to[*at..*at + 8]);
    let words: Vec<_> = differ.collect();
    let mix = |set: u32| {
        let mut bytes = to.to_vec();
        for (_, word) in words
            .iter()
            .enumerate()
            .filter(|(index, _)| set >> index & 1 == 1)
        {
            bytes[*word..*word + 8].copy_from_slice(&from[*word..*word + 8]);
        }
        bytes
    };
    (0..1 << words.len()).map(mix).collect()
}

#[test]
fn copy_of_the_superblock_that_a_crash_tore_while_a_device_was_added_is_written_anew() {
    use varve_media::Region;
    let rig = rig();
    let nvm = rig.world.region("nvm").unwrap();
    let read = || {
        let mut bytes = vec![0; 512];
        nvm.read(0, &mut bytes).unwrap();
        bytes
    };
    let old = read();
    rig.store
        .add_device(Tier::Ssd, &device(&rig.world, "ssd-2"), MORE)
        .unwrap();
    let new = read();
    let Rig { world, store } = rig;
    drop(store);
    let mut state = vec![0; NVM_BYTES as usize];
    nvm.read(0, &mut state).unwrap();
    let put = |at: u64, bytes: &[u8]| nvm.write(at * BLOCK_BYTES, bytes).unwrap();
    let mut between = old.clone();
    between[16..24].copy_from_slice(&new[16..24]);
    between[320..328].copy_from_slice(&new[320..328]);
    let steps = [(&old, &between), (&between, &new)].map(|(from, to)| mixtures(from, to));
    assert_eq!(steps.each_ref().map(Vec::len), [4, 8]);
    for torn in steps.iter().flatten() {
        // The first copy is written, then the other; before the record, then after it.
        put(0, &new);
        put(1, torn);
        assert_clean(&open(&world).unwrap());
        assert_eq!(read(), new);
        put(1, &old);
        put(0, torn);
        let opened = open(&world).map(|store| store.check().unwrap());
        // The pool state has the feature already here: a whole old copy alone is a stale one.
        match opened {
            Ok(findings) => assert_eq!(findings, []),
            Err(error) => assert!(
                error.to_string().contains("this copy of it is an old one"),
                "{error}"
            ),
        }
        nvm.write(0, &state).unwrap();
    }
}

#[test]
fn transaction_that_ends_beside_an_addition_leaves_no_open_unit() {
    let rig = rig();
    let mut space = rig.store.space.lock();
    // It began before the device was there, opened a unit on it, and was given up.
    let saved = space.save();
    space.add_lane(Tier::Ssd, 1984);
    let before = space.lane_blocks(Tier::Ssd, 1);
    space.set_open(Tier::Ssd, 1, Some(NUMBER / SSD_UNIT));
    let span = space.alloc_unit(Tier::Ssd, 1, 5).unwrap();
    space.restore(saved, &[span]);
    assert_eq!(space.alloc_unit(Tier::Ssd, 1, 1), None);
    assert_eq!(space.lane_blocks(Tier::Ssd, 1), before);
    let next = space.next_unit(Tier::Ssd, 1, false);
    assert_eq!(
        next,
        Some(crate::space::NextUnit::Empty(NUMBER / SSD_UNIT)),
        "from its start"
    );
}

#[test]
fn device_whose_room_was_promised_is_not_taken_out() {
    let rig = added();
    let promised = rig.store.space().available;
    rig.store.reserve(promised).unwrap();
    rig.store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
    assert_eq!(used(&rig.store)[1], 0);
    assert!(!rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    rig.store.unreserve(promised);
    assert!(rig.store.take_out(Tier::Ssd, NUMBER).unwrap());
    rig.reopen();
}

#[test]
fn device_that_was_taken_out_is_let_go_and_fails_alone_when_it_comes_again() {
    use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
    let Rig { world, store } = rig();
    let script = FaultScript::new();
    let faulty =
        || -> Arc<dyn BlockDevice> { Arc::new(FaultyDevice::new(device(&world, "ssd-2"), script.clone())) };
    let first = faulty();
    store.add_device(Tier::Ssd, &first, MORE).unwrap();
    store.start_emptying(Tier::Ssd, NUMBER, FIRST, 0).unwrap();
    assert!(store.take_out(Tier::Ssd, NUMBER).unwrap());
    assert_eq!(Arc::strong_count(&first), 1, "it is closed");
    store.add_device(Tier::Ssd, &faulty(), [8; 16]).unwrap();
    script.push(FaultRule::always(FaultOp::Write, Fault::Errno(5)));
    let lost = write(&store, "lost", &pattern(900_000, 2), SSD).unwrap_err();
    assert!(lost.is_device_lost(), "{lost}");
    let failed: Vec<bool> = store
        .device_list()
        .unwrap()
        .iter()
        .filter(|device| device.tier == Tier::Ssd)
        .map(|device| device.failed.is_some())
        .collect();
    assert_eq!(failed, [false, false, true]);
    write(&store, "again", &pattern(900_000, 3), SSD).unwrap();
    assert_clean(&store);
}

#[test]
fn label_that_cannot_be_read_matters_only_if_its_device_does() {
    use varve_media::faulty::{Fault, FaultOp, FaultRule, FaultScript, FaultyDevice};
    let Rig { world, store } = added();
    drop(store);
    let script = FaultScript::new();
    script.push(FaultRule::always(FaultOp::Read, Fault::Errno(5)));
    let bad = |name: &str| -> (Tier, Arc<dyn BlockDevice>) {
        let faulty = FaultyDevice::new(device(&world, name), script.clone());
        (Tier::Ssd, Arc::new(faulty) as _)
    };
    let whole = devices_of(&world);
    let mut devices = whole.clone();
    world.add_block("other", 8 << 20);
    devices.more.push(bad("other"));
    Store::open(devices, OpenOptions::default()).unwrap();
    let devices = Devices {
        more: vec![bad("ssd-2")],
        ..whole
    };
    let missing = refusal(&devices);
    assert!(missing.contains("ssd-2 cannot be read"), "{missing}");
}

#[test]
fn damaged_pool_state_and_rows_are_not_taken_for_a_pool_without_rows() {
    let rig = added();
    write(&rig.store, "f", &pattern(2 << 20, 1), SSD).unwrap();
    rig.store.checkpoint().unwrap();
    let rows = rig.store.layout.device_table().unwrap();
    let state = rig.store.layout.sb.state.start.get();
    let Rig { world, store } = rig;
    drop(store);
    let nvm = world.region("nvm").unwrap();
    for block in [state, rows.start.get()] {
        let at = block * BLOCK_BYTES + 100;
        let mut byte = [0];
        varve_media::Region::read(&*nvm, at, &mut byte).unwrap();
        varve_media::Region::write(&*nvm, at, &[byte[0] ^ 0xff]).unwrap();
    }
    let refused = Store::repair(&devices_of(&world), Default::default())
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(refused.contains("the table of the pool's devices"), "{refused}");
}
