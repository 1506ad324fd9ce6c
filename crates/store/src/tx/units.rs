//! Units of SSD and HDD: opens them, seals them with a footer of checksums, and writes data blocks with their
//! checksums.

use super::TxState;
use crate::layout::Place;
use crate::reader::POOL_INO;
use crate::seeded::{Bug, armed};
use crate::space::{NextUnit, Span};
use crate::{Result, StoreError};
use std::mem::offset_of;
use varve_format::device::DeviceRow;
use varve_format::space::{CHECKSUMS_PER_BLOCK, UNIT_ROW_SIZE, UnitRow, footer_blocks};
use varve_format::{BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE, Block, BlockKind, BlockNo, Tier, init_block};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of data blocks that wait for one write to a device.
const GATHERED_MAX: usize = 1 << 20;
/// Bytes of a run that waits for those of the other devices of its tier.
const TURN_MAX: usize = 4 << 20;

/// Data blocks of one run on a device that are not written yet. They are before the record is.
#[derive(Debug)]
pub(crate) struct Gathered {
    tier: Tier,
    /// The device.
    run: usize,
    /// The first block.
    start: u64,
    bytes: Vec<u8>,
}

impl Gathered {
    /// Whether `len` bytes at `start` follow what waits, and there is room for them.
    fn is_followed_by(&self, tier: Tier, start: u64, len: usize) -> bool {
        !self.bytes.is_empty()
            && self.tier == tier
            && self.start + (self.bytes.len() / BLOCK_SIZE) as u64 == start
            && self.bytes.len() + len <= GATHERED_MAX
    }

    /// Puts what waits over blocks that were read from `start` on.
    fn lay_over(&self, tier: Tier, start: u64, out: &mut [u8]) {
        let (blocks, waiting) = (
            (out.len() / BLOCK_SIZE) as u64,
            (self.bytes.len() / BLOCK_SIZE) as u64,
        );
        let first = start.max(self.start);
        let end = (start + blocks).min(self.start + waiting);
        if tier != self.tier || first >= end {
            return;
        }
        let len = (end - first) as usize * BLOCK_SIZE;
        let (at, from) = (
            (first - start) as usize * BLOCK_SIZE,
            (first - self.start) as usize * BLOCK_SIZE,
        );
        out[at..at + len].copy_from_slice(&self.bytes[from..from + len]);
    }
}

