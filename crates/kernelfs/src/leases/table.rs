//! The lease table.
//!
//! Rules, each kept by construction and by the property tests:
//! - *exclusive means exclusive*: a write lease never stands beside any lease of another session;
//! - *first come, first served*: a request is not granted while an earlier one that conflicts with it waits;
//! - *all or nothing*: a request gets all its leases at one moment, and pins nothing while it waits: its
//!   session's leases can be revoked meanwhile;
//! - a lease is asked back only `min_hold_ms` after its grant was confirmed, and only when a request waits
//!   (or space for rows runs out). A read lease on a contended inode is asked back at once: the operation
//!   that it was granted for is done under it (a fresh grant is used once), and a forwarded operation waits
//!   for it.
//!
//! No request waits for ever: only holders keep the earliest one waiting, each holder is revoked, and a
//! holder that does not answer within `lease_ms` shows up in [`Table::expired`].

mod query;
mod recall;
mod view;

pub use view::{HolderStatus, LeaseDetail, WaitStatus};

use super::contention::Contention;
use super::walks::Walks;
use super::work::Works;
use hashbrown::HashMap;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use varve_format::{InodeKey, LeaseNo, SessionId};
use varve_ipc::{LeaseMode, Want};

/// Times of the protocol.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Least time between a grant and its revocation.
    pub min_hold_ms: u64,
    /// Time to give a lease back.
    pub lease_ms: u64,
}

/// Names a waiting request; later ones are larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One lease of a decided request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantedLease {
    /// Inode.
    pub key: InodeKey,
    /// Mode.
    pub mode: LeaseMode,
    /// Number.
    pub lease: LeaseNo,
    /// The session did not have this lease before. A fresh write lease must be made durable; then a fresh
    /// lease is confirmed, or undone.
    pub fresh: bool,
    /// The read lease that this one replaces.
    pub replaces: Option<LeaseNo>,
    /// The session holds the inode only since this decision. Set by whoever keeps the holds.
    pub new_hold: bool,
}

/// A request that has got its leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// The request.
    pub ticket: Ticket,
    /// Its session.
    pub session: SessionId,
    /// In the order of the wants.
    pub leases: Vec<GrantedLease>,
}

/// A lease to be asked back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Revocation {
    /// The holder.
    pub session: SessionId,
    /// Inode.
    pub key: InodeKey,
    /// Number.
    pub lease: LeaseNo,
    /// Mode that the holder may keep.
    pub keep: Option<LeaseMode>,
}

/// Why a request is not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// An inode in it is contended: forward the operation.
    Contended,
    /// No wants, or the same inode twice.
    Malformed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Decided, not durable yet.
    Granting,
    Held {
        since_ms: u64,
    },
    Revoking {
        first_ms: u64,
        last_ms: u64,
        /// The session's [`Work`] at `first_ms`.
        work_ms: u64,
    },
    /// Given back; its log is being digested.
    Releasing,
}

#[derive(Debug, Clone, Copy)]
struct Holder {
    session: SessionId,
    lease: LeaseNo,
    mode: LeaseMode,
    phase: Phase,
    /// The session knows the places of the file's blocks.
    mapped: bool,
    /// Why it is asked back, if not for a waiting request.
    unwanted: Option<Unawaited>,
}

/// Why a lease is asked back that no request waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unawaited {
    /// For want of space.
    Space,
    /// Another session will probably want it next.
    Ahead,
}

/// Leases on one inode: nearly always one, for which nothing is allocated.
type Holders = SmallVec<[Holder; 1]>;
#[derive(Debug)]
struct Waiter {
    session: SessionId,
    since_ms: u64,
    wants: Vec<Want>,
}

/// First number of the daemon's own sessions: one for each forwarded operation.
const INTERNAL: u64 = 1 << 63;

/// All leases and the requests that wait for them.
#[derive(Debug)]
pub struct Table {
    limits: Limits,
    holders: HashMap<InodeKey, Holders>,
    /// Leases by session, oldest first.
    by_session: HashMap<SessionId, BTreeMap<LeaseNo, InodeKey>>,
    /// Write leases of clients, oldest first.
    writes_by_age: BTreeMap<LeaseNo, (SessionId, InodeKey)>,
    waiters: BTreeMap<Ticket, Waiter>,
    /// Requests that wait for an inode, in order.
    queues: HashMap<InodeKey, Vec<Ticket>>,
    contention: Contention,
    next_ticket: u64,
    next_lease: u64,
    next_internal: u64,
    /// Leases that are being asked back.
    asked: BTreeMap<LeaseNo, (SessionId, InodeKey)>,
    /// Inodes with waiting requests, whose leases were confirmed after the last call of
    /// [`with_news`](Self::with_news).
    held_anew: Vec<InodeKey>,
    pub(super) work: Works,
    walks: Walks,
}

