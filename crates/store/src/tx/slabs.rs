//! Grants, passes on and frees slabs in a transaction. A row and its blocks' bits change in one record; a slab is
//! zeros before the record that grants it. It is served from the end of the commit on, before the lock of the writer
//! is let go: who frees it next finds it served.
//!
//! On SSD and HDD a unit is all for slabs or has none: it is taken from the files with its first slab, all bits
//! set, and given back with its last. So its free places are no free blocks, and nothing else is written there.

use super::TxState;
use crate::pool::Store;
use crate::seeded::{Bug, armed};
use crate::space::Span;
use crate::{Result, StoreError, Tx};
use std::sync::Arc;
use varve_format::features::Incompat;
use varve_format::session::{GRANT_ROW_SIZE, SlabRow};
use varve_format::space::UnitRow;
use varve_format::{BLOCK_SIZE, LeaseNo, SessionId, Tier};
use zerocopy::IntoBytes;

/// Blocks of zeros that are written at once.
const ZEROS: u64 = 256;

impl Tx<'_> {
    /// See [`Store::grant_slab`].
    pub(crate) fn slab_grant(
        &mut self,
        session: SessionId,
        tier: Tier,
        blocks: u32,
        most: u64,
    ) -> Result<SlabRow> {
        if self.core.writer.sessions.slot(&session).is_none() {
            return Err(StoreError::NoSession(session));
        }
        if self.core.writer.slabs.len() >= self.core.store.slabs_max() {
            return Err(StoreError::TableFull("slab"));
        }
        let lease = self.next_lease_nos(1)?;
        self.guard(|core| core.grant_slab(session, lease, tier, blocks, most))
    }

    /// Frees a slab of a session.
    pub(crate) fn slab_free(&mut self, session: SessionId, lease: LeaseNo) -> Result<()> {
        self.own_slab(session, lease)?;
        self.guard(|core| core.free_slab(lease))
    }

    /// Gives a slab to another session.
    pub(crate) fn slab_pass(&mut self, from: SessionId, to: SessionId, lease: LeaseNo) -> Result<()> {
        let row = self.own_slab(from, lease)?;
        if self.core.writer.sessions.slot(&to).is_none() {
            return Err(StoreError::NoSession(to));
        }
        let new = SlabRow { session: to, ..row };
        self.guard(|core| {
            core.close_slab(lease);
            core.writer.slabs.insert(new);
            core.undo.push(Box::new(move |writer| writer.slabs.insert(row)));
            core.slabs_to_serve.push(new);
            core.put_slab_row(&new)
        })
    }

    /// The slabs of a session, as this transaction leaves them.
    pub(crate) fn slabs_of(&self, session: SessionId) -> Vec<SlabRow> {
        let rows = self.core.writer.slabs.rows();
        rows.filter(|row| row.session == session).copied().collect()
    }

    /// Takes rows out that contradict the pool, as many as fit.
    pub(crate) fn slab_drop_unsound(&mut self) -> Result<()> {
        for (at, lease) in self.core.writer.slabs.unsound().into_iter().enumerate() {
            if at > 0 && self.room() < crate::OP_ROOM {
                return Ok(());
            }
            self.guard(|core| {
                if let Some(session) = core.writer.slabs.forget_unsound(lease) {
                    core.undo
                        .push(Box::new(move |writer| writer.slabs.note_unsound(lease, session)));
                }
                core.clear_slab_row(lease)
            })?;
        }
        Ok(())
    }

    fn own_slab(&self, session: SessionId, lease: LeaseNo) -> Result<SlabRow> {
        let row = self.core.writer.slabs.get(lease);
        row.filter(|row| row.session == session)
            .ok_or(StoreError::NoGrant(lease))
    }

    /// Frees what is left of a session's slabs.
    pub(super) fn free_left_slabs(&mut self, session: SessionId) -> Result<()> {
        self.slab_drop_unsound()?;
        for row in self.slabs_of(session) {
            self.guard(|core| core.free_slab(row.lease))?;
        }
        Ok(())
    }
}

