//! The arguments of one system call, and the program's memory that they point to. Owns the checks that keep a wrong pointer of the program from
//! being the library's fault.

use super::{kernel, ranges};
use crate::{Errno, Result};
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What `varve_entry` keeps of a call.
#[repr(C)]
pub struct Frame {
    number: usize,
    a: [usize; 6],
}

/// The arguments of a system call that a program makes. Pointers among them are valid as the system call demands, or the call fails with
/// EFAULT where that is easy to see; where it is not, the program gets the signal that its pointer deserves.
pub struct Args {
    number: usize,
    a: [usize; 6],
    /// Copies of what the program hands over from maps whose loads LibFS serves: they are not loaded from while it works.
    own: RefCell<Vec<Box<[u8]>>>,
}

/// Nothing of a program lies below, and the kernel's half begins above.
const LOWEST: usize = 0x1_0000;
const HIGHEST: usize = 0x7fff_ffff_f000;
/// Below, only programs at fixed addresses have memory: looked at with the kernel's help.
const DOUBTFUL: usize = 1 << 32;
/// Longest path, with its end.
const PATH_MAX: usize = libc::PATH_MAX as usize;
/// Most bytes that one call moves, as Linux has it.
const COUNT_MAX: usize = 0x7fff_f000;
/// Most pieces of a vectored call.
const PIECES_MAX: usize = 1024;

/// Most variables of an environment.
const ENTRIES_MAX: usize = 1 << 16;

/// How much memory a program at a fixed address is taken to have from there on.
const FIXED: usize = 1 << 30;
/// Where such a program begins; 0 for others.
static FIXED_AT: AtomicUsize = AtomicUsize::new(0);

const FAULT: Errno = Errno(libc::EFAULT);

/// The program's code is at `at`.
pub fn program_at(at: usize) {
    if at < DOUBTFUL {
        FIXED_AT.store(at & !0xf_ffff, Ordering::Relaxed);
    }
}

/// Whether `len` bytes at `at` can be read, as far as is cheap to tell.
fn readable(at: usize, len: usize) -> bool {
    if at < LOWEST || at.saturating_add(len) > HIGHEST {
        return len == 0;
    }
    let fixed = FIXED_AT.load(Ordering::Relaxed);
    if at >= DOUBTFUL || (fixed > 0 && (fixed..fixed + FIXED).contains(&at)) {
        return true;
    }
    let mut byte = 0_u8;
    [at, at + len.max(1) - 1].iter().all(|&at| {
        let (to, from) = ([(&raw mut byte) as usize, 1], [at, 1]);
        let a = [
            kernel::getpid() as usize,
            to.as_ptr() as usize,
            1,
            from.as_ptr() as usize,
            1,
            0,
        ];
        // SAFETY: one byte is copied to `byte`; the kernel checks the source.
        unsafe { kernel::call(libc::SYS_process_vm_readv as usize, a) == 1 }
    })
}

impl Args {
    /// # Safety
    /// `frame` is readable, and its arguments are those of a system call, with pointers that are valid as that call demands until it
    /// ends.
    pub(super) unsafe fn new(frame: *const Frame) -> Self {
        // SAFETY: readable, as promised.
        let frame = unsafe { &*frame };
        Self {
            number: frame.number,
            a: frame.a,
            own: RefCell::default(),
        }
    }

    /// The system call's number.
    #[must_use]
    pub const fn number(&self) -> usize {
        self.number
    }

    /// Argument `i`, as it is.
    #[must_use]
    pub const fn word(&self, i: usize) -> usize {
        self.a[i]
    }

    /// Argument `i`, a descriptor, flags or another `int`.
    #[must_use]
    pub const fn int(&self, i: usize) -> i32 {
        self.a[i] as i32
    }

    /// Makes the call in the kernel.
    #[must_use]
    pub fn call(&self) -> isize {
        self.call_as(self.number, self.a)
    }

    /// Makes the call in the kernel, with argument `i` replaced by a descriptor.
    #[must_use]
    pub fn call_with(&self, i: usize, fd: i32) -> isize {
        let mut a = self.a;
        a[i] = fd as usize;
        self.call_as(self.number, a)
    }

    fn call_as(&self, number: usize, a: [usize; 6]) -> isize {
        // SAFETY: the program's own call; only descriptors differ.
        unsafe { kernel::call(number, a) }
    }

