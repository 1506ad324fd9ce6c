//! SSDs and HDDs: a file or a device, by io_uring and `O_DIRECT` where the host has them, else by `pread` and
//! `pwrite`, else buffered. Short transfers are continued here; callers never see them.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::opcode;
use rustix::fs::OFlags;

use super::queue::BlockQueue;
use super::ring::{Kind, Plain, Request, Rings};
use crate::DEVICE_BLOCK_BYTES;
use crate::aligned::{ALIGN_BYTES, AlignedBuf, BufPool, is_aligned};
use crate::direct::read_full;
use crate::error::{DeviceName, MediaError, check_blocks, check_range};
use crate::host::punch_file;
use crate::latch::Latch;
use crate::sys::discard;
use crate::traits::{BlockDevice, DeviceInfo, DeviceState, MediumKind, ReaderPart};

/// Transfers are cut in pieces of this size, which are in flight at once.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes moved through one bounce buffer: several pieces.
const BOUNCE_BYTES: usize = 1 << 20;

/// The host's abilities to use, where it has them. The default is all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockOptions {
    /// Use io_uring.
    pub uring: bool,
    /// Bypass the page cache.
    pub direct: bool,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self {
            uring: true,
            direct: true,
        }
    }
}

/// A file or block device.
pub struct FileDevice {
    name: DeviceName,
    file: File,
    len_bytes: u64,
    is_file: bool,
    direct: AtomicBool,
    rings: Option<Rings<Plain>>,
    bounce: BufPool,
    latch: Latch,
    /// Of a block device.
    queue: Option<BlockQueue>,
    /// The descriptor is this process' own to change. A reader's has been handed over, and the program that
    /// it is in may have closed it.
    may_change: bool,
    /// The device takes discards, as far as is known.
    discards: AtomicBool,
    /// Claim on a block device. A descriptor of its own, since rings keep the other one for a moment after a
    /// kill.
    _claim: Option<File>,
}

/// Claims a block device: fails if it is mounted or belongs to another pool.
pub(super) fn claim(path: &Path, name: &DeviceName) -> Result<Option<File>, MediaError> {
    if !std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device()) {
        return Ok(None);
    }
    // Without O_CREAT this fails while another process has claimed the device.
    let claimed = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(path);
    claimed.map(Some).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => MediaError::Refused {
            device: name.clone(),
            why: "is in use: mounted, a part of something, or another pool's; `lsblk` and `lsof` may \
                  say by whom"
                .into(),
        },
        _ => MediaError::setup(name, "open it", &error),
    })
}

