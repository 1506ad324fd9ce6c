//! Shared blocks of SSD and HDD that were read, by their numbers: what files share is read once for all of
//! them. Bounded, least recently used out first. Knows no file and no tier.
//!
//! A number stands for equal bytes as long as the pool exists (docs/adr/0037), so nothing here becomes stale.
//! What is kept was compared with its checksums.

use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use varve_format::BLOCK_SIZE;

/// See the module.
pub(crate) struct SharedBlocks(Option<Mutex<LruCache<u64, Box<[u8]>>>>);

impl SharedBlocks {
    /// Keeps at most `blocks`; 0: none.
    pub(super) fn new(blocks: usize) -> Self {
        // Not made for that many: it grows.
        let bounded = |blocks| {
            let mut kept = LruCache::unbounded();
            kept.resize(blocks);
            Mutex::new(kept)
        };
        Self(NonZeroUsize::new(blocks).map(bounded))
    }

    /// Copies the blocks with successive numbers from `first` on, if all are here.
    pub(super) fn get(&self, first: u64, out: &mut [u8]) -> bool {
        let Some(kept) = &self.0 else { return false };
        let mut kept = kept.lock();
        for (number, block) in (first..).zip(out.chunks_mut(BLOCK_SIZE)) {
            let Some(bytes) = kept.get(&number) else {
                return false;
            };
            block.copy_from_slice(&bytes[..block.len()]);
        }
        true
    }

    /// Keeps whole blocks with successive numbers from `first` on.
    pub(super) fn put(&self, first: u64, bytes: &[u8]) {
        let Some(kept) = &self.0 else { return };
        let mut kept = kept.lock();
        for (number, block) in (first..).zip(bytes.chunks_exact(BLOCK_SIZE)) {
            kept.put(number, block.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SharedBlocks;
    use varve_format::BLOCK_SIZE;

    #[test]
    fn blocks_that_were_read_are_found_until_others_take_their_room() {
        let kept = SharedBlocks::new(3);
        let bytes: Vec<u8> = (0..3).flat_map(|at| [at; BLOCK_SIZE]).collect();
        kept.put(70, &bytes);
        let mut out = vec![9; 2 * BLOCK_SIZE];
        assert!(kept.get(71, &mut out));
        assert_eq!(out, bytes[BLOCK_SIZE..]);
        assert!(!kept.get(72, &mut out), "the second is not there");
        assert!(!kept.get(69, &mut out));
        kept.put(100, &bytes[..BLOCK_SIZE]);
        assert!(!kept.get(70, &mut out[..BLOCK_SIZE]), "the one that was not used");
        assert!(kept.get(71, &mut out[..10]));
        assert_eq!(out[..10], [1; 10]);

        let none = SharedBlocks::new(0);
        none.put(70, &bytes);
        assert!(!none.get(70, &mut out));
    }
}
