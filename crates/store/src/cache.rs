//! Committed metadata blocks in DRAM. Verifies what it loads; never writes.

use crate::{Result, StoreError};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use varve_extent_tree::MetaRead;
use varve_format::{BLOCK_SIZE, Block, BlockNo, Extent, verify_block};
use varve_media::Region;

const SHARDS: usize = 16;

/// The cache; its content is the committed state as long as the publishing lock is held for reading.
pub(crate) struct MetaCache {
    region: Arc<dyn Region>,
    blocks: u64,
    shards: Vec<Mutex<LruCache<u64, Arc<Block>>>>,
    inode_file: InodeFile,
}

/// Where blocks of the committed inode file are. It is asked for each inode, and only ever grows (but for repairs).
#[derive(Default)]
pub(crate) struct InodeFile {
    /// Length and first NVM block, by first block of the file.
    runs: RwLock<BTreeMap<u64, (u64, u64)>>,
}

impl InodeFile {
    /// The NVM block of block `index`, if it was asked for before.
    pub(crate) fn block(&self, index: u64) -> Option<BlockNo> {
        let runs = self.runs.read();
        let (first, (len, block)) = runs.range(..=index).next_back()?;
        (index - first < *len).then(|| BlockNo(block + (index - first)))
    }

    /// Keeps an extent of the committed tree.
    pub(crate) fn learn(&self, extent: &Extent) {
        let run = (u64::from(extent.len), extent.block.0);
        self.runs.write().insert(extent.file_block.0, run);
    }

    /// The tree changes.
    pub(crate) fn clear(&self) {
        self.runs.write().clear();
    }
}

impl MetaCache {
    pub(crate) fn new(region: Arc<dyn Region>, blocks: u64, capacity: usize) -> Self {
        let each = NonZeroUsize::new(capacity / SHARDS).unwrap_or(NonZeroUsize::MIN);
        let shards = (0..SHARDS).map(|_| Mutex::new(LruCache::new(each))).collect();
        Self {
            region,
            blocks,
            shards,
            inode_file: InodeFile::default(),
        }
    }

    pub(crate) const fn inode_file(&self) -> &InodeFile {
        &self.inode_file
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

    /// What is known of the inode file, if this view sees it as it is committed.
    fn inode_file(&self) -> Option<&InodeFile>;
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

    fn inode_file(&self) -> Option<&InodeFile> {
        Some(self.0.inode_file())
    }
}
