//! Several devices of one tier: their rows in NVM, and the label on each. Owns their bytes and decides which
//! rows can be; the store sets the values. Feature `devices`.

use crate::space::{BITS_PER_BLOCK, CHECKSUMS_PER_BLOCK, UNIT_ROWS_PER_BLOCK};
use crate::superblock::{Area, Superblock, TierLayout};
use crate::{BLOCK_BODY_SIZE, BLOCK_BYTES, TIER_BLOCKS_MAX, Tier};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a [`DeviceRow`].
pub const DEVICE_ROW_SIZE: usize = 128;
/// Rows in one block of kind `DeviceTable`.
pub const DEVICE_ROWS_PER_BLOCK: usize = BLOCK_BODY_SIZE / DEVICE_ROW_SIZE;
/// Blocks of the area of device rows of a new pool: each device that a pool ever had keeps its row.
pub const DEVICE_TABLE_BLOCKS: u64 = 4;
/// Most devices that a tier had, those that are gone included.
pub const DEVICES_MAX: usize = 64;
/// Largest `data_offset`, in bytes.
const DATA_OFFSET_MAX: u64 = 1 << 40;

/// A device of a tier of several. A tier's block numbers are one space; each device has a run of it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct DeviceRow {
    /// The device; also in its label. Zero: the row is free.
    pub uuid: [u8; 16],
    /// A [`Tier`]: SSD or HDD.
    pub tier: u8,
    /// [`DeviceRow::IN_USE`], [`DeviceRow::EMPTYING`] or [`DeviceRow::GONE`].
    pub state: u8,
    /// [`DeviceRow::LABELLED`], or none.
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 5],
    /// Its first number on the tier.
    pub first: U64,
    /// Blocks, whole units.
    pub blocks: U64,
    /// Blocks of a unit: the tier's.
    pub unit_blocks: U64,
    /// Bitmap. Areas of a device that is gone are empty, but for those of a tier's first one.
    pub bitmap: Area,
    /// Checksums of its open unit.
    pub checksums: Area,
    /// Unit rows.
    pub units: Area,
    /// Number on the tier plus one of its open unit; 0: none. A tier's first device has it in the pool state.
    pub open_unit: U64,
    /// Byte of the device at which its first block lies.
    pub data_offset: U64,
    /// Zero.
    pub reserved1: [u8; 16],
}

const _: () = {
    assert!(size_of::<DeviceRow>() == DEVICE_ROW_SIZE);
    assert!(offset_of!(DeviceRow, first) == 24);
    assert!(offset_of!(DeviceRow, bitmap) == 48);
    assert!(offset_of!(DeviceRow, open_unit) == 96);
    assert!(offset_of!(DeviceRow, data_offset) == 104);
    assert!(DEVICE_ROWS_PER_BLOCK == 31);
};

/// Why the device rows of a pool are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("device row {row}: {what}")]
pub struct DeviceRowFault {
    /// Number of the row.
    pub row: usize,
    /// Its fault.
    pub what: &'static str,
}

impl DeviceRow {
    /// It takes new blocks.
    pub const IN_USE: u8 = 1;
    /// Its blocks are to move to other devices; it takes new ones only when nothing else has room.
    pub const EMPTYING: u8 = 2;
    /// Nothing is on it, and its numbers are not given again. The device need not be there.
    pub const GONE: u8 = 3;
    /// Flag: the device has a [`DeviceLabel`].
    pub const LABELLED: u8 = 1;

