//! Reads file data: looks up its blocks, reads them and compares them with their checksums.

use super::Store;
use super::scattered::fill_scattered;
use crate::reader::checksums::{Sums, sums};
use crate::reader::{MetaReader, POOL_INO, View, file_root};
use crate::{MappedPart, NumberedBlocks, Result, StoreError};
use std::sync::Arc;
use varve_format::inode::Inode;
use varve_format::space::{CHECKSUMS_PER_BLOCK, UnitRow};
use varve_format::{
    BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, BlockHeader, BlockKind, BlockNo, ExtentFlags, Ino, Tier,
    TxId, verify_block,
};
use varve_media::AlignedBuf;

/// Blocks read at once when they are verified.
const BATCH_BLOCKS: u64 = 256;
/// Extents looked up at once.
const EXTENTS_AT_ONCE: usize = 64;
/// Attempts of a read whose unit was sealed or reopened meanwhile.
const ATTEMPTS: usize = 3;

/// One run of a planned read.
#[derive(Debug)]
pub(super) struct Part {
    /// Offset in the reader's buffer.
    pub(super) at: usize,
    pub(super) len: usize,
    /// Bytes of the first block that are not wanted.
    pub(super) skip: usize,
    pub(super) tier: Tier,
    pub(super) block: u64,
    /// Number of its first block in the shared space.
    pub(super) number: Option<u64>,
    pub(super) sums: Sums,
}

/// A planned read: holes are zeroed already.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    parts: Vec<Part>,
    /// Shared blocks of the range.
    numbered: Vec<NumberedBlocks>,
    pub(crate) len: usize,
}

/// Plans the read of `out.len()` bytes at `offset`, up to the size.
pub(crate) fn plan<V: View>(
    reader: &MetaReader<'_, V>,
    inode: &Inode,
    offset: u64,
    out: &mut [u8],
    verify_nvm: bool,
) -> Result<Plan> {
    plan_unless(reader, inode, offset, out, |_, _| !verify_nvm)
}

/// As [`plan`], but does not verify `believed` runs of NVM, given by first block and end.
fn plan_unless<V: View>(
    reader: &MetaReader<'_, V>,
    inode: &Inode,
    offset: u64,
    out: &mut [u8],
    believed: impl Fn(u64, u64) -> bool,
) -> Result<Plan> {
    let root = file_root(inode)?;
    let len = (out.len() as u64).min(inode.attr.size_bytes.saturating_sub(offset));
    let mut plan = Plan {
        len: len as usize,
        ..Plan::default()
    };
    out[..len as usize].fill(0);
    let end = offset + len;
    let mut at = offset / BLOCK_BYTES;
    let last = end.div_ceil(BLOCK_BYTES);
    while at < last {
        let batch = reader.parts(inode.attr.key.ino, &root, at, last, EXTENTS_AT_ONCE)?;
        for MappedPart { extent, number, .. } in &batch {
            if extent.flags.contains(ExtentFlags::UNWRITTEN) {
                continue;
            }
            let from = (extent.file_block.0 * BLOCK_BYTES).max(offset);
            let to = (extent.end().0 * BLOCK_BYTES).min(end);
            let run = extent.block.0..extent.block.0 + u64::from(extent.len);
            let sums = if extent.tier == Tier::Nvm && believed(run.start, run.end) {
                Sums::Unchecked
            } else {
                sums(reader, extent.tier, extent.block.0, u64::from(extent.len))?
            };
            plan.numbered.extend(number.map(|number| NumberedBlocks {
                file_block: extent.file_block,
                blocks: extent.len,
                number,
            }));
            plan.parts.push(Part {
                at: (from - offset) as usize,
                len: (to - from) as usize,
                skip: (from - extent.file_block.0 * BLOCK_BYTES) as usize,
                tier: extent.tier,
                block: extent.block.0,
                number: *number,
                sums,
            });
        }
        match batch.last() {
            Some(part) if batch.len() == EXTENTS_AT_ONCE => at = part.extent.end().0,
            _ => break,
        }
    }
    Ok(plan)
}

