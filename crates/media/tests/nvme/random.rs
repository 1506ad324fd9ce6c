//! Random calls over random faults, against a model of what must be there.

use std::time::Duration;

use super::doubles::nvme::{Quirk, Shape, SimController};
use super::{OPTIONS, pattern, try_open};
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::{prop_assert, prop_assert_eq, proptest};
use varve_media::BlockDevice;
use varve_media::block::nvme::NvmeOptions;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 64;

#[derive(Debug, Clone)]
enum Call {
    Write { block: u64, blocks: u64, seed: usize },
    WriteDurable { block: u64, seed: usize },
    Read { off: u64, len: usize },
    Flush,
    Fault { after: u64, quirk: Quirk },
}

/// Faults after which the device does what it was asked for, in the end.
fn passing() -> impl Strategy<Value = Quirk> {
    prop_oneof![
        Just(Quirk::Drop),
        Just(Quirk::WrongPhase),
        any::<u16>().prop_map(Quirk::WrongId),
        Just(Quirk::Duplicate),
        Just(Quirk::WrongQueue),
        Just(Quirk::HeadPastEnd),
        Just(Quirk::Fatal),
        Just(Quirk::Status(0x07)),
        Just(Quirk::Status(0x82)),
        (1..10_000u64).prop_map(Quirk::Late),
    ]
}

/// Anything.
fn hostile() -> impl Strategy<Value = Quirk> {
    prop_oneof![
        8 => passing(),
        2 => Just(Quirk::Garbage),
        2 => any::<u16>().prop_map(Quirk::Status),
        1 => Just(Quirk::Lie),
        1 => Just(Quirk::Remove),
    ]
}

fn call(quirk: impl Strategy<Value = Quirk> + 'static) -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => (0..BLOCKS - 33, 1..33u64, any::<u8>())
            .prop_map(|(block, blocks, seed)| Call::Write { block, blocks, seed: seed.into() }),
        1 => (0..BLOCKS, any::<u8>())
            .prop_map(|(block, seed)| Call::WriteDurable { block, seed: seed.into() }),
        4 => (0..BLOCKS * 4096 - 70_000, 0..70_000usize).prop_map(|(off, len)| Call::Read { off, len }),
        1 => Just(Call::Flush),
        2 => (0..12u64, quirk).prop_map(|(after, quirk)| Call::Fault { after, quirk }),
    ]
}

/// What the device must hold, and what it must hold after a power cut.
struct Model {
    now: Vec<u8>,
    durable: Vec<Vec<u8>>,
    dirty: Vec<bool>,
}

impl Model {
    fn new() -> Self {
        Self {
            now: vec![0; BLOCKS as usize * BLOCK],
            durable: vec![vec![0; BLOCK]; BLOCKS as usize],
            dirty: vec![false; BLOCKS as usize],
        }
    }

    fn write(&mut self, block: u64, data: &[u8], durable: bool) {
        let at = block as usize * BLOCK;
        self.now[at..at + data.len()].copy_from_slice(data);
        for (index, part) in data.chunks(BLOCK).enumerate() {
            let block = block as usize + index;
            self.dirty[block] = !durable;
            if durable {
                self.durable[block] = part.to_vec();
            }
        }
    }

    fn flush(&mut self) {
        for (block, part) in self.now.chunks(BLOCK).enumerate() {
            self.durable[block] = part.to_vec();
            self.dirty[block] = false;
        }
    }
}

proptest! {
    #![proptest_config(proptest::test_runner::Config::with_cases(96))]

    #[test]
    fn device_with_passing_faults_is_a_device(
        seed in any::<u64>(),
        mdts in 0..4u8,
        shift in prop_oneof![Just(9u8), Just(12u8)],
        entries in 2..33u16,
        calls in proptest::collection::vec(call(passing()), 1..40),
    ) {
        let shape = Shape {
            sectors: (BLOCKS * 4096) >> shift,
            sector_shift: shift,
            mdts,
            ..Shape::default()
        };
        let sim = SimController::new(shape, seed);
        // One call meets no more faults than it takes, whenever they were asked for.
        let device = try_open(&sim, NvmeOptions { entries, ..OPTIONS }).unwrap();
        let mut model = Model::new();
        for call in calls {
            match call {
                Call::Write { block, blocks, seed } => {
                    let data = pattern(blocks as usize * BLOCK, seed);
                    device.write(block * 4096, &data).unwrap();
                    model.write(block, &data, false);
                }
                Call::WriteDurable { block, seed } => {
                    let data = pattern(BLOCK, seed);
                    device.write_durable(block * 4096, &data).unwrap();
                    model.write(block, &data, true);
                }
                Call::Read { off, len } => {
                    let mut out = vec![0xaa; len];
                    device.read(off, &mut out).unwrap();
                    let at = off as usize;
                    prop_assert!(out == model.now[at..at + len]);
                }
                Call::Flush => {
                    device.flush().unwrap();
                    model.flush();
                }
                Call::Fault { after, quirk } => {
                    if sim.to_come() < 3 {
                        sim.at(after, quirk);
                    }
                }
            }
        }
        prop_assert!(sim.content() == model.now);
        prop_assert_eq!(sim.violations(), Vec::<String>::new());
        std::mem::forget(device);
        sim.cut_power(true);
        for (block, part) in sim.content().chunks(BLOCK).enumerate() {
            prop_assert!(model.dirty[block] || part == model.durable[block], "block {}", block);
        }
    }

    #[test]
    fn hostile_device_crashes_nothing_and_every_call_ends(
        seed in any::<u64>(),
        entries in 2..33u16,
        calls in proptest::collection::vec(call(hostile()), 1..60),
    ) {
        let sim = SimController::new(Shape::default(), seed);
        let device = try_open(&sim, NvmeOptions { entries, ..OPTIONS }).unwrap();
        for call in calls {
            let begun = sim.elapsed();
            let _ = match call {
                Call::Write { block, blocks, seed } => {
                    device.write(block * 4096, &pattern(blocks as usize * BLOCK, seed))
                }
                Call::WriteDurable { block, seed } => {
                    device.write_durable(block * 4096, &pattern(BLOCK, seed))
                }
                Call::Read { off, len } => device.read(off, &mut vec![0; len]),
                Call::Flush => device.flush(),
                Call::Fault { after, quirk } => {
                    sim.at(after, quirk);
                    Ok(())
                }
            };
            prop_assert!(sim.elapsed() - begun < Duration::from_secs(60));
        }
        drop(device);
        prop_assert_eq!(sim.violations(), Vec::<String>::new());
    }
}
