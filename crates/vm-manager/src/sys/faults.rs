//! userfaultfd of another process: its faults, its changes of the address space, and pages put into it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use varve_far::userfault::{
    API, COPY, EVENT_PAGEFAULT, FEATURE_EVENT_FORK, FEATURE_EVENT_REMAP, FEATURE_EVENT_REMOVE,
    FEATURE_EVENT_UNMAP, FEATURE_MOVE, FEATURE_POISON, MODE_MISSING, NEW, POISON, REGISTER, UNREGISTER,
    VERSION, WAKE, ZEROPAGE,
};
use varve_far::{PAGE_BYTES, Page};

use super::check;
use crate::types::Pid;

/// A message of 32 bytes: the event in the first one, three words from byte 8 on.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    words: [u64; 3],
}

const _: () = assert!(size_of::<Message>() == 32);
const MESSAGES: usize = 16;

/// Something that the process did.
#[derive(Debug)]
pub enum Event {
    /// Touched a page that is not there; the thread waits.
    Fault(u64),
    /// Forked. The child's memory is served by this; closing it makes evicted pages read as zeros.
    Fork(Faults),
    /// Moved a mapping.
    Remap {
        /// First byte before.
        from: u64,
        /// First byte now.
        to: u64,
        /// Bytes.
        len: u64,
    },
    /// Gave up the contents of a range (`MADV_DONTNEED`); the kernel drops them after this was read.
    Remove {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Unmapped a range.
    Unmap {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
}

/// The userfaultfd of one address space.
#[derive(Debug)]
pub struct Faults {
    fd: OwnedFd,
}

impl AsFd for Faults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens `/dev/userfaultfd`, which gives programs a userfaultfd for faults of the kernel too.
///
/// # Errors
/// `EACCES` without root or a rule for the device, `ENOENT` where the kernel has none.
pub fn userfault_device() -> io::Result<OwnedFd> {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/userfaultfd")?;
    Ok(file.into())
}

impl Faults {
    /// A userfaultfd of the calling process, to find out what is possible.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn of_this_process(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        // SAFETY: the call takes flags and gives a descriptor that nobody else owns.
        let fd = check(libc::c_long::from(unsafe {
            libc::ioctl(device.as_raw_fd(), NEW, libc::O_CLOEXEC | libc::O_NONBLOCK)
        }))?;
        // SAFETY: see above; it fits an int.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
    }

    /// Takes over a new userfaultfd and asks for all events. `CAP_SYS_PTRACE` is needed for those of forks.
    ///
    /// # Errors
    /// `EPERM` without the capability, `EINVAL` before Linux 6.8 or for a descriptor that is no userfaultfd.
    pub fn begin(fd: OwnedFd) -> io::Result<Self> {
        let features = FEATURE_EVENT_FORK
            | FEATURE_EVENT_REMAP
            | FEATURE_EVENT_REMOVE
            | FEATURE_EVENT_UNMAP
            | FEATURE_POISON
            | FEATURE_MOVE;
        let mut api = [VERSION, features, 0];
        // SAFETY: three words are the `uffdio_api` that the number encodes.
        unsafe { ioctl(fd.as_fd(), API, &mut api) }?;
        Ok(Self { fd })
    }

    /// Has the faults of missing pages of a range come here.
    ///
    /// # Errors
    /// `EINVAL` for memory that cannot be, `EBUSY` when another userfaultfd has it, `ENOMEM`.
    pub fn register(&self, start: u64, len_bytes: u64) -> io::Result<()> {
        let mut register = [start, len_bytes, MODE_MISSING, 0];
        // SAFETY: four words are the `uffdio_register` that the number encodes.
        unsafe { ioctl(self.as_fd(), REGISTER, &mut register) }
    }

    /// Leaves a range to the kernel again; waiting threads go on.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn unregister(&self, start: u64, len_bytes: u64) -> io::Result<()> {
        // SAFETY: two words are the `uffdio_range` that the number encodes.
        unsafe { ioctl(self.as_fd(), UNREGISTER, &mut [start, len_bytes]) }
    }

    /// Puts a page in and wakes threads that wait for it.
    ///
    /// # Errors
    /// `EEXIST` when one is there, `EAGAIN` while an event waits to be read, `ENOENT` when nothing is mapped
    /// or registered there, `ESRCH` when the process has ended.
    pub fn copy(&self, address: u64, page: &Page) -> io::Result<()> {
        let mut copy = [address, page.0.as_ptr() as u64, PAGE_BYTES as u64, 0, 0];
        // SAFETY: five words are the `uffdio_copy` that the number encodes; the source is a page that lives
        // over the call and is only read. The target is memory of another process that waits for it.
        unsafe { ioctl(self.as_fd(), COPY, &mut copy) }
    }

