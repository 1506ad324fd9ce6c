//! The end of a session: by request, by force, by its client's death, at a restart. All take the same steps:
//! page, barrier, scan, durable seal, digest, end.

use crate::counters::Counters;
use crate::health::Health;
use crate::kernel::{BaseLimit, Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::logs::LogStore;
use crate::ops::digest::Digests;
use crate::ops::rows::{write_rows, write_rows_then};
use crate::process::ProcessId;
use crate::session::state::Session;
use crate::session::table::{Ended, Phase, Reclaim};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::session::SessionState;
use varve_format::{Generation, Ino, InodeKey, LastForwarded, LeaseNo, Seal, SessionId};
use varve_ipc::{ClientKind, Upcall, Watched};
use varve_store::StoreError;

/// Pause before a sealed log that found no space is tried again, in milliseconds.
const NO_SPACE_RETRY_MS: u64 = 200;

/// Pause before a sealed log is tried again whose digest met damage or an unreadable block, in milliseconds.
const STUCK_RETRY_MS: u64 = 1000;

/// Most ended sessions of one process that are kept for its return.
const ENDED_PER_PROCESS_MAX: usize = 64;

/// Context of ending sessions.
#[derive(Clone, Copy)]
pub(crate) struct Teardown<'k> {
    core: Core<'k>,
    logs: &'k dyn LogStore,
    health: &'k Health,
    counters: &'k Counters,
    digests: Digests<'k>,
}

