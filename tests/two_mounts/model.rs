//! What three ways into one pool must see: names, links and bytes in plain maps.

use std::collections::{BTreeMap, BTreeSet};

/// A file, with or without names.
#[derive(Debug, Clone, Default)]
pub struct File {
    pub data: Vec<u8>,
    pub permissions: u32,
    pub nlink: u64,
}

/// The tree: two lasting directories and some that come and go.
#[derive(Debug, Default)]
pub struct Model {
    pub files: Vec<File>,
    pub names: BTreeMap<String, usize>,
    pub dirs: BTreeSet<String>,
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

impl Model {
    fn has_parent(&self, path: &str) -> bool {
        let parent = parent(path);
        parent.is_empty() || self.dirs.contains(parent)
    }

    /// The file of a name, or the errno.
    pub fn find(&self, path: &str) -> Result<usize, i32> {
        if self.dirs.contains(path) {
            return Err(libc::EISDIR);
        }
        self.names.get(path).copied().ok_or(libc::ENOENT)
    }

    /// The file of a name, made if it is not there.
    pub fn find_or_make(&mut self, path: &str) -> Result<usize, i32> {
        match self.find(path) {
            Err(libc::ENOENT) if self.has_parent(path) => {
                self.files.push(File {
                    permissions: 0o644,
                    nlink: 1,
                    ..File::default()
                });
                self.names.insert(path.to_owned(), self.files.len() - 1);
                Ok(self.files.len() - 1)
            }
            other => other,
        }
    }

    pub fn unlink(&mut self, path: &str) -> Result<(), i32> {
        let file = self.find(path)?;
        self.names.remove(path);
        self.files[file].nlink -= 1;
        Ok(())
    }

    pub fn link(&mut self, from: &str, to: &str) -> Result<(), i32> {
        let file = self.names.get(from).copied().ok_or(libc::ENOENT)?;
        if !self.has_parent(to) {
            return Err(libc::ENOENT);
        }
        if self.names.contains_key(to) {
            return Err(libc::EEXIST);
        }
        self.names.insert(to.to_owned(), file);
        self.files[file].nlink += 1;
        Ok(())
    }

    pub fn rename(&mut self, from: &str, to: &str) -> Result<(), i32> {
        let file = self.names.get(from).copied().ok_or(libc::ENOENT)?;
        if !self.has_parent(to) {
            return Err(libc::ENOENT);
        }
        if self.names.get(to) == Some(&file) {
            return Ok(());
        }
        if let Some(over) = self.names.insert(to.to_owned(), file) {
            self.files[over].nlink -= 1;
        }
        self.names.remove(from);
        Ok(())
    }

    pub fn mkdir(&mut self, path: &str) -> Result<(), i32> {
        if self.dirs.insert(path.to_owned()) {
            Ok(())
        } else {
            Err(libc::EEXIST)
        }
    }

    pub fn rmdir(&mut self, path: &str) -> Result<(), i32> {
        if !self.dirs.contains(path) {
            return Err(libc::ENOENT);
        }
        if self.names.keys().any(|name| parent(name) == path) {
            return Err(libc::ENOTEMPTY);
        }
        self.dirs.remove(path);
        Ok(())
    }

    /// Names in a directory, sorted.
    pub fn list(&self, path: &str) -> Vec<String> {
        let all = self.names.keys().chain(&self.dirs);
        let mut names: Vec<String> = all
            .filter(|name| parent(name) == path)
            .filter_map(|name| name.rsplit('/').next().map(str::to_owned))
            .collect();
        names.sort();
        names
    }
}
