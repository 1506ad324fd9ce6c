//! The 256-byte image of an inode, sixteen to a block of the inode file. Each image has its own checksum; the
//! blocks have no header.

use crate::{
    BLOCK_BYTES, BlockNo, DirRoot, FileKind, Generation, Ino, InodeAttr, InodeKey, Pin, ROOT_SIZE, Tier,
    TreeForm, TreeRoot, XattrRoot, pin,
};
use std::mem::{offset_of, size_of};
use zerocopy::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of an image.
pub const INODE_SIZE: usize = 256;
/// Images in one block of the inode file: inode `n` is image `n % 16` of file block `n / 16`.
pub const INODES_PER_BLOCK: u64 = BLOCK_BYTES / INODE_SIZE as u64;
/// Longest target of a symbolic link that lies in the image.
pub const SYMLINK_INLINE_MAX: usize = ROOT_SIZE;

/// An image as it lies on media. `crc32c` covers bytes 4..256. All zeros: a number that was never used.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct InodeImage {
    crc32c: U32,
    generation: U32,
    ino: U64,
    state: u8,
    flags: u8,
    pin: u8,
    shared_pin: u8,
    mode: U32,
    uid: U32,
    gid: U32,
    nlink: U32,
    rdev: U32,
    size: U64,
    parent: U64,
    atime_ns: I64,
    mtime_ns: I64,
    ctime_ns: I64,
    btime_ns: I64,
    orphan_next: U64,
    orphan_prev: U64,
    project: U32,
    reserved: [u8; 20],
    root: [u8; ROOT_SIZE],
    xattrs: [u8; 24],
}

const _: () = {
    assert!(size_of::<InodeImage>() == INODE_SIZE);
    assert!(offset_of!(InodeImage, ino) == 8);
    assert!(offset_of!(InodeImage, pin) == 18);
    assert!(offset_of!(InodeImage, shared_pin) == 19);
    assert!(offset_of!(InodeImage, size) == 40);
    assert!(offset_of!(InodeImage, project) == 104);
    assert!(offset_of!(InodeImage, root) == 128);
    assert!(offset_of!(InodeImage, xattrs) == 232);
    assert!(size_of::<XattrRoot>() == 24);
};

const STATE_FREE: u8 = 0;
const STATE_RESERVED: u8 = 1;
const STATE_USED: u8 = 2;
const FLAG_SYMLINK_BLOCK: u8 = 1;
const FLAG_ORPHAN: u8 = 2;

/// The part of an inode besides its attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A regular file's extents; also of special files, which have none.
    File(TreeRoot),
    /// A directory's names.
    Dir(DirRoot),
    /// A short target.
    Symlink(Vec<u8>),
    /// A target in a block of its own.
    SymlinkBlock(BlockNo),
}

/// An inode in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode {
    /// Attributes. `sectors` is computed from the roots when an image is read.
    pub attr: InodeAttr,
    /// Data, names or target.
    pub content: Content,
    /// Extended attributes.
    pub xattrs: XattrRoot,
    /// An operator's wish about the place of its data.
    pub pin: Pin,
    /// The tier on which an operator wants what the file shares with others (`varve dedup place`).
    pub shared_pin: Option<Tier>,
    /// Neighbours in the orphan list, if the inode is in it (0: none).
    pub orphan: Option<OrphanLinks>,
}

/// Neighbours in the list of inodes without a name; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OrphanLinks {
    /// Next.
    pub next: Ino,
    /// Previous.
    pub prev: Ino,
}

/// Decoded contents of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InodeSlot {
    /// Not in use; with the generation of its last use (0: none).
    Free(Generation),
    /// Given to a session for a file that is not made yet.
    Reserved(Generation),
    /// A file.
    Used(Box<Inode>),
}

/// Why an image was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InodeFault {
    /// Bits changed.
    #[error("inode image: checksum does not match")]
    Checksum,
    /// The image of another inode.
    #[error("inode image belongs to inode {0}")]
    Stranger(u64),
    /// State, kind or flags that are never written.
    #[error("inode image: {0} makes no sense")]
    Nonsense(&'static str),
}

