//! From paths to inodes of the mount: components, symbolic links, `..`. Reports a path that leaves the mount,
//! which is left to the kernel.

use crate::Errno;
use crate::config::PoolId;
use crate::why::Why;
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
    Kernel(Why),
    /// The kernel has made the call, with this result.
    Made(isize, Why),
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
        Errno(libc::ESTALE) => Stop::Kernel(Why::CannotOpen),
        errno => errno.into(),
    }
}

/// The rules of `openat2` for a walk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resolve {
    /// The walk does not leave the directory where it starts.
    pub scope: Option<Scope>,
    /// A symbolic link that would be followed is ELOOP.
    pub no_symlinks: bool,
    /// A step to another mount is EXDEV.
    pub no_xdev: bool,
}

/// The result of a step out of the directory where the walk starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// EXDEV (`RESOLVE_BENEATH`).
    Beneath,
    /// None: that directory is the root (`RESOLVE_IN_ROOT`).
    InRoot,
}

/// Where a walk starts.
#[derive(Debug, Clone)]
pub struct Start<'a> {
    /// Pool of the directory.
    pub pool: PoolId,
    /// Directory.
    pub dir: InodeKey,
    /// Its path below the mount.
    pub route: Route,
    /// The path to walk from there.
    pub rest: &'a [u8],
    /// Rules of the walk.
    pub resolve: Resolve,
}

/// The result of a walk.
#[derive(Debug)]
pub struct Walked {
    /// Pool of the directory, which may be another one than that of the start.
    pub pool: PoolId,
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

    /// Where the target is.
    #[must_use]
    pub fn place(&self) -> Place {
        Place {
            pool: self.pool,
            route: self.whole(),
            parent: self.dir,
        }
    }
}

/// Where a file is that is opened.
#[derive(Debug, Clone)]
pub struct Place {
    /// Its pool.
    pub pool: PoolId,
    /// Its path below the mount.
    pub route: Route,
    /// Its directory.
    pub parent: InodeKey,
}

/// A file among those of all pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Its pool.
    pub pool: PoolId,
    /// The inode there.
    pub key: InodeKey,
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

/// The pools among which a walk goes.
pub trait Pools {
    /// The session of a pool.
    ///
    /// # Errors
    /// [`Stop::Kernel`] when there is none to be had.
    fn session(&self, pool: PoolId) -> Here<&Fs>;
    /// The mount to which an absolute path leads, and what follows the mount's path.
    fn under_mount<'a>(&self, path: &'a [u8]) -> Option<(PoolId, &'a [u8])>;
    /// Returns the rest of `path` if, walked from the directory that holds the mount of `pool`, it leads into
    /// a mount again.
    fn back_from_above<'a>(&self, pool: PoolId, path: &'a [u8]) -> Option<(PoolId, &'a [u8])>;
}

/// A walk under way.
struct Walk<'p, P> {
    pools: &'p P,
    cred: &'p Cred,
    fs: &'p Fs,
    pool: PoolId,
    dir: InodeKey,
    route: Route,
    resolve: Resolve,
    /// With a [`Scope`]: the directory where the walk started, then those between it and `dir`.
    above: SmallVec<[InodeKey; 16]>,
    /// Path of the start below the mount.
    first_route: Route,
    links: u32,
}

