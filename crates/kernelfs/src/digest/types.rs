//! Inputs of a digest besides the log, and its results for the rest of the daemon. Plain values.

use crate::config::DedupScope;
use crate::placement::{Pins, Placement, Written};
use varve_digest::{Batch, Counts, RefusedTx};
use varve_format::session::GrantRow;
use varve_format::{InodeKey, LeaseNo, LogSeq, Pin, SessionId, TimeNs, TxId};
use varve_media::Region;
use varve_store::{DataTarget, SpaceStats, StoreError};

/// Rights of a grant row. A row without rights still lets its session add and remove names of the inode
/// (given the directory's row).
pub mod rights {
    /// May write data, change names of a directory, set times to now.
    pub const WRITE: u32 = 1;
    /// Owns the inode: may change mode, times, and attributes.
    pub const OWN: u32 = 2;
}

/// The daemon's knowledge of a session's peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client {
    /// Session.
    pub session: SessionId,
    /// User.
    pub uid: u32,
    /// Root or the pool's owner: acts for any credentials, which its LibFS or the kernel checks.
    pub privileged: bool,
    /// The kernel above this client checks its callers' rights. It does not pass on a caller's groups, so the
    /// daemon cannot repeat those checks.
    pub checked: bool,
}

/// A session whose log is digested.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// Its entries.
    pub batch: &'a Batch,
    /// The log, which holds the payloads that the batch left there.
    pub log: &'a dyn Region,
    /// The client.
    pub client: Client,
}

/// The leases, as far as a digest needs them. Called while a store transaction is open: implementations must
/// wait for nothing that waits for a transaction.
pub trait Leases {
    /// Appends the grant rows of `session` that name `key` (also batch rows that hold its number, and rows
    /// with a `last_seq`).
    fn grants(&self, session: SessionId, key: InodeKey, out: &mut Vec<GrantRow>);

    /// Whether any session but those in `except` holds the inode open.
    fn held(&self, key: InodeKey, except: &[SessionId]) -> bool;

    /// Whether the session's user is known to be in this group.
    fn in_group(&self, _session: SessionId, _gid: u32) -> bool {
        false
    }

    /// Whether the session's user may give a file this group: as `in_group`, and true if the user's groups
    /// are no longer known.
    fn may_give(&self, session: SessionId, gid: u32) -> bool {
        self.in_group(session, gid)
    }

    /// Rights (4 read, 2 write) that the session had on an inode when it opened it; it has kept it open
    /// since.
    fn had(&self, _session: SessionId, _key: InodeKey) -> u32 {
        0
    }

    /// Blocks granted to the session and not used up yet; `None`: no longer known. Operations beyond them
    /// take no reserved space: without other free space they are refused, and operations within them wait.
    fn reserved(&self, _session: SessionId) -> Option<u64> {
        None
    }
}

/// Leases, placement and time for one digest.
#[derive(Clone, Copy)]
pub struct Environment<'a> {
    /// Leases and holds.
    pub leases: &'a dyn Leases,
    /// Placement of new data.
    pub placement: &'a dyn Placement,
    /// Operators' wishes, which come before it.
    pub pins: &'a Pins,
    /// The present: no time in a log counts as later.
    pub now_ns: TimeNs,
    /// Files that may share blocks after a comparison.
    pub dedup_scope: DedupScope,
    /// There is room for an undo of shares to join pieces.
    pub rejoin: bool,
    /// Most old blocks to read before a transaction.
    pub fetch_blocks: usize,
}

impl Environment<'_> {
    /// Returns the target of data that is written to a file with this pin.
    #[must_use]
    pub fn target(&self, data: &Written, pin: Pin, space: &SpaceStats) -> DataTarget {
        let pinned = self.pins.target(pin, data.bytes, space);
        pinned.unwrap_or_else(|| self.placement.target(data, space))
    }
}

/// Result of one digest transaction. Everything in it is durable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Applied {
    /// Its journal record.
    pub tx: TxId,
    /// The digested number of each log.
    pub digested: Vec<(SessionId, LogSeq)>,
    /// Freed inodes: their leases and holds go too.
    pub freed: Vec<InodeKey>,
    /// Grant rows that the record changed because of that (`None`: removed), by lease. The caller updates
    /// only the daemon's copies in DRAM.
    pub rows: Vec<(LeaseNo, Option<GrantRow>)>,
    /// Inodes that have no name but are held: to be freed with [`free_orphans`](super::free_orphans) when the
    /// last hold goes.
    pub orphans: Vec<InodeKey>,
    /// Files whose mapped blocks were replaced or freed: direct readers must forget their extents before the
    /// blocks are used again.
    pub remapped: Vec<InodeKey>,
    /// Inodes with data got another pin, or what is shared of those whose shared part is wanted on a tier has
    /// changed.
    pub pinned: bool,
    /// Holds that a log gave up (last close after the last name was removed).
    pub unheld: Vec<(SessionId, InodeKey)>,
    /// Reserved blocks used up, to be given back.
    pub charged: Vec<(SessionId, u64)>,
    /// Transactions that were refused.
    pub refused: Vec<(SessionId, RefusedTx)>,
    /// Counts of the fold's work and savings.
    pub counts: Counts,
}

impl Applied {
    /// Whether the record changed or removed the grant row of `lease`.
    #[must_use]
    pub fn wrote_row(&self, lease: LeaseNo) -> bool {
        self.rows
            .binary_search_by_key(&lease, |(lease, _)| *lease)
            .is_ok()
    }
}

/// Why a forwarded operation was not done. It had no effect.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// The call fails with this errno.
    #[error("errno {0}")]
    Errno(i32),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A check of a forwarded operation, or its result.
pub(super) type Check<T> = Result<T, ForwardError>;

/// Fails with an errno of the call.
pub(super) const fn refuse<T>(errno: i32) -> Check<T> {
    Err(ForwardError::Errno(errno))
}
