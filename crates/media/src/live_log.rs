//! A log with two copies: a *live* one in tmpfs, mapped, which survives any kill of processes, and a
//! *backing* one on disk, written at durability points, which survives a power cut. Knows nothing of entries;
//! its user decides which copy counts after a crash.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::lock::{Condvar, Mutex};

use crate::DEVICE_BLOCK_BYTES;
use crate::direct::DirectFile;
use crate::error::{DeviceName, MediaError, check_range};
use crate::host::allocate_file;
use crate::latch::Latch;
use crate::mapped::{Backing, MappedOptions, MappedRegion};
use crate::traits::{DeviceInfo, DeviceState, MediumKind, Region};

/// Unit of the first write to the backing file. The first small sync into a stripe writes all of it, since
/// the first write to newly allocated blocks costs the disk's file system a journal commit (129 against 50 µs
/// measured). Later syncs then find written blocks.
const STRIPE_BYTES: u64 = 256 << 10;

/// What a client faults in of a log that it gets its first space for; the rest at its first stores.
const FIRST_POPULATED_BYTES: u64 = 64 << 10;

/// Ranges being synced. Overlapping ones wait for each other, so that an older image of a block never lands
/// after a newer one.
#[derive(Default)]
struct RangeLock {
    held: Mutex<Vec<Range<u64>>>,
    freed: Condvar,
}

impl RangeLock {
    fn with<T>(&self, ranges: &[Range<u64>], work: impl FnOnce() -> T) -> T {
        let mut held = self.held.lock();
        // All at once: two calls that each held a part could wait for each other.
        while held.iter().any(|other| {
            ranges
                .iter()
                .any(|own| other.start < own.end && own.start < other.end)
        }) {
            self.freed.wait(&mut held);
        }
        held.extend_from_slice(ranges);
        drop(held);
        let result = work();
        self.held.lock().retain(|other| !ranges.contains(other));
        self.freed.notify_all();
        result
    }
}

/// A live log and its backing file.
pub struct LiveLog {
    name: DeviceName,
    live: MappedRegion,
    backing: DirectFile,
    syncing: RangeLock,
    /// One bit for each stripe that this value has synced.
    written: Vec<AtomicU64>,
    latch: Latch,
    growing: Mutex<()>,
    /// Other processes can shorten the live file, so it is read with guarded copies.
    distrusts: bool,
    /// The live copy was given back: its bytes go to the disk no more.
    retired: AtomicBool,
}