impl FileDevice {
    /// Makes a sparse file (mode 0600) of `len_bytes`, rounded up to whole blocks.
    ///
    /// # Errors
    /// `Setup`.
    pub fn create(path: &Path, len_bytes: u64, options: BlockOptions) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path);
        let file = file.map_err(|e| MediaError::setup(&name, "create it", &e))?;
        file.set_len(len_bytes.next_multiple_of(DEVICE_BLOCK_BYTES))
            .map_err(|e| MediaError::setup(&name, "set its length", &e))?;
        drop(file);
        Self::open(path, options)
    }

    /// Opens a file or device at its length (rounded down to whole blocks). A block device is claimed: it
    /// cannot be mounted meanwhile.
    ///
    /// # Errors
    /// `Setup`; `Refused` if a block device is in use or has zones; `Unfit` if it is neither a file nor a
    /// block device.
    pub fn open(path: &Path, options: BlockOptions) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let claim = claim(path, &name)?;
        let open = |flags| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(flags)
                .open(path)
        };
        let opened = if options.direct {
            open(libc::O_DIRECT)
        } else {
            open(0)
        };
        let (file, direct) = match opened {
            Err(e) if options.direct && e.raw_os_error() == Some(libc::EINVAL) => (open(0), false),
            other => (other, options.direct),
        };
        let file = file.map_err(|e| MediaError::setup(&name, "open it", &e))?;
        let meta = file
            .metadata()
            .map_err(|e| MediaError::setup(&name, "stat it", &e))?;
        let kind = meta.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(MediaError::Unfit {
                device: name,
                what: "is neither a file nor a block device",
            });
        }
        let queue = kind
            .is_block_device()
            .then(|| BlockQueue::of(Path::new("/sys"), meta.rdev()));
        if let Some(queue) = queue {
            queue.check_zones(&name)?;
        }
        let len = length(&file, &name)?;
        Ok(Self {
            name,
            len_bytes: len / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES,
            is_file: kind.is_file(),
            direct: AtomicBool::new(direct),
            rings: rings_of(&file, &meta, options, direct),
            file,
            bounce: BufPool::new(BOUNCE_BYTES),
            latch: Latch::default(),
            queue,
            may_change: true,
            discards: AtomicBool::new(true),
            _claim: claim,
        })
    }

    /// Wraps a descriptor that another process opened for reading ([`BlockDevice::reader_parts`]). Each read
    /// is one system call, by the thread that wants the bytes.
    ///
    /// # Errors
    /// `Setup`.
    pub fn of_reader(file: File) -> Result<Self, MediaError> {
        let name = DeviceName::from("the device of the pool's SSD");
        let flags =
            rustix::fs::fcntl_getfl(&file).map_err(|e| MediaError::setup(&name, "look at it", &e.into()))?;
        let (is_file, len) = (false, length(&file, &name)?);
        Ok(Self {
            name,
            len_bytes: len / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES,
            is_file,
            direct: AtomicBool::new(flags.contains(OFlags::DIRECT)),
            rings: None,
            file,
            bounce: BufPool::new(BOUNCE_BYTES),
            latch: Latch::default(),
            queue: None,
            may_change: false,
            discards: AtomicBool::new(true),
            _claim: None,
        })
    }

    /// Whether io_uring is in use.
    pub const fn uses_uring(&self) -> bool {
        self.rings.is_some()
    }

    /// Whether the page cache is bypassed.
    pub fn uses_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    fn io_error(&self, op: &'static str, off: u64, len: usize, error: &io::Error) -> MediaError {
        MediaError::from_io(&self.name, op, off, len as u64, error)
    }

    /// Runs `work`; if it fails because direct I/O is refused, once more without.
    fn or_buffered(&self, mut work: impl FnMut() -> io::Result<()>) -> io::Result<()> {
        match work() {
            Err(e)
                if self.may_change
                    && e.raw_os_error() == Some(libc::EINVAL)
                    && self.direct.swap(false, Ordering::Relaxed) =>
            {
                let flags = rustix::fs::fcntl_getfl(&self.file)?;
                rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
                work()
            }
            other => other,
        }
    }

    /// The rings, if these transfers go through them: a single transfer is one system call either way, unless
    /// completions are polled.
    fn rings_for(&self, transfers: usize) -> Option<&Rings<Plain>> {
        let rings = self.rings.as_ref()?;
        (transfers > 1 || rings.plan().polled).then_some(rings)
    }

    fn read_parts(&self, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
        match self.rings_for(parts.len()) {
            Some(rings) => {
                let mut requests: Vec<_> = parts
                    .iter_mut()
                    .map(|(off, out)| Request::read(*off, out))
                    .collect();
                rings.run(&mut requests)
            }
            None => parts
                .iter_mut()
                .try_for_each(|(off, out)| read_full(&self.file, *off, out)),
        }
    }

    fn write_parts(&self, parts: &[(u64, &[u8])]) -> io::Result<()> {
        match self.rings_for(parts.len()) {
            Some(rings) => {
                let mut requests: Vec<_> = parts
                    .iter()
                    .map(|(off, src)| Request::write(*off, src, Kind::Write))
                    .collect();
                rings.run(&mut requests)
            }
            None => parts
                .iter()
                .try_for_each(|(off, src)| self.file.write_all_at(src, *off)),
        }
    }

    fn read_aligned(&self, off: u64, out: &mut [u8]) -> io::Result<()> {
        self.or_buffered(|| {
            let pieces = out.chunks_mut(PIECE_BYTES).enumerate();
            let mut parts: Vec<_> = pieces
                .map(|(piece, out)| (off + (piece * PIECE_BYTES) as u64, out))
                .collect();
            self.read_parts(&mut parts)
        })
    }

    fn write_aligned(&self, off: u64, src: &[u8]) -> io::Result<()> {
        self.or_buffered(|| {
            let pieces = src.chunks(PIECE_BYTES).enumerate();
            let parts: Vec<_> = pieces
                .map(|(piece, src)| (off + (piece * PIECE_BYTES) as u64, src))
                .collect();
            self.write_parts(&parts)
        })
    }

    fn read_any(&self, off: u64, out: &mut [u8]) -> io::Result<()> {
        if !self.uses_direct() || is_aligned(out, off) {
            return self.read_aligned(off, out);
        }
        let align = ALIGN_BYTES as u64;
        let mut done = 0;
        while done < out.len() {
            let at = off + done as u64;
            let begin = at / align * align;
            let n = (out.len() - done).min(self.bounce.buf_bytes() - ALIGN_BYTES);
            let span = ((at + n as u64).next_multiple_of(align) - begin) as usize;
            self.bounce.with(|buf| {
                self.read_aligned(begin, &mut buf.bytes_mut()[..span])?;
                let skip = (at - begin) as usize;
                out[done..done + n].copy_from_slice(&buf.bytes()[skip..skip + n]);
                io::Result::Ok(())
            })?;
            done += n;
        }
        Ok(())
    }

    fn write_any(&self, off: u64, src: &[u8]) -> io::Result<()> {
        if !self.uses_direct() || is_aligned(src, off) {
            return self.write_aligned(off, src);
        }
        for (piece, part) in src.chunks(BOUNCE_BYTES).enumerate() {
            self.bounce.with(|buf| {
                let copy = &mut buf.bytes_mut()[..part.len()];
                copy.copy_from_slice(part);
                self.write_aligned(off + (piece * BOUNCE_BYTES) as u64, copy)
            })?;
        }
        Ok(())
    }

    fn check_write(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes)?;
        check_blocks(&self.name, off, len, DEVICE_BLOCK_BYTES)?;
        self.latch.check(&self.name)
    }
}