    /// Whether the row is free.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.uuid == [0; 16]
    }

    /// The number after the device's last.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.first.get().saturating_add(self.blocks.get())
    }

    /// The slower tier it is of.
    #[must_use]
    pub fn tier(&self) -> Option<Tier> {
        [Tier::Ssd, Tier::Hdd]
            .into_iter()
            .find(|tier| *tier as u8 == self.tier)
    }

    /// Bytes that the device must have.
    #[must_use]
    pub const fn needed_bytes(&self) -> u64 {
        let blocks = self.blocks.get().saturating_mul(BLOCK_BYTES);
        self.data_offset.get().saturating_add(blocks)
    }

    /// Returns the three areas.
    #[must_use]
    pub const fn areas(&self) -> [Area; 3] {
        [self.bitmap, self.checksums, self.units]
    }

    /// Returns the blocks that its areas need: bitmap, checksums, unit rows.
    #[must_use]
    pub const fn area_blocks(blocks: u64, unit_blocks: u64) -> [u64; 3] {
        [
            blocks.div_ceil(BITS_PER_BLOCK),
            unit_blocks.div_ceil(CHECKSUMS_PER_BLOCK),
            (blocks / unit_blocks).div_ceil(UNIT_ROWS_PER_BLOCK),
        ]
    }

    /// Returns a fault that the row alone shows, with its tier's layout.
    fn fault(&self, layout: &TierLayout, sb: &Superblock) -> Option<&'static str> {
        let unit = layout.unit_blocks.get();
        let blocks = self.blocks.get();
        let open = self.open_unit.get();
        if !(Self::IN_USE..=Self::GONE).contains(&self.state) || self.flags > Self::LABELLED {
            return Some("a state or flag that is not known");
        }
        if self.reserved != [0; 5] || self.reserved1 != [0; 16] {
            return Some("reserved bytes that are not zero");
        }
        if unit == 0 || self.unit_blocks.get() != unit {
            return Some("units of another size than the tier's");
        }
        if blocks == 0 || !blocks.is_multiple_of(unit) || self.end() > TIER_BLOCKS_MAX {
            return Some("blocks that are not whole units, or too many");
        }
        if self.first.get() == 0 {
            let same = blocks == layout.blocks.get()
                && self.areas() == [layout.bitmap, layout.checksums, layout.units];
            let plain = self.flags == 0 && open == 0 && self.data_offset.get() == 0;
            return (!same || !plain)
                .then_some("the first device of its tier, but not as the superblock says");
        }
        if self.flags != Self::LABELLED {
            return Some("no label, and not the first of its tier");
        }
        let offset = self.data_offset.get();
        if offset < BLOCK_BYTES || !offset.is_multiple_of(BLOCK_BYTES) || offset > DATA_OFFSET_MAX {
            return Some("an impossible data offset");
        }
        let own = self.first.get() / unit + 1..=self.end() / unit;
        if open != 0 && (self.state == Self::GONE || !own.contains(&open)) {
            return Some("an open unit that is not its own");
        }
        if self.state == Self::GONE {
            return (self.areas() != [Area::default(); 3]).then_some("gone, with areas");
        }
        let needed = Self::area_blocks(blocks, unit);
        let (first_free, nvm) = (sb.first_free.get(), sb.tier(Tier::Nvm).blocks.get());
        let bad = |(area, needed): (Area, u64)| {
            area.blocks.get() < needed || area.start.get() < first_free || area.end() > nvm
        };
        self.areas()
            .into_iter()
            .zip(needed)
            .any(bad)
            .then_some("an area that is too short or out of place")
    }
}

/// Returns the rows in use of a pool's device table, with their numbers, by tier and first block; `blocks`
/// are the table's blocks without their headers.
///
/// # Errors
/// Rows that cannot be, one by one or together.
pub fn device_rows(blocks: &[&[u8]], sb: &Superblock) -> Result<Vec<(usize, DeviceRow)>, DeviceRowFault> {
    let mut rows = Vec::new();
    for (number, body) in blocks.iter().enumerate() {
        let each = body
            .chunks_exact(DEVICE_ROW_SIZE)
            .take(DEVICE_ROWS_PER_BLOCK)
            .enumerate();
        for (index, bytes) in each {
            let row = number * DEVICE_ROWS_PER_BLOCK + index;
            let refuse = |what| Err(DeviceRowFault { row, what });
            let Ok(read) = DeviceRow::read_from_bytes(bytes) else {
                return refuse("another length");
            };
            if read.is_free() {
                if bytes.iter().any(|byte| *byte != 0) {
                    return refuse("no device, but bytes that are not zero");
                }
                continue;
            }
            let Some(tier) = read.tier() else {
                return refuse("a tier that cannot have several devices");
            };
            if let Some(what) = read.fault(sb.tier(tier), sb) {
                return refuse(what);
            }
            rows.push((row, read));
        }
    }
    rows.sort_by_key(|(_, row)| (row.tier, row.first.get()));
    check_together(&rows, sb)?;
    Ok(rows)
}

