//! The arguments of one system call, and the program's memory that they point to. Owns the checks by which a
//! wrong pointer of the program becomes EFAULT and not a fault in the library.

use super::pages::PAGE;
use super::{kernel, ranges, user};
use crate::{Errno, Result};
use std::cell::RefCell;
use std::mem::MaybeUninit;

/// The registers that `varve_entry` saves of a call.
#[repr(C)]
pub struct Frame {
    number: usize,
    a: [usize; 6],
}

/// The arguments of a system call that a program makes. Memory behind pointers among them is touched by way
/// of [`user`] only: EFAULT is found here, for all calls.
pub struct Args {
    number: usize,
    a: [usize; 6],
    /// Copies of buffers that lie in maps whose loads LibFS serves: such maps must not be loaded from while
    /// LibFS works.
    own: RefCell<Vec<Box<[u8]>>>,
}

/// Longest path in bytes, with its terminating zero.
const PATH_MAX: usize = libc::PATH_MAX as usize;
/// Upper bound on the bytes that one call moves, as in Linux.
const COUNT_MAX: usize = 0x7fff_f000;
/// Upper bound on the pieces of a vectored call.
const PIECES_MAX: usize = 1024;

/// Upper bound on the variables of an environment.
const ENTRIES_MAX: usize = 1 << 16;

const FAULT: Errno = Errno(libc::EFAULT);

impl Args {
    /// # Safety
    /// `frame` is readable, and its arguments are those of a system call, with pointers that are valid as
    /// that call demands until it ends.
    pub(super) unsafe fn new(frame: *const Frame) -> Self {
        // SAFETY: readable, as promised.
        let frame = unsafe { &*frame };
        Self {
            number: frame.number,
            a: frame.a,
            own: RefCell::default(),
        }
    }

    /// Returns the system call's number.
    #[must_use]
    pub const fn number(&self) -> usize {
        self.number
    }

    /// Returns argument `i` as a word.
    #[must_use]
    pub const fn word(&self, i: usize) -> usize {
        self.a[i]
    }

    /// Returns argument `i` as an `int`: a descriptor, flags and the like.
    #[must_use]
    pub const fn int(&self, i: usize) -> i32 {
        self.a[i] as i32
    }

    /// Returns argument `i` as an `unsigned int`. The upper half of the register is ignored, since callers
    /// need not clear it.
    #[must_use]
    pub const fn uint(&self, i: usize) -> u32 {
        self.a[i] as u32
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

    /// Makes the call in the kernel, with argument `i` replaced by the address of one of the library's own
    /// signal sets, or by null.
    #[must_use]
    pub(super) fn call_with_set(&self, i: usize, at: usize) -> isize {
        let mut a = self.a;
        a[i] = at;
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
            // Byte by byte, so as not to read beyond the end of the text.
            let prefix = &entry.as_bytes()[..=name.len()];
            prefix.iter().enumerate().all(|(k, byte)| {
                let mut there = [MaybeUninit::uninit()];
                // SAFETY: `copy_in` filled it.
                user::copy_in(&mut there, at + k) && unsafe { there[0].assume_init() } == *byte
            })
        };
        let mut entries = Vec::new();
        for nth in 0..ENTRIES_MAX {
            match self.get_nth::<u64>(i, nth) {
                Ok(0) => break,
                Ok(at) if begins(at as usize) => {}
                Ok(at) => entries.push(at as usize),
                // The kernel finds the same fault.
                Err(_) => return self.call(),
            }
        }
        entries.push(entry.as_ptr() as usize);
        entries.push(0);
        let mut a = self.a;
        a[i] = entries.as_ptr() as usize;
        self.call_as(self.number, a)
    }

    /// Makes `close_range` for a part of the range that this call asks for.
    #[must_use]
    pub fn close_range(&self, first: u32, last: u32) -> isize {
        self.call_as(self.number, [first as usize, last as usize, self.a[2], 0, 0, 0])
    }

    /// Returns the path that argument `i` points to, without its terminating zero.
    ///
    /// # Errors
    /// EFAULT, ENAMETOOLONG.
    pub fn path(&self, i: usize) -> Result<&[u8]> {
        let path = self.text(i, PATH_MAX)?;
        path.ok_or(Errno(libc::ENAMETOOLONG))
    }

    /// Returns a text of fewer than `max` bytes; `None` if it is longer.
    pub(crate) fn text(&self, i: usize, max: usize) -> Result<Option<&[u8]>> {
        let at = self.a[i];
        let mut len = 0;
        while len < max {
            let here = at.checked_add(len).ok_or(FAULT)?;
            let most = (PAGE - here % PAGE).min(max - len);
            if user::readable(here, 1) == 0 {
                return Err(FAULT);
            }
            // SAFETY: the rest of a page that was just touched.
            let part = unsafe { libc::strnlen(here as *const libc::c_char, most) };
            len += part;
            if part < most {
                return Ok(Some(self.slice(at, len)));
            }
        }
        Ok(None)
    }

