//! See `varve_fuzz::dir_nodes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::dir_nodes(data);
});
