//! Attribute changes as programs ask for them, and the rules of POSIX and Linux for them. Pure: no session,
//! no log.

use varve_format::{InodeAttr, MODE_PERM_MASK, TimeNs};
use varve_ipc::Cred;

use crate::errno::{Errno, Result};

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The current time.
    Now,
    /// This one, in nanoseconds since 1970.
    At(TimeNs),
}

/// Attributes that `setattr` changes; `None` leaves a field as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttrChange {
    /// Permission, set-id and sticky bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Last read.
    pub atime: Option<SetTime>,
    /// Last change of the data.
    pub mtime: Option<SetTime>,
    /// Clears set-id bits as a write by a caller without the right to keep them would.
    pub kill_set_id: bool,
}

impl AttrChange {
    /// Whether the change fits one log entry: either the size or other attributes.
    pub(crate) const fn is_one_operation(&self) -> bool {
        self.size.is_none()
            || (self.mode.is_none()
                && self.uid.is_none()
                && self.gid.is_none()
                && self.atime.is_none()
                && self.mtime.is_none()
                && !self.kill_set_id)
    }
}

/// `rename` flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RenameFlags {
    /// Fails with EEXIST rather than replace.
    pub noreplace: bool,
    /// Swaps the two names.
    pub exchange: bool,
    /// Leaves a whiteout (a character device 0:0, which hides a lower layer's name from an overlay) under the
    /// old name.
    pub whiteout: bool,
}

/// Flags of an open.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// Every write goes to the end.
    pub append: bool,
    /// Empties the file.
    pub truncate: bool,
    /// Each write is durable, with all metadata, when it returns.
    pub sync: bool,
    /// Each write is durable, with the metadata needed to read it back, when it returns.
    pub dsync: bool,
    /// A hint; data never passes a page cache here.
    pub direct: bool,
    /// Reads do not move the time of the last read.
    pub no_atime: bool,
}

impl OpenFlags {
    /// For reading alone.
    pub const READ: Self = Self {
        read: true,
        write: false,
        append: false,
        truncate: false,
        sync: false,
        dsync: false,
        direct: false,
        no_atime: false,
    };

    /// For reading and writing.
    pub const READ_WRITE: Self = Self {
        write: true,
        ..Self::READ
    };
}

pub(crate) const READ: u32 = 4;
pub(crate) const WRITE: u32 = 2;
pub(crate) const EXEC: u32 = 1;

/// Whether `cred` may access the inode in every way of `want` (the bits of one octal digit), as `access`
/// decides.
pub(crate) fn may(attr: &InodeAttr, cred: &Cred, want: u32) -> Result<()> {
    if cred.uid == 0 {
        // The superuser may do everything but execute a file without any execute bit.
        let allowed = want & EXEC == 0 || attr.is_dir() || attr.mode & 0o111 != 0;
        return if allowed { Ok(()) } else { Err(Errno(libc::EACCES)) };
    }
    let shift = if cred.uid == attr.uid {
        6
    } else if cred.in_group(attr.gid) {
        3
    } else {
        0
    };
    if (attr.mode >> shift) & want == want {
        Ok(())
    } else {
        Err(Errno(libc::EACCES))
    }
}

/// Whether `cred` may remove or rename the entry of `victim` in `dir` (whose write permission was checked):
/// the sticky bit.
pub(crate) fn may_remove(dir: &InodeAttr, victim: &InodeAttr, cred: &Cred) -> Result<()> {
    let sticky = dir.mode & libc::S_ISVTX != 0;
    if sticky && cred.uid != 0 && cred.uid != victim.uid && cred.uid != dir.uid {
        return Err(Errno(libc::EPERM));
    }
    Ok(())
}

/// Mode after a write or truncate by a caller that may not keep set-id bits: as Linux' `should_remove_sgid`,
/// set-group-id goes only where the group may execute (elsewhere it once meant mandatory locking).
pub(crate) const fn mode_after_write(mode: u32, privileged: bool) -> u32 {
    if privileged {
        return mode;
    }
    let mode = mode & !libc::S_ISUID;
    if mode & libc::S_IXGRP != 0 {
        mode & !libc::S_ISGID
    } else {
        mode
    }
}

/// Owner, group and mode of a new inode: in a set-group-id directory it gets the directory's group, and a new
/// directory gets the bit too.
pub(crate) fn ownership(dir: &InodeAttr, mode: u32, cred: &Cred) -> (u32, u32, u32) {
    if dir.mode & libc::S_ISGID == 0 {
        return (cred.uid, cred.gid, mode);
    }
    let is_dir = mode & libc::S_IFMT == libc::S_IFDIR;
    let mode = if is_dir {
        mode | libc::S_ISGID
    } else if mode & (libc::S_ISGID | libc::S_IXGRP) == (libc::S_ISGID | libc::S_IXGRP)
        && cred.uid != 0
        && !cred.in_group(dir.gid)
    {
        mode & !libc::S_ISGID
    } else {
        mode
    };
    (cred.uid, dir.gid, mode)
}

