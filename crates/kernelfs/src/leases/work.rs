//! Time that the daemon has worked for each session. A client that gives leases back one batch after another,
//! or waits for space under one, cannot answer for the daemon's share. Knows nothing of leases.

use std::collections::HashMap;
use varve_format::SessionId;

#[derive(Debug, Clone, Copy, Default)]
struct Work {
    done_ms: u64,
    /// Pieces of work under way, and the time since which there is one.
    under_way: u32,
    since_ms: u64,
}

impl Work {
    const fn total_ms(&self, now_ms: u64) -> u64 {
        if self.under_way == 0 {
            self.done_ms
        } else {
            self.done_ms + now_ms.saturating_sub(self.since_ms)
        }
    }
}

/// The work for all sessions.
#[derive(Debug, Default)]
pub(super) struct Works(HashMap<SessionId, Work>);

impl Works {
    /// Returns the total work until now; parallel pieces count once.
    pub(super) fn ms(&self, session: SessionId, now_ms: u64) -> u64 {
        self.0.get(&session).map_or(0, |work| work.total_ms(now_ms))
    }

    pub(super) fn begin(&mut self, session: SessionId, now_ms: u64) {
        let work = self.0.entry(session).or_default();
        if work.under_way == 0 {
            work.since_ms = now_ms;
        }
        work.under_way += 1;
    }

    /// Ends one piece of work; returns whether none is under way any more.
    pub(super) fn end(&mut self, session: SessionId, now_ms: u64) -> bool {
        let Some(work) = self.0.get_mut(&session) else {
            return false;
        };
        if work.under_way == 1 {
            work.done_ms = work.total_ms(now_ms);
        }
        work.under_way = work.under_way.saturating_sub(1);
        work.under_way == 0
    }

    pub(super) fn forget(&mut self, session: SessionId) {
        self.0.remove(&session);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
