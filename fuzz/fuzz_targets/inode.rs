//! See `varve_fuzz::inode`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| varve_fuzz::inode(data));