impl Inode {
    /// Builds a new, empty inode of the kind that `attr.mode` names.
    #[must_use]
    pub fn new(attr: InodeAttr) -> Self {
        let content = match attr.kind() {
            FileKind::Directory => Content::Dir(DirRoot::default()),
            FileKind::Symlink => Content::Symlink(Vec::new()),
            _ => Content::File(TreeRoot::EMPTY),
        };
        Self {
            attr,
            content,
            xattrs: XattrRoot::default(),
            pin: Pin::NONE,
            shared_pin: None,
            orphan: None,
        }
    }

    /// Returns the blocks in use on all tiers, nodes included; 0 if a root is invalid.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        let data = match &self.content {
            Content::File(root) => match root.form() {
                Ok(TreeForm::Inline(extents)) => extents.iter().map(|extent| u64::from(extent.len)).sum(),
                Ok(TreeForm::Nodes(top, counts)) => counts.total().saturating_add(u64::from(top.nodes)),
                Err(_) => 0,
            },
            Content::Dir(root) => u64::from(root.node_blocks()),
            Content::Symlink(_) => 0,
            Content::SymlinkBlock(_) => 1,
        };
        let xattrs = u64::from(self.xattrs.node_blocks()) + u64::from(self.xattrs.value_blocks());
        data.saturating_add(xattrs)
    }
}

impl InodeSlot {
    /// Returns the image's bytes for inode `ino`.
    ///
    /// # Errors
    /// [`InodeFault::Nonsense`] if mode and content contradict each other, or an inline target is too long.
    pub fn encode(&self, ino: Ino) -> Result<[u8; INODE_SIZE], InodeFault> {
        let mut image = InodeImage::new_zeroed();
        image.ino = U64::new(ino.0);
        match self {
            Self::Free(generation) => image.generation = U32::new(generation.0),
            Self::Reserved(generation) => {
                image.state = STATE_RESERVED;
                image.generation = U32::new(generation.0);
            }
            Self::Used(inode) => image.fill(inode, ino)?,
        }
        image.crc32c = U32::new(crc32c::crc32c(&image.as_bytes()[4..]));
        Ok(zerocopy::transmute!(image))
    }

    /// Reads and checks the image of inode `ino`.
    ///
    /// # Errors
    /// An [`InodeFault`].
    pub fn decode(bytes: &[u8], ino: Ino) -> Result<Self, InodeFault> {
        let (image, _) =
            InodeImage::read_from_prefix(bytes).map_err(|_| InodeFault::Nonsense("its length"))?;
        if image.as_bytes().iter().all(|byte| *byte == 0) {
            return Ok(Self::Free(Generation(0)));
        }
        if image.crc32c.get() != crc32c::crc32c(&image.as_bytes()[4..]) {
            return Err(InodeFault::Checksum);
        }
        if image.ino.get() != ino.0 {
            return Err(InodeFault::Stranger(image.ino.get()));
        }
        let generation = Generation(image.generation.get());
        match image.state {
            STATE_FREE => Ok(Self::Free(generation)),
            STATE_RESERVED => Ok(Self::Reserved(generation)),
            STATE_USED => image
                .inode(ino, generation)
                .map(|inode| Self::Used(Box::new(inode))),
            _ => Err(InodeFault::Nonsense("its state")),
        }
    }

    /// Returns the generation of the current or last use.
    #[must_use]
    pub fn generation(&self) -> Generation {
        match self {
            Self::Free(generation) | Self::Reserved(generation) => *generation,
            Self::Used(inode) => inode.attr.key.generation,
        }
    }
}