/// Carries out a plan. `read_blocks` reads whole blocks.
pub(crate) fn fill(
    store: &Store,
    plan: &Plan,
    out: &mut [u8],
    read_blocks: impl FnMut(Tier, u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    fill_parts(store, plan.parts.iter(), out, read_blocks)
}

/// Reads parts one by one.
fn fill_parts<'p>(
    store: &Store,
    parts: impl Iterator<Item = &'p Part>,
    out: &mut [u8],
    mut read_blocks: impl FnMut(Tier, u64, &mut [u8]) -> Result<()>,
) -> Result<()> {
    for part in parts {
        let target = &mut out[part.at..part.at + part.len];
        let sums = part
            .sums
            .resolve(|tier, unit, row| store.footer(tier, unit, row))?;
        if sums.is_empty() {
            store.count_read(part.tier, target.len());
            store
                .devices
                .nvm
                .read(part.block * BLOCK_BYTES + part.skip as u64, target)?;
            continue;
        }
        let blocks = ((part.skip + part.len) as u64).div_ceil(BLOCK_BYTES);
        let mut done = 0;
        while done < blocks {
            let count = (blocks - done).min(BATCH_BLOCKS);
            let from = (done * BLOCK_BYTES) as usize;
            let mut direct = None;
            // Whole blocks are read directly into the target, the blocks at the edges through a buffer.
            let whole = from >= part.skip && from - part.skip + count as usize * BLOCK_SIZE <= part.len;
            let mut buffer = Vec::new();
            let bytes: &mut [u8] = if whole {
                direct = Some(from - part.skip);
                let at = from - part.skip;
                &mut target[at..at + count as usize * BLOCK_SIZE]
            } else {
                buffer.resize(count as usize * BLOCK_SIZE, 0);
                &mut buffer
            };
            read_blocks(part.tier, part.block + done, bytes)?;
            let sums = &sums[done as usize..(done + count) as usize];
            store.compare(part.tier, part.block + done, bytes, sums)?;
            if direct.is_none() {
                let skip = part.skip.saturating_sub(from);
                let at = from.saturating_sub(part.skip);
                let take = (buffer.len() - skip).min(part.len - at);
                target[at..at + take].copy_from_slice(&buffer[skip..skip + take]);
            }
            done += count;
        }
    }
    Ok(())
}

/// Keeps blocks of one state from being reused while they are read.
pub(super) struct Reader<'s> {
    store: &'s Store,
    tx: TxId,
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.store.space.lock().leave(self.tx);
    }
}

impl Store {
    /// Reads file data; returns the number of bytes (fewer than requested only at the end of the file). Holes
    /// read as zeros. Data on SSD and HDD is verified; data on NVM is verified if the pool was opened so, or
    /// at its first read.
    ///
    /// # Errors
    /// `NoInode`, `WrongKind`, `DataChecksum`, a device's error.
    pub fn read(&self, ino: Ino, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read_numbered(ino, offset, out).map(|(len, _)| len)
    }

    /// As [`read`](Self::read); returns also the shared blocks that were read, in order.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_numbered(
        &self,
        ino: Ino,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(usize, Vec<NumberedBlocks>)> {
        let mut attempt = 1;
        loop {
            match self.read_beside(|| self.try_read(ino, offset, out)) {
                // The unit may have been sealed or reopened between the reads of its row and its footer.
                Err(StoreError::DataChecksum { .. } | StoreError::Footer { .. }) if attempt < ATTEMPTS => {
                    attempt += 1
                }
                result => return result,
            }
        }
    }

    /// Makes one attempt; returns also whether it read from NVM.
    fn try_read(
        &self,
        ino: Ino,
        offset: u64,
        out: &mut [u8],
    ) -> (Result<(usize, Vec<NumberedBlocks>)>, bool) {
        let mut planned = || {
            let snapshot = self.snapshot();
            let inode = snapshot.reader().get(ino)?;
            let plan = plan_unless(&snapshot.reader(), &inode, offset, out, |first, end| {
                self.believes(first, end)
            })?;
            Ok((plan, self.enter(snapshot.tx())))
        };
        let (plan, _reader) = match planned() {
            Ok(planned) => planned,
            Err(error) => return (Err(error), false),
        };
        let read = self.fill_in_order(&plan, out);
        let nvm = plan.parts.iter().any(|part| part.tier == Tier::Nvm);
        (read.map(|()| (plan.len, plan.numbered)), nvm)
    }

