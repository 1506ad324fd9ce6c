//! A program that allocates, frees and writes, one step after the other, and a model of what it has after
//! each.

use crate::common::at;
use fastrand::Rng;
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use varve_far_alloc::{Error, FarAlloc};
use varve_far_objects::Error as StoreError;

/// Objects that there are at most.
pub const ENTRIES: usize = 300;
const STRIDE: usize = 4096;
/// A file that takes no writes for so long is an error.
const PATIENCE: Duration = Duration::from_secs(60);
const SIZES: [usize; 10] = [4, 24, 60, 100, 128, 500, 3000, 4096, 5000, 9000];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Object,
    Array,
    Bytes,
    Zeroed,
}

#[derive(Debug, Clone)]
enum Step {
    Make(Kind, usize, u64),
    Write(usize, usize, u64),
    Resize(usize),
    Free,
    Read,
}

/// What the program has.
#[derive(Debug, Clone)]
pub struct Model {
    random: Rng,
    pub steps: u64,
    pub all: Vec<Option<(bool, Vec<u8>)>>,
}

fn fill(seed: u64, bytes: &mut [u8]) {
    Rng::with_seed(seed).fill(bytes);
}

impl Model {
    pub fn new(seed: u64) -> Self {
        Self {
            random: Rng::with_seed(seed),
            steps: 0,
            all: vec![None; ENTRIES],
        }
    }

    /// The next step and the entry that it is about.
    fn next(&mut self) -> (usize, Step) {
        let random = &mut self.random;
        let index = random.usize(..ENTRIES);
        let step = match &self.all[index] {
            None => {
                let kind =
                    [Kind::Object, Kind::Object, Kind::Array, Kind::Bytes, Kind::Zeroed][random.usize(..5)];
                let size = SIZES[random.usize(..SIZES.len())];
                Step::Make(kind, size, random.u64(..))
            }
            Some((is_bytes, bytes)) => match random.u8(..10) {
                0 => Step::Free,
                1 if *is_bytes => Step::Resize(1 + random.usize(..6000)),
                2..4 => Step::Read,
                _ => {
                    let from = random.usize(..bytes.len());
                    Step::Write(from, 1 + random.usize(..bytes.len() - from), random.u64(..))
                }
            },
        };
        (index, step)
    }

    fn apply(&mut self, index: usize, step: &Step) {
        self.steps += 1;
        let entry = &mut self.all[index];
        match (step, entry.as_mut()) {
            (Step::Make(kind, size, seed), _) => {
                let mut bytes = vec![0; *size];
                fill(*seed, &mut bytes);
                *entry = Some((matches!(kind, Kind::Bytes | Kind::Zeroed), bytes));
            }
            (Step::Write(from, len, seed), Some((_, bytes))) => fill(*seed, &mut bytes[*from..from + len]),
            (Step::Resize(len), Some((_, bytes))) => {
                let before = bytes.len();
                bytes.resize(*len, 0);
                if let Some(more) = bytes.get_mut(before..) {
                    fill(7, more);
                }
            }
            (Step::Free, _) => *entry = None,
            _ => {}
        }
    }

    pub fn step(&mut self) {
        let (index, step) = self.next();
        self.apply(index, &step);
    }
}

/// The program, on a heap.
pub struct World<'a> {
    heap: &'a FarAlloc,
    pub model: Model,
    /// An array of pointers, each a small object on a page of its own.
    directory: usize,
    counter: usize,
}

