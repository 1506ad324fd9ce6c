//! What a crash may leave of the file, at any moment of a program that makes checkpoints while it goes on:
//! restore gives the last complete one, or the one in progress.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/common/recorded.rs"]
mod recorded;

use super::save::Fault;
use super::{Config, FarHeap, ObjectId, save};
use crate::{Error, Far, FarMap, FarVec};
use fastrand::Rng;
use recorded::{Durable, Event, Recorded, crash_points};
use std::collections::{BTreeSet, HashMap};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TAG: u64 = 0x7e57;
const SLABS: u32 = 12;
const VALUES: usize = 7000;

fn config() -> Config {
    Config {
        has_thread: false,
        ..Config::new(super::MEMORY_MIN_BYTES + save::FIXED_BYTES)
    }
}

/// What the heap is to hold.
#[derive(Debug, Clone, Default)]
struct Model {
    number: u64,
    values: Vec<u64>,
    small: Vec<u32>,
    other: Vec<u64>,
    map: HashMap<u64, u64>,
    fars: Vec<u64>,
}

struct World {
    heap: FarHeap,
    values: FarVec<[u64; 16]>,
    small: FarVec<u32>,
    /// An array that is dropped and made anew.
    other: FarVec<[u64; 40]>,
    map: FarMap<u64, [u64; 6]>,
    fars: Vec<Far<[u64; 37]>>,
    model: Model,
    random: Rng,
}

