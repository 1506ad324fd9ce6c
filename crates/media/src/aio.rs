//! Several writes of one file in flight at once through the kernel's own asynchronous I/O, which takes no
//! descriptor and which containers allow where they forbid io_uring. Knows descriptors and buffers;
//! `direct.rs` writes the remaining parts one after the other.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

/// Requests in flight at most.
const DEPTH: usize = 32;
/// `IOCB_CMD_PWRITE` of `linux/aio_abi.h`.
const WRITE: u16 = 1;

/// `struct iocb` of `linux/aio_abi.h`, little-endian.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Request {
    /// Comes back with the completion: here, the index of the part.
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    file: u32,
    address: u64,
    len_bytes: u64,
    off: i64,
    reserved: u64,
    flags: u32,
    event_file: u32,
}

/// `struct io_event`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Completion {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

const _: () = assert!(size_of::<Request>() == 64 && size_of::<Completion>() == 32);

/// A queue of the kernel's asynchronous I/O. Of this process only: in a forked child every submission is
/// refused.
pub(crate) struct Aio {
    context: libc::c_ulong,
}

impl Aio {
    /// # Errors
    /// The kernel has none, or none left (`/proc/sys/fs/aio-max-nr`).
    pub(crate) fn new() -> io::Result<Self> {
        if cfg!(target_endian = "big") || cfg!(target_pointer_width = "32") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel stores the queue's number into `context`, which is a word of its own that is 0,
        // as it must be.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, DEPTH as libc::c_long, &raw mut context) };
        if made < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { context })
    }

    /// Writes the parts, and sets `left` to false for each that is written wholly. Nothing is in flight when
    /// this returns.
    pub(crate) fn write(&mut self, file: &File, parts: &[(u64, &[u8])], left: &mut [bool]) {
        assert_eq!(parts.len(), left.len());
        for begin in (0..parts.len()).step_by(DEPTH) {
            let end = (begin + DEPTH).min(parts.len());
            if !self.write_some(file, &parts[begin..end], &mut left[begin..end]) {
                return;
            }
        }
    }

    /// Submits as many parts as the queue holds and waits for them. `false`: the kernel took fewer.
    fn write_some(&mut self, file: &File, parts: &[(u64, &[u8])], left: &mut [bool]) -> bool {
        let mut requests = [Request::default(); DEPTH];
        for (index, ((off, blocks), request)) in parts.iter().zip(&mut requests).enumerate() {
            *request = Request {
                data: index as u64,
                opcode: WRITE,
                file: file.as_raw_fd().unsigned_abs(),
                address: blocks.as_ptr() as u64,
                len_bytes: blocks.len() as u64,
                off: off.cast_signed(),
                ..Request::default()
            };
        }
        let asked = parts.len().min(DEPTH);
        let mut list = [null_mut::<Request>(); DEPTH];
        for (place, request) in list.iter_mut().zip(&mut requests) {
            *place = request;
        }
        // SAFETY: `list` holds `asked` pointers to requests, which the kernel copies during the call. Each
        // names a buffer that `parts` borrows until this function returns, and that is after `wait_for` has
        // seen as many completions as were taken; the file is open as long.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.context,
                asked as libc::c_long,
                list.as_mut_ptr(),
            )
        };
        let taken = usize::try_from(taken).unwrap_or(0);
        self.wait_for(taken, |part, written| {
            if let (Some(left), Some((_, blocks))) = (left.get_mut(part), parts.get(part)) {
                *left = usize::try_from(written) != Ok(blocks.len());
            }
        });
        taken == asked
    }

    /// Waits for `count` completions. In every case this returns only when nothing is in flight: the buffers
    /// are lent to the kernel.
    fn wait_for(&mut self, count: usize, mut done: impl FnMut(usize, i64)) {
        let mut events = [Completion::default(); DEPTH];
        let mut seen = 0;
        while seen < count {
            let wanted = (count - seen).min(DEPTH) as libc::c_long;
            // SAFETY: the kernel stores at most `wanted` completions into `events`, which has room for
            // `DEPTH`; no time limit is given.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    wanted,
                    wanted,
                    events.as_mut_ptr(),
                    null_mut::<libc::timespec>(),
                )
            };
            match usize::try_from(got) {
                Ok(got) => {
                    for event in &events[..got.min(DEPTH)] {
                        done(event.data as usize, event.result);
                    }
                    seen += got;
                }
                // A signal. No other error can occur, and giving up would return the buffers too early.
                Err(_) => std::thread::yield_now(),
            }
        }
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: takes no pointer; the queue is this value's own and nothing is in flight on it. In a forked
        // child it is refused.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{Aio, DEPTH};
    use crate::aligned::AlignedBuf;
    use std::os::unix::fs::FileExt;

    #[test]
    fn aio_writes_every_part_when_there_are_more_than_its_queue_holds() {
        let file = tempfile::tempfile().unwrap();
        let count = 2 * DEPTH + 3;
        let mut buf = AlignedBuf::new(count * 4096);
        for (index, block) in buf.bytes_mut().chunks_mut(4096).enumerate() {
            block.fill(index as u8 + 1);
        }
        // Backwards, with holes.
        let parts: Vec<(u64, &[u8])> = buf
            .bytes()
            .chunks(4096)
            .enumerate()
            .map(|(index, block)| (((count - index) * 8192) as u64, block))
            .collect();
        let mut left = vec![true; count];
        let Ok(mut aio) = Aio::new() else {
            println!("SKIPPED: this kernel has no asynchronous I/O");
            return;
        };
        aio.write(&file, &parts, &mut left);
        assert!(left.iter().all(|left| !left), "{left:?}");
        for (off, block) in parts {
            let mut back = [0; 4096];
            file.read_exact_at(&mut back, off).unwrap();
            assert!(back == block);
        }
    }

    #[test]
    fn aio_leaves_what_the_kernel_refuses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("read-only");
        std::fs::write(&path, b"as it was").unwrap();
        let file = std::fs::File::open(&path).unwrap();
        let buf = AlignedBuf::new(4096);
        let Ok(mut aio) = Aio::new() else {
            println!("SKIPPED: this kernel has no asynchronous I/O");
            return;
        };
        let mut left = [true; 2];
        aio.write(&file, &[(0, buf.bytes()), (4096, buf.bytes())], &mut left);
        assert_eq!(left, [true; 2]);
        assert_eq!(std::fs::read(&path).unwrap(), b"as it was");
    }
}
