//! Operations of log entries: their bodies, encoding and parsing. Knows no header beyond its operation, flags
//! and lengths.

use super::{EntryFlags, EntryHeader, EntryMeta, OpCode, PAYLOAD_MAX, SetAttrMask};
use crate::{Generation, Ino, InodeKey, NAME_MAX, SYMLINK_MAX, TimeNs, XATTR_VALUE_MAX};
use std::mem::size_of;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};
/// Kind of a `fallocate` (`offset` and `len` in bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum FallocateMode {
    /// Allocate; grows the file.
    Allocate = 0,
    /// Allocate; keeps the size.
    AllocateKeepSize = 1,
    /// Make a hole; keeps the size.
    PunchHole = 2,
    /// Zero; grows the file.
    ZeroRange = 3,
    /// Zero; keeps the size.
    ZeroRangeKeepSize = 4,
}

impl FallocateMode {
    /// Returns the mode with this number.
    #[must_use]
    pub const fn from_u32(raw: u32) -> Option<Self> {
        Some(match raw {
            0 => Self::Allocate,
            1 => Self::AllocateKeepSize,
            2 => Self::PunchHole,
            3 => Self::ZeroRange,
            4 => Self::ZeroRangeKeepSize,
            _ => return None,
        })
    }

    /// Whether the file grows to the end of the range.
    #[must_use]
    pub const fn grows(self) -> bool {
        matches!(self, Self::Allocate | Self::ZeroRange)
    }
}

/// New attributes; those outside `mask` are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SetAttr {
    /// The attributes to set.
    pub mask: SetAttrMask,
    /// Permission, set-id and sticky bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last read.
    pub atime_ns: TimeNs,
    /// Last change of the data.
    pub mtime_ns: TimeNs,
}

/// One operation; borrows names and data from the caller's or the log's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogOp<'a> {
    /// Nothing.
    Noop,
    /// `data` at `offset`; the file is at least `offset + data.len()` long afterwards.
    Write {
        /// File.
        key: InodeKey,
        /// Byte offset in the file.
        offset: u64,
        /// Bytes.
        data: &'a [u8],
    },
    /// New length.
    Truncate {
        /// File.
        key: InodeKey,
        /// New length in bytes.
        size: u64,
    },
    /// Space or holes.
    Fallocate {
        /// File.
        key: InodeKey,
        /// Kind of change.
        mode: FallocateMode,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A range becomes the same blocks as a range of another file.
    Share {
        /// File that shares the blocks.
        key: InodeKey,
        /// Its first byte.
        offset: u64,
        /// File that has the blocks.
        source: InodeKey,
        /// Its first byte.
        source_offset: u64,
        /// Bytes; 0: up to the end of the source.
        len: u64,
        /// Only if both ranges hold the same bytes; times and set-id bits stay then.
        compare: bool,
    },
    /// Shared blocks of a range become the file's own again. No byte and no attribute changes.
    Unshare {
        /// File.
        key: InodeKey,
        /// First byte.
        offset: u64,
        /// Bytes; 0: up to the end.
        len: u64,
    },
    /// What the file has alone in a range moves together, on each slower tier by itself. No byte and no
    /// attribute changes.
    Defrag {
        /// File.
        key: InodeKey,
        /// First byte.
        offset: u64,
        /// Bytes; 0: up to the end.
        len: u64,
    },
    /// Mode, owner, times. ctime becomes the entry's time.
    SetAttr {
        /// Inode.
        key: InodeKey,
        /// New values.
        attr: SetAttr,
    },
    /// Sets an extended attribute.
    SetXattr {
        /// Inode.
        key: InodeKey,
        /// Full name with its namespace.
        name: &'a [u8],
        /// Value.
        value: &'a [u8],
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// Inode.
        key: InodeKey,
        /// Full name with its namespace.
        name: &'a [u8],
    },
    /// New inode (any kind) as `name` in `dir`; an empty name makes an unnamed file (O_TMPFILE, nlink 0).
    Create {
        /// Directory.
        dir: InodeKey,
        /// Name, or empty.
        name: &'a [u8],
        /// The new inode.
        key: InodeKey,
        /// Kind and permission bits.
        mode: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Device number.
        rdev: u32,
        /// Target of a symbolic link, else empty.
        target: &'a [u8],
    },
    /// `name` in `dir` becomes one more name of `key`.
    Link {
        /// Directory.
        dir: InodeKey,
        /// New name.
        name: &'a [u8],
        /// Existing inode.
        key: InodeKey,
    },
    /// `name` in `dir`, which names `key`, goes away. A directory must be empty.
    Unlink {
        /// Directory.
        dir: InodeKey,
        /// Name.
        name: &'a [u8],
        /// The inode of the name.
        key: InodeKey,
    },
    /// `key` moves from (`dir`, `name`) to (`new_dir`, `new_name`).
    Rename {
        /// Old directory.
        dir: InodeKey,
        /// Old name.
        name: &'a [u8],
        /// The inode that moves.
        key: InodeKey,
        /// New directory.
        new_dir: InodeKey,
        /// New name.
        new_name: &'a [u8],
        /// The inode at the new name, to be replaced or exchanged. `None`: there is none.
        victim: Option<InodeKey>,
        /// Exchange the two names.
        exchange: bool,
    },
    /// The session has closed its last open of `key`, which has no name left.
    Forget {
        /// Inode.
        key: InodeKey,
    },
}

