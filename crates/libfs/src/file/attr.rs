//! chmod, chown, truncate and utimens on an inode, under its lease.

use varve_format::{
    EntryFlags, FILE_SIZE_MAX, FileKind, InodeAttr, InodeKey, LogOp, MODE_PERM_MASK, SetAttr, SetAttrMask,
};
use varve_ipc::{Cred, LeaseMode};

use crate::attrs::{AttrChange, Planned, WRITE, may, mode_after_write, plan};
use crate::dir::{attr_of, attr_or_gone, begin, commit, settle};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::session::{Asks, Mount, Session, Try};

/// Returns the set-id bits that a change of the data by `cred` clears.
pub(crate) const fn clears(attr: &InodeAttr, cred: &Cred) -> EntryFlags {
    let after = mode_after_write(attr.mode, cred.uid == 0);
    let mut flags = EntryFlags::empty();
    if attr.mode & !after & libc::S_ISUID != 0 {
        flags = flags.union(EntryFlags::CLEAR_SUID);
    }
    if attr.mode & !after & libc::S_ISGID != 0 {
        flags = flags.union(EntryFlags::CLEAR_SGID);
    }
    flags
}

fn entry(planned: &Planned) -> SetAttr {
    let mut attr = SetAttr::default();
    if let Some(mode) = planned.mode {
        attr.mask |= SetAttrMask::MODE;
        attr.mode = mode & MODE_PERM_MASK;
    }
    if let Some(uid) = planned.uid {
        attr.mask |= SetAttrMask::UID;
        attr.uid = uid;
    }
    if let Some(gid) = planned.gid {
        attr.mask |= SetAttrMask::GID;
        attr.gid = gid;
    }
    if let Some(at) = planned.atime_ns {
        attr.mask |= SetAttrMask::ATIME;
        attr.atime_ns = at;
    }
    if let Some(at) = planned.mtime_ns {
        attr.mask |= SetAttrMask::MTIME;
        attr.mtime_ns = at;
    }
    attr
}

fn apply(attr: &mut InodeAttr, planned: &Planned) {
    if let Some(mode) = planned.mode {
        attr.mode = (attr.mode & !MODE_PERM_MASK) | (mode & MODE_PERM_MASK);
    }
    attr.uid = planned.uid.unwrap_or(attr.uid);
    attr.gid = planned.gid.unwrap_or(attr.gid);
    attr.atime_ns = planned.atime_ns.unwrap_or(attr.atime_ns);
    attr.mtime_ns = planned.mtime_ns.unwrap_or(attr.mtime_ns);
}

fn check_size(session: &Session, attr: &InodeAttr, size: u64, cred: &Cred) -> Result<()> {
    match attr.kind() {
        FileKind::Regular => {}
        FileKind::Directory => return Err(Errno(libc::EISDIR)),
        _ => return Err(Errno(libc::EINVAL)),
    }
    if size > FILE_SIZE_MAX {
        return Err(Errno(libc::EFBIG));
    }
    if session.options.check_permissions {
        may(attr, cred, WRITE)?;
    }
    Ok(())
}

/// Changes attributes; the size first. Under a lease, both parts of a change can be repeated, and are if the
/// session is lost in between.
pub(crate) fn setattr(mount: &Mount, key: InodeKey, change: &AttrChange, cred: &Cred) -> Result<InodeAttr> {
    if let Some(attr) = change_at_once(mount, key, change, cred)? {
        return Ok(attr);
    }
    // Each part is one operation of the daemon, which is done once.
    let size = AttrChange {
        size: change.size,
        ..AttrChange::default()
    };
    let rest = AttrChange {
        size: None,
        ..change.clone()
    };
    change_at_once(mount, key, &size, cred)?;
    change_at_once(mount, key, &rest, cred)?.ok_or(Errno(libc::EIO))
}

