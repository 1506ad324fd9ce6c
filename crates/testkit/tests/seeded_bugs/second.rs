//! The second list. Each bug is caught by the part that the table names, in work that is made for no bug
//! alone; the same work without a bug is sound. A bug that is said to need parts of what is pending is not
//! caught by the same work with kills and whole power cuts only.
//!
//! `VARVE_SEEDED_ALL=1` also tries all work without a bug, and every bug on all work, and prints what catches
//! it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use varve_format::seeded::{Bug, arm};
use varve_media::sim::SimMedium;
use varve_testkit::crash::{Act, Effort, Flavour, Script, Strain, shared};
use varve_testkit::lockstep;
use varve_testkit::ops::write;
use varve_testkit::rig::{Policy, Shape};
use varve_testkit::whole;
use varve_testkit::wire::Weather;
use varve_testkit::workload;

/// Work that bugs are tried on: a script for each seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Work {
    /// What brings a part of the system to its bounds.
    Strain(Strain),
    /// Two sessions on shared names.
    Sharing(Flavour),
    /// A session that is sealed amid a call of some kind.
    Amid,
    /// One operation of each kind, and its digest.
    Single,
}

use Work::{Amid, Sharing, Single};
const LANES: Work = Work::Strain(Strain::Lanes);
const LONG_LOG: Work = Work::Strain(Strain::LongLog);
const RING: Work = Work::Strain(Strain::Ring);
const FULL_TIERS: Work = Work::Strain(Strain::FullTiers);
const BIG_FILES: Work = Work::Strain(Strain::BigFiles);
const ONE_FILE: Work = Work::Strain(Strain::OneFile);
const OVERWRITES: Work = Work::Strain(Strain::Overwrites);
const DEDUP: Work = Work::Strain(Strain::Dedup);
const DEVICES: Work = Work::Strain(Strain::Devices);

impl Work {
    const ALL: [Self; 14] = [
        LANES,
        LONG_LOG,
        RING,
        FULL_TIERS,
        BIG_FILES,
        ONE_FILE,
        OVERWRITES,
        DEDUP,
        DEVICES,
        Sharing(Flavour::Calm),
        Sharing(Flavour::Moving),
        Sharing(Flavour::All),
        Amid,
        Single,
    ];

    fn script(self, medium: SimMedium, seed: u64) -> (Script, Shape) {
        let digested = || {
            let setup = workload::setup().into_iter().map(Act::Op);
            setup.chain([Act::Digest]).collect()
        };
        let singles = workload::singles();
        let op = Act::Op(singles[seed as usize * 7 % singles.len()].clone());
        match self {
            Self::Strain(strain) => (strain.script(seed), strain.shape(medium)),
            Sharing(flavour) => {
                let policy = if flavour == Flavour::Moving {
                    Policy::Rotate
                } else {
                    Policy::Scatter
                };
                (shared(seed, 2, 24, flavour), Shape::tiny(medium).with(policy))
            }
            Amid => {
                let next = Act::Op(write("f", 0, 9000, 7));
                let acts = vec![Act::Amid(1 + seed % 3), op, next, Act::Digest];
                let before = digested();
                (Script { before, acts }, Shape::tiny(medium))
            }
            Single => {
                let acts = vec![op, Act::Digest];
                let before = digested();
                (Script { before, acts }, Shape::tiny(medium))
            }
        }
    }

    /// Work of which only the points before fences, syncs and flushes are looked at, since there are
    /// thousands of others.
    const fn is_long(self) -> bool {
        matches!(self, LONG_LOG | RING | FULL_TIERS | Sharing(_))
    }

    fn effort(self, level: Level) -> Effort {
        let whole = Effort {
            every_point: !self.is_long(),
            seeds: 0,
            ..Effort::ordinary(1)
        };
        let torn = Effort { torn: 6, ..whole };
        match level {
            Level::Run | Level::Whole => whole,
            Level::Torn => torn,
            Level::Parts => Effort {
                seeds: 8,
                combinations: true,
                ..torn
            },
        }
    }
}

/// What it takes, from the least on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Level {
    /// Nothing crashes.
    Run,
    /// Kills, and power cuts that keep all or nothing.
    Whole,
    /// Also kills amid a store, of which the first words are there.
    Torn,
    /// Also power cuts that keep some lines, words, pages or sectors and not others.
    Parts,
}

