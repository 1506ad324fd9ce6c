//! Mounts say what is watched in their kernels; sessions are told by their pages, and ask for the inodes.

use crate::error::no;
use crate::session::state::Session;
use crate::session::table::{SessionTable, Sessions};
use varve_format::SessionId;
use varve_ipc::{ClientKind, IpcError, WATCHED_MAX, Watched};

/// What a mount says. Every session's page says so when this returns.
///
/// # Errors
/// EPERM for a session that is no mount's, or an ordinary user's; E2BIG for more inodes than may be named.
pub(crate) fn set_watched(sessions: &Sessions, session: &Session, watched: Watched) -> Result<(), IpcError> {
    if session.kind != ClientKind::Shim || !session.privileged {
        return Err(no(libc::EPERM));
    }
    if watched.numbers.len() > WATCHED_MAX {
        return Err(no(libc::E2BIG));
    }
    let mut sessions = sessions.table.lock();
    // One that was sealed meanwhile has said its last.
    if sessions.live(session.id).is_none() {
        return Err(IpcError::Sealed);
    }
    sessions.note_watched(session.id, watched);
    Ok(())
}

/// What is watched, and since which change.
pub(crate) fn watched(sessions: &Sessions) -> (u64, Watched) {
    let sessions = sessions.table.lock();
    (sessions.watches.generation(), sessions.watches.watched().clone())
}

impl SessionTable {
    /// Has all pages say what a mount says (nothing, when it ends).
    pub(crate) fn note_watched(&mut self, mount: SessionId, watched: Watched) {
        if self.watches.set(mount, watched) {
            let generation = self.watches.generation();
            for entry in self.entries.values() {
                entry.session.page.set_watched(generation);
            }
        }
    }
}
