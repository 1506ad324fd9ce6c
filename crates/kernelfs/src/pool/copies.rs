//! The files in which processes keep copies for their maps: their names, emptying and removal. Clients make
//! and fill them, and own their content.
//!
//! A client shows a page of its file only after it has seen its session live with the page in the file. So
//! once a session is sealed and the file is emptied afterwards, no data of that session is shown from then
//! on, whether the client runs or not.

use crate::process::ProcessId;
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use varve_ipc::CopiesAt;

/// Prefix of the names: a process' number and start time follow.
const PREFIX: &str = "copies-";

fn name(process: ProcessId) -> String {
    format!("{PREFIX}{}-{}", process.pid, process.start)
}

fn process_in(name: &str) -> Option<ProcessId> {
    let (pid, start) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some(ProcessId {
        pid: pid.parse().ok()?,
        start: start.parse().ok()?,
    })
}

/// Frees all pages: processes that map the file read zeros.
fn empty(path: &Path) {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = File::options().write(true).custom_flags(flags).open(path);
    let emptied = file.and_then(|file| {
        let len_bytes = file.metadata()?.len();
        if len_bytes > 0 {
            rustix::fs::fallocate(
                &file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                0,
                len_bytes,
            )?;
        }
        Ok(())
    });
    match emptied {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::error!(
                "{} cannot be emptied: its process may read what is out of date: {error}",
                path.display()
            );
        }
        _ => {}
    }
}

fn remove(path: &Path) {
    // A process that still maps it must not keep pages that no code empties any more.
    empty(path);
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!("{} is left behind: {error}", path.display());
    }
}

/// The copies' files that may exist.
#[derive(Default)]
pub(super) struct CopyFiles {
    /// Processes that know the place of their file and have not been seen gone.
    told: Mutex<BTreeSet<ProcessId>>,
}

impl CopyFiles {
    /// Returns the place where `process` may keep copies.
    pub(super) fn of(&self, live: &Path, process: ProcessId) -> Option<CopiesAt> {
        // A process that cannot be looked up cannot be seen gone.
        if process.start == 0 {
            return None;
        }
        let meta = std::fs::metadata(live).ok()?;
        self.told.lock().insert(process);
        Some(CopiesAt {
            dir: live.as_os_str().as_encoded_bytes().to_vec(),
            dir_is: (meta.dev(), meta.ino()),
            name: name(process),
        })
    }

    /// Empties the copies of a process.
    pub(super) fn drop_of(&self, live: &Path, process: ProcessId) {
        empty(&live.join(name(process)));
    }

    /// Removes the files of processes that are gone. `lives` identifies some living processes at less cost
    /// than a lookup.
    pub(super) fn sweep(&self, live: &Path, lives: &dyn Fn(ProcessId) -> bool) {
        let told: Vec<_> = self.told.lock().iter().copied().collect();
        for process in told {
            if !lives(process) && !process.is_alive() {
                remove(&live.join(name(process)));
                self.told.lock().remove(&process);
            }
        }
    }

    fn there(live: &Path) -> Vec<(PathBuf, Option<ProcessId>)> {
        let entries = std::fs::read_dir(live).into_iter().flatten().flatten();
        entries
            .filter_map(|entry| {
                let name = entry.file_name();
                let name = name.to_str()?;
                name.starts_with(PREFIX).then(|| (entry.path(), process_in(name)))
            })
            .collect()
    }

    /// Handles an earlier daemon's files at the start: empties those of living processes, and removes the
    /// others.
    pub(super) fn drop_left(&self, live: &Path) {
        for (path, process) in Self::there(live) {
            match process.filter(ProcessId::is_alive) {
                Some(process) => {
                    empty(&path);
                    self.told.lock().insert(process);
                }
                None => remove(&path),
            }
        }
    }

    /// Removes all files: no session is left. A client that connects to another daemon makes its file anew.
    pub(super) fn remove_all(live: &Path) {
        for (path, _) in Self::there(live) {
            remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{CopyFiles, name, process_in};
    use crate::process::ProcessId;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;

    fn own() -> ProcessId {
        ProcessId::of(std::process::id())
    }

    fn gone() -> ProcessId {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = ProcessId {
            start: 1,
            ..ProcessId::of(child.id())
        };
        child.wait().unwrap();
        id
    }

    fn made(live: &Path, process: ProcessId) -> std::fs::File {
        let file = std::fs::File::create(live.join(name(process))).unwrap();
        file.set_len(1 << 40).unwrap();
        file.write_all_at(&[7; 4096], 1 << 30).unwrap();
        file
    }

    fn place() -> tempfile::TempDir {
        let shm = Path::new("/dev/shm");
        if shm.is_dir() {
            tempfile::tempdir_in(shm).unwrap()
        } else {
            tempfile::tempdir().unwrap()
        }
    }

    #[test]
    fn file_is_emptied_for_the_living_and_removed_for_the_gone() {
        let dir = place();
        let (mine, theirs) = (made(dir.path(), own()), made(dir.path(), gone()));
        std::fs::write(dir.path().join("log-1"), "x").unwrap();
        assert!(mine.metadata().unwrap().blocks() > 0);
        let files = CopyFiles::default();
        files.drop_left(dir.path());
        assert_eq!(mine.metadata().unwrap().blocks(), 0);
        assert_eq!(
            (mine.metadata().unwrap().len(), mine.metadata().unwrap().nlink()),
            (1 << 40, 1)
        );
        assert_eq!(
            (
                theirs.metadata().unwrap().blocks(),
                theirs.metadata().unwrap().nlink()
            ),
            (0, 0)
        );
        mine.write_all_at(&[7; 4096], 0).unwrap();
        files.drop_of(dir.path(), own());
        assert_eq!(mine.metadata().unwrap().blocks(), 0);
        files.drop_of(dir.path(), gone());
        files.sweep(dir.path(), &|_| false);
        assert_eq!(mine.metadata().unwrap().nlink(), 1);
        CopyFiles::remove_all(dir.path());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the log stays");
    }

    #[test]
    fn file_goes_when_its_process_is_seen_gone() {
        let dir = place();
        let files = CopyFiles::default();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = ProcessId::of(child.id());
        let at = files.of(dir.path(), process).unwrap();
        assert_eq!(process_in(&at.name), Some(process));
        let file = made(dir.path(), process);
        files.sweep(dir.path(), &|_| false);
        assert_eq!(file.metadata().unwrap().nlink(), 1);
        child.kill().unwrap();
        child.wait().unwrap();
        files.sweep(dir.path(), &|other| other == process);
        assert_eq!(file.metadata().unwrap().nlink(), 1, "somebody knows better");
        files.sweep(dir.path(), &|_| false);
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        assert!(files.of(dir.path(), ProcessId { pid: 1, start: 0 }).is_none());
    }
}
