//! Searches all blocks without a known owner for lost structures.

use super::Survey;
use crate::pool::Store;
use crate::{Result, StoreError};
use std::collections::BTreeMap;
use varve_format::inode::{INODE_SIZE, INODES_PER_BLOCK};
use varve_format::space::{CHECKSUMS_PER_BLOCK, UnitRow};
use varve_format::{BLOCK_SIZE, Block, BlockNo, Ino, Tier, sum_of_metadata};

impl Store {
    /// Finds blocks that hold mostly images of one block of the inode file; returns the best one for each
    /// index.
    pub(super) fn scan_for_images(&self, survey: &Survey) -> Result<BTreeMap<u64, BlockNo>> {
        let mut out: BTreeMap<u64, (BlockNo, u32)> = BTreeMap::new();
        self.scan(survey, |block, bytes| {
            let word = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&bytes[at..at + 8]);
                u64::from_le_bytes(word)
            };
            let Some(index) = (0..INODES_PER_BLOCK as usize)
                .map(|image| word(image * INODE_SIZE + 8))
                .find(|ino| *ino != 0)
                .map(|ino| ino / INODES_PER_BLOCK)
            else {
                return;
            };
            if index >= self.blocks_in_all() {
                return;
            }
            let (mut good, mut bad) = (0, 0);
            for image in 0..INODES_PER_BLOCK {
                let at = image as usize * INODE_SIZE;
                if bytes[at..at + INODE_SIZE].iter().all(|byte| *byte == 0) {
                    continue;
                }
                match crate::reader::slot_in(bytes, Ino(index * INODES_PER_BLOCK + image)) {
                    Ok(_) => good += 1,
                    Err(_) => bad += 1,
                }
            }
            if good > bad && out.get(&index).is_none_or(|(_, best)| good > *best) {
                out.insert(index, (block, good));
            }
        })?;
        Ok(out
            .into_iter()
            .map(|(index, (block, _))| (index, block))
            .collect())
    }

    /// Calls `f` with all blocks in use that are not data of a file and have no known owner.
    pub(super) fn scan(&self, survey: &Survey, mut f: impl FnMut(BlockNo, &Block)) -> Result<()> {
        self.scan_nvm(survey, &mut f)?;
        for tier in [Tier::Ssd, Tier::Hdd] {
            self.scan_units(survey, tier, &mut f)?;
        }
        Ok(())
    }

    /// Scans a slower tier. Metadata is told from data by its checksum; units whose checksums are lost are
    /// skipped.
    fn scan_units(&self, survey: &Survey, tier: Tier, f: &mut impl FnMut(BlockNo, &Block)) -> Result<()> {
        let unit_blocks = self.layout.unit_blocks(tier);
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        for unit in self.layout.live_units(tier) {
            let data = self.layout.unit_data_blocks(tier);
            let wanted: Vec<u64> = (unit * unit_blocks..unit * unit_blocks + data)
                .filter(|block| {
                    let (bitmap, _) = self.layout.bit(tier, *block);
                    let known = !survey.bad_fixed.contains_key(&bitmap.0);
                    (!known || survey.marked[tier as usize].has(*block))
                        && !survey.claims[tier as usize].has(*block)
                })
                .collect();
            if wanted.is_empty() {
                continue;
            }
            let sums = match reader.unit_row(tier, unit).map(|row| (row.state, row)) {
                Ok((UnitRow::SEALED, row)) => self
                    .footer(tier, unit, &row)
                    .map(|sums| sums.to_vec())
                    .unwrap_or_default(),
                Ok((UnitRow::OPEN, _)) => {
                    let run = self.layout.run_of(tier, unit * unit_blocks).0;
                    reader.table_checksums(tier, run, 0, data).unwrap_or_default()
                }
                _ => continue,
            };
            for block in wanted {
                let Some(sum) = sums.get((block - unit * unit_blocks) as usize) else {
                    continue;
                };
                match self.read_blocks(tier, block, &mut bytes[..]) {
                    Ok(()) if sum_of_metadata(crc32c::crc32c(&bytes[..])) == *sum => {
                        f(BlockNo::on(tier, block), &bytes);
                    }
                    Ok(()) | Err(StoreError::Media(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn scan_nvm(&self, survey: &Survey, f: &mut impl FnMut(BlockNo, &Block)) -> Result<()> {
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        let mut sums: Option<(u64, Vec<u32>)> = None;
        let lens_snapshot = self.snapshot();
        let reader = lens_snapshot.reader();
        for block in self.layout.first_free()..self.layout.blocks(Tier::Nvm) {
            let (bitmap, _) = self.layout.bit(Tier::Nvm, block);
            let known = !survey.bad_fixed.contains_key(&bitmap.0);
            if known && !survey.marked[0].has(block) || survey.claims[0].has(block) {
                continue;
            }
            self.devices
                .nvm
                .read(BlockNo(block).offset_bytes(), bytes.as_mut_slice())?;
            let first = block / CHECKSUMS_PER_BLOCK * CHECKSUMS_PER_BLOCK;
            if sums.as_ref().is_none_or(|(at, _)| *at != first) {
                let count = CHECKSUMS_PER_BLOCK.min(self.layout.blocks(Tier::Nvm) - first);
                sums = Some((
                    first,
                    reader
                        .table_checksums(Tier::Nvm, 0, first, count)
                        .unwrap_or_default(),
                ));
            }
            // A program can write anything into its files, so data blocks are recognised by their checksums.
            let sum = sums
                .as_ref()
                .and_then(|(_, sums)| sums.get((block - first) as usize));
            if sum.is_none_or(|sum| *sum != crc32c::crc32c(&bytes[..])) {
                f(BlockNo(block), &bytes);
            }
        }
        Ok(())
    }
}
