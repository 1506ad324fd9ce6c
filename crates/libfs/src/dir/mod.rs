//! Names under directory leases: the known names of each directory, and the operations on names. Each is one
//! log transaction under the locks of all inodes concerned, in inode order; knows no data and no descriptors.

pub(crate) mod create;
mod list;
pub(crate) mod remove;
pub(crate) mod rename;

use crate::dir_cache::Asking;
pub(crate) use crate::dir_cache::Target;
pub(crate) use create::{Making, create, create_open, link, tmpfile};
pub(crate) use list::{readdir, readlink};
pub(crate) use remove::{rmdir, unlink};
pub(crate) use rename::{rename, rename_contended};

use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use varve_format::log::entry_size;
use varve_format::{EntryFlags, InodeAttr, InodeKey, LogOp, LogSeq, NAME_MAX, SeqRange, TimeNs};
use varve_ipc::{Cred, LeaseMode, Request, Response};

use crate::attrs::{EXEC, WRITE, may};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::inode::{Inode, InodeBody, InodeWrite};
use crate::lease::{AT_ONCE, Node, Pins, Use};
use crate::log::{Committed, Slot, with_body};
use crate::session::{Mount, Session};

/// Most times that an operation looks again when the names changed under it.
pub(crate) const LOOKS_MAX: usize = 1000;

/// Refuses an impossible name.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    if name.is_empty() {
        return Err(Errno(libc::ENOENT));
    }
    if name.contains(&b'/') || name.contains(&0) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(())
}

pub(crate) fn is_dots(name: &[u8]) -> bool {
    name == b"." || name == b".."
}

/// Several inodes, locked in inode order.
pub(crate) struct Locked<'n> {
    pub(crate) guards: SmallVec<[(InodeKey, InodeWrite<'n>); AT_ONCE]>,
}

impl<'n> Locked<'n> {
    pub(crate) fn new(nodes: &[&'n Arc<Node>]) -> Self {
        let mut inodes: SmallVec<[&'n Inode; AT_ONCE]> = nodes.iter().map(|node| &*node.inode).collect();
        inodes.sort_by_key(|inode| inode.key);
        inodes.dedup_by_key(|inode| inode.key);
        Self {
            guards: inodes
                .into_iter()
                .map(|inode| (inode.key, inode.write()))
                .collect(),
        }
    }

    pub(crate) fn get(&mut self, key: InodeKey) -> Result<&mut InodeBody> {
        let found = self.guards.iter_mut().find(|(other, _)| *other == key);
        found.map(|(_, guard)| &mut **guard).ok_or(Errno(libc::EIO))
    }

    pub(crate) fn write(&mut self, key: InodeKey) -> Result<&mut InodeWrite<'n>> {
        let found = self.guards.iter_mut().find(|(other, _)| *other == key);
        found.map(|(_, guard)| guard).ok_or(Errno(libc::EIO))
    }

    pub(crate) fn attr(&mut self, key: InodeKey) -> Result<&mut InodeAttr> {
        Ok(&mut self.get(key)?.attr)
    }

    /// Notes that an inode without names takes no more entries, if the entry that took its last one said so.
    pub(crate) fn note_dead(&mut self, key: InodeKey, flags: EntryFlags) -> Result<()> {
        let body = self.get(key)?;
        body.dead = body.attr.nlink == 0 && flags.contains(EntryFlags::LAST_CLOSED);
        Ok(())
    }

    /// Notes that entry `seq` concerns all of them.
    pub(crate) fn logged(&mut self, seq: LogSeq) {
        for (_, guard) in &mut self.guards {
            guard.logged(seq);
        }
    }
}

/// Takes log space and reserves blocks for one operation. Before any lock.
pub(crate) fn begin<'s, T>(session: &'s Session, op: &LogOp<'_>) -> OpResult<Slot<'s>, T> {
    let body_len = with_body(op, <[u8]>::len);
    session
        .data
        .begin(entry_size(body_len + op.data().len()), varve_format::charge(op))
}

/// Ends the operation that [`begin`] began for `op`, with nothing logged: returns its reserved blocks.
pub(crate) fn give_up(slot: Slot<'_>, op: &LogOp<'_>) {
    slot.pay_back(varve_format::charge(op));
}

/// Commits one operation. The caller publishes its effects, then ends with [`settle`].
pub(crate) fn commit<'s, T>(
    session: &Session,
    slot: Slot<'s>,
    op: &LogOp<'_>,
    flags: EntryFlags,
    time_ns: TimeNs,
) -> OpResult<Committed<'s>, T> {
    let stamp = crate::log::Stamp {
        time_ns,
        base: session.page.committed_tx(),
    };
    slot.append(op, flags, stamp)
}