    /// Makes the call in the kernel, with a variable of the environment in argument `i` set to `value`.
    #[must_use]
    pub fn call_with_variable(&self, i: usize, name: &str, value: &str) -> isize {
        let entry = format!("{name}={value}\0");
        let begins = |at: usize| {
            // Byte by byte: no further than the text's end.
            let prefix = &entry.as_bytes()[..=name.len()];
            prefix.iter().enumerate().all(|(k, byte)| {
                // SAFETY: the program hands a text that ends with a zero byte, and all bytes before this one were equal to others than zero.
                readable(at + k, 1) && unsafe { *((at + k) as *const u8) } == *byte
            })
        };
        let mut entries = Vec::new();
        for nth in 0..ENTRIES_MAX {
            match self.get_nth::<u64>(i, nth) {
                Ok(0) => break,
                Ok(at) if begins(at as usize) => {}
                Ok(at) => entries.push(at as usize),
                // The kernel finds the same.
                Err(_) => return self.call(),
            }
        }
        entries.push(entry.as_ptr() as usize);
        entries.push(0);
        let mut a = self.a;
        a[i] = entries.as_ptr() as usize;
        self.call_as(self.number, a)
    }

    /// `close_range` of a part of what this call asks for.
    #[must_use]
    pub fn close_range(&self, first: u32, last: u32) -> isize {
        self.call_as(self.number, [first as usize, last as usize, self.a[2], 0, 0, 0])
    }

    /// The path that argument `i` points to, without its end.
    ///
    /// # Errors
    /// EFAULT, ENAMETOOLONG.
    pub fn path(&self, i: usize) -> Result<&[u8]> {
        let path = self.text(i, PATH_MAX)?;
        path.ok_or(Errno(libc::ENAMETOOLONG))
    }

    /// A text of fewer than `max` bytes; `None` if it is longer.
    pub(crate) fn text(&self, i: usize, max: usize) -> Result<Option<&[u8]>> {
        let at = self.a[i];
        if !readable(at, 1) {
            return Err(FAULT);
        }
        // SAFETY: the program hands a text that ends with a zero byte; no more than `max` bytes are looked at.
        let len = unsafe { libc::strnlen(at as *const libc::c_char, max) };
        if len == max {
            return Ok(None);
        }
        self.bytes_at(at, len).map(Some)
    }

