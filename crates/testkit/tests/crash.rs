//! Crashes in the model of the machine: every operation kind, every pair of kinds on shared names, sessions
//! that pass leases on and die, digests, migration, deletion, restarts, recovery itself.
//!
//! The ordinary run covers all single operations and all pairs, and seeded parts of the rest, within a time
//! of its own. `VARVE_SEED=n` chooses other parts; `VARVE_CRASH_EVERY=1` tries much more;
//! `VARVE_CRASH_SCALE=n` does n times as many random workloads. What fails is made small and printed with the
//! command that repeats it (`VARVE_CRASH_SCRIPT`).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use varve_format::Tier;
use varve_media::sim::SimMedium;
use varve_testkit::crash::{
    Act, Effort, Flavour, Job, Known, Script, Strain, Syncs, Tally, explore_or_shrink, sequence, shared,
};
use varve_testkit::ops::{Op, write};
use varve_testkit::rig::{Policy, Shape};
use varve_testkit::workload::{self, Rng};

fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}

fn seed() -> u64 {
    number("VARVE_SEED", 1)
}

fn every() -> bool {
    number("VARVE_CRASH_EVERY", 0) == 1
}

fn scale() -> u64 {
    number("VARVE_CRASH_SCALE", 1)
}

/// `given`, or everything if that is asked for.
fn effort(given: Effort) -> Effort {
    if every() { Effort::all(given.seed) } else { given }
}

fn explore(what: &str, jobs: &[Job]) -> Tally {
    let started = std::time::Instant::now();
    let tally = explore_or_shrink(jobs).unwrap_or_else(|why| panic!("VARVE_SEED={}: {why}", seed()));
    let secs = started.elapsed().as_secs_f64();
    // Past the tests' capture: an ordinary run says how much it tried.
    let _ = writeln!(
        std::io::stdout(),
        "crash images, {what}: {} images of {} workloads in {secs:.1} s; {} distinct so far",
        tally.images,
        tally.workloads,
        varve_testkit::crash::tried()
    );
    println!("{what}: {tally:?}");
    println!("{}", by_medium(what, &tally));
    tally
}

/// Media with their rules, in the order of columns.
const RULES: [&str; 3] = ["dax", "file", "shm"];

/// Adds the images of a test to those of all until now; a line about the test, and the table of all.
fn by_medium(what: &str, tally: &Tally) -> String {
    static ALL: Mutex<BTreeMap<&str, [usize; 3]>> = Mutex::new(BTreeMap::new());
    let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let mut mine = [0; 3];
    for ((activity, medium), images) in &tally.by_medium {
        let column = RULES.iter().position(|rules| rules == medium);
        let column = column.expect("a medium");
        all.entry(activity).or_default()[column] += images;
        mine[column] += images;
    }
    let cells = |images: [usize; 3]| images.map(|images| images.to_string()).join(" | ");
    let mut table = format!("| {what} | {} |\n\n", cells(mine));
    let _ = write!(
        table,
        "| during | {} |\n| --- | --- | --- | --- |",
        RULES.join(" | ")
    );
    for (activity, images) in all.iter() {
        let _ = write!(table, "\n| {activity} | {} |", cells(*images));
    }
    table
}

/// At least so many images during an activity, by the rules of `dax` and by those of `file` each.
fn on_both(tally: &Tally, activity: &'static str, least: usize) {
    for rules in ["dax", "file"] {
        let images = tally.by_medium.get(&(activity, rules)).copied().unwrap_or(0);
        assert!(
            images >= least,
            "{images} images of {rules} during {activity}: {tally:?}"
        );
    }
}

fn setup(digested: bool) -> Vec<Act> {
    let mut acts = ops(&workload::setup());
    if digested {
        acts.push(Act::Digest);
    }
    acts
}

fn ops(ops: &[Op]) -> Vec<Act> {
    ops.iter().cloned().map(Act::Op).collect()
}

