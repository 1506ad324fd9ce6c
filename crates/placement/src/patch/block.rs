//! One partly overwritten block. Owns its patches and the list of patches that a change removes; decides
//! nothing.

use std::ops::Range;

/// Bytes that were written over a block.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Patch {
    /// Number of its newest write. Grows from write to write.
    pub seq: u64,
    /// First byte within the block.
    pub from: u32,
    /// The bytes; never empty.
    pub bytes: Vec<u8>,
}

impl Patch {
    /// The range of the block that it covers.
    #[must_use]
    pub fn range(&self) -> Range<u32> {
        self.from..self.from + self.bytes.len() as u32
    }

    fn put(&self, from: u32, into: &mut [u8]) {
        let range = self.range();
        let start = range.start.max(from);
        let end = range.end.min(from + into.len() as u32);
        if start < end {
            let own = &self.bytes[(start - range.start) as usize..(end - range.start) as usize];
            into[(start - from) as usize..(end - from) as usize].copy_from_slice(own);
        }
    }
}

/// The effect of a write, to be made durable in one transaction with the log's digested number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A patch is added; it contains the patches with these numbers, which are removed.
    Patched {
        /// The new patch.
        added: Patch,
        /// The patches that it replaces.
        replaced: Vec<u64>,
    },
    /// The patches cover the block: it is written from these bytes, without a fetch; the lower and all
    /// patches are removed.
    Whole(Vec<u8>),
}

/// Answer to a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchRead {
    /// The patches cover the range: no I/O (non-blocking read).
    Covered(Vec<u8>),
    /// The lower must be read; [`PatchedBlock::overlay`] puts the patches over it.
    Fetch,
}

/// A fetch, or a move, in progress: the lower that it reads and the patches that it includes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fetch {
    version: u64,
    taken: Vec<u64>,
}

/// The block has another lower than the one that was read; the bytes read must be discarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the block was overwritten, moved or fetched while it was read; look it up again")]
pub struct Stale;

/// A block with patches.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PatchedBlock<L> {
    lower: L,
    version: u64,
    len: u32,
    patches: Vec<Patch>,
    #[cfg(test)]
    pub(super) bug: Option<super::explore::Bug>,
}

impl<L: Clone + Eq> PatchedBlock<L> {
    /// A block of `len` bytes without patches, whose copy is `lower`.
    #[must_use]
    pub const fn new(lower: L, len: u32) -> Self {
        Self {
            lower,
            version: 0,
            len,
            patches: Vec::new(),
            #[cfg(test)]
            bug: None,
        }
    }

    /// The copy below the patches.
    pub const fn lower(&self) -> &L {
        &self.lower
    }

    /// Patches, ordered by offset.
    #[must_use]
    pub fn patches(&self) -> &[Patch] {
        &self.patches
    }

    /// Bytes of all patches.
    #[must_use]
    pub fn patch_bytes(&self) -> u64 {
        self.patches.iter().map(|patch| patch.bytes.len() as u64).sum()
    }

    /// Returns the effect of a write without applying it: [`Self::commit_write`] applies it once the change
    /// is durable.
    ///
    /// # Panics
    /// If the write is empty or passes the end of the block.
    #[must_use]
    pub fn write(&self, from: u32, bytes: &[u8], seq: u64) -> Change {
        let end = from + bytes.len() as u32;
        assert!(
            from < end && end <= self.len,
            "a write of {from}..{end} to {} bytes",
            self.len
        );
        let touches = |patch: &&Patch| patch.range().start <= end && patch.range().end >= from;
        let touched: Vec<&Patch> = self.patches.iter().filter(touches).collect();
        let start = touched
            .iter()
            .map(|patch| patch.from)
            .min()
            .unwrap_or(from)
            .min(from);
        let stop = touched
            .iter()
            .map(|patch| patch.range().end)
            .max()
            .unwrap_or(end)
            .max(end);
        let mut merged = vec![0; (stop - start) as usize];
        for patch in &touched {
            patch.put(start, &mut merged);
        }
        merged[(from - start) as usize..(end - start) as usize].copy_from_slice(bytes);
        #[cfg(test)]
        if self.bug == Some(super::explore::Bug::OldBytesWin) {
            touched.iter().for_each(|patch| patch.put(start, &mut merged));
        }
        if merged.len() as u32 == self.len {
            return Change::Whole(merged);
        }
        Change::Patched {
            replaced: touched.iter().map(|patch| patch.seq).collect(),
            added: Patch {
                seq,
                from: start,
                bytes: merged,
            },
        }
    }

    /// Applies a durable change. `new` returns the copy that [`Change::Whole`] was written to.
    pub fn commit_write(&mut self, change: Change, new: impl FnOnce() -> L) {
        match change {
            Change::Patched { added, replaced } => {
                self.patches.retain(|patch| !replaced.contains(&patch.seq));
                let at = self.patches.partition_point(|patch| patch.from < added.from);
                self.patches.insert(at, added);
            }
            Change::Whole(_) => self.replace(new()),
        }
    }

    /// Records that the whole block was overwritten, or is gone: all patches and fetches in progress become
    /// invalid.
    pub fn replace(&mut self, lower: L) {
        self.lower = lower;
        self.version += 1;
        self.patches.clear();
    }

    /// Reads `len` bytes.
    #[must_use]
    pub fn read(&self, from: u32, len: u32) -> PatchRead {
        let covers = |patch: &&Patch| patch.range().start <= from && from + len <= patch.range().end;
        match self.patches.iter().find(covers) {
            Some(patch) => {
                let start = (from - patch.from) as usize;
                PatchRead::Covered(patch.bytes[start..start + len as usize].to_vec())
            }
            None => PatchRead::Fetch,
        }
    }

