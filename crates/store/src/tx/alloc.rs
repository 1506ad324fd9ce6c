//! Allocates and frees blocks in a transaction. `space` keeps the free blocks.

use super::TxState;
use super::state::{Diff, Dirty};
use crate::seeded::{Bug, armed};
use crate::space::{NextUnit, Span};
use crate::{DataTarget, Result, StoreError};
use std::sync::Arc;
use varve_format::{BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, Tier};

impl TxState<'_> {
    /// Allocates NVM for metadata; may move the journal's tail to release some.
    pub(crate) fn alloc_meta(&mut self, want: u64, near: Option<u64>) -> Result<Span> {
        let reserve = !self.frugal;
        let mut span = self.store.space.lock().alloc_nvm(want, false, reserve, near);
        if span.is_none() && self.store.space.lock().waits_for_tail() {
            self.store.checkpoint_with(&mut self.writer)?;
            span = self.store.space.lock().alloc_nvm(want, false, reserve, near);
        }
        let span = span.ok_or(StoreError::NoSpace { blocks: want })?;
        self.spans.push(span);
        self.set_bits(span, true)?;
        Ok(span)
    }

    /// Allocates at most `want` zeroed blocks without header, in one run.
    pub(crate) fn alloc_raw(&mut self, want: u64) -> Result<Span> {
        let span = self.alloc_meta(want, None)?;
        for block in span.start..span.start + span.len {
            self.insert_fresh(block, Arc::new([0; BLOCK_SIZE]), true);
        }
        Ok(span)
    }

    pub(crate) fn insert_fresh(&mut self, block: u64, content: Arc<Block>, raw: bool) {
        self.dirty.insert(
            block,
            Dirty {
                content,
                base: None,
                raw,
                whole: false,
                diff: Some(Diff::default()),
            },
        );
    }

    /// Allocates at most `want` blocks for data, in one run, on a tier that the target allows.
    pub(crate) fn alloc_data(&mut self, target: DataTarget, want: u64) -> Result<Span> {
        let target = DataTarget {
            reserve: target.reserve || self.use_reserve,
            ..target
        };
        let later = Tier::ALL.into_iter().filter(|tier| *tier > target.tier);
        let earlier = Tier::ALL.into_iter().rev().filter(|tier| *tier < target.tier);
        let mut order: Vec<Tier> = std::iter::once(target.tier).chain(later).chain(earlier).collect();
        if !target.only {
            let space = self.store.space.lock();
            order.sort_by_key(|tier| space.is_avoided(*tier));
        }
        let order = if target.only { &order[..1] } else { &order[..] };
        // First without moving the tail; then, if freed blocks wait for that, after moving it.
        for again in [false, true] {
            if again {
                if !self.store.space.lock().waits_for_tail() {
                    break;
                }
                self.store.checkpoint_with(&mut self.writer)?;
            }
            for last_resort in [false, true] {
                if last_resort && (target.only || !self.store.space.lock().has_last_resort()) {
                    break;
                }
                for tier in order {
                    if let Some(span) = self.alloc_on(*tier, last_resort, target.reserve, want)? {
                        self.spans.push(span);
                        self.set_bits(span, true)?;
                        return Ok(span);
                    }
                }
            }
        }
        Err(StoreError::NoSpace { blocks: want })
    }

    /// Allocates a block for metadata on a slower tier, the faster one first; `None` if there is none. A tier
    /// that is evacuated comes last, and not at all for metadata that is moved ahead of need.
    pub(crate) fn alloc_cold(&mut self) -> Result<Option<Span>> {
        let mut order = vec![Tier::Ssd, Tier::Hdd];
        {
            let space = self.store.space.lock();
            order.retain(|tier| !self.moves.ahead || !space.is_avoided(*tier));
            order.sort_by_key(|tier| space.is_avoided(*tier));
        }
        for last_resort in [false, true] {
            if last_resort && (self.moves.ahead || !self.store.space.lock().has_last_resort()) {
                break;
            }
            for tier in &order {
                if let Some(span) = self.alloc_on(*tier, last_resort, false, 1)? {
                    self.spans.push(span);
                    self.set_bits(span, true)?;
                    return Ok(Some(span));
                }
            }
        }
        Ok(None)
    }

    /// Allocates at most `want` blocks on a tier, in one run. With `last_resort` on a device that is emptied,
    /// else on one that is not.
    fn alloc_on(&mut self, tier: Tier, last_resort: bool, reserve: bool, want: u64) -> Result<Option<Span>> {
        if self.layout().blocks(tier) == 0 {
            return Ok(None);
        }
        if tier == Tier::Nvm {
            let allowed = !last_resort;
            let span = allowed.then(|| self.store.space.lock().alloc_nvm(want, true, reserve, None));
            return Ok(span.flatten());
        }
        let lanes = self.store.space.lock().lanes(tier, last_resort);
        for lane in lanes {
            if let Some(span) = self.alloc_on_device(tier, lane, reserve, want)? {
                return Ok(Some(span));
            }
        }
        Ok(None)
    }

    fn alloc_on_device(&mut self, tier: Tier, lane: usize, reserve: bool, want: u64) -> Result<Option<Span>> {
        for _ in 0..2 {
            if let Some(span) = self.store.space.lock().alloc_unit(tier, lane, want) {
                return Ok(Some(span));
            }
            let next = self.store.space.lock().next_unit(tier, lane, reserve);
            let Some(next) = next else {
                return Ok(None);
            };
            if let NextUnit::Holes(_) = next
                && self.room() < self.layout().reopening_bytes(tier) + crate::OP_ROOM
            {
                // The checksums of the unit would not fit in this record.
                return Ok(None);
            }
            self.seal_open_unit(tier, lane)?;
            self.open_unit(tier, lane, next)?;
        }
        Ok(None)
    }

    /// Sets or clears bits, which must all have the opposite value.
    pub(super) fn set_bits(&mut self, span: Span, value: bool) -> Result<()> {
        let layout = self.layout();
        let mut at = span.start;
        let end = span.start + span.len;
        while at < end {
            let (block, first) = layout.bit(span.tier, at);
            let count = (varve_format::space::BITS_PER_BLOCK - first).min(end - at);
            let bytes = self.dirty_mut(block, false)?.bytes();
            for bit in first..first + count {
                let byte = &mut bytes[BLOCK_HEADER_SIZE + (bit / 8) as usize];
                let mask = 1 << (bit % 8);
                if (*byte & mask != 0) == value {
                    self.poisoned = true;
                    return Err(StoreError::Damaged(format!(
                        "{} block {} is {} twice",
                        span.tier.name(),
                        at + bit - first,
                        if value { "allocated" } else { "freed" }
                    )));
                }
                *byte ^= mask;
            }
            at += count;
        }
        Ok(())
    }

    /// Returns whether the block was in use before this transaction.
    pub(super) fn was_used(&self, tier: Tier, block: u64) -> Result<bool> {
        let (at, bit) = self.layout().bit(tier, block);
        let test = |bytes: &Block| bytes[BLOCK_HEADER_SIZE + (bit / 8) as usize] >> (bit % 8) & 1 == 1;
        match self.dirty.get(&at.0).map(|dirty| &dirty.base) {
            Some(Some(base)) => Ok(test(base)),
            _ => self.store.cache.load(at, false).map(|base| test(&base)),
        }
    }

    /// Frees blocks of data or metadata.
    pub(crate) fn free_span(&mut self, span: Span, data: bool) -> Result<()> {
        let layout = self.layout();
        let last = span.start.saturating_add(span.len.saturating_sub(1));
        if span.len == 0 || !layout.usable(span.tier, span.start) || !layout.usable(span.tier, last) {
            return Err(StoreError::Damaged(format!(
                "{} blocks {}+{} are to be freed but cannot have been allocated",
                span.tier.name(),
                span.start,
                span.len
            )));
        }
        self.set_bits(span, false)?;
        self.in_place.forget(span);
        let mut at = span.start;
        while at <= last {
            let old = self.was_used(span.tier, at)?;
            let mut end = at + 1;
            while end <= last && self.was_used(span.tier, end)? == old {
                end += 1;
            }
            let part = Span {
                start: at,
                len: end - at,
                ..span
            };
            if old {
                if armed(Bug::FreeBeforeCommit) {
                    self.store.space.lock().give_back(part);
                }
                self.freed.push((part, data));
            } else {
                self.ephemeral.push(part);
            }
            at = end;
        }
        Ok(())
    }
}