const MEDIA: [SimMedium; 3] = [SimMedium::Dax, SimMedium::File, SimMedium::Shm];

/// The workload that a failure printed.
#[test]
fn given_script_is_explored() {
    let given = std::env::var("VARVE_CRASH_SCRIPT");
    let text = given.as_deref().unwrap_or(
        "[create /f] then [write /f offset=0 len=5000 seed=1, fsync /, digest] on File Scatter nvm=6291456 \
        journal=262144 blocks=4194304 verify=false with every-point=true torn=1 stride=1 seeds=2 \
        combinations=true recovery=40 seed=1",
    );
    let job = Script::job_from(text).unwrap_or_else(|error| panic!("{error}"));
    let sum = explore("given", &[job]);
    assert!(sum.images > 0, "{sum:?}");
}

#[test]
fn every_single_operation_is_atomic_when_it_crashes() {
    let mut jobs = Vec::new();
    for (index, op) in workload::singles().into_iter().enumerate() {
        for medium in MEDIA {
            for syncs in syncs_of(medium, &[Syncs::Nowhere, Syncs::After]) {
                // What came before is in the log still, or digested.
                for digested in [true, false] {
                    let script = Script {
                        before: setup(digested),
                        acts: [
                            sequence(std::slice::from_ref(&op), syncs),
                            vec![Act::Digest, Act::Tick],
                        ]
                        .concat(),
                    };
                    let thorough = Effort::thorough(seed() + index as u64);
                    jobs.push((script, Shape::tiny(medium), effort(thorough)));
                }
            }
        }
    }
    let sum = explore("single operations", &jobs);
    assert!(sum.images > 2_000 && sum.ahead > 50, "{sum:?}");
    // Two media without syncs and one with both, or all with both; digested before, or not.
    let each = if every() { 12 } else { 8 };
    assert_eq!(sum.workloads, workload::singles().len() * each);
    on_both(&sum, "operation", 100);
    on_both(&sum, "digest", 300);
}

/// Where an `fsync` makes a difference, all of `syncs`; elsewhere none is done.
fn syncs_of(medium: SimMedium, syncs: &[Syncs]) -> Vec<Syncs> {
    if medium == SimMedium::File || every() {
        syncs.to_vec()
    } else {
        vec![Syncs::Nowhere]
    }
}

#[test]
fn pairs_of_operations_keep_their_order_when_they_crash() {
    let mut jobs = Vec::new();
    for (index, pair) in workload::pairs().into_iter().enumerate() {
        for medium in MEDIA {
            // On memory only kills leave anything, and these are tried on the others.
            if medium == SimMedium::Shm && index % 16 != 0 && !every() {
                continue;
            }
            // On `file` one way for each pair, by turns: without an `fsync`, or one of three with it.
            let one = [Syncs::ALL[index / 2 % Syncs::ALL.len()]];
            let ways = if every() { &Syncs::ALL[..] } else { &one };
            for syncs in syncs_of(medium, ways) {
                // Before each pair once what came before is digested, and once it is in the log still.
                let digested = (index + usize::from(medium == SimMedium::File)) % 2 == 0;
                let mut acts = sequence(&pair, syncs);
                if syncs == Syncs::Nowhere || every() {
                    acts.push(Act::Digest);
                }
                let script = Script {
                    before: setup(digested),
                    acts,
                };
                let thorough = Effort::thorough(seed() ^ (index as u64) << 8);
                jobs.push((script, Shape::tiny(medium), effort(thorough)));
            }
        }
    }
    let sum = explore("pairs", &jobs);
    assert!(
        sum.workloads >= workload::pairs().len() * 2 && sum.images > 5_000,
        "{sum:?}"
    );
    on_both(&sum, "operation", 1000);
    on_both(&sum, "digest", 5000);
}