    /// Carries out a plan, each device in its own order.
    fn fill_in_order(&self, plan: &Plan, out: &mut [u8]) -> Result<()> {
        for tier in Tier::ALL {
            let of_tier = || plan.parts.iter().filter(|part| part.tier == tier);
            let is_scattered = of_tier().nth(1).is_some() || of_tier().any(|part| part.number.is_some());
            if tier != Tier::Nvm && is_scattered && fill_scattered(self, &plan.parts, tier, out)? {
                continue;
            }
            fill_parts(self, of_tier(), out, |tier, start, bytes| {
                self.read_blocks(tier, start, bytes)
            })?;
        }
        Ok(())
    }

    pub(super) fn enter(&self, tx: TxId) -> Reader<'_> {
        self.space.lock().enter(tx);
        Reader { store: self, tx }
    }

    /// Reads whole blocks of a tier.
    pub(crate) fn read_blocks(&self, tier: Tier, start: u64, out: &mut [u8]) -> Result<()> {
        self.count_read(tier, out.len());
        match tier {
            Tier::Nvm => self.devices.nvm.read(start * BLOCK_BYTES, out)?,
            _ => self.device(tier)?.read(start * BLOCK_BYTES, out)?,
        }
        Ok(())
    }

    /// Reads a data block and compares it with its checksum. Only blocks that a written extent maps have one.
    ///
    /// # Errors
    /// `DataChecksum`, `Footer`, a device's error.
    pub fn verify_block(&self, tier: Tier, block: BlockNo) -> Result<()> {
        self.read_beside(|| (self.try_verify(tier, block), tier == Tier::Nvm))
    }

    fn try_verify(&self, tier: Tier, block: BlockNo) -> Result<()> {
        let (sums, _reader) = {
            let snapshot = self.snapshot();
            (
                sums(&snapshot.reader(), tier, block.0, 1)?,
                self.enter(snapshot.tx()),
            )
        };
        let mut bytes = vec![0; BLOCK_SIZE];
        self.read_blocks(tier, block.0, &mut bytes)?;
        let sums = sums.resolve(|tier, unit, row| self.footer(tier, unit, row))?;
        self.compare(tier, block.0, &bytes, &sums)
    }

    /// Returns the checksums of a sealed unit, from its footer.
    pub(crate) fn footer(&self, tier: Tier, unit: u64, row: &UnitRow) -> Result<Arc<Vec<u32>>> {
        let key = (tier, unit, row.sealed_tx.get(), row.footer_crc32c.get());
        if let Some(found) = self.footers.lock().get(&key) {
            return Ok(Arc::clone(found));
        }
        let bad = StoreError::Footer { tier, unit };
        if u64::from(row.footer) >= UnitRow::FOOTERS {
            return Err(bad);
        }
        let data = self.layout.unit_data_blocks(tier);
        let start = self.layout.footer_start(tier, unit, row.footer);
        let mut sums = Vec::with_capacity(data as usize);
        let mut crc = 0;
        let blocks = data.div_ceil(CHECKSUMS_PER_BLOCK);
        let mut bytes = AlignedBuf::new(blocks as usize * BLOCK_SIZE);
        self.read_blocks(tier, start, bytes.bytes_mut())?;
        for (index, block) in (0..).zip(bytes.bytes().as_chunks::<BLOCK_SIZE>().0) {
            let expected = BlockNo(start + index);
            if verify_block(block).is_err()
                || BlockHeader::of(block)
                    .expect(BlockKind::UnitFooter, POOL_INO, expected)
                    .is_err()
            {
                return Err(bad);
            }
            crc = crc32c::crc32c_append(crc, &block[BLOCK_HEADER_SIZE..]);
            let left = data as usize - sums.len();
            sums.extend(
                block[BLOCK_HEADER_SIZE..]
                    .chunks_exact(4)
                    .take(left)
                    .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])),
            );
        }
        if crc != row.footer_crc32c.get() {
            return Err(bad);
        }
        let sums = Arc::new(sums);
        self.footers.lock().put(key, Arc::clone(&sums));
        Ok(sums)
    }
}
