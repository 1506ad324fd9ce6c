#![allow(clippy::unwrap_used)]
use super::{Held, MOVE_BLOCKS, PASS_STEPS, PinnedFiles, Pins, Wish};
use crate::placement::{At, Cause, Job};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use varve_format::{BlockNo, Extent, ExtentFlags, FileBlock, Ino, InodeKey, Pin, PinTo, PinnedBy, Tier};
use varve_store::{MappedPart, SharedPart, SpaceStats, TierStats};

const fn key(ino: u64) -> InodeKey {
    InodeKey::new(ino, 1)
}

const fn to(tier: Tier) -> Pin {
    Pin {
        to: PinTo::Tier(tier),
        by: PinnedBy::Command,
    }
}

/// First block, blocks, tier, and whether they have other owners.
type Part = (u64, u32, Tier, bool);

/// Files with a pin and extents.
#[derive(Default)]
struct Files {
    files: BTreeMap<u64, (Pin, Vec<Part>)>,
    asked: RefCell<u64>,
}

impl PinnedFiles for Files {
    fn pinned(&self, from: Ino, most: usize) -> (Vec<Wish>, Option<Ino>) {
        *self.asked.borrow_mut() += 1;
        let mut later = self.files.range(from.0..);
        let wish = |(ino, (pin, _)): (&u64, &(Pin, _))| Wish {
            key: key(*ino),
            pin: *pin,
            shared: None,
        };
        let found: Vec<_> = later.by_ref().take(most).map(wish).collect();
        (found, later.next().map(|(ino, _)| Ino(*ino)))
    }

    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart> {
        let all = self.files[&key.ino.0].1.iter();
        let part = |(at, len, tier, shared): &Part| MappedPart {
            extent: Extent {
                file_block: FileBlock(*at),
                len: *len,
                tier: *tier,
                block: BlockNo(10_000 + at),
                flags: ExtentFlags::empty(),
            },
            number: shared.then_some(1),
            owners: 1 + u32::from(*shared),
        };
        let mut parts: Vec<_> = all.map(part).filter(|part| part.extent.end() > from).collect();
        // As the store clips the first extent.
        if let Some(first) = parts.first_mut()
            && first.extent.file_block < from
        {
            let skipped = from.0 - first.extent.file_block.0;
            first.extent.file_block = from;
            first.extent.len -= skipped as u32;
            first.extent.block.0 += skipped;
        }
        parts.truncate(most);
        parts
    }

    fn shared(&self, _: Range<u64>, _: usize) -> Vec<SharedPart> {
        Vec::new()
    }
}

/// Files that share blocks, each with what it wishes of them, and the numbers that its blocks have.
#[derive(Default)]
struct Sharing {
    files: BTreeMap<u64, (Option<Tier>, Vec<Range<u64>>)>,
    /// Runs by their first number: blocks, tier and owners.
    runs: BTreeMap<u64, (u32, Tier, u32)>,
}

impl Sharing {
    fn runs_in(&self, numbers: &Range<u64>) -> Vec<SharedPart> {
        let clip = |(first, (len, tier, owners)): (&u64, &(u32, Tier, u32))| {
            let start = numbers.start.max(*first);
            let end = numbers.end.min(first + u64::from(*len));
            (start < end).then(|| SharedPart {
                number: start,
                len: (end - start) as u32,
                tier: *tier,
                block: BlockNo(50_000 + start),
                owners: *owners,
            })
        };
        self.runs.iter().filter_map(clip).collect()
    }

    /// Carries out moves.
    fn carry(&mut self, jobs: &[Job]) -> Vec<(u64, u32, Tier)> {
        let mut moved = Vec::new();
        for job in jobs {
            for each in &job.moves {
                let At::Shared(number) = each.at else {
                    panic!("{each:?}")
                };
                let found = self.runs_in(&(number..number + u64::from(each.len)));
                assert_eq!(found.len(), 1, "{each:?}");
                assert_eq!((found[0].tier, found[0].block), (job.from, each.block));
                let run = self.runs.range_mut(..=number).next_back().unwrap().1;
                run.1 = job.to;
                moved.push((number, each.len, job.to));
            }
        }
        moved
    }
}

