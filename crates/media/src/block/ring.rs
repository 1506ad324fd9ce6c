//! The submission side of io_uring: several requests on one file in flight at once, by the best ring that the
//! kernel gives. Knows descriptors and buffers; its users (`file.rs`, `ng`) know the meaning of a request,
//! and the fallback without io_uring.
//!
//! Each thread has a ring of its own for each file, made when first needed: the kernel can be told that only
//! one thread submits to such a ring. A ring is dropped with its thread or its file, whichever ends first.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::lock::Mutex;
use io_uring::cqueue::{self, EntryMarker as CompletionMarker};
use io_uring::squeue::{self, EntryMarker as SubmissionMarker};
use io_uring::{IoUring, opcode, types};

use crate::aligned::AlignedBuf;

/// Requests in flight on one ring.
const DEPTH: usize = 32;
/// Requests up to this length go through buffers that the kernel has pinned once: a copy instead of pinning
/// pages.
pub(super) const FIXED_BYTES: usize = 16 << 10;

/// An operation on bytes that are lent until the run ends.
pub(super) struct Request {
    address: *mut u8,
    /// Bytes.
    pub len: usize,
    /// Offset in the file.
    pub off: u64,
    /// For the protocol's use.
    pub kind: Kind,
    /// Bytes transferred so far.
    done: usize,
}

/// Kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    /// Bypasses the device's cache. Not with [`Plain`].
    WriteDurable,
    /// Carries no bytes. Not with [`Plain`].
    Flush,
    /// The bytes are this number of ranges. Not with [`Plain`].
    Deallocate(u32),
}

impl Request {
    pub(super) fn read(off: u64, out: &mut [u8]) -> Self {
        Self {
            address: out.as_mut_ptr(),
            len: out.len(),
            off,
            kind: Kind::Read,
            done: 0,
        }
    }

    /// Any kind but a read: the bytes are only read from.
    pub(super) fn write(off: u64, src: &[u8], kind: Kind) -> Self {
        assert!(kind != Kind::Read);
        Self {
            address: src.as_ptr().cast_mut(),
            len: src.len(),
            off,
            kind,
            done: 0,
        }
    }
}

/// How a request becomes an entry, and how a completion is read. Implemented in this module only: entries
/// carry pointers.
pub(super) trait Protocol: Send + Sync + 'static {
    type Submission: SubmissionMarker;
    type Completion: CompletionMarker;

    /// Builds the entry for bytes at `address`, which lie `done` bytes into the request; `fixed`: within the
    /// registered buffer.
    fn entry(&self, request: &Request, address: *mut u8, left: usize, fixed: bool) -> Self::Submission;

    /// Sets the index that comes back with the completion.
    fn tag(entry: Self::Submission, index: usize) -> Self::Submission;

    /// Returns the index set by `tag`, and the result.
    fn result(completion: &Self::Completion) -> (usize, i32);

    /// Returns the number of bytes that a result stands for.
    ///
    /// # Errors
    /// The error in the result.
    fn transferred(&self, request: &Request, result: i32) -> io::Result<usize>;
}

/// Reads and writes of a file or block device.
pub(super) struct Plain;

impl Protocol for Plain {
    type Submission = squeue::Entry;
    type Completion = cqueue::Entry;

    fn entry(&self, request: &Request, address: *mut u8, left: usize, fixed: bool) -> squeue::Entry {
        let left = u32::try_from(left).unwrap_or(1 << 30);
        let (file, off) = (types::Fixed(0), request.off + request.done as u64);
        match (request.kind != Kind::Read, fixed) {
            (true, true) => opcode::WriteFixed::new(file, address, left, 0)
                .offset(off)
                .build(),
            (true, false) => opcode::Write::new(file, address, left).offset(off).build(),
            (false, true) => opcode::ReadFixed::new(file, address, left, 0).offset(off).build(),
            (false, false) => opcode::Read::new(file, address, left).offset(off).build(),
        }
    }

    fn tag(entry: squeue::Entry, index: usize) -> squeue::Entry {
        entry.user_data(index as u64)
    }

    fn result(completion: &cqueue::Entry) -> (usize, i32) {
        (completion.user_data() as usize, completion.result())
    }

