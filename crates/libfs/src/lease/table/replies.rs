//! Replies to the kernel above that depend on leases, and the recalls that they delay: see
//! [`dentries`](crate::kernel_cache::dentries).

use super::Leases;
use crate::kernel_cache::dentries::CachedReply;
use crate::kernel_cache::threads::Threads;
use crate::lease::node::Node;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::{AtomicU64, Ordering};
use smallvec::SmallVec;
use std::sync::Arc;
use varve_format::InodeKey;

/// Number of counts for the inodes.
const SLOTS: usize = if cfg!(feature = "shuttle") { 1 } else { 256 };

/// Beginnings and ends of recalls.
pub(super) struct RecallCount {
    all: AtomicU64,
    /// By inode: the number of the last.
    last: [AtomicU64; SLOTS],
}

impl Default for RecallCount {
    fn default() -> Self {
        Self {
            all: AtomicU64::new(0),
            last: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }
}

impl RecallCount {
    fn last(&self, key: InodeKey) -> &AtomicU64 {
        &self.last[(key.ino.0 % SLOTS as u64) as usize]
    }
}

impl Leases {
    /// Number of recalls that have begun or ended. What is read later under a lease that is held and settled
    /// still holds if none of its inode was counted since.
    pub(crate) fn recalls(&self) -> u64 {
        self.recalls.all.load(Ordering::SeqCst)
    }

    /// Counts the beginning of a recall, whose lease is not settled any more, or its end.
    pub(crate) fn count_recall(&self, key: InodeKey) {
        let number = self.recalls.all.fetch_add(1, Ordering::SeqCst) + 1;
        self.recalls.last(key).fetch_max(number, Ordering::SeqCst);
    }

    /// Whether a recall of the inode was counted after the first `recalls`.
    fn was_recalled(&self, key: InodeKey, recalls: u64) -> bool {
        self.recalls.last(key).load(Ordering::SeqCst) > recalls
    }

    /// Begins the reply to an operation that has found a name, or its absence, in `dir`, and attributes of
    /// `inode`. `recalls`: their number from before the operation. `thread`: who called.
    pub(crate) fn begin_reply(
        &self,
        recalls: u64,
        thread: u32,
        dir: Option<InodeKey>,
        inode: Option<InodeKey>,
    ) -> CachedReply {
        let mut nodes = SmallVec::<[Arc<Node>; 2]>::new();
        for key in [dir, inode].into_iter().flatten() {
            let node = self.get(key);
            let Some(node) = node.filter(|node| matches!(node.settled(), (Some(_), true))) else {
                return CachedReply::default();
            };
            nodes.push(node);
        }
        if let (Some(dir), [_, node]) = (dir, &nodes[..]) {
            node.replies.set_dir(dir);
        }
        let named_in = || nodes.last().and_then(|node| node.replies.dir());
        let keys = [dir.or_else(named_in), inode].into_iter().flatten();
        if self.regions.contain(keys, self.clock.monotonic_ms()) {
            return CachedReply::default();
        }
        let replies = nodes.iter().map(|node| Arc::clone(&node.replies)).collect();
        let timeouts = (dir.is_some(), inode.is_some());
        let reply = CachedReply::begin(replies, timeouts, thread, &self.threads);
        // After the reply counts as in flight: a recall that begins later waits for it.
        let recalled = nodes.iter().any(|node| self.was_recalled(node.key(), recalls));
        if recalled && !armed(Bug::ReplyAcrossRecall) {
            return reply.cancel();
        }
        reply
    }

    /// The threads that called.
    pub(crate) const fn threads(&self) -> &Arc<Threads> {
        &self.threads
    }

    /// Notes that other sessions want a lease: where it delays them, replies get no timeout for a while.
    /// `counts`: they wait for it.
    pub(crate) fn note_contention(&self, node: &Node, counts: bool) {
        let now_ms = self.clock.monotonic_ms();
        let waits = !node.replies.remaining(&self.threads).is_zero();
        // The worker waits for no writer of the inode.
        let is_dir = node.inode.try_attr().is_some_and(|attr| attr.is_dir());
        let dir = node
            .replies
            .dir()
            .filter(|_| !is_dir)
            .unwrap_or_else(|| node.key());
        if waits || self.regions.contain([dir], now_ms) {
            self.regions.note(dir, waits && counts, now_ms);
        }
    }
}
