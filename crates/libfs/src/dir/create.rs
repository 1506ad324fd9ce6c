//! Operations that make names: create, mkdir, mknod, symlink, link, tmpfile.

use std::sync::Arc;
use varve_format::{
    DIR_SIZE, EntryFlags, FileKind, Ino, InodeAttr, InodeKey, LINK_MAX, LastForwarded, LeaseNo, LogOp,
    SYMLINK_MAX, TimeNs,
};
use varve_ipc::{Cred, ForwardedResult};

use super::{
    LOOKS_MAX, Locked, Target, attr_of, attr_or_gone, begin, check_name, commit, directory, is_dots,
    may_change, pin_or_forward, resolve, settle, touch_dir,
};
use crate::attrs::{EXEC, ownership};
use crate::errno::{Errno, OpError, OpResult, Result};
use crate::lease::{Node, Pins};
use crate::session::{Asks, Forwarded, Mount, Session, Try};

/// Inode to make.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Making<'a> {
    /// Kind and permissions, the umask applied.
    pub mode: u32,
    /// Device.
    pub rdev: u32,
    /// Target of a symbolic link, else empty.
    pub target: &'a [u8],
}

/// Takes a number for a new inode in a pinned directory.
pub(crate) fn take_number<T>(session: &Session, dir: &Arc<Node>) -> OpResult<(InodeKey, LeaseNo), T> {
    loop {
        if let Some(number) = session.leases.take_number(dir) {
            return Ok(number);
        }
        session.leases.provide(dir)?;
    }
}

pub(crate) fn new_attr(
    dir: &InodeAttr,
    key: InodeKey,
    making: &Making<'_>,
    named: bool,
    cred: &Cred,
    now_ns: TimeNs,
) -> InodeAttr {
    let (uid, gid, mode) = ownership(dir, making.mode, cred);
    let is_dir = mode & libc::S_IFMT == libc::S_IFDIR;
    InodeAttr {
        key,
        mode,
        uid,
        gid,
        nlink: if is_dir { 2 } else { u32::from(named) },
        size_bytes: if is_dir {
            DIR_SIZE
        } else {
            making.target.len() as u64
        },
        sectors: 0,
        rdev: making.rdev,
        parent: if is_dir { dir.key.ino } else { Ino(0) },
        atime_ns: now_ns,
        mtime_ns: now_ns,
        ctime_ns: now_ns,
        btime_ns: now_ns,
    }
}

pub(crate) fn create_op<'a>(attr: &InodeAttr, dir: InodeKey, name: &'a [u8], target: &'a [u8]) -> LogOp<'a> {
    LogOp::Create {
        dir,
        name,
        key: attr.key,
        mode: attr.mode,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        target,
    }
}

/// Makes an inode and its first name.
pub(crate) fn create(
    mount: &Mount,
    dir: InodeKey,
    name: &[u8],
    making: &Making<'_>,
    cred: &Cred,
) -> Result<InodeAttr> {
    make(mount, dir, name, making, cred, None)
}

/// As [`create`]; the caller also owns an open of the new inode, which counts before any other thread can
/// find it, so that no removal comes between.
pub(crate) fn create_open(
    mount: &Mount,
    dir: InodeKey,
    name: &[u8],
    making: &Making<'_>,
    cred: &Cred,
) -> Result<InodeAttr> {
    let mut opened = None;
    let outcome = make(mount, dir, name, making, cred, Some(&mut opened));
    let made = outcome.as_ref().ok().map(|attr| attr.key);
    if let Some(key) = opened.filter(|key| made != Some(*key)) {
        mount.opens.close(key);
    }
    if let Some(key) = made.filter(|key| opened != Some(*key)) {
        hold_open(mount, key);
    }
    outcome
}

/// Adds an open, and tells the session of it.
fn hold_open(mount: &Mount, key: InodeKey) {
    mount.opens.open(key);
    let hold = varve_ipc::Request::Hold { keys: vec![key] };
    let _ = mount.session().link.call(hold);
}