impl PinnedFiles for Sharing {
    fn pinned(&self, from: Ino, most: usize) -> (Vec<Wish>, Option<Ino>) {
        let wish = |(ino, (shared, _)): (&u64, &(Option<Tier>, _))| Wish {
            key: key(*ino),
            pin: Pin::NONE,
            shared: *shared,
        };
        let wishes = self
            .files
            .range(from.0..)
            .map(wish)
            .filter(|wish| wish.shared.is_some());
        (wishes.take(most).collect(), None)
    }

    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart> {
        let (mut at, mut parts) = (0, Vec::new());
        for numbers in &self.files[&key.ino.0].1 {
            for run in self.runs_in(numbers) {
                parts.push(MappedPart {
                    extent: Extent {
                        file_block: FileBlock(at),
                        len: run.len,
                        tier: run.tier,
                        block: run.block,
                        flags: ExtentFlags::empty(),
                    },
                    number: Some(run.number),
                    owners: run.owners,
                });
                at += u64::from(run.len);
            }
        }
        parts.retain(|part| part.extent.file_block >= from);
        parts.truncate(most);
        parts
    }

    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart> {
        let mut runs = self.runs_in(&numbers);
        runs.truncate(most);
        runs
    }
}

/// Ten files that share 300 blocks, 100 of them in NVM and the rest on the SSD; two of them share others, and
/// one has a run that was shared once.
fn sharing() -> Sharing {
    let mut sharing = Sharing::default();
    for ino in 1..=10 {
        sharing.files.insert(ino, (None, vec![1000..1100, 1100..1300]));
    }
    sharing.files.get_mut(&3).unwrap().1.push(2000..2050);
    sharing
        .files
        .get_mut(&7)
        .unwrap()
        .1
        .extend([2000..2050, 3000..3010]);
    sharing.runs = [
        (1000, (100, Tier::Nvm, 10)),
        (1100, (200, Tier::Ssd, 10)),
        (2000, (50, Tier::Ssd, 2)),
        (3000, (10, Tier::Ssd, 1)),
    ]
    .into();
    sharing
}

fn space(free: u64) -> SpaceStats {
    let tier = TierStats {
        total: 10_000,
        free,
        empty_units: 10,
        unit_blocks: 10,
        ..TierStats::default()
    };
    let none = TierStats::default();
    SpaceStats {
        tiers: [tier, tier, none],
        ..SpaceStats::default()
    }
}

#[test]
fn blocks_that_lie_elsewhere_move_to_the_tier_of_the_pin() {
    let mut files = Files::default();
    let stay = Pin {
        to: PinTo::Stay,
        by: PinnedBy::Directory,
    };
    files.files.insert(3, (stay, vec![(0, 5, Tier::Nvm, false)]));
    let parts = vec![
        (0, 10, Tier::Ssd, false),
        (10, 300, Tier::Nvm, false),
        (400, 7, Tier::Nvm, true),
        (500, 1, Tier::Hdd, false),
    ];
    files.files.insert(7, (to(Tier::Ssd), parts));
    let pins = Pins::new(95);
    let jobs = pins.plan(&space(9_000), &files, 4096);
    assert!(
        jobs.iter()
            .all(|job| job.to == Tier::Ssd && job.cause == Cause::Pinned)
    );
    let moves: Vec<_> = jobs
        .iter()
        .flat_map(|job| {
            job.moves
                .iter()
                .map(|moved| (job.from, moved.at, moved.len, moved.block.0))
        })
        .collect();
    let at = |block| At::File(key(7), FileBlock(block));
    let first = MOVE_BLOCKS as u32;
    let expected = [
        (Tier::Nvm, at(10), first, 10_010),
        (Tier::Nvm, at(10 + MOVE_BLOCKS), 300 - first, 10_010 + MOVE_BLOCKS),
        (Tier::Hdd, at(500), 1, 10_500),
    ];
    assert_eq!(moves, expected);
}

#[test]
fn a_step_moves_no_more_than_asked_and_the_next_one_continues() {
    let mut files = Files::default();
    for ino in 1..=20 {
        files
            .files
            .insert(ino, (to(Tier::Ssd), vec![(0, 100, Tier::Nvm, false)]));
    }
    let pins = Pins::new(95);
    let mut all = Vec::new();
    for _ in 0..40 {
        let jobs = pins.plan(&space(9_000), &files, 70);
        assert!(jobs.iter().map(crate::placement::Job::blocks).sum::<u64>() <= 70);
        all.extend(jobs.into_iter().flat_map(|job| job.moves));
    }
    // Each block once.
    assert_eq!(all.iter().map(|moved| moved.len).sum::<u32>(), 2000);
    all.sort_by_key(|moved| moved.at);
    all.dedup_by_key(|moved| moved.at);
    assert_eq!(all.iter().map(|moved| moved.len).sum::<u32>(), 2000);
}

