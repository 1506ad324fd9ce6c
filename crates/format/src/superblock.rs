//! The superblock: what a pool is made of and where its fixed areas lie. Everything that changes often is in
//! the pool state block.

use crate::{BLOCK_SIZE, Tier};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NVM blocks that hold the two copies.
pub const SUPERBLOCK_BLOCKS: [u64; 2] = [0, 1];
/// Version of the format that this code writes and the newest it reads.
pub const FORMAT_VERSION: u32 = 2;
/// Pools of this version and later may have metadata on SSD and HDD; before, all of it is in NVM.
pub const COLD_METADATA_VERSION: u32 = 2;
/// Smallest NVM tier, in bytes.
pub const NVM_MIN_BYTES: u64 = 4 << 20;

/// A run of NVM blocks for one purpose.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Area {
    /// First block.
    pub start: U64,
    /// Blocks.
    pub blocks: U64,
}

impl Area {
    /// An area.
    #[must_use]
    pub fn new(start: u64, blocks: u64) -> Self {
        Self {
            start: U64::new(start),
            blocks: U64::new(blocks),
        }
    }

    /// The block after the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.get().saturating_add(self.blocks.get())
    }
}

/// One tier.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct TierLayout {
    /// Blocks of the device in use; 0: the pool has no such tier.
    pub blocks: U64,
    /// Blocks of one unit (the last ones hold the footer); 0 on NVM.
    pub unit_blocks: U64,
    /// Bitmap.
    pub bitmap: Area,
    /// NVM: checksums of all data blocks. Else: checksums of the open unit.
    pub checksums: Area,
    /// Unit table; empty on NVM.
    pub units: Area,
}

/// First 512 bytes of NVM blocks 0 and 1. The valid copy with the higher `sequence` counts.
///
/// `crc32c` covers bytes 0..508.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Superblock {
    /// [`Superblock::MAGIC`].
    pub magic: [u8; 8],
    /// [`FORMAT_VERSION`] of the writer of the pool.
    pub version: U32,
    /// Zero.
    pub reserved0: U32,
    /// Counts the writes of this block.
    pub sequence: U64,
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// Key of the directories' name hash.
    pub dir_hash_key: [u8; 16],
    /// Birth of the pool, nanoseconds since 1970.
    pub created_ns: I64,
    /// Tiers, by [`Tier`].
    pub tiers: [TierLayout; 3],
    /// The pool state block.
    pub state: Area,
    /// Session rows.
    pub sessions: Area,
    /// Grant rows.
    pub grants: Area,
    /// First NVM block that is not part of a fixed area.
    pub first_free: U64,
    /// Bytes of the journal region.
    pub journal_bytes: U64,
    /// Zero.
    pub reserved: [u8; 188],
    /// CRC-32C of bytes 0..508.
    pub crc32c: U32,
}

/// Bytes of a [`Superblock`].
pub const SUPERBLOCK_SIZE: usize = 512;

const _: () = {
    assert!(size_of::<TierLayout>() == 64);
    assert!(size_of::<Superblock>() == SUPERBLOCK_SIZE);
    assert!(offset_of!(Superblock, tiers) == 64);
    assert!(offset_of!(Superblock, crc32c) == 508);
    assert!(SUPERBLOCK_SIZE <= BLOCK_SIZE);
};

/// Why a superblock is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// No superblock at all.
    #[error("no Varve pool (magic not found)")]
    Magic,
    /// Bits changed.
    #[error("the superblock's checksum does not match")]
    Checksum,
    /// From a newer version.
    #[error("format version {0} is newer than {FORMAT_VERSION}, which this program knows")]
    Version(u32),
}

impl Superblock {
    /// Marks a superblock.
    pub const MAGIC: [u8; 8] = *b"VARVE\0SB";

    /// The same superblock with its checksum.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.crc32c = U32::new(crc32c::crc32c(&self.as_bytes()[..508]));
        self
    }

    /// Reads and checks the first bytes of a copy.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let (block, _) = Self::read_from_prefix(bytes).map_err(|_| SuperblockError::Magic)?;
        if block.magic != Self::MAGIC {
            return Err(SuperblockError::Magic);
        }
        if block.crc32c.get() != crc32c::crc32c(&block.as_bytes()[..508]) {
            return Err(SuperblockError::Checksum);
        }
        if block.version.get() > FORMAT_VERSION || block.version.get() == 0 {
            return Err(SuperblockError::Version(block.version.get()));
        }
        Ok(block)
    }

    /// Whether metadata may lie on slower tiers.
    #[must_use]
    pub fn has_cold_metadata(&self) -> bool {
        self.version.get() >= COLD_METADATA_VERSION
    }

    /// Layout of a tier.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> &TierLayout {
        &self.tiers[tier as usize]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn superblock_is_refused_when_flipped_or_newer() {
        let mut block = Superblock::new_zeroed();
        block.magic = Superblock::MAGIC;
        for version in 1..=FORMAT_VERSION {
            block.version = U32::new(version);
            assert!(Superblock::parse(block.sealed().as_bytes()).is_ok());
        }
        for version in [0, FORMAT_VERSION + 1] {
            block.version = U32::new(version);
            assert_eq!(
                Superblock::parse(block.sealed().as_bytes()),
                Err(SuperblockError::Version(version))
            );
        }
        let mut bytes = block.sealed().as_bytes().to_vec();
        bytes[100] ^= 1;
        assert_eq!(Superblock::parse(&bytes), Err(SuperblockError::Checksum));
    }
}
