//! Shared state of all sessions, under one lock. Owns leases, holds, rows and waiting requests; never touches
//! media, and waits only on its own condition variables.

use crate::digest::queue::DigestQueue;
use crate::error::no;
use crate::leases::grants::GrantTable;
use crate::leases::{Decision, GrantedLease, Holds, Table, Ticket};
use crate::session::cached::CachedReplies;
use crate::session::state::{Known, Session, unlearn};
use crate::watches::Watches;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::{InodeKey, LastForwarded, Seal, SessionId, TxId};
use varve_ipc::{IpcError, ReleaseItem, Upcall};

/// State of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Logs and sends requests.
    Live,
    /// Its page says SEALED; its leases are kept until its log is digested.
    Sealing,
}

/// A session and its state that others need.
pub(crate) struct SessionEntry {
    pub(crate) session: Arc<Session>,
    pub(crate) phase: Phase,
    /// Whether its client knows of other sessions.
    pub(crate) shared_mode: SharedMode,
    /// Barriers not acknowledged yet.
    pub(crate) barriers: BTreeMap<TxId, Barrier>,
    /// Whether a return of its unused reserved blocks is awaited.
    pub(crate) reclaim: Reclaim,
}

/// A session's knowledge of others. Only mounts are told: they open files for writing past the kernel's page
/// cache then.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SharedMode {
    /// Sharing was announced to it.
    pub(crate) announced: bool,
    /// Deadline of its confirmation.
    pub(crate) until_ms: u64,
    /// It has confirmed that.
    pub(crate) noted: bool,
}

impl SharedMode {
    /// State of a new session, with other sessions present or not.
    pub(crate) const fn at_entry(beside_others: bool) -> Self {
        Self {
            announced: false,
            until_ms: 0,
            noted: beside_others,
        }
    }
}

/// Progress of a session's return of unused reserved blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Reclaim {
    /// No return was requested, or it has answered for all blocks granted to it.
    #[default]
    None,
    /// A return was requested; it must answer until `until_ms`.
    Requested { until_ms: u64 },
    /// It answered before it knew of all blocks granted to it: the waiting thread asks again.
    Repeat { until_ms: u64 },
}

/// A barrier that a session has not obeyed yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Barrier {
    /// Deadline of the acknowledgement.
    pub(crate) until_ms: u64,
    /// Messages of the barrier that are not acknowledged.
    pub(crate) parts: usize,
}

/// A sealed session that its client may still resume.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) id: SessionId,
    pub(crate) token: u128,
    pub(crate) uid: u32,
    pub(crate) process: crate::process::ProcessId,
    pub(crate) seal: Seal,
    pub(crate) last_forwarded: LastForwarded,
    /// The session that it continued, if its client never made a request in this one.
    pub(crate) continues: Option<SessionId>,
    /// Time until which its holds count; `None`: as long as its process lives.
    pub(crate) holds_until_ms: Option<u64>,
    /// It has a row on media.
    pub(crate) row: bool,
    /// Inodes that it could name; `None` if the daemon was started since.
    pub(crate) known: Option<Known>,
}

/// Outcome of a request for leases.
#[derive(Debug)]
pub(crate) enum WaitOutcome {
    Granted(Decision),
    /// The session has ended.
    Over,
    /// The pool became read-only.
    Latched,
}

/// A waiting thread.
pub(crate) struct LeaseWaiter {
    pub(crate) woken: Arc<Condvar>,
    pub(crate) verdict: Option<WaitOutcome>,
}

/// Most inodes that one session keeps alive.
pub(crate) const HOLDS_MAX: usize = 1 << 20;

/// The sessions, and the condition variables and locks beside their table.
pub(crate) struct Sessions {
    pub(crate) table: Mutex<SessionTable>,
    /// Signalled when a mount has given up its kernel's caches.
    pub(crate) sharing_changed: Condvar,
    /// Serializes moves of directories to another parent.
    pub(crate) rename: Mutex<()>,
}

impl Sessions {
    pub(crate) fn new(table: SessionTable) -> Self {
        Self {
            table: Mutex::new(table),
            sharing_changed: Condvar::new(),
            rename: Mutex::new(()),
        }
    }
}