/// What must catch a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Work with these seeds, with no less than this.
    Work(Level, Work, SimMedium, u64),
    /// Lockstep of so many sessions, some of so many seeds.
    Lockstep(usize, u64),
    /// The whole system with two clients, some of so many seeds.
    System(Weather, u64),
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(level, work, medium, _) => {
                let what = match level {
                    Level::Run => "a run without a crash",
                    Level::Whole => "crash exploration",
                    Level::Torn => "crash exploration, a kill amid a store",
                    Level::Parts => "crash exploration, parts of what is pending",
                };
                let work = match work {
                    Work::Strain(strain) => format!("{strain:?}"),
                    Sharing(flavour) => format!("two sessions, {flavour:?}"),
                    other => format!("{other:?}"),
                };
                write!(f, "{what}: {work}, {medium:?}")
            }
            Self::Lockstep(sessions, _) => write!(f, "lockstep: {sessions} sessions"),
            Self::System(weather, _) if *weather == Weather::SLOW => {
                write!(f, "whole system: two clients, slow messages")
            }
            Self::System(..) => write!(f, "whole system: two clients, lost messages"),
        }
    }
}

const DAX: SimMedium = SimMedium::Dax;
const FILE: SimMedium = SimMedium::File;

/// Of the first list those that other parts catch, too.
const FIRST: [(Bug, Part); 6] = [
    (Bug::AckWithoutPageCheck, Part::System(Weather::SLOW, 8)),
    (Bug::CacheKeptAfterRevocation, Part::System(Weather::SLOW, 8)),
    (Bug::LeaseBeforeDigest, Part::System(Weather::SLOW, 8)),
    (Bug::FreeBeforeCommit, Part::Work(Level::Whole, ONE_FILE, DAX, 2)),
    (
        Bug::FreeBeforeCommit,
        Part::Work(Level::Whole, Sharing(Flavour::Moving), DAX, 1),
    ),
    (Bug::OneFooter, Part::Work(Level::Whole, FULL_TIERS, DAX, 1)),
];

/// `NumberBeforeFlight` is for `shuttle` (`libfs/src/log/interleavings.rs`), `RepairFreesFirst` for
/// `repair_crash`.
const SECOND: [(Bug, Part); 31] = [
    (Bug::EntryTailUnchecked, Part::Work(Level::Torn, LANES, DAX, 2)),
    (Bug::GapBelowStable, Part::Work(Level::Whole, LONG_LOG, FILE, 1)),
    (Bug::SyncOwnLane, Part::Work(Level::Whole, LANES, FILE, 1)),
    (Bug::SyncFromNextPage, Part::Work(Level::Whole, LANES, FILE, 1)),
    (
        Bug::LeftChunkUnsynced,
        Part::Work(Level::Whole, LONG_LOG, FILE, 1),
    ),
    (Bug::TransactionInParts, Part::Work(Level::Whole, LANES, DAX, 1)),
    (Bug::ChunkBackEarly, Part::Work(Level::Run, LONG_LOG, FILE, 1)),
    (Bug::HandOverShort, Part::Lockstep(2, 3)),
    (Bug::HandOverShort, Part::System(Weather::SLOW, 3)),
    (
        Bug::RowGoneBeforeDigest,
        Part::Work(Level::Whole, Sharing(Flavour::Calm), DAX, 1),
    ),
    (Bug::SealCoversNext, Part::System(Weather::SLOW, 8)),
    (Bug::SealCoversNext, Part::Work(Level::Run, Amid, DAX, 3)),
    (Bug::NumberAfterOps, Part::Work(Level::Whole, LANES, DAX, 2)),
    (Bug::CutForgotten, Part::Work(Level::Run, ONE_FILE, DAX, 3)),
    (
        Bug::NodesUnfenced,
        Part::Work(Level::Parts, Sharing(Flavour::Calm), DAX, 1),
    ),
    (Bug::RecordBeforePayload, Part::Work(Level::Whole, LANES, DAX, 1)),
    (Bug::InPlaceUnfenced, Part::Work(Level::Whole, LANES, DAX, 3)),
    (Bug::RangeNotMerged, Part::Work(Level::Whole, LANES, FILE, 1)),
    (Bug::RecordTailUnchecked, Part::Work(Level::Torn, LANES, DAX, 2)),
    (
        Bug::TwoHeadersOneFence,
        Part::Work(Level::Parts, Sharing(Flavour::All), DAX, 1),
    ),
    (
        Bug::HeaderSumShort,
        Part::Work(Level::Parts, Sharing(Flavour::All), DAX, 1),
    ),
    (Bug::TailWrittenEarly, Part::Work(Level::Parts, LANES, FILE, 1)),
    (Bug::RingOverTail, Part::Work(Level::Whole, RING, DAX, 5)),
    (Bug::ReplayNoWrap, Part::Work(Level::Whole, RING, DAX, 5)),
    (
        Bug::OrphansLeftAtStart,
        Part::Work(Level::Whole, BIG_FILES, DAX, 1),
    ),
    (Bug::HolesWithoutSums, Part::Work(Level::Run, FULL_TIERS, DAX, 1)),
    (Bug::TrimOpened, Part::Work(Level::Run, FULL_TIERS, DAX, 4)),
    (
        Bug::MoveNotFlushed,
        Part::Work(Level::Whole, Sharing(Flavour::Moving), DAX, 1),
    ),
    (
        Bug::OrphanLeavesEarly,
        Part::Work(Level::Whole, BIG_FILES, DAX, 1),
    ),
    (Bug::VictimKeepsLink, Part::Lockstep(1, 6)),
    (Bug::VictimKeepsLink, Part::System(Weather::ROUGH, 8)),
];

