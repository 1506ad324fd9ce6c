//! When an inode goes from hand to hand too often, its changes are better made by the daemon. Decides only that.

use hashbrown::HashMap;
use varve_format::{InodeKey, SessionId};

/// Hand-overs within [`WINDOW_MS`] that make an inode contended.
const HANDOVERS: u32 = 4;
const WINDOW_MS: u64 = 100;
/// How long a contended inode is mediated after the last sign of contention.
const MEDIATED_MS: u64 = 200;
/// Inodes watched at once; more make the table forget all that is past.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Clone, Copy)]
struct Watch {
    last: SessionId,
    window_from_ms: u64,
    handovers: u32,
    mediated_until_ms: u64,
}

/// Watches write grants and mediated operations.
#[derive(Debug, Default)]
pub(super) struct Contention {
    inodes: HashMap<InodeKey, Watch>,
}

impl Contention {
    /// `session` got an exclusive lease on `key`, or had an operation on it mediated.
    pub(super) fn note(&mut self, key: InodeKey, session: SessionId, mediated: bool, now_ms: u64) {
        if self.inodes.len() >= WATCHED_MAX && !self.inodes.contains_key(&key) {
            self.inodes.retain(|_, watch| {
                now_ms < watch.mediated_until_ms || now_ms < watch.window_from_ms + WINDOW_MS
            });
            if self.inodes.len() >= WATCHED_MAX {
                return;
            }
        }
        let fresh = Watch {
            last: session,
            window_from_ms: now_ms,
            handovers: 0,
            mediated_until_ms: 0,
        };
        let watch = self.inodes.entry(key).or_insert(fresh);
        if watch.last == session {
            return;
        }
        watch.last = session;
        if now_ms >= watch.window_from_ms + WINDOW_MS {
            watch.window_from_ms = now_ms;
            watch.handovers = 0;
        }
        watch.handovers += 1;
        if mediated || watch.handovers >= HANDOVERS {
            watch.mediated_until_ms = now_ms + MEDIATED_MS;
        }
    }

    /// Whether operations on `key` are to be mediated at the moment.
    pub(super) fn is_contended(&self, key: InodeKey, now_ms: u64) -> bool {
        self.inodes
            .get(&key)
            .is_some_and(|watch| now_ms < watch.mediated_until_ms)
    }

    pub(super) fn forget(&mut self, key: InodeKey) {
        self.inodes.remove(&key);
    }
}
