//! The heart of a transaction: dirty blocks, allocations, frees, the commit. Knows no files.

use crate::cache::{InodeFile, View, load_node};
use crate::cold::Moves;
use crate::journal::Payload;
use crate::layout::{Layout, Place};
use crate::lens::{Lens, POOL_INO};
use crate::rows::Writer;
use crate::seeded::{Bug, armed};
use crate::space::{NextUnit, Pending, Saved, Span};
use crate::{DataTarget, Result, Store, StoreError};
use hashbrown::HashMap;
use parking_lot::MutexGuard;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_extent_tree::{MetaIo, MetaRead};
use varve_format::journal::RANGE_HEADER_SIZE;
use varve_format::space::{CHECKSUMS_PER_BLOCK, UNIT_ROW_SIZE, UnitRow, footer_blocks};
use varve_format::state::{POOL_STATE_SIZE, PoolState};
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockKind, BlockNo, Ino, Tier, TxId, init_block,
    seal_block,
};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of metadata written to a slower tier at once.
const RUN_BYTES: usize = 1 << 20;
/// Bytes at the start of a block that change together with its checksum.
const CHECKSUM_WORD: usize = 8;

/// A block changed or made in this transaction.
struct Dirty {
    /// Shared with nobody once it was changed.
    content: Arc<Block>,
    /// Committed content; `None`: made in this transaction, written directly.
    base: Option<Arc<Block>>,
    /// No header to seal.
    raw: bool,
    /// The record holds all of it, because what lies on media cannot be trusted (repair only).
    whole: bool,
    /// Its difference, when known.
    diff: Option<Diff>,
}

/// How a block differs from what is committed, but for the checksum in its header.
#[derive(Default)]
struct Diff {
    /// Bytes that it takes in the record.
    cost: u64,
    /// Offset and length of each range. None of a block of which the record holds all.
    ranges: Vec<(u16, u16)>,
}

impl Dirty {
    fn bytes(&mut self) -> &mut Block {
        Arc::make_mut(&mut self.content)
    }

    /// Compares it with what is committed.
    fn compare(&self, base: &Block) -> Diff {
        // The first word holds the checksum, which changes when the block is sealed.
        let mut diff = Diff {
            cost: if self.whole { BLOCK_SIZE as u64 } else { 20 },
            ranges: Vec::new(),
        };
        if self.whole {
            diff.cost += RANGE_HEADER_SIZE as u64;
            return diff;
        }
        crate::journal::diff(base, &self.content[..], |at, len| {
            diff.cost += (len + RANGE_HEADER_SIZE) as u64;
            diff.ranges.push((at as u16, len as u16));
        });
        diff
    }
}

/// Most that a block's differences cost: ranges are so far apart that what lies between them would cost more than their headers.
pub(crate) const DIFF_MAX: u64 = (BLOCK_SIZE + 2 * RANGE_HEADER_SIZE + 20) as u64;

/// How a row table in DRAM is put back.
pub(crate) type Undo = Box<dyn FnOnce(&mut Writer) + Send>;

/// State of one transaction. Dropped without commit, everything is put back.
pub(crate) struct Core<'s> {
    pub(crate) store: &'s Store,
    pub(crate) writer: MutexGuard<'s, Writer>,
    dirty: HashMap<u64, Dirty>,
    stale: Vec<u64>,
    cost: u64,
    spans: Vec<Span>,
    ephemeral: Vec<Span>,
    freed: Vec<(Span, bool)>,
    /// Metadata blocks of slower tiers that are freed.
    forgotten: Vec<u64>,
    saved: Saved,
    pub(crate) touched: [bool; 3],
    nvm_range: Option<(u64, u64)>,
    /// Bytes written to NVM, counted once: a locked addition after each copy would wait until the copy has left the write buffers.
    nvm_written: usize,
    deferred: Vec<(Tier, u64, Vec<u8>)>,
    /// Room for bytes that are fetched.
    pub(crate) fetched: Vec<u8>,
    /// Room for blocks that are put together.
    pub(crate) merged: Vec<u8>,
    pub(crate) undo: Vec<Undo>,
    /// The tree of the inode file is not as it is committed.
    pub(crate) inode_file_changed: bool,
    pub(crate) poisoned: bool,
    /// The present operation leaves the reserve alone.
    pub(crate) frugal: bool,
    /// No operation of this transaction needs to.
    pub(crate) use_reserve: bool,
    /// What this transaction moves to slower tiers and back.
    pub(crate) moves: Moves,
    done: bool,
}

