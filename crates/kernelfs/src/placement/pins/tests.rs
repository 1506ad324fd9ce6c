#![allow(clippy::unwrap_used)]
use super::{MOVE_BLOCKS, PASS_STEPS, PinnedFiles, Pins};
use crate::placement::{At, Cause};
use std::cell::RefCell;
use std::collections::BTreeMap;
use varve_format::{BlockNo, Extent, ExtentFlags, FileBlock, Ino, InodeKey, Pin, PinTo, PinnedBy, Tier};
use varve_store::{MappedPart, SpaceStats, TierStats};

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
    fn pinned(&self, from: Ino, most: usize) -> (Vec<(InodeKey, Pin)>, Option<Ino>) {
        *self.asked.borrow_mut() += 1;
        let mut later = self.files.range(from.0..);
        let found: Vec<_> = later
            .by_ref()
            .take(most)
            .map(|(ino, (pin, _))| (key(*ino), *pin))
            .collect();
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
