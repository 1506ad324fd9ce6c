//! Grants of leases to clients: waiting, and making grants durable. `release` takes leases back.

use crate::config::Config;
use crate::counters::Counters;
use crate::digest::rights;
use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::leases::{Decision, GrantedLease, Refusal, Ticket};
use crate::ops::digest::Digests;
use crate::ops::record::Records;
use crate::ops::rows::write_rows;
use crate::ops::sharing::Sharing;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use crate::session::table::HOLDS_MAX;
use crate::session::table::{LeaseWaiter, WaitOutcome};
use parking_lot::Condvar;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_format::inode::InodeSlot;
use varve_format::seeded::{Bug, armed};
use varve_format::session::GrantRow;
use varve_format::{Ino, InodeAttr, InodeKey, LogSeq, SessionId};
use varve_ipc::{ClientKind, Grant, ITEMS_MAX, IpcError, LeaseMode, NEAR_MAX, Near, Told, Want};
use varve_store::StoreError;

/// Longest sleep of a waiting thread: a test's clock may have moved without a wake-up.
const NAP_MS: u64 = 20;
/// Factor by which a mount's bound on leases exceeds that of another session.
const MOUNT_LEASES: u32 = 4;
/// Most leases that any session should keep.
const LEASES_MOST: u32 = 1 << 20;
/// Write leases asked back at once when the grant table is full.
const ROWS_WANTED: usize = 64;

/// Context of granting leases.
#[derive(Clone, Copy)]
pub(crate) struct Leasing<'k> {
    core: Core<'k>,
    counters: &'k Counters,
    digests: Digests<'k>,
    sharing: Sharing<'k>,
    teardown: Teardown<'k>,
    pub(super) records: Records<'k>,
}

