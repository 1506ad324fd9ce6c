//! See `varve_fuzz::pool_state`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::pool_state(data);
});
