//! Reservations: space that is promised before anything is logged. Owns granting, the search for space when
//! it is short, and the return of unused reserved blocks. The cost of a log entry is `varve_format::charge`;
//! the client's spending is libfs's (`data/reservations.rs`).
//!
//! # Invariants
//! 1. *Reserved space exists.* The store's reservation is the sum of all sessions' reservations and of those
//!    of operations under way (forwarded ones, moves between tiers), and never more than the free space
//!    beyond the reserve. A session's reservation is at least its unspent blocks, plus the charge of the
//!    undigested entries in its log.
//! 2. *A live session's reservation shrinks only by its own return or by a digest.* A client takes reserved
//!    blocks out of its stock first and then returns them, so it cannot spend them meanwhile. The daemon
//!    never takes any away; a client that does not answer is sealed, and its reservation ends when its log is
//!    digested. A return beyond the reservation has no effect; entries that the client then logs without a
//!    reservation are not covered, as with any client that logs without asking: see 5.
//! 3. *ENOSPC is returned only after an exclusive reclaim pass*: free all orphans, digest all logs, wait for
//!    readers of freed blocks, then recall unused reservations from every session, the caller's included; a
//!    session that does not answer is sealed and digested. Each answer states the number of granted blocks
//!    that the client knew of; a client that did not know of all (an answer was under way) is asked again.
//!    Blocks that calls under way have consumed count as used. ENOSPC is returned without a search to a
//!    session that already has its maximum, and to one that could not search within `wait_ms` and then finds
//!    too little.
//! 4. *One search at a time.* Grants hold `SpaceLimits::turn` shared, a search holds it exclusively, so the
//!    searching session gets the returned blocks. A client's answer does not take `turn`, so a client that
//!    waits for a reservation itself still answers. A search waits for clients at most `lease_ms`, as for
//!    leases, then for the digests of the clients that it has sealed; all clients are asked at once. The
//!    searching session does not become late with its own leases meanwhile.
//! 5. *Unreserved work takes no reserved space.* Log entries beyond their session's reservation are digested
//!    out of unreserved space, or refused (`digest::commit`).

use crate::error::no;
use crate::kernel::{Core, KernelFs, SpaceLimits};
use crate::ops::digest::Digests;
use crate::ops::holds::HeldInodes;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use crate::session::table::Reclaim;
use parking_lot::RwLockWriteGuard;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use varve_format::SessionId;
use varve_ipc::IpcError;
use varve_store::{Store, StoreError};

/// A session that asks for a reservation gets at least this part of it, or its log is digested for more.
const RESERVE_PARTS: u32 = 8;
/// Divisor of the remaining space: a session gets at most this part, unless it needs more, so that the others
/// need not be asked to give it back.
const SHARE: u64 = 4;
/// As `SHARE`, after a digest: larger grants, so that the last blocks do not take a message each.
const SHARE_DIGESTED: u64 = 2;
/// Shortest pause between two checks whether a digest, or other sessions, have given reserved blocks back.
const RESERVE_NAP: Duration = Duration::from_micros(100);
/// Longest pause between two such checks.
const LONG_NAP: Duration = Duration::from_millis(2);
/// Pause between two checks for the end of the grace time.
const GRACE_NAP: Duration = Duration::from_millis(20);

/// Rounds of recalling unused blocks from a session that has its maximum, before it is refused more.
const OWN_ROUNDS: usize = 100;
/// Duration of freeing deleted inodes between two checks for enough space.
const FREE_SLICE_MS: u64 = 100;

/// Space that one operation may take while it is under way.
pub(crate) struct Promised<'k> {
    store: &'k Store,
    space: &'k SpaceLimits,
    blocks: AtomicU64,
}

