//! The data path against a byte model, with a daemon that digests at random moments.
#![allow(clippy::unwrap_used)]

mod beside;
mod direct;
pub(crate) mod fake;
mod maps;
mod model;
mod races;
mod sessions;

use super::DataPlane;
use crate::inode::Inode;
use fake::Fake;
use std::sync::Arc;
use varve_ipc::ManualClock;

/// A session with the fake daemon.
pub(crate) struct Rig {
    pub fake: Arc<Fake>,
    pub plane: DataPlane,
    _dir: tempfile::TempDir,
}

impl Rig {
    /// The wait for space is so long that a busy machine does not matter.
    pub(crate) fn new(log_chunks: u64, log_max_chunks: u64) -> Self {
        Self::that_waits(log_chunks, log_max_chunks, 60_000)
    }

    pub(crate) fn that_waits(log_chunks: u64, log_max_chunks: u64, wait_ms: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm")
            .or_else(|_| tempfile::tempdir())
            .unwrap();
        let chunk = varve_format::log::CHUNK_BYTES;
        let fake = Fake::new(dir.path(), log_chunks * chunk, log_max_chunks * chunk, wait_ms);
        let plane = DataPlane::new(
            &fake.welcome(),
            fake.clone(),
            fake.page.clone(),
            Some(fake.log.clone()),
            Some(fake.nvm.clone()),
            None,
            Arc::new(ManualClock::new(1_000)),
        );
        Self {
            fake,
            plane,
            _dir: dir,
        }
    }

    /// A session that reads the SSD by itself; the places are those of NVM.
    pub(crate) fn direct(log_chunks: u64, log_max_chunks: u64) -> (Self, Arc<direct::Disk>) {
        let mut rig = Self::new(log_chunks, log_max_chunks);
        let disk = Arc::new(direct::Disk::of(rig.fake.nvm.clone()));
        rig.plane = rig.plane.reading_from(Some(disk.clone()));
        *rig.fake.tier.lock() = varve_format::Tier::Ssd;
        (rig, disk)
    }

    pub(crate) fn inode(ino: u64) -> Arc<Inode> {
        Arc::new(Inode::new(fake::attr(ino)))
    }

    /// Reads as an open file does: without a lock if possible. Returns the number of bytes, and whether it
    /// was without a lock.
    pub(crate) fn read(&self, inode: &Inode, offset: u64, out: &mut [u8]) -> (usize, bool) {
        match self.plane.try_read(inode, offset, out, || true) {
            Some(count) => (count, true),
            None => (self.plane.read(inode, offset, out).unwrap(), false),
        }
    }
}

/// Reads all of a file.
pub(crate) fn contents(plane: &DataPlane, inode: &Inode) -> Vec<u8> {
    let mut out = vec![0xAA; inode.read().attr.size_bytes as usize];
    let len = plane.read(inode, 0, &mut out).unwrap();
    assert_eq!(len, out.len());
    out
}
