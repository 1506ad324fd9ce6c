//! Directory entries and extended attributes as records of nodes, their roots in the inode image, and the
//! keyed hash of names.

use crate::{BlockNo, FileKind, Generation, Ino, InodeKey, NAME_MAX, ROOT_SIZE, Top, XATTR_VALUE_MAX};
use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bits of a record's key that distinguish names with equal hashes.
pub const ORDINAL_BITS: u32 = 15;
/// Names that can share one hash.
pub const ORDINALS: u64 = 1 << ORDINAL_BITS;
/// Lowest key and cookie of an entry; smaller cookies stand for ".", ".." and the start.
pub const COOKIE_MIN: u64 = ORDINALS;
/// Longest attribute value stored beside its name; longer ones have blocks of their own.
pub const XATTR_INLINE_MAX: usize = 1024;
/// Bytes of the root of an inode's attributes, and of each tree that the pool state refers to besides the
/// inode file.
pub const MAP_ROOT_SIZE: usize = 24;
/// Blocks of the longest attribute value.
pub const XATTR_BLOCKS_MAX: usize = XATTR_VALUE_MAX.div_ceil(crate::BLOCK_BODY_SIZE);

/// Secret of a pool: makes hashes of names unpredictable to the users that choose the names.
#[derive(Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct HashKey(pub [u8; 16]);

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(..)")
    }
}

impl HashKey {
    /// Returns the 48-bit hash that orders names; never 0. The high bits of SipHash-2-4, stable on media for
    /// ever.
    #[must_use]
    pub fn name_hash(&self, name: &[u8]) -> u64 {
        (siphash24(&self.0, name) >> 16).max(1)
    }

    /// Returns the key and cookie of the first name with this name's hash.
    #[must_use]
    pub fn first_cookie(&self, name: &[u8]) -> u64 {
        self.name_hash(name) << ORDINAL_BITS
    }
}

fn sip_round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

/// SipHash-2-4 (Aumasson and Bernstein, 2012).
#[must_use]
pub fn siphash24(key: &[u8; 16], data: &[u8]) -> u64 {
    let word = |bytes: &[u8]| {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(padded)
    };
    let (k0, k1) = (word(&key[..8]), word(&key[8..]));
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let chunks = data.chunks_exact(8);
    let tail = word(chunks.remainder()) | ((data.len() as u64) << 56);
    for m in chunks.map(word).chain([tail]) {
        v[3] ^= m;
        sip_round(&mut v);
        sip_round(&mut v);
        v[0] ^= m;
    }
    v[2] ^= 0xff;
    for _ in 0..4 {
        sip_round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

/// Why a record or a root was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    /// Bytes of the wrong length.
    #[error("record has {0} bytes after its key")]
    Size(usize),
    /// A name of 0 or too many bytes.
    #[error("name has {0} bytes")]
    NameLen(usize),
    /// No such kind of file.
    #[error("entry has file kind {0}")]
    Kind(u8),
    /// Inode number 0.
    #[error("entry names inode 0")]
    NoInode,
    /// Value longer than allowed, or lengths that contradict each other.
    #[error("attribute value of {0} bytes does not fit its record")]
    ValueLen(usize),
    /// Flags of a later version.
    #[error("attribute has flags {0:#04x}")]
    Flags(u8),
    /// Reserved bytes are in use.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// Root with impossible levels or counters.
    #[error("root has {height} levels, {nodes} nodes and {entries} entries")]
    Root {
        /// Levels.
        height: u8,
        /// Blocks.
        nodes: u32,
        /// Entries.
        entries: u64,
    },
}

/// Returns the number of a [`FileKind`] in a directory entry (as `d_type`).
#[must_use]
pub const fn file_kind_to_u8(kind: FileKind) -> u8 {
    (kind.mode_bits() >> 12) as u8
}

/// Returns the kind with this number.
#[must_use]
pub const fn file_kind_from_u8(raw: u8) -> Option<FileKind> {
    FileKind::from_mode((raw as u32) << 12)
}

/// A directory entry in a node, after its key; the name follows.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct DirentHead {
    ino: U64,
    generation: U32,
    kind: u8,
    name_len: u8,
}

const _: () = {
    assert!(size_of::<DirentHead>() == 14);
    assert!(offset_of!(DirentHead, kind) == 12);
};

