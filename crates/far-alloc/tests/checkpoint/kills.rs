//! A process that is killed, and another one that goes on where it was.

use crate::world::{Model, World};
use crate::{TAG, config, killed, numbers_of, record_of};
use fastrand::Rng;
use std::fs::File;
use std::path::Path;
use varve_far_alloc::{Error, FarAlloc};
use varve_far_objects::Error as StoreError;

const SLABS: u32 = 40;
const SEED: u64 = 5;
const PATH: &str = "VARVE_FAR_ALLOC_KILLED";

/// The world of a heap, whose record has its names, after the steps that its memory says.
fn open<'a>(heap: &'a FarAlloc, record: &[u8]) -> Option<(World<'a>, u64)> {
    let [number, directory, counter] = numbers_of(record).first_chunk().copied()?;
    let names = [directory, counter];
    let mut model = Model::new(SEED);
    (0..World::steps_of(names)).for_each(|_| model.step());
    Some((World::open(heap, names, model), number))
}

/// Not a test of its own: the process that `killed_process_leaves_memory_as_it_was` kills.
#[test]
fn process_that_is_killed() {
    let Ok(path) = std::env::var(PATH) else { return };
    let path = Path::new(&path);
    let is_new = !path.exists();
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .unwrap();
    let (heap, record) = match is_new {
        true => (FarAlloc::create(file, SLABS, TAG, &config()).unwrap(), Vec::new()),
        false => FarAlloc::restore(file, TAG, &config()).unwrap(),
    };
    let (mut world, first) = open(&heap, &record).unwrap_or_else(|| (World::new(&heap, SEED), 0));
    world.check().unwrap();
    let names = world.names();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                world.step();
            }
        });
        for number in first + 1.. {
            heap.checkpoint(&record_of(&[number, names[0], names[1]]))
                .unwrap();
            println!("\ncheckpoint {number}");
        }
    });
}

#[test]
fn killed_process_leaves_memory_as_it_was() {
    if crate::create(crate::recorded::Recorded::default(), SLABS).is_none() {
        return;
    }
    let rounds = std::env::var("VARVE_FAR_KILLS").map_or(30, |rounds| rounds.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("heap");
    let mut random = Rng::with_seed(1);
    let mut last = 0;
    for _ in 0..rounds {
        let name = "kills::process_that_is_killed";
        let complete = killed::kill(&mut random, name, PATH, &path, 120).unwrap_or(last);
        let Ok(file) = File::options().read(true).write(true).open(&path) else {
            continue;
        };
        let (heap, record) = match FarAlloc::restore(file, TAG, &config()) {
            Ok(restored) => restored,
            Err(Error::Objects(StoreError::Refused { .. })) if last == 0 && complete == 0 => {
                // Killed while the file was made: it never was a heap.
                std::fs::remove_file(&path).unwrap();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let Some((world, number)) = open(&heap, &record) else {
            assert_eq!(complete, 0);
            continue;
        };
        assert!(
            number == complete || number == complete + 1,
            "{number} after {complete}"
        );
        world.check().unwrap();
        last = number;
        if random.u8(..4) == 0 {
            world.end().unwrap();
        }
    }
    println!("{rounds} kills, {last} checkpoints");
    assert!(last > 5);
}
