//! Rows of sessions and grants in a transaction.

use super::TxState;
use crate::{Result, StoreError, Tx};
use varve_format::session::{GRANT_ROW_SIZE, GrantRow, SESSION_ROW_SIZE, SessionRow};
use varve_format::{BlockKind, LeaseNo, SessionId};
use zerocopy::little_endian::U64;

impl TxState<'_> {
    fn bad_row(_: varve_format::session::BadRow) -> StoreError {
        StoreError::Damaged("a session or grant row".into())
    }
}

impl Tx<'_> {
    /// Returns the first of `count` consecutive session numbers that were never given before.
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn next_session_ids(&mut self, count: u64) -> Result<SessionId> {
        self.guard(|core| {
            let first = core.reader().state()?.next_session.get().max(1);
            core.change_state(|state| state.next_session = U64::new(first + count))?;
            Ok(SessionId(first))
        })
    }

    /// Returns the first of `count` consecutive lease numbers that were never given before.
    ///
    /// # Errors
    /// The pool state cannot be read.
    pub fn next_lease_nos(&mut self, count: u64) -> Result<LeaseNo> {
        self.guard(|core| {
            let first = core.reader().state()?.next_lease.get().max(1);
            core.change_state(|state| state.next_lease = U64::new(first + count))?;
            Ok(LeaseNo(first))
        })
    }

    /// Returns the row of a session.
    ///
    /// # Errors
    /// The row is damaged.
    pub fn session(&self, id: SessionId) -> Result<Option<SessionRow>> {
        let Some(slot) = self.core.writer.sessions.slot(&id) else {
            return Ok(None);
        };
        let place = self.core.layout().session_row(slot);
        self.core
            .reader()
            .row(place, BlockKind::SessionTable, SessionRow::decode)?
            .map_err(TxState::bad_row)
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

    /// Returns the row of a lease.
    ///
    /// # Errors
    /// The row is damaged.
    pub fn grant(&self, lease: LeaseNo) -> Result<Option<GrantRow>> {
        let Some(slot) = self.core.writer.grants.slot(&lease) else {
            return Ok(None);
        };
        let place = self.core.layout().grant_row(slot);
        self.core
            .reader()
            .row(place, BlockKind::GrantTable, GrantRow::decode)?
            .map_err(TxState::bad_row)
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
