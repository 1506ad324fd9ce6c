//! Files below paths in a mounted pool, with their inodes: for commands that ask the daemon about each.

use crate::pool::Pool;
use crate::pool_session::Mounts;
use anyhow::{Context, bail};
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use varve_format::InodeKey;
use varve_ipc::Pinned;
use varve_libfs::mounts::PoolMount;

/// Most walks of a tree whose directories are renamed meanwhile.
const WALKS_MAX: usize = 5;

/// A file or directory of the pool.
#[derive(Debug, Clone)]
pub struct Entry {
    /// As the user named it, or below such a path.
    pub path: PathBuf,
    /// From the pool's root.
    pub in_pool: String,
    pub key: InodeKey,
    /// The directory and the name by which it was found; `None` for the root of a pool.
    name: Option<(InodeKey, Vec<u8>)>,
    pub size_bytes: u64,
    /// Time since its data was last changed.
    pub age: Duration,
    pub is_dir: bool,
    pub is_file: bool,
    /// Named by the user.
    pub is_root: bool,
}

impl Entry {
    fn new(path: PathBuf, in_pool: String, meta: &Metadata) -> Self {
        let since = meta.modified().ok().and_then(|time| time.elapsed().ok());
        Self {
            path,
            in_pool,
            key: key(meta),
            name: None,
            size_bytes: meta.len(),
            age: since.unwrap_or_default(),
            is_dir: meta.is_dir(),
            is_file: meta.is_file(),
            is_root: false,
        }
    }

    /// As the daemon is asked about it.
    pub fn pinned(&self) -> Pinned {
        Pinned {
            key: self.key,
            name: self.name.clone(),
        }
    }
}

fn key(meta: &Metadata) -> InodeKey {
    InodeKey::of_number(meta.ino())
}

/// Paths of one pool.
#[derive(Debug)]
pub struct Paths {
    pub pool: Pool,
    /// The paths themselves; symbolic links are followed.
    roots: Vec<Entry>,
    device: u64,
}

impl Paths {
    /// Finds the pool of paths that exist.
    pub fn find(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mounts = Mounts::read()?;
        let (mut found, mut roots) = (None::<(PoolMount, u64)>, Vec::<Entry>::new());
        for path in paths {
            let real = path
                .canonicalize()
                .with_context(|| format!("cannot find {}", path.display()))?;
            let at = mounts.locate(&real)?;
            let meta = std::fs::metadata(&real).with_context(|| format!("cannot find {}", path.display()))?;
            match &found {
                None => found = Some((at.mount.clone(), meta.dev())),
                Some((_, device)) if *device == meta.dev() => {}
                Some(_) => bail!(
                    "{} is in another mount than {}: name paths of one mount at a time",
                    path.display(),
                    paths[0].display()
                ),
            }
            let in_pool = String::from_utf8_lossy(&at.path).into_owned();
            let mut root = Entry::new(path.clone(), in_pool, &meta);
            root.is_root = true;
            if let (Some(parent), Some(name)) = (real.parent(), real.file_name())
                && real != at.mount.at
            {
                root.name = Some((key(&std::fs::metadata(parent)?), name.as_bytes().to_vec()));
            }
            if !roots.iter().any(|other| other.key == root.key) {
                roots.push(root);
            }
        }
        let (mount, device) = found.context("no path was given")?;
        Ok(Self {
            pool: Pool::open(&mount.pool)?,
            roots,
            device,
        })
    }

