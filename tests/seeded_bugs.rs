//! Bugs on purpose, to show that the crash exploration finds what the ordinary tests do not: each passes a run in lockstep with the model
//! without a crash, and is caught by the exploration. Prints by what, and after how many images.

#![cfg(debug_assertions)]

use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Script, Tally};
use varve_testkit::lockstep::{self, Step};
use varve_testkit::ops::Op;
use varve_testkit::rig::Shape;
use varve_testkit::workload;

/// A bug and the switch that it hangs on.
#[derive(Debug, Clone, Copy)]
enum Bug {
    Log(varve_libfs::seeded::Bug),
    Store(varve_store::seeded::Bug),
}

/// Arms a bug in this thread, where all calls and digests of these tests run.
fn arm(bug: Option<Bug>) {
    varve_libfs::seeded::arm(None);
    varve_store::seeded::arm(None);
    match bug {
        Some(Bug::Log(bug)) => varve_libfs::seeded::arm(Some(bug)),
        Some(Bug::Store(bug)) => varve_store::seeded::arm(Some(bug)),
        None => {}
    }
}

fn write(path: &'static str, offset: u64, len: u32, seed: u8) -> Op {
    Op::Write {
        path: vec![path],
        offset,
        len,
        seed,
    }
}

fn acts(ops: Vec<Op>) -> Vec<Act> {
    ops.into_iter().map(Act::Op).collect()
}

fn setup() -> Vec<Act> {
    [acts(workload::setup()), vec![Act::Digest]].concat()
}

/// Writes and digests, with overwrites.
fn ordinary() -> Script {
    Script {
        before: setup(),
        acts: [
            acts(vec![
                write("f", 0, 4096, 3),
                Op::Fsync(vec![]),
                write("f", 100, 9000, 4),
                Op::Create(vec!["g"]),
            ]),
            vec![Act::Digest],
            acts(vec![write("g", 0, 20_000, 5), Op::Rename(vec!["g"], vec!["f"])]),
            vec![Act::Digest, Act::Checkpoint, Act::Tick],
        ]
        .concat(),
    }
}

/// A daemon that starts again, twice, with work between.
fn restarts() -> Script {
    Script {
        before: setup(),
        acts: [
            acts(vec![write("f", 0, 4096, 3)]),
            vec![Act::Digest, Act::Restart],
            acts(vec![Op::Create(vec!["g"])]),
            vec![Act::Digest],
        ]
        .concat(),
    }
}

/// A small pool of NVM only, so that what is freed is soon given out again.
const fn tight(medium: SimMedium) -> Shape {
    Shape {
        medium,
        nvm_bytes: 4 << 20,
        journal_bytes: 512 << 10,
        blocks_bytes: 0,
    }
}

/// Writes of single blocks with holes between, so that each block is allocated by itself.
fn single_blocks(path: &'static str, count: u64) -> Vec<Op> {
    let writes = (0..count).map(|i| write(path, i * 8192, 4096, i as u8));
    std::iter::once(Op::Create(vec![path])).chain(writes).collect()
}

/// Brings the allocator, which goes round and round, towards the end of the pool.
fn wrapped(megabytes: u64) -> Vec<Act> {
    let fill = (0..megabytes).map(|i| write("fill", i * 1_000_000, 1_000_000, 9));
    [
        acts(std::iter::once(Op::Create(vec!["fill"])).chain(fill).collect()),
        vec![Act::Digest],
        acts(vec![Op::Unlink(vec!["fill"])]),
        vec![Act::Digest, Act::Tick, Act::Checkpoint],
    ]
    .concat()
}

/// A file is emptied and another one takes its place in the same digest.
fn full_and_replaced() -> Script {
    let big = acts(vec![
        Op::Create(vec!["a"]),
        write("a", 0, 1_000_000, 6),
        Op::Create(vec!["b"]),
    ]);
    Script {
        before: [setup(), big, vec![Act::Digest], wrapped(2)].concat(),
        acts: [
            acts(vec![
                Op::Truncate {
                    path: vec!["a"],
                    size: 0,
                },
                write("b", 0, 1_000_000, 7),
                write("b", 1_000_000, 600_000, 8),
            ]),
            vec![Act::Digest],
        ]
        .concat(),
    }
}