#[test]
fn sequences_of_three_to_five_operations_keep_their_order_when_they_crash() {
    let mut rng = Rng::new(seed() ^ 0x5e9);
    let mut jobs = Vec::new();
    for index in 0..40 * scale() {
        let mut acts = Vec::new();
        for _ in 0..3 + rng.below(3) {
            acts.push(Act::Op(rng.pick(&workload::singles()).clone()));
            if rng.below(4) == 0 {
                acts.push(Act::Op(Op::Fsync(Vec::new())));
            }
        }
        acts.push(Act::Digest);
        let script = Script {
            before: setup(rng.below(2) == 0),
            acts,
        };
        let shape = Shape::tiny(MEDIA[(index % 2) as usize]);
        jobs.push((script, shape, effort(Effort::thorough(rng.next_u64()))));
    }
    let sum = explore("sequences", &jobs);
    assert!(sum.images > 1_000, "{sum:?}");
}

/// Random workloads of one to three sessions.
fn shared_runs(what: &str, flavour: Flavour, policy: Policy, runs: u64, acts: usize, given: Effort) -> Tally {
    let mut jobs = Vec::new();
    for run in 0..runs * scale() * if every() { 10 } else { 1 } {
        let sessions = [2, 3, 1, 2][(run % 4) as usize];
        let medium = MEDIA[(run / 4 % 8 % 3 % 2) as usize];
        let seed = seed() * 100_000 + run;
        let script = shared(seed, sessions, acts, flavour);
        let shape = Shape::tiny(medium).with(policy);
        jobs.push((script, shape, effort(Effort { seed, ..given })));
    }
    explore(what, &jobs)
}

#[test]
fn sessions_that_pass_leases_on_keep_a_causal_prefix_when_they_crash() {
    let effort = Effort {
        seeds: 2,
        ..Effort::ordinary(0)
    };
    let sum = shared_runs(
        "passing leases on",
        Flavour::Calm,
        Policy::Scatter,
        24,
        24,
        effort,
    );
    assert!(sum.images > 1_000 && sum.behind > 20, "{sum:?}");
    on_both(&sum, "operation with leases passed on", 500);
}

#[test]
fn sessions_that_are_sealed_die_or_hang_lose_nothing_when_it_crashes() {
    let effort = Effort {
        seeds: 2,
        ..Effort::ordinary(0)
    };
    let sum = shared_runs("rough sharing", Flavour::Rough, Policy::Scatter, 24, 24, effort);
    assert!(sum.images > 1_000 && sum.resumed > 0, "{sum:?}");
    assert!(sum.by_activity.contains_key("death of a client"), "{sum:?}");
    on_both(&sum, "death of a client", 10);
    on_both(&sum, "unmount", 10);
}

#[test]
fn data_that_moves_between_tiers_is_whole_when_it_crashes() {
    let effort = Effort {
        seeds: 2,
        ..Effort::ordinary(0)
    };
    let sum = shared_runs("moving data", Flavour::Moving, Policy::Rotate, 24, 24, effort);
    assert!(sum.moved > 100 && sum.by_activity["migration"] > 300, "{sum:?}");
    assert!(sum.cooled > 50, "{sum:?}");
    on_both(&sum, "migration", 50);
}

#[test]
fn data_that_each_policy_moves_is_whole_when_it_crashes() {
    let effort = Effort {
        seeds: 1,
        ..Effort::ordinary(0)
    };
    for policy in [
        Policy::Hierarchy,
        Policy::Measured,
        Policy::Wardrop,
        Policy::Balance,
    ] {
        let what = format!("moves of {policy:?}");
        let sum = shared_runs(&what, Flavour::Moving, policy, 6, 24, effort);
        // What moves is explored in `varve-kernelfs`, `tests/placement.rs`: these files are small.
        assert!(sum.images > 500, "{sum:?}");
    }
}

