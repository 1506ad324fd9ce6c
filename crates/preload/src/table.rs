//! The table of descriptors that are served here. Knows numbers and descriptions, and never asks the kernel.

use crate::ofd::Ofd;
use crate::why::Why;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use varve_media::lock::RwLock;

const CHUNK: usize = 1024;
const CHUNKS: usize = 256;
/// Descriptors from this number on are never served: such opens go to the kernel.
pub const LIMIT: usize = CHUNK * CHUNKS;

#[derive(Default)]
struct Slot {
    ours: AtomicBool,
    /// Why a descriptor of the mount is the kernel's: the reason's number, plus one; 0 for others. Kept for
    /// the counters only.
    given: AtomicU8,
    ofd: RwLock<Option<Arc<Ofd>>>,
}

/// Descriptors by number.
pub struct Table {
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    /// One more than the highest number that was ever served.
    top: AtomicUsize,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            chunks: [const { OnceLock::new() }; CHUNKS],
            top: AtomicUsize::new(0),
        }
    }
}

impl Table {
    fn slot(&self, fd: i32) -> Option<&Slot> {
        let at = usize::try_from(fd).ok().filter(|at| *at < LIMIT)?;
        self.chunks[at / CHUNK].get().map(|chunk| &chunk[at % CHUNK])
    }

    /// Returns the description behind `fd`, if it is served here.
    #[must_use]
    pub fn get(&self, fd: i32) -> Option<Arc<Ofd>> {
        let slot = self.slot(fd)?;
        if !slot.ours.load(Ordering::Acquire) {
            return None;
        }
        slot.ofd.read().clone()
    }

    /// Whether `fd` is served here.
    #[must_use]
    pub fn has(&self, fd: i32) -> bool {
        self.slot(fd)
            .is_some_and(|slot| slot.ours.load(Ordering::Acquire))
    }

    /// Returns why the kernel serves `fd`, if that is known to be a descriptor of the mount.
    #[must_use]
    pub fn given(&self, fd: i32) -> Option<Why> {
        let number = self.slot(fd)?.given.load(Ordering::Relaxed);
        number.checked_sub(1).and_then(Why::of_number)
    }

    /// Records that `fd` is a descriptor of the mount that the kernel serves, and why, or that it is none.
    pub fn set_given(&self, fd: i32, why: Option<Why>) {
        let Some(why) = why else {
            if let Some(slot) = self.slot(fd) {
                slot.given.store(0, Ordering::Relaxed);
            }
            return;
        };
        if let Some(chunk) = self.chunk(fd) {
            chunk[fd as usize % CHUNK]
                .given
                .store(why as u8 + 1, Ordering::Relaxed);
        }
    }

    /// Clears these marks of the descriptors `first..=last`, which are being closed.
    pub fn forget_given(&self, first: u32, last: u32) {
        let closed = first as usize..=last as usize;
        for (i, chunk) in self.chunks.iter().enumerate() {
            for (k, slot) in chunk.get().into_iter().flatten().enumerate() {
                if closed.contains(&(i * CHUNK + k)) {
                    slot.given.store(0, Ordering::Relaxed);
                }
            }
        }
    }

    /// Takes over the marks of `parent`.
    pub fn inherit_given(&self, parent: &Self) {
        for (i, chunk) in parent.chunks.iter().enumerate() {
            for (k, slot) in chunk.get().into_iter().flatten().enumerate() {
                let number = slot.given.load(Ordering::Relaxed);
                if let Some(why) = number.checked_sub(1).and_then(Why::of_number) {
                    self.set_given((i * CHUNK + k) as i32, Some(why));
                }
            }
        }
    }

    /// Returns the chunk of the table that holds `fd`, making it if needed; `None` if the number is too high.
    fn chunk(&self, fd: i32) -> Option<&[Slot]> {
        let at = usize::try_from(fd).ok().filter(|at| *at < LIMIT)?;
        let fresh = || (0..CHUNK).map(|_| Slot::default()).collect();
        Some(self.chunks[at / CHUNK].get_or_init(fresh))
    }

    /// Serves `fd` as `ofd`. False, with nothing done, if the number is too high.
    #[must_use]
    pub fn put(&self, fd: i32, ofd: Arc<Ofd>) -> bool {
        let Some(chunk) = self.chunk(fd) else {
            return false;
        };
        let at = fd as usize;
        let slot = &chunk[at % CHUNK];
        slot.given.store(0, Ordering::Relaxed);
        let old = slot.ofd.write().replace(ofd);
        slot.ours.store(true, Ordering::Release);
        self.top.fetch_max(at + 1, Ordering::AcqRel);
        drop(old);
        true
    }

    /// Stops serving `fd`. Returns its description.
    pub fn take(&self, fd: i32) -> Option<Arc<Ofd>> {
        let slot = self.slot(fd)?;
        if !slot.ours.swap(false, Ordering::AcqRel) {
            return None;
        }
        slot.ofd.write().take()
    }

    /// Whether no descriptor was ever served.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.top.load(Ordering::Acquire) == 0
    }

    /// Returns all served descriptors.
    #[must_use]
    pub fn all(&self) -> Vec<(i32, Arc<Ofd>)> {
        (0..self.top.load(Ordering::Acquire) as i32)
            .filter_map(|fd| Some((fd, self.get(fd)?)))
            .collect()
    }

    /// Returns all served descriptions, each once, with their descriptors.
    #[must_use]
    pub fn descriptions(&self) -> Vec<(Arc<Ofd>, Vec<i32>)> {
        let mut found: Vec<(Arc<Ofd>, Vec<i32>)> = Vec::new();
        let mut places: HashMap<*const Ofd, usize> = HashMap::new();
        for (fd, ofd) in self.all() {
            match places.entry(Arc::as_ptr(&ofd)) {
                Entry::Occupied(place) => found[*place.get()].1.push(fd),
                Entry::Vacant(place) => {
                    place.insert(found.len());
                    found.push((ofd, vec![fd]));
                }
            }
        }
        found
    }

    /// Returns the served descriptors among `first..=last`.
    #[must_use]
    pub fn between(&self, first: u32, last: u32) -> Vec<i32> {
        let top = self.top.load(Ordering::Acquire).min(last as usize + 1);
        (first as usize..top)
            .map(|fd| fd as i32)
            .filter(|fd| self.has(*fd))
            .collect()
    }
}
