//! The ranges of the program's memory with maps that the library fills. Queried by calls that the program may
//! make with its allocator's locks held, and for each buffer that the program passes: so nothing here
//! allocates, and without maps a query is one load.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Upper bound on the number of ranges.
pub const RANGES_MAX: usize = 4096;

/// Sorted, non-overlapping (start, end) pairs, `len` of them.
struct Ranges {
    held: AtomicBool,
    len: AtomicUsize,
    all: UnsafeCell<[(usize, usize); RANGES_MAX]>,
}

// SAFETY: only the thread that has set `held` touches `all`.
unsafe impl Sync for Ranges {}

static RANGES: Ranges = Ranges {
    held: AtomicBool::new(false),
    len: AtomicUsize::new(0),
    all: UnsafeCell::new([(0, 0); RANGES_MAX]),
};

/// Runs `look` with exclusive access to the ranges and their number.
fn alone<T>(look: impl FnOnce(&mut [(usize, usize); RANGES_MAX], &mut usize) -> T) -> T {
    let take = || {
        RANGES
            .held
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
    };
    while take().is_err() {
        std::thread::yield_now();
    }
    let mut len = RANGES.len.load(Ordering::Relaxed);
    // SAFETY: `held` is ours; nothing in `look` comes here again, or unwinds.
    let value = look(unsafe { &mut *RANGES.all.get() }, &mut len);
    RANGES.len.store(len, Ordering::SeqCst);
    RANGES.held.store(false, Ordering::Release);
    value
}

/// Whether there is any range.
#[must_use]
pub fn any() -> bool {
    RANGES.len.load(Ordering::Relaxed) != 0
}

/// Whether `len` bytes at `at` touch a range. May also be true for a former one.
#[must_use]
pub fn touches(at: usize, len: usize) -> bool {
    if !any() || len == 0 {
        return false;
    }
    let end = at.saturating_add(len);
    alone(|all, count| {
        let next = all[..*count].partition_point(|range| range.1 <= at);
        next < *count && all[next].0 < end
    })
}

/// Adds a range that touches no other. False if there is no room.
#[must_use]
pub fn add(start: usize, end: usize) -> bool {
    alone(|all, count| {
        if *count == RANGES_MAX {
            return false;
        }
        let at = all[..*count].partition_point(|range| range.0 < start);
        all.copy_within(at..*count, at + 1);
        all[at] = (start, end);
        *count += 1;
        true
    })
}

/// Removes `start..end` from all ranges. A range that would be split stays whole if there is no room for both
/// parts.
pub fn cut(start: usize, end: usize) {
    alone(|all, count| {
        let mut at = all[..*count].partition_point(|range| range.1 <= start);
        while at < *count && all[at].0 < end {
            let (first, last) = all[at];
            match (first < start, last > end) {
                (false, false) => {
                    all.copy_within(at + 1..*count, at);
                    *count -= 1;
                    continue;
                }
                (true, false) => all[at].1 = start,
                (false, true) => all[at].0 = end,
                (true, true) if *count == RANGES_MAX => {}
                (true, true) => {
                    all.copy_within(at + 1..*count, at + 2);
                    all[at].1 = start;
                    all[at + 1] = (end, last);
                    *count += 1;
                }
            }
            at += 1;
        }
    });
}

/// Forgets all ranges in a child after `fork`, which inherits no such maps. Another thread of the parent may
/// have held the lock.
pub fn forget_all() {
    RANGES.len.store(0, Ordering::SeqCst);
    RANGES.held.store(false, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::{add, any, cut, touches};

    #[test]
    fn ranges_are_touched_until_they_are_cut_out() {
        assert!(!touches(0, usize::MAX));
        assert!(add(0x5000, 0x9000) && add(0x1000, 0x3000) && add(0x9000, 0xa000));
        for (at, len, is) in [
            (0, 0x1000, false),
            (0, 0x1001, true),
            (0x2fff, 1, true),
            (0x3000, 0x2000, false),
            (0x4fff, 2, true),
            (0x9fff, 9, true),
            (0xa000, 9, false),
            (0x1000, 0, false),
        ] {
            assert_eq!(touches(at, len), is, "{at:x} {len:x}");
        }
        cut(0x6000, 0x7000);
        assert!(!touches(0x6000, 0x1000) && touches(0x5000, 1) && touches(0x7000, 1));
        cut(0x2000, 0x9800);
        assert!(touches(0x1fff, 1) && !touches(0x2000, 0x7800) && touches(0x9800, 1));
        cut(0, usize::MAX);
        assert!(!any());
    }
}
