//! Pins: where operators want the data of files (`varve pin`, `varve exclude`), and what files share (`varve
//! dedup place`). Owns the target of new data of pinned files and the search for data on other tiers; moves
//! nothing. Policies do not see the data of pinned files, nor shared blocks that are placed.
//!
//! A pin never refuses a write: without room below the high mark of its tier, new data goes where the policy
//! puts it, and comes back when there is room.
//!
//! # Shared blocks
//! A pin does not hold for them: they move for all their owners, and these may have different pins. A file
//! has a wish of its own for its shared part (docs/adr/0047):
//! - *A run is wanted on the fastest tier that any of its files wishes*, as the last whole pass over the
//!   inodes has found. It moves once, not once for each file.
//! - *What one file has alone is not moved by it*, nor is it held: not what was never shared, nor what is not
//!   shared any more.
//! - *Until the first pass has ended, policies see no shared block*: none moves away that was placed.
//! - The set of numbers is in memory only. A crash leaves the files' wishes, each whole or not at all.

mod shared;

pub use shared::Held;

use super::fill::Fill;
use super::{At, Cause, Job, Move};
use parking_lot::Mutex;
use shared::{Gathering, SetOfWishes, Wishes};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_format::{BlockNo, FileBlock, Ino, InodeKey, Pin, PinnedBy, Tier};
use varve_store::{DataTarget, MappedPart, SharedPart, SpaceStats};

/// Files asked for at once.
const FILES: usize = 256;
/// Extents asked for at once.
const EXTENTS: usize = 128;
/// Most files and extents checked in one step.
const LOOKS: usize = 4096;
/// Most blocks of one move.
const MOVE_BLOCKS: u64 = 256;
/// Most runs remembered whose data cannot be read.
const BAD_MAX: usize = 4096;
/// Steps between two passes: new data of a pinned file may have gone elsewhere.
const PASS_STEPS: u64 = 600;

/// What operators wish of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// The inode.
    pub key: InodeKey,
    /// Where its own data is to be.
    pub pin: Pin,
    /// Where what it shares is to be.
    pub shared: Option<Tier>,
}

/// The pinned inodes of a pool.
pub trait PinnedFiles {
    /// Returns inodes with a pin or a wish for their shared part, directories too, with numbers from `from`
    /// on, at most `most`, and where to continue; `None`: there are no more.
    fn pinned(&self, from: Ino, most: usize) -> (Vec<Wish>, Option<Ino>);

    /// Returns the extents of a regular file from a block on, at most `most`; none if the file is gone or
    /// must not be moved now.
    fn extents(&self, key: InodeKey, from: FileBlock, most: usize) -> Vec<MappedPart>;

    /// Returns the shared blocks with these numbers, at most `most` runs.
    fn shared(&self, numbers: Range<u64>, most: usize) -> Vec<SharedPart>;
}

/// State of the search. A pass goes over the inodes, and then over the shared blocks that they wish
/// somewhere.
#[derive(Debug, Default)]
struct Search {
    ino: Ino,
    block: FileBlock,
    /// What the inodes of this pass wish of shared blocks.
    gathering: Gathering,
    /// Where the pass continues among these; `None`: it is still at the inodes.
    number: Option<(Tier, u64)>,
    /// This pass has seen a pin.
    seen: bool,
    /// This or an earlier pass has seen a pin that a rule has set.
    seen_rules: bool,
    step: u64,
    /// The step at which the next pass begins, if none is under way; it begins earlier when a tier of `waits`
    /// has room again.
    rests_until: Option<u64>,
    /// Tiers without room for data that is pinned to them, as the last pass has found.
    waits: [bool; 3],
    /// Jobs without moves: what the last pass has found to wait, and what this one has.
    told: Vec<Job>,
    found: Vec<Job>,
    bad: BTreeSet<At>,
}

