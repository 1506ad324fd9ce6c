//! A block device of SPDK's as a block device of ours. Owns the cut into operations, copies between callers'
//! memory and that of the library, and what a failure means; the reactor owns everything after the request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::lock::{Condvar, Mutex};

use super::reactor::{Link, PIECE_BYTES, Reactor, Reply, Request, Shared, Wanted};
use super::sys::{DmaBuffer, Operation};
use crate::DEVICE_BLOCK_BYTES;
use crate::error::{DeviceName, MediaError, check_blocks, check_range};
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind};

/// Settings of a device. The default suits a daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpdkOptions {
    /// How long an operation may take while no other ends. After that the device is reset.
    pub io_timeout: Duration,
}

impl Default for SpdkOptions {
    fn default() -> Self {
        Self {
            io_timeout: Duration::from_secs(30),
        }
    }
}

/// Memory for transfers that no operation has.
struct Buffers {
    free: Mutex<Vec<DmaBuffer>>,
    came: Condvar,
}

impl Buffers {
    fn put(&self, buffer: DmaBuffer) {
        self.free.lock().push(buffer);
        self.came.notify_one();
    }

    /// Takes one; waits for it if `wait` is set, and returns `None` where that takes too long or the device
    /// was given up.
    fn take(&self, wait: bool, shared: &Shared, limit: Duration) -> Option<DmaBuffer> {
        let begun = Instant::now();
        let mut free = self.free.lock();
        loop {
            if let Some(buffer) = free.pop() {
                return Some(buffer);
            }
            if !wait || shared.dead.load(Ordering::Acquire) || begun.elapsed() > limit {
                return None;
            }
            self.came.wait_for(&mut free, Duration::from_millis(100));
        }
    }
}

/// A part of a request that is one operation.
enum Piece<'a> {
    /// Bytes of the device from `off` on, of which `out` wants those after the first `skip`.
    Read {
        off: u64,
        len: usize,
        skip: usize,
        out: &'a mut [u8],
    },
    Write {
        off: u64,
        src: &'a [u8],
    },
    Other {
        operation: Operation,
        off: u64,
        len: u64,
    },
}

/// A block device of SPDK's.
pub struct SpdkDevice {
    name: DeviceName,
    link: Link,
    len_bytes: u64,
    buffers: Buffers,
    /// After this an answer does not come any more.
    limit: Duration,
    reactor: Arc<Reactor>,
}

impl SpdkDevice {
    /// Opens the block device `bdev` (or the only one), which `json` makes, if it is not empty.
    ///
    /// # Errors
    /// `Refused`: the text names the remedy.
    pub fn open(
        reactor: Arc<Reactor>,
        name: DeviceName,
        bdev: Option<String>,
        json: String,
        options: SpdkOptions,
    ) -> Result<Self, MediaError> {
        let wanted = Wanted {
            json,
            bdev,
            controller: None,
            io_timeout: options.io_timeout,
        };
        Self::with(reactor, name, wanted, true)
    }

    /// Opens a device. `flushes`: SPDK passes flushes to what lies below it.
    pub(super) fn with(
        reactor: Arc<Reactor>,
        name: DeviceName,
        wanted: Wanted,
        flushes: bool,
    ) -> Result<Self, MediaError> {
        let refused = |why: String| MediaError::Refused {
            device: name.clone(),
            why: why.into(),
        };
        let limit = wanted.io_timeout * 4 + Duration::from_secs(30);
        let (link, free) = reactor.open(wanted).map_err(refused)?;
        let buffers = Buffers {
            free: Mutex::new(free),
            came: Condvar::new(),
        };
        let len = link.facts.blocks.saturating_mul(link.facts.block_bytes);
        let device = Self {
            len_bytes: len / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES,
            name: name.clone(),
            link,
            buffers,
            limit,
            reactor,
        };
        // Dropped, and so closed, where it does not fit.
        device.check_fit(flushes).map_err(refused)?;
        Ok(device)
    }

