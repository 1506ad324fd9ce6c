//! Where paths start: the mount's root, the working directory, open directories, and directories outside the
//! mount from which names lead in.

use super::Process;
use super::pool::By;
use crate::Errno;
use crate::config::PoolId;
use crate::sys::kernel;
use crate::walk::{FileId, Here, Resolve, Route, Scope, Start, Stop, fail, walk};
use crate::why::Why;
use varve_format::InodeKey;
use varve_libfs::Cred;

/// The working directory.
#[derive(Debug, Clone, Default)]
pub(super) struct Cwd {
    /// Its pool and its path below the mount, if it is there.
    route: Option<(PoolId, Route)>,
    key: Option<InodeKey>,
    /// Its path, if it is elsewhere.
    outside: Option<Vec<u8>>,
    /// It is on a mount, but not where its path says any more: paths from there are the kernel's.
    astray: Option<FileId>,
}

impl Process {
    /// Whether a path is in the mount, as far as can be told without a session, and the calls so far do not
    /// justify opening a session for a read-only one. Counts the call.
    #[must_use]
    pub fn is_early(&self, dirfd: i32, path: &[u8]) -> bool {
        if self.is_off() || self.pools().all(|(_, pool)| pool.has_session()) {
            return false;
        }
        self.place_of(dirfd, path)
            .map(|(pool, _)| self.pool(pool))
            .is_some_and(|pool| {
                !pool.is_off() && !pool.is_worth_a_session(self.config.session_after, By::Path)
            })
    }

    /// Returns the route of an [early](Self::is_early) path.
    pub fn early_route(&self, dirfd: i32, path: &[u8]) -> Route {
        self.place_of(dirfd, path)
            .map_or_else(Route::new, |(_, route)| route)
    }

    /// The pool of a path and the path below its mount, as the names alone say; without a session.
    fn place_of(&self, dirfd: i32, path: &[u8]) -> Option<(PoolId, Route)> {
        let below = |(pool, route): (PoolId, &[u8])| (pool, Route::from_slice(route));
        if path.first()? == &b'/' {
            return self.config.under_mount(path).map(below);
        }
        let here = match dirfd {
            libc::AT_FDCWD => self.cwd.read().route.clone(),
            _ => None,
        };
        let Some((pool, mut route)) = here else {
            return self.led_in(dirfd, path).map(below);
        };
        route.push(b'/');
        route.extend_from_slice(path);
        Some((pool, route))
    }

