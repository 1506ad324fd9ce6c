//! Adds devices to tiers and takes them out. Which data leaves a device is not decided here.
//!
//! The order of writes when a device is added: its label, durable; if it is the pool's first with a row, the
//! superblock's feature with the place of the rows, both copies durable; then one record with its row, its
//! tables and the feature in the pool state. A crash before the record leaves a label that no row names, and
//! perhaps a feature that nothing uses: another try begins anew. A device is taken out by one record too,
//! which finds it empty: no block in use, and none that was freed and may still be read.

use super::TxState;
use crate::devices::uuid_text;
use crate::layout::{Place, device_row};
use crate::reader::POOL_INO;
use crate::seeded::{Bug, armed};
use crate::space::{Service, Span};
use crate::{Result, Store, StoreError};
use std::sync::Arc;
use varve_format::device::{
    DEVICE_ROW_SIZE, DEVICE_ROWS_PER_BLOCK, DEVICE_TABLE_BLOCKS, DEVICES_MAX, DeviceLabel, DeviceRow,
};
use varve_format::features::Incompat;
use varve_format::superblock::{Area, FEATURES_VERSION};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Block, BlockKind, BlockNo, Tier, TimeNs, init_block};
use varve_media::span::SpanPart;
use varve_media::{BlockDevice, DeviceState};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

/// A device of a slower tier.
#[derive(Debug, Clone)]
pub struct DeviceStatus {
    /// Its tier.
    pub tier: Tier,
    /// Its UUID; `None`: the only device of its tier needs none.
    pub uuid: Option<[u8; 16]>,
    /// Path or given name; empty if it is gone.
    pub name: String,
    /// Whether it takes new blocks, is emptied, or is gone.
    pub state: DeviceUse,
    /// Blocks that can hold data or metadata.
    pub total: u64,
    /// Of these, free ones.
    pub free: u64,
    /// Of these, ones that were freed and may still be read.
    pub pending: u64,
    /// Its first number on the tier, and how many numbers it has.
    pub numbers: (u64, u64),
    /// Why it takes no writes any more, if so.
    pub failed: Option<Arc<str>>,
}

impl DeviceStatus {
    /// Its UUID as text.
    #[must_use]
    pub fn uuid_text(&self) -> Option<String> {
        self.uuid.as_ref().map(uuid_text)
    }

    /// Blocks in use.
    #[must_use]
    pub const fn used(&self) -> u64 {
        self.total.saturating_sub(self.free + self.pending)
    }
}

/// What a device of a tier is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceUse {
    /// Data.
    InUse,
    /// It is emptied, to be taken out.
    Emptying,
    /// It was taken out.
    Gone,
}

impl Store {
    /// Returns the devices of SSD and HDD, by tier and first number.
    ///
    /// # Errors
    /// The device rows cannot be read.
    pub fn device_list(&self) -> Result<Vec<DeviceStatus>> {
        let snapshot = self.snapshot();
        let reader = snapshot.reader();
        let rows = self.rows_in(&mut |place| reader.row(place, BlockKind::DeviceTable, row_in))?;
        let mut out = Vec::new();
        for (tier, span) in [Tier::Ssd, Tier::Hdd].into_iter().zip(&self.spans) {
            let devices = span.as_ref().map_or_else(Vec::new, |span| span.devices());
            for ((lane, run), device) in self.layout.runs(tier).enumerate().zip(devices) {
                let own = |row: &DeviceRow| row.tier() == Some(tier) && row.first.get() == run.first;
                let row = rows.iter().map(|(_, row)| row).find(|row| own(row));
                let (total, free, pending) = self.space.lock().lane_blocks(tier, lane);
                let state = device.as_ref().map(|device| device.state());
                out.push(DeviceStatus {
                    tier,
                    uuid: row.map(|row| row.uuid),
                    name: device.map_or_else(String::new, |device| device.name().to_string()),
                    state: match row.map(|row| row.state) {
                        Some(DeviceRow::EMPTYING) => DeviceUse::Emptying,
                        Some(DeviceRow::GONE) => DeviceUse::Gone,
                        _ => DeviceUse::InUse,
                    },
                    total,
                    free,
                    pending,
                    numbers: (run.first, run.blocks),
                    failed: self.lost(tier, lane).or(match state {
                        Some(DeviceState::Failed { reason }) => Some(reason),
                        _ => None,
                    }),
                });
            }
        }
        Ok(out)
    }

