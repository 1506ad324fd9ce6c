//! The file of copies, its maps, and the kernel's notices of loads that find no page there (`userfaultfd`).
//! Knows no open files of the program.
//!
//! A map is private and read-only. A load of a page that is not in the file at that moment, or is in the file
//! but was never shown at that address, is a fault that waits for [`Faults::show`]. Showing a page is one
//! system call, which fails if the page is not in the file. Removing pages from the file removes them from
//! all maps.

use super::kernel;
use super::reentry::{self, KernelFd};
use crate::Errno;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a huge page.
pub const HUGE: u64 = 2 << 20;
/// Initial length of the file in bytes: large enough that no offset is used twice in a process' life.
const LEN: u64 = 1 << 61;
/// Greatest length of the file in bytes. Offsets between the two lengths exist only once the file is
/// extended.
const LEN_MAX: u64 = 1 << 62;
/// Type of a tmpfs in `statfs`.
const TMPFS: i64 = 0x0102_1994;

const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_WAKE: usize = 0x8010_aa02;
const UFFDIO_COPY: usize = 0xc028_aa03;
const UFFDIO_CONTINUE: usize = 0xc020_aa07;
/// The ioctl of `/dev/userfaultfd` that makes a userfaultfd.
const NEW: usize = 0xaa00;
const API: u64 = 0xaa;
/// Fault kinds: tmpfs pages that do not exist, and pages that exist and were not shown.
const FEATURES: u64 = 1 << 5 | 1 << 10;
const MODE_MISSING: u64 = 1;
const MODE_MINOR: u64 = 4;
const EVENT_PAGEFAULT: u8 = 0x12;
/// Bytes of a message, and offset of the address in a fault message.
const MESSAGE: usize = 32;
const ADDRESS_AT: usize = 16;

const fn nr(number: libc::c_long) -> usize {
    number as usize
}

fn result(value: isize) -> Result<usize, Errno> {
    usize::try_from(value).map_err(|_| Errno(-value as i32))
}

