//! Checkpoints while threads go on, kills of the process, and files that are refused.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "common/killed.rs"]
mod killed;

#[path = "common/recorded.rs"]
mod recorded;

use recorded::Recorded;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_far::Dram;
use varve_far_objects::{
    CHECKPOINT_VERSION, CheckpointFile, Config, Error, Far, FarHeap, FarMap, FarVec, RECORD_MAX_BYTES,
    Refusal, SlotsHeap,
};

const TAG: u64 = 7;
const SLABS: u32 = 24;
const ACCOUNTS: usize = 2000;
const THREADS: usize = 3;

fn config() -> Config {
    Config::new(3 << 20)
}

fn refusal<T>(result: Result<T, Error>) -> Refusal {
    match result {
        Err(Error::Refused { reason, .. }) => reason,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("taken"),
    }
}

fn record_of(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn numbers_of(record: &[u8]) -> Vec<u64> {
    let (numbers, _) = record.as_chunks::<8>();
    numbers.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect()
}

/// Accounts whose sum stays, and a map to which each thread adds keys before it counts them.
struct Bank {
    accounts: FarVec<[u64; 16]>,
    counts: FarVec<u64>,
    map: FarMap<u64, [u64; 8]>,
}

impl Bank {
    fn new(heap: &FarHeap) -> Self {
        let bank = Self {
            accounts: FarVec::zeroed(heap, ACCOUNTS).unwrap(),
            counts: FarVec::zeroed(heap, THREADS).unwrap(),
            map: FarMap::new(heap).unwrap(),
        };
        for index in 0..ACCOUNTS {
            bank.accounts.set(index, [100; 16]).unwrap();
        }
        bank
    }

    fn open(heap: &FarHeap, names: &[u64]) -> Self {
        Self {
            accounts: FarVec::open(heap, names[0]).unwrap(),
            counts: FarVec::open(heap, names[1]).unwrap(),
            map: FarMap::open(heap, names[2]).unwrap(),
        }
    }

    fn record(&self, number: u64) -> Vec<u8> {
        record_of(&[
            self.accounts.name().unwrap(),
            self.counts.name().unwrap(),
            self.map.name().unwrap(),
            number,
        ])
    }

    /// Moves money between accounts, and adds a key of thread `thread`. False where there is no room now.
    fn step(&self, heap: &FarHeap, thread: usize, random: &mut fastrand::Rng) -> bool {
        // Accounts of this thread alone, so that nobody else changes them in between.
        let account = |random: &mut fastrand::Rng| {
            let own = ACCOUNTS / THREADS;
            thread * own + random.usize(..own)
        };
        let (from, to) = (account(random), account(random));
        {
            let _together = heap.together();
            let amount = random.u64(..3);
            let before = self.accounts.get(from).unwrap();
            if self
                .accounts
                .set(from, before.map(|sum| sum.wrapping_sub(amount)))
                .is_err()
            {
                return false;
            }
            let there = self.accounts.get(to).unwrap();
            if self
                .accounts
                .set(to, there.map(|sum| sum.wrapping_add(amount)))
                .is_err()
            {
                // A frame that was just changed is in memory, so this cannot fail.
                self.accounts.set(from, before).unwrap();
                return false;
            }
        }
        let count = self.counts.get(thread).unwrap();
        let key = (thread as u64) << 32 | count;
        let added = self
            .map
            .insert(key, [key; 8])
            .and_then(|_| self.counts.set(thread, count + 1));
        if count > 3000 {
            // Old ones leave, last first.
            return (0..=count).rev().all(|number| {
                let counted = self.counts.set(thread, number);
                counted.is_ok() && self.map.remove(&((thread as u64) << 32 | number)).is_ok()
            });
        }
        added.is_ok()
    }

    /// Whether this is a state that the program was in.
    fn check(&self) {
        let sums = self.accounts.iter().map(|account| account.unwrap());
        let mut total = 0u64;
        for account in sums {
            assert!(account.iter().all(|sum| *sum == account[0]), "half an account");
            total = total.wrapping_add(account[0]);
        }
        assert_eq!(total, 100 * ACCOUNTS as u64, "half a transfer");
        let mut keys = vec![Vec::new(); THREADS];
        let mut entries = 0;
        self.map
            .for_each(|key, value| {
                assert_eq!(value, [key; 8]);
                keys[(key >> 32) as usize].push(key & 0xffff_ffff);
                entries += 1;
            })
            .unwrap();
        assert_eq!(self.map.len(), entries);
        for (thread, keys) in keys.iter_mut().enumerate() {
            keys.sort_unstable();
            assert!(
                keys.iter().copied().eq(0..keys.len() as u64),
                "a key is missing or there twice"
            );
            let count = self.counts.get(thread).unwrap();
            let there = keys.len() as u64;
            assert!(
                there == count || there == count + 1,
                "{there} keys, {count} counted"
            );
        }
    }
}

#[test]
fn checkpoint_shows_one_moment_while_threads_go_on() {
    let file = Recorded::default();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let bank = Bank::new(&heap);
    let is_ending = AtomicBool::new(false);
    let mut stopped = Duration::ZERO;
    let mut moments = std::collections::BTreeSet::new();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (bank, heap, is_ending) = (&bank, &heap, &is_ending);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(thread as u64);
                while !is_ending.load(Ordering::Relaxed) {
                    if !bank.step(heap, thread, &mut random) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        for number in 0..40 {
            let made = heap.checkpoint(&bank.record(number)).unwrap();
            stopped = stopped.max(made.stopped);
            let (copy, record) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config()).unwrap();
            let names = numbers_of(&record);
            assert_eq!(names[3], number);
            let restored = Bank::open(&copy, &names);
            restored.check();
            moments.insert(restored.counts.get(0).unwrap());
        }
        is_ending.store(true, Ordering::Relaxed);
    });
    println!(
        "{} different states of 40, threads stopped {stopped:?} at most",
        moments.len()
    );
    assert!(moments.len() > 2);
    bank.check();
}

