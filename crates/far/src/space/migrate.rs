//! Temperature and migration, once a second (RapidSwap, section 4.1.1).
//!
//! Unlike the seed, a slab is copied and compared before its old place is freed, so no crash of a copy loses
//! it.

use super::slab::{Health, Left};
use super::{Pinned, Space, State, T_FIRST_S};
use crate::backend::{BackendError, SLAB_BYTES, Slot};
use crate::page::{PAGE_BYTES, Page};
use crate::reuse;
use crate::temperature::Temperature;
use parking_lot::MutexGuard;
use std::collections::HashSet;
use zerocopy::IntoBytes;

/// Most slabs that move at one look: 8 MiB.
pub const MOVES_MAX: usize = 8;
/// Most slabs that leave one tier at one look because their space is wanted.
const YIELDS_MAX: usize = 64;

/// Most slabs that leave a tier above its bound at one look: 64 MiB.
pub const MOVES_OVER_MAX: usize = 64;

/// Seconds between two tries to rescue what is in a slab that failed.
const RESCUE_EVERY_S: u64 = 60;
/// Pages that cannot be read before a rescue is given up: each may take a device seconds.
const UNREADABLE_MAX: usize = 8;

/// One slab that is to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Move {
    slab: u32,
    to: usize,
    /// It failed: what cannot be read is left behind.
    is_rescue: bool,
}

/// Why a slab did not move.
#[derive(Debug)]
enum Stuck {
    /// It is in use, or is not there any more.
    Busy,
    /// No place for it.
    NoRoom,
    /// Its own place cannot be read.
    Source(BackendError),
    /// The new place failed, or shows other bytes.
    Target(Option<BackendError>),
}

impl Space {
    /// Looks at all slabs, at second `now_s` of any clock that does not go back, and moves those that are hot
    /// or cold. Gives the number of slabs that moved. Faults go on meanwhile.
    pub fn tick(&self, now_s: u64) -> usize {
        let mut moved = self.make_way(now_s);
        self.rescue(now_s);
        let (hot, cold) = self.look(now_s);
        moved += self.shed(now_s);
        for number in hot {
            if moved >= MOVES_MAX {
                return moved;
            }
            moved += self.promote(number, now_s);
        }
        for number in cold {
            if moved >= MOVES_MAX {
                break;
            }
            moved += usize::from(self.demote(number, now_s));
        }
        moved
    }

    /// Moves slabs away whose space a backend wants back: down, else up. Those that could not move come after
    /// all others the next time. Gives the number of moves.
    pub fn make_way(&self, now_s: u64) -> usize {
        let mut turns: Vec<(u64, u32)> = {
            let mut state = self.state.lock();
            self.hear(&mut state);
            if state.wanted.iter().all(Vec::is_empty) {
                return 0;
            }
            let slabs = state.slabs.iter().enumerate();
            let wanted = slabs.filter_map(|(number, slab)| {
                let slab = slab.as_ref().filter(|slab| slab.is_wanted && slab.can_move())?;
                Some((slab.tried, number as u32))
            });
            wanted.collect()
        };
        turns.sort_unstable();
        let mut moved = 0;
        let mut full = HashSet::new();
        for (_, number) in turns {
            if moved >= YIELDS_MAX {
                break;
            }
            if self.give_way(number, now_s, &mut full) {
                moved += 1;
                continue;
            }
            let mut state = self.state.lock();
            state.tries += 1;
            let tries = state.tries;
            if let Some(slab) = state.slabs[number as usize].as_mut() {
                slab.tried = tries;
            }
        }
        moved
    }

    /// Moves one slab whose space is wanted. `full` are the tiers that had no room.
    fn give_way(&self, number: u32, now_s: u64, full: &mut HashSet<usize>) -> bool {
        let Some((_, from)) = self.range(number) else {
            return false;
        };
        for to in (from + 1..self.tiers.len()).chain((0..from).rev()) {
            let tier = &self.tiers[to];
            if tier.is_compressed || full.contains(&to) || !self.has_room(to) {
                continue;
            }
            let wanted = Move {
                slab: number,
                to,
                is_rescue: false,
            };
            match self.relocate(wanted, now_s) {
                Ok(()) => return true,
                Err(Stuck::NoRoom) => {
                    full.insert(to);
                }
                Err(Stuck::Target(_)) => {}
                Err(Stuck::Busy | Stuck::Source(_)) => return false,
            }
        }
        false
    }

