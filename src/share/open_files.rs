//! Open files of a pool whose blocks are to be shared: which of them must be left, and why. Keeps few open.

use super::in_use::InUse;
use super::interruption::Interruption;
use crate::pool::Pool;
use crate::pool_session::PoolSession;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use std::cell::Cell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use varve_libfs::posix::{Fd, FdRanges};
use varve_libfs::{Deduped, Errno};
use varve_similarity::files::{Chosen, Kept};

/// Files that are kept open.
const OPEN_MAX: usize = 64;
/// How long a file that may be shared is not checked again.
const CHECK_VALID: Duration = Duration::from_secs(1);

/// Device and inode number of a file.
pub type FileId = (u64, u64);

/// An open file.
pub struct OpenFile {
    pub path: PathBuf,
    pub fd: Fd,
    checked: Instant,
    /// The check that used it last.
    used: u64,
    /// Shared since it was opened, so it is synced before it is closed.
    pub changed: Cell<bool>,
}

/// Open files, by identity.
pub struct OpenFiles<'p> {
    session: &'p PoolSession,
    open: HashMap<FileId, OpenFile>,
    /// Files that may not be shared, each with the reason.
    skipped: HashMap<FileId, String>,
    in_use: InUse,
    /// Number of checks.
    checks: u64,
}

impl<'p> OpenFiles<'p> {
    pub fn new(session: &'p PoolSession) -> Self {
        Self {
            session,
            open: HashMap::new(),
            skipped: HashMap::new(),
            in_use: InUse::on(session.mount.device),
            checks: 0,
        }
    }

    /// The pool of the files.
    pub const fn pool(&self) -> &Pool {
        &self.session.pool
    }

    /// Opens a file and returns `None` if its blocks may be shared; else the reason why they may not.
    pub fn check(&mut self, kept: &Kept) -> Result<Option<String>, Interruption> {
        let id = kept.id();
        self.checks += 1;
        if let Some(why) = self.skipped.get(&id) {
            return Ok(Some(why.clone()));
        }
        if let Some(open) = self.open.get_mut(&id)
            && open.checked.elapsed() < CHECK_VALID
        {
            open.used = self.checks;
            return Ok(None);
        }
        let why = self
            .reason(kept)
            .map_err(|errno| Interruption::daemon(&kept.path, errno))?;
        if let Some(why) = &why {
            if let Some(open) = self.open.remove(&id) {
                // Another failure of the daemon is found by the next call.
                let _ = self.close(&open);
            }
            self.skipped.insert(id, why.clone());
        }
        Ok(why)
    }

    /// Returns why the file must be left; opens it if it need not be.
    fn reason(&mut self, kept: &Kept) -> Result<Option<String>, Errno> {
        let now = std::fs::symlink_metadata(&kept.path);
        match now {
            Ok(now) if kept.is(&Chosen::new(&kept.path, &now)) => {}
            Ok(_) => return Ok(Some("changed since it was read".into())),
            Err(error) => return Ok(Some(error.to_string())),
        }
        let flags = statx(
            CWD,
            &kept.path,
            AtFlags::SYMLINK_NOFOLLOW,
            StatxFlags::BASIC_STATS,
        )
        .map_or(StatxAttributes::empty(), |found| {
            found.stx_attributes & found.stx_attributes_mask
        });
        if let Some(why) = fixed(flags) {
            return Ok(Some(why.into()));
        }
        if let Some(used) = self.in_use.of(kept.id().1) {
            return Ok(Some(used.reason()));
        }
        let id = kept.id();
        if !self.open.contains_key(&id) {
            self.make_room()?;
            let Ok(inner) = self.session.pool_path(&kept.path) else {
                return Ok(Some("it is gone".into()));
            };
            let fd = match self
                .session
                .posix
                .open(&inner, libc::O_RDONLY | libc::O_NOFOLLOW, 0)
            {
                Ok(fd) => fd,
                Err(Errno(errno @ (libc::EACCES | libc::ENOENT | libc::ELOOP | libc::ENOTDIR))) => {
                    return Ok(Some(std::io::Error::from_raw_os_error(errno).to_string()));
                }
                Err(errno) => return Err(errno),
            };
            let open = OpenFile {
                path: kept.path.clone(),
                fd,
                checked: Instant::now(),
                used: self.checks,
                changed: Cell::new(false),
            };
            self.open.insert(id, open);
        }
        let Some(open) = self.open.get_mut(&id) else {
            return Ok(None);
        };
        (open.checked, open.used) = (Instant::now(), self.checks);
        match self.session.posix.users_of(open.fd) {
            Ok(users) => {
                // Such as `varve usage`, which changes nothing.
                let other = users.into_iter().find(|pid| *pid == 0 || !is_this_program(*pid));
                Ok(other.map(|pid| match pid {
                    0 => "in use by a program of another user".into(),
                    pid => format!("in use by process {pid}, which has a session of its own"),
                }))
            }
            Err(Errno(libc::EPERM)) => Ok(Some("belongs to another user".into())),
            Err(Errno(libc::ESTALE | libc::ENOENT)) => Ok(Some("it is gone".into())),
            Err(Errno(libc::EINVAL)) => Ok(Some("it is no regular file".into())),
            Err(errno) => Err(errno),
        }
    }

