//! The kernels of x86-64. Each takes line-aligned destinations and whole lines; the callers handle the edges.

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_clflush, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64,
    _mm_loadu_si128, _mm_set_epi64x, _mm_setzero_si128, _mm_storeu_si128, _mm_stream_si128, _mm_xor_si128,
    _mm256_castsi256_si128, _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_stream_si256,
    _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128, _mm512_loadu_si512, _mm512_storeu_si512,
    _mm512_stream_si512, _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
};

use super::{LINE_BYTES, fold, portable};
use once_cell::race::OnceNonZeroUsize;
use std::num::NonZeroUsize;

/// Lengths for which the copy with 64-byte loads beats `memcpy` out of memory (by up to a fifth at 2 KiB);
/// for other lengths they are equal.
pub(super) const COPY_OUT_BYTES: std::ops::Range<usize> = 512..16 << 10;

/// Moves the raw state over `bytes`.
#[target_feature(enable = "sse4.2")]
pub(super) fn crc_bytes_sse42(state: u32, bytes: &[u8]) -> u32 {
    let mut words = bytes.chunks_exact(8);
    let mut wide = u64::from(state);
    for word in &mut words {
        let mut raw = [0u8; 8];
        raw.copy_from_slice(word);
        wide = _mm_crc32_u64(wide, u64::from_le_bytes(raw));
    }
    words
        .remainder()
        .iter()
        .fold(wide as u32, |state, byte| _mm_crc32_u8(state, *byte))
}

/// Reduces the result of folding: a line that is congruent to everything before it, with the state already
/// mixed in.
#[target_feature(enable = "sse4.2")]
fn reduce(line: [u64; 8]) -> u32 {
    line.into_iter().fold(0, |state, word| _mm_crc32_u64(state, word)) as u32
}

#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold512(acc: __m512i, factors: __m512i, data: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(acc, factors);
    let high = _mm512_clmulepi64_epi128::<0x11>(acc, factors);
    _mm512_ternarylogic_epi64::<0x96>(low, high, data)
}

#[target_feature(enable = "avx512f")]
fn factors512(factors: (u64, u64)) -> __m512i {
    _mm512_broadcast_i32x4(_mm_set_epi64x(factors.1 as i64, factors.0 as i64))
}

/// Folds whole lines, which `step` returns one after another, to a line that is congruent to all of them; two
/// accumulators, so that the multiplier's latency hides behind loads and stores even in cache. `step` is
/// called once for each number below `lines`, in order.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
#[inline]
fn fold_lines512(lines: usize, state: u32, step: impl Fn(usize) -> __m512i) -> u32 {
    let mixed = _mm512_zextsi128_si512(_mm_set_epi64x(0, i64::from(state)));
    let one = factors512(fold::LINE);
    let mut acc = _mm512_xor_si512(step(0), mixed);
    let mut line = 1;
    if lines >= 6 {
        let two = factors512(fold::TWO_LINES);
        let (mut even, mut odd) = (acc, step(1));
        line = 2;
        while line + 2 <= lines {
            let (first, second) = (step(line), step(line + 1));
            even = fold512(even, two, first);
            odd = fold512(odd, two, second);
            line += 2;
        }
        acc = fold512(even, one, odd);
    }
    while line < lines {
        acc = fold512(acc, one, step(line));
        line += 1;
    }
    let mut rest = [0u64; 8];
    // SAFETY: `rest` is 64 bytes.
    unsafe { _mm512_storeu_si512(rest.as_mut_ptr().cast(), acc) };
    reduce(rest)
}

/// 64-byte stores.
///
/// # Safety
/// AVX-512F, VPCLMULQDQ and SSE4.2 must be there; `lines >= 1`; `lines * 64` bytes readable at `src`,
/// writable at the line-aligned `dst`, without overlap.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
pub(super) unsafe fn lines_avx512<const CRC: bool>(
    dst: *mut u8,
    src: *const u8,
    lines: usize,
    state: u32,
) -> u32 {
    let at = |line: usize| line * LINE_BYTES;
    // SAFETY: called with `line < lines` only, so the line lies inside the caller's ranges.
    let step = |line: usize| unsafe {
        let data = _mm512_loadu_si512(src.add(at(line)).cast());
        _mm512_stream_si512(dst.add(at(line)).cast(), data);
        data
    };
    if CRC {
        return fold_lines512(lines, state, step);
    }
    for line in 0..lines {
        step(line);
    }
    state
}

