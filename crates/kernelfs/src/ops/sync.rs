//! `syncfs`: when it returns, operations that any session completed before it are durable. Owns the waiting;
//! digesting a log makes it durable here.
//!
//! A log is digested up to the first gap in its numbers, and a thread may be about to write an entry with a
//! lower number than a call that has returned. So the highest number of each log is read first, and the log
//! is digested until it reaches that number.

use crate::error::no;
use crate::health::Health;
use crate::kernel::{Core, KernelFs};
use crate::ops::digest::Digests;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use varve_format::{LogSeq, SessionId};
use varve_ipc::IpcError;

/// Pause between two checks whether a gap is filled.
const GAP_NAP: Duration = Duration::from_micros(200);

/// Result of a sync.
#[derive(Debug, Serialize)]
pub(crate) struct Synced {
    /// Sessions whose logs were synced.
    sessions: usize,
    /// Entries that were digested for it.
    entries: u64,
}

/// Context of making all logs durable.
pub(crate) struct Syncer<'k> {
    core: Core<'k>,
    health: &'k Health,
    digests: Digests<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Syncer<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            health: &kernel.health,
            digests: Digests::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// Makes durable the logged operations of all sessions but `except`.
    ///
    /// # Errors
    /// EIO if the pool is latched or a log cannot be read, ENOSPC, ETIMEDOUT if a client leaves a gap in its
    /// log for longer than `wait_ms`; every log was tried.
    pub(crate) fn sync_all(&self, except: Option<SessionId>) -> Result<Synced, IpcError> {
        if self.core.store.latched().is_some() {
            return Err(no(libc::EIO));
        }
        let sessions: Vec<_> = {
            let sessions = self.core.locked();
            let others = sessions.entries.values().map(|member| &member.session);
            others
                .filter(|session| Some(session.id) != except)
                .cloned()
                .collect()
        };
        let newest: Vec<_> = sessions
            .iter()
            .map(|session| self.newest_logged(session))
            .collect();
        let mut result = self
            .digests
            .digest_all()
            .map_err(|error| self.core.refused(&error));
        self.teardown.finish_sealed();
        let mut entries = 0;
        for (session, newest) in sessions.iter().zip(newest) {
            let done = newest.and_then(|(digested, newest)| {
                self.sync_session(session, newest)?;
                Ok(newest.0.saturating_sub(digested.0))
            });
            match done {
                Ok(done) => entries += done,
                Err(error) => result = result.and(Err(error)),
            }
        }
        let sessions = sessions.len();
        result.map(|()| Synced { sessions, entries })
    }

    /// Returns the digested number of a log, and the highest number in it.
    fn newest_logged(&self, session: &Session) -> Result<(LogSeq, LogSeq), IpcError> {
        let reader = session.reader.lock();
        let Some(log) = session.log.as_deref() else {
            return Ok((reader.digested, reader.digested));
        };
        match reader.log.newest(log) {
            Ok(newest) => Ok((reader.digested, newest.max(reader.digested))),
            Err(error) => {
                self.health
                    .log_failed(session.id, Some(&session.log_faults), &error);
                Err(no(libc::EIO))
            }
        }
    }

    /// Digests a log up to `newest`, or to its seal.
    fn sync_session(&self, session: &Arc<Session>, newest: LogSeq) -> Result<(), IpcError> {
        let most = Duration::from_millis(self.core.env.config.wait_ms);
        let (mut began, mut before) = (self.core.env.clock.moment(), LogSeq(0));
        loop {
            let digested = self
                .digests
                .digest_session(session, None)
                .map_err(|error| self.core.refused(&error))?;
            if digested >= newest {
                return Ok(());
            }
            // Operations behind the seal of an ended session did not happen; operations before it are
            // digested when the session is gone.
            self.teardown.seal_doomed();
            self.teardown.finish_sealed();
            if !self.core.locked().entries.contains_key(&session.id) {
                return Ok(());
            }
            if digested > before {
                (began, before) = (self.core.env.clock.moment(), digested);
            }
            if self.core.env.clock.moment() - began >= most {
                return Err(no(libc::ETIMEDOUT));
            }
            self.core.env.clock.pause(GAP_NAP);
        }
    }
}
