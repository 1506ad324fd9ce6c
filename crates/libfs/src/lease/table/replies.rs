//! Answers to the kernel above that rest on leases, and recalls that wait for them: see
//! [`dentries`](crate::kernel_cache::dentries).

use super::Leases;
use crate::kernel_cache::dentries::{Answer, upwards};
use crate::lease::node::Node;
use crate::seeded::{Bug, armed};
use crate::sync::atomic::Ordering;
use smallvec::SmallVec;
use std::sync::Arc;
use varve_format::InodeKey;

impl Leases {
    /// Number of recalls that have begun. What was seen under a lease that is held and settled is still so if
    /// the number has not changed since before it was seen.
    pub(crate) fn recalls(&self) -> u64 {
        self.recalls.load(Ordering::SeqCst)
    }

    /// The directory of an inode, and those above it, as far as they are known here; an inode that is a
    /// directory comes first.
    fn upwards(&self, node: &Node) -> SmallVec<[InodeKey; 8]> {
        // The worker waits for no writer of the inode.
        let is_dir = node.inode.try_attr().is_some_and(|attr| attr.is_dir());
        let nodes = self.nodes.read();
        upwards(node.key(), is_dir, |key| {
            nodes.get(&key).and_then(|node| node.told.dir())
        })
    }

    /// Returns the answer to an operation that has seen a name, or its absence, in `dir`, and attributes of
    /// `inode`. `asked`: [`recalls`](Self::recalls) from before the operation.
    pub(crate) fn answer(&self, asked: u64, dir: Option<InodeKey>, inode: Option<InodeKey>) -> Answer {
        let mut nodes = SmallVec::<[Arc<Node>; 2]>::new();
        for key in [dir, inode].into_iter().flatten() {
            let node = self.get(key);
            let Some(node) = node.filter(|node| matches!(node.settled(), (Some(_), true))) else {
                return Answer::default();
            };
            nodes.push(node);
        }
        if let (Some(dir), [_, node]) = (dir, &nodes[..]) {
            node.told.set_dir(dir);
        }
        let now_ms = self.clock.monotonic_ms();
        if self.regions.any(now_ms)
            && let Some(node) = nodes.last()
        {
            // Of a directory, both its name and its attributes are looked at.
            let own = nodes.len();
            if self.regions.has(&self.upwards(node), own, self.root, now_ms) {
                return Answer::default();
            }
        }
        let seen = (dir.is_some(), inode.is_some());
        let leases = nodes.iter().map(|node| Arc::clone(&node.told)).collect();
        let answer = Answer::resting_on(leases, seen, &self.clock);
        // After the answer counts as under way: a recall that begins later waits for it.
        if self.recalls() != asked && !armed(Bug::AnswerAcrossRecall) {
            return answer.undone();
        }
        answer
    }

    /// Counts a recall: of a lease that is not settled any more, or that goes now. What was seen under it may
    /// have changed before the next one.
    pub(crate) fn count_recall(&self) {
        self.recalls.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that other sessions want a lease: answers in its region get no timeout if they have to wait, or
    /// are in one.
    pub(crate) fn note_wanted(&self, node: &Node) {
        let now_ms = self.clock.monotonic_ms();
        let waits = !node.told.left(now_ms).is_zero();
        if waits || self.regions.any(now_ms) {
            let dirs = self.upwards(node);
            if waits || self.regions.has(&dirs, 1, self.root, now_ms) {
                self.regions.met(&dirs, self.root, waits, now_ms);
            }
        }
    }
}
