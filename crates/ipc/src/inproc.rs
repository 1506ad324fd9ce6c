//! The transport within one process: a call is a function call. Owns the link; refuses to know the service
//! behind it.

use crate::{IpcError, Link, Request, Response, Service, Upcall, UpcallQueue};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use varve_format::SessionId;

/// A session's link to a daemon in this process; dropping it is the client's death.
pub struct InprocLink {
    service: Arc<dyn Service>,
    session: SessionId,
    upcalls: Arc<UpcallQueue>,
    cut: AtomicBool,
}

impl InprocLink {
    /// Links `session` of `service`.
    #[must_use]
    pub fn new(service: Arc<dyn Service>, session: SessionId, upcalls: Arc<UpcallQueue>) -> Self {
        Self {
            service,
            session,
            upcalls,
            cut: AtomicBool::new(false),
        }
    }

    /// The session.
    #[must_use]
    pub const fn session(&self) -> SessionId {
        self.session
    }

    /// Cuts the link as if the other side had died: every later call fails with `Gone`. The daemon is told.
    pub fn cut(&self) {
        if !self.cut.swap(true, Ordering::AcqRel) {
            self.upcalls.close();
            self.service.gone(self.session);
        }
    }
}

impl Link for InprocLink {
    fn call(&self, request: Request) -> Result<Response, IpcError> {
        if self.cut.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the link was cut".into()));
        }
        match request {
            Request::Hello(_) => Err(IpcError::Protocol("a second Hello on one link".into())),
            request => self.service.call(self.session, request),
        }
    }

    fn upcall(&self, timeout: Duration) -> Result<Option<Upcall>, IpcError> {
        self.upcalls.pop(timeout)
    }
}

impl Drop for InprocLink {
    fn drop(&mut self) {
        self.cut();
    }
}
