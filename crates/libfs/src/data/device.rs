//! Reads of SSD blocks by the session itself: the device writes into this process' own memory, no other
//! process is woken, and the bytes are compared with their checksums here. Knows places and checksums of
//! blocks, which the daemon tells; knows neither logs nor leases.
//!
//! # Why the bytes are the file's
//! - *Act, then check.* A freed block is not written again before every session that may know its place has
//!   forgotten it ([`DataPlane::forget_extents`], then an answer to the daemon) or was sealed. So bytes count
//!   only if, after the device has delivered them, the places are still the inode's and the session still
//!   counts. Neither a lock nor a message is held across the transfer.
//! - *Nobody else's memory.* The device writes only where this process has asked it to, through a descriptor
//!   that cannot write to the device. A process that dies takes its transfers with it: the kernel does not
//!   reuse their pages before they have ended.
//! - *In doubt the daemon reads.* A checksum that is not known or differs, a failed transfer, a place that
//!   changed: nothing is returned here, and the daemon is asked for the data. Its answer, error or damage
//!   counts, and it alone reports faults of devices.
//! - A checksum told for newer contents than those read, or the other way round, differs from the bytes.

use super::cache::Keys;
use super::{DataPlane, confused};
use crate::hash::Lru;
use crate::inode::Inode;
use crate::seeded::{Bug, armed};
use std::hash::RandomState;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::{BLOCK_BYTES, BLOCK_SIZE, FileBlock, InodeKey, Tier};
use varve_ipc::{IpcError, READS_MAX, ReadRun, Request, Response, SummedBlocks};
use varve_media::lock::Mutex;
use varve_media::{BlockDevice, BufPool};

/// Blocks of a file whose checksums are asked for together: 4 MiB of the file, some 5 KiB of the answer.
const WINDOW_BLOCKS: u64 = 1024;
/// Windows whose checksums are kept: 16 MiB, for 16 GiB of files.
const WINDOWS_MAX: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// Windows that were read from once.
const TOUCHED_MAX: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// A read of so many blocks asks for checksums at once. A smaller one does when a window is read for the
/// second time: a small file that is read once then costs one message, not two.
const EAGER_BLOCKS: u64 = 16;
/// Most blocks of one transfer through a buffer: 2 MiB.
pub(super) const BUFFER_BLOCKS: u64 = 512;
/// Most blocks of one transfer through a small buffer: 64 KiB. A large one is part of a page of 2 MiB, which a
/// process that reads little need not have.
const SMALL_BUFFER_BLOCKS: u64 = 16;

/// A window of a file: the inode, and its first block.
type Window = (u64, u64);

/// Checksums of the blocks of a window, as far as the daemon told them. They may be of another moment than
/// what lies on the device: then the bytes differ.
#[derive(Default)]
struct Sums {
    /// Up to the last block that is known.
    sums: Vec<u32>,
    /// Which of them are known.
    known: [u64; WINDOW_BLOCKS as usize / 64],
}

impl Sums {
    fn set(&mut self, at: usize, sum: u32) {
        if self.sums.len() <= at {
            self.sums.resize(at + 1, 0);
        }
        self.sums[at] = sum;
        self.known[at / 64] |= 1 << (at % 64);
    }

    fn from(&self, at: usize) -> impl Iterator<Item = u32> {
        let is_known = |at: usize| self.known[at / 64] >> (at % 64) & 1 == 1;
        let from = at.min(self.sums.len());
        let sums = self.sums[from..].iter().zip(from..);
        sums.take_while(move |(_, at)| is_known(*at)).map(|(sum, _)| *sum)
    }
}

/// What [`SumCache::find`] found.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// The checksums of the first of the blocks, one at least.
    Sums(Vec<u32>),
    /// Ask for those from this block on, up to the end of its window.
    Ask(u64),
    /// The daemon is to read.
    Leave,
}

/// Checksums of blocks, least recently used out first.
struct SumCache {
    known: Mutex<Lru<Window, Sums>>,
    touched: Mutex<Lru<Window, ()>>,
}