#[test]
fn blocks_overwritten_in_place_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for run in 0..9 * scale() {
        let medium = [SimMedium::Dax, SimMedium::Dax, SimMedium::Shm][(run % 3) as usize];
        let script = Strain::Overwrites.script(1000 + seed() * 100 + run);
        let given = Effort {
            torn: 3,
            stride: if every() { 1 } else { 3 },
            ..Effort::thorough(seed() + run).with_recovery(40)
        };
        jobs.push((script, Strain::Overwrites.shape(medium), effort(given)));
    }
    let sum = explore("overwrites in place", &jobs);
    assert!(sum.images > 1_000 && sum.of_recovery > 100, "{sum:?}");
}

#[test]
fn shared_blocks_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for run in 0..12 * scale() {
        let medium = [SimMedium::Dax, SimMedium::File, SimMedium::Shm][(run % 3) as usize];
        let script = Strain::Clones.script(3000 + seed() * 100 + run);
        let given = Effort {
            stride: if every() { 1 } else { 3 },
            ..Effort::thorough(seed() + run).with_recovery(60)
        };
        jobs.push((script, Strain::Clones.shape(medium), effort(given)));
    }
    let sum = explore("shared blocks", &jobs);
    assert!(sum.images > 1_000 && sum.of_recovery > 100, "{sum:?}");
}

#[test]
fn deduplicated_blocks_and_their_undo_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for run in 0..12 * scale() {
        let medium = [SimMedium::Dax, SimMedium::File, SimMedium::Shm][(run % 3) as usize];
        let script = Strain::Dedup.script(4000 + seed() * 100 + run);
        let given = Effort {
            stride: if every() { 1 } else { 3 },
            ..Effort::thorough(seed() + run).with_recovery(60)
        };
        jobs.push((script, Strain::Dedup.shape(medium), effort(given)));
    }
    let sum = explore("deduplicated blocks", &jobs);
    assert!(sum.images > 1_000 && sum.of_recovery > 100, "{sum:?}");
}

/// Each fence of one share after a comparison, of its undo by either side, and of an undo by the last owner.
#[test]
fn every_fence_of_apply_and_undo_is_tried() {
    let mut jobs = Vec::new();
    for medium in MEDIA {
        for tier in [Policy::Product, Policy::Rotate] {
            let dedupe = |to, len| {
                Act::Op(Op::Dedupe {
                    from: vec!["a"],
                    offset: 0,
                    to: vec![to],
                    to_offset: 0,
                    len,
                })
            };
            let undo = |path, offset, len| {
                Act::Op(Op::Unshare {
                    path: vec![path],
                    offset,
                    len,
                })
            };
            let before = ["a", "b", "c"]
                .into_iter()
                .flat_map(|name| ops(&[Op::Create(vec![name]), write(name, 0, 30_000, 7)]))
                .chain([Act::Digest])
                .collect();
            let acts = vec![
                dedupe("b", 30_000),
                dedupe("c", 8192),
                undo("b", 4096, 8192),
                Act::Place,
                undo("a", 0, 0),
                undo("c", 0, 0),
                undo("b", 0, 0),
                Act::Checkpoint,
            ];
            let given = Effort::thorough(seed()).with_recovery(30);
            jobs.push((
                Script { before, acts },
                Shape::tiny(medium).with(tier),
                effort(given),
            ));
        }
    }
    let sum = explore("apply and undo", &jobs);
    assert!(sum.images > 500 && sum.of_recovery > 50, "{sum:?}");
    on_both(&sum, "operation", 100);
}

#[test]
fn restart_of_the_daemon_can_crash_too() {
    let effort = Effort {
        seeds: 2,
        ..Effort::ordinary(0)
    };
    let sum = shared_runs("restarts", Flavour::All, Policy::Rotate, 24, 30, effort);
    assert!(sum.by_activity["restart"] > 100, "{sum:?}");
    on_both(&sum, "restart", 50);
}