/// An operation that found no room changed nothing.
fn done<T>(result: Result<T, Error>) -> bool {
    match result {
        Ok(_) => true,
        Err(Error::Held { .. } | Error::Full { .. } | Error::MemoryLimit { .. } | Error::Io { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

impl World {
    fn new(heap: &FarHeap, seed: u64) -> Self {
        let mut world = Self {
            values: FarVec::zeroed(heap, VALUES).unwrap(),
            small: FarVec::zeroed(heap, 3000).unwrap(),
            other: FarVec::new(heap).unwrap(),
            map: FarMap::new(heap).unwrap(),
            fars: Vec::new(),
            heap: heap.clone(),
            model: Model {
                values: vec![0; VALUES],
                small: vec![0; 3000],
                ..Model::default()
            },
            random: Rng::with_seed(seed),
        };
        for _ in 0..3000 {
            world.step();
        }
        world
    }

    fn step(&mut self) {
        let seed = self.random.u64(1..);
        let (model, random) = (&mut self.model, &mut self.random);
        match random.u32(..100) {
            0..40 => {
                let index = random.usize(..model.values.len());
                if done(self.values.set(index, [seed; 16])) {
                    model.values[index] = seed;
                }
            }
            40..50 => {
                let index = random.usize(..model.small.len());
                if done(self.small.set(index, seed as u32)) {
                    model.small[index] = seed as u32;
                }
            }
            50..65 => {
                let key = random.u64(..3000);
                if done(self.map.insert(key, [seed; 6])) {
                    model.map.insert(key, seed);
                }
            }
            65..75 => {
                let key = random.u64(..3000);
                if done(self.map.remove(&key)) {
                    model.map.remove(&key);
                }
            }
            75..80 if self.fars.len() < 200 => {
                let far = Far::new(&self.heap, [seed; 37]);
                if let Ok(far) = far {
                    self.fars.push(far);
                    model.fars.push(seed);
                }
            }
            80..84 if !self.fars.is_empty() => {
                let index = random.usize(..self.fars.len());
                drop(self.fars.swap_remove(index));
                model.fars.swap_remove(index);
            }
            84..90 => {
                if done(self.other.push([seed; 40])) {
                    model.other.push(seed);
                }
            }
            90..92 => {
                if done(self.other.pop()) {
                    model.other.pop();
                }
            }
            92 if random.u8(..8) == 0 => {
                self.other = FarVec::new(&self.heap).unwrap();
                model.other.clear();
            }
            93 if random.u8(..8) == 0 => {
                let len = model.values.len() - random.usize(..300);
                self.values.truncate(len.max(4000));
                model.values.truncate(len.max(4000));
            }
            94..96 => {
                if done(self.values.push([seed; 16])) {
                    model.values.push(seed);
                }
            }
            96 if random.u8(..6) == 0 => {
                done(self.heap.evict_all());
            }
            97 | 98 => {
                done(self.heap.clean_step(64));
            }
            _ => {
                let index = random.usize(..model.values.len());
                assert_eq!(self.values.get(index).unwrap(), [model.values[index]; 16]);
            }
        }
    }

    fn record(&self) -> Vec<u8> {
        let mut all = vec![
            self.model.number,
            self.values.name().unwrap(),
            self.small.name().unwrap(),
            self.other.name().unwrap(),
            self.map.name().unwrap(),
        ];
        all.extend(self.fars.iter().map(|far| far.name().to_u64()));
        all.iter().flat_map(|number| number.to_le_bytes()).collect()
    }
}

/// The number of the checkpoint in a file, if all that it has is as the model of that number says.
fn check(file: &Recorded, models: &HashMap<u64, Model>) -> Result<(u64, FarHeap), String> {
    let text = |error: Error| error.to_string();
    let (heap, record) = FarHeap::restore(file.clone(), TAG, &config()).map_err(text)?;
    if record.is_empty() {
        return Ok((0, heap));
    }
    let (numbers, _) = record.as_chunks::<8>();
    let numbers: Vec<u64> = numbers.iter().map(|chunk| u64::from_le_bytes(*chunk)).collect();
    let [number, values, small, other, map] = numbers[..5].try_into().unwrap();
    let model = models.get(&number).ok_or("another number")?;
    let values: FarVec<[u64; 16]> = FarVec::open(&heap, values).map_err(text)?;
    let small: FarVec<u32> = FarVec::open(&heap, small).map_err(text)?;
    let other: FarVec<[u64; 40]> = FarVec::open(&heap, other).map_err(text)?;
    let map: FarMap<u64, [u64; 6]> = FarMap::open(&heap, map).map_err(text)?;
    let wrong = |what: &str| Err(format!("{what} of {number} are others"));
    let is = |value: &[u64], seed: u64| value.iter().all(|word| *word == seed);
    let read: Vec<_> = values.iter().collect::<Result<_, _>>().map_err(text)?;
    if read.len() != model.values.len() || !read.iter().zip(&model.values).all(|(v, seed)| is(v, *seed)) {
        return wrong("values");
    }
    let read: Vec<_> = small.iter().collect::<Result<_, _>>().map_err(text)?;
    if read != model.small {
        return wrong("small values");
    }
    let read: Vec<_> = other.iter().collect::<Result<_, _>>().map_err(text)?;
    if read.len() != model.other.len() || !read.iter().zip(&model.other).all(|(v, seed)| is(v, *seed)) {
        return wrong("other values");
    }
    let mut entries = HashMap::new();
    map.for_each(|key, value| {
        entries.insert(key, value[0]);
    })
    .map_err(text)?;
    if entries != model.map || map.len() != model.map.len() {
        return wrong("entries of the map");
    }
    let mut fars = Vec::new();
    for (name, seed) in numbers[5..].iter().zip(&model.fars) {
        let far: Far<[u64; 37]> = Far::open(&heap, ObjectId::from_u64(*name)).map_err(text)?;
        if !is(&far.get().map_err(text)?, *seed) {
            return wrong("single values");
        }
        fars.push(far);
    }
    for far in fars {
        far.keep();
    }
    values.keep().unwrap();
    small.keep().unwrap();
    other.keep().unwrap();
    map.keep().unwrap();
    Ok((number, heap))
}

/// What a run of the program wrote, and when which checkpoint was complete.
struct Run {
    events: Vec<Event>,
    models: HashMap<u64, Model>,
    /// Events when the checkpoint of that number returned.
    complete: Vec<usize>,
}

/// Runs a program of so many checkpoints; another thread makes steps at each write of one.
fn run(seed: u64, checkpoints: u64, fault: impl FnOnce(&Recorded, &FarHeap)) -> Run {
    let file = Recorded::default();
    file.record();
    let heap = FarHeap::create(file.clone(), SLABS, TAG, &config()).unwrap();
    let mut complete = vec![file.events()];
    fault(&file, &heap);
    let world = Arc::new(Mutex::new(World::new(&heap, seed)));
    let mut models = HashMap::new();
    let mut number = 0;
    for attempt in 0..checkpoints {
        let record = {
            let mut world = world.lock().unwrap();
            let steps = world.random.usize(10..2500);
            for _ in 0..steps {
                world.step();
            }
            // So that no write, and none of the other thread's steps, is made before the cut.
            while heap.core().log.write_pending().unwrap() {}
            world.model.number = number + 1;
            models.insert(number + 1, world.model.clone());
            world.record()
        };
        let (go, when) = channel::<()>();
        let (did, done) = channel();
        let inner = Arc::clone(&world);
        let steps = std::thread::spawn(move || {
            while when.recv().is_ok() {
                let mut world = inner.lock().unwrap();
                for _ in 0..200 {
                    world.step();
                }
                let _ = did.send(());
            }
        });
        let hook = move || {
            let _ = go.send(());
            // It may have to wait for the write that this is called by.
            let _ = done.recv_timeout(Duration::from_millis(3));
        };
        file.after_writes(Some(Box::new(hook)));
        // Some fail in the middle; the next one goes on from there.
        let fails = attempt % 5 == 3;
        if fails {
            file.fail_writes_after(Some(2));
        }
        let made = heap.checkpoint(&record);
        let events = file.events();
        file.fail_writes_after(None);
        file.after_writes(None);
        steps.join().unwrap();
        if made.is_ok() {
            number += 1;
            complete.push(events);
        } else {
            assert!(fails, "{made:?}");
        }
    }
    Run {
        events: file.take_events(),
        models,
        complete,
    }
}

/// Makes images of crashes and restores them. Gives how many there were, how many were distinct, and what was
/// wrong.
fn explore(run: &Run, images: usize, seed: u64) -> (usize, usize, Vec<String>) {
    let mut random = Rng::with_seed(seed);
    let points = crash_points(run.events.len(), &run.complete, images, &mut random);
    let mut durable = Durable::default();
    let mut distinct = BTreeSet::new();
    let mut wrong = Vec::new();
    for point in &points {
        let image = durable.image(&run.events, *point, &mut random);
        distinct.insert(crc32c::crc32c(&image));
        let last = run
            .complete
            .iter()
            .rposition(|complete| complete <= point)
            .unwrap() as u64;
        let file = Recorded::of(image);
        match check(&file, &run.models) {
            Ok((number, heap)) if number == last || number == last + 1 => {
                // Now and then it goes on from there.
                if random.u8(..16) == 0 && number != 0 {
                    heap.checkpoint(&run_record(&file)).unwrap();
                    drop(heap);
                    if let Err(what) = check(&file, &run.models) {
                        wrong.push(format!("after another checkpoint: {what}"));
                    }
                }
            }
            Ok((number, _)) => wrong.push(format!("checkpoint {number}, where {last} was the last")),
            Err(what) => wrong.push(format!("at {point}, checkpoint {last}: {what}")),
        }
    }
    (points.len(), distinct.len(), wrong)
}

/// The record of the last checkpoint in a file.
fn run_record(file: &Recorded) -> Vec<u8> {
    let copy = Recorded::of(file.bytes());
    FarHeap::restore(copy, TAG, &config()).unwrap().1
}

#[test]
fn crash_leaves_the_last_checkpoint_or_the_one_in_progress() {
    let (mut images, mut distinct) = (0, 0);
    for seed in 0..5 {
        let run = run(seed, 14, |_, _| {});
        assert!(run.complete.len() > 10);
        let (tried, found, wrong) = explore(&run, 300, seed);
        assert!(
            wrong.is_empty(),
            "seed {seed}: {} wrong: {:?}",
            wrong.len(),
            wrong.first()
        );
        images += tried;
        distinct += found;
    }
    println!("{images} images of crashes, {distinct} distinct, each restored and compared");
    assert!(distinct > 1000);
}

/// Makes a program faulty.
type Inject = fn(&Recorded, &FarHeap);

#[test]
fn crash_images_find_each_fault() {
    let faults: [(&str, Inject); 5] = [
        ("no sync before the root", |file, _| file.forget_sync(0)),
        ("no sync of the root", |file, _| file.forget_sync(1)),
        ("places that a checkpoint needs are used again", |_, heap| {
            heap.core().log.hold_nothing()
        }),
        ("objects that change are not saved first", |_, heap| {
            *heap.core().saver().unwrap().fault.lock() = Some(Fault::SavesNothing);
        }),
        ("open blocks are not closed by a cut", |_, heap| {
            *heap.core().saver().unwrap().fault.lock() = Some(Fault::LeavesOpen);
        }),
    ];
    for (name, fault) in faults {
        let run = run(1, 10, fault);
        let (images, _, wrong) = explore(&run, 150, 1);
        println!(
            "{name}: {} of {images} images are wrong: {:?}",
            wrong.len(),
            wrong.first()
        );
        assert!(!wrong.is_empty(), "{name} is not found");
    }
}
