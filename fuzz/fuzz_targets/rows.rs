//! See `varve_fuzz::rows`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::rows(data);
});