    /// Puts a page of zeros in and wakes threads that wait for it.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn zero(&self, address: u64) -> io::Result<()> {
        let mut zero = [address, PAGE_BYTES as u64, 0, 0];
        // SAFETY: four words are the `uffdio_zeropage` that the number encodes.
        unsafe { ioctl(self.as_fd(), ZEROPAGE, &mut zero) }
    }

    /// Makes every touch of a page a SIGBUS.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn poison(&self, address: u64) -> io::Result<()> {
        let mut poison = [address, PAGE_BYTES as u64, 0, 0];
        // SAFETY: four words are the `uffdio_poison` that the number encodes.
        unsafe { ioctl(self.as_fd(), POISON, &mut poison) }
    }

    /// Wakes threads that wait for a page, which touch it again.
    ///
    /// # Errors
    /// The kernel's errno.
    pub fn wake(&self, address: u64) -> io::Result<()> {
        // SAFETY: two words are the `uffdio_range` that the number encodes.
        unsafe { ioctl(self.as_fd(), WAKE, &mut [address, PAGE_BYTES as u64]) }
    }

    /// Reads what waits, at most 16 events, into `events`. Gives their number; does not block.
    ///
    /// # Errors
    /// The error of reading, except `EAGAIN`.
    pub fn read(&self, events: &mut Vec<Event>) -> io::Result<usize> {
        let mut messages = [Message::default(); MESSAGES];
        // SAFETY: the buffer is as long as is said and holds plain numbers.
        let got = check(unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr().cast(),
                size_of_val(&messages),
            ) as libc::c_long
        });
        let bytes = match got {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            other => other?,
        };
        let count = bytes / size_of::<Message>();
        events.extend(messages[..count].iter().filter_map(event));
        Ok(count)
    }
}

fn event(message: &Message) -> Option<Event> {
    let [first, second, third] = message.words;
    Some(match message.event {
        EVENT_PAGEFAULT => Event::Fault(second),
        0x13 => {
            // SAFETY: the kernel made this descriptor in this process for the reader of the event.
            let fd = unsafe { OwnedFd::from_raw_fd(first as u32 as libc::c_int) };
            Event::Fork(Faults { fd })
        }
        0x14 => Event::Remap {
            from: first,
            to: second,
            len: third,
        },
        0x15 => Event::Remove {
            start: first,
            end: second,
        },
        0x16 => Event::Unmap {
            start: first,
            end: second,
        },
        _ => return None,
    })
}

/// An ioctl on a userfaultfd.
///
/// # Safety
/// `argument` has the length that `number` encodes, and pointers in it are valid for what the kernel does
/// with them.
unsafe fn ioctl(fd: BorrowedFd<'_>, number: libc::c_ulong, argument: &mut [u64]) -> io::Result<()> {
    // SAFETY: the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), number, argument.as_mut_ptr()) };
    check(libc::c_long::from(result)).map(drop)
}

/// Reads memory of another process: for each range first byte and number of pages, into `pages` one after the
/// other.
///
/// # Errors
/// `ESRCH` when it has ended, `EPERM`, `EFAULT` when the first range is not mapped. `UnexpectedEof` when only
/// a part could be read.
pub fn read_memory(pid: Pid, ranges: &[(u64, usize)], pages: &mut [Page]) -> io::Result<()> {
    let total: usize = ranges.iter().map(|(_, count)| count * PAGE_BYTES).sum();
    if total > size_of_val(pages) || ranges.len() > libc::UIO_MAXIOV as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let local = libc::iovec {
        iov_base: pages.as_mut_ptr().cast(),
        iov_len: total,
    };
    let remote: Vec<libc::iovec> = ranges
        .iter()
        .map(|(start, count)| libc::iovec {
            iov_base: *start as *mut libc::c_void,
            iov_len: count * PAGE_BYTES,
        })
        .collect();
    // SAFETY: `local` is memory of `pages`, at least `total` bytes, which may hold anything; `remote` is only
    // looked at in the other process.
    let got = check(unsafe {
        libc::process_vm_readv(
            pid.0,
            &raw const local,
            1,
            remote.as_ptr(),
            remote.len() as libc::c_ulong,
            0,
        ) as libc::c_long
    })?;
    if got < total {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}