/// Makes a name. With `opened`, each attempt counts the new inode as open and notes its key there.
fn make(
    mount: &Mount,
    dir: InodeKey,
    name: &[u8],
    making: &Making<'_>,
    cred: &Cred,
    mut opened: Option<&mut Option<InodeKey>>,
) -> Result<InodeAttr> {
    check_name(name)?;
    if is_dots(name) {
        return Err(Errno(libc::EEXIST));
    }
    let kind = FileKind::from_mode(making.mode).ok_or(Errno(libc::EINVAL))?;
    if (kind == FileKind::Symlink) == making.target.is_empty() {
        return Err(Errno(libc::ENOENT));
    }
    if making.target.len() > SYMLINK_MAX {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    mount.with_session(|session, attempt| {
        session.may_write()?;
        if let Some(key) = opened.as_mut().and_then(|opened| opened.take()) {
            mount.opens.close(key);
        }
        let opens = opened.is_some().then_some(mount);
        for _ in 0..LOOKS_MAX {
            let Some(pins) = pin_or_forward_again(session, attempt, &[dir])? else {
                let attr = forward_create(mount, session, attempt, (dir, name), making, cred, &mut opened)?;
                return Ok(attr);
            };
            let node = pins.node(dir)?;
            directory(session, node, cred, EXEC)?;
            if resolve(mount, session, node, name)?.is_some() {
                return Err(Errno(libc::EEXIST).into());
            }
            if let Some((seqs, live, attr)) = create_once(session, node, name, making, cred, opens)? {
                drop(pins);
                if let Some(opened) = &mut opened {
                    **opened = Some(attr.key);
                }
                return settle(session, seqs, live, attr);
            }
        }
        Err(Errno(libc::EIO).into())
    })
}

type Made<T> = (varve_format::SeqRange, bool, T);

/// Logs a creation in a pinned directory. `None`: the name exists by now. With `open`, the new inode is
/// counted as open.
fn create_once<T>(
    session: &Session,
    node: &Arc<Node>,
    name: &[u8],
    making: &Making<'_>,
    cred: &Cred,
    open: Option<&Mount>,
) -> OpResult<Option<Made<InodeAttr>>, T> {
    let dir = node.key();
    let number = take_number(session, node)?;
    let give_up = |error: OpError<T>| {
        session.leases.put_number_back(node, number);
        error
    };
    let draft = new_attr(&node.inode.attr(), number.0, making, !name.is_empty(), cred, 0);
    let slot = begin(session, &create_op(&draft, dir, name, making.target)).map_err(give_up)?;
    let mut locked = Locked::new(&[node]);
    let now = session.now_ns();
    let parent = locked.attr(dir)?.clone();
    if !name.is_empty() && node.names.lock().get(name).is_some_and(|known| known.is_some()) {
        drop(locked);
        super::give_up(slot, &create_op(&draft, dir, name, making.target));
        session.leases.put_number_back(node, number);
        return Ok(None);
    }
    let attr = new_attr(&parent, number.0, making, !name.is_empty(), cred, now);
    let refused = if parent.nlink == 0 {
        Some(Errno(libc::ENOENT))
    } else if attr.is_dir() && parent.nlink >= LINK_MAX {
        Some(Errno(libc::EMLINK))
    } else {
        may_change(session, &parent, cred).err()
    };
    if let Some(errno) = refused {
        drop(locked);
        super::give_up(slot, &create_op(&draft, dir, name, making.target));
        return Err(give_up(errno.into()));
    }
    let op = create_op(&attr, dir, name, making.target);
    let committed = commit(session, slot, &op, EntryFlags::empty(), now)
        .inspect_err(|_: &OpError<T>| session.leases.unreserve(number.0))?;
    let new = Arc::new(Node::new(attr.clone()));
    {
        let mut body = new.inode.write();
        body.logged(committed.seqs.last);
        body.extents.set_empty();
    }
    if attr.is_dir() {
        new.names.lock().set_complete();
        *new.parent.lock() = Some(dir);
    }
    *new.xattrs.lock() = Some(crate::lease::Xattrs::new());
    if !making.target.is_empty() {
        let _ = new.target.set(making.target.to_vec());
    }
    new.born
        .store(committed.seqs.last.0, std::sync::atomic::Ordering::Relaxed);
    // Adopted before its name is published: a thread that finds the name finds the lease.
    let pin = session.leases.adopt(new, number.1);
    if let Some(mount) = open {
        mount.opens.open(attr.key);
    }
    locked.logged(committed.seqs.last);
    if !name.is_empty() {
        let parent = locked.attr(dir)?;
        touch_dir(parent, now);
        if attr.is_dir() {
            parent.nlink += 1;
        }
        let target = Target {
            key: attr.key,
            kind: attr.kind(),
        };
        node.names
            .lock()
            .set(name, Some(target), committed.seqs.last, session.page.digested());
    }
    let (seqs, live) = (committed.seqs, committed.live);
    drop(committed);
    drop(locked);
    drop(pin);
    Ok(Some((seqs, live, attr)))
}

/// As [`pin_or_forward`], but `None` also if the daemon has made the inode already, in a session that was
/// lost; [`Session::forward`] returns that result.
fn pin_or_forward_again<'s, T>(
    session: &'s Session,
    attempt: &Try,
    keys: &[InodeKey],
) -> OpResult<Option<Pins<'s>>, T> {
    if attempt.is_done() {
        return Ok(None);
    }
    pin_or_forward(session, keys)
}

