//! A region that is one mapped file: tmpfs (`shm`), any disk (`file`), or persistent memory (`dax`). On a
//! disk it is read through the mapping and written by system calls.
//!
//! Sparse regions hand out space by [`Region::allocate`]; storing to a range that was not allocated may raise
//! SIGBUS when the host is full, as with every mapped file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;

use crate::lock::Mutex;

use crate::dax;
use crate::error::{DeviceName, MediaError, check_range};
use crate::host::allocate_file;
use crate::latch::Latch;
use crate::pmem::persist::Persist;
use crate::pmem::persist::crc32c_append;
use crate::pmem::{DaxPart, MapOptions, Mapping};
use crate::sys::begin_write_out;
use crate::traits::{DeviceInfo, DeviceState, MediumKind, Region};

/// Least bytes of a write that starts the write-out at once: so large a write is data that will not change
/// soon, and the disk works on it while the rest of a batch is assembled.
const LARGE_BYTES: u64 = 256 << 10;

/// The kind of file system under a mapped file, which decides the effect of its fence and sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// tmpfs: nothing survives a power cut, so `sync` only fences.
    Shm,
    /// Any file system: `sync` is `fdatasync`.
    File,
    /// Persistent memory, mapped `MAP_SYNC`: a fence is enough for everything.
    Dax,
}

/// How to make or open a mapped region.
#[derive(Debug, Clone, Copy)]
pub struct MappedOptions {
    /// Kind of file system under the file.
    pub backing: Backing,
    /// Length in bytes of a new region. Ignored when an existing one is opened.
    pub len_bytes: u64,
    /// Address space to reserve: the region can grow to this, in bytes.
    pub max_bytes: u64,
    /// A new region is a sparse file; its user calls `allocate` before handing ranges out. Otherwise all
    /// space is allocated at once.
    pub sparse: bool,
}

/// A mapped file.
pub struct MappedRegion {
    name: DeviceName,
    file: File,
    map: Mapping,
    backing: Backing,
    latch: Latch,
    growing: Mutex<()>,
    /// Only its holder uses this mapping, so that it may be given back early.
    retirable: bool,
    /// A part of a device, which has a fixed length and no space to allocate.
    is_device: bool,
}