#[test]
fn full_or_missing_tiers_are_waited_for_with_a_reason() {
    let mut files = Files::default();
    files
        .files
        .insert(1, (to(Tier::Ssd), vec![(0, 100, Tier::Nvm, false)]));
    files
        .files
        .insert(2, (to(Tier::Hdd), vec![(0, 100, Tier::Nvm, false)]));
    let jobs = Pins::new(95).plan(&space(100), &files, 4096);
    let waiting: Vec<_> = jobs.iter().map(|job| job.waiting.clone().unwrap()).collect();
    assert_eq!(
        waiting,
        ["waiting: ssd 99 % full", "waiting: this pool has no hdd"]
    );
    assert!(jobs.iter().all(|job| job.moves.is_empty()));
}

#[test]
fn without_pins_inodes_are_read_once_until_one_is_set() {
    let mut files = Files::default();
    let pins = Pins::new(95);
    for _ in 0..10 * PASS_STEPS {
        assert!(pins.plan(&space(9_000), &files, 100).is_empty());
    }
    assert_eq!(*files.asked.borrow(), 1);
    files
        .files
        .insert(1, (to(Tier::Ssd), vec![(0, 1, Tier::Nvm, false)]));
    assert!(pins.plan(&space(9_000), &files, 100).is_empty());
    pins.changed();
    assert_eq!(pins.plan(&space(9_000), &files, 100).len(), 1);
    // What is written elsewhere later is found, too.
    let found = (0..=PASS_STEPS).filter(|_| !pins.plan(&space(9_000), &files, 100).is_empty());
    assert_eq!(found.count(), 1);
}

#[test]
fn blocks_that_cannot_be_read_are_tried_once() {
    let mut files = Files::default();
    files
        .files
        .insert(1, (to(Tier::Ssd), vec![(0, 1, Tier::Nvm, false)]));
    let pins = Pins::new(95);
    let jobs = pins.plan(&space(9_000), &files, 100);
    pins.failed(&jobs[0].moves[0]);
    for _ in 0..2 * PASS_STEPS {
        assert!(pins.plan(&space(9_000), &files, 100).is_empty());
    }
    pins.changed();
    assert_eq!(pins.plan(&space(9_000), &files, 100).len(), 1);
}

#[test]
fn new_data_that_went_elsewhere_follows_when_there_is_room() {
    let mut files = Files::default();
    files
        .files
        .insert(1, (to(Tier::Ssd), vec![(0, 1, Tier::Ssd, false)]));
    let pins = Pins::new(95);
    assert!(pins.plan(&space(9_000), &files, 100).is_empty());
    files
        .files
        .insert(1, (to(Tier::Ssd), vec![(0, 1, Tier::Nvm, false)]));
    assert!(pins.plan(&space(9_000), &files, 100).is_empty(), "it rests");
    assert_eq!(pins.target(to(Tier::Ssd), 4096, &space(100)), None);
    assert!(pins.plan(&space(100), &files, 100).is_empty(), "no room yet");
    assert_eq!(pins.plan(&space(9_000), &files, 100).len(), 1);
}

#[test]
fn new_data_goes_to_the_tier_of_the_pin_while_there_is_room() {
    let pins = Pins::new(95);
    let target = |pin, free| pins.target(pin, 4096, &space(free)).map(|target| target.tier);
    assert_eq!(target(to(Tier::Ssd), 9_000), Some(Tier::Ssd));
    assert_eq!(target(to(Tier::Ssd), 100), None);
    assert_eq!(target(to(Tier::Hdd), 9_000), None, "the pool has none");
    assert_eq!(target(Pin::NONE, 9_000), None);
}