impl SumCache {
    fn new() -> Self {
        Self {
            known: Mutex::new(Lru::with_hasher(WINDOWS_MAX, RandomState::new())),
            touched: Mutex::new(Lru::with_hasher(TOUCHED_MAX, RandomState::new())),
        }
    }

    /// Returns the checksums of blocks of a file that begin in one window; `asked`: the daemon was asked just
    /// now.
    fn find(&self, inode: u64, blocks: &Range<u64>, asked: bool) -> Found {
        let start = blocks.start / WINDOW_BLOCKS * WINDOW_BLOCKS;
        let window = (inode, start);
        if let Some(known) = self.known.lock().get(&window) {
            let most = (blocks.end - blocks.start) as usize;
            let sums: Vec<u32> = known.from((blocks.start - start) as usize).take(most).collect();
            return match (sums.is_empty(), asked) {
                (false, _) => Found::Sums(sums),
                (true, false) => Found::Ask(blocks.start),
                (true, true) => Found::Leave,
            };
        }
        let is_first = self.touched.lock().put(window, ()).is_none();
        match is_first && blocks.end - blocks.start < EAGER_BLOCKS {
            true => Found::Leave,
            false => Found::Ask(start),
        }
    }

    /// Adds an answer for the window of `block`. What lies outside of it is left out.
    fn learn(&self, inode: u64, block: u64, parts: &[SummedBlocks]) {
        let start = block / WINDOW_BLOCKS * WINDOW_BLOCKS;
        let mut windows = self.known.lock();
        let known = windows.get_or_insert_mut((inode, start), Sums::default);
        for part in parts {
            for (block, sum) in (part.file_block.0..).zip(&part.sums) {
                if let Some(at) = block.checked_sub(start).filter(|at| *at < WINDOW_BLOCKS) {
                    known.set(at as usize, *sum);
                }
            }
        }
    }

    /// Forgets the window of a block that is not as its checksum says.
    fn forget(&self, inode: u64, block: u64) {
        let start = block / WINDOW_BLOCKS * WINDOW_BLOCKS;
        self.known.lock().pop(&(inode, start));
    }
}

/// The device of a session's SSD, and what is known of its blocks.
pub(super) struct DeviceReads {
    device: Arc<dyn BlockDevice>,
    sums: SumCache,
    small_buffers: BufPool,
    buffers: BufPool,
    /// Reads that the daemon was not told of yet.
    reads: Mutex<Vec<ReadRun>>,
    /// Devices that were taken out, as the session page said.
    gone: AtomicU64,
}

/// Blocks that lie one after the other on the device, with their checksums.
struct Run {
    /// First block on the device.
    place: u64,
    /// First block in the file.
    first: u64,
    sums: Vec<u32>,
}

impl DeviceReads {
    pub(super) fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self {
            device,
            sums: SumCache::new(),
            small_buffers: BufPool::new(SMALL_BUFFER_BLOCKS as usize * BLOCK_SIZE),
            buffers: BufPool::new(BUFFER_BLOCKS as usize * BLOCK_SIZE),
            reads: Mutex::default(),
            gone: AtomicU64::new(0),
        }
    }

    fn buffers_of(&self, len: usize) -> &BufPool {
        if len <= self.small_buffers.buf_bytes() {
            &self.small_buffers
        } else {
            &self.buffers
        }
    }

    /// Reads a run. `None`: it failed, or the bytes are not those that were written.
    fn read(&self, inode: u64, run: &Run, out: &mut [u8]) -> Option<()> {
        if let Err(error) = self.device.read(run.place * BLOCK_BYTES, out) {
            tracing::debug!(%error, "the daemon is to read what could not be read here");
            return None;
        }
        let mut blocks = out.chunks_exact(BLOCK_SIZE).zip(&run.sums);
        let same = |(bytes, sum): (&[u8], &u32)| varve_media::crc32c_append(0, bytes) == *sum;
        let right = blocks.all(same) || armed(Bug::DeviceReadUnverified);
        if !right {
            self.sums.forget(inode, run.first);
        }
        right.then_some(())
    }

    /// Notes a read. Returns reads to report when there are many.
    fn note(&self, key: InodeKey, run: &Run) -> Option<Vec<ReadRun>> {
        let mut reads = self.reads.lock();
        reads.push(ReadRun {
            key,
            from: FileBlock(run.first),
            blocks: run.sums.len() as u32,
        });
        (reads.len() >= READS_MAX).then(|| std::mem::take(&mut *reads))
    }
}

