//! A file that is written durably in whole blocks: `O_DIRECT` and synced with the write, or buffered and
//! `fdatasync` where the file system refuses that; and the journal's region on such a file.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::lock::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{ReadWriteFlags, pwritev2};

use crate::DEVICE_BLOCK_BYTES;
use crate::aio::Aio;
use crate::aligned::{ALIGN_BYTES, BufPool, is_aligned};
use crate::error::{DeviceName, MediaError, check_range};
use crate::host::allocate_file;
use crate::latch::Latch;
use crate::pmem::persist::crc32c_append;
use crate::traits::{DeviceInfo, DeviceState, MediumKind, Region};

/// Bytes moved through one bounce buffer: the log entry with the most payload, in whole blocks, and some
/// slack.
const BOUNCE_BYTES: usize = (1 << 20) + (128 << 10);

/// Shared by all files: a daemon has a log open for each session, and few are written at a time.
static BOUNCE: BufPool = BufPool::new(BOUNCE_BYTES);

/// An open file for durable block writes.
pub(crate) struct DirectFile {
    file: File,
    /// Opened `O_DIRECT`: written bytes go to the device at once.
    direct: AtomicBool,
    /// Queue for several writes in flight, made when first needed.
    aio: Mutex<Option<Aio>>,
}

impl DirectFile {
    pub(crate) fn open(path: &Path, create: bool) -> io::Result<Self> {
        let open = |flags: i32| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(create)
                .mode(0o600)
                .custom_flags(flags)
                .open(path)
        };
        match open(libc::O_DIRECT) {
            // Some file systems refuse only after they made the file.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create(create)
                    .truncate(false)
                    .mode(0o600)
                    .open(path);
                file.and_then(Self::from_file)
            }
            other => other.and_then(Self::from_file),
        }
    }

    /// Wraps a descriptor; its flags say how it was opened.
    pub(crate) fn from_file(file: File) -> io::Result<Self> {
        let direct = fcntl_getfl(&file)?.contains(OFlags::DIRECT);
        Ok(Self {
            file,
            direct: AtomicBool::new(direct),
            aio: Mutex::new(None),
        })
    }

    pub(crate) const fn file(&self) -> &File {
        &self.file
    }

    /// Buffers to write from and to read into.
    pub(crate) const fn bounce() -> &'static BufPool {
        &BOUNCE
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Writes whole aligned blocks. Durable when this returns.
    pub(crate) fn write_durable(&self, off: u64, blocks: &[u8]) -> io::Result<()> {
        debug_assert!(is_aligned(blocks, off));
        if self.is_direct() {
            match self.write_synced(off, blocks) {
                Ok(()) => return Ok(()),
                // This file system or kernel does not support it: write and sync in two steps.
                Err(error) if is_refusal(&error) => {}
                Err(error) => return Err(error),
            }
        }
        self.write_parts(&[(off, blocks)])?;
        self.file.sync_data()
    }

    /// Writes with one call that also waits for the device.
    fn write_synced(&self, mut off: u64, mut blocks: &[u8]) -> io::Result<()> {
        while !blocks.is_empty() {
            match pwritev2(&self.file, &[IoSlice::new(blocks)], off, ReadWriteFlags::DSYNC) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => (off, blocks) = (off + n as u64, &blocks[n..]),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Writes several runs of whole aligned blocks that do not overlap, at once where the kernel can. Durable
    /// after the next [`sync`](Self::sync).
    pub(crate) fn write_parts(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        debug_assert!(parts.iter().all(|(off, blocks)| is_aligned(blocks, *off)));
        let left = self.write_at_once(parts);
        for (off, blocks) in parts
            .iter()
            .zip(left)
            .filter_map(|(part, left)| left.then_some(part))
        {
            match self.file.write_all_at(blocks, *off) {
                Err(error) if is_refusal(&error) && self.is_direct() => {
                    self.go_buffered()?;
                    self.file.write_all_at(blocks, *off)?;
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// Writes as many parts as possible with all of them in flight. Returns for each part whether it is still
    /// to be written: those are written one after the other, which meets their errors again.
    fn write_at_once(&self, parts: &[(u64, &[u8])]) -> Vec<bool> {
        let mut left = vec![true; parts.len()];
        // Never blocks: a process may have been forked while another thread held the lock.
        if parts.len() > 1
            && self.is_direct()
            && let Some(mut aio) = self.aio.try_lock()
        {
            if aio.is_none() {
                *aio = Aio::new().ok();
            }
            if let Some(aio) = &mut *aio {
                aio.write(&self.file, parts, &mut left);
            }
        }
        left
    }

    /// Makes all earlier writes durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Clears `O_DIRECT`, which the file system took at open and refuses at a write.
    fn go_buffered(&self) -> io::Result<()> {
        let flags = fcntl_getfl(&self.file)?;
        fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        self.direct.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Reads any range; bytes past the end of the file are zeros.
    pub(crate) fn read(&self, off: u64, out: &mut [u8]) -> io::Result<()> {
        if !self.is_direct() {
            return read_full(&self.file, off, out);
        }
        let align = ALIGN_BYTES as u64;
        let (mut done, room) = (0, BOUNCE.buf_bytes() - ALIGN_BYTES);
        while done < out.len() {
            let at = off + done as u64;
            let begin = at / align * align;
            let n = (out.len() - done).min(room);
            let span = ((at + n as u64).next_multiple_of(align) - begin) as usize;
            BOUNCE.with(|buf| {
                let skip = (at - begin) as usize;
                read_full(&self.file, begin, &mut buf.bytes_mut()[..span])?;
                out[done..done + n].copy_from_slice(&buf.bytes()[skip..skip + n]);
                io::Result::Ok(())
            })?;
            done += n;
        }
        Ok(())
    }
}

/// Whether the error says that this way of writing is not supported.
fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS)
    )
}

/// Reads until `out` is full or the file ends; the rest becomes zeros.
pub(crate) fn read_full(file: &File, off: u64, out: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], off + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    out[done..].fill(0);
    Ok(())
}

type Block = Box<[u8; ALIGN_BYTES]>;

/// A region in a file without a mapping: writes gather in memory and `sync` makes them durable with one
/// device write for each run of blocks. Reads see the writes at once. Made for the journal: one writer,
/// appending.
///
/// Unlike a mapped region, a write that was fenced but not synced is *lost* when the process is killed.
pub struct JournalFile {
    name: DeviceName,
    file: DirectFile,
    len_bytes: AtomicU64,
    /// Blocks written to and not yet synced, and the last clean one, so that an append need not read it back.
    cached: Mutex<BTreeMap<u64, CachedBlock>>,
    /// One sync at a time, so that an older image of a block never lands after a newer one.
    syncing: Mutex<()>,
    latch: Latch,
}

struct CachedBlock {
    dirty: bool,
    bytes: Block,
}

impl JournalFile {
    /// Makes the file, with all its space allocated.
    ///
    /// # Errors
    /// `Setup`; `NoSpace`, and the file is removed again.
    pub fn create(path: &Path, len_bytes: u64) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let file = DirectFile::open(path, true).map_err(|e| MediaError::setup(&name, "create it", &e))?;
        let len_bytes = len_bytes.next_multiple_of(DEVICE_BLOCK_BYTES);
        if let Err(error) = allocate_file(file.file(), 0, len_bytes) {
            // Best effort: the caller needs the first error.
            let _ = std::fs::remove_file(path);
            return Err(MediaError::setup(&name, "allocate it", &error));
        }
        Ok(Self::new(name, file, len_bytes))
    }

    /// Opens an existing file.
    ///
    /// # Errors
    /// `Setup`.
    pub fn open(path: &Path) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let file = DirectFile::open(path, false).map_err(|e| MediaError::setup(&name, "open it", &e))?;
        let meta = file
            .file()
            .metadata()
            .map_err(|e| MediaError::setup(&name, "stat it", &e))?;
        Ok(Self::new(name, file, meta.len()))
    }

    fn new(name: DeviceName, file: DirectFile, len_bytes: u64) -> Self {
        Self {
            name,
            file,
            len_bytes: AtomicU64::new(len_bytes),
            cached: Mutex::new(BTreeMap::new()),
            syncing: Mutex::new(()),
            latch: Latch::default(),
        }
    }

    fn io<T>(&self, op: &'static str, off: u64, len: u64, done: io::Result<T>) -> Result<T, MediaError> {
        done.map_err(|e| MediaError::from_io(&self.name, op, off, len, &e))
    }

    /// Copies `src` into cached blocks, reading those from the file that are written only in part.
    fn gather(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        check_range(&self.name, off, src.len() as u64, self.len_bytes())?;
        self.latch.check(&self.name)?;
        let mut cached = self.cached.lock();
        let mut done = 0;
        while done < src.len() {
            let at = off + done as u64;
            let (block, within) = (at / DEVICE_BLOCK_BYTES, (at % DEVICE_BLOCK_BYTES) as usize);
            let n = (ALIGN_BYTES - within).min(src.len() - done);
            let entry = match cached.entry(block) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => {
                    let mut bytes: Block = Box::new([0; ALIGN_BYTES]);
                    if n < ALIGN_BYTES {
                        let read = self.file.read(block * DEVICE_BLOCK_BYTES, &mut bytes[..]);
                        self.io("read", at, n as u64, read)?;
                    }
                    place.insert(CachedBlock { dirty: false, bytes })
                }
            };
            entry.bytes[within..within + n].copy_from_slice(&src[done..done + n]);
            entry.dirty = true;
            done += n;
        }
        Ok(())
    }

    /// Writes the dirty blocks of `blocks`, in runs. Returns the number of the last one.
    fn write_dirty(&self, blocks: std::ops::Range<u64>) -> io::Result<()> {
        let mut next = blocks.start;
        while next < blocks.end {
            let run = BOUNCE.with(|buf| {
                let mut len = 0;
                let mut first = None;
                for (block, entry) in self.cached.lock().range_mut(next..blocks.end) {
                    let expected = *first.get_or_insert(*block) + (len / ALIGN_BYTES) as u64;
                    let full = len == BOUNCE_BYTES;
                    if !entry.dirty && len == 0 {
                        first = None;
                        continue;
                    }
                    if !entry.dirty || *block != expected || full {
                        break;
                    }
                    buf.bytes_mut()[len..len + ALIGN_BYTES].copy_from_slice(&entry.bytes[..]);
                    entry.dirty = false;
                    len += ALIGN_BYTES;
                }
                let Some(first) = first.filter(|_| len > 0) else {
                    return Ok(None);
                };
                self.file
                    .write_durable(first * DEVICE_BLOCK_BYTES, &buf.bytes()[..len])?;
                io::Result::Ok(Some(first + (len / ALIGN_BYTES) as u64))
            })?;
            let Some(end) = run else { break };
            next = end;
        }
        Ok(())
    }
}