    /// Calls `each` with batches of entries, directories before what is in them. It returns the inodes that
    /// are not to be looked into. Returns the errors of directories that cannot be read, and of those that
    /// went away meanwhile: what was in them may be elsewhere in the tree.
    ///
    /// # Errors
    /// Those of `each`; a path that was named is not there any more.
    pub fn walk(
        &self,
        most: usize,
        each: &mut dyn FnMut(&[Entry]) -> anyhow::Result<BTreeSet<InodeKey>>,
    ) -> anyhow::Result<Walked> {
        let (mut next, mut walked) = (self.roots.clone(), Walked::default());
        let mut seen: BTreeSet<InodeKey> = BTreeSet::new();
        while !next.is_empty() {
            let mut dirs = Vec::new();
            for some in next.chunks(most) {
                let left_out = each(some)?;
                let entered = some
                    .iter()
                    .filter(|entry| entry.is_dir && !left_out.contains(&entry.key));
                dirs.extend(entered.cloned());
            }
            next.clear();
            for dir in dirs {
                // Paths may be below each other.
                if !seen.insert(dir.key) {
                    continue;
                }
                match self.list(&dir, &mut walked) {
                    Ok(entries) => next.extend(entries),
                    Err(error) if is_gone(&error) => walked.gone += 1,
                    Err(error) => walked.errors.push(format!("{}: {error}", dir.path.display())),
                }
            }
        }
        for root in &self.roots {
            let there = std::fs::metadata(&root.path).map(|meta| (meta.dev(), key(&meta)));
            if !there.is_ok_and(|there| there == (self.device, root.key)) {
                bail!("{} went away meanwhile", root.path.display());
            }
        }
        Ok(walked)
    }

    /// As [`walk`](Self::walk), again from the start while directories go away; `begin` is called before each
    /// walk.
    pub fn walk_all(
        &self,
        most: usize,
        begin: &mut dyn FnMut(),
        each: &mut dyn FnMut(&[Entry]) -> anyhow::Result<BTreeSet<InodeKey>>,
    ) -> anyhow::Result<Walked> {
        for _ in 1..WALKS_MAX {
            begin();
            let walked = self.walk(most, each)?;
            if walked.gone == 0 {
                return Ok(walked);
            }
        }
        begin();
        self.walk(most, each)
    }

    /// The entries of a directory in the mount.
    fn list(&self, dir: &Entry, walked: &mut Walked) -> std::io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        let base = if dir.in_pool == "/" { "" } else { &dir.in_pool };
        let here = std::fs::metadata(&dir.path)?;
        if key(&here) != dir.key || here.dev() != self.device {
            return Err(std::io::ErrorKind::NotFound.into());
        }
        for entry in std::fs::read_dir(&dir.path)? {
            let path = entry?.path();
            let Some(name) = path.file_name() else { continue };
            match std::fs::symlink_metadata(&path) {
                Ok(meta) if meta.dev() == self.device => {
                    let in_pool = format!("{base}/{}", name.to_string_lossy());
                    let name = name.as_bytes().to_vec();
                    let mut entry = Entry::new(path, in_pool, &meta);
                    entry.name = Some((dir.key, name));
                    entries.push(entry);
                }
                Ok(_) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => walked.errors.push(format!("{}: {error}", path.display())),
            }
        }
        entries.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(entries)
    }
}

/// Whether a file is not there any more; a mount that is gone is another error, or another file.
fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESTALE)
}

/// What a walk could not look at.
#[derive(Debug, Default)]
pub struct Walked {
    pub errors: Vec<String>,
    /// Directories that went away.
    pub gone: u64,
}

impl Walked {
    /// Fails if something was left out.
    pub fn check(&self) -> anyhow::Result<()> {
        match self.errors.first() {
            Some(first) => bail!(
                "{} files or directories could not be read: {first}",
                self.errors.len()
            ),
            None if self.gone > 0 => bail!(
                "{} directories went away meanwhile, again and again: what was in them may be left out; try \
                again when they rest",
                self.gone
            ),
            None => Ok(()),
        }
    }

    /// For JSON.
    pub fn errors(&self) -> Vec<String> {
        let gone = (self.gone > 0).then(|| format!("{} directories went away meanwhile", self.gone));
        self.errors.iter().cloned().chain(gone).collect()
    }
}

/// A path as text; bytes that are not UTF-8 are replaced.
pub fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