    /// Slabs whose space is wanted back and that could not move: there is no room for them in far memory.
    #[must_use]
    pub fn stuck(&self) -> HashSet<u32> {
        let state = self.state.lock();
        let slabs = state.slabs.iter().enumerate();
        let stuck = slabs.filter(|(_, slab)| {
            slab.as_ref()
                .is_some_and(|slab| slab.is_wanted && slab.tried > 0 && slab.health == Health::Sound)
        });
        stuck.map(|(number, _)| number as u32).collect()
    }

    /// Moves what can be read of a slab that failed to a sound place, one slab at a time. What cannot be read
    /// is found out by its hash.
    fn rescue(&self, now_s: u64) {
        let number = {
            let mut state = self.state.lock();
            let mut slabs = state.slabs.iter_mut().enumerate();
            slabs.find_map(|(number, slab)| {
                let due = |slab: &&mut super::Slab| {
                    slab.health == Health::Failed && slab.rescue_at_s <= now_s && slab.is_idle()
                };
                let slab = slab.as_mut().filter(due)?;
                slab.rescue_at_s = now_s + RESCUE_EVERY_S;
                Some((number as u32, slab.tier, slab.class.is_compressed()))
            })
        };
        let Some((number, from, is_compressed)) = number else {
            return;
        };
        let others = (from + 1..self.tiers.len()).chain((0..from).rev());
        for to in std::iter::once(from).chain(others) {
            let tier = &self.tiers[to];
            // In its own tier it takes no more room than before.
            let fits = to == from || (self.has_room(to) && (is_compressed || !tier.is_compressed));
            if !fits {
                continue;
            }
            let wanted = Move {
                slab: number,
                to,
                is_rescue: true,
            };
            match self.relocate(wanted, now_s) {
                Err(Stuck::NoRoom | Stuck::Target(_)) => {}
                Ok(()) | Err(Stuck::Busy | Stuck::Source(_)) => return,
            }
        }
    }

