//! Committed metadata blocks in DRAM, from every tier. Verifies what it loads; never writes. Remembers which
//! blocks of NVM were used lately.

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

/// The cache; its content is the committed state as long as the publishing lock is held for reading.
pub(crate) struct MetaCache {
    devices: Devices,
    layout: Layout,
    shards: Vec<Mutex<LruCache<u64, Arc<Block>>>>,
    inode_file: InodeFile,
    used: Used,
    /// Blocks read from slower tiers, by tier.
    cold_reads: [AtomicU64; 3],
}

/// Blocks of NVM that were used since they were last asked for, a bit each. A hint.
struct Used(Vec<AtomicU64>);

impl Used {
    fn new(blocks: u64) -> Self {
        Self((0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn note(&self, block: u64) {
        if let Some(word) = self.0.get((block / 64) as usize) {
            let mask = 1 << (block % 64);
            // Mostly it is set, and a look costs other readers nothing.
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

/// Where blocks of the committed inode file are. It is asked for each inode.
#[derive(Default)]
pub(crate) struct InodeFile {
    /// Length and first block, with its tier, by first block of the file.
    runs: RwLock<BTreeMap<u64, (u64, u64)>>,
}

impl InodeFile {
    /// Where block `index` lies, if it was asked for before.
    pub(crate) fn block(&self, index: u64) -> Option<BlockNo> {
        let runs = self.runs.read();
        let (first, (len, block)) = runs.range(..=index).next_back()?;
        (index - first < *len).then(|| BlockNo(block + (index - first)))
    }

    /// Keeps an extent of the committed tree.
    pub(crate) fn learn(&self, extent: &Extent) {
        let run = (u64::from(extent.len), BlockNo::on(extent.tier, extent.block.0).0);
        self.runs.write().insert(extent.file_block.0, run);
    }

    /// The tree changes.
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

    /// Blocks read from a slower tier.
    pub(crate) fn cold_reads(&self, tier: Tier) -> u64 {
        self.cold_reads[tier as usize].load(Ordering::Relaxed)
    }

    /// A block is used; nothing if it is not in NVM.
    pub(crate) fn note_used(&self, block: BlockNo) {
        self.used.note(block.0);
    }

    /// Whether a block of NVM was used since the last call.
    pub(crate) fn take_used(&self, block: BlockNo) -> bool {
        self.used.take(block.0)
    }

    fn shard(&self, block: u64) -> &Mutex<LruCache<u64, Arc<Block>>> {
        &self.shards[block as usize % SHARDS]
    }

    /// The block, verified unless it is `raw` (inode images check themselves).
    pub(crate) fn load(&self, block: BlockNo, raw: bool) -> Result<Arc<Block>> {
        self.load_checked(block, |bytes| {
            if raw {
                return Ok(());
            }
            verify_block(bytes).map_err(|fault| StoreError::Block { block, fault })
        })
    }

    /// The block; `check` sees it when it comes from its medium.
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

    /// The bytes of a block as they lie on its medium.
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

    /// Puts committed content.
    pub(crate) fn put(&self, block: u64, content: Arc<Block>) {
        self.shard(block).lock().put(block, content);
    }

    /// Forgets a block that was freed, so that a later life is not read from here.
    pub(crate) fn forget(&self, block: u64) {
        self.shard(block).lock().pop(&block);
    }
}