impl<'s> Core<'s> {
    pub(crate) fn new(store: &'s Store, writer: MutexGuard<'s, Writer>) -> Self {
        let saved = store.space.lock().save();
        Self {
            store,
            writer,
            dirty: HashMap::new(),
            stale: Vec::new(),
            cost: 0,
            spans: Vec::new(),
            ephemeral: Vec::new(),
            freed: Vec::new(),
            forgotten: Vec::new(),
            saved,
            touched: [false; 3],
            nvm_range: None,
            nvm_written: 0,
            deferred: Vec::new(),
            fetched: Vec::new(),
            merged: Vec::new(),
            undo: Vec::new(),
            inode_file_changed: false,
            poisoned: false,
            frugal: false,
            use_reserve: false,
            moves: Moves::default(),
            done: false,
        }
    }

    pub(crate) fn layout(&self) -> &'s Layout {
        &self.store.layout
    }

    pub(crate) fn lens(&self) -> Lens<'_, Self> {
        Lens {
            view: self,
            layout: self.layout(),
        }
    }

    pub(crate) fn id(&self) -> TxId {
        TxId(self.writer.journal.newest().0 + 1)
    }

    /// Bytes that are left in the record at least; all that are, if that is less than `enough`. An operation changes blocks that the ones before it
    /// have changed: they are compared when it matters, not after each.
    pub(crate) fn room_at_least(&mut self, enough: u64) -> u64 {
        let most = self.cost + self.stale.len() as u64 * DIFF_MAX;
        let least = self.writer.journal.bound().saturating_sub(most);
        if least >= enough { least } else { self.room() }
    }

    /// Bytes left in the record.
    pub(crate) fn room(&mut self) -> u64 {
        while let Some(block) = self.stale.pop() {
            if let Some(dirty) = self.dirty.get_mut(&block)
                && dirty.diff.is_none()
                && let Some(base) = &dirty.base
            {
                let diff = dirty.compare(base);
                self.cost += diff.cost;
                dirty.diff = Some(diff);
            }
        }
        self.writer.journal.bound().saturating_sub(self.cost)
    }

    fn dirty_mut(&mut self, block: BlockNo, raw: bool) -> Result<&mut Dirty> {
        if block.is_cold() {
            return Err(StoreError::Damaged(format!(
                "metadata block {block} is to be changed on a slower tier"
            )));
        }
        if !self.dirty.contains_key(&block.0) {
            let base = self.store.cache.load(block, raw)?;
            self.dirty.insert(
                block.0,
                Dirty {
                    content: Arc::clone(&base),
                    base: Some(base),
                    raw,
                    whole: false,
                    diff: None,
                },
            );
            self.stale.push(block.0);
        }
        let (stale, sum) = (&mut self.stale, &mut self.cost);
        let dirty = self
            .dirty
            .get_mut(&block.0)
            .ok_or_else(|| StoreError::Damaged("a dirty block is gone".into()))?;
        if let Some(diff) = dirty.diff.take() {
            *sum -= diff.cost;
            stale.push(block.0);
        }
        Ok(dirty)
    }

    /// Writes bytes into a block.
    pub(crate) fn patch(&mut self, place: Place, bytes: &[u8]) -> Result<()> {
        let dirty = self.dirty_mut(place.block, false)?;
        dirty.bytes()[place.offset..place.offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Puts `content` in place of a block that cannot be read as it is. The record holds all of it.
    pub(crate) fn force(&mut self, block: BlockNo, content: Box<Block>, raw: bool) {
        if let Some(old) = self.dirty.remove(&block.0)
            && let Some(diff) = old.diff
        {
            self.cost -= diff.cost;
        }
        let content: Arc<Block> = Arc::from(content);
        self.dirty.insert(
            block.0,
            Dirty {
                base: Some(Arc::clone(&content)),
                content,
                raw,
                whole: true,
                diff: None,
            },
        );
        self.stale.push(block.0);
    }

    /// Writes bytes into a block without header.
    pub(crate) fn patch_raw(&mut self, place: Place, bytes: &[u8]) -> Result<()> {
        let dirty = self.dirty_mut(place.block, true)?;
        dirty.bytes()[place.offset..place.offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Changes the pool state as it now is.
    pub(crate) fn change_state(&mut self, f: impl FnOnce(&mut PoolState)) -> Result<()> {
        let mut state = self.lens().state()?;
        f(&mut state);
        self.set_state(&state)
    }

    pub(crate) fn set_state(&mut self, state: &PoolState) -> Result<()> {
        const { assert!(BLOCK_HEADER_SIZE + POOL_STATE_SIZE <= BLOCK_SIZE) };
        let block = self.lens().state_block();
        let before = self.lens().state().ok();
        self.inode_file_changed |= before.is_none_or(|before| {
            before.inode_root != state.inode_root || before.inode_blocks != state.inode_blocks
        });
        self.patch(
            Place {
                block,
                offset: BLOCK_HEADER_SIZE,
            },
            state.as_bytes(),
        )
    }

    // ---- space

    /// NVM for metadata; may move the journal's tail to release some.
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

    /// Blocks without header, zeroed, in one run: at most `want`.
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

    /// Blocks for data: at most `want`, in one run, on the tier that the target leads to.
    pub(crate) fn alloc_data(&mut self, target: DataTarget, want: u64) -> Result<Span> {
        let target = DataTarget {
            reserve: target.reserve || self.use_reserve,
            ..target
        };
        let later = Tier::ALL.into_iter().filter(|tier| *tier > target.tier);
        let earlier = Tier::ALL.into_iter().rev().filter(|tier| *tier < target.tier);
        let order: Vec<Tier> = std::iter::once(target.tier).chain(later).chain(earlier).collect();
        let order = if target.only { &order[..1] } else { &order[..] };
        // First without moving the tail; then, if something waits only for that, with.
        for again in [false, true] {
            if again {
                if !self.store.space.lock().waits_for_tail() {
                    break;
                }
                self.store.checkpoint_with(&mut self.writer)?;
            }
            for tier in order {
                if let Some(span) = self.alloc_on(*tier, target.reserve, want)? {
                    self.spans.push(span);
                    self.set_bits(span, true)?;
                    return Ok(span);
                }
            }
        }
        Err(StoreError::NoSpace { blocks: want })
    }

    /// A block for metadata on a slower tier, the faster one first; `None`: there is none.
    pub(crate) fn alloc_cold(&mut self) -> Result<Option<Span>> {
        for tier in [Tier::Ssd, Tier::Hdd] {
            if let Some(span) = self.alloc_on(tier, false, 1)? {
                self.spans.push(span);
                self.set_bits(span, true)?;
                return Ok(Some(span));
            }
        }
        Ok(None)
    }

    fn alloc_on(&mut self, tier: Tier, reserve: bool, want: u64) -> Result<Option<Span>> {
        if self.layout().blocks(tier) == 0 {
            return Ok(None);
        }
        if tier == Tier::Nvm {
            return Ok(self.store.space.lock().alloc_nvm(want, true, reserve, None));
        }
        for _ in 0..2 {
            if let Some(span) = self.store.space.lock().alloc_unit(tier, want) {
                return Ok(Some(span));
            }
            let next = self.store.space.lock().next_unit(tier, reserve);
            let Some(next) = next else {
                return Ok(None);
            };
            if let NextUnit::Holes(_) = next
                && self.room() < self.layout().reopening_bytes(tier) + crate::OP_ROOM
            {
                // Its table would not fit in this record.
                return Ok(None);
            }
            self.seal_open_unit(tier)?;
            self.open_unit(tier, next)?;
        }
        Ok(None)
    }

    /// Sets or clears bits; they must all be the other way.
    fn set_bits(&mut self, span: Span, value: bool) -> Result<()> {
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

    /// Whether the block was in use before this transaction.
    fn was_used(&self, tier: Tier, block: u64) -> Result<bool> {
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

    // ---- units

    fn seal_open_unit(&mut self, tier: Tier) -> Result<()> {
        let Some(unit) = self.lens().open_unit(tier)? else {
            return Ok(());
        };
        let data = self.layout().unit_data_blocks(tier);
        let sums = self.lens().table_checksums(tier, 0, data)?;
        self.seal_with(tier, unit, &sums)
    }

    /// The footer that a transaction may write: not the one that counts as long as it has not committed.
    fn spare_footer(&self, tier: Tier, unit: u64) -> Result<u8> {
        let place = self.layout().unit_row(tier, unit);
        let row = |block: &Block| {
            let bytes = &block[place.offset..place.offset + UNIT_ROW_SIZE];
            UnitRow::read_from_bytes(bytes)
                .map_err(|_| StoreError::Damaged("a unit row has another length".into()))
        };
        let row = match self.dirty.get(&place.block.0).map(|dirty| &dirty.base) {
            Some(Some(base)) => row(base),
            _ => row(&*self.store.cache.load(place.block, false)?),
        }?;
        Ok(u8::from(row.state == UnitRow::SEALED && row.footer == 0) & u8::from(!armed(Bug::OneFooter)))
    }

    /// Writes a unit's footer and its row.
    pub(crate) fn seal_with(&mut self, tier: Tier, unit: u64, sums: &[u32]) -> Result<()> {
        let layout = self.layout();
        let unit_blocks = layout.unit_blocks(tier);
        let data = layout.unit_data_blocks(tier);
        let place = self.spare_footer(tier, unit)?;
        let footer_start = layout.footer_start(tier, unit, place);
        let mut footer = vec![0; footer_blocks(unit_blocks) as usize * BLOCK_SIZE];
        let mut crc = 0;
        for (index, part) in sums.chunks(CHECKSUMS_PER_BLOCK as usize).enumerate() {
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            for (word, sum) in block[BLOCK_HEADER_SIZE..].chunks_exact_mut(4).zip(part) {
                word.copy_from_slice(&sum.to_le_bytes());
            }
            crc = crc32c::crc32c_append(crc, &block[BLOCK_HEADER_SIZE..]);
            init_block(
                &mut block,
                BlockKind::UnitFooter,
                POOL_INO,
                BlockNo(footer_start + index as u64),
            );
            footer[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE].copy_from_slice(&block[..]);
        }
        for index in data.div_ceil(CHECKSUMS_PER_BLOCK)..footer_blocks(unit_blocks) {
            let at = index as usize * BLOCK_SIZE;
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            init_block(
                &mut block,
                BlockKind::UnitFooter,
                POOL_INO,
                BlockNo(footer_start + index),
            );
            footer[at..at + BLOCK_SIZE].copy_from_slice(&block[..]);
        }
        if !armed(Bug::FooterNotWritten) {
            self.put_blocks(tier, footer_start, &footer)?;
        }
        let row = UnitRow {
            state: UnitRow::SEALED,
            footer: place,
            reserved: [0; 2],
            footer_crc32c: U32::new(crc),
            sealed_tx: U64::new(self.id().0),
        };
        self.patch(layout.unit_row(tier, unit), row.as_bytes())
    }

    fn open_unit(&mut self, tier: Tier, next: NextUnit) -> Result<()> {
        let layout = self.layout();
        let unit = match next {
            NextUnit::Empty(unit) => unit,
            NextUnit::Holes(unit) => {
                let row = self.lens().unit_row(tier, unit)?;
                if !armed(Bug::HolesWithoutSums) {
                    // A row of a unit that is in use says nothing else unless it is damaged: what lies there would have other blocks' sums. When a
                    // repair takes space, such units are nobody's.
                    if row.state == UnitRow::SEALED {
                        let sums = self.store.footer(tier, unit, &row)?;
                        self.set_checksums(tier, 0, &sums)?;
                    } else if !self.store.trusting {
                        return Err(StoreError::Footer { tier, unit });
                    }
                }
                unit
            }
        };
        let row = UnitRow {
            state: UnitRow::OPEN,
            ..UnitRow::default()
        };
        self.patch(layout.unit_row(tier, unit), row.as_bytes())?;
        self.change_state(|state| state.open_unit[tier as usize] = U64::new(unit + 1))?;
        self.store.space.lock().open_unit(tier, unit);
        Ok(())
    }

    /// Puts checksums into a tier's NVM table, from `index` on.
    fn set_checksums(&mut self, tier: Tier, index: u64, sums: &[u32]) -> Result<()> {
        let mut done = 0;
        while done < sums.len() {
            let at = index + done as u64;
            let count = ((CHECKSUMS_PER_BLOCK - at % CHECKSUMS_PER_BLOCK) as usize).min(sums.len() - done);
            let bytes: Vec<u8> = sums[done..done + count]
                .iter()
                .flat_map(|sum| sum.to_le_bytes())
                .collect();
            self.patch(self.layout().checksum(tier, at), &bytes)?;
            done += count;
        }
        Ok(())
    }

    /// Writes whole blocks to space allocated in this transaction, with their checksums.
    pub(crate) fn write_new(&mut self, span: Span, data: &[u8]) -> Result<()> {
        let mut sums = Vec::with_capacity(data.len() / BLOCK_SIZE);
        self.put_summed(span.tier, span.start, data, &mut sums)?;
        self.note_checksums(span, &sums)
    }

    /// Writes whole blocks to a place of a tier that was allocated in this transaction; their checksums go to `sums`.
    pub(crate) fn put_summed(
        &mut self,
        tier: Tier,
        start: u64,
        data: &[u8],
        sums: &mut Vec<u32>,
    ) -> Result<()> {
        if tier != Tier::Nvm
            || self.store.devices.nvm.is_written_by_calls()
            || armed(Bug::CommitBeforePayload)
        {
            let sum = |block| varve_media::crc32c_append(0, block);
            sums.extend(data.chunks(BLOCK_SIZE).map(sum));
            return self.put_blocks(tier, start, data);
        }
        // Summed while it is copied: one pass over the data.
        let offset = start * BLOCK_BYTES;
        self.touched[Tier::Nvm as usize] = true;
        self.note_nvm(offset, data.len());
        for (block, at) in data.chunks(BLOCK_SIZE).zip((offset..).step_by(BLOCK_SIZE)) {
            sums.push(self.store.devices.nvm.write_crc(at, block, 0)?);
        }
        Ok(())
    }

    /// Records checksums of blocks written in this transaction.
    pub(crate) fn note_checksums(&mut self, span: Span, sums: &[u32]) -> Result<()> {
        let index = match span.tier {
            Tier::Nvm => span.start,
            tier => span.start % self.layout().unit_blocks(tier),
        };
        self.set_checksums(span.tier, index, sums)
    }

    /// Writes bytes at a block of a tier.
    pub(crate) fn put_blocks(&mut self, tier: Tier, start: u64, data: &[u8]) -> Result<()> {
        if armed(Bug::CommitBeforePayload) {
            self.deferred.push((tier, start, data.to_vec()));
            return Ok(());
        }
        self.put_now(tier, start, data)
    }

    /// Bytes of NVM that the next sync must cover.
    fn note_nvm(&mut self, offset: u64, bytes: usize) {
        self.nvm_written += bytes;
        let end = offset + bytes as u64;
        let before = self.nvm_range.filter(|_| !armed(Bug::RangeNotMerged));
        let (low, high) = before.unwrap_or((offset, end));
        self.nvm_range = Some((low.min(offset), high.max(end)));
    }

    fn put_now(&mut self, tier: Tier, start: u64, data: &[u8]) -> Result<()> {
        let offset = start * BLOCK_BYTES;
        self.touched[tier as usize] = true;
        if tier == Tier::Nvm {
            self.note_nvm(offset, data.len());
            self.store.devices.nvm.write(offset, data)?;
        } else {
            self.store.count_write(tier, data.len());
            self.store.device(tier)?.write(offset, data)?;
        }
        Ok(())
    }

    /// A data block's bytes as this transaction wrote them, if the write was put off (seeded bug only).
    pub(crate) fn store_read(&self, tier: Tier, start: u64, out: &mut [u8]) -> Result<()> {
        if let Some((_, first, data)) = self.deferred.iter().rev().find(|(t, first, data)| {
            *t == tier && *first <= start && start < first + (data.len() / BLOCK_SIZE) as u64
        }) {
            let at = (start - first) as usize * BLOCK_SIZE;
            if let Some(part) = data.get(at..at + out.len()) {
                out.copy_from_slice(part);
                return Ok(());
            }
        }
        self.store.read_blocks(tier, start, out)
    }

    // ---- end

    fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.spans.is_empty() && self.freed.is_empty()
    }

    fn record(&mut self) -> Result<Payload> {
        let mut payload = Payload::default();
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
                // What was found when the room was asked for still holds, but for the checksum.
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

    /// Writes and syncs everything that the record will refer to.
    fn payload_durable(&mut self) -> Result<()> {
        let mut fresh: Vec<u64> = self
            .dirty
            .iter()
            .filter(|(_, dirty)| dirty.base.is_none())
            .map(|(block, _)| *block)
            .collect();
        // One order for the same work, and ascending for the medium.
        fresh.sort_unstable();
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
    fn put_run(&mut self, start: u64, run: &[u8]) -> Result<()> {
        match BlockNo(start).home() {
            _ if run.is_empty() => Ok(()),
            Some((tier, number)) => self.put_blocks(tier, number, run),
            None => Err(StoreError::Damaged("a block of no tier is to be written".into())),
        }
    }

    fn flush_touched(&mut self) -> Result<()> {
        if let Some((low, high)) = self.nvm_range {
            self.store.devices.nvm.fence()?;
            self.store.devices.nvm.sync(low, high - low)?;
        }
        for tier in [Tier::Ssd, Tier::Hdd] {
            if self.touched[tier as usize] && !armed(Bug::NoDeviceFlush) {
                self.store.device(tier)?.flush()?;
            }
        }
        Ok(())
    }

    /// Commits. On an error nothing is committed, unless a device failed: then the pool is latched.
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
        // Whether a record that failed half-way is durable is not known: nothing more may be written.
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
        self.settle(tx);
        store.count_moves(&self.moves);
        store.trim_empty();
        Ok(tx)
    }

    /// What must not happen before the record (seeded bugs only).
    fn too_early(&self, payload: &Payload) -> Result<()> {
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
    fn publish(&mut self, tx: TxId, payload: &Payload) -> Result<()> {
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
            // What was just sent away is not wanted soon.
            if number.is_cold() {
                continue;
            }
            if !self.moves.cooling {
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
    fn settle(&mut self, tx: TxId) {
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

impl Drop for Core<'_> {
    fn drop(&mut self) {
        self.store.count_write(Tier::Nvm, self.nvm_written);
        if self.done {
            return;
        }
        self.store.space.lock().restore(self.saved, &self.spans);
        for undo in std::mem::take(&mut self.undo).into_iter().rev() {
            undo(&mut self.writer);
        }
    }
}

impl MetaRead for Core<'_> {
    type Error = StoreError;

    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        if !self.moves.cooling {
            self.store.cache.note_used(block);
        }
        match self.dirty.get(&block.0) {
            Some(dirty) => Ok(f(&dirty.content)),
            None => load_node(self, block, self.store.trusting).map(|content| f(&content)),
        }
    }
}

impl View for Core<'_> {
    fn read_raw<R>(
        &self,
        block: BlockNo,
        check: impl FnOnce(&Block) -> Result<()>,
        f: impl FnOnce(&Block) -> R,
    ) -> Result<R> {
        if !self.moves.cooling {
            self.store.cache.note_used(block);
        }
        match self.dirty.get(&block.0) {
            Some(dirty) => Ok(f(&dirty.content)),
            None => self
                .store
                .cache
                .load_checked(block, check)
                .map(|content| f(&content)),
        }
    }

    fn inode_file(&self) -> Option<&InodeFile> {
        (!self.inode_file_changed).then(|| self.store.cache.inode_file())
    }

    fn store(&self) -> &Store {
        self.store
    }
}

impl MetaIo for Core<'_> {
    fn update<R>(&mut self, block: BlockNo, f: impl FnOnce(&mut Block) -> R) -> Result<R> {
        Ok(f(self.dirty_mut(block, false)?.bytes()))
    }

    fn alloc(&mut self, near: Option<BlockNo>, kind: BlockKind, owner: Ino) -> Result<BlockNo> {
        let span = self.alloc_meta(1, near.map(|block| block.0))?;
        let number = BlockNo(span.start);
        let mut content: Arc<Block> = Arc::new([0; BLOCK_SIZE]);
        init_block(Arc::make_mut(&mut content), kind, owner, number);
        self.insert_fresh(span.start, content, false);
        Ok(number)
    }

    fn free(&mut self, block: BlockNo) -> Result<()> {
        let Some((tier, start)) = block.home() else {
            return Err(StoreError::Damaged(format!("metadata block {block} of no tier")));
        };
        self.free_span(Span { tier, start, len: 1 }, false)?;
        if tier != Tier::Nvm {
            self.forgotten.push(block.0);
        }
        if let Some(dirty) = self.dirty.remove(&block.0)
            && let Some(diff) = dirty.diff
        {
            self.cost -= diff.cost;
        }
        Ok(())
    }

    fn warm(&mut self, block: BlockNo) -> Result<BlockNo> {
        self.bring_back(block, false)
    }

    fn cool(&mut self, block: BlockNo) -> Result<Option<BlockNo>> {
        if self.store.cache.take_used(block) {
            return Ok(None);
        }
        self.send_away(block, false)
    }
}
