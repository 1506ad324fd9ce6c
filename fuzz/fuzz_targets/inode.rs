//! See `varve_fuzz::inode`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let _ = varve_fuzz::inode(data);
});