/// Effect of a `setattr` on an inode without its size part: the new mode, owner, group and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Planned {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub atime_ns: Option<TimeNs>,
    pub mtime_ns: Option<TimeNs>,
}

impl Planned {
    pub(crate) const fn is_empty(&self) -> bool {
        self.mode.is_none()
            && self.uid.is_none()
            && self.gid.is_none()
            && self.atime_ns.is_none()
            && self.mtime_ns.is_none()
    }
}

/// Applies the rules of chmod, chown and utimensat. With `check` the caller's rights are checked; without
/// (the kernel has checked them) only the bits that follow from a change are computed.
pub(crate) fn plan(
    attr: &InodeAttr,
    change: &AttrChange,
    cred: &Cred,
    check: bool,
    now_ns: TimeNs,
) -> Result<Planned> {
    let superuser = cred.uid == 0;
    let owner = superuser || cred.uid == attr.uid;
    let mut planned = Planned::default();
    if check {
        let new_uid = change.uid.is_some_and(|uid| uid != attr.uid);
        let foreign_gid = change
            .gid
            .is_some_and(|gid| gid != attr.gid && !cred.in_group(gid));
        let chown = change.uid.is_some() || change.gid.is_some();
        if !superuser && (new_uid || (chown && !owner) || foreign_gid) {
            return Err(Errno(libc::EPERM));
        }
        if change.mode.is_some() && !owner {
            return Err(Errno(libc::EPERM));
        }
        let exact = |time: Option<SetTime>| matches!(time, Some(SetTime::At(_)));
        let times = change.atime.is_some() || change.mtime.is_some();
        // Setting both times to now needs only write permission (utimensat(2)); a truncate's own times come
        // with its size.
        let both_now = change.atime == Some(SetTime::Now) && change.mtime == Some(SetTime::Now);
        if times && !owner && change.size.is_none() {
            if exact(change.atime) || exact(change.mtime) || !both_now {
                return Err(Errno(libc::EPERM));
            }
            may(attr, cred, WRITE)?;
        }
    }
    planned.uid = change.uid;
    planned.gid = change.gid;
    let gid_after = change.gid.unwrap_or(attr.gid);
    if let Some(mode) = change.mode {
        let mut mode = mode & MODE_PERM_MASK;
        if !superuser && mode & libc::S_ISGID != 0 && !cred.in_group(gid_after) && (check || !owner) {
            mode &= !libc::S_ISGID;
        }
        planned.mode = Some(mode);
    }
    let clears = (change.uid.is_some() || change.gid.is_some()) && !attr.is_dir();
    if clears || change.kill_set_id {
        let before = planned.mode.unwrap_or(attr.mode & MODE_PERM_MASK);
        // chown clears for the superuser too (Linux); a kill request says that the caller may not keep them.
        let after = if change.mode.is_some() && !change.kill_set_id {
            before
        } else {
            mode_after_write(before, false)
        };
        if after != attr.mode & MODE_PERM_MASK {
            planned.mode = Some(after);
        }
    }
    let at = |time: SetTime| match time {
        SetTime::Now => now_ns,
        SetTime::At(at) => at,
    };
    planned.atime_ns = change.atime.map(at);
    planned.mtime_ns = change.mtime.map(at);
    Ok(planned)
}

