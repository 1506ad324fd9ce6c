//! Space on a tier: bitmap blocks, checksum tables, unit rows. Owns their layout; the store sets the values.

use crate::BLOCK_BODY_SIZE;
use std::mem::size_of;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bits (blocks) in one bitmap block; bit `i` is bit `i % 8` of body byte `i / 8`. Set: in use.
pub const BITS_PER_BLOCK: u64 = BLOCK_BODY_SIZE as u64 * 8;
/// Checksums in one block of a checksum table or footer.
pub const CHECKSUMS_PER_BLOCK: u64 = BLOCK_BODY_SIZE as u64 / 4;
/// Unit rows in one block.
pub const UNIT_ROWS_PER_BLOCK: u64 = BLOCK_BODY_SIZE as u64 / UNIT_ROW_SIZE as u64;
/// Bytes of a [`UnitRow`].
pub const UNIT_ROW_SIZE: usize = 16;

/// State of one unit of SSD or HDD.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct UnitRow {
    /// [`UnitRow::EMPTY`], [`UnitRow::OPEN`] or [`UnitRow::SEALED`].
    pub state: u8,
    /// The unit's footer that counts (sealed units): 0 or 1.
    pub footer: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// CRC-32C of the checksums in the footer (sealed units).
    pub footer_crc32c: U32,
    /// Transaction that sealed it.
    pub sealed_tx: U64,
}

const _: () = assert!(size_of::<UnitRow>() == UNIT_ROW_SIZE);

impl UnitRow {
    /// No block in use; written from its start next time.
    pub const EMPTY: u8 = 0;
    /// Being written: its checksums are in the tier's open-unit table.
    pub const OPEN: u8 = 1;
    /// Written: its checksums are in one of its footers.
    pub const SEALED: u8 = 2;
    /// Number of places for a footer in a unit. A unit may be opened and sealed again in one transaction: the
    /// new footer goes to the place that does not count, so that the committed one stays whole until the
    /// commit.
    pub const FOOTERS: u64 = 2;
}

/// Returns the blocks of one footer of a unit of `unit_blocks`.
#[must_use]
pub const fn footer_blocks(unit_blocks: u64) -> u64 {
    unit_blocks.div_ceil(CHECKSUMS_PER_BLOCK)
}