/// The pins of a pool.
#[derive(Debug)]
pub struct Pins {
    /// Fill level, in percent, up to which a tier takes pinned data.
    high: u64,
    /// Pins have changed since the search looked here last.
    changed: AtomicBool,
    /// Tiers that had no room for new data since then.
    refused: [AtomicBool; 3],
    /// Locked while inodes are read; digests never wait for it.
    search: Mutex<Search>,
    /// The shared blocks that the last pass has found to be wanted somewhere. A leaf of the lock order.
    held: Mutex<Held>,
}

impl Pins {
    /// Tiers take pinned data until they are `high` percent full.
    #[must_use]
    pub fn new(high: u64) -> Self {
        Self {
            high,
            changed: AtomicBool::new(false),
            refused: Default::default(),
            search: Mutex::default(),
            held: Mutex::new(Held::All),
        }
    }

    /// Returns the shared blocks that policies do not see.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.lock().clone()
    }

    /// Returns the target of `bytes` of new data; `None`: the policy decides.
    #[must_use]
    pub fn target(&self, pin: Pin, bytes: u64, space: &SpaceStats) -> Option<DataTarget> {
        let tier = pin.tier()?;
        let blocks = bytes.div_ceil(varve_format::BLOCK_BYTES);
        if self.room(tier, space) > blocks {
            return Some(DataTarget::prefer(tier).with_reserve());
        }
        // It follows when there is room.
        self.refused[tier as usize].store(true, Ordering::Relaxed);
        None
    }

    /// Blocks that a tier still takes.
    fn room(&self, tier: Tier, space: &SpaceStats) -> u64 {
        let stats = &space.tiers[tier as usize];
        if stats.total == 0 || stats.avoided {
            return 0;
        }
        Fill::of(tier, stats).below(self.high)
    }

    /// Whether the search has seen pins that rules have set.
    #[must_use]
    pub fn has_seen_rules(&self) -> bool {
        self.search.lock().seen_rules
    }

    /// Pins have changed: a pass begins with the next step, or when the present one has ended.
    pub fn changed(&self) {
        self.changed.store(true, Ordering::Release);
    }

    /// A move of the last plan can never be done: its data cannot be read.
    pub fn failed(&self, failed: &Move) {
        let mut search = self.search.lock();
        if search.bad.len() < BAD_MAX {
            search.bad.insert(failed.at);
        }
    }

    /// Returns the moves of pinned data to its tiers, at most `most` blocks, and jobs that wait.
    pub fn plan(&self, space: &SpaceStats, files: &dyn PinnedFiles, most: u64) -> Vec<Job> {
        let mut search = self.search.lock();
        search.step += 1;
        for (waits, refused) in search.waits.iter_mut().zip(&self.refused) {
            *waits |= refused.swap(false, Ordering::Relaxed);
        }
        let room = Tier::ALL.map(|tier| self.room(tier, space));
        if let Some(until) = search.rests_until {
            let changed = self.changed.swap(false, Ordering::Acquire);
            let has_room = |tier: Tier| search.waits[tier as usize] && room[tier as usize] > 0;
            if changed {
                search.bad.clear();
            } else if search.step < until && !Tier::ALL.into_iter().any(has_room) {
                return search.told.clone();
            }
            search.begin();
        }
        let mut plan = Plan {
            space,
            room,
            waits: search.waits,
            left: most,
            looks: LOOKS,
            jobs: Vec::new(),
        };
        self.search(&mut search, files, &mut plan);
        search.waits = plan.waits;
        search.tell(plan.jobs)
    }

    /// Continues the search as far as the step may.
    fn search(&self, search: &mut Search, files: &dyn PinnedFiles, plan: &mut Plan<'_>) {
        while search.number.is_none() {
            if plan.looks == 0 || plan.left == 0 {
                return;
            }
            let (wishes, next) = files.pinned(search.ino, FILES);
            plan.looks = plan.looks.saturating_sub(FILES);
            for wish in wishes {
                search.go_to(wish.key.ino, false);
                search.seen = true;
                search.seen_rules |= wish.pin.by == PinnedBy::Rule;
                let looks_at_it = wish.pin.tier().is_some() || wish.shared.is_some();
                if looks_at_it && !search.file(&wish, files, plan) {
                    return;
                }
            }
            match next {
                Some(next) => search.go_to(next, true),
                None => self.take_gathered(search),
            }
        }
        let held = self.held();
        if held.set().is_none_or(|wishes| search.shared(wishes, files, plan)) {
            search.end();
        }
    }

    /// All inodes were looked at: what they wish of shared blocks holds from here on.
    fn take_gathered(&self, search: &mut Search) {
        let held = match std::mem::take(&mut search.gathering).finish() {
            Ok(wishes) => Held::Set(SetOfWishes::from(wishes)),
            Err(runs) => {
                tracing::warn!(
                    "what is placed of shared blocks lies in too many runs ({runs} and more): none is moved"
                );
                Held::All
            }
        };
        *self.held.lock() = held;
        search.number = Some((Tier::Nvm, 0));
    }
}

