//! Requests of a client about its own log: a digest, more room, durability.

use crate::error::{no, no_log};
use crate::health::Health;
use crate::kernel::{Core, KernelFs};
use crate::logs::LogStore;
use crate::ops::digest::Digests;
use crate::ops::record::Records;
use crate::session::state::Session;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::LogSeq;
use varve_format::session::{SESSION_SYNCED, SessionRow};
use varve_ipc::{IpcError, SYNC_RANGES_MAX};

/// Context of requests about logs.
pub(crate) struct LogRequests<'k> {
    core: Core<'k>,
    logs: &'k dyn LogStore,
    health: &'k Health,
    digests: Digests<'k>,
    records: Records<'k>,
}

impl<'k> LogRequests<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            logs: &*kernel.logs,
            health: &kernel.health,
            digests: Digests::of(kernel),
            records: Records::of(kernel),
        }
    }

    /// `Request::Digest`.
    pub(crate) fn digest_request(
        &self,
        session: &Arc<Session>,
        upto: LogSeq,
        wait: bool,
    ) -> Result<LogSeq, IpcError> {
        if self.core.store.latched().is_some() {
            return Err(no(libc::EIO));
        }
        let digested = varve_ipc::SessionPage::digested(&*session.page);
        if digested >= upto && upto > LogSeq(0) {
            return Ok(digested);
        }
        if !wait && self.core.lifecycle.background.load(Ordering::Acquire) {
            self.core.locked().to_digest.ask(session.id);
            self.core.lifecycle.digest_bell.ring();
            return Ok(digested);
        }
        self.digests
            .digest_session(session, None)
            .map_err(|error| self.core.refused(&error))
    }

    /// `Request::GrowLog`. The log of a session without a record has no space yet, whatever is asked for.
    pub(crate) fn grow_log(&self, session: &Session, len_bytes: u64) -> Result<u64, IpcError> {
        let Some(log) = &session.log else {
            return Err(no(libc::EROFS));
        };
        let limit = self
            .core
            .env
            .config
            .log_limit(self.core.store.devices().nvm.len_bytes());
        let chunk = varve_format::log::CHUNK_BYTES;
        if !len_bytes.is_multiple_of(chunk) || len_bytes > limit {
            return Err(no(libc::EINVAL));
        }
        self.records.make(session)?;
        let grown = self
            .health
            .log_work(session.id, &session.log_faults, "growing the log", || {
                session.allocate_near(|| log.grow(len_bytes))
            });
        grown.map_err(|error| no_log(&error))?;
        Ok(log.len_bytes())
    }

    /// `Request::SyncLog`: a sync that a client with the backing file does by itself after the first.
    pub(crate) fn sync_log(&self, session: &Session, ranges: &[(u64, u64)]) -> Result<(), IpcError> {
        let Some(log) = &session.log else {
            return Err(no(libc::EROFS));
        };
        if ranges.len() > SYNC_RANGES_MAX {
            return Err(no(libc::E2BIG));
        }
        // A client has each byte written once: more would load the disk to no purpose.
        let bytes = ranges
            .iter()
            .fold(0_u64, |sum, (_, len)| sum.saturating_add(*len));
        if bytes > 2 * log.len_bytes() {
            return Err(no(libc::EINVAL));
        }
        let synced = self
            .health
            .log_work(session.id, &session.log_faults, "sync of the log", || {
                self.logs.sync(session.id, &**log, ranges)
            });
        synced.map_err(|error| {
            tracing::warn!(session = %session.id, "a log cannot be made durable: {error}");
            match error {
                varve_media::MediaError::OutOfRange { .. } => no(libc::EINVAL),
                error => no_log(&error),
            }
        })?;
        if !self.logs.log_needs_sync(session.id) {
            return Ok(());
        }
        session.note_synced(|| self.put_synced(session))
    }

    /// Notes in the row that there is a log on the disk: from now on one that is missing is damage.
    fn put_synced(&self, session: &Session) -> Result<(), IpcError> {
        let put = self.core.store.begin().and_then(|mut tx| {
            let Some(row) = tx.session(session.id)? else {
                return Ok(false);
            };
            let flags = row.flags | SESSION_SYNCED;
            tx.session_put(&SessionRow { flags, ..row })?;
            tx.commit()?;
            Ok(true)
        });
        match put {
            Ok(true) => Ok(()),
            Ok(false) => Err(IpcError::Sealed),
            Err(error) => Err(self.core.refused(&error)),
        }
    }
}