pub(crate) struct SessionTable {
    pub(crate) table: Table,
    pub(crate) holds: Holds,
    pub(crate) rows: GrantTable,
    pub(crate) entries: BTreeMap<SessionId, SessionEntry>,
    pub(crate) ended: Vec<Ended>,
    /// Sessions of an earlier daemon whose clients may still return.
    pub(crate) earlier: BTreeSet<SessionId>,
    pub(crate) waiters: HashMap<Ticket, LeaseWaiter>,
    /// Sessions of an earlier daemon whose logs recovery is digesting; `entries` gets only those whose logs
    /// must wait.
    pub(crate) revived: BTreeMap<SessionId, Arc<Session>>,
    /// Sessions to be sealed by the next thread that can, with the reasons.
    pub(crate) doomed: BTreeMap<SessionId, &'static str>,
    /// Sealed on media; their logs are still to be digested.
    pub(crate) to_finish: Vec<(Arc<Session>, Seal, bool)>,
    /// Sealed on media; digesting them failed for want of space.
    pub(crate) unfinished: Vec<(Arc<Session>, Seal, bool)>,
    /// Sessions that requested a digest and do not wait for it.
    pub(crate) to_digest: DigestQueue,
    /// Inodes that lost their last hold: freed if they have no name.
    pub(crate) unheld: BTreeSet<InodeKey>,
    /// Time since which there has been one session at most.
    pub(crate) alone_since_ms: u64,
    /// What the kernels above mounts may use without a lease.
    pub(crate) cached: CachedReplies,
    pub(crate) latched: bool,
    pub(crate) watches: Watches,
    pub(crate) next_read_only: u64,
    /// Sessions of earlier daemons that have no row: their clients may return in the grace time.
    pub(crate) unrecorded: BTreeSet<SessionId>,
    /// Newest transaction at the start of each change under way: blocks that the change frees are newer.
    pub(crate) changes: BTreeMap<u64, TxId>,
    pub(crate) next_change: u64,
}

/// First number of sessions without a row.
pub(crate) const READ_ONLY_SESSIONS: u64 = 1 << 62;

impl SessionTable {
    pub(crate) fn new(table: Table) -> Self {
        Self {
            table,
            holds: Holds::default(),
            rows: GrantTable::default(),
            entries: BTreeMap::new(),
            ended: Vec::new(),
            earlier: BTreeSet::new(),
            waiters: HashMap::new(),
            revived: BTreeMap::new(),
            doomed: BTreeMap::new(),
            to_finish: Vec::new(),
            unfinished: Vec::new(),
            to_digest: DigestQueue::default(),
            unheld: BTreeSet::new(),
            alone_since_ms: 0,
            cached: CachedReplies::default(),
            latched: false,
            watches: Watches::default(),
            next_read_only: READ_ONLY_SESSIONS,
            unrecorded: BTreeSet::new(),
            changes: BTreeMap::new(),
            next_change: 0,
        }
    }

    /// Whether a client of an earlier daemon may still return.
    pub(crate) fn awaits_earlier(&mut self) -> bool {
        let waits = |id: &SessionId| {
            self.ended.iter().any(|ended| ended.id == *id)
                || self.revived.contains_key(id)
                || [&self.to_finish, &self.unfinished]
                    .iter()
                    .any(|list| list.iter().any(|(session, ..)| session.id == *id))
        };
        self.earlier.retain(waits);
        !self.unrecorded.is_empty() || !self.earlier.is_empty()
    }

