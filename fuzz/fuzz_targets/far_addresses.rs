//! See `varve_fuzz::far_addresses`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::far_addresses(data);
});
