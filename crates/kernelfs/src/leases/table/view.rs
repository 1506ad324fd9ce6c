//! The table for operators: waiting requests with their holders, and a session's leases. Reads only.

use super::{Holder, Phase, Table};
use serde::{Deserialize, Serialize};
use varve_format::{InodeKey, SessionId};
use varve_ipc::LeaseMode;

/// A session that has a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderStatus {
    /// Session; 0: the daemon itself, for one operation.
    pub session: u64,
    /// `read` or `write`.
    pub mode: String,
    /// `granting`, `held`, `asked back`, or `releasing` (its log is being digested).
    pub state: String,
    /// Milliseconds since it was asked back.
    #[serde(default)]
    pub asked_ms: Option<u64>,
}

/// One inode that a request waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStatus {
    /// Session that waits; 0: the daemon itself, for one operation.
    pub session: u64,
    /// The inode's number as `stat` shows it ([`InodeKey::number`]).
    pub inode: u64,
    /// Mode wanted.
    pub mode: String,
    /// How long it has waited, in milliseconds.
    pub waited_ms: u64,
    /// Requests for this inode ahead of this one.
    pub before: u64,
    /// Other sessions whose leases keep it waiting.
    pub holders: Vec<HolderStatus>,
}

/// One lease of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseDetail {
    /// Number of the lease.
    pub lease: u64,
    /// Inode number.
    pub inode: u64,
    /// Generation of the inode number.
    pub generation: u32,
    /// As in [`HolderStatus`].
    #[serde(flatten)]
    pub holder: HolderStatus,
    /// Other sessions wait for it.
    pub awaited: bool,
}

const fn mode_name(mode: LeaseMode) -> &'static str {
    match mode {
        LeaseMode::Read => "read",
        LeaseMode::Write => "write",
    }
}

fn session_number(session: SessionId) -> u64 {
    if Table::is_internal(session) { 0 } else { session.0 }
}

impl Table {
    /// Returns all waits, oldest request first: for each request the inodes that keep it waiting.
    #[must_use]
    pub fn waits(&self, now_ms: u64) -> Vec<WaitStatus> {
        let mut waits = Vec::new();
        for (ticket, waiter) in &self.waiters {
            for want in &waiter.wants {
                let holders: Vec<_> = self
                    .holders
                    .get(&want.key)
                    .into_iter()
                    .flatten()
                    .filter(|holder| {
                        holder.session != waiter.session && Self::conflicts(holder.mode, want.mode)
                    })
                    .map(|holder| status_of(holder, now_ms))
                    .collect();
                let queue = self.queues.get(&want.key).map_or(&[][..], Vec::as_slice);
                let before = queue.iter().filter(|other| *other < ticket).count() as u64;
                if holders.is_empty() && before == 0 {
                    continue;
                }
                waits.push(WaitStatus {
                    session: session_number(waiter.session),
                    inode: want.key.number(),
                    mode: mode_name(want.mode).into(),
                    waited_ms: now_ms.saturating_sub(waiter.since_ms),
                    before,
                    holders,
                });
            }
        }
        waits
    }

    /// Returns the number of leases that a session was asked to give back and has not.
    #[must_use]
    pub fn asked_back(&self, session: SessionId) -> usize {
        self.asked.values().filter(|(whose, _)| *whose == session).count()
    }

    /// Returns a session's leases, oldest first, at most `max`.
    #[must_use]
    pub fn leases_of(&self, session: SessionId, max: usize, now_ms: u64) -> Vec<LeaseDetail> {
        let Some(leases) = self.by_session.get(&session) else {
            return Vec::new();
        };
        let detail = |key: InodeKey| {
            let holder = self.holder(session, key)?;
            Some(LeaseDetail {
                lease: holder.lease.0,
                inode: key.ino.0,
                generation: key.generation.0,
                holder: status_of(holder, now_ms),
                awaited: self.someone_wants(key, session, holder.mode),
            })
        };
        leases.values().filter_map(|key| detail(*key)).take(max).collect()
    }
}

fn status_of(holder: &Holder, now_ms: u64) -> HolderStatus {
    let (state, asked_ms) = match holder.phase {
        Phase::Granting => ("granting", None),
        Phase::Held { .. } => ("held", None),
        Phase::Revoking { first_ms, .. } => ("asked back", Some(now_ms.saturating_sub(first_ms))),
        Phase::Releasing => ("releasing", None),
    };
    HolderStatus {
        session: session_number(holder.session),
        mode: mode_name(holder.mode).into(),
        state: state.into(),
        asked_ms,
    }
}
