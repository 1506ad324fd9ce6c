//! The state of one transaction: dirty blocks, their cost in the record, and the state to restore if it is
//! dropped.

use super::in_place::InPlace;
use super::relocate::Moves;
use super::units::Gathered;
use crate::cache::{InodeFile, MetaCache};
use crate::journal::DIFF_MAX;
use crate::layout::{Layout, Place};
use crate::pool::Store;
use crate::pool::fetch::Fetched;
use crate::pool::writer::Writer;
use crate::reader::{MetaReader, View};
use crate::space::{Saved, Span};
use crate::{Result, StoreError};
use hashbrown::HashMap;
use parking_lot::MutexGuard;
use std::sync::Arc;
use varve_extent_tree::{MetaIo, MetaRead};
use varve_format::journal::RANGE_HEADER_SIZE;
use varve_format::space::UnitRow;
use varve_format::state::{POOL_STATE_SIZE, PoolState};
use varve_format::{BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockKind, BlockNo, Ino, Tier, TxId, init_block};
use zerocopy::IntoBytes;

/// A block changed or made in this transaction.
pub(super) struct Dirty {
    /// Not shared once it was changed.
    pub(super) content: Arc<Block>,
    /// Committed content; `None`: made in this transaction, written directly.
    pub(super) base: Option<Arc<Block>>,
    /// No header to seal.
    pub(super) raw: bool,
    /// The record holds all of it, because the content on media cannot be trusted (repair only).
    pub(super) whole: bool,
    /// Its difference from `base`, if computed.
    pub(super) diff: Option<Diff>,
}

/// The difference of a block from its committed content, without the checksum in its header.
#[derive(Default)]
pub(super) struct Diff {
    /// Bytes that it takes in the record.
    pub(super) cost: u64,
    /// Offset and length of each range; empty for a block that the record holds as a whole.
    pub(super) ranges: Vec<(u16, u16)>,
}

impl Dirty {
    pub(super) fn bytes(&mut self) -> &mut Block {
        Arc::make_mut(&mut self.content)
    }

    /// Compares it with its committed content.
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

/// Undoes a change of a row table in DRAM.
pub(crate) type Undo = Box<dyn FnOnce(&mut Writer) + Send>;

/// State of one transaction. If it is dropped without commit, everything is restored.
pub(crate) struct TxState<'s> {
    pub(crate) store: &'s Store,
    pub(crate) writer: MutexGuard<'s, Writer>,
    pub(super) dirty: HashMap<u64, Dirty>,
    pub(super) stale: Vec<u64>,
    pub(super) cost: u64,
    pub(super) spans: Vec<Span>,
    pub(super) ephemeral: Vec<Span>,
    pub(super) freed: Vec<(Span, bool)>,
    /// Metadata blocks of slower tiers that are freed.
    pub(super) forgotten: Vec<u64>,
    pub(super) saved: Saved,
    pub(crate) touched: [bool; 3],
    pub(super) nvm_range: Option<(u64, u64)>,
    /// Bytes written to NVM, counted once: a locked addition after each copy would wait until the copy has
    /// left the write buffers.
    pub(super) nvm_written: usize,
    pub(super) deferred: Vec<(Tier, u64, Vec<u8>)>,
    /// Data blocks of a device that wait for those that follow them.
    pub(super) gathered: Vec<Gathered>,
    /// Buffers of blocks that have been written.
    pub(super) spare_buffers: Vec<Vec<u8>>,
    /// Blocks to overwrite in place.
    pub(super) in_place: InPlace,
    /// Blocks that were read before the transaction began.
    pub(super) ahead: Option<&'s Fetched<'s>>,
    /// Buffer for fetched bytes.
    pub(crate) fetched: Vec<u8>,
    /// Buffer for merged blocks.
    pub(crate) merged: Vec<u8>,
    pub(crate) undo: Vec<Undo>,
    /// The tree of the inode file differs from the committed one.
    pub(crate) inode_file_changed: bool,
    pub(crate) poisoned: bool,
    /// The present operation must not use the reserve.
    pub(crate) frugal: bool,
    /// All operations of this transaction may use the reserve.
    pub(crate) use_reserve: bool,
    /// Metadata that this transaction demotes and promotes.
    pub(crate) moves: Moves,
    pub(super) done: bool,
}