#[test]
fn recovery_can_crash_again_and_again() {
    let effort = Effort::ordinary(0).with_recovery(12);
    let sum = shared_runs("recovery", Flavour::All, Policy::Rotate, 8, 20, effort);
    assert!(sum.of_recovery > 500, "{sum:?}");
    on_both(&sum, "recovery", 200);
}

/// Three sessions with their own threads, messages, deaths and restarts: all of it comes again, to the byte,
/// and is looked at in the same places.
#[test]
fn same_script_leaves_the_same_images_twice() {
    let effort = Effort::ordinary(seed()).with_recovery(11);
    for (round, medium) in [SimMedium::Dax, SimMedium::File].into_iter().enumerate() {
        let script = shared(seed() + round as u64, 3, 16, Flavour::All);
        let shape = Shape::tiny(medium).with(Policy::Rotate);
        let [once, twice] = std::array::from_fn(|_| {
            let known = Known::default();
            let recorded = script.record(shape).unwrap_or_else(|why| panic!("{why}"));
            let tally = recorded
                .explore_knowing(&effort, &known)
                .unwrap_or_else(|(_, why)| panic!("{why}"));
            (tally, known.summary())
        });
        println!("{medium:?}: {} images", once.1.0);
        assert!(once.1.0 > 50, "{once:?}");
        assert_eq!(once, twice);
    }
}

/// Writes of single blocks with holes between: as many extents.
fn fragments(path: &'static str, count: u64) -> Vec<Act> {
    let writes = (0..count).map(|i| write(path, i * 8192, 4096, i as u8));
    let all: Vec<_> = std::iter::once(Op::Create(vec![path])).chain(writes).collect();
    ops(&all)
}

#[test]
fn deletion_of_big_files_can_crash_between_its_records() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
        // More extents than are freed in one record; one file is open when its name goes, one is cut short.
        let before = [
            setup(true),
            fragments("a", 300),
            vec![Act::Digest],
            fragments("b", 280),
            vec![Act::Digest],
        ]
        .concat();
        let acts = vec![
            Act::Op(Op::Truncate {
                path: vec!["a"],
                size: 5,
            }),
            Act::Digest,
            Act::Hold(vec!["b"]),
            Act::Op(Op::Unlink(vec!["b"])),
            Act::Digest,
            Act::Op(Op::Create(vec!["g"])),
            Act::LetGo,
            Act::Tick,
            Act::Op(write("g", 0, 9000, 4)),
            Act::Op(Op::Unlink(vec!["a"])),
            Act::Digest,
            Act::Tick,
            Act::Checkpoint,
        ];
        let thorough = Effort::thorough(seed()).with_recovery(90);
        jobs.push((Script { before, acts }, Shape::tiny(medium), effort(thorough)));
    }
    let sum = explore("deletion", &jobs);
    assert!(sum.images > 100, "{sum:?}");
    on_both(&sum, "digest", 30);
    on_both(&sum, "tick", 1);
    on_both(&sum, "checkpoint", 1);
    on_both(&sum, "recovery", 50);
}

#[test]
fn big_files_on_all_tiers_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
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
        let ordinary = Effort {
            seeds: 6,
            ..Effort::ordinary(seed())
        };
        jobs.push((Script { before, acts }, Shape::small(medium), effort(ordinary)));
    }
    let sum = explore("big files", &jobs);
    assert!(sum.images > 100, "{sum:?}");
    on_both(&sum, "digest", 20);
}

/// A pool that the product's own policy fills soon: 4 MiB of NVM, 2 MiB of SSD in units of 256 KiB.
const fn brim(medium: SimMedium) -> Shape {
    Shape {
        nvm_bytes: 4 << 20,
        blocks_bytes: 2 << 20,
        ..Shape::tiny(medium).with(Policy::Product)
    }
}

