//! See `varve_fuzz::unit_footers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::unit_footers(data);
});