/// Overwrites in place, undo of shares.
const LATER: [(Bug, Part); 4] = [
    (
        Bug::InPlaceNotFenced,
        Part::Work(Level::Parts, OVERWRITES, DAX, 4),
    ),
    (Bug::PartialInPlace, Part::Work(Level::Whole, OVERWRITES, DAX, 27)),
    (Bug::UnshareFreesLast, Part::Work(Level::Run, DEDUP, DAX, 24)),
    (Bug::RejoinFreesShared, Part::Work(Level::Run, DEDUP, DAX, 24)),
];

/// Devices that come and go. `TakenOutWhileRead` is for `store/src/tests/devices.rs`: here no session is slow
/// enough amid a read.
const OF_DEVICES: [(Bug, Part); 4] = [
    (Bug::RowBeforeLabel, Part::Work(Level::Whole, DEVICES, DAX, 1)),
    (Bug::LabelNotFlushed, Part::Work(Level::Whole, DEVICES, DAX, 1)),
    (
        Bug::DevicesNotInSuperblock,
        Part::Work(Level::Run, DEVICES, DAX, 1),
    ),
    (Bug::OneDeviceFlushed, Part::Work(Level::Whole, DEVICES, DAX, 1)),
];

/// What was tried, or what is wrong and how many images that took.
type Found = Result<usize, (usize, String)>;

/// What a bug breaks may panic.
fn armed(bug: Option<Bug>, work: impl FnOnce() -> Found) -> Found {
    arm(bug);
    let found = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied());
        Err((0, format!("panic: {}", said.unwrap_or("without a word"))))
    });
    arm(None);
    found
}

fn tried(bug: Option<Bug>, work: Work, medium: SimMedium, seed: u64, level: Level) -> Found {
    armed(bug, || {
        let (script, shape) = work.script(medium, seed);
        let recorded = script.record(shape).map_err(|why| (0, why))?;
        if level == Level::Run {
            return Ok(0);
        }
        let explored = recorded.explore(&work.effort(level));
        explored
            .map(|tally| tally.images)
            .map_err(|(tally, why)| (tally.images, why))
    })
}

fn in_lockstep(bug: Option<Bug>, sessions: usize, seed: u64) -> Found {
    armed(bug, || {
        let steps = lockstep::steps(seed, sessions, 250);
        lockstep::run(Shape::small(DAX), sessions, &steps)
            .map(|_| 0)
            .map_err(|(at, why)| (0, format!("step {at}: {why}")))
    })
}

