//! See `varve_fuzz::far_checkpoint`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::far_checkpoint(data);
});