impl LiveLog {
    /// Makes both files (mode 0600), zeros, with all space of `len_bytes` allocated on both hosts.
    ///
    /// # Errors
    /// `Setup`, `NoSpace`; both files are removed again.
    pub fn create(live: &Path, backing: &Path, len_bytes: u64, max_bytes: u64) -> Result<Self, MediaError> {
        let name = DeviceName::from(backing);
        let len_bytes = len_bytes.next_multiple_of(DEVICE_BLOCK_BYTES);
        let disk = DirectFile::open(backing, true).map_err(|e| MediaError::setup(&name, "create it", &e))?;
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes,
            max_bytes,
            sparse: false,
        };
        allocate_file(disk.file(), 0, len_bytes)
            .map_err(|e| MediaError::setup(&name, "allocate it", &e))
            .and_then(|()| MappedRegion::create(live, options))
            .inspect(|live| live.populate(0, len_bytes))
            .and_then(|live| Self::new(name, live, disk))
            .inspect_err(|_| {
                // Best effort: the caller gets the first error; a leftover file would only cause an "exists"
                // error later.
                let _ = std::fs::remove_file(backing);
            })
    }

    /// Takes `len_bytes` of the disk for the backing file, so that the log can later grow to them there.
    ///
    /// # Errors
    /// `NoSpace`, `Io`.
    pub fn reserve(&self, len_bytes: u64) -> Result<(), MediaError> {
        let reserved = allocate_file(self.backing.file(), 0, len_bytes);
        reserved.map_err(|e| MediaError::from_io(&self.name, "allocate", 0, len_bytes, &e))
    }

    /// Opens both files of a log of this boot.
    ///
    /// # Errors
    /// `Setup`; `Unfit` if the live file is longer than its backing.
    pub fn open(live: &Path, backing: &Path, max_bytes: u64) -> Result<Self, MediaError> {
        let name = DeviceName::from(backing);
        let disk = DirectFile::open(backing, false).map_err(|e| MediaError::setup(&name, "open it", &e))?;
        Self::new(
            name,
            MappedRegion::open(live, Backing::Shm, max_bytes, true)?,
            disk,
        )
    }

    /// Makes a new live file from the backing one, after a reboot or when the live file was lost.
    ///
    /// # Errors
    /// `Setup` (also if there is a live file), `NoSpace`, `Io` on reading; no live file is left then.
    pub fn restore(live: &Path, backing: &Path, max_bytes: u64) -> Result<Self, MediaError> {
        let name = DeviceName::from(backing);
        let disk = DirectFile::open(backing, false).map_err(|e| MediaError::setup(&name, "open it", &e))?;
        let meta = disk
            .file()
            .metadata()
            .map_err(|e| MediaError::setup(&name, "stat it", &e))?;
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: meta.len(),
            max_bytes,
            sparse: false,
        };
        let region = MappedRegion::create(live, options)?;
        let copied = copy_back(&name, &disk, &region).and_then(|()| Self::new(name, region, disk));
        copied.inspect_err(|_| {
            // Best effort, as in `create`: half a copy must not look like a live log.
            let _ = std::fs::remove_file(live);
        })
    }

    /// Builds a client's log from the two descriptors received from the daemon.
    ///
    /// # Errors
    /// `Setup`, `Unfit`.
    pub fn from_fds(
        live: OwnedFd,
        backing: OwnedFd,
        name: DeviceName,
        max_bytes: u64,
    ) -> Result<Self, MediaError> {
        let disk =
            DirectFile::from_file(File::from(backing)).map_err(|e| MediaError::setup(&name, "use it", &e))?;
        let live = MappedRegion::from_file(File::from(live), name.clone(), Backing::Shm, max_bytes, true)?;
        // A client that shortens its own log harms only itself, and the signal handlers belong to its
        // program.
        let log = Self::new(name, live.retirable(), disk)?;
        Ok(Self {
            distrusts: false,
            ..log
        })
    }

    fn new(name: DeviceName, live: MappedRegion, backing: DirectFile) -> Result<Self, MediaError> {
        let disk_len = backing
            .file()
            .metadata()
            .map_err(|e| MediaError::setup(&name, "stat it", &e))?
            .len();
        let unfit = |what| {
            Err(MediaError::Unfit {
                device: name.clone(),
                what,
            })
        };
        if live.len_bytes() > disk_len {
            return unfit("the backing file of the log is shorter than its live file");
        }
        if !live.len_bytes().is_multiple_of(DEVICE_BLOCK_BYTES) {
            return unfit("the live file of the log is not whole blocks");
        }
        let stripes = live.max_bytes().div_ceil(STRIPE_BYTES);
        let written = (0..stripes.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let (syncing, latch, growing) = (RangeLock::default(), Latch::default(), Mutex::new(()));
        Ok(Self {
            name,
            live,
            backing,
            syncing,
            written,
            latch,
            growing,
            distrusts: true,
            retired: AtomicBool::new(false),
        })
    }

    /// The live file, to pass to a client.
    pub const fn live_file(&self) -> &File {
        self.live.file()
    }

    /// The backing file, to pass to a client. Its flags (`O_DIRECT`) travel with the descriptor.
    pub const fn backing_file(&self) -> &File {
        self.backing.file()
    }

    /// Adopts the length that the daemon gave to both files.
    ///
    /// # Errors
    /// `Io`.
    pub fn refresh_len(&self) -> Result<u64, MediaError> {
        self.live.refresh_len()
    }

    /// Returns the range to write for a sync of `off..off + len`: whole blocks, and for less than a stripe,
    /// whole stripes where one is written for the first time.
    fn widen(&self, off: u64, len: u64, limit: u64) -> Range<u64> {
        let mut range =
            off / DEVICE_BLOCK_BYTES * DEVICE_BLOCK_BYTES..(off + len).next_multiple_of(DEVICE_BLOCK_BYTES);
        if len >= STRIPE_BYTES {
            return range;
        }
        if self.is_new_stripe(range.start / STRIPE_BYTES) {
            range.start = range.start / STRIPE_BYTES * STRIPE_BYTES;
        }
        if self.is_new_stripe((range.end - 1) / STRIPE_BYTES) {
            range.end = range.end.next_multiple_of(STRIPE_BYTES);
        }
        range.start..range.end.min(limit)
    }

    fn is_new_stripe(&self, stripe: u64) -> bool {
        let word = self.written.get((stripe / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) >> (stripe % 64) & 1 == 0)
    }

    fn note_stripes(&self, range: &Range<u64>) {
        for stripe in range.start.div_ceil(STRIPE_BYTES)..range.end / STRIPE_BYTES {
            if let Some(word) = self.written.get((stripe / 64) as usize) {
                word.fetch_or(1 << (stripe % 64), Ordering::Relaxed);
            }
        }
    }

    /// Returns the ranges to write for a sync of `ranges`: ascending, none overlapping or adjacent.
    fn to_write(&self, ranges: &[(u64, u64)], limit: u64) -> Vec<Range<u64>> {
        let widened = ranges.iter().filter(|(_, len)| *len > 0);
        let mut wide: Vec<_> = widened.map(|(off, len)| self.widen(*off, *len, limit)).collect();
        wide.sort_unstable_by_key(|range| range.start);
        wide.dedup_by(|next, before| {
            let joined = next.start <= before.end;
            if joined {
                before.end = before.end.max(next.end);
            }
            joined
        });
        wide
    }

    /// Copies blocks from the live mapping to the backing file, durably: in one write that waits for the
    /// device, or in several followed by one wait.
    fn write_back(&self, ranges: &[Range<u64>]) -> Result<(), MediaError> {
        if let [range] = ranges
            && range.end - range.start <= DirectFile::bounce().buf_bytes() as u64
        {
            return DirectFile::bounce().with(|buf| {
                let blocks = &mut buf.bytes_mut()[..(range.end - range.start) as usize];
                self.copy_live(range.start, blocks)?;
                let done = self.backing.write_durable(range.start, blocks);
                self.io("durable write", range, done)
            });
        }
        let mut waiting = ranges.iter().cloned();
        let mut next = waiting.next();
        while next.is_some() {
            DirectFile::bounce()
                .with(|buf| self.write_bufferful(buf.bytes_mut(), &mut next, &mut waiting))?;
        }
        let whole = ranges.first().map_or(0, |r| r.start)..ranges.last().map_or(0, |r| r.end);
        self.io("fdatasync", &whole, self.backing.sync())
    }

    /// Copies as many of the ranges as fit into the buffer, and writes them at once. Removes the copied
    /// ranges from `next` and `waiting`.
    fn write_bufferful(
        &self,
        mut buf: &mut [u8],
        next: &mut Option<Range<u64>>,
        waiting: &mut impl Iterator<Item = Range<u64>>,
    ) -> Result<(), MediaError> {
        let mut parts: Vec<(u64, &[u8])> = Vec::new();
        while let Some(range) = next.take_if(|_| !buf.is_empty()) {
            let n = (range.end - range.start).min(buf.len() as u64);
            let (blocks, rest) = buf.split_at_mut(n as usize);
            self.copy_live(range.start, blocks)?;
            parts.push((range.start, blocks));
            buf = rest;
            *next = Some(range.start + n..range.end)
                .filter(|left| !left.is_empty())
                .or_else(|| waiting.next());
        }
        let whole = parts.first().map_or(0, |(off, _)| *off)
            ..parts.last().map_or(0, |(off, blocks)| off + blocks.len() as u64);
        self.io("write", &whole, self.backing.write_parts(&parts))
    }

    /// Copies whole blocks of the live file, unless its memory was given back.
    fn copy_live(&self, off: u64, blocks: &mut [u8]) -> Result<(), MediaError> {
        if self.distrusts {
            self.live.read_shared(off, blocks)?;
        } else {
            self.live.read(off, blocks)?;
        }
        // Checked after the copy: a copy made before the memory was given back is good.
        if self.retired.load(Ordering::SeqCst) {
            return Err(MediaError::ReadOnly {
                device: self.name.clone(),
            });
        }
        Ok(())
    }

    fn io<T>(&self, op: &'static str, range: &Range<u64>, done: io::Result<T>) -> Result<T, MediaError> {
        done.map_err(|e| MediaError::from_io(&self.name, op, range.start, range.end - range.start, &e))
    }
}