/// What one step may do, and its jobs.
struct Plan<'s> {
    space: &'s SpaceStats,
    room: [u64; 3],
    /// Tiers without room for data that is pinned to them.
    waits: [bool; 3],
    left: u64,
    looks: usize,
    jobs: Vec<Job>,
}

impl Plan<'_> {
    /// The job between two tiers.
    fn job(&mut self, from: Tier, to: Tier) -> &mut Job {
        let same = |job: &Job| (job.from, job.to) == (from, to);
        let at = self.jobs.iter().position(same).unwrap_or(self.jobs.len());
        if at == self.jobs.len() {
            self.jobs.push(Job {
                from,
                to,
                cause: Cause::Pinned,
                of: None,
                moves: Vec::new(),
                waiting: None,
            });
        }
        &mut self.jobs[at]
    }

    /// Adds moves of a run of blocks to a tier. Returns the number of blocks that this step is done with.
    fn add(&mut self, run: &Run, to: Tier, bad: &BTreeSet<At>) -> u64 {
        let (from, len) = (run.tier, run.len);
        let mut done = 0;
        while done < len && self.left > 0 {
            let room = self.room[to as usize];
            let blocks = (len - done).min(MOVE_BLOCKS).min(self.left).min(room);
            let at = match run.at {
                At::Shared(number) => At::Shared(number + done),
                At::File(key, block) => At::File(key, FileBlock(block.0 + done)),
            };
            if room == 0 {
                self.waits[to as usize] = true;
                let stats = &self.space.tiers[to as usize];
                let waits = match stats.total {
                    0 => format!("waiting: this pool has no {}", to.name()),
                    _ if stats.avoided => format!("waiting: {} is evacuated", to.name()),
                    _ => format!("waiting: {} {} % full", to.name(), Fill::of(to, stats).percent()),
                };
                self.job(from, to).waiting = Some(waits);
                return len;
            }
            if !bad.contains(&at) {
                self.left -= blocks;
                self.room[to as usize] -= blocks;
                self.job(from, to).moves.push(Move {
                    at,
                    len: blocks as u32,
                    block: BlockNo(run.block.0 + done),
                });
            }
            done += blocks;
        }
        done
    }
}

/// Blocks that lie together.
struct Run {
    at: At,
    len: u64,
    tier: Tier,
    block: BlockNo,
}

impl Search {
    fn begin(&mut self) {
        (self.ino, self.block, self.seen) = (Ino(0), FileBlock(0), false);
        (self.gathering, self.number) = (Gathering::default(), None);
        (self.rests_until, self.waits) = (None, [false; 3]);
        self.found.clear();
    }

    /// A pass has ended. Without pins there is nothing to search for until one is set.
    fn end(&mut self) {
        let rest = if self.seen { PASS_STEPS } else { u64::MAX };
        self.rests_until = Some(self.step.saturating_add(rest));
    }

