//! The trees' interface to metadata blocks. Implementations decide about storage, caching and atomicity.

use crate::TreeError;
use varve_format::{Block, BlockKind, BlockNo, Ino};

/// Reading metadata blocks.
pub trait MetaRead {
    /// Errors of the block I/O; corruption that a tree finds is converted to one.
    type Error: From<TreeError>;

    /// Calls `f` with the content of `block`, including changes of the current transaction. The checksum was
    /// verified when the block was read from its medium; kind, owner and structure are checked by the trees.
    ///
    /// # Errors
    /// The block does not exist, cannot be read, or fails its checksum.
    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R, Self::Error>;
}

/// One transaction over metadata blocks.
///
/// A block's number names its tier ([`BlockNo::home`]). Only blocks in NVM are changed.
///
/// After any error out of a function that takes a `MetaIo`, the transaction must be given up and the root
/// that was passed in be restored: changes of several blocks may be half done.
pub trait MetaIo: MetaRead {
    /// Calls `f` to change `block` in place. `f` must not change the header (the first 32 bytes); the
    /// implementation updates the checksum.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read), or the block is on a slower tier.
    fn update<R>(&mut self, block: BlockNo, f: impl FnOnce(&mut Block) -> R) -> Result<R, Self::Error>;

    /// Allocates a block, all zeros after a header that names `kind`, `owner` and the block itself.
    ///
    /// # Errors
    /// No space.
    fn alloc(&mut self, near: Option<BlockNo>, kind: BlockKind, owner: Ino) -> Result<BlockNo, Self::Error>;

    /// Frees `block`. Its kind or owner may be corrupt, and the caller has not checked that it is in use.
    ///
    /// # Errors
    /// The block is not allocated.
    fn free(&mut self, block: BlockNo) -> Result<(), Self::Error>;

    /// Moves a block of a slower tier to NVM. Returns its new number; the old one is free.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read), or no space.
    fn promote(&mut self, block: BlockNo) -> Result<BlockNo, Self::Error>;

    /// Moves a block of NVM, which is never changed on its new tier, to a slower tier. Returns its new
    /// number, and the old one is free. Returns `None`, with nothing changed, if the block is to stay or
    /// there is no space for it.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read).
    fn demote(&mut self, block: BlockNo) -> Result<Option<BlockNo>, Self::Error>;
}
