//! Extents and the root of an extent tree, as they lie in nodes and inode images.

use crate::{BlockNo, FileBlock, Tier};
use std::mem::offset_of;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most blocks of a file: 2^48.
pub const FILE_BLOCKS_MAX: u64 = 1 << 48;
/// Most blocks of a tier: 2^48.
pub const TIER_BLOCKS_MAX: u64 = 1 << 48;
/// Bytes of a tree's or a directory's root in the inode image.
pub const ROOT_SIZE: usize = 104;
/// Most extents that lie in the inode itself, while the tree has no node.
pub const INLINE_EXTENTS: usize = 4;
/// Bytes of an extent in a node after its key (the file block).
pub const EXTENT_VALUE_SIZE: usize = 16;
/// Most levels of nodes under a root.
pub const TREE_HEIGHT_MAX: u8 = 12;

bitflags::bitflags! {
    /// Properties of an extent.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct ExtentFlags: u8 {
        /// The blocks are allocated but never written: reads give zeros.
        const UNWRITTEN = 1;
        /// `block` is a number of the shared space, which the tree of the shared runs resolves; `tier` is
        /// [`Tier::Nvm`]. Goes with no other flag.
        const SHARED = 8;
    }
}

impl ExtentFlags {
    /// Flags of features that are not built: patched, second copy, compressed, born.
    pub const NOT_BUILT: [u8; 4] = [2, 4, 16, 32];
}

/// A run of blocks of a file and its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// First block in the file.
    pub file_block: FileBlock,
    /// Blocks; never 0.
    pub len: u32,
    /// Tier that holds them.
    pub tier: Tier,
    /// First block on that tier.
    pub block: BlockNo,
    /// Properties of the extent.
    pub flags: ExtentFlags,
}

impl Extent {
    /// The file block after the last.
    #[must_use]
    pub const fn end(&self) -> FileBlock {
        FileBlock(self.file_block.0.saturating_add(self.len as u64))
    }

    /// Returns the location of file block `at`, which must be in the extent.
    #[must_use]
    pub const fn block_at(&self, at: FileBlock) -> BlockNo {
        BlockNo(
            self.block
                .0
                .saturating_add(at.0.saturating_sub(self.file_block.0)),
        )
    }

    /// Returns the part between `from` and `to`, if any.
    #[must_use]
    pub fn clip(&self, from: FileBlock, to: FileBlock) -> Option<Self> {
        let start = self.file_block.max(from);
        let end = self.end().min(to);
        if start >= end {
            return None;
        }
        Some(Self {
            file_block: start,
            len: (end.0 - start.0) as u32,
            block: self.block_at(start),
            ..*self
        })
    }

    /// Whether `next` continues this extent in the file and on the tier, so that one extent can replace both.
    #[must_use]
    pub const fn joins(&self, next: &Self) -> bool {
        self.end().0 == next.file_block.0
            && self.tier as u8 == next.tier as u8
            && self.flags.bits() == next.flags.bits()
            && self.block.0.saturating_add(self.len as u64) == next.block.0
            && self.len.checked_add(next.len).is_some()
    }

    /// Checks that the numbers are within the format's bounds.
    ///
    /// # Errors
    /// An [`ExtentFault`] that names the bound.
    pub const fn validate(&self) -> Result<(), ExtentFault> {
        if self.len == 0 {
            return Err(ExtentFault::Empty);
        }
        if self.file_block.0 >= FILE_BLOCKS_MAX || self.file_block.0 + self.len as u64 > FILE_BLOCKS_MAX {
            return Err(ExtentFault::FileBlock(self.file_block.0));
        }
        if self.block.0 >= TIER_BLOCKS_MAX || self.block.0 + self.len as u64 > TIER_BLOCKS_MAX {
            return Err(ExtentFault::Block(self.block.0));
        }
        Ok(())
    }
}

