//! Buffers whose bytes begin on a 4,096-byte boundary, as direct I/O wants them.

use crate::lock::Mutex;

/// Alignment for direct I/O, in bytes: enough for every device in use.
pub(crate) const ALIGN_BYTES: usize = 4096;

/// A buffer aligned to a block (4,096 bytes), zeros at first.
pub struct AlignedBuf {
    raw: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuf {
    /// A buffer of `len` bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let raw = vec![0u8; len + ALIGN_BYTES];
        // Nothing pushes to `raw`, so its heap block, and with it the alignment found here, stays.
        let start = raw.as_ptr().align_offset(ALIGN_BYTES);
        assert!(start < ALIGN_BYTES, "a byte pointer can always be aligned");
        Self { raw, start, len }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.raw[self.start..self.start + self.len]
    }

    /// Its bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.raw[self.start..self.start + self.len]
    }
}

/// Whether direct I/O can use these bytes as they are.
pub(crate) fn is_aligned(bytes: &[u8], off: u64) -> bool {
    let align = ALIGN_BYTES as u64;
    (bytes.as_ptr() as u64 | off | bytes.len() as u64).is_multiple_of(align)
}

/// Keeps a few buffers of one length for reuse.
pub struct BufPool {
    len: usize,
    free: Mutex<Vec<AlignedBuf>>,
}

/// More than this many idle buffers are given back to the allocator.
const IDLE_MAX: usize = 4;

impl BufPool {
    /// A pool of buffers of `len` bytes, none yet.
    #[must_use]
    pub const fn new(len: usize) -> Self {
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

    /// Lends a buffer with arbitrary content. Never blocks: a process may have been forked while another
    /// thread held the lock.
    pub fn with<T>(&self, work: impl FnOnce(&mut AlignedBuf) -> T) -> T {
        let free = self.free.try_lock().and_then(|mut free| free.pop());
        let mut buf = free.unwrap_or_else(|| AlignedBuf::new(self.len));
        let result = work(&mut buf);
        if let Some(mut free) = self.free.try_lock()
            && free.len() < IDLE_MAX
        {
            free.push(buf);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::{BufPool, IDLE_MAX};

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
}
