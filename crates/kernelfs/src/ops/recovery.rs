//! Sessions of an earlier daemon at a start: sealed if they were not, digested, ended. The end of a single
//! session is [`crate::ops::teardown`]'s.

use crate::digest;
use crate::health::Health;
use crate::kernel::{BaseLimit, Core, KernelFs};
use crate::leases::grants::RowChange;
use crate::logs::LogStore;
use crate::ops::rows::write_rows;
use crate::ops::teardown::Teardown;
use crate::process::ProcessId;
use crate::session::state::{Session, SessionParts};
use crate::session::table::{Ended, Phase, Reclaim, SessionEntry, SharedMode};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::seeded::{Bug, armed};
use varve_format::session::{SESSION_MOUNT, SESSION_SYNCED, SessionRow, SessionState};
use varve_format::{Ino, InodeKey, LogSeq, Seal, SessionId, TxId};
use varve_ipc::{ClientKind, Page, Peer};
use varve_store::{InodeSlot, StoreError};

/// Context of ending the sessions of an earlier daemon.
pub(crate) struct Recovery<'k> {
    core: Core<'k>,
    logs: &'k dyn LogStore,
    health: &'k Health,
    teardown: Teardown<'k>,
}

impl<'k> Recovery<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            logs: &*kernel.logs,
            health: &kernel.health,
            teardown: Teardown::of(kernel),
        }
    }

    /// Ends all sessions of an earlier daemon. The pages of `clients` say SEALED already.
    ///
    /// Of the store and the logs. A device's error is not returned: it makes the pool read-only, and the logs
    /// keep their entries.
    pub(crate) fn recover(&self, base_limit: TxId, clients: BTreeSet<SessionId>) -> Result<(), StoreError> {
        let result = self.recover_all(BaseLimit::AtStart(base_limit), clients);
        match result {
            Err(error) if error.is_device() => {
                self.core.stop_writing(&error);
                Ok(())
            }
            other => other,
        }
    }

    fn recover_all(&self, limit: BaseLimit, mut clients: BTreeSet<SessionId>) -> Result<(), StoreError> {
        let rows = self.core.store.sessions()?;
        for row in &rows {
            clients.remove(&row.id);
        }
        // Those had no record, and may hold deleted inodes like any other.
        let has_clients = !rows.is_empty() || !clients.is_empty();
        self.core.locked().unrecorded = clients;
        if !has_clients {
            // No client can return: deleted inodes need not be kept for them.
            self.core.env.grace_until_ms.store(0, Ordering::Release);
        }
        self.core.locked().earlier = rows.iter().map(|row| row.id).collect();
        // An unmounted mount has no row.
        for row in rows.iter().filter(|row| row.flags & SESSION_MOUNT != 0) {
            self.core
                .locked()
                .cached
                .note_sealed(row.id, self.core.env.clock.moment());
        }
        let numbers = self.take_up_grants(&rows)?;
        let sealed = self.revive_all(rows, limit)?;
        let revived = sealed
            .iter()
            .map(|(session, _)| (session.id, Arc::clone(session)));
        self.core.locked().revived = revived.collect();
        let mut rest = sealed.into_iter();
        while let Some((session, seal)) = rest.next() {
            match self.teardown.finish_session(&session, &seal, true, limit) {
                Ok(()) => {}
                Err(error) if error.stops_writing() => {
                    // No client reads blocks that a torn overwrite left.
                    if self.core.store.is_torn() {
                        let others = rest.map(|(session, _)| session);
                        for session in std::iter::once(session).chain(others) {
                            self.keep_leases(&session)?;
                        }
                    }
                    return Err(error);
                }
                Err(error) => {
                    tracing::error!(session = %session.id, "a sealed log cannot be digested yet: {error}");
                    self.core.store.note_damage(&error);
                    self.keep_leases(&session)?;
                    self.core.locked().unfinished.push((session, seal, true));
                }
            }
        }
        self.core.locked().revived.clear();
        self.teardown.note_redone();
        self.clear_left(numbers)?;
        self.end_shares()?;
        if !armed(Bug::OrphansLeftAtStart) {
            let orphans = self.core.store.orphans()?;
            self.core.locked().unheld.extend(orphans);
        }
        Ok(())
    }

    /// Frees the blocks that files have beyond their sizes, as a share leaves them that was cut off. No
    /// client knows them.
    fn end_shares(&self) -> Result<(), StoreError> {
        for key in self.core.store.orphans()? {
            if self.core.store.get_key(key)?.attr.nlink == 0 {
                continue;
            }
            match digest::free_tail(self.core.store, key) {
                Ok(()) => {}
                Err(error) if error.stops_writing() => return Err(error),
                // The next change of the file frees them.
                Err(error) => {
                    tracing::warn!(%key, "blocks beyond a file's end are left: {error}");
                    self.core.store.note_damage(&error);
                }
            }
        }
        Ok(())
    }

    /// Takes over the grants of sessions that have not ended, removes the others. Returns the inode numbers
    /// that were reserved for the sessions that have not ended.
    fn take_up_grants(&self, rows: &[SessionRow]) -> Result<Vec<Ino>, StoreError> {
        let ending: BTreeSet<_> = rows
            .iter()
            .filter(|row| !matches!(row.state, SessionState::Ended(_)))
            .map(|row| row.id)
            .collect();
        let (mut left, mut numbers) = (Vec::new(), Vec::new());
        for grant in self.core.store.grants()? {
            if ending.contains(&grant.session) {
                self.core.locked().rows.insert(grant);
            } else {
                // A crash came between the end of the session and the removal of this row.
                left.push(RowChange::Remove(grant.lease));
            }
        }
        write_rows(self.core, &left)?;
        for id in &ending {
            let reserved = self.core.locked().rows.numbers(*id);
            numbers.extend(reserved.into_iter().map(|(ino, _)| ino));
        }
        Ok(numbers)
    }

    /// Revives the sessions that have not ended, with their seals, oldest first.
    fn revive_all(
        &self,
        rows: Vec<SessionRow>,
        limit: BaseLimit,
    ) -> Result<Vec<(Arc<Session>, Seal)>, StoreError> {
        let mut sealed = Vec::new();
        for row in rows {
            let seal = match &row.state {
                SessionState::Ended(seal) => {
                    self.core.locked().ended.push(ended(&row, seal.clone()));
                    self.logs.remove(row.id);
                    continue;
                }
                SessionState::Sealed(seal) => Some(seal.clone()),
                SessionState::Live => None,
            };
            let session = Arc::new(self.revive(&row)?);
            // The earlier daemon's findings at the log's end are not known any more.
            if seal.is_some() || session.log.is_none() {
                session.suspect();
            }
            let seal = match seal {
                Some(seal) => seal,
                None => self.teardown.persist_seal(&session, limit)?,
            };
            sealed.push((session, seal));
        }
        // Oldest first. Logs of different sessions commute: a lease was passed on only when its holder's log
        // was digested.
        sealed.sort_by_key(|(session, _)| session.id);
        Ok(sealed)
    }

    /// Frees unused reserved numbers and removes logs without a session.
    fn clear_left(&self, numbers: Vec<Ino>) -> Result<(), StoreError> {
        let unfinished: BTreeSet<_> = self
            .core
            .locked()
            .unfinished
            .iter()
            .map(|(session, ..)| session.id)
            .collect();
        // A row on media does not hold its numbers' generations: another session's inode could have one of
        // them, until all sessions are digested.
        if unfinished.is_empty() {
            let mut free = Vec::new();
            for ino in numbers {
                if let InodeSlot::Reserved(generation) = self.core.store.slot(ino)? {
                    free.push(RowChange::FreeNumber(InodeKey { ino, generation }));
                }
            }
            write_rows(self.core, &free)?;
        }
        let unrecorded = self.core.locked().unrecorded.clone();
        for id in self.logs.list()? {
            if unrecorded.contains(&id) {
                self.logs.remove_log(id);
            } else if !unfinished.contains(&id) {
                self.logs.remove(id);
            }
        }
        Ok(())
    }

    /// Keeps the leases of a session of an earlier daemon whose log waits for space: no other session gets
    /// them before it is digested.
    fn keep_leases(&self, session: &Arc<Session>) -> Result<(), StoreError> {
        let mut keys = Vec::new();
        let held = self.core.locked().rows.held(session.id);
        for (ino, known) in held {
            // The inode's block may be the unreadable one.
            let generation = match known {
                Some(generation) => Some(generation),
                None => match self.core.store.slot(ino)? {
                    InodeSlot::Used(inode) => Some(inode.attr.key.generation),
                    InodeSlot::Reserved(generation) => Some(generation),
                    InodeSlot::Free(_) => None,
                },
            };
            keys.extend(generation.map(|generation| InodeKey { ino, generation }));
        }
        let now_ms = self.core.now_ms();
        let mut sessions = self.core.locked();
        for key in keys {
            sessions.holds.add(session.id, key);
            sessions.table.add_new(session.id, key, now_ms);
        }
        sessions.entries.insert(
            session.id,
            SessionEntry {
                session: Arc::clone(session),
                phase: Phase::Sealing,
                shared_mode: SharedMode::at_entry(true),
                barriers: BTreeMap::new(),
                reclaim: Reclaim::None,
            },
        );
        Ok(())
    }

    /// Makes a session of an earlier daemon from its row.
    fn revive(&self, row: &SessionRow) -> Result<Session, StoreError> {
        let session = Session::new(SessionParts {
            id: row.id,
            kind: if row.flags & SESSION_MOUNT != 0 {
                ClientKind::Shim
            } else {
                ClientKind::Linked
            },
            peer: Peer {
                pid: row.pid,
                uid: row.uid,
                // Not known yet: the process' group, if it lives.
                gid: u32::MAX,
            },
            privileged: self.core.env.is_privileged(row.uid),
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
        session.set_log_synced(row.flags & SESSION_SYNCED != 0);
        session.reader.lock().digested = row.digested;
        *session.turn.last.lock() = row.last_forwarded.number;
        // A power cut takes a log that was never synced.
        let may_be_gone = self.logs.needs_sync() && row.flags & SESSION_SYNCED == 0;
        if session.log.is_none()
            && (row.digested > LogSeq(0) || row.flags & SESSION_SYNCED != 0)
            && !may_be_gone
        {
            let text = "the log is gone; what was not digested is lost";
            tracing::warn!(session = %row.id, "{text}");
            self.health.log_damaged(row.id, text.into());
        }
        Ok(session)
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