/// Directory blocks are freed, and data takes their place, while the journal still knows them.
fn metadata_and_reuse() -> Script {
    // Names long enough that the directory needs blocks of its own.
    let long = |i: u32| -> &'static str { Box::leak(format!("{i:0200}").into_boxed_str()) };
    let names: Vec<_> = (0..40).map(long).collect();
    let (first, last) = names.split_at(36);
    let create = |names: &[&'static str]| {
        names
            .iter()
            .map(|name| Op::Create(vec!["n", name]))
            .collect::<Vec<_>>()
    };
    let make = [vec![Op::Mkdir(vec!["n"])], create(first)].concat();
    let more = create(last);
    let unlink = names.iter().map(|name| Op::Unlink(vec!["n", name]));
    let remove: Vec<_> = unlink.chain([Op::Rmdir(vec!["n"])]).collect();
    Script {
        before: [
            setup(),
            // Its blocks are low: those to which the allocator comes first when it begins again.
            acts(make),
            vec![Act::Digest],
            wrapped(3),
            acts(single_blocks("s", 170)),
            vec![Act::Digest],
            acts(more),
            vec![Act::Digest],
        ]
        .concat(),
        acts: [
            acts(remove),
            vec![Act::Digest, Act::Tick],
            acts(single_blocks("t", 130)),
            vec![Act::Digest],
        ]
        .concat(),
    }
}

/// Steps in which nothing dies.
fn calm_steps(seed: u64) -> Vec<Step> {
    let mut steps = lockstep::steps(seed, 1, 200);
    steps.retain(|step| !matches!(step, Step::Restart | Step::Seal));
    steps
}

fn caught(name: &str, bug: Bug, shape: Shape, script: &Script) {
    caught_by(
        name,
        bug,
        shape,
        script,
        &Effort {
            every_point: true,
            seeds: 2,
            ..Effort::ordinary(1)
        },
    );
}

fn caught_by(name: &str, bug: Bug, shape: Shape, script: &Script, effort: &Effort) {
    let sound = script
        .record(shape)
        .map_err(|why| (Tally::default(), why))
        .and_then(|recorded| recorded.explore(effort));
    let sound = sound.unwrap_or_else(|(_, why)| panic!("{name}: without the bug: {why}"));
    assert!(sound.images > 20, "{name}: {sound:?}");
    for seed in 1..4 {
        arm(Some(bug));
        let calm = lockstep::run(Shape::small(shape.medium), 1, &calm_steps(seed));
        arm(None);
        let stats =
            calm.unwrap_or_else(|(at, why)| panic!("{name}: found without a crash, at step {at}: {why}"));
        assert!(stats.ops > 100);
    }
    arm(Some(bug));
    let recorded = script.record(shape);
    arm(None);
    let recorded = recorded.unwrap_or_else(|why| panic!("{name}: found without a crash: {why}"));
    match recorded.explore(effort) {
        Ok(tally) => panic!("{name} is not found in {} images", tally.images),
        Err((tally, why)) => {
            let why: Vec<_> = why.lines().skip(1).take(2).map(str::trim).collect();
            eprintln!(
                "{name}: caught after {} images ({} in all when sound): {}",
                tally.images,
                sound.images,
                why.join(" ")
            );
        }
    }
}

#[test]
fn missing_fence_is_caught() {
    let bug = Bug::Log(varve_libfs::seeded::Bug::NoFenceAtCommit);
    caught("missing fence", bug, Shape::small(SimMedium::Dax), &ordinary());
}

#[test]
fn missing_sync_is_caught() {
    let bug = Bug::Log(varve_libfs::seeded::Bug::NoSyncAtFsync);
    caught("missing sync", bug, Shape::small(SimMedium::File), &ordinary());
}

#[test]
fn missing_fence_of_the_journal_is_caught() {
    let bug = Bug::Store(varve_store::seeded::Bug::NoFenceAfterRecord);
    caught(
        "missing fence of the journal",
        bug,
        Shape::small(SimMedium::File),
        &ordinary(),
    );
}

#[test]
fn commit_before_payload_is_caught() {
    let bug = Bug::Store(varve_store::seeded::Bug::CommitBeforePayload);
    caught(
        "commit before payload",
        bug,
        Shape::small(SimMedium::Dax),
        &ordinary(),
    );
}

#[test]
fn free_before_commit_is_caught() {
    let bug = Bug::Store(varve_store::seeded::Bug::FreeBeforeCommit);
    // Where the log can be lost while the data got to the medium: else the log does it all again.
    caught(
        "free before commit",
        bug,
        tight(SimMedium::File),
        &full_and_replaced(),
    );
}

#[test]
fn block_reused_before_release_is_caught() {
    let bug = Bug::Store(varve_store::seeded::Bug::ReuseBeforeRelease);
    // Many operations: kills, and power cuts at the points where things become durable.
    let effort = Effort {
        seeds: 0,
        stride: 3,
        ..Effort::ordinary(1)
    };
    caught_by(
        "block reused before release",
        bug,
        tight(SimMedium::Dax),
        &metadata_and_reuse(),
        &effort,
    );
}

#[test]
fn numbers_reused_after_a_restart_are_caught() {
    let bug = Bug::Store(varve_store::seeded::Bug::TxReusedAfterRestart);
    caught(
        "numbers reused after a restart",
        bug,
        Shape::small(SimMedium::Dax),
        &restarts(),
    );
}