    fn check_fit(&self, flushes: bool) -> Result<(), String> {
        let facts = &self.link.facts;
        if facts.metadata_bytes > 0 {
            return Err(format!(
                "has {} bytes of metadata a sector, which are not supported; for a namespace, `nvme format \
                 --lbaf=N` takes another format AND ERASES the namespace",
                facts.metadata_bytes
            ));
        }
        if !facts.block_bytes.is_power_of_two() || !(512..=DEVICE_BLOCK_BYTES).contains(&facts.block_bytes) {
            return Err(format!(
                "has sectors of {} bytes; those of 512 to {DEVICE_BLOCK_BYTES} are supported",
                facts.block_bytes
            ));
        }
        if self.len_bytes == 0 {
            return Err("has no room for a block".into());
        }
        if !facts.is_nvme && !flushes {
            return Err(format!(
                "{} lies above an NVMe driver that does not pass flushes on, so nothing on it would be \
                 durable; add {{\"method\": \"bdev_nvme_set_options\", \"params\": {{\"enable_flush\": \
                 true}}}} to its configuration (SPDK 25.09 or later), before the controller is attached",
                self.link.name
            ));
        }
        Ok(())
    }

    /// Bytes of a sector.
    pub const fn sector_bytes(&self) -> u64 {
        self.link.facts.block_bytes
    }

    fn failed(&self) -> MediaError {
        match self.link.shared.latch.check(&self.name) {
            Err(error) => error,
            Ok(()) => MediaError::from_errno(&self.name, "use", 0, 0, libc::ENODEV),
        }
    }

    fn is_dead(&self) -> bool {
        self.link.shared.dead.load(Ordering::Acquire)
    }

    /// The library's thread is not there, or does not answer.
    fn unanswered(&self) -> MediaError {
        self.link
            .shared
            .latch
            .set("SPDK's thread does not answer; restart the daemon".into());
        self.link.shared.dead.store(true, Ordering::Release);
        self.failed()
    }

    fn cut_read<'a>(&self, pieces: &mut Vec<Piece<'a>>, off: u64, out: &'a mut [u8]) {
        let sector = self.sector_bytes();
        let (mut at, mut rest) = (off, out);
        while !rest.is_empty() {
            let first = at / sector * sector;
            let skip = (at - first) as usize;
            let (part, after) = rest.split_at_mut(rest.len().min(PIECE_BYTES - skip));
            let len = (skip + part.len()).next_multiple_of(sector as usize);
            at += part.len() as u64;
            rest = after;
            pieces.push(Piece::Read {
                off: first,
                len,
                skip,
                out: part,
            });
        }
    }

    /// Carries out pieces. The range is for messages.
    fn run(
        &self,
        op: &'static str,
        (off, len): (u64, u64),
        pieces: &mut [Piece<'_>],
    ) -> Result<(), MediaError> {
        let (reply, replies) = channel();
        let (mut next, mut flying, mut failed) = (0, 0, None);
        loop {
            while next < pieces.len() && failed.is_none() && !self.is_dead() {
                let buffer = match &pieces[next] {
                    Piece::Other { .. } => None,
                    Piece::Read { .. } | Piece::Write { .. } => {
                        match self.buffers.take(flying == 0, &self.link.shared, self.limit) {
                            None => break,
                            some => some,
                        }
                    }
                };
                let request = self.request(&pieces[next], next, buffer, reply.clone());
                self.reactor.submit(request);
                (next, flying) = (next + 1, flying + 1);
            }
            if flying == 0 {
                break;
            }
            let answer = match replies.recv_timeout(self.limit) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(self.unanswered());
                }
            };
            flying -= 1;
            self.settle(&mut pieces[answer.tag], &answer);
            failed = failed.or(answer.result.err());
            if let Some(buffer) = answer.buffer {
                self.buffers.put(buffer);
            }
        }
        match failed {
            _ if self.is_dead() => Err(self.failed()),
            Some(errno) => Err(MediaError::from_errno(&self.name, op, off, len, errno)),
            None if next < pieces.len() => Err(self.unanswered()),
            None => Ok(()),
        }
    }

    fn request(
        &self,
        piece: &Piece<'_>,
        tag: usize,
        mut buffer: Option<DmaBuffer>,
        reply: std::sync::mpsc::Sender<Reply>,
    ) -> Request {
        let (operation, off, len) = match piece {
            Piece::Read { off, len, .. } => (Operation::Read, *off, *len as u64),
            Piece::Write { off, src } => {
                if let Some(buffer) = &mut buffer {
                    buffer.write(src);
                }
                (Operation::Write, *off, src.len() as u64)
            }
            Piece::Other { operation, off, len } => (*operation, *off, *len),
        };
        Request {
            device: self.link.id,
            operation,
            off,
            len,
            buffer,
            tag,
            reply,
        }
    }

    /// Copies what was read to its caller.
    fn settle(&self, piece: &mut Piece<'_>, answer: &Reply) {
        if let (Piece::Read { skip, out, .. }, Ok(()), Some(buffer)) = (piece, answer.result, &answer.buffer)
        {
            buffer.read(*skip, out);
        }
    }

    fn check_write(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes)?;
        check_blocks(&self.name, off, len, DEVICE_BLOCK_BYTES)?;
        self.link.shared.latch.check(&self.name)
    }
}