/// Fills a fresh live region from the backing file.
fn copy_back(name: &DeviceName, disk: &DirectFile, live: &MappedRegion) -> Result<(), MediaError> {
    let mut at = 0;
    let mut buf = vec![0u8; 1 << 20];
    while at < live.len_bytes() {
        let n = (live.len_bytes() - at).min(buf.len() as u64);
        let part = &mut buf[..n as usize];
        disk.read(at, part)
            .map_err(|e| MediaError::from_io(name, "read", at, n, &e))?;
        live.write(at, part)?;
        at += n;
    }
    live.fence()
}

impl Region for LiveLog {
    fn len_bytes(&self) -> u64 {
        self.live.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.live.read(off, out)
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.live.read_shared(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.live.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.live.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.live.fence()
    }

    fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
        self.live.retire();
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.sync_all(&[(off, len)])
    }

    fn sync_all(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        let limit = self.len_bytes();
        for (off, len) in ranges {
            check_range(&self.name, *off, *len, limit)?;
        }
        self.live.fence()?;
        self.latch.check(&self.name)?;
        let ranges = self.to_write(ranges, limit);
        if ranges.is_empty() {
            return Ok(());
        }
        let done = self.syncing.with(&ranges, || self.write_back(&ranges));
        done.map_err(|error| self.latch.note(error))?;
        ranges.iter().for_each(|range| self.note_stripes(range));
        Ok(())
    }

