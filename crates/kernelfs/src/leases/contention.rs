//! Detects inodes whose leases change hands for little work: the daemon better makes their changes itself.
//! Decides only that.
//!
//! A hand-over of a lease costs a dozen messages and the least hold time; a forwarded change costs one
//! message. So the criterion is not the number of hand-overs but the changes made in each: sessions that take
//! turns of many changes keep their leases.
//!
//! Forwarding ends when only one session is left, and periodically for a few hand-overs, to test whether
//! leases pay again: soon at first, then after twice as long each time that they did not.

use hashbrown::HashMap;
use varve_format::{InodeKey, SessionId};

/// Hand-overs within [`WINDOW_MS`] that make an inode contended.
const HANDOVERS: u32 = 4;
const WINDOW_MS: u64 = 200;
/// Changes per hand-over from which on leases pay.
const CHANGES_PAY: u64 = 16;
/// Duration of forwarding after the last sign of contention.
const FORWARDED_MS: u64 = 200;
/// Duration of forwarding until leases are tried again, at first and at most.
const TRIED_AGAIN_MS: std::ops::RangeInclusive<u64> = 100..=3200;
/// Most inodes watched at once; beyond it the table forgets watches that have expired.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Clone, Copy)]
struct Watch {
    last: SessionId,
    window_from_ms: u64,
    handovers: u32,
    /// Changes made under leases, in the window.
    changes: u64,
    forwarded_from_ms: u64,
    forwarded_until_ms: u64,
    /// Duration of the next phase of forwarding.
    phase_ms: u64,
    /// Until then leases are tried in spite of forwarded operations.
    trial_until_ms: u64,
    /// The last holder of a write lease, if it changed nothing under it.
    idle: Option<SessionId>,
}

impl Watch {
    const fn is_contended(&self, now_ms: u64) -> bool {
        now_ms < self.forwarded_until_ms
    }

    fn forward(&mut self, now_ms: u64) {
        if !self.is_contended(now_ms) {
            self.forwarded_from_ms = now_ms;
        }
        self.forwarded_until_ms = now_ms + FORWARDED_MS;
        if now_ms >= self.forwarded_from_ms + self.phase_ms {
            self.phase_ms = (2 * self.phase_ms).min(*TRIED_AGAIN_MS.end());
            self.forwarded_until_ms = now_ms;
            self.trial_until_ms = now_ms + WINDOW_MS;
            self.begin_window(now_ms);
        }
    }

    /// Whether leases changed hands often, and for little work.
    fn is_waste(&self) -> bool {
        self.handovers >= HANDOVERS && self.changes < u64::from(self.handovers) * CHANGES_PAY
    }

    fn begin_window(&mut self, now_ms: u64) {
        self.window_from_ms = now_ms;
        self.handovers = 0;
        self.changes = 0;
    }
}

/// Watches write grants, the changes made under them, and forwarded operations.
#[derive(Debug, Default)]
pub(super) struct Contention {
    inodes: HashMap<InodeKey, Watch>,
}

impl Contention {
    /// Returns the watch on `key`, if the inode went from another session to this one.
    fn gone_over(&mut self, key: InodeKey, session: SessionId, now_ms: u64) -> Option<&mut Watch> {
        if self.inodes.len() >= WATCHED_MAX && !self.inodes.contains_key(&key) {
            self.inodes
                .retain(|_, watch| watch.is_contended(now_ms) || now_ms < watch.window_from_ms + WINDOW_MS);
            if self.inodes.len() >= WATCHED_MAX {
                return None;
            }
        }
        let fresh = Watch {
            last: session,
            window_from_ms: now_ms,
            handovers: 0,
            changes: 0,
            forwarded_from_ms: 0,
            forwarded_until_ms: 0,
            phase_ms: *TRIED_AGAIN_MS.start(),
            trial_until_ms: 0,
            idle: None,
        };
        let watch = self.inodes.entry(key).or_insert(fresh);
        if watch.last == session {
            return None;
        }
        watch.last = session;
        Some(watch)
    }

    /// Notes that `session` got an exclusive lease on `key`.
    pub(super) fn note_grant(&mut self, key: InodeKey, session: SessionId, now_ms: u64) {
        let Some(watch) = self.gone_over(key, session, now_ms) else {
            return;
        };
        if now_ms >= watch.window_from_ms + WINDOW_MS {
            if !watch.is_waste() {
                watch.phase_ms = *TRIED_AGAIN_MS.start();
            }
            watch.begin_window(now_ms);
        }
        watch.handovers += 1;
        if watch.is_waste() {
            watch.forward(now_ms);
        }
    }

    /// Notes that `count` changes of `key` were made under a lease that `session` gave back.
    pub(super) fn note_changes(&mut self, key: InodeKey, session: SessionId, count: u64) {
        if let Some(watch) = self.inodes.get_mut(&key) {
            watch.changes = watch.changes.saturating_add(count);
            if count == 0 {
                watch.idle = Some(session);
            } else if watch.idle == Some(session) {
                watch.idle = None;
            }
        }
    }

    /// Whether `session` changed nothing under its last write lease on `key`: it polls, and waiting sessions
    /// have work to do.
    pub(super) fn is_idle(&self, key: InodeKey, session: SessionId) -> bool {
        self.inodes
            .get(&key)
            .is_some_and(|watch| watch.idle == Some(session))
    }

    /// Notes that an operation of `session` on `key` was forwarded.
    pub(super) fn note_forwarded(&mut self, key: InodeKey, session: SessionId, now_ms: u64) {
        if let Some(watch) = self.gone_over(key, session, now_ms)
            && now_ms >= watch.trial_until_ms
        {
            watch.forward(now_ms);
        }
    }

    /// Whether operations on `key` are being forwarded.
    pub(super) fn is_contended(&self, key: InodeKey, now_ms: u64) -> bool {
        self.inodes
            .get(&key)
            .is_some_and(|watch| watch.is_contended(now_ms))
    }

    /// Returns the number of inodes whose operations are being forwarded.
    pub(super) fn count(&self, now_ms: u64) -> usize {
        let contended = |watch: &&Watch| watch.is_contended(now_ms);
        self.inodes.values().filter(contended).count()
    }

    pub(super) fn forget(&mut self, key: InodeKey) {
        self.inodes.remove(&key);
    }
}
