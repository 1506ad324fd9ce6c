//! A cheap hash for inode keys, whose numbers the daemon chooses. Not for keys that users choose, such as
//! names.

use lru::LruCache;
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher, RandomState};
use varve_format::InodeKey;

/// A map by inode.
pub(crate) type KeyMap<V> = HashMap<InodeKey, V, BuildHasherDefault<KeyHasher>>;

/// A set of inodes.
pub(crate) type KeySet = HashSet<InodeKey, BuildHasherDefault<KeyHasher>>;

/// Keys and values, least recently used out first. Not with `lru`'s own hash: for its first use threads wait for
/// each other, and a child that is forked meanwhile would wait for ever.
pub(crate) type Lru<K, V> = LruCache<K, V, RandomState>;

/// Multiplies and folds.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct KeyHasher(u64);

impl KeyHasher {
    #[inline]
    const fn mix(&mut self, word: u64) {
        let wide = (self.0 ^ word ^ 0x9E37_79B9_7F4A_7C15) as u128 * 0xD6E8_FEB8_6659_FD93_u128;
        self.0 = (wide as u64) ^ (wide >> 64) as u64;
    }
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.mix(u64::from_le_bytes(word));
        }
    }

    #[inline]
    fn write_u32(&mut self, word: u32) {
        self.mix(u64::from(word));
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.mix(word);
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::KeyHasher;
    use std::collections::HashSet;
    use std::hash::{Hash, Hasher};
    use varve_format::InodeKey;

    #[test]
    fn neighbours_do_not_share_low_or_high_bits() {
        let hashes = (0..4096_u64).map(|ino| {
            let mut hasher = KeyHasher::default();
            InodeKey::new(ino, 1).hash(&mut hasher);
            hasher.finish()
        });
        let (low, high): (HashSet<_>, HashSet<_>) = hashes.map(|hash| (hash & 0xfff, hash >> 52)).unzip();
        // A random function fills 63 % of the places.
        assert!(
            low.len() > 2300 && high.len() > 2300,
            "{} and {}",
            low.len(),
            high.len()
        );
    }
}
