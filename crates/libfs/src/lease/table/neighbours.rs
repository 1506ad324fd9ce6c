//! Leases that nobody waits for: those that come with another, and those on the inodes of a listing.

use super::Leases;
use crate::lease::recall::Event;
use crate::sync::atomic::Ordering;
use varve_format::InodeKey;
use varve_ipc::{Grant, LeaseMode, NEAR_MAX, Near, Request, Response, Want};

impl Leases {
    /// Asks for leases for reading on these inodes of `dir`, if they are free: those that a listing shows
    /// with their attributes. To be called without pins.
    pub(crate) fn take_along(&self, dir: InodeKey, keys: impl Iterator<Item = InodeKey>) {
        let mut missing: Vec<_> = self.see(|nodes| {
            let held = |key: &InodeKey| nodes.get(key).is_some_and(|node| node.mode().is_some());
            keys.filter(|key| !held(key)).collect()
        });
        missing.sort_unstable();
        missing.dedup();
        for these in missing.chunks(usize::from(NEAR_MAX)) {
            let (near, _asking) = self.ahead.listing(these, dir.ino);
            let mode = LeaseMode::Read;
            let request = Request::AcquireNear {
                wants: vec![Want { key: dir, mode }],
                near: near.clone(),
            };
            self.acquires.fetch_add(1, Ordering::Relaxed);
            let (Ok(Response::Granted(mut grants)), Ok(node)) = (self.call(request), self.get_or_make(dir))
            else {
                return;
            };
            if grants.is_empty() || grants.len() > 1 + these.len() {
                return;
            }
            for grant in grants.drain(1..) {
                self.install_ahead(grant, &near);
            }
            for grant in grants.into_iter().filter(|grant| grant.attr.key == dir) {
                self.install(&node, grant, false);
            }
            self.recall_early(dir);
        }
    }

    /// Installs a neighbour's grant. One that was given back meanwhile is ignored.
    pub(super) fn install_ahead(&self, grant: Grant, near: &Near) {
        let Grant { lease, mode, .. } = grant;
        // The daemon forgets a dead inode when it digests its last entry.
        let Ok(node) = self.get_or_make(grant.attr.key) else {
            return;
        };
        // Checked after the node is there: the node that knew of the recall may be gone, and this one new.
        if self.ahead.comes_too_late(node.key(), lease) {
            let mut state = node.state();
            state.given_back = state.given_back.max(lease);
        } else if self.install(&node, grant, false) {
            node.note_recent();
            self.ahead.came(&node, mode, near);
        }
        // A recall of it meanwhile may have been queued as early, for another request that waits here. That
        // request may wait for this lease to go, so the recall is sent to the worker again.
        let mut early = self.early.lock();
        if early.get(&node.key()) == Some(&lease) {
            early.remove(&node.key());
            drop(early);
            self.tell(Event::Revoke {
                key: node.key(),
                number: lease,
            });
        }
    }
}