/// Length of a file or block device in bytes.
fn length(file: &File, name: &DeviceName) -> Result<u64, MediaError> {
    let mut at = file;
    let len = io::Seek::seek(&mut at, io::SeekFrom::End(0));
    len.map_err(|e| MediaError::setup(name, "find its length", &e))
}

/// Opens an open file or block device again, for reading only.
pub(super) fn reopen(file: &File, direct: bool) -> io::Result<File> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(flags).open(same)
}

/// The part of a device that is all of a file or block device.
pub(super) fn whole_part(file: &File, direct: bool, len_bytes: u64) -> Option<ReaderPart> {
    Some(ReaderPart {
        index: 0,
        first_byte: 0,
        len_bytes,
        data_offset: 0,
        file: reopen(file, direct).ok()?,
        emulated: false,
    })
}

/// The rings for a file, if the host gives them.
fn rings_of(file: &File, meta: &Metadata, options: BlockOptions, direct: bool) -> Option<Rings<Plain>> {
    if !options.uring {
        return None;
    }
    let codes = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
    ];
    // Only direct transfers can be polled for, and only where the driver has queues for it.
    let polled =
        direct && meta.file_type().is_block_device() && BlockQueue::of(Path::new("/sys"), meta.rdev()).polls;
    let probe = |polled| Rings::probe(file.as_raw_fd(), polled, Plain, &codes).ok();
    if polled && let Some(rings) = probe(true) {
        // Only a read shows whether the driver really polls.
        let mut buf = AlignedBuf::new(ALIGN_BYTES);
        if rings.run(&mut [Request::read(0, buf.bytes_mut())]).is_ok() {
            return Some(rings);
        }
    }
    probe(false)
}