    /// Whether a device is to be emptied.
    #[must_use]
    pub fn empties_devices(&self) -> bool {
        self.space.lock().has_emptying()
    }

    /// Adds a device to a tier that the pool has. Its content is overwritten. Durable when this returns; a
    /// crash before leaves the pool with or without it.
    ///
    /// # Errors
    /// `Devices`: it is too small, or the tier is not there; `Exists`: the pool has a device with this UUID;
    /// `NoSpace`: its tables do not fit in NVM; a device failed.
    pub fn add_device(&self, tier: Tier, device: &Arc<dyn BlockDevice>, uuid: [u8; 16]) -> Result<()> {
        let _one_at_a_time = self.sharing.lock();
        if self.layout.sb.version.get() < FEATURES_VERSION {
            return Err(StoreError::Invalid(
                "the pool's format has one device a tier: varve upgrade",
            ));
        }
        let row = self.planned(tier, &**device, uuid)?;
        let label = DeviceLabel::of(&row, self.layout.sb.pool_uuid);
        if !armed(Bug::RowBeforeLabel) {
            write_label(&**device, label.as_bytes())?;
        }
        let mut tx = self.begin()?;
        // The tables of a large device leave the reserve of NVM to metadata that must change.
        let (table, slot, row) = tx.guard_new(|core| {
            let table = core.table_of_devices()?;
            let (slot, row) = core.insert_device(row, table)?;
            Ok((table, slot, row))
        })?;
        tx.commit()?;
        if armed(Bug::RowBeforeLabel) {
            write_label(&**device, label.as_bytes())?;
        }
        self.layout.set_device_table(table);
        self.layout.add_device(slot, &row);
        if let Some(span) = &self.spans[tier as usize - 1] {
            span.add(SpanPart {
                first_byte: row.first.get() * BLOCK_BYTES,
                len_bytes: row.blocks.get() * BLOCK_BYTES,
                data_offset: row.data_offset.get(),
                device: Some(Arc::clone(device)),
            })?;
        }
        self.space.lock().add_lane(tier, row.blocks.get());
        Ok(())
    }

    /// Returns the row of a device to be added, without its areas.
    fn planned(&self, tier: Tier, device: &dyn BlockDevice, uuid: [u8; 16]) -> Result<DeviceRow> {
        let unit = self.layout.unit_blocks(tier);
        if unit == 0 {
            return Err(StoreError::Devices(format!(
                "a device can be added to a tier that the pool has, and it has no {} tier",
                tier.name()
            )));
        }
        if self.layout.runs(tier).count() >= DEVICES_MAX {
            return Err(StoreError::TableFull("device"));
        }
        // The label has a unit to itself, so that units lie at multiples of their length.
        let blocks = (device.len_bytes() / BLOCK_BYTES).saturating_sub(unit) / unit * unit;
        if blocks == 0 {
            return Err(StoreError::Devices(format!(
                "{} has {} bytes; a device of this {} tier needs {}: one unit for its \
                 label, and one for data",
                device.name(),
                device.len_bytes(),
                tier.name(),
                2 * unit * BLOCK_BYTES
            )));
        }
        let listed = self.device_list()?;
        if uuid == [0; 16] || listed.iter().any(|other| other.uuid == Some(uuid)) {
            return Err(StoreError::Exists);
        }
        Ok(DeviceRow {
            uuid,
            tier: tier as u8,
            state: DeviceRow::IN_USE,
            flags: DeviceRow::LABELLED,
            first: U64::new(self.layout.blocks(tier)),
            blocks: U64::new(blocks),
            unit_blocks: U64::new(unit),
            data_offset: U64::new(unit * BLOCK_BYTES),
            ..DeviceRow::default()
        })
    }