impl Table {
    /// Makes an empty table; the first lease has the number `first_lease`.
    #[must_use]
    pub fn new(limits: Limits, first_lease: LeaseNo) -> Self {
        Self {
            limits,
            holders: HashMap::new(),
            by_session: HashMap::new(),
            writes_by_age: BTreeMap::new(),
            waiters: BTreeMap::new(),
            queues: HashMap::new(),
            contention: Contention::default(),
            next_ticket: 1,
            next_lease: first_lease.0.max(1),
            next_internal: INTERNAL,
            asked: BTreeMap::new(),
            held_anew: Vec::new(),
            work: Works::default(),
            walks: Walks::default(),
        }
    }

    /// Returns a session of the daemon's own, for one operation.
    pub fn internal_session(&mut self) -> SessionId {
        self.next_internal += 1;
        SessionId(self.next_internal)
    }

    /// Whether `session` is one of the daemon's own.
    #[must_use]
    pub const fn is_internal(session: SessionId) -> bool {
        session.0 >= INTERNAL
    }

    /// Returns an unused lease number.
    pub fn fresh_lease(&mut self) -> LeaseNo {
        let lease = LeaseNo(self.next_lease);
        self.next_lease += 1;
        lease
    }

    /// Queues a request. Call [`decide`](Self::decide) next.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn request(&mut self, session: SessionId, wants: &[Want], now_ms: u64) -> Result<Ticket, Refusal> {
        let mut keys: Vec<_> = wants.iter().map(|want| want.key).collect();
        keys.sort_unstable();
        keys.dedup();
        if wants.is_empty() || keys.len() != wants.len() {
            return Err(Refusal::Malformed);
        }
        let contended = |want: &Want| {
            want.mode == LeaseMode::Write
                && self.contention.is_contended(want.key, now_ms)
                && !self.settled(session, want)
        };
        if !Self::is_internal(session) && wants.iter().any(contended) {
            return Err(Refusal::Contended);
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        for key in keys {
            self.queues.entry(key).or_default().push(ticket);
        }
        self.waiters.insert(
            ticket,
            Waiter {
                session,
                since_ms: now_ms,
                wants: wants.to_vec(),
            },
        );
        Ok(ticket)
    }

    /// Cancels a request. Leases that [`decide`](Self::decide) gave it meanwhile stay.
    pub fn cancel(&mut self, ticket: Ticket) {
        if let Some(waiter) = self.waiters.remove(&ticket) {
            for want in &waiter.wants {
                self.leave_queue(want.key, ticket);
            }
        }
    }