/// Whether a read at `now_ns` moves atime (relatime): it is not newer than the last change, or older than a
/// day.
pub(crate) const fn atime_is_due(attr: &InodeAttr, now_ns: TimeNs) -> bool {
    const DAY_NS: TimeNs = 86_400_000_000_000;
    attr.atime_ns <= attr.mtime_ns || attr.atime_ns <= attr.ctime_ns || now_ns - attr.atime_ns >= DAY_NS
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::{AttrChange, EXEC, READ, SetTime, WRITE, may, may_remove, mode_after_write, ownership, plan};
    use crate::errno::Errno;
    use varve_format::{InodeAttr, InodeKey};
    use varve_ipc::Cred;

    fn attr(mode: u32, uid: u32, gid: u32) -> InodeAttr {
        InodeAttr {
            uid,
            gid,
            ..InodeAttr::new(InodeKey::new(9, 1), mode, 0)
        }
    }

    fn user(uid: u32, gid: u32) -> Cred {
        Cred {
            uid,
            gid,
            groups: vec![],
        }
    }

    #[test]
    fn permission_comes_from_the_first_class_that_fits() {
        let file = attr(0o100_074, 5, 6);
        assert_eq!(may(&file, &user(5, 6), READ), Err(Errno(libc::EACCES)));
        assert!(may(&file, &user(7, 6), READ | WRITE | EXEC).is_ok());
        assert!(may(&file, &user(7, 7), READ).is_ok());
        assert_eq!(may(&file, &user(7, 7), WRITE), Err(Errno(libc::EACCES)));
        assert_eq!(
            may(&attr(0o100_644, 5, 6), &Cred::root(), EXEC),
            Err(Errno(libc::EACCES))
        );
    }

    #[test]
    fn sticky_directory_protects_the_files_of_others() {
        let dir = attr(0o041_777, 1, 1);
        assert_eq!(
            may_remove(&dir, &attr(0o100_644, 2, 2), &user(3, 3)),
            Err(Errno(libc::EPERM))
        );
        assert!(may_remove(&dir, &attr(0o100_644, 3, 2), &user(3, 3)).is_ok());
        assert!(may_remove(&dir, &attr(0o100_644, 2, 2), &user(1, 3)).is_ok());
    }

    #[test]
    fn write_clears_set_group_id_only_where_the_group_may_execute() {
        assert_eq!(mode_after_write(0o106_755, false), 0o100_755);
        assert_eq!(mode_after_write(0o106_745, false), 0o102_745);
        assert_eq!(mode_after_write(0o106_755, true), 0o106_755);
    }

    #[test]
    fn set_group_id_directory_hands_on_its_group() {
        let dir = attr(0o042_777, 1, 77);
        assert_eq!(ownership(&dir, 0o040_755, &user(2, 2)), (2, 77, 0o042_755));
        assert_eq!(ownership(&dir, 0o102_755, &user(2, 2)), (2, 77, 0o100_755));
        assert_eq!(
            ownership(&attr(0o040_777, 1, 77), 0o100_644, &user(2, 3)),
            (2, 3, 0o100_644)
        );
    }

    #[test]
    fn chown_is_refused_to_others_and_clears_set_id() {
        let file = attr(0o106_755, 5, 6);
        let to = |uid, gid| AttrChange {
            uid,
            gid,
            ..AttrChange::default()
        };
        assert_eq!(
            plan(&file, &to(Some(8), None), &user(5, 6), true, 0),
            Err(Errno(libc::EPERM))
        );
        assert_eq!(
            plan(&file, &to(None, Some(9)), &user(5, 6), true, 0),
            Err(Errno(libc::EPERM))
        );
        let cred = Cred {
            uid: 5,
            gid: 6,
            groups: vec![9],
        };
        let planned = plan(&file, &to(None, Some(9)), &cred, true, 0).unwrap();
        assert_eq!((planned.gid, planned.mode), (Some(9), Some(0o755)));
    }

    #[test]
    fn chmod_by_a_stranger_to_the_group_loses_set_group_id() {
        let file = attr(0o100_755, 5, 6);
        let change = AttrChange {
            mode: Some(0o2755),
            ..AttrChange::default()
        };
        assert_eq!(
            plan(&file, &change, &user(5, 7), true, 0).unwrap().mode,
            Some(0o755)
        );
        assert_eq!(
            plan(&file, &change, &user(5, 6), true, 0).unwrap().mode,
            Some(0o2755)
        );
        assert_eq!(
            plan(&file, &change, &user(8, 6), true, 0),
            Err(Errno(libc::EPERM))
        );
    }

    #[test]
    fn times_of_others_can_only_be_set_to_now_with_write_permission() {
        let file = attr(0o100_646, 5, 6);
        let now = AttrChange {
            atime: Some(SetTime::Now),
            mtime: Some(SetTime::Now),
            ..AttrChange::default()
        };
        assert_eq!(
            plan(&file, &now, &user(8, 8), true, 44).unwrap().mtime_ns,
            Some(44)
        );
        let exact = AttrChange {
            atime: Some(SetTime::At(1)),
            mtime: Some(SetTime::At(2)),
            ..AttrChange::default()
        };
        assert_eq!(plan(&file, &exact, &user(8, 8), true, 0), Err(Errno(libc::EPERM)));
        assert_eq!(
            plan(&file, &exact, &user(5, 5), true, 0).unwrap().atime_ns,
            Some(1)
        );
        let closed = attr(0o100_644, 5, 6);
        assert_eq!(
            plan(&closed, &now, &user(8, 8), true, 0),
            Err(Errno(libc::EACCES))
        );
    }
}
