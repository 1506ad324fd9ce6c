//! See `varve_fuzz::messages`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::messages(data);
});
