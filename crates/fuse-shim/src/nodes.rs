//! Which inodes the kernel knows, by number: the generation that belongs to each, and how often it was looked up.

use parking_lot::Mutex;
use std::collections::HashMap;
use varve_format::{Generation, Ino, InodeKey, ROOT_INO};

const SHARDS: usize = 16;

#[derive(Debug, Clone, Copy)]
struct Node {
    generation: Generation,
    lookups: u64,
}

/// Inodes known to the kernel. The root is always known.
#[derive(Debug, Default)]
pub(crate) struct Nodes {
    shards: [Mutex<HashMap<u64, Node>>; SHARDS],
}

impl Nodes {
    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, Node>> {
        &self.shards[(ino as usize / 16 + ino as usize) % SHARDS]
    }

    /// Counts one look-up of `key` that the kernel will hear of.
    pub(crate) fn learn(&self, key: InodeKey) {
        let mut shard = self.shard(key.ino.0).lock();
        let node = shard.entry(key.ino.0).or_insert(Node {
            generation: key.generation,
            lookups: 0,
        });
        node.generation = key.generation;
        node.lookups += 1;
    }

    /// Takes back `lookups` look-ups. Answers the inode if the kernel knows it no more.
    pub(crate) fn forget(&self, ino: u64, lookups: u64) -> Option<InodeKey> {
        let mut shard = self.shard(ino).lock();
        let node = shard.get_mut(&ino)?;
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups > 0 {
            return None;
        }
        let generation = shard.remove(&ino)?.generation;
        Some(InodeKey {
            ino: Ino(ino),
            generation,
        })
    }

    /// The key behind a number that the kernel sent.
    pub(crate) fn key(&self, ino: u64) -> Option<InodeKey> {
        if ino == ROOT_INO.0 {
            return Some(InodeKey::ROOT);
        }
        let node = *self.shard(ino).lock().get(&ino)?;
        Some(InodeKey {
            ino: Ino(ino),
            generation: node.generation,
        })
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
        nodes.learn(key);
        nodes.learn(key);
        assert_eq!(nodes.forget(7, 1), None);
        assert_eq!(nodes.key(7), Some(key));
        assert_eq!(nodes.forget(7, 1), Some(key));
        assert_eq!(nodes.key(7), None);
        assert_eq!(nodes.forget(7, 1), None);
        assert_eq!(nodes.key(1), Some(InodeKey::ROOT));
    }
}