/// A directory entry, borrowed from a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirent<'a> {
    /// The inode that the name stands for.
    pub key: InodeKey,
    /// Its kind.
    pub kind: FileKind,
    /// The name: 1 to 255 bytes.
    pub name: &'a [u8],
}

impl<'a> Dirent<'a> {
    /// Appends the record's bytes after the key.
    ///
    /// # Errors
    /// [`NameFault::NameLen`] if the name is empty or too long, [`NameFault::NoInode`].
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), NameFault> {
        if self.key.ino.0 == 0 {
            return Err(NameFault::NoInode);
        }
        let head = DirentHead {
            ino: U64::new(self.key.ino.0),
            generation: U32::new(self.key.generation.0),
            kind: file_kind_to_u8(self.kind),
            name_len: name_len(self.name)?,
        };
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(self.name);
        Ok(())
    }

    /// Parses a record's bytes after the key.
    ///
    /// # Errors
    /// A [`NameFault`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, NameFault> {
        let (head, name) = DirentHead::read_from_prefix(bytes).map_err(|_| NameFault::Size(bytes.len()))?;
        if name.is_empty() || name.len() != usize::from(head.name_len) {
            return Err(NameFault::NameLen(name.len()));
        }
        if head.ino.get() == 0 {
            return Err(NameFault::NoInode);
        }
        Ok(Self {
            key: InodeKey {
                ino: Ino(head.ino.get()),
                generation: Generation(head.generation.get()),
            },
            kind: file_kind_from_u8(head.kind).ok_or(NameFault::Kind(head.kind))?,
            name,
        })
    }
}

fn name_len(name: &[u8]) -> Result<u8, NameFault> {
    match u8::try_from(name.len()) {
        Ok(len) if len > 0 && name.len() <= NAME_MAX => Ok(len),
        _ => Err(NameFault::NameLen(name.len())),
    }
}

/// An extended attribute in a node, after its key; name, then value or block numbers follow.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct XattrHead {
    value_len: U32,
    name_len: u8,
    flags: u8,
    reserved: U16,
}

const _: () = assert!(size_of::<XattrHead>() == 8);

/// The value lies in blocks of its own.
const XATTR_IN_BLOCKS: u8 = 1;

/// Location of an attribute's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum XattrValue<'a> {
    /// Beside the name.
    Inline(&'a [u8]),
    /// In blocks of kind `XattrValue`, [`BLOCK_BODY_SIZE`](crate::BLOCK_BODY_SIZE) bytes in each but the
    /// last.
    Blocks {
        /// Bytes of the value.
        len: usize,
        /// Its blocks in order.
        blocks: Vec<BlockNo>,
    },
}

/// An extended attribute, borrowed from a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XattrRecord<'a> {
    /// The name: 1 to 255 bytes.
    pub name: &'a [u8],
    /// Location of the value.
    pub value: XattrValue<'a>,
}

