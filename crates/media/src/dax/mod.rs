//! Persistent memory of this machine: devices (devdax), file systems mounted with DAX, their sizes, their bad
//! blocks, and the commands that make them. Reads sysfs and tries a mapping; changes nothing but for a file
//! of its own that it removes. Mapping is [`MappedRegion`](crate::MappedRegion)'s.

mod device;
mod mount;
mod survey;
mod sysfs;

pub use device::DaxDevice;
pub use mount::{is_dax_dir, why_not};
pub use survey::survey;

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

use crate::error::MediaError;
use crate::sys::file_extents;

/// Directories in which the kernel shows its devices. Others are for tests.
#[derive(Debug, Clone)]
pub struct KernelDirs {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
}

impl Default for KernelDirs {
    fn default() -> Self {
        Self {
            sys: "/sys".into(),
            dev: "/dev".into(),
        }
    }
}

/// Parts of an open file, or of an open device, that the kernel lists as bad: first byte and length each.
/// Empty where it does not say.
#[must_use]
pub fn bad_parts(dirs: &KernelDirs, file: &File) -> Vec<(u64, u64)> {
    let Ok(meta) = file.metadata() else {
        return Vec::new();
    };
    if meta.file_type().is_char_device() {
        return sysfs::bad_of_device(dirs, meta.rdev());
    }
    let bad = sysfs::bad_of_disk(dirs, meta.dev());
    if bad.is_empty() {
        return bad;
    }
    let mut parts = Vec::new();
    for extent in file_extents(file).unwrap_or_default() {
        for (off, len) in &bad {
            let (from, to) = (
                extent.device_off.max(*off),
                (extent.device_off + extent.len).min(off + len),
            );
            if from < to {
                parts.push((extent.file_off + (from - extent.device_off), to - from));
            }
        }
    }
    parts
}

/// Replaces the error of a mapping that the kernel refused for want of DAX by one with the remedy.
pub(crate) fn refused_map(error: MediaError, file: &File) -> MediaError {
    match error {
        MediaError::Setup {
            device,
            errno: libc::EOPNOTSUPP | libc::EINVAL,
            ..
        } => {
            let why = match file.metadata() {
                Ok(meta) => mount::advice(&KernelDirs::default(), meta.dev()),
                Err(error) => error.to_string(),
            };
            MediaError::Refused {
                device,
                why: why.into(),
            }
        }
        other => other,
    }
}
