//! Metadata on slower tiers: which goes, how it goes and how it comes back. Decides nothing about data.
//!
//! A block that goes is written to the data space of SSD or HDD as it is, but for its own number, and what points to it changes in the same
//! transaction: so it is durable before the record that names it, and its old place is free after it. The tier's table of checksums has the
//! complement of its checksum, which tells it from data. It is read where it is, and comes back to NVM to be changed. Children go before
//! their parents, and a block of the inode file when all that hangs on its inodes is away: so what is away never points to NVM.
//!
//! What goes is found by a hand that moves through the inode file and leaves what was used since it last came by.

use crate::core::Core;
use crate::lens::POOL_INO;
use crate::space::Span;
use crate::store::Store;
use crate::{OP_ROOM, Result, StoreError, Tx};
use serde::{Deserialize, Serialize};
use varve_extent_tree::{ExtentTree, MetaIo, MetaRead};
use varve_format::inode::{Content, INODES_PER_BLOCK, InodeSlot};
use varve_format::{
    Block, BlockHeader, BlockKind, BlockNo, Extent, ExtentFlags, FileBlock, Ino, Tier, TxId, move_block,
    sum_of_metadata,
};
use zerocopy::IntoBytes;

/// Below this part of the NVM, room for metadata is made before anything else is done…
const LOW: u64 = 32;
/// …until this part is left; below it, room is made in the background.
const ENOUGH: u64 = 16;
/// Most blocks of one transaction that makes room.
const STEP_BLOCKS: u64 = 1024;
/// Most blocks of the inode file that one transaction looks at.
const STEP_LOOKS: u64 = 1024;
/// Transactions until it is tried again after nothing could go.
const FUTILE_TX: u64 = 64;
/// Times that room is made for one transaction because others took it.
const ROOM_ROUNDS: usize = 16;
/// Blocks of NVM that an operation of a batch takes, mostly; the store has the last word.
const OP_BLOCKS: u64 = 2;

/// Numbers of metadata between tiers, in blocks, since the pool was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoolingStats {
    /// Went to slower tiers.
    pub away: u64,
    /// Came back to be changed.
    pub back: u64,
    /// Were read from slower tiers.
    pub reads: u64,
}

/// Blocks of NVM that the end of a transaction may need which freed something: images, and nodes of the inode file.
const PAUSE_BLOCKS: u64 = 8;

/// What is remembered between transactions.
#[derive(Debug, Default)]
pub(crate) struct Cooling {
    /// Block of the inode file that is looked at next.
    hand: u64,
    /// Nothing could go.
    futile: Option<Futile>,
    away: u64,
    back: u64,
}

/// Until when it is not tried again.
#[derive(Debug, Clone, Copy)]
struct Futile {
    /// Not before this transaction…
    until: TxId,
    /// …unless slower tiers have more blocks than these by then: they were full.
    room: u64,
}

/// What one transaction moves.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    /// It was begun to send metadata away: what it looks at is not used.
    pub(crate) cooling: bool,
    away: u64,
    back: u64,
    /// No slower tier has a block.
    full: bool,
}

/// How a transaction that sends metadata away ended.
#[derive(Debug, Default)]
struct Step {
    moved: u64,
    /// Blocks of the inode file that the hand passed.
    passed: u64,
    full: bool,
}

