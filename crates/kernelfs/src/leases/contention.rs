//! When an inode goes from hand to hand for little work, its changes are better made by the daemon. Decides
//! only that.
//!
//! A lease that goes over costs a dozen messages and the time that it is held at least; a forwarded change
//! costs one message. So what counts is not how often an inode goes over but how much is changed in each
//! hand: sessions that take turns of many changes keep their leases.
//!
//! Forwarding ends when only one session is left, and every now and then for a few hand-overs, to see whether
//! leases pay by now: soon at first, then after twice as long each time that they did not.

use hashbrown::HashMap;
use varve_format::{InodeKey, SessionId};

/// Hand-overs within [`WINDOW_MS`] that make an inode contended.
const HANDOVERS: u32 = 4;
const WINDOW_MS: u64 = 200;
/// A hand-over that so many changes were made for has paid.
const CHANGES_PAY: u64 = 16;
/// How long operations on a contended inode are forwarded after the last sign of contention.
const FORWARDED_MS: u64 = 200;
/// How long operations on an inode are forwarded before leases are tried again, at first and at most.
const TRIED_AGAIN_MS: std::ops::RangeInclusive<u64> = 100..=3200;
/// Inodes watched at once; more make the table forget all that is past.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Clone, Copy)]
struct Watch {
    last: SessionId,
    window_from_ms: u64,
    handovers: u32,
    /// Made under leases, in the window.
    changes: u64,
    forwarded_from_ms: u64,
    forwarded_until_ms: u64,
    /// How long they are forwarded the next time.
    phase_ms: u64,
    /// Leases are tried until then, whatever else speaks for forwarding.
    trial_until_ms: u64,
    /// Who had a write lease last and changed nothing under it.
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

    /// Whether leases went over often, and for little.
    fn is_waste(&self) -> bool {
        self.handovers >= HANDOVERS && self.changes < u64::from(self.handovers) * CHANGES_PAY
    }

    fn begin_window(&mut self, now_ms: u64) {
        self.window_from_ms = now_ms;
        self.handovers = 0;
        self.changes = 0;
    }
}

/// Watches write grants, what they were good for, and forwarded operations.
#[derive(Debug, Default)]
pub(super) struct Contention {
    inodes: HashMap<InodeKey, Watch>,
}

impl Contention {
    /// The watch on `key`, if it went from another session to this one.
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

    /// `session` got an exclusive lease on `key`.
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

    /// `count` changes of `key` were made under a lease that `session` gave back.
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

    /// Whether `session` changed nothing under its last write lease on `key`: it looks again and again, and
    /// those who wait have work to do.
    pub(super) fn is_idle(&self, key: InodeKey, session: SessionId) -> bool {
        self.inodes
            .get(&key)
            .is_some_and(|watch| watch.idle == Some(session))
    }

    /// An operation of `session` on `key` was forwarded.
    pub(super) fn note_forwarded(&mut self, key: InodeKey, session: SessionId, now_ms: u64) {
        if let Some(watch) = self.gone_over(key, session, now_ms)
            && now_ms >= watch.trial_until_ms
        {
            watch.forward(now_ms);
        }
    }

    /// Whether operations on `key` are to be forwarded at the moment.
    pub(super) fn is_contended(&self, key: InodeKey, now_ms: u64) -> bool {
        self.inodes
            .get(&key)
            .is_some_and(|watch| watch.is_contended(now_ms))
    }

    /// Inodes whose operations are forwarded at the moment.
    pub(super) fn count(&self, now_ms: u64) -> usize {
        let contended = |watch: &&Watch| watch.is_contended(now_ms);
        self.inodes.values().filter(contended).count()
    }

    pub(super) fn forget(&mut self, key: InodeKey) {
        self.inodes.remove(&key);
    }
}
