//! See `varve_fuzz::dir_nodes`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| varve_fuzz::dir_nodes(data));
