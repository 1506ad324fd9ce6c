//! The update log: 64-byte entry headers and the operations in them. Encodes and parses; never decides
//! whether an entry counts.
//!
//! An entry is a header of [`HEADER_SIZE`] bytes at a multiple of 64, its *body* (fixed fields and names of
//! the operation) and its *data* (the bytes of a write, or an attribute's value), padded to 64. `crc32c`
//! covers the session id (as a seed), body and data without padding, then header bytes 4..64.

mod op;
#[cfg(test)]
mod tests;

pub use op::{BODY_MAX, FallocateMode, LogFormatError, LogOp, SetAttr};

use crate::{LogSeq, SessionId, TimeNs, TxId};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an entry's header, and the alignment of entries.
pub const HEADER_SIZE: usize = 64;
/// Bytes of one log chunk: an entry never crosses chunks, a lane owns whole ones.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Most payload bytes (body and data) in one entry.
pub const PAYLOAD_MAX: usize = 1 << 20;
/// Most lanes in one log.
pub const LANES_MAX: usize = 64;
/// Most entries in one transaction.
pub const TX_ENTRIES_MAX: u32 = 64;
/// Bytes at the start of chunk 0 that hold the [`LiveHeader`]; entries of chunk 0 start here.
pub const LIVE_HEADER_SIZE: usize = 64;

/// Header of one entry.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct EntryHeader {
    /// CRC-32C, see the module's documentation.
    pub crc32c: U32,
    /// Operation, [`OpCode`].
    pub op: u8,
    /// [`EntryFlags`].
    pub flags: u8,
    /// Bytes of the body; the data is the rest of the payload.
    pub body_len: U16,
    /// Bytes of body and data.
    pub payload_len: U32,
    /// Generation of `ino`.
    pub generation: U32,
    /// Sequence number.
    pub seq: U64,
    /// Inode that the operation is about; for name operations the (old) parent directory.
    pub ino: U64,
    /// File offset, or an operand of the operation.
    pub offset: U64,
    /// Time of the call, nanoseconds since 1970.
    pub time_ns: I64,
    /// Journal transaction that the session's view is based on.
    pub base: U64,
    /// `seq - stable_below`: every number below `stable_below` was committed when this entry was.
    pub stable_delta: U32,
    /// Number of entries that follow in its transaction; 0 in the last.
    pub tx_left: U32,
}

const _: () = {
    assert!(size_of::<EntryHeader>() == HEADER_SIZE);
    assert!(offset_of!(EntryHeader, seq) == 16);
    assert!(offset_of!(EntryHeader, base) == 48);
    assert!(offset_of!(EntryHeader, tx_left) == 60);
};

/// First 64 bytes of a session's log: its session, and the boot in which the live copy was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct LiveHeader {
    /// [`LiveHeader::MAGIC`].
    pub magic: [u8; 8],
    /// Boot id of the kernel that ran when the copy was made.
    pub boot_id: [u8; 16],
    /// The pool.
    pub pool_uuid: [u8; 16],
    /// The session.
    pub session: U64,
    /// Format version, 1.
    pub version: U32,
    /// Zero.
    pub reserved: [u8; 8],
    /// CRC-32C of bytes 0..60.
    pub crc32c: U32,
}

const _: () = assert!(size_of::<LiveHeader>() == LIVE_HEADER_SIZE);

impl LiveHeader {
    /// Marks a log.
    pub const MAGIC: [u8; 8] = *b"VARVELOG";

    /// Builds a header for `session`, with its checksum.
    #[must_use]
    pub fn new(boot_id: [u8; 16], pool_uuid: [u8; 16], session: SessionId) -> Self {
        let mut header = Self {
            magic: Self::MAGIC,
            boot_id,
            pool_uuid,
            session: U64::new(session.0),
            version: U32::new(1),
            reserved: [0; 8],
            crc32c: U32::new(0),
        };
        header.crc32c = U32::new(crc32c::crc32c(&header.as_bytes()[..60]));
        header
    }

    /// Whether magic, version and checksum are right.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.magic == Self::MAGIC
            && self.version.get() == 1
            && self.crc32c.get() == crc32c::crc32c(&self.as_bytes()[..60])
    }
}

