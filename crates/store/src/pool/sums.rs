//! Tells the checksums of a file's blocks. Those that the pool keeps are told without a read of data: what a
//! search for equal blocks needs is 1/1024 of it. Those of the bytes themselves take a read of all.

use super::Store;
use crate::reader::checksums::{Sums, sums};
use crate::reader::{MetaReader, View, file_root};
use crate::{MappedPart, Result, StoreError, SummedPart};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, ExtentFlags, FileBlock, Ino, Tier};

/// Extents looked up at once.
const EXTENTS_AT_ONCE: usize = 64;
/// Most extents of one answer.
const EXTENTS_MAX: usize = 4096;
/// Most units whose footers one answer reads: each is a read of up to 256 KiB.
const UNITS_MAX: usize = 4;
/// Blocks that are read at once.
const READ_BLOCKS: usize = 256;
/// Attempts of a read whose unit was sealed or reopened meanwhile.
const ATTEMPTS: usize = 3;

/// Which checksums an answer has, and where they lie.
struct Plan {
    parts: Vec<(MappedPart, Sums)>,
    /// The block to go on from.
    next: u64,
}

/// Finds the checksums of a range, up to the bounds of one answer.
fn plan<V: View>(reader: &MetaReader<'_, V>, ino: Ino, blocks: &Range<FileBlock>, most: u64) -> Result<Plan> {
    let inode = reader.get(ino)?;
    let root = file_root(&inode)?;
    let end = blocks.end.0.min(inode.attr.size_bytes.div_ceil(BLOCK_BYTES));
    let mut plan = Plan {
        parts: Vec::new(),
        next: blocks.end.0,
    };
    let (mut at, mut left) = (blocks.start.0, most);
    let mut units: HashSet<(Tier, u64)> = HashSet::new();
    while at < end {
        let batch = reader.parts(ino, &root, at, end, EXTENTS_AT_ONCE)?;
        for part in &batch {
            let extent = part.extent;
            at = extent.file_block.0;
            if extent.flags.contains(ExtentFlags::UNWRITTEN) {
                continue;
            }
            let count = left.min(extent.len.into());
            let unit = match extent.tier {
                Tier::Nvm => None,
                tier => Some((tier, extent.block.0 / reader.layout.unit_blocks(tier))),
            };
            let one_more = unit.is_some_and(|unit| !units.contains(&unit) && units.len() == UNITS_MAX);
            if count == 0 || one_more || plan.parts.len() == EXTENTS_MAX {
                plan.next = at;
                return Ok(plan);
            }
            units.extend(unit);
            let sums = sums(reader, extent.tier, extent.block.0, count)?;
            plan.parts.push((*part, sums));
            left -= count;
            at += count;
            if count < extent.len.into() {
                plan.next = at;
                return Ok(plan);
            }
        }
        match batch.last() {
            Some(last) if batch.len() == EXTENTS_AT_ONCE => at = last.extent.end().0,
            _ => break,
        }
    }
    Ok(plan)
}

impl Store {
    /// Returns the CRC-32C of the written blocks in a range of a file, of `most` blocks at most, and the
    /// block to go on from: the range's end if there are no more. Holes, unwritten extents and what lies
    /// behind the file's end are left out. The data itself is not read, so nothing is verified.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, `Footer`, damage, a device's error.
    pub fn checksums(
        &self,
        ino: Ino,
        blocks: Range<FileBlock>,
        most: u64,
    ) -> Result<(Vec<SummedPart>, FileBlock)> {
        let mut attempt = 1;
        loop {
            match self.read_beside(|| (self.try_checksums(ino, &blocks, most), false)) {
                // The unit may have been sealed or reopened between the reads of its row and its footer.
                Err(StoreError::Footer { .. }) if attempt < ATTEMPTS => attempt += 1,
                result => return result,
            }
        }
    }

    /// As [`checksums`](Self::checksums), but the blocks are read and compared, and the CRC-32C is that of the
    /// bytes: also of those on NVM that reads need not compare. A file that is written meanwhile may be told
    /// in part as it was, and in part as it is.
    ///
    /// # Errors
    /// As for `checksums` and for [`read`](Self::read).
    pub fn read_checksums(
        &self,
        ino: Ino,
        blocks: Range<FileBlock>,
        most: u64,
    ) -> Result<(Vec<SummedPart>, FileBlock)> {
        // In one answer, so that a lease is not kept for longer.
        let most = most.min(READ_BLOCKS as u64);
        let (mut told, next) = self.checksums(ino, blocks, most)?;
        let mut bytes = Vec::new();
        for part in &mut told {
            let mut at = part.file_block.0 * BLOCK_BYTES;
            for sums in part.sums.chunks_mut(READ_BLOCKS) {
                bytes.resize(sums.len() * BLOCK_SIZE, 0);
                let have = self.read(ino, at, &mut bytes)?;
                bytes[have..].fill(0);
                for (sum, block) in sums.iter_mut().zip(bytes.chunks_exact(BLOCK_SIZE)) {
                    *sum = crc32c::crc32c(block);
                }
                at += bytes.len() as u64;
            }
        }
        Ok((told, next))
    }

    fn try_checksums(
        &self,
        ino: Ino,
        blocks: &Range<FileBlock>,
        most: u64,
    ) -> Result<(Vec<SummedPart>, FileBlock)> {
        let (plan, _reader) = {
            let snapshot = self.snapshot();
            (
                plan(&snapshot.reader(), ino, blocks, most)?,
                self.enter(snapshot.tx()),
            )
        };
        let mut footers: HashMap<(Tier, u64), Arc<Vec<u32>>> = HashMap::new();
        let mut told: Vec<SummedPart> = Vec::new();
        for (MappedPart { extent, number, .. }, sums) in plan.parts {
            // A file with many extents needs a footer many times.
            let sums = sums.resolve(|tier, unit, row| match footers.get(&(tier, unit)) {
                Some(footer) => Ok(Arc::clone(footer)),
                None => {
                    let footer = self.footer(tier, unit, row)?;
                    footers.insert((tier, unit), Arc::clone(&footer));
                    Ok(footer)
                }
            })?;
            match told
                .last_mut()
                .filter(|last| last.goes_on(extent.file_block, number))
            {
                Some(last) => last.sums.extend(sums),
                None => told.push(SummedPart {
                    file_block: extent.file_block,
                    number,
                    sums,
                }),
            }
        }
        Ok((told, FileBlock(plan.next)))
    }
}
