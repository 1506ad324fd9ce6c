//! `rename`: moves, replaces and exchanges names. A rename of a file, or of a directory within its parent, is
//! one log entry. The daemon does renames that give a directory another parent, since it sees the whole tree
//! and can exclude cycles, and renames that leave a whiteout.

use varve_format::{EntryFlags, FileKind, InodeAttr, InodeKey, LogOp, SeqRange};
use varve_ipc::{Cred, LeaseMode};

use super::remove::last_closed;
use super::{
    LOOKS_MAX, Locked, Target, attr_of, begin, check_name, commit, directory, find, is_dots, is_empty,
    may_change, pin_or_forward, resolve, settle, still_named, touch_dir,
};
use crate::attrs::{EXEC, RenameFlags, WRITE, may, may_remove};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::lease::Pins;
use crate::session::{Asks, Forwarded, Mount, Session};

/// Arguments of one rename.
#[derive(Clone, Copy)]
pub(crate) struct Move<'a> {
    pub dir: InodeKey,
    pub name: &'a [u8],
    pub new_dir: InodeKey,
    pub new_name: &'a [u8],
    pub exchange: bool,
}

/// Targets of the two names.
#[derive(Clone, Copy)]
struct Ends {
    from: Target,
    to: Option<Target>,
}

impl Ends {
    fn is_dir(target: Target) -> bool {
        target.kind == FileKind::Directory
    }

    /// Whether a directory gets another parent.
    fn reparents(&self, moving: &Move<'_>) -> bool {
        moving.dir != moving.new_dir
            && (Self::is_dir(self.from) || (moving.exchange && self.to.is_some_and(Self::is_dir)))
    }
}

