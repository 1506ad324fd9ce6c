//! Answers to the kernel: one kind for each kind of request, so that none can be answered with another's. One
//! that is dropped unanswered says `EIO`: a caller must not wait for ever.

use super::wire::{
    AttrOut, CreateOut, Dirent, EntryOut, GetXattrOut, LseekOut, OpenOut, OutHeader, StatfsOut, StatxOut,
    WriteOut, kind_bits,
};
use fuser::{Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use tracing::{debug, warn};
use zerocopy::{Immutable, IntoBytes};

/// The one answer to a request.
#[derive(Debug)]
pub(super) struct Reply<'d> {
    device: &'d File,
    unique: u64,
    answered: bool,
}

impl<'d> Reply<'d> {
    pub(super) const fn new(device: &'d File, unique: u64) -> Self {
        Self {
            device,
            unique,
            answered: false,
        }
    }

    fn put(&mut self, error: i32, parts: &[&[u8]]) {
        self.answered = true;
        let payload: usize = parts.iter().map(|part| part.len()).sum();
        let header = OutHeader {
            len: (size_of::<OutHeader>() + payload) as u32,
            error: -error,
            unique: self.unique,
        };
        let mut slices = [
            IoSlice::new(header.as_bytes()),
            IoSlice::new(&[]),
            IoSlice::new(&[]),
        ];
        for (slice, part) in slices[1..].iter_mut().zip(parts) {
            *slice = IoSlice::new(part);
        }
        // The device takes an answer whole or not at all.
        let written = self.device.write_vectored(&slices[..=parts.len().min(2)]);
        match written {
            Ok(_) => {}
            // Nobody waits for it: the caller was killed, or the mount is gone.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => {
                debug!(unique = self.unique, "an answer is not wanted any more");
            }
            Err(error) => warn!(unique = self.unique, %error, "the kernel does not take an answer"),
        }
    }

    fn bytes(mut self, parts: &[&[u8]]) {
        self.put(0, parts);
    }

    fn value(self, value: &(impl IntoBytes + Immutable)) {
        self.bytes(&[value.as_bytes()]);
    }

    pub(super) fn error(mut self, error: Errno) {
        self.put(error.code(), &[]);
    }
}

impl Drop for Reply<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.put(libc::EIO, &[]);
        }
    }
}

macro_rules! replies {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug)]
            pub struct $name<'d>(pub(super) Reply<'d>);

            impl $name<'_> {
                /// The call fails.
                pub fn error(self, error: Errno) {
                    self.0.error(error);
                }
            }
        )*
    };
}

replies! {
    /// Done, or not.
    ReplyEmpty
    /// A name's inode.
    ReplyEntry
    /// Bytes.
    ReplyData
    /// An open file or directory.
    ReplyOpen
    /// A file that was made and is open.
    ReplyCreate
    /// How much was written.
    ReplyWrite
    /// Space.
    ReplyStatfs
    /// An extended attribute, or a list of their names.
    ReplyXattr
    /// An offset.
    ReplyLseek
}

impl ReplyEmpty<'_> {
    /// It is done.
    pub fn ok(self) {
        self.0.bytes(&[]);
    }
}

impl ReplyEntry<'_> {
    /// The name is that of `attr`'s inode; both are to be cached for `ttl`. Number 0: nothing has the name.
    pub fn entry(self, ttl: &Duration, attr: &FileAttr, generation: Generation) {
        self.0.value(&EntryOut::new(ttl, attr, generation.0));
    }
}

/// Attributes.
#[derive(Debug)]
pub struct ReplyAttr<'d> {
    pub(super) reply: Reply<'d>,
    /// With the time of birth, as `statx` asks for it.
    pub(super) birth: bool,
}

impl ReplyAttr<'_> {
    /// Attributes, to be cached for `ttl`.
    pub fn attr(self, ttl: &Duration, attr: &FileAttr) {
        let (valid, valid_ns) = (ttl.as_secs(), ttl.subsec_nanos());
        if self.birth {
            self.reply.value(&StatxOut {
                valid,
                valid_ns,
                flags: 0,
                reserved: [0; 2],
                stat: attr.into(),
            });
        } else {
            self.reply.value(&AttrOut {
                valid,
                valid_ns,
                reserved: 0,
                attr: attr.into(),
            });
        }
    }

    /// The call fails.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
    }
}

impl ReplyData<'_> {
    /// What was read.
    pub fn data(self, data: &[u8]) {
        self.0.bytes(&[data]);
    }
}

const fn open_out(fh: FileHandle, flags: FopenFlags) -> OpenOut {
    OpenOut {
        fh: fh.0,
        open_flags: flags.bits(),
        backing: 0,
    }
}

impl ReplyOpen<'_> {
    /// It is open, and the kernel names it by `fh` from now on.
    pub fn opened(self, fh: FileHandle, flags: FopenFlags) {
        self.0.value(&open_out(fh, flags));
    }
}

impl ReplyCreate<'_> {
    /// As [`ReplyEntry::entry`] and [`ReplyOpen::opened`] together.
    pub fn created(
        self,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
        fh: FileHandle,
        flags: FopenFlags,
    ) {
        self.0.value(&CreateOut {
            entry: EntryOut::new(ttl, attr, generation.0),
            open: open_out(fh, flags),
        });
    }
}

impl ReplyWrite<'_> {
    /// So many bytes.
    pub fn written(self, size: u32) {
        self.0.value(&WriteOut { size, reserved: 0 });
    }
}

