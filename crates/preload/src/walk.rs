//! From paths to inodes of the mount: components, symbolic links, `..`. Reports a path that leaves the mount,
//! which is left to the kernel.

use crate::Errno;
use smallvec::SmallVec;
use std::borrow::Cow;
use varve_format::{FileKind, InodeAttr, InodeKey};
use varve_libfs::{Cred, Fs};

/// A path below the mount, or a name. Most are short and need no allocation: a call on a path takes a quarter
/// of a microsecond.
pub type Route = SmallVec<[u8; 64]>;

/// Upper bound on symbolic links in one walk, as in Linux.
const LINKS_MAX: u32 = 40;

/// The reason why a call is not served to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The kernel is to make the call.
    Kernel,
    /// The kernel has made the call, with this result.
    Made(isize),
    /// The call failed.
    Errno(Errno),
}

impl From<Errno> for Stop {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

/// The result of a call that LibFS serves, or the reason why it does not.
pub type Here<T> = Result<T, Stop>;

/// Returns a failure.
pub const fn fail<T>(errno: i32) -> Here<T> {
    Err(Stop::Errno(Errno(errno)))
}

/// Maps the error of a call on a directory itself. A removed directory still exists for the kernel if it is a
/// working directory or open.
fn of_removed(errno: Errno) -> Stop {
    match errno {
        Errno(libc::ESTALE) => Stop::Kernel,
        errno => errno.into(),
    }
}

/// The start of a walk.
#[derive(Debug, Clone)]
pub struct Start<'a> {
    /// Directory.
    pub dir: InodeKey,
    /// Its path below the mount.
    pub route: Route,
    /// The path to walk from there.
    pub rest: &'a [u8],
}

/// The result of a walk.
#[derive(Debug)]
pub struct Walked {
    /// Directory of the last component.
    pub dir: InodeKey,
    /// Last component; empty for the start itself, else perhaps `.` or `..`.
    pub name: Route,
    /// The inode of the last component, if it exists.
    pub target: Option<InodeAttr>,
    /// Whether the path requires a directory, by a slash at its end.
    pub slash: bool,
    /// Path of `dir` below the mount.
    pub route: Route,
}

impl Walked {
    /// Path of the target below the mount.
    #[must_use]
    pub fn whole(&self) -> Route {
        let mut route = self.route.clone();
        step(&mut route, &self.name);
        route
    }
}

/// Moves a path below the mount by one component.
fn step(route: &mut Route, name: &[u8]) {
    match name {
        b"" | b"." => {}
        b".." => route.truncate(route.iter().rposition(|byte| *byte == b'/').unwrap_or(0)),
        name => {
            route.push(b'/');
            route.extend_from_slice(name);
        }
    }
}

/// Tells where absolute symbolic links, and paths that climb out of the mount, lead back into it.
pub trait Mounted {
    /// Returns the rest of `path` behind the mount's path.
    fn under_mount<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]>;
    /// Returns the rest of `path` if, walked from the directory that holds the mount, it leads into the mount
    /// again.
    fn back_from_above<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]>;
}

impl Mounted for crate::config::Config {
    fn under_mount<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        Self::under_mount(self, path)
    }

    fn back_from_above<'a>(&self, path: &'a [u8]) -> Option<&'a [u8]> {
        let above = self.mount.iter().rposition(|byte| *byte == b'/')?;
        Some(self.entered(&self.mount[..above], path)?.0)
    }
}

/// Walks `start`. The last component may be missing; if it is a symbolic link, it is followed if `follow`, or
/// if a slash comes after.
///
/// # Errors
/// As the kernel's own walk; [`Stop::Kernel`] when the path leaves the mount.
pub fn walk(fs: &Fs, mounted: &impl Mounted, start: Start<'_>, follow: bool, cred: &Cred) -> Here<Walked> {
    let root = fs.root();
    let Start {
        mut dir,
        mut route,
        rest,
    } = start;
    let mut slash = rest.ends_with(b"/");
    let mut path = Cow::Borrowed(rest);
    let mut at = 0;
    let mut links = 0;
    loop {
        while path.get(at) == Some(&b'/') {
            at += 1;
        }
        if at == path.len() {
            return Ok(Walked {
                dir,
                name: Route::new(),
                target: Some(fs.getattr(dir).map_err(of_removed)?),
                slash: true,
                route,
            });
        }
        let end = path[at..]
            .iter()
            .position(|byte| *byte == b'/')
            .map_or(path.len(), |len| at + len);
        let name = &path[at..end];
        let last = path[end..].iter().all(|byte| *byte == b'/');
        if name == b".." && dir == root {
            let rest = mounted.back_from_above(&path[end..]).ok_or(Stop::Kernel)?;
            at = path.len() - rest.len();
            continue;
        }
        let attr = match fs.lookup(dir, name, cred) {
            Ok(attr) => attr,
            Err(Errno(libc::ENOENT)) if last => {
                return Ok(Walked {
                    dir,
                    name: Route::from_slice(name),
                    target: None,
                    slash,
                    route,
                });
            }
            Err(errno) if matches!(name, b"." | b"..") => return Err(of_removed(errno)),
            // The directory was removed, so it is empty.
            Err(Errno(libc::ESTALE)) => return fail(libc::ENOENT),
            Err(errno) => return Err(errno.into()),
        };
        if attr.kind() == FileKind::Symlink && (!last || follow || slash) {
            links += 1;
            if links > LINKS_MAX {
                return fail(libc::ELOOP);
            }
            let mut target = fs.readlink(attr.key)?;
            slash |= last && target.ends_with(b"/");
            if target.starts_with(b"/") {
                target = mounted.under_mount(&target).ok_or(Stop::Kernel)?.to_vec();
                dir = root;
                route.clear();
            }
            target.extend_from_slice(&path[end..]);
            path = Cow::Owned(target);
            at = 0;
            continue;
        }
        if last {
            if slash && !attr.is_dir() {
                return fail(libc::ENOTDIR);
            }
            return Ok(Walked {
                dir,
                name: Route::from_slice(name),
                target: Some(attr),
                slash,
                route,
            });
        }
        if !attr.is_dir() {
            return fail(libc::ENOTDIR);
        }
        step(&mut route, name);
        dir = attr.key;
        at = end;
    }
}

/// Returns `path` without the slashes at its end (one is left if there is nothing else).
#[must_use]
pub fn bare(path: &[u8]) -> &[u8] {
    let mut path = path;
    while path.len() > 1 && path.ends_with(b"/") {
        path = &path[..path.len() - 1];
    }
    path
}

#[cfg(test)]
mod tests {
    use super::{Route, bare, step};

    #[test]
    fn routes_follow_the_components() {
        let mut route = Route::new();
        for (name, after) in [
            ("a", "/a"),
            ("b", "/a/b"),
            (".", "/a/b"),
            ("..", "/a"),
            ("..", ""),
            ("c", "/c"),
        ] {
            step(&mut route, name.as_bytes());
            assert_eq!(&route[..], after.as_bytes());
        }
    }

    #[test]
    fn slashes_at_the_end_are_taken_off() {
        assert_eq!(bare(b"a//"), b"a");
        assert_eq!(bare(b"/"), b"/");
        assert_eq!(bare(b""), b"");
    }
}