impl<'k> Leasing<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            counters: &kernel.counters,
            digests: Digests::of(kernel),
            sharing: Sharing::of(kernel),
            teardown: Teardown::of(kernel),
            records: Records::of(kernel),
        }
    }

    /// `Request::Acquire`.
    pub(crate) fn acquire(&self, session: &Arc<Session>, wants: &[Want]) -> Result<Vec<Grant>, IpcError> {
        if wants.len() > ITEMS_MAX {
            return Err(no(libc::E2BIG));
        }
        let writes = wants.iter().any(|want| want.mode == LeaseMode::Write);
        if writes && session.read_only {
            return Err(no(libc::EROFS));
        }
        for want in wants {
            if !session.knows(want.key) {
                return Err(no(libc::ESTALE));
            }
            self.attr_of(session, want.key)?;
        }
        if writes {
            self.core.check_writable()?;
            self.records.make(session)?;
        }
        self.make_room(session);
        let until_ms = self.core.now_ms() + self.core.env.config.wait_ms;
        loop {
            let decision = self.obtain(session.id, wants, until_ms)?;
            if writes && let Err(error) = self.await_cached_replies(session, &decision) {
                self.undo(session, &decision);
                return Err(error);
            }
            match self.make_durable(session, &decision) {
                Ok(grants) => return Ok(grants),
                Err(StoreError::TableFull(_)) if self.core.now_ms() < until_ms => self.await_rows(until_ms),
                Err(error) => return Err(self.core.refused(&error)),
            }
        }
    }

    /// `Request::AcquireNear`.
    pub(crate) fn acquire_near(
        &self,
        session: &Arc<Session>,
        wants: &[Want],
        near: Near,
    ) -> Result<Vec<Grant>, IpcError> {
        if near.count > NEAR_MAX || near.these.len() > usize::from(NEAR_MAX) {
            return Err(no(libc::E2BIG));
        }
        let mut grants = self.acquire(session, wants)?;
        grants.extend(self.neighbours(session, &near));
        self.recall_ahead(session, wants, &grants);
        Ok(grants)
    }

    /// Grants leases on inodes that a session may want next, if they are free at once.
    fn neighbours(&self, session: &Arc<Session>, near: &Near) -> Vec<Grant> {
        let mode = near.mode;
        if mode == LeaseMode::Write && (session.read_only || self.core.check_writable().is_err()) {
            return Vec::new();
        }
        let first = near.after.0.saturating_add(1);
        let last = near.after.0.saturating_add(u64::from(near.count));
        let slots = (first..=last).map_while(|ino| self.core.store.slot(Ino(ino)).ok());
        let next = slots.filter_map(|slot| match slot {
            InodeSlot::Used(inode) => Some(inode.attr),
            InodeSlot::Free(_) | InodeSlot::Reserved(_) => None,
        });
        let named = near.these.iter().filter(|key| session.knows(**key));
        let named = named.filter_map(|key| self.core.store.get_key(*key).ok().map(|inode| inode.attr));
        let there = named.chain(next);
        // A directory is left to the session that changes it: granting its lease would take away the other
        // sessions' leases on its names.
        let wants: Vec<_> = there
            .filter(|attr| attr.nlink > 0 && (mode == LeaseMode::Read || !attr.is_dir()))
            .filter(|attr| session.knows(attr.key))
            .map(|attr| Want { key: attr.key, mode })
            .collect();
        let is_named = |want: &&Want| near.these.contains(&want.key);
        let named: Vec<_> = wants.iter().filter(is_named).copied().collect();
        let decision = {
            let now_ms = self.core.now_ms();
            let mut sessions = self.core.locked();
            if sessions.live(session.id).is_none()
                || sessions.holds.count(session.id) + wants.len() > HOLDS_MAX
            {
                return Vec::new();
            }
            // What would have to wait is left out.
            let now = self.core.env.tick_moment();
            let (id, continues) = (session.id, session.predecessor);
            let take = |want: &Want| {
                let waits =
                    mode == LeaseMode::Write && sessions.cached.until(id, continues, [want.key]) > now;
                let table = &mut sessions.table;
                (!waits).then(|| table.take_free(id, want, now_ms)).flatten()
            };
            let mut leases: Vec<_> = wants.iter().filter_map(take).collect();
            sessions.hold_granted(session.id, &mut leases);
            // What others have comes with one of the next requests.
            let revocations = sessions.table.revoke_ahead(session.id, &named, now_ms);
            sessions.send_revocations(&revocations);
            Decision {
                ticket: Ticket(0),
                session: session.id,
                leases,
            }
        };
        if decision.leases.is_empty() {
            return Vec::new();
        }
        let may_write = || {
            let recorded = self.records.make(session);
            recorded.and_then(|()| self.await_cached_replies(session, &decision))
        };
        if mode == LeaseMode::Write && may_write().is_err() {
            self.undo(session, &decision);
            return Vec::new();
        }
        // If an inode is gone by now, or the table of rows is full, nothing is granted.
        self.make_durable(session, &decision).unwrap_or_default()
    }

    /// Asks old leases back from a session that has far too many: a client keeps the limit by itself, but
    /// counts neither spare numbers nor deleted files that are not digested yet.
    pub(super) fn make_room(&self, session: &Session) {
        let mut sessions = self.core.locked();
        let most = 4 * leases_max(&self.core.env.config, session) as usize;
        let revocations = sessions.table.revoke_excess(session.id, most, self.core.now_ms());
        sessions.send_revocations(&revocations);
    }

    /// Waits for leases; all or nothing. They are decided, not durable.
    pub(crate) fn obtain(
        &self,
        owner: SessionId,
        wants: &[Want],
        until_ms: u64,
    ) -> Result<Decision, IpcError> {
        let woken = Arc::new(Condvar::new());
        let mut sessions = self.core.locked();
        let internal = crate::leases::Table::is_internal(owner);
        if !internal && sessions.live(owner).is_none() {
            return Err(IpcError::Sealed);
        }
        if sessions.holds.count(owner) + wants.len() > HOLDS_MAX {
            return Err(no(libc::EMFILE));
        }
        let ticket =
            sessions
                .table
                .request(owner, wants, self.core.now_ms())
                .map_err(|refusal| match refusal {
                    Refusal::Contended => IpcError::Forward,
                    Refusal::Malformed => no(libc::EINVAL),
                })?;
        sessions.waiters.insert(
            ticket,
            LeaseWaiter {
                woken: Arc::clone(&woken),
                verdict: None,
            },
        );
        let mut waited = false;
        loop {
            let now_ms = self.core.now_ms();
            sessions.pump(now_ms);
            if let Some(verdict) = sessions
                .waiters
                .get_mut(&ticket)
                .and_then(|seat| seat.verdict.take())
            {
                sessions.waiters.remove(&ticket);
                if !matches!(verdict, WaitOutcome::Granted(_)) {
                    sessions.table.cancel(ticket);
                }
                Counters::bump(&self.counters.grants);
                self.counters
                    .waits
                    .fetch_add(u64::from(waited), Ordering::Relaxed);
                if waited {
                    sessions.table.note_waited(owner, now_ms);
                }
                return match verdict {
                    WaitOutcome::Granted(decision) => Ok(decision),
                    WaitOutcome::Over => Err(IpcError::Sealed),
                    WaitOutcome::Latched => Err(no(libc::EIO)),
                };
            }
            let stopping = self.core.lifecycle.stopping.load(Ordering::Acquire);
            if now_ms >= until_ms || stopping {
                self.give_up(&mut sessions, ticket);
                return Err(if stopping {
                    IpcError::Gone("the daemon is stopping".into())
                } else {
                    no(libc::ETIMEDOUT)
                });
            }
            if !sessions.doomed.is_empty() {
                drop(sessions);
                self.teardown.seal_doomed();
                sessions = self.core.locked();
                continue;
            }
            waited = true;
            let next_ms = sessions
                .table
                .next_event_ms(now_ms)
                .unwrap_or(until_ms)
                .min(until_ms);
            let nap_ms = next_ms.saturating_sub(now_ms).clamp(1, NAP_MS);
            self.core
                .nap(&woken, &mut sessions, Duration::from_millis(nap_ms));
        }
    }

    fn give_up(&self, sessions: &mut crate::session::table::SessionTable, ticket: Ticket) {
        sessions.table.cancel(ticket);
        sessions.waiters.remove(&ticket);
        sessions.pump(self.core.now_ms());
    }

    /// Waits until no kernel above another mount has cached replies about what a decision allows to change.
    fn await_cached_replies(&self, session: &Session, decision: &Decision) -> Result<(), IpcError> {
        let leases = decision.leases.iter();
        let writes = leases.filter(|lease| lease.mode == LeaseMode::Write);
        self.sharing
            .await_cached_replies(session, writes.map(|lease| lease.key))
    }

    /// Takes a decision back.
    fn undo(&self, session: &Session, decision: &Decision) {
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        sessions.undo_granted(session.id, &decision.leases, now_ms);
        sessions.pump(now_ms);
    }

    /// Writes the rows of a decision, then puts them into effect.
    fn make_durable(&self, session: &Arc<Session>, decision: &Decision) -> Result<Vec<Grant>, StoreError> {
        let written = self.write_grants(session, decision);
        self.settle_grants(session, decision, written)
    }

    /// Puts the rows of a decision, which are on media, into effect, if the session still exists.
    fn settle_grants(
        &self,
        session: &Session,
        decision: &Decision,
        written: Result<(Vec<Grant>, Vec<GrantRow>), StoreError>,
    ) -> Result<Vec<Grant>, StoreError> {
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        match written {
            Ok((_, rows)) if !sessions.entries.contains_key(&session.id) => {
                // Sealed and ended meanwhile: no other code would remove the rows.
                drop(sessions);
                let leases = rows.iter().map(|row| RowChange::Remove(row.lease));
                write_rows(self.core, &leases.collect::<Vec<_>>())?;
                Err(StoreError::NoSession(session.id))
            }
            Ok((grants, rows)) => {
                sessions.table.confirm(session.id, &decision.leases, now_ms);
                rows.into_iter().for_each(|row| sessions.rows.insert(row));
                sessions.pump(now_ms);
                Ok(grants)
            }
            Err(error) => {
                sessions.undo_granted(session.id, &decision.leases, now_ms);
                sessions.pump(now_ms);
                Err(error)
            }
        }
    }

    fn write_grants(
        &self,
        session: &Arc<Session>,
        decision: &Decision,
    ) -> Result<(Vec<Grant>, Vec<GrantRow>), StoreError> {
        let mut grants = Vec::with_capacity(decision.leases.len());
        let mut rows = Vec::new();
        let first_seq = varve_ipc::SessionPage::digested(&*session.page).next();
        for granted in &decision.leases {
            let attr = self
                .attr_of(session, granted.key)
                .map_err(|_| StoreError::NoInode(granted.key))?;
            // Remembers the rights for as long as the session has the lease or, after that, the file open.
            session.rights(&attr);
            if granted.fresh && granted.mode == LeaseMode::Write {
                rows.push(grant_row(session, granted, &attr, first_seq));
            }
            grants.push(Grant {
                lease: granted.lease,
                mode: granted.mode,
                replaces: granted.replaces,
                attr,
                told: Told::default(),
            });
        }
        if !rows.is_empty() && !armed(Bug::GrantNotDurable) {
            let mut tx = self.core.store.begin()?;
            for row in &rows {
                tx.grant_put(row)?;
            }
            tx.commit()?;
        }
        Ok((grants, rows))
    }

    pub(crate) fn get_attr(&self, session: &Arc<Session>, key: InodeKey) -> Result<InodeAttr, IpcError> {
        if !session.knows(key) {
            return Err(no(libc::ESTALE));
        }
        self.attr_of(session, key)
    }

    /// Returns attributes as digested. If this session has made the inode and it is not digested yet, digests
    /// the log first.
    pub(crate) fn attr_of(&self, session: &Arc<Session>, key: InodeKey) -> Result<InodeAttr, IpcError> {
        match self.core.store.get_key(key) {
            Ok(inode) => Ok(inode.attr),
            Err(StoreError::NoInode(_)) if self.core.locked().table.mode(session.id, key).is_some() => {
                self.digests
                    .digest_session(session, None)
                    .map_err(|error| self.core.refused(&error))?;
                self.core
                    .store
                    .get_key(key)
                    .map(|inode| inode.attr)
                    .map_err(|error| self.core.refused(&error))
            }
            Err(error) => Err(self.core.refused(&error)),
        }
    }

    /// Asks old leases back because the grant table is full, and waits until some are.
    pub(super) fn await_rows(&self, until_ms: u64) {
        let mut sessions = self.core.locked();
        let now_ms = self.core.now_ms();
        let rows = sessions.rows.len();
        let revocations = sessions.table.revoke_oldest(ROWS_WANTED, now_ms);
        sessions.send_revocations(&revocations);
        let give_up_ms = until_ms.min(now_ms + 2 * self.core.env.config.lease_ms);
        while sessions.rows.len() >= rows && self.core.now_ms() < give_up_ms && !sessions.latched {
            drop(sessions);
            self.teardown.seal_doomed();
            self.core.env.clock.pause(Duration::from_millis(1));
            sessions = self.core.locked();
            let now_ms = self.core.now_ms();
            sessions.pump(now_ms);
        }
    }
}

