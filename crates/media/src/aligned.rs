//! Buffers whose bytes begin on a 4,096-byte boundary, as direct I/O wants them.

use bytes::{Buf, BytesMut};

use crate::lock::Mutex;
use crate::sys;

/// Size of a large page, in bytes. Memory in such pages is one place for a device: a transfer of 1 MiB to pages
/// of 4 KiB is 256, more than many devices take at once.
const LARGE_PAGE: usize = 2 << 20;
/// Alignment for direct I/O, in bytes: enough for every device in use.
pub(crate) const ALIGN_BYTES: usize = 4096;

/// A buffer aligned to a block (4,096 bytes), zeros at first. One of 2 MiB or more lies in large pages where
/// the kernel has them.
pub struct AlignedBuf(BytesMut);

impl AlignedBuf {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let align = if len < LARGE_PAGE { ALIGN_BYTES } else { LARGE_PAGE };
        let mut raw = BytesMut::zeroed(len + align);
        let start = raw.as_ptr().align_offset(align);
        assert!(start < align, "a byte pointer can always be aligned");
        // Never grows, so its heap block, and with it the alignment, stays.
        raw.advance(start);
        raw.truncate(len);
        if len >= LARGE_PAGE {
            sys::prefer_large_pages(&mut raw);
        }
        Self(raw)
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Whether direct I/O can use these bytes as they are.
pub(crate) fn is_aligned(bytes: &[u8], off: u64) -> bool {
    let align = ALIGN_BYTES as u64;
    (bytes.as_ptr() as u64 | off | bytes.len() as u64).is_multiple_of(align)
}

/// Keeps a few buffers of one length for reuse. Those of 256 KiB to 1 MiB are made as many at a time as fill a
/// large page.
pub struct BufPool {
    len: usize,
    free: Mutex<Vec<AlignedBuf>>,
}

/// More than this many idle buffers are given back to the allocator, or more than one large page of them.
const IDLE_MAX: usize = 4;

impl BufPool {
    /// A pool of buffers of `len` bytes, a multiple of 4,096; none yet.
    #[must_use]
    pub const fn new(len: usize) -> Self {
        assert!(len.is_multiple_of(ALIGN_BYTES));
        Self {
            len,
            free: Mutex::new(Vec::new()),
        }
    }

    /// Length of each buffer, in bytes.
    #[must_use]
    pub const fn buf_bytes(&self) -> usize {
        self.len
    }

    /// Buffers that fill a large page; 1 of another length than divides it.
    const fn together(&self) -> usize {
        if self.len >= LARGE_PAGE / 8 && LARGE_PAGE.is_multiple_of(self.len) {
            LARGE_PAGE / self.len
        } else {
            1
        }
    }

    fn make(&self) -> AlignedBuf {
        let mut page = AlignedBuf::new(self.together() * self.len).0;
        let buf = AlignedBuf(page.split_to(self.len));
        while !page.is_empty() {
            self.keep(AlignedBuf(page.split_to(self.len)));
        }
        buf
    }

    fn keep(&self, buf: AlignedBuf) {
        if let Some(mut free) = self.free.try_lock()
            && free.len() < IDLE_MAX.max(self.together())
        {
            free.push(buf);
        }
    }

    /// Lends a buffer with arbitrary content. Never blocks: a process may have been forked while another
    /// thread held the lock.
    pub fn with<T>(&self, work: impl FnOnce(&mut AlignedBuf) -> T) -> T {
        let free = self.free.try_lock().and_then(|mut free| free.pop());
        let mut buf = free.unwrap_or_else(|| self.make());
        let result = work(&mut buf);
        self.keep(buf);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::{ALIGN_BYTES, AlignedBuf, BufPool, IDLE_MAX, LARGE_PAGE};

    #[test]
    fn pool_keeps_a_few_buffers_and_waits_for_nobody() {
        let pool = BufPool::new(4096);
        let most = 3 * IDLE_MAX;
        fn nested(pool: &BufPool, depth: usize) {
            if depth > 0 {
                pool.with(|_| nested(pool, depth - 1));
            }
        }
        nested(&pool, most);
        assert_eq!(pool.free.lock().len(), IDLE_MAX);
        let held = pool.free.lock();
        assert_eq!(pool.with(|buf| buf.bytes().len()), 4096);
        drop(held);
        assert_eq!(pool.free.lock().len(), IDLE_MAX);
    }

    #[test]
    fn buffers_that_fill_a_large_page_lie_in_one() {
        let pool = BufPool::new(512 << 10);
        let mut starts = Vec::new();
        fn nested(pool: &BufPool, depth: usize, starts: &mut Vec<usize>) {
            pool.with(|buf| {
                buf.bytes_mut().fill(depth as u8);
                starts.push(buf.bytes().as_ptr() as usize);
                if depth > 0 {
                    nested(pool, depth - 1, starts);
                }
                assert!(buf.bytes().iter().all(|byte| *byte == depth as u8));
            });
        }
        nested(&pool, 3, &mut starts);
        starts.sort_unstable();
        assert!(starts[0].is_multiple_of(LARGE_PAGE));
        assert_eq!(starts[3] - starts[0], 3 * (512 << 10));
        assert_eq!(pool.free.lock().len(), 4);
        nested(&pool, 8, &mut starts);
        assert_eq!(pool.free.lock().len(), IDLE_MAX);
    }

    #[test]
    fn buffer_is_aligned_and_zero_whatever_its_length() {
        for len in [
            0,
            1,
            4096,
            5000,
            1 << 20,
            LARGE_PAGE,
            LARGE_PAGE + 4096,
            3 * LARGE_PAGE,
        ] {
            let mut buf = AlignedBuf::new(len);
            assert_eq!(buf.bytes().len(), len);
            assert!((buf.bytes().as_ptr() as usize).is_multiple_of(ALIGN_BYTES));
            assert!(buf.bytes().iter().all(|byte| *byte == 0));
            buf.bytes_mut().fill(1);
        }
    }
}
