//! Where paths start: the mount's root, the working directory, open directories, and directories outside the
//! mount from which names lead in.

use super::Process;
use crate::Errno;
use crate::sys::kernel;
use crate::walk::{Here, Route, Start, Stop, fail, walk};
use std::sync::atomic::Ordering;
use varve_format::InodeKey;
use varve_libfs::Cred;

/// The working directory.
#[derive(Debug, Clone, Default)]
pub(super) struct Cwd {
    /// Path below the mount, if it is there.
    route: Option<Route>,
    key: Option<InodeKey>,
    /// Its path, if it is elsewhere.
    outside: Option<Vec<u8>>,
    /// It is on the mount, but no longer where its path says: paths from there are left to the kernel.
    astray: Option<InodeKey>,
}

impl Process {
    /// Whether a path is in the mount, as far as can be told without a session, and the calls so far do not
    /// justify opening a session for a read-only one. Counts the call.
    #[must_use]
    pub fn is_early(&self, dirfd: i32, path: &[u8]) -> bool {
        if self.has_session() || self.off.load(Ordering::Acquire) {
            return false;
        }
        let is_ours = match path.first() {
            None => false,
            Some(b'/') => self.config.under_mount(path).is_some(),
            Some(_) => dirfd == libc::AT_FDCWD && self.cwd.read().route.is_some(),
        };
        is_ours && !self.is_worth_a_session()
    }

    /// Returns where a path starts if that is in the mount. `None` if the path is the kernel's.
    ///
    /// # Errors
    /// ENOTDIR if `dirfd` is a served file that is no directory; ENOENT for an empty path with a served
    /// descriptor; [`Stop::Kernel`] if there can be no session.
    pub fn start<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        if self.off.load(Ordering::Acquire) {
            return Ok(None);
        }
        if path.is_empty() && !self.table.has(dirfd) {
            return Ok(None);
        }
        if path.starts_with(b"/") {
            let Some(rest) = self.config.under_mount(path) else {
                return Ok(None);
            };
            return Ok(Some(Start {
                dir: self.fs()?.root(),
                route: Route::new(),
                rest,
            }));
        }
        if dirfd == libc::AT_FDCWD {
            if let Some((dir, route)) = self.cwd_key()? {
                return Ok(Some(Start {
                    dir,
                    route,
                    rest: path,
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
            dir: ofd.key(),
            route: ofd.route.clone(),
            rest: path,
        }))
    }

    /// Resolves a relative path from a directory outside the mount, if its names alone lead in. A path with
    /// symbolic links on the way is left to the kernel.
    fn start_outside<'a>(&self, dirfd: i32, path: &'a [u8]) -> Here<Option<Start<'a>>> {
        if !self.config.could_enter(path) {
            return Ok(None);
        }
        let found = if dirfd == libc::AT_FDCWD {
            let cwd = self.cwd.read();
            let Some(from) = cwd.outside.as_deref() else {
                return Ok(None);
            };
            match self.config.entered(from, path) {
                // If the directory was moved, `..` leads elsewhere.
                Some((_, true)) if kernel::getcwd().as_deref() != Some(from) => None,
                Some((rest, _)) => Some(rest),
                None => None,
            }
        } else {
            kernel::directory_path(dirfd).and_then(|from| Some(self.config.entered(&from, path)?.0))
        };
        found
            .map(|rest| {
                Ok(Start {
                    dir: self.fs()?.root(),
                    route: Route::new(),
                    rest,
                })
            })
            .transpose()
    }

    fn cwd_key(&self) -> Here<Option<(InodeKey, Route)>> {
        let (route, key) = {
            let cwd = self.cwd.read();
            (cwd.route.clone(), cwd.key)
        };
        let Some(route) = route else { return Ok(None) };
        if let Some(key) = key {
            return Ok(Some((key, route)));
        }
        let fs = self.fs()?;
        let start = Start {
            dir: fs.root(),
            route: Route::new(),
            rest: &route,
        };
        let found = walk(fs, &self.config, start, false, &Cred::root())
            .ok()
            .and_then(|walked| walked.target);
        let here = kernel::identity(-1).filter(|(device, _)| *device == self.config.device);
        let key = found
            .filter(|attr| here.is_some_and(|(_, number)| number == attr.key.number()))
            .map(|attr| attr.key);
        let Some(key) = key else {
            // It was moved or removed; the kernel knows the directory.
            *self.cwd.write() = Cwd {
                astray: here.map(|(_, number)| InodeKey::of_number(number)),
                ..Cwd::default()
            };
            return Ok(None);
        };
        *self.cwd.write() = Cwd {
            route: Some(route.clone()),
            key: Some(key),
            ..Cwd::default()
        };
        Ok(Some((key, route)))
    }

    /// Returns the present path of the working directory, if that is on the mount. Other processes may have
    /// moved it, which the kernel notices only at its next lookup.
    ///
    /// # Errors
    /// ENOENT if it was removed; [`Stop::Kernel`] if the kernel has to answer.
    pub fn working_path(&self) -> Here<Vec<u8>> {
        if self.off.load(Ordering::Acquire) || !self.has_session() {
            return Err(Stop::Kernel);
        }
        let found = self.cwd_key()?;
        let fs = self.fs()?;
        let (key, route) = match found {
            Some((key, route)) => (key, Some(route)),
            None => (self.cwd.read().astray.ok_or(Stop::Kernel)?, None),
        };
        let is_at = |route: &Route| {
            let start = Start {
                dir: fs.root(),
                route: Route::new(),
                rest: route,
            };
            let walked = walk(fs, &self.config, start, false, &Cred::root());
            walked.is_ok_and(|walked| walked.target.is_some_and(|attr| attr.key == key))
        };
        let below = match route.filter(is_at) {
            Some(route) => route.to_vec(),
            None => match (fs.path_of(key), fs.getattr(key)) {
                (Some(path), _) => path,
                (None, Err(Errno(libc::ENOENT | libc::ESTALE))) => return fail(libc::ENOENT),
                (None, Ok(attr)) if attr.nlink == 0 => return fail(libc::ENOENT),
                _ => return Err(Stop::Kernel),
            },
        };
        Ok([self.config.mount.as_slice(), &below].concat())
    }

    /// Records a change of the working directory.
    pub fn moved(&self) {
        let path = kernel::getcwd();
        let route = path
            .as_deref()
            .and_then(|path| self.config.under_mount(path))
            .map(Route::from_slice);
        let outside = path.filter(|_| route.is_none());
        *self.cwd.write() = Cwd {
            route,
            outside,
            ..Cwd::default()
        };
        // Resolved at once, while the path is right; a process without a session does so later.
        if self.fs.get().is_some() {
            let _ = self.cwd_key();
        }
    }
}