/// Files `n0` and on, of 96 KiB, and behind the first `large` ones of 8 KiB, each digested by itself: they go
/// where the policy says.
fn filled(files: std::ops::Range<usize>, large: usize) -> Vec<Act> {
    let one = |index: usize| {
        let name: &'static str = Box::leak(format!("n{index}").into_boxed_str());
        let kib = if index < large { 96 } else { 8 };
        [
            Act::Op(Op::Create(vec![name])),
            Act::Op(write(name, 0, kib << 10, index as u8)),
            Act::Digest,
        ]
    };
    files.flat_map(one).collect()
}

/// So many ticks are longer than data stays where it has come.
const TICKS: usize = 3;
/// So many large files leave less room on NVM below its mark than another one needs; with so many, on the SSD
/// too.
const NVM_LARGE: usize = 35;
const SSD_LARGE: usize = 52;

#[test]
fn tiers_that_the_products_policy_fills_and_empties_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
        // Full to the mark, so that data moves down; what has moved is changed and deleted.
        let down = Script {
            before: [setup(true), filled(0..NVM_LARGE + 9, NVM_LARGE)].concat(),
            acts: [
                filled(NVM_LARGE + 9..NVM_LARGE + 11, NVM_LARGE),
                vec![Act::Place, Act::Checkpoint, Act::Tick, Act::Place],
                ops(&[write("n0", 5000, 9000, 90), Op::Unlink(vec!["n1"])]),
                vec![Act::Digest, Act::Tick],
            ]
            .concat(),
        };
        // What is read often moves up when it has been below for a while, and is changed there.
        let read = vec![[Act::Read(1, vec!["n0"]), Act::Remount(1)]; 3].concat();
        let up = Script {
            before: [
                setup(true),
                filled(0..NVM_LARGE + 11, NVM_LARGE),
                vec![Act::Place, Act::Place],
                vec![Act::Tick; TICKS],
                read.clone(),
            ]
            .concat(),
            acts: [
                read,
                vec![Act::Place],
                ops(&[write("n0", 5000, 9000, 91)]),
                vec![Act::Digest, Act::Tick, Act::Place, Act::Checkpoint],
            ]
            .concat(),
        };
        // Both are full: what comes goes through the SSD, whose units are sealed and emptied.
        let through = Script {
            before: [setup(true), filled(0..SSD_LARGE + 12, SSD_LARGE)].concat(),
            acts: [
                ops(&["f", "d", "e"].map(|name| Op::SetXattr(vec![name], 3000, 92))),
                vec![Act::Digest, Act::Place, Act::Tick],
                vec![Act::Place, Act::Place, Act::Checkpoint, Act::Place],
            ]
            .concat(),
        };
        for script in [down, up, through] {
            jobs.push((script, brim(medium), effort(Effort::thorough(seed()))));
        }
        // And all kinds of work on a pool that is full to the mark.
        for run in 0..2 * scale() {
            let seed = seed() * 1000 + run;
            let mut script = shared(seed, 2, 20, Flavour::Moving);
            script.before.extend(filled(0..NVM_LARGE + 11, NVM_LARGE));
            jobs.push((script, brim(medium), effort(Effort::ordinary(seed))));
        }
    }
    let sum = explore("tiers filled by the product's policy", &jobs);
    assert!(sum.by_activity["migration"] > 100, "{sum:?}");
    on_both(&sum, "migration", 40);
    assert!(sum.promoted > 20 && sum.moved > 5 * sum.promoted, "{sum:?}");
}

