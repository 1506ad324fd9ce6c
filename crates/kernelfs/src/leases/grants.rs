//! The grant rows in the daemon's DRAM, beside those on media. A session has one live row for an inode, or
//! one for a batch of new inodes. Writes nothing to media: returns the changes to write.
//!
//! A number can be given out again, also to the same session, before this table learns that its earlier inode
//! is gone. So a row is found by number *and* generation.

use hashbrown::HashMap;
use smallvec::SmallVec;
use std::collections::BTreeSet;
use varve_format::session::GrantRow;
use varve_format::{Generation, Ino, InodeKey, LeaseNo, SessionId};

/// Change of a row on media when a lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowChange {
    /// Remove it.
    Remove(LeaseNo),
    /// Write its present state.
    Put(GrantRow),
    /// Give back the number of an inode that was never made. Precedes the change of its row, so that a crash
    /// in between loses nothing.
    FreeNumber(InodeKey),
}

impl RowChange {
    /// Returns the lease whose row changes.
    pub(crate) const fn lease(&self) -> Option<LeaseNo> {
        match self {
            Self::Remove(lease) => Some(*lease),
            Self::Put(row) => Some(row.lease),
            Self::FreeNumber(_) => None,
        }
    }
}

/// Place of an inode's row.
#[derive(Debug, Clone, Copy)]
struct Place {
    lease: LeaseNo,
    /// `None`: the row is a batch that was read from media, which holds no generations.
    generation: Option<Generation>,
}

impl Place {
    fn is_for(&self, key: InodeKey) -> bool {
        self.generation
            .is_none_or(|generation| generation == key.generation)
    }
}

/// All live rows.
#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    rows: HashMap<LeaseNo, GrantRow>,
    /// Newest last; more than one as long as a row of an earlier inode with this number remains.
    by_inode: HashMap<(SessionId, Ino), SmallVec<[Place; 1]>>,
    by_session: HashMap<SessionId, BTreeSet<LeaseNo>>,
}

fn inodes(row: &GrantRow) -> impl Iterator<Item = Ino> + use<> {
    let (first, batch) = (row.key.ino.0, if row.batch == 0 { 1 } else { row.batch });
    (0..16)
        .filter(move |bit| batch & (1 << bit) != 0)
        .map(move |bit| Ino(first + bit))
}

impl GrantTable {
    /// Inserts a row for one inode, or a batch row that was read from media.
    pub(crate) fn insert(&mut self, row: GrantRow) {
        let generation = (row.batch == 0).then_some(row.key.generation);
        let places = inodes(&row).map(|ino| (ino, generation)).collect::<Vec<_>>();
        self.insert_at(row, &places);
    }

    /// Inserts a row for a batch of new inodes.
    pub(crate) fn insert_batch(&mut self, row: GrantRow, keys: &[InodeKey]) {
        let places = keys.iter().map(|key| (key.ino, Some(key.generation)));
        self.insert_at(row, &places.collect::<Vec<_>>());
    }

    fn insert_at(&mut self, row: GrantRow, places: &[(Ino, Option<Generation>)]) {
        for (ino, generation) in places {
            let place = Place {
                lease: row.lease,
                generation: *generation,
            };
            self.by_inode.entry((row.session, *ino)).or_default().push(place);
        }
        self.by_session.entry(row.session).or_default().insert(row.lease);
        self.rows.insert(row.lease, row);
    }

    fn place(&self, session: SessionId, key: InodeKey) -> Option<LeaseNo> {
        let places = self.by_inode.get(&(session, key.ino))?;
        let place = places.iter().rev().find(|place| place.is_for(key))?;
        Some(place.lease)
    }

    fn leave_place(&mut self, session: SessionId, ino: Ino, lease: LeaseNo) {
        if let Some(places) = self.by_inode.get_mut(&(session, ino)) {
            places.retain(|place| place.lease != lease);
            if places.is_empty() {
                self.by_inode.remove(&(session, ino));
            }
        }
    }

    /// Returns the row under which `session` may log changes of `key`.
    pub(crate) fn find(&self, session: SessionId, key: InodeKey) -> Option<&GrantRow> {
        self.rows.get(&self.place(session, key)?)
    }

    /// Returns the row change that ends the lease of `session` on `key`. Changes nothing.
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

    /// As [`end_change`](Self::end_change), preceded by the return of the number if its row is a batch: the
    /// inode may never have been made.
    pub(crate) fn give_back_changes(&self, session: SessionId, key: InodeKey) -> Vec<RowChange> {
        let of_batch = self.find(session, key).is_some_and(|row| row.batch != 0);
        let number = of_batch.then_some(RowChange::FreeNumber(key));
        number.into_iter().chain(self.end_change(session, key)).collect()
    }