impl<'a> XattrRecord<'a> {
    /// Appends the record's bytes after the key.
    ///
    /// # Errors
    /// A [`NameFault`] if name or value are out of bounds.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), NameFault> {
        let (value_len, flags) = match &self.value {
            XattrValue::Inline(value) if value.len() <= XATTR_INLINE_MAX => (value.len(), 0),
            XattrValue::Blocks { len, blocks }
                if *len <= XATTR_VALUE_MAX && blocks.len() == len.div_ceil(crate::BLOCK_BODY_SIZE) =>
            {
                (*len, XATTR_IN_BLOCKS)
            }
            XattrValue::Inline(value) => return Err(NameFault::ValueLen(value.len())),
            XattrValue::Blocks { len, .. } => return Err(NameFault::ValueLen(*len)),
        };
        let head = XattrHead {
            value_len: U32::new(value_len as u32),
            name_len: name_len(self.name)?,
            flags,
            reserved: U16::ZERO,
        };
        out.extend_from_slice(head.as_bytes());
        out.extend_from_slice(self.name);
        match &self.value {
            XattrValue::Inline(value) => out.extend_from_slice(value),
            XattrValue::Blocks { blocks, .. } => {
                for block in blocks {
                    out.extend_from_slice(&block.0.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Parses a record's bytes after the key.
    ///
    /// # Errors
    /// A [`NameFault`].
    pub fn parse(bytes: &'a [u8]) -> Result<Self, NameFault> {
        let (head, rest) = XattrHead::read_from_prefix(bytes).map_err(|_| NameFault::Size(bytes.len()))?;
        let (name_len, len) = (usize::from(head.name_len), head.value_len.get() as usize);
        if name_len == 0 || rest.len() < name_len {
            return Err(NameFault::NameLen(name_len));
        }
        if head.reserved.get() != 0 {
            return Err(NameFault::Reserved);
        }
        let (name, rest) = rest.split_at(name_len);
        let value = match head.flags {
            0 if rest.len() == len && len <= XATTR_INLINE_MAX => XattrValue::Inline(rest),
            XATTR_IN_BLOCKS
                if len <= XATTR_VALUE_MAX && rest.len() == 8 * len.div_ceil(crate::BLOCK_BODY_SIZE) =>
            {
                let number = |bytes: &[u8]| {
                    let mut word = [0; 8];
                    word.copy_from_slice(bytes);
                    BlockNo(u64::from_le_bytes(word))
                };
                XattrValue::Blocks {
                    len,
                    blocks: rest.chunks_exact(8).map(number).collect(),
                }
            }
            0 | XATTR_IN_BLOCKS => return Err(NameFault::ValueLen(len)),
            flags => return Err(NameFault::Flags(flags)),
        };
        Ok(Self { name, value })
    }
}

/// Root of a directory's index, in the inode image. All zeros is an empty directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DirRoot {
    block: U64,
    entries: U64,
    nodes: U32,
    height: u8,
    reserved: [u8; 83],
}

/// Root of an inode's extended attributes, in the inode image. All zeros is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XattrRoot {
    block: U64,
    nodes: U32,
    entries: U32,
    value_blocks: U32,
    height: u8,
    reserved: [u8; 3],
}

/// Root of the shared runs, in the pool state. All zeros is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SharedRoot {
    block: U64,
    nodes: U32,
    runs: U32,
    runs_high: U32,
    height: u8,
    reserved: [u8; 3],
}

impl Default for SharedRoot {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl SharedRoot {
    /// A root with these nodes and runs.
    #[must_use]
    pub fn new(top: &Top, runs: u64) -> Self {
        Self {
            block: U64::new(top.block.0),
            nodes: U32::new(top.nodes),
            runs: U32::new(runs as u32),
            runs_high: U32::new((runs >> 32) as u32),
            height: top.height,
            reserved: [0; 3],
        }
    }

    /// Runs in the tree.
    #[must_use]
    pub fn runs(&self) -> u64 {
        u64::from(self.runs.get()) | u64::from(self.runs_high.get()) << 32
    }

    /// Blocks of the tree.
    #[must_use]
    pub fn node_blocks(&self) -> u32 {
        self.nodes.get()
    }

    /// The top node, checked.
    ///
    /// # Errors
    /// Numbers that contradict each other.
    pub fn top(&self) -> Result<Top, NameFault> {
        let top = Top {
            height: self.height,
            block: BlockNo(self.block.get()),
            nodes: self.nodes.get(),
        };
        check_top(top, self.runs(), self.reserved == [0; 3])
    }
}

const _: () = {
    assert!(size_of::<SharedRoot>() == MAP_ROOT_SIZE);
    assert!(offset_of!(SharedRoot, height) == 20);
    assert!(size_of::<DirRoot>() == ROOT_SIZE);
    assert!(offset_of!(DirRoot, height) == 20);
    assert!(size_of::<XattrRoot>() == MAP_ROOT_SIZE);
    assert!(offset_of!(XattrRoot, height) == 20);
};

fn check_top(top: Top, entries: u64, reserved_zero: bool) -> Result<Top, NameFault> {
    if !reserved_zero {
        return Err(NameFault::Reserved);
    }
    let empty = top.height == 0;
    let zero = top.nodes == 0 && top.block.0 == 0 && entries == 0;
    if top.height > crate::TREE_HEIGHT_MAX || empty != zero || top.nodes < u32::from(top.height) {
        return Err(NameFault::Root {
            height: top.height,
            nodes: top.nodes,
            entries,
        });
    }
    Ok(top)
}

impl Default for DirRoot {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl DirRoot {
    /// Builds a root of these nodes.
    #[must_use]
    pub fn new(top: &Top, entries: u64) -> Self {
        Self {
            block: U64::new(top.block.0),
            entries: U64::new(entries),
            nodes: U32::new(top.nodes),
            height: top.height,
            reserved: [0; 83],
        }
    }

