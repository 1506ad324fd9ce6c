//! Watches in mounts' kernels: mounts report the watched inodes; sessions see a change in their pages, and
//! request the inodes.

use crate::error::no;
use crate::session::state::Session;
use crate::session::table::{SessionTable, Sessions};
use varve_format::SessionId;
use varve_ipc::{ClientKind, IpcError, WATCHED_MAX, Watched};

/// Sets a mount's watched inodes. Every session's page shows the change when this returns.
///
/// # Errors
/// EPERM for a session of a linked program or of an ordinary user; E2BIG for more inodes than may be named.
pub(crate) fn set_watched(sessions: &Sessions, session: &Session, watched: Watched) -> Result<(), IpcError> {
    if session.kind != ClientKind::Shim || !session.privileged {
        return Err(no(libc::EPERM));
    }
    if watched.numbers.len() > WATCHED_MAX {
        return Err(no(libc::E2BIG));
    }
    let mut sessions = sessions.table.lock();
    // A mount that was sealed meanwhile has no watches.
    if sessions.live(session.id).is_none() {
        return Err(IpcError::Sealed);
    }
    sessions.note_watched(session.id, watched);
    Ok(())
}

/// Returns the number of the last change, and the watched inodes.
pub(crate) fn watched(sessions: &Sessions) -> (u64, Watched) {
    let sessions = sessions.table.lock();
    (sessions.watches.generation(), sessions.watches.watched().clone())
}

impl SessionTable {
    /// Sets a mount's watched inodes (none, when it ends) and shows a change in all pages.
    pub(crate) fn note_watched(&mut self, mount: SessionId, watched: Watched) {
        if self.watches.set(mount, watched) {
            let generation = self.watches.generation();
            for entry in self.entries.values() {
                entry.session.page.set_watched(generation);
            }
        }
    }
}
