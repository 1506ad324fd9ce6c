//! The steps of the copy functions of `dax`, by offset in a region, for the simulated machine. Knows no rules
//! of durability.

use super::persist::{LINE_BYTES, Persist, traced};

pub(crate) use super::persist::Step;

/// Copies `src` as [`Persist`] does to a region's offset `off`, into memory that is thrown away. Returns
/// `crc32c_append(seed, src)` and the steps, whose addresses are offsets in the region.
pub(crate) fn of_copy(off: u64, src: &[u8], seed: u32, flush_lines: bool) -> (u32, Vec<Step>) {
    let persist = Persist::noting(flush_lines);
    let within = off as usize % LINE_BYTES;
    let mut scratch = vec![0u8; within + src.len() + LINE_BYTES];
    let base = scratch.as_mut_ptr();
    let base = base.wrapping_add(base.align_offset(LINE_BYTES));
    // SAFETY: behind `base`, which is less than a line after its beginning, `scratch` has `within +
    // src.len()` bytes; it does not overlap `src`, and is not used otherwise.
    let (crc, mut steps) = traced(|| unsafe { persist.copy_in_crc(base.add(within), src, seed) });
    for step in &mut steps {
        if let Step::Cached(at, _) | Step::Streamed(at, _) | Step::WrittenBack(at) = step {
            *at = *at - base.addr() + (off as usize - within);
        }
    }
    (crc, steps)
}

/// Whether a fence of [`Persist`] is a fence.
pub(crate) fn fences() -> bool {
    let ((), steps) = traced(|| Persist::noting(true).fence());
    steps == [Step::Fenced]
}
