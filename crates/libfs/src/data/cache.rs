//! Blocks read from SSD and HDD, bounded, least recently used out first. Knows no tiers; stale blocks cannot
//! be found, since the key holds the version of the inode's extents, or the number of a shared block, which
//! stands for equal bytes for ever. So files that share a block share its copy here.

use crate::hash::Lru;
use std::hash::RandomState;
use std::num::NonZeroUsize;
use varve_format::BLOCK_SIZE;
use varve_ipc::NumberedBlocks;
use varve_media::lock::Mutex;

/// Most blocks kept: 32 MiB.
const BLOCKS_MAX: NonZeroUsize = NonZeroUsize::new(8192).expect("not zero");

/// What a block is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    /// A block of a file.
    File {
        /// Inode id.
        inode: u64,
        /// Version of its extents.
        version: u64,
        block: u64,
    },
    /// A number of the shared space.
    Shared(u64),
}

/// The keys of a file's blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys<'n> {
    pub(super) inode: u64,
    pub(super) version: u64,
    /// Shared blocks, in order.
    pub(super) numbered: &'n [NumberedBlocks],
}

impl Keys<'_> {
    const fn of_file(&self, block: u64) -> Key {
        Key::File {
            inode: self.inode,
            version: self.version,
            block,
        }
    }

    fn of(&self, block: u64) -> Key {
        let end = |part: &NumberedBlocks| part.file_block.0 + u64::from(part.blocks);
        let at = self.numbered.partition_point(|part| end(part) <= block);
        match self.numbered.get(at) {
            Some(part) if part.file_block.0 <= block => {
                Key::Shared(part.number + (block - part.file_block.0))
            }
            _ => self.of_file(block),
        }
    }
}

/// The read cache of one session.
pub(super) struct ReadCache {
    blocks: Mutex<Lru<Key, Box<[u8]>>>,
}

impl ReadCache {
    pub(super) fn new() -> Self {
        Self {
            blocks: Mutex::new(Lru::with_hasher(BLOCKS_MAX, RandomState::new())),
        }
    }

    /// Copies `out.len()` bytes from `within` of the block, if it is here.
    pub(super) fn get(&self, keys: Keys<'_>, block: u64, within: usize, out: &mut [u8]) -> bool {
        let mut blocks = self.blocks.lock();
        let key = keys.of(block);
        let mut found = blocks.get(&key);
        if found.is_none() && matches!(key, Key::Shared(_)) {
            // The last block of the file.
            found = blocks.get(&keys.of_file(block));
        }
        let Some(bytes) = found else { return false };
        out.copy_from_slice(&bytes[within..within + out.len()]);
        true
    }

    /// Keeps blocks from `first` on. Of a last one that is short the rest is zeros; it is kept for this file
    /// alone, since others may have more of it.
    pub(super) fn put(&self, keys: Keys<'_>, first: u64, bytes: &[u8]) {
        let mut blocks = self.blocks.lock();
        for (block, piece) in (first..).zip(bytes.chunks(BLOCK_SIZE)) {
            let key = match piece.len() {
                BLOCK_SIZE => keys.of(block),
                _ => keys.of_file(block),
            };
            let mut whole = vec![0; BLOCK_SIZE].into_boxed_slice();
            whole[..piece.len()].copy_from_slice(piece);
            blocks.put(key, whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Keys, ReadCache};
    use varve_format::{BLOCK_SIZE, FileBlock};
    use varve_ipc::NumberedBlocks;

    const fn keys(inode: u64, version: u64, numbered: &[NumberedBlocks]) -> Keys<'_> {
        Keys {
            inode,
            version,
            numbered,
        }
    }

    #[test]
    fn cache_does_not_find_a_block_of_another_version() {
        let cache = ReadCache::new();
        cache.put(keys(1, 1, &[]), 10, &[7; 5000]);
        let mut out = [0; 10];
        assert!(cache.get(keys(1, 1, &[]), 11, 900, &mut out));
        assert_eq!(out, [7, 7, 7, 7, 0, 0, 0, 0, 0, 0]);
        assert!(!cache.get(keys(1, 2, &[]), 11, 900, &mut out));
        assert!(!cache.get(keys(2, 1, &[]), 11, 900, &mut out));
    }

    #[test]
    fn cache_keeps_shared_blocks_once_for_all_files() {
        let cache = ReadCache::new();
        let shared = |file_block, blocks, number| NumberedBlocks {
            file_block: FileBlock(file_block),
            blocks,
            number,
        };
        let first = [shared(10, 2, 70)];
        let mut bytes = [7; 4 * BLOCK_SIZE];
        bytes[2 * BLOCK_SIZE..].fill(9);
        cache.put(keys(1, 1, &first), 10, &bytes);
        assert_eq!(cache.blocks.lock().len(), 4);
        let other = [shared(0, 1, 71), shared(5, 3, 69)];
        let (other, mut out) = (keys(2, 5, &other), [0; 8]);
        for (block, found) in [
            (0, true),
            (1, false),
            (5, false),
            (6, true),
            (7, true),
            (12, false),
        ] {
            assert_eq!(cache.get(other, block, 0, &mut out), found, "block {block}");
        }
        assert_eq!(out, [7; 8]);
        cache.put(other, 5, &[7; 3 * BLOCK_SIZE]);
        assert_eq!(cache.blocks.lock().len(), 5, "two of the three are there already");
        assert!(cache.get(keys(1, 9, &first), 11, 0, &mut out), "another version");
    }

    #[test]
    fn cache_keeps_a_part_of_a_shared_block_for_one_file() {
        let cache = ReadCache::new();
        let shared = [NumberedBlocks {
            file_block: FileBlock(0),
            blocks: 1,
            number: 3,
        }];
        cache.put(keys(1, 1, &shared), 0, &[1; 100]);
        assert!(cache.get(keys(1, 1, &shared), 0, 0, &mut [0; 10]));
        assert!(!cache.get(keys(2, 1, &shared), 0, 0, &mut [0; 10]));
    }
}
