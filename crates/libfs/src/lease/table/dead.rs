//! Inodes that are gone here before the daemon knows it: they have lost their last name, and no thread has
//! them open.

use std::collections::VecDeque;
use std::sync::Arc;
use varve_format::{InodeKey, LogSeq};

use super::Leases;
use crate::hash::KeyMap;
use crate::lease::node::{Node, Phase};
use crate::sync::atomic::Ordering;

/// Most digested dead inodes that are forgotten each time that one is added.
const FORGOTTEN_AT_ONCE: usize = 4;

/// Inodes without a name or an open here, whose last entry is not digested.
#[derive(Default)]
pub(super) struct Dead {
    /// Oldest entry first.
    queue: VecDeque<(LogSeq, InodeKey)>,
    /// For each inode of `queue`, whether its node is still here.
    pub(super) has_node: KeyMap<bool>,
    nodes: usize,
}

impl Dead {
    fn bury(&mut self, key: InodeKey, seq: LogSeq) {
        self.queue.push_back((seq, key));
        if self.has_node.insert(key, true).is_none() {
            self.nodes += 1;
        }
    }

    /// Takes the oldest out, if it is digested; says whether its node is still here.
    fn pop(&mut self, digested: LogSeq) -> Option<(InodeKey, bool)> {
        let (seq, key) = *self.queue.front()?;
        if seq > digested {
            return None;
        }
        self.queue.pop_front();
        let has_node = self.has_node.remove(&key).unwrap_or(false);
        self.nodes -= usize::from(has_node);
        Some((key, has_node))
    }

    /// Notes that the node goes; `false`: the inode is not (or no longer) in the queue.
    fn lose_node(&mut self, key: InodeKey) -> bool {
        let Some(has_node) = self.has_node.get_mut(&key) else {
            return false;
        };
        self.nodes -= usize::from(std::mem::replace(has_node, false));
        true
    }
}

impl Leases {
    /// Notes that inode `key` has no name, that no thread has it open, and that `seq` is the last entry about
    /// it. When that entry is digested the daemon forgets the inode with its leases (or keeps it for other
    /// sessions, and recalls a lease that is not here any more): nothing needs to be given back. `true`: it
    /// may be [taken down](Self::take_down).
    pub(crate) fn bury(&self, key: InodeKey, seq: LogSeq) -> bool {
        // The kernel may name an inode after its last close, until it says that it has forgotten it.
        if !self.kernel {
            self.bury_now(key, seq);
        }
        !self.kernel
    }

    /// Forgets a buried inode's node at once, if there is no other reference to it: its memory goes to the
    /// next file while it is in the CPU caches, and short-lived files take no memory until they are digested.
    /// If the daemon recalls the lease, the answer names the end of the log.
    pub(crate) fn take_down(&self, key: InodeKey) -> Option<Arc<Node>> {
        let mut nodes = self.nodes.write();
        let node = nodes.get(&key)?;
        // A lease that was given back is counted no more.
        if Arc::strong_count(node) > 1 || node.mode().is_none() {
            return None;
        }
        let mut dead = self.dead.lock();
        if !dead.lose_node(key) {
            return None;
        }
        self.buried.store(dead.nodes, Ordering::Relaxed);
        drop(dead);
        self.held.fetch_sub(1, Ordering::Relaxed);
        nodes.remove(&key)
    }

    /// Notes that the kernel above names `key` no more.
    pub(crate) fn forgotten(&self, key: InodeKey) {
        let Some(node) = self.get(key) else { return };
        let seq = {
            let body = node.inode.read();
            body.dead.then_some(body.last_seq)
        };
        drop(node);
        if let Some(seq) = seq {
            self.bury_now(key, seq);
        }
    }

    fn bury_now(&self, key: InodeKey, seq: LogSeq) {
        let mut dead = self.dead.lock();
        dead.bury(key, seq);
        // A few at a time: their memory goes into the next files, and no thread waits for thousands to be
        // freed.
        let digested = self.page.digested();
        let mut gone = [None; FORGOTTEN_AT_ONCE];
        for place in &mut gone {
            *place = dead.pop(digested);
        }
        self.buried.store(dead.nodes, Ordering::Relaxed);
        drop(dead);
        for (key, has_node) in gone.into_iter().flatten() {
            if has_node {
                self.forget_dead(key);
            }
        }
    }

    fn forget_dead(&self, key: InodeKey) {
        let Some(node) = self.get(key) else { return };
        {
            let mut state = node.state();
            // A lease that is already being given back ends there.
            if state.phase != Phase::Settled || state.mode.is_none() || node.seems_pinned() {
                return;
            }
            // The lease was not given back: if the daemon still has it, an answer may name it once more.
            self.count_recall(key);
            state.mode = None;
            node.publish(&state, false);
        }
        self.gone(key);
    }
}
