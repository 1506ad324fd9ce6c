//! Checksums of data blocks: locates the checksums of a run, and compares. Reads no data.

use super::{MetaReader, View};
use crate::{Result, StoreError};
use std::sync::Arc;
use varve_format::space::UnitRow;
use varve_format::{BLOCK_SIZE, BlockNo, Tier};

/// The location of a run's checksums.
#[derive(Debug, Clone)]
pub(crate) enum Sums {
    /// The run is not verified.
    Unchecked,
    /// The checksums themselves.
    Known(Vec<u32>),
    /// In the footer of a sealed unit, from `index` on.
    Footer {
        tier: Tier,
        unit: u64,
        row: UnitRow,
        index: usize,
        count: usize,
    },
}

impl Sums {
    /// Returns the checksums; empty if the run is not verified.
    pub(crate) fn resolve(
        &self,
        footer: impl FnOnce(Tier, u64, &UnitRow) -> Result<Arc<Vec<u32>>>,
    ) -> Result<Vec<u32>> {
        match self {
            Self::Unchecked => Ok(Vec::new()),
            Self::Known(sums) => Ok(sums.clone()),
            Self::Footer {
                tier,
                unit,
                row,
                index,
                count,
            } => {
                let footer = footer(*tier, *unit, row)?;
                footer
                    .get(*index..index + count)
                    .map(<[u32]>::to_vec)
                    .ok_or(StoreError::Footer {
                        tier: *tier,
                        unit: *unit,
                    })
            }
        }
    }
}

/// Locates the checksums of a run. A run never crosses a unit.
pub(crate) fn sums<V: View>(reader: &MetaReader<'_, V>, tier: Tier, start: u64, count: u64) -> Result<Sums> {
    let last = start.saturating_add(count.saturating_sub(1));
    if !reader.layout.usable(tier, start) || !reader.layout.usable(tier, last) {
        return Err(StoreError::Damaged(format!(
            "{} blocks {start}+{count} cannot hold data",
            tier.name()
        )));
    }
    if tier == Tier::Nvm {
        return reader.table_checksums(tier, 0, start, count).map(Sums::Known);
    }
    let unit_blocks = reader.layout.unit_blocks(tier);
    let (unit, index) = (start / unit_blocks, start % unit_blocks);
    if last / unit_blocks != unit {
        return Err(StoreError::Damaged(format!(
            "{} blocks {start}+{count} lie in two units",
            tier.name()
        )));
    }
    let run = reader.layout.run_of(tier, start).0;
    if reader.open_unit(tier, run)? == Some(unit) {
        return reader.table_checksums(tier, run, index, count).map(Sums::Known);
    }
    let row = reader.unit_row(tier, unit)?;
    if row.state != UnitRow::SEALED {
        return Err(StoreError::Damaged(format!(
            "{} unit {unit} holds data but is not sealed",
            tier.name()
        )));
    }
    Ok(Sums::Footer {
        tier,
        unit,
        row,
        index: index as usize,
        count: count as usize,
    })
}

/// Compares blocks with their checksums (none: nothing to compare).
pub(crate) fn compare(tier: Tier, start: u64, bytes: &[u8], sums: &[u32]) -> Result<()> {
    for (block, (content, sum)) in (start..).zip(bytes.chunks(BLOCK_SIZE).zip(sums)) {
        if crc32c::crc32c(content) != *sum {
            return Err(StoreError::DataChecksum {
                tier,
                block: BlockNo(block),
            });
        }
    }
    Ok(())
}