/// What `statfs` answers.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks that nobody has.
    pub blocks_free: u64,
    /// Blocks that an ordinary user may take.
    pub blocks_available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Inodes that nobody has.
    pub files_free: u64,
    /// Bytes in a block.
    pub block_size: u32,
    /// Bytes in the longest name.
    pub name_max: u32,
}

impl ReplyStatfs<'_> {
    /// The space that there is.
    pub fn statfs(self, space: &Space) {
        self.0.value(&StatfsOut {
            blocks: space.blocks,
            blocks_free: space.blocks_free,
            blocks_available: space.blocks_available,
            files: space.files,
            files_free: space.files_free,
            block_size: space.block_size,
            name_max: space.name_max,
            fragment_size: space.block_size,
            reserved: [0; 7],
        });
    }
}

impl ReplyXattr<'_> {
    /// How long it is, for a caller who asks that first.
    pub fn size(self, size: u32) {
        self.0.value(&GetXattrOut { size, reserved: 0 });
    }

    /// The value, or the names.
    pub fn data(self, data: &[u8]) {
        self.0.bytes(&[data]);
    }
}

impl ReplyLseek<'_> {
    /// Where it is.
    pub fn offset(self, offset: u64) {
        self.0.value(&LseekOut { offset });
    }
}

/// Entries of a listing, as many as the kernel has room for.
#[derive(Debug)]
struct Listing {
    bytes: Vec<u8>,
    room: usize,
}

impl Listing {
    fn new(room: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(room),
            room,
        }
    }

    /// Adds an entry behind `head`; answers whether it has no room, and then it has not been added.
    fn add(&mut self, head: &[u8], entry: (INodeNo, u64, FileType), name: &OsStr) -> bool {
        let (ino, offset, kind) = entry;
        let len = (head.len() + size_of::<Dirent>() + name.len()).next_multiple_of(8);
        if self.bytes.len() + len > self.room {
            return true;
        }
        let end = self.bytes.len() + len;
        let dirent = Dirent {
            ino: ino.0,
            offset,
            name_len: name.len() as u32,
            kind: kind_bits(kind),
        };
        self.bytes.extend_from_slice(head);
        self.bytes.extend_from_slice(dirent.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.resize(end, 0);
        false
    }
}

/// Names of a directory.
#[derive(Debug)]
pub struct ReplyDirectory<'d> {
    reply: Reply<'d>,
    listing: Listing,
}

impl<'d> ReplyDirectory<'d> {
    pub(super) fn new(reply: Reply<'d>, room: usize) -> Self {
        Self {
            reply,
            listing: Listing::new(room),
        }
    }

    /// One more; `offset` is where a listing goes on after it. Answers whether there is no room for it.
    pub fn add(&mut self, ino: INodeNo, offset: u64, kind: FileType, name: impl AsRef<OsStr>) -> bool {
        self.listing.add(&[], (ino, offset, kind), name.as_ref())
    }

    /// That is all that there is, or that there is room for.
    pub fn ok(self) {
        self.reply.bytes(&[&self.listing.bytes]);
    }

    /// The call fails.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
    }
}

/// Names of a directory with the attributes of what they name.
#[derive(Debug)]
pub struct ReplyDirectoryPlus<'d> {
    reply: Reply<'d>,
    listing: Listing,
}

impl<'d> ReplyDirectoryPlus<'d> {
    pub(super) fn new(reply: Reply<'d>, room: usize) -> Self {
        Self {
            reply,
            listing: Listing::new(room),
        }
    }

    /// One more, as [`ReplyDirectory::add`] and [`ReplyEntry::entry`].
    pub fn add(
        &mut self,
        ino: INodeNo,
        offset: u64,
        name: impl AsRef<OsStr>,
        ttl: &Duration,
        attr: &FileAttr,
        generation: Generation,
    ) -> bool {
        let entry = EntryOut::new(ttl, attr, generation.0);
        self.listing
            .add(entry.as_bytes(), (ino, offset, attr.kind), name.as_ref())
    }

    /// That is all that there is, or that there is room for.
    pub fn ok(self) {
        self.reply.bytes(&[&self.listing.bytes]);
    }

    /// The call fails.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
    }
}

#[cfg(test)]
mod tests {
    use super::{Listing, Reply};
    use fuser::{FileType, INodeNo};
    use std::io::{Read, Seek};

    #[test]
    fn entries_are_added_while_there_is_room() {
        let mut listing = Listing::new(70);
        let entry = (INodeNo(7), 3, FileType::RegularFile);
        assert!(!listing.add(&[], entry, "name".as_ref()));
        assert_eq!(listing.bytes.len(), 32);
        assert!(!listing.add(&[], entry, "longer-8".as_ref()));
        assert!(listing.add(&[], entry, "x".as_ref()), "full");
        assert_eq!(listing.bytes.len(), 64);
        assert_eq!(&listing.bytes[20..29], b"\x08\0\0\0name\0", "kind, name, padding");
    }

    #[test]
    fn request_that_nobody_answers_fails() {
        let mut file = tempfile::tempfile().expect("a file");
        drop(Reply::new(&file, 9));
        let mut answer = Vec::new();
        file.rewind().expect("back");
        file.read_to_end(&mut answer).expect("the answer");
        let mut expected = 16_u32.to_le_bytes().to_vec();
        expected.extend_from_slice(&(-libc::EIO).to_le_bytes());
        expected.extend_from_slice(&9_u64.to_le_bytes());
        assert_eq!(answer, expected);
    }
}
