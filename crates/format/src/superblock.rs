//! The superblock: the tiers of a pool and the places of its fixed areas. Everything that changes often is in
//! the pool state block.

use crate::features::Incompat;
use crate::{BLOCK_SIZE, Features, Tier};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// NVM blocks that hold the two copies.
pub const SUPERBLOCK_BLOCKS: [u64; 2] = [0, 1];
/// Version of the format that this code writes, and the newest it reads.
pub const FORMAT_VERSION: u32 = 3;
/// First version whose pools have feature words; in older ones the bytes have no meaning.
pub const FEATURES_VERSION: u32 = 3;
/// First version whose pools may have metadata on SSD and HDD; in older ones all of it is in NVM.
pub const COLD_METADATA_VERSION: u32 = 2;
/// Most blocks of the area of device rows.
pub const DEVICE_TABLE_BLOCKS_MAX: u64 = 64;
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
    /// Builds an area.
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
    /// Features that a program must know to open the pool; see [`Features`].
    pub incompat: U64,
    /// Features that a program must know to change the pool.
    pub ro_compat: U64,
    /// Features that a program need not know.
    pub compat: U64,
    /// Kind of all checksums: [`Superblock::CRC32C`]. Versions before [`FEATURES_VERSION`] have 0.
    pub checksum_kind: u8,
    /// Kind of the tags; 0: none.
    pub tag_kind: u8,
    /// Progress of adding or removing tags.
    pub tags_state: u8,
    /// Zero.
    pub reserved1: [u8; 5],
    /// Tags, by [`Tier`].
    pub tags: [Area; 3],
    /// Wrapped keys.
    pub keys: Area,
    /// Device rows.
    pub devices: Area,
    /// Features of undigested logs and of the journal.
    pub log_incompat: U64,
    /// Zero.
    pub reserved: [u8; 52],
    /// Tag of this block.
    pub tag: [u8; 16],
    /// CRC-32C of bytes 0..508.
    pub crc32c: U32,
}

/// Bytes of a [`Superblock`].
pub const SUPERBLOCK_SIZE: usize = 512;

const _: () = {
    assert!(size_of::<TierLayout>() == 64);
    assert!(size_of::<Superblock>() == SUPERBLOCK_SIZE);
    assert!(offset_of!(Superblock, tiers) == 64);
    assert!(offset_of!(Superblock, incompat) == 320);
    assert!(offset_of!(Superblock, tags) == 352);
    assert!(offset_of!(Superblock, devices) == 416);
    assert!(offset_of!(Superblock, log_incompat) == 432);
    assert!(offset_of!(Superblock, tag) == 492);
    assert!(offset_of!(Superblock, crc32c) == 508);
    assert!(SUPERBLOCK_SIZE <= BLOCK_SIZE);
};

/// Reason why a superblock is not used.
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
    /// Features that this program does not support.
    #[error("the pool uses features that this program cannot serve: {0}")]
    Features(Features),
    /// A copy whose last write was lost.
    #[error("the pool has features that the superblock does not name ({0}): this copy of it is an old one")]
    Stale(Features),
    /// A field that none of its features allows.
    #[error("the superblock has {0}, which no feature of the pool allows")]
    Stray(&'static str),
}

impl SuperblockError {
    /// Whether the pool may be intact although this program cannot use it. This program must not repair or
    /// overwrite it then.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        matches!(self, Self::Version(_) | Self::Features(_) | Self::Stale(_))
    }
}

impl Superblock {
    /// Marks a superblock.
    pub const MAGIC: [u8; 8] = *b"VARVE\0SB";
    /// [`checksum_kind`](Self::checksum_kind) of CRC-32C, the only one.
    pub const CRC32C: u8 = 1;

    /// Returns this superblock with its checksum.
    #[must_use]
    pub fn sealed(mut self) -> Self {
        self.crc32c = U32::new(crc32c::crc32c(&self.as_bytes()[..508]));
        self
    }

    /// Reads the first bytes of a copy and checks that it is whole.
    ///
    /// # Errors
    /// [`SuperblockError::Magic`] or [`SuperblockError::Checksum`].
    pub fn read(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let (block, _) = Self::read_from_prefix(bytes).map_err(|_| SuperblockError::Magic)?;
        if block.magic != Self::MAGIC {
            return Err(SuperblockError::Magic);
        }
        if block.crc32c.get() != crc32c::crc32c(&block.as_bytes()[..508]) {
            return Err(SuperblockError::Checksum);
        }
        Ok(block)
    }

    /// As [`read`](Self::read), and [`check`](Self::check).
    ///
    /// # Errors
    /// Errors of `read` and `check`.
    pub fn parse(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let block = Self::read(bytes)?;
        block.check()?;
        Ok(block)
    }

