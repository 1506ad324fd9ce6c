//! The log of a session: stored to by this process, made durable by the daemon. Without a backing file always; with
//! one for the first time only, when the daemon gives that file a durable name. Knows nothing of entries.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use varve_ipc::{IpcError, Link, Request, SYNC_RANGES_MAX};
use varve_media::{DeviceInfo, DeviceState, MappedRegion, MediaError, MediumKind, Region};

/// A mapped log, and the link to the daemon that makes it durable.
pub(super) struct ServedLog {
    log: Arc<dyn Region>,
    link: Arc<dyn Link>,
    /// The log has a backing file, which this process writes from the second sync on.
    backed: bool,
    /// The daemon has made the file's name and header durable.
    named: AtomicBool,
}

/// Lets the daemon make a log durable for the first time, and this process later: the log of the session at the
/// other end of `link`, which can make it durable by itself, but not its name.
#[must_use]
pub fn named_by_daemon(log: Arc<dyn Region>, link: Arc<dyn Link>) -> Arc<dyn Region> {
    Arc::new(ServedLog {
        log,
        link,
        backed: true,
        named: AtomicBool::new(false),
    })
}

impl ServedLog {
    /// The log of the session at the other end of `link`, which has no backing file here.
    pub(super) fn new(log: MappedRegion, link: Arc<dyn Link>) -> Self {
        Self {
            log: Arc::new(log),
            link,
            backed: false,
            named: AtomicBool::new(false),
        }
    }

    /// Whether this process may make ranges durable by itself.
    fn is_own(&self) -> bool {
        self.backed && self.named.load(Ordering::Acquire)
    }

    /// Has the daemon make ranges durable.
    fn ask(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        let request = Request::SyncLog {
            ranges: ranges.to_vec(),
        };
        let errno = match self.link.call(request) {
            Ok(_) => return Ok(()),
            Err(IpcError::Errno(errno)) => errno,
            // The caller finds out whether its operation goes on in another session.
            Err(IpcError::Sealed | IpcError::Gone(_) | IpcError::Forward | IpcError::Protocol(_)) => {
                libc::EIO
            }
        };
        let device = self.log.info().name;
        let (off, len) = ranges.first().copied().unwrap_or_default();
        Err(match errno {
            libc::ENOSPC => MediaError::NoSpace { device, off, len },
            errno => MediaError::Io {
                device,
                op: "durable write by the daemon",
                off,
                len,
                errno,
            },
        })
    }
}

impl Region for ServedLog {
    fn len_bytes(&self) -> u64 {
        self.log.len_bytes()
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.log.read(off, out)
    }

    fn read_shared(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        self.log.read_shared(off, out)
    }

    fn write(&self, off: u64, src: &[u8]) -> Result<(), MediaError> {
        self.log.write(off, src)
    }

    fn write_crc(&self, off: u64, src: &[u8], seed: u32) -> Result<u32, MediaError> {
        self.log.write_crc(off, src, seed)
    }

    fn fence(&self) -> Result<(), MediaError> {
        self.log.fence()
    }

    fn retire(&self) {
        self.log.retire();
    }

    fn sync(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.sync_all(&[(off, len)])
    }

    fn sync_all(&self, ranges: &[(u64, u64)]) -> Result<(), MediaError> {
        if self.is_own() {
            return self.log.sync_all(ranges);
        }
        self.log.fence()?;
        let ranges: Vec<_> = ranges.iter().copied().filter(|(_, len)| *len > 0).collect();
        ranges
            .chunks(SYNC_RANGES_MAX)
            .try_for_each(|some| self.ask(some))?;
        if !ranges.is_empty() {
            self.named.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn prepare(&self, off: u64, len: u64) -> Result<(), MediaError> {
        match self.is_own() {
            true => self.log.prepare(off, len),
            false => Ok(()),
        }
    }

    fn grow(&self, new_len: u64) -> Result<(), MediaError> {
        self.log.grow(new_len)
    }

    fn allocate(&self, off: u64, len: u64) -> Result<(), MediaError> {
        self.log.allocate(off, len)
    }

    fn as_ptr(&self) -> Option<NonNull<u8>> {
        self.log.as_ptr()
    }

    fn state(&self) -> DeviceState {
        self.log.state()
    }

    /// As the mapped memory, but of the kind of the backing file, which the daemon syncs.
    fn info(&self) -> DeviceInfo {
        let info = self.log.info();
        match self.backed {
            true => info,
            false => DeviceInfo {
                kind: MediumKind::File,
                ..info
            },
        }
    }
}