/// Checks what rows must be together.
fn check_together(rows: &[(usize, DeviceRow)], sb: &Superblock) -> Result<(), DeviceRowFault> {
    let mut areas = vec![sb.devices];
    let mut uuids: Vec<[u8; 16]> = Vec::new();
    let mut ends = [Tier::Ssd, Tier::Hdd].map(|tier| sb.tier(tier).blocks.get());
    let (mut counts, mut firsts) = ([1_usize; 2], [false; 2]);
    for (number, row) in rows {
        let refuse = |what| Err(DeviceRowFault { row: *number, what });
        let index = usize::from(row.tier) - 1;
        if uuids.contains(&row.uuid) {
            return refuse("a device that has another row");
        }
        uuids.push(row.uuid);
        if row.first.get() == 0 {
            if std::mem::replace(&mut firsts[index], true) {
                return refuse("a second first device of its tier");
            }
            continue;
        }
        if row.first.get() != ends[index] {
            return refuse("numbers that do not follow those of the device before");
        }
        ends[index] = row.end();
        counts[index] += 1;
        if counts[index] > DEVICES_MAX {
            return refuse("more devices than a tier can have");
        }
        for area in row.areas().into_iter().filter(|area| area.blocks.get() > 0) {
            let meets = |other: &Area| area.start.get() < other.end() && other.start.get() < area.end();
            if areas.iter().any(meets) {
                return refuse("an area that meets another one");
            }
            areas.push(area);
        }
    }
    Ok(())
}

/// Bytes of a [`DeviceLabel`].
pub const DEVICE_LABEL_SIZE: usize = 88;

/// First bytes of a device with a row, so that it is known wherever it is attached.
///
/// `crc32c` covers bytes 0..84.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DeviceLabel {
    /// [`DeviceLabel::MAGIC`].
    pub magic: [u8; 8],
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// The device.
    pub uuid: [u8; 16],
    /// A [`Tier`].
    pub tier: u8,
    /// Zero.
    pub reserved: [u8; 7],
    /// As in the row.
    pub first: U64,
    /// As in the row.
    pub blocks: U64,
    /// As in the row.
    pub unit_blocks: U64,
    /// As in the row.
    pub data_offset: U64,
    /// Zero.
    pub reserved1: [u8; 4],
    /// CRC-32C of bytes 0..84.
    pub crc32c: U32,
}

const _: () = {
    assert!(size_of::<DeviceLabel>() == DEVICE_LABEL_SIZE);
    assert!(offset_of!(DeviceLabel, crc32c) == 84);
};

impl DeviceLabel {
    /// Marks a device of a pool.
    pub const MAGIC: [u8; 8] = *b"VARVEDEV";

    /// Returns the label of a row's device.
    #[must_use]
    pub fn of(row: &DeviceRow, pool_uuid: [u8; 16]) -> Self {
        let mut label = Self {
            magic: Self::MAGIC,
            pool_uuid,
            uuid: row.uuid,
            tier: row.tier,
            reserved: [0; 7],
            first: row.first,
            blocks: row.blocks,
            unit_blocks: row.unit_blocks,
            data_offset: row.data_offset,
            reserved1: [0; 4],
            crc32c: U32::ZERO,
        };
        label.crc32c = U32::new(crc32c::crc32c(&label.as_bytes()[..84]));
        label
    }

    /// Reads the label in the first bytes of a device; `None`: it has none, or a damaged one.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let (label, _) = Self::read_from_prefix(bytes).ok()?;
        let sum = crc32c::crc32c(&label.as_bytes()[..84]);
        (label.magic == Self::MAGIC && label.crc32c.get() == sum).then_some(label)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use zerocopy::FromZeros;

    fn superblock() -> Superblock {
        let mut sb = Superblock::new_zeroed();
        sb.first_free.set(100);
        sb.tiers[0].blocks.set(10_000);
        sb.tiers[1] = TierLayout {
            blocks: U64::new(640),
            unit_blocks: U64::new(64),
            bitmap: Area::new(10, 1),
            checksums: Area::new(11, 1),
            units: Area::new(12, 1),
        };
        sb.devices = Area::new(200, 4);
        sb
    }

    fn row(number: u8, first: u64) -> DeviceRow {
        let at = 300 + u64::from(number) * 3;
        DeviceRow {
            uuid: [number; 16],
            tier: 1,
            state: DeviceRow::IN_USE,
            flags: DeviceRow::LABELLED,
            first: U64::new(first),
            blocks: U64::new(128),
            unit_blocks: U64::new(64),
            bitmap: Area::new(at, 1),
            checksums: Area::new(at + 1, 1),
            units: Area::new(at + 2, 1),
            open_unit: U64::new(first / 64 + 1),
            data_offset: U64::new(4096),
            ..DeviceRow::default()
        }
    }

