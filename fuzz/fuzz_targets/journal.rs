//! See `varve_fuzz::journal`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::journal(data);
});