fn in_system(bug: Option<Bug>, weather: Weather, seed: u64) -> Found {
    armed(bug, || {
        let plan = whole::Plan {
            shape: Shape::small([DAX, FILE, SimMedium::Shm][(seed % 3) as usize]),
            clients: 2,
            seed,
            weather,
        };
        whole::run(&plan, &whole::steps(seed, 2, 150))
            .map(|_| 0)
            .map_err(|(at, why)| (0, format!("step {at}: {why}")))
    })
}

impl Part {
    /// Tries all seeds until one shows something; the seed with it.
    fn find(self, bug: Option<Bug>) -> Result<usize, (u64, usize, String)> {
        let mut images = 0;
        let mut one = |seed: u64, found: Found| match found {
            Ok(count) => {
                images += count;
                None
            }
            Err((count, why)) => Some((seed, images + count, why)),
        };
        let found = match self {
            Self::Work(level, work, medium, seeds) => {
                (1..=seeds).find_map(|seed| one(seed, tried(bug, work, medium, seed, level)))
            }
            Self::Lockstep(sessions, seeds) => {
                (1..=seeds).find_map(|seed| one(seed, in_lockstep(bug, sessions, seed)))
            }
            Self::System(weather, seeds) => {
                (1..=seeds).find_map(|seed| one(seed, in_system(bug, weather, seed)))
            }
        };
        found.map_or(Ok(images), Err)
    }

    /// The same with the next lower level, and all of them below it.
    fn less(self) -> Option<Self> {
        match self {
            Self::Work(Level::Parts, work, medium, seeds) => {
                Some(Self::Work(Level::Torn, work, medium, seeds))
            }
            Self::Work(Level::Torn, work, medium, seeds) => {
                Some(Self::Work(Level::Whole, work, medium, seeds))
            }
            Self::Work(Level::Whole, work, medium, seeds) => {
                Some(Self::Work(Level::Run, work, medium, seeds))
            }
            _ => None,
        }
    }
}

fn brief(why: &str) -> String {
    let lines: Vec<_> = why.lines().filter(|line| !line.starts_with('[')).collect();
    let words = lines.join(" ");
    let words = words.split_whitespace().collect::<Vec<_>>().join(" ");
    words.chars().take(150).collect()
}

/// Carries out jobs in as many threads as there are processors; the results in their order.
fn side_by_side<J: Sync, T: Send>(jobs: &[J], work: impl Fn(&J) -> T + Sync) -> Vec<T> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((at, job)) = Some(next.fetch_add(1, Ordering::Relaxed))
                    .and_then(|at| jobs.get(at).map(|job| (at, job)))
                {
                    let result = work(job);
                    done.lock().expect("nobody panics with it").insert(at, result);
                }
            });
        }
    });
    done.into_inner()
        .expect("nobody panics with it")
        .into_values()
        .collect()
}

/// The work of a table, each once with the highest level that is asked of it, without a bug.
fn sound(table: &[(Bug, Part)]) -> Result<HashMap<(Work, SimMedium), usize>, String> {
    let mut wanted: HashMap<(Work, SimMedium), (Level, u64)> = HashMap::new();
    let mut others = Vec::new();
    for (_, part) in table {
        if let Part::Work(level, work, medium, seeds) = *part {
            let most = wanted.entry((work, medium)).or_insert((level, seeds));
            *most = (most.0.max(level), most.1.max(seeds));
        } else if !others.contains(part) {
            others.push(*part);
        }
    }
    let works = wanted
        .into_iter()
        .map(|((work, medium), (level, seeds))| Part::Work(level, work, medium, seeds));
    let jobs: Vec<_> = works.chain(others).collect();
    let mut images = HashMap::new();
    for (part, found) in jobs.iter().zip(side_by_side(&jobs, |part| part.find(None))) {
        let count = found.map_err(|(seed, _, why)| format!("{part}, seed {seed}, without a bug: {why}"))?;
        if let Part::Work(_, work, medium, _) = part {
            images.insert((*work, *medium), count);
        }
    }
    Ok(images)
}

