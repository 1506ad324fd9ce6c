//! The shared area of a Varve pool: journal, space, inodes, directories, data.
#![forbid(unsafe_code)]
#![allow(unused_variables, dead_code, clippy::todo, missing_docs, clippy::missing_errors_doc)]

mod error;
mod types;

pub use error::{Result, StoreError};
pub use types::{
    DataTarget, Devices, DirItem, MkfsOptions, OpenOptions, OpenReport, PendingFrees, SpaceStats, TierStats,
};
pub use varve_extent_tree::Progress;
pub use varve_format::inode::{Content, Inode, InodeSlot};
pub use varve_format::session::{GrantRow, SessionRow, SessionState};

use varve_format::{
    BlockNo, Extent, FileBlock, HashKey, Ino, InodeAttr, InodeKey, LeaseNo, SessionId, Tier, TxId,
};

/// An open pool. Share it in an `Arc`: reads go on beside the one transaction.
pub struct Store {}

#[expect(clippy::needless_pass_by_value, reason = "signatures first")]
impl Store {
    /// Makes a pool; durable when this returns.
    pub fn mkfs(devices: &Devices, options: &MkfsOptions) -> Result<()> { todo!() }
    /// Opens a pool: replays the journal, reads tables and bitmaps. All sessions of an earlier daemon must be sealed before the
    /// first transaction (blocks freed before are reused at once).
    pub fn open(devices: Devices, options: OpenOptions) -> Result<(Self, OpenReport)> { todo!() }
    pub fn pool_uuid(&self) -> [u8; 16] { todo!() }
    pub fn hash_key(&self) -> HashKey { todo!() }
    pub fn devices(&self) -> &Devices { todo!() }
    /// Newest committed transaction.
    pub fn newest_tx(&self) -> TxId { todo!() }
    /// Why the pool is read-only, if it is.
    pub fn latched(&self) -> Option<std::sync::Arc<str>> { todo!() }
    /// Makes the pool read-only.
    pub fn latch(&self, reason: &str) { todo!() }
    /// Starts a transaction; waits for the one under way. `Latched` if read-only.
    pub fn begin(&self) -> Result<Tx<'_>> { todo!() }
    /// Syncs what is in place and empties the journal (so metadata blocks are released, and the next open replays nothing).
    pub fn checkpoint(&self) -> Result<()> { todo!() }

    // -- space
    /// Sets `blocks` aside for somebody; `NoSpace` if they are not there.
    pub fn reserve(&self, blocks: u64) -> Result<()> { todo!() }
    /// Gives them back (used or not: allocations do not touch the reservation).
    pub fn unreserve(&self, blocks: u64) { todo!() }
    pub fn space(&self) -> SpaceStats { todo!() }
    /// Data blocks freed by transactions up to here may be reused: no session can still read them. Starts at `TxId(u64::MAX)`.
    pub fn set_reader_horizon(&self, tx: TxId) { todo!() }
    /// Freed data blocks that wait for the horizon.
    pub fn pending_frees(&self) -> PendingFrees { todo!() }

    // -- reads (each is one consistent view of the newest committed state)
    pub fn get(&self, ino: Ino) -> Result<Inode> { todo!() }
    /// As `get`, but another generation is `NoInode`.
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> { todo!() }
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> { todo!() }
    pub fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> { todo!() }
    /// At most `max` entries after `cookie` (0: from the start).
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> { todo!() }
    pub fn read_link(&self, ino: Ino) -> Result<Vec<u8>> { todo!() }
    pub fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> { todo!() }
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> { todo!() }
    /// Extents from `from` on, clipped, holes left out.
    pub fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> { todo!() }
    /// Bytes read (short at the end of the file). Checksums of SSD and HDD data are verified.
    pub fn read(&self, ino: Ino, offset: u64, out: &mut [u8]) -> Result<usize> { todo!() }
    /// First byte of data at or after `offset`, below the size.
    pub fn seek_data(&self, ino: Ino, offset: u64) -> Result<Option<u64>> { todo!() }
    /// First byte of a hole at or after `offset` (the size counts as one); `None` if `offset` is not below the size.
    pub fn seek_hole(&self, ino: Ino, offset: u64) -> Result<Option<u64>> { todo!() }
    /// Inodes in the orphan list: without a name (nlink 0), or with an unfinished truncation (nlink > 0).
    pub fn orphans(&self) -> Result<Vec<InodeKey>> { todo!() }
    /// Calls `f` for every inode in use or reserved until it says false.
    pub fn for_each_inode(&self, f: &mut dyn FnMut(Ino, InodeSlot) -> bool) -> Result<()> { todo!() }
    pub fn sessions(&self) -> Result<Vec<SessionRow>> { todo!() }
    pub fn grants(&self) -> Result<Vec<GrantRow>> { todo!() }
    /// Reads a data block and compares it with its checksum.
    pub fn verify_block(&self, tier: Tier, block: BlockNo) -> Result<()> { todo!() }
    /// Checks all structures; see [`check::Finding`].
    pub fn check(&self) -> Result<Vec<check::Finding>> { todo!() }
}

