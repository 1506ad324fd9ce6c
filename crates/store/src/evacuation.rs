//! Jobs that empty a tier, or one device of it: their rows in the pool state and after it, and the way back to
//! NVM of metadata that lies there. Moves no data, and decides nothing.
//!
//! While a tier has a job, it takes new blocks only when no other tier has room. A row changes with the
//! transaction that moves data, so what it says was moved is exact, whatever a crash cuts off.

use crate::pool::Store;
use crate::tx::TxState;
use crate::{Emptied, JobRow, OP_ROOM, Result, StoreError, Tx};
use std::ops::Range;
use varve_extent_tree::{ExtentTree, MetaRead, Recall};
use varve_format::inode::{Content, INODES_PER_BLOCK, InodeSlot};
use varve_format::state::EvacuationRow;
use varve_format::{BlockHeader, BlockKind, BlockNo, Ino, Tier, TimeNs};
use zerocopy::little_endian::{I64, U64};

/// Metadata comes back to NVM while at least this part of it (1/16) is left for metadata…
const ENOUGH: u64 = 16;
/// …and at most this part (1/64) in one transaction, so that none is demoted because of it at once.
const STEP: u64 = 64;
/// Most blocks of the inode file that one transaction examines.
const STEP_LOOKS: u64 = 256;
/// Blocks of NVM that a transaction leaves.
const SPARE_BLOCKS: u64 = 16;

/// What became of a step of [`Store::recall_metadata`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recalled {
    /// Blocks that came back to NVM.
    pub moved: u64,
    /// The last inode was passed.
    pub over: bool,
    /// NVM has no room for more.
    pub full: bool,
    /// Blocks of the inode file with metadata that cannot be read, and stays.
    pub damaged: u64,
}

impl Store {
    /// Returns all jobs: of tiers, then of devices.
    ///
    /// # Errors
    /// The pool state or the device rows cannot be read.
    pub fn jobs(&self) -> Result<Vec<JobRow>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let rows = reader.state()?.evacuations;
        let of_tier = |(tier, row): (Tier, EvacuationRow)| JobRow {
            of: Emptied::Tier(tier),
            row,
        };
        let tiers = Tier::ALL.into_iter().zip(rows).filter(|(_, row)| row.is_job());
        let mut jobs: Vec<JobRow> = tiers.map(of_tier).collect();
        jobs.extend(self.removals_in(&reader)?.into_iter().map(|(_, job)| job));
        Ok(jobs)
    }

    /// Returns the job that evacuates each tier; rows without a job are not [`EvacuationRow::is_job`].
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn evacuations(&self) -> Result<[EvacuationRow; 3]> {
        Ok(self.snapshot().reader().state()?.evacuations)
    }

    /// Starts a job that evacuates a tier; returns its number, which no job of the pool had before. Durable
    /// when this returns.
    ///
    /// # Errors
    /// `Exists` if the tier has one; `Invalid` for NVM, or a tier that the pool does not have.
    pub fn start_evacuation(&self, tier: Tier, now_ns: TimeNs) -> Result<u64> {
        if tier == Tier::Nvm || self.layout.blocks(tier) == 0 {
            return Err(StoreError::Invalid("a tier that cannot be evacuated"));
        }
        let mut job = 0;
        self.change_evacuations(&mut |last, rows| {
            let row = &mut rows[tier as usize];
            if row.is_job() {
                return Err(StoreError::Exists);
            }
            job = *last + 1;
            *last = job;
            *row = EvacuationRow {
                job: U64::new(job),
                started_ns: I64::new(now_ns),
                ..EvacuationRow::default()
            };
            Ok(())
        })?;
        Ok(job)
    }

    /// Changes the row of a job; a row with number 0 ends it, of a tier (of a device
    /// [`cancel_emptying`](Self::cancel_emptying) does). Durable when this returns.
    ///
    /// # Errors
    /// `NotFound` if there is no such job.
    pub fn change_evacuation(&self, job: u64, change: &mut dyn FnMut(&mut EvacuationRow)) -> Result<()> {
        let is_it = |row: &EvacuationRow| row.is_job() && row.job.get() == job;
        if self
            .jobs()?
            .iter()
            .any(|job| is_it(&job.row) && matches!(job.of, Emptied::Device { .. }))
        {
            return self.change_removal(job, change);
        }
        self.change_evacuations(&mut |_, rows| {
            let row = rows.iter_mut().find(|row| is_it(row));
            change(row.ok_or(StoreError::NotFound)?);
            Ok(())
        })
    }

    fn change_evacuations(
        &self,
        change: &mut dyn FnMut(&mut u64, &mut [EvacuationRow; 3]) -> Result<()>,
    ) -> Result<()> {
        let mut tx = self.begin()?;
        let rows = tx.guard(|core| {
            let mut state = core.reader().state()?;
            let mut last = state.last_job.get();
            change(&mut last, &mut state.evacuations)?;
            state.last_job = U64::new(last);
            core.set_state(&state)?;
            Ok(state.evacuations)
        })?;
        tx.commit()?;
        self.space.lock().avoid(rows.map(|row| row.is_job()));
        Ok(())
    }

    /// Brings metadata on a tier back to NVM, at most `blocks` blocks in one transaction, of the inodes in
    /// the block of the inode file with number `at` and of those after it; sets `at` to where to go on. Which
    /// tier it goes to when it is demoted again is the allocator's matter.
    ///
    /// # Errors
    /// `Latched`, or a device failed. Metadata that cannot be read stays.
    pub fn recall_metadata(&self, tier: Tier, at: &mut u64, blocks: u64) -> Result<Recalled> {
        self.recall_metadata_of(tier, 0..u64::MAX, at, blocks)
    }

    /// As [`recall_metadata`](Self::recall_metadata), of the metadata in blocks with these numbers.
    ///
    /// # Errors
    /// As `recall_metadata`.
    pub fn recall_metadata_of(
        &self,
        tier: Tier,
        numbers: Range<u64>,
        at: &mut u64,
        blocks: u64,
    ) -> Result<Recalled> {
        let (left, total) = self.space.lock().nvm();
        if left < total / ENOUGH {
            return Ok(Recalled {
                full: true,
                ..Recalled::default()
            });
        }
        let limit = blocks.min(total / STEP).max(1);
        let mut tx = self.begin()?;
        tx.core.moves.demoting = true;
        let recalled = tx.core.recall_from((tier, &numbers), at, limit);
        let moved = tx.core.moves.back;
        let ended = recalled.and_then(|over| {
            tx.commit()?;
            Ok(over)
        });
        match ended {
            Ok(over) => Ok(Recalled {
                moved,
                over,
                ..Recalled::default()
            }),
            Err(error) if error.is_no_space() => Ok(Recalled {
                full: true,
                ..Recalled::default()
            }),
            Err(error) if error.stops_writing() => {
                self.latch_on(&error);
                Err(error)
            }
            Err(error) => {
                tracing::warn!(%error, tier = tier.name(), "metadata is left there");
                self.note_damage(&error);
                *at += 1;
                Ok(Recalled {
                    damaged: 1,
                    ..Recalled::default()
                })
            }
        }
    }
}

