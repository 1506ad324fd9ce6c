//! See `varve_fuzz::cache_objects`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::cache_objects(data);
});
