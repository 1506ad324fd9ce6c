//! Crashes in the model of the machine: every operation kind, pairs of kinds on shared names, digests, restarts, recovery itself.
//!
//! The ordinary run covers all single operations and a seeded part of the rest within a time of its own. `VARVE_CRASH_EVERY=1` tries every
//! pair at every point with more subsets; `VARVE_SEED=n` chooses another part.

use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Script, Tally};
use varve_testkit::ops::Op;
use varve_testkit::rig::Shape;
use varve_testkit::workload::{self, Rng};

fn seed() -> u64 {
    std::env::var("VARVE_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1)
}

fn every() -> bool {
    std::env::var("VARVE_CRASH_EVERY").is_ok_and(|text| text == "1")
}

fn effort() -> Effort {
    if every() {
        Effort::all(seed())
    } else {
        Effort::ordinary(seed())
    }
}

fn explore(script: &Script, medium: SimMedium, effort: &Effort, sum: &mut Tally) {
    let explored = script
        .record(Shape::small(medium))
        .map_err(|why| (Tally::default(), why))
        .and_then(|recorded| recorded.explore(effort));
    match explored {
        Ok(tally) => sum.add(&tally),
        Err((_, why)) => panic!("VARVE_SEED={}: {why}", seed()),
    }
}

fn setup(digested: bool) -> Vec<Act> {
    let mut acts: Vec<_> = workload::setup().into_iter().map(Act::Op).collect();
    if digested {
        acts.push(Act::Digest);
    }
    acts
}

fn ops(ops: &[Op]) -> Vec<Act> {
    ops.iter().cloned().map(Act::Op).collect()
}

const MEDIA: [SimMedium; 3] = [SimMedium::Dax, SimMedium::File, SimMedium::Shm];

#[test]
fn every_single_operation_is_atomic_when_it_crashes() {
    let mut sum = Tally::default();
    for (index, op) in workload::singles().into_iter().enumerate() {
        for medium in MEDIA {
            // In turn: what came before is in the log still, or digested.
            let script = Script {
                before: setup(index % 2 == 0),
                acts: vec![Act::Op(op.clone()), Act::Digest, Act::Tick],
            };
            explore(&script, medium, &effort(), &mut sum);
        }
    }
    eprintln!("single operations: {sum:?}");
    assert!(sum.images > 500, "{sum:?}");
}

#[test]
fn pairs_of_operations_keep_their_order_when_they_crash() {
    let mut pairs = workload::pairs();
    let mut rng = Rng::new(seed());
    // A random order, so that a part of them is a fair part.
    for at in (1..pairs.len()).rev() {
        pairs.swap(at, rng.below(at as u64 + 1) as usize);
    }
    let (mut sum, mut done) = (Tally::default(), 0);
    let most = if every() { pairs.len() } else { 60 };
    for pair in pairs.iter().take(most) {
        let media: &[SimMedium] = if every() {
            &MEDIA
        } else {
            &MEDIA[done % 2..=done % 2]
        };
        for medium in media {
            let script = Script {
                before: setup(rng.below(2) == 0),
                acts: [ops(pair), vec![Act::Digest]].concat(),
            };
            explore(&script, *medium, &effort(), &mut sum);
        }
        done += 1;
    }
    eprintln!("{done} pairs: {sum:?}");
    assert!(sum.images > 500, "{sum:?}");
}

#[test]
fn long_runs_keep_a_prefix_when_they_crash() {
    let mut sum = Tally::default();
    let runs = if every() { 60 } else { 4 };
    for run in 0..runs {
        let mut rng = Rng::new(seed() * 1000 + run);
        let medium = MEDIA[(run % 2) as usize];
        let acts = (0..24)
            .map(|_| match rng.below(10) {
                0 => Act::Digest,
                1 => Act::Op(Op::Fsync(vec![])),
                2 => Act::Tick,
                3 => Act::Checkpoint,
                4 => Act::Seal,
                _ => Act::Op(workload::random_op(&mut rng)),
            })
            .collect();
        let script = Script {
            before: setup(true),
            acts,
        };
        let effort = if every() {
            effort()
        } else {
            Effort {
                stride: 2,
                ..effort()
            }
        };
        explore(&script, medium, &effort, &mut sum);
    }
    eprintln!("{runs} long runs: {sum:?}");
    assert!(sum.images > 100, "{sum:?}");
}

#[test]
fn restart_of_the_daemon_can_crash_too() {
    let mut sum = Tally::default();
    for medium in MEDIA {
        let mut acts = ops(&workload::singles()[4..8]);
        acts.push(Act::Restart);
        acts.extend(ops(&[
            Op::Create(vec!["g"]),
            Op::Rename(vec!["g"], vec!["f"]),
            Op::Fsync(vec![]),
        ]));
        acts.push(Act::Restart);
        explore(
            &Script {
                before: setup(false),
                acts,
            },
            medium,
            &effort(),
            &mut sum,
        );
    }
    eprintln!("restarts: {sum:?}");
    assert!(sum.images > 50, "{sum:?}");
}

#[test]
fn recovery_can_crash_again_and_again() {
    let mut sum = Tally::default();
    let effort = Effort {
        recovery_stride: if every() { 5 } else { 9 },
        ..effort()
    };
    for medium in MEDIA {
        let acts = [
            ops(&workload::singles()[..1]),
            ops(&workload::singles()[18..20]),
            vec![Act::Digest],
        ]
        .concat();
        explore(
            &Script {
                before: setup(false),
                acts,
            },
            medium,
            &effort,
            &mut sum,
        );
    }
    eprintln!("recoveries: {sum:?}");
    assert!(sum.of_recovery > 30, "{sum:?}");
}

#[test]
fn big_files_on_all_tiers_are_whole_when_it_crashes() {
    let mut sum = Tally::default();
    for medium in [SimMedium::Dax, SimMedium::File] {
        let write = |path: &'static str, offset, len, seed| Op::Write {
            path: vec![path],
            offset,
            len,
            seed,
        };
        let before = [
            setup(true),
            ops(&[
                Op::Create(vec!["a"]),
                Op::Create(vec!["b"]),
                Op::Create(vec!["c"]),
                write("a", 0, 300_000, 1),
            ]),
            vec![Act::Digest],
        ]
        .concat();
        let acts = [
            ops(&[
                write("b", 0, 200_000, 2),
                write("c", 5, 200_000, 3),
                write("a", 100_001, 90_000, 4),
            ]),
            vec![Act::Digest],
            ops(&[
                Op::Truncate {
                    path: vec!["a"],
                    size: 5,
                },
                Op::Unlink(vec!["b"]),
                Op::Fsync(vec![]),
            ]),
            vec![Act::Digest, Act::Tick, Act::Checkpoint],
        ]
        .concat();
        let effort = if every() {
            effort()
        } else {
            Effort {
                stride: 2,
                ..effort()
            }
        };
        explore(&Script { before, acts }, medium, &effort, &mut sum);
    }
    eprintln!("big files: {sum:?}");
    assert!(sum.images > 40, "{sum:?}");
}