/// Whether to go on: asked before each block.
type More<'m> = &'m mut dyn FnMut(&mut Core<'_>) -> bool;

impl Core<'_> {
    /// Moves a block from a slower tier to NVM.
    pub(crate) fn bring_back(&mut self, block: BlockNo, raw: bool) -> Result<BlockNo> {
        let mut content: Box<Block> = if raw {
            self.lens().images(block, |bytes| Box::new(*bytes))?
        } else {
            MetaRead::read(self, block, |bytes| Box::new(*bytes))?
        };
        let new = BlockNo(self.alloc_meta(1, None)?.start);
        self.free(block)?;
        if !raw {
            move_block(&mut content, new);
        }
        self.insert_fresh(new.0, content.into(), raw);
        self.moves.back += 1;
        Ok(new)
    }

    /// Moves a block of NVM to a slower tier; `None`: there is no space.
    pub(crate) fn send_away(&mut self, block: BlockNo, raw: bool) -> Result<Option<BlockNo>> {
        let mut content: Box<Block> = if raw {
            self.lens().images(block, |bytes| Box::new(*bytes))?
        } else {
            MetaRead::read(self, block, |bytes| Box::new(*bytes))?
        };
        let Some(Span { tier, start, .. }) = self.alloc_cold()? else {
            self.moves.full = true;
            return Ok(None);
        };
        let new = BlockNo::on(tier, start);
        if !raw {
            move_block(&mut content, new);
        }
        let sum = sum_of_metadata(crc32c::crc32c(&content[..]));
        self.note_checksums(Span { tier, start, len: 1 }, &[sum])?;
        self.free(block)?;
        self.insert_fresh(new.0, content.into(), raw);
        self.moves.away += 1;
        Ok(Some(new))
    }

    /// Whether a transaction that frees much must leave the rest to another one: what it brought back for that has nearly used up the NVM, and
    /// goes, or can go away again, only after it.
    pub(crate) fn must_pause(&self) -> bool {
        self.moves.back > 0 && self.store.space.lock().nvm_now() < PAUSE_BLOCKS
    }

    /// A block of the inode file, in NVM.
    pub(crate) fn warm_inode_block(&mut self, index: u64, block: BlockNo) -> Result<BlockNo> {
        if !block.is_cold() {
            return Ok(block);
        }
        let new = self.bring_back(block, true)?;
        self.map_inode_block(index, new)?;
        Ok(new)
    }

    fn map_inode_block(&mut self, index: u64, block: BlockNo) -> Result<()> {
        let Some((tier, number)) = block.home() else {
            return Err(StoreError::Damaged(format!(
                "inode file block {block} of no tier"
            )));
        };
        let extent = Extent {
            file_block: FileBlock(index),
            len: 1,
            tier,
            block: BlockNo(number),
            flags: ExtentFlags::empty(),
        };
        let mut root = self.lens().inode_root()?;
        let range = FileBlock(index)..FileBlock(index + 1);
        ExtentTree::of(POOL_INO).replace(self, &mut root, range, &[extent])?;
        // Also when the root has the same counts as before.
        self.inode_file_changed = true;
        self.change_state(|state| state.inode_root.copy_from_slice(root.as_bytes()))
    }

    /// Sends away what hangs on the inodes of a block of the inode file, then the block. False: it was stopped before the end.
    fn cool_at(&mut self, index: u64, more: More<'_>) -> Result<bool> {
        let Some(block) = self.lens().inode_block(index)?.filter(|block| !block.is_cold()) else {
            return Ok(true);
        };
        let mut away = true;
        for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
            if !more(self) {
                return Ok(false);
            }
            away &= self.cool_trees(Ino(ino), more)?;
        }
        if !more(self) {
            return Ok(false);
        }
        if away
            && !self.store.cache.take_used(block)
            && let Some(new) = self.send_away(block, true)?
        {
            self.map_inode_block(index, new)?;
        }
        Ok(true)
    }

    /// Sends away what hangs on an inode; whether all of it is.
    fn cool_trees(&mut self, ino: Ino, more: More<'_>) -> Result<bool> {
        let InodeSlot::Used(old) = self.lens().slot(ino)? else {
            return Ok(true);
        };
        let mut inode = old.clone();
        let mut away = true;
        match &mut inode.content {
            Content::File(root) => {
                let tree = ExtentTree::of(ino);
                *root = tree.cool(self, root, more)?;
                away &= tree.is_away(root)?;
            }
            Content::Dir(root) => {
                let directory = self.lens().directory(ino);
                *root = directory.cool(self, root, more)?;
                away &= directory.is_away(root)?;
            }
            Content::SymlinkBlock(block) if !block.is_cold() => {
                let fits = MetaRead::read(self, *block, |bytes| {
                    BlockHeader::of(bytes).expect(BlockKind::Symlink, ino, *block)
                })?;
                fits.map_err(|fault| StoreError::Block { block: *block, fault })?;
                match self.cool(*block)? {
                    Some(new) => *block = new,
                    None => away = false,
                }
            }
            Content::Symlink(_) | Content::SymlinkBlock(_) => {}
        }
        let xattrs = self.lens().xattrs(ino);
        inode.xattrs = xattrs.cool(self, &inode.xattrs, more)?;
        away &= xattrs.is_away(&inode.xattrs)?;
        if inode != old {
            self.put(&inode)?;
        }
        Ok(away)
    }

    /// Whether the record has room for one more block to go, with what the tier's next unit may need.
    fn spare_room(&mut self) -> bool {
        let mut needed = 2 * OP_ROOM;
        let bound = self.writer.journal.bound();
        if let Some(tier) = [Tier::Ssd, Tier::Hdd]
            .into_iter()
            .find(|tier| self.layout().blocks(*tier) > 0)
        {
            let reopening = self.layout().reopening_bytes(tier);
            if needed + reopening <= bound && self.store.space.lock().is_short_of_units(tier) {
                needed += reopening;
            }
        }
        self.room_at_least(needed) >= needed
    }

    /// The first block of the inode file from `at` on that is in NVM.
    fn next_warm(&self, at: u64, end: u64) -> Result<Option<u64>> {
        let root = self.lens().inode_root()?;
        let mut at = at;
        loop {
            let batch = self.lens().extents(POOL_INO, &root, at, end, 64)?;
            if let Some(found) = batch.iter().find(|extent| extent.tier == Tier::Nvm) {
                return Ok(Some(found.file_block.0));
            }
            match batch.last() {
                Some(last) => at = last.end().0,
                None => return Ok(None),
            }
        }
    }

    /// Goes on from `at` through the inode file; where it came to.
    fn cool_from(&mut self, at: &mut u64, limit: u64, step: &mut Step) -> Result<()> {
        let end = self.lens().state()?.inode_blocks.get();
        if *at >= end {
            *at = 0;
        }
        let more: More<'_> = &mut |core| core.moves.away < limit && !core.moves.full && core.spare_room();
        for _ in 0..STEP_LOOKS {
            let Some(next) = self.next_warm(*at, end)? else {
                step.passed += end - *at;
                *at = 0;
                return Ok(());
            };
            step.passed += next - *at;
            *at = next;
            // A block that cannot be read is left where it is.
            let done = self.cool_at(next, more).inspect_err(|_| *at = next + 1)?;
            if !done {
                return Ok(());
            }
            step.passed += 1;
            *at = next + 1;
        }
        Ok(())
    }
}

