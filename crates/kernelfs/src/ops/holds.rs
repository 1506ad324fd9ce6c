//! Holds of clients on inodes, and freeing of inodes without a name when the last hold ends.

use crate::digest;
use crate::error::no;
use crate::kernel::{Core, KernelFs};
use crate::ops::digest::{Digests, LeaseView};
use crate::ops::rows::write_rows;
use crate::session::state::Session;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::InodeKey;
use varve_ipc::{HELD_MAX, IpcError};

/// Most inodes without a name that one transaction frees.
const FREED_AT_ONCE: usize = 64;
/// Milliseconds after which freeing them makes way for other work.
const FREE_MS: u64 = 50;

/// Context of holds, and of freeing inodes.
#[derive(Clone, Copy)]
pub(crate) struct HeldInodes<'k> {
    core: Core<'k>,
    digests: Digests<'k>,
}

impl<'k> HeldInodes<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) const fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            digests: Digests::of(kernel),
        }
    }

    /// Adds a client's holds on inodes.
    pub(crate) fn hold(&self, session: &Session, keys: &[InodeKey]) -> Result<(), IpcError> {
        if keys.len() > HELD_MAX {
            return Err(no(libc::E2BIG));
        }
        let keys: Vec<_> = keys
            .iter()
            .copied()
            .filter(|key| self.may_hold(session, *key, true))
            .collect();
        self.core.locked().hold(session.id, &keys)
    }

    /// Whether a client may claim to hold `key`. The lookups of an unprivileged client are forgotten when the
    /// daemon starts: then it may claim inodes of its user.
    pub(crate) fn may_hold(&self, session: &Session, key: InodeKey, resumes: bool) -> bool {
        if session.knows(key) {
            return true;
        }
        let own = resumes
            && self
                .core
                .store
                .get_key(key)
                .is_ok_and(|inode| inode.attr.uid == session.cred.uid);
        if own {
            session.learn(key);
        }
        own
    }

    /// Ends holds (last closes).
    pub(crate) fn drop_holds(&self, session: &Session, keys: &[InodeKey]) -> Result<(), IpcError> {
        if keys.len() > HELD_MAX {
            return Err(no(libc::E2BIG));
        }
        {
            let mut sessions = self.core.locked();
            for key in keys {
                // A lease keeps the hold.
                if sessions.table.mode(session.id, *key).is_none() {
                    sessions.unhold(session.id, *key);
                }
            }
        }
        self.free_or_leave();
        Ok(())
    }

    /// Frees inodes without a name here, unless a background thread does.
    pub(crate) fn free_or_leave(&self) {
        if self.core.locked().unheld.is_empty() {
            return;
        }
        if self.core.lifecycle.background.load(Ordering::Acquire) {
            self.core.lifecycle.bell.ring();
        } else {
            self.free_unheld();
        }
    }

    /// Frees inodes that lost their last hold and have no name, for about [`FREE_MS`]: the ends of sessions,
    /// and sessions that wait for their leases, wait for the thread that does this. The rest is left to the
    /// next tick.
    pub(crate) fn free_unheld(&self) {
        self.free_unheld_for(FREE_MS);
    }

    /// As [`free_unheld`](Self::free_unheld), for `ms` milliseconds; returns whether the time was too short.
    pub(crate) fn free_unheld_for(&self, ms: u64) -> bool {
        if self.core.env.in_grace() || self.core.store.latched().is_some() {
            return false;
        }
        let started_ms = self.core.now_ms();
        loop {
            let keys: Vec<_> = {
                let mut sessions = self.core.locked();
                let next = || sessions.unheld.pop_first();
                std::iter::from_fn(next).take(FREED_AT_ONCE).collect()
            };
            if keys.is_empty() || !self.free_these(&keys) {
                return false;
            }
            if self.core.now_ms() >= started_ms.saturating_add(ms) {
                self.core.lifecycle.bell.ring();
                return true;
            }
        }
    }

    /// Frees those of `keys` that may be freed; inodes that need more than one transaction are unheld again.
    /// `false`: not possible now.
    fn free_these(&self, keys: &[InodeKey]) -> bool {
        let change = self.core.begin_change();
        let freed = digest::free_orphans(self.core.store, keys, &LeaseView::of(self.core));
        drop(change);
        match freed {
            Ok(freed) => {
                self.core.locked().unheld.extend(freed.left);
                self.forget_freed(&freed.gone);
                true
            }
            // An inode that is damaged, or for which there is no space, does not keep the others.
            Err(error) if keys.len() > 1 && !error.stops_writing() => {
                let kept = keys
                    .iter()
                    .position(|key| !self.free_these(std::slice::from_ref(key)));
                if let Some(kept) = kept {
                    self.core.locked().unheld.extend(&keys[kept + 1..]);
                }
                kept.is_none()
            }
            Err(error) if error.is_no_space() => {
                self.core.locked().unheld.extend(keys);
                self.digests.wait_for_space(&error);
                false
            }
            Err(error) => {
                tracing::error!("inode {:?} without a name cannot be freed: {error}", keys.first());
                self.core.note_error(&error);
                !error.stops_writing()
            }
        }
    }

    /// Removes leases, holds and rows of inodes that are gone.
    fn forget_freed(&self, keys: &[InodeKey]) {
        let sessions: Vec<_> = {
            let mut sessions = self.core.locked();
            for key in keys {
                sessions.table.forget_inode(*key);
                sessions.holds.forget(*key);
            }
            sessions.unlearn(keys);
            let with_row = |session: &Arc<Session>| {
                let row = |key: &InodeKey| sessions.rows.find(session.id, *key).is_some();
                keys.iter().any(row)
            };
            let sessions = sessions
                .entries
                .values()
                .map(|member| Arc::clone(&member.session));
            sessions.filter(with_row).collect()
        };
        for session in sessions {
            // The session cannot end between the two steps: rows end before their session.
            let _one_at_a_time = session.row_changes.lock();
            let mut changes = Vec::new();
            {
                let mut sessions = self.core.locked();
                for key in keys {
                    changes.extend(sessions.rows.end_change(session.id, *key));
                    sessions.rows.end(session.id, *key);
                }
            }
            if let Err(error) = write_rows(self.core, &changes) {
                self.core.note_error(&error);
            }
        }
    }
}
