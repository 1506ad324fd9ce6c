//! Replies to the kernel: one type per kind of request, so that a request cannot get the reply of another
//! kind. A reply dropped unanswered sends `EIO`, so that no caller waits forever.

use super::wire::{
    AttrOut, CreateOut, Dirent, EntryOut, GetXattrOut, LseekOut, OpenOut, OutHeader, StatfsOut, StatxOut,
    WriteOut, kind_bits,
};
use fuser::{Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo};
use std::cell::{Cell, RefCell};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use tracing::{debug, warn};
use zerocopy::{Immutable, IntoBytes};

/// Where a reply goes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Channel<'d> {
    /// To a descriptor of `/dev/fuse`, at once.
    Device(&'d File),
    /// To the entry of a ring, once the request's operation has returned.
    Entry(&'d RefCell<PendingReply>),
}

/// A reply that waits for its entry to be committed.
#[derive(Debug, Default)]
pub(super) struct PendingReply {
    /// 0, or a positive error number.
    pub(super) error: i32,
    /// The payload.
    pub(super) bytes: Vec<u8>,
    /// Bytes of payload that are in the entry already, instead of `bytes`.
    pub(super) in_place: usize,
}

/// The one reply to a request.
#[derive(Debug)]
pub(super) struct Reply<'d> {
    channel: Channel<'d>,
    unique: u64,
    answered: bool,
}

impl<'d> Reply<'d> {
    pub(super) const fn new(channel: Channel<'d>, unique: u64) -> Self {
        Self {
            channel,
            unique,
            answered: false,
        }
    }

    fn put(&mut self, error: i32, parts: &[&[u8]]) {
        self.answered = true;
        match self.channel {
            Channel::Device(device) => self.write(device, error, parts),
            Channel::Entry(answer) => {
                let mut answer = answer.borrow_mut();
                answer.error = error;
                answer.bytes.clear();
                for part in parts {
                    answer.bytes.extend_from_slice(part);
                }
            }
        }
    }

    fn write(&self, mut device: &File, error: i32, parts: &[&[u8]]) {
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
        // The device takes a reply whole or not at all.
        let written = device.write_vectored(&slices[..=parts.len().min(2)]);
        match written {
            Ok(_) => {}
            // The caller was killed, or the mount is gone.
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
                /// Fails the call.
                pub fn error(self, error: Errno) {
                    self.0.error(error);
                }
            }
        )*
    };
}

replies! {
    /// Success or failure only.
    ReplyEmpty
    /// The inode of a name.
    ReplyEntry
    /// The target of a symbolic link.
    ReplyLink
    /// An open file or directory.
    ReplyOpen
    /// A new file, open.
    ReplyCreate
    /// The number of bytes written.
    ReplyWrite
    /// The space of the file system.
    ReplyStatfs
    /// An extended attribute, or a list of attribute names.
    ReplyXattr
    /// A file offset.
    ReplyLseek
}

impl ReplyEmpty<'_> {
    /// Reports success.
    pub fn ok(self) {
        self.0.bytes(&[]);
    }
}

/// How long the kernel may cache a name and the attributes of its inode.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Of the name, or of its absence.
    pub name: Duration,
    /// Of the attributes.
    pub attr: Duration,
}

impl ReplyEntry<'_> {
    /// Replies with the inode `attr` of the name; the kernel may cache both for `ttl`. Inode number 0 means
    /// that the name does not exist.
    pub fn entry(self, ttl: &Timeouts, attr: &FileAttr, generation: Generation) {
        self.0.value(&EntryOut::new(ttl, attr, generation.0));
    }
}

/// Attributes.
#[derive(Debug)]
pub struct ReplyAttr<'d> {
    pub(super) reply: Reply<'d>,
    /// Whether the time of birth is included, as `statx` requests.
    pub(super) birth: bool,
}

impl ReplyAttr<'_> {
    /// Replies with attributes, which the kernel may cache for `ttl`.
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

    /// Fails the call.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
    }
}

impl ReplyLink<'_> {
    /// Replies with the target.
    pub fn target(self, target: &[u8]) {
        self.0.bytes(&[target]);
    }
}

thread_local! {
    /// Where a thread reads data to, if the request brought no payload buffer.
    static BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Bytes of data.
#[derive(Debug)]
pub struct ReplyData<'d> {
    pub(super) reply: Reply<'d>,
    /// The payload of the entry.
    pub(super) payload: Option<&'d mut [u8]>,
}