    /// Starts to take a device out: from here on it takes new blocks only when nothing else has room. `first`
    /// is the UUID that a tier's first device gets, which has none yet. Returns the number of the job, which no
    /// job of the pool had before. Durable when this returns.
    ///
    /// # Errors
    /// `NotFound`: there is no such device; `Exists`: it is emptied already; `Invalid`: it is the last of its
    /// tier that takes new blocks; `TableFull`: too many are emptied already.
    pub fn start_emptying(&self, tier: Tier, number: u64, first: [u8; 16], now_ns: TimeNs) -> Result<u64> {
        let _one_at_a_time = self.sharing.lock();
        let listed = self.device_list()?;
        let of_tier = || listed.iter().filter(|device| device.tier == tier);
        let device = of_tier().find(|device| device.numbers.0 == number);
        match device.map(|device| device.state) {
            None | Some(DeviceUse::Gone) => return Err(StoreError::NotFound),
            Some(DeviceUse::Emptying) => return Err(StoreError::Exists),
            Some(DeviceUse::InUse) => {}
        }
        let takes = |device: &&DeviceStatus| device.state == DeviceUse::InUse && device.failed.is_none();
        let others = of_tier()
            .filter(takes)
            .filter(|device| device.numbers.0 != number);
        if others.count() == 0 {
            return Err(StoreError::Invalid(
                "the last device of a tier cannot be taken out",
            ));
        }
        let mut tx = self.begin()?;
        let job = tx.guard(|core| {
            let slot = core.set_device_state(tier, number, DeviceRow::EMPTYING, first)?;
            core.start_removal(slot, now_ns)
        })?;
        tx.commit()?;
        let lane = self.layout.run_of(tier, number).0;
        self.space.lock().set_emptying(tier, lane, true);
        Ok(job)
    }

    /// Lets a device that is emptied take new blocks again. Durable when this returns.
    ///
    /// # Errors
    /// `NotFound`: it is not emptied.
    pub fn cancel_emptying(&self, tier: Tier, number: u64) -> Result<()> {
        let _one_at_a_time = self.sharing.lock();
        self.is_emptied(tier, number)?;
        let mut tx = self.begin()?;
        tx.guard(|core| {
            let slot = core.set_device_state(tier, number, DeviceRow::IN_USE, [0; 16])?;
            core.end_removal(slot)
        })?;
        tx.commit()?;
        let lane = self.layout.run_of(tier, number).0;
        self.space.lock().set_emptying(tier, lane, false);
        Ok(())
    }

    fn is_emptied(&self, tier: Tier, number: u64) -> Result<DeviceStatus> {
        let listed = self.device_list()?;
        let mut emptied = listed
            .into_iter()
            .filter(|device| device.state == DeviceUse::Emptying);
        let found = emptied.find(|device| device.tier == tier && device.numbers.0 == number);
        found.ok_or(StoreError::NotFound)
    }

