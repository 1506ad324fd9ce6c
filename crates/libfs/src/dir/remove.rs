//! Operations that remove names: unlink and rmdir.

use varve_format::{EntryFlags, FileKind, InodeKey, LogOp};
use varve_ipc::Cred;

use super::{
    LOOKS_MAX, Locked, begin, check_name, commit, directory, find, hint, is_empty, may_change,
    pin_or_forward, resolve, settle, touch_dir,
};
use crate::attrs::{EXEC, may_remove};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::lease::Pins;
use crate::session::{Asks, Forwarded, Mount, Session};

/// Removes the name of anything but a directory.
pub(crate) fn unlink(mount: &Mount, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
    check_name(name)?;
    if name == b"." || name == b".." {
        return Err(Errno(libc::EISDIR));
    }
    remove(mount, dir, name, false, cred)
}

/// Removes an empty directory.
pub(crate) fn rmdir(mount: &Mount, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<()> {
    check_name(name)?;
    match name {
        b"." => Err(Errno(libc::EINVAL)),
        b".." => Err(Errno(libc::ENOTEMPTY)),
        _ => remove(mount, dir, name, true, cred),
    }
}

fn remove(mount: &Mount, dir: InodeKey, name: &[u8], is_rmdir: bool, cred: &Cred) -> Result<()> {
    mount.with_session(|session, attempt| {
        session.may_write()?;
        if attempt.is_done() {
            return Ok(());
        }
        for _ in 0..LOOKS_MAX {
            let target = match hint(session, dir, name, cred) {
                Some(target) => target,
                None => find(mount, session, dir, name, cred)?.ok_or(Errno(libc::ENOENT))?,
            };
            let key = target.key;
            let is_dir = target.kind == FileKind::Directory;
            let op = LogOp::Unlink { dir, name, key };
            let pinned = match pin_or_forward(session, &[dir, key]) {
                // The inode is gone, with its name: look again.
                Err(OpError::Failed(Errno(libc::ESTALE))) => {
                    super::still_named(session, dir, name, target)?;
                    continue;
                }
                other => other?,
            };
            let Some(pins) = pinned else {
                check_kind(is_rmdir, is_dir)?;
                // The entry does not say whether the inode is open here, since it may be opened at this
                // moment; the daemon learns that with the lease.
                match session.forward(
                    attempt,
                    &[dir, key],
                    &op,
                    EntryFlags::empty(),
                    Asks::NOTHING,
                    cred,
                ) {
                    Ok(Forwarded::Done(_) | Forwarded::DoneBefore(_)) => return Ok(()),
                    // The name has another target by now.
                    Err(OpError::Failed(Errno(libc::ESTALE | libc::EAGAIN))) => continue,
                    Err(error) => return Err(error),
                }
            };
            match remove_once(mount, session, &pins, &op, name, is_rmdir, cred) {
                Ok(Some((seqs, live, buried))) => {
                    drop(pins);
                    if buried && let Some(node) = session.leases.take_down(key) {
                        session.data.unlist(&node.inode);
                    }
                    return settle(session, seqs, live, ());
                }
                // Also: another thread of this session removed it, and the daemon has forgotten it already.
                Ok(None) | Err(OpError::Failed(Errno(libc::ESTALE))) => continue,
                Err(error) => return Err(error),
            }
        }
        Err(Errno(libc::EIO).into())
    })
}

fn check_kind(is_rmdir: bool, is_dir: bool) -> Result<()> {
    match (is_rmdir, is_dir) {
        (false, true) => Err(Errno(libc::EISDIR)),
        (true, false) => Err(Errno(libc::ENOTDIR)),
        _ => Ok(()),
    }
}

/// Returns the flag that tells the daemon that this session does not have the inode open.
pub(crate) fn last_closed(mount: &Mount, key: InodeKey) -> EntryFlags {
    if mount.opens.is_open(key) {
        EntryFlags::empty()
    } else {
        EntryFlags::LAST_CLOSED
    }
}

/// Numbers of the removal, whether the session was live, and whether the inode is buried.
type Removed = (varve_format::SeqRange, bool, bool);

/// Removes a name under pins. `None`: the name changed, look again.
fn remove_once(
    mount: &Mount,
    session: &Session,
    pins: &Pins<'_>,
    op: &LogOp<'_>,
    name: &[u8],
    is_rmdir: bool,
    cred: &Cred,
) -> OpResult<Option<Removed>, ()> {
    let LogOp::Unlink { dir, key, .. } = *op else {
        return Err(Errno(libc::EIO).into());
    };
    let (node, victim) = (pins.node(dir)?, pins.node(key)?);
    let parent = directory(session, node, cred, EXEC)?;
    // The lease may have been given back and granted again since the name was found: the lookup under this
    // pin counts.
    if resolve(mount, session, node, name)?.is_none_or(|target| target.key != key) {
        return Ok(None);
    }
    may_change(session, &parent, cred)?;
    let attr = victim.inode.attr();
    if session.options.check_permissions {
        may_remove(&parent, &attr, cred)?;
    }
    check_kind(is_rmdir, attr.is_dir())?;
    if is_rmdir && !is_empty(session, victim)? {
        return Err(Errno(libc::ENOTEMPTY).into());
    }
    let slot = begin(session, op)?;
    let mut locked = Locked::new(&[node, victim]);
    {
        let names = node.names.lock();
        if names.get(name).flatten().is_none_or(|target| target.key != key) {
            return Ok(None);
        }
    }
    if is_rmdir && victim.names.lock().has_any() {
        return Err(Errno(libc::ENOTEMPTY).into());
    }
    let now = session.now_ns();
    let flags = last_closed(mount, key);
    let committed = commit(session, slot, op, flags, now)?;
    locked.logged(committed.seqs.last);
    let gone = locked.attr(key)?;
    gone.nlink = if is_rmdir { 0 } else { gone.nlink.saturating_sub(1) };
    gone.ctime_ns = now;
    locked.note_dead(key, flags)?;
    let parent = locked.attr(dir)?;
    touch_dir(parent, now);
    if is_rmdir {
        parent.nlink = parent.nlink.saturating_sub(1);
    }
    let dead = locked.get(key)?.dead;
    node.names
        .lock()
        .set(name, None, committed.seqs.last, session.page.digested());
    let buried = dead && !is_rmdir && session.leases.bury(key, committed.seqs.last);
    Ok(Some((committed.seqs, committed.live, buried)))
}
