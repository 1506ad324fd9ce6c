//! Recalls: which leases are asked back, when they are asked again, and which sessions are late. The table
//! decides grants.

use super::{Holder, Phase, Revocation, Table, Unawaited};
use smallvec::SmallVec;
use varve_format::{Ino, InodeKey, LeaseNo, SessionId};
use varve_ipc::{LeaseMode, Want};

/// Most of the daemon's own work, in lease times, that extends a session's deadline: a client that keeps the
/// daemon busy gains no more.
const EXCUSED_LEASES: u64 = 6;
/// Least time for which a lease was held before it is asked back ahead of a want: sessions that walk through the same
/// inodes take them from each other seldom.
const AHEAD_HELD_MS: u64 = 100;
/// Lease times after which a recalled lease is late if no request waits for it.
const UNAWAITED_LEASES: u64 = 8;
/// Leases asked back from a session from which on none is asked back ahead of a walk.
const WALK_ASKED_MOST: usize = 512;

/// A lease that may be asked back: its number, its holder, and what the holder may keep.
type Idle = (LeaseNo, (SessionId, InodeKey), Option<LeaseMode>);

impl Table {
    /// Returns the leases to ask back because requests wait for them; each is asked again after a quarter of
    /// `lease_ms`, in case the first message overtook the grant.
    pub fn revocations(&mut self, now_ms: u64) -> Vec<Revocation> {
        self.give_up_ahead(now_ms);
        let again_ms = self.again_ms();
        let awaited = self
            .queues
            .keys()
            .filter_map(|key| Some((*key, self.holders.get(key)?)));
        let mut due: Vec<_> = awaited
            .flat_map(|(key, holders)| holders.iter().map(move |holder| (key, *holder)))
            .filter(|(key, holder)| {
                matches!(
                    holder.phase,
                    Phase::Held { since_ms } if now_ms >= since_ms + self.hold_ms(*key, holder, now_ms),
                ) && !Self::is_internal(holder.session)
                    && self.someone_wants(*key, holder.session, holder.mode)
            })
            .collect();
        due.extend(self.asked.values().filter_map(|(session, key)| {
            let holder = self.holder(*session, *key)?;
            (matches!(holder.phase, Phase::Revoking { last_ms, .. } if now_ms >= last_ms + again_ms)
                && !self.may_wait_for_ever(*key, holder))
            .then_some((*key, *holder))
        }));
        due.sort_unstable_by_key(|(_, holder)| holder.lease);
        let mut out = Vec::with_capacity(due.len());
        for (key, holder) in due {
            let (first_ms, work_ms) = match holder.phase {
                Phase::Revoking {
                    first_ms, work_ms, ..
                } => (first_ms, work_ms),
                Phase::Granting | Phase::Held { .. } | Phase::Releasing => {
                    (now_ms, self.work.ms(holder.session, now_ms))
                }
            };
            let keep_read = holder.mode == LeaseMode::Write
                && holder.unwanted.is_none()
                && !self.someone_wants(key, holder.session, LeaseMode::Read);
            if matches!(holder.phase, Phase::Held { .. }) {
                for session in self.waiting_clients(key, &holder) {
                    self.walks.note_holder(session, holder.session);
                }
            }
            if let Some(live) = self.holder_mut(holder.session, key) {
                live.phase = Phase::Revoking {
                    first_ms,
                    last_ms: now_ms,
                    work_ms,
                };
            }
            self.asked.insert(holder.lease, (holder.session, key));
            let keep = keep_read.then_some(LeaseMode::Read);
            out.push(Revocation {
                session: holder.session,
                key,
                lease: holder.lease,
                keep,
            });
        }
        out
    }

    /// Returns the least time for which a lease is kept: none beyond the operation that asked for it, if it
    /// is not worth the wait of others.
    fn hold_ms(&self, key: InodeKey, holder: &Holder, now_ms: u64) -> u64 {
        let at_once = match holder.mode {
            LeaseMode::Read => self.contention.is_contended(key, now_ms),
            LeaseMode::Write => self.contention.is_idle(key, holder.session),
        };
        if at_once { 0 } else { self.limits.min_hold_ms }
    }

