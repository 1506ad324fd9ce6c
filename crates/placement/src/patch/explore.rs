//! All interleavings of writes, reads, fetches, merges and moves of one block on a small medium, with a crash
//! between any two steps.
//!
//! The medium has slots for copies of the block and for patches. A freed slot is overwritten at once, so that
//! a read of a freed copy, or a use of a removed patch, shows. After each step the block, read as a client
//! and as after a crash, must equal the acknowledged bytes. Breadth first; states seen before are skipped.
#![allow(clippy::unwrap_used)]

use super::{Change, Fetch, PatchRead, PatchedBlock};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

/// Deliberately broken rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Bug {
    /// A merge removes patches that it has not read.
    MergeTakesAll,
    /// In an overlap the older bytes win.
    OldBytesWin,
    /// A fetch or a move counts although the lower has changed.
    StaleCounts,
    /// A move forgets the patches.
    MoveDropsPatches,
    /// The old copy is freed before the transaction that replaces it.
    FreedEarly,
    /// The map changes before the merged block is written.
    CommitFirst,
}

const LEN: usize = 3;
const DEAD: u8 = 0xee;

type Slot = usize;

/// A fetch or a move in progress.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Under {
    moves: bool,
    fetch: Fetch,
    from: Slot,
    /// The bytes read, if any; they are merged and written to a slot next.
    read: Option<[u8; LEN]>,
    written: Option<Slot>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct State {
    block: PatchedBlock<Slot>,
    copies: BTreeMap<Slot, [u8; LEN]>,
    /// The bytes acknowledged to clients.
    truth: [u8; LEN],
    under: Vec<Under>,
    writes: u8,
    crashes: u8,
}

impl State {
    fn new(bug: Option<Bug>) -> Self {
        let mut block = PatchedBlock::new(0, LEN as u32);
        block.bug = bug;
        Self {
            block,
            copies: BTreeMap::from([(0, [1, 2, 3])]),
            truth: [1, 2, 3],
            under: Vec::new(),
            writes: 0,
            crashes: 0,
        }
    }

    /// Puts `bytes` into the first slot that nothing refers to.
    fn take(&mut self, bytes: [u8; LEN]) -> Slot {
        let mut used: BTreeSet<Slot> = self.under.iter().filter_map(|under| under.written).collect();
        used.insert(*self.block.lower());
        let slot = (0..).find(|slot| !used.contains(slot)).unwrap();
        self.copies.insert(slot, bytes);
        slot
    }

    fn free(&mut self, slot: Slot) {
        if slot != *self.block.lower() {
            self.copies.insert(slot, [DEAD; LEN]);
        }
    }

    fn write(&mut self, from: usize, len: usize) {
        self.writes += 1;
        let bytes = vec![10 * self.writes; len];
        let old = *self.block.lower();
        if len == LEN {
            let slot = self.take([bytes[0]; LEN]);
            self.block.replace(slot);
            self.free(old);
        } else {
            let change = self.block.write(from as u32, &bytes, u64::from(self.writes));
            if let Change::Whole(whole) = &change {
                let slot = self.take(whole.as_slice().try_into().unwrap());
                self.block.commit_write(change, || slot);
                self.free(old);
            } else {
                self.block.commit_write(change, || unreachable!());
            }
        }
        self.truth[from..from + len].copy_from_slice(&bytes);
    }

    fn begin(&mut self, moves: bool) {
        self.under.push(Under {
            moves,
            fetch: self.block.begin_fetch(),
            from: *self.block.lower(),
            read: None,
            written: None,
        });
    }

    /// Does the next step of a fetch or a move.
    fn go_on(&mut self, at: usize) {
        let mut under = self.under.remove(at);
        let Some(mut bytes) = under.read else {
            under.read = Some(self.copies[&under.from]);
            self.under.insert(at, under);
            return;
        };
        let Some(slot) = under.written else {
            if !under.moves && self.block.merge(&under.fetch, &mut bytes).is_err() {
                return;
            }
            let first = self.block.bug == Some(Bug::CommitFirst);
            let slot = self.take(if first { [DEAD; LEN] } else { bytes });
            if self.block.bug == Some(Bug::FreedEarly) {
                self.copies.insert(under.from, [DEAD; LEN]);
            }
            under.written = Some(slot);
            self.under.insert(at, under);
            return;
        };
        let old = *self.block.lower();
        let done = if under.moves {
            self.block.commit_move(&under.fetch, slot).is_ok()
        } else {
            self.block.commit_fetch(&under.fetch, slot).is_ok()
        };
        if done {
            self.free(old);
        } else {
            self.free(slot);
        }
    }

    fn crash(&mut self) {
        self.crashes += 1;
        self.under.clear();
        let bug = self.block.bug;
        self.block = self.block.recovered();
        self.block.bug = bug;
        let kept = *self.block.lower();
        for (slot, bytes) in &mut self.copies {
            if *slot != kept {
                *bytes = [DEAD; LEN];
            }
        }
    }

    fn next(&self) -> Vec<Self> {
        let mut all = Vec::new();
        let mut add = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            all.push(next);
        };
        if self.writes < 4 {
            for (from, len) in [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)] {
                add(&|next| next.write(from, len));
            }
        }
        if self.under.len() < 2 {
            add(&|next| next.begin(false));
            add(&|next| next.begin(true));
        }
        for at in 0..self.under.len() {
            add(&|next| next.go_on(at));
        }
        if self.crashes < 2 {
            add(&Self::crash);
        }
        all
    }

    /// Compares the block, as clients read it, with the acknowledged bytes and checks its invariants.
    fn is_right(&self) -> bool {
        let mut whole = self.copies[self.block.lower()];
        self.block.overlay(0, &mut whole);
        let parts = (0..LEN).flat_map(|from| (1..=LEN - from).map(move |len| (from, len)));
        let covered = parts.into_iter().all(|(from, len)| {
            let truth = &self.truth[from..from + len];
            match self.block.read(from as u32, len as u32) {
                PatchRead::Covered(bytes) => bytes == truth,
                PatchRead::Fetch => true,
            }
        });
        let patches = self.block.patches();
        let apart = patches.windows(2).all(|two| two[0].range().end < two[1].from);
        whole == self.truth && covered && apart && self.block.patch_bytes() < LEN as u64
    }
}

/// Explores at most `most` states. Returns their number, and whether all were right.
fn explore(bug: Option<Bug>, most: usize) -> (usize, bool) {
    let first = State::new(bug);
    let (mut seen, mut queue) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    while let Some(state) = queue.pop_front() {
        if seen.len() >= most {
            break;
        }
        for next in state.next() {
            if !next.is_right() {
                return (seen.len(), false);
            }
            if seen.insert(next.clone()) {
                queue.push_back(next);
            }
        }
    }
    (seen.len(), true)
}

#[test]
fn block_is_what_was_acknowledged_in_every_interleaving_with_crashes() {
    let (states, right) = explore(None, 300_000);
    assert!(right && states >= 100_000, "{states} states");
}

#[test]
fn each_seeded_bug_is_found() {
    let bugs = [
        Bug::MergeTakesAll,
        Bug::OldBytesWin,
        Bug::StaleCounts,
        Bug::MoveDropsPatches,
        Bug::FreedEarly,
        Bug::CommitFirst,
    ];
    for bug in bugs {
        let (states, right) = explore(Some(bug), 300_000);
        assert!(!right, "{bug:?} was not found in {states} states");
    }
}