    fn transferred(&self, request: &Request, result: i32) -> io::Result<usize> {
        match result {
            0 if request.kind != Kind::Read => Err(io::Error::from_raw_os_error(libc::EIO)),
            n if n >= 0 => Ok(n as usize),
            n => Err(io::Error::from_raw_os_error(-n)),
        }
    }
}

/// An NVMe command as the kernel passes it on, `struct nvme_uring_cmd` of `linux/nvme_ioctl.h`, without its
/// address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NvmeCommand {
    pub opcode: u8,
    pub nsid: u32,
    /// Double words 10 to 15.
    pub dwords: [u32; 6],
}

impl NvmeCommand {
    /// Returns the 80 bytes of the command in an entry; a time limit of 0 is the kernel's own.
    pub(super) fn bytes(&self, address: u64, len: u32) -> [u8; 80] {
        let mut out = [0; 80];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[self.opcode]);
        put(4, &self.nsid.to_ne_bytes());
        put(24, &address.to_ne_bytes());
        put(36, &len.to_ne_bytes());
        for (index, dword) in self.dwords.iter().enumerate() {
            put(40 + 4 * index, &dword.to_ne_bytes());
        }
        out
    }
}

/// `_IOWR('N', 0x80, struct nvme_uring_cmd)`.
const NVME_URING_CMD_IO: u32 = 0xc048_4e80;

/// Commands passed through to a namespace. Each request is one command.
pub(super) struct Passthrough {
    /// Builds the command for a request.
    pub command: Box<dyn Fn(&Request) -> NvmeCommand + Send + Sync>,
    /// Turns the status of a completion into an error.
    pub status: fn(u16) -> io::Error,
}

impl Protocol for Passthrough {
    type Submission = squeue::Entry128;
    type Completion = cqueue::Entry32;

    fn entry(&self, request: &Request, address: *mut u8, left: usize, fixed: bool) -> squeue::Entry128 {
        let command = (self.command)(request);
        // No command has more bytes than a device's limit, which is far below 4 GiB.
        let bytes = command.bytes(address as u64, left as u32);
        opcode::UringCmd80::new(types::Fixed(0), NVME_URING_CMD_IO)
            .cmd(bytes)
            .buf_index(fixed.then_some(0))
            .build()
    }

    fn tag(entry: squeue::Entry128, index: usize) -> squeue::Entry128 {
        entry.user_data(index as u64)
    }

    fn result(completion: &cqueue::Entry32) -> (usize, i32) {
        (completion.user_data() as usize, completion.result())
    }

    fn transferred(&self, request: &Request, result: i32) -> io::Result<usize> {
        match result {
            0 => Ok(request.len),
            // A status of the device, or an errno of the kernel.
            n if n > 0 => Err((self.status)(n as u16)),
            n => Err(io::Error::from_raw_os_error(-n)),
        }
    }
}

/// Features of a ring. Each is used where the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// Completions are polled for on the device; no interrupt.
    pub polled: bool,
    /// The kernel is told that one thread submits, and does its work when that thread waits.
    pub single_issuer: bool,
    /// A buffer is pinned once.
    pub fixed_buffer: bool,
}

/// A ring, with the file registered as its first.
struct Ring<P: Protocol> {
    ring: IoUring<P::Submission, P::Completion>,
    /// Registered as the ring's first buffer, cut in [`DEPTH`] slots. Declared after the ring, so that it is
    /// dropped after it.
    fixed: Option<AlignedBuf>,
}

impl<P: Protocol> Ring<P> {
    fn new(file: RawFd, plan: Plan) -> io::Result<Self> {
        let mut builder = IoUring::<P::Submission, P::Completion>::builder();
        builder.dontfork();
        if plan.polled {
            builder.setup_iopoll();
        }
        if plan.single_issuer {
            builder.setup_single_issuer();
            if !plan.polled {
                builder.setup_defer_taskrun();
            }
        }
        let ring = builder.build(DEPTH as u32)?;
        ring.submitter().register_files(&[file])?;
        let mut fixed = None;
        if plan.fixed_buffer {
            let mut buf = AlignedBuf::new(DEPTH * FIXED_BYTES);
            let bytes = buf.bytes_mut();
            let part = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            // SAFETY: the buffer lives in the returned value beside the ring and is dropped after it; nothing
            // refers to its bytes while a request is in flight, `run` copies before and after.
            unsafe { ring.submitter().register_buffers(&[part]) }?;
            fixed = Some(buf);
        }
        Ok(Self { ring, fixed })
    }