fn read(from: usize, bytes: &mut [u8]) {
    // SAFETY: the model says that so many bytes are allocated there.
    unsafe { std::ptr::copy_nonoverlapping(at(from).as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
}

fn write(to: usize, bytes: &[u8]) {
    // SAFETY: as above.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at(to).as_ptr(), bytes.len()) };
}

fn word(from: usize) -> u64 {
    let mut bytes = [0; 8];
    read(from, &mut bytes);
    u64::from_le_bytes(bytes)
}

fn address(pointer: NonNull<u8>) -> usize {
    pointer.addr().get()
}

impl<'a> World<'a> {
    pub fn new(heap: &'a FarAlloc, seed: u64) -> Self {
        Self {
            heap,
            model: Model::new(seed),
            directory: address(heap.oalloc(ENTRIES, 24).unwrap()),
            counter: address(heap.oalloc(1, 8).unwrap()),
        }
    }

    /// As a record of it says.
    pub fn open(heap: &'a FarAlloc, names: [u64; 2], model: Model) -> Self {
        let [directory, counter] = names.map(|name| name as usize);
        Self {
            heap,
            model,
            directory,
            counter,
        }
    }

    pub fn names(&self) -> [u64; 2] {
        [self.directory as u64, self.counter as u64]
    }

    /// Steps that the program of a heap made.
    pub fn steps_of(names: [u64; 2]) -> u64 {
        word(names[1] as usize)
    }

    fn entry(&self, index: usize) -> usize {
        self.directory + index * STRIDE
    }

    /// One step, all of it on one side of a cut. Begun anew where the file takes no writes for a while: a
    /// checkpoint that is to fail may first have to wait for this thread.
    pub fn step(&mut self) {
        let (index, step) = self.model.next();
        let begun = Instant::now();
        loop {
            let _together = self.heap.together().unwrap();
            match self.perform(index, &step) {
                Ok(()) => {
                    self.model.apply(index, &step);
                    write(self.counter, &self.model.steps.to_le_bytes());
                    return;
                }
                Err(Error::Objects(StoreError::Io { .. })) if begun.elapsed() < PATIENCE => {}
                Err(error) => panic!("{step:?}: {error}"),
            }
        }
    }

    /// What fails has changed nothing.
    fn perform(&self, index: usize, step: &Step) -> Result<(), Error> {
        let entry = self.entry(index);
        let there = word(entry) as usize;
        match step {
            Step::Make(kind, size, seed) => {
                let mut bytes = vec![0; *size];
                let made = match kind {
                    Kind::Object => self.heap.oalloc(1, *size),
                    // One of two, which is used.
                    Kind::Array => self.heap.oalloc(2, *size),
                    Kind::Bytes => self.heap.malloc(*size),
                    Kind::Zeroed => self.heap.calloc(1, *size),
                };
                let made = address(made?);
                if *kind != Kind::Bytes {
                    read(made, &mut bytes);
                    assert!(bytes.iter().all(|byte| *byte == 0), "not zeros");
                }
                fill(*seed, &mut bytes);
                write(made, &bytes);
                write(entry, &(made as u64).to_le_bytes());
            }
            Step::Write(from, len, seed) => {
                let mut bytes = vec![0; *len];
                fill(*seed, &mut bytes);
                write(there + from, &bytes);
            }
            Step::Resize(len) => {
                let before = self.model.all[index].as_ref().unwrap().1.len();
                let made = address(self.heap.realloc(at(there), *len)?);
                if *len > before {
                    let mut bytes = vec![0; len - before];
                    fill(7, &mut bytes);
                    write(made + before, &bytes);
                }
                write(entry, &(made as u64).to_le_bytes());
            }
            Step::Free => {
                write(entry, &[0; 8]);
                self.heap.free(at(there)).unwrap();
            }
            Step::Read => {
                let model = &self.model.all[index].as_ref().unwrap().1;
                let mut bytes = vec![0; model.len()];
                read(there, &mut bytes);
                assert!(bytes == *model, "entry {index} of {} bytes", bytes.len());
            }
        }
        Ok(())
    }

    /// What is not as the model says.
    pub fn check(&self) -> Result<(), String> {
        if word(self.counter) != self.model.steps {
            return Err("another number of steps".into());
        }
        for (index, model) in self.model.all.iter().enumerate() {
            let there = word(self.entry(index)) as usize;
            match model {
                None if there == 0 => {}
                Some((_, bytes)) if there != 0 => {
                    let mut is = vec![0; bytes.len()];
                    crate::common::try_load(at(there), &mut is)
                        .map_err(|signal| format!("entry {index}: signal {signal}"))?;
                    if is != *bytes {
                        let at = is.iter().zip(bytes).position(|(is, was)| is != was);
                        return Err(format!(
                            "entry {index} of {} bytes differs at {at:?}",
                            bytes.len()
                        ));
                    }
                }
                _ => return Err(format!("entry {index} is there or not")),
            }
        }
        Ok(())
    }

    /// Frees all: each has to be allocated, and nothing else.
    pub fn end(self) -> Result<(), String> {
        for index in 0..ENTRIES {
            let there = word(self.entry(index)) as usize;
            if there != 0 {
                let freed = self.heap.free(at(there));
                freed.map_err(|error| format!("entry {index}: {error}"))?;
            }
        }
        for all in [self.directory, self.counter] {
            self.heap.free(at(all)).map_err(|error| error.to_string())?;
        }
        match self.heap.objects().unwrap().stats().log.promised_bytes {
            0 => Ok(()),
            bytes => Err(format!("{bytes} bytes are allocated that nobody has")),
        }
    }
}