impl<P: Pools> Walk<'_, P> {
    /// Goes on at the root of `pool`.
    fn enter(&mut self, pool: PoolId) -> Here<()> {
        self.fs = self.pools.session(pool)?;
        self.pool = pool;
        self.dir = self.fs.root();
        self.route.clear();
        Ok(())
    }

    /// Whether `..` leads to where the rules or the mount end, and what is done then: `Some` is what is left
    /// of `path`, behind the dots at `end`.
    fn up(&mut self, path: &[u8], end: usize) -> Here<Option<usize>> {
        if self.resolve.scope.is_some() && self.above.is_empty() {
            // A missing right to search the directory is reported first.
            self.fs.lookup(self.dir, b".", self.cred)?;
            return match self.resolve.scope {
                Some(Scope::InRoot) => Ok(Some(end)),
                _ => fail(libc::EXDEV),
            };
        }
        if self.dir != self.fs.root() {
            return Ok(None);
        }
        if self.resolve.no_xdev {
            self.fs.lookup(self.dir, b".", self.cred)?;
            return fail(libc::EXDEV);
        }
        let left = self.pools.back_from_above(self.pool, &path[end..]);
        let (pool, rest) = left.ok_or(Stop::Kernel(Why::PathOutside))?;
        self.enter(pool)?;
        Ok(Some(path.len() - rest.len()))
    }

    /// Follows a symbolic link, after which `rest` comes.
    fn follow(&mut self, link: InodeKey, rest: &[u8], slash: &mut bool) -> Here<Vec<u8>> {
        self.links += 1;
        if self.links > LINKS_MAX || self.resolve.no_symlinks {
            return fail(libc::ELOOP);
        }
        let mut target = self.fs.readlink(link)?;
        *slash |= rest.is_empty() && target.ends_with(b"/");
        if target.starts_with(b"/") {
            match self.resolve.scope {
                Some(Scope::Beneath) => return fail(libc::EXDEV),
                Some(Scope::InRoot) => {
                    self.dir = self.above.first().copied().unwrap_or(self.dir);
                    self.above.clear();
                    self.route.clone_from(&self.first_route);
                }
                None if self.resolve.no_xdev => return fail(libc::EXDEV),
                None => {
                    let (pool, rest) = self
                        .pools
                        .under_mount(&target)
                        .ok_or(Stop::Kernel(Why::PathOutside))?;
                    let rest = rest.to_vec();
                    self.enter(pool)?;
                    target = rest;
                }
            }
        }
        target.extend_from_slice(rest);
        Ok(target)
    }

    /// Goes on in the directory `to`, whose name here is `name`.
    fn descend(&mut self, name: &[u8], to: InodeKey) -> Here<()> {
        if self.resolve.scope.is_some() {
            match name {
                b"." => {}
                // Somebody moved one of the directories. So does the kernel, which does not look where the
                // walk would end.
                b".." if self.above.pop() != Some(to) => return fail(libc::EAGAIN),
                b".." => {}
                _ => self.above.push(self.dir),
            }
        }
        step(&mut self.route, name);
        self.dir = to;
        Ok(())
    }

    fn ended(self, name: &[u8], target: Option<InodeAttr>, slash: bool) -> Walked {
        Walked {
            pool: self.pool,
            dir: self.dir,
            name: Route::from_slice(name),
            target,
            slash,
            route: self.route,
        }
    }
}

/// Walks `start`. The last component may be missing; if it is a symbolic link, it is followed if `follow`, or
/// if a slash comes after.
///
/// # Errors
/// As the kernel's own walk; [`Stop::Kernel`] when the path leaves the mounts.
pub fn walk(pools: &impl Pools, start: Start<'_>, follow: bool, cred: &Cred) -> Here<Walked> {
    let mut walk = Walk {
        pools,
        cred,
        fs: pools.session(start.pool)?,
        pool: start.pool,
        dir: start.dir,
        first_route: match start.resolve.scope {
            Some(_) => start.route.clone(),
            None => Route::new(),
        },
        route: start.route,
        resolve: start.resolve,
        above: SmallVec::new(),
        links: 0,
    };
    let mut slash = start.rest.ends_with(b"/");
    let mut path = Cow::Borrowed(start.rest);
    let mut at = 0;
    loop {
        while path.get(at) == Some(&b'/') {
            at += 1;
        }
        if at == path.len() {
            let target = walk.fs.getattr(walk.dir).map_err(of_removed)?;
            return Ok(walk.ended(b"", Some(target), true));
        }
        let end = path[at..]
            .iter()
            .position(|byte| *byte == b'/')
            .map_or(path.len(), |len| at + len);
        let name = &path[at..end];
        let last = path[end..].iter().all(|byte| *byte == b'/');
        if name == b".."
            && let Some(after) = walk.up(&path, end)?
        {
            at = after;
            continue;
        }
        let attr = match walk.fs.lookup(walk.dir, name, cred) {
            Ok(attr) => attr,
            Err(Errno(libc::ENOENT)) if last => return Ok(walk.ended(name, None, slash)),
            Err(errno) if matches!(name, b"." | b"..") => return Err(of_removed(errno)),
            // The directory was removed, so it is empty.
            Err(Errno(libc::ESTALE)) => return fail(libc::ENOENT),
            Err(errno) => return Err(errno.into()),
        };
        if attr.kind() == FileKind::Symlink && (!last || follow || slash) {
            path = Cow::Owned(walk.follow(attr.key, &path[end..], &mut slash)?);
            at = 0;
            continue;
        }
        if last {
            if slash && !attr.is_dir() {
                return fail(libc::ENOTDIR);
            }
            if name == b".." && walk.above.last().is_some_and(|above| *above != attr.key) {
                return fail(libc::EAGAIN);
            }
            return Ok(walk.ended(name, Some(attr), slash));
        }
        if !attr.is_dir() {
            return fail(libc::ENOTDIR);
        }
        walk.descend(name, attr.key)?;
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