impl Store {
    pub(crate) fn count_moves(&self, moves: &Moves) {
        if moves.away > 0 || moves.back > 0 {
            let mut cooling = self.cooling.lock();
            cooling.away += moves.away;
            cooling.back += moves.back;
        }
    }

    /// What metadata has moved between tiers since the pool was opened.
    #[must_use]
    pub fn cooled(&self) -> CoolingStats {
        let cooling = self.cooling.lock();
        CoolingStats {
            away: cooling.away,
            back: cooling.back,
            reads: [Tier::Ssd, Tier::Hdd]
                .map(|tier| self.cache.cold_reads(tier))
                .iter()
                .sum(),
        }
    }

    /// Sends metadata to slower tiers where NVM has little room left for it. Nothing in pools of before format 2, or without a slower tier.
    ///
    /// # Errors
    /// `Latched`, or a device failed. That nothing could go is no error.
    pub fn make_room_for_metadata(&self) -> Result<()> {
        let (left, total) = self.space.lock().nvm();
        if left < total / LOW && self.layout.cools() {
            self.cool_until(total / ENOUGH)?;
        }
        Ok(())
    }

    /// As [`begin`](Self::begin), after room was made for metadata if there was little.
    ///
    /// # Errors
    /// As `begin`.
    pub fn begin_with_room(&self) -> Result<Tx<'_>> {
        for _ in 0..ROOM_ROUNDS {
            self.make_room_for_metadata()?;
            let tx = self.begin()?;
            // Whoever had the turn before may have used it up.
            let (left, total) = self.space.lock().nvm();
            if left >= total / LOW || !self.layout.cools() || self.is_futile() {
                return Ok(tx);
            }
        }
        self.begin()
    }

    /// How many operations may be tried in one transaction, so that the metadata which they change mostly finds room in NVM.
    #[must_use]
    pub fn room_for_ops(&self) -> usize {
        if !self.layout.cools() {
            return usize::MAX;
        }
        let (left, _) = self.space.lock().nvm();
        usize::try_from(left / OP_BLOCKS).unwrap_or(usize::MAX).max(1)
    }

    /// Sends some metadata away before there is too little room; how many blocks. For the background.
    ///
    /// # Errors
    /// `Latched`, or a device failed.
    pub fn cool_ahead(&self) -> Result<u64> {
        let (left, total) = self.space.lock().nvm();
        if left >= total / ENOUGH || !self.layout.cools() || self.is_futile() {
            return Ok(0);
        }
        self.cool_some(STEP_BLOCKS / 4).map(|step| step.moved)
    }

    /// Sends away up to `blocks` blocks of metadata that were not used lately, then of those that were, whatever room there is; how many.
    ///
    /// # Errors
    /// `Latched`, or a device failed.
    pub fn cool(&self, blocks: u64) -> Result<u64> {
        if !self.layout.cools() {
            return Ok(0);
        }
        let (mut moved, mut passed) = (0, 0);
        while moved < blocks {
            let step = self.cool_some((blocks - moved).min(STEP_BLOCKS))?;
            moved += step.moved;
            passed = if step.moved > 0 {
                0
            } else {
                passed + step.passed.max(1)
            };
            if step.moved == 0 && (step.full || self.went_round_twice(passed)?) {
                break;
            }
        }
        Ok(moved)
    }

    fn went_round_twice(&self, passed: u64) -> Result<bool> {
        // Once to see what is not used, once to send it.
        let all = self.snapshot().lens().state()?.inode_blocks.get();
        Ok(passed > 2 * all)
    }

    /// Whether there is little room for metadata, and none could go lately.
    #[must_use]
    pub fn cools_in_vain(&self) -> bool {
        let (left, total) = self.space.lock().nvm();
        left < total / LOW && self.layout.cools() && self.is_futile()
    }

    fn is_futile(&self) -> bool {
        let (newest, room) = (self.newest_tx(), self.space.lock().slower_room());
        let futile = self.cooling.lock().futile;
        futile.is_some_and(|futile| newest < futile.until && room <= futile.room)
    }

    /// Nothing can go now. What full tiers had is little enough that those who free space must find it there: for each block that comes back to
    /// NVM to be changed another one can go.
    fn note_futile(&self, full: bool) {
        let room = if full {
            self.space.lock().slower_room()
        } else {
            u64::MAX
        };
        let until = TxId(self.newest_tx().0 + FUTILE_TX);
        self.cooling.lock().futile = Some(Futile { until, room });
        tracing::debug!("no metadata can go to a slower tier now");
    }

    /// Sends metadata away until so many blocks of NVM are left for it, or nothing can go any more.
    fn cool_until(&self, enough: u64) -> Result<()> {
        if self.is_futile() {
            return Ok(());
        }
        let (mut passed, mut released) = (0, false);
        while self.space.lock().nvm().0 < enough {
            let step = self.cool_some(STEP_BLOCKS)?;
            if step.moved > 0 {
                passed = 0;
                continue;
            }
            // At least one, so that it ends whatever happens.
            passed += step.passed.max(1);
            if !step.full && !self.went_round_twice(passed)? {
                continue;
            }
            // What came back from the slower tiers may only wait for the journal there.
            if released || !self.space.lock().waits_for_tail() {
                self.note_futile(step.full);
                return Ok(());
            }
            self.checkpoint()?;
            (passed, released) = (0, true);
        }
        self.cooling.lock().futile = None;
        Ok(())
    }

    /// One transaction that sends metadata away, at most `limit` blocks.
    fn cool_some(&self, limit: u64) -> Result<Step> {
        let mut step = Step::default();
        let mut at = self.cooling.lock().hand;
        let mut tx = self.begin()?;
        tx.core.moves.cooling = true;
        let cooled = tx.core.cool_from(&mut at, limit, &mut step);
        (step.moved, step.full) = (tx.core.moves.away, tx.core.moves.full);
        let ended = cooled.and_then(|()| tx.commit().map(drop));
        self.cooling.lock().hand = at;
        match ended {
            Ok(()) => Ok(step),
            Err(error) => {
                step.moved = 0;
                if error.is_no_space() {
                    step.full = true;
                    return Ok(step);
                }
                if error.stops_writing() {
                    self.latch_on(&error);
                    return Err(error);
                }
                // What cannot be read stays where it is; the hand has passed it.
                tracing::warn!(%error, "metadata is left in NVM");
                self.note_damage(&error);
                step.passed += 1;
                Ok(step)
            }
        }
    }
}