    /// Returns a file that was opened.
    pub fn get(&self, id: (u64, u64)) -> Option<&OpenFile> {
        self.open.get(&id)
    }

    /// Closes files until one more may be opened. The two of one run are never closed for each other.
    fn make_room(&mut self) -> Result<(), Errno> {
        while self.open.len() >= OPEN_MAX {
            let oldest = self.open.iter().min_by_key(|(_, open)| open.used);
            let Some(id) = oldest.map(|(id, _)| *id) else {
                break;
            };
            if let Some(open) = self.open.remove(&id) {
                self.close(&open)?;
            }
        }
        Ok(())
    }

    /// Closes a file; what was shared of it is durable then.
    fn close(&self, open: &OpenFile) -> Result<(), Errno> {
        let synced = match open.changed.get() {
            true => self.session.posix.fsync(open.fd),
            false => Ok(()),
        };
        let _ = self.session.posix.close(open.fd);
        synced
    }

    /// Closes all files; returns the first failure.
    pub fn close_all(mut self) -> Result<(), Interruption> {
        let open = std::mem::take(&mut self.open);
        let mut closed = Ok(());
        for file in open.values() {
            let synced = self.close(file);
            closed = closed.and(synced.map_err(|errno| Interruption::daemon(&file.path, errno)));
        }
        closed
    }

    /// Has the daemon compare ranges and share what is the same; what became of each.
    pub fn dedupe(&self, ranges: &[FdRanges], dry_run: bool) -> Result<Vec<Deduped>, Errno> {
        self.session.posix.dedupe_ranges(ranges, dry_run)
    }
}

/// Whether a process runs this program itself: not one that `varve run` has started.
fn is_this_program(pid: u32) -> bool {
    let program = |process: &str| std::fs::read_link(format!("/proc/{process}/exe")).ok();
    program("self").is_some_and(|own| program(&pid.to_string()) == Some(own))
}

/// The reason for which a file with these attributes is left.
fn fixed(attributes: StatxAttributes) -> Option<&'static str> {
    if attributes.contains(StatxAttributes::IMMUTABLE) {
        return Some("immutable");
    }
    attributes
        .contains(StatxAttributes::APPEND)
        .then_some("append-only")
}

#[cfg(test)]
mod tests {
    use super::{StatxAttributes, fixed};

    #[test]
    fn files_that_may_not_change_are_left() {
        assert_eq!(fixed(StatxAttributes::IMMUTABLE), Some("immutable"));
        assert_eq!(fixed(StatxAttributes::APPEND), Some("append-only"));
        assert_eq!(fixed(StatxAttributes::COMPRESSED), None);
    }
}
