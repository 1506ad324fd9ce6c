//! A program that goes on while checkpoints are made, and every moment at which it may crash: what is
//! restored is what it had after some of its steps.

use crate::recorded::{Durable, Event, Recorded, crash_points};
use crate::world::{Model, World};
use crate::{Ends, TAG, config, create, numbers_of, record_of};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_far_alloc::FarAlloc;

const SLABS: u32 = 40;

struct Run {
    seed: u64,
    /// The file before the first event.
    base: Vec<u8>,
    events: Vec<Event>,
    /// Events when the checkpoint of that number returned.
    complete: Vec<usize>,
    models: BTreeMap<u64, Model>,
}

impl Run {
    /// The model after so many steps.
    fn model(&mut self, steps: u64) -> Model {
        let before = self.models.range(..=steps).next_back();
        let mut model = before.map_or_else(|| Model::new(self.seed), |(_, model)| model.clone());
        while model.steps < steps {
            model.step();
        }
        self.models.insert(steps, model.clone());
        model
    }
}

/// `is_slow`: a write takes so long that much happens while a checkpoint saves pages.
fn run(seed: u64, checkpoints: u64, is_slow: bool) -> Option<Run> {
    let file = Recorded::default();
    if is_slow {
        file.after_writes(Some(Box::new(|| std::thread::sleep(Duration::from_millis(2)))));
    }
    let heap = create(file.clone(), SLABS)?;
    let mut world = World::new(&heap, seed);
    let names = world.names();
    for _ in 0..3000 {
        world.step();
    }
    file.record();
    let base = file.bytes();
    let mut complete = Vec::new();
    let is_ending = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&is_ending);
        let program = scope.spawn(|| {
            while !is_ending.load(Ordering::Relaxed) {
                world.step();
            }
        });
        let mut number = 0;
        for attempt in 0..checkpoints {
            // Some fail in the middle; the next one goes on from there.
            let fails = attempt % 5 == 3;
            if fails {
                file.fail_writes_after(Some(attempt % 4));
            }
            let made = heap.checkpoint(&record_of(&[number + 1, names[0], names[1]]));
            let events = file.events();
            file.fail_writes_after(None);
            match made {
                Ok(_) => {
                    number += 1;
                    complete.push(events);
                }
                Err(error) => assert!(fails, "{error}"),
            }
        }
        is_ending.store(true, Ordering::Relaxed);
        program.join().unwrap();
    });
    world.check().unwrap();
    drop(world);
    drop(heap);
    Some(Run {
        seed,
        base,
        events: file.take_events(),
        complete,
        models: BTreeMap::new(),
    })
}

/// The number of the checkpoint in a file, if it has what the program had then.
fn check(file: &Recorded, run: &mut Run, goes_on: bool) -> Result<u64, String> {
    let (heap, record) =
        FarAlloc::restore(file.clone(), TAG, &config()).map_err(|error| error.to_string())?;
    let numbers = numbers_of(&record);
    let Some([number, directory, counter]) = numbers.first_chunk().copied() else {
        return Ok(0);
    };
    let names = [directory, counter];
    let mut world = World::open(&heap, names, run.model(World::steps_of(names)));
    world.check()?;
    if goes_on {
        for _ in 0..300 {
            world.step();
        }
        heap.checkpoint(&record).map_err(|error| error.to_string())?;
        for _ in 0..300 {
            world.step();
        }
        world.check()?;
    }
    world.end()?;
    Ok(number)
}

fn explore(run: &mut Run, images: usize) -> Vec<String> {
    let mut random = Rng::with_seed(run.seed);
    let points = crash_points(run.events.len(), &run.complete, images, &mut random);
    let mut durable = Durable::of(std::mem::take(&mut run.base));
    let mut wrong = Vec::new();
    let events = std::mem::take(&mut run.events);
    for point in points {
        let image = durable.image(&events, point, &mut random);
        let last = run
            .complete
            .iter()
            .rposition(|complete| *complete <= point)
            .unwrap() as u64
            + 1;
        let file = Recorded::of(image);
        let goes_on = random.u8(..8) == 0;
        match check(&file, run, goes_on) {
            Ok(number) if number == last || number == last + 1 => {
                if goes_on && let Err(what) = check(&file, run, false) {
                    wrong.push(format!("after another checkpoint: {what}"));
                }
            }
            Ok(number) => wrong.push(format!("checkpoint {number}, where {last} was the last")),
            Err(what) => wrong.push(format!("at {point}, checkpoint {last}: {what}")),
        }
    }
    wrong
}

#[test]
fn crash_leaves_the_memory_of_the_last_checkpoint_or_of_the_one_in_progress() {
    let mut images = 0;
    for seed in 0..4 {
        let Some(mut run) = run(seed, 14, seed % 2 == 1) else {
            return;
        };
        assert!(run.complete.len() > 10);
        let wrong = explore(&mut run, 60);
        images += 60;
        assert!(
            wrong.is_empty(),
            "seed {seed}: {} wrong: {:?}",
            wrong.len(),
            wrong.first()
        );
    }
    println!("{images} images of crashes and more, each restored and compared");
}
