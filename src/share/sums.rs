//! Checksums of the blocks of a running pool's files: those that it keeps, or of bytes that a session of this
//! process reads, without the kernel between.

use crate::dedup::scan::Knows;
use crate::pool_session::PoolSession;
use std::sync::mpsc::{SyncSender, sync_channel};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE};
use varve_libfs::posix::{Fd, Whence};
use varve_libfs::{Errno, Posix};
use varve_similarity::files::{Chosen, ReadRate};

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;
/// Pieces that wait for their sums.
const AHEAD: usize = 2;

/// The files of one mounted pool.
pub struct PoolSums<'p> {
    pool: &'p PoolSession,
    /// Reads all bytes instead of asking for checksums.
    full: bool,
}

impl<'p> PoolSums<'p> {
    /// Of this pool.
    pub const fn new(pool: &'p PoolSession, full: bool) -> Self {
        Self { pool, full }
    }

    fn by_checksums(&self, fd: Fd, each: &mut dyn FnMut(u64, &[u32])) -> Result<(), Errno> {
        let posix = &self.pool.posix;
        posix
            .for_each_checksum(fd, |part| each(part.file_block.0, &part.sums))
            .map(drop)
    }

    /// Reads ahead of the sums, so that a disk does not wait for them.
    fn by_reading(
        &self,
        fd: Fd,
        rate: &mut ReadRate,
        each: &mut dyn FnMut(u64, &[u32]),
    ) -> Result<(), Errno> {
        let posix = &self.pool.posix;
        let (sender, pieces) = sync_channel(AHEAD);
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || read_all(posix, fd, &sender));
            for (at, bytes) in pieces {
                rate.take(bytes.len() as u64);
                let sums: Vec<u32> = bytes.chunks(BLOCK_SIZE).map(crc32c::crc32c).collect();
                each(at / BLOCK_BYTES, &sums);
            }
            reader.join().unwrap_or(Err(Errno(libc::EIO)))
        })
    }
}

/// Sends the data of a file in whole blocks, with their offsets; holes are left out.
fn read_all(posix: &Posix, fd: Fd, pieces: &SyncSender<(u64, Vec<u8>)>) -> Result<(), Errno> {
    let mut at = 0;
    loop {
        at = match posix.lseek(fd, at as i64, Whence::Data) {
            // In whole blocks, so that none is told twice.
            Ok(data) => data / BLOCK_BYTES * BLOCK_BYTES,
            Err(Errno(libc::ENXIO)) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        let mut bytes = vec![0; READ_BYTES];
        let read = posix.pread(fd, &mut bytes, at)?;
        if read == 0 {
            return Ok(());
        }
        // The last block is padded with zeros.
        bytes[read..].fill(0);
        bytes.truncate(read.next_multiple_of(BLOCK_SIZE));
        let piece = (at, bytes);
        at += piece.1.len() as u64;
        if pieces.send(piece).is_err() {
            return Ok(());
        }
    }
}

impl Knows for PoolSums<'_> {
    /// Of another user's file no checksums are told, and what is not below the mount is not known.
    fn tell(
        &mut self,
        chosen: &Chosen,
        rate: &mut ReadRate,
        each: &mut dyn FnMut(u64, &[u32]),
    ) -> Option<std::io::Result<()>> {
        if chosen.id.0 != self.pool.mount.device {
            return None;
        }
        let path = self.pool.pool_path(&chosen.path).ok()?;
        let posix = &self.pool.posix;
        let fd = match posix.open(&path, libc::O_RDONLY | libc::O_NOFOLLOW, 0) {
            Ok(fd) => fd,
            Err(Errno(errno)) => return Some(Err(std::io::Error::from_raw_os_error(errno))),
        };
        let is_same = posix.fstat(fd).is_ok_and(|attr| attr.key.number() == chosen.id.1);
        let told = match (is_same, self.full) {
            (false, _) => Err(Errno(libc::ENOENT)),
            (true, true) => self.by_reading(fd, rate, each),
            (true, false) => self.by_checksums(fd, each),
        };
        let _ = posix.close(fd);
        match told {
            Ok(()) => Some(Ok(())),
            Err(Errno(libc::EPERM)) => None,
            Err(Errno(errno)) => Some(Err(std::io::Error::from_raw_os_error(errno))),
        }
    }

    fn reads(&self) -> bool {
        self.full
    }
}