    /// Returns the numbers in a session's batches, whose inodes may never have been made; without a
    /// generation where media hold none.
    pub(crate) fn numbers(&self, session: SessionId) -> Vec<(Ino, Option<Generation>)> {
        let leases = self.by_session.get(&session).into_iter().flatten();
        let batches = leases
            .filter_map(|lease| self.rows.get(lease))
            .filter(|row| row.batch != 0);
        batches
            .flat_map(|row| inodes(row).map(move |ino| (row.lease, ino)))
            .filter_map(|(lease, ino)| {
                let places = self.by_inode.get(&(session, ino))?;
                let place = places.iter().find(|place| place.lease == lease)?;
                Some((ino, place.generation))
            })
            .collect()
    }

    /// Returns the inodes that a session may log changes of; without a generation where media hold none.
    pub(crate) fn held(&self, session: SessionId) -> Vec<(Ino, Option<Generation>)> {
        let mine = self.by_inode.iter().filter(|((whose, _), _)| *whose == session);
        let mut held: Vec<_> = mine
            .filter_map(|((_, ino), places)| Some((*ino, places.last()?.generation)))
            .collect();
        held.sort_unstable_by_key(|(ino, _)| *ino);
        held
    }

    /// Ends a lease that has ended on media, or ends there with the returned [change](Self::end_change).
    pub(crate) fn end(&mut self, session: SessionId, key: InodeKey) -> Option<RowChange> {
        let lease = self.place(session, key)?;
        let change = self.end_change(session, key);
        self.leave_place(session, key.ino, lease);
        match change {
            None | Some(RowChange::FreeNumber(_)) => {}
            Some(RowChange::Put(row)) => {
                self.rows.insert(row.lease, row);
            }
            Some(RowChange::Remove(lease)) => {
                self.rows.remove(&lease);
                if let Some(leases) = self.by_session.get_mut(&session) {
                    leases.remove(&lease);
                    if leases.is_empty() {
                        self.by_session.remove(&session);
                    }
                }
            }
        }
        change
    }

    /// Returns the leases of a session's rows on media.
    pub(crate) fn of_session(&self, session: SessionId) -> Vec<LeaseNo> {
        self.by_session
            .get(&session)
            .into_iter()
            .flatten()
            .copied()
            .collect()
    }

    /// Drops the rows of a session, which are gone on media too.
    pub(crate) fn drop_session(&mut self, session: SessionId) {
        for lease in self.by_session.remove(&session).unwrap_or_default() {
            if let Some(row) = self.rows.remove(&lease) {
                for ino in inodes(&row) {
                    self.leave_place(session, ino, lease);
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
    use super::{GrantTable, RowChange};
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
        let mut rows = GrantTable::default();
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
    fn end_of_an_inode_leaves_the_row_of_the_next_with_its_number() {
        let mut rows = GrantTable::default();
        rows.insert_batch(row(1, 16, 0b11), &[InodeKey::new(16, 4), InodeKey::new(17, 1)]);
        // 16 is freed and given out again before the table learns of the end of its first inode.
        rows.insert_batch(row(2, 16, 0b1), &[InodeKey::new(16, 5)]);
        let change = rows.end_change(S, InodeKey::new(16, 4)).unwrap();
        assert_eq!(change, RowChange::Put(row(1, 16, 0b10)));
        rows.end(S, InodeKey::new(16, 4));
        assert_eq!(rows.find(S, InodeKey::new(16, 5)).unwrap().lease, LeaseNo(2));
        assert!(rows.find(S, InodeKey::new(16, 4)).is_none());
        rows.end(S, InodeKey::new(17, 1));
        rows.end(S, InodeKey::new(16, 5));
        assert_eq!(
            (rows.len(), rows.of_session(S).len(), rows.by_inode.len()),
            (0, 0, 0)
        );
    }

    #[test]
    fn numbers_of_batches_are_given_back_and_those_of_single_rows_are_not() {
        let mut rows = GrantTable::default();
        let (made, spare) = (InodeKey::new(16, 4), InodeKey::new(17, 1));
        rows.insert_batch(row(1, 16, 0b11), &[made, spare]);
        rows.insert(row(2, 40, 0));
        rows.insert(row(3, 50, 0b100));
        let mut numbers = rows.numbers(S);
        numbers.sort_unstable();
        assert_eq!(
            numbers,
            [
                (made.ino, Some(made.generation)),
                (spare.ino, Some(spare.generation)),
                (varve_format::Ino(52), None)
            ]
        );
        assert_eq!(
            rows.give_back_changes(S, spare),
            [RowChange::FreeNumber(spare), RowChange::Put(row(1, 16, 0b1))]
        );
        assert_eq!(
            rows.give_back_changes(S, InodeKey::new(40, 1)),
            [RowChange::Remove(LeaseNo(2))]
        );
        assert!(rows.give_back_changes(S, InodeKey::new(16, 5)).is_empty());
    }

    #[test]
    fn rows_of_a_session_go_together() {
        let mut rows = GrantTable::default();
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
