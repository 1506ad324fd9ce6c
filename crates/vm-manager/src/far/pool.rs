//! Slabs of a pool: one backend for each of its tiers, over one session with its daemon. Owns the session: it is
//! taken up again when the daemon was away, and who reads a page can wait for that. Which slab is
//! cold is `varve_far`'s.

mod session;
#[cfg(test)]
mod tests;

use session::Session;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use varve_far::backend::SLAB_BYTES;
use varve_far::{Backend, BackendError, PAGE_BYTES, Page, Slot};
use varve_format::{LeaseNo, Tier};
use varve_ipc::{Request, Response};
use varve_libfs::mounts::Table;
use zerocopy::IntoBytes;

/// Finds the pool that a directory is, or that is mounted there.
pub(super) fn at(dir: &Path) -> Option<PathBuf> {
    let dir = dir.canonicalize().ok()?;
    if dir.join("varve.toml").is_file() {
        return Some(dir);
    }
    let mounts = Table::open().and_then(|mut table| table.read()).ok()?;
    let mount = mounts.into_iter().rev().find(|mount| mount.at == dir)?;
    Some(mount.pool)
}

/// Opens a session for slabs, at most `limit_slabs` on all tiers; a backend for each tier.
///
/// # Errors
/// No daemon, no right to a session, or a pool that grants no slabs.
pub(super) fn open(pool: &Path, limit_slabs: u32) -> std::io::Result<Vec<PoolSlabs>> {
    let (session, tiers) = Session::open(pool, limit_slabs)?;
    let of = |(tier, most): (Tier, u64)| PoolSlabs {
        name: format!("{} of {}", tier.name(), pool.display()),
        session: Arc::clone(&session),
        tier,
        capacity: u32::try_from(most).unwrap_or(u32::MAX).min(limit_slabs),
        slots: Mutex::default(),
    };
    Ok(tiers.into_iter().filter(|(_, most)| *most > 0).map(of).collect())
}

/// Slabs on one tier of a pool.
#[derive(Debug)]
pub(super) struct PoolSlabs {
    name: String,
    session: Arc<Session>,
    tier: Tier,
    capacity: u32,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    slabs: Vec<Option<LeaseNo>>,
    free: Vec<u32>,
}

impl Slots {
    fn add(&mut self, slab: LeaseNo) -> Slot {
        let number = self.free.pop().unwrap_or_else(|| {
            self.slabs.push(None);
            self.slabs.len() as u32 - 1
        });
        self.slabs[number as usize] = Some(slab);
        Slot(number)
    }
}

/// The whole pages that cover `offset..offset + len`: first byte, and bytes.
const fn covering(offset: usize, len: usize) -> (usize, usize) {
    let first = offset / PAGE_BYTES * PAGE_BYTES;
    (first, (offset + len).div_ceil(PAGE_BYTES) * PAGE_BYTES - first)
}

fn inside(slot: Slot, offset: usize, len: usize) -> Result<(), BackendError> {
    match offset.checked_add(len) {
        Some(end) if end <= SLAB_BYTES => Ok(()),
        _ => Err(BackendError::OutOfRange(slot.0)),
    }
}

impl PoolSlabs {
    fn slab(&self, slot: Slot) -> Result<LeaseNo, BackendError> {
        let slots = self.slots.lock();
        let slab = slots.slabs.get(slot.0 as usize).copied().flatten();
        slab.ok_or(BackendError::OutOfRange(slot.0))
    }

    /// The slots that have these slabs, of which some are of other tiers.
    fn of(&self, slabs: &[LeaseNo]) -> Vec<Slot> {
        if slabs.is_empty() {
            return Vec::new();
        }
        let slots = self.slots.lock();
        let all = slots.slabs.iter().enumerate();
        // The numbers come in order.
        let own = all.filter(|(_, slab)| slab.is_some_and(|slab| slabs.binary_search(&slab).is_ok()));
        own.map(|(number, _)| Slot(number as u32)).collect()
    }

