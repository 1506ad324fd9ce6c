//! The only place that stores to, flushes or fences memory that must survive: copy kernels with and without a
//! checksum, the line flush and the fence. Knows addresses; refuses to know files, lengths of regions, or the
//! meaning of the bytes.
//!
//! Whole 64-byte lines go by non-temporal stores, so a fence is all they need. The checksum is computed from
//! the registers that are stored: every byte of the source is loaded once. CRC-32C is folded with carry-less
//! multiplication (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ"); the `crc32`
//! instruction reduces the accumulator at the end.

#[cfg(any(test, target_arch = "x86_64"))]
mod fold;
mod portable;
mod trace;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::num::NonZeroUsize;
use std::sync::atomic::{Ordering, fence as atomic_fence};

use once_cell::race::OnceNonZeroUsize;

pub(crate) use trace::{Step, traced};

/// Bytes in a cache line, the unit of non-temporal stores.
pub const LINE_BYTES: usize = 64;

/// A set of instructions for copy and checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kernel {
    /// Plain copies and a table checksum.
    Portable,
    /// 16-byte non-temporal stores, table checksum. Every x86-64 has it.
    Sse2,
    /// 16-byte non-temporal stores, PCLMULQDQ and `crc32`.
    Sse42,
    /// 32-byte non-temporal stores, PCLMULQDQ and `crc32`.
    Avx2,
    /// 64-byte non-temporal stores, VPCLMULQDQ and `crc32`.
    Avx512,
}

impl Kernel {
    /// The best kernel of this processor, found once.
    pub fn best() -> Self {
        static BEST: OnceNonZeroUsize = OnceNonZeroUsize::new();
        // How many there are up to the best one.
        let best = BEST.get_or_init(|| {
            let best = Self::ALL.iter().rposition(|kernel| kernel.is_supported());
            NonZeroUsize::MIN.saturating_add(best.unwrap_or(0))
        });
        Self::ALL[best.get() - 1]
    }

    /// All kernels, the plainest first.
    pub const ALL: [Self; 5] = [Self::Portable, Self::Sse2, Self::Sse42, Self::Avx2, Self::Avx512];

    /// Whether this processor can run it.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            match self {
                Self::Portable | Self::Sse2 => true,
                Self::Sse42 => is_x86_feature_detected!("sse4.2") && is_x86_feature_detected!("pclmulqdq"),
                Self::Avx2 => Self::Sse42.is_supported() && is_x86_feature_detected!("avx2"),
                Self::Avx512 => {
                    Self::Avx2.is_supported()
                        && is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("vpclmulqdq")
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }
}

/// How bytes get into a mapping and become durable there.
#[derive(Debug, Clone, Copy)]
pub struct Persist {
    kernel: Kernel,
    /// Lines written by ordinary stores are written back from the cache: needed on `dax`, wasted on the page
    /// cache.
    flush_lines: bool,
    /// Stores, write-backs and fences are noted for a crash test.
    is_traced: bool,
}

impl Persist {
    /// With the best kernel. `flush_lines`: the mapping is persistent memory itself, not a page cache.
    pub fn new(flush_lines: bool) -> Self {
        Self {
            kernel: Kernel::best(),
            flush_lines,
            is_traced: false,
        }
    }

    /// [`new`](Self::new), with each step noted in the [trace](traced) of the thread that takes it.
    pub(crate) fn noting(flush_lines: bool) -> Self {
        Self {
            is_traced: true,
            ..Self::new(flush_lines)
        }
    }

    /// With a given kernel, for tests and measurements; `None` if this processor cannot run it.
    pub fn with_kernel(kernel: Kernel, flush_lines: bool) -> Option<Self> {
        kernel.is_supported().then_some(Self {
            kernel,
            flush_lines,
            is_traced: false,
        })
    }

