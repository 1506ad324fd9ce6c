//! Users' segments as files of the live directory: made, shared, removed. Owns their names, their permissions
//! and their number.

use super::logs::setup;
use crate::user_segments::SegmentFile;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use varve_media::{DeviceName, MediaError};

/// Prefix of the names.
const PREFIX: &str = "user-";
/// Divisor of the live directory's file system: all segments take at most this share.
const SHARE: u64 = 4;

/// Accounting of the segments' files.
#[derive(Default)]
pub(super) struct SegmentFiles {
    bytes: Arc<AtomicU64>,
    made: AtomicU64,
}

/// A user's file. Dropping it removes its name; clients that map it keep their mappings, and their user's
/// bytes in them.
struct UserFile {
    path: PathBuf,
    file: File,
    len_bytes: u64,
    all_bytes: Arc<AtomicU64>,
}

impl SegmentFiles {
    /// Removes an earlier daemon's files.
    pub(super) fn remove_left(live: &Path) {
        let entries = std::fs::read_dir(live).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| {
            entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(PREFIX.as_bytes())
        }) {
            let _ = std::fs::remove_file(entry.path());
        }
    }

    /// Makes a new file, never one that was another user's; `None` if there is no room for it.
    pub(super) fn make(
        &self,
        live: &Path,
        uid: u32,
        len_bytes: u64,
    ) -> Result<Option<Box<dyn SegmentFile>>, MediaError> {
        let space = varve_media::host::host_capacity(live)
            .map_err(|error| setup(live, "ask for its space", &error))?;
        let most = space.total_bytes / SHARE;
        let room = |bytes: u64| (bytes + len_bytes <= most).then_some(bytes + len_bytes);
        if self
            .bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, room)
            .is_err()
        {
            return Ok(None);
        }
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let path = live.join(format!("{PREFIX}{uid}-{number}"));
        // Owned by the daemon's user: another owner could open it again for writing.
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let made = file.and_then(|file| {
            // Set to its final length, so that no client can make it longer by touching it.
            file.set_len(len_bytes)?;
            Ok(file)
        });
        let file = made.map_err(|error| {
            self.bytes.fetch_sub(len_bytes, Ordering::AcqRel);
            setup(&path, "create it", &error)
        })?;
        Ok(Some(Box::new(UserFile {
            path,
            file,
            len_bytes,
            all_bytes: Arc::clone(&self.bytes),
        })))
    }
}

impl SegmentFile for UserFile {
    fn write(&self, off: u64, bytes: &[u8]) -> Result<(), MediaError> {
        self.file.write_all_at(bytes, off).map_err(|error| {
            let device = DeviceName::from(self.path.as_path());
            let len = bytes.len() as u64;
            match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => MediaError::NoSpace { device, off, len },
                errno => MediaError::Io {
                    device,
                    op: "write",
                    off,
                    len,
                    errno: errno.unwrap_or(libc::EIO),
                },
            }
        })
    }

    fn share(&self) -> Result<OwnedFd, MediaError> {
        // Opened anew: a copy of the daemon's own descriptor could be written to.
        let file = File::open(&self.path);
        file.map(Into::into)
            .map_err(|error| setup(&self.path, "open it", &error))
    }
}

impl Drop for UserFile {
    fn drop(&mut self) {
        self.all_bytes.fetch_sub(self.len_bytes, Ordering::AcqRel);
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("{} is left behind: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::SegmentFiles;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn file_is_for_reading_only_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let files = SegmentFiles::default();
        let segments = files.make(dir.path(), 7, 1 << 20).unwrap().unwrap();
        segments.write(8192, b"its own").unwrap();
        let shared = std::fs::File::from(segments.share().unwrap());
        let mut bytes = [0; 7];
        shared.read_exact_at(&mut bytes, 8192).unwrap();
        assert_eq!(&bytes, b"its own");
        assert!(shared.write_at(b"x", 0).is_err() && shared.set_len(0).is_err());
        let meta = shared.metadata().unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (1 << 20, 0o600));
        drop(segments);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // The next file of the same user is a different file.
        let next = files.make(dir.path(), 7, 1 << 20).unwrap().unwrap();
        let other = std::fs::File::from(next.share().unwrap());
        assert_ne!(other.metadata().unwrap().ino(), meta.ino());
        SegmentFiles::remove_left(dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn more_than_a_share_of_the_host_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let files = SegmentFiles::default();
        assert!(files.make(dir.path(), 7, 1 << 60).unwrap().is_none());
        assert!(files.make(dir.path(), 7, 4096).unwrap().is_some());
    }
}