/// Not a test of its own: the process that `killed_process_leaves_a_checkpoint` kills.
#[test]
fn process_that_is_killed() {
    let Ok(path) = std::env::var("VARVE_FAR_KILLED") else {
        return;
    };
    let path = Path::new(&path);
    let open = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    let (heap, bank, first) = if open.metadata().unwrap().len() == 0 {
        let heap = FarHeap::create(open, SLABS, TAG, &config()).unwrap();
        let bank = Bank::new(&heap);
        (heap, bank, 1)
    } else {
        let (heap, record) = FarHeap::restore(open, TAG, &config()).unwrap();
        let names = numbers_of(&record);
        if names.is_empty() {
            let bank = Bank::new(&heap);
            (heap, bank, 1)
        } else {
            let bank = Bank::open(&heap, &names);
            bank.check();
            (heap, bank, names[3] + 1)
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (bank, heap) = (&bank, &heap);
            scope.spawn(move || {
                let mut random = fastrand::Rng::new();
                loop {
                    if !bank.step(heap, thread, &mut random) {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
        for number in first.. {
            heap.checkpoint(&bank.record(number)).unwrap();
            println!("\ncheckpoint {number}");
        }
    });
}

#[test]
fn killed_process_leaves_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("heap");
    let mut random = fastrand::Rng::with_seed(1);
    let (mut last, mut kills) = (0, 0);
    while kills < 100 {
        let name = "process_that_is_killed";
        let complete = killed::kill(&mut random, name, "VARVE_FAR_KILLED", &path, 80).unwrap_or(last);
        kills += 1;
        let file = File::options().read(true).write(true).open(&path);
        let Ok(file) = file else { continue };
        let (heap, record) = match FarHeap::restore(file, TAG, &config()) {
            Ok(restored) => restored,
            Err(error) if last == 0 && complete == 0 => {
                // Killed while the file was made: it never was a heap.
                assert!(matches!(error, Error::Refused { .. }), "{error}");
                std::fs::remove_file(&path).unwrap();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let names = numbers_of(&record);
        if names.is_empty() {
            assert_eq!(complete, 0);
            continue;
        }
        assert!(
            names[3] == complete || names[3] == complete + 1,
            "{} after {complete}",
            names[3]
        );
        Bank::open(&heap, &names).check();
        last = names[3];
    }
    println!("{kills} kills, {last} checkpoints");
    assert!(last > 20);
}

/// A small file with a value, an array, a map and two checkpoints.
fn small() -> Recorded {
    let file = Recorded::default();
    let config = Config {
        has_thread: false,
        ..config()
    };
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config).unwrap();
    let far = Far::new(&heap, [5u64; 30]).unwrap();
    let small = Far::new(&heap, 6u32).unwrap();
    let array: FarVec<[u64; 20]> = FarVec::zeroed(&heap, 10).unwrap();
    let map: FarMap<u64, u64> = FarMap::new(&heap).unwrap();
    for index in 0..10 {
        array.set(index, [index as u64; 20]).unwrap();
        map.insert(index as u64, 100).unwrap();
    }
    let record = record_of(&[
        far.name().to_u64(),
        small.name().to_u64(),
        array.name().unwrap(),
        map.name().unwrap(),
    ]);
    heap.checkpoint(&record).unwrap();
    array.set(3, [33; 20]).unwrap();
    map.remove(&9).unwrap();
    heap.checkpoint(&record).unwrap();
    file
}

/// Reads all of the small file. What is there must be right; errors are errors.
fn read_small(file: &Recorded) -> Result<(), Error> {
    let config = Config {
        has_thread: false,
        ..config()
    };
    let (heap, record) = FarHeap::restore(file.clone(), TAG, &config)?;
    let names = numbers_of(&record);
    let mut result = Ok(());
    let mut note = |error| result = Err(error);
    let far: Far<[u64; 30]> = Far::open(&heap, varve_far_objects::ObjectId::from_u64(names[0]))?;
    far.get()
        .map_or_else(&mut note, |value| assert_eq!(value, [5; 30]));
    let far: Far<u32> = Far::open(&heap, varve_far_objects::ObjectId::from_u64(names[1]))?;
    far.get().map_or_else(&mut note, |value| assert_eq!(value, 6));
    let array: FarVec<[u64; 20]> = FarVec::open(&heap, names[2])?;
    for index in 0..10 {
        let wanted = if index == 3 { [33; 20] } else { [index as u64; 20] };
        array.get(index).map_or_else(&mut note, |value| {
            // The checkpoint before is taken where the last root is damaged.
            assert!(value == wanted || value == [index as u64; 20]);
        });
    }
    let map: FarMap<u64, u64> = FarMap::open(&heap, names[3])?;
    let mut keys = 0;
    map.for_each(|_, value| {
        assert_eq!(value, 100);
        keys += 1;
    })
    .unwrap_or_else(&mut note);
    assert!(result.is_err() || keys == 9 || keys == 10);
    result
}

#[test]
fn changed_bytes_are_refused_or_never_matter() {
    let file = small();
    read_small(&file).unwrap();
    let bytes = file.bytes();
    let (mut tried, mut found) = (0, 0);
    for at in 0..bytes.len() {
        // Zeros between the pages that were written count too, but not each of them.
        let page = at / 512 * 512;
        let is_blank = bytes[page..bytes.len().min(page + 512)]
            .iter()
            .all(|byte| *byte == 0);
        if is_blank && at % 4093 != 0 {
            continue;
        }
        file.change(at, 1 << (at % 8));
        tried += 1;
        found += usize::from(read_small(&file).is_err());
        file.change(at, 1 << (at % 8));
    }
    println!("{tried} bytes changed, {found} errors, never other data");
    assert!(found > 500);
    read_small(&file).unwrap();
}

#[test]
fn cut_off_files_are_refused() {
    let bytes = small().bytes();
    for len in (0..bytes.len()).step_by(3001) {
        let _ = read_small(&Recorded::of(bytes[..len].to_vec()));
    }
    let refused = |len: usize| {
        refusal(FarHeap::restore(
            Recorded::of(bytes[..len].to_vec()),
            TAG,
            &config(),
        ))
    };
    assert_eq!(refused(0), Refusal::Foreign);
    assert_eq!(refused(100), Refusal::Incomplete);
    assert!(matches!(refused(8192), Refusal::Malformed(_)));
}

#[test]
fn refusals_say_what_the_file_is() {
    let file = small();
    let wrong = refusal(FarHeap::restore(file.clone(), TAG + 1, &config()));
    let (found, wanted) = (TAG, TAG + 1);
    assert_eq!(wrong, Refusal::Schema { found, wanted });
    let foreign = Recorded::of(vec![1; 2 << 20]);
    assert_eq!(
        refusal(FarHeap::restore(foreign, TAG, &config())),
        Refusal::Foreign
    );
    let len_bytes = file.len_bytes().unwrap();
    let taken = FarHeap::create(file.clone(), SLABS, TAG, &config());
    assert_eq!(refusal(taken), Refusal::NotEmpty { len_bytes });
    // Both roots damaged.
    file.change(30, 1);
    file.change(4096 + 30, 1);
    assert_eq!(
        refusal(FarHeap::restore(file, TAG, &config())),
        Refusal::Incomplete
    );
    // A version that does not exist yet.
    let file = small();
    let mut root = file.bytes()[..4096].to_vec();
    root[8..12].copy_from_slice(&(CHECKPOINT_VERSION + 1).to_le_bytes());
    root[12..16].fill(0);
    let crc = crc32c::crc32c(&root);
    root[12..16].copy_from_slice(&crc.to_le_bytes());
    file.write_at(0, &root).unwrap();
    let version = CHECKPOINT_VERSION + 1;
    assert_eq!(
        refusal(FarHeap::restore(file, TAG, &config())),
        Refusal::Newer { version }
    );
    // Too little memory for the tables is told as such.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("heap");
    let heap = FarHeap::create(File::create_new(&path).unwrap(), 512, TAG, &Config::new(32 << 20)).unwrap();
    let _all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, 1_000_000).unwrap();
    heap.checkpoint(&[]).unwrap();
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    assert_eq!(refusal(FarHeap::restore(open(), TAG, &config())), Refusal::InUse);
    drop((_all, heap));
    let small = FarHeap::restore(open(), TAG, &config());
    assert!(matches!(small, Err(Error::MemoryLimit { .. })));
    FarHeap::restore(open(), TAG, &Config::new(32 << 20)).unwrap();
}

#[test]
fn damage_to_either_copy_of_a_root_loses_nothing() {
    // More than memory holds, so that places are used again.
    const COUNT: usize = 40_000;
    let file = Recorded::default();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let all: FarVec<[u64; 16]> = FarVec::zeroed(&heap, COUNT).unwrap();
    for round in 1..=4 {
        for index in 0..COUNT {
            all.set(index, [round; 16]).unwrap();
        }
        heap.checkpoint(&record_of(&[all.name().unwrap(), round]))
            .unwrap();
        // Far into what comes after it.
        for index in 0..COUNT / 2 {
            all.set(index, [1000 + round; 16]).unwrap();
        }
        for slot in [0, 4096] {
            let copy = Recorded::of(file.bytes());
            copy.change(slot + 30, 1);
            let (heap, record) = FarHeap::restore(copy, TAG, &config()).unwrap();
            let numbers = numbers_of(&record);
            assert_eq!(numbers[1], round, "slot at {slot}");
            let all: FarVec<[u64; 16]> = FarVec::open(&heap, numbers[0]).unwrap();
            for index in 0..COUNT {
                assert_eq!(all.get(index).unwrap(), [round; 16], "round {round}, {index}");
            }
        }
    }
}

#[test]
fn handles_are_opened_once_and_as_what_they_are() {
    let file = small();
    let (heap, record) = FarHeap::restore(file, TAG, &config()).unwrap();
    let names = numbers_of(&record);
    let id = varve_far_objects::ObjectId::from_u64(names[0]);
    assert!(matches!(
        refusal(Far::<[u64; 31]>::open(&heap, id)),
        Refusal::Handle { .. }
    ));
    let far: Far<[u64; 30]> = Far::open(&heap, id).unwrap();
    assert!(matches!(
        refusal(Far::<[u64; 30]>::open(&heap, id)),
        Refusal::Handle { .. }
    ));
    far.keep();
    drop(Far::<[u64; 30]>::open(&heap, id).unwrap());
    assert!(matches!(
        refusal(Far::<[u64; 30]>::open(&heap, id)),
        Refusal::Handle { .. }
    ));
    assert!(matches!(
        refusal(FarVec::<u64>::open(&heap, names[2])),
        Refusal::Handle { .. }
    ));
    assert!(matches!(
        refusal(FarVec::<u64>::open(&heap, names[3])),
        Refusal::Handle { .. }
    ));
    assert!(matches!(
        refusal(FarMap::<u64, u32>::open(&heap, names[3])),
        Refusal::Handle { .. }
    ));
    let map: FarMap<u64, u64> = FarMap::open(&heap, names[3]).unwrap();
    assert!(matches!(
        refusal(FarMap::<u64, u64>::open(&heap, names[3])),
        Refusal::Handle { .. }
    ));
    assert_eq!(map.get(&1).unwrap(), Some(100));
    assert_eq!(map.keep().unwrap(), names[3]);
    drop(FarMap::<u64, u64>::open(&heap, names[3]).unwrap());
    assert!(matches!(
        refusal(FarMap::<u64, u64>::open(&heap, names[3])),
        Refusal::Handle { .. }
    ));
}

#[test]
fn dropped_handles_are_gone_in_the_next_checkpoint() {
    let file = small();
    let (heap, record) = FarHeap::restore(file.clone(), TAG, &config()).unwrap();
    let names = numbers_of(&record);
    drop(FarVec::<[u64; 20]>::open(&heap, names[2]).unwrap());
    heap.checkpoint(&record).unwrap();
    drop(heap);
    let (heap, _) = FarHeap::restore(file, TAG, &config()).unwrap();
    assert!(matches!(
        refusal(FarVec::<[u64; 20]>::open(&heap, names[2])),
        Refusal::Handle { .. }
    ));
    FarMap::<u64, u64>::open(&heap, names[3]).unwrap();
}

#[test]
fn checkpoints_are_refused_where_they_cannot_be() {
    let heap = FarHeap::new(Dram::new(8), &Config::new(4 << 20)).unwrap();
    assert!(matches!(heap.checkpoint(&[]), Err(Error::NoCheckpoints { .. })));
    let all: FarVec<u64> = FarVec::new(&heap).unwrap();
    assert!(matches!(all.name(), Err(Error::NoCheckpoints { .. })));
    let small = Config::new(varve_far_objects::MEMORY_MIN_BYTES);
    let made = FarHeap::create(Recorded::default(), SLABS, TAG, &small);
    assert!(matches!(made, Err(Error::Config(_))));
    assert!(matches!(
        FarHeap::create(Recorded::default(), 4, TAG, &config()),
        Err(Error::Config(_))
    ));
    let heap = FarHeap::create(Recorded::default(), SLABS, TAG, &config()).unwrap();
    let long = heap.checkpoint(&[0; RECORD_MAX_BYTES + 1]);
    assert!(matches!(long, Err(Error::TooLarge { .. })));
    assert!(matches!(SlotsHeap::new(heap.clone()), Err(Error::Config(_))));
    let together = heap.together();
    assert!(matches!(heap.checkpoint(&[]), Err(Error::Config(_))));
    drop(together);
    heap.checkpoint(&[0; RECORD_MAX_BYTES]).unwrap();
}

#[test]
fn failed_write_leaves_the_checkpoint_before_and_failed_sync_the_last_one() {
    let file = small();
    let (heap, record) = FarHeap::restore(file.clone(), TAG, &config()).unwrap();
    let names = numbers_of(&record);
    let array: FarVec<[u64; 20]> = FarVec::open(&heap, names[2]).unwrap();
    for writes in 0..3 {
        array.set(5, [50; 20]).unwrap();
        file.fail_writes_after(Some(writes));
        assert!(matches!(heap.checkpoint(&record), Err(Error::Io { .. })));
        file.fail_writes_after(None);
        read_small(&Recorded::of(file.bytes())).unwrap();
    }
    heap.checkpoint(&record).unwrap();
    let read = |file: &Recorded| {
        let (heap, record) = FarHeap::restore(Recorded::of(file.bytes()), TAG, &config()).unwrap();
        let array: FarVec<[u64; 20]> = FarVec::open(&heap, numbers_of(&record)[2]).unwrap();
        array.get(5).unwrap()
    };
    assert_eq!(read(&file), [50; 20]);
    array.set(5, [51; 20]).unwrap();
    file.fail_syncs(true);
    assert!(matches!(heap.checkpoint(&record), Err(Error::Io { .. })));
    file.fail_syncs(false);
    assert!(
        matches!(heap.checkpoint(&record), Err(Error::Io { .. })),
        "what was lost is not known"
    );
    assert_eq!(read(&file), [50; 20]);
}

#[test]
fn full_store_says_what_the_checkpoint_holds_and_the_next_one_frees_it() {
    let config = Config {
        has_thread: false,
        ..config()
    };
    let heap = FarHeap::create(Recorded::default(), 11, TAG, &config).unwrap();
    let all: FarVec<[u64; 128]> = FarVec::zeroed(&heap, 3900).unwrap();
    let mut held = 0;
    for round in 0..6 {
        for index in 0..all.len() {
            while let Err(error) = all.set(index, [round; 128]) {
                assert!(matches!(error, Error::Held { .. }), "{error}");
                held += 1;
                assert!(held < 100, "a checkpoint frees nothing");
                heap.checkpoint(&[]).unwrap();
            }
        }
        assert!(all.iter().all(|value| value.unwrap() == [round; 128]));
        heap.checkpoint(&[]).unwrap();
    }
    println!("{held} times held");
    assert!(held > 0);
}

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint-v1")
}

/// Pages that are not zeros, each behind its number.
fn pack(bytes: &[u8]) -> Vec<u8> {
    let pages = bytes
        .chunks(512)
        .enumerate()
        .filter(|(_, page)| page.iter().any(|byte| *byte != 0));
    pages
        .flat_map(|(number, page)| {
            let mut page = page.to_vec();
            page.resize(512, 0);
            [(number as u32).to_le_bytes().to_vec(), page].concat()
        })
        .collect()
}

fn unpack(packed: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    for page in packed.chunks_exact(516) {
        let number = u32::from_le_bytes(*page.first_chunk().unwrap()) as u64;
        recorded::apply(&mut bytes, number * 512, &page[4..]);
    }
    // Blocks are written whole.
    bytes.resize(bytes.len().next_multiple_of(128 << 10), 0);
    bytes
}

#[test]
fn checkpoint_of_version_1_is_restored() {
    if std::env::var_os("VARVE_WRITE_FIXTURE").is_some() {
        std::fs::create_dir_all(fixture().parent().unwrap()).unwrap();
        std::fs::write(fixture(), pack(&small().bytes())).unwrap();
    }
    let file = Recorded::of(unpack(&std::fs::read(fixture()).unwrap()));
    read_small(&file).unwrap();
    let (heap, record) = FarHeap::restore(file.clone(), TAG, &config()).unwrap();
    assert_eq!(heap.checkpoint(&record).unwrap().generation, 4);
    read_small(&file).unwrap();
}