/// Ends a logged operation, after its locks: act, then check.
pub(crate) fn settle<T>(session: &Session, seqs: SeqRange, live: bool, value: T) -> OpResult<T, T> {
    if !live {
        return Err(OpError::SessionLost {
            committed: Some((seqs, value)),
            otherwise: None,
        });
    }
    if session.options.sync_always
        && let Err(error) = session.data.sync()
    {
        return Err(OpError::Failed(error));
    }
    Ok(value)
}

/// Returns the attributes of a pinned directory; `want` is checked if permissions are checked here.
fn directory(session: &Session, node: &Node, cred: &Cred, want: u32) -> Result<InodeAttr> {
    let attr = node.inode.attr();
    if !attr.is_dir() {
        return Err(Errno(libc::ENOTDIR));
    }
    if session.options.check_permissions {
        may(&attr, cred, want)?;
    }
    Ok(attr)
}

/// Whether `cred` may add or remove names, if permissions are checked here.
pub(crate) fn may_change(session: &Session, attr: &InodeAttr, cred: &Cred) -> Result<()> {
    if session.options.check_permissions {
        may(attr, cred, WRITE | EXEC)
    } else {
        Ok(())
    }
}

/// Looks `name` up in a directory that is pinned in any mode.
pub(crate) fn resolve<T>(
    mount: &Mount,
    session: &Session,
    dir: &Node,
    name: &[u8],
) -> OpResult<Option<Target>, T> {
    let _asking = match Asking::unless_known(&dir.names, name) {
        Ok(known) => {
            mount.names_hit.fetch_add(1, Ordering::Relaxed);
            return Ok(known);
        }
        Err(asking) => asking,
    };
    mount.names_missed.fetch_add(1, Ordering::Relaxed);
    let answer = session.call(Request::Lookup {
        dir: dir.key(),
        name: name.to_vec(),
    })?;
    let Response::Entry(entry) = answer else {
        return Err(OpError::Failed(Errno(libc::EIO)));
    };
    let target = entry.map(|attr| Target {
        key: attr.key,
        kind: attr.kind(),
    });
    let (known, due) = {
        let mut names = dir.names.lock();
        let known = names.learn(name, target, session.page.digested());
        (known, names.missed())
    };
    if let Some(cookie) = due {
        read_ahead(session, dir, cookie)?;
    }
    Ok(known)
}

