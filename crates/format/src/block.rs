//! The header at the start of every metadata block. The block's kind defines the bytes after it.

use crate::{BLOCK_SIZE, BlockNo, Ino};
use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// One block in memory.
pub type Block = [u8; BLOCK_SIZE];

/// Bytes of the header of a metadata block.
pub const BLOCK_HEADER_SIZE: usize = 32;
/// Bytes of a metadata block after its header.
pub const BLOCK_BODY_SIZE: usize = BLOCK_SIZE - BLOCK_HEADER_SIZE;
/// First two bytes after the checksum: "VB".
pub const BLOCK_MAGIC: u16 = u16::from_le_bytes(*b"VB");

/// Kind of a metadata block. The numbers are on media for ever; docs/reference/format.md lists those of
/// features that are not built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum BlockKind {
    /// Sixteen inode images less the header's room.
    InodeTable = 0x01,
    /// Free-space bits of one tier.
    Bitmap = 0x02,
    /// Rows of sessions.
    SessionTable = 0x03,
    /// Rows of grants.
    GrantTable = 0x04,
    /// Checksums of data blocks.
    ChecksumTable = 0x05,
    /// Rows of segments or units.
    UnitTable = 0x06,
    /// Intents to finish an operation that is too big for one record.
    OrphanTable = 0x07,
    /// Counters of the pool and the root of the inode file.
    PoolState = 0x08,
    /// Checksums of a sealed unit, at its end, on its own tier.
    UnitFooter = 0x09,
    /// Rows of devices.
    DeviceTable = 0x0a,
    /// Lowest level of an extent tree.
    ExtentLeaf = 0x10,
    /// Inner level of an extent tree.
    ExtentNode = 0x11,
    /// Lowest level of a directory.
    DirLeaf = 0x12,
    /// Inner level of a directory.
    DirNode = 0x13,
    /// Lowest level of an inode's extended attributes.
    XattrLeaf = 0x14,
    /// Inner level of an inode's extended attributes.
    XattrNode = 0x15,
    /// A part of a long attribute value.
    XattrValue = 0x16,
    /// Target of a symbolic link that is too long for the image.
    Symlink = 0x17,
    /// Lowest level of the tree of the shared runs.
    SharedLeaf = 0x18,
    /// Inner level of the tree of the shared runs.
    SharedNode = 0x19,
}

impl BlockKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [Self; 20] = [
        Self::InodeTable,
        Self::Bitmap,
        Self::SessionTable,
        Self::GrantTable,
        Self::ChecksumTable,
        Self::UnitTable,
        Self::OrphanTable,
        Self::PoolState,
        Self::UnitFooter,
        Self::DeviceTable,
        Self::ExtentLeaf,
        Self::ExtentNode,
        Self::DirLeaf,
        Self::DirNode,
        Self::XattrLeaf,
        Self::XattrNode,
        Self::XattrValue,
        Self::Symlink,
        Self::SharedLeaf,
        Self::SharedNode,
    ];

    /// Returns the kind with this number.
    #[must_use]
    pub fn from_u16(raw: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u16 == raw)
    }
}

/// Header of a metadata block. `crc` covers bytes 4..4096 of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockHeader {
    /// CRC-32C of the rest of the block.
    pub crc: U32,
    /// [`BLOCK_MAGIC`].
    pub magic: U16,
    /// A [`BlockKind`].
    pub kind: U16,
    /// Inode that the block belongs to; 0 for the pool's own.
    pub owner: U64,
    /// The block's own number, with its tier: reveals a misdirected write.
    pub block: U64,
    /// Number of the newest snapshot when the block was written; 0 without that feature, which is not built.
    pub birth: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = {
    assert!(size_of::<BlockHeader>() == BLOCK_HEADER_SIZE);
    assert!(offset_of!(BlockHeader, kind) == 6);
    assert!(offset_of!(BlockHeader, owner) == 8);
    assert!(offset_of!(BlockHeader, block) == 16);
    assert!(offset_of!(BlockHeader, birth) == 24);
};

/// Why the header of a metadata block was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// The checksum is wrong.
    #[error("checksum is {found:#010x}, content has {computed:#010x}")]
    Checksum {
        /// From the header.
        found: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// Not a metadata block.
    #[error("magic is {0:#06x}")]
    Magic(u16),
    /// A block of another kind.
    #[error("kind is {found:#06x}, expected {expected:?}")]
    Kind {
        /// From the header.
        found: u16,
        /// The kind that belongs here.
        expected: BlockKind,
    },
    /// A block of another inode.
    #[error("owner is inode {found}, expected {expected}")]
    Owner {
        /// From the header.
        found: u64,
        /// The owner that belongs here.
        expected: Ino,
    },
    /// A block that was written for another place.
    #[error("block was written for block {0}")]
    Place(u64),
    /// A block of a pool with snapshots.
    #[error("block was written after snapshot {0}, in a pool that has none")]
    Birth(u32),
}

