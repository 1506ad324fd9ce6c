//! Reading digested data from NVM, with or without verifying the blocks' checksums, which are in NVM too.
//! Knows blocks and their checksums; does not know files.

use crate::errno::Errno;
use crate::seeded::{Bug, armed};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::space::CHECKSUMS_PER_BLOCK;
use varve_format::{BLOCK_BYTES, BLOCK_HEADER_SIZE, BLOCK_SIZE};
use varve_ipc::Welcome;
use varve_media::{MediaError, Region, Verified};

/// The region that a session reads data from.
pub(super) struct Nvm {
    region: Arc<dyn Region>,
    /// Offset of the table of checksums, in bytes; `None`: they are not verified.
    sums: Option<u64>,
    /// Blocks that were verified and are not verified again; `None` if each read is.
    seen: Option<Arc<Verified>>,
    /// A block with a wrong checksum that was not reported to the daemon yet, plus one; 0: none.
    damaged: AtomicU64,
}

/// Failure of a read.
#[derive(Debug)]
pub(super) enum Bad {
    Media(MediaError),
    /// The checksum of this block is wrong.
    Checksum(u64),
}

impl From<MediaError> for Bad {
    fn from(error: MediaError) -> Self {
        Self::Media(error)
    }
}

impl Nvm {
    /// Opens the region as `welcome` says. Blocks marked in `verified`, which may be shared with other
    /// sessions, are trusted.
    pub(super) fn of(region: Arc<dyn Region>, welcome: &Welcome, verified: Option<Arc<Verified>>) -> Self {
        let blocks = region.len_bytes().div_ceil(BLOCK_BYTES);
        let once = welcome.nvm_sums.is_some() && welcome.nvm_sums_once;
        let seen = once.then(|| verified.unwrap_or_else(|| Arc::new(Verified::heap(blocks))));
        Self::new(region, welcome.nvm_sums, seen)
    }

    /// With `seen`, a block is not verified again once its checksum was right.
    pub(super) fn new(region: Arc<dyn Region>, sums: Option<u64>, seen: Option<Arc<Verified>>) -> Self {
        Self {
            region,
            sums,
            seen,
            damaged: AtomicU64::new(0),
        }
    }

    /// Copies bytes from offset `within` of `block` on; they may extend over the blocks after it.
    #[inline]
    pub(super) fn read(&self, block: u64, within: u64, out: &mut [u8]) -> Result<(), Bad> {
        match self.sums {
            Some(sums) if !self.is_seen(block, within, out.len()) => {
                self.read_verified(sums, block, within as usize, out)
            }
            _ => Ok(self.region.read(block * BLOCK_BYTES + within, out)?),
        }
    }

    /// Whether all of these bytes are in blocks that were verified before.
    #[inline]
    fn is_seen(&self, block: u64, within: u64, len: usize) -> bool {
        self.seen.as_ref().is_some_and(|seen| {
            seen.has(block, block + (within + len as u64).div_ceil(BLOCK_BYTES)) || armed(Bug::NvmBelieved)
        })
    }

    /// As [`read`](Self::read), for blocks that cannot be replaced meanwhile: a block whose checksum is wrong
    /// twice is damaged.
    pub(super) fn read_for_certain(&self, block: u64, within: u64, out: &mut [u8]) -> Result<(), Errno> {
        let again = match self.read(block, within, out) {
            Err(Bad::Checksum(_)) => self.read(block, within, out),
            other => other,
        };
        again.map_err(|bad| match bad {
            Bad::Media(error) => Errno::from(&error),
            Bad::Checksum(bad) => {
                tracing::error!(block = bad, "NVM does not hold what was written");
                self.damaged.store(bad + 1, Ordering::Relaxed);
                Errno(libc::EIO)
            }
        })
    }

    /// Copies every block through a private buffer: other threads may store to `out`, and exactly the
    /// verified bytes must be returned.
    ///
    /// Out of line: with this buffer in the frame of `read`, long copies of already verified blocks take a
    /// fifth longer.
    #[cold]
    #[inline(never)]
    fn read_verified(&self, sums: u64, block: u64, within: usize, out: &mut [u8]) -> Result<(), Bad> {
        let (mut block, mut within, mut rest) = (block, within, out);
        let mut content = [0; BLOCK_SIZE];
        while !rest.is_empty() {
            let at = sums + block / CHECKSUMS_PER_BLOCK * BLOCK_BYTES;
            let at = at + BLOCK_HEADER_SIZE as u64 + block % CHECKSUMS_PER_BLOCK * 4;
            let mut sum = [0; 4];
            self.region.read(at, &mut sum)?;
            self.region.read(block * BLOCK_BYTES, &mut content)?;
            let right = crc32c::crc32c(&content) == u32::from_le_bytes(sum);
            if let Some(seen) = &self.seen {
                if right {
                    seen.note(block)
                } else {
                    seen.forget(block)
                }
            }
            if !right {
                return Err(Bad::Checksum(block));
            }
            let (now, later) = rest.split_at_mut((BLOCK_SIZE - within).min(rest.len()));
            now.copy_from_slice(&content[within..within + now.len()]);
            (block, within, rest) = (block + 1, 0, later);
        }
        Ok(())
    }

