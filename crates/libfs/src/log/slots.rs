//! Slots of threads, for the whole process: a thread's lane, the inode that it is overwriting in place, and
//! the inode whose lease it has pinned. Knows neither logs nor files.
//!
//! A slot belongs to one thread until that thread ends, so its words have a single writer. Threads beyond the
//! slots share lane [`SHARED`] under a lock and never overwrite in place.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use varve_format::log::LANES_MAX;
use varve_ipc::{heavy_barrier, light_barrier};

/// The lane of all threads without a slot.
pub(crate) const SHARED: usize = LANES_MAX - 1;

struct Slot {
    /// 1 while a thread owns it.
    taken: AtomicU64,
    /// Id of the inode that its thread overwrites in place, or 0.
    overwriting: AtomicU64,
    /// Id of the inode whose lease its thread has pinned here, or 0.
    pinned: AtomicU64,
}

static SLOTS: [CachePadded<Slot>; SHARED] = [const {
    CachePadded::new(Slot {
        taken: AtomicU64::new(0),
        overwriting: AtomicU64::new(0),
        pinned: AtomicU64::new(0),
    })
}; SHARED];
/// Slots at and above this were never taken.
static USED: AtomicUsize = AtomicUsize::new(0);

/// A thread's claim on a slot.
struct Claim(usize);

impl Claim {
    fn new() -> Self {
        for (index, slot) in SLOTS.iter().enumerate() {
            if slot.taken.load(Ordering::Relaxed) == 0
                && slot
                    .taken
                    .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                USED.fetch_max(index + 1, Ordering::SeqCst);
                return Self(index);
            }
        }
        Self(SHARED)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(slot) = SLOTS.get(self.0) {
            slot.taken.store(0, Ordering::Release);
        }
    }
}

crate::sync::thread_local! {
    static CLAIM: Claim = Claim::new();
}

/// The calling thread's lane; [`SHARED`] when all slots are taken, or when the thread is ending.
#[inline]
pub(crate) fn lane() -> usize {
    CLAIM.try_with(|claim| claim.0).unwrap_or(SHARED)
}

/// Highest number of slots that were ever taken: lanes at and above it (but [`SHARED`]) were never used.
#[inline]
pub(crate) fn used() -> usize {
    USED.load(Ordering::Acquire)
}

/// Announces that the calling thread overwrites inode `id` in place. It must pass a full barrier before it
/// checks whether it may. Without effect (and useless) for [`SHARED`].
#[inline]
pub(crate) fn enter_overwrite(lane: usize, id: u64) {
    if let Some(slot) = SLOTS.get(lane) {
        slot.overwriting.store(id, Ordering::Relaxed);
    }
}

/// Ends the overwrite that [`enter_overwrite`] began.
#[inline]
pub(crate) fn leave_overwrite(lane: usize) {
    if let Some(slot) = SLOTS.get(lane) {
        slot.overwriting.store(0, Ordering::Release);
    }
}

/// Announces that the calling thread uses the lease of inode `id`; returns the slot to [`unpin`], or `None`
/// if it holds another pin there. The thread's later loads see stores made before a call of [`pins`] that
/// missed this pin.
#[inline]
pub(crate) fn pin(id: u64) -> Option<usize> {
    let lane = lane();
    let slot = SLOTS.get(lane)?;
    if slot.pinned.load(Ordering::Relaxed) != 0 {
        return None;
    }
    slot.pinned.store(id, Ordering::Relaxed);
    light_barrier();
    Some(lane)
}

/// Ends the pin that [`pin`] began. A later load of the thread sees the bar of a caller that has counted the
/// pin with [`pins`].
#[inline]
pub(crate) fn unpin(lane: usize) {
    if let Some(slot) = SLOTS.get(lane) {
        slot.pinned.store(0, Ordering::Release);
        light_barrier();
    }
}

/// Counts the threads that have pinned inode `id` in their slots. The caller has barred new pins before; a
/// thread that this misses sees the bar when it ends its pin.
pub(crate) fn pins(id: u64) -> u64 {
    heavy_barrier();
    pins_about(id)
}

/// As [`pins`], without a barrier: a hint.
pub(crate) fn pins_about(id: u64) -> u64 {
    let slots = SLOTS[..used().min(SHARED)].iter();
    slots
        .filter(|slot| slot.pinned.load(Ordering::Acquire) == id)
        .count() as u64
}

/// Waits until no thread overwrites inode `id` in place. The caller has barred new ones with a sequentially
/// consistent store.
#[inline]
pub(crate) fn wait_for_overwrites(id: u64) {
    for slot in &SLOTS[..used().min(SHARED)] {
        let mut spins = 0_u32;
        while slot.overwriting.load(Ordering::SeqCst) == id {
            spins += 1;
            if spins < 100 {
                crate::sync::spin_loop();
            } else {
                crate::sync::yield_now();
            }
        }
    }
}

/// Whether a thread overwrites inode `id` in place. The caller has barred new ones as for
/// [`wait_for_overwrites`].
pub(crate) fn overwrites(id: u64) -> bool {
    let used = &SLOTS[..used().min(SHARED)];
    used.iter()
        .any(|slot| slot.overwriting.load(Ordering::SeqCst) == id)
}

/// Resets the slots in the child after `fork`: only the calling thread lives on, so the other threads' slots
/// are free again. The child must not use the parent's logs any more.
pub fn reset_after_fork() {
    let own = lane();
    for (index, slot) in SLOTS.iter().enumerate() {
        slot.overwriting.store(0, Ordering::SeqCst);
        slot.pinned.store(0, Ordering::SeqCst);
        if index != own {
            slot.taken.store(0, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{SHARED, enter_overwrite, lane, leave_overwrite, wait_for_overwrites};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Barrier, Mutex};

    #[test]
    fn lane_belongs_to_one_living_thread() {
        let seen = Mutex::new(std::collections::HashSet::new());
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let mine = lane();
                    assert!(mine == SHARED || seen.lock().unwrap().insert(mine));
                    assert_eq!(mine, lane());
                    barrier.wait();
                });
            }
        });
    }

    #[test]
    fn wait_ends_only_after_the_overwrite() {
        let (entered, left) = (Barrier::new(2), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let lane = lane();
                if lane == SHARED {
                    left.store(true, Ordering::SeqCst);
                    entered.wait();
                    return;
                }
                enter_overwrite(lane, u64::MAX);
                entered.wait();
                for _ in 0..1000 {
                    std::hint::black_box(0);
                }
                left.store(true, Ordering::SeqCst);
                leave_overwrite(lane);
            });
            entered.wait();
            wait_for_overwrites(u64::MAX);
            assert!(left.load(Ordering::SeqCst));
        });
    }
}
