//! Files below paths in a mounted pool, with their inodes: for commands that ask the daemon about each.

use crate::pool::Pool;
use crate::pool_session::Mounts;
use anyhow::{Context, bail};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, fstat, stat, statat};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
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
    fn new(path: PathBuf, in_pool: String, stat: &Stat) -> Self {
        let kind = FileType::from_raw_mode(stat.st_mode);
        Self {
            path,
            in_pool,
            key: key(stat),
            name: None,
            size_bytes: stat.st_size as u64,
            age: age(stat).unwrap_or_default(),
            is_dir: kind == FileType::Directory,
            is_file: kind == FileType::RegularFile,
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

const fn key(stat: &Stat) -> InodeKey {
    InodeKey::of_number(stat.st_ino)
}

/// Time since the data was last changed; `None` for what lies ahead.
fn age(stat: &Stat) -> Option<Duration> {
    let seconds = Duration::from_secs(u64::try_from(stat.st_mtime).ok()?);
    let changed = seconds + Duration::from_nanos(stat.st_mtime_nsec as u64);
    SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(changed)
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
            let meta = stat(&real).with_context(|| format!("cannot find {}", path.display()))?;
            match &found {
                None => found = Some((at.mount.clone(), meta.st_dev)),
                Some((_, device)) if *device == meta.st_dev => {}
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
                root.name = Some((key(&stat(parent)?), name.as_bytes().to_vec()));
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
                    Err(error) if is_gone(error) => walked.gone += 1,
                    Err(error) => walked.errors.push(format!("{}: {error}", dir.path.display())),
                }
            }
        }
        for root in &self.roots {
            if !stat(&root.path).is_ok_and(|there| self.is_same(&there, root)) {
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

    /// Whether this is what the entry was.
    fn is_same(&self, there: &Stat, entry: &Entry) -> bool {
        there.st_dev == self.device && key(there) == entry.key
    }

    /// The entries of a directory in the mount. It may be renamed meanwhile: its path is looked up once.
    fn list(&self, dir: &Entry, walked: &mut Walked) -> Result<Vec<Entry>, Errno> {
        let mut entries = Vec::new();
        let base = if dir.in_pool == "/" { "" } else { &dir.in_pool };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&dir.path, flags, Mode::empty())?;
        if !self.is_same(&fstat(&opened)?, dir) {
            return Err(Errno::NOENT);
        }
        for entry in Dir::read_from(&opened)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let (name_bytes, path) = (name.to_bytes(), dir.path.join(OsStr::from_bytes(name.to_bytes())));
            match statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if stat.st_dev == self.device => {
                    let in_pool = format!("{base}/{}", String::from_utf8_lossy(name_bytes));
                    let mut entry = Entry::new(path, in_pool, &stat);
                    entry.name = Some((dir.key, name_bytes.to_vec()));
                    entries.push(entry);
                }
                Ok(_) => {}
                Err(error) if is_gone(error) => {}
                Err(error) => walked.errors.push(format!("{}: {error}", path.display())),
            }
        }
        entries.sort_by(|left, right| left.path.cmp(&right.path));
        Ok(entries)
    }
}

/// Whether a file is not there any more; a mount that is gone is another error, or another file.
const fn is_gone(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::STALE | Errno::NOTDIR)
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