    fn prepare(&self, off: u64, len: u64) -> Result<(), MediaError> {
        let stripes = off / STRIPE_BYTES..(off + len).min(self.len_bytes()).div_ceil(STRIPE_BYTES);
        let fresh: Vec<_> = stripes
            .filter(|stripe| self.is_new_stripe(*stripe))
            .map(|stripe| (stripe * STRIPE_BYTES, 1))
            .collect();
        // As a sync would: writes the live bytes unchanged.
        self.sync_all(&fresh)
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        let _one_at_a_time = self.growing.lock();
        let (old, new) = (self.len_bytes(), new_len.next_multiple_of(DEVICE_BLOCK_BYTES));
        if new <= old {
            return Ok(());
        }
        if new > self.live.max_bytes() {
            let (device, max_bytes) = (self.name.clone(), self.live.max_bytes());
            return Err(MediaError::TooLong {
                device,
                wanted_bytes: new,
                max_bytes,
            });
        }
        let allocated = allocate_file(self.backing.file(), old, new - old);
        allocated.map_err(|e| MediaError::from_io(&self.name, "allocate", old, new - old, &e))?;
        self.live.grow(new)?;
        // The daemon reads what was written. A client writes all of a log that it lets grow, but most processes
        // write little.
        if !self.distrusts {
            let most = if old == 0 { FIRST_POPULATED_BYTES } else { u64::MAX };
            self.live.populate(old, most.min(new - old));
        }
        Ok(())
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        // Both files have had all their space since they were made or grown.
        check_range(&self.name, off, len, self.len_bytes())
    }

    fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.live.as_ptr()
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn info(&self) -> DeviceInfo {
        let way = if self.backing.is_direct() {
            "O_DIRECT, synced with each write"
        } else {
            "buffered, fdatasync"
        };
        let backend = format!("live log {}, backing {way}", self.live.info().name);
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::LiveLog,
            backend,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::LiveLog;
    use crate::direct::JournalFile;
    use crate::{DeviceState, MediaError, Region};

    struct Dirs {
        live: tempfile::TempDir,
        disk: tempfile::TempDir,
    }

    /// The live file on tmpfs where there is one; the backing file in the directory for temporary files.
    fn dirs() -> Dirs {
        let shm = std::path::Path::new("/dev/shm");
        let live = if shm.is_dir() {
            tempfile::tempdir_in(shm)
        } else {
            tempfile::tempdir()
        };
        Dirs {
            live: live.unwrap(),
            disk: tempfile::tempdir().unwrap(),
        }
    }

    fn make(dirs: &Dirs, len: u64) -> LiveLog {
        LiveLog::create(
            &dirs.live.path().join("log"),
            &dirs.disk.path().join("log"),
            len,
            64 << 20,
        )
        .unwrap()
    }

    #[test]
    fn live_log_keeps_synced_ranges_when_the_live_file_is_lost() {
        let dirs = dirs();
        let log = make(&dirs, 2 << 20);
        let data: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        log.write(5000, &data).unwrap();
        log.write(1_000_000, b"not synced").unwrap();
        log.fence().unwrap();
        log.sync(5000, data.len() as u64).unwrap();
        drop(log);
        let live = dirs.live.path().join("log");
        std::fs::remove_file(&live).unwrap();
        let log = LiveLog::restore(&live, &dirs.disk.path().join("log"), 64 << 20).unwrap();
        let mut back = vec![0; data.len()];
        log.read(5000, &mut back).unwrap();
        assert!(back == data);
        let mut lost = [1; 10];
        log.read(1_000_000, &mut lost).unwrap();
        assert_eq!(lost, [0; 10]);
    }

    #[test]
    fn live_log_keeps_unsynced_writes_when_only_the_process_goes() {
        let dirs = dirs();
        let log = make(&dirs, 1 << 20);
        let crc = log.write_crc(4096, b"visible", 9).unwrap();
        log.fence().unwrap();
        drop(log);
        let log = LiveLog::open(
            &dirs.live.path().join("log"),
            &dirs.disk.path().join("log"),
            64 << 20,
        )
        .unwrap();
        let mut back = [0; 7];
        log.read(4096, &mut back).unwrap();
        assert_eq!(&back, b"visible");
        assert_eq!(crc, crc32c::crc32c_append(9, b"visible"));
    }

    #[test]
    fn live_log_grows_in_both_files_and_is_seen_by_a_client_with_the_descriptors() {
        let dirs = dirs();
        let log = make(&dirs, 2 << 20);
        let own = |file: &std::fs::File| file.as_fd().try_clone_to_owned().unwrap();
        let client = LiveLog::from_fds(
            own(log.live_file()),
            own(log.backing_file()),
            "client".into(),
            64 << 20,
        )
        .unwrap();
        assert!(matches!(
            client.write(3 << 20, b"x"),
            Err(MediaError::OutOfRange { .. })
        ));
        log.grow(4 << 20).unwrap();
        assert_eq!(client.refresh_len().unwrap(), 4 << 20);
        client.write(3 << 20, b"from the client").unwrap();
        client.sync(3 << 20, 15).unwrap();
        let mut seen = [0; 15];
        log.read(3 << 20, &mut seen).unwrap();
        assert_eq!(&seen, b"from the client");
        let backing = JournalFile::open(&dirs.disk.path().join("log")).unwrap();
        assert_eq!(backing.len_bytes(), 4 << 20);
        let mut durable = [0; 15];
        backing.read(3 << 20, &mut durable).unwrap();
        assert_eq!(&durable, b"from the client");
        assert!(matches!(log.grow(65 << 20), Err(MediaError::TooLong { .. })));
        assert_eq!(log.state(), DeviceState::Ok);
    }

    #[test]
    fn live_log_backing_holds_the_newest_bytes_when_syncs_of_one_block_race() {
        let dirs = dirs();
        let log = Arc::new(make(&dirs, 1 << 20));
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let log = log.clone();
                scope.spawn(move || {
                    for round in 0..40u64 {
                        // Four threads share each block, as four small entries would.
                        let off = (round % 4) * 4096 + thread * 1024;
                        log.write(off, &round.to_le_bytes()).unwrap();
                        log.fence().unwrap();
                        log.sync(off, 8).unwrap();
                    }
                });
            }
        });
        let backing = JournalFile::open(&dirs.disk.path().join("log")).unwrap();
        for block in 0..4u64 {
            for thread in 0..4u64 {
                let mut word = [0; 8];
                backing.read(block * 4096 + thread * 1024, &mut word).unwrap();
                assert_eq!(
                    u64::from_le_bytes(word),
                    36 + block,
                    "block {block}, thread {thread}"
                );
            }
        }
    }

    #[test]
    fn live_log_keeps_every_range_of_a_batch_when_they_are_many_and_large() {
        let dirs = dirs();
        let log = make(&dirs, 8 << 20);
        let data: Vec<u8> = (0..8 << 20).map(|i: u32| (i / 7 % 251) as u8).collect();
        log.write(0, &data).unwrap();
        // Overlapping, adjacent, in no order, empty; one is larger than any buffer, and forty are more than
        // the number in flight at a time.
        let mut ranges = vec![
            (5 << 20, (2 << 20) + 77),
            (9000, 5000),
            (4096, 4096),
            (8192, 0),
            (13_999, 2),
        ];
        ranges.extend((0..40).map(|i| ((1 << 20) + i * 70_001, 3000)));
        log.sync_all(&ranges).unwrap();
        let disk = std::fs::read(dirs.disk.path().join("log")).unwrap();
        for (off, len) in ranges {
            let range = off as usize..(off + len) as usize;
            assert!(disk[range.clone()] == data[range], "{len} bytes at {off}");
        }
        assert!(log.sync_all(&[(0, 1), ((8 << 20) - 1, 2)]).is_err());
    }

    #[test]
    fn live_log_keeps_what_was_synced_when_its_stripes_are_prepared_later() {
        let dirs = dirs();
        let log = make(&dirs, 2 << 20);
        log.write(300_000, b"before").unwrap();
        log.sync(300_000, 6).unwrap();
        log.write(700_000, b"not synced, and may be there").unwrap();
        log.prepare(0, 4 << 20).unwrap();
        assert!((0..8).all(|stripe| !log.is_new_stripe(stripe)));
        assert_eq!(log.widen(1_000_000, 10, 2 << 20), 999_424..1_003_520);
        log.write(1_000_000, b"after").unwrap();
        log.sync(1_000_000, 5).unwrap();
        let disk = std::fs::read(dirs.disk.path().join("log")).unwrap();
        assert_eq!(disk.len(), 2 << 20);
        assert_eq!(&disk[300_000..300_006], b"before");
        assert_eq!(&disk[1_000_000..1_000_005], b"after");
    }

    #[test]
    fn live_log_syncs_by_fdatasync_when_the_descriptor_is_not_direct() {
        let dirs = dirs();
        let log = make(&dirs, 1 << 20);
        let path = dirs.disk.path().join("log");
        let plain = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        let live = log.live_file().as_fd().try_clone_to_owned().unwrap();
        let client = LiveLog::from_fds(live, plain.into(), "buffered".into(), 1 << 20).unwrap();
        assert!(client.info().backend.contains("buffered"));
        client.write(9000, b"abc").unwrap();
        client.sync(9000, 3).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(&bytes[9000..9003], b"abc");
    }

    #[test]
    fn journal_file_reads_back_what_was_synced_when_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journal = JournalFile::create(&path, 4 << 20).unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|i| (i % 239) as u8).collect();
        journal.write(100, &data).unwrap();
        journal.write_crc(3_500_000, b"second run", 0).unwrap();
        let mut now = vec![0; data.len()];
        journal.read(100, &mut now).unwrap();
        assert!(now == data, "unsynced writes are visible");
        journal.sync(0, 4 << 20).unwrap();
        journal.write(3_500_010, b" and more").unwrap();
        journal.sync(3_500_010, 9).unwrap();
        journal.write(0, b"never synced").unwrap();
        drop(journal);
        let journal = JournalFile::open(&path).unwrap();
        let mut back = vec![0; data.len()];
        journal.read(100, &mut back).unwrap();
        assert!(back == data);
        let mut tail = [0; 19];
        journal.read(3_500_000, &mut tail).unwrap();
        assert_eq!(&tail, b"second run and more");
        let mut head = [1; 12];
        journal.read(0, &mut head).unwrap();
        assert_eq!(head, [0; 12]);
        assert!(matches!(
            journal.write(4 << 20, b"x"),
            Err(MediaError::OutOfRange { .. })
        ));
    }
}