    /// Names in the directory, without "." and "..".
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.entries.get()
    }

    /// Blocks of the index.
    #[must_use]
    pub fn node_blocks(&self) -> u32 {
        self.nodes.get()
    }

    /// Parses and checks the root.
    ///
    /// # Errors
    /// A [`NameFault`].
    pub fn top(&self) -> Result<Top, NameFault> {
        let top = Top {
            height: self.height,
            block: BlockNo(self.block.get()),
            nodes: self.nodes.get(),
        };
        check_top(top, self.entries.get(), self.reserved == [0; 83])
    }
}

impl Default for XattrRoot {
    fn default() -> Self {
        Self::new_zeroed()
    }
}

impl XattrRoot {
    /// Builds a root of these nodes.
    #[must_use]
    pub fn new(top: &Top, entries: u32, value_blocks: u32) -> Self {
        Self {
            block: U64::new(top.block.0),
            nodes: U32::new(top.nodes),
            entries: U32::new(entries),
            value_blocks: U32::new(value_blocks),
            height: top.height,
            reserved: [0; 3],
        }
    }

    /// Attributes.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries.get()
    }

    /// Blocks that hold long values.
    #[must_use]
    pub fn value_blocks(&self) -> u32 {
        self.value_blocks.get()
    }

    /// Blocks of the index.
    #[must_use]
    pub fn node_blocks(&self) -> u32 {
        self.nodes.get()
    }

    /// Parses and checks the root.
    ///
    /// # Errors
    /// A [`NameFault`].
    pub fn top(&self) -> Result<Top, NameFault> {
        let top = Top {
            height: self.height,
            block: BlockNo(self.block.get()),
            nodes: self.nodes.get(),
        };
        check_top(top, u64::from(self.entries.get()), self.reserved == [0; 3])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Dirent, HashKey, XattrRecord, XattrValue, siphash24};
    use crate::{BlockNo, FileKind, InodeKey};
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    #[test]
    fn siphash_gives_the_published_values() {
        let key: [u8; 16] = std::array::from_fn(|i| i as u8);
        let data: Vec<u8> = (0..15).collect();
        assert_eq!(siphash24(&key, &[]), 0x726f_db47_dd0e_0e31);
        assert_eq!(siphash24(&key, &data), 0xa129_ca61_49be_45e5);
        assert_eq!(HashKey(key).name_hash(&data), 0xa129_ca61_49be);
    }

    proptest! {
        #[test]
        fn dirent_comes_back_equal_when_parsed(
            ino in 1_u64..,
            generation: u32,
            name in prop::collection::vec(any::<u8>(), 1..256),
        ) {
            let entry = Dirent { key: InodeKey::new(ino, generation), kind: FileKind::Socket, name: &name };
            let mut bytes = Vec::new();
            entry.encode(&mut bytes).unwrap();
            prop_assert_eq!(Dirent::parse(&bytes), Ok(entry));
            prop_assert_eq!(Dirent::parse(&bytes[..bytes.len() - 1]).is_ok(), false);
        }

        #[test]
        fn records_of_any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Dirent::parse(&bytes);
            let _ = XattrRecord::parse(&bytes);
        }

        #[test]
        fn xattr_comes_back_equal_when_parsed(
            name in prop::collection::vec(any::<u8>(), 1..256),
            value in prop::collection::vec(any::<u8>(), 0..1025),
        ) {
            let record = XattrRecord { name: &name, value: XattrValue::Inline(&value) };
            let mut bytes = Vec::new();
            record.encode(&mut bytes).unwrap();
            prop_assert_eq!(XattrRecord::parse(&bytes), Ok(record));
            let blocks = XattrValue::Blocks { len: 5000, blocks: vec![BlockNo(3), BlockNo(1)] };
            let record = XattrRecord { name: &name, value: blocks };
            bytes.clear();
            record.encode(&mut bytes).unwrap();
            prop_assert_eq!(XattrRecord::parse(&bytes), Ok(record));
        }
    }
}