    /// Returns a damaged block that was found since the last call.
    pub(super) fn take_damaged(&self) -> Option<u64> {
        match self.damaged.load(Ordering::Relaxed) {
            0 => None,
            _ => self.damaged.swap(0, Ordering::Relaxed).checked_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{BLOCK_BYTES, BLOCK_HEADER_SIZE, Bad, Nvm, Verified};
    use std::sync::Arc;
    use varve_media::Region;
    use varve_media::sim::{SimMedium, SimWorld};

    /// Block N holds bytes N + 1; returns the offset of their checksums, too.
    fn four_blocks() -> (Arc<dyn Region>, u64) {
        let region = SimWorld::new().add_region("nvm", SimMedium::Dax, 64 << 10, 64 << 10);
        let table = 8 * BLOCK_BYTES;
        for block in 0..4 {
            let content = [block as u8 + 1; BLOCK_BYTES as usize];
            region.write(block * BLOCK_BYTES, &content).unwrap();
            let at = table + BLOCK_HEADER_SIZE as u64 + block * 4;
            region.write(at, &crc32c::crc32c(&content).to_le_bytes()).unwrap();
        }
        (region, table)
    }

    #[test]
    fn damaged_block_is_refused_and_told_when_checksums_are_looked_at() {
        let (region, table) = four_blocks();
        let nvm = Nvm::new(region.clone(), Some(table), None);
        let mut out = [0; 10_000];
        nvm.read_for_certain(0, 100, &mut out).unwrap();
        assert_eq!((out[0], out[3996], out[9999]), (1, 2, 3));
        region.write(2 * BLOCK_BYTES + 5, &[0]).unwrap();
        assert!(matches!(nvm.read(0, 100, &mut out), Err(Bad::Checksum(2))));
        assert_eq!(nvm.take_damaged(), None, "it may have been replaced meanwhile");
        nvm.read_for_certain(1, 0, &mut out[..4096]).unwrap();
        nvm.read_for_certain(2, 0, &mut out[..1]).unwrap_err();
        assert_eq!((nvm.take_damaged(), nvm.take_damaged()), (Some(2), None));
        // Without the table it is read as plain memory.
        Nvm::new(region, None, None)
            .read_for_certain(2, 0, &mut out[..1])
            .unwrap();
    }

    #[test]
    fn block_is_compared_at_its_first_read_alone_when_that_is_asked() {
        let (region, table) = four_blocks();
        let seen = Arc::new(Verified::heap(16));
        let nvm = Nvm::new(region.clone(), Some(table), Some(Arc::clone(&seen)));
        let mut out = [0; 5000];
        nvm.read(0, 0, &mut out).unwrap();
        // A verified block is trusted from then on; one that was not read is not.
        for block in [1, 2] {
            region.write(block * BLOCK_BYTES + 5, &[0]).unwrap();
        }
        nvm.read(0, 0, &mut out).unwrap();
        nvm.read(1, 10, &mut out[..4000]).unwrap();
        assert!(matches!(nvm.read(2, 0, &mut out[..1]), Err(Bad::Checksum(2))));
        nvm.read(3, 0, &mut out[..1]).unwrap();
        // Another session trusts the blocks that this one has verified; a forgotten block is trusted by none.
        let other = Nvm::new(region, Some(table), Some(Arc::clone(&seen)));
        other.read(1, 10, &mut out[..4000]).unwrap();
        seen.forget(1);
        assert!(matches!(other.read(1, 0, &mut out[..1]), Err(Bad::Checksum(1))));
        assert!(nvm.read(1, 0, &mut out[..1]).is_err());
    }

    #[test]
    fn threads_that_read_a_block_first_at_once_all_see_its_bytes() {
        let (region, table) = four_blocks();
        for _ in 0..200 {
            let nvm = Nvm::new(region.clone(), Some(table), Some(Arc::new(Verified::heap(16))));
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let mut out = [0; 9000];
                        nvm.read(0, 4000, &mut out).unwrap();
                        assert_eq!((out[95], out[96], out[8999]), (1, 2, 4));
                    });
                }
            });
            assert!(nvm.seen.as_ref().unwrap().has(0, 4));
        }
    }
}
