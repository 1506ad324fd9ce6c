//! The grant rows as the daemon keeps them in DRAM, beside those on media. One live row for an inode of a session, or one for a batch of
//! new inodes. Writes nothing to media: says what is to be written.

use std::collections::HashMap;
use varve_format::session::GrantRow;
use varve_format::{Ino, InodeKey, LeaseNo, SessionId};

/// What has to happen to a row on media when a lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowChange {
    /// Remove it.
    Remove(LeaseNo),
    /// Write it as it is now.
    Put(GrantRow),
}

/// All live rows.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    rows: HashMap<LeaseNo, GrantRow>,
    by_inode: HashMap<(SessionId, Ino), LeaseNo>,
    by_session: HashMap<SessionId, Vec<LeaseNo>>,
}

fn inodes(row: &GrantRow) -> impl Iterator<Item = Ino> + use<> {
    let (first, batch) = (row.key.ino.0, if row.batch == 0 { 1 } else { row.batch });
    (0..16)
        .filter(move |bit| batch & (1 << bit) != 0)
        .map(move |bit| Ino(first + bit))
}

impl Rows {
    pub(crate) fn insert(&mut self, row: GrantRow) {
        for ino in inodes(&row) {
            self.by_inode.insert((row.session, ino), row.lease);
        }
        self.by_session.entry(row.session).or_default().push(row.lease);
        self.rows.insert(row.lease, row);
    }

    /// The row under which `session` may log changes of `key`.
    pub(crate) fn find(&self, session: SessionId, key: InodeKey) -> Option<&GrantRow> {
        self.rows.get(self.by_inode.get(&(session, key.ino))?)
    }

    /// What ending the lease of `session` on `key` does to its row. Changes nothing.
    pub(crate) fn end_change(&self, session: SessionId, key: InodeKey) -> Option<RowChange> {
        let mut row = *self.find(session, key)?;
        if row.batch != 0 {
            row.batch &= !(1_u16.checked_shl((key.ino.0 - row.key.ino.0) as u32).unwrap_or(0));
            if row.batch != 0 {
                return Some(RowChange::Put(row));
            }
        }
        Some(RowChange::Remove(row.lease))
    }

    /// The lease has ended on media too.
    pub(crate) fn end(&mut self, session: SessionId, key: InodeKey) {
        let change = self.end_change(session, key);
        self.by_inode.remove(&(session, key.ino));
        match change {
            None => {}
            Some(RowChange::Put(row)) => {
                self.rows.insert(row.lease, row);
            }
            Some(RowChange::Remove(lease)) => {
                self.rows.remove(&lease);
                if let Some(leases) = self.by_session.get_mut(&session) {
                    leases.retain(|other| *other != lease);
                    if leases.is_empty() {
                        self.by_session.remove(&session);
                    }
                }
            }
        }
    }

    /// Rows of a session, as they are on media.
    pub(crate) fn of_session(&self, session: SessionId) -> Vec<LeaseNo> {
        self.by_session.get(&session).cloned().unwrap_or_default()
    }

    /// The session's rows are gone on media too.
    pub(crate) fn drop_session(&mut self, session: SessionId) {
        for lease in self.by_session.remove(&session).unwrap_or_default() {
            if let Some(row) = self.rows.remove(&lease) {
                for ino in inodes(&row) {
                    self.by_inode.remove(&(session, ino));
                }
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{RowChange, Rows};
    use varve_format::session::GrantRow;
    use varve_format::{InodeKey, LeaseNo, LogSeq, SessionId};

    const S: SessionId = SessionId(3);

    fn row(lease: u64, ino: u64, batch: u16) -> GrantRow {
        GrantRow {
            session: S,
            lease: LeaseNo(lease),
            key: InodeKey::new(ino, 1),
            rights: 3,
            first_seq: LogSeq(1),
            last_seq: None,
            batch,
        }
    }

    #[test]
    fn batch_row_goes_when_its_last_inode_is_given_back() {
        let mut rows = Rows::default();
        rows.insert(row(1, 16, 0b101));
        assert!(rows.find(S, InodeKey::new(17, 1)).is_none());
        let change = rows.end_change(S, InodeKey::new(16, 9)).unwrap();
        assert_eq!(change, RowChange::Put(row(1, 16, 0b100)));
        rows.end(S, InodeKey::new(16, 9));
        assert!(rows.find(S, InodeKey::new(16, 9)).is_none());
        assert_eq!(
            rows.end_change(S, InodeKey::new(18, 2)),
            Some(RowChange::Remove(LeaseNo(1)))
        );
        rows.end(S, InodeKey::new(18, 2));
        assert_eq!((rows.len(), rows.of_session(S).len()), (0, 0));
    }

    #[test]
    fn rows_of_a_session_go_together() {
        let mut rows = Rows::default();
        rows.insert(row(1, 16, 0b11));
        rows.insert(row(2, 5, 0));
        rows.insert(GrantRow {
            session: SessionId(4),
            ..row(3, 5, 0)
        });
        rows.drop_session(S);
        assert_eq!(rows.len(), 1);
        assert!(rows.find(S, InodeKey::new(5, 1)).is_none());
        assert!(rows.find(SessionId(4), InodeKey::new(5, 1)).is_some());
    }
}