    /// Adds the jobs that wait, as far as they have no moves now; operators see them until the end of the
    /// next pass.
    fn tell(&mut self, mut jobs: Vec<Job>) -> Vec<Job> {
        fn add(jobs: &mut Vec<Job>, job: &Job) {
            let same = |other: &Job| (other.from, other.to) == (job.from, job.to);
            if !jobs.iter().any(same) {
                jobs.push(Job {
                    moves: Vec::new(),
                    ..job.clone()
                });
            }
        }
        for job in jobs.iter().filter(|job| job.waiting.is_some()) {
            add(&mut self.found, job);
        }
        if self.rests_until.is_some() {
            self.told = std::mem::take(&mut self.found);
        }
        for job in &self.told {
            add(&mut jobs, job);
        }
        jobs
    }

    /// Continues with an inode; from its first block if it is another one, or `anew`.
    fn go_to(&mut self, ino: Ino, anew: bool) {
        if self.ino != ino || anew {
            (self.ino, self.block) = (ino, FileBlock(0));
        }
    }

    /// Plans the moves of one file's own blocks, and gathers its shared ones. False: the step has done its
    /// part, and the next one continues here.
    fn file(&mut self, wish: &Wish, files: &dyn PinnedFiles, plan: &mut Plan<'_>) -> bool {
        loop {
            let parts = files.extents(wish.key, self.block, EXTENTS);
            if parts.is_empty() {
                self.go_to(Ino(wish.key.ino.0 + 1), true);
                return true;
            }
            for part in &parts {
                if plan.looks == 0 || plan.left == 0 {
                    return false;
                }
                plan.looks -= 1;
                let len = u64::from(part.extent.len);
                let to = wish
                    .pin
                    .tier()
                    .filter(|to| part.owners == 1 && part.extent.tier != *to);
                let run = Run {
                    // It may have been shared once, and be this file's alone by now.
                    at: At::of(wish.key, part),
                    len,
                    tier: part.extent.tier,
                    block: part.extent.block,
                };
                let done = to.map_or(len, |to| plan.add(&run, to, &self.bad));
                if let (Some(tier), Some(number)) = (wish.shared, part.number)
                    && part.owners > 1
                {
                    self.gathering.add(number..number + len, tier);
                }
                self.block = FileBlock(part.extent.file_block.0 + done);
            }
        }
    }

    /// Plans the moves of shared blocks to the tiers on which they are wanted. False: the next step
    /// continues.
    fn shared(&mut self, wishes: &Wishes, files: &dyn PinnedFiles, plan: &mut Plan<'_>) -> bool {
        while let Some((to, number)) = self.number {
            let Some(wanted) = wishes.from(to, number).first() else {
                self.number = match to {
                    Tier::Nvm => Some((Tier::Ssd, 0)),
                    Tier::Ssd => Some((Tier::Hdd, 0)),
                    Tier::Hdd => return true,
                };
                continue;
            };
            let numbers = number.max(wanted.start)..wanted.end;
            let parts = files.shared(numbers.clone(), EXTENTS);
            let end = parts.last().filter(|_| parts.len() >= EXTENTS);
            let end = end.map_or(numbers.end, |part| part.number + u64::from(part.len));
            for part in &parts {
                if plan.looks == 0 || plan.left == 0 {
                    return false;
                }
                plan.looks -= 1;
                let run = Run {
                    at: At::Shared(part.number),
                    len: part.len.into(),
                    tier: part.tier,
                    block: part.block,
                };
                // A file's own, by now, is placed by its pin or the policy.
                let done = match part.owners > 1 && part.tier != to {
                    true => plan.add(&run, to, &self.bad),
                    false => run.len,
                };
                self.number = Some((to, part.number + done));
                if done < run.len {
                    return false;
                }
            }
            self.number = Some((to, end));
            if plan.looks == 0 {
                return false;
            }
            plan.looks -= 1;
        }
        true
    }
}

#[cfg(test)]
mod tests;