impl Promised<'_> {
    /// Takes `blocks` of it, which are durably used: they are not reserved any more.
    pub(crate) fn spent(&self, blocks: u64) {
        let less = |has: u64| Some(has.saturating_sub(blocks));
        if let Ok(had) = self
            .blocks
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
        {
            self.store.unreserve(had.min(blocks));
        }
    }

    /// Changes it to `blocks`, after a closer estimate of the operation's needs; `false`: there are too few
    /// now.
    pub(crate) fn fit(&self, blocks: u64) -> bool {
        let has = self.blocks.load(Ordering::Acquire);
        if blocks <= has {
            self.spent(has - blocks);
            return true;
        }
        let more = blocks - has;
        if self.space.promisable(self.store) < more || self.store.reserve(more).is_err() {
            return false;
        }
        self.blocks.fetch_add(more, Ordering::AcqRel);
        true
    }
}

impl Drop for Promised<'_> {
    fn drop(&mut self) {
        self.store.unreserve(self.blocks.load(Ordering::Acquire));
    }
}

/// The daemon waits for space on a session's behalf.
struct Work<'k> {
    core: Core<'k>,
    id: SessionId,
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        let core = self.core;
        core.locked().table.end_work(self.id, core.now_ms());
    }
}

/// Context of reservations.
#[derive(Clone, Copy)]
pub(crate) struct Reservations<'k> {
    core: Core<'k>,
    space: &'k SpaceLimits,
    digests: Digests<'k>,
    held: HeldInodes<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Reservations<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            space: &kernel.space,
            digests: Digests::of(kernel),
            held: HeldInodes::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// `Request::Reserve`.
    pub(crate) fn reserve(&self, session: &Arc<Session>, blocks: u32, least: u32) -> Result<u32, IpcError> {
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.core.check_writable()?;
        if least > blocks || blocks == 0 {
            return Err(no(libc::EINVAL));
        }
        if u64::from(least) > self.core.env.config.credits_max_blocks {
            return Err(no(libc::ENOSPC));
        }
        let granted = match self.grant_beside(session, blocks, least)? {
            Some(granted) => granted,
            None => {
                let _work = self.work_for(session);
                let grant = || self.grant_reservation(session, blocks, least, SHARE_DIGESTED);
                self.has_room_for(session, u64::from(least))?;
                self.find_space(session, u64::from(least), &grant)?
            }
        };
        self.digest_before_reservation_ends(session);
        Ok(granted)
    }

    /// Makes a reservation without asking other sessions; `None`: there are too few blocks, or a search is
    /// under way.
    fn grant_beside(&self, session: &Arc<Session>, blocks: u32, least: u32) -> Result<Option<u32>, IpcError> {
        let grant = |least, share| match self.space.turn.try_read() {
            Some(_beside) => self.grant_reservation(session, blocks, least, share),
            None => Ok(None),
        };
        // Rather some blocks from the digest than the last few blocks, and a message for every few.
        let some = least.max(blocks / RESERVE_PARTS);
        if let Some(granted) = grant(some, SHARE)? {
            return Ok(Some(granted));
        }
        // A digest gives used reserved blocks back, and makes superseded blocks free.
        if !self.await_reservation(session, some) {
            self.digests
                .digest_session(session, None)
                .map_err(|error| self.core.refused(&error))?;
        }
        grant(least, SHARE_DIGESTED)
    }

    /// Reserves `least` to `blocks` blocks, if there are enough; more than `least` only out of a `share`th of
    /// the remaining space.
    fn grant_reservation(
        &self,
        session: &Session,
        blocks: u32,
        least: u32,
        share: u64,
    ) -> Result<Option<u32>, IpcError> {
        let has = session.reserved.load(Ordering::Acquire);
        let most = self.core.env.config.credits_max_blocks.saturating_sub(has);
        let left = self.promisable();
        let most = most.min(left).min((left / share).max(least.into()));
        let mut amount = blocks.min(u32::try_from(most).unwrap_or(u32::MAX));
        while amount >= least.max(1) {
            if self.promise(session, amount.into())? {
                return Ok(Some(amount));
            }
            amount = if amount / 2 < least {
                least.min(amount - 1)
            } else {
                amount / 2
            };
        }
        Ok(None)
    }

    /// Reserves `blocks` for a session, if there are enough.
    fn promise(&self, session: &Session, blocks: u64) -> Result<bool, IpcError> {
        // Under this lock the session cannot end; its end releases the reservation.
        let sessions = self.core.locked();
        if sessions.live(session.id).is_none() {
            return Err(IpcError::Sealed);
        }
        if self.core.store.reserve(blocks).is_err() {
            return Ok(false);
        }
        session.granted.fetch_add(blocks, Ordering::AcqRel);
        session.reserved.fetch_add(blocks, Ordering::AcqRel);
        Ok(true)
    }

    /// Reserves blocks for a forwarded operation of a session, until the returned value is dropped. `needs`
    /// is called at each try: digests on the way may do a part of the operation.
    pub(crate) fn space_for(
        &self,
        session: &Arc<Session>,
        needs: &dyn Fn() -> Result<u64, IpcError>,
    ) -> Result<Promised<'k>, IpcError> {
        let take = || {
            let blocks = needs()?;
            Ok((self.promisable() >= blocks && self.core.store.reserve(blocks).is_ok()).then_some(blocks))
        };
        let beside = match self.space.turn.try_read() {
            Some(_beside) => take()?,
            None => None,
        };
        let blocks = match beside {
            Some(blocks) => blocks,
            None => {
                let _work = self.work_for(session);
                self.find_space(session, needs()?, &take)?
            }
        };
        Ok(Promised {
            store: self.core.store,
            space: self.space,
            blocks: AtomicU64::new(blocks),
        })
    }

    /// As [`SpaceLimits::promisable`].
    fn promisable(&self) -> u64 {
        self.space.promisable(self.core.store)
    }

    /// Returns the blocks that can be reserved for a session when all others give theirs back. Undigested
    /// blocks of the others' logs count as free here, as they do in the number of free blocks.
    pub(crate) fn promisable_to(&self, id: SessionId) -> u64 {
        let mut others = 0;
        for member in self.core.locked().entries.values() {
            if member.session.id != id {
                others += member.session.reserved.load(Ordering::Acquire);
            }
        }
        self.promisable() + others
    }

    /// Excludes the wait for space from the session's lateness: others may ask for its leases meanwhile,
    /// which its waiting call has pinned.
    fn work_for(&self, session: &Session) -> Work<'k> {
        self.core
            .locked()
            .table
            .begin_work(session.id, self.core.now_ms());
        Work {
            core: self.core,
            id: session.id,
        }
    }

    /// Makes the session's reservation fit its bound with `least` more blocks; this does not concern other
    /// sessions.
    fn has_room_for(&self, session: &Arc<Session>, least: u64) -> Result<(), IpcError> {
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(self.core.env.config.wait_ms);
        let bound = self.core.env.config.credits_max_blocks;
        let fits = || session.reserved.load(Ordering::Acquire) + least <= bound;
        // Other threads of the session may keep taking the returned blocks.
        for _ in 0..OWN_ROUNDS {
            if fits() {
                return Ok(());
            }
            if self.core.env.clock.moment() - began >= most {
                break;
            }
            self.digests
                .digest_session(session, None)
                .map_err(|error| self.core.refused(&error))?;
            if !fits() {
                self.reclaim_reservations(Some(session.id), &fits);
            }
        }
        Err(no(libc::ENOSPC))
    }

    /// Reclaims space step by step, until `take` finds some.
    fn find_space<T>(
        &self,
        session: &Arc<Session>,
        least: u64,
        take: &dyn Fn() -> Result<Option<T>, IpcError>,
    ) -> Result<T, IpcError> {
        let own = || self.digests.digest_session(session, None).map(drop);
        let recall = || {
            if self.could_come_back(least) {
                self.reclaim_reservations(None, &|| self.promisable() >= least);
            }
            Ok(())
        };
        if let Some(taken) = self.search(&[&own, &recall], take)? {
            return Ok(taken);
        }
        // Other sessions may go on with smaller requests meanwhile.
        self.await_grace();
        let all = || {
            self.free_until(least);
            self.teardown.finish_sealed();
            // A failure is noted where it occurs, and concerns another session.
            let _ = self.digests.digest_all();
            self.await_freed(least)
        };
        let taken = self.search(&[&all, &recall], take)?;
        taken.ok_or(no(libc::ENOSPC))
    }

    /// Runs these steps, with no grant at the same time, until `take` finds something.
    fn search<T>(
        &self,
        steps: &[&dyn Fn() -> Result<(), StoreError>],
        take: &dyn Fn() -> Result<Option<T>, IpcError>,
    ) -> Result<Option<T>, IpcError> {
        let Some(_alone) = self.one_search() else {
            // The session that searches may need more than this one.
            return take()?.map(Some).ok_or(no(libc::ENOSPC));
        };
        for step in steps {
            if let Some(taken) = take()? {
                return Ok(Some(taken));
            }
            step().map_err(|error| self.core.refused(&error))?;
            self.core.check_writable()?;
        }
        take()
    }

    /// Takes the lock for a search; `None`: not within `wait_ms`.
    fn one_search(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        let wait = Duration::from_millis(self.core.env.config.wait_ms);
        if !self.core.env.clock.takes_turns() {
            return self.space.turn.try_write_for(wait);
        }
        let began = self.core.env.clock.moment();
        loop {
            if let Some(guard) = self.space.turn.try_write() {
                return Some(guard);
            }
            if self.core.env.clock.moment() - began >= wait {
                return None;
            }
            self.core.env.clock.pause(Duration::from_millis(1));
        }
    }

    /// Frees deleted inodes until there is enough space, or none is left.
    fn free_until(&self, least: u64) {
        let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
        while self.promisable() < least
            && self.core.now_ms() < until_ms
            && self.held.free_unheld_for(FREE_SLICE_MS)
        {}
    }

    /// Has sessions (`from`, or all) return their unused blocks, and waits until `enough` or all have
    /// answered.
    fn reclaim_reservations(&self, from: Option<SessionId>, enough: &dyn Fn() -> bool) {
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(2 * self.core.env.config.lease_ms);
        let asked = self.ask_for_reservations(from);
        // A test's clock may stand still.
        while self.core.env.clock.moment() - began < most {
            self.teardown.seal_doomed();
            self.teardown.finish_sealed();
            let under_way = {
                let now_ms = self.core.now_ms();
                let mut sessions = self.core.locked();
                sessions.pump(now_ms);
                !sessions.latched && sessions.reclaims(&asked, now_ms)
            };
            if enough() || !under_way {
                return;
            }
            let passed = self.core.env.clock.moment() - began;
            self.core
                .env
                .clock
                .pause((passed / 8).clamp(RESERVE_NAP, LONG_NAP));
        }
    }

    /// Waits for freed blocks that clients may still read, or that the journal still names, as far as that
    /// helps.
    fn await_freed(&self, least: u64) -> Result<(), StoreError> {
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(2 * self.core.env.config.lease_ms);
        let waiting = || {
            let stats = self.core.store.space();
            stats.tiers.iter().map(|tier| tier.pending).sum::<u64>()
        };
        let helps = |blocks: u64| {
            let left = self.promisable();
            blocks > 0 && left < least && left + self.promised() + blocks >= least
        };
        if !helps(waiting()) {
            return Ok(());
        }
        self.core.store.checkpoint()?;
        // A session that does not forget its old maps in time is sealed. A test's clock may stand still.
        while helps(self.core.store.pending_frees().blocks) && self.core.env.clock.moment() - began < most {
            self.core.locked().pump(self.core.now_ms());
            self.teardown.seal_doomed();
            self.teardown.finish_sealed();
            let passed = self.core.env.clock.moment() - began;
            self.core
                .env
                .clock
                .pause((passed / 8).clamp(RESERVE_NAP, LONG_NAP));
        }
        Ok(())
    }

    /// Returns the blocks reserved for all sessions.
    fn promised(&self) -> u64 {
        let sessions = self.core.locked();
        let each = sessions
            .entries
            .values()
            .map(|member| member.session.reserved.load(Ordering::Acquire));
        each.sum()
    }

    /// Whether there are `least` blocks when all sessions return all theirs.
    fn could_come_back(&self, least: u64) -> bool {
        self.promisable() + self.promised() >= least
    }

    /// Asks sessions that may have some (`from`, or all) for unused reserved blocks; returns the asked ones.
    fn ask_for_reservations(&self, from: Option<SessionId>) -> Vec<SessionId> {
        let until_ms = self.core.now_ms() + self.core.env.config.lease_ms;
        let mut sessions = self.core.locked();
        let entries = sessions.entries.values().map(|member| &member.session);
        let has = entries.filter(|session| {
            from.is_none_or(|id| id == session.id) && session.reserved.load(Ordering::Acquire) > 0
        });
        let asked: Vec<_> = has.map(|session| session.id).collect();
        for id in &asked {
            sessions.reclaim(*id, until_ms);
        }
        asked
    }

    /// `Request::ReturnReservation`.
    pub(crate) fn return_reservation(&self, session: &Session, blocks: u64, of: u64) {
        let mut sessions = self.core.locked();
        self.core.store.unreserve(session.spend(blocks));
        let knows_all = of >= session.granted.load(Ordering::Acquire);
        if let Some(member) = sessions.entries.get_mut(&session.id) {
            member.reclaim = match member.reclaim {
                Reclaim::Requested { until_ms } if !knows_all => Reclaim::Repeat { until_ms },
                Reclaim::Repeat { .. } if !knows_all => member.reclaim,
                Reclaim::None | Reclaim::Requested { .. } | Reclaim::Repeat { .. } => Reclaim::None,
            };
        }
    }

    /// Requests a digest of a session's log that holds more reserved blocks than the session could still get:
    /// else it would write until there are none, and then wait for the whole digest.
    fn digest_before_reservation_ends(&self, session: &Session) {
        let has = session.reserved.load(Ordering::Acquire);
        let left = self.core.env.config.credits_max_blocks.saturating_sub(has);
        if has > left.min(self.core.store.space().available)
            && self.core.lifecycle.background.load(Ordering::Acquire)
        {
            self.core.locked().to_digest.ask(session.id);
            self.core.lifecycle.digest_bell.ring();
        }
    }

    /// Waits for a digest under way to give `least` reserved blocks back, which happens record by record.
    /// `false`: none is under way.
    fn await_reservation(&self, session: &Session, least: u32) -> bool {
        let began = self.core.env.clock.moment();
        while session.reader.try_lock().is_none() {
            let has = session.reserved.load(Ordering::Acquire);
            let left = self.core.env.config.credits_max_blocks.saturating_sub(has);
            if left.min(self.core.store.space().available) >= u64::from(least) {
                return true;
            }
            let passed = self.core.env.clock.moment() - began;
            self.core
                .env
                .clock
                .pause((passed / 8).clamp(RESERVE_NAP, LONG_NAP));
        }
        false
    }

    /// Waits until deleted inodes need not be kept for clients of an earlier daemon: they may fill the whole
    /// pool.
    fn await_grace(&self) {
        // A test's clock may stand still.
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(self.core.env.config.grace_ms);
        while self.core.env.in_grace() && self.core.env.clock.moment() - began < most {
            self.core.env.clock.pause(GRACE_NAP);
        }
    }
}

#[cfg(test)]
mod tests;
