//! The first list. Each bug is caught by a run in lockstep with the model or by the crash exploration of a
//! script, and the same work without it is sound.

use varve_format::seeded::{Bug, arm};
use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Script};
use varve_testkit::lockstep::{self, LockstepStep};
use varve_testkit::ops::{Op, write};
use varve_testkit::rig::{Policy, Shape};
use varve_testkit::workload;

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

/// One write and its digest.
fn one_digest() -> Script {
    Script {
        before: setup(),
        acts: vec![Act::Op(write("f", 100, 9000, 4)), Act::Digest],
    }
}

/// The journal is emptied again and again.
fn checkpoints() -> Script {
    let mut all = Vec::new();
    for round in 0..4 {
        all.extend(acts(vec![
            write("f", 0, 4096, round),
            Op::Chmod(vec!["f"], 0o600 + u32::from(round)),
        ]));
        all.extend([Act::Digest, Act::Checkpoint]);
    }
    Script {
        before: setup(),
        acts: all,
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
        policy: Policy::Scatter,
        verify_nvm: false,
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

/// Directory blocks are freed, and data takes their place, while the journal still knows them. The pool is
/// filled with data until the allocator has no other block left, so that it does not matter where it stands.
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
            acts(create(last)),
            vec![Act::Digest],
        ]
        .concat(),
        acts: [
            acts(remove),
            vec![Act::Digest, Act::Tick],
            acts(small_files("t", 100)),
            vec![Act::Digest],
            acts(small_files("u", 100)),
            vec![Act::Digest],
        ]
        .concat(),
    }
}