impl TxState<'_> {
    fn grant_slab(
        &mut self,
        session: SessionId,
        lease: LeaseNo,
        tier: Tier,
        blocks: u32,
        most: u64,
    ) -> Result<SlabRow> {
        let has = self.layout().features().incompat.get() & Incompat::SLABS.bits();
        if has == 0 || blocks == 0 {
            return Err(StoreError::Invalid("the pool has no slabs"));
        }
        let found = match tier {
            Tier::Nvm => self.slab_on_nvm(blocks.into(), most)?,
            tier => self.slab_in_unit(tier, blocks.into(), most)?,
        };
        let block = found.ok_or(StoreError::NoSpace {
            blocks: blocks.into(),
        })?;
        let row = SlabRow {
            session,
            lease,
            tier,
            block,
            blocks,
        };
        self.zero(tier, block, blocks.into())?;
        self.writer.slabs.insert(row);
        self.undo.push(Box::new(move |writer| {
            writer.slabs.remove(lease);
        }));
        self.slabs_to_serve.push(row);
        if armed(Bug::SlabRowLate) {
            return Ok(row);
        }
        self.put_slab_row(&row)?;
        Ok(row)
    }

    /// Writes zeros to blocks that nobody has yet.
    fn zero(&mut self, tier: Tier, first: u64, blocks: u64) -> Result<()> {
        if armed(Bug::SlabNotZeroed) {
            return Ok(());
        }
        let zeros = vec![0; blocks.min(ZEROS) as usize * BLOCK_SIZE];
        let mut done = 0;
        while done < blocks {
            let some = (blocks - done).min(ZEROS);
            self.put_blocks(tier, first + done, &zeros[..some as usize * BLOCK_SIZE])?;
            done += some;
        }
        Ok(())
    }

    fn taken(&self, tier: Tier) -> u64 {
        let rows = self.writer.slabs.within(tier, 0..u64::MAX);
        match self.layout().unit_blocks(tier) {
            0 => rows.map(|row| u64::from(row.blocks)).sum(),
            unit => {
                let units: std::collections::BTreeSet<_> = rows.map(|row| row.block / unit).collect();
                units.len() as u64 * self.layout().unit_data_blocks(tier)
            }
        }
    }

    fn slab_on_nvm(&mut self, blocks: u64, most: u64) -> Result<Option<u64>> {
        if self.taken(Tier::Nvm) + blocks > most {
            return Ok(None);
        }
        let Some(span) = self.store.space.lock().alloc_slab(blocks) else {
            return Ok(None);
        };
        self.spans.push(span);
        self.set_bits(span, true)?;
        let marks: Vec<_> = (span.start..span.start + blocks)
            .map(|block| self.store.slab_mark(block))
            .collect();
        self.set_checksums(Tier::Nvm, 0, span.start, &marks)?;
        Ok(Some(span.start))
    }

    /// Finds a place in a unit of slabs, or takes a unit from the files.
    fn slab_in_unit(&mut self, tier: Tier, blocks: u64, most: u64) -> Result<Option<u64>> {
        let (unit_blocks, data) = match self.layout().unit_blocks(tier) {
            0 => return Ok(None),
            unit => (unit, self.layout().unit_data_blocks(tier)),
        };
        if blocks > data {
            return Ok(None);
        }
        if let Some(block) = self.place_beside(tier, unit_blocks, data, blocks) {
            return Ok(Some(block));
        }
        if self.taken(tier) + data > most {
            return Ok(None);
        }
        let Some(span) = self.store.space.lock().alloc_slab_unit(tier) else {
            return Ok(None);
        };
        self.spans.push(span);
        self.set_bits(span, true)?;
        self.put_unit_state(tier, span.start / unit_blocks, UnitRow::SLABS)?;
        Ok(Some(span.start))
    }

    fn place_beside(&self, tier: Tier, unit_blocks: u64, data: u64, blocks: u64) -> Option<u64> {
        let slabs = &self.writer.slabs;
        let mut units: Vec<_> = slabs
            .within(tier, 0..u64::MAX)
            .map(|row| row.block / unit_blocks)
            .collect();
        units.dedup();
        let space = self.store.space.lock();
        units.retain(|unit| space.takes_slabs(tier, *unit));
        drop(space);
        units.into_iter().find_map(|unit| {
            let first = unit * unit_blocks;
            let mut at = first;
            for row in slabs.within(tier, first..first + unit_blocks) {
                if row.block - at >= blocks {
                    break;
                }
                at = row.block + u64::from(row.blocks);
            }
            (at + blocks <= first + data).then_some(at)
        })
    }

    fn put_unit_state(&mut self, tier: Tier, unit: u64, state: u8) -> Result<()> {
        let row = UnitRow {
            state,
            ..UnitRow::default()
        };
        self.patch(self.layout().unit_row(tier, unit), row.as_bytes())
    }

    fn free_slab(&mut self, lease: LeaseNo) -> Result<()> {
        self.close_slab(lease);
        let row = self
            .writer
            .slabs
            .remove(lease)
            .ok_or(StoreError::NoGrant(lease))?;
        self.undo.push(Box::new(move |writer| writer.slabs.insert(row)));
        self.clear_slab_row(lease)?;
        let own = Span {
            tier: row.tier,
            start: row.block,
            len: row.blocks.into(),
        };
        let unit_blocks = self.layout().unit_blocks(row.tier);
        let Some(unit) = row.block.checked_div(unit_blocks) else {
            let none = vec![0; row.blocks as usize];
            self.set_checksums(Tier::Nvm, 0, row.block, &none)?;
            return self.free_slab_blocks(own);
        };
        let first = unit * unit_blocks;
        let slabs = &self.writer.slabs;
        if slabs
            .within(row.tier, first..first + unit_blocks)
            .next()
            .is_some()
        {
            return Ok(());
        }
        self.put_unit_state(row.tier, unit, UnitRow::EMPTY)?;
        let all = Span {
            tier: row.tier,
            start: first,
            len: self.layout().unit_data_blocks(row.tier),
        };
        self.free_slab_blocks(all)
    }

    /// Frees blocks of slabs. They can be used as soon as the record is durable: no client maps them, no reader of
    /// the pool finds them, and the journal changes none.
    fn free_slab_blocks(&mut self, span: Span) -> Result<()> {
        self.set_bits(span, false)?;
        self.slab_blocks_freed.push(span);
        Ok(())
    }

    /// Lets nobody read or write it any more, unless this transaction is given up.
    fn close_slab(&mut self, lease: LeaseNo) {
        self.slabs_to_serve.retain(|row| row.lease != lease);
        if let Some(slab) = self.store.close_slab(&self.writer, lease) {
            let served = Arc::clone(&self.store.served);
            self.undo.push(Box::new(move |writer| {
                Store::reopen_slab(&served, writer, lease, slab)
            }));
        }
    }

    pub(crate) fn put_slab_row(&mut self, row: &SlabRow) -> Result<()> {
        let bytes = row
            .encode()
            .map_err(|_| StoreError::Invalid("slab row: session 0 or no blocks"))?;
        let lease = row.lease;
        let slot = match self.writer.grants.slot(&lease) {
            Some(slot) => slot,
            None => {
                let slot = self
                    .writer
                    .grants
                    .take(lease)
                    .ok_or(StoreError::TableFull("grant"))?;
                self.undo.push(Box::new(move |writer| {
                    writer.grants.give(&lease);
                }));
                slot
            }
        };
        self.patch(self.layout().grant_row(slot), &bytes)
    }

    fn clear_slab_row(&mut self, lease: LeaseNo) -> Result<()> {
        let slot = self
            .writer
            .grants
            .give(&lease)
            .ok_or(StoreError::NoGrant(lease))?;
        self.undo.push(Box::new(move |writer| {
            writer.grants.note(lease, slot);
        }));
        self.patch(self.layout().grant_row(slot), &[0; GRANT_ROW_SIZE])
    }
}

impl Store {
    /// Writes the row of a slab after it was granted (a seeded bug only).
    pub(crate) fn late_row(&self, row: &SlabRow) -> Result<()> {
        if !armed(Bug::SlabRowLate) {
            return Ok(());
        }
        let mut tx = self.begin()?;
        tx.core.put_slab_row(row)?;
        tx.commit().map(drop)
    }
}