impl InodeImage {
    fn fill(&mut self, inode: &Inode, ino: Ino) -> Result<(), InodeFault> {
        let attr = &inode.attr;
        let kind = FileKind::from_mode(attr.mode).ok_or(InodeFault::Nonsense("its mode"))?;
        if attr.key.ino != ino || attr.key.generation.0 == 0 {
            return Err(InodeFault::Nonsense("its key"));
        }
        self.state = STATE_USED;
        self.generation = U32::new(attr.key.generation.0);
        self.mode = U32::new(attr.mode);
        self.uid = U32::new(attr.uid);
        self.gid = U32::new(attr.gid);
        self.nlink = U32::new(attr.nlink);
        self.rdev = U32::new(attr.rdev);
        self.size = U64::new(attr.size_bytes);
        self.parent = U64::new(attr.parent.0);
        self.atime_ns = I64::new(attr.atime_ns);
        self.mtime_ns = I64::new(attr.mtime_ns);
        self.ctime_ns = I64::new(attr.ctime_ns);
        self.btime_ns = I64::new(attr.btime_ns);
        if let Some(links) = inode.orphan {
            self.flags |= FLAG_ORPHAN;
            self.orphan_next = U64::new(links.next.0);
            self.orphan_prev = U64::new(links.prev.0);
        }
        self.pin = inode.pin.encode();
        self.shared_pin = pin::encode_shared(inode.shared_pin);
        self.xattrs.copy_from_slice(inode.xattrs.as_bytes());
        match (&inode.content, kind) {
            (Content::Dir(root), FileKind::Directory) => self.root.copy_from_slice(root.as_bytes()),
            (Content::Symlink(target), FileKind::Symlink) if target.len() <= SYMLINK_INLINE_MAX => {
                if target.len() as u64 != attr.size_bytes {
                    return Err(InodeFault::Nonsense("the length of its target"));
                }
                self.root[..target.len()].copy_from_slice(target);
            }
            (Content::SymlinkBlock(block), FileKind::Symlink) => {
                self.flags |= FLAG_SYMLINK_BLOCK;
                self.root[..8].copy_from_slice(&block.0.to_le_bytes());
            }
            (Content::File(_), FileKind::Directory | FileKind::Symlink) => {
                return Err(InodeFault::Nonsense("its content"));
            }
            (Content::File(root), _) => self.root.copy_from_slice(root.as_bytes()),
            _ => return Err(InodeFault::Nonsense("its content")),
        }
        Ok(())
    }