    /// A copy that lives as long as this.
    fn keep(&self, bytes: &[u8]) -> &[u8] {
        let copy: Box<[u8]> = bytes.into();
        let (at, len) = (copy.as_ptr(), copy.len());
        self.own.borrow_mut().push(copy);
        // SAFETY: what a box holds stays where it is, and no box is taken out of the vector before `self` ends.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// The bytes that argument `i` points to.
    ///
    /// # Errors
    /// EFAULT.
    pub fn bytes(&self, i: usize, len: usize) -> Result<&[u8]> {
        self.bytes_at(self.a[i], len.min(COUNT_MAX))
    }

    fn bytes_at(&self, at: usize, len: usize) -> Result<&[u8]> {
        if len == 0 {
            return Ok(&[]);
        }
        if !readable(at, len) {
            return Err(FAULT);
        }
        // SAFETY: the program hands `len` readable bytes for the time of the call.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
        Ok(if ranges::touches(at, len) {
            self.keep(bytes)
        } else {
            bytes
        })
    }

    /// The buffer that argument `i` points to, handed to `fill`.
    ///
    /// # Errors
    /// EFAULT.
    pub fn buffer<T>(&self, i: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
        self.buffer_at(self.a[i], len.min(COUNT_MAX), fill)
    }

    fn buffer_at<T>(&self, at: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
        if len == 0 {
            return fill(&mut []);
        }
        if !readable(at, len) {
            return Err(FAULT);
        }
        // SAFETY: the program hands `len` writable bytes that nobody else needs for the time of the call.
        fill(unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) })
    }

    /// The vector of argument `i` with as many pieces as argument `count` says: addresses and lengths, at most 2 GiB in all.
    fn pieces(&self, i: usize, count: usize) -> Result<Vec<(usize, usize)>> {
        let count = self.a[count];
        if count > PIECES_MAX {
            return Err(Errno(libc::EINVAL));
        }
        let mut left = COUNT_MAX;
        let raw = self.bytes(i, count * size_of::<libc::iovec>())?;
        let word = |bytes: &[u8]| usize::from_ne_bytes(bytes.try_into().unwrap_or_default());
        raw.chunks_exact(size_of::<libc::iovec>())
            .map(|piece| {
                let (at, len) = (word(&piece[..8]), word(&piece[8..]));
                if len > isize::MAX as usize {
                    return Err(Errno(libc::EINVAL));
                }
                let len = len.min(left);
                left -= len;
                Ok((at, len))
            })
            .collect()
    }

    /// Hands the buffers of a vectored read to `fill`, one after the other, until one is not filled.
    ///
    /// # Errors
    /// EFAULT, EINVAL; what `fill` fails with if nothing was read before.
    pub fn scatter(
        &self,
        i: usize,
        count: usize,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<usize>,
    ) -> Result<usize> {
        let mut done = 0;
        for (at, len) in self.pieces(i, count)? {
            match self.buffer_at(at, len, |buffer| fill(done as u64, buffer)) {
                Ok(got) => {
                    done += got;
                    if got < len {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(done)
    }

    /// Hands the bytes of a vectored write to `take`, in one piece.
    ///
    /// # Errors
    /// EFAULT, EINVAL; what `take` fails with.
    pub fn gather<T>(&self, i: usize, count: usize, take: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        let pieces = self.pieces(i, count)?;
        if let [(at, len)] = pieces[..] {
            return take(self.bytes_at(at, len)?);
        }
        let mut all = Vec::with_capacity(pieces.iter().map(|(_, len)| len).sum());
        for (at, len) in pieces {
            all.extend_from_slice(self.bytes_at(at, len)?);
        }
        take(&all)
    }

    /// Reads the `T` that argument `i` points to. For C types of integers, where any bytes are a value.
    ///
    /// # Errors
    /// EFAULT.
    pub fn get<T: Plain>(&self, i: usize) -> Result<T> {
        self.get_nth(i, 0)
    }

    /// As [`get`](Self::get), of an array.
    pub(crate) fn get_nth<T: Plain>(&self, i: usize, nth: usize) -> Result<T> {
        let at = self.a[i].wrapping_add(nth * size_of::<T>());
        if !readable(at, size_of::<T>()) {
            return Err(FAULT);
        }
        // SAFETY: readable by the program's word, and any bytes are a `T`.
        Ok(unsafe { (at as *const T).read_unaligned() })
    }

    /// Writes a `T` to where argument `i` points.
    ///
    /// # Errors
    /// EFAULT.
    pub fn put<T: Plain>(&self, i: usize, value: T) -> Result<()> {
        if !readable(self.a[i], size_of::<T>()) {
            return Err(FAULT);
        }
        // SAFETY: writable by the program's word.
        unsafe { (self.a[i] as *mut T).write_unaligned(value) };
        Ok(())
    }

    /// The descriptors that a message of `sendmsg` (argument `i`, the `nth` of an array of `stride` bytes) carries.
    #[must_use]
    pub fn carried(&self, i: usize, nth: usize, stride: usize) -> Vec<i32> {
        let at = self.a[i].wrapping_add(nth * stride);
        let mut fds = Vec::new();
        if !readable(at, size_of::<libc::msghdr>()) {
            return fds;
        }
        // SAFETY: a message as `sendmsg` demands it; the macros stay within its control part.
        unsafe {
            let message = at as *const libc::msghdr;
            let mut part = libc::CMSG_FIRSTHDR(message);
            while let Some(header) = part.as_ref() {
                if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
                    let bytes = header.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                    let data = libc::CMSG_DATA(part).cast::<i32>();
                    fds.extend((0..bytes / 4).map(|k| data.add(k).read_unaligned()));
                }
                part = libc::CMSG_NXTHDR(message, part);
            }
        }
        fds
    }

    /// Replaces the descriptors that a received message carries, one by one.
    pub(crate) fn replace_carried(&self, i: usize, mut with: impl FnMut(i32) -> i32) {
        if !readable(self.a[i], size_of::<libc::msghdr>()) {
            return;
        }
        // SAFETY: as in `carried`; the kernel has just filled the control part.
        unsafe {
            let message = self.a[i] as *const libc::msghdr;
            let mut part = libc::CMSG_FIRSTHDR(message);
            while let Some(header) = part.as_ref() {
                if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
                    let bytes = header.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                    let data = libc::CMSG_DATA(part).cast::<i32>();
                    for k in 0..bytes / 4 {
                        let new = with(data.add(k).read_unaligned());
                        data.add(k).write_unaligned(new);
                    }
                }
                part = libc::CMSG_NXTHDR(message, part);
            }
        }
    }
}

/// C types for which any bytes are a value.
///
/// # Safety
/// They hold integers only (or raw pointers), and no references.
pub unsafe trait Plain: Copy {
    /// All bytes zero.
    #[must_use]
    fn zero() -> Self {
        // SAFETY: any bytes are a value.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers.
unsafe impl Plain for i32 {}
// SAFETY: integers.
unsafe impl Plain for u32 {}
// SAFETY: integers.
unsafe impl Plain for i64 {}
// SAFETY: integers.
unsafe impl Plain for u64 {}
// SAFETY: integers.
unsafe impl Plain for libc::stat {}
// SAFETY: integers.
unsafe impl Plain for libc::statx {}
// SAFETY: integers.
unsafe impl Plain for libc::timespec {}
// SAFETY: integers.
unsafe impl Plain for libc::timeval {}
// SAFETY: integers.
unsafe impl Plain for libc::utimbuf {}
// SAFETY: integers.
unsafe impl Plain for libc::flock {}
// SAFETY: integers.
unsafe impl Plain for libc::pollfd {}
// SAFETY: integers.
unsafe impl Plain for libc::open_how {}
// SAFETY: integers.
unsafe impl Plain for [u64; 8] {}