    fn leave_queue(&mut self, key: InodeKey, ticket: Ticket) {
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.retain(|other| *other != ticket);
            if queue.is_empty() {
                self.queues.remove(&key);
            }
        }
    }

    fn holder(&self, session: SessionId, key: InodeKey) -> Option<&Holder> {
        self.holders
            .get(&key)?
            .iter()
            .find(|holder| holder.session == session)
    }

    fn holder_mut(&mut self, session: SessionId, key: InodeKey) -> Option<&mut Holder> {
        self.holders
            .get_mut(&key)?
            .iter_mut()
            .find(|holder| holder.session == session)
    }

    /// Whether the session has the wanted lease already, and may keep it.
    fn settled(&self, session: SessionId, want: &Want) -> bool {
        self.holder(session, want.key)
            .is_some_and(|holder| holder.mode >= want.mode && matches!(holder.phase, Phase::Held { .. }))
    }

    /// Whether no holder prevents a grant of `want`.
    fn free_for(&self, session: SessionId, want: &Want) -> bool {
        let Some(holders) = self.holders.get(&want.key) else {
            return true;
        };
        holders.iter().all(|holder| {
            if holder.session == session {
                matches!(holder.phase, Phase::Held { .. })
            } else {
                want.mode == LeaseMode::Read && holder.mode == LeaseMode::Read
            }
        })
    }

    fn conflicts(a: LeaseMode, b: LeaseMode) -> bool {
        a == LeaseMode::Write || b == LeaseMode::Write
    }

    /// Whether a grant of `ticket` would overtake an earlier request for one of its inodes.
    fn overtakes(&self, ticket: Ticket, waiter: &Waiter) -> bool {
        waiter.wants.iter().any(|want| {
            // A lease that the session has already overtakes nothing, unless it is an upgrade.
            !self.settled(waiter.session, want)
                && self.queues.get(&want.key).is_some_and(|queue| {
                    queue.iter().take_while(|other| **other < ticket).any(|other| {
                        self.waiters.get(other).is_some_and(|earlier| {
                            earlier.wants.iter().any(|theirs| {
                                theirs.key == want.key && Self::conflicts(theirs.mode, want.mode)
                            })
                        })
                    })
                })
        })
    }

    /// Grants every request that can have all its leases now, earliest first. The leases are taken at once;
    /// each must be [confirmed](Self::confirm) or [undone](Self::undo).
    pub fn decide(&mut self, now_ms: u64) -> Vec<Decision> {
        let mut decisions = Vec::new();
        let tickets: Vec<_> = self.waiters.keys().copied().collect();
        for ticket in tickets {
            let Some(waiter) = self.waiters.get(&ticket) else {
                continue;
            };
            let possible = waiter
                .wants
                .iter()
                .all(|want| self.free_for(waiter.session, want));
            if !possible || self.overtakes(ticket, waiter) {
                continue;
            }
            let Some(waiter) = self.waiters.remove(&ticket) else {
                continue;
            };
            let mut leases = Vec::with_capacity(waiter.wants.len());
            for want in &waiter.wants {
                self.leave_queue(want.key, ticket);
                leases.push(self.take(waiter.session, want, now_ms));
            }
            decisions.push(Decision {
                ticket,
                session: waiter.session,
                leases,
            });
        }
        decisions
    }

    /// Grants a lease that conflicts with no holder and no waiting request; `None` if there is a conflict, or
    /// the session has the lease. Its use is unknown, so it does not count as a hand-over. It must be
    /// [confirmed](Self::confirm) or [undone](Self::undo).
    pub fn take_free(&mut self, session: SessionId, want: &Want, now_ms: u64) -> Option<GrantedLease> {
        // On a contended inode even a reader costs the waiting sessions a turn.
        let contended = self.contention.is_contended(want.key, now_ms);
        let has = self
            .holder(session, want.key)
            .is_some_and(|holder| holder.mode >= want.mode);
        let free = !has && !contended && !self.queues.contains_key(&want.key) && self.free_for(session, want);
        free.then(|| self.grant(session, want))
    }

    fn take(&mut self, session: SessionId, want: &Want, now_ms: u64) -> GrantedLease {
        let granted = self.grant(session, want);
        if granted.fresh && want.mode == LeaseMode::Write && !Self::is_internal(session) {
            self.contention.note_grant(want.key, session, now_ms);
        }
        granted
    }

    fn grant(&mut self, session: SessionId, want: &Want) -> GrantedLease {
        let key = want.key;
        if let Some(holder) = self.holder(session, key)
            && holder.mode >= want.mode
        {
            return GrantedLease {
                key,
                mode: holder.mode,
                lease: holder.lease,
                fresh: false,
                replaces: None,
                new_hold: false,
            };
        }
        let replaces = self.holder(session, key).map(|holder| holder.lease);
        let mapped = self.holder(session, key).is_some_and(|holder| holder.mapped);
        if let Some(old) = replaces {
            self.remove(session, key, old);
        }
        let lease = self.fresh_lease();
        self.insert(session, key, lease, want.mode, Phase::Granting);
        if let Some(holder) = self.holder_mut(session, key) {
            holder.mapped = mapped;
        }
        GrantedLease {
            key,
            mode: want.mode,
            lease,
            fresh: true,
            replaces,
            new_hold: false,
        }
    }

    fn insert(&mut self, session: SessionId, key: InodeKey, lease: LeaseNo, mode: LeaseMode, phase: Phase) {
        let holder = Holder {
            session,
            lease,
            mode,
            phase,
            mapped: false,
            unwanted: None,
        };
        self.holders.entry(key).or_default().push(holder);
        self.by_session.entry(session).or_default().insert(lease, key);
        if mode == LeaseMode::Write && !Self::is_internal(session) {
            self.writes_by_age.insert(lease, (session, key));
        }
    }

    fn remove(&mut self, session: SessionId, key: InodeKey, lease: LeaseNo) {
        if let Some(holders) = self.holders.get_mut(&key) {
            holders.retain(|holder| holder.lease != lease);
            if holders.is_empty() {
                self.holders.remove(&key);
            }
        }
        self.unlist(session, lease);
    }

    /// Removes a lease from all lists except its inode's holders.
    fn unlist(&mut self, session: SessionId, lease: LeaseNo) {
        if let Some(leases) = self.by_session.get_mut(&session) {
            leases.remove(&lease);
            if leases.is_empty() {
                self.by_session.remove(&session);
            }
        }
        self.writes_by_age.remove(&lease);
        self.asked.remove(&lease);
    }

    /// Adds an exclusive lease on an inode that no other session can know yet; held at once.
    pub fn add_new(&mut self, session: SessionId, key: InodeKey, now_ms: u64) -> LeaseNo {
        let lease = self.fresh_lease();
        self.insert(
            session,
            key,
            lease,
            LeaseMode::Write,
            Phase::Held { since_ms: now_ms },
        );
        lease
    }

    /// Marks the fresh leases of a decision as durable: from now on they can be asked back.
    pub fn confirm(&mut self, session: SessionId, leases: &[GrantedLease], now_ms: u64) {
        for granted in leases {
            if let Some(holder) = self.holder_mut(session, granted.key)
                && holder.lease == granted.lease
                && holder.phase == Phase::Granting
            {
                holder.phase = Phase::Held { since_ms: now_ms };
                self.note_held(granted.key);
            }
        }
    }

    fn note_held(&mut self, key: InodeKey) {
        if self.queues.contains_key(&key) {
            self.held_anew.push(key);
        }
    }

    /// Returns the requests to wake because a newly held lease has a time at which it can be asked back
    /// ([`next_event_ms`](Self::next_event_ms)); no other event wakes them. For each inode that is the first
    /// waiting request.
    pub fn with_news(&mut self) -> Vec<Ticket> {
        let keys = std::mem::take(&mut self.held_anew);
        let first = |key| self.queues.get(key)?.first().copied();
        keys.iter().filter_map(first).collect()
    }

    /// Removes the fresh leases of a decision, which could not be made durable; restores the read leases that
    /// they replaced.
    pub fn undo(&mut self, session: SessionId, leases: &[GrantedLease], now_ms: u64) {
        for granted in leases.iter().filter(|granted| granted.fresh) {
            let Some(holder) = self.holder(session, granted.key) else {
                continue;
            };
            if holder.lease != granted.lease {
                continue;
            }
            let mapped = holder.mapped;
            self.remove(session, granted.key, granted.lease);
            if let Some(old) = granted.replaces {
                let phase = Phase::Held { since_ms: now_ms };
                self.insert(session, granted.key, old, LeaseMode::Read, phase);
                self.note_held(granted.key);
                if let Some(holder) = self.holder_mut(session, granted.key) {
                    holder.mapped = mapped;
                }
            }
        }
    }

    /// Begins the release of a lease by its client. Returns its mode, or `None` if the session holds no lease
    /// with this number. No other session gets the inode before [`finish_release`](Self::finish_release).
    pub fn begin_release(&mut self, session: SessionId, key: InodeKey, lease: LeaseNo) -> Option<LeaseMode> {
        let holder = self.holder_mut(session, key)?;
        if holder.lease != lease || matches!(holder.phase, Phase::Granting | Phase::Releasing) {
            return None;
        }
        let mode = holder.mode;
        holder.phase = Phase::Releasing;
        self.asked.remove(&lease);
        Some(mode)
    }

    /// Finishes a release when the log is digested as far as the lease needs it. With `downgrade` a read
    /// lease of the same number stays, unless a request waits to write. Returns whether a lease stayed.
    pub fn finish_release(
        &mut self,
        session: SessionId,
        key: InodeKey,
        lease: LeaseNo,
        downgrade: bool,
        now_ms: u64,
    ) -> bool {
        let writer_waits = self.someone_wants(key, session, LeaseMode::Read);
        let Some(holder) = self.holder_mut(session, key) else {
            return false;
        };
        if holder.lease != lease || holder.phase != Phase::Releasing {
            return false;
        }
        if downgrade && !writer_waits && holder.unwanted.is_none() {
            holder.mode = LeaseMode::Read;
            holder.phase = Phase::Held { since_ms: now_ms };
            self.writes_by_age.remove(&lease);
            self.note_held(key);
            return true;
        }
        self.remove(session, key, lease);
        false
    }

    /// Aborts a release whose digest failed: the lease is held as before, and asked back again.
    pub fn abort_release(&mut self, session: SessionId, key: InodeKey, lease: LeaseNo, now_ms: u64) {
        let work_ms = self.work.ms(session, now_ms);
        if let Some(holder) = self.holder_mut(session, key)
            && holder.lease == lease
            && holder.phase == Phase::Releasing
        {
            holder.phase = Phase::Revoking {
                first_ms: now_ms,
                last_ms: now_ms,
                work_ms,
            };
            self.asked.insert(lease, (session, key));
        }
    }

    /// Whether a request of another session waits for `key` and cannot share it with a lease of mode `with`.
    fn someone_wants(&self, key: InodeKey, session: SessionId, with: LeaseMode) -> bool {
        self.wanted_since(key, session, with).is_some()
    }

    /// Returns the time since when a request of another session waits for `key` and cannot share it with a lease of
    /// mode `with`.
    fn wanted_since(&self, key: InodeKey, session: SessionId, with: LeaseMode) -> Option<u64> {
        let conflict = |want: &Want| want.key == key && Self::conflicts(want.mode, with);
        let waiters = self.queues.get(&key)?.iter();
        waiters
            .filter_map(|ticket| self.waiters.get(ticket))
            .filter(|waiter| waiter.session != session && waiter.wants.iter().any(conflict))
            .map(|waiter| waiter.since_ms)
            .min()
    }

    /// Removes all leases and requests of a session; returns the tickets that will not be decided any more.
    pub fn drop_session(&mut self, session: SessionId) -> Vec<Ticket> {
        let leases = self.by_session.get(&session).cloned().unwrap_or_default();
        for (lease, key) in leases {
            self.remove(session, key, lease);
        }
        self.work.forget(session);
        self.walks.forget(session);
        let tickets: Vec<_> = self
            .waiters
            .iter()
            .filter(|(_, waiter)| waiter.session == session)
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in &tickets {
            self.cancel(*ticket);
        }
        tickets
    }

    /// Removes the leases of an inode that is gone.
    pub fn forget_inode(&mut self, key: InodeKey) {
        for holder in self.holders.remove(&key).unwrap_or_default() {
            self.unlist(holder.session, holder.lease);
        }
        self.contention.forget(key);
    }

    /// Notes that an operation of `session` on `key` was forwarded.
    pub fn note_forwarded(&mut self, key: InodeKey, session: SessionId, now_ms: u64) {
        self.contention.note_forwarded(key, session, now_ms);
    }

    /// Notes that `count` changes of `key` were made under a write lease that `session` gives back.
    pub fn note_changes(&mut self, key: InodeKey, session: SessionId, count: u64) {
        self.contention.note_changes(key, session, count);
    }

    /// Notes that `session` learned the places of the blocks of `key`; `false` if it has no lease.
    pub fn note_mapped(&mut self, session: SessionId, key: InodeKey) -> bool {
        match self.holder_mut(session, key) {
            Some(holder) => {
                holder.mapped = true;
                true
            }
            None => false,
        }
    }

    /// Panics (in tests) if a rule is broken.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for holders in self.holders.values() {
            let writers = holders
                .iter()
                .filter(|holder| holder.mode == LeaseMode::Write)
                .count();
            assert!(
                writers == 0 || holders.len() == 1,
                "a write lease beside another: {holders:?}"
            );
            let mut sessions: Vec<_> = holders.iter().map(|holder| holder.session).collect();
            sessions.sort_unstable();
            sessions.dedup();
            assert_eq!(sessions.len(), holders.len(), "two leases of one session");
        }
        let revoking = self
            .holders
            .values()
            .flatten()
            .filter(|h| matches!(h.phase, Phase::Revoking { .. }))
            .count();
        assert_eq!(revoking, self.asked.len());
        let indexed: usize = self.by_session.values().map(BTreeMap::len).sum();
        assert_eq!(
            indexed,
            self.holders.values().map(|holders| holders.len()).sum::<usize>()
        );
        for (key, queue) in &self.queues {
            assert!(!queue.is_empty() && queue.is_sorted());
            for ticket in queue {
                assert!(self.waiters[ticket].wants.iter().any(|want| want.key == *key));
            }
        }
    }
}