    fn table(rows: &[DeviceRow]) -> Vec<u8> {
        let mut body = vec![0; BLOCK_BODY_SIZE];
        for (place, row) in body.chunks_exact_mut(DEVICE_ROW_SIZE).zip(rows) {
            place.copy_from_slice(row.as_bytes());
        }
        body
    }

    fn parse(rows: &[DeviceRow]) -> Result<usize, &'static str> {
        let body = table(rows);
        let parsed = device_rows(&[&body], &superblock());
        parsed.map(|rows| rows.len()).map_err(|fault| fault.what)
    }

    #[test]
    fn rows_are_read_in_the_order_of_their_numbers() {
        assert_eq!(parse(&[]), Ok(0));
        assert_eq!(parse(&[row(2, 768), row(1, 640)]), Ok(2));
        let first = DeviceRow {
            state: DeviceRow::EMPTYING,
            flags: 0,
            first: U64::ZERO,
            blocks: U64::new(640),
            bitmap: Area::new(10, 1),
            checksums: Area::new(11, 1),
            units: Area::new(12, 1),
            open_unit: U64::ZERO,
            data_offset: U64::ZERO,
            ..row(3, 0)
        };
        assert_eq!(parse(&[row(1, 640), first]), Ok(2));
        let other = DeviceRow {
            uuid: [9; 16],
            ..first
        };
        assert_eq!(parse(&[first, other]), Err("a second first device of its tier"));
    }

    #[test]
    fn rows_that_cannot_be_are_refused() {
        type Change = fn(&mut DeviceRow);
        let changes: [Change; 22] = [
            |row| row.tier = 0,
            |row| row.tier = 2,
            |row| row.tier = 3,
            |row| row.state = 0,
            |row| row.state = 4,
            |row| row.flags = 0,
            |row| row.flags = 2,
            |row| row.reserved[4] = 1,
            |row| row.reserved1[15] = 1,
            |row| row.first.set(0),
            |row| row.first.set(704),
            |row| row.first.set(u64::MAX - 3),
            |row| row.blocks.set(0),
            |row| row.blocks.set(100),
            |row| row.blocks.set(u64::MAX / 64 * 64),
            |row| row.unit_blocks.set(32),
            |row| row.bitmap = Area::new(99, 1),
            |row| row.units = Area::new(9_999, 2),
            |row| row.checksums = row.bitmap,
            |row| row.open_unit.set(10),
            |row| row.open_unit.set(13),
            |row| row.data_offset.set(100),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut bad = row(1, 640);
            change(&mut bad);
            assert!(parse(&[bad]).is_err(), "change {index}");
        }
        let gone = DeviceRow {
            state: DeviceRow::GONE,
            ..row(1, 640)
        };
        assert_eq!(parse(&[gone]), Err("an open unit that is not its own"));
        let twice = DeviceRow {
            uuid: [1; 16],
            ..row(2, 768)
        };
        assert_eq!(parse(&[row(1, 640), twice]), Err("a device that has another row"));
        let meets = DeviceRow {
            units: Area::new(203, 1),
            ..row(1, 640)
        };
        assert_eq!(parse(&[meets]), Err("an area that meets another one"));
        let mut body = table(&[row(1, 640)]);
        body[DEVICE_ROW_SIZE + 40] = 1;
        let stray = device_rows(&[&body], &superblock()).unwrap_err();
        assert_eq!(
            (stray.row, stray.what),
            (1, "no device, but bytes that are not zero")
        );
    }

    #[test]
    fn every_flipped_bit_of_a_row_is_refused_or_one_of_the_fields_that_may_differ() {
        for bit in 0..DEVICE_ROW_SIZE * 8 {
            let mut body = table(&[row(1, 640)]);
            body[bit / 8] ^= 1 << (bit % 8);
            // No panic, and whatever is accepted lies within its bounds.
            if let Ok(rows) = device_rows(&[&body], &superblock()) {
                assert!(rows.iter().all(|(_, row)| row.end() <= TIER_BLOCKS_MAX));
            }
        }
    }

    #[test]
    fn label_is_refused_when_flipped() {
        let label = DeviceLabel::of(&row(1, 640), [7; 16]);
        assert_eq!(DeviceLabel::read(label.as_bytes()), Some(label));
        for bit in 0..DEVICE_LABEL_SIZE * 8 {
            let mut bytes = label.as_bytes().to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(DeviceLabel::read(&bytes), None);
        }
        assert_eq!(DeviceLabel::read(&[0; 20]), None);
    }
}
