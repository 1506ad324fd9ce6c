#![allow(clippy::unwrap_used)]
use proptest::prelude::{any, prop_assert_eq, proptest};

use super::{Kernel, Persist};

/// A line-aligned buffer, so that a test chooses the alignment.
#[repr(C, align(64))]
struct Aligned([u8; 6144]);

fn kernels() -> Vec<Persist> {
    Kernel::ALL
        .into_iter()
        .filter_map(|kernel| Persist::with_kernel(kernel, true))
        .collect()
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ salt)
        .collect()
}

fn check(persist: Persist, to: usize, src: &[u8], seed: u32) {
    let kernel = persist.kernel();
    let mut with_crc = Box::new(Aligned([0xEE; 6144]));
    let mut plain = Box::new(Aligned([0xEE; 6144]));
    // SAFETY: the callers keep `to + src.len()` below 6,144.
    let crc = unsafe {
        persist.copy_in(plain.0.as_mut_ptr().add(to), src);
        persist.copy_in_crc(with_crc.0.as_mut_ptr().add(to), src, seed)
    };
    persist.fence();
    assert_eq!(
        crc,
        crc32c::crc32c_append(seed, src),
        "{kernel:?} to {to} len {}",
        src.len()
    );
    let mut want = [0xEE; 6144];
    want[to..to + src.len()].copy_from_slice(src);
    assert!(
        with_crc.0 == want,
        "{kernel:?} to {to} len {}: stored bytes differ",
        src.len()
    );
    assert!(
        plain.0 == want,
        "{kernel:?} to {to} len {}: bytes stored without checksum differ",
        src.len()
    );
    let mut back = vec![0u8; src.len()];
    // SAFETY: as above.
    unsafe { persist.copy_out(plain.0.as_ptr().add(to), &mut back) };
    assert!(
        back == src,
        "{kernel:?} from {to} len {}: bytes read back differ",
        src.len()
    );
}

#[test]
fn kernels_are_more_than_one_when_the_processor_is_x86() {
    assert!(kernels().len() >= if cfg!(target_arch = "x86_64") { 2 } else { 1 });
    assert!(Kernel::best().is_supported());
}

#[test]
fn copy_in_matches_the_portable_checksum_for_every_alignment_and_short_length() {
    let source = pattern(700, 0x5A);
    for persist in kernels() {
        for to in 0..64 {
            for len in (0..200).chain([255, 256, 257, 319, 320, 384, 448, 512, 640]) {
                check(
                    persist,
                    to,
                    &source[to % 7..to % 7 + len],
                    0xDEAD_BEEF ^ len as u32,
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn copy_in_matches_the_portable_checksum_for_any_length(
        to in 0usize..128, from in 0usize..64, len in 0usize..5000, seed in any::<u32>(), salt in any::<u8>(),
    ) {
        let source = pattern(from + len, salt);
        for persist in kernels() {
            check(persist, to, &source[from..], seed);
        }
    }

    #[test]
    fn crc_alone_matches_the_portable_checksum_for_any_length(
        from in 0usize..64, len in 0usize..5000, seed in any::<u32>(), salt in any::<u8>(),
    ) {
        let source = pattern(from + len, salt);
        for persist in kernels() {
            let crc = !persist.crc_bytes(!seed, &source[from..]);
            prop_assert_eq!(crc, crc32c::crc32c_append(seed, &source[from..]), "{:?}", persist.kernel());
        }
    }

    #[test]
    fn write_crc_chains_when_a_payload_is_cut(cut in 0usize..3000, seed in any::<u32>()) {
        let source = pattern(3000, 1);
        let mut target = Box::new(Aligned([0; 6144]));
        let persist = Persist::new(false);
        let at = target.0.as_mut_ptr();
        // SAFETY: 3,000 bytes fit.
        let chained = unsafe {
            let first = persist.copy_in_crc(at, &source[..cut], seed);
            persist.copy_in_crc(at.add(cut), &source[cut..], first)
        };
        prop_assert_eq!(chained, crc32c::crc32c_append(seed, &source));
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn write_back_is_the_best_that_the_processor_has_and_each_keeps_the_bytes() {
    use super::x86::WriteBack;
    assert_eq!(WriteBack::ALL.map(|by| by.is_in(0)), [false, false, true]);
    assert_eq!(WriteBack::ALL.map(|by| by.is_in(1 << 23)), [false, true, true]);
    assert_eq!(WriteBack::ALL.map(|by| by.is_in(1 << 24)), [true, false, true]);
    let mut line = Box::new(Aligned([3; 6144]));
    for by in WriteBack::ALL
        .into_iter()
        .filter(|by| by.is_in(WriteBack::features()))
    {
        line.0[77] += 1;
        let want = line.0;
        // SAFETY: inside of `line`; the processor has the instruction.
        unsafe { by.line(line.0.as_mut_ptr().add(77)) };
        Persist::new(true).fence();
        assert!(line.0 == want, "{}", by.name());
    }
    let best = WriteBack::best();
    assert!(best.is_in(WriteBack::features()) && Persist::write_back_name() == best.name());
}

/// Returns which bytes a fence at the end makes durable, by the rules of the processor.
fn durable(steps: &[super::Step], base: usize, len: usize) -> Vec<bool> {
    use super::Step;
    let mut cached = vec![false; len];
    let mut waiting = vec![false; len];
    let mut done = vec![false; len];
    for step in steps {
        match step {
            Step::Cached(at, bytes) => {
                (at - base..at - base + bytes.len()).for_each(|byte| {
                    (cached[byte], waiting[byte], done[byte]) = (true, false, false);
                });
            }
            Step::Streamed(at, bytes) => {
                (at - base..at - base + bytes.len()).for_each(|byte| waiting[byte] = true);
            }
            Step::WrittenBack(at) => {
                let line = (at - base) / 64 * 64;
                (line..(line + 64).min(len)).for_each(|byte| waiting[byte] |= cached[byte]);
            }
            Step::Fenced => (0..len).for_each(|byte| done[byte] |= waiting[byte]),
        }
    }
    done
}

proptest! {
    #[test]
    fn fence_makes_every_copied_byte_durable_and_only_if_lines_are_written_back(
        to in 0_usize..200, len in 1_usize..1500, kernel in 0_usize..5
    ) {
        let kernel = Kernel::ALL[kernel];
        if !kernel.is_supported() {
            return Ok(());
        }
        for flush_lines in [true, false] {
            let persist = Persist { kernel, flush_lines, is_traced: true };
            let mut buffer = Box::new(Aligned([0; 6144]));
            let (base, src) = (buffer.0.as_mut_ptr(), pattern(len, 9));
            let ((), steps) = super::traced(|| {
                // SAFETY: `to + len` is below 6,144.
                unsafe { persist.copy_in(base.add(to), &src) };
                persist.fence();
            });
            let done = durable(&steps, base.addr(), 6144);
            let partial = to % 64 != 0 || (to + len) % 64 != 0 || kernel == Kernel::Portable;
            prop_assert_eq!(done[to..to + len].iter().all(|done| *done), flush_lines || !partial);
            let ((), unfenced) = super::traced(|| {
                // SAFETY: as above.
                unsafe { persist.copy_in(base.add(to), &src) };
            });
            prop_assert_eq!(durable(&unfenced, base.addr(), 6144).iter().filter(|done| **done).count(), 0);
        }
    }
}