/// How a bug is caught, as a line of the table, or why it is not.
fn caught(bug: Bug, part: Part) -> Result<(String, String), String> {
    if let Some(less) = part.less()
        && let Err((seed, images, why)) = less.find(Some(bug))
    {
        return Err(format!(
            "{bug:?} is caught with less than it is said to need: {less}, seed {seed}, {images} images: {}",
            brief(&why)
        ));
    }
    match part.find(Some(bug)) {
        Ok(images) => Err(format!("{bug:?} is not caught: {part}, {images} images")),
        Err((seed, images, why)) => Ok((format!("{part}, seed {seed} | {images}"), brief(&why))),
    }
}

fn try_table(table: &[(Bug, Part)]) {
    let sound = sound(table).unwrap_or_else(|why| panic!("{why}"));
    let mut failures = Vec::new();
    for ((bug, part), caught) in table
        .iter()
        .zip(side_by_side(table, |(bug, part)| caught(*bug, *part)))
    {
        match caught {
            Ok((how, why)) => {
                let images = match part {
                    Part::Work(_, work, medium, _) => sound[&(*work, *medium)],
                    _ => 0,
                };
                println!("| `{bug:?}` | {how} | {images} | {why} |");
            }
            Err(why) => failures.push(why),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn bugs_of_the_second_list_are_caught_by_the_parts_that_are_named() {
    try_table(&SECOND);
}

#[test]
fn later_bugs_are_caught_by_the_parts_that_are_named() {
    // Each by itself: one takes many seeds, the other parts of what is pending.
    LATER.iter().for_each(|bug| try_table(std::slice::from_ref(bug)));
}

#[test]
fn bugs_of_devices_are_caught_by_the_parts_that_are_named() {
    try_table(&OF_DEVICES);
}

#[test]
fn bugs_of_the_first_list_are_caught_by_other_parts_too() {
    try_table(&FIRST);
}

/// All work, with all that may be tried of it, is sound.
#[test]
fn work_of_all_kinds_is_sound_without_a_bug() {
    if std::env::var("VARVE_SEEDED_ALL").is_err() {
        return println!("skipped: minutes; VARVE_SEEDED_ALL=1 runs it");
    }
    let jobs: Vec<_> = Work::ALL
        .into_iter()
        .flat_map(|work| [DAX, FILE].map(|medium| Part::Work(Level::Parts, work, medium, 4)))
        .collect();
    let wrong: Vec<_> = side_by_side(&jobs, |part| match part.find(None) {
        Ok(images) => {
            println!("sound | {part} | {images} |");
            None
        }
        Err((seed, images, why)) => Some(format!("{part}, seed {seed}, {images} images: {why}")),
    })
    .into_iter()
    .flatten()
    .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// All bugs on all work. Those that need parts of what is pending are caught by no work with less.
#[test]
fn every_bug_on_all_work() {
    if std::env::var("VARVE_SEEDED_ALL").is_err() {
        return println!("skipped: half an hour; VARVE_SEEDED_ALL=1 runs it");
    }
    let wanted = std::env::var("VARVE_SEEDED_BUG");
    let mut jobs: Vec<(Bug, Level, Work, SimMedium)> = Vec::new();
    for (bug, part) in FIRST.iter().chain(&SECOND) {
        if jobs.iter().any(|(other, ..)| other == bug)
            || wanted.as_ref().is_ok_and(|wanted| *wanted != format!("{bug:?}"))
        {
            continue;
        }
        let least = match part {
            Part::Work(level, ..) => *level,
            _ => Level::Run,
        };
        for work in Work::ALL {
            jobs.extend([DAX, FILE].map(|medium| (*bug, least, work, medium)));
        }
    }
    let failures: Vec<_> = side_by_side(&jobs, |(bug, least, work, medium)| {
        let mut images = 0;
        for level in [Level::Run, Level::Whole, Level::Torn, Level::Parts] {
            match Part::Work(level, *work, *medium, 2).find(Some(*bug)) {
                Ok(count) => images = count,
                Err((seed, count, why)) => {
                    println!(
                        "{bug:?} | {}, seed {seed} | {count} | {}",
                        Part::Work(level, *work, *medium, 2),
                        brief(&why)
                    );
                    return (*least == Level::Parts && level < Level::Torn).then(|| {
                        format!("{bug:?} does not need parts: {level:?} of {work:?} on {medium:?}")
                    });
                }
            }
        }
        println!("{bug:?} | not by {work:?}, {medium:?} | {images} |");
        None
    })
    .into_iter()
    .flatten()
    .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}