#[test]
fn pinned_files_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
        let script = Script {
            before: [setup(true), filled(0..4, 2)].concat(),
            acts: [
                vec![Act::Pin(Tier::Ssd), Act::Place],
                ops(&[write("n0", 5000, 9000, 93), Op::Mkdir(vec!["pinned"])]),
                vec![Act::Op(Op::Create(vec!["pinned", "g"])), Act::Digest, Act::Place],
                // Half of it has moved when it is to go elsewhere; what is shared by no one goes again.
                ops(&[
                    write("n1", 0, 5000, 94),
                    Op::Rename(vec!["n2"], vec!["pinned", "n2"]),
                ]),
                vec![Act::Pin(Tier::Hdd), Act::Digest, Act::Place, Act::Checkpoint],
                ops(&[Op::Unlink(vec!["n3"])]),
                vec![Act::Place, Act::Pin(Tier::Nvm), Act::Place, Act::Tick],
            ]
            .concat(),
        };
        jobs.push((script, brim(medium), effort(Effort::thorough(seed()))));
        for run in 0..2 * scale() {
            let seed = seed() * 1000 + run;
            let mut script = shared(seed, 2, 20, Flavour::Moving);
            for (number, tier) in Tier::ALL.into_iter().enumerate() {
                let at = script.acts.len() * (number + 1) / 4;
                script.acts.insert(at, Act::Pin(tier));
            }
            jobs.push((script, brim(medium), effort(Effort::ordinary(seed))));
        }
    }
    let sum = explore("pinned files", &jobs);
    assert!(sum.by_activity["pinning"] > 20, "{sum:?}");
    assert!(sum.moved > 100, "{sum:?}");
}

#[test]
fn shared_parts_that_are_placed_are_whole_when_it_crashes() {
    let mut jobs = Vec::new();
    for run in 0..6 * scale() {
        let seed = seed() * 100 + run;
        let medium = [SimMedium::Dax, SimMedium::File][(run % 2) as usize];
        // Shares, undos, writes and removals, and between them an operator who changes his mind.
        let mut script = Strain::Dedup.script(6000 + seed);
        let wishes = [Some(Tier::Ssd), Some(Tier::Hdd), None, Some(Tier::Nvm)];
        for (number, to) in wishes.into_iter().enumerate() {
            let at = script.acts.len() * (number + 1) / 5;
            let acts = [Act::PlaceShared(to), Act::Digest, Act::Place, Act::Place];
            script.acts.splice(at..at, acts);
        }
        let given = Effort {
            stride: if every() { 1 } else { 3 },
            ..Effort::thorough(seed).with_recovery(60)
        };
        let shape = [Strain::Dedup.shape(medium), brim(medium)][(run / 2 % 2) as usize];
        jobs.push((script, shape, effort(given)));
    }
    let sum = explore("placed shared parts", &jobs);
    assert!(sum.by_activity["pinning"] > 20, "{sum:?}");
    assert!(sum.images > 1_000 && sum.moved > 100, "{sum:?}");
}

#[test]
fn files_are_whole_when_it_crashes_while_tiers_are_evacuated() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
        let script = Script {
            before: [setup(true), filled(0..4, 2)].concat(),
            acts: [
                vec![Act::Pin(Tier::Ssd), Act::Place, Act::Place],
                vec![Act::Evacuate(Tier::Ssd), Act::Place],
                ops(&[write("n0", 5000, 9000, 93)]),
                vec![Act::Digest, Act::Place, Act::Checkpoint, Act::Place],
                ops(&[write("n1", 0, 5000, 94), Op::Unlink(vec!["n3"])]),
                // The other one meanwhile, and this one takes data again.
                vec![
                    Act::Evacuate(Tier::Hdd),
                    Act::Digest,
                    Act::Place,
                    Act::Evacuate(Tier::Ssd),
                ],
                vec![
                    Act::Place,
                    Act::Restart,
                    Act::Place,
                    Act::Evacuate(Tier::Hdd),
                    Act::Place,
                ],
            ]
            .concat(),
        };
        jobs.push((script, brim(medium), effort(Effort::thorough(seed()))));
        for run in 0..2 * scale() {
            let seed = seed() * 1000 + run;
            let mut script = shared(seed, 2, 20, Flavour::Moving);
            for (number, tier) in [Tier::Ssd, Tier::Hdd, Tier::Ssd].into_iter().enumerate() {
                let at = script.acts.len() * (number + 1) / 4;
                // All of it is there when it is to go.
                let acts = [
                    Act::Pin(tier),
                    Act::Place,
                    Act::Evacuate(tier),
                    Act::Place,
                    Act::Place,
                ];
                script.acts.splice(at..at, acts);
            }
            jobs.push((script, brim(medium), effort(Effort::ordinary(seed))));
        }
    }
    let sum = explore("evacuated tiers", &jobs);
    assert!(sum.by_activity["evacuation"] > 20, "{sum:?}");
    assert!(sum.moved > 100, "{sum:?}");
}

