//! What the driver makes of a policy, of shared blocks, and of full tiers.

use super::recent::{ARRIVALS_MAX, TOUCHED_MAX};
use super::*;
use std::cell::Cell;
use std::ops::Range;
use varve_format::{BlockNo, Extent, ExtentFlags, Generation, Ino};
use varve_ipc::{Clock, ManualClock};
use varve_store::{MappedPart, SharedPart, TierStats};

fn driver(space: &SpaceStats) -> (Driver, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(0));
    let meters = Meters::new(&(Arc::clone(&clock) as Arc<dyn Clock>));
    (Driver::new(&Config::default(), space, Arc::new(meters)), clock)
}

const fn part(at: u64, len: u32, tier: Tier, number: Option<u64>) -> MappedPart {
    MappedPart {
        extent: Extent {
            file_block: FileBlock(at),
            len,
            tier,
            block: BlockNo(5000),
            flags: ExtentFlags::empty(),
        },
        number,
        owners: 1,
    }
}

const fn key(ino: u64) -> InodeKey {
    InodeKey {
        ino: Ino(ino),
        generation: Generation(1),
    }
}

/// One file, with a run of 1,000 blocks on each tier.
struct OneFile;

impl Catalog for OneFile {
    fn files(&self, from: Ino, _most: usize) -> (Vec<InodeKey>, Option<Ino>) {
        let keys = if from.0 <= 20 { vec![key(20)] } else { Vec::new() };
        (keys, None)
    }

    fn extents(&self, _key: InodeKey, from: FileBlock, _most: usize) -> Vec<MappedPart> {
        let runs = Tier::ALL.map(|tier| part(tier as u64 * 1000, 1000, tier, None));
        let mut runs = runs.to_vec();
        runs.retain(|run| run.extent.end() > from);
        runs
    }

    fn shared(&self, _numbers: Range<u64>, _most: usize) -> Vec<SharedPart> {
        Vec::new()
    }
}

/// Data from NVM fills the next tier to the last block below its mark, where its percentage is still below.
#[test]
fn tier_without_room_below_its_mark_makes_some() {
    let tier = |free| TierStats {
        total: 10_017,
        free,
        unit_blocks: 10,
        ..TierStats::default()
    };
    let of = |ssd| SpaceStats {
        tiers: [tier(10), tier(ssd), tier(9000)],
        ..SpaceStats::default()
    };
    for (space, makes_room) in [(of(540), false), (of(511), true)] {
        let jobs = driver(&space).0.plan(&space, &OneFile, 4096);
        let from_ssd = jobs.iter().find(|job| job.from == Tier::Ssd);
        assert_eq!(
            from_ssd.is_some_and(|job| !job.moves.is_empty()),
            makes_room,
            "{jobs:?}"
        );
        assert!(jobs.iter().all(|job| job.cause == Cause::Full), "{jobs:?}");
    }
}

/// Files 1 to 10 with 200 blocks each, all the same shared ones, and 100 of their own.
struct TenClones(Cell<Tier>);

const FIRST: u64 = 1000;

impl Catalog for TenClones {
    fn files(&self, from: Ino, _most: usize) -> (Vec<InodeKey>, Option<Ino>) {
        ((from.0.max(1)..=10).map(key).collect(), None)
    }

    fn extents(&self, _key: InodeKey, from: FileBlock, _most: usize) -> Vec<MappedPart> {
        let own = part(200, 100, Tier::Hdd, None);
        let mut parts = vec![part(0, 200, self.0.get(), Some(FIRST)), own];
        parts.retain(|part| part.extent.end() > from);
        parts
    }

    fn shared(&self, numbers: Range<u64>, _most: usize) -> Vec<SharedPart> {
        let (first, end) = (numbers.start.max(FIRST), numbers.end.min(FIRST + 200));
        let run = SharedPart {
            number: first,
            len: end.saturating_sub(first) as u32,
            tier: self.0.get(),
            block: BlockNo(5000 + first.saturating_sub(FIRST)),
            owners: 2,
        };
        if first < end { vec![run] } else { Vec::new() }
    }
}

const ROOMY: TierStats = TierStats {
    total: 10_000,
    free: 9_000,
    pending: 0,
    unit_blocks: 10,
    empty_units: 900,
    kept: 0,
    avoided: false,
};

fn roomy() -> SpaceStats {
    SpaceStats {
        tiers: [ROOMY; 3],
        ..SpaceStats::default()
    }
}

fn moves(jobs: &[Job]) -> Vec<Move> {
    jobs.iter().flat_map(|job| job.moves.clone()).collect()
}

fn blocks(moves: &[Move]) -> u32 {
    moves.iter().map(|moved| moved.len).sum()
}