/// Reason why bytes are not an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LogFormatError {
    /// Unknown operation number.
    #[error("unknown operation {0}")]
    UnknownOp(u8),
    /// Unknown or reserved flag bits.
    #[error("unknown flags {0:#x}")]
    UnknownFlags(u8),
    /// Lengths contradict each other or pass a limit.
    #[error("bad length in operation {op}")]
    BadLength {
        /// Operation number.
        op: u8,
    },
    /// A field has a value that is never written.
    #[error("bad value in operation {op}")]
    BadValue {
        /// Operation number.
        op: u8,
    },
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ShareBody {
    source: U64,
    source_offset: U64,
    len: U64,
    generation: U32,
    compare: U32,
}

/// Body of a [`LogOp::SetAttr`].
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct SetAttrBody {
    mask: U32,
    mode: U32,
    uid: U32,
    gid: U32,
    atime_ns: I64,
    mtime_ns: I64,
}

/// Body of a [`LogOp::Create`], before name and target.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct CreateBody {
    generation: U32,
    mode: U32,
    uid: U32,
    gid: U32,
    rdev: U32,
    name_len: U16,
    target_len: U16,
}

/// Body of a [`LogOp::Link`] and [`LogOp::Unlink`], before the name.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NameBody {
    generation: U32,
}

/// Body of a [`LogOp::Rename`], before the two names.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RenameBody {
    new_dir: U64,
    victim: U64,
    new_dir_generation: U32,
    generation: U32,
    victim_generation: U32,
    exchange: U16,
    name_len: U16,
}

/// Most bytes of a body.
pub const BODY_MAX: usize = size_of::<CreateBody>() + NAME_MAX + SYMLINK_MAX + size_of::<RenameBody>();

/// Whether `len` bytes from `offset` on lie within the largest file.
fn ends_in_file(offset: u64, len: usize) -> bool {
    let end = offset.checked_add(len as u64);
    end.is_some_and(|end| end <= crate::FILE_SIZE_MAX)
}

impl<'a> LogOp<'a> {
    /// Returns the number of the operation.
    #[must_use]
    pub const fn code(&self) -> OpCode {
        match self {
            Self::Noop => OpCode::Noop,
            Self::Write { .. } => OpCode::Write,
            Self::Truncate { .. } => OpCode::Truncate,
            Self::Fallocate { .. } => OpCode::Fallocate,
            Self::Share { .. } => OpCode::Share,
            Self::Unshare { .. } => OpCode::Unshare,
            Self::Defrag { .. } => OpCode::Defrag,
            Self::SetAttr { .. } => OpCode::SetAttr,
            Self::SetXattr { .. } => OpCode::SetXattr,
            Self::RemoveXattr { .. } => OpCode::RemoveXattr,
            Self::Create { .. } => OpCode::Create,
            Self::Link { .. } => OpCode::Link,
            Self::Unlink { .. } => OpCode::Unlink,
            Self::Rename { .. } => OpCode::Rename,
            Self::Forget { .. } => OpCode::Forget,
        }
    }

