//! Metadata on slower tiers: the choice of blocks to demote, their demotion and their promotion. Decides
//! nothing about data.
//!
//! A demoted block is written to the data space of SSD or HDD unchanged except for its own number, and the
//! pointer to it changes in the same transaction. So it is durable before the record that names it, and its
//! old place is free after that. The tier's checksum table holds the complement of its checksum, which
//! distinguishes it from data. It is read in place, and promoted to NVM to be changed. Children are demoted
//! before their parents, and a block of the inode file after everything below its inodes: so a demoted block
//! never points to NVM.
//!
//! A clock hand that moves through the inode file chooses the blocks to demote; it leaves blocks that were
//! used since its last pass.

use crate::pool::Store;
use crate::pool::demotion_state::Futile;
use crate::reader::POOL_INO;
use crate::tx::TxState;
use crate::{OP_ROOM, Result, StoreError, Tx};
use serde::{Deserialize, Serialize};
use varve_extent_tree::{ExtentTree, MetaIo, MetaRead};
use varve_format::inode::{Content, INODES_PER_BLOCK, InodeSlot};
use varve_format::{BlockHeader, BlockKind, Ino, Tier, TxId};

/// If less than this part of the NVM (1/32) is left for metadata, room is made before other work…
const LOW: u64 = 32;
/// …until this part (1/16) is left; below it, room is made in the background.
const ENOUGH: u64 = 16;
/// Maximum number of blocks that one transaction demotes.
const STEP_BLOCKS: u64 = 1024;
/// Maximum number of blocks of the inode file that one transaction examines.
const STEP_LOOKS: u64 = 1024;
/// Transactions before the next attempt after no block could be demoted.
const FUTILE_TX: u64 = 64;
/// Attempts to make room for one transaction, while others use it up.
const ROOM_ROUNDS: usize = 16;
/// Estimated blocks of NVM that an operation of a batch takes; the store decides in the end.
const OP_BLOCKS: u64 = 2;

/// Movement of metadata between tiers, in blocks, since the pool was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DemotionStats {
    /// Blocks demoted to slower tiers.
    pub away: u64,
    /// Blocks promoted to NVM to be changed.
    pub back: u64,
    /// Blocks read from slower tiers.
    pub reads: u64,
}

/// The result of a transaction that demotes metadata.
#[derive(Debug, Default)]
struct Step {
    moved: u64,
    /// Blocks of the inode file that the hand has passed.
    passed: u64,
    full: bool,
}