    /// Runs all requests and waits for them, continuing short ones. A read past the end of the file leaves
    /// zeros.
    fn run(&mut self, protocol: &P, requests: &mut [Request]) -> io::Result<()> {
        let mut ready: Vec<usize> = (0..requests.len())
            .rev()
            .filter(|at| requests[*at].len > 0 || requests[*at].kind == Kind::Flush)
            .collect();
        // The request in each slot.
        let mut slots: [Option<usize>; DEPTH] = [None; DEPTH];
        let mut in_flight = 0;
        let mut failed: Option<io::Error> = None;
        loop {
            while failed.is_none() && in_flight < DEPTH {
                let Some(index) = ready.pop() else { break };
                let Some(slot) = slots.iter().position(Option::is_none) else {
                    unreachable!("as many slots as requests in flight")
                };
                slots[slot] = Some(index);
                self.push(protocol, slot, &requests[index]);
                in_flight += 1;
                let end = requests[index].off + requests[index].len as u64;
                if ready.last().is_none_or(|next| requests[*next].off != end) {
                    // At once, not with the rest in the call that waits: so the device has begun with this one.
                    // But neighbours go in together, as the kernel makes one transfer of them. An error is met
                    // again in that call.
                    let _ = self.ring.submit();
                }
            }
            if in_flight == 0 {
                return failed.map_or(Ok(()), Err);
            }
            // The buffers are lent to the kernel: on any error, this still waits until nothing is in flight.
            if let Err(error) = self.ring.submit_and_wait(1)
                && !matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                )
            {
                failed.get_or_insert(error);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let ended: Vec<(usize, i32)> = self.ring.completion().map(|entry| P::result(&entry)).collect();
            for (slot, result) in ended {
                let Some(index) = slots.get_mut(slot).and_then(Option::take) else {
                    unreachable!("the kernel gives back what it was given")
                };
                in_flight -= 1;
                match self.settle(protocol, slot, &mut requests[index], result) {
                    Ok(true) => {}
                    Ok(false) => ready.push(index),
                    Err(error) => {
                        failed.get_or_insert(error);
                    }
                }
            }
        }
    }

    /// Returns the slot's part of the registered buffer, if the rest of the request goes through it.
    fn fixed_slot(&mut self, slot: usize, request: &Request) -> Option<&mut [u8]> {
        let left = request.len - request.done;
        let buf = self.fixed.as_mut().filter(|_| left > 0 && left <= FIXED_BYTES)?;
        Some(&mut buf.bytes_mut()[slot * FIXED_BYTES..][..left])
    }

    /// Queues the rest of a request.
    fn push(&mut self, protocol: &P, slot: usize, request: &Request) {
        let left = request.len - request.done;
        let from = request.address.wrapping_add(request.done);
        let (address, fixed) = match self.fixed_slot(slot, request) {
            Some(bytes) => {
                if request.kind != Kind::Read {
                    // SAFETY: the rest of the request's own buffer, which the caller lends for this run; the
                    // slot is another buffer.
                    unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), bytes.as_mut_ptr(), left) };
                }
                (bytes.as_mut_ptr(), true)
            }
            None => (from, false),
        };
        let entry = P::tag(protocol.entry(request, address, left, fixed), slot);
        // SAFETY: `address..address + left` lies in the buffer that the request borrows (for writing if it is
        // a read) or in the slot; `run` does not return while the request is in flight, and the file is open
        // as long as its owner, which calls it.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(pushed.is_ok(), "no more than DEPTH requests are ever queued");
    }

    /// Handles a completion. `Ok(true)`: the request is finished.
    fn settle(&mut self, protocol: &P, slot: usize, request: &mut Request, result: i32) -> io::Result<bool> {
        if -result == libc::EINTR || -result == libc::EAGAIN {
            return Ok(false);
        }
        let n = protocol
            .transferred(request, result)?
            .min(request.len - request.done);
        let left = request.len - request.done;
        let to = request.address.wrapping_add(request.done);
        if request.kind == Kind::Read {
            if let Some(bytes) = self.fixed_slot(slot, request) {
                // SAFETY: `n` bytes of the rest of the request's own buffer, which the caller lends for
                // writing; the slot is another buffer.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, n) };
            }
            if n == 0 && left > 0 {
                // SAFETY: the rest of the read's own buffer, which the kernel has given back.
                unsafe { std::ptr::write_bytes(to, 0, left) };
                request.done = request.len;
                return Ok(true);
            }
        }
        request.done += n;
        Ok(request.done == request.len)
    }
}

