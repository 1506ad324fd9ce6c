//! Blocks read from SSD and HDD, bounded, least recently used out first. Knows no tiers; stale blocks cannot
//! be found, since the key holds the version of the inode's extents.

use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use varve_format::BLOCK_SIZE;

/// Most blocks kept: 32 MiB.
const BLOCKS_MAX: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");

/// Inode id, version of its extents, block in the file.
type Key = (u64, u64, u64);

/// The read cache of one session.
pub(super) struct ReadCache {
    blocks: Mutex<LruCache<Key, Box<[u8]>>>,
}

impl ReadCache {
    pub(super) fn new() -> Self {
        Self {
            blocks: Mutex::new(LruCache::new(BLOCKS_MAX)),
        }
    }

    /// Copies `out.len()` bytes from `within` of the block, if it is here.
    pub(super) fn get(&self, inode: u64, version: u64, block: u64, within: usize, out: &mut [u8]) -> bool {
        match self.blocks.lock().get(&(inode, version, block)) {
            Some(bytes) => {
                out.copy_from_slice(&bytes[within..within + out.len()]);
                true
            }
            None => false,
        }
    }

    /// Keeps blocks from `first` on; a last one that is short is filled with zeros.
    pub(super) fn put(&self, inode: u64, version: u64, first: u64, bytes: &[u8]) {
        let mut blocks = self.blocks.lock();
        for (index, piece) in bytes.chunks(BLOCK_SIZE).enumerate() {
            let mut block = vec![0; BLOCK_SIZE].into_boxed_slice();
            block[..piece.len()].copy_from_slice(piece);
            blocks.put((inode, version, first + index as u64), block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ReadCache;

    #[test]
    fn cache_does_not_find_a_block_of_another_version() {
        let cache = ReadCache::new();
        cache.put(1, 1, 10, &[7; 5000]);
        let mut out = [0; 10];
        assert!(cache.get(1, 1, 11, 900, &mut out));
        assert_eq!(out, [7, 7, 7, 7, 0, 0, 0, 0, 0, 0]);
        assert!(!cache.get(1, 2, 11, 900, &mut out));
        assert!(!cache.get(2, 1, 11, 900, &mut out));
    }
}