/// Why an extent was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExtentFault {
    /// No blocks.
    #[error("extent has no blocks")]
    Empty,
    /// Beyond the largest file.
    #[error("extent at file block {0} passes the largest file")]
    FileBlock(u64),
    /// Beyond the largest tier.
    #[error("extent at block {0} passes the largest tier")]
    Block(u64),
    /// No such tier.
    #[error("extent names tier {0}")]
    Tier(u8),
    /// Flags of a later version.
    #[error("extent has flags {0:#04x}, which this version does not know")]
    Flags(u8),
    /// A shared extent that names a tier, or has another flag.
    #[error("shared extent with flags {0:#04x} names a tier or has another flag")]
    Shared(u8),
    /// The count of a shared run is zero, or its blocks have flags.
    #[error("shared run of {0} references is not sound")]
    Run(u32),
    /// Bytes of the wrong length.
    #[error("extent record has {0} bytes after its key")]
    Size(usize),
}

/// An extent in a node, after its key, which is the file block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtentValue {
    block: U64,
    len: U32,
    tier: u8,
    flags: u8,
    reserved: U16,
}

/// An extent in an inode image.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct InlineExtent {
    file_block: U64,
    value: ExtentValue,
}

const _: () = {
    assert!(size_of::<ExtentValue>() == EXTENT_VALUE_SIZE);
    assert!(offset_of!(ExtentValue, len) == 8);
    assert!(offset_of!(ExtentValue, tier) == 12);
    assert!(size_of::<InlineExtent>() == 24);
};

impl ExtentValue {
    /// Encodes all of `extent` but its file block.
    #[must_use]
    pub fn encode(extent: &Extent) -> Self {
        Self {
            block: U64::new(extent.block.0),
            len: U32::new(extent.len),
            tier: extent.tier as u8,
            flags: extent.flags.bits(),
            reserved: U16::ZERO,
        }
    }

    /// Returns the extent at `file_block`.
    ///
    /// # Errors
    /// An [`ExtentFault`] that names a value that this version never writes.
    pub fn decode(&self, file_block: u64) -> Result<Extent, ExtentFault> {
        let flags = ExtentFlags::from_bits(self.flags).ok_or(ExtentFault::Flags(self.flags))?;
        if self.reserved.get() != 0 {
            return Err(ExtentFault::Flags(self.flags));
        }
        let extent = Extent {
            file_block: FileBlock(file_block),
            len: self.len.get(),
            tier: Tier::from_u8(self.tier).ok_or(ExtentFault::Tier(self.tier))?,
            block: BlockNo(self.block.get()),
            flags,
        };
        let is_alone = flags == ExtentFlags::SHARED && extent.tier == Tier::Nvm;
        if flags.contains(ExtentFlags::SHARED) && !is_alone {
            return Err(ExtentFault::Shared(self.flags));
        }
        extent.validate()?;
        Ok(extent)
    }

    /// As [`decode`](Self::decode), from the bytes of a node's record.
    ///
    /// # Errors
    /// As `decode`, and [`ExtentFault::Size`].
    pub fn parse(file_block: u64, bytes: &[u8]) -> Result<Extent, ExtentFault> {
        Self::read_from_bytes(bytes)
            .map_err(|_| ExtentFault::Size(bytes.len()))?
            .decode(file_block)
    }
}

/// Bytes of a shared run in a node after its key (its first number of the shared space).
pub const SHARED_VALUE_SIZE: usize = 24;
/// Extents that can name one shared run at most.
pub const SHARED_REFS_MAX: u32 = u32::MAX;

/// A run of blocks that extents of several files may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedRun {
    /// First number of the shared space.
    pub first: u64,
    /// Extents that name it; never 0.
    pub refs: u32,
    /// Blocks; never 0.
    pub len: u32,
    /// Tier that holds them.
    pub tier: Tier,
    /// First block on that tier.
    pub block: BlockNo,
}

