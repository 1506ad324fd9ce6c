//! Holds of sessions on inodes. An inode without a name is freed only when no session holds it; freeing is
//! the caller's.

use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;
use varve_format::{InodeKey, SessionId};

/// Holds of all sessions.
#[derive(Debug, Default)]
pub struct Holds {
    by_key: HashMap<InodeKey, SmallVec<[SessionId; 2]>>,
    by_session: HashMap<SessionId, HashSet<InodeKey>>,
}

impl Holds {
    /// Lets `session` hold `key`. Returns whether it did not before.
    pub fn add(&mut self, session: SessionId, key: InodeKey) -> bool {
        let new = self.by_session.entry(session).or_default().insert(key);
        if new {
            self.by_key.entry(key).or_default().push(session);
        }
        new
    }

    /// Ends the hold of `session` on `key`. Returns whether it was the last hold.
    pub fn remove(&mut self, session: SessionId, key: InodeKey) -> bool {
        let had = self
            .by_session
            .get_mut(&session)
            .is_some_and(|keys| keys.remove(&key));
        had && self.unlink(session, key)
    }

    fn unlink(&mut self, session: SessionId, key: InodeKey) -> bool {
        let Some(sessions) = self.by_key.get_mut(&key) else {
            return false;
        };
        sessions.retain(|other| *other != session);
        let last = sessions.is_empty();
        if last {
            self.by_key.remove(&key);
        }
        last
    }

    /// Ends all holds of `session`; returns the inodes that no session holds any more.
    pub fn drop_session(&mut self, session: SessionId) -> Vec<InodeKey> {
        let keys = self.by_session.remove(&session).unwrap_or_default();
        keys.into_iter()
            .filter(|key| self.unlink(session, *key))
            .collect()
    }

    /// Gives `to` the holds of `from` on `keys` (its client resumed).
    pub fn copy(&mut self, from: SessionId, to: SessionId, keys: &[InodeKey]) {
        for key in keys {
            if self.by_session.get(&from).is_some_and(|held| held.contains(key)) {
                self.add(to, *key);
            }
        }
    }

    /// Removes all holds on `key`, which is gone.
    pub fn forget(&mut self, key: InodeKey) {
        for session in self.by_key.remove(&key).unwrap_or_default() {
            if let Some(keys) = self.by_session.get_mut(&session) {
                keys.remove(&key);
            }
        }
    }

    /// Whether a session outside `except` holds `key`.
    #[must_use]
    pub fn held(&self, key: InodeKey, except: &[SessionId]) -> bool {
        self.by_key
            .get(&key)
            .is_some_and(|sessions| sessions.iter().any(|session| !except.contains(session)))
    }

    /// Returns the sessions that hold `key`.
    pub fn holders(&self, key: InodeKey) -> impl Iterator<Item = SessionId> {
        self.by_key.get(&key).into_iter().flatten().copied()
    }

    /// Returns the number of inodes that `session` holds.
    #[must_use]
    pub fn count(&self, session: SessionId) -> usize {
        self.by_session.get(&session).map_or(0, HashSet::len)
    }
}