impl BlockDevice for SpdkDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.read_batch(&mut [(off, out)])
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.write_batch(&[(off, src)])
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.link.shared.latch.check(&self.name)?;
        let facts = &self.link.facts;
        // A namespace without a volatile cache has nothing to flush; what lies on something else is asked.
        if !facts.can_flush || (facts.is_nvme && !facts.has_write_cache) {
            return Ok(());
        }
        let piece = Piece::Other {
            operation: Operation::Flush,
            off: 0,
            len: facts.blocks * facts.block_bytes,
        };
        self.run("flush", (0, 0), &mut [piece])
            .map_err(|error| self.link.shared.latch.note(error))
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check_write(off, len)?;
        if len == 0 || !self.link.facts.can_unmap {
            return Ok(());
        }
        let piece = Piece::Other {
            operation: Operation::Unmap,
            off,
            len,
        };
        self.run("trim", (off, len), &mut [piece])
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let range = parts
            .first()
            .map_or((0, 0), |(off, out)| (*off, out.len() as u64));
        let mut pieces = Vec::with_capacity(parts.len());
        for (off, out) in parts {
            check_range(&self.name, *off, out.len() as u64, self.len_bytes)?;
            self.cut_read(&mut pieces, *off, out);
        }
        self.run("read", range, &mut pieces)
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let range = parts
            .first()
            .map_or((0, 0), |(off, src)| (*off, src.len() as u64));
        let mut pieces = Vec::with_capacity(parts.len());
        for (off, src) in parts {
            self.check_write(*off, src.len() as u64)?;
            let chunks = src.chunks(PIECE_BYTES).enumerate();
            pieces.extend(chunks.map(|(at, src)| Piece::Write {
                off: off + (at * PIECE_BYTES) as u64,
                src,
            }));
        }
        self.run("write", range, &mut pieces)
            .map_err(|error| self.link.shared.latch.note(error))
    }

    fn state(&self) -> DeviceState {
        self.link.shared.latch.state()
    }

    fn name(&self) -> DeviceName {
        self.name.clone()
    }

    fn info(&self) -> DeviceInfo {
        let facts = &self.link.facts;
        let cache = match (facts.has_write_cache, facts.is_nvme) {
            (true, _) => "volatile write cache",
            (false, true) => "no volatile write cache",
            (false, false) => "flushed by what lies below",
        };
        let backend = format!(
            "{}, {} {}, sectors of {}, {cache}",
            self.reactor.about, facts.product, self.link.name, facts.block_bytes
        );
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Block,
            backend,
        }
    }
}

impl Drop for SpdkDevice {
    fn drop(&mut self) {
        let free = std::mem::take(self.buffers.free.get_mut());
        self.reactor.close(self.link.id, free);
    }
}
