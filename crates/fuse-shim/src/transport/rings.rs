//! Requests by io_uring (Linux 6.14, where `/sys/module/fuse/parameters/enable_uring` is on): a queue for
//! each processor, from which threads on that processor take requests. One system call a request replies and
//! waits for the next, and no other processor is woken.
//!
//! A request waits for a free entry of its caller's processor, so a queue has as many entries, each with a
//! thread of its own, as requests may wait for leases there.

use super::Filesystem;
use super::dispatch::dispatch_entry;
use super::reply::PendingReply;
use super::wire::OutHeader;
use crate::sys::Entry;
use fuser::{InitFlags, KernelConfig};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use tracing::{debug, info, warn};
use zerocopy::IntoBytes;

/// Says whether the kernel offers it.
const ENABLED: &str = "/sys/module/fuse/parameters/enable_uring";
/// The processors that the kernel makes queues for.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// Entries of all queues, about; each queue has from [`DEPTH_MIN`] to [`DEPTH_MAX`].
const ENTRIES: usize = 64;
const DEPTH_MIN: usize = 4;
const DEPTH_MAX: usize = 8;

/// How the kernel's requests come to a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Read from `/dev/fuse`.
    Device,
    /// By io_uring.
    Rings,
}

/// Whether requests can come by io_uring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UringSupport {
    /// The kernel is older than Linux 6.14, or built without it.
    Missing,
    /// The kernel has it, but it is switched off.
    Off,
    /// The kernel has it, but a ring cannot be made: io_uring is forbidden here.
    Forbidden,
    /// Mounts use it.
    On,
}

/// Returns whether requests can come by io_uring on this machine.
#[must_use]
pub fn uring_support() -> UringSupport {
    match std::fs::read_to_string(ENABLED) {
        Err(_) => UringSupport::Missing,
        Ok(value) if !value.starts_with('Y') => UringSupport::Off,
        Ok(_) if Entry::new(0, 0).is_err() => UringSupport::Forbidden,
        Ok(_) => UringSupport::On,
    }
}

/// The entries of all queues. They are made before the handshake: once the kernel has been told to use
/// rings, it holds all requests back until they are there.
pub(crate) struct Rings {
    /// Taken by the threads that serve them.
    entries: Mutex<Vec<(u16, Entry)>>,
    data_max: usize,
    negotiated: AtomicBool,
}

/// Returns the number of processors in a list as `0-3` or `0`; `None` if it does not begin with 0 and has no
/// gap.
fn count(list: &str) -> Option<u16> {
    let last = match list.trim().split_once('-') {
        Some(("0", last)) => last.parse().ok()?,
        None if list.trim() == "0" => 0,
        _ => return None,
    };
    u16::checked_add(last, 1)
}

fn make(data_max: usize) -> io::Result<Vec<(u16, Entry)>> {
    if !std::fs::read_to_string(ENABLED)?.starts_with('Y') {
        return Err(io::Error::other("switched off in the kernel"));
    }
    let queues = count(&std::fs::read_to_string(POSSIBLE)?)
        .ok_or_else(|| io::Error::other("the list of processors has gaps"))?;
    let depth = (ENTRIES / usize::from(queues)).clamp(DEPTH_MIN, DEPTH_MAX);
    let each = (0..queues).flat_map(|queue| std::iter::repeat_n(queue, depth));
    each.map(|queue| Ok((queue, Entry::new(queue, data_max)?)))
        .collect()
}

impl Rings {
    /// Makes the entries, of `data_max` bytes of data each; none if the kernel has no use for them.
    pub(crate) fn prepare(data_max: usize) -> Self {
        let entries = make(data_max).unwrap_or_else(|error| {
            debug!(%error, "requests do not come by io_uring");
            Vec::new()
        });
        Self {
            entries: Mutex::new(entries),
            ..Self::none(data_max)
        }
    }

    /// No entries: all requests of at most `data_max` bytes of data come from the device.
    pub(crate) const fn none(data_max: usize) -> Self {
        Self {
            entries: Mutex::new(Vec::new()),
            data_max,
            negotiated: AtomicBool::new(false),
        }
    }