    /// Reads ranges of whole pages, one after the other.
    fn pages(&self, slot: Slot, ranges: Vec<(u32, u32)>) -> Result<Vec<u8>, BackendError> {
        let slab = self.slab(slot)?;
        let bytes: usize = ranges.iter().map(|(_, len)| *len as usize).sum();
        match self.session.call(Request::ReadSlab { slab, ranges })? {
            Response::Bytes(read) if read.len() == bytes => Ok(read),
            _ => Err(BackendError::Io(std::io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn put(&self, slot: Slot, offset: usize, bytes: &[u8]) -> Result<(), BackendError> {
        let slab = self.slab(slot)?;
        let write = Request::WriteSlab {
            slab,
            offset: offset as u32,
            bytes: bytes.to_vec(),
        };
        self.session.call(write).map(drop)
    }
}

impl Backend for PoolSlabs {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity_slabs(&self) -> u32 {
        self.capacity
    }

    fn alloc(&self) -> Result<Slot, BackendError> {
        self.session.grant(self.tier, |slab| self.slots.lock().add(slab))
    }

    fn dealloc(&self, slot: Slot) {
        let mut slots = self.slots.lock();
        let slab = slots.slabs.get_mut(slot.0 as usize).and_then(Option::take);
        if let Some(slab) = slab {
            slots.free.push(slot.0);
            self.session.give_back(slab);
        }
    }

    fn read(&self, slot: Slot, offset_bytes: usize, bytes: &mut [u8]) -> Result<(), BackendError> {
        inside(slot, offset_bytes, bytes.len())?;
        let (first, len) = covering(offset_bytes, bytes.len());
        let read = self.pages(slot, vec![(first as u32, len as u32)])?;
        bytes.copy_from_slice(&read[offset_bytes - first..][..bytes.len()]);
        Ok(())
    }

    fn write(&self, slot: Slot, offset_bytes: usize, bytes: &[u8]) -> Result<(), BackendError> {
        inside(slot, offset_bytes, bytes.len())?;
        let (first, len) = covering(offset_bytes, bytes.len());
        if (first, len) == (offset_bytes, bytes.len()) {
            return self.put(slot, offset_bytes, bytes);
        }
        let mut pages = Page::zeroed(len / PAGE_BYTES);
        pages
            .as_mut_bytes()
            .copy_from_slice(&self.pages(slot, vec![(first as u32, len as u32)])?);
        pages.as_mut_bytes()[offset_bytes - first..][..bytes.len()].copy_from_slice(bytes);
        self.put(slot, first, pages.as_bytes())
    }

    fn sg_read(&self, slot: Slot, ranges: &mut [(usize, &mut [u8])]) -> Result<(), BackendError> {
        for ranges in ranges.chunks_mut(varve_ipc::SLAB_RANGES_MAX) {
            let mut asked = Vec::with_capacity(ranges.len());
            for (offset, bytes) in &*ranges {
                inside(slot, *offset, bytes.len())?;
                let (first, len) = covering(*offset, bytes.len());
                asked.push((first as u32, len as u32));
            }
            let read = self.pages(slot, asked.clone())?;
            let mut rest = &read[..];
            for ((offset, bytes), (first, len)) in ranges.iter_mut().zip(asked) {
                let (pages, more) = rest.split_at(len as usize);
                bytes.copy_from_slice(&pages[*offset - first as usize..][..bytes.len()]);
                rest = more;
            }
        }
        Ok(())
    }

    fn sg_write(&self, slot: Slot, offset_bytes: usize, ranges: &[&[u8]]) -> Result<(), BackendError> {
        self.write(slot, offset_bytes, &ranges.concat())
    }

    fn wanted_back(&self) -> Vec<Slot> {
        self.of(&self.session.wanted())
    }

    fn taken(&self) -> Vec<Slot> {
        self.of(&self.session.taken())
    }

    fn may_be_away(&self) -> bool {
        true
    }

    fn is_away(&self) -> bool {
        self.session.is_away()
    }

    fn wait(&self) -> bool {
        self.session.wait()
    }
}

#[cfg(test)]
mod ranges {
    use super::covering;

    #[test]
    fn pages_cover_ranges_that_begin_and_end_inside_them() {
        assert_eq!(covering(0, 4096), (0, 4096));
        assert_eq!(covering(4095, 2), (0, 8192));
        assert_eq!(covering(8192, 256), (8192, 4096));
        assert_eq!(covering(5000, 4096), (4096, 8192));
    }
}
