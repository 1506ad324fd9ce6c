//! The input of the fold: operations, their actors, the digested state and the rights; and the reasons for
//! which the fold refuses. No logic.

use crate::bytes::{LogResident, WriteData};
use varve_format::log::LogFormatError;
use varve_format::{
    EntryFlags, Generation, Ino, InodeAttr, InodeKey, LogOp, LogSeq, SessionId, TimeNs, charge, charge_write,
};

/// One operation to fold.
#[derive(Debug, Clone, Copy)]
pub struct Op<'a> {
    /// Its number in its session's log.
    pub seq: LogSeq,
    /// Time of the operation, as its writer says.
    pub time_ns: TimeNs,
    /// Flags of the entry.
    pub flags: EntryFlags,
    /// The operation itself.
    pub op: LogOp<'a>,
    /// The bytes of a write whose payload is still in its log; `op` has none then.
    pub left: Option<LogResident>,
}

impl<'a> Op<'a> {
    /// Returns the bytes that it writes; none if it is not a write.
    #[must_use]
    pub const fn bytes(&self) -> WriteData<'a> {
        match (self.left, self.op) {
            (Some(left), _) => WriteData::LogResident(left),
            (None, LogOp::Write { data, .. }) => WriteData::Here(data),
            (None, _) => WriteData::Here(&[]),
        }
    }

    /// Returns the [`charge`](varve_format::charge()) of the operation.
    #[must_use]
    pub fn charge(&self) -> u32 {
        match (self.left, self.op) {
            (Some(left), LogOp::Write { offset, .. }) => charge_write(offset, u64::from(left.len)),
            (_, op) => charge(&op),
        }
    }
}

/// The originator of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Actor {
    /// Session.
    pub session: SessionId,
    /// User of the session.
    pub uid: u32,
    /// Acts for any credentials.
    pub privileged: bool,
    /// The daemon executes a forwarded operation: rights were checked before, and directories may move.
    pub forwarded: bool,
}

/// The kind of change that an operation needs a grant for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// To write data of a file or names of a directory.
    Write,
    /// To change mode, owner, arbitrary times, or extended attributes that only an owner may change.
    Own,
    /// To change the number of links: any grant.
    Links,
}

/// The grants of one session.
pub trait Grants {
    /// Returns whether the session may make changes of the kind `need` to `key` at `seq`.
    fn allows(&self, key: InodeKey, need: Need, seq: LogSeq) -> bool;

    /// Returns whether the session's user is known to be in this group. If not, the session can neither give
    /// files this group nor the set-group-id bit while they have it.
    fn in_group(&self, _gid: u32) -> bool {
        false
    }

    /// Returns whether the user may give a file this group: as [`in_group`](Self::in_group), but also true
    /// where the user's groups are unknown since a restart of the daemon, so that acknowledged operations are
    /// not lost.
    fn may_give(&self, gid: u32) -> bool {
        self.in_group(gid)
    }
}

/// The state of an inode number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// Not in use; holds the generation of its last inode.
    Free(Generation),
    /// Given to a session for an inode that is not made yet, with the generation it will have.
    Reserved(Generation),
    /// A file.
    Used(InodeAttr),
}

/// The digested state. Read-only; every answer describes the state before the batch.
pub trait View {
    /// Error of a failed read.
    type Error;

    /// Returns the state of an inode number.
    ///
    /// # Errors
    /// The store's.
    fn slot(&mut self, ino: Ino) -> Result<Slot, Self::Error>;

    /// Returns the inode that `name` names in `dir`, which is a directory.
    ///
    /// # Errors
    /// The store's.
    fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Option<InodeKey>, Self::Error>;

    /// Returns whether `dir` has a name for which `gone` is false.
    ///
    /// # Errors
    /// The store's.
    fn any_name(&mut self, dir: Ino, gone: &mut dyn FnMut(&[u8]) -> bool) -> Result<bool, Self::Error>;

    /// Returns whether the inode has this extended attribute.
    ///
    /// # Errors
    /// The store's.
    fn has_xattr(&mut self, ino: Ino, name: &[u8]) -> Result<bool, Self::Error>;

    /// Returns whether a session not in `except` holds the inode open.
    fn held(&mut self, key: InodeKey, except: &[SessionId]) -> bool;
}

/// The reason why a transaction was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not an operation.
    #[error("malformed: {0}")]
    Malformed(#[from] LogFormatError),
    /// The session had no grant, or not for this, or not at this number.
    #[error("no grant for it")]
    NoGrant,
    /// The user lacks the permission.
    #[error("not permitted")]
    NotPermitted,
    /// The inode does not exist, or its number has another generation.
    #[error("no such inode")]
    NoInode,
    /// The name does not exist, or names another inode.
    #[error("no such name")]
    NoEntry,
    /// The name or the inode exists already.
    #[error("exists already")]
    Exists,
    /// Not a directory.
    #[error("not a directory")]
    NotDirectory,
    /// A directory.
    #[error("is a directory")]
    IsDirectory,
    /// Not a regular file.
    #[error("not a regular file")]
    NotFile,
    /// The directory has names in it.
    #[error("directory not empty")]
    NotEmpty,
    /// A directory would become its own descendant.
    #[error("a directory cannot move into itself")]
    Loop,
    /// Only the daemon moves a directory to another parent.
    #[error("only the daemon moves directories")]
    DirectoryMove,
    /// More links than an inode can have.
    #[error("too many links")]
    TooManyLinks,
    /// The extended attribute does not exist.
    #[error("no such attribute")]
    NoXattr,
    /// The inode still has a name.
    #[error("the inode still has a name")]
    HasName,
    /// There was no space for it, and its session had reserved none.
    #[error("no space, and no credit for it")]
    NotReserved,
    /// The fold accepted it, but the shared area refused it: one of the two is wrong.
    #[error("the shared area contradicts it")]
    Contradicted,
}

/// A refused transaction: none of it took effect, all others did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusedTx {
    /// The entry that was wrong.
    pub seq: LogSeq,
    /// Why.
    pub why: Refusal,
}

/// Counters of the operations and bytes of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Operations accepted.
    pub ops: u64,
    /// Operations of transactions that were refused.
    pub refused: u64,
    /// Bytes of file data in the accepted writes.
    pub bytes_in: u64,
    /// Bytes of file data that are written: the rest was superseded or its file deleted.
    pub bytes_out: u64,
    /// Writes whose blocks are written together with a neighbour's.
    pub merged: u64,
    /// Inodes made and deleted within the batch: nothing of them is written.
    pub vanished: u64,
}

/// The reason why a fold ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop<E> {
    /// This transaction alone is refused.
    Refused(Refusal),
    /// The state could not be read.
    State(E),
}

impl<E> From<Refusal> for Stop<E> {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}
