//! Committed metadata blocks in DRAM, from every tier. Verifies the blocks that it loads; never writes.
//! Records which blocks of NVM were used recently.

use crate::layout::Layout;
use crate::{Devices, Result, StoreError};
use lru::LruCache;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, Block, BlockNo, Extent, Tier, verify_block};

const SHARDS: usize = 16;

/// The metadata cache. Its content is the committed state as long as the publishing lock is held for reading.
pub(crate) struct MetaCache {
    devices: Devices,
    layout: Layout,
    shards: Vec<Mutex<LruCache<u64, Arc<Block>>>>,
    inode_file: InodeFile,
    used: Used,
    /// Blocks read from slower tiers, by tier.
    cold_reads: [AtomicU64; 3],
}

/// Blocks of NVM that were used since the last query, a bit each. A hint.
struct Used(Vec<AtomicU64>);

impl Used {
    fn new(blocks: u64) -> Self {
        Self((0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn note(&self, block: u64) {
        if let Some(word) = self.0.get((block / 64) as usize) {
            let mask = 1 << (block % 64);
            // The bit is mostly set already, and a load does not disturb other readers.
            if word.load(Ordering::Relaxed) & mask == 0 {
                word.fetch_or(mask, Ordering::Relaxed);
            }
        }
    }

    fn take(&self, block: u64) -> bool {
        let mask = 1 << (block % 64);
        self.0
            .get((block / 64) as usize)
            .is_some_and(|word| word.fetch_and(!mask, Ordering::Relaxed) & mask != 0)
    }
}

/// Locations of the blocks of the committed inode file, which are needed for every inode.
#[derive(Default)]
pub(crate) struct InodeFile {
    /// Length and first block, with its tier, by first block of the file.
    runs: RwLock<BTreeMap<u64, (u64, u64)>>,
}

impl InodeFile {
    /// Returns the location of block `index` if it was looked up before.
    pub(crate) fn block(&self, index: u64) -> Option<BlockNo> {
        let runs = self.runs.read();
        let (first, (len, block)) = runs.range(..=index).next_back()?;
        (index - first < *len).then(|| BlockNo(block + (index - first)))
    }

    /// Stores an extent of the committed tree.
    pub(crate) fn learn(&self, extent: &Extent) {
        let run = (u64::from(extent.len), BlockNo::on(extent.tier, extent.block.0).0);
        self.runs.write().insert(extent.file_block.0, run);
    }

    /// Forgets all extents, because the tree changes.
    pub(crate) fn clear(&self) {
        self.runs.write().clear();
    }
}

impl MetaCache {
    pub(crate) fn new(devices: &Devices, layout: &Layout, capacity: usize) -> Self {
        let each = NonZeroUsize::new(capacity / SHARDS).unwrap_or(NonZeroUsize::MIN);
        let shards = (0..SHARDS).map(|_| Mutex::new(LruCache::new(each))).collect();
        Self {
            devices: devices.clone(),
            layout: layout.clone(),
            shards,
            inode_file: InodeFile::default(),
            used: Used::new(layout.blocks(Tier::Nvm)),
            cold_reads: Default::default(),
        }
    }

    pub(crate) const fn inode_file(&self) -> &InodeFile {
        &self.inode_file
    }

    /// Returns the number of blocks read from a slower tier.
    pub(crate) fn cold_reads(&self, tier: Tier) -> u64 {
        self.cold_reads[tier as usize].load(Ordering::Relaxed)
    }

    /// Notes the use of a block; does nothing if it is not in NVM.
    pub(crate) fn note_used(&self, block: BlockNo) {
        self.used.note(block.0);
    }

    /// Returns whether a block of NVM was used since the last call.
    pub(crate) fn take_used(&self, block: BlockNo) -> bool {
        self.used.take(block.0)
    }

    fn shard(&self, block: u64) -> &Mutex<LruCache<u64, Arc<Block>>> {
        &self.shards[block as usize % SHARDS]
    }

    /// Returns the block, verified unless it is `raw` (inode images have their own checksums).
    pub(crate) fn load(&self, block: BlockNo, raw: bool) -> Result<Arc<Block>> {
        self.load_checked(block, |bytes| {
            if raw {
                return Ok(());
            }
            verify_block(bytes).map_err(|fault| StoreError::Block { block, fault })
        })
    }

    /// Returns the block; calls `check` when it is read from its medium.
    pub(crate) fn load_checked(
        &self,
        block: BlockNo,
        check: impl FnOnce(&Block) -> Result<()>,
    ) -> Result<Arc<Block>> {
        if let Some(found) = self.shard(block.0).lock().get(&block.0) {
            return Ok(Arc::clone(found));
        }
        let bytes = self.read_medium(block)?;
        check(&bytes)?;
        let loaded: Arc<Block> = Arc::from(bytes);
        // Another reader may have been faster; both read the same committed bytes.
        self.shard(block.0).lock().put(block.0, Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Reads the bytes of a block from its medium.
    pub(crate) fn read_medium(&self, block: BlockNo) -> Result<Box<Block>> {
        let mut bytes: Box<Block> = Box::new([0; BLOCK_SIZE]);
        match block.home() {
            Some((Tier::Nvm, number)) if number < self.layout.blocks(Tier::Nvm) => {
                self.devices
                    .nvm
                    .read(number * BLOCK_BYTES, bytes.as_mut_slice())?;
            }
            Some((tier, number)) if tier != Tier::Nvm && self.layout.usable(tier, number) => {
                let device = self
                    .devices
                    .block_device(tier)
                    .ok_or_else(|| StoreError::Damaged(format!("the pool has no {} tier", tier.name())))?;
                self.cold_reads[tier as usize].fetch_add(1, Ordering::Relaxed);
                device.read(number * BLOCK_BYTES, bytes.as_mut_slice())?;
            }
            _ => {
                return Err(StoreError::Damaged(format!(
                    "pointer to metadata block {block}, which does not exist"
                )));
            }
        }
        Ok(bytes)
    }

    /// Stores the committed content of a block.
    pub(crate) fn put(&self, block: u64, content: Arc<Block>) {
        self.shard(block).lock().put(block, content);
    }

    /// Forgets a freed block, so that its old content is not read after the block is reused.
    pub(crate) fn forget(&self, block: u64) {
        self.shard(block).lock().pop(&block);
    }
}
