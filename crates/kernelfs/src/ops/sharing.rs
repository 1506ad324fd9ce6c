//! The change of a mount to shared mode and back: its kernel caches names and attributes only in exclusive
//! mode, so other sessions wait before their first change until it does not.

use crate::kernel::{Core, KernelFs};
use crate::ops::teardown::Teardown;
use crate::session::state::Session;
use crate::session::table::{Phase, SessionEntry, SessionTable, SharedMode};
use std::sync::atomic::Ordering;
use std::time::Duration;
use varve_format::SessionId;
use varve_ipc::{ClientKind, DENTRY_TTL_MAX, IpcError, Upcall};

/// Upper bound, on top of the lease timeout, on how long a mount may take to confirm that its kernel's cached
/// dentries and attributes have expired.
const ANNOUNCED_MOST_MS: u64 = 1_500;

/// Factor on the time that other sessions had to wait before their first change: a mount stays in shared mode
/// for the product after they are gone.
const EXCLUSIVE_PER_WAIT: u64 = 10;

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
        let until_ms = self.core.now_ms() + self.core.env.config.lease_ms + ANNOUNCED_MOST_MS;
        {
            let mut sessions = self.core.locked();
            let lonely: Vec<_> = sessions
                .entries
                .iter()
                .filter(|(id, member)| **id != newcomer && !member.shared_mode.entered)
                .map(|(id, member)| (*id, member.session.kind))
                .collect();
            for (id, kind) in lonely {
                if let Some(member) = sessions.entries.get_mut(&id) {
                    let shared_mode = &mut member.shared_mode;
                    if kind != ClientKind::Shim {
                        *shared_mode = SharedMode::at_entry(true);
                        continue;
                    }
                    // Later sessions wait for the same answers.
                    if !shared_mode.announced {
                        shared_mode.announced = true;
                        shared_mode.until_ms = until_ms;
                        sessions.send(id, Upcall::Sharing);
                    }
                }
            }
        }
        // A session that ended meanwhile is told by its first request.
        let _ = self.await_mounts(newcomer, |shared_mode| shared_mode.noted);
    }

    /// Checks that a session may wait on.
    fn may_wait(&self, sessions: &SessionTable, id: SessionId) -> Result<(), IpcError> {
        if self.core.lifecycle.stopping.load(Ordering::Acquire) {
            return Err(IpcError::Gone("the daemon is stopping".into()));
        }
        sessions.live(id).map(drop).ok_or(IpcError::Sealed)
    }

    /// Waits until `so_far` holds for all mounts but `newcomer` to which shared mode was announced. Bounded:
    /// a mount that does not answer in time is sealed.
    ///
    /// # Errors
    /// The newcomer's session, or the daemon, has ended.
    fn await_mounts(
        &self,
        newcomer: SessionId,
        so_far: impl Fn(&SharedMode) -> bool,
    ) -> Result<(), IpcError> {
        let mut sessions = self.core.locked();
        loop {
            self.may_wait(&sessions, newcomer)?;
            let late = |member: &&SessionEntry| {
                let shared_mode = &member.shared_mode;
                member.session.id != newcomer
                    && member.session.kind == ClientKind::Shim
                    && member.phase == Phase::Live
                    && shared_mode.announced
                    && !so_far(shared_mode)
            };
            let first = sessions.entries.values().find(late);
            let Some((id, until_ms)) = first.map(|member| (member.session.id, member.shared_mode.until_ms))
            else {
                return Ok(());
            };
            if self.core.now_ms() >= until_ms {
                drop(sessions);
                self.teardown
                    .seal_session(id, "it did not give its kernel's caches up in time");
                self.teardown.finish_or_leave();
                sessions = self.core.locked();
                continue;
            }
            let time = Duration::from_millis(20);
            self.core
                .nap(&self.core.sessions.sharing_changed, &mut sessions, time);
        }
    }

    /// Admits a session to changes, or makes it wait until no kernel of a mount caches answers from before
    /// the session came. An admission is final: no mount returns to exclusive mode while the session lives.
    ///
    /// Reading needs no such wait. Until the first newcomer is admitted, only the mount itself changes
    /// anything, and its kernel knows of its own changes.
    ///
    /// # Errors
    /// `Sealed`: the session ended meanwhile. `Gone`: the daemon did.
    pub(crate) fn admit_changes(&self, session: &Session) -> Result<(), IpcError> {
        if session.may_change() {
            return Ok(());
        }
        let began_ms = self.core.now_ms();
        self.await_mounts(session.id, |shared_mode| shared_mode.entered)?;
        self.await_timeouts(session.id)?;
        let waited_ms = self.core.now_ms().saturating_sub(began_ms);
        let mut sessions = self.core.locked();
        // A stopped mount took longer; that is no normal wait.
        let counted_ms = waited_ms.min(DENTRY_TTL_MAX.as_millis() as u64);
        sessions.shared_mode_waited_ms = sessions.shared_mode_waited_ms.max(counted_ms);
        if sessions.live(session.id).is_none() {
            return Err(IpcError::Sealed);
        }
        session.admit_changes();
        Ok(())
    }

    /// Waits until no kernel caches answers of a mount whose session has ended.
    fn await_timeouts(&self, newcomer: SessionId) -> Result<(), IpcError> {
        loop {
            let until = {
                let sessions = self.core.locked();
                self.may_wait(&sessions, newcomer)?;
                sessions.cached.until
            };
            let left = until.saturating_sub(self.core.env.clock.moment());
            if left.is_zero() {
                return Ok(());
            }
            self.core.env.clock.pause(left.min(Duration::from_millis(20)));
        }
    }

    /// Notes that a mount's new answers are not cached any more.
    pub(crate) fn shared_mode_noted(&self, id: SessionId) {
        if let Some(member) = self.core.locked().entries.get_mut(&id) {
            member.shared_mode.noted |= member.shared_mode.announced;
        }
        self.core.sessions.sharing_changed.notify_all();
    }

    /// Notes that a mount's kernel caches have expired.
    pub(crate) fn shared_mode_ack(&self, id: SessionId) {
        if let Some(member) = self.core.locked().entries.get_mut(&id)
            && member.shared_mode.announced
        {
            member.shared_mode = SharedMode::at_entry(true);
        }
        self.core.sessions.sharing_changed.notify_all();
    }

    /// Tells a mount that it is exclusive again when it has been alone long enough: the others are gone, and
    /// their logs digested. It takes longer if others had to wait for the kernel above the mount, so that at
    /// most a tenth of the time is spent on such waits, however often others come and go.
    pub(crate) fn note_exclusive(&self, now_ms: u64) {
        let mut sessions = self.core.locked();
        let pause_ms = sessions.shared_mode_waited_ms.saturating_mul(EXCLUSIVE_PER_WAIT);
        let alone_ms = now_ms.saturating_sub(sessions.alone_since_ms);
        if sessions.entries.len() != 1 || alone_ms < pause_ms.max(self.core.env.config.solo_ms) {
            return;
        }
        let shim = sessions
            .entries
            .values_mut()
            .find(|member| member.shared_mode.entered);
        let id = shim.map(|member| {
            member.shared_mode = SharedMode::at_entry(false);
            member.session.id
        });
        if let Some(id) = id {
            sessions.shared_mode_waited_ms = 0;
            sessions.send(id, Upcall::Exclusive);
        }
    }
}
