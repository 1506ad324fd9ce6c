//! Heaps that are not restored, and why; files that fail.

use crate::common::{at, load, store};
use crate::recorded::Recorded;
use crate::{TAG, config, create, numbers_of, record_of};
use std::fs::File;
use std::path::{Path, PathBuf};
use varve_far_alloc::{CheckpointFile as _, Config, Error, FarAlloc, RECORD_MAX_BYTES};
use varve_far_objects::{CHECKPOINT_VERSION, Error as StoreError, FarHeap, Refusal, SlotsHeap};

const SLABS: u32 = 40;

fn refusal<T>(result: Result<T, Error>) -> Refusal {
    match result {
        Err(Error::Objects(StoreError::Refused { reason, .. })) => reason,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("taken"),
    }
}

/// A file with some memory of all kinds, and what it is to hold.
fn small() -> Option<Recorded> {
    let file = Recorded::default();
    let heap = create(file.clone(), SLABS)?;
    let (one, array) = (heap.oalloc(1, 40).unwrap(), heap.oalloc(600, 200).unwrap());
    let (bytes, other) = (heap.malloc(9000).unwrap(), heap.malloc(50).unwrap());
    let gone = heap.oalloc(1, 40).unwrap();
    for (at, len) in [(one, 40), (array, 200), (bytes, 9000), (other, 50)] {
        (0..len).for_each(|index| store(at, index, index as u8));
    }
    let record = record_of(&[one, array, bytes, other].map(|at| at.addr().get() as u64));
    heap.checkpoint(&record).unwrap();
    heap.free(gone).unwrap();
    store(bytes, 5000, 1);
    heap.checkpoint(&record).unwrap();
    Some(file)
}

fn check(record: &[u8]) {
    let [one, array, bytes, other] = *numbers_of(record).first_chunk().unwrap();
    for (name, len) in [(one, 40), (array, 200), (bytes, 9000), (other, 50)] {
        for index in 0..len {
            let is = load(at(name as usize), index);
            assert!(
                is == index as u8 || (index == 5000 && is == 1),
                "byte {index} of {len}"
            );
        }
    }
}

#[test]
fn restored_heap_goes_on_again_and_again() {
    let Some(file) = small() else { return };
    for round in 0..4u8 {
        let (heap, record) = FarAlloc::restore(file.clone(), TAG, &config()).unwrap();
        check(&record);
        let names = numbers_of(&record);
        if round > 0 {
            let last = at(names[4] as usize);
            assert_eq!(load(last, 0), round - 1);
            assert!(matches!(
                heap.realloc(at(names[0] as usize), 10),
                Err(Error::FixedSize(_))
            ));
            heap.free(last).unwrap();
            assert!(matches!(heap.free(last), Err(Error::NotAllocated(_))));
        }
        let more = if round % 2 == 0 {
            heap.malloc(3000)
        } else {
            heap.oalloc(1, 20)
        }
        .unwrap();
        store(more, 0, round);
        let record = record_of(&[&names[..4], &[more.addr().get() as u64]].concat());
        heap.checkpoint(&record).unwrap();
        store(more, 0, 99);
    }
}

