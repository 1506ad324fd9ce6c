//! Purges: a version for each scope, below which its objects are discarded. The cost of a purge does not
//! depend on the number of objects.

use std::collections::HashMap;

/// Bytes of a purge on the medium.
pub const PACKED_BYTES: usize = 24;

/// A set of objects that can be purged at once: a hash, and for a key prefix its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScopeHash {
    /// The keyed hash of tag, host or prefix.
    pub hash: u64,
    /// Bytes of the prefix; 0 for a tag or host.
    pub prefix_len: u16,
}

/// Purges in force.
#[derive(Debug, Clone, Default)]
pub struct Purges {
    most: usize,
    versions: HashMap<ScopeHash, u64>,
    /// Number of purged prefixes of each length.
    lengths: HashMap<u16, usize>,
}

impl Purges {
    /// Room for `most` purges.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            ..Self::default()
        }
    }

    /// Number of purges.
    pub fn len(&self) -> usize {
        self.versions.len()
    }

    /// Whether adding `scope` would exceed the room.
    pub fn is_full_for(&self, scope: ScopeHash) -> bool {
        self.versions.len() >= self.most && !self.versions.contains_key(&scope)
    }

    /// Marks objects of `scope` with a version below `version` as purged.
    pub fn add(&mut self, scope: ScopeHash, version: u64) {
        let old = self.versions.insert(scope, version);
        if let Some(old) = old {
            // Replays may come in any order.
            self.versions.insert(scope, old.max(version));
        } else if scope.prefix_len > 0 {
            *self.lengths.entry(scope.prefix_len).or_default() += 1;
        }
    }

    /// Drops the older half; returns the version below which all objects have to be discarded instead.
    pub fn drop_older_half(&mut self) -> u64 {
        let mut versions: Vec<_> = self.versions.values().copied().collect();
        versions.sort_unstable();
        let Some(&middle) = versions.get(versions.len() / 2) else {
            return 0;
        };
        self.forget_below(middle + 1);
        middle
    }

    /// Drops purges that `floor` makes redundant.
    pub fn forget_below(&mut self, floor: u64) {
        self.versions.retain(|_, version| *version >= floor);
        self.lengths.clear();
        for scope in self.versions.keys().filter(|scope| scope.prefix_len > 0) {
            *self.lengths.entry(scope.prefix_len).or_default() += 1;
        }
    }

    /// Whether an object is purged. `prefix_hash` hashes the first bytes of its key.
    pub fn covers(&self, version: u64, tags: &[u64], key: &[u8], prefix_hash: impl Fn(&[u8]) -> u64) -> bool {
        let gone = |scope| self.versions.get(&scope).is_some_and(|&purged| version < purged);
        if self.versions.is_empty() {
            return false;
        }
        tags.iter().any(|&hash| gone(ScopeHash { hash, prefix_len: 0 }))
            || self.lengths.keys().any(|&prefix_len| {
                let prefix = key.get(..usize::from(prefix_len));
                prefix.is_some_and(|prefix| {
                    gone(ScopeHash {
                        hash: prefix_hash(prefix),
                        prefix_len,
                    })
                })
            })
    }

    /// Returns the purges in their form on the medium.
    pub fn pack(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.versions.len() * PACKED_BYTES);
        for (scope, version) in &self.versions {
            bytes.extend_from_slice(&scope.hash.to_le_bytes());
            bytes.extend_from_slice(&version.to_le_bytes());
            bytes.extend_from_slice(&u64::from(scope.prefix_len).to_le_bytes());
        }
        bytes
    }

    /// Reads purges from their form on the medium.
    pub fn unpack(bytes: &[u8], most: usize) -> Self {
        let mut purges = Self::new(most);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        for packed in bytes.chunks_exact(PACKED_BYTES) {
            let scope = ScopeHash {
                hash: number(&packed[..8]),
                prefix_len: number(&packed[16..]) as u16,
            };
            purges.add(scope, number(&packed[8..16]));
        }
        purges
    }
}

#[cfg(test)]
mod tests {
    use super::{Purges, ScopeHash};

    fn scope(hash: u64, prefix_len: u16) -> ScopeHash {
        ScopeHash { hash, prefix_len }
    }

    #[test]
    fn purge_covers_what_is_older_and_only_its_scope() {
        let mut purges = Purges::new(10);
        purges.add(scope(5, 0), 100);
        purges.add(scope(3, 3), 50);
        let hash = |prefix: &[u8]| u64::from(prefix == b"abc") * 3;
        assert!(purges.covers(99, &[1, 5], b"x", hash));
        assert!(!purges.covers(100, &[1, 5], b"x", hash));
        assert!(!purges.covers(99, &[1], b"x", hash));
        assert!(purges.covers(49, &[], b"abcd", hash));
        assert!(!purges.covers(49, &[], b"ab", hash));
        assert!(!purges.covers(50, &[], b"abcd", hash));
        let again = Purges::unpack(&purges.pack(), 10);
        assert!(again.covers(49, &[], b"abcd", hash) && again.covers(99, &[5], b"", hash));
    }

    #[test]
    fn half_of_the_purges_become_a_floor_when_there_are_too_many() {
        let mut purges = Purges::new(10);
        for n in 0..10 {
            purges.add(scope(n, 0), n + 1);
        }
        assert!(purges.is_full_for(scope(99, 0)));
        let floor = purges.drop_older_half();
        assert_eq!((floor, purges.len()), (6, 4));
    }
}