/// Has the daemon make the inode, because the directory is contended.
fn forward_create(
    mount: &Mount,
    session: &Session,
    attempt: &mut Try,
    (dir, name): (InodeKey, &[u8]),
    making: &Making<'_>,
    cred: &Cred,
    opened: &mut Option<&mut Option<InodeKey>>,
) -> OpResult<InodeAttr, InodeAttr> {
    if let Some(done) = attempt.done() {
        return made_before(session, done, making);
    }
    let parent = attr_of(session, dir)?;
    if !parent.is_dir() {
        return Err(Errno(libc::ENOTDIR).into());
    }
    // The daemon takes the number.
    let nobody = InodeKey::new(0, 0);
    let attr = new_attr(&parent, nobody, making, !name.is_empty(), cred, session.now_ns());
    let op = create_op(&attr, dir, name, making.target);
    let asks = Asks {
        open: opened.is_some(),
        ..Asks::NOTHING
    };
    match session.forward(attempt, &[dir], &op, EntryFlags::empty(), asks, cred)? {
        Forwarded::Done(result) => {
            let attr = result.attr.ok_or(Errno(libc::ESTALE))?;
            if let Some(opened) = opened {
                mount.opens.open(attr.key);
                **opened = Some(attr.key);
            }
            Ok(attr)
        }
        Forwarded::DoneBefore(done) => made_before(session, done, making),
    }
}

/// Returns the inode that the daemon has made for a session that was lost afterwards. By its key: the name
/// may have gone, or may name another inode.
fn made_before(
    session: &Session,
    done: LastForwarded,
    making: &Making<'_>,
) -> OpResult<InodeAttr, InodeAttr> {
    let key = done.made.ok_or(Errno(libc::EIO))?;
    attr_or_gone(session, InodeAttr::new(key, making.mode, session.now_ns()))
}

