//! A session's record on media, its row and the space of its log: made before the first change that rests on it.
//! A client that only reads costs no write and no flush.

use crate::error::no_log;
use crate::health::Health;
use crate::kernel::{Core, KernelFs};
use crate::logs::LogStore;
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use varve_format::session::SessionState;
use varve_format::{LastForwarded, LogSeq};
use varve_ipc::IpcError;
use varve_store::StoreError;

/// Context of making records.
#[derive(Clone, Copy)]
pub(crate) struct Records<'k> {
    core: Core<'k>,
    logs: &'k dyn LogStore,
    health: &'k Health,
    teardown: Teardown<'k>,
}

impl<'k> Records<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            logs: &*kernel.logs,
            health: &kernel.health,
            teardown: Teardown::of(kernel),
        }
    }

    /// Makes the record of a session, if there is none. Durable when this returns: the log first, since a row
    /// says that there is one. Must precede any other change that names the session.
    ///
    /// # Errors
    /// `Sealed`; the device's; `ENOSPC` where the log or the row has no room.
    #[inline]
    pub(crate) fn make(&self, session: &Session) -> Result<(), IpcError> {
        if session.is_recorded() {
            return Ok(());
        }
        session.record(|| {
            self.start_log(session)?;
            self.put_row(session)
        })
    }

    fn start_log(&self, session: &Session) -> Result<(), IpcError> {
        let Some(log) = &session.log else { return Ok(()) };
        let nvm = &self.core.store.devices().nvm;
        let len_bytes = self.core.env.config.log_at_first(nvm.len_bytes());
        let started = self
            .health
            .log_work(session.id, &session.log_faults, "starting the log", || {
                session.allocate_near(|| self.logs.start(session.id, &**log, len_bytes))
            });
        started.map_err(|error| {
            tracing::error!("no room for a session's log: {error}");
            no_log(&error)
        })
    }

    fn put_row(&self, session: &Session) -> Result<(), IpcError> {
        let row = session.row(SessionState::Live, LogSeq(0), LastForwarded::default());
        loop {
            let put = self.core.store.begin().and_then(|mut tx| {
                tx.session_put(&row)?;
                tx.commit()
            });
            match put {
                Ok(_) => return Ok(()),
                // Rows of ended sessions make room: of processes that are gone, then of those that have many.
                Err(StoreError::TableFull(_))
                    if self.teardown.forget_dead() || self.teardown.forget_crowd(true) => {}
                Err(error) => return Err(self.core.refused(&error)),
            }
        }
    }
}