impl SharedRun {
    /// The number after the last.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.first.saturating_add(self.len as u64)
    }

    /// The part between two numbers, if any.
    #[must_use]
    pub fn clip(&self, from: u64, to: u64) -> Option<Self> {
        let (start, end) = (self.first.max(from), self.end().min(to));
        if start >= end {
            return None;
        }
        Some(Self {
            first: start,
            len: (end - start) as u32,
            block: BlockNo(self.block.0.saturating_add(start - self.first)),
            ..*self
        })
    }

    /// Whether `next` goes on where this run ends, in the shared space and on the tier, with as many
    /// references, so that one run can stand for both.
    #[must_use]
    pub const fn joins(&self, next: &Self) -> bool {
        self.end() == next.first
            && self.refs == next.refs
            && self.tier as u8 == next.tier as u8
            && self.block.0.saturating_add(self.len as u64) == next.block.0
            && self.len.checked_add(next.len).is_some()
    }
}

/// A shared run in a node, after its key, which is its first number of the shared space.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SharedValue {
    refs: U32,
    reserved: U32,
    place: ExtentValue,
}

const _: () = assert!(size_of::<SharedValue>() == SHARED_VALUE_SIZE);

impl SharedValue {
    /// Encodes all of `run` but its first number.
    #[must_use]
    pub fn encode(run: &SharedRun) -> Self {
        Self {
            refs: U32::new(run.refs),
            reserved: U32::ZERO,
            place: ExtentValue::encode(&Extent {
                file_block: FileBlock(run.first),
                len: run.len,
                tier: run.tier,
                block: run.block,
                flags: ExtentFlags::empty(),
            }),
        }
    }

    /// The run with this first number, from the bytes of a node's record.
    ///
    /// # Errors
    /// An [`ExtentFault`] that says what no writer of this version would have written.
    pub fn parse(first: u64, bytes: &[u8]) -> Result<SharedRun, ExtentFault> {
        let value = Self::read_from_bytes(bytes).map_err(|_| ExtentFault::Size(bytes.len()))?;
        let place = value.place.decode(first)?;
        let refs = value.refs.get();
        if refs == 0 || value.reserved.get() != 0 || !place.flags.is_empty() {
            return Err(ExtentFault::Run(refs));
        }
        Ok(SharedRun {
            first,
            refs,
            len: place.len,
            tier: place.tier,
            block: place.block,
        })
    }
}

/// The top of a tree of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Top {
    /// Levels of nodes; 0 when there are none.
    pub height: u8,
    /// The node at the top; 0 when there is none.
    pub block: BlockNo,
    /// Blocks in the tree, leaves included.
    pub nodes: u32,
}

/// Counters of a tree that has nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TreeCounts {
    /// Extents.
    pub extents: u64,
    /// Mapped blocks on each tier, in the order of [`Tier::ALL`]; unwritten ones included, without shared
    /// ones.
    pub mapped: [u64; 3],
    /// Blocks of shared extents.
    pub shared: u64,
}

impl TreeCounts {
    /// Adds `extent` to the counts.
    pub fn add(&mut self, extent: &Extent) {
        self.extents = self.extents.wrapping_add(1);
        let mapped = self.of(extent);
        *mapped = mapped.wrapping_add(u64::from(extent.len));
    }

    /// The counter that counts the extent's blocks.
    const fn of(&mut self, extent: &Extent) -> &mut u64 {
        if extent.flags.contains(ExtentFlags::SHARED) {
            &mut self.shared
        } else {
            &mut self.mapped[extent.tier as usize]
        }
    }

    /// Subtracts `extent` from the counts.
    pub fn sub(&mut self, extent: &Extent) {
        self.extents = self.extents.saturating_sub(1);
        let mapped = self.of(extent);
        *mapped = mapped.saturating_sub(u64::from(extent.len));
    }

    /// Mapped blocks on all tiers, shared ones included.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.mapped
            .iter()
            .fold(self.shared, |sum, n| sum.saturating_add(*n))
    }
}

/// Decoded contents of a [`TreeRoot`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeForm {
    /// All extents lie in the inode: at most [`INLINE_EXTENTS`], ascending.
    Inline(Vec<Extent>),
    /// The extents lie in nodes.
    Nodes(Top, TreeCounts),
}

/// Root of an extent tree, in the inode image. All zeros is an empty tree.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TreeRoot {
    height: u8,
    inline_count: u8,
    reserved: [u8; 6],
    body: [u8; 96],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NodesBody {
    block: U64,
    nodes: U32,
    reserved: U32,
    extents: U64,
    mapped: [U64; 3],
    shared: U64,
    reserved2: [u8; 40],
}