    /// Puts the patches over bytes of the lower that begin at `from`.
    pub fn overlay(&self, from: u32, lower: &mut [u8]) {
        self.patches.iter().for_each(|patch| patch.put(from, lower));
    }

    /// Begins a fetch (or a move) of the block; the caller then reads the lower.
    #[must_use]
    pub fn begin_fetch(&self) -> Fetch {
        Fetch {
            version: self.version,
            taken: self.patches.iter().map(|patch| patch.seq).collect(),
        }
    }

    /// Puts the patches that a fetch includes over the lower that it has read.
    ///
    /// # Errors
    /// The block has another lower.
    pub fn merge(&self, fetch: &Fetch, lower: &mut [u8]) -> Result<(), Stale> {
        self.is_current(fetch)?;
        let taken = self
            .patches
            .iter()
            .filter(|patch| fetch.taken.contains(&patch.seq));
        taken.for_each(|patch| patch.put(0, lower));
        Ok(())
    }

    /// Makes the merged block, durable at `new`, the lower. Returns the numbers of the patches that it
    /// contains and that are removed; bytes written since stay as patches.
    ///
    /// # Errors
    /// The block has another lower; nothing is changed.
    pub fn commit_fetch(&mut self, fetch: &Fetch, new: L) -> Result<Vec<u64>, Stale> {
        self.is_current(fetch)?;
        let mut gone = Vec::new();
        self.patches.retain(|patch| {
            let taken = fetch.taken.contains(&patch.seq);
            #[cfg(test)]
            let taken = taken || self.bug == Some(super::explore::Bug::MergeTakesAll);
            if taken {
                gone.push(patch.seq);
            }
            !taken
        });
        self.lower = new;
        self.version += 1;
        Ok(gone)
    }

    /// Makes a copy of the lower, durable at `new`, the lower; patches stay over it. The copy is of the lower
    /// at the time when `fetch` began.
    ///
    /// # Errors
    /// The block has another lower; nothing is changed.
    pub fn commit_move(&mut self, fetch: &Fetch, new: L) -> Result<(), Stale> {
        self.is_current(fetch)?;
        self.lower = new;
        self.version += 1;
        #[cfg(test)]
        if self.bug == Some(super::explore::Bug::MoveDropsPatches) {
            self.patches.clear();
        }
        Ok(())
    }

    fn is_current(&self, fetch: &Fetch) -> Result<(), Stale> {
        #[cfg(test)]
        if self.bug == Some(super::explore::Bug::StaleCounts) {
            return Ok(());
        }
        if fetch.version == self.version {
            Ok(())
        } else {
            Err(Stale)
        }
    }

    /// The block as it is recovered after a crash, without its volatile state.
    #[must_use]
    pub fn recovered(&self) -> Self {
        let mut block = self.clone();
        block.version = 0;
        block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patched(writes: &[(u32, &[u8])]) -> PatchedBlock<u8> {
        let mut block = PatchedBlock::new(0, 16);
        for (seq, (from, bytes)) in writes.iter().enumerate() {
            let change = block.write(*from, bytes, seq as u64 + 1);
            block.commit_write(change, || 9);
        }
        block
    }

    #[test]
    fn patches_merge_when_they_touch_or_overlap() {
        let block = patched(&[(0, b"ab"), (6, b"gh"), (2, b"cd")]);
        assert_eq!(block.patches().len(), 2, "adjacent ones are one");
        let block = patched(&[(0, b"ab"), (6, b"gh"), (1, b"xxxxx")]);
        assert_eq!(block.patches()[0].bytes, b"axxxxxgh");
        assert_eq!(block.patch_bytes(), 8);
    }

    #[test]
    fn covered_read_needs_no_io_and_one_beyond_fetches() {
        let block = patched(&[(4, b"efgh")]);
        assert_eq!(block.read(5, 2), PatchRead::Covered(b"fg".to_vec()));
        assert_eq!(block.read(3, 2), PatchRead::Fetch);
        let mut lower = *b"................";
        block.overlay(0, &mut lower);
        assert_eq!(&lower, b"....efgh........");
        let mut part = *b"..";
        block.overlay(7, &mut part);
        assert_eq!(&part, b"h.");
    }

    #[test]
    fn block_that_patches_cover_is_never_fetched() {
        let mut block = patched(&[(0, b"abcdefgh")]);
        let change = block.write(8, b"ijklmnop", 7);
        assert_eq!(change, Change::Whole(b"abcdefghijklmnop".to_vec()));
        let old = block.begin_fetch();
        block.commit_write(change, || 5);
        assert_eq!((*block.lower(), block.patches().len()), (5, 0));
        assert_eq!(block.commit_fetch(&old, 6), Err(Stale));
    }

    #[test]
    fn merge_keeps_what_was_written_while_the_block_was_fetched() {
        let mut block = patched(&[(0, b"ab")]);
        let fetch = block.begin_fetch();
        let change = block.write(10, b"K", 8);
        block.commit_write(change, || 9);
        let mut lower = *b"................";
        assert_eq!(block.merge(&fetch, &mut lower), Ok(()));
        assert_eq!(&lower, b"ab..............");
        assert_eq!(block.commit_fetch(&fetch, 3), Ok(vec![1]));
        assert_eq!(block.patches()[0].bytes, b"K");
    }
}