impl BlockHeader {
    /// Builds a header without its checksum, which [`seal_block`] computes.
    #[must_use]
    pub fn new(kind: BlockKind, owner: Ino, block: BlockNo) -> Self {
        Self {
            crc: U32::ZERO,
            magic: U16::new(BLOCK_MAGIC),
            kind: U16::new(kind as u16),
            owner: U64::new(owner.0),
            block: U64::new(block.0),
            birth: U32::ZERO,
            reserved: U32::ZERO,
        }
    }

    /// Returns the header of `block`; checks nothing.
    #[must_use]
    pub fn of(block: &Block) -> Self {
        let mut header = Self::new_zeroed_header();
        header.as_mut_bytes().copy_from_slice(&block[..BLOCK_HEADER_SIZE]);
        header
    }

    fn new_zeroed_header() -> Self {
        zerocopy::FromZeros::new_zeroed()
    }

    /// Checks magic, kind, owner and place, but not the checksum.
    ///
    /// # Errors
    /// The first [`HeaderFault`] found.
    pub fn expect(&self, kind: BlockKind, owner: Ino, block: BlockNo) -> Result<(), HeaderFault> {
        if self.magic.get() != BLOCK_MAGIC {
            return Err(HeaderFault::Magic(self.magic.get()));
        }
        if self.kind.get() != kind as u16 {
            return Err(HeaderFault::Kind {
                found: self.kind.get(),
                expected: kind,
            });
        }
        if self.owner.get() != owner.0 {
            return Err(HeaderFault::Owner {
                found: self.owner.get(),
                expected: owner,
            });
        }
        if self.block.get() != block.0 {
            return Err(HeaderFault::Place(self.block.get()));
        }
        if self.birth.get() != 0 {
            return Err(HeaderFault::Birth(self.birth.get()));
        }
        Ok(())
    }
}

/// Writes a header for this kind, owner and number, with the block's checksum.
pub fn init_block(block: &mut Block, kind: BlockKind, owner: Ino, number: BlockNo) {
    block[..BLOCK_HEADER_SIZE].copy_from_slice(BlockHeader::new(kind, owner, number).as_bytes());
    seal_block(block);
}

/// Sets the new number of a block that moves, and its checksum.
pub fn move_block(block: &mut Block, number: BlockNo) {
    let at = offset_of!(BlockHeader, block);
    block[at..at + 8].copy_from_slice(&number.0.to_le_bytes());
    seal_block(block);
}

/// Computes the checksum of a block whose content is final.
pub fn seal_block(block: &mut Block) {
    let crc = crc32c::crc32c(&block[4..]);
    block[..4].copy_from_slice(&crc.to_le_bytes());
}

/// Returns the entry of a tier's checksum table for a metadata block whose bytes have the checksum `crc`. It
/// differs from the entry for data with equal bytes, so that metadata and data are told apart even if nothing
/// refers to the block.
#[must_use]
pub const fn sum_of_metadata(crc: u32) -> u32 {
    !crc
}

/// Verifies the checksum of a block.
///
/// # Errors
/// [`HeaderFault::Checksum`].
pub fn verify_block(block: &Block) -> Result<(), HeaderFault> {
    let found = BlockHeader::of(block).crc.get();
    let computed = crc32c::crc32c(&block[4..]);
    if found == computed {
        Ok(())
    } else {
        Err(HeaderFault::Checksum { found, computed })
    }
}

#[cfg(test)]
mod tests {
    use super::{BlockHeader, BlockKind, HeaderFault, init_block, seal_block, verify_block};
    use crate::{BlockNo, Ino};

    #[test]
    fn block_is_refused_when_a_bit_flips_or_it_is_anothers() {
        let mut block = [7; crate::BLOCK_SIZE];
        init_block(&mut block, BlockKind::DirLeaf, Ino(9), BlockNo(77));
        assert_eq!(verify_block(&block), Ok(()));
        let header = BlockHeader::of(&block);
        assert_eq!(header.expect(BlockKind::DirLeaf, Ino(9), BlockNo(77)), Ok(()));
        assert!(header.expect(BlockKind::DirNode, Ino(9), BlockNo(77)).is_err());
        assert!(header.expect(BlockKind::DirLeaf, Ino(8), BlockNo(77)).is_err());
        assert_eq!(
            header.expect(BlockKind::DirLeaf, Ino(9), BlockNo(78)),
            Err(HeaderFault::Place(77))
        );
        let mut born = header;
        born.birth.set(1);
        assert_eq!(
            born.expect(BlockKind::DirLeaf, Ino(9), BlockNo(77)),
            Err(HeaderFault::Birth(1))
        );
        block[4095] ^= 1;
        assert!(verify_block(&block).is_err());
        seal_block(&mut block);
        assert_eq!(verify_block(&block), Ok(()));
    }

    #[test]
    fn kinds_keep_their_numbers() {
        for kind in BlockKind::ALL {
            assert_eq!(BlockKind::from_u16(kind as u16), Some(kind));
        }
        assert_eq!(BlockKind::from_u16(0), None);
    }
}