impl MappedRegion {
    /// Makes the file (mode 0600) and maps it. Both the name and the contents are durable once the directory
    /// and the region were synced.
    ///
    /// # Errors
    /// `Setup` (exists already, no permission, not DAX), `NoSpace`; the file is removed again then.
    pub fn create(path: &Path, options: MappedOptions) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path);
        let file = file.map_err(|e| MediaError::setup(&name, "create it", &e))?;
        let made = if options.sparse {
            file.set_len(options.len_bytes)
        } else {
            allocate_file(&file, 0, options.len_bytes)
        };
        made.map_err(|e| MediaError::setup(&name, "allocate it", &e))
            .and_then(|()| Self::from_file(file, name, options.backing, options.max_bytes, true))
            .inspect_err(|_| {
                // Best effort: the caller gets the first error, a leftover file would only say "exists".
                let _ = std::fs::remove_file(path);
            })
    }

    /// Maps an existing file, with room to grow to `max_bytes`.
    ///
    /// # Errors
    /// `Setup`.
    pub fn open(path: &Path, backing: Backing, max_bytes: u64, writable: bool) -> Result<Self, MediaError> {
        let name = DeviceName::from(path);
        let file = OpenOptions::new().read(true).write(writable).open(path);
        let file = file.map_err(|e| MediaError::setup(&name, "open it", &e))?;
        Self::from_file(file, name, backing, max_bytes, writable)
    }

    /// Maps an open file, such as a descriptor received from the daemon.
    ///
    /// # Errors
    /// `Setup`.
    pub fn from_file(
        file: File,
        name: DeviceName,
        backing: Backing,
        max_bytes: u64,
        writable: bool,
    ) -> Result<Self, MediaError> {
        let len_bytes = file
            .metadata()
            .map_err(|e| MediaError::setup(&name, "stat it", &e))?
            .len();
        let options = MapOptions {
            len_bytes,
            max_bytes,
            writable,
            dax: (backing == Backing::Dax).then_some(DaxPart::FILE),
        };
        let map = Mapping::new(&name, &file, options);
        let map = map.map_err(|error| match backing {
            Backing::Dax => dax::refused_map(error, &file),
            _ => error,
        })?;
        let region = Self::with(file, name, map, backing);
        if backing == Backing::Dax && writable {
            for (off, len) in dax::bad_parts(&dax::KernelDirs::default(), &region.file) {
                region.map.note_bad(off, len);
            }
        }
        Ok(region)
    }

    /// Maps a part of a device of persistent memory: `len_bytes` from `part.off` on, which may grow to
    /// `max_bytes`.
    ///
    /// # Errors
    /// `Setup`.
    pub fn of_device(
        file: File,
        name: DeviceName,
        part: DaxPart,
        len_bytes: u64,
        max_bytes: u64,
        writable: bool,
    ) -> Result<Self, MediaError> {
        let options = MapOptions {
            len_bytes,
            max_bytes,
            writable,
            dax: Some(part),
        };
        let map = Mapping::new(&name, &file, options)?;
        let mut region = Self::with(file, name, map, Backing::Dax);
        region.is_device = true;
        if writable {
            let end = part.off + region.map.reserved_bytes();
            for (off, len) in dax::bad_parts(&dax::KernelDirs::default(), &region.file) {
                let (from, to) = (off.max(part.off), (off + len).min(end));
                if from < to {
                    region.map.note_bad(from - part.off, to - from);
                }
            }
        }
        Ok(region)
    }

    fn with(file: File, name: DeviceName, map: Mapping, backing: Backing) -> Self {
        Self {
            name,
            file,
            map,
            backing,
            latch: Latch::default(),
            growing: Mutex::new(()),
            retirable: false,
            is_device: false,
        }
    }

    /// Allows [`Region::retire`] to give the mapping back. Not for a mapping that the daemon also reads
    /// through.
    #[must_use]
    pub fn retirable(mut self) -> Self {
        self.retirable = true;
        self
    }

    /// The file under the mapping, to pass to another process.
    pub const fn file(&self) -> &File {
        &self.file
    }

    /// Most bytes that it can grow to.
    pub const fn max_bytes(&self) -> u64 {
        self.map.reserved_bytes()
    }

    /// Writes to the page cache that the mapping shows. A store to the mapping would fault, and a fault fills
    /// as large a piece of the cache as the file system prefers (up to 2 MiB), all of which the next sync
    /// then writes.
    fn write_by_call(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.map.check_write(off, src.len())?;
        self.latch.check(&self.name)?;
        let len = src.len() as u64;
        let written = self.file.write_all_at(src, off);
        written.map_err(|e| {
            self.latch
                .note(MediaError::from_io(&self.name, "write", off, len, &e))
        })?;
        if len >= LARGE_BYTES {
            begin_write_out(&self.file, off, len);
        }
        Ok(())
    }

    /// Adopts the length that another process gave to the file. Never shrinks.
    ///
    /// # Errors
    /// `Io`.
    pub fn refresh_len(&self) -> Result<u64, MediaError> {
        if self.is_device {
            return Ok(self.len_bytes());
        }
        let meta = self
            .file
            .metadata()
            .map_err(|e| MediaError::from_io(&self.name, "stat", 0, 0, &e))?;
        self.map.extend_to(meta.len().min(self.map.reserved_bytes()));
        Ok(self.map.len_bytes())
    }
}

impl Region for MappedRegion {
    fn len_bytes(&self) -> u64 {
        self.map.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.map.read(off, out)
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        if !self.map.read_guarded(off, out)? && !self.is_device {
            read_what_is_there(&self.file, off, out);
        }
        Ok(())
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        if self.is_written_by_calls() {
            return self.write_by_call(off, src);
        }
        self.map.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        if self.is_written_by_calls() {
            // Copied once, so that the checksum covers the stored bytes.
            let copy = src.to_vec();
            self.write_by_call(off, &copy)?;
            return Ok(crc32c_append(seed, &copy));
        }
        self.map.write_crc(off, src, seed)
    }

    fn is_written_by_calls(&self) -> bool {
        self.backing == Backing::File
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.map.fence();
        Ok(())
    }

    fn retire(&self) {
        if self.retirable {
            self.map.retire();
        }
    }

    fn residency(&self, off: u64, pages: &mut [u8]) -> bool {
        self.backing != Backing::Dax && self.map.residency(off, pages)
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        self.map.fence();
        match self.backing {
            Backing::Shm | Backing::Dax => Ok(()),
            Backing::File => {
                self.latch.check(&self.name)?;
                let synced = self.file.sync_data();
                synced.map_err(|e| {
                    self.latch
                        .note(MediaError::from_io(&self.name, "fdatasync", off, len, &e))
                })
            }
        }
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        let _one_at_a_time = self.growing.lock();
        let old_len = self.len_bytes();
        if new_len <= old_len {
            return Ok(());
        }
        let max_bytes = self.map.reserved_bytes();
        if new_len > max_bytes {
            return Err(MediaError::TooLong {
                device: self.name.clone(),
                wanted_bytes: new_len,
                max_bytes,
            });
        }
        self.allocate_host(old_len, new_len - old_len)?;
        self.map.extend_to(new_len);
        Ok(())
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        check_range(&self.name, off, len, self.len_bytes())?;
        self.allocate_host(off, len)
    }

