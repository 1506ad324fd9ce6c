//! Random read speed of a device (thesis Table 2.6), and the block and set size that follow from it.

use crate::device::{DEVICE_BLOCK_BYTES, Device, DeviceError};
use std::time::{Duration, Instant};

/// The read sizes of Table 2.6 that are multiples of 4 KiB blocks.
pub const READ_BYTES: [usize; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];

/// Random reads of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReadSpeed {
    /// Bytes of a read.
    pub bytes: usize,
    /// Reads a second, with one read outstanding.
    pub per_s: f64,
    /// The mean time of a read, milliseconds.
    pub latency_ms: f64,
}

/// Fills the first `bytes` with noise, so that reads of a sparse file find data.
///
/// # Errors
/// The device failed.
pub fn prepare(device: &dyn Device, bytes: u64) -> Result<(), DeviceError> {
    const PIECE: u64 = 1 << 20;
    let mut noise = vec![0u8; PIECE as usize];
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    for chunk in noise.chunks_exact_mut(8) {
        state = next(state);
        chunk.copy_from_slice(&state.to_le_bytes());
    }
    let mut off = 0;
    while off < bytes {
        let now = PIECE.min(bytes - off) / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES;
        if now == 0 {
            break;
        }
        device.write_at(off, &noise[..now as usize])?;
        off += now;
    }
    device.flush()
}

const fn next(state: u64) -> u64 {
    let state = state ^ state << 13;
    let state = state ^ state >> 7;
    state ^ state << 17
}

/// Reads at random offsets within the first `within` bytes, with each size of [`READ_BYTES`] for the time
/// `each`.
///
/// # Errors
/// The device failed.
pub fn random_reads(device: &dyn Device, within: u64, each: Duration) -> Result<Vec<ReadSpeed>, DeviceError> {
    let mut state = 0x2545_F491_4F6C_DD1Du64 ^ Instant::now().elapsed().as_nanos() as u64;
    let mut speeds = Vec::new();
    for bytes in READ_BYTES {
        let places = (within.saturating_sub(bytes as u64) / DEVICE_BLOCK_BYTES).max(1);
        let mut out = vec![0; bytes];
        let start = Instant::now();
        let mut reads = 0u32;
        while reads < 4 || start.elapsed() < each {
            state = next(state);
            device.read_at(state % places * DEVICE_BLOCK_BYTES, &mut out)?;
            reads += 1;
        }
        let seconds = start.elapsed().as_secs_f64();
        speeds.push(ReadSpeed {
            bytes,
            per_s: f64::from(reads) / seconds,
            latency_ms: seconds * 1e3 / f64::from(reads),
        });
    }
    Ok(speeds)
}

/// Returns the bytes of a set: the largest read, up to 128 KiB, that reaches 85 % of the rate of 4 KiB reads;
/// at least 32 KiB, so that eight blocks fit. On the thesis's disks: 64 KiB.
pub fn choose_set_bytes(speeds: &[ReadSpeed]) -> usize {
    let best = speeds.first().map_or(0.0, |speed| speed.per_s);
    let near = speeds.iter().filter(|speed| speed.per_s >= 0.85 * best);
    near.map(|speed| speed.bytes)
        .max()
        .unwrap_or(64 << 10)
        .max(32 << 10)
}

#[cfg(test)]
mod tests {
    use super::{ReadSpeed, choose_set_bytes, prepare, random_reads};
    use crate::device::MemoryDevice;
    use std::time::Duration;

    #[test]
    fn set_size_of_the_thesis_comes_from_its_table() {
        let table = [
            (4, 76.0),
            (8, 76.0),
            (16, 74.0),
            (32, 72.0),
            (64, 70.0),
            (128, 53.0),
        ];
        let speeds = table.map(|(kib, per_s)| ReadSpeed {
            bytes: kib << 10,
            per_s,
            latency_ms: 1e3 / per_s,
        });
        assert_eq!(choose_set_bytes(&speeds), 64 << 10);
        assert_eq!(choose_set_bytes(&[]), 64 << 10);
    }

    #[test]
    fn reads_are_measured_for_every_size() {
        let device = MemoryDevice::new(2 << 20);
        prepare(&device, 2 << 20).expect("memory does not fail");
        let speeds = random_reads(&device, 2 << 20, Duration::ZERO).expect("memory does not fail");
        assert_eq!(speeds.len(), super::READ_BYTES.len());
        assert!(speeds.iter().all(|speed| speed.per_s > 0.0));
    }
}
