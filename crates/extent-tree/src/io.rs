//! How the trees see metadata blocks. Who keeps them, caches them and makes a change atomic is another's
//! business.

use crate::TreeError;
use varve_format::{Block, BlockKind, BlockNo, Ino};

/// Reading metadata blocks.
pub trait MetaRead {
    /// Errors of the keeper of the blocks; corruption that a tree finds is turned into one.
    type Error: From<TreeError>;

    /// Calls `f` with the content of `block`, changes of the present transaction included. The checksum has
    /// been verified when the block came from its medium; kind, owner and structure are checked by the trees.
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
/// that was passed in be set back to what it was: changes of several blocks may be half done.
pub trait MetaIo: MetaRead {
    /// Calls `f` to change `block` in place. The header (its first 32 bytes) is the keeper's: `f` leaves it
    /// alone and the keeper renews the checksum.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read), or the block is on a slower tier.
    fn update<R>(&mut self, block: BlockNo, f: impl FnOnce(&mut Block) -> R) -> Result<R, Self::Error>;

    /// A new block, all zeros after a header that names `kind`, `owner` and the block itself.
    ///
    /// # Errors
    /// No space.
    fn alloc(&mut self, near: Option<BlockNo>, kind: BlockKind, owner: Ino) -> Result<BlockNo, Self::Error>;

    /// Gives `block` back. It may hold a corrupt kind or owner; that it is in use has been checked by nobody.
    ///
    /// # Errors
    /// The block is not allocated.
    fn free(&mut self, block: BlockNo) -> Result<(), Self::Error>;

    /// Moves a block of a slower tier to NVM. Returns its new number; the old one is free.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read), or no space.
    fn promote(&mut self, block: BlockNo) -> Result<BlockNo, Self::Error>;

    /// Moves a block of NVM, which will not be changed any more where it then is, to a slower tier. Returns
    /// its new number, and the old one is free; `None`, with nothing changed: it is to stay, or there is no
    /// space for it.
    ///
    /// # Errors
    /// As [`read`](MetaRead::read).
    fn demote(&mut self, block: BlockNo) -> Result<Option<BlockNo>, Self::Error>;
}