const _: () = {
    assert!(size_of::<TreeRoot>() == ROOT_SIZE);
    assert!(offset_of!(TreeRoot, body) == 8);
    assert!(size_of::<NodesBody>() == 96);
    assert!(size_of::<InlineExtent>() * INLINE_EXTENTS == 96);
};

/// Why a root was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RootFault {
    /// Too many levels.
    #[error("root has {0} levels")]
    Height(u8),
    /// More extents than fit, or any beside nodes.
    #[error("root claims {0} inline extents")]
    InlineCount(u8),
    /// One of the inline extents.
    #[error("inline extent {index}: {fault}")]
    Extent {
        /// Its index.
        index: u8,
        /// Its fault.
        fault: ExtentFault,
    },
    /// Inline extents overlap or are out of order.
    #[error("inline extent {0} begins before its neighbour ends")]
    Order(u8),
    /// Reserved bytes are in use.
    #[error("reserved bytes of the root are not zero")]
    Reserved,
    /// Counters with impossible values.
    #[error("root's counters contradict its height")]
    Counters,
}

impl std::fmt::Debug for TreeRoot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.form() {
            Ok(form) => form.fmt(f),
            Err(fault) => write!(f, "TreeRoot({fault})"),
        }
    }
}

impl Default for TreeRoot {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl TreeRoot {
    /// The root of a file that has no extents.
    pub const EMPTY: Self = Self {
        height: 0,
        inline_count: 0,
        reserved: [0; 6],
        body: [0; 96],
    };

    /// Whether nothing is mapped and no node is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.height == 0 && self.inline_count == 0
    }

    /// Builds a root whose extents are all in the inode. `None` if there are more than [`INLINE_EXTENTS`].
    #[must_use]
    pub fn inline(extents: &[Extent]) -> Option<Self> {
        let mut root = Self {
            inline_count: u8::try_from(extents.len()).ok()?,
            ..Self::EMPTY
        };
        if extents.len() > INLINE_EXTENTS {
            return None;
        }
        for (slot, extent) in root.body.chunks_exact_mut(24).zip(extents) {
            let inline = InlineExtent {
                file_block: U64::new(extent.file_block.0),
                value: ExtentValue::encode(extent),
            };
            slot.copy_from_slice(inline.as_bytes());
        }
        Some(root)
    }

    /// Builds a root with nodes.
    #[must_use]
    pub fn nodes(top: &Top, counts: &TreeCounts) -> Self {
        let mut body = NodesBody::new_zeroed();
        body.block = U64::new(top.block.0);
        body.nodes = U32::new(top.nodes);
        body.extents = U64::new(counts.extents);
        body.mapped = counts.mapped.map(U64::new);
        body.shared = U64::new(counts.shared);
        let mut root = Self {
            height: top.height,
            ..Self::EMPTY
        };
        root.body.copy_from_slice(body.as_bytes());
        root
    }

    /// Parses and checks the root.
    ///
    /// # Errors
    /// A [`RootFault`].
    pub fn form(&self) -> Result<TreeForm, RootFault> {
        if self.reserved != [0; 6] {
            return Err(RootFault::Reserved);
        }
        if self.height == 0 {
            return self.parse_inline().map(TreeForm::Inline);
        }
        if self.height > TREE_HEIGHT_MAX {
            return Err(RootFault::Height(self.height));
        }
        if self.inline_count != 0 {
            return Err(RootFault::InlineCount(self.inline_count));
        }
        let body = NodesBody::read_from_bytes(&self.body).map_err(|_| RootFault::Reserved)?;
        if body.reserved.get() != 0 || body.reserved2 != [0; 40] {
            return Err(RootFault::Reserved);
        }
        if body.nodes.get() < u32::from(self.height) {
            return Err(RootFault::Counters);
        }
        let top = Top {
            height: self.height,
            block: BlockNo(body.block.get()),
            nodes: body.nodes.get(),
        };
        let counts = TreeCounts {
            extents: body.extents.get(),
            mapped: body.mapped.map(|n| n.get()),
            shared: body.shared.get(),
        };
        Ok(TreeForm::Nodes(top, counts))
    }