#[test]
fn files_are_whole_when_it_crashes_while_devices_come_and_go() {
    let mut jobs = Vec::new();
    for medium in [SimMedium::Dax, SimMedium::File] {
        let script = Script {
            before: [setup(true), filled(0..4, 2)].concat(),
            acts: [
                vec![
                    Act::AddDevice(Tier::Ssd),
                    Act::Pin(Tier::Ssd),
                    Act::Place,
                    Act::Place,
                ],
                ops(&[write("n0", 5000, 9000, 93)]),
                vec![Act::Digest, Act::RemoveDevice("ssd"), Act::Place, Act::Checkpoint],
                ops(&[write("n1", 0, 5000, 94), Op::Unlink(vec!["n3"])]),
                vec![Act::Digest, Act::Place, Act::Restart, Act::Place, Act::Place],
                // Another tier, whose device is kept after all.
                vec![
                    Act::AddDevice(Tier::Hdd),
                    Act::RemoveDevice("hdd-2"),
                    Act::Pin(Tier::Hdd),
                ],
                vec![
                    Act::Place,
                    Act::RemoveDevice("hdd-2"),
                    Act::Place,
                    Act::Digest,
                    Act::Tick,
                ],
            ]
            .concat(),
        };
        jobs.push((script, brim(medium), effort(Effort::thorough(seed()))));
        for run in 0..4 * scale() {
            let seed = seed() * 1000 + run;
            let given = Effort {
                stride: if every() { 1 } else { 2 },
                ..Effort::ordinary(seed).with_recovery(60)
            };
            let strain = Strain::Devices;
            jobs.push((strain.script(seed), strain.shape(medium), effort(given)));
        }
    }
    let sum = explore("devices that come and go", &jobs);
    assert!(sum.by_activity["addition of a device"] > 20, "{sum:?}");
    assert!(sum.by_activity["removal of a device"] > 5, "{sum:?}");
    assert!(sum.moved > 100, "{sum:?}");
}

#[test]
fn session_that_is_sealed_amid_a_call_does_it_once() {
    let mut jobs = Vec::new();
    for (index, op) in workload::singles().into_iter().enumerate() {
        for stores in 1..4 {
            let script = Script {
                before: setup(index % 2 == 0),
                acts: vec![
                    Act::Amid(stores),
                    Act::Op(op.clone()),
                    Act::Op(write("f", 0, 9000, 7)),
                    Act::Digest,
                ],
            };
            let shape = Shape::tiny(MEDIA[(index + stores as usize) % 2]);
            let given = Effort {
                seeds: 1,
                ..Effort::ordinary(seed() + index as u64)
            };
            jobs.push((script, shape, effort(given)));
        }
    }
    let sum = explore("sealed amid a call", &jobs);
    assert!(sum.images > 200 && sum.resumed > 50, "{sum:?}");
}

#[test]
fn failed_fsync_promises_nothing() {
    // The name is gone when it is synced: ENOENT, and what came before may be lost.
    let script = Script {
        before: setup(true),
        acts: ops(&[
            Op::Rename(vec!["f"], vec!["d", "f"]),
            Op::Fsync(vec!["f"]),
            Op::Create(vec!["g"]),
        ]),
    };
    let sum = explore(
        "failed fsync",
        &[(script, Shape::tiny(SimMedium::File), Effort::thorough(1))],
    );
    assert!(sum.images > 3, "{sum:?}");
}
