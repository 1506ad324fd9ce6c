//! Inode numbers for inodes that a session will make, with exclusive leases on them.

use crate::digest::rights;
use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::ops::acquire::Leasing;
use crate::ops::rows::write_rows;
use crate::session::state::Session;
use std::sync::Arc;
use varve_format::session::GrantRow;
use varve_format::{InodeKey, LeaseNo};
use varve_ipc::{IpcError, NUMBERS_MAX};
use varve_store::{OP_ROOM, StoreError, Tx};

/// Most numbers under one row.
const BATCH_MAX: u16 = 16;

/// Context of reserving numbers.
pub(crate) struct InodeNumbers<'k> {
    core: Core<'k>,
    leasing: Leasing<'k>,
}

impl<'k> InodeNumbers<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            leasing: Leasing::of(kernel),
        }
    }

    /// `Request::AllocInodes`: reserves numbers with exclusive leases, a row for each sixteen of them. Fewer
    /// than requested if not all of them fit.
    pub(crate) fn alloc_inodes(
        &self,
        session: &Arc<Session>,
        near: InodeKey,
        mut count: u16,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, IpcError> {
        if count == 0 || count > NUMBERS_MAX {
            return Err(no(libc::EINVAL));
        }
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        if !session.knows(near) {
            return Err(no(libc::ESTALE));
        }
        self.leasing.records.make(session)?;
        self.leasing.make_room(session);
        let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
        loop {
            match self.alloc_numbers(session, near, count) {
                Ok(inodes) => return Ok(inodes),
                // Fewer may fit.
                Err(StoreError::TableFull(_) | StoreError::NoSpace { .. }) if count > BATCH_MAX => {
                    count = BATCH_MAX;
                }
                Err(StoreError::TableFull(what))
                    if what.contains("grant") && self.core.now_ms() < until_ms =>
                {
                    self.leasing.await_rows(until_ms);
                }
                Err(error) => return Err(self.core.refused(&error)),
            }
        }
    }

    fn alloc_numbers(
        &self,
        session: &Arc<Session>,
        near: InodeKey,
        count: u16,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, StoreError> {
        let mut tx = self.core.store.begin_with_room()?;
        let mut rows: Vec<(GrantRow, Vec<InodeKey>)> = Vec::new();
        let mut left = count;
        // Where free numbers are scattered, a row holds few: bounds the rows that one request takes.
        let rows_max = 2 * usize::from(count.div_ceil(BATCH_MAX));
        while left > 0 && (rows.is_empty() || tx.room_at_least(OP_ROOM) >= OP_ROOM && rows.len() < rows_max) {
            let some = left.min(BATCH_MAX);
            let batch = self.reserve_batch(&mut tx, session, near, some as u8)?;
            left -= some.min(batch.1.len() as u16);
            rows.push(batch);
        }
        tx.commit()?;
        self.settle_numbers(session, rows)
    }

    /// Puts the rows of new numbers, which are on media, into effect, if the session still exists.
    pub(super) fn settle_numbers(
        &self,
        session: &Session,
        rows: Vec<(GrantRow, Vec<InodeKey>)>,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, StoreError> {
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        if sessions.live(session.id).is_none() {
            // Sealed meanwhile: the rows end with the session's others, unless those are gone already.
            if sessions.entries.contains_key(&session.id) {
                for (row, keys) in rows {
                    sessions.rows.insert_batch(row, &keys);
                }
            } else {
                drop(sessions);
                // The numbers go too: no other session knows of them.
                let gone = rows.iter().flat_map(|(row, keys)| {
                    let numbers = keys.iter().map(|key| RowChange::FreeNumber(*key));
                    numbers.chain([RowChange::Remove(row.lease)])
                });
                write_rows(self.core, &gone.collect::<Vec<_>>())?;
            }
            return Err(StoreError::NoSession(session.id));
        }
        let mut leases = Vec::new();
        for (row, keys) in rows {
            sessions.rows.insert_batch(row, &keys);
            for key in keys {
                sessions.holds.add(session.id, key);
                session.learn(key);
                leases.push((key, sessions.table.add_new(session.id, key, now_ms)));
            }
        }
        Ok(leases)
    }

    /// Reserves at most sixteen numbers of one block under one row.
    pub(super) fn reserve_batch(
        &self,
        tx: &mut Tx<'_>,
        session: &Session,
        near: InodeKey,
        count: u8,
    ) -> Result<(GrantRow, Vec<InodeKey>), StoreError> {
        let keys = tx.alloc_inodes(near.ino, count)?;
        let first = *keys.first().ok_or(StoreError::Invalid("no inodes"))?;
        let mask = keys
            .iter()
            .fold(0_u16, |mask, key| mask | 1 << (key.ino.0 - first.ino.0));
        let row = GrantRow {
            session: session.id,
            lease: self.core.locked().table.fresh_lease(),
            key: first,
            rights: rights::WRITE | rights::OWN,
            first_seq: varve_ipc::SessionPage::digested(&*session.page).next(),
            last_seq: None,
            batch: mask,
        };
        tx.grant_put(&row)?;
        Ok((row, keys))
    }
}
