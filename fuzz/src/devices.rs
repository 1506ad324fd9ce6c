//! Device rows and labels, from the bodies of their blocks and the start of a device.

use varve_format::device::{
    DEVICE_ROW_SIZE, DEVICE_ROWS_PER_BLOCK, DeviceLabel, DeviceRow, device_rows as parse,
};
use varve_format::superblock::{Area, Superblock, TierLayout};
use varve_format::{BLOCK_BODY_SIZE, TIER_BLOCKS_MAX};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The superblock of a pool with an SSD of ten units of 64 blocks, and a HDD of four of 128.
pub(crate) fn superblock() -> Superblock {
    let tier = |blocks: u64, unit: u64, at: u64| TierLayout {
        blocks: blocks.into(),
        unit_blocks: unit.into(),
        bitmap: Area::new(at, 1),
        checksums: Area::new(at + 1, 1),
        units: Area::new(at + 2, 1),
    };
    let mut sb = Superblock::new_zeroed();
    sb.first_free.set(100);
    sb.tiers = [tier(10_000, 0, 3), tier(640, 64, 10), tier(512, 128, 13)];
    sb.devices = Area::new(200, 4);
    sb
}

/// Rows of a sound table.
#[cfg(test)]
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let row = |number: u8, tier: u8, first: u64, unit: u64| {
        let at = 300 + u64::from(number) * 3;
        DeviceRow {
            uuid: [number; 16],
            tier,
            state: DeviceRow::IN_USE,
            flags: DeviceRow::LABELLED,
            first: first.into(),
            blocks: (2 * unit).into(),
            unit_blocks: unit.into(),
            bitmap: Area::new(at, 1),
            checksums: Area::new(at + 1, 1),
            units: Area::new(at + 2, 1),
            open_unit: (first / unit + 1).into(),
            data_offset: 4096.into(),
            ..DeviceRow::default()
        }
    };
    let gone = DeviceRow {
        state: DeviceRow::GONE,
        bitmap: Area::default(),
        checksums: Area::default(),
        units: Area::default(),
        open_unit: 0.into(),
        ..row(2, 1, 768, 64)
    };
    let rows = [row(1, 1, 640, 64), gone, row(3, 2, 512, 128)];
    let label = DeviceLabel::of(&rows[0], [7; 16]).as_bytes().to_vec();
    vec![rows[0].as_bytes().to_vec(), rows.as_bytes().to_vec(), label]
}

/// A row that is nearly one of a second SSD, by the numbers of another.
fn mended(row: &DeviceRow) -> DeviceRow {
    let area = |area: Area, at: u64| Area::new(at + area.start.get() % 900, area.blocks.get() % 8);
    DeviceRow {
        uuid: [1; 16],
        tier: 1,
        state: row.state % 4,
        flags: row.flags % 2,
        reserved: [0; 5],
        first: (640 + row.first.get() / 704 % 2 * 64).into(),
        blocks: (row.blocks.get() % 9 * 64).into(),
        unit_blocks: 64.into(),
        bitmap: area(row.bitmap, 300),
        checksums: area(row.checksums, 1_300),
        units: area(row.units, 2_300),
        open_unit: (row.open_unit.get() % 24).into(),
        data_offset: (row.data_offset.get() % (1 << 41) / 64 * 64).into(),
        reserved1: [0; 16],
    }
}

/// A table of device rows, filled up with free ones, and a label; whether rows were taken.
pub fn device_rows(data: &[u8]) -> bool {
    let label = DeviceLabel::read(data);
    if let Some(label) = label {
        assert_eq!(DeviceLabel::read(label.as_bytes()), Some(label));
        return true;
    }
    let one = DeviceRow::read_from_prefix(data).map(|(row, _)| mended(&row));
    one.is_ok_and(|row| table(row.as_bytes())) | table(data)
}

/// Parses a table; whether rows were taken.
fn table(data: &[u8]) -> bool {
    let mut bytes = data.to_vec();
    bytes.resize(
        bytes
            .len()
            .next_multiple_of(DEVICE_ROWS_PER_BLOCK * DEVICE_ROW_SIZE),
        0,
    );
    let bodies: Vec<Vec<u8>> = bytes
        .chunks(DEVICE_ROWS_PER_BLOCK * DEVICE_ROW_SIZE)
        .take(4)
        .map(|rows| [rows, &vec![0; BLOCK_BODY_SIZE - rows.len()]].concat())
        .collect();
    let bodies: Vec<&[u8]> = bodies.iter().map(Vec::as_slice).collect();
    let sb = superblock();
    let Ok(rows) = parse(&bodies, &sb) else {
        return false;
    };
    let mut ends = [640, 512];
    for (slot, row) in &rows {
        assert!(*slot < bodies.len() * DEVICE_ROWS_PER_BLOCK);
        let tier = row.tier().map(|tier| tier as usize);
        let end = &mut ends[tier.unwrap_or_else(|| panic!("a row of no tier")) - 1];
        if row.first.get() > 0 {
            assert_eq!(row.first.get(), *end);
            *end = row.end();
        }
        assert!(row.end() <= TIER_BLOCKS_MAX && row.needed_bytes() < u64::MAX);
        assert!(row.areas().iter().all(|area| area.end() <= 10_000));
    }
    !rows.is_empty()
}
