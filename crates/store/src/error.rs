//! The error type of this crate. The daemon decides what to report to a client.

use std::sync::Arc;
use varve_extent_tree::TreeError;
use varve_format::inode::InodeFault;
use varve_format::superblock::SuperblockError;
use varve_format::{BlockNo, HeaderFault, Ino, InodeKey, LeaseNo, SessionId, Tier, TxId};
use varve_media::MediaError;

/// Short form.
pub type Result<T> = std::result::Result<T, StoreError>;

/// An error of the shared area.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No tier has this number of blocks left (blocks not yet released count as in use).
    #[error("no space for {blocks} blocks")]
    NoSpace {
        /// Requested number of blocks.
        blocks: u64,
    },
    /// A table of fixed size is full.
    #[error("the {0} table is full")]
    TableFull(&'static str),
    /// No such inode, or its number has a later generation.
    #[error("no inode {0}")]
    NoInode(InodeKey),
    /// The inode is of another kind than the call needs.
    #[error("inode {ino} is not a {wanted}")]
    WrongKind {
        /// Inode.
        ino: Ino,
        /// The kind that the call needs.
        wanted: &'static str,
    },
    /// The name or attribute is not there.
    #[error("no such name")]
    NotFound,
    /// The name is there already.
    #[error("name exists")]
    Exists,
    /// No such session row.
    #[error("no row of session {0}")]
    NoSession(SessionId),
    /// No such grant row.
    #[error("no row of lease {0}")]
    NoGrant(LeaseNo),
    /// An argument out of its bounds.
    #[error("bad argument: {0}")]
    Invalid(&'static str),
    /// A block has as many owners as it can have; the first number of its run.
    #[error("shared block {0} has as many owners as a block can have")]
    Owners(u64),
    /// Blocks beyond the size wait to be freed: `continue_free` first.
    #[error("inode {0} is still being truncated")]
    Unfinished(Ino),
    /// The transaction's changes pass the bound of one journal record. Nothing was committed.
    #[error("the transaction needs a journal record of {needed} bytes; the bound is {bound}")]
    RecordFull {
        /// Bytes that the record would have.
        needed: u64,
        /// Bound in bytes.
        bound: u64,
    },
    /// An earlier error left the transaction half done; it can only be dropped.
    #[error("the transaction met an error before and can only be given up")]
    Poisoned,
    /// The check was ended by [`Store::end_checks`](crate::Store::end_checks).
    #[error(
        "the daemon stops, and its check with it: check the pool again when it is served, or as it lies \
        when it has stopped"
    )]
    CheckEnded,
    /// A failed persist has made the pool read-only.
    #[error("the pool is read-only since an error: {0}")]
    Latched(Arc<str>),
    /// A device failed.
    #[error(transparent)]
    Media(#[from] MediaError),
    /// One of several devices of a tier failed to write: it takes nothing more, the others go on. The
    /// transaction never was; another try goes to the other devices.
    #[error("{device} takes no writes any more, others of its tier go on: {reason}")]
    DeviceLost {
        /// The device.
        device: String,
        /// Its error.
        reason: Arc<str>,
    },
    /// A tree is damaged.
    #[error(transparent)]
    Tree(#[from] TreeError),
    /// A metadata block is damaged.
    #[error("metadata block {block}: {fault}")]
    Block {
        /// The block, with its tier.
        block: BlockNo,
        /// The fault.
        fault: HeaderFault,
    },
    /// An inode image is damaged.
    #[error("inode {ino}: {fault}")]
    Inode {
        /// Inode.
        ino: Ino,
        /// The fault.
        fault: InodeFault,
    },
    /// A data block does not have the content that was written.
    #[error("{} block {block}: data checksum is wrong", tier.name())]
    DataChecksum {
        /// Tier.
        tier: Tier,
        /// Block on it.
        block: BlockNo,
    },
    /// A sealed unit's footer is damaged: its data cannot be verified.
    #[error("{} unit {unit}: footer is damaged", tier.name())]
    Footer {
        /// Tier.
        tier: Tier,
        /// Unit.
        unit: u64,
    },
    /// Neither copy of the superblock can be used.
    #[error("{device}: {fault}")]
    Superblock {
        /// NVM device.
        device: String,
        /// The fault of the better copy.
        fault: SuperblockError,
    },
    /// The devices do not fit the pool.
    #[error("{0}")]
    Devices(String),
    /// The journal is not this pool's or its headers are damaged.
    #[error("journal: {0}")]
    Journal(&'static str),
    /// A record is damaged although later ones are there: committed work is lost.
    #[error("journal: record {tx} at byte {offset} is damaged, though record {later} was committed after it")]
    JournalDamaged {
        /// The damaged record.
        tx: TxId,
        /// Where it should be.
        offset: u64,
        /// A later record that was found.
        later: TxId,
    },
    /// Something on media contradicts itself.
    #[error("damaged: {0}")]
    Damaged(String),
}

impl StoreError {
    /// Returns whether there is no space, on the pool's tiers or on the host's disk under them: nothing is
    /// damaged, and a retry may succeed.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::NoSpace { .. } => true,
            Self::Media(error) => error.is_no_space(),
            _ => false,
        }
    }

    /// Returns whether a device failed, in any operation.
    #[must_use]
    pub fn is_device(&self) -> bool {
        match self {
            Self::Media(error) => !error.is_no_space() && !error.is_caller_fault(),
            Self::Latched(_) => true,
            _ => false,
        }
    }

    /// Returns whether nothing more may be written: a device failed to write, or is gone. A failed read is no
    /// such error: it fails the transactions that need the data, which then never took effect, and does not
    /// affect others.
    #[must_use]
    pub fn stops_writing(&self) -> bool {
        self.is_device() && !self.is_failed_read()
    }

    /// Returns whether one of several devices failed, so that the same change goes to others when it is tried
    /// again.
    #[must_use]
    pub const fn is_device_lost(&self) -> bool {
        matches!(self, Self::DeviceLost { .. })
    }

    /// Returns whether a device could not read, which is no reason to stop writing.
    #[must_use]
    pub fn is_failed_read(&self) -> bool {
        matches!(self, Self::Media(error) if error.is_failed_read())
    }
}
