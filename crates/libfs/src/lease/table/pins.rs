//! Pinned leases: they stay until the pin is dropped.

use super::Leases;
use crate::errno::Errno;
use crate::lease::node::Node;
use crate::lease::recall::Event;
use smallvec::SmallVec;
use std::sync::Arc;
use varve_format::InodeKey;

/// Leases that most operations pin at once: up to this number nothing is allocated.
pub(crate) const AT_ONCE: usize = 3;

/// Pinned leases: they stay until this is dropped.
pub(crate) struct Pins<'l> {
    pub(super) leases: &'l Leases,
    pub(super) nodes: SmallVec<[Arc<Node>; AT_ONCE]>,
}

impl Pins<'_> {
    /// The node with this key; it must be one of those asked for.
    pub(crate) fn node(&self, key: InodeKey) -> Result<&Arc<Node>, Errno> {
        self.nodes
            .iter()
            .find(|node| node.key() == key)
            .ok_or(Errno(libc::EIO))
    }
}

impl Drop for Pins<'_> {
    fn drop(&mut self) {
        for node in &self.nodes {
            self.leases.unpin(node);
        }
    }
}

/// A waiting call of the kernel, until this is dropped.
pub(crate) struct Held<'n> {
    pub(super) node: &'n Arc<Node>,
    pub(super) number: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.node.above.unhold(self.number);
    }
}

/// One pinned lease, for the data path.
pub(crate) struct Pin<'l> {
    pub(super) leases: &'l Leases,
    pub(super) node: Arc<Node>,
}

impl Pin<'_> {
    pub(crate) const fn node(&self) -> &Arc<Node> {
        &self.node
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.leases.unpin(&self.node);
    }
}

/// One lease pinned in the calling thread's slot.
pub(crate) struct SlotPin<'l> {
    pub(super) leases: &'l Leases,
    pub(super) node: &'l Arc<Node>,
    pub(super) lane: usize,
    // A slot pin must end on the thread that it began on.
    pub(super) _here: std::marker::PhantomData<*const ()>,
}

impl SlotPin<'_> {
    pub(crate) const fn node(&self) -> &Arc<Node> {
        self.node
    }
}

impl Drop for SlotPin<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.node.unpin_slot(self.lane) {
            self.leases.tell(Event::Look(self.node.key()));
        }
    }
}
