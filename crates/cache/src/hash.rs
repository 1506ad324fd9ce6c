//! Hashing of keys by a secret of the store, so that nobody without it can aim keys at one set.

use siphasher::sip128::{Hasher128, SipHasher24};
use std::fmt;
use std::hash::Hasher;

/// The secret of a store: 128 random bits, kept in its superblock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret(pub [u8; 16]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// SipHash-2-4-128 of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash(pub u128);

impl KeyHash {
    /// Hashes `key` under `secret`.
    pub fn of(secret: &Secret, key: &[u8]) -> Self {
        let mut hasher = SipHasher24::new_with_key(&secret.0);
        hasher.write(key);
        Self(hasher.finish128().as_u128())
    }

    /// The key's set, of `sets` sets. Uses other bits than [`tag`](Self::tag) and [`device`](Self::device).
    pub const fn set(self, sets: u64) -> u64 {
        let high = self.0 >> 64;
        ((high * sets as u128) >> 64) as u64
    }

    /// The eight bits kept in memory, 1 to 255; 0 stands for an empty slot.
    pub const fn tag(self) -> u8 {
        1 + ((self.0 as u32) % 255) as u8
    }

    /// A number that chooses a device.
    pub const fn device(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// 64 bits that name a tag or a host in an object's head.
    pub const fn short(self) -> u64 {
        self.0 as u64
    }
}

#[cfg(test)]
mod tests {
    use super::{KeyHash, Secret};

    #[test]
    fn hash_differs_when_the_secret_does() {
        let key = b"http://example.org/";
        let one = KeyHash::of(&Secret([1; 16]), key);
        assert_eq!(one, KeyHash::of(&Secret([1; 16]), key));
        assert_ne!(one, KeyHash::of(&Secret([2; 16]), key));
    }

    #[test]
    fn sets_and_tags_are_even_and_in_range() {
        let secret = Secret([7; 16]);
        let mut sets = [0u32; 10];
        let mut tags = [0u32; 256];
        for n in 0..51_000u32 {
            let hash = KeyHash::of(&secret, &n.to_le_bytes());
            sets[hash.set(10) as usize] += 1;
            tags[hash.tag() as usize] += 1;
        }
        assert!(sets.iter().all(|&n| (4_700..5_500).contains(&n)), "{sets:?}");
        assert_eq!(tags[0], 0);
        assert!(tags[1..].iter().all(|&n| (120..290).contains(&n)), "{tags:?}");
    }
}
