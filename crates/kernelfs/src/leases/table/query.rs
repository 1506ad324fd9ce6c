//! Questions to the table: who has what, and who waits. Looks only.

use super::{Table, Ticket};
use std::collections::BTreeMap;
use varve_format::{InodeKey, LeaseNo, SessionId};
use varve_ipc::LeaseMode;

impl Table {
    /// Whether changes of `key` are to be forwarded at the moment.
    #[must_use]
    pub fn is_contended(&self, key: InodeKey, now_ms: u64) -> bool {
        self.contention.is_contended(key, now_ms)
    }

    /// Inodes whose changes are to be forwarded at the moment.
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

    /// Mode in which `session` may use `key` at the moment (also while it is being asked back).
    #[must_use]
    pub fn mode(&self, session: SessionId, key: InodeKey) -> Option<LeaseMode> {
        self.holder(session, key).map(|holder| holder.mode)
    }

    /// The lease of `session` on `key`.
    #[must_use]
    pub fn lease(&self, session: SessionId, key: InodeKey) -> Option<(LeaseNo, LeaseMode)> {
        self.holder(session, key)
            .map(|holder| (holder.lease, holder.mode))
    }

    /// Whether another session may be changing `key`.
    #[must_use]
    pub fn written_by_other(&self, session: SessionId, key: InodeKey) -> bool {
        self.holders.get(&key).is_some_and(|holders| {
            holders
                .iter()
                .any(|holder| holder.session != session && holder.mode == LeaseMode::Write)
        })
    }

    /// Sessions that know where the blocks of `key` were.
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

    /// Leases of a session.
    #[must_use]
    pub fn count(&self, session: SessionId) -> usize {
        self.by_session.get(&session).map_or(0, BTreeMap::len)
    }

    /// Requests of a session that wait.
    #[must_use]
    pub fn waiting(&self, session: SessionId) -> usize {
        self.waiters
            .values()
            .filter(|waiter| waiter.session == session)
            .count()
    }

    /// Those requests.
    #[must_use]
    pub fn waiting_tickets(&self, session: SessionId) -> Vec<Ticket> {
        let own = self
            .waiters
            .iter()
            .filter(|(_, waiter)| waiter.session == session);
        own.map(|(ticket, _)| *ticket).collect()
    }

    /// Whether anybody waits.
    #[must_use]
    pub fn anyone_waits(&self) -> bool {
        !self.waiters.is_empty()
    }
}
