//! An entry of FUSE over io_uring (`linux/fuse.h`, "Documentation/filesystems/fuse-io-uring.rst"): the memory
//! in which the kernel puts a request and finds its reply, and the ring that tells of both. Owns the lifetime
//! of that memory; knows no request.
//!
//! The kernel has the memory from [`Entry::register`] or [`Entry::commit`] until [`Entry::wait`] reports a
//! request. In between nothing here reads or writes it, and no reference to it exists: those are made by
//! methods that check `lent`.

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

/// `FUSE_IO_URING_CMD_REGISTER` and `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`.
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Bytes of the head of a request or reply, and of the structure that an opcode has.
pub(crate) const PART_BYTES: usize = 128;
/// The first page has the [`Head`] and, from here on, the [`Segment`]s; the payload follows.
const SEGMENTS: usize = 512;
const PAGE: usize = 4096;

/// `struct fuse_uring_req_header`.
#[repr(C)]
struct Head {
    in_out: [u8; PART_BYTES],
    op: [u8; PART_BYTES],
    flags: u64,
    commit_id: u64,
    payload_len: u32,
    padding: u32,
    reserved: u64,
}
const _: () = assert!(size_of::<Head>() == 288);

/// `struct iovec`, as the kernel reads it.
#[repr(C)]
struct Segment {
    base: *mut u8,
    len: usize,
}

/// A request in the memory of an entry.
pub(crate) struct Parts<'e> {
    /// Begins with the request's header.
    pub head: &'e [u8; PART_BYTES],
    /// Begins with the structure of the opcode, if it has one.
    pub op: &'e [u8; PART_BYTES],
    /// The whole payload: of the request first, of the reply later.
    pub payload: &'e mut [u8],
    /// Bytes of the request in the payload.
    pub len: usize,
}

/// An entry of one queue of a mount. A thread has it and answers its requests one after the other.
pub(crate) struct Entry {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// See [`SEGMENTS`].
    memory: NonNull<u8>,
    payload_bytes: usize,
    queue: u16,
    /// Number of the request in the memory.
    commit_id: u64,
    /// The kernel has the memory.
    lent: bool,
}

// SAFETY: the memory belongs to the entry alone, and a ring may be used by any one thread at a time.
unsafe impl Send for Entry {}

impl Entry {
    /// Makes an entry of the queue of processor `queue`, for at most `payload_bytes` of data.
    ///
    /// # Errors
    /// Of making a ring: io_uring is missing, forbidden, or lacks commands of 128 bytes.
    pub(crate) fn new(queue: u16, payload_bytes: usize) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().build(2)?;
        let layout = layout(payload_bytes);
        // SAFETY: the layout has a page at least.
        let memory = NonNull::new(unsafe { alloc_zeroed(layout) });
        Ok(Self {
            ring,
            memory: memory.unwrap_or_else(|| handle_alloc_error(layout)),
            payload_bytes,
            queue,
            commit_id: 0,
            lent: false,
        })
    }

    /// Offers the entry to the mount of `device`, whose handshake has ended.
    ///
    /// # Errors
    /// Of submitting. That the kernel refuses is told by the first [`wait`](Self::wait).
    pub(crate) fn register(&mut self, device: &File) -> io::Result<()> {
        assert!(!self.lent);
        // SAFETY: segments and payload lie within the memory, aligned, and the kernel does not have it.
        let at = unsafe {
            let at = self.memory.add(SEGMENTS).cast::<[Segment; 2]>();
            at.write([
                Segment {
                    base: self.memory.as_ptr(),
                    len: size_of::<Head>(),
                },
                Segment {
                    base: self.memory.add(PAGE).as_ptr(),
                    len: self.payload_bytes,
                },
            ]);
            at.as_ptr()
        };
        self.push(device, REGISTER, 0, Some(at as u64))?;
        self.ring.submit().map(drop)
    }

    /// Replies to the request with `head` and the first `payload_len` bytes of the payload, once
    /// [`wait`](Self::wait) is called for the next one.
    ///
    /// # Errors
    /// None is expected: the ring has room for the one command.
    pub(crate) fn commit(&mut self, device: &File, head: &[u8], payload_len: usize) -> io::Result<()> {
        assert!(!self.lent && payload_len <= self.payload_bytes);
        // SAFETY: the kernel does not have the memory, and no reference to it is left: `Parts` borrows this
        // entry.
        let own = unsafe { self.memory.cast::<Head>().as_mut() };
        own.in_out[..head.len()].copy_from_slice(head);
        own.payload_len = payload_len as u32;
        self.push(device, COMMIT_AND_FETCH, self.commit_id, None)
    }

    /// Puts a command into the ring. `segments` is their address, for [`REGISTER`].
    fn push(&mut self, device: &File, command: u32, commit_id: u64, segments: Option<u64>) -> io::Result<()> {
        // `struct fuse_uring_cmd_req`.
        let mut request = [0; 80];
        request[8..16].copy_from_slice(&commit_id.to_ne_bytes());
        request[16..18].copy_from_slice(&self.queue.to_ne_bytes());
        let mut entry = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), command)
            .cmd(request)
            .addr(segments)
            .build();
        if segments.is_some() {
            // `len` of `struct io_uring_sqe`, which the library does not set for commands.
            const LEN: usize = 24;
            // SAFETY: `Entry128` is `repr(C)` and begins with the kernel's 64 bytes of a submission; `len`
            // is a `u32` in them, aligned.
            unsafe {
                std::ptr::from_mut(&mut entry)
                    .byte_add(LEN)
                    .cast::<u32>()
                    .write(2)
            };
        }
        self.lent = true;
        // SAFETY: the command names memory that is not freed while it is lent.
        unsafe { self.ring.submission().push(&entry) }
            .map_err(|_| io::Error::other("a ring of one entry is full"))
    }

    /// Waits for a request.
    ///
    /// # Errors
    /// What the kernel completed the command with: the mount has ended (`ENOTCONN`, `ECONNABORTED`), or the
    /// entry was refused.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        let result = loop {
            if let Some(completion) = self.ring.completion().next() {
                break completion.result();
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => return Err(error),
            }
        };
        self.lent = false;
        if result < 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        // SAFETY: the command has completed, so that the kernel does not have the memory.
        self.commit_id = unsafe { self.memory.cast::<Head>().as_ref() }.commit_id;
        Ok(())
    }

    /// Returns the request that [`wait`](Self::wait) has reported.
    pub(crate) fn parts(&mut self) -> Parts<'_> {
        assert!(!self.lent);
        // SAFETY: the kernel does not have the memory, this entry is borrowed for as long as the parts live,
        // and head and payload do not overlap.
        let (head, payload) = unsafe {
            let payload = self.memory.add(PAGE).as_ptr();
            (
                self.memory.cast::<Head>().as_ref(),
                std::slice::from_raw_parts_mut(payload, self.payload_bytes),
            )
        };
        Parts {
            head: &head.in_out,
            op: &head.op,
            len: (head.payload_len as usize).min(payload.len()),
            payload,
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // A command that is under way may still write: that memory is given up.
        if !self.lent {
            // SAFETY: allocated with this layout, and nobody else has it.
            unsafe { dealloc(self.memory.as_ptr(), layout(self.payload_bytes)) };
        }
    }
}

fn layout(payload_bytes: usize) -> Layout {
    Layout::from_size_align(PAGE + payload_bytes, PAGE).expect("an entry fits into memory")
}