impl BlockDevice for FileDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        check_range(&self.name, off, out.len() as u64, self.len_bytes)?;
        self.read_any(off, out)
            .map_err(|e| self.io_error("read", off, out.len(), &e))
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.check_write(off, src.len() as u64)?;
        self.write_any(off, src)
            .map_err(|e| self.latch.note(self.io_error("write", off, src.len(), &e)))
    }

    fn flush(&self) -> Result<(), MediaError> {
        self.latch.check(&self.name)?;
        self.file
            .sync_data()
            .map_err(|e| self.latch.note(self.io_error("flush", 0, 0, &e)))
    }

    fn trim(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.check_write(off, len)?;
        if len == 0 {
            return Ok(());
        }
        // Of a block device, a hole is a write of zeros that frees, which fewer devices have than a discard.
        let done = match self.is_file {
            true => punch_file(&self.file, off, len),
            false if !self.discards.load(Ordering::Relaxed) => return Ok(()),
            false => match discard(&self.file, off, len) {
                Ok(false) => punch_file(&self.file, off, len),
                done => done,
            },
        };
        done.map(|_| ()).map_err(|e| {
            // One that refuses will refuse the next one, too.
            self.discards.store(false, Ordering::Relaxed);
            self.io_error("trim", off, len as usize, &e)
        })
    }

    fn read_batch(&self, parts: &mut [(u64, &mut [u8])]) -> Result<(), MediaError> {
        let direct = self.uses_direct();
        let fits = |(off, out): &(u64, &mut [u8])| !direct || is_aligned(out, *off);
        if self.rings.is_none() || !parts.iter().all(fits) {
            return parts.iter_mut().try_for_each(|(off, out)| self.read(*off, out));
        }
        for (off, out) in parts.iter() {
            check_range(&self.name, *off, out.len() as u64, self.len_bytes)?;
        }
        let first = parts.first().map_or((0, 0), |(off, out)| (*off, out.len()));
        let done = self.or_buffered(|| self.read_parts(parts));
        done.map_err(|e| self.io_error("read of a batch", first.0, first.1, &e))
    }

    fn write_batch(&self, parts: &[(u64, &[u8])]) -> Result<(), MediaError> {
        let direct = self.uses_direct();
        if self.rings.is_none() || !parts.iter().all(|(off, src)| !direct || is_aligned(src, *off)) {
            return parts.iter().try_for_each(|(off, src)| self.write(*off, src));
        }
        for (off, src) in parts {
            self.check_write(*off, src.len() as u64)?;
        }
        let first = parts.first().map_or((0, 0), |(off, src)| (*off, src.len()));
        let done = self.or_buffered(|| self.write_parts(parts));
        done.map_err(|e| {
            self.latch
                .note(self.io_error("write of a batch", first.0, first.1, &e))
        })
    }

    fn reader_parts(&self) -> Vec<ReaderPart> {
        whole_part(&self.file, self.uses_direct(), self.len_bytes)
            .into_iter()
            .collect()
    }

    fn wants_order(&self) -> bool {
        self.queue.is_some_and(|queue| queue.rotates && !queue.sorted)
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn name(&self) -> DeviceName {
        self.name.clone()
    }

    fn info(&self) -> DeviceInfo {
        let engine = match &self.rings {
            Some(rings) => format!("io_uring ({})", rings.plan()),
            None => "pread/pwrite".to_owned(),
        };
        let cache = if self.uses_direct() {
            "O_DIRECT"
        } else {
            "buffered"
        };
        let what = if self.is_file { "file" } else { "device" };
        let backend = format!("{engine}, {cache}, {what}");
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::Block,
            backend,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::MetadataExt;

    use super::{BlockOptions, FileDevice};
    use crate::aligned::AlignedBuf;
    use crate::{BlockDevice, DeviceState, MediaError};

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 7 + i / 4096) as u8).collect()
    }

    const ALL: [BlockOptions; 4] = [
        BlockOptions {
            uring: true,
            direct: true,
        },
        BlockOptions {
            uring: true,
            direct: false,
        },
        BlockOptions {
            uring: false,
            direct: true,
        },
        BlockOptions {
            uring: false,
            direct: false,
        },
    ];

    #[test]
    fn device_reads_what_any_other_way_wrote() {
        for writer in ALL {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("ssd");
            let device = FileDevice::create(&path, 16 << 20, writer).unwrap();
            let data = pattern(3 << 20);
            device.write(8192, &data).unwrap();
            device.flush().unwrap();
            for reader in ALL {
                let other = FileDevice::open(&path, reader).unwrap();
                let mut back = vec![0; data.len()];
                other.read(8192, &mut back).unwrap();
                assert!(back == data, "{writer:?} then {reader:?}");
                let mut odd = vec![0; 2_000_001];
                other.read(8192 + 4095, &mut odd).unwrap();
                assert!(
                    odd == data[4095..4095 + 2_000_001],
                    "{writer:?} then {reader:?}, unaligned"
                );
            }
            let plain = std::fs::read(&path).unwrap();
            assert!(plain[8192..8192 + data.len()] == data[..]);
        }
    }

    #[test]
    fn device_runs_many_transfers_at_once_when_given_a_batch() {
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::create(&dir.path().join("ssd"), 8 << 20, BlockOptions::default()).unwrap();
        let mut source = AlignedBuf::new(100 * 4096);
        source.bytes_mut().copy_from_slice(&pattern(100 * 4096));
        let parts: Vec<(u64, &[u8])> = source
            .bytes()
            .chunks(4096)
            .enumerate()
            .map(|(i, part)| ((i as u64 * 17 % 100) * 8192, part))
            .collect();
        device.write_batch(&parts).unwrap();
        let mut target = AlignedBuf::new(100 * 4096);
        let mut wanted: Vec<(u64, &mut [u8])> = target
            .bytes_mut()
            .chunks_mut(4096)
            .enumerate()
            .map(|(i, part)| ((i as u64 * 17 % 100) * 8192, part))
            .collect();
        device.read_batch(&mut wanted).unwrap();
        assert!(source.bytes() == target.bytes());
    }

    #[test]
    fn file_is_open_no_more_when_its_device_is_gone_whichever_threads_used_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::copy("/bin/true", &path).unwrap();
        let device = FileDevice::open(&path, BlockOptions::default()).unwrap();
        let read = || {
            let mut bufs = [AlignedBuf::new(4096), AlignedBuf::new(4096)];
            let [one, other] = &mut bufs;
            device
                .read_batch(&mut [(0, one.bytes_mut()), (4096, other.bytes_mut())])
                .unwrap();
        };
        read();
        std::thread::scope(|scope| {
            scope.spawn(read);
        });
        // A file that is open for writing cannot be run.
        let busy = || {
            let run = std::process::Command::new(&path).status();
            run.is_err_and(|error| error.raw_os_error() == Some(libc::ETXTBSY))
        };
        assert!(busy());
        drop(device);
        // The kernel takes rings down asynchronously, and a child that another test starts may hold the file
        // for a moment.
        let begun = std::time::Instant::now();
        while busy() {
            assert!(begun.elapsed().as_secs() < 20, "still open");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    #[test]
    fn device_gives_space_back_when_trimmed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hdd");
        let device = FileDevice::create(&path, 64 << 20, BlockOptions::default()).unwrap();
        let sparse = std::fs::metadata(&path).unwrap().blocks();
        device.write(0, &pattern(4 << 20)).unwrap();
        device.flush().unwrap();
        let full = std::fs::metadata(&path).unwrap().blocks();
        assert!(full >= sparse + 8192);
        device.trim(0, 4 << 20).unwrap();
        let mut back = [1; 4096];
        device.read(4096, &mut back).unwrap();
        if std::fs::metadata(&path).unwrap().blocks() < full {
            assert_eq!(back, [0; 4096]);
        } else {
            eprintln!("SKIP: this file system cannot punch holes");
        }
    }

    #[test]
    fn device_refuses_what_is_outside_or_not_whole_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let device = FileDevice::create(&dir.path().join("d"), 8192, BlockOptions::default()).unwrap();
        assert!(matches!(
            device.write(8192, &[0; 4096]),
            Err(MediaError::OutOfRange { .. })
        ));
        assert!(matches!(
            device.write(u64::MAX, &[0; 4096]),
            Err(MediaError::OutOfRange { .. })
        ));
        assert!(matches!(
            device.write(0, &[0; 100]),
            Err(MediaError::Misaligned { .. })
        ));
        assert!(matches!(
            device.read(8190, &mut [0; 3]),
            Err(MediaError::OutOfRange { .. })
        ));
        assert_eq!(device.state(), DeviceState::Ok);
        assert!(FileDevice::open(std::path::Path::new("/dev/null"), BlockOptions::default()).is_err());
    }

    #[test]
    fn device_latches_on_io_errors_but_not_on_want_of_space() {
        // /dev/full answers every write with ENOSPC; it is a character device, so it is put in place by hand.
        let dir = tempfile::tempdir().unwrap();
        let options = BlockOptions {
            uring: false,
            direct: false,
        };
        let mut device = FileDevice::create(&dir.path().join("d"), 1 << 20, options).unwrap();
        device.file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/full")
            .unwrap();
        let error = device.write(0, &[1; 4096]).unwrap_err();
        assert!(error.is_no_space(), "{error}");
        assert_eq!(device.state(), DeviceState::Ok);
        // A descriptor that cannot be written gives EBADF, which is no want of space.
        device.file = std::fs::File::open("/dev/zero").unwrap();
        assert!(matches!(device.write(0, &[1; 4096]), Err(MediaError::Io { .. })));
        assert!(matches!(device.state(), DeviceState::Failed { .. }));
        assert!(matches!(
            device.write(0, &[1; 4096]),
            Err(MediaError::Failed { .. })
        ));
        assert!(matches!(device.flush(), Err(MediaError::Failed { .. })));
    }
}