    /// Returns the bytes after the body: a write's data or an attribute's value.
    #[must_use]
    pub const fn data(&self) -> &'a [u8] {
        match self {
            Self::Write { data, .. } => data,
            Self::SetXattr { value, .. } => value,
            _ => &[],
        }
    }

    /// Appends the body (all of the payload but [`data`](Self::data)) to `out`.
    pub fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            Self::Noop | Self::Write { .. } | Self::Truncate { .. } | Self::Forget { .. } => {}
            Self::Fallocate { mode, len, .. } => {
                out.extend_from_slice(&len.to_le_bytes());
                out.extend_from_slice(&(*mode as u32).to_le_bytes());
            }
            Self::Share {
                source,
                source_offset,
                len,
                compare,
                ..
            } => out.extend_from_slice(
                ShareBody {
                    source: U64::new(source.ino.0),
                    source_offset: U64::new(*source_offset),
                    len: U64::new(*len),
                    generation: U32::new(source.generation.0),
                    compare: U32::new(u32::from(*compare)),
                }
                .as_bytes(),
            ),
            Self::Unshare { len, .. } | Self::Defrag { len, .. } => {
                out.extend_from_slice(&len.to_le_bytes());
            }
            Self::SetAttr { attr, .. } => out.extend_from_slice(
                SetAttrBody {
                    mask: U32::new(attr.mask.bits()),
                    mode: U32::new(attr.mode),
                    uid: U32::new(attr.uid),
                    gid: U32::new(attr.gid),
                    atime_ns: I64::new(attr.atime_ns),
                    mtime_ns: I64::new(attr.mtime_ns),
                }
                .as_bytes(),
            ),
            Self::SetXattr { name, .. } | Self::RemoveXattr { name, .. } => out.extend_from_slice(name),
            Self::Create {
                name,
                key,
                mode,
                uid,
                gid,
                rdev,
                target,
                ..
            } => {
                out.extend_from_slice(
                    CreateBody {
                        generation: U32::new(key.generation.0),
                        mode: U32::new(*mode),
                        uid: U32::new(*uid),
                        gid: U32::new(*gid),
                        rdev: U32::new(*rdev),
                        name_len: U16::new(name.len() as u16),
                        target_len: U16::new(target.len() as u16),
                    }
                    .as_bytes(),
                );
                out.extend_from_slice(name);
                out.extend_from_slice(target);
            }
            Self::Link { name, key, .. } | Self::Unlink { name, key, .. } => {
                out.extend_from_slice(
                    NameBody {
                        generation: U32::new(key.generation.0),
                    }
                    .as_bytes(),
                );
                out.extend_from_slice(name);
            }
            Self::Rename {
                name,
                key,
                new_dir,
                new_name,
                victim,
                exchange,
                ..
            } => {
                let victim = victim.unwrap_or_default();
                out.extend_from_slice(
                    RenameBody {
                        new_dir: U64::new(new_dir.ino.0),
                        victim: U64::new(victim.ino.0),
                        new_dir_generation: U32::new(new_dir.generation.0),
                        generation: U32::new(key.generation.0),
                        victim_generation: U32::new(victim.generation.0),
                        exchange: U16::new(u16::from(*exchange)),
                        name_len: U16::new(name.len() as u16),
                    }
                    .as_bytes(),
                );
                out.extend_from_slice(name);
                out.extend_from_slice(new_name);
            }
        }
    }

    /// Returns the inode that the operation is about, and 0. For name operations returns the (old) directory,
    /// and the number of the inode that the name refers to.
    #[must_use]
    pub const fn subject(&self) -> (InodeKey, u64) {
        match *self {
            Self::Create { .. } | Self::Link { .. } | Self::Unlink { .. } | Self::Rename { .. } => {
                self.header_fields()
            }
            _ => (self.header_fields().0, 0),
        }
    }

    /// Returns the header's `ino`, `generation` and `offset` for this operation.
    const fn header_fields(&self) -> (InodeKey, u64) {
        match *self {
            Self::Noop => (InodeKey::new(0, 0), 0),
            Self::Write { key, offset, .. }
            | Self::Fallocate { key, offset, .. }
            | Self::Share { key, offset, .. }
            | Self::Unshare { key, offset, .. }
            | Self::Defrag { key, offset, .. } => (key, offset),
            Self::Truncate { key, size } => (key, size),
            Self::SetAttr { key, .. }
            | Self::SetXattr { key, .. }
            | Self::RemoveXattr { key, .. }
            | Self::Forget { key } => (key, 0),
            Self::Create { dir, key, .. }
            | Self::Link { dir, key, .. }
            | Self::Unlink { dir, key, .. }
            | Self::Rename { dir, key, .. } => (dir, key.ino.0),
        }
    }

    /// Builds the header of an entry with this operation, its checksum still 0 (see
    /// [`entry_crc`](super::entry_crc)).
    #[must_use]
    pub fn header(&self, meta: &EntryMeta, body_len: usize) -> EntryHeader {
        let (key, offset) = self.header_fields();
        EntryHeader {
            crc32c: U32::new(0),
            op: self.code() as u8,
            flags: meta.flags.bits(),
            body_len: U16::new(body_len as u16),
            payload_len: U32::new((body_len + self.data().len()) as u32),
            generation: U32::new(key.generation.0),
            seq: U64::new(meta.seq.0),
            ino: U64::new(key.ino.0),
            offset: U64::new(offset),
            time_ns: I64::new(meta.time_ns),
            base: U64::new(meta.base.0),
            stable_delta: U32::new(
                meta.seq
                    .0
                    .saturating_sub(meta.stable_below.0)
                    .min(u64::from(u32::MAX)) as u32,
            ),
            tx_left: U32::new(meta.tx_left),
        }
    }

    /// Parses a write whose bytes are not available, as [`parse`](Self::parse) would. Returns the operation
    /// without its bytes, if the header is that of a write.
    ///
    /// # Errors
    /// Names a value that is never written; `UnknownOp` for other operations.
    pub fn parse_write(header: &EntryHeader) -> Result<Self, LogFormatError> {
        let known = EntryFlags::from_bits(header.flags).ok_or(LogFormatError::UnknownFlags(header.flags))?;
        if known.contains(EntryFlags::OUT_OF_LINE) {
            return Err(LogFormatError::UnknownFlags(header.flags));
        }
        if header.op != OpCode::Write as u8 {
            return Err(LogFormatError::UnknownOp(header.op));
        }
        let (len, offset) = (header.payload_len.get() as usize, header.offset.get());
        if header.body_len.get() != 0 || len == 0 || len > PAYLOAD_MAX {
            return Err(LogFormatError::BadLength { op: header.op });
        }
        if !ends_in_file(offset, len) {
            return Err(LogFormatError::BadValue { op: header.op });
        }
        let key = InodeKey {
            ino: Ino(header.ino.get()),
            generation: Generation(header.generation.get()),
        };
        Ok(Self::Write {
            key,
            offset,
            data: &[],
        })
    }

    /// Parses the operation of an entry whose checksum was right. Validates every field.
    ///
    /// # Errors
    /// A [`LogFormatError`] that names a value that is never written.
    pub fn parse(header: &EntryHeader, payload: &'a [u8]) -> Result<Self, LogFormatError> {
        let code = OpCode::from_u8(header.op).ok_or(LogFormatError::UnknownOp(header.op))?;
        let known = EntryFlags::from_bits(header.flags).ok_or(LogFormatError::UnknownFlags(header.flags))?;
        if known.contains(EntryFlags::OUT_OF_LINE) {
            return Err(LogFormatError::UnknownFlags(header.flags));
        }
        let bad_length = LogFormatError::BadLength { op: header.op };
        let bad_value = LogFormatError::BadValue { op: header.op };
        let body_len = usize::from(header.body_len.get());
        if payload.len() != header.payload_len.get() as usize
            || payload.len() > PAYLOAD_MAX
            || body_len > payload.len()
        {
            return Err(bad_length);
        }
        let (body, data) = payload.split_at(body_len);
        let key = InodeKey {
            ino: Ino(header.ino.get()),
            generation: Generation(header.generation.get()),
        };
        let offset = header.offset.get();
        if !matches!(code, OpCode::Write | OpCode::SetXattr) && !data.is_empty() {
            return Err(bad_length);
        }
        let name_ok = |name: &[u8]| {
            !name.is_empty()
                && name.len() <= NAME_MAX
                && name != b"."
                && name != b".."
                && !name.contains(&b'/')
                && !name.contains(&0)
        };
        let xattr_ok = |name: &[u8]| !name.is_empty() && name.len() <= NAME_MAX && !name.contains(&0);
        match code {
            OpCode::Noop | OpCode::Truncate | OpCode::Forget if !body.is_empty() => Err(bad_length),
            OpCode::Noop => Ok(Self::Noop),
            OpCode::Forget => Ok(Self::Forget { key }),
            OpCode::Truncate if offset > crate::FILE_SIZE_MAX => Err(bad_value),
            OpCode::Truncate => Ok(Self::Truncate { key, size: offset }),
            OpCode::Write if !body.is_empty() || data.is_empty() => Err(bad_length),
            OpCode::Write if !ends_in_file(offset, data.len()) => Err(bad_value),
            OpCode::Write => Ok(Self::Write { key, offset, data }),
            OpCode::Fallocate => {
                let body: [u8; 12] = body.try_into().map_err(|_| bad_length)?;
                let (len, mode) = body.split_at(8);
                let len = u64::from_le_bytes(len.try_into().map_err(|_| bad_length)?);
                let mode = u32::from_le_bytes(mode.try_into().map_err(|_| bad_length)?);
                let mode = FallocateMode::from_u32(mode).ok_or(bad_value)?;
                match offset.checked_add(len) {
                    Some(end) if len > 0 && end <= crate::FILE_SIZE_MAX => Ok(Self::Fallocate {
                        key,
                        mode,
                        offset,
                        len,
                    }),
                    _ => Err(bad_value),
                }
            }
            OpCode::Share => {
                let body = ShareBody::read_from_bytes(body).map_err(|_| bad_length)?;
                let (source_offset, len) = (body.source_offset.get(), body.len.get());
                let ends = [offset, source_offset].map(|at| at.checked_add(len));
                let fits = |end: &Option<u64>| end.is_some_and(|end| end <= crate::FILE_SIZE_MAX);
                if !ends.iter().all(fits) || body.compare.get() > 1 {
                    return Err(bad_value);
                }
                Ok(Self::Share {
                    key,
                    offset,
                    source: InodeKey {
                        ino: Ino(body.source.get()),
                        generation: Generation(body.generation.get()),
                    },
                    source_offset,
                    len,
                    compare: body.compare.get() == 1,
                })
            }
            OpCode::Unshare | OpCode::Defrag => {
                let len = u64::from_le_bytes(body.try_into().map_err(|_| bad_length)?);
                let end = offset.checked_add(len);
                if end.is_none_or(|end| end > crate::FILE_SIZE_MAX) {
                    return Err(bad_value);
                }
                Ok(match code {
                    OpCode::Defrag => Self::Defrag { key, offset, len },
                    _ => Self::Unshare { key, offset, len },
                })
            }
            OpCode::SetAttr => {
                let body = SetAttrBody::read_from_bytes(body).map_err(|_| bad_length)?;
                let mask = SetAttrMask::from_bits(body.mask.get()).ok_or(bad_value)?;
                if body.mode.get() & !crate::MODE_PERM_MASK != 0 {
                    return Err(bad_value);
                }
                let attr = SetAttr {
                    mask,
                    mode: body.mode.get(),
                    uid: body.uid.get(),
                    gid: body.gid.get(),
                    atime_ns: body.atime_ns.get(),
                    mtime_ns: body.mtime_ns.get(),
                };
                Ok(Self::SetAttr { key, attr })
            }
            OpCode::SetXattr if !xattr_ok(body) || data.len() > XATTR_VALUE_MAX => Err(bad_value),
            OpCode::SetXattr => Ok(Self::SetXattr {
                key,
                name: body,
                value: data,
            }),
            OpCode::RemoveXattr if !xattr_ok(body) => Err(bad_value),
            OpCode::RemoveXattr => Ok(Self::RemoveXattr { key, name: body }),
            OpCode::Create => {
                let (fixed, rest) = CreateBody::read_from_prefix(body).map_err(|_| bad_length)?;
                let name_len = usize::from(fixed.name_len.get());
                let target_len = usize::from(fixed.target_len.get());
                if rest.len() != name_len + target_len {
                    return Err(bad_length);
                }
                let (name, target) = rest.split_at(name_len);
                let kind = crate::FileKind::from_mode(fixed.mode.get()).ok_or(bad_value)?;
                let symlink = kind == crate::FileKind::Symlink;
                let unnamed_ok = name.is_empty() && kind == crate::FileKind::Regular;
                let extra_bits = fixed.mode.get() & !(crate::MODE_PERM_MASK | crate::MODE_KIND_MASK);
                if !(unnamed_ok || name_ok(name))
                    || extra_bits != 0
                    || symlink == target.is_empty()
                    || target.len() > SYMLINK_MAX
                    || target.contains(&0)
                {
                    return Err(bad_value);
                }
                Ok(Self::Create {
                    dir: key,
                    name,
                    key: InodeKey {
                        ino: Ino(offset),
                        generation: Generation(fixed.generation.get()),
                    },
                    mode: fixed.mode.get(),
                    uid: fixed.uid.get(),
                    gid: fixed.gid.get(),
                    rdev: fixed.rdev.get(),
                    target,
                })
            }
            OpCode::Link | OpCode::Unlink => {
                let (fixed, name) = NameBody::read_from_prefix(body).map_err(|_| bad_length)?;
                if !name_ok(name) {
                    return Err(bad_value);
                }
                let target = InodeKey {
                    ino: Ino(offset),
                    generation: Generation(fixed.generation.get()),
                };
                Ok(if code == OpCode::Link {
                    Self::Link {
                        dir: key,
                        name,
                        key: target,
                    }
                } else {
                    Self::Unlink {
                        dir: key,
                        name,
                        key: target,
                    }
                })
            }
            OpCode::Rename => {
                let (fixed, rest) = RenameBody::read_from_prefix(body).map_err(|_| bad_length)?;
                let name_len = usize::from(fixed.name_len.get());
                if rest.len() < name_len {
                    return Err(bad_length);
                }
                let (name, new_name) = rest.split_at(name_len);
                let victim = (fixed.victim.get() != 0).then(|| InodeKey {
                    ino: Ino(fixed.victim.get()),
                    generation: Generation(fixed.victim_generation.get()),
                });
                let exchange = match fixed.exchange.get() {
                    0 => false,
                    1 => true,
                    _ => return Err(bad_value),
                };
                if !name_ok(name) || !name_ok(new_name) || (exchange && victim.is_none()) {
                    return Err(bad_value);
                }
                Ok(Self::Rename {
                    dir: key,
                    name,
                    key: InodeKey {
                        ino: Ino(offset),
                        generation: Generation(fixed.generation.get()),
                    },
                    new_dir: InodeKey {
                        ino: Ino(fixed.new_dir.get()),
                        generation: Generation(fixed.new_dir_generation.get()),
                    },
                    new_name,
                    victim,
                    exchange,
                })
            }
        }
    }
}