impl DataPlane {
    /// Reads blocks from the device into the cache, and copies bytes to `out`, from byte `within` of the
    /// first block on; returns how many. `None`: the daemon is to be asked.
    pub(super) fn fetch_from_device(
        &self,
        inode: &Inode,
        keys: Keys<'_>,
        blocks: Range<u64>,
        within: usize,
        out: &mut [u8],
    ) -> Option<usize> {
        let device = self.device.as_ref()?;
        let end = blocks.end.min(blocks.start + BUFFER_BLOCKS);
        let run = self.run_on_device(device, inode, keys.version, blocks.start..end)?;
        let len = run.sums.len() * BLOCK_SIZE;
        device.buffers_of(len).with(|buffer| {
            let bytes = &mut buffer.bytes_mut()[..len];
            device.read(inode.id(), &run, bytes)?;
            self.is_current(inode, keys.version).then_some(())?;
            self.cache.put(keys, run.first, bytes);
            let wanted = &bytes[within..];
            let len = wanted.len().min(out.len());
            out[..len].copy_from_slice(&wanted[..len]);
            self.note_read(device, inode, &run);
            Some(len)
        })
    }

    /// Reads whole blocks from the device to `out`, as many as lie one after the other, past the cache.
    /// Returns the number of bytes. `None`: the daemon is to be asked, and bytes of `out` may have changed.
    pub(super) fn read_from_device(
        &self,
        inode: &Inode,
        version: u64,
        first: u64,
        out: &mut [u8],
    ) -> Option<usize> {
        let device = self.device.as_ref()?;
        let blocks = (out.len() / BLOCK_SIZE) as u64;
        (blocks > 0).then_some(())?;
        let run = self.run_on_device(device, inode, version, first..first + blocks)?;
        let len = run.sums.len() * BLOCK_SIZE;
        device.read(inode.id(), &run, &mut out[..len])?;
        self.is_current(inode, version).then_some(())?;
        self.note_read(device, inode, &run);
        Some(len)
    }

    /// Finds the first of some blocks on the device, with their checksums; asks the daemon for these if need
    /// be.
    fn run_on_device(
        &self,
        device: &DeviceReads,
        inode: &Inode,
        version: u64,
        blocks: Range<u64>,
    ) -> Option<Run> {
        let window_end = (blocks.start / WINDOW_BLOCKS + 1) * WINDOW_BLOCKS;
        let most = blocks.end.min(window_end) - blocks.start;
        let (place, count) = {
            let body = inode.read();
            (body.extents.version() == version).then_some(())?;
            body.extents.run_on(Tier::Ssd, blocks.start, most)?
        };
        // Many short pieces are read by the daemon at once.
        if count < EAGER_BLOCKS && 4 * count <= most {
            return None;
        }
        let (wanted, of) = (blocks.start..blocks.start + count, inode.id());
        let mut asked = false;
        loop {
            match device.sums.find(of, &wanted, asked) {
                Found::Leave => return None,
                Found::Sums(sums) => {
                    return Some(Run {
                        place,
                        first: wanted.start,
                        sums,
                    });
                }
                Found::Ask(from) => {
                    let told = self.ask_sums(inode, from, window_end - from).ok()?;
                    device.sums.learn(of, from, &told);
                    // An answer may end before the wanted block: a window in many places is told in parts.
                    asked = from == wanted.start;
                }
            }
        }
    }