impl ReplyData<'_> {
    /// Replies with the bytes that `read` puts at the start of a buffer of `size` bytes, whose number it
    /// returns, or with its error.
    pub fn read(self, size: usize, read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>) {
        let Self { mut reply, payload } = self;
        if let (Some(payload), Channel::Entry(answer)) = (payload, reply.channel) {
            let size = size.min(payload.len());
            match read(&mut payload[..size]) {
                Ok(len) => {
                    reply.put(0, &[]);
                    answer.borrow_mut().in_place = len;
                }
                Err(error) => reply.error(error),
            }
            return;
        }
        let mut buffer = BUFFER.take();
        if buffer.len() < size {
            buffer.resize(size, 0);
        }
        match read(&mut buffer[..size]) {
            Ok(len) => reply.bytes(&[&buffer[..len]]),
            Err(error) => reply.error(error),
        }
        BUFFER.set(buffer);
    }

    /// Fails the call.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
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
    /// Reports the file as open; the kernel names it `fh` in later requests.
    pub fn opened(self, fh: FileHandle, flags: FopenFlags) {
        self.0.value(&open_out(fh, flags));
    }
}

impl ReplyCreate<'_> {
    /// Combines [`ReplyEntry::entry`] and [`ReplyOpen::opened`].
    pub fn created(
        self,
        ttl: &Timeouts,
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
    /// Replies with the number of bytes written.
    pub fn written(self, size: u32) {
        self.0.value(&WriteOut { size, reserved: 0 });
    }
}

/// The space of the file system, as for `statfs`.
#[derive(Debug, Clone, Copy)]
pub struct Space {
    /// Total blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks available to an ordinary user.
    pub blocks_available: u64,
    /// Total inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of the longest name.
    pub name_max: u32,
}

impl ReplyStatfs<'_> {
    /// Replies with the space of the file system.
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
    /// Replies with the length of the value, for a caller that requests only the length.
    pub fn size(self, size: u32) {
        self.0.value(&GetXattrOut { size, reserved: 0 });
    }

    /// Replies with the value, or the names.
    pub fn data(self, data: &[u8]) {
        self.0.bytes(&[data]);
    }
}

impl ReplyLseek<'_> {
    /// Replies with the offset.
    pub fn offset(self, offset: u64) {
        self.0.value(&LseekOut { offset });
    }
}

/// Entries of a listing, up to the size of the kernel's buffer.
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

    /// Adds an entry behind `head`. Returns true, without adding it, if there is no room.
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

/// The names of a directory.
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

    /// Adds an entry; `offset` is where a listing continues after it. Returns whether there is no room for
    /// it.
    pub fn add(&mut self, ino: INodeNo, offset: u64, kind: FileType, name: impl AsRef<OsStr>) -> bool {
        self.listing.add(&[], (ino, offset, kind), name.as_ref())
    }

    /// Sends the entries.
    pub fn ok(self) {
        self.reply.bytes(&[&self.listing.bytes]);
    }

    /// Fails the call.
    pub fn error(self, error: Errno) {
        self.reply.error(error);
    }
}

#[cfg(test)]
mod tests {
    use super::{Channel, Listing, PendingReply, Reply, ReplyData, ReplyEmpty};
    use fuser::{Errno, FileType, INodeNo};
    use std::cell::RefCell;
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
        drop(Reply::new(Channel::Device(&file), 9));
        let mut answer = Vec::new();
        file.rewind().expect("back");
        file.read_to_end(&mut answer).expect("the answer");
        let mut expected = 16_u32.to_le_bytes().to_vec();
        expected.extend_from_slice(&(-libc::EIO).to_le_bytes());
        expected.extend_from_slice(&9_u64.to_le_bytes());
        assert_eq!(answer, expected);
    }
    #[test]
    fn reply_to_an_entry_waits_there() {
        let answer = RefCell::new(PendingReply::default());
        let reply = || Reply::new(Channel::Entry(&answer), 9);
        let mut payload = [0; 8];
        ReplyData {
            reply: reply(),
            payload: Some(&mut payload),
        }
        .read(100, |out| {
            assert_eq!(out.len(), 8, "no more than there is room for");
            out[..3].copy_from_slice(b"abc");
            Ok(3)
        });
        assert_eq!((answer.borrow().error, answer.borrow().in_place), (0, 3));
        assert!(answer.take().bytes.is_empty() && payload[..3] == *b"abc");
        ReplyEmpty(reply()).error(Errno::ENOENT);
        assert_eq!(answer.take().error, libc::ENOENT);
        drop(reply());
        assert_eq!(answer.take().error, libc::EIO);
    }
}