    fn parse_inline(&self) -> Result<Vec<Extent>, RootFault> {
        let count = usize::from(self.inline_count);
        if count > INLINE_EXTENTS {
            return Err(RootFault::InlineCount(self.inline_count));
        }
        let mut extents: Vec<Extent> = Vec::with_capacity(count);
        for (index, slot) in (0_u8..).zip(self.body.chunks_exact(24).take(count)) {
            let inline = InlineExtent::read_from_bytes(slot).map_err(|_| RootFault::Reserved)?;
            let extent = inline
                .value
                .decode(inline.file_block.get())
                .map_err(|fault| RootFault::Extent { index, fault })?;
            if extents.last().is_some_and(|last| last.end() > extent.file_block) {
                return Err(RootFault::Order(index));
            }
            extents.push(extent);
        }
        Ok(extents)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{
        Extent, ExtentFault, ExtentFlags, ExtentValue, SharedRun, SharedValue, Top, TreeCounts, TreeForm,
        TreeRoot,
    };
    use crate::{BlockNo, FileBlock, Tier};
    use zerocopy::IntoBytes;

    fn extent(file_block: u64) -> Extent {
        Extent {
            file_block: FileBlock(file_block),
            len: 3,
            tier: Tier::Hdd,
            block: BlockNo(99),
            flags: ExtentFlags::UNWRITTEN,
        }
    }

    #[test]
    fn root_comes_back_equal_when_parsed() {
        let extents = [extent(1), extent(4), extent(9)];
        let root = TreeRoot::inline(&extents).unwrap();
        assert_eq!(root.form(), Ok(TreeForm::Inline(extents.to_vec())));
        let top = Top {
            height: 2,
            block: BlockNo(5),
            nodes: 7,
        };
        let counts = TreeCounts {
            extents: 300,
            mapped: [1, 2, 3],
            shared: 4,
        };
        assert_eq!(
            TreeRoot::nodes(&top, &counts).form(),
            Ok(TreeForm::Nodes(top, counts))
        );
        assert!(TreeRoot::inline(&[extent(1); 5]).is_none());
        assert!(TreeRoot::inline(&[extent(1), extent(2)]).unwrap().form().is_err());
    }

    #[test]
    fn shared_extent_names_no_tier_and_has_no_other_flag() {
        let shared = Extent {
            tier: Tier::Nvm,
            flags: ExtentFlags::SHARED,
            ..extent(1)
        };
        assert_eq!(ExtentValue::encode(&shared).decode(1), Ok(shared));
        for (at, byte) in [(12, 1), (13, 9)] {
            let mut value = ExtentValue::encode(&shared);
            value.as_mut_bytes()[at] = byte;
            assert!(matches!(value.decode(1), Err(ExtentFault::Shared(_))));
        }
    }

    #[test]
    fn shared_run_comes_back_equal_and_is_refused_without_references_or_with_flags() {
        let run = SharedRun {
            first: 77,
            refs: 3,
            len: 9,
            tier: Tier::Ssd,
            block: BlockNo(5),
        };
        let value = SharedValue::encode(&run);
        assert_eq!(SharedValue::parse(77, value.as_bytes()), Ok(run));
        for (at, byte) in [(0, 0), (4, 1), (21, 1)] {
            let mut bytes = value.as_bytes().to_vec();
            bytes[at] = byte;
            assert!(SharedValue::parse(77, &bytes).is_err(), "byte {at}");
        }
        assert!(SharedValue::parse(77, &value.as_bytes()[1..]).is_err());
    }

    #[test]
    fn extents_of_features_that_are_not_built_are_refused() {
        for flag in ExtentFlags::NOT_BUILT.into_iter().chain([64, 128]) {
            let mut value = ExtentValue::encode(&extent(1));
            value.as_mut_bytes()[13] = flag;
            assert_eq!(value.decode(1), Err(ExtentFault::Flags(flag)));
        }
    }
}
