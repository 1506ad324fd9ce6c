//! Groups of calls in the model of the machine: whole or not at all, whenever a program, the daemon or the
//! power fails; on every medium, with what came before in the log or digested, through seals amid the commit,
//! deaths, restarts and digests.
//!
//! `VARVE_SEED=n` chooses other groups; `VARVE_CRASH_EVERY=1` tries every image.

use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Script, Tally, explore_all};
use varve_testkit::ops::{Op, write};
use varve_testkit::rig::Shape;
use varve_testkit::workload::{self, Rng};

const MEDIA: [SimMedium; 3] = [SimMedium::Dax, SimMedium::File, SimMedium::Shm];

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

fn effort(seed: u64) -> Effort {
    if number("VARVE_CRASH_EVERY", 0) == 1 {
        Effort::all(seed)
    } else {
        Effort::thorough(seed)
    }
}

fn explore(what: &str, jobs: &[(Script, Shape, Effort)]) -> Tally {
    let tally = explore_all(jobs)
        .unwrap_or_else(|why| panic!("{what}, VARVE_SEED={}: {why}", number("VARVE_SEED", 1)));
    println!(
        "{what}: {} images of {} workloads: {tally:?}",
        tally.images, tally.workloads
    );
    tally
}

fn append(path: &'static str, len: u32, seed: u8) -> Op {
    Op::Append {
        path: vec![path],
        len,
        seed,
    }
}

/// What there is before: files `a` (6,000 bytes), `b` (300 bytes), `c`, a directory `d` with `d/x`, all made
/// by single calls.
fn before(digested: bool) -> Vec<Act> {
    let mut acts: Vec<_> = [
        Op::Create(vec!["a"]),
        write("a", 0, 6_000, 1),
        Op::Create(vec!["b"]),
        write("b", 0, 300, 2),
        Op::Create(vec!["c"]),
        Op::Mkdir(vec!["d"]),
        Op::Create(vec!["d", "x"]),
    ]
    .into_iter()
    .map(Act::Op)
    .collect();
    if digested {
        acts.push(Act::Digest);
    }
    acts
}

/// Groups that succeed, of every call and of calls that build on each other.
fn groups() -> Vec<Vec<Op>> {
    vec![
        // Two files at once: the account that loses and the one that gains.
        vec![write("a", 0, 4_096, 5), write("b", 0, 128, 6)],
        vec![
            write("a", 1_000, 100, 5),
            append("b", 500, 6),
            append("b", 700, 7),
        ],
        // The way to replace a file and its neighbour.
        vec![
            Op::Create(vec!["new"]),
            write("new", 0, 5_000, 8),
            Op::Rename(vec!["new"], vec!["a"]),
            append("b", 64, 9),
        ],
        // A directory with what is in it.
        vec![
            Op::Mkdir(vec!["n"]),
            Op::Create(vec!["n", "p"]),
            Op::Write {
                path: vec!["n", "p"],
                offset: 0,
                len: 3_000,
                seed: 3,
            },
            Op::Symlink(vec!["n", "s"]),
            Op::Mkdir(vec!["n", "m"]),
            Op::Create(vec!["n", "m", "q"]),
        ],
        // Names only, over two directories.
        vec![
            Op::Rename(vec!["a"], vec!["d", "x"]),
            Op::Rename(vec!["b"], vec!["a"]),
            Op::Unlink(vec!["c"]),
        ],
        vec![
            Op::Link(vec!["a"], vec!["d", "a2"]),
            Op::Unlink(vec!["a"]),
            Op::Link(vec!["b"], vec!["b2"]),
            Op::Rename(vec!["d"], vec!["e"]),
        ],
        // Cut, and grown again.
        vec![
            Op::Truncate {
                path: vec!["a"],
                size: 10,
            },
            append("a", 20, 4),
            Op::Truncate {
                path: vec!["b"],
                size: 9_000,
            },
            write("b", 8_000, 2_000, 7),
        ],
        // What comes and goes.
        vec![
            Op::Create(vec!["t"]),
            write("t", 0, 2_000, 8),
            Op::Unlink(vec!["t"]),
            write("c", 0, 100, 1),
        ],
    ]
}

#[test]
fn group_is_whole_or_not_there_after_any_crash() {
    let seed = number("VARVE_SEED", 1);
    let mut jobs = Vec::new();
    for (index, group) in groups().into_iter().enumerate() {
        for (at, medium) in MEDIA.into_iter().enumerate() {
            let script = Script {
                before: before((index + at) % 2 == 0),
                acts: vec![Act::Op(Op::Together(group.clone())), Act::Digest, Act::Tick],
            };
            jobs.push((script, Shape::tiny(medium), effort(seed + index as u64)));
        }
    }
    let sum = explore("groups", &jobs);
    assert!(sum.images > 1_000 && sum.ahead > 10, "{sum:?}");
}