/// Moves, replaces or exchanges names.
pub(crate) fn rename(
    mount: &Mount,
    dir: InodeKey,
    name: &[u8],
    new_dir: InodeKey,
    new_name: &[u8],
    flags: RenameFlags,
    cred: &Cred,
) -> Result<()> {
    check_name(name)?;
    check_name(new_name)?;
    if is_dots(name) || is_dots(new_name) {
        return Err(Errno(libc::EBUSY));
    }
    if flags.exchange && (flags.noreplace || flags.whiteout) {
        return Err(Errno(libc::EINVAL));
    }
    let moving = Move {
        dir,
        name,
        new_dir,
        new_name,
        exchange: flags.exchange,
    };
    let noreplace = flags.noreplace;
    let asks = Asks {
        whiteout: flags.whiteout,
        ..Asks::NOTHING
    };
    if !flags.exchange
        && !flags.whiteout
        && mount.is_any_contended()
        && rename_contended(mount, dir, name, new_dir, new_name, cred)?.is_some()
    {
        return Ok(());
    }
    mount.with_session(|session, attempt| {
        session.may_write()?;
        if attempt.is_done() {
            return Ok(());
        }
        for _ in 0..LOOKS_MAX {
            let from = find(mount, session, dir, name, cred)?.ok_or(Errno(libc::ENOENT))?;
            let to = find(mount, session, new_dir, new_name, cred)?;
            let ends = Ends { from, to };
            let refused = match to {
                None if flags.exchange => return Err(Errno(libc::ENOENT).into()),
                Some(_) if flags.noreplace => Some(libc::EEXIST),
                // No directory may be moved into itself, or replace its parent.
                _ if Ends::is_dir(from) && from.key == new_dir => Some(libc::EINVAL),
                Some(to) if to.key == dir && flags.exchange => Some(libc::EINVAL),
                Some(to) if to.key == dir => Some(libc::ENOTEMPTY),
                _ => None,
            };
            let same = to.is_some_and(|to| to.key == from.key);
            // The names were looked up one after the other: a file moved in between was found under neither,
            // or under both.
            if (same || refused.is_some()) && !named_at_once(mount, session, &moving, ends)? {
                continue;
            }
            if let Some(errno) = refused {
                return Err(Errno(errno).into());
            }
            if same {
                return Ok(());
            }
            let op = entry(&moving, ends);
            let mut keys = vec![dir, new_dir, from.key];
            keys.extend(to.map(|to| to.key));
            // A whiteout needs an inode and the rename in one record, for any kind of inode: the daemon has
            // both at hand.
            let pinned = if ends.reparents(&moving) || flags.whiteout {
                check_forwarded(session, &moving, ends, cred)?;
                None
            } else {
                match pin_or_forward(session, &keys) {
                    Err(OpError::Failed(Errno(libc::ESTALE))) => {
                        still_named(session, dir, name, from)?;
                        if let Some(to) = to {
                            still_named(session, new_dir, new_name, to)?;
                        }
                        continue;
                    }
                    other => other?,
                }
            };
            let Some(pins) = pinned else {
                // The entry does not say whether the victim is open here, since it may be opened at this
                // moment; the daemon learns that with the lease.
                match session.forward(attempt, &keys, &op, EntryFlags::empty(), asks, cred) {
                    Ok(Forwarded::Done(_) | Forwarded::DoneBefore(_)) => return Ok(()),
                    Err(OpError::Failed(Errno(libc::ESTALE | libc::EAGAIN))) => continue,
                    // The new name was made since it was looked up: replace it, unless the caller forbids
                    // that.
                    Err(OpError::Failed(Errno(libc::EEXIST))) if !noreplace => continue,
                    Err(error) => return Err(error),
                }
            };
            match rename_once(mount, session, &pins, &moving, ends, &op, cred) {
                Ok(Some((seqs, live))) => {
                    drop(pins);
                    return settle(session, seqs, live, ());
                }
                // Also: another thread of this session removed one of them, and the daemon has forgotten it
                // already.
                Ok(None) | Err(OpError::Failed(Errno(libc::ESTALE))) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Errno(libc::EIO).into())
    })
}

/// Whether the two names have the targets `ends` at one moment.
fn named_at_once<T>(mount: &Mount, session: &Session, moving: &Move<'_>, ends: Ends) -> OpResult<bool, T> {
    let pins = session.pin(&[moving.dir, moving.new_dir], LeaseMode::Read)?;
    let from = resolve(mount, session, pins.node(moving.dir)?, moving.name)?;
    let to = resolve(mount, session, pins.node(moving.new_dir)?, moving.new_name)?;
    Ok(from.map(|from| from.key) == Some(ends.from.key) && to.map(|to| to.key) == ends.to.map(|to| to.key))
}

/// Renames in contended directories, whose names are not known here: the daemon looks the name up. One
/// message, whether or not the name exists. `None`: to be done by [`rename`], because the directories are not
/// contended (any more), or something is to be replaced.
pub(crate) fn rename_contended(
    mount: &Mount,
    dir: InodeKey,
    name: &[u8],
    new_dir: InodeKey,
    new_name: &[u8],
    cred: &Cred,
) -> Result<Option<()>> {
    let contended = |session: &Session| {
        let contended = session.leases.contended();
        contended.any() && contended.is(dir) && (dir == new_dir || contended.is(new_dir))
    };
    let simple = |name| check_name(name).is_ok() && !is_dots(name);
    if !simple(name) || !simple(new_name) || (dir == new_dir && name == new_name) {
        return Ok(None);
    }
    let op = LogOp::Rename {
        dir,
        name,
        key: InodeKey::new(0, 0),
        new_dir,
        new_name,
        victim: None,
        exchange: false,
    };
    mount.with_session(|session, attempt| {
        if attempt.is_done() {
            return Ok(Some(()));
        }
        if !contended(session) {
            return Ok(None);
        }
        session.may_write()?;
        let keys = [dir, new_dir];
        let keys = if dir == new_dir { &keys[..1] } else { &keys[..] };
        match session.forward(attempt, keys, &op, EntryFlags::empty(), Asks::NOTHING, cred) {
            Ok(Forwarded::Done(_) | Forwarded::DoneBefore(_)) => Ok(Some(())),
            Err(OpError::Failed(Errno(libc::EAGAIN | libc::ESTALE))) => {
                session.leases.contended().learn(keys, &[]);
                Ok(None)
            }
            Err(OpError::Failed(Errno(libc::ENOENT))) => {
                // The daemon would not have looked the name up if they were not contended.
                session.leases.contended().learn(keys, keys);
                Err(Errno(libc::ENOENT).into())
            }
            Err(error) => Err(error),
        }
    })
}

fn entry<'a>(moving: &Move<'a>, ends: Ends) -> LogOp<'a> {
    LogOp::Rename {
        dir: moving.dir,
        name: moving.name,
        key: ends.from.key,
        new_dir: moving.new_dir,
        new_name: moving.new_name,
        victim: ends.to.map(|to| to.key),
        exchange: moving.exchange,
    }
}

/// The attributes that the rules need.
pub(crate) struct Views {
    pub parent: InodeAttr,
    pub new_parent: InodeAttr,
    pub from: InodeAttr,
    pub to: Option<InodeAttr>,
}

/// Applies the rules in Linux' order: removal of the source, then creation or removal at the target, then
/// kinds.
pub(crate) fn check(session: &Session, moving: &Move<'_>, views: &Views, cred: &Cred) -> Result<()> {
    let checks = session.options.check_permissions;
    may_change(session, &views.parent, cred)?;
    if checks {
        may_remove(&views.parent, &views.from, cred)?;
    }
    may_change(session, &views.new_parent, cred)?;
    if let Some(to) = &views.to {
        if checks {
            may_remove(&views.new_parent, to, cred)?;
        }
        if !moving.exchange {
            match (views.from.is_dir(), to.is_dir()) {
                (true, false) => return Err(Errno(libc::ENOTDIR)),
                (false, true) => return Err(Errno(libc::EISDIR)),
                _ => {}
            }
        }
    } else if views.new_parent.nlink == 0 {
        return Err(Errno(libc::ENOENT));
    }
    // A directory's `..` changes with its parent: that is a write to it.
    if checks && moving.dir != moving.new_dir {
        if views.from.is_dir() {
            may(&views.from, cred, WRITE)?;
        }
        if let Some(to) = views.to.as_ref().filter(|to| moving.exchange && to.is_dir()) {
            may(to, cred, WRITE)?;
        }
    }
    Ok(())
}

