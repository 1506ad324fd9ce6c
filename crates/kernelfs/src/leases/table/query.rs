//! Queries of the table: holders and waiting requests. Reads only.

use super::{Table, Ticket};
use std::collections::BTreeMap;
use varve_format::{InodeKey, LeaseNo, SessionId};
use varve_ipc::LeaseMode;

impl Table {
    /// Whether changes of `key` are being forwarded.
    #[must_use]
    pub fn is_contended(&self, key: InodeKey, now_ms: u64) -> bool {
        self.contention.is_contended(key, now_ms)
    }

    /// Returns the number of inodes whose changes are being forwarded.
    #[must_use]
    pub fn contended(&self, now_ms: u64) -> usize {
        self.contention.count(now_ms)
    }

    /// Whether a client may be changing `key` under a lease.
    #[must_use]
    pub fn is_written(&self, key: InodeKey) -> bool {
        self.holders.get(&key).is_some_and(|holders| {
            holders
                .iter()
                .any(|holder| holder.mode == LeaseMode::Write && !Self::is_internal(holder.session))
        })
    }

    /// Returns the mode in which `session` may use `key` (also while the lease is being asked back).
    #[must_use]
    pub fn mode(&self, session: SessionId, key: InodeKey) -> Option<LeaseMode> {
        self.holder(session, key).map(|holder| holder.mode)
    }

    /// Returns the lease of `session` on `key`.
    #[must_use]
    pub fn lease(&self, session: SessionId, key: InodeKey) -> Option<(LeaseNo, LeaseMode)> {
        self.holder(session, key)
            .map(|holder| (holder.lease, holder.mode))
    }

    /// Returns the sessions that know places of the blocks of `key`.
    pub fn mappers(&self, key: InodeKey) -> impl Iterator<Item = SessionId> {
        let holders = self
            .holders
            .get(&key)
            .map_or(&[][..], |holders| holders.as_slice());
        holders
            .iter()
            .filter(|holder| holder.mapped)
            .map(|holder| holder.session)
    }

    /// Returns the inodes of which any session knows places of blocks.
    #[must_use]
    pub fn mapped(&self) -> Vec<InodeKey> {
        self.holders
            .iter()
            .filter(|(_, holders)| holders.iter().any(|holder| holder.mapped))
            .map(|(key, _)| *key)
            .collect()
    }

    /// Returns the number of a session's leases.
    #[must_use]
    pub fn count(&self, session: SessionId) -> usize {
        self.by_session.get(&session).map_or(0, BTreeMap::len)
    }

    /// Returns the number of a session's waiting requests.
    #[must_use]
    pub fn waiting(&self, session: SessionId) -> usize {
        self.waiters
            .values()
            .filter(|waiter| waiter.session == session)
            .count()
    }

    /// Returns the tickets of a session's waiting requests.
    #[must_use]
    pub fn waiting_tickets(&self, session: SessionId) -> Vec<Ticket> {
        let own = self
            .waiters
            .iter()
            .filter(|(_, waiter)| waiter.session == session);
        own.map(|(ticket, _)| *ticket).collect()
    }

    /// Whether any request waits.
    #[must_use]
    pub fn anyone_waits(&self) -> bool {
        !self.waiters.is_empty()
    }
}