impl<'k> Teardown<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            logs: &*kernel.logs,
            health: &kernel.health,
            counters: &kernel.counters,
            digests: Digests::of(kernel),
        }
    }

    /// Seals the sessions that are late. Never waits for a client.
    pub(crate) fn seal_doomed(&self) {
        loop {
            let Some((id, why)) = self.core.locked().doomed.pop_first() else {
                return;
            };
            self.seal_session(id, why);
            self.finish_sealed();
        }
    }

    /// Ends a session by force: afterwards its log takes no more entries, and is queued to be digested. Its
    /// client may resume.
    pub(crate) fn seal_session(&self, id: SessionId, why: &str) {
        self.seal(id, why, true);
    }

    /// Ends a session; with `keep` its client may resume it.
    pub(crate) fn seal(&self, id: SessionId, why: &str, keep: bool) {
        let (session, caches) = {
            let mut sessions = self.core.locked();
            let Some(member) = sessions.entries.get_mut(&id) else {
                return;
            };
            if member.phase != Phase::Live {
                return;
            }
            member.phase = Phase::Sealing;
            // Its unused blocks return with its whole reservation.
            member.reclaim = Reclaim::None;
            let session = Arc::clone(&member.session);
            // A mount whose client ends the session itself has been unmounted before.
            let is_mount = keep && session.kind == ClientKind::Shim;
            let caches = is_mount && sessions.table.count(id) > 0;
            sessions.note_watched(id, Watched::default());
            if caches {
                sessions.cached.note_sealed(id, self.core.env.clock.moment());
            }
            // Threads that wait for leases on behalf of this session stop waiting.
            let tickets: Vec<_> = sessions.table.waiting_tickets(id);
            for ticket in &tickets {
                sessions.table.cancel(*ticket);
            }
            sessions.end_waits(&tickets);
            (session, caches)
        };
        if keep {
            tracing::info!(session = %id, pid = session.peer.pid, "session sealed: {why}");
        }
        Counters::bump(&self.counters.seals);
        session.page.seal();
        varve_ipc::page::membarrier();
        // Must precede any grant of its leases to another session: the maps of a stopped client show its
        // copies.
        if session.keeps_copies() {
            self.logs.drop_copies(session.process);
        }
        if caches {
            // Answers from here on get no timeout.
            self.core
                .locked()
                .cached
                .note_sealed(id, self.core.env.clock.moment());
        }
        let _ = session.upcalls.push(Upcall::Sealed);
        session.turn.next.notify_all();
        match self.persist_seal(&session, BaseLimit::Now) {
            Ok(seal) => self.core.locked().to_finish.push((session, seal, keep)),
            Err(error) => {
                // The log and its leases stay as they are: the next start seals it. No session waits for
                // them: the pool is read-only.
                tracing::error!(session = %id, "the seal cannot be made durable: {error}");
                self.core.note_error(&error);
                // Also if the log cannot be read.
                if error.is_device() {
                    self.core.stop_writing(&error);
                }
                session.upcalls.close();
            }
        }
        self.core.lifecycle.bell.ring();
    }

    /// Finds the end of a log whose page says SEALED, and makes the end durable.
    pub(super) fn persist_seal(&self, session: &Arc<Session>, limit: BaseLimit) -> Result<Seal, StoreError> {
        let reader = session.reader.lock();
        let newest_tx = || limit.newest(self.core.store);
        let seal = match session.log.as_deref() {
            None => Seal {
                last: reader.digested,
                missing: Vec::new(),
            },
            Some(log) => {
                let scan = reader.log.seal_scan(log, reader.digested, &newest_tx);
                let scan = scan.inspect_err(|error| {
                    self.health
                        .log_failed(session.id, Some(&session.log_faults), error)
                })?;
                if let Some(damage) = scan.damage {
                    let text = format!("the log is damaged beyond entry {}: {damage}", scan.seal.last);
                    tracing::warn!(session = %session.id, "{text}");
                    self.health.log_damaged(session.id, text);
                    session.suspect();
                }
                scan.seal
            }
        };
        if session.end_record() {
            let mut tx = self.core.store.begin()?;
            // Forwarded operations write their number into the row themselves.
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
            let Some((session, seal, keep)) = self.core.locked().to_finish.pop() else {
                return;
            };
            if let Err(error) = self.finish_session(&session, &seal, keep, BaseLimit::Now) {
                if error.is_no_space() {
                    self.digests.wait_for_space(&error);
                } else {
                    tracing::error!(session = %session.id, "a sealed log cannot be digested: {error}");
                    self.core.note_error(&error);
                    self.counters
                        .stuck_ms
                        .store(self.core.now_ms(), Ordering::Relaxed);
                }
                session.upcalls.close();
                if !error.stops_writing() {
                    // The digest most likely ran out of space: it is tried again later.
                    self.core.locked().unfinished.push((session, seal, keep));
                }
            }
        }
    }

    pub(super) fn finish_session(
        &self,
        session: &Arc<Session>,
        seal: &Seal,
        keep: bool,
        limit: BaseLimit,
    ) -> Result<(), StoreError> {
        let digested = self.digests.digest_sealed(session, seal, limit)?;
        if session.is_suspect() && self.core.store.is_torn() {
            self.name_torn(session)?;
        }
        let row_changes = session.row_changes.lock();
        let (rows, numbers) = {
            let sessions = self.core.locked();
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
        if session.is_recorded() {
            let mut changes = free_numbers(&numbers);
            changes.extend(rows.into_iter().map(RowChange::Remove));
            last_forwarded = write_rows_then(self.core, &changes, |tx| {
                let last_forwarded = tx
                    .session(session.id)?
                    .map_or(last_forwarded, |row| row.last_forwarded);
                if keep {
                    let state = SessionState::Ended(seal.clone());
                    tx.session_put(&session.row(state, digested, last_forwarded))?;
                } else {
                    tx.session_remove(session.id)?;
                }
                Ok(last_forwarded)
            })?;
        }
        drop(row_changes);
        if keep && !session.is_recorded() && self.core.locked().holds.count(session.id) > 0 {
            // What the next daemon knows of its holds; goes when this one forgets it.
            self.logs.remove_log(session.id);
        } else {
            self.logs.remove(session.id);
        }
        let kept = keep.then_some((seal, last_forwarded));
        let changes = self.drop_session(session, kept, &removed);
        write_rows(self.core, &changes)
    }

    /// Handles a log of an earlier daemon that could not be recovered whole: blocks that it was to overwrite
    /// may be torn. Checks all inodes that its session could write, before its grants go, and reports the
    /// damaged ones.
    fn name_torn(&self, session: &Session) -> Result<(), StoreError> {
        let held = self.core.locked().rows.held(session.id);
        for (ino, _) in held {
            let torn = match self.core.store.torn_blocks(ino) {
                Ok(torn) => torn,
                Err(StoreError::NoInode(_) | StoreError::WrongKind { .. }) => continue,
                Err(error) if error.stops_writing() => return Err(error),
                Err(error) => {
                    self.core.note_error(&error);
                    continue;
                }
            };
            if let Some(first) = torn.first() {
                let text = format!(
                    "inode {ino}: {} blocks, the first at byte {first}, hold neither what was there nor what was \
                    written when the daemon ended, and the log that tells is damaged",
                    torn.len()
                );
                tracing::error!(session = %session.id, "{text}");
                self.health.log_damaged(session.id, text);
            }
        }
        Ok(())
    }

    /// Clears the torn state when all logs of earlier daemons are digested.
    pub(crate) fn note_redone(&self) {
        if !self.core.store.is_torn() {
            return;
        }
        // Sessions whose logs wait, are being digested by another thread, or are not digested by this daemon.
        let sessions = self.core.locked();
        let mut members = sessions.entries.values();
        let waits = sessions.latched || members.any(|member| member.session.of_earlier_daemon);
        if !waits {
            self.core.store.forget_torn();
        }
    }

    /// Removes a session from the tables; its client may resume it if its seal and its last forwarded
    /// operation are `kept`. Returns the changes of rows that are not in `removed`: rows of grants that were
    /// under way when it was sealed.
    fn drop_session(
        &self,
        session: &Session,
        kept: Option<(&Seal, LastForwarded)>,
        removed: &BTreeSet<LeaseNo>,
    ) -> Vec<RowChange> {
        let now_ms = self.core.now_ms();
        let mut guard = self.core.locked();
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
        // From here on it has no reservation.
        self.core.store.unreserve(session.spend(u64::MAX));
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
                row: session.is_recorded(),
                known: Some(session.known()),
                continues: session.continues(),
            }),
            None => sessions.unheld.extend(sessions.holds.drop_session(session.id)),
        }
        self.core.store.set_reader_horizon(sessions.reader_horizon());
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

    /// Handles the loss of a session's connection. Its client may still live and resume on another
    /// connection, within the grace time.
    pub(crate) fn connection_gone(&self, id: SessionId) {
        let Ok(_entered) = self.core.lifecycle.begin_request() else {
            return;
        };
        if self.core.lifecycle.stopping.load(Ordering::Acquire) {
            return;
        }
        let until_ms = self.core.now_ms() + self.core.env.config.grace_ms;
        // Another thread may digest its log, at any time.
        if let Some(member) = self.core.locked().entries.get(&id) {
            member.session.holds_until_ms.store(until_ms, Ordering::Release);
        }
        self.seal_session(id, "its connection is gone");
        self.finish_or_leave();
        let mut sessions = self.core.locked();
        if let Some(ended) = sessions.ended.iter_mut().find(|ended| ended.id == id) {
            ended.holds_until_ms = Some(until_ms);
        }
    }

    /// Digests sealed logs here, unless a background thread does.
    pub(crate) fn finish_or_leave(&self) {
        if self.core.lifecycle.background.load(Ordering::Acquire) {
            self.core.lifecycle.bell.ring();
        } else {
            self.finish_sealed();
        }
    }

    /// Forgets ended sessions whose process is gone, or that are too many; ends sessions whose process is
    /// gone.
    pub(crate) fn reap(&self, now_ms: u64) {
        // Logs that found no space, or needed an unreadable block, are tried again, but not at every tick.
        let no_space_ms = self.counters.no_space_ms.load(Ordering::Relaxed);
        let stuck_ms = self.counters.stuck_ms.load(Ordering::Relaxed);
        let ready = |tried_ms: u64, pause_ms| tried_ms == 0 || now_ms >= tried_ms + pause_ms;
        if ready(no_space_ms, NO_SPACE_RETRY_MS) && ready(stuck_ms, STUCK_RETRY_MS) {
            let mut sessions = self.core.locked();
            let retry = std::mem::take(&mut sessions.unfinished);
            sessions.to_finish.extend(retry);
        }
        let own = std::process::id();
        let (entries, ended) = {
            let sessions = self.core.locked();
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
        let mut sessions = self.core.locked();
        let sessions = &mut *sessions;
        if self.core.env.in_grace() && !sessions.awaits_earlier() {
            // All clients have resumed, or their processes are gone.
            self.core.env.grace_until_ms.store(0, Ordering::Release);
        }
        if !self.core.env.in_grace() {
            for id in std::mem::take(&mut sessions.unrecorded) {
                self.logs.remove(id);
            }
        }
        for ended in &mut sessions.ended {
            if ended.holds_until_ms.is_some_and(|until_ms| now_ms >= until_ms) {
                ended.holds_until_ms = None;
                sessions.unheld.extend(sessions.holds.drop_session(ended.id));
            }
        }
    }

    /// Forgets an ended session with a row whose process is gone; whether there was one.
    pub(crate) fn forget_dead(&self) -> bool {
        let dead = {
            let sessions = self.core.locked();
            let mut with_row = sessions.ended.iter().filter(|ended| ended.row);
            with_row
                .find(|ended| !ended.process.is_alive())
                .map(|ended| ended.id)
        };
        if let Some(id) = dead {
            self.forget_ended(id);
        }
        dead.is_some()
    }

    /// Forgets the oldest ended session of the process that has most of them: a process that opens session
    /// after session does not keep others out. A client that keeps the rules has one for each of its mounts,
    /// and needs the newest. `with_rows`: only of those that have a row.
    pub(crate) fn forget_crowd(&self, with_rows: bool) -> bool {
        let oldest = {
            let sessions = self.core.locked();
            let mut crowds = BTreeMap::<ProcessId, (usize, SessionId)>::new();
            for ended in sessions.ended.iter().filter(|ended| ended.row || !with_rows) {
                crowds.entry(ended.process).or_insert((0, ended.id)).0 += 1;
            }
            crowds.into_values().max_by_key(|(count, _)| *count)
        };
        match oldest {
            Some((count, id)) if count > 1 => {
                self.forget_ended(id);
                true
            }
            _ => false,
        }
    }

    /// Forgets an ended session: its row, its holds.
    pub(crate) fn forget_ended(&self, id: SessionId) {
        let row = {
            let mut sessions = self.core.locked();
            let sessions = &mut *sessions;
            let Some(at) = sessions.ended.iter().position(|ended| ended.id == id) else {
                return;
            };
            sessions.unheld.extend(sessions.holds.drop_session(id));
            sessions.ended.remove(at).row
        };
        if !row {
            self.logs.remove(id);
            return;
        }
        let removed = self.core.store.begin().and_then(|mut tx| {
            tx.session_remove(id)?;
            tx.commit()
        });
        match removed {
            Ok(_) | Err(StoreError::NoSession(_)) => {}
            Err(error) => self.core.note_error(&error),
        }
    }
}

/// Returns the changes that free the numbers whose generation is known.
fn free_numbers(numbers: &[(Ino, Option<Generation>)]) -> Vec<RowChange> {
    let known = numbers.iter().filter_map(|(ino, generation)| {
        Some(InodeKey {
            ino: *ino,
            generation: (*generation)?,
        })
    });
    known.map(RowChange::FreeNumber).collect()
}
