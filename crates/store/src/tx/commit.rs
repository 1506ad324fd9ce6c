//! The commit of a transaction: the order of writes, flushes and the journal record. Only this module and
//! [`in_place`](super::in_place), which it calls, write in place.

use super::TxState;
use crate::journal::RedoRecord;
use crate::seeded::{Bug, armed};
use crate::space::Pending;
use crate::{Result, StoreError};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, BlockHeader, BlockKind, BlockNo, Tier, TxId, seal_block,
};

/// Bytes of metadata written to a slower tier at once.
const RUN_BYTES: usize = 1 << 20;
/// Bytes at the start of a block that change together with its checksum.
const CHECKSUM_WORD: usize = 8;

impl TxState<'_> {
    pub(super) fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.spans.is_empty() && self.freed.is_empty()
    }

    pub(super) fn record(&mut self) -> Result<RedoRecord> {
        let mut payload = RedoRecord::default();
        let mut blocks: Vec<_> = self.dirty.iter_mut().collect();
        blocks.sort_unstable_by_key(|(block, _)| **block);
        for (block, dirty) in blocks {
            if !dirty.raw {
                seal_block(dirty.bytes());
            }
            if dirty.whole {
                payload.push(BlockNo(*block), 0, &dirty.content[..]);
            } else if let Some(base) = &dirty.base {
                let content = &dirty.content;
                let mut push = |at: usize, len: usize| {
                    payload.push(BlockNo(*block), at, &content[at..at + len]);
                };
                // The differences found when the room was computed are still valid, except for the checksum.
                let known = dirty.diff.as_ref().map(|diff| diff.ranges.as_slice());
                let headed = |ranges: &&[(u16, u16)]| {
                    let first = ranges.first().map_or(BLOCK_SIZE, |(at, _)| usize::from(*at));
                    dirty.raw || first >= BLOCK_HEADER_SIZE
                };
                if let Some(ranges) = known.filter(headed) {
                    if base[..CHECKSUM_WORD] != content[..CHECKSUM_WORD] && !dirty.raw {
                        push(0, CHECKSUM_WORD);
                    }
                    for (at, len) in ranges {
                        push(usize::from(*at), usize::from(*len));
                    }
                } else {
                    crate::journal::diff(&base[..], &content[..], push);
                }
            }
        }
        let (needed, bound) = (payload.bytes.len() as u64, self.writer.journal.bound());
        if needed > bound {
            return Err(StoreError::RecordFull { needed, bound });
        }
        Ok(payload)
    }

    /// Returns the ranges that a seeded bug commits in a record of its own before the rest: the counts of
    /// shared runs, or all but them.
    fn seeded_part(&self) -> Option<RedoRecord> {
        let counts_first = armed(Bug::CountBeforeExtents);
        if !counts_first && !armed(Bug::ExtentsBeforeCount) {
            return None;
        }
        let mut part = RedoRecord::default();
        for (block, dirty) in &self.dirty {
            let header = BlockHeader::of(&dirty.content);
            let is_count = [BlockKind::SharedLeaf, BlockKind::SharedNode, BlockKind::PoolState]
                .iter()
                .any(|kind| header.kind.get() == *kind as u16);
            let Some(base) = dirty
                .base
                .as_ref()
                .filter(|_| !dirty.raw && is_count == counts_first)
            else {
                continue;
            };
            crate::journal::diff(&base[..], &dirty.content[..], |at, len| {
                part.push(BlockNo(*block), at, &dirty.content[at..at + len]);
            });
        }
        Some(part)
    }

    /// Writes and syncs everything that the record will refer to.
    pub(super) fn payload_durable(&mut self) -> Result<()> {
        let mut fresh: Vec<u64> = self
            .dirty
            .iter()
            .filter(|(_, dirty)| dirty.base.is_none())
            .map(|(block, _)| *block)
            .collect();
        // A deterministic order, and ascending for the medium.
        fresh.sort_unstable();
        self.put_gathered()?;
        if armed(Bug::NodesUnfenced) {
            self.flush_touched()?;
        }
        let (mut start, mut run) = (0, Vec::new());
        for block in fresh {
            let Some(dirty) = self.dirty.get(&block) else {
                continue;
            };
            let content = Arc::clone(&dirty.content);
            if !BlockNo(block).is_cold() {
                self.put_blocks(Tier::Nvm, block, &content[..])?;
                continue;
            }
            // Slower tiers are written in long runs.
            if start + (run.len() / BLOCK_SIZE) as u64 != block || run.len() >= RUN_BYTES {
                self.put_run(start, &run)?;
                run.clear();
                start = block;
            }
            run.extend_from_slice(&content[..]);
        }
        self.put_run(start, &run)?;
        if armed(Bug::NoSyncBeforeCommit) || armed(Bug::NodesUnfenced) {
            return Ok(());
        }
        self.flush_touched()
    }

    /// Writes metadata blocks to a slower tier.
    pub(super) fn put_run(&mut self, start: u64, run: &[u8]) -> Result<()> {
        match BlockNo(start).home() {
            _ if run.is_empty() => Ok(()),
            Some((tier, number)) => self.put_blocks(tier, number, run),
            None => Err(StoreError::Damaged("a block of no tier is to be written".into())),
        }
    }

    pub(super) fn flush_touched(&mut self) -> Result<()> {
        if let Some((low, high)) = self.nvm_range {
            self.store.devices.nvm.fence()?;
            self.store.devices.nvm.sync(low, high - low)?;
        }
        for tier in [Tier::Ssd, Tier::Hdd] {
            if self.touched[tier as usize] && armed(Bug::OneDeviceFlushed) {
                let span = self.store.spans[tier as usize - 1].as_ref();
                let first = span.and_then(|span| span.devices().into_iter().flatten().next());
                first.map_or(Ok(()), |device| device.flush())?;
            } else if self.touched[tier as usize] && !armed(Bug::NoDeviceFlush) {
                let flushed = self.store.device(tier)?.flush();
                flushed.map_err(|error| self.store.lose_device(tier, error.into()))?;
            }
        }
        Ok(())
    }

    /// Commits the transaction. On an error nothing is committed, unless a device failed: then the pool is
    /// latched.
    pub(crate) fn commit(mut self) -> Result<TxId> {
        if self.poisoned {
            return Err(StoreError::Poisoned);
        }
        if let Some(reason) = self.store.latched() {
            return Err(StoreError::Latched(reason));
        }
        if self.is_clean() {
            return Ok(self.writer.journal.newest());
        }
        let payload = self.record()?;
        let store = self.store;
        if armed(Bug::RecordBeforePayload) {
            self.writer.journal.store_record(&payload)?;
        }
        self.payload_durable()
            .inspect_err(|error| store.latch_on(error))?;
        if !self.writer.journal.fits(payload.bytes.len() as u64) {
            store.checkpoint_with(&mut self.writer)?;
        }
        self.too_early(&payload)?;
        // After any failure blocks may be torn, and only the log has their content.
        let writing = self
            .write_in_place()
            .inspect_err(|error| store.latch(&format!("overwriting blocks in place failed: {error}")))?;
        if let Some(part) = self.seeded_part() {
            self.writer.journal.append(&part)?;
        }
        // A record that failed half-way may be durable or not: nothing more may be written.
        let tx = self
            .writer
            .journal
            .append(&payload)
            .inspect_err(|error| store.latch(&format!("writing the journal failed: {error}")))?;
        self.done = true;
        for (tier, start, data) in std::mem::take(&mut self.deferred) {
            self.put_now(tier, start, &data)?;
        }
        self.publish(tx, &payload).inspect_err(|error| {
            store.latch(&format!("a committed change could not be put in place: {error}"))
        })?;
        drop(writing);
        self.settle(tx);
        store.count_moves(&self.moves);
        store.trim_empty();
        Ok(tx)
    }

    /// Makes the writes that must not happen before the record (seeded bugs only).
    pub(super) fn too_early(&self, payload: &RedoRecord) -> Result<()> {
        if armed(Bug::InPlaceBeforeRecord) {
            let blocks = self.store.layout.blocks(Tier::Nvm);
            let ranges = varve_format::journal::parse_ranges(&payload.bytes, payload.ranges, blocks)
                .map_err(|_| StoreError::Journal("a record to be written makes no sense"))?;
            for (block, offset, bytes) in ranges {
                let at = block.offset_bytes() + u64::from(offset);
                self.store.devices.nvm.write(at, bytes)?;
            }
        }
        if armed(Bug::TrimBeforeCommit) {
            for (span, _) in self.freed.iter().filter(|(span, _)| span.tier != Tier::Nvm) {
                let device = self.store.device(span.tier)?;
                device.trim(span.start * BLOCK_BYTES, span.len * BLOCK_BYTES)?;
            }
        }
        Ok(())
    }

    /// Puts the committed changes in place and makes them visible.
    pub(super) fn publish(&mut self, tx: TxId, payload: &RedoRecord) -> Result<()> {
        let store = self.store;
        let mut newest = store.newest.write();
        let ranges = varve_format::journal::parse_ranges(
            &payload.bytes,
            payload.ranges,
            store.layout.blocks(Tier::Nvm),
        )
        .map_err(|_| StoreError::Journal("a record just written makes no sense"))?;
        for (block, offset, bytes) in ranges {
            self.nvm_written += bytes.len();
            store
                .devices
                .nvm
                .write(block.offset_bytes() + u64::from(offset), bytes)?;
        }
        // A fence orders the stores of its own thread only, and the next tail may be moved by another.
        if !armed(Bug::InPlaceUnfenced) {
            store.devices.nvm.fence()?;
        }
        for (block, dirty) in self.dirty.drain() {
            let number = BlockNo(block);
            // A demoted block is not needed soon.
            if number.is_cold() {
                continue;
            }
            if !self.moves.demoting {
                store.cache.note_used(number);
            }
            store.cache.put(block, dirty.content);
        }
        if self.inode_file_changed {
            store.cache.inode_file().clear();
        }
        for (span, data) in &self.freed {
            if !data && span.tier == Tier::Nvm {
                (span.start..span.start + span.len).for_each(|block| store.cache.forget(block));
            }
        }
        self.forgotten
            .drain(..)
            .for_each(|block| store.cache.forget(block));
        *newest = tx;
        store.newest_number.store(tx.0, Ordering::Release);
        Ok(())
    }

    /// Hands frees over to the allocator.
    pub(super) fn settle(&mut self, tx: TxId) {
        let mut space = self.store.space.lock();
        for span in self.ephemeral.drain(..) {
            space.give_back(span);
        }
        for (span, data) in self.freed.drain(..) {
            if !armed(Bug::FreeBeforeCommit) {
                space.freed(Pending { tx, span, data });
            }
        }
        space.release();
    }
}