    /// Checks that this program can serve the pool.
    ///
    /// # Errors
    /// The version, features that are not built, or fields of features that the pool does not have.
    pub fn check(&self) -> Result<(), SuperblockError> {
        if self.version.get() > FORMAT_VERSION || self.version.get() == 0 {
            return Err(SuperblockError::Version(self.version.get()));
        }
        if self.version.get() < FEATURES_VERSION {
            return Ok(());
        }
        let unserved = self.features().unserved();
        if !unserved.is_empty() {
            return Err(SuperblockError::Features(unserved));
        }
        let none = Area::default();
        let has_devices = self.incompat.get() & Incompat::DEVICES.bits() != 0;
        let stray = [
            ("another kind of checksums", self.checksum_kind != Self::CRC32C),
            (
                "tags",
                self.tag_kind != 0 || self.tags_state != 0 || self.tag != [0; 16],
            ),
            ("places of tags", self.tags != [none; 3] || self.keys != none),
            ("more devices", !has_devices && self.devices != none),
            (
                "device rows where none can be",
                has_devices && !self.has_place_of_devices(),
            ),
        ];
        match stray.into_iter().find(|(_, is_there)| *is_there) {
            Some((what, _)) => Err(SuperblockError::Stray(what)),
            None => Ok(()),
        }
    }

    /// Whether the area of the device rows is one that can be.
    fn has_place_of_devices(&self) -> bool {
        let area = &self.devices;
        (1..=DEVICE_TABLE_BLOCKS_MAX).contains(&area.blocks.get())
            && area.start.get() >= self.first_free.get()
            && area.end() <= self.tier(Tier::Nvm).blocks.get()
    }

    /// Returns the superblock converted to this program's version.
    #[must_use]
    pub fn upgraded(mut self) -> Self {
        if self.version.get() < FEATURES_VERSION {
            self.reserved0 = U32::ZERO;
            self.as_mut_bytes()[offset_of!(Self, incompat)..].fill(0);
            self.checksum_kind = Self::CRC32C;
        }
        self.version = U32::new(FORMAT_VERSION);
        self.sealed()
    }

    /// Returns the features of the pool.
    #[must_use]
    pub fn features(&self) -> Features {
        if self.version.get() < FEATURES_VERSION {
            return Features::NONE;
        }
        Features {
            incompat: self.incompat,
            ro_compat: self.ro_compat,
            compat: self.compat,
            log_incompat: self.log_incompat,
        }
    }

    /// Whether metadata may lie on slower tiers.
    #[must_use]
    pub fn has_cold_metadata(&self) -> bool {
        self.version.get() >= COLD_METADATA_VERSION
    }

    /// Returns the layout of a tier.
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
            block.checksum_kind = u8::from(version >= FEATURES_VERSION);
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

    fn newest() -> Superblock {
        let mut block = Superblock::new_zeroed();
        block.magic = Superblock::MAGIC;
        block.upgraded()
    }

    #[test]
    fn features_that_are_not_built_are_refused_by_name() {
        type Set = fn(&mut Superblock, u64);
        let words: [(&str, u64, Set); 3] = [
            ("snapshots", 2, |block, bits| block.incompat.set(bits)),
            ("projects", 1, |block, bits| block.ro_compat.set(bits)),
            ("placed_payload", 1, |block, bits| block.log_incompat.set(bits)),
        ];
        for (name, bits, set) in words {
            let mut block = newest();
            set(&mut block, bits);
            let error = Superblock::parse(block.sealed().as_bytes()).unwrap_err();
            assert!(error.is_refusal() && error.to_string().ends_with(name), "{error}");
            // In older versions these bytes have no meaning.
            block.version.set(2);
            assert!(Superblock::parse(block.sealed().as_bytes()).is_ok());
            assert!(block.features().is_empty());
        }
        let mut block = newest();
        block.compat.set(u64::MAX);
        assert!(Superblock::parse(block.sealed().as_bytes()).is_ok());
    }

    #[test]
    fn fields_without_their_feature_are_refused() {
        type Change = fn(&mut Superblock);
        let changes: [Change; 9] = [
            |block| block.checksum_kind = 0,
            |block| block.checksum_kind = 2,
            |block| block.tag_kind = 1,
            |block| block.tags_state = 1,
            |block| block.tag[15] = 1,
            |block| block.tags[2] = Area::new(7, 1),
            |block| block.keys = Area::new(7, 1),
            |block| block.devices = Area::new(7, 1),
            |block| block.incompat.set(Incompat::DEVICES.bits()),
        ];
        for change in changes {
            let mut block = newest();
            change(&mut block);
            let error = Superblock::parse(block.sealed().as_bytes()).unwrap_err();
            assert!(matches!(error, SuperblockError::Stray(_)), "{error}");
            assert!(!error.is_refusal());
        }
    }

    #[test]
    fn upgrade_keeps_all_but_the_version_and_what_the_older_one_did_not_look_at() {
        let mut old = Superblock::new_zeroed();
        old.as_mut_bytes().fill(0xa5);
        old.magic = Superblock::MAGIC;
        old.version.set(2);
        let new = Superblock::parse(old.sealed().upgraded().as_bytes()).unwrap();
        assert_eq!(new.version.get(), FORMAT_VERSION);
        assert_eq!(new.as_bytes()[16..320], old.as_bytes()[16..320]);
        assert!(new.features().is_empty());
        assert_eq!(new.upgraded(), new);
    }
}
