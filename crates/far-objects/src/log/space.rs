//! Which blocks of the log are in use, with how many live bytes, and where each lies on the device.
//!
//! Pure records. A block's number stays while its bytes go to another place of the device, as they do when a
//! place cannot be written; locations name blocks by number.

use crate::layout::BLOCK_PAYLOAD_BYTES;
use std::collections::{BTreeSet, HashSet, VecDeque};

/// Blocks that are in no sum of what may be allocated: two being filled, two being written, two of the
/// cleaner,
/// two to spare.
pub(crate) const RESERVED_BLOCKS: u64 = 8;

/// Levels of live bytes among which the cleaner chooses.
const LEVEL_BYTES: u32 = 2048;
/// Blocks with the fewest live bytes, of which the cleaner takes one.
const CANDIDATES: usize = 256;
/// Blocks among which it looks for one that no checkpoint needs.
const NEW_LOOKS: usize = 4096;

/// What becomes of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Not in use.
    Free,
    /// Being filled in memory.
    Open,
    /// Full, and not yet on the device.
    Pending,
    /// On the device.
    Sealed,
    /// On the device, and being cleaned.
    Cleaning,
    /// On the device, where some of it cannot be read. Never used again.
    Retired,
}

/// One block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) state: BlockState,
    /// Part of the checksums of its objects.
    pub(crate) sequence: u32,
    /// Bytes of objects, with headers, that a table points at.
    pub(crate) live_bytes: u32,
    /// Number of its place on the device, where the state has one.
    pub(crate) place: u32,
    /// Cuts that were made when it was begun; one less for a checkpoint's own. A cut that was made later may
    /// need what is in it.
    pub(crate) born: u32,
}

/// A place that the last complete checkpoint may need, or the one that is being written.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Cuts that were made when it was freed.
    freed: u32,
    /// The block that had it; `None` for a part of a checkpoint's tables.
    block: Option<(u32, Block)>,
    place: u32,
}

impl Block {
    fn level(&self) -> u32 {
        self.live_bytes / LEVEL_BYTES
    }
}

/// All blocks.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    all: Vec<Block>,
    free_numbers: Vec<u32>,
    free_places: VecDeque<u32>,
    /// Sealed blocks by level.
    sealed: BTreeSet<(u32, u32)>,
    retired: u64,
    sequence: u32,
    /// Cuts of checkpoints.
    epoch: u32,
    /// What was begun before this cut is needed: by its checkpoint, which is being written, or whose root may
    /// be in the file.
    needed: u32,
    /// The last cut whose root may be in the file.
    rooted: u32,
    held: VecDeque<Held>,
    #[cfg(test)]
    holds_nothing: bool,
}

impl Blocks {
    /// Adds places that the device has.
    pub(crate) fn add_places(&mut self, places: std::ops::Range<u32>) {
        self.free_places.extend(places);
    }

    /// Places that hold nothing. Open and pending blocks need one each.
    pub(crate) fn free_places(&self) -> usize {
        self.free_places.len()
    }