fn ioctl<T>(fd: i32, request: usize, value: &mut T) -> Result<usize, Errno> {
    let a = [fd as usize, request, (&raw mut *value) as usize, 0, 0, 0];
    // SAFETY: the requests of this module take records of the sizes encoded in their numbers, which `T` has
    // (asserted below), and change only what the caller requests.
    result(unsafe { kernel::call(nr(libc::SYS_ioctl), a) })
}

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct Continue {
    start: u64,
    len: u64,
    mode: u64,
    mapped: i64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

const _: () = assert!(size_of::<Api>() == 24 && size_of::<Register>() == 32 && size_of::<Continue>() == 32);
const _: () = assert!(size_of::<Copy>() == 40);

/// The userfaultfd, by which the kernel reports waiting loads to this process.
#[derive(Debug)]
pub struct Faults {
    fd: KernelFd,
}

impl Faults {
    /// Opens a userfaultfd for faults of the program and of the kernel on its behalf.
    ///
    /// # Errors
    /// EPERM if the process has no right to it (`vm.unprivileged_userfaultfd`, `/dev/userfaultfd`); ENOSYS,
    /// EINVAL for a kernel before 5.14.
    pub fn open() -> Result<Self, Errno> {
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as usize;
        // SAFETY: takes flags.
        let direct = unsafe { kernel::call(nr(libc::SYS_userfaultfd), [flags, 0, 0, 0, 0, 0]) };
        let fd = if direct >= 0 {
            direct
        } else {
            let device = kernel::open(b"/dev/userfaultfd\0", libc::O_RDWR | libc::O_CLOEXEC, 0);
            if device < 0 {
                return Err(Errno(-direct as i32));
            }
            // SAFETY: takes flags.
            let fd = unsafe { kernel::call(nr(libc::SYS_ioctl), [device as usize, NEW, flags, 0, 0, 0]) };
            kernel::close(device as i32);
            fd
        };
        let fd = KernelFd(reentry::adopt(result(fd)? as i32));
        let mut api = Api {
            api: API,
            features: FEATURES,
            ioctls: 0,
        };
        ioctl(fd.0, UFFDIO_API, &mut api)?;
        Ok(Self { fd })
    }

    fn register(&self, at: Range<usize>, mode: u64) -> Result<(), Errno> {
        let mut register = Register {
            start: at.start as u64,
            len: at.len() as u64,
            mode,
            ioctls: 0,
        };
        ioctl(self.fd.0, UFFDIO_REGISTER, &mut register).map(drop)
    }

    /// Stores pages in the holes of a file that is mapped at `at` (registered): each gets a page of its own,
    /// which the kernel does not clear first.
    ///
    /// # Errors
    /// EEXIST: a page is there already, and those before it have been stored. ENOMEM: there is no room.
    fn put(&self, at: usize, pages: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < pages.len() {
            let rest = &pages[done..];
            let mut request = Copy {
                to: (at + done) as u64,
                from: rest.as_ptr() as u64,
                len: rest.len() as u64,
                mode: 0,
                copied: 0,
            };
            let result = ioctl(self.fd.0, UFFDIO_COPY, &mut request);
            done += usize::try_from(request.copied).unwrap_or(0);
            match result {
                Ok(_) => {}
                Err(Errno(libc::EAGAIN)) if request.copied > 0 => {}
                Err(Errno(libc::EAGAIN)) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Shows the pages of a range, from its start up to the first one that is not in the file, and wakes the
    /// threads that wait for them.
    ///
    /// # Errors
    /// EFAULT: a page is not there. Others: the range is no longer, or not only, a map of this file.
    pub fn show(&self, at: Range<usize>) -> Result<(), Errno> {
        let mut start = at.start;
        while start < at.end {
            let mut request = Continue {
                start: start as u64,
                len: (at.end - start) as u64,
                mode: 0,
                mapped: 0,
            };
            let done = ioctl(self.fd.0, UFFDIO_CONTINUE, &mut request);
            start += usize::try_from(request.mapped).unwrap_or(0);
            match done {
                Ok(_) => {}
                // It was shown before.
                Err(Errno(libc::EEXIST)) => start += PAGE,
                Err(Errno(libc::EAGAIN)) if request.mapped > 0 => {}
                Err(Errno(libc::EAGAIN)) => std::thread::yield_now(),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Wakes the threads that wait for pages of a range; they repeat the load.
    pub fn wake(&self, at: Range<usize>) {
        let mut range = [at.start as u64, at.len() as u64];
        let _ = ioctl(self.fd.0, UFFDIO_WAKE, &mut range);
    }

    /// Returns the address of the next load that waits; `None` if there is none for `patience`, or another
    /// thread has received it.
    #[must_use]
    pub fn next(&self, patience: Option<Duration>) -> Option<usize> {
        let mut asked = libc::pollfd {
            fd: self.fd.0,
            events: libc::POLLIN,
            revents: 0,
        };
        let patience = patience.map_or(-1, |time| time.as_millis() as isize) as usize;
        // SAFETY: one entry, ours.
        unsafe {
            kernel::call(
                nr(libc::SYS_poll),
                [(&raw mut asked) as usize, 1, patience, 0, 0, 0],
            )
        };
        let mut message = [0; MESSAGE];
        let got = kernel::read(self.fd.0, &mut message);
        if got != MESSAGE as isize || message[0] != EVENT_PAGEFAULT {
            return None;
        }
        let address = message[ADDRESS_AT..]
            .first_chunk()
            .copied()
            .map(usize::from_ne_bytes)?;
        Some(address & !(PAGE - 1))
    }
}

/// The file of copies.
#[derive(Debug)]
pub struct CopyFile {
    fd: KernelFd,
    len: AtomicU64,
    /// Lowest offset beyond the end that [`map_nothing`](Self::map_nothing) has not used.
    beyond: AtomicU64,
    /// Device and inode number.
    identity: (u64, u64),
}

impl CopyFile {
    /// Makes the file, emptying an existing one, at `name` in the directory `dir`, whose device and inode are
    /// `dir_is`; its owner is that of the directory.
    ///
    /// # Errors
    /// The file cannot be made, is not a regular file in that directory on a tmpfs, or this process may not
    /// write files of any length.
    pub fn make(dir: &[u8], dir_is: (u64, u64), name: &str, faults: &Faults) -> Result<Self, Errno> {
        if limits_files() {
            return Err(Errno(libc::EFBIG));
        }
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let dir = KernelFd(result(kernel::open(&[dir, b"\0"].concat(), flags, 0))? as i32);
        let about = kernel::stat(dir.0).ok_or(Errno(libc::ESTALE))?;
        if (about.st_dev, about.st_ino) != dir_is {
            return Err(Errno(libc::ESTALE));
        }
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        let made = result(kernel::open_at(
            dir.0,
            format!("{name}\0").as_bytes(),
            flags,
            0o600,
        ))?;
        let fd = KernelFd(reentry::adopt(made as i32));
        let (uid, gid) = (about.st_uid, about.st_gid);
        let about = kernel::stat(fd.0).ok_or(Errno(libc::ESTALE))?;
        if about.st_mode & libc::S_IFMT != libc::S_IFREG
            || about.st_nlink != 1
            || filesystem(fd.0)?.0 != TMPFS
        {
            return Err(Errno(libc::ESTALE));
        }
        let number = fd.0 as usize;
        // SAFETY: these take numbers.
        unsafe {
            if about.st_uid != uid {
                result(kernel::call(
                    nr(libc::SYS_fchown),
                    [number, uid as usize, gid as usize, 0, 0, 0],
                ))?;
            }
            // Discards pages that the previous program of this process (before `exec`) has left in the file.
            result(kernel::call(nr(libc::SYS_ftruncate), [number, 0, 0, 0, 0, 0]))?;
            result(kernel::call(
                nr(libc::SYS_ftruncate),
                [number, LEN as usize, 0, 0, 0, 0],
            ))?;
        }
        let file = Self {
            identity: (about.st_dev, about.st_ino),
            fd,
            len: AtomicU64::new(LEN),
            beyond: AtomicU64::new(LEN),
        };
        file.keeps_pages_apart(faults).map(|()| file)
    }

    /// Tests that storing a page adds no other page to the file: the handling of missing pages depends on it.
    fn keeps_pages_apart(&self, faults: &Faults) -> Result<(), Errno> {
        let (last, page) = (HUGE - PAGE as u64, [1; PAGE]);
        // Tests both ways of storing pages; if the first is not available, the second is used.
        if self.put_new(last, &page, faults).is_ok() {
            self.came_alone(last)?;
        }
        self.put_over(last, &page)?;
        self.came_alone(last)
    }

    /// Whether the first huge page of the file has the page at `last`, its last one, and no other. Removes
    /// it.
    fn came_alone(&self, last: u64) -> Result<(), Errno> {
        let a = [self.fd.0 as usize, 0, libc::SEEK_DATA as usize, 0, 0, 0];
        // SAFETY: takes numbers.
        let first = result(unsafe { kernel::call(nr(libc::SYS_lseek), a) });
        self.take_out(0..HUGE);
        // SAFETY: as above.
        let left = result(unsafe { kernel::call(nr(libc::SYS_lseek), a) });
        match (first, left) {
            (Ok(first), Err(Errno(libc::ENXIO))) if first as u64 == last => Ok(()),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        }
    }

    /// Returns the size in bytes of the memory file system that holds the file.
    #[must_use]
    pub fn room(&self) -> u64 {
        filesystem(self.fd.0).map_or(0, |(_, bytes)| bytes)
    }

    /// Whether the file still has its name, by which the daemon finds it.
    #[must_use]
    pub fn is_named(&self) -> bool {
        kernel::stat(self.fd.0).is_some_and(|about| about.st_nlink > 0)
    }

    /// Stores pages at an offset. They become visible only at addresses where a page at this offset was shown
    /// before, and no other page is added to the file.
    ///
    /// They are stored through a map without huge pages: on a memory file system mounted with `huge=always`,
    /// `write` may add 2 MiB for one page. And the kernel does the copying: without room, a plain store would
    /// raise a signal.
    ///
    /// # Errors
    /// ENOSPC; EFBIG if the program has limited the length of files; errors of `mmap` and
    /// `process_vm_writev`.
    pub fn store(&self, offset: u64, pages: &[u8], faults: &Faults) -> Result<(), Errno> {
        // Beyond the limit the kernel would send a signal.
        if limits_files() {
            return Err(Errno(libc::EFBIG));
        }
        match self.put_new(offset, pages, faults) {
            Ok(()) => Ok(()),
            Err(Errno(libc::ENOMEM)) => Err(Errno(libc::ENOSPC)),
            // A page is there already: from an earlier read, or a zero page that the kernel has put there
            // because the process locks all its memory (`mlockall`).
            Err(_) => self.put_over(offset, pages),
        }
    }

    fn put_new(&self, offset: u64, pages: &[u8], faults: &Faults) -> Result<(), Errno> {
        self.with_map(offset, pages.len(), |at| {
            faults.register(at..at + pages.len(), MODE_MISSING)?;
            faults.put(at, pages)
        })
    }

    fn put_over(&self, offset: u64, pages: &[u8]) -> Result<(), Errno> {
        self.with_map(offset, pages.len(), |at| fill(at, pages))
    }

    /// Maps `len` bytes of the file, without huge pages, while `act` runs.
    fn with_map(
        &self,
        offset: u64,
        len: usize,
        act: impl FnOnce(usize) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let flags = (libc::MAP_SHARED | libc::MAP_NORESERVE) as usize;
        let a = [0, len, protection, flags, self.fd.0 as usize, offset as usize];
        // SAFETY: a new map, at a place of the kernel's choice.
        let at = result(unsafe { kernel::call(nr(libc::SYS_mmap), a) })?;
        let small = advise(at, len, libc::MADV_NOHUGEPAGE).or_else(no_huge_pages);
        let done = small.and_then(|()| act(at));
        unmap(at, len);
        done
    }

    /// Removes pages from the file, and so from all maps: the next load of one waits.
    pub fn take_out(&self, offsets: Range<u64>) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let len = offsets.end.saturating_sub(offsets.start);
        let a = [
            self.fd.0 as usize,
            mode as usize,
            offsets.start as usize,
            len as usize,
            0,
            0,
        ];
        if len > 0 {
            // SAFETY: takes numbers. Only pages of the file are removed.
            while unsafe { kernel::call(nr(libc::SYS_fallocate), a) } == -(libc::EINTR as isize) {}
        }
    }

    /// Maps `len` bytes of the file from `offset` on (a multiple of [`HUGE`]; the huge pages are used by no
    /// other map) at a place of the kernel's choice, near `hint` if possible. When this returns, all loads of
    /// it wait.
    ///
    /// # Errors
    /// Errors of `mmap`, or of the kernel if it does not report faults of this map. Nothing is left mapped
    /// then.
    pub fn map(
        &self,
        hint: usize,
        len: usize,
        protection: i32,
        offset: u64,
        faults: &Faults,
    ) -> Result<usize, Errno> {
        let at = self.map_plain(hint, len, protection, offset, 0)?;
        if let Err(errno) = watch(at, len, faults) {
            unmap(at, len);
            return Err(errno);
        }
        // With `mlockall` in force the kernel has put zero pages there, huge ones at its discretion.
        self.take_out(offset..(offset + len as u64).next_multiple_of(HUGE));
        Ok(at)
    }

    /// Maps an offset beyond the end of the file in place of an existing map: a load there raises SIGBUS
    /// until the file [reaches](Self::reach) that offset, and waits from then on. Returns the offset.
    /// (Another range within the file could not be mapped there while other threads load: until the kernel is
    /// told to report faults, it fills holes with zeros.)
    ///
    /// # Errors
    /// Errors of `mmap`, with nothing changed; or there is no offset left, or the range cannot be watched,
    /// and loads raise SIGBUS.
    pub fn map_nothing(&self, at: usize, len: usize, protection: i32, faults: &Faults) -> Result<u64, Errno> {
        let offset = self.beyond.fetch_add(len as u64, Ordering::Relaxed);
        if offset + len as u64 > LEN_MAX {
            return Err(Errno(libc::EFBIG));
        }
        self.map_plain(at, len, protection, offset, libc::MAP_FIXED)?;
        watch(at, len, faults)?;
        Ok(offset)
    }

    /// Extends the file to at least `end` bytes. Returns its length.
    #[must_use]
    pub fn reach(&self, end: u64) -> u64 {
        let len = self.len.load(Ordering::Relaxed);
        if end <= len || end > LEN_MAX {
            return len;
        }
        // SAFETY: takes numbers.
        let made = unsafe {
            kernel::call(
                nr(libc::SYS_ftruncate),
                [self.fd.0 as usize, end as usize, 0, 0, 0, 0],
            )
        };
        if made < 0 {
            return len;
        }
        self.len.store(end, Ordering::Relaxed);
        end
    }

    fn map_plain(
        &self,
        at: usize,
        len: usize,
        protection: i32,
        offset: u64,
        fixed: i32,
    ) -> Result<usize, Errno> {
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE | fixed;
        let a = [
            at,
            len,
            protection as usize,
            flags as usize,
            self.fd.0 as usize,
            offset as usize,
        ];
        // SAFETY: at a place of the kernel's choice, or over a map that this library has made for the program
        // and whose presence the caller has checked.
        result(unsafe { kernel::call(nr(libc::SYS_mmap), a) })
    }

    /// Whether this file is mapped in all of a range: a raw call of the program may have mapped something
    /// else there.
    #[must_use]
    pub fn is_at(&self, range: &Range<usize>) -> bool {
        let Some(text) = read_all(b"/proc/self/maps\0") else {
            return false;
        };
        let mut next = range.start;
        for line in text.split(|byte| *byte == b'\n') {
            let Some((at, is)) = parse(line) else { continue };
            if at.end <= next {
                continue;
            }
            if at.start > next || is != self.identity {
                return false;
            }
            next = at.end;
            if next >= range.end {
                return true;
            }
        }
        false
    }
}

/// Returns the addresses of a line of `/proc/self/maps`, with device and inode of the file.
fn parse(line: &[u8]) -> Option<(Range<usize>, (u64, u64))> {
    let text = std::str::from_utf8(line.get(..line.len().min(128))?).ok();
    // A path that is not UTF-8 is left out; its bytes may also be cut in the middle of a character.
    let text = text.or_else(|| std::str::from_utf8(line.split(|byte| *byte == b'/').next()?).ok())?;
    let mut words = text.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let mut words = words.skip(2);
    let (major, minor) = words.next()?.split_once(':')?;
    let hex = |text| u32::from_str_radix(text, 16).ok();
    let device = libc::makedev(hex(major)?, hex(minor)?);
    let inode = words.next()?.parse().ok()?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    Some((hex(start)?..hex(end)?, (device, inode)))
}

fn read_all(path: &[u8]) -> Option<Vec<u8>> {
    let fd = KernelFd(result(kernel::open(path, libc::O_RDONLY | libc::O_CLOEXEC, 0)).ok()? as i32);
    let (mut all, mut part) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match result(kernel::read(fd.0, &mut part)).ok()? {
            0 => return Some(all),
            count => all.extend_from_slice(&part[..count]),
        }
    }
}

/// Unmaps a range that this library has mapped.
pub fn unmap(at: usize, len: usize) {
    // SAFETY: a map of the library that is no longer used.
    unsafe { kernel::call(nr(libc::SYS_munmap), [at, len, 0, 0, 0, 0]) };
}

/// Maps `len` bytes of another file at a place of the kernel's choice.
///
/// # Errors
/// Those of `mmap`.
pub fn map_other(fd: i32, len: usize, protection: i32, shared: bool, offset: u64) -> Result<usize, Errno> {
    let flags = if shared {
        libc::MAP_SHARED
    } else {
        libc::MAP_PRIVATE
    };
    let a = [
        0,
        len,
        protection as usize,
        flags as usize,
        fd as usize,
        offset as usize,
    ];
    // SAFETY: a new map, at a place of the kernel's choice.
    result(unsafe { kernel::call(nr(libc::SYS_mmap), a) })
}

/// Moves a map made by [`map_other`] over a map of the file of copies; the program uses it from then on.
///
/// # Errors
/// Those of `mremap`.
pub fn put_over(from: usize, len: usize, to: usize) -> Result<(), Errno> {
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    // SAFETY: both are maps that this library has made, and the caller has checked that the second is still
    // there; the bytes are the same file's.
    result(unsafe { kernel::call(nr(libc::SYS_mremap), [from, len, len, flags, to, 0]) }).map(drop)
}

/// Sets the properties of all maps of the file: they are not inherited by a child, have no huge pages, and
/// loads of pages that are not shown wait.
fn watch(at: usize, len: usize, faults: &Faults) -> Result<(), Errno> {
    advise(at, len, libc::MADV_DONTFORK)?;
    advise(at, len, libc::MADV_NOHUGEPAGE).or_else(no_huge_pages)?;
    faults.register(at..at + len, MODE_MISSING | MODE_MINOR)
}

fn advise(at: usize, len: usize, advice: i32) -> Result<(), Errno> {
    // SAFETY: a map that this library has made; the advice discards nothing.
    result(unsafe { kernel::call(nr(libc::SYS_madvise), [at, len, advice as usize, 0, 0, 0]) }).map(drop)
}

/// A kernel without huge pages rejects the advice with EINVAL.
const fn no_huge_pages(errno: Errno) -> Result<(), Errno> {
    match errno {
        Errno(libc::EINVAL) => Ok(()),
        other => Err(other),
    }
}

/// Copies `bytes` to memory of this process at `at` without raising a signal, whatever is mapped there.
fn fill(at: usize, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let from = libc::iovec {
            iov_base: rest.as_ptr().cast_mut().cast(),
            iov_len: rest.len(),
        };
        let to = libc::iovec {
            iov_base: (at + done) as *mut libc::c_void,
            iov_len: rest.len(),
        };
        let pid = kernel::getpid() as usize;
        let a = [pid, (&raw const from) as usize, 1, (&raw const to) as usize, 1, 0];
        // SAFETY: the bytes are only read; the caller has mapped as many at `at`.
        match result(unsafe { kernel::call(nr(libc::SYS_process_vm_writev), a) }) {
            // The target is a map of a file that is long enough, so only memory can be short.
            Ok(0) | Err(Errno(libc::EFAULT)) => return Err(Errno(libc::ENOSPC)),
            Ok(count) => done += count,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Returns type and size in bytes of the file system behind a descriptor.
fn filesystem(fd: i32) -> Result<(i64, u64), Errno> {
    // SAFETY: all bytes zero is a value of the type.
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    let a = [fd as usize, (&raw mut about) as usize, 0, 0, 0, 0];
    // SAFETY: `about` takes the result.
    result(unsafe { kernel::call(nr(libc::SYS_fstatfs), a) })?;
    let bytes = about.f_blocks.saturating_mul(about.f_bsize as u64);
    // A file system without a limit reports 0.
    Ok((about.f_type, if bytes == 0 { u64::MAX } else { bytes }))
}

/// Whether the program's limit on file length is too low for the file.
fn limits_files() -> bool {
    kernel::file_max() < LEN_MAX
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{CopyFile, Faults, PAGE, parse};
    use crate::Errno;

    #[test]
    fn lines_of_the_table_of_maps_are_understood() {
        let line = b"7f00-8f00 r--p 00100000 00:1b 42    /dev/shm/a b";
        assert_eq!(parse(line), Some((0x7f00..0x8f00, (libc::makedev(0, 0x1b), 42))));
        assert_eq!(
            parse(b"7f00-8f00 rw-p 00000000 00:00 0 "),
            Some((0x7f00..0x8f00, (0, 0)))
        );
        assert_eq!(parse(b""), None);
        assert!(parse(b"7f00-8f00 r--p 00100000 00:1b 42    /\xff\xfe").is_some());
    }

    /// The kernel's rules that this module depends on.
    fn pages_are_seen_when_shown_and_waited_for_when_taken_out(live: &std::path::Path) {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::fs::MetadataExt;
        let (Ok(faults), true) = (Faults::open(), live.is_dir()) else {
            eprintln!(
                "SKIPPED: no userfaultfd for this process, or no {}",
                live.display()
            );
            return;
        };
        let name = format!("varve-test-{}", std::process::id());
        let about = std::fs::metadata(live).unwrap();
        let path = live.as_os_str().as_bytes();
        let file = CopyFile::make(path, (about.dev(), about.ino()), &name, &faults).unwrap();
        assert!(CopyFile::make(path, (about.dev(), about.ino() + 1), &name, &faults).is_err());
        let at = file.map(0, 4 * PAGE, libc::PROT_READ, 1 << 40, &faults).unwrap();
        assert!(file.is_at(&(at..at + 4 * PAGE)) && !file.is_at(&(at..at + 64 * PAGE)));
        assert_eq!(
            faults.show(at..at + PAGE),
            Err(Errno(libc::EFAULT)),
            "there is none"
        );
        let load = |page: usize| {
            std::thread::spawn(move || {
                // SAFETY: mapped to the end of the test.
                unsafe { std::ptr::read_volatile((at + page * PAGE) as *const u8) }
            })
        };
        for fill in [1_u8, 2] {
            let waits = load(1);
            assert_eq!(faults.next(None), Some(at + PAGE));
            file.store((1 << 40) + PAGE as u64, &[fill; PAGE], &faults)
                .unwrap();
            // It is in the file and not shown.
            let other = load(1);
            assert_eq!(faults.next(None), Some(at + PAGE));
            for alone in [at, at + 2 * PAGE] {
                assert_eq!(
                    faults.show(alone..alone + PAGE),
                    Err(Errno(libc::EFAULT)),
                    "one page was stored"
                );
            }
            faults.show(at + PAGE..at + 2 * PAGE).unwrap();
            assert_eq!((waits.join().unwrap(), other.join().unwrap()), (fill, fill));
            assert_eq!(load(1).join().unwrap(), fill);
            // Any process that has the file can remove pages, not only the mapper.
            let other = std::fs::File::options()
                .write(true)
                .open(live.join(&name))
                .unwrap();
            drop(other);
            file.take_out(0..1 << 62);
        }
        file.store((1 << 40) + 2 * PAGE as u64, &[3; PAGE], &faults)
            .unwrap();
        file.take_out(1 << 40..(1 << 40) + 8 * PAGE as u64);
        assert_eq!(
            faults.show(at + 2 * PAGE..at + 3 * PAGE),
            Err(Errno(libc::EFAULT)),
            "stored, and taken out"
        );
        // A load beyond the end waits once the file reaches that offset.
        let offset = file
            .map_nothing(at + 3 * PAGE, PAGE, libc::PROT_READ, &faults)
            .unwrap();
        assert_eq!(file.reach(offset + PAGE as u64), offset + PAGE as u64);
        let waits = load(3);
        assert_eq!(faults.next(None), Some(at + 3 * PAGE));
        file.store(offset, &[5; PAGE], &faults).unwrap();
        // A page that is there already is replaced.
        file.store(offset, &[4; PAGE], &faults).unwrap();
        faults.show(at + 3 * PAGE..at + 4 * PAGE).unwrap();
        assert_eq!(waits.join().unwrap(), 4);
        assert!(file.is_at(&(at..at + 4 * PAGE)) && file.is_named());
        std::fs::remove_file(live.join(&name)).unwrap();
        assert!(!file.is_named());
        super::unmap(at, 4 * PAGE);
    }

    #[test]
    fn what_everything_rests_on_is_so_in_the_shared_memory() {
        pages_are_seen_when_shown_and_waited_for_when_taken_out("/dev/shm".as_ref());
    }

    /// A memory file system, until this is dropped.
    struct Mounted(std::ffi::CString, std::path::PathBuf);

    impl Drop for Mounted {
        fn drop(&mut self) {
            // SAFETY: a text that ends with a zero byte.
            unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
            let _ = std::fs::remove_dir(&self.1);
        }
    }

    /// Mounted so that a write of one page may add 512.
    #[test]
    fn what_everything_rests_on_is_so_in_huge_pages() {
        let path = std::env::temp_dir().join(format!("varve-huge-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let mounted = Mounted(
            std::ffi::CString::new(path.to_str().unwrap()).unwrap(),
            path.clone(),
        );
        let kind = c"tmpfs".as_ptr();
        // SAFETY: texts that end with zero bytes.
        let done = unsafe { libc::mount(kind, mounted.0.as_ptr(), kind, 0, c"huge=always".as_ptr().cast()) };
        if done != 0 {
            eprintln!("SKIPPED: nothing may be mounted, or there are no huge pages");
            return;
        }
        pages_are_seen_when_shown_and_waited_for_when_taken_out(&path);
    }
}
