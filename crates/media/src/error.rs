//! The one error of this crate. Knows devices, offsets and errno; callers decide how to react.

use std::fmt;
use std::io;
use std::sync::Arc;

/// A person's name for a device: a path, or a name given at construction. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceName(Arc<str>);

impl DeviceName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for DeviceName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl From<String> for DeviceName {
    fn from(name: String) -> Self {
        Self(name.into())
    }
}

impl From<&std::path::Path> for DeviceName {
    fn from(path: &std::path::Path) -> Self {
        Self(path.to_string_lossy().into())
    }
}

/// A failure of a medium or of a call to it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum MediaError {
    /// The range passes the end of the device. Nothing was read or written.
    #[error("{device}: bytes {off}..+{len} lie outside of its {size_bytes} bytes")]
    OutOfRange {
        /// The device.
        device: DeviceName,
        /// First byte asked for.
        off: u64,
        /// Bytes asked for.
        len: u64,
        /// The device's length.
        size_bytes: u64,
    },
    /// A write to a block device that does not begin and end on its blocks. Nothing was written.
    #[error("{device}: write of bytes {off}..+{len} is not made of whole {block_bytes}-byte blocks")]
    Misaligned {
        /// The device.
        device: DeviceName,
        /// First byte.
        off: u64,
        /// Length in bytes.
        len: u64,
        /// The unit that was wanted.
        block_bytes: u64,
    },
    /// The host has no space for the range. Does not latch: the same call may succeed later.
    #[error("{device}: no space on the host for bytes {off}..+{len}; free some space there and try again")]
    NoSpace {
        /// The device.
        device: DeviceName,
        /// First byte.
        off: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The device or its file system answered with an error.
    #[error("{device}: {op} of bytes {off}..+{len} failed: {}", io::Error::from_raw_os_error(*errno))]
    Io {
        /// The device.
        device: DeviceName,
        /// The operation: "read", "write", "flush", …
        op: &'static str,
        /// First byte.
        off: u64,
        /// Length in bytes.
        len: u64,
        /// The host's errno.
        errno: i32,
    },
    /// An earlier error has latched the device; nothing more is written to it.
    #[error("{device}: out of service since an earlier error: {reason}")]
    Failed {
        /// The device.
        device: DeviceName,
        /// The first error.
        reason: Arc<str>,
    },
    /// The region was opened for reading only.
    #[error("{device}: is open for reading only")]
    ReadOnly {
        /// The device.
        device: DeviceName,
    },
    /// The device cannot grow that far: it reserved `max_bytes` of address space, or has a fixed length.
    #[error("{device}: cannot have {wanted_bytes} bytes; its limit is {max_bytes}")]
    TooLong {
        /// The device.
        device: DeviceName,
        /// The length asked for.
        wanted_bytes: u64,
        /// The limit.
        max_bytes: u64,
    },
    /// The device could not be opened, made or mapped.
    #[error("{device}: cannot {what}: {}", io::Error::from_raw_os_error(*errno))]
    Setup {
        /// The device.
        device: DeviceName,
        /// The step that failed.
        what: &'static str,
        /// The host's errno.
        errno: i32,
    },
    /// The file or device is not of the expected kind.
    #[error("{device}: {what}")]
    Unfit {
        /// The device.
        device: DeviceName,
        /// Its fault.
        what: &'static str,
    },
    /// The device cannot be used, or not in the way that was asked for.
    #[error("{device}: {why}")]
    Refused {
        /// The device.
        device: DeviceName,
        /// The reason and the remedy.
        why: Arc<str>,
    },
}

impl MediaError {
    /// Whether the host ran out of space (or quota); such an error never latches a device.
    pub const fn is_no_space(&self) -> bool {
        matches!(self, Self::NoSpace { .. })
    }

    /// Whether the caller asked for something impossible, so that the device is not to blame.
    pub const fn is_caller_fault(&self) -> bool {
        matches!(
            self,
            Self::OutOfRange { .. } | Self::Misaligned { .. } | Self::ReadOnly { .. } | Self::TooLong { .. }
        )
    }

    /// Whether a read failed: other contents of the device, and writes to it, are not affected by that.
    pub fn is_failed_read(&self) -> bool {
        matches!(self, Self::Io { op, .. } if op.contains("read"))
    }

    /// The device that the error came from.
    pub const fn device(&self) -> &DeviceName {
        match self {
            Self::OutOfRange { device, .. }
            | Self::Misaligned { device, .. }
            | Self::NoSpace { device, .. }
            | Self::Io { device, .. }
            | Self::Failed { device, .. }
            | Self::ReadOnly { device }
            | Self::TooLong { device, .. }
            | Self::Setup { device, .. }
            | Self::Unfit { device, .. }
            | Self::Refused { device, .. } => device,
        }
    }

    /// Maps an errno from the host to `NoSpace` or `Io`.
    pub(crate) fn from_errno(device: &DeviceName, op: &'static str, off: u64, len: u64, errno: i32) -> Self {
        let device = device.clone();
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace { device, off, len },
            _ => Self::Io {
                device,
                op,
                off,
                len,
                errno,
            },
        }
    }

    /// Like [`from_errno`](Self::from_errno), from an `io::Error` (one without an errno counts as EIO).
    pub(crate) fn from_io(
        device: &DeviceName,
        op: &'static str,
        off: u64,
        len: u64,
        error: &io::Error,
    ) -> Self {
        Self::from_errno(device, op, off, len, error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// Maps an error from opening or making a device; want of space stays `NoSpace`.
    pub(crate) fn setup(device: &DeviceName, what: &'static str, error: &io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        match errno {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace {
                device: device.clone(),
                off: 0,
                len: 0,
            },
            _ => Self::Setup {
                device: device.clone(),
                what,
                errno,
            },
        }
    }
}

/// `Ok` if `off..off + len` lies within `size_bytes`.
pub(crate) fn check_range(
    device: &DeviceName,
    off: u64,
    len: u64,
    size_bytes: u64,
) -> Result<(), MediaError> {
    match off.checked_add(len) {
        Some(end) if end <= size_bytes => Ok(()),
        _ => Err(MediaError::OutOfRange {
            device: device.clone(),
            off,
            len,
            size_bytes,
        }),
    }
}

/// `Ok` if `off` and `len` are multiples of the block.
pub(crate) fn check_blocks(
    device: &DeviceName,
    off: u64,
    len: u64,
    block_bytes: u64,
) -> Result<(), MediaError> {
    if off.is_multiple_of(block_bytes) && len.is_multiple_of(block_bytes) {
        return Ok(());
    }
    Err(MediaError::Misaligned {
        device: device.clone(),
        off,
        len,
        block_bytes,
    })
}