#[test]
fn shared_part_moves_once_for_all_files_and_to_the_fastest_tier_that_one_wishes() {
    let (mut files, pins) = (sharing(), Pins::new(95));
    for (ino, tier) in [(3, Tier::Ssd), (5, Tier::Nvm), (7, Tier::Ssd), (9, Tier::Nvm)] {
        files.files.get_mut(&ino).unwrap().0 = Some(tier);
    }
    // The ones of file 7 alone stay; the SSD has what 3 and 7 share.
    let jobs = pins.plan(&space(9_000), &files, 4096);
    assert_eq!(files.carry(&jobs), [(1100, 200, Tier::Nvm)]);
    for ino in [5, 9] {
        files.files.get_mut(&ino).unwrap().0 = None;
        pins.changed();
        let jobs = pins.plan(&space(9_000), &files, 4096);
        let moved = files.carry(&jobs);
        // As long as one still wishes it.
        let expected: &[_] = if ino == 5 {
            &[]
        } else {
            &[(1000, 100, Tier::Ssd), (1100, 200, Tier::Ssd)]
        };
        assert_eq!(moved, expected, "{ino}");
    }
}

#[test]
fn policies_see_no_shared_block_before_the_first_pass_and_later_all_that_is_not_placed() {
    let (mut files, pins) = (sharing(), Pins::new(95));
    let seen = |pins: &Pins, files: &Sharing| -> Vec<u64> {
        let held = pins.held();
        let seen = files
            .runs_in(&(0..u64::MAX))
            .into_iter()
            .filter(|run| !held.holds_run(run));
        seen.map(|run| run.number).collect()
    };
    assert!(matches!(pins.held(), Held::All));
    assert!(seen(&pins, &files).is_empty());
    assert!(pins.plan(&space(9_000), &files, 4096).is_empty());
    assert!(pins.held().is_nothing());
    assert_eq!(seen(&pins, &files), [1000, 1100, 2000, 3000]);
    files.files.get_mut(&1).unwrap().0 = Some(Tier::Nvm);
    pins.changed();
    let jobs = pins.plan(&space(9_000), &files, 4096);
    files.carry(&jobs);
    assert_eq!(seen(&pins, &files), [2000, 3000]);
    // Its last file that wished it is gone, or wishes no more.
    files.files.remove(&1);
    pins.changed();
    assert!(pins.plan(&space(9_000), &files, 4096).is_empty());
    assert_eq!(seen(&pins, &files), [1000, 1100, 2000, 3000]);
}

#[test]
fn runs_that_are_cut_or_gone_since_they_were_placed_are_no_matter() {
    let (mut files, pins) = (sharing(), Pins::new(95));
    files.files.get_mut(&1).unwrap().0 = Some(Tier::Nvm);
    assert_eq!(
        pins.plan(&space(9_000), &files, 50)
            .iter()
            .map(Job::blocks)
            .sum::<u64>(),
        50
    );
    // Cut in three: one of these is gone, one has a single owner left.
    files.runs.remove(&1100);
    files.runs.insert(1100, (50, Tier::Ssd, 10));
    files.runs.insert(1180, (20, Tier::Ssd, 1));
    files.runs.insert(1200, (100, Tier::Ssd, 9));
    let mut moved = Vec::new();
    for _ in 0..4 {
        let jobs = pins.plan(&space(9_000), &files, 4096);
        moved.extend(files.carry(&jobs));
    }
    assert_eq!(moved, [(1200, 100, Tier::Nvm)]);
    pins.changed();
    let jobs = pins.plan(&space(9_000), &files, 4096);
    assert_eq!(files.carry(&jobs), [(1100, 50, Tier::Nvm)]);
}

#[test]
fn shared_part_waits_with_a_reason_while_its_tier_is_full() {
    let (mut files, pins) = (sharing(), Pins::new(95));
    files.files.get_mut(&1).unwrap().0 = Some(Tier::Nvm);
    let jobs = pins.plan(&space(100), &files, 4096);
    assert_eq!(files.carry(&jobs), []);
    assert_eq!(jobs[0].waiting.as_deref(), Some("waiting: nvm 99 % full"));
    let jobs = pins.plan(&space(9_000), &files, 4096);
    assert_eq!(files.carry(&jobs), [(1100, 200, Tier::Nvm)]);
}

#[test]
fn steps_of_a_few_blocks_place_all_of_it() {
    let (mut files, pins) = (sharing(), Pins::new(95));
    files.files.get_mut(&3).unwrap().0 = Some(Tier::Nvm);
    // Moves of parts of a run, which this model of a pool does not split: it only counts them.
    let mut blocks = 0;
    for _ in 0..20 {
        let jobs = pins.plan(&space(9_000), &files, 30);
        blocks += jobs.iter().map(Job::blocks).sum::<u64>();
    }
    assert_eq!(blocks, 250);
}
