//! What the writer keeps in DRAM: the journal, where session and grant rows lie, hints for free inode numbers.

use crate::core::Core;
use crate::journal::Journal;
use crate::numbers::Numbers;
use crate::{Result, StoreError, Tx};
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use varve_format::session::{GRANT_ROW_SIZE, GrantRow, SESSION_ROW_SIZE, SessionRow};
use varve_format::{BlockKind, LeaseNo, SessionId};
use zerocopy::little_endian::U64;

/// Under the writer's lock.
pub(crate) struct Writer {
    pub(crate) journal: Journal,
    pub(crate) sessions: Slots<SessionId>,
    pub(crate) grants: Slots<LeaseNo>,
    pub(crate) numbers: Numbers,
}

/// Which slot of a table holds which row.
#[derive(Debug)]
pub(crate) struct Slots<K> {
    used: HashMap<K, u64>,
    free: BTreeSet<u64>,
}

impl<K: Eq + Hash + Copy> Slots<K> {
    pub(crate) fn new(count: u64) -> Self {
        Self {
            used: HashMap::new(),
            free: (0..count).collect(),
        }
    }

    /// Notes a row; false if its key is there already.
    pub(crate) fn note(&mut self, key: K, slot: u64) -> bool {
        self.free.remove(&slot);
        self.used.insert(key, slot).is_none()
    }

    pub(crate) fn slot(&self, key: &K) -> Option<u64> {
        self.used.get(key).copied()
    }

    fn take(&mut self, key: K) -> Option<u64> {
        let slot = self.free.pop_first()?;
        self.used.insert(key, slot);
        Some(slot)
    }

    fn give(&mut self, key: &K) -> Option<u64> {
        let slot = self.used.remove(key)?;
        self.free.insert(slot);
        Some(slot)
    }

    pub(crate) fn len(&self) -> u64 {
        self.used.len() as u64
    }
}

impl Core<'_> {
    fn bad_row(_: varve_format::session::BadRow) -> StoreError {
        StoreError::Damaged("a session or grant row".into())
    }
}

impl Tx<'_> {
    /// A session number, never given before.
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn next_session_id(&mut self) -> Result<SessionId> {
        self.guard(|core| {
            let id = core.lens().state()?.next_session.get().max(1);
            core.change_state(|state| state.next_session = U64::new(id + 1))?;
            Ok(SessionId(id))
        })
    }

    /// The first of `count` consecutive lease numbers, never given before.
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn next_lease_nos(&mut self, count: u64) -> Result<LeaseNo> {
        self.guard(|core| {
            let first = core.lens().state()?.next_lease.get().max(1);
            core.change_state(|state| state.next_lease = U64::new(first + count))?;
            Ok(LeaseNo(first))
        })
    }

    /// The row of a session.
    ///
    /// # Errors
    /// The row is damaged.
    pub fn session(&self, id: SessionId) -> Result<Option<SessionRow>> {
        let Some(slot) = self.core.writer.sessions.slot(&id) else {
            return Ok(None);
        };
        let place = self.core.layout().session_row(slot);
        self.core
            .lens()
            .row(place, BlockKind::SessionTable, SessionRow::decode)?
            .map_err(Core::bad_row)
    }

    /// Writes the row of `row.id`, new or not.
    ///
    /// # Errors
    /// `TableFull`; `Invalid` if the seal is too long.
    pub fn session_put(&mut self, row: &SessionRow) -> Result<()> {
        let bytes = row
            .encode()
            .map_err(|_| StoreError::Invalid("session row: id 0 or a seal out of bounds"))?;
        let id = row.id;
        let writer = &mut self.core.writer;
        let slot = match writer.sessions.slot(&id) {
            Some(slot) => slot,
            None => {
                let slot = writer.sessions.take(id).ok_or(StoreError::TableFull("session"))?;
                self.core.undo.push(Box::new(move |writer| {
                    writer.sessions.give(&id);
                }));
                slot
            }
        };
        self.guard(|core| core.patch(core.layout().session_row(slot), &bytes))
    }

    /// Removes the row of a session.
    ///
    /// # Errors
    /// `NoSession`.
    pub fn session_remove(&mut self, id: SessionId) -> Result<()> {
        let slot = self
            .core
            .writer
            .sessions
            .give(&id)
            .ok_or(StoreError::NoSession(id))?;
        self.core.undo.push(Box::new(move |writer| {
            writer.sessions.note(id, slot);
        }));
        self.guard(|core| core.patch(core.layout().session_row(slot), &[0; SESSION_ROW_SIZE]))
    }

    /// The row of a lease.
    ///
    /// # Errors
    /// The row is damaged.
    pub fn grant(&self, lease: LeaseNo) -> Result<Option<GrantRow>> {
        let Some(slot) = self.core.writer.grants.slot(&lease) else {
            return Ok(None);
        };
        let place = self.core.layout().grant_row(slot);
        self.core
            .lens()
            .row(place, BlockKind::GrantTable, GrantRow::decode)?
            .map_err(Core::bad_row)
    }

    /// Writes the row of `row.lease`, new or not.
    ///
    /// # Errors
    /// `TableFull`; `Invalid` if the session's number is 0.
    pub fn grant_put(&mut self, row: &GrantRow) -> Result<()> {
        let bytes = row
            .encode()
            .map_err(|_| StoreError::Invalid("grant row: session 0 or a sequence out of bounds"))?;
        let lease = row.lease;
        let writer = &mut self.core.writer;
        let slot = match writer.grants.slot(&lease) {
            Some(slot) => slot,
            None => {
                let slot = writer.grants.take(lease).ok_or(StoreError::TableFull("grant"))?;
                self.core.undo.push(Box::new(move |writer| {
                    writer.grants.give(&lease);
                }));
                slot
            }
        };
        self.guard(|core| core.patch(core.layout().grant_row(slot), &bytes))
    }

    /// Removes the row of a lease.
    ///
    /// # Errors
    /// `NoGrant`.
    pub fn grant_remove(&mut self, lease: LeaseNo) -> Result<()> {
        let slot = self
            .core
            .writer
            .grants
            .give(&lease)
            .ok_or(StoreError::NoGrant(lease))?;
        self.core.undo.push(Box::new(move |writer| {
            writer.grants.note(lease, slot);
        }));
        self.guard(|core| core.patch(core.layout().grant_row(slot), &[0; GRANT_ROW_SIZE]))
    }
}
