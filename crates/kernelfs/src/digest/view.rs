//! The digested state and the grants, as the fold reads them. Reads only.

use super::types::{Client, Leases, rights};
use hashbrown::HashMap;
use std::cell::RefCell;
use std::ops::Range;
use varve_digest::{Grants, Need, Slot, View};
use varve_format::session::GrantRow;
use varve_format::{DirRoot, Generation, Ino, InodeKey, LogSeq, SessionId};
use varve_store::{InodeSlot, StoreError, Tx};

/// Names read at once in a scan of a directory.
const PAGE: usize = 256;

/// A transaction before it changes anything.
pub(super) struct TxView<'v, 's> {
    pub(super) tx: &'v Tx<'s>,
    pub(super) leases: &'v dyn Leases,
    /// The directory of the last question: most questions are about one directory.
    dir: Option<(Ino, DirRoot)>,
}

impl<'v, 's> TxView<'v, 's> {
    pub(super) const fn new(tx: &'v Tx<'s>, leases: &'v dyn Leases) -> Self {
        Self {
            tx,
            leases,
            dir: None,
        }
    }
}

impl View for TxView<'_, '_> {
    type Error = StoreError;

    fn slot(&mut self, ino: Ino) -> Result<Slot, StoreError> {
        match self.tx.slot(ino) {
            Ok(InodeSlot::Free(generation)) => Ok(Slot::Free(generation)),
            Ok(InodeSlot::Reserved(generation)) => Ok(Slot::Reserved(generation)),
            Ok(InodeSlot::Used(inode)) => Ok(Slot::Used(inode.attr)),
            // No inode can have this number.
            Err(StoreError::NoInode(_) | StoreError::Invalid(_) | StoreError::NotFound) => {
                Ok(Slot::Free(Generation(0)))
            }
            Err(error) => Err(error),
        }
    }

    fn lookup(&mut self, dir: Ino, name: &[u8]) -> Result<Option<InodeKey>, StoreError> {
        let root = match self.dir {
            Some((last, root)) if last == dir => root,
            _ => self.tx.dir_root(dir)?,
        };
        self.dir = Some((dir, root));
        self.tx.dir_find(dir, &root, name)
    }

    fn any_name(&mut self, dir: Ino, gone: &mut dyn FnMut(&[u8]) -> bool) -> Result<bool, StoreError> {
        let mut cookie = 0;
        loop {
            let items = self.tx.dir_iter(dir, cookie, PAGE)?;
            let Some(last) = items.last() else {
                return Ok(false);
            };
            cookie = last.cookie;
            if items.iter().any(|item| !gone(&item.name)) {
                return Ok(true);
            }
        }
    }

    fn has_xattr(&mut self, ino: Ino, name: &[u8]) -> Result<bool, StoreError> {
        Ok(self.tx.xattr_get(ino, name)?.is_some())
    }

    fn held(&mut self, key: InodeKey, except: &[SessionId]) -> bool {
        self.leases.held(key, except)
    }
}

/// The grant rows of one session; each inode's rows are fetched once.
pub(super) struct SessionGrants<'v> {
    pub(super) client: Client,
    pub(super) leases: &'v dyn Leases,
    known: RefCell<Known>,
}

/// Rows that were fetched.
#[derive(Default)]
struct Known {
    rows: Vec<GrantRow>,
    /// The ranges of `rows` of each inode.
    places: HashMap<InodeKey, Range<usize>>,
}

impl<'v> SessionGrants<'v> {
    pub(super) fn new(client: Client, leases: &'v dyn Leases) -> Self {
        Self {
            client,
            leases,
            known: RefCell::default(),
        }
    }

    fn with<T>(&self, key: InodeKey, f: impl FnOnce(&[GrantRow]) -> T) -> T {
        let Known { rows, places } = &mut *self.known.borrow_mut();
        let place = places.entry(key).or_insert_with(|| {
            let start = rows.len();
            self.leases.grants(self.client.session, key, rows);
            let mut kept = start;
            for at in start..rows.len() {
                if rows[at].session == self.client.session && names(&rows[at], key) {
                    rows.swap(kept, at);
                    kept += 1;
                }
            }
            rows.truncate(kept);
            start..kept
        });
        f(&rows[place.clone()])
    }
}

/// Returns the bit of a batch row that stands for `ino`, if it is in the batch's span.
pub(super) fn batch_bit(row: &GrantRow, ino: Ino) -> Option<u16> {
    let place = ino.0.checked_sub(row.key.ino.0)?;
    (place < 16).then(|| 1 << place)
}

/// Whether a row stands for `key`.
pub(super) fn names(row: &GrantRow, key: InodeKey) -> bool {
    if row.batch == 0 {
        row.key == key
    } else {
        batch_bit(row, key.ino).is_some_and(|bit| row.batch & bit != 0)
    }
}

impl Grants for SessionGrants<'_> {
    fn in_group(&self, gid: u32) -> bool {
        self.leases.in_group(self.client.session, gid)
    }

    fn may_give(&self, gid: u32) -> bool {
        self.leases.may_give(self.client.session, gid)
    }

    fn allows(&self, key: InodeKey, need: Need, seq: LogSeq) -> bool {
        self.with(key, |rows| {
            rows.iter().any(|row| {
                let in_time = row.first_seq <= seq && row.last_seq.is_none_or(|last| seq <= last);
                let may = match need {
                    Need::Links => true,
                    // An owner without the write bit can grant it to itself, so its operations under this
                    // lease count.
                    Need::Write => row.batch != 0 || row.rights & (rights::WRITE | rights::OWN) != 0,
                    Need::Own => row.batch != 0 || row.rights & rights::OWN != 0,
                };
                in_time && may
            })
        })
    }
}