    /// Classifies all slabs. Gives hot ones that are not at the top, and cold ones that are not at the
    /// bottom.
    fn look(&self, now_s: u64) -> (Vec<u32>, Vec<u32>) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.now_s = now_s;
        let (mut hot, mut cold) = (Vec::new(), Vec::new());
        let bottom = self.tiers.len().saturating_sub(1);
        let slabs: u64 = state.used.iter().map(|used| u64::from(*used)).sum();
        for (number, slab) in state.slabs.iter_mut().enumerate() {
            let Some(slab) = slab.as_mut().filter(|slab| slab.can_move()) else {
                continue;
            };
            let rest = &mut state.rest[usize::from(slab.class.is_compressed())];
            if self.t_s == 0 && reuse::is_sampled(number as u32, slabs) {
                slab.history.tell(now_s, &mut rest.reuse);
            }
            let cold_s = if self.t_s == 0 { rest.cold_s } else { 2 * self.t_s };
            match slab.history.look(now_s, cold_s) {
                Temperature::Hot if slab.tier > self.top(slab.class.is_compressed()) => {
                    hot.push(number as u32)
                }
                Temperature::Cold if slab.tier < bottom => {
                    cold.push((slab.history.idle_s(now_s), number as u32))
                }
                _ => {}
            }
        }
        if self.t_s == 0 {
            self.choose_rest(state, slabs);
        }
        cold.sort_unstable_by(|a, b| b.cmp(a));
        (hot, cold.into_iter().map(|(_, number)| number).collect())
    }

    /// Now and then finds how long slabs may rest, from the reuse times of those that are sampled.
    fn choose_rest(&self, state: &mut State, slabs: u64) {
        for (is_compressed, rest) in [false, true].into_iter().zip(&mut state.rest) {
            rest.reuse.end_look(slabs);
            let top = self.top(is_compressed);
            if !state.now_s.is_multiple_of(reuse::CHOOSE_S) || top + 1 >= self.tiers.len() {
                continue;
            }
            if let Some(cold_s) = rest.reuse.choose(self.tiers[top].limit_slabs()) {
                // A shorter time gains no hit: a hot slab makes room for itself.
                rest.cold_s = cold_s.max(2 * T_FIRST_S);
            }
        }
    }

    /// Moves slabs out of tiers that are above their bound, those that were idle longest first. Gives their
    /// number.
    fn shed(&self, now_s: u64) -> usize {
        let mut moved = 0;
        for tier in 0..self.tiers.len() {
            let over = {
                let state = self.state.lock();
                state.used[tier].saturating_sub(self.tiers[tier].limit_slabs()) as usize
            };
            if over == 0 {
                continue;
            }
            let most = over.min(MOVES_OVER_MAX);
            let mut idle: Vec<(u64, u32)> = {
                let state = self.state.lock();
                let here = state.slabs.iter().enumerate().filter_map(|(number, slab)| {
                    let slab = slab
                        .as_ref()
                        .filter(|slab| slab.tier == tier && slab.takes_objects())?;
                    Some((slab.history.idle_s(now_s), number as u32))
                });
                here.collect()
            };
            idle.sort_unstable_by(|a, b| b.cmp(a));
            let leaving = idle.into_iter().take(most);
            moved += leaving.filter(|(_, number)| self.demote(*number, now_s)).count();
        }
        moved
    }

    /// The fastest tier that holds such slabs.
    fn top(&self, is_compressed: bool) -> usize {
        let dram = self.tiers.first().is_some_and(|tier| tier.is_compressed);
        usize::from(dram && !is_compressed)
    }

    /// Moves a hot slab up, to the fastest tier with room. Where none has any, the slab of the top tier that
    /// was idle longest makes room first. Gives the number of moves.
    fn promote(&self, number: u32, now_s: u64) -> usize {
        let Some((top, from)) = self.range(number) else {
            return 0;
        };
        if let Some(to) = (top..from).find(|tier| self.has_room(*tier)) {
            return usize::from(self.moves(number, to, now_s));
        }
        let Some(victim) = self.idlest(top, now_s) else {
            return 0;
        };
        if !self.demote(victim, now_s) {
            return 0;
        }
        1 + usize::from(self.moves(number, top, now_s))
    }

    fn moves(&self, slab: u32, to: usize, now_s: u64) -> bool {
        let wanted = Move {
            slab,
            to,
            is_rescue: false,
        };
        self.relocate(wanted, now_s).is_ok()
    }

    fn range(&self, number: u32) -> Option<(usize, usize)> {
        let state = self.state.lock();
        let slab = state.slabs.get(number as usize)?.as_ref()?;
        Some((self.top(slab.class.is_compressed()), slab.tier))
    }

    /// The slab of a tier that was idle longest, unless it is hot.
    fn idlest(&self, tier: usize, now_s: u64) -> Option<u32> {
        let state = self.state.lock();
        let idle = state.slabs.iter().enumerate().filter_map(|(number, slab)| {
            let slab = slab.as_ref()?;
            let fits =
                slab.tier == tier && slab.takes_objects() && slab.history.temperature() != Temperature::Hot;
            fits.then(|| (slab.history.idle_s(now_s), number as u32))
        });
        idle.max().map(|(_, number)| number)
    }

    /// Moves a slab one tier down, or to the next one below that has room.
    fn demote(&self, number: u32, now_s: u64) -> bool {
        let Some((_, from)) = self.range(number) else {
            return false;
        };
        let target = (from + 1..self.tiers.len()).find(|tier| self.has_room(*tier));
        target.is_some_and(|to| self.moves(number, to, now_s))
    }

    /// Whether a slab may move to a tier. A device that wants slabs back gets none.
    fn has_room(&self, tier: usize) -> bool {
        let state = self.state.lock();
        let is_below = state.used[tier] < self.tiers[tier].limit_slabs();
        is_below && state.wanted[tier].is_empty() && !self.tiers[tier].backend.is_away()
    }

    /// Allocates, copies, verifies, switches, frees. The slab is where it was if any of it did not work.
    fn relocate(&self, wanted: Move, now_s: u64) -> Result<(), Stuck> {
        let moved = self.try_relocate(wanted, now_s);
        if moved.is_err() {
            self.state.lock().stats.failed_moves += 1;
        }
        moved
    }

    fn try_relocate(&self, wanted: Move, now_s: u64) -> Result<(), Stuck> {
        let mut state = self.state.lock();
        let (old, new) = self.begin(&mut state, wanted)?;
        drop(state);
        let copied = self.copy(&old, wanted, new);
        let mut state = self.state.lock();
        let slab = state.slabs[wanted.slab as usize].as_mut();
        if let Some(slab) = slab {
            slab.is_moving = false;
        }
        match &copied {
            Ok(()) => {
                self.switch(&mut state, wanted, new);
                if wanted.to < old.tier {
                    state.stats.promoted += 1;
                } else {
                    state.stats.demoted += 1;
                }
                if let Some(slab) = state.slabs[wanted.slab as usize].as_mut() {
                    slab.history.moved(now_s);
                }
            }
            Err(stuck) => {
                state.used[wanted.to] -= 1;
                match stuck {
                    Stuck::Target(None | Some(BackendError::Io(_))) => {
                        self.tiers[wanted.to].backend.retire(new)
                    }
                    _ => self.tiers[wanted.to].backend.dealloc(new),
                }
                if let (Stuck::Source(error), false) = (stuck, wanted.is_rescue) {
                    self.blame(&mut state, wanted.slab, &old, error.again());
                }
            }
        }
        self.unpin(&mut state, wanted.slab);
        copied
    }

    /// Marks the slab as moving, pins it and allocates its new place, without the lock.
    fn begin(&self, state: &mut MutexGuard<'_, State>, wanted: Move) -> Result<(Pinned, Slot), Stuck> {
        let slab = state.slabs.get_mut(wanted.slab as usize).and_then(Option::as_mut);
        let may = |slab: &&mut super::Slab| match wanted.is_rescue {
            true => slab.health == Health::Failed && slab.is_idle(),
            false => slab.can_move() && slab.is_idle(),
        };
        let slab = slab.filter(may).ok_or(Stuck::Busy)?;
        slab.is_moving = true;
        let old = slab.pin();
        state.used[wanted.to] += 1;
        let new = MutexGuard::unlocked(state, || self.tiers[wanted.to].backend.alloc());
        match new {
            Ok(new) => Ok((old, new)),
            Err(error) => {
                state.used[wanted.to] -= 1;
                if let Some(slab) = state.slabs[wanted.slab as usize].as_mut() {
                    slab.is_moving = false;
                }
                self.unpin(state, wanted.slab);
                Err(match error {
                    BackendError::Full | BackendError::Away(_) => Stuck::NoRoom,
                    error => Stuck::Target(Some(error)),
                })
            }
        }
    }

    /// Copies a slab and reads the copy back.
    fn copy(&self, old: &Pinned, wanted: Move, new: Slot) -> Result<(), Stuck> {
        let pages = SLAB_BYTES / PAGE_BYTES;
        let (mut bytes, mut back) = (Page::zeroed(pages), Page::zeroed(pages));
        let source = &self.tiers[old.tier].backend;
        if let Err(error) = source.read(old.slot, 0, bytes.as_mut_bytes()) {
            if !wanted.is_rescue || !matches!(error, BackendError::Io(_)) {
                return Err(Stuck::Source(error));
            }
            self.read_what_can_be(old, &mut bytes)?;
        }
        let target = &self.tiers[wanted.to].backend;
        let written = target
            .write(new, 0, bytes.as_bytes())
            .and_then(|()| target.read(new, 0, back.as_mut_bytes()));
        match written {
            Ok(()) if bytes.as_bytes() == back.as_bytes() => Ok(()),
            Ok(()) => Err(Stuck::Target(None)),
            Err(error) => Err(Stuck::Target(Some(error))),
        }
    }

    /// Reads a slab page by page. Those that cannot be read are zeros, which no object is that has a hash.
    fn read_what_can_be(&self, old: &Pinned, bytes: &mut [Page]) -> Result<(), Stuck> {
        let source = &self.tiers[old.tier].backend;
        let mut unreadable = 0;
        for (at, page) in bytes.iter_mut().enumerate() {
            let Err(error) = source.read(old.slot, at * PAGE_BYTES, page.as_mut_bytes()) else {
                continue;
            };
            unreadable += 1;
            if unreadable > UNREADABLE_MAX || !matches!(error, BackendError::Io(_)) {
                return Err(Stuck::Source(error));
            }
            *page = Page::default();
        }
        Ok(())
    }

    fn switch(&self, state: &mut State, wanted: Move, new: Slot) {
        let is_wanted = state.wanted[wanted.to].binary_search(&new).is_ok();
        let Some(slab) = state.slabs[wanted.slab as usize].as_mut() else {
            return;
        };
        // The new place was counted when it was allocated.
        state.used[slab.tier] -= 1;
        // Freed by the last unpin: readers may still be there.
        slab.left.push(Left {
            tier: slab.tier,
            slot: slab.slot,
            has_failed: slab.health == Health::Failed,
        });
        let key = (slab.tier, slab.class);
        (slab.tier, slab.slot) = (wanted.to, new);
        slab.health = Health::Sound;
        slab.is_wanted = is_wanted;
        slab.tried = 0;
        slab.rescue_at_s = 0;
        let takes = self.tiers[wanted.to].is_compressed == slab.class.is_compressed() && slab.takes_objects();
        slab.is_listed = takes;
        let class = slab.class;
        if let Some(open) = state.open.get_mut(&key) {
            open.retain(|other| *other != wanted.slab);
        }
        if takes {
            state
                .open
                .entry((wanted.to, class))
                .or_default()
                .push(wanted.slab);
        }
    }
}