/// Called before each block; returns whether to continue.
type More<'m> = &'m mut dyn FnMut(&mut TxState<'_>) -> bool;

impl TxState<'_> {
    /// Demotes everything below the inodes of a block of the inode file, then the block itself. Returns false
    /// if it was stopped before the end.
    fn demote_at(&mut self, index: u64, more: More<'_>) -> Result<bool> {
        let Some(block) = self.reader().inode_block(index)?.filter(|block| !block.is_cold()) else {
            return Ok(true);
        };
        let mut away = true;
        for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
            if !more(self) {
                return Ok(false);
            }
            away &= self.demote_trees(Ino(ino), more)?;
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

    /// Demotes everything below an inode; returns whether all of it is demoted.
    fn demote_trees(&mut self, ino: Ino, more: More<'_>) -> Result<bool> {
        let InodeSlot::Used(old) = self.reader().slot(ino)? else {
            return Ok(true);
        };
        let mut inode = old.clone();
        let mut away = true;
        match &mut inode.content {
            Content::File(root) => {
                let tree = ExtentTree::of(ino);
                *root = tree.demote(self, root, more)?;
                away &= tree.is_away(root)?;
            }
            Content::Dir(root) => {
                let directory = self.reader().directory(ino);
                *root = directory.demote(self, root, more)?;
                away &= directory.is_away(root)?;
            }
            Content::SymlinkBlock(block) if !block.is_cold() => {
                let fits = MetaRead::read(self, *block, |bytes| {
                    BlockHeader::of(bytes).expect(BlockKind::Symlink, ino, *block)
                })?;
                fits.map_err(|fault| StoreError::Block { block: *block, fault })?;
                match self.demote(*block)? {
                    Some(new) => *block = new,
                    None => away = false,
                }
            }
            Content::Symlink(_) | Content::SymlinkBlock(_) => {}
        }
        let xattrs = self.reader().xattrs(ino);
        inode.xattrs = xattrs.demote(self, &inode.xattrs, more)?;
        away &= xattrs.is_away(&inode.xattrs)?;
        if inode != old {
            self.put(&inode)?;
        }
        Ok(away)
    }

    /// Returns whether the record has room for one more demoted block, and for the tier's next unit.
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

    /// Returns the first block of the inode file from `at` on that is in NVM.
    fn next_warm(&self, at: u64, end: u64) -> Result<Option<u64>> {
        let root = self.reader().inode_root()?;
        let mut at = at;
        loop {
            let batch = self.reader().extents(POOL_INO, &root, at, end, 64)?;
            if let Some(found) = batch.iter().find(|extent| extent.tier == Tier::Nvm) {
                return Ok(Some(found.file_block.0));
            }
            match batch.last() {
                Some(last) => at = last.end().0,
                None => return Ok(None),
            }
        }
    }

    /// Demotes blocks of the inode file from `at` on, and sets `at` to the position reached.
    fn demote_from(&mut self, at: &mut u64, limit: u64, step: &mut Step) -> Result<()> {
        let end = self.reader().state()?.inode_blocks.get();
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
            // An unreadable block stays where it is.
            let done = self.demote_at(next, more).inspect_err(|_| *at = next + 1)?;
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
    /// Returns the amount of metadata moved between tiers since the pool was opened.
    #[must_use]
    pub fn demotion_stats(&self) -> DemotionStats {
        let demoting = self.demotion.lock();
        DemotionStats {
            away: demoting.away,
            back: demoting.back,
            reads: [Tier::Ssd, Tier::Hdd]
                .map(|tier| self.cache.cold_reads(tier))
                .iter()
                .sum(),
        }
    }

    /// Demotes metadata to slower tiers if NVM has little room left for it. Does nothing in pools older than
    /// format 2, or without a slower tier.
    ///
    /// # Errors
    /// `Latched`, or a device failed. It is no error if no block could be demoted.
    pub fn make_room_for_metadata(&self) -> Result<()> {
        let (left, total) = self.space.lock().nvm();
        if left < total / LOW && self.layout.demotes() {
            self.demote_until(total / ENOUGH)?;
        }
        Ok(())
    }

    /// As [`begin`](Self::begin), after making room for metadata if there is little.
    ///
    /// # Errors
    /// As `begin`.
    pub fn begin_with_room(&self) -> Result<Tx<'_>> {
        for _ in 0..ROOM_ROUNDS {
            self.make_room_for_metadata()?;
            let tx = self.begin()?;
            // The transaction before this one may have used the room up.
            let (left, total) = self.space.lock().nvm();
            if left >= total / LOW || !self.layout.demotes() || self.is_futile() {
                return Ok(tx);
            }
        }
        self.begin()
    }

    /// Returns the number of operations to try in one transaction, such that NVM mostly has room for the
    /// metadata that they change.
    #[must_use]
    pub fn room_for_ops(&self) -> usize {
        if !self.layout.demotes() {
            return usize::MAX;
        }
        let (left, _) = self.space.lock().nvm();
        usize::try_from(left / OP_BLOCKS).unwrap_or(usize::MAX).max(1)
    }

    /// Demotes some metadata before room becomes too scarce; returns the number of blocks. For the
    /// background.
    ///
    /// # Errors
    /// `Latched`, or a device failed.
    pub fn demote_ahead(&self) -> Result<u64> {
        let (left, total) = self.space.lock().nvm();
        if left >= total / ENOUGH || !self.layout.demotes() || self.is_futile() {
            return Ok(0);
        }
        self.demote_some(STEP_BLOCKS / 4, true).map(|step| step.moved)
    }

    /// Demotes up to `blocks` blocks of metadata, those not used recently first, regardless of the free room;
    /// returns their number.
    ///
    /// # Errors
    /// `Latched`, or a device failed.
    pub fn demote(&self, blocks: u64) -> Result<u64> {
        if !self.layout.demotes() {
            return Ok(0);
        }
        let (mut moved, mut passed) = (0, 0);
        while moved < blocks {
            let step = self.demote_some((blocks - moved).min(STEP_BLOCKS), false)?;
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
        // One round to clear the marks of use, one to demote.
        let all = self.snapshot().reader().state()?.inode_blocks.get();
        Ok(passed > 2 * all)
    }

    /// Returns whether there is little room for metadata, and no block could be demoted recently.
    #[must_use]
    pub fn demotes_in_vain(&self) -> bool {
        let (left, total) = self.space.lock().nvm();
        left < total / LOW && self.layout.demotes() && self.is_futile()
    }

    fn is_futile(&self) -> bool {
        let (newest, room) = (self.newest_tx(), self.space.lock().slower_room());
        let futile = self.demotion.lock().futile;
        futile.is_some_and(|futile| newest < futile.until && room <= futile.room)
    }

    /// Notes that no block can be demoted at present. If the slower tiers are full, their room is recorded,
    /// and the pause ends as soon as they have more: each block promoted to NVM to be changed leaves its
    /// place there to another one.
    fn note_futile(&self, full: bool) {
        let room = if full {
            self.space.lock().slower_room()
        } else {
            u64::MAX
        };
        let until = TxId(self.newest_tx().0 + FUTILE_TX);
        self.demotion.lock().futile = Some(Futile { until, room });
        tracing::debug!("no metadata can go to a slower tier now");
    }

    /// Demotes metadata until `enough` blocks of NVM are left for it, or no more can be demoted.
    fn demote_until(&self, enough: u64) -> Result<()> {
        if self.is_futile() {
            return Ok(());
        }
        let (mut passed, mut released) = (0, false);
        while self.space.lock().nvm().0 < enough {
            let step = self.demote_some(STEP_BLOCKS, false)?;
            if step.moved > 0 {
                passed = 0;
                continue;
            }
            // At least one, so that the loop always ends.
            passed += step.passed.max(1);
            if !step.full && !self.went_round_twice(passed)? {
                continue;
            }
            // Blocks promoted from the slower tiers may still occupy space there until the journal's tail
            // moves.
            if released || !self.space.lock().waits_for_tail() {
                self.note_futile(step.full);
                return Ok(());
            }
            self.checkpoint()?;
            (passed, released) = (0, true);
        }
        self.demotion.lock().futile = None;
        Ok(())
    }

    /// Runs one transaction that demotes metadata, at most `limit` blocks; `ahead` of need it goes to no tier
    /// that is evacuated.
    fn demote_some(&self, limit: u64, ahead: bool) -> Result<Step> {
        let mut step = Step::default();
        let mut at = self.demotion.lock().hand;
        let mut tx = self.begin()?;
        tx.core.moves.demoting = true;
        tx.core.moves.ahead = ahead;
        let cooled = tx.core.demote_from(&mut at, limit, &mut step);
        (step.moved, step.full) = (tx.core.moves.away, tx.core.moves.full);
        let ended = cooled.and_then(|()| tx.commit().map(drop));
        self.demotion.lock().hand = at;
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
                // An unreadable block stays where it is; the hand has passed it.
                tracing::warn!(%error, "metadata is left in NVM");
                self.note_damage(&error);
                step.passed += 1;
                Ok(step)
            }
        }
    }
}