    fn again_ms(&self) -> u64 {
        (self.limits.lease_ms / 4).max(1)
    }

    /// Asks back the `count` write leases that were granted longest ago, because space for rows runs out.
    pub fn revoke_oldest(&mut self, count: usize, now_ms: u64) -> Vec<Revocation> {
        let oldest: Vec<_> = self
            .writes_by_age
            .iter()
            .map(|(lease, at)| (*lease, *at, None))
            .collect();
        self.revoke_these(oldest, count, Unawaited::Space, now_ms)
    }

    /// Asks back the oldest leases of a session that has more than `most`.
    pub fn revoke_excess(&mut self, session: SessionId, most: usize, now_ms: u64) -> Vec<Revocation> {
        let Some(leases) = self.by_session.get(&session) else {
            return Vec::new();
        };
        let excess = leases.len().saturating_sub(most);
        let oldest: Vec<_> = leases
            .iter()
            .take(excess)
            .map(|(lease, key)| (*lease, (session, *key), None))
            .collect();
        self.revoke_these(oldest, excess, Unawaited::Space, now_ms)
    }

    /// Asks leases back that stand in the way of what a session will probably want next, so that it need not wait
    /// for one after the other. Those that were granted a moment ago stay, and for writing those that several share.
    pub fn revoke_ahead(&mut self, session: SessionId, wants: &[Want], now_ms: u64) -> Vec<Revocation> {
        let idle: Vec<_> = wants
            .iter()
            .filter_map(|want| self.in_the_way(session, want, now_ms))
            .collect();
        let count = idle.len();
        self.revoke_these(idle, count, Unawaited::Ahead, now_ms)
    }

    /// Returns the lease that alone stands in the way of `want`, if it was not granted a moment ago.
    fn in_the_way(&self, session: SessionId, want: &Want, now_ms: u64) -> Option<Idle> {
        if self.contention.is_contended(want.key, now_ms) {
            return None;
        }
        let holders = self.holders.get(&want.key).into_iter().flatten();
        let mut others = holders.filter(|holder| holder.session != session);
        let (Some(holder), None) = (others.next(), others.next()) else {
            return None;
        };
        let held_long =
            matches!(holder.phase, Phase::Held { since_ms } if now_ms >= since_ms + AHEAD_HELD_MS);
        let taken =
            held_long && Self::conflicts(want.mode, holder.mode) && !Self::is_internal(holder.session);
        let keep = Some(want.mode).filter(|mode| *mode == LeaseMode::Read);
        taken.then_some((holder.lease, (holder.session, want.key), keep))
    }

    /// Notes that a request of `session` got its leases after a wait.
    pub fn note_waited(&mut self, session: SessionId, now_ms: u64) {
        self.walks.note_waited(session, now_ms);
    }

    /// Returns how many leases may be asked back ahead for `session`, and the directories that were left last time.
    /// None, if there is no directory to look through: neither these nor one `more`.
    pub fn walk_room(&mut self, session: SessionId, more: bool) -> (usize, Vec<Ino>) {
        match self.walk_most(session) {
            0 => (0, Vec::new()),
            _ => self.walks.room(session, more),
        }
    }

    /// Returns how many more leases of the session that `session` waited for last may be asked back.
    fn walk_most(&self, session: SessionId) -> usize {
        let holder = self.walks.holder(session);
        let asked = self.asked.values().filter(|(whose, _)| Some(*whose) == holder);
        WALK_ASKED_MOST.saturating_sub(asked.count())
    }

    /// Keeps directories to be looked through next time.
    pub fn leave_for_walk(&mut self, session: SessionId, dirs: Vec<Ino>) {
        self.walks.leave(session, dirs);
    }

