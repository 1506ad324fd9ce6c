//! Kernels without special instructions, against which the others are tested.

use super::LINE_BYTES;

/// Reversed polynomial of CRC-32C.
const REVERSED: u32 = 0x82F6_3B78;

/// `TABLES[k][b]`: the state after byte `b` and `k` zero bytes.
static TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0u32; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut state = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            state = if state & 1 != 0 {
                (state >> 1) ^ REVERSED
            } else {
                state >> 1
            };
            bit += 1;
        }
        tables[0][byte] = state;
        byte += 1;
    }
    let mut k = 1;
    while k < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        k += 1;
    }
    tables
}

/// Moves the raw state over `bytes`.
pub(super) fn crc_bytes(mut state: u32, bytes: &[u8]) -> u32 {
    let mut words = bytes.chunks_exact(8);
    for word in &mut words {
        let low = u32::from_le_bytes([word[0], word[1], word[2], word[3]]) ^ state;
        state = TABLES[7][(low & 0xff) as usize]
            ^ TABLES[6][(low >> 8 & 0xff) as usize]
            ^ TABLES[5][(low >> 16 & 0xff) as usize]
            ^ TABLES[4][(low >> 24) as usize]
            ^ TABLES[3][word[4] as usize]
            ^ TABLES[2][word[5] as usize]
            ^ TABLES[1][word[6] as usize]
            ^ TABLES[0][word[7] as usize];
    }
    words.remainder().iter().fold(state, |state, byte| {
        (state >> 8) ^ TABLES[0][((state ^ u32::from(*byte)) & 0xff) as usize]
    })
}

/// Copies whole lines, each through the stack, so that the checksum covers the stored bytes.
///
/// # Safety
/// `lines * 64` bytes must be readable at `src` and writable at `dst`, without overlap.
pub(super) unsafe fn lines<const CRC: bool>(dst: *mut u8, src: *const u8, lines: usize, state: u32) -> u32 {
    let mut state = state;
    for line in 0..lines {
        let mut bytes = [0u8; LINE_BYTES];
        // SAFETY: `line < lines`, so the 64 bytes at this offset lie inside both ranges.
        unsafe {
            std::ptr::copy_nonoverlapping(src.add(line * LINE_BYTES), bytes.as_mut_ptr(), LINE_BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst.add(line * LINE_BYTES), LINE_BYTES);
        }
        if CRC {
            state = crc_bytes(state, &bytes);
        }
    }
    state
}
