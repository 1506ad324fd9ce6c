//! A device's registers, mapped. One access is one load or store of four bytes; the registers of a removed
//! device read as all ones.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};

use crate::pmem::guard;

/// A mapping of registers.
pub(super) struct Window {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping lives as long as the value and is accessed by single loads and stores only, which the
// device orders.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

/// Maps `len` bytes, whole pages, of anonymous memory or of a descriptor.
fn map(fd: Option<(RawFd, i64)>, len: usize) -> io::Result<NonNull<u8>> {
    let (fd, off, flags) = match fd {
        Some((fd, off)) => (fd, off, libc::MAP_SHARED),
        None => (-1, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
    };
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            off,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

impl Window {
    /// Maps `len` bytes, whole pages, of a file of registers.
    pub(super) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        Self::of_fd(file.as_raw_fd(), 0, len)
    }

    /// Maps `len` bytes, whole pages, at `off` of a descriptor that is open.
    pub(super) fn of_fd(fd: RawFd, off: u64, len: usize) -> io::Result<Self> {
        if !guard::is_ready() && cfg!(target_arch = "x86_64") {
            return Err(io::Error::other("the handler of SIGBUS cannot be set"));
        }
        let base = map(Some((fd, off.cast_signed())), len)?;
        Ok(Self { base, len })
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    fn word(&self, off: usize) -> *mut u32 {
        assert!(off.is_multiple_of(4) && off + 4 <= self.len, "register {off:#x}");
        self.base.as_ptr().wrapping_add(off).cast()
    }

    pub(super) fn read(&self, off: usize) -> u32 {
        // SAFETY: `word` is aligned and within the mapping, which lives as long as `self`; the handler was
        // set when it was made.
        unsafe { guard::load_word(self.word(off)) }.unwrap_or(u32::MAX)
    }

    /// Writes a register. The device sees all earlier stores first, whatever their kind.
    pub(super) fn write(&self, off: usize, value: u32) {
        fence(Ordering::SeqCst);
        // SAFETY: as in `read`; nothing refers to registers.
        unsafe { guard::store_word(self.word(off), value) };
    }

    /// Releases the device: from here on registers read as all ones, and writes have no effect.
    pub(super) fn close(&self) -> io::Result<()> {
        let blank = map(None, self.len)?;
        // SAFETY: `blank` is a new mapping of `len` bytes that no other thread knows. It is filled, and then
        // moved over the window's own range, which is replaced at once: a concurrent access meets the device
        // or the blank.
        let moved = unsafe {
            std::ptr::write_bytes(blank.as_ptr(), 0xff, self.len);
            libc::mremap(
                blank.as_ptr().cast(),
                self.len,
                self.len,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                self.base.as_ptr(),
            )
        };
        if moved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping of this value, to which nothing refers any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::Window;

    #[test]
    fn window_is_blank_when_closed() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        let window = Window::of_file(&file, 8192).unwrap();
        window.write(4096, 7);
        assert_eq!((window.read(4096), window.read(0)), (7, 0));
        window.close().unwrap();
        assert_eq!((window.read(4096), window.read(8188)), (u32::MAX, u32::MAX));
        window.write(0, 1);
        let mut word = [0; 4];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut word, 4096).unwrap();
        assert_eq!(word, [7, 0, 0, 0]);
    }

    #[test]
    fn window_reads_as_all_ones_when_its_pages_are_gone() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let window = Window::of_file(&file, 4096).unwrap();
        assert_eq!(window.read(8), 0);
        file.set_len(0).unwrap();
        assert_eq!(window.read(8), u32::MAX);
        window.write(8, 1);
    }
}