/// Operation of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum OpCode {
    /// An abandoned number.
    Noop = 1,
    /// Bytes at an offset.
    Write = 2,
    /// New length.
    Truncate = 3,
    /// `fallocate`.
    Fallocate = 4,
    /// chmod, chown, utimens.
    SetAttr = 5,
    /// Set an extended attribute.
    SetXattr = 6,
    /// Remove an extended attribute.
    RemoveXattr = 7,
    /// Make an inode and (unless the name is empty) its first name.
    Create = 8,
    /// Another name.
    Link = 9,
    /// Remove a name (files and empty directories).
    Unlink = 10,
    /// Move, replace or exchange names.
    Rename = 11,
    /// The last open of an unlinked inode is gone.
    Forget = 12,
    /// A range becomes the same blocks as a range of another file. Only as a forwarded operation: a log that
    /// holds it is refused.
    Share = 13,
    /// Shared blocks of a range become the file's own again. Only as a forwarded operation, as `Share`.
    Unshare = 14,
    /// What a file has alone in a range moves together. Only as a forwarded operation, as `Share`.
    Defrag = 15,
}

impl OpCode {
    /// Returns the operation with this number.
    #[must_use]
    pub const fn from_u8(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Noop,
            2 => Self::Write,
            3 => Self::Truncate,
            4 => Self::Fallocate,
            5 => Self::SetAttr,
            6 => Self::SetXattr,
            7 => Self::RemoveXattr,
            8 => Self::Create,
            9 => Self::Link,
            10 => Self::Unlink,
            11 => Self::Rename,
            12 => Self::Forget,
            13 => Self::Share,
            14 => Self::Unshare,
            15 => Self::Defrag,
            _ => return None,
        })
    }
}

bitflags::bitflags! {
    /// Flags of an entry.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct EntryFlags: u8 {
        /// The change clears the set-user-id bit (a write or truncate by a user without the right to keep
        /// it).
        const CLEAR_SUID = 1;
        /// The change clears the set-group-id bit.
        const CLEAR_SGID = 2;
        /// The victim of an unlink or replacing rename is not open in this session.
        const LAST_CLOSED = 4;
        /// The payload is out of line (staging blocks). Reserved: refused in version 1.
        const OUT_OF_LINE = 8;
        /// Not the first entry of its transaction: it counts only if the entry before it does.
        const CONTINUES = 16;
    }
}

bitflags::bitflags! {
    /// Which attributes a [`LogOp::SetAttr`] sets.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct SetAttrMask: u32 {
        /// Permission bits.
        const MODE = 1;
        /// Owner.
        const UID = 2;
        /// Group.
        const GID = 4;
        /// Time of the last read.
        const ATIME = 8;
        /// Time of the last change of the data.
        const MTIME = 16;
    }
}

/// Fields of a header that the log's writer knows and the operation does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EntryMeta {
    /// Sequence number.
    pub seq: LogSeq,
    /// All lower numbers were committed.
    pub stable_below: LogSeq,
    /// Journal transaction of the session's view.
    pub base: TxId,
    /// Entries of the transaction still to come.
    pub tx_left: u32,
    /// Time of the call.
    pub time_ns: TimeNs,
    /// Flags.
    pub flags: EntryFlags,
}

/// Returns the bytes that an entry with this payload takes in the log.
#[must_use]
pub const fn entry_size(payload_len: usize) -> usize {
    HEADER_SIZE + payload_len.next_multiple_of(HEADER_SIZE)
}

/// Returns the seed of every checksum in the log of `session`.
#[must_use]
pub fn crc_seed(session: SessionId) -> u32 {
    crc32c::crc32c(&session.0.to_le_bytes())
}

/// Returns the checksum of an entry, given the checksum of its payload seeded with [`crc_seed`]: the header's
/// bytes 4..64 go last, so that a payload can be checksummed while it is copied, before its sequence number
/// is known.
#[must_use]
pub fn entry_crc(payload_crc: u32, header: &EntryHeader) -> u32 {
    crc32c::crc32c_append(payload_crc, &header.as_bytes()[4..])
}

/// Returns the checksum of a payload in the log of a session: the first argument of [`entry_crc`].
#[must_use]
pub fn payload_crc(seed: u32, payload: &[u8]) -> u32 {
    if crate::seeded::armed(crate::seeded::Bug::EntryPayloadUnchecked) {
        return seed;
    }
    if crate::seeded::armed(crate::seeded::Bug::EntryTailUnchecked) {
        return crc32c::crc32c_append(seed, &payload[..payload.len() / HEADER_SIZE * HEADER_SIZE]);
    }
    crc32c::crc32c_append(seed, payload)
}