/// Files of one block each, so that each block is allocated by itself: those of one file come in one run
/// where there is one.
fn small_files(prefix: &str, count: u64) -> Vec<Op> {
    let files = (0..count).map(|i| -> &'static str { Box::leak(format!("{prefix}{i}").into_boxed_str()) });
    files
        .flat_map(|name| [Op::Create(vec![name]), write(name, 0, 4096, 7)])
        .collect()
}

/// Files on SSD and HDD are written, freed, and their units used again.
fn units() -> Script {
    let fill = |seed: u8| {
        let names = ["a", "b", "c", "f", "g"];
        let writes = names.iter().map(move |name| write(name, 0, 120_000, seed));
        acts(writes.collect())
    };
    let create = ["a", "b", "c", "g"].map(|name| Op::Create(vec![name])).to_vec();
    Script {
        before: [setup(), acts(create)].concat(),
        acts: [
            fill(1),
            vec![Act::Digest],
            fill(2),
            vec![Act::Digest],
            acts(vec![
                Op::Unlink(vec!["b"]),
                Op::Unlink(vec!["c"]),
                Op::Unlink(vec!["g"]),
            ]),
            vec![Act::Digest, Act::Tick],
            acts(vec![write("a", 0, 120_000, 3), write("f", 0, 120_000, 3)]),
            vec![Act::Digest],
        ]
        .concat(),
    }
}

/// A file loses its name while it is open.
fn open_and_unlinked() -> Script {
    Script {
        before: setup(),
        acts: vec![
            Act::Op(write("f", 0, 60_000, 3)),
            Act::Hold(vec!["f"]),
            Act::Op(Op::Unlink(vec!["f"])),
            Act::Digest,
            Act::Op(Op::Create(vec!["g"])),
            Act::Digest,
            Act::LetGo,
        ],
    }
}

/// What caught a bug.
struct Caught {
    by: &'static str,
    images: usize,
    how: String,
}

fn first_lines(why: &str) -> String {
    let lines: Vec<_> = why
        .lines()
        .filter(|line| !line.starts_with('['))
        .take(2)
        .map(str::trim)
        .collect();
    let mut text = lines.join(" ");
    text.truncate(300);
    text
}

/// A run in lockstep. Without `rough` nothing dies in it.
fn in_lockstep(shape: Shape, sessions: usize, seed: u64, rough: bool) -> Result<(), String> {
    let mut steps = lockstep::steps(seed, sessions, 200);
    if !rough {
        steps.retain(|step| !matches!(step, LockstepStep::Restart | LockstepStep::Seal));
    }
    let stats = lockstep::run(shape, sessions, &steps).map_err(|(at, why)| format!("step {at}: {why}"))?;
    assert!(stats.ops > 50);
    Ok(())
}

/// Kills and whole power cuts first, so that a bug which needs a part of what is pending is known as one.
fn efforts() -> [(&'static str, Effort); 2] {
    let whole = Effort {
        every_point: true,
        torn: 1,
        seeds: 0,
        ..Effort::ordinary(1)
    };
    let parts = Effort {
        seeds: 16,
        combinations: true,
        ..whole
    };
    [
        ("crash exploration", whole),
        ("crash exploration, parts of what is pending", parts),
    ]
}

fn with<T>(bug: Bug, work: impl FnOnce() -> T) -> T {
    arm(Some(bug));
    let result = work();
    arm(None);
    result
}

fn explored(
    bug: Option<Bug>,
    shape: Shape,
    script: &Script,
    effort: &Effort,
) -> Result<usize, (usize, String)> {
    arm(bug);
    let explored = script.record(shape).map_err(|why| (0, why)).and_then(|recorded| {
        recorded
            .explore(effort)
            .map_err(|(tally, why)| (tally.images, why))
    });
    arm(None);
    explored.map(|tally| tally.images)
}

/// Caught by the exploration, and by no run without a crash.
fn by_crash(bug: Bug, shape: Shape, script: &Script) {
    by_crash_with(bug, shape, script, &efforts());
}

/// Caught by a given run of one or two sessions in which nothing crashes.
fn by_run(bug: Bug, script: &Script) {
    let shape = Shape::tiny(SimMedium::Dax);
    if let Err(why) = script.record(shape) {
        panic!("{bug:?}: without the bug: {why}");
    }
    match with(bug, || script.record(shape)) {
        Ok(_) => panic!("{bug:?} is not found"),
        Err(why) => {
            let how = first_lines(&why);
            let by = "a run of two sessions, without a crash";
            told(bug, &Caught { by, images: 0, how }, 0);
        }
    }
}

/// Caught by one of some runs in which nothing crashes; all of them are sound without the bug.
fn by_any_run(bug: Bug, scripts: &[Script]) {
    let shape = Shape::tiny(SimMedium::Dax);
    for script in scripts {
        if let Err(why) = script.record(shape) {
            panic!("{bug:?}: without the bug: {why}");
        }
    }
    let mut caught = scripts
        .iter()
        .filter_map(|script| with(bug, || script.record(shape)).err());
    let Some(why) = caught.next() else {
        panic!("{bug:?} is not found");
    };
    let how = first_lines(&why);
    let by = "a run in which a session is sealed amid a call";
    told(bug, &Caught { by, images: 0, how }, 0);
}

/// A session is sealed before each of the stores of a call.
fn sealed_amid() -> Vec<Script> {
    let script = |stores| Script {
        before: setup(),
        acts: vec![
            Act::Amid(stores),
            Act::Op(write("f", 100, 9000, 3)),
            Act::Op(write("f", 50, 300, 4)),
        ],
    };
    (1..5).map(script).collect()
}

/// Writes whose payload is stored before their header.
fn large_writes() -> Script {
    Script {
        before: setup(),
        acts: acts(vec![write("f", 0, 9000, 3), write("f", 4096, 12_000, 4)]),
    }
}

/// The journal's ring has gone round, so that its beginning holds none of the first records; then its header
/// is written again.
fn ring_went_round() -> Script {
    let long = |i: u32| -> &'static str { Box::leak(format!("{i:0250}").into_boxed_str()) };
    let names: Vec<_> = (0..40).map(long).collect();
    let mut before = setup();
    before.push(Act::Op(Op::Mkdir(vec!["n"])));
    for _ in 0..30 {
        before.extend(names.iter().map(|name| Act::Op(Op::Create(vec!["n", name]))));
        before.push(Act::Digest);
        before.extend(names.iter().map(|name| Act::Op(Op::Unlink(vec!["n", name]))));
        before.push(Act::Digest);
    }
    Script {
        before,
        acts: vec![Act::Op(write("f", 0, 4096, 9)), Act::Digest, Act::Checkpoint],
    }
}

/// Two sessions take a file from each other.
fn taking_turns() -> Script {
    let append = |session: usize, seed: u8| {
        let (path, len) = (vec!["f"], 700);
        Act::By(session, Op::Append { path, len, seed })
    };
    Script {
        before: setup(),
        acts: vec![
            append(0, 3),
            append(1, 4),
            append(0, 5),
            append(1, 6),
            append(0, 7),
        ],
    }
}

fn by_crash_with(bug: Bug, shape: Shape, script: &Script, efforts: &[(&'static str, Effort)]) {
    for seed in 1..3 {
        if let Err(why) = with(bug, || in_lockstep(Shape::small(shape.medium), 1, seed, false)) {
            panic!("{bug:?}: found without a crash: {why}");
        }
    }
    let mut before = 0;
    for (by, effort) in efforts {
        let sound = explored(None, shape, script, effort);
        let sound = sound.unwrap_or_else(|(_, why)| panic!("{bug:?}: without the bug: {why}"));
        match explored(Some(bug), shape, script, effort) {
            Ok(images) => before += images,
            Err((images, why)) => {
                let how = first_lines(&why);
                return told(
                    bug,
                    &Caught {
                        by,
                        images: before + images,
                        how,
                    },
                    sound,
                );
            }
        }
    }
    panic!("{bug:?} is not found in {before} images");
}

fn told(bug: Bug, caught: &Caught, sound: usize) {
    let Caught { by, images, how } = caught;
    println!("| `{bug:?}` | {by} | {images} | {sound} | {how} |");
}

/// Caught by a run in lockstep.
fn by_lockstep(bug: Bug, sessions: usize) {
    let shape = Shape::small(SimMedium::Dax);
    for seed in 1..40 {
        let sound = in_lockstep(shape, sessions, seed, true);
        assert_eq!(sound, Ok(()), "{bug:?}: without the bug");
        if let Err(why) = with(bug, || in_lockstep(shape, sessions, seed, true)) {
            let caught = Caught {
                by: if sessions == 1 {
                    "lockstep, one session"
                } else {
                    "lockstep, two sessions"
                },
                images: 0,
                how: first_lines(&why),
            };
            return told(bug, &caught, seed as usize);
        }
    }
    panic!("{bug:?} is not found in lockstep");
}

#[test]
fn log_and_calls() {
    by_crash(Bug::NoFenceAtCommit, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::NoSyncAtFsync, Shape::tiny(SimMedium::File), &ordinary());
    by_crash(
        Bug::EntryChecksumIgnored,
        Shape::tiny(SimMedium::Dax),
        &ordinary(),
    );
    by_any_run(Bug::AckWithoutPageCheck, &sealed_amid());
    by_run(Bug::CacheKeptAfterRevocation, &taking_turns());
    // Large ones: small entries are one store, header and payload.
    by_crash(
        Bug::EntryPayloadUnchecked,
        Shape::tiny(SimMedium::Dax),
        &large_writes(),
    );
}

#[test]
fn daemon() {
    by_run(Bug::LeaseBeforeDigest, &taking_turns());
    by_crash(Bug::DigestedBeforeOps, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::GrantNotDurable, Shape::tiny(SimMedium::Dax), &ordinary());
}

#[test]
fn commit() {
    by_crash(Bug::NoSyncBeforeCommit, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::NoFenceAfterRecord, Shape::tiny(SimMedium::File), &ordinary());
    by_crash(Bug::CommitBeforePayload, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::InPlaceBeforeRecord, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::NoDeviceFlush, Shape::tiny(SimMedium::Dax), &units());
}

#[test]
fn journal() {
    by_crash(
        Bug::NoSyncBeforeTail,
        Shape::tiny(SimMedium::File),
        &checkpoints(),
    );
    by_crash(
        Bug::RecordChecksumIgnored,
        Shape::tiny(SimMedium::Dax),
        &checkpoints(),
    );
    by_crash(
        Bug::TxReusedAfterRestart,
        Shape::tiny(SimMedium::Dax),
        &restarts(),
    );
    let recovery = efforts().map(|(by, effort)| (by, effort.with_recovery(3)));
    by_crash_with(
        Bug::NoSyncAfterReplay,
        Shape::tiny(SimMedium::File),
        &ordinary(),
        &recovery,
    );
}

#[test]
fn journal_header() {
    by_crash(
        Bug::OneJournalHeader,
        Shape::tiny(SimMedium::Dax),
        &ring_went_round(),
    );
}

#[test]
fn fences_of_the_journal() {
    by_crash(Bug::RecordMark, Shape::tiny(SimMedium::Dax), &ordinary());
    by_crash(Bug::RecordInSameFence, Shape::tiny(SimMedium::Dax), &ordinary());
    // The sound run is the dear one: many images, and crashes in the recovery of every fourth.
    let recovery = efforts().map(|(by, effort)| {
        let seeds = effort.seeds.min(6);
        (by, Effort { seeds, ..effort }.with_recovery(4))
    });
    by_crash_with(
        Bug::ReplayInSameFence,
        Shape::tiny(SimMedium::Dax),
        &one_digest(),
        &recovery,
    );
}

#[test]
fn space() {
    // `FreeBeforeCommit` is in the table of the second list: what is made and deleted in one batch takes no
    // space to be freed too early.
    by_crash(Bug::TrimBeforeCommit, Shape::tiny(SimMedium::Dax), &units());
    by_crash(
        Bug::OrphanNotListed,
        Shape::tiny(SimMedium::Dax),
        &open_and_unlinked(),
    );
}

#[test]
fn reuse() {
    // Many operations: kills and whole power cuts at the points where things become durable.
    let effort = Effort {
        seeds: 0,
        ..Effort::ordinary(1)
    };
    by_crash_with(
        Bug::ReuseBeforeRelease,
        tight(SimMedium::Dax),
        &metadata_and_reuse(),
        &[("crash exploration", effort)],
    );
}

#[test]
fn data() {
    by_lockstep(Bug::StaleTail, 1);
    by_crash(Bug::FooterNotWritten, Shape::tiny(SimMedium::Dax), &units());
}