    /// The root of a pool's mount, from where `rest` is to be walked; `None`: it is the kernel's, since no
    /// session is to be had.
    pub(super) fn start_at_root<'a>(&self, pool: PoolId, rest: &'a [u8]) -> Here<Option<Start<'a>>> {
        if self.pool(pool).is_off() {
            return Ok(None);
        }
        Ok(Some(Start {
            pool,
            dir: self.fs(pool)?.root(),
            route: Route::new(),
            rest,
            resolve: Resolve::default(),
        }))
    }

    /// As [`start`](Self::start), of a walk with rules. Where these say something of what lies outside of the
    /// mounts, the path is the kernel's.
    ///
    /// # Errors
    /// As `start`; EXDEV.
    pub fn start_by_rules<'a>(
        &self,
        dirfd: i32,
        path: &'a [u8],
        resolve: Resolve,
    ) -> Here<Option<Start<'a>>> {
        let relative = match (path.first(), resolve.scope) {
            (Some(b'/'), Some(Scope::InRoot)) => {
                let rest = path.iter().position(|byte| *byte != b'/');
                rest.map_or(&b"."[..], |at| &path[at..])
            }
            _ => path,
        };
        let is_inside = self.table.has(dirfd) || (dirfd == libc::AT_FDCWD && self.cwd.read().route.is_some());
        if is_inside && resolve.scope == Some(Scope::Beneath) && relative.starts_with(b"/") {
            return fail(libc::EXDEV);
        }
        let crosses = !is_inside || relative.starts_with(b"/");
        if crosses && (resolve.scope.is_some() || resolve.no_xdev) {
            // The kernel knows what lies between, if the path comes here at all.
            let found = self.start(dirfd, relative)?;
            return found.map_or(Ok(None), |_| Err(Stop::Kernel(Why::PathOutside)));
        }
        let start = self.start(dirfd, relative)?;
        Ok(start.map(|start| Start { resolve, ..start }))
    }

    /// Returns where a path starts if that is in the mount. `None` if the path is the kernel's.
    ///
    /// # Errors
    /// ENOTDIR if `dirfd` is a served file that is no directory; ENOENT for an empty path with a served
    /// descriptor; [`Stop::Kernel`] if there can be no session.
    pub fn start<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        if self.is_off() {
            return Ok(None);
        }
        if path.is_empty() && !self.table.has(dirfd) {
            return Ok(None);
        }
        if path.starts_with(b"/") {
            let found = self.config.under_mount(path);
            return found.map_or(Ok(None), |(pool, rest)| self.start_at_root(pool, rest));
        }
        if dirfd == libc::AT_FDCWD {
            if let Some((id, route)) = self.cwd_key()? {
                return Ok(Some(Start {
                    pool: id.pool,
                    dir: id.key,
                    route,
                    rest: path,
                    resolve: Resolve::default(),
                }));
            }
            return self.start_outside(dirfd, path);
        }
        let Some(ofd) = self.table.get(dirfd) else {
            return self.start_outside(dirfd, path);
        };
        if path.is_empty() {
            return fail(libc::ENOENT);
        }
        if !ofd.is_dir {
            return fail(libc::ENOTDIR);
        }
        Ok(Some(Start {
            pool: ofd.pool,
            dir: ofd.key(),
            route: ofd.route.clone(),
            rest: path,
            resolve: Resolve::default(),
        }))
    }

    /// Resolves a relative path from a directory outside the mount, if its names alone lead in. A path with
    /// symbolic links on the way is left to the kernel.
    fn start_outside<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        let found = self.led_in(dirfd, path);
        found.map_or(Ok(None), |(pool, rest)| self.start_at_root(pool, rest))
    }

    /// The pool that a relative path from a directory outside leads into, and the rest of the path.
    fn led_in<'a>(&self, dirfd: i32, path: &'a [u8]) -> Option<(PoolId, &'a [u8])> {
        if !self.config.could_enter(path) {
            return None;
        }
        let (pool, (rest, _)) = if dirfd == libc::AT_FDCWD {
            let cwd = self.cwd.read();
            let from = cwd.outside.as_deref()?;
            // Above the directory is something else when it was moved since.
            self.config
                .entered(from, path)
                .filter(|(_, (_, goes_up))| !goes_up || kernel::getcwd().as_deref() == Some(from))
        } else if self.table.has(dirfd) {
            None
        } else {
            kernel::directory_path(dirfd).and_then(|from| self.config.entered(&from, path))
        }?;
        Some((pool, rest))
    }

    fn cwd_key(&self) -> Here<Option<(FileId, Route)>> {
        let (route, key) = {
            let cwd = self.cwd.read();
            (cwd.route.clone(), cwd.key)
        };
        let Some((pool, route)) = route else {
            return Ok(None);
        };
        if let Some(key) = key {
            return Ok(Some((FileId { pool, key }, route)));
        }
        let Some(start) = self.start_at_root(pool, &route)? else {
            return Ok(None);
        };
        let found = walk(self, start, false, &Cred::root())
            .ok()
            .filter(|walked| walked.pool == pool)
            .and_then(|walked| walked.target);
        let here = kernel::identity(-1).filter(|(device, _)| *device == self.pool(pool).config.device);
        let key = found
            .filter(|attr| here.is_some_and(|(_, number)| number == attr.key.number()))
            .map(|attr| attr.key);
        let Some(key) = key else {
            // It was moved or removed; the kernel knows the directory.
            *self.cwd.write() = Cwd {
                astray: here.map(|(_, number)| FileId {
                    pool,
                    key: InodeKey::of_number(number),
                }),
                ..Cwd::default()
            };
            return Ok(None);
        };
        *self.cwd.write() = Cwd {
            route: Some((pool, route.clone())),
            key: Some(key),
            ..Cwd::default()
        };
        Ok(Some((FileId { pool, key }, route)))
    }

    /// Returns the present path of the working directory, if that is on the mount. Other processes may have
    /// moved it, which the kernel notices only at its next lookup.
    ///
    /// # Errors
    /// ENOENT if it was removed; [`Stop::Kernel`] if the kernel has to answer.
    pub fn working_path(&self) -> Here<Vec<u8>> {
        let has_session = |id: PoolId| self.pool(id).open().is_some();
        let is_early = self
            .cwd
            .read()
            .route
            .as_ref()
            .is_some_and(|(pool, _)| !has_session(*pool));
        if self.is_off() || is_early {
            return Err(Stop::Kernel(Why::FirstCalls));
        }
        let (FileId { pool, key }, route) = match self.cwd_key()? {
            Some((id, route)) => (id, Some(route)),
            None => (
                self.cwd.read().astray.ok_or(Stop::Kernel(Why::PathOutside))?,
                None,
            ),
        };
        let fs = self.fs(pool)?;
        let is_at = |route: &Route| {
            let start = self.start_at_root(pool, route).ok().flatten();
            let walked = start.and_then(|start| walk(self, start, false, &Cred::root()).ok());
            walked.is_some_and(|walked| {
                walked.pool == pool && walked.target.is_some_and(|attr| attr.key == key)
            })
        };
        let below = match route.filter(is_at) {
            Some(route) => route.to_vec(),
            None => match (fs.path_of(key), fs.getattr(key)) {
                (Some(path), _) => path,
                (None, Err(Errno(libc::ENOENT | libc::ESTALE))) => return fail(libc::ENOENT),
                (None, Ok(attr)) if attr.nlink == 0 => return fail(libc::ENOENT),
                _ => return Err(Stop::Kernel(Why::CannotOpen)),
            },
        };
        Ok([self.pool(pool).config.mount.as_slice(), &below].concat())
    }

    /// Looks up the working directory's path, if it is on a mount, after a directory was renamed.
    pub fn may_have_moved(&self) {
        if self.cwd.read().route.is_some() {
            self.moved();
        }
    }

    /// Records a change of the working directory.
    pub fn moved(&self) {
        let path = kernel::getcwd();
        let route = path
            .as_deref()
            .and_then(|path| self.config.under_mount(path))
            .map(|(pool, route)| (pool, Route::from_slice(route)));
        let outside = path.filter(|_| route.is_none());
        *self.cwd.write() = Cwd {
            route,
            outside,
            ..Cwd::default()
        };
        // Now, while the path is the right one; a process that never touched the mount may do so later.
        let pool = self.cwd.read().route.as_ref().map(|(pool, _)| *pool);
        if pool.is_some_and(|pool| self.pool(pool).has_session()) {
            let _ = self.cwd_key();
        }
    }
}