/// A thread, as the owner of rings.
struct Thread {
    number: u64,
    /// Files that may have a ring of this thread.
    files: RefCell<Vec<Weak<dyn Forget>>>,
}

/// An object that holds rings of threads.
trait Forget {
    fn forget(&self, thread: u64);
}

impl Thread {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            files: RefCell::default(),
        }
    }

    fn remember(&self, file: Weak<dyn Forget>) {
        let mut files = self.files.borrow_mut();
        files.retain(|file| file.strong_count() > 0);
        files.push(file);
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        for file in self.files.get_mut().iter().filter_map(Weak::upgrade) {
            file.forget(self.number);
        }
    }
}

thread_local! {
    static THREAD: Thread = Thread::new();
}

/// State that the rings of all threads for one file share.
struct Shared<P: Protocol> {
    /// Open as long as the owner of [`Rings`].
    file: RawFd,
    plan: Plan,
    protocol: P,
    /// Idle rings by their thread. A thread takes its own out, so the lock is held for a moment only.
    rings: Mutex<HashMap<u64, Ring<P>>>,
}

impl<P: Protocol> Forget for Shared<P> {
    fn forget(&self, thread: u64) {
        self.rings.lock().remove(&thread);
    }
}

/// The rings of one file, dropped with it.
pub(super) struct Rings<P: Protocol>(Arc<Shared<P>>);

impl<P: Protocol> Rings<P> {
    /// Finds out which rings the kernel gives for a file, which must stay open as long as this value.
    /// `polled`: its driver has queues for polling.
    ///
    /// # Errors
    /// No io_uring, or it does not know one of `opcodes`.
    pub(super) fn probe(file: RawFd, polled: bool, protocol: P, opcodes: &[u8]) -> io::Result<Self> {
        let ring = IoUring::new(2)?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !opcodes.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let mut last = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        for (single_issuer, fixed_buffer) in [(true, true), (true, false), (false, true), (false, false)] {
            let plan = Plan {
                polled,
                single_issuer,
                fixed_buffer,
            };
            // Made and dropped again: the rings in use belong to the threads that use them.
            match Ring::<P>::new(file, plan) {
                Ok(_) => {
                    return Ok(Self(Arc::new(Shared {
                        file,
                        plan,
                        protocol,
                        rings: Mutex::default(),
                    })));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(super) fn plan(&self) -> Plan {
        self.0.plan
    }

    /// Runs all requests on this thread's ring and waits for them.
    ///
    /// # Errors
    /// The first error; the other requests have ended, too, when this returns.
    pub(super) fn run(&self, requests: &mut [Request]) -> io::Result<()> {
        let thread = THREAD.with(|thread| thread.number);
        let idle = self.0.rings.lock().remove(&thread);
        let mut ring = match idle {
            Some(ring) => ring,
            None => {
                let ring = Ring::new(self.0.file, self.0.plan)?;
                let own: Arc<dyn Forget> = self.0.clone();
                THREAD.with(|thread| thread.remember(Arc::downgrade(&own)));
                ring
            }
        };
        let result = ring.run(&self.0.protocol, requests);
        self.0.rings.lock().insert(thread, ring);
        result
    }
}

impl std::fmt::Display for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = vec!["registered file"];
        if self.fixed_buffer {
            parts.push("registered buffers");
        }
        if self.single_issuer {
            parts.push("single issuer");
        }
        if self.polled {
            parts.push("polled");
        }
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::NvmeCommand;

    #[test]
    fn command_lies_where_the_kernel_looks_for_it() {
        let command = NvmeCommand {
            opcode: 2,
            nsid: 1,
            dwords: [10, 11, 12, 13, 14, 15],
        };
        let bytes = command.bytes(0x1122, 0x33);
        assert_eq!((bytes[0], bytes[4], bytes[24], bytes[25]), (2, 1, 0x22, 0x11));
        assert_eq!((bytes[36], bytes[40], bytes[60]), (0x33, 10, 15));
        assert_eq!(bytes[64..], [0; 16]);
    }
}
