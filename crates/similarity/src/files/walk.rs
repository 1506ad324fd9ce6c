//! Selection of files: includes, excludes, least age. Symbolic links are not followed, hard links count once,
//! other file systems are not entered.

use globset::{Glob, GlobSet, GlobSetBuilder};
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Messages that are kept.
const ERRORS_MAX: usize = 100;

/// Selects files.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    include: Option<GlobSet>,
    exclude: Option<GlobSet>,
    min_age: Duration,
}

impl Filter {
    /// Creates a filter. Patterns are matched against the whole path and against the name. Without an
    /// include, all files are included.
    ///
    /// # Errors
    /// If a pattern is invalid.
    pub fn new(include: &[String], exclude: &[String], min_age: Duration) -> Result<Self, globset::Error> {
        let set = |patterns: &[String]| -> Result<Option<GlobSet>, globset::Error> {
            if patterns.is_empty() {
                return Ok(None);
            }
            let mut set = GlobSetBuilder::new();
            for pattern in patterns {
                set.add(Glob::new(pattern)?);
            }
            Ok(Some(set.build()?))
        };
        Ok(Self {
            include: set(include)?,
            exclude: set(exclude)?,
            min_age,
        })
    }

    fn excludes(&self, path: &Path) -> bool {
        self.exclude.as_ref().is_some_and(|set| matches(set, path))
    }

    fn includes(&self, path: &Path) -> bool {
        self.include.as_ref().is_none_or(|set| matches(set, path))
    }
}

fn matches(set: &GlobSet, path: &Path) -> bool {
    set.is_match(path) || path.file_name().is_some_and(|name| set.is_match(name))
}

/// A selected file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chosen {
    /// Its path.
    pub path: PathBuf,
    /// Device and inode number.
    pub id: (u64, u64),
    /// User and group that own it.
    pub owner: (u32, u32),
    /// Bytes.
    pub len: u64,
    /// Time of its last change of data, in ns since 1970.
    pub mtime_ns: i128,
    /// Time of its last change of any kind, in ns since 1970.
    pub ctime_ns: i128,
}

