//! How sessions end: by order, by force, by death, at a restart. One way for all: page, barrier, scan,
//! durable seal, digest, end.

use crate::counters::Counters;
use crate::kernel::{BaseLimit, Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::ops::digest::Digests;
use crate::ops::rows::write_rows;
use crate::process::ProcessId;
use crate::session::state::{Session, SessionParts};
use crate::session::table::{Company, Ended, Phase, Reclaim, SessionEntry};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::seeded::{Bug, armed};
use varve_format::session::{SessionRow, SessionState};
use varve_format::{Generation, Ino, InodeKey, LastForwarded, LeaseNo, LogSeq, Seal, SessionId, TxId};
use varve_ipc::{ClientKind, Page, Peer, Upcall, Watched};
use varve_store::{InodeSlot, StoreError};

/// Pause before a sealed log that found no space is tried again, in milliseconds.
const NO_SPACE_RETRY_MS: u64 = 200;

/// The same where something that the log rests on is damaged, or cannot be read.
const STUCK_RETRY_MS: u64 = 1000;

/// For so many times as long as others had to wait before they could change anything, a mount is kept in
/// shared mode after they are gone.
const SOLITUDE_PER_WAIT: u64 = 10;

/// Most ended sessions of one process that are kept for its return.
const ENDED_PER_PROCESS_MAX: usize = 64;

impl KernelFs {
    /// Seals the sessions that are late. Never waits for a client.
    pub(crate) fn seal_doomed(&self) {
        loop {
            let Some((id, why)) = self.locked().doomed.pop_first() else {
                return;
            };
            self.seal_session(id, why);
            self.finish_sealed();
        }
    }

    /// Ends a session by force: afterwards its log takes no more part, and what is in it is queued to be
    /// digested. Its client may resume.
    pub(crate) fn seal_session(&self, id: SessionId, why: &str) {
        self.seal(id, why, true);
    }

    /// Ends a session; with `keep` its client may come back.
    pub(crate) fn seal(&self, id: SessionId, why: &str, keep: bool) {
        let (session, believed) = {
            let mut sessions = self.locked();
            let Some(member) = sessions.entries.get_mut(&id) else {
                return;
            };
            if member.phase != Phase::Live {
                return;
            }
            member.phase = Phase::Sealing;
            // What it does not use comes back with all that it has.
            member.reclaim = Reclaim::None;
            let session = Arc::clone(&member.session);
            // Until it has heard that its session is over it answers as one that is alone. One that says
            // goodbye has unmounted before.
            let believed = keep && session.kind == ClientKind::Shim && !member.company.shared;
            sessions.note_watched(id, Watched::default());
            if believed {
                let absent: Vec<_> = sessions.ended.iter().map(|ended| ended.id).collect();
                sessions.note_believed(self.env.clock.moment(), absent);
            }
            // Whoever waits for this session's sake stops now.
            let tickets: Vec<_> = sessions.table.waiting_tickets(id);
            for ticket in &tickets {
                sessions.table.cancel(*ticket);
            }
            sessions.end_waits(&tickets);
            (session, believed)
        };
        if keep {
            tracing::info!(session = %id, pid = session.peer.pid, "session sealed: {why}");
        }
        Counters::bump(&self.counters.seals);
        session.page.seal();
        varve_ipc::page::membarrier();
        // Before anybody else is given a lease of it: if it is stopped, its maps show what it has copied.
        if session.keeps_copies() {
            self.logs.drop_copies(session.process);
        }
        if believed {
            // What it answers from here on is not believed.
            self.locked().note_believed(self.env.clock.moment(), []);
        }
        let _ = session.upcalls.push(Upcall::Sealed);
        session.turn.next.notify_all();
        match self.persist_seal(&session, BaseLimit::Now) {
            Ok(seal) => self.locked().to_finish.push((session, seal, keep)),
            Err(error) => {
                // The log stays as it is, and its leases with it: the next start seals it. Nobody waits for
                // them: the pool is read-only.
                tracing::error!(session = %id, "the seal cannot be made durable: {error}");
                self.note_error(&error);
                // A log that cannot be read, too.
                if error.is_device() {
                    self.stop_writing(&error);
                }
                session.upcalls.close();
            }
        }
        self.lifecycle.bell.ring();
    }

    /// Finds the end of a log whose page says SEALED, and makes it durable.
    fn persist_seal(&self, session: &Arc<Session>, limit: BaseLimit) -> Result<Seal, StoreError> {
        let reader = session.reader.lock();
        let newest_tx = || limit.newest(&self.store);
        let seal = match session.log.as_deref() {
            None => Seal {
                last: reader.digested,
                missing: Vec::new(),
            },
            Some(log) => {
                let scan = reader.log.seal_scan(log, reader.digested, &newest_tx);
                let scan = scan.inspect_err(|error| {
                    self.health
                        .log_failed(session.id, Some(&session.log_trouble), error)
                })?;
                if let Some(damage) = scan.damage {
                    let text = format!("the log is damaged beyond entry {}: {damage}", scan.seal.last);
                    tracing::warn!(session = %session.id, "{text}");
                    self.health.log_damaged(session.id, text);
                }
                scan.seal
            }
        };
        if !session.read_only {
            let mut tx = self.store.begin()?;
            // Mediated operations write their number into the row themselves.
            let last_forwarded = tx
                .session(session.id)?
                .map_or(LastForwarded::default(), |row| row.last_forwarded);
            let state = SessionState::Sealed(seal.clone());
            tx.session_put(&session.row(state, reader.digested, last_forwarded))?;
            tx.commit()?;
        }
        Ok(seal)
    }

    /// Digests sealed logs and ends their sessions.
    pub(crate) fn finish_sealed(&self) {
        loop {
            let Some((session, seal, keep)) = self.locked().to_finish.pop() else {
                return;
            };
            if let Err(error) = self.finish_session(&session, &seal, keep, BaseLimit::Now) {
                if error.is_no_space() {
                    Digests::of(self).wait_for_space(&error);
                } else {
                    tracing::error!(session = %session.id, "a sealed log cannot be digested: {error}");
                    self.note_error(&error);
                    self.counters.stuck_ms.store(self.now_ms(), Ordering::Relaxed);
                }
                session.upcalls.close();
                if !error.stops_writing() {
                    // Out of space, most likely: again when there is some.
                    self.locked().unfinished.push((session, seal, keep));
                }
            }
        }
    }

    fn finish_session(
        &self,
        session: &Arc<Session>,
        seal: &Seal,
        keep: bool,
        limit: BaseLimit,
    ) -> Result<(), StoreError> {
        let digested = Digests::of(self).digest_sealed(session, seal, limit)?;
        let row_changes = session.row_changes.lock();
        let (rows, numbers) = {
            let sessions = self.locked();
            (
                sessions.rows.of_session(session.id),
                sessions.rows.numbers(session.id),
            )
        };
        let removed: BTreeSet<_> = rows.iter().copied().collect();
        let mut last_forwarded = LastForwarded {
            number: *session.turn.last.lock(),
            ..LastForwarded::default()
        };
        if !session.read_only {
            write_rows(Core::of(self), &free_numbers(&numbers))?;
            self.remove_grants(rows)?;
            let mut tx = self.store.begin()?;
            last_forwarded = tx
                .session(session.id)?
                .map_or(last_forwarded, |row| row.last_forwarded);
            if keep {
                let state = SessionState::Ended(seal.clone());
                tx.session_put(&session.row(state, digested, last_forwarded))?;
            } else {
                tx.session_remove(session.id)?;
            }
            tx.commit()?;
        }
        drop(row_changes);
        self.logs.remove(session.id);
        let kept = keep.then_some((seal, last_forwarded));
        let changes = self.drop_session(session, kept, &removed);
        write_rows(Core::of(self), &changes)
    }

    /// Removes grants from media, in as few transactions as they need.
    fn remove_grants(&self, rows: Vec<LeaseNo>) -> Result<(), StoreError> {
        let mut rows = rows.into_iter().peekable();
        while rows.peek().is_some() {
            let mut tx = self.store.begin()?;
            while tx.room_at_least(varve_store::OP_ROOM + 1) > varve_store::OP_ROOM
                && let Some(lease) = rows.next()
            {
                match tx.grant_remove(lease) {
                    Ok(()) | Err(StoreError::NoGrant(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            tx.commit()?;
        }
        Ok(())
    }

    /// Takes a session out of the tables; its client may come back if its seal and what was forwarded last
    /// are `kept`. Answers changes of rows that are not in `removed`: of grants that were under way when it
    /// was sealed.
    fn drop_session(
        &self,
        session: &Session,
        kept: Option<(&Seal, LastForwarded)>,
        removed: &BTreeSet<LeaseNo>,
    ) -> Vec<RowChange> {
        let now_ms = self.now_ms();
        let mut guard = self.locked();
        let sessions = &mut *guard;
        let late = sessions.rows.of_session(session.id);
        let late_numbers = if late.len() > removed.len() {
            sessions.rows.numbers(session.id)
        } else {
            Vec::new()
        };
        sessions.rows.drop_session(session.id);
        let tickets = sessions.table.drop_session(session.id);
        sessions.end_waits(&tickets);
        sessions.entries.remove(&session.id);
        // From here on nothing is promised to it.
        self.store.unreserve(session.spend(u64::MAX));
        sessions.doomed.remove(&session.id);
        if sessions.entries.len() <= 1 {
            sessions.alone_since_ms = now_ms;
        }
        match kept {
            Some((seal, last_forwarded)) => sessions.ended.push(Ended {
                id: session.id,
                token: session.token,
                uid: session.peer.uid,
                process: session.process,
                seal: seal.clone(),
                last_forwarded,
                holds_until_ms: Some(session.holds_until_ms.load(Ordering::Acquire)).filter(|ms| *ms > 0),
                row: !session.read_only,
                known: Some(session.known()),
                continues: session.continues(),
            }),
            None => sessions.unheld.extend(sessions.holds.drop_session(session.id)),
        }
        self.store.set_reader_horizon(sessions.reader_horizon());
        session.upcalls.close();
        sessions.pump(now_ms);
        drop(guard);
        let late = late
            .into_iter()
            .filter(|lease| !removed.contains(lease))
            .map(RowChange::Remove);
        let mut changes = free_numbers(&late_numbers);
        changes.extend(late);
        changes
    }

    /// The connection of a session is gone. Its client may still live and resume on another one, within the
    /// grace time.
    pub(crate) fn connection_gone(&self, id: SessionId) {
        let Ok(_entered) = self.begin_request() else {
            return;
        };
        if self.lifecycle.stopping.load(Ordering::Acquire) {
            return;
        }
        let until_ms = self.now_ms() + self.env.config.grace_ms;
        // Who digests its log, and when, is not known here.
        if let Some(member) = self.locked().entries.get(&id) {
            member.session.holds_until_ms.store(until_ms, Ordering::Release);
        }
        self.seal_session(id, "its connection is gone");
        self.finish_or_leave();
        let mut sessions = self.locked();
        if let Some(ended) = sessions.ended.iter_mut().find(|ended| ended.id == id) {
            ended.holds_until_ms = Some(until_ms);
        }
    }

    /// Digests sealed logs here, unless there is a thread for it.
    pub(crate) fn finish_or_leave(&self) {
        if self.lifecycle.background.load(Ordering::Acquire) {
            self.lifecycle.bell.ring();
        } else {
            self.finish_sealed();
        }
    }

    /// Forgets ended sessions whose process is gone, or that are too many; ends sessions whose process is
    /// gone.
    pub(crate) fn reap(&self, now_ms: u64) {
        // Logs that found no space, or needed what cannot be read, are tried again, but not at every tick.
        let no_space_ms = self.counters.no_space_ms.load(Ordering::Relaxed);
        let stuck_ms = self.counters.stuck_ms.load(Ordering::Relaxed);
        let ready = |tried_ms: u64, pause_ms| tried_ms == 0 || now_ms >= tried_ms + pause_ms;
        if ready(no_space_ms, NO_SPACE_RETRY_MS) && ready(stuck_ms, STUCK_RETRY_MS) {
            let mut sessions = self.locked();
            let retry = std::mem::take(&mut sessions.unfinished);
            sessions.to_finish.extend(retry);
        }
        let own = std::process::id();
        let (entries, ended) = {
            let sessions = self.locked();
            let entries: Vec<_> = sessions
                .entries
                .values()
                .filter(|member| member.phase == Phase::Live && member.session.peer.pid != own)
                .map(|member| (member.session.id, member.session.process))
                .collect();
            (entries, sessions.ended.clone())
        };
        let mut living = Vec::new();
        for (id, process) in entries {
            if process.is_alive() {
                living.push(process);
            } else {
                self.seal(id, "its process is gone", false);
                self.finish_sealed();
            }
        }
        let living: BTreeSet<_> = living.into_iter().collect();
        self.logs.sweep_copies(&|process| living.contains(&process));
        let mut forget = BTreeSet::new();
        let mut seen = BTreeMap::<ProcessId, usize>::new();
        // Newest last: the oldest go when there are too many.
        for ended in ended.iter().rev() {
            let count = seen.entry(ended.process).or_default();
            *count += 1;
            if *count > ENDED_PER_PROCESS_MAX || !ended.process.is_alive() {
                forget.insert(ended.id);
            }
        }
        for id in &forget {
            self.forget_ended(*id);
        }
        let mut sessions = self.locked();
        let sessions = &mut *sessions;
        if self.in_grace() && !sessions.awaits_earlier() {
            // All have come back, or their processes are gone.
            self.env.grace_until_ms.store(0, Ordering::Release);
        }
        for ended in &mut sessions.ended {
            if ended.holds_until_ms.is_some_and(|until_ms| now_ms >= until_ms) {
                ended.holds_until_ms = None;
                sessions.unheld.extend(sessions.holds.drop_session(ended.id));
            }
        }
    }

    /// Forgets an ended session: its row, its holds.
    pub(crate) fn forget_ended(&self, id: SessionId) {
        let row = {
            let mut sessions = self.locked();
            let sessions = &mut *sessions;
            let Some(at) = sessions.ended.iter().position(|ended| ended.id == id) else {
                return;
            };
            sessions.unheld.extend(sessions.holds.drop_session(id));
            sessions.ended.remove(at).row
        };
        if !row {
            return;
        }
        let removed = self.store.begin().and_then(|mut tx| {
            tx.session_remove(id)?;
            tx.commit()
        });
        match removed {
            Ok(_) | Err(StoreError::NoSession(_)) => {}
            Err(error) => self.note_error(&error),
        }
    }

    /// Tells a mount that has been alone long enough: the others are gone, and their logs digested. After
    /// company that had to wait for the mount's kernel it takes longer, so that at most a tenth of the time
    /// is spent on such waits, however others come and go.
    pub(crate) fn note_solitude(&self, now_ms: u64) {
        let mut sessions = self.locked();
        let pause_ms = sessions.company_waited_ms.saturating_mul(SOLITUDE_PER_WAIT);
        let alone_ms = now_ms.saturating_sub(sessions.alone_since_ms);
        if sessions.entries.len() != 1 || alone_ms < pause_ms.max(self.env.config.solo_ms) {
            return;
        }
        // An answer that is still to come would be taken for one to the next announcement.
        let shim = sessions
            .entries
            .values_mut()
            .find(|member| member.company.shared && member.company.announced == 0);
        let id = shim.map(|member| {
            member.company = Company::at_entry(false);
            member.session.id
        });
        if let Some(id) = id {
            sessions.company_waited_ms = 0;
            sessions.send(id, Upcall::Solo);
        }
    }

    /// Ends all sessions of an earlier daemon. Their pages say SEALED already.
    ///
    /// # Errors
    /// Of the store and the logs, if no device failed: then the pool is read-only and the logs keep what they
    /// have.
    pub(crate) fn recover(&self, base_limit: TxId) -> Result<(), StoreError> {
        let result = self.recover_all(BaseLimit::AtStart(base_limit));
        match result {
            Err(error) if error.is_device() => {
                self.stop_writing(&error);
                Ok(())
            }
            other => other,
        }
    }

    fn recover_all(&self, limit: BaseLimit) -> Result<(), StoreError> {
        let rows = self.store.sessions()?;
        if rows.is_empty() {
            // Nobody can come back: what is deleted needs not to be kept for them.
            self.env.grace_until_ms.store(0, Ordering::Release);
        }
        self.locked().earlier = rows.iter().map(|row| row.id).collect();
        // A mount may have been alone when the earlier daemon ended. One that was unmounted has no row.
        let is_mount = |row: &SessionRow| row.flags & 1 == 1;
        if rows.iter().any(is_mount) {
            let over = rows
                .iter()
                .filter(|row| !is_mount(row) && matches!(row.state, SessionState::Ended(_)));
            self.locked()
                .note_believed(self.env.clock.moment(), over.map(|row| row.id));
        }
        let numbers = self.take_up_grants(&rows)?;
        let sealed = self.revive_all(rows, limit)?;
        let revived = sealed
            .iter()
            .map(|(session, _)| (session.id, Arc::clone(session)));
        self.locked().revived = revived.collect();
        for (session, seal) in sealed {
            match self.finish_session(&session, &seal, true, limit) {
                Ok(()) => {}
                Err(error) if error.stops_writing() => return Err(error),
                Err(error) => {
                    tracing::error!(session = %session.id, "a sealed log cannot be digested yet: {error}");
                    self.store.note_damage(&error);
                    self.keep_leases(&session)?;
                    self.locked().unfinished.push((session, seal, true));
                }
            }
        }
        self.locked().revived.clear();
        self.clear_left(numbers)?;
        if !armed(Bug::OrphansLeftAtStart) {
            let orphans = self.store.orphans()?;
            self.locked().unheld.extend(orphans);
        }
        Ok(())
    }

    /// Takes up the grants of sessions that have not ended, removes the others. Answers the inode numbers
    /// that were reserved for the former.
    fn take_up_grants(&self, rows: &[SessionRow]) -> Result<Vec<Ino>, StoreError> {
        let ending: BTreeSet<_> = rows
            .iter()
            .filter(|row| !matches!(row.state, SessionState::Ended(_)))
            .map(|row| row.id)
            .collect();
        let (mut left, mut numbers) = (Vec::new(), Vec::new());
        for grant in self.store.grants()? {
            if ending.contains(&grant.session) {
                self.locked().rows.insert(grant);
            } else {
                // A crash came between the end of the session and the end of this.
                left.push(RowChange::Remove(grant.lease));
            }
        }
        write_rows(Core::of(self), &left)?;
        for id in &ending {
            let reserved = self.locked().rows.numbers(*id);
            numbers.extend(reserved.into_iter().map(|(ino, _)| ino));
        }
        Ok(numbers)
    }

    /// The sessions that have not ended, with their seals, oldest first.
    fn revive_all(
        &self,
        rows: Vec<SessionRow>,
        limit: BaseLimit,
    ) -> Result<Vec<(Arc<Session>, Seal)>, StoreError> {
        let mut sealed = Vec::new();
        for row in rows {
            let seal = match &row.state {
                SessionState::Ended(seal) => {
                    self.locked().ended.push(ended(&row, seal.clone()));
                    self.logs.remove(row.id);
                    continue;
                }
                SessionState::Sealed(seal) => Some(seal.clone()),
                SessionState::Live => None,
            };
            let session = Arc::new(self.revive(&row)?);
            let seal = match seal {
                Some(seal) => seal,
                None => self.persist_seal(&session, limit)?,
            };
            sealed.push((session, seal));
        }
        // Oldest first. Logs of different sessions commute: a lease passed on only when its holder's log was
        // digested.
        sealed.sort_by_key(|(session, _)| session.id);
        Ok(sealed)
    }

    /// Frees numbers that were reserved and removes logs that nobody has any more.
    fn clear_left(&self, numbers: Vec<Ino>) -> Result<(), StoreError> {
        let unfinished: BTreeSet<_> = self
            .locked()
            .unfinished
            .iter()
            .map(|(session, ..)| session.id)
            .collect();
        // A row on media does not name its numbers' generations: another session's inode could have one of
        // them, until all are digested.
        if unfinished.is_empty() {
            let mut free = Vec::new();
            for ino in numbers {
                if let InodeSlot::Reserved(generation) = self.store.slot(ino)? {
                    free.push(RowChange::FreeNumber(InodeKey { ino, generation }));
                }
            }
            write_rows(Core::of(self), &free)?;
        }
        for id in self.logs.list()? {
            if !unfinished.contains(&id) {
                self.logs.remove(id);
            }
        }
        Ok(())
    }

    /// The log of a session of an earlier daemon waits for space: nobody else gets its leases before it is
    /// digested.
    fn keep_leases(&self, session: &Arc<Session>) -> Result<(), StoreError> {
        let mut keys = Vec::new();
        let held = self.locked().rows.held(session.id);
        for (ino, known) in held {
            // Its image may be what cannot be read.
            let generation = match known {
                Some(generation) => Some(generation),
                None => match self.store.slot(ino)? {
                    InodeSlot::Used(inode) => Some(inode.attr.key.generation),
                    InodeSlot::Reserved(generation) => Some(generation),
                    InodeSlot::Free(_) => None,
                },
            };
            keys.extend(generation.map(|generation| InodeKey { ino, generation }));
        }
        let now_ms = self.now_ms();
        let mut sessions = self.locked();
        for key in keys {
            sessions.holds.add(session.id, key);
            sessions.table.add_new(session.id, key, now_ms);
        }
        sessions.entries.insert(
            session.id,
            SessionEntry {
                session: Arc::clone(session),
                phase: Phase::Sealing,
                company: Company::at_entry(true),
                barriers: BTreeMap::new(),
                reclaim: Reclaim::None,
            },
        );
        Ok(())
    }

    /// A session of an earlier daemon, from its row.
    fn revive(&self, row: &SessionRow) -> Result<Session, StoreError> {
        let session = Session::new(SessionParts {
            id: row.id,
            kind: if row.flags & 1 == 1 {
                ClientKind::Shim
            } else {
                ClientKind::Linked
            },
            peer: Peer {
                pid: row.pid,
                uid: row.uid,
                // Not known yet: that of the process, if it lives.
                gid: u32::MAX,
            },
            privileged: self.is_privileged(row.uid),
            read_only: false,
            token: row.token,
            created_ns: row.created_ns,
            page: Arc::new(Page::heap(row.id)),
            log: self
                .logs
                .open(row.id)
                .inspect_err(|error| self.health.log_failed(row.id, None, error))?,
            process: Some(ProcessId {
                pid: row.pid,
                start: row.pid_start,
            }),
            known: None,
            continues: None,
            segments: None,
        });
        session.page.seal();
        session.reader.lock().digested = row.digested;
        *session.turn.last.lock() = row.last_forwarded.number;
        if session.log.is_none() && row.digested > LogSeq(0) {
            let text = "the log is gone; what was not digested is lost";
            tracing::warn!(session = %row.id, "{text}");
            self.health.log_damaged(row.id, text.into());
        }
        Ok(session)
    }

    pub(crate) fn is_privileged(&self, uid: u32) -> bool {
        uid == 0 || uid == self.env.owner_uid
    }
}

fn ended(row: &SessionRow, seal: Seal) -> Ended {
    Ended {
        id: row.id,
        token: row.token,
        uid: row.uid,
        process: ProcessId {
            pid: row.pid,
            start: row.pid_start,
        },
        seal,
        last_forwarded: row.last_forwarded,
        holds_until_ms: None,
        row: true,
        known: None,
        continues: None,
    }
}

/// Those whose generation is known.
fn free_numbers(numbers: &[(Ino, Option<Generation>)]) -> Vec<RowChange> {
    let known = numbers.iter().filter_map(|(ino, generation)| {
        Some(InodeKey {
            ino: *ino,
            generation: (*generation)?,
        })
    });
    known.map(RowChange::FreeNumber).collect()
}