/// Reads the next page of a pinned directory after repeated lookups of unknown names. The caller's [`Asking`]
/// is held.
fn read_ahead<T>(session: &Session, dir: &Node, cookie: u64) -> OpResult<(), T> {
    let answer = session.call(Request::ReadDir {
        dir: dir.key(),
        cookie,
        max: list::PAGE_MAX as u32,
    });
    match answer {
        Ok(Response::Entries(entries, complete)) => {
            list::take_in(dir, cookie, &entries, complete);
            Ok(())
        }
        Err(OpError::Failed(_)) | Ok(_) => {
            dir.names.lock().stop_reading();
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// Returns the likely target of `name`, if `cred` may search `dir`: no pin, no waiting. For callers that look
/// again under a pin.
fn hint(session: &Session, dir: InodeKey, name: &[u8], cred: &Cred) -> Option<Target> {
    session.leases.see(|nodes| {
        let node = nodes.get(&dir)?;
        if session.options.check_permissions && cred.uid != 0 {
            may(&node.inode.try_attr()?, cred, EXEC).ok()?;
        }
        let names = node.names.try_lock()?;
        names.get(name)?
    })
}

/// Looks `name` up, under a pin of its own.
fn find<T>(
    mount: &Mount,
    session: &Session,
    dir: InodeKey,
    name: &[u8],
    cred: &Cred,
) -> OpResult<Option<Target>, T> {
    let pins = session.pin_read(dir)?;
    let node = pins.node(dir)?;
    directory(session, node, cred, EXEC)?;
    resolve(mount, session, node, name)
}

/// Returns attributes under a read lease.
pub(crate) fn attr_of<T>(session: &Session, key: InodeKey) -> OpResult<InodeAttr, T> {
    let known = session.leases.see(|nodes| look(session, nodes.get(&key)?));
    if let Some(attr) = known {
        return Ok(attr);
    }
    let pins = session.pin_read(key)?;
    Ok(pins.node(key)?.inode.attr())
}

/// As [`attr_of`], for an inode that the daemon has changed or made for this mount, perhaps for an earlier
/// session: it may have been removed since. Then returns the attributes `last`, without a name.
pub(crate) fn attr_or_gone<T>(session: &Session, last: InodeAttr) -> OpResult<InodeAttr, T> {
    match attr_of(session, last.key) {
        Err(OpError::Failed(Errno(libc::ESTALE))) => Ok(InodeAttr { nlink: 0, ..last }),
        other => other,
    }
}

/// Returns attributes without a pin. Act, then check: they were right at the moment of the last check, if the
/// session was still live then.
#[inline]
fn look(session: &Session, node: &Node) -> Option<InodeAttr> {
    if !session.leases.may_look(node, Use::Own) {
        return None;
    }
    let attr = node.inode.try_attr()?;
    (session.leases.may_look(node, Use::Own) && session.is_live()).then_some(attr)
}

/// Looks up a known, existing name, without pins and without waiting; as [`look`].
fn lookup_known(
    mount: &Mount,
    session: &Session,
    dir: InodeKey,
    name: &[u8],
    cred: &Cred,
) -> Option<InodeAttr> {
    session.leases.see(|nodes| {
        let node = nodes.get(&dir)?;
        if !session.leases.may_look(node, Use::Own) {
            return None;
        }
        // The superuser may search any directory, and only a directory has names.
        if session.options.check_permissions && cred.uid != 0 {
            may(&node.inode.try_attr()?, cred, EXEC).ok()?;
        }
        let target = node.names.try_lock()?.get(name)??;
        let found = nodes.get(&target.key)?;
        let attr = look(session, found).filter(|attr| attr.nlink > 0)?;
        if attr.is_dir() {
            *found.parent.try_lock()? = Some(dir);
        }
        if !(session.leases.may_look(node, Use::Own) && session.is_live()) {
            return None;
        }
        // Not exact when threads meet, but without a locked instruction.
        let hits = mount.names_hit.load(Ordering::Relaxed);
        mount.names_hit.store(hits + 1, Ordering::Relaxed);
        Some(attr)
    })
}

/// Looks up a name, `.` and `..` included.
pub(crate) fn lookup(mount: &Mount, dir: InodeKey, name: &[u8], cred: &Cred) -> Result<InodeAttr> {
    check_name(name)?;
    mount.look(|session| {
        if is_dots(name) {
            return dots(session, dir, name, cred);
        }
        if let Some(attr) = lookup_known(mount, session, dir, name, cred) {
            return Ok(attr);
        }
        for _ in 0..LOOKS_MAX {
            let Some(target) = find(mount, session, dir, name, cred)? else {
                return Err(OpError::Failed(Errno(libc::ENOENT)));
            };
            match attr_of(session, target.key) {
                // Removed since it was found, or by another session: look again.
                Err(OpError::Failed(Errno(libc::ESTALE | libc::ENOENT))) => {}
                Ok(attr) if attr.nlink == 0 => {}
                Ok(attr) => {
                    if attr.is_dir()
                        && let Some(node) = session.node(attr.key)
                    {
                        *node.parent.lock() = Some(dir);
                    }
                    return Ok(attr);
                }
                Err(error) => return Err(error),
            }
            still_named(session, dir, name, target)?;
        }
        Err(OpError::Failed(Errno(libc::ESTALE)))
    })
}

/// Forgets a name whose inode is gone, so that the daemon is asked again, unless this session's log holds the
/// name.
pub(crate) fn still_named<T>(
    session: &Session,
    dir: InodeKey,
    name: &[u8],
    target: Target,
) -> OpResult<(), T> {
    let pins = session.pin_read(dir)?;
    pins.node(dir)?
        .names
        .lock()
        .doubt(name, target, session.page.digested());
    Ok(())
}

fn dots(session: &Session, dir: InodeKey, name: &[u8], cred: &Cred) -> OpResult<InodeAttr, InodeAttr> {
    let own = {
        let pins = session.pin_read(dir)?;
        directory(session, pins.node(dir)?, cred, EXEC)?
    };
    if name == b"." || own.key == session.welcome.root.key {
        return Ok(own);
    }
    parent_of(session, &own)
}

/// Returns the parent directory. Only the daemon knows its generation.
fn parent_of<T>(session: &Session, own: &InodeAttr) -> OpResult<InodeAttr, T> {
    if own.parent == session.welcome.root.key.ino {
        return attr_of(session, session.welcome.root.key);
    }
    let known = session
        .node(own.key)
        .and_then(|node| *node.parent.lock())
        .filter(|key| key.ino == own.parent);
    if let Some(key) = known.or_else(|| session.leases.by_ino(own.parent).map(|node| node.key())) {
        return attr_of(session, key);
    }
    let pins = session.pin_read(own.key)?;
    let last = pins.node(own.key)?.inode.read().last_seq;
    session.digest(last)?;
    let answer = session.call(Request::Lookup {
        dir: own.key,
        name: b"..".to_vec(),
    })?;
    drop(pins);
    match answer {
        Response::Entry(Some(attr)) => attr_of(session, attr.key),
        Response::Entry(None) => Err(OpError::Failed(Errno(libc::ENOENT))),
        _ => Err(OpError::Failed(Errno(libc::EIO))),
    }
}

/// Pins for writing; `None` if the daemon has to do the operation.
pub(crate) fn pin_or_forward<'s, T>(
    session: &'s Session,
    keys: &[InodeKey],
) -> OpResult<Option<Pins<'s>>, T> {
    match session.pin(keys, LeaseMode::Write) {
        Ok(pins) => Ok(Some(pins)),
        Err(OpError::Forward) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Sets a directory's times after its names changed.
pub(crate) fn touch_dir(attr: &mut InodeAttr, time_ns: TimeNs) {
    attr.mtime_ns = time_ns;
    attr.ctime_ns = time_ns;
}

/// Whether a pinned directory has no names.
fn is_empty<T>(session: &Session, dir: &Node) -> OpResult<bool, T> {
    {
        let names = dir.names.lock();
        if names.has_any() {
            return Ok(false);
        }
        if names.is_complete() {
            return Ok(true);
        }
    }
    let last = dir.inode.read().last_seq;
    session.digest(last)?;
    let answer = session.call(Request::ReadDir {
        dir: dir.key(),
        cookie: 0,
        max: 1,
    })?;
    match answer {
        Response::Entries(entries, _) => Ok(entries.is_empty()),
        _ => Err(OpError::Failed(Errno(libc::EIO))),
    }
}
