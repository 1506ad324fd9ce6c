//! State of the one writer in DRAM: the journal, the slots of session and grant rows, hints for free inode
//! numbers.

use crate::free_inodes::FreeInodes;
use crate::journal::Journal;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use varve_format::{LeaseNo, SessionId};

/// The state under the writer's lock.
pub(crate) struct Writer {
    pub(crate) journal: Journal,
    pub(crate) sessions: Slots<SessionId>,
    pub(crate) grants: Slots<LeaseNo>,
    pub(crate) free_inodes: FreeInodes,
    /// Buffer for blocks that are overwritten in place, reused by the next transaction.
    pub(crate) in_place_room: Vec<u8>,
}

/// The slots of a table, by the keys of their rows.
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

    pub(crate) fn take(&mut self, key: K) -> Option<u64> {
        let slot = self.free.pop_first()?;
        self.used.insert(key, slot);
        Some(slot)
    }

    pub(crate) fn give(&mut self, key: &K) -> Option<u64> {
        let slot = self.used.remove(key)?;
        self.free.insert(slot);
        Some(slot)
    }

    pub(crate) fn len(&self) -> u64 {
        self.used.len() as u64
    }
}