impl<'s> TxState<'s> {
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
            gathered: Vec::new(),
            spare_buffers: Vec::new(),
            in_place: InPlace::default(),
            ahead: None,
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

    pub(crate) fn reader(&self) -> MetaReader<'_, Self> {
        MetaReader {
            view: self,
            layout: self.layout(),
        }
    }

    pub(crate) fn id(&self) -> TxId {
        TxId(self.writer.journal.newest().0 + 1)
    }

    /// Returns a lower bound of the bytes left in the record, which is exact if it is less than `enough`.
    /// Operations often change blocks that earlier ones changed, so blocks are compared only when the exact
    /// number matters, not after each operation.
    pub(crate) fn room_at_least(&mut self, enough: u64) -> u64 {
        let most = self.cost + self.stale.len() as u64 * DIFF_MAX;
        let least = self.writer.journal.bound().saturating_sub(most);
        if least >= enough { least } else { self.room() }
    }

    /// Returns the bytes left in the record.
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

    pub(super) fn dirty_mut(&mut self, block: BlockNo, raw: bool) -> Result<&mut Dirty> {
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

    /// Replaces a damaged block by `content`. The record holds all of it.
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

    /// Changes the pool state, as this transaction sees it.
    pub(crate) fn change_state(&mut self, f: impl FnOnce(&mut PoolState)) -> Result<()> {
        let mut state = self.reader().state()?;
        f(&mut state);
        self.set_state(&state)
    }

    pub(crate) fn set_state(&mut self, state: &PoolState) -> Result<()> {
        const { assert!(BLOCK_HEADER_SIZE + POOL_STATE_SIZE <= BLOCK_SIZE) };
        let block = self.reader().state_block();
        let before = self.reader().state().ok();
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
}

impl Drop for TxState<'_> {
    fn drop(&mut self) {
        self.store.count_write(Tier::Nvm, self.nvm_written);
        let room = self.in_place.take_room();
        if !room.is_empty() {
            self.writer.in_place_room = room;
        }
        if self.done {
            return;
        }
        self.store
            .space
            .lock()
            .restore(std::mem::take(&mut self.saved), &self.spans);
        for undo in std::mem::take(&mut self.undo).into_iter().rev() {
            undo(&mut self.writer);
        }
    }
}

impl MetaRead for TxState<'_> {
    type Error = StoreError;

    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        if !self.moves.demoting {
            self.store.cache.note_used(block);
        }
        match self.dirty.get(&block.0) {
            Some(dirty) => Ok(f(&dirty.content)),
            None => self
                .reader()
                .load_node(block, self.store.trusting)
                .map(|content| f(&content)),
        }
    }
}

impl View for TxState<'_> {
    fn read_raw<R>(
        &self,
        block: BlockNo,
        check: impl FnOnce(&Block) -> Result<()>,
        f: impl FnOnce(&Block) -> R,
    ) -> Result<R> {
        if !self.moves.demoting {
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

    fn cache(&self) -> &MetaCache {
        &self.store.cache
    }

    fn footer(&self, tier: Tier, unit: u64, row: &UnitRow) -> Result<Arc<Vec<u32>>> {
        self.store.footer(tier, unit, row)
    }
}

impl MetaIo for TxState<'_> {
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

    fn promote(&mut self, block: BlockNo) -> Result<BlockNo> {
        self.bring_back(block, false)
    }

    fn demote(&mut self, block: BlockNo) -> Result<Option<BlockNo>> {
        if self.store.cache.take_used(block) {
            return Ok(None);
        }
        self.send_away(block, false)
    }
}
