//! Open files by the handle number that the kernel holds.

use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_libfs::OpenFile;

const SHARDS: usize = 16;

/// One open file of the kernel.
#[derive(Clone)]
pub(crate) struct Handle {
    /// The file.
    pub(crate) file: OpenFile,
    /// Opened with `O_APPEND`.
    pub(crate) append: bool,
    /// Opened with `O_DIRECT`: reads and writes bypass the kernel's page cache.
    pub(crate) direct: bool,
    /// Opened with `O_SYNC` (true) or `O_DSYNC`: each write is durable before it is answered.
    pub(crate) sync: Option<bool>,
}

/// All open files of the kernel.
#[derive(Default)]
pub(crate) struct Handles {
    next: AtomicU64,
    shards: [RwLock<HashMap<u64, Handle>>; SHARDS],
}

impl Handles {
    /// Stores `handle` and returns its number.
    pub(crate) fn insert(&self, handle: Handle) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.shards[number as usize % SHARDS]
            .write()
            .insert(number, handle);
        number
    }

    /// Returns the handle with this number.
    pub(crate) fn get(&self, number: u64) -> Option<Handle> {
        self.shards[number as usize % SHARDS].read().get(&number).cloned()
    }

    /// Removes the handle with this number.
    pub(crate) fn remove(&self, number: u64) -> Option<Handle> {
        self.shards[number as usize % SHARDS].write().remove(&number)
    }

    /// Removes all handles.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            shard.write().clear();
        }
    }
}
