//! Reservations: space that is promised before anything is logged. Owns granting, the search for space when
//! it is short, and how unused reserved blocks come back. What a log entry costs is `varve_format::charge`;
//! how a client spends is libfs's (`data/reservations.rs`).
//!
//! # Invariants
//! 1. *What is promised is there.* The store's reservation is the sum of all that sessions have reserved and
//!    of what operations under way hold (forwarded ones, moves between tiers), and never more than what is
//!    free beyond the reserve. A session's word is at least what it has left, plus the charge of what is in
//!    its log and not digested.
//! 2. *A live session's word goes down by its own say or by a digest alone.* A client takes reserved blocks
//!    out of its stock first and then says so: what it spends meanwhile is not among them. The daemon never
//!    takes any away; a client that does not answer is sealed, and its word goes when its log is digested.
//!    What one claims beyond its word does nothing; what it then logs without a reservation is not covered,
//!    as with any client that logs without asking: see 5.
//! 3. *ENOSPC is returned only after an exclusive reclaim pass*: free all orphans, digest all logs, wait for
//!    readers of freed blocks, then recall unused reservations from every session, the own included; one that
//!    does not answer is sealed and digested. Each answer says of how many blocks the client knew that were
//!    granted to it; one that did not know of all (an answer was under way) is asked again. What calls under
//!    way have consumed is used. Without a search it is told to a session that already has all that it may
//!    have, and to one that could not search within `wait_ms` and then finds too little.
//! 4. *One search at a time.* Grants hold `SpaceLimits::turn` shared, a search holds it alone: what comes
//!    back goes to whom it came back for. A client's answer takes no turn, so one that waits for a
//!    reservation itself answers all the same. A search waits for clients at most `lease_ms`, as for leases,
//!    then for the digests of those that it has sealed; all clients are asked at once. Who waits is not late
//!    with its own leases meanwhile.
//! 5. *Unpaid work takes nothing that is promised.* What a log holds beyond its session's word is digested
//!    out of space that nobody was promised, or refused (`digest::commit`).

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

/// A session that asks for a reservation is given this part of them at least, before its log is digested for
/// more.
const RESERVE_PARTS: u32 = 8;
/// At most this part of what is left goes to who asks, unless it needs more: the others need not be asked to
/// give it back then.
const SHARE: u64 = 4;
/// The same after a digest: rather more than one for each of the last few.
const SHARE_DIGESTED: u64 = 2;
/// How often it is looked whether a digest, or others, have given reserved blocks back.
const RESERVE_NAP: Duration = Duration::from_micros(100);
/// The same when it takes long.
const LONG_NAP: Duration = Duration::from_millis(2);
/// The same for what is kept until the grace time is over.
const GRACE_NAP: Duration = Duration::from_millis(20);

/// How often a session that has all that it may have gives back what it does not use before it is refused
/// more.
const OWN_ROUNDS: usize = 100;
/// How long what is deleted is freed before it is looked whether that is enough.
const FREE_SLICE_MS: u64 = 100;

/// Space that one operation may take while it is under way.
pub(crate) struct Promised<'k> {
    store: &'k Store,
    space: &'k SpaceLimits,
    blocks: AtomicU64,
}

impl Promised<'_> {
    /// So many blocks of it were taken, durably: they are not promised beside that.
    pub(crate) fn spent(&self, blocks: u64) {
        let less = |has: u64| Some(has.saturating_sub(blocks));
        if let Ok(had) = self
            .blocks
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, less)
        {
            self.store.unreserve(had.min(blocks));
        }
    }

    /// Makes it `blocks`, after a better look at what the operation needs; `false`: there are too few now.
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

