//! Files below paths in a mounted pool, with their inodes: for commands that ask the daemon about each.

use crate::pool::Pool;
use crate::pool_session::Mounts;
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use varve_format::InodeKey;
use varve_libfs::mounts::PoolMount;

/// A file or directory of the pool.
#[derive(Debug, Clone)]
pub struct Entry {
    pub path: PathBuf,
    pub key: InodeKey,
    pub size_bytes: u64,
    /// Time since its data was last changed.
    pub age: Duration,
    pub is_dir: bool,
    pub is_file: bool,
}

impl Entry {
    fn new(path: PathBuf, meta: &Metadata) -> Self {
        Self {
            path,
            key: InodeKey::of_number(meta.ino()),
            size_bytes: meta.len(),
            age: meta
                .modified()
                .ok()
                .and_then(|time| time.elapsed().ok())
                .unwrap_or_default(),
            is_dir: meta.is_dir(),
            is_file: meta.is_file(),
        }
    }
}

/// Paths of one pool.
#[derive(Debug)]
pub struct Paths {
    pub pool: Pool,
    /// The paths themselves; symbolic links are followed.
    pub roots: Vec<Entry>,
    mount: PathBuf,
    device: u64,
}

impl Paths {
    /// Finds the pool of paths that exist.
    pub fn find(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mounts = Mounts::read()?;
        let (mut found, mut roots) = (None::<(PoolMount, u64)>, Vec::new());
        for path in paths {
            let real = path
                .canonicalize()
                .with_context(|| format!("cannot find {}", path.display()))?;
            let mount = mounts.locate(&real)?.mount;
            let meta = std::fs::metadata(&real)?;
            match &found {
                None => found = Some((mount, meta.dev())),
                Some((_, device)) if *device == meta.dev() => {}
                Some(_) => bail!(
                    "{} is in another mount than {}: name paths of one mount at a time",
                    path.display(),
                    paths[0].display()
                ),
            }
            roots.push(Entry::new(path.clone(), &meta));
        }
        let (mount, device) = found.context("no path was given")?;
        Ok(Self {
            pool: Pool::open(&mount.pool)?,
            roots,
            mount: mount.at,
            device,
        })
    }

    /// A path as the pool's root sees it.
    pub fn in_pool(&self, path: &Path) -> anyhow::Result<String> {
        let real = crate::mounted::absolute(path)?;
        let inner = real
            .strip_prefix(&self.mount)
            .with_context(|| format!("{} is not below {}", path.display(), self.mount.display()))?;
        Ok(format!("/{}", inner.to_string_lossy()))
    }

    /// Calls `each` with batches of entries, directories before what is in them. It returns the inodes that
    /// are not to be looked into. What disappears meanwhile is left out; errors of directories that cannot be
    /// read are returned at the end.
    pub fn walk(
        &self,
        most: usize,
        each: &mut dyn FnMut(&[Entry]) -> anyhow::Result<BTreeSet<InodeKey>>,
    ) -> anyhow::Result<Vec<String>> {
        let (mut next, mut errors) = (self.roots.clone(), Vec::new());
        while !next.is_empty() {
            let mut dirs = Vec::new();
            for some in next.chunks(most) {
                let left_out = each(some)?;
                let entered = some
                    .iter()
                    .filter(|entry| entry.is_dir && !left_out.contains(&entry.key));
                dirs.extend(entered.map(|entry| entry.path.clone()));
            }
            next.clear();
            for dir in dirs {
                match self.list(&dir) {
                    Ok(entries) => next.extend(entries),
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                    Err(error) => errors.push(format!("{}: {error}", dir.display())),
                }
            }
        }
        Ok(errors)
    }

    /// The entries of a directory in the mount.
    fn list(&self, dir: &Path) -> std::io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            match std::fs::symlink_metadata(&path) {
                Ok(meta) if meta.dev() == self.device => entries.push(Entry::new(path, &meta)),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        entries.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(entries)
    }
}
