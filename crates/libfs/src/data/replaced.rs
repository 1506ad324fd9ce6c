//! Files whose extents have become void, since a digest placed what was written, or data was moved. A
//! program that reads one of them most likely reads the others too, so their maps come in one request.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use varve_format::BLOCK_BYTES;
use varve_ipc::TOLD_MAX;

use crate::inode::{Inode, InodeBody};
use crate::sync::Mutex;
use crate::sync::atomic::Ordering;

/// Most files that are remembered. A reference keeps the memory of a forgotten inode.
const KEPT: usize = 2048;
/// Most files that are looked at for each request.
const LOOKED_AT: usize = 128;

/// Whether a file has so few blocks that its map is told whole (but for space beyond its end).
pub(super) const fn is_small(size: u64) -> bool {
    size < TOLD_MAX as u64 * BLOCK_BYTES
}

/// Such files without data in the log, oldest first, each once.
#[derive(Default)]
pub(super) struct Replaced(Mutex<VecDeque<Weak<Inode>>>);

impl Replaced {
    /// Notes a file, if it is small. The caller has its lock.
    pub(super) fn note(&self, inode: &Arc<Inode>, body: &InodeBody) {
        if !is_small(body.attr.size_bytes) || inode.noted.swap(true, Ordering::Relaxed) {
            return;
        }
        let mut files = self.0.lock();
        if files.len() == KEPT
            && let Some(oldest) = files.pop_front().and_then(|weak| weak.upgrade())
        {
            oldest.noted.store(false, Ordering::Relaxed);
        }
        files.push_back(Arc::downgrade(inode));
    }

    /// Takes up to `most` files out whose extents are not known, but for `asking`, each with the version of
    /// its map.
    pub(super) fn take(&self, most: usize, asking: &Inode) -> Vec<(Arc<Inode>, u64)> {
        let mut taken: Vec<(Arc<Inode>, u64)> = Vec::new();
        for _ in 0..LOOKED_AT {
            if taken.len() == most {
                break;
            }
            // No inode is locked, and none dropped, below the lock.
            let Some(weak) = self.0.lock().pop_front() else {
                break;
            };
            let Some(file) = weak.upgrade() else { continue };
            file.noted.store(false, Ordering::Relaxed);
            if std::ptr::eq(&*file, asking) {
                continue;
            }
            // One that has grown meanwhile gets no answer.
            if let Some(version) = file.unmapped() {
                taken.push((file, version));
            }
        }
        taken
    }
}