    pub(super) const fn data_max(&self) -> usize {
        self.data_max
    }

    /// Tells the kernel to use rings, if there are some.
    pub(super) fn negotiate(&self, config: &mut KernelConfig) {
        if self.entries.lock().is_empty() {
            return;
        }
        let offered = config.add_capabilities(InitFlags::FUSE_OVER_IO_URING).is_ok();
        self.negotiated.store(offered, Ordering::Relaxed);
    }

    pub(super) fn transport(&self) -> Transport {
        if self.negotiated.load(Ordering::Relaxed) {
            Transport::Rings
        } else {
            Transport::Device
        }
    }

    /// Starts a thread for each entry, if the kernel uses them, and waits until all are registered.
    ///
    /// # Errors
    /// Of starting threads and of submitting. The kernel may then hold back all requests, so that the mount
    /// has to end.
    pub(super) fn start<F: Filesystem>(
        &self,
        fs: &Arc<F>,
        device: &File,
    ) -> io::Result<Vec<JoinHandle<io::Result<()>>>> {
        let entries = std::mem::take(&mut *self.entries.lock());
        if self.transport() == Transport::Device {
            return Ok(Vec::new());
        }
        info!(entries = entries.len(), "requests come by io_uring");
        let mut threads = Vec::with_capacity(entries.len());
        let (registered, outcomes) = mpsc::channel();
        for (number, (queue, entry)) in entries.into_iter().enumerate() {
            let (fs, device, registered) = (Arc::clone(fs), device.try_clone()?, registered.clone());
            let thread = std::thread::Builder::new()
                .name(format!("varve-ring-{number}"))
                .spawn(move || serve(&*fs, &device, queue, entry, registered))?;
            threads.push(thread);
        }
        drop(registered);
        outcomes.iter().collect::<io::Result<()>>()?;
        Ok(threads)
    }
}

/// Answers the requests of one entry, until the mount ends.
fn serve(
    fs: &impl Filesystem,
    device: &File,
    queue: u16,
    mut entry: Entry,
    registered: mpsc::Sender<io::Result<()>>,
) -> io::Result<()> {
    let mut here = rustix::thread::CpuSet::new();
    here.set(usize::from(queue));
    // Elsewhere it only costs time.
    let _ = rustix::thread::sched_setaffinity(None, &here);
    // Requests are copied in the context of the thread that registers.
    let _ = registered.send(entry.register(device));
    drop(registered);
    let answer = RefCell::new(PendingReply::default());
    loop {
        if let Err(error) = entry.wait() {
            if !matches!(
                error.raw_os_error(),
                Some(libc::ENOTCONN | libc::ECONNABORTED | libc::ECANCELED)
            ) {
                // If it is of the registration, the kernel uses the device for all requests.
                warn!(queue, %error, "an entry for requests by io_uring ends");
            }
            return Ok(());
        }
        let unique = dispatch_entry(fs, entry.parts(), &answer);
        reply(&mut entry, device, unique, &mut answer.borrow_mut())?;
    }
}

/// Sends the reply to the request `unique`, and empties it for the next one.
fn reply(entry: &mut Entry, device: &File, unique: u64, answer: &mut PendingReply) -> io::Result<()> {
    let mut len = answer.in_place;
    if !answer.bytes.is_empty() {
        len = answer.bytes.len();
        entry.parts().payload[..len].copy_from_slice(&answer.bytes);
    }
    let head = OutHeader {
        len: (size_of::<OutHeader>() + len) as u32,
        error: -answer.error,
        unique,
    };
    answer.error = 0;
    answer.in_place = 0;
    answer.bytes.clear();
    entry.commit(device, head.as_bytes(), len)
}

#[cfg(test)]
mod tests {
    use super::count;

    #[test]
    fn processors_are_counted() {
        let lists = [
            ("0\n", Some(1)),
            ("0-127\n", Some(128)),
            ("1-3", None),
            ("0-1,4", None),
            ("", None),
        ];
        for (list, processors) in lists {
            assert_eq!(count(list), processors, "{list}");
        }
    }
}