/// A transaction: sees its own changes, others see none before [`commit`](Self::commit). Dropped, it never was.
/// After an error other than `NotFound`, `Exists`, `NoInode`, `WrongKind`, `Invalid`, `NoSession`, `NoGrant` it is poisoned and can only be
/// dropped (`NoSpace` included).
pub struct Tx<'s> { store: &'s Store }

impl Tx<'_> {
    /// Number that the commit will have.
    pub fn id(&self) -> TxId { todo!() }
    /// Bytes left in the journal record. One small operation (create, rename, a write in few extents) needs at most `OP_ROOM`.
    pub fn room(&mut self) -> u64 { todo!() }
    /// Makes it all durable and visible. Durable when this returns. Nothing changed: no record, the newest number.
    pub fn commit(self) -> Result<TxId> { todo!() }

    // -- inodes
    pub fn get(&self, ino: Ino) -> Result<Inode> { todo!() }
    pub fn get_key(&self, key: InodeKey) -> Result<Inode> { todo!() }
    pub fn slot(&self, ino: Ino) -> Result<InodeSlot> { todo!() }
    /// `count` (1 to 16) consecutive numbers near a directory, reserved, with fresh generations.
    pub fn alloc_inodes(&mut self, near: Ino, count: u8) -> Result<Vec<InodeKey>> { todo!() }
    /// Gives a reserved number back that was never made.
    pub fn release_inode(&mut self, key: InodeKey) -> Result<()> { todo!() }
    /// Makes the file `attr.key` (reserved before); `target` of a symbolic link, else empty. In the orphan list if `attr.nlink` is 0.
    pub fn create(&mut self, attr: &InodeAttr, target: &[u8]) -> Result<()> { todo!() }
    /// Changes attributes (not key, kind, sectors; size only through write/truncate/set_size). nlink 0 puts it into the orphan list.
    pub fn edit(&mut self, ino: Ino, f: impl FnOnce(&mut InodeAttr)) -> Result<()> { todo!() }
    /// Frees some of an orphan, at most `budget` extents/entries: all of it (nlink 0; at last its number), or what is beyond its
    /// size (unfinished truncation). `More`: commit, then again in another transaction.
    pub fn continue_free(&mut self, ino: Ino, budget: usize) -> Result<Progress> { todo!() }

    // -- data
    /// Whole blocks at `at`, copy-on-write. The size grows to their end if `grow` (else it stays).
    pub fn write_data(&mut self, ino: Ino, at: FileBlock, data: &[u8], target: DataTarget) -> Result<()> { todo!() }
    /// Bytes at byte offsets (ascending, not overlapping): edges are merged with the old blocks, whose checksums are verified.
    /// The size grows to the end of the last one.
    pub fn write_bytes(&mut self, ino: Ino, pieces: &[(u64, &[u8])], target: DataTarget) -> Result<()> { todo!() }
    /// As `Store::read`, in this transaction's view.
    pub fn read(&self, ino: Ino, offset: u64, out: &mut [u8]) -> Result<usize> { todo!() }
    pub fn map(&self, ino: Ino, from: FileBlock, max: usize) -> Result<Vec<Extent>> { todo!() }
    /// New size. `More`: it is in the orphan list; commit and `continue_free` before anything else on this inode.
    pub fn truncate(&mut self, ino: Ino, size_bytes: u64) -> Result<Progress> { todo!() }
    /// A hole; the size stays. `More`: call again (same arguments) in another transaction.
    pub fn punch(&mut self, ino: Ino, offset: u64, len: u64, target: DataTarget) -> Result<Progress> { todo!() }
    /// Reads as zeros afterwards, allocated (UNWRITTEN). The size grows if `grow`.
    pub fn zero(&mut self, ino: Ino, offset: u64, len: u64, grow: bool, target: DataTarget) -> Result<Progress> { todo!() }
    /// Fills holes with UNWRITTEN blocks. The size grows if `grow`.
    pub fn allocate(&mut self, ino: Ino, offset: u64, len: u64, grow: bool, target: DataTarget) -> Result<Progress> { todo!() }
    /// Copies `len` blocks that lie at `from` to another tier, verifies and remaps them. False: they do not lie there any more.
    pub fn migrate(&mut self, ino: Ino, at: FileBlock, len: u32, from: (Tier, BlockNo), to: DataTarget) -> Result<bool> { todo!() }

    // -- names (sizes of directories are kept; link counts are the caller's)
    pub fn dir_lookup(&self, dir: Ino, name: &[u8]) -> Result<Option<DirItem>> { todo!() }
    pub fn dir_iter(&self, dir: Ino, cookie: u64, max: usize) -> Result<Vec<DirItem>> { todo!() }
    pub fn dir_insert(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: varve_format::FileKind) -> Result<()> { todo!() }
    pub fn dir_remove(&mut self, dir: Ino, name: &[u8]) -> Result<DirItem> { todo!() }
    /// The name stands for `key` afterwards; returns what it stood for.
    pub fn dir_replace(&mut self, dir: Ino, name: &[u8], key: InodeKey, kind: varve_format::FileKind) -> Result<DirItem> { todo!() }

    // -- extended attributes
    pub fn xattr_get(&self, ino: Ino, name: &[u8]) -> Result<Option<Vec<u8>>> { todo!() }
    pub fn xattr_list(&self, ino: Ino) -> Result<Vec<(Vec<u8>, usize)>> { todo!() }
    pub fn xattr_set(&mut self, ino: Ino, name: &[u8], value: &[u8]) -> Result<()> { todo!() }
    pub fn xattr_remove(&mut self, ino: Ino, name: &[u8]) -> Result<()> { todo!() }

    // -- rows
    /// A session number, never given before.
    pub fn next_session_id(&mut self) -> Result<SessionId> { todo!() }
    /// The first of `count` consecutive lease numbers, never given before.
    pub fn next_lease_nos(&mut self, count: u64) -> Result<LeaseNo> { todo!() }
    pub fn session(&self, id: SessionId) -> Result<Option<SessionRow>> { todo!() }
    /// Writes the row of `row.id` (new or not). `TableFull`.
    pub fn session_put(&mut self, row: &SessionRow) -> Result<()> { todo!() }
    pub fn session_remove(&mut self, id: SessionId) -> Result<()> { todo!() }
    pub fn grant(&self, lease: LeaseNo) -> Result<Option<GrantRow>> { todo!() }
    /// Writes the row of `row.lease` (new or not). `TableFull`.
    pub fn grant_put(&mut self, row: &GrantRow) -> Result<()> { todo!() }
    pub fn grant_remove(&mut self, lease: LeaseNo) -> Result<()> { todo!() }
}

/// Room for one small operation, in bytes.
pub const OP_ROOM: u64 = 32 << 10;

/// Structural findings.
pub mod check {
    use varve_format::{BlockNo, Ino, InodeKey, Tier};
    /// What is wrong, with the data that a repair needs.
    #[derive(Debug, Clone, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Finding {
        /// Block in use, bit not set.
        NotMarked { tier: Tier, block: BlockNo, owner: Ino },
        /// Bit set, nobody uses it.
        Leaked { tier: Tier, block: BlockNo, len: u64 },
        /// Two users of one block.
        Shared { tier: Tier, block: BlockNo, owner: Ino },
        /// A name without an inode.
        Dangling { dir: Ino, name: Vec<u8>, key: InodeKey },
        /// Wrong link count.
        LinkCount { ino: Ino, stored: u32, found: u32 },
        /// An inode without a name that is not in the orphan list.
        Lost { ino: Ino },
    }
}