    /// Places and blocks that are not used again.
    pub(crate) fn retired(&self) -> u64 {
        self.retired
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Block> {
        self.all.get(number as usize)
    }

    #[cfg(test)]
    pub(crate) fn hold_nothing(&mut self) {
        self.holds_nothing = true;
    }

    #[cfg(test)]
    fn holds(&self, block: &Block) -> bool {
        block.born < self.needed && !self.holds_nothing
    }

    #[cfg(not(test))]
    fn holds(&self, block: &Block) -> bool {
        block.born < self.needed
    }

    /// A cut: what was begun before may be needed by its checkpoint.
    pub(crate) fn cut(&mut self) {
        self.epoch += 1;
        self.needed = self.epoch;
    }

    /// The root of the last cut is about to be written.
    pub(crate) fn root(&mut self) {
        self.rooted = self.epoch;
    }

    /// The checkpoint of the last cut failed. Where its root was not written, what it alone needs is free.
    /// `places` are those of its tables.
    pub(crate) fn abandon(&mut self, places: &[u32]) {
        self.needed = self.rooted;
        if self.rooted == self.epoch {
            places.iter().for_each(|place| self.hold_place(*place));
            return;
        }
        self.free_places.extend(places);
        let held = std::mem::take(&mut self.held);
        for held in held {
            match held.block {
                Some((number, block)) if block.born >= self.needed => {
                    self.free_places.push_back(held.place);
                    self.free_numbers.push(number);
                }
                _ => self.held.push_back(held),
            }
        }
    }

    pub(crate) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Places that are free but for checkpoints.
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// Keeps a place of a checkpoint's tables until the next checkpoint is complete.
    pub(crate) fn hold_place(&mut self, place: u32) {
        self.held.push_back(Held {
            freed: self.epoch,
            block: None,
            place,
        });
    }

    /// The checkpoint of the last cut is complete: what only earlier ones need is free.
    pub(crate) fn commit(&mut self) {
        while let Some(held) = self.held.front().copied().filter(|held| held.freed < self.epoch) {
            self.held.pop_front();
            self.free_places.push_back(held.place);
            if let Some((number, _)) = held.block {
                self.free_numbers.push(number);
            }
        }
    }

    /// Blocks that the last cut may need and that are not on the device yet.
    pub(crate) fn has_unwritten(&self) -> bool {
        let is_waiting = |block: &Block| {
            block.born < self.epoch && matches!(block.state, BlockState::Open | BlockState::Pending)
        };
        self.all.iter().any(is_waiting)
    }

    /// Calls `each` with the blocks that the last cut may need and that were begun at the cut `since` or
    /// later.
    pub(crate) fn for_each_needed(&self, since: u32, mut each: impl FnMut(u32, &Block)) {
        let is_needed = |block: &Block| block.born < self.epoch && block.born >= since;
        for (number, block) in self.all.iter().enumerate() {
            if block.state != BlockState::Free && is_needed(block) {
                each(number as u32, block);
            }
        }
        let freed = self.held.iter().filter(|held| held.freed == self.epoch);
        for (number, block) in freed.filter_map(|held| held.block) {
            if is_needed(&block) {
                each(number, &block);
            }
        }
    }

    /// Puts blocks in place as a checkpoint says: sealed, by number, with their live bytes. All other places
    /// of `places` are free but for those of `taken`.
    pub(crate) fn restore(
        &mut self,
        blocks: Vec<(u32, Block)>,
        places: u32,
        taken: &HashSet<u32>,
        epoch: u32,
        sequence: u32,
    ) {
        let len = blocks.iter().map(|(number, _)| *number as usize + 1).max();
        let free = Block {
            state: BlockState::Free,
            sequence: 0,
            live_bytes: 0,
            place: 0,
            born: 0,
        };
        self.all = vec![free; len.unwrap_or(0)];
        (self.epoch, self.needed, self.rooted) = (epoch, epoch, epoch);
        self.sequence = sequence;
        let mut used: HashSet<u32> = taken.clone();
        for (number, block) in blocks {
            used.insert(block.place);
            self.all[number as usize] = Block {
                born: epoch.saturating_sub(1),
                ..block
            };
            self.settle(number, None);
        }
        let numbers = 0..self.all.len() as u32;
        self.free_numbers = numbers
            .filter(|number| self.all[*number as usize].state == BlockState::Free)
            .collect();
        self.free_places = (0..places).filter(|place| !used.contains(place)).collect();
    }

    /// Starts a block, with nothing in it. One of a checkpoint belongs to the last cut.
    pub(crate) fn begin(&mut self, is_of_checkpoint: bool) -> (u32, u32) {
        self.sequence = self.sequence.wrapping_add(1);
        let block = Block {
            state: BlockState::Open,
            sequence: self.sequence,
            live_bytes: 0,
            place: 0,
            born: if is_of_checkpoint {
                self.epoch.saturating_sub(1)
            } else {
                self.epoch
            },
        };
        let number = match self.free_numbers.pop() {
            Some(number) => {
                self.all[number as usize] = block;
                number
            }
            None => {
                self.all.push(block);
                (self.all.len() - 1) as u32
            }
        };
        (number, self.sequence)
    }

    /// The next place to write to, the one that is free for longest.
    pub(crate) fn take_place(&mut self) -> Option<u32> {
        self.free_places.pop_front()
    }

    /// A place that took no bytes, back to be tried later.
    pub(crate) fn return_place(&mut self, place: u32) {
        self.free_places.push_back(place);
    }

    /// A place that failed where another did not.
    pub(crate) fn retire_place(&mut self) {
        self.retired += 1;
    }

    pub(crate) fn pend(&mut self, number: u32) {
        self.all[number as usize].state = BlockState::Pending;
    }

    /// The block is on the device. One without live bytes is free at once.
    pub(crate) fn seal(&mut self, number: u32, place: u32) {
        let block = &mut self.all[number as usize];
        block.place = place;
        block.state = BlockState::Sealed;
        self.settle(number, None);
    }

    pub(crate) fn add_live(&mut self, number: u32, bytes: usize) {
        let block = &mut self.all[number as usize];
        debug_assert!(block.state == BlockState::Open);
        block.live_bytes += bytes as u32;
    }

    /// An object of the block is garbage from now on.
    pub(crate) fn kill(&mut self, number: u32, bytes: usize) {
        let Some(block) = self.all.get_mut(number as usize) else {
            debug_assert!(false, "block {number} is not there");
            return;
        };
        let before = block.level();
        debug_assert!(block.live_bytes as usize >= bytes);
        block.live_bytes = block.live_bytes.saturating_sub(bytes as u32);
        if block.state == BlockState::Sealed {
            self.settle(number, Some(before));
        }
    }

    /// Puts a sealed block where its live bytes say.
    fn settle(&mut self, number: u32, before: Option<u32>) {
        let block = self.all[number as usize];
        if block.live_bytes != 0 && before == Some(block.level()) {
            return;
        }
        if let Some(level) = before {
            self.sealed.remove(&(level, number));
        }
        if block.live_bytes == 0 {
            self.free(number);
        } else {
            self.sealed.insert((block.level(), number));
        }
    }

    fn free(&mut self, number: u32) {
        let block = &mut self.all[number as usize];
        let before = *block;
        block.state = BlockState::Free;
        if self.holds(&before) {
            self.held.push_back(Held {
                freed: self.epoch,
                block: Some((number, before)),
                place: before.place,
            });
            return;
        }
        self.free_places.push_back(before.place);
        self.free_numbers.push(number);
    }

    /// The sealed block to clean: of those with fewest live bytes, the one with the largest product of free
    /// bytes and age, over what is moved (Rosenblum and Ousterhout, section 3.5). It gains at least a quarter of
    /// what the emptiest would, so that cleaning gets on. `None` if nothing is gained.
    /// With `is_new_only`, only one whose place is free at once afterwards, and not held for a checkpoint.
    pub(crate) fn take_victim(&mut self, is_new_only: bool) -> Option<(u32, Block)> {
        let free_bytes = |number: u32| BLOCK_PAYLOAD_BYTES as u32 - self.all[number as usize].live_bytes;
        let may_be = |number: u32| !is_new_only || !self.holds(&self.all[number as usize]);
        let mut candidates = self
            .sealed
            .iter()
            .take(if is_new_only { NEW_LOOKS } else { CANDIDATES });
        let &(_, emptiest) = candidates.clone().find(|(_, number)| may_be(*number))?;
        let least = (free_bytes(emptiest) / 4).max(LEVEL_BYTES);
        let &(level, number) = candidates
            .by_ref()
            .filter(|(_, number)| may_be(*number) && free_bytes(*number) >= least)
            .max_by_key(|(_, number)| self.gain(*number))?;
        let block = &mut self.all[number as usize];
        block.state = BlockState::Cleaning;
        let block = *block;
        self.sealed.remove(&(level, number));
        Some((number, block))
    }

    /// Benefit over cost of cleaning a block, with age in blocks that were started since.
    fn gain(&self, number: u32) -> u64 {
        let block = &self.all[number as usize];
        let age = u64::from(self.sequence.wrapping_sub(block.sequence));
        let whole = BLOCK_PAYLOAD_BYTES as u64;
        let live = u64::from(block.live_bytes).min(whole);
        // Fewer than 2^32 blocks of less than 2^17 bytes: no overflow.
        age * (whole - live) * 1024 / (whole + live)
    }

    /// A sealed block with the most live bytes.
    pub(crate) fn fullest(&self) -> Option<&Block> {
        let (_, number) = self.sealed.last()?;
        self.get(*number)
    }

    /// Gives up cleaning a block, for later.
    pub(crate) fn resume(&mut self, number: u32) {
        self.all[number as usize].state = BlockState::Sealed;
        self.settle(number, None);
    }

    /// Ends the cleaning of a block. False if something in it is still live, which is left where it is.
    pub(crate) fn end_cleaning(&mut self, number: u32) -> bool {
        let block = &mut self.all[number as usize];
        debug_assert!(block.state == BlockState::Cleaning);
        if block.live_bytes == 0 {
            self.free(number);
            return true;
        }
        block.state = BlockState::Retired;
        self.retired += 1;
        false
    }

    /// Live bytes of all blocks.
    pub(crate) fn live_bytes(&self) -> u64 {
        let used = self.all.iter().filter(|block| block.state != BlockState::Free);
        used.map(|block| u64::from(block.live_bytes)).sum()
    }

    /// Memory that the records of one more block take: the block, two free lists, a node's share.
    pub(crate) const BLOCK_MEMORY_BYTES: u64 = 64;
}