    fn ask_sums(&self, inode: &Inode, from: u64, blocks: u64) -> Result<Vec<SummedBlocks>, IpcError> {
        let request = Request::Checksums {
            key: inode.key,
            from: FileBlock(from),
            max: blocks as u32,
        };
        match self.call(request)? {
            Response::Summed(summed) => Ok(summed.parts),
            _ => Err(confused("Checksums")),
        }
    }

    /// Whether places of this version are the inode's, and the session counts: after a transfer, so that what
    /// it delivered was the file's.
    fn is_current(&self, inode: &Inode, version: u64) -> bool {
        let same = inode.read().extents.version() == version || armed(Bug::DeviceReadOvertaken);
        same && self.is_live()
    }

    fn note_read(&self, device: &DeviceReads, inode: &Inode, run: &Run) {
        if let Some(reads) = device.note(inode.key, run) {
            self.tell_reads(reads);
        }
    }

    fn tell_reads(&self, reads: Vec<ReadRun>) {
        // Without the report data may stay on a slower tier for longer.
        let _ = self.call(Request::NoteReads { reads });
    }

    /// Closes all devices: the session is over, and nothing read from now on counts.
    pub(crate) fn let_go_of_devices(&self) {
        if let Some(device) = &self.device {
            device.device.let_go(u64::MAX);
        }
    }

    /// Reports the reads that the daemon was not told of yet, and closes devices that were taken out.
    pub(super) fn report_reads(&self) {
        let Some(device) = &self.device else { return };
        let gone = self.page.gone_devices();
        if device.gone.swap(gone, Ordering::Relaxed) != gone {
            device.device.let_go(gone);
        }
        let reads = std::mem::take(&mut *device.reads.lock());
        if !reads.is_empty() {
            self.tell_reads(reads);
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::{Found, SumCache, WINDOW_BLOCKS};
    use varve_format::FileBlock;
    use varve_ipc::SummedBlocks;

    fn summed(file_block: u64, sums: &[u32]) -> SummedBlocks {
        SummedBlocks {
            file_block: FileBlock(file_block),
            number: None,
            sums: sums.to_vec(),
        }
    }

    #[test]
    fn small_read_asks_for_checksums_at_its_second_time_and_a_large_one_at_once() {
        let sums = SumCache::new();
        assert_eq!(sums.find(1, &(5..6), false), Found::Leave);
        assert_eq!(sums.find(1, &(9..10), false), Found::Ask(0));
        assert_eq!(sums.find(2, &(9..10), false), Found::Leave, "another file");
        let next = WINDOW_BLOCKS + 8;
        assert_eq!(sums.find(1, &(next..next + 16), false), Found::Ask(WINDOW_BLOCKS));
    }

    #[test]
    fn checksums_are_found_up_to_the_first_that_is_not_known() {
        let sums = SumCache::new();
        let far = 3 * WINDOW_BLOCKS;
        // The answer begins before the window, has a gap, and ends after the window.
        let end = far + WINDOW_BLOCKS;
        let told = [
            summed(far - 1, &[7, 8, 9]),
            summed(far + 4, &[1]),
            summed(end - 1, &[2, 3]),
        ];
        sums.learn(1, far + 1, &told);
        assert_eq!(sums.find(1, &(far..far + 9), false), Found::Sums(vec![8, 9]));
        assert_eq!(sums.find(1, &(far + 4..far + 6), false), Found::Sums(vec![1]));
        assert_eq!(sums.find(1, &(end - 1..end), false), Found::Sums(vec![2]));
        assert_eq!(sums.find(1, &(far + 2..far + 9), false), Found::Ask(far + 2));
        assert_eq!(sums.find(1, &(far + 2..far + 9), true), Found::Leave);
        // A block that differs has its window forgotten.
        sums.forget(1, far + 4);
        assert_eq!(sums.find(1, &(far..far + 1), false), Found::Leave);
    }
}