/// Moves the raw state over `bytes`, which are at least one line.
#[target_feature(enable = "avx512f,vpclmulqdq,sse4.2")]
pub(super) fn crc_bytes_avx512(state: u32, bytes: &[u8]) -> u32 {
    let lines = bytes.len() / LINE_BYTES;
    // SAFETY: called with `line < lines` only, so the line lies in `bytes`.
    let step = |line: usize| unsafe { _mm512_loadu_si512(bytes.as_ptr().add(line * LINE_BYTES).cast()) };
    let state = fold_lines512(lines, state, step);
    crc_bytes_sse42(state, &bytes[lines * LINE_BYTES..])
}

/// Four 128-bit accumulators, one line.
type Quad = [__m128i; 4];

#[target_feature(enable = "sse2,pclmulqdq")]
fn fold_quad(acc: Quad, factors: __m128i, data: Quad) -> Quad {
    let mut out = data;
    for lane in 0..4 {
        let low = _mm_clmulepi64_si128::<0x00>(acc[lane], factors);
        let high = _mm_clmulepi64_si128::<0x11>(acc[lane], factors);
        out[lane] = _mm_xor_si128(_mm_xor_si128(low, high), data[lane]);
    }
    out
}

#[target_feature(enable = "sse4.2,pclmulqdq")]
fn fold_lines(lines: usize, state: u32, step: impl Fn(usize) -> Quad) -> u32 {
    let factors = _mm_set_epi64x(fold::LINE.1 as i64, fold::LINE.0 as i64);
    let mut acc = step(0);
    acc[0] = _mm_xor_si128(acc[0], _mm_set_epi64x(0, i64::from(state)));
    for line in 1..lines {
        acc = fold_quad(acc, factors, step(line));
    }
    let mut rest = [0u64; 8];
    for (lane, value) in acc.into_iter().enumerate() {
        // SAFETY: lane `0..4` of 16 bytes lies in the 64 bytes of `rest`.
        unsafe { _mm_storeu_si128(rest.as_mut_ptr().add(lane * 2).cast(), value) };
    }
    reduce(rest)
}

/// 32-byte stores.
///
/// # Safety
/// AVX2, PCLMULQDQ and SSE4.2 must be there; the rest as for [`lines_avx512`].
#[target_feature(enable = "avx2,pclmulqdq,sse4.2")]
pub(super) unsafe fn lines_avx2<const CRC: bool>(
    dst: *mut u8,
    src: *const u8,
    lines: usize,
    state: u32,
) -> u32 {
    // SAFETY: called with `line < lines` only, so the line lies inside the caller's ranges.
    let step = |line: usize| unsafe {
        let (from, to) = (src.add(line * LINE_BYTES), dst.add(line * LINE_BYTES));
        let first: __m256i = _mm256_loadu_si256(from.cast());
        let second: __m256i = _mm256_loadu_si256(from.add(32).cast());
        _mm256_stream_si256(to.cast(), first);
        _mm256_stream_si256(to.add(32).cast(), second);
        [
            _mm256_castsi256_si128(first),
            _mm256_extracti128_si256::<1>(first),
            _mm256_castsi256_si128(second),
            _mm256_extracti128_si256::<1>(second),
        ]
    };
    if CRC {
        return fold_lines(lines, state, step);
    }
    for line in 0..lines {
        step(line);
    }
    state
}

/// Loads a line and stores it by four 16-byte non-temporal stores.
///
/// # Safety
/// 64 bytes readable at `src`, writable at the line-aligned `dst`.
#[inline]
unsafe fn stream_line(dst: *mut u8, src: *const u8) -> Quad {
    // SAFETY: the caller's promise; SSE2 is part of x86-64.
    unsafe {
        let mut quad = [_mm_setzero_si128(); 4];
        for (lane, value) in quad.iter_mut().enumerate() {
            *value = _mm_loadu_si128(src.add(lane * 16).cast());
            _mm_stream_si128(dst.add(lane * 16).cast(), *value);
        }
        quad
    }
}

/// 16-byte stores, hardware checksum.
///
/// # Safety
/// PCLMULQDQ and SSE4.2 must be there; the rest as for [`lines_avx512`].
#[target_feature(enable = "pclmulqdq,sse4.2")]
pub(super) unsafe fn lines_sse42<const CRC: bool>(
    dst: *mut u8,
    src: *const u8,
    lines: usize,
    state: u32,
) -> u32 {
    // SAFETY: called with `line < lines` only, so the line lies inside the caller's ranges.
    let step = |line: usize| unsafe { stream_line(dst.add(line * LINE_BYTES), src.add(line * LINE_BYTES)) };
    if CRC {
        return fold_lines(lines, state, step);
    }
    for line in 0..lines {
        step(line);
    }
    state
}

