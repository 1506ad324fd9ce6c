//! Temperature and migration, once a second (RapidSwap, section 4.1.1).
//!
//! Unlike the seed, a slab is copied and compared before its old place is freed, so no crash of a copy loses
//! it.

use super::{Space, State, T_FIRST_S};
use crate::backend::{SLAB_BYTES, Slot};
use crate::page::Page;
use crate::reuse;
use crate::temperature::Temperature;
use zerocopy::IntoBytes;

/// Most slabs that move at one look: 8 MiB.
pub const MOVES_MAX: usize = 8;

/// Most slabs that leave a tier above its bound at one look: 64 MiB.
pub const MOVES_OVER_MAX: usize = 64;

/// One slab that is to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Move {
    slab: u32,
    to: usize,
}

impl Space {
    /// Looks at all slabs, at second `now_s` of any clock that does not go back, and moves those that are hot
    /// or cold. Gives the number of slabs that moved. Faults go on meanwhile.
    pub fn tick(&self, now_s: u64) -> usize {
        let (hot, cold) = self.look(now_s);
        let mut moved = self.shed(now_s);
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
            let Some(slab) = slab else { continue };
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
            return usize::from(self.relocate(Move { slab: number, to }, now_s));
        }
        let Some(victim) = self.idlest(top, now_s) else {
            return 0;
        };
        if !self.demote(victim, now_s) {
            return 0;
        }
        1 + usize::from(self.relocate(
            Move {
                slab: number,
                to: top,
            },
            now_s,
        ))
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
        target.is_some_and(|to| self.relocate(Move { slab: number, to }, now_s))
    }

    fn has_room(&self, tier: usize) -> bool {
        self.state.lock().used[tier] < self.tiers[tier].limit_slabs()
    }

    /// Allocates, copies, verifies, switches, frees. False where any of it did not work; the slab is where it
    /// was then.
    fn relocate(&self, wanted: Move, now_s: u64) -> bool {
        let Some((from, old, new)) = self.begin(wanted) else {
            self.state.lock().stats.failed_moves += 1;
            return false;
        };
        let copied = self.copy(from, old, wanted.to, new);
        let mut state = self.state.lock();
        let moved = self.switch(&mut state, wanted, new, copied);
        if moved {
            if wanted.to < from {
                state.stats.promoted += 1;
            } else {
                state.stats.demoted += 1;
            }
            if let Some(slab) = state.slabs[wanted.slab as usize].as_mut() {
                slab.history.moved(now_s);
            }
        } else {
            state.stats.failed_moves += 1;
            self.tiers[wanted.to].backend.dealloc(new);
        }
        self.unpin(&mut state, wanted.slab);
        moved
    }

    /// Marks the slab as moving, pins it and allocates its new place.
    fn begin(&self, wanted: Move) -> Option<(usize, Slot, Slot)> {
        let mut state = self.state.lock();
        let slab = state.slabs.get_mut(wanted.slab as usize)?.as_mut()?;
        // With pins, a page may be on its way into it.
        if !slab.takes_objects() || slab.pins > 0 || slab.left.is_some() || slab.used == 0 {
            return None;
        }
        let new = self.tiers[wanted.to].backend.alloc().ok()?;
        slab.is_moving = true;
        slab.pins += 1;
        Some((slab.tier, slab.slot, new))
    }

    /// Copies a slab and reads the copy back.
    fn copy(&self, from: usize, old: Slot, to: usize, new: Slot) -> bool {
        let pages = SLAB_BYTES / crate::page::PAGE_BYTES;
        let (mut bytes, mut back) = (Page::zeroed(pages), Page::zeroed(pages));
        let (source, target) = (&self.tiers[from].backend, &self.tiers[to].backend);
        source.read(old, 0, bytes.as_mut_bytes()).is_ok()
            && target.write(new, 0, bytes.as_bytes()).is_ok()
            && target.read(new, 0, back.as_mut_bytes()).is_ok()
            && bytes.as_bytes() == back.as_bytes()
    }

    fn switch(&self, state: &mut State, wanted: Move, new: Slot, copied: bool) -> bool {
        let Some(slab) = state.slabs[wanted.slab as usize].as_mut() else {
            return false;
        };
        slab.is_moving = false;
        if !copied {
            return false;
        }
        state.used[slab.tier] -= 1;
        state.used[wanted.to] += 1;
        // Freed by the last unpin: readers may still be there.
        slab.left = Some((slab.tier, slab.slot));
        slab.is_listed = false;
        let key = (slab.tier, slab.class);
        (slab.tier, slab.slot) = (wanted.to, new);
        let takes = self.tiers[wanted.to].is_compressed == slab.class.is_compressed();
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
        true
    }
}