/// Returns the most leases that a session should keep. A mount of root's or the pool's owner serves all
/// programs.
pub(crate) fn leases_max(config: &Config, session: &Session) -> u32 {
    if session.kind == ClientKind::Shim && session.privileged {
        config.leases_max.saturating_mul(MOUNT_LEASES).min(LEASES_MOST)
    } else {
        config.leases_max
    }
}

/// Makes the row of a grant: full rights for privileged sessions, else the present rights of its user on the
/// inode. A row without any right still lets the session add and remove names of the inode.
fn grant_row(session: &Session, granted: &GrantedLease, attr: &InodeAttr, first_seq: LogSeq) -> GrantRow {
    let mut bits = 0;
    if session.privileged || session.cred.uid == attr.uid {
        bits |= rights::OWN;
    }
    // A file that was opened for writing stays writable; rights on directories are checked anew each time.
    let writes = match attr.is_dir() {
        true => session.may(attr, 3),
        false => session.rights(attr) & 2 != 0,
    };
    if writes {
        bits |= rights::WRITE;
    }
    GrantRow {
        session: session.id,
        lease: granted.lease,
        key: granted.key,
        rights: bits,
        first_seq,
        last_seq: None,
        batch: 0,
    }
}

#[cfg(test)]
mod races;
mod walk;