impl Region for JournalFile {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        check_range(&self.name, off, out.len() as u64, self.len_bytes())?;
        // Under the lock, so that a block cannot leave the cache between the two reads.
        let cached = self.cached.lock();
        self.io("read", off, out.len() as u64, self.file.read(off, out))?;
        let end = off + out.len() as u64;
        for (block, entry) in cached.range(off / DEVICE_BLOCK_BYTES..end.div_ceil(DEVICE_BLOCK_BYTES)) {
            let begin = block * DEVICE_BLOCK_BYTES;
            let (from, to) = (off.max(begin), end.min(begin + DEVICE_BLOCK_BYTES));
            out[(from - off) as usize..(to - off) as usize]
                .copy_from_slice(&entry.bytes[(from - begin) as usize..(to - begin) as usize]);
        }
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.gather(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        // Copied once, so that the checksum covers the stored bytes.
        let copy = src.to_vec();
        self.gather(off, &copy)?;
        Ok(crc32c_append(seed, &copy))
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.latch.check(&self.name)
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        let _one_at_a_time = self.syncing.lock();
        self.latch.check(&self.name)?;
        let blocks = off / DEVICE_BLOCK_BYTES..(off + len).div_ceil(DEVICE_BLOCK_BYTES);
        let last = blocks.end.saturating_sub(1);
        // A failed write leaves the blocks marked clean: only the latch keeps them from being trusted.
        let done = self.io("durable write", off, len, self.write_dirty(blocks));
        done.map_err(|error| match error {
            MediaError::NoSpace { .. } => self.latch.note(MediaError::Io {
                device: self.name.clone(),
                op: "durable write into allocated space",
                off,
                len,
                errno: libc::ENOSPC,
            }),
            other => self.latch.note(other),
        })?;
        self.cached
            .lock()
            .retain(|block, entry| entry.dirty || *block == last);
        Ok(())
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        let _one_at_a_time = self.syncing.lock();
        let (old, new) = (self.len_bytes(), new_len.next_multiple_of(DEVICE_BLOCK_BYTES));
        if new > old {
            self.io(
                "allocate",
                old,
                new - old,
                allocate_file(self.file.file(), old, new - old),
            )?;
            self.len_bytes.store(new, Ordering::Release);
        }
        Ok(())
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        self.io("allocate", off, len, allocate_file(self.file.file(), off, len))
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn info(&self) -> DeviceInfo {
        let backend = if self.file.is_direct() {
            "O_DIRECT, synced with each write"
        } else {
            "buffered, fdatasync"
        };
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::DirectFile,
            backend: backend.into(),
        }
    }
}
