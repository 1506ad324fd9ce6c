//! Memory that a program hands over to be dropped, merged and tracked on request.

use std::io;
use std::ops::Range;

use super::check;
use crate::types::PAGE_BYTES;

/// Page-aligned ranges of the calling process' own memory. Its methods never touch memory outside of them.
#[derive(Debug, Clone)]
pub struct Arenas {
    ranges: Vec<Range<u64>>,
}

impl Arenas {
    /// Makes arenas of address ranges, first byte and one past the last.
    ///
    /// # Safety
    /// The caller owns the ranges and keeps them mapped as long as this value or a copy of it lives. Every
    /// holder of it may call [`drop_pages`](Self::drop_pages): from then on the caller must not rely on the
    /// contents of pages in them beyond what it tells that holder.
    ///
    /// # Errors
    /// `EINVAL` when a range is empty or not page-aligned.
    pub unsafe fn new(ranges: Vec<Range<u64>>) -> io::Result<Self> {
        if ranges.iter().all(whole) {
            Ok(Self { ranges })
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        }
    }

    /// Returns the ranges.
    pub fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }

    /// Gives whole pages inside of one arena back to the kernel; they read as zeros afterwards.
    ///
    /// # Errors
    /// `EINVAL` when the part is not whole pages of one arena, else the kernel's errno.
    pub fn drop_pages(&self, part: &Range<u64>) -> io::Result<()> {
        self.advise(part, libc::MADV_DONTNEED)
    }

    /// Allows or denies same-page merging in whole pages inside of one arena; contents stay.
    ///
    /// # Errors
    /// `EINVAL` when the part is not whole pages of one arena or the kernel cannot merge, else the kernel's
    /// errno.
    pub fn set_mergeable(&self, part: &Range<u64>, allow: bool) -> io::Result<()> {
        let advice = if allow {
            libc::MADV_MERGEABLE
        } else {
            libc::MADV_UNMERGEABLE
        };
        self.advise(part, advice)
    }

    fn advise(&self, part: &Range<u64>, advice: libc::c_int) -> io::Result<()> {
        let inside = |a: &Range<u64>| a.start <= part.start && part.end <= a.end;
        if !whole(part) || !self.ranges.iter().any(inside) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let (start, len) = (part.start as *mut libc::c_void, (part.end - part.start) as usize);
        // SAFETY: whole pages of an arena, as just checked; the caller of `new` gave up relying on their
        // contents, and the merging advices keep them.
        let result = unsafe { libc::madvise(start, len, advice) };
        check(libc::c_long::from(result)).map(drop)
    }
}

fn whole(range: &Range<u64>) -> bool {
    range.start < range.end && range.start.is_multiple_of(PAGE_BYTES) && range.end.is_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn arenas_drop_whole_pages_of_their_own_and_refuse_everything_else() {
        let mut memory = vec![7u8; 6 * PAGE_BYTES as usize];
        let first = (memory.as_ptr() as u64).next_multiple_of(PAGE_BYTES);
        let skip = (first - memory.as_ptr() as u64) as usize;
        let page = |n: u64| first + n * PAGE_BYTES;
        // SAFETY: the vector owns the ranges, lives to the end of the test and holds plain bytes.
        let arenas = unsafe { Arenas::new(vec![page(0)..page(2), page(3)..page(4)]) }.unwrap();
        for refused in [
            page(1)..page(3),
            page(2)..page(3),
            page(0)..page(0),
            page(0) + 1..page(1),
            page(1)..page(0),
        ] {
            assert_eq!(
                arenas.drop_pages(&refused).unwrap_err().raw_os_error(),
                Some(libc::EINVAL)
            );
        }
        arenas.drop_pages(&(page(1)..page(2))).unwrap();
        let value = |n: u64| std::hint::black_box(&mut memory)[skip + (n * PAGE_BYTES) as usize];
        assert_eq!([0, 1, 2, 3].map(value), [7, 0, 7, 7]);
    }

    #[test]
    fn arenas_are_refused_when_they_are_not_whole_pages() {
        for (start, end) in [
            (0x1000, 0x1800),
            (0x1001, 0x2000),
            (0x2000, 0x1000),
            (0x1000, 0x1000),
        ] {
            // SAFETY: refused; nothing is done with the range.
            assert!(unsafe { Arenas::new(vec![Range { start, end }]) }.is_err());
        }
    }
}
