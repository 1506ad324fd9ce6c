//! Leases as clients ask for them: waiting, making grants durable, giving back.

use crate::config::Config;
use crate::counters::Counters;
use crate::digest::rights;
use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::leases::{Decision, GrantedLease, Refusal, Ticket};
use crate::ops::digest::Digests;
use crate::ops::holds::HeldInodes;
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
use varve_format::{Ino, InodeAttr, InodeKey, LeaseNo, LogSeq, SessionId};
use varve_ipc::{
    ClientKind, Grant, ITEMS_MAX, IpcError, LeaseMode, NEAR_MAX, NUMBERS_MAX, Near, RELEASED_MAX,
    ReleaseItem, SYNC_RANGES_MAX, Want,
};
use varve_store::{OP_ROOM, StoreError, Tx};

/// Longest sleep of a waiting thread: a test's clock may have moved without a wake-up.
const NAP_MS: u64 = 20;
/// Numbers under one row.
const BATCH_MAX: u16 = 16;
/// So many times the leases of another session are a mount's.
const MOUNT_LEASES: u32 = 4;
/// Most leases that any session should keep.
const LEASES_MOST: u32 = 1 << 20;
/// Write leases asked back at once when the grant table is full.
const ROWS_WANTED: usize = 64;

impl KernelFs {
    /// `Request::Acquire`.
    pub(crate) fn acquire(&self, session: &Arc<Session>, wants: &[Want]) -> Result<Vec<Grant>, IpcError> {
        if wants.len() > ITEMS_MAX {
            return Err(no(libc::E2BIG));
        }
        let writes = wants.iter().any(|want| want.mode == LeaseMode::Write);
        if writes && session.read_only {
            return Err(no(libc::EROFS));
        }
        if writes {
            self.check_writable()?;
            Sharing::of(self).admit_changes(session)?;
        }
        for want in wants {
            if !session.knows(want.key) {
                return Err(no(libc::ESTALE));
            }
            self.attr_of(session, want.key)?;
        }
        self.make_room(session);
        let until_ms = self.now_ms() + self.env.config.wait_ms;
        loop {
            let decision = self.obtain(session.id, wants, until_ms)?;
            match self.make_durable(session, &decision) {
                Ok(grants) => return Ok(grants),
                Err(StoreError::TableFull(_)) if self.now_ms() < until_ms => self.await_rows(until_ms),
                Err(error) => return Err(self.refused(&error)),
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
        if near.mode == LeaseMode::Write && !session.read_only {
            Sharing::of(self).admit_changes(session)?;
        }
        let mut grants = self.acquire(session, wants)?;
        grants.extend(self.neighbours(session, &near));
        Ok(grants)
    }

    /// Leases on inodes that a session may want next, as far as they are to be had at once and for nothing.
    fn neighbours(&self, session: &Arc<Session>, near: &Near) -> Vec<Grant> {
        let mode = near.mode;
        if mode == LeaseMode::Write && (session.read_only || self.check_writable().is_err()) {
            return Vec::new();
        }
        let first = near.after.0.saturating_add(1);
        let last = near.after.0.saturating_add(u64::from(near.count));
        let slots = (first..=last).map_while(|ino| self.store.slot(Ino(ino)).ok());
        let next = slots.filter_map(|slot| match slot {
            InodeSlot::Used(inode) => Some(inode.attr),
            InodeSlot::Free(_) | InodeSlot::Reserved(_) => None,
        });
        let named = near.these.iter().filter(|key| session.knows(**key));
        let named = named.filter_map(|key| self.store.get_key(*key).ok().map(|inode| inode.attr));
        let there = named.chain(next);
        // A directory that is to be changed is asked for by who changes it: with its lease goes what others
        // know of its names.
        let wants: Vec<_> = there
            .filter(|attr| attr.nlink > 0 && (mode == LeaseMode::Read || !attr.is_dir()))
            .filter(|attr| session.knows(attr.key))
            .map(|attr| Want { key: attr.key, mode })
            .collect();
        let decision = {
            let now_ms = self.now_ms();
            let mut sessions = self.locked();
            if sessions.live(session.id).is_none()
                || sessions.holds.count(session.id) + wants.len() > HOLDS_MAX
            {
                return Vec::new();
            }
            let leases: Vec<_> = wants
                .iter()
                .filter_map(|want| sessions.table.take_free(session.id, want, now_ms))
                .collect();
            for granted in &leases {
                sessions.holds.add(session.id, granted.key);
            }
            Decision {
                ticket: Ticket(0),
                session: session.id,
                leases,
            }
        };
        if decision.leases.is_empty() {
            return Vec::new();
        }
        // One that is gone by now, or a full table of rows: there are none, then.
        self.make_durable(session, &decision).unwrap_or_default()
    }

    /// Asks old leases of a session back that has far too many: a client keeps the limit by itself, but
    /// counts neither spare numbers nor files that are deleted and not digested yet.
    fn make_room(&self, session: &Session) {
        let mut sessions = self.locked();
        let most = 4 * leases_max(&self.env.config, session) as usize;
        let revocations = sessions.table.revoke_excess(session.id, most, self.now_ms());
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
        let mut sessions = self.locked();
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
                .request(owner, wants, self.now_ms())
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
            let now_ms = self.now_ms();
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
                return match verdict {
                    WaitOutcome::Granted(decision) => Ok(decision),
                    WaitOutcome::Over => Err(IpcError::Sealed),
                    WaitOutcome::Latched => Err(no(libc::EIO)),
                };
            }
            let stopping = self.lifecycle.stopping.load(Ordering::Acquire);
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
                Teardown::of(self).seal_doomed();
                sessions = self.locked();
                continue;
            }
            waited = true;
            let next_ms = sessions
                .table
                .next_event_ms(now_ms)
                .unwrap_or(until_ms)
                .min(until_ms);
            let nap_ms = next_ms.saturating_sub(now_ms).clamp(1, NAP_MS);
            self.nap(&woken, &mut sessions, Duration::from_millis(nap_ms));
        }
    }

    fn give_up(&self, sessions: &mut crate::session::table::SessionTable, ticket: Ticket) {
        sessions.table.cancel(ticket);
        sessions.waiters.remove(&ticket);
        sessions.pump(self.now_ms());
    }

    /// Writes the rows of a decision, then lets it count.
    fn make_durable(&self, session: &Arc<Session>, decision: &Decision) -> Result<Vec<Grant>, StoreError> {
        let written = self.write_grants(session, decision);
        self.settle_grants(session, decision, written)
    }

    /// Lets the rows of a decision count that are on media, if the session is still there.
    fn settle_grants(
        &self,
        session: &Session,
        decision: &Decision,
        written: Result<(Vec<Grant>, Vec<GrantRow>), StoreError>,
    ) -> Result<Vec<Grant>, StoreError> {
        let now_ms = self.now_ms();
        let mut sessions = self.locked();
        match written {
            Ok((_, rows)) if !sessions.entries.contains_key(&session.id) => {
                // Sealed and ended meanwhile: nobody else would remove them.
                drop(sessions);
                let leases = rows.iter().map(|row| RowChange::Remove(row.lease));
                write_rows(Core::of(self), &leases.collect::<Vec<_>>())?;
                Err(StoreError::NoSession(session.id))
            }
            Ok((grants, rows)) => {
                sessions.table.confirm(session.id, &decision.leases, now_ms);
                rows.into_iter().for_each(|row| sessions.rows.insert(row));
                sessions.pump(now_ms);
                Ok(grants)
            }
            Err(error) => {
                sessions.table.undo(session.id, &decision.leases, now_ms);
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
            // While it has the lease, and the file open after that, it keeps the rights of now.
            session.rights(&attr);
            if granted.fresh && granted.mode == LeaseMode::Write {
                rows.push(grant_row(session, granted, &attr, first_seq));
            }
            grants.push(Grant {
                lease: granted.lease,
                mode: granted.mode,
                replaces: granted.replaces,
                attr,
            });
        }
        if !rows.is_empty() && !armed(Bug::GrantNotDurable) {
            let mut tx = self.store.begin()?;
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

    /// Attributes as digested. Of an inode that this session has made and that is not digested yet, after a
    /// digest.
    pub(crate) fn attr_of(&self, session: &Arc<Session>, key: InodeKey) -> Result<InodeAttr, IpcError> {
        match self.store.get_key(key) {
            Ok(inode) => Ok(inode.attr),
            Err(StoreError::NoInode(_)) if self.locked().table.mode(session.id, key).is_some() => {
                Digests::of(self)
                    .digest_session(session, None)
                    .map_err(|error| self.refused(&error))?;
                self.store
                    .get_key(key)
                    .map(|inode| inode.attr)
                    .map_err(|error| self.refused(&error))
            }
            Err(error) => Err(self.refused(&error)),
        }
    }

    /// The grant table is full: asks old leases back and waits until some are.
    fn await_rows(&self, until_ms: u64) {
        let mut sessions = self.locked();
        let now_ms = self.now_ms();
        let rows = sessions.rows.len();
        let revocations = sessions.table.revoke_oldest(ROWS_WANTED, now_ms);
        sessions.send_revocations(&revocations);
        let give_up_ms = until_ms.min(now_ms + 2 * self.env.config.lease_ms);
        while sessions.rows.len() >= rows && self.now_ms() < give_up_ms && !sessions.latched {
            drop(sessions);
            Teardown::of(self).seal_doomed();
            self.env.clock.pause(Duration::from_millis(1));
            sessions = self.locked();
            let now_ms = self.now_ms();
            sessions.pump(now_ms);
        }
    }

    /// `Request::AllocInodes`: numbers with exclusive leases, a row for each sixteen of them. Fewer than
    /// asked for where not all of them find room.
    pub(crate) fn alloc_inodes(
        &self,
        session: &Arc<Session>,
        near: InodeKey,
        mut count: u16,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, IpcError> {
        if count == 0 || count > NUMBERS_MAX {
            return Err(no(libc::EINVAL));
        }
        if session.read_only {
            return Err(no(libc::EROFS));
        }
        self.check_writable()?;
        if !session.knows(near) {
            return Err(no(libc::ESTALE));
        }
        self.make_room(session);
        let until_ms = self.now_ms() + self.env.config.wait_ms;
        loop {
            match self.alloc_numbers(session, near, count) {
                Ok(inodes) => return Ok(inodes),
                // There may be room for fewer.
                Err(StoreError::TableFull(_) | StoreError::NoSpace { .. }) if count > BATCH_MAX => {
                    count = BATCH_MAX;
                }
                Err(StoreError::TableFull(what)) if what.contains("grant") && self.now_ms() < until_ms => {
                    self.await_rows(until_ms);
                }
                Err(error) => return Err(self.refused(&error)),
            }
        }
    }

    fn alloc_numbers(
        &self,
        session: &Arc<Session>,
        near: InodeKey,
        count: u16,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, StoreError> {
        let mut tx = self.store.begin_with_room()?;
        let mut rows: Vec<(GrantRow, Vec<InodeKey>)> = Vec::new();
        let mut left = count;
        // Where free numbers are scattered, a row has few: not all of the table's rows for that.
        let rows_max = 2 * usize::from(count.div_ceil(BATCH_MAX));
        while left > 0 && (rows.is_empty() || tx.room_at_least(OP_ROOM) >= OP_ROOM && rows.len() < rows_max) {
            let some = left.min(BATCH_MAX);
            let batch = self.reserve_batch(&mut tx, session, near, some as u8)?;
            left -= some.min(batch.1.len() as u16);
            rows.push(batch);
        }
        tx.commit()?;
        self.settle_numbers(session, rows)
    }

    /// Lets the rows of new numbers count that are on media, if the session is still there.
    fn settle_numbers(
        &self,
        session: &Session,
        rows: Vec<(GrantRow, Vec<InodeKey>)>,
    ) -> Result<Vec<(InodeKey, LeaseNo)>, StoreError> {
        let now_ms = self.now_ms();
        let mut sessions = self.locked();
        if sessions.live(session.id).is_none() {
            // Sealed meanwhile: the rows go with the session's others, unless they are gone already.
            if sessions.entries.contains_key(&session.id) {
                for (row, keys) in rows {
                    sessions.rows.insert_batch(row, &keys);
                }
            } else {
                drop(sessions);
                // The numbers too: nobody else knows of them.
                let gone = rows.iter().flat_map(|(row, keys)| {
                    let numbers = keys.iter().map(|key| RowChange::FreeNumber(*key));
                    numbers.chain([RowChange::Remove(row.lease)])
                });
                write_rows(Core::of(self), &gone.collect::<Vec<_>>())?;
            }
            return Err(StoreError::NoSession(session.id));
        }
        let mut leases = Vec::new();
        for (row, keys) in rows {
            sessions.rows.insert_batch(row, &keys);
            for key in keys {
                sessions.holds.add(session.id, key);
                session.learn(key);
                leases.push((key, sessions.table.add_new(session.id, key, now_ms)));
            }
        }
        Ok(leases)
    }

    /// Reserves at most sixteen numbers of one block under one row.
    fn reserve_batch(
        &self,
        tx: &mut Tx<'_>,
        session: &Session,
        near: InodeKey,
        count: u8,
    ) -> Result<(GrantRow, Vec<InodeKey>), StoreError> {
        let keys = tx.alloc_inodes(near.ino, count)?;
        let first = *keys.first().ok_or(StoreError::Invalid("no inodes"))?;
        let mask = keys
            .iter()
            .fold(0_u16, |mask, key| mask | 1 << (key.ino.0 - first.ino.0));
        let row = GrantRow {
            session: session.id,
            lease: self.locked().table.fresh_lease(),
            key: first,
            rights: rights::WRITE | rights::OWN,
            first_seq: varve_ipc::SessionPage::digested(&*session.page).next(),
            last_seq: None,
            batch: mask,
        };
        tx.grant_put(&row)?;
        Ok((row, keys))
    }

    /// `Request::Release`.
    pub(crate) fn release(&self, session: &Arc<Session>, items: &[ReleaseItem]) -> Result<(), IpcError> {
        if items.len() > RELEASED_MAX {
            return Err(no(libc::E2BIG));
        }
        let (begun, upto) = {
            let began_ms = self.now_ms();
            let mut sessions = self.locked();
            sessions.table.begin_work(session.id, began_ms);
            let mut begun = Vec::new();
            let mut upto = LogSeq(0);
            for item in items {
                if let Some(mode) = sessions.table.begin_release(session.id, item.key, item.lease) {
                    if mode == LeaseMode::Write && !armed(Bug::LeaseBeforeDigest) {
                        let short = u64::from(armed(Bug::HandOverShort));
                        upto = upto.max(LogSeq(item.last_seq.0.saturating_sub(short)));
                    }
                    if mode == LeaseMode::Write {
                        let count = sessions.changes_under(session.id, item);
                        sessions.table.note_changes(item.key, session.id, count);
                    }
                    begun.push((*item, mode));
                }
            }
            (begun, upto)
        };
        if armed(Bug::RowGoneBeforeDigest) {
            self.rows_first(session, &begun)?;
        }
        let done = self
            .digest_until(session, upto)
            .and_then(|()| self.end_rows(session, &begun));
        let now_ms = self.now_ms();
        let mut sessions = self.locked();
        sessions.table.end_work(session.id, now_ms);
        for (item, _) in &begun {
            if done.is_err() {
                sessions
                    .table
                    .abort_release(session.id, item.key, item.lease, now_ms);
                continue;
            }
            let stays =
                sessions
                    .table
                    .finish_release(session.id, item.key, item.lease, item.downgrade, now_ms);
            if !stays && !item.open {
                sessions.unhold(session.id, item.key);
            }
        }
        sessions.pump(now_ms);
        drop(sessions);
        HeldInodes::of(self).free_or_leave();
        done
    }

    /// Removes the rows of write leases that end; in DRAM too.
    fn end_rows(&self, session: &Arc<Session>, begun: &[(ReleaseItem, LeaseMode)]) -> Result<(), IpcError> {
        let ending = || {
            begun
                .iter()
                .filter(|(_, mode)| *mode == LeaseMode::Write)
                .map(|(item, _)| item.key)
        };
        // Rows of a batch are shared: all of it under one lock and in one order.
        let _one_at_a_time = session.row_changes.lock();
        let changes: Vec<RowChange> = {
            let mut sessions = self.locked();
            let mut changes: Vec<RowChange> = Vec::new();
            for key in ending() {
                changes.extend(sessions.rows.give_back_changes(session.id, key));
                sessions.rows.end(session.id, key);
            }
            changes
        };
        write_rows(Core::of(self), &changes).map_err(|error| self.refused(&error))
    }

    /// Removes the rows on media only (seeded bug only).
    fn rows_first(&self, session: &Arc<Session>, begun: &[(ReleaseItem, LeaseMode)]) -> Result<(), IpcError> {
        let written = begun.iter().filter(|(_, mode)| *mode == LeaseMode::Write);
        let changes: Vec<_> = {
            let sessions = self.locked();
            written
                .filter_map(|(item, _)| sessions.rows.end_change(session.id, item.key))
                .collect()
        };
        write_rows(Core::of(self), &changes).map_err(|error| self.refused(&error))
    }

    /// Digests a session's log up to `upto`. Numbers below that other threads have not committed yet are
    /// waited for, within `lease_ms`.
    fn digest_until(&self, session: &Arc<Session>, upto: LogSeq) -> Result<(), IpcError> {
        let until_ms = self.now_ms() + self.env.config.lease_ms;
        let mut tries = 0;
        while varve_ipc::SessionPage::digested(&*session.page) < upto {
            let digested = Digests::of(self)
                .digest_session(session, Some(upto))
                .map_err(|error| self.refused(&error))?;
            if digested >= upto {
                break;
            }
            tries += 1;
            if self.now_ms() >= until_ms || tries > 4 * self.env.config.lease_ms {
                return Err(no(libc::EAGAIN));
            }
            if self.locked().live(session.id).is_none() {
                return Err(IpcError::Sealed);
            }
            self.env.clock.pause(Duration::from_micros(250));
        }
        Ok(())
    }

    /// `Request::Digest`.
    pub(crate) fn digest_request(
        &self,
        session: &Arc<Session>,
        upto: LogSeq,
        wait: bool,
    ) -> Result<LogSeq, IpcError> {
        if self.store.latched().is_some() {
            return Err(no(libc::EIO));
        }
        let digested = varve_ipc::SessionPage::digested(&*session.page);
        if digested >= upto && upto > LogSeq(0) {
            return Ok(digested);
        }
        if !wait && self.lifecycle.background.load(Ordering::Acquire) {
            self.locked().to_digest.ask(session.id);
            self.lifecycle.digest_bell.ring();
            return Ok(digested);
        }
        Digests::of(self)
            .digest_session(session, None)
            .map_err(|error| self.refused(&error))
    }

    /// `Request::GrowLog`.
    pub(crate) fn grow_log(&self, session: &Session, len_bytes: u64) -> Result<u64, IpcError> {
        let Some(log) = &session.log else {
            return Err(no(libc::EROFS));
        };
        let limit = self.env.config.log_limit(self.store.devices().nvm.len_bytes());
        let chunk = varve_format::log::CHUNK_BYTES;
        if !len_bytes.is_multiple_of(chunk) || len_bytes > limit {
            return Err(no(libc::EINVAL));
        }
        let grown = self
            .health
            .log_work(session.id, &session.log_trouble, "growing the log", || {
                log.grow(len_bytes)
            });
        grown.map_err(|error| {
            no(if error.is_no_space() {
                libc::ENOSPC
            } else {
                libc::EIO
            })
        })?;
        Ok(log.len_bytes())
    }

    /// `Request::SyncLog`: what a client with a backing file does by itself.
    pub(crate) fn sync_log(&self, session: &Session, ranges: &[(u64, u64)]) -> Result<(), IpcError> {
        let Some(log) = &session.log else {
            return Err(no(libc::EROFS));
        };
        if ranges.len() > SYNC_RANGES_MAX {
            return Err(no(libc::E2BIG));
        }
        // A client has each byte written once: more is work for the disk that nobody needs.
        let bytes = ranges
            .iter()
            .fold(0_u64, |sum, (_, len)| sum.saturating_add(*len));
        if bytes > 2 * log.len_bytes() {
            return Err(no(libc::EINVAL));
        }
        let synced = self
            .health
            .log_work(session.id, &session.log_trouble, "sync of the log", || {
                log.sync_all(ranges)
            });
        synced.map_err(|error| {
            tracing::warn!(session = %session.id, "a log cannot be made durable: {error}");
            no(match error {
                varve_media::MediaError::OutOfRange { .. } => libc::EINVAL,
                error if error.is_no_space() => libc::ENOSPC,
                _ => libc::EIO,
            })
        })
    }
}

/// How many leases a session should keep. A mount of root's or the pool's owner serves all programs.
pub(crate) fn leases_max(config: &Config, session: &Session) -> u32 {
    if session.kind == ClientKind::Shim && session.privileged {
        config.leases_max.saturating_mul(MOUNT_LEASES).min(LEASES_MOST)
    } else {
        config.leases_max
    }
}

/// What a grant lets a session log: everything for privileged ones, else what its user may do to the inode
/// now. A row without any right still lets it add and remove names of the inode.
fn grant_row(session: &Session, granted: &GrantedLease, attr: &InodeAttr, first_seq: LogSeq) -> GrantRow {
    let mut bits = 0;
    if session.privileged || session.cred.uid == attr.uid {
        bits |= rights::OWN;
    }
    // A file that was opened for writing stays so; names are asked for anew each time.
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
