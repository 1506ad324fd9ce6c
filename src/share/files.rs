//! Open files of a pool whose blocks are to be shared: which of them must be left, and why. Keeps few open.

use super::apply::stretches;
use super::in_use::InUse;
use super::tally::BLOCK;
use crate::in_pool::InPool;
use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use varve_libfs::posix::Fd;
use varve_libfs::{Errno, OwnedBlocks};
use varve_similarity::files::{Chosen, Kept};

/// Files that are kept open.
const OPEN_MOST: usize = 64;
/// How long a file that was found fine is not looked at again.
const FINE_FOR: Duration = Duration::from_secs(1);

/// Whether a file's blocks may be shared.
pub enum Verdict {
    Fine,
    /// The reason for which it is left.
    Left(String),
    /// The session failed.
    Lost(Ends),
}

/// A failure that ends all.
pub struct Ends {
    pub path: PathBuf,
    pub errno: Errno,
}

/// An open file.
pub struct Open {
    pub path: PathBuf,
    fd: Fd,
    checked: Instant,
    used: u64,
    changed: std::cell::Cell<bool>,
}

/// Open files, by device and inode number.
pub struct Files<'p> {
    pool: &'p InPool,
    open: HashMap<(u64, u64), Open>,
    /// Those that are left, each with its reason.
    left: HashMap<(u64, u64), String>,
    in_use: InUse,
    turn: u64,
}

impl<'p> Files<'p> {
    pub fn new(pool: &'p InPool) -> Self {
        Self {
            pool,
            open: HashMap::new(),
            left: HashMap::new(),
            in_use: InUse::on(pool.mount.device),
            turn: 0,
        }
    }

    /// Looks whether a file may be shared, and opens it.
    pub fn check(&mut self, kept: &Kept) -> Verdict {
        let id = kept.id();
        self.turn += 1;
        if let Some(why) = self.left.get(&id) {
            return Verdict::Left(why.clone());
        }
        if let Some(open) = self.open.get_mut(&id)
            && open.checked.elapsed() < FINE_FOR
        {
            open.used = self.turn;
            return Verdict::Fine;
        }
        let why = match self.reason(kept) {
            Ok(None) => return Verdict::Fine,
            Ok(Some(why)) => why,
            Err(errno) => {
                return Verdict::Lost(Ends {
                    path: kept.path.clone(),
                    errno,
                });
            }
        };
        if let Some(open) = self.open.remove(&id) {
            self.close(&open);
        }
        self.left.insert(id, why.clone());
        Verdict::Left(why)
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
            let Ok(inner) = self.pool.inner(&kept.path) else {
                return Ok(Some("it is gone".into()));
            };
            let fd = match self.pool.posix.open(&inner, libc::O_RDONLY | libc::O_NOFOLLOW, 0) {
                Ok(fd) => fd,
                Err(Errno(errno @ (libc::EACCES | libc::ENOENT | libc::ELOOP | libc::ENOTDIR))) => {
                    return Ok(Some(std::io::Error::from_raw_os_error(errno).to_string()));
                }
                Err(errno) => return Err(errno),
            };
            let open = Open {
                path: kept.path.clone(),
                fd,
                checked: Instant::now(),
                used: self.turn,
                changed: std::cell::Cell::new(false),
            };
            self.open.insert(id, open);
        }
        let Some(open) = self.open.get_mut(&id) else {
            return Ok(None);
        };
        (open.checked, open.used) = (Instant::now(), self.turn);
        match self.pool.posix.users_of(open.fd) {
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

    /// An open file.
    pub fn get(&self, id: (u64, u64)) -> Option<&Open> {
        self.open.get(&id)
    }

    /// Closes files until one more may be opened. The two of one run are never closed for each other.
    fn make_room(&mut self) -> Result<(), Errno> {
        while self.open.len() >= OPEN_MOST {
            let oldest = self.open.iter().min_by_key(|(_, open)| open.used);
            let Some(id) = oldest.map(|(id, _)| *id) else {
                break;
            };
            if let Some(open) = self.open.remove(&id)
                && let Some(ends) = self.close(&open)
            {
                return Err(ends.errno);
            }
        }
        Ok(())
    }

    /// Closes a file; what was shared of it is durable then.
    fn close(&self, open: &Open) -> Option<Ends> {
        let synced = match open.changed.get() {
            true => self.pool.posix.fsync(open.fd),
            false => Ok(()),
        };
        let _ = self.pool.posix.close(open.fd);
        synced.err().map(|errno| Ends {
            path: open.path.clone(),
            errno,
        })
    }

    /// Closes all files. The first failure.
    pub fn close_all(mut self) -> Option<Ends> {
        let open = std::mem::take(&mut self.open);
        let mut first = None;
        for open in open.values() {
            let failed = self.close(open);
            first = first.or(failed);
        }
        first
    }

    /// Returns the stretches of two ranges that are not the same blocks yet. A part of a block at the end of
    /// both files is a part of the last one.
    pub fn not_shared_yet(
        &self,
        (from, from_at): (&Open, u64),
        (to, to_at): (&Open, u64),
        len: u64,
    ) -> Result<Vec<super::apply::Stretch>, Errno> {
        let parts = |open: &Open, at: u64| -> Result<Vec<OwnedBlocks>, Errno> {
            let mut parts = Vec::new();
            self.pool
                .posix
                .for_each_owned(open.fd, at, len.max(1), |part| parts.push(*part))?;
            Ok(parts)
        };
        let (source, target) = (parts(from, from_at)?, parts(to, to_at)?);
        let blocks = len.div_ceil(BLOCK);
        let found = stretches((&source, from_at / BLOCK), (&target, to_at / BLOCK), blocks);
        let stretch = |(range, alone): (std::ops::Range<u64>, u64)| super::apply::Stretch {
            at: range.start * BLOCK,
            len: (range.end * BLOCK).min(len) - range.start * BLOCK,
            alone: alone * BLOCK,
        };
        Ok(found.into_iter().map(stretch).collect())
    }

    /// Has the daemon compare and share `len` bytes at `at` of two ranges. Across users only the blocks of a
    /// side that has none in NVM are shared: if the first may not, the other one's are tried.
    pub fn dedupe(
        &self,
        (from, from_at): &(&Open, u64),
        (to, to_at): &(&Open, u64),
        at: u64,
        len: u64,
        same_user: bool,
    ) -> Result<bool, Errno> {
        let posix = &self.pool.posix;
        for open in [from, to] {
            open.changed.set(true);
        }
        let (source, target) = (from_at + at, to_at + at);
        match posix.dedupe_range(from.fd, source, to.fd, target, len) {
            Err(Errno(libc::EOPNOTSUPP)) if !same_user => {
                posix.dedupe_range(to.fd, target, from.fd, source, len)
            }
            done => done,
        }
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
