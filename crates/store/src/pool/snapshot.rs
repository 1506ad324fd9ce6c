//! Consistent views of the committed metadata.

use super::Store;
use crate::Result;
use crate::StoreError;
use crate::cache::{InodeFile, MetaCache};
use crate::layout::Layout;
use crate::reader::{MetaReader, View};
use parking_lot::RwLockReadGuard;
use std::sync::Arc;
use varve_extent_tree::MetaRead;
use varve_format::space::UnitRow;
use varve_format::{Block, BlockNo, Tier, TxId};

/// One consistent view of the committed metadata.
pub(crate) struct Snapshot<'s> {
    guard: RwLockReadGuard<'s, TxId>,
    view: Committed<'s>,
    layout: &'s Layout,
}

impl Snapshot<'_> {
    pub(crate) fn reader(&self) -> MetaReader<'_, Committed<'_>> {
        MetaReader {
            view: &self.view,
            layout: self.layout,
        }
    }

    pub(crate) fn tx(&self) -> TxId {
        *self.guard
    }
}

/// The committed state; valid while the publishing lock is held for reading.
#[derive(Clone, Copy)]
pub(crate) struct Committed<'c> {
    pub(crate) store: &'c Store,
    /// Nodes on slower tiers are returned even if their checksum differs from that in their tier's table: the
    /// caller checks it.
    pub(crate) trusting: bool,
}

impl Committed<'_> {
    fn reader(&self) -> MetaReader<'_, Self> {
        MetaReader {
            view: self,
            layout: &self.store.layout,
        }
    }
}

impl MetaRead for Committed<'_> {
    type Error = StoreError;
    fn read<R>(&self, block: BlockNo, f: impl FnOnce(&Block) -> R) -> Result<R> {
        self.store.cache.note_used(block);
        self.reader()
            .load_node(block, self.trusting)
            .map(|content| f(&content))
    }
}

impl View for Committed<'_> {
    fn read_raw<R>(
        &self,
        block: BlockNo,
        check: impl FnOnce(&Block) -> Result<()>,
        f: impl FnOnce(&Block) -> R,
    ) -> Result<R> {
        self.store.cache.note_used(block);
        self.store
            .cache
            .load_checked(block, check)
            .map(|content| f(&content))
    }

    fn inode_file(&self) -> Option<&InodeFile> {
        Some(self.store.cache.inode_file())
    }

    fn cache(&self) -> &MetaCache {
        &self.store.cache
    }

    fn footer(&self, tier: Tier, unit: u64, row: &UnitRow) -> Result<Arc<Vec<u32>>> {
        self.store.footer(tier, unit, row)
    }
}

impl Store {
    pub(crate) fn snapshot(&self) -> Snapshot<'_> {
        Snapshot {
            guard: self.newest.read(),
            view: Committed {
                store: self,
                trusting: self.trusting,
            },
            layout: &self.layout,
        }
    }

    /// As [`snapshot`](Self::snapshot), for callers that verify nodes on slower tiers themselves.
    pub(crate) fn trusting_snapshot(&self) -> Snapshot<'_> {
        let mut snapshot = self.snapshot();
        snapshot.view.trusting = true;
        snapshot
    }
}