/// 16-byte stores, table checksum.
///
/// # Safety
/// As for [`lines_avx512`], without needs beyond x86-64.
pub(super) unsafe fn lines_sse2<const CRC: bool>(
    dst: *mut u8,
    src: *const u8,
    lines: usize,
    state: u32,
) -> u32 {
    let mut state = state;
    for line in 0..lines {
        // SAFETY: `line < lines`, so the line lies inside the caller's ranges.
        let quad = unsafe { stream_line(dst.add(line * LINE_BYTES), src.add(line * LINE_BYTES)) };
        if CRC {
            let mut bytes = [0u8; LINE_BYTES];
            for (lane, value) in quad.into_iter().enumerate() {
                // SAFETY: lane `0..4` of 16 bytes lies in `bytes`; SSE2 is part of x86-64.
                unsafe { _mm_storeu_si128(bytes.as_mut_ptr().add(lane * 16).cast(), value) };
            }
            state = portable::crc_bytes(state, &bytes);
        }
    }
    state
}

/// Copies out with 64-byte loads. No software prefetch: it costs up to 40 % at 4 KiB, by fetching unused
/// lines.
///
/// # Safety
/// AVX-512F must be there; `len >= 64` bytes readable at `src`, writable at `dst`, without overlap.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn copy_out_avx512(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: every offset given to `load` and `store` is at most `len - 64`.
    let load = |at: usize| unsafe { _mm512_loadu_si512(src.add(at).cast()) };
    // SAFETY: as above.
    let store = |at: usize, data: __m512i| unsafe { _mm512_storeu_si512(dst.add(at).cast(), data) };
    let mut at = 0;
    while at + 4 * LINE_BYTES <= len {
        let lines = [load(at), load(at + 64), load(at + 128), load(at + 192)];
        for (line, data) in lines.into_iter().enumerate() {
            store(at + line * LINE_BYTES, data);
        }
        at += 4 * LINE_BYTES;
    }
    while at + LINE_BYTES <= len {
        store(at, load(at));
        at += LINE_BYTES;
    }
    if at < len {
        store(len - LINE_BYTES, load(len - LINE_BYTES));
    }
}

/// Writes the line that holds `at` back, by the best of `clwb`, `clflushopt` and `clflush`.
///
/// # Safety
/// `at` must be mapped.
pub(super) unsafe fn flush_line(at: *mut u8) {
    // SAFETY: the instruction was found supported, and the line is mapped.
    unsafe { WriteBack::best().line(at) };
}

/// An instruction that writes a line back to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteBack {
    /// Keeps the line in the cache.
    Clwb,
    /// Evicts the line.
    Clflushopt,
    /// Evicts the line, one at a time.
    Clflush,
}

impl WriteBack {
    /// All, the best first.
    pub(super) const ALL: [Self; 3] = [Self::Clwb, Self::Clflushopt, Self::Clflush];

    /// The best of this processor, found once.
    pub(super) fn best() -> Self {
        static FOUND: OnceNonZeroUsize = OnceNonZeroUsize::new();
        let number = FOUND.get_or_init(|| {
            let features = Self::features();
            let found = Self::ALL.iter().position(|by| by.is_in(features));
            NonZeroUsize::MIN.saturating_add(found.unwrap_or(Self::ALL.len() - 1))
        });
        Self::ALL[number.get() - 1]
    }

    /// Register EBX of CPUID's leaf 7; 0 where there is no such leaf.
    pub(super) fn features() -> u32 {
        match std::arch::x86_64::__cpuid_count(0, 0).eax {
            7.. => std::arch::x86_64::__cpuid_count(7, 0).ebx,
            _ => 0,
        }
    }

    /// Whether a processor with these features has it.
    pub(super) const fn is_in(self, features: u32) -> bool {
        match self {
            Self::Clwb => features >> 24 & 1 == 1,
            Self::Clflushopt => features >> 23 & 1 == 1,
            Self::Clflush => true,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::Clflushopt => "clflushopt",
            Self::Clflush => "clflush",
        }
    }

    /// Writes the line that holds `at` back.
    ///
    /// # Safety
    /// `at` must be mapped, and this processor must have the instruction.
    pub(super) unsafe fn line(self, at: *mut u8) {
        match self {
            // SAFETY: the caller's promises.
            Self::Clwb => unsafe {
                std::arch::asm!("clwb [{}]", in(reg) at, options(nostack, preserves_flags));
            },
            // SAFETY: as above.
            Self::Clflushopt => unsafe {
                std::arch::asm!("clflushopt [{}]", in(reg) at, options(nostack, preserves_flags));
            },
            // SAFETY: part of x86-64; the line is mapped.
            Self::Clflush => unsafe { _mm_clflush(at) },
        }
    }
}
