//! Extended attributes: all of an inode's are loaded at first use and kept under its lease. Knows no names
//! and no file data.

use std::sync::Arc;
use varve_format::{
    EntryFlags, FileKind, InodeAttr, InodeKey, LogOp, NAME_MAX, XATTR_CAPABILITY, XATTR_VALUE_MAX,
};
use varve_ipc::{Cred, LeaseMode, PIN_ATTRIBUTE, Request, Response};

use crate::attrs::{READ, WRITE, may};
use crate::dir::{begin, commit, give_up, settle};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::file::pin;
use crate::lease::{Node, Xattrs};
use crate::session::{Asks, Mount, Session};

/// Most bytes that all names of one inode may have together (`XATTR_LIST_MAX`).
const LIST_MAX: usize = 65_536;

/// Checks access to one attribute as Linux does, by namespace.
fn check(attr: &InodeAttr, name: &[u8], cred: &Cred, want: u32, permissions: bool) -> Result<()> {
    let user = name.starts_with(b"user.");
    let known = user
        || [&b"trusted."[..], b"security.", b"system."]
            .iter()
            .any(|space| name.starts_with(space));
    if !known {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let plain = matches!(attr.kind(), FileKind::Regular | FileKind::Directory);
    if user && !plain {
        return Err(Errno(if want == READ { libc::ENODATA } else { libc::EPERM }));
    }
    if name.starts_with(b"system.") {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    if !permissions {
        return Ok(());
    }
    if name.starts_with(b"trusted.") && cred.uid != 0 {
        return Err(Errno(if want == READ { libc::ENODATA } else { libc::EPERM }));
    }
    if name.starts_with(b"security.") {
        return if want == READ || cred.uid == 0 {
            Ok(())
        } else {
            Err(Errno(libc::EPERM))
        };
    }
    if user
        && want == WRITE
        && attr.is_dir()
        && attr.mode & libc::S_ISVTX != 0
        && cred.uid != 0
        && cred.uid != attr.uid
    {
        return Err(Errno(libc::EPERM));
    }
    may(attr, cred, want)
}

fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno(libc::ERANGE));
    }
    // A namespace alone is no name.
    let bare = [&b"user."[..], b"trusted.", b"security."].contains(&name);
    if bare || name.contains(&0) {
        Err(Errno(libc::EINVAL))
    } else {
        Ok(())
    }
}

/// Loads the attributes under the caller's pin. No change of this session can be missing: every change loads
/// first, except for file capabilities, which go with a change of the data or the owner.
fn load<T>(session: &Session, node: &Arc<Node>) -> OpResult<(), T> {
    if let Some(known) = &mut *node.xattrs.lock() {
        if node.inode.is_capability_gone() {
            known.remove(XATTR_CAPABILITY);
        }
        return Ok(());
    }
    let answer = session.call(Request::Xattrs { key: node.key() })?;
    let Response::Xattrs(pairs) = answer else {
        return Err(OpError::Failed(Errno(libc::EIO)));
    };
    let mut xattrs = node.xattrs.lock();
    let known = xattrs.get_or_insert_with(|| pairs.into_iter().collect());
    if node.inode.is_capability_gone() {
        known.remove(XATTR_CAPABILITY);
    }
    Ok(())
}

fn with<T, R>(
    session: &Session,
    key: InodeKey,
    look: impl FnOnce(&InodeAttr, &Xattrs) -> Result<R>,
) -> OpResult<R, T> {
    let pins = session.pin_read(key)?;
    let node = pins.node(key)?;
    load(session, node)?;
    let attr = node.inode.attr();
    let xattrs = node.xattrs.lock();
    let found = xattrs.as_ref().ok_or(Errno(libc::EIO))?;
    Ok(look(&attr, found)?)
}

pub(crate) fn get(mount: &Mount, key: InodeKey, name: &[u8], cred: &Cred) -> Result<Vec<u8>> {
    check_name(name)?;
    if name == PIN_ATTRIBUTE.as_bytes() {
        return pin::get(mount, key);
    }
    let permissions = mount.options.check_permissions;
    mount.look(|session| {
        with(session, key, |attr, xattrs| {
            check(attr, name, cred, READ, permissions)?;
            xattrs.get(name).cloned().ok_or(Errno(libc::ENODATA))
        })
    })
}

pub(crate) fn list(mount: &Mount, key: InodeKey, cred: &Cred) -> Result<Vec<Vec<u8>>> {
    mount.look(|session| {
        with(session, key, |_, xattrs| {
            let visible = |name: &&Vec<u8>| cred.uid == 0 || !name.starts_with(b"trusted.");
            Ok(xattrs.keys().filter(visible).cloned().collect())
        })
    })
}

/// Sets (`Some`) or removes (`None`) an attribute.
pub(crate) fn change(
    mount: &Mount,
    key: InodeKey,
    name: &[u8],
    value: Option<&[u8]>,
    create: bool,
    replace: bool,
    cred: &Cred,
) -> Result<()> {
    check_name(name)?;
    if value.is_some_and(|value| value.len() > XATTR_VALUE_MAX) {
        return Err(Errno(libc::E2BIG));
    }
    if name == PIN_ATTRIBUTE.as_bytes() {
        return pin::set(mount, key, value, cred);
    }
    let op = match value {
        Some(value) => LogOp::SetXattr { key, name, value },
        None => LogOp::RemoveXattr { key, name },
    };
    mount.with_session(|session, attempt| {
        session.may_write()?;
        let must_be = value.is_none() || replace;
        let verdict = |attr: &InodeAttr, xattrs: &Xattrs| {
            check(attr, name, cred, WRITE, session.options.check_permissions)?;
            match (xattrs.contains_key(name), value) {
                (true, _) if create => Err(Errno(libc::EEXIST)),
                (false, _) if must_be => Err(Errno(libc::ENODATA)),
                (false, Some(_))
                    if xattrs.keys().map(|name| name.len() + 1).sum::<usize>() + name.len() >= LIST_MAX =>
                {
                    Err(Errno(libc::ENOSPC))
                }
                _ => Ok(()),
            }
        };
        if attempt.is_done() {
            return Ok(());
        }
        let pins = match session.pin(&[key], LeaseMode::Write) {
            Ok(pins) => pins,
            Err(OpError::Forward) => {
                with::<(), ()>(session, key, verdict)?;
                session.forward(attempt, &[key], &op, EntryFlags::empty(), Asks::NOTHING, cred)?;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let node = pins.node(key)?;
        load(session, node)?;
        let slot = begin(session, &op)?;
        let mut body = node.inode.write();
        let mut xattrs = node.xattrs.lock();
        let allowed = body.check_alive().and_then(|()| {
            let known = xattrs.as_ref().ok_or(Errno(libc::EIO))?;
            verdict(&body.attr, known)
        });
        if let Err(errno) = allowed {
            give_up(slot, &op);
            return Err(errno.into());
        }
        let known = xattrs.as_mut().ok_or(Errno(libc::EIO))?;
        let now = session.now_ns();
        let committed = commit(session, slot, &op, EntryFlags::empty(), now)?;
        match value {
            Some(value) => {
                if name == XATTR_CAPABILITY {
                    node.inode.renew_capability();
                }
                known.insert(name.to_vec(), value.to_vec())
            }
            None => known.remove(name),
        };
        body.attr.ctime_ns = now;
        body.logged(committed.seqs.last);
        let (seqs, live) = (committed.seqs, committed.live);
        drop(committed);
        drop((xattrs, body));
        drop(pins);
        settle(session, seqs, live, ())
    })
}
