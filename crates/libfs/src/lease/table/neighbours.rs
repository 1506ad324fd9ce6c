//! Leases that nobody waits for: they come with another.

use super::Leases;
use crate::lease::recall::Event;
use varve_ipc::{Grant, Near};

impl Leases {
    /// Installs a neighbour's grant. One that was given back meanwhile is ignored.
    pub(super) fn install_ahead(&self, grant: Grant, near: &Near, barriers: u64) {
        let Grant { lease, mode, .. } = grant;
        // The daemon forgets a dead inode when it digests its last entry.
        let Ok(node) = self.get_or_make(grant.attr.key) else {
            return;
        };
        // Checked after the node is there: the node that knew of the recall may be gone, and this one new.
        if self.ahead.comes_too_late(node.key(), lease) {
            let mut state = node.state();
            state.given_back = state.given_back.max(lease);
        } else if self.install(&node, grant, false, barriers) {
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
                only_read: false,
            });
        }
    }
}