    /// Decides waiting requests, asks back the leases that others wait for, and marks sessions that are late.
    /// To be called after every change and when time has passed.
    pub(crate) fn pump(&mut self, now_ms: u64) {
        if self.latched {
            for seat in self.waiters.values_mut().filter(|seat| seat.verdict.is_none()) {
                seat.verdict = Some(WaitOutcome::Latched);
                seat.woken.notify_all();
            }
        }
        for mut decision in self.table.decide(now_ms) {
            if !Table::is_internal(decision.session) {
                self.hold_granted(decision.session, &mut decision.leases);
            }
            match self.waiters.get_mut(&decision.ticket) {
                Some(seat) if seat.verdict.is_none() => {
                    seat.woken.notify_all();
                    seat.verdict = Some(WaitOutcome::Granted(decision));
                }
                _ => self.undo_granted(decision.session, &decision.leases, now_ms),
            }
        }
        let revocations = self.table.revocations(now_ms);
        self.send_revocations(&revocations);
        for ticket in self.table.with_news() {
            if let Some(seat) = self.waiters.get(&ticket) {
                seat.woken.notify_all();
            }
        }
        for session in self.table.expired(now_ms) {
            // A sealed session keeps its leases until its log is digested.
            if self.live(session).is_none() || self.doomed.contains_key(&session) {
                continue;
            }
            tracing::debug!(%session, late = ?self.table.late_leases(session, now_ms), "leases are late");
            self.doomed
                .insert(session, "it did not give a lease back in time");
        }
        for (id, member) in &self.entries {
            if member.barriers.values().any(|barrier| now_ms >= barrier.until_ms) {
                self.doomed
                    .insert(*id, "it did not let go of moved blocks in time");
            }
            if matches!(member.reclaim, Reclaim::Requested { until_ms } if now_ms >= until_ms) {
                self.doomed
                    .insert(*id, "it did not give unused space back in time");
            }
        }
    }

    pub(crate) fn send_revocations(&mut self, revocations: &[crate::leases::Revocation]) {
        for revocation in revocations {
            let upcall = Upcall::Revoke {
                key: revocation.key,
                lease: revocation.lease,
                keep: revocation.keep,
            };
            self.send(revocation.session, upcall);
        }
    }

    /// Puts an upcall into a session's queue; a session with a full queue is doomed.
    pub(crate) fn send(&mut self, session: SessionId, upcall: Upcall) {
        let Some(member) = self.entries.get(&session) else {
            return;
        };
        if member.phase == Phase::Live && !member.session.upcalls.push(upcall) {
            self.doomed.insert(session, "it does not take its messages");
        }
    }

    /// Asks a session for its unused reserved blocks, unless it was already asked.
    pub(crate) fn reclaim(&mut self, id: SessionId, until_ms: u64) {
        if let Some(member) = self.entries.get_mut(&id)
            && member.phase == Phase::Live
            && !matches!(member.reclaim, Reclaim::Requested { .. })
        {
            member.reclaim = Reclaim::Requested { until_ms };
            self.send(id, Upcall::ReclaimReservations);
        }
    }

    /// Whether reserved blocks of these sessions may still come back; asks sessions again that have answered
    /// too soon.
    pub(crate) fn reclaims(&mut self, asked: &[SessionId], now_ms: u64) -> bool {
        let mut under_way = false;
        for id in asked {
            let Some(member) = self.entries.get(id) else {
                continue;
            };
            let has = member.session.reserved.load(Ordering::Acquire) > 0;
            under_way |= match (member.phase, member.reclaim) {
                // A digest of its log returns all its blocks; a log that cannot be digested now is tried
                // later.
                (Phase::Sealing, _) => has && !self.unfinished.iter().any(|(session, ..)| session.id == *id),
                (Phase::Live, Reclaim::None) => false,
                (Phase::Live, Reclaim::Requested { .. }) => true,
                (Phase::Live, Reclaim::Repeat { until_ms }) if now_ms < until_ms => {
                    self.reclaim(*id, until_ms);
                    true
                }
                (Phase::Live, Reclaim::Repeat { .. }) => {
                    self.doomed
                        .insert(*id, "it does not hear what space it was granted");
                    true
                }
            };
        }
        under_way
    }

    /// Returns the live session of this number.
    pub(crate) fn live(&self, id: SessionId) -> Option<Arc<Session>> {
        let member = self.entries.get(&id)?;
        (member.phase == Phase::Live).then(|| Arc::clone(&member.session))
    }

    /// Returns the session of this number, in whatever state.
    pub(crate) fn any(&self, id: SessionId) -> Option<&Arc<Session>> {
        let member = self.entries.get(&id).map(|member| &member.session);
        member.or_else(|| self.revived.get(&id))
    }

