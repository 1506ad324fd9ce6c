//! From inodes back to paths, for callers that can only name a file to the kernel. Owns the search for a
//! path; does not promise that the path is still right when the search is over: a caller that opens by it
//! checks the inode that it opened.

use std::sync::atomic::{AtomicU64, Ordering};
use varve_format::InodeKey;
use varve_ipc::Cred;

use crate::errno::Result;
use crate::fs::Fs;

/// Entries of a directory that are looked at together when a name is searched.
const BATCH: usize = 256;
/// Most directories above a directory when its path is searched.
const DEPTH_MAX: usize = 1000;
/// Number of names that this process has lent: several may be in use at once, also for one file.
static LENT: AtomicU64 = AtomicU64::new(0);

impl Fs {
    /// Path of a directory below the root: empty for the root, else with a slash before each name. `None` if
    /// it is gone.
    #[must_use]
    pub fn path_of(&self, dir: InodeKey) -> Option<Vec<u8>> {
        let (mut at, mut names) = (dir, Vec::new());
        while at != self.root() {
            let parent = self.lookup(at, b"..", &Cred::root()).ok()?.key;
            names.push(self.name_in(parent, at)?);
            at = parent;
            if names.len() > DEPTH_MAX {
                return None;
            }
        }
        let mut path = Vec::new();
        for name in names.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(name);
        }
        Some(path)
    }

    /// Path below the root of a file that has a name in `dir`.
    #[must_use]
    pub fn path_in(&self, dir: InodeKey, key: InodeKey) -> Option<Vec<u8>> {
        let mut path = self.path_of(dir)?;
        path.push(b'/');
        path.extend_from_slice(&self.name_in(dir, key)?);
        Some(path)
    }

    /// A name of `key` in `dir`.
    fn name_in(&self, dir: InodeKey, key: InodeKey) -> Option<Vec<u8>> {
        let mut cookie = 0;
        loop {
            let entries = self.readdir(dir, cookie, BATCH).ok()?;
            cookie = entries.last()?.next_cookie;
            if let Some(entry) = entries.into_iter().find(|entry| entry.key == key) {
                return Some(entry.name);
            }
        }
    }

    /// Gives a file that has no name, or no known name, a unique name in `dir` while `act` runs; `act`
    /// receives the name.
    ///
    /// # Errors
    /// As [`while_named`](Self::while_named).
    pub fn while_lent_a_name<T>(
        &self,
        key: InodeKey,
        dir: InodeKey,
        cred: &Cred,
        act: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        let (process, n) = (std::process::id(), LENT.fetch_add(1, Ordering::Relaxed));
        let name = format!(".varve-{:x}-{:x}-{process}-{n}", key.ino.0, key.generation.0).into_bytes();
        self.while_named(key, (dir, &name), cred, || act(&name))
    }
}
