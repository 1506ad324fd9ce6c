//! The inodes that the kernel knows, by the [number](InodeKey::number) under which it knows them, and the
//! lookup count of each.

use parking_lot::Mutex;
use std::collections::HashMap;
use varve_format::InodeKey;

const SHARDS: usize = 16;

#[derive(Debug, Clone, Copy)]
struct Node {
    key: InodeKey,
    lookups: u64,
}

/// Inodes known to the kernel. The root is always known.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    shards: [Mutex<HashMap<u64, Node>>; SHARDS],
}

impl Nodes {
    fn shard(&self, number: u64) -> &Mutex<HashMap<u64, Node>> {
        &self.shards[(number as usize / 16 + number as usize) % SHARDS]
    }

    /// Counts one lookup of `key` that is about to be sent to the kernel.
    pub(crate) fn learn(&self, key: InodeKey) {
        let mut shard = self.shard(key.number()).lock();
        let node = shard.entry(key.number()).or_insert(Node { key, lookups: 0 });
        // The key differs only if the inode was reused more often than the number can express.
        node.key = key;
        node.lookups += 1;
    }

    /// Takes back `lookups` lookups. Returns the inode if the kernel no longer knows it.
    pub(crate) fn forget(&self, number: u64, lookups: u64) -> Option<InodeKey> {
        let mut shard = self.shard(number).lock();
        let node = shard.get_mut(&number)?;
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups > 0 {
            return None;
        }
        Some(shard.remove(&number)?.key)
    }

    /// Returns the key behind a number that the kernel sent.
    pub(crate) fn key(&self, number: u64) -> Option<InodeKey> {
        if number == InodeKey::ROOT.number() {
            return Some(InodeKey::ROOT);
        }
        Some(self.shard(number).lock().get(&number)?.key)
    }
}

#[cfg(test)]
mod tests {
    use super::Nodes;
    use varve_format::InodeKey;

    #[test]
    fn node_is_known_until_every_lookup_is_forgotten() {
        let nodes = Nodes::default();
        let key = InodeKey::new(7, 3);
        let number = key.number();
        nodes.learn(key);
        nodes.learn(key);
        assert_eq!(nodes.forget(number, 1), None);
        assert_eq!(nodes.key(number), Some(key));
        // A later inode in this slot has another number, so late forgets of this one do not affect it.
        let next = InodeKey::new(7, 4);
        nodes.learn(next);
        assert_eq!(nodes.forget(number, 1), Some(key));
        assert_eq!(nodes.key(number), None);
        assert_eq!(nodes.forget(number, 1), None);
        assert_eq!(nodes.key(next.number()), Some(next));
        assert_eq!(nodes.key(1), Some(InodeKey::ROOT));
    }
}
