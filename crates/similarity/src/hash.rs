//! Hashes of content, by domain, and maps keyed by them. It knows no sketch.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of a block: the unit in which content is compared and shared.
pub const BLOCK_BYTES: usize = 4096;

/// The kind of an element. Equal bytes in two domains have different hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Domain {
    /// A block of 4 KiB.
    Block,
    /// A whole file.
    File,
    /// A package: its name, version and architecture.
    Package,
    /// A path within an image.
    Path,
}

/// The hash of `bytes`, uniform over 64 bits. No proof of equality: sharing requires a comparison of the
/// bytes.
pub fn hash(domain: Domain, bytes: &[u8]) -> u64 {
    xxh3_64_with_seed(bytes, domain as u64 + 1)
}

/// Combines two hashes; the order matters.
pub const fn combine(first: u64, second: u64) -> u64 {
    mix(first.rotate_left(29) ^ mix(second))
}

/// A permutation of 64-bit numbers without visible structure (the finalizer of MurmurHash3).
pub const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Hasher of keys that are hashes: the top bits of a sampled hash are zero, so they are mixed again.
#[derive(Debug, Default, Clone, Copy)]
pub struct OfHash(u64);

impl Hasher for OfHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 32;
    }
}

/// A map keyed by hashes.
pub type HashedMap<V> = HashMap<u64, V, BuildHasherDefault<OfHash>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_bytes_differ_between_domains() {
        assert_ne!(hash(Domain::Block, b"same"), hash(Domain::File, b"same"));
        assert_eq!(hash(Domain::File, b"same"), hash(Domain::File, b"same"));
    }

    #[test]
    fn combine_tells_the_order() {
        assert_ne!(combine(1, 2), combine(2, 1));
    }
}
