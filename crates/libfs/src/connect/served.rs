//! The log of a session that has no backing file of its own: stored to by this process, made durable by the
//! daemon. Knows nothing of entries.

use std::ptr::NonNull;
use std::sync::Arc;
use varve_ipc::{IpcError, Link, Request, SYNC_RANGES_MAX};
use varve_media::{DeviceInfo, DeviceState, MappedRegion, MediaError, MediumKind, Region};

/// A mapped log, and the link to the daemon that makes it durable.
pub(super) struct ServedLog {
    log: MappedRegion,
    link: Arc<dyn Link>,
}

impl ServedLog {
    /// The log of the session at the other end of `link`.
    pub(super) fn new(log: MappedRegion, link: Arc<dyn Link>) -> Self {
        Self { log, link }
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
        self.log.fence()?;
        let ranges: Vec<_> = ranges.iter().copied().filter(|(_, len)| *len > 0).collect();
        ranges.chunks(SYNC_RANGES_MAX).try_for_each(|some| self.ask(some))
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
        DeviceInfo {
            kind: MediumKind::File,
            ..self.log.info()
        }
    }
}