    /// Asks back up to `room` of the leases that stand in the way of `wants`, as [`revoke_ahead`](Self::revoke_ahead),
    /// if they are of the session that `session` waited for last.
    pub fn revoke_for_walk(
        &mut self,
        session: SessionId,
        wants: &[Want],
        room: usize,
        now_ms: u64,
    ) -> Vec<Revocation> {
        let holder = self.walks.holder(session);
        let room = room.min(self.walk_most(session));
        let idle: Vec<_> = wants
            .iter()
            .filter_map(|want| self.in_the_way(session, want, now_ms))
            .filter(|(_, (whose, _), _)| Some(*whose) == holder)
            .take(room)
            .collect();
        self.revoke_these(idle, room, Unawaited::Ahead, now_ms)
    }

    /// Returns the clients that wait for a lease of `holder`.
    fn waiting_clients(&self, key: InodeKey, holder: &Holder) -> SmallVec<[SessionId; 1]> {
        let conflict = |want: &Want| want.key == key && Self::conflicts(want.mode, holder.mode);
        let waiters = self.queues.get(&key).into_iter().flatten();
        waiters
            .filter_map(|ticket| self.waiters.get(ticket))
            .filter(|waiter| waiter.session != holder.session && !Self::is_internal(waiter.session))
            .filter(|waiter| waiter.wants.iter().any(conflict))
            .map(|waiter| waiter.session)
            .collect()
    }

    /// Lets holders keep what was asked back ahead and nobody has wanted for long: it is looked at in each round.
    fn give_up_ahead(&mut self, now_ms: u64) {
        let long_ms = UNAWAITED_LEASES * self.limits.lease_ms;
        let given_up = |(_, (session, key)): &(&LeaseNo, &(SessionId, InodeKey))| {
            self.holder(*session, *key).is_some_and(|holder| {
                matches!(holder.phase, Phase::Revoking { first_ms, .. } if now_ms >= first_ms + long_ms)
                    && self.may_wait_for_ever(*key, holder)
            })
        };
        let given_up = self.asked.iter().filter(given_up);
        let given_up: Vec<_> = given_up.map(|(lease, at)| (*lease, *at)).collect();
        for (lease, (session, key)) in given_up {
            self.asked.remove(&lease);
            if let Some(holder) = self.holder_mut(session, key)
                && let Phase::Revoking { first_ms, .. } = holder.phase
            {
                holder.phase = Phase::Held { since_ms: first_ms };
                holder.unwanted = None;
            }
        }
    }

    /// Whether a lease that is asked back ahead of a want may stay: nobody has wanted it so far.
    fn may_wait_for_ever(&self, key: InodeKey, holder: &Holder) -> bool {
        holder.unwanted == Some(Unawaited::Ahead) && !self.someone_wants(key, holder.session, holder.mode)
    }

    fn revoke_these(
        &mut self,
        leases: Vec<Idle>,
        count: usize,
        why: Unawaited,
        now_ms: u64,
    ) -> Vec<Revocation> {
        let mut out = Vec::new();
        for (lease, (session, key), keep) in leases {
            if out.len() >= count {
                break;
            }
            let work_ms = self.work.ms(session, now_ms);
            let Some(holder) = self.holder_mut(session, key) else {
                continue;
            };
            if holder.lease == lease && matches!(holder.phase, Phase::Held { .. }) {
                holder.phase = Phase::Revoking {
                    first_ms: now_ms,
                    last_ms: now_ms,
                    work_ms,
                };
                holder.unwanted = Some(why);
                self.asked.insert(lease, (session, key));
                out.push(Revocation {
                    session,
                    key,
                    lease,
                    keep,
                });
            }
        }
        out
    }

    /// Notes that the daemon begins to work for `session`: to carry out a release, or to search for space.
    /// Each call must be [ended](Self::end_work).
    pub fn begin_work(&mut self, session: SessionId, now_ms: u64) {
        self.work.begin(session, now_ms);
    }