    /// Takes a device out that is emptied, if nothing is on it any more, nothing that was can still be read,
    /// and the others have room for all that is promised; else returns false. Durable when this returns true:
    /// the device is closed, and may be detached.
    ///
    /// # Errors
    /// `NotFound`: it is not emptied; a device failed.
    pub fn take_out(&self, tier: Tier, number: u64) -> Result<bool> {
        let _one_at_a_time = self.sharing.lock();
        self.is_emptied(tier, number)?;
        let lane = self.layout.run_of(tier, number).0;
        let mut tx = self.begin()?;
        let before = {
            // Whoever allocates has a transaction, and there is one at a time.
            let mut space = self.space.lock();
            let (total, free, pending) = space.lane_blocks(tier, lane);
            let still_read = pending > 0 && !armed(Bug::TakenOutWhileRead);
            // What logs were promised before may need it as a last resort.
            if free + pending < total || still_read || !space.keeps_promises() {
                return Ok(false);
            }
            let before = space.service(tier, lane);
            // The next transaction begins as soon as this one is durable, and must find nothing here.
            space.set_service(tier, lane, Service::Closed);
            before
        };
        let forgotten = tx.guard(|core| core.forget_device(tier, number, lane));
        if let Err(error) = forgotten.and_then(|()| tx.commit()) {
            self.space.lock().set_service(tier, lane, before);
            return Err(error);
        }
        self.layout.device_gone(tier, lane);
        let mut space = self.space.lock();
        space.set_open(tier, lane, None);
        space.set_emptying(tier, lane, false);
        drop(space);
        let span = self.spans[tier as usize - 1].as_ref();
        if let Some(device) = span.and_then(|span| span.remove(lane))
            && number > 0
            && let Err(error) = write_label(&*device, &[0; BLOCK_SIZE])
        {
            tracing::warn!(%error, "the label of a device that was taken out could not be removed");
        }
        Ok(true)
    }

    /// Reads all device rows in use by `read`.
    pub(crate) fn rows_in(
        &self,
        read: &mut dyn FnMut(Place) -> Result<Option<DeviceRow>>,
    ) -> Result<Vec<(usize, DeviceRow)>> {
        let mut rows = Vec::new();
        let blocks = self.layout.device_table().map_or(0, |area| area.blocks.get());
        for slot in 0..blocks as usize * DEVICE_ROWS_PER_BLOCK {
            let Some(place) = self.layout.device_row(slot) else {
                break;
            };
            if let Some(row) = read(place)?
                && !row.is_free()
            {
                rows.push((slot, row));
            }
        }
        Ok(rows)
    }
}

pub(super) fn row_in(bytes: &[u8]) -> Option<DeviceRow> {
    DeviceRow::read_from_bytes(&bytes[..DEVICE_ROW_SIZE]).ok()
}

/// Writes the first block of a device. Durable when this returns.
fn write_label(device: &dyn BlockDevice, bytes: &[u8]) -> Result<()> {
    let mut block = vec![0; BLOCK_SIZE];
    block[..bytes.len()].copy_from_slice(bytes);
    device.write(0, &block)?;
    if !armed(Bug::LabelNotFlushed) {
        device.flush()?;
    }
    Ok(())
}