    /// Ends the waits of a session that has ended.
    pub(crate) fn end_waits(&mut self, tickets: &[Ticket]) {
        for ticket in tickets {
            if let Some(seat) = self.waiters.get_mut(ticket)
                && seat.verdict.is_none()
            {
                seat.verdict = Some(WaitOutcome::Over);
                seat.woken.notify_all();
            }
        }
    }

    /// Returns the number of changes made under a lease that is given back. Where the client did not count
    /// them, returns an upper bound: the entries that it logged since the grant.
    pub(crate) fn changes_under(&self, session: SessionId, item: &ReleaseItem) -> u64 {
        if item.changes != u32::MAX {
            return u64::from(item.changes);
        }
        let row = self.rows.find(session, item.key);
        row.map_or(0, |row| (item.last_seq.0 + 1).saturating_sub(row.first_seq.0))
    }

    /// Whether a session shares the pool with another.
    pub(crate) fn is_shared(&self, session: SessionId) -> bool {
        self.entries.keys().any(|other| *other != session)
    }

    /// Lets a session hold the inodes of leases that were decided.
    pub(crate) fn hold_granted(&mut self, session: SessionId, leases: &mut [GrantedLease]) {
        for lease in leases {
            lease.new_hold = self.holds.add(session, lease.key);
        }
    }

    /// Takes leases back that were decided and did not come to be, and the holds that came with them.
    pub(crate) fn undo_granted(&mut self, session: SessionId, leases: &[GrantedLease], now_ms: u64) {
        self.table.undo(session, leases, now_ms);
        for lease in leases.iter().filter(|lease| lease.new_hold) {
            if self.table.mode(session, lease.key).is_none() {
                self.unhold(session, lease.key);
            }
        }
    }

    /// Ends a session's hold on `key`.
    pub(crate) fn unhold(&mut self, session: SessionId, key: InodeKey) {
        if let Some(member) = self.entries.get(&session) {
            member.session.forget_rights(key);
        }
        if self.holds.remove(session, key) {
            self.unheld.insert(key);
        }
    }

    /// Forgets inodes that are gone, or numbers of inodes that were never made: no session can name them any
    /// more, and none that returns can.
    pub(crate) fn unlearn(&self, keys: &[InodeKey]) {
        for member in self.entries.values() {
            member.session.unlearn(keys);
        }
        for known in self.ended.iter().filter_map(|ended| ended.known.as_ref()) {
            unlearn(known, keys);
        }
    }

    /// Lets `session` hold these inodes.
    ///
    /// # Errors
    /// `Sealed`: nothing would end the holds of a session that has ended; EMFILE.
    pub(crate) fn hold(&mut self, session: SessionId, keys: &[InodeKey]) -> Result<(), IpcError> {
        if self.live(session).is_none() {
            return Err(IpcError::Sealed);
        }
        if self.holds.count(session) + keys.len() > HOLDS_MAX {
            return Err(no(libc::EMFILE));
        }
        for key in keys {
            self.holds.add(session, *key);
        }
        Ok(())
    }

    /// Returns the newest transaction whose freed blocks no session reads any more: transactions below the
    /// oldest barrier under way, and before the oldest change whose barriers are not known yet.
    pub(crate) fn reader_horizon(&self) -> TxId {
        let barriers = self
            .entries
            .values()
            .filter_map(|member| member.barriers.keys().next());
        let oldest = barriers.map(|tx| TxId(tx.0.saturating_sub(1)));
        oldest
            .chain(self.changes.values().copied())
            .min()
            .unwrap_or(TxId(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::SessionTable;
    use crate::leases::{Limits, Table};
    use varve_format::{InodeKey, LeaseNo, SessionId};
    use varve_ipc::IpcError;

    #[test]
    fn session_that_is_over_holds_nothing_more() {
        let limits = Limits {
            min_hold_ms: 2,
            lease_ms: 100,
        };
        let mut sessions = SessionTable::new(Table::new(limits, LeaseNo(1)));
        let (ended, key) = (SessionId(3), InodeKey::new(16, 1));
        assert_eq!(sessions.hold(ended, &[key]), Err(IpcError::Sealed));
        assert!(!sessions.holds.held(key, &[]), "it would be kept for ever");
    }
}
