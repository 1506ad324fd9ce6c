//! See `varve_fuzz::clusters`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::clusters(data);
});