impl TxState<'_> {
    pub(super) fn device_rows(&self) -> Result<Vec<(usize, DeviceRow)>> {
        let reader = self.reader();
        self.store
            .rows_in(&mut |place| reader.row(place, BlockKind::DeviceTable, row_in))
    }

    /// Returns the area of the device rows; makes it, and sets the feature in the superblock, if the pool has
    /// none.
    fn table_of_devices(&mut self) -> Result<Area> {
        if let Some(area) = self.layout().device_table() {
            return Ok(area);
        }
        let area = self.table(DEVICE_TABLE_BLOCKS, BlockKind::DeviceTable)?;
        let bit = Incompat::DEVICES.bits();
        if armed(Bug::DevicesNotInSuperblock) {
            self.layout().note_feature(bit);
        } else {
            self.store.write_devices(area)?;
            self.layout().note_feature(bit);
        }
        self.change_state(|state| state.features.incompat.set(state.features.incompat.get() | bit))?;
        Ok(area)
    }

    /// Makes a table of `blocks` blocks among the data of NVM.
    fn table(&mut self, blocks: u64, kind: BlockKind) -> Result<Area> {
        let span = self.alloc_meta(blocks, None)?;
        if span.len < blocks {
            return Err(StoreError::NoSpace { blocks });
        }
        for number in span.start..span.start + blocks {
            let mut block: Box<Block> = Box::new([0; BLOCK_SIZE]);
            init_block(&mut block, kind, POOL_INO, BlockNo(number));
            self.insert_fresh(number, Arc::from(block), false);
        }
        Ok(Area::new(span.start, blocks))
    }

    /// Makes the tables of a device and puts its row into a free place.
    fn insert_device(&mut self, mut row: DeviceRow, table: Area) -> Result<(usize, DeviceRow)> {
        let [bitmap, checksums, units] = DeviceRow::area_blocks(row.blocks.get(), row.unit_blocks.get());
        row.bitmap = self.table(bitmap, BlockKind::Bitmap)?;
        row.checksums = self.table(checksums, BlockKind::ChecksumTable)?;
        row.units = self.table(units, BlockKind::UnitTable)?;
        let slot = self.free_row(table)?;
        self.put_row(table, slot, &row)?;
        Ok((slot, row))
    }

    fn free_row(&self, table: Area) -> Result<usize> {
        let taken = self.device_rows()?;
        let slots = table.blocks.get() as usize * DEVICE_ROWS_PER_BLOCK;
        let mut free = (0..slots).filter(|slot| taken.iter().all(|(other, _)| other != slot));
        free.next().ok_or(StoreError::TableFull("device"))
    }

    fn put_row(&mut self, table: Area, slot: usize, row: &DeviceRow) -> Result<()> {
        self.patch(device_row(table, slot), row.as_bytes())
    }

    /// Returns the row of a device; makes that of a tier's first one, with this UUID.
    fn row_of(&self, tier: Tier, number: u64, first: [u8; 16]) -> Result<(Area, usize, DeviceRow)> {
        let Some(table) = self.layout().device_table() else {
            return Err(StoreError::NotFound);
        };
        let rows = self.device_rows()?;
        let own = |row: &DeviceRow| row.tier() == Some(tier) && row.first.get() == number;
        if let Some(found) = rows.iter().find(|(_, row)| own(row)) {
            return Ok((table, found.0, found.1));
        }
        if number > 0 {
            return Err(StoreError::NotFound);
        }
        if first == [0; 16] || rows.iter().any(|(_, row)| row.uuid == first) {
            return Err(StoreError::Exists);
        }
        let layout = self.layout().sb.tier(tier);
        let row = DeviceRow {
            uuid: first,
            tier: tier as u8,
            state: DeviceRow::IN_USE,
            blocks: layout.blocks,
            unit_blocks: layout.unit_blocks,
            bitmap: layout.bitmap,
            checksums: layout.checksums,
            units: layout.units,
            ..DeviceRow::default()
        };
        Ok((table, self.free_row(table)?, row))
    }

    /// Returns the number of the device's row.
    fn set_device_state(&mut self, tier: Tier, number: u64, state: u8, first: [u8; 16]) -> Result<usize> {
        let (table, slot, row) = self.row_of(tier, number, first)?;
        self.put_row(table, slot, &DeviceRow { state, ..row })?;
        Ok(slot)
    }

    /// Makes the row of an empty device that of one that is gone, and frees its tables.
    fn forget_device(&mut self, tier: Tier, number: u64, lane: usize) -> Result<()> {
        let (table, slot, row) = self.row_of(tier, number, [0; 16])?;
        tracing::info!(device = uuid_text(&row.uuid), "a device is taken out");
        self.note_open_unit(tier, lane, None)?;
        let mut gone = DeviceRow {
            state: DeviceRow::GONE,
            open_unit: U64::ZERO,
            ..row
        };
        if number > 0 {
            for area in row.areas() {
                let span = Span {
                    tier: Tier::Nvm,
                    start: area.start.get(),
                    len: area.blocks.get(),
                };
                self.free_span(span, false)?;
            }
            (gone.bitmap, gone.checksums, gone.units) = (Area::default(), Area::default(), Area::default());
        }
        self.end_removal(slot)?;
        self.put_row(table, slot, &gone)
    }
}
