//! Checksums of the blocks of a running pool's files: those that it keeps, or of bytes that the daemon reads. Of
//! a file whose checksums may not be told, a session of this process reads the bytes.

use crate::dedup::scan::Knows;
use crate::pool_session::PoolSession;
use std::ops::ControlFlow;
use std::sync::mpsc::channel;
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, Tier};
use varve_libfs::posix::{Fd, Whence};
use varve_libfs::{Errno, Posix};
use varve_similarity::files::{Chosen, ReadRate};

/// Bytes that are read at once.
const READ_BYTES: usize = 4 << 20;
/// Reads that are under way at once, of a file that has nothing on a disk with a head: a device gives its
/// full rate only to several requests.
const READERS: usize = 4;

/// Freed memory that is kept for the next piece: a piece is in memory up to three times on its way.
const KEPT_BYTES: usize = 16 << 20;

/// The files of one mounted pool.
pub struct PoolSums<'p> {
    pool: &'p PoolSession,
    /// Reads all bytes instead of asking for checksums.
    full: bool,
}

impl<'p> PoolSums<'p> {
    /// Of this pool.
    pub fn new(pool: &'p PoolSession, full: bool) -> Self {
        if full {
            varve_media::sys::keep_freed(KEPT_BYTES);
        }
        Self { pool, full }
    }

    fn by_checksums(&self, fd: Fd, rate: &ReadRate, each: &mut dyn FnMut(u64, &[u32])) -> Result<(), Errno> {
        let told = self.pool.posix.for_each_checksum(fd, |part| {
            each(part.file_block.0, &part.sums);
            match rate.is_stopped() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        told.map(drop)
    }

    /// How many threads are to read a file: one where a head would be moved to and fro.
    fn readers(&self, fd: Fd) -> usize {
        let mut has_head = false;
        let told = self
            .pool
            .posix
            .for_each_owned(fd, 0, 0, |part| has_head |= part.tier == Tier::Hdd);
        if told.is_err() || has_head { 1 } else { READERS }
    }

    /// Reads ahead of the sums, so that a device does not wait for them: reader `n` of `count` reads the
    /// pieces `n`, `n + count` and so on, of which each has two at most that are not taken.
    fn by_reading(
        &self,
        fd: Fd,
        rate: &mut ReadRate,
        each: &mut dyn FnMut(u64, &[u32]),
    ) -> Result<(), Errno> {
        let posix = &self.pool.posix;
        let count = self.readers(fd);
        let read = match posix.read_checksums(fd, FileBlock(0), 1) {
            Err(Errno(libc::EPERM)) => read_piece,
            _ => ask_piece,
        };
        std::thread::scope(|scope| {
            let reader = |_| {
                let (wanted, orders) = channel();
                let (sender, pieces) = channel();
                scope.spawn(move || {
                    for at in orders {
                        if sender.send(read(posix, fd, at)).is_err() {
                            break;
                        }
                    }
                });
                (wanted, pieces)
            };
            let readers: Vec<_> = (0..count).map(reader).collect();
            let (mut next, mut wanted, mut taken) = (next_data(posix, fd, 0)?, 0, 0);
            loop {
                while let Some(at) = next.filter(|_| wanted - taken < 2 * count) {
                    // A reader that is gone is told by its pieces.
                    let _ = readers[wanted % count].0.send(at);
                    wanted += 1;
                    next = next_data(posix, fd, at + READ_BYTES as u64)?;
                }
                if taken == wanted {
                    return Ok(());
                }
                let parts = readers[taken % count].1.recv().map_err(|_| Errno(libc::EIO))??;
                taken += 1;
                for (first, sums) in parts {
                    let bytes = sums.len() as u64 * BLOCK_BYTES;
                    rate.take(bytes).map_err(|_| Errno(libc::EINTR))?;
                    each(first, &sums);
                }
            }
        })
    }
}

/// The next byte of data at or behind `at`, at the beginning of its block.
fn next_data(posix: &Posix, fd: Fd, at: u64) -> Result<Option<u64>, Errno> {
    match posix.lseek(fd, at as i64, Whence::Data) {
        // In whole blocks, so that none is told twice.
        Ok(data) => Ok(Some(data / BLOCK_BYTES * BLOCK_BYTES)),
        Err(Errno(libc::ENXIO)) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Successive checksums, each with the first block.
type Parts = Vec<(u64, Vec<u32>)>;

/// Has the daemon read a piece.
fn ask_piece(posix: &Posix, fd: Fd, at: u64) -> Result<Parts, Errno> {
    let (first, blocks) = (FileBlock(at / BLOCK_BYTES), (READ_BYTES / BLOCK_SIZE) as u32);
    let told = posix.read_checksums(fd, first, blocks)?;
    Ok(told
        .into_iter()
        .map(|part| (part.file_block.0, part.sums))
        .collect())
}

/// Reads a piece in whole blocks; it is short at the end of the file only, where the last block is padded
/// with zeros.
fn read_piece(posix: &Posix, fd: Fd, at: u64) -> Result<Parts, Errno> {
    let mut bytes = vec![0; READ_BYTES];
    let mut have = 0;
    while have < READ_BYTES {
        match posix.pread(fd, &mut bytes[have..], at + have as u64)? {
            0 => break,
            read => have += read,
        }
    }
    bytes[have..].fill(0);
    let whole = &bytes[..have.next_multiple_of(BLOCK_SIZE)];
    let sums: Vec<u32> = whole.chunks(BLOCK_SIZE).map(crc32c::crc32c).collect();
    Ok(if sums.is_empty() {
        Vec::new()
    } else {
        vec![(at / BLOCK_BYTES, sums)]
    })
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
            (true, false) => self.by_checksums(fd, rate, each),
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
