//! Committed metadata blocks in DRAM. Verifies what it loads; never writes.

use crate::{Result, StoreError};
use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::sync::Arc;
use varve_extent_tree::MetaRead;
use varve_format::{BLOCK_SIZE, Block, BlockNo, verify_block};
use varve_media::Region;

const SHARDS: usize = 16;

/// The cache; its content is the committed state as long as the publishing lock is held for reading.
pub(crate) struct MetaCache {
    region: Arc<dyn Region>,
    blocks: u64,
    shards: Vec<Mutex<LruCache<u64, Arc<Block>>>>,
}

impl MetaCache {
    pub(crate) fn new(region: Arc<dyn Region>, blocks: u64, capacity: usize) -> Self {
        let each = NonZeroUsize::new(capacity / SHARDS).unwrap_or(NonZeroUsize::MIN);
        let shards = (0..SHARDS).map(|_| Mutex::new(LruCache::new(each))).collect();
        Self {
            region,
            blocks,
            shards,
        }
    }

    fn shard(&self, block: u64) -> &Mutex<LruCache<u64, Arc<Block>>> {
        &self.shards[block as usize % SHARDS]
    }

    /// The block, verified unless it is `raw` (inode images check themselves).
    pub(crate) fn load(&self, block: BlockNo, raw: bool) -> Result<Arc<Block>> {
        if let Some(found) = self.shard(block.0).lock().get(&block.0) {
            return Ok(Arc::clone(found));
        }
        if block.0 >= self.blocks {
            return Err(StoreError::Damaged(format!(
                "pointer to NVM block {block}, which does not exist"
            )));
        }
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        self.region.read(block.offset_bytes(), bytes.as_mut_slice())?;
        if !raw {
            verify_block(&bytes).map_err(|fault| StoreError::Block { block, fault })?;
        }
        let loaded: Arc<Block> = Arc::from(bytes);
        // Another reader may have been faster; both read the same committed bytes.
        self.shard(block.0).lock().put(block.0, Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Puts committed content.
    pub(crate) fn put(&self, block: u64, content: Arc<Block>) {
        self.shard(block).lock().put(block, content);
    }

    /// Forgets a block that was freed, so that a later life is not read from here.
    pub(crate) fn forget(&self, block: u64) {
        self.shard(block).lock().pop(&block);
    }
}

/// Reading metadata, with the few things that the trees' trait does not have.
pub(crate) trait View: MetaRead<Error = StoreError> {
    /// As [`MetaRead::read`], for a block without header.
    fn read_raw<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R>;
}

/// The committed state; valid while the publishing lock is held for reading.
#[derive(Clone, Copy)]
pub(crate) struct Committed<'c>(pub(crate) &'c MetaCache);

impl MetaRead for Committed<'_> {
    type Error = StoreError;
    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        self.0.load(block, false).map(|content| f(&content))
    }
}

impl View for Committed<'_> {
    fn read_raw<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        self.0.load(block, true).map(|content| f(&content))
    }
}