#[test]
fn group_stands_in_order_with_calls_before_and_after() {
    let mut rng = Rng::new(number("VARVE_SEED", 1));
    let mut jobs = Vec::new();
    for (index, group) in groups().into_iter().enumerate() {
        let mut acts = vec![
            Act::Op(write("a", 4_000, 200, 11)),
            Act::Op(Op::Create(vec!["z"])),
            Act::Op(Op::Together(group)),
            Act::Op(write("z", 0, 50, 12)),
        ];
        match rng.below(3) {
            0 => acts.push(Act::Op(Op::Fsync(Vec::new()))),
            1 => acts.insert(2, Act::Op(Op::Fsync(Vec::new()))),
            _ => {}
        }
        acts.push(Act::Op(Op::Together(vec![
            append("z", 30, 13),
            Op::Create(vec!["y"]),
        ])));
        acts.push(Act::Digest);
        let script = Script {
            before: before(index % 2 == 1),
            acts,
        };
        jobs.push((script, Shape::tiny(MEDIA[index % 3]), effort(rng.next_u64())));
    }
    let sum = explore("groups among calls", &jobs);
    assert!(sum.images > 500, "{sum:?}");
}

#[test]
fn group_is_whole_or_done_again_when_its_session_is_sealed_amid_it() {
    let mut jobs = Vec::new();
    let mut seed = number("VARVE_SEED", 1);
    for group in groups() {
        for stores in [1, 2, 3, 5] {
            seed += 1;
            let script = Script {
                before: before(seed.is_multiple_of(2)),
                acts: vec![
                    Act::Amid(stores),
                    Act::Op(Op::Together(group.clone())),
                    Act::Op(Op::Create(vec!["after"])),
                    Act::Digest,
                ],
            };
            jobs.push((script, Shape::tiny(MEDIA[(seed % 3) as usize]), effort(seed)));
        }
    }
    let sum = explore("sealed groups", &jobs);
    assert!(sum.images > 500 && sum.resumed > 10, "{sum:?}");
}

#[test]
fn group_passes_between_sessions_as_a_whole() {
    let mut jobs = Vec::new();
    let mut seed = number("VARVE_SEED", 1) ^ 0x77;
    for group in groups() {
        seed += 1;
        let mine = vec![Op::Create(vec!["w"]), write("w", 0, 900, 3), append("c", 40, 2)];
        for middle in [Act::Tick, Act::Die(0), Act::SealOne(0), Act::Restart] {
            let script = Script {
                before: before(true),
                acts: vec![
                    Act::By(0, Op::Together(mine.clone())),
                    middle,
                    Act::By(1, Op::Together(group.clone())),
                    Act::By(0, write("w", 100, 10, 9)),
                    Act::Digest,
                ],
            };
            jobs.push((script, Shape::tiny(MEDIA[(seed % 3) as usize]), effort(seed)));
        }
    }
    let sum = explore("groups of two sessions", &jobs);
    assert!(sum.images > 500, "{sum:?}");
}

#[test]
fn group_that_fails_changes_nothing() {
    let mut jobs = Vec::new();
    let failing = [
        vec![write("a", 0, 100, 9), Op::Create(vec!["b"])],
        vec![
            Op::Create(vec!["n"]),
            Op::Unlink(vec!["c"]),
            Op::Unlink(vec!["c"]),
        ],
        vec![Op::Unlink(vec!["a"]), Op::Unlink(vec!["d"])],
        vec![
            Op::Mkdir(vec!["n"]),
            Op::Create(vec!["n", "p"]),
            Op::Create(vec!["n", "p"]),
        ],
    ];
    for (index, group) in failing.into_iter().enumerate() {
        let script = Script {
            before: before(index % 2 == 0),
            acts: vec![
                Act::Op(Op::Together(group)),
                Act::Op(append("a", 10, 3)),
                Act::Digest,
            ],
        };
        jobs.push((script, Shape::tiny(MEDIA[index % 3]), effort(index as u64)));
    }
    let sum = explore("groups that fail", &jobs);
    assert!(sum.images > 50, "{sum:?}");
    // The singles of the other tests are as they were: groups are no part of them.
    assert!(
        workload::singles()
            .iter()
            .all(|op| !matches!(op, Op::Together(_)))
    );
}
