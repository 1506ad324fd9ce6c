//! Contents of a simulated device: pages on demand, shared between images until one of them writes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) const PAGE_BYTES: usize = 4096;

/// One page, with the hash of its bytes once it was computed (0: not yet).
struct Page {
    bytes: [u8; PAGE_BYTES],
    hash: AtomicU64,
}

impl Clone for Page {
    fn clone(&self) -> Self {
        Self {
            bytes: self.bytes,
            hash: AtomicU64::new(0),
        }
    }
}

/// A sparse array of bytes, zero where never written. Cloning shares all pages.
#[derive(Clone, Default)]
pub(super) struct Pages(HashMap<u64, Arc<Page>>);

/// Cuts `off..off + len` into (page, offset in page, offset in range, length).
fn pieces(off: u64, len: usize) -> impl Iterator<Item = (u64, usize, usize, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == len {
            return None;
        }
        let at = off + done as u64;
        let within = (at % PAGE_BYTES as u64) as usize;
        let n = (PAGE_BYTES - within).min(len - done);
        done += n;
        Some((at / PAGE_BYTES as u64, within, done - n, n))
    })
}

impl Pages {
    pub(super) fn read(&self, off: u64, out: &mut [u8]) {
        for (page, within, at, n) in pieces(off, out.len()) {
            match self.0.get(&page) {
                Some(page) => out[at..at + n].copy_from_slice(&page.bytes[within..within + n]),
                None => out[at..at + n].fill(0),
            }
        }
    }

    pub(super) fn write(&mut self, off: u64, src: &[u8]) {
        for (page, within, at, n) in pieces(off, src.len()) {
            self.page_mut(page)[within..within + n].copy_from_slice(&src[at..at + n]);
        }
    }

    /// Makes a range zero. Whole pages are freed, so the cost follows the bytes written, not the range.
    pub(super) fn zero(&mut self, off: u64, len: u64) {
        let end = off + len;
        let page_bytes = PAGE_BYTES as u64;
        let whole = off.div_ceil(page_bytes)..end / page_bytes;
        self.0.retain(|page, _| !whole.contains(page));
        let edges = if whole.is_empty() {
            [(off, end), (end, end)]
        } else {
            [(off, whole.start * page_bytes), (whole.end * page_bytes, end)]
        };
        for (from, to) in edges {
            for (page, within, _, n) in pieces(from, (to - from) as usize) {
                if self.0.contains_key(&page) {
                    self.page_mut(page)[within..within + n].fill(0);
                }
            }
        }
    }

    fn page_mut(&mut self, page: u64) -> &mut [u8; PAGE_BYTES] {
        let fresh = || {
            Arc::new(Page {
                bytes: [0; PAGE_BYTES],
                hash: AtomicU64::new(0),
            })
        };
        let page = Arc::make_mut(self.0.entry(page).or_insert_with(fresh));
        *page.hash.get_mut() = 0;
        &mut page.bytes
    }

    /// Returns a hash of the contents: equal bytes give equal hashes, whatever their history.
    pub(super) fn content_hash(&self) -> u64 {
        let pages = self.0.iter();
        pages
            .filter(|(_, page)| page.hash() != ZERO_PAGE_HASH)
            .fold(0u64, |sum, (number, page)| {
                sum.wrapping_add(mix(page.hash() ^ mix(*number)))
            })
    }

    pub(super) fn resident_bytes(&self) -> u64 {
        (self.0.len() * PAGE_BYTES) as u64
    }
}

/// Result of [`Page::hash`] for a page of zeros.
const ZERO_PAGE_HASH: u64 = 1;

impl Page {
    fn hash(&self) -> u64 {
        match self.hash.load(Ordering::Relaxed) {
            0 => {
                let hash = self.compute_hash();
                self.hash.store(hash, Ordering::Relaxed);
                hash
            }
            known => known,
        }
    }

    fn compute_hash(&self) -> u64 {
        let mut lanes = [0u64; 4];
        let mut any = 0u64;
        for block in self.bytes.chunks_exact(32) {
            for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
                let mut raw = [0u8; 8];
                raw.copy_from_slice(word);
                let word = u64::from_le_bytes(raw);
                any |= word;
                *lane = (*lane ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
            }
        }
        if any == 0 {
            return ZERO_PAGE_HASH;
        }
        lanes
            .into_iter()
            .fold(0, |hash, lane| mix(hash ^ lane))
            .max(ZERO_PAGE_HASH + 1)
    }
}

/// Spreads a number over 64 bits (the finaliser of SplitMix64).
pub(super) const fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
