//! From paths to inodes: components, symbolic links, `..`, trailing slashes.

use std::collections::VecDeque;
use varve_format::{FileKind, InodeAttr, InodeKey};

use super::{Fd, Posix};
use crate::errno::{Errno, Result};

/// Most symbolic links in one walk.
const LINKS_MAX: u32 = 40;
/// Longest path, with its end.
const PATH_MAX: usize = 4096;

/// Result of a walk.
pub(super) struct Walked {
    /// Directory of the last component.
    pub dir: InodeKey,
    /// Last component; empty for the root, else perhaps `.` or `..`.
    pub name: Vec<u8>,
    /// Attributes of the target, if it exists.
    pub target: Option<InodeAttr>,
    /// The path required a directory, with a slash at the end.
    pub slash: bool,
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = Vec<u8>> + '_ {
    path.split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty())
        .map(<[u8]>::to_vec)
}

impl Posix {
    /// Walks `path`. The last component may be missing; if it is a symbolic link it is followed with
    /// `follow`, or if a slash comes after.
    pub(super) fn walk(&self, dirfd: Fd, path: &[u8], follow: bool) -> Result<Walked> {
        if path.is_empty() {
            return Err(Errno(libc::ENOENT));
        }
        if path.len() >= PATH_MAX {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        if path.contains(&0) {
            return Err(Errno(libc::EINVAL));
        }
        let cred = self.cred();
        let mut dir = self.base(dirfd, path)?;
        let mut slash = path.ends_with(b"/");
        let mut rest: VecDeque<Vec<u8>> = components(path).collect();
        let mut links = 0;
        loop {
            let Some(name) = rest.pop_front() else {
                let target = Some(self.fs.getattr(dir)?);
                return Ok(Walked {
                    dir,
                    name: Vec::new(),
                    target,
                    slash: true,
                });
            };
            let last = rest.is_empty();
            let attr = match self.fs.lookup(dir, &name, &cred) {
                Ok(attr) => attr,
                Err(Errno(libc::ENOENT)) if last => {
                    return Ok(Walked {
                        dir,
                        name,
                        target: None,
                        slash,
                    });
                }
                Err(errno) => return Err(errno),
            };
            if attr.kind() == FileKind::Symlink && (!last || follow || slash) {
                links += 1;
                if links > LINKS_MAX {
                    return Err(Errno(libc::ELOOP));
                }
                let target = self.fs.readlink(attr.key)?;
                if target.starts_with(b"/") {
                    dir = self.fs.root();
                }
                slash |= last && target.ends_with(b"/");
                for part in components(&target).rev() {
                    rest.push_front(part);
                }
                continue;
            }
            if last {
                if slash && !attr.is_dir() {
                    return Err(Errno(libc::ENOTDIR));
                }
                return Ok(Walked {
                    dir,
                    name,
                    target: Some(attr),
                    slash,
                });
            }
            if !attr.is_dir() {
                return Err(Errno(libc::ENOTDIR));
            }
            dir = attr.key;
        }
    }

    /// Returns the directory and last name of a path, without looking the last name up. `None`: the path must
    /// be walked.
    pub(super) fn unseen<'a>(&self, dirfd: Fd, path: &'a [u8]) -> Option<(InodeKey, &'a [u8])> {
        let start = path.iter().rposition(|byte| *byte == b'/').map_or(0, |at| at + 1);
        let (above, name) = path.split_at(start);
        if name.is_empty() || path.len() >= PATH_MAX {
            return None;
        }
        // No directory in between, at most the root before it.
        if above.iter().all(|byte| *byte == b'/') {
            return Some((self.base(dirfd, path).ok()?, name));
        }
        let found = self.walk(dirfd, above, true).ok()?.target?;
        found.is_dir().then_some((found.key, name))
    }

    /// Returns the attributes of the target of `path`.
    pub(super) fn find(&self, dirfd: Fd, path: &[u8], follow: bool) -> Result<InodeAttr> {
        self.walk(dirfd, path, follow)?.target.ok_or(Errno(libc::ENOENT))
    }

    /// Returns the directory and name of a path to be made; the name must be free.
    pub(super) fn place(&self, dirfd: Fd, path: &[u8], directory: bool) -> Result<(InodeKey, Vec<u8>)> {
        // As Linux: a symbolic link here is never followed, and an existing name is reported before the slash
        // is checked.
        let walked = self.walk(dirfd, path.strip_suffix_slashes(true), false)?;
        if walked.target.is_some() {
            return Err(Errno(libc::EEXIST));
        }
        if path.ends_with(b"/") && !directory {
            return Err(Errno(libc::ENOENT));
        }
        Ok((walked.dir, walked.name))
    }
}

/// Strips trailing slashes: after the name of a directory to be made they mean nothing; after a symbolic link
/// they must not make the walk follow it.
pub(super) trait StripSlashes {
    fn strip_suffix_slashes(&self, strip: bool) -> &[u8];
}

impl StripSlashes for [u8] {
    fn strip_suffix_slashes(&self, strip: bool) -> &[u8] {
        let mut path = self;
        while strip && path.len() > 1 && path.ends_with(b"/") {
            path = &path[..path.len() - 1];
        }
        path
    }
}
