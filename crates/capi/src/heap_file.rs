//! The file that `va_create` makes a heap in.
//!
//! Owns its lock, and whether a file without a heap may be removed again. Knows nothing of heaps.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Files that others removed before they were locked here.
const TRIES: usize = 100;

/// A file that is locked by this open file description, and so by all clones of it.
#[derive(Debug)]
pub(crate) struct HeapFile {
    file: File,
    /// Made here, and nobody else had the lock before.
    is_made: bool,
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Opens a file, and says whether it is new.
fn open_or_make(path: &Path) -> io::Result<(File, bool)> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok((options.open(path)?, false)),
        made => Ok((made?, true)),
    }
}

impl HeapFile {
    /// Opens a file or makes it, and locks it.
    ///
    /// # Errors
    /// `WouldBlock` where another heap has it; as `open(2)`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut last = ErrorKind::NotFound.into();
        for _ in 0..TRIES {
            match open_or_make(path).and_then(|(file, is_new)| Self::lock(file, is_new, path)) {
                Err(error) if error.kind() == ErrorKind::NotFound => last = error,
                opened => return opened,
            }
        }
        Err(last)
    }

    /// `NotFound` where the path does not name it any more: who made it removed it before it was locked, and
    /// a heap in it would be gone.
    fn lock(file: File, is_new: bool, path: &Path) -> io::Result<Self> {
        file.try_lock()?;
        let has = file.metadata()?;
        if !is_same(&has, &std::fs::metadata(path)?) {
            return Err(ErrorKind::NotFound.into());
        }
        // Another process may have made a heap in it and closed that, before it was locked here.
        let is_made = is_new && has.len() == 0;
        Ok(Self { file, is_made })
    }

    /// The same file with the same lock.
    ///
    /// # Errors
    /// As `dup(2)`.
    pub(crate) fn clone_for_heap(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Removes the file if it was made here. Nobody else has a heap in it: the lock was held since it was
    /// empty. Another file that has the name by now stays.
    pub(crate) fn undo(self, path: &Path) {
        let is_there = || Ok::<_, io::Error>(is_same(&self.file.metadata()?, &path.symlink_metadata()?));
        if self.is_made && is_there().unwrap_or(false) {
            // It holds no heap; if it cannot be removed, the next call says so.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use varve_far_objects::CheckpointFile;

    #[test]
    fn file_is_locked_before_a_heap_is_made_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("heap");
        let file = HeapFile::open(&path).unwrap();
        assert_eq!(
            HeapFile::open(&path).unwrap_err().kind(),
            ErrorKind::WouldBlock,
            "another process would take it now"
        );
        // The heap's own lock is the same one, and ends with the last of both.
        let of_heap = file.clone_for_heap().unwrap();
        CheckpointFile::lock(&of_heap).unwrap();
        file.undo(&path);
        assert!(!path.exists());
        let again = HeapFile::open(&path).unwrap();
        drop(of_heap);
        again.undo(&path);
        assert!(!path.exists());
    }

    #[test]
    fn files_of_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("heap");
        // There before.
        std::fs::write(&path, []).unwrap();
        HeapFile::open(&path).unwrap().undo(&path);
        assert!(path.exists());
        std::fs::remove_file(&path).unwrap();
        // Another one of the name.
        let file = HeapFile::open(&path).unwrap();
        std::fs::rename(&path, dir.path().join("elsewhere")).unwrap();
        std::fs::write(&path, b"other").unwrap();
        file.undo(&path);
        assert_eq!(std::fs::read(&path).unwrap(), b"other");
        std::fs::remove_file(&path).unwrap();
        // Made here, but another process had a heap in it before it was locked.
        let (file, is_new) = open_or_make(&path).unwrap();
        std::fs::write(&path, b"heap").unwrap();
        HeapFile::lock(file, is_new, &path).unwrap().undo(&path);
        assert_eq!(std::fs::read(&path).unwrap(), b"heap");
        std::fs::remove_file(&path).unwrap();
        // Removed by who made it, before it was locked.
        let (file, is_new) = open_or_make(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, []).unwrap();
        let gone = HeapFile::lock(file, is_new, &path);
        assert_eq!(gone.unwrap_err().kind(), ErrorKind::NotFound);
    }
}
