//! Open file descriptions: opening, the inode that they keep alive, its pins, and the last close.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use varve_format::{EntryFlags, FileKind, InodeAttr, InodeKey, LogOp, SessionId};
use varve_ipc::{Cred, LeaseMode};
use varve_media::lock::RwLock;

use super::read::log_atime;
use crate::attrs::{OpenFlags, READ, WRITE, may};
use crate::dir::{attr_of, begin, commit};
use crate::errno::{Errno, OpResult, Result};
use crate::lease::{Event, Node, Pin, SlotPin, Use};
use crate::session::{Mount, Session, Try};

/// An open file description. Keeps the inode alive while it exists; clones are the same description; the last
/// drop closes it.
#[derive(Clone)]
pub struct OpenFile {
    description: Arc<Description>,
}

struct Description {
    mount: Arc<Mount>,
    key: InodeKey,
    flags: OpenFlags,
    /// The session and the node of its first use: most calls find them without a lock, as long as that
    /// session lives.
    first: OnceLock<(Arc<Session>, Arc<Node>)>,
    /// The session and the node of its last use, if that was another session.
    node: RwLock<Option<(SessionId, Arc<Node>)>>,
}

/// A pinned inode.
pub(super) enum Pinned<'s> {
    Slot(SlotPin<'s>),
    Counted(Pin<'s>),
}

impl Pinned<'_> {
    #[inline]
    pub(super) fn node(&self) -> &Arc<Node> {
        match self {
            Self::Slot(pin) => pin.node(),
            Self::Counted(pin) => pin.node(),
        }
    }
}

impl OpenFile {
    /// Creates a description of an inode whose open is already counted.
    pub(crate) fn over(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags) -> Self {
        let description = Description {
            mount: Arc::clone(mount),
            key,
            flags,
            first: OnceLock::new(),
            node: RwLock::new(None),
        };
        Self {
            description: Arc::new(description),
        }
    }

    /// As [`over`](Self::over), for an inode that was just made.
    pub(crate) fn made(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags) -> Self {
        let file = Self::over(mount, key, flags);
        let session = mount.session();
        if let Some(node) = session.node(key) {
            let _ = file.description.first.set((session, node));
        }
        file
    }

    pub(crate) fn open(mount: &Arc<Mount>, key: InodeKey, flags: OpenFlags, cred: &Cred) -> Result<Self> {
        let mut counted = false;
        let mut found = None;
        let outcome = mount.look(|session| {
            if flags.write || flags.truncate {
                session.may_write()?;
            }
            let known = session.leases.get(key);
            let pinned = known
                .as_ref()
                .and_then(|node| session.leases.try_pin_slot(node, LeaseMode::Read, Use::Own));
            let node = match &pinned {
                Some(pin) => {
                    admit(mount, session, pin.node(), flags, cred, &mut counted)?;
                    Arc::clone(pin.node())
                }
                None => {
                    let pins = session.pin_read(key)?;
                    let node = pins.node(key)?;
                    admit(mount, session, node, flags, cred, &mut counted)?;
                    Arc::clone(node)
                }
            };
            found = Some((Arc::clone(session), node));
            Ok(())
        });
        if let Err(errno) = outcome {
            if counted {
                mount.opens.close(key);
            }
            return Err(errno);
        }
        let file = Self::over(mount, key, flags);
        if let Some(found) = found {
            let _ = file.description.first.set(found);
        }
        if flags.truncate {
            file.resize(0, cred)?;
        }
        Ok(file)
    }

    /// The inode.
    #[must_use]
    pub fn key(&self) -> InodeKey {
        self.description.key
    }

    /// The flags of its open.
    #[must_use]
    pub fn flags(&self) -> OpenFlags {
        self.description.flags
    }

    pub(super) fn mount(&self) -> &Mount {
        &self.description.mount
    }

    /// The session and the node of its first use.
    #[inline]
    pub(super) fn first(&self) -> Option<&(Arc<Session>, Arc<Node>)> {
        self.description.first.get()
    }

    /// Runs an operation, in the session of the file's first use if that lives.
    #[inline]
    pub(super) fn with_session<T>(
        &self,
        op: impl FnMut(&Arc<Session>, &mut Try) -> OpResult<T, T>,
    ) -> Result<T> {
        match self.first() {
            Some((session, _)) => self.mount().with_session_from(session, op),
            None => self.mount().with_session(op),
        }
    }