#[test]
fn addresses_that_are_taken_are_named() {
    let Some(file) = small() else { return };
    let (heap, record) = FarAlloc::restore(file.clone(), TAG, &config()).unwrap();
    let name = numbers_of(&record)[0];
    // The same heap in another file, while this one is there.
    match FarAlloc::restore(Recorded::of(file.bytes()), TAG, &config()) {
        Err(error @ Error::AddressesTaken { start, end, .. }) => {
            assert!((start..end).contains(&name));
            let text = error.to_string();
            let map = format!("{start:x}-{end:x} rw-p");
            assert!(
                text.contains(&format!("{start:#x}")) && text.contains(&map),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
    check(&record);
    drop(heap);
    // A mapping of the program's.
    let in_the_way = (name as usize + (64 << 20)) & !0xfff;
    let path = std::env::current_exe().unwrap();
    let program = File::open(&path).unwrap();
    map(in_the_way, &program);
    match FarAlloc::restore(file.clone(), TAG, &config()) {
        Err(Error::AddressesTaken { by, .. }) => {
            assert!(by.contains(&format!("{in_the_way:x}-")), "{by}");
            assert!(by.contains(path.to_str().unwrap()), "{by}");
        }
        other => panic!("{other:?}"),
    }
    unmap(in_the_way);
    let (_heap, record) = FarAlloc::restore(file, TAG, &config()).unwrap();
    check(&record);
}

fn map(address: usize, file: &File) {
    use std::os::fd::AsRawFd as _;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    let got = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            4096,
            libc::PROT_READ,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    assert_eq!(got as usize, address);
}

fn unmap(address: usize) {
    // SAFETY: the page that `map` mapped.
    assert_eq!(unsafe { libc::munmap(address as *mut libc::c_void, 4096) }, 0);
}

#[test]
fn refusals_say_what_the_file_is() {
    let Some(file) = small() else { return };
    let error = FarAlloc::restore(file.clone(), TAG + 1, &config()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("0xadd7") && text.contains("0xadd8"), "{text}");
    assert_eq!(
        refusal(Err::<(), _>(error)),
        Refusal::Schema {
            found: TAG,
            wanted: TAG + 1
        }
    );
    let len_bytes = file.len_bytes().unwrap();
    let taken = FarAlloc::create(file.clone(), SLABS, TAG, &config());
    assert_eq!(refusal(taken), Refusal::NotEmpty { len_bytes });
    assert_eq!(
        refusal(FarAlloc::restore(Recorded::of(vec![1; 2 << 20]), TAG, &config())),
        Refusal::Foreign
    );
    // A heap of handles is none of addresses, and the other way round.
    let handles = Recorded::default();
    drop(FarHeap::create(handles.clone(), SLABS, TAG, &config().objects).unwrap());
    let wrong = refusal(FarAlloc::restore(handles, TAG, &config()));
    assert!(matches!(wrong, Refusal::Kind { .. }), "{wrong}");
    let wrong = FarHeap::restore(file.clone(), TAG, &config().objects).map_err(Error::Objects);
    assert!(matches!(refusal(wrong), Refusal::Kind { .. }));
    // A version that does not exist yet.
    let newer = Recorded::of(file.bytes());
    let mut root = newer.bytes()[..4096].to_vec();
    let version = CHECKPOINT_VERSION + 1;
    root[8..12].copy_from_slice(&version.to_le_bytes());
    root[12..16].fill(0);
    let crc = crc32c::crc32c(&root);
    root[12..16].copy_from_slice(&crc.to_le_bytes());
    newer.write_at(0, &root).unwrap();
    assert_eq!(
        refusal(FarAlloc::restore(newer, TAG, &config())),
        Refusal::Newer { version }
    );
    // Cut off.
    let bytes = file.bytes();
    for (len, wanted) in [(0, Refusal::Foreign), (100, Refusal::Incomplete)] {
        let cut = Recorded::of(bytes[..len].to_vec());
        assert_eq!(refusal(FarAlloc::restore(cut, TAG, &config())), wanted);
    }
    for len in (8192..bytes.len()).step_by(200_003) {
        if let Ok((_, record)) = FarAlloc::restore(Recorded::of(bytes[..len].to_vec()), TAG, &config()) {
            assert!(numbers_of(&record).len() == 4);
        }
    }
    // Used by another heap.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("heap");
    let heap = FarAlloc::create(File::create_new(&path).unwrap(), SLABS, TAG, &config()).unwrap();
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    assert_eq!(refusal(FarAlloc::restore(open(), TAG, &config())), Refusal::InUse);
    drop(heap);
    let (heap, record) = FarAlloc::restore(open(), TAG, &config()).unwrap();
    assert!(record.is_empty());
    let long = heap.checkpoint(&[0; RECORD_MAX_BYTES + 1]);
    assert!(matches!(long, Err(Error::Objects(StoreError::TooLarge { .. }))));
    heap.checkpoint(&[0; RECORD_MAX_BYTES]).unwrap();
    // Not without the pages that are newer.
    assert!(matches!(
        heap.objects().unwrap().checkpoint(&[]),
        Err(StoreError::Config(_))
    ));
    // Nor slots that no checkpoint is told of.
    let others = SlotsHeap::new(heap.objects().unwrap().clone());
    assert!(matches!(others, Err(StoreError::Config(_))));
    let together = heap.together().unwrap();
    assert!(matches!(
        heap.checkpoint(&[]),
        Err(Error::Objects(StoreError::Config(_)))
    ));
    drop(together);
    let without = crate::common::heap(16, 4 << 20).unwrap();
    assert!(matches!(
        without.checkpoint(&[]),
        Err(Error::Objects(StoreError::NoCheckpoints { .. }))
    ));
}

#[test]
fn changed_bytes_are_refused_or_never_matter() {
    let Some(file) = small() else { return };
    let bytes = file.bytes();
    let (mut tried, mut refused) = (0, 0);
    for at in 0..bytes.len() {
        let sector = at / 512 * 512;
        let is_blank = bytes[sector..bytes.len().min(sector + 512)]
            .iter()
            .all(|byte| *byte == 0);
        if at % 61 != 0 || is_blank {
            continue;
        }
        let copy = Recorded::of(bytes.clone());
        copy.change(at, 1 << (at % 8));
        tried += 1;
        match FarAlloc::restore(copy, TAG, &config()) {
            Err(_) => refused += 1,
            Ok((_heap, record)) => {
                // Pages of objects that are damaged are signals; none has other bytes.
                let [one, array, bytes, other] = *numbers_of(&record).first_chunk().unwrap();
                for (name, len) in [(one, 40), (array, 200), (bytes, 9000), (other, 50)] {
                    let mut is = vec![0; len];
                    if crate::common::try_load(crate::common::at(name as usize), &mut is).is_ok() {
                        let mut all = is.iter().enumerate();
                        assert!(all.all(|(index, is)| *is == index as u8 || index == 5000));
                    }
                }
            }
        }
    }
    println!("{tried} bytes changed, {refused} refused, never other data");
    assert!(tried > 20 && refused > 5);
}

#[test]
fn failed_write_leaves_the_checkpoint_before_and_memory_as_it_is() {
    let Some(file) = small() else { return };
    let mut images = vec![file.bytes()];
    let (heap, record) = FarAlloc::restore(file.clone(), TAG, &config()).unwrap();
    let names = numbers_of(&record);
    let bytes = at(names[2] as usize);
    for writes in 0..3 {
        (0..9000).for_each(|index| store(bytes, index, 50 + writes));
        file.fail_writes_after(Some(u64::from(writes)));
        let made = heap.checkpoint(&record);
        assert!(
            matches!(made, Err(Error::Objects(StoreError::Io { .. }))),
            "{made:?}"
        );
        file.fail_writes_after(None);
        images.push(file.bytes());
        // All can be written and freed as before.
        (0..9000).for_each(|index| assert_eq!(load(bytes, index), 50 + writes));
        let more = heap.malloc(9000).unwrap();
        store(more, 8999, 1);
        heap.free(more).unwrap();
    }
    (0..9000).for_each(|index| store(bytes, index, index as u8));
    store(bytes, 5000, 1);
    heap.checkpoint(&record).unwrap();
    images.push(file.bytes());
    store(bytes, 0, 9);
    file.fail_syncs(true);
    assert!(heap.checkpoint(&record).is_err());
    file.fail_syncs(false);
    assert!(heap.checkpoint(&record).is_err(), "what was lost is not known");
    images.push(file.bytes());
    assert_eq!(load(bytes, 0), 9);
    drop(heap);
    for image in images {
        let (_heap, record) = FarAlloc::restore(Recorded::of(image), TAG, &config()).unwrap();
        check(&record);
    }
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint-v2")
}

/// Sectors that are not zeros, each behind its number.
fn pack(bytes: &[u8]) -> Vec<u8> {
    let sectors = bytes.chunks(512).enumerate();
    let sectors = sectors.filter(|(_, sector)| sector.iter().any(|byte| *byte != 0));
    sectors
        .flat_map(|(number, sector)| {
            let mut sector = sector.to_vec();
            sector.resize(512, 0);
            [(number as u32).to_le_bytes().to_vec(), sector].concat()
        })
        .collect()
}

fn unpack(packed: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    for sector in packed.chunks_exact(516) {
        let number = u64::from(u32::from_le_bytes(*sector.first_chunk().unwrap()));
        crate::recorded::apply(&mut bytes, number * 512, &sector[4..]);
    }
    // Blocks are written whole.
    bytes.resize(bytes.len().next_multiple_of(128 << 10), 0);
    bytes
}

#[test]
fn checkpoint_of_version_2_is_restored() {
    if std::env::var_os("VARVE_WRITE_FIXTURE").is_some() {
        std::fs::create_dir_all(fixture().parent().unwrap()).unwrap();
        std::fs::write(fixture(), pack(&small().unwrap().bytes())).unwrap();
    }
    let file = Recorded::of(unpack(&std::fs::read(fixture()).unwrap()));
    let (heap, record) = match FarAlloc::restore(file.clone(), TAG, &config()) {
        Ok(restored) => restored,
        Err(error @ (Error::Userfault { .. } | Error::AddressesTaken { .. })) => {
            eprintln!("SKIPPED: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    check(&record);
    assert_eq!(heap.checkpoint(&record).unwrap().generation, 5);
    drop(heap);
    let (_heap, record) = FarAlloc::restore(file, TAG, &config()).unwrap();
    check(&record);
}

#[test]
fn start_address_is_the_programs_if_it_says_one() {
    let config = Config {
        start_address: 0x1234_0000_0000,
        ..config()
    };
    let made = FarAlloc::create(Recorded::default(), SLABS, TAG, &config);
    let heap = match made {
        Ok(heap) => heap,
        Err(Error::Userfault { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    let object = heap.oalloc(1, 10).unwrap().addr().get() as u64;
    assert!((0x1234_0000_0000..0x1235_0000_0000).contains(&object));
    // The last three would be refused by `restore`, or pass the end of all numbers.
    let last = 1 << 47;
    let refused = [
        0x1234_0000_1000,
        last - (1 << 30),
        last,
        0u64.wrapping_sub(2 << 20),
    ];
    for start_address in refused {
        let file = Recorded::default();
        let made = FarAlloc::create(
            file.clone(),
            SLABS,
            TAG,
            &Config {
                start_address,
                ..config.clone()
            },
        );
        assert!(
            matches!(made, Err(Error::Config(_))),
            "{start_address:#x}: {made:?}"
        );
        assert_eq!(file.len_bytes().unwrap(), 0);
    }
}

#[test]
fn first_checkpoint_with_something_in_it_has_all_tables_and_the_next_what_changed() {
    let Some(heap) = create(Recorded::default(), SLABS) else {
        return;
    };
    let all = heap.oalloc(2000, 200).unwrap();
    let fill = |index: usize| store(at(all.addr().get() + index * 4096), 7, index as u8);
    (0..2000).for_each(fill);
    let first = heap.checkpoint(&[]).unwrap();
    fill(3);
    let next = heap.checkpoint(&[]).unwrap();
    assert!(first.is_whole && !next.is_whole, "{first:?} {next:?}");
    assert!(next.table_bytes * 4 < first.table_bytes, "{first:?} {next:?}");
}
