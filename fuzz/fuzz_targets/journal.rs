//! See `varve_fuzz::journal`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| varve_fuzz::journal(data));
