//! Pages of persistent memory that cannot be read any more. A touch of one raises SIGBUS; here it becomes a
//! note and ordinary memory in the page's place, so that the touching instruction ends and its caller returns
//! an error. Knows addresses; its owner knows the device.
//!
//! The handler (`guard`) asks [`mend`] for every SIGBUS whose address it does not expect. All that runs in
//! the handler is atomic loads and stores and one `mmap`.

use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use super::guard;

/// Unit of notes, in bytes.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Notes of one mapping; if there are more, all of it counts as bad.
const NOTES_MAX: usize = 256;
/// Mappings of a process that are watched at a time.
const MAPPINGS_MAX: usize = 4608;

/// Bad parts of one mapping.
pub(super) struct Poison {
    /// Bytes that are replaced together: what the kernel lets a mapping be cut into.
    granule: u64,
    used: AtomicUsize,
    all: AtomicBool,
    /// First byte plus one, and number of bytes; a first byte of zero is not noted yet.
    notes: [(AtomicU64, AtomicU64); NOTES_MAX],
    slot: AtomicUsize,
}

/// A watched mapping. `poison` is set last and cleared first.
struct Slot {
    base: AtomicPtr<u8>,
    len: AtomicUsize,
    poison: AtomicPtr<Poison>,
}

static SLOTS: [Slot; MAPPINGS_MAX] = [const {
    Slot {
        base: AtomicPtr::new(std::ptr::null_mut()),
        len: AtomicUsize::new(0),
        poison: AtomicPtr::new(std::ptr::null_mut()),
    }
}; MAPPINGS_MAX];

/// Marks a slot that is being filled.
const TAKEN: *mut Poison = std::ptr::without_provenance_mut(usize::MAX);
/// No slot.
const NONE: usize = usize::MAX;

impl Poison {
    /// Notes for a mapping that can be replaced in parts of `granule` bytes, a multiple of 4 KiB.
    pub(super) fn new(granule: u64) -> Box<Self> {
        Box::new(Self {
            granule: granule.max(BLOCK_BYTES),
            used: AtomicUsize::new(0),
            all: AtomicBool::new(false),
            notes: std::array::from_fn(|_| (AtomicU64::new(0), AtomicU64::new(0))),
            slot: AtomicUsize::new(NONE),
        })
    }

    /// Watches `len` bytes at `base` until the drop. Where there is no handler or no slot, a bad page ends
    /// the process as it would without this.
    pub(super) fn watch(&mut self, base: *mut u8, len: usize) {
        if !guard::is_ready() {
            return;
        }
        let own = std::ptr::from_mut(self);
        for (index, slot) in SLOTS.iter().enumerate() {
            let free = slot.poison.compare_exchange(
                std::ptr::null_mut(),
                TAKEN,
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if free.is_ok() {
                slot.base.store(base, Ordering::Relaxed);
                slot.len.store(len, Ordering::Relaxed);
                slot.poison.store(own, Ordering::Release);
                self.slot.store(index, Ordering::Relaxed);
                return;
            }
        }
    }

    /// Bytes that are replaced together.
    pub(super) const fn granule(&self) -> u64 {
        self.granule
    }

    /// Notes a bad range, rounded to blocks.
    pub(super) fn note(&self, off: u64, len: u64) {
        let from = off / BLOCK_BYTES * BLOCK_BYTES;
        let to = off.saturating_add(len.max(1)).next_multiple_of(BLOCK_BYTES);
        let index = self.used.fetch_add(1, Ordering::AcqRel);
        match self.notes.get(index) {
            Some((first, bytes)) => {
                bytes.store(to - from, Ordering::Relaxed);
                first.store(from + 1, Ordering::Release);
            }
            None => self.all.store(true, Ordering::Release),
        }
    }

    /// The first bad byte of a range, if any.
    #[inline]
    pub(super) fn first_in(&self, off: u64, len: usize) -> Option<u64> {
        match self.used.load(Ordering::Acquire) {
            0 => None,
            used => self.find(off, len as u64, used),
        }
    }

    #[cold]
    fn find(&self, off: u64, len: u64, used: usize) -> Option<u64> {
        if self.all.load(Ordering::Acquire) {
            return Some(off);
        }
        let notes = self.notes.iter().take(used);
        let hits = notes.filter_map(|(first, bytes)| {
            let first = first.load(Ordering::Acquire).checked_sub(1)?;
            let end = first + bytes.load(Ordering::Relaxed);
            (first < off + len && off < end).then_some(first.max(off))
        });
        hits.min()
    }
}

impl Drop for Poison {
    fn drop(&mut self) {
        if let Some(slot) = SLOTS.get(self.slot.load(Ordering::Relaxed)) {
            slot.poison.store(std::ptr::null_mut(), Ordering::Release);
        }
    }
}

/// Replaces the bad page at `address` by zeros and notes it, if a watched mapping is there.
/// Async-signal-safe.
///
/// The signal also says how large the page was mapped, which is more than what is lost: not used.
pub(super) fn mend(address: usize) -> bool {
    for slot in &SLOTS {
        let poison = slot.poison.load(Ordering::Acquire);
        if poison.is_null() || poison == TAKEN {
            continue;
        }
        let (base, len) = (
            slot.base.load(Ordering::Relaxed),
            slot.len.load(Ordering::Relaxed),
        );
        if address < base.addr() || address - base.addr() >= len {
            continue;
        }
        // SAFETY: a mapping that is being touched is not being dropped, so its notes live.
        let poison = unsafe { &*poison };
        let granule = poison.granule;
        let off = (address - base.addr()) as u64 / granule * granule;
        let bytes = granule.min(len as u64 - off);
        // Before the page is replaced: who reads zeros there finds the note.
        poison.note(off, bytes);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces a part of the watched mapping, to which only raw copies are made; the mapping
        // begins on a multiple of the granule.
        let done = unsafe {
            libc::mmap(
                base.add(off as usize).cast(),
                bytes as usize,
                protection,
                flags,
                -1,
                0,
            )
        };
        return done != libc::MAP_FAILED;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::{NOTES_MAX, Poison};

    #[test]
    fn notes_are_whole_blocks_and_too_many_are_everything() {
        let poison = Poison::new(4096);
        assert_eq!(poison.first_in(0, 1 << 30), None);
        poison.note(5000, 1);
        assert_eq!(poison.first_in(0, 4096), None);
        assert_eq!(poison.first_in(0, 4097), Some(4096));
        assert_eq!(poison.first_in(6000, 8), Some(6000));
        assert_eq!(poison.first_in(8192, 8), None);
        for note in 0..NOTES_MAX as u64 {
            poison.note((1 << 40) + note * 4096, 512);
        }
        assert_eq!(poison.first_in(8192, 8), Some(8192));
    }
}
