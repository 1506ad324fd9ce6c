//! The submission side of io_uring: several transfers of one file in flight at once. Knows descriptors and buffers; what a
//! failure means, and what happens without io_uring, is `block.rs`'s.

use std::io;
use std::os::fd::RawFd;

use io_uring::{IoUring, opcode, types};
use parking_lot::Mutex;

/// Requests in flight on one ring.
const DEPTH: usize = 32;
/// Idle rings kept for reuse; more threads at once make rings of their own.
const IDLE_RINGS_MAX: usize = 4;

/// One transfer: filled, or written, from `done` on.
pub(crate) enum Transfer<'a> {
    Read { off: u64, out: &'a mut [u8] },
    Write { off: u64, src: &'a [u8] },
}

/// A transfer reduced to what the kernel is told, with its progress.
struct Slot {
    address: *mut u8,
    len: usize,
    off: u64,
    done: usize,
    write: bool,
}

/// A few rings, made when first needed.
pub(crate) struct Rings(Mutex<Vec<IoUring>>);

impl Rings {
    /// `None` if the kernel (or its policy) has no io_uring.
    pub(crate) fn probe() -> Option<Self> {
        let ring = IoUring::new(DEPTH as u32).ok()?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe).ok()?;
        let able = probe.is_supported(opcode::Read::CODE) && probe.is_supported(opcode::Write::CODE);
        able.then(|| Self(Mutex::new(vec![ring])))
    }

    /// Runs all transfers and waits for them, going on with those that were short. A read past the end of the file leaves zeros.
    ///
    /// # Errors
    /// The first error; the other transfers have ended, too, when this returns.
    pub(crate) fn run(&self, file: RawFd, transfers: &mut [Transfer<'_>]) -> io::Result<()> {
        let idle = self.0.lock().pop();
        let mut ring = match idle {
            Some(ring) => ring,
            None => IoUring::new(DEPTH as u32)?,
        };
        let result = drive(&mut ring, file, transfers);
        let mut idle = self.0.lock();
        if idle.len() < IDLE_RINGS_MAX {
            idle.push(ring);
        }
        result
    }
}

fn drive(ring: &mut IoUring, file: RawFd, transfers: &mut [Transfer<'_>]) -> io::Result<()> {
    let mut slots: Vec<Slot> = transfers
        .iter_mut()
        .map(|transfer| match transfer {
            Transfer::Read { off, out } => Slot {
                address: out.as_mut_ptr(),
                len: out.len(),
                off: *off,
                done: 0,
                write: false,
            },
            Transfer::Write { off, src } => Slot {
                address: src.as_ptr().cast_mut(),
                len: src.len(),
                off: *off,
                done: 0,
                write: true,
            },
        })
        .filter(|slot| slot.len > 0)
        .collect();
    let mut ready: Vec<usize> = (0..slots.len()).rev().collect();
    let mut in_flight = 0;
    let mut failed: Option<io::Error> = None;
    loop {
        while failed.is_none() && in_flight < DEPTH {
            let Some(index) = ready.pop() else { break };
            push(ring, file, index, &slots[index]);
            in_flight += 1;
        }
        if in_flight == 0 {
            return failed.map_or(Ok(()), Err);
        }
        // The buffers are lent to the kernel: whatever happens, this waits until nothing is in flight any more.
        if let Err(error) = ring.submit_and_wait(1)
            && !matches!(
                error.raw_os_error(),
                Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
            )
        {
            failed.get_or_insert(error);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for completion in ring.completion() {
            in_flight -= 1;
            let index = completion.user_data() as usize;
            match settle(&mut slots[index], completion.result()) {
                Ok(true) => {}
                Ok(false) => ready.push(index),
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
    }
}

/// Queues what is left of a slot.
fn push(ring: &mut IoUring, file: RawFd, index: usize, slot: &Slot) {
    let left = u32::try_from(slot.len - slot.done).unwrap_or(1 << 30);
    let (address, off) = (slot.address.wrapping_add(slot.done), slot.off + slot.done as u64);
    let entry = if slot.write {
        opcode::Write::new(types::Fd(file), address.cast_const(), left)
            .offset(off)
            .build()
    } else {
        opcode::Read::new(types::Fd(file), address, left)
            .offset(off)
            .build()
    };
    let entry = entry.user_data(index as u64);
    // SAFETY: `address..address + left` lies in the buffer that the transfer borrows, for writing if it is a read; `drive` does
    // not return while the request is in flight, and the file is open as long as its owner, which calls it.
    let pushed = unsafe { ring.submission().push(&entry) };
    assert!(pushed.is_ok(), "no more than DEPTH requests are ever queued");
}

/// Takes a completion in. `Ok(true)`: the slot is finished.
fn settle(slot: &mut Slot, result: i32) -> io::Result<bool> {
    match result {
        0 if slot.write => Err(io::Error::from_raw_os_error(libc::EIO)),
        0 => {
            // SAFETY: the rest of the read's own buffer, which the kernel has given back.
            unsafe { std::ptr::write_bytes(slot.address.add(slot.done), 0, slot.len - slot.done) };
            Ok(true)
        }
        n if n > 0 => {
            slot.done = (slot.done + n as usize).min(slot.len);
            Ok(slot.done == slot.len)
        }
        n if -n == libc::EINTR || -n == libc::EAGAIN => Ok(false),
        n => Err(io::Error::from_raw_os_error(-n)),
    }
}