impl Chosen {
    /// Takes the fields from the file's metadata.
    pub fn new(path: &Path, metadata: &std::fs::Metadata) -> Self {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            path: path.to_owned(),
            id: (metadata.dev(), metadata.ino()),
            owner: (metadata.uid(), metadata.gid()),
            len: metadata.len(),
            mtime_ns: ns(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: ns(metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// The result of a walk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Files passed to the caller.
    pub files: u64,
    /// Files that are too young.
    pub too_young: u64,
    /// Files that the filter excluded.
    pub left_out: u64,
    /// Messages on paths that could not be read, at most a hundred.
    pub errors: Vec<String>,
    /// Roots that are not there, cannot be read, or are neither a file nor a directory.
    pub roots_missed: u64,
    /// Paths that could not be looked at; more than [`MISSED_MAX`] are not kept.
    missed: HashSet<PathBuf>,
}

/// Paths that could not be looked at and are kept.
const MISSED_MAX: usize = 10_000;

impl Found {
    /// Adds the message on a path that could not be read.
    pub fn note(&mut self, message: String) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push(message);
        }
    }

    /// Whether a path is, or is below, one that could not be looked at. If a root was missed, any path may
    /// have been, as roots may be spelled in several ways.
    pub fn has_missed(&self, path: &Path) -> bool {
        self.roots_missed > 0
            || self.missed.len() >= MISSED_MAX
            || path.ancestors().any(|above| self.missed.contains(above))
    }

    fn miss(&mut self, depth: usize, path: Option<&Path>, message: String) {
        self.note(message);
        match path {
            Some(path) if depth > 0 => {
                if self.missed.len() < MISSED_MAX {
                    self.missed.insert(path.to_owned());
                }
            }
            _ => self.roots_missed += 1,
        }
    }
}

/// Calls `each` with all selected regular files under `roots` that are not empty, until it returns false.
pub fn walk(roots: &[PathBuf], filter: &Filter, each: &mut dyn FnMut(Chosen) -> bool) -> Found {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos() as i128;
    for root in roots {
        let tree = walkdir::WalkDir::new(root)
            .same_file_system(true)
            .sort_by_file_name();
        // A root is walked whatever its name.
        let wanted = |entry: &walkdir::DirEntry| entry.depth() == 0 || !filter.excludes(entry.path());
        for entry in tree.into_iter().filter_entry(wanted) {
            let entry = entry.and_then(|entry| entry.metadata().map(|metadata| (entry, metadata)));
            let (entry, mut metadata) = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    found.miss(error.depth(), error.path(), error.to_string());
                    continue;
                }
            };
            // A root may be a link, to a directory or to a file, which is read without following any.
            let mut target = None;
            if entry.depth() == 0 && metadata.is_symlink() {
                match std::fs::metadata(root).and_then(|to| Ok((to, std::fs::canonicalize(root)?))) {
                    Ok((to, path)) => (metadata, target) = (to, Some(path)),
                    Err(error) => {
                        found.miss(0, None, format!("{}: {error}", root.display()));
                        continue;
                    }
                }
            }
            if entry.depth() == 0 && !metadata.is_file() && !metadata.is_dir() {
                let message = format!("{} is neither a file nor a directory", root.display());
                found.miss(0, None, message);
                continue;
            }
            if !metadata.is_file() || metadata.len() == 0 {
                continue;
            }
            let chosen = Chosen::new(target.as_deref().unwrap_or(entry.path()), &metadata);
            if entry.depth() > 0 && !filter.includes(entry.path()) {
                found.left_out += 1;
            } else if now - chosen.mtime_ns < filter.min_age.as_nanos() as i128 {
                found.too_young += 1;
            } else if metadata.nlink() > 1 && !seen.insert(chosen.id) {
                // Another name of a file that was already passed on.
            } else {
                found.files += 1;
                if !each(chosen) {
                    return found;
                }
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path, filter: &Filter) -> (Vec<String>, Found) {
        let mut names = Vec::new();
        let found = walk(&[dir.to_owned()], filter, &mut |chosen| {
            let name = chosen
                .path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            names.push(name);
            true
        });
        (names, found)
    }

    #[test]
    fn walk_gives_each_file_once_and_keeps_the_filters() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("cache")).expect("made");
        for name in ["a.img", "b.img", "c.txt", "cache/d.img", "empty"] {
            std::fs::write(at(name), if name == "empty" { "" } else { name }).expect("written");
        }
        std::fs::hard_link(at("a.img"), at("z.img")).expect("linked");
        std::os::unix::fs::symlink(at("a.img"), at("l.img")).expect("linked");
        assert_eq!(names(&at("l.img"), &Filter::default()).0, ["a.img"]);
        std::os::unix::fs::symlink(at("cache"), at("l")).expect("linked");
        let (found, told) = names(&at("l"), &Filter::default());
        assert_eq!((found, told.errors.len()), (vec!["d.img".to_owned()], 0));
        let filter = |include: &[&str], exclude: &[&str], age| {
            let text = |patterns: &[&str]| patterns.iter().map(|p| (*p).to_owned()).collect::<Vec<_>>();
            Filter::new(&text(include), &text(exclude), Duration::from_secs(age)).expect("patterns")
        };
        assert_eq!(
            names(dir.path(), &filter(&[], &[], 0)).0,
            ["a.img", "b.img", "c.txt", "d.img"]
        );
        let (found, told) = names(dir.path(), &filter(&["*.img"], &["cache"], 0));
        assert_eq!(
            (found, told.left_out),
            (vec!["a.img".to_owned(), "b.img".to_owned()], 1)
        );
        let (found, told) = names(dir.path(), &filter(&[], &[], 3600));
        assert_eq!((found.len(), told.too_young), (0, 5));
        assert!(Filter::new(&["[".to_owned()], &[], Duration::ZERO).is_err());
    }

    #[test]
    fn what_is_not_there_is_told() {
        let (names_found, found) = names(Path::new("/nowhere/at/all"), &Filter::default());
        assert!(names_found.is_empty() && found.errors.len() == 1, "{found:?}");
        assert!(found.roots_missed == 1 && found.has_missed(Path::new("elsewhere")));
        let dir = tempfile::tempdir().expect("a directory");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/nowhere", &link).expect("linked");
        assert_eq!(names(&link, &Filter::default()).1.roots_missed, 1);
        // Below a root a link is not followed, and nothing is missed.
        let (_, found) = names(dir.path(), &Filter::default());
        assert!(found.errors.is_empty() && !found.has_missed(&link));
        assert_eq!(
            names(Path::new("/dev/null"), &Filter::default()).1.roots_missed,
            1
        );
    }

    #[test]
    fn paths_below_one_that_was_missed_are_missed() {
        let mut found = Found::default();
        found.miss(2, Some(Path::new("a/b")), "a/b: no".into());
        assert!(found.has_missed(Path::new("a/b")) && found.has_missed(Path::new("a/b/c/d")));
        assert!(!found.has_missed(Path::new("a/bc")) && !found.has_missed(Path::new("a")));
        for n in 0..MISSED_MAX {
            found.miss(1, Some(Path::new(&format!("x{n}"))), String::new());
        }
        assert!(found.has_missed(Path::new("anything")) && found.errors.len() == 100);
    }
}