    /// Pins the inode, without a lookup if it was used before.
    #[inline]
    pub(super) fn pin<'s, T>(
        &'s self,
        session: &'s Arc<Session>,
        mode: LeaseMode,
        usage: Use<'_>,
    ) -> OpResult<Pinned<'s>, T> {
        if let Some((first, node)) = self.first()
            && Arc::ptr_eq(first, session)
            && let Some(pin) = session.leases.try_pin_slot(node, mode, usage)
        {
            return Ok(Pinned::Slot(pin));
        }
        self.pin_slowly(session, mode, usage).map(Pinned::Counted)
    }

    fn pin_slowly<'s, T>(
        &self,
        session: &'s Arc<Session>,
        mode: LeaseMode,
        usage: Use<'_>,
    ) -> OpResult<Pin<'s>, T> {
        if let Some((id, node)) = &*self.description.node.read()
            && *id == session.id()
            && let Some(pin) = session.leases.try_pin_node(node, mode, usage)
        {
            return Ok(pin);
        }
        let pin = session.leases.pin_one(self.key(), mode, usage)?;
        let known = || (Arc::clone(session), Arc::clone(pin.node()));
        // While a description refers to a node, it stays its session's node: only the session can change.
        if !Arc::ptr_eq(&self.description.first.get_or_init(known).0, session) {
            *self.description.node.write() = Some((session.id(), Arc::clone(pin.node())));
        }
        Ok(pin)
    }

    /// Fails with EXDEV if the files are of different pools.
    pub(super) fn same_pool(&self, other: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.description.mount, &other.description.mount) {
            Ok(())
        } else {
            Err(Errno(libc::EXDEV))
        }
    }

    /// Attributes.
    ///
    /// # Errors
    /// As `fstat`.
    pub fn getattr(&self) -> Result<InodeAttr> {
        self.mount().look(|session| attr_of(session, self.key()))
    }
}

/// Checks whether a pinned inode may be opened with `flags`; counts the open, once.
fn admit<T>(
    mount: &Mount,
    session: &Session,
    node: &Node,
    flags: OpenFlags,
    cred: &Cred,
    counted: &mut bool,
) -> OpResult<(), T> {
    let key = node.key();
    let body = node.inode.read();
    let attr = &body.attr;
    match attr.kind() {
        FileKind::Directory if flags.write || flags.truncate => {
            return Err(Errno(libc::EISDIR).into());
        }
        FileKind::Symlink => return Err(Errno(libc::ELOOP).into()),
        _ => {}
    }
    if session.options.check_permissions {
        let want = if flags.read { READ } else { 0 } | if flags.write || flags.truncate { WRITE } else { 0 };
        may(attr, cred, want)?;
    }
    // Under the inode's lock, where an unlink decides whether it is open.
    if !*counted {
        if attr.nlink == 0 && !mount.opens.open_again(key) {
            return Err(Errno(libc::ENOENT).into());
        }
        if attr.nlink > 0 {
            mount.opens.open(key);
        }
        *counted = true;
    }
    Ok(())
}

fn log_forget(session: &Session, node: &Arc<Node>) -> OpResult<(), ()> {
    let key = node.key();
    let Some(_pin) = session.leases.try_pin_node(node, LeaseMode::Write, Use::Own) else {
        return Ok(());
    };
    let op = LogOp::Forget { key };
    let slot = begin(session, &op)?;
    let mut body = node.inode.write();
    // Opened again, or unlinked between the close and here by a thread that saw it closed.
    if body.dead || session.opens.is_open(key) {
        return Ok(());
    }
    let committed = commit(session, slot, &op, EntryFlags::empty(), session.now_ns())?;
    body.dead = true;
    body.logged(committed.seqs.last);
    drop(body);
    session.leases.bury(key, committed.seqs.last);
    Ok(())
}

impl Drop for Description {
    fn drop(&mut self) {
        if !self.mount.opens.close(self.key) || self.mount.is_unmounted() {
            return;
        }
        match self.first.get() {
            Some((session, node)) if session.is_live() => closed(session, Some(node), self.key),
            _ => {
                let session = self.mount.session();
                // The next session does not name it among the inodes that it holds.
                if session.is_live() {
                    closed(&session, session.node(self.key).as_ref(), self.key);
                }
            }
        }
    }
}

/// Handles the last close of an inode.
fn closed(session: &Session, node: Option<&Arc<Node>>, key: InodeKey) {
    if let Some(node) = node {
        let (mode, settled) = node.settled();
        let named = node.inode.is_surely_named();
        if mode == Some(LeaseMode::Write) {
            // Failures here lose an access time, or keep a file until the end of the session: a close does
            // not report them.
            if !named && node.inode.attr().nlink == 0 {
                let _ = log_forget(session, node);
            } else if node.atime_moved.load(Ordering::Relaxed)
                && node.atime_moved.swap(false, Ordering::Relaxed)
            {
                let _ = log_atime(session, node);
            }
        }
        // A held lease that stays reports whether the file is open when it is given back.
        if named && settled && mode.is_some() {
            return;
        }
    }
    session.leases.tell(Event::Closed(key));
}