/// Checks the rules before the daemon is asked for a rename; the daemon checks again.
fn check_forwarded(session: &Session, moving: &Move<'_>, ends: Ends, cred: &Cred) -> OpResult<(), ()> {
    let views = Views {
        parent: attr_of(session, moving.dir)?,
        new_parent: attr_of(session, moving.new_dir)?,
        from: attr_of(session, ends.from.key)?,
        to: match ends.to {
            Some(to) => Some(attr_of(session, to.key)?),
            None => None,
        },
    };
    Ok(check(session, moving, &views, cred)?)
}

/// Renames under pins. `None`: a name changed, look again.
fn rename_once(
    mount: &Mount,
    session: &Session,
    pins: &Pins<'_>,
    moving: &Move<'_>,
    ends: Ends,
    op: &LogOp<'_>,
    cred: &Cred,
) -> OpResult<Option<(SeqRange, bool)>, ()> {
    let (node, new_node, file) = (
        pins.node(moving.dir)?,
        pins.node(moving.new_dir)?,
        pins.node(ends.from.key)?,
    );
    let victim = match ends.to {
        Some(to) => Some(pins.node(to.key)?),
        None => None,
    };
    let views = Views {
        parent: directory(session, node, cred, EXEC)?,
        new_parent: directory(session, new_node, cred, EXEC)?,
        from: file.inode.attr(),
        to: victim.map(|victim| victim.inode.attr()),
    };
    // The leases may have been given back and granted again since the names were found: the lookups under
    // these pins count.
    let key = |target: Option<Target>| target.map(|target| target.key);
    if key(resolve(mount, session, node, moving.name)?) != Some(ends.from.key)
        || key(resolve(mount, session, new_node, moving.new_name)?) != key(ends.to)
    {
        return Ok(None);
    }
    check(session, moving, &views, cred)?;
    let replaced_dir = victim.filter(|victim| !moving.exchange && victim.inode.attr().is_dir());
    if let Some(victim) = replaced_dir
        && !is_empty(session, victim)?
    {
        return Err(Errno(libc::ENOTEMPTY).into());
    }
    let slot = begin(session, op)?;
    let mut nodes = vec![node, new_node, file];
    nodes.extend(victim);
    let mut locked = Locked::new(&nodes);
    let is = |dir: &crate::lease::Node, name: &[u8], want: Option<Target>| {
        let known = dir.names.lock().get(name);
        known.is_some_and(|known| known.map(|target| target.key) == want.map(|target| target.key))
    };
    if !is(node, moving.name, Some(ends.from)) || !is(new_node, moving.new_name, ends.to) {
        super::give_up(slot, op);
        return Ok(None);
    }
    let refused = if replaced_dir.is_some_and(|victim| victim.names.lock().has_any()) {
        Some(Errno(libc::ENOTEMPTY))
    } else {
        (locked.attr(moving.new_dir)?.nlink == 0).then_some(Errno(libc::ENOENT))
    };
    if let Some(errno) = refused {
        super::give_up(slot, op);
        return Err(errno.into());
    }
    let now = session.now_ns();
    let flags = match ends.to {
        Some(to) if !moving.exchange => last_closed(mount, to.key),
        _ => EntryFlags::empty(),
    };
    let committed = commit(session, slot, op, flags, now)?;
    let seq = committed.seqs.last;
    locked.logged(seq);
    locked.attr(ends.from.key)?.ctime_ns = now;
    if let Some(to) = ends.to {
        let attr = locked.attr(to.key)?;
        attr.ctime_ns = now;
        if !moving.exchange {
            attr.nlink = if replaced_dir.is_some() {
                0
            } else {
                attr.nlink.saturating_sub(1)
            };
            locked.note_dead(to.key, flags)?;
            if locked.get(to.key)?.dead && replaced_dir.is_none() {
                session.leases.bury(to.key, seq);
            }
        }
    }
    touch_dir(locked.attr(moving.dir)?, now);
    let new_parent = locked.attr(moving.new_dir)?;
    touch_dir(new_parent, now);
    if replaced_dir.is_some() {
        new_parent.nlink = new_parent.nlink.saturating_sub(1);
    }
    let digested = session.page.digested();
    let left = if moving.exchange { ends.to } else { None };
    node.names.lock().set(moving.name, left, seq, digested);
    new_node
        .names
        .lock()
        .set(moving.new_name, Some(ends.from), seq, digested);
    Ok(Some((committed.seqs, committed.live)))
}