#[test]
fn shared_blocks_are_hot_by_the_reads_of_all_owners_and_move_once() {
    let (driver, _clock) = driver(&roomy());
    let clones = TenClones(Cell::new(Tier::Hdd));
    for ino in 1..=3 {
        driver.used(key(ino), FileBlock(0), 300, Use::Read);
    }
    assert!(
        driver.plan(&roomy(), &clones, 4096).is_empty(),
        "read by three of them"
    );
    driver.used(key(4), FileBlock(0), 300, Use::Read);
    let jobs = driver.plan(&roomy(), &clones, 4096);
    let moves = moves(&jobs);
    assert!(
        moves.iter().all(|moved| matches!(moved.at, At::Shared(_))),
        "{jobs:?}"
    );
    assert_eq!(
        (blocks(&moves), jobs.len()),
        (200, 1),
        "the own blocks were read once"
    );
    assert_eq!((jobs[0].from, jobs[0].to), (Tier::Hdd, Tier::Nvm));
    assert_eq!(driver.heat(At::Shared(FIRST)).reads, 4);
    assert_eq!(driver.heat(At::File(key(1), FileBlock(250))).reads, 1);
    clones.0.set(Tier::Nvm);
    for moved in &moves {
        driver.moved(&jobs[0], moved);
    }
    assert!(driver.plan(&roomy(), &clones, 4096).is_empty(), "they are there");
}

#[test]
fn full_tier_moves_shared_blocks_once_for_all_owners() {
    let clones = TenClones(Cell::new(Tier::Ssd));
    let mut space = roomy();
    space.tiers[Tier::Ssd as usize].free = 20;
    let moves = moves(&driver(&space).0.plan(&space, &clones, 4096));
    assert_eq!(blocks(&moves), 200, "{moves:?}");
    assert!(moves.iter().all(|moved| matches!(moved.at, At::Shared(_))));
}

#[test]
fn step_takes_no_more_blocks_than_it_may_and_the_next_goes_on() {
    let mut space = roomy();
    space.tiers[Tier::Ssd as usize].free = 20;
    let (driver, _clock) = driver(&space);
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let moves = moves(&driver.plan(&space, &OneFile, 64));
        assert!((1..=64).contains(&blocks(&moves)), "{moves:?}");
        for moved in &moves {
            assert!(seen.insert(moved.at), "{moved:?} is given out again");
            driver.moved(
                &Job {
                    from: Tier::Ssd,
                    to: Tier::Hdd,
                    cause: Cause::Full,
                    of: None,
                    moves: Vec::new(),
                    waiting: None,
                },
                moved,
            );
        }
    }
}

#[test]
fn unit_that_cannot_be_read_is_not_given_out_again() {
    let mut space = roomy();
    space.tiers[Tier::Ssd as usize].free = 20;
    let (driver, _clock) = driver(&space);
    let first = moves(&driver.plan(&space, &OneFile, 64));
    driver.failed(&first[0]);
    for _ in 0..200 {
        let again = moves(&driver.plan(&space, &OneFile, 64));
        assert!(!again.contains(&first[0]), "{again:?}");
    }
}

#[test]
fn accesses_between_two_plans_take_bounded_memory() {
    let mut accesses = Accesses::default();
    accesses.add(key(1), UNIT_BLOCKS - 1, 2, Use::Read);
    assert_eq!(accesses.0.len(), 2);
    accesses.add(key(2), 0, u64::MAX, Use::Written);
    for ino in 3..20_000 {
        accesses.add(key(ino), 0, 1, Use::Read);
    }
    assert_eq!(accesses.0.len(), TOUCHED_MAX);
}

#[test]
fn nothing_but_what_makes_room_moves_while_moves_are_forgotten() {
    let unit = |index| unit_at(At::File(key(1), FileBlock(index * UNIT_BLOCKS)));
    let step = |index, to, cause| Step {
        unit: unit(index),
        act: Act::Move,
        from: DeviceId(1 - to),
        to: DeviceId(to),
        cause,
        reason: "".into(),
    };
    let mut arrivals = Arrivals::default();
    for index in 0..ARRIVALS_MAX as u64 {
        arrivals.note(unit(index), DeviceId(0), 1000);
    }
    let (hot, full) = (policy::Cause::Hot, policy::Cause::Full);
    assert!(arrivals.is_back(&step(7, 0, hot), 1001) && arrivals.is_back(&step(7, 0, full), 1001));
    assert!(!arrivals.is_back(&step(7, 1, hot), 1001) && !arrivals.is_back(&step(7, 0, hot), 1000 + STAY_MS));
    let new = ARRIVALS_MAX as u64;
    assert!(!arrivals.is_back(&step(new, 0, hot), 1002));
    arrivals.note(unit(new), DeviceId(0), 1002);
    assert!(
        arrivals.is_back(&step(new, 0, hot), 1003),
        "it may have come from there"
    );
    assert!(!arrivals.is_back(&step(new, 1, full), 1003));
    assert!(!arrivals.is_back(&step(new, 0, hot), 1002 + STAY_MS));
    arrivals.note(unit(new), DeviceId(0), 1002 + STAY_MS);
    assert_eq!(arrivals.units.len(), 1, "the others are of no use any more");
}