impl TxState<'_> {
    pub(crate) fn seal_open_unit(&mut self, tier: Tier, run: usize) -> Result<()> {
        let Some(unit) = self.reader().open_unit(tier, run)? else {
            return Ok(());
        };
        let data = self.layout().unit_data_blocks(tier);
        let sums = self.reader().table_checksums(tier, run, 0, data)?;
        self.seal_with(tier, unit, &sums)
    }

    /// Returns the footer that a transaction may write: not the one that the committed row names.
    pub(super) fn spare_footer(&self, tier: Tier, unit: u64) -> Result<u8> {
        let place = self.layout().unit_row(tier, unit);
        let row = |block: &Block| {
            let bytes = &block[place.offset..place.offset + UNIT_ROW_SIZE];
            UnitRow::read_from_bytes(bytes)
                .map_err(|_| StoreError::Damaged("a unit row has another length".into()))
        };
        let row = match self.dirty.get(&place.block.0).map(|dirty| &dirty.base) {
            Some(Some(base)) => row(base),
            _ => row(&*self.store.cache.load(place.block, false)?),
        }?;
        Ok(u8::from(row.state == UnitRow::SEALED && row.footer == 0) & u8::from(!armed(Bug::OneFooter)))
    }

    /// Writes a unit's footer and its row.
    pub(crate) fn seal_with(&mut self, tier: Tier, unit: u64, sums: &[u32]) -> Result<()> {
        let layout = self.layout();
        let unit_blocks = layout.unit_blocks(tier);
        let data = layout.unit_data_blocks(tier);
        let place = self.spare_footer(tier, unit)?;
        let footer_start = layout.footer_start(tier, unit, place);
        let mut footer = vec![0; footer_blocks(unit_blocks) as usize * BLOCK_SIZE];
        let mut crc = 0;
        for (index, part) in sums.chunks(CHECKSUMS_PER_BLOCK as usize).enumerate() {
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            for (word, sum) in block[BLOCK_HEADER_SIZE..].chunks_exact_mut(4).zip(part) {
                word.copy_from_slice(&sum.to_le_bytes());
            }
            crc = crc32c::crc32c_append(crc, &block[BLOCK_HEADER_SIZE..]);
            init_block(
                &mut block,
                BlockKind::UnitFooter,
                POOL_INO,
                BlockNo(footer_start + index as u64),
            );
            footer[index * BLOCK_SIZE..(index + 1) * BLOCK_SIZE].copy_from_slice(&block[..]);
        }
        for index in data.div_ceil(CHECKSUMS_PER_BLOCK)..footer_blocks(unit_blocks) {
            let at = index as usize * BLOCK_SIZE;
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            init_block(
                &mut block,
                BlockKind::UnitFooter,
                POOL_INO,
                BlockNo(footer_start + index),
            );
            footer[at..at + BLOCK_SIZE].copy_from_slice(&block[..]);
        }
        if !armed(Bug::FooterNotWritten) {
            self.put_blocks(tier, footer_start, &footer)?;
        }
        let row = UnitRow {
            state: UnitRow::SEALED,
            footer: place,
            reserved: [0; 2],
            footer_crc32c: U32::new(crc),
            sealed_tx: U64::new(self.id().0),
        };
        self.patch(layout.unit_row(tier, unit), row.as_bytes())
    }

    pub(super) fn open_unit(&mut self, tier: Tier, run: usize, next: NextUnit) -> Result<()> {
        let layout = self.layout();
        let unit = match next {
            NextUnit::Empty(unit) => unit,
            NextUnit::Holes(unit) => {
                let row = self.reader().unit_row(tier, unit)?;
                if !armed(Bug::HolesWithoutSums) {
                    // The row of a unit in use has this state unless it is damaged; without the footer's
                    // checksums, the data there would get those of other blocks. During a repair, units in
                    // another state have no owner.
                    if row.state == UnitRow::SEALED {
                        let sums = self.store.footer(tier, unit, &row)?;
                        self.set_checksums(tier, run, 0, &sums)?;
                    } else if !self.store.trusting {
                        return Err(StoreError::Footer { tier, unit });
                    }
                }
                unit
            }
        };
        let row = UnitRow {
            state: UnitRow::OPEN,
            ..UnitRow::default()
        };
        self.patch(layout.unit_row(tier, unit), row.as_bytes())?;
        self.note_open_unit(tier, run, Some(unit))?;
        self.store.space.lock().set_open(tier, run, Some(unit));
        Ok(())
    }

    /// Records the open unit of a device.
    pub(crate) fn note_open_unit(&mut self, tier: Tier, run: usize, unit: Option<u64>) -> Result<()> {
        let number = U64::new(unit.map_or(0, |unit| unit + 1));
        let place = self.layout().runs(tier).nth(run).and_then(|run| run.row);
        match place {
            None => self.change_state(|state| state.open_unit[tier as usize] = number),
            Some(Place { block, offset }) => {
                let offset = offset + offset_of!(DeviceRow, open_unit);
                self.patch(Place { block, offset }, number.as_bytes())
            }
        }
    }

    /// Puts checksums into the NVM table of a device, from `index` on.
    pub(super) fn set_checksums(&mut self, tier: Tier, run: usize, index: u64, sums: &[u32]) -> Result<()> {
        let mut done = 0;
        while done < sums.len() {
            let at = index + done as u64;
            let count = ((CHECKSUMS_PER_BLOCK - at % CHECKSUMS_PER_BLOCK) as usize).min(sums.len() - done);
            let bytes: Vec<u8> = sums[done..done + count]
                .iter()
                .flat_map(|sum| sum.to_le_bytes())
                .collect();
            self.patch(self.layout().checksum(tier, run, at), &bytes)?;
            done += count;
        }
        Ok(())
    }

    /// Writes whole blocks to space allocated in this transaction, with their checksums.
    pub(crate) fn write_new(&mut self, span: Span, data: &[u8]) -> Result<()> {
        let mut sums = Vec::with_capacity(data.len() / BLOCK_SIZE);
        self.put_summed(span.tier, span.start, data, &mut sums)?;
        self.note_checksums(span, &sums)
    }

    /// Writes whole blocks to a place of a tier that was allocated in this transaction; adds their checksums
    /// to `sums`.
    pub(crate) fn put_summed(
        &mut self,
        tier: Tier,
        start: u64,
        data: &[u8],
        sums: &mut Vec<u32>,
    ) -> Result<()> {
        if tier != Tier::Nvm
            || self.store.devices.nvm.is_written_by_calls()
            || armed(Bug::CommitBeforePayload)
        {
            let sum = |block| varve_media::crc32c_append(0, block);
            sums.extend(data.chunks(BLOCK_SIZE).map(sum));
            return match tier {
                Tier::Nvm => self.put_blocks(tier, start, data),
                Tier::Ssd | Tier::Hdd => self.gather(tier, start, data),
            };
        }
        // The checksum is computed during the copy: one pass over the data.
        let offset = start * BLOCK_BYTES;
        self.touched[Tier::Nvm as usize] = true;
        self.note_nvm(offset, data.len());
        for (block, at) in data.chunks(BLOCK_SIZE).zip((offset..).step_by(BLOCK_SIZE)) {
            sums.push(self.store.devices.nvm.write_crc(at, block, 0)?);
        }
        Ok(())
    }

    /// Records checksums of blocks written in this transaction.
    pub(crate) fn note_checksums(&mut self, span: Span, sums: &[u32]) -> Result<()> {
        let (run, index) = match span.tier {
            Tier::Nvm => (0, span.start),
            tier => {
                let run = self.layout().run_of(tier, span.start).0;
                (run, span.start % self.layout().unit_blocks(tier))
            }
        };
        self.set_checksums(span.tier, run, index, sums)
    }

    /// Writes bytes at a block of a tier.
    pub(crate) fn put_blocks(&mut self, tier: Tier, start: u64, data: &[u8]) -> Result<()> {
        if armed(Bug::CommitBeforePayload) {
            self.deferred.push((tier, start, data.to_vec()));
            return Ok(());
        }
        self.put_now(tier, start, data)
    }

    /// Adds data blocks to the write that waits for their device, if they follow it; otherwise they wait in its
    /// place. Many small runs that are side by side on a device become one write, so that reads of others
    /// between them cost one way of the arm and not one each; and the devices of a tier write at the same time.
    fn gather(&mut self, tier: Tier, start: u64, data: &[u8]) -> Result<()> {
        if armed(Bug::CommitBeforePayload) {
            return self.put_blocks(tier, start, data);
        }
        let run = self.layout().run_of(tier, start).0;
        let own = |gathered: &Gathered| gathered.tier == tier && gathered.run == run;
        let waiting = self.gathered.iter().position(own);
        let other_tier = self.gathered.iter().any(|gathered| gathered.tier != tier);
        // Where others can write at the same time, a whole turn of a device waits for theirs.
        let large = match self.layout().live_runs(tier).nth(1).is_some() {
            true => data.len() > TURN_MAX,
            false => data.len() >= GATHERED_MAX,
        };
        let at = match waiting {
            Some(at) if self.gathered[at].is_followed_by(tier, start, data.len()) => at,
            None if !other_tier && !self.gathered.is_empty() && !large => {
                self.begin_gathering(tier, run, start)
            }
            _ => {
                self.put_gathered()?;
                if large {
                    return self.put_now(tier, start, data);
                }
                self.begin_gathering(tier, run, start)
            }
        };
        self.gathered[at].bytes.extend_from_slice(data);
        self.touched[tier as usize] = true;
        Ok(())
    }

    fn begin_gathering(&mut self, tier: Tier, run: usize, start: u64) -> usize {
        self.gathered.push(Gathered {
            tier,
            run,
            start,
            bytes: self.spare_buffers.pop().unwrap_or_default(),
        });
        self.gathered.len() - 1
    }

    /// Writes the data blocks that wait: those of several devices at the same time.
    pub(super) fn put_gathered(&mut self) -> Result<()> {
        let gathered = std::mem::take(&mut self.gathered);
        let result = match &gathered[..] {
            [] => return Ok(()),
            [one] => self.put_one(one),
            // All are of one tier.
            [first, ..] => {
                let parts: Vec<(u64, &[u8])> = gathered
                    .iter()
                    .map(|part| (part.start * BLOCK_BYTES, &part.bytes[..]))
                    .collect();
                let bytes = parts.iter().map(|(_, bytes)| bytes.len()).sum();
                self.store.count_write(first.tier, bytes);
                let device = self.store.device(first.tier)?;
                device.write_batch(&parts).map_err(StoreError::from)
            }
        };
        let result = match gathered.first() {
            Some(first) => result.map_err(|error| self.store.lose_device(first.tier, error)),
            None => result,
        };
        self.spare_buffers
            .extend(gathered.into_iter().map(|mut gathered| {
                gathered.bytes.clear();
                gathered.bytes
            }));
        result
    }

    fn put_one(&self, gathered: &Gathered) -> Result<()> {
        self.store.count_write(gathered.tier, gathered.bytes.len());
        let device = self.store.device(gathered.tier)?;
        device.write(gathered.start * BLOCK_BYTES, &gathered.bytes)?;
        Ok(())
    }

    /// Notes bytes of NVM that the next sync must cover.
    pub(super) fn note_nvm(&mut self, offset: u64, bytes: usize) {
        self.nvm_written += bytes;
        let end = offset + bytes as u64;
        let before = self.nvm_range.filter(|_| !armed(Bug::RangeNotMerged));
        let (low, high) = before.unwrap_or((offset, end));
        self.nvm_range = Some((low.min(offset), high.max(end)));
    }

    pub(super) fn put_now(&mut self, tier: Tier, start: u64, data: &[u8]) -> Result<()> {
        let offset = start * BLOCK_BYTES;
        self.touched[tier as usize] = true;
        if tier == Tier::Nvm {
            self.note_nvm(offset, data.len());
            self.store.devices.nvm.write(offset, data)?;
        } else {
            self.put_gathered()?;
            self.store.count_write(tier, data.len());
            let written = self.store.device(tier)?.write(offset, data);
            written.map_err(|error| self.store.lose_device(tier, error.into()))?;
        }
        Ok(())
    }

    /// Reads data blocks, including blocks written by this transaction.
    pub(crate) fn store_read(&self, tier: Tier, start: u64, out: &mut [u8]) -> Result<()> {
        // Writes that a seeded bug put off.
        if let Some((_, first, data)) = self.deferred.iter().rev().find(|(t, first, data)| {
            *t == tier && *first <= start && start < first + (data.len() / BLOCK_SIZE) as u64
        }) {
            let at = (start - first) as usize * BLOCK_SIZE;
            if let Some(part) = data.get(at..at + out.len()) {
                out.copy_from_slice(part);
                return Ok(());
            }
        }
        if !self.ahead.is_some_and(|ahead| ahead.copy_to(tier, start, out)) {
            return self.read_from_device(tier, start, out);
        }
        self.lay_over(tier, start, out);
        Ok(())
    }

    /// As [`store_read`](Self::store_read), but not from what was fetched ahead.
    pub(crate) fn read_from_device(&self, tier: Tier, start: u64, out: &mut [u8]) -> Result<()> {
        self.store.read_blocks(tier, start, out)?;
        self.lay_over(tier, start, out);
        Ok(())
    }

    /// Lays what this transaction has written, and the device has not, over blocks that were read.
    fn lay_over(&self, tier: Tier, start: u64, out: &mut [u8]) {
        match tier {
            Tier::Nvm => self.in_place.lay_over(start, out),
            Tier::Ssd | Tier::Hdd => {
                let waiting = self.gathered.iter();
                waiting.for_each(|gathered| gathered.lay_over(tier, start, out));
            }
        }
    }
}
