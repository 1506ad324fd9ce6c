//! Removal of a pool, and of live directories whose pool is gone. Owns which files belong to a pool and the
//! order of their removal; other files beside them stay.

use super::arena::Arena;
use super::files::{HostPool, IMAGES, TOML, TOML_NEW};
use super::live;
use super::spec::{NvmSpec, TierSpec};
use crate::KernelError;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Result of removing a pool.
#[derive(Debug, Default)]
pub struct Destroyed {
    /// Space that files of the pool had on the host, in bytes.
    pub freed_bytes: u64,
    /// Files and devices outside of the pool's directory that held its tiers. They are unchanged.
    pub devices: Vec<String>,
    /// Foreign files in the pool's directory: they stay, and so does the directory.
    pub left: Vec<PathBuf>,
}

/// A live directory without a daemon, whose pool is no longer at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    /// The live directory.
    pub live: PathBuf,
    /// Former place of its pool.
    pub pool: PathBuf,
    /// Its size, in bytes.
    pub bytes: u64,
}

/// Whether a file of this name in a pool's directory was made by Varve.
fn is_of_pool(name: &str) -> bool {
    const OTHERS: [&str; 9] = [
        "sock",
        "sock.new",
        "pid",
        "up.lock",
        "up.pid",
        "varve.log",
        "down.force",
        "lock",
        TOML_NEW,
    ];
    let library = |rest: &str| rest.ends_with(".so") || rest.ends_with(".tmp") || rest.contains(".sites");
    IMAGES.contains(&name)
        || super::more::is_image(name)
        || OTHERS.contains(&name)
        || name.strip_prefix("preload-").is_some_and(library)
        || name.strip_prefix(".preload-").is_some_and(library)
}

fn gone(result: io::Result<()>, path: &Path) -> Result<(), KernelError> {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(KernelError::io(
            format!("cannot remove {}", path.display()),
            error,
        )),
        _ => Ok(()),
    }
}

/// Returns the space that files in a directory take, in bytes; 0 for an unreadable directory.
fn bytes_in(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .filter(fs::Metadata::is_file)
        .map(|meta| meta.blocks() * 512)
        .sum()
}

impl HostPool {
    /// Returns the files and devices outside of the pool's directory that hold its tiers, by name.
    #[must_use]
    pub fn outside(&self) -> Vec<String> {
        let more = self.spec().more.iter().map(|(_, device)| device);
        let own = |spec: &&TierSpec| {
            let name = spec.device().and_then(|device| device.path()?.file_name());
            !name.is_some_and(|name| super::more::is_image(&name.to_string_lossy()))
        };
        [&self.spec().ssd, &self.spec().hdd]
            .into_iter()
            .chain(more.filter(own))
            .filter_map(|tier| match tier {
                TierSpec::Device(device) => Some(device.to_string()),
                TierSpec::None | TierSpec::Size(_) => None,
            })
            .collect()
    }

    /// Returns the space that the pool's own files take on the host, in bytes.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        bytes_in(self.dir()) + bytes_in(&self.logs_dir()) + bytes_in(self.live())
    }

    /// Removes the pool: its memory, its images and logs, last its `varve.toml`. If interrupted, it can be
    /// repeated. Tiers on devices and files outside of the pool's directory are left as they are: a device's
    /// name may denote another device by now.
    ///
    /// # Errors
    /// A daemon serves the pool; it is another user's; something cannot be removed.
    pub fn destroy(&self) -> Result<Destroyed, KernelError> {
        if !rustix::process::geteuid().is_root() {
            self.check_owner()?;
        }
        let lock = self.lock()?;
        let mut done = Destroyed {
            freed_bytes: self.host_bytes(),
            devices: self.outside(),
            left: Vec::new(),
        };
        if let NvmSpec::Device(path) = &self.spec().nvm {
            // Its header says whose it is, whatever its name. Best effort: it may be gone.
            match Arena::wipe(path, self.uuid()) {
                Ok(()) => {}
                Err(error) => tracing::warn!("{} is left as it is: {error}", path.display()),
            }
        }
        gone(fs::remove_dir_all(self.live()), self.live())?;
        gone(fs::remove_dir_all(self.logs_dir()), &self.logs_dir())?;
        let entries = fs::read_dir(self.dir())
            .map_err(|error| KernelError::io(format!("cannot list {}", self.dir().display()), error))?;
        for entry in entries.flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            match name.to_str() {
                Some(TOML) => {}
                Some("mnt") => {
                    if fs::remove_dir(&path).is_err() {
                        done.left.push(path);
                    }
                }
                Some(name) if is_of_pool(name) => gone(fs::remove_file(&path), &path)?,
                _ => done.left.push(path),
            }
        }
        let toml = self.dir().join(TOML);
        gone(fs::remove_file(&toml), &toml)?;
        drop(lock);
        if done.left.is_empty() {
            gone(fs::remove_dir(self.dir()), self.dir())?;
        }
        Ok(done)
    }
}

