//! One page of memory, its hash, and pages that repeat one word.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The bits of a hash that a table entry keeps: 55.
pub const HASH_MASK: u64 = (1 << 55) - 1;

/// A page, aligned as direct I/O needs it.
#[derive(Clone, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(4096))]
pub struct Page(pub [u8; PAGE_BYTES]);

const _: () = assert!(size_of::<Page>() == PAGE_BYTES);

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Page({:#x})", self.hash())
    }
}

impl Default for Page {
    fn default() -> Self {
        Self([0; PAGE_BYTES])
    }
}

impl Page {
    /// `count` pages of zeros in one aligned allocation.
    #[must_use]
    pub fn zeroed(count: usize) -> Vec<Self> {
        Self::new_vec_zeroed(count).unwrap_or_default()
    }

    /// XXH3 over the page, cut to [`HASH_MASK`].
    #[must_use]
    pub fn hash(&self) -> u64 {
        xxh3_64(&self.0) & HASH_MASK
    }

    /// The 8-byte word that the page repeats, if it does.
    #[must_use]
    pub fn repeated_word(&self) -> Option<u64> {
        let (words, _) = self.0.as_chunks::<8>();
        let first = words.first()?;
        words
            .iter()
            .all(|word| word == first)
            .then(|| u64::from_ne_bytes(*first))
    }

    /// Fills the page with a repeated word.
    pub fn fill(&mut self, word: u64) {
        let (words, _) = self.0.as_chunks_mut::<8>();
        words.fill(word.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_word_is_found_and_filled_back() {
        let mut page = Page::default();
        assert_eq!(page.repeated_word(), Some(0));
        page.fill(0x3ff0_0000_0000_0000);
        assert_eq!(page.repeated_word(), Some(0x3ff0_0000_0000_0000));
        page.0[4095] ^= 1;
        assert_eq!(page.repeated_word(), None);
    }
}