    fn populate(&self, off: u64, len: u64) {
        self.map.populate(off, len);
    }

    fn as_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.map.as_ptr())
    }

    fn state(&self) -> DeviceState {
        self.latch.state()
    }

    fn info(&self) -> DeviceInfo {
        let (kind, backend) = match self.backing {
            Backing::Shm => (MediumKind::Shm, "shm: memory only, lost at a power cut"),
            Backing::File => (
                MediumKind::File,
                "file: read by its mapping, written by pwrite, fdatasync",
            ),
            Backing::Dax => (MediumKind::Dax, "dax: persistent memory, MAP_SYNC"),
        };
        let way = match self.backing {
            Backing::Dax => format!(", {}", Persist::write_back_name()),
            Backing::Shm | Backing::File => String::new(),
        };
        DeviceInfo {
            name: self.name.clone(),
            kind,
            backend: format!("{backend}{way}"),
        }
    }
}

/// Reads by system calls; zeros past the end of the file and where a read fails.
fn read_what_is_there(file: &File, off: u64, out: &mut [u8]) {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], off + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            // Any error is caused by the process that shares the file, and harms only that process.
            Err(_) => break,
        }
    }
    out[done..].fill(0);
}

impl MappedRegion {
    fn allocate_host(&self, off: u64, len: u64) -> Result<(), MediaError> {
        if self.is_device {
            return Ok(());
        }
        let done = allocate_file(&self.file, off, len);
        done.map_err(|e| MediaError::from_io(&self.name, "allocate", off, len, &e))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use super::{Backing, MappedOptions, MappedRegion};
    use crate::host::host_capacity;
    use crate::{DeviceState, MediaError, Region, crc32c_append};

    fn options(backing: Backing, len_bytes: u64, sparse: bool) -> MappedOptions {
        MappedOptions {
            backing,
            len_bytes,
            max_bytes: 8 << 20,
            sparse,
        }
    }

    #[test]
    fn mapped_file_takes_space_for_what_is_written_and_shows_it() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let options = MappedOptions {
            backing: Backing::File,
            len_bytes: 16 << 20,
            max_bytes: 16 << 20,
            sparse: true,
        };
        let region = MappedRegion::create(&dir.path().join("sparse"), options).unwrap();
        for at in [3 << 20, 9 << 20] {
            region.write(at, &[7; 4096]).unwrap();
            assert_eq!(
                region.write_crc(at + 4096, b"word", 5).unwrap(),
                crc32c_append(5, b"word")
            );
        }
        region.sync(0, 16 << 20).unwrap();
        let mut seen = [0; 4100];
        region.read(9 << 20, &mut seen).unwrap();
        assert!(seen[..4096] == [7; 4096] && seen[4096..] == *b"word");
        // A store to the mapping would allocate, and then write, up to 2 MiB for each.
        let taken = region.file().metadata().unwrap().blocks() * 512;
        assert!(taken <= 512 << 10, "{taken} bytes for four blocks");
        assert!(matches!(
            region.write(16 << 20, b"x"),
            Err(MediaError::OutOfRange { .. })
        ));
    }