    /// Returns a copy of `bytes` that lives as long as `self`.
    fn keep(&self, bytes: &[u8]) -> &[u8] {
        let copy: Box<[u8]> = bytes.into();
        let (at, len) = (copy.as_ptr(), copy.len());
        self.own.borrow_mut().push(copy);
        // SAFETY: the content of a box does not move, and no box is taken out of the vector before `self`
        // ends.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Returns the `len` bytes that argument `i` points to.
    ///
    /// # Errors
    /// EFAULT.
    pub fn bytes(&self, i: usize, len: usize) -> Result<&[u8]> {
        let at = self.a[i];
        if len > COUNT_MAX || user::readable(at, len) < len {
            return Err(FAULT);
        }
        Ok(self.slice(at, len))
    }

    /// Checks that a buffer of `len` bytes at argument `i` lies in the user half of the address space, as the
    /// kernel does before it touches any of it.
    ///
    /// # Errors
    /// EFAULT.
    pub fn is_range(&self, i: usize, len: usize) -> Result<()> {
        let end = self.a[i].checked_add(len).filter(|end| *end <= user::HIGHEST);
        end.map(drop).ok_or(FAULT)
    }

    /// Returns the readable part of the `len` bytes that argument `i` points to, since the kernel's writes
    /// are short at a fault.
    ///
    /// # Errors
    /// EFAULT if no byte is readable.
    pub fn data(&self, i: usize, len: usize) -> Result<&[u8]> {
        self.is_range(i, len)?;
        self.data_at(self.a[i], len.min(COUNT_MAX))
    }

    fn data_at(&self, at: usize, len: usize) -> Result<&[u8]> {
        match user::readable(at, len) {
            0 if len > 0 => Err(FAULT),
            good => Ok(self.slice(at, good)),
        }
    }

    /// Returns bytes of the program that are known to be readable; copied if they lie in a served map.
    fn slice(&self, at: usize, len: usize) -> &[u8] {
        if len == 0 {
            return &[];
        }
        // SAFETY: every page was touched just now, and the program lends the bytes for the time of the call.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, len) };
        if ranges::touches(at, len) {
            self.keep(bytes)
        } else {
            bytes
        }
    }

    /// Hands `fill` the writable part of the buffer that argument `i` points to, since the kernel's reads are
    /// short at a fault.
    ///
    /// # Errors
    /// EFAULT if no byte is writable.
    pub fn buffer<T>(&self, i: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
        self.is_range(i, len)?;
        self.buffer_at(self.a[i], len.min(COUNT_MAX), fill)
    }

    fn buffer_at<T>(&self, at: usize, len: usize, fill: impl FnOnce(&mut [u8]) -> Result<T>) -> Result<T> {
        if len == 0 {
            return fill(&mut []);
        }
        match user::writable(at, len) {
            0 => Err(FAULT),
            // SAFETY: every page was touched just now, and the program lends the bytes for the exclusive use
            // of the call.
            good => fill(unsafe { std::slice::from_raw_parts_mut(at as *mut u8, good) }),
        }
    }

    /// Returns the pieces of the vector in argument `i`, whose number is argument `count`: addresses and
    /// lengths, together at most 2 GiB.
    fn pieces(&self, i: usize, count: usize) -> Result<Vec<(usize, usize)>> {
        let count = self.a[count] as u32 as usize;
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
                if at.checked_add(len).is_none_or(|end| end > user::HIGHEST) {
                    return Err(FAULT);
                }
                let len = len.min(left);
                left -= len;
                Ok((at, len))
            })
            .collect()
    }

    /// Hands the buffers of a vectored read to `fill`, one after the other, until one is not filled. `most`
    /// gets the total length and returns the upper bound on the bytes to read.
    ///
    /// # Errors
    /// EFAULT, EINVAL; the error of `most`, or of `fill` if nothing was read before.
    pub fn scatter(
        &self,
        i: usize,
        count: usize,
        most: impl FnOnce(usize) -> Result<usize>,
        mut fill: impl FnMut(u64, &mut [u8]) -> Result<usize>,
    ) -> Result<usize> {
        let pieces = self.pieces(i, count)?;
        let most = most(pieces.iter().map(|(_, len)| len).sum())?;
        let mut done = 0;
        for (at, len) in pieces {
            let len = len.min(most - done);
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

    /// Hands the readable bytes of a vectored write to `take`, in one piece.
    ///
    /// # Errors
    /// EFAULT, EINVAL; the error of `take`.
    pub fn gather<T>(&self, i: usize, count: usize, take: impl FnOnce(&[u8]) -> Result<T>) -> Result<T> {
        let pieces = self.pieces(i, count)?;
        if let [(at, len)] = pieces[..] {
            return take(self.data_at(at, len)?);
        }
        let mut all = Vec::with_capacity(pieces.iter().map(|(_, len)| len).sum());
        for (at, len) in pieces {
            match self.data_at(at, len) {
                Ok(part) => {
                    all.extend_from_slice(part);
                    if part.len() < len {
                        break;
                    }
                }
                Err(_) if !all.is_empty() => break,
                Err(errno) => return Err(errno),
            }
        }
        take(&all)
    }

    /// Reads the `T` that argument `i` points to. For C types of integers, for which any bytes are a value.
    ///
    /// # Errors
    /// EFAULT.
    pub fn get<T: Plain>(&self, i: usize) -> Result<T> {
        self.get_nth(i, 0)
    }

    /// As [`get`](Self::get), for element `nth` of an array.
    pub(crate) fn get_nth<T: Plain>(&self, i: usize, nth: usize) -> Result<T> {
        get_at(self.a[i].wrapping_add(nth * size_of::<T>()))
    }

    /// Calls `look` with each of the first `count` elements of an array, until one cannot be read.
    pub(crate) fn each<T: Plain>(&self, i: usize, count: usize, mut look: impl FnMut(usize, T)) {
        const AT_ONCE: usize = 64;
        let mut nth = 0;
        while nth + AT_ONCE <= count {
            let Ok(some) = self.get_nth::<[T; AT_ONCE]>(i, nth / AT_ONCE) else {
                break;
            };
            (nth..).zip(some).for_each(|(nth, one)| look(nth, one));
            nth += AT_ONCE;
        }
        for nth in nth..count {
            let Ok(one) = self.get_nth(i, nth) else { break };
            look(nth, one);
        }
    }

    /// Writes a `T` to where argument `i` points.
    ///
    /// # Errors
    /// EFAULT.
    pub fn put<T: Plain>(&self, i: usize, value: T) -> Result<()> {
        // SAFETY: the bytes of a value of integers. Padding, if there is any, comes from `Plain::zero`.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        self.put_bytes(i, bytes)
    }

    /// Writes bytes to where argument `i` points.
    ///
    /// # Errors
    /// EFAULT.
    pub fn put_bytes(&self, i: usize, bytes: &[u8]) -> Result<()> {
        // SAFETY: the program asked for a result there.
        if unsafe { user::copy_out(self.a[i], bytes) } {
            Ok(())
        } else {
            Err(FAULT)
        }
    }

    /// Returns the descriptors that a message of `sendmsg` carries: the `nth` of an array at argument `i`
    /// with elements of `stride` bytes.
    #[must_use]
    pub fn carried(&self, i: usize, nth: usize, stride: usize) -> Vec<i32> {
        let mut fds = Vec::new();
        let Ok(mut message) = get_at::<libc::msghdr>(self.a[i].wrapping_add(nth * stride)) else {
            return fds;
        };
        // A copy, aligned as control messages are.
        let len = message.msg_controllen.min(CONTROL_MAX);
        let mut control = vec![MaybeUninit::<u64>::uninit(); len.div_ceil(8)];
        // SAFETY: any part of the words may be filled by bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(control.as_mut_ptr().cast(), len) };
        if !user::copy_in(bytes, message.msg_control as usize) {
            return fds;
        }
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = len;
        each_carried(&message, |at| {
            // SAFETY: within the control part, which is ours.
            fds.push(unsafe { at.read_unaligned() });
        });
        fds
    }

    /// Replaces each descriptor that a message received by the library carries.
    pub(crate) fn replace_carried(&self, i: usize, mut with: impl FnMut(i32) -> i32) {
        let message = self.a[i] as *const libc::msghdr;
        // SAFETY: the library's own message, whose control part the kernel has just filled.
        unsafe {
            each_carried(&*message, |at| at.write_unaligned(with(at.read_unaligned())));
        }
    }
}

/// Longest control part of a message in bytes that is examined; the kernel accepts some 20 KiB.
const CONTROL_MAX: usize = 1 << 18;

/// Calls `look` with the address of each descriptor in a message whose control part is the library's own.
fn each_carried(message: &libc::msghdr, mut look: impl FnMut(*mut i32)) {
    // SAFETY: the macros stay within the control part; a header's length is checked against its end.
    unsafe {
        let end = message.msg_control as usize + message.msg_controllen;
        let mut part = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = part.as_ref() {
            if header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(part).cast::<i32>();
                let said = header.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let bytes = said.min(end.saturating_sub(data as usize));
                (0..bytes / 4).for_each(|k| look(data.add(k)));
            }
            part = libc::CMSG_NXTHDR(message, part);
        }
    }
}

fn get_at<T: Plain>(at: usize) -> Result<T> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the value's own bytes.
    let bytes = unsafe { std::slice::from_raw_parts_mut(value.as_mut_ptr().cast(), size_of::<T>()) };
    if !user::copy_in(bytes, at) {
        return Err(FAULT);
    }
    // SAFETY: filled, and any bytes are a `T`.
    Ok(unsafe { value.assume_init() })
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
// SAFETY: integers and raw pointers.
unsafe impl Plain for libc::msghdr {}
// SAFETY: as each of them.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}