    /// The instruction by which this processor writes a line back: `clwb`, else `clflushopt`, else `clflush`.
    pub fn write_back_name() -> &'static str {
        #[cfg(target_arch = "x86_64")]
        {
            x86::WriteBack::best().name()
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            "none"
        }
    }

    /// The kernel in use.
    pub const fn kernel(self) -> Kernel {
        self.kernel
    }

    /// Copies `src` to `dst`. Visible when this returns, committed by the next [`fence`](Self::fence) of this
    /// thread.
    ///
    /// # Safety
    /// `dst..dst + src.len()` must be writable memory that does not overlap `src`, and to which no Rust
    /// reference exists.
    #[inline]
    pub unsafe fn copy_in(self, dst: *mut u8, src: &[u8]) {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.copy_in_with::<false>(dst, src, 0) };
    }

    /// [`copy_in`](Self::copy_in) that also returns `crc32c_append(seed, bytes as stored)`.
    ///
    /// # Safety
    /// As for `copy_in`.
    #[inline]
    #[must_use]
    pub unsafe fn copy_in_crc(self, dst: *mut u8, src: &[u8], seed: u32) -> u32 {
        // SAFETY: the caller's promise is passed on.
        !unsafe { self.copy_in_with::<true>(dst, src, !seed) }
    }

    /// Copies, and carries the checksum's raw (inverted) state along if `CRC`.
    ///
    /// # Safety
    /// As for `copy_in`.
    #[inline]
    unsafe fn copy_in_with<const CRC: bool>(self, dst: *mut u8, src: &[u8], state: u32) -> u32 {
        let mut state = state;
        let (mut to, mut from, mut left) = (dst, src.as_ptr(), src.len());
        let head = to.align_offset(LINE_BYTES).min(left);
        if head > 0 {
            // SAFETY: `head <= left`, so both ranges lie in the caller's; `head < 64`, since it is the
            // distance to the next line.
            state = unsafe { self.partial_line::<CRC>(to, from, head, state) };
            // SAFETY: as above, the results lie inside the ranges or one past them.
            (to, from, left) = unsafe { (to.add(head), from.add(head), left - head) };
        }
        let lines = left / LINE_BYTES;
        if lines > 0 {
            // SAFETY: `to` is line-aligned here and `lines` whole lines lie in both ranges; the kernel was
            // found supported.
            state = unsafe { self.lines::<CRC>(to, from, lines, state) };
            let done = lines * LINE_BYTES;
            // SAFETY: `done <= left`.
            (to, from, left) = unsafe { (to.add(done), from.add(done), left - done) };
        }
        if left > 0 {
            // SAFETY: `left < 64` bytes remain of both ranges.
            state = unsafe { self.partial_line::<CRC>(to, from, left, state) };
        }
        state
    }

    /// Stores less than a line, through a copy on the stack, so that the checksum covers the stored bytes.
    ///
    /// # Safety
    /// As for `copy_in`, with `n < 64` bytes inside one line of the destination.
    #[inline]
    unsafe fn partial_line<const CRC: bool>(self, dst: *mut u8, src: *const u8, n: usize, state: u32) -> u32 {
        debug_assert!(n < LINE_BYTES);
        let mut line = [0u8; LINE_BYTES];
        // SAFETY: `n < 64` bytes are readable at `src`, writable at `dst` (caller), and in `line`.
        unsafe {
            std::ptr::copy_nonoverlapping(src, line.as_mut_ptr(), n);
            std::ptr::copy_nonoverlapping(line.as_ptr(), dst, n);
        }
        if self.is_traced {
            trace::note(Step::Cached(dst.addr(), line[..n].into()));
        }
        if self.flush_lines {
            // SAFETY: `dst` is mapped (caller); the `n` bytes are within one line.
            unsafe { self.flush_line(dst) };
        }
        if CRC {
            self.crc_bytes(state, &line[..n])
        } else {
            state
        }
    }

    /// # Safety
    /// As for `copy_in`; `dst` line-aligned; `lines >= 1`.
    #[inline]
    unsafe fn lines<const CRC: bool>(self, dst: *mut u8, src: *const u8, lines: usize, state: u32) -> u32 {
        debug_assert!(lines > 0 && dst.align_offset(LINE_BYTES) == 0);
        // SAFETY: the caller's promise, and `self.kernel` is supported by construction.
        let state = unsafe {
            match self.kernel {
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx512 => x86::lines_avx512::<CRC>(dst, src, lines, state),
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx2 => x86::lines_avx2::<CRC>(dst, src, lines, state),
                #[cfg(target_arch = "x86_64")]
                Kernel::Sse42 => x86::lines_sse42::<CRC>(dst, src, lines, state),
                #[cfg(target_arch = "x86_64")]
                Kernel::Sse2 => x86::lines_sse2::<CRC>(dst, src, lines, state),
                _ => {
                    let state = portable::lines::<CRC>(dst, src, lines, state);
                    if self.flush_lines {
                        (0..lines).for_each(|line| flush_line(dst.add(line * LINE_BYTES)));
                    }
                    state
                }
            }
        };
        if self.is_traced {
            // SAFETY: `lines` whole lines at `dst` were just stored; a traced destination is private memory.
            unsafe { self.note_lines(dst, lines) };
        }
        state
    }

    /// Notes the steps of [`lines`](Self::lines).
    ///
    /// # Safety
    /// `lines` whole lines must be readable at `dst`, and not be written meanwhile.
    #[cold]
    unsafe fn note_lines(self, dst: *const u8, lines: usize) {
        for line in 0..lines {
            let mut bytes = [0u8; LINE_BYTES];
            // SAFETY: line `line < lines` of the caller's range.
            let at = unsafe {
                let at = dst.add(line * LINE_BYTES);
                std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), LINE_BYTES);
                at.addr()
            };
            let bytes = bytes.as_slice().into();
            if self.kernel == Kernel::Portable {
                trace::note(Step::Cached(at, bytes));
                if self.flush_lines {
                    trace::note(Step::WrittenBack(at));
                }
            } else {
                trace::note(Step::Streamed(at, bytes));
            }
        }
    }

    /// Writes the line that holds `at` back to memory.
    ///
    /// # Safety
    /// `at` must be mapped.
    #[inline]
    unsafe fn flush_line(self, at: *mut u8) {
        if self.is_traced {
            trace::note(Step::WrittenBack(at.addr()));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { flush_line(at) };
    }

    #[inline]
    fn crc_bytes(self, state: u32, bytes: &[u8]) -> u32 {
        #[cfg(target_arch = "x86_64")]
        if self.kernel == Kernel::Avx512 && bytes.len() >= 4 * LINE_BYTES {
            // SAFETY: the kernel was found supported.
            return unsafe { x86::crc_bytes_avx512(state, bytes) };
        }
        #[cfg(target_arch = "x86_64")]
        if self.kernel >= Kernel::Sse42 {
            // SAFETY: these kernels are only chosen where SSE4.2 is.
            return unsafe { x86::crc_bytes_sse42(state, bytes) };
        }
        portable::crc_bytes(state, bytes)
    }

    /// Copies out of memory that others may be writing: a raw copy, whose result may mix old and new bytes.
    ///
    /// # Safety
    /// `src..src + out.len()` must be readable and not overlap `out`.
    #[inline]
    pub unsafe fn copy_out(self, src: *const u8, out: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        if self.kernel == Kernel::Avx512 && x86::COPY_OUT_BYTES.contains(&out.len()) {
            // SAFETY: the caller's promise; the kernel is supported.
            return unsafe { x86::copy_out_avx512(src, out.as_mut_ptr(), out.len()) };
        }
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(src, out.as_mut_ptr(), out.len()) };
    }

    /// Orders this thread's earlier stores, non-temporal ones and flushes included, before its later ones.
    #[inline]
    pub fn fence(self) {
        if self.is_traced {
            trace::note(Step::Fenced);
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `sfence` is part of every x86-64 and has no preconditions.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
        // `sfence` orders the stores on x86-64; there this only keeps the compiler from moving them.
        atomic_fence(if cfg!(target_arch = "x86_64") {
            Ordering::AcqRel
        } else {
            Ordering::SeqCst
        });
    }
}

/// CRC-32C of `bytes` continued from `seed`, by the best instructions of this processor.
pub fn crc32c_append(seed: u32, bytes: &[u8]) -> u32 {
    !Persist::new(false).crc_bytes(!seed, bytes)
}

/// Writes the line that holds `at` back to memory.
///
/// # Safety
/// `at` must be mapped.
#[inline]
unsafe fn flush_line(at: *mut u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise is passed on.
    unsafe {
        x86::flush_line(at);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests;
