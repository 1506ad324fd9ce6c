//! See `varve_fuzz::settings`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::settings(data);
});