/// Makes an unnamed regular file and opens it; the caller owns the open.
pub(crate) fn tmpfile(mount: &Mount, dir: InodeKey, mode: u32, cred: &Cred) -> Result<InodeAttr> {
    let making = Making {
        mode: libc::S_IFREG | (mode & 0o7777),
        rdev: 0,
        target: b"",
    };
    let attr = mount.with_session(|session, attempt| {
        session.may_write()?;
        for _ in 0..LOOKS_MAX {
            let Some(pins) = pin_or_forward_again(session, attempt, &[dir])? else {
                let mut opened = None;
                return forward_create(
                    mount,
                    session,
                    attempt,
                    (dir, b""),
                    &making,
                    cred,
                    &mut Some(&mut opened),
                );
            };
            let node = pins.node(dir)?;
            directory(session, node, cred, EXEC)?;
            if let Some((seqs, live, attr)) = create_once(session, node, b"", &making, cred, Some(mount))? {
                drop(pins);
                let key = attr.key;
                return settle(session, seqs, live, attr).inspect_err(|_| {
                    // The open of a commit that the seal may not cover is taken again below.
                    mount.opens.close(key);
                });
            }
        }
        Err(Errno(libc::EIO).into())
    })?;
    if !mount.opens.is_open(attr.key) {
        hold_open(mount, attr.key);
    }
    mount.opens.set_linkable(attr.key, true);
    Ok(attr)
}

/// Makes one more name.
pub(crate) fn link(
    mount: &Mount,
    key: InodeKey,
    dir: InodeKey,
    name: &[u8],
    cred: &Cred,
) -> Result<InodeAttr> {
    check_name(name)?;
    if is_dots(name) {
        return Err(Errno(libc::EEXIST));
    }
    let attr = mount.with_session(|session, attempt| {
        session.may_write()?;
        for _ in 0..LOOKS_MAX {
            let op = LogOp::Link { dir, name, key };
            let Some(pins) = pin_or_forward_again(session, attempt, &[dir, key])? else {
                return match session.forward(
                    attempt,
                    &[dir, key],
                    &op,
                    EntryFlags::empty(),
                    Asks::NOTHING,
                    cred,
                )? {
                    Forwarded::Done(ForwardedResult { attr: Some(attr), .. }) => Ok(attr),
                    Forwarded::Done(_) | Forwarded::DoneBefore(_) => {
                        attr_or_gone(session, InodeAttr::new(key, libc::S_IFREG, session.now_ns()))
                    }
                };
            };
            let (node, file) = (pins.node(dir)?, pins.node(key)?);
            directory(session, node, cred, EXEC)?;
            if resolve(mount, session, node, name)?.is_some() {
                return Err(Errno(libc::EEXIST).into());
            }
            let slot = begin(session, &op)?;
            let mut locked = Locked::new(&[node, file]);
            if node.names.lock().get(name).is_some_and(|known| known.is_some()) {
                super::give_up(slot, &op);
                continue;
            }
            let (parent, attr) = (locked.attr(dir)?.clone(), locked.attr(key)?.clone());
            let refused = if parent.nlink == 0 {
                Some(Errno(libc::ENOENT))
            } else if let Err(errno) = may_change(session, &parent, cred) {
                Some(errno)
            } else if attr.is_dir() {
                Some(Errno(libc::EPERM))
            } else if attr.nlink == 0 && !mount.opens.is_linkable(key) {
                Some(Errno(libc::ENOENT))
            } else {
                (attr.nlink >= LINK_MAX).then_some(Errno(libc::EMLINK))
            };
            if let Some(errno) = refused {
                super::give_up(slot, &op);
                return Err(errno.into());
            }
            let now = session.now_ns();
            let committed = commit(session, slot, &op, EntryFlags::empty(), now)?;
            locked.logged(committed.seqs.last);
            touch_dir(locked.attr(dir)?, now);
            let after = locked.attr(key)?;
            after.nlink += 1;
            after.ctime_ns = now;
            let (after, kind) = (after.clone(), attr.kind());
            let target = Target { key, kind };
            node.names
                .lock()
                .set(name, Some(target), committed.seqs.last, session.page.digested());
            let (seqs, live) = (committed.seqs, committed.live);
            drop(committed);
            drop(locked);
            drop(pins);
            return settle(session, seqs, live, after);
        }
        Err(Errno(libc::EIO).into())
    })?;
    mount.opens.set_linkable(key, false);
    Ok(attr)
}