    fn inode(&self, ino: Ino, generation: Generation) -> Result<Inode, InodeFault> {
        let mode = self.mode.get();
        let kind = FileKind::from_mode(mode).ok_or(InodeFault::Nonsense("its mode"))?;
        if self.flags & !(FLAG_SYMLINK_BLOCK | FLAG_ORPHAN) != 0 {
            return Err(InodeFault::Nonsense("its flags"));
        }
        if self.project.get() != 0 {
            return Err(InodeFault::Nonsense("its project: the pool has none"));
        }
        let pin = Pin::decode(self.pin).ok_or(InodeFault::Nonsense("its pin"))?;
        let bad_root = |_| InodeFault::Nonsense("its root");
        let content = match kind {
            FileKind::Directory => {
                let root =
                    DirRoot::read_from_bytes(&self.root).map_err(|_| InodeFault::Nonsense("its root"))?;
                root.top().map_err(|_| InodeFault::Nonsense("its root"))?;
                Content::Dir(root)
            }
            FileKind::Symlink if self.flags & FLAG_SYMLINK_BLOCK != 0 => {
                let mut word = [0; 8];
                word.copy_from_slice(&self.root[..8]);
                Content::SymlinkBlock(BlockNo(u64::from_le_bytes(word)))
            }
            FileKind::Symlink => {
                let len = usize::try_from(self.size.get()).map_err(|_| InodeFault::Nonsense("its size"))?;
                let target = self.root.get(..len).ok_or(InodeFault::Nonsense("its size"))?;
                Content::Symlink(target.to_vec())
            }
            _ => {
                let root =
                    TreeRoot::read_from_bytes(&self.root).map_err(|_| InodeFault::Nonsense("its root"))?;
                root.form().map_err(bad_root)?;
                Content::File(root)
            }
        };
        let xattrs = XattrRoot::read_from_bytes(&self.xattrs)
            .map_err(|_| InodeFault::Nonsense("its attribute root"))?;
        xattrs
            .top()
            .map_err(|_| InodeFault::Nonsense("its attribute root"))?;
        let mut inode = Inode {
            attr: InodeAttr {
                key: InodeKey { ino, generation },
                mode,
                uid: self.uid.get(),
                gid: self.gid.get(),
                nlink: self.nlink.get(),
                size_bytes: self.size.get(),
                sectors: 0,
                rdev: self.rdev.get(),
                parent: Ino(self.parent.get()),
                atime_ns: self.atime_ns.get(),
                mtime_ns: self.mtime_ns.get(),
                ctime_ns: self.ctime_ns.get(),
                btime_ns: self.btime_ns.get(),
            },
            content,
            xattrs,
            pin,
            shared_pin: pin::decode_shared(self.shared_pin),
            orphan: (self.flags & FLAG_ORPHAN != 0).then(|| OrphanLinks {
                next: Ino(self.orphan_next.get()),
                prev: Ino(self.orphan_prev.get()),
            }),
        };
        inode.attr.sectors = inode.blocks().saturating_mul(BLOCK_BYTES / 512);
        Ok(inode)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::{PinTo, PinnedBy};
    use proptest::prelude::{any, prop, proptest};

    fn attr(mode: u32) -> InodeAttr {
        InodeAttr {
            key: InodeKey::new(33, 7),
            mode,
            uid: 1,
            gid: 2,
            nlink: 3,
            size_bytes: 0,
            sectors: 0,
            rdev: 9,
            parent: Ino(1),
            atime_ns: -4,
            mtime_ns: 5,
            ctime_ns: 6,
            btime_ns: 7,
        }
    }

    #[test]
    fn image_comes_back_equal_when_decoded() {
        let mut file = Inode::new(attr(0o100_644));
        file.shared_pin = Some(Tier::Ssd);
        let mut dir = Inode::new(attr(0o040_755));
        dir.pin = Pin {
            to: PinTo::Tier(Tier::Hdd),
            by: PinnedBy::Command,
        };
        let mut link = Inode::new(attr(0o120_777));
        link.attr.size_bytes = 3;
        link.content = Content::Symlink(b"a/b".to_vec());
        link.orphan = Some(OrphanLinks {
            next: Ino(4),
            prev: Ino(0),
        });
        let mut long = Inode::new(attr(0o120_777));
        long.attr.size_bytes = 200;
        long.attr.sectors = 8;
        long.content = Content::SymlinkBlock(BlockNo(77));
        for inode in [file, dir, link, long] {
            let slot = InodeSlot::Used(Box::new(inode));
            assert_eq!(
                InodeSlot::decode(&slot.encode(Ino(33)).unwrap(), Ino(33)),
                Ok(slot)
            );
        }
        let free = InodeSlot::Free(Generation(8));
        let bytes = free.encode(Ino(33)).unwrap();
        assert_eq!(InodeSlot::decode(&bytes, Ino(33)), Ok(free));
        assert_eq!(InodeSlot::decode(&bytes, Ino(34)), Err(InodeFault::Stranger(33)));
    }

    #[test]
    fn image_is_refused_when_content_and_mode_disagree() {
        let mut inode = Inode::new(attr(0o100_644));
        inode.content = Content::Dir(DirRoot::default());
        assert!(InodeSlot::Used(Box::new(inode)).encode(Ino(33)).is_err());
    }

    #[test]
    fn image_is_refused_when_it_has_fields_of_features_that_are_not_built() {
        let slot = InodeSlot::Used(Box::new(Inode::new(attr(0o040_755))));
        for (at, value) in [(17, 4), (18, 5), (104, 1)] {
            let mut bytes = slot.encode(Ino(33)).unwrap();
            bytes[at] |= value;
            let crc = crc32c::crc32c(&bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            assert!(InodeSlot::decode(&bytes, Ino(33)).is_err(), "byte {at}");
        }
    }

    #[test]
    fn tier_of_the_shared_part_that_is_not_known_counts_as_none() {
        let mut inode = Inode::new(attr(0o100_644));
        inode.shared_pin = Some(Tier::Hdd);
        let slot = InodeSlot::Used(Box::new(inode));
        for (value, tier) in [
            (0, None),
            (1, Some(Tier::Nvm)),
            (3, Some(Tier::Hdd)),
            (4, None),
            (255, None),
        ] {
            let mut bytes = slot.encode(Ino(33)).unwrap();
            bytes[19] = value;
            let crc = crc32c::crc32c(&bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            let Ok(InodeSlot::Used(inode)) = InodeSlot::decode(&bytes, Ino(33)) else {
                panic!("{value}");
            };
            assert_eq!(inode.shared_pin, tier, "{value}");
        }
    }

    proptest! {
        #[test]
        fn image_decode_never_panics_when_the_checksum_fits(
            bytes in prop::collection::vec(any::<u8>(), INODE_SIZE)
        ) {
            let mut bytes = bytes;
            bytes[8..16].copy_from_slice(&5_u64.to_le_bytes());
            bytes[16] = 2;
            bytes[17] &= 3;
            let crc = crc32c::crc32c(&bytes[4..]);
            bytes[..4].copy_from_slice(&crc.to_le_bytes());
            let _ = InodeSlot::decode(&bytes, Ino(5));
        }
    }
}