/// What promising space takes.
#[derive(Clone, Copy)]
pub(crate) struct Reservations<'k> {
    core: Core<'k>,
    space: &'k SpaceLimits,
    digests: Digests<'k>,
    held: HeldInodes<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Reservations<'k> {
    /// Out of the daemon's nouns.
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

    /// A reservation without asking others; `None`: there are too few, or somebody looks for some.
    fn grant_beside(&self, session: &Arc<Session>, blocks: u32, least: u32) -> Result<Option<u32>, IpcError> {
        let grant = |least, share| match self.space.turn.try_read() {
            Some(_beside) => self.grant_reservation(session, blocks, least, share),
            None => Ok(None),
        };
        // Rather some from the digest than the last few, and the next message for the next few.
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

    /// `least` to `blocks` blocks are reserved, if there are so many, and more than `least` only out of a
    /// `share`th of what is left.
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

    /// Promises `blocks` to a session, if there are so many.
    fn promise(&self, session: &Session, blocks: u64) -> Result<bool, IpcError> {
        // Under this lock it is known to end later, and then what it has goes with it.
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

    /// Blocks for an operation that the daemon does for a session itself, until the answer is dropped. What
    /// it `needs` is asked at each try: digests on the way may do a part of it.
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

    /// Blocks that can be promised to a session when all others give back what they have. What these have
    /// logged and is not digested counts as free here, as it does in the number of free blocks.
    pub(crate) fn promisable_to(&self, id: SessionId) -> u64 {
        let mut others = 0;
        for member in self.core.locked().entries.values() {
            if member.session.id != id {
                others += member.session.reserved.load(Ordering::Acquire);
            }
        }
        self.promisable() + others
    }

    /// What it waits for here is no lateness of its own: others may ask for its leases meanwhile, which a
    /// call of it has pinned.
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

    /// Has the session use less than its bound by `least`: if it does not, nobody else has to do with that.
    fn has_room_for(&self, session: &Arc<Session>, least: u64) -> Result<(), IpcError> {
        let began = self.core.env.clock.moment();
        let most = Duration::from_millis(self.core.env.config.wait_ms);
        let bound = self.core.env.config.credits_max_blocks;
        let fits = || session.reserved.load(Ordering::Acquire) + least <= bound;
        // Its other threads may go on taking what comes back.
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

    /// Space is short: has come back what can, step by step, until `take` finds some.
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
        // Others may be content with less meanwhile.
        self.await_grace();
        let all = || {
            self.free_until(least);
            self.teardown.finish_sealed();
            // What fails is noted where it does, and is another session's.
            let _ = self.digests.digest_all();
            self.await_freed(least)
        };
        let taken = self.search(&[&all, &recall], take)?;
        taken.ok_or(no(libc::ENOSPC))
    }

    /// Does these steps, with no grant beside them, until `take` finds something.
    fn search<T>(
        &self,
        steps: &[&dyn Fn() -> Result<(), StoreError>],
        take: &dyn Fn() -> Result<Option<T>, IpcError>,
    ) -> Result<Option<T>, IpcError> {
        let Some(_alone) = self.one_search() else {
            // Who searches asks for more, perhaps.
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

    /// The right to look for space; `None`: not within `wait_ms`.
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

    /// Frees what is deleted until that is enough, or there is no more.
    fn free_until(&self, least: u64) {
        let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
        while self.promisable() < least
            && self.core.now_ms() < until_ms
            && self.held.free_unheld_for(FREE_SLICE_MS)
        {}
    }

    /// Has sessions (this one, or all) give back what they do not use, and waits until it is `enough` or all
    /// have answered.
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

    /// Waits for blocks that are freed and that clients may still read, or that the journal still names, as
    /// far as that helps.
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
        // Who does not forget what it has read in time is sealed. A test's clock may stand still.
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

    /// Blocks that all sessions have.
    fn promised(&self) -> u64 {
        let sessions = self.core.locked();
        let each = sessions
            .entries
            .values()
            .map(|member| member.session.reserved.load(Ordering::Acquire));
        each.sum()
    }

    /// Whether there are so many when all sessions give back all that they have.
    fn could_come_back(&self, least: u64) -> bool {
        self.promisable() + self.promised() >= least
    }

    /// Asks sessions that may have some (this one, or all) for unused reserved blocks; which.
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

    /// Has a session's log digested that holds more reserved blocks than it could still get: else it would
    /// write until there are none, and then wait until all of that is digested.
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

    /// Waits for a digest that is under way to give `least` reserved blocks back: it does so record by
    /// record. `false`: none is under way.
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

    /// Waits until what is deleted need not be kept for clients of an earlier daemon: it may be all that
    /// fills the pool.
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