    #[test]
    fn file_without_dax_is_refused_with_the_commands_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        if crate::dax::is_dax_dir(dir.path()) {
            eprintln!("SKIPPED: the directory for temporary files is on persistent memory");
            return;
        }
        let path = dir.path().join("nvm.img");
        let error = MappedRegion::create(&path, options(Backing::Dax, 1 << 20, false));
        let text = error.err().unwrap().to_string();
        assert!(
            text.contains("ndctl create-namespace") && text.contains("mount -o dax"),
            "{text}"
        );
        assert!(!path.exists());
    }

    #[test]
    fn file_region_keeps_what_was_synced_when_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nvm.img");
        let region = MappedRegion::create(&path, options(Backing::File, 1 << 20, true)).unwrap();
        region.allocate(4096, 8192).unwrap();
        let crc = region.write_crc(5001, &[7; 5000], 1).unwrap();
        assert_eq!(crc, crc32c::crc32c_append(1, &[7; 5000]));
        region.sync(0, 1 << 20).unwrap();
        drop(region);
        let region = MappedRegion::open(&path, Backing::File, 8 << 20, false).unwrap();
        let mut back = [0; 5000];
        region.read(5001, &mut back).unwrap();
        assert_eq!(back, [7; 5000]);
        assert!(matches!(region.write(0, b"x"), Err(MediaError::ReadOnly { .. })));
        assert_eq!(region.state(), DeviceState::Ok);
    }

    #[test]
    fn retired_region_takes_stores_and_leaves_the_file_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let daemons = MappedRegion::create(&path, options(Backing::Shm, 8192, false)).unwrap();
        daemons.write(0, b"before").unwrap();
        daemons.retire();
        let clients = MappedRegion::open(&path, Backing::Shm, 8 << 20, true)
            .unwrap()
            .retirable();
        clients.retire();
        clients.write(0, b"later!").unwrap();
        let mut back = [0; 6];
        daemons.read(0, &mut back).unwrap();
        assert_eq!(&back, b"before");
    }

    #[test]
    fn shared_read_of_what_another_process_cut_off_is_zeros() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let region = MappedRegion::create(&path, options(Backing::Shm, 64 << 10, false)).unwrap();
        region.write(0, &[7; 64 << 10]).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_len(10_000).unwrap();
        // Through the mapping and by system calls.
        let mut by_call = vec![9; 64 << 10];
        super::read_what_is_there(&region.file, 100, &mut by_call[100..]);
        for off in [0, 1, 4095, 8192, 9_999, 10_000, 12_288, 40_000] {
            for len in [1, 64, 5_000, 20_000] {
                let mut out = vec![9; len];
                region.read_shared(off as u64, &mut out).unwrap();
                for (at, byte) in out.iter().enumerate() {
                    assert_eq!(*byte, if off + at < 10_000 { 7 } else { 0 }, "{off} + {at}");
                }
                let same = off < 100 || out[..] == by_call[off..off + len];
                assert!(same);
            }
        }
        assert!(region.read_shared(64 << 10, &mut [0]).is_err());
        // It grows again.
        file.write_all_at(&[5; 100], 60_000).unwrap();
        let mut out = [9; 100];
        region.read_shared(60_000, &mut out).unwrap();
        assert_eq!(out, [5; 100]);
    }

    #[test]
    fn shared_reads_race_with_a_file_that_is_cut_off_and_grows() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r");
        let region = MappedRegion::create(&path, options(Backing::Shm, 1 << 20, false)).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for len in (0..2000_u64).map(|n| n * 7919 % (1 << 20)) {
                    file.set_len(len).unwrap();
                }
                over.store(true, std::sync::atomic::Ordering::Relaxed);
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut out = vec![9; 100_000];
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        region.read_shared(900_000, &mut out).unwrap();
                        assert!(out.iter().all(|byte| *byte == 0));
                    }
                });
            }
        });
    }

    #[test]
    fn region_refuses_ranges_past_its_end_and_lengths_past_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let region = MappedRegion::create(&dir.path().join("r"), options(Backing::Shm, 8192, false)).unwrap();
        assert!(matches!(
            region.write(8190, b"abc"),
            Err(MediaError::OutOfRange { .. })
        ));
        assert!(matches!(
            region.read(u64::MAX, &mut [0]),
            Err(MediaError::OutOfRange { .. })
        ));
        assert!(matches!(region.grow(9 << 20), Err(MediaError::TooLong { .. })));
        region.grow(1 << 20).unwrap();
        region.grow(4096).unwrap();
        assert_eq!(region.len_bytes(), 1 << 20);
        region.write((1 << 20) - 3, b"abc").unwrap();
        assert!(MappedRegion::create(&dir.path().join("r"), options(Backing::Shm, 1, false)).is_err());
    }

    #[test]
    fn region_reports_no_space_and_stays_as_it_was_when_the_host_is_too_small() {
        let shm = Path::new("/dev/shm");
        let total_bytes = host_capacity(shm).map_or(0, |space| space.total_bytes);
        if total_bytes == 0 || total_bytes > 1 << 44 {
            eprintln!("SKIP: needs a tmpfs of limited size at /dev/shm");
            return;
        }
        let dir = tempfile::tempdir_in(shm).unwrap();
        let path = dir.path().join("r");
        let options = MappedOptions {
            backing: Backing::Shm,
            len_bytes: 4096,
            max_bytes: 4 * total_bytes,
            sparse: false,
        };
        let region = MappedRegion::create(&path, options).unwrap();
        assert!(region.grow(2 * total_bytes).unwrap_err().is_no_space());
        assert_eq!(region.len_bytes(), 4096);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
        region.grow(8192).unwrap();
        let too_big = MappedOptions {
            len_bytes: 2 * total_bytes,
            ..options
        };
        let other = dir.path().join("other");
        assert!(MappedRegion::create(&other, too_big).is_err_and(|error| error.is_no_space()));
        assert!(!other.exists(), "nothing is left behind");
    }
}
