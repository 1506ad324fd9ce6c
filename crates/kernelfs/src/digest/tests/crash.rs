//! Exactly once: a digest that crashes anywhere is finished after the restart, with the same result as one
//! that did not crash; and one digest of everything gives the same result as a digest after each operation.

use super::machine::{DIR, FILE, Machine, NONE, ROOT, create};
use std::collections::BTreeMap;
use varve_format::{EntryFlags, FallocateMode, InodeKey, LogOp, SetAttr, SetAttrMask};
use varve_media::sim::{Crash, Recording};

struct Random(u64);

impl Random {
    const fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

const NAMES: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];

/// Writes random operations to the log; most of them are possible.
fn write_log(machine: &mut Machine, seed: u64, len: usize) {
    let mut random = Random(seed);
    let keys = machine.numbers(16);
    let dir = keys[0];
    machine.create(ROOT, b"dir", dir, DIR);
    let mut unused = keys[1..].to_vec();
    let mut names: Vec<(InodeKey, &[u8], InodeKey)> = Vec::new();
    for step in 0..len {
        let to = if random.below(2) == 0 { ROOT } else { dir };
        let name = NAMES[random.below(5) as usize];
        let place = names
            .iter()
            .position(|(at, there, _)| *at == to && *there == name);
        let some = (!names.is_empty()).then(|| random.below(names.len().max(1) as u64) as usize);
        let fill = vec![step as u8 + 1; 1 + random.below(9000) as usize];
        let offset = random.below(20_000);
        match (random.below(10), some, place) {
            (0..=2, _, None) | (_, None, None) => {
                let Some(key) = unused.pop() else { continue };
                let more = LogOp::Write {
                    key,
                    offset,
                    data: &fill,
                };
                machine.write(&[(NONE, create(to, name, key, FILE)), (NONE, more)]);
                names.push((to, name, key));
            }
            (0, Some(_), Some(at)) | (3, Some(at), _) => {
                let (dir, name, key) = names.swap_remove(at);
                machine.write(&[(EntryFlags::LAST_CLOSED, LogOp::Unlink { dir, name, key })]);
            }
            (4, Some(at), _) if place != Some(at) => {
                let (dir, old, key) = names[at];
                let victim = place.map(|place| names[place].2);
                names[at] = (to, name, key);
                if let Some(place) = place.filter(|_| victim != Some(key)) {
                    names.remove(place);
                }
                machine.write(&[(
                    EntryFlags::LAST_CLOSED,
                    LogOp::Rename {
                        dir,
                        name: old,
                        key,
                        new_dir: to,
                        new_name: name,
                        victim,
                        exchange: false,
                    },
                )]);
            }
            (5, Some(at), None) => {
                let key = names[at].2;
                machine.op(LogOp::Link { dir: to, name, key });
                names.push((to, name, key));
            }
            (6, Some(at), _) => machine.op(LogOp::Truncate {
                key: names[at].2,
                size: offset,
            }),
            (7, Some(at), _) => {
                let mode = FallocateMode::from_u32(random.below(5) as u32).unwrap();
                machine.op(LogOp::Fallocate {
                    key: names[at].2,
                    mode,
                    offset,
                    len: fill.len() as u64,
                });
            }
            (8, Some(at), _) => {
                let attr = SetAttr {
                    mask: SetAttrMask::MODE,
                    mode: step as u32,
                    ..SetAttr::default()
                };
                let value = LogOp::SetXattr {
                    key: names[at].2,
                    name: b"user.step",
                    value: &fill[..300.min(fill.len())],
                };
                machine.write(&[
                    (
                        NONE,
                        LogOp::SetAttr {
                            key: names[at].2,
                            attr,
                        },
                    ),
                    (NONE, value),
                ]);
            }
            (_, Some(at), _) => machine.op(LogOp::Write {
                key: names[at].2,
                offset,
                data: &fill,
            }),
            (_, None, Some(_)) => {}
        }
    }
}

#[test]
fn digest_at_once_equals_digest_one_by_one() {
    for seed in 1..25 {
        let mut together = Machine::new();
        write_log(&mut together, seed * 7919, 60);
        let mut alone = Machine::new();
        write_log(&mut alone, seed * 7919, 60);
        let whole = together.digest(usize::MAX).unwrap();
        let each = alone.digest(1).unwrap();
        assert!(whole.len() < each.len());
        assert_eq!(together.dump(), alone.dump(), "seed {seed}");
        let refused: usize = whole.iter().map(|applied| applied.refused.len()).sum();
        assert_eq!(
            refused,
            each.iter().map(|applied| applied.refused.len()).sum::<usize>()
        );
    }
}

/// Checks that after a crash at any point of `recording` the rest of the log is digested to `expected`, and
/// that the pool checks clean.
fn every_crash_is_digested_to(expected: &BTreeMap<String, String>, recording: &Recording, seed: u64) {
    let points = recording.durability_points();
    assert!(points.len() > 10);
    let mut unfinished = 0;
    for (at, point) in points.iter().enumerate() {
        for crash in [
            Crash::PowerNone,
            Crash::PowerSeeded(seed + at as u64),
            Crash::Kill,
        ] {
            let mut after = Machine::open(recording.image(point.index, crash).into_world());
            unfinished += usize::from(!after.digest(9).unwrap().is_empty());
            assert_eq!(&after.dump(), expected, "seed {seed}, {point:?}, {crash:?}");
        }
    }
    assert!(unfinished > 5, "the crashes came after the work");
}

#[test]
fn digest_happens_exactly_once_when_it_crashes_anywhere() {
    for seed in [11, 12] {
        let mut machine = Machine::new();
        write_log(&mut machine, seed * 104_729, 40);
        let world = machine.world.clone();
        let (recording, expected) = world.record(|| {
            machine.digest(6).unwrap();
            machine.dump()
        });
        every_crash_is_digested_to(&expected, &recording, seed);
    }
}

#[test]
fn digest_happens_exactly_once_when_its_metadata_is_on_flash_and_it_crashes_anywhere() {
    for seed in [21, 22] {
        let mut machine = Machine::with_flash();
        write_log(&mut machine, seed * 104_729, 40);
        machine.digest(usize::MAX).unwrap();
        assert!(machine.store.demote(u64::MAX).unwrap() > 0);
        machine.store.checkpoint().unwrap();
        write_more(&mut machine, seed);
        let world = machine.world.clone();
        let (recording, expected) = world.record(|| {
            machine.digest(6).unwrap();
            machine.store.demote(u64::MAX).unwrap();
            machine.dump()
        });
        assert!(machine.store.demotion_stats().back > 0);
        every_crash_is_digested_to(&expected, &recording, seed);
    }
}

/// Changes existing files and makes new ones.
fn write_more(machine: &mut Machine, seed: u64) {
    let keys = machine.numbers(8);
    for (number, key) in (0_u64..).zip(keys) {
        let name = format!("more {number}");
        let data = vec![number as u8 + 1; 3000 + (seed * number) as usize];
        let write = LogOp::Write {
            key,
            offset: number * 100,
            data: &data,
        };
        machine.write(&[(NONE, create(ROOT, name.as_bytes(), key, FILE)), (NONE, write)]);
        if number % 3 == 0 {
            let unlink = LogOp::Unlink {
                dir: ROOT,
                name: name.as_bytes(),
                key,
            };
            machine.write(&[(EntryFlags::LAST_CLOSED, unlink)]);
        }
    }
}
