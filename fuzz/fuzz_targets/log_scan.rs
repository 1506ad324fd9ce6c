//! See `varve_fuzz::log_scan`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::log_scan(data);
});