/// Returns the live directories under `parent` of this user's (for root: of every user's) pools that no
/// longer exist.
#[must_use]
pub fn orphans(parent: &Path) -> Vec<Orphan> {
    let own_uid = rustix::process::geteuid().as_raw();
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let live = entry.path();
            let name = entry.file_name();
            let uuid = live::uuid_in(name.to_str()?)?;
            let meta = fs::symlink_metadata(&live).ok()?;
            if !meta.is_dir() || (own_uid != 0 && meta.uid() != own_uid) || live::is_in_use(&live) {
                return None;
            }
            let pool = live::pool_of(&live)?;
            let there = HostPool::find(&pool).is_ok_and(|pool| super::uuid_text(&pool.uuid()) == uuid);
            // A pool that exists and cannot be read is not gone.
            let is_gone = !there && (!pool.join(TOML).exists() || HostPool::find(&pool).is_ok());
            is_gone.then(|| Orphan {
                bytes: bytes_in(&live),
                live,
                pool,
            })
        })
        .collect();
    found.sort_by(|a, b| a.live.cmp(&b.live));
    found
}

impl Orphan {
    /// Removes the live directory.
    ///
    /// # Errors
    /// It is in use by now, or cannot be removed.
    pub fn remove(&self) -> Result<(), KernelError> {
        if live::is_in_use(&self.live) {
            return Err(KernelError::Pool(format!(
                "{} is in use: a daemon was started meanwhile",
                self.live.display()
            )));
        }
        gone(fs::remove_dir_all(&self.live), &self.live)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{is_of_pool, orphans};
    use crate::pool::{HostDaemon, PoolSpec, create_pool};

    fn small() -> PoolSpec {
        PoolSpec::parse(Some("shm:8M"), Some("0"), Some("0")).unwrap()
    }

    #[test]
    fn names_of_the_pool_are_known_and_others_stay() {
        for ours in [
            "nvm.img",
            "lock",
            "preload-0123456789abcdef.so",
            "preload-0123.sites-1",
        ] {
            assert!(is_of_pool(ours), "{ours}");
        }
        for other in ["notes.txt", "preload-mine", "varve.toml.bak", "mnt"] {
            assert!(!is_of_pool(other), "{other}");
        }
    }

    #[test]
    fn destroyed_pool_leaves_nothing_but_what_others_put_there() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let pool = create_pool(&dir, &small()).unwrap();
        let daemon = HostDaemon::start(&pool).unwrap();
        assert!(pool.destroy().is_err(), "it is served");
        daemon.stop().unwrap();
        assert!(pool.live().exists());
        let done = pool.destroy().unwrap();
        assert!(done.left.is_empty() && done.freed_bytes >= 8 << 20, "{done:?}");
        assert!(!dir.exists() && !pool.live().exists());

        let pool = create_pool(&dir, &small()).unwrap();
        std::fs::write(dir.join("notes.txt"), "mine").unwrap();
        let done = pool.destroy().unwrap();
        assert_eq!(done.left, [dir.join("notes.txt")]);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn live_directory_is_an_orphan_once_its_pool_is_gone_and_nobody_serves_it() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("pool");
        let pool = create_pool(&dir, &small()).unwrap();
        let live = pool.live().to_owned();
        let parent = live.parent().unwrap().to_owned();
        let is_orphan = || orphans(&parent).iter().any(|orphan| orphan.live == live);
        assert!(!is_orphan(), "its pool is there");
        let daemon = HostDaemon::start(&pool).unwrap();
        std::fs::rename(&dir, top.path().join("moved")).unwrap();
        assert!(!is_orphan(), "it is served");
        std::fs::rename(top.path().join("moved"), &dir).unwrap();
        daemon.stop().unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        let found = orphans(&parent);
        let orphan = found.iter().find(|orphan| orphan.live == live).unwrap();
        assert_eq!(orphan.pool, dir.canonicalize().unwrap_or(dir));
        assert!(orphan.bytes >= 8 << 20);
        orphan.remove().unwrap();
        assert!(!live.exists());
    }
}