    /// Notes that one such piece of work has ended.
    pub fn end_work(&mut self, session: SessionId, now_ms: u64) {
        let over = self.work.end(session, now_ms);
        if over && !self.by_session.contains_key(&session) {
            self.work.forget(session);
        }
    }

    /// Returns the time from which on a lease that was asked back at `first_ms` is late: counted from the first request
    /// that waits for it, where it was asked back before there was one.
    fn late_ms(&self, key: InodeKey, holder: &Holder, first_ms: u64, work_ms: u64, now_ms: u64) -> u64 {
        let lease_ms = self.limits.lease_ms;
        let wanted = self.wanted_since(key, holder.session, holder.mode);
        let from_ms = match (holder.unwanted, wanted) {
            (None, _) => first_ms,
            (Some(_), Some(since_ms)) => first_ms.max(since_ms),
            (Some(Unawaited::Space), None) => return first_ms + UNAWAITED_LEASES * lease_ms,
            (Some(Unawaited::Ahead), None) => return u64::MAX,
        };
        let worked_ms = self.work.ms(holder.session, now_ms).saturating_sub(work_ms);
        from_ms + lease_ms + worked_ms.min(EXCUSED_LEASES * lease_ms)
    }

    /// Returns the sessions that have not given a lease back in time; the time that the daemon itself worked
    /// for them does not count.
    #[must_use]
    pub fn expired(&self, now_ms: u64) -> Vec<SessionId> {
        let late = |(session, key): &&(SessionId, InodeKey)| {
            self.holder(*session, *key).is_some_and(|holder| {
                matches!(holder.phase, Phase::Revoking { first_ms, work_ms, .. }
                    if now_ms >= self.late_ms(*key, holder, first_ms, work_ms, now_ms))
            })
        };
        let mut sessions: Vec<_> = self
            .asked
            .values()
            .filter(late)
            .map(|(session, _)| *session)
            .collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }

    /// Describes the leases that a late session has not given back, for the log.
    #[must_use]
    pub fn late_leases(&self, session: SessionId, now_ms: u64) -> Vec<String> {
        let mine = self.asked.iter().filter(|(_, (whose, _))| *whose == session);
        mine.filter_map(|(lease, (_, key))| {
            let holder = self.holder(session, *key)?;
            let Phase::Revoking { first_ms, .. } = holder.phase else {
                return None;
            };
            let why = match holder.unwanted {
                None => "awaited",
                Some(Unawaited::Space) => "too many",
                Some(Unawaited::Ahead) => "ahead of its turn",
            };
            Some(format!(
                "{lease} of {key}, {:?}, asked for {} ms ago ({why})",
                holder.mode,
                now_ms.saturating_sub(first_ms)
            ))
        })
        .take(8)
        .collect()
    }

    /// Returns the first time after `now_ms` at which [`revocations`](Self::revocations) or
    /// [`expired`](Self::expired) may return something new because of time alone.
    #[must_use]
    pub fn next_event_ms(&self, now_ms: u64) -> Option<u64> {
        let again_ms = self.again_ms();
        let at = |(key, holder): (InodeKey, &Holder)| match holder.phase {
            Phase::Granting | Phase::Releasing => None,
            Phase::Held { since_ms } => Some(since_ms + self.hold_ms(key, holder, now_ms)),
            Phase::Revoking {
                first_ms,
                last_ms,
                work_ms,
            } => {
                let late_ms = self.late_ms(key, holder, first_ms, work_ms, now_ms);
                (!self.may_wait_for_ever(key, holder)).then(|| (last_ms + again_ms).min(late_ms))
            }
        };
        let awaited = self
            .queues
            .keys()
            .filter_map(|key| Some((*key, self.holders.get(key)?)))
            .flat_map(|(key, holders)| holders.iter().map(move |holder| (key, holder)));
        let asked = self
            .asked
            .values()
            .filter_map(|(session, key)| Some((*key, self.holder(*session, *key)?)));
        awaited
            .chain(asked)
            .filter_map(at)
            .filter(|at_ms| *at_ms > now_ms)
            .min()
    }
}