/// Changes attributes in one operation. `None`: the daemon has to do it, and it takes two operations. Nothing
/// was changed then; the rules allow the change.
fn change_at_once(
    mount: &Mount,
    key: InodeKey,
    change: &AttrChange,
    cred: &Cred,
) -> Result<Option<InodeAttr>> {
    let mut before = None;
    mount.with_session(|session, attempt| {
        session.may_write()?;
        if attempt.is_done() {
            let attr = match before.clone() {
                Some(last) => attr_or_gone(session, last),
                None => attr_of(session, key),
            };
            return attr.map(Some);
        }
        let pins = match session.pin(&[key], LeaseMode::Write) {
            Ok(pins) => pins,
            Err(OpError::Forward) => return forwarded(session, attempt, key, change, cred, &mut before),
            Err(error) => return Err(error),
        };
        let node = pins.node(key)?;
        let check = session.options.check_permissions;
        let attr = node.inode.attr();
        // Refused as a whole: the rules are checked before the size changes, and again under the lock.
        plan(&attr, change, cred, check, 0)?;
        if let Some(size) = change.size {
            check_size(session, &attr, size, cred)?;
            match session.data.truncate(&node.inode, size, clears(&attr, cred)) {
                Err(OpError::Failed(Errno(libc::ENOSPC))) => {
                    drop(pins);
                    return forwarded(session, attempt, key, change, cred, &mut before);
                }
                other => other.map_err(OpError::cast)?,
            }
        }
        let now = session.now_ns();
        let draft = plan(&attr, change, cred, check, now)?;
        if draft.is_empty() {
            let attr = node.inode.attr();
            drop(pins);
            return if change.size.is_some() {
                synced(session, attr).map(Some)
            } else {
                Ok(Some(attr))
            };
        }
        let slot = begin(
            session,
            &LogOp::SetAttr {
                key,
                attr: entry(&draft),
            },
        )?;
        let mut body = node.inode.write();
        body.check_alive()?;
        let planned = plan(&body.attr, change, cred, check, now)?;
        let op = LogOp::SetAttr {
            key,
            attr: entry(&planned),
        };
        let committed = commit(session, slot, &op, EntryFlags::empty(), now)?;
        apply(&mut body.attr, &planned);
        if planned.uid.is_some() || planned.gid.is_some() {
            body.drop_capability();
        }
        body.attr.ctime_ns = now;
        body.logged(committed.seqs.last);
        if planned.atime_ns.is_some() {
            node.atime_moved
                .store(false, std::sync::atomic::Ordering::Relaxed);
        }
        let (after, seqs, live) = (body.attr.clone(), committed.seqs, committed.live);
        drop(committed);
        drop(body);
        drop(pins);
        settle(session, seqs, live, Some(after))
    })
}

fn synced<T>(session: &Session, attr: InodeAttr) -> OpResult<InodeAttr, T> {
    if session.options.sync_always && session.data.sync().is_err() {
        return Err(Errno(libc::EIO).into());
    }
    Ok(attr)
}

/// Has the daemon make the change, which checks again with `cred`.
fn forwarded<T>(
    session: &Session,
    attempt: &mut Try,
    key: InodeKey,
    change: &AttrChange,
    cred: &Cred,
    before: &mut Option<InodeAttr>,
) -> OpResult<Option<InodeAttr>, T> {
    let attr = &*before.insert(attr_of(session, key)?);
    let check = session.options.check_permissions;
    let planned = plan(attr, change, cred, check, session.now_ns())?;
    if let Some(size) = change.size {
        check_size(session, attr, size, cred)?;
        if !change.is_one_operation() {
            return Ok(None);
        }
        let op = LogOp::Truncate { key, size };
        session.forward(attempt, &[key], &op, clears(attr, cred), Asks::NOTHING, cred)?;
    } else if !planned.is_empty() {
        let op = LogOp::SetAttr {
            key,
            attr: entry(&planned),
        };
        session.forward(attempt, &[key], &op, EntryFlags::empty(), Asks::NOTHING, cred)?;
    }
    attr_or_gone(session, attr.clone()).map(Some)
}
