//! A log of an earlier daemon, read by system calls: its client may have truncated or extended the file
//! beyond what any daemon does, may still do so, and must not keep a daemon from starting. Interprets no
//! entry.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use varve_media::{DeviceInfo, DeviceName, DeviceState, MediaError, MediumKind, Region};

/// A log that is only read. Missing bytes read as zeros: no entries.
pub(super) struct LeftLog {
    name: DeviceName,
    file: File,
    len_bytes: u64,
}

impl LeftLog {
    /// Opens a copy of a log.
    ///
    /// # Errors
    /// Of open and stat.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let len_bytes = file.metadata()?.len();
        Ok(Self {
            name: DeviceName::from(path),
            file,
            len_bytes,
        })
    }

    fn read_only<T>(&self) -> Result<T, MediaError> {
        Err(MediaError::ReadOnly {
            device: self.name.clone(),
        })
    }
}

impl Region for LeftLog {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read(&self, off: u64, out: &mut [u8]) -> Result<(), MediaError> {
        let len = out.len() as u64;
        if off.checked_add(len).is_none_or(|end| end > self.len_bytes) {
            return Err(MediaError::OutOfRange {
                device: self.name.clone(),
                off,
                len,
                size_bytes: self.len_bytes,
            });
        }
        let mut done = 0;
        while done < out.len() {
            match self.file.read_at(&mut out[done..], off + done as u64) {
                Ok(0) => {
                    out[done..].fill(0);
                    break;
                }
                Ok(n) => done += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(MediaError::Io {
                        device: self.name.clone(),
                        op: "read",
                        off,
                        len,
                        errno: error.raw_os_error().unwrap_or(libc::EIO),
                    });
                }
            }
        }
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), MediaError> {
        self.read_only()
    }

    fn write_crc(&self, _: u64, _: &[u8], _: u32) -> Result<u32, MediaError> {
        self.read_only()
    }

    fn fence(&self) -> Result<(), MediaError> {
        Ok(())
    }

    fn sync(&self, _: u64, _: u64) -> Result<(), MediaError> {
        Ok(())
    }

    fn grow(&self, _: u64) -> Result<(), MediaError> {
        self.read_only()
    }

    fn allocate(&self, _: u64, _: u64) -> Result<(), MediaError> {
        self.read_only()
    }

    fn state(&self) -> DeviceState {
        DeviceState::Ok
    }

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name.clone(),
            kind: MediumKind::LiveLog,
            backend: "a log of an earlier daemon".into(),
        }
    }
}
