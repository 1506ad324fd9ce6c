//! Mounts beside other sessions: mounts are told that others use the pool, and a change waits for the cached
//! replies of a mount whose session was sealed. A live mount keeps leases that others want for a change until its
//! cached replies have expired (`libfs/src/kernel_cache/dentries.rs`), and says of others when that is.

use crate::kernel::{Core, KernelFs};
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use crate::session::table::{Phase, SessionEntry, SessionTable, SharedMode};
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_format::{InodeKey, SessionId};
use varve_ipc::{ClientKind, IpcError, Upcall};

/// Context of shared mode.
#[derive(Clone, Copy)]
pub(crate) struct Sharing<'k> {
    core: Core<'k>,
    teardown: Teardown<'k>,
}

impl<'k> Sharing<'k> {
    /// Borrows its parts from the daemon.
    pub(crate) fn of(kernel: &'k KernelFs) -> Self {
        Self {
            core: Core::of(kernel),
            teardown: Teardown::of(kernel),
        }
    }

    /// Announces shared mode to the mounts, and waits until they have noted it.
    pub(crate) fn announce_shared_mode(&self, newcomer: SessionId) {
        let until_ms = self.core.now_ms() + self.core.env.config.lease_ms;
        {
            let mut sessions = self.core.locked();
            let lonely: Vec<_> = sessions
                .entries
                .iter()
                .filter(|(id, member)| **id != newcomer && !member.shared_mode.noted)
                .map(|(id, member)| (*id, member.session.kind))
                .collect();
            for (id, kind) in lonely {
                if let Some(member) = sessions.entries.get_mut(&id) {
                    let shared_mode = &mut member.shared_mode;
                    if kind != ClientKind::Shim {
                        *shared_mode = SharedMode::at_entry(true);
                        continue;
                    }
                    // Later sessions wait for the same answer.
                    if !shared_mode.announced {
                        shared_mode.announced = true;
                        shared_mode.until_ms = until_ms;
                        sessions.send(id, Upcall::Sharing);
                    }
                }
            }
        }
        // A session that ended meanwhile is told by its first request.
        let _ = self.await_mounts(newcomer);
    }

    /// Checks that a session may wait on.
    fn may_wait(&self, sessions: &SessionTable, id: SessionId) -> Result<(), IpcError> {
        if self.core.lifecycle.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        sessions.live(id).map(drop).ok_or(IpcError::Sealed)
    }

    /// Waits until all mounts but `newcomer` have noted shared mode. Bounded: a mount that does not answer in
    /// time is sealed.
    ///
    /// # Errors
    /// The newcomer's session, or the daemon, has ended.
    fn await_mounts(&self, newcomer: SessionId) -> Result<(), IpcError> {
        let mut sessions = self.core.locked();
        loop {
            self.may_wait(&sessions, newcomer)?;
            let late = |member: &&SessionEntry| {
                let shared_mode = &member.shared_mode;
                member.session.id != newcomer
                    && member.session.kind == ClientKind::Shim
                    && member.phase == Phase::Live
                    && shared_mode.announced
                    && !shared_mode.noted
            };
            let first = sessions.entries.values().find(late);
            let Some((id, until_ms)) = first.map(|member| (member.session.id, member.shared_mode.until_ms))
            else {
                return Ok(());
            };
            if self.core.now_ms() >= until_ms {
                drop(sessions);
                self.teardown
                    .seal_session(id, "it did not take note of other sessions in time");
                self.teardown.finish_or_leave();
                sessions = self.core.locked();
                continue;
            }
            let time = Duration::from_millis(20);
            self.core
                .nap(&self.core.sessions.sharing_changed, &mut sessions, time);
        }
    }

    /// Waits until the kernels of other mounts have no cached replies about `keys`, which are about to change,
    /// and those of mounts with sealed sessions none at all. To be called with leases on `keys`: a mount that
    /// is sealed, or gives them back, later cannot have had them.
    ///
    /// # Errors
    /// The session, or the daemon, has ended: nothing may be changed.
    pub(crate) fn await_cached_replies(
        &self,
        session: &Session,
        keys: impl IntoIterator<Item = InodeKey>,
    ) -> Result<(), IpcError> {
        let sessions = self.core.locked();
        let until = sessions.cached.until(session.id, session.predecessor, keys);
        drop(sessions);
        loop {
            let left = until.saturating_sub(self.core.env.tick_moment());
            if left.is_zero() {
                return Ok(());
            }
            self.core.env.clock.pause(left.min(Duration::from_millis(20)));
            self.may_wait(&self.core.locked(), session.id)?;
        }
    }

    /// Notes that a mount knows of others.
    pub(crate) fn shared_mode_noted(&self, id: SessionId) {
        if let Some(member) = self.core.locked().entries.get_mut(&id) {
            member.shared_mode.noted |= member.shared_mode.announced;
        }
        self.core.sessions.sharing_changed.notify_all();
    }

    /// Tells a mount that it is alone when it has been so for `solo_ms`: the others are gone, and their logs
    /// digested.
    pub(crate) fn note_exclusive(&self, now_ms: u64) {
        let mut sessions = self.core.locked();
        let alone_ms = now_ms.saturating_sub(sessions.alone_since_ms);
        if sessions.entries.len() != 1 || alone_ms < self.core.env.config.solo_ms {
            return;
        }
        let shim = sessions
            .entries
            .values_mut()
            .find(|member| member.shared_mode.noted);
        let id = shim.map(|member| {
            member.shared_mode = SharedMode::at_entry(false);
            member.session.id
        });
        if let Some(id) = id {
            sessions.send(id, Upcall::Exclusive);
        }
    }
}