impl Tx<'_> {
    /// Counts bytes of data that this transaction moves for the job that empties a tier or a device.
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn note_evacuated(&mut self, of: Emptied, bytes: u64) -> Result<()> {
        let count = |row: &mut EvacuationRow| {
            if row.is_job() {
                row.moved_bytes = U64::new(row.moved_bytes.get().saturating_add(bytes));
            }
        };
        self.guard(|core| match of {
            Emptied::Tier(tier) => core.change_state(|state| count(&mut state.evacuations[tier as usize])),
            Emptied::Device { .. } => core.count_removed(of, &count),
        })
    }
}

impl TxState<'_> {
    /// Returns whether the last inode was passed.
    fn recall_from(&mut self, from: (Tier, &Range<u64>), at: &mut u64, limit: u64) -> Result<bool> {
        let end = self.reader().state()?.inode_blocks.get();
        for _ in 0..STEP_LOOKS {
            if *at >= end {
                *at = 0;
                return Ok(true);
            }
            if !self.recall_at(from, *at, limit)? {
                return Ok(false);
            }
            *at += 1;
        }
        Ok(false)
    }

    /// Brings what lies on a tier back of one block of the inode file, and of its inodes. Returns false if it
    /// was stopped before the end.
    fn recall_at(&mut self, from: (Tier, &Range<u64>), index: u64, limit: u64) -> Result<bool> {
        let (tier, numbers) = from;
        let wants = |block: BlockNo| {
            let home = block.home();
            home.is_some_and(|(home, number)| home == tier && numbers.contains(&number))
        };
        let mut stopped = false;
        let mut more = |core: &mut Self| {
            let goes_on = core.moves.back < limit
                && core.room_at_least(2 * OP_ROOM) >= 2 * OP_ROOM
                && core.store.space.lock().nvm_now() > SPARE_BLOCKS;
            stopped |= !goes_on;
            goes_on
        };
        let Some(block) = self.reader().inode_block(index)? else {
            return Ok(true);
        };
        if wants(block) {
            if !more(self) {
                return Ok(false);
            }
            self.warm_inode_block(index, block)?;
        }
        let mut recall = Recall {
            wants: &wants,
            more: &mut more,
        };
        for ino in (index * INODES_PER_BLOCK).max(1)..(index + 1) * INODES_PER_BLOCK {
            self.recall_trees(Ino(ino), &mut recall)?;
        }
        Ok(!stopped)
    }

    /// Brings what lies below an inode back.
    fn recall_trees(&mut self, ino: Ino, recall: &mut Recall<'_, Self>) -> Result<()> {
        let InodeSlot::Used(old) = self.reader().slot(ino)? else {
            return Ok(());
        };
        let mut inode = old.clone();
        match &mut inode.content {
            Content::File(root) => *root = ExtentTree::of(ino).recall(self, root, recall)?,
            Content::Dir(root) => *root = self.reader().directory(ino).recall(self, root, recall)?,
            Content::SymlinkBlock(block) if (recall.wants)(*block) && (recall.more)(self) => {
                let fits = MetaRead::read(self, *block, |bytes| {
                    BlockHeader::of(bytes).expect(BlockKind::Symlink, ino, *block)
                })?;
                fits.map_err(|fault| StoreError::Block { block: *block, fault })?;
                *block = self.bring_back(*block, false)?;
            }
            Content::Symlink(_) | Content::SymlinkBlock(_) => {}
        }
        inode.xattrs = self.reader().xattrs(ino).recall(self, &inode.xattrs, recall)?;
        if inode != old {
            self.put(&inode)?;
        }
        Ok(())
    }
}
